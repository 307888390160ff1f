"""FlashInfer's and SGLang's own answers to a definition, where library and GPU are here."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .answer import Answer, Inputs, Outputs
from .truth import Compute, Truth

WORKSPACE = 128 << 20                          # bytes, what FlashInfer recommends


def flashinfer(answer: Answer, device: str) -> Truth:
    return _truth("flashinfer", "flashinfer", _FLASHINFER, answer, device)


def sglang(answer: Answer, device: str, moe: Compute) -> Truth:
    """Its kernels are a package of their own, which does not start a server; its mixture of
    experts is in the server's."""
    package = "sglang" if answer.kind == "moe" else "sgl_kernel"
    return _truth("sglang", package, {**_SGLANG, "moe": moe}, answer, device)


def _truth(source: str, package: str, table: Mapping[str, Compute], answer: Answer,
           device: str) -> Truth:
    if answer.kind not in table:
        return Truth(source, None,
                     f"{source} has no function that is asked for a definition of this type")
    if importlib.util.find_spec(package) is None:
        return Truth(source, None, f"{package} is not installed")
    if torch.device(device).type != "cuda":
        return Truth(source, None, f"{package} needs a CUDA device; this runs on {device}")
    if not answer.roles.get("plain", True) or {"window_left", "softcap"} & {*answer.reading}:
        return Truth(source, None, f"this form of the inputs is not translated to {source}")
    return Truth(source, table[answer.kind])


def _norm_of(library: Any) -> Compute:
    def norm(answer: Answer, x: Inputs) -> Outputs:
        r, reading = answer.roles, answer.reading
        eps = float(x[r["eps"]]) if r["eps"] else reading["eps"]
        shifted = bool(reading.get("offset"))
        if r["residual"]:
            out, total = x[r["x"]].clone(), x[r["residual"]].clone()
            add = library().gemma_fused_add_rmsnorm if shifted else library().fused_add_rmsnorm
            add(out, total, x[r["weight"]], eps)                           # in place, both
            return {r["out"]: out, r["total"]: total}
        run = library().gemma_rmsnorm if shifted else library().rmsnorm
        return {r["out"]: run(x[r["x"]], x[r["weight"]], eps)}

    return norm


def _flashinfer_norms() -> Any:
    import flashinfer.norm
    return flashinfer.norm


def _sglang_norms() -> Any:
    return importlib.import_module("sgl_kernel")


def _logs(lse: Tensor, base: str | None) -> Tensor:
    """FlashInfer's are of base 2."""
    return lse if base == "2" else lse * math.log(2)


def _starts(x: Inputs, name: str, rows: int, device: torch.device) -> Tensor:
    return x[name].int() if name else torch.arange(rows + 1, dtype=torch.int32, device=device)


