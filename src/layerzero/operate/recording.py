"""Recording the calls that a program really makes: `with lz.recording(path)` and `lz record --
command`.

A hit leaves no place to record it, so a recording dispatcher never hits: its tables stay empty, on
both call paths, and every call goes through `miss`, which finds the remembered choice in the cache.
Results and choices are the same. While nothing is recorded, this costs nothing.

A kind of call is described when it first comes, and counted after that. A call that torch.compile
or export traces is recorded once, when it is traced: what runs later is torch's graph, not a call
of ours.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from ..dispatch import dispatcher as dispatch
from ..dispatch import tracing
from ..dispatch.cache import Count, Entry
from ..dispatch.facts import dtype_name
from ..dispatch.facts import read as read_facts
from ..dispatch.native import NO_WORLD
from ..files.sealed import replace_output
from ..machine import locks
from ..perf.record import kind_of
from ..spec.call import Call, TensorSpec
from ..spec.errors import ConfigError, DataError
from ..spec.event import Event, Fallback
from ..spec.op import Op
from ..world import events
from ..world import snapshot as worlds
from ..world.context import Override
from ..world.snapshot import World
from . import calls

# a folder in which every process writes a file of its own
VARIABLE = "LAYERZERO_RECORD"
FLUSH_SECONDS = 1.0

log = logging.getLogger("layerzero")
_observers: tuple[Observer, ...] = ()
_observers_lock = locks.Lock()
# .fallback: (op, kernel) of a fallback during this call
_thread_local = threading.local()


class Observer(Protocol):
    """Is notified of every call that is served, while it is started."""

    def served(self, op: Op, entry: Entry, kernel: str, values: tuple[Any, ...], start: int,
               ended: int) -> None:
        """Called after `kernel` served; `start` and `ended` are of time.time_ns()."""

    def traced(self, op: Op, facts: Mapping[str, Any], kernel: str,
               values: tuple[Any, ...]) -> None: ...

    def flush(self) -> None: ...

    def after_fork(self) -> None: ...


class _Line:
    """One line of the file; `call` is None if it cannot be described (a tokenizer object)."""

    __slots__ = ("call", "count")

    def __init__(self, call: Call | None) -> None:
        self.call = call
        self.count = Count()


class Recorder:
    """Counts the calls of this process by kind and by the kernel that served them."""

    def __init__(self, path: Path | None, folder: Path | None = None) -> None:
        self.folder = folder
        self._begin(path)

    def _begin(self, path: Path | None) -> None:
        self.path = (path if self.folder is None
                     else self.folder / f"{os.getpid()}-{secrets.token_hex(4)}.jsonl")
        self._lines: dict[Any, _Line] = {}
        self._line_of_entry: WeakKeyDictionary[Entry, _Line] = WeakKeyDictionary()
        self._lock, self._writing = locks.Lock(), locks.Lock()
        self._due = 0.0
        self._at_exit = False
        self._waits = False                    # for a file that cannot be written now

    def after_fork(self) -> None:
        """In a forked child: a recording to a folder goes on in its own file, others end."""
        self._begin(None)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far, one for each kind."""
        with self._lock:
            kinds = list(self._lines.values())
        return tuple(k.call.times(n) for k in kinds if k.call is not None and (n := k.count.total))

    @property
    def unwritten(self) -> int:
        """Returns how many calls could not be described."""
        with self._lock:
            return sum(k.count.total for k in self._lines.values() if k.call is None)

    def served(self, op: Op, entry: Entry, kernel: str, values: tuple[Any, ...], start: int,
               ended: int) -> None:
        was_chosen, facts = kernel == entry.plan.kernel, entry.plan.facts
        line = self._line_of_entry.get(entry) if was_chosen else None
        if line is None:
            line = self._line_for(op, facts, _by_name(op, values), f"served by {kernel}")
            if was_chosen:
                with self._lock:
                    self._line_of_entry[entry] = line
        line.count.tick()
        now = time.monotonic()
        if now > self._due:
            self._due = now + FLUSH_SECONDS
            self.flush()

    def traced(self, op: Op, facts: Mapping[str, Any], kernel: str,
               values: tuple[Any, ...]) -> None:
        line = self._line_for(op, facts, _by_name(op, values), f"traced into {kernel}")
        if not line.count.total:               # one tracing runs the same call several times
            line.count.tick()

    def _line_for(self, op: Op, facts: Mapping[str, Any], values: Mapping[str, Any],
                  name: str) -> _Line:
        """Return the line that this call counts for; a new one is described and written at once."""
        key: Any = op.name, name
        call = None
        try:
            outline = _outline(op, facts, values, name)
            strided = tuple(isinstance(v, TensorSpec) and v.strides is not None
                            for v in outline.arguments.values())
            key = op.name, name, kind_of(op, facts).bucket, strided
            if key not in self._lines:
                readable = facts["tensor_kind"] == "plain" and not facts["graph"]
                call = calls.describe(op, values, name) if readable else outline
        # an object, or a tensor without strides
        except (DataError, RuntimeError, NotImplementedError):
            pass
        with self._lock:
            known = self._lines.get(key)
            line = known or self._lines.setdefault(key, _Line(call))
        if known is None and call is not None:
            self._append(call)
        return line

    # files

    def _append(self, call: Call) -> None:
        """Write a new kind at once: the program may not come to its end."""
        with self._writing, self._waiting_on_error():
            if self.path is not None and not self._waits:
                with self.path.open("ab", buffering=0) as file:
                    line, size = json.dumps(call.to_json()).encode() + b"\n", file.tell()
                    try:
                        if file.write(line) < len(line):
                            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    except OSError:            # re-raised: no half of a line is left
                        with suppress(OSError):
                            file.truncate(size)
                        raise
        if not self._at_exit and "multiprocessing.util" in sys.modules:
            # a forked worker runs this at its end, but not atexit
            self._at_exit = True
            sys.modules["multiprocessing.util"].Finalize(None, self.flush, exitpriority=10)

    def flush(self) -> None:
        """Write everything, with the current counts, atomically."""
        with self._writing, self._waiting_on_error():
            if self.path is not None and (self.folder is None or self._lines):
                replace_output(self.path,
                               "".join(json.dumps(call.to_json()) + "\n" for call in self.calls))
                self._waits = False

    @contextmanager
    def _waiting_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:                   # the program goes on; the next flush tries again
            if not self._waits:
                log.warning("the recording cannot be written and is kept in memory: %s", e)
            self._waits = True


