"""What step.cu is compiled with for a decoder, and how it is launched.

A `Shape` says what the decoder is, a `Config` how it is done; `problem` says why step.cu cannot do
it. All sizes of tiles, and where the parts of the shared memory and the words lie, are reckoned
here and given to the kernel as macros.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import compiler, tensor_maps
from ..compiler import CompiledCuda, Machine

LOG2E = 1.4426950408889634
ACTIVATIONS = ("swiglu", "geglu_tanh")
MAX_ROWS = 8               # of a weight in one tile
MAX_BATCH = 8
MAX_ROUNDS = 14            # barriers of a block that codes.h may use
NO_WINDOW = 1 << 62
LIMIT_S = 2.0              # what one launch may take before it gives up
# Pointers of a layer as step.cu's Layer has them, and its window; with the scales of codes; and the
# arguments of the kernel.
_LAYER, _CODED, _PARAMS = (struct.Struct(f) for f in ("@12Pq8x", "@16Pq8x", "@12PqQ2i4f"))
CODES = ("", "int4", "fp8_e4m3")
BLOCK, CODE_ROWS = 128, 16     # inputs that share a scale of int4; rows of codes in one tile,
BOX_ROWS = CODE_ROWS // 2      # and of one copy of them
TEAM = 2                       # warps that share a tile of codes


class Shape(NamedTuple):
    """A decoder whose layers are alike."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int                   # of a head
    half: int                  # pairs of a head that are turned
    inner: int
    vocab: int
    layers: int
    batch: int = 1
    bias: bool = False         # of the queries, keys and values
    head_norms: bool = False
    activation: str = "swiglu"
    codes: str = ""            # of the layers' weights: int4, fp8_e4m3, or none: bf16

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


class Config(NamedTuple):
    warps: int = 4             # that multiply; others copy
    stages: int = 12           # tiles of a block in shared memory; without codes a multiple of the
                               # warps
    flight: int = 12           # tiles that are being copied at a time,
    ahead: int = 2             # and before their phase has begun
    chunk: int = 128           # tokens of the cache that a block has at least
    tile: int = 16384          # bytes
    copiers: int = 1           # warps that copy
    first_polls: int = 8       # results that a thread asks for at a time, until they are there,
    later_polls: int = 8       # and after that
    one_loop: bool = False     # one code of the producer for all weights; not for codes
    stamps: bool = False       # keep the time of every phase, for a profile


class Tiles(NamedTuple):
    """A tile of a weight: some whole rows, or one row in slices."""

    rows: int
    slices: int


def plain_tiles(k: int, tile: int) -> Tiles:
    """Cuts a plain weight: where it costs little, into as many rows as gate and up have, which is
    less code."""
    if 4 * k <= tile:
        return Tiles(2 * gated_tiles(k, tile).rows, 1)
    return Tiles(1, 1 if 2 * k <= tile else _slices(k, tile))


