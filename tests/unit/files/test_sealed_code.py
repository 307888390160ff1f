"""Attacks on what becomes code: planted and changed files, open folders, links, temporary names,
umask, other owners.

Each one ends in a refusal that says why, and in no code of the attacker being run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from certified import HERE, certificate, torch_rms_norm
from helpers import run_python

import layerzero as lz
from layerzero.backends.cuda import compiler
from layerzero.backends.native import build
from layerzero.dispatch import native
from layerzero.files import sealed
from layerzero.files.sealed import SealedFolder, UntrustedFile, trusted_folder
from layerzero.machine import process_lock as filelock
from layerzero.spec.errors import ConfigError
from layerzero.spec.reason import Code, Reason
from layerzero.world.registry import certificates

POSIX = hasattr(os, "geteuid")
pytestmark = pytest.mark.skipif(not POSIX, reason="owners and permissions as POSIX has them")
needs_root = pytest.mark.skipif(not POSIX or os.geteuid() != 0,
                                reason="only root can give a file away")
OTHER = 12345                                  # a user that is not this one
SOURCES = Path(lz.__file__).parents[1]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(root) -> SealedFolder:
    made = SealedFolder(root, "native")
    made.write(b"content", "tag", "x.so")
    return made


@pytest.fixture
def library(root, monkeypatch) -> Iterator[Path]:
    """A real compiled module, sealed where the fast path would be; loading it leaves a trace in
    sys.modules only."""
    kept = SealedFolder.of(native.library_path())
    kept[0].write(_some_module().read_bytes(), *kept[1])
    native.module.cache_clear()
    monkeypatch.setattr(native, "_problem", [])
    yield native.library_path()
    native.module.cache_clear()


def _some_module() -> Path:
    folder = next(Path(p) / "lib-dynload" for p in sys.path if (Path(p) / "lib-dynload").is_dir())
    return sorted(folder.glob("_*.so"))[0]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# The mechanism

def test_what_was_sealed_is_read_back(store):
    assert store.read("tag", "x.so") == b"content" and store.is_intact("tag", "x.so")
    assert store.problem("tag", "x.so") is None


def test_what_is_not_there_is_not_there_and_asking_makes_nothing(root):
    store = SealedFolder(root, "native")
    assert store.problem("tag", "x.so") == "" and not store.is_intact("tag", "x.so")
    with pytest.raises(FileNotFoundError):
        store.read("tag", "x.so")
    assert not root.exists()


@pytest.mark.parametrize("at", range(len(b"content")))
def test_a_changed_byte_is_refused(store, at):
    content = bytearray(b"content")
    content[at] ^= 1
    store.path("tag", "x.so").write_bytes(content)
    with pytest.raises(UntrustedFile, match="is not the file that was sealed"):
        store.read("tag", "x.so")


def test_a_planted_file_has_no_seal(store):
    store.path("tag", "planted.so").write_bytes(b"planted")
    with pytest.raises(UntrustedFile, match="has no seal"):
        store.read("tag", "planted.so")
    assert "has no seal" in (store.problem("tag", "planted.so") or "")


def test_a_seal_made_without_the_key_is_refused(store):
    digest = hashlib.sha256(b"planted").hexdigest()
    store.path("tag", "x.so").write_bytes(b"planted")
    forged = sealed._seal(b"guessed" * 4, ("tag", "x.so"), digest)
    store.path("tag", "x.so.seal").write_text(json.dumps({"sha256": digest, "seal": forged}))
    with pytest.raises(UntrustedFile, match="not made with the key of this cache"):
        store.read("tag", "x.so")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"sha256": 1}', "\x00", "[" * 4000,
                                  "9" * 4096])
def test_a_seal_that_is_none_is_a_typed_error(store, text):
    store.path("tag", "x.so.seal").write_text(text)
    with pytest.raises(UntrustedFile):
        store.read("tag", "x.so")


def test_a_sealed_file_serves_under_its_own_name_only(store):
    store.write(b"older", "old", "x.so")
    for name in ("x.so", "x.so.seal"):
        shutil.copy(store.path("old", name), store.path("tag", name))
    with pytest.raises(UntrustedFile, match="key of this cache"):
        store.read("tag", "x.so")


def test_another_key_is_another_cache(store, monkeypatch):
    monkeypatch.setenv("LAYERZERO_SEAL_KEY", "a fleet's")
    with pytest.raises(UntrustedFile, match="key of this cache"):
        store.read("tag", "x.so")
    store.write(b"content", "tag", "x.so")
    assert store.read("tag", "x.so") == b"content"


def test_without_its_key_nothing_is_used(store):
    store.path("seal.key").unlink()
    with pytest.raises(UntrustedFile, match=r"seal\.key, is gone"):
        store.read("tag", "x.so")


@pytest.mark.parametrize("content", [b"", b"short", b"k" * 33])
def test_a_key_of_another_length_is_refused(store, content):
    store.path("seal.key").write_bytes(content)
    with pytest.raises(UntrustedFile, match="wanted 32 bytes"):
        store.read("tag", "x.so")


def test_a_key_that_others_can_read_is_refused(store):
    store.path("seal.key").chmod(0o644)
    with pytest.raises(UntrustedFile, match="can be read by others"):
        store.read("tag", "x.so")


@pytest.mark.parametrize("where", ["", "native", "native/tag", "native/tag/x.so",
                                   "native/tag/x.so.seal",
                                   "native/seal.key"])
@pytest.mark.parametrize("open_to", [0o020, 0o002, 0o022])
def test_what_others_can_write_is_refused(store, where, open_to):
    path = store.root / where
    path.chmod(mode(path) | open_to)
    with pytest.raises(UntrustedFile, match=r"can be written by others .*chmod go-w"):
        store.read("tag", "x.so")


def test_a_cache_in_a_sticky_folder_for_all_is_as_safe_as_its_folders(store):
    store.root.chmod(0o1777)                   # LAYERZERO_CACHE_DIR=/tmp
    assert store.read("tag", "x.so") == b"content"
    store.path().chmod(0o1777)
    with pytest.raises(UntrustedFile, match="can be written by others"):
        store.read("tag", "x.so")


@needs_root
@pytest.mark.parametrize("where", ["", "native", "native/tag", "native/tag/x.so",
                                   "native/tag/x.so.seal",
                                   "native/seal.key"])
def test_what_belongs_to_another_user_is_refused(store, where):
    os.chown(store.root / where, OTHER, OTHER)
    with pytest.raises(UntrustedFile, match=rf"belongs to user {OTHER}"):
        store.read("tag", "x.so")


@needs_root
def test_a_link_of_another_user_is_refused_and_ones_own_is_followed(store, tmp_path):
    os.rename(store.path(), tmp_path / "elsewhere")
    store.path().symlink_to(tmp_path / "elsewhere")
    assert store.read("tag", "x.so") == b"content"
    os.chown(store.path(), OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UntrustedFile, match=rf"is a link of user {OTHER}"):
        store.read("tag", "x.so")


def test_where_a_link_leads_must_be_safe_too(store, tmp_path):
    os.rename(store.path(), tmp_path / "elsewhere")
    store.path().symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o777)
    with pytest.raises(UntrustedFile, match="can be written by others"):
        store.read("tag", "x.so")


@pytest.mark.parametrize("name", ["x.so", "x.so.seal"])
def test_a_file_that_is_a_link_is_refused(store, tmp_path, name):
    os.rename(store.path("tag", name), tmp_path / name)
    store.path("tag", name).symlink_to(tmp_path / name)
    with pytest.raises(UntrustedFile, match="is a link"):
        store.read("tag", "x.so")


def test_a_pipe_or_folder_in_its_place_is_refused_and_blocks_nobody(store):
    for make in (os.mkfifo, os.mkdir):
        path = store.path("tag", "x.so")
        path.unlink() if path.is_file() else None
        make(path)
        with pytest.raises(UntrustedFile, match="wanted a plain file"):
            store.read("tag", "x.so")
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@needs_root
def test_a_read_only_cache_of_root_serves_other_users(request):
    """An administrator builds once; others have no key, and cannot write there."""
    # only root may enter the folders of pytest
    own = Path(tempfile.mkdtemp(prefix="layerzero-shared-"))
    request.addfinalizer(lambda: shutil.rmtree(own))
    store = SealedFolder(own, "native")
    store.write(b"content", "tag", "x.so")
    for path in (own, *own.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    store.path("seal.key").chmod(0o600)
    code = f"""
