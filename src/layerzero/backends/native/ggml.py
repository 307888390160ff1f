"""Linear layers with weights in ggml's formats, multiplied as bytes; see quant/linear.h.

A weight is packed once, its rows interleaved so that one vector load feeds several of them, and
kept beside the weight (see _packing.py), or for all processes in a sealed file of the cache folder,
which is named after the content of the weight and the layout, and mapped.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...files.paths import cache_dir
from ...files.sealed import SealedFolder
from ...ops.formulas.ggml import GGML_FORMATS
from ...spec.errors import DataError, warn_caller
from .._packing import PACKED
from . import build
from .declaration import DTYPES

# as quant/blocks.h numbers them
FORMATS = {f: i for i, f in enumerate(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k",
                                       "q6_k"))}


_HUGE_PAGE = 2 << 20                           # bytes, where the base page is of 4 KiB


def packed_bytes(weight_q: Tensor, format: str) -> int:
    outputs, row_bytes = weight_q.shape
    inputs = GGML_FORMATS[format].row_width(row_bytes)
    size: int = build.module().ggml_packed_bytes(FORMATS[format], outputs, inputs)
    return size


def pack_weight(weight_q: Tensor, format: str, memory: Tensor | None = None) -> Tensor:
    """Returns a weight (out_features, row_bytes) in the layout of this build, in memory aligned to
    cache lines: at the beginning of `memory`, or new, in huge pages if it is large."""
    size = packed_bytes(weight_q, format)
    if memory is None and size >= _HUGE_PAGE:
        memory = _pages(size)
    memory = torch.empty(size + 63, dtype=torch.uint8) if memory is None else memory
    packed = memory[-memory.data_ptr() % 64:][:size]
    build.module().ggml_pack(FORMATS[format], weight_q.data_ptr(), packed.data_ptr(),
                             len(weight_q), GGML_FORMATS[format].row_width(weight_q.shape[1]),
                             torch.get_num_threads())
    return packed


@lru_cache(maxsize=None)
def _tile_use() -> int:
    """Returns when tiles are used, as quant/linear.h numbers it: 0 never, 1 for rows enough."""
    return int("amx" not in build.disabled_isa())


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, format: str,
             out: Tensor | None = None, tiles: bool | None = None) -> Tensor:
    """Returns x times a packed weight, plus bias. `tiles`: whether tile instructions (AMX) are
    used where there are some; None: where x has rows enough, unless they are switched off."""
    out = x.new_empty((*x.shape[:-1], outputs)) if out is None else out
    return _multiply(x, packed, bias, out, format, _tile_use() if tiles is None else 2 * tiles)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, format: str,
              tiles: int) -> Tensor:
    *batch, inputs = x.shape
    if len(batch) != 1:
        x = x.contiguous()
    build.module().ggml_linear(
        FORMATS[format], DTYPES[x.dtype], x.data_ptr(), packed.data_ptr(),
        None if bias is None else bias.data_ptr(), out.data_ptr(), math.prod(batch), inputs,
        out.shape[-1], x.stride(0) if len(batch) == 1 else inputs, torch.get_num_threads(), tiles)
    return out


def packed_file(weight_q: Tensor, format: str) -> Tensor:
    """Returns a packed weight mapped from its file, which is written where there is none or one
    that is not trusted; a copy in memory where it cannot be written."""
    rows = weight_q.contiguous()
    digest = hashlib.sha256(rows.numpy().data)
    layout = f"{format}-{tuple(rows.shape)}-{Path(str(build.module().__file__)).parent.name}"
    digest.update(layout.encode())
    store, name = SealedFolder(cache_dir(), "packed"), f"{digest.hexdigest()}.bin"
    try:
        return _map_file(store, name)
    except (OSError, DataError):               # a damaged one is replaced
        packed = pack_weight(rows, format)
    try:
        store.write(packed.numpy().tobytes(), name)
        return _map_file(store, name)
    except (OSError, DataError) as e:          # a full disk, a folder that others can write
        # one text for all weights: it is shown once
        warn_caller(f"packed weights cannot be kept in {store.path()}: "
                    f"{e.strerror if isinstance(e, OSError) else e}. They stay in the memory of "
                    "this process alone; set LAYERZERO_CACHE_DIR to a folder that can be written",
                    RuntimeWarning)
        return packed


def _map_file(store: SealedFolder, name: str) -> Tensor:
    """Returns the content of a file that was checked against its seal, shared with all who map it.
    """
    file, content = store.open(name)
    try:
        del content
        return torch.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(file)


_PACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    f: partial(pack_weight, format=f) for f in FORMATS}
_SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    f: partial(packed_file, format=f) for f in FORMATS}


def packed_weight(weight_q: Tensor, format: str) -> Tensor:
    """Returns the packed copy that is kept beside a weight, or a new one where none is kept."""
    packer = _PACKERS[format]
    packed = PACKED.get(f"ggml {format}", packer, weight_q)
    return packer(weight_q) if packed is None else packed


def pack_model(weights: Sequence[tuple[Tensor, str]], shared: bool = False) -> Iterator[Tensor]:
    """Packs the weights of a model, with their formats, to be kept beside them; yields each when it
    is packed. They lie side by side in memory of their own, or in files, each in its own, for all
    processes."""
    sizes = [0 if shared else -(-packed_bytes(w, f) // 64) * 64 for w, f in weights]
    memory, start = None if shared else _pages(sum(sizes)), 0
    for (weight_q, format), size in zip(weights, sizes):
        packer: Callable[..., Tensor] = (_SHARED if shared else _PACKERS)[format]
        if memory is not None:
            packer = partial(pack_weight, format=format, memory=memory[start:])
        PACKED.get(f"ggml {format}", packer, weight_q)
        start += size
        yield weight_q


def _pages(nbytes: int) -> Tensor | None:
    """Returns fresh memory from the operating system, in huge pages where it has them, None where
    there is none; torch's allocator takes half as much again for tensors of these sizes."""
    if not nbytes or not hasattr(mmap, "MAP_PRIVATE"):
        return None
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):                # a kernel that has none
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def linear() -> Callable[..., Any]:
    build.module(), _tile_use()                # raise at load, not in a call

    def run(x: Tensor, weight_q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None,
            bias: Tensor | None = None, *, format: str, group_size: int = 0,
            activations: str = "q8") -> Tensor:
        out = x.new_empty((*x.shape[:-1], len(weight_q)))
        return _multiply(x, packed_weight(weight_q, format), bias, out, format, _tile_use())

    return run
