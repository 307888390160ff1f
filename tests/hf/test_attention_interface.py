"""The attention function and the masks that transformers gets from us, against formulas written out
here.
"""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
import transformers
from exact import attend as expected
from exact import exact_model
from models import CAUSAL, FAMILIES, WITH_ALL, inputs, padded, tiny, tokens
from transformers import masking_utils
from transformers.cache_utils import DynamicCache, StaticCache

from layerzero.integrations.transformers import masks, register
from layerzero.integrations.transformers.attention import attention_forward
from layerzero.integrations.transformers.masks import Pattern, attention_mask
from layerzero.spec.errors import ConfigError

pytestmark = pytest.mark.integration
CAUSAL_MODULE, PLAIN_MODULE = types.SimpleNamespace(is_causal=True), types.SimpleNamespace(
    is_causal=False)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(queries: int = 6, keys: int = 6, heads: int = 4, kv_heads: int = 2, dim: int = 16,
        **more) -> list:
    return [draw(2, heads, queries, dim, **more), draw(2, kv_heads, keys, dim, seed=1, **more),
            draw(2, kv_heads, keys, dim, seed=2, **more)]


def distance(queries: int, keys: int) -> torch.Tensor:
    """How far a key is left of each query, the last query on the last key."""
    return torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)


def check(out, want, tolerance: float = 2e-6) -> None:
    assert out[1] is None and out[0].is_contiguous() and out[0].shape == want.shape
    torch.testing.assert_close(out[0].double(), want, atol=tolerance, rtol=tolerance)


# the function

def test_is_known_by_name_and_again():
    before = transformers.AttentionInterface()["layerzero"]
    register()
    assert transformers.AttentionInterface()["layerzero"] is before
    assert "layerzero" in transformers.AttentionMaskInterface()


def test_models_take_it_from_config_and_later(calls):
    config = transformers.LlamaConfig(**FAMILIES["llama"][2])
    model = transformers.AutoModelForCausalLM.from_config(config,
                                                          attn_implementation="layerzero").eval()
    model(tokens())
    assert len(calls) == 2
    model.set_attn_implementation("sdpa")
    model(tokens())
    assert len(calls) == 2
    model.set_attn_implementation("layerzero")
    model(tokens())
    assert len(calls) == 4


def test_from_pretrained(tmp_path, calls):
    tiny("llama").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path,
                                                               attn_implementation="layerzero")
    assert loaded.config._attn_implementation == "layerzero"
    torch.testing.assert_close(loaded(tokens()).logits, tiny("llama")(tokens()).logits)
    assert len(calls) == 2


def test_a_model_with_attention_of_its_own_is_left_alone(caplog):
    model = tiny("falcon")
    with caplog.at_level("WARNING"):
        transformers.utils.logging.enable_propagation()
        model.set_attn_implementation("layerzero")
        transformers.utils.logging.disable_propagation()
    assert model.config._attn_implementation == "sdpa" and "does not support setting" in caplog.text


def test_grouped_heads_and_scale(calls):
    q, k, v = qkv()
    check(attention_forward(PLAIN_MODULE, q, k, v, None, scaling=0.3), expected(q, k, v, scale=0.3))
    assert calls[0]["key"].shape[1] == 2        # not repeated


@pytest.mark.parametrize("queries, keys", [(6, 6), (1, 6)])
def test_causal_without_a_mask(queries, keys):
    q, k, v = qkv(queries, keys)
    check(attention_forward(CAUSAL_MODULE, q, k, v, None),
          expected(q, k, v, distance(queries, keys) >= 0))


def test_the_call_says_causal_and_not_the_module():
    q, k, v = qkv()
    check(attention_forward(PLAIN_MODULE, q, k, v, None, is_causal=True),
          expected(q, k, v, distance(6, 6) >= 0))
    check(attention_forward(CAUSAL_MODULE, q, k, v, None, is_causal=False), expected(q, k, v))


def test_keys_of_an_empty_static_cache_are_left_out():
    q, k, v = qkv(4, 9)
    v[:, :, 4:] = math.nan
    check(attention_forward(CAUSAL_MODULE, q, k, v, None),
          expected(q, k[:, :, :4], v[:, :, :4], distance(4, 4) >= 0))


