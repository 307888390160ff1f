"""Loads measurements into the world: from the store of this machine or fleet, and from the package.

A store is read when a world is created and when a setting or a kernel changes; never on a cache
hit. Reading changes nothing: a damaged store is set aside at the next write (measurements.py). A
store that cannot be used costs its measurements and nothing else: an event and `lz doctor` report
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ..machine.builds import build_of
from ..machine.loading import installed_version, is_version_range, satisfies
from ..perf import shipped as files
from ..perf.batch import Batch
from ..perf.fleet import FleetStore
from ..perf.interface import CorruptStore, Store, StoreError
from ..perf.record import PerfView
from ..perf.shipped import ShippedTable
from ..selection.engine import Shipped
from ..selection.policy import Policy
from ..spec.device import Device
from ..spec.errors import ConfigError, DataError, LayerZeroError
from ..spec.event import Event, StoreTrouble
from ..spec.kernel import Kernel
from . import config, events
from .registry.catalog import Catalog

FILE = "perf.sqlite"
OFF = "off"
DAY = 86400.0
# waiting for another process; the first call waits for the read
READ_SECONDS, WRITE_SECONDS = 2.0, 10.0
RETRY_SECONDS = 60.0                           # until a store that failed is tried again


@dataclass
class StoreState:
    """What this process knows of its store; values are replaced whole, read without a lock."""

    reading: StoreTrouble | None = None        # the last failure to read, until reading works
    writing: StoreTrouble | None = None        # the same for writing
    retry_at: float = 0.0
    damaged: CorruptStore | None = None  # found while reading; the next write verifies it
    unsaved: Batch = field(default_factory=Batch)                  # measured, in no store yet

    @property
    def trouble(self) -> StoreTrouble | None:
        return self.writing or self.reading

    newest: float = 0.0  # the latest time that now() returned

    def reset(self) -> None:
        """Returns to the state of a new process; what is unsaved is lost."""
        vars(self).update(vars(StoreState()))

    def now(self) -> float:
        """Returns a time that never goes back, even if the clock does: later is newer."""
        self.newest = max(self.newest, time.time())
        return self.newest


state = StoreState()


def location(policy: Policy) -> Path | str | None:
    """Returns where measurements are: a file, a server's address, or None for memory."""
    text = str(policy.setting("perfdb")).strip()
    if not text:
        return config.cache_dir() / FILE
    if text.lower() == OFF:
        return None
    if text.startswith(("postgresql://", "postgresql+")):
        return text
    if "://" in text:
        raise ConfigError(f"perfdb: wanted a path, {OFF!r}, or postgresql://..., got "
                          f"{text.partition('://')[0]}://...")
    if "\0" in text:
        raise ConfigError(f"perfdb: wanted a path, got {text!r}, which no file system takes")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"perfdb: cannot expand {text!r}: {e}; write an absolute path") from e


def open_location(target: Path | str, timeout: float | None = None,
                  read_only: bool = False) -> Store:
    """Opens the store at a path or address; `read_only` creates and changes nothing."""
    timeout = WRITE_SECONDS if timeout is None else timeout
    if isinstance(target, Path):
        from ..perf.store import SqliteStore  # SQLite is not loaded before there is a file
        return SqliteStore(target, timeout, read_only)
    return FleetStore(target, timeout, read_only)


def without_password(address: Path | str) -> str:
    """Returns an address for messages, without its password."""
    scheme, sign, rest = str(address).partition("://")
    return f"{scheme}{sign}{rest.rpartition('@')[2]}"


def load(policy: Policy, kernels: Sequence[Kernel]) -> tuple[PerfView, list[Event]]:
    """Returns the measurements of these kernels' present builds, unsaved too, and problems."""
    days = policy.setting("perfdb_ttl")
    since = state.now() - days * DAY if days else 0.0
    view, trouble = _read(policy, kernels, since)
    state.reading = trouble
    unsaved, by_id = state.unsaved, {k.id: k for k in kernels}
    rows = [m for m in unsaved.rows.values()
            if m.kernel in by_id and m.build == build_of(by_id[m.kernel]) and m.at >= since]
    if rows or unsaved.rates:
        view = view.including(rows, {place: rates for place, (rates, _) in unsaved.rates.items()})
    return view, [trouble] if trouble is not None else []


