"""FlashInfer on batches: decode and prefill over a paged cache, packed sequences, latent attention.

Most of its batch kernels want a plan, made on the host from the lengths: which part of which sequence goes where. It
costs far more than the attention of one layer, so the last few are kept, each with its wrapper: the same page table,
lengths and configuration, unchanged, are planned once for all layers of a model. A plan reads the lengths on the host,
so it cannot be part of a CUDA graph; the decode kernel without a plan (XQA) can.

The float workspace is one for each device and stream: what runs on one stream runs one after the other.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formulas.paged import spans
from ...ops.mla_paged_attention import OP as mla_paged_attention
from ...ops.paged_attention import OP as paged_attention
from ...ops.varlen_attention import OP as varlen_attention
from ...spec.kernel import Kernel
from ...spec.reason import Code
from ...spec.rules import (
    Condition,
    absent,
    aligned,
    any_of,
    at_least,
    at_most,
    dtypes,
    equals,
    generations,
    off,
    on,
    one_of,
    present,
    unit_stride,
    when,
)
from .common import HALF, HARDWARE, HEAD_DIMS, LN2, TRIED

WORKSPACE = 128 << 20                          # bytes, what FlashInfer recommends
MOST_PLANS = 8                                 # of a kind on one device and stream; each holds 16 MiB


class _Plan(NamedTuple):
    """A planned wrapper, the tensors it was planned from, and the query rows that see no key."""

    wrapper: Any
    owners: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]
    dead: Tensor | None


class Plans:
    """The last plans of one kind of wrapper on one device and stream.

    A wrapper holds one plan, so a run must follow its plan: `lock` is held over both. It is short, as a run only
    launches. A wrapper that is planned anew was waited for, since planning reads the lengths from the device.
    """

    def __init__(self, make: Callable[[Tensor], Any], place: torch.device) -> None:
        self.lock = threading.Lock()
        self.made = self.reused = 0
        self._make = make
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=place)
        self._kept: OrderedDict[Any, _Plan] = OrderedDict()

    def get(self, config: Any, tensors: tuple[Tensor, ...], plan: Callable[[Any], Tensor | None]) -> _Plan:
        """The plan for this configuration of these tensors as they are now; `plan` makes it and names dead rows."""
        key = (config, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
        versions = _versions(tensors)
        found = self._kept.pop(key, None)
        if found is not None and versions is not None and found.versions == versions and all(
                owner() is t.untyped_storage() for owner, t in zip(found.owners, tensors)):
            self._kept[key] = found            # the youngest again
            self.reused += 1
            return found
        if found is None and len(self._kept) >= MOST_PLANS:
            found = self._kept.popitem(last=False)[1]
        wrapper = self._make(self._workspace) if found is None else found.wrapper
        dead = plan(wrapper)
        self.made += 1
        self._kept[key] = made = _Plan(wrapper, tuple(weakref.ref(t.untyped_storage()) for t in tensors),
                                       versions or (), dead)
        return made


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """None for inference tensors: nobody could tell that one has changed."""
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


PLANS: dict[tuple[Any, ...], Plans] = {}       # by kind, device and stream
_LOCK = threading.Lock()


def _plans(kind: tuple[Any, ...], place: torch.device, make: Callable[[Tensor], Any]) -> Plans:
    key = (*kind, place, torch.cuda.current_stream(place).stream_id)
    with _LOCK:
        if key not in PLANS:
            PLANS[key] = Plans(make, place)
        return PLANS[key]


class Csr(NamedTuple):
    """A page table as FlashInfer has it; lengths and starts on the host, page ids where they were."""

    starts_q: Tensor
    indptr: Tensor
    indices: Tensor
    lengths: Tensor
    last: Tensor
    dead: Tensor | None                        # (tokens,): which queries see no key


def csr(op: str, tokens: int, block_table: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor | None, page_size: int,
        is_causal: bool, max_seqlen_q: int | None = None) -> Csr:
    """The pages of all sequences one after the other, without those that are out of use."""
    found = spans(op, tokens, block_table, context_lens, cu_seqlens_q, page_size, max_seqlen_q)
    lengths = torch.tensor([s.length for s in found], dtype=torch.int32)
    starts = torch.tensor([0, *(s.last for s in found)], dtype=torch.int32)
    counts = (lengths + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    used = torch.arange(block_table.shape[1]) < counts[:, None]
    indices = block_table[used.to(block_table.device)].to(torch.int32)
    blind = [n for s in found for n in range(s.first, s.last if s.length == 0 else
                                             max(s.first, s.last - s.length) if is_causal else s.first)]
    dead = None
    if blind:
        dead = torch.zeros(tokens, dtype=torch.bool)
        dead[blind] = True
        dead = dead.to(block_table.device)
    return Csr(starts, indptr, indices, lengths, lengths - (counts - 1).clamp(min=0) * page_size, dead)


def _finished(found: Any, dead: Tensor | None, return_lse: bool, factor: float) -> Any:
    """Rows that see no key are zero and their log-sum-exp -inf, whatever was written there; in natural logarithms."""
    out, lse = found if return_lse else (found, None)
    if dead is not None:
        out.masked_fill_(dead[:, None, None], 0.0)
    if lse is None:
        return out
    lse = lse if factor == 1.0 else lse * factor
    return out, lse if dead is None else lse.masked_fill(dead[:, None], -torch.inf)


def _paged(library: str) -> Callable[..., Any]:
    """`library`: "decode" without cu_seqlens_q, else the prefill of "fa2" or "fa3"."""
    import flashinfer

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor,
            cu_seqlens_q: Tensor | None = None, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, softcap: float = 0.0, max_seqlen_q: int | None = None, return_lse: bool = False,
            kv_layout: str = "NHD") -> Any:
        tokens, heads, head_dim = query.shape
        page_size, kv_heads = key_cache.shape[1:3] if kv_layout == "NHD" else (key_cache.shape[2], key_cache.shape[1])
        packed = library == "decode" and heads // kv_heads >= 4        # by tensor cores: as quick, or quicker
        config = {"window_left": window_left, "logits_soft_cap": softcap, "sm_scale": scale,
                  "q_data_type": query.dtype, "kv_data_type": key_cache.dtype}

        def make(workspace: Tensor) -> Any:
            if library == "decode":
                return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout, use_tensor_cores=packed)
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout, backend=library)

        def plan(wrapper: Any) -> Tensor | None:
            table = csr("paged_attention", tokens, block_table, context_lens, cu_seqlens_q, page_size, is_causal,
                        max_seqlen_q)
            if library == "decode":
                wrapper.plan(table.indptr, table.indices, table.last, heads, kv_heads, head_dim, page_size, **config)
            else:
                wrapper.plan(table.starts_q, table.indptr, table.indices, table.last, heads, kv_heads, head_dim,
                             page_size, causal=is_causal, **config)
            return table.dead

        plans = _plans((library, kv_layout, packed), query.device, make)
        given = (block_table, context_lens) if cu_seqlens_q is None else (block_table, context_lens, cu_seqlens_q)
        with plans.lock:
            shape = (tokens, heads, kv_heads, head_dim, page_size)
            planned = plans.get((*shape, is_causal, *config.values()), given, plan)
            found = planned.wrapper.run(query, (key_cache, value_cache), return_lse=return_lse)
        return _finished(found, planned.dead, return_lse, LN2)

    return run


def _paged_decode() -> Callable[..., Any]:
    return _paged("decode")


def _paged_prefill_fa2() -> Callable[..., Any]:
    return _paged("fa2")


def _paged_prefill_fa3() -> Callable[..., Any]:
    return _paged("fa3")


def _paged_xqa() -> Callable[..., Any]:
    """No plan: lengths and pages are read on the device, so one capture serves every length."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache as xqa

    spaces: dict[tuple[Any, ...], Tensor] = {}     # of each device and stream; the semaphores in it return to zero

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor,
            is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            max_seqlen_q: int | None = None, kv_layout: str = "NHD") -> Tensor:
        place = (query.device, torch.cuda.current_stream(query.device).stream_id)
        if place not in spaces:
            spaces[place] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=query.device)
        page_size = key_cache.shape[1 if kv_layout == "NHD" else 2]
        out: Tensor = xqa(query, (key_cache, value_cache), spaces[place], block_table, context_lens,
                          block_table.shape[1] * page_size, query.shape[-1] ** -0.5 if scale is None else scale, 1.0,
                          window_left=window_left, kv_layout=kv_layout)
        return out.masked_fill_((context_lens == 0)[:, None, None], 0.0)

    return run


