"""Importing a build, through `kernels`, so that no other kernel and no operation of torch is disturbed.

A compiled build is first imported by a process of its own: one that crashes, or registers its operations in a
namespace that is taken, takes that process down and not this one. What was seen there is kept beside the copy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...machine.loading import LOAD_ERRORS, is_importable
from ...spec.errors import DataError
from ...spec.reading import Limits, no_panic, read_json
from ...spec.reason import FOREIGN_ERRORS
from ...spec.sealed import replace_file
from .content import Content
from .errors import HubError, NamespaceClash
from .variants import compiled

_importing = threading.RLock()                 # what a kernel registers is told by looking before and after
_REGISTERED = re.compile(r"^debug: registered at (.*):\d+$", re.MULTILINE)
LIMITS = Limits(size=1 << 20)                  # of metadata.json
_TORCH = str(Path(torch.__file__).parent) + os.sep


def import_build(build: Path, dependencies: dict[str, Path], backend: str | None = None) -> ModuleType:
    """The module in `build`, a private copy; the same one if it was imported before.

    `dependencies` are builds that were imported already, by `dependency_key`.
    """
    with _importing:
        loaded = _already(build)
        if loaded is not None:
            return loaded
        others = {metadata_of(folder).id for folder in dependencies.values()}
        if compiled(build):
            _check_seen(build, _seen_elsewhere(build, dependencies, backend), others)
        before = _operations()
        try:
            module = _import(build, dependencies, backend)
        except LOAD_ERRORS as e:               # a stranger's module may raise anything
            sys.modules.pop(metadata_of(build).id, None)       # kernels does so too, but not for all of them
            raise HubError(f"{build.name} of {metadata_of(build).name} cannot be imported: {_said(e)}; "
                           "lz hub explain shows why this build was chosen") from e
        _check_own(build, namespaces_since(before) - others)
        return module


def _import(build: Path, dependencies: dict[str, Path], backend: str | None) -> ModuleType:
    """Through kernels, with its own checks of the metadata; a dependency is one of the checked ones, or an error."""
    from kernels._rust import KernelDependency, KernelVersion
    from kernels.hf_hub import _get_hf_api
    from kernels.load import get_kernel_with_resolver
    from kernels.resolver import LocalKernel
    from kernels.validate import AllValidator, ArchValidator, default_metadata_validators

    class Checked:
        def resolve(self, *, api: Any, backend: str | None, kernel: Any) -> Any:
            folder = build if kernel.repo_id == str(build) else dependencies[dependency_key(kernel)]
            return LocalKernel(variant_path=folder, metadata=metadata_of(folder))

    with _without_bytecode():
        return get_kernel_with_resolver(
            api=_get_hf_api(), backend=backend, kernel=KernelDependency(str(build), KernelVersion.Version(0)),
            resolver=Checked(), metadata_validator=AllValidator([*default_metadata_validators(), ArchValidator()]))


@contextmanager
def _without_bytecode() -> Iterator[None]:
    """The checked copy stays as it is: no compiled file appears in it that a later import would prefer."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def dependency_key(wanted: Any) -> str:
    """name@version of a kernel that another one needs."""
    asked = wanted.version                     # a version or a revision
    return f"{wanted.repo_id}@{asked.version if hasattr(asked, 'version') else asked.revision}"


def home_of(module: ModuleType) -> Path:
    """The folder of the build that a module was imported from."""
    home = Path(str(module.__file__)).parent
    return home if (home / "metadata.json").is_file() else home.parent


def _already(build: Path) -> ModuleType | None:
    """The kernel with this id that the process has; NamespaceClash if it is another one."""
    from kernels import get_loaded_kernels

    wanted = metadata_of(build).id
    for loaded in get_loaded_kernels():
        if loaded.metadata.id == wanted:
            home = home_of(loaded.module)      # in the cache of kernels, where files are links, if it is another one
            if home == build or Content.of(home, Path(home.anchor)) == Content.of(build, build):
                return loaded.module
            raise NamespaceClash(f"{build.name}: its id {wanted!r} is that of another kernel, loaded from {home}; "
                                 "the id must be unique for each version: ask its author for a build that is")
    if wanted in sys.modules or is_importable(wanted):         # kernels imports it under its id
        raise NamespaceClash(f"{build.name}: its id {wanted!r} is the name of a Python module; wanted is one of its "
                             "own, such as _norm_9f2c1ab")
    return None


