"""Do results keep their bits, whatever is computed beside them?

A kernel that declares itself batch_invariant is called with a batch and with parts of it; one that
is tp_invariant with all heads or columns and with those of one rank of two, four, ... Each part of
the whole result must equal the result of the part alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine import hardware
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.errors import InvalidCall
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..kernel.contract import (
    CaseResult,
    call,
    case_refusals,
    case_values,
    refusals,
    results_of,
)

Part = tuple[int, int, int]                    # from and to, in units of so many parts of the whole
SIZES = ("batch", "tp")
SINGLE = 12                                    # parts that are computed alone, where there are many


def dims_of(op: Op, to: str) -> tuple[str, ...]:
    return (op.batch_dims if to == "batch" else op.shard_dims) or ()


def changed_bits(kernel: Kernel, values: Mapping[str, Any], to: str) -> Iterator[str]:
    """Yield how the result of a part differs from that part of the whole result; nothing if it
    never does, or if these values have no parts."""
    op = kernel.op
    dims, facts = dims_of(op, to), read(op, values)
    facts = {**hardware.probe(facts["device"]).facts(), **facts}
    if not dims or refusals(kernel, values) or not kernel.is_invariant(to, facts):
        return
    # what there is one of, such as a table of angles, all parts share
    sizes = [n for dim in dims if (n := _extent(op, values, dim)) is not None and n != 1]
    if (_extent(op, values, dims[0]) or 0) < 2 or min(sizes) < 2:
        return
    whole = results_of(call(kernel, values))
    for part in _parts(sizes):
        some = sliced(op, values, dims, part)
        try:
            if some is None or refusals(kernel, some):
                continue
        except InvalidCall:
            continue                           # the contract has no such part
        for i, (alone, together) in enumerate(zip(results_of(call(kernel, some)), whole)):
            tokens = op.result_patterns[values[op.variant] if op.variant else ""][i]
            want = _slice(together, tokens, dims, part)
            if alone.shape != want.shape or not torch.equal(_bits(alone), _bits(want)):
                unlike = int((alone != want).sum()) if alone.shape == want.shape else alone.numel()
                first, last, of = part
                yield (f"result {i}: {unlike} of {want.numel()} numbers change when only parts "
                       f"{first} to {last - 1} of {of} along {', '.join(dims)} are computed")


def check_invariance(kernel: Kernel, case: Mapping[str, Any], dtype: str, to: str,
                     device: str = "cpu", seed: int = 0) -> CaseResult:
    """Check one case for changed bits."""
    name = f"parts of a {'batch' if to == 'batch' else 'tensor-parallel layer'}"
    reasons = case_refusals(kernel, case, dtype, device, seed)
    if reasons:
        return CaseResult(kernel.id, case, dtype, "skipped", reasons, circumstance=name, seed=seed)
    values = case_values(kernel.op, case, dtype, device, seed)
    try:
        with torch.no_grad():
            problem = next(changed_bits(kernel, values, to), "")
    except FAULTS as e:
        problem = str(reason_of(e, classify(e)))
    return CaseResult(kernel.id, case, dtype, "failed" if problem else "passed", detail=problem,
                      circumstance=name, seed=seed, kinds=("invariance",) if problem else ())


def calls_of_parts(op: Op, values: Mapping[str, Any], to: str) -> Iterator[dict[str, Any]]:
    """Yields the calls of parts that are compared with the whole."""
    dims = dims_of(op, to)
    sizes = [n for dim in dims if (n := _extent(op, values, dim)) is not None and n != 1]
    for part in _parts(sizes) if sizes and min(sizes) > 1 else ():
        some = sliced(op, values, dims, part)
        if some is not None:
            yield some


def _parts(sizes: Sequence[int]) -> Iterator[Part]:
    """The first, the last and a middle one of as many parts as there can be, and both halves; of
    many parts some more: few sums round otherwise in another order."""
    most = next(n for n in range(min(sizes), 0, -1) if all(size % n == 0 for size in sizes))
    if most > 1:
        single = range(0, most, max(most // SINGLE, 1)) if most >= SINGLE else ()
        yield from dict.fromkeys(((0, 1, most), (most - 1, most, most),
                                  (most // 2, most // 2 + 1, most), (1, most, most),
                                  *((i, i + 1, most) for i in single)))
    if most > 3 and most % 2 == 0:
        yield from ((0, 1, 2), (1, 2, 2))


def sliced(op: Op, values: Mapping[str, Any], dims: Sequence[str],
           part: Part) -> dict[str, Any] | None:
    """Return the call of one part, None where a tensor has the part's sizes under another name."""
    patterns = op.patterns[values[op.variant] if op.variant else ""]
    out = dict(values)
    for name, tokens in patterns.items():
        if isinstance(values.get(name), Tensor):
            if any(t.startswith("~") and t[1:] in dims for t in tokens):
                return None                    # broadcast, perhaps
            out[name] = _slice(values[name], tokens, dims, part)
    return out


def _slice(t: Tensor, tokens: Sequence[str], dims: Sequence[str], part: Part) -> Tensor:
    first, last, of = part
    for token in tokens:
        if token.lstrip("*") in dims:
            axis = axis_of(t, tokens, token)
            if axis is not None and t.shape[axis] != 1:
                unit = t.shape[axis] // of
                t = t.narrow(axis, first * unit, (last - first) * unit)
    return t


def axis_of(t: Tensor, tokens: Sequence[str], token: str) -> int | None:
    """The dimension of a token; the first of several that a starred one stands for."""
    at = tokens.index(token)
    starred = next((i for i, name in enumerate(tokens) if name.startswith("*")), len(tokens))
    if at > starred:
        return t.dim() - len(tokens) + at
    return at if at < starred or t.dim() >= len(tokens) else None


def _extent(op: Op, values: Mapping[str, Any], dim: str) -> int | None:
    patterns = op.patterns[values[op.variant] if op.variant else ""]
    for name, tokens in patterns.items():
        t, token = values.get(name), next((k for k in tokens if k.lstrip("*") == dim), None)
        if isinstance(t, Tensor) and token is not None:
            axis = axis_of(t, tokens, token)
            return None if axis is None else int(t.shape[axis])
    return None


def _bits(t: Tensor) -> Tensor:
    """The bytes: NaN equals itself, and 0 is not -0."""
    return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