import os
from pathlib import Path
from layerzero.files.sealed import SealedFolder
os.setuid({OTHER})                             # not before the imports: Python itself may be root's alone
store = SealedFolder(Path({str(store.root)!r}), "native")
print(store.read("tag", "x.so"))
"""
    assert process(code) == "b'content'"
    store.path("tag", "x.so").write_bytes(b"changed")
    with pytest.raises(AssertionError, match="is not the file that was sealed"):
        process(code)


def process(code: str, **environ: str) -> str:
    done = run_python("-c", code, timeout=300,
                      env={**os.environ, "PYTHONPATH": str(SOURCES), **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


# Writing

@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_the_umask_does_not_matter(root, umask):
    root.parent.chmod(0o755)
    before = os.umask(umask)
    try:
        store = SealedFolder(root, "native")
        store.write(b"content", "tag", "x.so")
        with store.draft("tag", "y.so") as draft:
            assert mode(draft.parent) == 0o700
            draft.write_bytes(b"compiled")     # by a compiler, which asks for 0777
            draft.chmod(0o777)
            store.adopt(draft, "tag", "y.so")
        certificates.replace_file(root / "plain", b"x")
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert store.read("tag", "x.so") == b"content" and store.read("tag", "y.so") == b"compiled"
    assert sorted(p.name for p in store.path("tag").iterdir()) == ["x.so", "x.so.seal", "y.so",
                                                                   "y.so.seal"]


def test_folders_that_an_older_umask_left_open_are_closed_when_something_is_written(store):
    store.path().chmod(0o777)
    store.path("tag").chmod(0o775)
    store.write(b"again", "tag", "x.so")
    assert (mode(store.path()) == mode(store.path("tag")) == 0o700
            and store.read("tag", "x.so") == b"again")


def test_a_folder_that_the_user_chose_is_refused_rather_than_closed(store):
    store.root.chmod(0o777)
    with pytest.raises(UntrustedFile, match="chmod go-w"):
        store.write(b"again", "tag", "x.so")
    assert mode(store.root) == 0o777


def test_the_default_folder_is_ours_and_closed(tmp_path, monkeypatch):
    monkeypatch.delenv("LAYERZERO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "layerzero").mkdir()
    (tmp_path / "layerzero").chmod(0o777)
    trusted_folder(tmp_path / "layerzero", "native")
    assert mode(tmp_path / "layerzero") == 0o700


def test_links_in_the_places_of_files_are_replaced_and_never_written_through(store, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for name in ("x.so", "x.so.seal", "new.so", "new.so.seal"):
        store.path("tag", name).unlink(missing_ok=True)
        store.path("tag", name).symlink_to(victim)
    store.write(b"content", "tag", "x.so")
    store.write(b"content", "tag", "new.so")
    assert victim.read_text() == "untouched" and not store.path("tag", "x.so").is_symlink()


def test_temporary_names_of_certificates_cannot_be_planted(root, tmp_path, world):
    """The name of a draft was made of the process's number: a link there led to any file of the
    user."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    kernel, home = torch_rms_norm(), certificates.folder(HERE)
    trusted_folder(root, "certificates", HERE.signature)
    for name in (f"{kernel.id}.{os.getpid()}.tmp",
                 f"{kernel.id.rpartition('.')[0]}.{os.getpid()}.tmp",
                 f"{kernel.id}.json"):
        (home / name).symlink_to(victim)
    (home.parent / f"seal.{os.getpid()}.tmp").symlink_to(victim)
    cert = certificate(kernel)
    assert certificates.read(certificates.write(cert, HERE)) == cert
    assert victim.read_text() == "untouched"


