"""Tiny models that hold a language model, with seeded weights, and a picture for each."""

from __future__ import annotations

from typing import Any

import models
import torch
from torch import Tensor

PICTURE = 100                                  # the token that stands for a part of a picture
_LLAMA = {**models._GROUPED, "model_type": "llama"}
_CLIP = {**models._VISION, "projection_dim": 64, "model_type": "clip_vision_model"}
_SIGLIP = {**models._VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
_AXES = {**models._GROUPED, "head_dim": 16, "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
         "out_hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}
_QWEN_TOKENS = {"image_token_id": PICTURE, "video_token_id": 101, "vision_start_token_id": 102,
                "vision_end_token_id": 103}
_LLAVA = {"vision_config": _CLIP, "image_token_id": PICTURE, "vision_feature_layer": -1}

# name -> class, configuration, tokens of a picture
COMPOSITES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", {
        **_LLAVA, "text_config": _LLAMA}, 16),
    "llava of a window": ("LlavaForConditionalGeneration", "LlavaConfig", {
        **_LLAVA, "text_config": {
            **models._GROUPED, "model_type": "mistral", "sliding_window": 6}}, 16),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", {
        "text_config": _AXES, **_QWEN_TOKENS,
        "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]}}, 4),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", {
        "text_config": {
            **_AXES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **_QWEN_TOKENS, "vision_config": {
            **_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}, 4),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Config", {
        "text_config": models.FAMILIES["gemma3"][2], "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4, "image_token_index": PICTURE, "image_token_id": PICTURE,
        "boi_token_index": 101, "eoi_token_index": 102, "tie_word_embeddings": False}, 4),
    "paligemma": ("PaliGemmaForConditionalGeneration", "PaliGemmaConfig", {
        "text_config": {**models._GROUPED, "head_dim": 16, "model_type": "gemma"},
        "projection_dim": 64,
        "vision_config": {**_SIGLIP, "projection_dim": 64}, "image_token_index": PICTURE,
        "tie_word_embeddings": False}, 16),
    "smolvlm": ("SmolVLMForConditionalGeneration", "SmolVLMConfig", {
        "text_config": _LLAMA, "vision_config": models._VISION, "image_token_id": PICTURE,
        "scale_factor": 2}, 4),
    "blip2": ("Blip2ForConditionalGeneration", "Blip2Config", {
        "vision_config": models._VISION, "num_query_tokens": 4, "image_token_index": PICTURE,
        "text_config": {
            "model_type": "opt", "vocab_size": models.VOCAB, "hidden_size": 64, "ffn_dim": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64,
            "max_position_embeddings": 128, "pad_token_id": 0},
        "qformer_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                           "intermediate_size": 48, "encoder_hidden_size": 64}}, 4),
}


def composite(name: str, seed: int = 0) -> Any:
    models.FAMILIES.setdefault(f"composite {name}", COMPOSITES[name][:3])
    return models.tiny(f"composite {name}", seed)


def words(batch: int = 1, length: int = 10) -> dict[str, Tensor]:
    ids = models.tokens(batch, length).clamp(max=PICTURE - 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def with_picture(name: str, pads: tuple[int, ...] = (0,)) -> dict[str, Tensor]:
    """A prompt of two words, a picture and more words, each after so many tokens of padding."""
    generator, batch = torch.Generator().manual_seed(3), len(pads)
    ids, parts = words(batch)["input_ids"], COMPOSITES[name][3]
    ids = torch.cat([torch.zeros(batch, max(pads), dtype=torch.int64), ids[:, :2],
                     torch.full((batch, parts), PICTURE), ids[:, 2:]], 1)
    for row, n in enumerate(pads):             # to the left what has less padding
        ids[row] = torch.cat([ids[row, :n], ids[row, max(pads):], ids[row, 2:2 + max(pads) - n]])
    mask = (ids != 0).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("qwen"):
        patches = torch.randn(16 * batch, 3 * 16, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * batch)
        return {**inputs, "pixel_values": patches, "image_grid_thw": grid,
                "mm_token_type_ids": (ids == PICTURE).int()}
    pixels = torch.randn(batch, 3, 32, 32, generator=generator)
    inputs["pixel_values"] = pixels[:, None] if name == "smolvlm" else pixels
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == PICTURE).long()
    return inputs
