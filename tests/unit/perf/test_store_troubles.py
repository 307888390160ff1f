"""A store that cannot be written for a while: disk full, read-only, a later schema, a clock that
goes back. What was measured decides in this process, waits in memory, is said to wait, and is
written when the store works again."""

from __future__ import annotations

import itertools
import os
import resource
import sqlite3
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
from helpers import events_of, python, rows
from stored import measurement

import layerzero as lz
from layerzero.perf.batch import Batch
from layerzero.perf.interface import StoreError
from layerzero.perf.record import Measurement, Rates
from layerzero.perf.store import SqliteStore
from layerzero.spec.event import StoreRecovered, StoreTrouble
from layerzero.world import measurements, perf_loading
from layerzero.world import snapshot as worlds
from layerzero.world.perf_loading import state


@pytest.fixture
def path(tmp_path, monkeypatch, world):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    folder_ = tmp_path / "perf.sqlite"
    lz.configure(perfdb=str(folder_))
    return folder_


def stored_rows(path: Path) -> list[Measurement]:
    with SqliteStore(path, read_only=True) as store:
        return sorted(store.rows())


def waits(emitted: list, count: int, word: str) -> None:
    """The last trouble is about `word`, and says that so many wait; they decide all the same."""
    event = events_of(StoreTrouble, emitted)[-1]
    assert word in event.problem and f"{count} measurements are kept in memory" in event.action, (
        event
    )
    assert len(state.unsaved) == count and not measurements.status().ok
    perf = worlds.current().perf
    assert all(perf.get(m.kernel, m.bucket, m.place) == m for m in state.unsaved.rows.values())


def works_again(emitted: list, path: Path, want: list[Measurement], written: int) -> None:
    measurements.retry_save()
    assert stored_rows(path) == sorted(want) and not state.unsaved
    assert [e.written for e in events_of(StoreRecovered, emitted)] == [written]
    assert measurements.status().ok
    measurements.retry_save()  # nothing is left to do
    assert len(events_of(StoreRecovered, emitted)) == 1


# what may stand in the way, and goes away


def test_a_later_schema(path, emitted):
    measurements.record([measurement(0)])
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    measurements.record([measurement(1)])
    measurements.record([measurement(2)])
    waits(emitted, 2, "schema 99")
    told = len(emitted)
    measurements.retry_save()  # the same trouble is not told again
    assert len(emitted) == told
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 3")
    other.close()
    works_again(emitted, path, [measurement(0), measurement(1), measurement(2)], 2)


def test_a_lock_that_does_not_end(path, emitted, monkeypatch):
    measurements.record([measurement(0)])
    monkeypatch.setattr(perf_loading, "WRITE_SECONDS", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    measurements.record([measurement(1)], {"here": Rates(3.0, 4.0)})
    waits(emitted, 2, "locked")
    other.execute("ROLLBACK")
    other.close()
    works_again(emitted, path, [measurement(0), measurement(1)], 2)
    with SqliteStore(path, read_only=True) as store:
        assert store.rates() == {"here": Rates(3.0, 4.0)}


def test_pages_run_out(path, emitted, monkeypatch):
    """SQLite's own "database or disk is full"."""
    connect = SqliteStore._connect

    def small(self, how):
        connection = connect(self, how)
        connection.execute(
            f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0] or 12}"
        )
        return connection

    measurements.record([measurement(0)])
    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "_connect", small)
        measurements.record([measurement(i) for i in range(1, 200)])
        waits(emitted, 199, "full")
    works_again(emitted, path, [measurement(i) for i in range(200)], 199)


