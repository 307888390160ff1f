"""Speculative decoding: the drafted tokens that the target model accepts, and the token after them
(Leviathan, Chen).

Draft token x at a position is accepted with probability min(1, p(x) / q(x)), p the target's
distribution there and q the draft's; the first one rejected ends the draft and is replaced by a
draw from max(p - q, 0), normalised. When all are accepted, one more token is drawn from the
target's next distribution. Position by position the result is distributed as p: a token y comes
from acceptance with probability min(p(y), q(y)), and from the replacement with 1 - sum(min(p, q))
times max(p(y) - q(y), 0) / sum(max(p - q, 0)), which is max(p(y) - q(y), 0); the sum is p(y).

- target_probs (batch, drafted + 1, vocab) and draft_probs (batch, drafted, vocab) are
  probabilities.
- Without draft_probs the draft is deterministic (prompt lookup, or a greedy draft): q is 1 at the
  token.
- A token outside the vocabulary, such as a padding of -1, ends the draft: the next one is drawn
  from the target there.
- Random numbers as in lz.sample, drafted + 1 per row: one per acceptance test, and the last for the
  draw.

Returns the accepted tokens (batch, drafted) padded with -1, their number, and the token after them
(-1 where the target's distribution is all zero).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.op import SEED, Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import Wording, at_least, dtypes, equals, one_of
from .formulas.common import FLOATS
from .formulas.sampling import (
    clean_probs,
    draw,
    equal_probs,
    one_hot,
    random_arguments,
    random_numbers,
    residual_weights,
    with_equal_rows,
)

INTEGERS = ("int32", "int64")


def reference(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor,
    uniforms: Tensor | None = None, *, seed: int | None = None, seed_rows: Tensor | None = None,
    offset: int = 0, generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (accepted tokens, their number, the token after them) for each row of draft_tokens.
    """
    batch, drafted = draft_tokens.shape
    vocab = target_probs.shape[-1]
    uniform = random_numbers(batch, drafted + 1, draft_tokens.device, uniforms, seed, seed_rows,
                             offset, generator)
    accepted = torch.full_like(draft_tokens, -1, dtype=torch.int64)
    open_rows = torch.ones((batch, 1), dtype=torch.bool, device=draft_tokens.device)
    # the distribution of the next token
    weights = clean_probs(target_probs[:, drafted], uniform.dtype)
    for i in range(drafted):
        token = draft_tokens[:, i:i + 1].to(torch.int64)
        in_vocab = (token >= 0) & (token < vocab)
        column = torch.where(in_vocab, token, 0)
        p = clean_probs(target_probs[:, i], uniform.dtype)
        q = (one_hot(column, p) if draft_probs is None
             else clean_probs(draft_probs[:, i], uniform.dtype))
        q = torch.where(in_vocab, q, 0.0)
        accept = open_rows & in_vocab & (uniform[:, i:i + 1] * q.gather(1, column)
                                         < p.gather(1, column))
        weights = torch.where(open_rows & ~accept, residual_weights(p, q), weights)
        accepted[:, i:i + 1] = torch.where(accept, token, -1)
        open_rows = accept
    following = torch.where(weights.sum(-1, keepdim=True) > 0, draw(weights, uniform[:, -1:]), -1)
    return accepted, (accepted >= 0).sum(-1), following[:, 0]


