"""Compiling CUDA C++ with NVRTC, which needs no GPU; what a launch hands to the driver; what is
said of a failure.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from pathlib import Path

import pytest
import torch

from layerzero.backends.cuda import KERNELS, compiler
from layerzero.files.sealed import SealedFolder
from layerzero.machine import faults, loading
from layerzero.spec.errors import ConfigError
from layerzero.spec.reason import Code, Reason
from layerzero.verify.kernel.contract import case_values

needs_nvrtc = pytest.mark.skipif(compiler.ready() is not True,
                                 reason=f"{compiler.ready()} (or set CUDA_HOME)")
ARCH = "sm_90a"
SOURCE = """
#include "device.h"
struct Params { const u16* x; float* out; i64 n; float scale; };
KERNEL(scaled, Params, THREADS)
{
    const i64 i = i64(block_x()) * THREADS + thread();
    if (i < p.n) p.out[i] = to_float<BF16>(p.x[i]) * p.scale;
}
"""
MACROS = (("THREADS", 128), ("BF16", 1))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "scaled.cu"
    path.write_text(SOURCE)
    return str(path)


# compiling

@needs_nvrtc
def test_a_kernel_is_compiled_with_our_header_and_its_name_is_plain(cache, source):
    cubin = compiler.cubin(source, MACROS, ARCH)
    assert cubin.startswith(b"\x7fELF") and b"scaled" in cubin


@needs_nvrtc
def test_what_was_compiled_is_read_from_disk(cache, source):
    cubin = compiler.cubin(source, MACROS, ARCH)
    [file] = cache.glob("*.cubin")
    assert file.read_bytes() == cubin and file.name.startswith(f"scaled-{ARCH}-")
    marked = b"\x7fELF, as another process left it"
    SealedFolder(cache.parent, cache.name).write(marked, file.name)
    assert compiler.cubin(source, MACROS, ARCH) == marked
    file.write_bytes(b"\x7fELF, as nobody sealed it")
    assert compiler.cubin(source, MACROS, ARCH) == cubin, "compiled again"


@needs_nvrtc
def test_what_else_goes_in_is_compiled_anew(cache, source, monkeypatch, tmp_path):
    compiler.cubin(source, MACROS, ARCH)
    compiler.cubin(source, (("THREADS", 256), ("BF16", 1)), ARCH)
    compiler.cubin(source, MACROS, "sm_80")
    assert len(list(cache.glob("*.cubin"))) == 3
    Path(source).write_text(SOURCE.replace("p.scale", "2.0f"))
    compiler.cubin(source, MACROS, ARCH)
    assert len(list(cache.glob("*.cubin"))) == 4
    (tmp_path / "device.h").write_text((compiler.FOLDER / "device.h").read_text() + "// changed\n")
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    compiler.cubin(source, MACROS, ARCH)
    assert len(list(cache.glob("*.cubin"))) == 5


@needs_nvrtc
def test_a_damaged_file_is_replaced(cache, source):
    cubin = compiler.cubin(source, MACROS, ARCH)
    [file] = cache.glob("*.cubin")
    file.write_bytes(b"")
    assert compiler.cubin(source, MACROS, ARCH) == cubin == file.read_bytes()


@needs_nvrtc
def test_threads_that_want_the_same_compile_it_once(cache, source, monkeypatch):
    compilations, compile_ = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *args: compilations.append(args)
                        or compile_(*args))
    made: list[bytes] = []
    threads = [threading.Thread(target=lambda: made.append(compiler.cubin(source, MACROS, ARCH)))
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1 and len(made) == 4 and len(set(made)) == 1


@needs_nvrtc
def test_an_error_says_where_it_is(cache, source):
    with pytest.raises(ConfigError) as caught:
        compiler.cubin(source, (("THREADS", 128),), ARCH)
    first, *rest = str(caught.value).splitlines()
    assert "scaled.cu(7): error" in first and "BF16" in first and "NVRTC" in first
    assert any("-DTHREADS=128" in line for line in rest)
    assert not list(cache.glob("*"))


@needs_nvrtc
def test_an_unknown_architecture_says_what_to_do(cache, source):
    with pytest.raises(ConfigError,
                       match=r"(?s)gpu-architecture.*install a torch with a newer CUDA"):
        compiler.cubin(source, MACROS, "sm_999")


@needs_nvrtc
def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="LAYERZERO_CACHE_DIR"):
        assert compiler.cubin(source, MACROS, ARCH).startswith(b"\x7fELF")


@pytest.mark.parametrize(("sm", "want"), [(80, "sm_80"), (89, "sm_89"), (90, "sm_90a"),
                                          (100, "sm_100a"),
                                          (120, "sm_120a")])
def test_architectures(sm, want):
    assert compiler.architecture(sm) == want


# our kernels, as they are declared, and as their launchers ask for them

@pytest.mark.parametrize(("head_dim", "most"), [(64, 32), (128, 32), (256, 16)])
def test_decoding_takes_as_many_rows_as_fit_its_tiles(head_dim, most):
    rules = [rule for rule in KERNELS[0].requires if {leaf.fact for leaf in rule.leaves()} <= {
        "head_dim", "group", "seq_q"}]
    for group in range(1, 40):
        for seq_q in range(1, 40):
            facts = {"head_dim": head_dim, "group": group, "seq_q": seq_q}
            assert all(rule.check(facts) is None
                       for rule in rules) == (group * seq_q <= most), facts


CALLS: dict[str, tuple[dict[str, object], ...]] = {
    "cuda.attention_decode": (
        {"b": 1, "hq": 8, "hkv": 2, "sq": 1, "sk": 200, "d": 128},
        {"b": 1, "hq": 8, "hkv": 1, "sq": 4, "sk": 200, "d": 64, "causal": True,
         "align": "bottom_right",
         "window": (50, -1), "lse": True}),
    "cuda.paged_attention_decode": ({"context": (70, 9), "d": 64},
                                    {"lengths_q": (3, 1, 5), "d": 128}),
    "cuda.linear_rows": ({"k": 1024, "rows": (8,)}, {"k": 4096, "rows": (16,), "n": 520}),
    "cuda.quantized_linear": (
        {"format": "int4", "group": 32, "k": 256, "rows": (1,)},
        {"format": "int8", "k": 256, "rows": (7,), "symmetric": False},
        {"format": "fp8_e4m3", "k": 256, "rows": (16,), "group": 128}),
    "cuda.rms_norm": ({"hidden": 256},), "cuda.add_rms_norm": ({"hidden": 256},),
    "cuda.sample": ({"top_p": 0.9, "vocab": 9001}, {"probs": True, "rows": True}),
}


class OnlyCompiled:
    """In place of what compiler.kernel gives: a launch compiles and runs nothing."""

    def __init__(self, source, name, macros, threads, shared=0, cluster=1):
        self.source, self.name, self.macros = source, name, macros
        assert threads <= 1024 and shared <= 227 << 10 and cluster <= 16

    def resident_clusters(self):
        return 1

    def launch(self, grid, params, *args, varying=(), **kept):
        assert all(type(n) is int and n > 0 for n in grid) and args
        assert self.name.encode() in compiler.cubin(self.source, self.macros, ARCH)


@needs_nvrtc
@pytest.mark.parametrize(("kernel", "case"),
                         [(k, case) for k in KERNELS for case in CALLS.get(k.id, ())],
                         ids=lambda v: getattr(v, "id", None))
def test_nvrtc_takes_our_kernels(kernel, case, monkeypatch):
    monkeypatch.setattr(compiler, "kernel", OnlyCompiled)
    run = kernel.load()
    remembered = [f for m in list(sys.modules.values())
                  if getattr(m, "__name__", "").startswith(KERNELS[0].package)
                  for f in vars(m).values() if hasattr(f, "cache_clear")
                  and f.__module__ != compiler.__name__]
    values = case_values(kernel.op, case, "bfloat16")
    taken = inspect.signature(run).parameters
    try:
        for f in remembered:
            f.cache_clear()
        run(**{name: value for name, value in values.items() if name in taken})
    finally:
        for f in remembered:
            f.cache_clear()


# finding NVRTC

def test_without_nvrtc_all_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: "")
    problem = compiler.ready()
    assert (isinstance(problem, Reason) and problem.code is Code.NOT_INSTALLED
            and "nvidia-cuda-nvrtc" in problem.message)
    assert [loading.availability(kernel) for kernel in KERNELS] == [problem] * len(KERNELS)
    compiler.nvrtc.cache_clear()
    with pytest.raises(ImportError, match=r"nvidia-cuda-nvrtc.*CUDA_HOME"):
        compiler.nvrtc()


def test_what_is_no_library_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "libnvrtc.so.13").write_text("no library")
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: str(tmp_path / "libnvrtc.so.13"))
    compiler.nvrtc.cache_clear()
    with pytest.raises(ImportError, match=r"does not load.*install"):
        compiler.nvrtc()


@pytest.mark.parametrize("inside", ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "home/lib64",
                                    "home/lib"])
def test_nvrtc_is_found_in_the_wheel_and_in_cuda_home(inside, monkeypatch, tmp_path):
    """The wheel goes first: it is the one that torch was installed with."""
    name = f"libnvrtc.so.{(torch.version.cuda or '13').partition('.')[0]}"
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / "home/lib").mkdir(parents=True, exist_ok=True)
    (tmp_path / "home/lib" / name).touch()
    (tmp_path / inside / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    importlib.invalidate_caches()
    assert compiler.nvrtc_path.__wrapped__() == str(tmp_path / inside / name)


# what a launch hands to the driver

def test_structures_lie_in_memory_as_in_cuda_h():
    launch, attribute = compiler.LaunchConfig, compiler.Attribute
    assert compiler.ctypes.sizeof(launch) == 56 and compiler.ctypes.sizeof(attribute) == 72
    assert [getattr(launch, name).offset for name, *_ in launch._fields_] == [0, 4, 8, 12, 16, 20,
                                                                              24, 32, 40, 48]
    assert (attribute.id.offset, attribute.cluster.offset) == (0, 8)


@pytest.mark.parametrize(("code", "name", "text", "kind"), [
    (2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory", "memory"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered", "sticky"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address", "sticky"),
    (719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure", "sticky"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch",
     "kernel"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing", "capture"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture", "lost"),
])
def test_an_error_of_the_driver_is_understood(code, name, text, kind):
    message = compiler.describe_error(code, name.encode(), text.encode(),
                                      "launching scaled.cu:scaled")
    assert text in message and name in message and "scaled.cu:scaled" in message
    assert faults.classify(RuntimeError(message)) == kind


def test_an_error_without_a_text_keeps_its_number():
    assert "4711" in compiler.describe_error(4711, None, None, "launching scaled.cu:scaled")


def test_equal_kernels_are_one():
    made = compiler.kernel("scaled.cu", "scaled", MACROS, 128)
    assert compiler.kernel("scaled.cu", "scaled", MACROS, 128) is made
    assert compiler.kernel("scaled.cu", "scaled", MACROS, 256) is not made
