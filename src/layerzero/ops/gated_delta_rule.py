"""Linear attention by the gated delta rule (Gated DeltaNet; Qwen3-Next, Kimi Linear).

Each value head keeps a state S (head_dim, value_dim), a memory of values by keys. A token decays
it, replaces beta of what it holds for the key, and reads it:

    S = exp(g) * S;  S = S + k (beta * (v - k S))^T;  o = scale * q S

q and k have `heads` heads, v, g and beta `value_heads`, a multiple: neighbouring value heads share
a query and a key. Everything is computed in float32 (float64 stays), the state is returned so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import Wording, at_least, dtypes, equals, one_of
from .formulas.common import FLOATS
from .formulas.mistakes import drop_argument, interleave_groups, replace_argument

L2_EPS = 1e-6


def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, *, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    """Returns the outputs (batch, seq, value_heads, value_dim), with output_final_state also S.

    q, k: (batch, seq, heads, head_dim). v: (batch, seq, value_heads, value_dim). g, the log of the
    decay, and beta: (batch, seq, value_heads). scale: head_dim ** -0.5 by default. initial_state:
    (batch, value_heads, head_dim, value_dim), zeros by default. use_qk_l2norm_in_kernel: q and k
    are divided by their norm first.
    """
    q, k, value, g, beta, state = prepare(q, k, v, g, beta, scale, initial_state,
                                          use_qk_l2norm_in_kernel)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        held = (state * k[:, t, :, :, None]).sum(-2)
        change = (value[:, t] - held) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[..., None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    out = torch.stack(outputs, 1).to(v.dtype) if outputs else torch.empty_like(v)
    return (out, state) if output_final_state else out


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None,
            initial_state: Tensor | None, normalize: bool) -> tuple[Tensor, ...]:
    """Returns q (scaled), k, v, g, beta and first state in float32 or wider, per value head."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, value, g, beta = (t.to(acc_dtype) for t in (q, k, v, g, beta))
    if normalize:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + L2_EPS) for t in (q, k))
    share = v.shape[2] // max(q.shape[2], 1)
    if share > 1:
        q, k = (t.repeat_interleave(share, 2) for t in (q, k))
    if initial_state is None:
        state = q.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    else:
        state = initial_state.to(acc_dtype).clone()
    return q * (q.shape[-1] ** -0.5 if scale is None else scale), k, value, g, beta, state


def meta(q: Tensor, k: Tensor, v: Tensor, *args: Any, output_final_state: bool = False,
         **kwargs: Any) -> Any:
    out = v.new_empty(v.shape)
    if not output_final_state:
        return out
    return out, v.new_empty((v.shape[0], v.shape[2], q.shape[-1], v.shape[-1]),
                            dtype=torch.promote_types(q.dtype, torch.float32))


def inputs(
    b: int = 2, s: int = 7, h: int = 2, hv: int = 2, d: int = 16, dv: int = 16,
    scale: float | None = None, state: bool = False, final: bool = False, norm: bool = False,
    wide_gates: bool = False, decay: float = 1.0, reset: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    q, k = (torch.randn(b, s, h, d, generator=gen) for _ in "qk")
    k = k if norm else F.normalize(k, dim=-1)
    gates = torch.float32 if wide_gates else dtype
    g, beta = -torch.rand(b, s, hv, generator=gen) * decay, torch.rand(b, s, hv, generator=gen)
    for gate in (g, beta):                     # one head keeps its state over hundreds of tokens
        gate[..., 1:][..., -1:] *= 0.01
    if reset:                                  # where another sequence begins
        g[:, s // 2] = -torch.inf
    tensors = {
        "q": q.to(dtype), "k": k.to(dtype), "v": torch.randn(b, s, hv, dv, generator=gen).to(dtype),
        "g": g.to(gates), "beta": beta.to(gates),
        "initial_state": torch.randn(b, hv, d, dv, generator=gen).to(
            torch.promote_types(dtype, torch.float32)) if state else None}
    return {**{name: t if t is None else t.to(device) for name, t in tensors.items()},
            "scale": scale, "output_final_state": final, "use_qk_l2norm_in_kernel": norm}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"state": True, "final": True}, {"hv": 4, "norm": True, "final": True, "wide_gates": True},
    {"b": 1, "s": 130, "d": 32, "dv": 24, "state": True, "final": True}, {"s": 64, "b": 1},
    {"s": 1, "state": True, "final": True, "hv": 4, "norm": True, "scale": 0.5},
    {"s": 1, "b": 3, "d": 24, "dv": 20, "final": True},
    {"s": 1, "state": True, "hv": 6, "decay": 30.0},
    {"s": 70, "b": 1, "h": 1, "hv": 1, "decay": 30.0, "final": True},
    {"s": 90, "b": 1, "state": True, "reset": True}, {"s": 1, "state": True, "reset": True},
    {"s": 0, "state": True, "final": True}, {"s": 0, "final": True}, {"b": 0},
)
GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {"s": 5, "d": 8, "dv": 8}, {"s": 1, "d": 8, "dv": 8, "state": True},
    {"s": 70, "b": 1, "h": 1, "hv": 2, "d": 8, "dv": 8, "state": True, "norm": True})


