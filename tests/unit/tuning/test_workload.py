"""The calls of a model are those it makes; a workload comes from many places and is one list of
kinds.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import layerzero as lz
from layerzero.files.calls import write_calls
from layerzero.operate import calls as written
from layerzero.spec.call import Call, TensorSpec
from layerzero.tuning.models import MODELS, Level, Model, calls_of
from layerzero.tuning.workload import calls_for, cases_of, kind_key, merge, standard
from layerzero.world import snapshot as worlds

ASKED = ("llama-3-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b",
         "mistral-7b", "gemma-2-9b", "gemma-3-1b", "phi-3-mini", "smollm2-135m", "mixtral-8x7b",
         "deepseek-v2-lite", "deepseek-v3", "gpt2", "t5-base", "bert-base", "vit-base-16", "sd-1.5",
         "sdxl", "dit-xl-2", "flux-1-dev")


def shape(call, name):
    return call.arguments[name].shape


def of(calls, op, **wanted):
    return [c for c in calls if c.op == op
            and all(c.arguments.get(n) == v for n, v in wanted.items())]


def norm(count=1, rows=4, hidden=64, name="", **more):
    return Call("rms_norm", {"x": TensorSpec((rows, hidden), "float32", **more)}, count=count,
                name=name)


# models

def test_the_models_are_there():
    assert set(ASKED) <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_every_call_of_a_model_keeps_the_contract_and_is_served(name):
    calls = calls_of(name, prompt=24, context=70, dtype="float32", scale=1 / 32)
    for call in calls:
        op = lz.op(call.op)
        values = written.make_values(op, call)
        assert lz.which(call.op, **values)
        out = getattr(lz, call.op)(**values)
        assert torch.isfinite(out[0] if isinstance(out, tuple) else out).all(), call


@pytest.mark.parametrize("name", MODELS)
def test_the_full_size_can_be_described_without_memory(name):
    keys = [kind_key(call) for call in calls_of(name, batch=2)]
    assert len(keys) > 4


def test_llama_as_published():
    calls = calls_of("llama-3-8b", batch=2, prompt=512, context=4096)
    decode = [c for c in calls if c.name == "llama-3-8b decode 4096"]
    prefill = [c for c in calls if c.name == "llama-3-8b prefill 512"]
    assert len(decode) + len(prefill) == len(calls)
    (attend,) = of(decode, "attention")
    assert attend.count == 32 and "is_causal" not in attend.arguments
    assert [shape(attend, n) for n in ("query", "key", "value")] == [
        (2, 32, 1, 128), (2, 8, 4096, 128), (2, 8, 4096, 128)]
    (attend,) = of(prefill, "attention")
    assert attend.arguments["is_causal"] is True
    assert attend.arguments["query"].strides is None and attend.arguments["value"].strides == (
        8 * 512 * 128, 128, 8 * 128, 1)
    (mlp,) = of(prefill, "mlp")
    assert (shape(mlp, "weight_in"), shape(mlp, "weight_down"),
            mlp.count) == ((28672, 4096), (4096, 14336), 32)
    assert sorted((shape(c, "weight"), c.count) for c in of(decode, "linear")) == [
        ((4096, 4096), 32), ((6144, 4096), 32), ((128256, 4096), 1)]
    assert [c.count for c in of(decode, "add_rms_norm")] == [64]
    # one token is asked for, not 512
    assert shape(of(prefill, "linear")[-1], "x") == (2, 1, 4096)
    assert [shape(c, "logits") for c in of(calls, "sample")] == [(2, 128256)] * 2


def test_what_sets_a_model_apart():
    gemma = calls_of("gemma-2-9b", prompt=8192, context=8192)
    local, full = of([c for c in gemma if "prefill" in c.name], "attention")
    assert ((local.arguments["window_left"], local.count) == (4095, 21)
            and "window_left" not in full.arguments)
    assert full.arguments["softcap"] == 50.0
    assert [shape(c, "key")[2] for c in of([c for c in gemma if "decode" in c.name],
                                           "attention")] == [4096, 8192]
    assert (all(c.arguments["offset"] == 1.0 for c in of(gemma, "rms_norm"))
            and not of(gemma, "add_rms_norm"))

    qwen = calls_of("qwen3-8b", decode=False)
    assert [shape(c, "x") for c in of(qwen, "rms_norm")][1:] == [(1, 512, 32, 128),
                                                                 (1, 512, 8, 128)]

    mixture = calls_of("deepseek-v3", prefill=False, context=100)
    (latent,) = of(mixture, "mla_paged_attention")
    assert shape(latent, "q_nope") == (1, 128, 512) and shape(latent, "ckv_cache") == (2, 64, 512)
    assert (latent.arguments["block_table"].values == (0, 1)
            and latent.arguments["context_lens"].values == (100,))
    (gate,), (experts,) = of(mixture, "moe_gate"), of(mixture, "moe")
    assert gate.arguments["n_group"] == 8 and gate.count == experts.count == 58
    assert shape(experts, "w_gate_up") == (256, 4096, 7168)
    assert len(set(experts.arguments["topk_ids"].values)) == 8

    t5 = calls_of("t5-base", prompt=64, context=20)
    cross = [c for c in of(t5, "attention") if "attn_mask" not in c.arguments]
    assert ([shape(c, "key")[2] for c in cross] == [64]
            and all(c.arguments["scale"] == 1.0 for c in of(t5, "attention")))

    sdxl = calls_of("sdxl")
    assert {(shape(c, "query")[2], shape(c, "key")[2]): c.count for c in of(sdxl, "attention")} == {
        (4096, 4096): 10, (4096, 77): 10, (1024, 1024): 60, (1024, 77): 60}


def test_steps_can_be_asked_for_alone():
    both = calls_of("gpt2")
    assert calls_of("gpt2", decode=False) + calls_of("gpt2", prefill=False) == both
    with pytest.raises(lz.errors.ConfigError, match="bert-base makes no call"):
        calls_of("bert-base", prefill=False)


def test_a_narrower_model_keeps_what_kernels_are_particular_about():
    for name in ("llama-3-8b", "qwen3-0.6b", "phi-3-mini"):
        whole, small = (of(calls_of(name, scale=s), "attention")[0] for s in (1.0, 1 / 8))
        assert shape(small, "query")[3] == shape(whole, "query")[3]
        group = [shape(c, "query")[1] // shape(c, "key")[1] for c in (whole, small)]
        assert group[0] == group[1] and shape(small, "query")[1] < shape(whole, "query")[1]


def test_many_routed_tokens_are_routed_by_logits():
    (experts,) = of(calls_of("qwen3-30b-a3b", batch=4, prompt=4096, decode=False), "moe")
    assert experts.arguments["top_k"] == 8 and "topk_ids" not in experts.arguments


@pytest.mark.parametrize(("arguments", "message"), [
    ({"model": "lama-3-8b"}, "did you mean 'llama-3-8b'"),
    ({"model": "gpt2", "batch": 0}, "batch must be at least 1"),
    ({"model": "gpt2", "scale": 0}, "scale must be"),
    ({"model": "gpt2", "scale": 2}, "scale must be"),
])
def test_a_wrong_question_is_answered_with_what_to_do(arguments, message):
    with pytest.raises(lz.errors.ConfigError, match=message):
        calls_of(arguments.pop("model"), **arguments)


def test_a_model_of_ones_own():
    own = Model("mine", "unet", text_tokens=7, text_width=32, levels=(Level(16, 48, 2, 3, 1),),
                rope="",
                activation="geglu")
    assert Counter(c.op for c in calls_of(own)) == {"linear": 3, "attention": 2, "group_norm": 1,
                                                    "layer_norm": 1,
                                                    "mlp": 1}


# workloads

def test_calls_of_one_kind_become_one():
    calls = merge([norm(2, name="a"), norm(3, name="b"), norm(4, name="a"), norm(hidden=65)])
    assert [(c.count, c.name) for c in calls] == [(9, "a; b"), (1, "")]


def test_sizes_of_one_bucket_are_one_kind_and_layouts_are_not():
    assert [c.count for c in merge([norm(1, 100), norm(1, 120), norm(1, 130)])] == [2, 1]
    assert len(merge([norm(), norm(strides=(128, 1))])) == 2
    assert len(merge([norm(), Call("rms_norm", norm().arguments, grad=True)])) == 2


def test_from_a_file(tmp_path):
    file = tmp_path / "calls.jsonl"
    write_calls(file, [norm(2), norm(5)])
    assert [c.count for c in calls_for(file)] == [7]
    assert calls_for(str(file)) == calls_for(file)


def test_from_a_model():
    asked = {"batch": 2, "prompt": 32, "context": 64, "dtype": "float32", "scale": 0.125}
    assert calls_for("llama-3-8b", **asked) == merge(calls_of("llama-3-8b", **asked))


def test_from_the_cases_of_an_op():
    calls = calls_for("rms_norm", dtype="float32")
    assert 8 < len(calls) <= len(lz.op("rms_norm").cases)
    for call in calls:
        values = written.make_values(lz.op("rms_norm"), call)
        assert all(t.numel() for t in values.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", [n for n, op in worlds.current().catalog.ops.items()
                                  if op.read is None])
def test_every_op_has_cases_to_replay(name):
    assert cases_of(lz.op(name))


def test_from_arguments():
    q = torch.empty(1, 8, 1, 64, device="meta")
    (call,) = calls_for("attention",
                        arguments={"query": q, "key": q, "value": q, "is_causal": True})
    assert call.arguments == {**dict.fromkeys(("query", "key", "value"),
                                              TensorSpec((1, 8, 1, 64), "float32")),
                              "is_causal": True}


@pytest.mark.parametrize(("source", "arguments", "message"), [
    ("gpt3", None, "no file, no model and no operation"),
    ("rms_nrm", None, "did you mean 'rms_norm'"),
    ("rms_norm", {"colour": 1}, "no parameter colour"), ("tokenize", None, "cannot be replayed"),
])
def test_a_source_that_is_none(source, arguments, message):
    with pytest.raises(lz.errors.LayerZeroError, match=message):
        calls_for(source, arguments=arguments)


@pytest.mark.parametrize(("call", "message"), [
    (Call("rms_norm", {"y": TensorSpec((2,), "float32")}), "no parameter 'y'"),
    (Call("rms_norm"), "needs x"), (Call("rms_norm", {"x": TensorSpec((2, 2), "float31")}),
                                    "no dtype 'float31'"),
    (Call("rms_norms", {}), "there is no op"),
])
def test_a_call_that_was_written_wrongly_is_named(call, message):
    with pytest.raises(lz.errors.LayerZeroError, match=message):
        merge([call])


def test_the_standard_workload_is_broad_and_small():
    calls = standard()
    assert len(calls) >= 60 and len({kind_key(c) for c in calls}) == len(calls)
    assert {"attention", "rms_norm", "add_rms_norm", "layer_norm", "rope", "mlp", "linear",
            "sample"} <= {
        c.op for c in calls}
    text = " ".join(c.name for c in calls)
    assert all(model in text for model in ("llama-3-8b", "qwen3", "smollm2", "sdxl", "vit"))
    dtypes = Counter(v.dtype for c in calls for v in [next(iter(c.arguments.values()))])
    assert dtypes["float32"] > 30 and dtypes["bfloat16"] > 30
    attend = of(calls, "attention")
    lengths = [(shape(c, "query")[2], shape(c, "key")[2]) for c in attend]
    assert any(q == 1 and k > 1000 for q, k in lengths)                        # decode
    assert any(q == k > 1 and c.arguments.get("is_causal") for (q, k), c in zip(lengths, attend))
    assert any(q != k and q > 1 for q, k in lengths)                           # cross
    assert any("window_left" in c.arguments for c in attend)
    for call in calls:
        assert max(torch.Size(v.shape).numel() for v in call.arguments.values()
                   if isinstance(v, TensorSpec)) < 2 ** 24
