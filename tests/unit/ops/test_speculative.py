"""Speculative decoding: what comes out is distributed as the target's, whatever the draft."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_sampling import chi_square_fits
from torch import Tensor

import layerzero as lz
from layerzero.models import speculative
from layerzero.ops.speculative_verify import OP as CHAIN
from layerzero.ops.speculative_verify_tree import OP as TREE
from layerzero.verify.kernel.contract import call, case_values, upcast
from layerzero.world import snapshot as world

RUNS = 120_000
VOCAB = 5
START = 2
# Markov chains: row a is the distribution of the token after a. The target never says 4 after 0,
# the draft often does.
TARGET = torch.tensor([[0.40, 0.30, 0.20, 0.10, 0.00], [0.05, 0.05, 0.10, 0.70, 0.10],
                       [0.30, 0.10, 0.15, 0.05, 0.40],
                       [0.25, 0.25, 0.25, 0.00, 0.25], [0.01, 0.01, 0.01, 0.01, 0.96]])
DRAFT = torch.tensor([[0.10, 0.20, 0.20, 0.10, 0.40], [0.20, 0.20, 0.20, 0.20, 0.20],
                      [0.05, 0.30, 0.15, 0.30, 0.20],
                      [0.60, 0.10, 0.10, 0.10, 0.10], [0.50, 0.00, 0.00, 0.00, 0.50]])


def kernels(op: Any) -> list[str]:
    return [k.id for k in world.current().catalog.kernels_of(op.name)]


def drawn(probs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def drafted_chain(length: int, runs: int = RUNS, draft: Tensor = DRAFT,
                  seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draft tokens, the draft's distributions and the target's, each row on its own path from
    START."""
    generator = torch.Generator().manual_seed(seed)
    at, tokens, qs, ps = torch.full((runs,), START), [], [], []
    for _ in range(length):
        qs.append(draft[at])
        ps.append(TARGET[at])
        at = drawn(qs[-1], generator)
        tokens.append(at)
    ps.append(TARGET[at])
    return torch.stack(tokens, 1), torch.stack(qs, 1), torch.stack(ps, 1)


def follows_the_target(sequences: Tensor, lengths: Tensor) -> bool:
    """Each token, given the one before it, has the target's distribution; wherever a sequence goes
    that far."""
    before = torch.full((len(sequences),), START)
    for i in range(sequences.shape[1]):
        for a in range(VOCAB):
            rows = (before == a) & (lengths > i)
            if int(rows.sum()) > 500 and not chi_square_fits(
                    torch.bincount(sequences[rows, i], minlength=VOCAB), TARGET[a].tolist()):
                return False
        before = sequences[:, i]
    return True


def sequence(tokens: Tensor, counts: Tensor, following: Tensor) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, 1), value=-1).scatter(1, counts[:, None],
                                                                     following[:, None])


# A chain.

@pytest.mark.parametrize("kernel", kernels(CHAIN))
def test_a_chain_comes_out_as_the_target_speaks(kernel: str) -> None:
    tokens, q, p = drafted_chain(3)
    accepted, counts, following = lz.speculative_verify(tokens, q, p, seed=1, backend=kernel)
    assert follows_the_target(sequence(accepted, counts, following), counts + 1)
    assert set(counts.tolist()) == {0, 1, 2, 3}
    # the chance that the first is accepted
    overlap = float(torch.minimum(TARGET[START], DRAFT[START]).sum())
    assert abs(float((counts > 0).double().mean()) - overlap) < 5 * (overlap * (1 - overlap)
                                                                     / RUNS) ** 0.5


def test_the_check_finds_a_verifier_that_keeps_too_much() -> None:
    tokens, q, p = drafted_chain(2)
    assert not follows_the_target(tokens, torch.full((RUNS,), 2))
    accepted, counts, _ = lz.speculative_verify(tokens, q, p, seed=1)
    redrawn = drawn(p.gather(1, counts[:, None, None].expand(-1, -1, VOCAB))[:, 0],
                    torch.Generator().manual_seed(0))
    # p in place of the residual
    assert not follows_the_target(sequence(accepted, counts, redrawn), counts + 1)