def _read(policy: Policy, kernels: Sequence[Kernel],
          since: float) -> tuple[PerfView, StoreTrouble | None]:
    try:
        target = location(policy)
        if target is None or (isinstance(target, Path) and not target.exists()):
            return PerfView(), None
    except (LayerZeroError, OSError) as e:
        name = without_password(policy.setting("perfdb"))
        return PerfView(), _trouble(name, e, "choices are made without measurements")

    builds = {k.id: build_of(k) for k in kernels}      # reads the source of each
    damaged = DamagedRows(target)
    try:
        with open_location(target, READ_SECONDS, read_only=True) as store:
            return store.view(builds, since, damaged), damaged.loaded()
    except CorruptStore as e:
        state.damaged = e
        return PerfView(), _trouble(without_password(target), e, DAMAGED_ACTION)
    except StoreError as e:
        return PerfView(), _trouble(without_password(target), e,
                                    "choices are made without measurements")


class DamagedRows:
    """Called when a view meets damage, on loading or in a selection, which goes on without it."""

    def __init__(self, target: Path | str) -> None:
        self.target = target
        self.loading = True
        self.trouble: StoreTrouble | None = None

    def __call__(self, problem: str) -> None:
        if isinstance(self.target, Path):
            state.damaged = CorruptStore(self.target, problem, None)
            self.trouble = _trouble(without_password(self.target), state.damaged, DAMAGED_ACTION)
        else:
            error = StoreError(problem)
            self.trouble = _trouble(without_password(self.target), error,
                                    "choices are made without such rows")
        if not self.loading:
            state.reading = self.trouble
            events.emit(self.trouble)

    def loaded(self) -> StoreTrouble | None:
        self.loading = False
        return self.trouble


DAMAGED_ACTION = (
    "choices are made without its measurements; it is set aside when something is to be "
    "written, or by lz perf prune")


def _trouble(name: str, error: Exception, action: str) -> StoreTrouble:
    state.retry_at = time.monotonic() + RETRY_SECONDS
    return StoreTrouble(store=name, problem=str(error), action=action)


class MeasuredWorld(Protocol):
    """The part of a world that measurements depend on."""

    @property
    def policy(self) -> Policy: ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def perf(self) -> PerfView: ...


def reload_if_needed(old: MeasuredWorld, new: MeasuredWorld) -> tuple[PerfView, list[Event]]:
    """Returns the measurements for the settings and kernels of `new`, its own if unchanged."""
    names = ("perfdb", "perfdb_ttl")
    if any(old.policy.setting(name) != new.policy.setting(name) for name in names):
        return load(new.policy, new.catalog.kernels)
    if new.catalog is old.catalog:
        return new.perf, []
    added = [k for k in new.catalog.kernels if old.catalog.by_id.get(k.id) is not k]
    if not added or (state.reading is not None and time.monotonic() < state.retry_at):
        return new.perf, []
    perf, problems = load(new.policy, added)
    if not perf and not new.perf:
        return new.perf, problems
    return new.perf.including(perf, builds={k.id: build_of(k) for k in added}), problems


# measurements that ship with the package

def shipped_measurements(catalog: Catalog, device: Device, place: str) -> Shipped:
    """Returns the shipped measurements for this device model, if the installed versions fit."""
    table, refused = shipped_table(catalog, device)
    if table is None or refused:
        return Shipped()
    unsuitable = {distribution for distribution, versions in table.libraries().items()
                  if not satisfies(installed_version(distribution) or "", versions)}
    kernels = {k.id for k in catalog.kernels if (k.distribution or k.package) not in unsuitable}
    return Shipped(table.view(place, kernels), table.title)


def shipped_table(catalog: Catalog, device: Device) -> tuple[ShippedTable | None, str]:
    """Returns the table for this device model, and why it does not apply here ("" if it does)."""
    threads = torch.get_num_threads()
    matching = [table for table in tables(catalog, device) if table.is_for(device)]
    refusals = [(table, table.refusal(device, threads, satisfies)) for table in matching]
    return min(refusals, key=lambda pair: bool(pair[1]), default=(None, ""))


def tables(catalog: Catalog, device: Device) -> tuple[ShippedTable, ...]:
    """Returns every table of the package, with the rows of those for this device model. One that
    cannot be read is skipped with an event."""
    valid = []
    for path in sorted(files.FOLDER.glob("*.json")):
        try:
            table = files.read(path, catalog.ops, device)
            if invalid := [text for text in table.versions.values() if not is_version_range(text)]:
                raise DataError(f"{path.name}: versions must be like '>=2.9,<2.14', got "
                                f"{', '.join(invalid)}")
            valid.append(table)
        except DataError as e:
            events.emit(StoreTrouble(store=path.name, problem=str(e),
                                     action="it is left out; reinstall layerzero"))
    return tuple(valid)
