"""Which build of a kernel this is: what must be the same for a measurement or a proof of it to hold.

For a library its version and the list of its files; for what is written here the source. Torch, Triton, CUDA and the
driver are not in it: they belong to the device (`Device.signature`).
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
from .loading import findable, installed_version

_SOURCES = (".py", ".c", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_LIBRARY_FILES = (".py", ".so", ".pyd", ".dll", ".dylib")


def build_of(kernel: Kernel) -> str:
    """A short text that is equal for equal builds; "" where the library is not here. Found out once per process."""
    found = _builds.get(kernel)
    if found is None:
        found = _builds[kernel] = _build(kernel)
    return found


_builds: WeakKeyDictionary[Kernel, str] = WeakKeyDictionary()


def _build(kernel: Kernel) -> str:
    own = _source_of(kernel)
    top = kernel.package.partition(".")[0]
    if not top or top == _written_in(kernel.load).partition(".")[0]:
        return f"source#{own}"
    if not findable(kernel.package):
        return ""
    distribution = kernel.distribution or top.replace("_", "-")
    return f"{distribution}=={installed_version(distribution) or 'unknown'}#{_digest(own, _files(distribution, top))}"


# A library

@lru_cache(maxsize=None)
def _files(distribution: str, package: str) -> str:
    """The list of a library's files with their hashes, as its installer wrote it down; else what is in its folder."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return _listing(package)
    record = found.read_text("RECORD")
    if not record or _is_editable(found):
        return _listing(package)
    return _digest(*sorted(line for line in record.splitlines() if "__pycache__" not in line))


def _is_editable(found: importlib.metadata.Distribution) -> bool:
    try:
        said = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(isinstance(said, dict) and said.get("dir_info", {}).get("editable"))


def _listing(package: str) -> str:
    """Names, sizes and times of the files of a package: one that is being worked on has no list of hashes."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return ""
    if spec is None:
        return ""
    folders = spec.submodule_search_locations or ()
    paths = [Path(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names]
    if not folders and spec.origin:
        paths = [Path(spec.origin)]
    told = [(str(p), stat.st_size, stat.st_mtime_ns) for p in sorted(paths)
            if p.suffix in _LIBRARY_FILES and (stat := _stat(p)) is not None]
    return _digest(repr(told))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


# What is written here, or in a plugin

def _source_of(kernel: Kernel) -> str:
    """A hash of the file that declares the kernel, and of those of its package that it takes functions from."""
    names = [_written_in(kernel.load)]
    if kernel.backend == "reference":
        names.append(_written_in(kernel.op.reference))
    if all(_file_of(name) for name in names):
        return _digest(*(_content(name) for name in sorted(set().union(*map(_used_by, names)))))
    return _digest(*_code(kernel.load))        # typed at a prompt: there is no file


def sources_of(function: Callable[..., Any]) -> str:
    """A hash of the file a function is written in, and of those of its package that it takes functions from."""
    name = _written_in(function)
    if _file_of(name):
        return _digest(*(_content(used) for used in sorted(_used_by(name))))
    return _digest(*_code(function))


def _written_in(load: Callable[..., Any]) -> str:
    while isinstance(load, partial):
        load = load.func
    return str(getattr(load, "__module__", None) or type(load).__module__)


@lru_cache(maxsize=None)
def _used_by(name: str) -> frozenset[str]:
    """The modules of the same package that `name` imports, and theirs, and itself.

    They are read from the source: what a process happens to have imported must not change a build. Those of
    spec/ are left out: they hold declarations, which decide no speed.
    """
    seen, ahead = {name}, [name]
    while ahead:
        found = {m for m in _imported_by(ahead.pop()) if not m.startswith("layerzero.spec") and _file_of(m)}
        ahead += found - seen
        seen |= found
    return frozenset(seen)


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.M)


@lru_cache(maxsize=None)
def _imported_by(name: str) -> frozenset[str]:
    """The names in the same package that a module's import statements could mean; not all of them are modules."""
    path, top = _file_of(name), name.partition(".")[0]
    if path is None:
        return frozenset()
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for source, names, plain in _IMPORT.findall(path.read_text("utf-8", "replace")):
        listed = [part.split()[0] for part in re.sub(r"#.*|[()]", "", names or plain).split(",") if part.strip()]
        if not source:
            found.update(listed)
            continue
        level = len(source) - len(source.lstrip("."))
        base = ".".join([*folder.split(".")[:len(folder.split(".")) - level + 1] * bool(level),
                         *filter(None, [source[level:]])])
        found.update((base, *(f"{base}.{one}" for one in listed)))
    return frozenset(m for m in found if m.partition(".")[0] == top)


def _file_of(name: str) -> Path | None:
    """The file of a module, imported or not; None if there is none of that name."""
    found = getattr(sys.modules.get(name), "__file__", None)
    if isinstance(found, str):
        return Path(found) if os.path.exists(found) else None
    folder, _, last = name.rpartition(".")
    above = _file_of(folder) if folder else None
    if above is None or above.name != "__init__.py":
        return None
    here = above.parent / last
    return next((p for p in (here / "__init__.py", here.with_suffix(".py")) if p.exists()), None)


@lru_cache(maxsize=None)
def _content(name: str) -> str:
    """A hash of a module's file; of a package, of every source in its folder: some are imported only on loading."""
    path = _file_of(name)
    assert path is not None
    files = path.parent.iterdir() if path.name == "__init__.py" else (path,)
    return _digest(*(p.read_bytes() for p in sorted(files) if p.suffix in _SOURCES))


def _code(load: Callable[..., Any]) -> Iterator[bytes]:
    while isinstance(load, partial):
        load = load.func
    code = getattr(load, "__code__", None)
    yield marshal.dumps(code) if isinstance(code, CodeType) else repr(load).encode()


def _digest(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:16]
