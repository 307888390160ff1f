"""lz.write_bundle: what a remote developer needs to debug a machine, as one archive.

It holds capabilities, versions and settings with their origin, the dispatch table, lockfile and
measurements, recent events, and the readiness report, with a manifest of checksums. Everything is
redacted as policy says; a file that cannot be redacted without breaking it is left out, and the
manifest says so. Of the environment it holds only LAYERZERO_*, without keys.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import secrets
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..files.calls import Calls
from ..files.reading import parse_json, read_bytes
from ..machine.loading import installed_version
from ..operate import inspection, readiness
from ..operate.readiness import Readiness
from ..perf import snapshot
from ..perf.interface import StoreError
from ..plan.lockfile import Lockfile, check_lockfile, load_lockfile
from ..plan.readiness import OrPath, readiness_check
from ..plan.table import Table, distribution_of
from ..spec.errors import ConfigError, DataError, LayerZeroError
from ..world import capabilities, config, events, perf_loading, redaction
from ..world.snapshot import World

SCHEMA = "layerzero.bundle/1"
MAX_BYTES = 1 << 30                            # of all files that are read, unpacked
MAX_LOG_BYTES = 1 << 20                        # taken from the end of a log file
MAX_PERFDB_BYTES = 1 << 28
SECRETS = ("LAYERZERO_SEAL_KEY",)              # their values are never written

Files = dict[str, bytes]


def write_bundle(path: str | os.PathLike[str], *, calls: Calls = (), device: str | None = None,
                 table: OrPath[Table] = None, lock: OrPath[Lockfile] = None,
                 log: str | os.PathLike[str] | None = None, force: bool = False) -> dict[str, Any]:
    """Write the archive (tar.gz) to `path` and return its manifest; only `force` replaces an
    existing file.

    `calls`, `device`, `table` and `lock` are as for lz.readiness_check; the end of the file `log`
    is added.
    """
    target = Path(path)
    if target.exists() and not force:
        raise ConfigError(f"{target} is there already; give another name, or force to replace it")
    left_out: dict[str, str] = {}
    report = readiness_check(calls, device, table=table, lock=lock)
    files: Files = {"readiness.json": _json(readiness.redacted(report)), "events.jsonl": _events()}
    if log is not None:
        files["log.txt"] = _log(Path(log))
    world = readiness.current_world()
    hashes: dict[str, str] = {}
    if isinstance(world, Readiness):
        files["environment.json"] = _json(redaction.data(_machine()))
        left_out[
            "capabilities.json"] = "the policy cannot be read, so there is no catalog of kernels"
    else:
        data = capabilities.export(world.catalog)
        hashes["capabilities_hash"] = capabilities.capabilities_hash(data)
        files["capabilities.json"] = _json(data)       # unredacted: its hash must stay true
        files["environment.json"] = _json(
            redaction.data(_environment(world, readiness.device_kind(device))))
        _add_table(table, world, report, files, left_out)
        _add_lockfile(lock, files, left_out)
        _add_perfdb(world, files, left_out)
    manifest = {
        "schema": SCHEMA, "created": _iso_time(time.time()),
        "layerzero": installed_version("layerzero") or "unknown",
        "ready": report.ok, "redacted": sorted(redaction.active()), **hashes,
        "left_out": redaction.data(left_out),
        "files": {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
                  for name, content in sorted(files.items())}}
    _write(target, {"manifest.json": _json(manifest), **dict(sorted(files.items()))}, force)
    return manifest


def read_bundle(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files of a bundle by name, each checked against the manifest."""
    wanted = "a bundle, as lz bundle writes it"
    packed = read_bytes(path, wanted, size=MAX_BYTES)
    try:
        gzipped = zlib.decompressobj(zlib.MAX_WBITS | 16)
        unpacked = gzipped.decompress(packed, MAX_BYTES + 1)
        if not gzipped.eof and len(unpacked) <= MAX_BYTES:
            raise ValueError("it ends in the middle")
        if len(unpacked) > MAX_BYTES:
            raise DataError(f"{path}: wanted a bundle of at most {MAX_BYTES >> 20} MiB "
                            "unpacked; it is larger")
        files = _members(unpacked, path)
        listed = {name: str(row["sha256"]) for name, row in
                  parse_json(files["manifest.json"], f"{path}: manifest.json",
                             wanted)["files"].items()}
    except DataError:
        raise
    except (tarfile.TarError, zlib.error, KeyError, ValueError, TypeError, AttributeError) as e:
        raise DataError(f"{path}: wanted {wanted}; {type(e).__name__}: {e}") from e
    for name in {*listed, *files} - {"manifest.json"}:
        digest = hashlib.sha256(files[name]).hexdigest() if name in files else "absent"
        expected = listed.get(name, "nothing")
        if digest != expected:
            raise DataError(
                f"{path}: {name}: the manifest says {expected[:16]}, this is {digest[:16]}")
    return files


def _members(content: bytes, path: str | os.PathLike[str]) -> Files:
    """Return the plain files of a tar. Headers that tarfile follows to others (long names, links,
    sparse files, PAX records of any length) are not of a bundle."""
    files, at = Files(), 0
    while (header := content[at:at + tarfile.BLOCKSIZE]).strip(b"\0"):
        member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        at += tarfile.BLOCKSIZE
        if (member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.name in files
                or "/" in member.name or member.name in ("", ".", "..")):
            raise DataError(f"{path}: {member.name!r:.120} is no plain file of a bundle, or comes "
                            "twice")
        if not 0 <= member.size <= len(content) - at:
            raise DataError(f"{path}: {member.name!r:.120} says that it has {member.size} bytes; "
                            f"{len(content) - at} are left")
        files[member.name] = content[at:at + member.size]
        at += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return files


