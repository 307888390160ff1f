"""Writes measurements to the store, reads them back, and reports the store's status.

No measurement is dropped because the store cannot be written now: it is kept in memory, an event
reports it, and it is written when the store works again: with the next recording, at a retry, or
when the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..machine import hardware, locks
from ..machine.builds import build_of
from ..machine.state import machine_id, state_of
from ..perf.batch import Batch
from ..perf.interface import CorruptStore, Store, StoreError
from ..perf.record import (
    Measurement,
    PerfView,
    Rates,
    checked_rates,
    environment_id,
    is_cpu_place,
    place_of,
)
from ..selection.policy import Policy
from ..spec.device import Device
from ..spec.display import plural
from ..spec.errors import ConfigError
from ..spec.event import Event, StoreRecovered, StoreTrouble
from ..spec.op import Op
from . import events, perf_loading
from . import snapshot as worlds
from .capabilities import capabilities_hash, export
from .context import Override
from .perf_loading import (
    DAY,
    OFF,
    READ_SECONDS,
    load,
    location,
    open_location,
    shipped_table,
    state,
    without_password,
)
from .registry.catalog import Catalog
from .snapshot import World

IN_USE = "in use"                              # how a row stands that decides calls here
STATE_SECONDS = 10.0                           # how long a reading of the machine's state is reused

_environments: dict[str, tuple[float, Catalog, dict[str, Any]]] = {}
_saving = locks.Lock()                         # held by the thread that writes what is unsaved
_retry: threading.Timer | None = None


def store(read_only: bool = False) -> Store:
    """Opens the store of the current setting, which is created unless `read_only`."""
    target = location(worlds.current().policy)
    if target is None:
        raise ConfigError(
            f"perfdb is {OFF!r}: there is no store; set perfdb to a path, or to '' for the default "
            "one")
    return open_location(target, read_only=read_only)


@contextmanager
def open_store(read_only: bool = False) -> Iterator[Store]:
    """Opens the store for the block. The error about a damaged one says what was done with it. A
    writable one is set aside and a new one begun; with `read_only` it stays as it is."""
    target = location(worlds.current().policy)
    try:
        with store(read_only) as opened:
            if not read_only and state.damaged is not None and state.damaged.path == target:
                opened.verify()
            yield opened
    except CorruptStore as e:
        if not isinstance(target, Path) or e.path != target:
            raise                              # another file
        if read_only:
            raise StoreError(f"{e}; nothing of it was touched: lz perf prune sets it aside and "
                             "begins anew") from e
        trouble, _ = _set_aside(target, e)
        events.emit(trouble)
        raise StoreError(f"{e}; {trouble.action}") from e


def record(measurements: Iterable[Measurement], rates: Mapping[str, Rates] | None = None) -> None:
    """Stores measurements and lets selection use them from now on.

    Build, time and environment are filled in where they are empty. If the store cannot be written,
    this process uses them all the same, and writes them when it can.
    """
    world, now = worlds.current(), state.now()
    environments: dict[str, dict[str, Any]] = {}
    rows = [_complete_row(m, world, now, environments).checked() for m in measurements]
    rates = checked_rates(rates or {})
    if not rows and not rates:
        return
    timed = {place: (r, now) for place, r in rates.items()}
    for event in _store_rows(world.policy, rows, environments, timed):
        events.emit(event)
    worlds.publish(lambda w: w.replace(perf=w.perf.including(rows, rates)), "measured")


def store_rows(rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
               rates: Mapping[str, Rates]) -> None:
    """Stores what other machines measured, complete as they sent it; selection here does not change
    before `reload_measurements`."""
    timed = {place: (r, state.now()) for place, r in checked_rates(rates).items()}
    for event in _store_rows(worlds.current().policy, [m.checked() for m in rows], environments,
                             timed):
        events.emit(event)


def tighten_spread(world: World, op: Op, facts: Mapping[str, Any], rows: Sequence[Measurement],
                   group: Collection[str],
                   override: Override | None = None) -> tuple[tuple[Measurement, ...], str]:
    """Returns the rows with a spread that lets selection pick one of `group`, and the kernel it
    picks.

    Selection blends a noisy time with a guess. The noise of single samples must not undo a verdict
    over many, so the spread is halved until it does not.
    """
    rows, measured = tuple(rows), {m.kernel for m in rows}
    while True:
        after = world.replace(perf=world.perf.including(rows), warmed=world.warmed | measured)
        chosen = after.plan(op, facts, override).kernel or ""
        if chosen in group or chosen not in measured or max(m.spread for m in rows) < 1e-6:
            return rows, chosen
        rows = tuple(m._replace(spread=m.spread / 2) for m in rows)


def forget_measurements() -> None:
    """Lets this process select without measurements; the store keeps them."""
    worlds.publish(lambda w: w.replace(perf=PerfView()), "measured")


def reload_measurements() -> None:
    """Reads the store again: another process may have measured."""
    perf, problems = load(worlds.current().policy, worlds.current().catalog.kernels)
    worlds.publish(lambda w: w.replace(perf=perf), "measured")
    for event in problems:
        events.emit(event)


def _complete_row(m: Measurement, world: World, now: float,
                  environments: dict[str, dict[str, Any]]) -> Measurement:
    kernel, env_id = world.catalog.by_id.get(m.kernel), m.environment
    if not env_id:
        kind = _device_type_of(m.place)
        if kind:
            env = environment(kind)
            env_id = environment_id(env)
            environments[env_id] = env
    return m._replace(build=m.build or (build_of(kernel) if kernel is not None else ""),
                      at=m.at or now, environment=env_id)


def _device_type_of(place: str) -> str:
    """Returns the device type here that `place` names, "" if none; CPU first, GPUs start."""
    for kind in sorted(hardware.present(), key=lambda kind: kind != "cpu"):
        if hardware.probe(kind).signature == signature_of(place):
            return kind
    return ""


def signature_of(place: str) -> str:
    """Returns the device signature of a place, without the number of threads."""
    return place.partition("-")[0]


# into the store

def _store_rows(policy: Policy, rows: list[Measurement],
                environments: Mapping[str, Mapping[str, Any]],
                rates: Mapping[str, tuple[Rates, float]]) -> list[Event]:
    """Writes these rows and what could not be written before; returns what went wrong."""
    try:
        if location(policy) is None:  # perfdb is off: kept in memory while the process lives
            return []
    except ConfigError:
        pass
    nested = _saving.is_held_here()            # a finalizer runs while this thread writes
    with _saving:  # unsaved until it is written, whatever happens meanwhile
        while True:
            before = state.unsaved
            batch = before.including(rows, environments, rates)
            if state.unsaved is before:
                state.unsaved = batch
                break
        if not nested:
            return _save(policy)
        _schedule_retry()                      # should that write be over already
        return []


def _save(policy: Policy, timeout: float | None = None) -> list[Event]:
    """Writes what is unsaved; a damaged file is set aside first. Returns what went wrong."""
    problems: list[Event] = []
    try:
        target = location(policy)
    except ConfigError as e:
        return [_write_failed(without_password(policy.setting("perfdb")), e)]
    if target is None or not state.unsaved:
        return problems
    for attempt in ("first", "last"):
        try:
            with open_location(target, timeout) as db:
                # found while reading: check all of it
                if state.damaged is not None and state.damaged.path == target:
                    db.verify()
                batch = state.unsaved
                batch.write_to(db)
            problems += _mark_saved(batch, without_password(target))
            return problems + _save(policy, timeout)           # what was added meanwhile
        except CorruptStore as e:
            if attempt == "last":
                return [*problems, _write_failed(without_password(target), e)]
            trouble, begun_anew = _set_aside(target, e)
            problems.append(trouble)
            if not begun_anew:
                return problems
        except StoreError as e:
            return [*problems, _write_failed(without_password(target), e)]
    return problems


def _mark_saved(batch: Batch, name: str) -> list[Event]:
    count, failure = len(batch), state.writing
    if state.unsaved is batch:
        state.unsaved = Batch()
    state.damaged, state.reading, state.writing = None, None, None
    return [StoreRecovered(store=name, written=count)] if failure is not None else []


def _write_failed(name: str, error: Exception, action: str = "") -> StoreTrouble:
    """Records that writing failed; the measurements stay in memory, to be written later."""
    count = len(state.unsaved)
    state.writing = StoreTrouble(
        store=name, problem=str(error),
        action=f"{action}{count} measurements are kept in memory, and written when it works again")
    _schedule_retry()
    return state.writing


def _set_aside(target: Path | str, error: CorruptStore) -> tuple[StoreTrouble, bool]:
    """Sets a damaged file aside and begins a new one; returns what was done, and if it worked."""
    # as in `open_location`: there is a file, so SQLite is loaded
    from ..perf.store import real_path, set_aside
    assert isinstance(target, Path)            # a server raises StoreError
    try:
        real_file = real_path(target)  # a link would point to nothing once the file is moved
        aside = set_aside(real_file, error.file)
        open_location(real_file).close()
    except (OSError, StoreError) as e:
        return _write_failed(str(target), error, f"it could not be set aside ({e}); "), False
    state.damaged = None
    action = (f"set aside as {aside.name}; begun anew" if aside
              else "another process has begun it anew")
    return StoreTrouble(store=str(target), problem=str(error), action=action), True


def _schedule_retry() -> None:
    """Retries on a separate thread, not on the clock's: a server that does not answer blocks it."""
    global _retry
    if _retry is None or not _retry.is_alive():
        _retry = threading.Timer(perf_loading.RETRY_SECONDS, retry_save)
        _retry.daemon = True
        _retry.start()


