"""The names of ARM cores: /proc/cpuinfo gives two numbers, its maker and its part.

The numbers are those of the register MIDR_EL1, as ARM's manuals and Linux's headers assign them.
"""

from __future__ import annotations

from collections.abc import Mapping

_ARM: Mapping[int, str] = {
    0xd03: "Cortex-A53", 0xd04: "Cortex-A35", 0xd05: "Cortex-A55", 0xd06: "Cortex-A65",
    0xd07: "Cortex-A57", 0xd08: "Cortex-A72", 0xd09: "Cortex-A73", 0xd0a: "Cortex-A75",
    0xd0b: "Cortex-A76", 0xd0c: "Neoverse-N1", 0xd0d: "Cortex-A77", 0xd0e: "Cortex-A76AE",
    0xd40: "Neoverse-V1", 0xd41: "Cortex-A78", 0xd42: "Cortex-A78AE", 0xd44: "Cortex-X1",
    0xd46: "Cortex-A510", 0xd47: "Cortex-A710", 0xd48: "Cortex-X2", 0xd49: "Neoverse-N2",
    0xd4a: "Neoverse-E1", 0xd4b: "Cortex-A78C", 0xd4c: "Cortex-X1C", 0xd4d: "Cortex-A715",
    0xd4e: "Cortex-X3", 0xd4f: "Neoverse-V2", 0xd80: "Cortex-A520", 0xd81: "Cortex-A720",
    0xd82: "Cortex-X4", 0xd83: "Neoverse-V3AE", 0xd84: "Neoverse-V3", 0xd85: "Cortex-X925",
    0xd87: "Cortex-A725", 0xd8e: "Neoverse-N3",
}
_CORES: Mapping[int, Mapping[int, str]] = {
    0x41: _ARM,
    0x46: {0x001: "Fujitsu A64FX", 0x003: "Fujitsu Monaka"},
    0x48: {0xd01: "HiSilicon Kunpeng-920", 0xd02: "HiSilicon TaiShan-v120",
           0xd40: "HiSilicon Cortex-A76"},
    0x4e: {0x003: "NVIDIA Denver-2", 0x004: "NVIDIA Carmel", 0x010: "NVIDIA Olympus"},
    0x51: {0x001: "Qualcomm Oryon", 0x800: "Qualcomm Kryo-2XX-Gold",
           0x801: "Qualcomm Kryo-2XX-Silver", 0x802: "Qualcomm Kryo-3XX-Gold",
           0x803: "Qualcomm Kryo-3XX-Silver", 0x804: "Qualcomm Kryo-4XX-Gold",
           0x805: "Qualcomm Kryo-4XX-Silver", 0xc00: "Qualcomm Falkor", 0xc01: "Qualcomm Saphira"},
    0x61: {0x022: "Apple M1 Icestorm", 0x023: "Apple M1 Firestorm", 0x024: "Apple M1 Pro Icestorm",
           0x025: "Apple M1 Pro Firestorm", 0x028: "Apple M1 Max Icestorm",
           0x029: "Apple M1 Max Firestorm", 0x032: "Apple M2 Blizzard", 0x033: "Apple M2 Avalanche",
           0x034: "Apple M2 Pro Blizzard", 0x035: "Apple M2 Pro Avalanche",
           0x038: "Apple M2 Max Blizzard", 0x039: "Apple M2 Max Avalanche"},
    0x6d: {0xd49: "Microsoft Azure Cobalt 100"},
    0xc0: {0xac3: "Ampere-1", 0xac4: "Ampere-1A", 0xac5: "Ampere-1B"},
}


def core_name(implementer: str, part: str) -> str:
    """Returns a core's name: "Neoverse-N1" for "0x41" and "0xd0c"; the two numbers if unknown."""
    try:
        return _CORES[int(implementer, 16)][int(part, 16)]
    except (KeyError, ValueError):
        return f"ARM core {implementer or '?'}/{part or '?'}"
