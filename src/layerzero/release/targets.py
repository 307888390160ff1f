"""A hardware class that is released for: cpu-x86, cpu-arm, or the generation of a GPU."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from ..machine import hardware
from ..spec.device import GENERATIONS, Device
from ..spec.errors import ConfigError

_MACHINES = {"aarch64": "arm", "arm64": "arm", "x86_64": "x86", "amd64": "x86"}
KNOWN = ("cpu-x86", "cpu-arm", *(generation.name for generation in GENERATIONS))


def target_of(device: Device) -> str:
    """Return the hardware class of a device; a CPU is taken for that of this machine."""
    if device.type == "cpu":
        machine = platform.machine().lower()
        return f"cpu-{_MACHINES.get(machine, machine or 'unknown')}"
    return device.gpu_generation or device.type


def local_targets() -> Mapping[str, str]:
    """Return the targets of this machine, the accelerator's first: name -> kind of device."""
    kinds = dict.fromkeys((hardware.main_kind(), *hardware.present(), "cpu"))
    return {target_of(hardware.probe(kind)): kind for kind in kinds}


def choose_target(target: str = "", device: str = "") -> tuple[str, str]:
    """Return (target, kind of device): as given, else of the accelerator, else of the CPU."""
    targets = local_targets()
    if device:
        kind = hardware.probe(device).type
        own = target_of(hardware.probe(kind))
        if target and target != own:
            raise ConfigError(
                f"--device {device} is of the target {own}, got --target {target}; give one of "
                "them")
        return own, kind
    if not target:
        return next(iter(targets.items()))
    if target not in targets:
        known = "" if target in KNOWN else f"; it is none of {', '.join(KNOWN)}"
        raise ConfigError(
            f"--target: this machine has {', '.join(targets)}, got {target!r}{known}; run it on a "
            "machine that has it")
    return target, targets[target]
