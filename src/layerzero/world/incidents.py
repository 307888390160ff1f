"""What befalls a kernel outside the call itself: it is loaded, blamed, taken out, refused; the world learns of it.

The world learns only what selection must know, and only for the ops of that kernel. Single faults are counted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ..machine import faults, loading, locks
from ..select.engine import kind_to_compile
from ..spec.errors import (
    BackendNotAvailableError,
    CudaGraphUnsafeError,
    DeviceLost,
    NamedKernelRefused,
    NoKernelFoundError,
)
from ..spec.event import BackendUnavailable, HealthChanged, KernelRefused
from ..spec.kernel import Kernel
from ..spec.launch import LaunchRefused
from ..spec.op import Op
from ..spec.plan import Plan, Rejected
from ..spec.reason import Category, Code, Reason
from . import events, health
from . import snapshot as worlds
from .catalog import Catalog
from .context import Override
from .snapshot import World

_loaded: dict[str, Any] = {}
_loading: dict[str, locks.Lock] = {}          # kernel -> held while it is loaded
_faults: dict[str, health.Faults] = {}         # kernel -> its faults among its last calls
_shortages: dict[tuple[str, str], Shortage] = {}    # (kernel, kind of call) -> how it ran out of memory there
_counting = locks.Lock()                       # guards _faults and _shortages
_catalog: Catalog | None = None                # that of the last world that was looked at
MOST_TESTS = 64                                # that overrides add to the keys, until lz.clear_cache()
MOST_REFUSALS = 512                            # kinds of calls of one kernel; the oldest are forgotten


class Shortage:
    """How often a kernel ran out of memory for one kind of call, and when it was, or will be, back after that."""

    def __init__(self) -> None:
        self.faults = health.Faults()
        self.cooldown = self.ended = 0.0


class ProbeBusy(RuntimeError):
    """Another call is probing a half-open breaker; this one goes to the next kernel."""


def loaded(kernel: Kernel) -> Any:
    """Loaded once, and without making the loading of others wait: it may take minutes."""
    run = _loaded.get(kernel.id)
    if run is None or run[0] is not kernel:
        with _loading.setdefault(kernel.id, locks.Lock()):
            run = _loaded.get(kernel.id)
            if run is None or run[0] is not kernel:
                run = kernel, loading.load(kernel)
                if worlds.current().catalog.by_id.get(kernel.id) is kernel:    # not unregistered meanwhile
                    _loaded[kernel.id] = run
    return run[1]


def refuse(kernel: Kernel, facts: Mapping[str, Any], reason: Reason, until: float | None = None) -> None:
    """The kernel cannot serve this kind of call, and would fail the same way again: it is not asked again for this
    kind, or not before `until`. For every other it stays what it was."""
    name, kind = kernel.id, kind_to_compile(kernel.op, facts)
    if kernel.backend == "reference":
        return                                 # what the others fall back to stays

    def apply(world: World) -> World:
        known = world.refused.get(name, {})
        if kind in known or name not in world.catalog.by_id:
            return world
        kept = dict(islice(known.items(), max(len(known) + 1 - MOST_REFUSALS, 0), None))
        ends = world.refused_until if until is None else {**world.refused_until, (name, kind): until}
        refused = {**world.refused, name: {**kept, kind: reason}}
        return world.replace({kernel.op.name}, refused=refused, refused_until=ends)

    before = worlds.current()
    if kind not in before.refused.get(name, {}) and worlds.publish(apply, f"refused:{name}") is not before:
        events.emit(KernelRefused(kernel.op.name, name, kind, reason))


def refused(kernel: Kernel, facts: Mapping[str, Any]) -> bool:
    kinds = worlds.current().refused.get(kernel.id)
    return kinds is not None and kind_to_compile(kernel.op, facts) in kinds


def compile_failed(kernel: Kernel, fault: BaseException, facts: Mapping[str, Any]) -> Reason:
    """Compiling takes seconds and fails the same way again: the kernel is out for this kind of call."""
    kind = faults.classify(fault)
    reason = faults.reason_of(fault, kind)
    if kind != "refused" and not isinstance(fault, faults.WrongResult):
        reason = Reason(Code.KERNEL_FAILED, None, f"compiling failed: {reason.got}")
    refuse(kernel, facts, reason)
    return reason


def learn(override: Override | None) -> bool:
    """Numbers that an override compares must be in the key before it is used. False: they are not, because overrides
    with ever new numbers would make the key of every call longer; such a call is remembered by all its facts."""
    if override is None:
        return True
    leaves = {leaf for layer in override.layers for rule in layer.rules for test in rule.when for leaf in test.leaves()}
    known = worlds.current().extra_leaves
    if leaves <= known:
        return True
    if len(known | leaves) > MOST_TESTS:
        return False
    worlds.publish(lambda w: w.replace(extra_leaves=w.extra_leaves | leaves), "override")
    return True


def mark_unloadable(kernel: Kernel, reason: Reason) -> World:
    """Several threads may find it out at once; the world learns it, and an event says it, once."""
    new: list[World] = []

    def apply(world: World) -> World:
        if kernel.id in world.unloadable:
            return world
        new.append(world.replace({kernel.op.name}, unloadable={**world.unloadable, kernel.id: reason}))
        return new[0]

    world = worlds.publish(apply, f"unloadable:{kernel.id}")
    if new:
        events.emit(BackendUnavailable(kernel.op.name, kernel.id, reason))
    return world


def change_health(group: str, change: Callable[[health.Health | None], health.Health | None]) -> None:
    """Replace the breaker of `group` by `change` of it, in one step. Only the ops of its kernels choose anew."""
    if group.partition(".")[0] == "reference":
        return                                 # what the others are compared with, and fall back to, stays
    before = after = None

    def apply(world: World) -> World:
        nonlocal before, after
        before = world.health.get(group)
        after = change(before)
        rest = {k: h for k, h in world.health.items() if k != group}
        return world if after == before else world.replace(
            world.ops_of(group), health=rest if after is None else {**rest, group: after})

    worlds.publish(apply, f"health:{group}")
    state = after.state if after else "closed"
    if (before.state if before else "closed") != state:
        events.emit(HealthChanged(kernel=group, state=state, reason=after.reason if after else None))


class Failure(NamedTuple):
    """One kernel of a plan that did not serve a call."""

    name: str
    reason: Reason
    kernel: Kernel | None = None               # set where the fault may be the kernel's own


_known: dict[tuple[type[BaseException], str], Reason] = {}     # faults that came before: it may be every call
MOST_KNOWN = 256


def _judged(fault: BaseException) -> tuple[str, Reason]:
    """Of what kind a fault is, and how it is told. A kernel that fails again says the same again."""
    key = type(fault), str(fault)
    reason = _known.get(key)
    if reason is not None:
        return "kernel", reason
    kind = faults.classify(fault)
    reason = faults.reason_of(fault, kind)
    if kind == "kernel" and len(key[1]) < 1000:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = reason
    return kind, reason


def blame(world: World, kernel: Kernel | None, fault: BaseException, failures: list[Failure], op: str,
          facts: Mapping[str, Any] | None = None, counts: bool = True) -> None:
    """Note what went wrong. Raises where nothing else could serve the call either; counts nothing yet."""
    if kernel is None:
        failures.append(Failure("(unregistered)", faults.reason_of(fault, "kernel")))
        return
    kind, reason = _judged(fault)
    if kind == "sticky":
        change_health(kernel.health, lambda old: health.disabled(reason))
        raise DeviceLost(f"lz.{op}: {kernel.id} {reason.message}. {reason.code.advice}. Faults are reported late: an "
                         "earlier kernel may have caused it (CUDA_LAUNCH_BLOCKING=1 tells).", [reason]) from fault
    if kind in ("capture", "lost"):
        raise _capture_lost(kernel, reason, op, kind == "capture") from fault
    if isinstance(fault, LaunchRefused) and facts is not None:
        refuse(kernel, facts, reason)
    out = facts is not None and refused(kernel, facts)
    counts = counts and kind in ("kernel", "timeout") and not out and not isinstance(fault, ProbeBusy)
    failures.append(Failure(kernel.id, reason, kernel if counts else None))
    if isinstance(fault, faults.WrongResult) and counts and facts is not None:
        refuse(kernel, facts, reason)          # it would give the same again


def limits_of(world: World) -> health.Limits:
    setting = world.policy.setting
    return health.Limits(setting("breaker_threshold"), setting("breaker_rate"), setting("breaker_window"))


def count_fault(kernel: Kernel, reason: Reason, calls: int) -> None:
    """Hold a fault against the kernel, which was called `calls` times so far."""
    world = worlds.current()
    limits, cooldown, now = limits_of(world), world.policy.setting("breaker_cooldown"), time.monotonic()
    if world.catalog.by_id.get(kernel.id) is not kernel:
        return                                 # unregistered meanwhile: nothing is held against its namesake
    with _counting:
        found = _faults.get(kernel.id) or _faults.setdefault(kernel.id, health.Faults())
        too_many = found.add(calls, reason, limits)
        failures = found.among_last(calls, limits)
    if too_many or kernel.health in world.health:
        change_health(kernel.health,
                      lambda old: health.failed(old, reason, now, too_many, failures, cooldown))


def count_shortage(kernel: Kernel, facts: Mapping[str, Any], reason: Reason, calls: int) -> None:
    """A kernel ran out of memory where another then served. Once may be chance; as often as would open a breaker, and
    it is left out for this kind of call for a while, each time twice as long: a call need not fail first each time."""
    world = worlds.current()
    limits, now = limits_of(world), time.monotonic()
    key = kernel.id, kind_to_compile(kernel.op, facts)
    with _counting:
        found = _shortages.pop(key, None) or Shortage()
        _shortages[key] = found                # the latest last: the oldest are forgotten
        while len(_shortages) > MOST_REFUSALS:
            del _shortages[next(iter(_shortages))]
        again = 0.0 < now - found.ended < found.cooldown       # it has come back and fails at once
        if not (found.faults.add(calls, reason, limits) or again):
            return
        base = world.policy.setting("breaker_cooldown")
        found.cooldown = min(found.cooldown * 2, health.LONGEST_COOLDOWN) if again else base
        found.ended, found.faults = now + found.cooldown, health.Faults()
        until = found.ended
    refuse(kernel, facts, reason, until)


def count_success(kernel: Kernel) -> None:
    """A kernel whose breaker was half open has served a call."""
    with _counting:
        for other in worlds.current().catalog.kernels:
            if other.health == kernel.health:
                _faults.pop(other.id, None)
    change_health(kernel.health, health.succeeded)


def faults_of(kernel: str, calls: int) -> tuple[int, Reason | None]:
    """How many of its last calls failed, and the last fault."""
    with _counting:
        found = _faults.get(kernel)
        return (0, None) if found is None else (found.among_last(calls, limits_of(worlds.current())), found.last)


def _look(world: World) -> None:
    """What was unregistered leaves nothing behind."""
    global _catalog
    if world.catalog is _catalog:
        return
    _catalog = world.catalog
    known = world.catalog.by_id
    for kernel in [k for k, (owner, _) in list(_loaded.items()) if known.get(k) is not owner]:
        _loaded.pop(kernel, None)
    for kernel in [k for k in list(_loading) if k not in known]:
        _loading.pop(kernel, None)             # whoever loads it now has its lock
    with _counting:
        for kernel in [k for k in _faults if k not in known]:
            del _faults[kernel]
        for key in [k for k in _shortages if k[0] not in world.catalog.by_id]:
            del _shortages[key]


worlds.listen(_look)


def _suspect(reason: Reason) -> None:
    """Of what ran before a device was found lost, nobody can tell which kernel it was; but if only one library that is
    not torch's own was loaded, it is the one to take out."""
    groups = {kernel.health for kernel, _ in _loaded.values() if kernel.package and kernel.package != "torch"}
    if len(groups) == 1:
        change_health(groups.pop(), lambda old: health.disabled(reason))


