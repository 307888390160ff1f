"""lz bundle: complete, checked by its manifest, redacted, and never a secret in it."""

from __future__ import annotations

import gzip
import io
import json
import os
import sqlite3
import tarfile
import time

import pytest
from helpers import Fake, register, rows, run_python

import layerzero as lz
from layerzero.cli import main
from layerzero.integrations import bundle
from layerzero.integrations.bundle import read_bundle
from layerzero.perf.record import Measurement
from layerzero.perf.store import SqliteStore
from layerzero.spec.call import Call, TensorSpec
from layerzero.world import capabilities, events, redaction
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("world")
CALL = Call("rms_norm", {"x": TensorSpec((4, 4096), "float32")}, name="mine")


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.json"
    lz.tables.solve([CALL], path=path, device="cpu")
    return path


@pytest.fixture
def perfdb(tmp_path):
    path = tmp_path / "perf.sqlite"
    with SqliteStore(path) as store:
        store.put([Measurement("torch.rms_norm", "rms_norm", "float32 hidden=4096", "here", 5.0,
                               samples=9,
                               build="b", at=time.time())])
    lz.configure(perfdb=str(path))
    return path


def everything(path) -> bytes:
    """What the archive says, unpacked."""
    return gzip.decompress(path.read_bytes())


def test_it_has_everything_and_the_manifest_checks_it(table, perfdb, tmp_path):
    lock, out = tmp_path / "layerzero.lock", tmp_path / "b.tar.gz"
    lz.configure(strict_mode=False)
    lz.tables.solve([CALL], path=table, device="cpu")                      # under the policy of now
    lz.tables.write_lockfile(table, lock)
    lz.rms_norm(rows())
    manifest = lz.write_bundle(out, table=table, lock=lock, device="cpu")
    files = read_bundle(out)
    assert set(files) == {"manifest.json", "capabilities.json", "dispatch_table.json",
                          "dispatch_table.validation.json", "environment.json", "events.jsonl",
                          "layerzero.lock", "lockfile.validation.json", "perf.sqlite",
                          "readiness.json"}
    assert manifest["left_out"] == {} and json.loads(files["manifest.json"]) == manifest
    exported = json.loads(files["capabilities.json"])
    assert capabilities.capabilities_hash(exported) == manifest["capabilities_hash"]
    capabilities.validate(exported)
    assert lz.tables.Table.from_json(
        json.loads(files["dispatch_table.json"])).id == lz.tables.Table.load(table).id
    assert json.loads(files["dispatch_table.validation.json"])["state"] == "ok"
    assert json.loads(files["lockfile.validation.json"]) == {"ok": True, "violations": []}
    assert json.loads(files["readiness.json"])["ready"] is manifest["ready"] is True
    data = json.loads(files["environment.json"])
    assert data["config"]["source"]["perfdb"] == "programmatic" and data["versions"]["torch"]
    assert any(json.loads(line)["event"] == "selected"
               for line in files["events.jsonl"].splitlines())
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(files["perf.sqlite"])
    with SqliteStore(copy) as store:
        assert [m.kernel for m in store.rows()] == ["torch.rms_norm"]
    assert out.stat().st_mode & 0o077 == 0


def test_a_database_being_written_is_copied_whole_and_left_as_it_is(perfdb, tmp_path):
    writer = sqlite3.connect(perfdb, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM measurements")
    try:
        lz.write_bundle(tmp_path / "b.tar.gz", device="cpu")
    finally:
        writer.execute("ROLLBACK")
        writer.close()
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(read_bundle(tmp_path / "b.tar.gz")["perf.sqlite"])
    with SqliteStore(copy) as store:
        # what is not committed is not in it
        assert len(list(store.rows())) == 1


def test_the_order_is_fixed_and_so_are_the_bytes(tmp_path):
    for name in ("a", "b"):
        lz.write_bundle(tmp_path / f"{name}.tar.gz", device="cpu")
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        members = archive.getmembers()
    names = [m.name for m in members]
    assert names[0] == "manifest.json" and names[1:] == sorted(names[1:])
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode)
            for m in members} == {(0, 0, 0, "", "", 0o600)}
    one, two = (read_bundle(tmp_path / f"{name}.tar.gz") for name in ("a", "b"))
    assert one["capabilities.json"] == two["capabilities.json"]
    first, second = (json.loads(data["environment.json"]) for data in (one, two))
    del first["stats"], second["stats"]        # events of background threads are counted meanwhile
    assert first == second


