"""Measurements on their way into calls: the setting, the builds of kernels, other machines, the
command line.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest
import torch
from helpers import RMS_NORM, Fake, events_of, python, register, rows, run_lz

import layerzero as lz
from layerzero.backends import cuda as cuda_kernels
from layerzero.machine import builds
from layerzero.machine import state as machine
from layerzero.perf.interface import environment_id
from layerzero.perf.record import Measurement, Rates, kind_of
from layerzero.perf.store import SqliteStore
from layerzero.spec.errors import DataError
from layerzero.spec.event import StoreRecovered, StoreTrouble
from layerzero.world import measurements, perf_loading
from layerzero.world import snapshot as worlds

ATTRIBUTES = {"samples": 50, "spread": 0.01}


def timing(kernel: str, us: float, x: torch.Tensor | None = None, **changes) -> Measurement:
    """As tuning would have it, for a call of rms_norm in this process."""
    plan = lz.explain("rms_norm", rows() if x is None else x)
    kind = kind_of(RMS_NORM, plan.facts)
    row = Measurement(kernel, "rms_norm", kind.bucket, worlds.current().place("cpu"), us,
                      family=kind.family, sizes=kind.sizes_text, flops=1e3, bytes=1e3, **ATTRIBUTES)
    return row._replace(**changes)


def torchs_own(**changes) -> Measurement:
    """Without a time for the default, no other time says who is faster."""
    return timing("torch.rms_norm", 1e4, **changes)


def source_of(kernel: str) -> str:
    return next(s.score.source for s in lz.explain("rms_norm", rows()).steps if s.kernel == kernel)


@pytest.fixture
def perfdb(tmp_path, monkeypatch, world):
    """The setting names a file of the test's own; nothing of the user's is read or written."""
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    lz.configure(perfdb=str(tmp_path / "perf.sqlite"))
    return tmp_path / "perf.sqlite"


# the setting

def test_what_is_measured_decides_from_then_on_and_is_kept(perfdb):
    fast, slow = Fake("fake.fast", prior=1.0), Fake("fake.slow", prior=1e6)
    register(fast, slow)
    assert lz.which("rms_norm", rows()) == "fake.slow"         # praised by its prior
    measurements.record([torchs_own(), timing("fake.fast", 1e-3), timing("fake.slow", 900.0)])
    assert lz.which("rms_norm", rows()) == "fake.fast"
    with SqliteStore(perfdb) as store:
        kept = {m.kernel: m for m in store.rows()}
        environments = store.environments()
    m = kept["fake.fast"]
    assert ((m.build, m.samples) == (builds.build_of(fast.kernel), 50)
            and abs(m.at - time.time()) < 60)
    assert environments[m.environment]["device"]["torch_version"] == torch.__version__
    lz.configure(perfdb="off")
    assert source_of("fake.fast") == "less work"
    lz.configure(perfdb=str(perfdb))
    assert lz.which("rms_norm", rows()) == "fake.fast" and source_of("fake.fast") == "measured"


def test_a_kernel_that_comes_later_finds_its_measurements(perfdb):
    fake = Fake("fake.late", prior=1.0)
    register(fake)
    measurements.record([torchs_own(), timing("fake.late", 1e-3)])
    lz.unregister("fake.late")
    measurements.forget_measurements()
    register(Fake("fake.other"))
    assert len(worlds.current().perf) == 0
    lz.register(fake.kernel)
    assert [m.kernel for m in worlds.current().perf] == ["fake.late"]


def test_without_a_store_it_is_kept_in_memory(perfdb):
    lz.configure(perfdb="off")
    register(Fake("fake.one"))
    measurements.record([torchs_own(), timing("fake.one", 5.0)], {"here": Rates(1.0, 2.0)})
    # another kernel does not take it away
    register(Fake("fake.two"))
    assert (source_of("fake.one") == "measured"
            and worlds.current().perf.rates["here"] == Rates(1.0, 2.0))
    assert not perfdb.exists()
    with pytest.raises(lz.errors.ConfigError, match="perfdb is 'off'"):
        measurements.store()


def test_measured_rates_are_the_roof_of_the_place(perfdb):
    place = worlds.current().place("cpu")
    measurements.record([], {place: Rates(123.0, 456.0)})
    assert worlds.current().selection_context("cpu", None).rates == Rates(123.0, 456.0)
    measurements.reload_measurements()
    assert worlds.current().selection_context("cpu", None).rates == Rates(123.0, 456.0)


def test_days_after_which_a_measurement_counts_no_more(perfdb):
    register(Fake("fake.one"))
    ago = time.time() - 3 * 86400
    measurements.record([torchs_own(at=ago), timing("fake.one", 5.0, at=ago)])
    lz.configure(perfdb_ttl=2)
    assert source_of("fake.one") == "less work"
    lz.configure(perfdb_ttl=4)
    assert source_of("fake.one") == "measured"


def test_a_world_begins_with_what_is_in_the_cache_folder(tmp_path):
    code = """
        import sys, torch, layerzero as lz
        from layerzero.world import measurements, snapshot as world
        from layerzero.perf.record import Measurement, kind_of
        x = torch.ones(3, 16)
        plan = lz.explain("rms_norm", x)
        print("sqlite3" in sys.modules, len(world.current().perf), plan.steps[0].score.source)
        kind, place = kind_of(lz.op("rms_norm"), plan.facts), world.current().place("cpu")
        measurements.record([Measurement(step.kernel, "rms_norm", kind.bucket, place, 3.0) for step in plan.steps])
    """
    first = python(code, LAYERZERO_CACHE_DIR=str(tmp_path)).split()
    second = python(code, LAYERZERO_CACHE_DIR=str(tmp_path)).split()
    kept = len(list(SqliteStore(tmp_path / "perf.sqlite").rows()))
    assert first[1:] == ["0", "default"] and second[1:] == [str(kept), "measured"]
    # nothing to read: SQLite is not even imported
    assert first[0] == "False"
    elsewhere = python(code, LAYERZERO_CACHE_DIR=str(tmp_path), LAYERZERO_PERFDB="off").split()
    assert elsewhere[1:] == ["0", "default"]


def test_a_policy_file_may_switch_it_off(tmp_path, perfdb):
    file = tmp_path / "policy.yaml"
    file.write_text("settings: {perfdb: off}\n")
    lz.load_config(file)
    # what the program said comes first
    assert lz.get_config()["settings"]["perfdb"] == str(perfdb)
    lz.configure(perfdb="")
    worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")),
                   "policy:programmatic")
    assert lz.get_config()["settings"]["perfdb"] == "off"


# what may go wrong does not stop a call

@pytest.mark.parametrize(("setting", "word"), [
    ("mysql://me:secret@host/db", "postgresql://"), ("/dev/null/perf.sqlite", "perf"),
    # nobody listens there, or the extra is not installed
    ("postgresql://me:secret@127.0.0.1:9/db", ""),
])
def test_a_store_that_cannot_be_opened_is_an_event(perfdb, emitted, setting, word):
    lz.configure(perfdb=setting)
    lz.rms_norm(rows())
    register(Fake("fake.one"))
    measurements.record([torchs_own(), timing("fake.one", 5.0)])
    events = events_of(StoreTrouble, emitted)
    assert events and word in events[0].problem
    assert "2 measurements are kept in memory" in events[-1].action
    assert "secret" not in str(events) and "secret" not in measurements.status().text
    assert source_of("fake.one") == "measured" and not measurements.status().ok


def test_a_store_that_is_locked_for_writing_costs_only_the_keeping(perfdb, emitted, monkeypatch):
    register(Fake("fake.one"))
    measurements.record([torchs_own(), timing("fake.one", 5.0)])
    monkeypatch.setattr(perf_loading, "WRITE_SECONDS", 0.1)
    other = sqlite3.connect(perfdb, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    emitted.clear()
    measurements.record([timing("fake.one", 4.0)])
    other.execute("ROLLBACK")
    other.close()
    (event,) = events_of(StoreTrouble, emitted)
    assert "locked" in event.problem
    assert next(iter(worlds.current().perf)).median_us == 4.0
    measurements.record([timing("fake.one", 3.0)])
    assert measurements.status().ok                            # it works again
    assert events_of(StoreRecovered,
                     emitted)[0].written == 1  # of the same row the newer one was left


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="there are no users here")
def test_a_store_that_may_only_be_read_is_read(tmp_path):
    """By a user who may not write there; root may always."""
    code = """
        import os, layerzero as lz
        from layerzero.world import measurements, snapshot as world
        from layerzero.perf.record import Measurement
        from layerzero.spec.event import StoreTrouble
        world.current()
        import layerzero.perf.store, layerzero.world.capabilities, layerzero.world.settings
        folder = os.environ["FOLDER"]
        os.chmod(folder, 0o555); os.chmod(folder + "/perf.sqlite", 0o444)
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        seen = []
        lz.subscribe(seen.append)
        lz.configure(perfdb=folder + "/perf.sqlite")
        print(len(world.current().perf), len([e for e in seen if isinstance(e, StoreTrouble)]))
        measurements.record([Measurement("reference.rms_norm", "rms_norm", "b", "p", 1.0)])
        print(len(world.current().perf), [e.problem for e in seen if isinstance(e, StoreTrouble)])
    """
    # another user cannot look into tmp_path
    with tempfile.TemporaryDirectory() as folder:
        kernel = worlds.current().catalog.by_id["reference.rms_norm"]
        with SqliteStore(Path(folder) / "perf.sqlite") as store:
            store.put([Measurement("reference.rms_norm", "rms_norm", "a", "p", 1.0,
                                   build=builds.build_of(kernel))])
        os.chmod(folder, 0o755)
        lines = python(code, FOLDER=folder, LAYERZERO_CACHE_DIR=str(tmp_path)).splitlines()
        os.chmod(folder, 0o755)
    assert lines[0] == "1 0"
    assert lines[1].startswith("2 ['") and "readonly" in lines[1]


def test_a_measurement_that_is_none_is_refused(perfdb):
    with pytest.raises(DataError, match="median_us"):
        measurements.record([timing("fake.one", float("nan"))])
    assert not perfdb.exists()


# builds

def load_nothing():
    return RMS_NORM.reference


def test_our_own_kernels_are_known_by_their_source_and_each_by_its_own():
    builds_by_id = {k.id: builds.build_of(k) for k in worlds.current().catalog.kernels}
    assert all(builds_by_id[k].startswith("source#")
               for k in ("torch.rms_norm", "reference.rms_norm", "native.rms_norm"))
    # each formula has its own file
    assert builds_by_id["reference.rms_norm"] != builds_by_id["reference.linear"]
    assert builds_by_id["torch.rms_norm"] != builds_by_id["torch.linear"]
    build = builds_by_id["flash_attn.v2"]
    assert build == "" or build.startswith("flash-attn==")


def test_a_build_covers_the_kernels_in_other_languages_of_every_room(monkeypatch):
    """Else a changed kernel would keep the measurements and proofs of the old one."""
    hashed = set()
    read = Path.read_bytes
    builds._content_digest.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", lambda path: hashed.add(path) or read(path))
    builds.source_digest(cuda_kernels.KERNELS[0].load)
    folder = Path(cuda_kernels.__file__).parent
    own = {p for p in folder.rglob("*") if p.suffix in (".cu", ".h") and p.parent.name != "step"}
    assert len(own) > 15 and own <= hashed      # step/ is no kernel of an op


def test_a_build_does_not_depend_on_what_the_process_has_imported():
    """Else a process that loaded one module more would find neither its measurements nor its
    proofs."""
    output = python("""
        import importlib, json, pkgutil
        import layerzero as lz
        from layerzero.machine import builds
        from layerzero.world import snapshot as world
        for found in pkgutil.iter_modules(importlib.import_module("layerzero.backends").__path__,
                                         "layerzero.backends."):
            importlib.import_module(found.name)
        for name in ("cuda.attention.decode", "cuda.linear.gemv", "triton.machine"):
            importlib.import_module("layerzero.backends." + name)
        print(json.dumps({k.id: builds.build_of(k) for k in world.current().catalog.kernels}))
    """)
    fresh = python("""
        import json
        import layerzero as lz
        from layerzero.machine import builds
        from layerzero.world import snapshot as world
        print(json.dumps({k.id: builds.build_of(k) for k in world.current().catalog.kernels}))
    """)
    assert json.loads(output) == json.loads(fresh)


def plugin(tmp_path, monkeypatch, name, **files):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    for file, text in files.items():
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def build_in_new_process(tmp_path, package):
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import layerzero as lz
        from layerzero.machine.builds import build_of
        from {package}.kernels import load
        print(build_of(lz.Kernel("plugin.k", lz.op("rms_norm"), load, package={package!r})))
        print(build_of(lz.Kernel("plugin.k", lz.op("rms_norm"), load)))
    """
    return python(code).splitlines()


