"""Our CPU kernels on this processor and on others: compiled for each, run here or under qemu,
against plain loops; those of quantized weights against their portable twin, to the bit.

qemu-user emulates AVX2, NEON and SVE but not AVX-512 and AMX, whose code is compiled all the same
and run where the CPU has it; what AMX's tiles multiply is checked here, on tile instructions in
plain C++. Other processors than this one, and what the library builds here and other tests run,
only with LZ_TEST_FULL=1; on Debian they want
apt-get install g++-x86-64-linux-gnu g++-aarch64-linux-gnu qemu-user
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from layerzero.backends.native.build import FLAGS, FOLDER, sve_bytes
from layerzero.machine import hardware

HOME = Path(__file__).parent
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
HERE = MACHINES.get(platform.machine().lower(), "")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
DOTPROD = ("-march=armv8.2-a+dotprod+fp16",)
VNNI = ("-march=x86-64-v4", "-mavx512vnni")
# What is built: the program, machine, options, the vectors the program says it has, what the CPU
# must have to run it.
TARGETS = {
    "aarch64 NEON": ("kernels", "aarch64", (), "NEON, vectors of 16 bytes", "neon"),
    "x86-64": ("kernels", "x86_64", (), "no wide vectors, vectors of 16 bytes", ""),
    "x86-64 AVX2": ("kernels", "x86_64", AVX2, "AVX2, vectors of 32 bytes", "avx2"),
    "x86-64 AVX-512": ("kernels", "x86_64", ("-march=x86-64-v4",), "AVX-512, vectors of 64 bytes",
                       "avx512f"),
    "quantized aarch64 dotprod": ("quant", "aarch64", DOTPROD, "neon dotprod", "dotprod"),
    "quantized aarch64 i8mm": ("quant", "aarch64", ("-march=armv8.6-a+fp16",), "neon i8mm", "i8mm"),
    "quantized aarch64 SVE of 256 bits": (
        "quant", "aarch64", ("-march=armv8.6-a+sve+fp16", "-msve-vector-bits=256"), "sve i8mm",
        "sve256"),
    "quantized aarch64 SVE of 512 bits": (
        "quant", "aarch64", ("-march=armv8.2-a+sve+fp16", "-msve-vector-bits=512"), "sve:",
        "sve512"),
    "quantized tiles": ("quant", HERE, ("-O0", "-DEMULATED_TILES"), "emulated tiles", ""),
    "quantized x86-64 AMX": ("quant", "x86_64", ("-march=sapphirerapids",),
                             "avx512 vnni + amx", "amx_int8"),
    "quantized x86-64 AVX2": ("quant", "x86_64", AVX2, "avx2", "avx2"),
    "quantized x86-64 VNNI": ("quant", "x86_64", VNNI, "avx512 vnni", "avx512_vnni"),
}
FULL = os.environ.get("LZ_TEST_FULL") == "1"   # also for other machines: minutes of compiling
# The widest first of what a processor of this kind may have: the library's own build is that.
WIDEST = {"kernels": ("avx512f", "avx2", "neon"),
          "quant": ("amx_int8", "avx512_vnni", "avx2", "sve512", "sve256", "i8mm", "dotprod")}
QEMU_LACKS = ("avx512f", "avx512_vnni", "amx_int8")


def has(isa: str) -> bool:
    if isa.startswith("sve"):                  # with the length of its vectors
        return f"sve{8 * sve_bytes()}" == isa
    return not isa or isa in hardware.probe("cpu").isa


def is_own_build(program: str, isa: str) -> bool:
    return isa == next((wide for wide in WIDEST[program] if has(wide)), None)


def compiler_for(machine: str) -> str:
    path = shutil.which("g++" if machine == HERE else f"{machine}-linux-gnu-g++")
    if path is None:
        pytest.skip(
            f"no compiler for {machine}: Debian's package is "
            f"g++-{machine.replace('_', '-')}-linux-gnu")
    return path


def command_for(machine: str, isa: str, program: Path) -> list[str]:
    if machine == HERE and has(isa):
        return [str(program)]
    if isa in QEMU_LACKS:
        pytest.skip(f"compiled; this CPU has no {isa}, and qemu does not emulate it")
    qemu = shutil.which(f"qemu-{machine}")
    if qemu is None:
        pytest.skip(f"compiled; no qemu-{machine} to run it: Debian's package is qemu-user")
    libraries = [] if machine == HERE else ["-L", f"/usr/{machine}-linux-gnu"]
    length = f",sve-max-vq={int(isa[3:]) // 128}" if isa.startswith("sve") else ""
    return [qemu, *libraries, "-cpu", f"max{length}", str(program)]


@pytest.mark.integration
@pytest.mark.parametrize("target", [name for name, (_, machine, *_) in TARGETS.items()
                                    if FULL or machine == HERE])
def test_kernels(target: str, tmp_path: Path) -> None:
    program_name, machine, options, says, isa = TARGETS[target]
    if not FULL and not has(isa):
        pytest.skip(f"this CPU has no {isa}: compiled, and run under qemu, with LZ_TEST_FULL=1")
    if not FULL and is_own_build(program_name, isa):
        pytest.skip("what the library builds here, which other tests run; LZ_TEST_FULL=1: too")
    program = tmp_path / "kernels_test"
    # nearly all the time goes into compiling: without optimization a third less
    compiled = subprocess.run([compiler_for(machine), *FLAGS, "-O2" if FULL else "-O0", *options,
                               f"-I{FOLDER}", str(HOME / f"{program_name}_test.cpp"), "-o",
                               str(program)], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run(command_for(machine, isa, program), capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout and ", 0 failed" in done.stdout
