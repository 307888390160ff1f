"""llama.cpp as a peer: a GGUF model through lz against it, by logits, over a long decode, in time.

It comes from a wheel of PyPI (xllamacpp, which is compiled for every processor of its kind) in a
virtual environment of its own in the cache folder; `build` compiles llama-cpp-python for this
machine instead, which takes a quarter of an hour. Both compute with the same quantized weights and
round activations to the same 8 bits, so what differs is the order of float32 sums, and the
float16 in which llama.cpp keeps keys and values.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...files.paths import cache_dir
from ...models.sequence_kv import SequenceKV
from ...spec.codec import Record
from ...spec.errors import ConfigError
from .generation import TextGeneration
from .model import GGUFModel
from .token_step import TokenStep

WHEEL, SOURCE = "xllamacpp", "llama-cpp-python"
RUNNER = Path(__file__).with_name("llama_cpp_runner.py")
TOP = 512                                      # likeliest ids that are compared one by one
# Rounding activations to 8 bits alone costs a KL of 5e-3 on SmolLM2, and two ways to sum differ by
# as much: a code that is rounded the other way is another number.
AGREED, MEAN_KL, TIE = 0.98, 8e-3, 0.25
LONG, PERF_TOKENS, ROUNDS = 512, 32, 3
CONTEXTS, PROMPT = (64, 512), 500
APART = 0.02           # seconds between turns, in which threads of the one before fall asleep
TEXTS = (
    "The quick brown fox jumps over the lazy dog. In 1969, Apollo 11 landed on the Moon; the crew "
    "brought back 21.5 kg of rocks and left a plaque that said they had come in peace for all "
    "mankind.",
    "What is the capital of France, and how many people live there? The capital of France is "
    "Paris. About two million people live in the city itself.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n "
    "- 2)\n\n\nprint([fibonacci(i) for i in range(10)])\n",
)


@dataclass(frozen=True)
class Agreement(Record):
    """Measures how far two models agree on the next token, over `positions` of them."""

    name: str
    positions: int
    top_1: float                               # share of positions with the same likeliest token
    agreed: float                              # the same, or one that is as likely within TIE
    mean_kl: float
    largest_kl: float

    @property
    def passed(self) -> bool:
        return self.agreed >= AGREED and self.mean_kl <= MEAN_KL

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "positions": self.positions, "top_1": self.top_1,
                "agreed": self.agreed, "mean_kl": self.mean_kl, "largest_kl": self.largest_kl,
                "passed": self.passed}


@dataclass(frozen=True)
class Speed(Record):
    """Tokens per second of lz and of llama.cpp in rounds in turns: medians, and that of ratios."""

    name: str
    threads: int
    lz_rate: float
    peer_rate: float
    ratio: float

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "threads": self.threads, "lz": round(self.lz_rate, 2),
                "llama_cpp": round(self.peer_rate, 2), "ratio": round(self.ratio, 3)}


@dataclass
class PeerReport:
    """The result of `lz verify --peer llama.cpp`."""

    model: str
    peer: str
    lane: str
    agreements: list[Agreement] = field(default_factory=list)
    stages: list[Any] = field(default_factory=list)            # of llama_cpp_stages.py
    speeds: list[Speed] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)       # resident bytes

    @property
    def passed(self) -> bool:
        return all(a.passed for a in (*self.agreements, *self.stages))

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "peer": self.peer, "lane": self.lane, "passed": self.passed,
                "allowed": {"agreed": AGREED, "mean_kl": MEAN_KL, "tie": TIE},
                "agreements": [a.to_json() for a in self.agreements],
                "stages": [s.to_json() for s in self.stages],
                "speeds": [s.to_json() for s in self.speeds], "memory": self.memory}


# The peer.

def install_peer(build: bool = False) -> Path:
    """Return the Python that has llama.cpp; its environment is made on first use."""
    package = SOURCE if build else WHEEL
    folder = cache_dir() / "peers" / package
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (folder / "complete").exists():
        return python
    only = ["--no-binary", SOURCE] if build else ["--only-binary", ":all:"]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)],
                    [str(python), "-m", "pip", "install", "--quiet", *only, package, "numpy"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"llama.cpp as a peer wants the package {package}; {' '.join(command[:4])} ended "
                f"with {done.returncode}: {done.stderr.strip()[-500:]}"
                + ("" if build else "; --build compiles it from source instead"))
    (folder / "complete").touch()
    return python


class LlamaCpp:
    """A process of llama.cpp with a model; `ask` it for tokens.

    `runner` is a Python that has llama.cpp, or the command of a program that answers as
    llama_cpp_runner.py does.
    """

    def __init__(self, runner: Path | Sequence[str], model: str, threads: int,
                 context: int) -> None:
        command = [str(runner), "-I", str(RUNNER)] if isinstance(runner, Path) else list(runner)
        self._messages = tempfile.TemporaryFile()                      # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, model, str(threads), str(context)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._messages, text=True)
        # One thread is timed by its CPU time, which other processes change little.
        try:
            self.times_cpu = bool(self._read()["times_cpu"]) and threads == 1
        except ConfigError:
            self.close()
            raise

    def ask(self, prompt: Sequence[int], count: int, top: int = 0,
            cache: bool = False) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"prompt": list(prompt), "count": count, "top": top, "cache": cache,
                   "cpu_time": self.times_cpu}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def ask_stages(self, prompt: Sequence[int], names: Iterable[str]) -> dict[str, list[float]]:
        """Return the last rows of values of llama.cpp's graph; {} where it does not show them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "stages": list(names)})
                                  + "\n")
        self._process.stdin.flush()
        rows: dict[str, list[float]] = self._read()["stages"]
        return rows

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        code = self._process.wait()
        self._messages.seek(max(0, self._messages.seek(0, os.SEEK_END) - 4000))
        last = self._messages.read().decode(errors="replace").strip()
        raise ConfigError(f"llama.cpp ended with {code} before it answered: "
                          f"{last or 'it printed nothing'}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._messages):
            if stream is not None:
                stream.close()


@contextmanager
def peer_process(runner: Path | Sequence[str], model: str, threads: int,
                 context: int) -> Iterator[LlamaCpp]:
    peer = LlamaCpp(runner, model, threads, context)
    try:
        yield peer
    finally:
        peer.close()


# Comparisons.

def divergence(top: Sequence[Sequence[Any]], logits: Tensor) -> tuple[float, float]:
    """Return KL(peer, lz) at one position, and how much less likely than its own best token the
    peer finds that of lz, in nats.

    The ids that the peer did not list count as one event, which can only lower the KL.
    """
    ids = torch.tensor([t[0] for t in top])
    peer_log_probs = torch.tensor([t[1] for t in top], dtype=torch.float64)
    log_probs = logits.double().log_softmax(-1)
    listed = log_probs[ids]
    kl = float((peer_log_probs.exp() * (peer_log_probs - listed)).sum())
    rest = 1.0 - float(peer_log_probs.exp().sum())
    if rest > 1e-9:
        kl += rest * (math.log(rest) - math.log(max(1.0 - float(listed.exp().sum()), 1e-12)))
    chosen = peer_log_probs[ids == int(logits.argmax())]
    return kl, float(peer_log_probs.max() - chosen.max()) if chosen.numel() else math.inf


def agreement(name: str, tops: Sequence[Any], logits: Tensor) -> Agreement:
    divergences = [divergence(top, row) for top, row in zip(tops, logits)]
    kls, gaps = [kl for kl, _ in divergences], [gap for _, gap in divergences]
    count = len(divergences)
    return Agreement(name, count, sum(g == 0 for g in gaps) / count,
                     sum(g <= TIE for g in gaps) / count, sum(kls) / count, max(kls))


def compare_texts(model: GGUFModel, peer: LlamaCpp, positions: int) -> Agreement:
    """Compare the first `positions` of each text, whole sequences at once."""
    tops, logits = [], []
    for text in TEXTS:
        ids = model.tokenize(text, special=True)[:positions]
        tops += [peer.ask(ids[:end], 1, TOP, cache=True)["top"][0]
                 for end in range(1, len(ids) + 1)]
        logits.append(model.logits(ids)[0])
    return agreement(f"{len(TEXTS)} texts", tops, torch.cat(logits))


def compare_decode(model: GGUFModel, peer: LlamaCpp, count: int) -> Agreement:
    """Decode `count` tokens with the peer, and follow it token by token."""
    prompt = model.tokenize(TEXTS[0], special=True)
    answer = peer.ask(prompt, count, TOP)
    kv, run = SequenceKV(model.config, len(prompt) + count), model.decoder(
        length=len(prompt) + count)
    with torch.no_grad():
        rows = [run(torch.tensor([prompt]), kv, last=True)[0, -1]]
        step = TokenStep(run, kv)
        rows += [step(token)[0] for token in answer["tokens"][:-1]]
    return agreement(f"decode of {len(rows)} tokens", answer["top"], torch.stack(rows))


def race(model: GGUFModel, peer: LlamaCpp, threads: int, contexts: Sequence[int] = CONTEXTS,
         rounds: int = ROUNDS, kv: str = "", text: Sequence[int] = (),
         prompt_tokens: int = PROMPT) -> Iterator[Speed]:
    """Yield prompt and decode speeds, in turns, on `threads` threads; prompts begin as `text`."""
    clock = time.process_time if peer.times_cpu else time.perf_counter
    text = text or model.tokenize(" ".join(TEXTS) * 8)
    model = replace(model, stops=frozenset())  # neither ends before `count` tokens
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, length, count in (("prompt of", prompt_tokens, 1),
                                    *(("decode at", n, PERF_TOKENS) for n in contexts)):
            prompt, lz_rates, peer_rates = text[:length], [], []
            for _ in range(rounds):
                time.sleep(APART)
                run = TextGeneration(model, prompt, count, kv=kv, clock=clock)
                for _ in run.steps():
                    pass
                time.sleep(APART)
                answer = peer.ask(prompt, count)
                lz_rates.append(run.prompt_rate if count == 1 else run.decode_rate)
                peer_rates.append(answer["prompt_rate" if count == 1 else "decode_rate"])
            yield Speed(f"{name} {length}", threads, median(lz_rates), median(peer_rates),
                        median(a / b for a, b in zip(lz_rates, peer_rates)))
    finally:
        torch.set_num_threads(before)
