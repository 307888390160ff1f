"""Damage to the store of measurements, at every kind of offset of its files. What must hold: no
error reaches a call, no wrong row is believed, and what was measured is in the store or waits in
memory."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import Fake, events_of, register, rows
from stored import measurement

import layerzero as lz
from layerzero.machine import builds
from layerzero.perf import ownership
from layerzero.perf.interface import CorruptStore
from layerzero.perf.record import Rates
from layerzero.perf.store import SqliteStore
from layerzero.spec.event import StoreTrouble
from layerzero.world import measurements, perf_loading
from layerzero.world import snapshot as worlds
from layerzero.world.perf_loading import state

ID = struct.pack(">I", ownership.APPLICATION_ID)
KERNELS = 4


@pytest.fixture
def folder(tmp_path, monkeypatch, world):
    """A folder of the test's own for the store; nothing of the user's is read or written."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "store"
    path.mkdir()
    return path


def files_of(folder: Path, open_log: bool) -> dict[str, bytes]:
    """The files of a store that is in use: with `open_log` half of the rows are in its log."""
    path = folder / "original"
    kernels = [k.kernel for k in fakes()]
    files = [
        measurement(i, kernels[i % KERNELS].id, build=builds.build_of(kernels[i % KERNELS]))
        for i in range(240)
    ]
    with SqliteStore(path) as store:
        store.put(files[:120], {"machine": "here", "note": "ä" * 20})
        store.write((), {}, {"here": (Rates(1e5, 2e4), 5.0)})
    with SqliteStore(path) as store:
        store.put(files[120:])
        names = ("", "-wal", "-shm") if open_log else ("",)
        if open_log:
            return {end: Path(f"{path}{end}").read_bytes() for end in names}
    return {end: Path(f"{path}{end}").read_bytes() for end in names}


def fakes() -> list[Fake]:
    return [Fake(f"fake.k{i}") for i in range(KERNELS)]


