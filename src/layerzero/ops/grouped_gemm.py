"""Grouped GEMM: the rows of `x` are in groups, and each group is multiplied by its own weight.

`x` (rows, k) holds the rows of group 0, then those of group 1, and so on; `weights` is (groups, k,
n). The groups are given by `group_sizes` (groups,), the number of rows of each, or by `offsets`
(groups,), where each ends, as in torch._grouped_mm. Rows past the last group give zeros. Offsets
that decrease, or exceed the number of rows, are the caller's error, reported where they can be read
without a device synchronisation.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake, Values
from ..spec.op import Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, absent, at_least, dtypes, one_of, present, when
from .formulas.common import FLOATS, READS_ON_HOST

INTEGERS = ("int32", "int64")


def reference(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *,
              offsets: Tensor | None = None) -> Tensor:
    """Returns x[rows of g] @ weights[g] for each group g."""
    out = x.new_zeros((x.shape[0], weights.shape[-1]))
    parts, start = [], 0
    for group, end in enumerate(read_group_ends(x, group_sizes, offsets)):
        parts.append(x[start:end] @ weights[group])
        start = end
    return torch.cat([*parts, out[start:]])


def read_group_ends(x: Tensor, group_sizes: Tensor | None, offsets: Tensor | None) -> list[int]:
    """Returns where each group ends, read on the host and checked."""
    boundaries = group_sizes if offsets is None else offsets
    assert boundaries is not None                   # extra_check requires one of them
    name = "group_sizes" if offsets is None else "offsets"
    ends: list[int] = boundaries.tolist()
    if offsets is None:
        ends = list(accumulate(ends))
    if any(b < a for a, b in zip((0, *ends), ends)) or (ends and ends[-1] > x.shape[0]):
        want = "never negative and at most" if offsets is None else "never falling and at most"
        total = "in sum " if offsets is None else ""
        raise InvalidCall.of("grouped_gemm", Reason(
            Code.VALUE_OUT_OF_RANGE, f"{want} {x.shape[0]} {total}(the rows of x)",
            str(boundaries.tolist())[:200], name))
    return ends


def meta(x: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[-1]))


def inputs(sizes: tuple[int, ...] = (5, 0, 9, 2), k: int = 32, n: int = 48, spare: int = 0,
           by: str = "sizes", stride: str = "", transposed: bool = False, index: str = "int32",
           dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    rows, groups = sum(sizes) + spare, len(sizes)
    x = torch.randn((rows, 2 * k if stride == "sparse" else k),
                    generator=gen).to(device=device, dtype=dtype)
    shape = (groups, n, k) if transposed else (groups, k, n)
    weights = (torch.randn(shape, generator=gen) / math.sqrt(max(k, 1))).to(device=device,
                                                                            dtype=dtype)
    counts = torch.tensor(sizes, dtype=getattr(torch, index))
    boundaries = ({"group_sizes": counts} if by == "sizes"
                  else {"offsets": counts.cumsum(0, dtype=counts.dtype)})
    return {"x": x[:, ::2] if stride == "sparse" else x, "weights": weights.mT if transposed
            else weights,
            **{name: t.to(device) for name, t in boundaries.items()}}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"by": "offsets"}, {"index": "int64"}, {"index": "int64", "by": "offsets"}, {"sizes": (7,)},
    {"sizes": (0, 0, 3)}, {"sizes": (0, 0)}, {"spare": 4}, {"sizes": (1,) * 8},
    {"sizes": (64, 64, 0, 64)}, {"sizes": (40, 1, 17), "k": 64, "n": 96}, {"k": 17, "n": 33},
    {"k": 40, "n": 24, "sizes": (3, 3)}, {"k": 1, "n": 1}, {"k": 0}, {"n": 0},
    {"stride": "sparse"}, {"transposed": True}, {"transposed": True, "k": 64, "sizes": (33, 2)},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    if (values["group_sizes"] is None) == (values["offsets"] is None):
        raise InvalidCall.of("grouped_gemm", Reason(
            Code.MISSING_METADATA, "give group_sizes or offsets, one of the two", None,
            "group_sizes"))


STRESS: tuple[dict[str, Any], ...] = (         # more than 256 groups, rows beyond 2^16
    {"sizes": (1, 2, 0) * 100, "k": 4, "n": 3}, {"sizes": (66_001, 3), "k": 2, "n": 2})

# Mistakes that a kernel for this op could make.

def _sizes_of(v: Values) -> Tensor:
    ends = v["offsets"]
    return v["group_sizes"] if ends is None else ends.diff(prepend=ends.new_zeros(1))


def _skip_empty(op: Any, v: Values) -> Values | None:
    """Groups without rows take no weight: those behind them have the weights of others."""
    sizes = _sizes_of(v)
    busy = sizes[sizes > 0]
    return None if len(busy) == len(sizes) else {
        **v, "offsets": None,
        "group_sizes": torch.cat([busy, sizes.new_zeros(len(sizes) - len(busy))])}


def _serve_the_rest(op: Any, v: Values) -> Values | None:
    """The last group has all rows behind it too."""
    sizes = _sizes_of(v).clone()
    rest = v["x"].shape[0] - int(sizes.sum())
    if not rest or not len(sizes):
        return None
    sizes[-1] += rest
    return {**v, "offsets": None, "group_sizes": sizes}


MISTAKES: tuple[Mistake, ...] = (
    Mistake("sizes", "groups without rows skipped with their weights kept", _skip_empty),
    Mistake("last rows", "the rows past the last group in it", _serve_the_rest))

OP = Op(
    name="grouped_gemm", family="grouped_gemm", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, mistakes=MISTAKES, stress=STRESS,
    reference_kernel=READS_ON_HOST,
    # In float32 torch's matmul is off by 1e-6 for some inputs; the eager error is tighter.
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "rows k", "weights": "groups k n", "group_sizes": "groups", "offsets": "groups"},
    words={"k": Wording("the width of x"), "n": Wording("the width of weights")},
    returns=("rows n",), same_dtype=("x", "weights"), exact=("k", "n", "groups"),
    requires=(
        dtypes(*FLOATS), at_least("groups", 1, Code.EMPTY_INPUT),
        one_of("group_sizes.dtype", None, *INTEGERS, code=Code.DTYPE_UNSUPPORTED),
        one_of("offsets.dtype", None, *INTEGERS, code=Code.DTYPE_UNSUPPORTED),
        when(present("offsets.dtype"), absent("group_sizes.dtype")),
    ),
    flops="2 * rows * k * n", bytes="itemsize * (rows * (k + n) + groups * k * n)",
    differentiable=("x", "weights"), autocast="lower", extra_check=extra_check,
)
