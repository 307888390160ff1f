"""Every parser against its corpus, against files a little different from it, and for a moment
against the fuzzer.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import run_python

from layerzero.spec.errors import LayerZeroError

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.insert(0, str(FUZZ))

from mutations import mutated  # noqa: E402
from targets import MAX_BYTES, SEAL, TARGETS  # noqa: E402

CORPUS = FUZZ / "corpus"
CHANGES = 30                                   # of each file
ACCEPTED = {"calls": 2, "capability": 3, "certificate": 1, "definition": 2, "device": 3,
            "expression": 4, "lockfile": 2, "measurements": 2, "policy": 2, "regret": 1,
            "report": 1, "rule": 2, "solution": 1, "table": 3, "trace": 2, "choices": 2,
            "elf_file": 0, "environment": 1, "gguf": 1, "hub_lock": 1, "hub_metadata": 1,
            "sentencepiece_model": 1, "shipped_table": 1, "tiktoken_ranks": 1, "tokenizer_json": 3,
            "workload": 2, "waiver": 1, "gate_report": 1, "soak_report": 1, "verdicts": 1, "bundle": 1}
NEEDS = {"gguf": "gguf", "hub_lock": "kernels", "hub_metadata": "kernels",
         "tiktoken_ranks": "tiktoken",
         "tokenizer_json": "tokenizers"}       # libraries without which a target accepts nothing


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code of a definition may be odd enough for Python to warn of it."""
    monkeypatch.setenv("LAYERZERO_SEAL_KEY", SEAL)     # as a target does: what was there comes back
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        yield


def parsed(name: str, content: bytes) -> bool:
    """Was it accepted? Anything but a LayerZeroError goes on."""
    try:
        TARGETS[name](content)
    except LayerZeroError as e:
        assert str(e).strip()
        return False
    return True


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_what_is_like_it_gives_typed_errors_only(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    taken = [path.name for path in files if parsed(name, path.read_bytes())]
    if name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None:
        # a parser that refuses everything would pass the rest
        assert len(taken) >= ACCEPTED[name], taken
    for path in files:
        for i in range(CHANGES):
            parsed(name, mutated(path.read_bytes(), random.Random(f"{path.name} {i}")))


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_files_give_typed_errors_only(name: str) -> None:
    for content in (b"", b"\0", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b'"\\ud800"', b"NaN",
                    b"{" * 3000, b"-" * 3000, b"&a [" * 500, b"(" * 5000, b'{"a":' * 20_000,
                    b'{"a": 1e999}', b'{"a": -1e-99999}', b"\xef\xbb\xbf{}", b'{"a": "\\u0000"}',
                    b'{"a": 1, "a": 2}', b"9" * 300_000, b'"' + b"x" * 10**6 + b'"',
                    b"a: " + b"x" * 10**6, b"rules:\n" + b"- {deny: torch.*, op: attention}\n"
                    * 50_000, b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
                    b"[" + b"[]," * 100_000 + b"[]]", b'{"a": ' * 70 + b"1" + b"}" * 70,
                    b"GGUF" + b"\xff" * 64, b"\x7fELF\x02\x01" + b"\xff" * 200,
                    b"\n" + b"\xff" * 40, b"{}" * 1000, b"\r\n" * 1000):
        parsed(name, content)


def test_the_corpus_is_small_and_has_no_strangers() -> None:
    assert {p.name for p in CORPUS.iterdir()} == set(TARGETS) == set(ACCEPTED)
    assert [p.name for p in CORPUS.rglob("*") if p.is_file()
            and p.stat().st_size > MAX_BYTES] == []


def test_without_atheris_it_goes_by_chance() -> None:
    done = run_python(FUZZ / "run.py", "policy", "--plain", "--seconds", "1", "--seed", "3")
    assert (done.returncode == 0 and "by chance" in done.stdout), done.stdout[-3000:] + done.stderr[
        -2000:]


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", TARGETS if os.environ.get("LZ_TEST_FULL") == "1" else ("table",))
def test_the_fuzzer_runs_and_finds_nothing(name: str) -> None:
    """Two seconds of it: that the harness works. See docs/fuzzing.md for a real run."""
    done = subprocess.run([sys.executable, str(FUZZ / "run.py"), name, "--seconds", "2"],
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "cov:" in done.stdout


def test_an_unknown_target_is_named() -> None:
    done = run_python(FUZZ / "run.py", "polcy")
    assert done.returncode == 2 and "there is no target 'polcy'" in done.stderr


def test_a_table_from_a_file_is_never_code() -> None:
    """A condition with a line break once ended the comment it was written into."""
    from layerzero.plan.lower import lower
    from layerzero.plan.table import Choice, Row, Span, Stamp, Table
    from layerzero.spec.device import Device
    stamp = Stamp(Device("cpu", 0, 'CPU"""\nraise SystemExit', "intel"), "p", "p", "c", {}, "0")
    row = Row("attention", (("dtype", "x\n)\nraise SystemExit\n("),), (("seq_q", Span(1, 2)),),
              (Choice("a.b"),))
    scope: dict[str, object] = {}
    exec(compile(lower(Table(stamp, (row,))), "table", "exec"), scope)
    assert scope["KERNELS"] == (("a.b",),)
    for op, size in (("attention(x=1):\n raise SystemExit\ndef x", "seq_q"),
                     ("attention", "a=print()"),
                     ("class", "seq_q")):
        bad = Table(stamp, (Row(op, (), ((size, Span(1, 2)),), (Choice("a.b"),)),))
        with pytest.raises(LayerZeroError, match="names of an operation"):
            lower(bad)
