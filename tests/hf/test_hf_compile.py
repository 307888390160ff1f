"""Models with `attn_implementation="layerzero"` compiled, exported, trained, and in other
precisions.
"""

from __future__ import annotations

import os

import pytest
import torch
from models import inputs, padded, tiny, tokens
from torch._dynamo.utils import counters
from transformers import StaticCache

pytestmark = pytest.mark.integration
full = pytest.mark.skipif(os.environ.get("LZ_TEST_FULL") != "1",
                          reason="takes minutes; LZ_TEST_FULL=1 runs it")
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": None}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_graphs(model, calls, backend: str) -> int:
    """How many graphs the calls needed; every result is compared with the uncompiled one."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for inputs in calls:
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=1e-5,
                                       rtol=1e-5)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family, stock, changes, backend", [
    ("llama", "sdpa", ONE_LAYER, "eager"),
    pytest.param("mistral", "sdpa", {}, "aot_eager", marks=full),
    pytest.param("gemma2", "eager", {}, "aot_eager", marks=full),
    pytest.param("gpt_oss", "eager", {}, "aot_eager", marks=full),
    pytest.param("t5", "sdpa", {}, "aot_eager", marks=full)])
def test_one_graph_and_no_more_recompilations_than_stock(family, stock, changes, backend):
    calls = [inputs(family, length=length) for length in (8, 12, 13)]
    mine = compiled_graphs(tiny(family, attn_implementation="layerzero", **changes), calls, backend)
    assert mine <= compiled_graphs(tiny(family, attn_implementation=stock, **changes), calls,
                                   backend)


@pytest.mark.parametrize("family, steps", [("llama", 3), pytest.param("mistral", 6, marks=full)])
def test_decoding_with_a_static_cache_needs_no_more_graphs_than_stock(family, steps):
    """The same tensors for each token; with a sliding window of 6, before and after it is full."""
    words = tokens(1, 12)

    def decode(implementation):
        model = tiny(family, attn_implementation=implementation, num_hidden_layers=1)
        cache = StaticCache(config=model.config, max_cache_len=16)
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            parts = [model(words[:, :4], past_key_values=cache).logits]
            parts += [step(words[:, i:i + 1], past_key_values=cache,
                           position_ids=torch.tensor([[i]])).logits
                      for i in range(4, 4 + steps)]
            want = model(words[:, :4 + steps]).logits
        torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)
        return counters["stats"]["unique_graphs"]

    assert decode("layerzero") <= decode("sdpa")


@pytest.mark.parametrize("family, changes", [
    ("llama", ONE_LAYER), pytest.param("gemma2", {}, marks=full),
    pytest.param("vit", {}, marks=full)])
def test_exported_and_saved_and_loaded(family, changes, tmp_path):
    model, model_inputs = tiny(family, attn_implementation="layerzero", **changes), inputs(family)
    options = {"use_cache": False} if family != "vit" else {}
    length, batch = torch.export.Dim("length", min=2,
                                     max=64), torch.export.Dim("batch", min=1, max=8)
    shapes = {name: {0: batch} if family == "vit" else {0: batch,
                                                        1: length} for name in model_inputs}
    program = torch.export.export(model, (), {**model_inputs, **options},
                                  dynamic_shapes={**shapes, **dict.fromkeys(options)})
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    more = [(model_inputs, slice(None)), (inputs(family, batch=3, length=9, seed=7), slice(None))]
    # with padding, which the example had not: all but what is padded
    if family != "vit":
        more.append((padded(pads=(5,)), slice(5, None)))
    for again, rows in more:
        with torch.no_grad():
            got, want = loaded(**again, **options).logits, model(**again, **options).logits
        torch.testing.assert_close(got[:, rows], want[:, rows], atol=1e-5, rtol=1e-5)


def gradients(model, inputs, steps: int = 1, **autocast) -> dict[str, torch.Tensor]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "t5", "bart", "bert"])
def test_training_steps_have_the_gradients_of_stock(family):
    model_inputs = {**inputs(family), "labels": tokens(2, 12, seed=3)}
    model_inputs.pop("decoder_input_ids", None)
    without = {"attention_dropout": 0.0} if family not in ("t5", "bert") else {}
    without |= {"t5": {"dropout_rate": 0.0}, "bart": {"dropout": 0.0}, "bert": {
        "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}}.get(family, {})
    mine = gradients(tiny(family, attn_implementation="layerzero", **without), model_inputs,
                     steps=2)
    stock = gradients(tiny(family, attn_implementation="eager", **without), model_inputs, steps=2)
    assert mine.keys() == stock.keys()
    for name, grad in stock.items():
        torch.testing.assert_close(mine[name], grad, atol=2e-4, rtol=2e-3,
                                   msg=lambda m, n=name: f"{n}: {m}")


def test_gradient_checkpointing_changes_no_gradient():
    inputs = {**padded(), "labels": tokens(2, 12, seed=3)}
    plain, checkpointed = (tiny("mistral", attn_implementation="layerzero") for _ in range(2))
    checkpointed.gradient_checkpointing_enable()
    want, got = gradients(plain, inputs), gradients(checkpointed, {**inputs, "use_cache": False})
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad)


def test_dropout_in_training_and_none_in_eval(calls):
    model = tiny("llama", attn_implementation="layerzero", attention_dropout=0.4).train()
    torch.manual_seed(0)
    first, second = model(tokens()).logits, model(tokens()).logits
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(tokens()).logits, first)
    model.eval()
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "t5", "whisper"])
def test_autocast_is_as_close_as_stock(family):
    model_inputs = inputs(family)
    truth = tiny(family)(**model_inputs).logits

    def error(implementation):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return (tiny(family, attn_implementation=implementation)(**model_inputs).logits
                    - truth).abs().max()

    assert error("layerzero") <= 2 * error("eager")


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "bart"])
def test_fp16_is_as_close_as_stock(family):
    model_inputs = inputs(family)
    truth = tiny(family)(**model_inputs).logits

    def error(implementation):
        with torch.no_grad():
            return (tiny(family, attn_implementation=implementation).half()(**model_inputs).logits
                    - truth).abs().max()

    assert error("layerzero") <= 2 * error("eager")
