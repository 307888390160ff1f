"""The calls that ops.py times: sizes of models one meets, and what one would write in torch for
each.

Sizes are arguments of the operation's own input generator. The first of an operation is its
smallest; `--quick` takes that one alone. Where the weights of a large model would not fit, a layer
of a smaller one stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Shape:
    op: str
    name: str
    sizes: Mapping[str, Any]
    dtypes: tuple[str, ...] = FLOATS


LLAMA = {"b": 1, "hq": 32, "hkv": 8, "d": 128}             # Llama-3-8B, and Qwen3-8B
SMOL = {"b": 1, "hq": 9, "hkv": 3, "d": 64}                # SmolLM2-135M
LATE = {"causal": True, "align": "bottom_right"}
SHAPES = tuple(Shape(*row) for row in (  # type: ignore[arg-type]
    ("attention", "SmolLM2 decode, context 512", {**SMOL, "sq": 1, "sk": 512}),
    ("attention", "SmolLM2 prefill 512", {**SMOL, "sq": 512, "sk": 512, "causal": True}),
    ("attention", "Llama-3-8B decode, context 4096", {**LLAMA, "sq": 1, "sk": 4096}),
    ("attention", "Llama-3-8B decode, context 32768", {**LLAMA, "sq": 1, "sk": 32768}),
    ("attention", "Llama-3-8B 4 tokens, context 4096", {**LLAMA, "sq": 4, "sk": 4096, **LATE}),
    ("attention", "Llama-3-8B 8 tokens, context 4096", {**LLAMA, "sq": 8, "sk": 4096, **LATE}),
    ("attention", "Llama-3-8B 8 tokens, all visible", {**LLAMA, "sq": 8, "sk": 4096}),
    ("attention", "Llama-3-8B prefill 512", {**LLAMA, "sq": 512, "sk": 512, "causal": True}),
    ("attention", "8 heads without GQA, decode 4096", {**LLAMA, "hq": 8, "sq": 1, "sk": 4096}),
    ("attention", "ViT-B, 197 patches", {"b": 1, "hq": 12, "hkv": 12, "d": 64, "sq": 197,
                                         "sk": 197}),
    ("attention", "SDXL self, 32 x 32", {"b": 1, "hq": 20, "hkv": 20, "d": 64, "sq": 1024,
                                         "sk": 1024}),
    ("attention", "SDXL cross, 77 tokens", {"b": 1, "hq": 20, "hkv": 20, "d": 64, "sq": 1024,
                                            "sk": 77}),
    ("varlen_attention", "SmolLM2, 4 prompts", {"lengths_q": (40, 200, 17, 128), "hq": 9, "hkv": 3,
                                                **LATE}),
    ("block_sparse_attention", "SmolLM2, 3 packed documents",
     {"b": 1, "hq": 9, "hkv": 3, "d": 64, "sq": 512, "sk": 512, "mask": "document",
      "blocks": "128x128"}),
    ("paged_attention", "SmolLM2 decode, 4 sequences",
     {"context": (500, 300, 80, 700), "hq": 9, "hkv": 3, "d": 64}),
    ("paged_attention", "Llama-3-8B decode, 2 sequences",
     {"context": (1500, 4000), "hq": 32, "hkv": 8, "d": 128}),
    ("mla_paged_attention", "DeepSeek decode, 16 heads",
     {"context": (700, 2000), "heads": 16, "ckv": 512, "kpe": 64}),
    ("grouped_attention", "SmolLM2, 8 ragged prefixes",
     {"items": tuple((i, 1, 0, 256 * (i + 1)) for i in range(8)), "hq": 9, "hkv": 3, "d": 64}),
    ("merge_attention", "Llama-3-8B, 8 parts", {"parts": 8, "tokens": 16, "heads": 32, "d": 128}),
    ("gated_delta_rule", "Qwen3-Next, 64 tokens",
     {"b": 1, "s": 64, "h": 16, "hv": 32, "d": 128, "dv": 128, "norm": True}),
    ("gated_delta_rule", "Qwen3-Next, 1 token", {"b": 1, "s": 1, "h": 16, "hv": 32, "d": 128,
                                                 "dv": 128, "norm": True, "state": True,
                                                 "final": True}),
    ("selective_state_update", "Mamba-2 2.7B, 1 token",
     {"b": 1, "h": 80, "g": 1, "d": 64, "n": 128, "wide_state": True}),
    ("mamba_chunk_scan", "Mamba-2 2.7B, 256 tokens",
     {"b": 1, "s": 256, "h": 80, "g": 1, "d": 64, "n": 128, "final": True}),
    ("causal_conv1d", "Mamba-2 2.7B, 1 token",
     {"b": 1, "c": 5376, "s": 1, "state": 4, "final": True, "tokens_first": True}),
    ("causal_conv1d", "Mamba-2 2.7B, 256 tokens",
     {"b": 1, "c": 5376, "s": 256, "tokens_first": True}),
    ("rms_norm", "SmolLM2, 1 row", {"rows": (1,), "hidden": 576}),
    ("rms_norm", "SmolLM2, 512 rows", {"rows": (512,), "hidden": 576}),
    ("rms_norm", "Llama-3-8B, 1 row", {"rows": (1,), "hidden": 4096}),
    ("rms_norm", "Llama-3-8B, 16 rows", {"rows": (16,), "hidden": 4096}),
    ("rms_norm", "Llama-3-8B, 512 rows", {"rows": (512,), "hidden": 4096}),
    ("rms_norm", "Qwen3 query norm, 1 token", {"rows": (1, 32), "hidden": 128}),
    ("rms_norm", "Qwen3 query norm, 512 tokens", {"rows": (512, 32), "hidden": 128}),
    ("rms_norm", "Gemma offset, 512 rows", {"rows": (512,), "hidden": 2048, "offset": 1.0}),
    ("add_rms_norm", "SmolLM2, 1 row", {"rows": (1,), "hidden": 576}),
    ("add_rms_norm", "Llama-3-8B, 1 row", {"rows": (1,), "hidden": 4096}),
    ("add_rms_norm", "Llama-3-8B, 512 rows", {"rows": (512,), "hidden": 4096}),
    ("layer_norm", "one row of 768", {"rows": (1,), "hidden": 768}),
    ("layer_norm", "ViT-B, 197 rows", {"rows": (197,), "hidden": 768}),
    ("layer_norm", "SDXL, 1024 rows", {"rows": (1024,), "hidden": 1280}),
    ("layer_norm", "ViT-B, float32 weights",
     {"rows": (197,), "hidden": 768, "weight_dtype": "float32"}, ("bfloat16",)),
    ("group_norm", "SDXL 1280 channels, 16 x 16",
     {"b": 1, "c": 1280, "size": (16, 16), "groups": 32}),
    ("group_norm", "SDXL 320 channels, 64 x 64",
     {"b": 1, "c": 320, "size": (64, 64), "groups": 32}),
    ("group_norm", "the same, channels last",
     {"b": 1, "c": 320, "size": (64, 64), "groups": 32, "memory": "channels_last"}),
    ("rope", "SmolLM2, 1 token", {**SMOL, "s": 1}),
    ("rope", "SmolLM2, 512 tokens", {**SMOL, "s": 512}),
    ("rope", "Llama-3-8B, 1 token", {**LLAMA, "s": 1}),
    ("rope", "Llama-3-8B, 16 tokens", {**LLAMA, "s": 16}),
    ("rope", "Llama-3-8B, 512 tokens", {**LLAMA, "s": 512}),
    ("rope", "interleaved, 1 token", {**LLAMA, "s": 1, "style": "interleaved"}),
    ("rope", "interleaved, 512 tokens", {**LLAMA, "s": 512, "style": "interleaved"}),
    ("alibi", "32 heads, decode 4096", {"heads": 32, "sq": 1, "sk": 4096, "align": "bottom_right"}),
    ("alibi", "32 heads, 512 x 512", {"heads": 32, "sq": 512, "sk": 512}),
    ("embedding", "SmolLM2, 1 token", {"shape": (1, 1), "vocab": 49152, "width": 576}),
    ("embedding", "SmolLM2, 512 tokens", {"shape": (1, 512), "vocab": 49152, "width": 576}),
    ("cross_entropy", "SmolLM2, 8 rows", {"rows": (8,), "vocab": 49152}),
    ("cross_entropy", "SmolLM2, 256 rows", {"rows": (256,), "vocab": 49152}),
    ("linear_cross_entropy", "SmolLM2, 64 rows", {"rows": (64,), "vocab": 49152, "width": 576}),
    ("sample", "greedy, SmolLM2", {"batch": 1, "vocab": 49152, "temperature": 0.0,
                                   "logprobs": False}),
    ("sample", "temperature, SmolLM2", {"batch": 1, "vocab": 49152, "temperature": 0.8,
                                        "logprobs": False}),
    ("sample", "top-k 50, Llama-3", {"batch": 1, "vocab": 128256, "top_k": 50, "logprobs": False}),
    ("sample", "top-p 0.9, Llama-3", {"batch": 1, "vocab": 128256, "top_p": 0.9,
                                      "logprobs": False}),
    ("sample", "top-k 50 and top-p 0.9, 8 rows",
     {"batch": 8, "vocab": 49152, "top_k": 50, "top_p": 0.9, "logprobs": False}),
    ("speculative_verify", "4 drafted, SmolLM2", {"batch": 1, "drafted": 4, "vocab": 49152},
     ("float32",)),
    ("speculative_verify_tree", "two by two, SmolLM2", {"batch": 1, "vocab": 49152}, ("float32",)),
    ("linear", "SmolLM2 query, 1 row", {"rows": (1,), "k": 576, "n": 576, "bias": False}),
    ("linear", "SmolLM2 query, 512 rows", {"rows": (512,), "k": 576, "n": 576, "bias": False}),
    ("linear", "Llama-3-8B query, 1 row", {"rows": (1,), "k": 4096, "n": 4096, "bias": False}),
    ("linear", "Llama-3-8B query, 16 rows", {"rows": (16,), "k": 4096, "n": 4096, "bias": False}),
    ("linear", "ViT-B with gelu, 197 rows",
     {"rows": (197,), "k": 768, "n": 3072, "activation": "gelu"}),
    ("mlp", "SmolLM2, 1 row", {"rows": (1,), "hidden": 576, "inner": 1536}),
    ("mlp", "SmolLM2, 64 rows", {"rows": (64,), "hidden": 576, "inner": 1536}),
    ("mlp", "SmolLM2, 512 rows", {"rows": (512,), "hidden": 576, "inner": 1536}),
    ("mlp", "Llama-3.2-1B, 1 row", {"rows": (1,), "hidden": 2048, "inner": 8192}),
    ("mlp", "ViT-B, 197 rows", {"rows": (197,), "hidden": 768, "inner": 3072, "activation": "gelu",
                                "bias": True}),
    ("quantize", "int8, 1 row of 4096", {"rows": (1,), "width": 4096}),
    ("quantize", "int8, 512 rows", {"rows": (512,), "width": 4096}),
    ("quantize", "int4 weight, 1024 rows", {"format": "int4", "rows": (1024,), "width": 2048}),
    ("quantize", "fp8, 512 rows", {"format": "fp8_e4m3", "rows": (512,), "width": 4096}),
    ("quantize", "fp8, 1 row", {"format": "fp8_e4m3", "rows": (1,), "width": 4096}),
    ("dequantize", "int8, 1 row of 4096", {"rows": (1,), "width": 4096}),
    ("dequantize", "int8, 512 rows", {"rows": (512,), "width": 4096}),
    ("dequantize", "int4, 512 rows", {"format": "int4", "rows": (512,), "width": 4096}),
    ("dequantize", "fp8, 512 rows", {"format": "fp8_e4m3", "rows": (512,), "width": 4096}),
    ("dequantize", "nf4, 512 rows", {"format": "nf4", "rows": (512,), "width": 4096}),
    ("quantized_linear", "int8, SmolLM2, 1 row", {"rows": (1,), "k": 576, "n": 1536}),
    ("quantized_linear", "int8, Llama-3-8B, 1 row", {"rows": (1,), "k": 4096, "n": 4096}),
    ("quantized_linear", "int8, 64 rows", {"rows": (64,), "k": 2048, "n": 2048}),
    ("quantized_linear", "int4, Llama-3-8B, 1 row",
     {"format": "int4", "rows": (1,), "k": 4096, "n": 4096, "group": 128}),
    ("grouped_gemm", "8 experts, 1 row each",
     {"sizes": (1, 0, 1, 1, 0, 1, 1, 1), "k": 1024, "n": 512}),
    ("grouped_gemm", "8 experts, 256 rows", {"sizes": (40, 10, 31, 60, 5, 40, 30, 40), "k": 1024,
                                             "n": 512}),
    ("moe_gate", "Qwen3-30B-A3B, 1 token", {"rows": (1,), "experts": 128, "top_k": 8}),
    ("moe_gate", "Qwen3-30B-A3B, 512 tokens", {"rows": (512,), "experts": 128, "top_k": 8}),
    ("moe_gate", "DeepSeek-V3, 64 tokens",
     {"rows": (64,), "experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4, "bias": True,
      "scoring": "sigmoid"}),
    ("moe", "16 experts of 768, 1 token", {"rows": (1,), "experts": 16, "hidden": 1024,
                                           "inner": 768, "top_k": 4}),
    ("moe", "16 experts of 768, 64 tokens", {"rows": (64,), "experts": 16, "hidden": 1024,
                                             "inner": 768, "top_k": 4}),
))

# What one would write. Each takes the call's arguments by name, does what can be done ahead, and
# returns what is called. None: torch has nothing of the kind.
Written = Callable[..., Callable[[], Any] | None]


def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, causal_align: str | None,
               **_: Any) -> Callable[[], Any]:
    sq, sk = query.shape[2], key.shape[2]
    # a model makes its mask once, for all layers
    if is_causal and causal_align == "bottom_right" and sq != sk:
        mask = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(sk - sq)
        return lambda: F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal,
                                                  enable_gqa=True)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, **_: Any) -> Callable[[], Any]:
    size = x.shape[-1:]
    if offset:
        return lambda: F.rms_norm(x.float(), size, weight.float() + offset, eps).to(x.dtype)
    return lambda: F.rms_norm(x, size, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                  **_: Any) -> Callable[[], Any]:
    def run() -> Any:
        total = x + residual
        return F.rms_norm(total, total.shape[-1:], weight, eps), total

    return run


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, **_: Any) -> Callable[[], Any]:
    return lambda: F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float,
                **_: Any) -> Callable[[], Any]:
    return lambda: F.group_norm(x, groups, weight, bias, eps)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str,
          **_: Any) -> Callable[[], Any] | None:
    """As transformers has it, for the one style it has."""
    if style != "rotate_half":
        return None
    cos, sin = (torch.cat((t, t), -1).to(q.dtype) for t in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return lambda: (turned(q), turned(k))


def _embedding(ids: Tensor, weight: Tensor, **_: Any) -> Callable[[], Any]:
    return lambda: F.embedding(ids, weight)


def _cross_entropy(logits: Tensor, targets: Tensor, **_: Any) -> Callable[[], Any]:
    return lambda: F.cross_entropy(logits.float(), targets)


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor,
                          **_: Any) -> Callable[[], Any]:
    return lambda: F.cross_entropy(F.linear(hidden, weight).float(), targets)


def _sample(logits: Tensor, temperature: float, top_k: int, top_p: float,
            **_: Any) -> Callable[[], Any]:
    """As transformers' generate does it, one filter after the other."""
    def run() -> Tensor:
        if temperature == 0.0:
            return logits.argmax(-1)
        scores = logits.float() / temperature
        if top_k:
            scores = scores.masked_fill(scores < scores.topk(top_k)[0][..., -1:], -torch.inf)
        if top_p < 1.0:
            ordered, places = scores.sort()
            beyond = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
            beyond[..., -1:] = False
            scores = scores.masked_fill(beyond.scatter(1, places, beyond), -torch.inf)
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]

    return run


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
            **_: Any) -> Callable[[], Any]:
    if activation == "gelu":
        return lambda: F.gelu(F.linear(x, weight, bias))
    return lambda: F.linear(x, weight, bias)


