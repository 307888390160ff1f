"""Shared memory of our Triton kernels as their compiler lays it out, against what is declared and
reckoned with.
"""

from __future__ import annotations

import pytest
import torch
from helpers import NVIDIA_ONLY

import layerzero as lz
from layerzero.world import snapshot as worlds

pytestmark = NVIDIA_ONLY


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (8, 2), (8, 4), (8, 8)])
def test_decode_takes_no_more_shared_memory_than_its_launcher_reckons_with(dim, group, tokens):
    """The compiler decides, and another release may decide otherwise.

    What is declared is what one stage takes.
    """
    from layerzero.backends.triton.attention import decode
    from layerzero.backends.triton.attention.decode_kernel import decode_kernel
    from layerzero.spec.rules.expr import parse

    kernel = worlds.current().catalog.by_id["triton.attention_decode"]
    room = worlds.current().device("cuda").shared_per_block
    rows = max(16, 1 << (group * tokens - 1).bit_length())
    declared = int(parse(kernel.shared_memory)({"group": group, "seq_q": tokens, "head_dim": dim,
                                                "head_dim_v": dim}))
    stage, beside = decode.stage_bytes(dim, dim, 2,
                                       2), decode.bytes_beside_stages(rows, dim, dim, False)
    assert declared == stage * (1 if rows <= 16 else 2) + beside
    q = torch.randn(1, 2 * group, tokens, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 700, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if declared > room:
        assert lz.validate("attention", kernel.id, q, k, v)
        return
    config = decode.config(rows, 2, 11, stage, False, q.device, 1.0, beside)
    before = {id(c) for cached in decode_kernel.device_caches.values() for c in cached[0].values()}
    out = decode.dense(q, k, v)
    torch.testing.assert_close(out,
                               torch.nn.functional.scaled_dot_product_attention(q, k, v,
                                                                                enable_gqa=True),
                               rtol=2e-2, atol=2e-2)
    for c in (c for cached in decode_kernel.device_caches.values() for c in cached[0].values()
              if id(c) not in before):
        assert c.metadata.shared <= config.stages * stage * (config.block_n // 64) + beside <= room


def test_every_specialisation_of_ours_takes_what_it_declares_or_less():
    """Of the kernels whose declaration is a bound over all sizes."""
    from layerzero.backends.triton import gemv, norm
    from layerzero.spec.rules.expr import parse

    by_id = worlds.current().catalog.by_id
    for rows, wide in ((1, 4096), (4, 4096), (16, 11008)):
        x = torch.randn(rows, wide, device="cuda", dtype=torch.bfloat16)
        gemv.linear(x, torch.randn(8192, wide, device="cuda", dtype=torch.bfloat16))
        norm.rms_norm(x)
    bounds = {"triton.linear_gemv": (gemv.one_row_kernel, gemv.few_rows_kernel),
              "triton.rms_norm": (norm.rms_norm_kernel,)}
    for name, functions in bounds.items():
        most = int(parse(by_id[name].shared_memory)({"rows": 16}))
        for function in functions:
            for cached in function.device_caches.values():
                assert all(c.metadata.shared <= most for c in cached[0].values()), (name, function)


WIDEST = {"triton.mamba_chunk_scan": {"b": 1, "s": 512, "h": 8, "g": 2, "d": 64, "n": 128,
                                      "final": True},
          "triton.gated_delta_rule": {"b": 1, "s": 130, "h": 2, "d": 128, "dv": 128, "final": True},
          "triton.gated_delta_rule_tokens": {"b": 1, "s": 3, "h": 2, "d": 256, "dv": 256},
          "triton.selective_state_update": {"d": 256, "n": 256}}


@pytest.mark.parametrize(("name", "dtype"), [
    (name, "bfloat16" if "mamba" in name else "float32") for name in WIDEST])
def test_linear_attention_fits_at_the_largest_sizes_its_rules_allow(name, dtype):
    from layerzero.backends.triton import launch
    from layerzero.spec.rules.expr import parse
    from layerzero.verify.kernel.contract import check_case

    kernel, room = worlds.current().catalog.by_id[name], limit_of_a_block()
    loaded = []
    launch.listeners.append(loaded.append)
    try:
        result = check_case(kernel, WIDEST[name], dtype, "cuda")
    finally:
        launch.listeners.remove(loaded.append)
    assert result.status == "passed", str(result)
    assert loaded and all(specialization.shared <= room for specialization in loaded)
    if name != "triton.mamba_chunk_scan":      # which declares one stage, and uses what fits
        most = int(parse(kernel.shared_memory)({"head_dim": 128}))
        assert all(specialization.shared <= most for specialization in loaded)


def limit_of_a_block():
    return worlds.current().device("cuda").shared_per_block
