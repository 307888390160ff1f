"""What a kernel must leave as it was after each call: settings, random numbers, modes, environment;
and the memory that calls leave behind.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import locale
import logging
import os
import random
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch._compile

_DENORMAL, _HALF_ULP = 5e-324, 2.0 ** -53
_MT19937_BYTES = 625 * 4                       # its words and the position in them
MAX_NAMES, MAX_NAME = 3, 40                    # how many are printed, and how much of each

ENVIRONMENT = "the environment"
# What torch sets where nobody did: the first when torch._dynamo is imported, which the first call
# of any custom operator does, the others when Inductor compiles.
SET_BY_TORCH = frozenset({
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"})


class Setting(NamedTuple):
    """One part of the state: how it is read, and how it is put back where that is possible."""

    name: str
    get: Callable[[], Any]
    put_back: Callable[[Any], None] | None = None
    slow: bool = False                         # read before and after a case, not around each call
    once: bool = False                         # a first call may change it: only twice is a fault
    imports: bool = False                      # an import may change it, which its last part tells
    parts: tuple[str, ...] = ()                # names of what it holds, where that is a tuple

    def differences(self, before: Any, after: Any) -> list[str]:
        """Returns the names of what differs; the setting's own where it holds one thing."""
        if self.imports:                       # beside a GPU other threads load and compile
            return [self.name] if (before[:-1] != after[:-1] and before[-1] == after[-1]
                                   and not torch.cuda.is_initialized()) else []
        if isinstance(before, dict) and isinstance(after, dict):
            names = sorted(os.fsdecode(n) for n in before.keys() | after.keys()
                           if (n in before, before.get(n)) != (n in after, after.get(n)))
            unset = SET_BY_TORCH.difference(map(os.fsdecode, before))
            return [n for n in names if self.name != ENVIRONMENT or n not in unset]
        if self.parts and len(self.parts) == len(before) == len(after):
            return [n for n, a, b in zip(self.parts, before, after) if a != b]
        return [self.name]


class Changed(str):
    """A setting that has changed: equal to its name, printed with what differs in it."""

    differences: tuple[str, ...] = ()

    @classmethod
    def of(cls, setting: Setting, differences: Sequence[str]) -> Changed:
        changed = cls(setting.name)
        changed.differences = () if setting.name in differences else tuple(differences)
        return changed

    def __str__(self) -> str:
        shown = [n if len(n) <= MAX_NAME else f"{n[:MAX_NAME]}..." for n in self.differences]
        more = len(shown) - MAX_NAMES
        listed = ", ".join(shown[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"{super().__str__()} ({listed})" if shown else super().__str__()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _arithmetic() -> bytes:
    """Tells flushed denormals and another rounding mode by what this thread computes.

    As bytes: where denormals are flushed, comparisons flush them too.
    """
    one = float(len("1"))                      # no constant: the compiler must not fold it
    return struct.pack("3d", _DENORMAL * one, one + _HALF_ULP, -one - _HALF_ULP)


def _put_back_arithmetic(_: Any) -> None:
    torch.set_flush_denormal(False)


def _torch_random() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@lru_cache(maxsize=None)
def _numpy_generators() -> Any:
    try:                                       # now: a call that imports it has changed nothing
        return importlib.import_module("numpy.random")
    except ImportError:
        return None


def _numpy_random() -> Any:
    numpy_random = _numpy_generators()
    if numpy_random is None:
        return None
    generator: Any = getattr(numpy_random, "get_bit_generator", lambda: None)()
    if type(generator).__name__ == "MT19937":  # numpy takes long to give a copy
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    state = numpy_random.get_state()
    return state[1].tobytes(), state[2:]


def _environment() -> dict[Any, Any]:
    """Returns the environment as it is stored: decoding every variable takes long."""
    return dict(getattr(os.environ, "_data", os.environ))


def _put_back_environment(before: dict[Any, Any]) -> None:
    """What torch has set it may have remembered: that stays."""
    kept = {name: value for name, value in os.environ.items() if name in SET_BY_TORCH}
    os.environ.clear()
    os.environ.update(kept)
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in before.items()})


def _default_device() -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # type: ignore[attr-defined]


def _put_back_default_device(before: Any) -> None:
    torch.set_default_device(before if before is None else before.device)


def _cuda_precision() -> tuple[Any, ...]:
    """Reads TF32 and reduced-precision settings; torch refuses where old and new ways are mixed."""
    try:
        return (torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32(),
                torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
                torch._C._get_cublas_allow_bf16_reduced_precision_reduction())
    except RuntimeError as e:
        return (str(e),)


