"""A soak of seconds: what is right passes with everything happening, and each kind of trouble is
noticed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import RMS_NORM, Fake, Program, register, wait_for

import layerzero as lz
from layerzero.cli import main
from layerzero.release import soak_disturbances
from layerzero.release.soak import (
    SoakPart,
    SoakReport,
    SoakSample,
    _noticed_interrupt,
    soak,
)
from layerzero.release.soak_disturbances import Disturbances, in_child, may_not_fork
from layerzero.release.soak_load import Case, Tally, call_and_check, cases_of
from layerzero.release.trend import MIN_SAMPLES, theil_sen
from layerzero.world import snapshot as worlds

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("world"),
              pytest.mark.filterwarnings(
                  "ignore:.*use of fork\\(\\) may lead to deadlocks.*:DeprecationWarning")]
NORMS = ("rms_norm", "layer_norm", "rope", "add_rms_norm")


def test_everything_at_once_for_some_seconds(tmp_path):
    before, threads = worlds.current(), threading.active_count()
    path = tmp_path / "soak.json"
    report = soak(6.0, device="cpu", threads=3, rate=0.05, out=path)
    assert report.failures == [] and report.passed and report.complete, report.failures
    counts = report.counts
    for what in ("calls", "calls of new sizes", "planted faults", "policy changes", "registrations",
                 "mistakes refused", "short threads", "times of memory pressure", "event Fallback"):
        assert counts[what] > 0, (what, counts)
    if not may_not_fork():
        assert counts["forks"] > 0
    part = report.parts[0]
    assert part.samples and all(s.rss_mib > 10 and s.p99_us >= s.p50_us > 0 for s in part.samples)
    assert json.loads(path.read_text())["schema"] == "layerzero.soak/1"
    now = worlds.current()
    assert now.policy == before.policy and now.catalog.by_id.keys() == before.catalog.by_id.keys()
    # the clock and the learner may have begun
    assert threading.active_count() <= threads + 2


class Wrong(Fake):
    """A norm that is off by a little more than rounding, at every hundredth call."""

    def _load(self):
        right, calls = super()._load(), [0]

        def run(x, weight=None, eps=1e-6, *, offset=0.0):
            calls[0] += 1
            out = right(x, weight, eps, offset=offset)
            return out * 1.02 if calls[0] % 20 == 0 else out

        return run


def test_a_kernel_that_is_wrong_now_and_then_is_found():
    register(Wrong("fake.wrong", prior=1e7))
    report = soak(2.0, device="cpu", threads=2, rate=0.0, forks=False, ops=("rms_norm",))
    assert report.counts["wrong results"] > 0 and not report.passed
    assert "lz.rms_norm" in next(text for text in report.failures
                                 if text.startswith("wrong results"))


def test_another_kernel_out_of_service_is_found():
    fake = Fake("fake.bad", prior=1e7, fault=RuntimeError("always"))
    register(fake)
    report = soak(1.0, device="cpu", threads=2, rate=0.0, forks=False, ops=("rms_norm",))
    assert report.counts["breakers of other kernels"] == 1 and not report.passed
    assert "fake.bad is out of service" in " ".join(report.failures)


def test_a_call_that_raises_and_a_result_of_another_shape_are_failures():
    case, tally = cases_of(("cpu",), ("rms_norm",))[0], Tally()
    call_and_check(case, tally)
    assert tally.failures == [] and tally.counts["calls"] == 1
    assert ("result 0" in case.complaint(torch.ones(1))
            and "2 results" in case.complaint((torch.ones(1),) * 2))
    with lz.prefer("reference.*"):
        call_and_check(Case(RMS_NORM, case.dtype, "cpu", {**case.values, "weight": torch.ones(3)},
                            case.truth,
                            case.eager), tally)
    assert tally.counts["calls that raised"] == 1 and "InvalidCall" in tally.failures[0]


@pytest.mark.skipif(bool(may_not_fork()), reason="no forks here")
def test_a_child_that_fails_or_hangs_is_told():
    def wrong():
        raise ValueError("off")

    assert in_child(lambda: None, 60) == ""
    assert "ValueError: off" in in_child(wrong, 60)
    assert "did not end within" in in_child(lambda: time.sleep(60), 0.3)


def test_a_disturbance_that_raises_is_a_failure(monkeypatch):
    tally = Tally()
    around = Disturbances(cases_of(("cpu",), NORMS), tally, "cpu")

    def broken(*args, **kwargs):
        raise OSError("no")

    monkeypatch.setattr(soak_disturbances, "configure", broken)
    around.do(0)
    assert tally.counts["disturbances that raised"] == 1 and "OSError: no" in tally.failures[0]


# In parts.

def test_a_soak_goes_on_in_parts(tmp_path, capsys):
    path = tmp_path / "soak.json"
    words = ["soak", "rms_norm", "rope", "--device", "cpu", "--threads", "2", "--no-forks"]
    for minutes, parts in ((0.02, 1), (0.02, 2)):
        with pytest.raises(SystemExit) as stop:
            main([*words, "--minutes", str(minutes), *(["--out"] if parts == 1 else ["--resume"]),
                  str(path)])
        assert not stop.value.code
        report = SoakReport.load(path)
        assert len(report.parts) == parts and report.complete
    output = capsys.readouterr().out
    assert "in 2 parts" in output and "RSS (MiB)" in output and "no forks: not asked for" in output
    with pytest.raises(SystemExit) as stop:    # nothing is left to do: it is only shown
        main([*words, "--resume", str(path), "--json"])
    assert not stop.value.code and len(json.loads(capsys.readouterr().out)["parts"]) == 2


# its report is written at the end of each
SHORT_CYCLES = """
import importlib
importlib.import_module("layerzero.release.soak").CYCLE_SECONDS = 0.5
from layerzero.cli import main
main()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM"])
def test_an_interrupted_soak_leaves_its_report(tmp_path, ending):
    path = tmp_path / "soak.json"
    env = {**os.environ,
           "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    said, told = tmp_path / "stdout", tmp_path / "stderr"
    with said.open("wb") as stdout, told.open("wb") as stderr:
        running = Program("-c", SHORT_CYCLES, "soak", "rms_norm", "rope", "--minutes", "0.2",
                          "--device", "cpu", "--no-forks", "--threads", "2", "--out", str(path),
                          env=env, stdout=stdout.fileno(), stderr=stderr.fileno())
    try:
        wait_for(path.exists)
        os.kill(running.pid, getattr(signal, ending))
    except BaseException:                      # re-raised: it would go on for minutes
        os.kill(running.pid, signal.SIGKILL)
        raise
    code, out, err = running.wait(), said.read_text(), told.read_text()
    assert code == 130, err
    report = SoakReport.load(path)
    assert report.parts[0].interrupted and not report.complete and report.counts["calls"] > 0
    assert f"lz soak --resume {path} goes on" in out and "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} == {"soak.json", said.name, told.name}


def test_what_is_no_report_is_a_data_error(tmp_path):
    path = tmp_path / "soak.json"
    good = SoakReport(
        1.0, [SoakPart("2026", "a CPU", "2.13", [SoakSample(1.0, 1.0, 1, 1, 1.0, 1.0, 1.0, 1)])]
    ).to_json()
    for data in ("", "[]", "{}", json.dumps({**good, "schema": "layerzero.soak/9"}),
                 json.dumps({**good, "parts": [{}]}),
                 json.dumps({**good, "target_seconds": "long"}),
                 json.dumps({**good, "parts": [{**good["parts"][0], "samples": [{"at": 1}]}]})):
        path.write_text(data)
        with pytest.raises(lz.errors.DataError, match=r"soak\.json"):
            SoakReport.load(path)
    with pytest.raises(lz.errors.DataError, match="cannot read"):
        SoakReport.load(tmp_path / "none.json")
    with pytest.raises(lz.errors.ConfigError, match="seconds > 0"):
        soak(0.0)
    with pytest.raises(lz.errors.ConfigError, match="there is no op 'nothing'"):
        soak(1.0, ops=("nothing",))


# Slopes.

def line(slope, level, n=40, noise=1.0):
    gen = torch.Generator().manual_seed(n)
    wobble = (noise * torch.randn(n, generator=gen)).tolist()
    return [(i / n, level + slope * i / n + wobble[i]) for i in range(n)]


def test_a_slope_is_found_through_noise_and_outliers():
    points = line(50.0, 300.0)
    points[7] = (points[7][0], 1e6)
    slope = theil_sen([points])
    assert slope.low < 50.0 < slope.high and slope.low > 40 and slope.samples == 40
    flat = theil_sen([line(0.0, 300.0)])
    assert flat.low < 0 < flat.high


def test_parts_have_levels_of_their_own():
    """Two processes, the second 100 MiB larger: no growth within either of them."""
    slope = theil_sen([line(0.0, 300.0), [(x + 1, y) for x, y in line(0.0, 400.0, n=41)]])
    assert slope.low < 0 < slope.high
    assert theil_sen([line(0.0, 300.0)[:MIN_SAMPLES - 1]]) is None and theil_sen([]) is None
    assert theil_sen([[(1.0, 2.0)] * MIN_SAMPLES]) is None         # all at one time


def report(rss, seconds=3600.0):
    step = seconds / 60
    return SoakReport(seconds, [SoakPart("2026", "a CPU", "2.13", [
        SoakSample(i * step, rss(i), 9, 4, 10.0, 20.0, 12.0, i) for i in range(60)],
                                         seconds=seconds)])


def test_growth_beyond_the_bound_fails_and_warming_up_does_not():
    assert report(lambda i: 300 + i % 5).passed
    # the first quarter is the warm-up
    assert report(lambda i: 100 + min(i, 14) * 20 + i % 5).passed
    leak = report(lambda i: 300 + i * 2 + i % 5)
    assert not leak.passed and [s.name for s in leak.series if not s.passed] == ["RSS"]
    short = report(lambda i: 300 + i * 2, seconds=60.0)
    # a minute says nothing of an hour
    assert short.passed and not any(s.judged for s in short.series)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_comes_while_an_object_is_freed_is_not_lost() -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with _noticed_interrupt() as came:
        freed = Interrupted()
        del freed                              # Python drops the KeyboardInterrupt
        assert came.is_set()
