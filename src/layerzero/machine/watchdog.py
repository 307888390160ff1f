"""Run something for a limited time: in a process of its own, where what hangs, crashes or loses the device does so
there, or on a thread, which can be left behind but not stopped.

A function for a process is named by its import path ("package.module:name"); its arguments and its result travel as
JSON. The process gets the import path of this one and nothing else of it.
"""

from __future__ import annotations

import contextvars
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..spec.errors import ConfigError
from ..spec.op import resolve_import_path
from ..spec.reason import Code, Reason
from .faults import Hung, classify

SOURCE = str(Path(__file__).resolve().parents[2])
TIMEOUT_S = 120.0
KEPT = 400                                     # characters of what the process said that are told


@dataclass(frozen=True)
class Outcome:
    """`status`: ran | failed (it raised) | timeout | crashed (the process died). `value` is what the function gave."""

    status: str
    value: Any = None
    why: str = ""
    kind: str = ""                             # of a failure: as faults.classify says; "sticky" is a lost device

    @property
    def ok(self) -> bool:
        return self.status == "ran"

    @property
    def reason(self) -> Reason | None:
        """For a kernel that was run so: why it must not be run here; None if it ran."""
        if self.status == "ran":
            return None
        if self.status == "timeout":
            return Reason(Code.KERNEL_TIMEOUT, self.why, self.why)
        return Reason(Code.DEVICE_FAULT if self.kind == "sticky" else Code.KERNEL_FAILED, None, self.why)


def run_isolated(function: str, *args: Any, timeout: float = TIMEOUT_S, path: Sequence[str] = (),
                 environ: dict[str, str] | None = None) -> Outcome:
    """Call `function` ("module:name") with `args` elsewhere. Whatever it does, this process goes on."""
    if ":" not in function:
        raise ConfigError(f"run_isolated wants a function as 'package.module:name', got {function!r}")
    try:
        job = json.dumps({"function": function, "args": args})
    except (TypeError, ValueError) as e:
        raise ConfigError(f"run_isolated({function!r}): the arguments must be plain JSON values: {e}") from e
    search = os.pathsep.join(dict.fromkeys([SOURCE, *path, *(p for p in sys.path if p)]))
    process = subprocess.Popen(
        [sys.executable, "-c", "from layerzero.machine.watchdog import main; main()"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": search, **(environ or {})})
    try:
        answer, said = process.communicate(job, timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        return Outcome("timeout", why=f"{timeout:g} s")
    except BaseException:                      # an interrupt: it must not outlive us
        _end(process)
        raise
    return _read(process.returncode, answer, said)


def _read(code: int, answer: str, said: str) -> Outcome:
    lines = answer.strip().splitlines()
    if code == 0 and lines:
        with suppress(json.JSONDecodeError):
            return Outcome(**json.loads(lines[-1]))
    if code < 0:
        how = f"the process was killed by signal {-code} ({_signal_name(-code)})"
    else:
        how = f"the process ended with {code} and gave no answer"
    last = said.strip().splitlines()[-1:] or [""]
    return Outcome("crashed", why=f"{how}: {last[0]}"[:KEPT].rstrip(": "))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def bounded(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """`run` on a thread, waited for no longer than `seconds`: then Hung is raised, and the thread is left behind.

    It sees the caller's device, stream and context variables, and whether gradients are recorded. What else is of a
    thread (autocast, modes of torch) cannot be handed over: under such a call waits as long as it takes.
    """
    def limited(*values: Any) -> Any:
        if torch._C._is_any_autocast_enabled() or _get_current_dispatch_mode() is not None:
            return run(*values)
        done, results, faults = threading.Event(), [], []
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        cuda = next((v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda), None)
        stream = torch.cuda.current_stream(cuda) if cuda is not None else None

        def work() -> None:
            try:
                with ExitStack() as state:
                    if cuda is not None:
                        state.enter_context(torch.cuda.device(cuda))
                        state.enter_context(torch.cuda.stream(stream))
                    state.enter_context(torch.inference_mode(inference))
                    state.enter_context(torch.set_grad_enabled(grad))
                    results.append(run(*values))
            except BaseException as e:         # raised again in the thread that waits
                faults.append(e)
            finally:
                done.set()

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name="layerzero-call", daemon=True).start()
        if not done.wait(seconds):
            raise Hung(seconds)
        if faults:
            raise faults[0]
        return results[0]

    return limited


def _end(process: subprocess.Popen[str]) -> None:
    """With all it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def main() -> None:
    """In the process: read the job, run it, say what came of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                              # a function that prints does not disturb the answer
    job = json.load(sys.stdin)
    try:
        value = resolve_import_path(job["function"])(*job["args"])
        answer = json.dumps({"status": "ran", "value": value})
    except (Exception, SystemExit) as e:       # anybody's code may raise anything; the answer says what
        text = f"{type(e).__name__}: {str(e).strip()}"[:KEPT]
        traceback.print_exc()
        answer = json.dumps({"status": "failed", "why": text, "kind": classify(e)})
    print(answer, file=answers, flush=True)
    answers.close()
    os._exit(0)                                # threads, and destructors of a lost device, are not waited for


if __name__ == "__main__":
    main()
