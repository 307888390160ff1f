"""References of definitions, run apart: in another process, for a limited time, and only where the
user trusts them.

A reference is code from a file. It is run if the file lies in a folder that was named as trusted,
and never because it happens to be there.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import says_out_of_memory
from ....machine.watchdog import SOURCE
from ..definition import Definition
from ..inputs.generation import available_memory

WORKER = Path(__file__).with_name("reference_worker.py")
START_S = 120.0                                # importing torch on a slow disk
# A busy machine gives a process less than a core: the limit is one of its own time, unless it has
# used little of what passed, or this many times as much has passed.
LEAST_SHARE, PATIENCE, LOOK_S = 0.05, 10, 0.5


@dataclass(frozen=True)
class Ran:
    """What came of a reference: outputs and how long it took, or why there are none."""

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    ms: float = 0.0
    status: str = "ran"                        # ran | untrusted | timeout | memory | failed
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ran"

    @property
    def died(self) -> bool:
        """Was it to run, and did not end well?"""
        return self.status not in ("ran", "untrusted")


class References:
    """A process that runs references, replaced when one takes too long; a context manager."""

    def __init__(self, trusted: Sequence[str | Path] = (), timeout_s: float = 60.0,
                 memory: int | None = None) -> None:
        self.trusted = tuple(Path(folder).resolve() for folder in trusted)
        self.timeout_s = timeout_s
        self.memory = available_memory() * 9 // 10 if memory is None else memory
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory(prefix="lz-references-")

    def __enter__(self) -> References:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def refusal(self, definition: Definition) -> str:
        """Why its reference may not be run; nothing if it may."""
        if definition.origin is None:
            return ("its reference is not run: it was not read from a file, so no folder vouches "
                    "for it")
        home = definition.origin.resolve()
        if any(home.is_relative_to(folder) for folder in self.trusted):
            return ""
        return (f"its reference is not run: {definition.origin} lies in no folder that you trust; "
                f"name it (--trust {home.parent}) if you have read what it does")

    def run(self, definition: Definition, inputs: Mapping[str, Any], device: str = "cpu") -> Ran:
        return next(self.run_all(definition, (definition.reference,), inputs, device))

    def run_all(self, definition: Definition, codes: Iterable[str], inputs: Mapping[str, Any],
                device: str = "cpu", timed: bool = True) -> Iterator[Ran]:
        """Run several codes in place of the reference on the same inputs, one after the other."""
        refused = self.refusal(definition)
        input_file = Path(self._folder.name) / "inputs.pt"
        if not refused:
            torch.save({n: v.cpu() if isinstance(v, Tensor) else v for n, v in inputs.items()},
                       input_file)
        try:
            for code in codes:
                yield (Ran(status="untrusted", why=refused) if refused
                       else self._run_code(definition, code, input_file, device, timed))
        finally:
            input_file.unlink(missing_ok=True)

    def _run_code(self, definition: Definition, code: str, input_file: Path, device: str,
                  timed: bool) -> Ran:
        output_file = Path(self._folder.name) / "outputs.pt"
        job = {"reference": code, "inputs": str(input_file), "to": str(output_file),
               "device": device, "outputs": list(definition.outputs), "timed": timed}
        answer = self._ask(json.dumps(job), device)
        if isinstance(answer, Ran):
            return answer
        if not answer["ok"]:
            place = f" ({answer['place']})" if answer["place"] else ""
            if answer["memory"] or says_out_of_memory(answer["error"]):
                return Ran(status="memory", why="its reference needs more memory than is here: "
                                                f"{answer['error']}{place}")
            return Ran(status="failed", why=f"its reference failed: {answer['error']}{place}")
        outputs: dict[str, Tensor] = torch.load(output_file, weights_only=True)
        output_file.unlink()
        return Ran(outputs, answer["ms"])

    def _ask(self, line: str, device: str) -> Any:
        if self._process is None:
            self._start(device)
            with suppress(queue.Empty):        # it says when torch is imported
                if self._lines.get(timeout=START_S) is None:
                    self._lines.put(None)      # it ended instead
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = self._await(process.pid)
        except queue.Empty:
            self._stop()
            return Ran(status="timeout",
                       why=f"its reference did not end within {self.timeout_s:g} s")
        except OSError:
            reply = None
        if reply is None:
            code = process.wait()
            self._stop()
            killed = code in (-9, 137)
            return Ran(status="memory" if killed else "failed",
                       why="the process of its reference ended with "
                       f"{code}" + (", as it does when memory runs out" if killed else ""))
        return json.loads(reply)

    def _await(self, pid: int) -> str | None:
        """The next line of the process; queue.Empty where it has had its time."""
        began, used = time.monotonic(), cpu_seconds(pid)
        with suppress(queue.Empty):
            return self._lines.get(timeout=self.timeout_s)
        while True:
            passed, now = time.monotonic() - began, cpu_seconds(pid)
            own = self.timeout_s if now is None or used is None else now - used
            if (own >= self.timeout_s or own < LEAST_SHARE * passed
                    or passed >= PATIENCE * self.timeout_s):
                raise queue.Empty
            with suppress(queue.Empty):
                return self._lines.get(timeout=LOOK_S)

    def _start(self, device: str) -> None:
        # an exported op's reference imports this library
        path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH", ""))))
        # a GPU's driver maps more than there is
        limit = self.memory if device == "cpu" else 0
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(limit)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=self._folder.name,
            env={**os.environ, "PYTHONPATH": path})
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):        # what was not yet written to a dead process
                    pipe.close()


def cpu_seconds(pid: int) -> float | None:
    """The time that a process has computed, on all cores; None where the system does not say."""
    try:
        # what follows the name of the program, which may have spaces
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with suppress(ValueError):                 # closed under the reader
        for line in process.stdout:
            lines.put(line)
    lines.put(None)
