"""The captured step of several sequences is as exact as the model it was made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip)
                       or torch.cuda.get_device_capability() < (9, 0),
                       reason="needs an NVIDIA GPU of compute capability 9.0")]
PROMPT, TOKENS = 45, 40                        # past a multiple of 16, and of 64


@torch.no_grad()
def decoded(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The logits of the tokens after the prompt, one step each."""
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    return torch.stack([model(ids[:, n:n + 1], past_key_values=cache).logits[:, -1].float().clone()
                        for n in range(PROMPT, PROMPT + TOKENS)])


@pytest.mark.parametrize("batch, window", [(8, None), (3, 30), (20, None)])
def test_as_exact_as_the_model(batch: int, window: int | None) -> None:
    pytest.importorskip("triton")
    transformers = pytest.importorskip("transformers")
    from layerzero.integrations.transformers.accelerate import accelerate

    torch.manual_seed(0)
    name, more = ("Mistral", {"sliding_window": window}) if window else ("Llama", {})
    config = getattr(transformers, f"{name}Config")(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=128, pad_token_id=0,
        max_position_embeddings=512, **more)
    eager = getattr(transformers, f"{name}ForCausalLM")(config).eval().cuda().bfloat16()
    truth, ours = copy.deepcopy(eager).float(), copy.deepcopy(eager)
    report = accelerate(ours, measure=False, capture=True)
    ids = torch.randint(3, 512, (batch, PROMPT + TOKENS), device="cuda")
    want = decoded(truth, ids)
    error, allowed = ((decoded(model, ids) - want).abs().max() for model in (ours, eager))
    assert "one launch" in report.kernels["attention, captured"]
    assert "cuda.attention_token" in report.kernels["attention, captured"]
    assert error <= 2 * allowed
