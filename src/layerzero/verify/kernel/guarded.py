"""Prepares the memory a kernel works on to reveal its mistakes: watched, poisoned, guarded, in
other layouts."""

from __future__ import annotations

import copy
import ctypes
import mmap
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MARGIN_BYTES = 4096                            # on either side of a guarded tensor
MAX_BYTES = 1 << 28
PATTERN = 0xA5                                 # of the margins of results
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0     # MAP_NORESERVE, which Python 3.13 names
LAYOUTS = ("sparse", "padded", "transposed", "transposed part", "offset")


# Watching memory.

Watched = tuple[Tensor | bytes | list[Any], int, tuple[Any, ...]]
_DESCRIBED = ("shape", "stride", "requires_grad", "address", "hook", "grad", "attribute")


def snapshot(values: Mapping[str, Any]) -> dict[str, Watched]:
    """Copies the whole storage, version and description of every tensor; of very large storages
    only the elements; and lists, as of texts."""
    lists: dict[str, Watched] = {name: (copy.deepcopy(v), 0, ()) for name, v in values.items()
                                 if isinstance(v, list)}
    return lists | {name: (_bytes_in(v), _version(v), _description(v))
                    for name, v in _with_parts(values).items() if isinstance(v, Tensor)}


def _with_parts(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values, with the tensors of a BlockMask."""
    parts = {f"{name}.{part}": t for name, v in values.items() if hasattr(v, "kv_indices")
             for part, t in vars(v).items() if isinstance(t, Tensor)}
    return {**values, **parts} if parts else values


def find_changes(values: Mapping[str, Any], before: Mapping[str, Watched]) -> Iterator[str]:
    """Yields what changed since a snapshot. A list is put back: others are given the same."""
    values = _with_parts(values)
    for name, (original, version, description) in before.items():
        if isinstance(original, list):
            if values[name] != original:
                values[name][:] = original
                yield f"the list {name} was changed"
            continue
        now = _description(values[name])
        if now != description:
            differing = [n for n, a, b in zip(_DESCRIBED, now, description) if a != b]
            yield f"{name} has another {' and another '.join(differing)} after the call"
            continue
        if not _equal_bytes(_bytes_in(values[name]), original):
            yield f"{name} was overwritten"
        elif _version(values[name]) != version:
            yield (f"{name} was written to (its version went from {version} to "
                   f"{_version(values[name])})")


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _description(t: Tensor) -> tuple[Any, ...]:
    """Returns what is _DESCRIBED of a tensor."""
    attributes = t.__dict__
    return (t.shape, t.stride(), t.requires_grad, t.data_ptr(), len(t._backward_hooks or ()),
            None if not t.is_leaf or t.grad is None else (id(t.grad), _version(t.grad)),
            sorted(n for n in attributes if not n.startswith("_")) if attributes else [])


def _bytes_in(t: Tensor) -> Tensor | bytes:
    """Returns a copy of the storage, of a very large one of the elements alone. Bytes where the
    processor can read them: they are copied and compared faster than a tensor."""
    storage = t.untyped_storage()
    if storage.nbytes() > MAX_BYTES:
        return t.detach().contiguous().reshape(-1).view(torch.uint8).clone()
    if storage.device.type == "cpu":
        return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).clone()


def _equal_bytes(a: Tensor | bytes, b: Tensor | bytes) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


# Poisoned memory.

@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills fresh memory with NaN and the largest integers, so that unwritten elements show."""
    settings: Any = torch.utils.deterministic
    was_deterministic, was_filled = (torch.are_deterministic_algorithms_enabled(),
                                     settings.fill_uninitialized_memory)
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # the public one imports torch's compiler
    set_deterministic: Any = torch._C._set_deterministic_algorithms
    set_deterministic(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        set_deterministic(was_deterministic, warn_only=was_warn_only)
        settings.fill_uninitialized_memory = was_filled


def guarded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies each tensor, with its strides, between margins of NaN (integers: -1).

    Gaps between elements hold NaN too. A read beside an input then shows in the result, a write
    beside it in the snapshot. Before an index that begins within a tensor there is another one, as
    before the targets of all tokens but the first. A tensor that is passed twice stays one tensor;
    one that spans gigabytes is not copied.
    """
    by_id: dict[int, Tensor] = {}
    return {name: by_id.setdefault(id(v), _guarded(v)) if isinstance(v, Tensor) else v
            for name, v in values.items()}


def _guarded(t: Tensor) -> Tensor:
    aligned = max(64 // t.element_size(), 1)
    # as aligned as it was
    margin = MARGIN_BYTES // t.element_size() + int(t.storage_offset()) % aligned
    span = _span(t)
    if span > MAX_BYTES:
        return t
    storage = _poisoned(span + 2 * margin, t)
    if int(t.storage_offset()) % aligned and _is_index(t):     # a part, of which no more is told
        storage[:margin] = t.detach().flatten()[0]
    view = storage.as_strided(t.shape, t.stride(), margin)
    if 0 in t.stride() and t.numel() > 1:      # expanded: several indices share an element
        storage[margin:margin + span].copy_(t.detach().as_strided((span,), (1,),
                                                                  t.storage_offset()))
    else:
        view.copy_(t.detach())
    return view.requires_grad_() if t.requires_grad else view


def _is_index(t: Tensor) -> bool:
    return t.dtype in (torch.int32, torch.int64)


def _span(t: Tensor) -> int:
    """Returns the number of elements from the first to the last in memory."""
    return 1 + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride())) if t.numel() else 0


def _poisoned(size: int, like: Tensor) -> Tensor:
    """Returns memory filled with NaN, -1, 255 or True."""
    storage = torch.empty(size, dtype=like.dtype, device=like.device)
    if like.dtype.itemsize == 1 and like.is_floating_point():
        storage.view(torch.uint8).fill_(0x7F if like.dtype in (torch.float8_e4m3fn,
                                                               torch.float8_e5m2) else 0xFF)
    elif like.is_floating_point() or like.is_complex():
        storage.fill_(torch.nan)
    elif like.dtype in (torch.bool, torch.uint8):
        storage.fill_(1 if like.dtype == torch.bool else 255)
    else:
        storage.fill_(-1)
    return storage


class GuardedResults(TorchDispatchMode):
    """Moves the fresh results of every torch operation between margins of a pattern: a kernel that
    allocates with torch and writes beside what it allocated writes there."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded: list[tuple[str, Tensor, int]] = []       # operation, storage, bytes inside

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                           # what skips it imports torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        addresses = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs))
                 if isinstance(t, Tensor) and t.layout == torch.strided}
        return tree_map_only(Tensor, lambda t: self._move(str(func), t, addresses), results)

    def _move(self, name: str, t: Tensor, addresses: set[int]) -> Tensor:
        if (type(t) is not Tensor or t.layout != torch.strided or t.device.type != "cpu"
                or not t.numel() or _span(t) > 1 << 22 or 0 in t.stride()
                or t.untyped_storage().data_ptr() in addresses):
            return t
        size = _span(t) * t.element_size()
        storage = torch.full((size + 2 * MARGIN_BYTES,), PATTERN, dtype=torch.uint8)
        inside = storage[MARGIN_BYTES:MARGIN_BYTES + size].view(t.dtype)
        moved = torch.empty(0, dtype=t.dtype).set_(
            storage.untyped_storage(), inside.storage_offset(), t.shape, t.stride())
        self.guarded.append((name, storage, size))
        return moved.copy_(t)

    def find_overruns(self) -> Iterator[str]:
        for name, storage, size in self.guarded:
            margins = storage[:MARGIN_BYTES], storage[MARGIN_BYTES + size:]
            if any(bool((margin != PATTERN).any()) for margin in margins):
                yield f"the memory beside the result of {name} was written"


def with_layout(t: Tensor, layout: str) -> Tensor | None:
    """Copies a tensor to another layout; None where that makes no difference.

    sparse: every second element of a row; padded: rows with space behind them; spaced: every second
    item of the first dimension, as keys and values that lie in one pool; transposed: the last two
    dimensions exchanged in memory; transposed part: with space behind the columns too, as of one of
    several weights that lie in one; offset: starts one element late.
    """
    if not t.numel() or t.dim() == 0:
        return None
    shape = tuple(t.shape)
    if layout == "sparse":
        between = _poisoned(2 * t.numel(), t)
        if _is_index(t):
            between.zero_()                    # an index: what reads it goes on, and is wrong
        other = between.view(*shape, 2)[..., 0]
    elif layout == "padded":
        width = shape[-1] + 3
        other = _poisoned(t.numel() // shape[-1] * width,
                          t).view(*shape[:-1], width)[..., :shape[-1]]
    elif layout == "spaced":
        other = _poisoned(2 * t.numel(), t).view(shape[0], 2, *shape[1:])[:, 0]
    elif layout.startswith("transposed"):
        if t.dim() < 2:
            return None
        height = shape[-2] + (5 if layout == "transposed part" else 0)
        whole = _poisoned(t.numel() // shape[-2] * height, t).view(*shape[:-2], shape[-1], height)
        other = whole[..., :shape[-2]].transpose(-1, -2)
    else:
        other = _poisoned(t.numel() + 1, t)[1:].view(shape)
    if other.stride() == t.stride() and layout != "offset":
        return None
    other.copy_(t.detach())
    return other.requires_grad_() if t.requires_grad else other


def with_distant_rows(t: Tensor) -> Tensor | None:
    """Copies a tensor to rows that span 2^31 elements, so that offsets exceed 32 bits; on a CPU
    2^32, so that unsigned ones do. Only written pages take memory."""
    if t.dim() < 2 or t.shape[0] < 2 or not t.numel():
        return None
    row_stride = (1 << (32 if t.device.type == "cpu" else 31)) // (t.shape[0] - 1) + t[0].numel()
    storage = address_space((t.shape[0] - 1) * row_stride + t[0].numel(), t)
    if storage is None:
        return None
    inner = t[0].contiguous().stride()
    distant = storage.as_strided(t.shape, (row_stride, *inner))
    return distant.copy_(t)


def address_space(size: int, like: Tensor) -> Tensor | None:
    """Returns memory of which only the pages that are written exist; None if there is none."""
    if like.device.type != "cpu":
        free, _ = torch.cuda.mem_get_info() if like.device.type == "cuda" else (0, 0)
        return (torch.empty(size, dtype=like.dtype, device=like.device)
                if size * like.element_size() < free // 2 else None)
    try:
        # no swap is reserved for it: a machine with little memory has the addresses too
        pages = mmap.mmap(-1, size * like.element_size(), flags=mmap.MAP_PRIVATE
                          | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except (OSError, ValueError, AttributeError):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = torch.frombuffer(pages, dtype=torch.uint8)
    return flat.view(like.dtype)


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Refuses this process more than so many bytes beyond what it has, where the system can: a
    kernel that copies memory of which few pages exist fails, and nothing is killed for it."""
    try:
        import resource  # not on every system
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    except (ImportError, OSError, StopIteration):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + more
    if soft not in (resource.RLIM_INFINITY, -1) and soft < wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
