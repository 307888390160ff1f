"""What a compiled file asks of the machine it is loaded on, read from the file itself; nothing is loaded.

Only what decides whether it loads: the processor, the Python it was built for, the versions of the symbols it wants
from the C and C++ runtimes, the functions it wants from Python.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import platform
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}
_MOST_VERSIONS = 1 << 16
_DYNSYM, _VERDEF, _VERNEED = 11, 0x6FFFFFFD, 0x6FFFFFFE
# The newest versions that manylinux_2_28 has, which the Kernel Hub demands of what it hosts.
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_VERSION = re.compile(r"([A-Z]+)_(\d+(?:\.\d+)*)")
_TAGGED = re.compile(r"\.(cpython-\d+[^.]*|abi3|cp\d+-[^.]*)\.so$")


@dataclass(frozen=True)
class Binary:
    machine: str
    needs: dict[str, frozenset[str]]           # library -> versions of symbols wanted from it
    defines: frozenset[str]                    # versions of symbols it offers
    wants: frozenset[str]                      # symbols that others must bring


def read(path: Path) -> Binary:
    """ValueError for what is no 64-bit little-endian ELF file, or a damaged one."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _read(data)


def _read(data: mmap.mmap) -> Binary:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    try:
        machine, = struct.unpack_from("<H", data, 18)
        sections = list(_sections(data))
        needs: dict[str, frozenset[str]] = {}
        defines: set[str] = set()
        wants: set[str] = set()
        for kind, at, size, link, count in sections:
            if kind not in (_DYNSYM, _VERDEF, _VERNEED):
                continue
            text = _Strings(data, sections[link][1], sections[link][2])
            if kind == _VERNEED:
                needs.update(_needed(data, at, count, text))
            elif kind == _VERDEF:
                defines.update(_defined(data, at, count, text))
            else:
                wants.update(_undefined(data, at, size, text))
        return Binary(_MACHINES.get(machine, f"machine {machine}"), needs, frozenset(defines), frozenset(wants))
    except (struct.error, IndexError, OverflowError) as e:
        raise ValueError(f"a damaged ELF file: {e}") from e


@dataclass(frozen=True)
class _Strings:
    data: mmap.mmap
    at: int
    size: int

    def __getitem__(self, offset: int) -> str:
        start = self.at + offset
        end = self.data.find(b"\0", start, self.at + self.size)
        if not 0 <= offset < self.size or end < 0:
            raise IndexError(f"no name at {offset}")
        return self.data[start:end].decode("utf-8", "replace")


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int, int, int, int]]:
    """Type, offset, size, linked section, count."""
    table, = struct.unpack_from("<Q", data, 40)
    each, count = struct.unpack_from("<HH", data, 58)
    for i in range(count):
        kind, _, _, at, size, link, info = struct.unpack_from("<IQQQQII", data, table + i * each + 4)
        yield kind, at, size, link, info


def _needed(data: mmap.mmap, at: int, count: int, text: _Strings) -> Iterator[tuple[str, frozenset[str]]]:
    told = 0
    for _ in range(count):
        _, entries, library, first, after = struct.unpack_from("<HHIII", data, at)
        names, where = set(), at + first
        told += entries
        if told > _MOST_VERSIONS:              # records may lie in each other: a small file could ask for hours
            raise IndexError(f"{told} versions of symbols")
        for _ in range(entries):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, where)
            names.add(text[name])
            where += step
        yield text[library], frozenset(names)
        if not after:                          # the last one, whatever the count says
            return
        at += after


def _defined(data: mmap.mmap, at: int, count: int, text: _Strings) -> Iterator[str]:
    for _ in range(count):
        _, _, _, _, _, first, after = struct.unpack_from("<HHHHIII", data, at)
        name, = struct.unpack_from("<I", data, at + first)
        yield text[name]
        if not after:
            return
        at += after


def _undefined(data: mmap.mmap, at: int, size: int, text: _Strings) -> Iterator[str]:
    for offset in range(at, at + size, 24):
        name, _, _, section = struct.unpack_from("<IBBH", data, offset)
        if name and section == 0:
            yield text[name]


def obstacles(path: Path) -> Iterator[str]:
    """Why this Python on this machine could not load the file; nothing if it could."""
    tag = _TAGGED.search(path.name)
    if tag is not None and tag[0] not in importlib.machinery.EXTENSION_SUFFIXES:
        ours = ", ".join(importlib.machinery.EXTENSION_SUFFIXES)
        yield f"{path.name} was built for {tag[1]}, this Python loads {ours}"
    try:
        binary = read(path)
    except ValueError as e:
        yield f"{path.name} is {e}"
        return
    if binary.machine != platform.machine():
        yield f"{path.name} was built for {binary.machine}, this machine is {platform.machine()}"
        return
    for library, versions in sorted(binary.needs.items()):
        offered = _offered(library)
        if offered is not None and (missing := versions - offered):
            yield f"{path.name} needs {', '.join(sorted(missing))}, which {library} of this machine does not have"
    python = [s for s in binary.wants if s.startswith(("Py", "_Py")) and not hasattr(ctypes.pythonapi, s)]
    if python:
        yield f"{path.name} needs {', '.join(sorted(python)[:4])}, which this Python does not have"


def not_portable(path: Path) -> str:
    """What of the file goes beyond manylinux_2_28 and the stable ABI of Python; "" if nothing does."""
    if "cpython-" in path.name:
        return f"{path.name} is for one version of Python, not for the stable ABI (abi3)"
    try:
        binary = read(path)
    except ValueError as e:
        return f"{path.name} is {e}"
    beyond = [name for versions in binary.needs.values() for name in versions
              if (found := _VERSION.fullmatch(name)) and found[1] in MANYLINUX_2_28
              and tuple(map(int, found[2].split("."))) > MANYLINUX_2_28[found[1]]]
    return f"{path.name} needs {', '.join(sorted(beyond))}, beyond manylinux_2_28" if beyond else ""


@lru_cache(maxsize=None)
def _offered(library: str) -> frozenset[str] | None:
    """The versions that a library in this process defines; None if it is not in it, or says nothing."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name = line.split(maxsplit=5)[-1]
        if name.rpartition("/")[2] == library and name.startswith("/"):
            try:
                return read(Path(name)).defines or None
            except (OSError, ValueError):
                return None
    return None
