"""The error tree, drawn once. Every message says what was wanted, what came, and what to do.

    LayerZeroError
    ├── InvalidCall            the caller's mistake; trips nothing        (also a ValueError)
    ├── NoKernel               nothing here can serve this call           (also a RuntimeError)
    │   └── NamedKernelRefused    the kernel asked for by name cannot
    ├── KernelFailed           every kernel of the plan was tried and failed (also a RuntimeError)
    ├── InputDamaged           a kernel wrote into its inputs and failed  (also a RuntimeError)
    ├── DeviceLost             a sticky device fault; restart the process (also a RuntimeError)
    ├── ConfigError            a bad setting, policy file or environment variable
    ├── RegistrationError      an op, kernel or plugin was refused
    ├── SpecError              a declaration lacks something or contradicts itself
    └── DataError              a file that cannot be read or must not be trusted
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


class InvalidCall(LayerZeroError, ValueError):
    """The arguments do not fit the operation's contract."""

    @classmethod
    def of(cls, op: str, *reasons: Reason) -> InvalidCall:
        lines = [f"lz.{op}: {r.message} [{r.code}]" for r in reasons]
        advice = [r.code.advice for r in reasons if r.code.advice]
        return cls("\n".join(lines + [f"  hint: {a}" for a in dict.fromkeys(advice)]), reasons)


class NoKernel(LayerZeroError, RuntimeError):
    """No kernel may serve this call."""


class NamedKernelRefused(NoKernel):
    """A kernel was asked for by name and cannot serve the call. It is never replaced in silence."""


class KernelFailed(LayerZeroError, RuntimeError):
    """Every kernel in the plan failed when called."""


class InputDamaged(LayerZeroError, RuntimeError):
    """A kernel wrote into its inputs and then failed: what they hold now is no longer what the call was about."""


class DeviceLost(LayerZeroError, RuntimeError):
    """The device context is unusable after a fault; only a new process can use it again."""


class ConfigError(LayerZeroError, ValueError):
    """A setting, policy or environment variable is wrong; nothing of it was applied."""


class RegistrationError(LayerZeroError, TypeError):
    """An op, kernel or plugin does not fit; nothing of it was registered."""


class SpecError(LayerZeroError, ValueError):
    """A declaration lacks required metadata or contradicts itself."""


class DataError(LayerZeroError, ValueError):
    """A file does not match its schema, is corrupt, or is not to be trusted."""


class AmbiguousLayoutWarning(UserWarning):
    """layout='auto' decided by stride alone."""


class CausalAlignmentWarning(UserWarning):
    """is_causal with unequal lengths and no causal_align: torch's top-left is used."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """A warning that points at the line outside the library that made the call, however deep we are."""
    level, frame = 1, sys._getframe()
    while frame.f_back and (frame.f_globals.get("__name__", "layerzero").partition(".")[0] == "layerzero"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
