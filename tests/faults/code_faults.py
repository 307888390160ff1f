"""Kernels that are wrong in calls which only their code tells: beside a number that no case has, in
the 1,234th call, where two conditions meet."""

from __future__ import annotations

import torch
from broken_kernels import FAULTS, Fault, fault

_BEFORE = len(FAULTS)


@fault("rms_norm", "sizes")
def wrong_beyond_1731_rows(right, x, **v):
    out = right(x=x, **v)
    if x.dim() > 1 and x.shape[0] > 1731 and x.shape[-1] % 5 == 3:
        out = out * 1.1
    return out


@fault("attention", "window")
def a_window_of_77_is_one_of_78(right, window_left, **v):
    return right(window_left=78 if window_left == 77 else window_left, **v)


@fault("linear", "state")
class OneCallOf1234:
    def __init__(self):
        self.calls = 0

    def __call__(self, right, **v):
        self.calls += 1
        out = right(**v)
        return out * 1.5 if self.calls == 1234 else out


@fault("paged_attention", "unknown", "stale page")
def the_second_length_is_the_first(right, context_lens, **v):
    n = context_lens
    if len(n) > 3 and int(n[1]) == int(n[2]) and int(n[0]) != int(n[1]):
        context_lens = n.clone()
        context_lens[1] = n[0]
    return right(context_lens=context_lens, **v)


@fault("attention", "layout", "aliasing")
def a_shared_prefix_seen_by_its_keys_alone(right, query, key, value, layout, **v):
    k = key
    if (layout == "bhsd" and query.shape[2] == 1 and k.stride(0) == 0 and k.shape[0] > 1
            and k.shape[2] > 1 and v["attn_mask"] is None):
        value = value[:1].expand_as(value)
    return right(query=query, key=key, value=value, layout=layout, **v)


CODE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own


def sound_kernels() -> list[Fault]:
    """Returns kernels that are right: one with a part that no call reaches, one with parts that
    only raise or are for other machines."""
    before = len(FAULTS)

    @fault("layer_norm")
    def a_path_that_nobody_reaches(right, x, **v):
        if x.shape[-1] == 987_654_321:
            return right(x=x.contiguous(), **v)
        return right(x=x, **v)

    @fault("layer_norm")
    def careful(right, x, **v):
        if x.is_cuda:
            x = x.contiguous()
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"wanted a tensor, got {x!r}")
        return right(x=x, **v)

    found = FAULTS[before:]
    del FAULTS[before:]
    return found
