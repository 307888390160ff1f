"""The GPU libraries on a GPU: are they right by the contract, and how fast are they beside torch
and our own kernels.

    python benchmarks/gpu_libraries.py --certify --time [--only flashinfer,liger,...] [--budget 150] [--json FILE]

Every kernel is certified in a process of its own, several at a time: one that kills its device
context, or compiles forever, costs itself only. Each has so many seconds (`--budget`) for as many
cases of its contract as fit, gradients included. A library that compiles for a head dimension is
asked in the sizes it takes. Times are those of a replayed CUDA graph with one call in it, after the
L2 cache was swept: the median of 30. What cannot be captured is timed as it is called, the host
included, and marked "eager". Kernels declared untested take part: that is what this is for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from layerzero.backends import flash_attn, flashinfer, liger, quack, xformers
from layerzero.dispatch.binding import bind
from layerzero.machine import loading
from layerzero.machine.faults import FAULTS
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op
from layerzero.spec.plan import Transform
from layerzero.tuning.harness import ColdWatch, GraphWatch
from layerzero.verify.cases.generated import case_key
from layerzero.verify.kernel.contract import case_values, check_case, load_once, refusals
from layerzero.verify.kernel.gradients import check_gradients, gradient_cases
from layerzero.world import snapshot as worlds

LIBRARIES = {m.__name__.rpartition(".")[2]: m.KERNELS
             for m in (flashinfer, liger, quack, xformers, flash_attn)}
MINE = {k.id: k for kernels in LIBRARIES.values() for k in kernels}
RUNS = 30
Case = Mapping[str, Any]
ERRORS: tuple[type[BaseException], ...] = (*FAULTS, loading.LoadFailed, ImportError)
captured, uncaptured = cache(GraphWatch), cache(ColdWatch)

# What a case must be for the library to take it at all: it compiles for few head dimensions, or for
# one sequence.
ADAPTED: Mapping[tuple[str, str], Case] = {
    ("flashinfer", "attention"): {"b": 1, "d": 128}, ("flashinfer", "paged_attention"): {"d": 128},
    ("flashinfer", "varlen_attention"): {"d": 128},
    ("flashinfer", "mla_paged_attention"): {"ckv": 512, "kpe": 64},
    ("flashinfer", "rope"): {"d": 128}, ("quack", "cross_entropy"): {"vocab": 40},
    ("liger.geglu_tanh", "mlp"): {"activation": "geglu_tanh"},
    ("flash_attn.v2_paged", "paged_attention"): {
        "page_size": 256},
}
HEADS = {"hq": 32, "hkv": 8, "d": 128}
REAL: Mapping[str, tuple[Case, ...]] = {       # sizes as models have them
    "attention": ({**HEADS, "b": 1, "sq": 1, "sk": 4096},
                  {**HEADS, "b": 1, "sq": 1024, "sk": 1024, "causal": True},
                  {**HEADS, "b": 1, "sq": 8, "sk": 2000, "causal": True, "align": "bottom_right"}),
    "paged_attention": ({**HEADS, "context": (700, 1, 4000, 16)},
                        {**HEADS, "context": (700, 128, 300), "lengths_q": (700, 1, 17)}),
    "varlen_attention": ({**HEADS, "lengths_q": (300, 1, 1000), "causal": True,
                          "align": "bottom_right"},),
    "mla_paged_attention": ({"heads": 16, "ckv": 512, "kpe": 64, "context": (1000, 33),
                             "page_size": 64},),
    "rms_norm": ({"rows": (4096,), "hidden": 4096},),
    "add_rms_norm": ({"rows": (4096,), "hidden": 4096},),
    "sample": ({"batch": 8, "vocab": 128256, "top_k": 50, "top_p": 0.9},
               {"top_k": 7, "special": "ties"}),
    "cross_entropy": ({"rows": (512,), "vocab": 32000, "ignored": "some"},),
}


# The module that a FlashInfer kernel compiles with nvcc, in a minute or two, unless it is in
# FlashInfer's cache.
MODULES: Mapping[str, str] = {
    "decode": "single_decode_with_kv_cache", "prefill_fa2": "single_prefill_with_kv_cache",
    "prefill_fa3": "single_prefill_with_kv_cache", "paged_decode": "batch_decode_with_kv_cache",
    "paged_prefill_fa2": "batch_prefill_with_kv_cache",
    "paged_prefill_fa3": "batch_prefill_with_kv_cache",
    "varlen_fa2": "batch_prefill_with_kv_cache", "varlen_fa3": "batch_prefill_with_kv_cache",
    "mla_fa2": "batch_mla_attention", "mla_fa3": "batch_mla_attention", "paged_xqa": "xqa_input",
    "rms_norm": "norm", "add_rms_norm": "norm", "rope": "rope", "sample": "topk"}


def uncompiled() -> tuple[str, ...]:
    """FlashInfer's kernels that would have to be compiled for bfloat16 and heads of 128."""
    modules = [m for m in flashinfer.compiled() if "dtype_q" not in m or "dtype_q_bf16" in m]

    def there(name: str) -> bool:
        return any(m.startswith(MODULES[name])
                   and ("head_dim_qk" not in m or "head_dim_qk_128" in m)
                   and (not name.endswith("_fa3") or "sm90" in m) for m in modules)

    return tuple(k.id for k in LIBRARIES["flashinfer"] if not there(k.id.partition(".")[2]))


