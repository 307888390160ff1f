"""A kernel nobody knows yet, tried in a process of its own before it is trusted with this one.

What hangs is stopped, what crashes or loses the device takes nothing else with it; the kernel is then taken out here,
with the reason. Verification and tuning may ask this first of kernels that have no certificate.
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
from ...world import certificates, health
from ...world import snapshot as worlds
from ...world.incidents import change_health
from .contract import call, case_values, refusals

MOST_CASES = 3
LOCAL = "<local>"                              # a load that no other process can import


def probe(kernel: Kernel, device: str = "cpu", timeout: float = TIMEOUT_S) -> Reason | None:
    """Run it in a process of its own. If it hangs, crashes or fails there, it is taken out here: the reason why.

    None: it ran. It must be importable: a kernel of the catalog, of a plugin, or one whose load is a named function.
    """
    reason = tried(kernel, device, timeout).reason
    if reason is not None:
        change_health(kernel.id, lambda old: health.disabled(reason))
    return reason


def tried(kernel: Kernel, device: str = "cpu", timeout: float = TIMEOUT_S) -> Outcome:
    """What came of a few calls of it in a process of its own. The time counts from the start of that process."""
    declared = kernel.to_json()
    if not _importable(kernel):
        declared["load"] = LOCAL
    outcome = run_isolated(f"{__name__}:run_cases", declared, device, timeout=timeout)
    if outcome.ok and outcome.value is None:
        raise ConfigError(f"kernel {kernel.id!r} cannot be probed: a new process does not know it; its load must be a "
                          f"function of a module that can be imported, got {import_path(kernel.load)}")
    return outcome


def _importable(kernel: Kernel) -> bool:
    try:
        return resolve_import_path(import_path(kernel.load)) is kernel.load
    except (LayerZeroError, ImportError, AttributeError):
        return False


def probe_unknown(kernels: Iterable[Kernel], device: str = "cpu", timeout: float = TIMEOUT_S) -> dict[str, Reason]:
    """Probe those that are here, no part of torch, and without a certificate; what was found wrong with them."""
    chosen = [k for k in kernels if k.package and loading.availability(k) is None]
    standing = certificates.standing(chosen, hardware.probe(device))
    unknown = [k for k in chosen if isinstance(standing[k.id], Reason)]
    return {k.id: reason for k in unknown if (reason := probe(k, device, timeout)) is not None}


def run_cases(declared: dict[str, Any], device: str) -> int | None:
    """In the other process: the first cases that the kernel takes, and how many; None if it is not known there."""
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
            torch.cuda.synchronize()           # a fault is reported when somebody waits
        ran += 1
        if ran == MOST_CASES:
            break
    return ran
