"""Begin, agree, check, end: what a program calls on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...machine import locks
from ...selection.policy import Policy, PolicyRule
from ...spec.call import Call
from ...spec.errors import ConfigError, RanksError
from ...spec.event import RanksDiffer
from ...spec.names import suggest
from ...world import config, events
from ...world import snapshot as worlds
from ...world.snapshot import World
from ...world.tables import Agreement
from .agreement import ANY_DEVICE, Session, Unit, layers_of, provisional, units_of, with_layers
from .exchange import Exchange
from .profile import Profile, not_shared

MODES = ("inference", "training")
SCOPES = ("group", "device")
SECONDS_TO_REPORT = 10.0                       # after a collective that failed
ORIGIN = "lz.distributed"                      # of the rules that it adds

_sessions: dict[str, Session] = {}             # by name, in the order in which they began
_lock = locks.Lock()


def init(mode: str = "inference", group: Any = None, *, timeout: float = 300.0,
         scope: str = "group", join: bool = False, name: str = "") -> Agreement:
    """Compare this rank with the others of `group`; from now on they agree on kernels.

    `group` is a process group, a one-dimensional DeviceMesh, None for the default group, or a
    StoreGroup. Every rank of it must come within `timeout` seconds. With scope="device" the ranks
    of one model of device agree among themselves, so that a mixed group is not held to what its
    oldest device can run. With join=True this rank takes over what the others have agreed on, and
    none of them waits for it.

    A process may agree with several groups, each under a `name`: with its tensor-parallel group,
    then among the replicas. A group chooses among what those before it have left, so that on a
    mesh all ranks end with one kernel. Every rank begins them in the same order.
    """
    for word, value, choices in (("mode", mode, MODES), ("scope", scope, SCOPES)):
        if value not in choices:
            raise ConfigError(f"lz.distributed.init: {word} must be one of {', '.join(choices)}, "
                              f"got {value!r}{suggest(str(value), choices)}")
    with _lock:
        if name in _sessions:
            raise ConfigError("lz.distributed.init was called before"
                              + (f" with name={name!r}" if name else "") + "; call "
                              "lz.distributed.shutdown() first to begin anew, or give the "
                              "agreement with another group a name= of its own")
        exchange = Exchange(group, timeout, name)
        world = worlds.current()
        own = Profile.of(_bare(world))
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
        texts = tuple(f"rank {exchange.members[rank]}: {', '.join(differences)}"
                      for rank, differences in differing.items() if differences)
        if texts and mode == "training":
            raise RanksError(
                f"lz.distributed: the ranks are not alike, compared with rank "
                f"{exchange.members[0]}\n  " + "\n  ".join(texts) + "\nGive every rank the same "
                "packages, files and settings; inference goes on with what all have",
                [exchange.members[rank] for rank, differences in differing.items() if differences])
        group_profiles = [p for p, name in zip(profiles, groups) if name == groups[exchange.rank]]
        session = Session(exchange, mode, groups, profiles, own, name,
                          1 + max((s.order for s in _sessions.values()), default=0), texts,
                          not_shared(group_profiles, world))
        if session.denied:
            _deny([*_sessions.values(), session])
        if texts:
            events.emit(RanksDiffer(rank=exchange.members[exchange.rank], differences=texts,
                                    denied=session.denied))
        session.restore(state["units"] if state else [])
        if state and texts:
            session.epoch = -1                 # what was agreed may not serve here: agree anew
        _sessions[name] = session
        return session.agreement


def _bare(world: World) -> World:
    """Return the world without what ranks agreed on and its rules: neither tells ranks apart."""
    _, base = layers_of(world)
    table = world.table and (None if base is None else replace(world.table, table=base))
    return replace(world, table=table, policy=_without_rules(world))


def _without_rules(world: World) -> Policy:
    old = next((layer for layer in world.policy.layers if layer.name == "programmatic"), None)
    if old is None or not any(rule.origin == ORIGIN for rule in old.rules):
        return world.policy
    rest = old.keep_rules(lambda rule: rule.origin != ORIGIN)
    return (world.policy.with_layer(rest) if rest.rules or rest.settings or rest.before
            else world.policy.without(rest.name))


def _deny(sessions: Iterable[Session]) -> None:
    """Deny what not all ranks of these groups have alike, and nothing else any more."""
    kernels = sorted({k for session in sessions for k in session.denied})
    rules = (PolicyRule.of("deny", kernels, origin=ORIGIN),) if kernels else ()

    def change(world: World) -> World:
        policy = _without_rules(world)
        if rules:
            old = next((layer for layer in policy.layers if layer.name == "programmatic"), None)
            policy = policy.with_layer(config.programmatic_layer(old, {}, rules))
        return world if policy is world.policy else world.replace(policy=policy)

    worlds.publish(change, "configure")


def sync(timeout: float | None = None, *, name: str | None = None) -> int:
    """Agree on the kinds of call that any rank has met since the last time; every rank must call
    it. Returns how many kinds have another kernel now, or their first agreed one. With several
    groups it is done in each, in the order in which they began; `name` chooses one.

    Call it where ranks meet anyway: after the first batches, between epochs, when traffic changed.
    """
    with _lock:
        return _agree(_current("sync", name), None, timeout)


def _agree(sessions: Sequence[Session], calls: Sequence[Unit] | None,
           timeout: float | None = None) -> int:
    total = 0
    for session in _sessions.values():         # before a world is published, which forgets them
        session.collect(worlds.current())
    for session in sessions:
        before = worlds.current().epoch
        with session.exchange.within(timeout):
            changed = session.agree(calls)
        total += changed
        for other in _sessions.values():
            # nothing but this agreement has happened; groups after it depend on what it changed
            if (other.epoch == before and session.epoch == before + 1
                    and (not changed or other.order < session.order)):
                other.epoch = session.epoch
    return total


def agree(calls: Iterable[Call] | Callable[..., Any], *example: Any, **named: Any) -> int:
    """Agree ahead on these calls (lz.recording, a workload), or on those of a model with example
    arguments; as `sync` besides.

    Every rank names the same operations in the same order. Their shapes may differ, as under
    tensor parallelism with uneven shards: one kernel then serves the i-th call of every rank.
    """
    with _lock:
        sessions = _current("agree", None)
        return _agree(sessions, units_of(calls, example, named))


def status(name: str | None = None) -> Agreement | None:
    """Return what is agreed, and how many kinds of call this rank has chosen by itself since; None
    before `init`. With several groups: of the one of this name, or of the first. No rank waits for
    another."""
    session = next(iter(_sessions.values()), None) if name is None else _sessions.get(name)
    if session is None:
        return None
    own = sum(1 for _ in provisional(worlds.current(), session.order))
    return session.agreement._replace(provisional=own)


def check(timeout: float | None = None, *, name: str | None = None) -> Agreement:
    """Make sure that all ranks still are as they were when they agreed; every rank must call it.

    A rank that does not come is named after the time-out. The ranks' hashes are compared by one
    all_reduce; where they differ, each rank says what it is. RanksError in training; in inference
    an event says it, and the next `sync` agrees anew. With several groups each is checked, or the
    one of this name; returned is what the first agreed on.
    """
    with _lock:
        first, *_ = [_check(session, timeout) for session in _current("check", name)]
        return first


def _check(session: Session, timeout: float | None) -> Agreement:
    exchange, profile = session.exchange, Profile.of(_bare(worlds.current()))
    changed = [] if profile == session.profile else session.profile.differences(profile, True)
    text = json.dumps([session.id, changed or ["another build"] if profile != session.profile
                       else []])
    with exchange.within(timeout):
        exchange.gather("check", "here")       # the barrier: after it, nobody is missing
        equal = _all_equal(exchange, text)
    if equal:
        exchange.end_round(session.state())
        return session.agreement
    states = exchange.gather("differ", text)
    exchange.end_round(session.state())
    usual = max(states, key=lambda state: (states.count(state), -states.index(state)))
    unlike = [rank for rank, state in enumerate(states) if state != usual]
    texts = tuple(f"rank {exchange.members[rank]}: "
                  + (", ".join(json.loads(states[rank])[1]) or "as it was, unlike the others")
                  for rank in unlike)
    if session.mode == "training":
        raise RanksError("lz.distributed: ranks have changed since they agreed\n  "
                         + "\n  ".join(texts) + "\nMake the same change on every rank, "
                         "then call shutdown() and init() again",
                         [exchange.members[rank] for rank in unlike])
    events.emit(RanksDiffer(rank=exchange.members[exchange.rank], differences=texts))
    return session.agreement._replace(differences=(*session.differences, *texts))


def _all_equal(exchange: Exchange, text: str) -> bool:
    """Returns whether all ranks have the same text: the largest hash is the smallest one."""
    if not exchange.collective:
        return len(set(exchange.gather("hash", text))) == 1
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    device = "cuda" if dist.get_backend(exchange.process_group) == "nccl" else "cpu"
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    try:
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, exchange.process_group, async_op=True)
        work.wait(timedelta(seconds=exchange.timeout))
    except RuntimeError as e:                  # a rank hangs or died after the barrier
        with exchange.within(min(exchange.timeout, SECONDS_TO_REPORT)):
            exchange.gather("not compared", "here")        # raises, naming who does not come
        raise RanksError(f"lz.distributed.check: the all_reduce failed: {e}; restart the group, "
                         "its collectives cannot be relied on any more") from e
    return bool(extremes[0] == -extremes[1])


def shutdown(name: str | None = None) -> None:
    """End the agreements in this process, or that of one name: tables and rules are taken away. No
    rank waits for another."""
    with _lock:
        left = {k: s for k, s in _sessions.items() if name is not None and s.name != name}
        orders = {session.order for session in left.values()}

        def change(world: World) -> World:
            layers, base = layers_of(world)
            remaining = [layer for layer in reversed(layers) if layer.order in orders]
            return world if len(remaining) == len(layers) else with_layers(world, remaining, base)

        # also where there is no session: an interrupt may have ended init before there was one
        worlds.publish(change, "agreed:none")
        _deny(left.values())
        for ended in _sessions.keys() - left.keys():   # last: after an interrupt it is asked again
            del _sessions[ended]


def _current(function: str, name: str | None) -> list[Session]:
    sessions = [s for s in _sessions.values() if name is None or s.name == name]
    if not sessions:
        known = f"; named are {', '.join(map(repr, _sessions))}" if _sessions else ""
        raise ConfigError(f"lz.distributed.{function} wants lz.distributed.init"
                          + (f"(name={name!r})" if name else "") + f" on every rank first{known}")
    return sessions
