"""One worker process, seen from the process that it serves: start, load, call, kill.

A call copies its tensors into shared memory, unless they lie in some already, writes one short
frame and waits. A form, the description of a kind of call, is sent once; calls of it name it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...spec.codec import decode
from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason
from ...spec.rules.launch import LaunchRefused
from ..faults import WorkerFault, WorkerLost, WorkerTimeout
from ..loading import LoadFailed
from ..watchdog import signal_name
from . import cuda
from .arena import Arena, ArenaFull
from .wire import (
    CALL,
    CONTROL,
    DROP,
    FAULT,
    FORM,
    FORM_ID,
    HEADER,
    INPUTS_END,
    LOAD,
    LOADED,
    MAX_FORMS,
    NEED,
    NUMBER,
    PAGE,
    PLACE,
    READY,
    RESULT,
    RESULTS_END,
    RUN,
    SEGMENT,
    SEGMENT_SHIFT,
    SMALL,
    UNREADABLE,
    Closed,
    Garbled,
    Late,
    Link,
    Results,
    Spec,
    align,
    state,
    unexpanded,
)

PACKAGE = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
# Our own package by its folder, not by sys.path: the folder it lies in may hold another torch.
_BOOT = """
import importlib.util, json, sys
config = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("layerzero", config["package"] + "/__init__.py",
                                              submodule_search_locations=[config["package"]])