faults.when_lost.append(_suspect)


def _capture_lost(kernel: Kernel, reason: Reason, op: str, guilty: bool) -> CudaGraphUnsafeError:
    """The error for a call inside a capture that is no more: no other kernel could serve it either."""
    if not guilty:
        return CudaGraphUnsafeError(
            f"lz.{op}: the CUDA graph capture under way was spoilt before {kernel.id} was called "
            f"({reason.got}); lz.graphs.validate_graph_capture says by what", [reason])
    from . import certificates  # reads files; not needed before something is captured
    certificates.note_capture(kernel, str(reason.got))
    worlds.publish(lambda w: w.replace(), f"capture:{kernel.id}")
    return CudaGraphUnsafeError(
        f"lz.{op}: {kernel.id} cannot be captured in a CUDA graph ({reason.got}), and the capture "
        "under way is lost; capture again: another kernel will be chosen", [reason])


def switched_off(world: World, op: Op, plan: Plan, refused: Sequence[Failure],
                 override: Override | None) -> NoKernelFoundError:
    """The error for a call that everything sdpa_kernel allows has refused when it was called."""
    reasons = [failure.reason for failure in refused]
    told = tuple(Rejected(failure.name, (failure.reason,)) for failure in refused)
    if plan.locked:
        return NamedKernelRefused(f"lz.{op.name}: {refused[0].name} was asked for by {plan.locked} and cannot serve "
                                  f"this call: {reasons[0]}", reasons)
    rejected = world.plan(op, plan.facts, override, thorough=True).rejected
    return NoKernelFoundError(
        f"lz.{op.name}: no kernel can serve this call\n{replace(plan, steps=(), rejected=told + rejected)}"
        f"\n  hint: {Code.SDPA_BACKEND_DISABLED.advice}", reasons)


