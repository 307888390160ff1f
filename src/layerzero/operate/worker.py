"""A worker process: it loads kernels in its own interpreter, and runs them for the process that
started it, over memory that both have mapped.

It ends when that process does, even in the middle of a kernel: the kernel (of the system) signals
the end of a pipe that nothing is ever written to.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import mmap
import os
import platform
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..dispatch.binding import bind
from ..machine import faults, loading
from ..machine.isolation import cuda
from ..machine.isolation.wire import (
    CALL,
    CONTROL,
    CUDA,
    CUDA_HANDLES,
    DROP,
    FAULT,
    FORM,
    FORM_ID,
    HEADER,
    LOAD,
    LOADED,
    MAX_FORMS,
    NEED,
    NUMBER,
    OFFSET_MASK,
    PAGE,
    READY,
    RESULT,
    RUN,
    SEGMENT,
    SEGMENT_SHIFT,
    STAGE,
    Closed,
    Link,
    Results,
    Spec,
    adopt,
    unexpanded,
)
from ..spec.kernel import Kernel, accepted_params
from ..spec.op import resolve_import_path
from ..spec.rules.launch import LaunchRefused
from ..world.registry.catalog import builtin_op

MAX_TEXT = 4000                                # characters of an error that travel
MAX_PLACED = 64                                # sets of positions remembered per form


_ANY = torch.empty(0)


class Loaded:
    """A kernel with what its library gave, and the parameters it takes."""

    def __init__(self, kernel: Kernel, function: Any, accepted: tuple[str, ...]) -> None:
        self.kernel, self.function, self.accepted = kernel, function, accepted
        self.bound: dict[Any, Callable[[Sequence[Any]], Any]] = {}

    def bind(self, values: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """Returns what runs calls with these plain values; tensors may be others."""
        op = self.kernel.op
        fixed = {name: v for name, v in zip(self.accepted, values) if not isinstance(v, Tensor)}
        key = tuple((type(v), v) for v in fixed.values())
        if key in self.bound:
            return self.bound[key]
        if len(self.bound) >= MAX_FORMS:
            self.bound.clear()
        run = bind(op, self.kernel, self.function, (), "", fixed).run
        places = [next(i for i, p in enumerate(op.params) if p.name == name)
                  for name in self.accepted]
        defaults = [None if p.required else p.default for p in op.params]

        def call(values: Sequence[Any]) -> Any:
            arguments = defaults.copy()
            for place, value in zip(places, values):
                arguments[place] = value
            return run(*arguments)

        self.bound[key] = call
        return call


class Form:
    """A kind of call: what runs it, and its arguments by the positions of their tensors."""

    def __init__(self, message: dict[str, Any], kernel: Loaded) -> None:
        self.state = message["state"]
        self.arguments = [Spec.from_json(a["tensor"]) if "tensor" in a else (a["value"],)
                          for a in message["arguments"]]
        # a tensor stands for any: only plain values decide
        self.run = kernel.bind([_ANY if isinstance(a, Spec) else a[0] for a in self.arguments])
        self.placed: dict[bytes, list[Any]] = {}
        self.stage: cuda.Stage | None = None   # of a GPU, with these values in it
        self.staged: list[Any] = []


class Answer(NamedTuple):
    """The last answer to a form, if it was one dense tensor: most calls are answered alike."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    view: Tensor
    frame: bytes

    def fits(self, out: Any, offset: int, nbytes: int) -> bool:
        return (type(out) is Tensor and offset == self.offset and nbytes >= self.nbytes
                and out.dtype is self.dtype and out.shape == self.shape
                and out.stride() == self.strides and out.is_cpu)


