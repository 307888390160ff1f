"""What one decode step takes as one persistent launch (backends/cuda/step), beside what reading its
bytes takes.

    python benchmarks/persistent_step.py --model 1b --contexts 32,512,8192
    python benchmarks/persistent_step.py --model 8b --variants 3:9:4:2:256,4:8:6:2:512 --profile

Seeded bf16 weights in the shape of a known model. A variant is
warps:stages:flight:ahead:chunk[:tile[:copiers[:first polls[:later[:one loop]]]]], as plan.Config has
them. Every context is checked first: the error against fp32 beside that of the same formulas in
bf16. Then CUDA graphs of all variants are replayed in turns, `--steps` dependent steps at a time;
the median of all rounds is printed. Needs a CUDA device.

    python benchmarks/persistent_step.py --model 1b --transformers

A model of transformers with that shape, accelerated: what the race says, and a token through
`model(...)` by the graph of kernels and by the persistent kernel, in turns, as a host sees it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import layerzero as lz
from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.step import plan
from layerzero.backends.cuda.step.plan import Config, LayerTensors, PersistentStep, Shape

SHAPES = {
    "1b": Shape(2048, 32, 8, 64, 32, 8192, 128256, 16),
    "8b": Shape(4096, 32, 8, 128, 64, 14336, 128256, 32),
    "qwen2.5-1.5b": Shape(1536, 12, 2, 128, 64, 8960, 151936, 28, bias=True),
    "qwen3-0.6b": Shape(1024, 16, 8, 128, 64, 3072, 151936, 28, head_norms=True),
    "mistral-7b": Shape(4096, 32, 8, 128, 64, 14336, 32768, 32)}
EPS, READING = 1e-5, 4.53e12               # bytes a second that an H200 reads at best
PARTS = ("qkv", "attention", "out", "gate and up", "down")


class Decoder:
    """Seeded weights, and what plain torch makes of them."""

    def __init__(self, shape: Shape, room: int) -> None:
        torch.manual_seed(0)
        self.shape, self.room, h = shape, room, shape.hidden
        wide = shape.heads * shape.dim
        turns = torch.arange(room, device="cuda")[:, None] * 5e5 ** (
            -torch.arange(shape.half, device="cuda") / shape.half)
        angles = torch.cat((turns.cos(), turns.cos(), turns.sin(), turns.sin()), -1).bfloat16()
        places = (shape.batch, room, shape.kv_heads, shape.dim)
        self.layers = [LayerTensors(
            1 + noise(h, scale=0.1), noise(shape.qkv, h, scale=h ** -0.5),
            noise(shape.qkv, scale=0.5) if shape.bias else None,
            *(1 + noise(shape.dim, scale=0.1) if shape.head_norms else None for _ in "qk"),
            noise(h, wide, scale=wide ** -0.5), 1 + noise(h, scale=0.1),
            noise(2 * shape.inner, h, scale=h ** -0.5),
            noise(h, shape.inner, scale=shape.inner ** -0.5), angles, noise(*places),
            noise(*places)) for _ in range(shape.layers)]
        self.coded = self.layers
        if shape.codes:
            self.coded, self.layers = map(list, zip(*(encoded(at, shape.codes)
                                                      for at in self.layers)))
        self.embed, self.norm = noise(shape.vocab, h), 1 + noise(h, scale=0.1)
        self.head = self.embed if shape.hidden < 4096 else noise(shape.vocab, h, scale=h ** -0.5)

    def step(self, cfg: Config) -> PersistentStep:
        return PersistentStep(self.shape, cfg, self.coded, self.embed, self.norm, self.head,
                              eps=EPS, head_eps=EPS, scale=self.shape.dim ** -0.5,
                              head_norm_eps=EPS)

    def reference(self, tokens: Tensor, position: int, dtype: torch.dtype) -> Tensor:
        """Logits in this dtype, of the keys and values that are kept."""
        s = self.shape

        def normed(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is None:
                return x
            y = x.float()
            return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).to(dtype) * weight.to(
                dtype)

        x = self.embed[tokens].to(dtype)
        for at in self.layers:
            qkv = normed(x, at.norm) @ at.qkv.to(dtype).t()
            qkv = qkv if at.bias is None else qkv + at.bias.to(dtype)
            q, k, v = qkv.view(s.batch, -1, s.dim).split([s.heads, s.kv_heads, s.kv_heads], 1)
            cos, sin = (half[:s.half] for half in at.angles[position].to(dtype).chunk(2))
            turned = []
            for y in (normed(q, at.q_norm), normed(k, at.k_norm)):
                a, b = y.chunk(2, -1)
                turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
            keys, values = (torch.cat((kept[:, :position].to(dtype), new[:, None]), 1)
                            .repeat_interleave(s.group, 2).transpose(1, 2)
                            for kept, new in ((at.keys, turned[1]), (at.values, v)))
            out = F.scaled_dot_product_attention(turned[0][:, :, None], keys, values)
            x = x + out.flatten(1) @ at.out.to(dtype).t()
            gate, up = (normed(x, at.mlp_norm) @ at.gate_up.to(dtype).t()).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ at.down.to(dtype).t()
        return normed(x, self.norm) @ self.head.to(dtype).t()


def encoded(at: LayerTensors, format: str) -> tuple[LayerTensors, LayerTensors]:
    """A layer with codes for weights, and with the weights that they stand for."""
    from layerzero.integrations.transformers.quantized import encode
    from layerzero.models.weights.codes import WeightOnly
    names = ("qkv", "out", "gate_up", "down")
    codes = [encode(getattr(at, name), WeightOnly(format)) for name in names]
    scales = tuple(c.scales for c in codes if c.scales is not None)
    weights = [lz.dequantize(c.codes, c.scales, format=c.format,
                             block_size=c.group_size or c.inputs, size=c.inputs).bfloat16()
               for c in codes]
    return (replace(at, **dict(zip(names, (c.codes for c in codes))), scales=scales),
            replace(at, **dict(zip(names, weights))))


def noise(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16) * scale


def check(decoder: Decoder, step: PersistentStep, position: int) -> dict[str, float]:
    """Errors against fp32, relative to the spread of the logits."""
    batch = decoder.shape.batch
    tokens = torch.randint(decoder.shape.vocab, (batch, 1), device="cuda")
    state = torch.full((1 + batch,), position, device="cuda")
    truth = decoder.reference(tokens[:, 0], position, torch.float32)
    eager = decoder.reference(tokens[:, 0], position, torch.bfloat16)
    got = step(tokens, state)[:, 0]
    torch.cuda.synchronize()
    spread = truth.std()
    return {"lost": float(step.timed_out()), "eager": float((eager - truth).std() / spread),
            "ours": float((got - truth).std() / spread),
            "eager max": float((eager - truth).abs().max() / spread),
            "ours max": float((got - truth).abs().max() / spread)}


class Replay:
    """A graph of one step, with its token and position on the device."""

    def __init__(self, step: PersistentStep, position: int) -> None:
        batch = step.shape.batch
        self.step, self.position = step, position
        self.tokens = torch.ones((batch, 1), dtype=torch.int64, device="cuda")
        self.state = torch.full((1 + batch,), position, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        step(self.tokens, self.state)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            step(self.tokens, self.state)

    def sample(self, steps: int) -> float:
        """Microseconds a step: of the device, or of the host where that is longer."""
        self.state.fill_(self.position)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        for _ in range(steps):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) * 1e6
        return max(wall, begin.elapsed_time(end) * 1e3) / steps


def profile(step: PersistentStep, position: int) -> list[str]:
    """For each part of a layer: from when the last block was done with the part before until a
    block begins, its own work, and until the last block is done; medians over layers."""
    replay = Replay(step, position)
    for _ in range(3):
        replay.graph.replay()
    torch.cuda.synchronize()
    assert step.stamps is not None
    *_, whole, before = step.stamps.double().cpu()
    stamps = step.stamps.double().cpu()[:-2]
    begun, done = stamps[:, 0], stamps[:, 1]
    rows: dict[str, list[tuple[float, ...]]] = {}
    last = None
    for n in range(len(stamps)):
        part = PARTS[n % 5] if n < len(stamps) - 1 else "head"
        mine = begun[n] > whole[0].min()                   # attention: of the blocks that have some
        start, end = begun[n][mine], done[n][mine]
        if last is not None and mine.any():
            rows.setdefault(part, []).append((
                (start.median() - last).item(), (start.max() - last).item(),
                (end - start).median().item(), (end.max() - start.median()).item()))
        last = end.max() if mine.any() else last
    first, end, gap = ((t / 1e3).item() for t in (
        begun[0].median() - whole[0].min(), whole[1].max() - whole[0].min(),
        whole[0].min() - before[0].max()))
    lines = [f"    whole {end:.1f} us, the first norm at {first:.1f}, the last block began at "
             f"{(whole[0].max() - whole[0].min()).item() / 1e3:.1f}; {gap:.1f} since the launch "
             "before"]
    for part, found in rows.items():
        middle = [statistics.median(column) / 1e3 for column in zip(*found)]
        lines.append(f"    {part:12} waits {middle[0]:6.2f} (last block {middle[1]:6.2f})  works "
                     f"{middle[2]:6.2f} (last done {middle[3]:6.2f})  x {len(found)}")
    return lines


def through_transformers(name: str, shape: Shape, context: int, steps: int, rounds: int) -> None:
    """Microseconds a token of `model(token, past_key_values=cache)`, by either way."""
    import transformers

    from layerzero.integrations.transformers.decoding.cuda import persistent
    family = "Qwen2" if shape.bias else "Qwen3" if shape.head_norms else "Llama"
    config = getattr(transformers, f"{family}Config")(
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.hidden < 4096,
        max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        torch.set_default_dtype(torch.float32)
    report = lz.accelerate(model, measure=False, patch=False, capture=True)
    ids = torch.randint(shape.vocab, (shape.batch, context), device="cuda")
    race, faster = persistent._race, persistent.faster
    said, logits, times = {}, {}, {}
    with torch.inference_mode():
        for way in ("raced", "kernels", "persistent"):
            persistent.faster = faster if way != "kernels" else lambda *_: None
            persistent._race = race if way == "raced" else lambda *_: None
            report._step._captured.forget(shape.batch)
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            token = ids[:, :1]
            logits[way] = model(token, past_key_values=cache).logits.float()
            said[way] = report.kernels.get(persistent.WHAT)
            times[way] = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(steps):
                    token = model(token, past_key_values=cache).logits.argmax(-1)
                torch.cuda.synchronize()
                times[way].append((time.perf_counter() - start) * 1e6 / steps)
    apart = float((logits["persistent"] - logits["kernels"]).std() / logits["kernels"].std())
    print(f"{name} through transformers, context {context}: the race says {said['raced']!r}; "
          + ", ".join(f"{way} {statistics.median(t):.0f} us" for way, t in times.items())
          + f"; logits apart by {apart:.4f} of their spread", flush=True)


def compiled(job: tuple[Shape, Config, int]) -> float:
    shape, cfg, processors = job
    start = time.perf_counter()
    machine = compiler.Machine(processors)
    if plan.problem(shape, cfg, machine) is None:
        blocks = plan.grid_blocks(shape, cfg, machine)
        compiler.cubin("step/step.cu", plan.kernel_macros(shape, cfg, blocks), "sm_90a")
    return time.perf_counter() - start


def variant(text: str) -> Config:
    return Config(*map(int, text.split(":")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1b")
    parser.add_argument("--contexts", default="32,512,8192")
    parser.add_argument("--variants", default="")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--codes", choices=plan.CODES, default="", help="for the layers' weights")
    parser.add_argument("--steps", type=int, default=127)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    shape = SHAPES[given.model]._replace(batch=given.batch, codes=given.codes)
    if given.transformers:
        for context in given.contexts.split(","):
            through_transformers(given.model, shape, int(context), min(given.steps, 32),
                                 given.rounds)
        return 0
    machine = compiler.Machine(given.processors)
    variants = ([variant(v) for v in given.variants.split(",")] if given.variants
                else [plan.default_config(shape, machine)])
    jobs = [(shape, cfg, given.processors) for cfg in variants]
    if given.profile:
        jobs.append((shape, variants[0]._replace(stamps=True), given.processors))
    start = time.perf_counter()
    with ProcessPoolExecutor(min(16, len(jobs)),
                             mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, jobs))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.1f} s", flush=True)
    if given.compile_only:
        return 0
    contexts = [int(c) for c in given.contexts.split(",")]
    decoder = Decoder(shape, -(-(max(contexts) + given.steps + 8) // 64) * 64)
    steps: dict[str, PersistentStep] = {}
    for cfg in variants:
        why = plan.problem(shape, cfg, machine)
        name = ":".join(str(int(field)) for field in cfg[:-1])
        if why is None:
            steps[name] = decoder.step(cfg)
            if not steps[name].resident(0):
                print(f"{name}: its blocks cannot run at the same time")
                del steps[name]
        else:
            print(f"{name}: {why}")
    rows: list[dict[str, Any]] = []
    for position in contexts:
        floor = plan.bytes_read(shape, position) / READING * 1e6
        for name, step in list(steps.items()):
            found = check(decoder, step, position)
            fine = not found["lost"] and found["ours"] <= 2 * found["eager"]
            rows.append({"model": given.model, "batch": given.batch, "context": position,
                         "variant": name, "floor_us": floor, "fine": fine, **found})
            if not fine:
                print(f"{given.model} context {position} {name}: WRONG {found}", flush=True)
                del steps[name]
        if given.check_only or not steps:
            continue
        replays = {name: Replay(step, position) for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(given.rounds):
            for name in random.sample(list(replays), len(replays)):
                times[name].append(replays[name].sample(given.steps))
        for row in rows:
            if row["context"] == position and row["variant"] in times:
                found_us = sorted(times[row["variant"]])
                row.update(us=statistics.median(found_us), least_us=found_us[0],
                           lost_later=steps[row["variant"]].timed_out())
        if given.profile:
            print("\n".join(profile(decoder.step(variants[0]._replace(stamps=True)), position)))
    for row in rows:
        print(f"{row['model']} {given.codes} B{row['batch']} context {row['context']:5} {row['variant']:22} "
              f"{row.get('us', 0):8.1f} us (least {row.get('least_us', 0):8.1f}, floor "
              f"{row['floor_us']:7.1f}) error {row['ours']:.4f} / eager {row['eager']:.4f} max "
              f"{row['ours max']:.3f} / {row['eager max']:.3f} {'' if row['fine'] else 'WRONG'}"
              f"{' LOST' if row.get('lost_later') else ''}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["fine"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
