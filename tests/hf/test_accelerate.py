"""lz.accelerate: the same tokens, by a decode step where one is known, and a model that can be
given back.
"""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import run_interpreted, run_python, triton_interpreter_works
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.integrations.transformers.accelerate import accelerate, unaccelerate  # noqa: E402
from layerzero.integrations.transformers.decoders.recognition import NotRecognised, recognise  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import captured  # noqa: E402
from layerzero.integrations.transformers.decoding.growing_cache import GrowingLayer  # noqa: E402

pytestmark = pytest.mark.integration
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "Llama": {}, "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": None}, "Qwen2": {}, "Qwen3": {"head_dim": 16}, "Phi3": {},
    "Phi3 partly turned": {"partial_rotary_factor": 0.5},
    "Llama tied": {"tie_word_embeddings": True, "hidden_act": "gelu"},
    "Llama scaled": {"rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                         "rope_theta": 10000.0}}}


def build(name: str = "Llama", dtype: torch.dtype = torch.float32, **more) -> nn.Module:
    family = name.split()[0]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(name, {}), **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        # weights as they are made are small: all tokens would be alike
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    return model


@pytest.fixture
def model():
    return build()


def prompt(batch: int = 1, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def generate(model, ids=None, new: int = 12, **options):
    ids = prompt() if ids is None else ids
    mask = options.pop("attention_mask", torch.ones_like(ids))
    torch.manual_seed(5)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new,
                          **{"do_sample": False, **options})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_tokens_for_each_family(name):
    model = build(name)
    before, state = generate(model), {k: v.clone() for k, v in model.state_dict().items()}
    report = accelerate(model, measure=False)
    assert torch.equal(generate(model), before)
    assert (report.served == {"step": report.served["step"]} and report.served["step"] >= 11
            and not report.declined)
    assert report.error < 1e-4 and {"qkv", "mlp", "attention", "head"} <= report.kernels.keys()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    report.undo()
    assert "forward" not in vars(model) and torch.equal(generate(model), before)


@pytest.mark.parametrize("how", [
    {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"prompt_lookup_num_tokens": 3},
    {"num_return_sequences": 2, "do_sample": True}, {"cache_implementation": "static"},
    {"use_cache": False}], ids=str)
@pytest.mark.parametrize("capture", [False, True], ids=["step", "fixed buffers"])
def test_every_way_to_generate(how, capture):
    model = build()
    before = generate(model, **how)
    with accelerate(model, measure=False, capture=capture):
        assert torch.equal(generate(model, **how), before)


@pytest.mark.parametrize("capture", [False, True], ids=["step", "fixed buffers"])
def test_left_padding_and_batches(capture):
    model, ids = build(), prompt(3)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    padded, full = generate(model, ids, attention_mask=mask), generate(model, ids)
    report = accelerate(model, measure=False, capture=capture)
    assert torch.equal(generate(model, ids, attention_mask=mask), padded) and not report.declined
    assert torch.equal(generate(model, ids), full)
    assert report.served["step"] >= 11 and (report.served.get("captured", 0) >= 11) == capture


@pytest.mark.parametrize("capture", [False, True], ids=["step", "fixed buffers"])
def test_inference_mode_leaves_nothing_behind(model, capture):
    before = generate(model)
    with torch.inference_mode():
        report = accelerate(model, measure=False, capture=capture)
        assert torch.equal(generate(model), before)
        cache = model(prompt(), use_cache=True).past_key_values
        model(torch.tensor([[5]]), past_key_values=cache)
    assert torch.equal(generate(model), before)
    with torch.no_grad():
        model(torch.tensor([[6]]), past_key_values=cache)
    assert not report.declined
    model(prompt(), labels=prompt()).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3 partly turned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_step_in_a_cuda_graph(name, dtype, monkeypatch):
    monkeypatch.setattr(captured, "MIN_CAPACITY", 16)
    model, ids = build(name, dtype).cuda(), prompt(2).cuda()
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        tokens = [torch.full((2, 1), n, device="cuda") for n in range(5, 65)]
        expected = torch.cat([model(t, past_key_values=cache).logits for t in tokens])
        report = accelerate(model, measure=False, patch=False)
        cache = model(ids, use_cache=True).past_key_values
        logits = torch.cat([model(t, past_key_values=cache).logits for t in tokens])
    assert report.served["captured"] >= len(tokens) and not report.declined, str(report)
    assert "in a CUDA graph" in str(report)
    error = float((logits.float() - expected.float()).norm() / expected.float().norm())
    assert error < 5e-2, str(report)


def test_bfloat16_is_close():
    model = build(dtype=torch.bfloat16)
    report = accelerate(model, measure=False)
    assert "a decode step" in str(report) and report.error < 0.05


def test_fixed_buffers_serve_a_cache_that_outgrows_them(model, monkeypatch):
    monkeypatch.setattr(captured, "MIN_CAPACITY", 16)
    before = generate(model, new=150)
    report = accelerate(model, measure=False, capture=True)
    report._step.served.clear()
    assert torch.equal(generate(model, new=150), before)
    assert report.served == {"captured": 149} and not report.declined
    assert len(report._step._captured._fixed[1]) <= captured.MAX_CACHES


def test_two_caches_in_turns_do_not_meet(model):
    prompts = [prompt(length=5), prompt(length=9)]
    prompts[1][0, 0] = 7

    @torch.no_grad()
    def both():
        caches = [model(p, use_cache=True).past_key_values for p in prompts]
        logits = []
        for token in (5, 6, 7):
            for cache in caches:
                logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits)
        return torch.cat(logits)

    expected = both()
    report = accelerate(model, measure=False, capture=True)
    torch.testing.assert_close(both(), expected, rtol=1e-4, atol=1e-4)
    assert report.served["captured"] >= 6


