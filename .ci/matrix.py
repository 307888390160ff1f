"""Other Pythons and other releases of torch: does the wheel work there, and do the tests pass?

A row is a Python and a torch, in a virtual environment of its own (.venv-matrix/, kept between
runs): the wheel is installed, imported and called from an empty folder, `lz doctor` is asked, the
native call path is compiled, and the tests of the rooms that a call goes through are run. A step
that fails ends its row only. The table is printed; it and every detail are in matrix/results.json.

    python .ci/matrix.py                             the rows below
    python .ci/matrix.py --rows 3.12:2.9.1,3.13:2.13.0
    python .ci/matrix.py --tests tests/unit/spec     other tests

torch comes without its dependencies but those in Python, so that no CUDA library is fetched. A
build that does not import without them (PyPI's for x86) wants --deps, or --index with CPU builds.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dist

ROOT = dist.ROOT
OUT = ROOT / "matrix"
VENVS = ROOT / ".venv-matrix"
ROWS = "3.10:2.8.0,3.12:2.9.1,3.13:2.10.0"
TESTS = ("tests/unit/dispatch/test_dispatch.py tests/unit/dispatch/test_native_aten.py "
         "tests/unit/selection/test_selection.py tests/unit/ops/test_attention_calls.py "
         "tests/unit/ops/test_group_norm.py tests/unit/backends/test_sdpa_kernel.py "
         "tests/unit/spec/test_codec.py tests/unit/world/test_registration.py")
MINUTES = 15                                   # after which a step has failed
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "fsspec",
               "markupsafe", "setuptools", "numpy")
TOOLS = ("packaging", "PyYAML", "typer", "rich", "hypothesis", "pytest>=8", "pytest-timeout",
         "pytest-xdist")
STEPS = ("install", "call", "doctor", "native", "tests")


@dataclass
class Row:
    python: str
    torch: str
    steps: dict[str, dict[str, object]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.python}-torch-{self.torch}"

    @property
    def ok(self) -> bool:
        return all(self.state(step) == "ok" for step in STEPS)

    def state(self, step: str) -> str:
        return str(self.steps.get(step, {}).get("state", "not run"))


class StepFailed(Exception):
    pass


def find_python(wanted: str) -> str | None:
    """Return an interpreter of this release: on PATH, this one, or one that pyenv built."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    built = sorted(glob.glob(str(home / f"{wanted}.*" / "bin" / "python")), reverse=True)
    for found in (sys.executable, shutil.which(f"python{wanted}"), *built):
        asked = found and subprocess.run(
            [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True)
        if asked and asked.stdout.strip() == wanted:
            return found
    return None


class Runner:
    """Runs the steps of one row; what they print goes to matrix/<row>.log."""

    def __init__(self, row: Row, wheel: Path, asked: argparse.Namespace) -> None:
        self.row, self.wheel, self.asked = row, wheel, asked
        self.venv, self.log = VENVS / row.name, OUT / f"{row.name}.log"
        self.python = str(self.venv / "bin" / "python")
        self.empty = self.venv / "empty"       # where nothing of the checkout is found

    def run(self) -> None:
        self.log.write_text("", encoding="utf-8")
        actions: dict[str, Callable[[], str]] = {
            "install": self.install, "call": self.call, "doctor": self.doctor,
            "native": self.native, "tests": self.tests}
        for step, action in actions.items():
            started = time.monotonic()
            try:
                state, last = "ok", action()
            except StepFailed as e:
                state, last = "FAILED", str(e)
            seconds = round(time.monotonic() - started, 1)
            self.row.steps[step] = {"state": state, "seconds": seconds, "last": last}
            print(f"    {step:8} {state:6} {seconds:6.1f} s  {last}", flush=True)
            if state == "FAILED" and step in ("install", "call"):
                return

    def install(self) -> str:
        source = find_python(self.row.python)
        if source is None:
            raise StepFailed(f"there is no Python {self.row.python} here: on PATH or from pyenv")
        pip = (self.python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
        index = ("--index-url", self.asked.index) if self.asked.index else ()
        deps = () if self.asked.deps else ("--no-deps",)
        torch = (*deps, "--only-binary", ":all:", *index, f"torch=={self.row.torch}")
        ready, asked_for = self.venv / "installed.txt", " ".join((*torch, *TORCH_NEEDS, *TOOLS))
        if not ready.exists() or ready.read_text(encoding="utf-8") != asked_for:
            self.do(source, "-m", "venv", "--clear", str(self.venv))
            self.do(*pip, *torch)
            self.do(*pip, *TORCH_NEEDS, *TOOLS)
            ready.write_text(asked_for, encoding="utf-8")
        self.empty.mkdir(exist_ok=True)
        self.do(*pip, "--no-deps", "--force-reinstall", str(self.wheel))
        return self.do(self.python, "-c", "import platform, torch; print('Python', "
                       "platform.python_version() + ', torch', torch.__version__)")

    def call(self) -> str:
        return self.do(self.python, "-c", dist.PROBE)

    def doctor(self) -> str:
        answer = json.loads(self.do(self.python, "-m", "layerzero", "doctor", "--json", whole=True))
        return f"{sum(check['ok'] for check in answer['checks'])} of {len(answer['checks'])} ok"

    def native(self) -> str:
        self.do(self.python, "-m", "layerzero", "build")
        return self.do(self.python, "-c", "from layerzero.dispatch import native as n; "
                       "s = n.status(); print(s.text); raise SystemExit(not s.ok)")

    def tests(self) -> str:
        return self.do(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2",
                       "--timeout=300", *self.asked.tests.split(), cwd=ROOT).strip("= ")

    def do(self, *command: str, cwd: Path | None = None, whole: bool = False) -> str:
        """Run a command and return the last line that it printed, or all that it printed."""
        environ = {name: value for name, value in os.environ.items()
                   if name != "PYTHONPATH" and not name.startswith("LAYERZERO_")}
        environ |= {"OMP_NUM_THREADS": "1", "LAYERZERO_CACHE_DIR": str(self.venv / "cache")}
        where = cwd or (self.empty if self.empty.is_dir() else ROOT)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            try:
                done = subprocess.run(command, cwd=where, env=environ, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT if not whole else log, text=True,
                                      timeout=60 * MINUTES)
            except subprocess.TimeoutExpired:
                raise StepFailed(f"not done after {MINUTES} minutes") from None
            log.write(done.stdout)
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else ""
        if done.returncode:
            raise StepFailed(f"exit {done.returncode}: {last or 'no output'}")
        return done.stdout if whole else last


def table(rows: Sequence[Row]) -> str:
    lines = [("Python", "torch", *STEPS)]
    for row in rows:
        cells = [row.state(step) for step in STEPS]
        counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", str(
            row.steps.get("tests", {}).get("last", "")))
        cells[-1] = ", ".join(counts) or cells[-1]
        lines.append((row.python, row.torch, *cells))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
                     for line in lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS, help=f"PYTHON:TORCH,...; default: {ROWS}")
    parser.add_argument("--tests", default=TESTS, help=f"default: {TESTS}")
    parser.add_argument("--index", default="", help="of torch's builds; default: that of pip")
    parser.add_argument("--wheel", type=Path, help="one that was built before; default: build it")
    parser.add_argument("--deps", action="store_true", help="all that torch asks for, CUDA too")
    asked = parser.parse_args(words)
    rows = []
    for text in filter(None, asked.rows.split(",")):
        if not re.fullmatch(r"3\.\d+:\d+\.\d+\.\d+", text):
            parser.error(f"--rows wants PYTHON:TORCH like 3.12:2.9.1, got {text!r}")
        rows.append(Row(*text.split(":")))
    for folder in (OUT, VENVS):
        folder.mkdir(exist_ok=True)
    (wheel,) = ([asked.wheel.resolve()] if asked.wheel
                else dist.build(OUT / "dist", kinds=("wheel",)))
    for row in rows:
        print(f"==> Python {row.python}, torch {row.torch}", flush=True)
        Runner(row, wheel, asked).run()
        result = {"machine": platform.machine(), "system": platform.system(), "wheel": wheel.name,
                  "tests": asked.tests, "rows": [{**asdict(row), "ok": row.ok} for row in rows]}
        (OUT / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{table(rows)}\n\ndetails: {OUT.relative_to(ROOT)}/")
    return int(not all(row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
