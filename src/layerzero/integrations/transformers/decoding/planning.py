"""Which kernels the decode step runs: those that lz would choose, and for the products, which are
nearly all of the time, those that are fastest here and now.

On a CUDA device they are timed as they will run: in a graph, over weights that are not in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....machine import faults
from ....operate import graphs
from ....operate.inspection import dispatcher_of
from ....plan.bake import bind
from ....selection.policy import PolicyRule
from ....spec.errors import LayerZeroError
from ....tuning.contest import eligible_plan
from ....tuning.harness import Race, cache_bytes, stopwatch
from ....world import context
from ....world import snapshot as worlds

Run = Callable[..., Any]
ROUNDS = 12
COLD = 4                   # times the cache: the memory that one sample reads
# bytes of a tensor that counts for it; calls of one sample where no tensor does
LARGE, SMALL_CALLS = 1 << 20, 16


class Binder:
    """Calls lz.tables.bind once for each kind of call; keeps the kernels' names for the report."""

    def __init__(self, captured: bool) -> None:
        self._bound: dict[Any, Run] = {}
        self._captured = captured
        self.kernels: dict[str, str] = {}      # what it is for -> kernel

    def __call__(self, what: str, op: str, *tensors: Tensor | None, **fixed: Any) -> Run:
        run = self._once(op, tensors, fixed)
        self.kernels[what] = run.kernel  # type: ignore[attr-defined]
        return run

    def kernel(self, op: str, *tensors: Tensor) -> str:
        """Returns the name of the kernel for calls like this."""
        return self._once(op, tensors, {}).kernel  # type: ignore[attr-defined,no-any-return]

    def _once(self, op: str, tensors: Sequence[Tensor | None], fixed: dict[str, Any]) -> Run:
        key = (op, tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors),
               _settings(fixed))
        run = self._bound.get(key)
        if run is None:
            run = self._bound[key] = self._bind(op, tensors, fixed)
        return run

    def _bind(self, op: str, tensors: Sequence[Tensor | None], fixed: dict[str, Any]) -> Run:
        if not self._captured:
            return bind(op, *tensors, **fixed)
        # Compiled on first use means before the capture; Inductor's takes too long for its gain.
        with context.overriding({"jit": "in_request", "graph_strict_mode": True},
                                (PolicyRule.of("deny", "torch.compiled*"),)):
            return bind(op, *tensors, **fixed)

    def fastest(self, what: str, op: str, *calls: tuple[Tensor | None, ...], **fixed: Any) -> Run:
        """Returns the kernel for calls like these, as lz chooses; when captured, by a race."""
        chosen = self(what, op, *calls[0], **fixed)
        like = calls[0][0]
        if not (self._captured and like is not None and like.is_cuda):
            return chosen
        key = ("fastest", op, tuple(None if t is None else (t.shape, t.dtype) for t in calls[0]),
               _settings(fixed))
        run = self._bound.get(key)
        if run is None:
            run = self._bound[key] = self._race(op, chosen, calls, fixed)
        self.kernels[what] = run.kernel  # type: ignore[attr-defined]
        return run

    def _race(self, op: str, chosen: Run, calls: Sequence[tuple[Tensor | None, ...]],
              fixed: dict[str, Any]) -> Run:
        dispatcher = dispatcher_of(op)
        facts = {**dispatcher.facts(dispatcher.order_arguments(calls[0], fixed)), "graph": True}
        runs = {chosen.kernel: chosen}         # type: ignore[attr-defined]
        for step in eligible_plan(worlds.current(), dispatcher.op, facts).steps:
            if step.kernel.startswith(("reference.", "torch.compiled")) or step.kernel in runs:
                continue
            try:
                with context.overriding({"jit": "in_request", "graph_strict_mode": True}):
                    runs[step.kernel] = bind(op, *calls[0], backend=step.kernel, **fixed)
            except LayerZeroError:             # it cannot serve in a graph
                continue
        # a bound kernel is a function of the tensors alone
        named = [t for t in fixed.values() if isinstance(t, Tensor)]
        ring = _repeat_until_cold([tuple(t for t in (*call, *named) if t is not None)
                                   for call in calls])
        race = Race(stopwatch("cuda"), faults.FAULTS)
        captured = []                              # the graphs live as long as they are timed
        for name, run in runs.items():
            tried = graphs.attempt(lambda run=run: [run(*call) for call in ring],  # type: ignore[misc]
                                   overlap=True)
            if not tried.problems:
                captured.append(tried)
                race.enter(name, tried.graph.replay)
        race.run(ROUNDS)
        timings = race.timings
        return runs[min(timings.rounds, key=timings.median)] if timings.rounds else chosen


def _settings(fixed: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((n, (v.shape, v.dtype) if isinstance(v, Tensor) else v) for n, v in fixed.items())


def _repeat_until_cold(calls: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Returns enough calls that the first one's large tensors have left the cache by the last."""
    enough, large = COLD * cache_bytes("cuda"), [t.nbytes for t in calls[0] if t.nbytes > LARGE]
    if not large:
        return [calls[0]] * SMALL_CALLS
    ring = list(calls)
    while sum(large) * len(ring) < enough:
        ring.append(tuple(t.clone() if t.nbytes > LARGE else t for t in calls[0]))
    return ring[:max(2, -(-enough // sum(large)))]


def with_weights(run: Run, *weights: Tensor) -> Run:
    """Returns a bound kernel as a function of the data alone, its weights fixed."""
    # the usual one: unpacking costs a little at every call
    if len(weights) == 1:
        weight, = weights
        return lambda x: run(x, weight)
    return lambda x: run(x, *weights)
