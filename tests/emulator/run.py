"""Runs our CUDA kernels on the CPU: compiles a .cu with g++ against tests/emulator/device.h."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from layerzero.backends.cuda import HARDWARE, KERNELS, compiler
from layerzero.spec.kernel import Kernel as Declared
from layerzero.verify.kernel.contract import check_case

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "layerzero" / "backends" / "cuda"
COMPILER = shutil.which("g++") or shutil.which("c++")
FAILURES = {1: "threads wait for one that never comes",
            2: "a write past the end of the shared memory",
            3: "an access of 16 bytes that is not aligned to 16",
            4: "an mbarrier outside of a cluster"}


class Emulated:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, params: bytes,
               shared: int = 0,
               cluster: int = 1) -> None:
        if grid[0] % cluster:
            raise ValueError(
                f"a grid of {grid[0]} blocks along x does not divide into clusters of {cluster}")
        kernel = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        code = self.library.lz_emulate(kernel, *grid, threads, shared, cluster,
                                       ctypes.c_char_p(params))
        if code:
            raise RuntimeError(f"{name}: {FAILURES[code]}")


@lru_cache(maxsize=None)
def _built(source: Path, macros: tuple[tuple[str, int], ...]) -> Emulated:
    if COMPILER is None:
        raise RuntimeError("no C++ compiler (g++) was found")
    text = source.read_bytes()
    name = source.relative_to(SOURCES) if source.is_relative_to(SOURCES) else source
    folders = (HERE, *compiler.header_folders(name))
    # what is long takes longer to optimise than to run
    command = [COMPILER, "-O1" if len(text) > 25_000 else "-O2", "-std=c++17", "-shared", "-fPIC",
               "-w", "-U_FORTIFY_SOURCE", "-x", "c++", *(word for folder in folders for word in ("-I", str(folder))),
               *(f"-D{name}={value}" for name, value in macros), "-"]
    headers = b"".join(p.read_bytes() for folder in folders for p in sorted(folder.glob("*.h")))
    key = hashlib.sha256(text + headers + " ".join(command).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"layerzero-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    library = folder / f"{key}.so"
    if not library.exists():
        draft = folder / f"{key}.{os.getpid()}.so"
        process = subprocess.run([*command, "-o", str(draft)], input=text, capture_output=True,
                                 cwd=HERE)
        if process.returncode:
            raise RuntimeError(
                f"{source.name} does not compile:\n{process.stderr.decode()[-4000:]}")
        draft.replace(library)                      # another worker may have built the same
    return Emulated(library)


def built(source: Path | str, **macros: int) -> Emulated:
    """`source`: a path, or the name of a file in backends/cuda."""
    return _built(SOURCES / source, tuple(sorted(macros.items())))


class Kernel(compiler.CompiledCuda):
    """A kernel as backends.cuda.compiler.kernel returns it, for tensors on the CPU."""

    def __init__(self, source: str, name: str, macros: tuple[tuple[str, int], ...], threads: int,
                 shared: int = 0,
                 cluster: int = 1) -> None:
        super().__init__(source, name, macros, threads, shared, cluster)
        self.emulated = built(source, **dict(macros))

    def start(self, grid: tuple[int, int, int], params: bytes) -> int:
        self.emulated.launch(self.name, grid, self.threads, params, self.shared, self.cluster)
        return -1

    def resident_clusters(self) -> int:
        return 1 << 20

    def handle(self, device: int) -> tuple[int, int]:
        """Returns a launch function with the driver's signature that runs the emulator."""
        library = self.emulated.library
        call, function = (ctypes.cast(f, ctypes.c_void_p).value
                          for f in (library.lz_launch, library[self.name]))
        assert call and function
        return call, function


def on_cpu(name: str) -> Declared:
    """Returns a kernel of backends/cuda as it is declared, without its hardware rules."""
    kernel = next(k for k in KERNELS if k.id == name)
    rules = tuple(rule for rule in kernel.requires if rule not in HARDWARE)
    return dataclasses.replace(kernel.constrained(rules), built=None)


def assert_contract(name: str, case: dict[str, Any], dtype: str) -> None:
    result = check_case(on_cpu(name), case, dtype, "cpu")
    assert result.status == "passed", str(result)
