"""The store of measurements that the setting `perfdb` names, and its way into the world.

It is opened when a world is made, when a setting or a kernel changes, and when something was measured; never by a
call that finds its choice in the cache. A store that cannot be used costs its measurements and nothing else: that
is an event, and `lz doctor` says it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..perf.record import Measurement, PerfView, Rates, place_of
from ..select.engine import Shipped
from ..select.policy import Policy
from ..spec.device import Device
from ..spec.errors import ConfigError, DataError, LayerZeroError
from ..spec.event import Event, StoreTrouble
from ..spec.kernel import Kernel
from ..spec.op import Op
from . import config, events, hardware
from .builds import build_of
from .loading import installed_version, satisfies
from .machine import machine_id, state_of

if TYPE_CHECKING:
    from ..perf.interface import CorruptStore, Store
    from ..perf.shipped import Table
    from .catalog import Catalog
    from .context import Override
    from .world import World

FILE = "perf.sqlite"
OFF = "off"
DAY = 86400.0
READ_SECONDS, WRITE_SECONDS = 2.0, 10.0        # to wait for another process; the first call waits for the reading
RETRY_SECONDS = 60.0                           # after which a store that failed is asked again
STATE_SECONDS = 10.0                           # for so long the state of the machine is taken to be the same

_trouble: StoreTrouble | None = None           # the last one, until the store works again
_retry_at = 0.0
looks_only = False                             # set by commands that must not write: a store is read as it is
_environments: dict[str, tuple[float, Catalog, dict[str, Any]]] = {}


def location(policy: Policy) -> Path | str | None:
    """Where measurements are: a file, the address of a server, or None where they are kept in memory only."""
    text = str(policy.setting("perfdb")).strip()
    if not text:
        return config.cache_dir() / FILE
    if text.lower() == OFF:
        return None
    if text.startswith(("postgresql://", "postgresql+")):
        return text
    if "://" in text:
        raise ConfigError(f"perfdb: wanted a path, {OFF!r}, or postgresql://..., got {text.partition('://')[0]}://...")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"perfdb: cannot expand {text!r}: {e}; write an absolute path") from e


def store() -> Store:
    """The store of the current setting, opened; close it. Made if there is none yet."""
    from . import world as worlds
    where = location(worlds.current().policy)
    if where is None:
        raise ConfigError(f"perfdb is {OFF!r}: there is no store; set perfdb to a path, or to '' for the default one")
    return opened(where, WRITE_SECONDS)


@contextmanager
def using() -> Iterator[Store]:
    """The store, for a while. If it turns out to be damaged it is set aside and begun anew, and the error says so."""
    from ..perf.interface import CorruptStore, StoreError
    from . import world as worlds
    where = location(worlds.current().policy)
    try:
        with store() as found:
            yield found
    except CorruptStore as e:
        if not isinstance(where, Path) or e.path != where:
            raise                              # another file, read meanwhile
        for event in _rebuilt(where, e):
            events.emit(event)
        raise StoreError(f"{e}; {_trouble.action if _trouble else ''}") from e


def opened(where: Path | str, timeout: float = WRITE_SECONDS, read_only: bool = False) -> Store:
    from ..perf.store import SqliteStore
    if isinstance(where, Path):
        return SqliteStore(where, timeout, read_only)
    from ..perf.fleet import FleetStore
    return FleetStore(where, timeout)


# into the world

def load(policy: Policy, kernels: Sequence[Kernel]) -> tuple[PerfView, list[Event]]:
    """What the store has of these kernels as they are built today, and what went wrong."""
    try:
        where = location(policy)
        if where is None or (isinstance(where, Path) and not where.exists()):
            return PerfView(), _works()
    except (LayerZeroError, OSError) as e:
        return PerfView(), _failed(shown(policy.setting("perfdb")), e, "measurements are kept in memory only")
    from ..perf.interface import CorruptStore, StoreError
    days = policy.setting("perfdb_ttl")
    builds, since = {k.id: build_of(k) for k in kernels}, time.time() - days * DAY if days else 0.0
    try:
        if looks_only and isinstance(where, Path):
            from ..perf import snapshot
            return snapshot.view(where, builds, since, READ_SECONDS), _works()
        with opened(where, READ_SECONDS) as found:
            view = found.view(builds, since)
        return view, _works()
    except CorruptStore as e:
        if looks_only:
            return PerfView(), _failed(shown(where), e, "it is left as it is; choices are made without measurements")
        return PerfView(), _rebuilt(where, e)
    except StoreError as e:
        return PerfView(), _failed(shown(where), e, "choices are made without measurements")


def shipped(catalog: Catalog, device: Device, place: str) -> Shipped:
    """The measurements that came with the package for this model of device, where its versions are those here."""
    table, refused = applicable(catalog, device)
    if table is None or refused:
        return Shipped()
    outside = {distribution for distribution, wanted in table.libraries().items()
               if not satisfies(installed_version(distribution) or "", wanted)}
    kernels = {k.id for k in catalog.kernels if (k.distribution or k.package) not in outside}
    return Shipped(table.view(place, kernels), table.title)


def applicable(catalog: Catalog, device: Device) -> tuple[Table | None, str]:
    """The table of this model of device, and why it does not count here ("" where it does)."""
    threads = torch.get_num_threads()
    found = [table for table in tables(catalog) if table.is_for(device)]
    refusals = [(table, table.refusal(device, threads, satisfies)) for table in found]
    return min(refusals, key=lambda pair: bool(pair[1]), default=(None, ""))


def tables(catalog: Catalog) -> tuple[Table, ...]:
    """Every table of the package. One that cannot be read is an event, and costs itself."""
    from ..perf import shipped as files
    found = []
    for path in sorted(files.FOLDER.glob("*.json")):
        try:
            found.append(files.read(path, catalog.ops))
        except DataError as e:
            events.emit(StoreTrouble(store=path.name, problem=str(e), action="it is left out; reinstall layerzero"))
    return tuple(found)


def follow(old: World, new: World) -> tuple[World, list[Event]]:
    """`new` with the measurements that its settings and its kernels call for."""
    if any(old.policy.setting(name) != new.policy.setting(name) for name in ("perfdb", "perfdb_ttl")):
        perf, told = load(new.policy, new.catalog.kernels)
        return replace(new, perf=perf), told
    if new.catalog is old.catalog:
        return new, []
    added = [k for k in new.catalog.kernels if old.catalog.by_id.get(k.id) is not k]
    if not added or (_trouble is not None and time.monotonic() < _retry_at):
        return new, []
    perf, told = load(new.policy, added)
    if not perf and not new.perf:
        return new, told
    return replace(new, perf=new.perf.including(perf, builds={k.id: build_of(k) for k in added})), told


def record(measurements: Iterable[Measurement], rates: Mapping[str, Rates] | None = None) -> None:
    """Keep what was measured, and let it decide from now on.

    Build, time and environment are filled in where they are empty. If the store cannot be written, this process
    uses them all the same.
    """
    from . import world as worlds
    world, now = worlds.current(), time.time()
    environments: dict[str, dict[str, Any]] = {}
    rows = [_filled(m, world, now, environments).checked() for m in measurements]
    rates = dict(rates or {})
    if not rows and not rates:
        return
    for event in _kept(world.policy, rows, environments, {place: (r, now) for place, r in rates.items()}):
        events.emit(event)
    worlds.publish(lambda w: w.but(perf=w.perf.including(rows, rates)), "measured")


def heeded(world: World, op: Op, facts: Mapping[str, Any], rows: Sequence[Measurement], group: Collection[str],
           override: Override | None = None) -> tuple[tuple[Measurement, ...], str]:
    """The rows, and what selection makes of them, which is to be one of the `group`.

    It mixes a noisy time with a guess. The noise of single samples must not undo a verdict over many, so the spread
    is made smaller until it does not.
    """
    rows, timed = tuple(rows), {m.kernel for m in rows}
    while True:
        after = world.but(perf=world.perf.including(rows), warmed=world.warmed | timed)
        chosen = after.plan(op, facts, override).kernel or ""
        if chosen in group or chosen not in timed or max(m.spread for m in rows) < 1e-6:
            return rows, chosen
        rows = tuple(m._replace(spread=m.spread / 2) for m in rows)


def forget_measurements() -> None:
    """This process decides without measurements from now on. The store keeps them (`lz perf prune` removes them)."""
    from . import world as worlds
    worlds.publish(lambda w: w.but(perf=PerfView()), "measured")


def reload_measurements() -> None:
    """Read the store anew: another process may have measured."""
    from . import world as worlds
    perf, told = load(worlds.current().policy, worlds.current().catalog.kernels)
    worlds.publish(lambda w: w.but(perf=perf), "measured")
    for event in told:
        events.emit(event)


def _filled(m: Measurement, world: World, now: float, environments: dict[str, dict[str, Any]]) -> Measurement:
    from ..perf.interface import environment_id
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


def _kept(policy: Policy, rows: list[Measurement], environments: Mapping[str, Mapping[str, Any]],
          rates: Mapping[str, tuple[Rates, float]]) -> list[Event]:
    from ..perf.interface import CorruptStore, StoreError
    told: list[Event] = []
    try:
        where = location(policy)
    except ConfigError as e:
        return _failed(shown(policy.setting("perfdb")), e, "they are kept in memory only")
    if where is None:
        return told
    for last in (False, True):                 # a damaged file is replaced by a new one, and that is written
        try:
            with opened(where) as found:
                found.write(rows, environments, rates)
            return told + _works()
        except CorruptStore as e:
            told += _rebuilt(where, e)
            if last:
                break
        except StoreError as e:
            return told + _failed(shown(where), e, "they are kept in memory only")
    return told


# when something is wrong

def _works() -> list[Event]:
    global _trouble
    _trouble = None
    return []


def _failed(name: str, error: Exception, action: str) -> list[Event]:
    global _trouble, _retry_at
    _trouble, _retry_at = StoreTrouble(store=name, problem=str(error), action=action), time.monotonic() + RETRY_SECONDS
    return [_trouble]


def _rebuilt(where: Path | str, error: CorruptStore) -> list[Event]:
    """Put a damaged file aside and begin a new one."""
    from ..perf.interface import StoreError
    from ..perf.store import set_aside
    if not isinstance(where, Path):
        return _failed(shown(where), error, "choices are made without measurements")
    try:
        aside = set_aside(where, error.file)
        opened(where).close()
    except (OSError, StoreError) as e:
        return _failed(str(where), error, f"it could not be set aside ({e}); choices are made without measurements")
    action = f"set aside as {aside.name}; begun anew" if aside else "another process has begun it anew"
    return _failed(str(where), error, action)


def shown(where: Path | str) -> str:
    """For messages: an address without its password."""
    scheme, sign, rest = str(where).partition("://")
    return f"{scheme}{sign}{rest.rpartition('@')[2]}"


@dataclass(frozen=True)
class Status:
    ok: bool
    text: str
    hint: str = ""


def status() -> Status:
    """For the doctor: where measurements are, how many count here, and what is wrong."""
    from . import world as worlds
    world = worlds.current()
    if _trouble is not None:
        return Status(False, f"{_trouble.store}: {_trouble.problem}", _trouble.action)
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


# where and when

def environment(kind: str) -> dict[str, Any]:
    """Everything a measurement on this machine's `kind` of device may depend on, and the state it is in now."""
    from . import world as worlds
    from .capabilities import capabilities_hash, export
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
        from . import world as worlds
        world = worlds.current()
        days = world.policy.setting("perfdb_ttl")
        self.since = time.time() - days * DAY if days else 0.0
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
