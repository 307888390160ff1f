"""`lz perf`: show, prune, export and import the measurements."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....machine import hardware
from ....perf.ownership import SQLITE
from ....perf.record import Measurement
from ....plan.places import places
from ....spec.display import plural
from ....spec.errors import DataError
from ....spec.names import names_kernel
from ....world import measurements
from ....world.perf_loading import DAY, open_location
from ... import show


def show_rows(kernel: str, op: str, everything: bool, limit: int, as_json: bool) -> int:
    with measurements.open_store(read_only=True) as store:
        rows, environments = list(store.rows(kernel=kernel, op=op)), store.environments()
        rates, name = store.rates(), store.name
    status = measurements.RowStatus(environments)
    judged = [(m, status.of(m)) for m in rows]
    counts = Counter(s for _, s in judged)
    shown = [(m, s) for m, s in judged if everything or s == measurements.IN_USE]
    shown.sort(key=lambda x: (x[0].op, x[0].bucket, x[0].place, x[0].median_us))
    if as_json:
        show.as_json({"store": name, "counts": dict(counts),
                      "rates": {p: r._asdict() for p, r in rates.items()},
                      "measurements": [{**m._asdict(), "standing": s} for m, s in shown]})
        return 0
    show.heading(f"{name}: " + (", ".join(f"{n} {s}" for s, n in counts.most_common())
                                or "no measurements"))
    cut = shown[:limit] if limit else shown
    show.table(("op", "kind of call", "kernel", "us", "spread", "samples", "age", "standing"),
               [(m.op, m.bucket, m.kernel, f"{m.median_us:.2f}", f"{100 * m.spread:.0f}%",
                 str(m.samples), _age(m), s)
                for m, s in cut], right=("us", "spread", "samples", "age"))
    if len(cut) < len(shown):
        show.text(f"... and {len(shown) - len(cut)} more; --limit 0 shows all")
    return 0


def show_places(as_json: bool) -> int:
    with measurements.open_store(read_only=True) as store:
        known, name = places(store.rows(), store.environments()), store.name
    if as_json:
        show.as_json({"store": name, "places": [p.to_json() for p in known]})
        return 0
    here = {device.signature for device in hardware.all_devices()}
    show.heading(f"{name}: {len(known)} places" if known else f"{name}: no measurements")
    show.table(("place", "device", "threads", "measurements", "machines", ""), [
        (p.place, p.device, str(p.threads or ""), str(p.measurements), ", ".join(p.machines),
         "this machine's" if measurements.signature_of(p.place) in here else "")
        for p in known], right=("threads", "measurements"))
    return 0


def prune(kernel: str, older_than: float | None, everything: bool, dry_run: bool,
          as_json: bool) -> int:
    before = time.time() - older_than * DAY if older_than is not None else 0.0
    with measurements.open_store(read_only=dry_run) as store:
        status = measurements.RowStatus(store.environments())

        def unwanted(m: Measurement) -> bool:
            return names_kernel(kernel, m.kernel) and (
                everything or m.at < before or status.of(m).startswith(("stale", "expired")))

        count = sum(map(unwanted, store.rows())) if dry_run else store.prune(unwanted)
    return _say(as_json, f"{plural(count, 'measurement')} {'would be ' if dry_run else ''}removed",
                removed=0 if dry_run else count, matched=count)


def export(path: Path, as_json: bool) -> int:
    with measurements.open_store(read_only=True) as store:
        count = store.export(path)
    return _say(as_json, f"{plural(count, 'measurement')} written to {path}", written=count,
                path=str(path))


def import_rows(paths: Sequence[Path], as_json: bool) -> int:
    counts: dict[str, int] = {}
    for path in paths:
        database = _is_database(path)
        with measurements.open_store() as store:
            if database:
                with open_location(path, read_only=True) as other:
                    count = store.merge(other)
            else:
                count = store.import_(path)
        counts[str(path)] = count
    return _say(as_json, "\n".join(f"{plural(n, 'measurement')} read from {p}"
                                   for p, n in counts.items()), read=counts)


def _say(as_json: bool, text: str, **data: Any) -> int:
    show.as_json(data) if as_json else show.text(text)
    return 0


def _is_database(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a FIFO would block; read_lines reports it
            return False
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError as e:
        raise DataError(f"{path}: cannot read the measurements: {e.strerror}") from e


def _age(m: Measurement) -> str:
    hours = (time.time() - m.at) / 3600
    return (f"{hours / 24:.0f} d" if hours >= 48 else f"{hours:.0f} h" if hours >= 1
            else f"{60 * hours:.0f} min")
