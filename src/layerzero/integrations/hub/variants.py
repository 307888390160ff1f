"""Which builds of a repository fit this machine: a verdict with its reason for each folder of
build/.

`kernels` judges and orders them by the folder's name (torch, C++ ABI, CUDA, processor, system);
here their compiled files are checked as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import elf
from .content import inside
from .errors import HubError, UnsafePath

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Accepted:
    variant: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.variant}: accepted{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class Rejected:
    variant: str
    reason: str

    def __str__(self) -> str:
        return f"{self.variant}: rejected, {self.reason}"


Verdict = Accepted | Rejected


def judge(build: Path, root: Path, backend: str | None = None,
          portable: bool = False) -> tuple[Verdict, ...]:
    """Judge each folder in `build`, best first; `portable` demands manylinux_2_28 and abi3."""
    from kernels.variants import VariantAccepted, parse_variant, resolve_variants

    parsed: list[Any] = []
    unknown: list[Verdict] = []
    for folder in sorted(p for p in build.iterdir() if p.is_dir()):
        try:
            if not _NAME.fullmatch(folder.name):
                raise ValueError(f"{folder.name!r} is no name of a build")
            inside(folder, root)
            parsed.append(parse_variant(folder.name))
        except UnsafePath as e:
            unknown.append(Rejected(folder.name, str(e)))
        except ValueError as e:
            unknown.append(Rejected(folder.name, f"unknown kind of build: {e}"))
    try:
        _, trace = resolve_variants(parsed, backend)
    except (RuntimeError, ValueError) as e:
        raise HubError(f"backend={backend!r} is not what this torch was built for: {e}") from e
    accepted: list[Verdict] = []
    rejected: list[Verdict] = []
    for decision in trace:
        name = decision.variant.variant_str
        if not isinstance(decision, VariantAccepted):
            rejected.append(Rejected(name, decision.reason))
        elif problem := next(_problems(build / name, portable), ""):
            rejected.append(Rejected(name, problem))
        else:
            accepted.append(Accepted(name, next(_portability_notes(build / name), "")))
    return (*accepted, *rejected, *unknown)


def _problems(folder: Path, portable: bool) -> Iterator[str]:
    if not (folder / "metadata.json").is_file():
        yield "it has no metadata.json"
    for path in compiled_files(folder):
        yield from elf.load_problems(path)
    if portable:
        yield from _portability_notes(folder)


def _portability_notes(folder: Path) -> Iterator[str]:
    yield from (note for path in compiled_files(folder) if (note := elf.portability_problem(path)))


def compiled_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.so") if p.is_file())