@pytest.mark.parametrize("kernel", kernels(CHAIN))
def test_a_certain_draft_comes_out_as_the_target_speaks(kernel: str) -> None:
    tokens = torch.tensor([[0, 3]]).expand(RUNS, -1)
    p = TARGET[torch.tensor([START, 0, 3])].expand(RUNS, -1, -1)
    accepted, counts, following = lz.speculative_verify(tokens, None, p, seed=2, backend=kernel)
    assert follows_the_target(sequence(accepted, counts, following), counts + 1)


@pytest.mark.parametrize("kernel", kernels(CHAIN))
def test_a_draft_that_is_the_target_is_accepted_whole(kernel: str) -> None:
    tokens, q, p = drafted_chain(4, draft=TARGET)
    accepted, counts, following = lz.speculative_verify(tokens, q, p, seed=3, backend=kernel)
    assert torch.equal(accepted, tokens) and bool((counts == 4).all())
    assert follows_the_target(sequence(accepted, counts, following), counts + 1)


@pytest.mark.parametrize("kernel", kernels(CHAIN))
def test_a_draft_the_target_never_says_is_rejected_whole(kernel: str) -> None:
    tokens = torch.full((RUNS, 2), 4)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).expand(RUNS, 3, -1)
    q = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]).expand(RUNS, 2, -1)
    accepted, counts, following = lz.speculative_verify(tokens, q, p, seed=4, backend=kernel)
    assert not bool(counts.any()) and bool((accepted == -1).all())
    assert chi_square_fits(torch.bincount(following, minlength=VOCAB), p[0, 0].tolist())


def test_rows_of_a_batch_accept_different_lengths() -> None:
    p = torch.eye(4)[torch.tensor([[0, 1, 2, 3]] * 4)]
    tokens = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 2, 2], [1, 1, 2]])
    verified = speculative.verify(tokens, None, p, seed=0)
    assert verified.counts.tolist() == [3, 2, 1, 0]
    assert verified.tokens.tolist() == [[0, 1, 2], [0, 1, -1], [0, -1, -1], [-1, -1, -1]]
    assert verified.next_token.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("kernel", kernels(CHAIN))
def test_a_padded_draft_ends_where_the_padding_begins(kernel: str) -> None:
    tokens, q, p = drafted_chain(3, draft=TARGET)
    tokens[:, 1], tokens[::2, 0] = -1, VOCAB
    accepted, counts, following = lz.speculative_verify(tokens, q, p, seed=5, backend=kernel)
    assert (bool((counts[::2] == 0).all()) and bool((counts[1::2] == 1).all())
            and bool((accepted[:, 1:] == -1).all()))
    assert chi_square_fits(torch.bincount(following[::2], minlength=VOCAB), TARGET[START].tolist())
    assert follows_the_target(sequence(accepted, counts, following)[1::2], counts[1::2] + 1)


def test_no_distribution_gives_minus_one_and_never_a_crash() -> None:
    tokens = torch.tensor([[0, 1], [0, 1]])
    p = torch.zeros(2, 3, 4)
    p[1, 0, 0] = torch.nan
    for q in (None, torch.full((2, 2, 4), 0.25)):
        for kernel in kernels(CHAIN):
            accepted, counts, following = lz.speculative_verify(tokens, q, p, seed=0,
                                                                backend=kernel)
            assert (following.tolist() == [-1, -1] and counts.tolist() == [0, 0]
                    and bool((accepted == -1).all()))


