"""lz.patch on a model of every family: the same tokens, the same gradients, and exactly the old
model afterwards.
"""

from __future__ import annotations

import copy
import io
import os
import sys

import pytest
import torch
import transformers
from models import CAUSAL, FAMILIES, inputs, tiny, tokens

from layerzero.integrations.transformers.patch import patch, patched, unpatch
from layerzero.integrations.transformers.replacements import KINDS

FULL = os.environ.get("LZ_TEST_FULL") == "1"
ONE_OF_EACH = ("llama", "gemma2", "gpt2", "mixtral", "t5")
# What must be served at least, of each family: kinds and how many modules.
SERVED = {
    "llama": {"attention": 2, "rms_norm": 5, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "mistral": {"attention": 2, "rms_norm": 5, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "qwen2": {"attention": 2, "rms_norm": 5, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "qwen3": {"attention": 2, "rms_norm": 9, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "gemma2": {"attention": 2, "rms_norm": 9, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "gemma3": {"attention": 2, "rms_norm": 13, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "phi": {"attention": 2, "layer_norm": 3, "linear": 8, "mlp": 2, "lm_head": 1, "rope": 2},
    "phi3": {"attention": 2, "rms_norm": 5, "linear": 4, "mlp": 2, "lm_head": 1, "rope": 2},
    "gpt2": {"attention": 2, "layer_norm": 5, "linear": 4, "mlp": 2, "lm_head": 1},
    "gpt_neox": {"attention": 2, "layer_norm": 5, "linear": 4, "mlp": 2, "lm_head": 1, "rope": 2},
    "falcon": {"layer_norm": 3, "linear": 4, "mlp": 2, "lm_head": 1, "attention": 2},
    "mixtral": {"attention": 2, "rms_norm": 5, "linear": 8, "moe": 2, "lm_head": 1, "rope": 2},
    "deepseek_v3": {"attention": 2, "rms_norm": 9, "linear": 10, "mlp": 2, "moe": 1, "lm_head": 1},
    "gpt_oss": {"attention": 2, "rms_norm": 5, "linear": 8, "lm_head": 1},
    "t5": {"attention": 6, "rms_norm": 12, "linear": 24, "mlp": 4, "lm_head": 1},
    "bart": {"attention": 6, "layer_norm": 12, "linear": 32, "lm_head": 1},
    "bert": {"attention": 2, "layer_norm": 6, "linear": 13, "lm_head": 1},
    "vit": {"attention": 2, "layer_norm": 5, "linear": 9, "mlp": 2},
    "clip": {"attention": 4, "layer_norm": 11, "linear": 26},
    "whisper": {"attention": 6, "layer_norm": 12, "linear": 32, "lm_head": 1},
}


def result(model, inputs):
    out = model(**inputs)
    return out.logits if "logits" in out else out.logits_per_text


def truth_of(model, inputs):
    """What the model computes in float64."""
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        # torch's grouped product knows no float64
        model.set_experts_implementation("eager")
    with torch.no_grad():
        return result(model, {n: t.double() if t.is_floating_point() else t
                              for n, t in inputs.items()})


def error(model, inputs, truth):
    with torch.no_grad():
        return float((result(model, inputs).double() - truth).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_and_restored(family):
    model, model_inputs = tiny(family), inputs(family)
    with torch.no_grad():
        truth, stock = truth_of(model, model_inputs), result(model, model_inputs)
        before = dict(model.named_modules()), {n: type(m) for n, m in model.named_modules()}
        configs = {n: m.config for n, m in model.named_modules() if hasattr(m, "config")}
        keys = list(model.state_dict())
        report = patch(model, only=KINDS)
        counts = report.counts()
        assert {kind: counts.get(kind) for kind in SERVED[family]} == SERVED[family], report
        assert list(model.state_dict()) == keys
        floor = 4 * torch.finfo(torch.float32).eps * float(truth.abs().max())
        assert error(model, model_inputs, truth) <= 2 * error(tiny(family), model_inputs,
                                                              truth) + floor
        if family in CAUSAL:
            words = model_inputs["input_ids"]
            ours = model.generate(words, max_new_tokens=8, do_sample=False)
            assert unpatch(model) == report.changed
            assert ours.equal(model.generate(words, max_new_tokens=8, do_sample=False))
        else:
            assert unpatch(model) == report.changed
        assert result(model, model_inputs).equal(stock)               # to the last bit
    assert before == (dict(model.named_modules()), {n: type(m) for n, m in model.named_modules()})
    assert all(m.config is configs[n] for n, m in model.named_modules() if n in configs)


@pytest.mark.parametrize("family", ("t5", "bart", "whisper"))
def test_encoder_decoders_generate_the_same(family):
    model = tiny(family)
    model_inputs = {n: t for n, t in inputs(family).items() if not n.startswith("decoder")}
    with torch.no_grad():
        stock = model.generate(**model_inputs, max_new_tokens=8, do_sample=False)
        with patched(model, only=KINDS):
            assert model.generate(**model_inputs, max_new_tokens=8, do_sample=False).equal(stock)


@pytest.mark.parametrize(("name", "changes", "served"), [
    # interleaved pairs
    ("Glm", {"head_dim": 16}, {"rope": 2, "mlp": 2, "rms_norm": 5, "attention": 2}),
    # the same in other tables
    ("Cohere2", {}, {"rope": 2, "mlp": 2, "layer_norm": 3, "attention": 2}),
    ("Starcoder2", {}, {"rope": 2, "mlp": 2, "layer_norm": 5, "attention": 2}),
    ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32},
     {"rope": 2, "moe": 2, "rms_norm": 9, "attention": 2}),
    # its norm and its activation are its own
    ("Nemotron", {}, {"rope": 2, "linear": 12, "attention": 2}),
    # attention by its own code
    ("Bloom", {"n_head": 4, "n_layer": 2}, {"linear": 8, "layer_norm": 6}),
    ("Mamba", {"state_size": 4}, {"linear": 8, "rms_norm": 3,
                                     "linear_attention": 2})])
def test_architectures_nobody_listed(name, changes, served):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "pad_token_id": 0, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 64, **changes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model, words = getattr(transformers, f"{name}ForCausalLM")(config).eval(), tokens(2, 9)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
        stock = model(words).logits
        counts = patch(model, only=KINDS).counts()
        assert {kind: counts.get(kind) for kind in served} == served
        torch.testing.assert_close(model(words).logits, stock, rtol=1e-4,
                                   atol=1e-5 * float(stock.abs().max()))
        unpatch(model)
        assert model(words).logits.equal(stock)


def test_two_models_of_one_configuration_share_nothing():
    first = tiny("llama")
    second = type(first)(first.config).eval()
    model_inputs = inputs("llama")
    with torch.no_grad():
        stock = result(second, model_inputs)
        patch(first)
        assert first.config._attn_implementation == "layerzero"
        assert second.config._attn_implementation != "layerzero"
        assert type(second.model.norm) is not type(first.model.norm)
        assert result(second, model_inputs).equal(stock)
        first.config.use_cache = False         # set while patched: it stays
        unpatch(first)
    assert first.config is second.config and first.config.use_cache is False


def test_a_part_of_a_model_is_patched_without_its_attention():
    """Masks come from the whole model, in the form that its attention wants."""
    model, model_inputs = tiny("llama"), inputs("llama")
    with torch.no_grad():
        stock = result(model, model_inputs)
        report = patch(model.model.layers[0])
        counts = report.counts()
        # where a kernel of ours is built, which gains over torch's operations
        counts.pop("rope", 0)
        assert counts == {"rms_norm": 2, "linear": 4, "mlp": 1}
        assert "whole model" in next(row.why for row in report.left if row.kind == "LlamaAttention")
        torch.testing.assert_close(result(model, model_inputs), stock, rtol=1e-4, atol=1e-4)
        assert unpatch(model) == report.changed
        assert result(model, model_inputs).equal(stock)


def test_patching_twice_changes_nothing_and_says_so():
    model = tiny("llama")
    once = patch(model)
    classes = [type(m) for m in model.modules()]
    twice = patch(model)
    assert once.changed > 0 == twice.changed
    assert once.counts() == twice.counts()
    assert {row.why for row in twice.patched} == {"patched before"}
    assert "already" in str(twice)
    assert classes == [type(m) for m in model.modules()]
    assert unpatch(model) == once.changed and unpatch(model) == 0


def test_a_block_leaves_what_was_patched_before_it():
    model = tiny("llama")
    patch(model, only="rms_norm")
    kept = type(model.model.norm)
    with patched(model) as report:
        assert report.counts()["mlp"] == 2
    assert type(model.model.norm) is kept
    assert type(model.lm_head) is torch.nn.Linear
    assert model.config._attn_implementation != "layerzero"


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_training_step_has_the_same_gradients(family):
    model_inputs = inputs(family)
    model_inputs["labels"] = model_inputs.get("decoder_input_ids", model_inputs["input_ids"])
    without = {"t5": {"dropout_rate": 0.0},
               "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}}
    model = tiny(family, **without.get(family, {})).train()
    stock = gradients(model, model_inputs)
    patch(model, only=KINDS)
    ours = gradients(model, model_inputs)
    model.gradient_checkpointing_enable()
    for grads in (ours, gradients(model, model_inputs)):
        assert grads.keys() == stock.keys()
        for name, want in stock.items():
            torch.testing.assert_close(grads[name], want, rtol=1e-3,
                                       atol=1e-4 * float(want.abs().max()) + 1e-7)


def test_dropout_in_training_draws_what_the_stock_model_draws():
    model, model_inputs = tiny("gpt2", resid_pdrop=0.5, attn_pdrop=0.0,
                               embd_pdrop=0.0).train(), inputs("gpt2")
    torch.manual_seed(0)
    stock = result(model, model_inputs)
    patch(model)
    torch.manual_seed(0)
    torch.testing.assert_close(result(model, model_inputs), stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_floats_are_as_near_to_the_truth_as_stock(family, dtype):
    model = tiny(family).to(dtype)
    model_inputs = inputs(family)
    with torch.no_grad():
        truth = truth_of(model, model_inputs)
        stock = (result(model, model_inputs).double() - truth).abs()
        patch(model, only=KINDS)
        actual = result(model, model_inputs)
    ours = (actual.double() - truth).abs()
    assert actual.dtype == dtype
    assert (float(ours.mean()) <= 1.5 * float(stock.mean()) and float(ours.max()) <= 2
            * float(stock.max()))


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_autocast_computes_in_the_dtypes_of_stock(family):
    model, model_inputs = tiny(family), inputs(family)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stock = result(model, model_inputs)
        patch(model, only=KINDS)
        ours = result(model, model_inputs)
    assert ours.dtype == stock.dtype
    assert float((ours - stock).abs().max()) <= 0.1 * float(stock.abs().max())


@pytest.mark.parametrize("family", ("llama", "gemma2", "gpt2", "mixtral") if FULL else ("llama",))
def test_compiled_whole_with_no_more_recompiles_than_stock(family):
    import torch._dynamo.testing

    frames, small = [], {} if FULL else {"num_hidden_layers": 1}
    for ours in (False, True):
        model = tiny(family, **small)
        if ours:
            patch(model, only=KINDS)
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager" if FULL else "eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch.no_grad():
            for length in (7, 9, 12):
                words = tokens(2, length)
                torch.testing.assert_close(
                    compiled(words, use_cache=False).logits,
                    tiny(family, **small)(words, use_cache=False).logits,
                    rtol=1e-3, atol=1e-3)
        frames.append(counter.frame_count)
    torch._dynamo.reset()
    assert frames[1] <= frames[0], frames


@pytest.mark.parametrize("family", ("llama", "gpt2", "mixtral", "t5") if FULL else ("llama",))
def test_exported_and_loaded_again(family):
    model, model_inputs = tiny(family), inputs(family, length=8)
    with torch.no_grad():
        want = model(**model_inputs, use_cache=False).logits
        patch(model, only=KINDS)
        program = torch.export.export(model, (),
                                      {**model_inputs, "use_cache": False, "return_dict": False},
                                      strict=False)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        result = loaded(**model_inputs, use_cache=False, return_dict=False)[0]
    torch.testing.assert_close(result, want, rtol=1e-3, atol=1e-3)


def test_explain_names_the_kernels():
    model, model_inputs = tiny("llama"), inputs("llama")
    report = patch(model)
    with torch.no_grad():
        explanation = report.explain(**model_inputs)
        model(**model_inputs)
    by_op = {row.op: row for row in explanation.rows}
    assert {"attention", "rms_norm", "linear", "mlp"} <= set(by_op)
    assert sum(row.calls for row in explanation.rows if row.op == "rms_norm") == 5
    assert all("." in row.kernel and row.kernel in str(explanation) for row in explanation.rows)
    since = report.explain()
    assert {"rms_norm", "mlp"} <= {row.op for row in since.rows}


def test_the_report_is_a_table_and_a_dict():
    report = patch(tiny("clip"))
    text, data = str(report), report.to_dict()
    assert "lz.attention" in text and "encoder.layers.*.self_attn" in text
    assert data["counts"] == report.counts()
    left = {row["kind"]: row["why"] for row in data["rows"] if not row["patched"]}
    assert "QuickGELUActivation" in left["CLIPMLP"]
    assert all(left.values())


def test_a_softcap_that_the_models_own_attention_leaves_out_stays_out(monkeypatch):
    """transformers 5.17 runs Gemma 2 by its sdpa, which takes a softcap and does nothing with it.
    """
    code = transformers.models.gemma2.modeling_gemma2
    sdpa = code.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def uncapped(*args, softcap=None, **kw):
        return sdpa(*args, **kw)

    monkeypatch.setattr(code.Gemma2PreTrainedModel, "_supports_sdpa", True)
    monkeypatch.setattr(sys.modules[sdpa.__module__], "sdpa_attention_forward", uncapped)
    monkeypatch.setitem(code.ALL_ATTENTION_FUNCTIONS, "sdpa", uncapped)
    model, model_inputs = tiny("gemma2", attn_implementation="sdpa"), inputs("gemma2")
    truth = truth_of(model, model_inputs)
    stock = error(model, model_inputs, truth)
    capped = error(tiny("gemma2", attn_implementation="layerzero"), model_inputs, truth_of(
        tiny("gemma2", attn_implementation="eager"), model_inputs))
    report = patch(model)
    assert error(model, model_inputs, truth) <= 2 * stock + 1e-6 and capped <= 2 * stock + 1e-6
    assert error(tiny("gemma2", attn_implementation="eager"), model_inputs, truth) > 0.1
    assert any(row.kind == "attention" and "softcap" in row.why for row in report.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ("llama", "gemma2", "gpt2", "mixtral"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(family, dtype):
    model = tiny(family).to("cuda", dtype)
    model_inputs = {n: t.cuda() for n, t in inputs(family).items()}
    with torch.no_grad():
        truth = truth_of(tiny(family).to(dtype), inputs(family))
        stock = result(model, model_inputs)
        report = patch(model)
        counts = report.counts()
        assert {kind: counts[kind] for kind in SERVED[family] if kind in counts
                and kind != "rope"} == {
            kind: n for kind, n in SERVED[family].items() if kind != "rope"}, report
        ours = result(model, model_inputs)
        errors = [float((out.double().cpu() - truth).abs().max()) for out in (ours, stock)]
        assert errors[0] <= 2 * errors[1] + 16 * torch.finfo(torch.float32).eps * float(
            truth.abs().max()), errors
        model.generate(model_inputs["input_ids"], max_new_tokens=8, do_sample=False)
        unpatch(model)
        assert result(model, model_inputs).equal(stock)