def _ragged(library: str) -> Callable[..., Any]:
    import flashinfer

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Tensor:
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]

        def make(workspace: Tensor) -> Any:
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=library)

        def plan(wrapper: Any) -> Tensor | None:
            starts_q, starts_k = cu_seqlens_q.cpu(), cu_seqlens_k.cpu()
            wrapper.plan(starts_q, starts_k, heads, kv_heads, head_dim, head_dim, causal=is_causal,
                         window_left=window_left, logits_soft_cap=softcap, sm_scale=scale, q_data_type=query.dtype,
                         kv_data_type=key.dtype)
            lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
            blind = torch.where(lengths_k == 0, lengths_q, (lengths_q - lengths_k).clamp(min=0) if is_causal else 0)
            if not bool(blind.any()):
                return None
            place = torch.arange(query.shape[0]) - starts_q[:-1].repeat_interleave(lengths_q)      # in its sequence
            return (place < blind.repeat_interleave(lengths_q)).to(query.device)

        plans = _plans(("ragged", library), query.device, make)
        with plans.lock:
            planned = plans.get((heads, kv_heads, head_dim, is_causal, window_left, softcap, scale, query.dtype),
                                (cu_seqlens_q, cu_seqlens_k), plan)
            found = planned.wrapper.run(query, key, value)
        out: Tensor = _finished(found, planned.dead, False, 1.0)
        return out

    return run


