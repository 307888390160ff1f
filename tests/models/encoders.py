"""Models with an encoder, each written twice: from `lz` calls, and in plain torch.

T5        encoder and decoder with relative position bias, RMS norm, unscaled attention, gated GELU
ViT       pre-norm blocks over the tokens of a patch embedding, which are a view of its image
SD  group norm, self-attention, attention to a text of another width, GEGLU; image in, image out

Weights are a mapping from name to tensor and are shared by both. What is left to torch in the `lz`
models is what has no arithmetic worth choosing a kernel for: views, residual additions, and the
integers of T5's buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz

Weights = Mapping[str, Tensor]


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    return {name: w.to(dtype) for name, w in weights.items()}


class _Maker:
    """Random weights whose layers keep the size of what passes through them."""

    def __init__(self, seed: int) -> None:
        self.gen = torch.Generator().manual_seed(seed)
        self.made: dict[str, Tensor] = {}

    def matrix(self, name: str, out: int, width: int, gain: float = 1.0) -> None:
        self.made[name] = torch.randn(out, width, generator=self.gen) * gain / math.sqrt(width)

    def affine(self, name: str, out: int, width: int) -> None:
        self.matrix(f"{name}.weight", out, width)
        self.vector(f"{name}.bias", out, 0.0)

    def vector(self, name: str, size: int, around: float) -> None:
        self.made[name] = around + 0.2 * torch.randn(size, generator=self.gen)

    def norm(self, name: str, size: int, bias: bool = True) -> None:
        self.vector(f"{name}.weight", size, 1.0)
        if bias:
            self.vector(f"{name}.bias", size, 0.0)


# T5. The names of the weights are those of Hugging Face's T5.

@dataclass(frozen=True)
class T5Shape:
    width: int = 48
    heads: int = 4
    head_dim: int = 16                         # heads * head_dim is not the width, as in T5 v1.1
    inner: int = 80
    layers: int = 2
    vocab: int = 67
    buckets: int = 8
    max_distance: int = 20
    eps: float = 1e-6


def t5_weights(shape: T5Shape, seed: int = 44) -> Weights:
    """Each token has a successor that the model tends to, so that no choice of a token is a close
    one."""
    make = _Maker(seed)
    joint = shape.heads * shape.head_dim
    make.matrix("shared.weight", shape.vocab, shape.width, gain=3 * math.sqrt(shape.width))
    make.matrix("lm_head.weight", shape.vocab, shape.width)
    for stack, parts in (("encoder", ("SelfAttention",)),
                         ("decoder", ("SelfAttention", "EncDecAttention"))):
        for i in range(shape.layers):
            for j, part in enumerate(parts):
                at = f"{stack}.block.{i}.layer.{j}"
                make.norm(f"{at}.layer_norm", shape.width, bias=False)
                for name, gain in (("q", shape.head_dim ** -0.25), ("k", shape.head_dim ** -0.25),
                                   ("v", 1.0)):
                    # there is no scale
                    make.matrix(f"{at}.{part}.{name}.weight", joint, shape.width, gain)
                make.matrix(f"{at}.{part}.o.weight", shape.width, joint)
            at = f"{stack}.block.{i}.layer.{len(parts)}"
            make.norm(f"{at}.layer_norm", shape.width, bias=False)
            for name, out, width in (("wi_0", shape.inner, shape.width),
                                     ("wi_1", shape.inner, shape.width),
                                     ("wo", shape.width, shape.inner)):
                make.matrix(f"{at}.DenseReluDense.{name}.weight", out, width)
        make.matrix(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                    shape.buckets, shape.heads,
                    gain=math.sqrt(shape.heads))
        make.norm(f"{stack}.final_layer_norm", shape.width, bias=False)
    successor = F.normalize(
        make.made["shared.weight"][torch.randperm(shape.vocab, generator=make.gen)])
    make.made["lm_head.weight"] = 0.75 * successor + 1.3 * F.normalize(make.made["lm_head.weight"])
    return make.made


def t5_buckets(shape: T5Shape, seq_q: int, seq_k: int, both_ways: bool) -> Tensor:
    """(seq_q, seq_k): which bucket the distance falls into; half of them exact, half by logarithm.
    The last query stands at the last key."""
    distance = torch.arange(seq_k)[None] - torch.arange(seq_k - seq_q, seq_k)[:, None]
    buckets, bucket = shape.buckets, torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        bucket = (distance > 0) * buckets
    distance = distance.abs() if both_ways else (-distance).clamp_min(0)
    exact = buckets // 2
    ratio = torch.log(distance.clamp_min(1) / exact) / math.log(shape.max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
    return bucket + torch.where(distance < exact, distance, far)


def padding_of(lengths: Sequence[int]) -> Tensor:
    """(batch, 1, 1, longest), True where there is a token."""
    return (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None])[:, None, None]


class TorchT5:
    """Everything anew at every step, as a textbook has it."""

    def __init__(self, shape: T5Shape, weights: Weights) -> None:
        self.shape, self.w = shape, weights

    def norm(self, at: str, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.eps)
        return self.w[f"{at}.weight"] * scaled.to(x.dtype)

    def attention(self, at: str, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (F.linear(t, self.w[f"{at}.{n}.weight"]).unflatten(-1,
                                                                     (self.shape.heads,
                                                                      -1)).transpose(1, 2)
                   for n, t in (("q", x), ("k", context), ("v", context)))
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
        return F.linear(out.transpose(1, 2).flatten(2), self.w[f"{at}.o.weight"])

    def feed_forward(self, at: str, x: Tensor) -> Tensor:
        gate = F.gelu(F.linear(x, self.w[f"{at}.wi_0.weight"]), approximate="tanh")
        return F.linear(gate * F.linear(x, self.w[f"{at}.wi_1.weight"]), self.w[f"{at}.wo.weight"])

    def bias(self, stack: str, seq: int) -> Tensor:
        table = self.w[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        return F.embedding(t5_buckets(self.shape, seq, seq, stack == "encoder"),
                           table).permute(2, 0, 1)[None]

    def stack(self, stack: str, ids: Tensor, mask: Tensor,
              cross: tuple[Tensor, Tensor] | None) -> Tensor:
        x = F.embedding(ids, self.w["shared.weight"])
        for i in range(self.shape.layers):
            at = f"{stack}.block.{i}.layer"
            n = self.norm(f"{at}.0.layer_norm", x)
            x = x + self.attention(f"{at}.0.SelfAttention", n, n, mask)
            if cross is not None:
                n = self.norm(f"{at}.1.layer_norm", x)
                x = x + self.attention(f"{at}.1.EncDecAttention", n, *cross)
            last = 1 if cross is None else 2
            x = x + self.feed_forward(f"{at}.{last}.DenseReluDense",
                                      self.norm(f"{at}.{last}.layer_norm", x))
        return self.norm(f"{stack}.final_layer_norm", x)

    def encode(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        bias = self.bias("encoder", ids.shape[1])
        return self.stack("encoder", ids, bias.masked_fill(~padding_of(lengths), -math.inf), None)

    def logits(self, ids: Tensor, memory: Tensor, lengths: Sequence[int]) -> Tensor:
        """(batch, len(ids), vocab)."""
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        mask = self.bias("decoder", ids.shape[1]).masked_fill(future, -math.inf)
        out = self.stack("decoder", ids, mask, (memory, padding_of(lengths)))
        return F.linear(out, self.w["lm_head.weight"])


class LzT5:
    """From lz calls.

    With caches it computes new tokens only; the encoder's keys and values are written once.
    """

    def __init__(self, shape: T5Shape, weights: Weights) -> None:
        self.shape, self.w = shape, weights

    def caches(self, kind: str, memory: Tensor, lengths: Sequence[int], **sizes: Any) -> list[Any]:
        """One for each layer of the decoder, with one sequence for each row and the encoder's side
        filled."""
        caches = []
        rows = torch.cat([row[:n] for row, n in zip(memory, lengths)])
        for i in range(self.shape.layers):
            cache = lz.kv_cache(kind, kv_heads=self.shape.heads, head_dim=self.shape.head_dim,
                                dtype=memory.dtype,
                                cross_len=max(lengths), **sizes)
            for _ in lengths:
                cache.add()
            at = f"decoder.block.{i}.layer.1.EncDecAttention"
            cache.cross.append(self.heads(f"{at}.k", rows), self.heads(f"{at}.v", rows),
                               lengths=lengths)
            caches.append(cache)
        return caches

    def heads(self, name: str, x: Tensor) -> Tensor:
        return lz.linear(x, self.w[f"{name}.weight"]).unflatten(-1, (self.shape.heads, -1))

    def bias(self, stack: str, seq_q: int, seq_k: int) -> Tensor:
        """(1, heads, seq_q, seq_k); a decoder's hides what comes later."""
        table = self.w[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        buckets = t5_buckets(self.shape, seq_q, seq_k, stack == "encoder")
        bias = lz.embedding(buckets, table).permute(2, 0, 1)[None]
        if stack == "encoder" or seq_q == 1:
            return bias
        return bias.masked_fill(torch.ones(seq_q, seq_k, dtype=torch.bool).triu(1 + seq_k - seq_q),
                                -math.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return lz.attention(q, k, v, mask, scale=1.0, layout="bshd")

    def stack(self, stack: str, ids: Tensor,
              attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
              cross: Callable[[int, Tensor], Tensor] | None) -> Tensor:
        eps = self.shape.eps
        x = lz.embedding(ids, self.w["shared.weight"])
        change: Tensor | None = None
        for i in range(self.shape.layers):
            at = f"{stack}.block.{i}.layer"
            n, x = self.added(change, x, f"{at}.0.layer_norm")
            q, k, v = (self.heads(f"{at}.0.SelfAttention.{name}", n) for name in "qkv")
            change = lz.linear(attend(i, q, k, v).flatten(-2),
                               self.w[f"{at}.0.SelfAttention.o.weight"])
            if cross is not None:
                n, x = self.added(change, x, f"{at}.1.layer_norm")
                out = cross(i, self.heads(f"{at}.1.EncDecAttention.q", n))
                change = lz.linear(out.flatten(-2), self.w[f"{at}.1.EncDecAttention.o.weight"])
            last = f"{at}.{1 if cross is None else 2}"
            n, x = self.added(change, x, f"{last}.layer_norm")
            gate, up, down = (self.w[f"{last}.DenseReluDense.{name}.weight"]
                              for name in ("wi_0", "wi_1", "wo"))
            change = lz.mlp(n, gate, down, "geglu_tanh", weight_up=up)
        assert change is not None
        return lz.add_rms_norm(change, x, self.w[f"{stack}.final_layer_norm.weight"], eps)[0]

    def added(self, change: Tensor | None, x: Tensor, norm: str) -> tuple[Tensor, Tensor]:
        """The next normed input, and the residual that it was made of."""
        weight = self.w[f"{norm}.weight"]
        if change is None:
            return lz.rms_norm(x, weight, self.shape.eps), x
        return lz.add_rms_norm(change, x, weight, self.shape.eps)

    def encode(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        mask = self.bias("encoder", *ids.shape[1:] * 2).masked_fill(~padding_of(lengths), -math.inf)
        return self.stack("encoder", ids, lambda i, q, k, v: self.attend(q, k, v, mask), None)

    def logits(self, ids: Tensor, memory: Tensor, lengths: Sequence[int]) -> Tensor:
        """Without a cache."""
        mask, seen = self.bias("decoder", *ids.shape[1:] * 2), padding_of(lengths)

        def cross(i: int, q: Tensor) -> Tensor:
            at = f"decoder.block.{i}.layer.1.EncDecAttention"
            return self.attend(q, self.heads(f"{at}.k", memory), self.heads(f"{at}.v", memory),
                               seen)

        out = self.stack("decoder", ids, lambda i, q, k, v: self.attend(q, k, v, mask), cross)
        return lz.linear(out, self.w["lm_head.weight"])

    def next_logits(self, ids: Tensor, caches: Sequence[Any]) -> Tensor:
        """Of the new tokens `ids` (batch, tokens) after what the caches hold."""
        held = caches[0].length(0)
        mask = self.bias("decoder", ids.shape[1], held + ids.shape[1])

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            caches[i].append(k, v)
            keys, values = zip(*(caches[i].gather(s) for s in caches[i].sequences))
            return self.attend(q, torch.stack(keys), torch.stack(values), mask)

        out = self.stack("decoder", ids, attend, lambda i, q: caches[i].cross.attend(q, scale=1.0))
        return lz.linear(out, self.w["lm_head.weight"])


# ViT

def vit_weights(width: int, inner: int, patch: int, layers: int = 2, seed: int = 0) -> Weights:
    make = _Maker(seed)
    make.affine("patch", width, 3 * patch * patch)
    make.made["patch.weight"] = make.made["patch.weight"].view(width, 3, patch, patch)
    for i in range(layers):
        make.norm(f"{i}.norm1", width)
        make.affine(f"{i}.qkv", 3 * width, width)
        make.affine(f"{i}.proj", width, width)
        make.norm(f"{i}.norm2", width)
        make.affine(f"{i}.fc1", inner, width)
        make.affine(f"{i}.fc2", width, inner)
    return make.made


def pair(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def lz_vit(x: Tensor, w: Weights, heads: int, layout: str = "bshd") -> Tensor:
    """Blocks over tokens (batch, tokens, width) of any strides."""
    for i in range(sum(name.endswith(".qkv.bias") for name in w)):
        qkv = lz.linear(lz.layer_norm(x, *pair(w, f"{i}.norm1"), eps=1e-6), *pair(w, f"{i}.qkv"))
        # views with the row of all three
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
        if layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = lz.attention(q, k, v, layout=layout)
        out = out.transpose(1, 2) if layout == "bhsd" else out
        x = x + lz.linear(out.flatten(-2), *pair(w, f"{i}.proj"))
        n = lz.layer_norm(x, *pair(w, f"{i}.norm2"), eps=1e-6)
        (up, up_bias), (down, down_bias) = pair(w, f"{i}.fc1"), pair(w, f"{i}.fc2")
        x = x + lz.mlp(n, up, down, "gelu", bias_in=up_bias, bias_down=down_bias)
    return x


def torch_vit(x: Tensor, w: Weights, heads: int) -> Tensor:
    for i in range(sum(name.endswith(".qkv.bias") for name in w)):
        n = F.layer_norm(x, x.shape[-1:], *pair(w, f"{i}.norm1"), eps=1e-6)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2)
                   for t in F.linear(n, *pair(w, f"{i}.qkv")).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.linear(out, *pair(w, f"{i}.proj"))
        n = F.layer_norm(x, x.shape[-1:], *pair(w, f"{i}.norm2"), eps=1e-6)
        x = x + F.linear(F.gelu(F.linear(n, *pair(w, f"{i}.fc1"))), *pair(w, f"{i}.fc2"))
    return x


# SD. The weights lie as in its checkpoints: of GEGLU's projection the gate is the second half.

def sd_weights(channels: int, text_width: int, seed: int = 0) -> Weights:
    make = _Maker(seed)
    for name in ("norm", "norm1", "norm2", "norm3"):
        make.norm(name, channels)
    for name in ("proj_in", "proj_out", "attn1.to_out", "attn2.to_out"):
        make.affine(name, channels, channels)
    for name, width in (("attn1", channels), ("attn2", text_width)):
        make.matrix(f"{name}.to_q.weight", channels, channels)
        make.matrix(f"{name}.to_k.weight", channels, width)
        make.matrix(f"{name}.to_v.weight", channels, width)
    make.affine("ff.proj", 8 * channels, channels)
    make.affine("ff.out", channels, 4 * channels)
    return make.made


def lz_sd(image: Tensor, text: Tensor, w: Weights, heads: int) -> Tensor:
    """(batch, channels, height, width) in, the same out, in the memory order that it came in."""
    def attention(name: str, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (lz.linear(t, w[f"{name}.to_{n}.weight"]).unflatten(-1, (heads, -1))
                   for n, t in (("q", x), ("k", context), ("v", context)))
        return lz.linear(lz.attention(q, k, v, layout="bshd").flatten(-2),
                         *pair(w, f"{name}.to_out"))

    x = lz.group_norm(image, 32, *pair(w, "norm"), eps=1e-6)
    x = lz.linear(x.permute(0, 2, 3, 1).flatten(1, 2), *pair(w, "proj_in"))
    n = lz.layer_norm(x, *pair(w, "norm1"))
    x = x + attention("attn1", n, n)
    x = x + attention("attn2", lz.layer_norm(x, *pair(w, "norm2")), text)
    (up, gate), (up_bias, gate_bias) = (t.chunk(2) for t in pair(w, "ff.proj"))
    x = x + lz.mlp(lz.layer_norm(x, *pair(w, "norm3")), gate, w["ff.out.weight"], "geglu",
                   weight_up=up, bias_in=gate_bias, bias_up=up_bias, bias_down=w["ff.out.bias"])
    x = lz.linear(x, *pair(w, "proj_out"))
    return image + x.unflatten(1, image.shape[-2:]).permute(0, 3, 1, 2)


def torch_sd(image: Tensor, text: Tensor, w: Weights, heads: int) -> Tensor:
    def attention(name: str, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (F.linear(t, w[f"{name}.to_{n}.weight"]).unflatten(-1, (heads, -1)).transpose(
            1, 2)
                   for n, t in (("q", x), ("k", context), ("v", context)))
        out = F.scaled_dot_product_attention(q, k, v)
        return F.linear(out.transpose(1, 2).flatten(2), *pair(w, f"{name}.to_out"))

    width = image.shape[1:2]
    x = F.group_norm(image, 32, *pair(w, "norm"), eps=1e-6)
    x = F.linear(x.permute(0, 2, 3, 1).flatten(1, 2), *pair(w, "proj_in"))
    n = F.layer_norm(x, width, *pair(w, "norm1"))
    x = x + attention("attn1", n, n)
    x = x + attention("attn2", F.layer_norm(x, width, *pair(w, "norm2")), text)
    up, gate = F.linear(F.layer_norm(x, width, *pair(w, "norm3")), *pair(w, "ff.proj")).chunk(2, -1)
    x = x + F.linear(up * F.gelu(gate), *pair(w, "ff.out"))
    return image + F.linear(x, *pair(w, "proj_out")).unflatten(1, image.shape[-2:]).permute(0, 3, 1,
                                                                                            2)