@pytest.mark.parametrize("op", (CHAIN, TREE), ids=lambda op: op.name)
def test_every_kernel_gives_the_same_in_every_dtype(op: Any) -> None:
    for dtype, case in itertools.product(("float32", "float16", "bfloat16", "float64"), op.cases):
        values = case_values(op, case, dtype, seed=2)
        truth, meta = op.reference(**upcast(values)), op.meta(**values)
        before = {n: v.clone() for n, v in values.items() if isinstance(v, Tensor)}
        for kernel in world.current().catalog.kernels_of(op.name):
            result = call(kernel, values)
            assert all(torch.equal(a, b) for a, b in zip(result, truth)), (kernel.id, dtype, case)
            assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype)
                                                            for t in meta], (kernel.id, dtype, case)
        assert all(torch.equal(values[n].nan_to_num(), v.nan_to_num()) for n, v in before.items())


def test_a_seed_repeats_and_a_batch_may_be_split() -> None:
    tokens, q, p = drafted_chain(3, runs=64)
    whole = speculative.verify(tokens, q, p, seed=9)
    again = speculative.verify(tokens, q, p, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(whole, again))
    assert not torch.equal(whole.counts, speculative.verify(tokens, q, p, seed=10).counts)
    seeds = torch.arange(64)
    parts = [speculative.verify(*(t[i:i + 5] for t in (tokens, q, p)), seed_rows=seeds[i:i + 5])
             for i in range(0, 64, 5)]
    whole = speculative.verify(tokens, q, p, seed_rows=seeds)
    assert all(torch.equal(torch.cat(pieces), w) for pieces, w in zip(zip(*parts), whole))
    alone = speculative.verify(tokens[7:8], q[7:8], p[7:8], seed_rows=seeds[7:8])
    assert torch.equal(alone.tokens, speculative.verify(tokens, q, p, seed_rows=seeds).tokens[7:8])


# A tree.

