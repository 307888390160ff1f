"""Inputs that are drawn show mistakes: each kind of value is there that a mistake needs to show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layerzero.verify.trace.answers import draws
from layerzero.verify.trace.answers.answer import Answer
from layerzero.verify.trace.answers.frequencies import drawn_often, frequencies, small_vocabulary
from layerzero.verify.trace.answers.lookup import answer
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.definition import Definition
from layerzero.verify.trace.inputs import drawn
from layerzero.verify.trace.inputs.generation import generate
from layerzero.verify.trace.run import verify

FILTERS = {"plain": (), "top_k": ("top_k",), "top_p": ("top_p",), "both": ("top_k", "top_p"),
           "min_p": ("min_p",)}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Iterator[References]:
    with References([tmp_path_factory.getbasetemp()], timeout_s=30) as opened:
        yield opened


def described(name: str, op_type: str, axes: dict[str, int | None], inputs: dict[str, tuple],
              outputs: dict[str, tuple], reference: str, **more) -> Definition:
    """A definition; an axis without a value is variable, a tensor is (dtype, *axes)."""
    tensors = [{n: {"dtype": dtype, "shape": list(shape) or None}
                for n, (dtype, *shape) in group.items()} for group in (inputs, outputs)]
    return Definition.from_json({
        "name": name, "op_type": op_type, "inputs": tensors[0], "outputs": tensors[1],
        "axes": {a: {"type": "var"} if v is None else {"type": "const", "value": v}
                 for a, v in axes.items()}, "reference": reference, **more})


def stored(folder: Path, definition: Definition) -> Definition:
    path = folder / f"{definition.name}.json"
    path.write_text(json.dumps(definition.to_json()))
    return Definition.load(path)


# tokens that are drawn

def sampler(filters: tuple[str, ...], vocabulary: int = 150,
            reference: str = "def run(*inputs):\n    return inputs[0][:, 0].long()\n") -> Definition:
    kinds = {"top_k": ("int32", "batch"), "top_p": ("float32", "batch"),
             "min_p": ("float32", "batch")}
    return described(f"sample_v{vocabulary}", "sampling", {"batch": None, "vocab": vocabulary},
                     {"probs": ("float32", "batch", "vocab"), **{f: kinds[f] for f in filters}},
                     {"samples": ("int64", "batch")}, reference)


def drawn_from(reply: Answer, seed: int) -> tuple[dict[str, Tensor], int, Tensor]:
    """Inputs with repeated rows, how often each comes, and what the filters leave of it."""
    rows = generate(reply.definition, seed=seed)
    inputs, times = draws.repeated(reply, rows)
    return inputs, times, draws.of(reply, rows, 0.0).float().repeat_interleave(times, 0)


def by_multinomial(weights: Tensor, gen: torch.Generator) -> Tensor:
    return torch.multinomial(weights, 1, generator=gen)[:, 0]


def by_inverse_cdf(weights: Tensor, gen: torch.Generator) -> Tensor:
    ranked, ids = weights.sort(-1, descending=True)
    at = torch.rand(len(weights), 1, generator=gen) * ranked.sum(-1, keepdim=True)
    return ids.gather(1, torch.searchsorted(ranked.cumsum(-1), at).clamp(max=len(ids[0]) - 1))[:, 0]


def by_gumbel(weights: Tensor, gen: torch.Generator) -> Tensor:
    noise = -(-torch.rand(weights.shape, generator=gen).clamp(min=1e-20).log()).log()
    return (weights.log() + noise).argmax(-1)


@pytest.mark.parametrize("draw", [by_multinomial, by_inverse_cdf, by_gumbel])
@pytest.mark.parametrize("filters", FILTERS)
def test_a_right_sampler_passes_for_every_seed(filters: str, draw: Callable) -> None:
    reply = answer(sampler(FILTERS[filters]))
    for seed in range(30):
        inputs, times, weights = drawn_from(reply, seed)
        tokens = draw(weights, torch.Generator().manual_seed(seed))
        verdict = draws.often(reply, inputs, tokens, times)
        assert verdict.passed, (seed, verdict.detail)


def crossing_dropped(weights: Tensor) -> Tensor:
    """The least likely token that is left is not: top-p without the token that crosses it, or
    top-k with k - 1."""
    least = weights.masked_fill(weights <= 0, math.inf).argmin(-1, keepdim=True)
    single = (weights > 0).sum(-1, keepdim=True) == 1
    return torch.where(single, weights, weights.scatter(1, least, 0.0))


WRONG: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "greedy": lambda w, gen: w.argmax(-1),
    "off by one": lambda w, gen: (by_multinomial(w, gen) + 1) % w.shape[1],
    "uniform among those left": lambda w, gen: by_multinomial((w > 0).float(), gen),
    "square root": lambda w, gen: by_multinomial(w.sqrt(), gen),
    "squared": lambda w, gen: by_multinomial(w * w, gen),
    "least likely dropped": lambda w, gen: by_multinomial(crossing_dropped(w), gen),
    "never the likeliest": lambda w, gen: by_multinomial(torch.where(
        (w > 0).sum(-1, keepdim=True) > 1, w.scatter(1, w.argmax(-1, keepdim=True), 0.0), w), gen)}


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("filters", ["plain", "top_k", "top_p", "both"])
def test_a_wrong_sampler_is_refused_for_every_seed(filters: str, mistake: str) -> None:
    if filters == "plain" and mistake == "least likely dropped":
        pytest.skip("a token of a probability of 1e-6 is not missed")
    reply = answer(sampler(FILTERS[filters]))
    for seed in range(5):
        inputs, times, weights = drawn_from(reply, seed)
        tokens = WRONG[mistake](weights, torch.Generator().manual_seed(seed))
        assert not draws.often(reply, inputs, tokens, times).passed, seed


def test_a_row_in_which_rounding_decides_is_left_out() -> None:
    """Whether the third token belongs to a top_p of exactly 0.5 + 0.25 is rounding."""
    reply = answer(sampler(("top_p",), 4))
    inputs = {"probs": torch.tensor([[0.5, 0.25, 0.15, 0.1]] * 600),
              "top_p": torch.full((600,), 0.75)}
    third = torch.tensor([0, 1, 2]).repeat(200)
    assert draws.often(reply, inputs, third, 600).passed
    inputs["top_p"] = torch.full((600,), 0.7)
    assert not draws.often(reply, inputs, third, 600).passed


RIGHT_TOP_K = """import torch

