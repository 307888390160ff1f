"""Recovery after a fault: whose it was, whether the inputs are unchanged, and who serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..machine import faults, loading, watchdog
from ..machine.faults import Hung, InputsChanged, PlanExhausted, WorkerStarting
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
from ..world.snapshot import World
from . import protection, wrapping
from .background.exploring import Exploring
from .cache import Entry

if TYPE_CHECKING:
    from .dispatcher import Dispatcher


def recover(dispatcher: Dispatcher, entry: Entry, values: tuple[Any, ...],
            fault: BaseException) -> Any:
    """Serve the call with the next kernel of the plan after that of `entry` threw `fault`.

    Raises where no other kernel may be tried: the call is wrong, its inputs were changed, or the
    kernel still runs.
    """
    if isinstance(fault, (PlanExhausted, *faults.PASSED_ON)):
        raise fault.error if isinstance(fault, PlanExhausted) else fault
    op, world = dispatcher.op, worlds.current()
    first = world.catalog.by_id.get(entry.plan.steps[0].kernel)
    if isinstance(fault, InputsChanged):
        raise _input_damaged(dispatcher, entry, first, fault) from fault
    if isinstance(fault, Hung):
        raise _timed_out(dispatcher, entry, first, fault) from fault
    try:
        facts = dispatcher.facts(values)
    except InvalidCall as mistake:
        raise mistake from fault
    if isinstance(fault, WorkerStarting) and len(entry.plan.steps) == 1:
        try:                                   # named: there is no other to serve meanwhile
            fault.wait()
            return entry.binding.run(*values)
        except faults.FAULTS as again:
            fault = again
    failures: list[Failure] = []
    plain = facts["tensor_kind"] == "plain"    # a subclass may make any kernel fail
    blame(world, first, fault, failures, op.name, facts, plain)
    _guard_again(dispatcher, entry, first, failures[0])
    next_steps = [(world.catalog.by_id[s.kernel], s) for s in entry.plan.steps[1:]
                  if s.kernel in world.catalog.by_id]
    limit = world.selection_context(facts["device"],
                                    context.current.get()).policy.setting("call_timeout")
    # those that may have to compile come last
    next_steps.sort(key=lambda candidate: candidate[0].jit)
    for kernel, step in next_steps:
        dispatcher.ledger.count_attempt(kernel.id)
        try:
            run = dispatcher.bind(kernel, step, facts, {}).run
            if (limit is not None and not facts["grad"] and not facts["graph"]
                and not kernel.isolated):
                run = watchdog.with_timeout(run, limit)
            out = wrapping.wrap_guard(dispatcher, kernel, entry.plan, run)(*values)
        except InputsChanged as changed:
            raise _input_damaged(dispatcher, entry, kernel, changed) from changed
        except Hung as hung:
            raise _timed_out(dispatcher, entry, kernel, hung) from hung
        except loading.LoadFailed as e:
            mark_unloadable(kernel, e.reason)
            failures.append(Failure(kernel.id, e.reason))
            continue
        except faults.PASSED_ON:
            raise
        except faults.FAULTS as next_fault:
            blame(world, kernel, next_fault, failures, op.name, facts, plain)
            continue
        _count_fallback(dispatcher, world, kernel, facts, failures)
        return out
    raise _all_failed(dispatcher, world, entry, failures) from fault


def _count_fallback(dispatcher: Dispatcher, world: World, served_by: Kernel,
                    facts: Mapping[str, Any], failures: list[Failure]) -> None:
    """Count the faults of the kernels that failed before one served, and tell of it."""
    if served_by.health in worlds.current().health:
        count_success(served_by)
    dispatcher.ledger.count_fallback(served_by.id)
    _count_faults(dispatcher, failures)
    for failure in failures:
        if failure.reason.code is Code.OUT_OF_MEMORY and failure.name in world.catalog.by_id:
            failed = world.catalog.by_id[failure.name]
            count_shortage(failed, facts, failure.reason, dispatcher.calls_of(failed.id))
    events.emit(Fallback(dispatcher.op.name, failures[0].name, served_by.id, failures[0].reason))


def _all_failed(dispatcher: Dispatcher, world: World, entry: Entry,
                failures: list[Failure]) -> Exception:
    """Return the error of a call on which every kernel of the plan failed. Where several did, the
    call is wrong, and no fault is counted."""
    op, plan = dispatcher.op, entry.plan
    if all(failure.reason.code is Code.SDPA_BACKEND_DISABLED for failure in failures):
        return sdpa_disabled_error(world, op, plan, failures, context.current.get())
    if len(failures) == 1:
        _count_faults(dispatcher, failures)
    lines = [f"  {failure.name}: {failure.reason.message}" for failure in failures]
    named = f" (named by {plan.locked}, so nothing else was tried)" if plan.locked else ""
    short = all(failure.reason.code is Code.OUT_OF_MEMORY for failure in failures)
    error = faults.KernelOutOfMemory if short else KernelExecutionError
    return error(f"lz.{op.name}: every kernel of the plan failed{named}:\n" + "\n".join(lines),
                 [failure.reason for failure in failures])


def _count_faults(dispatcher: Dispatcher, failures: list[Failure]) -> None:
    for failure in failures:
        if failure.kernel is not None:
            count_fault(failure.kernel, failure.reason, dispatcher.calls_of(failure.kernel.id))


def _input_damaged(dispatcher: Dispatcher, entry: Entry, kernel: Kernel | None,
                   fault: InputsChanged) -> InputDamaged:
    """Return the error for a call whose inputs were changed; its kernel is asked no more."""
    name, reason, op = (entry.plan.steps[0].kernel if kernel is None else kernel.id, fault.reason,
                        dispatcher.op)
    if kernel is not None:
        count_fault(kernel, reason, dispatcher.calls_of(kernel.id))
        refuse(kernel, entry.plan.facts, reason)
    written = ", ".join(n for n in fault.names if n in op.in_place)
    note = (f" ({written}: lz.{op.name} writes into it, and this was not finished)" if written
            else "")
    return InputDamaged(
        f"lz.{op.name}: {name} failed ({reason.want}) after it had changed {reason.got}{note}; the "
        "inputs of a call must be what they were before another kernel may serve it, so nothing "
        f"else was tried.\n  hint: {reason.code.advice}", [reason])


def _timed_out(dispatcher: Dispatcher, entry: Entry, kernel: Kernel | None,
               fault: Hung) -> SelectionTimeoutError:
    """Return the error for a call that took too long; the breaker opens at once."""
    name, reason = entry.plan.steps[0].kernel if kernel is None else kernel.id, fault.reason
    if kernel is not None:
        now, cooldown = time.monotonic(), worlds.current().policy.setting("breaker_cooldown")
        change_health(kernel.health,
                      lambda old: health.after_failure(old, reason, now, True, 1, cooldown))
    return SelectionTimeoutError(
        f"lz.{dispatcher.op.name}: {name} {reason.message}, the call_timeout of the policy. It "
        "cannot be stopped and may be at work on the inputs still, so no other kernel was tried.\n "
        " hint: leave these inputs alone and call again with others; lz.testing.probe runs a "
        "kernel in a process of its own, where it can be stopped",
        [reason],
    )


def _guard_again(dispatcher: Dispatcher, entry: Entry, kernel: Kernel | None,
                 failure: Failure) -> None:
    """Guard the calls of a failed kernel for a while: it may fail again."""
    if (kernel is None or failure.kernel is None or protection.is_ours(kernel)
        or isinstance(entry.run, Exploring)):
        return
    if not isinstance(entry.run, protection.Guard) or entry.run.calls_left is not None:
        run = wrapping.wrap_guard(dispatcher, kernel, entry.plan, entry.binding.run,
                                  clean_calls=protection.CLEAN_CALLS)
        entry.run = run
        protection.unguard_later(run, entry, "run")
