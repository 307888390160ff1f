"""Does a kernel keep the contract of its op? One case at a time, against the upcast reference.

A kernel passes a case when, for every result:
- shape and dtype are those of the op's meta function, and it shares no memory with an input;
- it is finite where the reference is, and equal to it where that is infinite;
- its error is at most `times_eager` x the error of the eager formula at the same dtype, plus a few roundings
  (not for float64, where the reference is no more exact than the kernel);
- its error lies inside the op's table (rtol, atol), unless the eager formula at that dtype does not either;
- a second run over poisoned memory gives the same, so nothing was left unwritten or read before it was written;
and no input has changed, not even the parts of its storage outside the view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..runtime import hardware, loading
from ..runtime.binding import bind
from ..runtime.facts import read
from ..runtime.faults import FAULTS, classify, reason_of
from ..spec.kernel import Direct, Kernel
from ..spec.op import Op
from ..spec.plan import Transform
from ..spec.reason import Reason

ROUNDINGS = 4.0            # of the largest result, that a kernel may differ by however exact eager was


@dataclass(frozen=True)
class CaseResult:
    """What came of one case. The errors are absolute, and the largest over all results."""

    kernel: str
    case: Mapping[str, Any]
    dtype: str
    status: str                                # passed | skipped | failed
    reasons: tuple[Reason, ...] = ()           # why it was skipped
    error: float = 0.0
    eager_error: float = 0.0
    ratio: float = 0.0                         # of error to what was allowed; above 1 is a failure
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        head = f"{self.kernel} {self.dtype} {dict(self.case)}: {self.status}"
        if self.status == "skipped":
            return f"{head}: " + "; ".join(map(str, self.reasons))
        detail = f"; {self.detail}" if self.detail else ""
        return f"{head}, error {self.error:.3g}, eager {self.eager_error:.3g}{detail}"


def case_values(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The arguments of a case, every parameter of the op by name."""
    given = op.inputs(**case, dtype=getattr(torch, dtype), device=device, seed=seed)
    return {p.name: given.get(p.name, p.default) for p in op.params}


def refusals(kernel: Kernel, values: Mapping[str, Any]) -> tuple[Reason, ...]:
    """Why the kernel would not be given this call: its library, the contract's own limits, its rules."""
    missing = loading.availability(kernel)
    if missing is not None:
        return (missing,)
    facts = read(kernel.op, values)
    facts = {**hardware.probe(facts["device"]).facts(), **facts}
    broken = tuple(r for rule in kernel.op.requires if (r := rule.check(facts)) is not None)
    return (*broken, *kernel.reasons(facts))


def call(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    """Run the kernel with the views its layout asks for, as the dispatcher would."""
    op = kernel.op
    variant = values[op.variant] if op.variant else ""
    moves = op.variant and kernel.variants and variant not in kernel.variants
    transforms = (Transform("layout", kernel.variants[0]),) if moves else ()
    return bind(op, kernel, loaded(kernel), transforms, variant).run(*(values[p.name] for p in op.params))


@lru_cache(maxsize=None)
def loaded(kernel: Kernel) -> Callable[..., Any] | Direct:
    """Once per kernel: what compiles on first use must not do so for every case."""
    return loading.load(kernel)


def check_case(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu", seed: int = 0) -> CaseResult:
    """Run one case and judge it. Only the kernel's own faults become a failure; a mistake in the case raises."""
    op = kernel.op
    values = case_values(op, case, dtype, device, seed)
    reasons = refusals(kernel, values)
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons)
    if op.read is not None:
        return _check_equal(kernel, case, dtype, values)
    before = snapshot(values)
    try:
        with torch.no_grad():
            first = results_of(call(kernel, values))
            with poisoned_memory():
                second = results_of(call(kernel, values))
    except loading.LoadFailed as e:
        return CaseResult(kernel.id, case, dtype, "skipped", (e.reason,))
    except FAULTS as e:
        return CaseResult(kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))))
    with torch.no_grad():
        truth = results_of(op.reference(**upcast(values)))
        eager = results_of(op.reference(**values))
        wanted = results_of(op.meta(**values))
    complaints = [*changed(values, before), *_misshapen(first, wanted), *_aliases(first, values)]
    if complaints:
        return CaseResult(kernel.id, case, dtype, "failed", detail="; ".join(complaints))
    judged = [_judge(op, dtype, f"result {i}" if len(first) > 1 else "result", *parts)
              for i, parts in enumerate(zip(first, second, truth, eager))]
    if kernel.deterministic and not all(torch.equal(_comparable(a), _comparable(b)) for a, b in zip(first, second)):
        worst = max(_largest((a.double() - b.double()).abs()) for a, b in zip(first, second))
        complaints.append(f"two runs differ, by up to {worst:.3g}, the second over poisoned memory")
    complaints += [c for j in judged for c in j.complaints]
    error, eager_error = max(j.error for j in judged), max(j.eager_error for j in judged)
    ratio = max(j.ratio for j in judged)
    detail = "; ".join(complaints or (n for j in judged for n in j.notes))
    status = "failed" if complaints else "passed"
    return CaseResult(kernel.id, case, dtype, status, (), error, eager_error, ratio, detail)


