"""The same call in other circumstances: a kernel that is right on fresh contiguous tensors may be
wrong otherwise.

They are derived from any op's declaration: a tensor in another layout, one tensor passed twice,
contents changed in place after an earlier call, autocast, recorded gradients, many runs, offsets
that exceed 32 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import dtype_name
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from .cases import ArgumentCase, with_argument
from .contract import (
    CaseResult,
    Circumstance,
    call,
    case_values,
    judge_result,
    refusals,
    results_of,
    upcast,
)
from .guarded import LAYOUTS, with_distant_rows, with_layout


class OtherLayout(Circumstance):
    """One tensor in another memory layout."""

    def __init__(self, tensor: str, layout: str) -> None:
        self.tensor, self.layout = tensor, layout
        self.name = f"{tensor} {layout}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        other = with_layout(t, self.layout) if isinstance(t, Tensor) else None
        return None if other is None else {**values, self.tensor: other}


class Expanded(Circumstance):
    """One tensor expanded from its first row (stride 0)."""

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} spread"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if (not isinstance(t, Tensor) or not t.is_floating_point() or t.dim() < 2 or t.shape[0] < 2
            or not t.numel()):
            return None
        # unused slots of a page may hold NaN
        if t.dtype.itemsize == 1 or not bool(t[0].isfinite().all()):
            return None
        return {**values, self.tensor: t[:1].expand_as(t)}


class UnusualValues(Circumstance):
    """The main tensor with unusual values: all zero, all of one sign, or one very large."""

    def __init__(self, how: str) -> None:
        self.how, self.name, self.even = how, f"filled with {how}", how != "one loud number"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values.get(op.main_tensor)
        if (not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype.itemsize == 1
            or not t.numel()):
            return None
        if self.how == "zeros":
            filled = torch.zeros_like(t)
        elif self.how == "one sign":
            filled = t.abs() + 1
        else:
            filled = t.clone()
            filled[(0,) * t.dim()] = 300.0
        return {**values, op.main_tensor: filled}


class WithArgument(Circumstance):
    """An argument of another case is given too: the kernel accepts it, but no accepted case has
    it."""

    def __init__(self, argument_case: ArgumentCase) -> None:
        self.argument_case = argument_case
        self.name = f"given the {argument_case.argument} of {dict(argument_case.donor or {})}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values[op.main_tensor]
        donated = with_argument(op, self.argument_case, dtype_name(main.dtype), main.device.type)
        argument = self.argument_case.argument
        return None if donated is None else {**values, argument: donated[argument]}


class SharedTensor(Circumstance):
    """One tensor passed as two arguments, as with attention(x, x, x)."""

    def __init__(self, first: str, second: str) -> None:
        self.first, self.second, self.name = first, second, f"{second} is {first}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        first, second = values[self.first], values[self.second]
        alike = (isinstance(first, Tensor) and isinstance(second, Tensor)
                 and first.shape == second.shape
                 and first.dtype == second.dtype and first.is_floating_point())
        return {**values, self.second: first} if alike else None


class ChangedInPlace(Circumstance):
    """The kernel has seen these tensors before with other contents, which it must not remember."""

    name = "changed in place after a call"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Mapping[str, Any]) -> dict[str, Any] | None:
        tensors = {n: t for n, t in values.items() if isinstance(t, Tensor)}
        if any(not isinstance(other[n], Tensor) or other[n].shape != t.shape
               or (0 in t.stride() and t.numel() > 1)
               for n, t in tensors.items()):
            return None
        for _ in range(2):
            call(kernel, values)
        for name, t in tensors.items():
            t.copy_(other[name])
        return {**other, **tensors}


class AfterAnotherCall(Circumstance):
    """The kernel has served other calls before, of the same sizes."""

    name = "after another call"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Mapping[str, Any]) -> dict[str, Any] | None:
        call(kernel, other)
        return values


class Autocast(Circumstance):
    """The caller is inside torch.autocast. The dispatcher has cast the tensors already."""

    name = "under autocast"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values.get(op.main_tensor)
        return values if isinstance(main, Tensor) and main.dtype == torch.bfloat16 else None

    def around(self, device: str) -> Any:
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


class InferenceMode(Circumstance):
    name = "in inference mode"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Mapping[str, Any]) -> dict[str, Any] | None:
        by_id: dict[int, Tensor] = {}          # inference tensors, as activations are
        return {n: by_id.setdefault(id(v), torch.empty_strided(v.shape, v.stride(), dtype=v.dtype,
                                                               device=v.device)
                                    .copy_(v)) if isinstance(v, Tensor) and 0 not in v.stride()
                else v
                for n, v in values.items()}

    def around(self, device: str) -> Any:
        return torch.inference_mode()


class RecordingGradients(Circumstance):
    """The forward pass while gradients are recorded: a kernel may take another path there."""

    name = "recording gradients"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        if not op.differentiable:
            return None
        return {n: v.detach().requires_grad_() if n in op.differentiable and isinstance(v, Tensor)
                and v.is_floating_point() else v for n, v in values.items()}

    def around(self, device: str) -> Any:
        return torch.enable_grad()


class Repeated(Circumstance):
    name = "eight times"
    runs = 8


class FarApart(Circumstance):
    """Rows of one tensor span 2^31 elements. This takes gigabytes of address space, not of
    memory."""

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} with rows 2^31 elements apart"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dtype.itemsize > 2 or not t.is_floating_point():
            return None
        distant = with_distant_rows(t)
        return None if distant is None else {**values, self.tensor: distant}


def circumstances(op: Op, lane: str) -> Iterator[Circumstance]:
    """Yields the circumstances of a lane: quick has each kind, full every layout of every
    tensor."""
    yield from (ChangedInPlace(), AfterAnotherCall(), Autocast(), InferenceMode(),
                RecordingGradients(), Repeated())
    if op.read is not None:
        return
    yield from (UnusualValues(how) for how in ("zeros", "one sign", "one loud number"))
    floats = [p.name for p in op.params if p.kind == "tensor"]
    layouts = LAYOUTS if lane != "quick" else ("sparse", "transposed")
    yield from (OtherLayout(name, layout) for name in floats for layout in layouts)
    main = op.same_dtype or op.differentiable or (op.main_tensor,)
    yield from (SharedTensor(a, b) for i, a in enumerate(main) for b in main[i + 1:])
    yield from (Expanded(name) for name in main)
    yield from (FarApart(name) for name in (main if lane != "quick" else (op.main_tensor,)))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


DROPOUT_P = 0.3


def check_dropout(kernel: Kernel, dtype: str, device: str = "cpu", seed: int = 0) -> CaseResult:
    """Checks the dropout of an attention that declares `dropout_case`.

    With the identity as values the result is the attention weights: each must be zero, or 1 / (1 -
    p) times itself.
    """
    op = kernel.op
    case = op.dropout_case
    values = {**case_values(op, case, dtype, device, seed), "dropout_p": DROPOUT_P}
    value = values["value"]
    values["value"] = torch.eye(value.shape[-1], device=device,
                                dtype=value.dtype).expand(value.shape).contiguous()
    details: dict[str, Any] = {"circumstance": f"dropout {DROPOUT_P}", "seed": seed}
    reasons = refusals(kernel, values)
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, **details)
    with torch.no_grad(), torch.random.fork_rng(enabled=True):
        torch.manual_seed(seed)
        expected = op.reference(**{**upcast(values), "dropout_p": 0.0}) / (1 - DROPOUT_P)
        try:
            first, second = (call(kernel, values).double() for _ in range(2))
        except FAULTS as e:
            return CaseResult(kernel.id, case, dtype, "failed",
                              detail=str(reason_of(e, classify(e))),
                              kinds=("fault",), **details)
    dropped = first == 0
    deviation = float(torch.where(dropped, 0.0, (first - expected).abs() / expected).max())
    share, deviation_of_share = float(dropped.double().mean()), (DROPOUT_P * (1 - DROPOUT_P)
                                                                 / dropped.numel()) ** 0.5
    problems = []
    if abs(share - DROPOUT_P) > 6 * deviation_of_share:
        problems.append(f"{share:.3f} of the weights were dropped, not {DROPOUT_P}")
    if deviation > max(64 * torch.finfo(values["query"].dtype).eps, 1e-5):
        problems.append(f"what is left of a weight is off by up to {deviation:.3g} of it")
    if not problems and torch.equal(first, second):
        problems.append("two calls dropped the same weights")
    return CaseResult(kernel.id, case, dtype, "failed" if problems else "passed",
                      detail="; ".join(problems),
                      kinds=("distribution",) if problems else (), **details)


def check_threads(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                  seed: int = 0,
                  threads: int = 4, rounds: int = 6) -> CaseResult:
    """Calls the kernel from several threads at once with their own inputs: calls must share
    nothing."""
    op, name = kernel.op, f"{threads} threads at once"
    inputs = [case_values(op, case, dtype, device, seed + i) for i in range(threads)]
    reasons = next((r for values in inputs if (r := refusals(kernel, values))), ())
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, circumstance=name, seed=seed)

    def work(values: dict[str, Any]) -> list[tuple[Any, ...]]:
        with torch.no_grad():
            return [results_of(call(kernel, values)) for _ in range(rounds)]

    try:
        with _quiet():
            call(kernel, inputs[0])            # compiling and one-time setup are not under test
            with ThreadPoolExecutor(threads) as pool:
                results = list(pool.map(work, inputs))
    except FAULTS as e:
        return CaseResult(kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))),
                          circumstance=name,
                          seed=seed, kinds=("threads",))
    for values, runs in zip(inputs, results):
        with torch.no_grad():
            truth, eager = results_of(op.reference(**upcast(values))), results_of(
                op.reference(**values))
        if op.read is not None:
            complaints = [f"{r!r:.200} instead of {eager!r:.200}" for r in runs if r != eager]
        else:
            complaints = [c.text for r in runs for parts in zip(r, r, truth, eager)
                          for c in judge_result(op, dtype, "result", *parts).complaints]
        if complaints:
            return CaseResult(kernel.id, case, dtype, "failed", detail=complaints[0],
                              circumstance=name, seed=seed,
                              kinds=("threads",))
    return CaseResult(kernel.id, case, dtype, "passed", circumstance=name, seed=seed)
