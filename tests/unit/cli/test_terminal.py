"""What lz prints steers no terminal: escapes and markup in names are shown as they are written,
JSON stays JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import sys
from collections.abc import Callable

import pytest
from helpers import warm_python

import layerzero as lz
from layerzero.cli import main, show, streams
from layerzero.files.reading import printable
from layerzero.spec.errors import ConfigError
from layerzero.spec.kernel import Kernel
from layerzero.world import snapshot as worlds
from layerzero.world.config import environment_layer

ATTACKS = {
    "colour": "\x1b[31mred", "clear": "\x1b[2J\x1b[H", "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://x\x1b\\y", "c1": "\x9b31m", "return": "ok\rXX", "bell": "\a",
    "backspace": "a\b\b", "bidi": "a\u202eb\u2066", "delete": "\x7f",
    "surrogate": "\ud800", "separator": "a\u2028b", "invisible": "a\u200bb\ufeff",
    "tag": "a\U000e0041b"}
MARKUP = ("[red]x[/red]", "[link=http://x]y[/link]", "[/]", ":smile:", "[bold", "x\\", "[[",
          "{task}")
HARMFUL = {c for text in ATTACKS.values() for c in text if not c.isprintable()} - {"\x1b", "\r"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    encoding = "utf-8"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)


def terminal_output(action: Callable[[], object]) -> str:
    """What a terminal is sent by this."""
    out = Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        action()
    return out.getvalue()


def render_safely(action: Callable[[], object]) -> str:
    """The same while a command runs."""
    def run() -> None:
        with streams.escape_output():
            action()

    return terminal_output(run)


def command(*words: str) -> tuple[object, str]:
    ended: list[object] = []

    def run() -> None:
        with pytest.raises(SystemExit) as caught:
            main(words)
        ended.append(caught.value.code)

    text = terminal_output(run)
    return ended[0], text


@pytest.mark.parametrize("name", ATTACKS)
def test_what_cannot_be_seen_is_written_out(name):
    shown = printable(ATTACKS[name])
    assert shown.isprintable() and "\\" in shown and printable(shown) == shown


def test_what_can_be_seen_stays():
    for text in ("plain", "é 日本 😀 👨\u200d👩\u200d👧 עברית العربية", "two\nlines\tand a tab"):
        assert printable(text) == text


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("way", [
    lambda text: show.table(("kernel", "x"), [(text, "1")], right=("x",)), show.heading, show.text,
    show.piece, lambda text: print(f"error: {text}", file=sys.stderr)],
                         ids=["table", "heading", "text", "piece", "error"])
def test_every_way_to_a_terminal_is_safe(way, name):
    text = render_safely(lambda: way(ATTACKS[name]))
    assert text.strip() and not HARMFUL & set(text) and ATTACKS[name] not in text
    assert "\r" not in text and not any(bad in text for bad in ("\x1b]", "\x1b[2J", "\x1b[31m"))


@pytest.mark.parametrize("text", MARKUP)
def test_markup_in_a_name_is_text(text):
    def work() -> None:
        with show.spinner(text) as say:
            say(text)

    shown = render_safely(lambda: (show.table(("kernel", "why"), [(text, text)]),
                                   show.heading(text),
                                   work()))
    assert shown.count(text) >= 5 and "\x1b]8" not in shown


def test_a_line_of_work_and_its_name_are_safe():
    def work() -> None:
        with show.spinner("\x1b]0;owned\x07") as say:
            say("\x1b]0;owned\x07")

    text = render_safely(work)
    assert text.count("\\x1b]0;owned\\x07") >= 2 and "\x1b]0" not in text and "\a" not in text


def test_a_narrow_terminal_breaks_no_word_and_no_number(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    columns, row = ("kernel", "us", "why"), ("torch.sdpa_flash_packed", "123456.78", "shipped")
    text = terminal_output(lambda: show.table(columns, [row], right=("us",)))
    assert text.splitlines()[1] == "  ".join(row)
    assert terminal_output(lambda: show.table(columns, [])) == ""


def test_a_pipe_gets_a_models_text_as_it_is():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), streams.escape_output():
        show.piece("a\u200fb")
    assert out.getvalue() == "a\u200fb"


def test_a_terminal_of_ascii_alone_is_written_to():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    with contextlib.redirect_stdout(stream), streams.escape_output():
        show.text("日本 \ud800")
    stream.flush()
    assert buffer.getvalue() == b"\\u65e5\\u672c \\ud800\n"


@pytest.mark.parametrize("data", [
    {"a": float("nan")}, {"a": [{"b": float("inf")}, 1.5, "x"]}, {"a": "\x1b[31m\ud800"}])
def test_json_is_json(data):
    text = terminal_output(lambda: show.as_json(data))
    assert text.isascii()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("words", [
    ("explain", "\x1b]0;owned\x07", "x=1"), ("kernels", "\x1b[2J"), ("\x1b[31mno-such-command",),
    ("diff", "\x1b[2J.json", "b"), ("list", "\u202eop"), ("warmup", "--table", "\x1b[2J")])
def test_an_error_of_a_command_is_escaped(words):
    code, text = command(*words)
    assert code == 2 and text.strip() and not HARMFUL & set(text) and "\x1b" not in text


def test_a_kernel_with_a_hostile_note_is_listed(world):
    op = lz.op("rms_norm")
    worlds.register(Kernel("evil.kernel", op, lambda: op.reference, note="\x1b]0;owned\x07[red]"),
                    "a test")
    for words in (("kernels", "evil.kernel"), ("list", "rms_norm"),
                  ("kernels", "evil.kernel", "--json")):
        code, text = command(*words)
        assert code == 0 and "evil.kernel" in text and "\x1b]0" not in text and "\a" not in text
        if words == ("kernels", "evil.kernel"):
            assert "\\x1b]0;owned\\x07[red]" in text


def test_a_file_with_a_hostile_name_is_reported(tmp_path):
    (tmp_path / "\x1b]0;owned\x07.json").write_text("{")
    code, text = command("verify", "definitions", "--dir", str(tmp_path))
    assert code == 2 and "owned" in text and "\x1b]0" not in text and "\a" not in text


def test_it_is_so_on_a_real_terminal(tmp_path):
    """A process of its own behind a pseudo terminal, as a person has it."""
    policy = tmp_path / "policy.yaml"
    policy.write_text('settings:\n  "\\e]0;owned\\a[red]": 1\n')
    python = warm_python()
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(LAYERZERO_POLICY=str(policy), TERM="xterm",
                          PYTHONPATH=os.pathsep.join(sys.path))
        os.execv(python, [python, "-m", "layerzero", "config"])
    text = b""
    while True:
        try:
            part = os.read(fd, 4096)
        except OSError:                        # Linux says so when the other side has gone
            break
        if not part:
            break
        text += part
    os.waitpid(pid, 0)
    assert b"owned" in text and b"\x1b]0" not in text and b"\x07" not in text, text[-500:]


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_whose_output_is_closed_does_its_work(closed, monkeypatch):
    monkeypatch.setattr(sys, closed, None)     # as Python does for `lz ... >&-`
    with pytest.raises(SystemExit) as end:
        main(["list", "--json"])
    assert end.value.code in (None, 0)
    getattr(sys, closed).close()


def test_a_hostile_environment_is_shown_in_few_words():
    with pytest.raises(ConfigError) as caught:
        environment_layer({"LAYERZERO_DENY": "\x1b[2J" * 1000, "LAYERZERO_\x1b[2J": "1"})
    assert ("\x1b" not in render_safely(lambda: print(caught.value))
            and len(str(caught.value)) < 4000)
