"""The same call in other circumstances: a kernel that is right on fresh contiguous tensors may be wrong otherwise.

Each is found for any op from its declaration: one of its tensors laid out otherwise, one tensor passed twice, the
contents changed in place after an earlier call, autocast on, gradients wanted, many runs, rows so far apart that an
offset does not fit 32 bits.
"""

from __future__ import annotations

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
from .cases import Reached, with_argument
from .contract import CaseResult, Circumstance, call, case_values, judge, refusals, results_of, upcast
from .guarded import LAYOUTS, far_apart, relaid


class LaidOut(Circumstance):
    """One tensor in other memory."""

    def __init__(self, tensor: str, layout: str) -> None:
        self.tensor, self.layout = tensor, layout
        self.name = f"{tensor} {layout}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        other = relaid(t, self.layout) if isinstance(t, Tensor) else None
        return None if other is None else {**values, self.tensor: other}


class Spread(Circumstance):
    """One tensor whose first dimension is spread: all its rows are one."""

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} spread"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.dim() < 2 or t.shape[0] < 2 or not t.numel():
            return None
        if t.dtype.itemsize == 1 or not bool(t[0].isfinite().all()):       # a page may have slots out of use
            return None
        return {**values, self.tensor: t[:1].expand_as(t)}


class Filled(Circumstance):
    """The main tensor with numbers that are not like the usual ones: all zero, all of one sign, one of them loud."""

    def __init__(self, how: str) -> None:
        self.how, self.name, self.even = how, f"filled with {how}", how != "one loud number"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values.get(op.main_tensor)
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype.itemsize == 1 or not t.numel():
            return None
        if self.how == "zeros":
            filled = torch.zeros_like(t)
        elif self.how == "one sign":
            filled = t.abs() + 1
        else:
            filled = t.clone()
            filled[(0,) * t.dim()] = 300.0
        return {**values, op.main_tensor: filled}


class Handed(Circumstance):
    """One argument of another case is given too: the kernel takes it, and no case of its own has it."""

    def __init__(self, way: Reached) -> None:
        self.way, self.name = way, f"given the {way.argument} of {dict(way.donor or {})}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values[op.main_tensor]
        made = with_argument(op, self.way, dtype_name(main.dtype), main.device.type)
        return None if made is None else {**values, self.way.argument: made[self.way.argument]}


class Same(Circumstance):
    """One tensor passed as two arguments, as with attention(x, x, x)."""

    def __init__(self, one: str, other: str) -> None:
        self.one, self.other, self.name = one, other, f"{other} is {one}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        one, other = values[self.one], values[self.other]
        alike = (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
                 and one.dtype == other.dtype and one.is_floating_point())
        return {**values, self.other: one} if alike else None


