"""The forms that an attention call may have, each rewritten as the one that kernels take.

That one has dense tensors of four dimensions and of one batch, equally many heads in key and value,
of which the query has a multiple, and a mask, if any, that is bool or of the query's dtype and does
not come with is_causal. Torch takes more than that, and so does `canonical`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...spec.errors import AmbiguousLayoutWarning, InvalidCall, warn_caller
from ...spec.op import Redirect
from ...spec.reason import Code, Reason
from .block_masks import check_block_mask, dense_mask, is_block_mask

Values = dict[str, Any]
Undo = list[Callable[[Tensor], Tensor]]
QKV = ("query", "key", "value")
HALF = (torch.float16, torch.bfloat16)
FUSED: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled)


def canonical(values: Values) -> Redirect | None:
    """Rewrites a call that kernels do not take; None for one that they take, or a mistake."""
    tensors = [values[name] for name in QKV]
    if any(t.is_nested for t in tensors):
        return _pack_nested(values)
    if is_block_mask(values["attn_mask"]):
        return _block_sparse(values)
    plain = values
    if values["layout"] == "auto":
        plain = {**values, "layout": detect_layout(*tensors)}
    undo: Undo = []                             # of the output
    undo_lse: Undo = []
    if all(t.dim() == 4 if plain["layout"] == "bshd" else t.dim() >= 2 for t in tensors):
        plain = _merge_causal(unwrap_bias(plain) or plain)
        plain = _merge_batches(_broadcast(plain), undo, undo_lse)
        plain = _fill_width(_widen(plain, undo), undo)
    if plain is values:
        return None

    def restore(result: Any) -> Any:
        out, *lse = result if isinstance(result, tuple) else (result,)
        for step in reversed(undo):
            out = step(out)
        for step in reversed(undo_lse):
            lse = [step(t) for t in lse]
        return (out, *lse) if lse else out

    return Redirect("attention", plain, restore)


# causality

def unwrap_bias(values: Values) -> Values | None:
    """Returns the arguments with a CausalBias said in plain ones, or None if there is none.

    The meaning of a CausalBias is in its attributes; its elements are none of it. It is known by
    its name because its module imports Dynamo, which traces this function. A BlockMask, for which
    torch.library has no type, becomes a dense mask in what Dynamo traces.
    """
    bias: Any = values.get("attn_mask")
    if type(bias).__name__ == "BlockMask" and torch.compiler.is_compiling():
        return {**values, "attn_mask": dense_mask(bias)}
    if (type(bias).__module__, type(bias).__name__) != ("torch.nn.attention.bias", "CausalBias"):
        return None
    if values.get("is_causal"):
        raise InvalidCall.of("attention", Reason(
            Code.MASK_WITH_CAUSAL, "CausalBias should not be used with causal=True"))
    if bias.variant.name == "UPPER_LEFT":       # the same triangle at every size; torch takes any
        return {**values, "attn_mask": None, "is_causal": True, "causal_align": "top_left"}
    seq = -3 if values.get("layout") == "bshd" else -2
    want = values["query"].shape[seq], values["key"].shape[seq]
    if (bias.seq_len_q, bias.seq_len_kv) != want:
        raise InvalidCall.of("attention", Reason(
            Code.MASK_BROADCAST_INVALID, str(want),
            f"a CausalBias of {(bias.seq_len_q, bias.seq_len_kv)}", "attn_mask"))
    return {**values, "attn_mask": None, "is_causal": True, "causal_align": "bottom_right"}


def _merge_causal(values: Values) -> Values:
    """Rewrites a mask together with is_causal as a mask and a window of 0 on the right, which means
    the same. Torch's fused implementations take both; MATH does not, so sdpa_kernel(MATH)
    refuses."""
    if values["attn_mask"] is None or not values["is_causal"]:
        return values
    if not any(is_enabled() for is_enabled in FUSED):
        raise InvalidCall.of("attention", Reason(
            Code.MASK_WITH_CAUSAL,
            "Explicit attn_mask should not be set when is_causal=True and only MATH is enabled"))
    return {**values, "is_causal": False, "window_right": 0}


# block masks

def _block_sparse(values: Values) -> Redirect:
    """Rewrites a call with a BlockMask as one of block_sparse_attention."""
    plain = {name: values[name] for name in QKV}
    layout = values["layout"]
    swapped = (detect_layout(*plain.values()) if layout == "auto" else layout) == "bshd"
    for name, t in plain.items():
        if t.dim() != 4:
            raise InvalidCall.of("attention", Reason(Code.WRONG_NDIM, "4, with a BlockMask",
                                                     t.dim(), name))
    for name, default, place in (
            ("is_causal", False, ", whose mask_mod has a place for it"),
            ("window_left", -1, ", whose mask_mod has a place for it"),
            ("window_right", -1, ", whose mask_mod has a place for it"),
            ("alibi_slopes", None, ""), ("dropout_p", 0.0, "")):
        if values[name] is not default and values[name] != default:
            got = "a tensor" if isinstance(values[name], Tensor) else values[name]
            raise InvalidCall.of("attention", Reason(
                Code.VALUE_OUT_OF_RANGE, f"{default} beside a BlockMask{place}", got, name))
    if swapped:
        plain = {name: t.transpose(1, 2) for name, t in plain.items()}
    query, key, _ = plain.values()
    if not values["enable_gqa"] and query.shape[1] != key.shape[1] != 1:
        raise InvalidCall.of("attention", Reason(Code.GQA_UNSUPPORTED, 1,
                                                 query.shape[1] // max(key.shape[1], 1), "group"))
    check_block_mask("attention", values["attn_mask"], query, key, "attn_mask")

    def restore(result: Any) -> Any:
        out, *lse = result if isinstance(result, tuple) else (result,)
        out = out.transpose(1, 2) if swapped else out
        return (out, *lse) if lse else out

    return Redirect("block_sparse_attention", {
        **plain, "block_mask": values["attn_mask"], "scale": values["scale"],
        "softcap": values["softcap"], "return_lse": values["return_lse"]}, restore)


# shapes

def _broadcast(values: Values) -> Values:
    """Expands batches and heads as torch does: what is missing or 1 is repeated, without a copy."""
    tensors = [values[name] for name in QKV]
    rank, axis = max(t.dim() for t in tensors), -3 if values["layout"] == "bhsd" else -2
    full = [t[(None,) * (rank - t.dim())] for t in tensors]
    if rank > 2:
        query, key, value = (t.shape[axis] for t in full)
        if key != value:                        # grouped each on its own
            kv = max(key, value)
            if min(key, value) == 0 or kv % key or kv % value:
                return values                   # a mistake, which the reader of facts names
            full[1:] = [_repeat_heads(t, kv // t.shape[axis], axis) for t in full[1:]]
            key = kv
        if query == 1 and key > 1:
            full[0] = _repeat_heads(full[0], key, axis)
    batches = [t.shape[:-3] for t in full]
    if not batches[0] == batches[1] == batches[2]:
        try:
            batch = torch.broadcast_shapes(*batches)
        except RuntimeError:
            return values
        full = [t.expand(*batch, *t.shape[-3:]) for t in full]
    if all(a is b or a.shape == b.shape for a, b in zip(full, tensors)):
        return values
    return {**values, **dict(zip(QKV, full))}


def _repeat_heads(t: Tensor, times: int, axis: int) -> Tensor:
    if t.shape[axis] != 1:
        return t.repeat_interleave(times, axis) if times > 1 else t
    sizes = [-1] * t.dim()
    sizes[axis] = times
    return t.expand(sizes)


def _merge_batches(values: Values, undo: Undo, undo_lse: Undo) -> Values:
    """No batch dimension becomes a batch of one, several become one."""
    query, key, value = (values[name] for name in QKV)
    batch = query.shape[:-3]
    if query.dim() == 4 or not (query.dim() == key.dim() == value.dim()
                                and batch == key.shape[:-3] == value.shape[:-3]):
        return values
    flat = {name: t.reshape(-1, *t.shape[-3:]) if t.dim() > 3 else t[(None,) * (4 - t.dim())]
            for name, t in zip(QKV, (query, key, value))}
    mask = values["attn_mask"]
    if mask is not None and mask.dim() > 3 and len(batch) > 1:
        mask_batch = mask.shape[:-3]
        if (len(mask_batch) > len(batch)
            or any(m not in (1, b) for m, b in zip(mask_batch[::-1], batch[::-1]))):
            want = str((*query.shape[:-1], key.shape[-2]))
            raise InvalidCall.of("attention", Reason(
                Code.MASK_BROADCAST_INVALID, want, str(tuple(mask.shape)), "attn_mask"))
        mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    lead = query.shape[:-1]
    undo.append(lambda out: out.reshape(*lead, out.shape[-1]))
    undo_lse.append(lambda lse: lse.reshape(lead))
    return {**values, **flat, "attn_mask": mask}


def _widen(values: Values, undo: Undo) -> Values:
    """Torch lets a float32 mask meet half-precision scores in float32."""
    mask, dtype = values["attn_mask"], values["query"].dtype
    if mask is None or mask.dtype is not torch.float32 or dtype not in HALF or any(
            values[name].dtype is not dtype for name in QKV):
        return values
    undo.append(lambda out: out.to(dtype))
    return {**values, **{name: _on_storage(values[name], Tensor.float) for name in QKV}}


def _fill_width(values: Values, undo: Undo) -> Values:
    """Heads of width 0 get a column of zeros: every score is then 0."""
    filled = {name: _zero_column(values[name]) for name in QKV if values[name].shape[-1] == 0}
    if not filled:
        return values
    if "value" in filled:
        undo.append(lambda out: out[..., :0])
    return {**values, **filled}


def _zero_column(t: Tensor) -> Tensor:
    return _on_storage(t, lambda small: torch.nn.functional.pad(small, (0, 1)))


def _on_storage(t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Changes each stored element once: what is expanded stays so, and takes no memory."""
    repeated = [stride == 0 and n > 1 for n, stride in zip(t.shape, t.stride())]
    if not any(repeated):
        return change(t)
    changed = change(t[tuple(slice(1) if r else slice(None) for r in repeated)])
    return changed.expand([n if r else -1 for n, r in zip(t.shape, repeated)])


