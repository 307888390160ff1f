"""What an entry runs around its kernel: a probe of one whose breaker is open, a compiler that works
elsewhere, a time limit, the guard of its first calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..machine import locks, watchdog
from ..machine.faults import PlanExhausted
from ..selection.engine import compiles_in_request
from ..spec.errors import LayerZeroError
from ..spec.kernel import Kernel
from ..spec.plan import Plan
from ..world import health
from ..world.context import Override
from ..world.incidents import ProbeBusy, compile_failed, count_success
from ..world.snapshot import World
from . import protection
from .background import compiling, jit
from .binding import Binding
from .cache import Entry
from .native import replays

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

# health group -> held while a half-open kernel of it is tried
probes: dict[str, locks.Lock] = {}


def wrap(dispatcher: Dispatcher, world: World, plan: Plan, kernel: Kernel, binding: Binding,
         override: Override | None) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Return what the entry runs, the same unguarded, and a place for recorded launches."""
    facts, step = plan.facts, plan.steps[0]
    breaker = world.health.get(kernel.health)
    run = (binding.run if breaker is None
           else wrap_probe(kernel, binding, breaker, bool(plan.locked)))
    recordings = None
    if (kernel.replayable and breaker is None and not step.transforms
        and dispatcher.native is not None):
        recordings = dispatcher.native.recordings()
        run = replays.record_calls(run, recordings)
    if kernel.jit:
        run = wrap_jit(dispatcher, world, kernel, run, plan, override)
    limit = world.selection_context(facts["device"], override).policy.setting("call_timeout")
    if (limit is not None and not facts["grad"] and not facts["graph"]
        and not kernel.isolated):              # a worker has a limit of its own, and can be stopped
        run, recordings = watchdog.with_timeout(run, limit), None
    return wrap_guard(dispatcher, kernel, plan, run, world, override), run, recordings


def wrap_probe(kernel: Kernel, binding: Binding, breaker: health.Health,
               named: bool) -> Callable[..., Any]:
    """Wrap a kernel whose breaker is not closed: its first success closes it. A half-open kernel is
    tried by one call at a time, whatever its shapes; calls that name it have no other choice."""
    probing = breaker.state == "half_open" and not named

    def run(*values: Any) -> Any:
        token = probes.setdefault(kernel.health, locks.Lock()) if probing else None
        if token is not None and not token.acquire(blocking=False):
            raise ProbeBusy(f"{kernel.id} is being probed")
        try:
            out = binding.run(*values)
        finally:
            if token is not None:
                token.release()
        count_success(kernel)
        return out

    return run


def wrap_jit(dispatcher: Dispatcher, world: World, kernel: Kernel, run: Callable[..., Any],
             plan: Plan, override: Override | None) -> Callable[..., Any]:
    """Wrap a kernel that compiles on first use: it serves only the forms it was warmed up for.

    Other forms go to the next kernel, unless the call names this one or policy lets it compile
    in the request.
    """
    facts = plan.facts
    policy = world.selection_context(facts["device"], override).policy
    if (compiles_in_request(kernel, policy.settings) or plan.locked
            or kernel.id in world.warmed):
        return jit.report_compile(kernel, run, facts["grad"],
                                  lambda fault: compile_failed(kernel, fault, facts))
    fallbacks: list[Entry] = []

    def fall_back(values: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            if not fallbacks:
                others = jit.without_warmed(world, (kernel.id,))
                fallbacks.append(dispatcher.make_entry(others, facts, override))
            served_by = fallbacks[0].plan.steps[0].kernel
            dispatcher.ledger.count_fallback(served_by)
            return served_by, dispatcher.serve(fallbacks[0], values)
        except LayerZeroError as e:
            raise PlanExhausted(e) from e

    def request_compile(values: tuple[Any, ...]) -> None:
        if (policy.setting("jit") == "background" and not facts["graph"]
            and compiling.is_worth_it(kernel, plan.steps[0])):
            compiling.request(dispatcher, kernel, plan.steps[0], facts, values)

    return jit.only_compiled(kernel, run, facts, world.warmed, fall_back, request_compile)


def wrap_guard(dispatcher: Dispatcher, kernel: Kernel, plan: Plan, run: Callable[..., Any],
               world: World | None = None, override: Override | None = None,
               clean_calls: int = 1) -> Callable[..., Any]:
    """Guard the first `clean_calls` calls of `run`, or all where policy says so."""
    facts = plan.facts
    always = (world is not None
              and world.selection_context(facts["device"],
                                          override).policy.setting("protect_inputs"))
    # A subclass may make anything of a result; our own kernels are held to this by tests.
    if facts["tensor_kind"] != "plain" or (protection.is_ours(kernel) and not always):
        return run
    max_bytes = (0 if facts["graph"] else protection.ALL_BYTES if always
                 else protection.SAMPLE_BYTES)
    return protection.Guard(dispatcher.op, kernel, run, max_bytes, None if always else clean_calls)
