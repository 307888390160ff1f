"""Files that become code: in folders that nobody else can write, sealed, checked before use.

A store is one folder of the cache (native, cuda, certificates). Beside each file lies its seal:
the SHA-256 of its content, and an HMAC of that and of the file's name under a key that only this
user can read (or that a fleet shares, LAYERZERO_SEAL_KEY). Between check and use nothing can be
exchanged: every folder is opened relative to its parent, the file is opened once without following
a link, and it is hashed and loaded through that descriptor.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import importlib.machinery
import importlib.util
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..spec.errors import CacheCorruptionError, DataError
from .paths import cache_dir

KEY = "seal.key"
KEY_BYTES = 32
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_OTHERS_WRITE, _OTHERS_ANY = 0o022, 0o077
_SEAL_BYTES = 1 << 12
_TRIES, _RETRY_SECONDS = 3, 0.02               # while another process replaces a file and its seal
_POSIX = hasattr(os, "geteuid") and os.open in os.supports_dir_fd
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class UntrustedFile(DataError):
    """A file or folder that others could have written, or that differs from its seal."""


def trusted_folder(root: Path, *parts: str) -> Path:
    """Create `root/parts` for this user alone; UntrustedFile if others can write there.

    The umask does not matter. Folders below `root` that this user left open to others are made
    private; `root` itself only if it is the default cache folder, since one that the user chose
    may be shared on purpose.
    """
    os.makedirs(root.parent, exist_ok=True)
    for i in range(len(parts) + 1):
        _make_folder(root.joinpath(*parts[:i]))
    with _open_folders(root, parts, repair=True) as folder:
        return folder.path


def check_folder(root: Path, *parts: str) -> None:
    """Raise UntrustedFile if others can write `root` or a folder from there to `root/parts`."""
    with _open_folders(root, parts):
        pass


def create_file(path: Path, content: bytes = b"") -> None:
    """Create a file for this user alone; FileExistsError if there is one, or a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb") as out:
        if hasattr(os, "fchmod"):
            os.fchmod(out.fileno(), PRIVATE_FILE)
        out.write(content)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of a trusted folder atomically, for this user alone."""
    with _private_temp(path.parent) as folder:
        create_file(folder / path.name, content)
        os.replace(folder / path.name, path)


def replace_output(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file that the user asked for atomically: readers see the old one or the new one.

    The draft beside it has an unguessable name and is never written through a link. A link of this
    user or of root is followed, as in `--out /dev/stdout`; what is no file, such as a pipe or
    /dev/null, is written to and stays what it is.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", errors=errors) as out:
            out.write(text)
        return
    if path.is_symlink() and (not _POSIX or path.lstat().st_uid in (0, os.geteuid())):
        path = Path(os.path.realpath(path))
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
    try:
        with os.fdopen(os.open(draft, flags, 0o666), "w", encoding="utf-8", errors=errors) as out:
            out.write(text)
        os.replace(draft, path)
    except BaseException:                      # re-raised: no half of a file is left
        with suppress(OSError):
            os.unlink(draft)
        raise


@dataclass(frozen=True)
class SealedFolder:
    """The folder `name` of the cache at `root`, with sealed files."""

    root: Path
    name: str

    @classmethod
    def of(cls, path: Path, root: Path | None = None) -> tuple[SealedFolder, tuple[str, ...]]:
        """Returns the store of a file in the cache folder, and its path's parts in that store."""
        root = cache_dir() if root is None else root
        name, *parts = path.relative_to(root).parts
        return cls(root, name), tuple(parts)

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(self.name, *parts)

    def problem(self, *parts: str) -> str | None:
        """Returns why the file would not be used, by owner and permissions alone; its content is
        not read. None if it may be used, "" if it does not exist."""
        try:
            with self._folder(parts[:-1]) as folder:
                os.close(folder.open(parts[-1]))
                os.close(folder.open(f"{parts[-1]}.seal"))
        except FileNotFoundError as e:
            return _no_seal(self.path(*parts)) if str(e.filename).endswith(".seal") else ""
        except OSError as e:
            return _unreadable(self.path(*parts), e)
        except UntrustedFile as e:
            return str(e)
        return None

    def is_intact(self, *parts: str) -> bool:
        """Returns whether the file exists, is trusted and matches its seal."""
        try:
            os.close(self.open(*parts)[0])
        except (OSError, UntrustedFile):
            return False
        return True

    def read(self, *parts: str) -> bytes:
        """Returns the sealed content. FileNotFoundError if there is no file, else UntrustedFile."""
        file, content = self.open(*parts)
        os.close(file)
        return content

    def open(self, *parts: str) -> tuple[int, bytes]:
        """Returns a descriptor of the file and its content, checked against its seal."""
        path = self.path(*parts)
        for left in reversed(range(_TRIES)):
            with self._folder(parts[:-1]) as folder:
                try:
                    file = folder.open(parts[-1])
                except FileNotFoundError:
                    raise
                except OSError as e:
                    raise UntrustedFile(_unreadable(path, e)) from e
                try:
                    content = _content(file)
                    self._check(folder, parts, content, owned=_is_owned(file))
                    return file, content
                except BaseException as e:
                    os.close(file)
                    if not isinstance(e, _SealMismatch) or not left:
                        raise
            time.sleep(_RETRY_SECONDS)
        raise AssertionError("the last try returns or raises")

    def write(self, content: bytes, *parts: str) -> Path:
        """Store the content under this name, sealed, atomically."""
        with self.draft(*parts) as draft:
            create_file(draft, content)
            return self.adopt(draft, *parts)

    @contextmanager
    def draft(self, *parts: str) -> Iterator[Path]:
        """Yield a temporary path to write the file to; `adopt` then moves it into place."""
        trusted_folder(self.root, self.name, *parts[:-1])
        with _private_temp(self.path(*parts[:-1])) as folder:
            yield folder / parts[-1]

    def adopt(self, draft: Path, *parts: str) -> Path:
        """Seal a file from `draft` and move it into place."""
        file = os.open(draft, os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_BINARY", 0))
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(file, PRIVATE_FILE)
            digest = hashlib.sha256(_content(file)).hexdigest()
        finally:
            os.close(file)
        key = self.key(create=True)
        seal = draft.with_name(f"{draft.name}.seal")
        create_file(seal,
                    json.dumps({"sha256": digest, "seal": _seal(key, parts, digest)}).encode())
        with self._folder(parts[:-1]) as folder, folder.write_lock():
            folder.replace(seal, f"{parts[-1]}.seal")
            folder.replace(draft, parts[-1])
        return self.path(*parts)

    def import_library(self, name: str, *parts: str) -> ModuleType:
        """Load the compiled module `name` from the very file that was checked."""
        path = self.path(*parts)
        file, content = self.open(*parts)
        before, through = _identity(os.fstat(file)), f"/proc/self/fd/{file}"
        del content
        # The loader identifies a library by the path it was opened under, so a path must never lead
        # to another file later: where it contains the descriptor, that stays open for good.
        stays_open = os.path.exists(through)
        try:
            loader = importlib.machinery.ExtensionFileLoader(name, through if stays_open
                                                             else str(path))
            spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            now = os.fstat(file) if stays_open else os.stat(path, follow_symlinks=False)
            if _identity(now) != before:
                raise UntrustedFile(
                    f"{path} was changed while it was loaded; build it again and restart the "
                    "process")
        finally:
            if not stays_open:
                os.close(file)
        module.__file__ = spec.origin = str(path)
        return module

    def key(self, create: bool = False) -> bytes:
        """Returns the seal key, of the fleet or this user; FileNotFoundError if there is none."""
        shared = os.environ.get("LAYERZERO_SEAL_KEY", "").strip()
        if shared:
            return shared.encode()
        try:
            with self._folder(()) as folder:
                return folder.key()
        except FileNotFoundError:
            if not create:
                raise
        home = trusted_folder(self.root, self.name)
        with _private_temp(home) as temp:
            create_file(temp / KEY, secrets.token_bytes(KEY_BYTES))
            try:
                # the first of several processes wins; all then use its key
                os.link(temp / KEY, home / KEY)
            except FileExistsError:
                pass
            except OSError:                    # a file system without hard links
                os.replace(temp / KEY, home / KEY)
        with self._folder(()) as folder:
            return folder.key()

    @contextmanager
    def _folder(self, parts: tuple[str, ...]) -> Iterator[_Folder]:
        with _open_folders(self.root, (self.name, *parts)) as folder:
            yield folder

    def _check(self, folder: _Folder, parts: tuple[str, ...], content: bytes, owned: bool) -> None:
        path = self.path(*parts)
        try:
            file = folder.open(f"{parts[-1]}.seal")
            try:
                seal = json.loads(os.read(file, _SEAL_BYTES))
            finally:
                os.close(file)
            sealed_digest, mac = str(seal["sha256"]), str(seal["seal"])
        except FileNotFoundError as e:
            raise UntrustedFile(_no_seal(path)) from e
        except OSError as e:
            raise UntrustedFile(_unreadable(path, e)) from e
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise UntrustedFile(f"{path}: its seal cannot be read ({e}); it is not used") from e
        digest = hashlib.sha256(content).hexdigest()
        if digest != sealed_digest:
            raise _SealMismatch(
                f"{path} is not the file that was sealed: wanted sha256 {sealed_digest[:16]}, got "
                f"{digest[:16]}; it is not used")
        # root's, and only root can write here: the digest is enough
        if not owned:
            return
        try:
            key = self.key()
        except FileNotFoundError as e:
            raise UntrustedFile(
                f"{path}: the key it was sealed with, {self.path(KEY)}, is gone; it is not "
                "used") from e
        if not hmac.compare_digest(mac.encode(), _seal(key, parts, digest).encode()):
            raise _SealMismatch(
                f"{path}: its seal was not made with the key of this cache; it is not used")


class _SealMismatch(UntrustedFile, CacheCorruptionError):
    """File and seal do not match: damage, an attack, or another process that is replacing both."""


@dataclass(frozen=True)
class _Folder:
    """An opened and checked folder; `descriptor` is None on Windows, which opens no folders."""

    path: Path
    descriptor: int | None

    def open(self, name: str) -> int:
        """Open a plain file that only this user or root can write; OSError if there is none."""
        flags = os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            file = os.open(self._at(name), flags, dir_fd=self.descriptor)
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise UntrustedFile(
                    f"{self.path / name} is a link; wanted is a plain file, it is not used") from e
            raise
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                raise UntrustedFile(
                    f"{self.path / name}: wanted a plain file, got something else; it is not used")
            check_owner(info, self.path / name)
        except BaseException:                  # an interrupt too: the file is not left open
            os.close(file)
            raise
        return file

    def replace(self, source: Path, name: str) -> None:
        os.replace(source, self._at(name), dst_dir_fd=self.descriptor)

    def key(self) -> bytes:
        path = self.path / KEY
        try:
            file = self.open(KEY)
        except FileNotFoundError:
            raise
        except OSError as e:
            raise UntrustedFile(f"the seal key cannot be read: {_unreadable(path, e)}") from e
        try:
            if _POSIX and (not _is_owned(file) or os.fstat(file).st_mode & _OTHERS_ANY):
                raise UntrustedFile(
                    f"{path} can be read by others, so it is no secret; delete it and build or "
                    f"verify again (or, if you alone use this machine: chmod 600 {path})")
            key = os.read(file, KEY_BYTES + 1)
        finally:
            os.close(file)
        if len(key) != KEY_BYTES:
            raise UntrustedFile(
                f"{path}: wanted {KEY_BYTES} bytes, got {len(key)} or more; delete it and build or "
                "verify again")
        return key

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Let one process at a time replace a file and its seal, where folders can be locked."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        if self.descriptor is not None:
            deadline = time.monotonic() + 2.0  # whoever can read a folder can lock it: not for ever
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_RETRY_SECONDS)
                except OSError:                # a file system without locks
                    break
        yield                                  # closing the folder releases the lock

    def _at(self, name: str) -> str | Path:
        return name if self.descriptor is not None else self.path / name


