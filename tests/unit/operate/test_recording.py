"""What a program calls is written down as it was: every call, on both call paths, and nothing else
changes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
from dataclasses import replace

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    normalized,
    path_of,
    qkv,
    register,
    rows,
    run_lz,
    run_python,
    warm_python,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.cli.commands.measure import workload
from layerzero.dispatch import dispatcher as dispatching
from layerzero.dispatch import native
from layerzero.dispatch.dispatcher import dispatchers, public_function
from layerzero.files.calls import read_calls
from layerzero.operate import calls as written
from layerzero.operate import recording
from layerzero.spec.call import TensorSpec
from layerzero.tuning.workload import read_recordings
from layerzero.world import config

record = recording.recording


def of(recorder, op):
    return [c for c in recorder.calls if c.op == op]


# what is written

def test_calls_are_counted_and_results_are_the_same(path):
    fn, x, w = path_of("rms_norm", path), rows(4, 64), rows(1, 64)[0]
    before = fn(x, w)
    with record() as recorder:
        results = [fn(x, w) for _ in range(7)]
    assert all(torch.equal(r, before) for r in results)
    (call,) = recorder.calls
    assert call.count == 7 and call.name == f"served by {lz.which('rms_norm', x, w)}"
    assert call.arguments["x"] == TensorSpec((4, 64), "float32") and not call.grad


def test_after_the_block_calls_hit_again(path):
    fn, x = path_of("rms_norm", path), rows(4, 32)
    with record():
        fn(x)
        assert not dispatchers["rms_norm"].globals["TABLE"]
    fn(x)
    fn(x)
    dispatcher = dispatchers["rms_norm"]
    assert type(dispatcher) is dispatching.Dispatcher is recording._PLAIN
    assert (dispatcher.globals["TABLE"] is dispatcher.cache.table
            and len(dispatcher.cache.table) == 1)
    if path == "native":
        assert dispatcher.native.compiled.size() == 1


def test_a_growing_cache_is_one_kind_until_its_bucket_ends(path):
    fn = path_of("attention", path)
    with record() as recorder:
        for seen in range(97, 130):
            fn(*qkv(1, seen))
    assert [(c.arguments["key"].shape[2], c.count) for c in recorder.calls] == [(97, 32), (129, 1)]


def test_layouts_that_kernels_tell_apart_are_kinds_of_their_own(path):
    fn, (q, k, v) = path_of("attention", path), qkv(8)
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    with record() as recorder:
        fn(q, k, v)
        fn(*moved)
        fn(*moved)
    assert [(c.count, c.arguments["query"].strides)
            for c in recorder.calls] == [(1, None), (2, moved[0].stride())]


def test_unusual_calls_are_written_as_what_was_served(world):
    q, k, v = qkv(8)
    x = rows(4, 16)
    with record() as recorder:
        lz.attention(q[0], k[0], v[0])                         # three dimensions
        lz.attention(q, k, v, backend="torch.sdpa_math")
        with torch.autocast("cpu", torch.bfloat16):
            lz.attention(q, k, v)
        with lz.prefer("reference.*"):
            lz.rms_norm(x)
        lz.rms_norm(x.requires_grad_())
    flat, named, lowered = of(recorder, "attention")
    assert flat.arguments["query"].shape == (1, 2, 8, 16)
    assert named.name == "served by torch.sdpa_math"
    assert lowered.arguments["query"].dtype == "bfloat16"
    assert [c.grad for c in of(recorder, "rms_norm")] == [False, True]
    assert of(recorder, "rms_norm")[0].name == "served by reference.rms_norm"


def test_who_served_after_a_fault_is_named(path):
    broken, sound = Fake("fake.broken", fault=RuntimeError("no"),
                         prior=1e7), Fake("fake.sound", prior=1e6)
    register(broken, sound)
    x = rows()
    with record() as recorder:
        assert torch.equal(path_of("rms_norm", path)(x), normalized(x))
    assert [(c.name, c.count) for c in recorder.calls] == [("served by fake.sound", 1)]


def test_a_call_that_fails_is_not_written(path):
    fn, x = path_of("rms_norm", path), rows()
    with record() as recorder, pytest.raises(lz.errors.InvalidCall):
        fn(x, rows(1, 17)[0])
    assert recorder.calls == ()


def test_a_new_world_does_not_end_it(path):
    fn, x = path_of("rms_norm", path), rows()
    with record() as recorder:
        fn(x)
        lz.clear_cache()
        fn(x)
        lz.configure(deterministic=True)
        fn(x)
    assert [c.count for c in recorder.calls] == [3]


def test_an_operation_made_meanwhile_is_recorded(world):
    op = replace(RMS_NORM, name="recorded_norm")
    with record() as recorder:
        fn = lz.register(op)
        register(Fake("fake.recorded", op))
        fn(rows())
        fn(rows())
    assert [(c.op, c.count) for c in recorder.calls] == [("recorded_norm", 2)]
    assert type(dispatchers["recorded_norm"]) is recording._PLAIN


def test_no_call_of_any_thread_is_lost(path):
    fn, x = path_of("rms_norm", path), rows()
    with record() as recorder, torch.no_grad():
        workers = [threading.Thread(target=lambda: [fn(x) for _ in range(200)]) for _ in range(4)]
        for t in workers:
            t.start()
        for t in workers:
            t.join()
    assert [c.count for c in recorder.calls] == [800]


def test_recordings_inside_each_other_each_see_their_own(world):
    x = rows()
    with record() as outer:
        lz.rms_norm(x)
        with record() as inner:
            lz.rms_norm(x)
        lz.rms_norm(x)
    assert [c.count for c in outer.calls] == [3] and [c.count for c in inner.calls] == [1]


def test_what_cannot_be_written_is_counted(world):
    tokenize = lz.op("tokenize")
    with record() as recorder:
        public_function(tokenize)(**tokenize.inputs(**tokenize.cases[0]))
    assert recorder.calls == () and recorder.unwritten == 1


def test_a_traced_call_is_written_once(world):
    with record() as recorder, FakeTensorMode():
        for _ in range(3):
            lz.rms_norm(torch.empty(5, 32))
    (call,) = recorder.calls
    assert call.count == 1 and call.name.startswith("traced into ")
    assert call.arguments["x"] == TensorSpec((5, 32), "float32")


def test_values_of_whole_numbers_are_kept_so_that_the_call_can_be_made_again(world):
    table, ids = rows(9, 8), torch.tensor([8, 0, 3])
    with record() as recorder:
        lz.embedding(ids, table)
    values = written.make_values(lz.op("embedding"), recorder.calls[0])
    assert torch.equal(values["ids"], ids)


# files

def test_the_file_knows_a_new_kind_at_once_and_all_counts_in_the_end(world, tmp_path):
    file = tmp_path / "calls.jsonl"
    with record(file) as recorder:
        lz.rms_norm(rows())
        assert [c.op for c in read_calls(file)] == ["rms_norm"]
        for _ in range(4):
            lz.rms_norm(rows())
        lz.attention(*qkv(4))
        assert {c.op for c in read_calls(file)} == {"rms_norm", "attention"}
    assert read_calls(file) == recorder.calls
    assert [c.count for c in recorder.calls] == [5, 1]
    assert list(tmp_path.iterdir()) == [file]


def test_a_recording_without_calls_is_an_empty_file(world, tmp_path):
    with record(tmp_path / "calls.jsonl"):
        pass
    assert read_calls(tmp_path / "calls.jsonl") == ()


def test_a_path_that_cannot_be_written_is_said_before_the_work(world, tmp_path):
    lz.rms_norm(rows())                        # its dispatcher is there, whichever tests ran before
    with pytest.raises(lz.errors.ConfigError,
                       match="No such file"), record(tmp_path / "no" / "calls.jsonl"):
        pytest.fail("the block ran")
    with pytest.raises(lz.errors.ConfigError, match="cannot be written"), record(tmp_path):
        pytest.fail("the block ran")
    os.mkfifo(tmp_path / "pipe")               # opening it would wait for who reads it
    with pytest.raises(lz.errors.ConfigError, match="is a pipe"), record(tmp_path / "pipe"):
        pytest.fail("the block ran")
    assert type(dispatchers["rms_norm"]) is recording._PLAIN


def test_a_file_that_goes_away_ends_the_recording_and_not_the_program(world, tmp_path, caplog):
    folder = tmp_path / "deep"
    folder.mkdir()
    with record(folder / "calls.jsonl") as recorder:
        lz.rms_norm(rows())
        (folder / "calls.jsonl").unlink()
        folder.rmdir()
        lz.attention(*qkv(4))
    assert "is not complete" in caplog.text and len(recorder.calls) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_write_its_parents_file(world, tmp_path):
    file, x = tmp_path / "calls.jsonl", rows()
    with record(file):
        lz.rms_norm(x)
        child = os.fork()
        if not child:
            for _ in range(5):
                lz.rms_norm(x)
            recording._observers[0].flush()
            os._exit(0)
        os.waitpid(child, 0)
    assert [c.count for c in read_calls(file)] == [1]


# whole programs

whole_programs = pytest.mark.skipif(
    recording.VARIABLE not in config.VARIABLES or "recording" not in lz._PLACES,
    reason=f"{recording.VARIABLE} is not read by this library")

APP = """
    import os, sys, torch
    import layerzero as lz
    x = torch.ones(3, 16)
    for _ in range(6):
        lz.rms_norm(x)
