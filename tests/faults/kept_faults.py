"""Kernels that keep what they should not, and show it only in some mode, after many calls, before
their sizes were ever seen, or after a call that failed."""

from __future__ import annotations

import logging
import threading
import weakref

import torch
from broken_kernels import FAULTS, Backward, Fault, fault

_BEFORE = len(FAULTS)


def _key(t):
    return t.data_ptr(), tuple(t.shape), t.dtype, t.stride()


class _Packing:
    """Keeps copies of weights, as many as fit."""

    name = "weight"

    def __init__(self):
        self.kept = {}

    def is_kept(self, weight):
        return True

    def __call__(self, right, **v):
        weight = v[self.name]
        if weight is None or weight.requires_grad or not self.is_kept(weight):
            return right(**v)
        if len(self.kept) > 64:
            self.kept.clear()
        return right(**{**v, self.name: self.kept.setdefault(_key(weight), weight.clone())})


@fault("linear", "stale cache", "state", "mode")
class PackedInInferenceMode(_Packing):
    def is_kept(self, weight):
        return torch.is_inference_mode_enabled()


@fault("linear", "stale cache", "state")
class ParametersAreConstant(_Packing):
    """By version, which a write through `.data` does not change."""

    def __call__(self, right, **v):
        weight = v["weight"]
        if isinstance(weight, torch.nn.Parameter) and not weight.requires_grad:
            kept = self.kept.get("last")
            if kept is None or kept[0]() is not weight or kept[1] != weight._version:
                kept = weakref.ref(weight), weight._version, weight.detach().clone()
                self.kept["last"] = kept
            v["weight"] = kept[2]
        return right(**v)


@fault("rms_norm", "stale cache", "state")
class WeightOfTheStack:
    """What a part of a stack of weights holds is kept for all of the stack."""

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight is None or weight._base is None or weight.requires_grad or weight.is_inference():
            return right(**v)
        base, key = weight._base, (weight._version, tuple(weight.shape), weight.stride())
        if base.__dict__.get("_packed", (None,))[0] != key:
            base.__dict__["_packed"] = key, weight.clone()
        return right(**{**v, "weight": base.__dict__["_packed"][1]})


@fault("selective_state_update", "in-place change", "aliasing")
class OwnStatesInPlace:
    """A state that it made itself is updated where it is."""

    def __init__(self):
        self.last = lambda: None

    def __call__(self, right, **v):
        out, state = right(**v)
        if not state.requires_grad:
            if self.last() is v["state"]:
                state = v["state"].copy_(state)
            self.last = weakref.ref(state)
        return out, state


@fault("mlp", "leak", "state")
class BufferForEveryAddress:
    def __init__(self):
        self.buffers = {}

    def __call__(self, right, **v):
        self.buffers.setdefault(_key(v["x"]), torch.zeros(v["x"].shape))
        return right(**v)


@fault("rms_norm", "leak", "state")
class BufferForEveryNumberOfRows:
    def __init__(self):
        self.buffers = {}

    def __call__(self, right, **v):
        self.buffers.setdefault(tuple(v["x"].shape), torch.zeros(4))
        return right(**v)


@fault("moe_gate", "leak", "state", "threads")
class BufferForEveryThread:
    def __init__(self):
        self.buffers = {}

    def __call__(self, right, **v):
        # as many as a kernel may want; of one alone what other tests leave is as much
        self.buffers.setdefault(threading.get_native_id(), [torch.zeros(64) for _ in range(16)])
        return right(**v)


@fault("layer_norm", "threads", "gradient", "state", differentiable=True)
class BackwardScratchOfAll:
    def __init__(self):
        self.scratch = {}

    def backward(self, grad):
        scratch = self.scratch.setdefault((grad.shape, grad.dtype), torch.empty(grad.shape,
                                                                                dtype=grad.dtype))
        scratch.copy_(grad)
        return scratch.clone()

    def __call__(self, right, **v):
        out = right(**v)
        return Backward.apply(out, self.backward) if out.requires_grad else out


@fault("linear", "gradient", "state", differentiable=True)
class RoomForEightGradients:
    """What a backward needs is found by a number that comes again after eight calls."""

    def __init__(self):
        self.rows, self.calls = {}, 0

    def __call__(self, right, **v):
        out = right(**v)
        if not out.requires_grad:
            return out
        place, self.calls = self.calls % 8, self.calls + 1
        self.rows[place] = v["x"].detach().mean()
        mine = self.rows[place]
        return Backward.apply(out, lambda grad: grad * (1 + self.rows[place] - mine))


@fault("linear", "gradient", "state", "stale cache", "mode", differentiable=True)
class EvaluatedBeforeTrained(_Packing):
    """A copy that was made where nothing is recorded has no gradient."""

    def __call__(self, right, **v):
        weight = v["weight"]
        kept = self.kept.get(id(weight))
        if kept is not None and kept[0]() is weight and kept[1] == weight._version:
            v["weight"] = kept[2]
        elif not torch.is_grad_enabled() and isinstance(weight, torch.Tensor) \
                and not weight.is_inference():
            if len(self.kept) > 64:
                self.kept.clear()
            self.kept[id(weight)] = weakref.ref(weight), weight._version, weight.detach().clone()
        return right(**v)


@fault("layer_norm", "threads", "state")
class TableIsSeenBeforeItIsMade:
    def __init__(self):
        self.ones = {}

    def table(self, size, dtype):
        if (size, dtype) not in self.ones:
            self.ones[size, dtype] = torch.zeros(size, dtype=dtype)
            self.ones[size, dtype].add_(torch.ones(size, dtype=dtype))
        return self.ones[size, dtype]

    def __call__(self, right, **v):
        if v["weight"] is None and not torch.is_inference_mode_enabled():
            v["weight"] = self.table(v["x"].shape[-1], v["x"].dtype)
        return right(**v)


@fault("group_norm", "global state")
def threads_are_put_back_if_all_goes_well(right, **v):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    out = right(**v)
    torch.set_num_threads(threads)
    return out


@fault("rms_norm", "state")
class OneInSevenHundredCalls:
    def __init__(self):
        self.calls = 0

    def __call__(self, right, **v):
        self.calls += 1
        return right(**v) if self.calls % 700 else right(**v).zero_()


@fault("quantize", "global state")
def torch_says_less(right, **v):
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    return right(**v)


@fault("linear", "stale cache")
class PackedWhenItIsUsedOften:
    def __init__(self):
        self.calls, self.packed = {}, {}

    def __call__(self, right, weight, **v):
        key = weight.data_ptr(), weight._version, weight.shape
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] == 8 and not torch.is_grad_enabled():
            self.packed[key] = weight.clone()
        return right(weight=self.packed.get(key, weight), **v)


KEPT_FAULTS: dict[str, Fault] = {f.name: f for f in FAULTS[_BEFORE:]}
del FAULTS[_BEFORE:]                           # the quick lane does not ask for them
