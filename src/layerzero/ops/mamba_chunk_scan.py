"""A sequence of a selective state space (Mamba-2, state space duality), for prompts and training.

Token by token it is selective_state_update with one dt, A, D and dt_bias for each head:

    dt = softplus(dt + dt_bias);  S = exp(dt * A) * S + (dt * x) B^T;  y = S C + D * x

Everything is computed in float32 (float64 stays); the state is returned so.
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


def reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None, *,
    dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float | None = None,
    return_final_states: bool = False,
) -> Any:
    """Returns the outputs (batch, seq, heads, head_dim), with return_final_states also S.

    x, z: (batch, seq, heads, head_dim). dt: (batch, seq, heads). A, D, dt_bias: (heads,). B, C:
    (batch, seq, groups, state_dim). initial_states: (batch, heads, head_dim, state_dim), zeros by
    default. dt_min, dt_max: dt is kept between them. z: the outputs are multiplied by silu(z).
    """
    inputs, step, decay, B, C, state = prepare(x, dt, A, B, C, dt_bias, initial_states, dt_softplus,
                                               dt_min, dt_max)
    outputs = []
    for t in range(x.shape[1]):
        state = (state * decay[:, t, :, None, None].exp()
                 + (step[:, t, :, None] * inputs[:, t])[..., None] * B[:, t, :, None])
        outputs.append((state * C[:, t, :, None]).sum(-1))
    out = torch.stack(outputs, 1) if outputs else inputs.new_empty(x.shape)
    out = finish(out, inputs, D, z).to(x.dtype)
    return (out, state) if return_final_states else out


def prepare(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None,
    initial_states: Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float | None,
) -> tuple[Tensor, ...]:
    """Returns x, dt, log decay, B and C for each head, and the first state, float32 or wider."""
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    x, step, A = x.to(acc_dtype), dt.to(acc_dtype), A.to(acc_dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(acc_dtype)
    if dt_softplus:
        step = F.softplus(step)
    if dt_min > 0.0 or dt_max is not None:
        step = step.clamp(dt_min, dt_max)
    share = x.shape[2] // max(B.shape[2], 1)
    B, C = (t.to(acc_dtype).repeat_interleave(share, 2) for t in (B, C))
    if initial_states is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
    else:
        state = initial_states.to(acc_dtype).clone()
    return x, step, step * A, B, C, state


def finish(out: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Returns (out + D x) silu(z)."""
    if D is not None:
        out = out + D.to(out.dtype)[:, None] * x
    return out if z is None else out * F.silu(z.to(out.dtype))


def meta(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *args: Any, return_final_states: bool = False,
         **kwargs: Any) -> Any:
    out = x.new_empty(x.shape)
    if not return_final_states:
        return out
    return out, x.new_empty((x.shape[0], *x.shape[2:], B.shape[-1]),
                            dtype=torch.promote_types(x.dtype, torch.float32))


def inputs(
    b: int = 2, s: int = 7, h: int = 4, g: int = 2, d: int = 8, n: int = 16, skip: bool = True,
    gate: bool = False, bias: bool = True, softplus: bool = True, limits: bool = False,
    state: bool = False, final: bool = False, decay: float = 4.0, at_most: bool = False,
    small: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """limits: dt_min and dt_max. at_most: dt_max alone, which makes a negative dt zero.
    small: steps as trained models begin with."""
    gen = torch.Generator("cpu").manual_seed(seed)
    acc_dtype = torch.promote_types(dtype, torch.float32)

    def drawn(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device=device, dtype=to)

    def step(*shape: int) -> Tensor:           # softplus makes it positive; else a state would grow
        return drawn(*shape) if softplus or at_most else drawn(*shape).abs()

    A = -(torch.rand(h, generator=gen) * decay + 0.1)
    x, dt = drawn(b, s, h, d), step(b, s, h)
    A[1:][-1:] *= 0.1                          # one head keeps its state over hundreds of tokens
    dt = dt - 8.0 if small and softplus else dt
    slow = dt[..., 1:][..., -1:]
    slow.copy_(slow - 5 if softplus else slow * 0.01)
    return {
        "x": x, "dt": dt,
        "A": A.to(device=device, dtype=acc_dtype), "B": drawn(b, s, g, n), "C": drawn(b, s, g, n),
        "D": drawn(h) if skip else None, "z": drawn(b, s, h, d) if gate else None,
        "dt_bias": step(h) if bias else None,
        "initial_states": drawn(b, h, d, n, to=acc_dtype) if state else None,
        "dt_softplus": softplus, "dt_min": 0.1 if limits else 0.0,
        "dt_max": 1.0 if limits or at_most else None, "return_final_states": final}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"state": True, "final": True, "gate": True, "limits": True},
    {"b": 1, "s": 130, "d": 24, "n": 32, "state": True, "final": True},
    {"skip": False, "bias": False, "softplus": False, "g": 1, "s": 1, "state": True, "final": True},
    {"s": 70, "b": 1, "h": 1, "g": 1, "decay": 60.0, "final": True},
    {"softplus": False, "at_most": True, "final": True}, {"small": True, "skip": False},
    {"s": 0, "state": True, "final": True}, {"s": 0, "final": True}, {"b": 0},
)
GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {"s": 5, "d": 4, "n": 4}, {"s": 70, "b": 1, "h": 2, "g": 1, "d": 4, "n": 4, "state": True,
                               "gate": True})


