"""What policy hides is in nothing that leaves the process: events, log lines, spans, metrics,
reports.
"""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch
from helpers import Fake, events_of, register, rows
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.selection.policy import REDACTIONS, Policy, validate_setting
from layerzero.spec.event import (
    Fallback,
    KernelRefused,
    Learned,
    PlanMissed,
    Selected,
    StoreTrouble,
)
from layerzero.spec.plan import Rejected
from layerzero.spec.reason import Code, Reason
from layerzero.world import events, redaction

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def hide():
    """Hide these until the test ends."""
    yield lambda *words: redaction.use(",".join(words))
    redaction.use("")


# the setting

@pytest.mark.parametrize(("given_", "kept"), [
    ("", ""), ("paths", "paths"), ("texts, paths", "paths,texts"),
    (["shapes", "paths", "shapes"], "paths,shapes"),
    (("TEXTS",), "texts"), ([], "")])
def test_the_setting_is_a_list_or_its_words(given_, kept):
    assert validate_setting("redact", given_) == kept


@pytest.mark.parametrize("wrong", ["prompts", ["paths", "all"], True, 3, None,
                                   {"paths": 1, "x": 2}])
def test_another_word_is_refused_with_those_that_there_are(wrong):
    with pytest.raises(lz.errors.ConfigError, match="paths, shapes, texts"):
        validate_setting("redact", wrong)


