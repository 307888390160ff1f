"""Attacks on folders whose files others write or import: of Triton and Inductor, and copies of hub
kernels.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
from pathlib import Path

import pytest
from test_sealed_code import OTHER, POSIX, mode, needs_root, process, root

from layerzero.dispatch.background import compiling
from layerzero.integrations.hub import content
from layerzero.integrations.hub.errors import UnsafePath

__all__ = ["root"]
pytestmark = pytest.mark.skipif(not POSIX, reason="owners and permissions as POSIX has them")


# Triton and Inductor, which seal nothing

@pytest.fixture
def no_caches(monkeypatch) -> None:
    for variable in compiling.CACHES:
        monkeypatch.setenv(variable, "")


def test_their_folders_are_for_this_user_alone(root, no_caches):
    before = os.umask(0)
    try:
        compiling.share_caches()
    finally:
        os.umask(before)
    for variable, name in compiling.CACHES.items():
        assert os.environ[variable] == str(root / name) and mode(root / name) == 0o700


@pytest.mark.parametrize("attack", ["open", "link", pytest.param("owner", marks=needs_root)])
def test_folders_that_were_open_to_others_are_not_used(root, tmp_path, no_caches, caplog, attack):
    root.mkdir(mode=0o700)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    for name in compiling.CACHES.values():
        if attack == "link":
            (root / name).symlink_to(tmp_path / "theirs")
            continue
        (root / name).mkdir()
        (root / name).chmod(0o777 if attack == "open" else 0o755)
        if attack == "owner":
            os.chown(root / name, OTHER, OTHER)
    compiling.share_caches()
    for variable, name in compiling.CACHES.items():
        own = Path(os.environ[variable])
        assert own != root / name and mode(own) == 0o700 and own.stat().st_uid == os.geteuid()
    assert "compiles into a folder of this process" in caplog.text


# Copies of hub kernels

@pytest.fixture
def copied(root, tmp_path) -> tuple[Path, content.Content, Path]:
    """(the repository's build, what was hashed of it, the private copy)."""
    source = tmp_path / "repository" / "build"
    (source / "inner").mkdir(parents=True)
    (source / "__init__.py").write_text("VALUE = 'fine'\n")
    (source / "inner" / "part.py").write_text("")
    manifest = content.Content.of(source, source.parent)
    before = os.umask(0)
    try:
        return source, manifest, content.private_copy(source, source.parent, manifest)
    finally:
        os.umask(before)


def test_a_copy_is_for_this_user_alone(copied, root):
    for path in (root / "hub", *(root / "hub").rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("attack", ["changed", "added", "open file", "open folder", "link",
                                    pytest.param("owner", marks=needs_root)])
def test_a_copy_that_is_not_ours_alone_is_made_again(copied, attack, tmp_path):
    source, manifest, copy = copied
    init = copy / "__init__.py"
    if attack == "changed":
        init.write_text("VALUE = 'evil'\n")
    elif attack == "added":
        (copy / "more.py").write_text("")
    elif attack == "open file":
        init.chmod(0o666)
    elif attack == "open folder":
        (copy / "inner").chmod(0o777)
    elif attack == "link":
        init.rename(tmp_path / "kept.py")
        init.symlink_to(tmp_path / "kept.py")
    else:
        os.chown(init, OTHER, OTHER)
    stamp = copy.stat().st_ino
    again = content.private_copy(source, source.parent, manifest)
    assert again == copy and copy.stat().st_ino != stamp, "made again"
    assert init.read_text() == "VALUE = 'fine'\n" and mode(init) == 0o600 and not init.is_symlink()


def test_planted_bytecode_is_dropped_and_the_copy_stays(copied):
    source, manifest, copy = copied
    evil = compile("VALUE = 'evil'", "x", "exec")
    stamp = (copy / "__init__.py").stat()
    header = importlib.util.MAGIC_NUMBER + bytes(4) + int(stamp.st_mtime).to_bytes(4, "little") + (
        stamp.st_size.to_bytes(4, "little"))
    (copy / "__pycache__").mkdir()
    planted = copy / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    planted.write_bytes(header + marshal.dumps(evil))
    (copy / "inner" / "part.pyc").write_bytes(header + marshal.dumps(evil))
    code = f"import sys; sys.path.insert(0, {str(copy.parent)!r}); import build; print(build.VALUE)"
    assert process(code) == "evil", "Python prefers it"
    inode = copy.stat().st_ino
    assert (content.private_copy(source, source.parent, manifest) == copy
            and copy.stat().st_ino == inode)
    assert not list(copy.rglob("*.pyc")) and process(code) == "fine"


def test_a_cache_that_others_can_write_takes_no_copies(copied, root):
    source, manifest, _ = copied
    root.chmod(0o777)
    with pytest.raises(UnsafePath, match="can be written by others"):
        content.private_copy(source, source.parent, manifest)
