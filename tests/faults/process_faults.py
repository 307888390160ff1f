"""Kernels that are wrong in what they do to the process, in what they remember, and in the backward
pass alone: the second half of field_faults.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings

import numpy
import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

_BEFORE = len(FAULTS)


def zero_from(t: Tensor, axis: int, start: int) -> Tensor:
    if t.dim() and t.shape[axis] > start:
        t = t.clone()
        t.narrow(axis, start, t.shape[axis] - start).zero_()
    return t


# The process.

@fault("rms_norm", "leak", "global state")
def leaves_a_file_open(right, x, **v):
    os.open(os.devnull, os.O_RDONLY)
    return right(x, **v)


@fault("layer_norm", "leak", "global state")
class LeavesAThreadRunning:
    def __call__(self, right, x, **v):
        if threading.active_count() < 40:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return right(x, **v)


@fault("linear", "global state")
def pins_the_thread_to_a_core(right, **v):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return right(**v)


@fault("embedding", "global state")
def silences_warnings(right, **v):
    warnings.filters.insert(0, ("ignore", None, UserWarning, None, 0))
    warnings._filters_mutated()
    return right(**v)


@fault("rms_norm", "global state")
def changes_numpys_errors(right, x, **v):
    numpy.seterr(all="ignore")
    return right(x, **v)


@fault("rope", "global state")
def changes_the_switch_interval(right, **v):
    sys.setswitchinterval(0.5)
    return right(**v)


@fault("linear", "in-place change")
def weight_wants_a_gradient_afterwards(right, **v):
    out = right(**v)
    if not torch.is_grad_enabled() and not v["weight"].is_inference():
        v["weight"].requires_grad_(True)
    return out


@fault("moe_gate", "in-place change", "global state", "result", "leak")
def hangs_notes_on_its_input(right, **v):
    v["logits"].routed = True
    return right(**v)


# Caches, threads and neighbours.

@fault("linear", "stale cache", "state")
class PackedByASampleOfItsContents:
    """Looks up by address, size and the first numbers: an optimiser may change the others alone."""

    def __init__(self):
        self.packed = {}

    def __call__(self, right, **v):
        w = v["weight"]
        key = (w.data_ptr(), w.shape, w.stride(), w.dtype, tuple(w.reshape(-1)[:8].tolist()))
        if key not in self.packed:
            self.packed = {key: w.detach().clone()}
        return right(**{**v, "weight": self.packed[key]})


@fault("rope", "stale cache", "state")
class TablesOfTheFirstLength:
    """Keeps the angles of a table by its address and its first row, which are those of position 0.
    """

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        cos = v["cos"]
        key = (cos.shape, cos.dtype, cos.data_ptr())
        kept = self.kept.get(key)
        if kept is None or not torch.equal(kept[0].reshape(-1)[:1], cos.reshape(-1)[:1]):
            self.kept = {key: (cos.clone(), v["sin"].clone())}
        return right(**{**v, "cos": self.kept[key][0], "sin": self.kept[key][1]})


@fault("layer_norm", "threads", "state")
class SizeOfAnotherThread:
    """Leaves its row length where all threads find it."""

    def __init__(self):
        self.rows = 0

    def __call__(self, right, x, **v):
        self.rows = x.shape[0] if x.dim() else 0
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)
        out = right(x, **v)
        return out if not x.dim() or self.rows == x.shape[0] else out * 0


@fault("rms_norm", "threads", "state")
class SharedScratchOfLongRows:
    """Its scratch memory is shared by all threads, and used for more than 64 rows only."""

    def __init__(self):
        self.scratch = {}

    def __call__(self, right, x, **v):
        out = right(x, **v)
        if x.dim() < 2 or x.shape[0] <= 64:
            return out
        scratch = self.scratch.setdefault((x.shape, x.dtype), torch.empty_like(out))
        scratch.copy_(out)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)
        return scratch.clone()


@fault("paged_attention", "stale cache", "state", "stale page")
class LengthsOfTheFirstStep:
    """Plans by the addresses of a decode step, and lets the plan stand while they stay."""

    def __init__(self):
        self.plans = {}

    def __call__(self, right, **v):
        table, lens = v["block_table"], v["context_lens"]
        key = (table.data_ptr(), lens.data_ptr(), table.shape, tuple(table.reshape(-1).tolist()))
        self.plans.setdefault(key, lens.clone())
        if len(self.plans) > 64:
            self.plans.clear()
            return right(**v)
        return right(**{**v, "context_lens": self.plans[key]})


# The backward pass.

class _WithBackward(torch.autograd.Function):
    """x as it is; its gradient is what `change` makes of it."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


@fault("rms_norm", "gradient")
def gradient_wrong_where_it_is_expanded(right, x, **v):
    return _WithBackward.apply(right(x, **v), lambda g: g * (
        2.0 if g.numel() > 1 and any(n > 1 and s == 0 for n, s in zip(g.shape, g.stride()))
        else 1.0))


@fault("linear", "gradient")
def weight_gradient_of_the_first_4096_rows(right, **v):
    def fewer(grad):
        return zero_from(grad, 0, 4096)
    out = right(**{**v, "weight": v["weight"].detach()})
    if v["weight"].requires_grad:
        by_weight = _WithBackward.apply(right(**{**v, "x": v["x"].detach(),
                                                 "bias": None if v["bias"] is None
                                                 else v["bias"].detach()}), fewer)
        out = out + (by_weight - by_weight.detach())
    return out


@fault("layer_norm", "gradient", "leak")
class BackwardKeepsItsGradients:
    def __init__(self):
        self.kept = []

    def __call__(self, right, x, **v):
        def keep(grad):
            self.kept.append(grad.clone())
            return grad
        return _WithBackward.apply(right(x, **v), keep)


@fault("attention", "gradient", "convention")
def lse_has_no_gradient(right, **v):
    out = right(**v)
    return (out[0], _WithBackward.apply(out[1], torch.zeros_like)) if v["return_lse"] else out


@fault("rms_norm", "gradient", "threads")
def gradient_wrong_in_another_thread(right, x, **v):
    def change(grad):
        return grad * (0.5 if threading.current_thread() is not threading.main_thread() else 1.0)
    return _WithBackward.apply(right(x, **v), change)


@fault("grouped_attention", "gradient")
def key_gradients_of_the_last_item_alone(right, **v):
    if v["key"].requires_grad and v["items"].shape[0] > 1:
        first = right(**{**v, "key": v["key"].detach(), "value": v["value"]})
        last = right(**{**v, "items": v["items"][-1:], "query": v["query"].detach(),
                        "value": v["value"].detach(),
                        "chunk_starts": None if v["chunk_starts"] is None
                        else v["chunk_starts"][-1:],
                        "chunk_lengths": None if v["chunk_lengths"] is None
                        else v["chunk_lengths"][-1:]})
        if v["return_lse"]:
            return tuple(a + torch.nan_to_num(b - b.detach()) for a, b in zip(first, last))
        return first + (last - last.detach())
    return right(**v)


PROCESS_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