def damage_bytes(draw: random.Random, data: bytes) -> bytes:
    """`data` with one of the damages that disks, file systems and people do."""
    classes = [
        draw.randrange(100),
        100 + draw.randrange(400),
        4096 * draw.randrange(1, 1 + len(data) // 4096),
        4096 * draw.randrange(1 + len(data) // 4096) + draw.randrange(12),
        draw.randrange(len(data)),
        32 + (24 + 4096) * draw.randrange(8) + draw.randrange(24),
    ]
    at = min(draw.choice(classes), len(data) - 1)
    kind = draw.choice(("flip", "flip", "flip", "flips", "cut", "zeros", "noise", "more", "moved"))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "flips":
        changed = bytearray(data)
        for _ in range(40):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    length = draw.choice((1, 4, 16, 100, 512, 4096))
    return {
        "cut": data[:at],
        "zeros": data[:at] + bytes(length) + data[at + length :],
        "noise": data[:at] + draw.randbytes(length) + data[at + length :],
        "more": data + draw.randbytes(length),
        "moved": data[:at] + data[at + length :] + bytes(length),
    }[kind]


@pytest.mark.parametrize("seed", range(12))
def test_no_damage_fails_a_call_or_is_believed_or_loses_what_is_measured(folder, emitted, seed):
    """40 damages a seed: in the file, in its log, in the index of the log; read, written, read
    again."""
    path, draw = folder / "perf.sqlite", random.Random(seed)
    register(*(candidates := fakes()))
    whole = files_of(folder.parent, open_log=seed % 2 == 1)
    with SqliteStore(folder.parent / "original", read_only=True) as store:
        original = {m._replace(environment="") for m in store.rows()}
    lz.configure(perfdb=str(path))
    policy, kernels, new = (
        worlds.current().policy,
        [f.kernel for f in candidates],
        measurement(9, "torch.new"),
    )
    refused = 0
    for _ in range(40):
        for old in folder.iterdir():
            old.unlink()
        spoil = draw.choice(list(whole))
        for end, data in whole.items():
            Path(f"{path}{end}").write_bytes(damage_bytes(draw, data) if end == spoil else data)
        before = path.read_bytes()
        state.reset()
        view, _ = perf_loading.load(policy, kernels)  # as a new process does
        assert {m._replace(environment="") for m in view} <= original
        assert path.read_bytes() == before and not list(folder.glob("*corrupt*"))
        messages = measurements._store_rows(policy, [new], {}, {})
        if state.unsaved:  # no longer to be told from another's file
            refused += 1
            assert messages and list(state.unsaved.rows.values()) == [new]
            assert path.read_bytes() == before or before[68:72] == ID
            continue
        with SqliteStore(path, read_only=True) as store:
            assert store.get("torch.new", new.bucket, new.place) == new
        aside = [old for old in folder.glob("*corrupt*") if not old.name.endswith(("-wal", "-shm"))]
        assert len(aside) <= 1
        # a log goes into its file first
        assert not aside or "-wal" in whole or aside[0].read_bytes() == before
    assert refused < 20


@pytest.mark.parametrize("at", range(100))
def test_every_byte_of_the_header(folder, at, emitted):
    """Damaged in each of four ways; a store that lost its id is left alone, any other is read, or
    set aside."""
    path = folder / "perf.sqlite"
    with SqliteStore(path) as store:
        store.put([measurement(i) for i in range(40)])
    data = path.read_bytes()
    lz.configure(perfdb="off")
    lz.configure(perfdb=str(path))
    policy = worlds.current().policy
    for value in (data[at] ^ 1, data[at] ^ 0x80, data[at] ^ 0xFF, 0):
        for old in folder.iterdir():
            old.unlink()
        path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        state.reset()
        perf_loading.load(policy, ())
        measurements._store_rows(policy, [measurement(99)], {}, {})
        if state.unsaved:
            assert 60 <= at < 72  # a later schema, or no id of ours
        else:
            with SqliteStore(path, read_only=True) as store:
                last = measurement(99)
                assert store.get("torch.k", last.bucket, last.place) == last


def test_damage_that_a_view_meets_while_it_is_asked_fails_no_call(folder, emitted):
    """The structure was whole when it was loaded; the copy in memory is spoiled afterwards."""
    path = folder / "perf.sqlite"
    fake = Fake("fake.one")
    register(fake)
    with SqliteStore(path) as store:
        store.put([measurement(1, "fake.one", build=builds.build_of(fake.kernel))])
    lz.configure(perfdb=str(path))
    source = worlds.current().perf._source
    source._connection.execute("DROP TABLE measurements")
    lz.rms_norm(rows())
    event = events_of(StoreTrouble, emitted)[-1]
    assert (
        "no such table" in event.problem
        and "set aside when something is to be written" in event.action
    )
    measurements.record([measurement(2)])  # looks at the file, which is sound
    assert not list(folder.glob("*corrupt*")) and measurements.status().ok


def test_an_error_whose_text_is_damaged_is_damage(folder):
    """SQLite quotes the schema in its messages, and Python cannot decode them: this was a
    UnicodeDecodeError."""
    path = folder / "perf.sqlite"
    SqliteStore(path).close()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE measurements", b"CREATE TABLE me\xff\xfeurements"))
    with pytest.raises(CorruptStore):
        SqliteStore(path)
    with pytest.raises(CorruptStore):
        SqliteStore(path, read_only=True)


def _killed_at(steps: Iterator[int], last: int, _statement: str = "") -> int:
    if next(steps) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_is_killed_while_it_makes_a_store_leaves_one_that_works(folder, monkeypatch):
    """At every statement and between their steps: whose the file is must be clear from its first
    byte."""
    path, connect = folder / "perf.sqlite", SqliteStore._connect
    kinds, alive = set(), 0
    moments = [("trace", n) for n in range(1, 30)] + [("progress", n) for n in range(1, 900, 75)]
    for hook, last in moments:
        for old in folder.iterdir():
            old.unlink()
        child = os.fork()
        if not child:
            step = functools.partial(_killed_at, itertools.count(1), last)

            def watched(self: SqliteStore, how: str, hook=hook, step=step) -> sqlite3.Connection:
                connection = connect(self, how)
                if hook == "trace":
                    connection.set_trace_callback(step)
                else:
                    connection.set_progress_handler(step, 1)
                return connection

            try:
                monkeypatch.setattr(SqliteStore, "_connect", watched)
                with SqliteStore(path) as store:
                    store.put([measurement(1)])
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        alive += not status
        kinds.add(ownership.inspect(path).kind)
        with SqliteStore(path) as store:
            store.put([measurement(2)])
            store.verify()
            assert list(store.rows())[-1] == measurement(2), (hook, last)
    assert kinds == {"empty", "ours"} and alive < len(moments) / 2
