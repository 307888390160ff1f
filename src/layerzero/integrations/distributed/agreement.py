"""Agreeing on kernels: which one serves each kind of call on every rank.

A call never communicates. A choice made on a miss is this rank's own until the next agreement
point: `sync()`, or `agree(calls)` ahead of the calls. There the ranks tell each other the kinds of
call they have met, each says which kernels could serve every one of them here, and the first that
all ranks can run is agreed, in the order of the lowest rank. The answer is published as rows of a
dispatch table, so calls find it as they find any table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...dispatch.dispatcher import dispatchers
from ...machine import hardware
from ...plan.call_facts import facts_of
from ...plan.dryrun import dry_run
from ...plan.solver import cell_of, number_fields, span_of
from ...plan.table import Choice, Row, Stamp, Table, digest
from ...selection.key import NumberField
from ...spec.call import Call
from ...spec.codec import encode
from ...spec.errors import DataError, InvalidCall, RanksError
from ...spec.event import RanksAgreed
from ...spec.op import DEVICE_FACTS, Op
from ...spec.plan import Step
from ...world import events
from ...world import snapshot as worlds
from ...world.snapshot import World
from ...world.tables import ActiveTable, AgreedTable, Agreement, SelectionTable
from .exchange import Exchange
from .profile import Profile

Facts = dict[str, Any]
SCALARS = (str, int, float, bool, type(None))
ALIGNMENTS = tuple(1 << n for n in range(8))   # in bytes, as facts tell them
ANY_DEVICE = ""                               # the one capability group where devices do not count


@dataclass
class Unit:
    """Calls that one kernel serves on all ranks: one kind, or one call with own shapes on each."""

    op: str
    facts: list[Facts]                         # of each rank; one alone: the same on all
    orders: dict[str, list[str]] = field(default_factory=dict)     # capability group -> kernels

    def of(self, rank: int) -> Facts:
        return self.facts[rank] if len(self.facts) > 1 else self.facts[0]

    @property
    def id(self) -> str:
        return digest({"op": self.op, "facts": self.facts})[:16]


@dataclass
class Session:
    """The agreement of one group of ranks, as this rank sees it."""

    exchange: Exchange
    mode: str
    groups: Sequence[str]                      # the capability group of each rank
    profiles: Sequence[Profile]                # of each rank, when it came
    profile: Profile                           # of this rank, since it came
    name: str = ""
    order: int = 0                             # among the groups of this process
    differences: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    units: dict[str, Unit] = field(default_factory=dict)
    pending: dict[str, Unit] = field(default_factory=dict)     # met here, not agreed yet
    unserved: tuple[str, ...] = ()             # kinds for which no kernel is common to all
    rows: dict[str, Row] = field(default_factory=dict)
    epoch: int = -1                            # of the world that the rows were last made in

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def id(self) -> str:
        return digest({unit: sorted(u.orders.items()) for unit, u in self.units.items()})[:12]

    @property
    def agreement(self) -> Agreement:
        return Agreement(self.mode, self.rank, self.exchange.size, self.id, len(self.units),
                         self.differences, self.denied, name=self.name)

    # one round

    def collect(self, world: World) -> None:
        """Keep the kinds met until they are agreed: a new world empties the caches they are in."""
        self.pending.update((unit.id, unit) for unit in provisional(world, self.order))

    def agree(self, calls: Sequence[Unit] | None) -> int:
        """Agree on what was met since the last time, and on `calls`; return how many kinds have
        another kernel than before, or their first."""
        world = worlds.current()
        self.collect(world)
        met = [[u.op, u.facts[0]] for i, u in self.pending.items() if i not in self.units]
        own = {"stale": world.epoch != self.epoch, "met": met,
               "calls": None if calls is None else [[u.op, u.facts[0]] for u in calls]}
        messages = [json.loads(text) for text in self.exchange.gather("kinds", json.dumps(own))]
        units = (Unit(op, [facts]) for message in messages for op, facts in message["met"])
        new = {unit.id: unit for unit in units}
        problem = self._add_calls([message["calls"] for message in messages], new)
        stale = any(message["stale"] for message in messages)
        asked = {**(self.units if stale else {}), **new}
        changed = 0
        if asked and not problem:
            local = {i: self._local(world, unit) for i, unit in asked.items()}
            choices = [json.loads(text) for text in self.exchange.gather("choices", json.dumps(
                {i: None if choice is None else [choice[0], [s.kernel for s in choice[1]]]
                 for i, choice in local.items()}))]
            orders = agreed_orders(choices, self.groups)
            changed = sum(orders[i] != self.units[i].orders if i in self.units else 1
                          for i in asked)
            for i, unit in asked.items():
                unit.orders = orders[i]
                self.units[i] = unit
            self.units = dict(sorted(self.units.items()))
            self.pending = {i: u for i, u in self.pending.items() if i not in self.units}
            self.unserved = tuple(sorted({u.op for u in self.units.values()
                                          if not all(u.orders.values())}))
            if changed or stale:
                self.rows = {} if stale else self.rows
                self.publish(world, {i: choice for i, choice in local.items()
                                     if choice is not None})
        self.exchange.end_round(self.state())
        if problem:
            raise RanksError(*problem)
        if self.unserved and self.mode == "training":
            raise RanksError("lz.distributed: no kernel serves every rank for "
                             f"{', '.join(self.unserved)}; lz.explain on each rank says why not")
        if changed:
            events.emit(RanksAgreed(kinds=len(self.units), changed=changed, agreement=self.id))
        return changed

    def _add_calls(self, calls: Sequence[list[Any] | None],
                   new: dict[str, Unit]) -> tuple[str, tuple[int, ...]] | None:
        """Add the calls that all ranks named, matched by position; return what does not match."""
        names = [None if rank_calls is None else [op for op, _ in rank_calls]
                 for rank_calls in calls]
        unlike = tuple(self.exchange.members[rank] for rank, rank_names in enumerate(names)
                       if rank_names != names[0])
        if unlike:
            words = "sync()" if names[0] is None else f"agree() of {', '.join(names[0]) or 'none'}"
            return (f"lz.distributed: rank {', '.join(map(str, unlike))} came with other calls "
                    f"than rank {self.exchange.members[0]}, which called {words}; name the same "
                    "operations in the same order on every rank, only their shapes may differ",
                    unlike)
        for row in zip(*(rank_calls or [] for rank_calls in calls)):
            facts = [facts for _, facts in row]
            unit = Unit(row[0][0], facts[:1] if all(f == facts[0] for f in facts) else facts)
            new[unit.id] = unit
        return None

    def _local(self, world: World, unit: Unit) -> tuple[str, tuple[Step, ...]] | None:
        """Return the cell of the calls and the kernels that can serve them here; or None."""
        op, facts = world.catalog.ops.get(unit.op), unit.of(self.rank)
        if op is None or facts["device"] not in (d.type for d in hardware.all_devices()):
            return None
        if not world.program(op).needed <= facts.keys():
            return None                        # another catalog: it read other facts
        steps = beneath(world, self.order).plan(op, facts).steps
        cell = cell_of(world, op, facts, Choice("none"))
        return digest(cell.to_json())[:16], steps

    def publish(self, world: World, local: Mapping[str, tuple[str, tuple[Step, ...]]]) -> None:
        """Put the agreed rows in force."""
        group = self.groups[self.rank]
        for i, (_, steps) in local.items():
            unit, known = self.units[i], {s.kernel: s for s in steps}
            choices = tuple(Choice(s.kernel, tuple((t.kind, t.target) for t in s.transforms),
                                   s.workspace)
                            for k in unit.orders.get(group, ()) if (s := known.get(k)) is not None)
            if choices:
                cell = cell_of(world, world.catalog.ops[unit.op], unit.of(self.rank), choices[0])
                self.rows[i] = replace(cell, choices=choices)
        cells = {(row.op, row.when, row.sizes): row for row in self.rows.values()}
        table = Table(Stamp.of(world, hardware.main_kind(), ()), tuple(cells.values()))

        def change(now: World) -> World:
            others, base = layers_of(now)
            if now.table is not None and now.table.catalog is not now.catalog:
                others = []                    # made for other kernels: those groups agree anew
            own = AgreedTable(replace(table, stamp=replace(table.stamp, policy=now.policy.hash)),
                              base, self.agreement, self.order)
            layers = sorted((*(o for o in others if o.order != self.order), own),
                            key=lambda layer: layer.order)
            return with_layers(now, layers, base)

        self.epoch = worlds.publish(change, f"agreed:{self.id}").epoch

    # a rank that joins later

    def state(self) -> str:
        units = [[u.op, u.facts, u.orders] for u in self.units.values()]
        return json.dumps({"profiles": self.profiles, "units": units})

    def restore(self, state: Sequence[Any]) -> None:
        """Take over what the others agreed on; nothing yet for those who begin."""
        units = [Unit(*unit) for unit in state]
        self.units = {u.id: u for u in units}
        world = worlds.current()
        local = {i: self._local(world, u) for i, u in self.units.items()}
        self.publish(world, {i: choice for i, choice in local.items() if choice is not None})


def agreed_orders(choices: Sequence[Mapping[str, Any]],
                  groups: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return for each unit and capability group the kernels that all its ranks can run, in the
    order of its lowest rank.

    `choices`: of each rank, unit -> [cell, kernels] or None. Units that share a cell on some rank
    cannot be told apart there, so they are agreed together.
    """
    parent: dict[Any, Any] = {}

    def root(node: Any) -> Any:
        while (above := parent.setdefault(node, node)) != node:
            node = above
        return node

    for rank, own in enumerate(choices):
        for unit, choice in own.items():
            if choice is not None:
                parent[root((rank, choice[0]))] = root(unit)
    orders: dict[str, dict[str, list[str]]] = {}
    together: dict[Any, list[str]] = {}
    for unit in choices[0]:
        together.setdefault(root(unit), []).append(unit)
    for units in together.values():
        agreed: dict[str, list[str]] = {}
        for group in dict.fromkeys(groups):
            lists = [own[unit][1] for rank, own in enumerate(choices) if groups[rank] == group
                     for unit in units if own[unit] is not None and own[unit][1]]
            if lists:
                agreed[group] = [k for k in lists[0] if all(k in other for other in lists[1:])]
        orders.update(dict.fromkeys(units, agreed))
    return orders


