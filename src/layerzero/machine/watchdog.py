"""Runs a function for a limited time: in a process of its own, which may hang, crash or lose the
device without harm to this one, or on a thread, which can be abandoned but not stopped.

A function for a process is named by its import path ("package.module:name"); its arguments and its
result travel as JSON. The process inherits sys.path and the environment, nothing else.
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
MAX_TEXT = 400                                 # characters of an error that are kept


@dataclass(frozen=True)
class Outcome:
    """`status`: ran | failed (it raised) | timeout | crashed. `value`: the function's result."""

    status: str
    value: Any = None
    why: str = ""
    # of a failure: faults.classify; "sticky" is a lost device
    kind: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ran"

    @property
    def reason(self) -> Reason | None:
        """Returns why a kernel with this outcome must not run in this process; None if it ran."""
        if self.status == "ran":
            return None
        if self.status == "timeout":
            return Reason(Code.KERNEL_TIMEOUT, self.why, self.why)
        return Reason(Code.DEVICE_FAULT if self.kind == "sticky" else Code.KERNEL_FAILED, None,
                      self.why)


def run_isolated(function: str, *args: Any, timeout: float = TIMEOUT_S, path: Sequence[str] = (),
                 environ: dict[str, str] | None = None) -> Outcome:
    """Calls `function` ("module:name") with `args` in another process. Whatever it does, this
    process goes on."""
    if ":" not in function:
        raise ConfigError(
            f"run_isolated wants a function as 'package.module:name', got {function!r}")
    try:
        job = json.dumps({"function": function, "args": args})
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"run_isolated({function!r}): the arguments must be plain JSON values: {e}") from e
    python_path = os.pathsep.join(dict.fromkeys([SOURCE, *path, *(p for p in sys.path if p)]))
    process = subprocess.Popen(
        [sys.executable, "-c", "from layerzero.machine.watchdog import main; main()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": python_path, **(environ or {})})
    try:
        stdout, stderr = process.communicate(job, timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Outcome("timeout", why=f"{timeout:g} s")
    except BaseException:                      # an interrupt: the child must not outlive us
        _kill(process)
        raise
    return _parse_outcome(process.returncode, stdout, stderr)


def _parse_outcome(code: int, stdout: str, stderr: str) -> Outcome:
    lines = stdout.strip().splitlines()
    if code == 0 and lines:
        with suppress(json.JSONDecodeError):
            return Outcome(**json.loads(lines[-1]))
    if code < 0:
        ending = f"the process was killed by signal {-code} ({signal_name(-code)})"
    else:
        ending = f"the process ended with {code} and gave no answer"
    error = stderr.strip().splitlines()[-1:] or [""]
    return Outcome("crashed", why=f"{ending}: {error[0]}"[:MAX_TEXT].rstrip(": "))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def with_timeout(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Returns `run` on a thread with a limit of `seconds`: beyond it Hung is raised, and the thread
    abandoned.

    The thread sees the caller's device, stream, context variables, grad mode and inference mode.
    Other thread state (autocast, torch dispatch modes) cannot be handed over: a call under one of
    those has no limit.
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
        threading.Thread(target=context.run, args=(work,), name="layerzero-call",
                         daemon=True).start()
        if not done.wait(seconds):
            raise Hung(seconds)
        if faults:
            raise faults[0]
        return results[0]

    return limited


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills the process and all its children."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def main() -> None:
    """The entry point of the process: reads the job, runs it, writes the outcome."""
    out = os.fdopen(os.dup(1), "w")
    # what the function prints must not mix with the reply
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    try:
        value = resolve_import_path(job["function"])(*job["args"])
        reply = json.dumps({"status": "ran", "value": value})
    # foreign code may raise anything; the reply says what
    except (Exception, SystemExit) as e:
        text = f"{type(e).__name__}: {str(e).strip()}"[:MAX_TEXT]
        traceback.print_exc()
        reply = json.dumps({"status": "failed", "why": text, "kind": classify(e)})
    print(reply, file=out, flush=True)
    out.close()
    # threads, and destructors of a lost device, are not waited for
    os._exit(0)


if __name__ == "__main__":
    main()
