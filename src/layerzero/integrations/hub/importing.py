"""Imports a build through `kernels`, without disturbing other kernels or operations of torch.

A compiled build is first imported in a child process: if it crashes, or registers operations in a
namespace that is taken, this process is unharmed. The result is kept beside the copy.
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

from ...files.reading import FileLimits, no_panic, read_json
from ...files.sealed import replace_file
from ...machine.loading import LOAD_ERRORS, is_importable
from ...spec.errors import DataError
from ...spec.reason import FOREIGN_ERRORS
from .content import Content
from .errors import HubError, NamespaceClash
from .library import require_kernels
from .variants import compiled_files

# registrations are found by comparing before and after
_importing = threading.RLock()
_REGISTERED = re.compile(r"^debug: registered at (.*):\d+$", re.MULTILINE)
LIMITS = FileLimits(size=1 << 20)                  # of metadata.json
_TORCH = str(Path(torch.__file__).parent) + os.sep


def import_build(build: Path, dependencies: dict[str, Path],
                 backend: str | None = None) -> ModuleType:
    """Import the module in `build`, a private copy, once; `dependencies` were imported before."""
    with _importing:
        loaded = _loaded_module(build)
        if loaded is not None:
            return loaded
        others = {metadata_of(folder).id for folder in dependencies.values()}
        if compiled_files(build):
            _check_trial(build, _trial_import(build, dependencies, backend), others)
        before = _operations()
        try:
            module = _import(build, dependencies, backend)
        except LOAD_ERRORS as e:               # a stranger's module may raise anything
            # kernels does so too, but not for all of them
            sys.modules.pop(metadata_of(build).id, None)
            raise HubError(
                f"{build.name} of {metadata_of(build).name} cannot be imported: {_error_text(e)}; "
                "lz hub explain shows why this build was chosen") from e
        _check_namespaces(build, namespaces_since(before) - others)
        return module


def _import(build: Path, dependencies: dict[str, Path], backend: str | None) -> ModuleType:
    """Import through kernels, which checks the metadata; only checked dependencies resolve."""
    from kernels._rust import KernelDependency, KernelVersion
    from kernels.hf_hub import _get_hf_api
    from kernels.load import get_kernel_with_resolver
    from kernels.resolver import LocalKernel
    from kernels.validate import AllValidator, ArchValidator, default_metadata_validators

    class Resolver:
        def resolve(self, *, api: Any, backend: str | None, kernel: Any) -> Any:
            folder = build if kernel.repo_id == str(build) else dependencies[dependency_key(kernel)]
            return LocalKernel(variant_path=folder, metadata=metadata_of(folder))

    with _without_bytecode():
        return get_kernel_with_resolver(
            api=_get_hf_api(), backend=backend,
            kernel=KernelDependency(str(build), KernelVersion.Version(0)), resolver=Resolver(),
            metadata_validator=AllValidator([*default_metadata_validators(), ArchValidator()]))


@contextmanager
def _without_bytecode() -> Iterator[None]:
    """Write no bytecode into the checked copy: a later import would prefer it."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def dependency_key(dependency: Any) -> str:
    """Return name@version or name@revision of a kernel that another one needs."""
    version = dependency.version
    which = version.version if hasattr(version, "version") else version.revision
    return f"{dependency.repo_id}@{which}"


def home_of(module: ModuleType) -> Path:
    """Return the folder of the build that a module was imported from."""
    folder = Path(str(module.__file__)).parent
    return folder if (folder / "metadata.json").is_file() else folder.parent


def _loaded_module(build: Path) -> ModuleType | None:
    """Return the loaded kernel with this id; NamespaceClash if it is another one."""
    from kernels import get_loaded_kernels

    kernel_id = metadata_of(build).id
    for loaded in get_loaded_kernels():
        if loaded.metadata.id == kernel_id:
            # ours, or in the cache of kernels, where files are links
            folder = home_of(loaded.module)
            if (folder == build
                    or Content.of(folder, Path(folder.anchor)) == Content.of(build, build)):
                return loaded.module
            raise NamespaceClash(
                f"{build.name}: its id {kernel_id!r} is that of another kernel, loaded from "
                f"{folder}; the id must be unique for each version: ask its author for a build "
                "that is")
    # kernels imports it under its id
    if kernel_id in sys.modules or is_importable(kernel_id):
        raise NamespaceClash(
            f"{build.name}: its id {kernel_id!r} is the name of a Python module; wanted is one of "
            "its own, such as _norm_9f2c1ab")
    return None


