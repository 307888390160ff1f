"""Measure the tables that come with the package (src/layerzero/perf/tables) on the machine at hand.

    python benchmarks/ship.py --name h200                    on a GPU: eager and captured
    python benchmarks/ship.py --name neoverse-n1 --device cpu --threads 1
    python benchmarks/ship.py --name h200 --seconds 500
        stop after so long; run again with --more to go on
    python benchmarks/ship.py --name h200 --match attention --keep
        measure only these operations; the other rows of the table stay

What was measured is kept in a store of its own beside the table (--store), so that a run that was
cut off can be continued and several runs become one table. Only kernels of this package and of
torch take part unless --libraries.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("LAYERZERO_PERFDB", "off")       # before the library reads it

import torch

import layerzero as lz
from layerzero.machine import hardware
from layerzero.perf import shipped
from layerzero.perf.record import Measurement, place_of
from layerzero.perf.store import SqliteStore
from layerzero.spec.call import Call, TensorSpec
from layerzero.tuning.models import calls_of
from layerzero.tuning.tuner import survey, tune
from layerzero.tuning.workload import merge, standard
from layerzero.world import snapshot as worlds

TABLES = shipped.FOLDER
MAX_BYTES = 3 << 29                            # of one call: more takes a minute to make
OWN = ("torch", "native", "cuda", "triton", "reference")
TORCH = {"cpu": ">=2.11,<2.15", "cuda": ">=2.9,<2.15"}


def gpu_calls() -> Iterator[Call]:
    """What models of 1 to 70 billion parameters ask of one GPU: decoding, verifying drafts,
    prefill."""
    def bf16(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "bfloat16")

    for hq, hkv, d in ((32, 8, 128), (32, 8, 64), (16, 2, 128), (32, 32, 128)):
        for b, keys in ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 2048), (32, 1024),
                        (32, 4096)):
            yield Call("attention", {"query": bf16(b, hq, 1, d), "key": bf16(b, hkv, keys, d),
                                     "value": bf16(b, hkv, keys, d)})
        for b, s in ((1, 256), (1, 1024), (1, 4096), (4, 512)):
            yield Call("attention", {"query": bf16(b, hq, s, d), "key": bf16(b, hkv, s, d),
                                     "value": bf16(b, hkv, s, d), "is_causal": True})
        for b, s, keys in ((1, 256, 1024), (1, 512, 4608), (1, 2048, 8192)):
            yield Call("attention", {"query": bf16(b, hq, s, d), "key": bf16(b, hkv, keys, d),
                                     "value": bf16(b, hkv, keys, d), "is_causal": True,
                                     "causal_align": "bottom_right"})
        for b, s in ((1, 1), (16, 1), (1, 512)):
            yield Call("rope", {"q": bf16(b, hq, s, d), "k": bf16(b, hkv, s, d),
                                "cos": bf16(s, d // 2),
                                "sin": bf16(s, d // 2), "style": "rotate_half"})
    for b, sq, keys in ((1, 4, 2048), (4, 8, 8192)):
        yield Call("attention", {"query": bf16(b, 32, sq, 128), "key": bf16(b, 8, keys, 128),
                                 "value": bf16(b, 8, keys, 128), "is_causal": True,
                                 "causal_align": "bottom_right"})
    for rows in (1, 8, 64, 512, 4096):
        for hidden in (1024, 2048, 4096, 8192):
            yield Call("rms_norm", {"x": bf16(rows, hidden), "weight": bf16(hidden)})
            yield Call("add_rms_norm", {"x": bf16(rows, hidden), "residual": bf16(rows, hidden),
                                        "weight": bf16(hidden)})
        yield Call("layer_norm", {"x": bf16(rows, 1280), "weight": bf16(1280), "bias": bf16(1280)})
    for rows in (1, 2, 4, 8, 16):
        for k, n in ((2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336), (14336, 4096),
                     (4096, 128256)):
            yield Call("linear", {"x": bf16(rows, k), "weight": bf16(n, k)})
    for rows in (1, 8, 64, 1024):
        for hidden, inner in ((2048, 8192), (4096, 14336)):
            yield Call("mlp", {"x": bf16(rows, hidden), "weight_in": bf16(2 * inner, hidden),
                               "weight_down": bf16(hidden, inner)})
    for batch in (1, 8, 64):
        for how in ({"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 50}, {"top_p": 0.9},
                    {"top_k": 50, "top_p": 0.9}):
            yield Call("sample", {"logits": TensorSpec((batch, 128256), "float32"), "seed": 1,
                                  **how})
    for tokens in (1, 512):
        yield Call("embedding", {"ids": TensorSpec((1, tokens), "int64", below=32000),
                                 "weight": bf16(32000, 4096)})
    for rows in (1, 4, 16):
        for k, n in ((2048, 8192), (4096, 4096)):
            yield Call("quantized_linear", case={"format": "int4", "rows": (rows,), "k": k, "n": n,
                                                 "group": 128},
                       dtype="bfloat16")
            yield Call("quantized_linear", case={"rows": (rows,), "k": k, "n": n}, dtype="bfloat16")
    for context in ((500, 300, 80, 700), (4000,), (1500, 4000) * 4):
        yield Call("paged_attention", case={"context": context, "hq": 32, "hkv": 8, "d": 128},
                   dtype="bfloat16")


def cpu_calls() -> Iterator[Call]:
    """What models of one billion parameters ask of a CPU for some tokens, in float32: beyond the
    sizes of `standard`, and where torch packs a weight for the product of a few rows."""
    def f32(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "float32")

    for rows in (1, 2, 4, 8, 16):
        for k, n in ((896, 896), (896, 4864), (4864, 896), (2048, 2048), (2048, 8192)):
            yield Call("linear", {"x": f32(rows, k), "weight": f32(n, k)})
        for hidden, inner in ((896, 4864), (2048, 8192)):
            yield Call("mlp", {"x": f32(rows, hidden), "weight_in": f32(2 * inner, hidden),
                               "weight_down": f32(hidden, inner)})
    for rows in (64, 128):
        yield Call("linear", {"x": f32(rows, 2048), "weight": f32(2048, 2048)})
        yield Call("mlp", {"x": f32(rows, 2048), "weight_in": f32(16384, 2048),
                           "weight_down": f32(2048, 8192)})
    for hq, hkv, d in ((8, 8, 128), (12, 12, 64), (32, 8, 64), (14, 2, 64)):
        for keys in (128, 512, 2048, 4096):
            yield Call("attention", {"query": f32(1, hq, 1, d), "key": f32(1, hkv, keys, d),
                                     "value": f32(1, hkv, keys, d)})
    for rows in (1, 16, 256):
        yield Call("moe_gate", {"logits": f32(rows, 128), "top_k": 8})


def calls(device: str) -> tuple[Call, ...]:
    if device == "cuda":
        return merge([*gpu_calls(), *calls_of("sdxl", dtype="float16")])
    small = [*calls_of("smollm2-135m", prompt=128, context=512, dtype="float32"),
             *calls_of("smollm2-135m", prompt=128, context=512, dtype="bfloat16"),
             *calls_of("llama-3-8b", prompt=64, context=2048, dtype="float32", scale=1 / 8,
                       prefill=False),
             *calls_of("llama-3-8b", prompt=64, context=2048, dtype="bfloat16", scale=1 / 8,
                       prefill=False)]
    return merge([*standard(), *small, *cpu_calls()])


def contested(measurements: Iterable[Measurement]) -> Iterator[Measurement]:
    """Those of the kinds of call that two kernels may serve beside the reference.

    Where torch's own is alone in the table, others were far slower, and are not expected to be fast
    near it.
    """
    kinds: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in measurements:
        kinds.setdefault((m.op, m.mode, m.bucket), []).append(m)
    for rows in kinds.values():
        if sum(not m.kernel.startswith("reference.") for m in rows) > 1:
            yield from rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", required=True, help="of the file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--seconds", type=float, help="stop after about so long")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=TABLES)
    parser.add_argument("--store", type=Path,
                        help="where measurements are kept; default: beside the table")
    parser.add_argument("--more", action="store_true", help="go on with the store of a run before")
    parser.add_argument("--match", default="", help="only operations whose name contains this")
    parser.add_argument("--keep", action="store_true",
                        help="keep the rows of the table that are not measured again")
    parser.add_argument("--compile", action="store_true",
                        help="also kernels that Inductor or nvcc compiles")
    parser.add_argument("--libraries", action="store_true", help="also kernels of other libraries")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    unwanted = [k.id for k in worlds.current().catalog.kernels
                if (k.backend not in OWN and not args.libraries)
                or (k.jit and k.backend not in ("cuda", "triton") and not args.compile)]
    lz.configure(shipped_measurements=False, rules=(lz.PolicyRule.of("deny", unwanted),) if unwanted
                 else ())
    path = args.store or args.out / f"{args.name}.sqlite"
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.more:
        path.unlink(missing_ok=True)
    device = hardware.probe(args.device)
    place = place_of(device, args.threads if args.device == "cpu" else 0)
    with SqliteStore(path) as store:
        # of any build: the run goes on
        known = [m._replace(build="") for m in store.rows(place=place)]
        worlds.publish(lambda w: w.replace(perf=w.perf.including(known, store.rates())), "measured")

        def save(rows: Any, rates: Any) -> None:
            store.write(rows, {}, {p: (r, 1.0) for p, r in (rates or {}).items()})
            worlds.publish(lambda w: w.replace(perf=w.perf.including(rows, rates)), "measured")

        jobs, _ = survey(calls(args.device), args.device)
        jobs = sorted((job for job in jobs if job.nbytes <= MAX_BYTES
                       and args.match in job.call.op), key=lambda job: job.nbytes)
        end = time.perf_counter() + (args.seconds or 1e9)
        # small ones first: making a large one's inputs takes longest
        for done, job in enumerate(jobs):
            left = end - time.perf_counter()
            if left < 1.0:
                print(f"out of time: {len(jobs) - done} of {len(jobs)} kinds of call are left",
                      file=sys.stderr)
                break
            print(f"{done}/{len(jobs)} {job}", file=sys.stderr)
            found = tune([job.call], device=args.device, rounds=args.rounds, seconds=left,
                         save=save,
                         compile=args.device == "cuda" or args.compile)
            for skipped in found.skipped:
                print(f"skipped {job}: {skipped.reason[:200]}")
        about: dict[str, Any] = {"type": device.type, "name": device.name}
        if device.type == "cpu":
            about.update(threads=args.threads, isa=list(device.isa))
        rates = store.rates().get(place) or worlds.current().perf.rates[place]
        catalog = worlds.current().catalog
        baselines = {k.id for k in catalog.kernels if k.baseline}
        out = args.out / f"{args.name}.json"
        rows = list(contested(store.rows(place=place)))
        if args.keep:
            again = {(m.op, m.mode, m.bucket) for m in rows}
            rows += [m for m in shipped.read(out, catalog.ops).rows
                     if (m.op, m.mode, m.bucket) not in again and m.kernel in catalog.by_id]
        text = shipped.text_of(
            about, {"torch": TORCH[device.type]}, datetime.date.today().isoformat(),
            f"python benchmarks/ship.py --name {args.name} --device {args.device}"
            + (f" --threads {args.threads}" if device.type == "cpu" else "")
            + f" (torch {torch.__version__})", rates, rows, baselines)
    out.write_text(text, encoding="utf-8")
    table = shipped.read(out, worlds.current().catalog.ops)
    print(f"{out}: {table.kinds} kinds of call, {len(table.rows)} times, {len(text) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
