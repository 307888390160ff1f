"""lz.accelerate of models that see: the language model inside gets the decode step, through the
outer generate()."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402
from composites import COMPOSITES, composite, with_picture, words  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from layerzero.integrations.transformers.accelerate import accelerate, unaccelerate  # noqa: E402
from layerzero.integrations.transformers.decoding.accelerated import Accelerated, ModelWatch  # noqa: E402

pytestmark = pytest.mark.integration
NEW = 8


def generate(model, inputs, new: int = NEW, **options):
    torch.manual_seed(5)
    return model.generate(**inputs, max_new_tokens=new, **{"do_sample": False, **options})


@pytest.mark.parametrize("name", [n for n in COMPOSITES if n != "llava of a window"])
def test_the_same_tokens(name):
    model, inputs = composite(name), with_picture(name)
    before = generate(model, inputs)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        logits = model(**inputs).logits
    report = accelerate(model, measure=False)
    assert not report.served, "tokens of the trial are not the user's"
    assert torch.equal(generate(model, inputs), before)
    assert report.served == {"step": NEW - 1} and not report.declined, str(report)
    assert report.error < 1e-4 and "layers of its" in str(report)
    report.undo()
    assert not any("forward" in vars(m) or "__reduce_ex__" in vars(m) for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)                      # to the last bit
    assert all(torch.equal(v, state[k]) and v.stride() == state[k].stride()
               for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["llava of a window", "qwen2_5_vl", "gemma3"])
def test_batches_with_padding(name):
    model, inputs = composite(name), with_picture(name, (0, 3))
    before = generate(model, inputs)
    report = accelerate(model, measure=False)
    assert torch.equal(generate(model, inputs), before)
    assert report.served == {"step": NEW - 1} and not report.declined, str(report)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_fixed_buffers(name):
    """With and without a picture in turns: after one, a token stands at another position where
    these have axes."""
    model, cases = composite(name), [with_picture(name), words(), with_picture(name)]
    before = [generate(model, inputs) for inputs in cases]
    report = accelerate(model, measure=False, capture=True)
    for inputs, tokens in zip(cases, before):
        assert torch.equal(generate(model, inputs), tokens)
    assert report.served == {"captured": 3 * (NEW - 1)} and not report.declined, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_in_a_cuda_graph(name):
    model = composite(name).cuda()
    cases = [{k: v.cuda() for k, v in inputs.items()} for inputs in (with_picture(name), words())]
    before = [generate(model, inputs) for inputs in cases]
    report = accelerate(model, measure=False)
    assert all(torch.equal(generate(model, inputs), tokens) for inputs,
               tokens in zip(cases, before))
    assert report.served == {"captured": 2 * (NEW - 1)}, str(report)
    assert "in a CUDA graph" in str(report)


@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 20}, {"num_beams": 3}], ids=str)
def test_other_ways_to_generate(how):
    model, inputs = composite("qwen2_5_vl"), with_picture("qwen2_5_vl")
    try:
        before = generate(model, inputs, **how)
    except RuntimeError as e:                  # transformers 5.17 with beams and a picture
        pytest.skip(f"transformers itself does not serve it: {e}")
    with accelerate(model, measure=False) as report:
        assert torch.equal(generate(model, inputs, **how), before)
        assert report.served == {"step": NEW - 1} and not report.declined, str(report)


def test_what_is_declined_is_counted():
    model, inputs = composite("llava"), words()
    before = generate(model, inputs)
    report = accelerate(model, measure=False)

    class Mine(DynamicCache):
        """Whose layers may be anything."""

    assert torch.equal(generate(model, inputs, past_key_values=Mine()), before)
    assert not report.served and sum(report.declined.values()) == NEW - 1
    assert list(report.declined) == ["a cache that is Mine"]


def test_it_is_timed():
    report = accelerate(composite("llava"), seconds=0.02)
    assert {"prefill", "decode"} <= report.gains.keys()


def test_a_copy_is_not_accelerated():
    model, inputs = composite("blip2"), with_picture("blip2")
    before = generate(model, inputs)
    accelerate(model, measure=False, patch=False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not any(isinstance(vars(m).get("forward"), Accelerated) for m in other.modules())
        assert not unaccelerate(other) and torch.equal(generate(other, inputs), before)
    assert unaccelerate(model)


def test_a_tower_of_another_dtype():
    model = composite("llava")
    model.model.language_model.to(torch.bfloat16), model.lm_head.to(torch.bfloat16)
    report = accelerate(model, measure=False)
    assert "a decode step for the 2 layers of its LlamaModel" in str(report)
    with torch.no_grad():
        generate(model, words())
    assert report.served == {"step": NEW - 1}


def test_two_language_models_get_one_step():
    small, large = models.tiny("llama", num_hidden_layers=1), models.tiny("qwen2")
    pair = torch.nn.ModuleDict({"small": small, "large": large})
    report = accelerate(pair, measure=False)
    assert report._step.model is large.model
    assert any("no decode step for its LlamaModel" in text for text in report.left)
    generate(large, words())
    assert report.served == {"step": NEW - 1}


# One token that comes embedded, and masks that come made.

def one_by_one(model, ids, embedded: bool, mask=None):
    """The hidden states of the tokens after the fourth."""
    with torch.no_grad():
        cache, results = model(ids[:, :4], use_cache=True).past_key_values, []
        for i in range(4, ids.shape[1]):
            token = ids[:, i:i + 1]
            inputs = {"input_ids": token, "past_key_values": cache, "use_cache": True}
            if embedded:
                inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
            results.append(model(**inputs, attention_mask=mask and mask(i + 1))[0])
    return torch.cat(results, 1)


@pytest.mark.parametrize("name, capture", [
    ("llama", False), ("gemma2", True), ("gpt2", True), ("granite", False)])
def test_an_embedded_token(name, capture):
    models.FAMILIES.setdefault("granite", ("GraniteForCausalLM", "GraniteConfig", {
        **models._GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}))
    model, ids = models.tiny(name), models.tokens(2, 9)
    expected = one_by_one(model, ids, True)
    report = accelerate(model, measure=False, capture=capture)
    torch.testing.assert_close(one_by_one(model, ids, True), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one_by_one(model, ids, False), expected, rtol=1e-4, atol=1e-4)
    assert report.served == {"captured" if capture else "step": 10}, str(report)
    assert not report.declined


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_that_is_made(additive):
    model, ids = models.tiny("llama"), models.tokens(2, 9)

    def mask(keys):
        shown = torch.ones(2, 1, 1, keys, dtype=torch.bool)
        shown[1, ..., :2] = False
        return torch.where(shown, 0.0, torch.finfo(torch.float32).min) if additive else shown

    expected = one_by_one(model, ids, False, mask)
    report = accelerate(model, measure=False)
    torch.testing.assert_close(one_by_one(model, ids, False, mask), expected, rtol=1e-4, atol=1e-4)
    assert report.served == {"step": 5} and not report.declined, str(report)


@pytest.mark.parametrize("mask, why", [
    (lambda keys: torch.full((2, 1, 1, keys), 0.5), "a mask that adds to the scores"),
    (lambda keys: torch.ones(2, 4, 1, keys, dtype=torch.bool), "and not for one token"),
    (lambda keys: {"sliding_attention": None}, "masks for other kinds of layers")])
def test_a_mask_that_says_more_is_declined(mask, why):
    model, ids = models.tiny("qwen2"), models.tokens(2, 5)
    report = accelerate(model, measure=False)
    message = pytest.raises(KeyError) if isinstance(mask(5),
                                                    dict) else nullcontext()  # by the model
    with message:
        one_by_one(model, ids, False, mask)
    assert not report.served and why in next(iter(report.declined))


def test_a_hook_on_the_inside_is_heard():
    model, received = composite("llava"), []
    report = accelerate(model, measure=False)
    layer = model.model.language_model.layers[0]
    hook = layer.register_forward_hook(lambda *args: received.append(1))
    generate(model, words())
    assert len(received) == NEW and list(report.declined.values()) == [NEW - 1]
    hook.remove()
    assert not ModelWatch(model.model.language_model).disturbed()
    generate(model, words())
    assert report.served == {"step": NEW - 1}
