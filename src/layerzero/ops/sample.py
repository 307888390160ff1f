"""Samples one token per row of logits. In this order: penalties, temperature, top-k, top-p, min-p,
draw.

- Tokens are ranked by score, equal scores by token id, the lowest first. top_k keeps the first k;
  top_p the fewest whose probability mass reaches p of what top-k kept; min_p those at least min_p
  times as likely as the most likely. The most likely token is always kept, so top_p = 0 and
  temperature = 0 are greedy.
- The draw is a function of one random number per row, the same in every kernel: see
  formulas/sampling.py. It comes from `uniforms`, else `seed_rows`, else `seed`, else `generator`,
  else torch's default generator. `offset` is the generation step. With seed_rows the token of a row
  does not depend on its position in the batch.
- A `*_rows` tensor holds one value per row and replaces the scalar. In it a temperature <= 0 is
  greedy, and top_k <= 0 and min_p <= 0 are off.
- `history` (batch, seen) holds the token ids so far, padded with -1; `token_counts` (batch, vocab)
  how often each was generated. The repetition penalty reads both; presence and frequency penalties
  read token_counts, or the history without them.
- A row from which no token can be drawn (all -inf, or all probabilities zero) gives -1. NaN counts
  as impossible.
- With from_probs the rows are probabilities, not logits; they need not sum to one.
- return_logprobs also returns the log of the probability with which each token was drawn, after all
  filters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake, Results, Values
from ..spec.op import INT32, SEED, Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import (
    Condition,
    absent,
    any_of,
    at_least,
    at_most,
    differs,
    dtypes,
    equals,
    on,
    one_of,
    present,
    when,
)
from .formulas.common import FLOATS
from .formulas.mistakes import off_by, replace_argument
from .formulas.sampling import (
    Penalties,
    apply_penalties,
    draw,
    keep_mask,
    make_filters,
    random_arguments,
    random_numbers,
    rank_scores,
    scalar_or_column,
    tell_apart,
    token_weights,
    with_equal_rows,
)

INTEGERS = ("int32", "int64")
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FLOAT_ROWS = ("temperature_rows", "top_p_rows", "min_p_rows",
              *(f"{name}_rows" for name in PENALTIES))


def reference(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, *, repetition_penalty: float = 1.0, presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0, history: Tensor | None = None,
    token_counts: Tensor | None = None, temperature_rows: Tensor | None = None,
    top_k_rows: Tensor | None = None, top_p_rows: Tensor | None = None,
    min_p_rows: Tensor | None = None, repetition_penalty_rows: Tensor | None = None,
    presence_penalty_rows: Tensor | None = None, frequency_penalty_rows: Tensor | None = None,
    uniforms: Tensor | None = None, seed: int | None = None,
    seed_rows: Tensor | None = None, offset: int = 0, generator: torch.Generator | None = None,
    from_probs: bool = False, return_logprobs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns a token id per row of `logits` (batch, vocab), int64; -1 where none can be drawn."""
    batch, vocab = logits.shape
    uniform = random_numbers(batch, 1, logits.device, uniforms, seed, seed_rows, offset, generator)
    logits = apply_penalties(logits.detach(), history, token_counts, Penalties(
        scalar_or_column(repetition_penalty, repetition_penalty_rows),
        scalar_or_column(presence_penalty, presence_penalty_rows),
        scalar_or_column(frequency_penalty, frequency_penalty_rows)))
    scores = rank_scores(logits, temperature, temperature_rows, from_probs)
    filters = make_filters(vocab, temperature, top_k, top_p, min_p, temperature_rows, top_k_rows,
                           top_p_rows, min_p_rows, uniform.dtype)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(-1)
    weights = token_weights(scores, from_probs)
    largest = weights.amax(-1, keepdim=True)

    weights = torch.where(rank < filters.top_k, weights, 0.0)
    cumulative = weights.gather(1, order).cumsum(-1)
    # the mass of all that rank higher
    before = torch.nn.functional.pad(cumulative, (1, -1)).gather(1, rank)
    # 1.0 keeps all, also what is too small to change the sum
    if isinstance(filters.top_p, Tensor) or filters.top_p < 1.0:
        inside = (before < filters.top_p * cumulative[:, -1:]) | (rank == 0)
        weights = torch.where(inside, weights, 0.0)
    weights = torch.where(weights >= filters.min_p * largest, weights, 0.0)

    column = draw(weights, uniform)
    chosen, total = weights.gather(1, column), weights.sum(-1, keepdim=True)
    tokens = torch.where(total > 0, column, -1)[:, 0]
    if not return_logprobs:
        return tokens
    return tokens, torch.where(total > 0, chosen.log() - total.log(),
                               -torch.inf)[:, 0].to(scores.dtype)


