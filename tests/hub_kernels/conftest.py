"""The fixtures of helpers.py, repositories as the Kernel Hub lays them out, and no network."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hub_repositories
import pytest
from helpers import emitted, run_python, world

from layerzero.integrations.hub import importing

__all__ = ["emitted", "world"]
# what they are about
collect_ignore_glob = [] if importlib.util.find_spec("kernels") else ["test_*.py"]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return hub_repositories.compile_versions(tmp_path_factory)


@pytest.fixture
def compiled(libraries, tmp_path_factory, own_cache, monkeypatch) -> dict[int, Path]:
    """Two versions of a compiled kernel: version -> its library, with operations in a namespace of
    its own.

    The tests with them share a cache, so that each is imported only once by a process of its own,
    which is forked from one that has torch.
    """
    shared = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(shared))

    def run(command: list[str], timeout: float,
            **_: bool) -> subprocess.CompletedProcess[str]:
        return run_python(*command[1:], timeout=timeout)

    monkeypatch.setattr(importing, "subprocess", SimpleNamespace(
        run=run, TimeoutExpired=subprocess.TimeoutExpired))
    return libraries


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> Path:
    """A cache folder of LayerZero for one test, so that its copies and certificates are its own;
    not what is built."""
    built, own = Path(os.environ["LAYERZERO_CACHE_DIR"],
                      "native"), tmp_path_factory.mktemp("layerzero")
    (own / "native").symlink_to(built.resolve())
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(own))
    return own


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == getattr(socket, "AF_UNIX", None):    # to another process of the tests
            return connect(self, address)
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
