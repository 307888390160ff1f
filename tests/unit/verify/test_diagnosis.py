"""A class is named after an experiment that could have refuted it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.ops.embedding import OP as EMBEDDING
from layerzero.ops.gated_delta_rule import OP as DELTA
from layerzero.ops.mla_paged_attention import OP as MLA
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.ops.rope import OP as ROPE
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op
from layerzero.verify.certification.circumstances.call_circumstances import FarApart, UnusualValues
from layerzero.verify.certification.circumstances.row_circumstances import Shifted
from layerzero.verify.diagnosis.diagnose import Diagnosis, diagnose
from layerzero.verify.kernel.contract import Circumstance, check_case

Body = Callable[[dict[str, Any]], Any]


def broken(op: Op, body: Body) -> Kernel:
    signature = inspect.signature(op.reference)

    def load():
        def run(*args, **options):
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            return body(dict(bound.arguments))

        run.__signature__ = signature          # type: ignore[attr-defined]
        return run

    return Kernel("fake.broken", op, load)


def named(op: Op, body: Body, *cases: dict[str, Any], dtype: str = "float32",
          circumstances: tuple[Circumstance, ...] = ()) -> Diagnosis:
    kernel = broken(op, body)
    results = [check_case(kernel, case, dtype) for case in cases]
    results += [check_case(kernel, {}, dtype, circumstance=c) for c in circumstances]
    diagnosis = diagnose(kernel, results)
    assert diagnosis is not None
    return diagnosis


def delta_with_twice_the_decay(v: dict[str, Any]) -> Any:
    g = v["g"].clone()
    g[:, 128::128] *= 2
    return DELTA.reference(**{**v, "g": g})


def test_what_is_wrong_from_a_row_on_is_not_in_the_last_rows() -> None:
    assert named(DELTA, delta_with_twice_the_decay, {}, {"s": 130},
                 {"s": 140}).kind != "last rows"


@pytest.mark.parametrize("tile", [4, 64])
def test_rows_that_a_tile_leaves_over_are_the_last_rows(tile: int) -> None:
    def body(v: dict[str, Any]) -> Any:
        out = RMS_NORM.reference(**v)
        out[out.shape[0] // tile * tile:] *= 3
        return out

    assert named(RMS_NORM, body, *({"rows": (tile * 2 + n,)} for n in (1, 2))).kind == "last rows"


def test_nan_alone_is_no_matter_of_pages() -> None:
    def body(v: dict[str, Any]) -> Any:
        results = MLA.reference(**v)
        if not v["return_lse"]:
            return results
        return results[0], results[1].masked_fill(results[1] == -torch.inf, torch.nan)

    cases = [case for case in MLA.cases if case.get("lse")][:6]
    assert named(MLA, body, *(cases or MLA.cases)).kind == "non-finite values"


def test_a_factor_is_a_scale() -> None:
    found = named(RMS_NORM, lambda v: RMS_NORM.reference(**v) * 1.1, {}, {"hidden": 17})
    assert found.kind == "scale" and "1.1 times" in found.says


def test_an_argument_that_is_ignored_is_named_by_what_the_formula_gives_without_it() -> None:
    found = named(RMS_NORM, lambda v: RMS_NORM.reference(**{**v, "offset": 0.0}), {},
                  {"offset": 1.0})
    assert found.kind in ("convention", "scale") and "gives what the reference gives" in found.says


def test_rows_read_densely_are_a_matter_of_layout_whatever_their_distance() -> None:
    def body(v: dict[str, Any]) -> Any:
        ids = v["ids"]
        if ids.dim() > 1 and not ids.is_contiguous():
            ids = ids[:1].expand_as(ids)
        return EMBEDDING.reference(**{**v, "ids": ids})

    assert named(EMBEDDING, body, {}, circumstances=(FarApart("ids"),)).kind == "layout"


def test_a_few_wrong_numbers_are_no_rounding() -> None:
    def body(v: dict[str, Any]) -> Any:
        q, *others = ROPE.reference(**v)
        q = q.clone()
        q.view(-1)[::97] += 0.02
        return q, *others

    assert named(ROPE, body, {}, {"s": 9}).kind != "precision"


def rows_read_densely(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() else torch.as_strided(t, t.shape, torch.empty(t.shape).stride())


def test_columns_of_a_wider_table_are_a_matter_of_layout() -> None:
    def body(v: dict[str, Any]) -> Any:
        return EMBEDDING.reference(**{**v, "weight": rows_read_densely(v["weight"])})

    found = named(EMBEDDING, body, {}, circumstances=(Shifted("weight", first=False),))
    assert found.kind == "layout"


def test_wrong_numbers_outrank_the_memory_that_they_share() -> None:
    def body(v: dict[str, Any]) -> Any:
        x = v["x"]
        return RMS_NORM.reference(**v) if x.is_contiguous() else rows_read_densely(x)

    assert named(RMS_NORM, body, {}, circumstances=(Shifted("x", first=True),)).kind == "layout"
    buffers: dict[Any, torch.Tensor] = {}

    def from_one_buffer(v: dict[str, Any]) -> Any:
        out = RMS_NORM.reference(**v)
        return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)

    assert named(RMS_NORM, from_one_buffer, {}).kind in ("aliasing", "result")


def test_what_is_remembered_by_shape_is_right_when_loaded_anew() -> None:
    def load() -> Callable[..., Any]:
        kept: dict[Any, Any] = {}

        def run(x, weight=None, eps=1e-6, *args, **options):
            key = x.shape, x.dtype
            if key not in kept:
                kept[key] = RMS_NORM.reference(x, weight, eps, *args, **options)
            return kept[key].clone()

        run.__signature__ = inspect.signature(RMS_NORM.reference)   # type: ignore[attr-defined]
        return run

    kernel = Kernel("fake.remembering", RMS_NORM, load)
    results = [check_case(kernel, {}, "float32", circumstance=c)
               for c in (Circumstance(), UnusualValues("one sign"))]
    found = diagnose(kernel, results)
    assert found is not None and found.kind in ("state", "stale cache")
