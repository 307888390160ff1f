"""Decode steps of decoders that attend to what an encoder gave, through the outer generate()."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402
from transformers.cache_utils import EncoderDecoderCache  # noqa: E402

from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoding.accelerated import Accelerated  # noqa: E402

pytestmark = pytest.mark.integration
_BART, _T5 = models.FAMILIES["bart"][2], models.FAMILIES["t5"][2]
_MOONSHINE = {f"{side}_num_{what}": n for side in ("encoder", "decoder") for what, n in (
    ("hidden_layers", 2), ("attention_heads", 4), ("key_value_heads", 4))}
MORE = {
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", {**_BART, "scale_embedding": True}),
    "t5 gated": ("T5ForConditionalGeneration", "T5Config",
                 {**_T5, "feed_forward_proj": "gated-gelu"}),
    "marian": ("MarianMTModel", "MarianConfig", {**_BART, "scale_embedding": True}),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _T5),
    "moonshine": ("MoonshineForConditionalGeneration", "MoonshineConfig", {
        **_MOONSHINE, "vocab_size": models.VOCAB, "hidden_size": 64, "intermediate_size": 96,
        "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "decoder_start_token_id": 1, "partial_rotary_factor": 0.5}),
}
NAMES = ["whisper", "bart", "t5", *MORE]
NEW = 10


def build(name: str, dtype: torch.dtype = torch.float32):
    if name in MORE:
        models.FAMILIES.setdefault(name, MORE[name])
    model = music() if name == "musicgen" else models.tiny(name)
    with torch.no_grad():                      # norms and biases as they are made say nothing
        for i, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return model.to(dtype)


def music():
    text = transformers.T5Config(vocab_size=models.VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1,
                                 num_heads=4, pad_token_id=0)
    audio = transformers.EncodecConfig(
        target_bandwidths=[1.5], num_filters=4, hidden_size=8, codebook_size=64, codebook_dim=8,
        upsampling_ratios=[8, 4], num_lstm_layers=1, sampling_rate=800)
    decoder = transformers.MusicgenDecoderConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, ffn_dim=96, num_attention_heads=4,
        max_position_embeddings=64, num_codebooks=4, pad_token_id=64, bos_token_id=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.MusicgenForConditionalGeneration(transformers.MusicgenConfig(
            text_encoder=text.to_dict(), audio_encoder=audio.to_dict(),
            decoder=decoder.to_dict())).eval()
        for p in model.decoder.parameters():
            if p.dim() > 1:
                p.data = torch.randn(p.shape) * 1.5 / p.shape[-1] ** 0.5
    for name in ("pad", "bos", "decoder_start"):
        setattr(model.generation_config, f"{name}_token_id", 64)
    return model


def make_inputs(name: str, padded: bool = True):
    gen = torch.Generator().manual_seed(3)
    if name == "whisper":
        return {"input_features": torch.randn(2, 16, 40, generator=gen)}
    if name == "moonshine":
        return {"input_values": torch.randn(2, 3000, generator=gen)}
    words = models.padded(9, (0, 4) if padded else (0, 0))
    return {key: value.flip(1) for key, value in words.items()}


def generate(model, inputs, **options):
    torch.manual_seed(5)
    return model.generate(**inputs, max_new_tokens=NEW, **{"do_sample": False, **options})


@pytest.mark.parametrize("name", [*NAMES, "musicgen"])
def test_the_same_tokens(name):
    model, inputs = build(name), make_inputs(name)
    before = generate(model, inputs)
    report = accelerate(model, measure=False, patch=name == "bart")
    assert torch.equal(generate(model, inputs), before)
    assert report.served == {"step": NEW - 1} and not report.declined, str(report)
    assert report.error < 1e-5 and "a decode step for the 2 layers of its" in str(report)
    report.undo()
    assert torch.equal(generate(model, inputs), before)


@pytest.mark.parametrize("name, how", [
    ("t5", {"num_beams": 2}), ("whisper", {"do_sample": True, "top_k": 20})], ids=str)
def test_other_ways_to_generate(name, how):
    model, inputs = build(name), make_inputs(name)
    before = generate(model, inputs, **how)
    with accelerate(model, measure=False) as report:
        assert torch.equal(generate(model, inputs, **how), before)
        assert report.served == {"step": NEW - 1} and not report.declined, str(report)


def test_biases_and_weights_written_in_place_are_seen():
    """Whisper's keys have no bias: the joined one holds zeros that belong to nobody."""
    model, other, inputs = build("whisper"), models.tiny("whisper", seed=3), make_inputs("whisper")
    before = generate(other, inputs)
    report = accelerate(model, measure=False, patch=False)
    model.load_state_dict(other.state_dict())
    assert torch.equal(generate(model, inputs), before) and report.served == {"step": NEW - 1}
    report.undo()
    assert model.model.decoder.layers[0].self_attn.k_proj.bias is None
    assert torch.equal(generate(model, inputs), before)


