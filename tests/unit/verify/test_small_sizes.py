"""Calls of one and of two beside every argument."""

from __future__ import annotations

import pytest

import layerzero as lz
from layerzero.verify.cases.drawn_sizes import allowed_facts, counts_of, sizes_of
from layerzero.verify.cases.pairs import argument_levels, ones_beside_arguments

OPS = ("attention", "alibi", "rope", "mamba_chunk_scan", "quantize")


@pytest.mark.parametrize("seed", [0, 7])
def test_a_causal_call_of_one_query_and_several_keys_is_drawn(seed: int) -> None:
    calls = [case for case, in ones_beside_arguments(lz.op("attention"), "quick", seed)]
    assert any(case["sq"] == 1 and case["sk"] > 1 and case.get("causal")
               and not case.keys() & {"window", "alibi", "mask", "align"} for case in calls)


@pytest.mark.parametrize("name", OPS)
def test_every_argument_meets_every_length_of_one(name: str) -> None:
    op = lz.op(name)
    calls = [case for case, in ones_beside_arguments(op, "quick", 0)]
    lengths = [n for n in sizes_of(op) if n not in counts_of(op)]
    assert lengths or name == "quantize"
    for argument, values in argument_levels(op).items():
        if argument in ("stride", "memory", "extreme"):
            continue
        for value, length in ((v, n) for v in values[1:] for n in lengths):
            assert any(case.get(argument) == value and case[length] in (1, (1,))
                       for case in calls), (argument, value, length)


def test_two_is_drawn_too_and_all_of_it_in_the_full_lane() -> None:
    op = lz.op("attention")
    of_two = [sum(case["sk"] == 2 for case, in ones_beside_arguments(op, lane, 0))
              for lane in ("quick", "full")]
    assert 0 < of_two[0] < of_two[1]


def test_a_norm_of_one_number_is_not_drawn() -> None:
    op = lz.op("group_norm")
    calls = [case for case, in ones_beside_arguments(op, "quick", 0)]
    assert calls and all(allowed_facts(op, case, "float32") is not None for case in calls)