@needs_root
def test_a_planted_seal_key_voids_certificates(root, world):
    kernel = torch_rms_norm()
    certificates.write(certificate(kernel), HERE)
    os.chown(root / "certificates" / "seal.key", OTHER, OTHER)
    status = certificates.statuses([kernel], HERE)[kernel.id]
    assert (isinstance(status, Reason) and status.code is Code.CERTIFICATE_REFUSED
            and f"user {OTHER}" in status.message)


def test_a_lock_is_not_taken_through_a_link(root, tmp_path, caplog):
    victim = tmp_path / "victim"
    name = hashlib.sha256(b"work").hexdigest()[:32]
    trusted_folder(root, "locks")
    (root / "locks" / f"{name}.lock").symlink_to(victim)
    with filelock.process_lock("work", 1.0):
        assert not victim.exists() and "cannot lock" in caplog.text
    (root / "locks" / f"{name}.lock").unlink()
    before = os.umask(0)
    try:
        with filelock.process_lock("work", 1.0):
            assert mode(root / "locks" / f"{name}.lock") == 0o600
    finally:
        os.umask(before)


def test_readers_see_the_old_or_the_new_file_while_others_replace_it(store):
    contents = [bytes([i]) * 5000 for i in range(4)]
    store.write(contents[0], "tag", "x.so")
    stop, problems = threading.Event(), []

    def write(i: int) -> None:
        while not stop.is_set():
            store.write(contents[i], "tag", "x.so")

    writers = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in writers:
        thread.start()
    try:
        for _ in range(200):
            try:
                if store.read("tag", "x.so") not in contents:
                    problems.append("mixed")
            # three misses in a row, under two writers without a pause
            except UntrustedFile as e:
                assert "sealed" in str(e) or "key" in str(e)
    finally:
        stop.set()
        for thread in writers:
            thread.join()
    assert not problems and store.read("tag", "x.so") in contents


# Loading

