"""The store of a fleet, against a real PostgreSQL that is started for these tests where it is
installed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time

import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra layerzero[fleet]")
if not any(importlib.util.find_spec(name) for name in ("psycopg", "pg8000", "psycopg2")):
    pytest.skip("needs a driver for PostgreSQL: the extra layerzero[fleet]",
                allow_module_level=True)

from postgres import admin, free_port

import layerzero as lz
from layerzero.perf.fleet import FleetStore
from layerzero.perf.interface import NewerStore, StoreError
from layerzero.perf.record import Measurement, Rates
from layerzero.perf.store import SqliteStore
from layerzero.spec.errors import DataError
from layerzero.spec.event import StoreTrouble
from layerzero.world import measurements
from layerzero.world import snapshot as worlds
from layerzero.world.perf_loading import state

pytestmark = pytest.mark.integration


@pytest.fixture
def store(url):
    with FleetStore(url) as opened:
        yield opened


def measured(i: int = 0, kernel: str = "torch.k", **changes) -> Measurement:
    row = Measurement(kernel, "rms_norm", f"float32 rows={i}", "0123456789abcdef-4t", 10.0 + i / 3,
                      0.02, 50, "float32", f"rows={i}", 1e6 / 7, 1e4, 12.5, 13.0, 0.0, "v1",
                      1.7e9 + i, "")
    return row._replace(**changes)


def test_it_does_what_the_file_does(store, tmp_path):
    """The same story told to both; they end up with the same."""
    def tell(target):
        target.put([measured(i, f"lib.k{i % 3}") for i in range(30)],
                   {"machine": "a", "state": {"load": 0.5}})
        target.put([measured(1, "lib.k1", at=1.71e9, median_us=7.0),
                    measured(2, "lib.k2", at=1.0, median_us=8.0)])
        target.put([measured(4, "lib.k1", at=1.71e9, spread=0.9),
                    measured(5, "lib.k2", build="v2")],
                   {"machine": "b"})
        # twice in one go
        target.put([measured(9, at=5.0), measured(9, at=9.0, median_us=3.0), measured(9, at=7.0)])
        target.write((), {}, {"here": (Rates(1e5, 1 / 3), 10.0)})
        target.write((), {}, {"here": (Rates(1.0, 1.0), 5.0), "there": (Rates(2.0, 3.0), 5.0)})
        removed = target.prune(lambda m: m.kernel == "lib.k0", before=1.7e9 + 10)
        builds = {"lib.k0": "v1", "lib.k1": "v1", "lib.k2": "v2", "torch.k": "v1"}
        view = target.view(builds, since=8.0)
        some = measured(1, "lib.k1")
        return (removed, sorted(target.rows()), target.environments(), target.timed_rates(),
                sorted(view), len(view), dict(view.rates), sorted(target.rows(kernel="lib.*2")),
                target.get("lib.k1", some.bucket, some.place),
                target.get("lib.k2", measured(5).bucket, some.place, "v2"),
                target.get("lib.k1", "none", some.place))

    with SqliteStore(tmp_path / "p.sqlite") as file:
        assert tell(store) == tell(file)


@pytest.mark.parametrize("changes", [{"median_us": float("nan")}, {"kernel": ""},
                                     {"family": "a\0b"}])
def test_what_no_measurement_can_be_is_refused_and_nothing_is_written(store, changes):
    with pytest.raises(DataError):
        store.put([measured(1), measured(2, **changes)])
    assert list(store.rows()) == []


def test_a_row_that_someone_else_spoilt_is_not_believed(store, url, server):
    """It costs itself, and no other row."""
    store.put([measured(1), measured(2)])
    spoil = "UPDATE layerzero_measurements SET median_us = 'NaN' WHERE sizes = 'rows=1'"
    admin(server, spoil, url.rpartition("/")[2])
    messages: list[str] = []
    assert list(store.view({"torch.k": "v1"}, on_damage=messages.append)) == [measured(2)]
    assert len(messages) == 1 and "median_us" in messages[0]
    with pytest.raises(StoreError, match="median_us"):
        list(store.rows())


def test_whoever_only_reads_makes_no_tables_and_writes_nothing(url, server):
    with FleetStore(url, read_only=True) as reader:
        assert list(reader.rows()) == [] and reader.environments() == {} and reader.rates() == {}
        assert reader.get("torch.k", "b", "p") is None and not reader.view({"torch.k": "v1"})
        with pytest.raises(StoreError, match="opened to be read"):
            reader.put([measured(1)])
    database = url.rpartition("/")[2]
    count = "SELECT 1 / (1 - sign(count(*))::int) FROM pg_tables WHERE tablename LIKE 'layerzero%'"
    admin(server, count, database)             # divides by zero where there is one
    with FleetStore(url) as store:
        store.put([measured(1)])
    with FleetStore(url, read_only=True) as reader:
        assert list(reader.rows()) == list(reader.view({"torch.k": "v1"})) == [measured(1)]
        with pytest.raises(StoreError, match="opened to be read"):
            reader.delete([measured(1)])


def test_a_row_of_the_future_gives_way_to_what_is_measured_today(store, url, server):
    """Some machine's clock was ahead."""
    store.put([measured(1)])
    store.write((), {}, {"here": (Rates(1.0, 1.0), time.time())})
    for table in ("measurements", "rates"):
        admin(server, f"UPDATE layerzero_{table} SET at = 4e9", url.rpartition("/")[2])
    (seen,) = store.view({"torch.k": "v1"})
    assert seen.at <= time.time()
    store.put([measured(1, median_us=2.0)])
    store.write((), {}, {"here": (Rates(2.0, 2.0), time.time())})
    assert [m.median_us for m in store.rows()] == [2.0]
    assert store.rates() == {"here": Rates(2.0, 2.0)}


