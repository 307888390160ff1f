"""Everything a selection may depend on, as one frozen value. To change anything, publish a new one.

Readers take one attribute load and no lock. Publishing gives every op that the change concerns a
fresh, empty cache: that *is* the invalidation, and it costs the same however much was cached. A
change of one kernel (it was compiled, it is out of service) concerns the ops it belongs to, and no
other.
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

import torch

from ..machine import hardware, loading, locks, memory
from ..perf.record import PerfView, place_of
from ..selection.engine import Roster, SelectionContext, Shipped, make_roster, select
from ..selection.key import KeyProgram, compile_key, tests_of
from ..selection.policy import Layer, Policy
from ..selection.score import rates_of
from ..spec.device import Device
from ..spec.errors import RegistrationError
from ..spec.event import Event, HealthChanged, PolicyRejected, WorldPublished
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import Plan
from ..spec.reason import Reason
from ..spec.rules import Rule
from . import config, events, health, perf_loading, redaction
from .context import Override
from .registry import certificates, isolation
from .registry.catalog import Catalog, discover, plugin_policy
from .tables import ActiveTable

_MAX_MEMO = 1024


@dataclass(frozen=True)
class World:
    """One consistent state of the library. `memo` only caches pure functions of the rest."""

    catalog: Catalog
    policy: Policy
    epoch: int = 0
    perf: PerfView = field(default_factory=PerfView)
    # breakers that are not closed
    health: Mapping[str, health.Health] = field(default_factory=dict)
    # kernel -> kind of call -> why not
    refused: Mapping[str, Mapping[str, Reason]] = field(default_factory=dict)
    # (kernel, kind) -> allowed again then
    refused_until: Mapping[tuple[str, str], float] = field(default_factory=dict)
    unloadable: Mapping[str, Reason] = field(default_factory=dict)     # failed to load
    # kernel, (kernel, kind) and (kernel, kind, form): see warmup.py
    warmed: frozenset[Any] = frozenset()
    certified: frozenset[str] = frozenset()
    # used instead of probing: for what-if questions
    devices: Mapping[str, Device] = field(default_factory=dict)
    extra_leaves: frozenset[Rule] = frozenset()                        # tests of context overrides
    # of time-boxed context overrides
    deadlines: frozenset[float] = frozenset()
    # selections made ahead of time
    table: ActiveTable | None = None
    policy_file: Path | None = None
    policy_stamp: config.FileStamp | None = None
    created_at: float = 0.0
    changed: int = 0                           # epoch of the last change that concerned every op
    # op -> epoch of the last change that concerned it
    changed_for: Mapping[str, int] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def kernels(self, op: str) -> tuple[Kernel, ...]:
        return self.catalog.kernels_of(op)

    def device(self, kind: str, index: int = 0) -> Device:
        if kind in self.devices:
            return self.devices[kind]
        return hardware.probe(kind if kind in hardware.KINDS else "cpu", index)

    def place(self, kind: str) -> str:
        """Returns the place whose measurements apply here."""
        return place_of(self.device(kind), torch.get_num_threads() if kind == "cpu" else 0)

    def program(self, op: Op, previous: World | None = None) -> KeyProgram:
        """Returns what a key of `op` holds. It is compiled from the op, its kernels and the tests
        that policy, overrides and table make; if all these are the same in the `previous` world,
        that one's program is returned, since to compile is most of what publishing costs."""
        program = self.memo.get(("program", op.name))
        if program is None:
            kernels, tests = self.kernels(op.name), self._configured_tests(op)
            if (previous is not None and previous.catalog.ops.get(op.name) is op
                and previous.kernels(op.name) == kernels
                and previous._configured_tests(op) == tests):
                program = previous.program(op)
            else:
                tests = tests.union(*(tests_of(k) for k in kernels))
                program = compile_key(op, tests,
                                      [t for k in kernels for t in (k.workspace, k.shared_memory)])
            self.memo["program", op.name] = program
        return program  # type: ignore[no-any-return]

    def _configured_tests(self, op: Op) -> frozenset[Rule]:
        """Returns the tests of calls of `op` that come from elsewhere than its kernels."""
        table = self.table.table.leaves(op.name) if self.table is not None else ()
        return frozenset((*self.policy.leaves(op.name, op.fact_names), *table,
                          *(leaf for leaf in self.extra_leaves if leaf.fact in op.fact_names)))

    def selection_context(self, kind: str, override: Override | None) -> SelectionContext:
        key = ("context", kind, override)
        context = self.memo.get(key)
        if context is None:
            policy = self.policy
            for layer in override.layers if override else ():
                policy = policy.with_layer(layer)
            policy = policy.at(time.monotonic())
            device = self.device(kind)
            if len(self.memo) > _MAX_MEMO:     # overrides may never come again
                for old in [k for k in list(self.memo) if k[0] == "context"]:
                    self.memo.pop(old, None)
            blocked = {k: r for k, h in self.health.items() if (r := h.blocks) is not None}
            place = self.place(kind)
            shipped = self.shipped(kind) if policy.setting("shipped_measurements") else Shipped()
            rates = self.perf.rates.get(place) or shipped.view.rates.get(place) or rates_of(kind)
            proven = self.certified
            if policy.setting("require_certificates"):
                proven |= certificates.certified_ids(self.catalog.kernels, device)
            context = self.memo[key] = SelectionContext(
                policy, {**device.facts(), "device": kind}, place, rates, self.perf,
                self.availability(), blocked, self.warmed, proven,
                lambda: memory.headroom(kind, policy), lambda: self.captures(kind), shipped,
                self.refused, self.failed_certifications(kind))
        return context  # type: ignore[no-any-return]

    def shipped(self, kind: str) -> Shipped:
        """Returns the measurements shipped for this device model."""
        measurements = self.memo.get(("shipped", kind))
        if measurements is None:
            measurements = perf_loading.shipped_measurements(self.catalog, self.device(kind),
                                                             self.place(kind))
            self.memo["shipped", kind] = measurements
        return measurements  # type: ignore[no-any-return]

    def failed_certifications(self, kind: str) -> Mapping[str, Reason]:
        """Returns why kernels failed when they were verified on this machine."""
        failed = self.memo.get(("failed", kind))
        if failed is None:
            failed = certificates.failures(self.catalog.kernels, self.device(kind))
            self.memo["failed", kind] = failed
        return failed  # type: ignore[no-any-return]

    def captures(self, kind: str) -> Mapping[str, bool]:
        """Returns whether each kernel that was captured here is safe in a CUDA graph."""
        verdicts = self.memo.get(("captures", kind))
        if verdicts is None:
            verdicts = self.memo["captures", kind] = certificates.capture_verdicts(
                self.catalog.kernels, self.device(kind))
        return verdicts  # type: ignore[no-any-return]

    def availability(self) -> Mapping[str, Reason]:
        reasons = self.memo.get("availability")
        if reasons is None:
            reasons = {k.id: r for k in self.catalog.kernels
                       if (r := loading.availability(k)) is not None}
            reasons.update(self.unloadable)
            self.memo["availability"] = reasons
        return reasons  # type: ignore[no-any-return]

    def roster(self, op: Op, kind: str, context: SelectionContext) -> Roster:
        key = ("roster", op.name, kind)
        roster = self.memo.get(key)
        if roster is None:
            roster = self.memo[key] = make_roster(self.kernels(op.name), context)
        return roster  # type: ignore[no-any-return]

    def plan(self, op: Op, facts: Mapping[str, Any], override: Override | None = None,
             thorough: bool = False, compiled: bool = False) -> Plan:
        """Returns the plan of a call. `compiled`: as if every JIT kernel were compiled already."""
        context = self.selection_context(facts["device"], override)
        if compiled:
            warmed = frozenset(k.id for k in self.kernels(op.name) if k.jit)
            context = replace(context, warmed=warmed)
        merged = {**context.device, **facts}
        roster = self.roster(op, facts["device"], context)
        # an override is another policy than the table's
        if self.table is not None and override is None:
            return self.table.plan(self.catalog, op, roster, merged, context, thorough)
        return select(op, roster, merged, context, thorough)

    def replace(self, ops: Collection[str] | None = None, /, **changes: Any) -> World:
        """Returns this world with changes and a new epoch; only what is still valid stays cached.
        `ops`: those that the change concerns, if not all of them; the others keep their caches."""
        epoch = self.epoch + 1
        if ops is None:
            kept_keys: tuple[Any, ...] = (() if changes.keys() & {"catalog", "unloadable"}
                                          else ("availability",))
            if not changes.keys() & {"catalog", "devices"}:
                kept_keys += tuple(("shipped", kind) for kind in hardware.KINDS)
            if not changes.keys() & {"catalog", "policy", "table", "extra_leaves"}:
                kept_keys += tuple(("program", op) for op in self.catalog.ops)
            # by name: other threads add to it meanwhile
            memo = {k: self.memo[k] for k in kept_keys if k in self.memo}
            return replace(self, epoch=epoch, changed=epoch, changed_for={}, memo=memo, **changes)
        memo = {k: v for k in list(self.memo) if _still_valid(k, ops)
                and (v := self.memo.get(k)) is not None}
        if "unloadable" in changes and "availability" in memo:
            memo["availability"] = {**memo["availability"], **changes["unloadable"]}
        return replace(self, epoch=epoch,
                       changed_for={**self.changed_for, **dict.fromkeys(ops, epoch)}, memo=memo,
                       **changes)

    def version(self, op: str) -> int:
        """Returns the epoch of the last change that concerned `op`; later caches are valid."""
        return max(self.changed, self.changed_for.get(op, 0))

    def ops_of(self, group: str) -> frozenset[str]:
        """Returns the ops that a breaker concerns: a library's kernels', or one kernel's."""
        return frozenset(k.op.name for k in self.catalog.kernels if group in (k.health, k.id))

    @property
    def next_deadline(self) -> float | None:
        """Returns when time changes something: a policy, a breaker, a cache or a file is due."""
        ttl, poll = self.policy.setting("cache_ttl"), self.policy.setting("policy_poll")
        times = [self.policy.next_deadline, health.next_deadline(self.health), memory.next_check(),
                 min(self.refused_until.values(), default=None),
                 self.created_at + ttl if ttl else None, min(self.deadlines, default=None),
                 time.monotonic() + poll if poll and self.policy_file else None]
        return min((t for t in times if t is not None), default=None)