# the files

def _machine() -> dict[str, Any]:
    environ = {name: redaction.SECRET if name in SECRETS else perf_loading.without_password(value)
               if "://" in value else value
               for name, value in sorted(os.environ.items()) if name.startswith(config.PREFIX)}
    return {"versions": {"layerzero": installed_version("layerzero"),
                         "python": platform.python_version(), "torch": torch.__version__,
                         "cuda": torch.version.cuda, "platform": platform.platform()},
            "environment": environ}


def _environment(world: World, kind: str) -> dict[str, Any]:
    names = sorted({distribution_of(k) for k in world.catalog.kernels})
    libraries = {name: version for name in names
                 if (version := installed_version(name)) is not None}
    return {**_machine(), "libraries": libraries, "device": world.device(kind).to_json(),
            "config": inspection.get_config(), "stats": inspection.stats().to_json(),
            "health": {group: {"state": h.state, "faults": h.failures,
                               "reason": str(h.reason or "")}
                       for group, h in sorted(world.health.items())}}


def _events() -> bytes:
    # Redacted again: an event may be older than the policy that hides it.
    lines = [{"at": _iso_time(at), **redaction.data(redaction.event(event).to_json())}
             for at, event in events.recent()]
    return "".join(json.dumps(line, default=str) + "\n" for line in lines).encode()


def _log(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - MAX_LOG_BYTES, 0))
            content = file.read().decode("utf-8", "replace")
    except OSError as e:
        raise ConfigError(f"the log {path} cannot be read: {e.strerror}") from e
    return "\n".join(map(redaction.text, content.split("\n"))).encode()


def _add_table(source: OrPath[Table], world: World, report: Readiness, files: Files,
               left_out: dict[str, str]) -> None:
    """Add `source` or else the table in force, and its validation."""
    name = "dispatch_table.json"
    in_force = world.table.table if world.table is not None else None
    if source is None and isinstance(in_force, Table):
        source = in_force
    if source is None:
        left_out[name] = "none was given, and none is in force"
        return
    files["dispatch_table.validation.json"] = _json(redaction.data(report["table"].to_json()))
    try:
        table = source if isinstance(source, Table) else Table.load(source)
    except LayerZeroError as e:
        left_out[name] = f"it cannot be read: {e}"
        return
    _add(name, table.to_json(), files, left_out)


def _add_lockfile(source: OrPath[Lockfile], files: Files, left_out: dict[str, str]) -> None:
    name = "layerzero.lock"
    if source is None:
        left_out[name] = "none was given"
        return
    try:
        lock = source if isinstance(source, Lockfile) else load_lockfile(source)
    except LayerZeroError as e:
        left_out[name] = f"it cannot be read: {e}"
        return
    violations = check_lockfile(lock)
    files["lockfile.validation.json"] = _json(redaction.data(
        {"ok": not violations, "violations": [v.to_json() for v in violations]}))
    _add(name, lock.to_json(), files, left_out)


def _add(name: str, data: Mapping[str, Any], files: Files, left_out: dict[str, str]) -> None:
    """Add a file of shapes under a checksum, which redaction would break: whole, or not at all."""
    if redaction.hides("shapes"):
        left_out[name] = "policy hides shapes"
    else:
        files[name] = _json(data)


def _add_perfdb(world: World, files: Files, left_out: dict[str, str]) -> None:
    name, location = "perf.sqlite", perf_loading.location(world.policy)
    reason = ("policy hides shapes" if redaction.hides("shapes") else "perfdb is off"
              if location is None
              else "measurements are on a server" if isinstance(location, str)
              else "nothing was measured yet" if not location.exists()
              else f"it is larger than {MAX_PERFDB_BYTES} bytes"
              if location.stat().st_size > MAX_PERFDB_BYTES else "")
    if reason or not isinstance(location, Path):
        left_out[name] = reason
        return
    with tempfile.TemporaryDirectory(prefix="layerzero-bundle-") as folder:
        copy = Path(folder, name)
        try:
            snapshot.write_copy(location, copy)
            files[name] = copy.read_bytes()
        except StoreError as e:
            left_out[name] = str(e)


# the archive

def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, default=str) + "\n").encode()


def _iso_time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):           # of a clock that was far off
        return f"{at} seconds since 1970"


def _write(target: Path, files: Files, force: bool) -> None:
    """Write atomically, readable by its owner only, and never through a symbolic link."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL
                         | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as e:
        raise ConfigError(
            f"{target} cannot be written: {e.strerror}; give a path in a folder that exists") from e
    try:
        with os.fdopen(handle, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw,
                                                           mtime=0) as packed, \
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, content in files.items():
                # no time or owner: equal content gives equal bytes
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o600
                archive.addfile(member, io.BytesIO(content))
        if not force and target.exists():
            raise ConfigError(
                f"{target} is there already; give another name, or force to replace it")
        os.replace(temporary, target)
    except OSError as e:
        raise ConfigError(f"{target} cannot be written: {e.strerror}") from e
    finally:
        temporary.unlink(missing_ok=True)
