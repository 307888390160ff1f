"""Decoding of several sequences that share a prefix, on the CPU: shared pages beside separate ones.

    OMP_NUM_THREADS=1 python benchmarks/shared_prefix.py

Eight sequences in the attention of SmolLM2 (9 query heads, 3 KV heads of 64), one query each. All
ways take turns in one run; the figures are of the quickest round, as a busy machine adds to others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from layerzero.backends.native import KERNELS
from layerzero.backends.torch_paged import KERNELS as TORCH

PAGE, HEADS, KV_HEADS, DIM = 16, 9, 3, 64


def ways(sequences: int, prefix: int, own: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    gen = torch.Generator().manual_seed(0)
    kernels = {k.id: k.load() for k in (*KERNELS, *TORCH)
               if k.id in ("native.paged_attention", "native.attention_decode",
                           "torch.paged_gather")}
    width = (prefix + own) // PAGE
    pages = sequences * width
    query = torch.randn((sequences, HEADS, DIM), generator=gen).to(dtype)
    cache = [torch.randn((pages, PAGE, KV_HEADS, DIM), generator=gen).to(dtype) for _ in "kv"]
    separate = torch.randperm(pages, generator=gen).view(sequences, width).int()
    shared = separate.clone()
    shared[:, :prefix // PAGE] = separate[0, :prefix // PAGE]
    lengths = torch.full((sequences,), prefix + own, dtype=torch.int32)
    dense = [cache[i][separate.long()].flatten(1, 2).transpose(1, 2).contiguous() for i in (0, 1)]

    def paged(name: str, table: torch.Tensor) -> Callable[[], Any]:
        return lambda: kernels[name](query, *cache, table, lengths, is_causal=True)

    return {"shared pages": paged("native.paged_attention", shared),
            "separate pages": paged("native.paged_attention", separate),
            "native.attention_decode": lambda: kernels["native.attention_decode"](
                query[:, :, None], *dense),
            "torch.paged_gather": paged("torch.paged_gather", shared)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for prefix in (512, 2048):
            contestants = ways(options.sequences, prefix, 32, dtype)
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(options.rounds):
                for name, call in contestants.items():
                    start = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - start)
            ours = min(times["shared pages"])
            print(f"{str(dtype)[6:]:9} prefix {prefix:5}: " + ", ".join(
                f"{name} {1e6 * min(t):.0f} us ({min(t) / ours:.2f}x)" for name, t in times.items()))


if __name__ == "__main__":
    main()
