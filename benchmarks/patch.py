"""Stock transformers models against the same models after lz.patch, in turns: decode steps and
prefill, ratios.

    python benchmarks/patch.py [--families llama,gpt2] [--size tiny|small] [--dtype float32] [--device cpu]
                               [--threads 1] [--rounds 15] [--skip linear] [--json FILE]

`tiny` models (hidden 64, two layers) show what Python costs; `small` ones (hidden 576, as
SmolLM2-135M with fewer layers) what kernels gain.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hf"))
import models

from layerzero.integrations.transformers.patch import patch

SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6,
         "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
         "max_position_embeddings": 2048}
SIZED = ("llama", "mistral", "qwen2", "qwen3")
PROMPT, STEPS = 32, 8


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was asked to; of one CPU thread, those it was
    really running."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1
            else time.perf_counter())


def decode(model: Any, prompt: torch.Tensor) -> Callable[[], float]:
    """Seconds for one step of one token, after a prompt."""
    def run() -> float:
        with torch.inference_mode():
            out = model(input_ids=prompt, use_cache=True)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            start = now(prompt.device)
            for _ in range(STEPS):
                out = model(input_ids=token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return (now(prompt.device) - start) / STEPS

    return run


def whole(model: Any, given: dict[str, torch.Tensor]) -> Callable[[], float]:
    def run() -> float:
        with torch.inference_mode():
            start = now(model.device)
            model(**given)
            return now(model.device) - start

    return run


def in_turns(first: Callable[[], float], second: Callable[[], float],
             rounds: int) -> tuple[float, float, float]:
    """The median of each in seconds, and the median over the rounds of first / second."""
    for run in (first, second, first, second):
        run()
    pairs = []
    for i in range(rounds):
        a = first() if i % 2 else None
        b = second()
        pairs.append((first() if a is None else a, b))
    a, b = (statistics.median(column) for column in zip(*pairs))
    return a, b, statistics.median(x / y for x, y in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(models.FAMILIES))
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip", default="", help="kinds that are not patched")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    skip = tuple(filter(None, args.skip.split(",")))
    rows = []
    for family in args.families.split(","):
        if args.size == "small" and family not in SIZED:
            continue
        stock = models.tiny(family, **(SMALL if args.size == "small" else {}))
        stock = stock.to(args.device, getattr(torch, args.dtype))
        ours = copy.deepcopy(stock)
        patch(ours, skip=skip)
        given = {n: t.to(args.device, stock.dtype if t.is_floating_point() else t.dtype)
                 for n, t in models.inputs(family).items()}
        races = {"forward": (whole(stock, given), whole(ours, given))}
        if family in models.CAUSAL:
            prompt = models.tokens(1, PROMPT).to(args.device)
            races = {"decode": (decode(stock, prompt), decode(ours, prompt)),
                     "prefill": (whole(stock, {"input_ids": prompt}),
                                 whole(ours, {"input_ids": prompt}))}
        for name, pair in races.items():
            before, after, ratio = in_turns(*pair, args.rounds)
            rows.append({"family": family, "size": args.size, "dtype": args.dtype,
                         "device": args.device, "threads": args.threads, "what": name,
                         "stock_us": before * 1e6, "patched_us": after * 1e6,
                         "ratio": ratio})
    table = Table("family", "what", "stock us", "patched us", "stock / patched", box=None)
    for r in rows:
        table.add_row(r["family"], r["what"], f"{r['stock_us']:.0f}", f"{r['patched_us']:.0f}",
                      f"{r['ratio']:.2f}")
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2)
                             + "\n")


if __name__ == "__main__":
    main()
