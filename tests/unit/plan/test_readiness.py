"""lz.readiness_check and lz ready: every check fails for its own cause, says what to do, and writes
nothing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import Fake, register, run_lz, run_python

import layerzero as lz
from layerzero.backends.native import build
from layerzero.dispatch.background import compiling
from layerzero.machine.builds import build_of
from layerzero.operate import readiness
from layerzero.perf import snapshot
from layerzero.perf.interface import CorruptStore, NewerStore, StoreError
from layerzero.perf.record import Measurement
from layerzero.perf.store import SqliteStore
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.reason import Code, Reason
from layerzero.world import capabilities
from layerzero.world import snapshot as worlds
from layerzero.world.health import Health

pytestmark = pytest.mark.usefixtures("world")
CALL = Call("rms_norm", {"x": TensorSpec((4, 64), "float32")}, name="mine")
NAMES = ["kernels", "certificates", "warm-up", "measurements", "policy", "capabilities", "database",
         "memory",
         "versions", "health"]


def check(name, calls=(CALL,), **rest):
    return lz.readiness_check(calls, "cpu", **rest)[name]


@pytest.fixture
def perfdb(tmp_path):
    path = tmp_path / "perf.sqlite"
    lz.configure(perfdb=str(path))
    return path


def measured(path: Path, build: str | None = None, place: str | None = None,
             at: float | None = None) -> None:
    kernel = worlds.current().catalog.by_id["torch.rms_norm"]
    with SqliteStore(path) as store:
        store.put([Measurement("torch.rms_norm", "rms_norm", "float32",
                               place or worlds.current().place("cpu"), 5.0, samples=9, build=build
                               or build_of(kernel), at=at or time.time())])


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir() if p.is_file()}


# the report

def test_a_machine_that_has_everything_is_ready():
    report = lz.readiness_check(device="cpu")
    assert report and [c.name for c in report.checks] == NAMES
    assert all(c.want and c.got and c.state in ("ok", "warning") for c in report.checks)
    assert str(report).startswith("ready: 10 checks, 0 failed")


def test_the_report_is_json():
    data = json.loads(json.dumps(lz.readiness_check([CALL], "cpu").to_json()))
    assert data["schema"] == readiness.SCHEMA and data["ready"] is True
    assert all(set(c) == {"name", "state", "want", "got", "hint", "details"}
               for c in data["checks"])


def test_the_worst_finding_is_the_verdict_and_all_are_told():
    outcome = readiness.ReadinessCheck.of("x", "y",
                                          [readiness.ReadinessFinding("warning", "a", "do a"),
                                          readiness.ReadinessFinding("fail", "b", "do b")], "fine")
    assert (outcome.state, outcome.got, outcome.hint) == ("fail", "b (and 1 more)", "do b; do a")
    assert outcome.details == ("fail: b", "warning: a")
    assert readiness.ReadinessCheck.of("x", "y", [],
                                       "fine") == readiness.ReadinessCheck("x", "ok", "y", "fine")


def test_calls_may_come_from_a_file(tmp_path):
    from layerzero.files.calls import write_calls

    path = tmp_path / "calls.jsonl"
    write_calls(path, [CALL])
    assert "1 call, served by" in lz.readiness_check(path, "cpu")["kernels"].got
    assert "1 call," in lz.readiness_check(CALL, "cpu")["kernels"].got
    with pytest.raises(lz.errors.ConfigError, match=r"wanted calls \(lz.testing.Call\)"):
        lz.readiness_check([{"op": "rms_norm"}], "cpu")


# kernels

@pytest.mark.parametrize(("call", "part"), [
    (Call("nothing"), "there is no op 'nothing'"),
    (Call("rms_norm", {"x": TensorSpec((4, 64), "float99")}), "no dtype 'float99'"),
    (Call("rms_norm", {"y": TensorSpec((4, 64), "float32")}), "no parameter y")])
def test_a_call_that_cannot_be_made_is_not_ready(call, part):
    outcome = check("kernels", [CALL, call])
    assert (outcome.state == "fail" and part in outcome.got
            and outcome.hint == "correct the workload")


def test_a_call_that_policy_leaves_no_kernel_is_not_ready():
    lz.configure(rules=(lz.PolicyRule.of("deny", "*", "rms_norm"),))
    outcome = check("kernels")
    assert (outcome.state == "fail" and "DENIED_BY_POLICY" in outcome.got
            and "lz explain" in outcome.hint)
    assert check("kernels",
                 [Call("layer_norm", {"x": TensorSpec((4, 64), "float32")})]).state == "ok"


def test_a_locked_kernel_must_be_here():
    register(Fake("fake.gone", package="no_such_library"))
    lz.lock("rms_norm", "fake.gone")
    for calls in ((), (CALL,)):
        outcome = check("kernels", calls)
        assert (outcome.state == "fail"
                and any("locked to fake.gone" in line for line in (*outcome.details, outcome.got)))
        assert any("NOT_INSTALLED" in line for line in (*outcome.details, outcome.got))


def test_a_call_that_only_the_reference_serves_is_a_warning():
    lz.configure(rules=(lz.PolicyRule.of("allow", "reference.*", "rms_norm"),))
    outcome = check("kernels")
    assert outcome.state == "warning" and "only the reference" in outcome.got


# warm-up

@pytest.fixture
def cold(tmp_path, monkeypatch):
    """No test before this one has compiled anything on this machine."""
    build.is_built()                           # asked once in a process, of the real cache folder
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    for variable, folder in compiling.CACHES.items():
        monkeypatch.setenv(variable, str(tmp_path / folder))
    register(Fake("fake.jit", jit=True, prior=1e9, package="torch"))


@pytest.mark.parametrize(("mode", "state"), [("in_request", "fail"), ("background", "warning"),
                                             ("never", "warning")])
def test_what_would_be_compiled_is_told(cold, mode, state):
    lz.configure(jit=mode)
    outcome = check("warm-up")
    assert (outcome.state == state and "fake.jit is not compiled" in outcome.got
            and outcome.hint == "run lz warmup")
    assert ("a request would wait" in outcome.got) == (mode == "in_request")


def test_what_is_warmed_up_here_is_ready(cold):
    lz.configure(jit="in_request")
    assert lz.warmup([CALL], device="cpu").ok
    outcome = check("warm-up")
    assert outcome.state == "ok" and "1 calls" in outcome.got


def test_what_this_machine_compiled_before_is_no_failure(cold, tmp_path):
    lz.configure(jit="in_request")
    assert check("warm-up").state == "fail"
    assert lz.warmup([CALL], device="cpu").ok
    worlds.publish(lambda w: w.replace(warmed=frozenset()), "test")     # as in another process
    assert check("warm-up").state == "fail"                         # the caches are empty
    (tmp_path / "triton").mkdir(exist_ok=True)
    (tmp_path / "triton" / "compiled").write_text("x")
    outcome = check("warm-up")
    assert outcome.state == "warning" and "this machine's caches have it" in outcome.got


def test_a_lock_on_a_kernel_that_compiles_waits_in_the_request(cold):
    lz.lock("rms_norm", "fake.jit")
    assert check("warm-up").state == "fail"


# measurements and their database

def test_a_call_that_was_not_measured_is_a_warning(perfdb):
    lz.configure(rules=(lz.PolicyRule.of("allow", "torch.*", "rms_norm"),))
    outcome = check("measurements")
    assert (outcome.state == "warning" and "not measured" in outcome.got
            and "lz tune" in outcome.hint)


def test_measurements_of_another_build_are_stale(perfdb):
    measured(perfdb)
    assert "other builds" not in str(check("measurements", ()))
    measured(perfdb, build="older")
    measured(perfdb, build="older", place="another-machine")
    outcome = check("measurements", ())
    assert outcome.state == "warning" and outcome.got.startswith("1 measurements of this device")


def test_measurements_that_are_too_old_are_stale(perfdb):
    lz.configure(perfdb_ttl=1.0)
    measured(perfdb, at=time.time() - 3 * 86400)
    assert check("measurements", ()).state == "warning"


def test_a_database_is_read_and_left_as_it_is(perfdb):
    assert "nothing was measured yet" in check("database").got and not perfdb.exists()
    measured(perfdb)
    before = tree(perfdb.parent)
    outcome = check("database")
    assert outcome.state == "ok" and "1 measurements" in outcome.got
    assert tree(perfdb.parent) == before


def test_a_database_that_another_process_writes_is_read(perfdb):
    measured(perfdb)
    writer = sqlite3.connect(perfdb, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE rates SET at = 0")
    try:
        assert check("database").state == "ok"
    finally:
        writer.execute("ROLLBACK")
        writer.close()


def damage(path: Path, how: str) -> None:
    if how == "text":
        path.write_bytes(b"this is no database" * 100)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif how == "other":
        path.unlink()
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE theirs (x)")
        other.close()
    elif how == "newer":
        with sqlite3.connect(path) as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
    else:
        data = bytearray(path.read_bytes())
        data[200:3000] = os.urandom(2800)
        path.write_bytes(data)


@pytest.mark.parametrize(("how", "error"), [
    ("text", StoreError), ("empty", StoreError), ("cut", CorruptStore), ("other", StoreError),
    ("newer", NewerStore), ("bytes", StoreError)])
def test_a_damaged_database_fails_and_is_not_touched(perfdb, how, error):
    measured(perfdb)
    damage(perfdb, how)
    before = tree(perfdb.parent)
    with pytest.raises(error):
        snapshot.summary(perfdb)
    outcome = check("database", ())
    assert outcome.state == "fail" and outcome.hint and tree(perfdb.parent) == before


def test_rows_that_are_damaged_are_counted(perfdb):
    measured(perfdb)
    with sqlite3.connect(perfdb) as other:
        other.execute("UPDATE measurements SET median_us = 1")
    other.close()
    outcome = check("database")
    assert outcome.state == "warning" and "1 rows are damaged" in outcome.got


def test_no_database_is_fine():
    lz.configure(perfdb="off")
    assert check("database").got.startswith("switched off")


# table, lockfile, capabilities

@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.json"
    lz.tables.solve([CALL], path=path, device="cpu")
    return path


def test_a_table_that_holds_is_ready_and_says_which_calls_it_lacks(table):
    assert check("table", table=table).state == "ok"
    other = Call("layer_norm", {"x": TensorSpec((4, 64), "float32")})
    outcome = check("table", [CALL, other], table=table)
    assert outcome.state == "warning" and "layer_norm" in outcome.got and "lz solve" in outcome.hint
    lz.tables.use_table(table)
    assert check("table").got.endswith("in force")


@pytest.mark.parametrize("how", ["absent", "not json", "schema", "changed", "drifted"])
def test_a_table_that_does_not_hold_is_not_ready(table, how):
    data = json.loads(table.read_text())
    if how == "absent":
        table.unlink()
    elif how == "not json":
        table.write_text("{")
    elif how == "schema":
        table.write_text(json.dumps({**data, "schema": "layerzero.table/99"}))
    elif how == "changed":
        data["rows"][0]["choices"][0]["kernel"] = "reference.rms_norm"
        table.write_text(json.dumps(data))
    else:
        # the policy it was made under is another one
        lz.configure(strict_mode=True)
    report = lz.readiness_check([CALL], "cpu", table=table)
    assert not report and report["table"].state == "fail" and "lz solve" in report["table"].hint


def test_a_lockfile_must_be_held(table, tmp_path):
    path = tmp_path / "layerzero.lock"
    lz.tables.write_lockfile(table, path)
    assert check("lockfile", lock=path).state == "ok"
    lz.configure(rules=(lz.PolicyRule.of("deny", lz.which("rms_norm", torch.randn(4, 64)),
                                         "rms_norm"),))
    outcome = check("lockfile", lock=path)
    assert outcome.state == "fail" and "denied" in outcome.got
    path.write_text("{}")
    assert check("lockfile", lock=path).state == "fail"
    assert check("lockfile", lock=tmp_path / "none").state == "fail"


def test_a_capabilities_file_must_fit(tmp_path):
    data = capabilities.export(worlds.current().catalog)
    path = tmp_path / "capabilities.json"
    path.write_text(json.dumps(data))
    outcome = check("capabilities", capabilities=path)
    assert outcome.state == "ok" and outcome.got.endswith("it is in force")
    path.write_text(json.dumps({**data, "schema": "layerzero.capabilities/9"}))
    outcome = check("capabilities", capabilities=path)
    assert outcome.state == "fail" and "schema must be" in outcome.got


# policy

def test_a_policy_file_that_broke_meanwhile_fails(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\n")
    lz.load_config(path)
    assert check("policy").state == "ok"
    path.write_text("version: 1\nsettings:\n  no_such: 1\n")
    outcome = check("policy")
    assert outcome.state == "fail" and "unknown setting 'no_such'" in outcome.got
    assert outcome.hint == "correct the policy file"


@pytest.mark.parametrize(("change", "part"), [
    ({"disabled": True}, "disabled is set"), ({"strict_mode": True, "allow_adaptation": True},
                                              "strict_mode wins"),
    ({"jit": "in_request"}, "jit is in_request")])
def test_settings_that_one_does_not_want_in_production_are_warnings(change, part):
    lz.configure(**change)
    outcome = check("policy", ())
    assert outcome.state == "warning" and part in outcome.got and outcome.hint


def test_a_rule_that_names_no_kernel_is_told():
    lz.configure(rules=(lz.PolicyRule.of("deny", "flash_atn.*"),))
    assert check("policy").state == "warning" and "flash_atn.*" in check("policy").got
    lz.configure(rules=(lz.PolicyRule.of("lock", "flash_atn.v2", "rms_norm"),))
    assert check("policy").state == "fail"


# memory, versions, health

def test_a_headroom_beyond_what_is_free_is_told():
    lz.configure(memory_headroom=1 << 60)
    assert check("memory").state == "warning" and "promises" in check("memory").got


def test_a_workspace_beyond_the_headroom_fails():
    lz.configure(memory_headroom=1000)
    outcome = readiness.check_memory(worlds.current(), "cpu", 2000)
    assert (outcome.state == "fail"
            and "2,000 bytes of workspace are needed, the headroom is 1,000" in outcome.got)


def test_a_version_outside_what_was_tested_is_told(monkeypatch):
    monkeypatch.setitem(readiness.TESTED, "torch", ">=99")
    outcome = check("versions")
    assert outcome.state == "warning" and "outside >=99" in outcome.got


def test_a_library_of_another_version_is_told():
    register(Fake("fake.old", package="packaging", version=">=9999"))
    outcome = check("versions")
    assert outcome.state == "warning"
    assert any("fake: needs packaging >=9999" in line for line in (outcome.got, *outcome.details))


def test_what_the_package_itself_needs_must_be_here(monkeypatch):
    monkeypatch.setattr(readiness.importlib.metadata, "requires", lambda name: [
        "torch>=99", "no-such-library", "typer; extra == 'cli'", "packaging"])
    outcome = check("versions")
    failed = [line for line in outcome.details if line.startswith("fail")]
    assert outcome.state == "fail" and len(failed) == 2 and "torch >=99" in outcome.got


@pytest.mark.parametrize(("state", "verdict"),
                         [("open", "warning"), ("disabled", "fail"), ("half_open", "ok")])
def test_a_kernel_out_of_service_is_told(state, verdict):
    health = Health(state, 3, until=time.monotonic() + 60,
                    reason=Reason(Code.KERNEL_FAILED, None, "boom"))
    worlds.publish(lambda w: w.replace(health={"some_library": health}), "test")
    outcome = check("health")
    messages = [line for line in (*outcome.details, outcome.got) if "some_library" in line]
    assert bool(messages) == (verdict != "ok")
    if verdict == "fail":
        assert outcome.state == "fail" and "restart" in outcome.hint


# ranks

class Answers:
    """The store of a process group, as one process sees it."""

    def __init__(self, **message):
        self.told = {f"layerzero/readiness/{name[1:]}": value.encode()
                     for name, value in message.items()}

    def set(self, key, value):
        self.told[key] = value.encode()

    def get(self, key):
        return self.told[key]

    def check(self, keys):
        return all(key in self.told for key in keys)


def test_ranks_must_be_alike():
    world = worlds.current()
    mine = " ".join(f"{k}={v}" for k, v in readiness.identity(world).items())
    assert readiness.check_ranks(world, Answers(r1=mine), 0, 2).state == "ok"
    outcome = readiness.check_ranks(world, Answers(r1=mine.replace(world.policy.hash, "other")), 0,
                                    2)
    assert (outcome.state == "fail" and f"rank 1: policy=other instead of policy={world.policy.hash}"
            == outcome.got)
    outcome = readiness.check_ranks(world, Answers(), 0, 3)
    assert outcome.state == "warning" and "2 of 3 ranks" in outcome.got


def test_one_process_has_no_ranks():
    assert readiness.check_ranks(worlds.current()) is None


RANKS = """
import sys, torch.distributed as dist
import layerzero as lz
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for strict in (rank == 1, True):
    lz.configure(strict_mode=strict)
    lz.readiness_check(device="cpu")
    dist.barrier()
    print("state", lz.readiness_check(device="cpu")["ranks"].state)
    dist.barrier()
