"""What a compiled file needs of the machine it is loaded on, read from the file itself; nothing is
loaded.

Only what decides whether it loads: the processor, the Python it was built for, the symbol versions
it needs of the C and C++ runtimes, the functions it needs of Python. pyelftools parses the file.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import NotHere

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64", "EM_RISCV": "riscv64",
             "EM_PPC64": "ppc64le",
             "EM_S390": "s390x"}
# Tables of a hostile file may overlap or repeat: a small file could ask for hours. An honest one
# needs about one read for four of its bytes.
_MIN_READS, _MAX_READS = 1 << 14, 1 << 21
_READ_SIZE = 64                                # bytes that count as one read
# What pyelftools runs into in a damaged file, besides its own ELFError.
_PARSE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError,
                 TypeError, ValueError)
# The newest versions that manylinux_2_28 has, which the Kernel Hub demands of what it hosts.
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_VERSION = re.compile(r"([A-Z]+)_(\d{1,9}(?:\.\d{1,9})*)")
_TAGGED = re.compile(r"\.(cpython-\d+[^.]*|abi3|cp\d+-[^.]*)\.so$")


@dataclass(frozen=True)
class Binary:
    machine: str
    needed_versions: dict[str, frozenset[str]] # library -> versions of the symbols it must have
    undefined: frozenset[str]                  # symbols that others must define


class NotElf(ValueError):
    """The file is no 64-bit little-endian ELF file, or a damaged one."""


class _BoundedFile(mmap.mmap):
    """A mapped file with a limit on the number of reads."""

    reads_left = 0

    def read(self, size: int | None = None) -> bytes:
        data = super().read(size)
        self.reads_left -= 1 + len(data) // _READ_SIZE
        if self.reads_left < 0:
            raise NotElf("its tables repeat or overlap")
        return data


@contextmanager
def _open_elf(path: Path) -> Iterator[Any]:
    """Open an ELFFile; NotElf if it cannot be read, here or in the `with` block."""
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as e:
        raise NotHere(
            f"{path.name} is a compiled file, which pyelftools reads; it is not installed ({e}): "
            "pip install 'layerzero[hub]'") from e
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise NotElf("not a 64-bit little-endian ELF file")
        with _BoundedFile(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            data.reads_left = min(_MIN_READS + len(data) // 2, _MAX_READS)
            try:
                yield ELFFile(data)
            except (ELFError, *_PARSE_ERRORS) as e:
                raise NotElf(f"a damaged ELF file: {e}") from e


def read(path: Path) -> Binary:
    """Read what a compiled file needs; NotElf if it is damaged or of another kind."""
    with _open_elf(path) as elf:
        machine = elf["e_machine"]
        undefined = frozenset(
            _checked(symbol.name) for section in elf.iter_sections("SHT_DYNSYM")
            for symbol in section.iter_symbols()
            if symbol["st_name"] and symbol["st_shndx"] == "SHN_UNDEF")
        return Binary(_MACHINES.get(machine, f"machine {machine}"), _needed_versions(elf),
                      undefined)


def read_needed_versions(path: Path) -> dict[str, frozenset[str]]:
    """Read only the symbol versions, which takes a fraction of the time of the symbols."""
    with _open_elf(path) as elf:
        return _needed_versions(elf)


def read_defined_versions(path: Path) -> frozenset[str]:
    """Read the versions of the symbols that a library defines."""
    with _open_elf(path) as elf:
        return frozenset(_checked(next(names).name)
                         for section in elf.iter_sections("SHT_GNU_verdef")
                         for _, names in section.iter_versions())


def _needed_versions(elf: Any) -> dict[str, frozenset[str]]:
    return {_checked(library.name): frozenset(_checked(version.name) for version in versions)
            for section in elf.iter_sections("SHT_GNU_verneed")
            for library, versions in section.iter_versions()}


def _checked(name: str | None) -> str:
    if not name:                               # pyelftools returns "" where no string is
        raise NotElf("a name is missing")
    return name


def load_problems(path: Path) -> Iterator[str]:
    """Yield why this Python on this machine cannot load the file."""
    tag = _TAGGED.search(path.name)
    if tag is not None and tag[0] not in importlib.machinery.EXTENSION_SUFFIXES:
        suffixes = ", ".join(importlib.machinery.EXTENSION_SUFFIXES)
        yield f"{path.name} was built for {tag[1]}, this Python loads {suffixes}"
    try:
        binary = read(path)
    except NotElf as e:
        yield f"{path.name} is {e}"
        return
    if binary.machine != platform.machine():
        yield f"{path.name} was built for {binary.machine}, this machine is {platform.machine()}"
        return
    for library, versions in sorted(binary.needed_versions.items()):
        defined = _loaded_library_versions(library)
        if defined is not None and (missing := versions - defined):
            yield (f"{path.name} needs {', '.join(sorted(missing))}, which {library} of this "
                   "machine does not have")
    python = [s for s in binary.undefined if s.startswith(("Py", "_Py"))
              and not hasattr(ctypes.pythonapi, s)]
    if python:
        yield f"{path.name} needs {', '.join(sorted(python)[:4])}, which this Python does not have"


def portability_problem(path: Path) -> str:
    """Return what of the file goes beyond manylinux_2_28 and the stable ABI; "" if nothing."""
    if "cpython-" in path.name:
        return f"{path.name} is for one version of Python, not for the stable ABI (abi3)"
    try:
        needed = read_needed_versions(path)
    except NotElf as e:
        return f"{path.name} is {e}"
    beyond = [name for versions in needed.values() for name in versions
              if (match := _VERSION.fullmatch(name)) and match[1] in MANYLINUX_2_28
              and tuple(map(int, match[2].split("."))) > MANYLINUX_2_28[match[1]]]
    return f"{path.name} needs {', '.join(sorted(beyond))}, beyond manylinux_2_28" if beyond else ""


@lru_cache(maxsize=None)
def _loaded_library_versions(library: str) -> frozenset[str] | None:
    """Return the versions a library in this process defines; None if not loaded or none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name = line.split(maxsplit=5)[-1]
        if name.rpartition("/")[2] == library and name.startswith("/"):
            try:
                return read_defined_versions(Path(name)) or None
            except (OSError, NotElf):
                return None
    return None
