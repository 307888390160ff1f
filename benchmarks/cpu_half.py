"""bfloat16 and float16 on a CPU: what lz runs beside the same call in float32, and beside torch in
either.

    OMP_NUM_THREADS=1 python benchmarks/cpu_half.py
        a table, and a JSON under results/local; 3 to 5 minutes
    OMP_NUM_THREADS=1 python benchmarks/cpu_half.py --model
        SmolLM2-135M through generate(): tokens a second
    OMP_NUM_THREADS=1 python benchmarks/cpu_half.py --quick
        shows that everything runs, its numbers say little

With one thread the clock is that of the thread, which does not count what other processes take of
the machine. The four take turns in rounds, in an order that is shuffled each time; a ratio is the
median over the rounds of the ratio of neighbours in time. On a CPU without arithmetic in these
types torch computes them an element at a time: how long an element takes is measured first, and
torch's own call is "not run" where it would take longer than --most. The model in bfloat16 as
transformers has it is timed once on a prompt of 4 tokens and on `--stock-tokens` tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import layerzero as lz
from layerzero.machine import hardware

OUT = Path(__file__).parent / "results" / "local" / "cpu-half.json"
HALF = ("bfloat16", "float16")
BATCH_SECONDS = 2e-3                           # of one turn of one contestant
WAYS = ("lz half", "lz float32", "torch float32", "torch half")
Way = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    op: str
    shape: str
    tensors: Callable[[], tuple[Tensor, ...]]  # in float32
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    # multiplications, by which torch's time in a half type is told
    products: int = 0


def randn(*shape: int, by: float = 1.0) -> Tensor:
    return torch.randn(shape) * by


def swiglu(x: Tensor, into: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, into).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


def cases(quick: bool) -> Iterator[Case]:
    for inputs, outputs, most in ((576, 1536, 512), (1024, 2816, 256), (4096, 4096, 64)):
        for rows in (1, 2, 4, 8, 16, 64, 256, 512):
            if rows > most or (quick and (rows > 4 or inputs > 576)):
                continue
            yield Case("linear", f"{rows}x{inputs}->{outputs}",
                       lambda r=rows, k=inputs, n=outputs: (randn(r, k), randn(n, k, by=k ** -0.5)),
                       lz.linear, F.linear, rows * inputs * outputs)
    for hidden, inner, most in ((576, 1536, 256), (2048, 5632, 16)):
        for rows in (1, 8, 16, 64, 256):
            if rows > most or (quick and (rows > 1 or hidden > 576)):
                continue
            yield Case("mlp", f"{rows}x{hidden}, {inner} inside",
                       lambda r=rows, h=hidden, i=inner: (
                randn(r, h), randn(2 * i, h, by=h ** -0.5), randn(h, i, by=i ** -0.5)),
                lz.mlp, swiglu, 3 * rows * hidden * inner)
    for heads, kv_heads, seq, dim in ((9, 3, 128, 64), (16, 16, 256, 64), (9, 3, 512, 64),
                                      (32, 8, 256, 128)):
        if quick and seq > 128:
            continue
        yield Case("prefill attention", f"{heads} over {kv_heads} heads, {seq} tokens, {dim}",
                   lambda h=heads, kv=kv_heads, s=seq, d=dim: (
                       randn(1, h, s, d), randn(1, kv, s, d), randn(1, kv, s, d)),
                   lambda q, k, v: lz.attention(q, k, v, is_causal=True),
                   lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                  enable_gqa=True),
                   2 * heads * seq * seq * dim)
    for heads, kv_heads, keys, dim in ((9, 3, 512, 64), (16, 16, 1024, 64), (32, 8, 4096, 128)):
        if quick and keys > 512:
            continue
        yield Case("decode attention", f"{heads} over {kv_heads} heads, {keys} keys, {dim}",
                   lambda h=heads, kv=kv_heads, s=keys, d=dim: (
                       randn(1, h, 1, d), randn(1, kv, s, d), randn(1, kv, s, d)),
                   lz.attention,
                   lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                   2 * heads * keys * dim)
    for rows, hidden in ((1, 576), (1, 4096), (128, 576), (256, 4096)):
        if quick and rows * hidden > 576:
            continue
        yield Case("rms_norm", f"{rows}x{hidden}", lambda r=rows, h=hidden: (randn(r, h), randn(h)),
                   lz.rms_norm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6))
        yield Case("add_rms_norm", f"{rows}x{hidden}",
                   lambda r=rows, h=hidden: (randn(r, h), randn(r, h), randn(h)),
                   lz.add_rms_norm, add_norm)
        yield Case("layer_norm", f"{rows}x{hidden}",
                   lambda r=rows, h=hidden: (randn(r, h), randn(h), randn(h)),
                   lz.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b))


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(way: Way, calls: int = 1) -> float:
    start = clock()
    for _ in range(calls):
        way()
    return (clock() - start) / calls


def seconds_per_product(dtype: torch.dtype) -> float:
    """What one multiplication of torch's own linear takes; the more of two numbers of rows."""
    found = []
    for rows in (1, 4):
        x, weight = randn(rows, 256).to(dtype), randn(128, 256).to(dtype)
        F.linear(x, weight)
        found.append(seconds_of(lambda x=x, w=weight: F.linear(x, w), 3) / (rows * 256 * 128))
    return max(found)


