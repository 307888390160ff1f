"""The kernels of triton_step.py in Triton's interpreter; run as a program with TRITON_INTERPRET=1.

First each against plain torch, then as the memory of a whole decode step.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from layerzero.integrations.transformers.accelerate import accelerate
from layerzero.integrations.transformers.decoding.cuda import triton_step

HALF = torch.float16


def check_rotate_and_store(batch: int, heads: int, kv_heads: int, dim: int, rotary: int,
                        dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, 1, heads + 2 * kv_heads, dim, generator=gen).to(dtype)
    qk, value = qkv[:, :, :heads + kv_heads], qkv[:, :, heads + kv_heads:]
    angles = torch.arange(9)[:, None] / 100 ** (torch.arange(rotary // 2) / rotary)
    table = torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), 1).to(dtype)
    keys, values = (torch.zeros(batch, 9, kv_heads, dim, dtype=dtype) for _ in "kv")
    query = triton_step.rotate_and_store(qk, value, table, torch.tensor([5]), keys, values)
    cos, sin = table[5, :rotary].float(), table[5, rotary:].float()
    x = qk[:, 0, :, :rotary].float()
    turned = x * cos + torch.cat((-x[..., rotary // 2:], x[..., :rotary // 2]), -1) * sin
    want = torch.cat((turned, qk[:, 0, :, rotary:].float()), -1)
    close = ({"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16
             else {"rtol": 2e-3, "atol": 2e-3})
    torch.testing.assert_close(query.float(), want[:, :heads], **close)
    torch.testing.assert_close(keys[:, 5].float(), want[:, heads:], **close)
    assert torch.equal(values[:, 5], value[:, 0])
    assert (not keys[:, :5].any() and not keys[:, 6:].any() and not values[:, :5].any()
            and not values[:, 6:].any())


def check_attend(batch: int, heads: int, kv_heads: int, dim: int, room: int, lengths: list[int],
                 window: int | None = None, softcap: float = 0.0) -> None:
    gen = torch.Generator().manual_seed(1)
    query = torch.randn(batch, heads, dim, generator=gen).to(HALF)
    keys, values = (torch.randn(batch, room, kv_heads, dim, generator=gen).to(HALF) for _ in "kv")
    output = triton_step.attend(query, keys, values, torch.tensor(lengths), dim ** -0.5, window,
                                softcap)
    for i, n in enumerate(lengths):
        first = max(0, n - window) if window else 0
        k, v = (t[i, first:n].repeat_interleave(heads // kv_heads, 1).float()
                for t in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query[i].float(), k) * dim ** -0.5
        weights = (torch.tanh(scores / softcap) * softcap if softcap else scores).softmax(-1)
        torch.testing.assert_close(output[i].float(), torch.einsum("hn,nhd->hd", weights, v),
                                   rtol=5e-3, atol=5e-3)


@torch.no_grad()
def check_whole_step(model_class: type, config_class: type, **more: Any) -> None:
    config = config_class(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                          pad_token_id=0, num_attention_heads=4, num_key_value_heads=2,
                          max_position_embeddings=512, **more)
    torch.manual_seed(0)
    model = model_class(config).eval().to(HALF)
    ids = torch.arange(3, 12)[None]
    expected = [model(ids[:, :n]).logits[:, -1] for n in (7, 8, 9)]
    report = accelerate(model, measure=False, patch=False, capture=True)
    assert report._step is not None and report._step._captured is not None
    report._step.step(1).fast = triton_step    # as on a CUDA device
    report._step._captured.forget(1)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    for n, want in zip((7, 8, 9), expected):
        logits = model(ids[:, n - 1:n], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits.float(), want.float(), rtol=2e-2, atol=2e-2)
    assert "one launch" in report.kernels["attention, captured"]


if __name__ == "__main__":
    for dtype in (torch.float32, HALF, torch.bfloat16):
        check_rotate_and_store(2, 4, 2, 16, 16, dtype)
    # a part of each head, sizes that are no power of two
    check_rotate_and_store(1, 3, 1, 24, 16, torch.float32)
    check_attend(2, 4, 2, 16, 200, [150, 1])
    check_attend(1, 8, 2, 32, 64, [64])
    check_attend(2, 4, 2, 16, 200, [150, 5], window=40, softcap=0.5)
    check_whole_step(LlamaForCausalLM, LlamaConfig)
    gemma = {"head_dim": 16, "sliding_window": 4,
             "layer_types": ["sliding_attention", "full_attention"]}
    check_whole_step(Gemma2ForCausalLM, Gemma2Config, **gemma, attn_logit_softcapping=2.0)
    check_whole_step(Gemma3ForCausalLM, Gemma3TextConfig, **gemma)
    print("all agree")
