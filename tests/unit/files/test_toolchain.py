"""Running a compiler."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from layerzero.files import toolchain
from layerzero.spec.errors import ConfigError

PART = toolchain.BuildPart("the CPU kernels", "its own CPU kernels", "them")


def run(script: str) -> str:
    return toolchain.run_compiler(PART, [sys.executable, "-c", script])


@pytest.mark.parametrize("script", [
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import sys; sys.exit('g++: fatal error: Killed signal terminated program cc1plus')"])
def test_a_compiler_that_was_killed_is_not_one_that_refused(script):
    with pytest.raises(ConfigError, match="was killed"):
        run(script)


def test_what_a_compiler_says_is_returned():
    assert run("") == ""
    assert run("import sys; sys.exit('a.cpp:3: error: no')").startswith("a.cpp:3: error: no\n")


def test_an_interrupted_build_ends_its_compilers_and_what_they_started(tmp_path):
    mark = tmp_path / "went on"
    child = f"import time; time.sleep(5); open({str(mark)!r}, 'w')"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run, f"import subprocess, sys\nprint(flush=True)\n"
                                      f"subprocess.run([sys.executable, '-c', {child!r}])")
        while not toolchain._running:
            time.sleep(0.01)
        toolchain.stop_compilers()
        with pytest.raises(ConfigError, match="was killed"):
            waiting.result(60)
    assert not mark.exists() and not toolchain._running