class Server:
    def __init__(self, config: dict[str, Any]) -> None:
        reading, writing, self.alive, control, arena = config["fds"]
        memory = mmap.mmap(arena, config["size"])
        self.link = Link(reading, writing, memoryview(memory)[CONTROL:CONTROL + PAGE], first=False)
        self.control = socket.socket(fileno=control)
        self.segments: dict[int, mmap.mmap] = {0: memory}
        self.kernels: dict[str, Loaded] = {}
        self.forms: dict[int, Form] = {}
        self.results: dict[Any, tuple[int, Results, dict[int, list[Tensor]]]] = {}
        self.answers: dict[int, Answer] = {}   # by form
        self.stages: dict[int, cuda.Stage] = {}
        self.state = list(config["state"])
        adopt(self.state)

    def serve(self) -> NoReturn:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        self.link.send(READY, json.dumps(versions).encode())
        actions = {RUN: self.run, FORM: self.define, LOAD: self.load, SEGMENT: self.map_segment,
                   DROP: self.drop_segment, CUDA: self.run_cuda,
                   CUDA_HANDLES: self.run_by_handles, STAGE: self.map_stage}
        while True:
            kind, body = self.link.receive()
            try:
                actions[kind](body)
            except Closed:
                raise
            # a library may raise anything, and exit
            except (Exception, SystemExit) as e:
                self.report(e)

    def load(self, body: bytes) -> None:
        message = json.loads(body)
        sys.path += [p for p in message["path"] if p not in sys.path]
        kernel = _find(message)
        reason = loading.availability(kernel)
        try:
            if reason is None:
                loaded = loading.load(kernel)
        except loading.LoadFailed as e:
            reason = e.reason
        if reason is not None:
            self.link.send(FAULT, json.dumps({"reason": reason.to_json()}).encode())
            return
        accepted = accepted_params(kernel.id, kernel.op, loaded)
        self.kernels[kernel.id] = Loaded(kernel, loaded, accepted)
        self.link.send(LOADED, json.dumps(accepted).encode())

    def define(self, body: bytes) -> None:
        number, = FORM_ID.unpack_from(body)
        message = json.loads(body[FORM_ID.size:])
        self.answers.pop(number, None)
        self.forms[number] = Form(message, self.kernels[message["kernel"]])

    def run(self, body: bytes) -> None:
        number, offset, nbytes = CALL.unpack_from(body)
        form, positions = self.forms[number], body[CALL.size:]
        values = form.placed.get(positions)
        if values is None:
            values = self.place(form, positions)
        out, answer = form.run(self.in_state(form.state, values)), self.answers.get(number)
        if answer is not None and answer.fits(out, offset, nbytes):
            answer.view.copy_(out)
            self.link.post(answer.frame)
        else:
            self.reply(out, offset, nbytes, number)

    def in_state(self, wanted: list[Any], values: list[Any]) -> list[Any]:
        if wanted != self.state:
            adopt(wanted)
            self.state = wanted
        return values

    def place(self, form: Form, positions: bytes) -> list[Any]:
        """Returns the arguments of a call; views are remembered, since positions come again."""
        places = iter(NUMBER.iter_unpack(positions))
        values: list[Any] = []
        for argument in form.arguments:
            if isinstance(argument, Spec):
                position, = next(places)
                values.append(argument.view(self.segments[position >> SEGMENT_SHIFT],
                                            position & OFFSET_MASK))
            else:
                values.append(argument[0])
        if len(form.placed) >= MAX_PLACED:
            form.placed.clear()
        form.placed[positions] = values
        return values

    def forget_results(self) -> None:
        """Numbers of results begin again: no answer may name an old one."""
        self.results.clear()
        self.answers.clear()

    def reply(self, out: Any, offset: int, nbytes: int, form: int) -> None:
        """Copies a result into the room that the process gave, or asks for more."""
        items, key = _items(out)
        known = self.results.get(key)
        text = b""
        if known is None:
            if len(self.results) >= MAX_FORMS:
                self.forget_results()
            results = _describe_result(out, items, "cpu")
            known = self.results[key] = len(self.results), results, {}
            text = results.to_json().encode()
        number, results, places = known
        if results.nbytes > nbytes:
            self.link.send(NEED, NUMBER.pack(results.nbytes))
            _, body = self.link.receive()
            offset, = NUMBER.unpack(body)
            if not offset:
                self.results.pop(key)          # its description was not sent
                raise MemoryError(f"the result of {results.nbytes} bytes does not fit in the "
                                  "memory shared with the process")
        views = places.get(offset)
        if views is None:
            if len(places) >= MAX_PLACED:
                places.clear()
            views = places[offset] = [unexpanded(spec.view(self.segments[0], offset + start))
                                    for spec, start in results.tensors()]
        for view, t in zip(views, _tensors(items)):
            view.copy_(unexpanded(t))
        self.link.send(RESULT, FORM_ID.pack(number) + text)
        if type(out) is Tensor and out.numel() and 0 not in out.stride():
            frame = HEADER.pack(RESULT, FORM_ID.size) + FORM_ID.pack(number)
            self.answers[form] = Answer(out.dtype, out.shape, out.stride(), offset, results.nbytes,
                                        views[0], frame)

    def map_stage(self, body: bytes) -> None:
        stage = cuda.Stage.of(json.loads(body))
        self.stages[stage.device] = stage

    def run_cuda(self, body: bytes) -> None:
        number, device, position = cuda.STAGED.unpack(body)
        form, stage = self.forms[number], self.stages[device]
        with torch.cuda.device(device):
            if form.stage is not stage:
                specs = [a for a in form.arguments if isinstance(a, Spec)]
                views = iter(cuda.place(specs, stage)[0])
                form.staged = [next(views) if isinstance(a, Spec) else a[0]
                               for a in form.arguments]
                form.stage = stage
            stage.ready.wait()
            out = form.run(self.in_state(form.state, form.staged))
            answer = self.staged_answer(out, stage, position)
            stage.done.record()
        self.link.send(RESULT, answer)

    def staged_answer(self, out: Any, stage: cuda.Stage, position: int) -> bytes:
        """Copies a result into the stage, and describes it; by handles if it does not fit."""
        items, key = _items(out)
        known = self.results.get(key)
        text = b""
        if known is None:
            results = _describe_result(out, items, "cuda")
            if position + results.nbytes > stage.size:
                return FORM_ID.pack(cuda.BY_HANDLES) + cuda.by_handles(results, _tensors(items))
            if len(self.results) >= MAX_FORMS:
                self.forget_results()
            known = self.results[key] = len(self.results), results, {}
            text = results.to_json().encode()
        number, results, _ = known
        if position + results.nbytes > stage.size:
            return FORM_ID.pack(cuda.BY_HANDLES) + cuda.by_handles(results, _tensors(items))
        for (spec, at), t in zip(results.tensors(), _tensors(items)):
            unexpanded(spec.view(stage.memory, position + at)).copy_(unexpanded(t))
        return FORM_ID.pack(number) + text

    def run_by_handles(self, body: bytes) -> None:
        message = json.loads(body)
        device = message["device"]
        with torch.cuda.device(device):
            stage = self.stages[device]
            values = [cuda.rebuild(a["cuda"]) if "cuda" in a else a["value"]
                      for a in message["arguments"]]
            stage.ready.wait()
            run = self.kernels[message["kernel"]].bind(values)
            out = run(self.in_state(message["state"], values))
            items, _ = _items(out)
            answer = cuda.by_handles(_describe_result(out, items, "cuda"), _tensors(items))
            stage.done.record()
        self.link.send(RESULT, answer)

    def map_segment(self, body: bytes) -> None:
        number, = NUMBER.unpack(body)
        data, fds, _, _ = socket.recv_fds(self.control, NUMBER.size, 1)
        size, = NUMBER.unpack(data)
        self.segments[number] = mmap.mmap(fds[0], size)
        os.close(fds[0])

    def drop_segment(self, body: bytes) -> None:
        """Forgets a segment whose memory the process has freed; views over it go with it."""
        self.segments.pop(NUMBER.unpack(body)[0], None)
        for form in self.forms.values():
            form.placed.clear()

    def report(self, error: BaseException) -> None:
        kind = faults.classify(error)
        reason = error.reasons[0].to_json() if isinstance(error, LaunchRefused) else None
        self.link.send(FAULT, json.dumps({
            "type": type(error).__name__, "message": str(error)[:MAX_TEXT], "kind": kind,
            "reason": reason, "traceback": traceback.format_exc()[-MAX_TEXT:]}).encode())
        if kind == "sticky":                   # a new process can use the device again
            os._exit(1)


