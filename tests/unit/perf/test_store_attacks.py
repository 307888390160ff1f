"""Attacks on the store of measurements: files that are not ours, damage at every kind of offset,
commands that only read. What must hold each time: no error reaches a call, no wrong row is
believed, nothing of others is touched, and what was measured is in the store or waits in memory."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import struct
from pathlib import Path

import pytest
from helpers import events_of, rows
from stored import measurement

import layerzero as lz
from layerzero.cli import main
from layerzero.perf import ownership, schema
from layerzero.perf.interface import CorruptStore, ForeignFile, StoreError
from layerzero.perf.record import Rates
from layerzero.perf.store import SqliteStore
from layerzero.spec.event import StoreTrouble
from layerzero.world import measurements

ID = struct.pack(">I", ownership.APPLICATION_ID)


@pytest.fixture
def folder(tmp_path, monkeypatch, world):
    """A folder of the test's own for the store; nothing of the user's is read or written."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "store"
    path.mkdir()
    return path


def tree(folder: Path) -> dict[str, object]:
    """Everything in a folder, by name: kind, inode, time of change, content."""
    entries: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = os.lstat(path)
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        entries[str(path.relative_to(folder))] = (
            status.st_mode,
            status.st_ino,
            status.st_mtime_ns,
            content,
        )
    return entries


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return int(stop.value.code or 0), *capsys.readouterr()


# files that are not ours


def other_program(path: Path, journal: str = "delete") -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute("CREATE TABLE friends (name TEXT)")
    connection.execute("INSERT INTO friends VALUES ('Ada')")
    return connection


def their_database(path):
    other_program(path).close()


def their_open_database(path):
    return other_program(path, "wal")  # held by the caller, so that its log stays


def their_empty_database(path):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 1")
    connection.close()


def our_tables_without_our_id(path):
    SqliteStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA application_id = 0")
    connection.close()


def a_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket must be short
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path.name)
        return sock
    finally:
        os.chdir(here)


def link_to_text(path):
    (path.parent / "notes.txt").write_text("mine\n" * 40)
    path.symlink_to("notes.txt")


def link_to_their_database(path):
    their_database(path.parent / "theirs.db")
    path.symlink_to("theirs.db")


FOREIGN = {
    "text": lambda path: path.write_text("dear diary\n" * 60),
    "a few bytes": lambda path: path.write_bytes(b"x"),
    "our source": lambda path: shutil.copy(ownership.__file__, path),
    "text with our id where a header has it": lambda path: path.write_bytes(
        b"x" * 68 + ID + b"x" * 500
    ),
    "the beginning of a header": lambda path: path.write_bytes(ownership.SQLITE + b"\x10\0"),
    "another program's database": their_database,
    "another program's database, which is open": their_open_database,
    "another program's empty database": their_empty_database,
    "our tables without our id": our_tables_without_our_id,
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a socket": a_socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to text": link_to_text,
    "a link to another program's database": link_to_their_database,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "their file where our log would be": lambda path: Path(f"{path}-wal").write_text(
        "my waltzes\n" * 9
    ),
    "their file where our journal would be": lambda path: Path(f"{path}-journal").write_text(
        "monday\n" * 9
    ),
    "a link where our log would be": lambda path: Path(f"{path}-wal").symlink_to("/dev/zero"),
    "a folder where our log would be": lambda path: Path(f"{path}-wal").mkdir(),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_not_ours_is_refused_and_nothing_of_it_is_touched(folder, emitted, capsys, what):
    path = folder / "perf.sqlite"
    held = FOREIGN[what](path)
    before = tree(folder)
    lz.configure(perfdb=str(path))
    lz.rms_norm(rows())
    measurements.record([measurement(1)], {"here": Rates(1.0, 2.0)})
    event = events_of(StoreTrouble, emitted)[-1]
    assert (
        "2 measurements are kept in memory" in event.action
        and event.problem
        and event.store == str(path)
    )
    for command in ("show", "prune", "export"):
        code, _, err = run(
            capsys, "perf", command, *[str(folder / "out.jsonl")] * (command == "export")
        )
        if "where our" not in what or command == "prune":  # nothing to read is not an error
            assert code == 2 and err.startswith("error: "), (command, err)
        (folder / "out.jsonl").unlink(missing_ok=True)
    for command in (("doctor",), ("list",)):
        run(capsys, *command)
    assert tree(folder) == before
    assert not measurements.status().ok
    lz.configure(perfdb=str(folder / "another.sqlite"))  # what the message says: a file of its own
    measurements.record([measurement(2)])
    with SqliteStore(folder / "another.sqlite") as store:
        assert sorted(store.rows()) == [measurement(1), measurement(2)] and store.rates() == {
            "here": Rates(1.0, 2.0)
        }
    assert measurements.status().ok
    if isinstance(held, (sqlite3.Connection, socket.socket)):
        held.close()


@pytest.mark.parametrize(
    "name", [":memory:", "file:perf?mode=memory", "%41?x#y", "a\nb", "ä" * 60, " perf.sqlite"]
)
def test_no_name_of_a_file_is_special(folder, name):
    with SqliteStore(folder / name) as store:
        store.put([measurement(1)])
    assert (folder / name).read_bytes()[68:72] == ID
    with SqliteStore(folder / name, read_only=True) as store:
        assert list(store.rows()) == [measurement(1)]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "perf.sqlite/below"])
