"""Runs our CUDA kernels on the CPU: compiles a .cu with g++ against tests/emulator/device.h."""

from __future__ import annotations

import contextlib
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


# Nearly all the time of a test goes into its compiling; with LZ_TEST_FULL=1 it runs for longer.
FLAGS = ("-O2" if os.environ.get("LZ_TEST_FULL") == "1" else "-O0", "-std=c++17", "-fPIC", "-w",
         "-U_FORTIFY_SOURCE")


def _compile(text: bytes, headers: bytes, name: str, *options: str, folder: Path) -> Path:
    """What g++ makes of a text as its input, in a folder for this user; of the same text once."""
    assert COMPILER is not None
    command = [COMPILER, *FLAGS, "-I", str(HERE), *options]
    key = hashlib.sha256(text + headers + " ".join(command).encode()).hexdigest()[:24]
    made = Path(tempfile.gettempdir(), f"layerzero-emulator-{os.getuid()}", f"{key}-{name}")
    if not made.exists():
        made.parent.mkdir(exist_ok=True, mode=0o700)
        draft = made.with_name(f"{os.getpid()}-{made.name}")
        process = subprocess.run([*command, "-o", str(draft)], input=text, capture_output=True,
                                 cwd=folder)
        if process.returncode:
            raise RuntimeError(f"{name} does not compile:\n{process.stderr.decode()[-4000:]}")
        draft.replace(made)                         # another worker may have built the same
    return made


@lru_cache(maxsize=None)
def _precompiled_folder() -> Path:
    """Where g++ finds device.h in a form that it need not parse: five sixths of a compilation."""
    made = _compile(b"", (HERE / "device.h").read_bytes(), "device.h.gch", "-x", "c++-header",
                    str(HERE / "device.h"), folder=HERE)
    folder = made.with_suffix("")
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(made, folder / "device.h.gch")
    return folder


@lru_cache(maxsize=None)
def _built(source: Path, macros: tuple[tuple[str, int], ...]) -> Emulated:
    if COMPILER is None:
        raise RuntimeError("no C++ compiler (g++) was found")
    name = source.relative_to(SOURCES) if source.is_relative_to(SOURCES) else source
    folders = compiler.header_folders(name)
    headers = b"".join(p.read_bytes() for folder in (HERE, *folders)
                       for p in sorted(folder.glob("*.h")))
    return Emulated(_compile(source.read_bytes(), headers, f"{source.stem}.so", "-shared",
                             *(f"-D{name}={value}" for name, value in macros), "-x", "c++",
                             *(word for folder in folders for word in ("-I", str(folder))), "-",
                             folder=_precompiled_folder()))


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