class RecordingDispatcher(dispatch.Dispatcher):
    """A dispatcher that never hits, and notifies the observers of every call."""

    def install(self, world: World, force: bool = False) -> None:
        super().install(world, force)
        self.globals["TABLE"] = {}
        if self.native is not None and self.program is not None:
            self.native.install(self.program, NO_WORLD, 1)

    def serve(self, entry: Entry, values: tuple[Any, ...]) -> Any:
        _thread_local.fallback = None
        start = time.time_ns()
        out = super().serve(entry, values)
        ended = time.time_ns()
        fallback, _thread_local.fallback = getattr(_thread_local, "fallback", None), None
        kernel = (fallback[1] if fallback and fallback[0] == self.op.name else entry.plan.kernel
                  or "")
        for observer in _observers:
            observer.served(self.op, entry, kernel, values, start, ended)
        return out

    def serve_traced(self, values: tuple[Any, ...], override: Override | None) -> Any:
        out = super().serve_traced(values, override)
        world = self.ensure_world()
        facts = tracing.hinted_facts(read_facts(self.op, _by_name(self.op, values),
                                                world.program(self.op).needed))
        choice = tracing.choose(world, self.op, facts, override)
        facts["tensor_kind"] = "traced"
        for observer in _observers:
            observer.traced(self.op, facts, choice[1].id if choice else "", values)
        return out


def _by_name(op: Op, values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((p.name for p in op.params), values))


