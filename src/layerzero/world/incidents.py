"""Loads kernels and records their failures: faults are counted, kernels disabled or refused in the
world.

The world holds only what selection must know, and a change invalidates only the ops of that kernel.
Single faults are counted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ..machine import faults, loading, locks
from ..selection.engine import kind_to_compile
from ..spec.errors import (
    BackendNotAvailableError,
    CudaGraphUnsafeError,
    DeviceLost,
    NamedKernelRefused,
    NoKernelFoundError,
)
from ..spec.event import BackendUnavailable, HealthChanged, KernelRefused
from ..spec.kernel import Kernel
from ..spec.names import unknown_kernel
from ..spec.op import Op
from ..spec.plan import Plan, Rejected
from ..spec.reason import ANOTHER_KERNEL, Category, Code, Reason
from ..spec.rules.launch import LaunchRefused
from . import events, health
from . import snapshot as worlds
from .context import Override
from .registry import certificates
from .registry.catalog import Catalog
from .snapshot import World

_loaded: dict[str, Any] = {}
_loading: dict[str, locks.Lock] = {}          # kernel -> held while it is loaded
_faults: dict[str, health.Faults] = {}         # kernel -> its faults among its last calls
# (kernel, kind of call) -> how it ran out of memory there
_shortages: dict[tuple[str, str], MemoryShortage] = {}
_counting = locks.Lock()                       # for _faults and _shortages
_catalog: Catalog | None = None                # of the last world that _drop_unregistered saw
# tests that overrides add to the keys, until lz.clear_cache()
MAX_EXTRA_TESTS = 64
MAX_REFUSALS = 512                             # kinds of calls per kernel; the oldest are dropped


class MemoryShortage:
    """How often a kernel ran out of memory for one kind of call, and until when it is left out."""

    def __init__(self) -> None:
        self.faults = health.Faults()
        self.cooldown = self.ends_at = 0.0


class ProbeBusy(RuntimeError):
    """Another call is probing a half-open breaker; this one goes to the next kernel."""


def loaded(kernel: Kernel) -> Any:
    """Returns the kernel, loaded once; others can load meanwhile, as it may take minutes."""
    entry = _loaded.get(kernel.id)
    if entry is None or entry[0] is not kernel:
        with _loading.setdefault(kernel.id, locks.Lock()):
            entry = _loaded.get(kernel.id)
            if entry is None or entry[0] is not kernel:
                entry = kernel, loading.load(kernel)
                # unless it was unregistered meanwhile
                if worlds.current().catalog.by_id.get(kernel.id) is kernel:
                    _loaded[kernel.id] = entry
    return entry[1]


def refuse(kernel: Kernel, facts: Mapping[str, Any], reason: Reason,
           until: float | None = None) -> None:
    """Excludes the kernel from this kind of call, for good or `until` a time."""
    name, kind = kernel.id, kind_to_compile(kernel.op, facts)
    if kernel.backend == "reference":
        return                                 # the fallback of all others is never excluded

    def apply(world: World) -> World:
        old = world.refused.get(name, {})
        if kind in old or name not in world.catalog.by_id:
            return world
        newest = dict(islice(old.items(), max(len(old) + 1 - MAX_REFUSALS, 0), None))
        until_by_kind = (world.refused_until if until is None
                         else {**world.refused_until, (name, kind): until})
        refused = {**world.refused, name: {**newest, kind: reason}}
        return world.replace({kernel.op.name}, refused=refused, refused_until=until_by_kind)

    before = worlds.current()
    if (kind not in before.refused.get(name, {})
        and worlds.publish(apply, f"refused:{name}") is not before):
        events.emit(KernelRefused(kernel.op.name, name, kind, reason))


def refused(kernel: Kernel, facts: Mapping[str, Any]) -> bool:
    kinds = worlds.current().refused.get(kernel.id)
    return kinds is not None and kind_to_compile(kernel.op, facts) in kinds


def compile_failed(kernel: Kernel, fault: BaseException, facts: Mapping[str, Any]) -> Reason:
    """Excludes the kernel from this kind of call: compiling would fail the same way again."""
    kind = faults.classify(fault)
    reason = faults.reason_of(fault, kind)
    if kind != "refused" and not isinstance(fault, faults.WrongResult):
        reason = Reason(Code.KERNEL_FAILED, None, f"compiling failed: {reason.got}")
    refuse(kernel, facts, reason)
    return reason


def extend_keys(override: Override | None) -> bool:
    """Adds the tests of an override to the cache keys, which must tell its cases apart before it is
    used.

    Returns False beyond MAX_EXTRA_TESTS: ever new numbers would make the key of every call longer.
    Such a call is cached by all its facts instead.
    """
    if override is None:
        return True
    leaves = {leaf for layer in override.layers for rule in layer.rules for test in rule.when
              for leaf in test.leaves()}
    known = worlds.current().extra_leaves
    if leaves <= known:
        return True
    if len(known | leaves) > MAX_EXTRA_TESTS:
        return False
    worlds.publish(lambda w: w.replace(extra_leaves=w.extra_leaves | leaves), "override")
    return True


def mark_unloadable(kernel: Kernel, reason: Reason) -> World:
    """Records that a kernel cannot be loaded; published and reported once."""
    is_new = False

    def apply(world: World) -> World:
        nonlocal is_new
        is_new = kernel.id not in world.unloadable
        return world.replace({kernel.op.name}, unloadable={**world.unloadable, kernel.id: reason}
                             ) if is_new else world

    world = worlds.publish(apply, f"unloadable:{kernel.id}")
    if is_new:
        events.emit(BackendUnavailable(kernel.op.name, kernel.id, reason))
    return world


def change_health(group: str,
                  change: Callable[[health.Health | None], health.Health | None]) -> None:
    """Replaces the breaker of `group` atomically; only the ops of its kernels select again."""
    if group.partition(".")[0] == "reference":
        return                                 # the fallback of all others is never disabled
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
        events.emit(HealthChanged(kernel=group, state=state, reason=after.reason if after
                                  else None))


class Failure(NamedTuple):
    """One kernel of a plan that did not serve a call."""

    name: str
    reason: Reason
    kernel: Kernel | None = None               # set if the fault may be the kernel's own


# of earlier faults: every call may raise
_known_reasons: dict[tuple[type[BaseException], str], Reason] = {}
MAX_KNOWN_REASONS = 256


def _classify(fault: BaseException) -> tuple[str, Reason]:
    """Returns the class of a fault and its reason, cached: the same fault comes again."""
    key = type(fault), str(fault)
    reason = _known_reasons.get(key)
    if reason is not None:
        return "kernel", reason
    kind = faults.classify(fault)
    reason = faults.reason_of(fault, kind)
    if kind == "kernel" and len(key[1]) < 1000:
        if len(_known_reasons) >= MAX_KNOWN_REASONS:
            _known_reasons.clear()
        _known_reasons[key] = reason
    return kind, reason


def blame(world: World, kernel: Kernel | None, fault: BaseException, failures: list[Failure],
          op: str, facts: Mapping[str, Any] | None = None, counts: bool = True) -> None:
    """Appends the fault to `failures`; raises where no other kernel could serve. No count yet."""
    if kernel is None:
        failures.append(Failure("(unregistered)", faults.reason_of(fault, "kernel")))
        return
    kind, reason = _classify(fault)
    if kind == "sticky":
        change_health(kernel.health, lambda old: health.disabled(reason))
        raise DeviceLost(
            f"lz.{op}: {kernel.id} {reason.message}. {reason.code.advice}. Faults are reported "
            "late: an earlier kernel may have caused it (CUDA_LAUNCH_BLOCKING=1 tells).",
            [reason]) from fault
    if kind in ("capture", "lost"):
        raise _capture_error(kernel, reason, op, kind == "capture") from fault
    if isinstance(fault, LaunchRefused) and facts is not None:
        refuse(kernel, facts, reason)
    out = facts is not None and refused(kernel, facts)
    counts = (counts and kind in ("kernel", "timeout") and not out
              and not isinstance(fault, (ProbeBusy, faults.WorkerStarting)))
    failures.append(Failure(kernel.id, reason, kernel if counts else None))
    if isinstance(fault, faults.WrongResult) and counts and facts is not None:
        refuse(kernel, facts, reason)          # it would return the same again


def limits_of(world: World) -> health.BreakerLimits:
    setting = world.policy.setting
    return health.BreakerLimits(setting("breaker_threshold"), setting("breaker_rate"),
                                setting("breaker_window"))


def count_fault(kernel: Kernel, reason: Reason, calls: int) -> None:
    """Counts a fault of the kernel, which was called `calls` times so far."""
    world = worlds.current()
    limits, cooldown, now = limits_of(world), world.policy.setting(
        "breaker_cooldown"), time.monotonic()
    if world.catalog.by_id.get(kernel.id) is not kernel:
        return                                 # unregistered meanwhile: its successor is innocent
    with _counting:
        faults_so_far = _faults.get(kernel.id) or _faults.setdefault(kernel.id, health.Faults())
        too_many = faults_so_far.add(calls, reason, limits)
        # the next hang in a worker would cost a caller as much time again
        too_many |= kernel.isolated and reason.code is Code.KERNEL_TIMEOUT
        failures = faults_so_far.among_last(calls, limits)
    if too_many or kernel.health in world.health:
        change_health(kernel.health,
                      lambda old: health.after_failure(old, reason, now, too_many, failures,
                                                       cooldown))


def count_shortage(kernel: Kernel, facts: Mapping[str, Any], reason: Reason, calls: int) -> None:
    """Counts that a kernel ran out of memory where another one then served.

    Once may be chance. As often as would open a breaker, the kernel is left out for this kind of
    call, each time for twice as long, so that not every call has to fail first.
    """
    world = worlds.current()
    limits, now = limits_of(world), time.monotonic()
    key = kernel.id, kind_to_compile(kernel.op, facts)
    with _counting:
        shortage = _shortages.pop(key, None) or MemoryShortage()
        _shortages[key] = shortage             # newest last: the oldest are dropped
        while len(_shortages) > MAX_REFUSALS:
            del _shortages[next(iter(_shortages))]
        # it was let back in and failed at once
        relapsed = 0.0 < now - shortage.ends_at < shortage.cooldown
        if not (shortage.faults.add(calls, reason, limits) or relapsed):
            return
        base = world.policy.setting("breaker_cooldown")
        shortage.cooldown = min(shortage.cooldown * 2, health.MAX_COOLDOWN) if relapsed else base
        shortage.ends_at, shortage.faults = now + shortage.cooldown, health.Faults()
        until = shortage.ends_at
    refuse(kernel, facts, reason, until)


def count_success(kernel: Kernel) -> None:
    """Closes the breaker of a kernel that served a call while half open."""
    with _counting:
        for other in worlds.current().catalog.kernels:
            if other.health == kernel.health:
                _faults.pop(other.id, None)
    change_health(kernel.health, health.after_success)


def faults_of(kernel: str, calls: int) -> tuple[int, Reason | None]:
    """Returns how many of its last calls failed, and the last fault."""
    with _counting:
        kernel_faults = _faults.get(kernel)
        if kernel_faults is None:
            return 0, None
        return kernel_faults.among_last(calls, limits_of(worlds.current())), kernel_faults.last


def _drop_unregistered(world: World) -> None:
    """Drops all state of kernels that were unregistered."""
    global _catalog
    if world.catalog is _catalog:
        return
    _catalog = world.catalog
    known = world.catalog.by_id
    for kernel in [k for k, (owner, _) in _loaded.copy().items() if known.get(k) is not owner]:
        _loaded.pop(kernel, None)
    for kernel in [k for k in list(_loading) if k not in known]:
        _loading.pop(kernel, None)             # a thread that loads it now holds the lock itself
    with _counting:
        for kernel in [k for k in list(_faults) if k not in known]:
            _faults.pop(kernel, None)
        for key in [k for k in list(_shortages) if k[0] not in world.catalog.by_id]:
            _shortages.pop(key, None)


worlds.add_listener(_drop_unregistered)


def _disable_suspect(reason: Reason) -> None:
    """Disables the only loaded library besides torch after a device was lost. Which earlier kernel
    did it is unknown; with several libraries loaded none is disabled."""
    groups = {kernel.health for kernel, _ in _loaded.values() if kernel.package
              and kernel.package != "torch"}
    if len(groups) == 1:
        change_health(groups.pop(), lambda old: health.disabled(reason))


faults.on_device_lost.append(_disable_suspect)


def _capture_error(kernel: Kernel, reason: Reason, op: str, guilty: bool) -> CudaGraphUnsafeError:
    """Returns the error for a call inside an invalidated capture, which no kernel can serve."""
    if not guilty:
        return CudaGraphUnsafeError(
            f"lz.{op}: the CUDA graph capture under way was spoilt before {kernel.id} was called "
            f"({reason.got}); lz.graphs.validate_graph_capture says by what", [reason])
    certificates.record_capture(kernel, str(reason.got))
    worlds.publish(lambda w: w.replace(), f"capture:{kernel.id}")
    return CudaGraphUnsafeError(
        f"lz.{op}: {kernel.id} cannot be captured in a CUDA graph ({reason.got}), and the capture "
        "under way is lost; capture again: another kernel will be chosen", [reason])


def sdpa_disabled_error(world: World, op: Op, plan: Plan, refused: Sequence[Failure],
                        override: Override | None) -> NoKernelFoundError:
    """Returns the error for a call that every implementation sdpa_kernel allows has refused."""
    reasons = [failure.reason for failure in refused]
    refusals = tuple(Rejected(failure.name, (failure.reason,)) for failure in refused)
    if plan.locked:
        return NamedKernelRefused(
            f"lz.{op.name}: {refused[0].name} was asked for by {plan.locked} and cannot serve "
            f"this call: {reasons[0]}", reasons)
    rejected = world.plan(op, plan.facts, override, thorough=True).rejected
    shown = replace(plan, steps=(), rejected=refusals + rejected)
    return NoKernelFoundError(
        f"lz.{op.name}: no kernel can serve this call\n{shown}"
        f"\n  hint: {Code.SDPA_BACKEND_DISABLED.advice}", reasons)


def no_kernel_error(world: World, op: Op, facts: Mapping[str, Any],
                    override: Override | None) -> NoKernelFoundError:
    """Returns the error for a call no kernel can serve: every kernel with every reason."""
    plan: Plan = world.plan(op, facts, override, thorough=True)
    reasons = [r for rejected in plan.rejected for r in rejected.reasons]
    if plan.locked:
        lock = world.selection_context(facts["device"], override).policy.lock(op.name, facts)
        patterns = lock.kernels if lock else ()
        matching = [r for r in plan.rejected if lock and lock.covers(r.kernel)]
        lines = [f"  {r.kernel}: {'; '.join(map(str, r.reasons))}" for r in matching] or [
            f"  {unknown_kernel(p, world.catalog.op_of_kernel, op.name)}" for p in patterns]
        error = (BackendNotAvailableError if matching and all(map(_not_available, matching))
                 else NamedKernelRefused)
        return error(
            f"lz.{op.name}: {', '.join(patterns)} was asked for by {plan.locked} and cannot serve "
            "this call:\n"
            + "\n".join([*lines, *_hint(matching, plan.locked)]),
            [x for r in matching for x in r.reasons])
    return NoKernelFoundError(
        f"lz.{op.name}: no kernel can serve this call\n{plan}\n  hint: change what a reason names, "
        "or the rule that forbids a kernel (lz.get_config() shows the rules)", reasons)


def _hint(refused: Sequence[Rejected], locked: str) -> list[str]:
    """Returns what to do about kernels that were asked for by name, in one line."""
    advice = dict.fromkeys(reason.code.remedy for r in refused for reason in r.reasons)
    leave = {"backend=": "leave backend= out", "lz.lock()": "call lz.unlock()"}
    parts = [*list(filter(None, advice))[:3], leave.get(locked, f"change {locked}")]
    return [f"  hint: {'; '.join(parts)} to {ANOTHER_KERNEL}"]


def _not_available(rejected: Rejected) -> bool:
    """Is it the library that is missing or cannot be used here?"""
    codes = {reason.code for reason in rejected.reasons} - {Code.UNTESTED_ON_HARDWARE}
    return any(code.category is Category.SOFTWARE for code in codes)


def after_fork() -> None:
    """Frees the load locks in a child: a thread that was loading a kernel is gone."""
    _loading.clear()