def meta(logits: Tensor, *args: Any, return_logprobs: bool = False, **kwargs: Any) -> Any:
    tokens = logits.new_empty(logits.shape[:1], dtype=torch.int64)
    if not return_logprobs:
        return tokens
    return tokens, logits.new_empty(logits.shape[:1],
                                    dtype=torch.promote_types(logits.dtype, torch.float32))


def inputs(
    batch: int = 4, vocab: int = 257, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, penalties: str = "", only: str = "", rows: bool = False,
    random: str = "uniforms", probs: bool = False, logprobs: bool = True, special: str = "",
    past: str = "", scale: float = 3.0, dtype: torch.dtype = torch.float32, device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """`penalties` names what they read; `only` one of them, beside which no other is given, nor a
    filter for each row; `past` is a history that is "empty", "long", mostly of one token ("same")
    or padded with ids "beyond" the vocabulary."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def rand(low: float, high: float) -> Tensor:
        return (torch.rand(batch, generator=gen) * (high - low) + low).to(device)

    logits = torch.randn((batch, vocab * 2 if special == "sparse" else vocab),
                         generator=gen) * scale
    if special == "ties":
        logits = (logits / 2).round()
    elif special == "extreme":
        logits = logits * 1e4
    elif special == "masked":
        logits[::2, ::2], logits[1::2] = -torch.inf, -torch.inf
    elif special == "infinite":
        logits[:, 1], logits[:, -1] = torch.inf, torch.inf
    elif special == "tail":                    # as likely together as what float32 adds to 1
        logits[:], logits[:, 0] = -16.5, 0.0
    elif special in ("equal", "halves"):       # 2^n tokens, so that their sums are exact
        logits[:], top_k = -torch.inf, _power_of_two(top_k)
        logits[:, -_power_of_two(vocab):] = 0.0
    if probs and special == "halves":          # 1/2, 1/4, ..., in any order
        logits = 0.5 ** (1.0 + torch.randperm(vocab, generator=gen) % 12).expand(batch, -1)
    elif probs:
        logits = logits.softmax(-1).nan_to_num()
        logits *= 2.0 ** (torch.arange(batch)[:, None] % 4)    # they need not sum to one
    logits = logits.to(device=device, dtype=dtype)
    arguments: dict[str, Any] = {
        "logits": logits[:, ::2] if special == "sparse" else logits, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "from_probs": probs,
        "return_logprobs": logprobs}
    if penalties:
        given = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        arguments |= {name: n for name, n in given.items() if only in ("", name)}
        if past == "same":                     # so that thousands of them leave it a chance
            arguments["frequency_penalty"] = 0.002
        seen = {"empty": 0, "long": 2_050, "same": 2_600}.get(past, 33)
        history = torch.randint(-1, vocab, (batch, seen), generator=gen)
        if past == "same":
            history[:, :2_500] = arguments["logits"].float().argmax(-1, keepdim=True).cpu()
        history[torch.arange(seen) >= seen - torch.arange(batch)[:, None] % 5 * 6] = -1
        if vocab > 1 << 16:                    # likely, and what 16 bits make of -1
            arguments["logits"][:, 0xFFFF] = arguments["logits"].float().topk(2).values.mean(-1)
        counts = torch.randint(0, 400 if "many" in penalties else 3, (batch, vocab), generator=gen)
        tell_apart(history, counts, arguments["logits"].float().cpu())
        if past == "beyond":
            history[history < 0] = vocab
        operands = {"history": history, "counts": counts}
        arguments |= {"token_counts" if name == "counts" else name: t.to(device)
                      for name, t in operands.items() if name in penalties}
    if rows and only:
        arguments |= {f"{only}_rows": rand(0.5, 2.0)} if penalties else {}
    elif rows:
        ks = torch.randint(-2, 12, (batch,), generator=gen).to(device)
        arguments |= {"top_k_rows": ks, "top_p_rows": rand(0.0, 1.2), "min_p_rows": rand(-0.1, 0.1)}
        if not probs:
            arguments["temperature_rows"] = rand(-0.3, 1.5)
        # the first row has several likely tokens, so that each argument shows in it
        likely = {"top_k_rows": 60, "top_p_rows": 0.97, "min_p_rows": 0.0, "temperature_rows": 2.3}
        for name in likely.keys() & arguments.keys():
            arguments[name][:1] = likely[name]
        if penalties:
            arguments |= {f"{name}_rows": rand(0.5, 2.0) for name in PENALTIES}
    if random == "edges":                    # 0, and the last number before 1
        arguments["uniforms"] = torch.arange(batch, device=device) // 2 % 2 * (1 - 2.0 ** -24)
    elif random == "last":                     # among the unlikely ones, between two of them
        tail = (vocab - 1) * math.exp(-16.5)
        places = 1 + torch.randint(0, vocab // 2, (batch,), generator=gen, dtype=torch.float64) * 2
        arguments["uniforms"] = ((1 + tail * places / (2 * vocab - 2)) / (1 + tail)).to(device)
    elif random == "sixteenths":
        arguments["uniforms"] = (15 - torch.arange(batch, device=device) * 2 % 16) / 16
    else:
        arguments |= random_arguments(random, (batch,), gen, device, seed)
    return with_equal_rows(arguments)


def _power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n else 0


CASES: tuple[dict[str, Any], ...] = (
    {}, {"batch": 1}, {"batch": 0}, {"vocab": 1}, {"vocab": 2, "top_k": 1},
    {"logprobs": False, "random": "seed"}, {"temperature": 0.0},
    {"temperature": 0.7, "random": "seed_rows"}, {"temperature": 1e-4, "random": "seed"},
    {"batch": 9, "random": "seed_rows"}, {"batch": 5, "random": "short_seed_rows"},
    # a temperature of zero in a row takes the first of equal tokens
    {"rows": True, "batch": 32, "vocab": 9, "special": "ties", "scale": 1.0},
    {"top_k": 5}, {"top_k": 1}, {"top_k": 300}, {"top_p": 0.9}, {"top_p": 0.0}, {"min_p": 0.05},
    {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
    {"top_p": 0.95, "min_p": 0.01}, {"rows": True},
    {"rows": True, "batch": 9, "vocab": 5000},
    # so flat that the likely ones are thousands
    {"top_p": 0.9, "vocab": 9_001, "scale": 0.3, "logprobs": False},
    {"rows": True, "top_k": 10}, {"penalties": "history", "top_k": 10},
    {"penalties": "counts", "top_p": 0.9}, {"penalties": "history counts", "rows": True},
    *({"penalties": "history", "past": past, "vocab": 2_100, "scale": 1.0}
      for past in ("empty", "long", "beyond")),
    {"penalties": "history", "only": "frequency_penalty", "past": "same"},
    # of several sources of random numbers the first counts
    {"random": "uniforms+seed_rows+seed"}, {"random": "seed_rows+seed+generator"},
    {"random": "seed+generator", "batch": 9},
    # each penalty by itself, beside all that it may read
    *({"penalties": operands, "only": name, "rows": rows, "vocab": 33}
      for operands, rows in (("history", False), ("counts", True), ("history counts", False),
                             ("history counts", True)) for name in PENALTIES),
    # which token is the likeliest after it
    *({"penalties": "history counts", "only": name, "temperature": 0.0, "scale": 0.1, "batch": 16}
      for name in PENALTIES),
    {"probs": True}, {"probs": True, "top_k": 10}, {"probs": True, "top_p": 0.9},
    {"probs": True, "rows": True, "random": "seed"},
    {"special": "ties", "top_k": 7, "scale": 2.0}, {"special": "ties", "top_p": 0.8, "scale": 1.0},
    # sums that equal a threshold
    *({"special": "equal", "random": "sixteenths", "batch": 8, "vocab": vocab, "top_p": top_p}
      for vocab, top_p in ((4, 0.5), (8, 0.25), (33, 0.75))),
    {"special": "equal", "random": "sixteenths", "batch": 8, "vocab": 16, "top_k": 8},
    {"special": "equal", "random": "sixteenths", "batch": 8, "vocab": 16, "probs": True,
     "top_p": 0.5}, {"special": "equal", "vocab": 9, "min_p": 1.0},
    *({"special": "halves", "probs": True, "random": "sixteenths", "batch": 8, "vocab": 9, name: n}
      for name, n in (("min_p", 0.25), ("min_p", 0.125), ("top_p", 0.75), ("top_k", 4))),
    {"special": "equal", "vocab": 20, "temperature": 0.0},
    {"special": "ties", "temperature": 0.0, "scale": 0.5, "batch": 16, "logprobs": False},
    # sums that float32 does not tell apart
    {"special": "tail", "random": "last", "batch": 8, "vocab": 501, "logprobs": False},
    {"special": "extreme", "top_p": 0.9}, {"special": "extreme", "temperature": 0.0},
    {"special": "masked", "random": "edges"}, {"random": "edges", "top_p": 0.9},
    {"special": "masked"}, {"special": "masked", "top_k": 5}, {"special": "masked", "top_p": 0.9},
    {"special": "masked", "temperature": 0.0}, {"special": "masked", "probs": True, "top_p": 0.5},
    {"special": "infinite", "top_k": 5}, {"special": "infinite", "temperature": 0.0},
    {"special": "infinite"}, {"special": "sparse", "top_p": 0.9},
    {"batch": 2, "vocab": 9001, "top_p": 0.9},
    {"batch": 2, "vocab": 9001, "top_p": 0.9, "scale": 0.3},
    {"batch": 2, "vocab": 9001, "top_p": 0.7, "probs": True, "scale": 0.3},
    {"batch": 2, "vocab": 9001, "top_k": 40}, {"batch": 2, "vocab": 9001, "min_p": 0.1},
    {"batch": 2, "vocab": 9001, "min_p": 0.01, "scale": 0.3},
    {"batch": 2, "vocab": 9001, "temperature": 0.0}, {"batch": 2, "vocab": 9001},
)

# from_probs excludes everything that acts on logits.
_LOGITS_ONLY: tuple[Condition, ...] = (
    equals("temperature", 1.0, Code.VALUE_OUT_OF_RANGE), absent("temperature_rows.dtype"),
    absent("history.dtype"), absent("token_counts.dtype"),
    *(equals(name, off, Code.VALUE_OUT_OF_RANGE) for name, off in PENALTIES.items()),
    *(absent(f"{name}_rows.dtype") for name in PENALTIES))

STRESS: tuple[dict[str, Any], ...] = (
    {"random": "generator"}, {"random": "generator", "top_k": 5},
    {"random": "generator", "top_p": 0.9}, {"batch": 64, "vocab": 33, "top_p": 0.5, "scale": 1.0},
    {"batch": 64, "vocab": 33, "top_k": 3}, {"batch": 200, "vocab": 12, "scale": 1.0},
    {"batch": 200, "vocab": 12, "scale": 1.0, "random": "generator"},
    {"batch": 64, "vocab": 50, "min_p": 0.3}, {"batch": 64, "vocab": 33, "temperature": 2.5},
    {"batch": 64, "vocab": 33, "special": "ties", "top_k": 2},
    {"penalties": "history"}, {"penalties": "history", "temperature": 0.0},
    {"vocab": 9001, "top_p": 0.9, "penalties": "history"},
    # more candidates than a block of threads has, counts beyond 2^8
    {"vocab": 5_003, "batch": 2, "top_k": 3_000, "scale": 0.5},
    {"penalties": "many counts", "temperature": 0.0, "scale": 60.0},
    # equal numbers far from each other
    {"vocab": 12_007, "special": "ties", "scale": 1.0, "temperature": 0.0},
    {"vocab": 12_007, "special": "ties", "scale": 1.0, "top_k": 3},
    {"vocab": 70_001, "batch": 5, "special": "ties", "scale": 1.0, "top_k": 300},
    # ids beyond 2^16
    {"vocab": 150_001, "batch": 3, "scale": 1.0},
    {"vocab": 150_001, "batch": 3, "temperature": 0.0},
    {"vocab": 150_001, "batch": 3, "scale": 1.0, "top_k": 40},
    {"vocab": 150_001, "batch": 2, "scale": 1.0, "top_k": 40, "penalties": "history"})


# Mistakes that a kernel for this op could make.

def _short_history(op: Any, v: Values) -> Values | None:
    ids = v["history"]
    return None if ids is None or v["logits"].shape[1] <= 1 << 16 else {
        **v, "history": ids.to(torch.int64) & 0xFFFF}


def _drop_last_of_top_p(op: Any, v: Values) -> Results | None:
    """Applies top-p without the token whose mass reaches p."""
    if (v["top_p"] >= 1.0 or v["top_p_rows"] is not None or v["token_counts"] is not None
        or v["history"] is not None):
        return None
    scores = rank_scores(v["logits"], v["temperature"], v["temperature_rows"], v["from_probs"])
    filters = make_filters(scores.shape[-1], v["temperature"], v["top_k"], v["top_p"], v["min_p"],
                           None, None, None, None, torch.float64)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked = token_weights(scores, v["from_probs"]).gather(1, order)
    keep = keep_mask(ranked, filters)
    count = keep.sum(-1, keepdim=True)
    keep = keep & ((torch.arange(keep.shape[1]) < count - 1) | (torch.arange(keep.shape[1]) == 0))
    weights = torch.zeros_like(ranked).scatter(1, order, torch.where(keep, ranked, 0.0))
    uniform = random_numbers(scores.shape[0], 1, scores.device, v["uniforms"], v["seed"],
                             v["seed_rows"], v["offset"], v["generator"])
    column = draw(weights, uniform)
    chosen, total = weights.gather(1, column), weights.sum(-1, keepdim=True)
    tokens = torch.where(total > 0, column, -1)[:, 0]
    logs = torch.where(total > 0, chosen.log() - total.log(), -torch.inf)[:, 0].to(torch.float32)
    return Results((tokens, logs) if v["return_logprobs"] else (tokens,))


MISTAKES: tuple[Mistake, ...] = (
    Mistake("index overflow", "ids of the history in 16 bits", _short_history),
    replace_argument("distribution", "the temperature ignored", "temperature", 1.0),
    replace_argument("distribution", "top_k ignored", "top_k", 0),
    replace_argument("distribution", "top_p ignored", "top_p", 1.0),
    replace_argument("distribution", "min_p ignored", "min_p", 0.0),
    replace_argument("distribution", "one token more in top_k", "top_k", off_by("top_k", 1)),
    replace_argument("distribution", "one token fewer in top_k", "top_k", off_by("top_k", -1)),
    Mistake("distribution", "top_p without the token that reaches it", _drop_last_of_top_p),
    replace_argument("distribution", "1 - u in place of u", "uniforms",
                     lambda v: 1.0 - v["uniforms"]),
    replace_argument("distribution", "the square of u in place of u", "uniforms",
                     lambda v: v["uniforms"] ** 2),
    replace_argument("distribution", "penalties ignored", "repetition_penalty", 1.0),
    replace_argument("distribution", "offset ignored", "offset", 0))

OP = Op(
    name="sample", family="sampling", reference=reference, meta=meta, inputs=inputs, cases=CASES,
    stress=STRESS, mistakes=MISTAKES,
    reference_kernel={"prior": 0.006, "overhead_us": 80.0,
                      "workspace": "80 * batch * vocab"},     # sorts the vocabulary
    # Tokens must be equal; the tolerance is for the log-probabilities, which are at least float32.
    tolerance=Tolerance({"float16": (1e-5, 1e-5), "bfloat16": (1e-5, 1e-5), "float32": (1e-5, 1e-5),
                         "float64": (1e-10, 1e-10)}),
    shapes={"logits": "batch vocab", "history": "batch seen", "token_counts": "batch vocab",
            "top_k_rows": "batch", **dict.fromkeys(FLOAT_ROWS, "batch"), "uniforms": "batch",
            "seed_rows": "batch"},
    returns=("batch", "batch"),
    ranges={"top_k": INT32, "seed": SEED},
    requires=(
        dtypes(*FLOATS), at_least("vocab", 1, Code.EMPTY_INPUT),
        at_least("temperature", 0.0, Code.VALUE_OUT_OF_RANGE),
        at_least("top_k", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("top_p", 0.0, Code.VALUE_OUT_OF_RANGE),
        at_most("top_p", 1.0, Code.VALUE_OUT_OF_RANGE),
        at_least("min_p", 0.0, Code.VALUE_OUT_OF_RANGE),
        at_most("min_p", 1.0, Code.VALUE_OUT_OF_RANGE),
        at_least("repetition_penalty", 0.0, Code.VALUE_OUT_OF_RANGE),
        differs("repetition_penalty", 0.0, Code.VALUE_OUT_OF_RANGE),
        *(one_of(f"{name}.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED)
          for name in (*FLOAT_ROWS, "uniforms")),
        *(one_of(f"{name}.dtype", None, *INTEGERS, code=Code.DTYPE_UNSUPPORTED)
          for name in ("top_k_rows", "seed_rows", "history")),
        one_of("token_counts.dtype", None, *INTEGERS, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
        # A penalty without history or token_counts is a mistake.
        *(any_of(equals(name, off), present("token_counts.dtype"), present("history.dtype"))
          for name, off in PENALTIES.items()),
        *(any_of(absent(f"{name}_rows.dtype"), present("token_counts.dtype"),
                 present("history.dtype"))
          for name in PENALTIES),
        *(when(on("from_probs"), rule) for rule in _LOGITS_ONLY),
    ),
    flops="8 * batch * vocab", bytes="itemsize * batch * vocab", outputs="Tensor[]",
)