def refusal(world: World, op: Op, facts: Mapping[str, Any], override: Override | None) -> NoKernelFoundError:
    """The error for a call nothing can serve: every kernel, every reason."""
    plan: Plan = world.plan(op, facts, override, thorough=True)
    reasons = [r for rejected in plan.rejected for r in rejected.reasons]
    if plan.locked:
        lock = world.surroundings(facts["device"], override).policy.lock(op.name, facts)
        patterns = lock.kernels if lock else ()
        ours = [r for r in plan.rejected if lock and lock.covers(r.kernel)]
        lines = [f"  {r.kernel}: {'; '.join(map(str, r.reasons))}" for r in ours] or [
            f"  no kernel of lz.{op.name} matches; there are {', '.join(k.id for k in world.kernels(op.name))}"]
        error = BackendNotAvailableError if ours and all(map(_not_available, ours)) else NamedKernelRefused
        return error(
            f"lz.{op.name}: {', '.join(patterns)} was asked for by {plan.locked} and cannot serve this call:\n"
            + "\n".join(lines), [x for r in ours for x in r.reasons])
    return NoKernelFoundError(f"lz.{op.name}: no kernel can serve this call\n{plan}", reasons)


def _not_available(rejected: Rejected) -> bool:
    """Is it the library that is missing or cannot be used here?"""
    codes = {reason.code for reason in rejected.reasons} - {Code.UNTESTED_ON_HARDWARE}
    return any(code.category is Category.SOFTWARE for code in codes)


def after_fork() -> None:
    """In the child: a thread that was loading a kernel is gone."""
    _loading.clear()
