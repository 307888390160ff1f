"""What the kernels of an op share: the inputs of a case, and what the formula gives for certain
contents.

Both are computed once and kept while kernels of the same op follow each other. What is kept is
never given away: a kernel gets a copy of the inputs, and results are found by what the inputs
contain, so one kernel's fault is not held against the next, and a kernel that is verified alone is
judged by the same numbers.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...ops.formulas.block_masks import copy_block_mask, is_block_mask
from ...spec.op import Op

ENTRY_BYTES, ALL_BYTES = 1 << 24, 1 << 29      # what is larger is computed again
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)
_NO_MASKS = (Tensor, *_CONSTANTS)
_WITH_BYTES = (Tensor, dict, tuple, list, MappingProxyType)


class Kept:
    """What was computed for one op, by key, up to so many bytes: what was not asked for the longest
    makes room. Another op empties it."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.begin(None)

    def begin(self, op: Op | None) -> None:
        self.op, self.nbytes = op, 0
        self.by_key.clear()

    def find(self, op: Op, key: Hashable) -> Any:
        if self.op is not op:
            self.begin(op)
        entry = self.by_key.get(key)
        if entry is None:
            return None
        self.by_key.move_to_end(key)
        return entry[0]

    def keep(self, op: Op, key: Hashable, value: Any, nbytes: int) -> bool:
        """Keeps a value, or returns that it is too large."""
        if self.op is not op or nbytes > ENTRY_BYTES:
            return False
        nbytes += 1024                         # of the entry itself
        while self.by_key and self.nbytes + nbytes > ALL_BYTES:
            self.nbytes -= self.by_key.popitem(last=False)[1][1]
        self.by_key[key] = value, nbytes
        self.nbytes += nbytes
        return True


_INPUTS, _RESULTS = Kept(), Kept()


def forget() -> None:
    """Frees all that is kept: when a run over kernels ends, the process may have other work."""
    _INPUTS.begin(None)
    _RESULTS.begin(None)


def compute_once(op: Op, key: Hashable | None, compute: Callable[[], Any],
                 nbytes: int | None = None) -> Any:
    """Returns what `compute` gives, from an earlier time where there is a key: what is in it must
    not be changed. `nbytes`: its size where that is known, else its tensors are counted."""
    value = None if key is None else _RESULTS.find(op, key)
    if value is None:
        value = compute()
        if key is not None:
            _RESULTS.keep(op, key, value, _bytes_of(value) if nbytes is None else nbytes)
    return value


# Inputs.

_latest: list[tuple[Mapping[str, Any], str]] = [({}, "")]


def note_case(case: Mapping[str, Any], dtype: str) -> None:
    """Notes the case whose values are asked for."""
    _latest[0] = case, dtype


def latest_case() -> tuple[Mapping[str, Any], str]:
    """Returns the case whose values were asked for last, as those of the call that is made now."""
    return _latest[0]


def values_once(op: Op, key: Hashable, generate: Callable[[], dict[str, Any]],
                to_read: bool = False) -> dict[str, Any]:
    """Returns the values that `generate` gives, a copy of those of an earlier time where they can
    be copied. `to_read`: those themselves, which must not be changed or given to a kernel."""
    kept: tuple[dict[str, Any], bool] | None = _INPUTS.find(op, key)
    if kept is not None:
        values, is_plain = kept
        return values if to_read else copy_values(values) if is_plain else generate()
    values = generate()
    if torch.is_inference_mode_enabled():
        return values
    is_plain = all(_is_plain(v) or _is_mask(v) for v in values.values())
    if (to_read or is_plain) and _INPUTS.keep(op, key, (values, is_plain), _bytes_of(values)):
        return values if to_read else copy_values(values)
    return values


def kept_values(op: Op, key: Hashable) -> dict[str, Any] | None:
    """Returns the values that are kept for a key, to read; None where there are none."""
    kept: tuple[dict[str, Any], bool] | None = _INPUTS.find(op, key)
    return None if kept is None else kept[0]


