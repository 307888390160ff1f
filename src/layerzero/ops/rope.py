"""Rotary position embedding of queries and keys. Computed in float32 or wider; results have the
inputs' dtypes.

- `style` says which elements form a pair. It has no default, as weights fit one of the two; see
  formulas/rope.py.
- cos and sin have rotary_dim / 2 columns, one for each pair. They have one row for each token,
  (seq, half) or (batch, seq, half); with `position_ids` they are tables, (max_positions, half),
  that the ids index.
- With `rotary_dim` only the first rotary_dim elements of each head are rotated, the rest is copied.
- layout="bhsd" is (batch, heads, seq, head_dim), "bshd" is (batch, seq, heads, head_dim). Without
  a batch they are (heads, seq, head_dim) and packed tokens, (tokens, heads, head_dim).
- An id outside the table is the caller's error. It is detected in every call on the CPU, and on a
  GPU when a shape is first seen; later it triggers the device's own assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake, Values
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, at_least, dtypes, one_of
from .formulas.common import FLOATS
from .formulas.mistakes import change_results, replace_argument
from .formulas.rope import gather_angles, rotate


def reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
    style: Literal["rotate_half", "interleaved"], layout: Literal["bhsd", "bshd"] = "bhsd",
    rotary_dim: int | None = None,
) -> Any:
    """Returns (q, k) with each pair rotated by its token's angle; q alone if k is None.

    cos, sin: (seq, rotary_dim / 2), or with a leading batch, or tables that position_ids (batch,
    seq) index.
    style: "rotate_half" pairs i with i + rotary_dim / 2, "interleaved" pairs 2i with 2i + 1.
    rotary_dim: how many elements of a head are rotated, by default all.
    """
    cos, sin = (gather_angles(t, position_ids, layout, q.dtype) for t in (cos, sin))
    rotated_q = rotate(q, cos, sin, style)
    return rotated_q if k is None else (rotated_q, rotate(k, cos, sin, style))


def meta(q: Tensor, k: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    rotated_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    return (rotated_q if k is None
            else (rotated_q, torch.empty_like(k, memory_format=torch.contiguous_format)))


def inputs(
    b: int = 2, hq: int = 4, hkv: int = 2, s: int = 9, d: int = 64, rotary: int = 0,
    style: str = "rotate_half", layout: str = "bhsd", ids: str = "", batched: bool = False,
    packed: bool = False, alone: bool = False, stride: str = "", table_dtype: str = "float32",
    far: bool = False, long_table: bool = False, one_row: bool = False, stated: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`ids`: "int64", "int32", "shared" or, without a batch, "flat" ids into a table; `batched`:
    cos and sin per row, `one_row`: with a batch of one. `stated`: rotary_dim is given though it is
    the whole head. `stride`: "fused" queries and keys are parts of one projection."""
    gen = torch.Generator("cpu").manual_seed(seed)
    fused = (torch.randn((b, s, hq + 2 * hkv, d), generator=gen).to(device=device, dtype=dtype)
             if stride == "fused" else None)

    def tensor(heads: int, first: int = 0) -> Tensor:
        shape = (b, heads, s, d) if layout == "bhsd" else (b, s, heads, d)
        if fused is not None:
            x = fused[:, :, first:first + heads]
            x = x if layout == "bshd" else x.transpose(1, 2)
            return x[0] if packed else x
        if stride == "transposed":
            x = torch.randn((b, shape[2], shape[1], d), generator=gen).transpose(1, 2)
        elif stride == "padded":               # an odd row: pairs do not stay aligned
            x = torch.randn((*shape[:-1], d + 3), generator=gen)[..., 1:d + 1]
        elif stride == "sparse":
            x = torch.randn((*shape[:-1], d * 2), generator=gen)[..., ::2]
        else:
            x = torch.randn(shape, generator=gen)
        x = x.to(device=device, dtype=dtype)
        return x[0] if packed else x

    rotary = rotary or d
    rows = 70_001 if long_table and ids else s + 13 if ids else s
    sequences = b if batched else 1
    positions = (torch.randint(0, 100_000, (sequences, rows, 1), generator=gen) if far
                 else torch.arange(rows)[:, None] + torch.arange(sequences)[:, None, None])
    angles = positions / 10000.0 ** (torch.arange(0, rotary, 2) / rotary)
    angles = angles if batched else angles[:1] if one_row and not ids else angles[0]
    angle_dtype = dtype if table_dtype == "like" else getattr(torch, table_dtype)
    cos, sin = (t.to(device=device, dtype=angle_dtype) for t in (angles.cos(), angles.sin()))
    shape = {"": None, "flat": (s,), "shared": (s,) if packed else (1, s)}.get(
        ids, (s,) if packed else (b, s))
    position_ids = None
    if shape is not None:
        position_ids = torch.randint(0, rows, shape, generator=gen).to(
            device=device, dtype=torch.int32 if ids == "int32" else torch.int64)
        if position_ids.numel():
            position_ids[..., -1] = rows - 1   # the end of the table, however long
    return {"q": tensor(hq), "k": None if alone else tensor(hkv, hq), "cos": cos, "sin": sin,
            "position_ids": position_ids, "style": style, "layout": layout, "rotary_dim": None
            if rotary == d and not stated else rotary}


