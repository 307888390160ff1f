"""Speculation against plain steps: tokens a second where a given share of the drafts is accepted.

    python benchmarks/speculative.py                                # a small model, on this machine
    python benchmarks/speculative.py --shape llama-3.2-1b --device cuda --dtype bfloat16

The weights are random, but for a head that makes a fixed permutation of the tokens the text, with
wide margins: the rounding of a step with more rows changes no token. Drafts are real, and wrong by
construction: the assistant has another permutation for some tokens of the text, and the prompt, in
which drafts are looked up, is a copy of the text with some tokens put in between. `--accept` is the
share of all drafted tokens that is accepted; from it follows how many tokens are wrong.

A round's overhead is what it takes beyond a plain step and, with an assistant, one of its plain
steps for each drafted token.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import json
import os
import pstats
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero as lz
from layerzero.integrations.transformers.accelerate import _speculate
from layerzero.integrations.transformers.generation.pace import Pace
from layerzero.integrations.transformers.generation.speculation import SpeculationStats

# hidden, inner, layers, heads, key heads, vocabulary; and of the assistant
SHAPES = {"small": ((512, 1536, 8, 8, 4, 8192), (256, 768, 2, 4, 2, 8192)),
          "llama-3.2-1b": ((2048, 8192, 16, 32, 8, 128256), (768, 2048, 4, 12, 4, 128256)),
          "llama-3-8b": ((4096, 14336, 32, 32, 8, 128256), (2048, 8192, 16, 32, 8, 128256))}
FIRST = 5                      # token of the text


class Always(Pace):
    """Rounds and nothing else, to time them."""

    def speculates(self) -> bool:
        return True


def llama(shape: tuple[int, ...], following: torch.Tensor, dtype: torch.dtype, device: str) -> Any:
    """A model that says `following[token]` after a token."""
    hidden, inner, layers, heads, kv_heads, vocab = shape
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab,
            max_position_embeddings=8192, pad_token_id=0, tie_word_embeddings=False,
            torch_dtype=dtype)).to(dtype).eval()
        with torch.no_grad():
            for layer in model.model.layers:   # small beside the embedding, which the head reads
                layer.self_attn.o_proj.weight.mul_(0.001)
                layer.mlp.down_proj.weight.mul_(0.001)
            model.lm_head.weight[following.to(device)] = model.model.embed_tokens.weight
    model.generation_config.eos_token_id = None
    return model


class Text:
    """The text that the model writes, and drafts of it of which a share is right."""

    def __init__(self, vocab: int, count: int) -> None:
        self.vocab, gen = vocab, torch.Generator().manual_seed(0)
        while True:
            self.following = torch.randperm(vocab, generator=gen)
            tokens = [FIRST]
            while len(tokens) <= 2 * count:
                tokens.append(int(self.following[tokens[-1]]))
            if len(set(tokens)) == len(tokens):        # it does not come back to where it began
                break
        self.tokens = tokens[:count + 1]

    def wrong(self, accepted: float, drafted: int) -> list[int]:
        """The places after which drafts go wrong, so many that of rounds of `drafted` tokens this
        share is accepted: those after a wrong one are not."""
        count = len(self.tokens) - 1
        order = random.Random(1).sample(range(count), count)

        def share(places: set[int]) -> float:
            at = rounds = right = 1                # the first token comes with the prompt
            while at < count:
                run = next((i for i in range(drafted) if at + i in places or at + i >= count),
                           drafted)
                at, rounds, right = at + run + 1, rounds + 1, right + run
            return (right - 1) / (drafted * max(1, rounds - 1))

        many = min(range(count + 1), key=lambda n: abs(share(set(order[:n])) - accepted))
        return sorted(order[:many])

    def assistant(self, wrong: list[int]) -> torch.Tensor:
        """What an assistant says after each token."""
        following = self.following.clone()
        places = torch.tensor([self.tokens[i] for i in wrong], dtype=torch.int64)
        following[places] = following[places.roll(1)]
        return following

    def ambiguous(self, wrong: list[int]) -> list[int]:
        """A copy of the text, and then some places of it again, where it goes on otherwise."""
        known = set(self.tokens)
        spare = iter(t for t in range(3, self.vocab) if t not in known)
        again = [t for i in wrong if i > 1
                 for t in (*self.tokens[i - 2:i + 1], next(spare), next(spare))]
        return [*self.tokens, *again, self.tokens[0]]

    def copy(self, wrong: list[int]) -> list[int]:
        """The text with others between its tokens, and the first token again."""
        places, known = set(wrong), set(self.tokens)
        spare = iter(t for t in range(3, self.vocab) if t not in known)
        tokens = []
        for i, token in enumerate(self.tokens):
            tokens += [token, *([next(spare)] if i in places else [])]
        return [*tokens, self.tokens[0]]


def seconds(model: Any, prompt: torch.Tensor, new: int) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new,
                         do_sample=False)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def token_us(model: Any, prompt: torch.Tensor, new: int, repeats: int) -> tuple[float, Any]:
    """Microseconds of a token without the prompt, the best of some; the first generate(), in which
    kernels are chosen, is not timed."""
    for _ in range(2):
        out = seconds(model, prompt, new)[1]
    whole = min(seconds(model, prompt, new)[0] for _ in range(repeats))
    first = min(seconds(model, prompt, 2)[0] for _ in range(repeats))
    return (whole - first) / (new - 2) * 1e6, out


def profiled(what: str, run: Any, lines: int) -> Any:
    profile, start = cProfile.Profile(), time.perf_counter()
    result = profile.runcall(run)
    print(f"{what}: {time.perf_counter() - start:.1f} s")
    for order in ("cumulative", "tottime"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(lines)
        kept = [line for line in text.getvalue().splitlines() if line.strip()]
        for line in kept[3:]:
            print(line.replace(str(Path(lz.__file__).parent), "lz")[:150])
    return result


class Benchmark:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.dtype = args, getattr(torch, args.dtype)
        shape, self.assistant_shape = SHAPES[args.shape]
        self.text = Text(shape[-1], args.new)
        start = time.perf_counter()
        self.model = llama(shape, self.text.following, self.dtype, args.device)
        self.found: dict[str, Any] = {"shape": args.shape, "dtype": args.dtype, "new": args.new,
                                      "accept": args.accept, "build_s": time.perf_counter() - start}
        start = time.perf_counter()
        accelerate = functools.partial(lz.accelerate, self.model, measure=False)
        self.report = profiled("accelerate", accelerate, 32) if args.profile else accelerate()
        self.found["accelerate_s"] = time.perf_counter() - start
        self.plain_us = 0.0

    def prompt(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self.args.device)

    def plain(self) -> None:
        prompt = self.prompt(self.text.copy(self.wrong(self.args.looked_up)))
        start = time.perf_counter()
        self.plain_us, out = token_us(self.model, prompt, self.args.new, self.args.repeats)
        right = out[0, prompt.shape[1]:].tolist() == self.text.tokens[1:]
        print(f"{self.args.shape}, {self.args.dtype}, {self.args.device}, {self.args.new} tokens "
              f"after {prompt.shape[1]}; built in {self.found['build_s']:.1f} s, accelerated in "
              f"{self.found['accelerate_s']:.1f} s")
        print(f"{'plain steps':24} {self.plain_us:8.0f} us a token  {1e6 / self.plain_us:8.1f} "
              f"tokens/s{'' if right else '  NOT THE TEXT'} ({time.perf_counter() - start:.1f} s)",
              flush=True)
        self.found["plain"] = {"token_us": self.plain_us, "the_text": right}

    def wrong(self, drafted: int) -> list[int]:
        return self.text.wrong(self.args.accept, drafted)

    def speculation(self, name: str, draft: Any, drafted: int, prompt: torch.Tensor,
                    assistant_us: float = 0.0, branches: int = 1) -> None:
        """Time rounds alone, and then what generate() makes of them."""
        start = time.perf_counter()
        _speculate(self.report, draft, None)
        speculation = self.report._speculation
        speculation.draft.count, speculation.draft.branches = drafted, branches
        if self.args.profile:
            profiled(f"first generate() with {name}", lambda: seconds(self.model, prompt, 8), 24)
        timed = {}
        for kind, pace in (("rounds", Always()), ("chosen", Pace())):
            speculation.stats = SpeculationStats(pace=pace)
            timed[kind] = token_us(self.model, prompt, self.args.new, self.args.repeats)
            if kind == "rounds":
                stats = speculation.stats
            if kind == "rounds" and self.args.profile and prompt.is_cuda:
                self.trace(prompt)
        (us, out), (chosen_us, chosen) = timed["rounds"], timed["chosen"]
        same = all(o[0, prompt.shape[1]:].tolist() == self.text.tokens[1:] for o in (out, chosen))
        tokens = 1 + stats.accepted / stats.rounds
        round_us = us * tokens
        overhead = round_us - self.plain_us - drafted * assistant_us
        row = {"token_us": us, "chosen_token_us": chosen_us, "gain": self.plain_us / us,
               "chosen_gain": self.plain_us / chosen_us, "tokens_a_round": tokens,
               "accepted": stats.accepted / max(1, stats.drafted), "drafted": drafted,
               "round_us": round_us, "round_us_on_device": stats.pace.round_us,
               "overhead_us": overhead, "assistant_us": assistant_us, "same_tokens": same,
               "uncaptured": dict(stats.uncaptured), "words": str(speculation.stats)}
        self.found[name] = row
        print(f"{name:24} {us:8.0f} us a token  {1e6 / us:8.1f} tokens/s  {row['gain']:5.2f} x, "
              f"as generate() chooses {row['chosen_gain']:5.2f} x; {row['accepted']:.0%} of "
              f"{drafted} accepted, {tokens:.2f} tokens a round, a round {round_us:.0f} us "
              f"({stats.pace.round_us or 0:.0f} by events), {round_us / self.plain_us:.2f} plain "
              f"steps, overhead {overhead:.0f} us, {'same tokens' if same else 'OTHER TOKENS'} "
              f"{row['uncaptured'] or ''} ({time.perf_counter() - start:.1f} s)", flush=True)
        self.drop()

    def drop(self) -> None:
        """Take speculation away; the acceleration stays."""
        self.report._speculation.undo()
        if self.report._assistant is not None:
            self.report._assistant.undo()
        self.report._speculation = self.report._assistant = None

    def trace(self, prompt: torch.Tensor) -> None:
        """Print the kernels of a generate(), and what the host asked for in each round."""
        kinds, stats = torch.profiler.ProfilerActivity, self.report._speculation.stats
        before = stats.rounds
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as trace:
            seconds(self.model, prompt, self.args.new)
        rounds = stats.rounds - before
        calls = Counter(e.name for e in trace.events() if e.name.startswith("cuda"))
        print(f"in each of {rounds} rounds:", {n: round(c / rounds, 1)
                                              for n, c in calls.most_common(12)})
        events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
        for e in events[:22]:
            print(f"  {e.self_device_time_total / rounds:8.1f} us  {e.count / rounds:6.1f} x  "
                  f"{e.key[:90]}")

    def run(self) -> None:
        args = self.args
        self.plain()
        if "lookup" in args.beside:
            prompt = self.prompt(self.text.copy(self.wrong(args.looked_up)))
            self.speculation("lookup", "prompt_lookup", args.looked_up, prompt)
        if "assistant" in args.beside:
            assistant = llama(self.assistant_shape,
                              self.text.assistant(self.wrong(args.drafted)), self.dtype,
                              args.device)
            start, prompt = time.perf_counter(), self.prompt(self.text.copy([])[-32:])
            with lz.accelerate(assistant, measure=False):
                made = time.perf_counter() - start
                assistant_us = token_us(assistant, prompt, args.new, args.repeats)[0]
                print(f"{'assistant, plain steps':24} {assistant_us:8.0f} us a token, accelerated "
                      f"in {made:.1f} s")
                self.speculation("assistant", assistant, args.drafted, prompt, assistant_us)
        if "tree" in args.beside:              # three tokens of two places, or seven of the latest
            prompt = self.prompt(self.text.ambiguous(random.Random(2).sample(
                range(args.new), args.new * 3 // 4)))
            self.speculation("lookup, ambiguous", "prompt_lookup", args.looked_up, prompt)
            self.speculation("lookup, tree", "prompt_lookup", args.looked_up // 2, prompt,
                             branches=2)
        if "nothing" in args.beside:           # drafts that are always wrong
            prompt = self.prompt([token for pair in zip(self.text.tokens, range(
                self.text.vocab - 1, 0, -1)) for token in pair] + self.text.tokens[:1])
            self.speculation("lookup, all wrong", "prompt_lookup", args.looked_up, prompt)
        folder = os.environ.get("OUT")
        path = args.json or (f"{folder}/speculative-{args.shape}.json" if folder else None)
        if path:
            Path(path).write_text(json.dumps(self.found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--accept", type=float, default=0.7, help="share of drafts to be accepted")
    parser.add_argument("--drafted", type=int, default=4, help="by the assistant, in a round")
    parser.add_argument("--looked-up", type=int, default=7)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="and where the time goes")
    parser.add_argument("--json", help="where the figures are written")
    parser.add_argument("--beside", nargs="*", default=["lookup", "assistant", "nothing"],
                        choices=("lookup", "assistant", "nothing", "tree"))
    args = parser.parse_args()
    start = time.perf_counter()
    Benchmark(args).run()
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