class ChangedInPlace(Circumstance):
    """The kernel has seen these tensors before, with other contents: nothing of that may be remembered."""

    name = "changed in place after a call"

    def before(self, kernel: Kernel, values: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
        tensors = {n: t for n, t in values.items() if isinstance(t, Tensor)}
        if any(not isinstance(other[n], Tensor) or other[n].shape != t.shape or (0 in t.stride() and t.numel() > 1)
               for n, t in tensors.items()):
            return None
        for _ in range(2):
            call(kernel, values)
        for name, t in tensors.items():
            t.copy_(other[name])
        return {**other, **tensors}


class AfterOthers(Circumstance):
    """The kernel has served other calls before, of the same sizes."""

    name = "after another call"

    def before(self, kernel: Kernel, values: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
        call(kernel, other)
        return values


class Autocast(Circumstance):
    """The caller is inside torch.autocast. The tensors have its dtype already: the dispatcher saw to that."""

    name = "under autocast"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values.get(op.main_tensor)
        return values if isinstance(main, Tensor) and main.dtype == torch.bfloat16 else None

    def around(self, device: str) -> Any:
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


class InferenceMode(Circumstance):
    name = "in inference mode"

    def before(self, kernel: Kernel, values: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
        made: dict[int, Tensor] = {}           # by inference itself, as activations are
        return {n: made.setdefault(id(v), torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                                   .copy_(v)) if isinstance(v, Tensor) and 0 not in v.stride() else v
                for n, v in values.items()}

    def around(self, device: str) -> Any:
        return torch.inference_mode()


class WantingGradients(Circumstance):
    """The forward pass alone, while gradients are recorded: a kernel may go another way there."""

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
    """Rows of one tensor 2^31 elements apart. Takes gigabytes of addresses, not of memory."""

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} with rows 2^31 elements apart"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        far = far_apart(t) if isinstance(t, Tensor) and t.dtype.itemsize <= 2 and t.is_floating_point() else None
        return None if far is None else {**values, self.tensor: far}


def circumstances(op: Op, lane: str) -> Iterator[Circumstance]:
    """Those of a lane: quick has each kind, full has every layout of every tensor."""
    yield from (ChangedInPlace(), AfterOthers(), Autocast(), InferenceMode(), WantingGradients(), Repeated())
    if op.read is not None:
        return
    yield from (Filled(how) for how in ("zeros", "one sign", "one loud number"))
    floats = [p.name for p in op.params if p.kind == "tensor"]
    layouts = LAYOUTS if lane != "quick" else ("sparse", "transposed")
    yield from (LaidOut(name, layout) for name in floats for layout in layouts)
    main = op.same_dtype or op.differentiable or (op.main_tensor,)
    yield from (Same(a, b) for i, a in enumerate(main) for b in main[i + 1:])
    yield from (Spread(name) for name in main)
    yield from (FarApart(name) for name in (main if lane != "quick" else (op.main_tensor,)))


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


DROPPED = 0.3


def check_dropout(kernel: Kernel, dtype: str, device: str = "cpu", seed: int = 0) -> CaseResult:
    """Of an attention that declares `dropout_case`. With the identity for values the result is the weights: each is
    zero, or 1 / (1 - p) times what it was."""
    op = kernel.op
    case = op.dropout_case
    values = {**case_values(op, case, dtype, device, seed), "dropout_p": DROPPED}
    given = values["value"]
    values["value"] = torch.eye(given.shape[-1], device=device, dtype=given.dtype).expand(given.shape).contiguous()
    told: dict[str, Any] = {"circumstance": f"dropout {DROPPED}", "seed": seed}
    reasons = refusals(kernel, values)
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, **told)
    with torch.no_grad(), torch.random.fork_rng(enabled=True):
        torch.manual_seed(seed)
        whole = op.reference(**{**upcast(values), "dropout_p": 0.0}) / (1 - DROPPED)
        try:
            first, second = (call(kernel, values).double() for _ in range(2))
        except FAULTS as e:
            return CaseResult(kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))),
                              kinds=("fault",), **told)
    gone = first == 0
    off = float(torch.where(gone, 0.0, (first - whole).abs() / whole).max())
    share, spread = float(gone.double().mean()), (DROPPED * (1 - DROPPED) / gone.numel()) ** 0.5
    wrong = []
    if abs(share - DROPPED) > 6 * spread:
        wrong.append(f"{share:.3f} of the weights were dropped, not {DROPPED}")
    if off > max(64 * torch.finfo(values["query"].dtype).eps, 1e-5):
        wrong.append(f"what is left of a weight is off by up to {off:.3g} of it")
    if not wrong and torch.equal(first, second):
        wrong.append("two calls dropped the same weights")
    return CaseResult(kernel.id, case, dtype, "failed" if wrong else "passed", detail="; ".join(wrong),
                      kinds=("distribution",) if wrong else (), **told)


def check_threads(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu", seed: int = 0,
                  threads: int = 4, rounds: int = 6) -> CaseResult:
    """Several threads at once, each with inputs of its own: nothing may be shared between the calls."""
    op, name = kernel.op, f"{threads} threads at once"
    every = [case_values(op, case, dtype, device, seed + i) for i in range(threads)]
    reasons = next((r for values in every if (r := refusals(kernel, values))), ())
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, circumstance=name, seed=seed)

    def work(values: dict[str, Any]) -> list[tuple[Any, ...]]:
        with torch.no_grad():
            return [results_of(call(kernel, values)) for _ in range(rounds)]

    try:
        with _quiet():
            call(kernel, every[0])             # what is compiled or made once is not what is asked here
            with ThreadPoolExecutor(threads) as pool:
                got = list(pool.map(work, every))
    except FAULTS as e:
        return CaseResult(kernel.id, case, dtype, "failed", detail=str(reason_of(e, classify(e))), circumstance=name,
                          seed=seed, kinds=("threads",))
    for values, runs in zip(every, got):
        with torch.no_grad():
            truth, eager = results_of(op.reference(**upcast(values))), results_of(op.reference(**values))
        if op.read is not None:
            complaints = [f"{r!r:.200} instead of {eager!r:.200}" for r in runs if r != eager]
        else:
            complaints = [c.text for r in runs for parts in zip(r, r, truth, eager)
                          for c in judge(op, dtype, "result", *parts).complaints]
        if complaints:
            return CaseResult(kernel.id, case, dtype, "failed", detail=complaints[0], circumstance=name, seed=seed,
                              kinds=("threads",))
    return CaseResult(kernel.id, case, dtype, "passed", circumstance=name, seed=seed)
