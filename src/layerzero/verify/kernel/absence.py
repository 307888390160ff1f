"""Why a kernel can serve no call here: it is not installed, or not for this hardware."""

from __future__ import annotations

from ...machine import hardware, loading
from ...spec.kernel import Kernel
from ...spec.reason import Code, Reason
from .contract import case_refusals


def absence(kernel: Kernel, device: str) -> Reason | None:
    """Returns why the kernel can serve no call here."""
    return loading.availability(kernel) or _wrong_device(kernel, device)


def refused_by_hardware(kernel: Kernel, device: str) -> Reason | None:
    """Returns why the kernel can serve no call on this device, by its rules that read nothing but
    the hardware: no case is generated for it."""
    facts = hardware.probe(device).facts()
    device_rules = (rule for rule in kernel.requires if {leaf.fact for leaf in rule.leaves()}
                    <= facts.keys())
    return next((reason for rule in device_rules if (reason := rule.check(facts)) is not None),
                None)


def _wrong_device(kernel: Kernel, device: str) -> Reason | None:
    """Returns why the kernel can serve no call on this device, whatever the call is."""
    return next((reason for reason in _first_refusals(kernel, device)
                 if reason.code is Code.PLATFORM_MISMATCH), None) or refused_by_hardware(
                     kernel, device)


def _first_refusals(kernel: Kernel, device: str) -> tuple[Reason, ...]:
    """Returns why it refuses the first case: which device it runs on is the same for all."""
    op = kernel.op
    return case_refusals(kernel, op.cases[0], op.dtypes[0], device) if op.cases else ()
