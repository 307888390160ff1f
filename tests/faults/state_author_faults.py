"""Kernels that are wrong as the author of a new kernel may write them: recurrences with a state, and
codes of few bits. Each is wrong in one way.

`benchmarks/planted_faults.py --set authors` runs all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch.nn import functional as F

_BEFORE = len(FAULTS)


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _on_second(out: Any, change: Any) -> Any:
    return (out[0], change(out[1])) if isinstance(out, tuple) else out


# Recurrences.

@fault("gated_delta_rule", "convention")
def final_state_before_the_last_token(right, **v):
    out = right(**v)
    if not v["output_final_state"] or v["q"].shape[1] < 2:
        return out
    shorter = {n: v[n][:, :-1] for n in ("q", "k", "v", "g", "beta")}
    return out[0], right(**{**v, **shorter})[1]


@fault("gated_delta_rule", "sizes", "convention", "unknown")
def state_starts_anew_every_64_tokens(right, **v):
    if v["q"].shape[1] <= 64 or torch.is_grad_enabled():
        return right(**v)
    parts, state = [], v["initial_state"]
    for start in range(0, v["q"].shape[1], 64):
        cut = {n: v[n][:, start:start + 64] for n in ("q", "k", "v", "g", "beta")}
        out, last = right(**{**v, **cut, "initial_state": state, "output_final_state": True})
        parts.append(out)
        state = None
    whole = torch.cat(parts, 1)
    return (whole, last) if v["output_final_state"] else whole


@fault("gated_delta_rule", "convention", "precision")
def norm_adds_its_eps_outside_the_root(right, **v):
    if v["use_qk_l2norm_in_kernel"]:
        for n in ("q", "k"):
            t = v[n].to(torch.promote_types(v[n].dtype, torch.float32))
            v[n] = (t / (t.norm(dim=-1, keepdim=True) + 1e-2)).to(v[n].dtype)
        v["use_qk_l2norm_in_kernel"] = False
    return right(**v)


@fault("gated_delta_rule", "head map")
def value_heads_share_keys_interleaved(right, **v):
    heads, value_heads = v["q"].shape[2], v["v"].shape[2]
    order = torch.arange(value_heads) % max(heads, 1)
    return right(**{**v, "q": v["q"][:, :, order], "k": v["k"][:, :, order]})


@fault("gated_delta_rule", "in-place change", "aliasing")
def updates_the_first_state_in_place(right, **v):
    out, state = right(**v), v["initial_state"]
    if state is not None and isinstance(out, tuple) and not torch.is_grad_enabled():
        state.data.copy_(out[1])
    return out


@fault("causal_conv1d", "convention", "sizes", "unknown")
def state_of_a_short_sequence_is_padded(right, **v):
    """A sequence shorter than the filter forgets the tokens before it."""
    out, x = right(**v), v["x"]
    if isinstance(out, tuple) and v["initial_states"] is not None \
            and x.shape[2] < out[1].shape[2]:
        return out[0], F.pad(x, (out[1].shape[2] - x.shape[2], 0))
    return out


@fault("causal_conv1d", "convention", "sizes", "unknown")
def first_tokens_of_a_long_state_are_read(right, **v):
    state, need = v["initial_states"], v["weight"].shape[1] - 1
    if state is None or state.shape[2] <= need:
        return right(**v)
    return _on_first(right(**v), lambda out: _on_first(
        right(**{**v, "initial_states": state[..., :need].contiguous()}), lambda t: t)
        if not v["return_final_states"] else right(
            **{**v, "initial_states": state[..., :need].contiguous()})[0])


@fault("causal_conv1d", "convention")
def bias_after_the_silu(right, **v):
    if v["bias"] is None or v["activation"] is None:
        return right(**v)
    return _on_first(right(**{**v, "bias": None}), lambda out: out + v["bias"][:, None])


@fault("causal_conv1d", "aliasing")
def final_states_are_a_view_of_x(right, **v):
    out, x = right(**v), v["x"]
    if isinstance(out, tuple) and x.shape[2] >= out[1].shape[2] > 0 \
            and not torch.is_grad_enabled():
        return out[0], x[..., x.shape[2] - out[1].shape[2]:]
    return out


@fault("causal_conv1d", "layout")
def channels_side_by_side_read_flat(right, **v):
    x = v["x"]
    if not x.is_contiguous() and x.transpose(1, 2).is_contiguous() and x.shape[2] > 1:
        v["x"] = x.transpose(1, 2).reshape(x.shape)
    return right(**v)


@fault("mamba_chunk_scan", "head map")
def groups_of_b_and_c_interleaved(right, **v):
    order = torch.arange(v["x"].shape[2]) % v["B"].shape[2]
    return right(**{**v, "B": v["B"][:, :, order], "C": v["C"][:, :, order]})


@fault("mamba_chunk_scan", "convention", "scale")
def upper_limit_of_dt_is_ignored(right, **v):
    return right(**{**v, "dt_max": None})


@fault("mamba_chunk_scan", "convention")
def skip_is_added_after_the_gate(right, **v):
    if v["D"] is None or v["z"] is None:
        return right(**v)
    return _on_first(right(**{**v, "D": None}), lambda out: out + (
        v["D"][:, None] * v["x"]).to(out.dtype))


@fault("mamba_chunk_scan", "convention")
def gate_is_a_sigmoid(right, **v):
    if v["z"] is None:
        return right(**v)
    return _on_first(right(**{**v, "z": None}), lambda out: (out * v["z"].sigmoid()).to(out.dtype))


@fault("mamba_chunk_scan", "precision", "dtype")
def state_kept_in_the_dtype_of_x(right, **v):
    return _on_second(right(**v), lambda state: state.to(v["x"].dtype).to(state.dtype))


@fault("mamba_chunk_scan", "convention")
def bias_of_dt_after_the_softplus(right, **v):
    if v["dt_bias"] is None or not v["dt_softplus"]:
        return right(**v)
    step = F.softplus(v["dt"].float()) + v["dt_bias"].float()
    return right(**{**v, "dt": step.to(v["dt"].dtype), "dt_bias": None, "dt_softplus": False})


@fault("selective_state_update", "in-place change")
def writes_the_new_state_over_the_old(right, **v):
    out = right(**v)
    if not torch.is_grad_enabled() and not v["state"].is_inference():
        v["state"].copy_(out[1])
    return out


@fault("selective_state_update", "convention")
def decay_with_the_other_sign(right, **v):
    return right(**{**v, "A": -v["A"]})


@fault("selective_state_update", "precision", "dtype")
def wide_state_rounded_to_the_dtype_of_x(right, **v):
    return right(**{**v, "state": v["state"].to(v["x"].dtype).to(v["state"].dtype)})


@fault("selective_state_update", "convention")
def output_of_the_old_state(right, **v):
    """Reads C of the state before the token is added."""
    out, new = right(**v)
    old = right(**{**v, "x": v["x"] * 0})[0]
    skip = 0 if v["D"] is None else v["D"] * v["x"]
    gate = 1 if v["z"] is None else F.silu(v["z"].to(out.dtype))
    return (old + skip * gate).to(out.dtype), new


# Codes of few bits.

@fault("quantize", "convention", "scale", "precision")
def scale_for_128_steps(right, **v):
    if v["format"] != "int8" or v["scales"] is not None or not v["symmetric"]:
        return right(**v)
    codes, scales, *rest = right(**v)
    return (codes, scales * (127 / 128), *rest)


@fault("quantize", "non-finite values", "convention", "sizes", "unknown")
def nan_becomes_the_highest_code(right, **v):
    out = right(**v)
    if v["format"] != "int8" or not bool(v["x"].isnan().any()):
        return out
    return _on_first(out, lambda codes: torch.where(v["x"].isnan(), 127, codes).to(codes.dtype))


@fault("quantize", "aliasing", "result")
def returns_the_given_scales_themselves(right, **v):
    out = right(**v)
    return out if v["scales"] is None else (out[0], v["scales"], *out[2:])


@fault("quantize", "convention", "precision", "scale")
def power_of_two_scale_is_rounded_up(right, **v):
    if v["format"] != "mxfp4" or v["scales"] is not None or not v["x"].numel():
        return right(**v)
    _, scales = right(**v)
    raised = (scales.view(torch.uint8) + 1).clamp(max=254).view(scales.dtype)
    return right(**{**v, "scales": raised})


@fault("quantize", "scale", "convention")
def given_global_scale_is_ignored(right, **v):
    if v["format"] == "nvfp4" and v["global_scale"] is not None:
        codes, scales, _ = right(**{**v, "global_scale": v["global_scale"] * 2})
        return codes, scales, v["global_scale"].clone()
    return right(**v)


@fault("dequantize", "convention")
def zeros_are_added(right, **v):
    zeros = v["zeros"]
    if zeros is not None and zeros.dtype == torch.int8:
        v["zeros"] = (-zeros.int()).clamp(-128, 127).to(torch.int8)
    return right(**v)


@fault("dequantize", "precision", "dtype")
def rounded_to_bfloat16_on_the_way(right, **v):
    if v["out_dtype"] == "bfloat16":
        return right(**v)
    return right(**{**v, "out_dtype": "bfloat16"}).to(getattr(torch, v["out_dtype"]))


@fault("dequantize", "sizes", "scale", "last rows", "convention")
def short_last_block_has_the_scale_before_it(right, **v):
    scales, size = v["scales"], v["block_size"]
    if scales is None or not size or scales.shape[-1] < 2 or v["q"].shape[-1] % size == 0 \
            or v["format"] not in ("int8", "fp8_e4m3", "fp8_e5m2"):
        return right(**v)
    scales = scales.clone()
    scales[..., -1] = scales[..., -2]
    return right(**{**v, "scales": scales})


@fault("dequantize", "convention", "sizes")
def nf4_table_is_symmetric(right, **v):
    if v["format"] != "nf4":
        return right(**v)
    out = right(**v)
    return torch.where(out > 0, out * 0.98, out).to(out.dtype)


@fault("quantized_linear", "convention", "precision", "scale")
def activations_share_one_scale(right, **v):
    """int8 activations are scaled by the largest of all rows, not of their own."""
    x = v["x"]
    if v["activations"] != "int8" or x.dim() < 2 or not x.numel():
        return right(**v)
    step = x.abs().amax().float() / 127
    rounded = (x.float() / step).round().clamp(-127, 127) * step
    return right(**{**v, "x": rounded.to(x.dtype), "activations": "none"})


@fault("quantized_linear", "scale", "convention")
def scales_of_the_next_group(right, **v):
    scales = v["scales"]
    if scales is not None and scales.dim() == 2 and scales.shape[-1] > 1:
        v["scales"] = scales.roll(-1, -1)
    return right(**v)


@fault("quantized_linear", "convention", "scale")
def zero_of_int4_is_seven(right, **v):
    if v["format"] != "int4" or v["zeros"] is not None or v["scales"] is None:
        return right(**v)
    return right(**{**v, "zeros": torch.full(v["scales"].shape, 7, dtype=torch.uint8)})


@fault("quantized_linear", "stale cache", "state")
class DequantizedOncePerTensor:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = (v["weight_q"].data_ptr(), v["weight_q"].shape, v["format"])
        scales = self.kept.setdefault(key, None if v["scales"] is None else v["scales"].clone())
        return right(**{**v, "scales": scales})


@fault("quantized_linear", "convention", "precision", "scale")
def bias_is_multiplied_by_the_scale(right, **v):
    if v["bias"] is None or v["scales"] is None or v["scales"].shape[-1] != 1:
        return right(**v)
    return right(**{**v, "bias": (v["bias"] * 0.5).to(v["bias"].dtype)})


STATE_AUTHOR_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the long lane runs them
