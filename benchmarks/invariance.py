"""What it costs that a result keeps its bits: batch invariance, and layers for any number of ranks.

    python benchmarks/invariance.py [--threads 1] [--seconds 1] [--json FILE]

A call with batch_invariant and tp_invariant set, against the same call without; and the
tensor-parallel layers of lz.distributed on one rank, against one call.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import layerzero as lz
from layerzero.tuning.harness import in_turns

BOTH = {"batch_invariant": True, "tp_invariant": True}
BATCH = {"batch_invariant": True}


def calls(dtype: torch.dtype, device: str) -> Iterator[tuple[str, str, tuple[Any, ...], Any]]:
    """op, name, arguments, policy."""
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    hidden, wide = (4096, 14336) if device == "cuda" else (1024, 3072)
    for rows in (1, 8, 128, 2048) if device == "cuda" else (1, 8, 128):
        yield "linear", f"{rows} x {hidden} -> {wide}", (draw(rows, hidden),
                                                         draw(wide, hidden)), BOTH
    for rows in (1, 512) if device == "cuda" else (1, 32):
        yield ("mlp", f"{rows} x {hidden}, inner {wide}",
               (draw(rows, hidden), draw(2 * wide, hidden), draw(hidden, wide)), BATCH)
    yield "rms_norm", f"128 x {hidden}", (draw(128, hidden), draw(hidden)), BOTH
    heads, dim, tokens = (32, 128, 2048) if device == "cuda" else (16, 64, 128)
    keys = draw(4, 8, 8 * tokens, dim)
    yield "attention", f"decode, 4 x {8 * tokens} keys", (draw(4, heads, 1, dim), keys, keys), BOTH
    query, keys = draw(1, heads, tokens, dim), draw(1, 8, tokens, dim)
    yield "attention", f"prefill, {tokens} tokens", (query, keys, keys), BOTH


def layers(dtype: torch.dtype, device: str) -> Iterator[tuple[str, str, Any, Any]]:
    """name, sizes, the layer in pieces, the same as one call."""
    x, wide, narrow = (torch.randn(shape, device=device).to(dtype)
                       for shape in ((32, 1024), (3072, 1024), (1024, 3072)))
    inner = torch.randn(32, 3072, device=device).to(dtype)
    d = lz.distributed
    yield ("column_linear", "32 x 1024 -> 3072", lambda: d.column_linear(x, wide),
           lambda: lz.linear(x, wide))
    yield ("row_linear", "32 x 3072 -> 1024", lambda: d.row_linear(inner, narrow),
           lambda: lz.linear(inner, narrow))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'call':<14}{'sizes':<27}{'dtype':<10}{'as chosen':<30}{'us':>8}  "
          f"{'invariant':<28}{'us':>8}{'times':>7}")
    rows = []

    def measure(name: str, sizes: str, dtype: str, free: Any, fixed: Any, kernels: tuple[str, str]
                ) -> None:
        with torch.no_grad():
            times = in_turns({"free": free, "invariant": fixed}, args.seconds, device)
        usual, kept = times.median("free"), times.median("invariant")
        rows.append({"call": name, "sizes": sizes, "dtype": dtype, "kernel": kernels[0],
                     "us": usual, "invariant_kernel": kernels[1], "invariant_us": kept,
                     "times": kept / usual})
        print(f"{name:<14}{sizes:<27}{dtype:<10}{kernels[0]:<30}{usual:>8.0f}  "
              f"{kernels[1]:<28}{kept:>8.0f}{kept / usual:>7.2f}", flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        for op, sizes, values, policy in calls(dtype, device):
            run = getattr(lz, op)
            kernels = lz.which(op, *values), lz.which(op, *values, policy=policy)
            measure(op, sizes, str(dtype)[6:], lambda f=run, v=values: f(*v),
                    lambda f=run, v=values, p=policy: f(*v, policy=p), kernels)
        for name, sizes, fixed, free in layers(dtype, device):
            measure(name, sizes, str(dtype)[6:], free, fixed, ("one call", "8 pieces, one tree"))
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "device": device, "rows": rows},
                                        indent=1))


if __name__ == "__main__":
    main()
