"""Kernels that are wrong for a range of sizes alone, and what the longer lanes call them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from broken_kernels import Fault
from size_range_faults import RANGE_FAULTS

import layerzero as lz
from layerzero.verify.cases.octaves import bulk_calls, gradient_sizes, octave_calls, square_calls
from layerzero.verify.certification.calls import check_sizes
from layerzero.verify.certification.circumstances.row_circumstances import Narrowed
from layerzero.verify.certification.gradient_calls import check_gradient_calls
from layerzero.verify.diagnosis.diagnose import CLASSES
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

BY_NAME = {f.name: f for f in RANGE_FAULTS}
FORWARD: dict[str, Callable[..., Sequence[Sequence[object]]]] = {
    "three_vectors_in_a_thread_are_two": octave_calls,
    "blocks_of_1024_between_2048_and_4096": octave_calls,
    "skips_a_tile_of_long_causal_calls": square_calls,
    "parts_of_four_million_numbers_but_the_last": bulk_calls}
BACKWARD = ("weight_gradient_of_whole_blocks_of_rows", "key_gradient_without_the_last_tile")


def test_every_fault_has_a_class() -> None:
    assert {kind for f in RANGE_FAULTS for kind in f.kinds} <= CLASSES.keys()


@pytest.mark.filterwarnings("ignore:lz.attention")
@pytest.mark.parametrize("name", FORWARD)
def test_sizes_of_every_range_are_called(name: str) -> None:
    kernel = BY_NAME[name].kernel()
    calls = FORWARD[name](kernel.op, 0)
    assert check_sizes(kernel, "a range", calls, "float32").status == "failed"
    right = worlds.current().catalog.by_id[
        "torch.sdpa_math" if kernel.op.name == "attention" else f"torch.{kernel.op.name}"]
    assert check_sizes(right, "a range", calls, "float32").status == "passed"


@pytest.mark.parametrize("fault", [BY_NAME[name] for name in BACKWARD], ids=lambda f: f.name)
def test_gradients_are_compared_at_many_sizes(fault: Fault) -> None:
    calls = gradient_sizes(fault.op, 0)
    judged = check_gradient_calls(fault.kernel(), "a range", calls, "float32")
    assert judged.status == "failed" and "gradient" in judged.kinds


def test_gradients_of_a_right_kernel_pass_at_many_sizes() -> None:
    right = worlds.current().catalog.by_id["torch.layer_norm"]
    judged = check_gradient_calls(right, "a range", gradient_sizes(right.op, 0), "float32")
    assert judged.status == "passed" and int(judged.detail.split()[0]) > 20


def test_a_scale_may_be_one_number_beside_one_for_each_head() -> None:
    kernel = BY_NAME["a_scale_of_one_number_is_of_the_first_head"].kernel()
    case = {"scales": "head"}
    assert check_case(kernel, case, "float32").status == "passed"
    assert check_case(kernel, case, "float32", "cpu", 0,
                      Narrowed("key_scale", 0)).status == "failed"


@pytest.mark.parametrize("name", ["attention", "linear", "rms_norm", "paged_attention"])
def test_widths_of_models_are_called(name: str) -> None:
    op = lz.op(name)
    widths = {n for group in octave_calls(op, 0) for n in group[0].values() if type(n) is int}
    assert {2560, 3072, 5120} <= widths | {n for group in octave_calls(op, 0)
                                           for v in group[0].values() if isinstance(v, tuple)
                                           for n in v}