"""


def test_two_real_ranks_find_each_other_without_a_collective(tmp_path):
    """First their policies differ, then they are the same."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    with ThreadPoolExecutor(2) as threads:
        both = threads.map(lambda rank: run_python("-c", RANKS, rank, tmp_path / "store"),
                           "01")
    for done in both:
        assert done.stdout.split() == ["state", "fail", "state", "ok"], done.stderr


# the command

@pytest.fixture
def run(capsys, monkeypatch):

    return lambda *words: run_lz(capsys, "ready", *words, "--device", "cpu")


def test_the_exit_code_says_whether_it_is_ready(run, tmp_path):
    code, out, _ = run()
    assert code == 0 and all(name in out for name in NAMES) and "ready: 10 checks" in out
    lz.configure(disabled=True)
    assert run()[0] == 0 and run("--strict")[0] == 1
    code, out, _ = run("--table", str(tmp_path / "none.json"), "--json")
    data = json.loads(out)
    assert (code == 1 and not data["ready"]
            and [c["name"] for c in data["checks"] if c["state"] == "fail"] == ["table"])


@pytest.mark.parametrize("words", [("--calls", "no_such_file"), ("--model", "no-such-model"),
                                   ("--nonsense",),
                                   ("--calls", __file__, "--model", "smollm2-135m")])
