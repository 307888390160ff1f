"""Attention at the sizes of models, every kernel that accepts the call: causal prefill of 128 to
32,768 tokens with 32 query and 8 KV heads, windows of 256 and 1,024, encoders of 128 to 2,048.

python benchmarks/proof_grid.py LOG.jsonl [--device cuda] [--seeds 0-2] [--seconds 100] [--largest N]

Chosen rows of each result (the first, the last, those around tiles and some at random) are computed
again in float64 over all keys, and compared within the error budget of the dtype
(verify/comparison.py). Lines have the form of benchmarks/false_alarms.py.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from false_alarms import parse_seeds
from torch import Tensor

from layerzero.machine import hardware, loading
from layerzero.machine.faults import FAULTS
from layerzero.ops.attention import OP
from layerzero.spec.kernel import Kernel
from layerzero.verify.comparison import ElementTolerance, compare, error_budget
from layerzero.verify.kernel.contract import call, case_values, refusals
from layerzero.verify.report import sources_digest
from layerzero.world import snapshot as worlds

ROWS = 24                                      # queries of a head that are computed again
HEADS = 4                                      # and heads of a sequence


class Point(NamedTuple):
    name: str
    case: Mapping[str, Any]


def grid(largest: int) -> Iterator[Point]:
    """Yields small calls first, so that a short run has every kind."""
    gqa = {"b": 1, "hq": 32, "hkv": 8, "d": 128, "causal": True}
    for n in (128, 512, 2048, 8192, 32768):
        if n <= largest:
            yield Point(f"causal {n}", {**gqa, "sq": n, "sk": n})
            yield from (Point(f"window {w} of {n}", {**gqa, "sq": n, "sk": n, "window": (w, 0)})
                        for w in (256, 1024) if w < n)
            yield Point(f"decode at {n}", {**gqa, "sq": 1, "sk": n, "align": "bottom_right"})
        if n <= min(largest, 2048):
            yield Point(f"encoder {n}", {"b": 2, "hq": 16, "hkv": 16, "d": 64, "sq": n, "sk": n})


def chosen_rows(n: int, seed: int) -> Tensor:
    tiles = [i for t in (16, 64, 128, 256, 1024) for i in (t - 1, t, t + 1)]
    gen = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, n, (8,), generator=gen).tolist()
    rows = dict.fromkeys(i for i in (0, n - 1, n // 2, *drawn, *tiles) if i < n)
    return torch.tensor(sorted(list(rows)[:ROWS]))


def exact_rows(values: Mapping[str, Any], rows: Tensor, heads: Tensor) -> Tensor:
    """Returns some rows of some heads of the attention, in float64."""
    q, k, v = (values[n] for n in ("query", "key", "value"))
    group, offset = q.shape[1] // k.shape[1], 0
    if values["causal_align"] == "bottom_right":
        offset = k.shape[2] - q.shape[2]
    out = []
    for head in heads.tolist():
        queries = q[:, head].index_select(1, rows.to(q.device)).double()
        keys, content = (t[:, head // group].double() for t in (k, v))
        scores = queries @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
        i = (rows.to(q.device) + offset)[:, None]
        j = torch.arange(k.shape[2], device=q.device)
        hidden = (j > i) if values["is_causal"] else torch.zeros_like(i + j, dtype=torch.bool)
        if values["window_left"] >= 0:
            hidden = hidden | (j < i - values["window_left"])
        if values["window_right"] >= 0:
            hidden = hidden | (j > i + values["window_right"])
        out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ content)
    return torch.stack(out, 1)


def limits_of(dtype: str) -> ElementTolerance:
    return error_budget([dtype], dtype, exact=False)


def judge(kernel: Kernel, values: Mapping[str, Any], rows: Tensor, heads: Tensor, want: Tensor,
          dtype: str) -> tuple[str, str, float]:
    """Returns the status, what is wrong, and the worst row's error over what is allowed."""
    try:
        with torch.no_grad():
            got = call(kernel, values)
            if got.is_cuda:
                torch.cuda.synchronize()
    except loading.LoadFailed as e:
        return "skipped", str(e.reason), 0.0
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "skipped", "out of memory", 0.0
    except FAULTS as e:
        return "failed", f"{type(e).__name__}: {e}"[:300], 0.0
    some = got.index_select(1, heads.to(got.device)).index_select(2, rows.to(got.device))
    limits = limits_of(dtype)
    verdict = compare("output", some, want.to(some.dtype), limits)
    return ("passed" if verdict.passed else "failed", verdict.detail,
            verdict.metrics.rms / limits.rms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=parse_seeds, default=[0])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--largest", type=int, default=32768)
    args = parser.parse_args()
    target, started, failed, done = hardware.probe(args.device), time.perf_counter(), 0, 0
    about = {"machine": target.name, "signature": target.signature, "sources": sources_digest(),
             "torch": torch.__version__, "python": platform.python_version(),
             "arch": platform.machine(), "lane": "model sizes", "device": args.device, "op": OP.name}
    kernels = [k for k in worlds.current().catalog.kernels if k.op.name == OP.name
               and loading.availability(k) is None and not k.jit]     # those compile for each size
    with args.log.open("a") as log:
        for seed in args.seeds:
            for point in grid(args.largest):
                for dtype in ("bfloat16", "float16"):
                    if time.perf_counter() - started > args.seconds:
                        break
                    values = case_values(OP, point.case, dtype, args.device, seed)
                    rows = chosen_rows(values["query"].shape[2], seed)
                    heads = torch.linspace(0, values["query"].shape[1] - 1, HEADS).long()
                    want = exact_rows(values, rows, heads)
                    for kernel in kernels:
                        large = math.prod(values["query"].shape[1:3]) * values["key"].shape[2]
                        if refusals(kernel, values) or (kernel.backend == "reference"
                                                        and large > 1 << 31):
                            continue
                        clock = time.perf_counter()
                        status, says, worst = judge(kernel, values, rows, heads, want, dtype)
                        failed += status == "failed"
                        done += 1
                        log.write(json.dumps({
                            **about, "kernel": kernel.id, "seed": seed, "status": status,
                            "cases": 1, "worst": round(worst, 4), "says": says,
                            "class": f"{point.name} {dtype}" if status == "failed" else "",
                            "failures": [], "point": point.name, "dtype": dtype,
                            "seconds": round(time.perf_counter() - clock, 3), "cpu_seconds": 0.0,
                            "at": datetime.now(timezone.utc).isoformat(timespec="seconds")}) + "\n")
                        if status == "failed":
                            print(f"!! {kernel.id} {point.name} {dtype} seed {seed}: {says[:200]}",
                                  flush=True)
                    log.flush()
    print(f"{done} calls of {len(kernels)} kernels, {failed} failed, "
          f"{time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
