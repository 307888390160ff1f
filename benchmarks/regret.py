"""What the choices for the standard workload cost, before and after tuning.

    python benchmarks/regret.py                tune, then replay: some minutes
    python benchmarks/regret.py --quick        a few calls: does everything run?
    python benchmarks/regret.py --untuned      replay what a new user meets: nothing measured here
    python benchmarks/regret.py --mode captured
        eager, captured (in a CUDA graph) or compiled (by torch.compile)

Measurements are kept in memory: no store is read or changed. The table shows the calls with the
greatest regret; everything goes to results/regret-<mode>-<device>-<cores>-cores.json, or --out
FILE.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("LAYERZERO_PERFDB", "off")       # before the library reads it

import torch

import layerzero as lz
from layerzero.cli.commands.measure.workload import show_regret
from layerzero.dispatch import native
from layerzero.perf.record import EAGER, MODES, Measurement, Rates
from layerzero.spec.call import Call
from layerzero.tuning import regret
from layerzero.tuning.tuner import tune
from layerzero.tuning.workload import calls_for
from layerzero.world import snapshot as worlds

QUICK = 25                                     # every so many of the calls


def environment(device: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device, "cpu": next((d.name for d in lz.doctor().devices if d.type == "cpu"),
                                      platform.processor()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(), "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(), "torch": torch.__version__,
        "layerzero": lz.__version__, "native": native.status().ok,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None}


def keep(found: Sequence[Measurement], rates: Mapping[str, Rates] | None) -> None:
    worlds.publish(lambda w: w.replace(perf=w.perf.including(found, rates)), "measured")


def tuned(calls: Sequence[Call], device: str, mode: str) -> dict[str, Any]:
    start = time.perf_counter()
    report = tune(calls, device=device, mode=mode, save=keep,
                  progress=lambda done, total, what: print(f"\rtuning {done}/{total}", end="",
                                                           file=sys.stderr))
    print(file=sys.stderr)
    return {"seconds": time.perf_counter() - start, "kinds": len(report.tuned),
            "skipped": len(report.skipped)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", default="standard",
                        help="standard, a model, an operation or a file of calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", choices=MODES, default=EAGER)
    parser.add_argument("--tune-mode", choices=MODES,
                        help="tune in another mode than the one that is replayed")
    parser.add_argument("--seconds-per-call", type=float, default=0.5)
    parser.add_argument("--untuned", action="store_true", help="do not tune first")
    parser.add_argument("--quick", action="store_true", help="a few calls, a short time each")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    calls = calls_for(args.calls)[::QUICK if args.quick else 1]
    seconds = 0.05 if args.quick else args.seconds_per_call
    env = environment(args.device)
    print(
        f"{len(calls)} calls on {env['gpu'] if args.device == 'cuda' else env['cpu']}, "
        f"{env['cores']} cores, load average {env['load_average']}")
    tuning = None if args.untuned else tuned(calls, args.device, args.tune_mode or args.mode)
    report = regret.replay(calls, seconds=seconds, device=args.device, mode=args.mode)
    show_regret(report, str(env["gpu"] if args.device == "cuda" else env["cpu"]), len(report.rows))
    problems = report.problems()
    for problem in problems:
        print(f"!!  {problem}")
    out = (args.out or Path(__file__).parent / "results"
           / f"regret-{args.mode}-{args.device}-{env['cores']}-cores.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": "regret", "quick": args.quick, "workload": args.calls,
                               "mode": args.mode, "tuned_in": None if args.untuned
                               else args.tune_mode or args.mode, "environment": env,
                               "tuning": tuning, "problems": list(problems), **report.to_json()},
                              indent=1) + "\n")
    print(f"\nwritten to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
