"""Libraries that cannot share a process, serving in one process tree: killed, hung, and back.

    python benchmarks/conflicts.py --make /tmp/conflicts     makes two environments of 0.8 GB each
    python benchmarks/conflicts.py --old PYTHON --new PYTHON uses environments that are there

old: torch 2.8, numpy 1, ONNX Runtime 1.17 (built for numpy 1), FBGEMM 1.3 (built for torch 2.8)
new: torch 2.9, numpy 2, ONNX Runtime 1.23

It shows that this process cannot import the old ones, then has five kernels of them serve calls
from threads at once, kills a worker in a call, stops another until its time is up, and kills one
again and again to see the back-off. Every result is compared; JSON goes to
results/local/conflicts.json. Without environments it says why and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import venv
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import conflicting_kernels
import torch

import layerzero as lz
from layerzero.machine.isolation.pool import Pool, pools
from layerzero.operate.matrix import matrix
from layerzero.spec.event import Fallback

OUT = Path(__file__).parent / "results" / "local" / "conflicts.json"
ENVIRONMENTS = {
    "old": ("torch==2.8.0", "numpy==1.26.4", "packaging", "onnxruntime==1.17.3", "onnx==1.16.2",
            "fbgemm_gpu-cpu==1.3.0"),
    "new": ("torch==2.9.1", "numpy>=2", "packaging", "onnxruntime==1.23.2", "onnx")}
Calls = dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]


def make(folder: Path) -> dict[str, str]:
    """Makes the environments that are not there yet; returns their interpreters."""
    pythons = {name: str(folder / name / "bin" / "python") for name in ENVIRONMENTS}
    for name, packages in ENVIRONMENTS.items():
        if not Path(pythons[name]).exists():
            venv.create(folder / name, with_pip=True)
            subprocess.run([pythons[name], "-m", "pip", "install", "-q", "--only-binary", ":all:",
                            *packages], check=True)
    return pythons


def import_here(package: str, python: str) -> str:
    """Returns what happens to a process like this one that imports a package of another
    environment: "" if nothing does."""
    site = next(Path(python).parent.parent.glob("lib/python3*/site-packages"))
    code = f"import numpy, torch, sys; sys.path.append({str(site)!r}); import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "cannot be run" in line]
    return "" if done.returncode == 0 else (lines or [f"status {done.returncode}"])[0].strip()


def served_calls() -> Calls:
    """Calls by the kernel in a worker that should serve them, each with its right result."""
    x, weight, ids = torch.randn(16, 256), torch.randn(128, 256), torch.randint(0, 128, (8, 16))
    linear = lz.linear, torch.nn.functional.linear(x, weight), (x, weight)
    rows = {
        "onnxruntime.numpy1_linear": linear,
        "onnxruntime.numpy2_linear": linear,
        "fbgemm.embedding": (lz.embedding, weight[ids], (ids, weight)),
        "torch.rms_norm": (lz.rms_norm, torch.rms_norm(x, (256,), None, 1e-6), (x,)),
        "torch.layer_norm": (lz.layer_norm, torch.layer_norm(x, (256,)), (x,))}

    def bound(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
        return lambda **options: call(*arguments, **options)

    return {f"worker.{kernel}": (bound(call, arguments), right)
            for kernel, (call, right, arguments) in rows.items()}


def serve_at_once(calls: Calls, seconds: float, after: Callable[[], None] | None = None
                  ) -> dict[str, int]:
    """Has a thread for each kernel call it by preference, and compares each result; `after` runs
    when all have begun. Returns how many calls each thread made."""
    made: Counter[str] = Counter()
    wrong: list[str] = []
    end = time.monotonic() + seconds

    def work(kernel: str) -> None:
        call, right = calls[kernel]
        with lz.prefer(kernel):
            while time.monotonic() < end:
                out = call()
                made[kernel] += 1
                if not torch.allclose(out, right, atol=1e-4, rtol=1e-4):
                    wrong.append(kernel)

    threads = [threading.Thread(target=work, args=(kernel,)) for kernel in calls]
    for thread in threads:
        thread.start()
    if after is not None:
        while len(made) < len(calls):
            time.sleep(0.01)
        after()
    for thread in threads:
        thread.join()
    if wrong:
        raise SystemExit(f"wrong results by {Counter(wrong)}")
    return dict(made)


def pool_of(kernel: str, python: str) -> Pool:
    return next(p for p in pools() if p.name == kernel.split(".")[1] and p.python == python)


def wait_for_call(pool: Pool, act: Callable[[int], None]) -> int:
    """Does something to a worker while a call is with it; returns its process id."""
    while True:
        for worker in list(pool.workers):
            if worker.busy and worker.process is not None:
                act(worker.process.pid)
                return worker.process.pid


def time_restarts(pool: Pool, times: int) -> list[float]:
    """Kills each worker as soon as it is there; returns the seconds until a new one may start."""
    delays = []
    for _ in range(times):
        pool.wait()
        worker = pool.workers[0]
        os.kill(worker.process.pid, signal.SIGKILL)        # type: ignore[union-attr]
        start = time.monotonic()
        with suppress(RuntimeError):
            pool.call("onnxruntime.numpy2_linear", (torch.ones(1, 4), torch.ones(1, 4)), ())
        delays.append(round(pool.not_before - start, 3))
    return delays


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, help="a folder for the environments")
    parser.add_argument("--old", help="an interpreter")
    parser.add_argument("--new", help="an interpreter")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    if not args.make and not (args.old and args.new):
        print("skipped: it needs --make FOLDER (and a package index), or --old and --new")
        return 0
    try:
        pythons = make(args.make) if args.make else {"old": args.old, "new": args.new}
    except subprocess.CalledProcessError as e:
        print(f"skipped: the environments cannot be made here ({e})")
        return 0
    old, new = pythons["old"], pythons["new"]
    found: dict[str, Any] = {"torch": torch.__version__, "imported_here": {
        package: import_here(package, old) for package in ("onnxruntime", "fbgemm_gpu")}}
    for package, trouble in found["imported_here"].items():
        print(f"{package} of the old environment, imported here: {trouble or 'works'}")

    for kernel in conflicting_kernels.KERNELS:
        lz.register(kernel)
    lz.configure(isolation=[f"*.numpy1_*=auto:{old}", f"*.numpy2_*=auto:{new}",
                            f"fbgemm.*=auto:{old}", f"torch.rms_norm=worker:{old}",
                            f"torch.layer_norm=worker:{new}"],
                 isolation_memory=256 << 20, isolation_timeout=60.0, breaker_cooldown=1.0)
    found["matrix_ok"] = matrix().ok
    fallbacks: list[Fallback] = []
    lz.subscribe(lambda e: fallbacks.append(e) if isinstance(e, Fallback) else None)
    torch.set_num_threads(1)
    with torch.no_grad():
        calls = served_calls()
        for kernel, (call, right) in calls.items():
            torch.testing.assert_close(call(backend=kernel), right, atol=1e-4, rtol=1e-4)
        found["workers"] = [{"library": p.name, "environment": "old" if p.python == old else "new",
                             **p.workers[0].versions} for p in pools()]
        print("\nworkers:", *(f"\n  {w}" for w in found["workers"]))

        found["at_once"] = serve_at_once(calls, args.seconds)
        assert not fallbacks, fallbacks
        print(f"\nat once, all by their workers, all right: {found['at_once']}")

        victim = "worker.onnxruntime.numpy1_linear"
        pool = pool_of(victim, old)
        pids: list[int] = []
        found["killed"] = serve_at_once(calls, args.seconds, lambda: pids.append(
            wait_for_call(pool, lambda pid: os.kill(pid, signal.SIGKILL))))
        reasons = {str(e.reason) for e in fallbacks if e.kernel == victim}
        assert any("killed by signal 9" in reason for reason in reasons), reasons
        assert {e.kernel for e in fallbacks} == {victim}, fallbacks
        pool.wait()
        assert pool.workers[0].process.pid not in pids     # type: ignore[union-attr]
        print(f"\nkilled in a call: every call was answered right ({found['killed']}); "
              f"the others did not notice; a new worker serves\n  {sorted(reasons)[0]}")

        fallbacks.clear()
        victim = "worker.fbgemm.embedding"
        pool = pool_of(victim, old)
        lz.configure(isolation_timeout=1.0)
        found["hung"] = serve_at_once(calls, args.seconds + 1, lambda: pids.append(
            wait_for_call(pool, lambda pid: os.kill(pid, signal.SIGSTOP))))
        hung = next(e for e in fallbacks if e.kernel == victim)
        assert hung.reason.code is lz.Code.KERNEL_TIMEOUT, hung
        pool.wait()
        print(f"\nstopped in a call: {hung.reason}; the plan went on ({found['hung']})")

        lz.configure(isolation_timeout=60.0)
        found["restart_after_s"] = time_restarts(pool_of("worker.onnxruntime.numpy2_linear", new), 4)
        print(f"\nkilled again and again, started again after {found['restart_after_s']} s")
        for kernel, (call, right) in calls.items():        # all of them serve again
            pool_of(kernel, old if kernel not in (
                "worker.torch.layer_norm", "worker.onnxruntime.numpy2_linear") else new).wait()
            with lz.prefer(kernel):
                torch.testing.assert_close(call(), right, atol=1e-4, rtol=1e-4)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
