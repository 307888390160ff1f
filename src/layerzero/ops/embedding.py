"""Token embeddings: the rows of a table by id.

`scale` multiplies the rows, in float32 or wider, rounded once. (Gemma multiplies by the square root
of the width after rounding that to the weights' dtype: pass the rounded number.) `padding_idx` is
looked up like any other id but passes no gradient; negative values count from the end. An id
outside the table is the caller's error. It is detected in every call on the CPU, and on a GPU when
a shape is first seen; later it triggers the device's own assertion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import at_least, dtypes
from .formulas.common import FLOATS
from .formulas.mistakes import replace_argument


def reference(ids: Tensor, weight: Tensor, padding_idx: int | None = None,
              scale: float = 1.0) -> Tensor:
    """Returns weight[ids] * scale, of shape (*ids.shape, width)."""
    rows = torch.index_select(weight, 0, ids.reshape(-1)).reshape(*ids.shape, weight.shape[1])
    if padding_idx is not None:
        padding = (ids == padding_idx % max(weight.shape[0], 1)).unsqueeze(-1)
        rows = torch.where(padding, rows.detach(), rows)
    if scale == 1.0:
        return rows
    return (rows.to(torch.promote_types(rows.dtype, torch.float32)) * scale).to(rows.dtype)


def meta(ids: Tensor, weight: Tensor, padding_idx: int | None = None, scale: float = 1.0) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def inputs(shape: tuple[int, ...] = (2, 9), vocab: int = 50, width: int = 32,
           ids_dtype: str = "int64", padding: int | None = None, scale: float = 1.0,
           stride: str = "", dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    weight = torch.randn((vocab, width * 2 if stride == "sparse" else width), generator=gen)
    weight = weight.to(device=device, dtype=dtype)
    ids = torch.randint(0, max(vocab, 1), shape, generator=gen)
    if padding is not None and ids.numel():
        ids.view(-1)[0] = padding % vocab
    ids = ids.to(device=device, dtype=getattr(torch, ids_dtype))
    return {"ids": ids.t().contiguous().t() if stride == "ids" else ids,
            "weight": weight[:, ::2] if stride == "sparse" else weight, "padding_idx": padding,
            "scale": scale}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"shape": ()}, {"shape": (1,)}, {"shape": (0,)}, {"shape": (0,), "vocab": 0},
    {"shape": (2, 3, 5)}, {"ids_dtype": "int32"}, {"padding": 3}, {"padding": -1},
    {"padding": 0, "ids_dtype": "int32"}, {"scale": 5.65685},
    {"scale": 0.0}, {"scale": 12.0, "padding": 1}, {"width": 1}, {"vocab": 1}, {"stride": "ids"},
    {"stride": "sparse"}, {"width": 129, "shape": (3, 11)},
)

# ids beyond 2^17 train too
GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    *(case for case in CASES if 0 not in case.get("shape", ())),
    {"vocab": 262_147, "width": 1, "shape": (3, 7)})


def extra_check(values: dict[str, Any], facts: Any) -> None:
    ids, vocab, padding = values["ids"], facts["vocab"], facts["padding_idx"]
    if padding is not None and not -vocab <= padding < vocab:
        raise InvalidCall.of("embedding", Reason(
            Code.VALUE_OUT_OF_RANGE, f"between {-vocab} and {vocab - 1}", padding, "padding_idx"))
    if (facts["tensor_kind"] == "plain" and ids.device.type != "meta" and not facts["graph"]
        and ids.numel()):
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= vocab:
            raise InvalidCall.of("embedding", Reason(
                Code.VALUE_OUT_OF_RANGE, f"between 0 and {vocab - 1}, the last row of weight",
                f"{low} to {high}", "ids"))

MISTAKES: tuple[Mistake, ...] = (replace_argument("scale", "the scale left out", "scale",
                                                        1.0),)

STRESS: tuple[dict[str, Any], ...] = (         # ids beyond 2^16, rows beyond 2^17
    {"vocab": 200_003, "width": 3, "shape": (9,), "ids_dtype": "int32"},
    {"vocab": 9, "width": 2, "shape": (131_077,)},
    # an id and a place together in more than 32 bits
    {"vocab": 151_936, "width": 1, "shape": (20_011,)})

OP = Op(
    name="embedding", family="embedding", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, gradient_cases=GRADIENT_CASES, stress=STRESS, mistakes=MISTAKES,
    batch_dims=("tokens",), shard_dims=("width",),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"ids": "*tokens", "weight": "vocab width"}, returns=("*tokens width",), main="weight",
    exact=("vocab", "width", "padding_idx", "scale"),
    # extra_check compares padding_idx with the table; the rule on it puts it into the key.
    requires=(dtypes(*FLOATS), dtypes("int32", "int64", of="ids.dtype"),
              at_least("padding_idx", -(1 << 62))),
    flops="tokens * width", bytes="2 * itemsize * tokens * width", differentiable=("weight",),
    extra_check=extra_check,
)
