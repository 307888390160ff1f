"""Speculation against plain steps: tokens a second where a given share of the drafts is accepted.

    python benchmarks/speculative.py                                # a small model, on this machine
    python benchmarks/speculative.py --shape llama-3.2-1b --device cuda --dtype bfloat16

The weights are random, but for a head that makes a fixed permutation of the tokens the text: so
that the rounding of a step with more rows changes no token. The drafts are made of the text: each
token is right with `--accept`. The assistant still computes every one of its tokens, so that its
time counts. "lookup" is drafting that costs nothing.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero as lz
from layerzero.integrations.transformers.generation.speculation import Draft, Lookup

# hidden, inner, layers, heads, key heads, vocabulary; and of the assistant
SHAPES = {"small": ((512, 1536, 8, 8, 4, 8192), (256, 768, 2, 4, 2, 8192)),
          "llama-3.2-1b": ((2048, 8192, 16, 32, 8, 128256), (768, 2048, 4, 12, 4, 128256)),
          "llama-3-8b": ((4096, 14336, 32, 32, 8, 128256), (2048, 8192, 16, 32, 8, 128256))}


def llama(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Any:
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
            model.lm_head.weight[torch.randperm(vocab)] = model.model.embed_tokens.weight
    model.generation_config.eos_token_id = None
    return model


class Scripted:
    """Drafts that are right with a given share: whatever the assistant says, for as long as it
    takes to say it."""

    def __init__(self, text: torch.Tensor, share: float, count: int, draft: Any, vocab: int) -> None:
        self._text, self._share, self._draft = text.tolist(), share, draft
        self._count, self._vocab, self._random = count, vocab, random.Random(0)

    def begin(self) -> None:
        if self._draft is not None:
            self._draft.begin()

    def accept(self, length: int) -> None:
        if self._draft is not None:
            self._draft.accept(length)

    def __call__(self, ids: torch.Tensor, most: int) -> tuple[torch.Tensor, None]:
        if self._draft is not None:
            self._draft(ids, most)
        right = self._text[len(ids):len(ids) + min(self._count, most)]
        drafted = [t if self._random.random() < self._share else (t + 1) % self._vocab
                   for t in right]
        return torch.tensor(drafted, dtype=ids.dtype, device=ids.device), None


def rate(model: Any, prompt: torch.Tensor, new: int, repeats: int) -> tuple[float, torch.Tensor]:
    """Tokens a second, the best of some; the first, in which kernels are chosen, is not timed."""
    best = 0.0
    for i in range(repeats + 1):
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new,
                             do_sample=False)
        if prompt.is_cuda:
            torch.cuda.synchronize()
        best = max(best, new / (time.perf_counter() - start)) if i else 0.0
    return best, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--accept", type=float, default=0.7)
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--beside", nargs="*", default=["transformers", "lookup", "assistant"],
                        choices=("transformers", "lookup", "assistant"))
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model, assistant = (llama(shape, dtype, args.device) for shape in SHAPES[args.shape])
    vocab = model.config.vocab_size
    prompt = torch.randint(3, vocab, (1, 32), generator=torch.Generator().manual_seed(1)).to(
        args.device)
    print(f"{args.shape}, {args.dtype}, {args.device}, {args.new} tokens after 32")

    def show(name: str, found: float, words: str = "") -> None:
        print(f"{name:26} {found:9.1f} tokens/s  {found / plain:5.2f} x  {words}", flush=True)

    report = lz.accelerate(model, measure=False)
    plain, text = rate(model, prompt, args.new, args.repeats)
    show("accelerated", plain)
    report.undo()
    if "transformers" in args.beside:
        show("transformers", rate(model, prompt, args.new, args.repeats)[0])
    for name, draft in (("lookup", "prompt_lookup"), ("assistant", assistant)):
        if name not in args.beside:
            continue
        report = lz.accelerate(model, measure=False, assistant=draft)
        speculation = report._speculation
        own = speculation.draft
        inner = own if isinstance(own, Draft) else None
        count = args.drafted
        if inner is not None:
            inner.count = count
        assert isinstance(own, (Draft, Lookup))
        speculation.draft = Scripted(text[0], args.accept, count, inner, vocab)
        found, out = rate(model, prompt, args.new, args.repeats)
        done = speculation.stats
        a_round = args.new / found / (done.rounds / (args.repeats + 1)) * plain
        same = "same tokens" if torch.equal(out, text) else "OTHER TOKENS"
        show(f"speculation, {name}", found,
             f"{done.accepted / max(1, done.drafted):.0%} accepted, "
             f"{done.tokens / max(1, done.rounds):.2f} tokens a round, a round takes "
             f"{a_round:.2f} plain tokens, {same}")
        report.undo()


if __name__ == "__main__":
    main()
