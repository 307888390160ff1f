"""Building the native call path: on demand only, into the cache folder, and never missed where it
cannot be built.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from helpers import RMS_NORM, rows, run_python
from plain_build import build_by_plain_compiler

import layerzero as lz
from layerzero.dispatch import native
from layerzero.files.sealed import SealedFolder
from layerzero.spec.errors import ConfigError

SOURCES = Path(lz.__file__).parents[1]

REPORT = """
import json, torch
import layerzero as lz
from layerzero.dispatch import native
q = torch.randn(1, 2, 8, 16)
for _ in range(3):
    out = lz.attention(q, q, q)
    lz.rms_norm(q)
check = next(c for c in lz.doctor().checks if c.name == "native fast path")
close = torch.allclose(out, lz.op("attention").reference(q, q, q), atol=1e-5)
print(json.dumps({"ok": check.ok, "found": check.detail, "hint": check.hint, "right": close,
                  "path": str(native.library_path()),
                  "native": type(lz.attention).__name__, "calls": lz.stats().calls["attention"]}))
"""


def process(code: str, **environ: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")}
    env["PYTHONPATH"] = str(SOURCES)
    done = run_python("-c", code, env={**env, **environ}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def report(folder: Path, **environ: str) -> dict:
    return json.loads(process(REPORT, LAYERZERO_CACHE_DIR=str(folder), **environ))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def still_works():
    torch.testing.assert_close(lz.rms_norm(rows()), RMS_NORM.reference(rows()))


# not built

def test_nothing_is_ever_built_by_a_call(tmp_path):
    outcome = report(tmp_path)
    assert outcome["ok"] and "not built" in outcome["found"] and outcome["hint"] == "run: lz build"
    assert (outcome["native"] == "function" and outcome["right"]
            and sum(outcome["calls"].values()) == 3)
    assert [str(p) for p in tmp_path.rglob("*") if "native" in p.parts or p.suffix == ".so"] == []


def test_it_can_be_switched_off(tmp_path):
    outcome = report(tmp_path, LAYERZERO_NATIVE="0")
    assert (outcome["ok"] and "switched off" in outcome["found"] and outcome["native"] == "function"
            and outcome["right"])


def test_the_library_is_kept_under_all_it_depends_on(folder):
    path = native.library_path()
    assert path.is_relative_to(folder) and path.name == "fastpath.so"
    assert (str(torch.__version__) in path.parent.name
            and str(sys.implementation.cache_tag) in path.parent.name)
    assert not folder.exists(), "asking creates nothing"


def test_a_change_of_any_source_names_another_library(folder, tmp_path, monkeypatch):
    """A header that is not in the hash would leave a library of older code in use."""
    included = {line.split('"')[1] for path in (native.SOURCE, *native.HEADERS)
                for line in path.read_text().splitlines() if line.startswith('#include "')}
    assert included and included <= {path.name for path in native.HEADERS}
    seen = {native.library_path()}
    for path in (native.SOURCE, *native.HEADERS):
        changed = tmp_path / path.name
        changed.write_text(path.read_text() + "// changed\n")
        monkeypatch.setattr(native, "SOURCE", changed if path == native.SOURCE else native.SOURCE)
        monkeypatch.setattr(native, "HEADERS",
                            tuple(changed if h == path else h for h in native.HEADERS))
        seen.add(native.library_path())
    assert len(seen) == 2 + len(native.HEADERS)


def test_headers_of_torch_that_want_more_than_the_stand_ins_declare_are_used_whole(
        folder, tmp_path, monkeypatch):
    """A new torch may use more of the headers that the build replaces: it costs time, no build."""
    commands = tmp_path / "commands"
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f"""
echo "$*" >> {commands}
case "$*" in *{folder}*/include*) echo 'x.h:1: error: not declared' >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done; echo library > "$2"
"""))
    assert native.build_fast_path().read_text() == "library\n"
    first, second = commands.read_text().splitlines()
    assert first.replace(next(a for a in first.split() if a.endswith("/include")) + " ", "",
                         1) == second
    for name in native.REPLACED_HEADERS:       # else it would replace nothing
        assert (Path(torch.__file__).parent / "include" / name).exists() or "node.h" in name


# cannot be built

def test_a_missing_compiler_says_what_to_do(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError,
                       match=r"needs a C\+\+ compiler \(g\+\+ or clang\+\+\).*set CXX.*works without it"):
        native.build_fast_path()
    assert not folder.exists()
    still_works()


def test_a_compiler_that_is_not_there_is_named(folder, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/g++")
    with pytest.raises(ConfigError,
                       match=r"'/no/such/g\+\+' cannot be run: .*unset CXX.*works without"):
        native.build_fast_path()
    still_works()


def test_a_compile_error_is_shown(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx",
                                     "echo note: nothing >&2; echo 'x.cpp:7: error: no such "
                                     "header' >&2; exit 1"))
    messages = []
    with pytest.raises(ConfigError) as caught:
        native.build_fast_path(say=messages.append)
    text = str(caught.value)
    assert ("did not compile; LayerZero works without it" in text
            and "x.cpp:7: error: no such header" in text)
    assert "note: nothing" not in text and f"command: {tmp_path / 'cxx'} -O3" in text
    assert messages == [f"compiling fastpath.cpp with cxx for torch {torch.__version__}"]
    assert (list(folder.rglob("*.so")) == []
            and list(folder.rglob("tmp*")) == []), "nothing half made is left"
    still_works()


def test_a_compiler_may_come_with_arguments(folder, tmp_path, monkeypatch):
    record = tmp_path / "arguments"
    cxx = script(tmp_path / "cxx", f'echo "$@" > {record}; exit 1')
    monkeypatch.setenv("CXX", f"{cxx} --first 'second one'")
    with pytest.raises(ConfigError):
        native.build_fast_path()
    assert (record.read_text().startswith("--first second one -O3")
            and str(native.SOURCE) in record.read_text())


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write .*LAYERZERO_CACHE_DIR"):
        native.build_fast_path()
    still_works()


def test_one_part_that_does_not_compile_keeps_the_other_from_nothing(folder, tmp_path, monkeypatch):
    cxx = script(tmp_path / "cxx", """
