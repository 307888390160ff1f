"""`lz verify models` and `lz verify peer`: layer to training, against torch or transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from ....integrations.gguf.llama_peer import build_llama, trace_stages
from ....integrations.gguf.model import float_weights, packaged_model, read_gguf
from ....models.decoder_config import parse_config
from ....spec.errors import ConfigError
from ....verify.model.ladder import LadderModel, Rung, climb
from ....verify.model.route import LadderRow
from ... import show
from ...calls import device_kind

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, Apollo 11 landed on the Moon; the crew "
    "brought back 21.5 kg of rocks.\n\ndef add(a, b):\n    return a + b\n")
_MARKS = {"passed": "ok", "failed": "!!", "not served": "--"}


def ladder(level: int, *, effort: str = "quick", backend: str = "", kernel: str = "",
           configs: Sequence[str] = (), dtypes: Sequence[str] = (), device: str | None = "cpu",
           seed: int = 0, steps: int = 0, model: str = "", text: str = "", against: str = "plain",
           verbose: bool = False, as_json: bool = False) -> int:
    """Climb one level and print it; returns 1 if something failed, or if the named kernel served
    nothing.

    model: a GGUF file for levels 3 and 4; "" is SmolLM2 where it is installed, "none" random
    weights.
    """
    if backend and kernel:
        raise ConfigError(f"lz verify wants --backend or --kernel, got both ({backend}, {kernel})")
    wrong = [d for d in dtypes if d not in ("float32", "bfloat16", "float16")]
    if wrong:
        raise ConfigError(f"--dtype must be float32, bfloat16 or float16, got {wrong[0]!r}")
    device = device_kind(device)
    real, note = _model(model, text or TEXT, against) if level in (3, 4) and not configs else (None,
                                                                                               "")
    if note and not as_json:
        show.text(note)
    rungs = []
    for rung in climb(level, configs=[parse_config(c) for c in configs], dtypes=dtypes,
                      effort=effort, named=kernel or backend, device=device, seed=seed, steps=steps,
                      model=real):
        rungs.append(rung)
        if not as_json:
            show_rung(rung, verbose)
    passed = all(rung.passed for rung in rungs)
    if as_json:
        show.as_json({"level": level, "passed": passed, "note": note,
                      "rungs": [rung.to_json() for rung in rungs]})
    else:
        counts = {status: sum(r.status == status for r in rungs) for status in _MARKS}
        show.text(", ".join(f"{n} {status}" for status, n in counts.items() if n))
    return 0 if passed else 1


def _model(name: str, text: str, against: str) -> tuple[LadderModel | None, str]:
    """Return the real model, or None and the reason."""
    if against not in ("plain", "transformers"):
        raise ConfigError(f"--against must be plain or transformers, got {against!r}")
    if name == "none":
        return None, ""
    try:
        loaded = read_gguf(Path(name) if name else packaged_model())
    except ConfigError as e:
        if name or against != "plain":
            raise
        return None, f"random weights, for no real model is here: {e}"
    tokens = torch.tensor([loaded.tokenize(text)])
    config = dataclasses.replace(loaded.config,
                                 max_positions=min(loaded.config.max_positions,
                                                   tokens.shape[1] + 64))
    weights = float_weights(loaded)
    model = LadderModel(loaded.name, config, weights, tokens)
    if against == "transformers":
        truth = trace_stages(build_llama(config, weights), config, tokens)
        model = model._replace(truth=truth, truth_name="transformers in float32")
    return model, f"{loaded.name}: {config}; {tokens.shape[1]} tokens"


def show_rung(rung: Rung, verbose: bool = False) -> None:
    show.text(f"{_MARKS[rung.status]}  {rung}")
    if rung.level == 3 or verbose:
        for name, rows in rung.tables.items():
            _table(name, rows)
    elif rung.level == 4:
        for name, rows in rung.tables.items():
            _table(name, [r for r in rows if not r.what.startswith("top-1 at") or not r.ok])
    elif rung.level == 5:
        for name, rows in rung.tables.items():
            last = next(r.what.rpartition(" after ")[2] for r in reversed(rows)
                        if " after " in r.what)
            if name.endswith("separate"):
                _table(name,
                       [r for r in rows if r.what.endswith((f" after {last}", "curve", "trend"))
                        or not r.ok])
    if rung.kernels:
        by_op: dict[str, list[str]] = {}
        for (op, kernel), n in rung.kernels.items():
            by_op.setdefault(op, []).append(f"{kernel} x{n}")
        show.text("  served by: " + "; ".join(f"{op}: {', '.join(kernels)}"
                                              for op, kernels in by_op.items()))


def _table(name: str, rows: Sequence[LadderRow]) -> None:
    show.heading(name)
    show.table(("", "stage", "max_diff", "mean_diff", "allowed", "eager", "kernel"), [
        ("ok" if r.ok else "!!", r.what, f"{r.error:.3g}", f"{r.mean:.3g}" if r.mean else "",
         f"{r.allowed:.3g}",
         "" if r.eager is None else f"{r.eager:.3g}", r.text or r.kernel) for r in rows],
        right=("max_diff", "mean_diff", "allowed", "eager"))