@contextmanager
def _open_folders(root: Path, parts: tuple[str, ...], repair: bool = False) -> Iterator[_Folder]:
    """Yield `root/parts`, with each folder opened relative to its parent and checked."""
    if not _POSIX:
        if not root.joinpath(*parts).is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT),
                                    str(root.joinpath(*parts)))
        yield _Folder(root.joinpath(*parts), None)
        return
    chosen = bool(os.environ.get("LAYERZERO_CACHE_DIR", "").strip())
    path, descriptor = root, -1
    try:
        descriptor = _open_folder(root, None, repair and not chosen and root == cache_dir(),
                                  sticky=True)
        for part in parts:
            path = path / part
            inner = _open_folder(path, descriptor, repair)
            os.close(descriptor)
            descriptor = inner
        yield _Folder(path, descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _open_folder(path: Path, parent: int | None, repair: bool, sticky: bool = False) -> int:
    """Open the folder `path` relative to the descriptor `parent` and check its owner."""
    name = str(path) if parent is None else path.name
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        folder = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        link = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISLNK(link.st_mode):
            raise                              # a file in the place of a folder
        if link.st_uid not in (os.geteuid(), 0):
            raise UntrustedFile(
                f"{path} is a link of user {link.st_uid}; nothing is used from where it leads, "
                "remove it") from e
        folder = os.open(name, flags, dir_fd=parent)
    try:
        info = os.fstat(folder)
        if repair and info.st_uid == os.geteuid() and info.st_mode & _OTHERS_WRITE and not (
                sticky and info.st_mode & stat.S_ISVTX):
            os.fchmod(folder, PRIVATE_FOLDER)
            info = os.fstat(folder)
        check_owner(info, path, sticky)
    except BaseException:                      # as above
        os.close(folder)
        raise
    return folder


def check_owner(info: os.stat_result, path: Path, sticky: bool = False) -> None:
    """Raise UntrustedFile if a user other than this one and root owns `path` or can write it."""
    if not _POSIX:
        return
    if info.st_uid not in (os.geteuid(), 0):
        raise UntrustedFile(
            f"{path} belongs to user {info.st_uid}, not to this one ({os.geteuid()}) or root; "
            "nothing is used from there. Remove it, or set LAYERZERO_CACHE_DIR to a folder of your "
            "own")
    if info.st_mode & _OTHERS_WRITE and not (sticky and info.st_mode & stat.S_ISVTX):
        raise UntrustedFile(
            f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):04o}); nothing is "
            f"used from there. Run: chmod go-w {path}")


def _make_folder(path: Path) -> None:
    try:
        os.mkdir(path, PRIVATE_FOLDER)
    except FileExistsError:
        return
    os.chmod(path, PRIVATE_FOLDER)             # a umask may have taken even the owner's rights


@contextmanager
def _private_temp(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder in `folder` with an unguessable name that nobody else can enter."""
    temp = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
    try:
        os.chmod(temp, PRIVATE_FOLDER)
        yield temp
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _content(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as opened:
        return opened.read()


def _is_owned(file: int) -> bool:
    """Returns whether the file belongs to the user of this process."""
    return not _POSIX or os.fstat(file).st_uid == os.geteuid()


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _seal(key: bytes, parts: tuple[str, ...], digest: str) -> str:
    return hmac.new(key, "\0".join((*parts, digest)).encode(), hashlib.sha256).hexdigest()


def _no_seal(path: Path) -> str:
    return f"{path} has no seal, so nobody knows who made it; it is not used"


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"