def test_cross_attention():
    q, k, v = qkv(3, 8)
    check(attention_forward(PLAIN_MODULE, q, k, v, None), expected(q, k, v))


@pytest.mark.parametrize("queries, keys", [(9, 9), (1, 9)])
def test_window_without_a_mask(queries, keys):
    q, k, v = qkv(queries, keys)
    gap = distance(queries, keys)
    check(attention_forward(CAUSAL_MODULE, q, k, v, None, sliding_window=4),
          expected(q, k, v, (gap >= 0) & (gap < 4)))


def test_window_both_ways_and_one_that_reaches_everything(calls):
    q, k, v = qkv(9, 9)
    check(attention_forward(PLAIN_MODULE, q, k, v, None, sliding_window=4),
          expected(q, k, v, distance(9, 9).abs() < 4))
    check(attention_forward(CAUSAL_MODULE, q, k, v, None, sliding_window=9),
          expected(q, k, v, distance(9, 9) >= 0))
    assert calls[0]["window_left"] == 3 and calls[1]["window_left"] == -1


def test_softcap():
    q, k, v = qkv()
    check(attention_forward(CAUSAL_MODULE, q, k, v, None, softcap=2.0),
          expected(q, k, v, distance(6, 6) >= 0, softcap=2.0))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2),
                                              (torch.float16, 2e-3)])
def test_masks_of_any_kind(dtype, tolerance):
    q, k, v = qkv(dtype=dtype)
    seen = draw(2, 1, 6, 6) > -0.5
    seen[..., 0] = True
    want = expected(q, k, v, seen)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    check(attention_forward(CAUSAL_MODULE, q, k, v, seen), want, tolerance)
    # float32 beside bfloat16
    check(attention_forward(CAUSAL_MODULE, q, k, v, added), want, tolerance)


def test_position_bias_alone_with_causality_and_with_masks():
    q, k, v = qkv()
    bias = draw(1, 4, 6, 6)
    seen = distance(6, 6) >= 0
    check(attention_forward(PLAIN_MODULE, q, k, v, None, position_bias=bias),
          expected(q, k, v, bias=bias))
    want = expected(q, k, v, seen, bias)
    check(attention_forward(CAUSAL_MODULE, q, k, v, None, position_bias=bias), want)
    check(attention_forward(CAUSAL_MODULE, q, k, v, seen[None, None], position_bias=bias), want)
    added = torch.where(seen, 0.0, -1e9)[None, None]
    check(attention_forward(CAUSAL_MODULE, q, k, v, added, position_bias=bias), want)


def test_selected_keys():
    q, k, v = qkv()
    chosen = torch.stack([torch.stack([torch.tensor([0, i]) for i in range(6)])] * 2)
    seen = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, chosen, True)[:, None]
    check(attention_forward(PLAIN_MODULE, q, k, v, None, indices=chosen), expected(q, k, v, seen))
    causal = (distance(6, 6) >= 0)[None, None].expand(2, 1, 6, 6)
    check(attention_forward(CAUSAL_MODULE, q, k, v, causal, indices=chosen),
          expected(q, k, v, seen & causal))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_sinks(dtype, tolerance):
    q, k, v = qkv(dtype=dtype)
    sinks, seen = draw(4, dtype=dtype), distance(6, 6) >= 0
    check(attention_forward(CAUSAL_MODULE, q, k, v, None, s_aux=sinks),
          expected(q, k, v, seen, sinks=sinks), tolerance)
    mask = seen[None, None].clone()
    check(attention_forward(CAUSAL_MODULE, q, k, v, mask, s_aux=sinks),
          expected(q, k, v, seen, sinks=sinks), tolerance)