def provisional(world: World, order: int) -> Iterator[Unit]:
    """Yield the kinds of call that this rank chose a kernel for without this group: those
    remembered that it has not agreed on, and that no context or call overrides."""
    agreed = next((layer.rows for layer in layers_of(world)[0] if layer.order == order), None)
    for dispatcher in list(dispatchers.values()):
        for key, entry in dispatcher.cache.table.copy().items():
            op, facts = entry.plan.op, entry.plan.facts
            if key[1] is not None or (          # type: ignore[index]
                    agreed is not None and agreed.steps(op, facts) is not None):
                continue
            facts = {n: v for n, v in facts.items() if n not in DEVICE_FACTS or n == "device"}
            if all(isinstance(v, SCALARS) for v in facts.values()):
                yield Unit(op, [encode(facts_of_kind(world, dispatcher.op, facts))])


def facts_of_kind(world: World, op: Op, facts: Mapping[str, Any]) -> Facts:
    """Return the facts with the least alignment that passes the same tests of kernels: where an
    allocator has put a tensor makes no kind of call, and differs from rank to rank."""
    fields = number_fields(world, op, facts["device"])

    def least(name: str, alignment: int) -> int:
        f = fields.get(name, NumberField(name))
        span = span_of(f, alignment, True)
        return next(n for n in ALIGNMENTS if span_of(f, n, True) == span)

    return {n: least(n, v) if n.endswith(".alignment") and v is not None else v
            for n, v in facts.items()}


