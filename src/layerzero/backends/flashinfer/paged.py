"""FlashInfer on batches: decode and prefill over a paged cache, packed sequences, latent attention.

Most of its batch kernels need a plan, made on the host from the lengths, that schedules the parts
of the sequences. It costs far more than the attention of one layer, so the last few are cached with
their wrappers: the same unchanged page table, lengths and configuration are planned once for all
layers of a model. A plan reads the lengths on the host, so it cannot be part of a CUDA graph; the
decode kernel without a plan (XQA) can.

There is one float workspace per device and stream: kernels on one stream run in sequence.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formulas.paged import read_spans
from ...ops.mla_paged_attention import OP as mla_paged_attention
from ...ops.paged_attention import OP as paged_attention
from ...ops.varlen_attention import OP as varlen_attention
from ...spec import rules as r
from ...spec.kernel import Kernel
from ...spec.reason import Code
from .._pages import half_cache_rules
from .common import HALF, HARDWARE, HEAD_DIMS, LN2, TESTED

WORKSPACE = 128 << 20                          # bytes, what FlashInfer recommends
MAX_PLANS = 8                                  # of a kind per device and stream; each holds 16 MiB


class _Plan(NamedTuple):
    """A planned wrapper, the tensors it was planned from, and the query rows that see no key."""

    wrapper: Any
    owners: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]
    dead: Tensor | None


class Plans:
    """The last plans of one kind of wrapper on one device and stream.

    A wrapper holds one plan, so `lock` is held from planning to running. That is short, as a run
    only launches. A wrapper is idle when it is planned again, since planning reads the lengths from
    the device.
    """

    def __init__(self, make: Callable[[Tensor], Any], device: torch.device) -> None:
        self.lock = threading.Lock()
        self.planned = self.reused = 0
        self._make = make
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()

    def get(self, config: Any, tensors: tuple[Tensor, ...],
            plan: Callable[[Any], Tensor | None]) -> _Plan:
        """Returns the plan for these tensors; `plan(wrapper)` makes it and returns dead rows."""
        key = (config, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
        versions = _versions(tensors)
        cached = self._plans.pop(key, None)
        if cached is not None and versions is not None and cached.versions == versions and all(
                owner() is t.untyped_storage() for owner, t in zip(cached.owners, tensors)):
            self._plans[key] = cached          # the most recent again
            self.reused += 1
            return cached
        if cached is None and len(self._plans) >= MAX_PLANS:
            cached = self._plans.popitem(last=False)[1]
        wrapper = self._make(self._workspace) if cached is None else cached.wrapper
        dead = plan(wrapper)
        self.planned += 1
        self._plans[key] = planned = _Plan(wrapper,
                                           tuple(weakref.ref(t.untyped_storage()) for t in tensors),
                                           versions or (), dead)
        return planned


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """Returns the versions, or None for inference tensors, whose changes cannot be detected."""
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


PLANS: dict[tuple[Any, ...], Plans] = {}       # by kind, device and stream
_LOCK = threading.Lock()


def _plans_of(kind: tuple[Any, ...], device: torch.device, make: Callable[[Tensor], Any]) -> Plans:
    key = (*kind, device, torch.cuda.current_stream(device).stream_id)
    with _LOCK:
        if key not in PLANS:
            PLANS[key] = Plans(make, device)
        return PLANS[key]


class Csr(NamedTuple):
    """A page table in FlashInfer's CSR form: lengths and starts on the host, ids on the device."""

    starts_q: Tensor
    indptr: Tensor
    indices: Tensor
    lengths: Tensor
    last: Tensor
    dead: Tensor | None                        # (tokens,): which queries see no key