def _check_equal(kernel: Kernel, case: Mapping[str, Any], dtype: str, values: Mapping[str, Any]) -> CaseResult:
    """For an op whose results are no tensors: the reference's own, both times."""
    try:
        got = [call(kernel, values) for _ in range(2)]
    except loading.LoadFailed as e:
        return CaseResult(kernel.id, case, dtype, "skipped", (e.reason,))
    except FAULTS as e:
        return CaseResult(kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))))
    want = kernel.op.reference(**values)
    wrong = [result for result in got if result != want]
    if wrong:
        return CaseResult(kernel.id, case, dtype, "failed", detail=f"{wrong[0]!r:.300} instead of {want!r:.300}")
    return CaseResult(kernel.id, case, dtype, "passed")


def check_kernel(kernel: Kernel, cases: Iterable[Mapping[str, Any]] | None = None, dtypes: Iterable[str] | None = None,
                 device: str = "cpu", seed: int = 0) -> list[CaseResult]:
    """Every case at every dtype, by default those of the op."""
    cases = tuple(kernel.op.cases if cases is None else cases)
    return [check_case(kernel, case, dtype, device, seed)
            for dtype in (kernel.op.dtypes if dtypes is None else dtypes) for case in cases]


def worst_indices(out: Tensor, truth: Tensor, n: int = 3) -> list[tuple[int, ...]]:
    """Where `out` is furthest from `truth`, worst first; what is not a number is worst of all."""
    if not out.numel():
        return []
    gap = (out.double() - truth.double()).abs().reshape(-1)
    gap = torch.where(out.reshape(-1) == truth.reshape(-1), 0.0, gap.nan_to_num(nan=math.inf))
    found = gap.topk(min(n, gap.numel())).indices.tolist()
    return [tuple(int(i) for i in _unravel(flat, out.shape)) for flat in found]


# The parts of a verdict.

@dataclass(frozen=True)
class _Judged:
    error: float
    eager_error: float
    ratio: float
    complaints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _judge(op: Op, dtype: str, name: str, first: Tensor, second: Tensor, truth: Tensor, eager: Tensor) -> _Judged:
    if not first.numel():
        return _Judged(0.0, 0.0, 0.0)
    first, second, eager = map(_codes, (first, second, eager))
    if not first.is_floating_point():          # tokens, codes and counts: those of the formula at the same dtype
        wrong = [when for out, when in ((first, ""), (second, " over poisoned memory")) if not torch.equal(out, eager)]
        return _Judged(float(bool(wrong)), 0.0, float(bool(wrong)), tuple(
            f"{name}{when}: differs from the formula at {worst_indices(first, eager)}" for when in wrong))
    finite = truth.isfinite()
    rtol, atol = op.tolerance.of(dtype)
    eager_error, size = _error(eager, truth, finite), _largest(truth[finite].abs())
    bound = op.tolerance.times_eager * eager_error + ROUNDINGS * torch.finfo(first.dtype).eps * size
    if dtype == "float64":
        bound = atol + rtol * size
    error = max(_error(first, truth, finite), _error(second, truth, finite))
    complaints, notes = [], []
    for out, when in ((first, ""), (second, " over poisoned memory")):
        bad = (out.double() != truth) & ~finite | ~out.isfinite() & finite
        if bad.any():
            complaints.append(f"{name}{when}: {int(bad.sum())} of {out.numel()} not finite where the reference is, or "
                              f"finite where it is not, first at {tuple(bad.nonzero()[0].tolist())}")
    if not complaints and error > bound:
        complaints.append(f"{name}: error {error:.3g} exceeds {op.tolerance.times_eager:g} x eager {eager_error:.3g} + "
                          f"rounding = {bound:.3g}, worst at {worst_indices(first, truth)}")
    if not complaints and _outside(first, truth, finite, rtol, atol) > 0:
        if _outside(eager, truth, finite, rtol, atol) > 0:
            notes.append(f"{name}: outside rtol {rtol:g}, atol {atol:g}, as is the eager formula ({eager_error:.3g})")
        else:
            complaints.append(f"{name}: outside rtol {rtol:g}, atol {atol:g}, worst at {worst_indices(first, truth)}; "
                              "the eager formula is inside")
    return _Judged(error, eager_error, error / bound if bound else 0.0, tuple(complaints), tuple(notes))


