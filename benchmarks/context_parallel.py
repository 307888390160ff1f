"""Context parallelism: what the exchanges cost, how much of them is hidden behind the attention, and
what copies cost.

    OMP_NUM_THREADS=1 python benchmarks/context_parallel.py
        two processes on this CPU that talk through gloo; a table, and a JSON under results/local
    python benchmarks/context_parallel.py --simulated 8 --device cuda --tokens 65536
        all ranks in one process on one device, divided by their number: the work of one rank
    ... --quick
        shows that everything runs, its numbers say little

`waited` is how long a rank stood in wait(); `exchange` the same where it waits for each exchange as
soon as it has started it; both the least of the rounds, since one rank also waits for the other, and
on a busy machine that is all one sees. `hidden` is the share that the overlap saves. `copies` is the share of the time in which tensors are packed, joined, gathered by
index or cast, by torch's profiler. "rearranged" copies the gathered keys in order and calls twice,
with the same kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from regret import environment

import layerzero as lz
from layerzero.dispatch.background import compiling
from layerzero.integrations import context_parallel as cp
from layerzero.integrations.context_parallel import recorded
from layerzero.integrations.context_parallel.ranks import Arrived, Exchange, Pending, ProcessRanks

OUT = Path(__file__).parent / "results" / "local" / "context-parallel.json"
COPIES = ("aten::copy_", "aten::cat", "aten::index_select", "aten::index", "aten::clone",
          "aten::index_add_", "aten::_index_put_impl_", "aten::stack", "aten::gather")
COPY_KERNELS = ("copy", "Cat", "index", "gather", "Memcpy")
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "zigzag, 1 KV head at a time": (cp.zigzag_attention, {"heads_k_stride": 1}),
    "zigzag, 2 KV heads": (cp.zigzag_attention, {"heads_k_stride": 2}),
    "zigzag, all KV heads": (cp.zigzag_attention, {"heads_k_stride": 0}),
    "zigzag, rearranged": (cp.zigzag_attention, {"heads_k_stride": 0, "rearrange": True}),
    "ring": (cp.ring_attention, {}), "ulysses": (cp.ulysses_attention, {})}


class TimedRanks(ProcessRanks):
    """Counts the seconds in wait(); `blocking`: waits for an exchange as soon as it has started."""

    def __init__(self, blocking: bool) -> None:
        super().__init__()
        self.waited, self.blocking = 0.0, blocking

    def _start(self, exchange: Exchange) -> Pending:
        pending, ranks = super()._start(exchange), self

        class Timed:
            def wait(self) -> torch.Tensor:
                start = time.perf_counter()
                result = pending.wait()
                ranks.waited += time.perf_counter() - start
                return result

        return Arrived(Timed().wait()) if self.blocking else Timed()


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def copied(run: Callable[[], Any], device: str) -> float:
    """The share of the time that goes into copies."""
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")) as p:
        run()
        clock(device)
    if device == "cuda":
        spent = [(e.key, e.self_device_time_total) for e in p.key_averages()]
        copies = sum(t for name, t in spent if any(part in name for part in COPY_KERNELS)
                     and not name.startswith("aten::"))
    else:
        spent = [(e.key, e.self_cpu_time_total) for e in p.key_averages()]
        copies = sum(t for name, t in spent if name in COPIES)
    return copies / max(sum(t for _, t in spent), 1e-9)


def measure(group: Any, tensors: list[Any], starts: torch.Tensor, longest: int, way: str, kv_heads: int,
            rounds: int, device: str) -> dict[str, float]:
    """Milliseconds of forward and backward, and of waiting where the group counts it."""
    method, options = WAYS[way]
    options = {**options, **({"heads_k_stride": kv_heads} if options.get("heads_k_stride") == 0 else {})}
    forward, backward, waited = [], [], []
    flat = [t for one in tensors for t in (one if isinstance(one, list) else [one])]

    def run() -> None:
        if isinstance(group, TimedRanks):
            group.waited = 0.0
        start = clock(device)
        outs = method(*tensors, starts, longest, group=group, **options)
        middle = clock(device)
        outs = outs if isinstance(outs, list) else [outs]
        torch.autograd.grad(outs, flat, [torch.ones_like(o) for o in outs])
        forward.append(middle - start)
        backward.append(clock(device) - middle)
        waited.append(getattr(group, "waited", 0.0))

    run()
    compiling.wait()                           # the kernel that is to serve may not be there yet
    for _ in range(rounds + 1):
        run()
    share = copied(run, device)
    return {"forward_ms": median_ms(forward[2:-1]), "backward_ms": median_ms(backward[2:-1]),
            "waited_ms": 1e3 * min(waited[2:-1]), "copies": share}


def made(tokens: int, world_size: int, heads: tuple[int, int, int], rank: int, dtype: torch.dtype,
         device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A rank's tensors of two sequences, a quarter and the rest of the tokens, and the boundaries."""
    cu = [0, tokens // 4, tokens]
    gen = torch.Generator(device).manual_seed(rank)
    tensors = [torch.randn((tokens // world_size, n, heads[2]), generator=gen, device=device).to(dtype)
               .requires_grad_() for n in (heads[0], heads[1], heads[1])]
    return tensors, torch.tensor(cu, dtype=torch.int32, device=device) // world_size


def process(rank: int, world_size: int, store: str, args: argparse.Namespace, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank,
                            world_size=world_size)
    tensors, starts = made(args.tokens, world_size, args.heads, rank, torch.float32, "cpu")
    longest = args.tokens * 3 // 4 // world_size
    rows = []
    for way in WAYS:
        overlapped, blocking = (measure(TimedRanks(how), tensors, starts, longest, way, args.heads[1],
                                        args.rounds, "cpu") for how in (False, True))
        exchange = blocking["waited_ms"]
        rows.append({"way": way, **overlapped, "exchange_ms": exchange,
                     "hidden": 1 - overlapped["waited_ms"] / exchange if exchange else 0.0})
        dist.barrier()
    if rank == 0:
        Path(answer).write_text(json.dumps(rows))
    dist.destroy_process_group()


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    size = args.simulated
    if args.kernel:
        recorded.grouped_attention = functools.partial(lz.grouped_attention, backend=args.kernel)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    parts = [made(args.tokens, size, args.heads, rank, dtype, args.device) for rank in range(size)]
    starts, tensors = parts[0][1], [list(t) for t in zip(*(tensors for tensors, _ in parts))]
    rows = []
    for way in WAYS:
        if args.only not in way or (way == "ulysses" and args.heads[0] % size):
            continue
        try:
            row = measure(cp.SimulatedRanks(size), tensors, starts, args.tokens * 3 // 4 // size, way,
                          args.heads[1], args.rounds, args.device)
        except torch.OutOfMemoryError as e:
            rows.append({"way": way, "failed": str(e)[:80]})
            continue
        rows.append({"way": way, "copies": row["copies"],
                     **{n: row[n] / size for n in ("forward_ms", "backward_ms")}})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of both sequences, over all ranks")
    parser.add_argument("--heads", type=lambda t: tuple(map(int, t.split(","))), default=(8, 4, 64),
                        help="query heads, KV heads, head_dim")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--simulated", type=int, default=0, help="ranks, all in this process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernel", default="", help="of grouped_attention; simulated")
    parser.add_argument("--only", default="", help="ways whose name contains this; simulated")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 256, 1
    if args.simulated:
        rows = simulated(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            store, answer = os.path.join(folder, "store"), os.path.join(folder, "rows.json")
            mp.spawn(process, (args.world_size, store, args, answer), args.world_size)
            rows = json.loads(Path(answer).read_text())
    names = ("forward_ms", "backward_ms", "exchange_ms", "waited_ms", "hidden", "copies")
    print(f"{'':28}" + "".join(f"{n.replace('_ms', ' ms'):>13}" for n in names))
    for row in rows:
        shown = [("" if n not in row else f"{row[n]:.1%}" if n in ("hidden", "copies")
                  else f"{row[n]:.2f}") for n in names]
        print(f"{row['way']:28}" + "".join(f"{t:>13}" for t in shown) + row.get("failed", ""))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "benchmark": "context_parallel", "environment": environment(args.device), "rows": rows,
        "tokens": args.tokens, "heads": args.heads, "ranks": args.simulated or args.world_size,
        "simulated": bool(args.simulated), "kernel": args.kernel}, indent=1) + "\n")


if __name__ == "__main__":
    main()
