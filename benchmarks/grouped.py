"""Grouped attention beside what one would write: separate calls, one call over copied keys, flex.

    python benchmarks/grouped.py                   the cases for this machine: a GPU, or small ones
    python benchmarks/grouped.py --backward        forward and backward together, where there is one
    python benchmarks/grouped.py --flashinfer      also FlashInfer's cascade, which nvcc may compile
    python benchmarks/grouped.py --without torch.grouped_flex      which compiles for each case

Every kernel of lz.grouped_attention that takes a case is timed by its name. Beside them stand:

    separate calls         torch's attention once per item, with lengths known before: on a GPU
                           flash in one graph
    varlen, keys copied    the keys of each item gathered in the call, then one flash call
    varlen, keys ready     the same with the copy made before the clock runs
    paged ...              shared prefixes as pages: what lz.paged_attention takes

On a GPU times are replays of a CUDA graph after the L2 cache was swept, or "eager" where nothing
can be captured; on a CPU the median of rounds in turns. Each result is compared with that of the
separate calls, and the largest difference is in the table: a fast wrong answer is no answer.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gpu_libraries import ERRORS, bound, timed, uncaptured
from regret import environment

from layerzero.machine import loading
from layerzero.spec.kernel import Kernel
from layerzero.tuning.harness import Race, stopwatch
from layerzero.verify.kernel.contract import refusals
from layerzero.world import snapshot as worlds

Items = tuple[tuple[int, int, int, int], ...]
Way = Callable[[], Any]
SEPARATE = "separate calls"
# rows times keys of one item from which kernels that write the scores take no part
LARGE = 1 << 26
DIFFERENT = 5e-2                               # of results in bfloat16 that are still the same


@dataclass(frozen=True)
class Case:
    """Items over one buffer; with `chunks` the keys of each lie in chunks of `chunk_length`."""

    name: str
    items: Items
    heads: tuple[int, int, int] = (32, 8, 128)     # query heads, KV heads, head_dim
    causal: bool = True
    chunk_length: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()
    prefix: int = 0                            # keys that all items share; the rest is their own

    @property
    def tokens_k(self) -> int:
        if self.chunks:
            return max(start for row in self.chunks for start in row) + self.chunk_length
        return max(k + m for _, _, k, m in self.items)

    @property
    def large(self) -> bool:
        return max(n * m for _, n, _, m in self.items) * self.heads[0] > 32 * LARGE


def prefill(seq: int, groups: int) -> Items:
    """Group i is the i-th part of a sequence, and sees all up to its end."""
    n = seq // groups
    return tuple((i * n, n, 0, (i + 1) * n) for i in range(groups))


def ragged_decode(seq: int, groups: int) -> Items:
    """One token of each group, over a prefix that grows with the group."""
    return tuple((i, 1, 0, (i + 1) * seq // groups) for i in range(groups))


def zigzag(seq: int, world: int, rank: int, **more: Any) -> Case:
    """One rank's work: chunks `rank` and 2 * world - 1 - rank, over keys that were gathered rank by
    rank and are read where they lie."""
    c = seq // (2 * world)
    starts = [2 * c * (i if i < world else 2 * world - 1 - i) + (c if i >= world else 0)
              for i in range(2 * world)]
    items = ((0, c, 0, (rank + 1) * c), (c, c, 0, (2 * world - rank) * c))
    return Case(f"zigzag {seq // 1024}K, {world} ranks, rank {rank}", items, chunk_length=c,
                chunks=(tuple(starts),) * 2, **more)


def shared_prefix(name: str, sequences: int, prefix: int, own: int, **more: Any) -> Case:
    """Decode: all sequences begin with the same `prefix` keys and have `own` keys after that."""
    chunks = tuple((0, prefix + i * prefix) for i in range(sequences))
    return Case(name, tuple((i, 1, 0, prefix + own) for i in range(sequences)),
                chunk_length=prefix, chunks=chunks, prefix=prefix, **more)


LLAMA_70B = (64, 8, 128)
GPU_CASES = (
    *(Case(f"ragged decode {seq // 1024}K, {g} groups", ragged_decode(seq, g))
      for seq, g in ((32768, 16), (32768, 64), (8192, 16), (131072, 16))),
    Case("equal prefixes 32K, 16 groups", tuple((i, 1, 0, 32768) for i in range(16))),
    shared_prefix("shared prefix 8192 + 808, n = 8", 8, 8192, 808),
    shared_prefix("shared prefix 8192 + 808, n = 32", 32, 8192, 808),
    shared_prefix("4 beams, prefix 2048 + 200", 4, 2048, 200),
    *(Case(f"8B prefill {s // 1024}K, {g} groups", prefill(s, g))
      for s, g in ((8192, 2), (8192, 4), (16384, 2), (32768, 2), (65536, 2))),
    *(Case(f"70B prefill {s // 1024}K, 2 groups", prefill(s, 2), LLAMA_70B)
      for s in (8192, 16384)),
    zigzag(65536, 2, 0), zigzag(65536, 4, 1), zigzag(65536, 8, 3),
)
SMOL = (9, 3, 64)                              # SmolLM2-135M
CPU_CASES = (
    Case("ragged decode 2K, 8 groups", ragged_decode(2048, 8), SMOL),
    Case("equal prefixes 2K, 8 groups", tuple((i, 1, 0, 2048) for i in range(8)), SMOL),
    shared_prefix("shared prefix 1024 + 100, n = 8", 8, 1024, 100, heads=SMOL),
    Case("prefill 512, 2 groups", prefill(512, 2), SMOL), zigzag(1024, 2, 0, heads=SMOL),
)


def arguments(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    hq, hkv, d = case.heads

    def rand(tokens: int, heads: int) -> Tensor:
        return torch.randn((tokens, heads, d), device=device).to(dtype)

    def integers(t: Any) -> Tensor:
        return torch.tensor(t, dtype=torch.int32, device=device)

    return {"query": rand(max(q + n for q, n, _, _ in case.items), hq),
            "key": rand(case.tokens_k, hkv), "value": rand(case.tokens_k, hkv),
            "items": integers(case.items), "max_seqlen_q": max(n for _, n, _, _ in case.items),
            "max_seqlen_k": max(m for _, _, _, m in case.items), "is_causal": case.causal,
            "scale": None, "window_left": -1, "window_right": -1, "softcap": 0.0,
            "return_lse": False,
            "chunk_starts": integers(case.chunks) if case.chunks else None,
            "chunk_lengths": integers([case.chunk_length] * len(case.items)) if case.chunks
            else None}


# Ways that are no kernel of the operation.

def key_rows(case: Case, device: str) -> list[Tensor]:
    """Where the keys of each item lie, as numbers of rows."""
    found = []
    for i, (_, _, k, m) in enumerate(case.items):
        p = torch.arange(k, k + m, device=device)
        if case.chunks:
            starts = torch.tensor(case.chunks[i], device=device)
            p = starts[p // case.chunk_length] + p % case.chunk_length
        found.append(p)
    return found


def flash(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None,
          longest_q: int, longest_k: int, causal: bool) -> Tensor:
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False)[0]
    return result


def separate(case: Case, v: Mapping[str, Any]) -> Way:
    """One call per item; keys in chunks are gathered in the call, as there is no other way."""
    query, key, value = v["query"], v["key"], v["value"]
    rows = key_rows(case, query.device.type) if case.chunks else [None] * len(case.items)
    masks = {}
    for _, n, _, m in case.items:
        if case.causal and 1 < n < m and query.device.type == "cpu":
            masks[n, m] = torch.ones(n, m, dtype=torch.bool).tril(m - n)

    def one(item: tuple[int, int, int, int], at: Tensor | None) -> Tensor:
        q_start, n, k_start, m = item
        q = query[q_start:q_start + n]
        k, val = (t[k_start:k_start + m] if at is None else t.index_select(0, at)
                  for t in (key, value))
        if q.device.type == "cuda":
            return flash(q[None], k[None], val[None], None, None, n, m, case.causal)[0]
        out = scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, val)), masks.get((n, m)),
            is_causal=case.causal and n == m, enable_gqa=True)
        return out[0].transpose(0, 1)

    return lambda: torch.cat([one(item, at) for item, at in zip(case.items, rows)])


def varlen(case: Case, v: Mapping[str, Any], ready: bool) -> Way:
    device = v["query"].device.type
    rows = torch.cat(key_rows(case, device))
    starts = [torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
              for lengths in ([i[1] for i in case.items], [i[3] for i in case.items])]
    kept = [v[name].index_select(0, rows) for name in ("key", "value")] if ready else None

    def run() -> Tensor:
        key, value = kept or [v[name].index_select(0, rows) for name in ("key", "value")]
        return flash(v["query"], key, value, *starts, v["max_seqlen_q"], v["max_seqlen_k"],
                     case.causal)

    return run


def paged(case: Case, v: Mapping[str, Any], page: int = 16) -> dict[str, Any] | None:
    """The arguments of lz.paged_attention for sequences that share the pages of their prefix."""
    if not case.prefix or case.prefix % page:
        return None
    keys = case.items[0][3]
    pages = -(-keys // page)
    table = [[(row[p * page // case.chunk_length] + p * page % case.chunk_length) // page
              for p in range(pages)] for row in case.chunks]
    caches = {f"{name}_cache": v[name].unflatten(0, (-1, page)) for name in ("key", "value")}
    device = v["query"].device
    return {"query": v["query"], **caches, "is_causal": True, "cu_seqlens_q": None, "scale": None,
            "block_table": torch.tensor(table, dtype=torch.int32, device=device),
            "context_lens": torch.full((len(table),), keys, dtype=torch.int32, device=device),
            "window_left": -1, "softcap": 0.0, "key_scale": None, "value_scale": None,
            "max_seqlen_q": 1, "return_lse": False, "kv_layout": "NHD"}


def cascade(case: Case, v: Mapping[str, Any], page: int = 16) -> Way | None:
    """FlashInfer's cascade where all items share their first keys: a level for those, one for the
    keys of each."""
    equal = {(k, m) for _, _, k, m in case.items}
    if len(equal) > 1 or any(n > 1 for _, n, _, _ in case.items):
        return None
    from flashinfer.cascade import MultiLevelCascadeAttentionWrapper

    keys, shared = case.items[0][3], case.prefix or case.items[0][3]
    count, own, device = len(case.items), keys - shared, v["query"].device
    pages, own_pages = shared // page, -(-own // page)
    levels = 2 if own else 1
    wrapper = MultiLevelCascadeAttentionWrapper(
        levels, torch.empty(128 << 20, dtype=torch.uint8, device=device), "NHD")

    def integers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    each = [integers([row[1] // page + j for row in case.chunks for j in range(own_pages)])]
    wrapper.plan(
        [integers([0, count]), integers(range(count + 1))][:levels],
        [integers([0, pages]), integers([i * own_pages for i in range(count + 1)])][:levels],
        [integers(range(pages)), *each][:levels],
        [integers([page]), integers([own - (own_pages - 1) * page] * count)][:levels],
        case.heads[0], case.heads[1], case.heads[2], page, q_data_type=v["query"].dtype)
    cache = torch.stack([v[name].unflatten(0, (-1, page)) for name in ("key", "value")], 1)
    return lambda: wrapper.run(v["query"], cache)


def kernels_for(case: Case, v: Mapping[str, Any], without: Collection[str]) -> list[Kernel]:
    """The kernels that take a case, but those that would take too long: on a GPU the formula, and
    what writes the scores of large items."""
    slow = {"torch.grouped_separate", "reference.grouped_attention"} if case.large else (
        {"reference.grouped_attention"} if v["query"].device.type == "cuda" else set())
    return [kernel for kernel in worlds.current().catalog.kernels_of("grouped_attention")
            if kernel.id not in slow and kernel.id not in without and not refusals(kernel, v)]


def ways(case: Case, v: Mapping[str, Any], flashinfer: bool,
         without: Collection[str]) -> Iterator[tuple[str, Way | None]]:
    yield SEPARATE, separate(case, v)
    if v["query"].device.type == "cuda":
        yield "varlen, keys copied", varlen(case, v, False)
        yield "varlen, keys ready", varlen(case, v, True)
    for kernel in kernels_for(case, v, without):
        yield kernel.id, bound(kernel, v)
    pages = paged(case, v)
    for kernel in worlds.current().catalog.kernels_of("paged_attention") if pages else ():
        if kernel.backend in ("cuda", "triton", "native", "torch") and not refusals(kernel, pages):
            yield f"paged {kernel.id}", bound(kernel, pages)
    if flashinfer and loading.is_importable("flashinfer"):
        yield "FlashInfer cascade", cascade(case, v)


# Timing.

def measure(case: Case, device: str, dtype: torch.dtype, flashinfer: bool,
            without: Collection[str]) -> list[dict[str, Any]]:
    v = arguments(case, device, dtype)
    rows: list[dict[str, Any]] = []
    kept: dict[str, Way] = {}
    truth: Tensor | None = None
    for name, way in ways(case, v, flashinfer, without):
        if way is None:
            continue
        row: dict[str, Any] = {"case": case.name, "way": name}
        rows.append(row)
        try:
            result = way()
            result = result[0] if isinstance(result, tuple) else result
            truth = result if truth is None else truth
            row["difference"] = float((result.float() - truth.float()).abs().max())
            if device == "cuda":
                row["us"], row["how"] = timed(way)
            else:
                kept[name] = way
        except ERRORS as e:
            row["failed"] = f"{type(e).__name__}: {str(e)[:160]}"
    if kept:
        race = Race(stopwatch(device), catch=ERRORS)
        for name, way in kept.items():
            race.enter(name, way)
        race.run(7)
        for row in rows:
            if race.rounds.get(row["way"]):
                row.update(us=statistics.median(race.rounds[row["way"]]), how="eager")
    return finish(rows)


def measure_backward(case: Case, dtype: torch.dtype, without: Collection[str]) -> list[dict[str, Any]]:
    """Forward and backward of every kernel that has one, the host included, beside separate calls
    whose gradients autograd adds."""
    v = arguments(case, "cuda", dtype)
    v.update({name: v[name].requires_grad_() for name in ("query", "key", "value")})
    grad = torch.randn_like(v["query"])
    rows = []
    kernels = [(k.id, bound(k, v)) for k in kernels_for(case, v, without) if k.differentiable]
    for name, way in ((SEPARATE, separate(case, v)), *kernels):

        def both(way: Way = way) -> Any:
            return torch.autograd.grad(way(), (v["query"], v["key"], v["value"]), grad)

        row: dict[str, Any] = {"case": f"{case.name}, backward", "way": name}
        rows.append(row)
        try:
            both()
            row["us"] = statistics.median(uncaptured().sample(both, 1) for _ in range(7))
            row["how"] = "eager"
        except ERRORS as e:
            row["failed"] = f"{type(e).__name__}: {str(e)[:160]}"
    return finish(rows)


def finish(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = next((row["us"] for row in rows if "us" in row), None)
    for row in rows:
        if base and "us" in row:
            row["times_separate"] = base / row["us"]
    return rows


def say(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print(f"\n{rows[0]['case']}")
    for row in sorted(rows, key=lambda row: row.get("us", float("inf"))):
        if "failed" in row:
            print(f"  {row['way']:38.38} failed: {row['failed'][:90]}")
            continue
        wrong = "  DIFFERENT" if row.get("difference", 0.0) > DIFFERENT else ""
        print(f"  {row['way']:38.38} {row['us']:10.1f} us {row['times_separate']:6.2f} x  "
              f"{row['how']:6} {row.get('difference', 0.0):.1e}{wrong}", flush=True)


def write(out: Path, rows: list[dict[str, Any]], device: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("case", "way", "us", "times_separate", "how", "difference",
                                       "failed"))
        writer.writeheader()
        writer.writerows(rows)
    out.with_suffix(".json").write_text(json.dumps(
        {"benchmark": "grouped", "environment": environment(device), "rows": rows},
        indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cases whose name contains one of these, by |")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--without", default="", help="kernels, by comma")
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--out", type=Path, help="FILE.csv and FILE.json",
                        default=Path(__file__).parent / "results" / "local" / "grouped")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    cases = GPU_CASES if args.device == "cuda" else CPU_CASES
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    for case in cases:
        if args.only and not any(part in case.name for part in args.only.split("|")):
            continue
        if args.backward:
            if case.items[0][1] == 1 or args.device != "cuda":
                continue
            found = measure_backward(case, dtype, args.without.split(","))
        else:
            with torch.no_grad():
                found = measure(case, args.device, dtype, args.flashinfer, args.without.split(","))
        rows += found
        say(found)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        write(args.out, rows, args.device)     # after each case: a run may be cut short


if __name__ == "__main__":
    main()
