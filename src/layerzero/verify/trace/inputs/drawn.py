"""Numbers of one kind of input, drawn so that a mistake shows: the angles of a rope, probabilities
with an edge, the lengths of sequences, the tokens that a query sees.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import torch
from torch import Tensor

from ..definition import Definition
from ..readings import constant, skips
from ..statements import plain, softcap

# Shares of the likeliest tokens of a row, and a top_p just beyond three of them: a filter that
# takes it for less loses the fourth, which comes often. They differ much: powers of them show.
PEAKS, ROW, NUCLEUS = (0.5, 0.1, 0.05, 0.048, 0.04, 0.03), 2, 0.6565
# Queries of one sequence: more than the smallest tile has. Of one that has fewer keys. Of a shared
# length, which references go through token by token.
MANY, UNSEEN, SHARED = 9, 5, 8
DRIFT, LONG_SUM = 8, 512                       # of sums; terms from which it matters
SOME = 256                                     # tokens that a query chooses of many
MAX_EXPERTS = 1024                             # more logits are those of a vocabulary
MAX_LOGITS = 6.0                               # standard deviation of logits below a cap
MAX_WINDOW = 4096                              # keys that are drawn to exceed one


def angles(name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the cosines or sines of positions, or both side by side."""
    half = shape[-1] // 2 if "cos_sin" in name else shape[-1]
    speeds = 1e4 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
    turned = (torch.arange(math.prod(shape[:-1]), dtype=torch.float64)[:, None] * speeds).float()
    parts = (turned.cos(), turned.sin()) if "cos_sin" in name else \
        (turned.cos() if "cos" in name else turned.sin(),)
    return torch.cat(parts, -1).view(shape)


def with_peaks(probs: Tensor) -> Tensor:
    """Returns probabilities of which one row has a few likely tokens: its likeliest ones. In two
    others a filter decides between tokens that are as likely but for what 16 bits hold."""
    if probs.dim() != 2 or len(probs) <= ROW or probs.shape[1] <= 4 * len(PEAKS):
        return probs
    probs = probs.clone()
    for i, places in ((0, (-1, 0)), (ROW + 1, (1, 0, -1))):     # top_k of these is 1 and 2
        if i < len(probs):
            row, likeliest = probs[i], probs[i].max()
            row[row.argmax()] = row.median()
            row[[*places]] = likeliest
            row[places[-1]] *= 1 - 2.0 ** -11
            row[places[0]] *= 1.25 if len(places) > 2 else 1.0
            probs[i] = row / row.sum()
    row, top = probs[ROW], probs[ROW].topk(len(PEAKS)).indices
    row = row.index_fill(0, top, 0.0)
    row = row / row.sum() * (1.0 - sum(PEAKS))
    row[top] = torch.tensor(PEAKS, dtype=row.dtype)
    return torch.cat((probs[:ROW], row[None], probs[ROW + 1:]))


def guards_zero(definition: Definition) -> bool:
    """Does the reference compare something with zero? One that does not says nothing of a filter
    that is zero."""
    return any(isinstance(part, ast.Constant) and part.value in (0, 1) and part.value is not True
               for node in ast.walk(ast.parse(definition.reference))
               if isinstance(node, ast.Compare) for part in (node.left, *node.comparators))