def test_what_was_changed_is_found(tmp_path):
    out = tmp_path / "b.tar.gz"
    lz.write_bundle(out, device="cpu")
    with tarfile.open(tmp_path / "forged.tar.gz", "w:gz", format=tarfile.USTAR_FORMAT) as forged:
        for name, content in read_bundle(out).items():
            path = tmp_path / name
            path.write_bytes(content.replace(b'"ready": true', b'"ready": false'))
            if name != "manifest.json":
                forged.add(path, name)
            else:
                path.write_bytes(content)
                forged.add(path, name)
    with pytest.raises(lz.errors.DataError, match=r"readiness\.json"):
        read_bundle(tmp_path / "forged.tar.gz")
    whole = out.read_bytes()
    # the second is what zlib notices, not gzip
    for content in (whole[:500], whole[:300] + bytes(range(200)) + whole[500:]):
        out.write_bytes(content)
        with pytest.raises(lz.errors.DataError, match="wanted a bundle"):
            read_bundle(out)


@pytest.mark.parametrize("manifest", [b"[]", b'{"files": 3}', b'{"files": {"a": []}}', b"[" * 9999])
def test_a_manifest_that_is_none(tmp_path, manifest):
    path = tmp_path / "b.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        archive.addfile(info, io.BytesIO(manifest))
    with pytest.raises(lz.errors.DataError, match="wanted a bundle, as lz bundle writes it"):
        read_bundle(path)


def test_an_archive_that_would_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MAX_BYTES", 1 << 20)
    path = tmp_path / "b.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("zeros")
        info.size = 2 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    assert path.stat().st_size < 10_000
    with pytest.raises(lz.errors.DataError, match="at most 1 MiB unpacked; it is larger"):
        read_bundle(path)


