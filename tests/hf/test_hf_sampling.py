"""lz.patch(model, only="sampling"): the same probabilities, another draw, and nothing else that
changes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from models import tiny, tokens
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import layerzero as lz
from layerzero.integrations.transformers.accelerate import accelerate
from layerzero.integrations.transformers.patch import patch, patched, unpatch
from layerzero.integrations.transformers.sampling import Draw, with_draw

pytestmark = pytest.mark.integration
SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}


def generate(model, rows: int = 2, **how):
    torch.manual_seed(0)
    return model.generate(input_ids=tokens(rows, 9), max_new_tokens=6, pad_token_id=0, **how)


def draw_tokens() -> int:
    return sum(lz.stats().calls.get("sample", {}).values())


@pytest.mark.parametrize("warpers", [
    [TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8),
     MinPLogitsWarper(0.05)],
    [TopPLogitsWarper(0.6)], [TopKLogitsWarper(5)],
    [TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.2)]])
def test_the_probabilities_are_those_of_transformers(warpers):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    ids, many = torch.zeros(1, 1, dtype=torch.long), 40_000
    want = LogitsProcessorList(warpers)(ids, logits.clone()).softmax(-1)[0]
    ours = with_draw(LogitsProcessorList(warpers), GenerationConfig(do_sample=True))
    assert [type(p) for p in ours] == [Draw]
    torch.manual_seed(2)
    scores = ours(ids, logits.expand(many, -1).clone())
    assert ((scores == 0).sum(-1) == 1).all() and ((scores == -torch.inf).sum(-1) == 39).all()
    seen = (scores == 0).float().mean(0)
    assert set(seen.nonzero().flatten().tolist()) <= set(want.nonzero().flatten().tolist())
    expected = want[want > 0] * many
    surprise = ((seen[want > 0] * many - expected) ** 2 / expected).sum()      # chi-square
    assert surprise < len(expected) + 6 * (2 * len(expected)) ** 0.5


def test_generate_draws_by_lz_and_repeats_by_seed():
    model = tiny("llama")
    stock, greedy = generate(model, **SAMPLED), generate(model, do_sample=False)
    scored = generate(model, output_scores=True, return_dict_in_generate=True, **SAMPLED)
    report, before = patch(model, only="sampling"), draw_tokens()
    assert report.counts() == {"sampling": 1} and "lz.sample" in str(report)
    first = generate(model, **SAMPLED)
    assert draw_tokens() == before + 6 and generate(model, **SAMPLED).equal(first)
    assert len({tuple(row) for row in generate(model, 1, num_return_sequences=8,
                                               **SAMPLED).tolist()}) > 1
    before = draw_tokens()
    assert generate(model, do_sample=False).equal(greedy)
    again = generate(model, output_scores=True, return_dict_in_generate=True, **SAMPLED)
    assert (again.sequences.equal(scored.sequences)
            and all(map(torch.equal, again.scores, scored.scores)))
    generate(model, num_beams=2, **SAMPLED)
    assert draw_tokens() == before
    assert patch(model).counts()["sampling"] == 1 and "patched before" in str(patch(model))
    assert unpatch(model) > 0 and generate(model, **SAMPLED).equal(stock)


def test_it_is_left_to_transformers_unless_it_is_named():
    model = tiny("llama")
    stock = generate(model, **SAMPLED)
    row = next(r for r in patch(model).rows if r.kind == "sampling")
    assert not row.patched and "only='sampling'" in row.why
    assert generate(model, **SAMPLED).equal(stock)
    with patched(model, only="sampling"):
        before = draw_tokens()
        generate(model, **SAMPLED)
        assert draw_tokens() == before + 6
    assert generate(model, **SAMPLED).equal(stock)


def test_copies_and_the_accelerated_draw_too():
    model = tiny("llama")
    patch(model, only="sampling")
    want = generate(model, **SAMPLED)
    assert generate(copy.deepcopy(model), **SAMPLED).equal(want)
    report = accelerate(model, measure=False)
    assert report.done and "sampling" not in str(report.left)
    before = draw_tokens()
    assert generate(model, **SAMPLED).equal(want) and draw_tokens() > before


def test_what_lz_does_not_know_stays_as_it_is():
    sampled, top = GenerationConfig(do_sample=True), TopPLogitsWarper(0.9)
    for processors in ([], [TemperatureLogitsWarper(0.5)], [top, TypicalLogitsWarper(0.9)],
                       [top, TopKLogitsWarper(3)],
                       [TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
                       [TopPLogitsWarper(0.9, filter_value=-1e4)]):
        chain = with_draw(LogitsProcessorList(processors), sampled)
        assert [type(p) for p in chain] == [type(p) for p in processors]
    kept = with_draw(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), top]), sampled)
    assert [type(p) for p in kept] == [RepetitionPenaltyLogitsProcessor, Draw]
    assert with_draw([top], GenerationConfig(do_sample=True, output_scores=True)) == [top]


def test_a_row_without_any_token_fails_as_in_transformers():
    scores = Draw(top_p=0.9)(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 8), -torch.inf))
    with pytest.raises(RuntimeError, match="probability tensor"):
        torch.multinomial(scores.softmax(-1), 1)
