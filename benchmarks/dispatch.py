"""What choosing a kernel costs: LayerZero beside the bare kernel, and beside other layers that
choose.

    python benchmarks/dispatch.py  about a minute; a table, and results/local/dispatch.json
    python benchmarks/dispatch.py --quick
        some seconds; shows that everything runs, its numbers say little

README.md says how it is measured and how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import functions
import peers
import torch
import torch.nn.functional as F
from timing import Contestant, Race, Spread, race, race_in_threads
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz
from layerzero.dispatch import native
from layerzero.dispatch.cache import Entry
from layerzero.dispatch.dispatcher import Dispatcher, dispatchers
from layerzero.selection.key import fixed_by_key

OUT = Path(__file__).parent / "results" / "local" / "dispatch.json"
HEADS, SEQ, DIM, EPS = 1, 4, 16, 1e-6
CANDIDATES = 20                                # kernels that may serve, in the measured misses
THREADS = 8
# a load average per core above this is worth a warning
BUSY = 0.5
DIRECT, SDPA, RMS_DIRECT = ("direct: the kernel by hand", "F.scaled_dot_product_attention",
                            "direct: rms_norm by hand")
NATIVE, PYTHON = "lz.attention, native", "lz.attention, pure Python"
LOOKUPS = ("lz lookup alone, native", "lz lookup alone, pure Python")

# A kernel as one would call it by hand: torch's name for it, and the call.
BY_HAND = {
    "torch.sdpa_flash": ("_scaled_dot_product_flash_attention_for_cpu", "f(q, k, v)[0]"),
    "torch.sdpa_cudnn": ("_scaled_dot_product_cudnn_attention", "f(q, k, v, None, True)[0]"),
    "torch.sdpa_flash_cuda": ("_scaled_dot_product_flash_attention", "f(q, k, v)[0]"),
    "torch.sdpa_efficient": ("_scaled_dot_product_efficient_attention",
                             "f(q, k, v, None, True)[0]"),
}
RMS_BY_HAND = {
    "torch.rms_norm": ("rms_norm", "f(x, size, w, eps)"),
    "torch.fused_rms_norm": ("_fused_rms_norm", "f(x, size, w, eps)[0]"),
}


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    calls: int
    thread_rounds: int
    thread_calls: int
    keys: int
    passes: int


FULL, QUICK = Effort(800, 25, 15, 2000, 200, 5), Effort(4, 10, 2, 50, 12, 1)


@dataclass
class Setting:
    """One device: the tensors of the tiny calls, and what serves them."""

    attention: Dispatcher
    rms: Dispatcher
    tiny: peers.Tiny
    norm: dict[str, Any]
    kernels: tuple[str, str]
    rms_result: Tensor
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def wait(self) -> None:
        if self.tiny.device == "cuda":
            torch.cuda.synchronize()


def prepare(device: str) -> Setting:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, SEQ, DIM, dtype=dtype, device=device) for _ in range(3))
    x, w = torch.randn(SEQ, DIM, dtype=dtype, device=device), torch.randn(DIM, dtype=dtype,
                                                                          device=device)
    notes: list[str] = []
    kernel = _settle("attention", BY_HAND, notes, q, k, v)
    rms_kernel = _settle("rms_norm", RMS_BY_HAND, notes, x, w, EPS)
    tiny = peers.Tiny(device, {"q": q, "k": k, "v": v}, lz.attention(q, k, v), *BY_HAND[kernel],
                      DIRECT)
    return Setting(dispatchers["attention"], dispatchers["rms_norm"], tiny,
                   {"x": x, "size": (DIM,), "w": w, "eps": EPS}, (kernel, rms_kernel),
                   lz.rms_norm(x, w, EPS), notes=notes)


def _settle(op: str, by_hand: dict[str, tuple[str, str]], notes: list[str], *args: Any) -> str:
    """The kernel that serves the call: one that can be called by hand, or there is nothing to
    compare with."""
    chosen = lz.which(op, *args)
    if chosen in by_hand:
        return chosen
    usable = [s.kernel for s in lz.explain(op, *args).steps if s.kernel in by_hand]
    if not usable:
        raise SystemExit(
            f"lz.{op} would use {chosen} for this call, and no kernel that this benchmark can call "
            f"by hand serves it; add {chosen} to the table in {Path(__file__).name}")
    lz.lock(op, usable[0])
    notes.append(f"lz.{op} would use {chosen}; locked to {usable[0]}, which can be called by hand")
    return usable[0]


def entry_of(d: Dispatcher, values: tuple[Any, ...]) -> Entry:
    values = (*values, *(p.default for p in d.op.params[len(values):]))
    return d.obtain(d.key_of(*values), values, None)


# who runs

def contestants(s: Setting, keep: contextlib.ExitStack) -> list[Contestant]:
    """LayerZero, torch, and the peers that are here; the others are noted as missing."""
    others, s.missing = peers.contestants(s.tiny, keep)
    if s.attention.native is None:
        s.missing["native fast path"] = native.status().text
    return [*_attention(s), *_rms_norm(s), *others]


def _attention(s: Setting) -> Iterator[Contestant]:
    d, kernel = s.attention, s.kernels[0]
    rest = tuple(p.default for p in d.op.params[3:])
    everything = ", ".join(["q", "k", "v", *map(repr, rest)])
    entry = entry_of(d, (*s.tiny.qkv.values(), *rest))

    def one(name: str, call: str, f: Any, target: str = DIRECT, **more: Any) -> Contestant:
        return Contestant(name, call, {**s.tiny.qkv, "f": f, **more}, target, s.tiny.result)

    yield one(DIRECT, f"out = {s.tiny.by_hand}", getattr(torch, s.tiny.kernel), "")
    yield one(SDPA, "out = f(q, k, v)", F.scaled_dot_product_attention)
    if d.native is not None:
        yield one(NATIVE, "out = f(q, k, v)", d.native.call)
    yield one(PYTHON, "out = f(q, k, v)", d.python_call)
    yield one("lz.attention's bound kernel alone", f"out = f({everything})", entry.run)
    yield dataclasses.replace(one("lz.attention in lz.prefer(...)", "out = f(q, k, v)", d.public),
                              around=lambda: lz.prefer(kernel))
    yield one("lz.attention, backend=...", "out = f(q, k, v, backend=b)", d.public, b=kernel)
    yield one("torch.ops.layerzero.attention",
              "out = f(q, k, v)" + "[0]" * (d.op.outputs == "Tensor[]"),
              torch.ops.layerzero.attention)
    yield one("with sdpa_kernel([...]) around F.sdpa", "with w(b):\n    out = f(q, k, v)",
              F.scaled_dot_product_attention, SDPA, w=sdpa_kernel,
              b=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    if d.native is not None:
        yield Contestant(LOOKUPS[0], "out = f(q, k, v)",
                         {**s.tiny.qkv, "f": d.native.compiled.lookup})
    yield Contestant(LOOKUPS[1], f"out = find(f({everything}))",
                     {**s.tiny.qkv, "f": d.key_of, "find": d.cache.table.get})


def _rms_norm(s: Setting) -> Iterator[Contestant]:
    d, (name, call) = s.rms, RMS_BY_HAND[s.kernels[1]]

    def one(name: str, call: str, f: Any, target: str = RMS_DIRECT) -> Contestant:
        return Contestant(name, call, {**s.norm, "f": f}, target, s.rms_result)

    yield one(RMS_DIRECT, f"out = {call}", getattr(torch, name), "")
    if d.native is not None:
        yield one("lz.rms_norm, native", "out = f(x, w, eps)", d.native.call)
    yield one("lz.rms_norm, pure Python", "out = f(x, w, eps)", d.python_call)
    yield one("lz.rms_norm's bound kernel alone", "out = f(x, w, eps, 0.0)",
              entry_of(d, (s.norm["x"], s.norm["w"], s.norm["eps"])).run)


# functions of torch

def beside_functions(device: str, dtype: torch.dtype, effort: Effort,
                     s: Setting) -> list[dict[str, Any]]:
    """LayerZero beside the functions one would write in its place, each op locked to the operator
    behind both."""
    found = functions.pairs(device, dtype)
    with contextlib.ExitStack() as locked:
        for pair in found:
            lz.lock(pair.op, pair.kernel)
        locked.callback(lz.unlock)
        return functions.rows(found, race(list(functions.contestants(found)), effort.rounds,
                                          effort.calls, s.wait))


# misses

def misses(s: Setting, effort: Effort) -> list[dict[str, Any]]:
    """What the first call of its kind costs, with the kernels as they are and with `CANDIDATES`
    that may serve."""
    found = [_misses(s, effort)]
    viable = _viable(s)
    models = [viable[i % len(viable)] for i in range(CANDIDATES - len(viable))]
    copies = [dataclasses.replace(k, id=f"benchmark.copy{i}", prior=0.9 * k.prior)
              for i, k in enumerate(models)]
    for kernel in copies:
        lz.register(kernel)
    try:
        if copies:
            found.append(_misses(s, effort))
    finally:
        for kernel in copies:
            lz.unregister(kernel.id)
    return found


def _viable(s: Setting) -> tuple[lz.Kernel, ...]:
    world, device = s.attention.ensure_world(), s.tiny.device
    return world.roster(s.attention.op, device, world.selection_context(device, None)).viable


def _misses(s: Setting, effort: Effort) -> dict[str, Any]:
    """Calls that differ in sizes the key keeps exactly.

    The call itself, taken off, is the same call again: a hit.
    """
    d, like, now = s.attention, s.tiny.result, time.perf_counter_ns
    calls = [tuple(like.new_zeros(1, heads, SEQ, dim) for _ in range(3)) for heads in range(1, 14)
             for dim in range(8, 136, 8)][:effort.keys]
    rest = tuple(p.default for p in d.op.params[3:])
    taken: dict[str, list[float]] = {n: [] for n in ("first", "whole", "facts", "select", "bind")}
    for _ in range(effort.passes):
        lz.clear_cache()
        for i, call in enumerate(calls):
            s.wait()
            marks = [now()]
            d.public(*call)
            marks.append(now())
            d.public(*call)
            marks.append(now())
            # the first one in a new world also works out what depends on the device alone
            taken["whole" if i else "first"].append(marks[1] - marks[0] - (marks[2] - marks[1]))
            world, values = d.ensure_world(), (*call, *rest)
            marks = [now()]
            facts = d.facts(values)
            marks.append(now())
            step = world.plan(d.op, facts, None).steps[0]
            marks.append(now())
            d.bind(world.catalog.by_id[step.kernel], step, facts,
                   fixed_by_key(world.program(d.op), facts))
            marks.append(now())
            for name, start, ended in zip(("facts", "select", "bind"), marks, marks[1:]):
                taken[name].append(ended - start)
    micros = {name: Spread.of([ns / 1e3 for ns in samples]).to_json()
              for name, samples in taken.items()}
    told = sum(micros[n]["median"] for n in ("facts", "select", "bind"))
    return {"kernels": len(d.ensure_world().kernels(d.op.name)), "viable": len(_viable(s)),
            "keys": len(calls),
            "us": micros,
            "rest_us": round(micros["whole"]["median"] - told, 1)}


# threads

def threads(runners: Sequence[Contestant], effort: Effort) -> list[dict[str, Any]]:
    wanted = [c for c in runners if c.name in (DIRECT, NATIVE, PYTHON, *LOOKUPS)]
    found = race_in_threads(wanted, THREADS, effort.thread_rounds, effort.thread_calls)
    return [_row(c, found) for c in wanted]


# reporting

def _row(c: Contestant, found: Race) -> dict[str, Any]:
    over = found.over(c.name)
    return {"name": c.name, "ns": found.of(c.name).to_json(), "target": c.target,
            "over": over.to_json() if over else None}


def rows(runners: Sequence[Contestant], found: Race) -> list[dict[str, Any]]:
    """`x_lz`: what it adds to its target, as a multiple of what lz.attention adds to its own."""
    out = [_row(c, found) for c in runners]
    unit = next(row["over"]["median"] for row in out if row["name"] in (NATIVE, PYTHON))
    for row in out:
        row["x_lz"] = round(row["over"]["median"] / unit, 2) if row["over"] and unit > 0 else None
    return out


def environment() -> dict[str, Any]:
    status = native.status()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": next((d.name for d in lz.doctor().devices if d.type == "cpu"), platform.processor()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
        "system": platform.platform(), "python": platform.python_version(),
        "torch": torch.__version__, "layerzero": lz.__version__,
        "native": status.ok, "native_text": status.text, "load_average": _load(),
        "peers": peers.versions()}


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def warnings_of(env: dict[str, Any]) -> list[str]:
    texts = []
    high = max(env["load_average"] or 0.0, env["load_average_after"] or 0.0)
    if high > BUSY * (env["cores"] or 1):
        texts.append(
            f"the machine is busy (load average {high} on {env['cores']} cores): whole times are "
            "too long; trust a difference where its p10 and p90 agree")
    if not env["native"]:
        texts.append(f"native fast path: {env['native_text']}. 'x lz' compares with pure Python")
    return texts


def say_environment(env: dict[str, Any]) -> None:
    print(
        f"{env['cpu']}, {env['cores']} cores, load average {env['load_average']}; "
        f"{env['gpu'] or 'no GPU'}")
    print(f"Python {env['python']}, torch {env['torch']} on {env['torch_threads']} thread")
    print(f"native fast path: {env['native_text']}")
    print("peers: " + (", ".join(f"{n} {v}" for n, v in env["peers"].items()) or "none installed"),
          flush=True)


def say(device: str, part: dict[str, Any]) -> None:
    print(f"\n{device}: attention {part['shape']} {part['dtype']}, served by {part['kernel']}; "
          f"{part['rounds']} rounds of {part['calls']} calls, {part['repeated']:.0%} run again")
    for note in part["notes"]:
        print(f"note: {note}")
    print(f"{'':<40}{'ns per':>8}{'over its':>10}{'':>18}{'':>8}\n"
          f"{'':<40}{'call':>8}{'target':>10}{'p10 .. p90':>18}{'x lz':>8}  target")
    for row in part["rows"]:
        line = f"{row['name']:<40}{row['ns']['median']:>8.0f}"
        if row["over"]:
            span = f"{row['over']['p10']:.0f} .. {row['over']['p90']:.0f}"
            times = "" if row["x_lz"] is None else f"{row['x_lz']:.1f}"
            line += f"{row['over']['median']:>10.0f}{span:>18}{times:>8}  {row['target']}"
        print(line)
    for name, why in part["missing"].items():
        print(f"{name:<40}  {why}")
    functions.say(part["functions"])
    print("\nmisses: us that the first call of its kind takes beyond a hit (median; p10 .. p90)")
    for m in part["misses"]:
        us, whole = m["us"], m["us"]["whole"]
        split = ", ".join(f"{n} {us[n]['median']:.0f}" for n in ("facts", "select", "bind"))
        print(
            f"  {m['viable']} of {m['kernels']} kernels judged: {whole['median']:.0f} "
            f"({whole['p10']:.0f} .. {whole['p90']:.0f}) = {split}, rest {m['rest_us']:.0f}; the "
            f"first in a new world {us['first']['median']:.0f}")
    if part["threads"]:
        print(f"\n{THREADS} threads at once: wall ns over the calls of all")
    for row in part["threads"]:
        over = f"{row['over']['median']:>10.0f} over direct" if row["over"] else ""
        print(f"  {row['name']:<38}{row['ns']['median']:>8.0f}{over}")


def measure(device: str, effort: Effort, keep: contextlib.ExitStack) -> dict[str, Any]:
    s = prepare(device)
    runners = contestants(s, keep)
    found = race(runners, effort.rounds, effort.calls, s.wait)
    result = s.tiny.result
    part = {"shape": list(result.shape), "dtype": str(result.dtype).removeprefix("torch."),
            "kernel": s.kernels[0], "rms_kernel": s.kernels[1], "rounds": effort.rounds,
            "calls": effort.calls, "notes": s.notes, "missing": s.missing,
            "empty_loop_ns": round(found.empty_ns, 1), "repeated": round(found.repeated, 3),
            "rows": rows(runners, found),
            "threads": threads(runners, effort) if device == "cpu" else [],
            "misses": misses(s, effort)}
    lz.unlock()
    part["functions"] = beside_functions(device, result.dtype, effort, s)
    return part


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds: does everything run?")
    parser.add_argument("--rounds", type=int, help=f"rounds of the race (default {FULL.rounds})")
    parser.add_argument("--calls", type=int, help=f"calls in a batch (default {FULL.calls})")
    parser.add_argument("--device", action="append", choices=("cpu", "cuda"),
                        help="default: each one that is here")
    parser.add_argument("--out", type=Path, default=OUT,
                        help="where the JSON goes (default: %(default)s)")
    args = parser.parse_args(argv)
    effort = QUICK if args.quick else FULL
    effort = dataclasses.replace(effort, rounds=args.rounds or effort.rounds, calls=args.calls
                                 or effort.calls)
    devices = args.device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    # a tiny call has no use for more, and they disturb the clock
    torch.set_num_threads(1)
    env = environment()
    say_environment(env)
    with torch.no_grad(), contextlib.ExitStack() as keep:
        parts = {device: measure(device, effort, keep) for device in devices}
    env["load_average_after"] = _load()
    warnings = warnings_of(env)
    for device, part in parts.items():
        say(device, part)
    for text in warnings:
        print(f"\nwarning: {text}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"benchmark": "dispatch", "quick": args.quick,
                                    "environment": env,
                                    "warnings": warnings, "devices": parts}, indent=1) + "\n")
    print(f"\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
