"""What holds for every test: no policy from the caller's environment, and no GPU test where there
is no GPU.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest import logging as logging_plugin
from _pytest.assertion import rewrite
from helpers import FULL
from hypothesis import HealthCheck, settings
from lanes import leave_to_the_nightly_lanes

# How long an example takes is the machine's affair. The nightly lanes draw as many as hypothesis
# does by itself.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow],
                          max_examples=100 if FULL else 40)
settings.load_profile("calm")

# Torch's compiler imports it, and would in the midst of a test that changes what imports see: it
# takes the place of distutils, or fails where that is not to be had, in all tests that follow.
with suppress(ImportError):
    importlib.import_module("setuptools")

# A shell ignores ctrl-C for what it runs in the background, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A developer's own LAYERZERO_DENY or LAYERZERO_POLICY must not decide a test. What says which call
# path is used stays: LAYERZERO_NATIVE=0 runs the tests in pure Python.
KEPT = ("LAYERZERO_CACHE_DIR", "LAYERZERO_NATIVE")
for _name in [n for n in os.environ if n.startswith("LAYERZERO_") and n not in KEPT]:
    del os.environ[_name]

# Nor must what was measured or proven on this machine, and a test must not add to it: a cache
# folder of its own, with the compiled code of the real one.
_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "layerzero")
_real = Path(os.environ.get("LAYERZERO_CACHE_DIR") or _home)
_own = tempfile.mkdtemp(prefix="layerzero-tests-")
atexit.register(shutil.rmtree, _own, ignore_errors=True)
(_real.expanduser() / "native").mkdir(parents=True, exist_ok=True)
os.symlink((_real.expanduser() / "native").resolve(), Path(_own, "native"))
os.environ["LAYERZERO_CACHE_DIR"] = _own
# Nor what came with the package for this model of device: a test that is about it switches it on.
os.environ["LAYERZERO_SHIPPED_MEASUREMENTS"] = "0"

# Processes that a test starts find the library from any folder, installed or not.
_src = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_src, os.environ.get("PYTHONPATH"))))


@pytest.fixture(autouse=True)
def _nothing_measured_stays() -> Iterator[None]:
    """What one test measured, or a page of the documentation learned, must not decide the next."""
    _forget_measurements()
    yield
    _forget_measurements()


def _forget_measurements() -> None:
    for file in Path(_own).glob("perf.sqlite*"):
        file.unlink(missing_ok=True)
    loading = sys.modules.get("layerzero.world.perf_loading")
    if loading is not None:
        loading.state.reset()
    worlds = sys.modules.get("layerzero.world.snapshot")
    if worlds is not None and worlds.exists() and worlds.current().perf:
        sys.modules["layerzero.world.measurements"].forget_measurements()


# Nearly all that is made until the tests are collected stays, so there is nothing to look for.
gc.disable()


def pytest_collection_finish() -> None:
    """What is there when the tests are collected stays: a collection of garbage that looks at it
    takes a second where a model library was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """In a fresh clone pytest rewrites the asserts of every file, for 20 seconds in each worker:
    each begins with its part of the files, and so finds the others done."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    state = config.stash.get(rewrite.assertstate_key, None)
    if count < 2 or not number.isdigit() or state is None or state.hook is None or (
            sys.dont_write_bytecode or config.args != config.getini("testpaths")):
        return
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[int(number)::count]:
        folder = rewrite.get_cache_dir(file)
        kept = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(file, kept) is None:
            status, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, status, kept)


class CatchingAtTheRoot:
    """pytest 9 looks six times for each test at every logger there is, and gives its handler to
    those that do not propagate, torch's dozens. No test is about these: the root's will do."""

    def __init__(self, handler: logging.Handler, level: int | None = None) -> None:
        self.handler, self.level, self.before = handler, level, logging.root.level

    def __enter__(self) -> logging.Handler:
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.before = logging.root.level
            logging.root.setLevel(min(self.before, self.level))
        logging.root.addHandler(self.handler)
        return self.handler

    def __exit__(self, *_: object) -> None:
        if self.level is not None:
            logging.root.setLevel(self.before)
        logging.root.removeHandler(self.handler)


vars(logging_plugin)["catching_logs"] = CatchingAtTheRoot


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_to_the_nightly_lanes(config, items)
    needy = [item for item in items if item.get_closest_marker("gpu")
             or item.get_closest_marker("multigpu")]
    if not needy:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in needy:
        if count == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))
        elif count < 2 and item.get_closest_marker("multigpu"):
            item.add_marker(
                pytest.mark.skip(reason=f"needs two CUDA devices; this machine has {count}"))