def _still_valid(key: Any, ops: Collection[str]) -> bool:
    """Is what is cached under this key valid after a change that concerns `ops` only?"""
    if key == "availability" or key[0] in ("program", "captures", "shipped"):
        return True
    return bool(key[0] == "roster" and key[1] not in ops)


_current: World | None = None
_writing = locks.Lock()                # writers only: publishing is read, change, write
_listeners: list[Callable[[World], None]] = []


def current() -> World:
    world = _current
    return world if world is not None else _create()


def exists() -> bool:
    return _current is not None


def _create() -> World:
    pending: list[Event] = []
    with _writing:
        if created := _current is None:
            catalog, problems = discover()
            advice, refused = plugin_policy(catalog)
            policy, path, stamp = _initial_policy(catalog, advice)
            redaction.use(policy.setting("redact"))            # before the first event
            catalog = isolation.isolate(catalog, policy, {}, lambda: current().policy)
            perf, trouble = perf_loading.load(policy, catalog.kernels)
            if _activate(None, World(catalog, policy, perf=perf, policy_file=path,
                                     policy_stamp=stamp, created_at=time.monotonic())):
                pending += (*problems, *refused, *trouble)
        world = _current
    for event in pending:
        events.emit(event)
    assert world is not None
    if created:
        _warn_of_unknown_kernels(world, Policy())
    return world