def _varlen_fa2() -> Callable[..., Any]:
    return _ragged("fa2")


def _varlen_fa3() -> Callable[..., Any]:
    return _ragged("fa3")


def _mla(library: str) -> Callable[..., Any]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    def run(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *, scale: float,
            max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        tokens, heads, width = q_nope.shape
        config = {"num_heads": heads, "head_dim_ckv": width, "head_dim_kpe": q_pe.shape[2],
                  "page_size": ckv_cache.shape[1], "causal": is_causal, "sm_scale": scale, "q_data_type": q_nope.dtype,
                  "kv_data_type": ckv_cache.dtype, "lse_mode": "basee" if return_lse else "none"}

        def make(workspace: Tensor) -> Any:
            return BatchMLAPagedAttentionWrapper(workspace, backend=library)

        def plan(wrapper: Any) -> Tensor | None:
            table = csr("mla_paged_attention", tokens, block_table, context_lens, cu_seqlens_q, ckv_cache.shape[1],
                        is_causal, max_seqlen_q)
            wrapper.plan(metadata=MLAPlanMetadata.csr(table.starts_q, table.indptr, table.indices, table.lengths),
                         query_layout="split", kv_cache_layout="split", **config)
            return table.dead

        plans = _plans(("mla", library), q_nope.device, make)
        given = (block_table, context_lens) if cu_seqlens_q is None else (block_table, context_lens, cu_seqlens_q)
        with plans.lock:
            planned = plans.get((tokens, *config.values()), given, plan)
            found = planned.wrapper.run(query=(q_nope, q_pe), kv_cache=(ckv_cache, kpe_cache), return_lse=return_lse,
                                        return_lse_base_on_e=return_lse)
        return _finished(found, planned.dead, return_lse, 1.0)

    return run


def _mla_fa2() -> Callable[..., Any]:
    return _mla("fa2")


def _mla_fa3() -> Callable[..., Any]:
    return _mla("fa3")


HOPPER = generations("hopper")


def _stored(*names: str) -> tuple[Condition, ...]:
    """A cache in the query's dtype, whose rows it reads 16 bytes at a time."""
    return (*(when(equals("dtype", d), one_of(f"{n}.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
              for n in names for d in ("float16", "bfloat16")),
            *(unit_stride(n, repair=False) for n in names), *(aligned(n, 16) for n in names))


SOME: tuple[Condition, ...] = (
    at_least("batch", 1, Code.EMPTY_INPUT), at_least("tokens", 1, Code.EMPTY_INPUT),
    at_least("max_pages", 1, Code.EMPTY_INPUT), at_least("pages", 1, Code.EMPTY_INPUT))
PAGED: tuple[Condition, ...] = (
    *HARDWARE, HALF, *SOME, *_stored("key_cache", "value_cache"), absent("key_scale.dtype", Code.SCALE_LAYOUT_MISMATCH),
    absent("value_scale.dtype", Code.SCALE_LAYOUT_MISMATCH), unit_stride("query"), aligned("query", 16),
    one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID), equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED))
DECODE = absent("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED)
PREFILL = present("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED)
BOTTOM_RIGHT = one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
RAGGED: tuple[Condition, ...] = (
    *HARDWARE, HALF, at_least("batch", 1, Code.EMPTY_INPUT), at_least("tokens_q", 1, Code.EMPTY_INPUT),
    at_least("tokens_k", 1, Code.EMPTY_INPUT), at_least("kv_heads", 1, Code.EMPTY_INPUT),
    one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID), equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED), at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED),
    any_of(off("is_causal"), BOTTOM_RIGHT), when(at_least("window_left", 0), BOTTOM_RIGHT),
    any_of(equals("window_right", -1), on("is_causal", Code.WINDOW_UNSUPPORTED)),
    dtypes("int32", of="cu_seqlens_q.dtype"), dtypes("int32", of="cu_seqlens_k.dtype"),
    *(unit_stride(n) for n in ("query", "key", "value")), *(aligned(n, 16) for n in ("query", "key", "value")))
