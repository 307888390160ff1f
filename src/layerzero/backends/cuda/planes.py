"""How planes.cu is launched: int4 weights in groups of 128 inputs, of multiples of that or of whole rows, times one row
of x. gemv.py, which has all other products, comes here for these."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compiler
from .compiler import Machine

SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_WARPS, MOST_OWN = 16, 2             # of a multiprocessor, and pairs of blocks whose planes fit the registers
MOST_SPLIT = 8                             # blocks of a cluster
MOST_SLOTS = 32

_PARAMS = struct.Struct("@6P3i")


class Config(NamedTuple):
    warps: int
    own: int = 1               # pairs of blocks of 128 inputs of a warp
    split: int = 1             # thread blocks that share the inputs
    blocks: int = 1            # thread blocks for each multiprocessor
    slots: int = 0             # tiles between two sums over the warps; 0: all of a thread block, up to MOST_SLOTS

    @property
    def pairs(self) -> int:
        return self.warps * self.own * self.split

    @property
    def shared(self) -> int:
        places, pitch = self.slots * 16, 20 if self.warps > 8 else 12 if self.warps > 4 else 4
        return self.warps * self.own * 1024 + places * pitch * 4 + (places * 4 if self.split > 1 else 0)


class Shape(NamedTuple):
    """What all of a kernel's numbers follow from. `group`: 0 where a row of the weight has one scale."""

    n: int
    k: int
    group: int
    zeros: bool

    @property
    def tiles(self) -> int:
        return -(-self.n // 16)


def clusters(tiles: int, split: int, blocks: int, processors: int) -> int:
    """No more than run at once. Large ones cannot use what is left over of a GPC's 16 or 18 multiprocessors."""
    if split > 2:
        processors = max(8, processors // 8 * 8)
    return max(1, min(tiles, blocks * processors // split))


def takes(rows: int, k: int, format: str, group: int) -> bool:
    return rows == 1 and format == "int4" and group % 128 == 0 and k <= 256 * MOST_WARPS * MOST_OWN * MOST_SPLIT


@lru_cache(maxsize=4096)
def config(shape: Shape, machine: Machine) -> Config:
    pairs, split = -(-shape.k // 256), 1
    # The planes of x stay in registers, and no multiprocessor should be without work.
    while pairs > MOST_WARPS * MOST_OWN * split or (2 * split * shape.tiles <= machine.processors
                                                      and pairs >= 8 * split and split < MOST_SPLIT):
        split *= 2
    own = -(-pairs // (MOST_WARPS * split))
    warps = -(-pairs // (own * split))
    return Config(warps, own, split, MOST_WARPS // warps)


def with_slots(shape: Shape, made: Config, machine: Machine) -> Config:
    if made.slots:
        return made
    each = -(-shape.tiles // clusters(shape.tiles, made.split, made.blocks, machine.processors))
    return made._replace(slots=min(each + each % 2, MOST_SLOTS))


class Launch(NamedTuple):
    run: Any
    grid: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _prepared(shape: Shape, dtype: torch.dtype, scales: torch.dtype, machine: Machine, chosen: Config | None) -> Launch:
    made = with_slots(shape, chosen or config(shape, machine), machine)
    macros = (("BF16", int(dtype == torch.bfloat16)), ("GROUP", shape.group), ("ZEROS", int(shape.zeros)),
              ("SCALES", SCALES[scales]), ("WARPS", made.warps), ("COUNT", made.own), ("SPLIT", made.split),
              ("WHOLE", int(made.pairs * 256 == shape.k)), ("SLOTS", made.slots), ("BLOCKS", made.blocks))
    run = compiler.kernel("planes.cu", "planes", macros, made.warps * 32, made.shared, made.split)
    return Launch(run, (clusters(shape.tiles, made.split, made.blocks, machine.processors) * made.split, 1, 1))


def launch(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
           group: int, chosen: Config | None = None) -> None:
    """Into `out`. `x`: a row, aligned to 16 bytes. `group`: as in Shape. `chosen` is for measuring."""
    n, k = weight.shape[0], x.shape[-1]
    made = _prepared(Shape(n, k, group, zeros is not None), x.dtype, scales.dtype, compiler.machine_of(x.device),
                     chosen)
    made.run.launch(made.grid, _PARAMS, x, weight, scales, zeros, bias, out, n, k, scales.shape[1])
