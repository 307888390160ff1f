"""Models with an encoder from `lz` calls only, against the same models in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from encoders import (
    LzT5,
    T5Shape,
    TorchT5,
    cast,
    lz_sd,
    lz_vit,
    sd_weights,
    t5_buckets,
    t5_weights,
    torch_sd,
    torch_vit,
    vit_weights,
)
from torch import Tensor

import layerzero as lz

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [str(d)[6:] for d in DTYPES]
# of values around 1 to 10, after some twenty operations
FP32 = {"rtol": 1e-5, "atol": 3e-5}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)


def check(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """float32: the same numbers. Below: at most twice as far from float64 as the plain model is."""
    assert got.shape == plain.shape and got.dtype == plain.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, plain, **FP32)
    error, eager = (float((t.double() - exact).abs().max()) for t in (got, plain))
    allowed = 2 * eager + (1e-5 if got.dtype == torch.float32 else 0.0)
    assert error <= allowed, f"error {error:.3g} of {got.dtype}; plain torch has {eager:.3g}"


def calls() -> dict[str, int]:
    return {op: sum(by_kernel.values()) for op, by_kernel in lz.stats().calls.items()}


def calls_since(before: dict[str, int]) -> dict[str, int]:
    return {op: n - before.get(op, 0) for op, n in calls().items() if n != before.get(op, 0)}


# T5

SHAPE = T5Shape()
LENGTHS = (11, 6)                              # of the encoder's inputs: the second row is padded
PROMPT = 5
STEPS = 32
KINDS = {
    "paged": {"pages": 2 * -(-(PROMPT + STEPS) // 8), "page_size": 8},
    "chunked": {"chunk_size": 16}, "contiguous": {"sequences": 2, "max_len": PROMPT + STEPS},
    "paged, by head": {"pages": 24, "page_size": 4, "layout": "HND"}}


def texts(shape: T5Shape = SHAPE) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    return (torch.randint(shape.vocab, (len(LENGTHS), max(LENGTHS)), generator=gen),
            torch.randint(shape.vocab, (len(LENGTHS), PROMPT), generator=gen))


def generate(next_logits: Callable[[Tensor], Tensor], prompt: Tensor,
             greedy: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The prompt with 32 tokens behind it, and the logits of all but the last.

    `next_logits` gets what is new.
    """
    ids = prompt
    logits = next_logits(prompt)
    seen = [logits]
    for _ in range(STEPS):
        new = greedy(seen[-1][:, -1])[:, None]
        ids = torch.cat((ids, new), 1)
        seen.append(next_logits(new))
    return ids, torch.cat(seen, 1)


