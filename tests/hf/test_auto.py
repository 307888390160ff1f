"""lz.auto(): models are patched as they are loaded, and only then."""

from __future__ import annotations

import os

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402
from helpers import collect_garbage, run_python  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.integrations import auto as module  # noqa: E402
from layerzero.integrations.transformers.replacements import recipe_of  # noqa: E402
from layerzero.spec.errors import ConfigError  # noqa: E402
from layerzero.spec.event import Fallback  # noqa: E402

pytestmark = pytest.mark.integration
LOADERS = ("from_pretrained", "_from_config")


@pytest.fixture(autouse=True)
def off():
    """It is off before and after each test, and nothing is listed."""
    stock = {name: vars(PreTrainedModel)[name] for name in LOADERS}
    assert not module.Auto(False).on
    yield
    lz.auto(False).unpatch()
    assert {name: vars(PreTrainedModel)[name] for name in LOADERS} == stock


@pytest.fixture
def saved(tmp_path):
    models.tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def patched(model) -> int:
    return sum(recipe_of(m) is not None for m in model.modules())


def generate(model):
    model.generation_config.eos_token_id = None
    return model.generate(models.tokens(1, 9), max_new_tokens=8, do_sample=False)


def test_what_is_loaded_is_patched(saved):
    stock = AutoModelForCausalLM.from_pretrained(saved)
    before, logits = generate(stock), stock(models.tokens()).logits
    auto = lz.auto()
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    config = AutoModelForCausalLM.from_config(stock.config)
    own = transformers.LlamaForCausalLM.from_pretrained(saved)
    assert patched(stock) == 0 and all(map(patched, (loaded, config, own)))
    assert [entry.model for entry in auto.models] == [loaded, config, own]
    assert torch.equal(generate(loaded), before)
    assert loaded.config._attn_implementation == "layerzero"
    assert "lz.auto is on, 3 models loaded so far" in str(auto) and "lz.attention" in str(auto)

    assert lz.auto(False).models[0].model is loaded            # off: those that are patched stay so
    assert patched(loaded) and patched(AutoModelForCausalLM.from_pretrained(saved)) == 0
    assert auto.unpatch() == 3 and not auto.models and patched(loaded) == 0
    assert torch.equal(loaded(models.tokens()).logits, logits)                 # to the last bit


def test_one_model_can_be_unpatched(saved):
    with lz.auto():
        model = AutoModelForCausalLM.from_pretrained(saved)
    lz.unpatch(model)
    assert patched(model) == 0 and lz.auto(False).unpatch() == 1


def test_a_block_ends_it_as_it_was_before(saved):
    with lz.auto() as outer:
        with lz.auto(False) as inner:
            assert not inner.on and not patched(AutoModelForCausalLM.from_pretrained(saved))
        with lz.auto():
            pass
        assert outer.on
    assert not outer.on


def test_what_is_not_loaded_is_left():
    composite = transformers.LlavaConfig(
        vision_config={**models._VISION, "model_type": "clip_vision_model"},
        text_config={**models._GROUPED, "model_type": "llama"}, image_token_id=100)
    with lz.auto() as auto:
        assert patched(models.tiny("llama")) == 0
        assert patched(transformers.LlavaForConditionalGeneration(composite)) == 0
        whole = transformers.AutoModelForImageTextToText.from_config(composite)
    assert [entry.model for entry in auto.models] == [whole] and patched(whole.model.language_model)


def test_a_part_of_the_users_own_module_is_patched(saved):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language = AutoModelForCausalLM.from_pretrained(saved)

    with lz.auto():
        assert patched(Own().language)


def test_loading_info_is_returned_as_ever(saved):
    with lz.auto():
        model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert patched(model) and "missing_keys" in info


def test_an_attention_that_is_named_stays(saved):
    with lz.auto():
        eager = {"attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(saved, **eager)
        own = transformers.LlamaForCausalLM.from_pretrained(saved, **eager)
        config = transformers.AutoConfig.from_pretrained(saved)
        loaded = AutoModelForCausalLM.from_config(config, **eager)
        default = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="sdpa")
    assert default.config._attn_implementation == "layerzero"
    assert [bool(entry.note) for entry in lz.auto(False).models] == [True, True, True, False]
    for one in (model, own, loaded):
        assert one.config._attn_implementation == "eager" and patched(one)
        recipes = [recipe for m in one.modules() if (recipe := recipe_of(m)) is not None]
        assert not any(recipe.kind == "attention" or recipe.eager for recipe in recipes)


def test_an_attention_that_is_registered_stays(saved):
    import exact  # noqa: F401  registers one

    config = transformers.AutoConfig.from_pretrained(saved)
    config._attn_implementation = "exact"
    with lz.auto() as auto:
        model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == "exact"
    assert "attn_implementation='exact' was chosen for it and stays" in str(auto)


def test_an_error_leaves_the_model_as_it_was(saved, monkeypatch, emitted):
    def broken(model, **options):
        raise RuntimeError("no luck")

    monkeypatch.setattr(module, "patch", broken)
    with lz.auto() as auto:
        model = AutoModelForCausalLM.from_pretrained(saved)
    assert patched(model) == 0
    assert "LlamaForCausalLM: left as it was\nRuntimeError: no luck" in str(auto)
    assert [e.op for e in emitted if isinstance(e, Fallback)] == ["auto"]


def test_a_load_that_fails_says_what_it_said(tmp_path, saved):
    with lz.auto() as auto:
        (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="safetensors"):
            transformers.LlamaForCausalLM.from_pretrained(saved)
        (tmp_path / "elsewhere").rename(tmp_path / "model.safetensors")
        assert patched(AutoModelForCausalLM.from_pretrained(saved)) and len(auto.models) == 1


def test_models_that_are_gone_are_not_kept(saved):
    with lz.auto() as auto:
        AutoModelForCausalLM.from_pretrained(saved)
    collect_garbage()
    assert auto.models == ()


def test_the_variable(saved):
    """It imports neither library, and waits for them."""
    code = f"""
import sys, layerzero
assert "transformers" not in sys.modules and "diffusers" not in sys.modules
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(saved)!r})
auto = layerzero.auto(False)
assert [entry.model for entry in auto.models] == [model], auto
import inspect, transformers.modeling_utils as m
assert "class PreTrainedModel" in inspect.getsource(m)
print(auto.unpatch())
"""
    done = run_python("-c", code, env={**os.environ, "LAYERZERO_AUTO": "1"})
    assert done.stdout.strip() == "1", done.stderr


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("LAYERZERO_AUTO", "maybe")
    with pytest.raises(ConfigError, match="wanted 1 or 0"):
        module.from_environment()
    monkeypatch.setenv("LAYERZERO_AUTO", "off")
    module.from_environment()
    assert not module.Auto(False).on