def fill(path: Path) -> None:
    """Write until no byte more fits."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError):
            while True:
                os.write(file, bytes(4096))
    finally:
        os.close(file)


def test_a_full_disk(path, emitted, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("needs to be allowed to mount a tmpfs")
    try:
        lz.configure(perfdb=str(disk / "perf.sqlite"))
        measurements.record([measurement(0)])
        fill(disk / "filler")
        lz.rms_norm(rows())
        measurements.reload_measurements()
        measurements.record([measurement(i) for i in range(1, 300)])
        waits(emitted, 299, "")
        (disk / "filler").unlink()
        works_again(emitted, disk / "perf.sqlite", [measurement(i) for i in range(300)], 299)
        fill(disk / "filler")
        lz.configure(perfdb=str(disk / "new.sqlite"))  # nor can a new one be made
        measurements.record([measurement(1000)])
        waits(emitted, 1, "")
    finally:
        lz.configure(perfdb="off")
        subprocess.run(["umount", "-l", disk], capture_output=True)


def test_a_limit_on_the_size_of_files(path, emitted):
    measurements.record([measurement(0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        measurements.record([measurement(i) for i in range(1, 300)])
        waits(emitted, 299, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    works_again(emitted, path, [measurement(i) for i in range(300)], 299)


def test_a_folder_that_is_a_file_for_a_while(path, emitted):
    lz.configure(perfdb=str(path / "deep" / "perf.sqlite"))
    path.write_text("in the way")
    measurements.record([measurement(0)])
    waits(emitted, 1, "perf.sqlite")
    assert path.read_text() == "in the way"
    path.unlink()
    works_again(emitted, path / "deep" / "perf.sqlite", [measurement(0)], 1)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_may_not_be_written_for_a_while(kind, tmp_path):
    """By a user who is not root, who may always: in a process of its own, which ends only after it
    was allowed."""
    code = """
        import os, sys, layerzero as lz
        from layerzero.world import measurements, snapshot as world
        from layerzero.perf.record import Measurement
        from layerzero.perf.store import SqliteStore
        from layerzero.world.perf_loading import state
        import layerzero.world.settings
        world.current(), lz.doctor(), measurements.environment("cpu")
        folder, kind = os.environ["FOLDER"], os.environ["KIND"]
        file = folder + "/perf.sqlite"
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534), os.chown(file, 65534, 65534)
            os.setgid(65534), os.setuid(65534)
        os.chmod(file, 0o444 if kind == "file" else 0o644)
        os.chmod(folder, 0o755 if kind == "file" else 0o555)
        seen = []
        lz.subscribe(seen.append)
        lz.configure(perfdb=file)
        measurements.record([Measurement("torch.k", "rms_norm", "b", "p", 1.0, build="v1", at=1.0)])
        print(len(state.unsaved), [e.action for e in seen if e.name == "store_trouble"])
        os.chmod(folder, 0o755), os.chmod(file, 0o644)
        measurements.retry_save()
        print(len(state.unsaved), [e.written for e in seen if e.name == "store_recovered"],
              len(list(SqliteStore(file, read_only=True).rows())))
    """
    with tempfile.TemporaryDirectory() as folder:  # another user cannot look into tmp_path
        with SqliteStore(Path(folder) / "perf.sqlite") as store:
            store.put([measurement(1)])
        lines = python(
            code, FOLDER=folder, KIND=kind, LAYERZERO_CACHE_DIR=str(tmp_path)
        ).splitlines()
    assert lines[-2].startswith("1 ['1 measurements are kept in memory")
    assert lines[-1] == "0 [1] 2"


def test_a_file_system_without_shared_memory(path, emitted, monkeypatch):
    """No log then: SQLite keeps its journal, and everything else is as ever."""
    connect = SqliteStore._connect
    monkeypatch.setattr(
        SqliteStore, "_connect", lambda self, how: connect(self, f"{how}&vfs=unix-dotfile")
    )
    for i in range(5):
        measurements.record([measurement(i)])
    assert stored_rows(path) == [measurement(i) for i in range(5)] and events_of(StoreTrouble,
                                                                              emitted) == []
    with SqliteStore(path) as store:
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_after_a_while_it_is_tried_again_by_itself(path, emitted, monkeypatch):
    monkeypatch.setattr(perf_loading, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(measurements, "_retry", None)  # another test's
    path.write_text("in the way")
    measurements.record([measurement(0)])
    assert state.unsaved
    path.unlink()
    end = time.monotonic() + 30
    while not events_of(StoreRecovered, emitted) and time.monotonic() < end:
        time.sleep(0.02)
    assert stored_rows(path) == [measurement(0)] and not state.unsaved


def test_what_waits_survives_another_setting_and_a_reload(path, emitted):
    """The world is loaded anew; what is in no store yet is part of it."""
    kernel = worlds.current().catalog.by_id["reference.rms_norm"]
    path.write_text("in the way")
    row = measurement(0, kernel=kernel.id, build="")
    measurements.record([row])
    for change in (
        measurements.reload_measurements,
        lambda: lz.configure(perfdb_ttl=10**6),
        lambda: lz.configure(perfdb=str(path) + ".other"),
    ):
        change()
        assert worlds.current().perf.get(row.kernel, row.bucket, row.place) is not None
    assert len(state.unsaved) == 1


def test_what_waits_does_not_grow_with_what_is_measured_again(path):
    path.write_text("in the way")
    for i in range(50):
        measurements.record([measurement(i % 3, at=1.7e9 + i, median_us=1.0 + i)])
    assert len(state.unsaved) == 3 and {m.median_us for m in state.unsaved.rows.values()} == {
        48.0,
        49.0,
        50.0,
    }


def test_threads_that_record_while_the_store_comes_and_goes_lose_nothing(path, emitted):
    """One thread takes the store away and gives it back; four record."""
    measurements.record([measurement(9999)])
    done = threading.Event()

    def spoil() -> None:
        for version in itertools.cycle((99, 3)):
            if done.is_set() and version == 99:
                return
            other = sqlite3.connect(path, timeout=60)
            with other:
                other.execute(f"PRAGMA user_version = {version}")
            other.close()
            time.sleep(0.003)

    def work(who: int) -> None:
        for i in range(15):
            measurements.record([measurement(100 * who + i)])

    spoiler = threading.Thread(target=spoil)
    workers = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in (spoiler, *workers):
        thread.start()
    for thread in workers:
        thread.join(120)
    done.set()
    spoiler.join(60)
    measurements.retry_save()
    assert {m.sizes for m in stored_rows(path)} == {
        f"rows={n} hidden=64"
        for n in (9999, *(100 * who + i for who in range(4) for i in range(15)))
    }


EXIT = """
    import os, sys, layerzero as lz
    from layerzero.world import measurements
    from layerzero.perf.record import Measurement
    file = os.environ["FILE"]
    open(file, "w").write("in the way")
    lz.configure(perfdb=file)
    measurements.record([Measurement("torch.k", "rms_norm", "b", "p", 1.0, build="v1", at=1.0)])
    if os.environ["HEALED"]:
        os.unlink(file)
    lz.subscribe(lambda e: print(e.name, getattr(e, "action", "")))
