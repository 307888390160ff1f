"""Tree speculation: the path through a tree of drafted tokens that the target model accepts, and
the token after it.

Multi-round rejection sampling, as in SpecInfer: at a node with the target's distribution p and
children drafted from q, one child after another, in the order of their index, is accepted with
probability min(1, p(x) / q(x)). Each rejection replaces p by max(p - q, 0), normalised, for the
next child; when all are rejected the token is drawn from the residual, and the path ends. The
result is distributed as the target: lz.speculative_verify shows that accepting x ~ q, or else
drawing from the residual p', is a draw from p. Here the draw from p' is itself made so, with the
next child, and by induction over the children, last to first, it is one; by induction over the
depth the whole path is.

That needs each child to be drawn from q independently of its siblings, or `without_replacement`:
then each rejection removes the token from q, which is normalised again. Without draft_probs the
children are deterministic (the draft's top tokens, say): a child is accepted with probability p(x),
and its rejection removes x from p.

- Node i has the parent parents[i] < i; -1 is the root, the last accepted token. A node whose parent
  does not come before it, or whose token is outside the vocabulary, is never accepted, so trees of
  one batch may be padded.
- Row 0 of target_probs and draft_probs (batch, nodes + 1, vocab) belongs to the root, row i + 1
  to node i: the distribution of the token after it. Rows of leaves in draft_probs are not read.
- Random numbers as in lz.sample, nodes + 1 per row: one per node, and the last for the draw.

Returns the accepted tokens (batch, nodes) padded with -1, their nodes likewise, their number, and
the token after them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake
from ..spec.op import SEED, Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import Wording, at_least, dtypes, equals, one_of
from .formulas.common import FLOATS
from .formulas.mistakes import replace_argument
from .formulas.sampling import (
    clean_probs,
    draw,
    equal_probs,
    normalize,
    one_hot,
    random_arguments,
    random_numbers,
    residual_weights,
    with_equal_rows,
)

INTEGERS = ("int32", "int64")


def reference(
    draft_tokens: Tensor, parents: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    uniforms: Tensor | None = None, *, without_replacement: bool = False, seed: int | None = None,
    seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (accepted tokens, their nodes, their number, the token after them) for each row."""
    batch, count = draft_tokens.shape
    vocab = target_probs.shape[-1]
    uniform = random_numbers(batch, count + 1, draft_tokens.device, uniforms, seed, seed_rows,
                             offset, generator)
    tokens = torch.full_like(draft_tokens, -1, dtype=torch.int64)
    nodes = tokens.clone()
    number = torch.zeros((batch, 1), dtype=torch.int64, device=draft_tokens.device)
    last_node = torch.full_like(number, -1)    # the last accepted node
    p = normalize(clean_probs(target_probs[:, 0], uniform.dtype))
    q = None if draft_probs is None else normalize(clean_probs(draft_probs[:, 0], uniform.dtype))
    for i in range(count):
        token = draft_tokens[:, i:i + 1].to(torch.int64)
        is_child = (parents[:, i:i + 1] == last_node) & (token >= 0) & (token < vocab)
        column = torch.where(is_child, token, 0)
        drafted = one_hot(column, p) if q is None else q
        accept = is_child & (uniform[:, i:i + 1] * drafted.gather(1, column) < p.gather(1, column))
        reject = is_child & ~accept
        residual = normalize(residual_weights(p, drafted))
        child_target = normalize(clean_probs(target_probs[:, i + 1], uniform.dtype))
        p = torch.where(accept, child_target, torch.where(reject, residual, p))
        if draft_probs is not None and q is not None:
            remaining = normalize(q.scatter(1, column, 0.0)) if without_replacement else q
            q = torch.where(accept, normalize(clean_probs(draft_probs[:, i + 1], uniform.dtype)),
                            torch.where(reject, remaining, q))
        # an extra column takes rejected tokens
        slot = torch.where(accept, number, count)
        tokens = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, slot, token)[:, :count]
        nodes = torch.nn.functional.pad(nodes, (0, 1)).scatter(1, slot, i)[:, :count]
        number = number + accept.to(torch.int64)
        last_node = torch.where(accept, i, last_node)
    following = torch.where(p.sum(-1, keepdim=True) > 0, draw(p, uniform[:, -1:]), -1)
    return tokens.contiguous(), nodes.contiguous(), number[:, 0], following[:, 0]