def run(probs, top_k):
    assert probs.shape[1] == 50000
    ranked, ids = probs.sort(-1, descending=True)
    k = torch.where((top_k > 0) & (top_k < 50000), top_k, 50000)
    ranked = ranked * (torch.arange(probs.shape[1]) < k[:, None])
    return ids.gather(1, torch.multinomial(ranked, 1))[:, 0]
"""


def test_a_large_vocabulary_is_drawn_from_as_a_small_one(tmp_path, references) -> None:
    reference = RIGHT_TOP_K.replace("(top_k < 50000), top_k, 50000", "(top_k < probs.shape[1]), "
                                    "top_k, probs.shape[1]")
    right = stored(tmp_path, sampler(("top_k",), 50000, reference))
    assert drawn_often(right).const_axes["vocab"] < 1000
    report = verify(right, references)
    assert report.passed, str(report)
    (asked,) = [c for c in report.comparisons if c.want == "the probabilities"]
    assert f"{draws.REPEATS} draws" in asked.verdicts[0].detail
    for old, new in (("torch.multinomial(ranked, 1)", "ranked.argmax(-1, keepdim=True)"),
                     ("torch.multinomial(ranked, 1)", "torch.multinomial(ranked.sqrt(), 1)"),
                     ("< k[:, None]", "< (k - 1).clamp(min=1)[:, None]")):
        wrong = stored(tmp_path, sampler(("top_k",), 50000, reference.replace(old, new)))
        assert verify(wrong, references).status == "disputed", new


def test_a_vocabulary_that_cannot_be_made_smaller_is_told(tmp_path, references) -> None:
    fixed = stored(tmp_path, sampler(("top_k",), 50000, RIGHT_TOP_K))
    verdict, why = frequencies(fixed, references)
    assert verdict is None and "50000" in why
    assert drawn_often(fixed) is fixed
    small = sampler(("top_k",))
    assert small_vocabulary(small) is small


# attention

MASK = """import torch

def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    for a, b, c, d in zip(qo_indptr, qo_indptr[1:], kv_indptr, kv_indptr[1:]):
        if a == b or c == d:
            continue
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[c:d].float()) * sm_scale
        i = torch.arange(int(b - a))[:, None] + int(d - c) - int(b - a)
        seen = torch.arange(int(d - c)) <= i
        p = s.masked_fill(~seen, float("-inf")).softmax(-1){after}
        o[a:b] = torch.einsum("hqk,khd->qhd", p, v[c:d].float()).to(q.dtype)
    return o
