"""The devices of this machine, read once.

`present()` looks without starting CUDA, so a process may still fork afterwards; `probe` and
`all_devices` read a GPU's properties, which does start it. The functions that make a `Device` of
what was read do no reading themselves.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..spec.device import (
    CPU_ISA,
    DEVICE_TYPES,
    GENERATIONS,
    Device,
    Table,
    generation_of,
    generation_of_arch,
)
from ..spec.errors import ConfigError
from .arm_cores import core_name

TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu",
                        "triton-xpu", "triton-windows")


def probe(kind: str, index: int = 0, table: Table = GENERATIONS) -> Device:
    """Returns the device `kind:index`; it is read once."""
    return _probe(kind, index, table)


@cache
def present() -> tuple[str, ...]:
    """Returns the device types that torch can use here; "cpu" is always one."""
    return tuple(kind for kind in DEVICE_TYPES if _COUNT[kind]() > 0)


def main_kind() -> str:
    """Returns the device type that is used where none is named: an accelerator before the CPU."""
    return next((kind for kind in present() if kind != "cpu"), "cpu")


def all_devices() -> tuple[Device, ...]:
    return tuple(probe(kind, index) for kind in present() for index in range(_COUNT[kind]()))


def forget() -> None:
    """Drops what was read; the next call reads it again."""
    for cached in (_probe, present, read_cpu, triton_version):
        cached.cache_clear()


@cache
def _probe(kind: str, index: int, table: Table) -> Device:
    if kind not in DEVICE_TYPES:
        raise ConfigError(f"device kind must be one of {', '.join(DEVICE_TYPES)}, got {kind!r}; "
                          f"present here: {', '.join(present())}")
    count = _COUNT[kind]()
    if not count:
        raise ConfigError(
            f"no {kind} device is usable here; present: {', '.join(present())}. Use one of those, "
            f"or install a torch build and a driver for {kind} (this is torch {torch.__version__})")
    if not 0 <= index < count:
        raise ConfigError(
            f"{kind}:{index} does not exist; this machine has {kind}:0 to {kind}:{count - 1}")
    software = {"torch_version": str(torch.__version__), "triton_version": triton_version()}
    try:
        return _READ[kind](index, table, software)
    # how torch refuses an unusable driver or a forked process
    except (RuntimeError, AssertionError) as e:
        raise ConfigError(
            f"{kind}:{index} is listed by its driver but torch cannot use it: {e}") from e


# Pure functions from what was read to a Device: tables of real values test them.

Software = Mapping[str, Any]               # the version fields of a Device


def nvidia_device(props: Any, index: int, software: Software, table: Table = GENERATIONS) -> Device:
    """Describes an NVIDIA GPU by torch's properties: name, major, minor, multi_processor_count and
    total_memory."""
    sm = 10 * props.major + props.minor
    row = generation_of(sm, table)
    return Device(
        "cuda", index, props.name, "nvidia", sm=sm, gpu_generation=row.name,
        tensor_core_generation=row.tensor_core, supports_bf16=row.bf16, supports_fp8=row.fp8,
        supports_fp4=row.fp4, cores=props.multi_processor_count, total_memory=props.total_memory,
        shared_per_block=getattr(props, "shared_memory_per_block_optin", 0), **software)


def amd_device(props: Any, index: int, software: Software, table: Table = GENERATIONS) -> Device:
    arch = props.gcnArchName.partition(":")[0]  # "gfx942:sramecc+:xnack-"
    row = generation_of_arch(arch, table)
    return Device(
        "cuda", index, props.name or arch, "amd", arch=arch, gpu_generation=row.name,
        supports_bf16=row.bf16, supports_fp8=row.fp8, supports_fp4=row.fp4,
        cores=props.multi_processor_count, total_memory=props.total_memory,
        shared_per_block=getattr(props, "shared_memory_per_block", 0), **software)


def xpu_device(props: Any, index: int, software: Software) -> Device:
    return Device("xpu", index, props.name, "intel", gpu_generation="unknown",
                  supports_bf16=bool(getattr(props, "has_bfloat16_conversions", False)),
                  cores=props.max_compute_units, total_memory=props.total_memory,
                  driver_version=props.driver_version, **software)


def hpu_device(name: str, index: int, software: Software) -> Device:
    """Describes a Gaudi. The first one has no fp8; its name carries no number."""
    return Device("hpu", index, name, "habana", gpu_generation="unknown", supports_bf16=True,
                  supports_fp8=bool(re.search(r"gaudi\s*[2-9]", name, re.IGNORECASE)), **software)


@dataclass(frozen=True)
class CPU:
    """A processor as the system describes it."""

    name: str
    vendor: str
    isa: tuple[str, ...]
    bf16: bool
    cores: int = 0


_CPU_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "0x61": "apple"}
_ARM_ISA = {"asimd": "neon", "neon": "neon", "asimdhp": "fp16", "asimddp": "dotprod",
            # Linux's flag -> ours
            "bf16": "bf16", "i8mm": "i8mm", "sve": "sve", "sve2": "sve2", "sme": "sme"}


def parse_cpuinfo(text: str) -> CPU:
    """Parses /proc/cpuinfo of x86 or ARM; of another processor, the fields they share."""
    blocks = [dict(_fields(block)) for block in text.split("\n\n")]
    blocks = [b for b in blocks if "processor" in b]
    first = next((b for b in blocks if "flags" in b or "Features" in b), blocks[0] if blocks
                 else {})
    arm = "Features" in first
    flags = set(first.get("Features" if arm else "flags", "").split())
    # big.LITTLE: only what every core has, since any may run a call
    if arm:
        flags.intersection_update(*(b["Features"].split() for b in blocks if "Features" in b))
    names = {_ARM_ISA[f] for f in flags if f in _ARM_ISA} if arm else flags
    vendor = first.get("CPU implementer" if arm else "vendor_id", "")
    cores = {(b["physical id"], b["core id"]) for b in blocks if "physical id" in b
             and "core id" in b}
    parts = {(b["CPU implementer"], b["CPU part"]) for b in blocks if "CPU implementer" in b
             and "CPU part" in b}
    name = " + ".join(sorted({core_name(*p) for p in parts})) if arm else ""
    return CPU(
        name=name or first.get("model name", ""),
        vendor=_CPU_VENDORS.get(vendor, "arm" if arm else "unknown"),
        isa=tuple(i for i in CPU_ISA if i in names),
        bf16=bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
        cores=len(cores) or len(blocks))


def _fields(block: str) -> list[tuple[str, str]]:
    return [(key.strip(), value.strip())
            for key, _, value in (line.partition(":") for line in block.splitlines())]


def cpu_from_capability(machine: str, name: str, capability: str) -> CPU:
    """Describes a CPU without /proc/cpuinfo by torch's capability: "AVX2", "AVX512", ..."""
    arm = machine.lower() in ("arm64", "aarch64")
    isa = {"AVX2": ("avx2",), "AVX512": ("avx2", "avx512f")}.get(capability, ())
    known = {"intel": "intel", "amd": "amd", "apple": "apple"}
    vendor = next((v for word, v in known.items() if word in name.lower()), "arm" if arm
                  else "unknown")
    return CPU(name, vendor, ("neon", "sve") if capability.startswith("SVE") else ("neon",) if arm
               else isa, bf16=False)