def test_relative_positions_beyond_the_first_table(monkeypatch):
    from layerzero.integrations.transformers.decoders import score_bias

    monkeypatch.setattr(score_bias, "MIN_DISTANCES", 4)
    model, inputs = build("t5"), make_inputs("t5")
    before = generate(model, inputs)
    accelerate(model, measure=False, patch=False)
    assert torch.equal(generate(model, inputs), before)


def test_a_decoder_alone_has_no_encoder():
    _, _, config = models.FAMILIES["bart"]
    models.FAMILIES["bart alone"] = "BartForCausalLM", "BartConfig", {
        **config, "is_decoder": True, "is_encoder_decoder": False}
    model, ids = models.tiny("bart alone"), models.tokens(2, 6)
    before = generate(model, {"input_ids": ids})
    report = accelerate(model, measure=False)
    assert torch.equal(generate(model, {"input_ids": ids}), before)
    assert report.served == {"step": NEW - 1} and not report.declined, str(report)


@torch.no_grad()
def test_what_is_declined_is_counted():
    model, ids = build("bart"), models.tokens(2, 6)
    report = accelerate(model, measure=False)
    state = model.get_encoder()(ids).last_hidden_state
    decoder = model.get_decoder()

    def one(**changes):
        cache = decoder(ids, encoder_hidden_states=state, use_cache=True).past_key_values
        stock = type(decoder).forward(decoder, ids[:, :1], past_key_values=copy.deepcopy(cache),
                                      **{"encoder_hidden_states": state, **changes})
        ours = decoder(ids[:, :1], past_key_values=cache,
                       **{"encoder_hidden_states": state, **changes})
        torch.testing.assert_close(ours[0], stock[0], rtol=1e-4, atol=1e-4)
        assert isinstance(ours.past_key_values, EncoderDecoderCache) and type(ours) is type(stock)

    one()
    assert report.served == {"step": 1} and not report.declined
    one(encoder_attention_mask=torch.ones(2, 6), attention_mask=torch.ones(2, 7))
    assert report.served == {"step": 2} and not report.declined
    one(encoder_attention_mask=torch.zeros(2, 1, 1, 6))
    one(encoder_hidden_states=None)
    one(output_attentions=True)
    assert report.served == {"step": 2} and list(report.declined) == [
        "a mask of the encoder that is made already", "nothing of an encoder is given",
        "output_attentions is given"]


def test_a_copy_is_not_accelerated():
    model, inputs = build("t5"), make_inputs("t5")
    before = generate(model, inputs)
    accelerate(model, measure=False, patch=False)
    other = copy.deepcopy(model)
    assert not any(isinstance(vars(m).get("forward"), Accelerated) for m in other.modules())
    assert torch.equal(generate(other, inputs), before)


def test_it_is_timed():
    report = accelerate(build("bart"), seconds=0.02)
    assert {"prefill", "decode"} <= report.gains.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["whisper", "bart", "t5"])
def test_on_a_gpu(name):
    model, inputs = build(name).cuda(), {k: v.cuda() for k, v in make_inputs(name).items()}
    before = generate(model, inputs)
    report = accelerate(model, measure=False)
    assert torch.equal(generate(model, inputs), before)
    assert sum(report.served.values()) == NEW - 1 and not report.declined, str(report)
