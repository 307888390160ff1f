"""An attention that the user chose or registered stays; an eager one keeps its weights and its rows
of padding.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from models import FAMILIES, inputs, padded, tiny, tokens
from torch.nn import functional as F
from transformers import masking_utils, modeling_utils

from layerzero.integrations.transformers import implementations
from layerzero.integrations.transformers.accelerate import accelerate, unaccelerate
from layerzero.integrations.transformers.masks import Pattern, plain_pattern
from layerzero.integrations.transformers.patch import patch, patched, unpatch

pytestmark = pytest.mark.integration
T5GEMMA = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
           "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
           "max_position_embeddings": 64, "sliding_window": 6,
           "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"],
           "pad_token_id": 0}
EAGER = ("gemma2", "gpt_oss", "t5gemma", "llama", "bert")


def build(family: str, **changes):
    if family == "t5gemma":
        FAMILIES.setdefault("t5gemma", ("T5GemmaForConditionalGeneration", "T5GemmaConfig", {
            "encoder": T5GEMMA, "decoder": T5GEMMA, "vocab_size": 128,
            "tie_word_embeddings": False}))
    return tiny(family, attn_implementation="eager", **changes)


def arguments(family: str, pads: tuple[int, ...] = (0, 5)):
    inputs = padded(pads=pads)
    return {**inputs, "decoder_input_ids": tokens(2, 7, seed=3)} if family == "t5gemma" else inputs


def left(report) -> str:
    return "; ".join(row.why for row in report.left)


@pytest.fixture
def half():
    """An attention that someone registered: half of what sdpa gives."""
    calls = []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        out, weights = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
        return out / 2, weights

    transformers.AttentionInterface.register("half", forward)
    transformers.AttentionMaskInterface.register("half", masking_utils.sdpa_mask)
    yield calls
    del transformers.AttentionInterface._global_mapping["half"]
    del transformers.AttentionMaskInterface._global_mapping["half"]


@torch.no_grad()
def test_a_registered_attention_stays(half):
    model, model_inputs = tiny("llama", attn_implementation="half"), inputs("llama")
    stock, config = model(**model_inputs).logits, model.config
    report = patch(model)
    assert ("'half'" in left(report) and "attention" not in report.counts()
            and report.counts()["linear"] == 8)
    half.clear()
    torch.testing.assert_close(model(**model_inputs).logits, stock, rtol=1e-4, atol=1e-4)
    assert len(half) == 2 and model.config is config and config._attn_implementation == "half"
    unpatch(model)
    assert model(**model_inputs).logits.equal(stock)


@torch.no_grad()
def test_a_registered_attention_gets_no_decode_step(half):
    model, ids = tiny("llama", attn_implementation="half"), tokens(1, 8)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    report = accelerate(model, measure=False)
    assert not report.kernels and any("'half'" in text for text in report.left)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert unaccelerate(model) and not unaccelerate(model)


@torch.no_grad()
def test_one_part_of_a_model_has_its_own_attention(half):
    model, model_inputs = tiny("clip"), inputs("clip")
    model.set_attn_implementation({"text_config": "half", "vision_config": "sdpa"})
    stock = model(**model_inputs).logits_per_text
    report = patch(model)
    assert report.counts()["attention"] == 2 and "'half'" in left(report)
    assert model.text_model.config._attn_implementation == "half"
    assert model.vision_model.config._attn_implementation == "layerzero"
    half.clear()
    torch.testing.assert_close(model(**model_inputs).logits_per_text, stock, rtol=1e-4, atol=1e-4)
    assert len(half) == 2


@pytest.mark.parametrize("family", ("llama", "falcon"))
@torch.no_grad()
def test_another_function_in_the_place_of_torchs_stays(family, monkeypatch):
    """As those of other libraries say to do it: F.scaled_dot_product_attention = theirs."""
    model, model_inputs, own = tiny(family), inputs(family), F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *args, **kwargs: own(*args, **kwargs) / 2)
    stock = model(**model_inputs).logits
    report = accelerate(model, measure=False)
    assert ("attention" not in report.patched.counts()
            and "scaled_dot_product_attention is" in left(report.patched))
    assert not report.kernels
    torch.testing.assert_close(model(**model_inputs).logits, stock, rtol=1e-4, atol=1e-4)
    report.undo()
    monkeypatch.undo()
    patch(model)
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *args, **kwargs: own(*args, **kwargs) / 2)
    # that is the latest choice
    torch.testing.assert_close(model(**model_inputs).logits, stock, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_choice_that_is_made_later_is_followed(half):
    model, ids = tiny("llama"), tokens(1, 8)
    twin = copy.deepcopy(model)
    report = accelerate(model, measure=False)
    for one in (model, twin):
        one.set_attn_implementation("half")
    served = sum(report.served.values())
    assert torch.equal(*(one.generate(ids, max_new_tokens=6, do_sample=False)
                         for one in (model, twin)))
    assert sum(report.served.values()) == served and "'half', which was chosen since" in str(report)
    assert unaccelerate(model) and model.config._attn_implementation == "half"
    assert model(ids).logits.equal(twin(ids).logits)


@torch.no_grad()
def test_torchs_attention_replaced_after_accelerate(monkeypatch):
    model, ids, own = tiny("llama"), tokens(1, 8), F.scaled_dot_product_attention
    twin = copy.deepcopy(model)
    report = accelerate(model, measure=False)
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *args, **kwargs: own(*args, **kwargs) / 2)
    assert torch.equal(*(one.generate(ids, max_new_tokens=6, do_sample=False)
                         for one in (model, twin)))
    assert any("scaled_dot_product_attention is" in why for why in report.declined)


@pytest.mark.parametrize("name", ("sdpa", "eager"))
@torch.no_grad()
def test_a_known_name_with_another_function_is_not_known(name, monkeypatch):
    functions, own = modeling_utils.ALL_ATTENTION_FUNCTIONS, modeling_utils.ALL_ATTENTION_FUNCTIONS[
        "sdpa"]
    monkeypatch.setitem(functions._local_mapping, name,
                        lambda *args, **kwargs: own(*args, **kwargs))
    assert f"{name!r} was chosen" in left(patch(tiny("llama", attn_implementation=name)))
    monkeypatch.undo()
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(masks._local_mapping, name, masking_utils.flex_attention_mask)
    assert f"{name!r} was chosen" in left(patch(tiny("llama", attn_implementation=name)))


@pytest.mark.parametrize("change", [
    lambda out, weights: (out * 1.1, weights), lambda out, weights: (out.transpose(1, 2), weights),
    lambda out, weights: 1 / 0])
def test_an_eager_function_that_computes_something_else_is_left(change, monkeypatch):
    code = transformers.models.llama.modeling_llama
    own = code.eager_attention_forward
    monkeypatch.setattr(code, "eager_attention_forward",
                        lambda *args, **kwargs: change(*own(*args, **kwargs)))
    report = patch(tiny("llama", attn_implementation="eager"))
    assert "something else than lz.attention" in left(report) and "attention" not in report.counts()


def outputs(model, inputs, **more):
    out = model(**inputs, **more)
    return {n: v for n, v in out.items() if "attentions" in n}, out.logits


@pytest.mark.parametrize("family", EAGER)
@torch.no_grad()
def test_an_eager_model_keeps_its_weights_and_its_padding(family):
    model, inputs = build(family), arguments(family)
    stock_weights, stock = outputs(model, inputs, output_attentions=True)
    config, keys = model.config, set(vars(model.config))
    report = patch(model, only=("attention", "rope"))
    assert report.counts()["attention"] == (2 if family != "t5gemma" else 6), report
    assert (model.config is config and set(vars(config)) == keys
            and config._attn_implementation == "eager")
    weights, _ = outputs(model, inputs, output_attentions=True)
    assert weights.keys() == stock_weights.keys()
    for name, layers in stock_weights.items():
        assert len(weights[name]) == len(layers) > 0
        for ours, want in zip(weights[name], layers):
            torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
    size = float(stock.abs().max())
    # of padding too
    torch.testing.assert_close(model(**inputs).logits, stock, rtol=1e-4, atol=1e-5 * size)
    unpatch(model)
    assert model(**inputs).logits.equal(stock)
    assert type(next(m for m in model.modules()
                     if implementations.interface_forward(m))).__module__.startswith("transformers")


@torch.no_grad()
def test_weights_are_asked_for_in_other_ways(calls):
    model, model_inputs = build("gemma2"), inputs("gemma2")
    patch(model)
    calls.clear()                              # those of trying it out
    model(**model_inputs)
    assert len(calls) == 2
    model.config.output_attentions = True      # which an implementation that has none would refuse
    assert len(model(**model_inputs).attentions) == 2 and len(calls) == 2
    model.config.output_attentions = False
    seen = []
    handle = model.model.layers[1].self_attn.register_forward_hook(
        lambda m, args, out: seen.append(out[1]))
    assert (model(**model_inputs).attentions is None and len(calls) == 3
            and seen[0].shape == (2, 4, 12, 12))
    handle.remove()
    model(**model_inputs)
    assert len(calls) == 5
    ids = model.generate(model_inputs["input_ids"], max_new_tokens=3, do_sample=False,
                         output_attentions=True,
                         return_dict_in_generate=True)
    assert (len(ids.attentions) == 3 and all(layer is not None for step in ids.attentions
                                             for layer in step))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@torch.no_grad()
def test_padding_in_half_precision(dtype):
    model, inputs = build("llama", num_hidden_layers=1).to(dtype), arguments("llama")
    stock = model.model(**inputs).last_hidden_state.float()
    patch(model, only="attention")
    ours = model.model(**inputs).last_hidden_state.float()
    assert float((ours - stock).abs().max()) <= 0.05 * float(stock.abs().max())


@torch.no_grad()
def test_a_plain_mask_needs_no_mask(calls):
    model = build("gemma2")
    patch(model)
    calls.clear()
    model(tokens(2, 12))
    assert ([call["attn_mask"] for call in calls] == [None, None]
            and all(call["is_causal"] for call in calls))
    assert [call["window_left"] for call in calls] == [5, -1]
    calls.clear()
    model(**padded(12))
    assert all(call["attn_mask"] is not None for call in calls)


def test_patterns_of_values():
    def mask(queries, keys, window=None, hide=None):
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        if hide is not None:
            hidden[hide] = ~hidden[hide]
        return torch.where(hidden, torch.finfo(torch.float32).min,
                           0.0).expand(2, 1, queries, keys).contiguous()

    assert plain_pattern(mask(5, 5), 5, 5, None) == plain_pattern(mask(5, 5), 5, 5,
                                                                  9) == Pattern(0, 5, True, -1, -1)
    assert plain_pattern(mask(3, 8), 3, 8, 4) == Pattern(0, 8, True, -1, -1)
    assert plain_pattern(mask(3, 8, 4), 3, 8, 4) == Pattern(0, 8, True, 3, -1)
    assert plain_pattern(mask(1, 8), 1, 8, None) == Pattern(0, 8, False, -1, -1)
    assert plain_pattern(torch.zeros(1, 1, 4, 6), 4, 6, None) == Pattern(0, 6, False, -1, -1)
    assert plain_pattern(torch.zeros(1, 1, 6, 4), 6, 4, None) == Pattern(0, 4, False, -1, -1)
    assert plain_pattern(mask(3, 8, 4), 3, 8, 5) is plain_pattern(mask(5, 5, hide=(4, 0)), 5, 5,
                                                                  None) is None
    changed = mask(5, 5)
    assert plain_pattern(changed, 5, 5, None) is not None
    changed[1, 0, 4, 0] = -1.0
    assert plain_pattern(changed, 5, 5, None) is None


def test_gradients_and_dropout_of_an_eager_model():
    model, ids = build("llama", attention_dropout=0.0), tokens(2, 9)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    stock = gradients()
    patch(model, only="attention")
    torch.testing.assert_close(gradients(), stock, rtol=1e-3, atol=1e-5)
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    ours = model(ids).logits
    unpatch(model)
    torch.manual_seed(0)
    assert model(ids).logits.equal(ours)       # the stock function draws


@pytest.mark.parametrize("family, again", [
    ("gemma2", copy.deepcopy), ("bert", copy.deepcopy),
    ("bert", lambda m: pickle.loads(pickle.dumps(m)))])
@torch.no_grad()
def test_an_eager_model_is_copied_and_pickled(family, again):
    model, model_inputs = build(family), inputs(family)
    patch(model, only=("attention", "rope"))
    want = model(**model_inputs).logits
    twin = again(model)
    assert twin(**model_inputs).logits.equal(want) and patch(twin, only=("attention",
                                                                         "rope")).changed == 0
    assert unpatch(twin) == 2 and patch(twin, only="attention").counts() == {"attention": 2}


def test_a_block_inside_a_patched_model_leaves_it_patched():
    """Of one attention module both its rope and its eager function are served, by different calls.
    """
    model = build("gemma2")
    patch(model, only="rope")
    kept = [type(m) for m in model.modules()]
    with patched(model, only="attention") as report:
        assert report.counts()["attention"] == 2
    assert [type(m) for m in model.modules()] == kept
    patch(model, only="attention")
    assert patch(model, only=("attention", "rope")).changed == 0
    other = tiny("llama")
    patch(other, only="attention")
    with patched(other, only=("rope", "attention")):
        pass
    assert all(layer.self_attn.config._attn_implementation == "layerzero"
               for layer in other.model.layers)
    unpatch(model), unpatch(other)


def test_an_error_in_patch_leaves_the_model_as_it_was(monkeypatch):
    from layerzero.integrations.transformers import patch as home

    model = tiny("llama")
    classes, config = [type(m) for m in model.modules()], model.config

    def fault(*args):
        raise RuntimeError("in the middle of it")

    for name in ("_patch_attention", "_patch_sampling"):
        with monkeypatch.context() as there:
            there.setattr(home, name, fault)
            with pytest.raises(RuntimeError, match="middle"):
                patch(model)
        assert [type(m) for m in model.modules()] == classes and model.config is config
