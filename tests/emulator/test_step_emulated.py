"""step.cu in the emulator: one token after the other gives what the formulas give."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import compiler, tensor_maps
from layerzero.backends.cuda.step import plan
from layerzero.backends.cuda.step.plan import Config, LayerTensors, PersistentStep, Shape

from .run import COMPILER, Kernel

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

ROOM, EPS = 128, 1e-5


class Together(Kernel):
    """All blocks run at the same time, as on a device that has room for them."""

    def start(self, grid: tuple[int, int, int], params: bytes) -> int:
        self.emulated.launch(self.name, grid, self.threads, params, self.shared, grid[0])
        return -1


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "kernel", Together)
    monkeypatch.setattr(tensor_maps, "encode", described)


def described(matrix: Tensor, rows: int, runs: int) -> bytes:
    """A TensorMap of stream.h."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    return struct.pack("@P5q80x", matrix.data_ptr(), len(matrix), row_bytes // tensor_maps.RUN,
                       row_bytes, runs, rows)


def random(*size: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(size) * scale).bfloat16()


@contextmanager
def few_blocks(blocks: int) -> Iterator[None]:
    """Steps that are made have so many blocks, and as many splits as on a large device."""
    most = plan.max_splits
    with (mock.patch.object(plan, "grid_blocks", lambda *_: blocks),
          mock.patch.object(plan, "max_splits", lambda shape, _: most(shape, 132))):
        yield


class Decoder:
    """Random weights, what the formulas make of them, and the kernel."""

    def __init__(self, shape: Shape, cfg: Config, blocks: int, window: int | None = None,
                 **more: float) -> None:
        torch.manual_seed(0)
        self.shape, h = shape, shape.hidden
        angles = torch.rand(ROOM, shape.half) * 6
        angles = torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), -1).bfloat16()
        room = (shape.batch, ROOM, shape.kv_heads, shape.dim)
        self.layers = [LayerTensors(
            1 + random(h, scale=0.2), random(shape.qkv, h, scale=h ** -0.5),
            random(shape.qkv) if shape.bias else None,
            *(1 + random(shape.dim, scale=0.2) if shape.head_norms else None for _ in "qk"),
            random(h, shape.heads * shape.dim, scale=(shape.heads * shape.dim) ** -0.5),
            1 + random(h, scale=0.2), random(2 * shape.inner, h, scale=h ** -0.5),
            random(h, shape.inner, scale=shape.inner ** -0.5), angles, random(*room), random(*room),
            window if n else None)
            for n in range(shape.layers)]
        self.embed, self.norm = random(shape.vocab, h), 1 + random(h, scale=0.2)
        coded = self.layers
        if shape.codes:                        # the formulas see what the codes stand for
            coded, self.layers = map(list, zip(*(encoded(at, shape.codes)
                                                      for at in self.layers)))
        with few_blocks(blocks):
            self.step = PersistentStep(shape, cfg, coded, self.embed, self.norm, self.embed,
                                       eps=EPS, head_eps=EPS, scale=shape.dim ** -0.5,
                                       head_norm_eps=EPS, **more)

    def reference(self, tokens: Tensor, position: int, dtype: torch.dtype) -> Tensor:
        """Logits, in this dtype; keys and values of earlier tokens are those of the rooms."""
        s = self.shape

        def normed(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is None:
                return x
            y = x.double() if dtype == torch.float64 else x.float()
            return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).to(dtype) * weight.to(
                dtype)

        x = self.embed[tokens].to(dtype)
        for at in self.layers:
            qkv = normed(x, at.norm) @ at.qkv.to(dtype).t()
            if at.bias is not None:
                qkv = qkv + at.bias.to(dtype)
            q, k, v = qkv.view(s.batch, -1, s.dim).split([s.heads, s.kv_heads, s.kv_heads], 1)
            cos, sin = at.angles[position].to(dtype).chunk(2)
            turn = [normed(q, at.q_norm), normed(k, at.k_norm)]
            for n, y in enumerate(turn):
                a, b, rest = y.split([s.half, s.half, s.dim - 2 * s.half], -1)
                turn[n] = torch.cat((a * cos[:s.half] - b * sin[:s.half],
                                     b * cos[:s.half] + a * sin[:s.half], rest), -1)
            q, k = turn
            first = max(0, position + 1 - at.window) if at.window else 0
            keys, values = (torch.cat((room[:, first:position].to(dtype), new[:, None]), 1)
                            .repeat_interleave(s.group, 2)
                            for room, new in ((at.keys, k), (at.values, v)))
            scores = torch.einsum("bhd,bthd->bht", q, keys) * s.dim ** -0.5
            out = torch.einsum("bht,bthd->bhd", scores.softmax(-1), values).flatten(1)
            x = x + out @ at.out.to(dtype).t()
            gate, up = (normed(x, at.mlp_norm) @ at.gate_up.to(dtype).t()).chunk(2, -1)
            gate = torch.nn.functional.silu(gate) if s.activation == "swiglu" else (
                torch.nn.functional.gelu(gate, approximate="tanh"))
            x = x + (gate * up) @ at.down.to(dtype).t()
        return normed(x, self.norm) @ self.embed.to(dtype).t()


