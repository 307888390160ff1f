"""transformers' Llama on the same weights, stage by stage, for the ladder to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...models.decoder import attention_scores
from ...models.decoder_config import DecoderConfig, Weights
from ...spec.errors import ConfigError


def build_llama(c: DecoderConfig, weights: Weights) -> Any:
    """Build a LlamaForCausalLM in float32 with these weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as e:
        raise ConfigError(f"comparing with transformers wants that library: {e}; "
                          "pip install 'layerzero[transformers]'") from e
    if (c.norm, c.activation, c.positions, c.rope_style, c.bias, c.window) != (
            "rms", "swiglu", "rope", "rotate_half", False, 0):
        raise ConfigError(
            "transformers' Llama has RMS norms, SwiGLU, rope in halves, no biases and no window; "
            f"got {c}")
    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.inner,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.eps, max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tied, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, rope_theta=c.rope_base)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    model = empty.to_empty(device="cpu").float().eval()
    # frequencies are no weights
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    missing, unexpected = model.load_state_dict(_state_dict(c, weights), strict=False)
    missing = [n for n in missing if not (c.tied and n == "lm_head.weight")]
    if missing or unexpected:
        raise ConfigError("this release of transformers names the weights of a Llama otherwise: "
                          f"{missing + unexpected}")
    model.tie_weights()
    return model


def _state_dict(c: DecoderConfig, w: Weights) -> dict[str, Tensor]:
    state = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"]}
    if not c.tied:
        state["lm_head.weight"] = w["head"]
    for i in range(c.layers):
        q, k, v = w[f"{i}.qkv"].split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])
        gate, up = w[f"{i}.in"].chunk(2)
        state |= {f"model.layers.{i}.{name}.weight": t for name, t in (
            ("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v),
            ("self_attn.o_proj", w[f"{i}.out"]), ("mlp.gate_proj", gate), ("mlp.up_proj", up),
            ("mlp.down_proj", w[f"{i}.down"]), ("input_layernorm", w[f"{i}.ln1"]),
            ("post_attention_layernorm", w[f"{i}.ln2"]))}
    return {name: t.float() for name, t in state.items()}


def trace_stages(model: Any, c: DecoderConfig, tokens: Tensor) -> dict[str, Tensor]:
    """Run tokens (batch, seq) and return every stage, under the names of models/decoder.py."""
    from transformers.models.llama import modeling_llama
    stages: dict[str, Tensor] = {}
    rotated: list[tuple[Tensor, Tensor]] = []              # query and key after rope, per layer
    hooks: list[Any] = []

    def keep(module: Any, name: str, input_name: str = "") -> None:
        """Keep the output of a module, and its input under `input_name`."""
        def hook(_: Any, args: tuple[Any, ...], out: Any) -> None:
            if input_name:
                stages[input_name] = args[0].detach()
            stages[name] = (out[0] if isinstance(out, tuple) else out).detach()

        hooks.append(module.register_forward_hook(hook))

    for i, layer in enumerate(model.model.layers):
        prefix = f"{i}."
        keep(layer, f"{prefix}output", f"{prefix}input")
        keep(layer.input_layernorm, f"{prefix}ln1_out")
        keep(layer.self_attn.o_proj, f"{prefix}proj_out", f"{prefix}attn_out")
        keep(layer.post_attention_layernorm, f"{prefix}ln2_out", f"{prefix}resid")
        keep(layer.mlp.gate_proj, f"{prefix}gate")
        keep(layer.mlp.up_proj, f"{prefix}up")
        keep(layer.mlp.down_proj, f"{prefix}mlp_out", f"{prefix}act")
    keep(model.model.embed_tokens, "embed")
    keep(model.model.norm, "norm_out")
    rope: Callable[..., Any] = modeling_llama.apply_rotary_pos_emb

    def recording_rope(*args: Any, **kwargs: Any) -> Any:
        rotated.append(rope(*args, **kwargs))
        return rotated[-1]

    try:
        # no module outputs q and k after rope
        modeling_llama.apply_rotary_pos_emb = recording_rope
        with torch.no_grad():
            stages["logits"] = model(tokens).logits
    finally:
        modeling_llama.apply_rotary_pos_emb = rope
        for hook in hooks:
            hook.remove()
    return _order_stages(c, stages, rotated)


def _order_stages(c: DecoderConfig, stages: dict[str, Tensor],
                  rotated: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ordered = {"embed": stages["embed"]}
    for i, (q, k) in enumerate(rotated):
        prefix = f"{i}."
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        ordered |= {
            **{prefix + s: stages[prefix + s] for s in ("input", "ln1_out")},
            f"{prefix}q": q, f"{prefix}k": k,
            f"{prefix}scores": attention_scores(c, q, k),
            f"{prefix}attn_out": stages[f"{prefix}attn_out"].unflatten(-1, (c.heads, c.head_dim)),
            **{prefix + s: stages[prefix + s] for s in ("proj_out", "resid", "ln2_out")},
            f"{prefix}fc1": torch.cat((stages[f"{prefix}gate"], stages[f"{prefix}up"]), -1),
            **{prefix + s: stages[prefix + s] for s in ("act", "mlp_out", "output")}}
    return {**ordered, "norm_out": stages["norm_out"], "logits": stages["logits"]}
