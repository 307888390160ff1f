"""Three families of models through lz and in plain torch: every dtype, several batches and lengths.

    decoder
        Llama: RMS norm, rope, grouped queries, SwiGLU; the whole text, and the same with a paged KV
        cache
    encoder-decoder
        T5: relative position bias as a mask, unscaled attention, padded rows, cross-attention,
        gated GELU
    image
        a block of a diffusion model: group norm, self-attention over pixels, attention to a text,
        GEGLU

Each is small, with random weights, and written once over an OpCaller (models/decoder.py). Results
of lz may be as far from float64 as the ladder allows (route.py).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.decoder import CachedKV, Decoder, OpCaller
from ...models.decoder_config import DecoderConfig, Weights, cast, make_weights
from ...spec.codec import encode
from ...spec.errors import ConfigError, KernelExecutionError, NoKernelFoundError
from ..kernel.judging import worst_indices
from .plain import PlainTorch, rope_angles
from .route import LAYER, LadderRow, allowed, difference
from .served import LzCaller, rope_tables_of

DTYPES = ("float32", "bfloat16", "float16")
SHAPES: Mapping[str, tuple[tuple[int, int], ...]] = {      # (batch, length)
    "quick": ((1, 7), (2, 33)), "full": ((1, 1), (1, 7), (2, 33), (3, 64), (1, 130), (5, 17))}
DECODER = DecoderConfig(64, 4, 2, vocab=97)
WIDTH, HEADS, INNER, VOCAB, LAYERS, GROUPS = 48, 4, 80, 67, 2, 4
Outputs = dict[str, Tensor]


class Family(NamedTuple):
    """`run` returns the outputs that are compared; `limit` is for float32."""

    weights: Callable[[], Weights]
    run: Callable[[OpCaller, Weights, int, int, str], Outputs]
    limit: float


@dataclass(frozen=True)
class Cell:
    """One family at one dtype and size."""

    family: str
    dtype: str
    batch: int
    length: int
    rows: tuple[LadderRow, ...] = ()
    # (op, kernel) -> calls
    kernels: Mapping[tuple[str, str], int] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.problem and all(row.ok for row in self.rows)

    def __str__(self) -> str:
        head = f"{self.family} {self.dtype} batch {self.batch} length {self.length}"
        wrong = [str(row) for row in self.rows if not row.ok]
        return f"{head}: {self.problem or '; '.join(wrong) or 'as plain torch'}"

    def to_json(self) -> dict[str, Any]:
        return {"family": self.family, "dtype": self.dtype, "batch": self.batch,
                "length": self.length, "passed": self.passed, "problem": self.problem,
                "seconds": round(self.seconds, 2), "rows": encode(self.rows),
                "kernels": [{"op": op, "kernel": k, "calls": n}
                            for (op, k), n in self.kernels.items()]}


def model_cells(families: Sequence[str] = (), dtypes: Sequence[str] = DTYPES, lane: str = "quick",
                device: str = "cpu", named: str = "") -> Iterator[Cell]:
    """Yields every cell of the matrix. `named`: a kernel or library that serves wherever it can."""
    for name in families:
        if name not in FAMILIES:
            raise ConfigError(f"the families are {', '.join(FAMILIES)}, got {name!r}")
    if lane not in SHAPES:
        raise ConfigError(f"the lanes of the matrix are {', '.join(SHAPES)}, got {lane!r}")
    for name in families or FAMILIES:
        weights = FAMILIES[name].weights()
        for dtype in dtypes:
            for batch, length in SHAPES[lane]:
                yield _cell(name, weights, dtype, batch, length, device, named)


def _cell(name: str, weights: Weights, dtype: str, batch: int, length: int, device: str,
          named: str) -> Cell:
    family, torch_dtype = FAMILIES[name], getattr(torch, dtype)
    started, caller = time.perf_counter(), LzCaller(named)
    rounded = cast(weights, torch_dtype, device)
    counts: Counter[tuple[str, str]] = caller.counts
    with torch.no_grad():
        truth = family.run(PlainTorch(), cast(rounded, torch.float64), batch, length, device)
        eager = family.run(PlainTorch(), rounded, batch, length, device)
        try:
            got = family.run(caller, rounded, batch, length, device)
        except (NoKernelFoundError, KernelExecutionError) as e:
            return Cell(name, dtype, batch, length, (), counts,
                        f"{type(e).__name__}: {str(e).splitlines()[0]}",
                        time.perf_counter() - started)
    rows = []
    for what, value in got.items():
        want, error = truth[what], difference(value, truth[what])
        bound = allowed(torch_dtype, want, eager[what], family.limit)
        worst = (tuple(worst_indices(value, want)) if error > bound and value.shape == want.shape
                 else ())
        rows.append(LadderRow(what, error, bound, eager=difference(eager[what], want), worst=worst))
    return Cell(name, dtype, batch, length, tuple(rows), counts, "", time.perf_counter() - started)


class _WeightMaker:
    """Makes random weights that keep the scale of activations."""

    def __init__(self, seed: int) -> None:
        self.generator, self.weights = torch.Generator().manual_seed(seed), {}  # type: torch.Generator, Weights

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, name: str, out: int, width: int) -> None:
        self.weights[name] = self.normal(out, width) / math.sqrt(width)

    def vector(self, name: str, size: int, center: float) -> None:
        self.weights[name] = center + 0.2 * self.normal(size)


def _tokens(batch: int, length: int, vocab: int, device: str) -> Tensor:
    return torch.randint(0, vocab, (batch, length),
                         generator=torch.Generator().manual_seed(length)).to(device)


# Llama.

def _decoder(do: OpCaller, w: Weights, batch: int, length: int, device: str) -> Outputs:
    tokens, dtype = _tokens(batch, length, DECODER.vocab, device), w["norm"].dtype
    is_plain = isinstance(do, PlainTorch)
    model = Decoder(DECODER, w, do, rope_angles(DECODER, device) if is_plain
                    else rope_tables_of(DECODER, device), fused=True)
    logits = model(tokens)
    if is_plain:                               # stepwise decoding must give the same
        return {"logits": logits, "logits, paged": logits}
    past = CachedKV(DECODER, "paged", batch, length, dtype, device)
    head = max(length - 2, 1)
    steps = [model(tokens[:, :head], past),
             *(model(tokens[:, i:i + 1], past) for i in range(head, length))]
    return {"logits": logits, "logits, paged": torch.cat(steps, 1)}


# T5.

def _t5_weights() -> Weights:
    make = _WeightMaker(5)
    make.weights["embed"] = make.normal(VOCAB, WIDTH)
    # per distance, up to 8 in both directions
    make.weights["bias"] = make.normal(HEADS, 16)
    make.vector("norm", WIDTH, 1.0)
    make.matrix("head", VOCAB, WIDTH)
    for stack, parts in (("enc", ("self",)), ("dec", ("self", "cross"))):
        for i in range(LAYERS):
            for part in (*parts, "mlp"):
                make.vector(f"{stack}.{i}.{part}.norm", WIDTH, 1.0)
            for part in parts:
                for name in ("q", "k", "v", "o"):
                    make.matrix(f"{stack}.{i}.{part}.{name}", WIDTH, WIDTH)
                # T5 does not scale scores
                make.weights[f"{stack}.{i}.{part}.q"] *= (WIDTH // HEADS) ** -0.5
            make.matrix(f"{stack}.{i}.mlp.in", 2 * INNER, WIDTH)
            make.matrix(f"{stack}.{i}.mlp.down", WIDTH, INNER)
    return make.weights


def _heads(do: OpCaller, w: Weights, at: str, x: Tensor) -> Tensor:
    out: Tensor = do("linear", x=x, weight=w[at])
    return out.unflatten(-1, (HEADS, -1))


def _attend(do: OpCaller, w: Weights, at: str, x: Tensor, context: Tensor, mask: Tensor | None,
            scale: float | None = None) -> Tensor:
    mixed = do("attention", query=_heads(do, w, f"{at}.q", x),
               key=_heads(do, w, f"{at}.k", context), value=_heads(do, w, f"{at}.v", context),
               attn_mask=mask, scale=scale, layout="bshd")
    out: Tensor = do("linear", x=mixed.flatten(-2), weight=w[f"{at}.o"])
    return out


def _t5_stack(do: OpCaller, w: Weights, stack: str, x: Tensor, mask: Tensor,
              cross: tuple[Tensor, Tensor] | None) -> Tensor:
    def norm(at: str) -> Tensor:
        out: Tensor = do("rms_norm", x=x, weight=w[at], eps=1e-6)
        return out

    for i in range(LAYERS):
        at = f"{stack}.{i}"
        h = norm(f"{at}.self.norm")
        x = x + _attend(do, w, f"{at}.self", h, h, mask, 1.0)
        if cross is not None:
            x = x + _attend(do, w, f"{at}.cross", norm(f"{at}.cross.norm"), *cross, 1.0)
        x = x + do("mlp", x=norm(f"{at}.mlp.norm"), weight_in=w[f"{at}.mlp.in"],
                   weight_down=w[f"{at}.mlp.down"], activation="geglu_tanh")
    return norm("norm")


def _t5(do: OpCaller, w: Weights, batch: int, length: int, device: str) -> Outputs:
    def distances(rows: int) -> Tensor:
        positions = torch.arange(rows, device=device)
        return (positions - positions[:, None]).clamp(-8, 7) + 8

    source, target = (_tokens(batch, n, VOCAB, device) for n in (length, max(length // 2, 1)))
    # rows of different lengths
    lengths = length - torch.arange(batch, device=device) % max(length // 2, 1)
    # (batch, 1, 1, length)
    not_padded = (torch.arange(length, device=device) < lengths[:, None])[:, None, None]
    bias = w["bias"][:, distances(length)][None]
    encoder_mask = torch.where(not_padded, bias, torch.finfo(bias.dtype).min)
    encoded = _t5_stack(do, w, "enc", do("embedding", ids=source, weight=w["embed"]), encoder_mask,
                        None)
    rows = target.shape[1]
    future = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
    causal = w["bias"][:, distances(rows)][None].masked_fill(future, -math.inf)
    x = _t5_stack(do, w, "dec", do("embedding", ids=target, weight=w["embed"]), causal,
                  (encoded, not_padded.expand(-1, -1, rows, -1)))
    return {"memory": torch.where(not_padded[:, 0, 0, :, None], encoded, 0.0),
            "logits": do("linear", x=x, weight=w["head"])}


# Diffusion.

def _image_weights() -> Weights:
    make = _WeightMaker(7)
    for name in ("group", "self.norm", "cross.norm", "mlp.norm"):
        make.vector(name, WIDTH, 1.0)
        make.vector(f"{name}.bias", WIDTH, 0.0)
    for name in ("in", "out", "self.q", "self.k", "self.v", "self.o", "cross.q", "cross.o"):
        make.matrix(name, WIDTH, WIDTH)
    for name in ("cross.k", "cross.v"):
        make.matrix(name, WIDTH, 32)                       # the text is narrower
    make.matrix("mlp.in", 2 * INNER, WIDTH)
    make.matrix("mlp.down", WIDTH, INNER)
    make.vector("mlp.in.bias", 2 * INNER, 0.0)
    make.vector("mlp.down.bias", WIDTH, 0.0)
    make.weights["image"], make.weights["text"] = make.normal(8, WIDTH, 16,
                                                              16), make.normal(8, 77, 32)
    return make.weights


def _image(do: OpCaller, w: Weights, batch: int, length: int, device: str) -> Outputs:
    def norm(name: str) -> Tensor:
        out: Tensor = do("layer_norm", x=x, weight=w[name], bias=w[f"{name}.bias"], eps=1e-5)
        return out

    side = max(math.isqrt(length), 1)
    image, text = w["image"][:batch, :, :side, :side + 1], w["text"][:batch, :length]
    h = do("group_norm", x=image, groups=GROUPS, weight=w["group"], bias=w["group.bias"], eps=1e-6)
    x = do("linear", x=h.flatten(2).transpose(1, 2), weight=w["in"])
    h = norm("self.norm")
    x = x + _attend(do, w, "self", h, h, None)
    x = x + _attend(do, w, "cross", norm("cross.norm"), text, None)
    x = x + do("mlp", x=norm("mlp.norm"), weight_in=w["mlp.in"], weight_down=w["mlp.down"],
               activation="geglu", bias_in=w["mlp.in.bias"], bias_down=w["mlp.down.bias"])
    out = do("linear", x=x, weight=w["out"]).transpose(1, 2).unflatten(2, image.shape[2:])
    return {"image": image + out}


FAMILIES: Mapping[str, Family] = {
    "decoder": Family(lambda: make_weights(DECODER), _decoder, LAYER),
    "encoder-decoder": Family(_t5_weights, _t5, LAYER),
    "image": Family(_image_weights, _image, LAYER),
}
