"""Under autocast every op does what torch's own does: lower what it multiplies, promote what it
adds.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz


@pytest.mark.parametrize("flip", [False, True])
def test_add_rms_norm_promotes_as_the_sum_does(flip):
    x, w = torch.randn(4, 64), torch.randn(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        branch = lz.linear(x, w)
        assert branch.dtype == torch.bfloat16
        inputs = (x, branch) if flip else (branch, x)
        normed, total = lz.add_rms_norm(*inputs, torch.ones(64))
        plain = inputs[0] + inputs[1]
    assert total.dtype == plain.dtype == torch.float32 and torch.equal(total, plain)
    torch.testing.assert_close(normed, F.rms_norm(plain, (64,), torch.ones(64), 1e-6), rtol=1e-5,
                               atol=1e-5)


def test_without_autocast_mixed_dtypes_stay_an_error():
    with pytest.raises(lz.errors.InvalidCall, match="dtype"):
        lz.add_rms_norm(torch.randn(4, 64), torch.randn(4, 64).bfloat16())


def test_alike_dtypes_are_left_alone_under_autocast():
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = lz.add_rms_norm(x, x)
    assert normed.dtype == total.dtype == torch.float32


def test_a_decoder_step_under_autocast_trains():
    x, w = torch.randn(4, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = lz.add_rms_norm(lz.linear(x, w), x, torch.ones(32))
        (normed.sum() + total.sum()).backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32 and x.grad.abs().sum() > 0


def test_moe_is_lowered_as_the_mlp_is():
    x, gate_up, down = torch.randn(6, 16), torch.randn(4, 48,
                                                       16) * 0.2, torch.randn(4, 16, 24) * 0.2
    weights, ids = torch.rand(6, 2), torch.randint(0, 4, (6, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out = lz.moe(x, gate_up, down, topk_weights=weights, topk_ids=ids)
    assert out.dtype == torch.bfloat16
    exact = lz.moe(x, gate_up, down, topk_weights=weights, topk_ids=ids)
    torch.testing.assert_close(out.float(), exact, rtol=5e-2, atol=5e-2)