def test_a_change_of_a_plugins_formula_is_another_build(tmp_path, monkeypatch):
    text = "from .formula import run\n\n\ndef load():\n    return run\n"
    formula = "def run(x): return x\n"
    plugin(tmp_path, monkeypatch, "my_plugin", __init__="", kernels=text, formula=formula,
           other="A = 1\n")
    first = build_in_new_process(tmp_path, "my_plugin")
    (tmp_path / "my_plugin" / "other.py").write_text("A = 2\n")
    # that file has nothing to do with it
    assert build_in_new_process(tmp_path, "my_plugin") == first
    (tmp_path / "my_plugin" / "formula.py").write_text("def run(x): return x + 0\n")
    assert build_in_new_process(tmp_path, "my_plugin")[1] != first[1]


def test_a_library_is_known_by_its_version_and_its_files(tmp_path, monkeypatch):
    plugin(tmp_path, monkeypatch, "some_lib", __init__="")
    info = tmp_path / "some_lib-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-lib\nVersion: 1.5\n")

    def build(record):
        (info / "RECORD").write_text(record)
        builds._builds.clear()
        builds._files_digest.cache_clear()
        return builds.build_of(lz.Kernel("some.k", RMS_NORM, load_nothing, package="some_lib"))

    first = build("some_lib/_C.so,sha256=aaaa,100\nsome_lib/__pycache__/x.pyc,,\n")
    assert first.startswith("some-lib==1.5#")
    assert build("some_lib/_C.so,sha256=aaaa,100\nsome_lib/__pycache__/y.pyc,,\n") == first
    # built again under the same version
    assert build("some_lib/_C.so,sha256=bbbb,100\n") != first
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    before = build("")
    (tmp_path / "some_lib" / "__init__.py").write_text("A = 1\n")
    assert build("") != before                                         # one that is being worked on