def _check_namespaces(build: Path, namespaces: set[str]) -> None:
    """Raise unless the operations are in the namespace named like the kernel's unique id."""
    foreign = namespaces - {metadata_of(build).id}
    if foreign:
        raise NamespaceClash(
            f"{build.name}: wanted its torch operations in torch.ops.{metadata_of(build).id}, got "
            f"{', '.join(f'torch.ops.{n}' for n in sorted(foreign))}; another version of it would "
            "clash there")


def _check_trial(build: Path, trial: dict[str, Any], others: set[str]) -> None:
    """Raise for what the import in a child process has shown."""
    if trial["error"]:
        raise HubError(
            f"{build.name} of {metadata_of(build).name} cannot be imported: {trial['error']}; "
            "lz hub explain shows why this build was chosen")
    namespaces = set(trial["namespaces"]) - others
    _check_namespaces(build, namespaces)
    taken = {name.partition("::")[0] for name in _operations()} & namespaces
    if taken:
        raise NamespaceClash(
            f"{build.name}: torch.ops.{min(taken)} is there already, from another library or "
            "version; only one of them can be in a process")


def metadata_of(build: Path) -> Any:
    require_kernels()
    from kernels import Metadata
    path = build / "metadata.json"
    try:
        read_json(path, "the metadata of a kernel", limits=LIMITS)
        metadata = no_panic(Metadata.read_from_file)(path)
    except FOREIGN_ERRORS as e:
        raise HubError(f"{path}: wanted the metadata of a kernel; {e}") from e
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,200}", metadata.id):
        raise HubError(f"{path}: wanted an id that is a name in Python, got {metadata.id!r:.80}")
    return metadata


# Operations that an import registers with torch

def _operations() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


def namespaces_since(before: set[str]) -> set[str]:
    """Return the namespaces with new operations, without those of torch's own parts."""
    return {name.partition("::")[0] for name in _operations() - before if not _is_of_torch(name)}


def _is_of_torch(name: str) -> bool:
    from torch._library.custom_ops import OPDEFS

    custom = OPDEFS.get(name)                  # torch registers all of these from one line
    if custom is not None:
        file = custom._init_fn.__code__.co_filename
    else:
        match = _REGISTERED.search(torch._C._dispatch_dump(name))
        file = match[1] if match else ""
    return file.startswith(_TORCH) or "/pytorch/" in file


# The child process

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from layerzero.integrations.hub import importing
print("\\n" + json.dumps(importing.report(*json.loads(sys.argv[2]))))
"""


def report(build: str, dependencies: dict[str, str], backend: str | None) -> dict[str, Any]:
    """Import in the child process; returns the new namespaces, or the error."""
    before = _operations()
    try:
        _import(Path(build), {k: Path(v) for k, v in dependencies.items()}, backend)
    except LOAD_ERRORS as e:
        return {"namespaces": [], "error": _error_text(e)}
    return {"namespaces": sorted(namespaces_since(before)), "error": ""}


def _trial_import(build: Path, dependencies: dict[str, Path],
                  backend: str | None) -> dict[str, Any]:
    """Import in a child process, once per torch and Python; returns namespaces or the error."""
    record = build.parent / f"seen-{torch.__version__}-{sys.implementation.cache_tag}.json"
    try:
        trial = read_json(record, "what an import in a process of its own has shown")
        if (isinstance(trial, dict) and isinstance(trial.get("error"), str)
            and _are_strings(trial.get("namespaces"))):
            return trial
    except DataError:                          # missing or damaged: the import is tried again
        pass
    arguments = json.dumps([str(build), {k: str(v) for k, v in dependencies.items()}, backend])
    try:
        done = subprocess.run([sys.executable, "-c", _CHILD, json.dumps(sys.path), arguments],
                              capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"namespaces": [], "error": "importing it took more than 300 seconds"}
    if done.returncode < 0:
        return {"namespaces": [], "error": f"importing it was killed by signal {-done.returncode}"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"namespaces": [], "error": lines[-1][:300] if lines
                else f"exit status {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not result["error"]:                    # an error may be fixed: it is tried again
        replace_file(record, json.dumps(result).encode())
    return result


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
