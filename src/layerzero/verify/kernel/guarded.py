"""The memory a kernel works on, made to show what it does with it: watched, poisoned, guarded, laid out otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MARGIN = 4096                                  # bytes on either side of a guarded tensor
LARGE = 1 << 28
LAYOUTS = ("sparse", "padded", "transposed", "offset")


# What must not change.

def snapshot(values: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
    """The whole storage of every tensor, and its version. What is too large to copy is watched by its elements."""
    return {name: (_watched(v).clone(), _version(v)) for name, v in values.items() if isinstance(v, Tensor)}


def changed(values: Mapping[str, Any], before: Mapping[str, tuple[Tensor, int]]) -> Iterator[str]:
    for name, (was, version) in before.items():
        if not torch.equal(_watched(values[name]), was):
            yield f"{name} was overwritten"
        elif _version(values[name]) != version:
            yield f"{name} was written to (its version went from {version} to {_version(values[name])})"


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _watched(t: Tensor) -> Tensor:
    if t.untyped_storage().nbytes() > LARGE:
        return t.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def ambient(device: str) -> dict[str, Any]:
    """What belongs to the whole process, and no kernel may change."""
    state: dict[str, Any] = {
        "the default dtype": torch.get_default_dtype(), "the number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(), "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes()}
    if device.startswith("cuda"):
        state["the state of the device's random numbers"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return state


# Memory that shows.

@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is filled with NaN and the largest integers, so that reading or leaving it as it came shows."""
    memory: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch._C._set_deterministic_algorithms       # the public one imports torch's compiler
    switch(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        switch(was, warn_only=only_warned)
        memory.fill_uninitialized_memory = filled


def guarded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with the same strides, each tensor in memory of its own between margins of NaN (integers: -1).

    Gaps between elements hold NaN too. What reads beside an input then shows in the result, what writes beside it in
    the snapshot. A tensor that is passed twice stays one; what reaches over gigabytes stays where it is.
    """
    made: dict[int, Tensor] = {}
    return {name: made.setdefault(id(v), _guarded(v)) if isinstance(v, Tensor) else v for name, v in values.items()}


def _guarded(t: Tensor) -> Tensor:
    aligned = max(64 // t.element_size(), 1)
    margin = MARGIN // t.element_size() + int(t.storage_offset()) % aligned        # as aligned as it was
    span = _span(t)
    if span > LARGE:
        return t
    storage = _filled(span + 2 * margin, t)
    view = storage.as_strided(t.shape, t.stride(), margin)
    if 0 in t.stride() and t.numel() > 1:      # spread: several indices are one element
        storage[margin:margin + span].copy_(t.detach().as_strided((span,), (1,), t.storage_offset()))
    else:
        view.copy_(t.detach())
    return view.requires_grad_() if t.requires_grad else view


def _span(t: Tensor) -> int:
    """Elements of memory from the first to the last."""
    return 1 + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride())) if t.numel() else 0


def _filled(size: int, like: Tensor) -> Tensor:
    """NaN, or -1, or True."""
    storage = torch.empty(size, dtype=like.dtype, device=like.device)
    if like.dtype.itemsize == 1 and like.is_floating_point():
        storage.view(torch.uint8).fill_(0x7F if like.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else 0xFF)
    elif like.is_floating_point() or like.is_complex():
        storage.fill_(torch.nan)
    elif like.dtype in (torch.bool, torch.uint8):
        storage.fill_(1 if like.dtype == torch.bool else 255)
    else:
        storage.fill_(-1)
    return storage


def relaid(t: Tensor, layout: str) -> Tensor | None:
    """The same tensor in other memory: every second element of a row, rows with room behind them, the last two
    dimensions exchanged, or begun one element late. None where that makes no difference."""
    if not t.numel() or t.dim() == 0:
        return None
    shape = tuple(t.shape)
    if layout == "sparse":
        made = _filled(2 * t.numel(), t).view(*shape, 2)[..., 0]
    elif layout == "padded":
        made = _filled((t.numel() // shape[-1]) * (shape[-1] + 3), t).view(*shape[:-1], shape[-1] + 3)[..., :shape[-1]]
    elif layout == "transposed":
        if t.dim() < 2:
            return None
        made = _filled(t.numel(), t).view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    else:
        made = _filled(t.numel() + 1, t)[1:].view(shape)
    if made.stride() == t.stride() and layout != "offset":
        return None
    made.copy_(t.detach())
    return made.requires_grad_() if t.requires_grad else made


def far_apart(t: Tensor) -> Tensor | None:
    """Its rows 2^31 elements apart, so that an offset does not fit 32 bits. Only what is written takes memory."""
    if t.dim() < 2 or t.shape[0] < 2 or not t.numel():
        return None
    reach = (1 << 31) // (t.shape[0] - 1) + t[0].numel()
    try:
        storage = torch.empty((t.shape[0] - 1) * reach + t[0].numel(), dtype=t.dtype, device=t.device)
    except (RuntimeError, MemoryError):
        return None
    inner = t[0].contiguous().stride()
    made = storage.as_strided(t.shape, (reach, *inner))
    return made.copy_(t)