LATENT: tuple[Condition, ...] = (
    *HARDWARE, HALF, *SOME, *_stored("ckv_cache", "kpe_cache"), unit_stride("q_nope"), unit_stride("q_pe"),
    aligned("q_nope", 16), aligned("q_pe", 16), one_of("head_dim_ckv", 128, 256, 512, code=Code.HEAD_DIM_INVALID),
    equals("head_dim_kpe", 64, Code.HEAD_DIM_INVALID), at_least("heads", 1, Code.EMPTY_INPUT),
    at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED))

_PLANNED: dict[str, Any] = {**TRIED, "graph_safe": False, "workspace": str(WORKSPACE),
                            "note": "plans on the host, once for the same unchanged lengths and pages"}
BOTH = ("NHD", "HND")

KERNELS = (
    Kernel("flashinfer.paged_decode", paged_attention, _paged_decode, (*PAGED, DECODE), variants=BOTH, prior=9.0,
           overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.paged_xqa", paged_attention, _paged_xqa, (
        *PAGED, DECODE, HOPPER, one_of("page_size", 16, 32, 64, 128, code=Code.PAGE_SIZE_UNSUPPORTED),
        at_most("group", 32), equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
        off("return_lse", Code.LSE_UNSUPPORTED), dtypes("int32", of="block_table.dtype"),
        dtypes("int32", of="context_lens.dtype"), unit_stride("block_table")), variants=BOTH, prior=9.0,
        overhead_us=40.0, workspace=str(WORKSPACE), **TRIED, note="reads lengths and pages on the device: no plan"),
    Kernel("flashinfer.paged_prefill_fa2", paged_attention, _paged_prefill_fa2, (*PAGED, PREFILL), variants=BOTH,
           prior=9.0, overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.paged_prefill_fa3", paged_attention, _paged_prefill_fa3, (*PAGED, PREFILL, HOPPER),
           variants=BOTH, prior=14.0, overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.varlen_fa2", varlen_attention, _varlen_fa2, RAGGED, prior=10.0, overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.varlen_fa3", varlen_attention, _varlen_fa3, (*RAGGED, HOPPER), prior=15.0, overhead_us=60.0,
           **_PLANNED),
    Kernel("flashinfer.mla_fa2", mla_paged_attention, _mla_fa2, LATENT, prior=6.0, overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.mla_fa3", mla_paged_attention, _mla_fa3, (*LATENT, HOPPER), prior=9.0, overhead_us=60.0,
           **_PLANNED),
)