def test_a_wrong_question_is_another_exit_code(run, words):
    code, out, err = run(*words)
    assert code == 2 and not out.startswith("{") and err


def test_a_model_is_checked_call_by_call(run):
    code, out, _ = run("--model", "smollm2-135m", "--dtype", "float32", "--json")
    kernels = next(c for c in json.loads(out)["checks"] if c["name"] == "kernels")
    assert code == 0 and "calls, served by" in kernels["got"]


def command(tmp_path, **environ):
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")}
    done = run_python("-m", "layerzero", "ready", "--device", "cpu", "--json",
                      env={**env, "LAYERZERO_CACHE_DIR": str(tmp_path), **environ})
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_policy_that_cannot_be_read_is_an_answer_not_an_error(tmp_path):
    code, data, _ = command(tmp_path, LAYERZERO_BREAKER_RATE="often")
    assert code == 1 and [c["name"] for c in data["checks"]] == ["policy"]
    assert "breaker_rate must be a number" in data["checks"][0]["got"]


def test_a_fresh_process_touches_neither_a_sound_nor_a_damaged_database(tmp_path):
    path = tmp_path / "perf.sqlite"
    measured(path)
    before = tree(tmp_path)
    code, data, _ = command(tmp_path)
    checks = {c["name"]: c for c in data["checks"]}
    assert code == 0 and "1 measurements" in checks["database"]["got"]
    assert tree(tmp_path) == before
    damage(path, "text")
    before = tree(tmp_path)
    code, data, _ = command(tmp_path)
    assert code == 1 and {c["name"] for c in data["checks"] if c["state"] == "fail"} == {"database"}
    assert tree(tmp_path) == before
