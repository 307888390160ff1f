"""Kernels of Triton given to the driver without Triton: a driver of a few lines of C, a compiled
kernel that is none.

What is compiled is a C function with the parameters of a Triton kernel: pointers, numbers, and two
scratch pointers.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import RMS_NORM, python
from torch import Tensor

import layerzero as lz
from layerzero.backends.triton import bare
from layerzero.dispatch import dispatcher as dispatch
from layerzero.dispatch import native
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec import replay
from layerzero.spec.kernel import Kernel
from layerzero.spec.replay import Varying, expand_format, fields_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
DRIVER = r"""
#include <cstddef>
#include <cstdint>
#include <cstring>
struct Config { uint32_t grid[3], block[3], shared; void* stream; void* attributes; uint32_t count; };
struct Function { uint64_t sizes[16]; uint64_t count; void (*run)(void**, uint64_t); };
extern "C" {
Config last; int fails = 0;
int cuFuncGetParamInfo(Function* f, size_t i, size_t* offset, size_t* size) {
    if (i >= f->count) return 1;
    *size = f->sizes[i];
    return 0;
}
int cuGetErrorString(int code, const char** text) { *text = "out of cheese"; return 0; }
int cuLaunchKernelEx(const Config* config, Function* f, void** params, void** extra) {
    if (fails) return fails;
    last = *config;
    f->run(params, f->count);
    return 0;
}
// out[i] = x[i] * scale + add, of n numbers; scratch must be null
static void affine(void** p, uint64_t count) {
    const float* x; float* out; float scale; int32_t n; int64_t add; void* scratch;
    memcpy(&x, p[0], 8); memcpy(&out, p[1], 8); memcpy(&n, p[2], 4); memcpy(&scale, p[3], 4); memcpy(&add, p[4], 8);
    for (uint64_t i = 5; i < count; ++i) { memcpy(&scratch, p[i], 8); if (scratch) n = 0; }
    for (int i = 0; i < n; ++i) out[i] = x[i] * scale + (float)add;
}
Function function = {{8, 8, 4, 4, 8, 8, 8}, 7, affine};
}
"""
SIGNATURE = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "one": "constexpr", "scale": "fp32",
             "add": "i64",
             "BLOCK": "constexpr"}
HOOKS: list[Any] = []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("driver") / "driver.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)],
                   check=True,
                   input=DRIVER.encode())
    return ctypes.CDLL(str(path))


@pytest.fixture
def driver(library: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bare, "driver", lambda: library)
    ctypes.c_int.in_dll(library, "fails").value = 0
    HOOKS.clear()
    return library


def compiled(library: Any, **metadata: Any) -> Any:
    """As Triton's CompiledKernel."""
    function = ctypes.addressof(ctypes.c_char.in_dll(library, "function"))
    return SimpleNamespace(function=function, src=SimpleNamespace(signature=SIGNATURE),
                           metadata=SimpleNamespace(**{"num_warps": 4, "shared": 96, "num_ctas": 1,
                                                       **metadata}))


FN = SimpleNamespace(params=[SimpleNamespace(name=name, do_not_specialize=name == "n")
                             for name in SIGNATURE])


def bare_launch(library: Any, x: Tensor, out: Tensor, scale: float = 2.0,
                varying: tuple[Varying, ...] = (),
                **metadata: Any) -> replay.Launch | str:
    args = (x, out, x.numel(), 1, scale, x.stride(0))
    return bare.launch(FN, compiled(library, **metadata), (1, 1, 1), args, varying, (HOOKS,))


def test_parameters_are_what_the_driver_says(driver: Any) -> None:
    x = torch.randn(8)
    launch = bare_launch(driver, x, torch.empty(8))
    assert isinstance(launch, replay.Launch)
    assert (launch.offsets == (0, 8, 16, 20, 24, 32, 40) and launch.threads == 128
            and launch.shared == 96)
    assert [field for field, _ in launch.pointers] == [0, 1]


