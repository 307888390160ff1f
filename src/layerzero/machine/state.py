"""The state of a machine during a measurement: load, clocks, temperature, power, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..spec.device import Device
from .loading import installed_version

_SMI_FIELDS: Mapping[str, str] = {
    "temperature_c": "temperature.gpu", "power_w": "power.draw", "power_limit_w": "power.limit",
    "clock_mhz": "clocks.sm", "memory_clock_mhz": "clocks.mem", "memory_used_mib": "memory.used",
    "busy_percent": "utilization.gpu", "performance_state": "pstate"}


def state_of(device: Device) -> dict[str, Any]:
    """Returns software, machine and momentary state of a measurement, as far as known."""
    environment: dict[str, Any] = {
        "machine": machine_id(), "platform": platform.platform(),
        "python": platform.python_version(), "layerzero": installed_version("layerzero")
        or "unknown", "processors": os.cpu_count() or 0}
    if device.type == "cuda" and device.vendor == "nvidia":
        environment["uuid_class"] = uuid_class(device.name,
                                               os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        environment["state"] = _gpu_state(device.index)
    else:
        environment["state"] = {}
    environment["state"].update(_host_state())
    return environment


def machine_id() -> str:
    """Returns a hash of the host name: it tells machines apart without naming them."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def uuid_class(name: str, visible: str) -> str:
    """"GPU", or "MIG" for a slice of one, which has its own speed."""
    return "MIG" if " MIG " in f" {name} " or visible.strip().startswith("MIG-") else "GPU"


def _gpu_state(index: int) -> dict[str, Any]:
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    # torch counts visible devices, nvidia-smi all
    gpu = f"GPU-{uuid}" if uuid is not None else str(index)
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    try:
        smi = subprocess.run(["nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits"],
                             capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_smi(smi.stdout)


def parse_smi(text: str) -> dict[str, Any]:
    """Parses one line of `nvidia-smi --query-gpu`; an absent field reads [N/A]."""
    values = [v.strip() for v in text.strip().splitlines()[0].split(",")] if text.strip() else []
    state: dict[str, Any] = {}
    for name, value in zip(_SMI_FIELDS, values):
        if name == "performance_state" and value.startswith("P"):
            state[name] = value
        elif value.replace(".", "", 1).isdigit():
            state[name] = float(value)
    return state


def _host_state() -> dict[str, Any]:
    state: dict[str, Any] = {}
    if hasattr(os, "getloadavg"):
        state["load_average"] = round(os.getloadavg()[0], 1)
    zone, frequency = Path("/sys/class/thermal/thermal_zone0/temp"), Path(
        "/sys/devices/system/cpu/cpu0/cpufreq")
    for name, path, scale in (("cpu_temperature_c", zone, 1e-3),
                              ("cpu_mhz", frequency / "scaling_cur_freq", 1e-3)):
        number = _read_text(path)
        if number.lstrip("-").isdigit():
            state[name] = round(int(number) * scale)
    if governor := _read_text(frequency / "scaling_governor"):
        state["governor"] = governor
    available = _available_mib()
    if available:
        state["memory_available_mib"] = available
    return state


def _available_mib() -> int:
    if sys.platform == "linux":
        for line in _read_text(Path("/proc/meminfo")).splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    try:
        import psutil  # type: ignore[import-untyped, import-not-found]
    except ImportError:
        return 0
    return int(psutil.virtual_memory().available) >> 20


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
