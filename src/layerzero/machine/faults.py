"""Classifies the error of a failed kernel call, which decides what happens next.

caller   the arguments break the contract: raised at once, no breaker counts it
memory   out of memory: the next kernel of the plan is tried, no breaker counts it
kernel   the kernel's own fault: the next kernel is tried, and the breaker counts it
refused  the kernel saw before its launch that the device cannot run it, or sdpa_kernel allows no
         implementation that could: the next kernel is tried, no breaker counts it
capture  the kernel did something a CUDA graph cannot hold: the capture is lost, and the kernel not
         captured again
lost     something else had invalidated the capture before: no kernel can serve in it, no breaker
         counts it
timeout  the kernel ran into its time limit: treated as "kernel"
sticky   the device context is gone: the backend is disabled and DeviceLost is raised
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.utils.checkpoint

from ..spec.errors import DeviceLost, InvalidCall, KernelExecutionError, LayerZeroError
from ..spec.kernel import SDPA_BACKENDS
from ..spec.reason import Code, Reason
from ..spec.rules.launch import LaunchRefused

# What a kernel may raise: some libraries' errors derive from Exception alone, as Triton's do.
# KeyboardInterrupt and SystemExit pass through.
FAULTS: tuple[type[BaseException], ...] = (Exception,)

# Errors that are not the kernel's fault and are re-raised as they are: the caller's mistake, a
# device that a nested op found lost, a warning that the caller turned into an error, and the one
# that ends torch's checkpoint recomputation.
PASSED_ON: tuple[type[BaseException], ...] = (
    InvalidCall, DeviceLost, Warning, torch.utils.checkpoint._StopRecomputationError)


class PlanExhausted(RuntimeError):
    """The plan that serves while a kernel compiles has failed too; `error` is what it raised."""

    def __init__(self, error: LayerZeroError) -> None:
        super().__init__(str(error))
        self.error = error


class Hung(TimeoutError):
    """A call took longer than policy allows; its kernel may still run on the caller's inputs."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no result within {seconds:g} s")
        self.seconds = seconds
        self.reason = Reason(Code.KERNEL_TIMEOUT, f"{seconds:g} s", str(self))


class WrongResult(RuntimeError):
    """A kernel returned another shape, dtype or count of results than its op declares."""

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


class WorkerFault(RuntimeError):
    """A kernel failed in its worker process; the next kernel of the plan may serve."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"{why} (in the worker of {worker})")
        self.worker, self.why = worker, why


class WorkerLost(WorkerFault):
    """The worker process ended, or could not be started."""


class WorkerTimeout(WorkerFault, TimeoutError):
    """The worker gave no answer in time and was killed, so the inputs are the caller's again."""

    def __init__(self, worker: str, seconds: float) -> None:
        super().__init__(worker, f"no answer within {seconds:g} s; it was killed")


class WorkerStarting(WorkerFault):
    """The worker is being started again; other kernels serve meanwhile, and nobody is blamed."""

    def __init__(self, worker: str, why: str, wait: Callable[[], None]) -> None:
        super().__init__(worker, f"it is being started again after: {why}")
        self.wait = wait                       # until it serves


class KernelOutOfMemory(KernelExecutionError, torch.OutOfMemoryError):
    """Every kernel of the plan ran out of memory; a retry with less catches torch's error."""


OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, MemoryError)

# Torch ends every CUDA error with advice on "device-side assertions": only a triggered one counts.
_STICKY_TEXTS = ("illegal memory access", "device-side assert triggered",
                 "unspecified launch failure", "misaligned address", "illegal instruction",
                 "an illegal address", "uncorrectable ecc",
                 "the launch timed out and was terminated", "hardware stack error", "device lost")
# Torch's CPU allocator says "can't allocate memory" where it asks posix_memalign and "not enough
# memory" where it asks mimalloc (its wheels for ARM) or Windows; C++'s own error comes through
# torch as its name; the rest is what XNNPACK, QNNPACK, shared memory and mmap say.
_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory",
                 "failed to allocate", "could not allocate", "unable to allocate",
                 "cannot allocate memory", "bad_alloc")
