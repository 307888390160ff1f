"""The store of measurements: what it keeps, several processes at once, damaged files, other
releases.
"""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import struct
import threading
import time
from pathlib import Path

import pytest
from helpers import Program, events_of, python, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import measurement

import layerzero as lz
from layerzero.perf import ownership, schema
from layerzero.perf.interface import CorruptStore, NewerStore, StoreError
from layerzero.perf.record import PerfView, Rates
from layerzero.perf.store import SqliteStore, set_aside
from layerzero.spec.errors import DataError
from layerzero.spec.event import StoreTrouble
from layerzero.world import measurements
from layerzero.world import snapshot as worlds

ENVIRONMENT = {"device": {"name": "a processor"}, "machine": "here", "state": {"load_average": 0.5}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "perf.sqlite"


@pytest.fixture
def store(path):
    with SqliteStore(path) as opened:
        yield opened


@pytest.fixture
def perfdb(path, monkeypatch, world):
    """The setting names a file of the test's own; nothing of the user's is read or written."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(path.parent.parent / "cache"))
    lz.configure(perfdb=str(path))
    return path


# what goes in comes out

def test_a_row_comes_back_as_it_was(store):
    rows = [measurement(i, median_us=1 / 3 + i) for i in range(5)]
    store.put(rows, ENVIRONMENT)
    (name, environment), = store.environments().items()
    want = [m._replace(environment=name) for m in rows]
    assert environment == ENVIRONMENT
    assert sorted(store.rows()) == sorted(want)
    assert store.get("torch.k", want[3].bucket, want[3].place) == want[3]
    view = store.view({"torch.k": "v1"})
    assert sorted(view) == sorted(want) and len(view) == 5
    assert view.get("torch.k", want[3].bucket, want[3].place) == want[3]
    assert store.get("torch.k", "float32", want[3].place) is None
    assert view.get("torch.other", want[3].bucket, want[3].place) is None


def test_rows_are_found_by_pattern(store):
    store.put([measurement(0, "torch.a"), measurement(0, "torch.b", op="linear"),
               measurement(0, "lib.a", place="elsewhere")])
    assert {m.kernel for m in store.rows(kernel="torch.*")} == {"torch.a", "torch.b"}
    assert {m.kernel for m in store.rows(op="linear")} == {"torch.b"}
    assert {m.kernel for m in store.rows(place="else*")} == {"lib.a"}


def test_rates_belong_to_a_place_and_the_newest_counts(store):
    store.write((), {}, {"here": (Rates(1e5, 2e4), 100.0)})
    store.write((), {}, {"here": (Rates(9e5, 9e4), 50.0), "there": (Rates(3.0, 4.0), 50.0)})
    assert store.rates() == {"here": Rates(1e5, 2e4), "there": Rates(3.0, 4.0)}
    assert store.view({}).rates["here"] == Rates(1e5, 2e4)


@pytest.mark.parametrize(("changes", "word"), [
    ({"median_us": float("nan")}, "median_us"), ({"median_us": 0.0}, "median_us"),
    ({"spread": -1.0}, "spread"), ({"flops": float("inf")}, "flops"), ({"samples": 0}, "samples"),
    ({"kernel": ""}, "kernel"), ({"place": None}, "place"), ({"at": "now"}, "at"),
    ({"median_us": True}, "median_us"), ({"sizes": "rows=many"}, "sizes"),
    ({"family": "a\0b"}, "family"),
])
def test_what_no_measurement_can_be_is_refused_and_nothing_is_written(store, changes, word):
    with pytest.raises(DataError, match=word):
        store.put([measurement(1), measurement(2, **changes)])
    assert list(store.rows()) == []


def test_a_measurement_from_the_future_is_not_the_newest_for_ever(store):
    store.put([measurement(at=time.time() + 1e9)])
    later = measurement(median_us=5.0, at=time.time())
    time.sleep(0.01)
    store.put([later._replace(at=time.time())])
    assert next(store.rows()).median_us == 5.0


# two measurements of the same thing

@pytest.mark.parametrize(("first", "second", "left"), [
    ({"at": 100.0}, {"at": 200.0}, 1), ({"at": 200.0}, {"at": 100.0}, 0),
    ({"at": 100.0, "spread": 0.05}, {"at": 200.0, "spread": 0.8}, 0),          # newer, but noisy
    ({"at": 200.0, "spread": 0.8}, {"at": 100.0, "spread": 0.05}, 1),
    # both noisy: the newer
    ({"at": 100.0, "spread": 0.5}, {"at": 200.0, "spread": 0.8}, 1),
])
def test_the_newer_replaces_the_older_unless_it_is_noisy(store, first, second, left):
    pair = [measurement(median_us=1.0, **first), measurement(median_us=2.0, **second)]
    for m in pair:
        store.put([m])
    assert list(store.rows()) == list(PerfView(pair)) == [pair[left]]


def test_another_build_or_place_is_another_row(store):
    store.put([measurement(), measurement(build="v2"), measurement(place="other")])
    assert len(list(store.rows())) == 3
    store.put([measurement(build="v2", at=1.71e9, median_us=7.0)])
    assert sorted(m.median_us for m in store.rows()) == [7.0, 10.0, 10.0]
    newest = store.get("torch.k", measurement().bucket, measurement().place)
    assert (newest.build, newest.median_us) == ("v2", 7.0)
    assert store.get("torch.k", measurement().bucket, measurement().place, "v1").median_us == 10.0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), st.integers(1, 10**6)), max_size=8,
                unique_by=lambda x: x[2]), st.randoms())
def test_in_any_order_the_same_is_left(tmp_path_factory, drawn, random):
    rows = [measurement(i, spread=spread, at=float(at)) for i, spread, at in drawn]
    left = []
    for _ in range(2):
        with SqliteStore(tmp_path_factory.mktemp("db") / "p.sqlite") as store:
            for m in rows:
                store.put([m])
            left.append(sorted(store.rows()))
        random.shuffle(rows)
    assert left[0] == left[1] == sorted(PerfView(rows))


# a view

def test_a_view_does_not_change(store):
    store.put([measurement(1)])
    view = store.view({"torch.k": "v1"})
    store.put([measurement(1, median_us=99.0, at=1.71e9), measurement(2),
               measurement(3, "torch.new")])
    assert [m.median_us for m in view] == [measurement(1).median_us]
    more = view.including([measurement(7)], {"here": Rates(1.0, 2.0)})
    assert len(view) == 1 and len(more) == 2 and not view.rates
    assert more.get("torch.k", measurement(7).bucket, measurement(7).place) == measurement(7)


def test_only_todays_builds_count_and_only_those_rows_go(store):
    """A new version of one library takes its own measurements out of use, and nobody else's."""
    store.put([measurement(i, kernel) for kernel in ("lib.a", "lib.b",
                                                     "torch.k") for i in range(3)])
    old = store.view({"lib.a": "v1", "lib.b": "v1", "torch.k": "v1"})
    new = store.view({"lib.a": "v2", "lib.b": "v1", "torch.k": "v1"})
    assert {m.kernel for m in old} == {"lib.a", "lib.b", "torch.k"}
    assert set(old) - set(new) == {m for m in old if m.kernel == "lib.a"}
    assert len(new) == 6
    # they stay in the file until they are pruned
    assert len(list(store.rows())) == 9


def test_another_driver_is_another_place(store):
    device = lz.Device("cuda", 0, "a GPU", "nvidia", sm=90, gpu_generation="hopper",
                       driver_version="570.1")
    newer = lz.Device("cuda", 0, "a GPU", "nvidia", sm=90, gpu_generation="hopper",
                      driver_version="580.1")
    twin = lz.Device("cuda", 1, "a GPU", "nvidia", sm=90, gpu_generation="hopper",
                     driver_version="570.1")
    store.put([measurement(place=device.signature), measurement(place="0123456789abcdef-4t")])
    view = store.view({"torch.k": "v1"})
    bucket = measurement().bucket
    assert view.get("torch.k", bucket, newer.signature) is None
    assert view.get("torch.k", bucket, twin.signature) is not None
    assert view.get("torch.k", bucket, "0123456789abcdef-4t") is not None


def test_the_old_does_not_count_once_it_has_expired(store):
    store.put([measurement(1, at=100.0), measurement(2, at=300.0)])
    assert [m.at for m in store.view({"torch.k": "v1"}, since=200.0)] == [300.0]
    assert len(store.view({"torch.k": "v1"}, since=200.0)) == 1


def test_many_threads_may_ask_a_view(store):
    store.put([measurement(i, f"torch.k{k}") for k in range(6) for i in range(50)])
    view, wrong = store.view({f"torch.k{k}": "v1" for k in range(6)}), []

    def ask():
        for k, i in itertools.product(range(6), range(50)):
            m = view.get(f"torch.k{k}", measurement(i).bucket, measurement(i).place)
            if m is None or m.median_us != measurement(i).median_us:
                wrong.append((k, i))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_may_ask_a_view_of_its_parent(path):
    code = f"""
        import os, threading
        from layerzero.perf.record import Measurement
        from layerzero.perf.store import SqliteStore
        with SqliteStore({str(path)!r}) as store:
            store.put([Measurement(f"torch.k{{i}}", "rms_norm", "b", "here", 5.0, build="v1") for i in range(300)])
            view = store.view({{f"torch.k{{i}}": "v1" for i in range(300)}})
        asking = threading.Thread(target=lambda: [len(list(view)) for _ in range(3)])
        asking.start()
        for n in range(5):
            child = os.fork()
            if not child:
                os._exit(0 if sum(1 for _ in view) == 300 else 1)
            assert os.waitpid(child, 0)[1] == 0
        asking.join()
        print("done")
    """
    assert python(code) == "done"


# several processes

WRITER = """
import sys
from layerzero.perf.record import Measurement
from layerzero.perf.store import SqliteStore
path, who, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for batch in range(batches):
    numbers = range(1000 * who + 10 * batch, 1000 * who + 10 * batch + 10)
    with SqliteStore(path, timeout=60) as store:
        store.put([Measurement("torch.k", "rms_norm", f"float32 rows={n}", "here", 5.0, sizes=f"rows={n}", build="v1",
                               at=1.0 + batch) for n in numbers], {"who": who})
    print(batch, flush=True)
"""


def writer(path, who, batches, stdout):
    return Program("-c", WRITER, str(path), str(who), str(batches), stdout=stdout, stderr=2)


def test_processes_that_write_at_once_lose_nothing(path):
    """All of them begin with a file that is not there."""
    others = [writer(path, who, 30, stdout=2) for who in range(4)]
    assert [other.wait() for other in others] == [0] * 4
    with SqliteStore(path) as store:
        assert {m.sizes for m in store.rows()} == {f"rows={1000 * w + i}" for w in range(4)
                                                   for i in range(300)}
        assert len(store.environments()) == 4
        assert len(store.view({"torch.k": "v1"})) == 1200


def test_a_process_that_is_killed_loses_at_most_what_it_was_writing(path):
    for who in range(3):
        output, its = os.pipe()
        other = writer(path, who, 10**6, stdout=its)
        os.close(its)
        with open(output) as printed:
            lines = [printed.readline() for _ in range(8)]
            os.kill(other.pid, signal.SIGKILL)
            lines += printed.readlines()
        assert other.wait() == -signal.SIGKILL
        batches = [int(line) for line in lines if line.strip()]
        with SqliteStore(path) as store:
            lines = store.environments()
            kept = {int(m.sizes[5:]) - 1000 * who for m in store.rows()
                    if lines[m.environment] == {"who": who}}
            # what was said to be written is there
            assert set(range(10 * len(batches))) <= kept
            # and a batch is there as a whole or not at all
            assert len(kept) % 10 == 0
            assert len(store.view({"torch.k": "v1"})) == len(list(store.rows()))


def test_the_file_is_in_wal_mode_so_a_reader_does_not_wait_for_a_writer(store, path):
    store.put([measurement(1)])
    other = sqlite3.connect(path, isolation_level=None)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.execute("BEGIN IMMEDIATE")
    with SqliteStore(path, timeout=0.1) as reader:
        assert len(reader.view({"torch.k": "v1"})) == 1
        with pytest.raises(StoreError, match="locked"):
            reader.put([measurement(2)])
    other.execute("ROLLBACK")
    other.close()


# damaged files

def fill_store(path, n=400) -> bytes:
    with SqliteStore(path) as store:
        store.put([measurement(i, f"torch.k{i % 4}") for i in range(n)], ENVIRONMENT)
    # closed: everything is in the file itself
    assert not Path(f"{path}-wal").exists()
    return path.read_bytes()


def flip_byte(data: bytes, at: int, bit: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1:]


DAMAGES = {
    "cut in half": lambda data: data[:len(data) // 2],
    "cut inside a page": lambda data: data[:len(data) - 1000],
    "no name of its format in the header": lambda data: bytes(16) + data[16:],
    "a header of a format to come": lambda data: data[:18] + b"\7\7" + data[20:],
    "texts in another encoding": lambda data: data[:56] + b"\0\0\0\2" + data[60:],
    "a schema of before there were modes": lambda data: data[:60] + b"\0\0\0\2" + data[64:],
    "a schema below zero": lambda data: data[:60] + b"\xff" * 4 + data[64:],
    "a page torn in the middle": lambda data: data[:4096 * 8] + os.urandom(4096) + data[4096 * 9:],
    "zeros in place of a page": lambda data: data[:4096 * 5] + bytes(4096) + data[4096 * 6:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_by_whoever_writes_and_begun_anew(perfdb, emitted, damage):
    lz.configure(perfdb="off")
    data = DAMAGES[damage](fill_store(perfdb))
    perfdb.write_bytes(data)
    emitted.clear()
    lz.configure(perfdb=str(perfdb))
    (event,) = events_of(StoreTrouble, emitted)
    assert event.store == str(perfdb) and event.problem
    assert "when something is to be written" in event.action
    assert len(worlds.current().perf) == 0
    assert not measurements.status().ok
    lz.rms_norm(rows())                                        # calls go on
    assert [file.name for file in perfdb.parent.iterdir()] == ["perf.sqlite"]
    assert perfdb.read_bytes() == data
    measurements.record([measurement(1)])
    event = events_of(StoreTrouble, emitted)[-1]
    assert event.store == str(perfdb) and event.problem
    assert "set aside as perf.sqlite.corrupt-" in event.action
    (aside,) = perfdb.parent.glob("perf.sqlite.corrupt-*")
    assert aside.read_bytes() == data  # nothing is lost that someone may want to look at
    with SqliteStore(perfdb) as store:
        assert len(list(store.rows())) == 1
    assert measurements.status().ok and str(aside) in measurements.status().hint


# another character, and no character at all
@pytest.mark.parametrize("bit", [1, 0x80])
@pytest.mark.parametrize("place", [
    b"float32 rows=17 hidden=64", b"rows=17 hidden=64\x41", struct.pack(">d", 10 + 17 / 3)])
def test_a_changed_bit_in_a_row_is_noticed_and_the_row_not_believed(path, place, bit):
    """In its key, in its sizes, in its time.

    The structure of the file is whole, so that SQLite itself sees nothing.
    """
    data = fill_store(path)
    path.write_bytes(flip_byte(data, data.index(place) + 6, bit))
    with SqliteStore(path) as store:
        view = store.view({f"torch.k{i}": "v1" for i in range(4)})
        assert len(list(view)) == 399
        with pytest.raises(CorruptStore, match=r"damaged|decode"):
            list(store.rows())


def test_a_damaged_row_that_a_command_meets_sets_the_file_aside(perfdb, emitted):
    lz.configure(perfdb="off")
    data = fill_store(perfdb)
    perfdb.write_bytes(flip_byte(data, data.index(b"float32 rows=17 ") + 14))
    lz.configure(perfdb=str(perfdb))
    with pytest.raises(StoreError, match="set aside as"), measurements.open_store() as store:
        list(store.rows())
    assert len(events_of(StoreTrouble, emitted)) == 1
    with measurements.open_store() as store:
        assert list(store.rows()) == []


def test_damage_found_while_writing_costs_the_file_and_not_the_measurement(perfdb, emitted):
    perfdb.write_bytes(fill_store(perfdb)[:5000])
    measurements.record([measurement(1)])
    assert len(events_of(StoreTrouble, emitted)) == 1
    with SqliteStore(perfdb) as store:
        assert len(list(store.rows())) == 1


def test_of_two_processes_that_find_the_damage_one_sets_the_file_aside(path):
    path.write_bytes(bytes(16) + fill_store(path)[16:])
    results = []
    for _ in range(2):
        with pytest.raises(CorruptStore) as e:
            SqliteStore(path)
        results.append(e.value.file)
    assert set_aside(path, results[0]) is not None
    fill_store(path, 3)
    # it looked at the old one; the new one stays
    assert set_aside(path, results[1]) is None
    with SqliteStore(path) as store:
        assert len(list(store.rows())) == 3


def test_an_empty_file_is_a_new_store(path):
    path.parent.mkdir()
    path.write_bytes(b"")
    with SqliteStore(path) as store:
        store.put([measurement()])
        assert len(list(store.rows())) == 1


# other releases, other programs

def test_a_store_of_a_later_release_is_refused_and_left_alone(perfdb, emitted):
    lz.configure(perfdb="off")
    fill_store(perfdb)
    with sqlite3.connect(perfdb) as c:
        c.execute("PRAGMA user_version = 99")
    c.close()
    data = perfdb.read_bytes()
    with pytest.raises(NewerStore, match=r"schema 99.*upgrade layerzero"):
        SqliteStore(perfdb)
    emitted.clear()
    lz.configure(perfdb=str(perfdb))
    measurements.record([measurement(1)])
    assert ["schema 99" in e.problem for e in events_of(StoreTrouble, emitted)] == [True, True]
    assert len(worlds.current().perf) == 1                     # this process uses what it measured
    assert perfdb.read_bytes() == data and list(perfdb.parent.glob("*corrupt*")) == []


def test_the_database_of_another_program_is_not_touched(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as c:
        c.execute("CREATE TABLE friends (name TEXT)")
    c.close()
    data = path.read_bytes()
    with pytest.raises(StoreError, match="another program") as e:
        SqliteStore(path)
    assert not isinstance(e.value, CorruptStore)
    assert path.read_bytes() == data


@pytest.mark.parametrize("version", range(len(schema.MIGRATIONS)))
def test_an_older_store_is_brought_up_to_date_with_all_it_has(path, version):
    path.parent.mkdir()
    c = sqlite3.connect(path, isolation_level=None)
    for step in schema.MIGRATIONS[:version]:
        for statement in step:
            c.execute(statement) if isinstance(statement, str) else statement(c)
    c.execute(f"PRAGMA application_id = {ownership.APPLICATION_ID}")
    c.execute(f"PRAGMA user_version = {version}")
    kept = [measurement(i)._replace(place="cpu-2t") for i in range(5)] if version else []
    # Of a GPU, where nobody can tell how it was timed, before rows had a mode.
    others = [measurement(5)._replace(place="gpu")] if version else []
    columns = 18 if version < 3 else 19
    for m in (*kept, *others):
        row = tuple(m)[:columns - 1]
        c.execute(f"INSERT INTO measurements VALUES ({','.join('?' * columns)})",
                  (*row, schema.checksum(row)))
    c.close()
    before = path.read_bytes()
    # as it is, when it may not be changed
    with SqliteStore(path, read_only=True) as store:
        assert store.timed_rates() == {}
        assert sorted(store.rows()) == kept
    assert path.read_bytes() == before
    with SqliteStore(path) as store:
        assert sorted(store.rows()) == kept
        store.write((), {}, {"here": (Rates(1.0, 2.0), time.time())})
        assert store.rates() == {"here": Rates(1.0, 2.0)}
        assert store._version() == schema.VERSION
