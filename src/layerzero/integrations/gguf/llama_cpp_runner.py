"""Runs llama.cpp for llama_cpp.py, in a Python of its own: a request per line of stdin, an answer
per line of stdout, both JSON. It imports nothing of this package.

A request has `prompt` (ids), `count` (tokens to generate, greedy) and `top` (so many of the
likeliest ids with their log probabilities for each of them); the answer `tokens`, `top`,
`prompt_rate`, `decode_rate` (tokens per second) and `rss` (bytes).
"""

import json
import sys
from typing import Any


def main() -> None:
    model, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        run = from_llama_cpp_python(model, threads, context)
    except ImportError:
        run = from_xllamacpp(model, threads, context)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer = run(json.loads(line))
        print(json.dumps({**answer, "rss": resident()}), flush=True)


def resident() -> int:
    try:
        with open("/proc/self/status") as status:
            return next(int(row.split()[1]) << 10 for row in status if row.startswith("VmRSS"))
    except (OSError, StopIteration):
        return 0


def from_xllamacpp(model: str, threads: int, context: int) -> Any:
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, context, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        told = server.handle_completions({
            "prompt": request["prompt"], "n_predict": request["count"],
            "n_probs": request["top"] or 1, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": bool(request.get("cache"))})
        rows = told["choices"][0]["logprobs"]["content"]
        times = told["timings"]
        return {"tokens": [row["id"] for row in rows],
                "top": [[(t["id"], t["logprob"]) for t in row["top_logprobs"]] for row in rows],
                "prompt_rate": times["prompt_per_second"],
                "decode_rate": times["predicted_per_second"]}

    return run


def from_llama_cpp_python(model: str, threads: int, context: int) -> Any:
    import time

    import llama_cpp
    import numpy
    llama = llama_cpp.Llama(model, n_ctx=context, n_threads=threads, n_threads_batch=threads,
                            verbose=False)

    def run(request: dict[str, Any]) -> dict[str, Any]:
        count, tokens, top = request["count"], [], []
        llama.reset()
        began = time.perf_counter()
        llama.eval(request["prompt"])
        middle = time.perf_counter()
        for step in range(count):
            logits = numpy.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),))
            token = int(logits.argmax())
            if request["top"]:
                likely = numpy.argpartition(logits, -request["top"])[-request["top"]:]
                shift = float(logits.max())
                total = shift + float(numpy.log(numpy.exp(logits - shift).sum()))
                top.append([(int(i), float(logits[i]) - total) for i in likely])
            tokens.append(token)
            if step + 1 < count:
                llama.eval([token])
        end = time.perf_counter()
        return {"tokens": tokens, "top": top,
                "prompt_rate": len(request["prompt"]) / (middle - began),
                "decode_rate": (count - 1) / (end - middle) if count > 1 else 0.0}

    return run


if __name__ == "__main__":
    main()