def test_export_import_and_merge_go_between_a_file_and_the_fleet(store, tmp_path):
    with SqliteStore(tmp_path / "p.sqlite") as file:
        file.put([measured(i) for i in range(1200)], {"machine": "a"})         # more than one batch
        file.write((), {}, {"here": (Rates(1.0, 2.0), 3.0)})
        assert store.merge(file) == store.merge(file) == 1200
        assert sorted(store.rows()) == sorted(file.rows())
        store.export(tmp_path / "x.jsonl")
    with SqliteStore(tmp_path / "q.sqlite") as other:
        other.import_(tmp_path / "x.jsonl")
        assert (sorted(other.rows()) == sorted(store.rows())
                and other.environments() == store.environments())
        assert other.timed_rates() == store.timed_rates()


WRITER = """
import sys
from layerzero.perf.fleet import FleetStore
from layerzero.perf.record import Measurement
url, who = sys.argv[1], int(sys.argv[2])
for batch in range(20):
    numbers = range(1000 * who + 15 * batch, 1000 * who + 15 * batch + 15)
    rows = [Measurement("torch.k", "rms_norm", f"b{n}", "here", 5.0, build="v1", at=1.0) for n in numbers]
    rows += [Measurement("torch.k", "rms_norm", f"all{n}", "here", 5.0, build="v1", at=1.0 + batch) for n in range(9)]
    with FleetStore(url) as store:
        store.put(rows[::1 if who % 2 else -1], {"who": who})
"""


def test_machines_that_write_at_once_lose_nothing(url):
    """All of them begin with an empty database, and all write some rows in common, in opposite
    order."""
    others = [subprocess.Popen([sys.executable, "-c", WRITER, url, str(who)],
                               stderr=subprocess.PIPE, text=True)
              for who in range(4)]
    for other in others:
        _, stderr = other.communicate(timeout=240)
        assert other.returncode == 0, stderr
    with FleetStore(url) as store:
        kept = {m.bucket: m for m in store.rows()}
    assert kept.keys() == {f"b{1000 * w + i}" for w in range(4)
                           for i in range(300)} | {f"all{n}" for n in range(9)}
    assert {kept[f"all{n}"].at for n in range(9)} == {20.0}


def test_a_fleet_of_a_later_release_is_refused_and_left_alone(store, url, server):
    store.put([measured(1)])
    admin(server, "INSERT INTO layerzero_schema VALUES (99)", url.rpartition("/")[2])
    with pytest.raises(NewerStore, match=r"schema 99.*upgrade layerzero") as e:
        FleetStore(url)
    assert "secret" not in str(e.value)
    assert len(list(store.rows())) == 1


@pytest.fixture
def world():
    """What the test configures is gone after it."""
    from dataclasses import replace
    saved = worlds.current()
    yield
    worlds.publish(lambda w: replace(saved, epoch=w.epoch + 1, changed=w.epoch + 1, memo={}),
                   "end of a test")


@pytest.mark.usefixtures("world")
def test_the_setting_serves_calls_from_the_fleet(url, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure(perfdb=url)
    place = worlds.current().place("cpu")
    measurements.record([measured(1, "reference.rms_norm", place=place, build="")],
                        {place: Rates(1e5, 1e4)})
    measurements.forget_measurements()
    assert len(worlds.current().perf) == 0
    measurements.reload_measurements()
    (result,) = worlds.current().perf
    assert (result.kernel == "reference.rms_norm"
            and worlds.current().perf.rates == {place: Rates(1e5, 1e4)})
    assert measurements.status().ok and "secret" not in measurements.status().text
    with measurements.store() as store:
        (environment,) = store.environments().values()
    assert environment["place"] == place


@pytest.mark.usefixtures("world")
def test_what_was_measured_while_the_server_was_away_is_written_when_it_is_back(
        url, server, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    name = url.rpartition("/")[2]
    admin(server, f"ALTER DATABASE {name} RENAME TO {name}_away")
    lz.configure(perfdb=url)
    measurements.record([measured(1)])
    measurements.record([measured(2)], {"here": Rates(1.0, 2.0)})
    assert len(state.unsaved) == 3
    assert "3 measurements are kept in memory" in measurements.status().hint
    admin(server, f"ALTER DATABASE {name}_away RENAME TO {name}")
    measurements.retry_save()
    assert not state.unsaved and measurements.status().ok
    with FleetStore(url, read_only=True) as reader:
        assert sorted(reader.rows()) == [measured(1), measured(2)]
        assert reader.rates() == {"here": Rates(1.0, 2.0)}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("wrong", ["nobody", "nowhere", "unreadable"])
def test_a_server_that_does_not_answer_costs_its_measurements_only(url, wrong, monkeypatch,
                                                                   tmp_path):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    address = {"nobody": url.rpartition("/")[0] + "/no_such_database",
               "nowhere": f"postgresql://lz:secret@127.0.0.1:{free_port()}/x",
               "unreadable": "postgresql://lz:x@:::/"}
    seen: list = []
    stop = lz.subscribe(seen.append)
    lz.configure(perfdb=address[wrong])
    measurements.record([measured(1)])
    stop()
    events = [e for e in seen if isinstance(e, StoreTrouble)]
    assert len(events) == 2 and "secret" not in str(events)
    assert [m.sizes for m in worlds.current().perf] == ["rows=1"]
    assert not measurements.status().ok