def _newer_precision() -> tuple[Any, ...]:
    """Returns the fp32_precision of torch 2.9 and later."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is not None:                        # what the attributes below call, after a detour
        return get("generic", "all"), get("mkldnn", "all"), get("mkldnn", "matmul")
    places = (torch.backends, torch.backends.mkldnn, getattr(torch.backends.mkldnn, "matmul", None))
    return tuple(str(getattr(place, "fp32_precision", None)) for place in places)


def _autocast() -> tuple[Any, ...]:
    return (*((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
              for kind in ("cpu", "cuda")), torch.is_autocast_cache_enabled())


def _put_back_autocast(before: tuple[Any, ...]) -> None:
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), before):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(before[2])


def _sdpa() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled())


def _put_back_sdpa(before: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    for enable, value in zip((cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp,
                              cuda.enable_math_sdp, cuda.enable_cudnn_sdp), before):
        enable(value)


def _modes() -> tuple[Any, ...]:
    return (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
            torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())


# Those of C: the module's own turn numbers into names first.
_get_signal: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_locale: Any = getattr(locale, "_setlocale", locale.setlocale)
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGABRT", "SIGALRM",
                                                    "SIGCHLD") if hasattr(signal, name))


def _interpreter() -> tuple[Any, ...]:
    return (sys.getrecursionlimit(), os.getcwd(), _set_locale(locale.LC_ALL, None),
            *map(_get_signal, _SIGNALS), sys.gettrace(), sys.getprofile(), sys.excepthook,
            tuple(sys.path))


def _umask() -> int:
    mask = os.umask(0o077)                     # there is no other way to read it
    os.umask(mask)
    return mask


def _put_back_umask(before: int) -> None:
    os.umask(before)


def _functions() -> dict[str, Any]:
    """Returns torch's functions, which a library may have put others in place of."""
    return dict(vars(torch.nn.functional))


def _put_back_functions(before: dict[str, Any]) -> None:
    vars(torch.nn.functional).update(before)


_PLACES: dict[str, Any] = {"torch": torch, "torch.Tensor": torch.Tensor}


_NOTHING = (lambda: None).__code__
_WRAPPERS = torch._compile._disable_dynamo.__code__.co_filename


def functions_of_torch() -> dict[str, dict[str, Any]]:
    """Returns those of torch itself and of tensors, which take too long to read around a call."""
    return {name: dict(vars(place)) for name, place in _PLACES.items()}


def put_back_functions(before: dict[str, dict[str, Any]]) -> list[str]:
    """Returns and puts back the names that stand for something else now; what torch finds on first
    use is new."""
    now = functions_of_torch()
    replaced = [(place, name) for place, old in before.items() if old != now[place]
                for name, function in old.items()
                if callable(function) and now[place].get(name) is not function
                and not _hidden_by_compiler(now[place].get(name), function)]
    for place, name in replaced:
        setattr(_PLACES[place], name, before[place][name])
    return [f"{place}.{name}" for place, name in replaced]


def _hidden_by_compiler(now: Any, before: Any) -> bool:
    """Did torch's compiler put its own wrapper around a function when it was first imported?"""
    return (getattr(now, "__wrapped__", None) is before
            and getattr(now, "__code__", _NOTHING).co_filename == _WRAPPERS)


def _numpy_errors() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr(), len(sys.modules)


def _put_back_numpy_errors(before: tuple[dict[str, str] | None, int]) -> None:
    if before[0] is not None:
        sys.modules["numpy"].seterr(**before[0])


def _filters() -> tuple[list[Any], int]:
    return list(warnings.filters), len(sys.modules)


def _put_back_filters(before: tuple[list[Any], int]) -> None:
    warnings.filters[:] = before[0]            # type: ignore[index]
    warnings._filters_mutated()                # type: ignore[attr-defined]


_ROOT = logging.getLogger()
_PRINTING: Any = torch._tensor_str.PRINT_OPTS
_EINSUM: Any = torch.backends.opt_einsum
_AUTOGRAD: Any = torch._C._autograd


