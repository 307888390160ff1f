"""Recording of calls that launch our own GPU kernels; launch.h replays them.

The first call of a signature runs as always while a Recorder notes which tensors it allocates,
which views it takes, what it launches and what it returns. If that is all it does, the next call of
the signature needs no Python. A call that does anything else (a copy, a read on the host, the
caller's generator, memory of unknown origin) is not recorded and goes on through Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ...spec import replay
from ...spec.replay import Launch, Varying

INPUT, ALLOCATED, PERSISTENT = range(3)        # as in launch.h
aten = torch.ops.aten
ALLOCATES = frozenset((aten.empty.memory_format, aten.empty_like.default,
                       aten.empty_strided.default,
                       aten.new_empty.default, aten.new_empty_strided.default))
DRAWS_RANDOM = frozenset((aten.rand.default, aten.rand.generator))
Origin = tuple[int, int, int]                   # source, index, offset in bytes


def record_calls(run: Callable[..., Any], recordings: Any) -> Callable[..., Any]:
    """Wrap `run`: calls that can be replayed are added to `recordings`."""

    def call(*values: Any) -> Any:
        if not recordings.is_worth_recording(*values) or _get_current_dispatch_mode() is not None:
            return run(*values)
        recorder = LaunchRecorder(values)
        with replay.watching(recorder), recorder:
            out = run(*values)
        recording = recorder.finish(out)
        if recording is not None:
            recordings.add(*recording)
        return out

    return call


class LaunchRecorder(TorchDispatchMode):
    """Notes what one call does."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values
        self.problem = ""                      # why the call cannot be replayed; the first reason
        self.allocations: list[Tensor] = []
        self.is_random: list[bool] = []
        self.launches: list[Launch] = []
        self.static_tensors: dict[int, Tensor] = {}  # by storage
        self.stream: int | None = None
        tensors = [v for v in values if isinstance(v, Tensor)]
        if len({id(v) for v in tensors}) < len(tensors):
            self.refuse("one tensor is several arguments")     # those of another call may differ
        self.device = tensors[0].device if tensors else torch.device("cpu")
        if any(v.device != self.device for v in tensors):
            self.refuse("arguments on several devices")
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            self.refuse("the tensors are not on the current device")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports Dynamo, for seconds, to keep it out of dispatch."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATES or (func in DRAWS_RANDOM and (kwargs or {}).get("generator") is None):
            self.allocations.append(out)
            self.is_random.append(func in DRAWS_RANDOM)
            if out.device != self.device or (func in DRAWS_RANDOM and not out.is_contiguous()):
                self.refuse(f"{func} elsewhere than on the device of the arguments")
        elif not func.is_view:
            self.refuse(f"{func} besides the launches")
        return out

    # called by launchers

    def launched(self, launch: Launch) -> None:
        self.launches.append(launch)

    def keeps(self, tensor: Tensor, stream: int) -> None:
        self.static_tensors[_storage(tensor)] = tensor
        self.stream = stream

    def refuse(self, why: str) -> None:
        self.problem = self.problem or why

    # for launch.h

    def finish(self, out: Any) -> tuple[Any, ...] | None:
        """Return the arguments of Recordings.add; None, with a `problem`, if not replayable."""
        if not self.launches:
            self.refuse("nothing was launched")
        results = out if type(out) is tuple else (out,)
        outputs = tuple([self._output(t) for t in results])
        launches = tuple([self._launch(launch) for launch in self.launches])
        ranges = tuple([(self._argument(v), int(v.kind == "stride"), v.axis, v.low, v.high, v.step)
                        for launch in self.launches for v in launch.varying])
        if self.problem:
            return None
        hooks = tuple({id(h): h for launch in self.launches for h in launch.hooks}.values())
        keep_alive = (*self.static_tensors.values(), *(x.keep_alive for x in self.launches))
        index = self.device.index if self.device.type == "cuda" else -1
        return (self.values, ranges, tuple(self.allocations), tuple(map(int, self.is_random)),
                launches, outputs, type(out) is not tuple, index, self.stream, hooks, keep_alive)

    def _output(self, t: Any) -> int:
        for i, value in enumerate(self.values):
            if t is value and isinstance(t, Tensor):
                return -1 - i
        for i, allocation in enumerate(self.allocations):
            if isinstance(t, Tensor) and not t._is_view() and _same(t, allocation):
                return i
        self.refuse("it returns something else than an argument or what it allocated")
        return 0

    def _launch(self, launch: Launch) -> tuple[Any, ...]:
        pointers = tuple([(launch.fields[field][0], *self._origin(tensor))
                          for field, tensor in launch.pointers])
        numbers = tuple([(*launch.fields[v.field], self._argument(v), int(v.kind == "stride"),
                          v.axis, v.factor)
                         for v in launch.varying if v.field >= 0])
        return (launch.address, launch.function, launch.grid, launch.threads, launch.shared,
                launch.cluster, launch.params, launch.offsets, pointers, numbers,
                launch.launch_error)

    def _argument(self, v: Varying) -> int:
        for i, value in enumerate(self.values):
            if value is v.tensor:
                return i
        self.refuse("a size varies of what is no argument")
        return 0

    def _origin(self, t: Tensor) -> Origin:
        """Return where a tensor's memory comes from; for a view, the tensor it is a view of."""
        roots = [(INPUT, i, value) for i, value in enumerate(self.values)
                 if isinstance(value, Tensor)]
        roots += [(ALLOCATED, i, allocation) for i, allocation in enumerate(self.allocations)]
        for source, index, root in roots:
            if root is t:
                return source, index, 0
        storage = _storage(t)
        owners = [root for root in roots if _storage(root[2]) == storage]
        if len(owners) == 1:
            source, index, root = owners[0]
            return source, index, t.data_ptr() - root.data_ptr()
        if storage not in self.static_tensors:
            self.refuse("it passes memory of unknown origin" if not owners
                        else "a view of memory that arguments share")
        return PERSISTENT, 0, 0


def _same(t: Tensor, allocation: Tensor) -> bool:
    """Compare by memory and layout: torch.empty returns another object than was recorded."""
    return (_storage(t) == _storage(allocation) and t.dtype == allocation.dtype
            and t.shape == allocation.shape
            and t.stride() == allocation.stride()
            and t.storage_offset() == allocation.storage_offset())


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
