"""Items for lz.grouped_attention from cu_seqlens, and the grouped calls of flash-attention's forks.

The forks take a list of query tensors, one per group, and a list of cu_seqlens_k that says both how
many keys a sequence has and where they begin: sequence s of a group begins where the keys of the
sequences before it end *in that group*. In a buffer that all groups share this holds for the first
sequence only, as the group sees a prefix of each. `k_starts` says where the sequences begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..dispatch.dispatcher import public_function
from ..ops.grouped_attention import OP as _grouped
from ..spec.errors import InvalidCall
from ..spec.reason import Code, Reason


def items_from_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                          k_starts: Tensor | None = None, first_row: int = 0) -> Tensor:
    """Returns the items (sequences, 4) of packed sequences, for lz.grouped_attention.

    k_starts: where the keys of each sequence begin in the buffer, if not where cu_seqlens_k says:
    it then says only how many there are. first_row: the query row that cu_seqlens_q counts from.
    Nothing is read on the host.
    """
    starts_k = cu_seqlens_k[:-1] if k_starts is None else k_starts[:len(cu_seqlens_k) - 1]
    return torch.stack((cu_seqlens_q[:-1] + first_row, cu_seqlens_q.diff(), starts_k,
                        cu_seqlens_k.diff()), 1).to(torch.int32)


def _flash_attn_varlen_forward_grouped(
    q_list: Sequence[Tensor], k: Tensor, v: Tensor, cu_seqlens_q_list: Sequence[Tensor],
    cu_seqlens_k_list: Sequence[Tensor], max_seqlen_q_list: Sequence[int],
    max_seqlen_k_list: Sequence[int], dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = True, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    deterministic: bool = False, *, k_starts: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor], None, None]:
    """Attention of several groups of packed queries over one packed key buffer, in one call.

    Returns (outputs, log-sum-exps (heads, tokens), None, None), the lists with one tensor per
    group; the last two are flash-attention's dropout mask and random state.
    k_starts: where each sequence begins in k and v, such as cu_seqlens of the whole buffer: needed
    wherever a group sees a prefix of several sequences. See lz.grouped_attention.
    """
    _refuse(dropout_p, alibi_slopes, return_softmax)
    out, lse = _attend(torch.cat(list(q_list)), k, v, cu_seqlens_q_list, cu_seqlens_k_list,
                       max_seqlen_q_list, max_seqlen_k_list, softmax_scale, causal,
                       window_size_left, window_size_right, softcap, k_starts,
                       [len(q) for q in q_list], True)
    lengths = [len(q) for q in q_list]
    return list(out.split(lengths)), [t.t() for t in lse.split(lengths)], None, None


def _flash_attn_varlen_backward_grouped(
    dout_list: Sequence[Tensor], q_list: Sequence[Tensor], k: Tensor, v: Tensor,
    out_list: Sequence[Tensor], softmax_lse_list: Sequence[Tensor],
    cu_seqlens_q_list: Sequence[Tensor], cu_seqlens_k_list: Sequence[Tensor],
    max_seqlen_q_list: Sequence[int], max_seqlen_k_list: Sequence[int], dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = True, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None, *, k_starts: Tensor | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The gradients of _flash_attn_varlen_forward_grouped: (one per group of queries, dk, dv).

    dk and dv are summed over the groups in float32 or wider and rounded once. The forward is
    computed again: out_list and softmax_lse_list are not read. For training call
    lz.grouped_attention, whose backward needs no second forward.
    """
    _refuse(dropout_p, alibi_slopes, False)
    q, k, v = (t.detach().requires_grad_() for t in (torch.cat(list(q_list)), k, v))
    with torch.enable_grad(), _deterministic(deterministic):
        out = _attend(q, k, v, cu_seqlens_q_list, cu_seqlens_k_list, max_seqlen_q_list,
                      max_seqlen_k_list, softmax_scale, causal, window_size_left,
                      window_size_right, softcap, k_starts, [len(q) for q in q_list], False)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.cat(list(dout_list)))
    return list(dq.split([len(q) for q in q_list])), dk, dv


def _attend(query: Tensor, key: Tensor, value: Tensor, starts_q: Sequence[Tensor],
            starts_k: Sequence[Tensor], longest_q: Sequence[int], longest_k: Sequence[int],
            scale: float | None, causal: bool, left: int, right: int, softcap: float,
            k_starts: Tensor | None, rows: Sequence[int], with_lse: bool) -> Any:
    lists = {"q_list": rows, "cu_seqlens_q_list": starts_q, "cu_seqlens_k_list": starts_k,
             "max_seqlen_q_list": longest_q, "max_seqlen_k_list": longest_k}
    for name, values in lists.items():
        if len(values) != len(rows):
            raise InvalidCall.of(_grouped.name, Reason(
                Code.DIM_MISMATCH, f"as long as q_list, {len(rows)}", len(values), name))
    first = [sum(rows[:i]) for i in range(len(rows))]
    items = torch.cat([items_from_cu_seqlens(q, k, k_starts, row)
                       for q, k, row in zip(starts_q, starts_k, first)])
    return public_function(_grouped)(
        query, key, value, items, max(longest_q), max(longest_k), causal, scale, window_left=left,
        window_right=right, softcap=softcap, return_lse=with_lse)


def _refuse(dropout_p: float, alibi_slopes: Tensor | None, return_softmax: bool) -> None:
    defaults = {"dropout_p": (dropout_p != 0.0, "0.0"), "return_softmax": (return_softmax, "False"),
                "alibi_slopes": (alibi_slopes is not None, "None")}
    for name, (is_given, default) in defaults.items():
        if is_given:
            raise InvalidCall.of(_grouped.name, Reason(
                Code.VALUE_OUT_OF_RANGE, f"{default} for grouped attention", "a value", name))


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms of torch, by which kernels are chosen, where they were asked for."""
    was, warn = (torch.are_deterministic_algorithms_enabled(),
                 torch.is_deterministic_algorithms_warn_only_enabled())
    torch.use_deterministic_algorithms(was or wanted, warn_only=warn)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
