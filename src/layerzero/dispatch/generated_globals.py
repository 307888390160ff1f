"""What the generated functions of hotpath.py call: their globals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..machine.faults import SDPA_SWITCHES, sdpa_backends
from ..spec.grid import bucket
from .facts import TENSOR_READERS, alignment, dtype_name, has_memory, stride_last

BUCKETS = [bucket(n) for n in range(4097)]      # to the end of a bucket


def broadcast_flags(shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns how `shape` broadcasts to `full`: rank, then 1 per repeated axis; None if not."""
    gap = len(full) - len(shape)
    if gap < 0:
        return None
    out = [len(shape)]
    for size, want in zip(shape, full[gap:]):
        if size == want:
            out.append(0)
        elif size == 1:
            out.append(1)
        else:
            return None
    return tuple(out)


def _stride_last(t: Tensor) -> tuple[Any]:
    if t.layout is not torch.strided:
        raise ValueError("not a strided tensor")
    return (stride_last(t),)


def _are_numbers(*values: Any) -> bool:
    return all(type(v) is float or type(v) is int for v in values)


def _broadcast_axes(flags: tuple[int, ...], axes: tuple[str, ...]) -> str:
    """Returns the names of the axes a tensor is broadcast over, from its `broadcast_flags`."""
    missing = axes[:len(axes) - flags[0]]
    return ",".join([*missing, *(axis for axis, repeated in zip(axes[len(missing):], flags[1:])
                                 if repeated)])


def generated_globals(override: Callable[[], Any], for_call: Callable[[str | None, Any], Any],
                      faults: tuple[type[BaseException], ...]) -> dict[str, Any]:
    """Return the globals of a generated function; TABLE, MISS, SLOW and RECOVER come later."""
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    return {
        "TENSOR": Tensor, "PARAMETER": torch.nn.Parameter, "BUCKETS": BUCKETS, "BUCKET": bucket,
        "BROADCAST": broadcast_flags, "STRIDED": torch.strided, "STRIDE_LAST": _stride_last,
        "NUMBERS": _are_numbers, "ALIGNMENT": alignment,
        "OVERRIDE": override, "FOR_CALL": for_call, "FAULTS": faults, "DTYPE_NAME": dtype_name,
        "BROADCAST_AXES": _broadcast_axes,
        **{f"READ_{fact}": reader for fact, reader in TENSOR_READERS.items()},
        **{f"SDPA_{i}": is_on for i, is_on in enumerate(SDPA_SWITCHES)},
        "SDPA_BACKENDS": sdpa_backends, "AUTOCAST": torch._C._is_any_autocast_enabled,
        "LEVEL": torch._C._functorch.maybe_current_level, "FORWARD_AD": torch.autograd.forward_ad,
        "HAS_MEMORY": has_memory,
        "GRAD": torch.is_grad_enabled, "DETERMINISTIC": torch._C._get_deterministic_algorithms,
        "CAPTURING": capturing, "NOT_PLAIN": (ValueError, RuntimeError, ZeroDivisionError),
    }
