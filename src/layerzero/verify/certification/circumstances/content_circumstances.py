"""Circumstances of what tensors hold: contents that changed without a trace in a version, a mask of
a function that reads a tensor, numbers of float16 whose squares float16 does not hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ....backends._packing import PACKED
from ....ops.formulas.block_masks import is_block_mask
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.chosen_cells import Cell
from ...cases.generated import Case, is_costly
from ...kernel.case_sizes import relative_size
from ...kernel.contract import (
    SMALL,
    CaseResult,
    Circumstance,
    call,
    case_refusals,
    case_tensors,
    case_values_to_read,
    check_case,
    eager_results,
)
from ...kernel.shared import fingerprint
from .argument_circumstances import ChangedInPart
from .dtype_circumstances import SecondDtypes, free_tensors
from .row_circumstances import OtherLayout, if_finite

Values = dict[str, Any]
LOUD, LOUDEST_RESULT = 200.0, 3e4              # of float16, which ends at 65504
A_ROUNDING, FEW = 2.0 ** -10, 2.0 ** -7      # of float16, and what they may make of the largest
BLOCK_MASK, SHORTEST = "block_mask", 8
FEWEST_ROWS = 64                               # of a weight that is worth a sample
LARGE = 400.0                                  # times the default sizes
BY_COLUMNS, VECTOR = ("transposed", "transposed part"), 8
TRIES = 3                                      # of cases that may have a circumstance
OFTEN, OFTEN_S = 17, 0.02                      # calls before a write, and CPU time for them
FORGET_PACKED = "is right after such a write if lz.quant.forget_packed is called"


class WrittenUnseen(Circumstance):
    """Numbers are written through `.data`, as loaders of weights do it: no version tells. Copies in
    the library's own cache of packed weights are dropped by the call that is documented for it; a
    cache that this does not reach must look at the contents."""

    name, any_dtype = "changed in place after a call without a version", True

    def __init__(self) -> None:
        self.forgotten = 0                     # packed copies that had to be dropped

    def before(self, kernel: Kernel, values: Values,
               other: Callable[[], Values]) -> Values | None:
        tensors = {n: t for n, t in values.items() if isinstance(t, Tensor)}
        others = other()
        if len(tensors) < 2 or any(
                not isinstance(others[n], Tensor) or others[n].shape != t.shape
                or (0 in t.stride() and t.numel() > 1) for n, t in tensors.items()):
            return None
        began = time.thread_time()
        for done in range(OFTEN):              # some keep what they are given often
            call(kernel, values)
            if done and time.thread_time() - began > OFTEN_S:
                break
        for name, t in tensors.items():
            # indices go with the contents, and are the caller's to write where it is seen
            (t.data if t.is_floating_point() or t.dtype.itemsize == 1 else t).copy_(others[name])
        self.forgotten = PACKED.forget(*tensors.values())
        return {**others, **tensors}


class RowWrittenUnseen(WrittenUnseen):
    """One row of a weight is written so: a sample of the contents does not tell."""

    name, any_dtype = "changed in place in one row after a call, without a version", True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def before(self, kernel: Kernel, values: Values,
               other: Callable[[], Values]) -> Values | None:
        weights = [t for n, t in values.items() if n != kernel.op.main_tensor
                   and isinstance(t, Tensor) and t.is_floating_point() and t.dtype.itemsize > 1
                   and t.dim() > 1 and len(t) > FEWEST_ROWS and 0 not in t.stride()]
        for _ in range(2 if weights else 0):
            call(kernel, values)
        for t in weights:
            row = t.data[(5 * self.seed + 3) % (len(t) - 1) | 1]
            row.copy_(row.flip(0))
        self.forgotten = PACKED.forget(*weights)
        return values if weights else None


class MaskOfNextBatch(Circumstance):
    """A BlockMask of the function of an earlier one, which reads a tensor of documents that changed
    in place since: neither the function nor the sizes tell what is visible. Or the earlier one
    itself, where the change is within its blocks; or one of the same blocks and the same code, over
    another tensor."""

    any_dtype = True

    def __init__(self, same: bool = False, only_code: bool = False) -> None:
        self.same, self.only_code = same, only_code
        self.name = (f"{BLOCK_MASK} of the same code over another tensor than in a call before"
                     if only_code else
                     f"{BLOCK_MASK}{', the same one,' if same else ''} of a function whose tensor "
                     "changed in place after a call")

    def alter(self, op: Op, values: Values) -> Values | None:
        mask = values[BLOCK_MASK]
        return values if is_block_mask(mask) and min(mask.seq_lengths) >= SHORTEST else None

    def before(self, kernel: Kernel, values: Values,
               other: Callable[[], Values]) -> Values | None:
        mask = values[BLOCK_MASK]
        from torch.nn.attention.flex_attention import create_block_mask

        device, (seq_q, seq_k) = mask.kv_indices.device, mask.seq_lengths
        length = max(seq_q, seq_k)
        places = torch.arange(length, device=device)
        # one block sees all of a sequence, and says so whatever the documents are
        blocks = (length,) * 2 if self.same or self.only_code else mask.BLOCK_SIZE
        batch, heads = (n if n > 1 else None for n in mask.shape[:2])

        def function_of(documents: Tensor) -> Callable[..., Tensor]:
            def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return documents[q] == documents[k]

            return is_visible

        def batch_values(function: Callable[..., Tensor]) -> Values:
            return {**values, BLOCK_MASK: create_block_mask(
                function, batch, heads, seq_q, seq_k, device=str(device), BLOCK_SIZE=blocks)}

        # others than in a check before, of which something may be kept
        documents, others = (places * n // length for n in ((2, 7) if self.only_code else (3, 5)))
        first = batch_values(function := function_of(documents))
        call(kernel, first)
        if self.only_code:
            return batch_values(function_of(others))
        documents.copy_(others)
        return first if self.same else batch_values(function)


class LoudHalf(Circumstance):
    """The main tensor of float16 has numbers of a few hundred: it holds them and the result, and
    neither their squares nor a sum of products with codes."""

    name, even = "filled with loud numbers of float16", False

    def alter(self, op: Op, values: Values) -> Values | None:
        t = values.get(op.main_tensor)
        if not isinstance(t, Tensor) or t.dtype != torch.float16 or t.numel() < 2:
            return None
        size = float(t.double().square().mean().sqrt())
        if not 0 < size < LOUD:
            return None
        # a power of two: the same digits
        loud = if_finite(op, {**values, op.main_tensor: t * 2.0 ** round(math.log2(LOUD / size))})
        if loud is None or not bool(loud[op.main_tensor].isfinite().all()):
            return None
        return loud if holds_results(op, loud) else None


def holds_results(op: Op, values: Values) -> bool:
    """Has float16 room for the results, and do they change as little as the main tensor does? A
    softmax of loud scores tells roundings apart, and nothing about the range."""
    main = values[op.main_tensor]
    signs = 1 - 2 * (torch.arange(main.numel(), device=main.device) % 2).view(main.shape)
    near = {**values, op.main_tensor: (main.double() * (1 + signs * A_ROUNDING)).to(main.dtype)}
    with torch.no_grad():
        pairs = zip(*(eager_results(op, v, fingerprint(v)) for v in (values, near)))
        return all(not a.numel() or (
            float(a.abs().max()) < LOUDEST_RESULT
            and float((a.double() - b.double()).abs().max()) <= FEW * float(a.abs().max()))
            for a, b in pairs if a.dtype.is_floating_point and a.dtype.itemsize > 1)


def content_circumstances(op: Op) -> Iterator[tuple[Circumstance, str]]:
    """Yields those that not every case can have, with the dtype that one is asked in."""
    if "float16" in op.dtypes and op.tensors:
        yield LoudHalf(), "float16"
    if any(free_tensors(op)):
        yield from ((SecondDtypes(), dtype) for dtype in ("float16", "float32")
                    if dtype in op.dtypes)
    if any(p.name == BLOCK_MASK for p in op.params):
        yield from ((MaskOfNextBatch(*how), op.dtypes[0])
                    for how in ((False,), (True,), (False, True)))


def check_contents(kernel: Kernel, case: Case, dtype: str, device: str, seed: int,
                   circumstance: Circumstance) -> CaseResult:
    """Checks a case, and says where it is right because packed copies were dropped."""
    result = check_case(kernel, case, dtype, device, seed, circumstance)
    forgotten = isinstance(circumstance, WrittenUnseen) and circumstance.forgotten
    return replace(result, detail=FORGET_PACKED) if forgotten and result.passed else result


def content_checks(kernel: Kernel, device: str, seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields each circumstance with the first of a few of the op's own cases that can have it;
    that of all dtypes with one that has most tensors."""
    op = kernel.op
    dtype = op.dtypes[0]
    large = [case for case in op.cases if "stride" not in case and relative_size(op, case) <= LARGE
             and any(n != op.main_tensor and t.dim() > 1 and len(t) > FEWEST_ROWS
                     for n, t in case_tensors(op, case, dtype, device, seed).items())]
    yield from (partial(check_contents, kernel, case, dtype, device, seed, RowWrittenUnseen(seed))
                for case in sorted(large, key=lambda case: -relative_size(op, case))[:2])
    for circumstance, dtype in content_circumstances(op):
        cases = op.cases if not isinstance(circumstance, SecondDtypes) else sorted(
            op.cases, key=lambda case: -len(case_tensors(op, case, dtype, device, seed)))
        accepted = (case for case in cases
                    if "stride" not in case and relative_size(op, case) <= SMALL
                    and not case_refusals(kernel, case, dtype, device, seed))
        able = (case for case in islice(accepted, TRIES) if circumstance.alter(
            op, case_values_to_read(op, case, dtype, device, seed)) is not None)
        yield from (partial(check_case, kernel, case, dtype, device, seed, circumstance)
                    for case in islice(able, 1))


