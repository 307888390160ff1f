"""Our own CPU kernels that work row by row, at their edges."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.backends.native import build, rows

pytestmark = pytest.mark.skipif(build.is_built() is not True, reason="the CPU kernels are not built")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 16, 511, 512, 513, 5000])
def test_the_highest_is_the_first_of_equal_ones(dtype, width):
    gen = torch.Generator().manual_seed(width)
    logits = torch.randn(6, width, generator=gen).round().to(dtype)      # full of ties
    logits[1, width // 2] = INF
    logits[2, width // 2] = NAN
    logits[3] = -INF
    logits[4] = NAN
    logits[5, ::2] = INF
    want = lz.sample(logits, temperature=0.0, backend="reference.sample")
    got = lz.sample(logits, temperature=0.0, backend="native.sample_greedy")
    assert torch.equal(got, want) and want[3] == want[4] == -1


def test_the_generator_goes_on_as_with_any_other_kernel():
    logits, states = torch.randn(3, 40), []
    for kernel in ("reference.sample", "native.sample_greedy"):
        generator = torch.Generator().manual_seed(7)
        lz.sample(logits, temperature=0.0, generator=generator, backend=kernel)
        states.append(generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("width", [3, 2047, 2048, 5001])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_long_rows_and_of_numbers_that_are_none(width, smoothing):
    gen = torch.Generator().manual_seed(width)
    logits = torch.randn(8, width, generator=gen) * 30
    logits[1] -= 1e6
    logits[2, : width - 1] = -INF              # whole blocks of it, before the first number
    logits[3, width // 2], logits[4, 0], logits[5] = NAN, INF, -INF
    targets = torch.full((8,), width - 1)
    targets[7] = -100
    want, got = (lz.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none",
                                  backend=f"{kernel}.cross_entropy")
                 for kernel in ("reference", "native"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("block", [0, 16])
def test_codes_and_scales_are_the_formulas_to_the_bit(dtype, format, block):
    x = torch.randn(9, 77) * torch.logspace(-40, 30, 9)[:, None]
    x = x.to(dtype)
    x[0, 3], x[1, 5], x[2, 7] = NAN, INF, -INF
    x[3] = 0.0
    how = {"format": format, "block_size": block, "granularity": "block" if block else "channel"}
    want = lz.quantize(x, **how, backend="reference.quantize")
    got = lz.quantize(x, **how, backend="native.quantize")
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_number_of_fp8_and_what_is_between_rounds_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    near = torch.cat((finite, between, between * (1 + 1e-6), between * (1 - 1e-6), torch.tensor(
        [448.0]))).repeat(2, 1)
    got, scales = lz.quantize(near, format="fp8_e4m3", backend="native.quantize")
    assert torch.equal(scales, torch.ones(2, 1))
    assert torch.equal(got.view(torch.uint8), near.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit_of_a_group_norm(dtype):
    x = (torch.randn(2, 24, 33, 41) + 100).to(dtype).contiguous(memory_format=torch.channels_last)
    norm, results, before = rows._group_norm(), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(norm(x, 6, torch.ones(24), None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert results[0].is_contiguous(memory_format=torch.channels_last)


def test_a_first_pixel_far_from_the_mean_costs_no_digits_of_the_variance():
    x = torch.randn(1, 8, 20, 20, generator=torch.Generator().manual_seed(1)) + 1e4
    x[0, :, 0, 0] = 0.0
    x = x.contiguous(memory_format=torch.channels_last)
    got = lz.group_norm(x, 2, backend="native.group_norm_channels_last")
    want = torch.nn.functional.group_norm(x.double(), 2)
    torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=1e-3)
