"""What was measured, on its way into the store and out of it again: recording, asking, saying how
it stands.

Nothing that was measured is dropped because a store cannot be written now: it is kept in memory, an
event says so, and it is written when the store works again: with the next recording, after a while,
or when the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..machine import hardware
from ..machine.builds import build_of
from ..machine.state import machine_id, state_of
from ..perf.batch import Batch
from ..perf.interface import CorruptStore, Store, StoreError
from ..perf.record import Measurement, PerfView, Rates, environment_id, place_of
from ..select.policy import Policy
from ..spec.device import Device
from ..spec.errors import ConfigError
from ..spec.event import Event, StoreRecovered, StoreTrouble
from ..spec.op import Op
from . import events, perf_loading
from . import snapshot as worlds
from .capabilities import capabilities_hash, export
from .catalog import Catalog
from .context import Override
from .perf_loading import DAY, OFF, READ_SECONDS, applicable, load, location, opened, shown, state
from .snapshot import World

STATE_SECONDS = 10.0                           # for so long the state of the machine is taken to be the same

_environments: dict[str, tuple[float, Catalog, dict[str, Any]]] = {}
_saving = threading.Lock()                     # one thread writes what is unsaved
_retry: threading.Timer | None = None


def store(read_only: bool = False) -> Store:
    """The store of the current setting, opened; close it. Made if there is none yet, unless it is
    only read."""
    where = location(worlds.current().policy)
    if where is None:
        raise ConfigError(f"perfdb is {OFF!r}: there is no store; set perfdb to a path, or to '' for the default one")
    return opened(where, read_only=read_only)


@contextmanager
def using(read_only: bool = False) -> Iterator[Store]:
    """The store, for a while. The error about a damaged one says what became of it.

    One that may be written is set aside and begun anew; one that is only read stays as it is.
    """
    where = location(worlds.current().policy)
    try:
        with store(read_only) as found:
            if not read_only and state.damaged is not None and state.damaged.path == where:
                found.verify()
            yield found
    except CorruptStore as e:
        if not isinstance(where, Path) or e.path != where:
            raise                              # another file, read meanwhile
        if read_only:
            raise StoreError(f"{e}; nothing of it was touched: lz perf prune sets it aside and "
                             "begins anew") from e
        trouble, _ = _set_aside(where, e)
        events.emit(trouble)
        raise StoreError(f"{e}; {trouble.action}") from e


def record(measurements: Iterable[Measurement], rates: Mapping[str, Rates] | None = None) -> None:
    """Keep what was measured, and let it decide from now on.

    Build, time and environment are filled in where they are empty. If the store cannot be written, this process
    uses them all the same, and writes them when it can.
    """
    world, now = worlds.current(), state.now()
    environments: dict[str, dict[str, Any]] = {}
    rows = [_filled(m, world, now, environments).checked() for m in measurements]
    rates = dict(rates or {})
    if not rows and not rates:
        return
    timed = {place: (r, now) for place, r in rates.items()}
    for event in _keep(world.policy, rows, environments, timed):
        events.emit(event)
    worlds.publish(lambda w: w.replace(perf=w.perf.including(rows, rates)), "measured")


def heeded(world: World, op: Op, facts: Mapping[str, Any], rows: Sequence[Measurement], group: Collection[str],
           override: Override | None = None) -> tuple[tuple[Measurement, ...], str]:
    """The rows, and what selection makes of them, which is to be one of the `group`.

    It mixes a noisy time with a guess. The noise of single samples must not undo a verdict over many, so the spread
    is made smaller until it does not.
    """
    rows, timed = tuple(rows), {m.kernel for m in rows}
    while True:
        after = world.replace(perf=world.perf.including(rows), warmed=world.warmed | timed)
        chosen = after.plan(op, facts, override).kernel or ""
        if chosen in group or chosen not in timed or max(m.spread for m in rows) < 1e-6:
            return rows, chosen
        rows = tuple(m._replace(spread=m.spread / 2) for m in rows)


def forget_measurements() -> None:
    """This process decides without measurements from now on. The store keeps them (`lz perf prune` removes them)."""
    worlds.publish(lambda w: w.replace(perf=PerfView()), "measured")


def reload_measurements() -> None:
    """Read the store anew: another process may have measured."""
    perf, told = load(worlds.current().policy, worlds.current().catalog.kernels)
    worlds.publish(lambda w: w.replace(perf=perf), "measured")
    for event in told:
        events.emit(event)


def _filled(m: Measurement, world: World, now: float, environments: dict[str, dict[str, Any]]) -> Measurement:
    kernel, named = world.catalog.by_id.get(m.kernel), m.environment
    if not named:
        kind = _kind_of(m.place)
        if kind:
            here = environment(kind)
            named = environment_id(here)
            environments[named] = here
    return m._replace(build=m.build or (build_of(kernel) if kernel is not None else ""), at=m.at or now,
                      environment=named)


def _kind_of(place: str) -> str:
    """The kind of device of this machine that `place` is; "" if none. Asks the CPU first: to ask a GPU starts it."""
    for kind in sorted(hardware.present(), key=lambda kind: kind != "cpu"):
        if hardware.probe(kind).signature == signature_of(place):
            return kind
    return ""


def signature_of(place: str) -> str:
    """The device of a place, whatever the number of threads."""
    return place.partition("-")[0]


# into the store

def _keep(policy: Policy, rows: list[Measurement], environments: Mapping[str, Mapping[str, Any]],
          rates: Mapping[str, tuple[Rates, float]]) -> list[Event]:
    """Write these and what could not be written before. What went wrong."""
    try:
        if location(policy) is None:  # so it was wanted: in memory, as long as the process lives
            return []
    except ConfigError:
        pass
    with _saving:  # unsaved until it is written, whatever happens meanwhile
        state.unsaved = state.unsaved.including(rows, environments, rates)
        return _save(policy)


def _save(policy: Policy, timeout: float | None = None) -> list[Event]:
    """Write what is unsaved. A damaged file is set aside, and a new one is written."""
    told: list[Event] = []
    try:
        where = location(policy)
    except ConfigError as e:
        return [_not_kept(shown(policy.setting("perfdb")), e)]
    if where is None or not state.unsaved:
        return told
    for attempt in ("first", "last"):
        try:
            with opened(where, timeout) as found:
                if state.damaged is not None and state.damaged.path == where:  # found while reading
                    found.verify()
                state.unsaved.write_to(found)
            return told + _saved(shown(where))
        except CorruptStore as e:
            if attempt == "last":
                return [*told, _not_kept(shown(where), e)]
            trouble, begun_anew = _set_aside(where, e)
            told.append(trouble)
            if not begun_anew:
                return told
        except StoreError as e:
            return [*told, _not_kept(shown(where), e)]
    return told


def _saved(name: str) -> list[Event]:
    count, was = len(state.unsaved), state.writing
    state.unsaved, state.damaged, state.reading, state.writing = Batch(), None, None, None
    return [StoreRecovered(store=name, written=count)] if was is not None else []


def _not_kept(name: str, error: Exception, action: str = "") -> StoreTrouble:
    """They stay in memory, to be written later."""
    count = len(state.unsaved)
    state.writing = StoreTrouble(
        store=name, problem=str(error),
        action=f"{action}{count} measurements are kept in memory, and written when it works again")
    _try_again_later()
    return state.writing


def _set_aside(where: Path | str, error: CorruptStore) -> tuple[StoreTrouble, bool]:
    """Put a damaged file aside and begin a new one. What was done, and whether there is a new
    one."""
    # as in `opened`: there is a file, so SQLite is loaded
    from ..perf.store import real_path, set_aside
    assert isinstance(where, Path)             # a server says StoreError
    try:
        real = real_path(where)  # a link would point to nothing once the file has gone
        aside = set_aside(real, error.file)
        opened(real).close()
    except (OSError, StoreError) as e:
        return _not_kept(str(where), error, f"it could not be set aside ({e}); "), False
    state.damaged = None
    action = f"set aside as {aside.name}; begun anew" if aside else "another process has begun it anew"
    return StoreTrouble(store=str(where), problem=str(error), action=action), True


def _try_again_later() -> None:
    """In a thread of its own, and not on the clock's: a server that does not answer is waited
    for."""
    global _retry
    if _retry is None or not _retry.is_alive():
        _retry = threading.Timer(perf_loading.RETRY_SECONDS, try_again)
        _retry.daemon = True
        _retry.start()


def try_again(timeout: float | None = None) -> None:
    """Write what is unsaved, if the store works again. Trouble that is known is not told again."""
    global _retry
    policy = worlds.current().policy if state.unsaved else None
    with _saving:
        if _retry is threading.current_thread():
            _retry = None
        known, found = state.writing, _save(policy, timeout) if policy is not None else []
        told = [event for event in found if event != known]
    for event in told:
        events.emit(event)


def _at_exit() -> None:
    """The last time to write what is unsaved; what is lost is said."""
    if not state.unsaved:
        return
    try_again(READ_SECONDS)
    if state.unsaved and state.writing is not None:
        lost = f"{len(state.unsaved)} measurements are lost with this process"
        events.emit(replace(state.writing, action=lost))


def _after_fork() -> None:
    global _saving, _retry
    _saving, _retry = threading.Lock(), None   # a thread that is gone may have held it


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# how they stand

@dataclass(frozen=True)
class Status:
    ok: bool
    text: str
    hint: str = ""


def status() -> Status:
    """For the doctor: where measurements are, how many count here, and what is wrong."""
    world, trouble = worlds.current(), state.trouble
    if trouble is not None:
        return Status(False, f"{trouble.store}: {trouble.problem}", trouble.action)
    where = location(world.policy)
    count = f"{len(world.perf)} measurements in use"
    if where is None:
        return Status(True, f"{count}; perfdb is {OFF}, nothing is kept")
    aside = sorted(where.parent.glob(f"{where.name}.corrupt-*")) if isinstance(where, Path) else []
    hint = f"a damaged file was set aside: {aside[-1]}; delete it once you have looked at it" if aside else ""
    return Status(True, f"{count}, from {shown(where)}", hint)


def shipped_status(world: World, device: Device) -> Status:
    """For the doctor: which measurements came with the package for this device, and do they count?"""
    if not world.policy.setting("shipped_measurements"):
        return Status(True, "switched off by the setting shipped_measurements")
    table, refused = applicable(world.catalog, device)
    if table is None:
        return Status(True, f"none for {device.name}: torch's own kernels are the default until something is measured",
                      "run: lz tune --model NAME, or set learn")
    found = f"{table.title}: {table.kinds} kinds of call, by `{table.command}`"
    if refused:
        return Status(True, f"do not count here: {refused} ({found})", "run: lz tune --model NAME, or set learn")
    return Status(True, f"{found}; what is measured here takes their place")


def environment(kind: str) -> dict[str, Any]:
    """Everything a measurement on this machine's `kind` of device may depend on, and the state it is in now."""
    catalog = worlds.current().catalog
    read_at, of, found = _environments.get(kind, (0.0, None, {}))
    stale = of is not catalog or time.monotonic() > read_at + STATE_SECONDS
    if stale or found["threads"] != torch.get_num_threads():
        device, threads = hardware.probe(kind), torch.get_num_threads()
        found = {
            "device": device.to_json(), "place": place_of(device, threads), "threads": threads,
            "capabilities": capabilities_hash(export(catalog))[:16], **state_of(device)}
        _environments[kind] = time.monotonic(), catalog, found
    return found


class Standing:
    """How rows of a store stand on this machine, as it is today."""

    def __init__(self, environments: Mapping[str, Mapping[str, Any]]) -> None:
        world = worlds.current()
        days = world.policy.setting("perfdb_ttl")
        self.since = state.now() - days * DAY if days else 0.0
        self.builds = {k.id: build_of(k) for k in world.catalog.kernels}
        self.signatures = {device.signature for device in hardware.all_devices()}
        self.machines = {i: str(data.get("machine", "")) for i, data in environments.items()}

    def of(self, m: Measurement) -> str:
        """"in use", or why it is not. Rows of another machine are no business of this one, so never stale here."""
        ours = self.machines.get(m.environment, "") in ("", machine_id())
        if m.at < self.since:
            return "expired"
        if signature_of(m.place) not in self.signatures:
            return "stale: device, driver or toolkit changed" if ours and m.environment else "of another machine"
        if m.kernel not in self.builds:
            return "unknown kernel"
        if self.builds[m.kernel] != m.build:
            return "stale: another build" if ours else "of another machine"
        return "in use"
