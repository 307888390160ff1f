"""Memory and faults on a GPU: a lack of memory is walked around, a lost context is called lost, a
hang is stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import NVIDIA_ONLY, RMS_NORM, emitted, events_of, health_of, policy, python, world

import layerzero as lz
from layerzero.machine.memory import free_bytes, headroom
from layerzero.spec.event import Fallback
from layerzero.spec.reason import Code
from layerzero.verify.kernel.probing import probe

__all__ = ["emitted", "world"]                # fixtures

pytestmark = NVIDIA_ONLY
FAULTS = Path(__file__).parents[1] / "faults"
GIB = 1 << 30


def rows() -> torch.Tensor:
    return torch.randn(4, 64, device="cuda")


def alive() -> None:
    """This process can still use the device."""
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


@pytest.mark.usefixtures("world")
def test_out_of_memory_falls_to_a_kernel_that_needs_less(emitted):
    def greedy(x, weight=None, eps=1e-6):
        torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return x

    lz.register(lz.Kernel("greedy.norm", RMS_NORM, lambda: greedy, prior=1e6, less_work="a test"))
    x = rows()
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(x), RMS_NORM.reference(x))
    events = events_of(Fallback, emitted)
    assert (len(events) == 3 and {(e.kernel, e.reason.code) for e in events}
            == {("greedy.norm", Code.OUT_OF_MEMORY)})
    assert health_of("greedy.norm") is None                # it may fit the next time
    alive()


def test_headroom_counts_what_other_processes_have():
    torch.cuda.empty_cache()
    before = free_bytes("cuda")
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import sys, torch
            kept = torch.ones({4 * GIB}, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            print("ready", flush=True)
            sys.stdin.readline()
            """)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline().strip() == "ready"
        during = free_bytes("cuda")
    finally:
        other.communicate("\n", timeout=60)
    assert before - during >= 4 * GIB
    assert headroom("cuda", policy(memory_headroom_fraction=0.5)) <= torch.cuda.mem_get_info()[
        1] // 2


STRAY = """
    import json, sys
    sys.path.insert(0, {faults!r})
    import torch
    import layerzero as lz
    import hostile_triton
    from layerzero.world import snapshot as worlds
    lz.register(lz.Kernel("stray.norm", lz.op("rms_norm"), hostile_triton.load_out_of_bounds, package="triton"))
    x, errors = torch.ones(4, 64, device="cuda"), []
    for _ in range(8):
        try:
            lz.rms_norm(x, backend="stray.norm")
            torch.cuda.synchronize()
        except lz.errors.DeviceLost as e:
            errors.append(["DeviceLost", str(e), [c.value for c in e.codes]])
        except RuntimeError as e:              # torch's own, from the wait
            errors.append([type(e).__name__, str(e)[:200], []])
    state = worlds.current().health["stray"].state if "stray" in worlds.current().health else ""
    print(json.dumps({{"errors": errors, "state": state}}), flush=True)
    import os
    os._exit(0)                                # a lost context cannot be taken down in order
"""


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_an_illegal_access_loses_the_device_and_it_is_said(blocking):
    data = json.loads(python(STRAY.format(faults=str(FAULTS)),
                             CUDA_LAUNCH_BLOCKING=blocking).splitlines()[-1])
    lost = [e for e in data["errors"] if e[0] == "DeviceLost"]
    # at the latest when the next call finds the context gone
    assert lost, data
    assert "context is lost; restart the process" in lost[0][1] and lost[0][2] == ["DEVICE_FAULT"]
    assert data["state"] == "disabled"
    alive()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("how", "code", "timeout"), [
    ("out_of_bounds", Code.DEVICE_FAULT, 120.0), ("endless", Code.KERNEL_TIMEOUT, 25.0)])
def test_a_probe_in_another_process_finds_what_would_cost_this_one(monkeypatch, how, code, timeout):
    monkeypatch.syspath_prepend(str(FAULTS))
    import hostile_triton
    kernel = lz.Kernel(f"hostile.{how}", RMS_NORM, getattr(hostile_triton, f"load_{how}"),
                       package="triton")
    lz.register(kernel)
    reason = probe(kernel, "cuda", timeout)
    assert reason is not None and reason.code is code, reason
    assert health_of(kernel.id).state == "disabled"
    alive()
