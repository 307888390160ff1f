"""Kernels that are right at the sizes of a test and wrong at those of a model, or in how they treat
their arguments, the process and their callers. Each is wrong in one way.

`benchmarks/planted_faults.py` runs all of them; the tests run a few.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from typing import Any

import numpy
import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

_BEFORE = len(FAULTS)


# Index arithmetic at model size.

@fault("cross_entropy", "index overflow", "sizes")
def targets_in_16_bits(right, **v):
    return right(**{**v, "targets": torch.where(v["targets"] >= 0, v["targets"] & 0xFFFF,
                                                v["targets"])})


@fault("embedding", "index overflow", "sizes")
def ids_in_16_bits(right, **v):
    return right(**{**v, "ids": v["ids"] & 0xFFFF})


@fault("sample", "index overflow", "sizes", "distribution")
def tokens_in_16_bits(right, **v):
    out = right(**v)
    tokens = out[0] if v["return_logprobs"] else out
    tokens[tokens > 0] &= 0xFFFF
    return out


@fault("linear", "sizes", "index overflow", "precision")
def inner_loop_ends_at_8192(right, **v):
    if v["x"].shape[-1] > 8192:
        v["x"], v["weight"] = v["x"][..., :8192], v["weight"][:, :8192]
    return right(**v)


@fault("linear", "sizes", "index overflow")
def columns_past_16384_are_zero(right, **v):
    out = right(**v)
    if out.shape[-1] > 16384:
        out = torch.cat((out[..., :16384], torch.zeros_like(out[..., 16384:])), -1)
    return out


@fault("mlp", "sizes", "index overflow", "precision")
def inner_size_wraps_at_16384(right, **v):
    if v["weight_down"].shape[1] > 16384:
        v["weight_down"] = v["weight_down"].clone()
        v["weight_down"][:, 16384:] = 0
    return right(**v)


@fault("quantized_linear", "sizes", "index overflow", "precision")
def group_index_in_8_bits(right, **v):
    if v["group_size"] and v["scales"].shape[1] > 256:
        v["scales"] = v["scales"][:, torch.arange(v["scales"].shape[1]) % 256]
    return right(**v)


@fault("paged_attention", "sizes", "index overflow")
def page_count_in_8_bits(right, **v):
    table = v["block_table"]
    if table.shape[1] > 257:
        v["block_table"] = table[:, torch.arange(table.shape[1]) % 256].contiguous()
    return right(**v)


@fault("paged_attention", "sizes", "index overflow")
def page_ids_in_15_bits(right, **v):
    table = v["block_table"]
    return right(**{**v, "block_table": torch.where(table >= 0, table & 0x7FFF, table)})


@fault("mla_paged_attention", "sizes", "index overflow")
def latent_pages_in_15_bits(right, **v):
    table = v["block_table"]
    return right(**{**v, "block_table": torch.where(table >= 0, table & 0x7FFF, table)})


@fault("rope", "sizes", "index overflow", "convention")
def positions_end_at_4096(right, **v):
    ids = v["position_ids"]
    return right(**{**v, "position_ids": None if ids is None else ids.clamp_max(4095)})


@fault("rope", "sizes", "index overflow", "convention")
def positions_in_16_bits(right, **v):
    ids = v["position_ids"]
    return right(**{**v, "position_ids": None if ids is None else ids & 0xFFFF})


@fault("rms_norm", "sizes", "index overflow")
def rows_past_131072_are_skipped(right, x, **v):
    out = right(x, **v)
    if x.dim() and x.shape[-1] and x.numel() // x.shape[-1] > 1 << 17:
        out.view(-1, x.shape[-1])[1 << 17:] = 0
    return out


@fault("layer_norm", "index overflow")
def byte_offsets_in_32_bits(right, x, **v):
    if x.dim() > 1 and x.dtype == torch.float32 and x.numel() and max(
            (n - 1) * s for n, s in zip(x.shape, x.stride())) >= 1 << 30:
        x = x[:1].expand_as(x)
    return right(x, **v)


@fault("attention", "index overflow", "layout")
def key_offsets_in_32_bits(right, **v):
    key = v["key"]
    if key.numel() and max((n - 1) * s for n, s in zip(key.shape, key.stride())) >= 1 << 31:
        v["key"] = key[:1].expand_as(key)
    return right(**v)


@fault("attention", "sizes", "index overflow")
def keys_past_8192_are_not_seen(right, **v):
    axis = 2 if v["layout"] == "bhsd" else 1
    if v["key"].shape[axis] > 8192 and v["attn_mask"] is None and not v["is_causal"]:
        v["key"], v["value"] = (v[n].narrow(axis, 0, 8192) for n in ("key", "value"))
    return right(**v)


@fault("varlen_attention", "sizes", "index overflow")
def boundaries_in_16_bits(right, **v):
    if int(v["cu_seqlens_k"][-1]) > 0xFFFF:
        v["value"] = v["value"].clone()
        v["value"][0x10000:] = 0
    return right(**v)


@fault("attention", "sizes", "last rows")
def last_row_where_seq_is_77_more_than_tiles(right, **v):
    out = right(**v)
    axis = 2 if v["layout"] == "bhsd" else 1
    if not v["return_lse"] and out.shape[axis] % 128 == 77:
        out = out.clone()
        out.select(axis, -1).mul_(1.5)
    return out


@fault("layer_norm", "sizes", "precision")
def hidden_is_75_more_than_tiles(right, x, **v):
    return right(x, **v) * (1.01 if x.dim() and x.shape[-1] % 128 == 75 else 1)


# Arguments as users give them.

@fault("attention", "mask", "layout")
def mask_shared_by_heads_read_with_a_stride(right, **v):
    """A mask that is expanded over heads in memory is read as if each head had its own."""
    mask, query = v["attn_mask"], v["query"]
    heads = query.shape[1 if v["layout"] == "bhsd" else 2]
    if mask is not None and mask.dim() == 4 and mask.shape[1] == heads > 1 and mask.stride(1) == 0:
        v["attn_mask"] = mask.roll(1, 2)
    return right(**v)


@fault("attention", "mask", "layout")
def mask_shared_by_the_batch_read_with_a_stride(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dim() == 4 and mask.shape[0] > 1 and mask.stride(0) == 0:
        v["attn_mask"] = torch.cat((mask[:1], mask[1:].roll(1, 3)))
    return right(**v)


def _flat(t: Tensor) -> Tensor:
    """What reads `t` as if it were contiguous."""
    if t.requires_grad:
        return t
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    end = t.storage_offset() + t.numel()
    return whole[t.storage_offset():end].view(t.shape) if end <= whole.numel() else t


@fault("rms_norm", "layout")
def weight_read_as_if_contiguous(right, x, weight=None, **v):
    return right(x, weight if weight is None else _flat(weight), **v)


@fault("linear", "layout")
def bias_read_as_if_contiguous(right, **v):
    return right(**{**v, "bias": None if v["bias"] is None else _flat(v["bias"])})


@fault("rope", "layout")
def sines_read_as_if_contiguous(right, **v):
    return right(**{**v, "sin": _flat(v["sin"])})


@fault("paged_attention", "layout", "stale page")
def table_read_as_if_contiguous(right, **v):
    return right(**{**v, "block_table": _flat(v["block_table"])})


@fault("attention", "layout")
def value_misaligned_by_an_element(right, **v):
    value = v["value"]
    if value.storage_offset() % 2 and value.numel():
        v["value"] = value.roll(1, -1)
    return right(**v)


@fault("moe", "scale", "convention")
def one_expert_from_logits_always_weighs_one(right, **v):
    if v["logits"] is not None and v["top_k"] == 1:
        v["normalize"] = True
    return right(**v)


@fault("attention", "scale", "convention")
def lse_forgets_scale_beside_softcap(right, **v):
    out = right(**v)
    if v["return_lse"] and v["softcap"] and v["scale"] is not None:
        return out[0], right(**{**v, "scale": None})[1]
    return out


@fault("paged_attention", "convention", "scale")
def value_scale_forgotten_beside_a_window(right, **v):
    if v["value_scale"] is not None and v["window_left"] >= 0:
        v["value_scale"] = torch.ones_like(v["value_scale"])
    return right(**v)


# State of the process.

def _changes(name: str, op: str, change: Any) -> None:
    """Registers a kernel that calls `change` on every call."""
    def kernel(right, **v):
        change()
        return right(**v)

    kernel.__name__ = name
    fault(op, "global state", "fault")(kernel)


_changes("flushes_denormals", "rms_norm", lambda: torch.set_flush_denormal(True))
_changes("turns_onednn_off", "linear", lambda: setattr(torch.backends.mkldnn, "enabled", False))
_changes("turns_flash_off", "attention", lambda: torch.backends.cuda.enable_flash_sdp(False))
_changes("draws_numpy_numbers", "rms_norm", lambda: numpy.random.random())
_changes("draws_python_numbers", "layer_norm", random.random)
_changes("sets_an_environment_variable", "layer_norm",
         lambda: os.environ.__setitem__("PLANTED_FAULT", str(random.Random().random())))
_changes("default_device_meta", "embedding", lambda: torch.set_default_device("meta"))
_changes("turns_tf32_on", "linear",
         lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True))
_changes("switches_the_collector_off", "rms_norm", gc.disable)


@fault("rms_norm", "global state")
class OneThreadOnEveryOddCall:
    """The next call puts it right again."""

    def __init__(self) -> None:
        self.calls, self.threads = 0, 1

    def __call__(self, right, x, **v):
        self.calls += 1
        if self.calls % 2:
            self.threads = torch.get_num_threads()
            torch.set_num_threads(self.threads + 1)
        else:
            torch.set_num_threads(self.threads)
        return right(x, **v)


# Results.

@fault("embedding", "result")
def returns_a_parameter(right, **v):
    out = right(**v)
    return out if out.requires_grad else torch.nn.Parameter(out, requires_grad=False)


@fault("layer_norm", "result")
def returns_an_inference_tensor(right, **v):
    if torch.is_grad_enabled():
        return right(**v)
    with torch.inference_mode():
        return right(**v).clone()


@fault("rms_norm", "result", "leak")
class KeepsEveryResult:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, right, x, **v):
        out = right(x, **v)
        if not out.requires_grad:
            self.kept.append(out)
        return out


@fault("linear", "leak", "aliasing")
class KeepsAWorkspaceForEachCall:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, right, **v):
        self.kept.append(torch.zeros(4096))
        return right(**v)


@fault("layer_norm", "aliasing", "result")
class RingOfBuffers:
    """A result is written over by the twentieth call after it."""

    def __init__(self) -> None:
        self.ring: dict[Any, list[Tensor]] = {}
        self.calls = 0

    def __call__(self, right, x, **v):
        out = right(x, **v)
        if out.requires_grad or torch.is_inference_mode_enabled():
            return out
        ring = self.ring.setdefault((out.shape, out.dtype), [torch.empty_like(out)
                                                             for _ in range(20)])
        self.calls += 1
        return ring[self.calls % 20].copy_(out)


@fault("rms_norm", "out of bounds")
def writes_behind_its_result(right, x, **v):
    out = right(x, **v)
    if out.numel() and out.is_contiguous() and not out.requires_grad and out.nbytes % 64:
        ctypes.memset(out.data_ptr() + out.nbytes, 0, 4)       # within what malloc rounds up
    return out


# Callers and calls.

@fault("rms_norm", "state", "non-determinism", "sizes")
class WrongAfterAThousandCalls:
    def __init__(self) -> None:
        self.calls: dict[Any, int] = {}

    def __call__(self, right, x, **v):
        key = (x.shape, x.dtype)
        self.calls[key] = self.calls.get(key, 0) + 1
        return right(x, **v) * (1.01 if self.calls[key] > 1000 else 1)


@fault("layer_norm", "threads", "state")
def wrong_outside_the_main_thread(right, x, **v):
    other = threading.current_thread() is not threading.main_thread()
    return right(x, **v) * (1.01 if other else 1)


@fault("linear", "stale cache", "state")
class PackedByAddressAndVersion:
    """A packed weight, found again by address, shape and version: memory is used again."""

    def __init__(self) -> None:
        self.packed: dict[Any, Tensor] = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight.requires_grad or weight.is_inference():
            return right(**v)
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight._version)
        return right(**{**v, "weight": self.packed.setdefault(key, weight.clone())})


@fault("rms_norm", "sizes", "threads", "state")
def wrong_with_three_threads(right, x, **v):
    return right(x, **v) * (1.01 if torch.get_num_threads() == 3 else 1)


# Numbers.

@fault("rms_norm", "non-finite values", "sizes")
def swallows_nan(right, x, **v):
    return right(x, **v).nan_to_num(nan=0.0)


@fault("layer_norm", "non-finite values", "sizes")
def nan_spreads_to_every_row(right, x, **v):
    out = right(x, **v)
    return out * torch.nan if bool(x.isnan().any()) else out


@fault("linear", "non-finite values", "sizes")
def infinity_is_clamped(right, **v):
    return right(**v).clamp(-1e30, 1e30) if v["x"].dtype != torch.float16 else right(**v)


@fault("cross_entropy", "non-finite values", "overflow", "precision", "unknown")
def exponentials_overflow(right, **v):
    logits = v["logits"]
    if torch.is_grad_enabled() or logits.dtype != torch.float32 or v["label_smoothing"]:
        return right(**v)
    flat, targets = logits.reshape(-1, logits.shape[-1]), v["targets"].reshape(-1).long()
    lse = flat.exp().sum(-1).log()
    kept = targets != v["ignore_index"]
    losses = lse - flat.gather(-1, targets.clamp(0, flat.shape[-1] - 1)[:, None])[:, 0]
    losses = torch.where(kept, losses, 0.0)
    if v["reduction"] == "none":
        return losses.reshape(v["targets"].shape)
    return losses.sum() if v["reduction"] == "sum" else losses.sum() / kept.sum()


@fault("moe_gate", "ties", "distribution", "sizes", "unknown")
def ties_by_the_last_expert(right, **v):
    logits = v["logits"]
    if v["n_group"] > 1 or v["e_score_correction_bias"] is not None or not logits.numel():
        return right(**v)
    ids, weights = right(**{**v, "logits": logits.flip(-1)})
    return logits.shape[-1] - 1 - ids, weights


@fault("rms_norm", "last rows", "uninitialised output", "sizes")
def last_row_of_an_odd_count(right, x, **v):
    out = right(x, **v)
    if x.dim() == 2 and x.shape[0] % 4 == 3:
        out[-1] *= 1.1
    return out


SIZE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