def detect_layout(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Returns the layout by shapes, or by strides with a warning; InvalidCall if neither tells."""
    for name, t in zip(QKV, (query, key, value)):
        if t.dim() != 4:
            raise InvalidCall.of("attention", Reason(Code.WRONG_NDIM, 4, t.dim(), name))

    def fits(heads: int, seq: int) -> bool:
        return (query.shape[heads] % max(key.shape[heads], 1) == 0
                and key.shape[heads] == value.shape[heads]
                and key.shape[seq] == value.shape[seq] and key.shape[heads] > 0)

    as_bhsd, as_bshd = fits(1, 2), fits(2, 1)
    if as_bhsd != as_bshd:
        return "bhsd" if as_bhsd else "bshd"
    shapes = tuple(str(tuple(t.shape)) for t in (query, key, value))
    if as_bhsd and all(t.stride(1) < t.stride(2) for t in (query, key, value)):
        warn_caller(
            f"lz.attention: layout='auto' took {shapes[0]} for 'bhsd' because its storage is a "
            "transposed (batch, seq, heads, dim); pass layout= to be sure.",
            AmbiguousLayoutWarning)
        return "bhsd"
    raise InvalidCall.of("attention", Reason(
        Code.LAYOUT_AMBIGUOUS, "an unambiguous shape", " ".join(shapes), "layout"))


# nested tensors

def _pack_nested(values: Values) -> Redirect:
    """Rewrites a call with nested tensors as one packed call of varlen_attention."""
    tensors = {name: values[name] for name in QKV}
    layouts = {t.layout if t.is_nested else None for t in tensors.values()}
    for name, default in (("attn_mask", None), ("alibi_slopes", None), ("return_lse", False)):
        if values[name] is not default:
            raise _refuse(f"{name}={default} with nested", "a value", name)
    if layouts == {torch.jagged}:
        packed, offsets, restore = _pack_jagged(values)
    elif layouts == {torch.strided}:
        packed, offsets, restore = _pack_strided(values)
    else:
        kinds = ", ".join(f"{name} {f'nested {t.layout}' if t.is_nested else 'dense'}"
                          for name, t in tensors.items())
        raise _refuse("either dense or equally nested", kinds, "query, key, value")
    lengths = {name: of.diff() for name, of in offsets.items()}
    if not torch.equal(lengths["key"], lengths["value"]):
        raise InvalidCall.of("attention", Reason(
            Code.DIM_MISMATCH, "the key's", str(lengths["value"].tolist()),
            "lengths of the value's sequences"))
    longest = {name: int(of.max()) if len(of) else 0 for name, of in lengths.items()}
    return Redirect("varlen_attention", {
        **packed, "cu_seqlens_q": offsets["query"].to(torch.int32),
        "cu_seqlens_k": offsets["key"].to(torch.int32),
        "max_seqlen_q": longest["query"], "max_seqlen_k": longest["key"],
        "is_causal": values["is_causal"], "scale": values["scale"],
        "causal_align": values["causal_align"] or ("top_left" if values["is_causal"] else None),
        "window_left": values["window_left"], "window_right": values["window_right"],
        "softcap": values["softcap"], "dropout_p": values["dropout_p"]}, restore)


Packed = tuple[dict[str, Tensor], dict[str, Tensor], Callable[[Any], Any]]


def _pack_jagged(values: Values) -> Packed:
    """Returns the rows of each tensor, its offsets, and what nests the output."""
    tensors = {name: values[name] for name in QKV}
    query = tensors["query"]
    axes = {"bhsd": (2,), "bshd": (1,), "auto": (1, 2)}[values["layout"]]
    ragged = next(i for i, n in enumerate(query.shape) if isinstance(n, torch.SymInt))
    for name, t in tensors.items():
        if (t.dim() != 4 or ragged not in axes or not isinstance(t.shape[ragged], torch.SymInt)
            or t.lengths() is not None):
            raise _refuse(
                "nested in 4 dimensions without holes, ragged in dimension "
                f"{' or '.join(map(str, axes))} only",
                f"{tuple(t.shape)}{' with holes' if t.lengths() is not None else ''}", name)

    def restore(out: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(out, query.offsets())
        return nested.transpose(1, 2) if ragged == 2 else nested

    rows = {name: t.transpose(1, 2) if ragged == 2 else t for name, t in tensors.items()}
    return ({name: t.values() for name, t in rows.items()},
            {name: t.offsets() for name, t in tensors.items()}, restore)


def _pack_strided(values: Values) -> Packed:
    """As _pack_jagged, for nested tensors of layout torch.strided, with or without heads."""
    rows: dict[str, list[Tensor]] = {}
    rank, layout = values["query"].dim(), values["layout"]
    for name in QKV:
        parts = values[name].unbind()
        rows[name] = [t[:, None] if rank == 3 else t.transpose(0, 1) if layout == "bhsd" else t
                      for t in parts]
        if (layout == "auto" or values[name].dim() != rank or rank not in (3, 4)
            or (rank, layout) == (3, "bshd") or len({t.shape[1:] for t in rows[name]}) != 1):
            raise _refuse("nested (batch, heads, seq, dim) in the layout given, ragged in seq only",
                          f"parts of {[tuple(t.shape) for t in parts]}, layout={layout!r}", name)
    lengths = {name: [len(t) for t in of] for name, of in rows.items()}
    offsets = {name: torch.tensor([0, *accumulate(of)], device=values["query"].device)
               for name, of in lengths.items()}

    def restore(out: Tensor) -> Tensor:
        parts = out.split(lengths["query"])
        return torch.nested.as_nested_tensor([
            t[:, 0] if rank == 3 else t.transpose(0, 1) if layout == "bhsd" else t for t in parts])

    return {name: torch.cat(of) for name, of in rows.items()}, offsets, restore


def _refuse(want: str, got: str, name: str) -> InvalidCall:
    return InvalidCall.of("attention", Reason(Code.RAGGED_UNSUPPORTED, want, got, name))
