"""Runs llama.cpp for llama_cpp.py, in a Python of its own: a request per line of stdin, an answer
per line of stdout, both JSON. It imports nothing of this package.

A request has `prompt` (ids), `count` (tokens to generate, greedy) and `top` (how many of the
most likely ids to list with their log probabilities for each); the answer `tokens`, `top`,
`prompt_rate`, `decode_rate` (tokens per second; of CPU time, if the request says `cpu_time`) and
`rss` (bytes). One with `stages` (names of
values of llama.cpp's graph) is answered with the last row of each, "attn_norm-0" and so on.
"""

import json
import sys
from typing import Any


def main() -> None:
    model, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        run, times_cpu = from_llama_cpp_python(model, threads, context), True
    except ImportError:
        run, times_cpu = from_xllamacpp(model, threads, context), False
    print(json.dumps({"times_cpu": times_cpu}), flush=True)
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
        if request.get("stages"):              # the wheel shows no values between
            return {"stages": {}}
        answer = server.handle_completions({
            "prompt": request["prompt"], "n_predict": request["count"],
            "n_probs": request["top"] or 1, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": bool(request.get("cache"))})
        rows = answer["choices"][0]["logprobs"]["content"]
        times = answer["timings"]
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
        if request.get("stages"):
            return {"stages": graph_values(llama, request["prompt"], request["stages"], threads)}
        count, tokens, top = request["count"], [], []
        clock = time.process_time if request["cpu_time"] else time.perf_counter
        llama.reset()
        start = clock()
        llama.eval(request["prompt"])
        middle = clock()
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
        end = clock()
        return {"tokens": tokens, "top": top,
                "prompt_rate": len(request["prompt"]) / (middle - start),
                "decode_rate": (count - 1) / (end - middle) if count > 1 else 0.0}

    return run


def graph_values(llama: Any, prompt: list[int], names: list[str],
                 threads: int) -> dict[str, list[float]]:
    """Evaluates a prompt in a context of its own and returns the last rows of the named values."""
    import ctypes

    import numpy
    from llama_cpp import llama_cpp as api
    lib, last_rows = api._lib, {}  # type: Any, dict[str, list[float]]
    lib.ggml_get_name.restype, lib.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    for name in ("ggml_nbytes", "ggml_nrows"):
        function = getattr(lib, name)
        function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    lib.ggml_backend_tensor_get.restype = None
    lib.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
                                            ctypes.c_size_t]

    def see(tensor: int, ask: bool, _: object) -> bool:
        name = lib.ggml_get_name(tensor).decode()
        wanted = name.split("-")[0] in names
        if wanted and not ask:
            values = numpy.empty(lib.ggml_nbytes(tensor) // 4, dtype=numpy.float32)
            lib.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            last_rows[name] = values[-(values.size // lib.ggml_nrows(tensor)):].tolist()
        return wanted or not ask

    params = api.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 1024, threads, threads
    params.cb_eval = api.ggml_backend_sched_eval_callback(see)
    context = api.llama_init_from_model(llama._model.model, params)
    tokens = (api.llama_token * len(prompt))(*prompt)
    api.llama_decode(context, api.llama_batch_get_one(tokens, len(prompt)))
    api.llama_free(context)
    return last_rows


if __name__ == "__main__":
    main()