case "$*" in
  *fastpath.cpp*) echo 'fastpath.cpp:7: error: no such header' >&2; exit 1 ;;
esac
while [ "$1" != -o ]; do shift; done
echo made > "$2" """)
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ConfigError, match=r"fastpath\.cpp:7: error: no such header"):
        native.build()
    assert [p.name for p in folder.rglob("*.so")] == ["kernels.so"]


def test_what_stops_both_parts_is_told_of_both(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "echo 'error: no disk' >&2; exit 1"))
    with pytest.raises(ConfigError) as caught:
        native.build()
    assert "the native fast path did not compile" in str(caught.value)
    assert "the CPU kernels did not compile" in str(caught.value)


# built, and broken

def test_a_library_that_does_not_load_is_reported_and_python_serves(tmp_path, monkeypatch):
    other = next((p for p in map(Path, sys.path) if (p / "lib-dynload").is_dir()), None)
    modules = sorted((Path(other) / "lib-dynload").glob("_*.so")) if other else []
    contents = [b"", b"not a library", b"\x7fELF" + bytes(200),
                *(p.read_bytes() for p in modules[:1])]
    for i, content in enumerate(contents):
        folder = tmp_path / str(i)
        monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(folder))
        store, parts = SealedFolder.of(native.library_path())
        store.write(content, *parts)
        if i in (0, 2):
            continue                           # looked at below, all at once
        outcome = report(folder)
        assert not outcome["ok"] and "does not load" in outcome["found"]
        assert outcome["hint"] == "build it again: lz build --force"
        assert (outcome["native"] == "function" and outcome["right"]
                and sum(outcome["calls"].values()) == 3)
    code = f"""
import os
from layerzero.dispatch import native
found = []
for i in (0, 2):
    os.environ["LAYERZERO_CACHE_DIR"] = {str(tmp_path)!r} + f"/{{i}}"
    native.module.cache_clear()
    native._problem.clear()
    found.append(native.status().text)
print(all("does not load" in text for text in found))
"""
    assert process(code) == "True"


def test_a_library_of_another_source_is_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    path = native.library_path()
    stale = path.parent.with_name(path.parent.name[:-1] + ("0" if path.parent.name[-1] != "0"
                                                           else "1")) / path.name
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an older version")
    assert not path.exists() and native.library_path() != stale
    assert "not built" in report(tmp_path)["found"]


# really built

@pytest.mark.integration
def test_a_real_build(tmp_path_factory):
    """Compiles for the installed torch, then a new process uses it. Without optimization: `make
    build` and the tests of the native path are of the real options."""
    folder, path, said = build_by_plain_compiler(tmp_path_factory)
    assert {line.split()[1] for line in said[:2]} == {"fastpath.cpp", "kernels.cpp"}, "at once"
    assert sorted(p.name for p in path.parent.iterdir()) == ["fastpath.so", "fastpath.so.seal"]
    outcome = report(folder)
    assert (outcome["ok"] and outcome["found"] == f"loaded for torch {torch.__version__}"
            and outcome["hint"] == "")
    assert (outcome["native"] == "builtin_function_or_method" and outcome["right"]
            and sum(outcome["calls"].values()) == 3)
    off = report(folder, LAYERZERO_NATIVE="0")
    assert off["native"] == "function" and "switched off" in off["found"]