def test_more_caches_than_buffers_are_served_without(model):
    report = accelerate(model, measure=False, capture=True)
    with torch.no_grad():
        caches = [model(prompt(), use_cache=True).past_key_values
                  for _ in range(captured.MAX_CACHES + 1)]
        alike = [model(torch.tensor([[5]]), past_key_values=cache).logits for cache in caches]
    assert all(torch.allclose(a, alike[0], atol=1e-5) for a in alike)
    assert sum("in use in graphs" in why for why in report.declined) == 1


@pytest.mark.skipif(not triton_interpreter_works(), reason="no Triton whose interpreter works here")
def test_the_device_kernels_agree_in_the_interpreter():
    run_interpreted(Path(__file__).parent / "interpreted_step.py")


# What the step leaves to the model.

@torch.no_grad()
def one_token(model, **more):
    cache = model(prompt(), use_cache=True).past_key_values
    return model(torch.tensor([[5]]), past_key_values=cache, **more)


@pytest.mark.parametrize("change, why", [
    (lambda m: m.model.layers[1].mlp.register_forward_hook(lambda *a: a[2] * 2), "hook"),
    (lambda m: m.model.layers[0].self_attn.register_forward_pre_hook(lambda *a: None), "hook"),
    (lambda m: setattr(m.model.layers[0].mlp, "up_proj", nn.Linear(64, 80, bias=False)),
     "in the place of"),
    (lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.full((64,), 2.0))),
     "in the place of"),
    (lambda m: m.double(), "moved or cast"),
    (lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x), "forward of its own"),
    (lambda m: m.train(), "training"),
], ids=["hook", "pre-hook", "module", "weight", "dtype", "forward", "training"])
def test_a_changed_model_is_served_by_its_own_code(model, change, why):
    report = accelerate(model, measure=False, patch=False)
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    change(model)
    torch.manual_seed(3)
    change(twin)
    torch.testing.assert_close(one_token(model).logits, one_token(twin).logits, rtol=0, atol=0)
    assert len(report.declined) == 1 and why in next(iter(report.declined))


