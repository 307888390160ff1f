"""The compatibility matrix: what the kernels of each library declare that they need, against what
this interpreter holds, and against the interpreter that policy gives them for a worker.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..machine import loading
from ..selection.isolation import Isolation, parse
from ..spec.codec import Record
from ..spec.display import Cells, Displayed
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ..world import snapshot as worlds
from ..world.registry import isolation

FITS, ABSENT, NONE = "fits", "not installed", "-"
IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class MatrixRow(Record):
    """The kernels of one library that declare the same versions."""

    library: str
    kernels: int
    declared: str                              # "flash-attn >=2.5,<3; torch >=2.4"
    installed: str                             # "flash-attn 2.8.3; torch 2.8.0"
    verdict: str                               # fits | not installed | what conflicts
    worker: str = NONE                         # interpreter of its worker
    worker_installed: str = NONE
    worker_verdict: str = NONE

    @property
    def ok(self) -> bool:
        """Returns whether what is installed can be used somewhere; absence is no conflict."""
        return FITS in (self.verdict, self.worker_verdict) or (
            self.verdict == ABSENT and self.worker_verdict in (NONE, ABSENT))


@dataclass(frozen=True, repr=False)
class Matrix(Displayed, Record, json="ok rows versions"):
    """Declared against found, for every library that a kernel needs."""

    rows: tuple[MatrixRow, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def _headline(self) -> str:
        wrong = [row.library for row in self.rows if not row.ok]
        return (f"{len(self.rows)} libraries, "
                + (f"{len(wrong)} in conflict: {', '.join(wrong)}" if wrong else "no conflict"))

    def _cells(self) -> Cells:
        return ("", "library", "kernels", "declared", "installed", "verdict", "worker",
                "installed there", "verdict there"), [
            ("ok" if r.ok else "!!", r.library, r.kernels, r.declared, r.installed, r.verdict,
             r.worker, r.worker_installed, r.worker_verdict) for r in self.rows]

    def __str__(self) -> str:
        head, cells = self._cells()
        lines = [tuple(map(str, line)) for line in (head, *cells)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join([self._headline(), *(
            "  ".join(word.ljust(n) for word, n in zip(line, widths)).rstrip() for line in lines)])


def matrix(deep: bool = False) -> Matrix:
    """Compare what kernels declare with what is installed, here and where their workers run. `deep`
    imports each library as well, in a process of its own."""
    world = worlds.current()
    entries = parse(world.policy.setting("isolation"))
    groups: dict[tuple[str, str, str], list[Kernel]] = {}
    for kernel in world.catalog.kernels:
        if kernel.package and kernel.package != "torch":
            groups.setdefault((loading.distribution_of(kernel), kernel.version, kernel.torch),
                              []).append(kernel)
    imported: dict[tuple[str, str], str] = {}

    def row(name: str, version: str, for_torch: str, kernels: list[Kernel]) -> MatrixRow:
        first = kernels[0]
        failed = next((world.unloadable[k.id] for k in kernels if k.id in world.unloadable), None)
        entry = next((e for e in entries if e.covers(first.id)), None)
        versions, verdict = _compare(first, name, "", failed)
        if deep and verdict == FITS:
            key = "", first.package
            verdict = imported.get(key) or imported.setdefault(key, _try_import(*key))
        wanted = f"{name} {version}".strip() + (f"; torch {for_torch}" if for_torch else "")
        there = _in_worker(first, name, entry, deep, imported) if entry else (NONE,) * 3
        return MatrixRow(name, len(kernels), wanted, versions, verdict, *there)

    return Matrix(tuple(row(*key, kernels) for key, kernels in sorted(groups.items())),
                  {"torch": torch.__version__, "isolation": world.policy.setting("isolation")})


def _in_worker(kernel: Kernel, name: str, entry: Isolation, deep: bool,
               imported: dict[tuple[str, str], str]) -> tuple[str, str, str]:
    why = isolation.why_not_in_worker(kernel)
    if why:
        return entry.python or "this one", NONE, why
    versions, verdict = _compare(kernel, name, entry.python, None)
    if deep and verdict == FITS:
        key = entry.python, kernel.package
        verdict = imported.get(key) or imported.setdefault(key, _try_import(*key))
    return entry.python or "this one", versions, verdict


def _compare(kernel: Kernel, name: str, python: str, failed: Reason | None) -> tuple[str, str]:
    """Returns what an interpreter holds of a library, and whether the kernel may use it."""
    version = isolation.version_in(python, name)
    its_torch = isolation.version_in(python, "torch") if python else torch.__version__
    versions = "; ".join([f"{name} {version}" if version else f"{name} {ABSENT}",
                          *([f"torch {its_torch}"] * bool(kernel.torch or python))])
    if python == "" and version == "" and loading.is_importable(kernel.package):
        version = "0"                          # a package without metadata
    if not version:
        return versions, ABSENT
    for wanted, got, what in ((kernel.version, version, name), (kernel.torch, its_torch, "torch")):
        if wanted and got != "0" and not loading.satisfies(got, wanted):
            return versions, f"{Code.VERSION_CONFLICT.value}: needs {what} {wanted}"
    return versions, str(failed) if failed is not None else FITS


def _try_import(python: str, package: str) -> str:
    """Returns whether another process can import the package: its verdict."""
    if not python:
        reason = loading.import_in_subprocess(package)
        return FITS if reason is None else str(reason)
    try:
        done = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True,
                              timeout=IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{Code.IMPORT_FAILED.value}: {e}"[:300]
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return FITS if done.returncode == 0 else f"{Code.IMPORT_FAILED.value}: {last}"[:300]