def gated_tiles(k: int, tile: int) -> Tiles:
    """Cuts the weight of gate and up: rows are pairs, one of each; an even number, or one."""
    if 8 * k <= tile:
        return Tiles(min(MAX_ROWS // 2, tile // (4 * k)) // 2 * 2, 1)
    return Tiles(1, 1 if 4 * k <= tile else _slices(k, tile // 2))


def _slices(k: int, tile: int) -> int:
    units = k // 8
    return next(n for n in range(-(-2 * k // tile), units + 1) if units % n == 0)


def code_run(codes: str) -> int:
    """Returns the number of inputs that are the 128 bytes of a run."""
    return {"int4": 256, "fp8_e4m3": 128}[codes]


def code_blocks(k: int, slices: int, codes: str) -> int:
    """Returns the blocks of inputs of a slice of a row: whole runs."""
    unit = max(BLOCK, code_run(codes))
    return -(-(k // unit) // slices) * (unit // BLOCK)


def code_tile(blocks: int, codes: str) -> int:
    """Returns the bytes of a tile: its rows, and the scales of int4."""
    runs = blocks * BLOCK // code_run(codes)
    return CODE_ROWS * (runs * tensor_maps.RUN + (2 * blocks if codes == "int4" else 0))


def code_slices(k: int, shape: Shape, cfg: Config) -> int:
    """Returns the number of parts of rows of k inputs, which the teams of warps share evenly; 0:
    there are none."""
    codes, teams = shape.codes, cfg.warps // TEAM
    return next((n for n in range(1, k // BLOCK + teams)
                 if not (teams % n if n < teams else n % teams)
                 and code_tile(code_blocks(k, n, codes), codes) <= cfg.tile), 0)


def tiled_scales(scales: Tensor, k: int, slices: int, gated: bool) -> Tensor:
    """Returns scales (rows, groups) of int4 as the tiles have them: (tiles, slices, blocks of
    inputs, 8 rows, and those 8 later); of gate and up each tile has eight rows of either."""
    blocks = k // BLOCK
    each, half = code_blocks(k, slices, "int4"), CODE_ROWS // 2
    scales = scales.repeat_interleave(blocks // scales.shape[1], 1)
    if gated:
        scales = scales.view(2, -1, half, blocks).transpose(0, 1).flatten(0, 2)
    scales = F.pad(scales, (0, each * slices - blocks, 0, -len(scales) % CODE_ROWS))
    return scales.view(-1, 2, half, slices, each).permute(0, 3, 4, 2, 1).contiguous()


def boxed(dim: int) -> bool:
    """Are keys and values of such heads copied as boxes? As step.cu's BOXES."""
    return 2 * dim % tensor_maps.RUN == 0


def cached_tokens(dim: int, tile: int) -> int:
    """Returns the number of tokens of a tile of keys and values, in steps of 16 that the tensor
    cores take."""
    return tile // (2 * (2 * dim + (0 if boxed(dim) else 16))) // 16 * 16


def max_splits(shape: Shape, blocks: int) -> int:
    return max(1, min(64, blocks // (shape.batch * shape.kv_heads)))


class WordOffsets(NamedTuple):
    """The offsets of the words of a layer, in words, and their number."""

    QKV_AT: int
    PARTS_AT: int
    ATTENTION_AT: int
    MIDDLE_AT: int
    INNER_AT: int
    END_AT: int
    SET_WORDS: int


def word_offsets(shape: Shape, splits: int) -> WordOffsets:
    queries = shape.batch * shape.heads
    many = (shape.batch * shape.qkv, queries * splits * shape.dim // 2,
            queries * shape.dim // 2, shape.batch * shape.hidden, shape.batch * shape.inner // 2,
            shape.batch * shape.hidden)
    starts = [0]
    for n in many:
        starts.append(starts[-1] + -(-n // 16) * 16)
    return WordOffsets(*starts)


class SharedLayout(NamedTuple):
    """The offsets of the parts of shared memory, in bytes, and its size."""

    EVEN_AT: int
    ODD_AT: int
    RESIDUAL_AT: int
    BARRIERS_AT: int
    bytes: int


def shared_layout(shape: Shape, cfg: Config) -> SharedLayout:
    pitch, columns = 2 * shape.dim + 16, -(-shape.group // 8) * 8
    attention = columns * pitch + 4 * (shape.group + 2) * shape.dim + 4 * (cfg.warps + 1) * (
        shape.group * (shape.dim + 2))
    even = 2 * shape.batch * shape.hidden
    odd = max(2 * shape.batch * max(shape.heads * shape.dim, shape.inner), attention)
    starts = [cfg.stages * stage_bytes(shape, cfg)]
    for n in (even, odd, 4 * shape.batch * shape.hidden,
              16 * cfg.stages + 32 + 4 * shape.batch * cfg.warps
              + 2 * (_CODED if shape.codes else _LAYER).size
              + (_code_bytes(shape, cfg) if shape.codes else 0)):
        starts.append(starts[-1] + -(-n // 128) * 128)
    return SharedLayout(*starts)


def _code_bytes(shape: Shape, cfg: Config) -> int:
    """Returns the bytes of the sums by parts of the warps, and of the scales of either x."""
    longest = max(shape.hidden, shape.heads * shape.dim, shape.inner)
    return 4 * shape.batch * (code_rounds(cfg) * CODE_ROWS * cfg.warps + 2 * longest // BLOCK)


def code_rounds(cfg: Config) -> int:
    """Returns the rounds of tiles that warps may be apart, and one more, as codes.h has it."""
    return -(-cfg.stages // (cfg.warps // TEAM)) + 2


def stage_bytes(shape: Shape, cfg: Config) -> int:
    unit = tensor_maps.RUN * (tensor_maps.SWIZZLED if shape.codes or boxed(shape.dim) else 1)
    return -(-cfg.tile // unit) * unit


def grid_blocks(shape: Shape, cfg: Config, machine: Machine) -> int:
    """Returns the number of blocks. Each has a share of gate and up, without which a word could be
    overwritten before every block has read it."""
    pairs = BOX_ROWS if shape.codes else gated_tiles(shape.hidden, cfg.tile).rows
    return min(machine.processors, shape.inner // max(2, pairs))


def problem(shape: Shape, cfg: Config, machine: Machine) -> str | None:
    """Returns why step.cu cannot do it; None if it can."""
    values = max(2, gated_tiles(shape.hidden, cfg.tile).rows)
    for name, size, by in (
            ("hidden size", shape.hidden, 8), ("size of a head", shape.dim, 16),
            ("inner size", shape.inner, max(8, values)), ("queries of a layer", shape.heads
                                                          * shape.dim, 8)):
        if size % by:
            return f"its {name} is {size}, no multiple of {by}"
    codes = shape.codes
    for size in (shape.hidden, shape.heads * shape.dim, shape.inner) if codes else ():
        if size % (run := max(BLOCK, code_run(codes))) or not code_slices(size, shape, cfg):
            return f"rows of {size} inputs are no whole runs of {run} in a tile"
    if shape.activation not in ACTIVATIONS:
        return f"its feed-forward layers are {shape.activation}, not {' or '.join(ACTIVATIONS)}"
    if not 1 <= shape.batch <= MAX_BATCH:
        return f"{shape.batch} rows, and the kernel has at most {MAX_BATCH}"
    if cached_tokens(shape.dim, cfg.tile) < 16:
        return f"its heads are of {shape.dim}, too wide for a tile of {cfg.tile} bytes"
    if shape.heads % shape.kv_heads or shape.group > 16:
        return f"{shape.heads} queries for {shape.kv_heads} keys of a layer"
    if (cfg.warps % TEAM or cfg.stages < cfg.warps or code_rounds(cfg) > MAX_ROUNDS if codes
            else cfg.stages % cfg.warps or cfg.stages < 2 * cfg.warps):
        return f"{cfg.stages} stages for {cfg.warps} warps"
    needed = shared_layout(shape, cfg).bytes
    if needed > machine.shared:
        return (f"it needs {needed} bytes of shared memory for {shape.batch} rows, and a block has "
                f"{machine.shared}")
    return None


def candidate_configs(shape: Shape, machine: Machine) -> list[Config]:
    """Returns the configurations that are worth a trial, the likeliest first, as measured on an
    H200: a tile is a whole row that is little longer than others; fewer stages where what is kept
    of x leaves less room; one loop with heads of 128, which won 1 % there and lost it with 64."""
    tile, row = Config().tile, 2 * shape.inner
    size = row if tile < row <= tile * 9 // 8 else tile
    by_rows = [Config(warps, stages, stages, tile=size, one_loop=shape.dim >= 128)
               for warps, stages in ((4, 12), (5, 10), (4, 8), (3, 6))]
    coded = [[Config(warps, stages, stages, tile=tile, first_polls=4, later_polls=24)
              for warps, stages in sizes]
             for tile, sizes in ((17408, ((8, 10), (8, 8))), (9216, ((8, 8), (4, 4))))]
    fitting = [next((cfg for cfg in kind if problem(shape, cfg, machine) is None), None)
               for kind in (coded if shape.codes else [by_rows])]
    return [cfg for cfg in fitting if cfg] or [Config(2, 4, 4)]


def default_config(shape: Shape, machine: Machine) -> Config:
    return candidate_configs(shape, machine)[0]


def kernel_macros(shape: Shape, cfg: Config, blocks: int) -> compiler.Macros:
    splits = max_splits(shape, blocks)
    products = {"IN": plain_tiles(shape.hidden, cfg.tile),
                "OUT": plain_tiles(shape.heads * shape.dim, cfg.tile),
                "DOWN": plain_tiles(shape.inner, cfg.tile)}
    gate = gated_tiles(shape.hidden, cfg.tile)
    places = shared_layout(shape, cfg)._asdict()
    del places["bytes"]
    return tuple(sorted({
        "HIDDEN": shape.hidden, "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.dim,
        "HALF": shape.half, "INNER": shape.inner, "BATCH": shape.batch, "BIAS": int(shape.bias),
        "HEAD_NORMS": int(shape.head_norms), "ACTIVATION": ACTIVATIONS.index(shape.activation),
        "WARPS": cfg.warps, "STAGES": cfg.stages, "STAGE": stage_bytes(shape, cfg),
        "FLIGHT": cfg.flight, "AHEAD": cfg.ahead, "CHUNK": cfg.chunk,
        "TOKENS": cached_tokens(shape.dim, cfg.tile), "COPIERS": cfg.copiers,
        "FIRST_POLLS": cfg.first_polls, "LATER_POLLS": cfg.later_polls,
        "ONE_LOOP": int(cfg.one_loop and not shape.codes),
        "SPLITS": splits, "GRID": blocks, "STAMPS": int(cfg.stamps),
        "GATE_PAIRS": gate.rows, "GATE_SLICES": gate.slices,
        "CODES": CODES.index(shape.codes), **_code_macros(shape, cfg),
        **{f"{name}_ROWS": t.rows for name, t in products.items()},
        **{f"{name}_SLICES": t.slices for name, t in products.items()}, **places,
        **word_offsets(shape, splits)._asdict()}.items()))


def _code_macros(shape: Shape, cfg: Config) -> dict[str, int]:
    sizes = {"IN": shape.hidden, "OUT": shape.heads * shape.dim, "DOWN": shape.inner}
    return {f"{name}_CODE_SLICES": code_slices(k, shape, cfg)
            for name, k in sizes.items()} if shape.codes else {}


@dataclass(frozen=True)
class LayerTensors:
    """The tensors that a layer reads, and the buffers of its cache, (batch, tokens, kv_heads,
    dim)."""

    norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    angles: Tensor             # (tokens, 4 * half): cos twice and then sin twice
    keys: Tensor
    values: Tensor
    window: int | None = None
    # of the codes of qkv, out, gate_up and down: (rows, groups), in bfloat16 for int4, else float32
    scales: tuple[Tensor, ...] = ()


class PersistentStep:
    """step.cu for one decoder and one cache. Everything it reads or writes stays where it is, so
    that a CUDA graph can be made of it."""

    def __init__(self, shape: Shape, cfg: Config, layers: Sequence[LayerTensors], embed: Tensor,
                 norm: Tensor, head: Tensor, *, eps: float, head_eps: float, scale: float,
                 head_norm_eps: float = 0.0, limit_s: float = LIMIT_S) -> None:
        device, machine = embed.device, compiler.machine_of(embed.device)
        self.shape, self.cfg, self.blocks = shape, cfg, grid_blocks(shape, cfg, machine)
        sizes = (shape.hidden, shape.heads * shape.dim, shape.hidden, shape.inner)
        scales: list[tuple[Tensor | None, ...]] = [
            tuple(tiled_scales(t, k, code_slices(k, shape, cfg), n == 2) if shape.codes == "int4"
                  else t for n, (t, k) in enumerate(zip(layer.scales, sizes)))
            for layer in layers]
        self._tensors, self._scales = (layers, embed, norm, head), scales
        self._maps = _tensor_maps(shape, cfg, layers, sizes).to(device)
        self._kernel: CompiledCuda = compiler.kernel(
            "step/step.cu", "decode_step", kernel_macros(shape, cfg, self.blocks),
            32 * (cfg.warps + cfg.copiers), shared_layout(shape, cfg).bytes)
        layout = _CODED if shape.codes else _LAYER
        table = b"".join(layout.pack(*(0 if t is None else t.data_ptr() for t in (
            layer.norm, layer.qkv, layer.bias, layer.q_norm, layer.k_norm, layer.out,
            layer.mlp_norm, layer.gate_up, layer.down, layer.angles, layer.keys, layer.values,
            *layer_scales)),
            NO_WINDOW if layer.window is None else layer.window)
            for layer, layer_scales in zip(layers, scales))
        self._table = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)
        total = 2 * word_offsets(shape, max_splits(shape, self.blocks)).SET_WORDS
        self._words = torch.zeros(total, dtype=torch.int64, device=device)
        self._control = torch.zeros(4, dtype=torch.int32, device=device)
        # The host reads it without asking the device.
        self.problem = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.logits = embed.new_zeros((shape.batch, 1, shape.vocab), dtype=torch.float32)
        phases = 5 * shape.layers + 3          # the last two are of the whole
        self.stamps = (torch.zeros((phases, 2, self.blocks), dtype=torch.int64, device=device)
                       if cfg.stamps else None)
        self._numbers = (layers[0].keys.shape[1], int(limit_s * 1e9), shape.layers, shape.vocab,
                         eps, head_eps, head_norm_eps, scale * LOG2E)

    def __call__(self, inputs: Tensor, state: Tensor) -> Tensor:
        """Returns the logits, always in the same memory. `inputs`: tokens, or what they were
        embedded to; `state`: the position of the token, then the length with it of each row; they
        are raised."""
        _, embed, norm, head = self._tensors
        embedded = inputs.is_floating_point()
        self._kernel.launch((self.blocks, 1, 1), _PARAMS, self._table, None if embedded else inputs,
                            inputs if embedded else embed, norm, head, self.logits, state,
                            self._words, self._control, self.problem, self.stamps, self._maps,
                            *self._numbers)
        return self.logits

    def timed_out(self) -> bool:
        """Has a launch given up? As far as is known without waiting for the device."""
        return bool(self.problem[0])

    def resident(self, device: int) -> bool:
        """Can all blocks run at the same time?"""
        return self._kernel.resident_blocks(device) * compiler.machine_of(
            torch.device("cuda", device)).processors >= self.blocks


def _tensor_maps(shape: Shape, cfg: Config, layers: Sequence[LayerTensors],
                 sizes: Sequence[int]) -> Tensor:
    """Returns the tensor maps of each layer: of the codes of qkv, out, gate_up and down, and of the
    keys and values in its cache."""
    maps, tokens = [], cached_tokens(shape.dim, cfg.tile)
    codes = shape.codes
    runs = [code_blocks(k, code_slices(k, shape, cfg), codes) * BLOCK // code_run(codes)
            for k in sizes] if codes else []
    for layer in layers:
        maps += [tensor_maps.encode(weight, BOX_ROWS, n)
                 for weight, n in zip((layer.qkv, layer.out, layer.gate_up, layer.down), runs)]
        if boxed(shape.dim):
            maps += [tensor_maps.encode(cache.flatten(0, 1).flatten(1), tokens,
                                        2 * shape.dim // tensor_maps.RUN)
                     for cache in (layer.keys, layer.values)]
    return torch.frombuffer(bytearray(b"".join(maps) or bytes(1)), dtype=torch.uint8)


def bytes_read(shape: Shape, tokens: int) -> int:
    """Returns how many bytes one token reads at least."""
    layer = shape.hidden * (shape.qkv + 3 * shape.inner + shape.heads * shape.dim)
    stored = {"int4": 0.5 + 2 / BLOCK, "fp8_e4m3": 1.0}.get(shape.codes, 2.0)
    cache = 2 * shape.batch * tokens * shape.kv_heads * shape.dim
    return int(shape.layers * (stored * layer + 2 * cache) + 2 * shape.vocab * shape.hidden)
