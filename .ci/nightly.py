"""The long lanes, one after the other: what takes hours and `make test` leaves out.

Each lane is a command whose output goes to nightly/<lane>.log. A lane that fails does not stop the
others; the table at the end says how each went, and the exit code is 1 if one failed.

    python .ci/nightly.py                        every lane
    python .ci/nightly.py --lanes fuzz,soak      some of them
    python .ci/nightly.py --scale 0.01  a rehearsal: a hundredth of the time for what takes a time
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "nightly"
PYTEST = (sys.executable, "-m", "pytest", "-q", "--timeout=3600", "-n", "2")
LZ = (sys.executable, "-m", "layerzero")
HOUR = 3600.0


@dataclass(frozen=True)
class Lane:
    name: str
    says: str
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    hours: float = 4.0                         # after which it is ended and has failed
    needs: str = ""                            # a module without which it is left out


def lanes(scale: float) -> list[Lane]:
    soak, fuzz = max(2 * 60 * scale, 0.1), max(round(300 * scale), 1)
    found = [
        Lane("contract", "the contract of every kernel, what compiles in full",
             (*PYTEST, "tests/contract"), {"LZ_TEST_JIT": "all", "LZ_TEST_FULL": "1"}),
        Lane("faults", "every planted fault is found and named",
             (*PYTEST, "tests/faults"), {"LZ_TEST_FULL": "1"}),
        Lane("seeds", "no sound kernel fails in twenty seeds",
             (*PYTEST, "-m", "stress", "tests/faults"),
             {"LZ_TEST_SEEDS": "20"}, hours=8.0),
        Lane("certificates", "every case and layout of every contract",
             (*LZ, "verify", "kernels", "--full"),
             hours=8.0),
        Lane("stress", "a hundred threads at full size",
             (*PYTEST, "-n", "0", "-m", "stress", "tests/stress"),
             {"LZ_STRESS": "full"}),
        Lane("models", "models of transformers and diffusers, what compiles and exports too",
             (*PYTEST, "tests/hf", "tests/pipelines", "tests/models", "tests/native",
              "tests/emulator", "tests/integration"),
             {"LZ_TEST_FULL": "1"}),
        Lane("rest", "what make test leaves out of the other folders",
             (*PYTEST, "tests/unit", "tests/interpreter", "tests/stress", "tests/examples",
              "tests/fuzz", "tests/hub_kernels"),
             {"LZ_TEST_FULL": "1"}),
        Lane("sizes", "families of models at more batches and lengths",
             (*LZ, "gate", "--stages", "models", "--full")),
        Lane("ladder", "a real model, layer by layer and its logits",
             (*LZ, "verify", "models", "logits", "--full")),
        Lane("gate", "declarations, files, speed, readiness",
             (*LZ, "gate", "--stages", "static,schema,performance,readiness", "--out",
              str(LOGS / "gate"))),
        Lane("soak", f"{soak:g} minutes of faults, forks and changes",
             (*LZ, "soak", "--minutes", f"{soak:g}", "--out", str(LOGS / "soak.json")),
             hours=soak / 60 + 1)]
    for script in sorted((ROOT / "fuzz").glob("*.py")):
        if '"--seconds"' in script.read_text(encoding="utf-8"):            # those that are commands
            guided = "import atheris" in script.read_text(encoding="utf-8")
            found.append(Lane(f"fuzz-{script.stem}",
                              f"{fuzz} seconds for each target of {script.name}",
                              (sys.executable, str(script.relative_to(ROOT)), "--seconds",
                               str(fuzz)), hours=8.0,
                              needs="atheris" if guided else ""))
    return found


@dataclass(frozen=True)
class Outcome:
    lane: Lane
    state: str                                 # passed | FAILED | skipped | interrupted
    seconds: float = 0.0
    last: str = ""


def run(lane: Lane) -> Outcome:
    """The lane in a process group of its own, so that what it started ends with it."""
    if lane.needs and importlib.util.find_spec(lane.needs) is None:
        return Outcome(lane, "skipped", last=f"needs {lane.needs}: pip install {lane.needs}")
    path, started = LOGS / f"{lane.name}.log", time.monotonic()
    source = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, **lane.environ}
    said = " ".join([*(f"{k}={v}" for k, v in lane.environ.items()), shlex.join(lane.command)])
    print(f"==> {lane.name}: {lane.says}\n    {said}", flush=True)
    with path.open("w", encoding="utf-8") as log:
        log.write(f"$ {said}\n")
        log.flush()
        process = subprocess.Popen(lane.command, cwd=ROOT, env=environ, stdout=log,
                                   stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            code = process.wait(lane.hours * HOUR)
            state = "passed" if code == 0 else "FAILED"
            end = "" if code == 0 else f"exit {code}: "
        except subprocess.TimeoutExpired:
            state, end = "FAILED", f"not done after {lane.hours:g} hours: "
        except KeyboardInterrupt:
            state, end = "interrupted", ""
        finally:
            _end(process)
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
             if line.strip()]
    return Outcome(lane, state, time.monotonic() - started,
                   f"{end}{lines[-1] if len(lines) > 1 else 'no output'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt first: a soak writes its report then."""
    for signal_, seconds in ((signal.SIGINT, 60), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, signal_)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def summary(outcomes: Sequence[Outcome]) -> str:
    rows = [("lane", "verdict", "minutes", "last line")]
    rows += [(o.lane.name, o.state, f"{o.seconds / 60:.1f}", o.last[:100]) for o in outcomes]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), row[1].ljust(widths[1]),
                                row[2].rjust(widths[2]),
                                row[3]]).rstrip() for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="",
                        help="their names, separated by commas; default: all")
    parser.add_argument("--scale", type=float, default=1.0,
                        help="of what takes a time: fuzzing and the soak")
    parser.add_argument("--list", action="store_true", help="name the lanes and end")
    asked = parser.parse_args(words)
    if not asked.scale > 0:
        parser.error(f"--scale must be > 0, got {asked.scale}")
    known = {lane.name: lane for lane in lanes(asked.scale)}
    if asked.list:
        print("\n".join(f"{lane.name:14} {lane.says}" for lane in known.values()))
        return 0
    names = [name.strip() for name in asked.lanes.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no lane {unknown[0]!r}; there are {', '.join(known)}")
    LOGS.mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    for name in names or known:
        outcomes.append(run(known[name]))
        print(f"    {outcomes[-1].state} after {outcomes[-1].seconds / 60:.1f} minutes", flush=True)
        if outcomes[-1].state == "interrupted":
            break
    table = summary(outcomes)
    (LOGS / "summary.txt").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nlogs: {LOGS.relative_to(ROOT)}/")
    return (130 if outcomes[-1].state == "interrupted"
            else int(any(o.state == "FAILED" for o in outcomes)))


if __name__ == "__main__":
    sys.exit(main())