def _outline(op: Op, facts: Mapping[str, Any], values: Mapping[str, Any], name: str) -> Call:
    """Describe a call as calls.describe does, without reading a value or guarding on a symbol."""
    arguments: dict[str, Any] = {}
    for p in op.params:
        value = values[p.name]
        if isinstance(value, Tensor):
            shape, strides = (tuple(map(tracing.hint, numbers))
                              for numbers in (value.shape, value.stride()))
            packed, step = True, 1
            for size, stride in zip(reversed(shape), reversed(strides)):
                packed, step = packed and (size == 1 or stride == step), step * size
            packed = packed or 0 in shape
            arguments[p.name] = TensorSpec(shape, dtype_name(value.dtype), None if packed
                                           else strides)
        elif p.kind == "object":
            raise DataError(f"lz.{op.name}: {p.name} cannot be written down")
        elif p.kind != "generator" and (p.required or value != p.default):
            arguments[p.name] = tracing.hint(value)
    return Call(op.name, arguments, grad=facts["grad"], name=name)


def _note_fallback(event: Event) -> None:
    if isinstance(event, Fallback):
        _thread_local.fallback = event.op, event.served_by


def _switch(cls: type[dispatch.Dispatcher]) -> None:
    """Make every dispatcher, now and later, an instance of this class."""
    vars(dispatch)["Dispatcher"] = cls
    for dispatcher in list(dispatch.dispatchers.values()):
        dispatcher.__class__ = cls
        if dispatcher.world is not None:
            dispatcher.install(dispatcher.world, force=True)


_PLAIN = dispatch.Dispatcher
_unsubscribe: Callable[[], None] | None = None         # set while something observes


def start(observer: Observer) -> None:
    """Notify the observer of every call from now on."""
    global _observers, _unsubscribe
    try:
        with _observers_lock:
            first, _observers = not _observers, (*_observers, observer)
            if first:
                _unsubscribe = events.subscribe(_note_fallback, reasons=False)
                _between_worlds(lambda: _switch(RecordingDispatcher))
    except BaseException:                      # re-raised: an interrupt leaves nothing recording
        _remove(observer)
        raise


def stop(observer: Observer) -> None:
    """Stop notifying the observer, and flush it."""
    try:
        _remove(observer)
    except BaseException:                      # re-raised: an interrupt does not keep it going
        _remove(observer)
        raise
    observer.flush()


def _remove(observer: Observer) -> None:
    global _observers, _unsubscribe
    with _observers_lock:
        _observers = tuple(r for r in _observers if r is not observer)
        if not _observers and _unsubscribe is not None:
            _between_worlds(lambda: _switch(_PLAIN))
            _unsubscribe()
            _unsubscribe = None


def _between_worlds(do: Callable[[], None]) -> None:
    """Call `do` while no world can be published."""
    worlds.call_with_current(lambda world: do()) if worlds.exists() else do()


@contextmanager
def recording(path: str | os.PathLike[str] | None = None) -> Iterator[Recorder]:
    """Write the calls of this process, in all threads, to `path` as JSON lines; without a path only
    count them.

    The file exists while the block runs, and is complete after it. It can be replayed: lz tune, lz
    regret.
    """
    file = None if path is None else Path(path)
    if file is not None:                       # fail now if it cannot be written
        if file.is_fifo():                     # opening it would wait for a reader, in every call
            raise ConfigError(f"lz.recording: {file} is a pipe, and a recording is rewritten as it "
                              "grows; give the path of a file")
        try:
            replace_output(file, "")
        except OSError as e:
            raise ConfigError(
                f"lz.recording: {file} cannot be written: {e.strerror}; give a path that "
                "can") from e
    recorder = Recorder(file)
    try:
        start(recorder)
        yield recorder
    finally:
        stop(recorder)
        if recorder._waits:
            log.warning("%s is not complete: it could not be written at the end either", file)


def from_environment() -> Recorder | None:
    """Start the recording that LAYERZERO_RECORD asks for: a file per process in that folder."""
    folder = os.environ.get(VARIABLE, "").strip()
    if not folder or any(isinstance(r, Recorder) and r.folder is not None for r in _observers):
        return None
    recorder = Recorder(None, Path(folder))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(
            f"{VARIABLE}={folder}: cannot make the folder: {e.strerror}; set it to one that can be "
            "written, or unset it") from e
    start(recorder)
    atexit.register(recorder.flush)
    return recorder


def _after_fork() -> None:
    for observer in _observers:
        observer.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
