"""Reads the modules of a decoder layer whose code is known; see recognition.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ....ops.formulas.moe import GATED, PLAIN, activate
from ..implementations import DECODED, Implementations
from ..owned_config import is_uncapped
from ..recognise import Recogniser, random
from ..replacements import Recipe, recipe_of, stock_of
from .families import FunctionCode, NotRecognised, code_of, is_known, known
from .parts import (
    OWN,
    CrossParts,
    Experts,
    FeedForward,
    LatentParts,
    LayerParts,
    Linear,
    Norm,
    OwnPart,
)


class Reader:
    """Reads the modules of one model; of modules alike, one is tried."""

    def __init__(self) -> None:
        self.tried = Recogniser()
        self.implementations = Implementations(DECODED)

    def layer(self, layer: Any, window: int | None, angles: int) -> LayerParts:
        code = known(layer, "layer")
        names = code.names
        attention = attention_of(layer)
        inner = known(attention, "attention")
        self.check(attention)
        if getattr(attention, "reorder_and_upcast_attn", False):
            raise NotRecognised(
                "its attention is computed in another order (reorder_and_upcast_attn)")
        if getattr(layer, "apply_residual_connection_post_layernorm", False):
            raise NotRecognised("its residual is what was normed "
                                "(apply_residual_connection_post_layernorm)")
        if "do_layer_norm_before" in names and not layer.do_layer_norm_before:
            raise NotRecognised("its norms are of the sums (do_layer_norm_before is off)")
        norms = code.calls.index("self_attn_layer_norm") if "self_attn_layer_norm" in names else -1
        sums = norms > code.calls.index("self_attn") if norms >= 0 else False
        across = "encoder_attn" in names

        def norm(*called: str) -> Norm | None:
            module = next((getattr(layer, n, None) for n in called if n in names), None)
            return None if module is None else self.norm(module)

        after = "post_feedforward_layernorm" in names              # norms of what a branch gives
        second = ("post_attention_layernorm", "ln_2", "final_layer_norm", "norm_2",
                  "pre_feedforward_layernorm", "feedforward_layernorm")
        shared = not names & set(second)
        parallel = (shared
                    or ("use_parallel_residual" in names and bool(layer.use_parallel_residual))
                    or ("parallel_attn" in names and bool(layer.config.parallel_attn)))
        split = ("q_proj", "k_proj", "v_proj")
        whole = [n for n in ("qkv_proj", "c_attn", "query_key_value", "Wqkv") if n in inner.names]
        latent = self.latent(attention, inner) if "kv_a_proj_with_mqa" in inner.names else None
        qkv = tuple(self.linear(attention, n) for n in whole or split) if latent is None else (
            latent.query_down, self.linear(attention, "kv_a_proj_with_mqa"))
        if getattr(attention, "clip_qkv", None):
            raise NotRecognised("its configuration says clip_qkv")
        out = self.linear(attention, next(n for n in ("o_proj", "dense", "c_proj", "out_proj")
                                          if n in inner.names))
        dim = (int(named_by(attention, inner, "head_dim", "head_size")) if latent is None
               else latent.value_dim)
        heads = out.shape[1] // dim
        kv_heads = 1 if latent else (sum(p.shape[0] for p in qkv) // dim - heads) // 2
        q_norm, k_norm = self.head_norms(attention, inner)
        capped = "attn_logit_softcapping" in inner.names and not is_uncapped(attention)
        return LayerParts(
            norm=norm("input_layernorm", "ln_1", "self_attn_layer_norm", "attention_layernorm",
                      "norm_1"),
            qkv=qkv,
            by_head=bool({"query_key_value", "multi_query"} & inner.names) and not getattr(
                attention, "multi_query", False),
            q_norm=q_norm, k_norm=k_norm, out=out,
            attn_post=norm(*(("post_attention_layernorm",) if after else (
                "post_self_attn_layernorm", "post_norm1"))),
            mlp_norm=norm(*(("pre_feedforward_layernorm",) if after else (
                "final_layernorm", "final_layer_norm") if across else (
                second))),
            normed_sums=sums,
            cross=self.cross(layer.encoder_attn, norm(
                "encoder_attn_layer_norm", "post_attention_layernorm")) if across else None,
            mlp=self.inline(layer) if "fc1" in names
            else self.feed_forward(named_by(layer, code, "mlp", "block_sparse_moe", "ffn"),
                                   "mlp" in code.unpacked),
            mlp_post=norm("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2"),
            parallel=parallel,
            branch_scale=next((float(getattr(layer, n)) for n in (
                "residual_multiplier", "residual_scale") if n in names), 1.0),
            norm_last="query_layernorm" in inner.names,
            heads=heads, kv_heads=kv_heads, head_dim=dim, latent=latent,
            scale=float(next((getattr(attention, n) for n in ("scaling", "softmax_scale")
                              if hasattr(attention, n)), dim ** -0.5)),
            out_norm=self.norm(attention.attn_sub_norm) if "attn_sub_norm" in inner.names else None,
            softcap=number(attention.attn_logit_softcapping if capped else None),
            window=window,
            angles=angles if inner.rotates(attention) else None,
            sinks=attention.sinks.detach() if "sinks" in inner.names else None)

    def check(self, attention: Any) -> None:
        refused = self.implementations.refused(attention)
        if refused:
            raise NotRecognised(refused)

    def cross(self, attention: Any, norm: Norm | None) -> CrossParts:
        inner = known(attention, "attention")
        self.check(attention)
        query = self.linear(attention, next(n for n in ("q_proj", "q") if n in inner.names))
        key = self.linear(attention, next(n for n in ("k_proj", "k") if n in inner.names))
        out = self.linear(attention, next(n for n in ("out_proj", "o_proj", "o")
                                          if n in inner.names))
        dim = int(named_by(attention, inner, "head_dim", "key_value_proj_dim"))
        return CrossParts(norm, query, out, query.shape[0] // dim, key.shape[0] // dim, dim,
                          float(attention.scaling))

    def stacked(self, block: Any) -> LayerParts:
        """Returns a layer of T5: attention, cross-attention, feed-forward, each with its norm."""
        known(block, "layer")
        first, *across, last = block.layer
        known(first, "self-attention of a layer"), known(last, "feed-forward of a layer")
        attention = first.SelfAttention
        known(attention, "attention")
        self.check(attention)
        qkv, out = tuple(self.linear(attention, n) for n in "qkv"), self.linear(attention, "o")
        dim = int(attention.key_value_proj_dim)
        cross = None
        if across:
            known(across[0], "cross-attention of a layer")
            cross = self.cross(across[0].EncDecAttention, self.norm(across[0].layer_norm))
        heads = out.shape[1] // dim
        return LayerParts(
            norm=self.norm(first.layer_norm), qkv=qkv, by_head=False, q_norm=None, k_norm=None,
            out=out, attn_post=None, mlp_norm=self.norm(last.layer_norm),
            mlp=self.feed_forward(last.DenseReluDense), mlp_post=None, parallel=False,
            branch_scale=1.0, heads=heads, kv_heads=heads, head_dim=dim,
            scale=float(attention.scaling), softcap=0.0, window=None, angles=None, cross=cross)

    def head_norms(self, attention: Any, code: FunctionCode) -> tuple[Norm | None, Norm | None]:
        switch = next((n for n in ("qk_layernorm", "use_qk_norm") if n in code.names), None)
        if switch is not None and not getattr(attention, switch):
            return None, None
        names = next((pair for pair in (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"),
                                        ("query_layernorm", "key_layernorm"))
                      if pair[0] in code.names), None)
        if names is None:
            return None, None
        q_norm, k_norm = (self.head_norm(getattr(attention, n)) for n in names)
        return q_norm, k_norm

    def head_norm(self, module: Any) -> Norm:
        """Reads one norm for all heads, or a layer norm that has a weight for each of them."""
        each = tuple(getattr(module, "norms", (module,)))
        if each == (module,) and getattr(module, "weight", torch.empty(0)).dim() < 2:
            return self.norm(module, False)
        known(module, "norm of each head")
        if any(getattr(m, "bias", None) is not None for m in each):
            raise NotRecognised("the norms of its heads have a bias")
        eps = next(v for n, v in vars(each[0]).items() if "eps" in n)
        return Norm("layer_norm", (), float(eps), 0.0, tuple(Linear(m, False) for m in each))

    def feed_forward(self, module: Any, first: bool = False) -> FeedForward | Experts | OwnPart:
        """Read a module called with the tokens alone; its own code stays if lz cannot."""
        adds = code_of(module).text.startswith("['hidden_states', 'residual']")
        if adds and is_known(module, "feed-forward that adds"):
            return self.adding(module)
        try:
            return self.computed(module)
        except NotRecognised:
            if not isinstance(module, nn.Module):
                raise
            return OwnPart(module, first)

    def adding(self, module: Any) -> FeedForward:
        """Read a feed-forward part that adds the residual itself, as in Bloom and MPT."""
        if getattr(module, "slow_but_exact", False) and module.pretraining_tp > 1:
            raise NotRecognised("its products are made in slices (slow_but_exact)")
        code = code_of(module)
        up, down = (named_by(module, code, *names) and self.linear(
            module, next(n for n in names if n in code.names))
            for names in (("dense_h_to_4h", "up_proj"), ("dense_4h_to_h", "down_proj")))
        return FeedForward((up,), down, self.activation(named_by(module, code, "gelu_impl",
                                                                   "act")))

    def latent(self, attention: Any, code: FunctionCode) -> LatentParts:
        if "expand_kv" not in code.names:
            raise NotRecognised("its cache holds the keys and values of every head, as before "
                                "transformers 5.22")
        whole = attention.q_lora_rank is None
        up = self.linear(attention, "kv_b_proj")
        if up.transposed or up.module.bias is not None:
            raise NotRecognised("its kv_b_proj has a bias, or keeps its weight as (in, out)")
        module = sys.modules[stock_of(attention).__module__]
        names = ("apply_rotary_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
        raw, woven, plain = (getattr(module, n) if n in code.names else None for n in names)

        def rotate(query: Tensor, key: Tensor, rope: Any) -> tuple[Tensor, Tensor]:
            if raw is not None:
                return raw(query, key, rope)  # type: ignore[no-any-return]
            interleaved = woven is not None and (plain is None or attention.config.rope_interleave)
            return (woven if interleaved else plain)(query, key, *rope)  # type: ignore[misc,no-any-return]

        return LatentParts(
            self.linear(attention, "q_proj" if whole else "q_a_proj"),
            None if whole else self.norm(attention.q_a_layernorm),
            None if whole else self.linear(attention, "q_b_proj"),
            self.norm(attention.kv_a_layernorm), up, int(attention.kv_lora_rank),
            int(attention.qk_nope_head_dim), int(attention.qk_rope_head_dim),
            int(attention.v_head_dim), rotate)

    def computed(self, module: Any) -> FeedForward | Experts:
        if is_known(module, "mixture of experts"):
            return self.experts(module)
        if any(recipe_of(m) is not None for m in module.children()):
            raise NotRecognised(f"a {type(module).__name__} computes no MLP that lz has")
        if is_known(module, "feed-forward, gate last"):
            form = GATED[PLAIN.index(self.activation(module.activation_fn))]
            up, down = self.linear(module, "fc1"), self.linear(module, "fc2")
            return FeedForward((up,), down, form, True)
        recipe = self.recipe(module, "mlp")
        layers = tuple(self.linear(module, n) for n in recipe.names)
        if len({p.module.bias is None for p in layers[:-1]}) > 1:
            raise NotRecognised("one of gate and up has a bias and the other has none")
        return FeedForward(layers[:-1], layers[-1], recipe.form)

    def inline(self, layer: Any) -> FeedForward:
        """Returns a feed-forward part without a module of its own."""
        form = self.activation(layer.activation_fn)
        return FeedForward((self.linear(layer, "fc1"),), self.linear(layer, "fc2"), form)

    @staticmethod
    def activation(function: Any) -> str:
        """Returns the name of the activation, recognised by its results."""
        x = torch.linspace(-4, 4, 101, dtype=torch.float64, device="cpu")
        form = next((form for form in PLAIN if torch.allclose(function(x), activate(x, form))),
                    None)
        if form is None:
            raise NotRecognised(f"its activation {type(function).__name__} is none that lz has")
        return form

    def experts(self, module: Any) -> Experts:
        code = code_of(module)
        gate = named_by(module, code, "gate", "router")
        router = known(gate, "router")
        recipe = self.recipe(module.experts, "moe")
        gate_up, down = (getattr(module.experts, n).detach() for n in recipe.names)
        name = next((n for n in ("shared_expert", "shared_experts", "shared_mlp")
                     if n in code.names and getattr(module, n) is not None), "")
        shared = self.computed(getattr(module, name)) if name else None
        assert not isinstance(shared, Experts)
        gated = "shared_expert_gate" in code.names
        plain = router.names.isdisjoint(("e_score_correction_bias", "sigmoid", "moe_statics",
                                         "routed_scaling_factor", "wg", "topk_method"))
        experts = Experts(
            getattr(gate, "weight", gate_up).detach(), int(gate.top_k),
            bool(gate.norm_topk_prob) if "norm_topk_prob" in router.names else True, gate_up, down,
            recipe.form, shared, self.linear(module, "shared_expert_gate") if gated else None,
            None if plain and not name.endswith(("s", "mlp")) else _router(module, gate, code))
        if experts.route is not None:
            _check_routing(module, experts.route, getattr(module, name) if name else None)
        return experts

    def recipe(self, module: Any, *kinds: str) -> Recipe:
        """Returns what a module computes: its patched recipe, or one that a trial proves."""
        patched = recipe_of(module) if isinstance(module, nn.Module) else None
        verdict = patched or (self.tried(module) if isinstance(module, nn.Module) else None)
        if not isinstance(verdict, Recipe) or verdict.kind not in kinds:
            raise NotRecognised(verdict if isinstance(verdict, str) else
                                f"a {type(module).__name__} computes no {' or '.join(kinds)} that "
                                "lz has")
        return verdict

    def linear(self, owner: Any, name: str) -> Linear:
        module = getattr(owner, name, None)
        if (not isinstance(module, nn.Module)
            or type(getattr(module, "weight", None)) is not nn.Parameter):
            raise NotRecognised(
                f"{type(owner).__name__}.{name} is {type(module).__name__}, not a plain nn.Linear")
        if stock_of(module) is nn.Linear:
            return Linear(module, False)
        return Linear(module, self.recipe(module, "linear", "lm_head").transposed == (True,))

    def norm(self, module: Any, may_be_own: bool = True) -> Norm:
        try:
            recipe = self.recipe(module, "rms_norm", "layer_norm")
        except NotRecognised:
            if not may_be_own or not isinstance(module, nn.Module):
                raise
            return Norm(OWN, (), 0.0, 0.0, module=module)
        weights = tuple(module._parameters[n].detach() for n in recipe.names)
        return Norm(recipe.op, weights, float(getattr(module, recipe.eps)), recipe.offset)


def _router(module: Any, gate: Any, code: FunctionCode) -> Any:
    """Returns the model's own router as a function of tokens (tokens, hidden)."""
    more = (module.e_score_correction_bias,) if "e_score_correction_bias" in code.names else ()

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, ids = gate(x, *more)
        return weights, ids

    return route


@torch.no_grad()
def _check_routing(module: Any, route: Any, shared: Any) -> None:
    """Raises NotRecognised unless the module gives what its experts, as routed, give."""
    like = module.experts.down_proj
    x = random(like, 1, 3, like.shape[1])
    try:
        with torch.inference_mode(False):
            weights, ids = route(x[0])
            routed = module.experts(x[0], ids, weights) + (0 if shared is None else shared(x[0]))
            agrees = torch.allclose(routed, module(x)[0], rtol=1e-2, atol=1e-3)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        agrees = False                         # it is called in another way in this release
    if not agrees:
        raise NotRecognised(f"a {type(module).__name__} routes its tokens in another way")


def attention_of(layer: Any) -> Any:
    return named_by(layer, code_of(layer), "self_attn", "attention", "attn", "self_attention")


def named_by(owner: Any, code: FunctionCode, *names: str) -> Any:
    """Returns the first of these attributes that the code of its owner speaks of."""
    name = next((n for n in names if n in code.names and hasattr(owner, n)), None)
    if name is None:
        raise NotRecognised(f"{type(owner).__name__} has none of {', '.join(names)}")
    return getattr(owner, name)


def number(value: Any) -> float:
    return 0.0 if value is None else float(value)
