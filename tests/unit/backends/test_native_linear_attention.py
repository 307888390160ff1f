"""Our own CPU kernels for a token of linear attention, at their edges."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.backends.native import build
from layerzero.ops import causal_conv1d, gated_delta_rule, selective_state_update

pytestmark = pytest.mark.skipif(build.is_built() is not True, reason="the CPU kernels are not built")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


def compare(op, kernel, values, tolerance=1e-5):
    call = getattr(lz, op)
    want, got = call(**values, backend=f"reference.{op}"), call(**values, backend=f"native.{kernel}")
    for w, g in zip(want, got):
        assert g.is_contiguous() and g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_state_of_other_strides_and_numbers_that_are_none(dtype, tied):
    values = selective_state_update.inputs(d=6, n=40, tied=tied, gate=True, dtype=dtype)
    whole = torch.cat((values["state"], values["state"]), 2)
    values["state"] = whole[:, :, ::2]                 # rows with gaps
    values["x"] = values["x"].mT.contiguous().mT
    values["B"] = values["B"].repeat_interleave(2, -1)[..., ::2]
    # one that a NaN of bfloat16 does not have: all of its bits are in the lower half
    values["dt"] = values["dt"].float().contiguous()
    values["dt"].view(torch.int32)[0, 0, 2] = 0x7F800001
    values["state"][1, 1, 3, 7], values["x"][1, 2, 4] = NAN, float("inf")
    compare("selective_state_update", "selective_state_update", values,
            {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype])


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 13), (128, 128)])
def test_the_delta_rule_of_heads_of_any_size(sizes, state):
    values = gated_delta_rule.inputs(s=1, hv=6, d=sizes[0], dv=sizes[1], state=state, final=True,
                                     norm=True, decay=30.0)
    values["v"] = values["v"].transpose(2, 3).contiguous().transpose(2, 3)
    compare("gated_delta_rule", "gated_delta_rule_token", values)


@pytest.mark.parametrize(("width", "kept"), [(1, 1), (2, 1), (4, 3), (4, 9), (5, 4)])
def test_the_convolution_keeps_as_many_tokens_as_it_got(width, kept):
    values = causal_conv1d.inputs(c=150, s=1, width=width, state=kept, final=True)
    values["initial_states"] = values["initial_states"].mT.contiguous().mT
    values["weight"] = values["weight"].mT.contiguous().mT
    compare("causal_conv1d", "causal_conv1d_token", values)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    values = selective_state_update.inputs(h=16, d=64, n=64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(lz.selective_state_update(**values,
                                                     backend="native.selective_state_update"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results))
