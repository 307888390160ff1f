"""Launches rows.cu: a weight of halves times 1 to 16 rows of x."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiler
from ..compiler import Machine
from .planes import MAX_SPLIT

HEIGHT, UNIT = 16, 64                          # rows and inputs of what a warp multiplies at once
UNIT_BYTES = HEIGHT * UNIT * 2
# Units of a warp, times tiles of eight rows of x: so many of x are in its registers.
MAX_UNITS = 8
WARPS, MIN_STAGES = 8, 3
# Most of a multiprocessor's: blocks of the next product begin as these end, and small kernels
# between the two run beside either. With those of an attention (attention/token.cu) it is less than
# 196 KB: the driver then leaves 60 KB to the L1 cache, through which x comes, in place of 28.
SHARED = 172 << 10
_PARAMS = struct.Struct("@4P2q3i")


class Config(NamedTuple):
    split: int = 1             # thread blocks that split the inputs
    stages: int = 0            # units in flight per warp; 0: as many as fit
    warps: int = WARPS
    slots: int = 0             # tiles between sums over the warps; 0: as many as keep them busy
    blocks: int = 1            # thread blocks per multiprocessor


class Shape(NamedTuple):
    """The problem that a configuration is for. `columns`: tiles of eight rows of x."""

    columns: int
    n: int
    k: int
    gated: bool = False        # the weight has 2 n rows

    @property
    def tiles(self) -> int:
        return -(-self.n // (HEIGHT // 2 if self.gated else HEIGHT))

    def units(self, cfg: Config) -> int:
        """Returns the most units that a warp has of a tile."""
        return -(-self.k // (UNIT * cfg.warps * cfg.split))

    def sums_bytes(self, cfg: Config) -> int:
        """Returns the memory for sums of warps, twice, and of the tiles that a cluster adds up."""
        kept = max(1, 8 // cfg.slots) * cfg.slots if cfg.split > 1 else 0
        return self.columns * 8 * 4 * (2 * cfg.slots * cfg.warps * 20 + kept * HEIGHT)

    def shared(self, cfg: Config) -> int:
        return cfg.warps * cfg.stages * UNIT_BYTES + self.sums_bytes(cfg)


@lru_cache(maxsize=4096)
def config(shape: Shape, machine: Machine) -> Config:
    cfg = Config()
    # x must fit into registers, by more warps rather than by more blocks if their rings fit too,
    # and no multiprocessor be idle
    more = cfg._replace(warps=2 * WARPS)
    if (shape.units(cfg) * shape.columns > MAX_UNITS
            and with_stages(shape, more, machine).stages >= MIN_STAGES):
        cfg = more
    while cfg.split < MAX_SPLIT and (
            shape.units(cfg) * shape.columns > MAX_UNITS
            or (2 * cfg.split * shape.tiles <= machine.processors and shape.units(cfg) > 1)):
        cfg = cfg._replace(split=2 * cfg.split)
    return cfg


def with_stages(shape: Shape, cfg: Config, machine: Machine) -> Config:
    cfg = cfg._replace(slots=cfg.slots or max(1, 2 // shape.columns))
    room = min(SHARED, machine.shared) // cfg.blocks - shape.sums_bytes(cfg)
    return cfg._replace(stages=cfg.stages or room // (cfg.warps * UNIT_BYTES))


def clusters(shape: Shape, resident: int) -> int:
    """Returns how many clusters share the tiles evenly, at most so many."""
    rounds = -(-shape.tiles // resident)
    return -(-shape.tiles // rounds)


class Launch(NamedTuple):
    run: Any
    grid: tuple[int, int, int]


def _macros(shape: Shape, dtype: torch.dtype, wide: bool, cfg: Config) -> compiler.Macros:
    return (("BF16", int(dtype == torch.bfloat16)), ("WIDE", int(wide)),
            ("COLUMNS", shape.columns), ("COUNT", shape.units(cfg)), ("GATED", int(shape.gated)),
            ("WARPS", cfg.warps), ("SPLIT", cfg.split), ("STAGES", cfg.stages),
            ("SLOTS", cfg.slots), ("BLOCKS", cfg.blocks))


@lru_cache(maxsize=4096)
def _prepare(shape: Shape, dtype: torch.dtype, wide: bool, machine: Machine,
             chosen: Config | None) -> Launch:
    cfg = with_stages(shape, chosen or config(shape, machine), machine)
    macros = _macros(shape, dtype, wide, cfg)
    run = compiler.kernel("linear/rows.cu", "rows", macros, cfg.warps * 32, shape.shared(cfg),
                          cfg.split)
    resident = cfg.blocks * machine.processors // cfg.split
    if cfg.split > 1:                                      # others would run after all of these
        resident = min(resident, run.resident_clusters())
    return Launch(run, (clusters(shape, max(1, resident)) * cfg.split, 1, 1))


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Config | None = None,
           dtype: torch.dtype | None = None, gated: bool = False) -> Tensor:
    """`chosen` overrides the configuration, for benchmarks. `dtype`: of the result, that of x by
    default, or float32. `gated`: the weight is that of gate and then that of up, and the result
    silu(gate) * up."""
    (n, k), dtype = weight.shape, dtype or x.dtype
    n = n // 2 if gated else n
    flat = x.reshape(-1, k)
    rows = flat.shape[0]
    if flat.stride(1) != 1 or (rows > 1 and flat.stride(0) % 8) or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)
    out = torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
    prepared = _prepare(Shape(-(-rows // 8), n, k, gated), x.dtype, dtype == torch.float32,
                        compiler.machine_of(x.device), chosen)
    prepared.run.launch(prepared.grid, _PARAMS, flat, weight, bias, out, flat.stride(0),
                        weight.stride(0), rows, n, k)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return launch(x, weight, bias)
