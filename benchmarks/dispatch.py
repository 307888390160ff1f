"""What choosing a kernel costs: LayerZero beside the bare kernel, and beside other layers that choose.

    python benchmarks/dispatch.py            some 30 seconds; a table, and results/local/dispatch.json
    python benchmarks/dispatch.py --quick    a few seconds; shows that everything runs, its numbers say little

README.md says how it is measured and how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import Contestant, Race, Spread, race, race_in_threads
from torch import Tensor

import layerzero as lz
from layerzero.runtime import native
from layerzero.runtime.dispatch import Dispatcher, dispatchers

OUT = Path(__file__).parent / "results" / "local" / "dispatch.json"
HEADS, SEQ, DIM, EPS = 1, 4, 16, 1e-6
CANDIDATES = 20
THREADS = 8
BUSY = 0.5                                     # a load average per core above this is worth a warning
NATIVE, PYTHON = "lz.attention, native", "lz.attention, pure Python"
DIRECT, SDPA = "direct: the kernel by hand", "F.scaled_dot_product_attention"
RMS_DIRECT = "direct: rms_norm by hand"

# The chosen kernel as one would call it by hand: torch's name for it, and the call.
BY_HAND = {
    "torch.sdpa_flash": ("_scaled_dot_product_flash_attention_for_cpu", "f(q, k, v)[0]"),
    "torch.sdpa_cudnn": ("_scaled_dot_product_cudnn_attention", "f(q, k, v, None, True)[0]"),
    "torch.sdpa_flash_cuda": ("_scaled_dot_product_flash_attention", "f(q, k, v)[0]"),
    "torch.sdpa_efficient": ("_scaled_dot_product_efficient_attention", "f(q, k, v, None, True)[0]"),
}
RMS_BY_HAND = {
    "torch.rms_norm": ("rms_norm", "f(x, size, w, eps)"),
    "torch.fused_rms_norm": ("_fused_rms_norm", "f(x, size, w, eps)[0]"),
}
# What a library that does not fit this torch or this Python raises while it is set up.
PEER_ERRORS = (AttributeError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    calls: int
    thread_rounds: int
    thread_calls: int
    keys: int
    passes: int


FULL, QUICK = Effort(300, 200, 15, 2000, 200, 5), Effort(4, 30, 2, 50, 12, 1)


@dataclass
class Setting:
    """One device: the tensors of the tiny call, and what serves it."""

    device: str
    attention: Dispatcher
    rms: Dispatcher
    qkv: dict[str, Tensor]
    norm: dict[str, Any]
    kernel: str
    rms_kernel: str
    result: Tensor
    rms_result: Tensor
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def prepare(device: str) -> Setting:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, SEQ, DIM, dtype=dtype, device=device) for _ in range(3))
    x, w = torch.randn(SEQ, DIM, dtype=dtype, device=device), torch.randn(DIM, dtype=dtype, device=device)
    notes: list[str] = []
    kernel = _settle("attention", BY_HAND, notes, q, k, v)
    rms_kernel = _settle("rms_norm", RMS_BY_HAND, notes, x, w, EPS)
    return Setting(device, dispatchers["attention"], dispatchers["rms_norm"], {"q": q, "k": k, "v": v},
                   {"x": x, "size": (DIM,), "w": w, "eps": EPS}, kernel, rms_kernel,
                   lz.attention(q, k, v), lz.rms_norm(x, w, EPS), notes=notes)


def _settle(op: str, by_hand: dict[str, tuple[str, str]], notes: list[str], *args: Any) -> str:
    """The kernel that serves the call; one that we can call by hand, or there is nothing to compare with."""
    chosen = lz.which(op, *args)
    if chosen in by_hand:
        return chosen
    usable = [s.kernel for s in lz.explain(op, *args).steps if s.kernel in by_hand]
    if not usable:
        raise SystemExit(f"lz.{op} would use {chosen} for this call, and no kernel that this benchmark can call by "
                         f"hand serves it; add {chosen} to the table in {Path(__file__).name}")
    lz.lock(op, usable[0])
    notes.append(f"lz.{op} would use {chosen}; locked to {usable[0]}, which can be called by hand")
    return usable[0]


# who runs

def contestants(s: Setting) -> list[Contestant]:
    """LayerZero, torch, and the peers that are here; the others are noted as missing."""
    found = [*_attention(s), *_rms_norm(s)]
    for name, package, build in (("transformers", "transformers", _transformers), ("diffusers", "diffusers", _diffusers),
                                 ("flashinfer-bench", "flashinfer_bench", _flashinfer_bench)):
        try:
            version(name)
        except PackageNotFoundError:
            s.missing[name] = "not installed"
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found += build(s)
        except ImportError as e:
            s.missing[name] = f"does not import: {e}"
        except PEER_ERRORS as e:
            s.missing[name] = f"could not be set up: {type(e).__name__}: {e}"
    return found


def _attention(s: Setting) -> Iterator[Contestant]:
    d, scope = s.attention, s.qkv
    name, call = BY_HAND[s.kernel]

    def one(title: str, call: str, target: str = DIRECT, **rest: Any) -> Contestant:
        more = {n: rest.pop(n) for n in list(rest) if n not in ("around", "note", "expect")}
        return Contestant(title, call, {**scope, **more}, target, **{"expect": s.result, **rest})

    yield one(DIRECT, f"out = {call}", "", f=getattr(torch, name), note=f"torch.{name}")
    yield one(SDPA, "out = f(q, k, v)", f=F.scaled_dot_product_attention)
    if d.native is not None:
        yield one(NATIVE, "out = f(q, k, v)", f=d.native.call)
    else:
        s.missing["native fast path"] = native.status().text
    yield one(PYTHON, "out = f(q, k, v)", f=d.twin)
    defaults = [repr(p.default) for p in d.op.params[3:]]
    values = (*scope.values(), *(p.default for p in d.op.params[3:]))
    entry = d.cache.table.get(d.key_of(*values)) or d.obtain(d.key_of(*values), values)
    arguments = ", ".join(["q", "k", "v", *defaults])
    yield one("  its bound kernel alone", f"out = f({arguments})", f=entry.run, note="entry.run")
    if d.native is not None:
        yield one("  its lookup alone, native", "out = f(q, k, v)", "", f=d.native.compiled.lookup, expect=None)
    yield one("  its lookup alone, Python", f"out = g(f({arguments}))", "", f=d.key_of, g=d.cache.table.get, expect=None)
    yield one("lz.attention in lz.prefer(...)", "out = f(q, k, v)", f=d.public, around=lambda: lz.prefer(s.kernel))
    yield one("lz.attention, backend=...", "out = f(q, k, v, backend=b)", f=d.public, b=s.kernel)
    face = "out = f(q, k, v)[0]" if d.op.outputs == "Tensor[]" else "out = f(q, k, v)"
    yield one("torch.ops.layerzero.attention", face, f=torch.ops.layerzero.attention)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    yield one("with sdpa_kernel([...]) around F.sdpa", "with w(b):\n    out = f(q, k, v)", SDPA,
              f=F.scaled_dot_product_attention, w=sdpa_kernel, b=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


def _rms_norm(s: Setting) -> Iterator[Contestant]:
    d, scope = s.rms, s.norm
    name, call = RMS_BY_HAND[s.rms_kernel]
    yield Contestant(RMS_DIRECT, f"out = {call}", {**scope, "f": getattr(torch, name)}, "", s.rms_result, note=f"torch.{name}")
    if d.native is not None:
        yield Contestant("lz.rms_norm, native", "out = f(x, w, eps)", {**scope, "f": d.native.call}, RMS_DIRECT, s.rms_result)
    yield Contestant("lz.rms_norm, pure Python", "out = f(x, w, eps)", {**scope, "f": d.twin}, RMS_DIRECT, s.rms_result)
    values = (scope["x"], scope["w"], scope["eps"])
    entry = d.cache.table.get(d.key_of(*values)) or d.obtain(d.key_of(*values), values)
    yield Contestant("  its bound kernel alone", "out = f(x, w, eps)", {**scope, "f": entry.run}, RMS_DIRECT, s.rms_result,
                     note="entry.run")


def _transformers(s: Setting) -> Iterator[Contestant]:
    """As a model of transformers 4.48 and later calls attention; it wants (batch, seq, heads, dim) back."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = False, 1  # type: ignore[assignment]
    back = s.result.transpose(1, 2)
    yield Contestant("transformers' target by hand", "out = f(q, k, v).transpose(1, 2).contiguous()",
                     {**s.qkv, "f": F.scaled_dot_product_attention}, DIRECT, back, note="F.sdpa, transposed back")
    yield Contestant("transformers attention interface", "out = g('sdpa', d)(m, q, k, v, None, dropout=0.0, scaling=scale)[0]",
                     {**s.qkv, "g": ALL_ATTENTION_FUNCTIONS.get_interface, "d": sdpa_attention_forward, "m": module,
                      "scale": DIM ** -0.5}, "transformers' target by hand", back)


