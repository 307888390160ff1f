"""Removes what was unregistered from the dispatchers, and all that they kept of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..world.registry.catalog import Catalog
from .native import NO_WORLD

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

_last_catalog: Catalog | None = None           # the catalog of the last call of `forget`


def forget(dispatchers: dict[str, Dispatcher], probes: dict[str, Any], catalog: Catalog) -> None:
    """Forget all that is not in the catalog of a new world. `probes` is keyed by health group."""
    global _last_catalog
    last = _last_catalog
    if catalog is last:
        return
    for name, dispatcher in dispatchers.copy().items():
        if (last is not None and last.ops.get(name) is dispatcher.op
            and catalog.ops.get(name) is not dispatcher.op):
            del dispatchers[name]
            if dispatcher.native is not None and dispatcher.program is not None:
                # its table holds the kernels it called
                dispatcher.native.install(dispatcher.program, NO_WORLD, 1)
    for dispatcher in list(dispatchers.values()):
        for key in [k for k in list(dispatcher._bindings)
                    if catalog.by_id.get(k[0].id) is not k[0]]:
            dispatcher._bindings.pop(key, None)
        dispatcher.ledger.keep_only(catalog.by_id)
    groups: Collection[str] = {k.health for k in catalog.kernels}
    for group in [g for g in list(probes) if g not in groups]:
        probes.pop(group, None)
    _last_catalog = catalog
