"""What users may ask about, and do to, the weights that kernels keep in a rearranged copy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backends._packing import PACKED
from ..spec.errors import ConfigError


@dataclass(frozen=True)
class PackedState:
    """How many rearranged copies there are, how many bytes they take, and how many they may take."""

    weights: int
    nbytes: int
    limit: int


def packed_weights() -> PackedState:
    return PackedState(len(PACKED), PACKED.nbytes, PACKED.limit)


def forget_packed(*weights: Tensor) -> int:
    """Drop the copies made from these weights, or all of them; returns how many there were.

    Needed only after a write that bumps no version, as through `weight.data` or a NumPy view.
    """
    return PACKED.forget(*weights)


def limit_packed(nbytes: int) -> None:
    """How many bytes the rearranged copies of weights may take; 0 for none. What is there stays."""
    if nbytes < 0:
        raise ConfigError(f"limit_packed wants a number of bytes >= 0, got {nbytes}; 0 packs nothing")
    PACKED.limit = nbytes
