"""One token of a selective state space (Mamba-2): the step of decoding.

Each head keeps a state (head_dim, state_dim). A token decays it, adds its input and reads it:

    dt = softplus(dt + dt_bias);  S = exp(dt * A) * S + (dt * x) B^T;  y = S C + D * x

x has `heads` heads, B and C `groups`, of which the heads are a multiple. Everything is computed in
float32 (float64 stays); the new state has the dtype of the old one. A sequence: mamba_chunk_scan.
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
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the output (batch, heads, head_dim) and the new state; the given one stays.

    state: (batch, heads, head_dim, state_dim). x, dt, z: (batch, heads, head_dim). A: (heads,
    head_dim, state_dim). B, C: (batch, groups, state_dim). D, dt_bias: (heads, head_dim). What a
    head has in common is expanded: dt, A, D and dt_bias of Mamba-2. z: the output is multiplied by
    silu(z).
    """
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    inputs, step = x.to(acc_dtype), dt.to(acc_dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(acc_dtype)
    if dt_softplus:
        step = F.softplus(step)
    share = x.shape[1] // max(B.shape[1], 1)
    keys, queries = (t.to(acc_dtype).repeat_interleave(share, 1)[:, :, None] for t in (B, C))
    new = (state.to(acc_dtype) * (step[..., None] * A.to(acc_dtype)).exp()
           + (step * inputs)[..., None] * keys)
    out = (new * queries).sum(-1)
    if D is not None:
        out = out + D.to(acc_dtype) * inputs
    if z is not None:
        out = out * F.silu(z.to(acc_dtype))
    return out.to(x.dtype), new.to(state.dtype)


def meta(state: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


def inputs(
    b: int = 2, h: int = 4, g: int = 2, d: int = 8, n: int = 16, tied: bool = True,
    skip: bool = True, gate: bool = False, bias: bool = True, softplus: bool = True,
    wide_state: bool = False, slow: bool = False, first: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """tied: dt, A, D and dt_bias are those of a head, expanded. slow: most of the state stays.
    first: small steps from a state of zeros, as trained models begin with."""
    gen = torch.Generator("cpu").manual_seed(seed)
    own = 1 if tied else d
    acc_dtype = torch.promote_types(dtype, torch.float32)

    def drawn(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device=device, dtype=to)

    A = -(torch.rand(h, own, 1 if tied else n, generator=gen) * 4 + 0.1)
    step = drawn(b, h, own) if softplus else drawn(b, h, own).abs()
    step = step - 8.0 if first and softplus else step * 0.01 if slow else step
    state = drawn(b, h, d, n, to=acc_dtype if wide_state else dtype)
    return {
        "state": torch.zeros_like(state) if first else state, "x": drawn(b, h, d),
        "dt": step.expand(b, h, d), "A": A.to(device=device, dtype=acc_dtype).expand(h, d, n),
        "B": drawn(b, g, n), "C": drawn(b, g, n),
        "D": drawn(h, own).expand(h, d) if skip else None, "z": drawn(b, h, d) if gate else None,
        "dt_bias": drawn(h, own).expand(h, d) if bias else None, "dt_softplus": softplus}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"tied": False, "gate": True, "wide_state": True}, {"b": 0},
    {"skip": False, "bias": False, "softplus": False, "g": 1, "n": 19},
    {"wide_state": True, "softplus": False, "bias": False, "slow": True},
    {"b": 1, "h": 8, "g": 1, "d": 64, "n": 128, "wide_state": True}, {"first": True, "skip": False},
)
GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {"d": 3, "n": 4}, {"d": 3, "n": 4, "tied": False, "gate": True})

MISTAKES: tuple[Mistake, ...] = (
    replace_argument("convention", "no softplus of dt", "dt_softplus", False),
    Mistake("head map", "head h reading group h % groups of B and C",
               interleave_groups(("B", "C"), "x", 1)),
    Mistake("convention", "no bias of dt", drop_argument("dt_bias")),
    Mistake("convention", "the input not added to the output", drop_argument("D")),
    Mistake("convention", "no gate", drop_argument("z")),
    Mistake("convention", "the decay with the other sign", lambda op, v: {**v, "A": -v["A"]}),
    Mistake("convention", "no decay", lambda op, v: {**v, "A": v["A"] * 0.0}),
    Mistake("convention", "B and C confused", lambda op, v: {**v, "B": v["C"], "C": v["B"]}))

GROUPS = Wording("heads % groups", "{heads} heads, {groups} groups",
                 {"0": "the number of heads must be a multiple of that of the groups"})
OP = Op(
    name="selective_state_update", family="linear_attention", reference=reference, meta=meta,
    inputs=inputs, cases=CASES, gradient_cases=GRADIENT_CASES, mistakes=MISTAKES,
    stress=({"b": 4, "h": 32, "g": 4, "d": 64, "n": 128},
            {"b": 604, "h": 112, "g": 1, "d": 2, "n": 2}),     # more heads of all than 2^16
    main="x",
    reference_kernel={"overhead_us": 60.0,
                      "workspace": "12 * batch * heads * head_dim * state_dim"},
    tolerance=Tolerance({"float16": (2e-3, 2e-3), "bfloat16": (1e-2, 1e-2),
                         "float32": (1e-5, 1e-5), "float64": (1e-8, 1e-8)}),
    shapes={"state": "batch heads head_dim state_dim", "x": "batch heads head_dim",
            "dt": "batch heads head_dim", "A": "heads head_dim state_dim",
            "B": "batch groups state_dim", "C": "batch groups state_dim", "D": "heads head_dim",
            "z": "batch heads head_dim", "dt_bias": "heads head_dim"},
    returns=("batch heads head_dim", "batch heads head_dim state_dim"),
    same_dtype=("x", "B", "C", "z"), derived={"group_rest": "heads % groups"},
    words={"group_rest": GROUPS}, exact=("heads", "groups", "head_dim", "state_dim"),
    requires=(
        dtypes(*FLOATS), at_least("groups", 1, Code.EMPTY_INPUT),
        at_least("head_dim", 1, Code.EMPTY_INPUT), at_least("state_dim", 1, Code.EMPTY_INPUT),
        equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
        *(one_of(f"{name}.dtype", *FLOATS, code=Code.DTYPE_UNSUPPORTED)
          for name in ("state", "dt", "A")),
        *(one_of(f"{name}.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED)
          for name in ("D", "dt_bias"))),
    flops="6 * batch * heads * head_dim * state_dim",
    bytes="2 * itemsize * batch * heads * head_dim * state_dim",
    differentiable=("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"), outputs="Tensor[]",
)
