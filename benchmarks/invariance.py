"""Whether results keep their bits over batch sizes and numbers of ranks, and what that costs.

    python benchmarks/invariance.py [--threads 1] [--seconds 1] [--json FILE]

bits   the first rows of a batch alone, for batches of many sizes, with batch_invariant set and
       without; the layers of lz.distributed over groups of 1, 2 and 4 gloo processes
cost   a call with batch_invariant and tp_invariant set, against the same call without; and the
       tensor-parallel layers of lz.distributed on one rank, against one call
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from regret import environment

import layerzero as lz
from layerzero.tuning.harness import in_turns

BATCHES = (1, 2, 3, 5, 8, 16, 33)
RANKS = (1, 2, 4)
PLAIN = "row_linear, plain"

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


def batch_bits(dtype: torch.dtype, device: str) -> Iterator[dict[str, Any]]:
    """Compares the first rows of the largest batch with the same rows in smaller ones."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    most, hidden, wide = BATCHES[-1], 512, 1536
    x, key, value = draw(most, hidden), draw(most, 4, 300, 64), draw(most, 4, 300, 64)
    weight, gate_up, down, norm = (draw(*shape) for shape in (
        (wide, hidden), (2 * wide, hidden), (hidden, wide), (hidden,)))
    query = draw(most, 8, 1, 64)
    ids = torch.randint(0, wide, (most,), generator=gen).to(device)
    rows: dict[str, Callable[..., Any]] = {
        "linear": lambda n, **o: lz.linear(x[:n], weight, **o),
        "mlp": lambda n, **o: lz.mlp(x[:n], gate_up, down, **o),
        "rms_norm": lambda n, **o: lz.rms_norm(x[:n], norm, **o),
        "attention": lambda n, **o: lz.attention(query[:n], key[:n], value[:n], **o),
        "embedding": lambda n, **o: lz.embedding(ids[:n], weight, **o)}
    for op, call in rows.items():
        kept, free = ([n for n in BATCHES if torch.equal(call(n, **options),
                                                         call(most, **options)[:n])]
                      for options in ({"policy": BATCH}, {}))
        yield {"call": op, "dtype": str(dtype)[6:], "batches": BATCHES,
               "bits_kept": len(kept) == len(BATCHES),
               "differ_without": [n for n in BATCHES if n not in free]}


def rank_results(group: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The result of each tensor-parallel layer, whole, with this rank's shards of one model."""
    d, gen = lz.distributed, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    def own(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return d.shard(t, dim, group=group)

    def gathered(t: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, t.contiguous(), group=group)
        return torch.cat(parts, dim)

    x, wide, narrow = draw(8, 256), draw(1024, 256), draw(256, 1024)
    inner = d.column_linear(x, own(wide), group=group)
    yield "column_linear", gathered(inner, -1)
    yield "row_linear", d.row_linear(inner, own(narrow, 1), group=group)
    plain = lz.linear(inner, own(narrow, 1))       # as one would without the mode
    dist.all_reduce(plain, group=group)
    yield PLAIN, plain
    yield "mlp", d.parallel_mlp(x, own(wide), own(wide + 1), own(narrow, 1), group=group)
    query, key, value = (own(draw(2, heads, 40, 32), 1) for heads in (16, 8, 8))
    yield "attention", gathered(
        d.parallel_attention(query, key, value, is_causal=True, group=group), 1)
    yield "embedding", d.parallel_embedding(torch.arange(64), own(wide, 1), group=group)
    yield "rms_norm", lz.rms_norm(x, draw(256))


def compare_ranks(rank: int, folder: str) -> None:
    """Runs in each of four processes: every layer over groups of one, two and four."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank,
                            world_size=4)
    groups = {1: [dist.new_group([r]) for r in range(4)][rank],
              2: [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2], 4: None}
    found = []
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            results = {n: dict(rank_results(groups[n], dtype)) for n in RANKS}
            same = {name: [n for n in RANKS if torch.equal(results[n][name], whole)]
                    for name, whole in results[1].items()}
            plain = same.pop(PLAIN)
            without = [n for n in RANKS if n not in plain]
            found += [{"call": name, "dtype": str(dtype)[6:], "ranks": RANKS,
                       "bits_kept": len(kept) == len(RANKS),
                       **({"differ_without": without} if name == "row_linear" else {})}
                      for name, kept in same.items()]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rank_bits() -> list[dict[str, Any]]:
    """Returns for each layer whether all ranks of all groups had the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(compare_ranks, (folder,), 4, start_method="spawn")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(4)]
    return [{**row, "bits_kept": all(other[i]["bits_kept"] for other in found)}
            for i, row in enumerate(found[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = environment(device)
    with torch.no_grad():
        batches = [row for dtype in (torch.float32, torch.bfloat16)
                   for row in batch_bits(dtype, device)]
    ranks = rank_bits() if dist.is_available() and dist.is_gloo_available() else []
    for row in (*batches, *ranks):
        over = f"{'ranks' if 'ranks' in row else 'batches'} {row.get('ranks', BATCHES)}"
        print(f"{row['call']:<14}{row['dtype']:<10}{over:<34}"
              f"{'the same bits' if row['bits_kept'] else 'OTHER BITS'}"
              + (f"; without the mode others at {row['differ_without']}"
                 if row.get("differ_without") else ""))
    print()
    print(f"{'call':<14}{'sizes':<27}{'dtype':<10}{'as chosen':<30}{'us':>8}  "
          f"{'invariant':<28}{'us':>8}{'times':>7}")
    rows = []

    def measure(name: str, sizes: str, dtype: str, free: Any, fixed: Any, kernels: tuple[str, str]
                ) -> None:
        with torch.no_grad():
            times = in_turns({"free": free, "invariant": fixed}, args.seconds, device)
        usual, kept = times.median("free"), times.median("invariant")
        ratio = times.gain(over="invariant", of="free")
        rows.append({"call": name, "sizes": sizes, "dtype": dtype, "kernel": kernels[0],
                     "us": usual, "invariant_kernel": kernels[1], "invariant_us": kept,
                     "times": ratio.median, "times_quartiles": [ratio.low, ratio.high]})
        print(f"{name:<14}{sizes:<27}{dtype:<10}{kernels[0]:<30}{usual:>8.0f}  "
              f"{kernels[1]:<28}{kept:>8.0f}{ratio.median:>7.2f}", flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        for op, sizes, values, policy in calls(dtype, device):
            run = getattr(lz, op)
            kernels = lz.which(op, *values), lz.which(op, *values, policy=policy)
            measure(op, sizes, str(dtype)[6:], lambda f=run, v=values: f(*v),
                    lambda f=run, v=values, p=policy: f(*v, policy=p), kernels)
        for name, sizes, fixed, free in layers(dtype, device):
            measure(name, sizes, str(dtype)[6:], free, fixed, ("one call", "8 pieces, one tree"))
    kept = all(row["bits_kept"] for row in (*batches, *ranks))
    if args.json:
        args.json.write_text(json.dumps({
            "benchmark": "invariance", "environment": machine, "bits_kept": kept,
            "over_batches": batches, "over_ranks": ranks, "cost": rows}, indent=1) + "\n")
    if not kept:
        raise SystemExit("bits differ where they must not")


if __name__ == "__main__":
    main()
