"""Compiles our CUDA C++ with NVRTC on first use, caches it on disk, and launches it through the
driver.

NVRTC comes with every torch that is built for CUDA, so neither nvcc nor the toolkit's headers are
needed. A launch is two reads of torch's state and one driver call: everything constant is prepared
once per thread. Launches during a recorded call are reported to spec/replay.py, so that the next
such call needs no Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...files.paths import cache_dir
from ...files.sealed import SealedFolder
from ...spec import replay
from ...spec.errors import ConfigError, DataError, warn_caller
from ...spec.reason import Code, Reason
from ...spec.replay import Varying
from ...spec.rules.launch import LaunchLimits, LaunchRefused, block_problems, grid_problems

_log = logging.getLogger("layerzero")
FOLDER = Path(__file__).parent
# lambdas are device code too
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
MAJORS = ("13", "12")                          # of CUDA, if torch does not say which
Macros = tuple[tuple[str, int], ...]

# Constants of the driver API (cuda.h).
INVALID_VALUE = 1
MAX_DYNAMIC_SHARED, ANY_CLUSTER_SIZE = 8, 14   # function attributes
CLUSTER_DIMENSION = 4                          # launch attribute
DEVICE_ORDINAL = 9                             # pointer attribute
SHARED_OPT_IN = 97                             # device attribute
RELAXED = 2                                    # capture mode
PORTABLE_CLUSTER = 8


# NVRTC

@lru_cache(maxsize=None)
def nvrtc_path() -> str:
    """Returns the path or name of the library that torch would use; "" if there is none."""
    majors = (torch.version.cuda.partition(".")[0],) if torch.version.cuda else MAJORS
    wheels = importlib.util.find_spec("nvidia")
    homes = ([home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
             or ["/usr/local/cuda"])
    folders = [Path(torch.__file__).parent / "lib",
               *(lib for base in (wheels and wheels.submodule_search_locations) or ()
                 for lib in sorted(Path(base).glob("*/lib"))),
               *(Path(home) / lib for home in homes for lib in ("lib64", "lib"))]
    names = [f"libnvrtc.so.{major}" for major in majors]
    for path in (folder / name for name in names for folder in folders):
        if path.exists():
            return str(path)
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return ""


def ready() -> bool | Reason:
    """Returns whether kernels can be compiled here, without loading anything."""
    return (bool(nvrtc_path())
            or Reason(Code.NOT_INSTALLED, "nvidia-cuda-nvrtc (the library NVRTC, libnvrtc)"))


@lru_cache(maxsize=None)
def nvrtc() -> tuple[Any, str]:
    """Returns (the library, its version); raises ImportError with a remedy if there is none."""
    path = nvrtc_path()
    if not path:
        raise ImportError(
            "LayerZero's CUDA kernels are compiled by NVRTC, and libnvrtc was not found; install "
            "the package nvidia-cuda-nvrtc, or set CUDA_HOME to where CUDA is")
    try:
        if os.path.isabs(path):                # NVRTC opens it by name, so it must be loaded before
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(path)
    except OSError as e:
        raise ImportError(
            f"NVRTC does not load ({e}); install the nvidia-cuda-nvrtc that belongs to this torch "
            f"(CUDA {torch.version.cuda})") from e
    library.nvrtcGetErrorString.restype = c_char_p
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    return library, f"{major.value}.{minor.value}"


# Compiling

_compiling = threading.Lock()


def architecture(sm: int) -> str:
    """Returns the target; since Hopper with "a" for architecture-specific instructions."""
    return f"sm_{sm}a" if sm >= 90 else f"sm_{sm}"


def header_folders(source: Path) -> tuple[Path, ...]:
    """Returns where a file may include headers from: this folder, and those down to its own."""
    folders = (source.parent,) if source.is_absolute() else source.parents[-2::-1]
    return (FOLDER, *(FOLDER / folder for folder in folders))


def cubin(source: str, macros: Macros, arch: str) -> bytes:
    """Returns the machine code of a file of this folder, from disk if it was compiled before."""
    path = FOLDER / source
    text = path.read_bytes()
    headers = {p.name: p.read_bytes() for folder in header_folders(Path(source))
               for p in sorted(folder.glob("*.h"))}
    options = (f"--gpu-architecture={arch}", *OPTIONS,
               *(f"-D{name}={value}" for name, value in macros))
    _, version = nvrtc()
    digest = hashlib.sha256("\0".join((version, *options)).encode())
    for part in (text, *headers.values()):
        digest.update(hashlib.sha256(part).digest())
    store = SealedFolder(cache_dir(), "cuda")
    name = f"{Path(source).stem}-{arch}-{digest.hexdigest()[:32]}.cubin"
    with _compiling:                           # waiting threads find it on disk
        image = _read_cached(store, name)
        if image is None:
            image = _compile(Path(source).name, text, headers, options)
            _write_cache(store, name, image)
    return image


def _read_cached(store: SealedFolder, name: str) -> bytes | None:
    """Returns the cached machine code; None if it is missing or its seal is broken."""
    try:
        return store.read(name)
    except DataError as e:
        _log.warning("%s; it is compiled again", e)
    except OSError:
        pass
    return None


def _write_cache(store: SealedFolder, name: str, image: bytes) -> None:
    try:
        store.write(image, name)
    except (OSError, DataError) as e:
        warn_caller(
            f"cannot keep {store.path(name)}: {e.strerror if isinstance(e, OSError) else e}. The "
            "kernel works and will be compiled again in the next process; set LAYERZERO_CACHE_DIR "
            "to a folder that can be written", RuntimeWarning)


def _compile(name: str, text: bytes, headers: Mapping[str, bytes],
             options: tuple[str, ...]) -> bytes:
    library, version = nvrtc()
    program, size = c_void_p(), c_size_t()
    header_count = len(headers)
    _check(library, library.nvrtcCreateProgram(
        byref(program), text, name.encode(), header_count,
        (c_char_p * header_count)(*headers.values()),
        (c_char_p * header_count)(*map(str.encode, headers))), name)
    try:
        option_array = (c_char_p * len(options))(*map(str.encode, options))
        if library.nvrtcCompileProgram(program, len(options), option_array):
            library.nvrtcGetProgramLogSize(program, byref(size))
            log = (c_char * size.value)()
            library.nvrtcGetProgramLog(program, log)
            raise ConfigError(_compile_error(name, version, options,
                                             log.value.decode(errors="replace")))
        _check(library, library.nvrtcGetCUBINSize(program, byref(size)), name)
        image = (c_char * size.value)()
        _check(library, library.nvrtcGetCUBIN(program, image), name)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _compile_error(name: str, version: str, options: tuple[str, ...], log: str) -> str:
    """Returns the error message; a plan shows only its first line, which has the first error."""
    lines = [line.strip() for line in log.strip().splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line), lines[0] if lines
                 else "no word of why")
    return (
        f"{name} did not compile with NVRTC {version}: {first}\n  options: {' '.join(options)}\n  "
        + "\n  ".join(lines[:40])
        + "\nLayerZero works without this kernel. If the architecture is what is refused, install "
        "a torch with a newer CUDA; else report this text")


def _check(library: Any, code: int, name: str) -> None:
    if code:
        raise ConfigError(
            f"NVRTC did not take {name}: {library.nvrtcGetErrorString(code).decode()}; install the "
            f"nvidia-cuda-nvrtc that belongs to this torch (CUDA {torch.version.cuda})")


# The driver

class Attribute(Structure):
    """CUlaunchAttribute of a cluster; its value is a union of 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_char * 4), ("cluster", c_uint * 3), ("rest", c_char * 52))


