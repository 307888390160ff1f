"""What a layer of a decode step takes in the graph that lz.accelerate captures for several rows, and
what other kernels or configurations in it would change.

    python benchmarks/decode_layers.py --batch 8 --context 512 --out results/local/layers.json

Eight layers in the shape of Llama-3-8B with weights of their own, so that nothing is in the cache,
in one graph with programmatic edges. Each variant is compared with its own kernels launched one
after the other: bit-equal, in every one of many replays. Attention is compared with torch in
float32. Then all graphs are timed in turns. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.attention import token
from layerzero.backends.cuda.linear import rows
from layerzero.backends.cuda.norm import norm
from layerzero.integrations.transformers.decoding.cuda import triton_step
from layerzero.operate import graphs

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
SCALE, EPS, REPLAYS, ROUNDS = DIM ** -0.5, 1e-5, 20, 40


class Variant(NamedTuple):
    attention: token.Config | str | None       # "two": Triton, two launches; None: left out
    qkv: rows.Config | None = None             # None: as it is chosen
    out: rows.Config | None = None
    gate_up: rows.Config | None = None
    down: rows.Config | None = None


ONE = token.Config(2)


def rings(stages: int, attention: token.Config | str | None = ONE) -> Variant:
    """The rings of all products but down have so many stages."""
    ring = rows.Config(stages=stages)
    return Variant(attention, ring, ring, ring)


VARIANTS = {
    "two launches, rings of 11": rings(11, "two"),
    "two launches": Variant("two"),
    "one launch": Variant(ONE),
    "clusters of 4": Variant(token.Config(4, 4, 4)),
    "rings of 7": rings(7),
    "rings of 8": rings(8),
    "rings of 10": rings(10),
    "rings of 11": rings(11),
    "gate and up split": Variant(ONE, gate_up=rows.Config(split=2)),
    "down by 4 x 8 warps": Variant(ONE, down=rows.Config(split=4)),
    "no attention": Variant(None),
    "no attention, rings of 11": rings(11, None),
}


class Layers:
    def __init__(self, batch: int, context: int, count: int) -> None:
        torch.manual_seed(0)
        self.batch, self.context, room = batch, context, context + 128

        def weight(n: int, k: int) -> Tensor:
            return (torch.randn(n, k, device="cuda") * k ** -0.5).bfloat16()

        self.weights = [(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), weight(HIDDEN, HEADS * DIM),
                         weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)) for _ in range(count)]
        self.gain = torch.ones(HIDDEN, device="cuda").bfloat16()
        self.caches = [tuple(torch.randn(batch, room, KV_HEADS, DIM, device="cuda").bfloat16()
                             for _ in "kv") for _ in range(count)]
        turns = torch.rand(room, DIM // 2, device="cuda") * 6
        self.angles = torch.cat((turns.cos(), turns.cos(), turns.sin(), turns.sin()), 1).bfloat16()
        self.position = torch.tensor([context], device="cuda")
        self.lengths = torch.full((batch,), context + 1, device="cuda")
        self.x = torch.randn(batch, 1, HIDDEN, device="cuda").bfloat16()

    def attend(self, how: token.Config | str | None, heads: Tensor, layer: int) -> Tensor:
        qk, value = heads[:, :, :HEADS + KV_HEADS], heads[:, :, HEADS + KV_HEADS:]
        keys, values = self.caches[layer]
        if how is None:
            return heads[:, :, :HEADS].flatten(2)
        if how == "two":
            query = triton_step.rotate_and_store(qk, value, self.angles, self.position, keys,
                                                 values)
            out = triton_step.attend(query, keys, values, self.lengths, SCALE)
        else:
            assert isinstance(how, token.Config)
            out = token.attend(qk, value, self.angles, self.position, keys, values, SCALE,
                               chosen=how)
        return out.flatten(1).unsqueeze(1)

    def run(self, variant: Variant) -> tuple[Tensor, Tensor]:
        x, normed = self.x, norm.rms_norm(self.x, self.gain, EPS)
        for layer, (qkv, out, gate_up, down) in enumerate(self.weights):
            heads = rows.launch(normed, qkv, None, variant.qkv)
            attended = self.attend(variant.attention, heads.view(self.batch, 1, -1, DIM), layer)
            branch = rows.launch(attended, out, None, variant.out)
            normed, x = norm.add_rms_norm(branch, x, self.gain, EPS)
            inner = rows.launch(normed, gate_up, None, variant.gate_up, gated=True)
            branch = rows.launch(inner, down, None, variant.down)
            normed, x = norm.add_rms_norm(branch, x, self.gain, EPS)
        return normed, x


def check_attention(layers: Layers, configs: set[token.Config]) -> dict[str, float]:
    """Errors of attention against float32, over those of torch in bfloat16."""
    heads = torch.randn(layers.batch, 1, HEADS + 2 * KV_HEADS, DIM, device="cuda").bfloat16()
    keys, values = layers.caches[0]

    def plain(dtype: torch.dtype) -> Tensor:
        cosine, sine = layers.angles[layers.context].to(dtype).chunk(2)
        mine = heads[:, 0].to(dtype)
        first, second = mine.chunk(2, -1)
        turned = mine * cosine + torch.cat((-second, first), -1) * sine
        k, v = (torch.cat((cache[:, :layers.context].to(dtype), new[:, None]), 1).transpose(1, 2)
                for cache, new in ((keys, turned[:, HEADS:HEADS + KV_HEADS]),
                                   (values, mine[:, HEADS + KV_HEADS:])))
        return F.scaled_dot_product_attention(turned[:, :HEADS, None], k, v, scale=SCALE,
                                              enable_gqa=True)[:, :, 0]

    truth, eager = plain(torch.float64), plain(torch.bfloat16)
    allowed = (eager.double() - truth).abs().max().item()
    found = {}
    for config in configs:
        got = layers.attend(config, heads, 0).view(layers.batch, HEADS, DIM)
        found[str(tuple(config))] = (got.double() - truth).abs().max().item() / allowed
    return found


def capture(run: Callable[[], Any]) -> Any:
    trial = graphs.attempt(run, overlap=True)
    if trial.problems:
        raise RuntimeError(str(trial.problems[0]))
    return trial


def race(ways: dict[str, Callable[[], Any]], each: float, rounds: int) -> dict[str, float]:
    """Median microseconds of each way, over `each`."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(ways), len(ways)):
            marks = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
            ways[name]()
            marks[0].record()
            for _ in range(3):
                ways[name]()
            marks[1].record()
            torch.cuda.synchronize()
            taken[name].append(marks[0].elapsed_time(marks[1]) * 1e3 / 3 / each)
    return {name: statistics.median(times) for name, times in taken.items()}


