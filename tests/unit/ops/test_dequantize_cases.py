"""Cases of dequantize ask for a dtype of their own, and are judged by it."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import check_kernel

OP = lz.op("dequantize")


def kernel(change) -> Kernel:
    """Returns the formula with `change` of (a function of the dtype, the dtype that is asked for)
    in its place."""
    def load():
        def run(q, scales=None, zeros=None, *, format, block_size=0, block_rows=1,
                global_scale=None, size=None, out_dtype="float32"):
            def values(dtype):
                return OP.reference(
                    q, scales, zeros, format=format, block_size=block_size, block_rows=block_rows,
                    global_scale=global_scale, size=size, out_dtype=dtype)

            return change(values, out_dtype)

        return run

    return Kernel("planted.dequantize", OP, load)


def next_number(values, dtype):
    """Returns every ninth number of the two half types one unit off, as another order of products
    may give."""
    right = values(dtype)
    if dtype == "float32":
        return right
    chosen = (torch.arange(right.numel()).reshape(right.shape) % 9 == 4) & (right.abs() > 1e-3)
    return torch.where(chosen, (right.view(torch.int16) + 1).view(right.dtype), right)


def failed(change, dtype: str) -> list[str]:
    return [str(r) for r in check_kernel(kernel(change), dtypes=(dtype,)) if not r.passed
            and r.status != "skipped"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
def test_a_kernel_that_ignores_the_dtype_is_found_at_one_dtype(given, dtype):
    assert failed(lambda values, out_dtype: values(given), dtype)


@pytest.mark.parametrize("dtype", OP.dtypes)
def test_the_right_one_passes(dtype):
    assert not failed(lambda values, out_dtype: values(out_dtype), dtype)


@pytest.mark.parametrize("dtype", OP.dtypes)
def test_a_result_is_judged_by_its_own_dtype(dtype):
    assert not failed(next_number, dtype)
    assert failed(lambda values, out_dtype: values(out_dtype) * 1.1, dtype)
