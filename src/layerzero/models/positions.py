"""Tables for lz.rope and slopes for lz.alibi: computed once, when a model is built, and passed to
every call.

`scaling` is what a model's configuration calls rope_scaling or rope_parameters: a mapping whose
"rope_type" says how the angles of positions beyond the trained length are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..dispatch.dispatcher import public_function
from ..ops.alibi import OP as _alibi
from ..ops.alibi import default_slopes
from ..ops.formulas import rope as formulas
from ..spec.errors import InvalidCall
from ..spec.reason import Code, Reason

# rope_type -> (required keys, optional keys)
_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (("original_max_position_embeddings",),
             ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
              "truncate")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings"), ()),
    "longrope": (("short_factor", "long_factor", "original_max_position_embeddings"),
                 ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
}
_ANY_KIND = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_POSITIVE = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
             "beta_fast", "beta_slow", "attention_factor")


def rope_tables(
    head_dim: int, max_positions: int, base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None, *, rotary_dim: int | None = None,
    seq_len: int | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin), each (max_positions, rotary_dim / 2): row n holds the angles of position
    n.

    scaling: {"rope_type": "default" | "linear" | "ntk" | "dynamic" | "yarn" | "llama3" | "longrope"
    | "proportional", ...} with the keys of a model's configuration.
    rotary_dim: how many elements of a head are rotated; default: all, or by partial_rotary_factor.
    seq_len: the length in use, which "dynamic" and "longrope" depend on; default: max_positions.
    """
    options = dict(scaling or {})
    kind = _kind_of(options)
    _check_numbers(head_dim, max_positions, base, seq_len)
    _check_keys(kind, options, base)
    dim = _rotary_dim(head_dim, rotary_dim, options, kind)
    frequencies, amplitude = _frequencies(kind, head_dim, dim, base, options, max_positions, seq_len
                                          or max_positions)
    angles = torch.arange(max_positions).float()[:, None] * frequencies
    return tuple((t * amplitude).to(device=device, dtype=dtype)
                 for t in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def xpos_tables(
    head_dim: int, max_positions: int, base: float = 10000.0, *, scale_base: float = 512.0,
    rotary_dim: int | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns ((cos, sin) for queries, (cos, sin) for keys) of XPos: rotate q and k by one lz.rope
    call each.

    Scores then decay with distance, the faster the smaller scale_base.
    """
    if scale_base <= 0:
        raise _invalid("xpos_tables", "scale_base", "> 0", scale_base)
    cos, sin = rope_tables(head_dim, max_positions, base, rotary_dim=rotary_dim)
    decay = formulas.xpos_decay(2 * cos.shape[-1], torch.arange(max_positions), scale_base)

    def pair(factor: Tensor) -> tuple[Tensor, Tensor]:
        return (cos * factor).to(device=device, dtype=dtype), (sin * factor).to(device=device,
                                                                                dtype=dtype)

    return pair(decay), pair(1.0 / decay)


def alibi_slopes(heads: int, *, dtype: torch.dtype = torch.float32,
                 device: torch.device | str | None = None) -> Tensor:
    """Returns one slope per head, for lz.alibi and lz.attention; any number of heads."""
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise _invalid("alibi_slopes", "heads", "an int >= 1", heads)
    return torch.tensor(default_slopes(heads), dtype=torch.float32).to(device=device, dtype=dtype)


def alibi_bias(
    num_heads: int, seq_q: int, seq_k: int, *, causal_align: Literal["top_left", "bottom_right"]
    | None = None, is_causal: bool = False, dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None, backend: str | None = None,
) -> Tensor:
    """Returns lz.alibi with the paper's slopes: the bias (num_heads, seq_q, seq_k)."""
    slopes = alibi_slopes(num_heads, dtype=dtype, device=device)
    bias: Tensor = public_function(_alibi)(slopes, seq_q, seq_k, causal_align=causal_align,
                                           is_causal=is_causal, backend=backend)
    return bias


def _frequencies(kind: str, head_dim: int, dim: int, base: float, scaling: Mapping[str, Any],
                 max_positions: int, seq_len: int) -> tuple[Tensor, float]:
    """Returns the frequency of each pair, and the factor of cos and sin."""
    original = scaling.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    if factor is None and original is not None:
        factor = max_positions / original
    factor = 1.0 if factor is None else factor
    if kind == "linear":
        return formulas.linear_frequencies(dim, base, factor), 1.0
    if kind == "ntk":
        return formulas.ntk_frequencies(dim, base, factor), 1.0
    if kind == "dynamic":
        return formulas.dynamic_ntk_frequencies(dim, base, factor,
                                                scaling["original_max_position_embeddings"],
                                                seq_len), 1.0
    if kind == "llama3":
        return formulas.llama3_frequencies(dim, base, factor,
                                           scaling["original_max_position_embeddings"],
                                           scaling["low_freq_factor"],
                                           scaling["high_freq_factor"]), 1.0
    if kind == "proportional":
        return formulas.proportional_frequencies(head_dim, base, factor,
                                                 scaling.get("partial_rotary_factor", 1.0)), 1.0
    amplitude = scaling.get("attention_factor")
    if kind == "yarn":
        assert original is not None            # checked by _check_keys
        if amplitude is None:
            amplitude = formulas.yarn_attention_factor(factor, scaling.get("mscale"),
                                                       scaling.get("mscale_all_dim"))
        return formulas.yarn_frequencies(dim, base, factor, original, scaling.get("beta_fast")
                                         or 32,
                                         scaling.get("beta_slow") or 1,
                                         scaling.get("truncate", True)), amplitude
    if kind == "longrope":
        assert original is not None
        if amplitude is None:
            amplitude = formulas.longrope_attention_factor(factor, original)
        name = "long_factor" if seq_len > original else "short_factor"
        if len(scaling[name]) != dim // 2:
            raise _invalid("rope_tables", f"scaling[{name!r}]",
                           f"{dim // 2} numbers, one for each pair",
                           len(scaling[name]))
        return formulas.longrope_frequencies(dim, base, scaling[name]), amplitude
    return formulas.frequencies(dim, base), 1.0


def _kind_of(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type",
                       scaling.get("type", "default" if not scaling.keys() - {"rope_theta"}
                                   else None))
    if kind is None:
        raise InvalidCall.of("rope_tables",
                             Reason(Code.MISSING_METADATA, f"one of {', '.join(_KEYS)}", None,
                                                   "scaling['rope_type']"))
    if kind not in _KEYS:
        hint = "; for xpos call xpos_tables" if kind == "xpos" else ""
        raise _invalid("rope_tables", "scaling['rope_type']", f"one of {', '.join(_KEYS)}{hint}",
                       kind)
    return str(kind)


def _check_keys(kind: str, scaling: Mapping[str, Any], base: float) -> None:
    needed, also = _KEYS[kind]
    missing = [key for key in needed if scaling.get(key) is None]
    if missing:
        raise InvalidCall.of("rope_tables",
                             *(Reason(Code.MISSING_METADATA, f"{kind} cannot do without it", None,
                                                     f"scaling[{key!r}]") for key in missing))
    unknown = [key for key in scaling if key not in (*needed, *also, *_ANY_KIND)]
    if unknown:                                # a misspelt key would otherwise be ignored silently
        raise _invalid("rope_tables", "scaling",
                       f"made of {', '.join((*needed, *also, *_ANY_KIND))} for {kind!r}",
                       ", ".join(unknown))
    if scaling.get("rope_theta") not in (None, base):
        raise _invalid("rope_tables", "base", f"{scaling['rope_theta']} like scaling['rope_theta']",
                       base)
    for key in _POSITIVE:
        if scaling.get(key) is not None and not scaling[key] > 0:
            raise _invalid("rope_tables", f"scaling[{key!r}]", "> 0", scaling[key])
    if kind == "llama3" and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        raise _invalid("rope_tables", "scaling['high_freq_factor']",
                       f"> {scaling['low_freq_factor']}, the low_freq_factor",
                       scaling["high_freq_factor"])


def _check_numbers(head_dim: int, max_positions: int, base: float, seq_len: int | None) -> None:
    for name, value, least in (("head_dim", head_dim, 2), ("max_positions", max_positions, 0),
                               ("seq_len", seq_len, 0)):
        if (value is not None and (not isinstance(value, int) or isinstance(value, bool)
                                   or value < least)):
            raise _invalid("rope_tables", name, f"an int >= {least}", value)
    if not base > 0:
        raise _invalid("rope_tables", "base", "> 0", base)


def _rotary_dim(head_dim: int, rotary_dim: int | None, scaling: Mapping[str, Any],
                kind: str) -> int:
    fraction = scaling.get("partial_rotary_factor")
    if fraction is not None and not 0 < fraction <= 1:
        raise _invalid("rope_tables", "scaling['partial_rotary_factor']", "in (0, 1]", fraction)
    expected = head_dim if fraction is None or kind == "proportional" else int(head_dim * fraction)
    dim = expected if rotary_dim is None else rotary_dim
    if fraction is not None and dim != expected:
        raise _invalid("rope_tables", "rotary_dim",
                       f"{expected}, as scaling['partial_rotary_factor'] says", dim)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise _invalid("rope_tables", "rotary_dim",
                       f"even and between 2 and {head_dim}, the head_dim", dim)
    if kind in ("ntk", "dynamic") and dim == 2:
        raise _invalid("rope_tables", "rotary_dim",
                       f"at least 4 for {kind!r}, which divides by rotary_dim - 2", dim)
    return dim


def _invalid(function: str, name: str, want: str, got: Any) -> InvalidCall:
    return InvalidCall.of(function, Reason(Code.VALUE_OUT_OF_RANGE, want, str(got), name))
