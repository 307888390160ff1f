"""Overrides for one task or thread: `with lz.prefer(...)`, `with lz.disabled()`, `backend=` in a
call.

They live in a ContextVar, never in a process global. Equal overrides are interned to one object, so
entering the same one again finds the same cached selections.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..machine import locks
from ..selection.policy import Layer, PolicyRule
from ..spec.errors import ConfigError, PolicyValidationError
from ..spec.reason import FOREIGN_ERRORS, shown
from .config import programmatic_layer

_MAX_CALLS = 2048                              # overrides by arguments of calls
_MAX_INTERNED = 2 * _MAX_CALLS                 # overrides; the least recently used goes


class Override:
    """A pair of layers above the world's policy, compared by identity in the cache key."""

    __slots__ = ("call", "context")

    def __init__(self, context: Layer | None, call: Layer | None) -> None:
        self.context = context
        self.call = call

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in (self.context, self.call) if layer is not None)


current: ContextVar[Override | None] = ContextVar("layerzero_override", default=None)
_interned: OrderedDict[Hashable, Override] = OrderedDict()
_lock = locks.Lock()


def intern(context: Layer | None, call: Layer | None) -> Override | None:
    if context is None and call is None:
        return None
    key = (context, call)
    with _lock:
        override = _interned.get(key)
        if override is None:
            override = _interned[key] = Override(context, call)
            if len(_interned) > _MAX_INTERNED:
                _interned.popitem(last=False)
        else:
            _interned.move_to_end(key)
    return override


@contextmanager
def overriding(settings: Mapping[str, Any] | None = None, rules: tuple[PolicyRule, ...] = (),
               expires_at: float | None = None) -> Iterator[Override]:
    """Adds settings and rules for the length of the block, on top of enclosing blocks."""
    outer = current.get()
    layer = programmatic_layer(outer.context if outer else None, settings, rules, name="context",
                               expires_at=expires_at)
    inner = intern(layer, None)
    assert inner is not None
    token = current.set(inner)
    try:
        yield inner
    finally:
        current.reset(token)


def override_for_call(backend: str | None, policy: Any) -> Override | None:
    """Returns the override of one call: the context's, and `backend=` and `policy=` above it."""
    outer = current.get()
    if backend is None and policy is None:
        return outer
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(f"backend= must be a kernel id or backend name, got {shown(backend)}")
    # a subclass may define its own hash
    backend = None if backend is None else str.__str__(backend)
    policy_key = policy
    if type(policy) is dict:                   # by value: a dict may change, or equal another
        policy_key = tuple([(name, type(value), value) for name, value in policy.items()])
    try:
        override = _call_overrides.get((backend, policy_key, outer))
    except FOREIGN_ERRORS:                            # something in it has no hash
        return _make_override(outer, backend, policy)
    if override is None:
        override = _make_override(outer, backend, policy)
        if len(_call_overrides) >= _MAX_CALLS:  # a later call finds its override among the interned
            _call_overrides.clear()
        _call_overrides[backend, policy_key, outer] = override
    return override


_call_overrides: dict[Any, Override] = {}      # (backend, policy, context) -> override


def _make_override(outer: Override | None, backend: str | None, policy: Any) -> Override:
    context = outer.context if outer else None
    settings: Mapping[str, Any] = {}
    rules: tuple[PolicyRule, ...] = ()
    if isinstance(policy, Layer):
        settings, rules = policy.settings, policy.rules
    elif isinstance(policy, Mapping):
        settings = policy
    elif policy is not None:
        raise PolicyValidationError(
            f"policy= must be a mapping of settings or a Layer, got {type(policy).__name__}")
    if backend is not None:
        if not backend:
            raise ConfigError("backend= must be a kernel id or backend name, got ''")
        rules = (PolicyRule("lock", (backend,), origin="backend="), *rules)
    override = intern(context, Layer("call", settings, rules))
    assert override is not None
    return override