def time_layers(layers: Layers, names: list[str]) -> dict[str, Any]:
    kept, found = {}, dict[str, Any]()
    for name in names:
        try:
            want = [t.clone() for t in layers.run(VARIANTS[name])]
            kept[name] = trial = capture(lambda name=name: layers.run(VARIANTS[name]))  # type: ignore[misc]
            equal = 0
            for _ in range(REPLAYS):
                trial.graph.replay()
                equal += all(torch.equal(a, b) for a, b in zip(trial.result, want))
            found[name] = {"equal": equal / REPLAYS}
        except Exception as error:             # the others are still of interest
            kept.pop(name, None)
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            print(name, found[name], flush=True)
    times = race({name: trial.graph.replay for name, trial in kept.items()}, len(layers.weights),
                 ROUNDS)
    for name, us in times.items():
        found[name]["us"] = us
    return found


def time_attention(batch: int, context: int) -> dict[str, float]:
    """Attention alone, cold, two launches and one."""
    layers = Layers(batch, context, 0)
    count = max(4, (256 << 20) // (batch * context * 2 * KV_HEADS * DIM * 2))
    room = context + 128
    layers.caches = [tuple(torch.randn(batch, room, KV_HEADS, DIM, device="cuda",
                                       dtype=torch.bfloat16) for _ in "kv") for _ in range(count)]
    heads = torch.randn(batch, 1, HEADS + 2 * KV_HEADS, DIM, device="cuda").bfloat16()
    chosen = token.config(batch * KV_HEADS, room, compiler.machine_of(heads.device))
    ways: dict[str, Any] = {"two": "two", "one": chosen}
    trials = {name: capture(lambda how=how: [layers.attend(how, heads, n) for n in range(count)])  # type: ignore[misc]
              for name, how in ways.items()}
    return race({name: trial.graph.replay for name, trial in trials.items()}, count, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=575)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="names, separated by semicolons")
    parser.add_argument("--alone", default="8x575",
                        help="batches and contexts of attention alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = [name for name in args.variants.split(";") if name]
    with torch.no_grad():
        layers = Layers(args.batch, args.context, args.layers)
        configs = {v.attention for v in map(VARIANTS.get, names) if v is not None
                   and isinstance(v.attention, token.Config)}
        found: dict[str, Any] = {"attention error / eager": check_attention(layers, configs)}
        print(found, flush=True)
        found["layers"] = time_layers(layers, names)
        for name, row in found["layers"].items():
            print(f"{name:26}{row.get('us', 0):9.1f} us a layer, equal {row.get('equal')}",
                  flush=True)
        del layers
        found["alone"] = {}
        for pair in filter(None, args.alone.split(",")):
            found["alone"][pair] = time_attention(*map(int, pair.split("x")))
            print(f"attention alone {pair}: " + ", ".join(
                f"{n} {us:.1f}" for n, us in found["alone"][pair].items()), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
