"""Calls of one kernel from several threads: they must share nothing.

- `check_threads`: threads that call at once. It finds what native code shares, if calls overlap.
- `check_interrupted`: a call of another thread in the midst of one, wherever that one is about to
  call something. It finds what Python code shares, however short the calls are.
"""

from __future__ import annotations

import dis
import math
import os
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Waited
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any

import torch

from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ..cases.chosen_cells import Cell
from ..kernel.contract import (
    CaseResult,
    accepts_case,
    call,
    case_values,
    check_case,
    eager_results,
    exact_results,
    refusals,
    results_of,
)
from ..kernel.judging import judge_result, same
from ..kernel.shared import fingerprint

Case = Mapping[str, Any]
Runs = Sequence[tuple[Any, ...]]
LONG_CALL_S = 0.01                             # of CPU time
SWITCH_S = 1e-6                                # the interpreter switches threads as often
INTERRUPTED_S, MOST_POINTS, FEWEST_POINTS = 0.03, 64, 8       # of CPU time; of one call
SHARES = 4                                     # of that time, which so many calls have
HANDING_OVER_S = 1e-4                          # to another thread and back
WAIT_S = 0.5                                   # for a call that may wait for a lock
# Where nothing is of the kernel: torch, Python, and what calls the kernel here.
LIBRARIES = (*(path + os.sep for path in (
    os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"),
    os.path.dirname(os.path.dirname(__file__)))), "<frozen ")


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_threads(kernel: Kernel, case: Case, dtype: str, device: str = "cpu",
                  seed: int = 0, other: Case | None = None,
                  threads: int = 4, rounds: int = 6) -> CaseResult:
    """Calls the kernel from several threads at once with their own inputs, half of them those of
    the `other` case: calls must share nothing. Calls that are long overlap the first time."""
    op, name = kernel.op, f"{threads} threads at once"
    cases = [case if other is None or i % 2 else other for i in range(threads)]
    inputs = [case_values(op, c, dtype, device, seed + i) for i, c in enumerate(cases)]
    reasons = next((r for values in inputs if (r := refusals(kernel, values))), ())
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, circumstance=name, seed=seed)
    begin = threading.Barrier(threads)

    def work(values: dict[str, Any]) -> list[tuple[Any, ...]]:
        begin.wait()
        with torch.no_grad():
            return [results_of(call(kernel, values)) for _ in range(rounds)]

    try:
        with quiet():
            call(kernel, inputs[0])            # compiling and one-time setup are not under test
            began = time.process_time()
            call(kernel, inputs[0])
            if time.process_time() - began > LONG_CALL_S:
                rounds = 2
            with ThreadPoolExecutor(threads) as pool, _switching_often():
                results = list(pool.map(work, inputs))
    except FAULTS as e:
        return CaseResult(kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))),
                          circumstance=name, seed=seed, kinds=("threads",))
    for i, (values, runs) in enumerate(zip(inputs, results)):
        failed = _judge(kernel, cases[i], dtype, device, seed + i, values, runs, name)
        if failed is not None:
            return failed
    return CaseResult(kernel.id, case, dtype, "passed", circumstance=name, seed=seed)


def _judge(kernel: Kernel, case: Case, dtype: str, device: str, seed: int, values: dict[str, Any],
           runs: Runs, name: str) -> CaseResult | None:
    """Returns the failure of calls beside others; of the case alone where that is wrong too."""
    op = kernel.op
    with torch.no_grad():
        key = fingerprint(values)
        truth, eager = exact_results(op, values, key), eager_results(op, values, key)
    if not op.tensors:
        complaints = [f"{r!r:.200} instead of {eager!r:.200}" for r in runs if r != eager]
    else:
        differing = [runs[0], *(r for r in runs[1:] if not all(map(same, r, runs[0])))]
        complaints = [c.text for r in differing for parts in zip(r, r, truth, eager)
                      for c in judge_result(op, dtype, "result", *parts).complaints]
    if not complaints:
        return None
    judged = check_case(kernel, case, dtype, device, seed)
    if judged.status == "failed":              # no matter of threads
        return judged
    with torch.no_grad():
        alone = results_of(call(kernel, values))
    if all(all(map(same, r, alone)) for r in runs):
        return None
    return CaseResult(kernel.id, case, dtype, "failed", detail=complaints[0],
                      circumstance=name, seed=seed, kinds=("threads",))


