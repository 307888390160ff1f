"""`lz verify` in several processes: a kernel that ends its process is a result, the others go on."""

from __future__ import annotations

import json
import os

import pytest
from helpers import run_python
from test_plugin import SOURCES, write_plugin

pytestmark = pytest.mark.integration

PLUGIN = """
    import os, signal, torch
    import layerzero as lz
    from layerzero.spec.rules import at_most, device, dtypes

    FEW = (device("cpu"), dtypes("float32"), at_most("hidden", 64))

    def _aborts():
        return lambda x, weight=None, bias=None, eps=1e-5: os.kill(os.getpid(), signal.SIGABRT)

    def _right():
        return lz.op("layer_norm").reference

    def _wrong():
        return lambda x, weight=None, eps=1e-6: torch.rms_norm(x, x.shape[-1:], weight, eps + 1)

    KERNELS = (
        lz.Kernel("trial.aborts", lz.op("layer_norm"), _aborts, requires=FEW),
        lz.Kernel("trial.right", lz.op("layer_norm"), _right, requires=FEW),
        lz.Kernel("trial.wrong", lz.op("rms_norm"), _wrong, requires=FEW))
    """


def verify(site, cache, *options):
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")}
    env["LAYERZERO_CACHE_DIR"] = str(cache)
    env["PYTHONPATH"] = os.pathsep.join((str(site), str(SOURCES)))
    return run_python("-m", "layerzero", "verify", "kernels", "--backend", "trial", "--device",
                      "cpu", "--json", *options, env=env)


def test_a_kernel_that_ends_its_process_has_failed_and_the_others_go_on(tmp_path):
    write_plugin(tmp_path / "site", "trial", PLUGIN)
    done = verify(tmp_path / "site", tmp_path / "cache", "--workers", "2")
    assert done.returncode == 1, done.stderr
    found = {k["kernel"]: k for k in json.loads(done.stdout)["kernels"]}
    assert {name: k["status"] for name, k in found.items()} == {
        "trial.aborts": "failed", "trial.right": "passed", "trial.wrong": "failed"}
    assert found["trial.aborts"]["diagnosis"]["class"] == "fault"
    assert "SIGABRT" in found["trial.aborts"]["diagnosis"]["says"]
    assert found["trial.right"]["certificate"]["kernel"] == "trial.right"
    kept = {path.name for path in (tmp_path / "cache").rglob("trial.*")}
    assert "trial.right.json" in kept                      # and two failures that are remembered
    assert len(kept) == 3 and "trial.aborts.json" not in kept
