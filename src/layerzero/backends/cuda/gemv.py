"""How gemv.cu is launched: linear layers whose weight is stored with few bits, for one to sixteen rows of x.
What planes.cu computes faster goes there."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compiler, planes
from .compiler import Machine
from .planes import MOST_SPLIT, SCALES, clusters

MOST_ROWS = 16
FORMATS = ("int4", "int8", "fp8_e4m3")
FEWEST_STAGES = 3
STAGES = {"int4": 5, "int8": 8, "fp8_e4m3": 8}          # the fastest on an H200; more are asked for before any is used

# What the bits of codes are put beside, twice: of 16 for int4, 128 and -128 for int8; of a sign for fp8. See gemv.cu.
BESIDE = {("int4", torch.bfloat16): (0x41804180, 0), ("int4", torch.float16): (0x4C004C00, 0),
          ("int8", torch.bfloat16): (0x43004300, 0xC300C300), ("int8", torch.float16): (0x58005800, 0xD800D800),
          ("fp8_e4m3", torch.bfloat16): (0, 0x80008000), ("fp8_e4m3", torch.float16): (0, 0x80008000)}

_PARAMS = struct.Struct("@6Pq9i2I")


class Config(NamedTuple):
    warps: int
    parts: int                 # warps that share the inputs; the others have other rows of the weight
    stages: int                # blocks of the weight (1 KiB, or 2 if tall) that each warp has on their way
    split: int = 1             # thread blocks that share the inputs
    blocks: int = 1            # thread blocks for each multiprocessor
    tall: int = 1              # 16 rows of the weight in a tile, or twice that
    slots: int = 0             # tiles between two sums over the warps, a multiple of warps / parts; 0: as fit


class Shape(NamedTuple):
    """What all of a kernel's numbers follow from. `group`: 0 where a row of the weight has one scale."""

    rows: int                  # the next power of two
    n: int
    k: int
    format: str
    group: int
    scale_size: int            # bytes
    zeros: bool

    @property
    def block(self) -> int:
        """Inputs that four lanes of a warp take at once."""
        return 128 if self.format == "int4" else 64

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    @property
    def columns(self) -> int:
        """Tiles of eight columns: a row of x has one column for each group of a block."""
        return -(-self.rows * (self.block // self.group if 0 < self.group < self.block else 1) // 8)

    def x_bytes(self, split: int) -> int:
        return -(-self.blocks // split) * (self.rows * self.block * 2 + self.columns * 32) + 64

    def pieces(self, made: Config, size: int) -> int:
        """Pieces of 16 bytes that hold what each part needs of a row of scales or zeros of so many bytes each."""
        group = self.group or self.k
        along, most = -(-self.k // group), 0
        for rank in range(made.split):
            start = self.blocks * rank // made.split
            span = self.blocks * (rank + 1) // made.split - start
            for part in range(made.parts):
                first = (start + span * part // made.parts) * self.block // group
                end = min(along, -(-(start + span * (part + 1) // made.parts) * self.block // group))
                before = 16 - size if along * size % 16 else first * size % 16
                most = max(most, -(-(before + (end - first) * size) // 16))
        return most

    def lines(self, made: Config) -> tuple[int, int, int]:
        """Pieces of a row of scales, of zeros, and how many tiles' must be kept."""
        shortest = self.blocks // made.split // made.parts
        return (self.pieces(made, self.scale_size) if self.group else 0, self.pieces(made, 1) if self.zeros else 0,
                -(-made.stages // shortest) + 1)

    def shared(self, made: Config) -> int:
        height = 16 * made.tall
        sums = made.slots * (made.parts * made.tall * self.rows * 20 + 16) * 4
        totals = made.slots * height * self.rows * 4 if made.split > 1 else 0
        scales, zeros, ahead = self.lines(made)
        line = sum((many | 1) * 16 for many in (scales, zeros) if many)
        return (self.x_bytes(made.split) + sums + totals
                + made.warps * (made.stages * made.tall * 1024 + ahead * height * line))


def with_slots(shape: Shape, made: Config, machine: Machine) -> Config:
    """As many as a thread block has tiles, if there is room for that."""
    if made.slots:
        return made
    teams, tiles = made.warps // made.parts, -(-shape.n // (16 * made.tall))
    most = max(1, 2 * made.parts // made.tall)             # with a thread for each row of the weight
    turns = min(most, -(-tiles // clusters(tiles, made.split, made.blocks, machine.processors) // teams))
    while turns > 1 and shape.shared(made._replace(slots=turns * teams)) > machine.shared // made.blocks:
        turns -= 1
    return made._replace(slots=turns * teams)


@lru_cache(maxsize=4096)
def config(shape: Shape, machine: Machine) -> Config:
    tiles, split = -(-shape.n // 16), 1
    # Reading x should take no time beside the weight, and no multiprocessor should be without work.
    while split < MOST_SPLIT and shape.blocks >= 4 * split and (
            shape.x_bytes(split) > machine.shared // 3
            or (2 * split * tiles <= machine.processors and shape.blocks >= 16 * split)):
        split *= 2
    while True:
        made = _config(shape, tiles, split, machine)
        if made.stages >= FEWEST_STAGES or split == MOST_SPLIT or shape.blocks < 2 * split:
            return made
        split *= 2                                         # the scales did not fit


def _config(shape: Shape, tiles: int, split: int, machine: Machine) -> Config:
    warps = 16 if shape.columns <= 2 and shape.format == "int4" else 8
    parts = 1                                              # each with eight blocks or more: scales that fill a sector
    while parts < warps and parts * 16 * split <= shape.blocks:
        parts *= 2
    each = -(-tiles // clusters(tiles, split, 1, machine.processors))
    while warps > parts and warps // parts >= 2 * each:    # more tiles at a time than there are
        if 2 * parts * split <= shape.blocks:
            parts *= 2
        else:
            warps //= 2
    made = Config(warps, parts, STAGES[shape.format], split)
    while made.stages > 1 and shape.shared(with_slots(shape, made, machine)) > machine.shared:
        if made.stages <= FEWEST_STAGES and made.warps > parts:
            made = made._replace(warps=made.warps // 2)
        else:
            made = made._replace(stages=made.stages - 1)
    return made


class Launch(NamedTuple):
    run: Any
    grid: tuple[int, int, int]
    lines: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _prepared(shape: Shape, dtype: torch.dtype, scales: torch.dtype, machine: Machine, chosen: Config | None) -> Launch:
    made = with_slots(shape, chosen or config(shape, machine), machine)
    macros = (("BF16", int(dtype == torch.bfloat16)), ("FORMAT", FORMATS.index(shape.format)), ("ROWS", shape.rows),
              ("GROUP", shape.group), ("ZEROS", int(shape.zeros)), ("SCALES", SCALES[scales]), ("WARPS", made.warps),
              ("PARTS", made.parts), ("TALL", made.tall), ("STAGES", made.stages), ("SLOTS", made.slots),
              ("SPLIT", made.split), ("BLOCKS", made.blocks))
    run = compiler.kernel("gemv.cu", "gemv", macros, made.warps * 32, shape.shared(made), made.split)
    many = clusters(-(-shape.n // (16 * made.tall)), made.split, made.blocks, machine.processors)
    return Launch(run, (many * made.split, 1, 1), shape.lines(made))


def _in_pieces(t: Tensor) -> Tensor:
    """The kernel reads 16 bytes at a time, and all of them must be there."""
    if t.data_ptr() % 16 == 0 and t.nbytes % 16 == 0:
        return t
    return torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 16))


def launch(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, format: str,
           group_size: int, chosen: Config | None = None) -> Tensor:
    """`chosen` is for measuring, of gemv.cu."""
    k, n = x.shape[-1], weight.shape[0]
    flat = x.reshape(-1, k)
    rows, groups = flat.shape[0], scales.shape[1]
    if flat.stride(1) != 1 or (rows > 1 and flat.stride(0) % 8) or flat.data_ptr() % 16:
        flat = flat.clone(memory_format=torch.contiguous_format)
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    group = 0 if group_size >= k else group_size
    if chosen is None and planes.takes(rows, k, format, group):
        planes.launch(out, flat, weight, scales, zeros, bias, group)
        return out
    shape = Shape(1 << (rows - 1).bit_length(), n, k, format, group, scales.element_size(), zeros is not None)
    made = _prepared(shape, x.dtype, scales.dtype, compiler.machine_of(x.device), chosen)
    scales, zeros = _in_pieces(scales), None if zeros is None else _in_pieces(zeros)
    made.run.launch(made.grid, _PARAMS, flat, weight, scales, zeros, bias, out, flat.stride(0), rows, n, k, groups,
                    made.lines[0], made.lines[1], scales.nbytes // 16, 0 if zeros is None else zeros.nbytes // 16,
                    made.lines[2], *BESIDE[format, x.dtype])
    return out


def quantized_linear(x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
                     bias: Tensor | None = None, *, format: str, group_size: int = 0) -> Tensor:
    return launch(x, weight_q, scales, zeros, bias, format, group_size)
