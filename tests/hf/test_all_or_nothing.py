"""lz.accelerate does all of it or nothing: an error, a failed proof or an interrupt leave the model
as it was.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from models import inputs, tiny, tokens
from torch import nn

import layerzero as lz
from layerzero.integrations.transformers import accelerate as home
from layerzero.integrations.transformers.accelerate import accelerate, unaccelerate
from layerzero.integrations.transformers.decoding import decode_step, joined
from layerzero.integrations.transformers.patch import patch
from layerzero.integrations.transformers.replacements import recipe_of
from layerzero.integrations.transformers.trial import Gain
from layerzero.tuning.harness import Ratio

pytestmark = pytest.mark.integration


def state(model: nn.Module) -> list:
    """Everything about a model that an acceleration could change."""
    seen = [torch.get_rng_state().tolist()]
    for name, module in model.named_modules():
        held = {key: id(value) for key, value in vars(module).items()
                if not isinstance(value, (dict, bool, int))}
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
        seen.append((name, id(module), type(module), module.training, held, hooks,
                     vars(module).get("forward")))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        storage = tensor.untyped_storage()
        seen.append((name, id(tensor), tensor.stride(), tensor.storage_offset(), storage.nbytes(),
                     tensor.tolist()))
    config = getattr(model, "config", None)
    return [*seen, None if config is None else (id(config), config._attn_implementation,
                                                config.to_dict())]


def wav2vec2():
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, vocab_size=32)), {
            "input_values": torch.randn(1, 400)}


def xlnet():
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(
        vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=48)), {"input_ids": tokens(1, 8)
                                                                       % 64}


@pytest.fixture
def no_difference(monkeypatch):
    """A trial runs what it would time and finds no difference: the machine decides no test."""
    def gain(ways, seconds, device):
        for way in ways.values():
            way()
        return Gain(100.0, 100.0, Ratio(1.0, 1.0, 1.0))

    monkeypatch.setattr(home.Trial, "_gain", staticmethod(gain))


@pytest.mark.parametrize("build", (wav2vec2, xlnet))
@torch.no_grad()
def test_models_that_take_something_else(build, no_difference):
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    stock = model(**inputs).logits
    torch.manual_seed(1)                       # their own code draws, in eval mode too
    before = state(model)
    report = accelerate(model)
    assert report.done and any("no decode step" in text for text in report.left), report
    torch.testing.assert_close(model(**inputs).logits, stock, rtol=1e-4, atol=1e-5)
    assert unaccelerate(model) and not unaccelerate(model)
    torch.manual_seed(1)
    assert state(model) == before and model(**inputs).logits.equal(stock)


PLACES = {"the copy": (copy, "deepcopy"), "the patch": (home, "apply_patch"),
          "reading the model": (home, "recognise"),
          "the step": (decode_step.DecodeStep, "__init__"), "the trial": (home.Trial, "prove"),
          "the clock": (home.Trial, "time")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", (RuntimeError, TypeError, torch.OutOfMemoryError,
                                   KeyboardInterrupt))
def test_an_error_anywhere_leaves_the_model_as_it_was(place, error, no_difference, monkeypatch):
    model = tiny("llama")
    before = state(model)

    def fault(*args, **kwargs):
        raise error("in the middle of it")

    owner, name = PLACES[place]
    with monkeypatch.context() as there:
        there.setattr(owner, name, fault)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                accelerate(model)
        else:
            report = accelerate(model)
            assert not report.done or place == "the step", report
            # which falls back to the model's own code, and is then not used
            if place != "the step":
                assert (f"{error.__name__}: in the middle of it" in str(report)
                        and "nothing was changed" in str(report))
                assert not unaccelerate(model)
            unaccelerate(model)
    assert state(model) == before


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_no_memory_for_the_last_layer(family, monkeypatch):
    model = tiny(family)
    before, count, init = state(model), [], joined.Joined.__init__

    def fault(self, layers):
        count.append(layers)
        if len(count) == 7:
            raise torch.OutOfMemoryError("no more")
        init(self, layers)

    monkeypatch.setattr(joined.Joined, "__init__", fault)
    report = accelerate(model, measure=False)
    assert "OutOfMemoryError: no more" in str(report) and len(count) == 7 and state(model) == before


@pytest.mark.parametrize("factor", (1.5, float("nan")))
def test_a_failed_proof_undoes_the_patch_too(factor, no_difference, monkeypatch):
    model = tiny("llama")
    before, call = state(model), decode_step.DecodeStep.__call__
    monkeypatch.setattr(decode_step.DecodeStep, "__call__", lambda self, *args: call(self, *args)
                        * factor)
    report = accelerate(model)
    assert not report.done and not report.gains and "its results are off by" in str(report), report
    assert ("nothing was changed" in str(report) and not unaccelerate(model)
            and state(model) == before)


def test_what_was_patched_before_stays_patched():
    model = tiny("llama")
    patch(model, only="rms_norm")
    kept = [type(m) for m in model.modules()]
    report = accelerate(model, measure=False)
    assert report.patched.changed > 0 and recipe_of(model.lm_head) is not None
    report.undo()
    assert [type(m) for m in model.modules()] == kept


def test_a_forward_of_the_users_own_stays():
    model, model_inputs = tiny("llama"), inputs("llama")
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    set_by_user = model.forward
    report = accelerate(model, measure=False)
    assert "forward of its own" in str(report) and model.forward is set_by_user
    assert unaccelerate(model) and model.forward is set_by_user
    model(**model_inputs)


def test_a_part_that_is_accelerated_stays_so():
    model, ids = tiny("llama"), tokens(1, 6)
    inner = accelerate(model.model, measure=False, patch=False)
    outer = accelerate(model, measure=False, patch=False)
    assert not outer.done and "a module with a forward of its own" in str(outer)
    served = sum(inner.served.values())
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
    assert sum(inner.served.values()) == served + 1 and not inner.declined


def test_training_mode_and_batch_norms_are_left_as_they_are(no_difference):
    class Normed(type(tiny("llama"))):
        def __init__(self, config):
            super().__init__(config)
            self.batch = nn.BatchNorm1d(config.vocab_size)

        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = self.batch(out.logits.transpose(1, 2)).transpose(1, 2)
            return out

    model = Normed(tiny("llama").config).train()
    before = state(model)
    report = accelerate(model)
    report.undo()
    assert state(model) == before
    plain = tiny("llama").train()
    report = accelerate(plain, measure=False)
    assert plain.training and report.kernels   # it serves once the model is in eval mode
    plain.eval()
    with torch.no_grad():
        cache = plain(tokens(1, 6), use_cache=True).past_key_values
        plain(tokens(1, 1), past_key_values=cache)
    assert not report.declined


@pytest.mark.parametrize("ratio, verdict, word", [
    (Ratio(0.98, 0.90, 0.995), "even", "no difference"),
    (Ratio(0.9, 0.85, 1.01), "even", "no difference"),
    (Ratio(1.02, 1.001, 1.2), "even", "no difference"),
    (Ratio(0.8, 0.75, 0.85), "slower", "slower"),
    (Ratio(1.3, 1.2, 1.4), "faster", "faster"), (Ratio(1.0, 1.0, 1.0), "even", "no difference")])
def test_a_verdict_says_no_more_than_its_interval(ratio, verdict, word):
    gain = Gain(100.0, 100.0 / ratio.median, ratio)
    assert (gain.verdict == gain.to_json()["ratio"]["verdict"] == verdict
            and str(gain).endswith(f"({word})"))


def test_what_is_no_different_is_kept_and_what_is_slower_is_not(monkeypatch):
    def gains(ratio):
        return staticmethod(lambda ways, seconds, device: Gain(100.0, 100.0, ratio))

    monkeypatch.setattr(home.Trial, "_gain", gains(Ratio(0.98, 0.9, 0.995)))
    model = tiny("llama")
    report = accelerate(model)
    assert len(report.done) == 2 and str(report).count("no difference") == 2
    report.undo()
    before = state(model)
    monkeypatch.setattr(home.Trial, "_gain", gains(Ratio(0.8, 0.75, 0.85)))
    report = accelerate(model)
    assert not report.done and state(model) == before and not lz.unaccelerate(model)
