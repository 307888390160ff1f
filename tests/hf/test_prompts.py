"""Prompts by the layers of the decode step: what the model gives, in its own cache."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from models import tiny, tokens  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402

pytestmark = pytest.mark.integration


def model_with_prompts(family, **how):
    """An accelerated model whose prompts are not only on CUDA ours."""
    model = tiny(family)
    report = accelerate(model, measure=False, patch=False, **how)
    report._step.prompts = report._step._prompt_step()
    return model, report


def run(model, ids, **more):
    with torch.no_grad():
        return model(ids, **more)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_the_same_as_the_model(family):
    model, report = model_with_prompts(family)
    ids, stock = tokens(2, 9), tiny(family)    # longer than a window
    ours, theirs = (run(m, ids, use_cache=True) for m in (model, stock))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    for layer, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers):
        assert type(layer) is type(other)
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-4)
    last = run(model, ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, theirs.logits[:, -1:], rtol=1e-4, atol=1e-4)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **how), stock.generate(ids, **how))
    assert report.prompted == {"step": 3}


def test_what_is_not_known_is_left_to_the_model():
    model, report = model_with_prompts("llama")
    ids, stock = tokens(2, 8), tiny("llama")
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])          # two texts in one row
    for inputs, more in ((ids, {"attention_mask": padded}), (ids[:1], {"position_ids": places}),
                         (ids, {"use_cache": False})):
        torch.testing.assert_close(run(model, inputs, **more).logits,
                                   run(stock, inputs, **more).logits, rtol=1e-4, atol=1e-4)
    cache = run(model, ids, use_cache=True).past_key_values
    other = run(stock, ids, use_cache=True).past_key_values
    torch.testing.assert_close(run(model, ids, past_key_values=cache).logits,
                               run(stock, ids, past_key_values=other).logits, rtol=1e-4, atol=1e-4)
    assert report.prompted == {"step": 1, "padding, or several texts": 2, "use_cache is given": 1,
                               "tokens after others, which are many": 1}
    with pytest.raises(RuntimeError):
        run(model, ids[:, :0])


def test_codes_for_weights_and_a_fault():
    model, report = model_with_prompts("llama", weights="int4")
    ids = tokens(2, 8)
    own = type(model).forward(model, ids, use_cache=True)
    torch.testing.assert_close(run(model, ids).logits, own.logits, rtol=1e-3, atol=1e-3)
    at, seen = report._step.prompts.layers[1], []
    object.__setattr__(at, "mlp", lambda x: torch.mm(x, x))
    stop = lz.subscribe(seen.append)
    cache = transformers.DynamicCache(config=model.config)
    try:
        result = run(model, ids, past_key_values=cache)
    finally:
        stop()
    torch.testing.assert_close(result.logits, own.logits, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 8 and report._step.prompts is None
    assert [e.op for e in seen if type(e).__name__ == "Fallback"] == ["prompt"]
    assert run(model, ids[:, :1], past_key_values=cache).logits.isfinite().all()
    assert report.served == {"step": 1}        # the decode step itself is not at fault
