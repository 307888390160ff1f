"""The device as data, and how it is read: real texts and property values, no hardware needed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from layerzero.machine import hardware
from layerzero.spec import device as device_module
from layerzero.spec.device import (
    CPU_ISA,
    GENERATIONS,
    Device,
    Generation,
    GPUGeneration,
    generation_of,
    generation_of_arch,
    table_from_json,
)
from layerzero.spec.errors import ConfigError, DataError, SpecError
from layerzero.spec.op import DEVICE_FACTS
from layerzero.spec.rules import cpu_isa, generations, sm

MB = 1 << 20
SOFTWARE = {"torch_version": "2.11.0+cu130", "triton_version": "3.6.0",
            "driver_version": "580.159.04",
            "runtime_version": "13.0", "cudnn_version": "9.19.0"}

# What torch.cuda.get_device_properties says (memory to the nearest MB), and what must come of it:
# name, major, minor, MB, multiprocessors -> generation, tensor core, bf16, fp8, fp4
NVIDIA = [
    (("Tesla P100-PCIE-16GB", 6, 0, 16280, 56), ("pascal", 0, False, False, False)),
    (("Tesla V100-SXM2-32GB", 7, 0, 32510, 80), ("volta", 1, False, False, False)),
    (("Tesla T4", 7, 5, 15102, 40), ("turing", 3, False, False, False)),
    (("NVIDIA A100-SXM4-80GB", 8, 0, 81154, 108), ("ampere", 3, True, False, False)),
    (("NVIDIA GeForce RTX 3090", 8, 6, 24252, 82), ("ampere", 3, True, False, False)),
    (("Orin", 8, 7, 30622, 16), ("ampere", 3, True, False, False)),
    (("NVIDIA GeForce RTX 4090", 8, 9, 24207, 128), ("ada_lovelace", 3, True, True, False)),
    (("NVIDIA H200", 9, 0, 143156, 132), ("hopper", 4, True, True, False)),
    (("NVIDIA B200", 10, 0, 182642, 148), ("blackwell", 5, True, True, True)),
    (("NVIDIA GeForce RTX 5090", 12, 0, 32606, 170), ("blackwell", 5, True, True, True)),
    (("NVIDIA GB10", 12, 1, 122570, 48), ("blackwell", 5, True, True, True)),
    (("NVIDIA Later", 99, 9, 1000, 1), ("unknown", 5, True, True, True)),
    (("Tesla M40", 5, 2, 11448, 24), ("unknown", 0, False, False, False)),
]
AMD = [
    (("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 196592, 304),
     ("gfx942", "cdna3", True, False)),
    (("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 65520, 110),
     ("gfx90a", "cdna2", False, False)),
    (("AMD Instinct MI355X", "gfx950:sramecc+:xnack-", 294896, 256),
     ("gfx950", "cdna4", True, True)),
    (("AMD Radeon(TM) 8060S Graphics", "gfx1151", 80065, 20), ("gfx1151", "rdna3", False, False)),
    (("AMD Radeon VII", "gfx906:sramecc-:xnack-", 16368, 60), ("gfx906", "unknown", False, False)),
]

EPYC = """processor\t: {i}
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t: 160
model name\t: AMD EPYC 9754 128-Core Processor
physical id\t: {socket}
siblings\t: 4
core id\t: {core}
cpu cores\t: 2
flags\t: fpu vme sse4_2 x2apic movbe avx f16c bmi1 avx2 smep bmi2 avx512f avx512dq avx512ifma avx512cd \
avx512bw avx512vl avx512_bf16 clzero avx512vbmi avx512_vbmi2 gfni vaes avx512_vnni avx512_bitalg la57
power management:
"""
# Two sockets of two cores, two threads each.
EPYC_TEXT = "\n".join(EPYC.format(i=i, socket=i % 4 // 2, core=i % 2) for i in range(8))

XEON_TEXT = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu vme de fma avx f16c avx2 avx512f avx512dq avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 \
amx_tile amx_int8 flush_l1d arch_capabilities
bugs\t\t: spectre_v1 spectre_v2
"""

