"""What is asked of a repository before any of its code runs: allowed, in its place, fitting,
pinned, unchanged.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import py_compile
import random
import struct
import sys
from pathlib import Path

import hub_repositories as repositories
import pytest
from hub_repositories import UNIVERSAL, build, in_cache

from layerzero.integrations.hub import (
    Accepted,
    Hub,
    HubError,
    HubLock,
    LockViolation,
    NotAllowed,
    NoVariant,
    Tampered,
    elf,
)
from layerzero.spec.errors import DataError, LayerZeroError

NAME = "me/norm"
ASKS_LIBC = "#include <stdlib.h>\nint f(void) { return atexit(0); }"
TRAP = "from pathlib import Path\nPath({marker!r}).write_text('ran')\n"


def hub_of(folder: Path, **options) -> Hub:
    return Hub(**{"folders": {NAME: folder}, "allow": ("me/*",), "backend": "cpu", **options})


def locked(hub: Hub, tmp_path: Path, *wanted: str) -> Path:
    path = tmp_path / "hub.lock"
    hub.lockfile(*(wanted or (NAME,))).write(path)
    return path


# Builds

def test_every_build_has_a_verdict(tmp_path):
    machine, torch_tag = os.uname().machine, repositories.TORCH
    other = "aarch64" if machine != "aarch64" else "x86_64"
    wanted = {
        UNIVERSAL: "", "torch-cpu": "",
        f"torch99-cxx11-cpu-{machine}-linux": "Torch version (9.9) does not match",
        f"torch{torch_tag}-cxx98-cpu-{machine}-linux": "CXX11 ABI",
        f"torch{torch_tag}-cxx11-cpu-{other}-linux": f"CPU ({other}) does not match",
        f"torch{torch_tag}-cxx11-cpu-{machine}-windows": "OS (windows)",
        f"torch{torch_tag}-cxx11-cu118-{machine}-linux": "cu118",
        f"torch-stable-abi99-cpu-{machine}-linux": "too new",
        f"tvm-ffi09-cpu-{machine}-linux": "tvm-ffi version",
        "torch-xpu": "is not universal", "nonsense": "unknown kind of build"}
    for variant in wanted:
        build(tmp_path, variant)
    (tmp_path / "build" / "torch-npu").mkdir()
    explanation = hub_of(tmp_path).explain(NAME, version=1)
    assert {v.variant for v in explanation.verdicts} == {*wanted, "torch-npu"}
    for verdict in explanation.verdicts:
        if verdict.variant != "torch-npu":
            assert isinstance(verdict, Accepted) == (wanted[verdict.variant] == "")
            assert wanted[verdict.variant] in str(verdict)
    assert explanation.ok and explanation.variant == "torch-cpu", "before the universal one"
    assert "->  torch-cpu: accepted" in str(explanation) and "rejected, CPU" in str(explanation)
    data = json.loads(json.dumps(explanation.to_json()))
    assert data["variant"] == "torch-cpu" and len(data["variants"]) == len(wanted) + 1


def test_no_build_fits(tmp_path):
    build(tmp_path, "torch-cuda")
    build(tmp_path, "torch99-cxx11-cpu-x86_64-linux")
    with pytest.raises(NoVariant) as caught:
        hub_of(tmp_path).load(NAME)
    assert "none of its 2 builds" in str(caught.value)
    assert "torch-cuda: rejected" in str(caught.value) and "torch99" in str(caught.value)


def test_a_build_without_metadata_is_rejected(tmp_path):
    folder = build(tmp_path)
    (folder / "metadata.json").unlink()
    explanation = hub_of(tmp_path).explain(NAME)
    assert not explanation.ok and "no metadata.json" in str(explanation)


@pytest.mark.parametrize("text", ["{", "{}", '{"name": "norm"}', "[]", '"x"'])
def test_metadata_that_is_not_one(tmp_path, text):
    (build(tmp_path) / "metadata.json").write_text(text)
    with pytest.raises(HubError, match="wanted the metadata of a kernel"):
        hub_of(tmp_path).load(NAME)


def test_an_id_that_is_no_name_is_refused(tmp_path):
    build(tmp_path, id="os.path")
    with pytest.raises(HubError, match="an id that is a name in Python"):
        hub_of(tmp_path).load(NAME)


def test_another_version_than_asked(tmp_path):
    build(tmp_path, version=2)
    with pytest.raises(LockViolation,
                       match="wanted version 1, got a build that says it is version 2"):
        hub_of(tmp_path).load(NAME, version=1)
    assert hub_of(tmp_path).explain(NAME).version == "2"


# What compiled files ask for

def native(folder: Path, data: bytes, name: str = "lib.abi3.so") -> Hub:
    variant = f"torch{repositories.TORCH}-cxx11-cpu-{os.uname().machine}-linux"
    build(folder, variant, files={"__init__.py": "", name: data})
    return hub_of(folder)


def why(hub: Hub) -> str:
    return str(hub.explain(NAME).verdicts[0])


linux = pytest.mark.skipif(os.uname().sysname != "Linux", reason="reads Linux libraries")


@linux
def test_compiled_files_are_read(tmp_path):
    fine = repositories.plain_library(tmp_path / "c", "a.so", ASKS_LIBC).read_bytes()
    assert why(native(tmp_path / "1", fine)).endswith("accepted")
    assert "built for cpython-36m" in why(native(tmp_path / "2", fine,
                                                 "lib.cpython-36m-x86_64-linux-gnu.so"))
    wrong = bytearray(fine)
    wrong[18:20] = struct.pack("<H", 243)
    assert "built for riscv64" in why(native(tmp_path / "3", bytes(wrong)))
    newer = fine.replace(b"GLIBC_2.2.5", b"GLIBC_9.9.9").replace(b"GLIBC_2.17", b"GLIBC_9.99")
    assert (newer != fine
            and "rejected, lib.abi3.so needs GLIBC_9.9" in why(native(tmp_path / "4", newer)))
    assert "not a 64-bit" in why(native(tmp_path / "5", b"MZ"))
    assert "damaged ELF" in why(native(tmp_path / "6", fine[:200]))
    asks = repositories.plain_library(tmp_path / "c", "b.so", "extern int PyNo_Such(void);\n"
                                      "int f(void) { return PyNo_Such(); }").read_bytes()
    assert "PyNo_Such, which this Python does not have" in why(native(tmp_path / "7", asks))


@linux
def test_a_damaged_compiled_file_is_called_so(tmp_path):
    fine = repositories.plain_library(tmp_path, "a.so", ASKS_LIBC).read_bytes()
    sections, = struct.unpack_from("<Q", fine, 40)
    draw, damaged = random.Random(0), 0
    for _ in range(400):
        data = bytearray(fine)
        for at in (draw.randrange(64), draw.randrange(sections, len(fine)),
                   draw.randrange(len(fine))):
            data[at] = draw.randrange(256)
        (tmp_path / "b.so").write_bytes(data[:draw.choice((len(data), draw.randrange(len(data))))])
        try:
            elf.read(tmp_path / "b.so")
        except elf.NotElf:
            damaged += 1
    assert 50 < damaged < 400


@linux
def test_tables_that_repeat_for_ever_end(tmp_path):
    data = bytearray(repositories.plain_library(tmp_path, "a.so", ASKS_LIBC).read_bytes())
    table, = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    header = next(at for at in range(table, table + size * count, size)
                  # SHT_GNU_verneed
                  if struct.unpack_from("<I", data, at + 4) == (0x6FFFFFFE,))
    record, = struct.unpack_from("<Q", data, header + 24)
    # so many records,
    struct.pack_into("<I", data, header + 44, 2**32 - 1)
    # and the next is the same
    struct.pack_into("<I", data, record + 12, 0)
    (tmp_path / "b.so").write_bytes(data)
    with pytest.raises(elf.NotElf, match="a damaged ELF file: its tables repeat or overlap"):
        elf.read(tmp_path / "b.so")


@linux
def test_without_pyelftools_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = repositories.plain_library(tmp_path, "a.so", ASKS_LIBC)
    monkeypatch.setitem(sys.modules, "elftools.elf.elffile", None)
    with pytest.raises(HubError, match=r"pip install 'layerzero\[hub\]'"):
        list(elf.load_problems(path))


@linux
def test_portable_builds_can_be_demanded(tmp_path):
    old = repositories.plain_library(tmp_path / "c", "a.so", ASKS_LIBC).read_bytes()
    new = old.replace(b"GLIBC_2.2.5", b"GLIBC_2.33\0").replace(b"GLIBC_2.17", b"GLIBC_2.33")
    assert new != old
    native(tmp_path / "old", old), native(tmp_path / "new", new)
    assert hub_of(tmp_path / "old", portable=True).explain(NAME).ok
    hub = hub_of(tmp_path / "new")
    assert (hub.explain(NAME).ok
            and "beyond manylinux_2_28" in why(hub)), "it loads here, and that is noted"
    with pytest.raises(NoVariant, match=r"GLIBC_2\.33, beyond manylinux_2_28"):
        hub_of(tmp_path / "new", portable=True).load(NAME)
    tag = next(s for s in importlib.machinery.EXTENSION_SUFFIXES if "cpython" in s)
    native(tmp_path / "one", old, f"lib{tag}")
    assert hub_of(tmp_path / "one").explain(NAME).ok
    assert "not for the stable ABI" in str(hub_of(tmp_path / "one", portable=True).explain(NAME))


# Allowed

def test_nothing_runs_that_is_not_allowed(tmp_path):
    marker = tmp_path / "marker"
    build(tmp_path / "r", files={"__init__.py": TRAP.format(marker=str(marker))}, id="_trap_a")
    for allow in ((), ("other/*",), ("me/norm2",), ("ME/*",)):
        with pytest.raises(NotAllowed, match="me/norm is not allowed"):
            hub_of(tmp_path / "r", allow=allow).load(NAME)
    assert not hub_of(tmp_path / "r", allow=()).explain(NAME).ok
    assert not marker.exists()
    hub_of(tmp_path / "r", allow=("x/*", "me/n*")).load(NAME)
    assert marker.exists()
    with pytest.raises(HubError, match="several patterns"):
        Hub(allow="me/*")


def test_pinned_is_allowed(tmp_path):
    build(tmp_path / "r", id="_pinned_a")
    lock = locked(hub_of(tmp_path / "r"), tmp_path)
    assert hub_of(tmp_path / "r", allow=(), lock=lock).load(NAME).version == "1"


# Pinned

def test_a_lockfile_holds_every_file_of_every_build(tmp_path):
    build(tmp_path / "r", id="_lock_a", files={"__init__.py": "", "more/inner.py": "x = 1"})
    build(tmp_path / "r", "torch-cuda")
    path = locked(hub_of(tmp_path / "r"), tmp_path)
    pins = json.loads(path.read_text())["kernels"]["me/norm@1"]["variants"]
    assert set(pins) == {UNIVERSAL, "torch-cuda"}, "of other machines too"
    assert set(pins[UNIVERSAL]) == {"__init__.py", "more/inner.py", "metadata.json"}
    explanation = hub_of(tmp_path / "r", lock=path).explain(NAME)
    assert explanation.ok and "me/norm@1 as pinned" in str(explanation)


@pytest.mark.parametrize(("change", "word"), [
    (lambda f: (f / "__init__.py").write_text("x = 2"), "__init__.py: wanted sha256"),
    (lambda f: (f / "metadata.json").open("a").write(" "), "metadata.json: wanted sha256"),
    (lambda f: (f / "extra.py").write_text("x = 2"), "extra.py: not listed"),
    (lambda f: (f / "inner.py").unlink(), "inner.py: missing"),
])
def test_a_changed_file_is_found(tmp_path, change, word):
    marker = tmp_path / "marker"
    folder = build(tmp_path / "r", files={"__init__.py": TRAP.format(marker=str(marker)),
                                          "inner.py": ""})
    path = locked(hub_of(tmp_path / "r"), tmp_path)
    change(folder)
    with pytest.raises(Tampered) as caught:
        hub_of(tmp_path / "r", lock=path).load(NAME)
    assert (word in str(caught.value) and "hub.lock" in str(caught.value)
            and "lz hub lock" in str(caught.value))
    assert (not marker.exists()
            and isinstance(caught.value, (LockViolation, DataError, LayerZeroError)))


def test_planted_bytecode_is_not_run(tmp_path):
    """Python prefers it to the source, and no digest covers it."""
    folder = build(tmp_path / "r", files={"__init__.py": "from . import inner\nVALUE = inner.VALUE",
                                          "inner.py": "VALUE = 'fine'"}, id="_bytecode_a",
                   digest=True)
    path = locked(hub_of(tmp_path / "r"), tmp_path)
    source, (at, size) = folder / "inner.py", ((folder / "inner.py").stat().st_mtime_ns, 14)
    source.write_text("VALUE = 'evil'")
    os.utime(source, ns=(at, at))
    py_compile.compile(str(source))
    source.write_text("VALUE = 'fine'")
    os.utime(source, ns=(at, at))
    assert source.stat().st_size == size and list((folder / "__pycache__").glob("inner.*.pyc"))
    (folder / "__pycache__" / "notes.py").write_text("")
    (folder / "sourceless.pyc").write_bytes(b"")
    module = hub_of(tmp_path / "r", lock=path).load(NAME).module
    assert module.VALUE == "fine" and not Path(module.__file__).with_name("sourceless.pyc").exists()


@pytest.mark.parametrize(("variant", "version", "words"), [
    ("", 2, ("does not pin me/norm version 2", "me/norm@1")),
    ("torch-cpu", 1, ("torch-universal", "torch-cpu"))])
def test_what_is_not_pinned_is_blocked(tmp_path, variant, version, words):
    build(tmp_path / "r")
    path = locked(hub_of(tmp_path / "r"), tmp_path)
    build(tmp_path / "r", variant or UNIVERSAL, version)
    with pytest.raises(LockViolation) as caught:
        hub_of(tmp_path / "r", lock=path).load(NAME, version=version)
    assert all(word in str(caught.value) for word in words)


def test_another_repository_than_the_pinned_one(tmp_path):
    build(tmp_path / "r")
    path = locked(hub_of(tmp_path / "r"), tmp_path)
    with pytest.raises(LockViolation, match="does not pin me/other"):
        Hub(folders={"me/other": tmp_path / "r"}, allow=("*",), lock=path).load("me/other")


def test_another_commit_than_the_pinned_one(tmp_path):
    build(tmp_path / "r")
    commit = in_cache(tmp_path / "cache", tmp_path / "r", NAME, 1)
    hub = Hub(cache=tmp_path / "cache", allow=("me/*",))
    path = locked(hub, tmp_path, "me/norm@1")
    assert json.loads(path.read_text())["kernels"]["me/norm@1"]["commit"] == commit
    assert Hub(cache=tmp_path / "cache",
               lock=path).explain(NAME).version == "1", "the only one that is pinned"
    build(tmp_path / "r", files={"__init__.py": "changed = True"})
    moved = repositories.commit_of("another")
    home = tmp_path / "cache" / "kernels--me--norm"
    (home / "snapshots" / commit).rename(home / "snapshots" / moved)
    (home / "refs" / "v1").write_text(moved)
    with pytest.raises(LockViolation, match=f"wants commit {commit}, got {moved}"):
        Hub(cache=tmp_path / "cache", lock=path).load(NAME, version=1)


def test_a_lockfile_of_kernels_pins_the_commit(tmp_path):
    from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

    build(tmp_path / "r", id="_peer_lock_a")
    commit = in_cache(tmp_path / "cache", tmp_path / "r", NAME, 1)
    path = tmp_path / "kernels.lock"
    for pinned, fits in ((commit, True), ("0" * 40, False)):
        locks = KernelLocks({KernelDependency(NAME, KernelVersion.Version(1)): KernelLock(pinned)})
        path.write_text(locks.to_json())
        hub = Hub(cache=tmp_path / "cache", lock=path)
        if fits:
            assert hub.load(NAME).version == "1" and "the commit only" in str(hub.explain(NAME))
            continue
        with pytest.raises(LockViolation,
                           match=f"kernels.lock wants commit {'0' * 40}, got {commit}"):
            hub.load(NAME)


@pytest.mark.parametrize("text", [
    "", "{", "3", '{"schema": "other/1", "kernels": {}}', '{"schema": "layerzero.hub.lock/1"}',
    '{"schema": "layerzero.hub.lock/1", "kernels": []}',
    '{"schema": "layerzero.hub.lock/1", "kernels": {"me/norm": {"commit": "", "variants": {}}}}',
    '{"schema": "layerzero.hub.lock/1", "kernels": {"me/norm@1": {"commit": 3, "variants": {}}}}',
    '{"schema": "layerzero.hub.lock/1", "kernels": {"me/norm@1": {"commit": "", "variants": {"v": '
    '{"f": 3}}}}}',
    '[{"dependency": 3}]', "[" * 2000])
def test_a_lockfile_that_is_not_one(tmp_path, text):
    (tmp_path / "hub.lock").write_text(text)
    build(tmp_path / "r")
    with pytest.raises(DataError, match=r"hub\.lock"):
        hub_of(tmp_path / "r", lock=tmp_path / "hub.lock").load(NAME)


def test_a_lockfile_is_the_same_after_reading(tmp_path):
    from layerzero.integrations.hub import lockfile

    build(tmp_path / "r")
    path = locked(hub_of(tmp_path / "r"), tmp_path)
    assert lockfile.read(path).to_json() == json.loads(path.read_text())
    assert HubLock().to_json()["kernels"] == {}


def test_the_digest_of_the_metadata_counts_without_a_lockfile(tmp_path):
    folder = build(tmp_path / "r", id="_digest_a", digest=True)
    assert "as metadata.json says" in str(hub_of(tmp_path / "r").explain(NAME))
    (folder / "__init__.py").write_text("x = 2")
    with pytest.raises(Tampered, match=r"not what its metadata\.json says"):
        hub_of(tmp_path / "r").load(NAME)
    with pytest.raises(Tampered):
        hub_of(tmp_path / "r").lockfile(NAME)