class ZerosForNormals(TorchFunctionMode):
    """Gives zeros for what torch.randn would draw: pages that nobody writes cost nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        return torch.zeros(*args, **{n: v for n, v in (kwargs or {}).items() if n != "generator"})


def _is_mask(value: Any) -> bool:
    """Is it a BlockMask? Most values are tensors and constants, which are known faster."""
    return not isinstance(value, _NO_MASKS) and is_block_mask(value)


def _is_plain(value: Any) -> bool:
    """Tells what can be copied and hashed: constants, and tensors of the CPU that are no more."""
    if isinstance(value, Tensor):
        return (type(value) is Tensor and value.device.type == "cpu"
                and value.layout == torch.strided and not value.requires_grad
                and not value.is_quantized)
    return isinstance(value, _CONSTANTS) or (isinstance(value, tuple)
                                             and all(isinstance(v, _CONSTANTS) for v in value))


def copy_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies tensors with all of their storage; those that share it share the copy. A BlockMask
    takes torch longer to make than its lists to copy."""
    storages: dict[int, torch.UntypedStorage] = {}
    addresses = [v.untyped_storage().data_ptr() for v in values.values() if isinstance(v, Tensor)]
    all_differ = len(set(addresses)) == len(addresses)

    def copy(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if all_differ and t.is_contiguous() and t.nbytes == storage.nbytes() and not t._is_view():
            return t.clone()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        copied = torch.empty(0, dtype=t.dtype).set_(storages[storage.data_ptr()],
                                                     t.storage_offset(), t.shape, t.stride())
        return copied.view_as(copied) if t._is_view() else copied

    return {name: copy(v) if isinstance(v, Tensor) else copy_block_mask(v) if _is_mask(v)
            else v for name, v in values.items()}


def upcast(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same rounded numbers in float64."""
    return {name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for name, v in values.items()}


def with_own_generators(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copies the generators among the values: every call draws the same numbers."""
    copies = {name: torch.Generator(v.device).set_state(v.get_state())
              for name, v in values.items() if type(v) is torch.Generator}     # isinstance is slow
    return {**values, **copies} if copies else values


# Results of the formula.

class Fingerprint(NamedTuple):
    """What the results of a formula may depend on, of tensors their hashes. In float64, where the
    order of a sum is no matter, that is the contents alone; else also how they lie in memory."""

    contents: tuple[Any, ...]
    layout: str


def fingerprint(values: Mapping[str, Any]) -> Fingerprint | None:
    """Returns contents and shapes of the values, and their strides and alignment; None for what is
    not plain or large."""
    contents, functions, layout, nbytes = [], [], "", 0        # type: list[Any], list[Any], str, int
    for name, value in _flattened(values):
        if isinstance(value, Tensor):
            value = value.detach() if value.requires_grad else value
        elif callable(value):                  # of a BlockMask; copies of it have the same
            functions.append(value)
            continue
        elif (not isinstance(value, _CONSTANTS) and isinstance(value, torch.Generator)
              and value.device.type == "cpu"):
            value = value.get_state()          # the formula draws from a copy of it
        if not _is_plain(value):
            return None
        if not isinstance(value, Tensor):
            contents.append((name, repr(value)))
            continue
        nbytes += value.nbytes
        if nbytes > ENTRY_BYTES:
            return None
        layout += f"{name}:{value.stride()}{value.data_ptr() % 64};"
        contiguous = value.contiguous()
        # Python's own: 64 bits, with a key that each process draws, at eight times a digest's speed
        contents.append((name, value.dtype, tuple(value.shape), hash(ctypes.string_at(
            contiguous.data_ptr(), contiguous.nbytes)) if value.numel() else 0))
    return Fingerprint((*contents, *functions), layout)


def fingerprint_once(op: Op, key: Hashable, values: Mapping[str, Any]) -> Fingerprint | None:
    """Returns the fingerprint of values that are the same whenever the key is."""
    contents: Fingerprint | tuple[()] = compute_once(
        op, ("fingerprint", key), lambda: fingerprint(values) or (), nbytes=0)
    return contents if isinstance(contents, Fingerprint) else None


def _flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values, and what a BlockMask consists of."""
    for name, value in values.items():
        if _is_mask(value):
            yield from ((f"{name}.{part}", v) for part, v in vars(value).items())
        else:
            yield name, value


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_meta else value.untyped_storage().nbytes()
    if isinstance(value, (dict, MappingProxyType)):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return 0
    return sum(_bytes_of(v) for v in value if isinstance(v, _WITH_BYTES))