def test_a_library_that_is_not_here_has_no_build():
    assert builds.build_of(lz.Kernel("nowhere.k", RMS_NORM, load_nothing,
                                     package="not_installed_anywhere")) == ""


def test_what_was_typed_at_a_prompt_is_known_by_its_code():
    def typed(text):
        space = {"__name__": "no_such_module"}
        exec(text, space)
        return builds.build_of(lz.Kernel("typed.k", RMS_NORM, space["load"]))

    one, two = typed("def load():\n    return 1\n"), typed("def load():\n    return 2\n")
    assert one == typed("def load():\n    return 1\n") and one != two


# environments

def test_an_environment_says_all_a_measurement_may_depend_on(world):
    environment = measurements.environment("cpu")
    assert environment["device"]["name"] and environment["place"] == worlds.current().place("cpu")
    assert {"threads", "capabilities", "machine", "platform", "python", "layerzero",
            "state"} <= environment.keys()
    assert environment_id(json.loads(json.dumps(environment))) == environment_id(environment)
    before = environment["capabilities"]
    register(Fake("fake.one"))
    assert measurements.environment("cpu")["capabilities"] != before


@pytest.mark.parametrize(("text", "want"), [
    ("38, 71.52, 700.00, 345, 2619, 512, 0, P0\n", {
        "temperature_c": 38.0, "power_w": 71.52, "power_limit_w": 700.0, "clock_mhz": 345.0,
        "memory_clock_mhz": 2619.0, "memory_used_mib": 512.0, "busy_percent": 0.0,
        "performance_state": "P0"}),
    ("40, [N/A], [N/A], 1410, 1215, 10, [N/A], P0", {
        "temperature_c": 40.0, "clock_mhz": 1410.0, "memory_clock_mhz": 1215.0,
        "memory_used_mib": 10.0, "performance_state": "P0"}),
    ("", {}), ("No devices were found\n", {}),
])
def test_what_nvidia_smi_says_is_read(text, want):
    assert machine.parse_smi(text) == want