def drafted_tree(parents: tuple[int, ...], without_replacement: bool = False, certain: bool = False,
                 runs: int = RUNS) -> tuple[Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.zeros((runs, len(parents)), dtype=torch.int64)
    said = torch.full((runs, len(parents) + 1), START)
    for i, parent in enumerate(parents):
        # so that there are enough to draw without replacement
        q = DRAFT[said[:, parent + 1]].clone() + 0.01
        siblings = [j for j in range(i) if parents[j] == parent]
        if certain:
            tokens[:, i] = q.argsort(-1, descending=True)[:, len(siblings)]
        else:
            for j in siblings if without_replacement else ():
                q.scatter_(1, tokens[:, j:j + 1], 0.0)
            tokens[:, i] = drawn(q, generator)
        said[:, i + 1] = tokens[:, i]
    q = DRAFT[said] + 0.01
    return tokens, None if certain else q / q.sum(-1, keepdim=True), TARGET[said]


SHAPES = {"pairs": (-1, -1, 0, 0, 1, 1), "fan": (-1, -1, -1), "chain": (-1, 0),
          "lopsided": (-1, 0, 0, -1, 1, 3, -1)}


@pytest.mark.parametrize("how", ("independent", "without_replacement", "certain"))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_comes_out_as_the_target_speaks(shape: str, how: str) -> None:
    parents = torch.tensor(SHAPES[shape])
    without = how == "without_replacement"
    tokens, q, p = drafted_tree(SHAPES[shape], without, how == "certain")
    verified = speculative.verify_tree(tokens, parents, q, p, seed=6, without_replacement=without)
    assert follows_the_target(sequence(verified.tokens, verified.counts, verified.next_token),
                              verified.counts + 1)
    assert len(verified.counts.unique()) > 1
    # the kernels that walk row by row are asked for fewer
    some = 300
    values = {p.name: p.default for p in TREE.params} | {
        "draft_tokens": tokens[:some], "parents": parents.expand(some, -1),
        "target_probs": p[:some], "draft_probs": None if q is None else q[:some],
        "without_replacement": without, "seed": 6}
    for kernel in world.current().catalog.kernels_of(TREE.name):
        assert all(torch.equal(a, b[:some]) for a,
                   b in zip(call(kernel, values), verified)), kernel.id


def test_the_wrong_rule_for_siblings_would_show() -> None:
    """Children drawn without replacement, verified as if drawn independently: the check must see
    it."""
    parents = SHAPES["fan"]
    tokens, q, p = drafted_tree(parents, without_replacement=True)
    verified = speculative.verify_tree(tokens, torch.tensor(parents), q, p, seed=6,
                                       without_replacement=False)
    assert not follows_the_target(sequence(verified.tokens, verified.counts, verified.next_token),
                                  verified.counts + 1)


def test_siblings_raise_the_acceptance() -> None:
    one, qs, ps = drafted_tree((-1,), runs=20_000)
    three, q3, p3 = drafted_tree((-1, -1, -1), runs=20_000)
    first = speculative.verify_tree(one, torch.tensor([-1]), qs, ps, seed=1).counts.double().mean()
    more = speculative.verify_tree(three, torch.tensor([-1, -1, -1]), q3, p3,
                                   seed=1).counts.double().mean()
    assert float(more) > float(first) + 0.1


@pytest.mark.parametrize("certain", (False, True))
def test_a_tree_without_branches_is_a_chain(certain: bool) -> None:
    tokens, q, p = drafted_chain(4, runs=500)
    uniforms = torch.rand((500, 5), generator=torch.Generator().manual_seed(0))
    chain = speculative.verify(tokens, None if certain else q, p, uniforms)
    # the leaf's own row is not read
    wide = torch.cat([q, q[:, :1]], 1)
    tree = speculative.verify_tree(tokens, torch.arange(4) - 1, None if certain else wide, p,
                                   uniforms)
    assert torch.equal(tree.tokens, chain.tokens) and torch.equal(tree.counts, chain.counts)
    assert torch.equal(tree.next_token, chain.next_token)
    assert torch.equal(tree.nodes, torch.where(chain.tokens >= 0, torch.arange(4), -1))


def test_a_greedy_target_walks_its_own_path() -> None:
    parents = torch.tensor([-1, -1, 0, 1, 1, 4])
    tokens = torch.tensor([[3, 1, 0, 2, 0, 4]])
    # row 0 is the root's, row i + 1 node i's
    said = torch.eye(VOCAB)[torch.tensor([[1, 2, 0, 2, 2, 4, 3]])]
    for q in (None, torch.full((1, 7, VOCAB), 1 / VOCAB)):
        verified = speculative.verify_tree(tokens, parents, q, said, seed=0)
        assert (verified.nodes.tolist() == [[1, 4, 5, -1, -1, -1]]
                and verified.tokens.tolist() == [[1, 0, 4, -1, -1, -1]])
        assert verified.counts.tolist() == [3] and verified.next_token.tolist() == [3]


def test_each_row_may_have_its_own_tree() -> None:
    parents = torch.tensor([[-1, 0, 1], [-1, -1, -1]])
    tokens = torch.tensor([[1, 2, 3], [3, 4, 1]])
    p = torch.eye(VOCAB)[torch.tensor([[1, 2, 3, 0], [1, 0, 0, 4]])]
    verified = speculative.verify_tree(tokens, parents, None, p, seed=0)
    assert verified.nodes.tolist() == [[0, 1, 2], [2, -1, -1]]
    assert verified.tokens.tolist() == [[1, 2, 3], [1, -1, -1]]
    assert verified.counts.tolist() == [3, 1] and verified.next_token.tolist() == [0, 4]


# Masks.

def test_a_node_sees_the_context_its_ancestors_and_itself() -> None:
    parents = torch.tensor([-1, 0, 0, 1, -1])
    mask = speculative.tree_attention_mask(parents, 2)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0],
                                   [1, 1, 1, 0, 1, 0, 0],
                                   [1, 1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 1]]
    assert speculative.tree_positions(parents, 2).tolist() == [2, 3, 3, 4, 2]
    both = speculative.tree_attention_mask(torch.stack([parents, torch.arange(5) - 1]), 2)
    assert both.shape == (2, 1, 5, 7) and torch.equal(both[0, 0], mask)
    assert torch.equal(both[1, 0], torch.ones(5, 7, dtype=torch.bool).tril(2))
    assert speculative.tree_attention_mask(torch.empty(0, dtype=torch.int64), 3).shape == (0, 3)


