"""Checks over many calls: hundreds of one case, one for each size."""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import tempfile
import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..kernel.contract import (
    AS_DECLARED,
    CaseResult,
    Circumstance,
    accepts_case,
    bind_call,
    bind_once,
    call,
    case_contents,
    case_facts,
    case_refusals,
    case_tensors,
    case_values,
    check_case,
    eager_results,
    load_once,
    refusals,
    results_of,
)
from ..kernel.gradients import requiring_grad
from ..kernel.guarded import GuardedResults
from ..kernel.process_state import ONCE, find_leak, memory_in_use, process_state, put_back
from ..kernel.results import storage_address
from ..kernel.shared import compute_once
from ..kernel.state_changes import changed_by_formula

ROUNDS = 3                                     # of calls, after which memory is counted
HELD_RESULTS = 40                                      # results that must stay as they were
# of CPU time: a kernel that takes as long is called less often, but not less than
SLOW_CALL_S, FEWEST_CALLS, SLOW_BACKWARD_S, SLOW_BACKWARDS = 2e-4, 300, 5e-4, 4
MOST_NUMBERS = 64                              # that are counted in all rounds
# A leak is looked for again with so many calls: a compiler leaves 100 objects once.
CONFIRMING = 16, 256
VERY_SLOW_CALL_S = 1e-3                        # that one is called a third as often
FRESH_INPUTS, FRESH_INPUTS_S = 80, 0.4         # calls with inputs of their own; CPU time for them
LONG_S = 0.05                                  # a call that tells how long a row takes
_Call = tuple[Mapping[str, Any], str, Circumstance]
LEFT_OUT = "left out after"                    # in the detail of what took too long


def result_of(kernel: Kernel, case: Mapping[str, Any], dtype: str, circumstance: str, seed: int,
              status: str, kind: str = "", detail: str = "", reasons: Any = ()) -> CaseResult:
    return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                      circumstance=circumstance, seed=seed, kinds=(kind,) if kind else ())