def _last_first(op: Any, v: dict[str, Any]) -> dict[str, Any] | None:
    if v["q"].shape[1] < 2:
        return None
    return {**v, **{name: v[name].flip(1) for name in ("g", "beta")}}


MISTAKES: tuple[Mistake, ...] = (
    replace_argument("scale", "the scale left out", "scale", 1.0),
    replace_argument("convention", "q and k not normalised", "use_qk_l2norm_in_kernel", False),
    Mistake("convention", "the first state ignored", drop_argument("initial_state")),
    Mistake("convention", "the gates of another token", _last_first),
    Mistake("convention", "no decay", lambda op, v: {**v, "g": v["g"] * 0.0}),
    Mistake("head map", "value head h reading head h % heads of q and k",
               interleave_groups(("q", "k"), "v", 2)),
    Mistake("convention", "no delta rule: beta 1", lambda op, v: {
        **v, "beta": torch.ones_like(v["beta"])}))

OP = Op(
    name="gated_delta_rule", family="linear_attention", reference=reference, meta=meta,
    inputs=inputs, cases=CASES, gradient_cases=GRADIENT_CASES, mistakes=MISTAKES,
    stress=({"b": 1, "s": 512, "h": 4, "hv": 8, "d": 64, "dv": 64, "norm": True, "final": True},
            {"b": 1, "s": 300, "h": 1, "hv": 2, "d": 8, "dv": 8, "state": True, "final": True}),
    reference_kernel={"overhead_us": 100.0},
    tolerance=Tolerance({"float16": (2e-3, 2e-3), "bfloat16": (1e-2, 1e-2),
                         "float32": (1e-5, 1e-5), "float64": (1e-8, 1e-8)}),
    shapes={"q": "batch seq heads head_dim", "k": "batch seq heads head_dim",
            "v": "batch seq value_heads value_dim", "g": "batch seq value_heads",
            "beta": "batch seq value_heads", "initial_state":
                "batch value_heads head_dim value_dim"},
    returns=("batch seq value_heads value_dim", "batch value_heads head_dim value_dim"),
    same_dtype=("q", "k", "v"), derived={"group_rest": "value_heads % heads"},
    words={"group_rest": Wording(
        "value_heads % heads", "{value_heads} value heads, {heads} heads",
        {"0": "the number of value heads must be a multiple of that of the heads"})},
    exact=("heads", "value_heads", "head_dim", "value_dim"),
    requires=(
        dtypes(*FLOATS), at_least("heads", 1, Code.EMPTY_INPUT),
        at_least("head_dim", 1, Code.EMPTY_INPUT), at_least("value_dim", 1, Code.EMPTY_INPUT),
        equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
        *(one_of(f"{name}.dtype", *FLOATS, code=Code.DTYPE_UNSUPPORTED) for name in ("g", "beta")),
        one_of("initial_state.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED)),
    flops="8 * batch * seq * value_heads * head_dim * value_dim",
    bytes="itemsize * batch * seq * (2 * heads * head_dim + 2 * value_heads * value_dim)",
    differentiable=("q", "k", "v", "g", "beta", "initial_state"), outputs="Tensor[]",
)
