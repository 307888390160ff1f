"""A real build by a plain compiler, without OpenMP, wide vectors and optimization: the tests that
are about it share one, as it takes half a minute.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import python

from layerzero.machine.process_lock import process_lock

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")

PLAIN_COMPILER = f"""#!/bin/sh
for a in "$@"; do
  shift
  case $a in
    -fopenmp|*/libgomp*|*/libiomp*|*/libomp*) echo 'error: no OpenMP' >&2; exit 1 ;;
    -march=native|-mcpu=native) ;;
    -O3) set -- "$@" -O0 ;;
    *) set -- "$@" "$a" ;;
  esac
done
exec {COMPILER} "$@"
"""

BUILD = """
import json
from layerzero.dispatch import native
assert native.status().text.startswith("not built")
said = []
path = native.build(say=said.append)
assert native.status().ok, "usable at once"
messages, stamp = len(said), path.stat().st_mtime_ns
assert native.build(say=said.append) == path and path.stat().st_mtime_ns == stamp
assert len(said) == messages, "built once"
print(json.dumps([str(path), said]))
"""


def build_by_plain_compiler(factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Returns the cache folder with the build, the fast path in it, and what the build said. One
    worker of a run builds, for which the others wait."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    base = factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result, compiler = run / "plain-build", run / "plain-build.json", run / "plain-cxx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYERZERO_CACHE_DIR", str(run / "plain-build-locks"))
        with process_lock("the build of a plain compiler", 280.0):
            if not result.exists():
                compiler.write_text(PLAIN_COMPILER)
                compiler.chmod(0o700)
                result.write_text(python(BUILD, LAYERZERO_CACHE_DIR=str(folder),
                                         CXX=str(compiler)))
    path, said = json.loads(result.read_text())
    return folder, Path(path), said
