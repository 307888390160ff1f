"""What was unregistered leaves no trace in the dispatchers: nothing remembered, nothing kept alive, nothing counted."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..world.catalog import Catalog
from .native import NO_WORLD

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

_last: Catalog | None = None                   # that of the last world that was looked at


def forget(dispatchers: dict[str, Dispatcher], probes: dict[str, Any], catalog: Catalog) -> None:
    """Called with the catalog of every new world. `probes`: by what a breaker is for."""
    global _last
    before = _last
    if catalog is before:
        return
    for name, found in list(dispatchers.items()):
        if before is not None and before.ops.get(name) is found.op and catalog.ops.get(name) is not found.op:
            del dispatchers[name]
            if found.native is not None and found.program is not None:
                found.native.install(found.program, NO_WORLD, 1)       # its table holds the kernels it called
    for found in dispatchers.values():
        for key in [k for k in list(found._bindings) if catalog.by_id.get(k[0].id) is not k[0]]:
            found._bindings.pop(key, None)
        found.ledger.keep_only(catalog.by_id)
    groups: Collection[str] = {k.health for k in catalog.kernels}
    for group in [g for g in list(probes) if g not in groups]:
        probes.pop(group, None)
    _last = catalog