"""


@pytest.mark.parametrize("healed", [True, False])
def test_at_the_end_of_the_process_it_is_tried_once_more_and_a_loss_is_said(tmp_path, healed):
    output = python(
        EXIT,
        FILE=str(tmp_path / "perf.sqlite"),
        HEALED="1" * healed,
        LAYERZERO_CACHE_DIR=str(tmp_path),
    )
    if healed:
        assert (output.startswith("store_recovered")
                and len(stored_rows(tmp_path / "perf.sqlite")) == 1)
    else:
        assert output == "store_trouble 1 measurements are lost with this process"


# clocks


def test_a_clock_that_is_set_back_costs_no_measurement(path, monkeypatch):
    """Measured, the clock goes back a year, measured again: the later one counts, in memory and in
    the store."""
    real = time.time
    measurements.record([measurement(0, at=0.0, median_us=1.0)], {"here": Rates(1.0, 1.0)})
    monkeypatch.setattr(time, "time", lambda: real() - 365 * 86400)
    measurements.record([measurement(0, at=0.0, median_us=2.0)], {"here": Rates(2.0, 2.0)})
    row = measurement(0)
    assert worlds.current().perf.get(row.kernel, row.bucket, row.place).median_us == 2.0
    (stored,) = stored_rows(path)
    assert stored.median_us == 2.0 and stored.at <= real() - 364 * 86400
    with SqliteStore(path, read_only=True) as store:
        assert store.rates() == {"here": Rates(2.0, 2.0)}
    monkeypatch.undo()
    with SqliteStore(path) as store:
        store.put([measurement(0, median_us=3.0, at=time.time())])
    assert stored_rows(path)[0].median_us == 3.0


def test_a_row_of_the_future_gives_way_to_what_is_measured_today(path, monkeypatch):
    """Another process had a clock that was ahead; a view takes its rows as of today."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
    with SqliteStore(path) as store:
        store.put([measurement(0, at=0.0, median_us=1.0)])
        store.write((), {}, {"here": (Rates(1.0, 1.0), time.time())})
    monkeypatch.setattr(time, "time", real)
    with SqliteStore(path, read_only=True) as store:
        (seen,) = store.view({"torch.k": "v1"})
    assert seen.at <= real() and stored_rows(path)[0].at > real()
    with SqliteStore(path) as store:
        # an hour ago, and kept in memory until now
        store.put([measurement(0, at=real() - 3600, median_us=2.0)])
        store.write((), {}, {"here": (Rates(2.0, 2.0), time.time())})
        assert [m.median_us for m in store.rows()] == [2.0] and store.rates() == {
            "here": Rates(2.0, 2.0)
        }


