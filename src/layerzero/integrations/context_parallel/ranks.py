"""The ranks of a context-parallel call: those of a torch.distributed group, one per process, or
simulated ones in this process.

What a rank does is a generator. It yields each exchange with the others, gets a `Pending` for it at
once, and waits for the result when it needs it: what it computes in between overlaps with the
communication. The same generators serve a process group, where one of them runs here, and
`SimulatedRanks`, where all of them run in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor

from ...spec.errors import ConfigError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Exchange:
    """One exchange between all ranks, each with a contiguous tensor of the same shape.

    all_gather: the ranks' tensors one after another. reduce_scatter: the sum of the ranks' tensors,
    of which rank r keeps the r-th part. all_to_all: rank r gets the r-th part of every tensor.
    shift: the tensor of the rank before this one.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_to_all", "shift"]
    tensor: Tensor


class Pending(Protocol):
    def wait(self) -> Tensor:
        """Returns the result. On a GPU the stream waits for it, the host does not."""


Program = Generator[Exchange, Pending, Result]


@dataclass(frozen=True)
class Arrived:
    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@dataclass(frozen=True)
class UnderWay:
    result: Tensor
    works: tuple[Any, ...]
    sent: Tensor                               # stays alive until it has been sent

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result


@dataclass(frozen=True)
class Staged:
    """A tensor on its way through the host's memory; waiting for it blocks the host."""

    pending: UnderWay
    device: torch.device

    def wait(self) -> Tensor:
        return self.pending.wait().to(self.device)


class ProcessRanks:
    """This process among those of a torch.distributed group, with whatever backend it has."""

    def __init__(self, group: Any = None) -> None:
        _check_available()
        self._group = group.get_group() if hasattr(group, "get_group") else group
        self.size: int = dist.get_world_size(self._group)
        self.local = (dist.get_rank(self._group),)
        if self.local[0] < 0:
            raise ConfigError("context parallelism wants a process group that this process belongs "
                              "to; call it in the group's own processes only")

    def run(self, programs: Sequence[Program[Result]]) -> list[Result]:
        """Runs the program of this rank to its end."""
        (program,) = programs
        try:
            exchange = next(program)
            while True:
                exchange = program.send(self._start(exchange))
        except StopIteration as end:
            return [end.value]

    def _start(self, exchange: Exchange) -> Pending:
        sent = exchange.tensor
        if self.size == 1:
            return Arrived(sent)
        # gloo takes tensors of a GPU to collectives only; in a send it would end the process
        if (exchange.kind in ("shift", "all_to_all") and sent.device.type != "cpu"
            and dist.get_backend(self._group) == "gloo"):
            return Staged(self._send(Exchange(exchange.kind, sent.cpu())), sent.device)
        return self._send(exchange)

    def _send(self, exchange: Exchange) -> UnderWay:
        sent = exchange.tensor
        if exchange.kind == "shift":
            received, rank = torch.empty_like(sent), self.local[0]
            ends = ((dist.isend, sent, rank + 1), (dist.irecv, received, rank - 1))
            works = dist.batch_isend_irecv([
                dist.P2POp(call, tensor, _global_rank(self._group, peer % self.size), self._group)
                for call, tensor, peer in ends])
            return UnderWay(received, tuple(works), sent)
        rows = {"all_gather": sent.shape[0] * self.size, "all_to_all": sent.shape[0],
                "reduce_scatter": sent.shape[0] // self.size}[exchange.kind]
        result = sent.new_empty((rows, *sent.shape[1:]))
        work = _collective(exchange.kind)(result, sent, group=self._group, async_op=True)
        return UnderWay(result, (work,), sent)


class SimulatedRanks:
    """So many ranks in this process: functions that take it as their group take and return a list
    with one tensor per rank. For tests, and to look at the work of one rank on one device."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"SimulatedRanks wants a number of ranks from 1 on, got {size}")
        self.size = size
        self.local = tuple(range(size))

    def run(self, programs: Sequence[Program[Result]]) -> list[Result]:
        """Runs the programs of all ranks, from one exchange to the next."""
        results: list[Result] = []
        arrived: Sequence[Any] = [None] * self.size
        while True:
            exchanges: list[Exchange] = []
            for program, pending in zip(programs, arrived):
                try:
                    exchanges.append(program.send(pending))
                except StopIteration as end:
                    results.append(end.value)
            if len(results) == self.size:
                return results
            kinds = sorted({e.kind for e in exchanges})
            if len(exchanges) != self.size or len(kinds) != 1:
                raise RuntimeError("ranks wait for each other: "
                                   f"{len(results)} are done, others want {', '.join(kinds)}")
            arrived = [Arrived(t) for t in _exchanged(kinds[0], [e.tensor for e in exchanges])]


Ranks = Union[ProcessRanks, SimulatedRanks]


def ranks_of(group: Any) -> Ranks:
    """Returns the ranks of a process group, a one-dimensional DeviceMesh, or None for the default
    group; SimulatedRanks are themselves."""
    return group if isinstance(group, (ProcessRanks, SimulatedRanks)) else ProcessRanks(group)


def _exchanged(kind: str, tensors: list[Tensor]) -> list[Tensor]:
    size = len(tensors)
    if kind == "all_gather":
        return [torch.cat(tensors) if size > 1 else tensors[0]] * size
    if kind == "reduce_scatter":
        return [*torch.stack(tensors).sum(0).chunk(size)]
    if kind == "shift":
        return [tensors[rank - 1].clone() for rank in range(size)]
    return [torch.cat(parts) for parts in zip(*(t.chunk(size) for t in tensors))]


def _check_available() -> None:
    if not dist.is_available():
        raise ConfigError(
            "context parallelism wants torch.distributed, which this build of torch is without; "
            "install one that has it, or pass SimulatedRanks(n) to run all ranks in this process")
    if not dist.is_initialized():
        raise ConfigError(
            "context parallelism wants a process group, and none was initialized; call "
            "torch.distributed.init_process_group first (torchrun starts the processes), or pass "
            "SimulatedRanks(n) to run all ranks in this process")


def _global_rank(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _collective(kind: str) -> Callable[..., Any]:
    """Returns torch's function over single tensors, by its newer name where it has one."""
    newer, older = {"all_gather": ("all_gather_single", "all_gather_into_tensor"),
                    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
                    "all_to_all": ("all_to_all_single", "all_to_all_single")}[kind]
    return getattr(dist, newer, None) or getattr(dist, older)  # type: ignore[no-any-return]
