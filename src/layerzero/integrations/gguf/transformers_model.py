"""A GGUF model as a model of transformers: `model(ids).logits`, `model.generate(...)`.

    model = lz.load_gguf("model.gguf").to_transformers()
    model.generate(ids, max_new_tokens=64, do_sample=True, streamer=streamer)

Prompts of a batch must have the same length: there is no padding. It has no parameters to train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...models.decoder import Decoder
from ...models.sequence_kv import SequenceKV
from ...spec.errors import ConfigError
from .token_step import TokenStep

if TYPE_CHECKING:
    from .model import GGUFModel


class GGUFConfig(PretrainedConfig):  # type: ignore[misc]
    """The sizes that others ask a config for."""

    model_type = "layerzero_gguf"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)


class GGUFCache(DynamicCache):  # type: ignore[misc]
    """Keys and values in a SequenceKV; `step` serves single tokens."""

    def __init__(self, kv: SequenceKV) -> None:
        super().__init__()
        self.kv, self.step = kv, None          # type: SequenceKV, TokenStep | None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequences continue others, as beam search does."""
        for buffers in (self.kv.keys, self.kv.values):
            buffers[:] = [t.index_select(0, beam_idx.to(t.device)) for t in buffers]

    def crop(self, max_length: int) -> None:
        length = self.kv.length
        self.kv.length = min(length, max_length if max_length >= 0 else length + max_length)


class GGUFForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """See to_transformers of GGUFModel."""

    config_class = GGUFConfig
    main_input_name = "input_ids"
    _is_stateful = False

    def __init__(self, model: GGUFModel, kv: str = "", max_length: int = 0) -> None:
        c = model.config
        longest = min(max_length or 8192, c.max_positions)
        ends = sorted(model.stops)
        bos = model.metadata.get("tokenizer.ggml.bos_token_id")
        super().__init__(GGUFConfig(
            vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.layers,
            num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
            intermediate_size=c.inner, max_position_embeddings=longest,
            tie_word_embeddings=False, bos_token_id=bos if type(bos) is int else None,
            eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0))
        self.generation_config = GenerationConfig.from_model_config(self.config)
        self.gguf, self.kv = model, kv or str(model.dtype).removeprefix("torch.")
        self._decoder: Decoder = model.decoder(length=longest)

    @property
    def device(self) -> torch.device:
        return self.gguf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gguf.dtype

    def _new_kv(self, batch: int) -> SequenceKV:
        return SequenceKV(self.gguf.config, self.config.max_position_embeddings, self.kv, batch,
                          self.device)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None, logits_to_keep: int = 0,
                return_dict: bool | None = None, **unused: Any) -> Any:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ConfigError("a GGUF model as one of transformers takes no padding: give prompts "
                              "of the same length, or one at a time; got an attention_mask with "
                              "zeros")
        cache = past_key_values if isinstance(past_key_values, GGUFCache) else None
        if cache is None:
            if past_key_values is not None and past_key_values.get_seq_length():
                raise ConfigError("a GGUF model as one of transformers takes the cache that it "
                                  f"returned, got {type(past_key_values).__name__}")
            cache = (GGUFCache(self._new_kv(len(input_ids))) if use_cache is not False
                     else None)
        if cache is not None and not cache.kv.length:          # beams make the batch larger
            cache.kv = self._new_kv(len(input_ids))
        kv = None if cache is None else cache.kv
        if cache is not None and kv is not None and input_ids.numel() == 1 and kv.length:
            if cache.step is None or cache.step.stale():
                cache.step = TokenStep(self._decoder, kv)
            logits = cache.step(int(input_ids))[:, None]
        else:
            logits = self._decoder(input_ids, kv, last=logits_to_keep == 1)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def prepare_inputs_for_generation(self, input_ids: Tensor, past_key_values: Any = None,
                                      attention_mask: Tensor | None = None,
                                      **unused: Any) -> dict[str, Any]:
        known = past_key_values.get_seq_length() if past_key_values is not None else 0
        return {"input_ids": input_ids[:, known:], "past_key_values": past_key_values,
                "attention_mask": attention_mask, "use_cache": True, "logits_to_keep": 1}

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any],
                                      *unused: Any) -> None:
        if not isinstance(model_kwargs.get("past_key_values"), GGUFCache):
            model_kwargs["past_key_values"] = GGUFCache(self._new_kv(1))
