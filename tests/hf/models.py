"""Tiny models with seeded weights, one per family that is served, and inputs for each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 128
_DECODER = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"]
_VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
           "num_attention_heads": 4,
           "image_size": 32, "patch_size": 8}

# family -> (name of the model's class, name of its configuration's class, configuration)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {
        **_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "layer_types": _ALTERNATING, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {
        **_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "layer_types": _ALTERNATING}),
    "phi": ("PhiForCausalLM", "PhiConfig", _DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "sliding_window": None}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_DECODER, "rotary_pct": 0.5}),
    "falcon": ("FalconForCausalLM", "FalconConfig",
               {**_DECODER, "multi_query": True, "alibi": False}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {
        **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **_DECODER, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {
        **_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 6, "layer_types": _ALTERNATING}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
        "tie_word_embeddings": False}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {
        "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1,
        "forced_eos_token_id": None, "tie_word_embeddings": False}),
    "bert": ("BertForMaskedLM", "BertConfig", {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VISION, "num_labels": 5}),
    "clip": ("CLIPModel", "CLIPConfig", {
        "projection_dim": 32, "vision_config": _VISION, "text_config": {
            **_DECODER, "max_position_embeddings": 40, "eos_token_id": 2}}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "num_mel_bins": 16, "max_source_positions": 20,
        "max_target_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "decoder_start_token_id": 1, "suppress_tokens": None,
        "begin_suppress_tokens": None}),
}
CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "gpt2",
          "gpt_neox", "falcon", "mixtral", "deepseek_v3", "gpt_oss")
ENCODER_DECODER = ("t5", "bart", "whisper")

# the stock attention that does what the model asks: sdpa cannot
WITH_ALL = {"gemma2": "eager", "gpt_oss": "eager"}


def tiny(family: str, seed: int = 0, attn_implementation: str | None = None, **changes: Any) -> Any:
    """A model of this family in eval mode and fp32, its weights drawn from `seed`; `changes` are to
    its config.

    The weights are larger than a fresh model's, so that tokens and not rounding decide what is
    generated.
    """
    model_class, config_class, config = FAMILIES[family]
    declared = getattr(transformers, config_class)(**{**config, **changes})
    if attn_implementation is not None:
        declared._attn_implementation = attn_implementation
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(declared).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.endswith("logit_scale"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 1.5
                             / weight.shape[-1] ** 0.5)
            elif name.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=generator))
    if model.can_generate():
        model.generation_config.eos_token_id = None        # as long as asked for, whatever it says
    return model


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(family: str, batch: int = 2, length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """What the model of this family is called with."""
    generator = torch.Generator().manual_seed(seed)
    words = tokens(batch, length, seed)
    image = torch.randn(batch, 3, 32, 32, generator=generator)
    if family == "vit":
        return {"pixel_values": image}
    if family == "clip":
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "pixel_values": image}
    if family == "whisper":
        sound = torch.randn(batch, 16, 40, generator=generator)
        return {"input_features": sound, "decoder_input_ids": words}
    if family in ENCODER_DECODER:
        return {"input_ids": words, "attention_mask": torch.ones_like(words),
                "decoder_input_ids": tokens(batch, length - 3, seed + 1)}
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def padded(length: int = 12, pads: tuple[int, ...] = (0, 5), seed: int = 1) -> dict[str, Tensor]:
    """A batch of prompts, each with so many padding tokens on its left."""
    words = tokens(len(pads), length, seed)
    mask = torch.ones_like(words)
    for row, n in enumerate(pads):
        words[row, :n], mask[row, :n] = 0, 0
    return {"input_ids": words, "attention_mask": mask}
