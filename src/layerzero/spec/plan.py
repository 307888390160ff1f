"""The decision about one kind of call: which kernels to try, in order, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .reason import Reason


class Transform(NamedTuple):
    """A change of the inputs before the kernel runs, and the bytes it moves."""

    kind: str                                  # contiguous | cast | layout
    target: str                                # the parameter, or the variant it is viewed as
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.target})"

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


# Sources of a score. All but the last are evidence, which a kernel needs to replace torch's own.
MEASURED = "measured"                          # on this machine, for this kind of call, in this mode
INTERPOLATED = "interpolated"                  # from neighbouring kinds of call
SHIPPED = "shipped"                            # measured on this model of device, and part of this package
LESS_WORK = "less work"                        # by construction, as the kernel declares
POLICY = "policy"                              # the user prefers it
DEFAULT = "default"                            # what torch itself would run
TABLE = "table"                                # chosen ahead of time
PRIOR = "prior"                                # a guess: it orders what has no evidence, behind the default


class Score(NamedTuple):
    """Expected microseconds and where they come from. Less is better."""

    total_us: float
    kernel_us: float
    transform_us: float = 0.0
    boost: float = 1.0
    source: str = PRIOR
    samples: int = 0
    spread: float = 0.0                        # relative spread of the measurement
    distance: float = 0.0                      # of an interpolated one: octaves to the nearest measurement
    evidence: str = ""                         # in words, if the source alone does not say it

    @property
    def origin(self) -> str:
        """The source with its evidence."""
        return f"{self.source}: {self.evidence}" if self.evidence else self.source

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


class Step(NamedTuple):
    """One kernel that may serve the call."""

    kernel: str
    score: Score
    transforms: tuple[Transform, ...] = ()
    workspace: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "score": self.score.to_json(), "workspace": self.workspace,
                "transforms": [t.to_json() for t in self.transforms], "note": self.note}


@dataclass(frozen=True)
class Rejected:
    kernel: str
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "reasons": [r.to_json() for r in self.reasons]}


class SelectionReport:
    """What was selected: for one call (`Plan`), or for a whole block (`BlockPlan`)."""

    @property
    def transform_cost_total(self) -> float:
        """Microseconds that copies and casts of the inputs are expected to take."""
        raise NotImplementedError

    @property
    def fused_ops(self) -> tuple[str, ...]:
        """Ops taken in place of several; only a block has a choice between them."""
        return ()


@dataclass(frozen=True)
class Plan(SelectionReport):
    """`steps` in the order they are tried; the first is the choice, the rest the fallback."""

    op: str
    facts: Mapping[str, Any]
    steps: tuple[Step, ...]
    rejected: tuple[Rejected, ...]
    policy: str = ""                           # hash of the policy it was made under
    locked: str = ""                           # who named the kernel, if somebody did
    from_cache: bool = field(default=False, compare=False)
    table: str = ""                            # id of the dispatch table it came from, if any
    missed: Reason | None = None               # why the table in force was not followed
    refused_workspace: int = field(default=0, compare=False)     # the smallest workspace that was too large, or 0

    @property
    def kernel(self) -> str | None:
        return self.steps[0].kernel if self.steps else None

    @property
    def transform_cost_total(self) -> float:
        return self.steps[0].score.transform_us if self.steps else 0.0

    def __bool__(self) -> bool:
        return bool(self.steps)

    def why_not(self, kernel: str) -> tuple[Reason, ...]:
        return next((r.reasons for r in self.rejected if r.kernel == kernel), ())

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "kernel": self.kernel, "facts": dict(self.facts), "policy": self.policy,
                "locked": self.locked, "from_cache": self.from_cache, "table": self.table,
                "missed": self.missed.to_json() if self.missed else None,
                "transform_bytes": sum(t.bytes for t in self.steps[0].transforms) if self.steps else 0,
                "steps": [s.to_json() for s in self.steps], "rejected": [r.to_json() for r in self.rejected]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        return cls(
            data["op"], {k: tuple(v) if isinstance(v, list) else v for k, v in data["facts"].items()},
            tuple(Step(s["kernel"], Score(**s["score"]), tuple(Transform(**t) for t in s["transforms"]),
                       s["workspace"], s["note"]) for s in data["steps"]),
            tuple(Rejected(r["kernel"], tuple(map(Reason.from_json, r["reasons"]))) for r in data["rejected"]),
            data["policy"], data["locked"], data["from_cache"], data.get("table", ""),
            Reason.from_json(data["missed"]) if data.get("missed") else None)

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
            lines.append(f"  {'->' if i == 0 else '  '} {s.kernel:<28} {how}{extra}{'  ' + s.note if s.note else ''}")
        for r in self.rejected:
            lines.append(f"   x {r.kernel:<28} " + "; ".join(map(str, r.reasons)))
        return "\n".join(lines)
