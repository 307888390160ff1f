"""One device as selection sees it: pure data, no torch.

What a compute capability means (generation, tensor cores, low-precision formats) is a table of
rows, so that a configuration can correct it or name hardware newer than this release.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from .codec import Record
from .errors import SpecError

DEVICE_TYPES = ("cpu", "cuda", "xpu", "hpu", "mps")
VENDORS = ("nvidia", "amd", "intel", "apple", "habana", "arm", "unknown")
CPU_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx_vnni",
           "amx_tile", "amx_bf16", "amx_int8", "avx_ne_convert",
           # ARM: as compilers name them
           "neon", "fp16", "dotprod", "bf16", "i8mm", "sve", "sve2", "sme")
# With one of these torch multiplies matrices of the type by oneDNN. Without, an element at a time:
# 20 to 230 times slower than float32 on a Neoverse-N1, which computes in float16 ("fp16") and is no
# faster for it in torch.
FAST_BF16_MATMUL = ("avx512f", "avx_ne_convert", "amx_bf16", "bf16")
FAST_FP16_MATMUL = ("avx512_fp16", "avx_ne_convert")

_TYPES: Mapping[str, type] = {"str": str, "int": int, "bool": bool, "tuple[str, ...]": tuple}


def _check_types(value: Any, owner: str) -> None:
    """Raise unless every field has exactly its declared type and no number is negative."""
    for f in fields(value):
        got = getattr(value, f.name)
        if (type(got) is not _TYPES[str(f.type)]
            or (type(got) is tuple and not all(type(v) is str for v in got))):
            raise SpecError(f"{owner}: {f.name} must be of type {f.type}, got {got!r}")
        if type(got) is int and got < 0:
            raise SpecError(f"{owner}: {f.name} must be >= 0, got {got}")


class GPUGeneration(IntEnum):
    """NVIDIA generations, oldest first, so that they compare by age."""

    PASCAL = 1
    VOLTA = 2
    TURING = 3
    AMPERE = 4
    ADA_LOVELACE = 5
    HOPPER = 6
    BLACKWELL = 7


@dataclass(frozen=True)
class Generation(Record):
    """The abilities of one range of NVIDIA SMs, or of one AMD architecture."""

    name: str
    sm_first: int = 0
    sm_last: int = 0
    arch: str = ""                             # of AMD; a prefix: "gfx11" is gfx1100, gfx1101, ...
    tensor_core: int = 0
    bf16: bool = False                         # in hardware; a library may still emulate it
    fp8: bool = False
    fp4: bool = False

    def __post_init__(self) -> None:
        owner = f"generation {self.name!r}"
        _check_types(self, owner)
        if not self.name:
            raise SpecError("a generation needs a name such as 'hopper', got ''")
        if bool(self.arch) == bool(self.sm_last):
            raise SpecError(f"{owner} must give either sm_first and sm_last or arch, "
                            f"got SM {self.sm_first}-{self.sm_last} and arch {self.arch!r}")
        if self.sm_first > self.sm_last:
            raise SpecError(
                f"{owner}: sm_first must be <= sm_last, got {self.sm_first} > {self.sm_last}")


Table = tuple[Generation, ...]

# The tensor core number is that of the instructions kernels are written for: 3 is mma (WMMA), 4 is
# WGMMA, 5 is TCGEN05. SM 120 and up have Blackwell's formats but not TCGEN05: such a kernel reads
# sm.
GENERATIONS: Table = (
    Generation("pascal", 60, 69),
    Generation("volta", 70, 74, tensor_core=1),
    Generation("turing", 75, 79, tensor_core=3),
    Generation("ampere", 80, 88, tensor_core=3, bf16=True),
    Generation("ada_lovelace", 89, 89, tensor_core=3, bf16=True, fp8=True),
    Generation("hopper", 90, 99, tensor_core=4, bf16=True, fp8=True),
    Generation("blackwell", 100, 129, tensor_core=5, bf16=True, fp8=True, fp4=True),
    Generation("cdna1", arch="gfx908", bf16=True),
    Generation("cdna2", arch="gfx90a", bf16=True),
    Generation("cdna3", arch="gfx94", bf16=True, fp8=True),
    Generation("cdna4", arch="gfx95", bf16=True, fp8=True, fp4=True),
    Generation("rdna3", arch="gfx11", bf16=True),
    Generation("rdna4", arch="gfx12", bf16=True, fp8=True),
)


def generation_of(sm: int, table: Table = GENERATIONS) -> Generation:
    """Returns the first row with `sm`; else an "unknown" row like the newest older one."""
    rows = [row for row in table if row.sm_last]
    for row in rows:
        if row.sm_first <= sm <= row.sm_last:
            return row
    older = max((row for row in rows if row.sm_last < sm), key=lambda row: row.sm_last,
                default=None)
    if older is None:
        return Generation("unknown", 0, max(sm, 1))
    newer_than_all = older.sm_last == max(row.sm_last for row in rows)
    return replace(older, name="unknown", sm_first=sm, sm_last=sm, bf16=older.bf16
                   or newer_than_all)


def generation_of_arch(arch: str, table: Table = GENERATIONS) -> Generation:
    """Returns the first row with the AMD architecture `arch`; all of ROCm's have bf16."""
    for row in table:
        if row.arch and arch.startswith(row.arch):
            return row
    return Generation("unknown", arch=arch or "unknown", bf16=True)


