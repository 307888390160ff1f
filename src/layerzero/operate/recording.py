"""Writing down the calls that a program really makes: `with lz.recording(path)` and `lz record -- command`.

On a hit no code of ours runs, so a recorded dispatcher never hits: its tables stay empty, on both call
paths, and every call takes the way of a miss, which finds the remembered choice in the cache. Results
and choices are the same. Where nothing is recorded, nothing of this is in the way.

A kind of call is described when it first comes, and counted after that. A call that torch.compile or
export traces is written once, when it is traced: what runs later is torch's graph, not a call of ours.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from ..dispatch import dispatcher as dispatch
from ..dispatch import facts as reading
from ..dispatch import tracing
from ..dispatch.cache import Count, Entry
from ..dispatch.native import NO_WORLD
from ..machine import locks
from ..perf.record import kind_of
from ..spec.call import Call, TensorSpec
from ..spec.errors import ConfigError, DataError
from ..spec.event import Event, Fallback
from ..spec.op import Op
from ..spec.sealed import replace_output
from ..world import events
from ..world import snapshot as worlds
from ..world.context import Override
from ..world.snapshot import World
from . import calls

VARIABLE = "LAYERZERO_RECORD"                  # a folder: every process that has it writes a file of its own there
FLUSH_SECONDS = 1.0

log = logging.getLogger("layerzero")
_active: tuple[Observer, ...] = ()
_changing = locks.Lock()
_here = threading.local()                      # .fallback: (op, kernel) that served in another's place, this moment


class Observer(Protocol):
    """What is told of every call that is served, while one is active."""

    def served(self, op: Op, entry: Entry, kernel: str, values: tuple[Any, ...], began: int, ended: int) -> None:
        """`kernel` has served; `began` and `ended` are nanoseconds as time.time_ns() has them."""

    def traced(self, op: Op, facts: Mapping[str, Any], kernel: str, values: tuple[Any, ...]) -> None: ...

    def flush(self) -> None: ...

    def after_fork(self) -> None: ...


class _Kind:
    """One line of the file. `call` is None where a call cannot be written down, such as one with a tokenizer."""

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
        self.path = path if self.folder is None else self.folder / f"{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._kinds: dict[Any, _Kind] = {}
        self._of_entry: WeakKeyDictionary[Entry, _Kind] = WeakKeyDictionary()
        self._lock, self._writing = locks.Lock(), locks.Lock()
        self._due = 0.0
        self._at_exit = False

    def after_fork(self) -> None:
        """In the child: a recording to a folder goes on in a file of its own, one to a file is the parent's."""
        self._begin(None)

    @property
    def calls(self) -> tuple[Call, ...]:
        """What came so far."""
        with self._lock:
            kinds = list(self._kinds.values())
        return tuple(k.call.times(n) for k in kinds if k.call is not None and (n := k.count.total))

    @property
    def unwritten(self) -> int:
        """How many calls could not be written down."""
        with self._lock:
            return sum(k.count.total for k in self._kinds.values() if k.call is None)

    def served(self, op: Op, entry: Entry, kernel: str, values: tuple[Any, ...], began: int, ended: int) -> None:
        own, facts = kernel == entry.plan.kernel, entry.plan.facts
        kind = self._of_entry.get(entry) if own else None
        if kind is None:
            kind = self._kind(op, facts, _named(op, values), f"served by {kernel}")
            if own:
                with self._lock:
                    self._of_entry[entry] = kind
        kind.count.tick()
        now = time.monotonic()
        if now > self._due:
            self._due = now + FLUSH_SECONDS
            self.flush()

    def traced(self, op: Op, facts: Mapping[str, Any], kernel: str, values: tuple[Any, ...]) -> None:
        kind = self._kind(op, facts, _named(op, values), f"traced into {kernel}")
        if not kind.count.total:               # one tracing runs the same call several times
            kind.count.tick()

    def _kind(self, op: Op, facts: Mapping[str, Any], values: Mapping[str, Any], name: str) -> _Kind:
        """The line that this call counts for; a new one is described and written at once."""
        key: Any = op.name, name
        call = None
        try:
            outline = _outline(op, facts, values, name)
            strided = tuple(isinstance(v, TensorSpec) and v.strides is not None for v in outline.arguments.values())
            key = op.name, name, kind_of(op, facts).bucket, strided
            if key not in self._kinds:
                readable = facts["tensor_kind"] == "plain" and not facts["graph"]
                call = calls.describe(op, values, name) if readable else outline
        except (DataError, RuntimeError, NotImplementedError):     # an object; a tensor without strides
            pass
        with self._lock:
            known = self._kinds.get(key)
            kind = known or self._kinds.setdefault(key, _Kind(call))
        if known is None and call is not None:
            self._append(call)
        return kind

    # files

    def _append(self, call: Call) -> None:
        """A new kind is on disk at once: the program may not come to its end."""
        with self._writing, self._expecting_trouble():
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps(call.to_json()) + "\n")
        if not self._at_exit and "multiprocessing.util" in sys.modules:
            self._at_exit = True               # a forked worker ends without atexit, but not without this
            sys.modules["multiprocessing.util"].Finalize(None, self.flush, exitpriority=10)

    def flush(self) -> None:
        """Write everything, with the counts of this moment, in one step."""
        with self._writing, self._expecting_trouble():
            if self.path is not None and (self.folder is None or self._kinds):
                replace_output(self.path, "".join(json.dumps(call.to_json()) + "\n" for call in self.calls))

    @contextmanager
    def _expecting_trouble(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:                   # the program goes on; its recording ends here
            log.warning("recording stopped: %s", e)
            self.path = None


class Recorded(dispatch.Dispatcher):
    """A dispatcher that never hits, and tells the recorders what was served."""

    def install(self, world: World, anew: bool = False) -> None:
        super().install(world, anew)
        self.globals["TABLE"] = {}
        if self.native is not None and self.program is not None:
            self.native.install(self.program, NO_WORLD, 1)

    def serve(self, entry: Entry, values: tuple[Any, ...]) -> Any:
        _here.fallback = None
        began = time.time_ns()
        out = super().serve(entry, values)
        ended = time.time_ns()
        fallback, _here.fallback = getattr(_here, "fallback", None), None
        kernel = fallback[1] if fallback and fallback[0] == self.op.name else entry.plan.kernel or ""
        for recorder in _active:
            recorder.served(self.op, entry, kernel, values, began, ended)
        return out

    def traced(self, values: tuple[Any, ...], override: Override | None) -> Any:
        out = super().traced(values, override)
        world = self._ready()
        facts = tracing.seen_facts(reading.read(self.op, _named(self.op, values), world.program(self.op).needed))
        choice = tracing.choose(world, self.op, facts, override)
        facts["tensor_kind"] = "traced"
        for recorder in _active:
            recorder.traced(self.op, facts, choice[1].id if choice else "", values)
        return out


def _named(op: Op, values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((p.name for p in op.params), values))


def _outline(op: Op, facts: Mapping[str, Any], values: Mapping[str, Any], name: str) -> Call:
    """As calls.describe, but no value is read and no symbol is asked: the sizes are those seen while tracing."""
    arguments: dict[str, Any] = {}
    for p in op.params:
        value = values[p.name]
        if isinstance(value, Tensor):
            shape, strides = (tuple(map(tracing.hint, numbers)) for numbers in (value.shape, value.stride()))
            packed, step = True, 1
            for size, stride in zip(reversed(shape), reversed(strides)):
                packed, step = packed and (size == 1 or stride == step), step * size
            packed = packed or 0 in shape
            arguments[p.name] = TensorSpec(shape, reading.dtype_name(value.dtype), None if packed else strides)
        elif p.kind == "object":
            raise DataError(f"lz.{op.name}: {p.name} cannot be written down")
        elif p.kind != "generator" and (p.required or value != p.default):
            arguments[p.name] = tracing.hint(value)
    return Call(op.name, arguments, grad=facts["grad"], name=name)


def _noted(event: Event) -> None:
    if isinstance(event, Fallback):
        _here.fallback = event.op, event.served_by


def _switch(kind: type[dispatch.Dispatcher]) -> None:
    """From now on every dispatcher, also one that is made later, is of this kind."""
    vars(dispatch)["Dispatcher"] = kind
    for found in dispatch.dispatchers.values():
        found.__class__ = kind
        if found.world is not None:
            found.install(found.world, anew=True)


_PLAIN = dispatch.Dispatcher
_stop_noting: Callable[[], None] | None = None         # while a recording is on: ends its subscription


def start(recorder: Observer) -> None:
    global _active, _stop_noting
    with _changing:
        first, _active = not _active, (*_active, recorder)
        if first:
            _stop_noting = events.subscribe(_noted, reasons=False)
            _locked(lambda: _switch(Recorded))


def stop(recorder: Observer) -> None:
    """End it, and write what is not written yet."""
    global _active, _stop_noting
    with _changing:
        _active = tuple(r for r in _active if r is not recorder)
        if not _active and _stop_noting is not None:
            _stop_noting()
            _stop_noting = None
            _locked(lambda: _switch(_PLAIN))
    recorder.flush()


def _locked(do: Callable[[], None]) -> None:
    """No world is published meanwhile. Without a world there is nothing to keep still."""
    worlds.call_with_current(lambda world: do()) if worlds.exists() else do()


@contextmanager
def recording(path: str | os.PathLike[str] | None = None) -> Iterator[Recorder]:
    """Write the calls of this process, in all threads, to `path` as JSON lines; without a path only count them.

    The file is there while the block runs, and complete after it. It can be replayed: lz tune, lz regret.
    """
    file = None if path is None else Path(path)
    if file is not None:                       # what cannot be written is known now
        try:
            file.write_text("")
        except OSError as e:
            raise ConfigError(f"lz.recording: {file} cannot be written: {e.strerror}; give a path that can") from e
    recorder = Recorder(file)
    start(recorder)
    try:
        yield recorder
    finally:
        stop(recorder)


def from_environment() -> Recorder | None:
    """Begin what LAYERZERO_RECORD asks for: a file for each process in that folder, until the process ends."""
    folder = os.environ.get(VARIABLE, "").strip()
    if not folder or any(isinstance(r, Recorder) and r.folder is not None for r in _active):
        return None
    recorder = Recorder(None, Path(folder))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{VARIABLE}={folder}: cannot make the folder: {e.strerror}; set it to one that can be "
                          "written, or unset it") from e
    start(recorder)
    atexit.register(recorder.flush)
    return recorder


def _after_fork() -> None:
    for recorder in _active:
        recorder.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