_CAPTURE_TEXTS = ("stream is capturing", "during cuda graph capture", "legacy stream depend",
                  "cuda graph capture unless")
_SDPA_DISABLED_TEXTS = ("no available kernel", "no viable backend for scaled_dot_product_attention")
_CAPTURE_LOST_TEXTS = ("previous error during capture", "capture was invalidated",
                       "capture invalidated")


def says_out_of_memory(text: str) -> bool:
    """Does this error text report that memory ran out?"""
    return any(wording in text.lower() for wording in _MEMORY_TEXTS)


def classify(error: BaseException) -> str:
    text = str(error).lower()
    if isinstance(error, InvalidCall):
        return "caller"
    if isinstance(error, (WrongResult, InputsChanged)):        # whatever their texts contain
        return "kernel"
    if isinstance(error, LaunchRefused) or is_sdpa_disabled(error):
        return "refused"
    if (isinstance(error, OUT_OF_MEMORY)
        or (isinstance(error, RuntimeError) and says_out_of_memory(text))):
        return "memory"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, RuntimeError) and any(m in text for m in _STICKY_TEXTS):
        return "sticky"
    if (isinstance(error, RuntimeError)
        and any(m in text for m in (*_CAPTURE_TEXTS, *_CAPTURE_LOST_TEXTS))):
        return "capture" if any(m in text for m in _CAPTURE_TEXTS) else "lost"
    return "kernel"


def is_sdpa_disabled(error: BaseException) -> bool:
    """Did scaled_dot_product_attention find no implementation that sdpa_kernel allows?"""
    return (isinstance(error, RuntimeError)
            and any(m in str(error).lower() for m in _SDPA_DISABLED_TEXTS))


def reason_of(error: BaseException, kind: str) -> Reason:
    if isinstance(error, LaunchRefused):
        return error.reasons[0]
    if isinstance(error, (Hung, WrongResult, InputsChanged)):
        return error.reason
    if is_sdpa_disabled(error):
        return Reason(Code.SDPA_BACKEND_DISABLED,
                      "left to torch, which found nothing that takes this call",
                      # None: another thread has left sdpa_kernel meanwhile
                      sdpa_backends() or "some of them")
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    code = {"memory": Code.OUT_OF_MEMORY, "timeout": Code.KERNEL_TIMEOUT,
            "sticky": Code.DEVICE_FAULT, "capture": Code.CUDA_GRAPH_UNSAFE,
            "lost": Code.CUDA_GRAPH_UNSAFE}.get(kind, Code.KERNEL_FAILED)
    return Reason(code, f"its time limit ({text})" if kind == "timeout" else None, text)


# Is each of SDPA_BACKENDS, in that order, enabled for the process?
SDPA_SWITCHES: tuple[Callable[[], bool], ...] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled)


def sdpa_backends() -> tuple[str, ...] | None:
    """Returns what sdpa_kernel and enable_*_sdp leave enabled; None for everything."""
    enabled = tuple(name for name, is_on in zip(SDPA_BACKENDS, SDPA_SWITCHES) if is_on())
    return None if len(enabled) == len(SDPA_BACKENDS) else enabled


# called when a call finds the device context gone
on_device_lost: list[Callable[[Reason], None]] = []


def capturing() -> bool:
    """Is a CUDA graph being captured? This is the first thing a call asks the device, so a context
    that an earlier kernel has destroyed is noticed here: DeviceLost."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError as e:
        if classify(e) != "sticky":
            raise
        reason = reason_of(e, "sticky")
        for listener in on_device_lost:
            listener(reason)
        raise DeviceLost(
            f"a kernel that ran before {reason.message}. {reason.code.advice}. "
            "CUDA_LAUNCH_BLOCKING=1 tells which one.", [reason]) from e