def meta(draft_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    accepted = torch.empty_like(draft_tokens, dtype=torch.int64,
                                memory_format=torch.contiguous_format)
    return accepted, accepted.new_empty(len(draft_tokens)), accepted.new_empty(len(draft_tokens))


def inputs(
    batch: int = 4, drafted: int = 5, vocab: int = 33, alike: float = 0.7, certain: bool = False,
    random: str = "uniforms", special: str = "", dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`alike` mixes the draft into the target: 1 is the same model, 0 an unrelated one. "mixed":
    the target has 16 bits, the draft has more and is closer to it than they tell; "mixed draft":
    the draft has 16."""
    gen = torch.Generator("cpu").manual_seed(seed)
    draft = torch.randn((batch, drafted + 1, vocab), generator=gen) * 2
    target = (alike * draft + (1 - alike) * torch.randn(draft.shape, generator=gen) * 2).softmax(-1)
    draft = draft.softmax(-1)
    if vocab > 1 << 17:                        # rows that draw a token beyond it
        target[1::2, :, :1 << 17] *= 1e-6
    tokens = torch.multinomial(draft.flatten(0, 1), 1,
                               generator=gen).view(batch, drafted + 1)[:, :drafted]
    if special == "padded" and drafted:
        tokens[1::2, drafted // 2:] = -1
        tokens[2:3, -1] = vocab
    elif special == "masked":
        target[::2] = 0.0
    elif special == "impossible":              # the drafted tokens, in every other row
        target[::2, :drafted].scatter_(2, tokens[::2, :, None], 0.0)
    elif special == "absent":                  # from both distributions
        for probs in (target[::2, :drafted], draft[::2, :drafted]):
            probs.scatter_(2, tokens[::2, :, None], 0.0)
    elif special == "equal":                   # p / q and all sums are exact
        draft, target = (equal_probs(draft.shape, n) for n in ((1, 1), (2, 3)))
        tokens = tokens % 2
    elif special == "broken":
        target[..., 0], draft[..., 1] = -0.5, torch.inf
    elif special == "strided":
        target = target.transpose(1, 2).contiguous().transpose(1, 2)
    arguments: dict[str, Any] = {
        "draft_tokens": tokens.to(device), "target_probs": target.to(device=device, dtype=dtype),
        "draft_probs": None if certain else draft[:, :drafted].to(device=device, dtype=dtype)}
    if special.startswith("mixed"):
        narrow = target.to(torch.bfloat16)
        wide = narrow.float() * (1 + torch.randn(target.shape, generator=gen) / 150)
        target, draft = (narrow, wide) if special == "mixed" else (wide, narrow)
        arguments |= {"target_probs": target.to(device),
                      "draft_probs": draft[:, :drafted].to(device)}
    if random == "quarters":                   # and sixteenths for the token that is drawn
        quarters = torch.randint(1, 4, (batch, drafted + 1), generator=gen) / 4
        quarters[:, -1] = (torch.randint(8, (batch,), generator=gen) * 2 + 1) / 16
        arguments["uniforms"] = quarters.to(device)
    else:
        arguments |= random_arguments(random, (batch, drafted + 1), gen, device, seed)
    return with_equal_rows(arguments)


CASES: tuple[dict[str, Any], ...] = (
    {}, {"batch": 1}, {"batch": 0}, {"drafted": 0}, {"drafted": 1}, {"vocab": 1}, {"alike": 1.0},
    {"alike": 0.0}, {"alike": 0.95, "batch": 16}, {"certain": True, "batch": 16},
    {"certain": True, "drafted": 0}, {"special": "padded", "alike": 1.0},
    {"special": "padded", "alike": 0.9, "batch": 16},
    {"special": "mixed", "batch": 800, "alike": 1.0},
    {"special": "mixed draft", "batch": 800, "alike": 1.0},
    {"special": "padded", "certain": True}, {"special": "masked"}, {"special": "broken"},
    {"special": "impossible", "random": "zeros"}, {"special": "impossible"},
    {"special": "absent", "random": "zeros"}, {"special": "absent", "batch": 16},
    {"special": "equal", "random": "quarters", "batch": 16},
    {"special": "equal", "random": "quarters", "certain": True, "batch": 16},
    {"special": "strided"}, {"random": "wide"}, {"random": "seed"},
    {"random": "seed_rows", "batch": 9}, {"random": "short_seed_rows"},
    {"vocab": 5003, "batch": 3, "drafted": 3}, {"drafted": 20, "alike": 0.99, "batch": 3},
)

STRESS: tuple[dict[str, Any], ...] = (         # ids beyond 2^16 and 2^17
    {"vocab": 150_001, "batch": 3, "drafted": 1}, {"random": "generator"})

OP = Op(
    name="speculative_verify", family="sampling", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    tolerance=Tolerance({"float32": (0.0, 0.0)}),      # tokens must be equal
    main="target_probs",
    shapes={"target_probs": "batch positions vocab", "draft_tokens": "batch drafted",
            "draft_probs": "batch drafted vocab", "uniforms": "batch positions",
            "seed_rows": "batch"},
    returns=("batch drafted", "batch", "batch"),
    derived={"target_positions_beyond_draft": "positions - drafted"},
    words={"target_positions_beyond_draft": Wording(
        "positions - drafted", "{positions} positions for {drafted} draft tokens", {
            "1": "target_probs must have one position more than there are draft tokens"})},
    ranges={"seed": SEED},
    requires=(
        dtypes(*FLOATS), at_least("vocab", 1, Code.EMPTY_INPUT),
        equals("target_positions_beyond_draft", 1, Code.DIM_MISMATCH),
        one_of("draft_tokens.dtype", *INTEGERS, code=Code.DTYPE_UNSUPPORTED),
        one_of("draft_probs.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        one_of("uniforms.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        one_of("seed_rows.dtype", None, *INTEGERS, code=Code.DTYPE_UNSUPPORTED)),
    flops="8 * batch * positions * vocab", bytes="2 * itemsize * batch * positions * vocab",
    outputs="Tensor[]",
)
