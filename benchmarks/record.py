"""`accelerated.py --record`: what one token takes through generate() and as a step alone, beside
transformers as it is, torch.compile(mode="reduce-overhead") with a static cache, and the time that
reading weights and cache takes; also the time to the first token, and the criterion of
criterion.py.

Weights are seeded, in the shape of the model. In every round each way decodes the same number of
tokens after the same prompt, in an order that is shuffled; a number is the median over rounds.
Through generate(): the time of a call that gives n tokens less that of one that gives 1, over
n - 1.
"""

from __future__ import annotations

import gc
import inspect
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
          "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "bos_token_id": 1,
          "eos_token_id": 2, "pad_token_id": 0,
          "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("Llama", {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192,
                               "num_hidden_layers": 16, "head_dim": 64,
                               "tie_word_embeddings": True}),
    "llama-3-8b": ("Llama", {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336,
                             "num_hidden_layers": 32, "tie_word_embeddings": False}),
    "qwen2.5-1.5b": ("Qwen2", {"hidden_size": 1536, "intermediate_size": 8960,
                               "num_hidden_layers": 28, "num_attention_heads": 12,
                               "num_key_value_heads": 2, "vocab_size": 151936,
                               "max_position_embeddings": 16384, "bos_token_id": 1,
                               "eos_token_id": 2, "pad_token_id": 0,
                               "tie_word_embeddings": True}),
    "tiny": ("Llama", {**_LLAMA, "hidden_size": 64, "intermediate_size": 96,
                       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                       "vocab_size": 256, "tie_word_embeddings": True})}


@dataclass(frozen=True)
class Row:
    """One line of the table; goal in microseconds of a token, on an H200."""

    shape: str
    context: int = 512
    batch: int = 1
    steps: int = 127
    weights: str = ""                          # lz.accelerate(model, weights=...)
    goal: float | None = None


ROWS = {"1b": Row("llama-3.2-1b", 32, goal=660), "1b-8k": Row("llama-3.2-1b", 8192, goal=740),
        "1b-b8": Row("llama-3.2-1b", batch=8), "qwen": Row("qwen2.5-1.5b", goal=830),
        "8b": Row("llama-3-8b", goal=3650), "8b-8k": Row("llama-3-8b", 8192, goal=3950),
        "8b-b8": Row("llama-3-8b", batch=8, goal=4000),
        "8b-int4": Row("llama-3-8b", weights="int4", goal=1250),
        "8b-fp8": Row("llama-3-8b", weights="fp8", goal=2050),
        "tiny": Row("tiny", 16, steps=7)}
TOP_P = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
STOCK_TOKENS = 16          # of transformers as it is, which is slow: so many for one time


