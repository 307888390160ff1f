"""`lz generate`: text from a GGUF model, every operation an lz call, printed as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ....integrations.gguf.generation import TextGeneration
from ....integrations.gguf.model import GGUFModel, load_gguf, packaged_model
from ... import show
from ...calls import device_kind


def generate(prompt: str, max_tokens: int, temperature: float, top_p: float, top_k: int, seed: int,
             dtype: str, kv: str, device: str | None, model: Path | None, raw: bool, chat: bool,
             explain: bool, as_json: bool) -> int:
    kind = device_kind(device)
    loaded = load_gguf(model or packaged_model(), dtype=getattr(torch, dtype), device=kind)
    options: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "seed": seed, "kv": kv, "watch": explain}
    if chat:
        return _converse(loaded, prompt, options)
    ids = (loaded.tokenize(prompt, special=True) if raw or not loaded.template
           else loaded.tokenize(loaded.chat(("user", prompt))))
    run = TextGeneration(loaded, ids, **options)
    text = _stream(run, quiet=as_json)
    kernels = [{"phase": phase, "op": op, "kernel": kernel, "calls": n}
               for phase, counts in run.kernels.items() for (op, kernel), n in counts.items()]
    seconds = run.prompt_seconds + run.decode_seconds
    if as_json:
        show.as_json({"model": loaded.name, "text": text, "prompt_tokens": len(ids),
                      "tokens": run.generated, "seconds": round(seconds, 3),
                      "prompt_tokens_per_second": round(run.prompt_rate, 2),
                      "tokens_per_second": round(run.decode_rate, 2), "kernels": kernels})
        return 0
    show.text()
    if explain:
        show.heading(
            f"{loaded.name}: {loaded.config}, {dtype} on {kind}; {len(ids)} tokens of prompt, "
            f"{run.generated} made, {seconds:.1f} s with the watching")
        show.table(("phase", "op", "kernel", "calls"), [
            (str(k["phase"]), str(k["op"]), str(k["kernel"]), str(k["calls"])) for k in kernels],
                   right=("calls",))
    else:
        show.text(_rates(run))
    return 0


def _stream(run: TextGeneration, quiet: bool = False) -> str:
    pieces = []
    for piece in run.pieces():
        pieces.append(piece)
        if not quiet:
            show.piece(piece)
    return "".join(pieces)


def _rates(run: TextGeneration) -> str:
    return (f"[{len(run.prompt)} tokens of prompt at {run.prompt_rate:.1f} tokens/s, "
            f"{run.generated} made at {run.decode_rate:.1f} tokens/s]")


def _converse(model: GGUFModel, first: str, options: dict[str, Any]) -> int:
    """Answer the prompt, then each line of stdin, all of them one conversation."""
    messages: list[tuple[str, str]] = []
    lines = iter(sys.stdin.readline, "")
    message = first or next(lines, "").strip()
    while message:
        messages.append(("user", message))
        run = TextGeneration(model, model.tokenize(model.chat(*messages)), **options)
        messages.append(("assistant", _stream(run)))
        show.text()
        show.text(_rates(run))
        message = next(lines, "").strip()
    return 0