@pytest.mark.parametrize("metadata",
                         [{"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True},
                                      {"global_scratch_size": 64}, {"profile_scratch_size": 1}])
def test_what_is_launched_in_another_way_stays_triton_s(driver: Any,
                                                        metadata: dict[str, Any]) -> None:
    assert "launched with" in str(bare_launch(driver, torch.randn(4), torch.empty(4), **metadata))


def test_other_parameters_than_the_signature_s_stay_triton_s(driver: Any) -> None:
    made, args = compiled(driver), (torch.randn(4), torch.empty(4), 4, 1, 2.0, 5)
    for sizes in ((8, 8, 4, 4, 8, 8, 8, 8), (8, 8, 4, 4), (8, 8, 8, 4, 8), ()):
        assert "are not those of the signature" in str(bare.describe(FN, made, (1, 1, 1), args, (),
                                                                     (), sizes))
    far = (*args[:2], 1 << 40, *args[3:])
    assert "do not fit" in str(bare.launch(FN, made, (1, 1, 1), far, (), ()))


def test_varying_numbers_keep_what_is_compiled_in(driver: Any) -> None:
    x = torch.randn(8)

    def kept(field: int, now: int, **more: Any) -> tuple[Varying, ...]:
        args = (x, torch.empty(8), now if field == 2 else 8, 1, 2.0, now if field == 5 else 5)
        launch = bare.launch(FN, compiled(driver), (1, 1, 1), args,
                             (Varying(x, "size", 0, field, **more),), ())
        assert isinstance(launch, replay.Launch)
        return launch.varying

    assert kept(2, 8) == (Varying(x, "size", 0, 2),)                           # not specialised
    # one parameter is compiled in
    assert kept(5, 32) == (Varying(x, "size", 0, 4, step=16),)
    # nowhere else the same kernel
    assert kept(5, 33) == () and kept(3, 1) == ()
    assert kept(2, 8, factor=4)[0].high == replay.MAX_INT32 // 4
    assert kept(-1, 0) == (Varying(x, "size", 0, -1),)


def test_fields_are_where_c_puts_them() -> None:
    assert expand_format("@2Pq3if") == ["P", "P", "q", "i", "i", "i", "f"]
    assert fields_of("@iPbq") == ((0, 4), (8, 8), (16, 1), (24, 8))


@pytest.fixture
def served(driver: Any, world: Any) -> Callable[..., Tensor]:
    """lz.rms_norm, served by the C function: of one row x * eps + its stride."""
    if native.module() is None and native.is_enabled():
        native.build_fast_path(False, print)
    if native.module() is None:
        pytest.skip(f"there is no native path here: {native.status().text}")
    if dispatcher_of("rms_norm").native is None:
        dispatch.dispatchers["rms_norm"] = dispatch.Dispatcher(dispatcher_of("rms_norm").op)

    def run(x: Tensor, eps: float = 1e-6) -> Tensor:
        out = torch.empty(x.shape)
        watcher = replay.watcher()
        if watcher is None:
            return out.copy_(x * eps + x.stride(0))
        launch = bare_launch(driver, x, out, eps, (Varying(x, "stride", 0, 5),))
        assert isinstance(launch, replay.Launch)
        watcher.launched(launch)               # and not computed: what is right below was replayed
        return out

    lz.register(Kernel("bare.affine", RMS_NORM, lambda: run, replayable=True))
    lz.lock("rms_norm", "bare.affine")
    return dispatcher_of("rms_norm").public


def test_a_launch_with_many_parameters_is_replayed(served: Callable[..., Tensor],
                                                   driver: Any) -> None:
    served(torch.randn(1, 64)[:, :8], eps=2.0)
    # the stride varies, as long as it is a multiple of 16
    for width in (64, 64, 128, 48):
        x = torch.randn(1, width)[:, :8]
        assert torch.equal(served(x, eps=2.0), x * 2 + width), width
    config = (ctypes.c_uint32 * 7).in_dll(driver, "last")
    assert list(config) == [1, 1, 1, 128, 1, 1, 96]
    counts = dispatcher_of("rms_norm").native.compiled.lookup(x, eps=2.0).recordings.counts()      # type: ignore
    assert counts == (1, 4, 1)


def test_what_the_driver_refuses_is_said_as_triton_says_it(served: Callable[..., Tensor],
                                                           driver: Any) -> None:
    x = torch.randn(1, 8)
    served(x, eps=2.0)
    ctypes.c_int.in_dll(driver, "fails").value = 700
    with pytest.raises(lz.errors.KernelExecutionError,
                       match=r"Triton Error \[CUDA\]: out of cheese"):
        served(x, eps=2.0)


def test_while_a_profiler_watches_python_launches(served: Callable[..., Tensor]) -> None:
    x = torch.randn(1, 8)
    served(x, eps=2.0)
    HOOKS.append(print)
    entry = dispatcher_of("rms_norm").native.compiled.lookup(x, eps=2.0)       # type: ignore[union-attr]
    served(x, eps=2.0)
    assert entry.recordings.counts()[1] == 0
    HOOKS.clear()
    assert torch.equal(served(x, eps=2.0), x * 2 + 8) and entry.recordings.counts()[1] == 1


def test_recording_does_not_import_dynamo() -> None:
    """Which takes seconds, and the first call of a signature is somebody's request."""
    output = python(
        "import sys, torch; from layerzero.dispatch.native.replays import LaunchRecorder\nr = "
        "LaunchRecorder(())\nwith r: torch.empty(3)\nprint(len(r.allocations), 'torch._dynamo' in "
        "sys.modules)"
    )
    assert output.split() == ["1", "False"]
