"""Beams and several returned sequences: the prompt is computed, kept and read once, and the tokens
are those of transformers."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_accelerate import build, prompt  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

from layerzero.backends.native import build as native_build  # noqa: E402
from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoding import shared_prompt  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import captured  # noqa: E402
from layerzero.integrations.transformers.decoding.growing_cache import GrowingLayer  # noqa: E402
from layerzero.integrations.transformers.decoding.shared_prompt import SHARED, SharedLayer  # noqa: E402

pytestmark = pytest.mark.integration
needs_native = pytest.mark.skipif(native_build.is_built() is not True,
                                  reason="needs the native kernels: lz build")


@pytest.fixture(scope="module")
def stock():
    model = build()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def accelerated(stock, monkeypatch):
    """Chunks and buffers so small that tokens go beyond the first."""
    monkeypatch.setattr(shared_prompt, "MIN_PROMPT_TOKENS", 4)
    monkeypatch.setattr(shared_prompt, "MIN_CAPACITY", 4)
    model = copy.deepcopy(stock)
    accelerate(model, measure=False, patch=False)
    return model


def generate(model, ids, **how):
    torch.manual_seed(5)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 16,
                                  "do_sample": False, "return_dict_in_generate": True, **how})


@needs_native
@pytest.mark.parametrize("batch, how", [
    (1, {"num_beams": 4}), (2, {"num_beams": 3, "num_return_sequences": 2}),
    (1, {"num_return_sequences": 8, "do_sample": True}),
    (2, {"num_return_sequences": 2, "do_sample": True, "no_repeat_ngram_size": 2})], ids=str)
def test_the_tokens_of_transformers(stock, accelerated, batch, how):
    ids = prompt(batch)
    want, got = generate(stock, ids, **how), generate(accelerated, ids, **how)
    assert torch.equal(got.sequences, want.sequences)
    report = accelerated._layerzero_acceleration
    assert report.served == {"step": 15, SHARED: 1} and not report.declined
    assert report.kernels["attention over a shared prompt"] == "native.grouped_attention"
    for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers):
        assert mine.shared and mine.prompts == batch
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)


def test_beams_in_fixed_buffers_do_not_move(stock):
    """As on a GPU: only the first token takes the cache over, others copy what is a beam's own."""
    model, ids, taken = copy.deepcopy(stock), prompt(2), []
    report = accelerate(model, measure=False, patch=False, capture=True)
    with pytest.MonkeyPatch.context() as patch:
        take = captured.FixedBuffers.take
        patch.setattr(captured.FixedBuffers, "take", lambda *args: taken.append(take(*args)))
        got = generate(model, ids, num_beams=3)
    want = generate(stock, ids, num_beams=3)
    assert torch.equal(got.sequences, want.sequences) and len(taken) == 1
    assert report.served == {"captured": 15, SHARED: 1}
    for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}],
                         ids=str)
def test_each_row_has_its_own_where_it_cannot_be_read_at_once(stock, how):
    model, ids = build("Mistral", sliding_window=5), prompt(2)
    want = generate(model, ids, **how)
    report = accelerate(model, measure=False, patch=False)
    got = generate(model, ids, **how)
    assert torch.equal(got.sequences, want.sequences) and report.served[SHARED] == 1
    assert not any(type(layer) is SharedLayer for layer in got.past_key_values.layers)


def test_padding_is_repeated_with_the_prompt(stock, accelerated):
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    how = {"num_beams": 3, "attention_mask": mask}
    want, got = generate(stock, ids, **how), generate(accelerated, ids, **how)
    assert torch.equal(got.sequences, want.sequences)
    assert accelerated._layerzero_acceleration.served[SHARED] == 1


@pytest.mark.parametrize("between", [
    lambda layer: None, lambda layer: layer.crop(-4),
    lambda layer: layer.batch_select_indices(torch.tensor([0, 2, 3, 1])),
    lambda layer: layer.reorder_cache(torch.tensor([3, 2, 1, 0]))])
def test_rows_that_go_on_from_others(between):
    """Only what is the same is left where it is, whatever was done to the layer before."""
    gen = torch.Generator().manual_seed(0)
    first = torch.randn((2, 2, 2, 5, 8), generator=gen).repeat_interleave(2, 1)
    layers = GrowingLayer(), DynamicLayer()
    for layer in layers:
        layer.update(*first)
    layers[0].reserve(1)
    layers[0].repeated = 2, 5
    with torch.no_grad():
        for change in (lambda layer: None, between):
            for layer in layers:
                change(layer)
            more = torch.randn((2, 4, 2, 2, 8), generator=gen)
            for layer in layers:
                layer.update(*more)
                layer.reorder_cache(torch.tensor([1, 1, 3, 2]))
    assert torch.equal(layers[0].keys, layers[1].keys)
    assert torch.equal(layers[0].values, layers[1].values)


def make_layers() -> tuple[SharedLayer, DynamicLayer]:
    """A layer of two prompts with three rows each, and one that transformers would have."""
    gen = torch.Generator().manual_seed(0)
    single, plain = DynamicLayer(), DynamicLayer()
    first = torch.randn((2, 2, 2, 5, 8), generator=gen)
    single.update(*first)
    plain.update(*first.repeat_interleave(3, 1))
    return SharedLayer(single, 3), plain


@pytest.mark.parametrize("change", [
    lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0, 5, 4, 4])),       # within prompts
    lambda layer: layer.reorder_cache(torch.tensor([5, 0, 0, 1, 4, 4])),
    lambda layer: layer.batch_select_indices(torch.tensor([1, 3])),
    lambda layer: layer.batch_repeat_interleave(2), lambda layer: layer.crop(-3),
    lambda layer: layer.crop(-9), copy.deepcopy])
def test_what_transformers_does_to_a_layer(change, monkeypatch):
    monkeypatch.setattr(shared_prompt, "MIN_CAPACITY", 2)
    layers = make_layers()
    gen = torch.Generator().manual_seed(1)
    for tokens in (1, 3, 4):
        more = torch.randn((2, 6, 2, tokens, 8), generator=gen)
        for layer in layers:
            with torch.no_grad():
                layer.update(*more)
    changed = [change(layer) or layer for layer in layers]
    assert changed[0].get_seq_length() == changed[1].get_seq_length()
    more = torch.randn((2, *changed[1].keys.shape[:2], 1, 8), generator=gen)
    for layer in changed:
        with torch.no_grad():
            layer.update(*more)
    assert torch.equal(changed[0].keys, changed[1].keys)
    assert torch.equal(changed[0].values, changed[1].values)


def test_a_cache_with_a_mask_goes_on_without_sharing(stock, accelerated):
    """A mask that hides a token of one row."""
    outputs = []
    with torch.no_grad():
        for model in (stock, accelerated):
            cache = DynamicCache(config=model.config)
            model(prompt(1), past_key_values=cache)
            if model is accelerated:
                cache.layers = [SharedLayer(layer, 2) for layer in cache.layers]
            else:
                cache.batch_repeat_interleave(2)
            mask = torch.ones(2, 8, dtype=torch.int64)
            mask[1, 2] = 0
            outputs.append(model(torch.tensor([[5], [6]]), past_key_values=cache,
                                 attention_mask=mask, position_ids=torch.full((2, 1), 7)).logits)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
