"""A process of its own for what may hang or crash: whatever happens there, this process goes on and
knows why.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    RMS_NORM,
    Fake,
    allow_only,
    events_of,
    health_of,
    path_of,
    register,
    rows,
    warm_python,
)

import layerzero as lz
from layerzero.machine.watchdog import run_isolated
from layerzero.spec.event import Fallback, HealthChanged
from layerzero.spec.rules.launch import LaunchLimits, LaunchRefused, grid_problems
from layerzero.verify.kernel.probing import probe, probe_unknown, run_in_subprocess
from layerzero.world import snapshot as worlds

FAULTS = Path(__file__).parents[2] / "faults"


@pytest.fixture(autouse=True)
def importable(monkeypatch, world):
    monkeypatch.syspath_prepend(str(FAULTS))


@pytest.fixture
def quick_start(monkeypatch):
    """The processes of the test have torch already."""
    monkeypatch.setattr(sys, "executable", warm_python())


def hostile(how: str) -> lz.Kernel:
    import hostile_kernels
    return lz.Kernel(f"hostile.{how}", RMS_NORM, getattr(hostile_kernels, f"load_{how}"))


def test_a_result_comes_back():
    outcome = run_isolated("os:getppid")
    assert outcome.ok and outcome.value == os.getpid() and outcome.reason is None


def test_an_error_comes_back_in_words(quick_start):
    outcome = run_isolated("math:sqrt", -1)
    assert outcome.status == "failed" and outcome.why.startswith("ValueError:")
    assert outcome.reason.code is lz.Code.KERNEL_FAILED


def test_what_hangs_is_stopped_with_all_it_started(tmp_path):
    note = tmp_path / "pid"
    note.touch()
    for seconds in (5.0, 20.0, 80.0):    # on a busy machine a process takes long to begin
        outcome = run_isolated("os:system", f"sleep 300 & echo $! > {note}; wait", timeout=seconds)
        assert outcome.status == "timeout" and outcome.reason.code is lz.Code.KERNEL_TIMEOUT
        assert f" {seconds:g} s" in outcome.reason.message
        if note.read_text():
            break
    pid = int(note.read_text())
    assert (not Path(f"/proc/{pid}").exists()
            or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0])


def test_what_cannot_travel_is_refused_before_anything_starts():
    with pytest.raises(lz.errors.ConfigError, match="plain JSON values"):
        run_isolated("math:gcd", object())
    with pytest.raises(lz.errors.ConfigError, match=r"package\.module:name"):
        run_isolated("math.gcd", 1, 2)


@pytest.mark.parametrize(("how", "code", "word"), [
    ("hanging", lz.Code.KERNEL_TIMEOUT, " s"), ("crashing", lz.Code.KERNEL_FAILED, "SIGSEGV"),
    ("exiting", lz.Code.KERNEL_FAILED, "ended with 7"),
    ("failing", lz.Code.DEVICE_FAULT, "illegal memory access")])
def test_a_hostile_kernel_is_caught_and_taken_out(how, code, word, emitted, tmp_path, monkeypatch,
                                                  quick_start):
    begun = tmp_path / "begun"
    monkeypatch.setenv("HOSTILE_KERNEL_BEGUN", str(begun))
    kernel = hostile(how)
    lz.register(kernel)
    for seconds in (2.0, 8.0, 30.0, 120.0) if how == "hanging" else (240.0,):
        worlds.publish(lambda w: w.replace(health={}), "test")
        emitted.clear()
        reason = probe(kernel, timeout=seconds)
        assert reason.code is code and word in reason.message
        if begun.exists():                     # else the machine is busy: it was still loading
            break
    assert begun.exists()
    assert health_of(kernel.id).state == "disabled"
    assert [e.kernel for e in events_of(HealthChanged, emitted)] == [kernel.id]
    x = rows()
    assert lz.Code.BACKEND_DISABLED in [r.code
                                        for r in lz.explain("rms_norm", x).why_not(kernel.id)]
    torch.testing.assert_close(lz.rms_norm(x), RMS_NORM.reference(x))


def test_a_sound_kernel_passes_the_probe(quick_start):
    kernel = hostile("sound")
    lz.register(kernel)
    outcome = run_in_subprocess(kernel)
    assert outcome.value == 3 and outcome.reason is None   # cases


def test_only_unknown_libraries_are_probed():
    kernel = hostile("sound")
    assert probe_unknown([kernel, lz.Kernel("hostile.absent", RMS_NORM, kernel.load,
                                            package="no_such_library")]) == {}


def test_a_kernel_that_another_process_cannot_know_is_not_condemned(quick_start):
    fake = Fake("fake.local")
    register(fake)
    with pytest.raises(lz.errors.ConfigError, match="function of a module"):
        probe(fake.kernel)
    assert health_of("fake.local") is None


# faults in this process

def test_out_of_memory_goes_to_the_kernel_that_needs_less(path, emitted):
    greedy = Fake("fake.greedy",
                  fault=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB"),
                  workspace="1000000")
    modest = Fake("fake.modest", prior=1e5)
    register(greedy, modest)
    x = rows()
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), RMS_NORM.reference(x))
    (event,) = events_of(Fallback, emitted)
    assert (event.kernel, event.served_by, event.reason.code) == ("fake.greedy", "fake.modest",
                                                                  lz.Code.OUT_OF_MEMORY)
    assert health_of("fake.greedy") is None


@pytest.mark.parametrize("text", [
    "CUDA error: an illegal memory access was encountered",
    "Triton Error [CUDA]: unspecified launch failure"])
def test_a_lost_device_is_said_to_be_lost(path, emitted, text):
    register(Fake("fake.stray", fault=RuntimeError(text), package="torch"),
             Fake("fake.other", prior=1e5,
             package="torch"))
    with pytest.raises(lz.errors.DeviceLost,
                       match=r"context is lost; restart the process.*CUDA_LAUNCH") as caught:
        path_of(RMS_NORM, path)(rows())
    assert caught.value.codes == (lz.Code.DEVICE_FAULT,)
    assert health_of("fake").state == "disabled"           # the whole library
    assert {r.code for r in lz.explain("rms_norm", rows()).why_not("fake.other")} == {
        lz.Code.BACKEND_DISABLED}


def test_a_launch_that_was_refused_goes_on_to_the_next_and_trips_nothing(path, emitted):
    refused = LaunchRefused.of("fake.large", grid_problems((1, 70000), LaunchLimits()))
    large = Fake("fake.large", fault=refused)
    register(large)
    for _ in range(7):
        torch.testing.assert_close(path_of(RMS_NORM, path)(rows()), normed_rows())
    # asked once: it is refused for this kind
    assert large.calls == 1 and health_of("fake.large") is None
    assert {e.reason.code for e in events_of(Fallback,
                                             emitted)} == {lz.Code.CUDA_BLOCK_LIMIT_EXCEEDED}
    allow_only("fake.large", op="rms_norm")
    with pytest.raises(lz.errors.NoKernelFoundError,
                       match="grid y must be a whole number from 1 to 65535, got 70000"):
        lz.rms_norm(rows())


def normed_rows() -> torch.Tensor:
    return RMS_NORM.reference(rows())