def meta(draft_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = torch.empty_like(draft_tokens, dtype=torch.int64,
                              memory_format=torch.contiguous_format)
    per_row = tokens.new_empty(len(tokens))
    return tokens, tokens.new_empty(tokens.shape), per_row, per_row.new_empty(per_row.shape)


TREES: dict[str, tuple[int, ...]] = {
    "two_by_two": (-1, -1, 0, 0, 1, 1), "chain": (-1, 0, 1, 2), "fan": (-1, -1, -1, -1, -1),
    "none": (), "one": (-1,), "mixed": (-1, 0, -1, 0, 1, 1, 2, 4, 4, 7),
    "disordered": (-1, 3, 0, -1, 2, 9),
    "long": tuple(range(-1, 11)),
    "forty": tuple(max((i - 2) // 2, -1) for i in range(40)),      # two children each
    # more than a word of bits has, and a path of many; then as many children of the first ones
    "ninety": (*range(-1, 69), *range(20)),
}


def inputs(
    batch: int = 6, tree: str = "two_by_two", vocab: int = 13, alike: float = 0.7,
    certain: bool = False, without_replacement: bool = False, random: str = "uniforms",
    special: str = "", own: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """`own`: each row after the first has a tree of its own, with as many nodes. "mixed": the
    target has 16 bits, the draft has more and is closer to it than they tell; "mixed draft": the
    draft has 16."""
    gen = torch.Generator("cpu").manual_seed(seed)
    count = len(TREES[tree])
    parents = torch.tensor(TREES[tree], dtype=torch.int64).expand(batch, -1)
    if own:
        drawn = torch.rand((batch, count), generator=gen) * (torch.arange(count) + 1)
        parents = torch.cat((parents[:1], drawn.long()[1:] - 1))
    draft = torch.randn((batch, count + 1, vocab), generator=gen)
    target = (alike * draft + (1 - alike) * torch.randn(draft.shape, generator=gen) * 2).softmax(-1)
    draft = draft.softmax(-1)
    if vocab > 1 << 17:                        # rows that draw a token beyond it
        target[1::2, :, :1 << 17] *= 1e-6
    tokens = torch.zeros((batch, count), dtype=torch.int64)
    for i in range(count):
        parent = parents[:, i:i + 1]
        all_tokens = draft[torch.arange(batch), torch.where(parent < i, parent + 1, 0)[:, 0]]
        q = all_tokens
        if without_replacement:
            # an extra column takes the tokens of other nodes' children
            drafted = torch.where(parents[:, :i] == parent, tokens[:, :i], vocab)
            q = torch.nn.functional.pad(q, (0, 1)).scatter(1, drafted, 0.0)[:, :vocab]
        # a small vocabulary may have no other token left
        q = torch.where(q.sum(-1, keepdim=True) > 0, q, all_tokens)
        tokens[:, i] = torch.multinomial(q, 1, generator=gen)[:, 0]
    if special == "padded":                    # a draft with a larger vocabulary, too
        tokens[::2, -2:] = -1
        tokens[1:2, :1] = vocab
    elif special == "strangers":               # parents that are no node before, and not the root
        parents = parents.clone()
        parents[::2, -1:], parents[1::2, -2:-1] = -2, -100
        parents[1::3, -1:] = count + 5
    elif special == "masked":
        target[::2] = 0.0
    elif special == "absent":                  # the drafted tokens, from both distributions
        for probs in (target, draft):
            probs[::2].scatter_(2, tokens[::2, None].expand(-1, count + 1, -1), 0.0)
    elif special == "equal":                   # p / q and all sums are exact
        draft, target = (equal_probs(draft.shape, n) for n in ((1, 1), (2, 3)))
        tokens = tokens % 2
    elif special == "greedy":
        target = torch.nn.functional.one_hot(target.argmax(-1), vocab).float()
    arguments: dict[str, Any] = {
        "draft_tokens": tokens.to(device), "parents": parents.to(device),
        "draft_probs": None if certain else draft.to(device=device, dtype=dtype),
        "target_probs": target.to(device=device, dtype=dtype),
        "without_replacement": without_replacement}
    if special.startswith("mixed"):
        narrow = target.to(torch.bfloat16)
        wide = narrow.float() * (1 + torch.randn(target.shape, generator=gen) / 150)
        target, draft = (narrow, wide) if special == "mixed" else (wide, narrow)
        arguments |= {"target_probs": target.to(device), "draft_probs": draft.to(device)}
    if random == "quarters":                   # and sixteenths for the token that is drawn
        quarters = torch.randint(1, 4, (batch, count + 1), generator=gen) / 4
        quarters[:, -1] = (torch.randint(8, (batch,), generator=gen) * 2 + 1) / 16
        arguments["uniforms"] = quarters.to(device)
    else:
        arguments |= random_arguments(random, (batch, count + 1), gen, device, seed)
    return with_equal_rows(arguments)


CASES: tuple[dict[str, Any], ...] = (
    {}, {"batch": 1}, {"batch": 0}, {"tree": "none"}, {"tree": "one"},
    {"tree": "long", "alike": 1.0}, {"tree": "fan"}, {"tree": "fan", "without_replacement": True},
    {"tree": "fan", "without_replacement": True, "alike": 0.2, "batch": 64, "vocab": 9},
    *({"special": special, "batch": 400, "alike": 1.0} for special in ("mixed", "mixed draft")),
    {"tree": "mixed", "alike": 0.95, "batch": 16}, {"tree": "disordered"},
    {"certain": True, "batch": 16}, {"tree": "mixed", "certain": True, "vocab": 5, "batch": 16},
    {"special": "padded"}, {"vocab": 5003, "batch": 0},
    {"special": "padded", "tree": "fan", "batch": 8, "alike": 0.2, "vocab": 4099},
    {"special": "strangers", "batch": 16, "alike": 0.95},
    {"special": "strangers", "tree": "fan", "batch": 16, "own": True}, {"special": "masked"},
    {"special": "absent", "vocab": 33, "random": "zeros"}, {"special": "absent", "batch": 16},
    {"special": "greedy", "alike": 0.9},
    {"special": "greedy", "alike": 0.9, "batch": 24, "vocab": 4099},
    {"special": "equal", "random": "quarters", "batch": 16},
    {"special": "equal", "random": "quarters", "tree": "fan", "certain": True, "batch": 16},
    {"tree": "ninety", "alike": 1.0, "random": "wide", "batch": 3},
    {"random": "seed"}, {"vocab": 5003, "batch": 2}, {"random": "seed_rows", "batch": 9},
    {"random": "short_seed_rows"},
    {"without_replacement": True, "alike": 0.9, "batch": 16},
    # siblings that were rejected before a node with children was accepted, in many rows
    {"without_replacement": True, "alike": 0.6, "batch": 300, "vocab": 7},
    {"tree": "forty", "alike": 0.95}, {"own": True, "batch": 9},
    {"own": True, "tree": "mixed", "alike": 0.95, "without_replacement": True},
    {"own": True, "tree": "chain", "certain": True, "random": "seed_rows", "vocab": 5},
)

MISTAKES: tuple[Mistake, ...] = (
    replace_argument("convention", "parents below -1 taken for the root", "parents",
                     lambda v: v["parents"].clamp(min=-1)),)

STRESS: tuple[dict[str, Any], ...] = (         # ids beyond 2^16 and 2^17
    {"vocab": 70_001, "batch": 2}, {"vocab": 150_001, "batch": 3, "tree": "one"},
    {"random": "generator"})

OP = Op(
    name="speculative_verify_tree", family="sampling", reference=reference, meta=meta,
    inputs=inputs, cases=CASES, stress=STRESS, mistakes=MISTAKES,
    tolerance=Tolerance({"float32": (0.0, 0.0)}),      # tokens must be equal
    main="target_probs",
    shapes={"target_probs": "batch positions vocab", "draft_tokens": "batch nodes",
            "parents": "batch nodes", "draft_probs": "batch positions vocab",
            "uniforms": "batch positions", "seed_rows": "batch"},
    returns=("batch nodes", "batch nodes", "batch", "batch"),
    derived={"target_positions_beyond_nodes": "positions - nodes"},
    words={"target_positions_beyond_nodes": Wording(
        "positions - nodes", "{positions} positions for {nodes} draft tokens", {
            "1": "target_probs must have one position more than there are draft tokens"})},
    ranges={"seed": SEED},
    requires=(
        dtypes(*FLOATS), at_least("vocab", 1, Code.EMPTY_INPUT),
        equals("target_positions_beyond_nodes", 1, Code.DIM_MISMATCH),
        one_of("draft_tokens.dtype", *INTEGERS, code=Code.DTYPE_UNSUPPORTED),
        one_of("parents.dtype", *INTEGERS, code=Code.DTYPE_UNSUPPORTED),
        one_of("draft_probs.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        one_of("uniforms.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        one_of("seed_rows.dtype", None, *INTEGERS, code=Code.DTYPE_UNSUPPORTED)),
    flops="8 * batch * positions * vocab", bytes="2 * itemsize * batch * positions * vocab",
    outputs="Tensor[]",
)
