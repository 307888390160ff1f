"""The one reader of files that others wrote: everything has a limit, every error a type and a
place.
"""

from __future__ import annotations

import json
import os

import pytest

import layerzero as lz
from layerzero.files.reading import (
    FileLimits,
    RustPanic,
    no_panic,
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
)
from layerzero.integrations.gguf import chat_template
from layerzero.spec.errors import ConfigError, DataError, SpecError
from layerzero.spec.reason import Code, Reason, shown
from layerzero.tuning.workload import read_recordings
from layerzero.verify.trace.dataset import find_definitions


@pytest.mark.parametrize(("content", "message"), [
    (b"{", "it is not JSON"), (b"\xff", "in UTF-8; byte 0"),
    (b'{"a": 1, "a": 2}', "'a' is given twice"),
    (b"NaN", "NaN is no JSON number"), (b"1e999", "beyond the largest number"),
    (b"9" * 41, "a number of 41 digits"), (b"9" * 10**6, "a number of 1000000 digits"),
    (b"[" * 10**5, "nested too deeply"), (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
    (b'["\\ud800"]', "half of a surrogate pair"),
    (b'{"\\udc00": 1}', "half of a surrogate pair")])
def test_what_is_no_json_here(content, message):
    with pytest.raises(DataError, match=message) as caught:
        parse_json(content, "x.json", "a thing")
    assert str(caught.value).startswith("x.json: wanted a thing") and len(str(caught.value)) < 300


def test_what_is_json_here():
    assert parse_json(b'\xef\xbb\xbf{"a": [1, -2.5, "\\ud83d\\ude00"]}', "",
                      "") == {"a": [1, -2.5, "😀"]}
    assert parse_json(b"[" * 64 + b"]" * 64, "", "") is not None
    assert parse_json("[NaN, 1e999]", "", "", nan=True)[1] == float("inf")
    assert parse_json('{"a": 1, "a": 2}', "", "", unique=False) == {"a": 2}


def test_a_file_has_a_size_and_a_line_too(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"[1]\n\n[2]")
    assert list(read_json_lines(path, "lines")) == [(1, [1]), (3, [2])]
    path.write_bytes(b"x" * 1001)
    with pytest.raises(ConfigError, match="at most 0 KiB; it is larger"):
        read_bytes(path, "a thing", size=1000, error=ConfigError)
    with pytest.raises(DataError, match="x:1: wanted lines"):
        list(read_json_lines(path, "lines", limits=FileLimits(line=1000)))
    with pytest.raises(DataError, match="it is larger"):
        list(read_json_lines(path, "lines", limits=FileLimits(size=1000)))


def test_only_a_line_feed_ends_a_line(tmp_path):
    (tmp_path / "x").write_text('["a\u2028b"]\n["c\x85"]\n', encoding="utf-8")
    assert [value for _, value in read_json_lines(tmp_path / "x", "lines")] == [["a\u2028b"],
                                                                                ["c\x85"]]


@pytest.mark.parametrize("path", ["no/such", ".", "a\0b", "\ud800", "/dev/zero"])
def test_a_path_that_is_none(path):
    with pytest.raises(DataError, match="wanted a thing"):
        read_json(path, "a thing", limits=FileLimits(size=1 << 16))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")
def test_a_pipe_among_the_files_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(DataError, match="not a regular file"):
        read_json(tmp_path / "x.json", "a thing")


def test_one_bad_definition_does_not_stop_a_folder(tmp_path, emitted):
    good = {"name": "good", "op_type": "norm", "axes": {"n": {"type": "var"}}, "outputs": {"y": {
        "shape": ["n"], "dtype": "float32"}}, "inputs": {"x": {"shape": ["n"], "dtype": "float32"}},
        "reference": "def run(x):\n    return x\n"}
    bad = {"broken": "{", "latin": b"\xff", "deep": "[" * 10**5,
           "name": json.dumps({**good, "name": "a\x1b[31m"}),
           "long": json.dumps({**good, "constraints": ["n > 1"] * 1000}),
           "code": json.dumps({**good, "reference": "x = 1\n" * 10**5})}
    (tmp_path / "good.json").write_text(json.dumps(good))
    for name, content in bad.items():
        (tmp_path / f"{name}.json").write_bytes(content if isinstance(content, bytes)
                                                else content.encode())
    (definition,) = find_definitions(tmp_path)
    refused = [event for event in emitted if event.name == "file_refused"]
    assert (definition.name == "good" and len(refused) == len(bad)
            and all(event.problem for event in refused))


def test_what_stands_before_the_damage_is_read(tmp_path, emitted):
    one = {"op": "rms_norm", "arguments": {"x": {"shape": [4, 64], "dtype": "float32"}}}
    (tmp_path / "1.jsonl").write_bytes(json.dumps(one).encode() + b"\n\xff\n"
                                       + json.dumps(one).encode() + b"\n")
    (tmp_path / "2.jsonl").write_text(json.dumps(one) + "\n")
    (call,) = read_recordings(tmp_path)
    assert (call.count == 2 and [event.path for event in emitted if event.name == "file_refused"]
            == [
         str(tmp_path / "1.jsonl")])


class Unshowable:
    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


def test_what_cannot_be_shown_breaks_no_message():
    assert shown(10**5000) == "int that cannot be shown (ValueError)"
    assert shown(Unshowable()).startswith("Unshowable that")
    assert len(shown("x" * 10**6)) == 500
    for strange in (10**5000, Unshowable(), [Unshowable()]):
        reason = Reason(Code.WRONG_TYPE, "a thing", strange, "x")
        assert len(str(reason)) < 200 and json.dumps(reason.to_json())


@pytest.mark.parametrize("value", [10**5000, Unshowable(), float("nan"), [], {}, b"x", 1j,
                                   "x" * 10**6, "\ud800", -1],
                         ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["breaker_cooldown", "cache_size", "deterministic", "jit",
                                  "log_level"])
def test_settings_of_any_kind(name, value):
    with pytest.raises(ConfigError) as caught:
        lz.configure(**{name: value})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("attempt", [
    lambda: lz.configure(seconds=10**400), lambda: lz.configure(seconds="1"),
    lambda: lz.configure(seconds=float("nan")),
    lambda: lz.lock("attention", "torch.sdpa_math", when={"head_dim": 10**400}),
    lambda: lz.lock("attention", "torch.sdpa_math", when={1: 2}),
    lambda: lz.lock("attention", "*a" * 5000),
    lambda: lz.lock("attention", "torch.sdpa_math", when=[]),
    lambda: lz.lock("attention", "torch.sdpa_math", when={"x": Unshowable()})])
def test_arguments_of_the_policy_of_any_kind(attempt, world):
    with pytest.raises((ConfigError, SpecError)) as caught:
        attempt()
        lz.lock("nothing", "at.all")           # an empty `when` is none
    assert len(str(caught.value)) < 5000


def test_a_panic_is_an_exception():
    panic = type("PanicException", (BaseException,), {})

    def function() -> None:
        raise panic("index out of bounds")

    with pytest.raises(RustPanic, match="index out of bounds"):
        no_panic(function)()
    with pytest.raises(KeyboardInterrupt):
        no_panic(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))()


@pytest.mark.parametrize(("template", "message"), [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
     "did not end within"),
    ("{{ 'a' * 10**11 }}", "MemoryError"), ("{{", "TemplateSyntaxError"),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ("{% if 1 %}" * 3000, "cannot be rendered|ended the process"),
    ("x" * (2 << 20), "at most 1048576 characters")])
def test_a_chat_template_has_little_time_and_memory(template, message, monkeypatch):
    pytest.importorskip("jinja2")
    if message == "did not end within":
        monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    with pytest.raises(DataError, match=message):
        chat_template.render(template, [("user", "hello")], "a model")


def test_a_chat_template_is_rendered():
    pytest.importorskip("jinja2")
    template = "<{{ messages[0].role }}>{{ messages[0].content }}"
    assert chat_template.render(template, [("user", "日本")], "m") == "<user>日本"
