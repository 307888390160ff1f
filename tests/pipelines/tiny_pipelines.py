"""Whole pipelines of diffusers, a few thousand weights each: built from configurations, seeded, no
download.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = ("a", "photo", "painting", "of", "cat", "dog", "red", "blue", "in", "the", "snow")
PROMPT, NEGATIVE = "a painting of the red cat", "blue dog"


def tokenizer(length: int = 16) -> PreTrainedTokenizerFast:
    made = (
        Tokenizer(
            models.WordLevel(
                {w: i for i, w in enumerate(("<pad>", "<s>", "</s>", "<unk>", *WORDS))}, "<unk>")))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>",
                                                        special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>",
                                   eos_token="</s>",
                                   unk_token="<unk>", model_max_length=length)


def clip(kind: type = CLIPTextModel, hidden: int = 32) -> Any:
    return kind(CLIPTextConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=hidden, pad_token_id=0,
        bos_token_id=1, eos_token_id=2))


def t5() -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=37, num_layers=2,
                                   num_heads=4))


def vae(channels: int = 4, **changes: Any) -> AutoencoderKL:
    return AutoencoderKL(block_out_channels=(32, 64), in_channels=3, out_channels=3,
                         latent_channels=channels, down_block_types=("DownEncoderBlock2D",) * 2,
                         up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, **changes)


def unet(**changes: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(**{
        "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16, "in_channels": 4,
        "out_channels": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "norm_num_groups": 8, "attention_head_dim": 8,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32,
        **changes})


def sd15() -> Any:
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    return StableDiffusionPipeline(vae(), clip(), tokenizer(), unet(), scheduler, None, None,
                                   requires_safety_checker=False)


def sdxl() -> Any:
    denoiser = unet(attention_head_dim=(2, 4), use_linear_projection=True,
                    addition_embed_type="text_time", addition_time_embed_dim=8,
                    transformer_layers_per_block=(1, 2), cross_attention_dim=64,
                    projection_class_embeddings_input_dim=6 * 8 + 32)
    return StableDiffusionXLPipeline(vae(), clip(), clip(CLIPTextModelWithProjection), tokenizer(),
                                     tokenizer(),
                                     denoiser, EulerDiscreteScheduler())


def sd3() -> Any:
    denoiser = SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=64, out_channels=4, qk_norm="rms_norm", dual_attention_layers=(0,))
    projected = CLIPTextModelWithProjection
    return StableDiffusion3Pipeline(
        denoiser, FlowMatchEulerDiscreteScheduler(), vae(shift_factor=0.06, scaling_factor=1.5),
        clip(projected), tokenizer(), clip(projected), tokenizer(), t5(), tokenizer())


def flux() -> Any:
    denoiser = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8))
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(),
                        vae(1, shift_factor=0.06, scaling_factor=1.5), clip(),
                        tokenizer(), t5(), tokenizer(), denoiser)


def dit() -> Any:
    denoiser = DiTTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, num_attention_heads=2,
        in_channels=4, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_zero", norm_elementwise_affine=False)
    return DiTPipeline(denoiser, vae(), DDIMScheduler())


def pixart() -> Any:
    denoiser = PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3,
        caption_channels=32, in_channels=4, cross_attention_dim=24, out_channels=8,
        attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False,
        norm_eps=1e-6)
    return PixArtAlphaPipeline(tokenizer(), t5(), vae(), denoiser, DDIMScheduler())


PIPELINES: dict[str, Callable[[], Any]] = {
    "sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux, "dit": dit, "pixart": pixart}
_CALLS: dict[str, dict[str, Any]] = {
    "sd15": {"negative_prompt": NEGATIVE, "height": 32, "width": 32},
    "sdxl": {"negative_prompt": NEGATIVE, "height": 32, "width": 32},
    "sd3": {"negative_prompt": NEGATIVE, "height": 32, "width": 32, "max_sequence_length": 16},
    "flux": {"height": 16, "width": 16, "max_sequence_length": 16},
    "dit": {}, "pixart": {"negative_prompt": NEGATIVE, "height": 16, "width": 16,
                          "use_resolution_binning": False,
                          "max_sequence_length": 16, "clean_caption": False}}


def pipeline(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = PIPELINES[name]()
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            with torch.no_grad():
                # some start at zero, which would hide what feeds them
                for weight in part.parameters():
                    if weight.dim() == 1:
                        weight.add_(torch.randn_like(weight) * 0.1)
    made.set_progress_bar_config(disable=True)
    return made


def denoiser(pipe: Any) -> torch.nn.Module:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def image(pipe: Any, name: str, steps: int = 2, **changes: Any) -> np.ndarray:
    """One picture, from a seed."""
    asked = {"class_labels": [3]} if name == "dit" else {"prompt": PROMPT}
    if name in ("sd15", "sdxl", "sd3", "pixart"):
        asked["guidance_scale"] = 5.0
    made = pipe(**asked, **_CALLS[name], **changes, num_inference_steps=steps, output_type="np",
                generator=torch.Generator().manual_seed(7))
    return np.asarray(made.images)


def denoiser_inputs(name: str, dtype: torch.dtype = torch.float32, batch: int = 2,
                    side: int = 16) -> dict[str, Any]:
    """Arguments for the model at the heart of a pipeline, as its pipeline passes them; `side`: of
    the pictures of a UNet."""
    gen = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    times = torch.tensor([5, 500])[:batch]
    text = {"encoder_hidden_states": rand(batch, 16, 64 if name == "sdxl" else 32)}
    if name == "flux":
        return {**text, "hidden_states": rand(batch, 16, 4), "pooled_projections": rand(batch, 32),
                "timestep": (times / 1000).to(dtype), "txt_ids": torch.zeros(16, 3).to(dtype),
                "return_dict": False, "img_ids": torch.randint(4, (16, 3), generator=gen).to(dtype)}
    if name == "sd3":
        return {**text, "hidden_states": rand(batch, 4, 16, 16),
                "pooled_projections": rand(batch, 64),
                "timestep": times, "return_dict": False}
    if name == "dit":
        return {"hidden_states": rand(batch, 4, 16, 16), "timestep": times,
                "class_labels": times % 7,
                "return_dict": False}
    if name == "pixart":
        return {**text, "hidden_states": rand(batch, 4, 8, 8), "timestep": times,
                "return_dict": False,
                "encoder_attention_mask": torch.arange(16) < torch.tensor([[5], [16]])[:batch],
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    made = {**text, "sample": rand(batch, 4, side, side), "timestep": times, "return_dict": False}
    if name == "sdxl":
        made["added_cond_kwargs"] = {"text_embeds": rand(batch, 32), "time_ids": rand(batch, 6)}
    return made