def _error(out: Tensor, truth: Tensor, finite: Tensor) -> float:
    gap = (out.double() - truth).abs()[finite]
    return math.inf if gap.isnan().any() else _largest(gap)


def _outside(out: Tensor, truth: Tensor, finite: Tensor, rtol: float, atol: float) -> float:
    gap = (out.double() - truth).abs() - (atol + rtol * truth.abs())
    return _largest(gap[finite])


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _codes(t: Tensor) -> Tensor:
    """Numbers of one byte as their codes: torch compares few of those types, and they are right or wrong."""
    return t.view(torch.uint8) if t.is_floating_point() and t.dtype.itemsize == 1 else t


def _comparable(t: Tensor) -> Tensor:
    """NaN differs from itself; here the same garbage twice is the same."""
    t = _codes(t)
    return t.nan_to_num(nan=math.inf) if t.is_floating_point() else t


def _unravel(flat: int, shape: Sequence[int]) -> Iterator[int]:
    rest = flat
    for size in (math.prod(shape[i + 1:]) for i in range(len(shape))):
        yield rest // size
        rest %= size


def _misshapen(got: Sequence[Any], wanted: Sequence[Tensor]) -> Iterator[str]:
    if len(got) != len(wanted):
        yield f"returned {len(got)} results, the contract says {len(wanted)}"
    for i, (a, b) in enumerate(zip(got, wanted)):
        if not isinstance(a, Tensor):
            yield f"result {i} is {a!r}, the contract says a tensor"
        elif a.shape != b.shape or a.dtype != b.dtype or a.device.type != b.device.type:
            yield (f"result {i} is {tuple(a.shape)} {a.dtype} on {a.device.type}, the contract says "
                   f"{tuple(b.shape)} {b.dtype} on {b.device.type}")


def _aliases(got: Sequence[Any], values: Mapping[str, Any]) -> Iterator[str]:
    owners = {v.untyped_storage().data_ptr(): name for name, v in values.items() if isinstance(v, Tensor) and v.numel()}
    for i, t in enumerate(got):
        owner = owners.get(t.untyped_storage().data_ptr()) if isinstance(t, Tensor) and t.numel() else None
        if owner is not None:
            yield f"result {i} shares memory with {owner}"


# Inputs and memory.

def results_of(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def upcast(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same rounded numbers in float64."""
    return {name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in values.items()}


def snapshot(values: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
    """The whole storage of every tensor, and its version."""
    return {name: (_bytes(v).clone(), v._version) for name, v in values.items() if isinstance(v, Tensor)}


def changed(values: Mapping[str, Any], before: Mapping[str, tuple[Tensor, int]]) -> Iterator[str]:
    for name, (was, version) in before.items():
        if not torch.equal(_bytes(values[name]), was):
            yield f"{name} was overwritten"
        elif values[name]._version != version:
            yield f"{name} was written to (its version went from {version} to {values[name]._version})"


def _bytes(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is filled with NaN and the largest integers, so that reading or leaving it as it came shows."""
    memory: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled


