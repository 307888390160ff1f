"""What lz.patch did to a model, what it left and why, and which kernels serve it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ...operate import recording
from ...operate.inspection import stats
from ...spec.call import TensorSpec
from ...spec.display import Cells, Displayed
from ...spec.errors import ConfigError


@dataclass(frozen=True)
class ModuleRow:
    """Modules alike: their path with * for a number, what they are, who computes them now."""

    path: str
    # one of lz.patch's kinds, or the class of what was left
    kind: str
    op: str                                    # several: with commas; "" for what was left
    count: int
    why: str = ""                              # why it was left, or that it was patched before

    @property
    def patched(self) -> bool:
        return bool(self.op)

    @property
    def computed_by(self) -> str:
        return ", ".join(f"lz.{op}" for op in self.op.split(", ")) if self.op else "left"


@dataclass(frozen=True)
class ServedCalls:
    """Calls of one op that one kernel served."""

    op: str
    kernel: str
    calls: int
    example: str = ""                          # the sizes of the first of them


@dataclass(frozen=True, repr=False)
class ModelExplanation(Displayed):
    """Lists the kernels that served; `note` says whose calls these are."""

    rows: tuple[ServedCalls, ...]
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {"note": self.note, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        cells = [(r.op, r.kernel, str(r.calls), r.example) for r in self.rows]
        return "\n".join([self.note, *aligned(("op", "kernel", "calls", "for example"), cells)])


@dataclass(frozen=True, repr=False)
class PatchReport(Displayed):
    """Printed it is a table; `to_dict` is for machines; `explain` names the kernels."""

    model: str                                 # its class
    rows: tuple[ModuleRow, ...]
    changed: int                               # modules that this call patched
    notes: tuple[str, ...] = ()
    _model: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _before: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False,
                                                     compare=False)

    @property
    def patched(self) -> tuple[ModuleRow, ...]:
        return tuple(row for row in self.rows if row.patched)

    @property
    def left(self) -> tuple[ModuleRow, ...]:
        return tuple(row for row in self.rows if not row.patched)

    def counts(self) -> dict[str, int]:
        """Returns how many modules of each kind lz computes."""
        totals: Counter[str] = Counter()
        for row in self.patched:
            totals[row.kind] += row.count
        return dict(totals)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "changed": self.changed, "counts": self.counts(),
                "rows": [{**asdict(row), "patched": row.patched} for row in self.rows],
                "notes": list(self.notes)}

    def _cells(self) -> Cells:
        return ("module", "kind", "by", "count", "why"), [
            (row.path, row.kind, row.computed_by, row.count, row.why)
            for row in self.rows]

    def __str__(self) -> str:
        served = ", ".join(f"{n} {kind}" for kind, n in self.counts().items()) or "nothing"
        cells = [(row.path, row.kind, row.computed_by, str(row.count), row.why)
                 for row in self.rows]
        return "\n".join([f"{self.model}: {served}; {self.changed} modules changed",
                          *aligned(("module", "kind", "by", "count", "why"), cells), *self.notes])

    def explain(self, *args: Any, **kwargs: Any) -> ModelExplanation:
        """Returns the kernels that serve a call of the model with these arguments, which is made;
        without arguments, those that served since the model was patched."""
        if not args and not kwargs:
            rows = [ServedCalls(op, kernel, n - self._before.get(op, {}).get(kernel, 0))
                    for op, kernels in stats().calls.items() for kernel, n in kernels.items()]
            return ModelExplanation(tuple(r for r in rows if r.calls > 0),
                               "calls of this process since the model was patched, of other models "
                               "too")
        model = self._model() if self._model is not None else None
        if model is None:
            raise ConfigError(
                "explain wants to call the model, which is gone; keep it, or patch it again")
        with recording.recording() as recorder:
            model(*args, **kwargs)
        served: dict[tuple[str, str], ServedCalls] = {}
        for call in recorder.calls:
            kernel = call.name.rpartition(" ")[2]
            sizes = next((f"{'x'.join(map(str, a.shape))} {a.dtype}"
                          for a in call.arguments.values()
                          if isinstance(a, TensorSpec)), "")
            known = served.get((call.op, kernel))
            served[call.op, kernel] = ServedCalls(call.op, kernel,
                                                  call.count + (known.calls if known else 0),
                                            known.example if known else sizes)
        return ModelExplanation(tuple(served.values()), f"one call of {self.model}")


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
