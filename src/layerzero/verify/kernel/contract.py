"""Checks a kernel against the contract of its op, one case at a time, with the upcast reference.

A kernel passes a case when, for every result:
- shape and dtype are those of the op's meta function, and it shares no memory with an input, with
  the result of another call or with itself;
- it is finite where the reference is, and equal to it where that is infinite;
- its error is at most `times_eager` x the error of the eager formula at the same dtype, plus a
  few roundings; in float32, and where a result is wider than the inputs, a quarter of the op's
  tolerance is always allowed (in float64 the whole tolerance decides: there the reference is no
  more exact than the kernel); where that is exceeded, a few times as much is added as one
  rounding of each input moves the exact result (error_budget.py);
- its error is within the op's tolerance (rtol, atol), unless the eager formula's is not, or only
  just;
- in 16 bits its errors are on average (root mean square) not several times those of the eager
  formula, as they are where a long sum is kept in 16 bits;
- a second run gives the same, over fresh memory full of NaN and with NaN on both sides of every
  input: so nothing was left unwritten, read before it was written, or read beside an input;
and no input has changed, not even the parts of its storage outside the view, nor torch's global
state.

An error is the largest of many roundings, and so is the eager one it is compared with. A case that
is just outside (by less than a factor of two, or of many where a result has few elements) is
repeated with other numbers: it fails if it is outside again, and the largest errors of all runs do
not compare better.

A case may be run under a `Circumstance` (certification/circumstances): inputs in another layout,
changed in place after an earlier call, under autocast.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...dispatch.binding import bind
from ...dispatch.facts import read
from ...machine import hardware, loading
from ...machine.faults import FAULTS, classify, reason_of, sdpa_backends
from ...spec.kernel import Direct, Kernel
from ...spec.op import Op
from ...spec.plan import Transform
from ...spec.reason import Code, Reason
from .case_sizes import relative_size
from .circumstance import AS_DECLARED as AS_DECLARED
from .circumstance import Circumstance as Circumstance
from .error_budget import UNITS, rounding_budget
from .guarded import find_changes, guarded, poisoned_memory, snapshot
from .judging import (
    Expected,
    Judgement,
    find_nondeterminism,
    judge_result,
    same,
    was_chance,
)
from .judging import may_be_chance as may_be_chance
from .process_state import (
    COMPILING,
    DETERMINISTIC,
    ONCE,
    SLOW,
    deterministic_mode,
    process_state,
    put_back,
)
from .results import (
    Complaint,
    compare_values,
    find_aliasing,
    find_foreign_memory,
    find_wrong_container,
    find_wrong_shapes,
    storage_address,
)
from .shared import (
    Fingerprint,
    ZerosForNormals,
    compute_once,
    fingerprint,
    fingerprint_once,
    kept_values,
    note_case,
    values_once,
)
from .shared import upcast as upcast
from .shared import with_own_generators as with_own_generators
from .state_changes import changed_by_each, changed_by_formula

UNREPEATABLE = ".*does not have a deterministic implementation.*"
RETRIES = 6                                    # with other seeds, of what is just outside
SMALL = 4.0                                    # a case of so many times the default sizes
SMALL_BYTES = 1 << 18                          # what is not worth the room of others


@dataclass(frozen=True)
class CaseResult:
    """The result of one case. Errors are absolute, of the result with the largest ratio."""

    kernel: str
    case: Mapping[str, Any]
    dtype: str
    status: str                                # passed | skipped | failed
    reasons: tuple[Reason, ...] = ()           # why it was skipped
    error: float = 0.0
    eager_error: float = 0.0
    ratio: float = 0.0                         # error over allowed error; above 1 is a failure
    detail: str = ""
    circumstance: str = ""
    seed: int = 0
    kinds: tuple[str, ...] = ()                # of the complaints
    seconds: float = field(default=0.0, compare=False)     # of CPU time in the kernel's runs

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        under = f", {self.circumstance}" if self.circumstance else ""
        case = {n: (*v[:8], f"... {len(v)} in all") if isinstance(v, tuple) and len(v) > 16 else v
                for n, v in self.case.items()}
        head = f"{self.kernel} {self.dtype} {case}{under}: {self.status}"
        if self.status == "skipped":
            return f"{head}: " + "; ".join(map(str, self.reasons))
        detail = f"; {self.detail}" if self.detail else ""
        return f"{head}, error {self.error:.3g}, eager {self.eager_error:.3g}{detail}"


def case_values(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a case, every parameter of the op by name."""
    note_case(case, dtype)
    return values_once(op, case_contents(case, dtype, device, seed),
                       partial(generate_values, op, case, dtype, device, seed))


