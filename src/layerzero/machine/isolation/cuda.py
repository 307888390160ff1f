"""Tensors of a GPU between a process and its worker: a stage, which is memory of the GPU that both
have mapped, and events that order their streams. The host waits for nothing but the answer.

A call is copied through the stage: on the device that takes microseconds, and to open the IPC
handle of a tensor takes the driver a millisecond. What is too large for a stage goes by handles
nevertheless, those of torch.multiprocessing: the memory of a result then belongs to the worker
until the last tensor over it is gone here.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...spec.reason import Code, Reason
from ...spec.rules.launch import LaunchRefused
from .wire import (
    CUDA,
    CUDA_HANDLES,
    FORM_ID,
    STAGE,
    UNREADABLE,
    Garbled,
    Results,
    Spec,
    align,
    state,
    unexpanded,
)

if TYPE_CHECKING:
    from .process import Form, Worker

SMALLEST, LARGEST = 32 << 20, 256 << 20        # bytes of a stage
ALIGNMENT = 256
STAGED = struct.Struct("<IIQ")                 # form, device, position of the result in the stage
BY_HANDLES = 0xFFFFFFFF                        # number of a result that did not fit
# as rebuild_cuda_tensor takes them after the class, in the order that reduce_tensor gives
_FIELDS = ("shape", "strides", "tensor_offset", "storage_class", "dtype", "device", "handle",
           "size", "storage_offset", "requires_grad", "counter", "counter_offset", "event",
           "event_sync")


def share(t: Tensor) -> dict[str, Any]:
    """Describes a tensor of a GPU so that another process can map its memory."""
    t = t.detach()
    try:
        _, arguments = reduce_tensor(t)
    except RuntimeError as e:
        if "received from another process" not in str(e):
            raise
        _, arguments = reduce_tensor(t.clone())
    fields = dict(zip(_FIELDS, arguments[1:]))
    del fields["storage_class"]
    fields["dtype"] = str(fields["dtype"])[6:]
    fields.update(shape=tuple(fields["shape"]), strides=tuple(fields["strides"]))
    return {k: {"bytes": base64.b64encode(v).decode()} if isinstance(v, bytes) else v
            for k, v in fields.items()}


def rebuild(shared: Mapping[str, Any]) -> Tensor:
    """Maps the memory of a tensor of another process."""
    fields: dict[str, Any] = {k: base64.b64decode(v["bytes"]) if isinstance(v, dict) else v
                              for k, v in shared.items()}
    fields.update(dtype=getattr(torch, fields["dtype"]), storage_class=torch.UntypedStorage)
    tensor: Tensor = rebuild_cuda_tensor(Tensor, *(fields[name] for name in _FIELDS))
    return tensor


class Stage:
    """Memory of a GPU for one call at a time, and two shared events: inputs ready, result ready."""

    def __init__(self, memory: Tensor, handles: Sequence[str] = ()) -> None:
        self.memory, self.size = memory, memory.numel()
        self.device: int = memory.device.index
        if handles:
            self.ready, self.done = (torch.cuda.Event.from_ipc_handle(
                memory.device, base64.b64decode(handle)) for handle in handles)
        else:
            self.ready, self.done = (torch.cuda.Event(interprocess=True) for _ in range(2))
        self.read = torch.cuda.Event()         # the last result was copied out, on any stream

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Stage:
        """Maps the stage of another process."""
        return cls(rebuild(message["memory"]), message["events"])

    def to_json(self) -> dict[str, Any]:
        return {"memory": share(self.memory), "events": [
            base64.b64encode(e.ipc_handle()).decode() for e in (self.ready, self.done)]}


# Memory that a worker had mapped is not freed if it died: its successor gets it.
_spare: list[Tensor] = []


def give_back(stages: dict[int, Stage]) -> None:
    _spare.extend(stage.memory for stage in stages.values())
    stages.clear()


def _allocate(device: int, nbytes: int) -> Tensor:
    for i, memory in enumerate(_spare):
        if memory.device.index == device and memory.numel() >= nbytes:
            return _spare.pop(i)
    return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))


def _stage_for(worker: Worker, device: int, nbytes: int) -> Stage:
    """Returns the stage of a GPU, a larger one than before if need be."""
    stage = worker.stages.get(device)
    if stage is None or stage.size < nbytes:
        if stage is not None:
            _spare.append(stage.memory)
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        stage = worker.stages[device] = Stage(_allocate(device, size))
        worker.link.announce(STAGE, json.dumps(stage.to_json()).encode())
    return stage


def place(specs: Sequence[Spec], stage: Stage) -> tuple[list[Tensor], int]:
    """Returns the tensors of a call in the stage, and their end: equal in both processes."""
    views, end = [], 0
    for spec in specs:
        views.append(spec.view(stage.memory, end))
        end = align(end + spec.nbytes, ALIGNMENT)
    return views, end


def call(worker: Worker, kernel: str, key: Any, values: Sequence[Any], tensors: Sequence[Tensor],
         written: Sequence[Tensor], seconds: float) -> Any:
    """Calls a kernel with tensors of a GPU; streams wait for each other, the host for the frame."""
    device: int = tensors[0].device.index
    if any((t.device.type, t.device.index) != ("cuda", device) for t in tensors):
        raise LaunchRefused.of(kernel, (Reason(Code.MIXED_DEVICES, f"cuda:{device}", "another",
                                               "a tensor"),))
    form = worker.form(key, kernel, values, tensors)
    needed = sum(align(spec.nbytes, ALIGNMENT) for spec in form.specs)
    with torch.cuda.device(device):
        if 2 * needed + form.result_bytes > LARGEST:
            return _call_by_handles(worker, form, kernel, values, device, seconds)
        stage = _stage_for(worker, device, needed + max(form.result_bytes, needed))
        if form.stage is not stage:
            form.stage, (form.views, _) = stage, place(form.specs, stage)
        stage.read.wait()
        for view, t in zip(form.views, tensors):
            unexpanded(view).copy_(unexpanded(t))
        stage.ready.record()
        answer = worker.exchange(CUDA, STAGED.pack(form.id, device, needed), seconds)
        stage.done.wait()
        try:
            result = _result(worker, form, stage, needed, answer)
        except UNREADABLE as e:
            raise Garbled(f"{type(e).__name__}: {e}") from None
        for view, t in zip(form.views, tensors) if written else ():
            if any(t is other for other in written):
                unexpanded(t).copy_(unexpanded(view))
        stage.read.record()
    return result


def _result(worker: Worker, form: Form, stage: Stage, position: int, answer: bytes) -> Any:
    number, = FORM_ID.unpack_from(answer)
    if number == BY_HANDLES:
        results, tensors = _rebuilt(answer[FORM_ID.size:])
        form.result_bytes = sum(align(t.nbytes, ALIGNMENT) for t in tensors)
        return results.assemble(tensors)
    if len(answer) > FORM_ID.size:
        worker.results[number] = Results.from_json(answer[FORM_ID.size:]), []
    results, _ = worker.results[number]
    form.result_bytes = results.nbytes
    return results.assemble([spec.view(stage.memory, position + at).clone()
                             for spec, at in results.tensors()])


def _call_by_handles(worker: Worker, form: Form, kernel: str, values: Sequence[Any], device: int,
                     seconds: float) -> Any:
    stage = _stage_for(worker, device, SMALLEST)       # for its events
    body = json.dumps({"kernel": kernel, "state": state(), "device": device, "arguments": [
        {"cuda": share(v)} if isinstance(v, Tensor) else {"value": v} for v in values]})
    stage.ready.record()
    answer = worker.exchange(CUDA_HANDLES, body.encode(), seconds)
    try:
        results, tensors = _rebuilt(answer)
    except UNREADABLE as e:
        raise Garbled(f"{type(e).__name__}: {e}") from None
    stage.done.wait()
    return results.assemble(tensors)


def by_handles(results: Results, tensors: Sequence[Tensor]) -> bytes:
    """Describes a result with handles of its own memory."""
    return json.dumps([results.to_json(), [share(t) for t in tensors]]).encode()


def _rebuilt(text: bytes) -> tuple[Results, list[Tensor]]:
    results, tensors = json.loads(text)
    return Results.from_json(results), [rebuild(t) for t in tensors]