def test_what_is_loaded_is_the_file_that_was_checked(library, root, monkeypatch):
    """The path is given another file between check and load: the checked one is loaded all the
    same."""
    store, parts = SealedFolder.of(library)
    opened = SealedFolder.open

    def swap(self: SealedFolder, *args: str) -> tuple[int, bytes]:
        opened_file = opened(self, *args)
        os.rename(library, library.with_suffix(".old"))
        library.write_bytes(b"\x7fELF, planted")
        return opened_file

    monkeypatch.setattr(SealedFolder, "open", swap)
    name = _some_module().name.partition(".")[0]
    if not os.path.exists("/proc/self/fd"):
        with pytest.raises((ImportError, UntrustedFile)):
            store.import_library(name, *parts)
        return
    module = store.import_library(name, *parts)
    assert module.__name__ == name and module.__file__ == str(library)


def test_a_file_changed_while_it_is_loaded_is_told(library, monkeypatch):
    store, parts = SealedFolder.of(library)
    loader = sealed.importlib.machinery.ExtensionFileLoader
    monkeypatch.setattr(loader, "exec_module", lambda self, module: os.utime(library))
    with pytest.raises(UntrustedFile, match="was changed while it was loaded"):
        store.import_library(_some_module().name.partition(".")[0], *parts)


def test_a_planted_fast_path_is_not_run_and_python_serves(root, tmp_path):
    """A library whose loading would write a file; it lies just where ours would."""
    compiler_path = shutil.which("gcc") or shutil.which("cc")
    if compiler_path is None:
        pytest.skip("needs a C compiler to make the library of the attacker")
    proof = tmp_path / "owned"
    (tmp_path / "evil.c").write_text(f"""
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{ fclose(fopen("{proof}", "w")); }}
""")
    evil = tmp_path / "evil.so"
    subprocess.run([compiler_path, "-shared", "-fPIC", str(tmp_path / "evil.c"), "-o", str(evil)],
                   check=True)
    for path in (native.library_path(), build.library_path()):
        path.parent.mkdir(parents=True)
        shutil.copy(evil, path)
    code = """
import torch, layerzero as lz
from layerzero.backends.native import build
from layerzero.spec.reason import Reason
x = torch.randn(4, 64)
assert torch.allclose(lz.rms_norm(x), lz.op("rms_norm").reference(x), atol=1e-5)
checks = {c.name: c for c in lz.doctor().checks}
check = checks["native fast path"]
assert not check.ok and "refused" in check.detail and "has no seal" in check.detail and "lz build" in check.hint, check
assert "pure Python" in check.detail and type(lz.rms_norm).__name__ == "function"
kernels = checks["library layerzero.backends.native"]
assert not kernels.ok and "has no seal" in kernels.detail and kernels.hint == "run: lz build", kernels
assert isinstance(build.is_built(), Reason)
try:
    build.module()
except ImportError as e:
    print("refused" if "has no seal" in str(e) else e)
"""
    assert process(code, LAYERZERO_CACHE_DIR=str(root)) == "refused" and not proof.exists()
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(evil)!r})"], check=True)
    assert proof.exists(), "it would have run"


def test_an_open_folder_is_refused_with_the_reason(library, root):
    library.parent.chmod(0o777)
    state = native.status()
    assert not state.ok and state.expected and "can be written by others (mode 0777)" in state.text
    native.module.cache_clear()
    assert build.is_built.__wrapped__() is False, "not built at all"


def test_what_is_refused_is_built_again(root, tmp_path, monkeypatch):
    cxx = tmp_path / "cxx"
    cxx.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    cxx.chmod(0o755)
    monkeypatch.setenv("CXX", str(cxx))
    for make, path in ((native.build_fast_path, native.library_path()),
                       (build.build, build.library_path())):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"planted")
        path.parent.chmod(0o777)
        assert make() == path and path.read_bytes() == b"made\n" and mode(path.parent) == 0o700
        stamp = path.stat().st_mtime_ns
        assert make() == path and path.stat().st_mtime_ns == stamp, "once"
        path.write_bytes(b"mads\n")
        assert make() == path and path.read_bytes() == b"made\n"
    root.chmod(0o777)
    with pytest.raises(ConfigError, match=r"chmod go-w.*works without"):
        native.build_fast_path()


def test_cubins_are_compiled_again_unless_they_are_as_sealed(root, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "nvrtc", lambda: (None, "12.0"))
    made = []
    monkeypatch.setattr(compiler, "_compile", lambda *args: made.append(args)
                        or b"\x7fELF of ours")
    source = min(str(p.relative_to(compiler.FOLDER)) for p in compiler.FOLDER.rglob("*.cu"))

    def compiled() -> int:
        made.clear()
        assert compiler.cubin(source, (), "sm_90a") == b"\x7fELF of ours"
        return len(made)

    assert compiled() == 1 and compiled() == 0
    [file] = (root / "cuda").glob("*.cubin")
    assert mode(file) == 0o600
    file.write_bytes(b"\x7fELF planted")
    with caplog.at_level(logging.WARNING):
        assert compiled() == 1 and "is not the file that was sealed" in caplog.text
    assert compiled() == 0
    root.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        assert compiled() == 1
