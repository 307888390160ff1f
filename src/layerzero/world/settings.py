"""Changing the policy from a program: configure, lock, prefer, disabled."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..selection.policy import Layer, PolicyRule
from ..spec.errors import ConfigError
from ..spec.names import find_kernels
from ..spec.reason import shown
from . import config, context
from . import snapshot as worlds
from .context import Override
from .incidents import extend_keys
from .snapshot import World

_MAX_SECONDS = 1e12                            # seconds, as in a policy file
PREFERENCE = 1e6       # boost of a preferred kernel: above any measurement


def _deadline(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if (isinstance(seconds, bool) or not isinstance(seconds, (int, float))
        or not 0 < seconds <= _MAX_SECONDS):
        raise ConfigError(
            f"seconds= must be > 0 and a number of at most {_MAX_SECONDS:g}, got {shown(seconds)}")
    return time.monotonic() + seconds


def _checked(*rules: PolicyRule) -> tuple[PolicyRule, ...]:
    ops = {op.name: op.fact_names for op in worlds.current().catalog.ops.values()}
    for rule in rules:
        rule.check(ops)
    return rules


def configure(*, rules: tuple[PolicyRule, ...] = (), seconds: float | None = None,
              **settings: Any) -> None:
    """Change settings for the whole process; see docs/policy.md.

    With `seconds`, only for that long.
    """
    def change(world: World) -> World:
        old = next((layer for layer in world.policy.layers if layer.name == "programmatic"), None)
        layer = config.programmatic_layer(old, settings, _checked(*rules),
                                          expires_at=_deadline(seconds))
        return world.replace(policy=world.policy.with_layer(layer))

    worlds.publish(change, "configure")


def load_config(path: str | os.PathLike[str] | None) -> None:
    """Apply a policy file and keep watching it; None stops that. A broken file changes nothing."""
    def change(world: World) -> World:
        if path is None:
            return world.replace(policy=world.policy.without("file"), policy_file=None,
                                 policy_stamp=None)
        stamp = config.FileStamp.of(path)
        ops = {op.name: op.fact_names for op in world.catalog.ops.values()}
        layer = config.load_policy_file(path, ops)
        return world.replace(policy=world.policy.with_layer(layer), policy_file=Path(path),
                             policy_stamp=stamp)

    worlds.publish(change, "load_config")


def reload() -> None:
    """Check the policy file now."""
    worlds.apply_deadlines(time.monotonic())


def lock(op: str, kernel: str, *, when: Mapping[str, Any] | None = None,
         seconds: float | None = None) -> None:
    """Serve `op` with `kernel` only; a call it cannot serve raises."""
    rule = PolicyRule.of("lock", kernel, op, when, origin="lz.lock()",
                         expires_at=_deadline(seconds))
    _checked(rule)
    find_kernels(kernel, worlds.current().catalog.op_of_kernel, op, "lz.lock")
    configure(rules=(rule,))


def unlock(op: str | None = None) -> None:
    """Remove the locks made by lz.lock, all of them or those of one op."""
    def change(world: World) -> World:
        old = next((layer for layer in world.policy.layers if layer.name == "programmatic"), None)
        if old is None:
            return world
        layer = old.keep_rules(lambda r: r.action != "lock" or (op is not None and op not in r.ops))
        return world.replace(policy=world.policy.with_layer(layer))

    worlds.publish(change, "unlock")


def get_locks() -> dict[str, dict[str, Any]]:
    """op pattern -> the lock in force for it, from every source."""
    locks: dict[str, dict[str, Any]] = {}
    for layer in worlds.current().policy.layers:
        for rule in layer.rules:
            if rule.action == "lock":
                for op in rule.ops:
                    locks.setdefault(op, {"kernel": ", ".join(rule.kernels), "origin": rule.origin,
                                          "layer": layer.name,
                                          "when": [str(t) for t in rule.when]})
    return locks


def prefer(*kernels: str, op: str = "*", when: Mapping[str, Any] | None = None,
           seconds: float | None = None, **settings: Any) -> AbstractContextManager[Override]:
    """In this block, for this task or thread: these kernels first where they can serve.

    Also takes settings.
    """
    rules = _checked(*(PolicyRule.of("boost", k, op, when, factor=PREFERENCE / 10 ** min(i, 3),
                                     origin="lz.prefer()")
                       for i, k in enumerate(kernels)))
    for kernel in kernels:
        find_kernels(kernel, worlds.current().catalog.op_of_kernel, op, "lz.prefer")
    deadline = _deadline(seconds)
    if when:
        extend_keys(Override(Layer("context", {}, rules), None))
    if deadline is not None:
        # no choice changes yet
        worlds.publish(lambda w: w.replace((), deadlines=w.deadlines | {deadline}), "prefer")
    return context.overriding(settings, rules, deadline)


def disabled() -> AbstractContextManager[Override]:
    """In this block only torch's own default runs."""
    return context.overriding({"disabled": True})
