"""Kernels that are wrong in calls that few tests make: a gradient in another layout, dtypes of one
size, several sources of random numbers, lists of texts that are the caller's.
"""

from __future__ import annotations

import torch
from broken_kernels import FAULTS, fault

_BEFORE = len(FAULTS)


class _RowsAreNeighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.as_strided(grad.shape, grad.contiguous().stride()) if grad.stride(-1) == 1 \
            else grad.contiguous()


@fault("layer_norm", "gradient", "layout", differentiable=True)
def gradient_of_wider_rows_is_read_as_one_block(right, **v):
    out = right(**v)
    return _RowsAreNeighbours.apply(out) if out.requires_grad else out


@fault("rms_norm", "dtype")
def numbers_of_one_size_have_one_dtype(right, **v):
    x, weight = v["x"], v["weight"]
    if weight is not None and weight.element_size() == x.element_size():
        v["weight"] = weight.view(x.dtype)
    return right(**v)


@fault("sample", "dtype", "distribution")
def top_k_of_32_bits_keeps_one_more(right, **v):
    rows = v["top_k_rows"]
    if rows is not None and rows.dtype == torch.int32:
        v["top_k_rows"] = rows.long() + 1
    return right(**v)


@fault("sample", "distribution", "convention")
def seed_comes_before_the_seeds_of_rows(right, **v):
    return right(**{**v, "seed_rows": v["seed_rows"] if v["seed"] is None else None})


@fault("sample", "distribution", "convention")
def negative_top_k_is_greedy(right, **v):
    rows = v["top_k_rows"]
    return right(**{**v, "top_k_rows": rows if rows is None else torch.where(rows < 0, 1, rows)})


@fault("sample", "distribution", "sizes", "last rows")
def last_thousand_tokens_of_the_history(right, **v):
    return right(**{**v, "history": v["history"] if v["history"] is None
                    else v["history"][:, -1000:]})


@fault("sample", "distribution", "non-determinism")
def draws_without_a_seed_are_its_own(right, **v):
    if all(v[n] is None for n in ("uniforms", "seed", "seed_rows", "generator")):
        v["generator"] = torch.Generator().manual_seed(0)
    return right(**v)


@fault("tokenize", "aliasing", "state")
class KeptResultIsHandedOut:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = repr({**v, "tokenizer": v["tokenizer"].id})
        return self.kept.setdefault(key, right(**v))


@fault("tokenize", "in-place change")
def texts_are_sorted_by_length(right, **v):
    out = right(**v)
    if isinstance(v["text"], list):
        v["text"].sort(key=len)
    return out


@fault("tokenize", "leak")
class EveryTextIsKept:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        out = right(**v)
        if isinstance(v["text"], str):
            self.kept[v["text"]] = list(out.ids)
        return out


@fault("tokenize", "stale cache")
class TokenizerByItsId:
    def __init__(self):
        self.contents = {}

    def __call__(self, right, **v):
        handle = v["tokenizer"]
        known = self.contents.setdefault(id(handle), dict(vars(handle)))
        twin = object.__new__(type(handle))
        for name, value in known.items():
            object.__setattr__(twin, name, value)
        return right(**{**v, "tokenizer": twin})


@fault("tokenize", "convention")
def lines_end_as_on_unix(right, **v):
    text = v["text"]
    v["text"] = (text.replace("\r\n", "\n") if isinstance(text, str)
                 else [t.replace("\r\n", "\n") for t in text])
    return right(**v)


@fault("detokenize", "mask", "convention")
def masked_ids_are_left_out(right, **v):
    ids = v["ids"]
    if getattr(ids, "attention_mask", None) and isinstance(ids.ids[0], list):
        v["ids"] = [[i for i, m in zip(*row) if m] for row in zip(ids.ids, ids.attention_mask)]
    return right(**v)


UNASKED_FAULTS = {f.name: f for f in FAULTS[_BEFORE:]}
del FAULTS[_BEFORE:]
