"""A dispatch table in force: lz.tables.use_table.

It is part of the world from then on; calls are looked up in it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from ..dispatch.background import jit
from ..dispatch.binding import is_valid_transform
from ..operate.calls import make_values
from ..operate.inspection import dispatcher_of
from ..spec.errors import DataError, LayerZeroError
from ..spec.op import Op
from ..spec.reason import Code, Reason
from ..world import snapshot as worlds
from ..world.capabilities import is_numeric
from ..world.snapshot import World
from ..world.tables import ActiveTable
from .lower import compiled_find
from .table import Row, Stamp, Table


def use_table(table: Table | str | os.PathLike[str] | None, warm: bool = True) -> Table | None:
    """Put a table in force for the process; None takes it away. DataError if anything it depends on
    has changed.

    Those of its kernels that compile on first use are compiled now; with `warm=False` they wait for
    a warm-up.
    """
    if table is None:
        worlds.publish(lambda w: w.replace(table=None), "table:none")
        return None
    loaded = table if isinstance(table, Table) else Table.load(table)
    check_table(loaded, worlds.current())
    warmed = _warm_up(loaded) if warm else frozenset()
    ready = replace(loaded, finder=compiled_find(loaded))

    def change(world: World) -> World:
        # again: it may have changed while kernels were compiled
        check_table(loaded, world)
        return world.replace(table=ActiveTable(ready, world.catalog), warmed=world.warmed | warmed)

    worlds.publish(change, f"table:{loaded.id}")
    return loaded


def table_in_force() -> Table | None:
    """Return the table that calls are looked up in, if there is one."""
    in_force = worlds.current().table
    return in_force.table if in_force is not None and isinstance(in_force.table, Table) else None


def check_table(table: Table, world: World) -> None:
    """Raise DataError, with everything that drifted, unless the table holds in this world."""
    stamp = table.stamp
    try:
        now = Stamp.of(world, stamp.device.type, table.kernels)
    except LayerZeroError as e:
        raise DataError(
            f"{table}: there is no such device here: {e}. Run lz solve again on this "
            "machine") from e
    reasons = stamp.drift(now)
    for row in table.rows:
        op = world.catalog.ops.get(row.op)
        unknown = [] if op is None else unknown_facts(row, op)
        if op is None or unknown:
            reasons.append(Reason(Code.PLAN_DRIFT, f"{row.op} {' '.join(unknown)}".strip(),
                                  "absent", row.op))
        impossible = [
            t
            for step in row.steps
            for t in step.transforms
            if op is not None and not is_valid_transform(op, t)
        ]
        if impossible:
            raise DataError(f"{table} is refused: no call of {row.op} can be changed that way: "
                            f"{str(impossible[0])[:120]!r}. "
                            "Run lz solve again on this machine")
    if reasons:
        lines = [f"  {r.message}" for r in dict.fromkeys(reasons)]
        raise DataError(f"{table} is refused: not everything is as it was when it was solved\n"
                        + "\n".join(lines)
                        + "\nRun lz solve again on this machine", reasons)


def unknown_facts(row: Row, op: Op) -> list[str]:
    """Return the facts of the row that a call of the op does not have, or not as a number."""
    return [n for n, _ in row.when if n not in op.fact_names] + [
        n for n, _ in row.sizes if n not in op.fact_names or not is_numeric(n, op)]


def _warm_up(table: Table) -> frozenset[Any]:
    """Make the calls that the table's JIT kernels are compiled for; return what is warm."""
    warm: set[Any] = set()
    for artefact in table.jit:
        world = worlds.current()
        if artefact.kernel in world.warmed:
            continue
        dispatcher = dispatcher_of(artefact.call.op)
        try:
            with torch.set_grad_enabled(artefact.call.grad):
                arguments = make_values(dispatcher.op, artefact.call, table.stamp.device.type)
                ordered = tuple(arguments[name] for name in dispatcher.names)
                ready = jit.warmed_keys(world.catalog.by_id[artefact.kernel],
                                        dispatcher.facts(ordered, world), ordered)
                if not ready <= world.warmed:
                    dispatcher.public(**arguments, backend=artefact.kernel)
            warm |= ready
        except LayerZeroError as e:
            name = artefact.call.name or dispatcher.op.name
            raise DataError(f"{table}: {artefact.kernel} cannot be compiled for {name}: "
                            f"{e}. Run lz solve again, or give warm=False to do without it") from e
    return frozenset(warm)