def cpu_device(cpu: CPU, total_memory: int, software: Software) -> Device:
    return Device("cpu", 0, cpu.name or "cpu", cpu.vendor, isa=cpu.isa, supports_bf16=cpu.bf16,
                  cores=cpu.cores, total_memory=total_memory, **software)


def parse_nvidia_driver(text: str) -> str:
    """Returns the version in /proc/driver/nvidia/version, of the closed or open module."""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)(?:\s|$)", text, re.MULTILINE)
    return match.group(1) if match else ""


def cudnn_text(number: int) -> str:
    """Returns cuDNN's version as text; it is packed as 91900 (9.19.0) since 9, as 8907 before."""
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


# Reading.

@cache
def triton_version() -> str:
    """Returns the version in the metadata: importing Triton is slow and may touch the driver."""
    for name in TRITON_DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@cache
def read_cpu() -> CPU:
    cpuinfo = _read_text("/proc/cpuinfo")
    if cpuinfo:
        cpu = parse_cpuinfo(cpuinfo)
        return (cpu if cpu.name else CPU(platform.machine(), cpu.vendor, cpu.isa, cpu.bf16,
                                         cpu.cores))
    name = _apple_brand() if sys.platform == "darwin" else platform.processor()
    cpu = cpu_from_capability(platform.machine(), name or platform.machine(),
                              torch.backends.cpu.get_cpu_capability())
    return CPU(cpu.name, cpu.vendor, cpu.isa, cpu.bf16, os.cpu_count() or 0)