def test_a_name_that_no_file_can_have_is_an_event_and_no_failed_call(folder, emitted, name):
    (folder / "perf.sqlite").write_text("a file, and no folder")
    lz.configure(perfdb=f"{folder}/{name}")
    lz.rms_norm(rows())
    measurements.record([measurement(1)])
    assert "1 measurements are kept in memory" in events_of(StoreTrouble, emitted)[-1].action


def test_a_link_to_a_store_is_the_store(folder, emitted):
    """What SQLite keeps beside a file is beside the file, not beside the link; so is what is set
    aside."""
    (folder / "real").mkdir()
    real, link = folder / "real" / "store", folder / "link"
    with SqliteStore(real) as store:
        store.put([measurement(1)])
    link.symlink_to(real)
    lz.configure(perfdb=str(link))
    measurements.record([measurement(2)])
    with SqliteStore(real, read_only=True) as store:
        assert len(list(store.rows())) == 2
    real.write_bytes(real.read_bytes()[:5000])
    measurements.record([measurement(3)])
    assert "set aside as store.corrupt-" in events_of(StoreTrouble, emitted)[-1].action
    assert link.is_symlink() and sorted(p.name.partition("-2")[0] for p in folder.rglob("*")) == [
        "link",
        "real",
        "store",
        "store.corrupt",
        "store.lock",
    ]
    with SqliteStore(link, read_only=True) as store:
        assert list(store.rows()) == [measurement(3)]


def test_to_set_aside_follows_no_link_and_renames_nothing_of_others(folder):
    path = folder / "perf.sqlite"
    victim = folder / "victim"
    victim.write_text("precious")
    with SqliteStore(path) as store:
        store.put([measurement(1)])
    path.write_bytes(path.read_bytes()[:5000])
    Path(f"{path}.lock").symlink_to(victim)
    from layerzero.perf.store import set_aside

    with pytest.raises(OSError):
        set_aside(path, None)
    assert victim.read_text() == "precious" and path.exists()
    Path(f"{path}.lock").unlink()
    path.write_text("another's by now\n" * 99)
    with pytest.raises(ForeignFile):
        set_aside(path, None)
    assert path.read_text().startswith("another's")


def test_a_file_that_this_process_has_open_is_not_opened_beside_it(folder, monkeypatch):
    """To close a second descriptor would drop the locks that SQLite holds on the first (POSIX)."""
    path, before = folder / "perf.sqlite", list(ownership._open)
    read: list[Path] = []
    first = ownership._read_head
    monkeypatch.setattr(
        ownership, "_read_head", lambda path, count: read.append(path) or first(path, count)
    )
    with SqliteStore(path) as store:
        store.put([measurement(1)])
        read.clear()
        with SqliteStore(path), SqliteStore(path, read_only=True) as reader:
            assert len(list(reader.rows())) == 1
        assert path not in read
    SqliteStore(path).close()
    assert path in read and ownership._open == before


