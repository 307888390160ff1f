"""hub.lock: which repositories may be loaded, at which commit, and the hash of every file of every
build.

`kernels.lock`, as `kernels lock` writes it, is read too. It pins commits and no content, so it
detects another commit but no changed file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...files.reading import no_panic, read_json
from ...plan.table import write_json
from ...spec.codec import At, Record, Text, decode, encode
from ...spec.reason import FOREIGN_ERRORS
from .content import Content
from .errors import HubError, LockViolation
from .library import require_kernels

SCHEMA = "layerzero.hub.lock/1"


@dataclass(frozen=True)
class HubPin(Record, whole=True):
    """One pinned version of a repository; without `variants` only the commit is pinned."""

    commit: str = ""                           # "" for a local folder, which has none
    variants: Mapping[str, Mapping[str, Text]] | None = None   # build -> file -> sha256

    def check(self, key: str, commit: str, variant: str, content: Content, source: str) -> None:
        """Raise LockViolation or Tampered if this commit or content is not the pinned one."""
        if self.commit and self.commit != commit:
            raise LockViolation(
                f"{key}: {source} wants commit {self.commit}, got "
                f"{commit or 'a folder without one'}; fetch that commit, or lock the new one: lz "
                "hub lock")
        if self.variants is None:
            return
        if variant not in self.variants:
            raise LockViolation(
                f"{key}: {source} has the builds {', '.join(sorted(self.variants))}, got "
                f"{variant}; look at what is new and lock it: lz hub lock")
        content.check(self.variants[variant], f"{key} {variant}", source)

    def to_json(self) -> dict[str, Any]:
        return {"commit": self.commit, "variants": encode(self.variants or {})}


@dataclass(frozen=True)
class HubLock(Record, json="pins", names={"pins": "kernels"}, header={"schema": SCHEMA}):
    pins: Mapping[str, HubPin] = field(default_factory=dict)      # "org/name@1"
    path: str = SCHEMA

    def pin(self, name: str, version: str) -> tuple[str, HubPin]:
        """Return the key and pin of a version; "" stands for the only pinned one."""
        known = [k for k in self.pins if k.rpartition("@")[0] == name]
        key = f"{name}@{version}" if version else known[0] if len(known) == 1 else ""
        if key not in self.pins:
            raise LockViolation(
                f"{self.path} does not pin {name}{f' version {version}' if version else ''}; it "
                f"pins {', '.join(known or sorted(self.pins)) or 'nothing'}. Ask for one of these, "
                "or lock it: lz hub lock")
        return key, self.pins[key]

    def __contains__(self, name: str) -> bool:
        return any(k.rpartition("@")[0] == name for k in self.pins)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kernels": {k: self.pins[k].to_json() for k in sorted(self.pins)}}

    def check_json(self, at: At) -> None:
        for key, pin in self.pins.items():
            if "@" not in key or pin.variants is None:
                (at / "kernels"
                 / key).wrong("name@version with a commit and the files of its builds", encode(pin))

    def write(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self.to_json())


def read(path: Path) -> HubLock:
    """Read a hub.lock or a kernels.lock."""
    data = read_json(path, "a lockfile, as lz hub lock or kernels lock writes it")
    if isinstance(data, list):
        return _read_kernels_lock(path, data)
    return decode(HubLock, data, str(path), path=str(path))


def _read_kernels_lock(path: Path, data: list[Any]) -> HubLock:
    require_kernels()
    from kernels._rust import KernelLocks, KernelVersion
    try:
        locks = no_panic(KernelLocks.from_json)(json.dumps(data))
    except FOREIGN_ERRORS as e:
        raise HubError(f"{path}: wanted a kernels.lock, as kernels lock writes it; {e}") from e
    pins = {}
    for kernel, lock in locks.items():
        version = kernel.version
        name = (str(version.version) if isinstance(version, KernelVersion.Version)
                else version.revision)
        pins[f"{kernel.repo_id}@{name}"] = HubPin(lock.commit)
    return HubLock(pins, str(path))
