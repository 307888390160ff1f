"""Finds a repository on this machine: in a folder configured for it, or in the cache of `kernels`.

Nothing here uses the network. Names, revisions and the cache's own references are checked before
they become a path.
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
class RepositoryVersion:
    """One version of a repository; its links may lead anywhere below `root`."""

    name: str
    # "1", a revision, or "" for a folder named without one
    version: str
    build: Path
    root: Path
    commit: str = ""

    @property
    def key(self) -> str:
        return f"{self.name}@{self.version}"


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise UnsafePath(
            f"a repository is named organisation/name (letters, digits, . _ -), got {name!r}")
    return name


def check_version(version: int | None, revision: str | None) -> str:
    if version is not None and revision is not None:
        raise HubError(
            f"give a version or a revision, got version={version!r} and revision={revision!r}")
    if version is not None and (type(version) is not int or version < 0):
        raise HubError(
            f"a version is a whole number >= 0, got {version!r}; a branch or commit is a revision=")
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise UnsafePath(
            f"a revision is a branch, tag or commit (letters, digits, . _ -), got {revision!r}")
    return revision if revision is not None else "" if version is None else str(version)


def default_cache() -> Path:
    from huggingface_hub import constants
    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)


def find(name: str, version: str, folders: Mapping[str, Path], cache: Path) -> RepositoryVersion:
    """Return the folder of this version, else of this name, else the snapshot in the cache."""
    folder = folders.get(f"{name}@{version}") or folders.get(name)
    if folder is not None:
        return RepositoryVersion(name, version,
                                 _build_folder(folder, folder, f"the folder for {name}"), folder)
    repository = cache / f"kernels--{name.replace('/', '--')}"
    versions = [v for n, v, _ in cached(cache) if n == name]
    state = f"versions {', '.join(versions)} are there" if versions else "it is not there"
    if not version:
        raise NotHere(
            f"{name}: wanted a version, got none; in {cache} {state}. Say version= or revision=")
    ref = repository / "refs" / (f"v{version}" if version.isdigit() else version)
    commit = _read_ref(ref) or (version if _COMMIT.fullmatch(version) else "")
    snapshot = repository / "snapshots" / commit
    if commit and not _COMMIT.fullmatch(commit):
        raise UnsafePath(
            f"{ref}: wanted the hash of a commit, got {commit!r:.80}; fetch the repository again")
    if not commit or not snapshot.is_dir():
        argument = f"version={version}" if version.isdigit() else f"revision={version!r}"
        raise NotHere(
            f"{name} version {version} is not in {cache} ({state}), and nothing is downloaded from "
            f"here. Fetch it where there is a network, kernels.install_kernel({name!r}, "
            f"{argument}), or name a folder: Hub(folders={{...}})")
    build = _build_folder(snapshot, repository, f"{name} in {cache}")
    return RepositoryVersion(name, version, build, repository, commit)


def cached(cache: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and commit of every repository version in the cache."""
    for repository in sorted(cache.glob("kernels--*--*")):
        name = repository.name.removeprefix("kernels--").replace("--", "/", 1)
        for ref in sorted((repository / "refs").glob("v*")):
            if ref.name[1:].isdigit() and _NAME.fullmatch(name):
                yield name, ref.name[1:], _read_ref(ref)


def _build_folder(folder: Path, root: Path, owner: str) -> Path:
    build = folder / "build"
    if not build.is_dir():
        raise NotHere(f"{owner}: wanted a repository with builds in {build}, which is not there")
    inside(build, root)
    return build


def _read_ref(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
