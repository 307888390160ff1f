"""Prepacked weights: packed once for a library, and kept as long as the weight is alive and
unchanged.

An entry belongs to the storages of the tensors it was packed from and is dropped when one of them
is freed. It is valid while their addresses, shapes, strides, dtypes and versions are the same, so a
write in place (`mul_`, an optimizer's step) packs again. A write that bumps no version (through
`.data`, NumPy, or a raw pointer) cannot be detected: call `lz.quant.forget_packed(weight)` after
one.

When living weights use up the limit, further weights are not packed and their kernels use them as
they are. That is slower, but evicting entries would pack on every call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class _Entry:
    packed: Any
    owners: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]
    nbytes: int


class PackedWeights:
    """A cache of packed weights. Readers take no lock; one thread packs at a time."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _default_limit() if limit is None else limit       # bytes of all packed copies
        self._entries: dict[Signature, _Entry] = {}
        # reentrant: a storage may be freed while this thread packs
        self._packing = threading.RLock()

    def get(self, kind: str, pack: Callable[..., Any], *tensors: Tensor,
            growth: int = 1) -> Any | None:
        """Returns `pack(*tensors)`, cached under `kind`; None for weights that must not be packed.
        A packed copy has `growth` times the bytes of the tensors."""
        try:
            versions = tuple([t._version for t in tensors])
        except RuntimeError:                   # an inference tensor: changes cannot be detected
            return None
        key = (kind, *[(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])
        entry = self._entries.get(key)
        if entry is not None and entry.versions == versions and _same_owners(entry, tensors):
            return entry.packed
        return self._add(key, pack, tensors, growth)

    def _add(self, key: Signature, pack: Callable[..., Any], tensors: tuple[Tensor, ...],
             growth: int) -> Any | None:
        with self._packing:
            versions = tuple([t._version for t in tensors])
            entry = self._entries.get(key)
            if entry is not None and entry.versions == versions and _same_owners(entry, tensors):
                return entry.packed            # another thread packed it meanwhile
            self._entries.pop(key, None)
            nbytes = growth * sum(t.nbytes for t in tensors)
            if nbytes + self.nbytes > self.limit:
                return None
            packed = pack(*tensors)
            entries = self._entries

            def forget(_: object) -> None:
                entries.pop(key, None)

            owners = tuple(weakref.ref(t.untyped_storage(), forget) for t in tensors)
            entries[key] = _Entry(packed, owners, versions, nbytes)
            return packed

    def forget(self, *tensors: Tensor) -> int:
        """Drops what was packed from these tensors' storage, or everything; returns how many."""
        with self._packing:
            storages = [t.untyped_storage() for t in tensors]
            dropped = [key for key, e in self._entries.copy().items()
                    if not storages or any(owner() is s for owner in e.owners for s in storages)]
            return sum(self._entries.pop(key, None) is not None for key in dropped)

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def after_fork(self) -> None:
        self._packing = threading.RLock()


def _same_owners(entry: _Entry, tensors: tuple[Tensor, ...]) -> bool:
    """Returns whether the storages are the same: a resized storage's address may be reused."""
    return all(owner() is t.untyped_storage() for owner, t in zip(entry.owners, tensors))


def _default_limit() -> int:
    """Returns a quarter of the machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 4 << 30


PACKED = PackedWeights()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PACKED.after_fork)
