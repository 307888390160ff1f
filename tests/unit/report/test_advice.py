"""What to run next: every command exists, and the one that helps most comes first."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from report_pages import BASELINES, RATES, ROWS, Reader, flat, measured, overview, usages

from layerzero.cli import main
from layerzero.report.advice import MAX_COMMANDS, advise
from layerzero.report.gathering import Source, gather
from layerzero.report.overview import (
    RejectedKernel,
    RejectReason,
    UnmeasuredKind,
    Workload,
    group_by_kind,
)
from layerzero.report.page import render
from layerzero.report.regret import RegretSummary
from layerzero.report.saved import SavedReport, compare
from layerzero.tuning.workload import calls_for

OLD = SavedReport("A machine", "here-2t", "then", 1.7e9, "", ())
APP = Workload("an app", "--calls a.jsonl")
SLOWER = group_by_kind(ROWS, RATES, BASELINES, usages(rows64=(10, "torch.own")))


def commands(page):
    return [advice.command for advice in advise(page)]


def test_nothing_measured_asks_for_measuring_only():
    assert commands(overview(())) == ["lz tune"]
    unmeasured = replace(APP, unmeasured=(UnmeasuredKind("linear", 1, "k.k", 5.0),))
    assert commands(overview((), workload=unmeasured)) == ["lz tune --calls a.jsonl"]


def test_kinds_that_are_not_measured_come_first():
    workload = replace(APP, unmeasured=(UnmeasuredKind("linear", 3, "k.k", 1000.0),))
    advice = advise(overview(kinds=SLOWER, workload=workload))[0]
    assert advice.command == "lz tune --calls a.jsonl"
    assert advice.reason == ("1 kind of call of this workload is not measured, expected to take "
                             "50% of its time.")


def test_without_a_workload_the_calls_are_to_be_recorded():
    assert commands(overview())[0] == "lz record -- python app.py"


def test_a_choice_that_loses_time_is_to_be_explained():
    assert "lz explain linear x=rows64" in commands(overview(kinds=SLOWER, workload=APP))
    good = group_by_kind(ROWS, RATES, BASELINES, usages(rows64=(10, "fast.one")))
    assert not any(c.startswith("lz explain") for c in commands(overview(kinds=good, workload=APP)))


def test_noise_asks_for_another_measurement():
    rows = [measured("torch.own", 10.0, spread=0.9)]
    kinds = group_by_kind(rows, RATES, BASELINES, usages(rows64=(1, "")))
    assert "lz tune --calls a.jsonl --again" in commands(overview(kinds=kinds, workload=APP))


def test_a_kernel_for_this_hardware_that_needs_a_command_is_named():
    missing = RejectReason("NOT_INSTALLED", "needs x", command="pip install x")
    other = RejectReason("PLATFORM_MISMATCH", "runs on cuda", hardware=True)
    page = overview(rejected=(
        RejectedKernel("x.linear", "linear", (missing,)),
        RejectedKernel("x.conv", "conv", (missing,)),           # of no operation that takes time
        RejectedKernel("x.gpu", "linear", (replace(missing, command="pip install gpu"), other))))
    advice = advise(page)[0]
    assert advice.command == "pip install x" and "Brings x.linear, which serves" in advice.reason
    assert "pip install gpu" not in commands(page)


def test_there_is_always_something_to_run():
    sizes = Workload("a model", "--model gpt2 --batch 2")
    kinds = group_by_kind(ROWS[:2], RATES, BASELINES, usages(rows64=(1, "fast.one")))
    regret = RegretSummary(0.0, 0.0, 0.0, 0.0, 1.0, 0, 0, "here-2t")
    done = overview(kinds=kinds, workload=sizes, regret=regret, against=compare(OLD, OLD))
    assert commands(done) == ["lz perf show"]
    assert commands(replace(done, workload=APP)) == ["lz lock --calls a.jsonl"]


@pytest.mark.parametrize("gathered", [
    overview(()), overview(), overview(rates=None), overview(kinds=SLOWER, workload=APP),
    overview(kinds=SLOWER, workload=Workload("a model", "--model gpt2 --dtype float32 --batch 2 "
                                             "--prompt 8 --context 9")),
    overview([measured("torch.own", 9.0, spread=0.9)], rates=None, against=compare(OLD, OLD)),
    overview(kinds=SLOWER, workload=replace(APP, unmeasured=(UnmeasuredKind("l", 1, "", 0.0),)))])
def test_every_command_is_understood_and_on_the_page(gathered, capsys):
    page = flat(Reader(render(gathered)).text)
    assert 1 <= len(commands(gathered)) <= MAX_COMMANDS
    for command in commands(gathered):
        assert command in page
        program, *words = shlex.split(command.partition(" > ")[0].partition(" -- ")[0])
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])           # an unknown command or option would be an error
        assert (program, end.value.code) == ("lz", 0), capsys.readouterr().err


def test_the_words_of_a_workload_explain_its_calls(world, capsys):
    """What the page tells to run for a real call is understood by the command line."""
    calls = calls_for("smollm2-135m", dtype="float32", prompt=8, context=16)
    page = gather("cpu", source=Source("a model", "--model smollm2-135m", calls))
    assert page.workload is not None and len(page.workload.unmeasured) == len(calls)
    assert {kind.calls for kind in page.workload.unmeasured} != {1}
    from layerzero.cli.arguments import parse_call
    from layerzero.operate.inspection import dispatcher_of
    from layerzero.report.gathering import _words
    for call in calls:
        op = dispatcher_of(call.op).op
        parsed = parse_call(op, shlex.split(_words(call)), "float32")
        shapes = {n: tuple(v.shape) for n, v in parsed.items() if hasattr(v, "shape")}
        assert shapes == {n: v.shape for n, v in call.arguments.items() if hasattr(v, "shape")}
