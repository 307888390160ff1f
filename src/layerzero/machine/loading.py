"""Finds out whether a kernel's library is installed in the right version, and loads it on first
selection.

`availability` checks without importing anything. `load` imports; whatever goes wrong there becomes
a reason, so that a broken library costs its own kernels and nothing else.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ..spec.kernel import Direct, Kernel, accepted_params
from ..spec.reason import Code, Reason

# Importing a broken library may raise any error, its own among them, or exit.
LOAD_ERRORS: tuple[type[BaseException], ...] = (Exception, SystemExit)

_ABI = re.compile(
    r"undefined symbol|symbol not found|cannot open shared object|_c\.so|glibcxx|cxxabi|\babi\b",
    re.IGNORECASE)


class LoadFailed(Exception):
    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@lru_cache(maxsize=None)
def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=None)
def is_importable(package: str) -> bool:
    """Is there such a module? Only files are looked at: importlib would import its parents."""
    top, *parts = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for i in range(len(parts)):
            locations = spec.submodule_search_locations if spec is not None else None
            if locations is None:
                return False
            spec = importlib.machinery.PathFinder.find_spec(".".join([top, *parts[:i + 1]]),
                                                            locations)
        return spec is not None
    except (ImportError, ValueError, AttributeError):
        return False


def distribution_of(kernel: Kernel) -> str:
    """Returns the name of the kernel's library on the package index."""
    return kernel.distribution or kernel.package.partition(".")[0].replace("_", "-")


def availability(kernel: Kernel) -> Reason | None:
    """Returns why the kernel cannot be loaded, known without importing; None if it can."""
    distribution = distribution_of(kernel)
    if kernel.package and not is_importable(kernel.package):
        return Reason(Code.NOT_INSTALLED, distribution)
    if kernel.torch and not satisfies(torch.__version__, kernel.torch):
        return Reason(Code.VERSION_CONFLICT, f"torch {kernel.torch}", torch.__version__)
    if kernel.built is not None and (built := kernel.built()) is not True:
        return built or Reason(Code.NOT_BUILT)
    if not kernel.package:
        return None
    version = installed_version(distribution)
    if kernel.version and version is not None and not satisfies(version, kernel.version):
        return Reason(Code.VERSION_CONFLICT, f"{distribution} {kernel.version}", version)
    return None


@lru_cache(maxsize=1024)                        # plugins declare any number of them
def satisfies(version: str, specifier: str) -> bool:
    # slow to import, and not needed by `import layerzero`
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version
    try:
        return SpecifierSet(specifier).contains(Version(version.partition("+")[0]),
                                                prereleases=True)
    except InvalidVersion:
        return False


def is_version_range(text: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def load(kernel: Kernel) -> Callable[..., Any] | Direct:
    """Imports the library and returns what to call; raises LoadFailed with the reason otherwise."""
    try:
        run = kernel.load()
        accepted_params(kernel.id, kernel.op, run)
        return run
    except LoadFailed:                         # of a worker, which knows the reason
        raise
    except LOAD_ERRORS as e:
        raise LoadFailed(_load_failure(kernel, e)) from e


def _load_failure(kernel: Kernel, error: BaseException) -> Reason:
    text = (
        f"{type(error).__name__}: "
        f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300])
    if isinstance(error, (ImportError, OSError)) and _ABI.search(text):
        return Reason(Code.ABI_MISMATCH, None, text)
    if not kernel.package and isinstance(error, (ImportError, AttributeError)):
        return Reason(Code.TORCH_ENTRY_MISSING, text)
    return Reason(Code.IMPORT_FAILED, kernel.package or kernel.id, text)


def import_in_subprocess(package: str, timeout: float = 60.0) -> Reason | None:
    """Imports `package` in its own process and returns why that failed, crashes included."""
    try:
        process = subprocess.run([sys.executable, "-c",
                                  f"import sys; sys.path[:] = {sys.path!r}; import {package}"],
                                 capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Reason(Code.IMPORT_FAILED, package, f"no answer within {timeout:g} s")
    if process.returncode == 0:
        return None
    if process.returncode < 0:
        return Reason(Code.ABI_MISMATCH, None,
                      f"import {package} was killed by signal {-process.returncode}")
    lines = process.stderr.strip().splitlines()
    text = lines[-1][:300] if lines else f"exit status {process.returncode}"
    return (Reason(Code.ABI_MISMATCH, None, text) if _ABI.search(text)
            else Reason(Code.IMPORT_FAILED, package, text))