module = sys.modules["layerzero"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from layerzero.operate.worker import main
main(config)
"""
_STATELESS = ("LAYERZERO_ISOLATION", "LAYERZERO_POLICY", "LAYERZERO_RECORD", "LAYERZERO_AUTO")
_SAME_TYPE = {t.__name__: t for t in (
    ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError,
    NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError)}
_PLAIN = (type(None), bool, int, float, str)
NO_ANSWER = (Late, Closed, Garbled)


@dataclass(frozen=True)
class Limits:
    """The limits that policy sets a worker."""

    seconds: float                             # of one call
    nbytes: int                                # of shared memory, and again of its own


class Form:
    """A kind of call: its frame, and where its small tensors lie."""

    def __init__(self, number: int, specs: Sequence[Spec]) -> None:
        self.id, self.specs = number, specs
        self.result_bytes = 0                       # bytes that its last result took
        self.stage: cuda.Stage | None = None   # that its views are of, on a GPU
        end, self.offsets = 0, []
        for spec in specs:
            fits = spec.nbytes <= SMALL and align(end + spec.nbytes) <= INPUTS_END
            self.offsets.append(end if fits else -1)
            end = align(end + spec.nbytes) if fits else end
        self.small = -1 not in self.offsets
        self.views: list[Tensor] = []
        self.frame = b""
        if self.small:
            self.frame = self.pack(INPUTS_END, RESULTS_END - INPUTS_END, self.offsets)

    def pack(self, offset: int, nbytes: int, positions: Sequence[int]) -> bytes:
        packed = b"".join(map(NUMBER.pack, positions))
        return (HEADER.pack(RUN, CALL.size + len(packed)) + CALL.pack(self.id, offset, nbytes)
                + packed)


class Worker:
    """A process that serves one call at a time. The pool sees to it that no two threads call."""

    def __init__(self, name: str, python: str, limits: Limits) -> None:
        self.name, self.limits = name, limits
        self.arena = Arena(limits.nbytes)
        self.forms: dict[Any, Form] = {}
        self.results: dict[int, tuple[Results, list[Tensor]]] = {}
        self.segments: dict[int, tuple[int, Any, int]] = {}    # address -> id, weak storage, bytes
        self.last_segment = 0
        self.busy = False                      # a call was sent and not answered yet
        self.process: subprocess.Popen[bytes] | None = None    # None: it is not ours, or never was
        self.stages: dict[int, cuda.Stage] = {}                # by GPU
        commands, outbox = os.pipe()             # to the worker
        back, answers = os.pipe()              # from the worker
        alive, lifeline = os.pipe()            # nothing is written: its end is the end of us
        # also of a worker that an interrupt dropped before anybody knew it
        self.close_lifeline = weakref.finalize(self, os.close, lifeline)
        self.control, handed = socket.socketpair()
        page = memoryview(self.arena.map)[CONTROL:CONTROL + PAGE]
        self.link = Link(back, outbox, page, first=True)
        fds = [commands, answers, alive, handed.fileno(), self.arena.fd]
        config = {"package": str(PACKAGE), "fds": fds, "size": self.arena.size, "name": name,
                  "memory": limits.nbytes, "state": state()}
        try:
            self.process = subprocess.Popen(
                [python or sys.executable, "-c", _BOOT, json.dumps(config)], pass_fds=fds,
                stdin=subprocess.DEVNULL, stdout=2, env=environment(python), start_new_session=True)
        except OSError as e:
            self.close()
            raise WorkerLost(name, f"{python or sys.executable} could not be started: {e}") from e
        except BaseException:                  # an interrupt: without the lifeline it ends itself
            self.kill()
            raise
        finally:
            for fd in (commands, answers, alive):
                os.close(fd)
            handed.close()
        kind, body = self._wait(START_SECONDS)
        if kind != READY:
            raise self.garbled(f"{kind} at its start")
        try:
            self.versions: dict[str, str] = json.loads(body)
        except UNREADABLE as e:
            raise self.garbled(e) from None

    def load(self, declared: dict[str, Any]) -> tuple[str, ...]:
        """Has the worker load a kernel; returns the parameters that it takes."""
        kind, body = self._wait(START_SECONDS, LOAD, json.dumps(declared).encode())
        try:
            answer = json.loads(body)
            if kind == LOADED:
                # they become the text of a function
                if not all(name.isidentifier() for name in answer):
                    raise Garbled(f"no parameters are {answer}"[:300])
                return tuple(answer)
            reason = _reason(answer["reason"]) if answer["reason"] else Reason(
                Code.IMPORT_FAILED, declared["module"],
                f"{answer['type']}: {answer['message']}"[:300])
        except (Garbled, *UNREADABLE) as e:
            raise self.garbled(e) from None
        raise LoadFailed(reason)

    def call(self, kernel: str, values: Sequence[Any], in_place: Sequence[int],
             seconds: float) -> Any:
        """Calls a kernel. `in_place` are the indices of tensors that it writes into."""
        tensors: list[Tensor] = []
        key: list[Any] = [kernel, state()]
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad and torch.is_grad_enabled():
                    raise LaunchRefused.of(kernel, (Reason(Code.BACKWARD_UNSUPPORTED),))
                tensors.append(value)
                key += value.shape, value.stride(), value.dtype
            else:
                key += type(value), value
        written = [t for i, t in enumerate(values) if i in in_place and t is not None]
        blocks: list[tuple[int, int]] = []     # given back after the call
        try:
            if tensors and tensors[0].is_cuda:
                key.append(tensors[0].device)
                return cuda.call(self, kernel, tuple(key), values, tensors, written, seconds)
            form = self.form(tuple(key), kernel, values, tensors)
            if form.small and form.result_bytes <= SMALL:
                copies: list[Tensor | None] = form.views  # type: ignore[assignment]
                for view, t in zip(form.views, tensors):
                    view.copy_(unexpanded(t))
                frame, block = form.frame, (0, 0)
            else:
                frame, block, copies = self._copy_large(form, tensors, written, blocks)
            self.busy = True
            self.link.post(frame)
            result = self._receive_result(form, block, blocks, seconds)
            for t, copy in zip(tensors, copies) if written else ():
                if any(t is other for other in written) and copy is not None:
                    unexpanded(t).copy_(copy)
            return result
        except NO_ANSWER as e:
            raise self._no_answer(e, seconds) from None
        finally:
            if self.busy:                      # an interrupt: the answer would meet the next call
                self.kill()
            for offset, nbytes in blocks:
                self.arena.release(offset, nbytes)

    def exchange(self, kind: int, body: bytes, seconds: float) -> bytes:
        """Sends a call as one frame and returns its answer."""
        self.busy = True
        try:
            self.link.send(kind, body)
            answered, answer = self.link.receive(seconds)
            self.busy = False
        except NO_ANSWER as e:
            raise self._no_answer(e, seconds) from None
        finally:
            if self.busy:                      # an interrupt: the answer would meet the next call
                self.kill()
        if answered != RESULT:
            raise self._fault(answered, answer)
        return answer

    def form(self, key: Any, kernel: str, values: Sequence[Any], tensors: Sequence[Tensor]) -> Form:
        """Returns the form of a call; the worker is told of a new one."""
        known = self.forms.get(key)
        if known is not None:
            return known
        for value in values:
            if not isinstance(value, Tensor) and type(value) not in _PLAIN:
                raise LaunchRefused.of(kernel, (Reason(
                    Code.FEATURE_UNSUPPORTED, "a tensor or a plain value", type(value).__name__,
                    "an argument in a worker"),))
        if len(self.forms) >= MAX_FORMS:
            self.forms.clear()                 # the worker forgets the same ids as they come again
        form = Form(len(self.forms), [Spec.of(t) for t in tensors])
        if form.small and not (tensors and tensors[0].is_cuda):
            form.views = [unexpanded(spec.view(self.arena.map, offset))
                          for spec, offset in zip(form.specs, form.offsets)]
        left = iter(form.specs)
        arguments = [{"tensor": next(left)} if isinstance(v, Tensor) else {"value": v}
                     for v in values]
        body = json.dumps({"kernel": kernel, "arguments": arguments, "state": state()}).encode()
        self.link.announce(FORM, FORM_ID.pack(form.id) + body)
        self.forms[key] = form
        return form

    def _copy_large(self, form: Form, tensors: Sequence[Tensor], written: Sequence[Tensor],
                    blocks: list[tuple[int, int]]) -> tuple[
                        bytes, tuple[int, int], list[Tensor | None]]:
        """Copies the tensors of a call that are not shared yet; returns its frame, the block for
        its result (0 for the scratch), and the copies."""
        positions: list[int] = []
        copies: list[Tensor | None] = []
        for spec, offset, t in zip(form.specs, form.offsets, tensors):
            position = self._place(t, spec, written) if offset < 0 else None
            if position is None:
                if offset < 0:
                    offset = self.arena.allocate(spec.nbytes)
                    blocks.append((offset, spec.nbytes))
                copies.append(unexpanded(spec.view(self.arena.map, offset)).copy_(unexpanded(t)))
            else:
                copies.append(None)
            positions.append(offset if position is None else position)
        block = (0, 0)
        if form.result_bytes > SMALL:
            block = self.arena.allocate(form.result_bytes), form.result_bytes
            blocks.append(block)
        where = block if block[0] else (INPUTS_END, RESULTS_END - INPUTS_END)
        return form.pack(*where, positions), block, copies

    def _place(self, t: Tensor, spec: Spec, written: Sequence[Tensor]) -> int | None:
        """Returns the position of a tensor in shared memory; None if it must be copied."""
        if (t.stride() != spec.strides or t.is_conj() or t.is_neg()
            or any(t is other for other in written)):
            return None
        offset = self.arena.position(t.data_ptr(), spec.nbytes)
        if offset is not None:
            return offset
        # how torch itself shares memory between processes, where it does so by descriptors
        if not t.is_shared() or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
            return None
        storage = t.untyped_storage()
        number, weak, size = self.segments.get(storage.data_ptr(), (0, None, 0))
        if weak is None or weak.expired() or size != storage.nbytes():
            if number:
                self.link.announce(DROP, NUMBER.pack(number))
            for address, (old, ref, _) in self.segments.copy().items():
                if ref.expired() and old != number:
                    self.link.announce(DROP, NUMBER.pack(old))
                    del self.segments[address]
            fd, size = storage._share_fd_cpu_()
            self.last_segment = number = self.last_segment + 1
            self.segments[storage.data_ptr()] = number, StorageWeakRef(storage), storage.nbytes()
            socket.send_fds(self.control, [NUMBER.pack(size)], [fd])       # it stays the storage's
            self.link.announce(SEGMENT, NUMBER.pack(number))
        return number << SEGMENT_SHIFT | (t.data_ptr() - storage.data_ptr())

    def _receive_result(self, form: Form, block: tuple[int, int], blocks: list[tuple[int, int]],
                        seconds: float) -> Any:
        kind, body = self.link.receive(seconds)
        if kind == NEED:                       # the first result of this form, or a larger one
            nbytes = int.from_bytes(body, "little")
            with suppress(ArenaFull):          # the worker reports it
                block = self.arena.allocate(nbytes), nbytes
                blocks.append(block)
            self.link.send(PLACE, NUMBER.pack(block[0] if block[1] >= nbytes else 0))
            kind, body = self.link.receive(seconds)
        self.busy = False
        if kind != RESULT:
            raise self._fault(kind, body)
        try:
            number, = FORM_ID.unpack_from(body)
            if len(body) > FORM_ID.size:
                results = Results.from_json(body[FORM_ID.size:])
                views = [item.view(self.arena.map, INPUTS_END + start) for item, start
                         in results.tensors()] if results.nbytes <= RESULTS_END - INPUTS_END else []
                self.results[number] = results, views
            results, views = self.results[number]
            form.result_bytes = results.nbytes
            if not block[0]:
                return results.assemble([view.clone() for view in views])
            result = results.assemble(self.arena.tensors(*block, results.tensors()))
        except UNREADABLE as e:
            raise Garbled(f"{type(e).__name__}: {e}") from None
        blocks.remove(block)
        return result

    def _fault(self, kind: int, body: bytes) -> BaseException:
        """Returns the error that the worker answered with."""
        if kind != FAULT:
            return self.garbled(f"{kind} to a call")
        try:
            return _fault(self.name, json.loads(body))
        except UNREADABLE as e:
            return self.garbled(e)

    def garbled(self, what: object) -> WorkerLost:
        """Ends a process whose answers cannot be read, nor the next ones be trusted."""
        self.kill()
        return WorkerLost(self.name,
                          f"its answer cannot be read ({what}), so it was stopped"[:400])

    def _no_answer(self, problem: Exception, seconds: float) -> WorkerFault:
        """Returns the error for an answer that is late, cut off or cannot be read."""
        if isinstance(problem, Late):
            self.kill()
            return WorkerTimeout(self.name, seconds)
        return self._lost() if isinstance(problem, Closed) else self.garbled(problem)

    def _wait(self, seconds: float, kind: int = 0, body: bytes = b"") -> tuple[int, bytes]:
        """Waits for an answer that is not of a call, after sending what it answers, if anything."""
        try:
            if kind:
                self.link.send(kind, body)
            return self.link.receive(seconds)
        except NO_ANSWER as e:
            raise self._no_answer(e, seconds) from None
        except BaseException:                  # an interrupt
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _lost(self) -> WorkerLost:
        """Returns how the process ended, after its end of the pipe was closed."""
        self.busy = False
        process = self.process
        if process is None:
            return WorkerLost(self.name, "it was stopped")
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        self.kill()
        return WorkerLost(self.name, f"it was killed by signal {-code} ({signal_name(-code)})"
                          if code is not None and code < 0 else f"it ended with status {code}")

    def kill(self) -> None:
        """Ends the process at once and waits for its end."""
        self.busy = False
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.close()

    def stop(self, seconds: float = 1.0) -> None:
        """Lets the process end by itself, then kills it."""
        self.close()
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()

    def close(self) -> None:
        """Closes our ends of everything; results that lie in shared memory stay."""
        self.forms.clear()
        self.results.clear()
        cuda.give_back(self.stages)
        self.link.close()
        self.control.close()
        self.close_lifeline()
        self.arena.close()

    def abandon(self) -> None:
        """Runs in a forked child: the process belongs to the parent."""
        if self.process is not None:
            self.process.returncode = 0        # its destructor must not wait for it
        self.process = None
        self.arena.make_private()
        self.close()


def environment(python: str) -> dict[str, str]:
    """Returns a worker's variables: another interpreter has its own path, none has workers."""
    environ = {k: v for k, v in os.environ.items() if k not in _STATELESS}
    if python:
        return {k: v for k, v in environ.items()
                if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in sys.path if p))}


def _fault(worker: str, answer: dict[str, Any]) -> BaseException:
    """Returns the error of a worker as the same kind of error here."""
    kind, message = answer["kind"], f"{answer['message']} (in the worker of {worker})"
    error: BaseException
    if kind == "refused" and answer.get("reason"):
        error = LaunchRefused(message, (_reason(answer["reason"]),))
    elif kind == "caller":
        error = InvalidCall(message)
    elif kind == "memory":
        error = MemoryError(message)
    elif kind == "kernel" and answer["type"] in _SAME_TYPE:
        error = _SAME_TYPE[answer["type"]](message)
    else:                                      # a lost device is the worker's alone
        error = WorkerFault(worker, f"{answer['type']}: {answer['message']}")
    error.__dict__["worker_traceback"] = answer["traceback"]
    return error


def _reason(data: dict[str, Any]) -> Reason:
    return decode(Reason, data, "a worker's reason")
