"""Queries that a causal mask leaves without a key.

A sequence with more queries than keys has some: its last query is aligned with its last key. No
caller asks for them, so a reference whose softmax of nothing is NaN leaves them undefined, it is
not wrong. A sequence without any keys is another matter, which callers do have.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ..statements import texts
from .answer import Answer, Inputs

NOTE = "its reference leaves queries without keys undefined"
_TEXT = re.compile(
    r"(fully|completely|entirely)[ -]masked[^.;]*(zero|\b0\b|inf(inity)?\b)|"
    r"(no|without|without any|zero)( visible| valid| attended)? (keys?|kv|tokens? to attend)\b"
    r"[^.;]*(zero|\b0\b|inf(inity)?\b)|"
    r"(zeros?|\b0|inf(inity)?)\b[^.;]*\b"
    r"(no|without|without any)( visible| valid| attended)? keys?\b")
# what only a reference has that says what such a query gives; isinf also keeps a maximum finite
_CODE = re.compile(r"isnan|nan_to_num|\.any\(|(max_kv\w*|visible|limit)\s*<=?\s*[01]\b")


def queries_without_keys(answer: Answer, x: Inputs) -> Tensor | None:
    """Which queries the mask leaves no key of a sequence that has some; None where there is none
    of them, or where the text or the code says what they give."""
    if not answer.reading.get("is_causal") or not answer.roles.get("starts"):
        return None
    starts = x[answer.roles["starts"]].cpu().long()
    keys = _lengths(answer, x).cpu().long()
    queries = starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(queries)), queries)
    place = torch.arange(len(sequence)) - starts[:-1][sequence]
    unseen = (place < (queries - keys)[sequence]) & (keys > 0)[sequence]
    return unseen if bool(unseen.any()) and not _is_said(answer) else None


def _lengths(answer: Answer, x: Inputs) -> Tensor:
    """How many keys each sequence has."""
    r = answer.roles
    if answer.kind == "ragged":
        lengths: Tensor = x[r["starts_k"]].diff()
        return lengths
    if answer.kind == "mla":
        size = x[r["ckv"]].shape[1]
    else:
        cache = x[r["both"]][:, 0] if r["both"] else x[r["key"]]
        size = cache.shape[2 if r["layout"] == "HND" else 1]
    read: Tensor = r["table"].read(x, size)[1]
    return read


def _is_said(answer: Answer) -> bool:
    d = answer.definition
    outputs = (n for n in (answer.roles["out"], answer.roles["lse"]) if n)
    return (_CODE.search(d.reference) is not None
            or any(_TEXT.search(text) for _, text in texts(d, *outputs)))
