"""The captured step as one persistent kernel on a GPU: right token after token, in a graph, and out
of the way when a launch gives up.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import emitted, world

from layerzero.backends.cuda.step.plan import Config, LayerTensors, PersistentStep, Shape
from layerzero.spec.event import Fallback

transformers = pytest.importorskip("transformers", exc_type=ImportError)

from layerzero.integrations.transformers.accelerate import accelerate  # noqa: E402
from layerzero.integrations.transformers.decoding.cuda import persistent  # noqa: E402
from layerzero.integrations.transformers.trial import _OwnForward  # noqa: E402

__all__ = ["emitted", "world"]                # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip)
                       or torch.cuda.get_device_capability() < persistent.MIN_CAPABILITY,
                       reason="needs an NVIDIA GPU of compute capability 9.0"),
    pytest.mark.timeout(300),                  # every case compiles its kernels
]


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().cuda().eval()


def steps(model: Any, ids: torch.Tensor, before: int) -> torch.Tensor:
    """The logits of the tokens after the first ones, one by one."""
    cache = model(ids[:, :before], use_cache=True).past_key_values
    return torch.cat([model(ids[:, n:n + 1], past_key_values=cache).logits.float()
                      for n in range(before, ids.shape[1])], 1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name, more", [
    ("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 128}), ("Mistral", {"sliding_window": 64})])
@torch.no_grad()
def test_the_same_as_the_model(name: str, more: dict[str, Any], batch: int,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_race", lambda *_: None)      # whichever is faster
    model, ids = model_of(name, **more), torch.randint(1000, (batch, 610), device="cuda")
    eager = steps(model, ids, 600)
    truth = model.float()(ids).logits[:, 600:]
    report = accelerate(model.bfloat16(), measure=False, patch=False, capture=True)
    report._step.prompts = None                # whose kernels may change while they are compiled
    got = steps(model, ids, 600)
    assert report.kernels[persistent.WHAT] == persistent.NAME, report.kernels
    assert report.served["captured"] >= 10
    assert (got - truth).std() <= 2 * (eager - truth).std()
    assert torch.equal(got, steps(model, ids, 600))


@pytest.mark.parametrize("weights", ["int4", "fp8"])
@torch.no_grad()
def test_codes_for_weights(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_race", lambda *_: None)
    model, ids = model_of("Llama"), torch.randint(1000, (1, 610), device="cuda")
    report = accelerate(model, measure=False, weights=weights, capture=True)
    report._step.prompts = None
    got = steps(model, ids, 600)
    assert report.kernels[persistent.WHAT] == persistent.NAME, report.kernels
    want = steps(_OwnForward(model), ids, 600)
    assert (got - want).std() <= 0.05 * want.std()


@torch.no_grad()
def test_a_launch_that_gave_up_is_done_again(emitted: list[Any],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "_race", lambda *_: None)
    model, ids = model_of("Llama"), torch.randint(1000, (1, 50), device="cuda")
    report = accelerate(model, measure=False, patch=False, capture=True)
    want = steps(model, ids, 40)
    cache = model(ids[:, :40], use_cache=True).past_key_values
    got = [model(ids[:, n:n + 1], past_key_values=cache).logits.float() for n in range(40, 45)]
    fixed, = (f for f in report._step._captured._fixed[1] if f.owner() is cache)
    fixed._persistent.problem[0] = 1           # as a launch says it
    for room in (r for pair in fixed.kv_buffers for r in pair):
        room[:, 44] = torch.nan                # and what it had not kept yet
    got += [model(ids[:, n:n + 1], past_key_values=cache).logits.float() for n in range(45, 50)]
    assert [e.served_by for e in emitted if isinstance(e, Fallback)] == ["a graph of kernels"]
    assert "gave up" in report.kernels[persistent.WHAT]
    assert (torch.cat(got, 1) - want).abs().max() <= 0.1 * want.std()


def test_a_launch_ends_by_itself() -> None:
    shape = Shape(256, 4, 2, 64, 32, 512, 100, 2)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16) / 16

    layers = [LayerTensors(noise(256), noise(512, 256), None, None, None, noise(256, 256),
                           noise(256), noise(1024, 256), noise(256, 512), noise(64, 128),
                           noise(1, 64, 2, 64), noise(1, 64, 2, 64)) for _ in range(2)]
    embed = noise(100, 256)
    step = PersistentStep(shape, Config(), layers, embed, noise(256), embed, eps=1e-5,
                          head_eps=1e-5, scale=0.125, limit_s=1.0)
    token, state = torch.ones((1, 1), dtype=torch.int64, device="cuda"), torch.full(
        (2,), 3, device="cuda")
    assert step.resident(torch.cuda.current_device())
    step(token, state)
    torch.cuda.synchronize()
    assert not step.timed_out() and not step.logits.isnan().any() and state.tolist() == [4, 4]
    step.blocks -= 1                           # what the missing block should send never comes
    step(token, state)
    torch.cuda.synchronize()
    assert step.timed_out() and step.logits.isnan().any() and state.tolist() == [4, 4]
    step._control[2] = 1                       # another block has given up
    step(token, state)
    torch.cuda.synchronize()                   # returns
