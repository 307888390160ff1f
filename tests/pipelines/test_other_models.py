"""Models of diffusers nobody thought of when the integration was written: found by what they do,
not by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", "0.36")
import diffusers
from diffusers.models.attention_dispatch import dispatch_attention_fn
from helpers import ATTENTION, Fake, register

from layerzero.integrations.diffusers import attn_processor, patch_diffusers, unpatch_diffusers

pytestmark = pytest.mark.integration
TIMES = torch.tensor([3.0, 500.0])
THERE = torch.arange(16) < torch.tensor([[16], [9]])


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def wan() -> tuple[nn.Module, dict[str, Any]]:
    """Video; processors with a backend."""
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        rope_max_seq_len=32), {
            "hidden_states": rand(2, 4, 2, 16, 16), "encoder_hidden_states": rand(2, 12, 16),
            "timestep": TIMES}


def lumina() -> tuple[nn.Module, dict[str, Any]]:
    """Fewer key heads than query heads, and a mask."""
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2),
        axes_lens=(128, 128, 128), cap_feat_dim=8), {
            "hidden_states": rand(2, 4, 8, 8), "encoder_hidden_states": rand(2, 16, 8),
            "timestep": TIMES / 1000, "encoder_attention_mask": THERE}


def mochi() -> tuple[nn.Module, dict[str, Any]]:
    """An attention layer of its own class, and a pool that calls torch by itself."""
    return diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=4, max_sequence_length=16), {
            "hidden_states": rand(2, 4, 2, 16, 16), "encoder_hidden_states": rand(2, 16, 16),
            "timestep": TIMES, "encoder_attention_mask": THERE}


def added_keys() -> tuple[nn.Module, dict[str, Any]]:
    """A UNet whose text comes as additional keys."""
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        norm_num_groups=8,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D")), {
            "sample": rand(2, 4, 8, 8), "encoder_hidden_states": rand(2, 5, 32), "timestep": TIMES}


def video_unet() -> tuple[nn.Module, dict[str, Any]]:
    return diffusers.UNetSpatioTemporalConditionModel(
        sample_size=16, down_block_types=("CrossAttnDownBlockSpatioTemporal",
                                          "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(32, 64), addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24, layers_per_block=1,
        cross_attention_dim=32, num_attention_heads=(2, 4), num_frames=2), {
            "sample": rand(1, 2, 8, 16, 16), "timestep": TIMES[:1],
            "encoder_hidden_states": rand(1, 1, 32), "added_time_ids": rand(1, 3)}


def wan_vae() -> tuple[nn.Module, dict[str, Any]]:
    """Attention written out in a module, with no processor."""
    return diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1],
                                      num_res_blocks=1), {
        "sample": rand(1, 3, 5, 16, 16)}


# and its calls of attention
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], int]] = {
    "wan": (wan, 4), "lumina": (lumina, 4), "mochi": (mochi, 5), "added keys": (added_keys, 4),
    "video unet": (video_unet, 16), "wan vae": (wan_vae, 4)}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_output(name, world):
    torch.manual_seed(0)
    make, calls = MODELS[name]
    model, inputs = make()
    model.eval()

    def run() -> Tensor:
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    stock = run()
    fake = Fake("fake.attention", ATTENTION)
    register(fake)
    patch_diffusers(model)
    assert (run() - stock).abs().max() < 1e-4 and fake.calls == calls
    unpatch_diffusers(model)
    assert torch.equal(run(), stock) and fake.calls == calls


class GlobalBackend:
    """A processor that leaves the backend to diffusers' default, as a few do."""

    def __call__(self, query: Tensor) -> Tensor:
        return dispatch_attention_fn(query, query, query)


class NamedBackend:
    """One that names its backend: that is asked for, and stays."""

    def __call__(self, query: Tensor) -> Tensor:
        return dispatch_attention_fn(query, query, query, backend="native")


def test_a_processor_that_leaves_the_backend_open(world):
    fake = Fake("fake.attention", ATTENTION)
    register(fake)
    query = rand(1, 5, 2, 8)
    assert torch.allclose(attn_processor(GlobalBackend())(query), GlobalBackend()(query), atol=1e-6)
    assert fake.calls == 1
    layer = nn.Identity()
    layer.processor = NamedBackend()
    assert list(patch_diffusers(layer).left) == [("", "NamedBackend",
                                                  "computes attention by itself")]