# Right?

def cases_of(kernel: Kernel) -> Iterator[tuple[Case, str]]:
    """Case and dtype: all in bfloat16, real sizes first, then the other dtypes, of what compiles
    for each a few only.

    What was adapted to the same case comes once.
    """
    op = kernel.op
    forced = {**ADAPTED.get((kernel.backend, op.name), {}), **ADAPTED.get((kernel.id, op.name), {})}
    seen: set[str] = set()
    for dtype in ("bfloat16", "float16", "float32"):
        few = dtype != "bfloat16" and op.family == "attention"
        for case in (*REAL.get(op.name, ()), *op.cases)[:6 if few else None]:
            changed = {n: v
                       for n, v in {**case,
                                    **({} if case in REAL.get(op.name, ()) else forced)}.items()
                       if not (n == "dv" and "d" in forced)}
            if case_key(changed) + dtype not in seen:
                seen.add(case_key(changed) + dtype)
                yield changed, dtype


def certify_one(kernel: Kernel, budget: float) -> dict[str, Any]:
    """What came of it, within so many seconds after the first call, which compiles."""
    warnings.simplefilter("ignore")
    absent = loading.availability(kernel)
    if absent is not None:
        return {"kernel": kernel.id, "status": "unavailable", "why": str(absent),
                "hint": absent.code.advice}
    start, first, ends = time.time(), 0.0, float("inf")
    ran, skipped, failed, left = 0, 0, [], 0           # type: int, int, list[str], int
    worst, reasons = 0.0, {}                           # type: float, dict[str, int]

    def count(result: Any) -> None:
        nonlocal ran, skipped, worst, first, ends
        if result.status == "skipped":
            skipped += 1
            for reason in result.reasons:
                reasons[str(reason)] = reasons.get(str(reason), 0) + 1
            return
        ran, worst = ran + 1, max(worst, result.ratio)
        if result.status == "failed":
            failed.append(str(result)[:500])
        if not first:
            first = time.time() - start
            ends = time.time() + budget

    for case, dtype in cases_of(kernel):
        if time.time() > ends or len(failed) >= 8:
            left += 1
            continue
        count(check_case(kernel, case, dtype, "cuda"))
    if kernel.differentiable:
        for case in gradient_cases(kernel.op):
            for dtype in ("bfloat16", "float32"):
                if time.time() < ends + budget / 2 and len(failed) < 12:
                    count(check_gradients(kernel, case, dtype, "cuda"))
    return {"kernel": kernel.id, "status": "failed" if failed else "passed" if ran else "skipped",
            "ran": ran, "skipped": skipped, "left": left, "worst": worst, "failed": failed,
            "first_call_s": round(first, 1),
            "reasons": dict(sorted(reasons.items(), key=lambda r: -r[1])[:5])}


def certify_apart(kernel: Kernel, budget: float, limit: float) -> dict[str, Any]:
    """The same in a process of its own."""
    start = time.time()
    try:
        done = subprocess.run([sys.executable, __file__, "--one", kernel.id, "--budget",
                               str(budget)],
                              capture_output=True, text=True, timeout=limit)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {
            "kernel": kernel.id, "status": "crashed", "why": (done.stderr or done.stdout)[-1500:]}
    except subprocess.TimeoutExpired:
        found = {"kernel": kernel.id, "status": "timeout", "why": f"no answer within {limit:g} s"}
    found["seconds"] = round(time.time() - start)
    print(
        f"{kernel.id:30} {found['status']:11} ran {found.get('ran', 0):3} skipped "
        f"{found.get('skipped', 0):3} left {found.get('left', 0):3} worst "
        f"{found.get('worst', 0):.2f} first {found.get('first_call_s', 0)} s [{found['seconds']} "
        f"s] {str(found.get('why', ''))[-300:]}", flush=True)
    for text in found.get("failed", ())[:3]:
        print("     ", text[:300], flush=True)
    return found