def race(ways: dict[str, Way], rounds: int, most: float) -> dict[str, list[float]]:
    """Seconds of a call, one number for each round; of a slow one of the first rounds only."""
    calls, once = {}, {}
    for name, way in ways.items():
        way()
        once[name] = seconds_of(way)
        calls[name] = max(1, int(BATCH_SECONDS / max(once[name], 1e-7)))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(0)
    for turn in range(rounds):
        for name in chance.sample(list(ways), len(ways)):
            if turn < 2 or once[name] * rounds < most:
                taken[name].append(seconds_of(ways[name], calls[name]))
    return taken


def operations(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in HALF:
        dtype = getattr(torch, name)
        each = seconds_per_product(dtype)
        print(
            f"\n{name}: torch's own linear takes {each * 1e9:.2f} ns for a multiplication; "
            f"microseconds\n{'':54}{'lz half':>10}{'lz f32':>10}{'torch f32':>10}{'torch half':>11}{'/ lz f32':>9}{'/ t f32':>9}"
            "  kernel")
        for case in cases(args.quick):
            if args.only not in case.op:
                continue
            torch.manual_seed(0)
            wide = case.tensors()
            half = tuple(t.to(dtype) for t in wide)
            ways: dict[str, Way] = {
                "lz half": lambda c=case, t=half: c.ours(*t),
                "lz float32": lambda c=case, t=wide: c.ours(*t),
                "torch float32": lambda c=case, t=wide: c.torchs(*t)}
            if each * case.products < args.most:
                ways["torch half"] = lambda c=case, t=half: c.torchs(*t)
            got, want = ways["lz half"](), case.torchs(*(t.float() for t in half))
            got, want = (t[0] if isinstance(t, tuple) else t for t in (got, want))
            apart = float((got.float() - want).norm() / want.norm())
            taken = race(ways, 2 if args.quick else args.rounds, args.most)
            us = {n: statistics.median(t) * 1e6 for n, t in taken.items()}
            ours = taken["lz half"]
            over = {n: statistics.median(a / b for a, b in zip(ours, taken[n])) for n in ways
                    if n != "lz half"}
            kernel = lz.which(case.op.split()[-1], *half,
                              **({"is_causal": True} if "prefill" in case.op else {}))
            slow = f"{us['torch half']:11.1f}" if "torch half" in us else f"{'not run':>11}"
            print(
                f"{case.op:18}{case.shape:36}{us['lz half']:10.1f}{us['lz float32']:10.1f}{us['torch float32']:10.1f}"
                f"{slow}{over['lz float32']:9.2f}{over['torch float32']:9.2f}  {kernel}",
                flush=True)
            rows.append({"op": case.op, "shape": case.shape, "dtype": name, "kernel": str(kernel),
                         "us": us, "lz half over": over, "error": apart,
                         "torch half": "run" if "torch half" in us
                         else f"not run: longer than {args.most} s"})
    worst = max(rows, key=lambda r: r["lz half over"]["lz float32"])
    print(f"\nworst against lz in float32: {worst['op']} {worst['shape']} {worst['dtype']}, "
          f"{worst['lz half over']['lz float32']:.2f}")
    return rows


def generating(args: argparse.Namespace) -> dict[str, Any]:
    from layerzero.integrations.gguf.llama_peer import build_llama
    from layerzero.integrations.gguf.model import packaged_model, read_gguf
    from layerzero.integrations.transformers.accelerate import accelerate

    found = read_gguf(packaged_model())
    base = build_llama(found.config, found.weights)
    text = ("Once upon a time there was a little robot who wanted to learn about the sea, and so "
            "it went to the shore. ")
    ids = torch.tensor([found.tokenize(text * 40)[:args.context]])
    models, reports = {}, {}
    for dtype in ("float32", "bfloat16"):
        for who in ("transformers", "lz.accelerate"):
            model = copy.deepcopy(base).to(getattr(torch, dtype))
            model.set_attn_implementation("sdpa")
            model.generation_config.pad_token_id = 0
            models[f"{who}, {dtype}"] = model
            if who == "lz.accelerate":
                reports[dtype] = accelerate(model, measure=dtype == "float32")
                print(dtype, reports[dtype], flush=True)

    def generate(model: Any, ids: Tensor, new: int) -> tuple[float, Tensor]:
        start = clock()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                             min_new_tokens=new,
                             do_sample=False)
        return clock() - start, out

    slow = models.pop("transformers, bfloat16")
    texts = {name: generate(model, ids, args.tokens)[1][0, ids.shape[1]:]
             for name, model in models.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    chance = random.Random(0)
    for _ in range(args.rounds):
        for name in chance.sample(list(models), len(models)):
            prompt = generate(models[name], ids, 1)[0]
            taken[name].append((prompt, (generate(models[name], ids, args.tokens)[0] - prompt)
                                / (args.tokens - 1)))
    rows: dict[str, dict[str, Any]] = {
        name: {"prompt_tokens": ids.shape[1], "prompt_s": statistics.median(t[0] for t in times),
               "tokens_per_s": 1 / statistics.median(t[1] for t in times)}
        for name, times in taken.items()}
    short = ids[:, :4]
    prompt = generate(slow, short, 1)[0]
    whole = generate(slow, short, 1 + args.stock_tokens)[0]
    rows["transformers, bfloat16"] = {"prompt_tokens": 4, "prompt_s": prompt,
                                      "tokens_per_s": args.stock_tokens / max(whole - prompt, 1e-9)}
    print(f"\nSmolLM2-135M, {torch.get_num_threads()} threads, {args.tokens} new tokens\n"
          f"{'':28}{'prompt':>8}{'ms':>10}{'tokens/s':>10}")
    for name, row in rows.items():
        print(
            f"{name:28}{row['prompt_tokens']:8}{row['prompt_s'] * 1e3:10.1f}{row['tokens_per_s']:10.2f}")
    exact, half = texts["transformers, float32"], texts["lz.accelerate, bfloat16"]
    same = int((exact != half).int().argmax()) if bool((exact != half).any()) else len(exact)
    print(f"the first {same} of {len(exact)} tokens are those of float32")
    return {"rows": rows, "tokens_as_in_float32": same,
            "reports": {n: r.to_json() for n, r in reports.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", action="store_true",
                        help="a whole model, instead of single operations")
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--most", type=float, default=2.0,
                        help="seconds that a call of torch's own may take")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--stock-tokens", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.model else 21)
    with torch.no_grad():
        found: dict[str, Any] = ({"model": generating(args)} if args.model
                                 else {"operations": operations(args)})
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    cpu = hardware.probe("cpu")
    kept.update(found)
    kept["environment"] = {"cpu": cpu.name, "isa": list(cpu.isa),
                           "threads": torch.get_num_threads(),
                           "clock": "of the thread" if torch.get_num_threads() == 1
                           else "of the wall",
                           "torch": torch.__version__, "python": sys.version.split()[0]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