def retry_save(timeout: float | None = None) -> None:
    """Writes what is unsaved, if the store works again. A known failure is not reported again."""
    global _retry
    policy = worlds.current().policy if state.unsaved else None
    if not _saving.acquire(timeout=-1.0 if timeout is None else timeout):
        return                                 # another thread writes, and does not come to an end
    try:
        if _retry is threading.current_thread():
            _retry = None
        known_failure, problems = (state.writing, _save(policy, timeout) if policy is not None
                                   else [])
        new_problems = [event for event in problems if event != known_failure]
    finally:
        _saving.release()
    for event in new_problems:
        events.emit(event)


def _at_exit() -> None:
    """Tries a last time to write what is unsaved; reports what is lost."""
    if not state.unsaved:
        return
    retry_save(READ_SECONDS)
    if state.unsaved:
        trouble = state.writing or StoreTrouble(problem="another thread still writes to it")
        lost = f"{len(state.unsaved)} measurements are lost with this process"
        events.emit(replace(trouble, action=lost))


def _after_fork() -> None:
    global _retry
    _retry = None                              # its thread did not survive the fork


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# status

@dataclass(frozen=True)
class StoreStatus:
    ok: bool
    text: str
    hint: str = ""


def status() -> StoreStatus:
    """Returns for `lz doctor` where measurements are, how many are in use, and what is wrong."""
    world, trouble = worlds.current(), state.trouble
    if trouble is not None:
        return StoreStatus(False, f"{trouble.store}: {trouble.problem}", trouble.action)
    target = location(world.policy)
    try:
        count = _describe_rows(target)
    except StoreError as e:                    # since it was loaded
        return StoreStatus(False, str(e), "lz perf show says more")
    if target is None:
        return StoreStatus(True, f"{count}; perfdb is {OFF}, nothing is kept")
    aside = (sorted(target.parent.glob(f"{target.name}.corrupt-*")) if isinstance(target, Path)
             else [])
    hint = (f"a damaged file was set aside: {aside[-1]}; delete it once you have looked at it"
            if aside else "")
    return StoreStatus(True, f"{count}, from {without_password(target)}", hint)


