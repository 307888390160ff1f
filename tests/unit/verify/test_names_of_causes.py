"""Several causes per symptom: each kernel's fault is named rightly, or not at all.

`sure` ones have a rerun that proves them, and are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_diagnosis import Body, broken, rows_read_densely
from torch import Tensor

from layerzero.ops.alibi import OP as ALIBI
from layerzero.ops.attention import OP as ATTENTION
from layerzero.ops.cross_entropy import OP as CROSS_ENTROPY
from layerzero.ops.embedding import OP as EMBEDDING
from layerzero.ops.layer_norm import OP as LAYER_NORM
from layerzero.ops.linear import OP as LINEAR
from layerzero.ops.moe_gate import OP as MOE_GATE
from layerzero.ops.paged_attention import OP as PAGED_ATTENTION
from layerzero.ops.quantize import OP as QUANTIZE
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.spec.op import Op
from layerzero.verify.certification.circumstances.call_circumstances import (
    ChangedInPlace,
    InferenceMode,
    OtherDefaultDtype,
    OtherThreadCount,
    ReusedMemory,
)
from layerzero.verify.certification.circumstances.grad_circumstances import (
    GivenParameters,
    GradMode,
)
from layerzero.verify.certification.circumstances.row_circumstances import OtherLayout
from layerzero.verify.certification.threads import check_threads
from layerzero.verify.diagnosis.diagnose import diagnose
from layerzero.verify.diagnosis.reruns.value_reruns import explain_by_pages
from layerzero.verify.kernel.contract import Circumstance, check_case

Values = dict[str, Any]
Case = dict[str, Any]
FLOAT32 = ("float32",)


@dataclass(frozen=True)
class Cause:
    name: str
    op: Op
    body: Callable[[], Body]                   # makes one with no memory of earlier calls
    accepts: str                               # classes, with commas between them
    cases: tuple[Case, ...] = ({},)
    circumstances: tuple[Circumstance, ...] = ()
    dtypes: tuple[str, ...] = FLOAT32
    sure: bool = False
    threads: bool = False

    def results(self, kernel: Any) -> list[Any]:
        results = [check_case(kernel, case, dtype) for dtype in self.dtypes for case in self.cases]
        results += [check_case(kernel, self.cases[0], self.dtypes[0], circumstance=c)
                    for c in self.circumstances]
        return results + ([check_threads(kernel, {}, "float32")] if self.threads else [])


def always(body: Body) -> Callable[[], Body]:
    return lambda: body


def changed(op: Op, when: Callable[[Values], Any], change: Callable[[Any, Values], Any]) -> Any:
    """A kernel whose result is changed for some calls."""
    def body(v: Values) -> Any:
        out = op.reference(**v)
        return change(out, v) if when(v) else out

    return always(body)


def rms(x: Tensor, v: Values, eps: float | None = None) -> Tensor:
    return RMS_NORM.reference(**{**v, "x": x, "eps": v["eps"] if eps is None else eps})


def widths(*sizes: int) -> tuple[Case, ...]:
    return tuple({"rows": (3,), "hidden": n} for n in sizes)


# Wrong at some sizes.

def tail_of_eight(v: Values) -> Any:
    out = RMS_NORM.reference(**v)
    out[..., out.shape[-1] // 8 * 8:] *= 3
    return out


def loud_numbers_clipped(v: Values) -> Any:
    return rms(v["x"].clamp(-3.4, 3.4), v)


def positions_in_the_dtype(v: Values) -> Any:
    slopes, k = v["slopes"], torch.arange(v["seq_k"]).to(v["slopes"].dtype)
    return -slopes[:, None, None] * (k[None] - k[v["seq_k"] - v["seq_q"]:, None]).abs()


def ids_taken_for_sorted(v: Values) -> Any:
    ids, weight = v["ids"], v["weight"]
    return EMBEDDING.reference(**{**v, "ids": ids.cummax(-1).values if ids.dim() else ids,
                                  "weight": weight})


def weight_kept_by_address() -> Body:
    kept: dict[Any, Tensor] = {}

    def body(v: Values) -> Any:
        w = v["weight"]
        if w is None:
            return RMS_NORM.reference(**v)
        return RMS_NORM.reference(**{**v, "weight": kept.setdefault((w.data_ptr(), w.shape),
                                                                     w.clone())})

    return body


def first_wide_weight_kept() -> Body:
    kept: dict[Any, Tensor] = {}

    def body(v: Values) -> Any:
        w = v["weight"]
        wide = w is not None and w.shape[0] > 512
        return RMS_NORM.reference(**({**v, "weight": kept.setdefault(w.shape, w.clone())} if wide
                                     else v))

    return body


def logits_without_a_chunk(v: Values) -> Any:
    x = v["logits"].clone()
    x[..., 1024:2048] = -torch.inf
    target = v["logits"].gather(-1, v["targets"].clamp(min=0).long()[..., None])
    return CROSS_ENTROPY.reference(**{**v, "logits": x.scatter(
        -1, v["targets"].clamp(min=0).long()[..., None], target)})


# Small errors.

def mean_over_rounded_width(v: Values) -> Any:
    n = v["x"].shape[-1]
    share = n / (n + -n % 8)
    x = v["x"].double()
    mean = x.mean(-1, keepdim=True) * share
    out = (x - mean) * ((x - mean).square().mean(-1, keepdim=True) + v["eps"]).rsqrt()
    out = out if v["weight"] is None else out * v["weight"]
    return (out if v["bias"] is None else out + v["bias"]).to(v["x"].dtype)


def last_key_lost(v: Values) -> Any:
    k, x = v["key"], v["value"]
    return ATTENTION.reference(**{**v, "key": k[:, :, :-1], "value": x[:, :, :-1]})


def in_bfloat16(op: Op) -> Callable[[], Body]:
    def body(v: Values) -> Any:
        dtype = v[op.main_tensor].dtype
        return op.reference(**{n: t.bfloat16() if isinstance(t, Tensor) and t.is_floating_point()
                               else t for n, t in v.items()}).to(dtype)

    return always(body)


def sums_in_bfloat16(v: Values) -> Any:
    x, w = v["x"], v["weight"]
    total = torch.zeros(*x.shape[:-1], w.shape[0], dtype=torch.bfloat16)
    for i in range(0, x.shape[-1], 8):
        total = total + (x[..., i:i + 8].float() @ w[:, i:i + 8].float().T).bfloat16()
    out = total.float() + (0 if v["bias"] is None else v["bias"].float())
    return out.to(x.dtype)


# One circumstance alone.

def without(op: Op, name: str, when: Callable[[Values], Any]) -> Callable[[], Body]:
    return always(lambda v: op.reference(**({**v, name: None} if when(v) else v)))


def weight_in_default_dtype(v: Values) -> Any:
    w = v["weight"]
    return RMS_NORM.reference(**{**v, "weight": w if w is None else torch.tensor(
        w.tolist()).to(w.dtype)})


def kept_by_shape() -> Body:
    kept: dict[Any, Any] = {}

    def body(v: Values) -> Any:
        return kept.setdefault((v["x"].shape, v["x"].dtype), RMS_NORM.reference(**v)).clone()

    return body


def one_scratch_for_all() -> Body:
    scratch: dict[Any, Tensor] = {}

    def body(v: Values) -> Any:
        x = v["x"]
        buffer = scratch.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)
        time.sleep(0.002)
        return RMS_NORM.reference(**{**v, "x": buffer.clone()})

    return body


def dense_weight(v: Values) -> Any:
    return LINEAR.reference(**{**v, "weight": rows_read_densely(v["weight"])})


# Numbers that are not finite, equal numbers.

def softmax_without_the_maximum(v: Values) -> Any:
    x, t = v["logits"].float(), v["targets"].long()
    loss = x.exp().sum(-1).log() - x.gather(-1, t.clamp(min=0)[..., None])[..., 0]
    kept = t != v["ignore_index"]
    return (loss * kept).sum() / kept.sum()


def infinities_taken_for_zeros(v: Values) -> Any:
    return QUANTIZE.reference(**{**v, "x": v["x"].nan_to_num(0.0, 0.0, 0.0)})


def higher_index_first(v: Values) -> Any:
    n = v["logits"].shape[-1]
    ids, weights = MOE_GATE.reference(**{**v, "logits": v["logits"].flip(-1)})
    return ((n - 1 - ids).to(ids.dtype), weights)


def half_away_from_zero(v: Values) -> Any:
    codes, scales, *others = QUANTIZE.reference(**v)
    q = v["x"].float() / scales.float()
    rounded = torch.where(q.abs() % 1 == 0.5, q + 0.5 * q.sign(), q.round())
    return (rounded.clamp(-127, 127).to(codes.dtype), scales, *others)


def by_reciprocal(v: Values) -> Any:
    codes, scales, *others = QUANTIZE.reference(**v)
    return ((v["x"].float() * (1 / scales.float())).round().clamp(-127, 127).to(codes.dtype),
            scales, *others)


# Other rows, other pages.

def one_scale_for_all_rows(v: Values) -> Any:
    codes, scales, *others = QUANTIZE.reference(**v)
    scales = scales.amax().expand_as(scales).contiguous()
    return ((v["x"].float() / scales.float()).round().clamp(-127, 127).to(codes.dtype), scales,
            *others)


def norm_of_the_next_row(v: Values) -> Any:
    x = v["x"].reshape(-1, v["x"].shape[-1])
    norm = (x.square().mean(-1, keepdim=True) + v["eps"]).sqrt()
    return (RMS_NORM.reference(**v).reshape(x.shape) * norm / norm.roll(1, 0)).reshape(v["x"].shape)


def last_page_never_read(v: Values) -> Any:
    lens, page = v["context_lens"], v["key_cache"].shape[1]
    fewer = torch.where(lens > 2 * page, (lens - 1) // page * page, lens).to(lens.dtype)
    return PAGED_ATTENTION.reference(**{**v, "context_lens": fewer})


def pages_in_order(v: Values) -> Any:
    table = v["block_table"]
    return PAGED_ATTENTION.reference(**{**v, "block_table": torch.where(
        table < 0, table, table.flip(0).clamp(min=0))})


def raises_where_not_contiguous(v: Values) -> Any:
    return RMS_NORM.reference(**{**v, "x": v["x"].view(-1, v["x"].shape[-1])}).view(v["x"].shape)


CAUSES = (
    Cause("columns behind the last eight", RMS_NORM, always(tail_of_eight), "sizes, last rows",
          widths(64, 61, 77), sure=True),
    Cause("a second chunk is never read", CROSS_ENTROPY, always(logits_without_a_chunk),
          "sizes, mask", ({}, {"vocab": 4000, "rows": (3,)}, {"vocab": 5000, "rows": (3,)}),
          sure=True),
    Cause("wide rows by another formula", RMS_NORM,
          changed(RMS_NORM, lambda v: v["x"].shape[-1] > 1000, lambda out, v: out * 1.5),
          "sizes, scale", widths(64, 100, 2048, 4100), sure=True),
    Cause("numbers beyond a threshold", RMS_NORM, always(loud_numbers_clipped),
          "overflow, precision", widths(16, 64, 6000, 9000)),
    Cause("integers that 16 bits do not hold", ALIBI, always(positions_in_the_dtype),
          "precision, dtype, overflow",
          ({"heads": 2, "sq": 1, "sk": 3000, "align": "bottom_right"},),
          dtypes=("float32", "float16")),
    Cause("ids that are not sorted", EMBEDDING, always(ids_taken_for_sorted), "convention",
          ({"shape": (1,)}, {"shape": (2, 9)}, {"shape": (3, 40)}), sure=True),
    Cause("a weight of an earlier call, of wide rows", RMS_NORM, first_wide_weight_kept,
          "state, stale cache", (*widths(64, 100, 1024, 1024), {"rows": (5,), "hidden": 1024}),
          (ChangedInPlace(),), sure=True),
    Cause("a weight kept by its address", RMS_NORM, weight_kept_by_address, "state, stale cache",
          circumstances=(ChangedInPlace(), ReusedMemory(), InferenceMode()), sure=True),
    Cause("a mean over the rounded width", LAYER_NORM, always(mean_over_rounded_width),
          "sizes, scale, last rows", widths(4096, 4091, 2043)),
    Cause("the last of many keys", ATTENTION, always(last_key_lost), "mask, last rows, sizes",
          tuple({"b": 1, "sq": 3, "sk": n, "hq": 2, "hkv": 2, "d": 8} for n in (900, 700))),
    Cause("another epsilon", RMS_NORM, always(lambda v: rms(v["x"], v, 2e-5)),
          "convention, scale", widths(64, 500)),
    Cause("one factor", LINEAR, changed(LINEAR, lambda v: True, lambda out, v: out * 1.001),
          "scale", ({}, {"n": 33})),
    Cause("computed in 16 bits", RMS_NORM, in_bfloat16(RMS_NORM), "precision, dtype",
          widths(64, 500), sure=True),
    Cause("long sums in 16 bits", LINEAR, always(sums_in_bfloat16), "precision, dtype",
          ({"k": 512, "n": 8}, {"k": 700, "n": 8}), dtypes=("float32", "bfloat16")),
    Cause("no bias where parameters record nothing", LAYER_NORM,
          without(LAYER_NORM, "bias", lambda v: v["x"].requires_grad), "mode, gradient",
          circumstances=(GradMode(), GivenParameters()), sure=True),
    Cause("no bias in grad mode", LAYER_NORM,
          without(LAYER_NORM, "bias", lambda v: torch.is_grad_enabled()), "mode",
          circumstances=(GradMode(), InferenceMode()), sure=True),
    Cause("no weight in inference mode", RMS_NORM,
          without(RMS_NORM, "weight", lambda v: torch.is_inference_mode_enabled()), "mode",
          circumstances=(GradMode(), InferenceMode()), sure=True),
    Cause("a constant of the default dtype", RMS_NORM, always(weight_in_default_dtype), "dtype",
          circumstances=(OtherDefaultDtype(), GradMode()), sure=True),
    Cause("parts of another number of threads", RMS_NORM,
          changed(RMS_NORM, lambda v: torch.get_num_threads() == 3, lambda out, v: out * 2),
          "threads", circumstances=(OtherThreadCount(3), GradMode()), sure=True),
    Cause("results kept by their shape, seen in threads", RMS_NORM, kept_by_shape,
          "state, stale cache", threads=True, sure=True),
    Cause("scratch memory of all threads", RMS_NORM, one_scratch_for_all, "threads",
          threads=True, sure=True),
    Cause("a weight read as if it were contiguous", LINEAR, always(dense_weight), "layout",
          circumstances=(OtherLayout("weight", "transposed"), GradMode()), sure=True),
    Cause("exponentials of large logits", CROSS_ENTROPY, always(softmax_without_the_maximum),
          "overflow, non-finite values", ({}, {"scale": 300.0, "rows": (5,)}), sure=True),
    Cause("infinities in place of which zeros are read", QUANTIZE,
          always(infinities_taken_for_zeros), "non-finite values",
          ({"format": "int8"}, {"format": "int8", "special": "broken"}), sure=True),
    Cause("of equal scores the last", MOE_GATE, always(higher_index_first), "ties",
          ({}, {"special": "ties"}, {"special": "equal"}, {"special": "extreme"}), sure=True),
    Cause("halves away from zero", QUANTIZE, always(half_away_from_zero), "precision",
          ({"format": "int8"}, {"format": "int8", "special": "halves"})),
    Cause("quotients by a rounded reciprocal", QUANTIZE, always(by_reciprocal), "precision",
          ({"rows": (2,)}, {"rows": (512,)}), dtypes=("bfloat16",)),
    Cause("the scale of all rows", QUANTIZE, always(one_scale_for_all_rows),
          "invariance, scale, convention", ({"rows": (5,)}, {"rows": (9,)})),
    Cause("the norm of the next row", RMS_NORM, always(norm_of_the_next_row),
          "convention, layout, scale", ({"rows": (5,)}, {"rows": (9,)})),
    Cause("views of what is not contiguous", RMS_NORM, always(raises_where_not_contiguous),
          "layout, fault", ({"rows": (4, 3)},),
          circumstances=(OtherLayout("x", "transposed"),), sure=True),
    Cause("more queries than keys", ATTENTION,
          changed(ATTENTION, lambda v: v["query"].shape[2] > v["key"].shape[2],
                  lambda out, v: out + 0.5), "alignment, mask",
          ({"sq": 5, "sk": 9, "b": 1, "d": 8}, {"sq": 17, "sk": 9, "b": 1, "d": 8})),
)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda c: c.name)
def test_a_name_is_right_or_there_is_none(cause: Cause) -> None:
    kernel = broken(cause.op, cause.body())
    results = cause.results(kernel)
    assert any(r.status == "failed" for r in results)
    found = diagnose(kernel, results)
    accepted = cause.accepts.split(", ") + ([] if cause.sure else ["unknown"])
    assert found is not None and found.kind in accepted, f"{found}"


@pytest.mark.parametrize(("body", "kind"), [(last_page_never_read, None),
                                            (pages_in_order, "stale page")])
def test_one_who_follows_the_table_reads_no_other_pages(body: Body, kind: str | None) -> None:
    kernel = broken(PAGED_ATTENTION, body)
    # all pages of a sequence are full: where they are alike, one more or less is no matter
    results = [check_case(kernel, {"context": (64, 48), "lengths_q": (1, 1), "d": 8}, "float32")]
    assert results[0].status == "failed"
    found = explain_by_pages(kernel, results, "cpu")
    assert (found and found[0]) == kind