def to_csr(op: str, tokens: int, block_table: Tensor, context_lens: Tensor,
           cu_seqlens_q: Tensor | None, page_size: int,
           is_causal: bool, max_seqlen_q: int | None = None) -> Csr:
    """Returns the page table in CSR form, without unused entries."""
    sequences = read_spans(op, tokens, block_table, context_lens, cu_seqlens_q, page_size,
                           max_seqlen_q)
    lengths = torch.tensor([s.length for s in sequences], dtype=torch.int32)
    starts = torch.tensor([0, *(s.last for s in sequences)], dtype=torch.int32)
    counts = (lengths + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    used = torch.arange(block_table.shape[1]) < counts[:, None]
    indices = block_table[used.to(block_table.device)].to(torch.int32)
    dead_rows = [n for s in sequences for n in range(s.first, s.last if s.length == 0 else
                                                     max(s.first, s.last - s.length) if is_causal
                                                     else s.first)]
    dead = None
    if dead_rows:
        dead = torch.zeros(tokens, dtype=torch.bool)
        dead[dead_rows] = True
        dead = dead.to(block_table.device)
    return Csr(starts, indptr, indices, lengths, lengths - (counts - 1).clamp(min=0) * page_size,
               dead)


def _finish(result: Any, dead: Tensor | None, return_lse: bool, factor: float) -> Any:
    """Zeroes rows that see no key (log-sum-exp -inf) and converts it to natural logarithms."""
    out, lse = result if return_lse else (result, None)
    if dead is not None:
        out.masked_fill_(dead[:, None, None], 0.0)
    if lse is None:
        return out
    lse = lse if factor == 1.0 else lse * factor
    return out, lse if dead is None else lse.masked_fill(dead[:, None], -torch.inf)


def _paged(library: str) -> Callable[..., Any]:
    """Returns a kernel; `library`: "decode" without cu_seqlens_q, else the prefill of "fa2" or
    "fa3"."""
    import flashinfer

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, softcap: float = 0.0,
            max_seqlen_q: int | None = None, return_lse: bool = False,
            kv_layout: str = "NHD") -> Any:
        tokens, heads, head_dim = query.shape
        page_size, kv_heads = (key_cache.shape[1:3] if kv_layout == "NHD"
                               else (key_cache.shape[2], key_cache.shape[1]))
        # use tensor cores: as fast, or faster
        tensor_cores = library == "decode" and heads // kv_heads >= 4
        config = {"window_left": window_left, "logits_soft_cap": softcap, "sm_scale": scale,
                  "q_data_type": query.dtype, "kv_data_type": key_cache.dtype}

        def make(workspace: Tensor) -> Any:
            if library == "decode":
                return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout,
                                                                     use_tensor_cores=tensor_cores)
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout,
                                                                  backend=library)

        def plan(wrapper: Any) -> Tensor | None:
            table = to_csr("paged_attention", tokens, block_table, context_lens, cu_seqlens_q,
                           page_size, is_causal, max_seqlen_q)
            if library == "decode":
                wrapper.plan(table.indptr, table.indices, table.last, heads, kv_heads, head_dim,
                             page_size, **config)
            else:
                wrapper.plan(table.starts_q, table.indptr, table.indices, table.last, heads,
                             kv_heads, head_dim, page_size, causal=is_causal, **config)
            return table.dead

        plans = _plans_of((library, kv_layout, tensor_cores), query.device, make)
        tensors = ((block_table, context_lens) if cu_seqlens_q is None
                   else (block_table, context_lens, cu_seqlens_q))
        with plans.lock:
            shape = (tokens, heads, kv_heads, head_dim, page_size)
            planned = plans.get((*shape, is_causal, *config.values()), tensors, plan)
            result = planned.wrapper.run(query, (key_cache, value_cache), return_lse=return_lse)
        return _finish(result, planned.dead, return_lse, LN2)

    return run


def _paged_decode() -> Callable[..., Any]:
    return _paged("decode")


def _paged_prefill_fa2() -> Callable[..., Any]:
    return _paged("fa2")


def _paged_prefill_fa3() -> Callable[..., Any]:
    return _paged("fa3")


