"""Runs references of definitions, one after the other, in a process of its own. See references.py,
which starts it.

It imports torch and nothing of this library. A job is a line of JSON on stdin, the answer a line on
what was stdout; what the references print goes to stderr.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time
import traceback
from typing import Any, TextIO

import torch

SHORT_S = 0.05                                 # a run below this is timed again, warm


def limit_memory(more: int) -> None:
    """Limit the memory of this process to `more` bytes beyond what it has now."""
    try:
        import resource
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError):
        return                                 # no such limit on this system
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def call(job: dict[str, Any]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "reference", "torch": torch, "math": math}
    exec(compile(job["reference"], "<reference>", "exec"), namespace)
    run = namespace["run"]
    # mapped privately: what a reference writes into its inputs stays its own
    inputs = torch.load(job["inputs"], map_location=job["device"], weights_only=True,
                        mmap=job["device"] == "cpu")
    parameters = inspect.signature(run).parameters
    by_name = all(name in parameters for name in inputs)
    torch.manual_seed(0)

    def once() -> Any:
        return run(**inputs) if by_name else run(*inputs.values())

    start = time.perf_counter()
    results = once()
    if job["device"] != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if isinstance(results, dict):
        outputs = {name: results[name] for name in job["outputs"]}
    else:
        parts = results if isinstance(results, (tuple, list)) else (results,)
        if len(parts) != len(job["outputs"]):
            raise ValueError(
                f"run() gave {len(parts)} outputs, the definition says {', '.join(job['outputs'])}")
        outputs = dict(zip(job["outputs"], parts))
    torch.save({name: torch.as_tensor(v).cpu() for name, v in outputs.items()}, job["to"])
    if seconds < SHORT_S and job["timed"]:
        start = time.perf_counter()
        once()
        seconds = min(seconds, time.perf_counter() - start)
    return {"ok": True, "ms": seconds * 1e3}


def failure(e: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(type(e), e, e.__traceback__)
    here = [line for line in lines if "<reference>" in line]
    text = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
    place = here[-1].strip().splitlines()[0] if here else ""
    return {"ok": False, "memory": isinstance(e, MemoryError),
            "error": " ".join(text.split())[:500], "place": place}


def main() -> None:
    answers: TextIO = os.fdopen(os.dup(1), "w")
    # a reference that prints does not disturb the answers
    os.dup2(2, 1)
    memory = int(sys.argv[1])
    if memory:
        limit_memory(memory)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = call(json.loads(line))
        # a stranger's code may raise anything; the answer says what
        except (Exception, SystemExit) as e:
            answer = failure(e)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