def test_a_policy_file_may_write_it_as_a_list(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\nsettings:\n  redact: [paths, shapes]\n")
    lz.load_config(path)
    assert (lz.get_config()["settings"]["redact"] == "paths,shapes"
            and redaction.active() == {"paths", "shapes"})
    lz.load_config(None)
    assert redaction.active() == frozenset()


def test_the_default_hides_nothing_but_secrets():
    assert Policy().setting("redact") == "" and redaction.active() == frozenset()
    message = "cannot read /home/me/a.json of shape (3, 4): 'hello'"
    assert redaction.text(message) == message


# secrets, always

@pytest.mark.parametrize("secret", [
    "postgresql://me:hunter2@db.example/perf", "postgresql://me:hun/ter2@x@db.example/perf",
    "https://hunter2@host/x", "password=hunter2", "PASSWORD: hunter2", "api_key='hunter2hunter2'",
    "Authorization: Bearer hunter2hunter2", "bearer hunter2hunter2", "token=hunter2",
    "hf_hunter2hunter2hunter2", "ghp_hunter2hunter2hunter2", "sk-hunter2hunter2hunter2"])
def test_a_password_or_token_is_never_shown(secret):
    shown = redaction.text(f"failed: {secret} was refused")
    assert ("hunter2" not in shown and shown.startswith("failed: ")
            and shown.endswith(" was refused"))


@pytest.mark.parametrize("plain", [
    "tokens=128 per call", "flash_attn.v2", "a token of 5", "https://example.com/docs",
    "kernel sk_small", "user@host"])
def test_what_is_no_secret_stays(plain):
    assert redaction.text(plain) == plain


# paths

@pytest.mark.parametrize("path", [
    "/home/me/model.bin", "~/models/x", "/srv/a-b/c_d.e", r"C:\Users\me\file", "C:/Users/me",
    r"\\server\share\x", "'/home/my user/a file'", '"/data/with space/x"',
    "postgresql://db.example:5432/perf", "conf/prod/policy.yaml",
    "file=/etc/passwd"])
def test_a_path_is_hidden(hide, path):
    hide("paths")
    shown = redaction.text(f"cannot open {path}: no such file")
    assert not any(part in shown for part in ("me", "model", "srv", "server", "data/", "db.example",
                                              "prod", "passwd"))
    assert "<path>" in shown and shown.endswith(": no such file")


def test_a_home_with_a_space_is_hidden_whole(hide, monkeypatch):
    monkeypatch.setenv("HOME", "/home/Jane Doe")
    hide("paths")
    assert redaction.text("wrote /home/Jane Doe/x/y.json now") == "wrote <path> now"


@pytest.mark.parametrize("plain", ["bfloat16/float16 only", "1/16 of it", "and/or", "a / b",
                                   "torch.sdpa", "2 x 3",
                                   "kernels of torch 2.13.0+cpu", "~5 us"])
def test_what_is_no_path_stays(hide, plain):
    hide("paths")
    assert redaction.text(plain) == plain


# shapes and texts

@pytest.mark.parametrize("shape", ["(3, 4096)", "[1, 2, 3]", "torch.Size([7, 9])", "1x32x128",
                                   "hidden=4096",
                                   "got 4096", "batch = 77"])
def test_a_shape_is_hidden(hide, shape):
    hide("shapes")
    shown = redaction.text(f"cannot take {shape} here")
    assert not any(c.isdigit() for c in shown) and "<shape>" in shown


@pytest.mark.parametrize("plain", ["candidates=12", "epoch=4", "microseconds=12.5", "sm_90",
                                   "torch 2.13.0", "3 calls"])
def test_a_count_of_our_own_is_no_shape(hide, plain):
    hide("shapes")
    assert redaction.text(plain) == plain


def test_quoted_words_are_hidden(hide):
    hide("texts")
    assert redaction.text("""no token for 'my secret prompt' nor "another" """) == \
        """no token for '<text>' nor "<text>" """


def test_data_keeps_its_form(hide):
    hide("paths", "shapes")
    redacted = redaction.data({"a": ["/home/me/x", 1, None], "b": {"/etc/x": [1, 2]}, "c": True,
                               "d": [1.5, 2]})
    assert redacted == {"a": ["<path>", 1, None], "b": {"<path>": "<shape>"}, "c": True,
                        "d": [1.5, 2]}


# events

def test_events_are_hidden_before_anyone_sees_them(hide, emitted, caplog):
    hide(*REDACTIONS)
    with caplog.at_level(logging.DEBUG, "layerzero"):
        events.emit(StoreTrouble(store="/home/me/perf.sqlite", problem="disk /dev/sda1 is full",
                                 action="in memory"))
        events.emit(KernelRefused("rms_norm", "lib.a", "cpu hidden=4096",
                                  Reason(Code.KERNEL_FAILED, None, "boom")))
        events.emit(Fallback("rms_norm", "lib.a", "lib.b", Reason(
            Code.KERNEL_FAILED, None, "RuntimeError: cannot take 'my prompt' from /home/me/x")))
        events.emit(PlanMissed("rms_norm", "lib.a",
                               Reason(Code.PLAN_BUCKET_MISS, "abc", "rms_norm hidden=4096")))
        events.emit(Learned("rms_norm", "lib.a", kind="float32 hidden=4096"))
        events.emit(Selected("rms_norm", "lib.a", 3, 10.0, rejected=(
            Rejected("lib.b", (Reason(Code.SHAPE_UNSUPPORTED, "<= 64", 4096, "hidden"),)),)))
    everything = caplog.text + json.dumps([e.to_json() for e in emitted]) + repr(emitted)
    assert not any(word in everything for word in ("/home", "/dev", "4096", "prompt", "sda1"))
    fallback = events_of(Fallback, emitted)[0]
    assert (fallback.reason.got == "RuntimeError: <text>"
            and fallback.reason.code is Code.KERNEL_FAILED)
    assert (fallback.kernel, fallback.served_by) == ("lib.a", "lib.b")
    assert "lib.b: SHAPE_UNSUPPORTED" in caplog.text               # codes are for everyone


def test_where_nothing_is_hidden_the_event_is_the_very_same():
    event = StoreTrouble(store="/home/me/perf.sqlite")
    assert redaction.event(event) is event


def test_a_real_fault_is_told_without_its_words(hide, emitted, caplog):
    register(Fake("fake.first", fault=RuntimeError("bad page /home/me/kv of 'the prompt'")),
             Fake("fake.second", prior=1e5))
    lz.configure(redact=["paths", "texts"])
    emitted.clear()
    with caplog.at_level(logging.WARNING, "layerzero"):
        lz.rms_norm(rows())
    assert events_of(Fallback, emitted)[0].kernel == "fake.first" and "fake.first" in caplog.text
    assert ("prompt" not in caplog.text and "/home" not in caplog.text
            and "prompt" not in repr(emitted))
    assert not any("prompt" in repr(event) for _, event in events.recent())


def test_lines_that_others_write_to_our_log_are_hidden_too(hide, caplog):
    hide("paths")
    try:
        raise OSError("cannot open /home/me/secret.bin")
    except OSError:
        with caplog.at_level(logging.WARNING, "layerzero"):
            events.log.warning("recording stopped: %s", "/srv/me/calls.jsonl", exc_info=True)
    (record,) = caplog.records
    shown = logging.Formatter("%(message)s").format(record)
    assert "/srv" not in shown and "secret.bin" not in shown and "OSError" in shown


def test_arguments_that_do_not_fit_a_line_raise_nothing(caplog):
    logging.raiseExceptions, before = False, logging.raiseExceptions
    try:
        events.log.warning("one %s and two %s", 1)
    finally:
        logging.raiseExceptions = before


def test_a_choice_says_kernel_reasons_and_the_cost_of_its_transforms(caplog, emitted):
    lz.clear_cache()
    with caplog.at_level(logging.DEBUG, "layerzero"):
        lz.rms_norm(torch.randn(64, 64).t())
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("selected")]
    plan = lz.explain("rms_norm", torch.randn(64, 64).t())
    selected = events_of(Selected, emitted)[-1]
    assert f"kernel={plan.kernel}" in line and "transform_cost_total=" in line
    assert {r.kernel for r in selected.rejected} == {r.kernel for r in plan.rejected}
    assert all(f"{r.kernel}: {r.reasons[0].code.value}" in line for r in plan.rejected)
    assert selected.transform_cost_total == plan.steps[0].score.transform_us
    assert json.loads(json.dumps(selected.to_json()))["reasons"] == list(selected.reasons)


# whatever comes

@settings(deadline=None, max_examples=200)
@given(st.text(max_size=300))
def test_no_text_breaks_it_and_twice_is_once(text):
    for hidden in ("", "paths", "paths,shapes,texts"):
        redaction.use(hidden)
        try:
            once = redaction.text(text)
            assert isinstance(once, str) and redaction.data({"x": [text]}) == {"x": [once]}
        finally:
            redaction.use("")


def test_a_sentence_about_what_the_caller_gave_is_hidden_with_the_sizes(hide):
    reason = Reason(Code.HEADS_NOT_DIVISIBLE, "0", 2, "group_rest", "got 8 query heads, 3 KV heads")
    assert redaction.reason(reason).message == reason.sentence
    hide("shapes")
    assert "8" not in redaction.reason(reason).message and not redaction.reason(reason).sentence


# what is quadratic takes far longer
@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", ["a", "/", "a/", "(1,", "1x", "'", "://", "a=1 ", "\\", " ", "~/",
                                  "pass", "1, ", "é"])
def test_a_long_text_is_no_trouble(hide, unit):
    hide(*REDACTIONS)
    assert isinstance(redaction.text(unit * (300_000 // len(unit))), str)


def test_a_folder_that_is_gone_is_no_trouble(hide, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    hide("paths")
    assert redaction.text("x /a/b") == "x <path>"
