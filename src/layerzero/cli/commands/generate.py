"""`lz generate`: text from a GGUF model, every operation an lz call, printed as it comes."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ...integrations.gguf_model import TextGeneration, packaged_model, read_gguf
from .. import show
from ..calls import device_kind


def generate(prompt: str, max_tokens: int, temperature: float, top_p: float, seed: int, dtype: str,
             device: str | None, model: Path | None, raw: bool, explain: bool,
             as_json: bool) -> int:
    kind = device_kind(device)
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
        return 0
    show.text()
    if explain:
        show.heading(
            f"{loaded.name}: {loaded.config}, {dtype} on {kind}; {len(ids)} tokens of prompt, "
            f"{run.generated} made, {seconds:.1f} s with the watching")
        show.table(("phase", "op", "kernel", "calls"), [
            (str(k["phase"]), str(k["op"]), str(k["kernel"]), str(k["calls"])) for k in kernels],
                   right=("calls",))
    return 0
