"""`lz verify --peer llama.cpp`: a GGUF model through lz against llama.cpp itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ....files.sealed import replace_output
from ....integrations.gguf import llama_cpp, llama_cpp_stages
from ....integrations.gguf.model import load_gguf, packaged_model
from ... import show

POSITIONS = {"quick": 16, "full": 64}


def verify_llama_cpp(lane: str, model: str, *, build: bool, threads: int, out: Path | None,
                     as_json: bool) -> int:
    """Compare and print; returns 1 if the two disagree."""
    path = str(model or packaged_model())
    python = llama_cpp.install_peer(build)
    loaded = load_gguf(path)
    report = llama_cpp.PeerReport(loaded.name, llama_cpp.SOURCE if build else llama_cpp.WHEEL, lane)
    threads = threads or torch.get_num_threads()
    context = llama_cpp.PROMPT + llama_cpp.LONG + 256
    if not as_json:
        show.text(f"{loaded.name}: lz against llama.cpp ({report.peer})")
    if lane != "perf":
        with llama_cpp.peer_process(python, path, threads, context) as peer:
            report.agreements.append(llama_cpp.compare_texts(loaded, peer, POSITIONS[lane]))
            if lane == "full":
                report.stages = llama_cpp_stages.compare_stages(loaded, peer)
                report.agreements.append(llama_cpp.compare_decode(loaded, peer, llama_cpp.LONG))
    else:
        for count in sorted({1, min(2, os.cpu_count() or 1), threads}):
            with llama_cpp.peer_process(python, path, count, context) as peer:
                report.speeds += llama_cpp.race(loaded, peer, count)
                report.memory[f"llama.cpp, {count} threads"] = int(peer.ask([1], 1)["rss"])
    text = json.dumps(report.to_json(), indent=2)
    if out is not None:
        replace_output(out, text + "\n")
    if as_json:
        print(text)
        return 0 if report.passed else 1
    if report.agreements:
        show.table(("", "what", "positions", "top-1", "or tied", "mean KL", "largest KL"), [
            ("ok" if a.passed else "!!", a.name, str(a.positions), f"{a.top_1:.2%}",
             f"{a.agreed:.2%}", f"{a.mean_kl:.3g}", f"{a.largest_kl:.3g}")
            for a in report.agreements],
            right=("positions", "top-1", "or tied", "mean KL", "largest KL"))
    if report.stages:
        show.table(("", "stage", "layers", "first layer", "largest", "in layer"), [
            ("ok" if s.passed else "!!", s.name, str(s.layers), f"{s.first:.2%}",
             f"{s.largest:.2%}", str(s.worst_layer)) for s in report.stages],
            right=("layers", "first layer", "largest", "in layer"))
    elif lane == "full":
        show.text("--  the stages of a layer are compared with --build only: the wheel shows none")
    if report.speeds:
        show.table(("what", "threads", "lz tokens/s", "llama.cpp tokens/s", "ratio"), [
            (s.name, str(s.threads), f"{s.lz_rate:.1f}", f"{s.peer_rate:.1f}", f"{s.ratio:.2f}")
            for s in report.speeds], right=("threads", "lz tokens/s", "llama.cpp tokens/s",
                                            "ratio"))
    return 0 if report.passed else 1
