"""From the logits of a step to the next token, on the device: what generate() does between two
steps, in the same CUDA graph.

A `DrawPlan` is what transformers' logits processors and stopping criteria ask for, in numbers; a
`Tail` computes it on memory that stays where it is, so that it can be captured once and replayed.
What differs from one generate() to the next (temperature, eos, the length from which a stop is
allowed) are numbers in that memory; only another kind of processing needs another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from ....spec.errors import LayerZeroError
from ..decoders.families import NotRecognised
from ..decoding.planning import Binder
from ..sampling import Draw

FOREVER = 1 << 62
MAX_K = 128                # tokens that are listed; above it, or without a top-k, lz.sample draws
Apply = Callable[["Tail", Sequence[Tensor], Tensor], Tensor]
# in the order in which lz.sample applies them, and transformers too
FILTERS = {stock.TemperatureLogitsWarper: "temperature", stock.TopKLogitsWarper: "top_k",
           stock.TopPLogitsWarper: "top_p", stock.MinPLogitsWarper: "min_p"}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# those that look at nothing but the scores are captured as they are
PURE = (*FILTERS, stock.TypicalLogitsWarper, stock.EpsilonLogitsWarper, stock.LogitNormalization,
        stock.InfNanRemoveLogitsProcessor)


@dataclass(frozen=True)
class Stage:
    """One logits processor. Stages with the same key differ in their numbers alone."""

    key: Hashable
    apply: Apply
    numbers: tuple[Tensor, ...] = ()


@dataclass
class DrawPlan:
    """The steps from logits to a token, and what happens to the token."""

    stages: list[Stage] = field(default_factory=list)
    sample: bool = False
    filters: dict[str, float] = field(default_factory=dict)  # of lz.sample; empty: of stages
    fused: bool = False                        # the draw is lz.sample's
    eos: tuple[int, ...] = ()
    pad: int | None = None                     # of rows that are finished; None: they go on

    @property
    def lists_top_k(self) -> bool:
        """Is the top-k so small that its tokens are listed (triton_top_k.py)?"""
        return 0 < self.filters.get("top_k", 0) <= MAX_K

    @property
    def key(self) -> Hashable:
        return (self.sample, self.fused, self.lists_top_k, len(self.eos), self.pad is not None,
                tuple((s.key, *(n.shape for n in s.numbers)) for s in self.stages))

    @property
    def penalized(self) -> bool:
        return any(s.apply is _penalize for s in self.stages)


def plan_draw(processors: Any, sample: bool, start: int, vocab: int, fused: bool) -> DrawPlan:
    """Plan the draw after `start` tokens. NotRecognised names a processor for the host only."""
    if type(processors) is not stock.LogitsProcessorList:
        raise NotRecognised(f"a {type(processors).__name__} of logits processors")
    plan, rest = DrawPlan(sample=sample, fused=fused and sample), list(processors)
    if plan.fused:
        plan.filters = _take_filters(rest)
    plan.stages = [_stage(p, start, vocab) for p in rest]
    return plan


def _take_filters(processors: list[Any]) -> dict[str, float]:
    """Remove the filters at the end of the list that lz.sample applies itself; return them."""
    filters: dict[str, float] = {}
    if processors and type(processors[-1]) is stock.LogitNormalization:
        processors.pop()                       # a draw does not see it
    if processors and type(processors[-1]) is Draw:
        return {**OFF, **processors.pop().filters}
    while processors and type(processors[-1]) in FILTERS:
        last = processors[-1]
        name, later = FILTERS[type(last)], list(FILTERS.values())
        if (getattr(last, "min_tokens_to_keep", 1) != 1
                or getattr(last, "filter_value", -torch.inf) != -torch.inf
                or any(later.index(n) <= later.index(name) for n in filters)):
            break
        filters[name] = getattr(processors.pop(), name)
    return {**OFF, **filters}


def _stage(processor: Any, start: int, vocab: int) -> Stage:
    kind = type(processor)
    if kind in (stock.MinLengthLogitsProcessor, stock.MinNewTokensLengthLogitsProcessor):
        until = (processor.min_length - start if kind is stock.MinLengthLogitsProcessor else
                 processor.prompt_length_to_skip + processor.min_new_tokens - start)
        return _forbid(processor.eos_token_id.tolist(), vocab, 0, until)
    if kind is stock.SuppressTokensLogitsProcessor:
        return _forbid(processor.suppress_tokens.tolist(), vocab)
    if kind is stock.SuppressTokensAtBeginLogitsProcessor:
        at = processor.begin_index - start
        return _forbid(processor.begin_suppress_tokens.tolist(), vocab, at, at + 1)
    if kind is stock.NoBadWordsLogitsProcessor and all(len(w) == 1
                                                       for w in processor.sequence_bias):
        return _forbid([w[0] for w in processor.sequence_bias], vocab)
    if kind is stock.RepetitionPenaltyLogitsProcessor and not processor.prompt_ignore_length:
        return Stage("repetition penalty", _penalize, (torch.tensor([processor.penalty]),))
    if kind is Draw:
        return Stage((kind, *sorted(processor.filters.items())),
                     lambda tail, numbers, scores: processor(None, scores))
    if kind in PURE and all(isinstance(v, (int, float, type(None)))
                            for v in vars(processor).values()):
        return Stage((kind, *sorted(vars(processor).items())),
                     lambda tail, numbers, scores: processor(None, scores))
    raise NotRecognised(f"the logits processor {kind.__name__}")


def _forbid(tokens: list[int], vocab: int, first: int = 0, end: int = FOREVER) -> Stage:
    """Returns the stage that forbids tokens from new token number `first` up to `end`."""
    known = [t for t in tokens if 0 <= t < vocab]
    if not known or end <= first or end <= 0:
        return Stage("nothing", lambda tail, numbers, scores: scores)
    return Stage("forbidden", _mask, (torch.tensor(known), torch.tensor([first, end])))


def _mask(tail: Tail, numbers: Sequence[Tensor], scores: Tensor) -> Tensor:
    tokens, (first, end) = numbers[0], numbers[1]
    now = (first <= tail.count) & (tail.count < end)
    selected = scores.index_select(1, tokens)
    return scores.index_copy(1, tokens, selected.masked_fill(now, -torch.inf))


def _penalize(tail: Tail, numbers: Sequence[Tensor], scores: Tensor) -> Tensor:
    penalty, = numbers
    assert tail.seen is not None
    changed = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(tail.seen[:, :scores.shape[1]], changed, scores)


class Tail:
    """Chooses and keeps the tokens of one batch; the step reads the next one from `step_input`.

    `log` has a row for every new token; `count` says how many there are, `unfinished` which rows of
    the batch still go on.
    """

    def __init__(self, plan: DrawPlan, step_input: Tensor, vocab: int, capacity: int, bind: Binder,
                 kernels: Any = None) -> None:
        batch, device = len(step_input), step_input.device
        self.plan, self.step_input, self._kernels = plan, step_input, kernels
        self.log = torch.zeros((capacity, batch), dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.before = 0                        # tokens that another tail has counted
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        self.seen = (torch.zeros((batch, vocab + 1), dtype=torch.bool, device=device)
                     if plan.penalized else None)
        self._eos = torch.zeros(len(plan.eos), dtype=torch.int64, device=device)
        self._pad = torch.zeros(1, dtype=torch.int64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)        # of the log
        # nothing here waits for the device: the prompt may still be on its way
        self._numbers = [[n.clone().to(device, non_blocking=True) for n in s.numbers]
                         for s in plan.stages]
        self._bind, self._samplers = bind, dict[torch.dtype, Callable[..., Tensor]]()
        if plan.fused:
            acc_dtype = torch.float32 if device.type == "mps" else torch.float64
            self._uniforms = torch.zeros(batch, dtype=acc_dtype, device=device)
            self._filters = {name: torch.full((batch,), value, device=device)
                             for name, value in OFF.items()}
            rows = {f"{name}_rows": value for name, value in self._filters.items()}
            self._rows = {**rows, "uniforms": self._uniforms}

    def start(self, plan: DrawPlan, before: int, unfinished: Tensor | None,
              seen: Tensor | None) -> None:
        """Begin another generate(), or go on after the `before` tokens of another tail."""
        self.plan, self.before = plan, before
        self.count.fill_(before)
        self._row.zero_()
        self.unfinished.fill_(True) if unfinished is None else self.unfinished.copy_(unfinished)
        if self.seen is not None and seen is not None:
            self.seen.copy_(seen)
        self._eos.copy_(torch.tensor(plan.eos, dtype=torch.int64), non_blocking=True)
        self._pad.fill_(plan.pad or 0)
        for buffer, stage in zip(self._numbers, plan.stages):
            for number, value in zip(buffer, stage.numbers):
                number.copy_(value, non_blocking=True)
        for name, chosen in plan.filters.items():
            self._filters[name].fill_(chosen)

    def rows(self, issued: int) -> int:
        """Returns how many rows of the log are written after `issued` tokens in all."""
        return issued - self.before

    def __call__(self, logits: Tensor) -> None:
        """Choose the next token from logits (batch, vocab), for the log and for `step_input`."""
        plan, scores = self.plan, logits.contiguous()
        if plan.stages or (plan.sample and not plan.fused):
            scores = logits.float()
        for stage, numbers in zip(plan.stages, self._numbers):
            scores = stage.apply(self, numbers, scores)
        if self._kernels is not None:
            self._kernels.append(scores if not plan.sample else self._draw(scores), self._eos,
                                 self._pad if plan.pad is not None else None, self.unfinished,
                                 self.count, self._row, self.log, self.step_input)
        else:
            self._append(self._draw(scores))
        if self.seen is not None:
            self.seen.scatter_(1, self.step_input, True)

    def _draw(self, scores: Tensor) -> Tensor:
        if not self.plan.sample:
            return torch.argmax(scores, dim=-1)
        if not self.plan.fused:                # as transformers does it: a seed gives its tokens
            return torch.multinomial(torch.softmax(scores, dim=-1), 1).squeeze(1)
        if self.plan.lists_top_k and self._kernels is not None:
            self._uniforms.uniform_()
            return self._kernels.draw(scores, *self._rows.values())  # type: ignore[no-any-return]
        run = self._samplers.get(scores.dtype)
        if run is None:                        # at the first call, which is not captured
            run = self._samplers[scores.dtype] = _sampler(self._bind, scores, self._rows)
        self._uniforms.uniform_()
        return run(scores, *self._rows.values())

    def _append(self, token: Tensor) -> None:
        if self.plan.pad is not None:
            token = torch.where(self.unfinished, token, self._pad)
        self.log.index_copy_(0, self._row, token[None])
        self.step_input.copy_(token.clamp(min=0)[:, None])          # -1: none could be drawn
        if self.plan.eos:
            self.unfinished.logical_and_(torch.isin(token, self._eos, invert=True))
        self.count.add_(1)
        self._row.add_(1)


def _sampler(bind: Binder, logits: Tensor, rows: dict[str, Tensor]) -> Callable[..., Tensor]:
    """Bind lz.sample, to a kernel that does not sort where there is one."""
    for kernel in ("cuda.sample", "triton.sample") if logits.is_cuda else ():
        with suppress(LayerZeroError):         # not here, or not allowed
            return bind("draw", "sample", logits, **rows, backend=kernel)
    return bind("draw", "sample", logits, **rows)


def seen_tokens(input_ids: Tensor, vocab: int) -> Tensor:
    """Returns which tokens a prompt has, (batch, vocab + 1): ids beyond the logits share one."""
    seen = torch.zeros((len(input_ids), vocab + 1), dtype=torch.bool, device=input_ids.device)
    return seen.scatter_(1, input_ids.clamp(max=vocab), True)