def check_interrupted(kernel: Kernel, cells: Sequence[Cell], device: str = "cpu", seed: int = 0,
                      other: Case | None = None, budget_s: float = INTERRUPTED_S) -> CaseResult:
    """Interrupts calls of the cells, in their order for as long as there is CPU time: wherever one
    is about to call something, another thread makes a whole call, of the same sizes or, a later
    time, of the `other` case. Both must be right."""
    name = "interrupted by other threads"
    (first, dtype), ran, spent = cells[0], 0, 0.0
    pairs = [(c, c, d) for c, d in cells]
    if other is not None and other != first:
        pairs.insert(SHARES - 1, (first, other, dtype))
    with ThreadPoolExecutor(1) as pool, torch.no_grad(), quiet():
        for case, beside, dtype in pairs:
            if spent > budget_s:
                break
            if not all(accepts_case(kernel, c, dtype, device, seed) for c in (case, beside)):
                continue
            began = time.process_time()
            mine = case_values(kernel.op, case, dtype, device, seed)
            others = case_values(kernel.op, beside, dtype, device, seed + 1)
            try:
                if refusals(kernel, others):   # of other contents
                    continue
                runs = interrupt(partial(run_alone, kernel), mine, others, pool,
                                 budget_s / min(len(pairs), SHARES))
            except loading.LoadFailed as e:
                return CaseResult(kernel.id, case, dtype, "skipped", (e.reason,),
                                  circumstance=name, seed=seed)
            except FAULTS as e:
                judged = check_case(kernel, case, dtype, device, seed)
                return judged if judged.status == "failed" else CaseResult(
                    kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))),
                    circumstance=name, seed=seed, kinds=("threads",))
            spent, ran = spent + time.process_time() - began, ran + 1
            for at, given, values, different in zip((seed, seed + 1), (case, beside),
                                                    (mine, others), runs):
                failed = different and _judge(kernel, given, dtype, device, at, values, different,
                                              name)
                if failed:
                    return failed
    return CaseResult(kernel.id, first, cells[0][1], "passed" if ran else "skipped",
                      detail=f"{ran} cases", circumstance=name, seed=seed)


def run_alone(kernel: Kernel, values: dict[str, Any]) -> tuple[Any, ...]:
    with torch.no_grad():                      # each thread has a mode of its own
        return results_of(call(kernel, values))


def interrupt(run: Callable[[dict[str, Any]], tuple[Any, ...]], mine: dict[str, Any],
              others: dict[str, Any], pool: ThreadPoolExecutor,
              budget_s: float) -> tuple[Runs, Runs]:
    """Returns the results of an interrupted call, and of those that interrupted it, which differ
    from those of calls alone."""
    alone = [tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in run(values))
             for values in (mine, others)]
    pool.submit(run, others).result()          # what is set up once for each thread
    began = time.process_time()
    run(others)
    seconds = time.process_time() - began + HANDING_OVER_S
    depths: list[int] = []

    def count(depth: int) -> bool:
        depths.append(depth)
        return True

    observe(lambda: run(mine), count)
    most = max(FEWEST_POINTS, min(MOST_POINTS, int(budget_s / seconds)))
    chosen, seen = shallow_first(depths, most), [0]
    between: list[tuple[Any, ...]] = []

    def pause(_: int) -> bool:
        at, seen[0] = seen[0], seen[0] + 1
        if at in chosen:
            future = pool.submit(run, others)
            try:
                between.append(future.result(WAIT_S))
            except Waited:                     # for a lock: then no call is in the midst of another
                return False
        return True

    interrupted = observe(lambda: run(mine), pause)
    after, beside = ([r for r in runs if not _alike(r, want)]
                     for runs, want in zip(([interrupted], between), alone))
    return after, beside


def _alike(got: tuple[Any, ...], want: tuple[Any, ...]) -> bool:
    return len(got) == len(want) and all(
        same(g, w) if isinstance(g, torch.Tensor) and isinstance(w, torch.Tensor) else g == w
        for g, w in zip(got, want))


def shallow_first(depths: Sequence[int], most: int) -> frozenset[int]:
    """Returns at most so many points, the kernel's own function first; evenly of what is left."""
    chosen: list[int] = []
    for depth in sorted(set(depths)):
        at = [i for i, d in enumerate(depths) if d == depth]
        if len(chosen) < most:
            chosen += at[::math.ceil(len(at) / (most - len(chosen)))]
    return frozenset(chosen)


def observe(run: Callable[[], Any], pause: Callable[[int], bool]) -> Any:
    """Runs a function and calls `pause` with the depth of the stack before each call that it and
    what it calls make, but for torch and Python's own modules, until that returns False."""
    waits = True

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.startswith(LIBRARIES) or frame.f_code.co_name.endswith(
                ("comp>", "genexpr>")):        # each would be a point for each of its items
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        depth, above = 0, frame.f_back
        while above is not None:
            depth, above = depth + 1, above.f_back
        calls = _calls_in(frame.f_code)

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal waits
            if event == "opcode" and waits and frame.f_lasti in calls:
                waits = pause(depth)
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        return run()
    finally:
        sys.settrace(before)


@lru_cache(maxsize=1024)
def _calls_in(code: CodeType) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code)
                     if i.opname.startswith(("CALL", "BINARY_OP", "INPLACE", "RETURN")))