def _seldom_set() -> tuple[Any, ...]:
    return (gc.get_threshold(), _ROOT.manager.disable, _ROOT.level, len(_ROOT.handlers), sys.stdout,
            sys.stderr, tuple(vars(_PRINTING).values()), torch._C._is_multithreading_enabled(),
            torch._C._get_warnAlways(), _EINSUM.enabled, _EINSUM.strategy, sys.getdlopenflags(),
            _AUTOGRAD._saved_tensors_hooks_is_enabled(), threading.excepthook)


def _put_back_seldom_set(before: tuple[Any, ...]) -> None:
    gc.set_threshold(*before[0])
    logging.disable(before[1])
    _ROOT.setLevel(before[2])
    sys.stdout, sys.stderr = before[4:6]
    for name, value in zip(vars(_PRINTING), before[6]):
        setattr(_PRINTING, name, value)
    torch._C._set_multithreading_enabled(before[7])
    torch._C._set_warnAlways(before[8])
    _EINSUM.enabled, _EINSUM.strategy = before[9:11]
    sys.setdlopenflags(before[11])
    threading.excepthook = before[13]


def _open_files() -> int:
    """Linux 6.2 and later tells it as the size of a folder, at a third of the cost of listing it;
    before that the size is 0."""
    if sys.platform != "linux":
        return 0
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


def _cores() -> Any:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _put_back_cores(before: Any) -> None:
    os.sched_setaffinity(0, before)


def _switch_collector(on: bool) -> None:
    (gc.enable if on else gc.disable)()


DETERMINISTIC, INTERPRETER = "deterministic mode", "the interpreter"


def deterministic_mode() -> tuple[bool, bool, bool]:
    return (torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch._C._get_deterministic_fill_uninitialized_memory())


