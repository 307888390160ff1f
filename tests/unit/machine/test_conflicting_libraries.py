"""Two releases of one package, each in an environment of its own, serving in one process tree."""

from __future__ import annotations

import os
import signal
import threading
import time
import venv
from pathlib import Path

import clashing_kernels as clashing
import pytest
import torch

import layerzero as lz
from layerzero.machine.isolation import pool as pools
from layerzero.operate.matrix import matrix
from layerzero.spec.event import Fallback
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds

RELEASES = {"clashing.first": ("1.4", "norm"), "clashing.second": ("2.0", "rms_norm")}
HANG, NAME_YOURSELF = 0.25, 0.5                # values of eps


def environment(folder: Path, version: str, function: str) -> str:
    """Makes an environment with a release of the package, and this one's torch; returns its
    interpreter."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "clashing.py").write_text(clashing.SOURCE.format(version=version, function=function))
    info = site / f"clashing-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: clashing\nVersion: {version}\n")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return str(folder / "bin" / "python")


@pytest.fixture
def pythons(tmp_path, world):
    yield {kernel: environment(tmp_path / kernel, *release) for kernel, release in RELEASES.items()}
    pools.close_others(set())


def test_two_releases_of_a_library_serve_at_once_and_fail_alone(pythons, emitted, monkeypatch):
    for kernel in clashing.KERNELS:
        lz.register(kernel)
    lz.configure(isolation=[f"{kernel}=auto:{python}" for kernel, python in pythons.items()],
                 isolation_memory=64 << 20)
    rows = {row.worker: row for row in matrix().rows if row.library == "clashing"}
    assert {row.worker_verdict for row in rows.values()} == {"fits"} and set(rows) == {
        *pythons.values()}
    # its torch comes by a .pth file
    release = torch.__version__.partition("+")[0]
    assert all(f"torch {release}" in row.worker_installed for row in rows.values())

    x = torch.randn(4, 64)
    right = torch.rms_norm(x, (64,), None, 1e-6)
    wrong, made, done = [], dict.fromkeys(RELEASES, 0), threading.Event()

    def work(kernel):
        lz.rms_norm(x, backend=f"worker.{kernel}")         # both workers start at once
        while not done.is_set():
            with lz.prefer(f"worker.{kernel}"):
                out = lz.rms_norm(x)
            made[kernel] += 1
            time.sleep(0.002)
            if not torch.allclose(out, right, atol=1e-5):
                wrong.append(kernel)

    threads = [threading.Thread(target=work, args=(kernel,)) for kernel in RELEASES]
    [t.start() for t in threads]
    while not all(made.values()):
        assert any(t.is_alive() for t in threads)
        time.sleep(0.01)
    first, second = (next(p for p in pools.pools() if p.python == pythons[kernel])
                     for kernel in RELEASES)
    assert not [e for e in emitted if isinstance(e, Fallback)]

    # one is killed: its calls take the next kernel, the other one's nothing
    before = dict(made)
    os.kill(first.workers[0].process.pid, signal.SIGKILL)
    while made["clashing.first"] < before["clashing.first"] + 20:
        time.sleep(0.01)
    first.wait()                                           # and it comes back
    done.set()
    [t.join() for t in threads]
    assert not wrong and made["clashing.second"] > before["clashing.second"]
    fallbacks = [e for e in emitted if isinstance(e, Fallback)]
    assert {e.kernel for e in fallbacks} == {"worker.clashing.first"}
    assert "signal 9" in fallbacks[0].reason.message

    for kernel, pool in (("clashing.first", first), ("clashing.second", second)):
        with pytest.raises(ValueError, match=f"clashing {RELEASES[kernel][0]} serves"):
            pool.call(kernel, (x, NAME_YOURSELF), ())

    # the other one hangs: its time is up, the plan goes on, and the first still serves
    monkeypatch.setattr(pools, "FIRST_DELAY", 600.0)       # no other is started
    lz.configure(isolation_timeout=0.3)
    emitted.clear()
    with lz.prefer("worker.clashing.second"):
        out = lz.rms_norm(x, eps=HANG)
    torch.testing.assert_close(out, torch.rms_norm(x, (64,), None, HANG))
    hung = next(e for e in emitted if isinstance(e, Fallback))
    assert (hung.kernel, hung.reason.code) == ("worker.clashing.second", Code.KERNEL_TIMEOUT)
    assert worlds.current().health["worker.clashing.second"].state == "open"
    lz.configure(isolation_timeout=20.0)
    torch.testing.assert_close(lz.rms_norm(x, backend="worker.clashing.first"), right)