@pytest.mark.parametrize(("name", "visible", "want"), [
    ("NVIDIA H200", "", "GPU"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "0", "MIG"),
    ("NVIDIA A100", "MIG-1234", "MIG"), ("NVIDIA H200", "GPU-5678,GPU-9", "GPU"),
])
def test_a_slice_of_a_gpu_is_not_a_gpu(name, visible, want):
    assert machine.uuid_class(name, visible) == want


# other machines

def test_export_and_import_bring_back_everything(tmp_path):
    with SqliteStore(tmp_path / "a.sqlite") as a, SqliteStore(tmp_path / "b.sqlite") as b:
        a.put([Measurement(f"lib.k{i}", "rms_norm", "b", "p", 1 / (i + 3), at=5.0 + i)
               for i in range(20)], {"ä": 1})
        a.write((), {}, {"p": (Rates(1 / 3, 2e5), 7.0)})
        assert a.export(tmp_path / "out.jsonl") == 20
        # again changes nothing
        assert b.import_(tmp_path / "out.jsonl") == b.import_(tmp_path / "out.jsonl") == 20
        assert sorted(a.rows()) == sorted(b.rows()) and a.environments() == b.environments()
        assert a.timed_rates() == b.timed_rates()


@pytest.mark.parametrize(("spoil", "word"), [
    (lambda lines: lines[:-3], "cut off"), (lambda lines: lines[1:], "schema"),
    (lambda lines: [], "schema"),
    (lambda lines: [*lines[:4], lines[4][:30], *lines[5:]],
     r"x.jsonl:5: wanted one JSON value on the line"),
    (lambda lines: [*lines[:4], "[1]", *lines[5:]], "x.jsonl:5: wanted a JSON object"),
    (lambda lines: [*lines[:-1], lines[-1].replace('"median_us": ', '"median_us": -')],
     "median_us"),
    (lambda lines: [*lines[:-1], lines[-1].replace('"median_us"', '"median"')], "unknown: median"),
    (lambda lines: [lines[0], lines[1].replace("here", "there"), *lines[2:]],
     "content its id says"),
    (lambda lines: [*lines[:-1], '{"surprise": 1}'], "surprise"),
])
def test_an_import_that_is_not_whole_changes_nothing(tmp_path, spoil, word):
    path = tmp_path / "x.jsonl"
    with SqliteStore(tmp_path / "a.sqlite") as a, SqliteStore(tmp_path / "b.sqlite") as b:
        a.put([Measurement(f"lib.k{i}", "rms_norm", "b", "p", 1.5, at=5.0) for i in range(9)],
              {"machine": "here"})
        a.export(path)
        path.write_text("\n".join(spoil(path.read_text().splitlines())))
        with pytest.raises(DataError, match=word):
            b.import_(path)
        assert list(b.rows()) == [] and b.environments() == {}