def case_contents(case: Mapping[str, Any], dtype: str, device: str = "cpu",
                  seed: int = 0) -> tuple[Any, ...]:
    """Returns a key for the values of a case."""
    return "case", repr(case), dtype, device, seed


def case_values_to_read(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                        seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a case to read: others get the same tensors."""
    return values_once(op, case_contents(case, dtype, device, seed),
                       partial(generate_values, op, case, dtype, device, seed), to_read=True)


def case_outline(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                 seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a case for one who asks for shapes, dtypes and strides alone: normal
    numbers are zeros where nobody has drawn them yet, which is most of the cost of a large case."""
    # making a BlockMask costs more than numbers, and a small case is most often run as well
    if any(p.kind == "object" for p in op.params) or relative_size(op, case) <= SMALL:
        return case_values_to_read(op, case, dtype, device, seed)
    kept = kept_values(op, case_contents(case, dtype, device, seed))
    if kept is not None:
        return kept
    with ZerosForNormals():
        return generate_values(op, case, dtype, device, seed)


def case_tensors(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                 seed: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of a case on the meta device."""
    return _tensors_once(op, case_contents(case, dtype, device, seed),
                         partial(case_outline, op, case, dtype, device, seed))


def _tensors_once(op: Op, contents: Hashable, outline: Callable[[], Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = compute_once(op, ("tensors", contents), lambda: {
        name: v.to("meta") for name, v in outline().items() if isinstance(v, Tensor)})
    return tensors


def case_facts(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
               seed: int = 0) -> Mapping[str, Any]:
    """Returns the facts of a case, which are read once."""
    contents = case_contents(case, dtype, device, seed)

    def compute() -> Mapping[str, Any]:
        outline = case_outline(op, case, dtype, device, seed)
        if relative_size(op, case) > SMALL:    # it is not kept, nor drawn again for its shapes
            _tensors_once(op, contents, lambda: outline)
        return read(op, outline)

    facts: Mapping[str, Any] = compute_once(op, ("facts", *_state_of_facts(op), *contents), compute,
                                            nbytes=0)
    return facts


def _state_of_facts(op: Op) -> tuple[Any, ...]:
    """Returns what facts depend on besides the arguments."""
    return (torch.are_deterministic_algorithms_enabled(),
            sdpa_backends() if op.sdpa_switches else None)


def generate_values(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                    seed: int = 0) -> dict[str, Any]:
    """Returns the arguments of a case, drawn anew."""
    inputs = op.inputs(**case, dtype=getattr(torch, dtype), device=device, seed=seed)
    return {p.name: inputs.get(p.name, p.default) for p in op.params}


def refusals(kernel: Kernel, values: Mapping[str, Any]) -> tuple[Reason, ...]:
    """Returns why selection would reject the kernel for this call: its library, the contract, its
    rules."""
    unavailable = loading.availability(kernel)
    if unavailable is not None:
        return (unavailable,)
    return _broken_rules(kernel, read(kernel.op, values), None)


def case_refusals(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                  seed: int = 0) -> tuple[Reason, ...]:
    """Returns why selection would reject the kernel for a case, by facts that are read once."""
    def compute() -> tuple[Reason, ...]:
        unavailable = loading.availability(kernel)
        return ((unavailable,) if unavailable is not None else
                _broken_rules(kernel, case_facts(kernel.op, case, dtype, device, seed), key))

    key = (*_state_of_facts(kernel.op), *case_contents(case, dtype, device, seed))
    reasons: tuple[Reason, ...] = compute_once(kernel.op, ("refusals", kernel, *key), compute,
                                               nbytes=0)
    return reasons


def accepts_case(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                 seed: int = 0) -> bool:
    """Has selection nothing against the kernel for a case? Answered by the first rule that is
    broken: to word all of them takes longer."""
    if loading.availability(kernel) is not None:
        return False
    key = (*_state_of_facts(kernel.op), *case_contents(case, dtype, device, seed))
    known, reasons = _by_contract(kernel.op, case_facts(kernel.op, case, dtype, device, seed), key)
    return not reasons and all(rule.check(known) is None for rule in kernel.requires)


def _broken_rules(kernel: Kernel, facts: Mapping[str, Any],
                  key: Hashable | None) -> tuple[Reason, ...]:
    """Returns what the contract and the kernel's rules have against a call."""
    known, reasons = _by_contract(kernel.op, facts, key)
    return (*reasons, *kernel.op.reasons(kernel.requires, known))


def _by_contract(op: Op, facts: Mapping[str, Any],
                 key: Hashable | None) -> tuple[Mapping[str, Any], tuple[Reason, ...]]:
    """Returns the facts with those of the device, and what the contract has against them: once for
    all kernels, where there is a key."""
    def compute() -> tuple[Mapping[str, Any], tuple[Reason, ...]]:
        known = {**hardware.probe(facts["device"]).facts(), **facts}
        return known, tuple(op.reasons(op.requires, known))

    known, reasons = compute_once(op, key and ("contract", key), compute, nbytes=0)
    return known, reasons


def circumstance_refusals(kernel: Kernel, values: Mapping[str, Any], circumstance: Circumstance,
                          contents: tuple[Any, ...]) -> tuple[Reason, ...]:
    """Returns why selection would reject the kernel for a case in a circumstance, which changes the
    same case always alike: its facts are read once."""
    unavailable = loading.availability(kernel)
    if unavailable is not None:
        return (unavailable,)
    key = ("facts", *_state_of_facts(kernel.op), *contents, circumstance.name)
    facts = compute_once(kernel.op, key, lambda: read(kernel.op, values), nbytes=0)
    return _broken_rules(kernel, facts, key)


def call(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    """Runs the kernel as the dispatcher would, with the views its layout needs."""
    arguments = with_own_generators(values)
    return bind_call(kernel, values)(*(arguments[p.name] for p in kernel.op.params))


def bind_call(kernel: Kernel, values: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns what the dispatcher would call for such values, with all arguments in order."""
    op = kernel.op
    return bind_once(kernel, values[op.variant] if op.variant else "")


@lru_cache(maxsize=None)
def bind_once(kernel: Kernel, variant: str) -> Callable[..., Any]:
    needs_layout = kernel.op.variant and kernel.variants and variant not in kernel.variants
    transforms = (Transform("layout", kernel.variants[0]),) if needs_layout else ()
    return bind(kernel.op, kernel, load_once(kernel), transforms, variant).run


def formula(op: Op, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the results of the op's reference."""
    return results_of(op.reference(**with_own_generators(values)))


def eager_results(op: Op, values: Mapping[str, Any], key: Hashable | None) -> tuple[Any, ...]:
    """Returns the formula's results at the dtype of the call, computed once where there is a key,
    which only such values may have."""
    return _results_once(op, values, lambda: values, key and ("eager", key))


def exact_results(op: Op, values: Mapping[str, Any], key: Hashable | None) -> tuple[Any, ...]:
    """Returns the formula's results in float64, once for the same contents in any layout."""
    contents = key.contents if isinstance(key, Fingerprint) else key
    return _results_once(op, values, lambda: upcast(values), contents and ("exact", contents))


def _results_once(op: Op, values: Mapping[str, Any], arguments: Callable[[], Mapping[str, Any]],
                  key: Hashable | None) -> tuple[Any, ...]:
    def compute() -> tuple[Any, ...]:
        inputs = {storage_address(v) for v in values.values() if isinstance(v, Tensor)}
        with torch.inference_mode():           # nobody differentiates them: it skips autograd
            return tuple(r.clone() if isinstance(r, Tensor) and storage_address(r) in inputs
                         else r for r in formula(op, arguments()))

    results: tuple[Any, ...] = compute_once(op, key, compute)
    return results


@lru_cache(maxsize=None)
def load_once(kernel: Kernel) -> Callable[..., Any] | Direct:
    """Loads a kernel once: one that compiles on first use must not do so for every case."""
    return loading.load(kernel)


def check_case(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
               seed: int = 0,
               circumstance: Circumstance = AS_DECLARED, again: bool = True) -> CaseResult:
    """Runs and judges one case. Only the kernel's own faults fail; a mistake in the case raises."""
    op = kernel.op

    def result(status: str, reasons: tuple[Reason, ...] = (), complaints: Sequence[Complaint] = (),
               detail: str = "",
               errors: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, reasons, *errors, detail or "; ".join(
            c.text for c in complaints), circumstance.name, seed,
                          tuple(dict.fromkeys(c.kind for c in complaints)), seconds)

    seconds = 0.0
    # what it refuses need not be generated
    reasons = (case_refusals(kernel, case, dtype, device, seed) if circumstance is AS_DECLARED
               else ())
    if reasons:
        return result("skipped", reasons)
    changed_values = circumstance.alter(op, case_values(op, case, dtype, device, seed))
    if changed_values is None:
        return result("skipped", detail="does not apply")
    values = changed_values
    if (not kernel.differentiable and circumstance.records
            and any(isinstance(v, Tensor) and v.requires_grad for v in values.values())):
        return result("skipped", detail="declares no backward")
    with nullcontext() if circumstance.records else torch.no_grad():
        reasons = () if circumstance is AS_DECLARED else circumstance_refusals(
            kernel, values, circumstance, case_contents(case, dtype, device, seed))
    if reasons:
        return result("skipped", reasons)
    try:
        with warnings.catch_warnings(), torch.no_grad(), circumstance.around(device):
            warnings.filterwarnings("ignore", message=UNREPEATABLE)
            prepared = circumstance.before(kernel, values, partial(
                case_values, op, case, dtype, device, seed + 1))
            if prepared is None:
                return result("skipped", detail="does not apply")
            began = time.thread_time()
            results, complaints = _runs(kernel, prepared, device, circumstance.runs)
            seconds = time.thread_time() - began
    except loading.LoadFailed as e:
        return result("skipped", (e.reason,))
    except FAULTS as e:
        reason = reason_of(e, classify(e))
        if circumstance.may_be_refused and device == "cuda" and reason.code is Code.KERNEL_FAILED:
            return result("skipped", (reason,))
        return result("failed", complaints=[Complaint("fault", str(reason))])
    values = prepared
    if not op.tensors:
        # as they are: a text is no list of one
        known = not complaints and circumstance is AS_DECLARED
        answer = compute_once(op, ("answer", *case_contents(case, dtype, device, seed)) if known
                              else None, lambda: op.reference(**with_own_generators(values)))
        complaints += compare_values(results, (answer,), values)
        return result("failed" if complaints else "passed", complaints=complaints)
    first, second = results[:2]
    with torch.no_grad():
        # after a kernel that changed its inputs they are not those of the case
        contents = case_contents(case, dtype, device, seed)
        key = (fingerprint(values) if complaints or not circumstance.keeps_values else
               contents if circumstance is AS_DECLARED else
               fingerprint_once(op, (circumstance.name, *contents), values))
        plain = circumstance.as_formula_takes(values)
        exact, eager = exact_results(op, plain, key), eager_results(op, plain, key)
        declared = results_of(op.meta(**values))
    complaints += [*find_wrong_shapes(first, declared), *find_aliasing(results, values)]
    if any(c.kind != "global state" for c in complaints):
        return result("failed", complaints=complaints)
    nbytes = 3 * sum(t.nbytes for t in exact)
    is_kept = key is not None and nbytes < SMALL_BYTES
    expected = compute_once(op, ("expected", key) if is_kept else None, lambda: [
        Expected(*both) for both in zip(exact, eager)], nbytes)

    def judge(budget: Sequence[Tensor | None]) -> list[Judgement]:
        return [judge_result(op, dtype, f"result {i}" if len(first) > 1 else "result", *parts,
                             circumstance.even, budget[i], circumstance.alike, expected[i])
                for i, parts in enumerate(zip(first, second, exact, eager))]

    with torch.no_grad():
        judgements = judge([None] * len(first))
    if any(c.kind == "error" for j in judgements for c in j.complaints) and dtype in UNITS:
        with torch.no_grad():
            judgements = judge(compute_once(op, key and ("budget", dtype, key), lambda: (
                rounding_budget(partial(formula, op), plain, upcast(plain), exact, dtype, op))))
    if kernel.deterministic:
        complaints += find_nondeterminism(results, kernel.jit)
    complaints += [c for j in judgements for c in j.complaints]
    worst = max(judgements, key=lambda j: j.ratio)
    errors = (worst.error, worst.eager_error, worst.ratio)
    if complaints and again and all(c.kind == "error" for c in complaints):
        if may_be_chance(first, errors[2]):
            retries = [check_case(kernel, case, dtype, device, seed + 1000 + i, circumstance, False)
                       for i in range(RETRIES)]
            if was_chance(op, errors, retries):
                return result("passed", detail=f"just outside once: {complaints[0].text}",
                              errors=(*errors[:2], 1.0))
    notes = "; ".join(n for j in judgements for n in j.notes)
    return (result("failed", (), complaints, "", errors) if complaints
            else result("passed", (), (), notes, errors))


def _runs(kernel: Kernel, values: dict[str, Any], device: str,
          runs: int) -> tuple[list[tuple[Any, ...]], list[Complaint]]:
    """Runs the kernel several times; returns the results of each run and what it did besides."""
    load_once(kernel)                          # loading may set up what a call must not
    guarded_values = guarded(values)
    before, guarded_before = snapshot(values), snapshot(guarded_values)
    state, complaints = process_state(device), []      # type: dict[str, Any], list[Complaint]
    around = {name: value for name, value in state.items() if name not in SLOW}
    changed: list[str] = []

    def run(arguments: dict[str, Any]) -> tuple[Any, ...]:
        nonlocal around
        around[DETERMINISTIC] = deterministic_mode()   # poisoned memory sets it
        answer = call(kernel, arguments)
        results = results_of(answer) if kernel.op.tensors else (answer,)
        if kernel.op.tensors:
            complaints.extend(find_wrong_container(answer))
        del answer                             # else it is one that holds the result
        complaints.extend(find_foreign_memory(results, arguments))
        differing = put_back(around, device)
        if differing:                          # else it is what the next run begins with
            changed.extend(differing)
            around = process_state(device, slow=False)
        return results

    results = [run(values)]
    copies = [t.clone() if isinstance(t, Tensor) else t for t in results[0]]
    with poisoned_memory():
        results.append(run(guarded_values))
    results += [run(values) for _ in range(max(runs, 3 if kernel.jit else 2) - 2)]
    overwritten = [Complaint("in-place change", text) for text in find_changes(values, before)]
    if not overwritten:
        overwritten += [Complaint("out of bounds", f"{text}, or the memory beside it") for text in
                        find_changes(guarded_values, guarded_before)]
    unknown = state if changed else {name: state[name] for name in SLOW}
    changed += [name for name in put_back(unknown, device) if name not in ONCE]
    twice = [name for name in ONCE if changed.count(name) > 1]
    changed = [name for name in changed if name not in ONCE]
    if twice:                                  # or it was another thread of the process
        changed += changed_by_each(partial(call, kernel, values), twice, device)
    if changed:                                # torch may do it itself: it gives oneDNN up for good
        excused = changed_by_formula(kernel.op, values, device)
        changed = [name for name in changed if name not in excused]
    complaints += [*overwritten, *(
        Complaint("global state", f"{name} changed during the call")
        for name in dict.fromkeys(changed) if not (kernel.jit and name in COMPILING))]
    complaints += [Complaint("aliasing", f"result {i} changed when the kernel was called again")
                   for i, (a, b) in enumerate(zip(results[0], copies))
                   if isinstance(a, Tensor) and not same(a, b)]
    return results, [*dict.fromkeys(complaints)]


def check_kernel(kernel: Kernel, cases: Iterable[Mapping[str, Any]] | None = None,
                 dtypes: Iterable[str] | None = None,
                 device: str = "cpu", seed: int = 0) -> list[CaseResult]:
    """Checks every case at every dtype, by default those of the op."""
    cases = tuple(kernel.op.cases if cases is None else cases)
    return [check_case(kernel, case, dtype, device, seed)
            for dtype in (kernel.op.dtypes if dtypes is None else dtypes) for case in cases]


def results_of(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