def unknown_kernels(layer: Layer, catalog: Catalog) -> list[str]:
    """Names in a layer's rules that are no kernel's here, each with its place and what is near."""
    return [f"{rule.origin}: {rule.action}: {text}" for rule in layer.rules
            for text in rule.unknown_kernels(catalog.op_of_kernel)]


def _warn_of_unknown_kernels(world: World, before: Policy) -> None:
    """Logs them for a file or environment that was just read. It stays in force: a program may
    register such a kernel later, and a fleet may have it on other machines only."""
    for layer in world.policy.layers:
        if layer.name in ("environment", "file") and not any(layer is old for old in before.layers):
            for text in unknown_kernels(layer, world.catalog):
                events.log.warning("policy: %s", text)


def _initial_policy(catalog: Catalog, advice: Layer | None) -> tuple[Policy, Path | None,
                                                                     config.FileStamp | None]:
    ops = {op.name: op.fact_names for op in catalog.ops.values()}
    layers = [layer for layer in (advice, config.environment_layer(ops=ops)) if layer is not None]
    path = config.policy_path()
    stamp = None
    if path is not None:
        stamp = config.FileStamp.of(path)
        layers.append(config.load_policy_file(path, ops))
    return Policy(tuple(layers)), path, stamp


def publish(change: Callable[[World], World], cause: str = "") -> World:
    """Replace the world by `change(world)`, or by nothing if that is the same world. It runs again
    if a finalizer or a signal handler published another one meanwhile."""
    current()                          # before the lock is taken: that may emit events
    with _writing:
        while True:
            old = current()
            new = change(old)
            if new is old:
                return old
            new = isolation.apply(old, new, lambda: current().policy)
            perf, pending = perf_loading.reload_if_needed(old, new)
            new = new if perf is new.perf else replace(new, perf=perf)
            if _activate(old, new):
                break
    for event in pending:
        events.emit(event)
    events.emit(WorldPublished(epoch=new.epoch, cause=cause))
    if new.policy is not old.policy:
        _warn_of_unknown_kernels(new, old.policy)
    return new


