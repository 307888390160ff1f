"""The files of one build: checked, hashed, and copied to where nobody changes them between check
and import.

Python bytecode is left out of the hash and of the copy: Python would prefer it to the source beside
it, and no digest of a repository covers it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from ...files.paths import cache_dir
from ...files.sealed import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    UntrustedFile,
    check_folder,
    check_owner,
    trusted_folder,
)
from .errors import HubError, Tampered, UnsafePath

_BYTECODE = (".pyc", ".pyo")
MAX_UNPACKED = 8 << 30                         # bytes; a larger archive is refused as a zip bomb


@dataclass(frozen=True)
class Content:
    """Relative path -> sha256 of every file; `sha256` covers all of them."""

    files: Mapping[str, str]

    @property
    def sha256(self) -> str:
        text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def of(cls, folder: Path, root: Path) -> Content:
        """Hash the files under `folder`; a link must stay inside `root`."""
        return cls({name: _hash(path) for name, path in _files(folder, root)})

    def check(self, expected: Mapping[str, str], owner: str, source: str) -> None:
        """Raise Tampered with the files that differ from `expected`, which `source` states."""
        changed = [f"{n}: wanted sha256 {expected[n][:16]}..., got {self.files[n][:16]}..."
                   for n in sorted(expected.keys() & self.files.keys())
                   if expected[n] != self.files[n]]
        missing = [f"{n}: missing" for n in sorted(expected.keys() - self.files.keys())]
        added = [f"{n}: not listed" for n in sorted(self.files.keys() - expected.keys())]
        if differences := changed + missing + added:
            more = f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
            raise Tampered(
                f"{owner} is not what {source} says: {'; '.join(differences[:8])}{more}. Fetch the "
                "repository again; if the change is meant, look at it and lock it anew: lz hub "
                "lock")


def _files(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    resolved_root = root.resolve()
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in (*folders, *names):
            inside(Path(parent, name), resolved_root)
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix in _BYTECODE:
                continue
            if not stat.S_ISREG(path.stat().st_mode):
                raise UnsafePath(
                    f"{path}: wanted a plain file, got something else; remove it from the "
                    "repository")
            yield path.relative_to(folder).as_posix(), path
        linked = [f for f in folders if Path(parent, f).is_symlink()]
        # os.walk does not follow them: the hash would miss them
        if linked:
            raise UnsafePath(
                f"{Path(parent, linked[0])}: a link to a folder; put the files themselves there")


def inside(path: Path, root: Path) -> Path:
    """Resolve the links of `path`; UnsafePath if it leads out of `root`."""
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as e:
        raise UnsafePath(
            f"{path}: wanted a file of the repository, got a link to nothing or in a circle: "
            f"{e}") from e
    if not resolved.is_relative_to(root.resolve()):
        raise UnsafePath(
            f"{path} leads to {resolved}, outside of {root}; a repository may hold only its own "
            "files")
    return resolved


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def copy_home(folder: Path, content: Content) -> Path:
    """Return the folder of the private copy and of the results of its checks."""
    return cache_dir() / "hub" / f"{content.sha256[:32]}-{folder.name}"


def private_copy(folder: Path, root: Path, content: Content) -> Path:
    """Copy the files to where only this user writes: what was checked is what is imported."""
    copy_root = copy_home(folder, content)
    copy = copy_root / folder.name
    if _is_intact(copy, content):
        return copy
    try:
        trusted_folder(cache_dir(), copy_root.parent.name)
    except UntrustedFile as e:
        raise UnsafePath(f"{folder.name} is not loaded: {e}") from e
    draft = Path(tempfile.mkdtemp(prefix="copying-", dir=copy_root.parent))
    try:
        for name, path in _files(folder, root):
            target = draft / folder.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        _make_private(draft)
        Content.of(draft / folder.name, draft).check(content.files, str(folder),
                                                     "the check a moment ago")
        try:
            os.rename(draft, copy_root)
        except OSError:                        # it exists: made by another process, or damaged
            if not _is_intact(copy, content):
                shutil.rmtree(copy_root)
                os.rename(draft, copy_root)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return copy


def _is_intact(copy: Path, content: Content) -> bool:
    """Return whether this is an unchanged copy of ours where nobody else can write."""
    copy_root, root = copy.parent, cache_dir()
    try:
        for parent, _, names in os.walk(copy):
            check_folder(root, copy_root.parent.name, copy_root.name,
                         *Path(parent).relative_to(copy_root).parts)
            for name in names:
                status = os.lstat(Path(parent, name))
                check_owner(status, Path(parent, name))
                if not stat.S_ISREG(status.st_mode):
                    return False
        if not copy.is_dir():
            return False
        _drop_bytecode(copy)
        return Content.of(copy, copy).files == content.files
    except (OSError, UntrustedFile, UnsafePath):
        return False


def _make_private(folder: Path) -> None:
    """Restrict access to this user, whatever the umask."""
    for parent, _, names in os.walk(folder):
        os.chmod(parent, PRIVATE_FOLDER)
        for name in names:
            os.chmod(Path(parent, name), PRIVATE_FILE)


def _drop_bytecode(folder: Path) -> None:
    for parent, folders, names in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            shutil.rmtree(Path(parent, "__pycache__"))
        for name in names:
            if name.endswith(_BYTECODE):
                Path(parent, name).unlink()


# Archives

def unpack(archive: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Unpack a repository from .zip or .tar(.gz): all, or nothing if a member leads out."""
    source, target = Path(archive), Path(folder)
    if target.exists() and any(target.iterdir()):
        raise HubError(
            f"{target}: wanted an empty or a new folder to unpack {source.name} into; choose "
            "another")
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as packed:
                _unpack({i.filename: (i.file_size, partial(packed.open, i))
                         for i in packed.infolist() if not i.is_dir()
                         and not _refuse_link(source, i.filename,
                                              stat.S_ISLNK(i.external_attr >> 16))}, source, target)
        else:
            with tarfile.open(source) as bundle:
                _unpack({m.name: (m.size, partial(bundle.extractfile, m))
                         for m in bundle.getmembers()
                         if not m.isdir() and not _refuse_link(source, m.name, not m.isfile())},
                        source, target)
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError) as e:
        raise HubError(f"{source}: wanted a repository as .zip or .tar.gz; {e}") from e
    return target


def _refuse_link(source: Path, name: str, is_link: bool) -> bool:
    if is_link:
        raise UnsafePath(
            f"{source}: {name!r} is a link or a device; wanted plain files only, nothing was "
            "unpacked")
    return False


def _unpack(members: Mapping[str, tuple[int, Callable[[], IO[bytes] | None]]], source: Path,
            target: Path) -> None:
    for name in members:
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if not parts or parts[0].startswith("/") or ".." in parts or ":" in parts[0]:
            raise UnsafePath(
                f"{source}: {name!r} would land outside of {target}; nothing was unpacked")
    if (total := sum(size for size, _ in members.values())) > MAX_UNPACKED:
        raise HubError(f"{source} would unpack to {total} bytes; at most {MAX_UNPACKED} are taken")
    for name, (size, open_member) in members.items():
        path = target.joinpath(*PurePosixPath(name).parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = open_member()
        assert stream is not None              # None for what is no plain file, refused above
        with stream, path.open("wb") as out:
            while block := stream.read(1 << 20):
                size -= len(block)
                if size < 0:
                    raise HubError(
                        f"{source}: {name} holds more bytes than it says; the archive is not to be "
                        "trusted")
                out.write(block)