def test_gradients_reach_queries_keys_values_sinks_and_bias():
    def tensors():
        return [t.requires_grad_() for t in (*qkv(), draw(4), draw(1, 4, 6, 6))]

    weight = draw(2, 6, 4, 16)
    mine, want = tensors(), tensors()
    *three, sinks, bias = mine
    (attention_forward(CAUSAL_MODULE, *three, None, s_aux=sinks, position_bias=bias)[0]
     * weight).sum().backward()
    *three, sinks, bias = want
    (expected(*three, distance(6, 6) >= 0, bias, sinks=sinks) * weight).sum().backward()
    for a, b in zip(mine, want):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_dropout_keeps_the_mean():
    q, k, v = (t[:1].expand(500, -1, -1, -1) for t in qkv())
    torch.manual_seed(0)
    out = attention_forward(CAUSAL_MODULE, q, k, v, None, dropout=0.3)[0]
    want = expected(q[:1], k[:1], v[:1], distance(6, 6) >= 0)[0]
    assert out.std(0).max() > 0.1
    assert (out.double().mean(0) - want).abs().max() < 0.25


def test_attention_weights_are_none_as_with_sdpa():
    out = tiny("llama", attn_implementation="layerzero")(tokens(), output_attentions=True)
    stock = tiny("llama", attn_implementation="sdpa")(tokens(), output_attentions=True)
    assert out.attentions == stock.attentions
    with pytest.raises(ValueError, match="output_attentions"):
        tiny("llama", attn_implementation="layerzero").config.output_attentions = True


def test_what_is_not_served_is_refused():
    with pytest.raises(ConfigError, match="block_indices"):
        attention_forward(CAUSAL_MODULE, *qkv(), None, block_indices=torch.zeros(1))


# the masks

def pattern_of(mask: torch.Tensor) -> Pattern | None:
    return masks.pattern_of(mask, *mask.shape[-2:])


def by_pattern(pattern: Pattern, queries: int, keys: int) -> torch.Tensor:
    """The mask that a pattern stands for."""
    inside = distance(queries, pattern.last - pattern.first)
    seen = torch.ones_like(inside, dtype=torch.bool)
    seen &= inside >= 0 if pattern.is_causal else seen
    seen &= inside <= pattern.window_left if pattern.window_left >= 0 else seen
    seen &= -inside <= pattern.window_right if pattern.window_right >= 0 else seen
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    mask[:, pattern.first:pattern.last] = seen
    return mask


def mask_arguments(queries, keys, q_offset=0, kv_offset=0, window=None, padding=None, function=None,
                   **more):
    causal = masking_utils.causal_mask_function
    function = (function or (causal if window is None
                             else masking_utils.sliding_window_causal_mask_function(window)))
    return {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": q_offset,
            "kv_offset": kv_offset, "mask_function": function, "attention_mask": padding,
            "local_size": window, "allow_is_causal_skip": True,
            "allow_is_bidirectional_skip": False, "use_vmap": False, "device": "cpu", **more}


GRID = list(itertools.product((1, 2, 5), (0, 3, 8), (0, 2), (0, 4), (None, 1, 3, 6)))


def test_a_pattern_says_what_its_mask_says():
    """Over query lengths, positions, keys that slid out, keys not there yet, and windows."""
    patterns = 0
    for queries, q_offset, kv_offset, more_keys, window in GRID:
        if kv_offset > q_offset:
            continue
        keys = q_offset + queries - kv_offset + more_keys
        inputs = mask_arguments(queries, keys, q_offset, kv_offset, window)
        stock = masking_utils.sdpa_mask(**{**inputs, "allow_is_causal_skip": False})[0, 0]
        mine = attention_mask(**inputs)
        # then is_causal must say it, top-left and past the keys not there
        if mine is None:
            said = (torch.ones(queries, keys, dtype=torch.bool).tril() if queries > 1
                    else torch.ones(1, keys).bool())
        else:
            assert torch.equal(mine[0, 0], stock)
            said = by_pattern(pattern_of(mine), queries, keys)
            patterns += 1
        assert torch.equal(said, stock), inputs
    assert patterns > 50


def test_a_bidirectional_window_has_a_pattern():
    function = masking_utils.sliding_window_bidirectional_mask_function(2)
    inputs = mask_arguments(7, 7, function=function, allow_is_causal_skip=False,
                            allow_is_bidirectional_skip=True, local_size=2)
    mask = attention_mask(**inputs)
    assert torch.equal(by_pattern(pattern_of(mask), 7, 7), mask[0, 0])


