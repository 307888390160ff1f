"""What reruns tell apart: sizes, arguments, earlier calls, rows; each could be refuted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_diagnosis import broken, named

from layerzero.ops.alibi import OP as ALIBI
from layerzero.ops.attention import OP as ATTENTION
from layerzero.ops.cross_entropy import OP as CROSS_ENTROPY
from layerzero.ops.detokenize import OP as DETOKENIZE
from layerzero.ops.gated_delta_rule import OP as DELTA
from layerzero.ops.layer_norm import OP as LAYER_NORM
from layerzero.ops.linear import OP as LINEAR
from layerzero.ops.linear_cross_entropy import OP as LINEAR_CROSS_ENTROPY
from layerzero.ops.moe_gate import OP as MOE_GATE
from layerzero.ops.paged_attention import OP as PAGED_ATTENTION
from layerzero.ops.quantize import OP as QUANTIZE
from layerzero.ops.quantized_linear import OP as QUANTIZED_LINEAR
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.ops.rope import OP as ROPE
from layerzero.ops.tokenize import OP as TOKENIZE
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.circumstances.call_circumstances import UnusualValues
from layerzero.verify.diagnosis.diagnose import diagnose
from layerzero.verify.kernel.contract import case_values, check_case

Values = dict[str, Any]


def test_what_is_wrong_beside_every_eighth_column_is_a_matter_of_what_is_left_over() -> None:
    def body(v: Values) -> Any:
        out = LINEAR.reference(**v)
        rest = out.shape[-1] % 8
        if rest and v["bias"] is not None:
            out[..., -rest:] -= v["bias"][-rest:]
        return out

    found = named(LINEAR, body, {"n": 33, "k": 17}, {"n": 29, "k": 17})
    assert found.kind == "last rows" and "right where it is" in found.says


def test_what_is_right_where_two_sizes_are_equal_has_no_period() -> None:
    def body(v: Values) -> Any:
        out = ATTENTION.reference(**v)
        return out if v["query"].shape[2] == v["key"].shape[2] else out + 0.5

    found = named(ATTENTION, body, {"sq": 20, "sk": 33}, {"sq": 20, "sk": 17})
    assert found.kind != "sizes"


def test_what_is_wrong_for_several_groups_has_no_period() -> None:
    def body(v: Values) -> Any:
        zeros = v["zeros"]
        if zeros is not None and zeros.dim() == 2 and zeros.shape[1] > 1:
            zeros = zeros.clone()
            zeros[:, -1] = 0
        return QUANTIZED_LINEAR.reference(**{**v, "zeros": zeros})

    cases = ({"format": "int4", "symmetric": False, "group": n} for n in (0, 32))
    assert named(QUANTIZED_LINEAR, body, *cases).kind in ("convention", "scale", "unknown")


def test_a_table_that_ends_is_a_matter_of_sizes() -> None:
    def body(v: Values) -> Any:
        d = torch.arange(v["seq_k"]) - torch.arange(v["seq_q"])[:, None]
        return (-v["slopes"][:, None, None] * d.abs().clamp(max=99)).to(v["slopes"])

    found = named(ALIBI, body, {"sq": 9, "sk": 900}, {"sq": 9, "sk": 1100})
    assert found.kind == "sizes" and "right where it is" in found.says


def test_what_is_wrong_where_one_size_exceeds_another_is_no_matter_of_a_size() -> None:
    def body(v: Values) -> Any:
        out = ATTENTION.reference(**v)
        return out if v["query"].shape[2] <= v["key"].shape[2] else out + 0.5

    for sq, sk in ((9, 5), (200, 40)):
        assert named(ATTENTION, body, {"sq": sq, "sk": sk}).kind != "sizes"


def smoothed(share: Callable[[Values], float]) -> Callable[[Values], Any]:
    return lambda v: CROSS_ENTROPY.reference(
        **{**v, "label_smoothing": v["label_smoothing"] * share(v)})


def test_an_argument_that_means_something_else_is_a_convention() -> None:
    found = named(CROSS_ENTROPY, smoothed(lambda v: 0.5), {"smoothing": 0.1},
                  {"smoothing": 0.1, "rows": (7,)})
    assert found.kind == "convention" and "right without label_smoothing" in found.says


def test_an_argument_that_is_wrong_for_few_rows_alone_is_no_convention() -> None:
    body = smoothed(lambda v: 0.5 if v["logits"].shape[0] == 5 else 1.0)
    assert named(CROSS_ENTROPY, body, {"smoothing": 0.1, "rows": (5,)}).kind != "convention"


def test_a_square_state_that_is_read_transposed_is_found() -> None:
    def body(v: Values) -> Any:
        state = v["initial_state"]
        turned = state if state is None else state.transpose(-1, -2)
        return DELTA.reference(**{**v, "initial_state": turned})

    found = named(DELTA, body, {"state": True, "final": True, "d": 8, "dv": 8})
    assert found.kind == "convention" and "initial_state transposed" in found.says


def test_one_step_for_all_rows_makes_them_depend_on_each_other() -> None:
    def body(v: Values) -> Any:
        x = v["x"]
        if v["activations"] == "int8":
            step = x.abs().max() / 127
            x, v = (x / step).round().clamp(-127, 127) * step, {**v, "activations": None}
        return QUANTIZED_LINEAR.reference(**{**v, "x": x})

    found = named(QUANTIZED_LINEAR, body, {}, {"bias": True}, {"activations": "int8"},
                  {"activations": "int8", "rows": (2, 20), "bias": True})
    assert found.kind == "invariance"


def is_typed(case: Values) -> bool:
    return isinstance(case.get("text"), int) and case["text"] < 0


def joining() -> Kernel:
    """A kernel that adds the tokens of what is new to those of the last text."""
    last = [""]

    def body(v: Values) -> Any:
        out, text = TOKENIZE.reference(**v), v["text"]
        if not isinstance(text, str) or not v["cache_prefix"]:
            return out
        before, last[0] = last[0], text
        if not before or not text.startswith(before) or text == before:
            return out
        ids = [TOKENIZE.reference(**{**v, "text": part}).ids
               for part in (before, text[len(before):])]
        return type(out)(ids[0] + ids[1], None, [1] * len(ids[0] + ids[1]), out.tokenizer_id)

    return broken(TOKENIZE, body)


def test_a_text_that_goes_on_within_a_word_finds_what_is_kept() -> None:
    kernel = joining()
    typed = [case for case in TOKENIZE.cases if case.get("cache_prefix") and is_typed(case)][:4]
    found = diagnose(kernel, [check_case(kernel, case, "int64") for case in typed])
    assert found is not None and found.kind == "state"


def test_each_typed_text_changes_tokens_that_the_one_before_had() -> None:
    texts = [case_values(TOKENIZE, case, "int64", "cpu", 0) for case in TOKENIZE.cases
             if is_typed(case) and case.get("cache_prefix")]
    changed = 0
    for before, after in pairwise(texts):
        if not after["text"].startswith(before["text"]):
            continue
        old, new = (TOKENIZE.reference(**v).ids for v in (before, after))
        changed += new[:len(old)] != old
    assert changed >= 12                       # within words, special tokens, spaces, characters


@pytest.mark.parametrize("number", [0.0, 1.0])
def test_a_mean_over_no_row_is_no_matter_of_the_mask(number: float) -> None:
    def body(v: Values) -> Any:
        return CROSS_ENTROPY.reference(**v).nan_to_num(nan=number)

    found = named(CROSS_ENTROPY, body, {"ignored": "all"},
                  {"rows": (24,), "vocab": 1, "ignored": "all", "ignore_index": 0})
    assert found.kind == "non-finite values"


def test_a_loss_that_is_always_too_large_is_no_rounding() -> None:
    def body(v: Values) -> Any:
        return LINEAR_CROSS_ENTROPY.reference(**v) + 0.004

    assert named(LINEAR_CROSS_ENTROPY, body, {}, {"rows": (7,)}).kind != "precision"


def test_one_text_in_place_of_a_list_of_one_is_a_shape() -> None:
    def body(v: Values) -> Any:
        out = DETOKENIZE.reference(**v)
        return out[0] if isinstance(out, list) and len(out) == 1 else out

    assert named(DETOKENIZE, body, {}, {"ids": (2,)}, dtype="int64").kind == "shape"


def test_ids_decoded_one_by_one_are_found() -> None:
    def body(v: Values) -> Any:
        rows = v["ids"] if v["ids"] and isinstance(v["ids"][0], list) else [v["ids"]]
        texts = ["".join(DETOKENIZE.reference(**{**v, "ids": [i]}) for i in row) for row in rows]
        return texts if rows is v["ids"] else texts[0]

    found = named(DETOKENIZE, body, {}, {"ids": 4}, {"ids": 7}, dtype="int64")
    assert found.kind == "convention" and "by itself" in found.says


def test_a_strided_case_under_another_circumstance_is_still_strided() -> None:
    def body(v: Values) -> Any:
        x = v["x"]
        return RMS_NORM.reference(**{**v, "x": x if x.is_contiguous() else torch.as_strided(
            x, x.shape, torch.empty(x.shape).stride())})

    kernel = broken(RMS_NORM, body)
    strided = next(case for case in RMS_NORM.cases if "stride" in case)
    found = diagnose(kernel, [check_case(kernel, {}, "float32"),
                              check_case(kernel, strided, "float32"),
                              check_case(kernel, strided, "float32",
                                         circumstance=UnusualValues("one sign"))])
    assert found is not None and found.kind == "layout"


def test_angles_of_the_first_row_for_all_are_found() -> None:
    def body(v: Values) -> Any:
        cos, sin = (t[:1].expand_as(t) if t.dim() > 2 else t for t in (v["cos"], v["sin"]))
        return ROPE.reference(**{**v, "cos": cos, "sin": sin})

    found = named(ROPE, body, {"batched": True}, {"batched": True, "s": 5})
    assert found.kind == "convention" and "the first row of cos and sin" in found.says


def test_a_small_error_that_comes_back_with_a_remainder_is_no_rounding() -> None:
    def body(v: Values) -> Any:
        n = v["x"].shape[-1]
        out = LAYER_NORM.reference(**{**v, "weight": None, "bias": None})
        out = out * (n / (n + -n % 8)) ** -0.5
        out = out if v["weight"] is None else out * v["weight"]
        return out if v["bias"] is None else out + v["bias"]

    found = named(LAYER_NORM, body, {"rows": (3,), "hidden": 4096}, {"rows": (3,), "hidden": 4091})
    assert found.kind == "sizes" and "right where it is" in found.says


def test_positions_rounded_to_16_bits_are_no_matter_of_sizes() -> None:
    def body(v: Values) -> Any:
        slopes = v["slopes"]
        k = torch.arange(v["seq_k"]).to(slopes.dtype)
        q = k[v["seq_k"] - v["seq_q"]:]
        return -slopes[:, None, None] * (k[None] - q[:, None]).abs()

    case = {"heads": 2, "sq": 1, "sk": 3000, "align": "bottom_right"}
    kernel = broken(ALIBI, body)
    found = diagnose(kernel, [check_case(kernel, case, "float32"),
                              check_case(kernel, case, "float16")])
    assert found is not None and found.kind == "precision"


def test_sums_that_are_right_with_smaller_codes_overflow() -> None:
    def body(v: Values) -> Any:
        out, x = QUANTIZED_LINEAR.reference(**v), v["x"].reshape(-1, v["x"].shape[-1]).double()
        if v["activations"] != "int8" or x.shape[-1] % 2:
            return out
        step = x.abs().amax(-1, keepdim=True) / 127
        pairs = ((x / step).round() + 128)[:, None] * v["weight_q"].double()
        pairs = pairs[..., 0::2] + pairs[..., 1::2]
        lost = (pairs - pairs.clamp(-32768, 32767)).sum(-1) * step
        return out - (lost * v["scales"].double()[:, :1].reshape(1, -1)).reshape(out.shape).to(out)

    found = named(QUANTIZED_LINEAR, body, {"activations": "int8", "group": 0},
                  {"activations": "int8", "group": 0, "bias": True, "rows": (2, 20)})
    assert found.kind == "overflow"


def test_a_number_that_many_rows_make_likelier_is_no_matter_of_sizes() -> None:
    def body(v: Values) -> Any:
        codes, scales, *others = QUANTIZE.reference(**v)
        width = v["x"].shape[-1]
        wide = (1 / scales.float()).repeat_interleave(-(-width // scales.shape[-1]), -1)
        other = (v["x"].float() * wide[..., :width]).round().clamp(-127, 127)
        return (other.to(codes.dtype), scales, *others)

    kernel = broken(QUANTIZE, body)
    found = diagnose(kernel, [check_case(kernel, {"rows": (n,)}, "bfloat16")
                              for n in (2, 64, 96, 128)])
    assert found is not None and found.kind != "sizes"


def test_infinities_in_the_first_part_are_no_matter_of_sizes() -> None:
    def body(v: Values) -> Any:
        out, logits = CROSS_ENTROPY.reference(**v), v["logits"]
        dead = logits.shape[-1] > 4096 and bool((logits[..., :4096] == -torch.inf).all(-1).any())
        return out * torch.nan if dead else out

    found = named(CROSS_ENTROPY, body, {}, {"rows": (3,), "vocab": 19686, "masked": "first"})
    assert found.kind == "non-finite values"


def test_a_sum_of_nothing_does_not_overflow() -> None:
    def body(v: Values) -> Any:
        ids, weights = MOE_GATE.reference(**{**v, "normalize": False,
                                             "routed_scaling_factor": 1.0})
        if v["normalize"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * v["routed_scaling_factor"]

    found = named(MOE_GATE, body, {}, {"bias": True, "special": "extreme", "n_group": 4,
                                       "topk_group": 4, "rows": (1,), "experts": 12, "top_k": 1})
    assert found.kind == "non-finite values"


def test_scales_of_the_first_head_for_all_are_no_matter_of_the_last_heads() -> None:
    def body(v: Values) -> Any:
        first = {n: v[n].reshape(-1)[:1] for n in ("key_scale", "value_scale")
                 if v[n] is not None}
        return PAGED_ATTENTION.reference(**{**v, **first})

    found = named(PAGED_ATTENTION, body, {}, {"stored": "float8_e5m2", "scales": "head"})
    assert found.kind == "scale" and "key_scale and value_scale" in found.says


def test_what_is_right_when_it_is_called_again_depends_on_earlier_calls() -> None:
    kept = [1.0]

    def body(v: Values) -> Any:
        out = RMS_NORM.reference(**v)
        return out + kept[0] if v["x"].shape[0] == 14 else out

    kernel = broken(RMS_NORM, body)
    results = [check_case(kernel, {"rows": (n,)}, "float32") for n in (4, 9, 14, 28)]
    kept[0] = 0.0                              # as another weight at the address of an earlier one
    found = diagnose(kernel, results)
    assert found is not None and found.kind == "state" and "called again" in found.says