def _mlp(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str, bias_in: Tensor | None,
         bias_down: Tensor | None, **_: Any) -> Callable[[], Any]:
    if activation == "gelu":
        return lambda: F.linear(F.gelu(F.linear(x, weight_in, bias_in)), weight_down, bias_down)

    def run() -> Tensor:
        gate, up = weight_in.chunk(2)          # the same tensors are given to both sides
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), weight_down)

    return run


def _quantize(x: Tensor, format: str, **_: Any) -> Callable[[], Any] | None:
    if format == "int4":
        return None
    largest, kind = (127.0, torch.int8) if format == "int8" else (448.0, torch.float8_e4m3fn)

    def run() -> Any:
        scales = (x.float().abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
        ratio = x.float() / scales
        return (ratio.round() if format == "int8" else ratio).clamp(-largest,
                                                                    largest).to(kind), scales

    return run


def _dequantize(q: Tensor, scales: Tensor, format: str, out_dtype: str,
                **_: Any) -> Callable[[], Any] | None:
    kind = getattr(torch, out_dtype)
    return None if format in ("int4", "nf4") else lambda: q.to(kind) * scales.to(kind)


def _quantized_linear(x: Tensor, weight_q: Tensor, scales: Tensor, format: str,
                      **_: Any) -> Callable[[], Any] | None:
    return (None if format == "int4"
            else lambda: F.linear(x, weight_q.to(x.dtype) * scales.to(x.dtype)))


def _grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor, **_: Any) -> Callable[[], Any]:
    return lambda: torch.cat([part @ w for part, w in zip(x.split(group_sizes.tolist()), weights)
                              if len(part)])