def test_padding_has_no_pattern_unless_it_slid_out_of_the_window():
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[1, :2] = False
    mask = attention_mask(**mask_arguments(3, 8, 5, padding=padding))
    assert pattern_of(mask) is None and not mask[1, ..., :2].any()
    slid = attention_mask(**mask_arguments(1, 8, 7, window=3, padding=padding))
    assert pattern_of(slid) == Pattern(5, 8, False, -1, -1)


def test_other_shapes_have_no_pattern():
    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    packed = masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)))
    for function in (chunked, packed):
        inputs = mask_arguments(6, 6, function=function, allow_is_causal_skip=False)
        assert pattern_of(attention_mask(**inputs)) is None


@pytest.mark.parametrize("inference", [False, True])
def test_a_changed_mask_has_no_pattern(inference):
    with torch.inference_mode(inference):
        mask = attention_mask(**mask_arguments(3, 8, 5, batch_size=1))
        assert pattern_of(mask) == Pattern(0, 8, True, -1, -1)
        assert pattern_of(mask[..., :7]) is None and pattern_of(mask.clone()) is None
        assert masks.pattern_of(mask, 3, 7) is None            # for other keys than it was made for
        mask[:, :, 0, 7] = True
        assert pattern_of(mask) is None


def test_no_call_of_a_sliding_window_model_needs_a_mask(calls):
    """Prefill, one token at a time, several at once, and past the window."""
    for family in ("mistral", "gemma3", "gpt_oss"):
        model = tiny(family, attn_implementation="layerzero")
        cache = DynamicCache(config=model.config)
        words = tokens(1, 20)
        for start, end in ((0, 9), (9, 10), (10, 13), (13, 14), (14, 20)):
            model(words[:, start:end], past_key_values=cache)
    assert len(calls) == 3 * 5 * 2 and all(call["attn_mask"] is None for call in calls)


def test_a_static_cache_is_read_as_far_as_it_is_filled(calls):
    model = tiny("llama", attn_implementation="layerzero")
    cache = StaticCache(config=model.config, max_cache_len=32)
    words = tokens(1, 12)
    with torch.no_grad():
        parts = [model(words[:, start:end], past_key_values=cache).logits
                 for start, end in ((0, 5), (5, 8), (8, 9))]
        want = tiny("llama")(words[:, :9]).logits
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)
    assert [call["key"].shape[2] for call in calls] == [5, 5, 8, 8, 9, 9]


def test_packed_sequences_do_not_see_each_other():
    words = tokens(1, 11)
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    for family in ("llama", "mistral", "gemma3"):
        model = tiny(family, attn_implementation="layerzero")
        with torch.no_grad():
            packed = model(words, position_ids=places, use_cache=False).logits
            apart = torch.cat([model(words[:, :5]).logits, model(words[:, 5:]).logits], 1)
        torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


# whole models

def logits_of(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return out.logits_per_image if hasattr(out, "logits_per_image") else out.logits


def in_double(family, inputs) -> torch.Tensor:
    return logits_of(exact_model(family),
                     {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})


INTERFACED = [family for family in FAMILIES if family != "falcon"]


@pytest.mark.parametrize("family", INTERFACED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_as_close_to_the_truth_as_stock(family, dtype):
    model_inputs = inputs(family)
    truth = in_double(family, model_inputs)
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model_inputs.items()}

    def error(implementation):
        return (logits_of(tiny(family, attn_implementation=implementation).to(dtype), cast)
                - truth).abs()

    mine, stock = error("layerzero"), error(WITH_ALL.get(family, "sdpa"))
    assert mine.max() <= 2 * stock.max() + 1e-6, (mine.max(), stock.max())


# Falcon has attention of its own.
@pytest.mark.parametrize("family", [family for family in CAUSAL if family != "falcon"])
def test_padding_on_the_left_changes_nothing(family):
    model, inputs = tiny(family, attn_implementation="layerzero"), padded(pads=(0, 5))
    with torch.no_grad():
        places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        together = model(**inputs, position_ids=places).logits[1, 5:]
        alone = model(inputs["input_ids"][1:, 5:]).logits[0]
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)
