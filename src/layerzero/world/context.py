"""Overrides for one task or thread: `with lz.prefer(...)`, `with lz.disabled()`, `backend=` in a call.

They live in a ContextVar, never in a process global. An override is interned by what it says, so
entering the same one again finds the same remembered choices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..machine import locks
from ..select.policy import Layer, PolicyRule
from ..spec.errors import ConfigError, PolicyValidationError
from ..spec.reason import FOREIGN_ERRORS, shown
from .config import programmatic_layer

_MAX_CALLS = 2048                              # what calls said
_MAX_INTERNED = 2 * _MAX_CALLS                 # overrides; the one that was not asked for the longest goes


class Override:
    """A pair of layers above the world's policy. Compared by identity: it is part of the cache key."""

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
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = Override(context, call)
            if len(_interned) > _MAX_INTERNED:
                _interned.popitem(last=False)
        else:
            _interned.move_to_end(key)
    return found


@contextmanager
def overriding(settings: Mapping[str, Any] | None = None, rules: tuple[PolicyRule, ...] = (),
               expires_at: float | None = None) -> Iterator[Override]:
    """Say something for the length of the block, on top of the blocks around it."""
    outer = current.get()
    layer = programmatic_layer(outer.context if outer else None, settings, rules, name="context", expires_at=expires_at)
    inner = intern(layer, None)
    assert inner is not None
    token = current.set(inner)
    try:
        yield inner
    finally:
        current.reset(token)


def for_call(backend: str | None, policy: Any) -> Override | None:
    """The override of one call: the context's, and `backend=` and `policy=` above it."""
    outer = current.get()
    if backend is None and policy is None:
        return outer
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(f"backend= must be a kernel id or backend name, got {shown(backend)}")
    backend = None if backend is None else str.__str__(backend)        # a subclass may have a hash of its own
    said = policy
    if type(policy) is dict:                   # by value: it may have changed, or be another that says the same
        said = tuple([(name, type(value), value) for name, value in policy.items()])
    try:
        found = _of_calls.get((backend, said, outer))
    except FOREIGN_ERRORS:                            # something in it has no hash
        return _for_call(outer, backend, policy)
    if found is None:
        found = _for_call(outer, backend, policy)
        if len(_of_calls) >= _MAX_CALLS:       # what comes again finds its override among the interned
            _of_calls.clear()
        _of_calls[backend, said, outer] = found
    return found


_of_calls: dict[Any, Override] = {}            # what calls said, and in which context: what that came to


def _for_call(outer: Override | None, backend: str | None, policy: Any) -> Override:
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
        pattern = backend if "." in backend or "*" in backend else f"{backend}.*"
        rules = (PolicyRule("lock", (pattern,), origin="backend="), *rules)
    found = intern(context, Layer("call", settings, rules))
    assert found is not None
    return found
