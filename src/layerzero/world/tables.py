"""Choices made ahead of time, as the world holds them: asked before the selection engine is.

What a table is and how one is made is the business of plan/. Here it only has to answer for the
facts of a call, and to say on which numbers its answers change, so that the key can tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..select.engine import Demands, Roster, Surroundings, select
from ..select.policy import Policy
from ..spec.op import Op
from ..spec.plan import Plan, Step
from ..spec.reason import Code, Reason
from ..spec.rules import Rule
from .catalog import Catalog


class Choices(Protocol):
    """What a table must be able to say."""

    @property
    def id(self) -> str: ...

    @property
    def policy(self) -> str: ...               # hash of the policy it was made under

    def leaves(self, op: str) -> Iterable[Rule]: ...

    def steps(self, op: str, facts: Mapping[str, Any]) -> tuple[Step, ...] | None: ...


@dataclass(frozen=True)
class InForce:
    """A table, and the catalog it was found to fit. Another catalog or policy, and it is not asked any more."""

    table: Choices
    catalog: Catalog

    def plan(self, catalog: Catalog, op: Op, roster: Roster, facts: Mapping[str, Any], around: Surroundings,
             thorough: bool) -> Plan:
        """The plan by the table; where it has no answer, by the engine, with the reason in `missed`."""
        missed = self.drift(catalog, around.policy)
        steps = None if missed is not None else self.table.steps(op.name, facts)
        if missed is None and steps is None:
            missed = Reason(Code.PLAN_BUCKET_MISS, self.table.id, described(op, facts))
        lock = around.policy.lock(op.name, facts) if around.policy.has_rules_for(op.name) else None
        fit = self._serving(steps or (), roster, facts, around, lock is not None)
        if missed is None and not fit:
            out = ", ".join(s.kernel for s in steps or ())
            missed = Reason(Code.PLAN_BUCKET_MISS, self.table.id, f"{described(op, facts)} but {out}, out of service")
        if missed is not None:
            return replace(select(op, roster, facts, around, thorough), missed=missed)
        if not thorough:
            refused = [s.workspace for s in steps or () if s not in fit and s.workspace > around.headroom()]
            return Plan(op.name, facts, fit, (), around.policy.hash, lock.origin if lock else "", table=self.table.id,
                        refused_workspace=min(refused, default=0))
        whole = select(op, roster, facts, around, True)
        judged = {s.kernel: s for s in whole.steps}
        ours = {s.kernel for s in fit}
        told = tuple(s._replace(score=judged[s.kernel].score if s.kernel in judged else s.score,
                                note=f"from table {self.table.id}") for s in fit)
        return replace(whole, steps=(*told, *(s for s in whole.steps if s.kernel not in ours)), table=self.table.id)

    def drift(self, catalog: Catalog, policy: Policy) -> Reason | None:
        if policy.hash != self.table.policy:
            return Reason(Code.PLAN_DRIFT, f"policy {self.table.policy}", f"policy {policy.hash}")
        if catalog is not self.catalog:
            return Reason(Code.PLAN_DRIFT, "the kernels of then", "another catalog of kernels")
        return None

    def _serving(self, steps: Iterable[Step], roster: Roster, facts: Mapping[str, Any], around: Surroundings,
                 named: bool) -> tuple[Step, ...]:
        """What may change without drift: health, libraries that fail to load, warm-up, certificates, memory."""
        viable, asked = {k.id: k for k in roster.viable}, Demands.of(facts, around, named)
        return tuple(s for s in steps if s.kernel in viable and not asked.refuses(viable[s.kernel])
                     and not (s.workspace and s.workspace > around.headroom()))


def described(op: Op, facts: Mapping[str, Any]) -> str:
    """A call in a few words: its dtype and sizes."""
    sizes = " ".join(f"{n}={facts[n]}" for n in op.dims if facts.get(n) is not None)
    return f"{op.name} {facts.get('dtype') or ''} {sizes}".strip()