def tensor_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                  seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields for each tensor the plainest case that gives it, and then changes it in part: what is
    made of several tensors may be looked up by one of them, and only where no other is given; and
    the plainest in which it is a matrix that is another one if it is read by columns; and
    misaligned where its rows are such as vectors of eight are loaded from."""
    op = kernel.op
    plain = sorted((c for c in cells if c[1] == op.dtypes[0] and c[0] in op.cases
                    and not is_costly(op, c[0])),
                   key=lambda c: len(case_tensors(op, c[0], c[1], device, seed)))
    for name in op.tensors:
        with_it = [c for c in plain if name in case_tensors(op, *c, device, seed)
                   and not case_refusals(kernel, *c, device, seed)]
        yield from (partial(check_case, kernel, *cell, device, seed, ChangedInPart(name))
                    for cell in with_it[:1])
        matrices = (c for c in with_it if "stride" not in c[0]
                    and _is_another_by_columns(case_values_to_read(op, *c, device, seed)[name]))
        yield from (partial(check_case, kernel, *cell, device, seed, OtherLayout(name, layout))
                    for cell in islice(matrices, 1) for layout in BY_COLUMNS)
        vectors = (c for c in with_it if "stride" not in c[0] and (
            t := case_tensors(op, *c, device, seed)[name]).dim() and t.numel()
            and t.shape[-1] % VECTOR == 0)
        yield from (partial(check_case, kernel, *cell, device, seed, OtherLayout(name, "offset"))
                    for cell in islice(vectors, 1))


def _is_another_by_columns(t: Any) -> bool:
    if not isinstance(t, Tensor) or t.dim() < 2 or not t.numel():
        return False
    codes = t.contiguous().view(torch.uint8) if t.dtype.itemsize == 1 else t
    return not torch.equal(codes, codes.transpose(-1, -2).reshape(t.shape))