"""


def ragged(after: str = ".nan_to_num(0.0)", **changes) -> Definition:
    return described(
        "ragged_causal", "gqa_ragged", {"h": 2, "d": 16, "n": None, "tq": None, "tk": None},
        {"q": ("float32", "tq", "h", "d"), "k": ("float32", "tk", "h", "d"),
         "v": ("float32", "tk", "h", "d"), "qo_indptr": ("int32", "n"), "kv_indptr": ("int32", "n"),
         "sm_scale": ("float32",)}, {"output": ("float32", "tq", "h", "d")},
        MASK.replace("{after}", after), **changes,
        constraints=["tq == qo_indptr[-1].item()", "tk == kv_indptr[-1].item()"])


def lengths(definition: Definition, seed: int, size: str = "small") -> tuple[list[int], list[int]]:
    inputs = generate(definition, size, seed=seed)
    return inputs["qo_indptr"].diff().tolist(), inputs["kv_indptr"].diff().tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_has_more_queries_than_a_tile_and_lengths_differ(seed: int) -> None:
    queries, keys = lengths(ragged(), seed)
    assert max(queries[1:]) > 8 and len(set(queries)) > 1
    assert len(set(keys)) == len(keys) and 0 in keys and max(keys) > 128


def test_a_query_without_a_key_is_drawn_where_the_reference_says_what_it_gets() -> None:
    for seed in range(5):
        queries, keys = lengths(ragged(), seed)
        assert any(0 < k < q for q, k in zip(queries, keys))
        queries, keys = lengths(ragged(after=""), seed)    # softmax of nothing: NaN
        assert not any(0 < k < q for q, k in zip(queries, keys))


@pytest.mark.parametrize("size", ["small", "medium"])
@pytest.mark.parametrize("words", [{"description": "A sliding window of 700 keys"},
                                   {"reference": "WINDOW_SIZE = 700\n"}])
def test_contexts_exceed_the_window(words: dict[str, str], size: str) -> None:
    definition = ragged(**({"description": words["description"]} if "description" in words else {}))
    if "reference" in words:
        definition = Definition.from_json({
            **definition.to_json(), "reference": words["reference"] + definition.reference})
    assert drawn.window(definition) == 700 and max(lengths(definition, 0, size)[1]) > 700
    assert drawn.window(ragged()) == 0


@pytest.mark.parametrize(("old", "new"), [
    ("<= i\n", "<= i + 1\n"), ("<= i\n", "< i\n"),
    ("<= i\n", "<= i + 99 * (torch.arange(int(b - a))[:, None] > 3)\n"),
    ("<= i\n", "<= i + 99 * (torch.arange(int(b - a))[:, None] == 7)\n"),
    (".nan_to_num(0.0)", ".nan_to_num(1.0)"), (" + int(d - c) - int(b - a)", "")])
def test_a_mask_that_is_slightly_wrong_is_seen(tmp_path, references, old: str, new: str) -> None:
    definition = ragged()
    assert verify(stored(tmp_path, definition), references).passed
    assert old in definition.reference
    wrong = Definition.from_json({**definition.to_json(),
                                  "reference": definition.reference.replace(old, new)})
    assert verify(stored(tmp_path, wrong), references).status == "failed"


# what indices point into

@pytest.mark.parametrize("seed", range(3))
def test_choices_are_full_empty_and_with_holes(seed: int) -> None:
    rows = drawn.choices(5, 256, 400, True, torch.Generator().manual_seed(seed))
    valid = rows >= 0
    assert valid[0].all() and not valid[1].any()
    assert valid[2].sum() == 224 and not valid[2][:valid[2].sum()].all()     # -1 between them
    assert valid[3][:valid[3].sum()].all() and 2 <= valid[3].sum() < 256     # -1 at the end
    assert valid[4].sum() > 64 and not valid[4, 0]
    for row, kept in zip(rows, valid):
        assert len(row[kept].unique()) == kept.sum() and row.max() < 400


def test_a_cache_has_more_tokens_than_a_query_chooses() -> None:
    for page_size in (1, 16, 64):
        sparse = described(
            "sparse", "dsa_paged", {"t": None, "h": 2, "c": 8, "r": 4, "topk": 128,
                                    "page_size": page_size, "num_pages": None},
            {"q_nope": ("float32", "t", "h", "c"), "q_pe": ("float32", "t", "h", "r"),
             "ckv_cache": ("float32", "num_pages", "page_size", "c"),
             "kpe_cache": ("float32", "num_pages", "page_size", "r"),
             "sparse_indices": ("int32", "t", "topk"), "sm_scale": ("float32",)},
            {"output": ("float32", "t", "h", "c")}, "def run(*inputs):\n    return inputs[0]\n")
        inputs = generate(sparse)
        assert (inputs["sparse_indices"][0] >= 0).all()
        assert inputs["ckv_cache"].shape[0] * page_size > 128
        assert inputs["sparse_indices"].max() >= 128 * 0.9


def test_a_slot_may_be_padding_and_a_state_is_unused() -> None:
    step = described(
        "step", "mamba_ssu", {"batch_size": None, "slots": None, "h": 2, "p": 4, "n": 8, "g": 1},
        {"state": ("float32", "slots", "h", "p", "n"), "x": ("float32", "batch_size", "h", "p"),
         "dt": ("float32", "batch_size", "h", "p"), "A": ("float32", "h", "p", "n"),
         "B": ("float32", "batch_size", "g", "n"), "C": ("float32", "batch_size", "g", "n"),
         "D": ("float32", "h", "p"), "state_batch_indices": ("int32", "batch_size")},
        {"output": ("float32", "batch_size", "h", "p"),
         "new_state": ("float32", "slots", "h", "p", "n")},
        "def run(*inputs):\n    return inputs[1], inputs[0]\n")
    inputs = generate(step)
    slots = inputs["state_batch_indices"]
    assert (slots == -1).sum() == 1 and len(slots.unique()) == len(slots)
    assert len(inputs["state"]) > len(slots)
    assert inputs["D"].std() > 0.5             # as large as what it is added to


# weights and biases

def test_norm_weights_have_both_signs_and_biases_differ() -> None:
    norm = described("norm", "rmsnorm", {"rows": None, "h": 256},
                     {"x": ("bfloat16", "rows", "h"), "weight": ("bfloat16", "h")},
                     {"y": ("bfloat16", "rows", "h")}, "def run(x, weight):\n    return x\n")
    weight = generate(norm)["weight"].float()
    assert 0.3 < (weight < 0).float().mean() < 0.7
    assert weight.abs().min() > 0.2 and ((weight - 1).abs() > 0.25).float().mean() > 0.6
    bias = drawn.apart(256, torch.Generator().manual_seed(0)).bfloat16()
    assert len(bias.unique()) == 256 and bias.min() < -0.4 and bias.max() > 0.4


@pytest.mark.parametrize("n", [1, 8, 256, 384, 1000])
def test_a_routing_bias_is_negative_and_has_no_equals(n: int) -> None:
    bias = drawn.below_zero(n, torch.Generator().manual_seed(n))
    assert bool((bias < 0).all()) and bool((bias >= -1).all())
    assert len(bias.bfloat16().unique()) == n
    local = drawn.favour(bias, n // 2, n // 4)
    assert torch.equal(local.sort().values, bias.sort().values)
    assert n < 16 or n // 2 <= int(local.argmax()) < n // 2 + n // 4


@pytest.mark.parametrize(("experts", "parts", "first"), [(16, 4, 0), (256, 8, 32), (256, 8, 0)])
def test_a_bias_alone_chooses_groups_otherwise_by_best_and_by_sum(experts, parts, first) -> None:
    bias = drawn.below_zero(experts, torch.Generator().manual_seed(0))
    arranged = drawn.bias_in_groups(bias, parts, first)
    assert torch.equal(arranged.sort().values, bias.sort().values)
    groups = arranged.view(parts, -1)
    best = groups.amax(-1).topk(parts // 2).indices.tolist()
    pairs = groups.topk(2).values.sum(-1).topk(parts // 2).indices.tolist()
    assert {*best} != {*pairs}
    assert first * parts // experts in pairs and first * parts // experts not in best
    assert torch.equal(drawn.bias_in_groups(bias, 1, 0), bias)


def test_the_sums_of_a_row_drift_away_and_back() -> None:
    definition = described(
        "product", "gemm", {"m": None, "n": 64, "k": 2048},
        {"A": ("bfloat16", "m", "k"), "B": ("bfloat16", "n", "k")}, {"C": ("bfloat16", "m", "n")},
        "def run(A, B):\n    return A @ B.T\n")
    for seed in range(3):
        inputs = generate(definition, seed=seed)
        a, b = inputs["A"][drawn.ROW + 1].double(), inputs["B"].double()
        sums = (a * b).cumsum(-1)
        assert float(sums.abs().amax()) > 3 * float(sums[:, -1].square().mean().sqrt())
        others = (inputs["A"][0].double() * b).cumsum(-1)
        assert float(others.abs().mean()) < float(sums.abs().mean())


def test_the_last_position_of_a_table_is_read() -> None:
    rope = described(
        "rope", "rope", {"t": None, "h": 2, "d": 8, "max_seq_len": 32},
        {"q": ("float32", "t", "h", "d"), "k": ("float32", "t", "h", "d"),
         "cos_sin_cache": ("float32", "max_seq_len", "d"), "positions": ("int64", "t")},
        {"q_out": ("float32", "t", "h", "d")}, "def run(*inputs):\n    return inputs[0]\n")
    positions = generate(rope)["positions"]
    assert positions[-1] == 31 and len(positions.unique()) > 2
