"""Faults that look like those of another class do not get its name."""

from __future__ import annotations

from typing import Any

from test_diagnosis import named

from layerzero.ops.attention import OP as ATTENTION
from layerzero.ops.cross_entropy import OP as CROSS_ENTROPY
from layerzero.ops.group_norm import OP as GROUP_NORM
from layerzero.ops.layer_norm import OP as LAYER_NORM
from layerzero.ops.moe import OP as MOE
from layerzero.ops.moe_gate import OP as MOE_GATE
from layerzero.ops.rms_norm import OP as RMS_NORM

Values = dict[str, Any]


def loss_of_chunks(v: Values) -> Any:
    """The mean over chunks of their means, each of as many rows as it has, ignored ones too."""
    logits, targets = v["logits"].reshape(-1, v["logits"].shape[-1]), v["targets"].reshape(-1)
    if v["reduction"] != "mean" or len(targets) <= 16:
        return CROSS_ENTROPY.reference(**v)
    parts = [CROSS_ENTROPY.reference(**{**v, "logits": x, "targets": t}) * len(t)
             for x, t in zip(logits.split(16), targets.split(16))]
    return sum(parts) / len(targets)


def test_a_loss_that_is_always_wrong_the_same_way_is_no_rounding() -> None:
    assert named(CROSS_ENTROPY, loss_of_chunks, {"rows": (60,), "vocab": 50, "ignored": "some"},
                 {"rows": (90,), "vocab": 70, "ignored": "some"}).kind != "precision"


def room_by_the_average(v: Values) -> Any:
    ids, experts = v["topk_ids"], v["w_gate_up"].shape[0]
    if ids is not None and not v["capacity"] and ids.numel():
        v["capacity"] = max(2, -(-3 * ids.numel() // (2 * experts)))
    return MOE.reference(**v)


def test_rows_that_an_expert_has_no_room_for_are_no_last_rows() -> None:
    assert named(MOE, room_by_the_average, {"favourite": True}, {}).kind \
        in ("capacity", "sizes", "unknown")


def test_what_is_kept_of_the_call_before_is_no_chance() -> None:
    kept: list[Any] = []

    def mixed_with_the_last(v: Values) -> Any:
        y = GROUP_NORM.reference(**v)
        last = kept.pop() if kept and kept[-1].shape == y.shape else y
        kept[:] = [y.detach().clone()]
        return y + 0.1 * (last.to(y) - y)

    assert named(GROUP_NORM, mixed_with_the_last, {}, {"groups": 2}, {}).kind in (
        "state", "stale cache")


def test_what_comes_round_is_no_chance() -> None:
    calls: list[None] = []

    def without_weight_at_times(v: Values) -> Any:
        calls.append(None)
        return LAYER_NORM.reference(**{**v, "weight": None if len(calls) % 5 == 1
                                       else v["weight"]})

    assert named(LAYER_NORM, without_weight_at_times, {}, {"rows": (3, 2)}, {}).kind == "state"


def without_zeros(v: Values) -> Any:
    return MOE_GATE.reference(**{**v, "logits": v["logits"].masked_fill(v["logits"] == 0, -30.0)})


def test_zeros_are_no_ties() -> None:
    cases = [case for case in MOE_GATE.cases if case.get("special") == "ties"]
    assert cases
    assert named(MOE_GATE, without_zeros, *cases).kind != "ties"


def last_of_equals(v: Values) -> Any:
    ids, weights = MOE_GATE.reference(**{**v, "logits": v["logits"].flip(-1)})
    return v["logits"].shape[-1] - 1 - ids, weights


def test_ties_are_still_named() -> None:
    assert named(MOE_GATE, last_of_equals, {"special": "ties"},
                 {"special": "ties", "scoring": "sigmoid"}).kind == "ties"


def test_an_argument_of_the_first_call_of_a_size_is_kept() -> None:
    built: dict[int, float] = {}

    def offset_of_the_first(v: Values) -> Any:
        offset = built.setdefault(v["x"].shape[-1], v["offset"])
        return RMS_NORM.reference(**{**v, "offset": offset})

    assert named(RMS_NORM, offset_of_the_first, {}, {"offset": 1.0},
                 {"offset": 1.0, "rows": (5,)}).kind == "state"


def test_a_cap_whose_number_is_not_read_is_no_scale() -> None:
    def capped_by_ten(v: Values) -> Any:
        return ATTENTION.reference(**{**v, "softcap": 10.0 if v["softcap"] > 0 else 0.0})

    assert named(ATTENTION, capped_by_ten, {}, {"softcap": 30.0},
                 {"softcap": 4.0, "causal": True}, {"causal": True}).kind != "scale"