def _diffusers(s: Setting) -> Iterator[Contestant]:
    """Its layout is (batch, seq, heads, dim)."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn

    scope = {n: t.transpose(1, 2).contiguous() for n, t in s.qkv.items()}
    back = s.result.transpose(1, 2)
    yield Contestant("diffusers' native target", "out = f(q, k, v)",
                     {**scope, "f": _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]}, DIRECT, back,
                     note="its function over F.sdpa")
    yield Contestant("diffusers dispatch_attention_fn", "out = f(q, k, v)", {**scope, "f": dispatch_attention_fn},
                     "diffusers' native target", back)


def _flashinfer_bench(s: Setting) -> Iterator[Contestant]:
    """A trace set of one definition with one solution in Python, which wins for this very shape: a hit."""
    folder = _folders.enter_context(tempfile.TemporaryDirectory())
    os.environ["FIB_CACHE_PATH"] = folder
    import flashinfer_bench as fib
    from flashinfer_bench.apply import ApplyRuntime
    from flashinfer_bench.integration.patch_manager import get_manager

    name, call = BY_HAND[s.kernel]
    code = f"import torch\nf = torch.{name}\n\ndef run(q, k, v):\n    return {call}\n"
    axes = {"b": fib.AxisVar(), "h": fib.AxisVar(), "s": fib.AxisVar(), "d": fib.AxisConst(value=DIM)}
    spec = fib.TensorSpec(shape=list(axes), dtype=str(s.result.dtype).removeprefix("torch."))
    definition = fib.Definition(name="tiny_attention", op_type="attention", axes=axes,
                                inputs={n: spec for n in s.qkv}, outputs={"out": spec}, reference=code)
    solution = fib.Solution(
        name="tiny_attention_python", definition=definition.name, author="benchmark",
        sources=[fib.SourceFile(path="main.py", content=code)],
        spec=fib.BuildSpec(language="python", target_hardware=[s.device], entry_point="main.py::run",
                           destination_passing_style=False))
    trace = fib.Trace(
        definition=definition.name, solution=solution.name,
        workload=fib.Workload(axes={"b": 1, "h": HEADS, "s": SEQ}, inputs={n: fib.RandomInput() for n in s.qkv}, uuid="tiny"),
        evaluation=fib.Evaluation(
            status="PASSED", environment=fib.Environment(hardware=s.device), timestamp="2000-01-01T00:00:00",
            correctness=fib.Correctness(), performance=fib.Performance(
                latency_ms=1.0, reference_latency_ms=2.0, speedup_factor=2.0)))
    data = fib.TraceSet(definitions={definition.name: definition}, solutions={definition.name: [solution]},
                        traces={definition.name: [trace]})
    runtime = ApplyRuntime(data, fib.ApplyConfig())
    get_manager().unpatch_all()                # it replaces functions of torch: that is not what is measured here
    made: dict[str, Any] = {}
    exec(code, made)
    yield Contestant("flashinfer-bench's target", "out = f(q, k, v)", {**s.qkv, "f": made["run"]}, DIRECT, s.result,
                     note="the solution's run()")
    # Without a fallback a miss raises, so what is timed is a hit.
    yield Contestant("flashinfer-bench apply, hit", "out = f('tiny_attention', args=(q, k, v))",
                     {**s.qkv, "f": fib.apply}, "flashinfer-bench's target", s.result, around=lambda: runtime)


_folders = contextlib.ExitStack()


# misses

def misses(s: Setting, effort: Effort) -> list[dict[str, Any]]:
    """What the first call of its kind costs, with the kernels as they are and with `CANDIDATES` that may serve."""
    found = [_misses(s, effort)]
    viable = _viable(s)
    copies = [dataclasses.replace(k, id=f"benchmark.copy{i}", prior=k.prior * 0.9) for i, k in enumerate(
        viable[i % len(viable)] for i in range(max(0, CANDIDATES - len(viable))))]
    for kernel in copies:
        lz.register(kernel)
    try:
        found.append(_misses(s, effort))
    finally:
        for kernel in copies:
            lz.unregister(kernel.id)
    return found


def _viable(s: Setting) -> tuple[lz.Kernel, ...]:
    d = s.attention
    world = d._ready()
    return world.roster(d.op, s.device, world.surroundings(s.device, None)).viable


def _misses(s: Setting, effort: Effort) -> dict[str, Any]:
    d, like = s.attention, s.result
    calls = [tuple(like.new_zeros(1, heads, SEQ, dim) for _ in range(3)) for heads in range(1, 14)
             for dim in range(8, 136, 8)][:effort.keys]
    rest = tuple(p.default for p in d.op.params[3:])
    now = time.perf_counter_ns
    taken: dict[str, list[float]] = {n: [] for n in ("first", "whole", "facts", "select", "bind")}
    for _ in range(effort.passes):
        lz.clear_cache()
        for i, call in enumerate(calls):
            s.wait()
            t0 = now()
            d.public(*call)
            t1 = now()
            d.public(*call)
            t2 = now()
            if i == 0:                         # a new world: what depends on the device alone is worked out again
                taken["first"].append((t1 - t0) - (t2 - t1))
                continue
            taken["whole"].append((t1 - t0) - (t2 - t1))
            world, values = d._ready(), (*call, *rest)
            t0 = now()
            facts = d.facts(values)
            t1 = now()
            plan = world.plan(d.op, facts, None)
            t2 = now()
            d.binding(world.catalog.by_id[plan.steps[0].kernel], plan.steps[0], facts)
            t3 = now()
            for name, ns in (("facts", t1 - t0), ("select", t2 - t1), ("bind", t3 - t2)):
                taken[name].append(ns)
    micros = {name: dataclasses.asdict(Spread.of([ns / 1e3 for ns in samples])) for name, samples in taken.items()}
    micros["rest"] = {"median": micros["whole"]["median"] - sum(micros[n]["median"] for n in ("facts", "select", "bind"))}
    return {"kernels": len(d._ready().kernels(d.op.name)), "viable": len(_viable(s)), "keys": len(taken["whole"]),
            "us": {n: {k: round(v, 2) for k, v in numbers.items()} for n, numbers in micros.items()}}


# threads

def threads(s: Setting, runners: Sequence[Contestant], effort: Effort) -> list[dict[str, Any]]:
    wanted = [c for c in runners if c.name in (DIRECT, NATIVE, PYTHON) or "lookup" in c.name]
    found = race_in_threads(wanted, THREADS, effort.thread_rounds, effort.thread_calls)
    return [{"name": c.name.strip(), "ns": found.of(c.name).to_json(),
             "over": found.over(c.name, c.target).to_json() if c.target else None} for c in wanted]


# reporting

def rows(runners: Sequence[Contestant], found: Race) -> list[dict[str, Any]]:
    base = NATIVE if NATIVE in found.samples else PYTHON
    unit = found.over(base, DIRECT).median
    out = []
    for c in runners:
        over = found.over(c.name, c.target) if c.target else None
        out.append({"name": c.name.strip(), "ns": found.of(c.name).to_json(), "target": c.target, "note": c.note,
                    "over": over.to_json() if over else None, "calls": found.calls[c.name],
                    "over_as_multiple_of_lz": round(over.median / unit, 2) if over and unit > 0 else None})
    return out


def environment() -> dict[str, Any]:
    status = native.status()
    return {
        "cpu": next((d.name for d in lz.doctor().devices if d.type == "cpu"), platform.processor()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(), "system": platform.platform(),
        "python": platform.python_version(), "torch": torch.__version__, "layerzero": lz.__version__,
        "native": status.ok, "native_text": status.text, "load_average": _load(),
        "peers": {n: version(n) for n in ("transformers", "diffusers", "flashinfer-bench") if _installed(n)},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def say_environment(env: dict[str, Any]) -> None:
    print(f"{env['cpu']}, {env['cores']} cores, load average {env['load_average']}; {env['gpu'] or 'no GPU'}")
    print(f"Python {env['python']}, torch {env['torch']} on {env['torch_threads']} thread; native fast path: {env['native_text']}")
    print("peers: " + (", ".join(f"{n} {v}" for n, v in env["peers"].items()) or "none installed"))


def warnings_of(env: dict[str, Any], after: float | None) -> list[str]:
    high = max((x for x in (env["load_average"], after) if x is not None), default=0.0)
    busy = [f"the machine is busy (load average {high} on {env['cores']} cores): trust the differences, and those only "
            "where p10 and p90 agree"] if high > BUSY * (env["cores"] or 1) else []
    return busy + ([] if env["native"] else [f"native fast path {env['native_text']}: 'x lz' compares with pure Python"])


def say(device: str, part: dict[str, Any]) -> None:
    print(f"\n{device}: attention {part['shape']} served by {part['kernel']}; {part['rounds']} rounds of up to "
          f"{part['calls']} calls; ns per call, median over rounds")
    for note in part["notes"]:
        print(f"note: {note}")
    print(f"{'':<40}{'ns':>9}{'over its':>10}{'p10 .. p90':>18}{'x lz':>8}   its target")
    print(f"{'':<40}{'':>9}{'target':>10}")
    for row in part["rows"]:
        over = row["over"]
        told = (f"{over['median']:>10.0f}{over['p10']:>9.0f} .. {over['p90']:<6.0f}"
                f"{row['over_as_multiple_of_lz'] or 0:>7.1f}   {row['target']}" if over else f"{'':<35}    {row['note']}")
        print(f"{row['name']:<40}{row['ns']['median']:>9.0f}{told}".rstrip())
    for name, why in part["missing"].items():
        print(f"{name:<40}{why:>9}")
    print("\nmisses: us for the first call of its kind, beyond the call itself (median; p10 .. p90)")
    for m in part["misses"]:
        us = m["us"]
        split = ", ".join(f"{n} {us[n]['median']:.0f}" for n in ("facts", "select", "bind", "rest"))
        print(f"  {m['viable']:>3} of {m['kernels']} kernels may serve: {us['whole']['median']:>6.0f}  ({us['whole']['p10']:.0f} .. "
              f"{us['whole']['p90']:.0f})  = {split}; the first in a new world {us['first']['median']:.0f}")
    if part["threads"]:
        print(f"\n{THREADS} threads at once: wall ns over all calls")
    for row in part["threads"]:
        over = f"   over direct {row['over']['median']:.0f}" if row["over"] else ""
        print(f"  {row['name']:<40}{row['ns']['median']:>8.0f}{over}")


def measure(device: str, effort: Effort) -> dict[str, Any]:
    s = prepare(device)
    runners = contestants(s)
    found = race(runners, effort.rounds, effort.calls, s.wait)
    part = {"shape": list(s.result.shape), "dtype": str(s.result.dtype).removeprefix("torch."), "kernel": s.kernel,
            "rms_kernel": s.rms_kernel, "rounds": effort.rounds, "calls": effort.calls,
            "empty_loop_ns": round(found.empty_ns, 1), "rows": rows(runners, found), "missing": s.missing, "notes": s.notes,
            "threads": threads(s, runners, effort) if device == "cpu" else [], "misses": misses(s, effort)}
    lz.unlock()
    return part


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: does everything run?")
    parser.add_argument("--rounds", type=int, help=f"rounds of the race (default {FULL.rounds})")
    parser.add_argument("--device", action="append", choices=("cpu", "cuda"), help="default: every one that is here")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes (default: %(default)s)")
    args = parser.parse_args(argv)
    effort = QUICK if args.quick else FULL
    if args.rounds:
        effort = dataclasses.replace(effort, rounds=args.rounds)
    devices = args.device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    torch.set_num_threads(1)                   # a tiny call has no use for more, and they disturb the clock
    env = environment()
    say_environment(env)
    with torch.no_grad(), _folders:
        parts = {device: measure(device, effort) for device in devices}
    env["load_average_after"] = _load()
    warnings = warnings_of(env, env["load_average_after"])
    for device, part in parts.items():
        say(device, part)
    for text in warnings:
        print(f"\nwarning: {text}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"benchmark": "dispatch", "quick": args.quick, "environment": env, "warnings": warnings,
                                    "devices": parts}, indent=1) + "\n")
    print(f"\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