def test_stores_of_two_machines_become_one_whatever_the_order(tmp_path):
    def machine_store(name, offset):
        store = SqliteStore(tmp_path / f"{name}.sqlite")
        store.put([Measurement("lib.k", "rms_norm", f"b{i}", f"place-{name}", 1.0 + i, at=5.0 + i)
                   for i in range(10)],
                  {"machine": name})
        store.put([Measurement("lib.k", "rms_norm", f"b{i}", "twins", 1.0 + offset, at=5.0 + offset)
                   for i in range(5)],
                  {"machine": name})
        store.write((), {}, {"twins": (Rates(1.0 + offset, 1.0), 1.0 + offset)})
        return store

    with machine_store("a", 0) as a, machine_store("b", 1) as b:
        merged = []
        for i, order in enumerate(((a, b), (b, a))):
            with SqliteStore(tmp_path / f"m{i}.sqlite") as m:
                for source in order:
                    m.merge(source)
                merged.append((sorted(m.rows()), m.environments(), m.timed_rates()))
        assert merged[0] == merged[1]
        assert len(merged[0][0]) == 25 and len(merged[0][1]) == 2
        # the newer ones
        assert {m.median_us for m in merged[0][0] if m.place == "twins"} == {2.0}


# the command line

@pytest.fixture
def run(capsys, perfdb):
    """Run the command in this process: (exit code, stdout, stderr)."""
    return lambda *words: run_lz(capsys, *words)


