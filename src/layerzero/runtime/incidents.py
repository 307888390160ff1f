"""What befalls a kernel outside the call itself: it is loaded, blamed, taken out, refused; the world learns of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..spec.errors import DeviceLost, KernelFailed, NamedKernelRefused, NoKernel
from ..spec.event import BackendUnavailable, HealthChanged
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import Plan, Rejected
from ..spec.reason import Code, Reason
from . import events, faults, health, loading
from . import world as worlds
from .context import Override
from .world import World

_loaded: dict[str, Any] = {}
_loading: dict[str, threading.RLock] = {}      # kernel -> held while it is loaded


class ProbeBusy(RuntimeError):
    """Another call is probing a half-open breaker; this one goes to the next kernel."""


def loaded(kernel: Kernel) -> Any:
    """Loaded once, and without making the loading of others wait: it may take minutes."""
    run = _loaded.get(kernel.id)
    if run is None or run[0] is not kernel:
        with _loading.setdefault(kernel.id, threading.RLock()):
            run = _loaded.get(kernel.id)
            if run is None or run[0] is not kernel:
                run = _loaded[kernel.id] = (kernel, loading.load(kernel))
    return run[1]


def compile_failed(kernel: Kernel, fault: BaseException) -> Reason:
    """Compiling takes seconds and fails the same way again: the kernel is out for the rest of the process."""
    text = faults.reason_of(fault, "kernel").got
    reason = Reason(Code.KERNEL_FAILED, None, f"compiling failed: {text}")
    change_health(kernel.id, lambda old: health.disabled(reason))
    return reason


def learn(override: Override | None) -> None:
    """Numbers that an override compares must be in the key before it is used."""
    if override is None:
        return
    leaves = {leaf for layer in override.layers for rule in layer.rules for test in rule.when for leaf in test.leaves()}
    if not leaves <= worlds.current().extra_leaves:
        worlds.publish(lambda w: w.but(extra_leaves=w.extra_leaves | leaves), "override")


def mark_unloadable(kernel: Kernel, reason: Reason) -> World:
    events.emit(BackendUnavailable(kernel.op.name, kernel.id, reason))
    return worlds.publish(lambda w: w.but(unloadable={**w.unloadable, kernel.id: reason}), f"unloadable:{kernel.id}")


def change_health(group: str, change: Callable[[health.Health | None], health.Health | None]) -> None:
    """Replace the health of `group` by `change` of it; in one step, so that no fault is lost among threads."""
    before = after = None

    def apply(world: World) -> World:
        nonlocal before, after
        before = world.health.get(group)
        after = change(before)
        rest = {k: h for k, h in world.health.items() if k != group}
        return world if after == before else world.but(health=rest if after is None else {**rest, group: after})

    worlds.publish(apply, f"health:{group}")
    state = after.state if after else "closed"
    if (before.state if before else "closed") != state:
        events.emit(HealthChanged(kernel=group, state=state, reason=after.reason if after else None))


def blame(world: World, kernel: Kernel | None, fault: BaseException, failures: list[tuple[str, Reason]],
          op: str, counts: bool = True) -> None:
    """Record what went wrong and count it against the kernel if it was the kernel."""
    if kernel is None:
        failures.append(("(unregistered)", faults.reason_of(fault, "kernel")))
        return
    kind = faults.classify(fault)
    reason = faults.reason_of(fault, kind)
    failures.append((kernel.id, reason))
    if kind == "sticky":
        change_health(kernel.health, lambda old: health.disabled(reason))
        raise DeviceLost(f"lz.{op}: {kernel.id} {reason.message}. {reason.code.advice}. Faults are reported late: an "
                         "earlier kernel may have caused it (CUDA_LAUNCH_BLOCKING=1 tells).", [reason]) from fault
    if kind in ("capture", "lost"):
        raise _capture_lost(kernel, reason, op, kind == "capture") from fault
    if counts and kind in ("kernel", "timeout") and not isinstance(fault, ProbeBusy):
        threshold, cooldown = map(world.policy.setting, ("breaker_threshold", "breaker_cooldown"))
        now = time.monotonic()
        change_health(kernel.health, lambda old: health.failed(old, reason, now, threshold, cooldown))


def _suspect(reason: Reason) -> None:
    """Of what ran before a device was found lost, nobody can tell which kernel it was; but if only one library that is
    not torch's own was loaded, it is the one to take out."""
    groups = {kernel.health for kernel, _ in _loaded.values() if kernel.package and kernel.package != "torch"}
    if len(groups) == 1:
        change_health(groups.pop(), lambda old: health.disabled(reason))


faults.when_lost.append(_suspect)


def _capture_lost(kernel: Kernel, reason: Reason, op: str, guilty: bool) -> KernelFailed:
    """The error for a call inside a capture that is no more: no other kernel could serve it either."""
    if not guilty:
        return KernelFailed(f"lz.{op}: the CUDA graph capture under way was spoilt before {kernel.id} was called "
                            f"({reason.got}); lz.validate_graph_capture says by what", [reason])
    from . import certificates  # reads files; not needed before something is captured
    certificates.note_capture(kernel, str(reason.got))
    worlds.publish(lambda w: w.but(), f"capture:{kernel.id}")
    return KernelFailed(f"lz.{op}: {kernel.id} cannot be captured in a CUDA graph ({reason.got}), and the capture "
                        "under way is lost; capture again: another kernel will be chosen", [reason])


def switched_off(world: World, op: Op, plan: Plan, refused: Sequence[tuple[str, Reason]],
                 override: Override | None) -> NoKernel:
    """The error for a call that everything sdpa_kernel allows has refused when it was called."""
    reasons = [reason for _, reason in refused]
    told = tuple(Rejected(kernel, (reason,)) for kernel, reason in refused)
    if plan.locked:
        return NamedKernelRefused(f"lz.{op.name}: {refused[0][0]} was asked for by {plan.locked} and cannot serve this "
                                  f"call: {reasons[0]}", reasons)
    rejected = world.plan(op, plan.facts, override, thorough=True).rejected
    return NoKernel(f"lz.{op.name}: no kernel can serve this call\n{replace(plan, steps=(), rejected=told + rejected)}"
                    f"\n  hint: {Code.SDPA_BACKEND_DISABLED.advice}", reasons)


def refusal(world: World, op: Op, facts: Mapping[str, Any], override: Override | None) -> NoKernel:
    """The error for a call nothing can serve: every kernel, every reason."""
    plan: Plan = world.plan(op, facts, override, thorough=True)
    reasons = [r for rejected in plan.rejected for r in rejected.reasons]
    if plan.locked:
        lock = world.surroundings(facts["device"], override).policy.lock(op.name, facts)
        patterns = lock.kernels if lock else ()
        ours = [r for r in plan.rejected if lock and lock.covers(r.kernel)]
        lines = [f"  {r.kernel}: {'; '.join(map(str, r.reasons))}" for r in ours] or [
            f"  no kernel of lz.{op.name} matches; there are {', '.join(k.id for k in world.kernels(op.name))}"]
        return NamedKernelRefused(
            f"lz.{op.name}: {', '.join(patterns)} was asked for by {plan.locked} and cannot serve this call:\n"
            + "\n".join(lines), [x for r in ours for x in r.reasons])
    return NoKernel(f"lz.{op.name}: no kernel can serve this call\n{plan}", reasons)


def after_fork() -> None:
    """In the child: a thread that was loading a kernel is gone."""
    _loading.clear()