def layers_of(world: World) -> tuple[list[AgreedTable], SelectionTable | None]:
    """Return what this rank agreed on with each group, and the table beneath. The group that came
    last decides, among the kernels that those before it left."""
    table = world.table.table if world.table is not None else None
    layers: list[AgreedTable] = []
    while isinstance(table, AgreedTable):
        layers.append(table)
        table = table.base
    return layers, table


def with_layers(world: World, layers: Iterable[AgreedTable], base: SelectionTable | None) -> World:
    for layer in layers:
        base = replace(layer, base=base)
    return world.replace(table=None if base is None else ActiveTable(base, world.catalog))


def beneath(world: World, order: int) -> World:
    """Return the world as it chooses without this group and those after it."""
    layers, base = layers_of(world)
    if world.table is None or not any(layer.order >= order for layer in layers):
        return world
    for layer in sorted(layers, key=lambda layer: layer.order):
        if layer.order < order:
            base = replace(layer, base=base)
    # what the memo holds for plans does not depend on the table
    return replace(world, table=None if base is None else replace(world.table, table=base))


def units_of(calls: Iterable[Call] | Callable[..., Any], example: tuple[Any, ...],
             named: Mapping[str, Any]) -> list[Unit]:
    """Return the calls as units with this rank's facts: descriptions, or a model with example
    arguments, whose calls are found by a dry run."""
    listed = dry_run(calls, *example, **named).calls if callable(calls) else calls
    units, world, kind = [], worlds.current(), hardware.main_kind()
    for i, call in enumerate(listed):
        try:
            op, facts = facts_of(call, world, kind)
        except InvalidCall as e:
            raise DataError(f"lz.distributed.agree: call {i} ({call.name or call.op}): {e}") from e
        units.append(Unit(op.name, [encode(facts_of_kind(world, op, facts))]))
    return units
