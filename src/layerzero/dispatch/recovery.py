"""After a fault: whose it was, whether the inputs are still what they were, and who serves the call instead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..machine import faults, loading, watchdog
from ..machine.faults import Hung, InputsChanged, PlanExhausted
from ..spec.errors import InputDamaged, InvalidCall, KernelExecutionError, SelectionTimeoutError
from ..spec.event import Fallback
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ..world import context, events, health
from ..world import snapshot as worlds
from ..world.incidents import (
    Failure,
    blame,
    change_health,
    count_fault,
    count_shortage,
    count_success,
    mark_unloadable,
    refuse,
    sdpa_disabled_error,
)
from . import protection
from .background.exploring import Exploring
from .cache import Entry

if TYPE_CHECKING:
    from .dispatcher import Dispatcher


def recover(found: Dispatcher, entry: Entry, values: tuple[Any, ...], fault: BaseException) -> Any:
    """The kernel of `entry` threw `fault`: the next one of the same plan serves, if the inputs were left alone."""
    if isinstance(fault, (PlanExhausted, *faults.PASSED_ON)):
        raise fault.error if isinstance(fault, PlanExhausted) else fault
    op, world = found.op, worlds.current()
    first = world.catalog.by_id.get(entry.plan.steps[0].kernel)
    if isinstance(fault, InputsChanged):
        raise _damaged(found, entry, first, fault) from fault
    if isinstance(fault, Hung):
        raise _hung(found, entry, first, fault) from fault
    try:
        facts = found.facts(values)
    except InvalidCall as mistake:
        raise mistake from fault
    failures: list[Failure] = []
    plain = facts["tensor_kind"] == "plain"        # what a subclass makes of a kernel is not the kernel's fault
    blame(world, first, fault, failures, op.name, facts, plain)
    _suspect(found, entry, first, failures[0])
    others = [(world.catalog.by_id[s.kernel], s) for s in entry.plan.steps[1:] if s.kernel in world.catalog.by_id]
    limit = world.surroundings(facts["device"], context.current.get()).policy.setting("call_timeout")
    for kernel, step in sorted(others, key=lambda other: other[0].jit):    # what might compile comes last
        found.ledger.tried(kernel.id)
        try:
            run = found.binding(kernel, step, facts, {}).run
            if limit is not None and not facts["grad"] and not facts["graph"]:
                run = watchdog.with_timeout(run, limit)
            out = found.guarded(kernel, entry.plan, run)(*values)
        except InputsChanged as changed:
            raise _damaged(found, entry, kernel, changed) from changed
        except Hung as hung:
            raise _hung(found, entry, kernel, hung) from hung
        except loading.LoadFailed as e:
            mark_unloadable(kernel, e.reason)
            failures.append(Failure(kernel.id, e.reason))
            continue
        except faults.PASSED_ON:
            raise
        except faults.FAULTS as next_fault:
            blame(world, kernel, next_fault, failures, op.name, facts, plain)
            continue
        if kernel.health in worlds.current().health:
            count_success(kernel)
        found.ledger.fell_back(kernel.id)
        _count(found, failures)
        for failure in failures:
            if failure.reason.code is Code.OUT_OF_MEMORY and failure.name in world.catalog.by_id:
                short = world.catalog.by_id[failure.name]
                count_shortage(short, facts, failure.reason, found.calls_of(short.id))
        events.emit(Fallback(op.name, failures[0].name, kernel.id, failures[0].reason))
        return out
    if all(failure.reason.code is Code.SDPA_BACKEND_DISABLED for failure in failures):
        raise sdpa_disabled_error(world, op, entry.plan, failures, context.current.get()) from fault
    if len(failures) == 1:                     # where several kernels fail on one call it is the call that is wrong
        _count(found, failures)
    lines = [f"  {failure.name}: {failure.reason.message}" for failure in failures]
    named = f" (named by {entry.plan.locked}, so nothing else was tried)" if entry.plan.locked else ""
    raise KernelExecutionError(f"lz.{op.name}: every kernel of the plan failed{named}:\n" + "\n".join(lines),
                               [failure.reason for failure in failures]) from fault


def _count(found: Dispatcher, failures: list[Failure]) -> None:
    for failure in failures:
        if failure.kernel is not None:
            count_fault(failure.kernel, failure.reason, found.calls_of(failure.kernel.id))


def _damaged(found: Dispatcher, entry: Entry, kernel: Kernel | None, fault: InputsChanged) -> InputDamaged:
    """The error for a call whose inputs are no longer the caller's; its kernel is not asked again for such calls."""
    name, reason, op = entry.plan.steps[0].kernel if kernel is None else kernel.id, fault.reason, found.op
    if kernel is not None:
        count_fault(kernel, reason, found.calls_of(kernel.id))
        refuse(kernel, entry.plan.facts, reason)
    written = ", ".join(n for n in fault.names if n in op.in_place)
    note = f" ({written}: lz.{op.name} writes into it, and this was not finished)" if written else ""
    return InputDamaged(
        f"lz.{op.name}: {name} failed ({reason.want}) after it had changed {reason.got}{note}; the inputs of a call "
        "must be what they were before another kernel may serve it, so nothing else was tried.\n"
        f"  hint: {reason.code.advice}", [reason])


def _hung(found: Dispatcher, entry: Entry, kernel: Kernel | None, fault: Hung) -> SelectionTimeoutError:
    """The error for a call that took too long. The next one must not hang too: the breaker opens at once."""
    name, reason = entry.plan.steps[0].kernel if kernel is None else kernel.id, fault.reason
    if kernel is not None:
        now, cooldown = time.monotonic(), worlds.current().policy.setting("breaker_cooldown")
        change_health(kernel.health, lambda old: health.after_failure(old, reason, now, True, 1, cooldown))
    return SelectionTimeoutError(
        f"lz.{found.op.name}: {name} {reason.message}, the call_timeout of the policy. It cannot be stopped and may "
        "be at work on the inputs still, so no other kernel was tried.\n  hint: leave these inputs alone and call "
        "again with others; lz.testing.probe runs a kernel in a process of its own, where it can be stopped", [reason])


def _suspect(found: Dispatcher, entry: Entry, kernel: Kernel | None, failure: Failure) -> None:
    """A kernel that has failed may fail again: for a while its inputs are looked at with more care."""
    if kernel is None or failure.kernel is None or protection.is_ours(kernel) or isinstance(entry.run, Exploring):
        return
    if not isinstance(entry.run, protection.Guard) or entry.run.left is not None:
        run = found.guarded(kernel, entry.plan, entry.binding.run, clean=protection.CLEAN)
        entry.run = run
        protection.place(run, entry, "run")