"""


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")
            or k == "LAYERZERO_CACHE_DIR"}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(code, *words, **environ):
    """`lz record` of a Python program: the process that ended."""
    return run_python("-m", "layerzero", "record", *words, "--", warm_python(), "-c",
                      textwrap.dedent(code), env=environment(**environ))


@whole_programs
@pytest.mark.parametrize("use_native", ["1", "0"])
def test_a_program_is_recorded_from_its_first_call(tmp_path, use_native):
    if use_native == "1" and native.module() is None:
        pytest.skip(native.status().text)
    out = tmp_path / "calls.jsonl"
    done = run(APP + "    print('its own words')\n    sys.exit(7)\n", "--out", str(out),
               LAYERZERO_NATIVE=use_native)
    assert done.returncode == 7, done.stderr   # the program's own
    assert done.stdout == "its own words\n"
    assert [(c.op, c.count) for c in read_calls(out)] == [("rms_norm", 6)]
    assert "rms_norm: 6 calls of 1 kind, served by" in done.stderr
    assert done.stderr.endswith(f"Next: lz tune --calls {out}\n")


@whole_programs
def test_processes_that_it_starts_are_recorded_too(tmp_path):
    out = tmp_path / "calls.jsonl"
    done = run(APP + f"""
    import multiprocessing, subprocess
    def work(n):
        lz.rms_norm(torch.ones(3, 16))
    if hasattr(os, "fork"):
        for kind in (multiprocessing.get_context("fork").Process,):
            workers = [kind(target=work, args=(n,)) for n in range(3)]
            [p.start() for p in workers]
            [p.join() for p in workers]
    subprocess.run([{warm_python()!r}, "-c",
                    "import torch, layerzero as lz; lz.layer_norm(torch.ones(2, 8))"], check=True)
    """, "-o", str(out))
    assert done.returncode == 0, done.stderr
    forked = 3 if hasattr(os, "fork") else 0
    assert {c.op: c.count for c in read_calls(out)} == {"rms_norm": 6 + forked, "layer_norm": 1}


@whole_programs
def test_the_exit_code_is_that_of_a_shell_and_what_came_before_is_kept(tmp_path):
    out = tmp_path / "calls.jsonl"
    killed = run(APP + "    os.kill(os.getpid(), 9)\n", "--out", str(out))
    assert killed.returncode == 128 + signal.SIGKILL
    assert [c.op for c in read_calls(out)] == ["rms_norm"]


@pytest.mark.parametrize(("on_interrupt", "on_end", "code"), [
    ("lambda *_: sys.exit(3)", "signal.SIG_DFL", 3),
    ("signal.SIG_IGN", "signal.SIG_DFL", 128 + signal.SIGTERM),
    ("signal.SIG_IGN", "signal.SIG_IGN", 128 + signal.SIGKILL)])
def test_an_interrupt_ends_the_command_and_what_it_did_is_kept(monkeypatch, tmp_path, on_interrupt,
                                                               on_end, code):
    monkeypatch.setattr(workload, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(os, "tcgetpgrp", lambda terminal: 0)       # no terminal has sent it to all
    call = {"op": "rms_norm", "arguments": {"x": {"shape": [4, 64], "dtype": "float32"}}}
    program = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, {on_interrupt})
signal.signal(signal.SIGTERM, {on_end})
folder = pathlib.Path(os.environ["LAYERZERO_RECORD"])
(folder / "1.jsonl").write_text({json.dumps(call)!r})
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    got, calls = workload.record_calls((sys.executable, "-S", "-c", program))
    assert got == code and [c.op for c in calls] == ["rms_norm"]


@whole_programs
def test_a_program_without_calls_leaves_no_file(tmp_path):
    done = run("print(1)", "--out", str(tmp_path / "calls.jsonl"))
    assert done.returncode == 1 and "no lz call was made" in done.stderr
    assert list(tmp_path.iterdir()) == []


@whole_programs
def test_compiled_models_are_written_when_they_are_traced(tmp_path):
    out = tmp_path / "calls.jsonl"
    done = run("""
    import torch, layerzero as lz
    w = torch.ones(16)
    f = torch.compile(lambda x: lz.rms_norm(x, w) * 2, backend="aot_eager", dynamic=True)
    for n in (3, 4, 5):
        f(torch.ones(n, 16))
    """, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert {(c.op, c.count) for c in read_calls(out)} == {("rms_norm", 1)}


def test_parts_of_several_processes_become_one_workload(tmp_path):
    one = {"op": "rms_norm", "arguments": {"x": {"shape": [4, 64], "dtype": "float32"}}, "count": 3,
           "name": "a"}
    two = {**one, "count": 4, "name": "b"}
    (tmp_path / "1.jsonl").write_text(json.dumps(one) + "\n")
    # died while writing
    (tmp_path / "2.jsonl").write_text(json.dumps(two) + "\n" + json.dumps(one)[:20])
    (call,) = read_recordings(tmp_path)
    assert call.count == 7 and call.name == "a; b"
    (tmp_path / "3.jsonl").write_text("{\n" + json.dumps(one) + "\n")
    events: list[lz.Event] = []
    stop = lz.subscribe(events.append)
    assert read_recordings(tmp_path) == (call,)            # a damaged file does not cost the others
    stop()
    (refused,) = [event for event in events if event.name == "file_refused"]
    assert (refused.path == str(tmp_path / "3.jsonl")
            and "3.jsonl:1: wanted one call" in refused.problem)


@pytest.mark.parametrize(("words", "message"), [
    (("--out", "/no/such/folder/x", "--", sys.executable), "does not exist"),
    (("--", "no-such-command-at-all"), "there is no command"),
])
def test_a_mistake_is_said_before_anything_runs(capsys, words, message):
    code, _, err = run_lz(capsys, "record", *words)
    assert code == 2 and message in err
