"""Begin, agree, check, end: what a program calls on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ...machine import locks
from ...selection.policy import PolicyRule
from ...spec.call import Call
from ...spec.errors import ConfigError, RanksError
from ...spec.event import RanksDiffer
from ...spec.names import suggest
from ...world import config, events
from ...world import snapshot as worlds
from ...world.snapshot import World
from ...world.tables import ActiveTable, Agreement
from .agreement import ANY_DEVICE, Session, base_table, provisional, units_of
from .exchange import Exchange
from .profile import Profile, not_shared

MODES = ("inference", "training")
SCOPES = ("group", "device")
ORIGIN = "lz.distributed"                      # of the rules that it adds

_session: Session | None = None
_lock = locks.Lock()


def init(mode: str = "inference", group: Any = None, *, timeout: float = 300.0,
         scope: str = "group", join: bool = False) -> Agreement:
    """Compare this rank with the others of `group`; from now on they agree on kernels.

    `group` is a process group, a one-dimensional DeviceMesh, None for the default group, or a
    StoreGroup. Every rank of it must come within `timeout` seconds. With scope="device" the ranks
    of one model of device agree among themselves, so that a mixed group is not held to what its
    oldest device can run. With join=True this rank takes over what the others have agreed on, and
    none of them waits for it.
    """
    global _session
    for name, value, choices in (("mode", mode, MODES), ("scope", scope, SCOPES)):
        if value not in choices:
            raise ConfigError(f"lz.distributed.init: {name} must be one of {', '.join(choices)}, "
                              f"got {value!r}{suggest(str(value), choices)}")
    with _lock:
        if _session is not None:
            raise ConfigError("lz.distributed.init was called before; call "
                              "lz.distributed.shutdown() first to begin anew")
        exchange = Exchange(group, timeout)
        world = worlds.current()
        own = Profile.of(world)
        if join:
            state = json.loads(exchange.join())
            profiles = [Profile.from_json(p) for p in state["profiles"]]
            profiles[exchange.rank] = own
        else:
            state = None
            profiles = [Profile.from_json(json.loads(text)) for text in
                        exchange.gather("init", json.dumps(own))]
            exchange.end_round(json.dumps({"profiles": profiles, "units": []}))
        groups = [p.device if scope == "device" else ANY_DEVICE for p in profiles]
        differing = {rank: profiles[0].differences(p, devices=scope == "group")
                     for rank, p in enumerate(profiles)}
        texts = tuple(f"rank {exchange.members[rank]}: {', '.join(found)}"
                      for rank, found in differing.items() if found)
        if texts and mode == "training":
            raise RanksError(
                f"lz.distributed: the ranks are not alike, compared with rank "
                f"{exchange.members[0]}\n  " + "\n  ".join(texts) + "\nGive every rank the same "
                "packages, files and settings; inference goes on with what all have",
                [exchange.members[rank] for rank, found in differing.items() if found])
        mine = [p for p, name in zip(profiles, groups) if name == groups[exchange.rank]]
        denied = not_shared(mine, world)
        if denied:
            _deny(denied)
        session = Session(exchange, mode, groups, profiles, Profile.of(worlds.current()), texts,
                          denied)
        if texts:
            events.emit(RanksDiffer(rank=exchange.members[exchange.rank], differences=texts,
                                    denied=denied))
        session.restore(state["units"] if state else [])
        _session = session
        return session.agreement


def _deny(kernels: tuple[str, ...]) -> None:
    rule = PolicyRule.of("deny", kernels, origin=ORIGIN)

    def change(world: World) -> World:
        old = next((layer for layer in world.policy.layers if layer.name == "programmatic"), None)
        return world.replace(policy=world.policy.with_layer(
            config.programmatic_layer(old, {}, (rule,))))

    worlds.publish(change, "configure")


def sync(timeout: float | None = None) -> int:
    """Agree on the kinds of call that any rank has met since the last time; every rank must call
    it. Returns how many kinds have another kernel now, or their first agreed one.

    Call it where ranks meet anyway: after the first batches, between epochs, when traffic changed.
    """
    with _lock:
        session = _current("sync")
        with session.exchange.within(timeout):
            return session.agree(None)


def agree(calls: Iterable[Call] | Callable[..., Any], *example: Any, **named: Any) -> int:
    """Agree ahead on these calls (lz.recording, a workload), or on those of a model with example
    arguments; as `sync` besides.

    Every rank names the same operations in the same order. Their shapes may differ, as under
    tensor parallelism with uneven shards: one kernel then serves the i-th call of every rank.
    """
    with _lock:
        session = _current("agree")
        return session.agree(units_of(calls, example, named))


def status() -> Agreement | None:
    """Return what is agreed, and how many kinds of call this rank has chosen by itself since; None
    before `init`. No rank waits for another."""
    session = _session
    if session is None:
        return None
    own = sum(1 for _ in provisional(worlds.current()))
    return session.agreement._replace(provisional=own)


def check(timeout: float | None = None) -> Agreement:
    """Make sure that all ranks still are as they were when they agreed; every rank must call it.

    A rank that does not come is named after the time-out. The ranks' hashes are compared by one
    all_reduce; where they differ, each rank says what it is. RanksError in training; in inference
    an event says it, and the next `sync` agrees anew.
    """
    with _lock:
        session = _current("check")
        exchange, profile = session.exchange, Profile.of(worlds.current())
        changed = [] if profile == session.profile else session.profile.differences(profile, True)
        text = json.dumps([session.id, changed or ["another build"] if profile != session.profile
                           else []])
        with exchange.within(timeout):
            exchange.gather("check", "here")   # the barrier: after it, nobody is missing
        if not _all_equal(exchange, text):
            said = exchange.gather("differ", text)
            exchange.end_round(session.state())
            usual = max(said, key=lambda one: (said.count(one), -said.index(one)))
            unlike = [rank for rank, one in enumerate(said) if one != usual]
            texts = tuple(f"rank {exchange.members[rank]}: "
                          + (", ".join(json.loads(said[rank])[1])
                             or "as it was, unlike the others") for rank in unlike)
            if session.mode == "training":
                raise RanksError("lz.distributed: ranks have changed since they agreed\n  "
                                 + "\n  ".join(texts) + "\nMake the same change on every rank, "
                                 "then call shutdown() and init() again",
                                 [exchange.members[rank] for rank in unlike])
            events.emit(RanksDiffer(rank=exchange.members[exchange.rank], differences=texts))
            return session.agreement._replace(differences=(*session.differences, *texts))
        exchange.end_round(session.state())
        return session.agreement


def _all_equal(exchange: Exchange, text: str) -> bool:
    """Whether all ranks have the same text: the largest hash is the smallest one."""
    if not exchange.collective:
        return len(set(exchange.gather("hash", text))) == 1
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    device = "cuda" if dist.get_backend(exchange.process_group) == "nccl" else "cpu"
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=exchange.process_group)
    return bool(both[0] == -both[1])


def shutdown() -> None:
    """End the agreement in this process: its table and its rules are taken away. No rank waits for
    another."""
    global _session
    with _lock:
        if _session is None:
            return
        _session = None

        def change(world: World) -> World:
            changes: dict[str, Any] = {}
            old = next((layer for layer in world.policy.layers if layer.name == "programmatic"),
                       None)
            if old is not None and any(rule.origin == ORIGIN for rule in old.rules):
                changes["policy"] = world.policy.with_layer(
                    old.keep_rules(lambda rule: rule.origin != ORIGIN))
            base = base_table(world)
            if world.table is not None and base is not world.table.table:
                changes["table"] = None if base is None else ActiveTable(base, world.table.catalog)
            return world.replace(**changes) if changes else world

        worlds.publish(change, "agreed:none")


def _current(name: str) -> Session:
    if _session is None:
        raise ConfigError(f"lz.distributed.{name} wants lz.distributed.init on every rank first")
    return _session
