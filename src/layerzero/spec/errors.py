"""The error tree, drawn once. Every message says what was wanted, what came, and what to do.

    LayerZeroError
    ├── InvalidCall                       the caller's mistake   (ValueError and RuntimeError)
    │   └── InvalidArgumentType           an argument is of another type (TypeError as well)
    ├── NoKernelFoundError                nothing here can serve this call          (RuntimeError)
    │   └── NamedKernelRefused            the kernel asked for by name cannot
    │       └── BackendNotAvailableError  its library is missing or cannot be loaded
    ├── KernelExecutionError              every kernel of the plan failed           (RuntimeError)
    │   ├── CudaGraphUnsafeError          the graph capture under way was lost
    │   ├── KernelOutOfMemory             all for want of memory  (torch.OutOfMemoryError as well)
    │   └── SelectionTimeoutError         the selected kernel exceeded call_timeout
    ├── InputDamaged                      a kernel wrote into its inputs and failed (RuntimeError)
    ├── DeviceLost                        a sticky fault; restart the process       (RuntimeError)
    ├── LaunchRefused                     the device cannot take such a launch      (RuntimeError)
    ├── RanksError                        ranks differ, or one did not answer       (RuntimeError)
    ├── CacheFull                         a KV cache has no room left               (MemoryError)
    ├── ConfigError                       a bad setting or environment variable     (ValueError)
    │   └── PolicyValidationError         a bad policy file, rule or condition
    ├── RegistrationError                 an op, kernel or plugin was refused       (TypeError)
    ├── SpecError                         a declaration contradicts itself          (ValueError)
    └── DataError                         a file that cannot be read or trusted     (ValueError)
        ├── CacheCorruptionError          a file of our own cache is damaged
        │   └── CorruptStore              a store of measurements, also a StoreError
        ├── UntrustedFile                 compiled code that others could have written
        ├── StoreError                    a store of measurements cannot be used
        │   ├── NewerStore                it was written by a later release
        │   └── ForeignFile               it is no store of ours
        ├── Unmapped                      a definition of others without a mapping to an op
        └── HubError                      the kernel hub; its kinds: integrations/hub/errors.py

LaunchRefused is defined in spec/rules/launch.py, KernelOutOfMemory in machine/faults.py,
UntrustedFile in files/sealed.py, the errors of a store in perf/interface.py, Unmapped in
verify/trace/readings.py; all others are here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from .reason import Code, Reason


class LayerZeroError(Exception):
    """Base of all errors this library raises on purpose."""

    def __init__(self, message: str, reasons: Iterable[Reason] = ()) -> None:
        super().__init__(message)
        self.reasons: tuple[Reason, ...] = tuple(reasons)

    @property
    def codes(self) -> tuple[Code, ...]:
        return tuple(r.code for r in self.reasons)


class InvalidCall(LayerZeroError, ValueError, RuntimeError):
    """The arguments do not fit the operation's contract.

    It is a RuntimeError too, which is what torch raises for most of these mistakes.
    """

    @classmethod
    def of(cls, op: str, *reasons: Reason) -> InvalidCall:
        lines = [f"lz.{op}: {r.message} [{r.code}]" for r in reasons]
        advice = [(r.code.remedy or "help(lz.<op>) has what it takes").replace("<op>", op)
                  for r in reasons]
        mistyped = any(r.code is Code.WRONG_TYPE for r in reasons)
        error = InvalidArgumentType if mistyped else cls
        return error("\n".join(lines + [f"  hint: {a}" for a in dict.fromkeys(advice)]), reasons)


class InvalidArgumentType(InvalidCall, TypeError):
    """An argument has not the type that the operation declares; torch raises TypeError for it."""


class NoKernelFoundError(LayerZeroError, RuntimeError):
    """No kernel may serve this call; the message lists every kernel with its reasons."""


class NamedKernelRefused(NoKernelFoundError):
    """A kernel was asked for by name and cannot serve the call. It is never replaced in silence."""


class BackendNotAvailableError(NamedKernelRefused):
    """The library of the kernel asked for by name is missing, too old or cannot be loaded here."""


class KernelExecutionError(LayerZeroError, RuntimeError):
    """Every kernel in the plan failed when called."""


class CudaGraphUnsafeError(KernelExecutionError):
    """The CUDA graph capture under way was lost; capture again."""


class SelectionTimeoutError(KernelExecutionError):
    """The selected kernel did not finish within `call_timeout`, and no other one was tried."""


class InputDamaged(LayerZeroError, RuntimeError):
    """A kernel wrote into its inputs and then failed, so no other kernel can serve the call."""


class DeviceLost(LayerZeroError, RuntimeError):
    """The device context is unusable after a fault; only a new process can use it again."""


class RanksError(LayerZeroError, RuntimeError):
    """The ranks of a process group are not alike, or some did not answer; `ranks` says which."""

    def __init__(self, message: str, ranks: Iterable[int] = (),
                 reasons: Iterable[Reason] = ()) -> None:
        super().__init__(message, reasons)
        self.ranks: tuple[int, ...] = tuple(ranks)


class CacheFull(LayerZeroError, MemoryError):
    """A KV cache has no page left, or a sequence has reached its limit. Nothing was changed."""

    @classmethod
    def of(cls, want: str, got: str) -> CacheFull:
        return cls(f"lz.kv_cache: {want}, but {got}; nothing was changed. "
                   "Remove a sequence, or make the cache larger.",
                   (Reason(Code.OUT_OF_MEMORY, want, got),))


class ConfigError(LayerZeroError, ValueError):
    """A setting, policy or environment variable is wrong; nothing of it was applied."""


class PolicyValidationError(ConfigError):
    """A policy (its file, a rule, a condition or a setting) is not valid."""


class RegistrationError(LayerZeroError, TypeError):
    """An op, kernel or plugin does not fit; nothing of it was registered."""


class SpecError(LayerZeroError, ValueError):
    """A declaration lacks required metadata or contradicts itself."""


class DataError(LayerZeroError, ValueError):
    """A file does not match its schema, is corrupt, or is not to be trusted."""


class CacheCorruptionError(DataError):
    """A file in our own cache folder is damaged: a store of measurements, or compiled code."""


class AmbiguousLayoutWarning(UserWarning):
    """layout='auto' decided by stride alone."""


class CausalAlignmentWarning(UserWarning):
    """is_causal with unequal lengths and no causal_align: torch's top-left is used."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns, pointing at the line outside the library that made the call."""
    level, frame = 1, sys._getframe()
    while (frame.f_back
           and (frame.f_globals.get("__name__", "layerzero").partition(".")[0] == "layerzero")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