def fill(perfdb):
    """One row of each standing."""
    measurements._environments.clear()
    register(Fake("fake.one"))
    row = timing("fake.one", 5.0)
    measurements.record([row])
    with SqliteStore(perfdb) as store:
        (here,) = store.environments()
        store.put([row._replace(build="another", environment=here),
                   row._replace(place="ffff-1t", environment=here)])
        store.put([row._replace(place=row.place.replace("-", "-9"), build=
                                builds.build_of(worlds.current().catalog.by_id["fake.one"]))])
        store.put([row._replace(place="eeee-1t"), row._replace(kernel="gone.k")],
                  {"machine": "another one"})
        kernel = worlds.current().catalog.by_id["fake.one"]
        store.put([row._replace(bucket="old", at=1.0, build=builds.build_of(kernel))])


STANDINGS = {"in use": 2, "stale: another build": 1, "of another number of threads": 1,
             "stale: device, torch, driver or toolkit changed": 1, "of another machine": 1, "unknown kernel": 1}


def test_show_says_how_each_row_stands(run, perfdb):
    assert run("perf", "show")[1].strip().startswith(f"{perfdb}: no measurements")
    fill(perfdb)
    code, out, _ = run("perf", "show", "--all", "--json")
    data = json.loads(out)
    assert code == 0 and data["counts"] == STANDINGS
    assert sum(data["counts"].values()) == len(data["measurements"]) == 7
    doctor = next(c.detail for c in lz.doctor().checks if c.name == "measurements")
    in_use, others = doctor.split("; not in use: ")
    assert in_use == "2 measurements in use"
    assert all(f"{n} {why}" in others for why, n in STANDINGS.items() if why != "in use")
    code, out, _ = run("perf", "show")
    assert code == 0 and out.count("fake.one") == 2 and "1 of another machine" in out
    lz.configure(perfdb_ttl=30)
    assert json.loads(run("perf", "show", "--json")[1])["counts"]["expired"] == 1
    assert json.loads(run("perf", "show", "--json", "--kernel", "gone.*")[1])["counts"] == {
        "unknown kernel": 1}
    assert "... and 2 more" in run("perf", "show", "--all", "--limit", "5")[1]


def test_prune_removes_what_is_stale_here_and_leaves_other_machines_alone(run, perfdb):
    fill(perfdb)
    assert run("perf", "prune", "--dry-run")[1] == "2 measurements would be removed\n"
    assert run("perf", "prune")[1] == "2 measurements removed\n"
    assert run("perf", "prune")[1] == "0 measurements removed\n"
    data = json.loads(run("perf", "show", "--all", "--json")[1])["counts"]
    assert data == {k: n for k, n in STANDINGS.items() if not k.startswith("stale")}
    assert run("perf", "prune", "--older-than", "30", "--kernel",
               "fake.*")[1] == "1 measurement removed\n"
    assert run("perf", "prune", "--all")[1] == "4 measurements removed\n"
    with SqliteStore(perfdb) as store:
        assert store.environments() == {}


def test_what_one_machine_exports_another_imports(run, perfdb, tmp_path):
    fill(perfdb)
    code, out, _ = run("perf", "export", str(tmp_path / "x.jsonl"))
    assert code == 0 and out.startswith("7 measurements written")
    lz.configure(perfdb=str(tmp_path / "second.sqlite"))
    assert run("perf", "import", str(tmp_path / "x.jsonl"), str(perfdb))[0] == 0
    assert json.loads(run("perf", "show", "--all", "--json")[1])["counts"] == STANDINGS
    (tmp_path / "bad.sqlite").write_bytes(b"SQLite format 3\0 and then nothing")
    for bad, word in (("nowhere", "cannot read"), ("bad.sqlite", "bad.sqlite"),
                      ("../" + tmp_path.name, "cannot read")):
        code, _, err = run("perf", "import", str(tmp_path / bad))
        assert code == 2 and word in err and err.startswith("error: ")
    assert json.loads(run("perf", "show", "--all", "--json")[1])["counts"] == STANDINGS
    assert (tmp_path / "bad.sqlite").exists()                  # someone else's file is not renamed
