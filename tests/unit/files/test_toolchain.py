"""Running a compiler."""

from __future__ import annotations

import sys

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
