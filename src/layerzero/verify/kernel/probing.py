"""Tries an unknown kernel in a process of its own before this process runs it.

A kernel that hangs, crashes or loses the device there does no harm here, and is disabled here with
the reason. Verification and tuning may do this first for kernels without a certificate.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch

from ...machine import hardware, loading
from ...machine.watchdog import TIMEOUT_S, Outcome, run_isolated
from ...spec.errors import ConfigError, LayerZeroError
from ...spec.kernel import Kernel
from ...spec.op import import_path, resolve_import_path
from ...spec.reason import Reason
from ...world import health
from ...world import snapshot as worlds
from ...world.incidents import change_health
from ...world.registry import certificates
from .contract import call, case_values, refusals

MAX_CASES = 3
LOCAL = "<local>"                              # a load that no other process can import


def probe(kernel: Kernel, device: str = "cpu", timeout: float = TIMEOUT_S) -> Reason | None:
    """Runs a kernel in another process. If it hangs, crashes or fails there, it is disabled here;
    returns the reason.

    None: it ran. It must be importable: a kernel of the catalog, of a plugin, or one whose load is
    a named function.
    """
    reason = run_in_subprocess(kernel, device, timeout).reason
    if reason is not None:
        change_health(kernel.id, lambda old: health.disabled(reason))
    return reason


def run_in_subprocess(kernel: Kernel, device: str = "cpu", timeout: float = TIMEOUT_S) -> Outcome:
    """Makes a few calls in another process. The timeout includes the start of that process."""
    declared = kernel.to_json()
    if not _importable(kernel):
        declared["load"] = LOCAL
    outcome = run_isolated(f"{__name__}:run_cases", declared, device, timeout=timeout)
    if outcome.ok and outcome.value is None:
        raise ConfigError(
            f"kernel {kernel.id!r} cannot be probed: a new process does not know it; its load must "
            f"be a function of a module that can be imported, got {import_path(kernel.load)}")
    return outcome


def _importable(kernel: Kernel) -> bool:
    try:
        return resolve_import_path(import_path(kernel.load)) is kernel.load
    except (LayerZeroError, ImportError, AttributeError):
        return False


def probe_unknown(kernels: Iterable[Kernel], device: str = "cpu",
                  timeout: float = TIMEOUT_S) -> dict[str, Reason]:
    """Probes the kernels of installed libraries that have no certificate; returns what is wrong
    with them."""
    chosen = [k for k in kernels if k.package and loading.availability(k) is None]
    standing = certificates.statuses(chosen, hardware.probe(device))
    unknown = [k for k in chosen if isinstance(standing[k.id], Reason)]
    return {k.id: reason for k in unknown if (reason := probe(k, device, timeout)) is not None}


def run_cases(declared: dict[str, Any], device: str) -> int | None:
    """Runs in the other process: the first cases the kernel accepts. Returns how many; None if it
    is unknown there."""
    catalog = worlds.current().catalog
    kernel = catalog.by_id.get(declared["id"])
    if kernel is None or declared["load"] not in (LOCAL, import_path(kernel.load)):
        if declared["load"] == LOCAL or declared["op"] not in catalog.ops:
            return None
        kernel = Kernel.from_json(declared, catalog.ops[declared["op"]])
    ran = 0
    for case, dtype in product(kernel.op.cases, kernel.op.dtypes):
        values = case_values(kernel.op, case, dtype, device)
        if refusals(kernel, values):
            continue
        with torch.no_grad():
            call(kernel, values)
        if device == "cuda":
            torch.cuda.synchronize()           # a fault is reported at synchronization
        ran += 1
        if ran == MAX_CASES:
            break
    return ran
