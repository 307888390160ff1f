"""Everything a selection may depend on, as one frozen value. To change anything, publish a new one.

Readers take one attribute load and no lock. Publishing gives every op that the change concerns a fresh,
empty cache: that *is* the invalidation, and it costs the same however much was remembered. What befalls one
kernel (it was compiled, it is out of service) concerns the ops it belongs to, and no other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..machine import hardware, loading, locks, memory
from ..perf.record import PerfView, place_of
from ..select.engine import Roster, Shipped, Surroundings, make_roster, select
from ..select.key import OFF_CPU, KeyProgram, compile_key
from ..select.policy import Layer, Policy
from ..select.score import rates_of
from ..spec.device import Device
from ..spec.errors import RegistrationError
from ..spec.event import Event, HealthChanged, PolicyRejected, WorldPublished
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import Plan
from ..spec.reason import Reason
from ..spec.rules import Condition, Rule
from . import config, events, health, perf_loading, redaction
from .catalog import Catalog, discover, plugin_policy
from .context import Override
from .tables import InForce

_MAX_MEMO = 1024


@dataclass(frozen=True)
class World:
    """One consistent state of the library. `memo` only remembers pure functions of the rest."""

    catalog: Catalog
    policy: Policy
    epoch: int = 0
    perf: PerfView = field(default_factory=PerfView)
    health: Mapping[str, health.Health] = field(default_factory=dict)  # breakers that are not closed
    refused: Mapping[str, Mapping[str, Reason]] = field(default_factory=dict)  # kernel -> kind of call -> why not
    refused_until: Mapping[tuple[str, str], float] = field(default_factory=dict)   # (kernel, kind) -> asked again then
    unloadable: Mapping[str, Reason] = field(default_factory=dict)     # found out when loading
    warmed: frozenset[Any] = frozenset()       # kernel, (kernel, kind) and (kernel, kind, form): see warmup.py
    certified: frozenset[str] = frozenset()
    devices: Mapping[str, Device] = field(default_factory=dict)        # instead of probing: for what-if questions
    extra_leaves: frozenset[Rule] = frozenset()                        # tests made by context overrides
    deadlines: frozenset[float] = frozenset()                          # of time-boxed context overrides
    table: InForce | None = None                                       # choices made ahead of time
    policy_file: Path | None = None
    policy_stamp: config.FileStamp | None = None
    born: float = 0.0
    changed: int = 0                           # the epoch of the last change that concerned every op
    changed_for: Mapping[str, int] = field(default_factory=dict)       # op -> of the last one that concerned it
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def kernels(self, op: str) -> tuple[Kernel, ...]:
        return self.catalog.kernels_of(op)

    def device(self, kind: str, index: int = 0) -> Device:
        if kind in self.devices:
            return self.devices[kind]
        return hardware.probe(kind if kind in hardware.KINDS else "cpu", index)

    def place(self, kind: str) -> str:
        """Where measurements must have been made to count here."""
        return place_of(self.device(kind), torch.get_num_threads() if kind == "cpu" else 0)

    def program(self, op: Op) -> KeyProgram:
        found = self.memo.get(("program", op.name))
        if found is None:
            leaves = [leaf for k in self.kernels(op.name) for leaf in leaves_of(k)]
            leaves += self.policy.leaves(op.name, op.fact_names)
            leaves += [leaf for leaf in self.extra_leaves if leaf.fact in op.fact_names]
            leaves += self.table.table.leaves(op.name) if self.table is not None else ()
            found = self.memo["program", op.name] = compile_key(
                op, leaves, [text for k in self.kernels(op.name) for text in (k.workspace, k.shared_memory)])
        return found  # type: ignore[no-any-return]

    def surroundings(self, kind: str, override: Override | None) -> Surroundings:
        key = ("around", kind, override)
        found = self.memo.get(key)
        if found is None:
            policy = self.policy
            for layer in override.layers if override else ():
                policy = policy.with_layer(layer)
            policy = policy.at(time.monotonic())
            device = self.device(kind)
            if len(self.memo) > _MAX_MEMO:     # of overrides that may never come again
                for old in [k for k in list(self.memo) if k[0] == "around"]:
                    self.memo.pop(old, None)
            blocked = {k: r for k, h in self.health.items() if (r := h.blocks) is not None}
            place = self.place(kind)
            shipped = self.shipped(kind) if policy.setting("shipped_measurements") else Shipped()
            rates = self.perf.rates.get(place) or shipped.view.rates.get(place) or rates_of(kind)
            proven = self.certified
            if policy.setting("require_certificates"):
                from . import certificates  # read from files; not needed before policy asks for them
                proven |= certificates.certified(self.catalog.kernels, device)
            found = self.memo[key] = Surroundings(
                policy, {**device.facts(), "device": kind}, place, rates, self.perf,
                self.availability(), blocked, self.warmed, proven, lambda: memory.headroom(kind, policy),
                lambda: self.captures(kind), shipped, self.refused)
        return found  # type: ignore[no-any-return]

    def shipped(self, kind: str) -> Shipped:
        """What came with the package for this model of device."""
        found = self.memo.get(("shipped", kind))
        if found is None:
            found = self.memo["shipped", kind] = perf_loading.shipped(self.catalog, self.device(kind), self.place(kind))
        return found  # type: ignore[no-any-return]

    def captures(self, kind: str) -> Mapping[str, bool]:
        """Which kernels a capture in a CUDA graph has shown to be safe here, or not; those not tried are not in it."""
        found = self.memo.get(("captures", kind))
        if found is None:
            from . import certificates  # read from files; not needed before something is captured
            found = self.memo["captures", kind] = certificates.capture_verdicts(
                self.catalog.kernels, self.device(kind))
        return found  # type: ignore[no-any-return]

    def availability(self) -> Mapping[str, Reason]:
        found = self.memo.get("availability")
        if found is None:
            found = {k.id: r for k in self.catalog.kernels if (r := loading.availability(k)) is not None}
            found.update(self.unloadable)
            self.memo["availability"] = found
        return found  # type: ignore[no-any-return]

    def roster(self, op: Op, kind: str, around: Surroundings) -> Roster:
        key = ("roster", op.name, kind)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = make_roster(self.kernels(op.name), around)
        return found  # type: ignore[no-any-return]

    def plan(self, op: Op, facts: Mapping[str, Any], override: Override | None = None, thorough: bool = False,
             compiled: bool = False) -> Plan:
        """`compiled`: as if everything that compiles were compiled."""
        around = self.surroundings(facts["device"], override)
        if compiled:
            around = replace(around, warmed=frozenset(k.id for k in self.kernels(op.name) if k.jit))
        merged = {**around.device, **facts}
        roster = self.roster(op, facts["device"], around)
        if self.table is not None and override is None:        # an override is another policy than the table's
            return self.table.plan(self.catalog, op, roster, merged, around, thorough)
        return select(op, roster, merged, around, thorough)

    def replace(self, ops: Collection[str] | None = None, /, **changes: Any) -> World:
        """This world with something changed: a new epoch, nothing remembered but what still holds.

        `ops`: those that the change concerns, where it is not all of them; the others keep what they remember.
        """
        epoch = self.epoch + 1
        if ops is None:
            held: tuple[Any, ...] = () if changes.keys() & {"catalog", "unloadable"} else ("availability",)
            if not changes.keys() & {"catalog", "devices"}:
                held += tuple(("shipped", kind) for kind in hardware.KINDS)
            leaves = changes.get("extra_leaves", self.extra_leaves)
            if leaves == self.extra_leaves and not changes.keys() & {"catalog", "policy", "table"}:
                held += tuple(("program", op) for op in self.catalog.ops)
            keep = {k: self.memo[k] for k in held if k in self.memo}   # by name: other threads add to it meanwhile
            return replace(self, epoch=epoch, changed=epoch, changed_for={}, memo=keep, **changes)
        keep = {k: v for k in list(self.memo) if _holds(k, ops) and (v := self.memo.get(k)) is not None}
        if "unloadable" in changes and "availability" in keep:
            keep["availability"] = {**keep["availability"], **changes["unloadable"]}
        return replace(self, epoch=epoch, changed_for={**self.changed_for, **dict.fromkeys(ops, epoch)}, memo=keep,
                       **changes)

    def version(self, op: str) -> int:
        """The epoch of the last change that concerned `op`: what was remembered of it since then holds."""
        return max(self.changed, self.changed_for.get(op, 0))

    def ops_of(self, group: str) -> frozenset[str]:
        """The ops that a breaker speaks of: those of a library's kernels, or of a kernel's own."""
        return frozenset(k.op.name for k in self.catalog.kernels if group in (k.health, k.id))

    @property
    def next_deadline(self) -> float | None:
        """When something changes by itself: a policy runs out, a breaker cools, choices expire, a file is due."""
        ttl, poll = self.policy.setting("cache_ttl"), self.policy.setting("policy_poll")
        times = [self.policy.next_deadline, health.next_deadline(self.health), memory.next_look(),
                 min(self.refused_until.values(), default=None),
                 self.born + ttl if ttl else None, min(self.deadlines, default=None),
                 time.monotonic() + poll if poll and self.policy_file else None]
        return min((t for t in times if t is not None), default=None)


def _holds(memo: Any, ops: Collection[str]) -> bool:
    """Is what is remembered under this name the same after a change that concerns `ops` only?"""
    if memo == "availability" or memo[0] in ("program", "captures", "shipped"):
        return True
    return bool(memo[0] == "roster" and memo[1] not in ops)


def leaves_of(kernel: Kernel) -> tuple[Rule, ...]:
    """The tests a kernel's rules make; alignment that only another device's kernel wants is marked so."""
    leaves = _leaves.get(kernel)
    if leaves is None:
        elsewhere = any(_on_cpu(rule) is False for rule in kernel.requires)
        leaves = _leaves[kernel] = tuple(
            replace(leaf, fact=leaf.fact + OFF_CPU)
            if leaf.fact.endswith(".alignment") and (elsewhere or _on_cpu(rule)) else leaf
            for rule in (*kernel.requires, *kernel.less_work_when) for leaf in rule.leaves())
    return leaves


_leaves: WeakKeyDictionary[Kernel, tuple[Rule, ...]] = WeakKeyDictionary()


def _on_cpu(rule: Condition) -> bool | None:
    """What the rule says of every call on the CPU; None if that depends on more than the device."""
    return rule.decide(lambda leaf: leaf.predicate.holds("cpu") if leaf.fact == "device" else None)


_current: World | None = None
_writing = locks.Lock()                # writers only: publishing is read, change, write
_listeners: list[Callable[[World], None]] = []


def current() -> World:
    world = _current
    return world if world is not None else _create()


def exists() -> bool:
    return _current is not None


def _create() -> World:
    told: list[Event] = []
    with _writing:
        if _current is None:
            catalog, problems = discover()
            advice, refused = plugin_policy(catalog)
            policy, path, stamp = _initial_policy(catalog, advice)
            redaction.use(policy.setting("redact"))            # before the first event
            perf, trouble = perf_loading.load(policy, catalog.kernels)
            told += (*problems, *refused, *trouble)
            _put_in_force(World(catalog, policy, perf=perf, policy_file=path, policy_stamp=stamp,
                                born=time.monotonic()))
        world = _current
    for event in told:
        events.emit(event)
    assert world is not None
    return world


def _initial_policy(catalog: Catalog, advice: Layer | None) -> tuple[Policy, Path | None, config.FileStamp | None]:
    ops = {op.name: op.fact_names for op in catalog.ops.values()}
    layers = [layer for layer in (advice, config.environment_layer(ops=ops)) if layer is not None]
    path = config.policy_path()
    stamp = None
    if path is not None:
        stamp = config.FileStamp.of(path)
        layers.append(config.load_policy_file(path, ops))
    return Policy(tuple(layers)), path, stamp


def publish(change: Callable[[World], World], cause: str = "") -> World:
    """Replace the world by `change(world)`. Returning the same world publishes nothing."""
    current()                                  # made before the lock is taken: that may have events
    with _writing:
        old = current()
        new = change(old)
        if new is old:
            return old
        perf, told = perf_loading.follow(old, new)
        new = new if perf is new.perf else replace(new, perf=perf)
        _put_in_force(new)
    for event in told:
        events.emit(event)
    events.emit(WorldPublished(epoch=new.epoch, cause=cause))
    return new


def _put_in_force(world: World) -> None:
    """From here on it is the world. An interrupt cannot leave one half of the library in it and not the other."""
    global _current
    try:
        _current = world
        _announce(world)
    except BaseException:                      # passed on, after all have heard of whichever is the world now
        if _current is not None:
            _announce(_current)
        raise


def consult(listener: Callable[[World], None]) -> None:
    """Show `listener` the world in force; none is published meanwhile."""
    current()
    with _writing:
        listener(current())


def _announce(world: World) -> None:
    events.log.setLevel(world.policy.setting("log_level").upper())
    redaction.use(world.policy.setting("redact"))
    for listener in _listeners:
        listener(world)


def listen(listener: Callable[[World], None]) -> None:
    with _writing:
        _listeners.append(listener)
        if _current is not None:
            listener(_current)


def forget() -> None:
    """Drop every remembered choice."""
    publish(lambda w: w.replace(born=time.monotonic(), extra_leaves=frozenset()), "forget")


def pass_time(now: float) -> None:
    """Let happen what is due: called by the clock, and on a miss."""
    told: list[Event] = []

    def change(world: World) -> World:
        told.clear()
        changes: dict[str, Any] = {}
        ops: set[str] = set()
        policy = world.policy.at(now)
        if policy is not world.policy:
            changes["policy"] = policy
        cooled = health.cooled(world.health, now)
        if cooled != world.health:
            changes["health"] = cooled
            for name, h in cooled.items():
                if h is not world.health[name]:
                    told.append(HealthChanged(kernel=name, state=h.state, reason=h.reason))
                    ops |= world.ops_of(name)
        back = {key for key, end in world.refused_until.items() if now >= end}
        if back:
            changes["refused_until"] = {k: end for k, end in world.refused_until.items() if k not in back}
            changes["refused"] = {kernel: {kind: r for kind, r in kinds.items() if (kernel, kind) not in back}
                                  for kernel, kinds in world.refused.items()}
            ops |= {world.catalog.by_id[kernel].op.name for kernel, _ in back if kernel in world.catalog.by_id}
        ops |= (moved := memory.look(now, lambda kind: memory.headroom(kind, policy)))
        ttl = policy.setting("cache_ttl")
        if ttl and now >= world.born + ttl:
            changes["born"] = now
        ahead = frozenset(d for d in world.deadlines if d > now)
        if ahead != world.deadlines:
            changes["deadlines"] = ahead
        if world.policy_file is not None:
            changes.update(_reread(world, policy, told))
        if not changes and not moved:
            return world
        one_kernel_s = changes.keys() <= {"health", "refused", "refused_until"}
        return world.replace(ops, **changes) if one_kernel_s else world.replace(**changes)

    with locks.Section():                      # told together
        publish(change, "time")
        for event in told:
            events.emit(event)


def _reread(world: World, policy: Policy, told: list[Event]) -> dict[str, Any]:
    assert world.policy_file is not None
    old = next((layer for layer in policy.layers if layer.name == "file"), None)
    ops = {op.name: op.fact_names for op in world.catalog.ops.values()}
    stamp, layer, error = config.reload_if_changed(world.policy_file, world.policy_stamp, old, ops)
    if error is not None:
        told.append(PolicyRejected(error=str(error)))
        return {"policy_stamp": stamp}
    if stamp == world.policy_stamp:
        return {}
    return {"policy_stamp": stamp, "policy": policy.with_layer(layer) if layer else policy.without("file")}


def register(item: Op | Kernel, origin: str = "lz.register()") -> None:
    """Add an op or a kernel; refused with the mismatch named."""
    def change(world: World) -> World:
        return world.replace(catalog=world.catalog.adding(item, origin))

    if not isinstance(item, (Op, Kernel)):
        raise RegistrationError(f"lz.register takes an Op or a Kernel, got {type(item).__name__}")
    publish(change, f"register:{item.name if isinstance(item, Op) else item.id}")


def unregister(name: str) -> None:
    """Take an op, a kernel, a backend or a plugin away, and with it all that was found out about it."""
    def change(world: World) -> World:
        catalog = world.catalog.without(name)
        groups = {group for k in catalog.kernels for group in (k.health, k.id)}
        return world.replace(
            catalog=catalog, health={g: h for g, h in world.health.items() if g in groups},
            refused={k: r for k, r in world.refused.items() if k in catalog.by_id},
            refused_until={k: end for k, end in world.refused_until.items() if k[0] in catalog.by_id},
            certified=frozenset(k for k in world.certified if k in catalog.by_id),
            unloadable={k: r for k, r in world.unloadable.items() if k in catalog.by_id},
            warmed=frozenset(w for w in world.warmed if (w if isinstance(w, str) else w[0]) in catalog.by_id))

    publish(change, f"unregister:{name}")


def note(event: Event) -> None:
    events.emit(event)


def _renew_property_locks() -> None:
    """Before Python 3.12 every cached_property has a lock, which a thread that is gone may have held."""
    for name, module in list(sys.modules.items()):
        for cls in vars(module).values() if name.startswith("layerzero.") else ():
            for value in vars(cls).values() if isinstance(cls, type) else ():
                if isinstance(value, cached_property):
                    value.lock = threading.RLock()  # type: ignore[attr-defined]


def _after_fork() -> None:
    if sys.version_info < (3, 12):
        _renew_property_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
