"""The package `kernels`, which reads the files of the Kernel Hub and loads its repositories."""

from __future__ import annotations

import importlib

from ...machine.loading import installed_version, satisfies
from .errors import NotHere

KERNELS_VERSION = ">=0.17"


def require_kernels() -> None:
    """Raise unless a supported version of the package `kernels` is installed."""
    version = installed_version("kernels")
    if version is None or not satisfies(version, KERNELS_VERSION):
        raise NotHere(f"repositories are loaded by the package kernels{KERNELS_VERSION}, which is "
                      f"{f'here as {version}' if version else 'not installed'}; "
                      f"pip install 'kernels{KERNELS_VERSION}'")
    module = importlib.import_module("kernels")
    if not hasattr(module, "get_kernel"):
        raise NotHere(
            f"wanted the package kernels {version}, got {module.__file__} under that name; rename "
            "it")
