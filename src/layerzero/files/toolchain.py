"""The user's C++ compiler, which builds sealed libraries in the cache folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..spec.errors import ConfigError, DataError
from .sealed import SealedFolder

_running: set[subprocess.Popen[str]] = set()


class BuildPart(NamedTuple):
    """A part of the build, as messages name it."""

    name: str                                  # "building the CPU kernels needs a C++ compiler"
    title: str                                 # "LayerZero works without its own CPU kernels"
    pronoun: str                               # "LayerZero works without them"


def build(part: BuildPart, path: Path, source: Path, target: str, force: bool,
          say: Callable[[str], None], compile_: Callable[[list[str], Path], None]) -> Path:
    """Compile `source` into the library `path` of the cache folder, unless an intact one is there.

    `compile_(compiler, draft)` writes the file `draft`; `target` describes the machine in messages.
    Several processes may build at once.
    """
    store, parts = SealedFolder.of(path)
    if not force and store.is_intact(*parts):
        return path
    compiler = (os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
                or shutil.which("clang++"))
    if compiler is None:
        raise ConfigError(
            f"building {part.name} needs a C++ compiler (g++ or clang++); none was found. "
            f"Install one, or set CXX; LayerZero works without {part.pronoun}")
    try:
        with store.draft(*parts) as draft:
            say(f"compiling {source.name} with {Path(compiler).name} for {target}")
            started = time.perf_counter()
            compile_(shlex.split(compiler), draft)
            say(f"{source.name} took {time.perf_counter() - started:.0f} s")
            store.adopt(draft, *parts)
    except DataError as e:
        raise ConfigError(f"{e}; LayerZero works without {part.title}") from e
    except OSError as e:
        raise ConfigError(
            f"cannot write {path}: {e.strerror}. Set LAYERZERO_CACHE_DIR to a folder that can be "
            f"written; LayerZero works without {part.title}") from e
    return path


def run_compiler(part: BuildPart, command: list[str]) -> str:
    """Run a compiler command; returns its errors, or "". ConfigError if it cannot be run at all."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, start_new_session=True)
    except OSError as e:
        raise ConfigError(
            f"the C++ compiler {command[0]!r} cannot be run: {e.strerror}. Correct or unset CXX; "
            f"LayerZero works without {part.title}") from e
    _running.add(process)
    try:
        _, output = process.communicate()
    except BaseException:
        _stop(process)
        raise
    finally:
        _running.discard(process)
    if process.returncode == 0:
        return ""
    # gcc's driver outlives the compiler it started
    if process.returncode < 0 or "signal terminated program" in output:
        raise ConfigError(
            f"the C++ compiler was killed, as for lack of memory; run lz build again. LayerZero "
            f"works without {part.title}.\n  command: {shlex.join(command)}")
    lines = output.splitlines()
    errors = [line for line in lines if "error" in line] or lines
    return "\n  ".join(errors[:8]) + f"\ncommand: {shlex.join(command)}"


def stop_compilers() -> None:
    """End every compiler that a thread of this process waits for."""
    for process in tuple(_running):
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """End a compiler and what it started, which is in its session."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()


def compile_error(part: BuildPart, problem: str) -> ConfigError:
    return ConfigError(
        f"{part.name} did not compile; LayerZero works without {part.pronoun}.\n  {problem}")
