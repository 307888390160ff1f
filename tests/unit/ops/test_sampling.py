"""lz.sample: what each filter keeps, that draws follow the distribution, and that every kernel
draws the same.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.models.sampling import sample_minp, sample_topk, sample_topp
from layerzero.ops.formulas.sampling import (
    GOLDEN,
    as_int64,
    distribution,
    mix,
    mix_int,
    random_numbers,
)
from layerzero.ops.sample import OP
from layerzero.verify.kernel.contract import call, case_values, refusals, upcast
from layerzero.world import snapshot as world

KERNELS = world.current().catalog.kernels_of("sample")
DRAWS = 120_000
ROW = (2.0, 1.0, 1.0, 0.5, 0.0, -1.0, -2.0, -30.0)


def chi_square_fits(counts: Tensor, probs: list[float]) -> bool:
    """Whether counts may come from probs, at one in a million; what has no probability must have no
    count."""
    counts = counts.double()
    expected = torch.tensor(probs, dtype=torch.float64) * counts.sum()
    if bool((counts[expected == 0] > 0).any()):
        return False
    likely = expected >= 5
    rest, rest_expected = counts[~likely].sum(), expected[~likely].sum()
    statistic = float(((counts - expected) ** 2 / expected)[likely].sum())
    freedom = int(likely.sum()) - 1
    if rest_expected > 5:
        statistic, freedom = statistic + float((rest - rest_expected) ** 2
                                               / rest_expected), freedom + 1
    if freedom < 1:
        return bool(rest <= rest_expected + 10)
    part = 2 / (9 * freedom)                   # Wilson and Hilferty
    return statistic <= freedom * (1 - part + 4.75 * math.sqrt(part)) ** 3


def expected(row: tuple[float, ...], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
             min_p: float = 0.0) -> list[float]:
    """The distribution by its definition, in plain Python."""
    if temperature == 0.0:
        temperature, top_k = 1.0, 1
    top = max(row)
    weights = [math.exp((x - top) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if top_k:
        order = order[:top_k]
    mass, kept = 0.0, []
    total = sum(weights[i] for i in order)
    for i in order:
        if not kept or mass < top_p * total:
            kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(row))]


def tokens_over_the_line(row: Tensor, kernel: str, n: int = 997, **options: Any) -> set[int]:
    """Every token that some random number draws: exactly what the filters keep."""
    uniforms = torch.linspace(0.0, 1.0, n, dtype=torch.float64)
    return set(lz.sample(row.expand(n, -1), uniforms=uniforms, backend=kernel, **options).tolist())


def serving(**options: Any) -> list[str]:
    values = {p.name: options.get(p.name, p.default) for p in OP.params}
    return [k.id for k in KERNELS if not refusals(k, values)]


# The draw.

def test_splitmix64_is_the_published_one() -> None:
    result = [mix_int(1234567 + n * GOLDEN) for n in range(1, 6)]
    assert result == [6457827717110365317, 3203168211198807973, 9817491932198370423,
                      4593380528125082431,
                      16408922859458223821]


def test_the_tensor_generator_is_the_plain_one() -> None:
    words = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0xDEADBEEFCAFEBABE]
    assert mix(torch.tensor([as_int64(w) for w in words])).tolist() == [as_int64(mix_int(w))
                                                                        for w in words]
    device = torch.device("cpu")
    # small ones are made in Python
    small = random_numbers(5, 3, device, None, 42, None, 7, None)
    large = random_numbers(500, 3, device, None, 42, None, 7, None)
    assert torch.equal(small, large[:5])
    by_row = random_numbers(1, 3, device, None, None, torch.tensor([42]), 7, None)
    assert torch.equal(by_row, large[:1])


def test_random_numbers_are_uniform_and_unrelated() -> None:
    device = torch.device("cpu")
    u = random_numbers(200_000, 2, device, None, 0, None, 0, None)
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    for column in u.T:
        assert chi_square_fits(torch.bincount((column * 64).long(), minlength=64), [1 / 64] * 64)
    seeds = random_numbers(200_000, 1, device, None, None, torch.arange(200_000), 0, None)[:, 0]
    later = random_numbers(200_000, 1, device, None, 1, None, 0, None)[:, 0]
    first, second = u.T
    for a, b in ((first, second), (first[1:], first[:-1]), (seeds[1:], seeds[:-1]), (first, later),
                 (first, seeds)):
        cells = (a * 8).long() * 8 + (b * 8).long()
        assert chi_square_fits(torch.bincount(cells, minlength=64), [1 / 64] * 64)


@pytest.mark.parametrize("kernel", serving(logits=torch.ones(1, 3), from_probs=True))
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(kernel: str) -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]])
    below = math.nextafter(0.5, 0.0)
    for u, token in ((0.0, 1), (below, 1), (0.5, 3), (0.7499999999, 3), (0.75, 4),
                     (0.9999999999999999, 4), (1.0, 4)):
        uniforms = torch.tensor([u], dtype=torch.float64)
        assert lz.sample(probs, from_probs=True, uniforms=uniforms, backend=kernel).item() == token
        assert lz.sample(probs * 3, from_probs=True, uniforms=uniforms,
                         backend=kernel).item() == token


FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.6}, {"temperature": 2.5}, {"top_k": 2}, {"top_k": 4}, {"top_p": 0.7},
    {"top_p": 0.99}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8}, {"top_k": 3, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.1}, {"top_k": 5, "top_p": 0.95, "min_p": 0.1, "temperature": 1.5},
    {"temperature": 0.0}, {"top_p": 0.0},
)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    probs = expected(ROW, **options)
    logits = torch.tensor(ROW).expand(DRAWS, -1)
    for kernel in serving(logits=logits, **options):
        tokens = lz.sample(logits, seed=11, backend=kernel, **options)
        assert chi_square_fits(torch.bincount(tokens, minlength=len(ROW)), probs), kernel
    assert torch.allclose(distribution(logits[:1], **options)[0].double(),
                          torch.tensor(probs, dtype=torch.float64))


def test_the_statistic_finds_a_wrong_distribution() -> None:
    tokens = lz.sample(torch.tensor(ROW).expand(DRAWS, -1), seed=11)
    counts = torch.bincount(tokens, minlength=len(ROW))
    assert not chi_square_fits(counts, expected(ROW, temperature=1.03))
    assert not chi_square_fits(counts, expected(ROW, top_k=6))


def test_torchs_own_generator_serves_without_a_seed() -> None:
    logits = torch.tensor(ROW).expand(DRAWS, -1)
    torch.manual_seed(3)
    first = lz.sample(logits)
    assert chi_square_fits(torch.bincount(first, minlength=len(ROW)), expected(ROW))
    assert not torch.equal(first, lz.sample(logits))
    torch.manual_seed(3)
    assert torch.equal(first, lz.sample(logits))


# What is kept.

TIED = (1.0, 3.0, 3.0, 0.0, 3.0, 1.0, 1.0, -math.inf)
KEPT: tuple[tuple[tuple[float, ...], dict[str, Any], set[int]], ...] = (
    (ROW, {"top_k": 3}, {0, 1, 2}), (ROW, {"top_k": 2}, {0, 1}), (ROW, {"top_k": 8}, set(range(8))),
    (ROW, {"top_k": 99}, set(range(8))), (TIED, {"top_k": 2}, {1, 2}),
    (TIED, {"top_k": 4}, {0, 1, 2, 4}), (TIED, {"top_k": 5}, {0, 1, 2, 4, 5}),
    (TIED, {"top_p": 0.5}, {1, 2}), (TIED, {"top_p": 0.1}, {1}),
    (TIED, {"top_p": 0.0}, {1}), (TIED, {"top_p": 1.0}, {0, 1, 2, 3, 4, 5, 6}),
    (TIED, {"min_p": 1.0}, {1, 2, 4}), (TIED, {"min_p": 0.5}, {1, 2, 4}),
    (TIED, {"min_p": 0.13}, {0, 1, 2, 4, 5, 6}), (TIED, {"temperature": 0.0}, {1}),
    (TIED, {"top_k": 1}, {1}), (TIED, {"top_k": 2, "top_p": 0.5}, {1}),
    (TIED, {"top_k": 2, "top_p": 0.51}, {1, 2}), (TIED, {"top_k": 4, "min_p": 0.5}, {1, 2, 4}),
    ((5.0,), {"top_k": 3, "top_p": 0.1}, {0}),
)


@pytest.mark.parametrize(("row", "options", "kept"), KEPT, ids=str)
def test_exactly_these_tokens_are_kept(row: tuple[float, ...], options: dict[str, Any],
                                       kept: set[int]) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        logits = torch.tensor([row], dtype=dtype)
        for kernel in serving(logits=logits, **options):
            assert tokens_over_the_line(logits, kernel, **options) == kept, (kernel, dtype)


def test_top_p_is_the_fewest_that_reach_p() -> None:
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]])
    for p, kept in ((0.5, {1}), (0.50001, {0, 1}), (0.75, {0, 1}), (0.875, {0, 1, 2}),
                    (0.9, {0, 1, 2, 3})):
        for kernel in serving(logits=probs, top_p=p, from_probs=True):
            assert tokens_over_the_line(probs, kernel, top_p=p, from_probs=True) == kept


def wide_rows(scale: float, ties: bool) -> Tensor:
    """Rows long enough for every kernel; the last of them all tied, or nearly all masked."""
    rows = torch.randn((48, 5003), generator=torch.Generator().manual_seed(5)) * scale
    rows = (rows * 4).round() / 4 if ties else rows
    rows[-1], rows[-2, 10:] = 0.25, -math.inf
    return rows


@pytest.mark.parametrize("ties", (False, True))
@pytest.mark.parametrize("scale", (0.2, 1.0, 4.0))
@pytest.mark.parametrize("options", (
    {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 0.01}, {"min_p": 0.3},
    {"top_p": 0.8, "min_p": 0.02}, {"top_k": 50}, {"top_k": 700, "top_p": 0.9}, {},
    {"temperature": 0.0}, {"top_k": 1}), ids=str)
def test_on_long_rows_every_kernel_draws_the_same(options: dict[str, Any], scale: float,
                                                  ties: bool) -> None:
    logits = wide_rows(scale, ties)[-16:]
    for values in ({"logits": logits}, {"logits": logits.softmax(-1), "from_probs": True}):
        if values.get("from_probs") and "temperature" in options:
            continue
        want = OP.reference(**values, **options, seed=2)
        kernels = serving(**values, **options)
        assert len(kernels) >= 3
        for kernel in kernels:
            assert torch.equal(lz.sample(**values, **options, seed=2, backend=kernel), want), kernel


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16", "float64"))
def test_every_kernel_draws_as_the_reference_in_float64(dtype: str) -> None:
    served = set()
    for case in OP.cases:
        values = case_values(OP, case, dtype, seed=1)
        truth = OP.reference(**upcast(values))
        for kernel in KERNELS:
            if refusals(kernel, values):
                continue
            served.add(kernel.id)
            result = call(kernel, values)
            meta = OP.meta(**values)
            if not values["return_logprobs"]:
                result, truth, meta = (result,), (truth,), (meta,)
            assert torch.equal(result[0], truth[0]), (kernel.id, case)
            assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype)
                                                            for t in meta], (kernel.id, case)
            if values["return_logprobs"]:
                torch.testing.assert_close(result[1].double(), truth[1].double(), rtol=1e-5,
                                           atol=1e-5)
            else:
                truth = truth[0]
    narrow = ({"torch.sample_topk", "torch.sample_topk_rows", "torch.sample_threshold"}
              if dtype == "float64" else set())
    assert served - {"native.sample_greedy"} == {
        k.id for k in KERNELS if k.backend in ("torch", "reference")} - narrow


# Per row.

def test_each_row_has_its_own_parameters() -> None:
    table = ((0.7, 3, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (0.0, 5, 0.9, 0.1), (2.0, 0, 1.0, 0.25),
             (1.0, 4, 0.9, 0.05))
    options = [dict(zip(("temperature", "top_k", "top_p", "min_p"), row)) for row in table]
    count = DRAWS // len(options)
    rows = {f"{name}_rows": torch.tensor([g[name] for g in options]).repeat_interleave(count)
            for name in options[0]}
    logits = torch.tensor(ROW).expand(count * len(options), -1)
    tokens = lz.sample(logits, seed=1, **rows).view(len(options), count)
    for drawn, one in zip(tokens, options):
        assert chi_square_fits(torch.bincount(drawn, minlength=len(ROW)), expected(ROW, **one)), one


def test_a_row_draws_as_its_scalars_would() -> None:
    logits = wide_rows(2.0, False)
    rows = {"temperature": torch.tensor([0.5, 0.0, 1.5, 1.0]).repeat(12),
            "top_p": torch.tensor([0.9, 0.5]).repeat(24),
            "min_p": torch.tensor([0.0, 0.02, 0.0, 0.0]).repeat(12)}
    seeds = torch.arange(len(logits)) + 9
    together = lz.sample(logits, seed_rows=seeds, **{f"{name}_rows": v for name, v in rows.items()})
    for i in range(len(logits)):
        own = {name: round(float(v[i]), 6) for name, v in rows.items()}
        assert lz.sample(logits[i:i + 1], seed=9 + i, **own).item() == together[i].item()


def test_values_out_of_range_in_rows_mean_off_or_greedy() -> None:
    logits = torch.tensor([ROW] * 2)
    one = {"uniforms": torch.tensor([0.999, 0.999])}
    assert lz.sample(logits, top_k_rows=torch.tensor([0, -3]),
                     **one).tolist() == lz.sample(logits, **one).tolist()
    assert lz.sample(logits, top_p_rows=torch.tensor([1.0, 7.0]),
                     **one).tolist() == lz.sample(logits, **one).tolist()
    assert lz.sample(logits, min_p_rows=torch.tensor([0.0, -1.0]),
                     **one).tolist() == lz.sample(logits, **one).tolist()
    assert lz.sample(logits, top_p_rows=torch.tensor([0.0, -1.0]), **one).tolist() == [0, 0]
    assert lz.sample(logits, temperature_rows=torch.tensor([0.0, -1.0]), **one).tolist() == [0, 0]


# Reproducibility.

@pytest.mark.parametrize("options", ({"top_k": 5}, {"top_p": 0.9}, {}, {"min_p": 0.1}), ids=str)
def test_a_seed_gives_the_same_tokens_in_any_split_of_the_batch(options: dict[str, Any]) -> None:
    logits = wide_rows(1.0, False)
    whole = lz.sample(logits, seed=77, **options)
    assert torch.equal(whole, lz.sample(logits, seed=77, **options))
    assert not torch.equal(whole, lz.sample(logits, seed=78, **options))
    for size in (1, 7, 20):
        seeds = torch.arange(len(logits))
        apart = [lz.sample(logits[i:i + size], seed_rows=seeds[i:i + size], **options)
                 for i in range(0, len(logits), size)]
        assert torch.equal(torch.cat(apart), lz.sample(logits, seed_rows=seeds, **options))


def test_no_row_draws_at_one_step_what_another_draws_at_a_later_one() -> None:
    """Rows and steps are told apart: with `offset` as the step, every number of a generation is a
    new one."""
    rows, steps = 8, 40
    drawn = torch.cat([random_numbers(rows, 2, torch.device("cpu"), None, 5, None, step,
                                      None).flatten()
                       for step in range(steps)])
    assert drawn.unique().numel() == rows * steps * 2
    wide = torch.cat([random_numbers(64, 1, torch.device("cpu"), None, 5, None, step, None)
                      for step in range(200)], 1)
    for lag in range(1, 4):                    # nor are neighbours alike
        pair = torch.stack((wide[:-1, lag:].flatten(), wide[1:, :-lag].flatten()))
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.05


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_a_seed_for_all_is_the_seed_of_the_first_row(batch: int) -> None:
    device = torch.device("cpu")
    one = random_numbers(batch, 2, device, None, 11, None, 6, None)
    of_its_own = random_numbers(batch, 2, device, None, None, torch.full((batch,), 11), 6, None)
    assert torch.equal(one[0], of_its_own[0]) and one.unique().numel() == batch * 2


def test_a_seed_of_its_own_makes_a_row_independent_of_its_place() -> None:
    logits, seeds = wide_rows(1.0, False), torch.arange(48) * 1000
    tokens = lz.sample(logits, top_p=0.9, seed_rows=seeds, offset=3)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lz.sample(logits[order], top_p=0.9, seed_rows=seeds[order], offset=3),
                       tokens[order])
    assert not torch.equal(lz.sample(logits, top_p=0.9, seed_rows=seeds, offset=4), tokens)


def test_a_generator_ends_in_the_same_state_whichever_kernel_ran() -> None:
    logits = wide_rows(1.0, False)
    results = []
    for kernel in serving(logits=logits, temperature=0.0):
        generator = torch.Generator().manual_seed(8)
        lz.sample(logits, temperature=0.0, generator=generator, backend=kernel)
        results.append((lz.sample(logits, generator=generator), generator.get_state()))
    assert len(results) >= 4
    for tokens, state in results[1:]:
        assert torch.equal(tokens, results[0][0]) and torch.equal(state, results[0][1])


def test_seeds_of_any_size_serve() -> None:
    logits = torch.zeros(3, 100)
    drawn = {tuple(lz.sample(logits, seed=s).tolist())
             for s in (0, -1, 2**63 - 1, 2**64 - 2, -2**63)}
    assert len(drawn) == 5


# Unusual rows.

@pytest.mark.parametrize("options", ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1},
                                     {"temperature": 0.0},
                                     {"top_k": 1}), ids=str)
@pytest.mark.parametrize("vocab", (7, 5003))
def test_nothing_to_draw_is_minus_one(options: dict[str, Any], vocab: int) -> None:
    logits = torch.full((3, vocab), -math.inf)
    logits[1, 4] = -1e30
    for kernel in serving(logits=logits, **options):
        tokens, logprobs = lz.sample(logits, seed=1, return_logprobs=True, backend=kernel,
                                     **options)
        assert tokens.tolist() == [-1, 4, -1], kernel
        assert logprobs.tolist() == [-math.inf, 0.0, -math.inf], kernel
    if "temperature" not in options:
        probs = torch.zeros((2, vocab))
        probs[1, 3] = 0.125
        for kernel in serving(logits=probs, from_probs=True, **options):
            assert lz.sample(probs, seed=1, from_probs=True, backend=kernel,
                             **options).tolist() == [-1, 3], kernel


@pytest.mark.parametrize("options", ({}, {"top_k": 2}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1},
                                     {"temperature": 0.0},
                                     {"temperature": 1e-38}, {"temperature": 1e38, "top_k": 3}),
                         ids=str)
def test_numbers_without_bounds_make_no_nan(options: dict[str, Any]) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[nan, 0.0, 1.0, -inf], [inf, 0.0, nan, inf], [3e38, -3e38, 3e38, nan],
                           [nan] * 4,
                           [1e-40, 0.0, 0.0, -inf]])
    for kernel in serving(logits=logits, **options):
        tokens, logprobs = lz.sample(logits, seed=1, return_logprobs=True, backend=kernel,
                                     **options)
        assert not logprobs.isnan().any()
        assert (tokens[3] == -1 and tokens[0] in (1, 2) and tokens[1] in (0, 3)
                and tokens[2] in (0, 2)), kernel
    broken = torch.tensor([[nan, 0.5, -1.0, inf], [0.0, 0.0, nan, 0.25]])
    if "temperature" not in options:
        for kernel in serving(logits=broken, from_probs=True, **options):
            assert lz.sample(broken, seed=1, from_probs=True, backend=kernel,
                             **options).tolist() == [1, 3], kernel


def test_greedy_takes_the_first_of_the_highest() -> None:
    logits = torch.zeros(4, 5003)
    logits[1, [100, 4000]], logits[2, [5001, 5002]], logits[3, 64] = 2.0, 3.0, 1.0
    for kernel in serving(logits=logits, temperature=0.0):
        assert lz.sample(logits, temperature=0.0,
                         backend=kernel).tolist() == [0, 100, 5001, 64], kernel
    assert lz.sample(logits.to(torch.bfloat16), temperature=0.0).tolist() == [0, 100, 5001, 64]
    most = torch.finfo(torch.float32).max
    # beyond the largest number there is none
    endless = torch.tensor([[0.0, most, math.inf, 1.0]])
    for kernel in serving(logits=endless, temperature=0.0):
        assert lz.sample(endless, temperature=0.0, backend=kernel).item() == 1, kernel


def test_log_probabilities_are_those_of_the_draw() -> None:
    logits = torch.tensor([ROW]).repeat(400, 1)
    for options in FILTERS:
        probs = torch.tensor(expected(ROW, **options))
        tokens, logprobs = lz.sample(logits, seed=4, return_logprobs=True, **options)
        torch.testing.assert_close(logprobs, probs[tokens].log(), rtol=1e-5, atol=1e-5)
        assert logprobs.dtype == torch.float32


def test_logits_that_want_a_gradient_are_sampled_all_the_same() -> None:
    logits = torch.tensor([ROW], requires_grad=True)
    tokens, logprobs = lz.sample(logits, top_k=2, seed=1, return_logprobs=True)
    assert tokens.item() in (0, 1) and not logprobs.requires_grad


def test_inputs_are_left_alone_whatever_their_strides() -> None:
    base = torch.randn((10, 600), generator=torch.Generator().manual_seed(0))
    views = (base[:, ::2], base.T[:300].contiguous().T, base[::2, :300],
             base[:1, :300].expand(4, -1))
    before = base.clone()
    for view in views:
        history = torch.tensor([[1, 2]] * len(view))
        for options in ({"top_k": 5}, {"top_p": 0.9}, {}, {"temperature": 0.0},
                        {"top_k": 3, "history": history}):
            want = lz.sample(view.clone(), seed=3, **options)
            assert torch.equal(lz.sample(view, seed=3, **options), want)
    assert torch.equal(base, before)


# Penalties.

def paid(row: list[float], history: list[int], repetition: float, presence: float,
         frequency: float) -> list[float]:
    out = list(row)
    for token in set(history):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * history.count(token) + presence
    return out


def test_penalties_by_their_definition() -> None:
    history = [3, 0, 3, 3, 7, 5]
    padded = torch.tensor([[3, -1, 0, 3, 99, 3, 7, 5]])
    counts = torch.bincount(torch.tensor(history), minlength=len(ROW))[None]
    want = expected(tuple(paid(list(ROW), history, 1.4, 0.3, 0.2)))
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    logits = torch.tensor([ROW])
    for options in ({"history": padded}, {"token_counts": counts},
                    {"history": padded, "token_counts": counts}):
        options = {k: v.expand(DRAWS, -1) for k, v in options.items()}
        for kernel in serving(logits=logits.expand(DRAWS, -1), **options, **penalties):
            tokens = lz.sample(logits.expand(DRAWS, -1), seed=6, backend=kernel, **options,
                               **penalties)
            assert chi_square_fits(torch.bincount(tokens, minlength=len(ROW)), want), kernel


def test_presence_and_frequency_read_the_counts_where_there_are_any() -> None:
    """As where the prompt is repeated freely but what was generated is not."""
    logits, history, none = torch.tensor([[1.0, 0.9, -5.0]]), torch.tensor([[0]]), torch.zeros(
        1, 3, dtype=torch.int64)
    assert lz.sample(logits, 0.0, history=history, presence_penalty=0.5).item() == 1
    assert lz.sample(logits, 0.0, history=history, token_counts=none,
                     presence_penalty=0.5).item() == 0
    assert lz.sample(logits, 0.0, history=history, token_counts=none,
                     repetition_penalty=2.0).item() == 1


def test_each_row_pays_its_own_penalties() -> None:
    logits = torch.tensor([[1.0, 0.9]] * 3)
    history = torch.tensor([[0], [0], [-1]])
    rows = torch.tensor([1.0, 1.5, 1.5])
    assert lz.sample(logits, 0.0, history=history,
                     repetition_penalty_rows=rows).tolist() == [0, 1, 0]
    assert lz.sample(logits, 0.0, history=history,
                     presence_penalty_rows=rows - 1).tolist() == [0, 1, 0]
    assert lz.sample(logits, 0.0, history=history,
                     frequency_penalty_rows=rows - 1).tolist() == [0, 1, 0]


def test_an_empty_history_changes_nothing() -> None:
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(0))
    empty = torch.empty((4, 0), dtype=torch.int64)
    assert torch.equal(lz.sample(logits, seed=1, history=empty, repetition_penalty=3.0),
                       lz.sample(logits, seed=1))


# Other libraries' words.

def flashinfer_definition(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """top_k_top_p_sampling_from_probs of one row, up to its multinomial."""
    row = probs.clone()
    if 0 < top_k < len(row):
        filtered = torch.zeros_like(row)
        keep = row.argsort(descending=True)[:top_k]
        filtered[keep] = row[keep]
        row = filtered / filtered.sum()
    if top_p <= 0.0:
        return torch.nn.functional.one_hot(row.argmax(), len(row)).to(row.dtype)
    if top_p < 1.0:
        values, order = row.sort(descending=True)
        remove = values.cumsum(0) > top_p
        remove[1:] = remove[:-1].clone()
        remove[0] = False
        filtered = torch.zeros_like(row)
        filtered[order[~remove]] = row[order[~remove]]
        row = filtered / filtered.sum()
    return row


@pytest.mark.parametrize(("top_k", "top_p"), ((7, 1.0), (0, 0.8), (9, 0.7), (40, 0.0), (99, 0.95)))
def test_sampling_from_probabilities_as_flashinfer_defines_it(top_k: int, top_p: float) -> None:
    probs = (torch.randn((3, 40), generator=torch.Generator().manual_seed(3)) * 1.5).softmax(-1)
    ks, ps = torch.full((DRAWS,), top_k, dtype=torch.int32), torch.full((DRAWS,), top_p)
    for row in probs:
        tokens = lz.sample(row.expand(DRAWS, -1), from_probs=True, top_k_rows=ks, top_p_rows=ps,
                           seed=5)
        want = flashinfer_definition(row.double(), top_k, top_p)
        assert chi_square_fits(torch.bincount(tokens, minlength=40), want.tolist())


def test_the_short_names() -> None:
    logits = wide_rows(1.0, False)
    three = torch.full((48,), 3)
    assert torch.equal(sample_topk(logits, 3, 0.8, seed=1), lz.sample(logits, 0.8, 3, seed=1))
    assert torch.equal(sample_topk(logits, three, seed=1), lz.sample(logits, top_k=3, seed=1))
    assert torch.equal(sample_topp(logits, 0.5, seed=1, offset=2),
                       lz.sample(logits, top_p=0.5, seed=1, offset=2))
    assert torch.equal(sample_topp(logits, torch.full((48,), 0.5), seed=1),
                       lz.sample(logits, top_p=0.5, seed=1))
    assert torch.equal(sample_minp(logits, 0.1, torch.ones(48), seed=1),
                       lz.sample(logits, min_p=0.1, seed=1))


# Choice and mistakes.

@pytest.mark.parametrize(("shape", "options", "kernel"), (
    ((1, 128256), {"top_p": 0.9}, "torch.sample_threshold"),
    ((64, 32000), {"min_p": 0.05}, "torch.sample_threshold"),
    ((8, 128256), {"top_k": 50, "top_p": 0.9}, "torch.sample_topk"),
    ((1, 49152), {}, "torch.sample_cdf"), ((1, 49152), {"temperature": 0.0}, "torch.sample_greedy"),
    ((1, 49152), {"top_k": 1}, "torch.sample_greedy"),
    ((4, 100), {"top_p": 0.9}, "torch.sample_sort"),
    ((1, 49152), {"top_k": 5000}, "torch.sample_sort"),
), ids=str)
def test_unmeasured_the_kernel_that_avoids_the_sort_is_chosen(shape: tuple[int, int],
                                                              options: dict[str, Any],
                                                               kernel: str) -> None:
    # the greedy one is ours where it is built
    assert lz.which("sample", torch.zeros(shape), **options).replace("native.", "torch.") == kernel


@pytest.mark.parametrize(("options", "code", "word"), (
    ({"temperature": -0.1}, lz.Code.VALUE_OUT_OF_RANGE, "temperature"),
    ({"temperature": math.nan}, lz.Code.VALUE_OUT_OF_RANGE, "temperature"),
    ({"top_p": 1.01}, lz.Code.VALUE_OUT_OF_RANGE, "top_p"),
    ({"top_p": -0.5}, lz.Code.VALUE_OUT_OF_RANGE, "top_p"),
    ({"min_p": 1.5}, lz.Code.VALUE_OUT_OF_RANGE, "min_p"),
    ({"top_k": -1}, lz.Code.VALUE_OUT_OF_RANGE, "top_k"),
    ({"top_k": 1.5}, lz.Code.WRONG_TYPE, "top_k"),
    ({"temperature": "hot"}, lz.Code.WRONG_TYPE, "temperature"),
    ({"repetition_penalty": 0.0}, lz.Code.VALUE_OUT_OF_RANGE, "repetition_penalty"),
    ({"presence_penalty": 0.5}, lz.Code.MISSING_METADATA, "history"),
    ({"frequency_penalty_rows": torch.ones(2)}, lz.Code.MISSING_METADATA, "history"),
    ({"top_p_rows": torch.ones(3)}, lz.Code.DIM_MISMATCH, "top_p_rows"),
    ({"uniforms": torch.ones(2, 1)}, lz.Code.WRONG_NDIM, "uniforms"),
    ({"top_k_rows": torch.ones(2)}, lz.Code.DTYPE_UNSUPPORTED, "top_k_rows"),
    ({"history": torch.ones(2, 3)}, lz.Code.DTYPE_UNSUPPORTED, "history"),
    ({"token_counts": torch.ones(2, 7)}, lz.Code.DIM_MISMATCH, "token_counts"),
    ({"from_probs": True, "temperature": 0.5}, lz.Code.VALUE_OUT_OF_RANGE, "temperature"),
    ({"from_probs": True, "history": torch.zeros(2, 1, dtype=torch.int64)},
     lz.Code.FEATURE_UNSUPPORTED, "history"),
), ids=str)
def test_a_mistake_names_its_argument(options: dict[str, Any], code: lz.Code, word: str) -> None:
    logits = torch.zeros(2, 8)
    # a remembered good call must not let the bad one through
    lz.sample(logits)
    with pytest.raises(lz.errors.InvalidCall) as caught:
        lz.sample(logits, **options)
    assert code in caught.value.codes and word in str(caught.value)


def test_wrong_logits_are_refused() -> None:
    integers = torch.zeros(2, 8, dtype=torch.int64)
    for logits, code in ((torch.zeros(8), lz.Code.WRONG_NDIM),
                         (torch.zeros(1, 2, 8), lz.Code.WRONG_NDIM),
                         (integers, lz.Code.DTYPE_UNSUPPORTED),
                         (torch.zeros(2, 0), lz.Code.EMPTY_INPUT)):
        with pytest.raises(lz.errors.InvalidCall) as caught:
            lz.sample(logits)
        assert code in caught.value.codes
