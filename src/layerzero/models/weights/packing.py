"""Inspects, drops and limits the packed copies of weights that kernels keep."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...backends._packing import PACKED
from ...spec.errors import ConfigError


@dataclass(frozen=True)
class PackedState:
    """The number of packed copies, their bytes, and the limit in bytes."""

    weights: int
    nbytes: int
    limit: int


def packed_weights() -> PackedState:
    return PackedState(len(PACKED), PACKED.nbytes, PACKED.limit)


def forget_packed(*weights: Tensor) -> int:
    """Drop the packed copies of these weights, or all of them; returns how many there were.

    Needed only after a write that bumps no version, as through `weight.data` or a NumPy view.
    """
    return PACKED.forget(*weights)


def limit_packed(nbytes: int) -> None:
    """Set how many bytes packed copies of weights may take; 0 for none. Existing copies stay."""
    if nbytes < 0:
        raise ConfigError(
            f"limit_packed wants a number of bytes >= 0, got {nbytes}; 0 packs nothing")
    PACKED.limit = nbytes