def _csr(x: Inputs, table: Any, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, indices, last_page_len), all int32."""
    if table.table:
        lengths = x[table.lengths].int()
        counts = (lengths + page_size - 1) // page_size
        indices = torch.cat([row[:n] for row, n in zip(x[table.table], counts.tolist())]).int()
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        return indptr, indices, (lengths - (counts - 1).clamp(min=0) * page_size).int()
    indptr = x[table.indptr].int()
    last = (x[table.last][:len(indptr) - 1].int() if table.last
            else torch.full_like(indptr[1:], page_size))
    return indptr, x[table.indices].int(), last


def _paged(answer: Answer, x: Inputs) -> Outputs:
    """Decoding has its own wrapper; groups of heads without a kernel use tensor cores."""
    import flashinfer
    r, q = answer.roles, x[answer.roles["query"]]
    cache = x[r["both"]] if r["both"] else (x[r["key"]], x[r["value"]])
    k = x[r["both"]][:, 0] if r["both"] else x[r["key"]]
    page, heads = (1, 2) if r["layout"] == "NHD" else (2, 1)
    indptr, indices, last = _csr(x, r["table"], k.shape[page])
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    if not r["starts"]:
        group = q.shape[1] // k.shape[heads]
        run = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, r["layout"], use_tensor_cores=group not in (1, 2, 4, 8))
        run.plan(indptr, indices, last, q.shape[1], k.shape[heads], q.shape[2], k.shape[page],
                 sm_scale=_scale(x, r), q_data_type=q.dtype, kv_data_type=k.dtype)
        out, lse = run.run(q, cache, return_lse=True)
        return {r["out"]: out, r["lse"]: _logs(lse, answer.reading.get("lse_base"))}
    run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, r["layout"])
    run.plan(_starts(x, r["starts"], len(q), q.device), indptr, indices, last, q.shape[1],
             k.shape[heads], q.shape[2], k.shape[page],
             causal=answer.reading.get("is_causal", True), sm_scale=_scale(x, r),
             q_data_type=q.dtype, kv_data_type=k.dtype)
    out, lse = run.run(q, cache, return_lse=True)
    return {r["out"]: out, r["lse"]: _logs(lse, answer.reading.get("lse_base"))}


def _scale(x: Inputs, r: Mapping[str, Any]) -> float | None:
    return float(x[r["scale"]]) if r["scale"] else None


def _ragged(answer: Answer, x: Inputs) -> Outputs:
    import flashinfer
    r = answer.roles
    q, k, v = (x[r[name]] for name in ("query", "key", "value"))
    run = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device), "NHD")
    run.plan(x[r["starts"]].int(), x[r["starts_k"]].int(), q.shape[1], k.shape[1], q.shape[2],
             v.shape[2], causal=answer.reading.get("is_causal", True), sm_scale=_scale(x, r),
             q_data_type=q.dtype, kv_data_type=k.dtype)
    out, lse = run.run(q, k, v, return_lse=True)
    return {r["out"]: out, r["lse"]: _logs(lse, answer.reading.get("lse_base"))}


def _mla(answer: Answer, x: Inputs) -> Outputs:
    import flashinfer.mla
    r, q = answer.roles, x[answer.roles["q_nope"]]
    ckv, kpe = x[r["ckv"]], x[r["kpe"]]
    size = ckv.shape[1]
    indptr, indices, last = _csr(x, r["table"], size)
    lengths = ((indptr.diff() - 1) * size + last).clamp(min=0).int()
    run = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.zeros(WORKSPACE, dtype=torch.uint8,
                                                                   device=q.device))
    pages = flashinfer.mla.MLAPlanMetadata.csr(_starts(x, r["starts"], len(q), q.device), indptr,
                                               indices, lengths)
    run.plan(metadata=pages, num_heads=q.shape[1], head_dim_ckv=ckv.shape[2],
             head_dim_kpe=kpe.shape[2], page_size=size,
             causal=answer.reading.get("is_causal", True), sm_scale=_scale(x, r),
             q_data_type=q.dtype, kv_data_type=ckv.dtype, query_layout="split",
             kv_cache_layout="split", lse_mode="base2")
    out, lse = run.run(query=(q, x[r["q_pe"]]), kv_cache=(ckv, kpe), return_lse=True)
    return {r["out"]: out, r["lse"]: _logs(lse, answer.reading.get("lse_base"))}


def _rope(answer: Answer, x: Inputs) -> Outputs:
    import flashinfer.rope
    r = answer.roles
    q, k = x[r["q"]], x[r["k"] or r["q"]]
    positions = x[r["positions"]] if r["positions"] else torch.arange(len(q), device=q.device)
    rotated = flashinfer.rope.apply_rope_with_cos_sin_cache(
        positions, q.flatten(1), k.flatten(1), q.shape[-1], x[r["joint"]].float(),
        answer.reading["style"] == "rotate_half")
    return {r["q_out"]: rotated[0].view_as(q),
            **({r["k_out"]: rotated[1].view_as(k)} if r["k"] else {})}


def _sampling(answer: Answer, x: Inputs) -> Outputs:
    """Tokens of its own draw, which are judged by their distribution."""
    import flashinfer.sampling as sampling
    r = answer.roles
    rows = x[r["rows"]][x[r["picked"]].long()] if r["picked"] else x[r["rows"]]
    if not r["probs"]:
        rows = (rows.float() / (x[r["temperature"]].reshape(-1, 1) if "temperature" in r
                                else 1.0)).softmax(-1)
    names = tuple(name for name in ("top_k", "top_p", "min_p") if name in r)
    by = [x[r[name]].to(rows.device) if isinstance(x[r[name]], Tensor) else x[r[name]]
          for name in names]
    run = {(): "sampling_from_probs", ("top_k",): "top_k_sampling_from_probs",
           ("top_p",): "top_p_sampling_from_probs", ("min_p",): "min_p_sampling_from_probs",
           ("top_k", "top_p"): "top_k_top_p_sampling_from_probs"}.get(names)
    if run is None:
        raise NotImplementedError(f"flashinfer has no sampling by {', '.join(names)} together")
    if "top_k" in names:                       # it has no number for all of them
        top_k = torch.as_tensor(by[0], device=rows.device)
        by[0] = torch.where((top_k > 0) & (top_k < rows.shape[1]), top_k, rows.shape[1]).int()
    return {r["out"]: getattr(sampling, run)(rows.float().contiguous(), *by)}


_FLASHINFER: Mapping[str, Compute] = {
    "rms_norm": _norm_of(_flashinfer_norms), "paged": _paged, "ragged": _ragged, "mla": _mla,
    "rope": _rope, "sampling": _sampling}
_SGLANG: Mapping[str, Compute] = {"rms_norm": _norm_of(_sglang_norms)}
