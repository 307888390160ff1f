"""Errors have a class. What a failed kernel call means, and so what happens next.

caller   the arguments break the contract: raised at once, trips nothing
memory   out of memory: the next kernel of the plan is tried, trips nothing
kernel   the kernel's own fault: the next is tried, and it counts against the breaker
refused  the kernel saw before its launch that the device cannot take it, or torch that sdpa_kernel allows no
         implementation which could: the next is tried, trips nothing
capture  the kernel did what a CUDA graph cannot hold: the capture is lost, and it is not captured again
lost     a capture that something else had spoilt before: nobody can serve in it, trips nothing
timeout  the kernel gave up waiting: as kernel
sticky   the device context is gone: the backend is disabled and DeviceLost is raised
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.utils.checkpoint

from ..spec.errors import DeviceLost, InvalidCall, LayerZeroError
from ..spec.kernel import SDPA_BACKENDS
from ..spec.launch import LaunchRefused
from ..spec.reason import Code, Reason

# What a kernel may throw: libraries have errors of their own that derive from Exception alone, as Triton's do.
# KeyboardInterrupt and SystemExit pass through.
FAULTS: tuple[type[BaseException], ...] = (Exception,)

# Of these, what is not the kernel's doing and is passed on: the caller's mistake, a device that an op called by
# the kernel found lost, a warning that the caller made an error, and what torch's checkpoint ends a recomputation with.
PASSED_ON: tuple[type[BaseException], ...] = (
    InvalidCall, DeviceLost, Warning, torch.utils.checkpoint._StopRecomputationError)


class Settled(RuntimeError):
    """Another entry has tried its whole plan for this call; `error` says how that ended."""

    def __init__(self, error: LayerZeroError) -> None:
        super().__init__(str(error))
        self.error = error


class Hung(TimeoutError):
    """A call took longer than policy allows. Its kernel may be running still, with the caller's inputs."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no result within {seconds:g} s")
        self.seconds = seconds
        self.reason = Reason(Code.KERNEL_TIMEOUT, f"{seconds:g} s", str(self))


class WrongResult(RuntimeError):
    """A kernel returned something else than its op describes."""

    def __init__(self, want: str, got: str) -> None:
        super().__init__(f"returned {got}, wanted {want}")
        self.reason = Reason(Code.WRONG_RESULT, want, got)


class InputsChanged(RuntimeError):
    """A kernel wrote into its inputs and then failed."""

    def __init__(self, names: Sequence[str], fault: BaseException) -> None:
        super().__init__(f"changed its inputs {', '.join(names)}")
        self.names, self.fault = tuple(names), fault
        text = f"{type(fault).__name__}: {fault}"[:300]
        self.reason = Reason(Code.INPUT_CHANGED, text, ", ".join(names))


OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)

# Torch ends the text of every CUDA error with advice on "device-side assertions": only one that was triggered counts.
_STICKY = ("illegal memory access", "device-side assert triggered", "unspecified launch failure", "misaligned address",
           "illegal instruction", "an illegal address", "uncorrectable ecc", "the launch timed out and was terminated",
           "hardware stack error", "device lost")
# Torch's CPU allocator says "can't allocate memory" where it asks posix_memalign and "not enough memory" where it asks
# mimalloc (its wheels for ARM) or Windows; C++'s own error comes through torch as its name; the rest is what XNNPACK,
# QNNPACK, shared memory and mmap say.
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "failed to allocate", "could not allocate",
           "unable to allocate", "cannot allocate memory", "bad_alloc")
_CAPTURE = ("stream is capturing", "during cuda graph capture", "legacy stream depend", "cuda graph capture unless")
_SWITCHED_OFF = ("no available kernel", "no viable backend for scaled_dot_product_attention")
_CAPTURE_LOST = ("previous error during capture", "capture was invalidated", "capture invalidated")


def tells_of_memory(text: str) -> bool:
    """Does an error with this text say that memory is out?"""
    return any(wording in text.lower() for wording in _MEMORY)


def classify(error: BaseException) -> str:
    text = str(error).lower()
    if isinstance(error, InvalidCall):
        return "caller"
    if isinstance(error, (WrongResult, InputsChanged)):        # whatever their texts remind of
        return "kernel"
    if isinstance(error, LaunchRefused) or is_switched_off(error):
        return "refused"
    if isinstance(error, OUT_OF_MEMORY) or (isinstance(error, RuntimeError) and tells_of_memory(text)):
        return "memory"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, RuntimeError) and any(m in text for m in _STICKY):
        return "sticky"
    if isinstance(error, RuntimeError) and any(m in text for m in (*_CAPTURE, *_CAPTURE_LOST)):
        return "capture" if any(m in text for m in _CAPTURE) else "lost"
    return "kernel"


def is_switched_off(error: BaseException) -> bool:
    """Did scaled_dot_product_attention find no implementation that takes the call among those the caller allows?"""
    return isinstance(error, RuntimeError) and any(m in str(error).lower() for m in _SWITCHED_OFF)


def reason_of(error: BaseException, kind: str) -> Reason:
    if isinstance(error, LaunchRefused):
        return error.reasons[0]
    if isinstance(error, (Hung, WrongResult, InputsChanged)):
        return error.reason
    if is_switched_off(error):
        return Reason(Code.SDPA_BACKEND_DISABLED, "left to torch, which found nothing that takes this call",
                      sdpa_backends() or "some of them")   # None: another thread has left the block meanwhile
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    code = {"memory": Code.OUT_OF_MEMORY, "timeout": Code.KERNEL_TIMEOUT, "sticky": Code.DEVICE_FAULT,
            "capture": Code.CUDA_GRAPH_UNSAFE, "lost": Code.CUDA_GRAPH_UNSAFE}.get(kind, Code.KERNEL_FAILED)
    return Reason(code, f"its time limit ({text})" if kind == "timeout" else None, text)


# In the order of SDPA_BACKENDS: is it switched on, for the whole process?
SDPA_SWITCHES: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled)


def sdpa_backends() -> tuple[str, ...] | None:
    """What torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp have left on; None: everything."""
    left = tuple(name for name, is_on in zip(SDPA_BACKENDS, SDPA_SWITCHES) if is_on())
    return None if len(left) == len(SDPA_BACKENDS) else left


when_lost: list[Callable[[Reason], None]] = []     # told when a call finds the device context gone


def capturing() -> bool:
    """Is a CUDA graph being captured? The first question of a call to the device, and so where a context that an
    earlier kernel has ruined is found: DeviceLost."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError as e:
        if classify(e) != "sticky":
            raise
        reason = reason_of(e, "sticky")
        for tell in when_lost:
            tell(reason)
        raise DeviceLost(f"a kernel that ran before {reason.message}. {reason.code.advice}. CUDA_LAUNCH_BLOCKING=1 "
                         "tells which one.", [reason]) from e
