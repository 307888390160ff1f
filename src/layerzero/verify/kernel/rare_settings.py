"""Settings of the process that hardly any call changes: they are read before the first call of a
kernel and after the last, and not around each.
"""

from __future__ import annotations

import decimal
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_LOG = logging.getLogger("torch")
_BACKENDS: Any = torch.backends
_C: Any = torch._C
_SIGNALS = tuple(s for s in (getattr(signal, name, None) for name in (
    "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGFPE", "SIGSEGV")) if s is not None)


def _numpy_printing() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else repr(numpy.get_printoptions())


def _limits() -> Any:
    if sys.platform == "win32":
        return None
    import resource
    return (os.getpriority(os.PRIO_PROCESS, 0),
            *(resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK,
                                                    resource.RLIMIT_CORE)))


def _saved_tensors_hooks() -> bool:
    top = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


_READERS: dict[str, Callable[[], Any]] = {
    "level of torch's log": lambda: (_LOG.level, _LOG.propagate, len(_LOG.handlers)),
    "how warnings are shown": lambda: warnings.showwarning,
    "how numpy prints": _numpy_printing,
    "the fault handler": faulthandler.is_enabled,
    "debugging of the garbage collector": lambda: (gc.get_debug(), len(gc.callbacks)),
    "hooks of the interpreter": lambda: (sys.displayhook, sys.unraisablehook,
                                         getattr(sys, "get_int_max_str_digits", int)()),
    "handlers of signals": lambda: tuple(map(signal.getsignal, _SIGNALS)),
    "limits or priority of the process": _limits,
    "the timeout of sockets": socket.getdefaulttimeout,
    "the precision of decimals": lambda: decimal.getcontext().prec,
    "checks of anomalies or sparse tensors": lambda: (
        torch.is_anomaly_check_nan_enabled(), _C._check_sparse_tensor_invariants()),
    "flags of oneDNN": lambda: (_BACKENDS.mkldnn.deterministic,
                                getattr(_BACKENDS.mkldnn, "allow_tf32", None)),
    "hooks of saved tensors": _saved_tensors_hooks,
}


def rare_settings() -> dict[str, Any]:
    """Returns what there is to read here, by name."""
    found: dict[str, Any] = {}
    for name, read in _READERS.items():
        try:
            found[name] = read()
        except (AttributeError, OSError, ValueError, RuntimeError):    # of another platform
            continue
    return found


def changed_settings(before: dict[str, Any]) -> list[str]:
    now = rare_settings()
    return [name for name, value in before.items() if name in now and now[name] != value]
