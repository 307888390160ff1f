"""What the ranks of a group tell each other, through the key-value store that the group has anyway.

No collective of the backend is used: a store serves gloo, NCCL and every other backend alike, may
be used beside a model that communicates, and says which rank did not answer.

A *round* is one agreement, of several steps; in each step every rank posts one text and reads those
of the others. What was posted stays as it is until the round is over, so a round that timed out can
be tried again: each rank goes on from where it was.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...spec.errors import ConfigError, RanksError

T = TypeVar("T")
LONGEST_PAUSE = 0.05                           # seconds between looks at the store


_rounds: dict[str, int] = {}                   # name of a group -> rounds that ended


class StoreGroup(NamedTuple):
    """Ranks without a process group: a store (torch.distributed.TCPStore, ...) that all reach."""

    store: Any
    rank: int
    size: int


class Exchange:
    """This rank among the others. `group`: a process group, a one-dimensional DeviceMesh, None for
    the default group, or a StoreGroup; `purpose` tells two exchanges of the same ranks apart."""

    def __init__(self, group: Any, timeout: float, purpose: str = "") -> None:
        self.timeout = _checked(timeout)
        self.process_group: Any = None
        self.collective = not isinstance(group, StoreGroup)
        if isinstance(group, StoreGroup):
            self.rank, self.size = group.rank, group.size
            members: Iterable[int] = range(group.size)
            store = group.store
            if not 0 <= self.rank < self.size:
                raise ConfigError(f"StoreGroup wants 0 <= rank < size, got rank {self.rank} of "
                                  f"{self.size}")
        else:
            self.process_group = process_group(group)
            self.rank = dist.get_rank(self.process_group)
            self.size = dist.get_world_size(self.process_group)
            if self.rank < 0:
                raise ConfigError("lz.distributed.init wants a process group that this process "
                                  "belongs to; call it in the group's own processes only")
            members = (range(self.size) if self.process_group is None
                       else dist.get_process_group_ranks(self.process_group))
            store = dist.distributed_c10d._get_default_store()
        self.members = tuple(members)          # their ranks in the default group, for messages
        words = ",".join(map(str, self.members)) + (f" {purpose}" if purpose else "")
        name = hashlib.sha256(words.encode()).hexdigest()[:16]
        self._store = dist.distributed_c10d.PrefixStore(f"layerzero/ranks/{name}", store)
        self.name = name
        self.round = _rounds.get(name, 0)
        self._posted: dict[str, list[str]] = {}    # step of this round -> what all said
        self._ended: tuple[str, ...] = ()      # steps of the round before

    @contextmanager
    def within(self, timeout: float | None) -> Iterator[None]:
        """Wait for the others so long in this block; None: as long as ever."""
        usual, self.timeout = self.timeout, self.timeout if timeout is None else _checked(timeout)
        try:
            yield
        finally:
            self.timeout = usual

    def gather(self, step: str, text: str) -> list[str]:
        """Return what every rank says in this step of this round, in the order of ranks."""
        if step not in self._posted:
            key = f"{self.round}/{step}"
            keys = [f"{key}/{rank}" for rank in range(self.size)]
            # a second try of the round says what the first one said
            own = self._ask(lambda: self._store.compare_set(keys[self.rank], "", text).decode())
            self._wait(step, keys)
            others = self._ask(lambda: [self._store.get(key).decode() for key in keys])
            self._posted[step] = [*others[:self.rank], own, *others[self.rank + 1:]]
        return self._posted[step]

    def _ask(self, operation: Callable[[], T]) -> T:
        """Ask the store, in a thread of its own: where the process that holds it hangs, its client
        waits for ever, whatever time-out it was given."""
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(operation())
            except RuntimeError as e:          # DistStoreError is one
                answer.set_exception(e)

        threading.Thread(target=ask, name="layerzero-store", daemon=True).start()
        try:
            return answer.result(self.timeout)
        except (RuntimeError, FutureTimeout) as e:
            how = str(e) or f"within {self.timeout:g} seconds"
            raise RanksError(f"lz.distributed: the store of the group does not answer: {how}; the "
                             "rank that holds it (rank 0) is gone or hangs: restart the group",
                             (0,)) from e

    def _wait(self, step: str, keys: Sequence[str]) -> None:
        end, pause = time.monotonic() + self.timeout, 0.001
        while not self._ask(lambda: self._store.check(list(keys))):
            if time.monotonic() > end:
                arrived = self._ask(lambda: [self._store.check([key]) for key in keys])
                ranks = tuple(m for m, came in zip(self.members, arrived) if not came)
                raise RanksError(
                    f"lz.distributed: rank {', '.join(map(str, ranks))} of "
                    f"{', '.join(map(str, self.members))} did not come to '{step}' within "
                    f"{self.timeout:g} seconds; rank {self.members[self.rank]} waited. Is it gone, "
                    "or does it call lz.distributed less often? Nothing was changed, and the call "
                    "can be made again", ranks)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def end_round(self, state: str) -> None:
        """End a round that all ranks have come through; `state` is for a rank that joins later."""
        before, self._ended, self._posted = self._ended, tuple(self._posted), {}
        self.round = _rounds[self.name] = self.round + 1

        def tidy() -> None:
            if self.rank == 0:
                self._store.set("state", f"{self.round}\n{state}")
            # Every rank has ended the round before this one: nobody reads it any more.
            for step in before:
                self._store.delete_key(f"{self.round - 2}/{step}/{self.rank}")

        self._ask(tidy)

    def join(self) -> str:
        """Return the state of the last round that ended, and go on with the next one."""
        self._wait("join", ["state"])
        number, _, state = self._ask(lambda: self._store.get("state").decode()).partition("\n")
        self.round = _rounds[self.name] = int(number)
        return state


def _checked(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"lz.distributed: timeout must be a number of seconds > 0, got "
                          f"{timeout!r}")
    return float(timeout)


def process_group(group: Any) -> Any:
    """Return the process group of a DeviceMesh or of a group itself; None: the default group."""
    if not dist.is_available():
        raise ConfigError("lz.distributed wants torch.distributed, which this build of torch is "
                          "without; install one that has it")
    if not dist.is_initialized():
        raise ConfigError(
            "lz.distributed wants a process group, and none was initialized; call "
            "torch.distributed.init_process_group first (torchrun starts the processes), or pass "
            "group=lz.distributed.StoreGroup(store, rank, size)")
    return group.get_group() if hasattr(group, "get_group") else group
