"""Typed events. Every fallback is one; the log, the counters and explain show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .codec import Record
from .plan import Rejected
from .reason import Reason


@dataclass(frozen=True)
class Event(Record):
    name: ClassVar[str] = "event"
    op: str = ""
    kernel: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"event": self.name, **super().to_json()}

    def log_fields(self) -> dict[str, Any]:
        """Returns the fields that the log shows."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Selected(Event,
               json="op kernel candidates microseconds transforms source transform_cost_total "
                    "reasons"):
    """A kernel was selected for a kind of call that was not in the cache."""

    name: ClassVar[str] = "selected"
    candidates: int = 0
    microseconds: float = 0.0
    transforms: tuple[str, ...] = ()
    # what the choice rests on: measured, shipped, default, ...
    source: str = ""
    # microseconds that the transforms are expected to take
    transform_cost_total: float = 0.0
    # the other kernels that may not serve such a call, and why
    rejected: tuple[Rejected, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """`kernel: CODE, ...` for each rejected kernel."""
        return tuple(f"{r.kernel}: {', '.join(reason.code.value for reason in r.reasons)}"
                     for r in self.rejected)

    def log_fields(self) -> dict[str, Any]:
        fields = super().log_fields()
        del fields["rejected"]
        return {**fields, "reasons": "; ".join(self.reasons)}


@dataclass(frozen=True)
class WarmedUp(Event):
    """A JIT kernel served its first call of a kind; `seconds` includes compiling, if any."""

    name: ClassVar[str] = "warmed_up"
    seconds: float = 0.0


@dataclass(frozen=True)
class WarmupSkipped(Event):
    """A call of `op` was not warmed up; `problem` says why."""

    name: ClassVar[str] = "warmup_skipped"
    problem: str = ""


@dataclass(frozen=True)
class LearningStarted(Event):
    """Calls of a new kind are served by these candidates in turn and timed, to learn which is
    fastest."""

    name: ClassVar[str] = "learning_started"
    kind: str = ""
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Learned(Event):
    """Learning of a kind of call ended: `kernel` serves it. If not `clear`, nothing was kept."""

    name: ClassVar[str] = "learned"
    kind: str = ""
    clear: bool = True
    samples: int = 0
    calls: int = 0                             # of this kind, until it was settled
    # seconds that exploring took, beyond what the calls take anyway
    cost: float = 0.0


@dataclass(frozen=True)
class PlanMissed(Event):
    """The dispatch table in force has no answer for a kind of call; `kernel` was selected at run
    time."""

    name: ClassVar[str] = "plan_missed"
    reason: Reason | None = None


@dataclass(frozen=True)
class Evicted(Event):
    """The cache of an op was full; the entries not used since the last sweep were dropped."""

    name: ClassVar[str] = "evicted"
    entries: int = 0


@dataclass(frozen=True)
class Fallback(Event):
    """`kernel` did not serve; `served_by` did."""

    name: ClassVar[str] = "fallback"
    served_by: str = ""
    reason: Reason | None = None


@dataclass(frozen=True)
class HealthChanged(Event):
    """A circuit breaker changed its state."""

    name: ClassVar[str] = "health"
    state: str = ""
    reason: Reason | None = None


@dataclass(frozen=True)
class KernelRefused(Event):
    """A kernel cannot serve a kind of call any more, or for a while if it ran out of memory."""

    name: ClassVar[str] = "refused"
    kind: str = ""
    reason: Reason | None = None


@dataclass(frozen=True)
class CompileQueued(Event):
    """A kernel was queued to be compiled for a kind of call in the background."""

    name: ClassVar[str] = "compile_queued"
    waiting: int = 0                           # how many are in the queue with it


@dataclass(frozen=True)
class CompileSkipped(Event):
    """A kernel is not compiled in the background for a kind of call; `problem` says why."""

    name: ClassVar[str] = "compile_skipped"
    problem: str = ""


@dataclass(frozen=True)
class BackendUnavailable(Event):
    """A library could not be loaded when it was first chosen."""

    name: ClassVar[str] = "unavailable"
    reason: Reason | None = None


@dataclass(frozen=True)
class WorldPublished(Event):
    """Something that selection depends on changed; the choices it concerns are made anew."""

    name: ClassVar[str] = "world"
    epoch: int = 0
    cause: str = ""


@dataclass(frozen=True)
class PolicyRejected(Event):
    """A policy file changed and is broken; the old one stays in force."""

    name: ClassVar[str] = "policy_rejected"
    error: str = ""


@dataclass(frozen=True)
class RanksDiffer(Event):
    """The ranks of a process group are not alike; kernels that not all of them have serve no more.
    """

    name: ClassVar[str] = "ranks_differ"
    rank: int = 0                              # of this process
    differences: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()               # kernels


@dataclass(frozen=True)
class RanksAgreed(Event):
    """The ranks agreed on kernels: `kinds` kinds of call in all, of which `changed` are new or
    another kernel's than before."""

    name: ClassVar[str] = "ranks_agreed"
    kinds: int = 0
    changed: int = 0
    agreement: str = ""                        # equal on every rank


@dataclass(frozen=True)
class StoreTrouble(Event):
    """The store of measurements could not be read or written; `action` says what was done instead.
    """

    name: ClassVar[str] = "store_trouble"
    store: str = ""
    problem: str = ""
    action: str = ""


@dataclass(frozen=True)
class StoreRecovered(Event):
    """The store of measurements works again; what was kept in memory meanwhile was written."""

    name: ClassVar[str] = "store_recovered"
    store: str = ""
    written: int = 0


@dataclass(frozen=True)
class CertificateRefused(Event):
    """A certificate was there and is not trusted: damaged, or changed since it was sealed."""

    name: ClassVar[str] = "certificate_refused"
    problem: str = ""


@dataclass(frozen=True)
class FileRefused(Event):
    """One file of a folder could not be read, or not to its end; the others were."""

    name: ClassVar[str] = "file_refused"
    path: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Adapted(Event):
    """Inputs were cast because the policy allows it."""

    name: ClassVar[str] = "adapted"
    transforms: tuple[str, ...] = field(default=())
