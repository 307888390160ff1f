"""transformers' own Llama over the same weights, stage by stage: what the ladder compares a real model with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.decoder import DecoderConfig, Weights, attention_scores
from ..spec.errors import ConfigError


def as_transformers(c: DecoderConfig, weights: Weights) -> Any:
    """A LlamaForCausalLM in float32 with these weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as e:
        raise ConfigError(f"comparing with transformers wants that library: {e}; "
                          "pip install 'layerzero[transformers]'") from e
    if (c.norm, c.activation, c.positions, c.rope_style, c.bias, c.window) != (
            "rms", "swiglu", "rope", "rotate_half", False, 0):
        raise ConfigError("transformers' Llama has RMS norms, SwiGLU, rope in halves, no biases and no window; "
                          f"got {c}")
    config = LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.inner, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.eps,
        max_position_embeddings=c.max_positions, tie_word_embeddings=c.tied, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, rope_theta=c.rope_base)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    model = empty.to_empty(device="cpu").float().eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)       # its frequencies are no weight
    missing, surplus = model.load_state_dict(_state(c, weights), strict=False)
    lacking = [n for n in missing if not (c.tied and n == "lm_head.weight")]
    if lacking or surplus:
        raise ConfigError(f"this release of transformers names the weights of a Llama otherwise: {lacking + surplus}")
    model.tie_weights()
    return model


def _state(c: DecoderConfig, w: Weights) -> dict[str, Tensor]:
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


def stages_of(model: Any, c: DecoderConfig, tokens: Tensor) -> dict[str, Tensor]:
    """Every stage of a forward over tokens (batch, seq), under the names of models/decoder.py."""
    from transformers.models.llama import modeling_llama
    seen: dict[str, Tensor] = {}
    turned: list[tuple[Tensor, Tensor]] = []
    hooks: list[Any] = []

    def keep(module: Any, name: str, before: str = "") -> None:
        """The output of a module, or with `before` also what goes in."""
        def hook(_: Any, args: tuple[Any, ...], out: Any) -> None:
            if before:
                seen[before] = args[0].detach()
            seen[name] = (out[0] if isinstance(out, tuple) else out).detach()

        hooks.append(module.register_forward_hook(hook))

    for i, layer in enumerate(model.model.layers):
        at = f"{i}."
        keep(layer, f"{at}output", f"{at}input")
        keep(layer.input_layernorm, f"{at}ln1_out")
        keep(layer.self_attn.o_proj, f"{at}proj_out", f"{at}attn_out")
        keep(layer.post_attention_layernorm, f"{at}ln2_out", f"{at}resid")
        keep(layer.mlp.gate_proj, f"{at}gate")
        keep(layer.mlp.up_proj, f"{at}up")
        keep(layer.mlp.down_proj, f"{at}mlp_out", f"{at}act")
    keep(model.model.embed_tokens, "embed")
    keep(model.model.norm, "norm_out")
    rope: Callable[..., Any] = modeling_llama.apply_rotary_pos_emb

    def watched(*args: Any, **kwargs: Any) -> Any:
        turned.append(rope(*args, **kwargs))
        return turned[-1]

    try:
        modeling_llama.apply_rotary_pos_emb = watched          # the only place where q and k after rope can be seen
        with torch.no_grad():
            seen["logits"] = model(tokens).logits
    finally:
        modeling_llama.apply_rotary_pos_emb = rope
        for hook in hooks:
            hook.remove()
    return _in_order(c, seen, turned)


def _in_order(c: DecoderConfig, seen: dict[str, Tensor], turned: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    made = {"embed": seen["embed"]}
    for i, (q, k) in enumerate(turned):
        at = f"{i}."
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        made |= {f"{at}input": seen[f"{at}input"], f"{at}ln1_out": seen[f"{at}ln1_out"], f"{at}q": q, f"{at}k": k,
                 f"{at}scores": attention_scores(c, q, k),
                 f"{at}attn_out": seen[f"{at}attn_out"].unflatten(-1, (c.heads, c.head_dim)),
                 **{at + s: seen[at + s] for s in ("proj_out", "resid", "ln2_out")},
                 f"{at}fc1": torch.cat((seen[f"{at}gate"], seen[f"{at}up"]), -1),
                 **{at + s: seen[at + s] for s in ("act", "mlp_out", "output")}}
    return {**made, "norm_out": seen["norm_out"], "logits": seen["logits"]}
