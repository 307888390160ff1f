"""lz.accelerate beyond Llama: windows, norms before and after, softcaps, experts, parallel blocks,
learned positions.

Every family is decoded by stock transformers and by the step, in float32, far enough that windows
slide.
"""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer  # noqa: E402

from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoders.families import NotRecognised  # noqa: E402
from layerzero.integrations.transformers.decoders.recognition import Experts, recognise  # noqa: E402
from layerzero.integrations.transformers.decoding import growing_cache  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import captured  # noqa: E402
from layerzero.integrations.transformers.decoding.growing_cache import GrowingLayer, GrowingWindow  # noqa: E402

pytestmark = pytest.mark.integration
_PLAIN = models._GROUPED
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {**_PLAIN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SIGMOID = {**_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
_LATENT = {**models.FAMILIES["deepseek_v3"][2], "routed_scaling_factor": 1.5}
MORE = {
    "qwen2 windows": ("Qwen2ForCausalLM", "Qwen2Config", {
        **_PLAIN, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "phi3 window": ("Phi3ForCausalLM", "Phi3Config",
                    {**_PLAIN, "sliding_window": 6, "partial_rotary_factor": 0.5}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_PLAIN, "head_dim": 16}),
    "gemma2 capped": ("Gemma2ForCausalLM", "Gemma2Config", {
        **models.FAMILIES["gemma2"][2], "final_logit_softcapping": 3.0}),
    "gemma3 ropes": ("Gemma3ForCausalLM", "Gemma3TextConfig", {
        **models.FAMILIES["gemma3"][2], "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}}}),
    "mixtral window": ("MixtralForCausalLM", "MixtralConfig", {
        **_PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig",
                  {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "phi normed": ("PhiForCausalLM", "PhiConfig", {**models._DECODER, "qk_layernorm": True}),
    "gpt_neox in turn": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {
        **models._DECODER, "rotary_pct": 0.25, "use_parallel_residual": False,
        "attention_bias": False}),
    "gpt2 scaled": ("GPT2LMHeadModel", "GPT2Config", {
        **models.FAMILIES["gpt2"][2], "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu"}),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": models.VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", models.FAMILIES["gpt2"][2]),
    "gpt_bigcode of many keys": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {
        **models.FAMILIES["gpt2"][2], "multi_query": False}),
    "falcon of many keys": ("FalconForCausalLM", "FalconConfig", {
        **models._DECODER, "multi_query": False, "parallel_attn": False}),
}
OTHERS = {"Cohere": {"logit_scale": 0.3}, "Cohere normed": {"use_qk_norm": True},
          "StableLm normed": {"qk_layernorm": True}, "Cohere2": {**_WINDOW, "logit_scale": 0.3},
          "Ernie4_5": {"head_dim": 16}, "Exaone4": {**_WINDOW, "head_dim": 16},
          "Glm": {"head_dim": 16}, "Glm4": {"head_dim": 16},
          "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                      "logits_scaling": 2.0,
                      "attention_multiplier": 0.2},
          "Helium": {"head_dim": 16}, "Ministral": {"sliding_window": 6, "head_dim": 16},
          "Olmo2": {}, "Olmo3": _WINDOW, "Olmoe": _EXPERTS, "SeedOss": {"head_dim": 16},
          "SmolLM3": {"no_rope_layers": [1, 0]}, "StableLm": {"use_parallel_residual": True},
          "StableLm in turn": {"use_parallel_residual": False},
          "Starcoder2": {"sliding_window": 6}, "Cwm": {**_WINDOW, "head_dim": 16},
          "FlexOlmo": _EXPERTS, "Mellum": {**_EXPERTS, **_WINDOW, "head_dim": 16}}
# of these the trial compares what each layer gives; see also benchmarks/families.py
OTHERS |= {"Arcee": {}, "BitNet": {}, "Nemotron": {}, "VaultGemma": {
               **_WINDOW, "head_dim": 16, "attn_logit_softcapping": 5.0},
           "HyperCLOVAX": {"logits_scaling": 2.0, "residual_multiplier": 0.5,
                           "use_post_norm": True},
           "HunYuanDenseV1": {"head_dim": 16}, "Glm4Moe": _SIGMOID, "Ernie4_5_Moe": {
               **_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
           "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
           "Ministral3": {"head_dim": 16, "rope_parameters": {
               "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
               "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}},
           "DeepseekV2": {**_LATENT, "topk_method": "group_limited_greedy"},
           "DeepseekV3": _LATENT, "MiniCPM3": {**_LATENT, "q_lora_rank": 24},
           "Bloom": {"n_head": 4, "n_layer": 2}, "Mpt": {
               "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "use_cache": True}}
MORE |= {"gpt_oss": models.FAMILIES["gpt_oss"], "llama dynamic": (
    "LlamaForCausalLM", "LlamaConfig", {**_PLAIN, "max_position_embeddings": 8, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "phi3 longrope": ("Phi3ForCausalLM", "Phi3Config", {
        **_PLAIN, "sliding_window": None, "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 8}})}
MORE |= {name: (f"{name.split()[0]}ForCausalLM", f"{name.split()[0]}Config", {**_PLAIN, **more})
         for name, more in OTHERS.items()}
MAX_USED = ("mistral", "gemma2", "gemma3", "mixtral", "gpt2", "phi", "gpt_neox", "falcon",
            "qwen2_moe", "opt")


def build(name: str, dtype: torch.dtype = torch.float32, **changes):
    if name in MORE:
        models.FAMILIES.setdefault(name, MORE[name])
    model = models.tiny(name, **changes)
    with torch.no_grad():
        # norms and biases as they are made say nothing
        for i, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return model.to(dtype)


def generate(model, inputs=None, new: int = 14, **options):
    inputs = (inputs or {"input_ids": (ids := models.tokens(1, 9)),
                         "attention_mask": torch.ones_like(ids)})
    torch.manual_seed(5)
    return model.generate(**inputs, max_new_tokens=new, **{"do_sample": False, **options})


@torch.no_grad()
def decode(model, ids, before: int = 5, cache=None):
    """The logits of the tokens after the first few, one by one."""
    cache = model(ids[:, :before], past_key_values=cache, use_cache=True).past_key_values
    return torch.cat([model(ids[:, i:i + 1], past_key_values=cache)[0]
                      for i in range(before, ids.shape[1])], 1)


@pytest.mark.parametrize("name", MORE)
def test_the_same_logits(name):
    model, ids = build(name), models.tokens(2, 14)
    expected = decode(model, ids)
    report = accelerate(model, measure=False, patch=False)
    torch.testing.assert_close(decode(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert report.error < 1e-4 and not report.declined and report.served["step"] >= 9, str(report)
    report.undo()
    assert torch.equal(decode(model, ids), expected)


@pytest.mark.parametrize("name", MAX_USED)
def test_the_same_tokens(name):
    model, batch = build(name), models.padded(9)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    logits = decode(model, models.tokens(1, 12))
    alone, padded = generate(model), generate(model, batch)
    report = accelerate(model, measure=False)
    assert torch.equal(generate(model), alone) and torch.equal(generate(model, batch), padded)
    assert report.served["step"] >= 26 and not report.declined, str(report)
    assert report.error < 1e-4
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    report.undo()
    # to the last bit
    assert torch.equal(decode(model, models.tokens(1, 12)), logits)
    assert all(v.stride() == state[k].stride() for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "qwen3_moe"])
def test_fixed_buffers(name, monkeypatch):
    monkeypatch.setattr(captured, "MIN_CAPACITY", 8)
    model = build(name)
    before = generate(model, new=40)
    report = accelerate(model, measure=False, capture=True)
    report._step.served.clear()
    assert torch.equal(generate(model, new=40), before)
    assert report.served == {"captured": 39} and not report.declined
    # in the same buffers, without a graph
    batch = models.padded(9)
    padded = generate(model, batch)
    report.undo()
    assert torch.equal(generate(model, batch), padded)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "gpt2", "phi", "gpt_neox",
                                  "mixtral", "Cohere2"])
def test_in_a_cuda_graph(name):
    model, ids = build(name, torch.float16).cuda(), models.tokens(2, 40).cuda()
    expected = decode(model, ids)
    report = accelerate(model, measure=False, patch=False)
    result = decode(model, ids)
    assert sum(report.served.values()) >= 35, str(report)
    assert float((result.float() - expected.float()).norm() / expected.float().norm()) < 5e-2, str(
        report)


@pytest.mark.parametrize("name", ["gemma2", "phi", "qwen2_moe"])
def test_bfloat16_is_no_worse_than_stock(name):
    ids = models.tokens(1, 24)
    exact = decode(build(name, torch.bfloat16).float(), ids)
    model = build(name, torch.bfloat16)

    def error():
        return float((decode(model, ids).float() - exact).norm() / exact.norm())

    stock = error()
    report = accelerate(model, measure=False)
    ours = error()
    assert report.served and ours <= 2 * stock, (ours, stock, str(report))


@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 20}, {"num_beams": 3},
                                 {"prompt_lookup_num_tokens": 3},
                                 {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["gemma3"])
def test_every_way_to_generate(name, how):
    model = build(name)
    before = generate(model, **how)
    with accelerate(model, measure=False) as report:
        report._step.served.clear()
        assert torch.equal(generate(model, **how), before)
        assert report.served.get("step", 0) == 13 or "do_sample" not in how
        assert "sampling: logits processors and the draw stay transformers' own" in str(report)


# Static and quantized caches.

def test_a_static_cache():
    model, batch = build("qwen3_moe"), models.padded(9)
    before = [generate(model, inputs, cache_implementation="static") for inputs in (None, batch)]
    report = accelerate(model, measure=False)
    for inputs, tokens in zip((None, batch), before):
        assert torch.equal(generate(model, inputs, cache_implementation="static"), tokens)
    assert report.served == {"step": 26} and not report.declined, str(report)


def test_a_static_cache_that_is_full_is_left_to_the_model():
    model, ids = build("gpt2"), models.tokens(1, 6)
    report = accelerate(model, measure=False)
    with torch.no_grad():
        cache = transformers.StaticCache(config=model.config, max_cache_len=6)
        model(ids, past_key_values=cache, use_cache=True)
        with pytest.raises((IndexError, RuntimeError)):        # by the model
            model(ids[:, :1], past_key_values=cache)
    assert list(report.declined) == ["a static cache that is full, or for another batch"]


def test_a_quantized_cache():
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this release quantizes by other packages")
    model, how = build("qwen3_moe"), {"cache_implementation": "quantized",
                                      "cache_config": {"backend": "fp8"}}
    before = generate(model, **how)
    report = accelerate(model, measure=False)
    assert torch.equal(generate(model, **how), before)
    assert report.served == {"step": 13} and not report.declined, str(report)


def test_a_step_that_breaks_leaves_a_quantized_or_static_cache_as_it_was(monkeypatch):
    model, ids = build("qwen3_moe"), models.tokens(1, 7)
    report = accelerate(model, measure=False)
    with torch.no_grad():
        for cache in (transformers.StaticCache(config=model.config, max_cache_len=16),):
            model(ids[:, :6], past_key_values=cache, use_cache=True)
            expected = model(ids[:, 6:], past_key_values=copy.deepcopy(cache)).logits
            step = report._step.step(1)
            monkeypatch.setattr(step, "_head", lambda x: x / torch.ones(3))    # it raises
            torch.testing.assert_close(model(ids[:, 6:], past_key_values=cache).logits, expected,
                                       rtol=1e-4, atol=1e-4)
            assert int(cache.get_seq_length()) == 7 and report._step.broken


# Windows.

def test_a_window_in_a_cache_that_keeps_everything():
    model, ids = build("gemma3"), models.tokens(1, 20)
    expected = decode(model, ids, cache=DynamicCache())
    report = accelerate(model, measure=False)
    torch.testing.assert_close(decode(model, ids, cache=DynamicCache()), expected, rtol=1e-4,
                               atol=1e-4)
    assert report.served["step"] >= 15 and not report.declined


def test_a_window_goes_on_where_the_model_left_off(monkeypatch):
    """Tokens by the step and by the model in turns, in one cache whose buffer is used up again and
    again."""
    monkeypatch.setattr(growing_cache, "MIN_CAPACITY", 3)
    model, ids = build("mistral"), models.tokens(1, 27)

    @torch.no_grad()
    def in_turns():
        cache, logits = model(ids[:, :3], use_cache=True).past_key_values, []
        for i in range(3, 27, 4):
            logits.append(model(ids[:, i:i + 1], past_key_values=cache).logits)
            logits.append(model(ids[:, i + 1:i + 4], past_key_values=cache).logits)
        return torch.cat(logits, 1), cache

    expected, stock = in_turns()
    accelerate(model, measure=False)
    result, ours = in_turns()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert [type(layer) for layer in ours.layers] == [GrowingWindow] * 2
    for a, b in zip(stock.layers, ours.layers):
        assert (a.get_seq_length() == b.get_seq_length()
                and a.get_mask_sizes(1) == b.get_mask_sizes(1))
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [3, 9])
@pytest.mark.parametrize("act", [
    lambda x: x.crop(-1) if x.get_seq_length() < 6 else None,
    lambda x: x.reorder_cache(torch.tensor([1, 0])),
    lambda x: x.batch_repeat_interleave(2), lambda x: x.reset(),
    lambda x: x.activate_past_recording(), lambda x: None],
                         ids=["crop", "reorder", "repeat", "reset", "record", "nothing"])
@torch.no_grad()
def test_a_growing_window_is_a_sliding_layer(act, length):
    gen = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 3, length, 4, generator=gen) for _ in range(2)]
    stock, ours = DynamicSlidingWindowLayer(6), GrowingWindow(6)
    for layer in (stock, ours):
        layer.update(*states)
    for more in (1, 2, 1, 7, 1):
        for layer in (stock, ours):
            act(layer)
        batch = 2 if not stock.is_initialized or not stock.keys.numel() else stock.keys.shape[0]
        new = [torch.randn(batch, 3, more, 4, generator=gen) for _ in range(2)]
        for a, b in zip(stock.update(*new), ours.update(*new)):
            assert torch.equal(a, b)
        assert (stock.get_seq_length() == ours.get_seq_length()
                and stock.get_mask_sizes(2) == ours.get_mask_sizes(2))
        copied = copy.deepcopy(ours)
        copied.update(*(t + 1 for t in new))
        assert torch.equal(ours.keys, stock.keys) and torch.equal(ours.values, stock.values)


def test_a_cache_with_another_window_is_left_as_it_is():
    model, other = build("mistral"), build("mistral", sliding_window=4)
    ids = models.tokens(1, 9)
    report = accelerate(model, measure=False)
    cache = DynamicCache(config=other.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    assert list(report.declined) == [
        "a cache layer that is DynamicSlidingWindowLayer with another window"]
    assert not any(isinstance(layer, (GrowingLayer, GrowingWindow)) for layer in cache.layers)


# Experts.

def test_only_the_chosen_experts_are_read():
    model, ids = build("mixtral"), models.tokens(1, 12)
    accelerate(model, measure=False)
    chosen: set[int] = set()
    moe = model.model.layers[0].mlp
    hook = moe.gate.register_forward_hook(
        lambda m, args, out: chosen.update(out[2].flatten().tolist()))
    with torch.no_grad():
        before = model(ids[:, :11], use_cache=True).past_key_values
        chosen.clear()
        # by the model: the hook listens
        model(ids[:, 11:], past_key_values=copy.deepcopy(before))
        hook.remove()
        expected = model(ids[:, 11:], past_key_values=copy.deepcopy(before)).logits
        for expert in set(range(4)) - chosen:
            moe.experts.gate_up_proj[expert] = float("nan")
            moe.experts.down_proj[expert] = float("nan")
        logits = model(ids[:, 11:], past_key_values=copy.deepcopy(before)).logits
    assert len(chosen) == 2 and torch.equal(logits, expected) and logits.isfinite().all()


def test_a_model_may_have_experts_in_some_layers_only():
    parts = recognise(build("qwen2_moe"))
    assert [isinstance(layer.mlp, Experts) for layer in parts.layers] == [False, True]
    assert parts.layers[1].mlp.shared is not None and not parts.layers[1].mlp.normalize


# What is not done, and what is not shared.

@pytest.mark.parametrize("name, changes, why", [
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ("mixtral", {"output_router_logits": True}, "output_router_logits"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("opt", {"activation_function": "tanh"}, "none that lz has"),
    ("opt", {"word_embed_proj_dim": 32}, "narrower"),
    ("falcon", {"alibi": True}, "alibi"), ("falcon", {"new_decoder_architecture": True},
                                           "new_decoder_architecture")], ids=str)
def test_what_is_not_recognised_says_why(name, changes, why):
    with pytest.raises(NotRecognised, match=why):
        recognise(build(name, **changes))


@pytest.mark.parametrize("name, what", [
    ("HunYuanDenseV1", "norms of rotated heads"), ("Arcee", "the model's own code"),
    ("Glm4Moe", "a router of its own"), ("BitNet", "a norm of its heads' result"),
    ("gpt_oss", "attention sinks"), ("DeepseekV3", "latent attention"), ("Cohere2", "")])
def test_what_a_kernel_of_the_plain_step_must_not_serve(name, what):
    assert recognise(build(name)).unplain_feature == what


def test_two_models_in_turns_share_nothing():
    ids, pair = models.tokens(1, 14), [build("gemma3"), build("gemma3", seed=3)]
    expected = [decode(model, ids) for model in pair]
    reports = [accelerate(model, measure=False) for model in pair]
    for result, want in zip([decode(model, ids) for model in pair], expected):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
    reports[0].undo()
    torch.testing.assert_close(decode(pair[1], ids), expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(decode(pair[0], ids), expected[0]) and reports[1].served


def test_arguments_by_position_as_the_model_takes_them():
    model, ids = build("gpt2"), models.tokens(1, 9)
    report = accelerate(model, measure=False)

    @torch.no_grad()
    def logits():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        # mask after cache: GPT-2's order
        return model(ids[:, 8:], cache, torch.ones_like(ids)).logits

    with torch.no_grad():
        expected = model(ids).logits[:, 8:]
    served = dict(report.served)
    torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-4)
    assert report.served["step"] == served.get("step", 0) + 1 and not report.declined
    with pytest.raises(TypeError, match="multiple values"):
        model(ids[:, 8:], input_ids=ids[:, 8:])
    assert not report.declined


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gemma3"])
def test_what_is_returned_is_what_the_model_returns(name):
    model, ids = build(name), models.tokens(1, 9)

    @torch.no_grad()
    def one(model):
        return model(ids[:, 8:], past_key_values=model(ids[:, :8], use_cache=True).past_key_values)

    stock = one(model)
    with accelerate(model, measure=False):
        ours = one(model)
    assert type(ours) is type(stock) and list(ours.keys()) == list(stock.keys())
    assert ours.past_key_values is not None and ours.loss is None


def test_a_short_model_is_tried_within_its_length():
    model = build("gpt2", n_positions=24)
    report = accelerate(model, seconds=0.02)
    assert report.error is not None and {"prefill", "decode"} <= report.gains.keys()


def test_a_windowed_model_is_timed():
    report = accelerate(build("mistral"), seconds=0.02)
    assert {"prefill", "decode"} <= report.gains.keys()


def test_weights_loaded_in_place_are_seen_by_every_part():
    for name in ("gemma2", "gpt2", "qwen2_moe"):
        model, other, ids = build(name), build(name, seed=3), models.tokens(1, 12)
        report = accelerate(model, measure=False)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(decode(model, ids), decode(other, ids), rtol=1e-4, atol=1e-4)
        assert not report.declined


def test_a_transposed_weight_is_saved_as_it_was(tmp_path):
    model = build("gpt2")
    before = generate(model)
    weight = model.transformer.h[0].attn.c_attn.weight
    shape, place = weight.shape, weight.data_ptr()
    accelerate(model, measure=False, patch=False)
    assert weight.shape == shape and weight.is_contiguous() and weight.data_ptr() == place
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    loaded.generation_config.eos_token_id = None
    assert torch.equal(generate(loaded), before)
