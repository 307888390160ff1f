"""Generated code has its text: a debugger lists it, a traceback shows it, `lz explain --code`
prints it.
"""

from __future__ import annotations

import ast
import gc
import inspect
import io
import json
import linecache
import pdb
import traceback
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.cli import main
from layerzero.files import codegen
from layerzero.operate.inspection import dispatcher_of, generated_code
from layerzero.selection.verdicts import compile_verdicts
from layerzero.spec.rules import at_most

SOURCE = Path(lz.__file__).parent
# Runs code of others in a process that imports nothing of this library.
FOREIGN = SOURCE / "verify" / "trace" / "answers" / "reference_worker.py"


def test_every_exec_is_of_code_that_keeps_its_text():
    violations = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "exec" in text else ():
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                and node.func.id == "exec"):
                violations.append((path, ast.unparse(node.args[0])))
    assert [path for path,
            text in violations if not text.startswith("codegen.compile(")] == [FOREIGN]
    assert len(violations) > 5


def test_a_traceback_shows_the_generated_line():
    scope = {}
    exec(codegen.compile("def halve(x):\n    return x / 0\n", "a test"), scope)
    with pytest.raises(ZeroDivisionError) as raised:
        scope["halve"](1)
    linecache.checkcache()                     # as every traceback does before it looks
    output = "".join(traceback.format_exception(raised.value))
    assert 'File "<lz a test ' in output and "return x / 0" in output
    assert inspect.getsource(scope["halve"]) == "def halve(x):\n    return x / 0\n"
    assert codegen.text(scope["halve"].__code__) == "def halve(x):\n    return x / 0\n"


def test_the_same_text_again_takes_no_room():
    first = codegen.compile("x = 1\n", "a test")
    before = len(linecache.cache)
    again = codegen.compile("x = 1\n", "a test")
    assert len(linecache.cache) == before
    another = codegen.compile("x = 2\n", "a test")
    assert len(linecache.cache) == before + 1
    assert first == again != another


def test_a_text_is_kept_as_long_as_code_of_it():
    scope = {}
    exec(codegen.compile("def one():\n    return 1\ndef two():\n    return 2\n", "a pair"), scope)
    code = scope["two"].__code__
    scope.clear()
    assert "return 2" in codegen.text(code) and code.co_filename in linecache.cache
    file = code.co_filename
    del code
    gc.collect()
    assert file not in linecache.cache


def test_code_of_a_file_has_no_generated_text():
    assert codegen.text(codegen.text.__code__) == ""


def test_a_debugger_steps_through_a_call():
    x, transcript = torch.ones(2, 8), io.StringIO()
    twin = dispatcher_of("rms_norm").python_call
    twin(x)
    debugger = pdb.Pdb(stdin=io.StringIO("step\nstep\nlonglist\ncontinue\n"), stdout=transcript,
                       nosigint=True,
                       readrc=False)
    debugger.use_rawinput = False
    debugger.runcall(twin, x)
    assert "<lz rms_norm call " in transcript.getvalue()
    assert ("def call(" in transcript.getvalue()
            and "_entry = TABLE.get(KEY)" in transcript.getvalue())


def test_rules_compiled_to_python_can_be_read():
    assert "<= 128" in inspect.getsource(compile_verdicts([(at_most("head_dim", 128),)]))


def printed(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_command_prints_the_call_path(capsys):
    code, out, _ = printed(capsys, "explain", "--code", "attention")
    assert (code, out.rstrip("\n")) == (0, generated_code("attention").rstrip("\n"))
    assert "def call(query, key, value" in out and "return MISS(" in out
    compile(out, "printed", "exec")
    code, out, _ = printed(capsys, "explain", "attention", "--code", "--json")
    assert (code, json.loads(out)) == (0, {"op": "attention", "code": generated_code(lz.attention)})


def test_without_a_call_the_command_says_what_it_wants(capsys):
    code, _, err = printed(capsys, "explain", "attention")
    assert code != 0 and "wants a call" in err
