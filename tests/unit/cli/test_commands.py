"""What holds for every command: help without torch, an example, --json, the exit codes, completion.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from helpers import run_lz, warm_python

from layerzero.cli import show
from layerzero.cli.app import app
from layerzero.cli.options import ALIASES, DTYPES, dtype_name
from layerzero.cli.panels import measure, prove
from layerzero.cli.project import CALLS, POLICY, policy_text, workflow_text
from layerzero.cli.root import EXIT_CODES
from layerzero.files.calls import read_calls, write_calls
from layerzero.perf.record import MODES
from layerzero.plan import lockfile, table
from layerzero.release.stages import SOAK_SECONDS, STAGES
from layerzero.selection.policy import SETTINGS
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.errors import ConfigError
from layerzero.tuning import regret
from layerzero.verify.model.families import FAMILIES
from layerzero.verify.trace.inputs.sequences import SIZES
from layerzero.world.config import load_policy_file

ROOT = typer.main.get_command(app)
CPU = ("--device", "cpu")
CALL = Call("rms_norm", {"x": TensorSpec((4, 32), "float32")}, name="first")


def leaves(group=ROOT, words=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*words, name))
        else:
            yield pytest.param((*words, name), command, id=" ".join((*words, name)))


def example(command):
    return shlex.split(command.epilog.partition("Example:\n")[2])


@pytest.fixture
def run(capsys):
    return lambda *words: run_lz(capsys, *words)


# help and completion

def lz(*words, **environ):
    """Run the command in a process of its own: what it prints, and the modules it imports."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "layerzero", *words],
                          capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environ})
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.stdout, {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("tune", "--calls", "nowhere")])
def test_help_and_a_wrong_argument_need_no_torch(words):
    _, modules = lz(*words)
    assert "layerzero.cli.panels.measure" in modules
    assert {m for m in modules if m.partition(".")[0] in ("torch", "numpy", "rich",
                                                          "yaml")} == set()


@pytest.mark.parametrize(("words", "offered"), [
    ("lz verify ke", {"kernels"}), ("lz tune rms", {"rms_norm"}),
    ("lz tune --dtype bf", {"bf16", "bfloat16"})])
def test_the_shell_completes_without_torch(words, offered):
    out, modules = lz(_LZ_COMPLETE="complete_bash", COMP_WORDS=words,
                      COMP_CWORD=str(len(words.split()) - 1))
    assert offered <= set(out.split()) and "torch" not in modules


def test_a_script_for_the_shell_is_printed():
    out, modules = lz(_LZ_COMPLETE="source_bash")
    assert "_LZ_COMPLETE=complete_bash" in out and "torch" not in modules


def test_the_help_lists_the_commands_by_panel(run):
    code, out, _ = run("--help")
    panels = {command.rich_help_panel for command in ROOT.commands.values()}
    assert code == 0 and len(panels) == 6 and all(f"\n{panel}:\n" in out for panel in panels)
    assert all(f"\n  {name} " in out for name in ROOT.commands)
    assert all(str(code) in out.partition("Exit codes:")[2] for code in EXIT_CODES)
    assert "..." not in out.partition("Ask ")[2], "a line of the help is cut off"


@pytest.mark.parametrize(("words", "command"), list(leaves()))
def test_every_command_has_an_example_that_parses_and_json(words, command):
    shown_words = example(command)
    assert tuple(shown_words[1:1 + len(words)]) == words and shown_words[0] == "lz"
    command.make_context(" ".join(words),
                         shown_words[1 + len(words):])      # raises for a wrong option
    assert "--json" in {opt for param in command.params for opt in param.opts}
    assert command.help and command.get_short_help_str(61)


def test_what_the_help_says_of_others_is_true():
    texts = {f"{' '.join(p.values[0])} {param.name}": (param.default, param.help or "")
             for p in leaves() for param in p.values[1].params}
    assert tuple(STAGES) == prove.STAGES and tuple(SIZES) == prove.SIZES
    assert tuple(FAMILIES) == prove.FAMILIES and measure.MODES == MODES
    assert texts["gate soak_minutes"][1] == f"default: {SOAK_SECONDS['usual'] / 60:g}"
    assert str(regret.MAX_MEDIAN) in texts["regret max_median"][1]
    assert str(regret.MAX_P95) in texts["regret max_p95"][1]
    assert texts["solve out"][0] == Path(table.DEFAULT_PATH)
    assert texts["lock path"][0] == Path(lockfile.DEFAULT_PATH)


# arguments

@pytest.mark.parametrize(("name", "dtype"), [
    ("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16"), ("torch.float32", "float32"),
    ("FP32", "float32"), ("int8", "int8")])