def nvidia_driver_version() -> str:
    return parse_nvidia_driver(_read_text("/proc/driver/nvidia/version")) or _nvml_driver_version()


def _nvml_driver_version() -> str:
    """Asks NVML where the driver has no /proc entry (WSL, containers); CUDA is not started."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return ""
    return text.value.decode()


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _apple_brand() -> str:
    try:
        sysctl = subprocess.run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
                                capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return "Apple"
    return sysctl.stdout.strip() or "Apple"


def _system_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 0


def _cudnn_version() -> str:
    cudnn: Any = torch.backends.cudnn
    try:
        return cudnn_text(cudnn.version()) if cudnn.is_available() else ""
    # torch refuses a cuDNN it was not built for; nothing that needs it runs here
    except RuntimeError:
        return ""


def _read_cpu(index: int, table: Table, software: Software) -> Device:
    return cpu_device(read_cpu(), _system_memory(), software)


def _read_cuda(index: int, table: Table, software: Software) -> Device:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        driver = _read_text("/sys/module/amdgpu/version").strip()
        return amd_device(props, index, {**software, "driver_version": driver,
                                         "runtime_version": torch.version.hip}, table)
    return nvidia_device(props, index, {
        **software, "driver_version": nvidia_driver_version(), "runtime_version": torch.version.cuda
        or "", "cudnn_version": _cudnn_version()}, table)


def _read_xpu(index: int, table: Table, software: Software) -> Device:
    runtime = getattr(torch.version, "xpu", None) or ""
    return xpu_device(torch.xpu.get_device_properties(index), index,
                      {**software, "runtime_version": runtime})


def _read_hpu(index: int, table: Table, software: Software) -> Device:
    return hpu_device(_hpu().get_device_name(index) or "Gaudi", index, software)


def _read_mps(index: int, table: Table, software: Software) -> Device:
    """Describes Apple's GPU, which shares the chip's name and memory with the CPU. Metal has bf16
    since macOS 14."""
    return Device("mps", index, _apple_brand(), "apple", gpu_generation="unknown",
                  supports_bf16=torch.backends.mps.is_macos_or_newer(14, 0),
                  total_memory=_system_memory(), **software)


def _hpu() -> Any:
    """Returns torch.hpu, which exists once torch has imported the vendor's package; else None."""
    return getattr(torch, "hpu", None)


def _hpu_count() -> int:
    hpu = _hpu()
    return hpu.device_count() if hpu is not None and hpu.is_available() else 0


# device_count() asks NVML first; is_available() would start the driver and poison a fork.
_COUNT: Mapping[str, Callable[[], int]] = {
    "cpu": lambda: 1, "cuda": lambda: torch.cuda.device_count(),
    "xpu": lambda: torch.xpu.device_count(), "hpu": _hpu_count,
    "mps": lambda: int(torch.backends.mps.is_available())}
_READ: Mapping[str, Callable[[int, Table, Software], Device]] = {
    "cpu": _read_cpu, "cuda": _read_cuda, "xpu": _read_xpu, "hpu": _read_hpu, "mps": _read_mps}

KINDS = tuple(_READ)