def certify(kernels: list[Kernel], budget: float, limit: float,
            together: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(together) as crew:
        return list(crew.map(lambda k: certify_apart(k, budget, limit), kernels))


# Fast?

def bound(kernel: Kernel, values: Mapping[str, Any]) -> Callable[[], Any]:
    op: Op = kernel.op
    variant = values[op.variant] if op.variant else ""
    moves = op.variant and kernel.variants and variant not in kernel.variants
    run = bind(op, kernel, load_once(kernel), (Transform("layout", kernel.variants[0]),) if moves
               else (), variant).run
    given = tuple(values[p.name] for p in op.params)
    return lambda: run(*given)


def timed(call: Callable[[], Any]) -> tuple[float, str]:
    """Microseconds, and how they were taken."""
    try:
        return captured().median(call, RUNS), ""
    except FAULTS:
        torch.cuda.synchronize()
        return statistics.median(uncaptured().sample(call, 1) for _ in range(RUNS)), "eager"


RAGGED = tuple(512 + (i * 1117) % 3585 for i in range(32))
TIMED: tuple[tuple[str, str, Case], ...] = (
    *((f"decode B{b} K{k}", "attention", {**HEADS, "b": b, "sq": 1, "sk": k})
      for b, k in ((1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 4096))),
    ("verify B1 Q8 K8192", "attention", {
        **HEADS, "b": 1, "sq": 8, "sk": 8192, "causal": True, "align": "bottom_right"}),
    *((f"prefill B{b} S{s}", "attention", {**HEADS, "b": b, "sq": s, "sk": s, "causal": True})
      for b, s in ((1, 2048), (1, 8192), (8, 512))),
    ("paged B32 512-4096 pages of 16", "paged_attention", {**HEADS, "context": RAGGED}),
    ("paged B8 4096 pages of 16", "paged_attention", {**HEADS, "context": (4096,) * 8}),
    ("paged prefill 8 x 512 of 1024", "paged_attention",
     {**HEADS, "context": (1024,) * 8, "lengths_q": (512,) * 8}),
    ("varlen 8 x 128-1024", "varlen_attention", {
        **HEADS, "lengths_q": (128, 1024, 256, 700, 512, 333, 900, 640), "causal": True,
        "align": "bottom_right"}),
    ("mla B16 4096, 16 heads", "mla_paged_attention", {
        "heads": 16, "ckv": 512, "kpe": 64, "context": (4096,) * 16, "page_size": 64}),
    *((f"{op} {rows}x4096", op, {"rows": (rows,), "hidden": 4096})
      for op in ("rms_norm", "add_rms_norm", "layer_norm") for rows in (1, 64, 4096)),
    *((f"rope B{b} S{s}", "rope", {"b": b, "s": s, "hq": 32, "hkv": 8, "d": 128, "layout": "bshd"})
      for b, s in ((1, 1), (32, 1), (1, 4096))),
    ("sample 64x128256 top-k 50 top-p 0.9", "sample", {
        "batch": 64, "vocab": 128256, "top_k": 50, "top_p": 0.9, "logprobs": False}),
    *((f"swiglu {rows}x4096x14336", "mlp", {"rows": (rows,), "hidden": 4096, "inner": 14336})
      for rows in (1, 1024)),
    ("cross entropy 4096x128256", "cross_entropy", {"rows": (4096,), "vocab": 128256}),
    ("linear cross entropy 1024x4096x128256", "linear_cross_entropy", {
        "rows": (1024,), "width": 4096, "vocab": 128256}),
)


def candidates(op_name: str, values: Mapping[str, Any],
               wanted: Callable[[Kernel], bool]) -> list[dict[str, Any]]:
    """Every kernel that is wanted and takes the call, the fastest first, then those that failed."""
    everyone = {**{k.id: k for k in worlds.current().catalog.kernels_of(op_name)},
                **{k.id: k for k in MINE.values() if k.op.name == op_name}}
    found: list[dict[str, Any]] = []
    for kernel in everyone.values():
        if kernel.backend == "reference" or not wanted(kernel):
            continue
        try:
            if not refusals(kernel, values):
                with torch.no_grad():
                    us, how = timed(bound(kernel, values))
                found.append({"kernel": kernel.id, "us": us, "how": how,
                              "baseline": kernel.baseline})
        except ERRORS as e:
            found.append({"kernel": kernel.id, "failed": f"{type(e).__name__}: {str(e)[:200]}"})
    return sorted(found, key=lambda f: f.get("us", float("inf")))


def race(only: set[str], good: set[str]) -> list[dict[str, Any]]:
    """Of each shape every kernel that takes it: the libraries asked for, ours, and torch's."""
    warnings.simplefilter("ignore")
    ops = worlds.current().catalog.ops
    rows = []
    for name, op_name, case in TIMED:
        start = time.time()
        found = candidates(op_name, case_values(ops[op_name], case, "bfloat16", "cuda"),
                           lambda k: k.id not in MINE or (k.backend in only and k.id in good))
        rows.append({"shape": name, "op": op_name, "kernels": found})
        wrong = [f"{f['kernel']} {f['failed'][:60]}" for f in found if "failed" in f]
        print(f"{name:38} " + ", ".join(f"{f['kernel']} {f['us']:.1f}{'*' if f['how'] else ''}"
                                        for f in found if "us" in f)
              + (f" | failed: {'; '.join(wrong)}" if wrong else "")
              + f"  [{time.time() - start:.0f} s]", flush=True)
        torch.cuda.empty_cache()
    if "flashinfer" in only:
        rows += own_samplers()
    return rows


def own_samplers() -> list[dict[str, Any]]:
    """FlashInfer's own samplers, which draw by random numbers of their own and so are no kernels of
    lz.sample."""
    try:
        from flashinfer import sampling
        rows = []
        logits = torch.randn(64, 128256, device="cuda") * 3
        for name, call in (
                ("softmax", lambda: sampling.softmax(logits)),
                ("top-p 0.9",
                 lambda: sampling.top_p_sampling_from_probs(sampling.softmax(logits), 0.9)),
                ("top-k 50",
                 lambda: sampling.top_k_sampling_from_probs(sampling.softmax(logits), 50)),
                ("top-k 50 top-p 0.9",
                 lambda: sampling.top_k_top_p_sampling_from_logits(logits, 50, 0.9)),
                ("min-p 0.05",
                 lambda: sampling.min_p_sampling_from_probs(sampling.softmax(logits), 0.05))):
            us, how = timed(call)
            rows.append({"shape": f"flashinfer sampler 64x128256 {name}", "us": us, "how": how})
            print(
                f"flashinfer's own sampler, 64x128256 float32, {name}: "
                f"{us:.1f}{'*' if how else ''}", flush=True)
        return rows
    except ERRORS as e:
        print(f"flashinfer's own samplers: {type(e).__name__}: {str(e)[:300]}", flush=True)
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--certify", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default=",".join(LIBRARIES),
                        help="comma separated: " + ", ".join(LIBRARIES))
    parser.add_argument("--budget", type=float, default=60.0,
                        help="seconds for the cases of one kernel")
    parser.add_argument("--limit", type=float, default=400.0,
                        help="seconds for one kernel with all it compiles")
    parser.add_argument("--together", type=int, default=8, help="kernels certified at a time")
    parser.add_argument("--one", default="", help="certify this kernel in this process")
    parser.add_argument("--json", default=f"{os.environ['OUT']}/gpu_libraries.json"
                        if "OUT" in os.environ else "")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(certify_one(MINE[args.one], args.budget)), flush=True)
        return
    only = set(filter(None, args.only.split(",")))
    unknown = only - set(LIBRARIES)
    if unknown:
        parser.error(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    found: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if
                             torch.cuda.is_available() else "cpu", "only": sorted(only)}
    try:
        good = {k.id for k in MINE.values() if k.backend in only}
        if args.certify:
            # What compiles longest first: plain kernels follow while others wait for the compiler.
            chosen = sorted((k for k in MINE.values() if k.backend in only),
                            key=lambda k: -k.overhead_us)
            found["verdicts"] = certify(chosen, args.budget, args.limit, args.together)
            good = {v["kernel"] for v in found["verdicts"] if v["status"] in ("passed", "failed")}
            found["compiled"] = flashinfer.compiled()
        if args.time:
            found["times"] = race(only, good)
    finally:
        if args.json:
            Path(args.json).write_text(json.dumps(found))
    for verdict in found.get("verdicts", ()):
        print(f"{verdict['kernel']:30} {verdict['status']:11} {verdict.get('ran', 0)} cases",
              flush=True)


if __name__ == "__main__":
    main()