def test_a_dtype_has_short_names(name, dtype):
    assert dtype_name(name) == dtype


def test_every_dtype_is_one_of_torch():
    import torch
    assert all(isinstance(getattr(torch, name, None), torch.dtype)
               for name in (*DTYPES, *ALIASES.values()) if name != "float8_e8m0fnu")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        dtype_name("bfloat61")


def test_a_short_dtype_is_understood_everywhere(run, tmp_path):
    shape = ("x=4x32", "weight=32:fp32", *CPU)
    for command in (("which", "rms_norm"), ("explain", "rms_norm"), ("dry-run", "rms_norm")):
        answers = [run(*command, *shape, "--dtype", dtype) for dtype in ("fp16", "float16")]
        assert answers[0] == answers[1] and answers[0][0] == 0
    assert run("which", "rms_norm", *shape, "--dtype", "auto")[0] == 0


@pytest.mark.parametrize("command", ["tune", "regret", "solve", "lock", "dry-run", "warmup",
                                     "ready",
                                     "serve-metrics"])
def test_calls_are_named_the_same_way_everywhere(run, command):
    for words, message in (
            (("rms_norm", "--model", "gpt2"), f"lz {command} takes one of OP, --calls, --model"),
            (("--calls", "nowhere.jsonl"), "there is no such file; lz record -- python app.py"),
            (("--model", "gpt-2"), "did you mean 'gpt2'?"),
            (("--model", "x.gguf"), "lz record -- lz generate"),
            (("rms_norm", "--dtype", "f7"), "there is no dtype 'f7'"),
            (("rms_norm", "--device", "tpu"), "device kind must be one of")):
        code, out, err = run(command, *words)
        assert (code, out) == (2, "") and message in err and err.startswith("error: "), err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [
    ("solve", "rms_norm", "--out", "nowhere/t.json"), ("report", "--out", "nowhere/r.html"),
    ("solve", "rms_norm", "--out", "-"), ("report", "--out", "-", "--json"),
    ("record", "--out", "nowhere/c.jsonl", "--", sys.executable), ("solve", "rms_norm", "--out",
                                                                   "."),
    ("soak", "--minutes", "1", "--out", "nowhere/s.json"), ("soak", "--resume", "nowhere.json"),
    ("hub", "lock", "a/b", "--out", "nowhere/h.lock"), ("tune", "--mode", "slow"),
    ("regret", "--mode", "slow"), ("verify", "kernels", "--quick", "--full"),
    ("verify", "models", "layers"), ("verify", "peer", "llama.cpp"),
    ("verify", "peer", "--model", "none"),
    ("verify", "models", "--dtype", "int8"), ("verify", "models", "--model", "nowhere.gguf"),
    ("generate", "Hello", "--model", "nowhere.gguf"), ("dry-run", "--program", "nowhere"),
    ("generate",), ("generate", "x.gguf"), ("generate", "a", "-p", "b"), ("generate", "nowhere.gguf", "-p", "Hello"),
    ("generate", "x.gguf", "-p", "Hello", "--model", "y.gguf"), ("generate", "Hi", "--kv", "int3"),
    ("generate", "--chat", "--json"), ("verify", "--peer", "nosuch"),
    ("verify", "--peer", "llama.cpp", "--quick", "--perf"),
    ("verify", "--peer", "llama.cpp", "--model", "nowhere.gguf"),
    ("explain", "attention"), ("which", "attention"), ("explain", "attention", "q=1", "--on",
                                                       "no.json"),
    ("gate", "--quick", "--full"), ("init", "--dir", "nowhere"),
    ("init", "--", "no-such-command-at-all")])
def test_a_wrong_argument_is_said_before_anything_runs(run, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (2, "") and err.startswith("error: ") and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# exit codes

@pytest.mark.parametrize(("error", "code", "message"), [
    (ConfigError("a wrong setting"), 2, "error: a wrong setting"),
    (PermissionError(13, "Permission denied", "x"), 2, "error: [Errno 13]"),
    (KeyboardInterrupt(), 130, ""), (ZeroDivisionError("oops"), 3, "a fault of lz")])
def test_an_exit_code_says_what_kind_of_end_it_was(run, monkeypatch, error, code, message):
    from layerzero.cli.commands import ask

    def fail(as_json):
        raise error

    monkeypatch.setattr(ask, "config", fail)
    exit_code, out, err = run("config")
    assert (exit_code, out) == (code, "") and message in err
    assert ("Traceback" in err) == (code == 3) and exit_code in EXIT_CODES


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_went_away_ends_the_command_without_a_word(closed):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: pipe}
        words = {"stdout": ["--help"], "stderr": ["no-such-command"]}[closed]
        done = subprocess.run([warm_python(), "-m", "layerzero", *words], text=True, **streams)
    assert (done.returncode, done.stdout or "", done.stderr or "") == (141, "", "")


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(show, "LINE_SECONDS", 0.01)
    with show.progress(total=3) as update:
        update(description="rms_norm", advance=2)
        deadline, err = time.monotonic() + 60, ""
        while "rms_norm" not in err and time.monotonic() < deadline:
            time.sleep(0.01)
            err += capsys.readouterr().err     # the first line may be from before the update
    assert "2 of 3: rms_norm (" in err