_PLAIN: tuple[dict[str, Any], ...] = (
    {}, {"alone": True}, {"s": 1}, {"s": 0}, {"b": 0}, {"b": 1, "hq": 1, "hkv": 1, "s": 1, "d": 2},
    {"d": 6, "s": 33}, {"rotary": 16}, {"rotary": 62, "layout": "bshd"}, {"layout": "bshd"},
    {"layout": "bshd", "ids": "int64"}, {"packed": True, "layout": "bshd", "ids": "int64", "d": 128,
                                         "rotary": 64}, {"packed": True},
    {"ids": "int64"}, {"ids": "int32"}, {"ids": "shared"}, {"ids": "int64", "s": 0},
    {"batched": True}, {"batched": True, "layout": "bshd", "alone": True}, {"table_dtype": "like"},
    {"table_dtype": "like", "ids": "int64"}, {"stride": "transposed"}, {"stride": "padded"},
    {"stride": "sparse"}, {"stride": "fused"}, {"stride": "fused", "layout": "bshd"},
    {"far": True, "s": 40}, {"one_row": True, "b": 3},
    {"ids": "flat", "b": 3}, {"stated": True},
)
CASES: tuple[dict[str, Any], ...] = (*_PLAIN,
                                     *({**case, "style": "interleaved"} for case in _PLAIN))


def extra_check(values: dict[str, Any], facts: Any) -> None:
    def wrong(name: str, want: str, got: Any, code: Code = Code.DIM_MISMATCH) -> InvalidCall:
        return InvalidCall.of("rope", Reason(code, want, got, name))

    head_dim, half, rotary_dim = facts["head_dim"], facts["half"], facts["rotary_dim"]
    if rotary_dim is not None and (rotary_dim > head_dim or rotary_dim % 2):
        raise wrong("rotary_dim", f"even and at most {head_dim}, the head_dim", rotary_dim,
                    Code.VALUE_OUT_OF_RANGE)
    if 2 * half != (head_dim if rotary_dim is None else rotary_dim):
        want = f"{(head_dim if rotary_dim is None else rotary_dim) // 2}, one for each pair"
        hint = ""
        if rotary_dim is None and 2 * half < head_dim:
            hint = "; to rotate only a part of each head, state rotary_dim"
        elif 2 * half > head_dim:
            hint = "; of tables whose columns come twice pass the first half"
        raise wrong("cos.shape[-1]", want + hint, half)
    batch_shape = tuple(values["q"].shape[:-3])
    ids = values["position_ids"]
    if ids is None:
        if facts["positions"] != facts["seq"]:
            raise wrong("cos.shape[-2]",
                        f"{facts['seq']}, one row for each token; to use a table pass position_ids",
                        facts["positions"])
        _fits_batch("cos", tuple(values["cos"].shape[:-2]), batch_shape)
        return
    if facts["cos.ndim"] != 2:
        raise wrong("cos", "a table (max_positions, half) where position_ids are given",
                    str(tuple(values["cos"].shape)))
    _fits_batch("position_ids", tuple(ids.shape[:-1]), batch_shape)
    if (facts["tensor_kind"] == "plain" and ids.device.type != "meta" and not facts["graph"]
        and ids.numel()):
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= facts["positions"]:
            raise wrong("position_ids",
                        f"between 0 and {facts['positions'] - 1}, the last row of cos",
                        f"{low} to {high}", Code.VALUE_OUT_OF_RANGE)


def _fits_batch(name: str, lead: tuple[int, ...], batch_shape: tuple[int, ...]) -> None:
    if lead not in ((), batch_shape) and not (batch_shape and lead == (1,)):
        want = (f"{batch_shape} like q's batch, (1,) or none" if batch_shape
                else "empty, as q has no batch")
        raise InvalidCall.of("rope",
                             Reason(Code.DIM_MISMATCH, want, str(lead), f"{name}'s leading shape"))

