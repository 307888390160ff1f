"""The kernels of triton_round.py in Triton's interpreter, against the same steps in plain torch;
then whole rounds. Run as a program with TRITON_INTERPRET=1."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerzero.integrations.transformers.accelerate import accelerate
from layerzero.integrations.transformers.decoding.cuda import triton_step
from layerzero.integrations.transformers.decoding.cuda.captured_rows import depths
from layerzero.integrations.transformers.generation import round_state, rounds, triton_round
from layerzero.integrations.transformers.generation.round_state import Inputs, RoundState

HALF = torch.float16


def inputs(rows: int, branches: int = 1) -> Inputs:
    return Inputs(torch.zeros((rows, 1), dtype=torch.int64),
                  *(torch.zeros(rows, dtype=torch.int64) for _ in "pl"),
                  depths(rows, branches) if rows > 1 else torch.zeros(1, dtype=torch.int64))


def state(text: list[int], rows: int, assistant: bool, branches: int, capacity: int) -> RoundState:
    more = (inputs(2), inputs(1)) if assistant else ()
    made = round_state.make_state(capacity, inputs(1), inputs(rows, branches), *more,
                                  branches=branches)
    made.start(torch.tensor(text))
    return made


def tensors(of: Any) -> list[torch.Tensor]:
    values = [getattr(of, f.name) for f in fields(of)]
    return [t for v in values if v is not None for t in (tensors(v) if is_dataclass(v) else [v])]


def check_alike(one: RoundState, other: RoundState) -> None:
    end = int(one.length)
    assert torch.equal(one.length, other.length), (one.length, other.length)
    assert torch.equal(one.text[:end], other.text[:end])
    new = int(one.log[0, 1])
    assert torch.equal(one.log[0, :2 + new], other.log[0, :2 + new]), (one.log, other.log)
    if new > 1:
        assert torch.equal(one.kept, other.kept)
    for mine, theirs in zip(tensors(one)[5:], tensors(other)[5:]):
        assert torch.equal(mine, theirs), (mine, theirs)


def check_steps(seed: int, rows: int, length: int, assistant: bool, branches: int = 1) -> None:
    pick = random.Random(seed)
    text = [pick.randrange(3 if seed % 2 else 50) for _ in range(length)]
    plain, kernels = (state(text, rows, assistant, branches, 2100) for _ in "ab")
    vocab = 5000
    gen = torch.Generator().manual_seed(seed)
    for number in range(1, rows) if assistant else ():
        logits = torch.randn(1, vocab, generator=gen)
        round_state.choose(plain, logits, number)
        triton_round.choose(kernels, logits, number)
    if not assistant:
        round_state.lookup(plain)
        triton_round.lookup(kernels)
    assert torch.equal(plain.found, kernels.found)
    assert torch.equal(plain.rows.tokens, kernels.rows.tokens), (plain.rows, kernels.rows)
    logits = torch.randn(rows, vocab, generator=gen)
    branch, depth = pick.randrange(branches), (rows - 1) // branches
    for i, token in enumerate(plain.rows.tokens[1 + branch * depth:][:depth, 0].tolist()):
        if pick.random() < 0.8:
            logits[i + branch * depth if i else 0, token] = 9.0
    caches = [[tuple(torch.arange(2100 * 2 * 8.0).view(1, 2100, 2, 8).to(HALF).add_(n)
                     for n in (0, 5)) for _ in range(3)] for _ in "ab"]
    for count in (rows, 1):                    # a round, and a plain step after it
        round_state.accept(plain, logits[:count])
        triton_round.accept(kernels, logits[:count])
        check_alike(plain, kernels)
        if branches > 1 and count > 1:
            for module, of, cache in zip((round_state, triton_round), (plain, kernels), caches):
                module.move_branch(of, cache, torch.tensor([b.data_ptr() for pair in cache
                                                            for b in pair]))
            end = int(plain.length) - 1
            assert all(torch.equal(a[:, :end], b[:, :end]) for pair in zip(*caches)
                       for a, b in zip(*pair))


@torch.no_grad()
def check_rounds(kind: str) -> None:
    """Rounds by the kernels that a CUDA device runs; the text has wide margins."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         pad_token_id=0, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=512, tie_word_embeddings=False)
    model, other = (LlamaForCausalLM(config).eval().to(HALF) for _ in "ab")
    for each in (model, other):
        for layer in each.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.001)
            layer.mlp.down_proj.weight.mul_(0.001)
        each.lm_head.weight[torch.arange(64).roll(1)] = each.model.embed_tokens.weight
    other.lm_head.weight[7] = 0.0              # a token that the assistant never drafts
    ids = torch.arange(3, 12)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    before = model.generate(ids, **options)
    report = accelerate(model, measure=False, patch=False, capture=True,
                        assistant=other if kind == "assistant" else kind)
    speculation = report._speculation
    steps = [report._step, *([report._assistant._step] if report._assistant else [])]
    for step in steps:
        for count in (1, 2, speculation.draft.count + 1):
            step.step(count).fast = triton_step
        step._captured.forget(1)
    rounds.kernels = lambda device: triton_round       # type: ignore[assignment]
    assert torch.equal(model.generate(ids, **options), before)
    assert speculation.stats.rounds and not speculation.stats.uncaptured, str(report)
    assert "all rows" in report.kernels["attention, verified"], str(report)


if __name__ == "__main__":
    for seed in range(12):
        check_steps(seed, (5, 8, 2)[seed % 3], (9, 2, 1300, 40)[seed % 4], seed >= 6)
    for seed in range(8):                      # a tree
        check_steps(seed, (7, 9)[seed % 2], (40, 1300)[seed % 2], False, (2, 4)[seed // 2 % 2]
                    if seed % 2 else 2)
    for kind in ("prompt_lookup", "assistant"):
        check_rounds(kind)
    print("all agree")