GRAVITON = """processor\t: {i}
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop \
sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""
RASPBERRY = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU part\t: 0xd08

Hardware\t: BCM2835
Model\t\t: Raspberry Pi 4 Model B Rev 1.1
"""
ASAHI = """processor\t: 0
Features\t: fp asimd evtstrm aes bf16
CPU implementer\t: 0x61
CPU part\t: 0x032
"""
N1 = """processor\t: {i}
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""
N1_TEXT = "\n".join(N1.format(i=i) for i in range(2))
BIG_LITTLE = """processor\t: 0
model name\t: ARMv8 Processor rev 0 (v8l)
Features\t: fp asimd asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd05

processor\t: 1
Features\t: fp asimd asimddp asimdhp i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd0b
"""
RISCV = """processor\t: 0
hart\t\t: 1
isa\t\t: rv64imafdc
mmu\t\t: sv39
"""


def nvidia(name: str, major: int, minor: int, megabytes: int, count: int) -> Device:
    props = SimpleNamespace(name=name, major=major, minor=minor, total_memory=megabytes * MB,
                            multi_processor_count=count)
    return hardware.nvidia_device(props, 0, SOFTWARE)


def amd(name: str, arch: str, megabytes: int, count: int) -> Device:
    props = SimpleNamespace(name=name, major=9, minor=4, gcnArchName=arch,
                            total_memory=megabytes * MB,
                            multi_processor_count=count)
    return hardware.amd_device(props, 0,
                               {"torch_version": "2.9.1+rocm6.4", "runtime_version": "6.4.43484"})


H200 = nvidia("NVIDIA H200", 9, 0, 143156, 132)
MI300 = amd(*AMD[0][0])
EPYC_CPU = hardware.cpu_device(hardware.parse_cpuinfo(EPYC_TEXT), 64 << 30,
                               {"torch_version": "2.13.0+cpu"})
SAMPLES = [H200, MI300, EPYC_CPU, *(nvidia(*p) for p, _ in NVIDIA), *(amd(*p) for p, _ in AMD)]


class TestGenerations:
    @pytest.mark.parametrize("sm_number,name", [
        (0, "unknown"), (59, "unknown"), (60, "pascal"), (69, "pascal"), (70, "volta"),
        (74, "volta"), (75, "turing"), (79, "turing"), (80, "ampere"), (88, "ampere"),
        (89, "ada_lovelace"), (90, "hopper"), (99, "hopper"),
        (100, "blackwell"), (129, "blackwell"), (130, "unknown"), (999, "unknown")])
    def test_edges_of_the_ranges(self, sm_number, name):
        assert generation_of(sm_number).name == name

    def test_enum_and_table_name_the_same_generations_in_the_same_order(self):
        assert [g.name.lower() for g in sorted(GPUGeneration)] == [r.name for r in GENERATIONS
                                                                   if r.sm_last]
        ordered = ["TURING", "AMPERE", "ADA_LOVELACE", "HOPPER", "BLACKWELL"]
        ages = [GPUGeneration[name] for name in ordered]
        assert all(a < b for a, b in pairwise(ages))

    def test_what_hardware_can_do_never_shrinks_with_age(self):
        rows = [r for r in GENERATIONS if r.sm_last]
        for older, newer in pairwise(rows):
            assert older.sm_last < newer.sm_first
            for ability in ("tensor_core", "bf16", "fp8", "fp4"):
                assert getattr(older, ability) <= getattr(newer, ability), (older, newer, ability)

    def test_override_answers_first_and_reaches_the_device(self):
        mine = table_from_json([{"name": "rubin", "sm_first": 130, "sm_last": 139, "tensor_core": 6,
                                 "bf16": True}])
        table = (*mine, *GENERATIONS)
        assert generation_of(130, table) == mine[0]
        assert generation_of(90, table).name == "hopper"
        props = SimpleNamespace(name="R100", major=13, minor=0, total_memory=1,
                                multi_processor_count=1)
        assert hardware.nvidia_device(props, 0, {}, table).gpu_generation == "rubin"
        assert hardware.nvidia_device(props, 0, {}).gpu_generation == "unknown"

    def test_an_sm_in_a_gap_is_unknown_with_the_older_rows_abilities(self):
        table = (Generation("old", 70, 75, tensor_core=1),
                 Generation("new", 90, 95, tensor_core=4, bf16=True, fp8=True))
        between, beyond = generation_of(80, table), generation_of(96, table)
        assert (between.name, between.tensor_core, between.bf16,
                between.fp8) == ("unknown", 1, False, False)
        assert (beyond.name, beyond.tensor_core, beyond.bf16,
                beyond.fp8) == ("unknown", 4, True, True)
        assert generation_of(80,
                             table[:1]).bf16, (
                                 "newer than all that is known: bf16 is taken for granted")

    def test_table_survives_json(self):
        rows = json.loads(json.dumps([dataclasses.asdict(r) for r in GENERATIONS]))
        assert table_from_json(rows) == GENERATIONS

    def test_amd_rows_can_be_overridden_too(self):
        mine = table_from_json([{"name": "vega20", "arch": "gfx906"}])
        assert generation_of_arch("gfx906", (*mine, *GENERATIONS)).name == "vega20"
        assert generation_of_arch("").name == "unknown"

    @pytest.mark.parametrize("rows,message", [
        ([], "non-empty list"),
        ({"name": "x"}, "non-empty list"),
        ("hopper", "non-empty list"),
        ([90], "row 0: wanted an object, got 90"),
        ([{"sm_first": 90, "sm_last": 99}], "missing: name;"),
        ([{"name": "x", "sm_first": 90, "sm_last": 99, "fp16": True}], "unknown: fp16;"),
        ([{"name": "x", "sm_first": "90", "sm_last": 99}],
         "sm_first: wanted a whole number, got '90'"),
        ([{"name": "x", "sm_first": 90, "sm_last": 99, "bf16": 1}],
         "bf16: wanted true or false, got 1"),
        ([{"name": "x", "sm_first": True, "sm_last": 99}],
         "sm_first: wanted a whole number, got True"),
        ([{"name": "x", "sm_first": -1, "sm_last": 99}], "sm_first must be >= 0"),
        ([{"name": "x", "sm_first": 99, "sm_last": 90}], "99 > 90"),
        ([{"name": "", "sm_first": 90, "sm_last": 99}], "needs a name"),
        ([{"name": "x"}], "either sm_first and sm_last or arch"),
        ([{"name": "x", "sm_first": 90, "sm_last": 99, "arch": "gfx9"}],
         "either sm_first and sm_last or arch"),
        ([{"name": "a", "sm_first": 80, "sm_last": 90},
          {"name": "b", "sm_first": 90, "sm_last": 99}], "overlap"),
    ])
    def test_bad_rows_are_refused(self, rows, message):
        with pytest.raises((DataError, SpecError)) as e:
            table_from_json(rows)
        assert message in str(e.value)


class TestDevice:
    @pytest.mark.parametrize("device", SAMPLES, ids=lambda d: d.name)
    def test_json_is_lossless_and_facts_are_complete(self, device):
        again = Device.from_json(json.loads(json.dumps(device.to_json())))
        assert again == device
        assert again.signature == device.signature
        assert device.facts().keys() == DEVICE_FACTS
        hash(device)

    @pytest.mark.parametrize("changes,message", [
        ({"type": "tpu"}, "type must be one of cpu, cuda"),
        ({"vendor": "3dfx"}, "vendor must be one of nvidia"),
        ({"name": " "}, "a cuda device needs a name"),
        ({"name": None}, "name must be of type str, got None"),
        ({"sm": 0}, "sm must be > 0"),
        ({"sm": "90"}, "sm must be of type int"),
        ({"sm": 9.0}, "sm must be of type int"),
        ({"index": -1}, "index must be >= 0"),
        ({"vendor": "amd"}, "0 for all others"),
        ({"gpu_generation": ""}, "gpu_generation must be ''"),
        ({"isa": ("avx2",)}, "isa is for a cpu"),
        ({"isa": ["avx2"]}, "isa must be of type tuple"),
        ({"isa": (1,)}, "isa must be of type tuple"),
        ({"supports_bf16": 1}, "supports_bf16 must be of type bool"),
        ({"total_memory": -5}, "total_memory must be >= 0"),
    ])
    def test_bad_data_is_refused(self, changes, message):
        with pytest.raises(SpecError) as e:
            dataclasses.replace(H200, **changes)
        assert message in str(e.value)

    def test_bad_cpu_is_refused(self):
        with pytest.raises(SpecError, match="got mmx"):
            dataclasses.replace(EPYC_CPU, isa=("avx2", "mmx"))
        with pytest.raises(SpecError, match="'hopper' for cpu"):
            dataclasses.replace(EPYC_CPU, gpu_generation="hopper")

    @pytest.mark.parametrize("data,message", [
        ({"type": "cpu"}, "missing: index, name, vendor;"),
        ({**H200.to_json(), "warp": 32}, "unknown: warp;"),
        ({**H200.to_json(), "isa": "avx2"}, "isa: wanted a list of text, got 'avx2'"),
        (None, "device: wanted an object"),
        ([], "device: wanted an object")])
    def test_bad_json_is_refused(self, data, message):
        with pytest.raises(DataError) as e:
            Device.from_json(data)
        assert message in str(e.value)

    def test_signature_follows_what_measurements_depend_on(self):
        for same in ({"index": 3}, {"total_memory": 1}):
            assert dataclasses.replace(H200, **same).signature == H200.signature, same
        for other in ({"name": "NVIDIA H100"}, {"cores": 114}, {"sm": 100}, {"supports_fp4": True},
                      {"driver_version": "580.95.05"}, {"runtime_version": "12.8"},
                      {"cudnn_version": "9.8.0"}, {"torch_version": "2.12.0"},
                      {"triton_version": "3.7.0"}):
            assert dataclasses.replace(H200, **other).signature != H200.signature, other
        assert dataclasses.replace(EPYC_CPU, isa=("avx2",)).signature != EPYC_CPU.signature

    def test_signature_is_the_same_in_every_process_and_release(self):
        plain = Device("cpu", 0, "a", "intel", isa=("avx2",), cores=2, torch_version="2.8.0")
        assert plain.signature == "450bf8380c11a935"

    def test_facts_feed_the_rules(self):
        facts = H200.facts()
        assert facts["cuda_version"] == "13.0"
        assert sm(at_least=90).check(facts) is None
        assert sm(at_least=100).check(facts).got == 90
        assert generations("blackwell").check(facts).got == "hopper"
        assert cpu_isa("avx512_bf16").check(EPYC_CPU.facts()) is None
        assert cpu_isa("amx_tile").check(EPYC_CPU.facts()) is not None

    def test_hip_is_not_a_cuda_version(self):
        assert MI300.runtime_version == "6.4.43484"
        assert MI300.facts()["cuda_version"] == ""

    def test_generations_compare_by_age(self):
        assert H200.generation is GPUGeneration.HOPPER
        assert H200.generation > nvidia(*NVIDIA[2][0]).generation
        assert MI300.generation is None
        assert EPYC_CPU.generation is None

    def test_the_data_module_imports_no_torch(self):
        tree = ast.parse(inspect.getsource(device_module))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {n for n in names if n.split(".")[0] in ("torch", "triton", "numpy")}, names


class TestFromProperties:
    @pytest.mark.parametrize("props,expected", NVIDIA, ids=[p[0] for p, _ in NVIDIA])
    def test_nvidia(self, props, expected):
        d = nvidia(*props)
        assert (d.type, d.vendor, d.name, d.arch) == ("cuda", "nvidia", props[0], "")
        assert d.sm == 10 * props[1] + props[2]
        assert (d.gpu_generation, d.tensor_core_generation, d.supports_bf16, d.supports_fp8,
                d.supports_fp4) == expected
        assert (d.total_memory, d.cores) == (props[3] * MB, props[4])
        assert {k: getattr(d, k) for k in SOFTWARE} == SOFTWARE

    @pytest.mark.parametrize("props,expected", AMD, ids=[p[0] for p, _ in AMD])
    def test_amd(self, props, expected):
        d = amd(*props)
        assert (d.type, d.vendor, d.sm, d.tensor_core_generation) == ("cuda", "amd", 0, 0)
        assert (d.arch, d.gpu_generation, d.supports_fp8, d.supports_fp4) == expected
        assert d.supports_bf16

    def test_intel_gpu(self):
        props = SimpleNamespace(name="Intel(R) Data Center GPU Max 1550",
                                driver_version="1.6.31294+20", max_compute_units=512,
                                total_memory=65536 * MB, has_bfloat16_conversions=True)
        d = hardware.xpu_device(props, 1, {"runtime_version": "20250101"})
        assert (d.type, d.index, d.vendor, d.supports_bf16) == ("xpu", 1, "intel", True)
        assert d.driver_version == "1.6.31294+20"
        assert d.facts()["cuda_version"] == ""
        del props.has_bfloat16_conversions  # a torch that does not tell
        assert not hardware.xpu_device(props, 0, {}).supports_bf16

    @pytest.mark.parametrize("name,fp8", [("GAUDI", False), ("GAUDI2", True), ("GAUDI3", True)])
    def test_gaudi(self, name, fp8):
        d = hardware.hpu_device(name, 0, {})
        assert (d.vendor, d.supports_bf16, d.supports_fp8) == ("habana", True, fp8)

    @pytest.mark.parametrize("number,text", [(91900, "9.19.0"), (90100, "9.1.0"), (8907, "8.9.7"),
                                             (8500, "8.5.0")])
    def test_cudnn(self, number, text):
        assert hardware.cudnn_text(number) == text

    @pytest.mark.parametrize("text,version", [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  "
            "(builder)  Tue Sep 23\n"
            + "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04.2) \n", "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.135  Fri Jan 10 20:00:00 UTC 2025\n",
         "550.135"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  590.48.01", "590.48.01"),
        ("GCC version:  gcc version 11.4.0\n", ""),
        ("", "")])
    def test_nvidia_driver(self, text, version):
        assert hardware.parse_nvidia_driver(text) == version


class TestCPU:
    @pytest.mark.parametrize("text,expected", [
        (EPYC_TEXT, hardware.CPU("AMD EPYC 9754 128-Core Processor", "amd",
                                 ("avx2", "avx512f", "avx512_bf16", "avx512_vnni"), True, 4)),
        (XEON_TEXT, hardware.CPU("Intel(R) Xeon(R) Processor", "intel", CPU_ISA[:9], True, 1)),
        ("\n".join(GRAVITON.format(i=i) for i in range(3)),
         hardware.CPU("Neoverse-V1", "arm", ("neon", "fp16", "dotprod", "bf16", "i8mm", "sve"),
                      True, 3)),
        (N1_TEXT, hardware.CPU("Neoverse-N1", "arm", ("neon", "fp16", "dotprod"), False, 2)),
        (RASPBERRY, hardware.CPU("Cortex-A72", "arm", ("neon",), False, 1)),
        (ASAHI, hardware.CPU("Apple M2 Blizzard", "apple", ("neon", "bf16"), True, 1)),
        (BIG_LITTLE, hardware.CPU("Cortex-A55 + Cortex-A76", "arm", ("neon", "dotprod"), False, 2)),
        (RASPBERRY.replace("0xd08", "0xfff"),
         hardware.CPU("ARM core 0x41/0xfff", "arm", ("neon",), False, 1)),
        (RASPBERRY.replace("0x41", "0xee"),
         hardware.CPU("ARM core 0xee/0xd08", "arm", ("neon",), False, 1)),
        (RISCV, hardware.CPU("", "unknown", (), False, 1)),
        ("", hardware.CPU("", "unknown", (), False, 0)),
        ("garbage\n\n: : :\n", hardware.CPU("", "unknown", (), False, 0)),
    ], ids=["epyc", "xeon", "graviton3", "neoverse-n1", "raspberry", "asahi", "two kinds of cores",
            "unknown part", "unknown implementer", "riscv", "empty", "garbage"])
    def test_cpuinfo(self, text, expected):
        assert hardware.parse_cpuinfo(text) == expected
        assert hardware.cpu_device(expected, 0, {}).name

    def test_the_signature_of_a_core_is_the_same_on_every_boot(self):
        clock = N1_TEXT.replace("243.75", "50.00")
        small = hardware.cpu_device(hardware.parse_cpuinfo(N1_TEXT), 8 << 30,
                                    {"torch_version": "2.13.0"})
        assert small.signature == hardware.cpu_device(
            hardware.parse_cpuinfo(clock), 16 << 30, {"torch_version": "2.13.0"}).signature
        other = hardware.cpu_device(hardware.parse_cpuinfo(N1_TEXT.replace("0xd0c", "0xd49")), 0,
                                    {})
        assert (other.name, other.signature == small.signature) == ("Neoverse-N2", False)

    def test_hyperthreads_are_not_cores(self):
        one = XEON_TEXT.replace("core id\t\t: 0", "core id\t\t: 1")
        assert hardware.parse_cpuinfo("\n".join(2 * [XEON_TEXT, one])).cores == 2

    @pytest.mark.parametrize("text,bf16,fp16", [
        (EPYC_TEXT, True, False), (XEON_TEXT, True, True), (GRAVITON.format(i=0), True, False),
        (N1_TEXT, False, False),
        # amx_bf16
        (RASPBERRY, False, False), (XEON_TEXT.replace("avx512", "avx2"), True, False),
        (XEON_TEXT.replace("avx512", "avx2").replace("amx_bf16", ""), False, False)])
    def test_which_matmuls_torch_has_instructions_for(self, text, bf16, fp16):
        facts = hardware.cpu_device(hardware.parse_cpuinfo(text), 0, {}).facts()
        assert (facts["fast_bf16_matmul"], facts["fast_fp16_matmul"]) == (bf16, fp16)

    @pytest.mark.parametrize("machine,name,capability,vendor,isa", [
        ("arm64", "Apple M3 Max", "DEFAULT", "apple", ("neon",)),
        ("AMD64", "Intel64 Family 6 Model 85 Stepping 7, GenuineIntel", "AVX512", "intel",
         ("avx2", "avx512f")),
        ("AMD64", "AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", "AVX2", "amd", ("avx2",)),
        ("x86_64", "Intel(R) Core(TM) i7", "NO AVX", "intel", ()),
        ("ARM64", "ARMv8 (64-bit) Family 8 Model 1", "DEFAULT", "arm", ("neon",)),
        ("aarch64", "", "SVE256", "arm", ("neon", "sve")),
        ("riscv64", "", "DEFAULT", "unknown", ())])
    def test_without_cpuinfo(self, machine, name, capability, vendor, isa):
        cpu = hardware.cpu_from_capability(machine, name, capability)
        assert (cpu.vendor, cpu.isa, cpu.name) == (vendor, isa, name)
        assert hardware.cpu_device(cpu, 0, {}).type == "cpu"


class TestThisMachine:
    def test_cpu_agrees_with_torch_and_the_system(self):
        d = hardware.probe("cpu")
        capability = torch.backends.cpu.get_cpu_capability()
        assert {"AVX2": "avx2", "AVX512": "avx512f"}.get(capability) in (None, *d.isa)
        assert 0 < d.cores <= (os.cpu_count() or 1)
        assert d.torch_version == torch.__version__
        assert d.facts()["device"] == "cpu"
        if hasattr(os, "sysconf"):
            assert d.total_memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def test_what_is_present_can_be_probed(self):
        kinds = hardware.present()
        assert "cpu" in kinds
        assert tuple(dict.fromkeys(d.type for d in hardware.all_devices())) == kinds
        assert ("cuda" in kinds) == (torch.cuda.device_count() > 0)

    def test_a_probe_is_remembered_until_forgotten(self):
        first = hardware.probe("cpu")
        assert hardware.probe("cpu", 0) is first
        hardware.forget()
        second = hardware.probe("cpu")
        assert second is not first
        assert second == first

    @pytest.mark.parametrize("kind,index,message", [
        ("tpu", 0, "must be one of cpu, cuda, xpu, hpu, mps, got 'tpu'"),
        ("cuda:0", 0, "got 'cuda:0'"),
        ("cpu", 1, "cpu:1 does not exist"),
        ("cpu", -1, "cpu:-1 does not exist")])
    def test_a_device_that_cannot_be(self, kind, index, message):
        with pytest.raises(ConfigError) as e:
            hardware.probe(kind, index)
        assert message in str(e.value)

    def test_a_missing_backend_says_what_is_there_instead(self):
        missing = [kind for kind in ("cuda", "xpu", "hpu", "mps") if kind not in hardware.present()]
        assert missing, "no machine has all of them"
        for kind in missing:
            with pytest.raises(ConfigError, match=f"no {kind} device is usable here; present: cpu"):
                hardware.probe(kind)