def _activate(old: World | None, new: World) -> bool:
    """Makes `new` the world if `old` still is; an interrupt leaves all listeners with one."""
    global _current
    try:
        if _current is not old:
            return False
        _current = new
        call_with_current(_notify)
        return True
    except BaseException:                      # an interrupt: first all listeners have one world
        if _current is not None:
            call_with_current(_notify)
        raise


def call_with_current(listener: Callable[[World], None]) -> None:
    """Calls `listener` with the current world; no other thread publishes meanwhile."""
    current()
    with _writing:
        while True:
            world = current()
            listener(world)
            if world is _current:              # a finalizer may have published another one
                return


def _notify(world: World) -> None:
    chosen = (layer.settings.get("log_level") for layer in world.policy.layers)
    events.use_log_level(next(filter(None, chosen), ""))
    redaction.use(world.policy.setting("redact"))
    for listener in _listeners:
        listener(world)


def add_listener(listener: Callable[[World], None]) -> None:
    with _writing:
        _listeners.append(listener)
        if _current is not None:
            call_with_current(listener)


def forget() -> None:
    """Drop every cached selection."""
    publish(lambda w: w.replace(created_at=time.monotonic(), extra_leaves=frozenset()), "forget")


def apply_deadlines(now: float) -> None:
    """Applies everything that is due at `now`. Called by the clock, and on a cache miss."""
    pending: list[Event] = []

    def change(world: World) -> World:
        pending.clear()
        changes: dict[str, Any] = {}
        ops: set[str] = set()
        policy = world.policy.at(now)
        if policy is not world.policy:
            changes["policy"] = policy
        cooled = health.after_cooldown(world.health, now)
        if cooled != world.health:
            changes["health"] = cooled
            for name, breaker in cooled.items():
                if breaker is not world.health[name]:
                    pending.append(HealthChanged(kernel=name, state=breaker.state,
                                                 reason=breaker.reason))
                    ops |= world.ops_of(name)
        readmitted = {key for key, end in world.refused_until.items() if now >= end}
        if readmitted:
            changes["refused_until"] = {k: end for k, end in world.refused_until.items()
                                        if k not in readmitted}
            changes["refused"] = {kernel: {kind: r for kind, r in kinds.items()
                                           if (kernel, kind) not in readmitted}
                                  for kernel, kinds in world.refused.items()}
            ops |= {world.catalog.by_id[kernel].op.name for kernel, _ in readmitted
                    if kernel in world.catalog.by_id}
        ops |= (reselect := memory.ops_to_reselect(now, lambda kind: memory.headroom(kind, policy)))
        ttl = policy.setting("cache_ttl")
        if ttl and now >= world.created_at + ttl:
            changes["created_at"] = now
        future = frozenset(d for d in world.deadlines if d > now)
        if future != world.deadlines:
            changes["deadlines"] = future
        if world.policy_file is not None:
            changes.update(_reload_policy(world, policy, pending))
        if not changes and not reselect:
            return world
        only_these_ops = changes.keys() <= {"health", "refused", "refused_until"}
        return world.replace(ops, **changes) if only_these_ops else world.replace(**changes)

    with locks.DeferEvents():                  # delivered together
        publish(change, "time")
        for event in pending:
            events.emit(event)


