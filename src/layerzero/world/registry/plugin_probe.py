"""Tries the import of a plugin in a process of its own before it is imported here: one that hangs,
crashes, exits or floods its output does no harm there, and is refused.

The process is a fork, which has torch already and takes milliseconds; where a fork may fail for
reasons of its own (threads, a GPU in use), a failure is confirmed in a fresh process. What passed
is remembered by the versions and files of its package, so that a start costs nothing.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ...files.paths import cache_dir
from ...files.reading import printable, read_json
from ...files.sealed import replace_file, trusted_folder
from ...machine.builds import files_digest
from ...machine.watchdog import SOURCE, signal_name
from ...spec.errors import LayerZeroError
from ...spec.op import import_path, resolve_import_path

SECONDS = 30.0                                 # that an import may take
RETRY_AFTER = 3600.0                           # seconds; a hang or a crash may have been chance
MAX_BYTES = 8 << 30                            # that an import may allocate
MAX_TEXT = 1000                                # characters of an error
MAX_KNOWN = 500                                # plugins that are remembered
FILE = "plugins.json"

Read = Callable[[object, str], object]         # what the plugin offers, of it and its origin


class PluginHarmful(Exception):
    """The import of a plugin would have harmed this process, or failed."""


def check(entry: Any, origin: str, read: Read, again: bool = False) -> None:
    """Raises PluginHarmful for a plugin whose import fails in a process of its own. `again` forgets
    earlier refusals."""
    value = getattr(entry, "value", None)
    if value is None or value.partition(":")[0].strip() in sys.modules:
        return                                 # what it does at import is done
    key, known = _key(entry), _known()
    at, why = known.get(key, (0.0, None))
    if why is None or (why and (again or not 0 <= time.time() - at <= RETRY_AFTER)):
        why, lasting = _probe(entry, origin, read)
        if lasting:
            _remember(key, why)
    if why:
        raise PluginHarmful(why)


def _probe(entry: Any, origin: str, read: Read) -> tuple[str, bool]:
    """Returns why the import fails, "" if it does not, and whether that is worth remembering."""
    single_threaded = native_threads() == 1 and not torch.cuda.is_initialized()
    why, answered = _in_fork(entry, origin, read) if hasattr(os, "fork") else ("?", False)
    if why and not (single_threaded or (answered and not torch.cuda.is_initialized())):
        why, answered = _in_fresh_process(entry, origin, read)
    # an exception may be gone when something else is installed, and costs little to see again
    return why, not why or not answered


def native_threads() -> int:
    """Returns how many threads there are, those of libraries included; a fork has only the one that
    forked, and may wait for the others for ever."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _in_fork(entry: Any, origin: str, read: Read) -> tuple[str, bool]:
    answers, answer = os.pipe()
    leave = os._exit                           # the plugin may replace it: see _import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")        # Python warns of forks with threads
        child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _import(lambda: read(entry.load(), origin), answer)
        finally:
            leave(1)
    os.close(answer)
    return _outcome(child, answers)


def _in_fresh_process(entry: Any, origin: str, read: Read) -> tuple[str, bool]:
    answers, answer = os.pipe()
    job = json.dumps([entry.name, entry.value, entry.group, origin, import_path(read), answer])
    path = os.pathsep.join(dict.fromkeys([SOURCE, *(p for p in sys.path if p)]))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", job],
        pass_fds=[answer], env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(answer)
    outcome = _outcome(process.pid, answers)
    process.returncode = 0                     # waited for already
    return outcome


def main() -> None:
    """The entry point of a fresh process."""
    name, value, group, origin, read, answer = json.loads(sys.argv[1])
    entry = importlib.metadata.EntryPoint(name, value, group)
    _import(lambda: resolve_import_path(read)(entry.load(), origin), answer)


def _import(load: Callable[[], object], answer: int) -> None:
    """Runs in the other process: imports, answers, and ends without running anything more.

    Locals hold what is needed afterwards: an import may replace any global, and a fork that does
    not end would go on as a second copy of the program.
    """
    write, leave = os.write, os._exit
    faulthandler.disable()                     # it would print the stack of a crash
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    _limit_memory()
    text = ""
    try:
        load()
    except BaseException as e:                 # foreign code may raise anything
        text = f"{type(e).__name__}: {e}"[:MAX_TEXT]
    write(answer, b"!" + text.encode("utf-8", "replace"))
    leave(0)


def _limit_memory() -> None:
    """Bounds what the import may allocate, where the system says what there is already."""
    try:
        import resource  # not on every system
        with open("/proc/self/status") as file:
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    except (ImportError, OSError, StopIteration):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_BYTES, hard))


def _outcome(child: int, answers: int) -> tuple[str, bool]:
    """Returns what the process answered, or how it ended, and whether it answered."""
    try:
        look = select.poll()
        look.register(answers, select.POLLIN)
        answer = os.read(answers, 4 * MAX_TEXT) if look.poll(SECONDS * 1e3) else None
    finally:
        os.close(answers)
        ended = _ended(child)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)   # its own children too, if it has ended itself
        if not ended:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    status = _wait(child)
    # an import may write to what is open: nothing but an end in order passes
    if answer and (len(answer) > 1 or status == 0):
        return printable(answer[1:].decode("utf-8", "replace"))[:MAX_TEXT], True
    if answer is None:
        return f"no answer within {SECONDS:g} s", False
    if status < 0:
        return f"its process was killed by signal {-status} ({signal_name(-status)})", False
    return f"its process ended with status {status} while it was imported", False


def _ended(child: int) -> bool:
    """Gives the process a moment to end by itself; it is not waited for yet."""
    for _ in range(100):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        time.sleep(0.01)
    return False


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# what is known

def _key(entry: Any) -> str:
    dist = getattr(entry, "dist", None)
    top = entry.value.partition(":")[0].partition(".")[0].strip()
    name, version = (dist.name, dist.version) if dist else ("", "")
    parts = (entry.group, entry.name, entry.value, name, version, sys.version, torch.__version__,
             SOURCE, files_digest(name, top))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _known() -> dict[str, tuple[float, str]]:
    """Returns key -> when it was tried, and why it failed; "" if it did not."""
    try:
        data = read_json(cache_dir() / FILE, "what is known of plugins")
        return {key: (float(at), str(why)) for key, (at, why) in data.items()}
    except (LayerZeroError, ValueError, TypeError, AttributeError):    # none, or not ours
        return {}


def _remember(key: str, why: str) -> None:
    known = {**_known(), key: (time.time(), why)}
    newest = dict(sorted(known.items(), key=lambda item: item[1][0])[-MAX_KNOWN:])
    # a folder that cannot be written costs a probe at every start
    with suppress(OSError, LayerZeroError):
        replace_file(trusted_folder(cache_dir()) / FILE, json.dumps(newest).encode())
