"""A dispatch table in force: lz.use_table. It is part of the world from then on, and calls are looked up in it."""

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
from ..world.tables import InForce
from .lower import lowered
from .table import Row, Stamp, Table


def use_table(table: Table | str | os.PathLike[str] | None, warm: bool = True) -> Table | None:
    """Put a table in force for the process; None takes it away. Refused if anything it depends on has changed.

    Kernels of it that compile on first use are compiled now, unless `warm=False`: then they wait for a warm-up.
    """
    if table is None:
        worlds.publish(lambda w: w.replace(table=None), "table:none")
        return None
    found = table if isinstance(table, Table) else Table.load(table)
    check(found, worlds.current())
    warmed = _warmed(found) if warm else frozenset()
    ready = replace(found, finder=lowered(found))

    def change(world: World) -> World:
        check(found, world)                    # again: it may have changed while kernels were compiled
        return world.replace(table=InForce(ready, world.catalog), warmed=world.warmed | warmed)

    worlds.publish(change, f"table:{found.id}")
    return found


def table_in_force() -> Table | None:
    """The table that calls are looked up in, if there is one."""
    held = worlds.current().table
    return held.table if held is not None and isinstance(held.table, Table) else None


def check(table: Table, world: World) -> None:
    """DataError, with everything that drifted, unless the table holds in this world."""
    stamp = table.stamp
    try:
        now = Stamp.of(world, stamp.device.type, table.kernels)
    except LayerZeroError as e:
        raise DataError(f"{table}: there is no such device here: {e}. Run lz solve again on this machine") from e
    reasons = stamp.drift(now)
    for row in table.rows:
        op = world.catalog.ops.get(row.op)
        unknown = [] if op is None else unknown_facts(row, op)
        if op is None or unknown:
            reasons.append(Reason(Code.PLAN_DRIFT, f"{row.op} {' '.join(unknown)}".strip(), "absent", row.op))
        odd = [t for step in row.steps for t in step.transforms if op is not None and not is_valid_transform(op, t)]
        if odd:
            raise DataError(f"{table} is refused: no call of {row.op} can be changed that way: {str(odd[0])[:120]!r}. "
                            "Run lz solve again on this machine")
    if reasons:
        lines = [f"  {r.message}" for r in dict.fromkeys(reasons)]
        raise DataError(f"{table} is refused: not everything is as it was when it was solved\n" + "\n".join(lines)
                        + "\nRun lz solve again on this machine", reasons)


def unknown_facts(row: Row, op: Op) -> list[str]:
    """Those that a call of the op does not have, or not as a size."""
    return [n for n, _ in row.when if n not in op.fact_names] + [
        n for n, _ in row.sizes if n not in op.fact_names or not is_numeric(n, op)]


def _warmed(table: Table) -> frozenset[Any]:
    """Make the calls that the table's compiling kernels are to be compiled for: what is warm after that."""
    warm: set[Any] = set()
    for artefact in table.jit:
        world = worlds.current()
        if artefact.kernel in world.warmed:
            continue
        found = dispatcher_of(artefact.call.op)
        try:
            with torch.set_grad_enabled(artefact.call.grad):
                made = make_values(found.op, artefact.call, table.stamp.device.type)
                given = tuple(made[name] for name in found.names)
                ready = jit.warmed_keys(world.catalog.by_id[artefact.kernel], found.facts(given, world), given)
                if not ready <= world.warmed:
                    found.public(**made, backend=artefact.kernel)
            warm |= ready
        except LayerZeroError as e:
            raise DataError(f"{table}: {artefact.kernel} cannot be compiled for {artefact.call.name or found.op.name}: "
                            f"{e}. Run lz solve again, or give warm=False to do without it") from e
    return frozenset(warm)