def _check_own(build: Path, found: set[str]) -> None:
    """Operations belong into the namespace that is named like the id, which is unique."""
    foreign = found - {metadata_of(build).id}
    if foreign:
        raise NamespaceClash(
            f"{build.name}: wanted its torch operations in torch.ops.{metadata_of(build).id}, got "
            f"{', '.join(f'torch.ops.{n}' for n in sorted(foreign))}; another version of it would clash there")


def _check_seen(build: Path, seen: dict[str, Any], others: set[str]) -> None:
    if seen["error"]:
        raise HubError(f"{build.name} of {metadata_of(build).name} cannot be imported: {seen['error']}; "
                       "lz hub explain shows why this build was chosen")
    found = set(seen["namespaces"]) - others
    _check_own(build, found)
    taken = {name.partition("::")[0] for name in _operations()} & found
    if taken:
        raise NamespaceClash(f"{build.name}: torch.ops.{min(taken)} is there already, from another library or version; "
                             "only one of them can be in a process")


def metadata_of(build: Path) -> Any:
    from kernels import Metadata
    path = build / "metadata.json"
    try:
        read_json(path, "the metadata of a kernel", limits=LIMITS)
        found = no_panic(Metadata.read_from_file)(path)
    except FOREIGN_ERRORS as e:
        raise HubError(f"{path}: wanted the metadata of a kernel; {e}") from e
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", found.id):
        raise HubError(f"{build / 'metadata.json'}: wanted an id that is a name in Python, got {found.id!r:.80}")
    return found


# What an import registered with torch

def _operations() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


def namespaces_since(before: set[str]) -> set[str]:
    """The namespaces that got operations which torch does not bring itself; parts of it register some when imported."""
    return {name.partition("::")[0] for name in _operations() - before if not _is_torchs(name)}


def _is_torchs(name: str) -> bool:
    from torch._library.custom_ops import OPDEFS

    custom = OPDEFS.get(name)                  # these are all registered from one line in torch
    if custom is not None:
        file = custom._init_fn.__code__.co_filename
    else:
        found = _REGISTERED.search(torch._C._dispatch_dump(name))
        file = found[1] if found else ""
    return file.startswith(_TORCH) or "/pytorch/" in file


# A process of its own

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from layerzero.integrations.hub import importing
print("\\n" + json.dumps(importing.report(*json.loads(sys.argv[2]))))
"""


def report(build: str, dependencies: dict[str, str], backend: str | None) -> dict[str, Any]:
    """Called in the child: import, and say what came of it."""
    before = _operations()
    try:
        _import(Path(build), {k: Path(v) for k, v in dependencies.items()}, backend)
    except LOAD_ERRORS as e:
        return {"namespaces": [], "error": _said(e)}
    return {"namespaces": sorted(namespaces_since(before)), "error": ""}


def _seen_elsewhere(build: Path, dependencies: dict[str, Path], backend: str | None) -> dict[str, Any]:
    note = build.parent / f"seen-{torch.__version__}-{sys.implementation.cache_tag}.json"
    try:
        found = read_json(note, "what an import in a process of its own has shown")
        if isinstance(found, dict) and isinstance(found.get("error"), str) and _are_texts(found.get("namespaces")):
            return found
    except DataError:                          # not there, or damaged: it is tried anew
        pass
    given = json.dumps([str(build), {k: str(v) for k, v in dependencies.items()}, backend])
    try:
        done = subprocess.run([sys.executable, "-c", _CHILD, json.dumps(sys.path), given], capture_output=True,
                              text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"namespaces": [], "error": "importing it took more than 300 seconds"}
    if done.returncode < 0:
        return {"namespaces": [], "error": f"importing it was killed by signal {-done.returncode}"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"namespaces": [], "error": lines[-1][:300] if lines else f"exit status {done.returncode}"}
    seen: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not seen["error"]:                      # a fault may be mended: it is asked again
        replace_file(note, json.dumps(seen).encode())
    return seen


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