def table_from_json(rows: Any) -> Table:
    """Returns a table from plain dicts with the fields of `Generation`. It stands alone;
    `(*table_from_json(rows), *GENERATIONS)` puts it in front of the built-in one."""
    if not isinstance(rows, (list, tuple)) or not rows:
        raise SpecError(f"a generation table must be a non-empty list of rows, got {rows!r}")
    table = tuple(Generation.from_json(row, f"generation row {i}") for i, row in enumerate(rows))
    for i, row in enumerate(table):
        for other in table[:i]:
            if (row.sm_last and other.sm_last and row.sm_first <= other.sm_last
                and other.sm_first <= row.sm_last):
                raise SpecError(
                    f"generation rows {other.name!r} (SM {other.sm_first}-{other.sm_last}) and "
                    f"{row.name!r} (SM {row.sm_first}-{row.sm_last}) overlap; give each SM one row")
    return table


@dataclass(frozen=True)
class Device(Record):
    """One device and the software that drives it. Unknown text is "", an unknown number 0."""

    # torch's device type; ROCm is "cuda" with vendor "amd"
    type: str
    index: int
    name: str
    vendor: str
    sm: int = 0                                # 10 x major + minor; 0 when not NVIDIA
    arch: str = ""                             # of AMD: "gfx942"
    gpu_generation: str = ""                   # "" for a CPU
    tensor_core_generation: int = 0
    supports_bf16: bool = False                # in hardware
    supports_fp8: bool = False
    supports_fp4: bool = False
    isa: tuple[str, ...] = ()                  # of a CPU, in the order of CPU_ISA
    cores: int = 0                             # physical cores, multiprocessors or compute units
    total_memory: int = 0                      # bytes
    # bytes of shared memory that a block of a GPU may ask for
    shared_per_block: int = 0
    driver_version: str = ""
    runtime_version: str = ""                  # CUDA, HIP or SYCL, as torch was built for
    cudnn_version: str = ""
    torch_version: str = ""
    triton_version: str = ""

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        _check_types(self, owner)
        if self.type not in DEVICE_TYPES:
            raise SpecError(
                f"{owner}: type must be one of {', '.join(DEVICE_TYPES)}, got {self.type!r}")
        if self.vendor not in VENDORS:
            raise SpecError(
                f"{owner}: vendor must be one of {', '.join(VENDORS)}, got {self.vendor!r}")
        if not self.name.strip():
            raise SpecError(
                f"a {self.type} device needs a name, got {self.name!r}: measurements are kept "
                "under it")
        is_nvidia_gpu = self.type == "cuda" and self.vendor == "nvidia"
        if bool(self.sm) != is_nvidia_gpu:
            raise SpecError(
                f"{owner}: sm must be > 0 for cuda devices of nvidia and 0 for all others, "
                f"got {self.sm} for {self.type} of {self.vendor}")
        if bool(self.gpu_generation) != (self.type != "cpu"):
            raise SpecError(
                f"{owner}: gpu_generation must be '' for a cpu and a name or 'unknown' for all "
                f"others, got {self.gpu_generation!r} for {self.type}")
        if self.isa and self.type != "cpu":
            raise SpecError(f"{owner}: isa is for a cpu, got {', '.join(self.isa)} for {self.type}")
        unknown = [name for name in self.isa if name not in CPU_ISA]
        if unknown:
            raise SpecError(
                f"{owner}: isa must be among {', '.join(CPU_ISA)}, got {', '.join(unknown)}")

    @property
    def generation(self) -> GPUGeneration | None:
        """The generation as a value that compares by age; None for one that is not of NVIDIA."""
        return GPUGeneration.__members__.get(self.gpu_generation.upper())

    def has_fast_matmul(self, isa: tuple[str, ...]) -> bool:
        """Returns whether torch's matmul of a dtype that needs one of `isa` is fast here."""
        return self.type != "cpu" or not set(isa).isdisjoint(self.isa)

    @cached_property
    def signature(self) -> str:
        """A hash of hardware and software, for which measurements and certificates are valid.

        The index is left out, and memory too: the reported size varies by a few pages and decides
        no speed, and shared memory follows from the model.
        """
        left_out = ("index", "total_memory", "shared_per_block")
        identity = {k: v for k, v in self.to_json().items() if k not in left_out}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """Returns the facts that rules may read of a device; the keys are DEVICE_FACTS."""
        return {
            "device": self.type, "vendor": self.vendor, "sm": self.sm,
            "gpu_generation": self.gpu_generation,
            "tensor_core_generation": self.tensor_core_generation, "isa": self.isa,
            "fast_bf16_matmul": self.has_fast_matmul(FAST_BF16_MATMUL),
            "fast_fp16_matmul": self.has_fast_matmul(FAST_FP16_MATMUL),
            "supports_bf16": self.supports_bf16, "supports_fp8": self.supports_fp8,
            "supports_fp4": self.supports_fp4, "torch_version": self.torch_version,
            "shared_per_block": self.shared_per_block,
            # HIP's number is no CUDA version
            "cuda_version": self.runtime_version if self.sm else "",
        }