def member(name: bytes = b"manifest.json", size: int | bytes = 2, kind: bytes = b"0",
           link: bytes = b"", content: bytes = b"{}") -> bytes:
    """A header as a hostile writer makes it, with a valid checksum, and its content."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    head = bytearray(name.ljust(100, b"\0") + b"0000600\0" * 3 + field + b"0" * 11 + b"\0"
                     + b" " * 8 + kind + link.ljust(100, b"\0") + b"ustar\x0000").ljust(512, b"\0")
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + content.ljust(-(-len(content) // 512) * 512, b"\0")


NEGATIVE = (-1024).to_bytes(12, "big", signed=True)


@pytest.mark.parametrize("tar", [
    member(b"../up"), member(b"/etc/passwd"), member(b".."), member(b""), member(b"a\xff"),
    member(kind=b"2", link=b"/etc/passwd"), member(kind=b"1", link=b"manifest.json"),
    member(kind=b"3"), member(kind=b"6"), member(kind=b"5"), member(kind=b"S"),
    member(kind=b"x", size=1 << 33), member(kind=b"L", size=1 << 33), member(size=1 << 33),
    member(size=NEGATIVE), member(kind=b"x", size=NEGATIVE), member() + member(), member()[:700],
    b"\1" * 512, b""], ids=lambda tar: repr(tar[:20]))
def test_a_hostile_archive(tmp_path, tar):
    path = tmp_path / "b.tar.gz"
    path.write_bytes(gzip.compress(tar + bytes(1024)))
    with pytest.raises(lz.errors.DataError, match=r"b\.tar\.gz"):
        read_bundle(path)
    path.unlink()
    os.mkfifo(path)                            # nobody waits for its writer
    with pytest.raises(lz.errors.DataError, match="not a regular file"):
        read_bundle(path)


# secrets and redaction

def test_no_secret_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_SEAL_KEY", "hunter2-seal")
    monkeypatch.setenv("LAYERZERO_PERFDB", "postgresql://me:hunter2@127.0.0.1:1/perf")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-aws")
    log = tmp_path / "app.log"
    log.write_text("connecting to postgresql://me:hunter2@db/x\ntoken=hunter2hunter2\nfine\n")
    env = {**os.environ, "LAYERZERO_CACHE_DIR": str(tmp_path / "cache")}
    out = tmp_path / "b.tar.gz"
    done = run_python("-m", "layerzero", "bundle", "--out", out, "--device", "cpu", "--log", log,
                      env=env)
    assert done.returncode == 0, done.stderr
    content = everything(out)
    assert (b"hunter2" not in content and b"AWS" not in content
            and b"PATH" not in content.replace(b"<path>", b""))
    files = read_bundle(out)
    assert files["log.txt"].decode().splitlines()[2] == "fine"
    data = json.loads(files["environment.json"])
    assert data["environment"]["LAYERZERO_SEAL_KEY"] == "***"
    assert data["environment"]["LAYERZERO_PERFDB"] == "postgresql://127.0.0.1:1/perf"


def test_what_policy_hides_is_not_in_it(table, perfdb, tmp_path):
    # of other tests, whose kernels have sizes in their names
    events.reset()
    register(Fake("fake.first", fault=RuntimeError("bad file /home/me/prompt.txt: 'tell me'")),
             Fake("fake.second", prior=1e5))
    # told in full, and hidden from the bundle after all
    lz.rms_norm(rows())
    lz.configure(redact=["paths", "shapes", "texts"])
    lz.rms_norm(rows())
    log, out = tmp_path / "app.log", tmp_path / "b.tar.gz"
    log.write_text(f"read {tmp_path}/x of shape (7, 987654)\n")
    manifest = lz.write_bundle(out, table=table, device="cpu", log=log, calls=[CALL])
    files = read_bundle(out)
    assert manifest["redacted"] == ["paths", "shapes", "texts"]
    assert manifest["left_out"]["perf.sqlite"] == manifest["left_out"][
        "dispatch_table.json"] == "policy hides shapes"
    assert "perf.sqlite" not in files and "dispatch_table.validation.json" in files
    content = everything(out)
    assert not any(word in content for word in (str(tmp_path).encode(), b"tell me", b"/home",
                                                b"987654"))
    # limits of kernels, and the settings
    declared = ("capabilities.json", "environment.json")
    assert b"4096" not in b"".join(content for name, content in files.items()
                                   if name not in declared)
    capabilities.validate(json.loads(files["capabilities.json"]))   # declarations are not redacted


def test_a_policy_that_cannot_be_read_hides_everything(tmp_path):
    env = {**os.environ, "LAYERZERO_CACHE_DIR": str(tmp_path / "cache"),
           "LAYERZERO_POLICY": str(tmp_path / "no.yaml")}
    out = tmp_path / "b.tar.gz"
    done = run_python("-m", "layerzero", "bundle", "--out", out, "--device", "cpu", "--json",
                      env=env)
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert not manifest["ready"] and "capabilities.json" in manifest["left_out"]
    assert (manifest["redacted"] == ["paths", "shapes", "texts"]
            and str(tmp_path).encode() not in everything(out))


# where it goes

def test_a_file_that_is_there_stays(tmp_path):
    out = tmp_path / "b.tar.gz"
    out.write_text("mine")
    with pytest.raises(lz.errors.ConfigError, match="there already"):
        lz.write_bundle(out, device="cpu")
    assert out.read_text() == "mine"
    lz.write_bundle(out, device="cpu", force=True)
    assert "manifest.json" in read_bundle(out)


def test_a_link_is_replaced_not_followed(tmp_path):
    out, other = tmp_path / "b.tar.gz", tmp_path / "other"
    other.write_text("theirs")
    out.symlink_to(other)
    lz.write_bundle(out, device="cpu", force=True)
    assert other.read_text() == "theirs" and not out.is_symlink()


@pytest.mark.parametrize("out", ["no/such/folder/b.tar.gz"])
def test_where_it_cannot_be_written_is_said_and_nothing_is_left(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lz.errors.ConfigError, match="cannot be written"):
        lz.write_bundle(out, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_table_or_lockfile_is_said_and_left_out(tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{")
    manifest = lz.write_bundle(tmp_path / "b.tar.gz", table=wrong, lock=wrong, device="cpu")
    assert (not manifest["ready"] and {"dispatch_table.json", "layerzero.lock"}
            <= manifest["left_out"].keys())
    data = json.loads(read_bundle(tmp_path / "b.tar.gz")["dispatch_table.validation.json"])
    assert data["state"] == "fail"


def test_the_command_prints_what_is_in_it(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        main(("bundle", "--out", str(tmp_path / "b.tar.gz"), "--device", "cpu"))
    out = capsys.readouterr().out
    assert (int(stop.value.code or 0) == 0 and "capabilities.json" in out
            and "left out: layerzero.lock" in out)
    assert worlds.current() and redaction.active() == frozenset()


@pytest.mark.parametrize("at", [1e15, -1e15, float("inf"), float("nan")])
def test_the_time_of_a_clock_that_was_far_off_is_written_all_the_same(at):
    from layerzero.integrations import bundle
    assert str(at) in bundle._iso_time(at)