def encoded(at: LayerTensors, format: str) -> tuple[LayerTensors, LayerTensors]:
    """A layer with codes for weights, and with the weights that they stand for."""
    names = ("qkv", "out", "gate_up", "down")
    codes, scales, weights = [], [], []
    for name in names if format == "fp8_e4m3" else ():
        weight = getattr(at, name).float()
        by = weight.abs().amax(-1, keepdim=True) / 448
        codes.append((weight / by).to(torch.float8_e4m3fn))
        scales.append(by)
        weights.append(codes[-1].float() * by)
    for name in names if format == "int4" else ():
        groups = getattr(at, name).float().unflatten(1, (-1, 128))
        by = (groups.abs().amax(-1) / 7).bfloat16()
        code = ((groups / by.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
        weights.append(((code.float() - 8) * by.float()[..., None]).flatten(1))
        low, high = code.view(len(code), -1, 2).unbind(-1)
        codes.append(low | high << 4)
        scales.append(by)
    return (replace(at, **dict(zip(names, codes)), scales=tuple(scales)),
            replace(at, **dict(zip(names, weights))))


SMALL = Shape(64, 4, 2, 16, 6, 96, 50, 3, bias=True, head_norms=True, activation="geglu_tanh")
SMALL_CONFIG = Config(3, 6, 4, 2, 16, 1536, 1)
# Whole rows, a cache that is split and a window; rows in slices, several rows of x.
CASES: tuple[tuple[Shape, Config, int, dict[str, Any]], ...] = (
    (SMALL, SMALL_CONFIG, 5, {"positions": (0, 1, 100), "window": 40}),
    (Shape(256, 4, 1, 32, 16, 512, 37, 2, batch=2), Config(2, 4, 3, 2, 48, 2560), 4,
     {"positions": (70,)}),
    # heads whose keys and values are copied as boxes, of one run and of two
    (Shape(128, 4, 2, 64, 32, 96, 37, 2, batch=2), Config(2, 4, 3, 2, 32, 8192), 5,
     {"positions": (15, 100), "window": 70}),
    (Shape(128, 2, 1, 128, 64, 96, 37, 2), Config(2, 4, 3, 2, 16, 8192, 1), 4,
     {"positions": (121,), "window": 57}),
    # one loop of the producer, for whole rows and for slices
    (SMALL, SMALL_CONFIG._replace(one_loop=True), 5, {"positions": (0, 100), "window": 40}),
    (Shape(256, 4, 1, 32, 16, 512, 37, 2, batch=2),
     Config(2, 4, 3, 2, 48, 2560, one_loop=True), 4, {"positions": (70,)}),
    # codes: rows that are no whole tiles of the head, and slices
    (Shape(256, 8, 1, 32, 16, 768, 37, 2, bias=True, codes="int4"),
     Config(2, 4, 4, 2, 48, 2816), 4, {"positions": (40,)}),
    (Shape(256, 8, 1, 32, 16, 1280, 37, 2, batch=2, codes="int4"),
     Config(4, 8, 4, 2, 48, 5120), 4, {"positions": (40,)}),
    (Shape(256, 8, 1, 32, 16, 384, 37, 1, codes="fp8_e4m3"),
     Config(2, 4, 4, 2, 48, 4096), 3, {"positions": (40,)}),
    # stages that are no multiple of the warps, and more rows of x than one product of the tensor
    # cores has columns for
    (Shape(256, 8, 1, 32, 16, 768, 37, 1, batch=5, codes="int4"),
     Config(4, 6, 4, 2, 48, 5120), 4, {"positions": (40,)}),
    (Shape(256, 8, 1, 32, 16, 384, 37, 1, batch=2, codes="fp8_e4m3"),
     Config(4, 5, 5, 2, 48, 4096), 3, {"positions": (40,)}))


@pytest.mark.parametrize("shape, cfg, blocks, more", CASES)
def test_a_token(shape: Shape, cfg: Config, blocks: int, more: dict[str, Any]) -> None:
    assert plan.problem(shape, cfg, compiler.Machine(blocks)) is None
    decoder = Decoder(shape, cfg, blocks, more.get("window"))
    for n, position in enumerate(more["positions"]):
        tokens = 7 + n + 4 * torch.arange(shape.batch)[:, None]
        state = torch.full((1 + shape.batch,), position + 1)
        state[0] = position
        truth = decoder.reference(tokens[:, 0], position, torch.float64)
        eager = decoder.reference(tokens[:, 0], position, torch.bfloat16)
        got = decoder.step(tokens, state)
        assert not decoder.step.timed_out()
        assert state.tolist() == [position + 1] + [position + 2] * shape.batch
        error = (got[:, 0].double() - truth).abs().max()
        assert error <= 2 * (eager.double() - truth).abs().max(), (error, position)


@pytest.mark.parametrize("codes", ["int4", "fp8_e4m3"])
def test_inputs_of_very_different_size(codes: str) -> None:
    """Codes are multiplied by inputs that are quantized or scaled together, 128 of them."""
    shape = Shape(256, 8, 1, 32, 16, 512, 37, 1, codes=codes)
    decoder = Decoder(shape, Config(2, 4, 4, 2, 48, 4096), 3)
    decoder.layers[0].mlp_norm[5::64] *= 1000
    state = torch.tensor([40, 41])
    truth = decoder.reference(torch.tensor([7]), 40, torch.float64)
    eager = decoder.reference(torch.tensor([7]), 40, torch.bfloat16).double()
    got = decoder.step(torch.tensor([[7]]), state)[:, 0].double()
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max()
    decoder.embed[7, 3] = torch.nan                # is not lost on the way
    assert decoder.step(torch.tensor([[7]]), torch.tensor([40, 41])).isnan().all()


def test_tags_that_words_have_only_in_part() -> None:
    """Words of eight values have 12 bits of the tag, which start again from 0."""
    shape, logits = Shape(256, 8, 1, 32, 16, 512, 37, 2, codes="int4"), []
    decoder = Decoder(shape, Config(2, 4, 4, 2, 48, 4096), 3)
    for launches in (0, (1 << 12) // shape.layers - 2, None, None):
        if launches is not None:
            decoder.step._control[0] = launches
        logits.append(decoder.step(torch.tensor([[7]]), torch.tensor([40, 41])).clone())
    assert not decoder.step.timed_out()
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_a_launch_that_waits_in_vain_ends_and_says_so() -> None:
    decoder = Decoder(SMALL, SMALL_CONFIG, 5, limit_s=0.0)
    decoder.step(torch.tensor([[1]]), torch.tensor([20, 21]))
    assert decoder.step.timed_out()
    assert decoder.step.logits.isnan().any()


def model_of(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()


@pytest.mark.parametrize("name, more", [("Qwen3", {"head_dim": 16}),
                                        ("Mistral", {"sliding_window": 16})])
def test_models_of_transformers(name: str, more: dict[str, Any]) -> None:
    """From the declaration of a model to its logits, after some tokens of its own."""
    model = model_of(name, **more)
    from layerzero.integrations.transformers.decoders.recognition import recognise
    from layerzero.integrations.transformers.decoding.cuda import persistent
    from layerzero.integrations.transformers.decoding.decode_step import DecodeStep, join_layers
    with torch.no_grad():
        for parameter in model.parameters():               # norms that matter
            parameter.add_(torch.randn_like(parameter) * 0.1)
        ids = torch.randint(50, (1, 21))
        past = model(ids[:, :20], use_cache=True).past_key_values
        truth = model.float()(ids).logits[:, -1]
        eager = model.bfloat16()(ids).logits[:, -1].float()
        parts = recognise(model)
        step = DecodeStep(parts, join_layers(model, parts), 1)
        rooms = [(parts.weights.new_zeros(1, 64, 2, 16), parts.weights.new_zeros(1, 64, 2, 16))
                 for _ in parts.layers]
        for pair, layer in zip(rooms, past.layers):
            for room, kept in zip(pair, (layer.keys, layer.values)):
                room[:, 20 - kept.shape[2]:20] = kept.transpose(1, 2)
        angles = torch.cat(parts.angles_at(torch.arange(64)[None])[0], -1)[0].contiguous()
        with few_blocks(3):
            candidate = persistent.candidates(step, parts, rooms, [angles])[0]
        got = candidate(ids[:, 20:], torch.tensor([20, 21]))[:, 0].float()
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max() + 1e-3


def test_what_the_kernel_does_not_know_is_said() -> None:
    from layerzero.integrations.transformers.decoders.families import NotRecognised
    from layerzero.integrations.transformers.decoders.recognition import recognise
    from layerzero.integrations.transformers.decoding.cuda import persistent
    from layerzero.integrations.transformers.decoding.decode_step import join_layers

    def shape(model: Any, batch: int = 1) -> Shape:
        parts = recognise(model)
        return persistent.shape_of(parts, join_layers(model, parts), batch)

    assert shape(model_of("Qwen2"), 2) == Shape(64, 4, 2, 16, 8, 96, 50, 2, 2, bias=True)
    for model, why in ((model_of("Gemma2", head_dim=16), "its embedding is scaled"),
                       (model_of("Llama").float(), "float32, not bfloat16"),
                       (model_of("Llama", mlp_bias=True), "have a bias")):
        with pytest.raises(NotRecognised, match=why):
            shape(model)
    machine = compiler.Machine(132)
    for kind, why in ((SMALL._replace(hidden=100), "no multiple of 8"),
                      (SMALL._replace(activation="reglu"), "are reglu"),
                      (SMALL._replace(batch=9), "at most 8"),
                      (SMALL._replace(inner=1 << 17), "bytes of shared memory")):
        problem = plan.problem(kind, Config(), machine)
        assert problem is not None and why in problem


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_known_models_fit_a_hopper(batch: int) -> None:
    machine = compiler.Machine(132)
    for shape in (Shape(2048, 32, 8, 64, 32, 8192, 128256, 16, batch),
                  Shape(1536, 12, 2, 128, 64, 8960, 151936, 28, batch, bias=True)):
        assert plan.problem(shape, plan.default_config(shape, machine), machine) is None
