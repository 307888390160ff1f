"""Where a repository is on this machine: a folder that was named for it, or the cache that `kernels` downloads to.

Nothing here reaches the network. Names, revisions and what the cache says of itself are checked before they become a
path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .content import inside
from .errors import HubError, NotHere, UnsafePath

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Place:
    """One version of a repository. Links in it may lead anywhere below `root`."""

    name: str
    version: str                               # "1", a revision, or "" for a folder named without one
    build: Path
    root: Path
    commit: str = ""

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise UnsafePath(f"a repository is named organisation/name (letters, digits, . _ -), got {name!r}")
    return name


def checked_version(version: int | None, revision: str | None) -> str:
    if version is not None and revision is not None:
        raise HubError(f"give a version or a revision, got version={version!r} and revision={revision!r}")
    if version is not None and (type(version) is not int or version < 0):
        raise HubError(f"a version is a whole number >= 0, got {version!r}; a branch or commit is a revision=")
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise UnsafePath(f"a revision is a branch, tag or commit (letters, digits, . _ -), got {revision!r}")
    return revision if revision is not None else "" if version is None else str(version)


def default_cache() -> Path:
    from huggingface_hub import constants
    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)


def find(name: str, version: str, folders: Mapping[str, Path], cache: Path) -> Place:
    """The folder for this version, the folder for this name, or the snapshot in the cache."""
    folder = folders.get(f"{name}@{version}") or folders.get(name)
    if folder is not None:
        return Place(name, version, _build(folder, folder, f"the folder for {name}"), folder)
    home = cache / f"kernels--{name.replace('/', '--')}"
    versions = [v for n, v, _ in cached(cache) if n == name]
    there = f"versions {', '.join(versions)} are there" if versions else "it is not there"
    if not version:
        raise NotHere(f"{name}: wanted a version, got none; in {cache} {there}. Say version= or revision=")
    ref = home / "refs" / (f"v{version}" if version.isdigit() else version)
    commit = _content(ref) or (version if _COMMIT.fullmatch(version) else "")
    snapshot = home / "snapshots" / commit
    if commit and not _COMMIT.fullmatch(commit):
        raise UnsafePath(f"{ref}: wanted the hash of a commit, got {commit!r:.80}; fetch the repository again")
    if not commit or not snapshot.is_dir():
        asked = f"version={version}" if version.isdigit() else f"revision={version!r}"
        raise NotHere(f"{name} version {version} is not in {cache} ({there}), and nothing is downloaded from here. "
                      f"Fetch it where there is a network, kernels.install_kernel({name!r}, {asked}), or name a "
                      "folder: Hub(folders={...})")
    return Place(name, version, _build(snapshot, home, f"{name} in {cache}"), home, commit)


def cached(cache: Path) -> Iterator[tuple[str, str, str]]:
    """Name, version and commit of everything in the cache that has a version."""
    for home in sorted(cache.glob("kernels--*--*")):
        name = home.name.removeprefix("kernels--").replace("--", "/", 1)
        for ref in sorted((home / "refs").glob("v*")):
            if ref.name[1:].isdigit() and _NAME.fullmatch(name):
                yield name, ref.name[1:], _content(ref)


def _build(folder: Path, root: Path, what: str) -> Path:
    build = folder / "build"
    if not build.is_dir():
        raise NotHere(f"{what}: wanted a repository with builds in {build}, which is not there")
    inside(build, root)
    return build


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