def check_many_calls(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                     seed: int = 0, calls: int = 400) -> CaseResult:
    """Calls the kernel hundreds of times with the same values, a slow one a quarter as often: the
    answer stays the same, results stay the caller's, nothing is left behind."""
    op = kernel.op

    def result(status: str, kind: str = "", detail: str = "", reasons: Any = ()) -> CaseResult:
        return result_of(kernel, case, dtype, f"{calls} calls", seed, status, kind, detail, reasons)

    reasons = case_refusals(kernel, case, dtype, device, seed)
    values = case_values(op, case, dtype, device, seed)
    if reasons or not op.tensors or any(
            isinstance(v, torch.Generator) for v in values.values()):
        return result("skipped", reasons=reasons)
    state = process_state(device)
    try:
        with torch.no_grad():
            function, arguments = bind_call(kernel, values), [values[p.name] for p in op.params]

            def run() -> Any:
                return function(*arguments)

            first = results_of(run())
            copies = [t.clone() for t in first]
            began = time.thread_time()
            kept = [results_of(run()) for _ in range(HELD_RESULTS)]
            spent = time.thread_time() - began
            if spent > HELD_RESULTS * SLOW_CALL_S:
                calls = max(calls // 4, min(calls, FEWEST_CALLS))
            if spent > HELD_RESULTS * VERY_SLOW_CALL_S:
                calls = max(calls // 3, min(calls, FEWEST_CALLS // 3))
            shared = {storage_address(t) for r in kept for t in r if t.numel()}
            if len(shared) < len(kept) * len({storage_address(t) for t in first if t.numel()}):
                return result("failed", "aliasing",
                              f"{HELD_RESULTS} results share memory with each other")
            if any(not _equal(a, b) for a, b in zip(first, copies)):
                return result("failed", "aliasing",
                              f"a result changed within the {HELD_RESULTS} calls after it")
            del kept
            different, files = 0, len(os.listdir(tempfile.gettempdir()))

            def compared() -> None:
                nonlocal different
                different += any(not _equal(a, b) for a, b in zip(first, results_of(run())))

            inputs = [v for v in arguments if isinstance(v, Tensor)]
            # in the longer lanes each one: some things happen every few hundred calls
            leak = _count_memory(compared if calls > FEWEST_CALLS else run, device,
                                 calls // ROUNDS, inputs)
            if len(os.listdir(tempfile.gettempdir())) - files >= calls // 2:
                leak = "each call leaves a temporary file behind"
            elif leak:                         # garbage that is due may look like one
                leak = _count_memory(run, device, 64, inputs, collect=True)
            leak = leak or _find_kept_inputs(function, arguments)
            for _ in range(8):
                compared()
    except loading.LoadFailed as e:
        return result("skipped", reasons=(e.reason,))
    except FAULTS as e:
        return result("failed", "fault", str(reason_of(e, classify(e))))
    changed = [part for part in put_back(state, device) if part not in ONCE]
    if changed:
        excused = changed_by_formula(op, values, device)
        changed = [part for part in changed if part not in excused]
    if changed:
        return result("failed", "global state", f"{changed[0]} changed during the calls")
    if leak:
        return result("failed", "leak", leak)
    if different and kernel.deterministic:
        return result("failed", "state", f"another answer in {different} of {calls} calls")
    return result("passed")


def _find_kept_inputs(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Returns that the kernel keeps what it is given, if every one of many calls with inputs of
    its own leaves them behind; a cache of bounded size is no leak."""
    owned: list[Callable[[], bool]] = []       # is this one gone?
    began = time.thread_time()
    for done in range(FRESH_INPUTS):
        if time.thread_time() - began > FRESH_INPUTS_S:
            return ""
        fresh = [_copied(v) for v in arguments]
        function(*fresh)
        kept = [t for t, v in zip(fresh, arguments) if t is not v]
        owned += [StorageWeakRef(t.untyped_storage()).expired if isinstance(t, Tensor)
                  else partial(_is_dead, weakref.ref(t)) for t in kept]
        del fresh, kept
        if done + 1 == FRESH_INPUTS // 4 and all(gone() for gone in owned):
            return ""
    each = len(owned) // FRESH_INPUTS
    gc.collect()
    for which in range(each):
        if not any(gone() for gone in owned[which::each]):
            return f"the inputs of {FRESH_INPUTS} calls are all kept"
    return ""


def _is_dead(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor, or of an object that has tensors; what else there is, itself."""
    if isinstance(value, Tensor):
        return value.clone() if value.numel() else value
    if hasattr(value, "__dict__") and any(isinstance(t, Tensor) for t in vars(value).values()):
        twin = copy.copy(value)
        for name, t in vars(value).items():
            if isinstance(t, Tensor):
                object.__setattr__(twin, name, t.clone())
        return twin
    return value


def check_many_backwards(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                         seed: int = 0, calls: int = 80) -> CaseResult:
    """Calls the kernel with its backward many times, and without: nothing is left behind. A slow
    one is called a fifth as often."""
    def result(status: str, kind: str = "", detail: str = "", reasons: Any = ()) -> CaseResult:
        return result_of(kernel, case, dtype, f"{calls} backward passes", seed, status, kind,
                         detail, reasons)

    values = requiring_grad(kernel.op, case_values(kernel.op, case, dtype, device, seed))
    reasons = refusals(kernel, values)
    wanted = [v for v in values.values() if isinstance(v, Tensor) and v.requires_grad]
    if reasons or not wanted:
        return result("skipped", reasons=reasons)

    def forward() -> list[Tensor]:
        return [r for r in results_of(call(kernel, values)) if r.requires_grad]

    def run() -> None:
        results = forward()
        if results:
            torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results],
                                allow_unused=True)

    inputs, ran = [v for v in values.values() if isinstance(v, Tensor)], False
    try:
        began = time.thread_time()
        for done in range(1, calls // 10 + 1):     # what autograd sets up is no leak
            run()
            ran = True
            if done >= SLOW_BACKWARDS and time.thread_time() - began > done * SLOW_BACKWARD_S:
                calls //= 5
                break
        # a graph is garbage that is due; and a heap may grow once
        leak = ""
        for work, count in ((run, calls // (ROUNDS + 1)), (forward, calls // (2 * ROUNDS + 2))):
            leak = leak or _confirmed_leak(work, device, count, inputs)
        found = ("leak", leak) if leak else ("result", _find_kept_results(forward))
    except FAULTS as e:                        # the gradients have checks of their own
        return result("failed" if ran else "skipped", "gradient" if ran else "",
                      str(reason_of(e, classify(e))))
    return result("failed", *found) if found[1] else result("passed")


def _confirmed_leak(work: Callable[[], Any], device: str, calls: int,
                    inputs: Sequence[Tensor]) -> str:
    """Returns what each call leaves behind, if every longer look finds it too."""
    leak = ""
    for count in (calls, *CONFIRMING):
        leak = _count_memory(work, device, count, inputs, collect=True)
        if not leak:
            break
    return leak


def _find_kept_results(forward: Callable[[], list[Tensor]]) -> str:
    """Returns that results live on where nobody has them, and their graph with them."""
    results = forward()
    alive = [StorageWeakRef(r.untyped_storage()) for r in results if r.numel()]
    del results
    if not all(storage.expired() for storage in alive):
        gc.collect()                           # a graph may be garbage that is due
    return next((f"the kernel still holds the memory of result {i}"
                 for i, storage in enumerate(alive) if not storage.expired()), "")


def _equal(a: Tensor, b: Tensor) -> bool:
    a, b = a.contiguous(), b.contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _count_memory(run: Callable[[], Any], device: str, calls: int, inputs: Sequence[Tensor],
                  collect: bool = False) -> str:
    names: tuple[str, ...] = ()
    numbers = array("q", bytes(8 * MOST_NUMBERS))      # what is kept of a round is no object
    collecting = gc.isenabled()
    gc.disable()                               # what it frees of others would hide a leak
    if collect:
        gc.freeze()                            # so that it looks at what is new alone
    try:
        for done in range(ROUNDS + 1):
            if collect:
                gc.collect()
            counts = memory_in_use(device, inputs)
            names = names or tuple(counts)
            for i, number in enumerate(counts.values(), done * len(names)):
                numbers[i] = number
            del counts
            for _ in range(calls if done < ROUNDS else 0):
                run()
    finally:
        if collect:
            gc.unfreeze()
        if collecting:
            gc.enable()
    return find_leak([dict(zip(names, numbers[done * len(names):]))
                      for done in range(ROUNDS + 1)], calls)


def check_output_margins(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                         seed: int = 0) -> CaseResult:
    """Checks that nothing is written beside what the kernel allocates with torch."""
    name = "with margins around its results"
    reasons = case_refusals(kernel, case, dtype, device, seed)
    values = case_values(kernel.op, case, dtype, device, seed)
    if reasons or device != "cpu" or kernel.jit:
        return result_of(kernel, case, dtype, name, seed, "skipped", reasons=reasons)
    mode = GuardedResults()
    try:
        call(kernel, values)                   # what is set up once is no result
        with torch.no_grad(), mode:
            call(kernel, values)
    except FAULTS:                             # not every kernel runs where torch is observed
        return result_of(kernel, case, dtype, name, seed, "skipped", detail="cannot be observed")
    overrun = next(mode.find_overruns(), "")
    return result_of(kernel, case, dtype, name, seed, "failed" if overrun else "passed",
                   "out of bounds" if overrun else "", overrun)


class Budget:
    """CPU time in a kernel that several checks share: each may take an equal part of the rest."""

    def __init__(self, seconds: float, checks: int) -> None:
        self.left, self.checks = seconds, checks

    @property
    def part(self) -> float:
        return max(self.left, 0.0) / max(self.checks, 1)

    def take(self, seconds: float) -> None:
        self.left -= seconds
        self.checks -= 1


def check_sizes(kernel: Kernel, name: str, cases: Sequence[Sequence[Mapping[str, Any]]], dtype: str,
                device: str = "cpu", seed: int = 0, all_others: bool = True,
                budget: Budget | None = None) -> CaseResult:
    """Calls the kernel once for each case and compares it with the eager formula; what looks wrong
    is judged as any other case is. The result is the first that fails, or says how many ran.

    A case comes with others that take its place where the contract does not allow it: all of them,
    or the first that it allows. After its part of the `budget` the rest is left out, as the result
    says, and before it what would take longer still, by what its rows took so far: what computes
    one row at a time takes minutes for them.
    """
    ran, left, spent, for_a_row = 0, 0, 0.0, 0.0
    limit_s = math.inf if budget is None else budget.part
    for first, *others in cases:
        if spent > limit_s or (for_a_row and spent + for_a_row * _rows(kernel.op, first, dtype)
                               > limit_s):
            left += 1
            continue
        for case in (first, *others):
            right, seconds = _looks_right(kernel, case, dtype, device, seed)
            ran += right is not None
            spent += seconds
            if seconds > LONG_S:
                for_a_row = max(for_a_row, seconds / _rows(kernel.op, case, dtype))
            failure = failure_of(right, kernel, case, dtype, device, seed)
            if failure is not None:
                return failure
            if right is not None and (case is first or not all_others):
                break
    if budget is not None:
        budget.take(spent)
    return result_of(kernel, {}, dtype, f"{len(cases)} sizes of {name}", seed,
                   "passed" if ran else "skipped", detail=f"{ran} calls" + (
                       f"; {left} {LEFT_OUT} {limit_s:.2g} s" if left else ""))


def check_modes(kernel: Kernel, cases: Sequence[Mapping[str, Any]],
                others: Sequence[Mapping[str, Any]], dtype: str,
                modes: Sequence[Circumstance], device: str = "cpu", seed: int = 0,
                limit_s: float = math.inf) -> CaseResult:
    """Calls the kernel once for each case in each of these modes of torch, and for each of the
    others in one of them, as long as these take less than `limit_s` of CPU time: a way of its own
    for one may be wrong beside one argument only. What looks wrong is judged as any other call is.
    """
    mixed = random.Random(seed).sample(others, len(others)) if limit_s < math.inf else others
    in_turn = [(case, modes[(i + seed) % len(modes)]) for i, case in enumerate(mixed)]
    calls = [(case, dtype, mode) for case, mode in product(cases, modes)]
    return _first_wrong(kernel, calls, [(case, dtype, mode) for case, mode in in_turn],
                        "in other modes", dtype, device, seed, limit_s)


def check_in_reverse(kernel: Kernel, cases: Sequence[Mapping[str, Any]], device: str = "cpu",
                     seed: int = 0, limit_s: float = math.inf) -> CaseResult:
    """Loads the kernel anew and calls it for each case from the last to the first at the last
    dtype, and then at those before it, as long as these take less than `limit_s` of CPU time: what
    the first call of all decided may have been right for those before."""
    bind_once.cache_clear()
    load_once.cache_clear()
    last, *before = ([(case, dtype, AS_DECLARED) for case in reversed(cases)]
                     for dtype in reversed(kernel.op.dtypes))
    rest = [call for calls in before for call in calls]
    if limit_s < math.inf:                     # each dtype has as many
        rest = [call for calls in zip(*before) for call in calls][seed % 2::2]
    return _first_wrong(kernel, last, rest, "in reverse", kernel.op.dtypes[0], device, seed,
                        limit_s)


def _first_wrong(kernel: Kernel, calls: Sequence[_Call], others: Sequence[_Call], name: str,
                 dtype: str, device: str, seed: int, limit_s: float) -> CaseResult:
    """Makes all of the calls, and others until those have taken `limit_s`, but for such as would
    take longer even at the pace of the fastest row so far."""
    ran, spent, for_a_row = 0, 0.0, math.inf
    for i, (case, at, mode) in enumerate(chain(calls, others)):
        rows = _rows(kernel.op, case, at) if limit_s < math.inf else 1
        if i >= len(calls) and (spent > limit_s or for_a_row * rows > limit_s):
            continue
        right, seconds = _looks_right(kernel, case, at, device, seed, mode)
        ran += right is not None
        spent += seconds if i >= len(calls) else 0.0
        for_a_row = min(for_a_row, seconds / rows) if right is not None else for_a_row
        failure = failure_of(right, kernel, case, at, device, seed, mode)
        if failure is not None:
            return failure
    return result_of(kernel, {}, dtype, f"{len(calls) + len(others)} cases {name}", seed,
                     "passed" if ran else "skipped", detail=f"{ran} calls")


def failure_of(right: bool | None, kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str,
               seed: int, mode: Circumstance = AS_DECLARED) -> CaseResult | None:
    """Returns how a call that looks wrong fails when it is judged as any other; else None."""
    judged = check_case(kernel, case, dtype, device, seed, mode) if right is False else None
    return judged if judged is not None and judged.status == "failed" else None


def _rows(op: Op, case: Mapping[str, Any], dtype: str) -> int:
    try:
        main = case_tensors(op, case, dtype)[op.main_tensor]
    except FAULTS:                             # it makes no call
        return 1
    return max(main.numel() // max(main.shape[-1], 1) if main.dim() else 1, 1)


def _looks_right(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str, seed: int,
                 mode: Circumstance = AS_DECLARED) -> tuple[bool | None, float]:
    """Is the kernel near the eager formula, and has it left its inputs alone? None where the
    contract or its rules refuse the call. And how many seconds of CPU time it took."""
    op = kernel.op
    rtol, atol = op.tolerance.of(dtype)
    key = case_contents(case, dtype, device, seed)
    try:
        # once for all kernels: what makes no call is not drawn for each of them
        if (not compute_once(op, ("meets the contract", *key), lambda: meets_contract(
                op, case, *key[2:]), nbytes=0)
                or not accepts_case(kernel, case, dtype, device, seed)):
            return None, 0.0
        values = case_values(op, case, dtype, device, seed)
        if not compute_once(op, ("extra check", *key), lambda: passes_extra_check(
                op, values, case_facts(op, case, dtype, device, seed)), nbytes=0):
            return None, 0.0
        want = eager_results(op, values, key)
    except FAULTS:                             # not every size makes a call
        return None, 0.0
    tensors = [v for v in values.values() if isinstance(v, Tensor) and not v.is_inference()]
    versions = [t._version for t in tensors]
    began = time.thread_time()
    try:
        with torch.no_grad(), mode.around(device):
            got = results_of(call(kernel, values))
    except FAULTS:
        return False, 0.0
    seconds = time.thread_time() - began
    addresses = {storage_address(t) for t in tensors if t.numel()}
    return (len(got) == len(want) and versions == [t._version for t in tensors]
            and not any(isinstance(g, Tensor) and g.numel() and storage_address(g) in addresses
                        for g in got)
            and all(map(lambda g, w: is_near(g, w, rtol, atol), got, want))), seconds


def meets_contract(op: Op, case: Mapping[str, Any], dtype: str, device: str, seed: int) -> bool:
    try:
        facts = case_facts(op, case, dtype, device, seed)
    except FAULTS:                             # not every size makes a call
        return False
    return all(rule.check(facts) is None for rule in op.requires)


def passes_extra_check(op: Op, values: dict[str, Any], facts: Mapping[str, Any]) -> bool:
    if op.extra_check is not None:
        try:
            op.extra_check(values, facts)
        except FAULTS:
            return False
    return True


def is_near(got: Any, want: Any, rtol: float, atol: float) -> bool:
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return bool(got == want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not got.is_floating_point() or got.dtype.itemsize == 1:
        return _equal(got, want)
    eps = torch.finfo(got.dtype).eps
    rtol, atol = rtol / 4 + (eps if got.dtype.itemsize == 2 else 0.0), atol / 4 + 4 * eps
    # allclose takes thrice as long, and is only needed for infinities and NaN
    return (torch.equal(got, want)
            or bool(((got - want).abs_() <= want.abs().mul_(rtol).add_(atol)).all())
            or torch.allclose(got, want, rtol, atol, equal_nan=True))
