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
from rich.console import Console
from rich.table import Table

import layerzero as lz
from layerzero.tuning.harness import in_turns

BOTH = {"batch_invariant": True, "tp_invariant": True}
BATCH = {"batch_invariant": True}


def calls(dtype: torch.dtype, device: str) -> Iterator[tuple[str, str, tuple[Any, ...], Any]]:
    """op, name, arguments, policy."""
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    hidden, wide = 1024, 3072
    for rows in (1, 8, 128):
        yield "linear", f"{rows} x {hidden} -> {wide}", (draw(rows, hidden),
                                                         draw(wide, hidden)), BOTH
    if device == "cpu":
        for rows in (1, 32):
            yield ("mlp", f"{rows} x {hidden}, inner {wide}",
                   (draw(rows, hidden), draw(2 * wide, hidden), draw(hidden, wide)), BATCH)
    yield "rms_norm", f"128 x {hidden}", (draw(128, hidden), draw(hidden)), BOTH
    keys = draw(4, 8, 1024, 64)
    yield "attention", "decode, 4 x 1024 keys", (draw(4, 16, 1, 64), keys, keys), BOTH
    query, keys = draw(1, 16, 128, 64), draw(1, 8, 128, 64)
    yield "attention", "prefill, 128 tokens", (query, keys, keys), BOTH


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
    table = Table("call", "sizes", "dtype", "as chosen", "us", "invariant", "us", "times")
    rows = []

    def measure(name: str, sizes: str, dtype: str, free: Any, fixed: Any, kernels: tuple[str, str]
                ) -> None:
        with torch.no_grad():
            times = in_turns({"free": free, "invariant": fixed}, args.seconds, device)
        usual, kept = times.median("free"), times.median("invariant")
        rows.append({"call": name, "sizes": sizes, "dtype": dtype, "kernel": kernels[0],
                     "us": usual, "invariant_kernel": kernels[1], "invariant_us": kept,
                     "times": kept / usual})
        table.add_row(name, sizes, dtype, kernels[0], f"{usual:.0f}", kernels[1], f"{kept:.0f}",
                      f"{kept / usual:.2f}")

    for dtype in (torch.float32, torch.bfloat16):
        for op, sizes, values, policy in calls(dtype, device):
            run = getattr(lz, op)
            kernels = lz.which(op, *values), lz.which(op, *values, policy=policy)
            measure(op, sizes, str(dtype)[6:], lambda f=run, v=values: f(*v),
                    lambda f=run, v=values, p=policy: f(*v, policy=p), kernels)
        for name, sizes, fixed, free in layers(dtype, device):
            measure(name, sizes, str(dtype)[6:], free, fixed, ("one call", "8 pieces, one tree"))
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "device": device, "rows": rows},
                                        indent=1))


if __name__ == "__main__":
    main()
