"""The compatibility matrix: what kernels declare against what is found."""

import json
import sys

import pytest
from helpers import RMS_NORM

import layerzero as lz
from layerzero.cli.commands import ask
from layerzero.operate.matrix import matrix
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("world")


def register(version="", torch=""):
    lz.register(lz.Kernel("odd.rms_norm", RMS_NORM, lambda: RMS_NORM.reference, package="numpy",
                          version=version, torch=torch))
    return next(row for row in matrix().rows if row.library == "numpy")


def test_what_fits_and_what_is_not_installed_is_well():
    assert register(">=1").verdict == "fits"
    report = matrix()
    absent = [row for row in report.rows if row.verdict == "not installed"]
    assert all(row.ok for row in absent)
    assert f"{len(report.rows)} libraries" in str(report)
    assert json.loads(json.dumps(report.to_json()))["ok"] is report.ok


@pytest.mark.parametrize(("declared", "words"), [
    ({"version": ">=99"}, "needs numpy >=99"), ({"torch": "<2"}, "needs torch <2")])
def test_a_conflict_is_named_and_fails_the_command(declared, words, capsys):
    row = register(**declared)
    assert not row.ok and words in row.verdict and words.split()[-1] in row.declared
    assert ask.matrix(deep=False, as_json=True) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"] and "numpy" in [r["library"] for r in data["rows"]]


def test_the_interpreter_of_a_worker_is_compared_too(tmp_path):
    """One that has the library in the version it needs; only its folder is read."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, version in (("numpy", "99.1"), ("torch", "2.8.0")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "bin" / "python"
    register(">=99")
    # a kernel is isolated only if its load can be imported: that of this file can
    assert __name__ in sys.modules
    lz.configure(isolation=f"odd.*=auto:{python}")
    row = next(row for row in matrix().rows if row.library == "numpy")
    assert row.ok and row.worker == str(python) and row.worker_verdict == "fits"
    assert row.worker_installed == "numpy 99.1; torch 2.8.0"
    assert "worker.odd.rms_norm" in worlds.current().catalog.by_id
    lz.configure(isolation="")
    assert "worker.odd.rms_norm" not in worlds.current().catalog.by_id
