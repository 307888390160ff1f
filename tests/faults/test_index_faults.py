"""Sizes past 16 bits, rows of every rank, rows that differ: each is met for every op."""

from __future__ import annotations

import pytest
import torch
from index_faults import INDEX_FAULTS

import layerzero as lz
from layerzero.ops import CATALOG
from layerzero.spec.op import Op
from layerzero.verify.cases.index_sizes import index_calls, rank_calls
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import case_values_to_read, check_case

INDICES = {f.name: f for f in INDEX_FAULTS}


def test_every_fault_has_a_class() -> None:
    assert {kind for f in INDEX_FAULTS for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [
    "attention_key_positions_in_signed_16_bits", "softcap_is_left_out_past_15_bits",
    "window_of_a_context_in_16_bits", "key_positions_in_unsigned_16_bits"])
def test_a_position_is_met_past_16_bits(name: str, seed: int) -> None:
    kernel = INDICES[name].kernel()
    calls = index_calls(kernel.op, "quick", seed)
    assert check_sizes(kernel, "indices", calls, "float32", seed=seed).status == "failed"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_of_every_rank_are_met(seed: int) -> None:
    kernel = INDICES["squares_of_rank_five_over_two_dimensions"].kernel()
    calls = rank_calls(kernel.op, "quick", seed)
    assert check_sizes(kernel, "ranks", calls, "float32", seed=seed).status == "failed"


@pytest.mark.parametrize("name", ["tree_of_the_first_row_for_the_batch",
                                  "seed_of_the_first_row_for_the_batch"])
def test_rows_of_a_batch_differ(name: str) -> None:
    kernel = INDICES[name].kernel()
    assert any(check_case(kernel, case, "float32").status == "failed" for case in kernel.op.cases)


def _axes_alike(op: Op) -> set[tuple[str, int, int]]:
    """Returns (tensor, dimensions, axis) where no case of the op has two slices that differ."""
    differ: dict[tuple[str, int, int], bool] = {}
    for case in op.cases:
        values = case_values_to_read(op, case, op.dtypes[0])
        for name in op.tensors:
            t = values[name]
            if isinstance(t, torch.Tensor):
                for axis in (a for a in range(t.dim()) if t.shape[a] > 1):
                    key, first = (name, t.dim(), axis), t.select(axis, 0)
                    differ[key] = differ.get(key, False) or not all(
                        torch.equal(first, t.select(axis, i)) for i in (1, -1))
    return {key for key, found in differ.items() if not found}


@pytest.mark.parametrize("name", [op for op in CATALOG if lz.op(op).tensors])
def test_no_operand_has_the_same_in_every_row(name: str) -> None:
    # zero points of symmetric formats are one number
    assert {key for key in _axes_alike(lz.op(name)) if key[:1] != ("zeros",)} == set()
