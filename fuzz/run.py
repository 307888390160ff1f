"""Fuzzing of the parsers: python fuzz/run.py policy --seconds 60, or without a name all in turn.

With atheris guided by the code that an input reaches, else (or with --plain) by chance alone. What
is found is written to fuzz/found/ as it came in; `--keep` also adds to the corpus what reached new
code, as small as it gets. Exit code 1 if something other than a LayerZeroError came out, or an
input took longer than --limit seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FOUND = HERE / "found"
MAX_FOUND = 5                                  # then it is enough
MAX_POOLED = 200                               # files that are changed further
MAX_KEPT = 16                                  # files of a target's corpus


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?",
                        help="one of the functions of targets.py; default: each in turn")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="0: another one every time")
    parser.add_argument("--keep", action="store_true",
                        help="add what reached new code to the corpus")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that one input may take")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked, rest = parser.parse_known_args()
    if asked.inside:
        fuzz(asked.target, rest)
        return 0
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    from targets import TARGETS
    if asked.list:
        print("\n".join(f"{name:14} {(of.__doc__ or '').splitlines()[0]}"
                        for name, of in TARGETS.items()))
        return 0
    if asked.target and asked.target not in TARGETS:
        parser.error(f"there is no target {asked.target!r}; there are {', '.join(TARGETS)}")
    names = [asked.target] if asked.target else list(TARGETS)
    if asked.plain or importlib.util.find_spec("atheris") is None:
        return max(by_chance(name, asked.seconds, asked.seed, asked.limit) for name in names)
    return max(run(name, asked.seconds, asked.seed, asked.keep) for name in names)


def by_chance(name: str, seconds: float, seed: int, limit: float) -> int:
    """Change the files of the corpus, and what was made of them and accepted, for so long."""
    import warnings

    from mutations import mutated
    from targets import MAX_BYTES, TARGETS

    from layerzero.spec.errors import LayerZeroError
    warnings.simplefilter("ignore")
    rng = random.Random(seed or None)
    pool = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    began, tried, accepted, found = time.monotonic(), 0, 0, 0
    while time.monotonic() - began < seconds and found < MAX_FOUND:
        content = mutated(rng.choice(pool), rng)[:MAX_BYTES * 4]
        tried, start, wrong = tried + 1, time.monotonic(), ""
        try:
            TARGETS[name](content)
            accepted += 1
            pool = [*pool, content][-MAX_POOLED:] if len(content) <= MAX_BYTES else pool
        except LayerZeroError:
            pass
        except BaseException as e:             # a Rust panic is no Exception; Ctrl-C goes on
            if isinstance(e, KeyboardInterrupt):
                raise
            wrong = traceback.format_exc()
        if time.monotonic() - start > limit:
            wrong = wrong or f"it took {time.monotonic() - start:.0f} seconds"
        if wrong:
            found += 1
            FOUND.mkdir(exist_ok=True)
            path = FOUND / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
            path.write_bytes(content)
            print(f"{name}: {path}\n{wrong}", flush=True)
    print(f"{name}: {tried} inputs by chance, {accepted} accepted, {found} found", flush=True)
    return 1 if found else 0


def run(name: str, seconds: float, seed: int, keep: bool) -> int:
    """A process of its own: libFuzzer ends the one it runs in."""
    from targets import MAX_BYTES
    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as new:
        flags = [f"-max_total_time={max(round(seconds), 1)}", f"-seed={seed}",
                 f"-max_len={MAX_BYTES}", f"-artifact_prefix={FOUND}/{name}-", "-timeout=20",
                 "-rss_limit_mb=4096", "-print_final_stats=1"]
        done = subprocess.run([sys.executable, __file__, name, "--inside", *flags, new,
                               str(CORPUS / name)],
                              stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
                              errors="replace")
        lines = done.stdout.splitlines()
        runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
        reached = next((line for line in reversed(lines) if " cov: " in line), "")
        print(f"{name}: {runs} inputs, {reached.strip() or 'no coverage'}, exit {done.returncode}",
              flush=True)
        if done.returncode:
            start = next((i for i, line in enumerate(lines) if "Uncaught Python exception" in line),
                         -30)
            print("\n".join(lines[start:]))
        if keep and not done.returncode:
            _keep(name, Path(new))
    return 1 if done.returncode else 0


def _keep(name: str, new: Path) -> None:
    """The smallest of what reached new code, as many as there is room for."""
    home = CORPUS / name
    home.mkdir(parents=True, exist_ok=True)
    room = MAX_KEPT - len(list(home.iterdir()))
    for path in sorted((p for p in new.iterdir()), key=lambda p: p.stat().st_size)[:max(room, 0)]:
        content = path.read_bytes()
        (home / hashlib.sha256(content).hexdigest()[:12]).write_bytes(content)


def fuzz(name: str, flags: list[str]) -> None:
    import atheris
    with atheris.instrument_imports(include=[
            "layerzero.spec", "layerzero.selection", "layerzero.perf", "layerzero.plan",
            "layerzero.verify.trace.definition", "layerzero.verify.trace.inputs.constraints",
            "layerzero.world.config", "layerzero.world.capabilities",
            "layerzero.world.registry.certificates", "layerzero.tuning"]):
        from targets import TARGETS
    from mutations import mutated

    from layerzero.spec.errors import LayerZeroError

    def one(content: bytes) -> None:
        with contextlib.suppress(LayerZeroError):
            TARGETS[name](content)

    def mutator(content: bytes, most: int, seed: int) -> bytes:
        if seed % 4 == 0:
            return atheris.Mutate(content, most)
        return mutated(bytes(content), random.Random(seed))[:most]

    atheris.Setup([sys.argv[0], *flags], one, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    raise SystemExit(main())
