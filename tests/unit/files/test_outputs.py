"""Files that the user asked for: whole or not at all, whatever the disk does, and whatever is at
their path already."""

from __future__ import annotations

import json
import os
import stat
from contextlib import contextmanager

import pytest
import torch

import layerzero as lz
from layerzero.files.sealed import replace_output

resource = pytest.importorskip("resource")


@contextmanager
def disk_with(size: int):
    """Let no file grow beyond `size`: a write stops in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("before", [None, "the old one"])
def test_a_disk_that_fills_up_leaves_no_half_of_a_file(tmp_path, before):
    path = tmp_path / "table.json"
    if before is not None:
        path.write_text(before)
    with disk_with(100), pytest.raises(OSError):
        replace_output(path, "x" * 1000)
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else [path.name])
    assert before is None or path.read_text() == before


def test_an_interrupt_leaves_no_draft(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_output(tmp_path / "table.json", "{}")
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_stays_what_it_is(tmp_path):
    """As root, a rename onto /dev/null would replace it for the whole machine."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_output(pipe, "words")
    assert os.read(reader, 100) == b"words" and stat.S_ISFIFO(os.stat(pipe).st_mode)
    os.close(reader)
    target.write_text("old")
    link.symlink_to(target)
    replace_output(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    link.unlink()
    link.symlink_to(os.devnull)
    replace_output(link, "words")
    assert link.is_symlink() and stat.S_ISCHR(os.stat(link).st_mode)


def test_a_recording_waits_in_memory_for_a_disk_that_is_full(tmp_path, caplog):
    path = tmp_path / "calls.jsonl"
    with lz.recording(path):
        with disk_with(300):
            for size in range(2, 40):
                lz.rms_norm(torch.ones(2, size))
            written = path.read_text()
        assert written.endswith("\n") and all(json.loads(line) for line in written.splitlines())
        assert "kept in memory" in caplog.text
    assert len(path.read_text().splitlines()) == 38
    assert "not complete" not in caplog.text