def between_tokens(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs with uniform numbers in the middle of a token's share, where they draw
    from probabilities alone: on the edge between two tokens rounding decides."""
    probs = inputs.get("probs")
    name = next((n for n in inputs if re.match("uniforms?(_|$)", n.lower())), "")
    if not name or not isinstance(probs, Tensor) or len(inputs) > 2:
        return inputs
    upper = probs.double().cumsum(-1)
    edges = (upper - probs.double() / 2) / upper[:, -1:]
    drawn = inputs[name].double().reshape(-1, len(probs)).T.contiguous()
    nearest = torch.searchsorted(edges, drawn).clamp(max=probs.shape[1] - 1)
    middle = edges.gather(1, nearest).T.reshape(inputs[name].shape)
    return {**inputs, name: middle.to(inputs[name].dtype)}


def signed(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Returns factors of both signs, none of which is near zero or, on the whole, near one."""
    sizes = torch.rand(shape, generator=gen) * 1.6 + 0.3
    return torch.where(torch.rand(shape, generator=gen) < 0.5, -sizes, sizes)


def drift_rows(rows: Tensor) -> None:
    """Gives one row a mean: with weights whose mean changes its sign, its sums grow to DRIFT times
    what is left of them, and lose as much more where they are kept in 16 bits."""
    if len(rows) > ROW + 1 and rows.shape[1] >= LONG_SUM:
        rows[ROW + 1] += math.sqrt(2 * DRIFT / math.sqrt(rows.shape[1]))


def drift_weights(rows: Tensor, by: float) -> None:
    """Gives every other row of weights of magnitude `by` a mean that changes its sign halfway."""
    half = rows.shape[1] // 2
    if rows.shape[1] >= LONG_SUM:
        mean = by * math.sqrt(2 * DRIFT / math.sqrt(rows.shape[1]))
        rows[::2, :half] += mean
        rows[::2, half:] -= mean


def apart(n: int, gen: torch.Generator) -> Tensor:
    """Returns numbers from -0.5 to 0.5 in any order, no two of which are equal: a routing bias
    decides between experts."""
    return torch.linspace(-0.5, 0.5, n)[torch.randperm(n, generator=gen)]


def below_zero(n: int, gen: torch.Generator) -> Tensor:
    """Returns numbers from -1 to -1/16 in any order, no two of which are equal in bfloat16: with
    such a bias the scores of a token may all be negative, and 0 is no mask."""
    # its codes are in the order of its numbers, 128 from one power of two to the next
    codes = 0x3F80 - torch.arange(n) * max(512, n) // max(n, 1)
    bias = -codes.to(torch.int16).view(torch.bfloat16).float()
    return bias[torch.randperm(n, generator=gen)]


def favour(bias: Tensor, first: int, count: int) -> Tensor:
    """Returns the bias with its largest values at some of `count` experts from `first` on: those
    that this device has, since the results of others are not seen."""
    bias = bias.clone()
    for place in {first, first + 1, first + count - 2, first + count - 1}:
        free = bias.clone()
        free[first:first + count] = -math.inf
        if 0 <= place < len(bias) and bool((free > bias[place]).any()):
            top = int(free.argmax())
            bias[[place, top]] = bias[[top, place]]
    return bias


def groups(definition: Definition) -> int:
    """How many groups of experts its text, an axis or a constant speaks of; 1 if none does."""
    named = constant(definition, r"n(um)?_(expert_)?groups?")
    text = plain(f"{definition.name} {definition.description}")
    said = re.search(r"\bng(\d+)\b|\bn group ?=? ?(\d+)|\b(\d+) groups", text)
    return named or (int(next(filter(None, said.groups()))) if said else 1)


def bias_in_groups(bias: Tensor, parts: int, first: int) -> Tensor:
    """Returns the bias with two large values in half of the groups, that of expert `first` before
    the others, and one that is larger in the others: where nothing else decides, the best of a
    group and the sum of its best two choose otherwise."""
    width = len(bias) // max(parts, 1)
    if parts < 2 or width < 2 or len(bias) % parts:
        return bias
    order = [(first // width + i) % parts for i in range(parts)]
    pairs, single = order[:parts // 2], order[parts // 2:]
    places = [g * width for g in single] + [g * width + i for g in pairs for i in range(2)]
    rest = [i for i in range(len(bias)) if i not in places]
    largest, arranged = bias.sort(descending=True).values, bias.clone()
    arranged[places] = largest[:len(places)]
    arranged[rest] = bias[bias < largest[len(places) - 1]]
    return arranged


def apart_in_groups(row: Tensor, groups: int) -> None:
    """Gives half of the groups of a row one large logit each, the others two that are less: the
    best of a group and the sum of its best two choose otherwise."""
    width = len(row) // groups
    if width < 2 or len(row) % groups or len(row) > MAX_EXPERTS:
        return
    row.copy_(row.argsort().argsort() / len(row) * 3 - 2)
    for group in range(groups):
        at = group * width
        if group < groups // 2:
            row[at] = 3.0 - group / 32
        else:
            row[at:at + 2] = 2.78125 - torch.arange(2 * group, 2 * group + 2) / 64


def many_queries(queries: list[int]) -> None:
    """Gives one sequence, not the first, many queries: a mask that is off by a row differs from the
    right one and from none only where there are some. The first, which is long, has a few."""
    if queries:
        queries[0] = max(queries[0], 3)
        at = min(2, len(queries) - 1)
        queries[at] = max(queries[at], MANY)


def out_of_order(ids: Tensor, counts: list[int]) -> Tensor:
    """Returns the pages so that the last of each sequence has a lower number than its first: their
    order in memory is not that of the tokens."""
    ids, start = ids.clone(), 0
    for count in counts:
        first, last = start, start + count - 1
        if count > 1 and ids[first] < ids[last]:
            ids[[first, last]] = ids[[last, first]]
        start += count
    return ids


def window(definition: Definition) -> int:
    """The window of attention that the text or a constant speaks of; 0 if none."""
    axes = [v for n, v in definition.const_axes.items() if re.search("window|sliding", n.lower())]
    text = f"{definition.description} {definition.reference}".lower()
    written = [int(n) for n in re.findall(r"(?:window|sliding)[^\d\n]{0,40}?(\d+)", text)]
    return max([n for n in (*axes, *written) if n <= MAX_WINDOW], default=0)


def towards_cap(definition: Definition) -> float:
    """A factor of queries with which logits come so near to a constant cap that it shows."""
    caps = softcap(definition)[1] if "soft" in definition.reference.lower() or re.search(
        "tanh|soft[ _-]?cap", f"{definition.name} {definition.description}".lower()) else ()
    return max(1.0, min(max(caps, default=0.0) / 4, MAX_LOGITS))


def treats_unseen(definition: Definition) -> bool:
    """Does the reference say what a query gets that sees no key? Where it does not, softmax gives
    NaN, which means nothing."""
    return skips(definition) and re.search(
        r"isinf|isneginf|isfinite|isnan|nan_to_num|\.any\(|(max_kv\w*|visible|limit)\s*<=?\s*[01]\b",
        definition.reference) is not None


def padded_slots(definition: Definition) -> bool:
    """May an index of a state be -1, which stands for no sequence? In the token of a state space
    model it may; elsewhere where the reference leaves something out."""
    of_state_space = re.match(r".*(mamba|ssu|selective_state)", definition.op_type.lower())
    return of_state_space is not None or skips(definition)


def pool_for(chosen: int, page_size: int) -> int:
    """Pages of a cache that has more tokens than a query chooses."""
    return math.ceil(chosen * 1.25 / page_size) + 1


def choices(rows: int, chosen: int, pool: int, empty: bool, gen: torch.Generator) -> Tensor:
    """Returns rows of different tokens of a pool: all of them valid, none (if `empty`), -1 between
    them, -1 at the end, few after a -1."""
    ids = torch.full((rows, chosen), -1, dtype=torch.int64)
    most = min(chosen, pool)
    some = min(most, SOME)                     # only one row is full: all of them would be slow
    for i in range(rows):
        n = most
        places = torch.arange(chosen)
        if i % 5 in (1, 3):                    # -1 at the end
            n = int(torch.randint(min(some, 2), max(some, 2), (), generator=gen))
        elif i % 5 == 2:                       # -1 between them
            n = max(some * 7 // 8, 1)
            places = torch.randperm(chosen, generator=gen)[:n].sort().values
        elif i % 5 == 4:                       # few, after a -1
            n = max(some // 3, 1)
            places = torch.arange(chosen).roll(-1) if n < chosen else places
        ids[i, places[:n]] = torch.randperm(pool, generator=gen)[:n]
    if empty and rows > 2:
        ids[1] = -1                            # nothing, which the reference leaves out
    return ids