STRESS: tuple[dict[str, Any], ...] = (
    {"far": True, "s": 3, "ids": "int64"},
    {"b": 3, "ids": "int64", "batched": False, "layout": "bshd", "hkv": 1},
    {"b": 5, "s": 4097, "hq": 1, "hkv": 1, "d": 2},
    {"b": 1, "s": 131_077, "hq": 1, "hkv": 1, "d": 2},
    {"b": 2_105, "s": 1, "hq": 32, "hkv": 1, "d": 4},          # more heads of all than 2^16
    # positions beyond 2^12 and 2^16, of a table as models have it
    *({"long_table": True, "ids": "int64", "s": 5, "d": 8, "hq": 2, "hkv": 1, "layout": layout,
       "style": style} for layout, style in (("bhsd", "rotate_half"), ("bshd", "interleaved"))))


# Mistakes that a kernel for this op could make.

def _no_ids(op: Any, v: Values) -> Values | None:
    if v["position_ids"] is None:
        return None
    return {**v, "position_ids": torch.arange(v["position_ids"].shape[-1],
                                              device=v["q"].device).expand(
        v["position_ids"].shape)}

def _other_style(op: Any, v: Values) -> Values:
    return {**v, "style": "interleaved" if v["style"] == "rotate_half" else "rotate_half"}


def _without_rest(of_q: bool, of_k: bool) -> Callable[[Values, tuple[Any, ...]], Any]:
    """What is not rotated left out, not copied."""
    def change(v: Values, out: tuple[Any, ...]) -> Any:
        rotated = v["rotary_dim"]
        return None if rotated is None else tuple(
            torch.cat((t[..., :rotated], torch.zeros_like(t[..., rotated:])), -1) if cut else t
            for t, cut in zip(out, (of_q, of_k)))

    return change


MISTAKES: tuple[Mistake, ...] = (
    Mistake("convention", "the other convention of pairs (rotate_half or interleaved)",
               _other_style),
    replace_argument("convention", "the rotation in the other direction", "sin",
                     lambda v: -v["sin"]),
    Mistake("alignment", "position_ids ignored", _no_ids),
    replace_argument("alignment", "the positions of the first row for all", "position_ids",
                     lambda v: v["position_ids"][:1].expand_as(v["position_ids"])
                     if v["position_ids"].dim() == 2 else v["position_ids"]),
    change_results("convention", "the keys left as they are", lambda v, out: (out[0], v["k"])
                   if len(out) > 1 else None),
    *(change_results("convention", f"zeros behind rotary_dim in {words}", _without_rest(*which))
      for words, which in (("all heads", (True, True)), ("the queries", (True, False)),
                           ("the keys", (False, True)))))

OP = Op(
    name="rope", family="position", reference=reference, meta=meta, inputs=inputs, cases=CASES,
    stress=STRESS, mistakes=MISTAKES,
    batch_dims=("batch", "cos_batch", "ids_batch"), shard_dims=("heads", "kv_heads"),
    tolerance=Tolerance({"float16": (1e-4, 1e-4), "bfloat16": (1e-3, 1e-3), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    variant="layout",
    words={"half": Wording("the width of cos and sin")},
    shapes={
        "bhsd": {"q": "*batch heads seq head_dim", "k": "*batch kv_heads seq head_dim",
                 "cos": "*cos_batch positions half", "sin": "*cos_batch positions half",
                 "position_ids": "*ids_batch seq"},
        "bshd": {"q": "*batch seq heads head_dim", "k": "*batch seq kv_heads head_dim",
                 "cos": "*cos_batch positions half", "sin": "*cos_batch positions half",
                 "position_ids": "*ids_batch seq"},
    },
    returns={"bhsd": ("*batch heads seq head_dim", "*batch kv_heads seq head_dim"),
             "bshd": ("*batch seq heads head_dim", "*batch seq kv_heads head_dim")},
    same_dtype=("q", "k"), exact=("head_dim", "half", "rotary_dim"),
    ranges={"rotary_dim": INT32},
    requires=(
        dtypes(*FLOATS), one_of("q.ndim", 3, 4, code=Code.WRONG_NDIM),
        one_of("cos.ndim", 2, 3, code=Code.WRONG_NDIM),
        one_of("position_ids.ndim", None, 1, 2, code=Code.WRONG_NDIM),
        dtypes(*FLOATS, of="cos.dtype"), dtypes(*FLOATS, of="sin.dtype"),
        one_of("position_ids.dtype", None, "int32", "int64", code=Code.DTYPE_UNSUPPORTED),
        at_least("half", 1, Code.VALUE_OUT_OF_RANGE),
        at_least("rotary_dim", 2, Code.VALUE_OUT_OF_RANGE),
    ),
    # Counts q alone: k may be absent, and has fewer heads otherwise.
    flops="6 * batch * heads * seq * half", bytes="2 * itemsize * batch * heads * seq * head_dim",
    differentiable=("q", "k", "cos", "sin"), extra_check=extra_check, outputs="Tensor[]",
)
