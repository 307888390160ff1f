"""Compiles our own CPU kernels into the cache folder and loads them. A user's call never compiles.

The library does not depend on torch, so it works with every version; its name contains hashes of
the processor and the source. Work is shared out by a pool of its own (threads.h); OpenMP, to be had
in its place, is the one that torch has loaded: two of them in one process would each keep threads
spinning on the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from ...files import toolchain
from ...files.paths import cache_dir
from ...files.sealed import SealedFolder
from ...spec.errors import ConfigError, DataError
from ...spec.reason import Code, Reason

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "kernels.cpp"
SOURCES = (SOURCE, FOLDER / "quant" / "ggml.cpp")     # compiled side by side
PART = toolchain.BuildPart("the CPU kernels", "its own CPU kernels", "them")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast",
         "-fno-math-errno", "-fno-trapping-math", "-pthread", "-w")
_PR_SVE_GET_VL = 51
OPTIONAL_ISA = ("amx", "sve")
_STABLE_ABI = (sys.implementation.name == "cpython"
               and not sysconfig.get_config_var("Py_GIL_DISABLED"))


def library_path(environ: Mapping[str, str] | None = None) -> Path:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in (*SOURCES, *sorted(FOLDER.rglob("*.h"))):
        digest.update(source.read_bytes())
    python = "abi3" if _STABLE_ABI else str(sys.implementation.cache_tag)
    vectors = f"-sve{8 * length}" if (length := sve_bytes(environ)) else ""
    tag = (f"kernels-{python}-{platform.machine()}-{processor()[:8]}{vectors}-"
           f"{digest.hexdigest()[:12]}")
    return cache_dir(environ) / "native" / tag / "kernels.so"


def disabled_isa(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Returns the instruction sets of LAYERZERO_DISABLE_ISA, which the kernels leave unused."""
    text = (os.environ if environ is None else environ).get("LAYERZERO_DISABLE_ISA", "")
    names = frozenset(filter(None, (name.strip().lower() for name in text.split(","))))
    if unknown := sorted(names.difference(OPTIONAL_ISA)):
        raise ConfigError(f"LAYERZERO_DISABLE_ISA wants some of {', '.join(OPTIONAL_ISA)}, "
                          f"separated by ',', got {', '.join(unknown)}; correct or unset it")
    return names


@lru_cache(maxsize=None)
def is_built() -> bool | Reason:
    """Returns whether the library is built, checked once per process."""
    try:
        store, parts = SealedFolder.of(library_path())
    except ConfigError:
        return False
    problem = store.problem(*parts)
    return problem is None or (Reason(Code.BUILD_REFUSED, None, problem) if problem else False)


@lru_cache(maxsize=None)
def processor() -> str:
    """Returns a hash of the processor's features: code for another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # platform.processor() starts a program, under a lock that a forked child cannot reset
    features = next((line for line in lines if re.match(r"(flags|Features)\b", line)), None)
    features = platform.processor() if features is None else features
    return hashlib.sha256(features.encode()).hexdigest()


def sve_bytes(environ: Mapping[str, str] | None = None) -> int:
    """Returns the length of the SVE vectors that code is compiled for, 0 for none. With vectors of
    16 bytes NEON and i8mm do the same work; longer ones than 64 exist in no processor."""
    length = _process_sve_bytes()
    return length if length in (32, 64) and "sve" not in disabled_isa(environ) else 0


@lru_cache(maxsize=None)
def _process_sve_bytes() -> int:
    """Returns the length of this process's SVE vectors: Linux can set it below the processor's."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return 0
    length: int = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return length & 0xffff if length > 0 else 0


@lru_cache(maxsize=None)
def module() -> ModuleType:
    """Returns the compiled module; raises ImportError with a remedy if it is not built."""
    store, parts = SealedFolder.of(library_path())
    import torch  # noqa: F401  its OpenMP must be loaded first

    try:
        # Not "kernels", as Python caches modules by name: Hugging Face's library is called that.
        return store.import_library("layerzero_cpu_kernels", *parts)
    except FileNotFoundError as e:
        raise ImportError("LayerZero's own CPU kernels are not built; run: lz build") from e
    except (ImportError, DataError) as e:
        raise ImportError(
            f"LayerZero's own CPU kernels do not load ({e}); run: lz build --force") from e


def build(force: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    """Compiles for this processor and returns the path of the library. Safe to run in parallel."""
    path = toolchain.build(PART, library_path(), SOURCE, "this processor", force, say,
                           lambda compiler, draft: _compile(compiler, draft.parent, say))
    module.cache_clear()
    return path


def _compile(compiler: list[str], folder: Path, say: Callable[[str], None]) -> None:
    library, objects = folder / "kernels.so", [folder / f"{s.stem}.o" for s in SOURCES]
    native = ("-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64")
              else "-march=native")
    abi = ["-DPy_LIMITED_API=0x030A0000"] if _STABLE_ABI else []
    compile_ = [*compiler, *FLAGS, native, *_sve_option(compiler, native, say), *abi,
                f"-I{sysconfig.get_paths()['include']}", "-c"]
    link = [*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library),
            *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]

    def problem(*openmp: str, runtime: str = "") -> str:
        commands = [[*compile_, *openmp, str(source), "-o", str(output)]
                    for source, output in zip(SOURCES, objects)]
        with ThreadPoolExecutor(len(commands)) as threads:
            problems = list(threads.map(lambda c: toolchain.run_compiler(PART, c), commands))
        first = next(filter(None, problems), "")
        return first or toolchain.run_compiler(PART, [*link, runtime] if runtime else link)

    if not problem("-fopenmp", runtime=loaded_openmp() or "-fopenmp"):
        return
    say("the compiler has no OpenMP: the CPU kernels have their own threads only")
    wrong = problem()
    if wrong:
        raise toolchain.compile_error(PART, wrong)


def _sve_option(compiler: list[str], native: str, say: Callable[[str], None]) -> list[str]:
    """Returns what makes the compiler's SVE vectors as long as this processor's, so that arrays of
    them can be declared; nothing where NEON does, or the compiler is too old for it."""
    if not sve_bytes():
        return []
    option = f"-msve-vector-bits={8 * sve_bytes()}"
    if not toolchain.run_compiler(PART, [*compiler, native, option, "-fsyntax-only", "-xc++",
                                         os.devnull]):
        return [option]
    say(f"the compiler does not take {option}: the CPU kernels use NEON")
    return []


def loaded_openmp() -> str:
    """Returns the path of the OpenMP library in this process, torch's; "" if there is none or it is
    unknown."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = {line.split(maxsplit=5)[-1] for line in lines
             if re.search(r"/lib(gomp|iomp5|omp)\b[^/]*\.so", line)}
    return min(paths, default="")