def _moe_gate(logits: Tensor, top_k: int, n_group: int, **_: Any) -> Callable[[], Any] | None:
    def run() -> Any:
        weights, ids = logits.float().softmax(-1).topk(top_k, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    return run if n_group == 1 else None


def _moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor, topk_weights: Tensor,
         **_: Any) -> Callable[[], Any]:
    """As transformers has it: one expert after the other, those that some token wants."""
    def run() -> Tensor:
        out = torch.zeros_like(x)
        for expert in topk_ids.unique().tolist():
            token, place = torch.where(topk_ids == expert)
            gate, up = F.linear(x[token], w_gate_up[expert]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, w_down[expert]) * topk_weights[token, place, None]
            out.index_add_(0, token, part.to(x.dtype))
        return out

    return run


WRITTEN: dict[str, Written] = {
    "attention": _attention, "rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm, "group_norm": _group_norm, "rope": _rope, "embedding": _embedding,
    "cross_entropy": _cross_entropy, "linear_cross_entropy": _linear_cross_entropy,
    "sample": _sample, "linear": _linear, "mlp": _mlp,
    "quantize": _quantize, "dequantize": _dequantize, "quantized_linear": _quantized_linear,
    "grouped_gemm": _grouped_gemm, "moe_gate": _moe_gate, "moe": _moe}
