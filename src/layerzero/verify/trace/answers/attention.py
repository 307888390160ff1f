"""Attention definitions as lz calls: paged and ragged keys, latent attention, sparse attention."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....ops.formulas.paged import page_table_from_csr
from ..definition import Definition
from ..readings import Parts, is_causal, lse_bases, readings
from ..statements import Statement, mentions, softcap, window_left
from .answer import QUERY, Answer, Inputs, Outputs, call_text, lz, number, with_reading

_SCALE = r"(sm_|softmax_|attn_)?scal(e|ing)"
_TO_INDPTR = r"(qo|q|query)_indptr|cu_seqlens_q(o)?|q_cu_seqlens"
_LSE = (r".*(lse|logsumexp|log_sum_exp).*", "the log-sum-exp")


@dataclass(frozen=True)
class PageTable:
    """Where the pages of a cache are: in CSR form, or as a table with lengths."""

    indptr: str = ""
    indices: str = ""
    last: str = ""
    table: str = ""
    lengths: str = ""

    def read(self, x: Inputs, page_size: int) -> tuple[Tensor, Tensor]:
        if self.table:
            return x[self.table], x[self.lengths]
        last = x[self.last][:len(x[self.indptr]) - 1] if self.last else None
        return page_table_from_csr(x[self.indptr], x[self.indices], last, page_size)


def _table(p: Parts) -> PageTable:
    table = p.maybe(r"(kv_)?(block|page)_tables?", 2)
    if table:
        return PageTable(table=table, lengths=p.take(
            r"(kv_|cache_)?(seq_?lens?|seqlens|context_lens|sequence_lengths)(_kv)?",
            "the length of each sequence", 1))
    return PageTable(p.take(r"(paged_)?(kv_)?(page_)?indptr(_kv)?",
                            "where each sequence's pages begin (kv_indptr)", 1),
                  p.take(r"(paged_)?(kv_)?(page_)?(indices|ids)", "the pages (kv_indices)", 1),
                  p.maybe(r".*last_page_len.*"))


def _position_of(shape: tuple[str, ...], *names: str) -> int:
    return next((i for i, axis in enumerate(shape) if axis in names), -1)


def _layout(p: Parts, cache: str, axes: tuple[str, ...]) -> str:
    """NHD is (pages, page_size, heads, dim), HND (pages, heads, page_size, dim)."""
    page, head = _position_of(axes, "page_size", "block_size"), \
        next((i for i, a in enumerate(axes) if "head" in a and "dim" not in a and "size" not in a),
             -1)
    if {page, head} - {-1, 1, 2} or page == head != -1:
        raise p.unmapped(
            f"{cache} must be (pages, page_size, kv_heads, dim) or (pages, kv_heads, page_size, "
            f"dim), its axes are {', '.join(axes)}")
    return "HND" if page == 2 or head == 1 else "NHD"


def _logs(value: Tensor, base: str) -> Tensor:
    return value / math.log(2) if base == "2" else value


def paged(definition: Definition) -> list[Answer]:
    p = Parts(definition, "paged_attention")
    q = p.take(QUERY, "a query (q)", 3)
    both = p.maybe(r"(paged_)?kv_(cache|data)", 5)
    k = both or p.take(r"(paged_)?(k|key)(_cache|_pages)?", "a cache of keys (k_cache)", 4)
    v = both or p.take(r"(paged_)?(v|value)(_cache|_pages)?", "a cache of values (v_cache)", 4)
    starts = p.maybe(_TO_INDPTR, 1)
    table = _table(p)
    scale, window, cap = p.maybe(_SCALE), p.maybe(r"window_left|sliding_window"), p.maybe(
        r"(logits_)?soft_?cap")
    k_scale, v_scale = p.maybe(r"k(ey|v)?_scale"), p.maybe(r"v(alue)?_scale")
    p.maybe(r"return_lse")                     # the outputs tell
    p.done()
    axes = p.shape(k)[:1] + p.shape(k)[2:] if both else p.shape(k)
    layout = _layout(p, k, axes)
    out, lse = p.outputs((r"o|out|output|attn_out(put)?", "the attention"), _LSE)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        keys, values = (x[both][:, 0], x[both][:, 1]) if both else (x[k], x[v])
        blocks, lengths = table.read(x, keys.shape[2 if layout == "HND" else 1])
        results = lz("paged_attention", query=x[q], key_cache=keys, value_cache=values,
                     block_table=blocks, context_lens=lengths, cu_seqlens_q=x[starts] if starts
                     else None, is_causal=reading.get("is_causal", True),
                     scale=number(x, scale),
                     window_left=number(x, window, reading.get("window_left", -1)),
                     softcap=number(x, cap, reading.get("softcap", 0.0)),
                     key_scale=_stored_scale(x, k_scale, keys, x[q]), kv_layout=layout,
                     value_scale=_stored_scale(x, v_scale or (k_scale if both else ""), values,
                                               x[q]),
                     return_lse=bool(lse))
        return ({out: results[0], lse: _logs(results[1], reading["lse_base"])} if lse
                else {out: results})

    text = call_text("paged_attention", q, k, v, f"pages of {table.table or table.indptr}",
                     scale=scale, window_left=window, softcap=cap, key_scale=k_scale,
                     value_scale=v_scale)
    options, statements = _attention_options(p, bool(starts), lse, bool(window), bool(cap))
    roles = {"query": q, "key": k, "value": v, "both": both, "starts": starts, "table": table,
             "scale": scale, "layout": layout, "out": out, "lse": lse, "window": window, "cap": cap,
             "k_scale": k_scale, "v_scale": v_scale or (k_scale if both else ""),
             "plain": not (window or cap or k_scale or v_scale)}
    return [Answer(definition, ("paged_attention",), text, with_reading(compute, reading), reading,
                   "paged", roles, statements=statements)
            for reading in readings(options)]


_Options = dict[str, tuple[Any, ...]]
# what no lz call of attention for definitions has a place for
_NEVER = {r"\bsinks?\b|\battention sinks?": "attention sinks", r"\balibi": "ALiBi slopes"}


def _attention_options(p: Parts, prefill: bool, lse: str, window: bool = False, cap: bool = False,
                       slopes: bool = False) -> tuple[_Options, dict[str, Statement]]:
    """The options that are no inputs, and what the text says of them. `window`, `cap`, `slopes`: an
    input gives it. A decoded token sees every key, causal or not."""
    found: dict[str, tuple[Statement | None, tuple[Any, ...]]] = {}
    if prefill:
        found["is_causal"] = is_causal(p.definition)
    if lse:
        found["lse_base"] = lse_bases(p.definition, lse)
    for option, given, pattern, read in (("window_left", window, r"\bwindow|sliding", window_left),
                                         ("softcap", cap, r"soft[ -]?cap|\btanh", softcap)):
        who = "" if given else mentions(p.definition, pattern)
        if not who:
            continue
        if p.op == "mla_paged_attention":
            raise p.unmapped(f"{who} speaks of a {option}, which lz.{p.op} does not have")
        found[option] = read(p.definition)
        if not found[option][1]:
            raise p.unmapped(f"{who} speaks of a {option}, and neither the text nor a constant "
                             "says how much")
    for pattern, what in _NEVER.items():
        who = "" if slopes and "ALiBi" in what else mentions(p.definition, pattern)
        if who:
            raise p.unmapped(f"{who} speaks of {what}, which lz.{p.op} is not given here")
    return ({option: values for option, (_, values) in found.items()},
            {option: s for option, (s, _) in found.items() if s is not None})


def _stored_scale(x: Inputs, name: str, cache: Tensor, query: Tensor) -> Tensor | None:
    if name:
        return torch.as_tensor(x[name], dtype=torch.float32, device=query.device)
    return torch.ones((), device=query.device) if cache.dtype != query.dtype else None


def mla(definition: Definition) -> list[Answer]:
    p = Parts(definition, "mla_paged_attention")
    q_nope = p.take(r"q(uery)?_nope(_absorbed)?|q_latent",
                    "the absorbed part of the query (q_nope)", 3)
    q_pe = p.take(r"q(uery)?_(pe|rope)", "the rotary part of the query (q_pe)", 3)
    ckv = p.take(r"(paged_)?(compressed_kv|c_?kv)(_cache)?", "the compressed cache (ckv_cache)", 3)
    kpe = p.take(r"(paged_)?k_?(pe|rope)(_cache)?", "the rotary cache (kpe_cache)", 3)
    starts = p.maybe(_TO_INDPTR, 1)
    table = _table(p)
    scale = p.take(_SCALE, "the scale (sm_scale)")
    p.done()
    out, lse = p.outputs((r"o|out|output|attn_out(put)?", "the attention"), _LSE)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        blocks, lengths = table.read(x, x[ckv].shape[1])
        results = lz("mla_paged_attention", q_nope=x[q_nope], q_pe=x[q_pe], ckv_cache=x[ckv],
                     kpe_cache=x[kpe], block_table=blocks, context_lens=lengths,
                     cu_seqlens_q=x[starts] if starts else None,
                     is_causal=reading.get("is_causal", True), scale=number(x, scale),
                     return_lse=bool(lse))
        return ({out: results[0], lse: _logs(results[1], reading["lse_base"])} if lse
                else {out: results})

    text = call_text("mla_paged_attention", q_nope, q_pe, ckv, kpe,
                     f"pages of {table.table or table.indptr}", scale=scale)
    options, statements = _attention_options(p, bool(starts), lse)
    roles = {"q_nope": q_nope, "q_pe": q_pe, "ckv": ckv, "kpe": kpe, "starts": starts,
             "table": table, "scale": scale,
             "out": out, "lse": lse}
    return [Answer(definition, ("mla_paged_attention",), text, with_reading(compute, reading),
                   reading, "mla", roles, statements=statements)
            for reading in readings(options)]


def sparse(definition: Definition) -> list[Answer]:
    """Each query has its own list of tokens: a page table with pages of one token."""
    p = Parts(definition, "mla_paged_attention")
    q_nope, q_pe = p.take(r"q_nope", "the absorbed part of the query (q_nope)",
                          3), p.take(r"q_pe", "q_pe", 3)
    ckv, kpe = p.take(r"ckv(_cache)?", "the compressed cache (ckv_cache)",
                      3), p.take(r"kpe(_cache)?", "kpe_cache", 3)
    chosen = p.take(r"(sparse|topk)_indices", "the tokens that each query sees (sparse_indices)", 2)
    scale = p.take(_SCALE, "the scale (sm_scale)")
    p.done()
    out, lse = p.outputs((r"o|out|output", "the attention"), _LSE)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        seen = x[chosen] >= 0
        front = (~seen).to(torch.int8).argsort(stable=True)            # those that are tokens first
        tokens = x[chosen].gather(-1, front).clamp(min=0)
        results = lz("mla_paged_attention", q_nope=x[q_nope], q_pe=x[q_pe],
                     ckv_cache=x[ckv].flatten(0, 1)[:, None],
                     kpe_cache=x[kpe].flatten(0, 1)[:, None], block_table=tokens,
                     scale=number(x, scale), context_lens=seen.sum(-1).to(tokens.dtype),
                     return_lse=bool(lse))
        return ({out: results[0], lse: _logs(results[1], reading["lse_base"])} if lse
                else {out: results})

    text = call_text("mla_paged_attention", q_nope, q_pe, ckv, kpe,
                     f"pages of one token by {chosen}", scale=scale)
    options, statements = _attention_options(p, False, lse)
    roles = {"q_nope": q_nope, "q_pe": q_pe, "ckv": ckv, "kpe": kpe, "chosen": chosen,
             "scale": scale, "out": out,
             "lse": lse}
    return [Answer(definition, ("mla_paged_attention",), text, with_reading(compute, r), r,
                   "sparse", roles, statements=statements)
            for r in readings(options)]


def ragged(definition: Definition) -> list[Answer]:
    """Answer ragged attention: with a log-sum-exp as a paged cache with pages of one token, without
    as packed sequences."""
    with_lse = any(re.fullmatch(_LSE[0], n.lower()) for n in definition.outputs)
    op = "paged_attention" if with_lse else "varlen_attention"
    p = Parts(definition, op)
    q, k, v = (p.take(pattern, what, 3) for pattern, what in (
        (QUERY, "packed queries (q)"), (r"k|keys?", "packed keys (k)"),
        (r"v|values?", "packed values (v)")))
    starts_q = p.maybe(_TO_INDPTR, 1)
    starts_k = p.maybe(r"(kv|k|key)_indptr|cu_seqlens_(k|kv)|kv_cu_seqlens", 1)
    shared = ("" if starts_q and starts_k
              else p.take(r"cu_seqlens|indptr|seq_indptr", "where sequences begin", 1))
    starts_q, starts_k = starts_q or shared, starts_k or shared
    for redundant in (r"max_seqlen_(q|qo)|max_q_len", r"max_seqlen_(k|kv)|max_kv_len",
                      r"return_lse"):
        p.maybe(redundant)                     # the offsets and the outputs say the same
    scale, window, cap = p.maybe(_SCALE), p.maybe(r"window_left|sliding_window"), p.maybe(
        r"(logits_)?soft_?cap")
    slopes = "" if with_lse else p.maybe(r"(alibi_)?slopes", 1)
    p.done()
    out, lse = p.outputs((r"o|out|output|attn_out(put)?", "the attention"), _LSE)

    def compute(x: Inputs, reading: Mapping[str, Any]) -> Outputs:
        shared = {"is_causal": reading.get("is_causal", True), "scale": number(x, scale),
                  "window_left": number(x, window, reading.get("window_left", -1)),
                  "softcap": number(x, cap, reading.get("softcap", 0.0))}
        if lse:
            tokens = torch.arange(len(x[k]), device=x[k].device, dtype=torch.int32)
            blocks, lengths = page_table_from_csr(x[starts_k], tokens)
            results = lz("paged_attention", query=x[q], key_cache=x[k][:, None],
                         value_cache=x[v][:, None], block_table=blocks, context_lens=lengths,
                         cu_seqlens_q=x[starts_q], return_lse=True, **shared)
            return {out: results[0], lse: _logs(results[1], reading["lse_base"])}
        longest_q, longest_k = (int(x[name].diff().max()) for name in (starts_q, starts_k))
        return {out: lz("varlen_attention", query=x[q], key=x[k], value=x[v],
                        cu_seqlens_q=x[starts_q], cu_seqlens_k=x[starts_k], max_seqlen_q=longest_q,
                        max_seqlen_k=longest_k, causal_align="bottom_right",
                        alibi_slopes=x[slopes].float() if slopes else None, **shared)}

    text = call_text(op, q, k, v, f"sequences of {starts_q} and {starts_k}", scale=scale,
                     window_left=window, softcap=cap, alibi_slopes=slopes)
    options, statements = _attention_options(p, True, lse, bool(window), bool(cap), bool(slopes))
    roles = {"query": q, "key": k, "value": v, "starts": starts_q, "starts_k": starts_k,
             "scale": scale, "out": out,
             "lse": lse, "window": window, "cap": cap, "slopes": slopes,
             "plain": not (window or cap or slopes)}
    return [Answer(definition, (op,), text, with_reading(compute, reading), reading, "ragged",
                   roles, statements=statements)
            for reading in readings(options)]