def test_attention_over_a_tree_is_attention_over_each_of_its_paths() -> None:
    generator = torch.Generator().manual_seed(0)
    parents, context = torch.tensor([-1, 0, 0, 1, 2, 2]), 7
    q = torch.randn((1, 2, 6, 16), generator=generator)
    k, v = (torch.randn((1, 2, context + 6, 16), generator=generator) for _ in range(2))
    out = lz.attention(q, k, v, attn_mask=speculative.tree_attention_mask(parents, context))
    for node, path in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5])):
        keys = [*range(context), *(context + n for n in path)]
        alone = lz.attention(q[:, :, node:node + 1], k[:, :, keys], v[:, :, keys])
        torch.testing.assert_close(out[:, :, node:node + 1], alone, rtol=1e-5, atol=1e-5)


# Two models.

class Markov:
    """A model with a state of its own: what it has seen.

    It writes into what it is given, as a careless one would.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.calls = 0
        self.seen: list[int] = []

    def draft(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.target(tokens, lengths, 1)[:, 0]

    def target(self, tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
        self.calls += 1
        self.seen.append(int(lengths.max()))
        places = lengths[:, None] - count + torch.arange(count)
        logits = self.table[tokens.gather(1, places)].log()
        tokens.fill_(0)
        return logits


def test_generation_is_distributed_as_the_target() -> None:
    prompt = torch.full((RUNS, 1), START)
    out = speculative.generate(Markov(DRAFT).draft, Markov(TARGET).target, prompt, 3, draft_len=2,
                               seed=7)
    assert out.tokens.shape == (RUNS, 4) and bool((out.lengths == 4).all())
    paths = list(itertools.product(range(VOCAB), repeat=3))
    probs = [float(TARGET[START, a] * TARGET[a, b] * TARGET[b, c]) for a, b, c in paths]
    cells = (out.tokens[:, 1:] * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1)
    assert chi_square_fits(torch.bincount(cells, minlength=VOCAB**3), probs)
    assert 0 < out.accepted < out.drafted


@pytest.mark.parametrize("draft", (DRAFT, TARGET, TARGET.flip(0)), ids=("other", "same", "wrong"))
def test_greedy_generation_is_the_targets_own(draft: Tensor) -> None:
    prompt = torch.tensor([[START, 0], [1, 3], [4, 1]])
    want, at = [], prompt[:, -1]
    for _ in range(9):
        at = TARGET[at].argmax(-1)
        want.append(at)
    out = speculative.generate(Markov(draft).draft, Markov(TARGET).target, prompt, 9,
                               temperature=0.0)
    assert torch.equal(out.tokens, torch.cat([prompt, torch.stack(want, 1)], 1))


def test_a_perfect_draft_saves_calls_of_the_target() -> None:
    draft, target = Markov(TARGET), Markov(TARGET)
    out = speculative.generate(draft.draft, target.target, torch.full((4, 1), START), 12,
                               draft_len=3, seed=1)
    assert out.rounds == target.calls == 3 and out.accepted == out.drafted == 4 * 9
    alone = speculative.generate(draft.draft, target.target, torch.full((4, 1), START), 5,
                                 draft_len=0, seed=1)
    assert alone.rounds == 5 and alone.drafted == 0 and bool((alone.lengths == 6).all())


def test_generation_stops_at_the_stop_token_and_at_the_limit() -> None:
    prompt = torch.full((200, 1), START)
    out = speculative.generate(Markov(DRAFT).draft, Markov(TARGET).target, prompt, 10, seed=3,
                               stop_token=3)
    new = out.tokens[:, 1:]
    places = torch.arange(new.shape[1])
    assert bool((new[places >= (out.lengths - 1)[:, None]] == -1).all())
    inside = places < (out.lengths - 1)[:, None]
    assert bool((new[inside] >= 0).all())
    for row, length in zip(new.tolist(), (out.lengths - 1).tolist()):
        assert 3 not in row[:length - 1] and (row[length - 1] == 3 or length == 10)
    assert len(out.lengths.unique()) > 4
    nothing = speculative.generate(Markov(DRAFT).draft, Markov(TARGET).target, prompt, 0, seed=3)
    assert torch.equal(nothing.tokens, prompt) and nothing.rounds == 0


def test_prompts_of_different_lengths() -> None:
    prompt = torch.tensor([[START, 0, 1], [1, -1, -1]])
    out = speculative.generate(Markov(DRAFT).draft, Markov(TARGET).target, prompt, 4,
                               temperature=0.0,
                               lengths=torch.tensor([3, 1]))
    rows = [[START, 0, 1], [1]]
    for row in rows:
        for _ in range(4):
            row.append(int(TARGET[row[-1]].argmax()))
    assert out.lengths.tolist() == [7, 5]
    assert out.tokens.tolist() == [rows[0], [*rows[1], -1, -1]]


def test_generation_repeats_under_a_seed() -> None:
    def run(seed: int) -> Tensor:
        return speculative.generate(Markov(DRAFT).draft, Markov(TARGET).target,
                                    torch.full((50, 1), START), 8, seed=seed, top_p=0.95,
                                    temperature=0.9).tokens

    assert torch.equal(run(5), run(5))
    assert run(5).shape != run(6).shape or not torch.equal(run(5), run(6))


def test_the_choice_of_kernels_in_one_model_does_not_reach_the_other() -> None:
    x = torch.randn(2, 4, 16)
    chosen: dict[str, set[str]] = {"draft": set(), "target": set()}

    def draft(tokens: Tensor, lengths: Tensor) -> Tensor:
        with lz.prefer("reference.rms_norm"):
            chosen["draft"].add(str(lz.which("rms_norm", x)))
            return Markov(DRAFT).draft(tokens, lengths)

    def target(tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
        chosen["target"].add(str(lz.which("rms_norm", x)))
        return Markov(TARGET).target(tokens, lengths, count)

    plain = lz.which("rms_norm", x)
    speculative.generate(draft, target, torch.full((2, 1), START), 6, seed=0)
    assert (chosen == {"draft": {"reference.rms_norm"}, "target": {plain}}
            and plain != "reference.rms_norm")


# Mistakes.

@pytest.mark.parametrize(("change", "code", "word"), (
    ({"target_probs": torch.ones(2, 3, 5)}, lz.Code.DIM_MISMATCH,
     "one position more than there are draft tokens"),
    ({"target_probs": torch.ones(2, 4, 6)}, lz.Code.DIM_MISMATCH, "vocab"),
    ({"target_probs": torch.ones(3, 4, 5)}, lz.Code.DIM_MISMATCH, "batch"),
    ({"target_probs": torch.ones(4, 5)}, lz.Code.WRONG_NDIM, "target_probs"),
    ({"draft_probs": torch.ones(2, 4, 5)}, lz.Code.DIM_MISMATCH, "draft_probs"),
    ({"draft_tokens": torch.ones(2, 3)}, lz.Code.DTYPE_UNSUPPORTED, "draft_tokens"),
    ({"draft_tokens": torch.ones(3, dtype=torch.int64)}, lz.Code.WRONG_NDIM, "draft_tokens"),
    ({"draft_tokens": None}, lz.Code.WRONG_TYPE, "draft_tokens"),
    ({"uniforms": torch.ones(2, 3)}, lz.Code.DIM_MISMATCH, "uniforms"),
    ({"seed": 1.5}, lz.Code.WRONG_TYPE, "seed"),
), ids=str)
def test_a_chain_that_does_not_fit_is_refused(change: dict[str, Any], code: lz.Code,
                                              word: str) -> None:
    arguments: dict[str, Any] = {"draft_tokens": torch.ones(2, 3, dtype=torch.int64),
                                 "draft_probs": torch.ones(2, 3, 5) / 5,
                                 "target_probs": torch.ones(2, 4, 5) / 5}
    speculative.verify(**arguments)
    with pytest.raises(lz.errors.InvalidCall) as caught:
        speculative.verify(**{**arguments, **change})
    assert code in caught.value.codes and word in str(caught.value)


@pytest.mark.parametrize(("change", "code", "word"), (
    ({"parents": torch.tensor([-1, 0])}, lz.Code.DIM_MISMATCH, "parents"),
    ({"parents": torch.tensor([[-1, 0, 0]])}, lz.Code.DIM_MISMATCH, "parents"),
    ({"parents": torch.tensor([-1.0, 0.0, 0.0])}, lz.Code.DTYPE_UNSUPPORTED, "parents"),
    ({"parents": None}, lz.Code.WRONG_TYPE, "parents"),
    ({"draft_probs": torch.ones(2, 3, 5)}, lz.Code.DIM_MISMATCH, "draft_probs"),
    ({"target_probs": torch.ones(2, 3, 5), "draft_probs": None}, lz.Code.DIM_MISMATCH,
     "one position more than there are draft tokens"),
), ids=str)
def test_a_tree_that_does_not_fit_is_refused(change: dict[str, Any], code: lz.Code,
                                             word: str) -> None:
    arguments: dict[str, Any] = {"draft_tokens": torch.ones(2, 3, dtype=torch.int64),
                                 "parents": torch.tensor([-1, 0, 0]),
                                 "draft_probs": torch.ones(2, 4, 5) / 5,
                                 "target_probs": torch.ones(2, 4, 5) / 5}
    speculative.verify_tree(**arguments)
    with pytest.raises(lz.errors.InvalidCall) as caught:
        speculative.verify_tree(**{**arguments, **change})
    assert code in caught.value.codes and word in str(caught.value)


@pytest.mark.parametrize("make", (speculative.tree_attention_mask, speculative.tree_positions))
@pytest.mark.parametrize(("parents", "word"), (
    (torch.tensor([-1, 1]), "parents[1]"), (torch.tensor([-1, -2]), "parents[1]"),
    (torch.tensor([[-1, 0], [0, -1]]), "parents[1, 0]"), (torch.tensor(-1), "dimensions"),
    (torch.tensor([0.5]), "integer"), ([-1, 0], "Tensor")), ids=str)
def test_parents_that_make_no_tree_are_refused(make: Any, parents: Any, word: str) -> None:
    with pytest.raises(lz.errors.InvalidCall, match=r"speculative\.tree_") as caught:
        make(parents)
    assert word in str(caught.value)


def test_models_that_do_not_fit_are_refused() -> None:
    prompt, draft, target = torch.full((2, 1), START), Markov(DRAFT), Markov(TARGET)
    with pytest.raises(lz.errors.InvalidCall, match="draft_step"):
        speculative.generate(lambda t, n: torch.zeros(2, 1, VOCAB), target.target, prompt, 4)
    with pytest.raises(lz.errors.InvalidCall, match="target_step"):
        speculative.generate(draft.draft, lambda t, n, c: torch.zeros(2, c - 1, VOCAB), prompt, 4)
    with pytest.raises(lz.errors.InvalidCall, match="prompt"):
        speculative.generate(draft.draft, target.target, prompt[0], 4)
    with pytest.raises(lz.errors.InvalidCall, match="prompt"):
        speculative.generate(draft.draft, target.target, prompt[:, :0], 4)
    with pytest.raises(lz.errors.InvalidCall, match="draft_len"):
        speculative.generate(draft.draft, target.target, prompt, 4, draft_len=-1)
    with pytest.raises(lz.errors.InvalidCall, match="lengths"):
        speculative.generate(draft.draft, target.target, prompt, 4,
                             lengths=torch.ones(3, dtype=torch.int64))
