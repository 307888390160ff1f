"""Launches gemv.cu, or planes.cu where that is faster: quantized linear layers for 1 to 16 rows."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiler
from ..compiler import Machine
from . import planes
from .planes import MAX_SPLIT, SCALES, clusters

MAX_ROWS = 16
FORMATS = ("int4", "int8", "fp8_e4m3")
MIN_STAGES = 3
STAGES = {"int4": 5, "int8": 8, "fp8_e4m3": 8}             # the fastest on an H200

# Bits that are combined with those of codes, in both halves: exponents of 16 for int4, of 128 and
# -128 for int8, and the sign bit for fp8. See gemv.cu.
CODE_BITS = {("int4", torch.bfloat16): (0x41804180, 0), ("int4", torch.float16): (0x4C004C00, 0),
             ("int8", torch.bfloat16): (0x43004300, 0xC300C300),
             ("int8", torch.float16): (0x58005800, 0xD800D800),
             ("fp8_e4m3", torch.bfloat16): (0, 0x80008000),
             ("fp8_e4m3", torch.float16): (0, 0x80008000)}

_PARAMS = struct.Struct("@6Pq9i2I")


class Config(NamedTuple):
    warps: int
    # warps that split the inputs; the others have other rows of the weight
    parts: int
    stages: int                # blocks of the weight (1 KiB, or 2 if tall) in flight per warp
    split: int = 1             # thread blocks that split the inputs
    blocks: int = 1            # thread blocks per multiprocessor
    tall: int = 1              # 16 rows of the weight in a tile, or twice that
    # tiles between reductions over the warps, a multiple of warps / parts; 0: as many as fit
    slots: int = 0


class Shape(NamedTuple):
    """The problem that a configuration is for. `group`: 0 if a row of the weight has one scale."""

    rows: int                  # rounded up to a power of two
    n: int
    k: int
    format: str
    group: int
    scale_size: int            # bytes
    zeros: bool

    @property
    def block(self) -> int:
        """Inputs that four lanes of a warp read at once."""
        return 128 if self.format == "int4" else 64

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    @property
    def columns(self) -> int:
        """Tiles of eight columns: a row of x has one column per group of a block."""
        return -(-self.rows * (self.block // self.group if 0 < self.group < self.block else 1) // 8)

    def x_bytes(self, split: int) -> int:
        return -(-self.blocks // split) * (self.rows * self.block * 2 + self.columns * 32) + 64

    def pieces(self, cfg: Config, size: int) -> int:
        """Returns the most 16-byte pieces of a row of scales or zeros that a part needs."""
        group = self.group or self.k
        along, most = -(-self.k // group), 0
        for rank in range(cfg.split):
            start = self.blocks * rank // cfg.split
            span = self.blocks * (rank + 1) // cfg.split - start
            for part in range(cfg.parts):
                first = (start + span * part // cfg.parts) * self.block // group
                end = min(along, -(-(start + span * (part + 1) // cfg.parts) * self.block // group))
                before = 16 - size if along * size % 16 else first * size % 16
                most = max(most, -(-(before + (end - first) * size) // 16))
        return most

    def lines(self, cfg: Config) -> tuple[int, int, int]:
        """Returns the pieces of a row of scales and of zeros, and how many tiles' are kept."""
        shortest = self.blocks // cfg.split // cfg.parts
        return (self.pieces(cfg, self.scale_size) if self.group else 0, self.pieces(cfg, 1)
                if self.zeros else 0,
                -(-cfg.stages // shortest) + 1)

    def shared(self, cfg: Config) -> int:
        height = 16 * cfg.tall
        sums = cfg.slots * (cfg.parts * cfg.tall * self.rows * 20 + 16) * 4
        totals = cfg.slots * height * self.rows * 4 if cfg.split > 1 else 0
        scales, zeros, tiles_kept = self.lines(cfg)
        line = sum((many | 1) * 16 for many in (scales, zeros) if many)
        return (self.x_bytes(cfg.split) + sums + totals
                + cfg.warps * (cfg.stages * cfg.tall * 1024 + tiles_kept * height * line))


def with_slots(shape: Shape, cfg: Config, machine: Machine) -> Config:
    """Sets `slots` to the number of tiles of a thread block, if they fit."""
    if cfg.slots:
        return cfg
    teams, tiles = cfg.warps // cfg.parts, -(-shape.n // (16 * cfg.tall))
    most = max(1, 2 * cfg.parts // cfg.tall)               # one thread per row of the weight
    turns = min(most,
                -(-tiles // clusters(tiles, cfg.split, cfg.blocks, machine.processors) // teams))
    while (turns > 1 and shape.shared(cfg._replace(slots=turns * teams)) > machine.shared
           // cfg.blocks):
        turns -= 1
    return cfg._replace(slots=turns * teams)


@lru_cache(maxsize=4096)
def config(shape: Shape, machine: Machine) -> Config:
    tiles, split = -(-shape.n // 16), 1
    # Reading x should be negligible beside the weight, and no multiprocessor idle.
    while split < MAX_SPLIT and shape.blocks >= 4 * split and (
            shape.x_bytes(split) > machine.shared // 3
            or (2 * split * tiles <= machine.processors and shape.blocks >= 16 * split)):
        split *= 2
    while True:
        cfg = _config(shape, tiles, split, machine)
        if cfg.stages >= MIN_STAGES or split == MAX_SPLIT or shape.blocks < 2 * split:
            return cfg
        split *= 2                                         # the scales did not fit


def _config(shape: Shape, tiles: int, split: int, machine: Machine) -> Config:
    warps = 16 if shape.columns <= 2 and shape.format == "int4" else 8
    # eight blocks or more each, so that scales fill a sector
    parts = 1
    while parts < warps and parts * 16 * split <= shape.blocks:
        parts *= 2
    each = -(-tiles // clusters(tiles, split, 1, machine.processors))
    while warps > parts and warps // parts >= 2 * each:    # more teams than tiles
        if 2 * parts * split <= shape.blocks:
            parts *= 2
        else:
            warps //= 2
    cfg = Config(warps, parts, STAGES[shape.format], split)
    while cfg.stages > 1 and shape.shared(with_slots(shape, cfg, machine)) > machine.shared:
        if cfg.stages <= MIN_STAGES and cfg.warps > parts:
            cfg = cfg._replace(warps=cfg.warps // 2)
        else:
            cfg = cfg._replace(stages=cfg.stages - 1)
    return cfg


class Launch(NamedTuple):
    run: Any
    grid: tuple[int, int, int]
    lines: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _prepare(shape: Shape, dtype: torch.dtype, scales: torch.dtype, machine: Machine,
             chosen: Config | None) -> Launch:
    cfg = with_slots(shape, chosen or config(shape, machine), machine)
    macros = (("BF16", int(dtype == torch.bfloat16)), ("FORMAT", FORMATS.index(shape.format)),
              ("ROWS", shape.rows), ("GROUP", shape.group), ("ZEROS", int(shape.zeros)),
              ("SCALES", SCALES[scales]), ("WARPS", cfg.warps),
              ("PARTS", cfg.parts), ("TALL", cfg.tall), ("STAGES", cfg.stages),
              ("SLOTS", cfg.slots), ("SPLIT", cfg.split), ("BLOCKS", cfg.blocks))
    run = compiler.kernel("linear/gemv.cu", "gemv", macros, cfg.warps * 32, shape.shared(cfg),
                          cfg.split)
    cluster_count = clusters(-(-shape.n // (16 * cfg.tall)), cfg.split, cfg.blocks,
                             machine.processors)
    if cfg.split > 1:                                      # others would run after all of these
        cluster_count = min(cluster_count, run.resident_clusters())
    return Launch(run, (cluster_count * cfg.split, 1, 1), shape.lines(cfg))


def _pad_to_16_bytes(t: Tensor) -> Tensor:
    """Pads a tensor for a kernel that reads 16 bytes at a time."""
    if t.data_ptr() % 16 == 0 and t.nbytes % 16 == 0:
        return t
    return torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 16))


def launch(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
           format: str, group_size: int, chosen: Config | None = None) -> Tensor:
    """`chosen` overrides the configuration of gemv.cu, for benchmarks."""
    k, n = x.shape[-1], weight.shape[0]
    flat = x.reshape(-1, k)
    rows, groups = flat.shape[0], scales.shape[1]
    if flat.stride(1) != 1 or (rows > 1 and flat.stride(0) % 8) or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    group = 0 if group_size >= k else group_size
    if chosen is None and planes.is_supported(rows, k, format, group):
        planes.launch(out, flat, weight, scales, zeros, bias, group)
        return out
    shape = Shape(1 << (rows - 1).bit_length(), n, k, format, group, scales.element_size(),
                  zeros is not None)
    prepared = _prepare(shape, x.dtype, scales.dtype, compiler.machine_of(x.device), chosen)
    scales, zeros = _pad_to_16_bytes(scales), None if zeros is None else _pad_to_16_bytes(zeros)
    prepared.run.launch(prepared.grid, _PARAMS, flat, weight, scales, zeros, bias, out,
                        flat.stride(0), rows, n, k, groups, prepared.lines[0], prepared.lines[1],
                        scales.nbytes // 16, 0 if zeros is None else zeros.nbytes // 16,
                        prepared.lines[2], *CODE_BITS[format, x.dtype])
    return out


def quantized_linear(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
                     bias: Tensor | None = None, *, format: str, group_size: int = 0) -> Tensor:
    return launch(x, weight_q, scales, zeros, bias, format, group_size)