def test_weights_loaded_in_place_are_seen(model):
    report = accelerate(model, measure=False)
    other = build()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(one_token(model).logits, one_token(other).logits, rtol=1e-4,
                               atol=1e-4)
    assert not report.declined


@pytest.mark.parametrize("more, why", [
    ({"output_hidden_states": True}, "output_hidden_states"),
    ({"return_dict": False}, "return_dict"), ({"output_attentions": True}, "output_attentions"),
    ({"labels": torch.tensor([[5]])}, "labels")], ids=str)
def test_what_more_is_asked_for(model, more, why):
    model.set_attn_implementation("eager")
    expected = one_token(model, **more)
    report = accelerate(model, measure=False, patch=False)
    result = one_token(model, **more)
    assert type(result) is type(expected) and len(result) == len(expected)
    assert [why in reason for reason in report.declined] == [True]


def test_gradients_are_those_of_the_model(model):
    def gradients():
        model.zero_grad()
        model(prompt(2), labels=prompt(2)).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    report = accelerate(model, measure=False)
    torch.testing.assert_close(gradients(), expected, rtol=1e-3, atol=1e-5)
    cache = model(prompt(), use_cache=True).past_key_values
    assert model(torch.tensor([[5]]), past_key_values=cache).logits.requires_grad
    assert report.declined == {"gradients are on": 1}


def test_a_fault_of_the_step_leaves_cache_and_answer_intact(model):
    expected = one_token(model).logits
    report = accelerate(model, measure=False, patch=False)
    step = report._step.step(1)
    # a shape error in the last layer
    object.__setattr__(step.layers[1], "mlp", lambda x: torch.mm(x, x))
    seen = []
    stop = lz.subscribe(lambda event: seen.append(event.name))
    torch.testing.assert_close(one_token(model).logits, expected, rtol=1e-5, atol=1e-5)
    stop()
    assert "fallback" in seen and "a fault of the step" in next(iter(report.declined))
    torch.testing.assert_close(one_token(model).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("world")
def test_a_change_of_policy_is_followed(model):
    report = accelerate(model, measure=False)
    one_token(model)
    name = report.kernels["norm"]
    lz.configure(rules=(lz.PolicyRule.of("deny", name, "rms_norm", {}),))
    one_token(model)
    assert report.kernels["norm"] != name


# Copies, files, other models.

def test_a_copy_is_not_accelerated_and_independent(model):
    report = accelerate(model, measure=False)
    other = copy.deepcopy(model)
    served = dict(report.served)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert not one_token(other).logits.any() and one_token(model).logits.any()
    assert sum(report.served.values()) == sum(served.values()) + 1
    assert (accelerate(model) is report and not unaccelerate(other) and unaccelerate(model)
            and not unaccelerate(model))


def test_it_can_be_saved_while_accelerated(model, tmp_path):
    before = generate(model)
    accelerate(model, measure=False, patch=False)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(generate(loaded), before)


def test_a_base_model_without_a_head():
    model = build().model
    with torch.no_grad():
        cache = model(prompt(), use_cache=True).past_key_values
        expected = model(torch.tensor([[5]]), past_key_values=cache).last_hidden_state
        with accelerate(model, measure=False) as report:
            cache = model(prompt(), use_cache=True).past_key_values
            result = model(torch.tensor([[5]]), past_key_values=cache).last_hidden_state
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert report.error is not None


def test_other_models_say_what_was_left():
    config = transformers.GPTJConfig(n_embd=32, n_head=2, n_layer=1, vocab_size=64, rotary_dim=8)
    model = transformers.GPTJForCausalLM(config).eval()
    report = accelerate(model, measure=False)
    assert "no decode step: GPTJForCausalLM" in report.left[0] and "lz.patch" in str(report)
    nothing = nn.Sequential(nn.ReLU())
    report = accelerate(nothing)
    assert (not report.done and "nothing was changed" in str(report)
            and "_layerzero_acceleration" not in vars(nothing))


@pytest.mark.parametrize("name, more, why", [
    ("Mistral windowed", {"sliding_window": 1}, "window"),
    ("DiffLlama", {}, "DiffLlamaAttention"),
    ("Olmoe", {"clip_qkv": 2.0}, "clip_qkv")])
def test_what_only_looks_alike_is_not_recognised(name, more, why):
    with pytest.raises(NotRecognised, match=why):
        recognise(build(name, **more))


def test_the_report_holds_what_was_measured(model):
    report = accelerate(model, seconds=0.05)
    assert {"decode"} <= report.gains.keys() and report.gains["decode"].stock_us > 0
    data = report.to_json()
    assert data["gains"]["decode"]["ratio"]["verdict"] in ("faster", "slower", "even")
    assert "decode:" in str(report)


def test_the_benchmark_runs(tmp_path):
    root = Path(__file__).parents[2]
    out = tmp_path / "found.json"
    done = run_python(
        root / "benchmarks" / "accelerated.py", "--layer", "tiny", "--device", "cpu", "--dtype",
        "float32", "--context", "9", "--tokens", "3", "--rounds", "2", "--no-compile", "--out",
        out, timeout=300)
    assert done.returncode == 0 and "results agree" in done.stdout, done.stderr[-3000:]
    assert {"transformers", "lz.accelerate"} == json.loads(out.read_text())["rows"].keys()


def test_threads_with_caches_of_their_own(model):
    accelerate(model, measure=False, capture=True)
    prompts = [prompt(length=n) for n in (5, 8, 11)]
    expected = [generate(model, p) for p in prompts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            assert all(torch.equal(a, b)
                       for a, b in zip(pool.map(lambda p: generate(model, p), prompts), expected))


# The cache.

def layers_alike(length=9):
    gen = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 3, length, 4, generator=gen) for _ in range(2)]
    stock, ours = DynamicLayer(), GrowingLayer()
    for layer in (stock, ours):
        layer.update(*states)
    return stock, ours, gen