# dry-run, record

def test_a_dry_run_shows_shapes(run, tmp_path):
    write_calls(tmp_path / "calls.jsonl", [CALL])
    for words in (("--calls", tmp_path / "calls.jsonl"), ("rms_norm", "x=4x32", "--dtype", "fp32")):
        code, out, _ = run("dry-run", *words, *CPU)
        assert code == 0 and "x=4x32:float32" in out
    code, out, _ = run("dry-run", "--calls", tmp_path / "calls.jsonl", *CPU)
    assert "first" in out, "where the call comes from"
    code, out, _ = run("dry-run", "--model", "smollm2-135m", "--dtype", "bf16", "--batch", "2",
                       *CPU)
    assert code == 0 and "query=2x9x512x64:bfloat16" in out


PROGRAM = "import torch, layerzero as lz; lz.rms_norm(torch.ones(4, 32))"


def test_init_writes_a_project_and_replaces_nothing_unasked(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_calls(Path("mine.jsonl"), [CALL])
    code, out, _ = run("init", "--calls", "mine.jsonl", "--json")
    data = json.loads(out)
    names = ["layerzero.yaml", ".github/workflows/layerzero.yml", "layerzero.calls.jsonl"]
    assert (code, data["written"], data["ops"]) == (0, names, ["rms_norm"])
    assert data["next"] == "lz tune --calls layerzero.calls.jsonl"
    assert read_calls(Path(names[2])) == (CALL,)
    before = {name: Path(name).read_text() for name in names}
    code, _, err = run("init", "--", sys.executable, "-c", "open('ran', 'w')")
    assert code == 2 and "--force replaces" in err and all(name in err for name in names)
    assert not Path("ran").exists() and {n: Path(n).read_text() for n in names} == before
    Path(names[0]).write_text("version: 1\n")
    assert run("init", "--calls", "mine.jsonl", "--force")[0] == 0
    assert {n: Path(n).read_text() for n in names} == before


def test_init_records_a_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("init", "--", warm_python(), "-c", PROGRAM)
    assert code == 0 and "wrote layerzero.calls.jsonl" in out
    assert [c.op for c in read_calls(Path("layerzero.calls.jsonl"))] == ["rms_norm"]
    code, out, _ = run("init", "--force", "--json", "--", warm_python(), "-c",
                       "raise SystemExit(7)")
    assert code == 1 and json.loads(out)["command_exit"] == 7


def test_the_policy_that_init_writes_is_the_default_also_uncommented(tmp_path):
    written = policy_text()
    path = tmp_path / POLICY
    path.write_text(written)
    assert dict(load_policy_file(path).settings) == {}
    head, mark, rest = written.partition("version: 1\n")
    path.write_text(head + mark + "".join(line.removeprefix("# ") + "\n"
                                          for line in rest.splitlines()))
    layer = load_policy_file(path)
    assert dict(layer.settings) == {name: s.default for name, s in SETTINGS.items()}
    assert len(layer.rules) == 3 and max(map(len, written.splitlines())) <= 100


def test_the_workflow_that_init_writes_runs(run, tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    write_calls(Path(CALLS), [CALL])
    Path(POLICY).write_text(policy_text())
    job = yaml.safe_load(workflow_text(["rms_norm"]))["jobs"]["layerzero"]
    steps = [step["run"].split() for step in job["steps"] if step.get("run", "").startswith("lz ")]
    assert job["env"] == {"LAYERZERO_POLICY": POLICY}
    assert [words[1] for words in steps] == ["build", "config", "doctor", "dry-run", "verify"]
    for words in steps[1], steps[3]:           # the others are about the machine, or take long
        assert run(*words[1:])[0] == 0, words
    ROOT.commands["verify"].commands["kernels"].make_context("kernels", steps[4][3:])
    assert "# - run: lz dry-run" in workflow_text([])