def _describe_rows(target: Path | str | None) -> str:
    """Returns how many rows decide calls here, and why the others do not. Of a server, only those
    that were loaded are counted: no second connection is made."""
    if isinstance(target, Path) and target.exists():
        with open_location(target, READ_SECONDS, read_only=True) as opened:
            environments, rows = opened.environments(), list(opened.rows())
    else:
        environments, rows = {}, list(worlds.current().perf)
    status_of = RowStatus(environments).of
    counts = Counter(map(status_of, rows))
    in_use = f"{plural(counts.pop(IN_USE, 0), 'measurement')} in use"
    others = ", ".join(f"{n} {why}" for why, n in counts.most_common())
    return f"{in_use}; not in use: {others}" if others else in_use


def shipped_status(world: World, device: Device) -> StoreStatus:
    """Returns for `lz doctor` what shipped measurements this device has, and if they are used."""
    if not world.policy.setting("shipped_measurements"):
        return StoreStatus(True, "switched off by the setting shipped_measurements")
    table, refused = shipped_table(world.catalog, device)
    if table is None:
        return StoreStatus(
            True,
            f"none for {device.name}: torch's own kernels are the default until something is "
            "measured",
            "run: lz tune --model NAME, or set learn",
        )
    title = f"{table.title}: {table.kinds} kinds of call, by `{table.command}`"
    if refused:
        return StoreStatus(True, f"do not count here: {refused} ({title})",
                           "run: lz tune --model NAME, or set learn")
    return StoreStatus(True, f"{title}; what is measured here takes their place")


def environment(kind: str) -> dict[str, Any]:
    """Returns everything a measurement on this `kind` of device may depend on, as of now."""
    catalog = worlds.current().catalog
    read_at, known_catalog, env = _environments.get(kind, (0.0, None, {}))
    stale = known_catalog is not catalog or time.monotonic() > read_at + STATE_SECONDS
    if stale or env["threads"] != torch.get_num_threads():
        device, threads = hardware.probe(kind), torch.get_num_threads()
        env = {
            "device": device.to_json(), "place": place_of(device, threads), "threads": threads,
            "capabilities": capabilities_hash(export(catalog))[:16], **state_of(device)}
        _environments[kind] = time.monotonic(), catalog, env
    return env


class RowStatus:
    """Tells whether rows of a store are in use on this machine today."""

    def __init__(self, environments: Mapping[str, Mapping[str, Any]]) -> None:
        world = worlds.current()
        days = world.policy.setting("perfdb_ttl")
        self.since = state.now() - days * DAY if days else 0.0
        self.builds = {k.id: build_of(k) for k in world.catalog.kernels}
        self.signatures = {device.signature for device in hardware.all_devices()}
        self.cpu_place = world.place("cpu")
        self.machines = {i: str(data.get("machine", "")) for i, data in environments.items()}

    def of(self, m: Measurement) -> str:
        """Returns IN_USE, or why it is not. Rows of another machine are never stale here."""
        is_ours = self.machines.get(m.environment, "") in ("", machine_id())
        if m.at < self.since:
            return "expired"
        if signature_of(m.place) not in self.signatures:
            return ("stale: device, torch, driver or toolkit changed" if is_ours and m.environment
                    else "of another machine")
        if m.kernel not in self.builds:
            return "unknown kernel"
        if self.builds[m.kernel] != m.build:
            return "stale: another build" if is_ours else "of another machine"
        if is_cpu_place(m.place) and m.place != self.cpu_place:
            return "of another number of threads"
        return IN_USE
