"""What lz.accelerate gains: a decode step of one layer, or a whole model that generates, against
transformers as it is.

    python benchmarks/accelerated.py --layer llama-3-8b --context 4096          on a CUDA device
    python benchmarks/accelerated.py --model smollm2 --dtype bfloat16 --threads 1
    python benchmarks/accelerated.py --model smollm2 --threads 1 --sample
    python benchmarks/accelerated.py --architecture gemma3 --threads 1
    python benchmarks/accelerated.py --record --rows 1b,8b --judge llama-3.2-1b \\
        --first-token llama-3.2-1b,128,2048,8192

One layer: seeded weights in the shape of the model's layers; a token after `--context` others, by
transformers as it is, by torch.compile(mode="reduce-overhead") with a static cache, and by
lz.accelerate. In every round each decodes `--tokens` tokens, in an order that is shuffled; a time
is that of the host or of the device, whichever is longer. A whole model: prompt and decoding
through `generate`, stock and accelerated in turns; with --sample by temperature, top-k and top-p,
also with lz.sample for the draw. An architecture: the same, of a small model with seeded weights.
Results are compared first. The record (record.py): whole models of several shapes through
generate(), beside the step alone, the peers and the time to read. Prints a table, writes JSON
(--out).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                   "num_key_value_heads": 8},
    "llama-3-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                    "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "num_key_value_heads": 2}}
_SMALL = {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048,
          "num_hidden_layers": 8, "num_attention_heads": 12, "max_position_embeddings": 4096,
          "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GROUPED = {**_SMALL, "num_key_value_heads": 4}
_MANY = {**_GROUPED, "intermediate_size": 1024, "num_experts_per_tok": 2}
_GEMMA = {**_GROUPED, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 256}
# Name -> what its classes begin with, and its configuration.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 96}),
    "qwen2": ("Qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": 96,
                        "max_window_layers": 4}),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 64}),
    "phi3": ("Phi3", {**_GROUPED, "sliding_window": 96}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", _GEMMA),
    "mixtral": ("Mixtral", {**_MANY, "num_local_experts": 8}),
    "qwen2-moe": ("Qwen2Moe", {**_MANY, "num_experts": 16, "num_experts_per_tok": 4,
                               "moe_intermediate_size": 512,
                               "shared_expert_intermediate_size": 1024}),
    "qwen3-moe": ("Qwen3Moe", {**_MANY, "num_experts": 16, "num_experts_per_tok": 4,
                               "moe_intermediate_size": 512,
                               "head_dim": 64}),
    "gpt2": ("GPT2", {"vocab_size": 16384, "n_embd": 768, "n_layer": 8, "n_head": 12,
                      "n_positions": 4096, "bos_token_id": 1, "eos_token_id": 2,
                      "pad_token_id": 0}),
    "phi": ("Phi", {**_SMALL, "intermediate_size": 3072}),
    "neox": ("GPTNeoX", {**_SMALL, "intermediate_size": 3072})}
MAX_APART = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


class Way:
    """A model with a cache of `context` tokens; `again` makes it that again."""

    def __init__(self, step: Callable[[Tensor], Any], again: Callable[[], None]) -> None:
        self.step, self.again = step, again

    def sample(self, tokens: list[Tensor]) -> tuple[float, float]:
        """Microseconds per token: of the host's clock, and of the device's."""
        self.again()
        cuda = tokens[0].is_cuda
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        if cuda:
            torch.cuda.synchronize()
            marks[0].record()
        start = time.perf_counter()
        for token in tokens:
            self.step(token)
        if cuda:
            marks[1].record()
            torch.cuda.synchronize()
        took = (time.perf_counter() - start) * 1e6 / len(tokens)
        return took, marks[0].elapsed_time(marks[1]) * 1e3 / len(tokens) if cuda else took


def shared_copy(model: Any) -> Any:
    """The same weights, modules of its own."""
    return copy.deepcopy(model,
                         {id(t): t for t in itertools.chain(model.parameters(), model.buffers())})


def one_layer(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaModel, StaticCache

    from layerzero.integrations.transformers.accelerate import accelerate

    torch.manual_seed(0)
    room = args.context + args.tokens + 64
    config = LlamaConfig(**LAYERS[args.layer], num_hidden_layers=1, vocab_size=1024,
                         max_position_embeddings=2 * room,
                         rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device(args.device):
        ours = LlamaModel(config).eval().to(getattr(torch, args.dtype))
    stock, compiled = shared_copy(ours), shared_copy(ours)
    report = accelerate(ours, measure=False)
    print(report, flush=True)
    prompt = torch.randint(0, 1024, (args.batch, args.context),
                           generator=torch.Generator().manual_seed(1))
    prompt = prompt.to(args.device)
    tokens = [torch.full((args.batch, 1), n % 1024, device=args.device) for n in range(args.tokens)]

    def growing(model: Any) -> Way:
        cache = model(prompt, use_cache=True).past_key_values

        def again() -> None:
            cache.crop(-(cache.get_seq_length()
                         - args.context)) if cache.get_seq_length() > args.context else None

        return Way(lambda token: model(token, past_key_values=cache,
                                       use_cache=True).last_hidden_state, again)

    def static() -> Way:
        cache = StaticCache(config=config, max_cache_len=room)
        compiled(prompt, past_key_values=cache, use_cache=True)
        run = torch.compile(compiled, mode="reduce-overhead", fullgraph=True)

        def step(token: Tensor) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return run(token, past_key_values=cache, use_cache=True).last_hidden_state

        return Way(step, lambda: [layer.cumulative_length.fill_(args.context)
                                  for layer in cache.layers] and None)

    ways = {"transformers": growing(stock), "lz.accelerate": growing(ours)}
    if args.compile:
        ways["torch.compile, static cache"] = static()
    first: dict[str, Tensor] = {}
    for name, way in ways.items():
        for _ in range(3):                     # compiled and captured before anything is timed
            way.again()
            first[name] = way.step(tokens[0]).float().clone()
    want = first["transformers"]
    apart = {name: float((out - want).norm() / want.norm()) for name, out in first.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    chance = random.Random(0)
    for _ in range(args.rounds):
        for name in chance.sample(list(ways), len(ways)):
            taken[name].append(ways[name].sample(tokens))
    weights = sum(p.nbytes for p in ours.layers[0].parameters())
    rows = {name: {"us": statistics.median(map(max, found)),
                   "host_us": statistics.median(f[0] for f in found),
                   "device_us": statistics.median(f[1] for f in found), "apart": apart[name]}
            for name, found in taken.items()}
    base = rows["transformers"]["us"]
    print(
        f"\none {args.layer} layer, {args.dtype}, batch {args.batch}, context {args.context}, "
        f"{args.device}; {weights / 1e6:.0f} MB of "
        f"weights\n{'':30}{'us a token':>12}{'device':>10}{'gain':>8}{'apart':>10}")
    for name, row in rows.items():
        print(
            f"{name:30}{row['us']:12.1f}{row['device_us']:10.1f}{base / row['us']:7.2f}x{row['apart']:10.1e}")
    agree = all(row["apart"] <= MAX_APART[args.dtype] for row in rows.values())
    print("results agree" if agree else f"RESULTS DIFFER by more than {MAX_APART[args.dtype]}")
    return {"layer": args.layer, "context": args.context, "batch": args.batch, "dtype": args.dtype,
            "rows": rows, "weight_bytes": weights, "report": report.to_json(), "agree": agree}


def seeded(name: str) -> Any:
    """A small model of an architecture, its weights large enough that tokens and not rounding
    decide what it says."""
    import transformers

    prefix, config = ARCHITECTURES[name]
    configured = (getattr(transformers, f"{prefix}TextConfig", None)
                  or getattr(transformers, f"{prefix}Config"))
    made = (getattr(transformers, f"{prefix}ForCausalLM", None)
            or getattr(transformers, f"{prefix}LMHeadModel"))
    torch.manual_seed(0)
    model = made(configured(**config)).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=1.5 * p.shape[-1] ** -0.5)
    return model


def whole_model(args: argparse.Namespace) -> dict[str, Any]:
    from layerzero.integrations.transformers.accelerate import accelerate
    from layerzero.integrations.transformers.patch import patch

    dtype = getattr(torch, args.dtype)
    if args.architecture:
        name, ours = args.architecture, seeded(args.architecture).to(args.device, dtype)
        ids = torch.randint(3, 16384, (args.batch, args.context),
                            generator=torch.Generator().manual_seed(1))
        ids = ids.to(args.device)
    else:
        from layerzero.integrations.gguf.llama_peer import build_llama
        from layerzero.integrations.gguf.model import packaged_model, read_gguf

        name, found = "SmolLM2-135M", read_gguf(packaged_model())
        ours = build_llama(found.config, found.weights).to(args.device, dtype)
        ours.set_attn_implementation("sdpa")
        text = (
            "Once upon a time there was a little robot who wanted to learn about the sea, and so "
            "it went to the shore. ")
        ids = torch.tensor([found.tokenize(text * 40)[:args.context]], device=args.device)
    ours.generation_config.pad_token_id = 0
    stock = shared_copy(ours)
    models = {"transformers": stock, "lz.accelerate": ours}
    report = accelerate(ours, seconds=args.seconds)
    print(report, flush=True)
    how: dict[str, Any] = {"do_sample": False}
    if args.sample:
        how = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
        models["and lz.sample"] = drawing = shared_copy(stock)
        accelerate(drawing, seconds=args.seconds)
        patch(drawing, only="sampling")

    def generate(model: Any, new: int) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        start = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
                             min_new_tokens=new, **how)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, out

    texts = {name: generate(model, args.tokens)[1] for name, model in models.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    chance = random.Random(0)
    for _ in range(args.rounds):
        for way in chance.sample(list(models), len(models)):
            prompt = generate(models[way], 1)[0]
            taken[way].append((prompt, (generate(models[way], args.tokens)[0] - prompt)
                               / (args.tokens - 1)))
    last = list(models)[-1]
    ratios = {what: statistics.median(a[i] / b[i]
                                      for a, b in zip(taken["transformers"], taken[last]))
              for i, what in enumerate(("prompt", "decode"))}
    rows = {way: {"prompt_s": statistics.median(t[0] for t in found),
                  "tokens_per_s": 1 / statistics.median(
        t[1] for t in found)} for way, found in taken.items()}
    same = float((texts["transformers"] == texts["lz.accelerate"]).float().mean())
    print(
        f"\n{name}, {args.dtype}, {args.device}, {torch.get_num_threads()} threads, prompt of "
        f"{ids.shape[1]} tokens, {args.tokens} new\n{'':20}{'prompt, ms':>12}{'tokens/s':>10}")
    for way, row in rows.items():
        print(f"{way:20}{row['prompt_s'] * 1e3:12.1f}{row['tokens_per_s']:10.1f}")
    print(
        f"prompt {ratios['prompt']:.2f}x, decode {ratios['decode']:.2f}x as fast; {same:.0%} of "
        "the tokens the same")
    return {"model": name, "dtype": args.dtype, "threads": torch.get_num_threads(), "rows": rows,
            "ratios": ratios, "same_tokens": same, "report": report.to_json()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--layer", choices=LAYERS)
    what.add_argument("--model", choices=("smollm2",))
    what.add_argument("--architecture", choices=ARCHITECTURES)
    what.add_argument("--record", action="store_true", help="the table of record.py")
    parser.add_argument("--rows", default="", help="of the record, by name; all by default")
    parser.add_argument("--row-seconds", type=float, default=90.0, help="for one row of the record")
    parser.add_argument("--judge", default="", help="shapes to judge by criterion.py")
    parser.add_argument("--prompts", type=int, default=32, help="of the criterion")
    parser.add_argument("--judge-steps", type=int, default=127)
    parser.add_argument("--first-token", default="",
                        help="a shape and lengths of prompts: llama-3.2-1b,128,2048,8192")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=MAX_APART)
    parser.add_argument("--context", type=int, default=0,
                        help="tokens before; 4096 for a layer, 128 for a model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0,
                        help="for the report's own measurement")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sample", action="store_true",
                        help="draw tokens, where greedy is the default")
    parser.add_argument("--no-compile", dest="compile", action="store_false",
                        help="without torch.compile")
    parser.add_argument("--out", type=Path, help="default: results/local/accelerated.json, for the "
                        "record results/record-DEVICE.json")
    args = parser.parse_args()
    args.context = args.context or (4096 if args.layer else 128)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.record:
        from record import record

        found = record(args)
    else:
        with torch.no_grad():
            found = one_layer(args) if args.layer else whole_model(args)
    found["environment"] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()
                            if args.device == "cuda"
                            else "cpu", "python": sys.version.split()[0]}
    if args.out is None:
        place = Path(__file__).parent / "results"
        device = found["environment"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
        args.out = (place / f"record-{device}.json" if args.record and device != "cpu" else
                    place / "local" / ("record.json" if args.record else "accelerated.json"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {args.out}")
    return 0 if found.get("agree", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