class LaunchConfig(Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid_x", c_uint), ("grid_y", c_uint), ("grid_z", c_uint), ("block_x", c_uint),
                ("block_y", c_uint), ("block_z", c_uint), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", POINTER(Attribute)), ("attribute_count", c_uint))


@lru_cache(maxsize=None)
def driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise ImportError(
            "LayerZero's CUDA kernels are launched through NVIDIA's driver, which does not load "
            f"({e}); install it") from e
    library.cuModuleLoadData.argtypes = (POINTER(c_void_p), c_char_p)
    library.cuModuleGetFunction.argtypes = (POINTER(c_void_p), c_void_p, c_char_p)
    library.cuFuncSetAttribute.argtypes = (c_void_p, c_int, c_int)
    library.cuPointerGetAttribute.argtypes = (c_void_p, c_int, c_void_p)
    library.cuCtxSetCurrent.argtypes = (c_void_p,)
    return library


def failure(code: int, action: str) -> RuntimeError:
    """Returns an error in torch's format, which distinguishes a lost device from out of memory."""
    name, text = c_char_p(), c_char_p()
    driver().cuGetErrorName(code, byref(name))
    driver().cuGetErrorString(code, byref(text))
    return RuntimeError(describe_error(code, name.value, text.value, action))


def describe_error(code: int, name: bytes | None, text: bytes | None, action: str) -> str:
    return (f"CUDA error: {(text or b'unknown').decode()} "
            f"({(name or str(code).encode()).decode()}) {action}")


@contextmanager
def outside_captures() -> Iterator[None]:
    """Keeps driver calls in the block out of graph captures of this or another thread."""
    mode = c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(byref(mode))
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(byref(mode))


def ensure_context(device: int) -> None:
    """Makes torch's context current in a thread that has not called CUDA yet."""
    context = c_void_p()
    if not driver().cuCtxGetCurrent(byref(context)) and context.value:
        return
    handle = c_int()
    code = (driver().cuDeviceGet(byref(handle), device)
            or driver().cuDevicePrimaryCtxRetain(byref(context), handle))
    code = code or driver().cuCtxSetCurrent(context)
    if code:
        raise failure(code, f"entering the context of cuda:{device}")


@lru_cache(maxsize=None)
def limits_of(device: int) -> LaunchLimits:
    handle, shared = c_int(), c_int()
    code = driver().cuDeviceGet(byref(handle), device) or driver().cuDeviceGetAttribute(
        byref(shared), SHARED_OPT_IN, handle)
    if code:
        raise failure(code, f"asking cuda:{device} for its shared memory")
    return LaunchLimits(shared=shared.value)


class Machine(NamedTuple):
    """The device properties that configurations depend on. The emulator has the memory of a
    Hopper, and its instructions."""

    processors: int = 8
    shared: int = 227 << 10                    # bytes per block
    sm: int = 90                               # ten times the compute capability


@lru_cache(maxsize=None)
def machine_of(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine()
    index = torch.cuda.current_device() if device.index is None else device.index
    facts = torch.cuda.get_device_properties(index)
    return Machine(facts.multi_processor_count, limits_of(index).shared,
                   10 * facts.major + facts.minor)


def device_of(params: bytes, device: int) -> int:
    """Returns the device of the first pointer; `device` if it is unknown."""
    ensure_context(device)
    ordinal = c_int(device)
    pointer = int.from_bytes(params[:8], "little")
    return (device if driver().cuPointerGetAttribute(byref(ordinal), DEVICE_ORDINAL, pointer)
            else ordinal.value)


_device_count = lru_cache(maxsize=None)(torch.cuda.device_count)


# Launching

class _Slot:
    """The arguments of a driver launch, one per thread: others may launch the kernel meanwhile."""

    __slots__ = ("attribute", "call", "config", "function", "params", "place")

    def __init__(self, function: c_void_p, threads: int, shared: int, cluster: int) -> None:
        self.call, self.function = driver().cuLaunchKernelEx, function
        self.params = (c_char_p * 1)()
        self.attribute = Attribute(id=CLUSTER_DIMENSION, cluster=(cluster, 1, 1))
        self.config = LaunchConfig(block_x=threads, block_y=1, block_z=1, shared=shared)
        if cluster > 1:
            self.config.attributes, self.config.attribute_count = ctypes.pointer(self.attribute), 1
        self.place = byref(self.config)


class CompiledCuda:
    """One kernel, compiled and loaded on each device on its first launch there."""

    def __init__(self, source: str, name: str, macros: Macros, threads: int, shared: int,
                 cluster: int) -> None:
        self.source, self.name, self.macros = source, name, macros
        self.threads, self.shared, self.cluster = threads, shared, cluster
        self._functions: dict[int, c_void_p] = {}
        self._loading = threading.Lock()
        self._thread_local = threading.local()

    def launch(self, grid: tuple[int, int, int], layout: Struct, *values: Any,
               varying: tuple[Varying, ...] = ()) -> None:
        """Launches on torch's current stream. `values`: of the kernel's struct `layout`, which
        begins with a pointer; a tensor or None for a pointer. `varying`: which of them may differ
        in a replay."""
        params = layout.pack(*[0 if v is None else v.data_ptr() if isinstance(v, Tensor) else v
                               for v in values])
        device = self.start(grid, params)
        watcher = replay.watcher()
        if watcher is not None:
            address, function = self.handle(device)
            pointers = tuple((i, v) for i, v in enumerate(values) if isinstance(v, Tensor))
            watcher.launched(replay.Launch(address, function, grid, self.threads, self.shared,
                                           self.cluster, params, (0,),
                                           replay.fields_of(layout.format), pointers, varying,
                                           self._launch_error, keep_alive=self))

    def start(self, grid: tuple[int, int, int], params: bytes) -> int:
        """Launches and returns the device."""
        device = torch.cuda.current_device()
        if _device_count() > 1 and (tensor_device := device_of(params, device)) != device:
            with torch.cuda.device(tensor_device):
                self._launch(tensor_device, grid, params)
            return tensor_device
        self._launch(device, grid, params)
        return device

    def handle(self, device: int) -> tuple[int, int]:
        """Returns the addresses of the driver's launch and of the function, once it is loaded."""
        call = ctypes.cast(driver().cuLaunchKernelEx, c_void_p)
        return call.value or 0, self._functions[device].value or 0

    def resident_blocks(self, device: int) -> int:
        """Returns how many blocks a multiprocessor has room for at the same time."""
        self._slot(device)
        blocks = c_int()
        code = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            byref(blocks), self._functions[device], self.threads, c_size_t(self.shared))
        if code:
            raise failure(code, f"asking how many blocks of {self.source}:{self.name} fit")
        return blocks.value

    def _launch(self, device: int, grid: tuple[int, int, int], params: bytes) -> None:
        try:
            slot = self._thread_local.slots[device]
        except (AttributeError, KeyError):
            slot = self._slot(device)
        config = slot.config
        config.grid_x, config.grid_y, config.grid_z = grid
        config.stream = torch._C._cuda_getCurrentRawStream(device)
        slot.params[0] = params                # the driver copies them before it returns
        code = slot.call(slot.place, slot.function, slot.params, None)
        if code:
            raise self._launch_error(code, device, grid)

    def _launch_error(self, code: int, device: int, grid: tuple[int, int, int]) -> Exception:
        reasons = grid_problems(grid, limits_of(device)) if code == INVALID_VALUE else ()
        if reasons:
            return LaunchRefused.of(f"{self.source}:{self.name}", reasons)
        return failure(code,
                       f"launching {self.source}:{self.name}, grid {grid}, {self.threads} threads, "
                       f"{self.shared} bytes of shared memory, clusters of {self.cluster}")

    def resident_clusters(self) -> int:
        """Returns how many clusters the current device runs at once. Parts of a device have
        unequal numbers of multiprocessors, so it is fewer than these would make together."""
        slot, found = self._slot(torch.cuda.current_device()), c_int()
        slot.config.grid_x, slot.config.grid_y, slot.config.grid_z = self.cluster, 1, 1
        code = driver().cuOccupancyMaxActiveClusters(byref(found), slot.function, slot.place)
        if code:
            raise failure(code, f"asking how many clusters of {self.source}:{self.name} fit")
        return max(1, found.value)

    def _slot(self, device: int) -> _Slot:
        ensure_context(device)
        with self._loading:
            function = self._functions.get(device)
            if function is None:
                function = self._functions[device] = self._load(device)
        slots = self._thread_local.__dict__.setdefault("slots", {})
        slot: _Slot = slots.setdefault(device,
                                       _Slot(function, self.threads, self.shared, self.cluster))
        return slot

    def _load(self, device: int) -> c_void_p:
        major, minor = torch.cuda.get_device_capability(device)
        reasons = block_problems(-(-self.threads // 32), self.shared, limits_of(device))
        if self.cluster > 1 and major < 9:
            reasons += (Reason(Code.SM_TOO_OLD, ">= 90", 10 * major + minor, "sm"),)
        if reasons:
            raise LaunchRefused.of(f"{self.source}:{self.name}", reasons)
        image = cubin(self.source, self.macros, architecture(10 * major + minor))
        module, function = c_void_p(), c_void_p()
        with outside_captures():
            code = (driver().cuModuleLoadData(byref(module), image)
                    or driver().cuModuleGetFunction(byref(function), module, self.name.encode())
                    # For any size: it makes the driver load the code now, not at a launch.
                    or driver().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, self.shared)
                    or (self.cluster > PORTABLE_CLUSTER
                        and driver().cuFuncSetAttribute(function, ANY_CLUSTER_SIZE, 1)))
        if code:
            raise failure(code, f"loading {self.source}:{self.name} on cuda:{device}")
        if "wait_for_previous()" in (FOLDER / self.source).read_text():
            replay.waiting.add(function.value or 0)
        return function


@lru_cache(maxsize=None)
def kernel(source: str, name: str, macros: Macros, threads: int, shared: int = 0,
           cluster: int = 1) -> CompiledCuda:
    """Returns the kernel `name` of `source` with these macros, for blocks of `threads` threads and
    `shared` bytes of shared memory, in clusters of `cluster` blocks along x."""
    return CompiledCuda(source, name, macros, threads, shared, cluster)
