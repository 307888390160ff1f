"""The decision about one kind of call: which kernels to try, in order, and why not the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from .codec import Record
from .display import Cells, Displayed
from .reason import Reason, Value


class Transform(NamedTuple):
    """A change of the inputs before the kernel runs, and the bytes it moves."""

    kind: str                                  # contiguous | cast | layout
    target: str                                # the parameter, or the variant it is viewed as
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.target})"


# Sources of a score. All but the last are evidence, which a kernel needs to replace torch's own.
#
# on this machine, for this kind of call, in this mode
MEASURED = "measured"
INTERPOLATED = "interpolated"                  # from neighbouring kinds of call
# measured on this model of device, and part of this package
SHIPPED = "shipped"
LESS_WORK = "less work"                        # by construction, as the kernel declares
POLICY = "policy"                              # the user prefers it
DEFAULT = "default"                            # what torch itself would run
TABLE = "table"                                # chosen ahead of time
# a guess: it orders what has no evidence, behind the default
PRIOR = "prior"


class Score(NamedTuple):
    """Expected microseconds and where they come from. Less is better."""

    total_us: float
    kernel_us: float
    transform_us: float = 0.0
    boost: float = 1.0
    source: str = PRIOR
    samples: int = 0
    spread: float = 0.0                        # relative spread of the measurement
    # of an interpolated one: octaves to the nearest measurement
    distance: float = 0.0
    evidence: str = ""                         # in words, if the source alone does not say it

    @property
    def origin(self) -> str:
        """The source with its evidence."""
        return f"{self.source}: {self.evidence}" if self.evidence else self.source


class Step(NamedTuple):
    """One kernel that may serve the call."""

    kernel: str
    score: Score
    transforms: tuple[Transform, ...] = ()
    workspace: int = 0
    note: str = ""


@dataclass(frozen=True)
class Rejected(Record):
    kernel: str
    reasons: tuple[Reason, ...]


_MEMBERS = "op kernel facts policy locked from_cache table missed transform_bytes steps rejected"


class SelectionReport(Displayed, ABC):
    """What was selected: for one call (`Plan`), or for a whole block (`BlockPlan`)."""

    @property
    @abstractmethod
    def transform_cost_total(self) -> float:
        """Microseconds that copies and casts of the inputs are expected to take."""

    @property
    def fused_ops(self) -> tuple[str, ...]:
        """Ops taken in place of several; only a block has a choice between them."""
        return ()


@dataclass(frozen=True, repr=False)
class Plan(SelectionReport, Record, json=_MEMBERS):
    """`steps` in the order they are tried; the first is the choice, the rest the fallback."""

    op: str
    facts: Mapping[str, Annotated[Any, Value]]
    steps: tuple[Step, ...]
    rejected: tuple[Rejected, ...]
    policy: str = ""                           # hash of the policy it was made under
    locked: str = ""                           # who named the kernel, if somebody did
    from_cache: bool = field(default=False, compare=False)
    table: str = ""                            # id of the dispatch table it came from, if any
    missed: Reason | None = None               # why the table in force was not followed
    # the smallest workspace that was too large, or 0
    refused_workspace: int = field(default=0, compare=False)

    @property
    def kernel(self) -> str | None:
        return self.steps[0].kernel if self.steps else None

    @property
    def transform_cost_total(self) -> float:
        return self.steps[0].score.transform_us if self.steps else 0.0

    @property
    def transform_bytes(self) -> int:
        """Bytes that the transforms of the choice move."""
        return sum(t.bytes for t in self.steps[0].transforms) if self.steps else 0

    def __bool__(self) -> bool:
        return bool(self.steps)

    def why_not(self, kernel: str) -> tuple[Reason, ...]:
        return next((r.reasons for r in self.rejected if r.kernel == kernel), ())

    def _headline(self) -> str:
        return (f"lz.{self.op} -> {self.kernel or 'no kernel'}, {max(len(self.steps) - 1, 0)} "
                f"behind it, {len(self.rejected)} rejected")

    def _cells(self) -> Cells:
        rows = [("->" if i == 0 else "", s.kernel, f"{s.score.total_us:.2f} us", "; ".join(filter(
            None, (s.score.origin, ", ".join(map(str, s.transforms)), s.note))))
            for i, s in enumerate(self.steps)]
        return ("", "kernel", "expected", "why"), [
            *rows, *(("x", r.kernel, "", "; ".join(map(str, r.reasons))) for r in self.rejected)]

    def __str__(self) -> str:
        head = f"lz.{self.op} -> {self.kernel or 'no kernel'}"
        if self.locked:
            head += f"  (named by {self.locked})"
        if self.table or self.missed:
            head += f"  (from table {self.table})" if self.table else f"  ({self.missed})"
        lines = [head]
        for i, s in enumerate(self.steps):
            how = f"{s.score.total_us:10.2f} us ({s.score.origin})"
            extra = "  after " + ", ".join(map(str, s.transforms)) if s.transforms else ""
            lines.append(
                f"  {'->' if i == 0 else '  '} {s.kernel:<28} "
                f"{how}{extra}{'  ' + s.note if s.note else ''}")
        for r in self.rejected:
            lines.append(f"   x {r.kernel:<28} " + "; ".join(map(str, r.reasons)))
        return "\n".join(lines)