# commands that only read

READING = (
    ("perf", "show"),
    ("perf", "show", "--all", "--json"),
    ("perf", "prune", "--dry-run"),
    ("doctor",),
    ("list",),
    ("perf", "export"),
)


@pytest.mark.parametrize("damage", ["none", "half of it", "a page", "a row", "no file"])
def test_commands_that_read_change_nothing(folder, capsys, damage):
    path = folder / "perf.sqlite"
    if damage != "no file":
        with SqliteStore(path) as store:
            store.put([measurement(i) for i in range(300)])
        data = path.read_bytes()
        at = data.index(b"float32 rows=17 ") + 14
        path.write_bytes(
            {
                "none": data,
                "half of it": data[: len(data) // 2],
                "a row": data[:at] + b"X" + data[at + 1 :],
                "a page": data[: 4096 * 6] + bytes(4096) + data[4096 * 7 :],
            }[damage]
        )
    before = tree(folder)
    lz.configure(perfdb=str(path))
    for command in READING:
        out = [str(folder.parent / "out.jsonl")] * (command[-1] == "export")
        code, _, err = run(capsys, *command, *out)
        assert tree(folder) == before, command
        if damage in ("half of it", "a page", "a row") and command[0] == "perf":
            assert code == 2 and "lz perf prune sets it aside" in err
    if damage in ("half of it", "a page", "a row"):
        code, _, err = run(capsys, "perf", "prune")
        assert code == 2 and "set aside as perf.sqlite.corrupt-" in err and "begun anew" in err
        assert run(capsys, "perf", "show")[1].strip().startswith(f"{path}: no measurements")


def test_a_reader_beside_a_writer_sees_what_was_written(folder):
    """With a log there is no way around SQLite's own; what is in it is not overlooked."""
    path = folder / "perf.sqlite"
    with SqliteStore(path) as store:
        for i in range(20):
            store.put([measurement(i)])
            with SqliteStore(path, read_only=True) as reader:
                assert len(list(reader.rows())) == len(reader.view({"torch.k": "v1"})) == i + 1
                with pytest.raises(StoreError, match="readonly"):
                    reader.put([measurement(99)])


def test_a_reader_does_not_wait_for_ever(folder):
    """Python's backup would, for a file without a log that another process has locked."""
    path = folder / "perf.sqlite"
    SqliteStore(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA journal_mode = DELETE")
    other.execute("BEGIN EXCLUSIVE")
    # so that it is not simply read
    Path(f"{path}-journal").write_bytes(bytes.fromhex("d9d505f920a163d7"))
    with pytest.raises(StoreError, match=r"locked|unable"):
        SqliteStore(path, timeout=0.2, read_only=True)
    other.execute("ROLLBACK")
    other.close()


@pytest.mark.parametrize("column, value", [
    ("median_us", -1.0), ("median_us", float("inf")), ("spread", -1.0), ("at", float("-inf")),
    ("p99_us", float("inf")), ("flops", -1e18)])
def test_a_row_that_cannot_be_is_not_believed_though_its_checksum_is_right(folder, column, value):
    path, sound = folder / "perf.sqlite", measurement(0)
    forged = tuple(measurement(1)._replace(**{column: value}))
    with SqliteStore(path) as store:
        store.write([sound], {}, {})
    with sqlite3.connect(path) as other:
        other.execute(f"INSERT INTO measurements ({schema.ALL_COLUMNS}, crc) VALUES "
                      f"({', '.join('?' * (len(forged) + 1))})", (*forged, schema.checksum(forged)))
    other.close()
    with SqliteStore(path, read_only=True) as store:
        seen = store.view({sound.kernel: sound.build}, since=float("-inf"))
        assert [m.bucket for m in seen] == [sound.bucket]
        with pytest.raises(CorruptStore, match="damaged"):
            list(store.rows())
