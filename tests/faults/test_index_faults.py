"""Sizes past 16 bits, rows of every rank, rows that differ: each is met for every op."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from index_faults import INDEX_FAULTS, LONG_FAULTS

import layerzero as lz
from layerzero.backends import CATALOG as BACKENDS
from layerzero.machine import loading
from layerzero.ops import CATALOG
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op
from layerzero.verify.cases.index_sizes import index_calls, rank_calls
from layerzero.verify.cases.octaves import item_calls
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import case_refusals, case_values_to_read, check_case
from layerzero.world import snapshot as worlds

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


def test_thousands_of_sequences_are_called() -> None:
    kernel = INDICES["no_more_than_1024_sequences"].kernel()
    result = check_sizes(kernel, "items", item_calls(kernel.op, 0), "float32")
    assert result.status == "failed" and len(str(result)) < 2_000


ATTENTION = lz.op("attention")
ATTENTIONS = [k for name in BACKENDS
              for k in importlib.import_module(f"layerzero.backends.{name}").KERNELS
              if k.op is ATTENTION and not k.jit and loading.availability(k) is None]


def _accepts(kernel: Kernel, case: Mapping[str, Any], seed: int = 0) -> bool:
    return any(not case_refusals(kernel, case, dtype, "cpu", seed) for dtype in ATTENTION.dtypes)


@pytest.mark.parametrize("kernel", ATTENTIONS, ids=lambda k: k.id)
def test_every_attention_has_a_call_past_16_bits(kernel: Kernel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not any(_accepts(kernel, case) for case in ATTENTION.cases):
            pytest.skip("it serves no case on this machine")
        for seed in range(3):
            calls = index_calls(ATTENTION, "quick", seed)
            assert any(_accepts(kernel, case, seed) for call in calls for case in call), seed


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["attention_decode", "attention_decode_rows"])
def test_a_kernel_of_few_queries_and_shared_heads_is_met_past_16_bits(name: str, seed: int) -> None:
    right = worlds.current().catalog.by_id[f"native.{name}"]

    def load() -> Any:
        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                is_causal: bool = False, scale: float | None = None, *,
                causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
                softcap: float = 0.0, return_lse: bool = False) -> Any:
            wrapped = torch.arange(key.shape[2]) % 2 ** 16
            return ATTENTION.reference(
                query, key, value[:, :, wrapped], None, 0.0, is_causal, scale,
                causal_align=causal_align, window_left=window_left, window_right=window_right,
                softcap=softcap, return_lse=return_lse)

        return run

    kernel = Kernel(f"planted.{name}", ATTENTION, load, right.requires, variants=right.variants)
    calls = index_calls(ATTENTION, "quick", seed)
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
    assert _axes_alike(lz.op(name)) == set()


@pytest.mark.parametrize("name", [f.name for f in LONG_FAULTS])
@pytest.mark.filterwarnings("ignore::layerzero.spec.errors.CausalAlignmentWarning")
def test_long_calls_are_met_by_the_cases_of_their_op(name: str) -> None:
    kernel = INDICES[name].kernel()
    dtype = kernel.op.dtypes[0]
    assert "failed" in (check_case(kernel, case, dtype).status for case in kernel.op.stress)