def test_a_batch_keeps_the_better_of_two():
    batch = Batch().including([measurement(0, median_us=1.0), measurement(1)], {"a": {}}, {})
    batch = batch.including(
        [measurement(0, median_us=2.0, at=1.8e9), measurement(1, spread=0.9, at=1.9e9)], {"b": {}}, {}
    )
    assert [m.median_us for m in batch.rows.values()] == [2.0, measurement(1).median_us] and len(
        batch
    ) == 2
    assert sorted(batch.environments) == ["a", "b"]


@pytest.mark.parametrize("rates", [{"here": Rates("x", 1.0)}, {"here": Rates(None, 1.0)},
                                   {"here": Rates(True, 1.0)}, {"here": Rates(float("nan"), 1.0)},
                                   {"here": Rates(-1.0, 1.0)}, {"here": 3}, {"here": (1.0,)},
                                   {"": Rates(1.0, 1.0)}, {3: Rates(1.0, 1.0)}], ids=str)
def test_rates_that_are_none(rates):
    with pytest.raises(lz.errors.ConfigError, match="wanted Rates"):
        measurements.record([], rates)
    assert not state.unsaved                   # it would keep all others from being written


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
def test_a_link_of_another_user_is_not_followed(tmp_path):
    mine, link = tmp_path / "mine", tmp_path / "perf.sqlite"
    mine.touch()                               # an empty file may become a store
    link.symlink_to(mine)
    os.lchown(link, 12345, 12345)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="is a link of user 12345"):
            SqliteStore(link, read_only=read_only)
    assert mine.read_bytes() == b"" and sorted(tmp_path.iterdir()) == [mine, link]
    os.lchown(link, 0, 0)
    SqliteStore(link).close()
    assert mine.stat().st_size and mine.stat().st_mode & 0o777 == 0o644


def test_others_cannot_read_what_we_make(tmp_path):
    previous = os.umask(0)
    try:
        SqliteStore(tmp_path / "new" / "perf.sqlite").close()
    finally:
        os.umask(previous)
    for made in (tmp_path / "new", *(tmp_path / "new").iterdir()):
        assert not made.stat().st_mode & 0o077, made


def test_nobody_waits_for_ever_for_a_process_that_stopped_while_it_set_a_file_aside(
        path, emitted, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    measurements.record([measurement(0)])
    content = bytearray(path.read_bytes())
    content[100:200] = bytes(100)
    path.write_bytes(content)
    monkeypatch.setattr("layerzero.perf.store.LOCK_SECONDS", 0.05)
    with open(f"{path}.lock", "w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        measurements.record([measurement(1)])
        waits(emitted, 1, "damaged" if "damaged" in events_of(StoreTrouble, emitted)[-1].problem
              else "malformed")
    assert "held by another process" in events_of(StoreTrouble, emitted)[-1].action


def test_the_end_of_a_process_does_not_wait_for_a_thread_that_still_writes(
        path, emitted, monkeypatch):
    writes, ends = threading.Event(), threading.Event()

    def write():
        with measurements._saving:
            writes.set()
            ends.wait(60)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        writes.wait(60)
        monkeypatch.setattr(state, "unsaved", Batch().including([measurement(0)], {}, {}))
        monkeypatch.setattr(measurements, "READ_SECONDS", 0.05)
        measurements._at_exit()
    finally:
        ends.set()
        thread.join()
    assert "1 measurements are lost" in events_of(StoreTrouble, emitted)[-1].action
