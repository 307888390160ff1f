"""Recording of calls that launch our own GPU kernels; launch.h replays them.

The first call of a signature runs as it always does, watched: which tensors it allocates, which views it takes, what
it launches, what it returns. If that is all it does, the next call of the signature needs no Python. Anything else (a
copy, a read on the host, a generator of the caller, memory of unknown origin) and the call is not recorded: it goes on
through Python, as correct as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ...spec import replay
from ...spec.replay import Launch, Varying

INPUT, ALLOCATED, KEPT = range(3)              # as in launch.h
aten = torch.ops.aten
ALLOCATES = frozenset((aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
                       aten.new_empty.default, aten.new_empty_strided.default))
DRAWS = frozenset((aten.rand.default, aten.rand.generator))
Place = tuple[int, int, int]                   # source, index, offset in bytes


def recorded(run: Callable[..., Any], recordings: Any) -> Callable[..., Any]:
    """`run`, which takes the op's parameters in order; calls that can be replayed are added to `recordings`."""

    def watched(*values: Any) -> Any:
        if not recordings.wanted(*values) or _get_current_dispatch_mode() is not None:
            return run(*values)
        recorder = Recorder(values)
        with replay.watching(recorder), recorder:
            out = run(*values)
        told = recorder.told(out)
        if told is not None:
            recordings.add(*told)
        return out

    return watched


class Recorder(TorchDispatchMode):
    """What one call does."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values
        self.problem = ""                      # why the call cannot be replayed; the first reason
        self.allocations: list[Tensor] = []
        self.drawn: list[bool] = []
        self.launches: list[Launch] = []
        self.kept: dict[int, Tensor] = {}      # by storage
        self.stream: int | None = None
        given = [v for v in values if isinstance(v, Tensor)]
        if len({id(v) for v in given}) < len(given):
            self.refuse("one tensor is several arguments")     # another call's may differ there
        self.device = given[0].device if given else torch.device("cpu")
        if any(v.device != self.device for v in given):
            self.refuse("arguments on several devices")
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            self.refuse("the tensors are not on the current device")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import Dynamo, for seconds, to keep it out of the method below, which runs eagerly anyway."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATES or (func in DRAWS and (kwargs or {}).get("generator") is None):
            self.allocations.append(out)
            self.drawn.append(func in DRAWS)
            if out.device != self.device or (func in DRAWS and not out.is_contiguous()):
                self.refuse(f"{func} elsewhere than on the device of the arguments")
        elif not func.is_view:
            self.refuse(f"{func} besides the launches")
        return out

    # as a launcher sees it

    def launched(self, launch: Launch) -> None:
        self.launches.append(launch)

    def keeps(self, tensor: Tensor, stream: int) -> None:
        self.kept[_storage(tensor)] = tensor
        self.stream = stream

    def refuse(self, why: str) -> None:
        self.problem = self.problem or why

    # what launch.h is told

    def told(self, out: Any) -> tuple[Any, ...] | None:
        """The arguments of Recordings.add; None if the call cannot be replayed, and `problem` says why."""
        if not self.launches:
            self.refuse("nothing was launched")
        results = out if type(out) is tuple else (out,)
        outputs = tuple([self._output(t) for t in results])
        launches = tuple([self._launch(launch) for launch in self.launches])
        free = tuple([(self._argument(v), int(v.what == "stride"), v.axis, v.low, v.high, v.step)
                      for launch in self.launches for v in launch.varying])
        if self.problem:
            return None
        hooks = tuple({id(h): h for launch in self.launches for h in launch.hooks}.values())
        kept = (*self.kept.values(), *(launch.kept for launch in self.launches))
        index = self.device.index if self.device.type == "cuda" else -1
        return (self.values, free, tuple(self.allocations), tuple(map(int, self.drawn)), launches, outputs,
                type(out) is not tuple, index, self.stream, hooks, kept)

    def _output(self, t: Any) -> int:
        for i, given in enumerate(self.values):
            if t is given and isinstance(t, Tensor):
                return -1 - i
        for i, made in enumerate(self.allocations):
            if isinstance(t, Tensor) and not t._is_view() and _same(t, made):
                return i
        self.refuse("it returns something else than an argument or what it allocated")
        return 0

    def _launch(self, launch: Launch) -> tuple[Any, ...]:
        pointers = tuple([(launch.fields[field][0], *self._place(tensor)) for field, tensor in launch.pointers])
        numbers = tuple([(*launch.fields[v.field], self._argument(v), int(v.what == "stride"), v.axis, v.factor)
                         for v in launch.varying if v.field >= 0])
        return (launch.address, launch.function, launch.grid, launch.threads, launch.shared, launch.cluster,
                launch.params, launch.places, pointers, numbers, launch.refused)

    def _argument(self, v: Varying) -> int:
        for i, given in enumerate(self.values):
            if given is v.tensor:
                return i
        self.refuse("a size varies of what is no argument")
        return 0

    def _place(self, t: Tensor) -> Place:
        """Where the memory of a tensor comes from. Of views, by whose storage it is, if that is one tensor's alone."""
        roots = [(INPUT, i, given) for i, given in enumerate(self.values) if isinstance(given, Tensor)]
        roots += [(ALLOCATED, i, made) for i, made in enumerate(self.allocations)]
        for source, index, root in roots:
            if root is t:
                return source, index, 0
        storage = _storage(t)
        owners = [root for root in roots if _storage(root[2]) == storage]
        if len(owners) == 1:
            source, index, root = owners[0]
            return source, index, t.data_ptr() - root.data_ptr()
        if storage not in self.kept:
            self.refuse("it passes memory of unknown origin" if not owners else "a view of memory that arguments share")
        return KEPT, 0, 0


def _same(t: Tensor, made: Tensor) -> bool:
    """torch.empty gives another object over the memory that was seen to be allocated."""
    return (_storage(t) == _storage(made) and t.dtype == made.dtype and t.shape == made.shape
            and t.stride() == made.stride() and t.storage_offset() == made.storage_offset())


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
