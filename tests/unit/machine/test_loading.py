"""A library that is missing, wrong or broken costs its own kernels and nothing else."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
import torch
from helpers import RMS_NORM, events_of, normalized, path_of, rows

import layerzero as lz
from layerzero.machine import loading
from layerzero.spec.event import BackendUnavailable, Fallback
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds
from layerzero.world.registry import catalog

pytestmark = pytest.mark.usefixtures("world")
_serial = itertools.count()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write an importable package, with metadata if a version is given; returns its name, never
    used before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))        # for processes of their own
    made: list[str] = []

    def write(code: str, version: str | None = None, **modules: str) -> str:
        name = f"broken_library_{next(_serial)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(code)
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        if version is not None:
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield write
    for name in made:
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[module]


def kernel(package, **declared):
    """The first choice for every rms_norm; it imports `package` when it is chosen."""
    def load():
        return importlib.import_module(package).rms_norm

    declared.setdefault("distribution", package.partition(".")[0])
    lz.register(lz.Kernel("broken.rms_norm", RMS_NORM, load, package=package, prior=1e6,
                          less_work="a test",
                          **declared))


def why():
    return lz.explain("rms_norm", rows()).why_not("broken.rms_norm")


GOOD = "def rms_norm(x, weight=None, eps=1e-6):\n    return x * 0 + 7\n"
BROKEN = {
    "undefined symbol": (
        "raise ImportError('/site/lib/_C.so: undefined symbol: _ZN3c105ErrorC2ENS_14Source')",
        Code.ABI_MISMATCH, "undefined symbol"),
    "shared object": (
        "raise OSError('libcudart.so.11.0: cannot open shared object file: No such file')",
        Code.ABI_MISMATCH, "libcudart"),
    "C++ runtime": ("raise ImportError(\"/lib/libstdc++.so.6: version `CXXABI_1.3.15' not found\")",
                    Code.ABI_MISMATCH, "CXXABI"),
    "a name": ("import os\nos.exit(1)", Code.IMPORT_FAILED, "module 'os' has no attribute 'exit'"),
    "exits": ("raise SystemExit('no GPU found')", Code.IMPORT_FAILED, "SystemExit: no GPU found"),
    "missing part": ("from json import capability", Code.IMPORT_FAILED,
                     "cannot import name 'capability'"),
    "syntax": ("def rms_norm(:", Code.IMPORT_FAILED, "SyntaxError"),
    "asserts": ("assert False, 'wants CUDA 13'", Code.IMPORT_FAILED,
                "AssertionError: wants CUDA 13"),
    "runtime": ("raise RuntimeError('Found no NVIDIA driver on your system')", Code.IMPORT_FAILED,
                "no NVIDIA driver"),
    "index": ("[][0]", Code.IMPORT_FAILED, "IndexError"),
    "arithmetic": ("1 / 0", Code.IMPORT_FAILED, "ZeroDivisionError"),
    "its own error": ("class LibraryError(Exception): pass\nraise LibraryError('no GPU')",
                      Code.IMPORT_FAILED, "LibraryError: no GPU"),
    "a warning": ("raise DeprecationWarning('as an error')", Code.IMPORT_FAILED,
                  "DeprecationWarning"),
    "no entry": ("", Code.IMPORT_FAILED, "has no attribute 'rms_norm'"),
    "no text": ("raise ImportError", Code.IMPORT_FAILED, "ImportError"),
}


@pytest.mark.parametrize(("code", "want", "words"), BROKEN.values(), ids=BROKEN)
def test_a_library_that_does_not_import_becomes_a_reason(library, emitted, path, code, want,
                                                         words):
    kernel(library(code))
    assert why() == ()                                     # it looks fine until it is imported
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(3):
        torch.testing.assert_close(call(x), normalized(x))
    (reason,) = why()
    assert reason.code is want and words in reason.message
    (event,) = events_of(BackendUnavailable, emitted)            # said once, not at every call
    assert event.kernel == "broken.rms_norm" and event.op == "rms_norm" and event.reason == reason
    assert events_of(Fallback, emitted) == []                    # it was never in a plan that ran
    line = next(c for c in lz.doctor().checks if c.name == "loading broken.rms_norm")
    assert not line.ok and words in line.detail and (line.hint or want is not Code.ABI_MISMATCH)
    assert not worlds.current().health                     # not a fault of the kernel's


def test_an_interrupt_while_importing_is_the_users(library):
    kernel(library("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        lz.rms_norm(rows())
    assert not worlds.current().unloadable


def test_what_was_asked_for_by_name_raises_if_it_does_not_load(library, path):
    kernel(library("raise ImportError('libfoo.so: undefined symbol: bar')"))
    for _ in range(2):
        with pytest.raises(lz.errors.NamedKernelRefused, match="undefined symbol: bar") as raised:
            path_of(RMS_NORM, path)(rows(), backend="broken.rms_norm")
        assert raised.value.codes == (Code.ABI_MISMATCH,)


def test_a_kernel_that_takes_other_arguments_than_the_op_has_is_refused(library):
    kernel(library("def rms_norm(x, gamma): return x"))
    x = rows()
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert "gamma" in why()[0].message


# without importing anything

def test_a_library_that_is_not_there(path):
    kernel("surely_not_installed")
    x = rows()
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), normalized(x))
    assert ([r.code for r in why()] == [Code.NOT_INSTALLED]
            and "surely_not_installed" in why()[0].message)
    line = next(c for c in lz.doctor().checks if c.name == "library surely_not_installed")
    assert line.ok and "not installed" in line.detail      # no fault: it may be left out on purpose


@pytest.mark.parametrize(("version", "wanted", "fits"), [
    ("2.4.0", ">=2.5,<3", False), ("2.5.0", ">=2.5,<3", True), ("3.0.0", ">=2.5,<3", False),
    ("2.9.1+cu128", ">=2.5,<3", True), ("2.6.0rc1", ">=2.5,<3", True),
    ("not-a-version", ">=2.5", False)])
def test_a_library_of_the_wrong_version_is_not_even_imported(library, version, wanted, fits):
    name = library(GOOD, version)
    kernel(name, version=wanted)
    x = rows()
    torch.testing.assert_close(lz.rms_norm(x), x * 0 + 7 if fits else normalized(x))
    assert (name in sys.modules) == fits
    if not fits:
        (reason,) = why()
        assert (reason.code is Code.VERSION_CONFLICT and version in reason.message
                and wanted in reason.message)
        line = next(c for c in lz.doctor().checks if c.name == f"library {name}")
        assert not line.ok and version in line.detail


def test_a_library_without_metadata_is_taken_as_it_is(library):
    kernel(library(GOOD), version=">=2.5")
    assert float(lz.rms_norm(rows()).mean()) == 7


def test_a_kernel_for_another_torch(library):
    kernel(library(GOOD), torch="<2.0")
    assert ([r.code for r in why()] == [Code.VERSION_CONFLICT]
            and torch.__version__ in why()[0].message)


@pytest.mark.parametrize("init", ["raise RuntimeError('needs a GPU')", "raise SystemExit(1)",
                                  "import os; os.exit(1)",
                                  "raise OSError('libcuda.so.1: cannot open shared object file')"])
def test_to_look_for_a_part_of_a_library_does_not_import_the_library(library, init):
    name = library(init, cute=GOOD)
    kernel(f"{name}.cute")
    assert loading.is_importable(f"{name}.cute") and name not in sys.modules
    assert (not loading.is_importable(f"{name}.absent")
            and not loading.is_importable(f"{name}.cute.deeper"))
    x = rows()
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    assert why()[0].code in (Code.IMPORT_FAILED, Code.ABI_MISMATCH)


def test_a_part_of_a_good_library_loads(library):
    name = library("", cute=GOOD)
    kernel(f"{name}.cute")
    assert float(lz.rms_norm(rows()).mean()) == 7


# in a process of its own

@pytest.mark.parametrize(("code", "want", "words"), [
    ("import os; os.abort()", Code.ABI_MISMATCH, "signal 6"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Code.ABI_MISMATCH, "signal 11"),
    ("raise ImportError('x.so: undefined symbol: y')", Code.ABI_MISMATCH, "undefined symbol"),
    ("raise ValueError('no')", Code.IMPORT_FAILED, "ValueError: no"),
    ("raise SystemExit(3)", Code.IMPORT_FAILED, "exit status 3"),
    ("import time; time.sleep(60)", Code.IMPORT_FAILED, "within 1 s")])
def test_a_library_that_kills_its_process_is_a_reason(library, code, want, words):
    name = library(code)
    reason = loading.import_in_subprocess(name, timeout=1.0 if "sleep" in code else 60.0)
    assert reason is not None and reason.code is want and words in reason.message
    assert name not in sys.modules


def test_a_good_library_gives_no_reason_and_one_only_this_process_can_see_is_found_too(library,
                                                                                       monkeypatch):
    name = library(GOOD)
    assert loading.import_in_subprocess(name) is None
    # left: sys.path, as a program may change it
    monkeypatch.delenv("PYTHONPATH")
    assert loading.import_in_subprocess(name) is None


def test_the_doctor_looks_deeper_when_asked(library):
    name = library("import os; os.abort()")
    kernel(name)

    def line(**how):
        return next(c for c in lz.doctor(**how).checks if c.name == f"library {name}")

    assert line().ok
    deeper = line(deep=True)
    assert not deeper.ok and "signal 6" in deeper.detail


# plugins

class _Entry:
    """What importlib.metadata gives for an entry point, with `load` to say what it does."""

    dist = None

    def __init__(self, name, load):
        self.name, self.load = name, load


def _broken():
    raise ImportError("no module named 'company_kernels'")


def _company_kernel():
    return lz.Kernel("company.rms_norm", RMS_NORM, lambda: RMS_NORM.reference)


@pytest.mark.parametrize(("load", "words"), [
    (_broken, "company_kernels"), (lambda: 3, "without OP or KERNELS"),
    (lambda: ["text"], "offers a str"),
    (lambda: lz.Kernel("torch.rms_norm", RMS_NORM, lambda: None), "already registered")],
    ids=["import", "nothing", "text", "twice"])
def test_a_plugin_that_does_not_fit_is_refused_by_name_and_the_others_load(monkeypatch, load,
                                                                           words):
    entry_points = {"layerzero.ops": [],
                    "layerzero.backends": [_Entry("bad", load), _Entry("good", _company_kernel)]}
    monkeypatch.setattr(catalog.importlib.metadata, "entry_points",
                        lambda group: entry_points[group])
    kernels, problems = catalog.discover()
    assert "company.rms_norm" in kernels.by_id and "torch.rms_norm" in kernels.by_id
    (problem,) = problems
    assert problem.kernel == "bad" and words in problem.reason.message