def remembering(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """From a model that wants all tokens every time, one that takes the new ones."""
    held: list[Tensor] = []

    def run(new: Tensor) -> Tensor:
        held.append(new)
        return logits(torch.cat(held, 1))[:, -new.shape[1]:]

    return run


def lz_greedy(logits: Tensor) -> Tensor:
    return lz.sample(logits, temperature=0.0)


@lru_cache(maxsize=None)
def plain_t5(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and logits of the plain model, and both stages in float64 along the same tokens."""
    weights = cast(t5_weights(SHAPE), dtype)
    source, prompt = texts()
    model, wide = TorchT5(SHAPE, weights), TorchT5(SHAPE, cast(weights, torch.float64))
    memory, exact_memory = model.encode(source, LENGTHS), wide.encode(source, LENGTHS)
    ids, logits = generate(remembering(lambda ids: model.logits(ids, memory, LENGTHS)), prompt,
                           lambda logits: logits.argmax(-1))
    return ids, logits, memory, wide.logits(ids, exact_memory, LENGTHS)


def used(memory: Tensor) -> Tensor:
    """Without the rows of the padding, which nothing reads."""
    return torch.cat([row[:n] for row, n in zip(memory, LENGTHS)])


@each_dtype
def test_t5_encoder(dtype):
    weights, (source, _) = cast(t5_weights(SHAPE), dtype), texts()
    exact = TorchT5(SHAPE, cast(weights, torch.float64)).encode(source, LENGTHS)
    check(used(LzT5(SHAPE, weights).encode(source, LENGTHS)), used(plain_t5(dtype)[2]), used(exact))


def memory_of(cache: Any) -> Tensor:
    """The keys and values of the encoder, a copy."""
    return torch.cat([t for s in cache.sequences for t in cache.cross.gather(s)])


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_t5_with_a_cache(dtype, kind):
    ids, plain, _, exact = plain_t5(dtype)
    model, (source, prompt) = LzT5(SHAPE, cast(t5_weights(SHAPE), dtype)), texts()
    caches = model.caches(kind.partition(",")[0], model.encode(source, LENGTHS), LENGTHS,
                          **KINDS[kind])
    written = [memory_of(cache) for cache in caches]
    before = calls()
    got_ids, logits = generate(lambda new: model.next_logits(new, caches), prompt, lz_greedy)
    made = calls_since(before)
    assert torch.equal(got_ids, ids)
    check(logits, plain, exact)
    turns = 1 + STEPS
    assert made["mlp"] == turns * SHAPE.layers and made["sample"] == STEPS
    # self and cross
    assert made["attention"] + made.get("paged_attention", 0) == 2 * turns * SHAPE.layers
    # no key or value of the encoder is made again
    assert made["linear"] == turns * (6 * SHAPE.layers + 1)
    for cache, once in zip(caches, written):
        assert torch.equal(memory_of(cache), once)
        assert [cache.cross.length(s) for s in cache.sequences] == list(LENGTHS)
        assert [cache.length(s) for s in cache.sequences] == [PROMPT + STEPS] * len(LENGTHS)
        assert (cache.key.untyped_storage().data_ptr()
                != cache.cross.key.untyped_storage().data_ptr())


@each_dtype
def test_t5_without_a_cache(dtype):
    ids, plain, _, exact = plain_t5(dtype)
    model, (source, prompt) = LzT5(SHAPE, cast(t5_weights(SHAPE), dtype)), texts()
    memory = model.encode(source, LENGTHS)
    got_ids, logits = generate(remembering(lambda ids: model.logits(ids, memory, LENGTHS)), prompt,
                               lz_greedy)
    assert torch.equal(got_ids, ids)
    check(logits, plain, exact)


def test_t5_cache_on_is_cache_off():
    model, (source, prompt) = LzT5(SHAPE, t5_weights(SHAPE)), texts()
    memory = model.encode(source, LENGTHS)
    caches = model.caches("paged", memory, LENGTHS, **KINDS["paged"])
    with_cache = generate(lambda new: model.next_logits(new, caches), prompt, lz_greedy)
    without = generate(remembering(lambda ids: model.logits(ids, memory, LENGTHS)), prompt,
                       lz_greedy)
    assert torch.equal(with_cache[0], without[0])
    torch.testing.assert_close(with_cache[1], without[1], **FP32)


def test_t5_encoder_cache_is_written_once():
    model, (source, _) = LzT5(SHAPE, t5_weights(SHAPE)), texts()
    cache = model.caches("paged", model.encode(source, LENGTHS), LENGTHS, **KINDS["paged"])[0]
    rows = torch.zeros(sum(LENGTHS), SHAPE.heads, SHAPE.head_dim)
    with pytest.raises(lz.errors.InvalidCall, match="written once"):
        cache.cross.append(rows, rows, lengths=LENGTHS)


@each_dtype
def test_t5_chooses_clearly_and_not_always_the_same(dtype):
    """So that equal tokens say something, and rounding does not decide them."""
    ids, plain, _, exact = plain_t5(dtype)
    assert all(len(set(row.tolist())) > 8 for row in ids[:, PROMPT:])
    best, second = exact[:, PROMPT - 1:-1].topk(2, -1).values.unbind(-1)
    assert float((best - second).min()) > 4 * float((plain.double() - exact).abs().max())


@pytest.mark.integration
def test_t5_is_hugging_faces():
    transformers = pytest.importorskip("transformers")
    weights, (source, prompt) = t5_weights(SHAPE), texts()
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=SHAPE.vocab, d_model=SHAPE.width, d_kv=SHAPE.head_dim, d_ff=SHAPE.inner,
        num_layers=SHAPE.layers, num_heads=SHAPE.heads,
        relative_attention_num_buckets=SHAPE.buckets,
        relative_attention_max_distance=SHAPE.max_distance, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, layer_norm_epsilon=SHAPE.eps, dropout_rate=0.0)).eval()
    shared = {f"{stack}.embed_tokens.weight": weights["shared.weight"]
              for stack in ("encoder", "decoder")}
    # not tied to the embedding, as in v1.1
    theirs.lm_head = torch.nn.Linear(SHAPE.width, SHAPE.vocab, bias=False)
    theirs.load_state_dict({**weights, **shared})
    attend = (torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]).long()
    with torch.no_grad():
        want = theirs(input_ids=source, attention_mask=attend, decoder_input_ids=prompt).logits
    model = LzT5(SHAPE, weights)
    memory = model.encode(source, LENGTHS)
    torch.testing.assert_close(model.logits(prompt, memory, LENGTHS), want, **FP32)


def test_t5_buckets_of_a_few_distances():
    there = t5_buckets(T5Shape(buckets=8, max_distance=16), 1, 30, both_ways=False)[0].flip(0)
    assert there[:5].tolist() == [0, 1, 2, 3, 4] and there[16:].tolist() == [7] * 14
    both = t5_buckets(T5Shape(buckets=8, max_distance=16), 3, 3, both_ways=True)
    assert both.tolist() == [[0, 5, 6], [1, 0, 5], [2, 1, 0]]


# ViT

VIT = {"width": 96, "inner": 160, "patch": 8}
VIT_HEADS = 4


def patches(dtype: torch.dtype, memory: str, weights: dict[str, Tensor]) -> Tensor:
    """What a patch embedding makes of two images, in this memory order: (2, width, 6, 5)."""
    image = torch.randn(2, 3, 48, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = F.conv2d(image, weights["patch.weight"], weights["patch.bias"], stride=VIT["patch"])
    return out.contiguous(memory_format=torch.channels_last if memory == "channels_last"
                          else torch.contiguous_format)


def tokens_of(image: Tensor) -> Tensor:
    """(batch, pixels, channels) without a copy, whatever the memory order."""
    tokens = (image.flatten(2).transpose(1, 2) if image.is_contiguous()
              else image.permute(0, 2, 3, 1).flatten(1, 2))
    assert tokens.data_ptr() == image.data_ptr()
    return tokens


@each_dtype
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("memory", ["channels_last", "channels_first", "every other pixel"])
def test_vit(dtype, memory, layout):
    weights = cast(vit_weights(**VIT), dtype)
    tokens = tokens_of(patches(dtype, "channels_first" if memory == "channels_first"
                               else "channels_last", weights))
    tokens = tokens[:, ::2] if memory == "every other pixel" else tokens
    assert tokens.is_contiguous() == (memory == "channels_last")
    before = calls()
    got = lz_vit(tokens, weights, VIT_HEADS, layout)
    assert calls_since(before) == {"layer_norm": 4, "linear": 4, "attention": 2, "mlp": 2}
    exact = torch_vit(tokens.double(), cast(weights, torch.float64), VIT_HEADS)
    check(got, torch_vit(tokens, weights, VIT_HEADS), exact)


@pytest.mark.parametrize("memory", ["channels_last", "channels_first"])
def test_vit_learns_as_plain_torch_does(memory):
    weights = {name: w.requires_grad_() for name, w in vit_weights(**VIT).items()
               if not name.startswith("patch")}
    image = patches(torch.float32, memory, vit_weights(**VIT)).requires_grad_()
    wanted = [image, *weights.values()]
    grads = [torch.autograd.grad(model(tokens_of(image), weights, VIT_HEADS).square().mean(),
                                 wanted)
             for model in (lz_vit, torch_vit)]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# SD

TEXT = 77


@each_dtype
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 40), (2, 64)],
                         ids=["head_dim=40", "head_dim=64"])
@pytest.mark.parametrize("memory", ["channels_last", "channels_first"])
def test_sd_block(dtype, heads, head_dim, memory):
    channels, width = heads * head_dim, 96
    weights = cast(sd_weights(channels, width), dtype)
    gen = torch.Generator().manual_seed(2)
    image = torch.randn(2, channels, 6, 7, generator=gen).to(dtype)
    text = torch.randn(2, TEXT, width, generator=gen).to(dtype)
    if memory == "channels_last":
        image = image.contiguous(memory_format=torch.channels_last)
    before = calls()
    got = lz_sd(image, text, weights, heads)
    assert calls_since(before) == {"group_norm": 1, "layer_norm": 3, "linear": 10, "attention": 2,
                                   "mlp": 1}
    assert got.is_contiguous(memory_format=torch.channels_last) == image.is_contiguous(
        memory_format=torch.channels_last)
    exact = torch_sd(image.double(), text.double(), cast(weights, torch.float64), heads)
    check(got, torch_sd(image, text, weights, heads), exact)