def _paged_xqa() -> Callable[..., Any]:
    """Needs no plan: lengths and pages are read on the device; one capture serves every length."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache as xqa

    # per device and stream; its semaphores return to zero
    workspaces: dict[tuple[Any, ...], Tensor] = {}

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, max_seqlen_q: int | None = None,
            kv_layout: str = "NHD") -> Tensor:
        key = (query.device, torch.cuda.current_stream(query.device).stream_id)
        if key not in workspaces:
            workspaces[key] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=query.device)
        page_size = key_cache.shape[1 if kv_layout == "NHD" else 2]
        out: Tensor = xqa(query, (key_cache, value_cache), workspaces[key], block_table,
                          context_lens, block_table.shape[1] * page_size, query.shape[-1] ** -0.5
                          if scale is None else scale, 1.0, window_left=window_left,
                          kv_layout=kv_layout)
        return out.masked_fill_((context_lens == 0)[:, None, None], 0.0)

    return run


def _ragged(library: str) -> Callable[..., Any]:
    import flashinfer

    def run(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
            max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Tensor:
        heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]

        def make(workspace: Tensor) -> Any:
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD",
                                                                   backend=library)

        def plan(wrapper: Any) -> Tensor | None:
            starts_q, starts_k = cu_seqlens_q.cpu(), cu_seqlens_k.cpu()
            wrapper.plan(starts_q, starts_k, heads, kv_heads, head_dim, head_dim, causal=is_causal,
                         window_left=window_left, logits_soft_cap=softcap, sm_scale=scale,
                         q_data_type=query.dtype, kv_data_type=key.dtype)
            lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
            dead_counts = torch.where(lengths_k == 0, lengths_q,
                                      (lengths_q - lengths_k).clamp(min=0) if is_causal else 0)
            if not bool(dead_counts.any()):
                return None
            # in its sequence
            position = torch.arange(query.shape[0]) - starts_q[:-1].repeat_interleave(lengths_q)
            return (position < dead_counts.repeat_interleave(lengths_q)).to(query.device)

        plans = _plans_of(("ragged", library), query.device, make)
        with plans.lock:
            planned = plans.get((heads, kv_heads, head_dim, is_causal, window_left, softcap, scale,
                                 query.dtype),
                                (cu_seqlens_q, cu_seqlens_k), plan)
            result = planned.wrapper.run(query, key, value)
        out: Tensor = _finish(result, planned.dead, False, 1.0)
        return out

    return run


def _varlen_fa2() -> Callable[..., Any]:
    return _ragged("fa2")


def _varlen_fa3() -> Callable[..., Any]:
    return _ragged("fa3")


def _mla(library: str) -> Callable[..., Any]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    def run(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, block_table: Tensor,
            context_lens: Tensor, cu_seqlens_q: Tensor | None = None, is_causal: bool = False, *,
            scale: float, max_seqlen_q: int | None = None, return_lse: bool = False) -> Any:
        tokens, heads, width = q_nope.shape
        config = {"num_heads": heads, "head_dim_ckv": width, "head_dim_kpe": q_pe.shape[2],
                  "page_size": ckv_cache.shape[1], "causal": is_causal, "sm_scale": scale,
                  "q_data_type": q_nope.dtype, "kv_data_type": ckv_cache.dtype, "lse_mode": "basee"
                  if return_lse else "none"}

        def make(workspace: Tensor) -> Any:
            return BatchMLAPagedAttentionWrapper(workspace, backend=library)

        def plan(wrapper: Any) -> Tensor | None:
            table = to_csr("mla_paged_attention", tokens, block_table, context_lens, cu_seqlens_q,
                           ckv_cache.shape[1], is_causal, max_seqlen_q)
            wrapper.plan(metadata=MLAPlanMetadata.csr(table.starts_q, table.indptr, table.indices,
                                                      table.lengths),
                         query_layout="split", kv_cache_layout="split", **config)
            return table.dead

        plans = _plans_of(("mla", library), q_nope.device, make)
        tensors = ((block_table, context_lens) if cu_seqlens_q is None
                   else (block_table, context_lens, cu_seqlens_q))
        with plans.lock:
            planned = plans.get((tokens, *config.values()), tensors, plan)
            result = planned.wrapper.run(query=(q_nope, q_pe), kv_cache=(ckv_cache, kpe_cache),
                                         return_lse=return_lse, return_lse_base_on_e=return_lse)
        return _finish(result, planned.dead, return_lse, 1.0)

    return run


def _mla_fa2() -> Callable[..., Any]:
    return _mla("fa2")


def _mla_fa3() -> Callable[..., Any]:
    return _mla("fa3")


HOPPER = r.generations("hopper")


NOT_EMPTY: tuple[r.Condition, ...] = (
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("tokens", 1, Code.EMPTY_INPUT),
    r.at_least("max_pages", 1, Code.EMPTY_INPUT), r.at_least("pages", 1, Code.EMPTY_INPUT))
PAGED: tuple[r.Condition, ...] = (
    *HARDWARE, HALF, *NOT_EMPTY, *half_cache_rules("key_cache", "value_cache"),
    r.absent("key_scale.dtype", Code.SCALE_LAYOUT_MISMATCH),
    r.absent("value_scale.dtype", Code.SCALE_LAYOUT_MISMATCH), r.unit_stride("query"),
    r.aligned("query", 16), r.one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED))
DECODE = r.absent("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED)
PREFILL = r.present("cu_seqlens_q.dtype", Code.SEQ_LEN_UNSUPPORTED)
BOTTOM_RIGHT = r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
RAGGED: tuple[r.Condition, ...] = (
    *HARDWARE, HALF, r.at_least("batch", 1, Code.EMPTY_INPUT),
    r.at_least("tokens_q", 1, Code.EMPTY_INPUT), r.at_least("tokens_k", 1, Code.EMPTY_INPUT),
    r.at_least("kv_heads", 1, Code.EMPTY_INPUT),
    r.one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
    r.off("return_lse", Code.LSE_UNSUPPORTED),
    r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
    r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED),
    r.any_of(r.off("is_causal"), BOTTOM_RIGHT), r.when(r.at_least("window_left", 0), BOTTOM_RIGHT),
    r.any_of(r.equals("window_right", -1), r.on("is_causal", Code.WINDOW_UNSUPPORTED)),
    r.dtypes("int32", of="cu_seqlens_q.dtype"), r.dtypes("int32", of="cu_seqlens_k.dtype"),
    *(r.unit_stride(n) for n in ("query", "key", "value")),
    *(r.aligned(n, 16) for n in ("query", "key", "value")))
LATENT: tuple[r.Condition, ...] = (
    *HARDWARE, HALF, *NOT_EMPTY, *half_cache_rules("ckv_cache", "kpe_cache"),
    r.unit_stride("q_nope"), r.unit_stride("q_pe"), r.aligned("q_nope", 16), r.aligned("q_pe", 16),
    r.one_of("head_dim_ckv", 128, 256, 512, code=Code.HEAD_DIM_INVALID),
    r.equals("head_dim_kpe", 64, Code.HEAD_DIM_INVALID), r.at_least("heads", 1, Code.EMPTY_INPUT),
    r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED))

_PLANNED: dict[str, Any] = {**TESTED, "graph_safe": False, "workspace": str(WORKSPACE),
                            "note":
                                "plans on the host, once for the same unchanged lengths and pages"}
BOTH = ("NHD", "HND")

KERNELS = (
    Kernel("flashinfer.paged_decode", paged_attention, _paged_decode, (*PAGED, DECODE),
           variants=BOTH, prior=9.0,
           overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.paged_xqa", paged_attention, _paged_xqa, (
        *PAGED, DECODE, HOPPER,
        r.one_of("page_size", 16, 32, 64, 128, code=Code.PAGE_SIZE_UNSUPPORTED),
        r.at_most("group", 32), r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
        r.off("return_lse", Code.LSE_UNSUPPORTED), r.dtypes("int32", of="block_table.dtype"),
        r.dtypes("int32", of="context_lens.dtype"), r.unit_stride("block_table")), variants=BOTH,
           prior=9.0,
        overhead_us=40.0, workspace=str(WORKSPACE), **TESTED,
           note="reads lengths and pages on the device: no plan"),
    Kernel("flashinfer.paged_prefill_fa2", paged_attention, _paged_prefill_fa2, (*PAGED, PREFILL),
           variants=BOTH, prior=9.0, overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.paged_prefill_fa3", paged_attention, _paged_prefill_fa3,
           (*PAGED, PREFILL, HOPPER), variants=BOTH, prior=14.0, overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.varlen_fa2", varlen_attention, _varlen_fa2, RAGGED, prior=10.0,
           overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.varlen_fa3", varlen_attention, _varlen_fa3, (*RAGGED, HOPPER), prior=15.0,
           overhead_us=60.0, **_PLANNED),
    Kernel("flashinfer.mla_fa2", mla_paged_attention, _mla_fa2, LATENT, prior=6.0, overhead_us=60.0,
           **_PLANNED),
    Kernel("flashinfer.mla_fa3", mla_paged_attention, _mla_fa3, (*LATENT, HOPPER), prior=9.0,
           overhead_us=60.0, **_PLANNED),
)