def _last_first(op: Any, v: dict[str, Any]) -> dict[str, Any] | None:
    return None if v["x"].shape[1] < 2 else {**v, "dt": v["dt"].flip(1)}


MISTAKES: tuple[Mistake, ...] = (
    replace_argument("convention", "no softplus of dt", "dt_softplus", False),
    Mistake("head map", "head h reading group h % groups of B and C",
               interleave_groups(("B", "C"), "x", 2)),
    Mistake("convention", "no bias of dt", drop_argument("dt_bias")),
    Mistake("convention", "the input not added to the output", drop_argument("D")),
    Mistake("convention", "no gate", drop_argument("z")),
    Mistake("convention", "the first state ignored", drop_argument("initial_states")),
    Mistake("convention", "dt of another token", _last_first),
    Mistake("convention", "the decay with the other sign", lambda op, v: {**v, "A": -v["A"]}),
    Mistake("convention", "no decay", lambda op, v: {**v, "A": v["A"] * 0.0}))

OP = Op(
    name="mamba_chunk_scan", family="linear_attention", reference=reference, meta=meta,
    inputs=inputs, cases=CASES, gradient_cases=GRADIENT_CASES, mistakes=MISTAKES,
    stress=({"b": 1, "s": 512, "h": 8, "g": 2, "d": 64, "n": 128, "final": True},
            {"b": 1, "s": 300, "h": 2, "g": 1, "d": 4, "n": 4, "state": True, "gate": True,
             "final": True}),
    reference_kernel={"overhead_us": 100.0},
    tolerance=Tolerance({"float16": (2e-3, 2e-3), "bfloat16": (1e-2, 1e-2),
                         "float32": (1e-5, 1e-5), "float64": (1e-8, 1e-8)}),
    shapes={"x": "batch seq heads head_dim", "dt": "batch seq heads", "A": "heads",
            "B": "batch seq groups state_dim", "C": "batch seq groups state_dim", "D": "heads",
            "z": "batch seq heads head_dim", "dt_bias": "heads",
            "initial_states": "batch heads head_dim state_dim"},
    returns=("batch seq heads head_dim", "batch heads head_dim state_dim"),
    same_dtype=("x", "B", "C", "z"), derived={"group_rest": "heads % groups"},
    words={"group_rest": Wording(
        "heads % groups", "{heads} heads, {groups} groups",
        {"0": "the number of heads must be a multiple of that of the groups"})},
    exact=("heads", "groups", "head_dim", "state_dim"),
    requires=(
        dtypes(*FLOATS), at_least("groups", 1, Code.EMPTY_INPUT),
        at_least("head_dim", 1, Code.EMPTY_INPUT), at_least("state_dim", 1, Code.EMPTY_INPUT),
        equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
        at_least("dt_min", 0.0, Code.VALUE_OUT_OF_RANGE),
        *(one_of(f"{name}.dtype", *FLOATS, code=Code.DTYPE_UNSUPPORTED) for name in ("dt", "A")),
        *(one_of(f"{name}.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED)
          for name in ("D", "dt_bias", "initial_states"))),
    flops="6 * batch * seq * heads * head_dim * state_dim",
    bytes="itemsize * batch * seq * (2 * heads * head_dim + 2 * groups * state_dim)",
    differentiable=("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"),
    outputs="Tensor[]",
)