def _put_back_deterministic(before: tuple[bool, bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
    torch._C._set_deterministic_fill_uninitialized_memory(before[2])


_SETTINGS: tuple[Setting, ...] = (
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("the default device", _default_device, _put_back_default_device),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    Setting("autocast", _autocast, _put_back_autocast,
            parts=("of the CPU", "of CUDA", "its cache")),
    Setting("a mode of torch", _modes, parts=("function modes", "dispatch modes", "inference mode",
                                              "anomaly mode")),
    Setting(DETERMINISTIC, deterministic_mode, _put_back_deterministic,
            parts=("algorithms", "warn only", "filling fresh memory")),
    Setting("the precision of float32 products", torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision),
    Setting("a TF32 or reduced-precision flag", _cuda_precision, parts=(
        "TF32 of cuBLAS", "TF32 of cuDNN", "float16 reductions", "bfloat16 reductions")),
    Setting("fp32_precision", _newer_precision, parts=(
        "torch.backends", "torch.backends.mkldnn", "torch.backends.mkldnn.matmul")),
    Setting("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Setting("the engine of quantized products", torch._C._get_qengine, torch._C._set_qengine),
    Setting("a function of torch", _functions, _put_back_functions, slow=True),
    Setting("what is seldom set", _seldom_set, _put_back_seldom_set, slow=True, parts=(
        "thresholds of the garbage collector", "what the log shows", "level of the log",
        "handlers of the log", "stdout", "stderr", "how tensors are printed", "threads of autograd",
        "warnings of torch", "opt_einsum", "its strategy", "how libraries are opened",
        "hooks of saved tensors", "excepthook of threads")),
    Setting("the mask of new files", _umask, _put_back_umask, slow=True),
    Setting("cuDNN", lambda: (torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(),
                              torch._C._get_cudnn_deterministic()),
            parts=("enabled", "benchmark", "deterministic")),
    Setting("which of torch's attentions are enabled", _sdpa, _put_back_sdpa,
            parts=("flash", "memory-efficient", "math", "cuDNN")),
    Setting("denormals or rounding", _arithmetic, _put_back_arithmetic),
    Setting("the state of torch's random numbers", _torch_random, slow=True),
    Setting("the state of Python's random numbers", random.getstate, random.setstate, slow=True),
    Setting("the state of numpy's random numbers", _numpy_random, slow=True),
    Setting(ENVIRONMENT, _environment, _put_back_environment, slow=True),
    Setting("the garbage collector", gc.isenabled, _switch_collector),
    Setting(INTERPRETER, _interpreter, parts=(
        "recursion limit", "folder", "locale", *(number.name for number in _SIGNALS), "trace",
        "profile", "excepthook", "module path")),
    Setting("the cores that this thread may use", _cores, _put_back_cores),
    Setting("how often threads are switched", sys.getswitchinterval, sys.setswitchinterval),
    Setting("the warnings that are shown", _filters, _put_back_filters, imports=True),
    Setting("numpy's treatment of errors", _numpy_errors, _put_back_numpy_errors, imports=True),
    Setting("the number of Python threads", threading.active_count, once=True),
    Setting("the number of open files", _open_files, once=True),
)
# What an import or a pool of workers changes on a first call.
ONCE = tuple(setting.name for setting in _SETTINGS if setting.once)
SLOW = frozenset(setting.name for setting in _SETTINGS if setting.slow)


def _cuda_settings(device: str) -> tuple[Setting, ...]:
    return (
        Setting("the state of the device's random numbers",
                lambda: torch.cuda.get_rng_state(device).numpy().tobytes()),
        Setting("the current CUDA device", torch.cuda.current_device, torch.cuda.set_device),
        Setting("the current CUDA stream", lambda: torch.cuda.current_stream().cuda_stream))


@lru_cache(maxsize=None)
def _settings(device: str) -> tuple[Setting, ...]:
    if not device.startswith("cuda"):
        return _SETTINGS
    # the driver opens files whenever it likes: many calls tell whether a kernel does
    return tuple(s for s in _SETTINGS if s.get is not _open_files) + _cuda_settings(device)


@lru_cache(maxsize=None)
def _readers(device: str, slow: bool = True) -> tuple[tuple[str, Callable[[], Any]], ...]:
    return tuple((setting.name, setting.get) for setting in _settings(device)
                 if slow or not setting.slow)


# What compiling a kernel may change once: it happens on a first call only.
COMPILING = (ENVIRONMENT, "the garbage collector", "the number of Python threads", INTERPRETER)


def process_state(device: str, slow: bool = True) -> dict[str, Any]:
    """Returns the process-wide state that no kernel may change; without `slow`, what is read
    around every call."""
    return {name: get() for name, get in _readers(device, slow)}


def put_back(before: dict[str, Any], device: str) -> Sequence[str]:
    """Returns which parts of the state have changed; those that can be are put back, so that one
    kernel's fault is not held against the next."""
    # all are read before one is put back
    now = {name: value for name, get in _readers(device)
           if name in before and (value := get()) != before[name]}
    if not now:
        return []
    found = [(setting, differences) for setting in _settings(device) if setting.name in now
             and (differences := setting.differences(before[setting.name], now[setting.name]))]
    for setting, _ in found:
        if setting.put_back is not None:
            setting.put_back(before[setting.name])
    return [Changed.of(setting, differences) for setting, differences in found]


# Memory that calls leave behind.

class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


@lru_cache(maxsize=None)
def _mallinfo() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if function is not None:
        function.restype = _Mallinfo
    return function


# Bytes or objects for each call that are a leak if every round of calls leaves them behind.
_LEAKS = {"Python objects": 1, "bytes of the C heap": 64, "bytes of memory of its own": 2048,
          "bytes of device memory": 64, "open files": 1, "Python threads": 1,
          "references to its inputs": 1}


def memory_in_use(device: str, inputs: Sequence[torch.Tensor] = ()) -> dict[str, int]:
    """Returns what is in use, by every way of counting that there is here. Of the inputs of calls
    who refers to them: a list of the same tensors takes hardly any memory, one of others all."""
    counts = {"Python objects": sys.getallocatedblocks(), "open files": _open_files(),
              "Python threads": threading.active_count(),
              "references to its inputs": sum(
                  sys.getrefcount(t) + (holders(t.untyped_storage()) or 0) for t in inputs)}
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        return {**counts, "bytes of device memory": torch.cuda.memory_allocated(device)}
    function = _mallinfo()
    if function is not None:
        info = function()
        counts["bytes of the C heap"] = int(info.uordblks + info.hblkhd)
    if sys.platform == "linux":
        # Not pages of files, nor what was swapped in: they come back whenever they are touched.
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        counts["bytes of memory of its own"] = 1024 * sum(
            int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))
    return counts


def find_leak(rounds: list[dict[str, int]], calls: int) -> str:
    """Returns what every round of `calls` calls left behind; "" if nothing did."""
    for name, limit in _LEAKS.items():
        growth = [after[name] - before[name] for before, after in pairwise(rounds)
                  if name in after]
        if growth and min(growth) >= limit * calls:
            return f"each call leaves {min(growth) / calls:.0f} {name} behind"
    return ""


def holders(storage: torch.UntypedStorage) -> int | None:
    """Returns how many owners a storage has besides this handle; None where torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata)) - 1