def _items(out: Any) -> tuple[list[Any], Any]:
    """Returns what a result is made of, and a key that is equal for results of one form."""
    items = [out] if isinstance(out, Tensor) else list(out)
    return items, (type(out) is list, *(
        (t.dtype, t.shape, t.stride(), t.device) if isinstance(t, Tensor) else (type(t), t)
        for t in items))


def _tensors(items: Sequence[Any]) -> list[Tensor]:
    return [t for t in items if isinstance(t, Tensor)]


def _describe_result(out: Any, items: Sequence[Any], device: str) -> Results:
    """Returns the form of a result, whose tensors must be plain ones of this kind of device."""
    for t in _tensors(items):
        if t.layout is not torch.strided or t.device.type != device:
            raise TypeError(f"a worker returns plain tensors of the {device.upper()}, got "
                            f"{t.layout} on {t.device}")
    kind = "tensor" if isinstance(out, Tensor) else "list" if type(out) is list else "tuple"
    return Results.of(kind, [Spec.of(t) if isinstance(t, Tensor) else (t,) for t in items])


def _find(message: dict[str, Any]) -> Kernel:
    """Returns the kernel as its module declares it here; the versions it wants are checked here."""
    declared, remote = message["kernel"], message.get("remote")
    if remote is not None:
        load = partial(resolve_import_path(remote["load"]), **remote["arguments"])
        return Kernel.from_json(declared, builtin_op(declared["op"]), lambda _: load)
    module = importlib.import_module(message["module"])
    for kernel in getattr(module, "KERNELS", ()):
        if kernel.id == message["id"]:
            return kernel  # type: ignore[no-any-return]
    return Kernel.from_json(declared, builtin_op(declared["op"]), resolve_import_path)


def _limit_memory(nbytes: int) -> None:
    """Bounds what the process may allocate from now on, a GPU driver's memory included."""
    if not sys.platform.startswith("linux") or torch.cuda.is_available():
        return
    with open("/proc/self/status") as file:
        used = next((int(line.split()[1]) << 10 for line in file if line.startswith("VmData")), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (
        wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _end_with(pipe: int) -> None:
    """Ends this process when the other end of `pipe` is closed, whatever it does then."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    look = select.poll()
    look.register(pipe, select.POLLIN)
    if look.poll(0):                           # it was closed before
        os._exit(0)


def main(config: dict[str, Any]) -> None:
    """The entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_grad_enabled(False)
    server = Server(config)
    _end_with(server.alive)
    _limit_memory(config["memory"])
    try:
        server.serve()
    except Closed:
        os._exit(0)                            # threads and destructors are not waited for