def build(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Weights large enough that tokens and not rounding decide what it says."""
    import transformers

    family, config = SHAPES[shape]
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)             # the rope's frequencies stay float32 so
    try:
        with torch.device(device):
            model = getattr(transformers, f"{family}ForCausalLM")(
                getattr(transformers, f"{family}Config")(**config)).eval()
    finally:
        torch.set_default_dtype(before)
    tied = bool(config.get("tie_word_embeddings"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                # logits as large as those of a trained model
                p.normal_(std=(4.0 if "lm_head" in name or (tied and "embed" in name) else 1.5)
                          * p.shape[-1] ** -0.5)
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
    model.generation_config.eos_token_id = None                # as long as asked for
    return model


def read_rate(device: str) -> float:
    """Bytes a second that can be read, measured."""
    if device == "cpu":
        return 0.0
    data = torch.ones(1 << 30, dtype=torch.int32, device=device)
    ways: list[Callable[[], Any]] = [lambda: torch.sum(data.view(torch.float32)),
                                     lambda: torch.sum(data.view(1024, -1).view(torch.float32), 1)]
    best = 0.0
    for way in ways:
        way()
        for _ in range(5):
            marks = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
            marks[0].record()
            way()
            marks[1].record()
            torch.cuda.synchronize()
            best = max(best, data.nbytes / marks[0].elapsed_time(marks[1]) * 1e3)
    return best


def bytes_read(model: Any, row: Row, of_weights: float = 2.0) -> float:
    """By one step: all weights but the embedding, of which a row is read, and the cache."""
    config = model.config
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    inner = sum(p.numel() for n, p in model.named_parameters()
                if p is not embedding and p is not head)
    kept = (2 * config.num_hidden_layers * config.num_key_value_heads * heads
            * (row.context + row.steps / 2) * row.batch)
    return inner * of_weights + head.numel() * 2 + kept * 2


class Subject:
    """A model, accelerated, and the same as it was: for all that is measured of one shape."""

    def __init__(self, shape: str, weights: str, device: str, dtype: torch.dtype) -> None:
        from accelerated import shared_copy

        from layerzero.integrations.transformers.accelerate import accelerate

        more: dict[str, Any] = {"weights": weights} if weights else {}
        if not more.keys() <= inspect.signature(accelerate).parameters.keys():
            raise NotImplementedError("lz.accelerate has no weights=")
        start = time.perf_counter()
        self.device, self.ours = device, build(shape, device, dtype)
        # codes take the place of the weights, so the model as it was has its own
        self.stock = build(shape, device, dtype) if weights else shared_copy(self.ours)
        self.stored = {"int4": 0.5 + 2 / 128, "fp8": 1.0, "int8": 1.0}.get(
            weights, float(torch.finfo(dtype).bits // 8))      # bytes of a weight
        self.report = accelerate(self.ours, measure=False, **more)
        print(f"{self.report}\n  ({time.perf_counter() - start:.1f} s)", flush=True)

    def prompts(self, count: int, length: int, seed: int = 1) -> Tensor:
        gen = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.ours.config.vocab_size, (count, length),
                             generator=gen).to(self.device)


def measure(row: Row, of: Subject, rounds: int, seconds: float, compiled: bool) -> dict[str, Any]:
    """All ways of one row."""
    start, ours, stock = time.perf_counter(), of.ours, of.stock
    ids = of.prompts(row.batch, row.context)
    ways: dict[str, Callable[[], float]] = {
        "generate, greedy": lambda: _generated(ours, ids, row.steps + 1, {"do_sample": False}),
        "generate, top-p": lambda: _generated(ours, ids, row.steps + 1, TOP_P)}
    step = _step_alone(of.report, ours, ids, row.steps)
    if step is not None:
        ways["step"] = step
    few = min(row.steps, STOCK_TOKENS)
    ways["transformers"] = lambda: _generated(stock, ids, few + 1, {"do_sample": False})
    if compiled:
        ways["torch.compile"] = _compiled(stock, ids, few)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()                                  # what is compiled or captured at first use
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(ways), len(ways)):
            taken[name].append(ways[name]())
        if time.perf_counter() - start > seconds:
            break
    found: dict[str, Any] = {name: statistics.median(times) for name, times in taken.items()}
    found |= {"bytes": bytes_read(ours, row, of.stored), "goal": row.goal,
              "rounds": len(taken["transformers"]), "kernels": of.report.kernels,
              "seconds": time.perf_counter() - start}
    if "step" in found:
        found["generate / step"] = {name: found[name] / found["step"] for name in found
                                    if name.startswith("generate,")}
    return found


def _timed(work: Callable[[], Any], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def _generated(model: Any, ids: Tensor, new: int, how: dict[str, Any]) -> float:
    """Microseconds of a token after the first."""
    mask = torch.ones_like(ids)

    def call(count: int) -> Any:
        return model.generate(ids, attention_mask=mask, max_new_tokens=count, **how)

    first = _timed(lambda: call(1), ids.is_cuda)
    return (_timed(lambda: call(new), ids.is_cuda) - first) / (new - 1)


def _step_alone(report: Any, model: Any, ids: Tensor, steps: int) -> Callable[[], float] | None:
    """The captured step, replayed; None where nothing is captured."""
    captured = None if report._step is None else report._step._captured
    if captured is None or not ids.is_cuda:
        return None
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        model(ids[:, -1:], past_key_values=cache)
    fixed = captured.hold(report._step.step(len(ids)), cache, ids.shape[1] + 1, wanted=steps + 1)
    replay = fixed._graphs["step"][0]

    def way() -> float:
        fixed.length = -1
        fixed.go_to(ids.shape[1])
        return _timed(lambda: [replay() for _ in range(steps)], True) / steps

    way.cache = cache                          # type: ignore[attr-defined]
    return way


def _compiled(model: Any, ids: Tensor, steps: int) -> Callable[[], float]:
    from transformers import StaticCache

    length = ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + steps + 8)
    with torch.no_grad():
        first = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    run = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    start = first.logits[:, -1:].argmax(-1)

    def way() -> float:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

        @torch.no_grad()
        def work() -> None:
            token = start
            for _ in range(steps):
                torch.compiler.cudagraph_mark_step_begin()
                token = run(token, past_key_values=cache, use_cache=True).logits.argmax(-1).clone()

        return _timed(work, ids.is_cuda) / steps

    way()
    way()
    return way


def first_token(of: Subject, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Milliseconds to the first token, ours and transformers'; and of them the forward alone."""
    found: dict[str, Any] = {}
    for length in lengths:
        ids, ways = of.prompts(1, length, 2), dict[str, Callable[[], Any]]()
        for name, model in (("transformers", of.stock), ("ours", of.ours)):
            ways[name] = partial(model.generate, ids, attention_mask=torch.ones_like(ids),
                                 max_new_tokens=1, do_sample=False)
            ways[f"{name}, forward"] = partial(torch.no_grad()(model), ids, use_cache=True,
                                               logits_to_keep=1)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()
            way()
        chance = random.Random(0)
        for _ in range(rounds):
            for name in chance.sample(list(ways), len(ways)):
                taken[name].append(_timed(ways[name], ids.is_cuda) / 1e3)
        found[str(length)] = {name: statistics.median(times) for name, times in taken.items()}
    return found


def record(args: Any) -> dict[str, Any]:
    """The table, shape by shape."""
    from criterion import criterion

    chosen = args.rows.split(",") if args.rows else [n for n in ROWS if n != "tiny"]
    judged = args.judge.split(",") if args.judge else []
    first, *lengths = args.first_token.split(",")
    rate = read_rate(args.device)
    found: dict[str, Any] = {"rows": {}, "criterion": {}, "first_token": {}, "bytes_per_s": rate}
    kinds = dict.fromkeys([*((ROWS[n].shape, ROWS[n].weights) for n in chosen),
                           *((shape, "") for shape in (*judged, first) if shape)])
    for shape, weights in kinds:
        rows = [n for n in chosen if (ROWS[n].shape, ROWS[n].weights) == (shape, weights)]
        subject = None
        try:
            subject = Subject(shape, weights, args.device, getattr(torch, args.dtype))
            for name in rows:
                row = measure(ROWS[name], subject, args.rounds, args.row_seconds, args.compile)
                if rate:
                    row["reading alone"] = row["bytes"] / rate * 1e6
                found["rows"][name] = row
                print(table({"rows": {name: row}}), flush=True)
            label = f"{shape}{', ' * bool(weights)}{weights}"
            if shape == first and not weights:
                found["first_token"][shape] = first_token(subject, tuple(map(int, lengths)),
                                                          args.rounds)
                print(table({"rows": {}, "first_token": found["first_token"]}), flush=True)
            if shape in judged:
                found["criterion"][label] = criterion(
                    subject.ours, subject.stock, subject.prompts(args.prompts, 32, 3),
                    args.judge_steps)
                print(table({"rows": {}, "criterion": found["criterion"]}), flush=True)
        except (NotImplementedError, RuntimeError) as error:   # out of memory is one
            for name in rows:
                found["rows"].setdefault(name, {"failed": f"{type(error).__name__}: {error}"[:300]})
            print(f"{shape} {weights}: {type(error).__name__}: {error}", flush=True)
        del subject
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(table(found))
    return found


COLUMNS = ("generate, greedy", "generate, top-p", "step", "reading alone", "transformers",
           "torch.compile", "goal")


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'us a token':10}" + "".join(f"{c:>18}" for c in COLUMNS) + f"{'gen/step':>14}"]
    for name, row in found["rows"].items():
        why = row.get("failed")
        cells = "".join(f"{row[c]:18.0f}" if row.get(c) else f"{'-':>18}" for c in COLUMNS)
        ratios = " ".join(f"{r:.3f}" for r in row.get("generate / step", {}).values())
        lines.append(f"{name:10}" + (f"  {why}" if why else f"{cells}{ratios:>14}"))
    for shape, judged in found.get("criterion", {}).items():
        lines += [f"{shape}: {metric}, difference to transformers: {text}"
                  for metric, text in judged["text"].items()]
    for shape, lengths in found.get("first_token", {}).items():
        for length, times in lengths.items():
            lines.append(f"{shape}: first token after {length}: "
                         + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
    return "\n".join(lines)
