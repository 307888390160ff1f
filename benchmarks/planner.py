"""A decoder layer planned whole against the same layer chosen op by op: expected and measured.

    python benchmarks/planner.py [--threads 1] [--seconds 2] [--json FILE]
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

from layerzero.models.block import Block, Either, Glue, Part, Stage
from layerzero.models.decoder import decoder_block, decoder_values
from layerzero.models.decoder_config import DecoderConfig
from layerzero.plan.block import plan_block
from layerzero.tuning.harness import in_turns

MODELS = {
    "smollm2-135m": DecoderConfig(576, 9, 3, inner=1536),
    "qwen3-0.6b": DecoderConfig(1024, 16, 8, head_dim=128, inner=3072),
    "llama-3.2-1b": DecoderConfig(2048, 32, 8, inner=8192)}
NORMS = {"4 residual norms, 512 rows": (512, 1024, 4),
         "4 residual norms, 4096 rows": (4096, 1024, 4)}
STEPS = {"prefill 128": (128, 0), "prefill 512": (512, 0), "decode at 1024": (1, 1023)}


def residual_norms(count: int) -> Block:
    """Where branches are added and normed again and again, as between the experts or adapters of a
    layer."""
    parts: list[Part] = []
    for i in range(count):
        total, normed = f"t{i + 1}", f"n{i + 1}"
        plain = (Glue("add", torch.add, (f"t{i}", "branch"), (total,), is_copy=False),
                 Stage("rms_norm", {"x": total, "weight": "w"}, (normed,)))
        fused = (Stage("add_rms_norm", {"x": "branch", "residual": f"t{i}", "weight": "w"},
                       (normed, total)),)
        parts.append(Either((plain, fused)))
    return Block(f"{count} residual norms", tuple(parts), (f"n{count}", f"t{count}"))


def cases(device: str) -> Iterator[tuple[str, str, torch.dtype, Block, dict[str, Any]]]:
    for dtype in (torch.float32, torch.bfloat16):
        for name, (rows, hidden, count) in NORMS.items():
            x, branch, w = (torch.randn(*shape, dtype=dtype, device=device)
                            for shape in ((rows, hidden), (rows, hidden), (hidden,)))
            yield "", name, dtype, residual_norms(count), {"t0": x, "branch": branch, "w": w}
    for model, config in MODELS.items():
        for step, (seq, past) in STEPS.items():
            for dtype in (torch.float32, torch.bfloat16):
                values = decoder_values(config, seq=seq, past=past, dtype=dtype, device=device)
                yield model, step, dtype, decoder_block(config, cached=past > 0), dict(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("model", "step", "dtype", "greedy us", "plan us", "gain", "copies greedy/plan us",
                  "fused")
    rows = []
    for model, step, dtype, block, values in cases(device):
        greedy, plan = (plan_block(block, values, greedy=g) for g in (True, False))
        with torch.no_grad():
            times = in_turns({"greedy": lambda p=greedy, v=values: p(**v),
                              "plan": lambda p=plan, v=values: p(**v)},
                             args.seconds, device)
        gain = times.gain(over="greedy", of="plan")
        rows.append({"model": model, "step": step, "dtype": str(dtype),
                     "greedy_us": times.median("greedy"), "plan_us": times.median("plan"),
                     "gain": gain.to_json(), "greedy": greedy.to_json(),
                     "plan": plan.to_json()})
        table.add_row(model, step, str(dtype)[6:], f"{times.median('greedy'):.0f}",
                      f"{times.median('plan'):.0f}", f"{gain} {gain.verdict}",
                      f"{greedy.transform_cost_total:.1f} / {plan.transform_cost_total:.1f}",
                      ", ".join(dict.fromkeys(plan.fused_ops)))
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
