"""The build of a kernel, as a short text: a measurement or a certificate holds for one build only.

A library's build is its version and the hashes of its files; our own kernels' is their source.
Torch, Triton, CUDA and the driver are not part of it: they belong to the device
(`Device.signature`).
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import marshal
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from ..spec.kernel import Kernel
from .loading import installed_version, is_importable

_SOURCES = (".py", ".c", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_LIBRARY_FILES = (".py", ".so", ".pyd", ".dll", ".dylib")


def build_of(kernel: Kernel) -> str:
    """Returns a text that is equal for equal builds, "" if not installed. Cached per process."""
    build = _builds.get(kernel)
    if build is None:
        build = _builds[kernel] = _compute_build(kernel)
    return build


_builds: WeakKeyDictionary[Kernel, str] = WeakKeyDictionary()


def _compute_build(kernel: Kernel) -> str:
    stated: Callable[[], str] | None = getattr(kernel.load, "build", None)
    if stated is not None:                     # a worker's library is not that of this process
        return stated()
    source = _kernel_source_digest(kernel)
    top = kernel.package.partition(".")[0]
    if not top or top == module_of(kernel.load).partition(".")[0]:
        return f"source#{source}"
    if not is_importable(kernel.package):
        return ""
    distribution = kernel.distribution or top.replace("_", "-")
    digest = _digest(source, _files_digest(distribution, top))
    return f"{distribution}=={installed_version(distribution) or 'unknown'}#{digest}"


# A library

@lru_cache(maxsize=None)
def _files_digest(distribution: str, package: str) -> str:
    """Hashes the installer's RECORD; without one, or if editable, the package folder."""
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _folder_digest(package)
    record = installed.read_text("RECORD")
    if not record or _is_editable(installed):
        return _folder_digest(package)
    return _digest(*sorted(line for line in record.splitlines() if "__pycache__" not in line))


def _is_editable(installed: importlib.metadata.Distribution) -> bool:
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(isinstance(origin, dict) and origin.get("dir_info", {}).get("editable"))


def _folder_digest(package: str) -> str:
    """Hashes names, sizes and times of a package's files, where no list of hashes exists."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return ""
    if spec is None:
        return ""
    folders = spec.submodule_search_locations or ()
    paths = [Path(parent, name) for folder in folders for parent, _, names in os.walk(folder)
             for name in names]
    if not folders and spec.origin:
        paths = [Path(spec.origin)]
    entries = [(str(p), stat.st_size, stat.st_mtime_ns) for p in sorted(paths)
               if p.suffix in _LIBRARY_FILES and (stat := _stat(p)) is not None]
    return _digest(repr(entries))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def files_digest(distribution: str, package: str) -> str:
    """Hashes what the installer recorded, and names, sizes and times of the files now."""
    recorded = _files_digest(distribution, package) if distribution else ""
    return _digest(recorded, _folder_digest(package))


# Our own source, or a plugin's

def _kernel_source_digest(kernel: Kernel) -> str:
    """Hashes the file that declares the kernel and the modules of its package that it imports."""
    names = [module_of(kernel.load)]
    if kernel.backend == "reference":
        names.append(module_of(kernel.op.reference))
    if all(_file_of(name) for name in names):
        return _digest(*(_content_digest(name)
                         for name in sorted(set().union(*map(_dependencies, names)))))
    return _digest(*_bytecode(kernel.load))    # defined at a prompt: there is no file


def source_digest(function: Callable[..., Any]) -> str:
    """Hashes the file that defines a function and the modules of its package that it imports."""
    name = module_of(function)
    if _file_of(name):
        return _digest(*(_content_digest(used) for used in sorted(_dependencies(name))))
    return _digest(*_bytecode(function))


def module_of(load: Callable[..., Any]) -> str:
    while isinstance(load, partial):
        load = load.func
    return str(getattr(load, "__module__", None) or type(load).__module__)


@lru_cache(maxsize=None)
def _dependencies(name: str) -> frozenset[str]:
    """Returns `name` and the modules of its package that it imports, directly or not.

    Imports are read from the source: what a process happens to have imported must not change a
    build. spec/ is left out: it holds declarations, which decide no speed.
    """
    seen, pending = {name}, [name]
    while pending:
        imports = _direct_imports(pending.pop())
        pending += imports - seen
        seen |= imports
    return frozenset(seen)


_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    r"|import[ \t]+([^\n]*))", re.M)


@lru_cache(maxsize=None)
def _direct_imports(name: str) -> frozenset[str]:
    """Returns the modules of the same package that a module imports itself, without spec/."""
    path, top = _file_of(name), name.partition(".")[0]
    if path is None:
        return frozenset()
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    modules: set[str] = set()
    for source, names, plain in _IMPORT.findall(path.read_text("utf-8", "replace")):
        listed = [part.split()[0] for part in re.sub(r"#.*|[()]", "", names or plain).split(",")
                  if part.strip()]
        if not source:
            modules.update(listed)
            continue
        level = len(source) - len(source.lstrip("."))
        base = ".".join([*folder.split(".")[:len(folder.split(".")) - level + 1] * bool(level),
                         *filter(None, [source[level:]])])
        modules.update((base, *(f"{base}.{item}" for item in listed)))
        # the packages on the way down: their kernels in C++ are read when they are first needed
        below = base.removeprefix(f"{folder}.").split(".") if base.startswith(f"{folder}.") else []
        modules.update(".".join((folder, *below[:i])) for i in range(1, len(below)))
    return frozenset(m for m in modules if m.partition(".")[0] == top
                     and not m.startswith("layerzero.spec") and _file_of(m))


def _file_of(name: str) -> Path | None:
    """Returns the file of a module, imported or not; None if there is no such module."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if isinstance(file, str):
        return Path(file) if os.path.exists(file) else None
    folder, _, last = name.rpartition(".")
    parent = _file_of(folder) if folder else None
    if parent is None or parent.name != "__init__.py":
        return None
    base = parent.parent / last
    return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.exists()), None)


@lru_cache(maxsize=None)
def _content_digest(name: str) -> str:
    """Hashes a module's file, or all sources in its folder: some are imported only on loading."""
    path = _file_of(name)
    assert path is not None
    files = path.parent.iterdir() if path.name == "__init__.py" else (path,)
    return _digest(*(p.read_bytes() for p in sorted(files) if p.suffix in _SOURCES))


def _bytecode(load: Callable[..., Any]) -> Iterator[bytes]:
    while isinstance(load, partial):
        load = load.func
    code = getattr(load, "__code__", None)
    yield marshal.dumps(code) if isinstance(code, CodeType) else repr(load).encode()


def _digest(*parts: str | bytes) -> str:
    sha256 = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        sha256.update(len(data).to_bytes(8, "little") + data)
    return sha256.hexdigest()[:16]