@pytest.mark.parametrize("act", [
    lambda x: x.crop(-3), lambda x: x.reorder_cache(torch.tensor([1, 0])),
    lambda x: x.batch_repeat_interleave(2), lambda x: x.batch_select_indices(torch.tensor([0])),
    lambda x: x.reset(), lambda x: None])
@torch.no_grad()
def test_a_growing_layer_is_a_dynamic_layer(act):
    stock, ours, gen = layers_alike()
    for _ in range(3):
        for layer in (stock, ours):
            act(layer)
        batch = 2 if not stock.is_initialized or not stock.keys.numel() else stock.keys.shape[0]
        more = [torch.randn(batch, 3, 2, 4, generator=gen) for _ in range(2)]
        for a, b in zip(stock.update(*more), ours.update(*more)):
            assert torch.equal(a, b)
        assert stock.get_seq_length() == ours.get_seq_length()
        copied = copy.deepcopy(ours)
        copied.update(*(t + 1 for t in more))
        assert torch.equal(ours.keys, stock.keys) and torch.equal(ours.values, stock.values)


@torch.no_grad()
def test_a_growing_layer_writes_in_place():
    ours = layers_alike()[1]
    ours.update(torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 4))
    place = ours.keys.data_ptr()
    for _ in range(50):
        ours.update(torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 4))
    assert ours.keys.data_ptr() == place and ours.keys.shape[2] == 60


def test_a_cache_of_another_kind_is_left_as_it_is(model):
    accelerate(model, measure=False)
    cache = DynamicCache(config=transformers.MistralConfig(**{**SIZES, "sliding_window": 4}))
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        kinds = [type(layer) for layer in cache.layers]
        model(torch.tensor([[5]]), past_key_values=cache)
    assert [type(layer) for layer in cache.layers] == kinds
