"""Selections made ahead of time: a table that is consulted before the selection engine.

plan/ defines and makes tables. Here a table only has to answer for the facts of a call, and to name
the tests its answers depend on, so that the cache key can tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from ..selection.engine import Demands, Roster, SelectionContext, select
from ..selection.policy import Policy
from ..spec.op import Op
from ..spec.plan import Plan, Step
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from .registry.catalog import Catalog


class SelectionTable(Protocol):
    """The interface of a table that the world uses."""

    miss_code: ClassVar[Code]                  # of a call that it has no answer for

    @property
    def id(self) -> str: ...

    @property
    def policy(self) -> str: ...               # hash of the policy it was made for

    def leaves(self, op: str) -> Iterable[Rule]: ...

    def steps(self, op: str, facts: Mapping[str, Any]) -> tuple[Step, ...] | None: ...


class Agreement(NamedTuple):
    """What the ranks of a process group agreed on; see lz.distributed."""

    mode: str                                  # inference | training
    rank: int
    size: int
    id: str = ""                               # equal on every rank
    kinds: int = 0                             # kinds of call whose kernel is agreed
    differences: tuple[str, ...] = ()          # between ranks, which inference goes on with
    denied: tuple[str, ...] = ()               # kernels that not all ranks have alike
    provisional: int = 0                       # kinds that this rank chose since, by itself
    name: str = ""                             # of the group, where a process agrees with several

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        text = f"{name}{self.size} ranks, {self.kinds} kinds of call agreed ({self.mode})"
        text += f", {self.provisional} not yet" if self.provisional else ""
        denied = f"; not used: {', '.join(self.denied[:8])}" if self.denied else ""
        return text + ("; " + "; ".join(self.differences) if self.differences else "") + denied


@dataclass(frozen=True)
class AgreedTable:
    """The rows that ranks agreed on, before those of the table that was in force already, which
    may be what this rank agreed on with another group."""

    miss_code: ClassVar[Code] = Code.NOT_AGREED
    rows: SelectionTable
    base: SelectionTable | None
    agreement: Agreement
    order: int = 0                             # of the group, among those of this process

    @property
    def id(self) -> str:
        more = f"+{self.base.id[7:]}" if isinstance(self.base, AgreedTable) else ""
        return f"agreed-{self.agreement.id}{more}"

    @property
    def policy(self) -> str:
        """The hash that all groups agreed under; "" where some have not yet agreed anew."""
        base = self.base.policy if isinstance(self.base, AgreedTable) else self.rows.policy
        return self.rows.policy if base == self.rows.policy else ""

    def leaves(self, op: str) -> Iterable[Rule]:
        return (*self.rows.leaves(op), *(self.base.leaves(op) if self.base is not None else ()))

    def steps(self, op: str, facts: Mapping[str, Any]) -> tuple[Step, ...] | None:
        steps = self.rows.steps(op, facts)
        return self.base.steps(op, facts) if steps is None and self.base is not None else steps


@dataclass(frozen=True)
class ActiveTable:
    """A table and the catalog it fits. With another catalog or policy it is not consulted."""

    table: SelectionTable
    catalog: Catalog

    def plan(self, catalog: Catalog, op: Op, roster: Roster, facts: Mapping[str, Any],
             context: SelectionContext, thorough: bool) -> Plan:
        """Returns the table's plan; else the engine's, with the reason in `missed`."""
        missed = self.drift(catalog, context.policy)
        steps = None if missed is not None else self.table.steps(op.name, facts)
        if missed is None and steps is None:
            missed = Reason(self.table.miss_code, self.table.id, describe_call(op, facts))
        policy = context.policy
        lock = policy.lock(op.name, facts) if policy.has_rules_for(op.name) else None
        usable = self._usable_steps(steps or (), roster, facts, context, lock is not None)
        if missed is None and not usable:
            kernels = ", ".join(s.kernel for s in steps or ())
            missed = Reason(Code.PLAN_BUCKET_MISS, self.table.id,
                            f"{describe_call(op, facts)} but {kernels}, out of service")
        if missed is not None:
            return replace(select(op, roster, facts, context, thorough), missed=missed)
        if not thorough:
            refused = [s.workspace for s in steps or () if s not in usable
                       and s.workspace > context.headroom()]
            return Plan(op.name, facts, usable, (), policy.hash, lock.origin if lock else "",
                        table=self.table.id, refused_workspace=min(refused, default=0))
        full = select(op, roster, facts, context, True)
        scored = {s.kernel: s for s in full.steps}
        listed = {s.kernel for s in usable}
        from_table = tuple(s._replace(score=scored[s.kernel].score if s.kernel in scored
                                      else s.score,
                                      note=f"from table {self.table.id}") for s in usable)
        return replace(full,
                       steps=(*from_table, *(s for s in full.steps if s.kernel not in listed)),
                       table=self.table.id)

    def drift(self, catalog: Catalog, policy: Policy) -> Reason | None:
        if policy.hash != self.table.policy:
            return Reason(Code.PLAN_DRIFT, f"policy {self.table.policy}", f"policy {policy.hash}")
        if catalog is not self.catalog:
            return Reason(Code.PLAN_DRIFT, "the kernels of then", "another catalog of kernels")
        return None

    def _usable_steps(self, steps: Iterable[Step], roster: Roster, facts: Mapping[str, Any],
                      context: SelectionContext, named: bool) -> tuple[Step, ...]:
        """Returns the steps that can serve now: health, loading and memory change without drift."""
        viable, demands = {k.id: k for k in roster.viable}, Demands.of(facts, context, named)
        return tuple(s for s in steps if s.kernel in viable
                     and not demands.refuses(viable[s.kernel])
                     and not (s.workspace and s.workspace > context.headroom()))


def describe_call(op: Op, facts: Mapping[str, Any]) -> str:
    """Returns a call in a few words: its op, dtype and sizes."""
    sizes = " ".join(f"{n}={facts[n]}" for n in op.dims if facts.get(n) is not None)
    return f"{op.name} {facts.get('dtype') or ''} {sizes}".strip()
