"""Tensors of a GPU between a process and its worker: IPC handles of their memory, and events that
order the streams. Nothing is copied, and the host waits for nothing but the worker's answer.

Handles are those of torch.multiprocessing: the memory of a result belongs to the worker until the
last tensor over it is gone here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ...spec.launch import LaunchRefused
from ...spec.reason import Code, Reason
from .wire import CUDA, state

if TYPE_CHECKING:
    from .process import Worker

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


def rebuild(shared: dict[str, Any]) -> Tensor:
    """Maps the memory of a tensor of another process."""
    fields: dict[str, Any] = {k: base64.b64decode(v["bytes"]) if isinstance(v, dict) else v
                              for k, v in shared.items()}
    fields.update(dtype=getattr(torch, fields["dtype"]), storage_class=torch.UntypedStorage)
    made: Tensor = rebuild_cuda_tensor(Tensor, *(fields[name] for name in _FIELDS))
    return made


class Events:
    """Two events that both processes know: the inputs are ready, the result is."""

    def __init__(self, device: int, handles: Sequence[str] = ()) -> None:
        self.device = device
        if handles:
            self.ready, self.done = (torch.cuda.Event.from_ipc_handle(
                torch.device("cuda", device), base64.b64decode(handle)) for handle in handles)
        else:
            self.ready, self.done = (torch.cuda.Event(interprocess=True) for _ in range(2))

    def handles(self) -> list[str]:
        return [base64.b64encode(e.ipc_handle()).decode() for e in (self.ready, self.done)]


def call(worker: Worker, kernel: str, values: Sequence[Any], seconds: float) -> Any:
    """Calls a kernel with tensors of a GPU; streams wait for each other, the host for the frame."""
    device = next(v.device.index for v in values if isinstance(v, Tensor))
    if any(isinstance(v, Tensor) and (v.device.type, v.device.index) != ("cuda", device)
           for v in values):
        raise LaunchRefused.of(kernel, (Reason(Code.MIXED_DEVICES, f"cuda:{device}", "another",
                                               "a tensor"),))
    with torch.cuda.device(device):
        events = worker.events.get(device)
        body: dict[str, Any] = {"kernel": kernel, "state": state(), "device": device}
        if events is None:
            events = worker.events[device] = Events(device)
            body["events"] = events.handles()
        body["arguments"] = [{"cuda": share(v)} if isinstance(v, Tensor) else {"value": v}
                             for v in values]
        events.ready.record()
        answer = worker.exchange(CUDA, json.dumps(body).encode(), seconds)
        result = json.loads(answer)
        made = [rebuild(item["cuda"]) if "cuda" in item else item["value"]
                for item in result["items"]]
        events.done.wait()
    if result["kind"] == "tensor":
        return made[0]
    return tuple(made) if result["kind"] == "tuple" else made
