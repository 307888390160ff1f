"""Launches planes.cu for gemv.py: one row of x times int4 weights in groups of n * 128 inputs."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiler
from ..compiler import Machine

SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# per multiprocessor; pairs of blocks whose planes fit into registers
MAX_WARPS, MAX_PAIRS_PER_WARP = 16, 2
MAX_SPLIT = 8                  # cluster size
MAX_SLOTS = 32

_PARAMS = struct.Struct("@6P3i")


class Config(NamedTuple):
    warps: int
    own: int = 1               # pairs of blocks of 128 inputs per warp
    split: int = 1             # thread blocks that split the inputs
    blocks: int = 1            # thread blocks per multiprocessor
    # tiles between reductions over the warps; 0: all of a thread block, up to MAX_SLOTS
    slots: int = 0

    @property
    def pairs(self) -> int:
        return self.warps * self.own * self.split

    @property
    def shared(self) -> int:
        places, pitch = self.slots * 16, 20 if self.warps > 8 else 12 if self.warps > 4 else 4
        return self.warps * self.own * 1024 + places * pitch * 4 + (places * 4 if self.split > 1
                                                                    else 0)


class Shape(NamedTuple):
    """The problem that a configuration is for. `group`: 0 if a row of the weight has one scale."""

    n: int
    k: int
    group: int
    zeros: bool

    @property
    def tiles(self) -> int:
        return -(-self.n // 16)


def clusters(tiles: int, split: int, blocks: int, processors: int) -> int:
    """Returns the number of clusters, at most as many as there are multiprocessors for."""
    return max(1, min(tiles, blocks * processors // split))


def is_supported(rows: int, k: int, format: str, group: int) -> bool:
    return (rows == 1 and format == "int4" and group % 128 == 0
            and k <= 256 * MAX_WARPS * MAX_PAIRS_PER_WARP * MAX_SPLIT)


@lru_cache(maxsize=4096)
def config(shape: Shape, machine: Machine) -> Config:
    pairs, split = -(-shape.k // 256), 1
    # The planes of x stay in registers, and no multiprocessor should be idle.
    while (pairs > MAX_WARPS * MAX_PAIRS_PER_WARP * split
           or (2 * split * shape.tiles <= machine.processors
                                                       and pairs >= 8 * split
               and split < MAX_SPLIT)):
        split *= 2
    own = -(-pairs // (MAX_WARPS * split))
    warps = -(-pairs // (own * split))
    return Config(warps, own, split, MAX_WARPS // warps)


def with_slots(shape: Shape, cfg: Config, machine: Machine) -> Config:
    if cfg.slots:
        return cfg
    each = -(-shape.tiles // clusters(shape.tiles, cfg.split, cfg.blocks, machine.processors))
    return cfg._replace(slots=min(each + each % 2, MAX_SLOTS))


class Launch(NamedTuple):
    run: Any
    grid: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _prepare(shape: Shape, dtype: torch.dtype, scales: torch.dtype, machine: Machine,
             chosen: Config | None) -> Launch:
    cfg = with_slots(shape, chosen or config(shape, machine), machine)
    macros = (("BF16", int(dtype == torch.bfloat16)), ("GROUP", shape.group),
              ("ZEROS", int(shape.zeros)), ("SCALES", SCALES[scales]), ("WARPS", cfg.warps),
              ("COUNT", cfg.own), ("SPLIT", cfg.split), ("WHOLE", int(cfg.pairs * 256 == shape.k)),
              ("SLOTS", cfg.slots), ("BLOCKS", cfg.blocks))
    run = compiler.kernel("linear/planes.cu", "planes", macros, cfg.warps * 32, cfg.shared,
                          cfg.split)
    count = clusters(shape.tiles, cfg.split, cfg.blocks, machine.processors)
    if cfg.split > 1:                                      # others would run after all of these
        count = min(count, run.resident_clusters())
    return Launch(run, (count * cfg.split, 1, 1))


def launch(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None,
           bias: Tensor | None, group: int, chosen: Config | None = None) -> None:
    """Writes to `out`. `x`: a row, aligned to 16 bytes. `chosen` is for benchmarks."""
    n, k = weight.shape[0], x.shape[-1]
    prepared = _prepare(Shape(n, k, group, zeros is not None), x.dtype, scales.dtype,
                        compiler.machine_of(x.device), chosen)
    prepared.run.launch(prepared.grid, _PARAMS, x, weight, scales, zeros, bias, out, n, k,
                        scales.shape[1])
