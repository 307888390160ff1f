"""Weights of GPTQ and AWQ checkpoints: packed here number by number, as those projects pack them."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.spec.reason import Code

INPUTS, OUTPUTS, SIZE = 64, 16, 32
GROUPS = INPUTS // SIZE


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def pack(numbers: torch.Tensor, bits: int, order=None) -> torch.Tensor:
    """(rows, n) -> int32 (rows, n * bits / 32): number order[i] of each word in its bits from
    i * bits on."""
    per = 32 // bits
    order = order or range(per)
    rows = []
    for row in numbers.tolist():
        words = [row[i:i + per] for i in range(0, len(row), per)]
        rows.append([signed(sum(word[k] << (i * bits) for i, k in enumerate(order)))
                     for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def numbers(bits: int, symmetric: bool = False):
    gen = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (INPUTS, OUTPUTS), generator=gen)
    zeros = torch.randint(1 << bits, (GROUPS, OUTPUTS), generator=gen)
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    scales = (torch.rand(GROUPS, OUTPUTS, generator=gen) + 0.5).half()
    return codes, zeros, scales


def values(codes, zeros, scales, groups) -> torch.Tensor:
    """The weight (out, in)."""
    return ((codes - zeros[groups]) * scales.float()[groups]).t()


def restored(weight) -> torch.Tensor:
    return lz.dequantize(weight.weight_q, weight.scales, weight.zeros, format=weight.format,
                         block_size=weight.group_size)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(bits, version, act_order):
    codes, zeros, scales = numbers(bits)
    groups = torch.arange(INPUTS) // SIZE
    if act_order:
        groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
    stored = (zeros - int(version == "gptq")) % (1 << bits)
    weight = lz.quant.from_gptq(pack(codes.t(), bits).t(), pack(stored, bits), scales,
                                groups.int(), bits=bits, checkpoint_format=version)
    want = values(codes, zeros, scales, groups)
    assert (weight.format, weight.group_size) == (f"int{bits}", SIZE)
    assert (weight.input_order is None) == (not act_order)
    order = torch.arange(INPUTS) if weight.input_order is None else weight.input_order
    assert torch.equal(restored(weight), want[:, order])
    x = torch.randn(3, INPUTS)
    y = lz.quantized_linear(x[:, order], weight.weight_q, weight.scales, weight.zeros,
                            format=weight.format, group_size=SIZE)
    torch.testing.assert_close(y, x @ want.t(), rtol=1e-4, atol=1e-3)


def test_awq():
    codes, zeros, scales = numbers(4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = lz.quant.from_awq(pack(codes, 4, order), pack(zeros, 4, order), scales)
    want = values(codes, zeros, scales, torch.arange(INPUTS) // SIZE)
    assert torch.equal(restored(weight), want) and weight.input_order is None


def test_symmetric_codes_need_no_zeros():
    for bits in (4, 8):
        codes, zeros, scales = numbers(bits, symmetric=True)
        weight = lz.quant.from_gptq(pack(codes.t(), bits).t(), pack(zeros - 1, bits), scales,
                                    bits=bits)
        assert weight.zeros is None
        assert torch.equal(restored(weight),
                           values(codes, zeros, scales, torch.arange(INPUTS) // SIZE))


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"bits": 3}, Code.VALUE_OUT_OF_RANGE, "bits"),
    ({"checkpoint_format": "marlin"}, Code.VALUE_OUT_OF_RANGE, "checkpoint_format"),
    ({"qzeros": torch.zeros(2, 3, dtype=torch.int32)}, Code.DIM_MISMATCH, "qzeros"),
    ({"qweight": torch.zeros(8, 16)}, Code.DTYPE_UNSUPPORTED, "qweight"),
    ({"scales": torch.ones(3, 16), "qzeros": torch.zeros(3, 2, dtype=torch.int32)},
     Code.SCALE_LAYOUT_MISMATCH, "scales"),
    ({"g_idx": torch.zeros(64, dtype=torch.int32)}, Code.SCALE_LAYOUT_MISMATCH, "g_idx"),
    ({"g_idx": torch.zeros(60, dtype=torch.int32)}, Code.DIM_MISMATCH, "g_idx")])
def test_what_does_not_fit_is_refused(change, code, name):
    inputs = {"qweight": torch.zeros(8, 16, dtype=torch.int32),
              "qzeros": torch.zeros(2, 2, dtype=torch.int32), "scales": torch.ones(2, 16), **change}
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.quant.from_gptq(**inputs)
    reason = error.value.reasons[0]
    assert reason.code is code and reason.fact.partition(".")[0] == name, str(error.value)