def _reload_policy(world: World, policy: Policy, pending: list[Event]) -> dict[str, Any]:
    assert world.policy_file is not None
    old = next((layer for layer in policy.layers if layer.name == "file"), None)
    ops = {op.name: op.fact_names for op in world.catalog.ops.values()}
    stamp, layer, error = config.reload_if_changed(world.policy_file, world.policy_stamp, old, ops)
    if error is not None:
        pending.append(PolicyRejected(error=str(error)))
        return {"policy_stamp": stamp}
    if stamp == world.policy_stamp:
        return {}
    return {"policy_stamp": stamp, "policy": policy.with_layer(layer) if layer
            else policy.without("file")}


def register(item: Op | Kernel, origin: str = "lz.register()") -> None:
    """Add an op or a kernel; refused with the mismatch named."""
    def change(world: World) -> World:
        return world.replace(catalog=world.catalog.with_item(item, origin))

    if not isinstance(item, (Op, Kernel)):
        raise RegistrationError(f"lz.register takes an Op or a Kernel, got {type(item).__name__}")
    publish(change, f"register:{item.name if isinstance(item, Op) else item.id}")


def unregister(name: str) -> None:
    """Remove an op, a kernel, a backend or a plugin, with everything known about it."""
    def change(world: World) -> World:
        catalog = world.catalog.without(name)
        groups = {group for k in catalog.kernels for group in (k.health, k.id)}
        return world.replace(
            catalog=catalog, health={g: h for g, h in world.health.items() if g in groups},
            refused={k: r for k, r in world.refused.items() if k in catalog.by_id},
            refused_until={k: end for k, end in world.refused_until.items()
                           if k[0] in catalog.by_id},
            certified=frozenset(k for k in world.certified if k in catalog.by_id),
            unloadable={k: r for k, r in world.unloadable.items() if k in catalog.by_id},
            warmed=frozenset(w for w in world.warmed
                             if (w if isinstance(w, str) else w[0]) in catalog.by_id))

    publish(change, f"unregister:{name}")


def _renew_property_locks() -> None:
    """Resets the lock that a cached_property has before Python 3.12: its holder may be gone."""
    for name, module in sys.modules.copy().items():
        for cls in list(vars(module).values()) if name.startswith("layerzero.") else ():
            for value in vars(cls).values() if isinstance(cls, type) else ():
                if isinstance(value, cached_property):
                    value.lock = threading.RLock()  # type: ignore[attr-defined]


def _after_fork() -> None:
    if sys.version_info < (3, 12):
        _renew_property_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
