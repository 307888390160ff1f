"""generate() of an accelerated model without its host: a token is chosen on the device and read by
the next step there.

`Generation` takes the place of `model.generate`. transformers prepares everything as ever, up to
the loop over tokens (`_sample`), which is ours where every part of it is known: processors and the
draw follow the step in one CUDA graph (drawing.py), several steps are enqueued ahead, and the host
looks at a token when it is finished, in order: stopping criteria first, then the streamer. Steps
beyond the last token are dropped and the cache is cut to what it would hold. Whatever is not known
is left to transformers' own loop, and counted with the reason.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import stopping_criteria as stock
from transformers.generation.utils import GENERATION_MODES_MAPPING

from ....machine import faults
from ....operate import graphs
from ....spec.event import Fallback
from ....world import events
from ..decoders.families import NotRecognised
from ..decoding import shared_prompt
from ..decoding.cuda import persistent
from ..decoding.cuda.captured import FixedBuffers, Uncapturable
from ..decoding.reduction import ON_DEVICE
from ..replacements import recipe_of
from ..sampling import with_draw
from .drawing import Tail, plan_draw, seen_tokens

# steps that are enqueued beyond the one whose token is looked at; without a device none runs ahead
AHEAD, AHEAD_ON_HOST = 3, 0
MAX_CAPACITY = 2048        # tokens that the first buffers have room for at most
# arguments of the model that the loop makes itself, or that only the prompt needs
SERVED_ARGUMENTS = {"past_key_values", "attention_mask", "position_ids", "use_cache",
                    "logits_to_keep", "inputs_embeds", "cache_position"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Generation:
    """Takes the place of `model.generate`, whose decode step is `step`.

    transformers asks the class of a model for its loop. So generate() is called on a twin: another
    object with the same attributes, literally, whose class has our loop.
    """

    is_decode_step = True                      # for Reduce: a copy of the model does not have it

    def __init__(self, model: Any, step: Any) -> None:
        self.model, self.step = model, step
        self._twin: Any = None
        functools.update_wrapper(self, type(model).generate.__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if self.step.broken or any(getattr(model, name) for name in _HOOKS):
            return type(model).generate(model, *args, **kwargs)        # a hook gets the model
        twin = self._twin
        if twin is None or type(twin).__base__ is not type(model):
            self._twin = twin = self._make_twin()
        return type(model).generate(twin, *args, **kwargs)

    def _make_twin(self) -> Any:
        kind: Any = type(self.model)
        model = self.model

        def method(name: str) -> Callable[..., Any]:
            """Return the model's own method, bound to the model instead of the twin."""
            @functools.wraps(getattr(kind, name))
            def own(twin: Any, *args: Any, **kwargs: Any) -> Any:
                if name == "_sample":
                    return self._sample(getattr(kind, name), *args, **kwargs)
                # the loop of the model, whose prompt is computed once for all beams
                return getattr(kind, name)(twin if name == "_beam_search" else model, *args,
                                           **kwargs)

            return own

        loops = {name: method(name) for name in set(GENERATION_MODES_MAPPING.values())
                 if hasattr(kind, name)}
        twin_class: Any = type(kind)(kind.__name__, (kind,), {
            **loops, "_prefill": lambda twin, *args, **kwargs: self.prefill(*args, **kwargs),
            "__module__": kind.__module__, "__qualname__": kind.__qualname__})
        twin = object.__new__(twin_class)
        object.__setattr__(twin, "__dict__", vars(model))
        return twin

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the prompt, of rows that are repeated once."""
        return shared_prompt.prefill(self.step, type(self.model)._prefill.__get__(self.model),
                                     *args, **kwargs)

    def _sample(self, own: Callable[..., Any], input_ids: Tensor, logits_processor: Any,
                stopping_criteria: Any, generation_config: Any, synced_gpus: bool = False,
                streamer: Any = None, **model_kwargs: Any) -> Any:
        processors = logits_processor
        if recipe_of(self.model) is not None:  # lz.patch(model, only="sampling")
            processors = with_draw(logits_processor, generation_config)
        try:
            loop = _Loop(self.step, input_ids, processors, stopping_criteria, generation_config,
                         synced_gpus, streamer, model_kwargs)
        except NotRecognised as why:
            self.step.generated[str(why)] += 1
            return own(self._twin, input_ids, logits_processor=logits_processor,
                       stopping_criteria=stopping_criteria, generation_config=generation_config,
                       synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        self.step.generated[ON_DEVICE] += 1
        return loop.run(self.prefill)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has the generate of its class."""


class _Loop:
    """One generate(), from the prompt to the last token."""

    def __init__(self, step: Any, input_ids: Tensor, processors: Any, criteria: Any, config: Any,
                 synced_gpus: bool, streamer: Any, kwargs: dict[str, Any]) -> None:
        self.step, self.model, self.input_ids = step, step.model, input_ids
        self.config, self.streamer, self.kwargs = config, streamer, kwargs
        self.batch, self.start = input_ids.shape
        self.cuda = input_ids.is_cuda
        self._check(synced_gpus)
        self._read(criteria)
        self.vocab = step.parts.head.module.weight.shape[0]
        self.plan = plan_draw(processors, bool(config.do_sample), self.start, self.vocab,
                              fused=draws_without_sort(input_ids))
        eos = [t for c in self.eos for t in c.eos_token_id.tolist()]
        self.plan.eos = tuple(dict.fromkeys(eos))
        if self.padded:
            if config._pad_token_tensor is None:
                raise NotRecognised("rows that end and no token to pad them with")
            self.plan.pad = int(config._pad_token_tensor)
        # A row that the user's own criterion ends has to be padded from the next token on.
        late = self.batch == 1 or not self.others
        self.ahead = (AHEAD if self.cuda else AHEAD_ON_HOST) if late else 0
        self.tail: Tail | None = None
        self.logs: list[Tensor] = []           # tokens of tails that were left behind
        self.once: Callable[[], None] | None = None            # one step, where it is captured
        self.fixed: FixedBuffers | None = None
        self.issued, self.accepted = 0, 0      # tokens enqueued; and looked at
        self.running = [True] * self.batch
        self.slots: deque[tuple[Tensor, Any]] = deque()        # tokens on their way to the host

    def _check(self, synced_gpus: bool) -> None:
        """Raise NotRecognised, before the prompt is computed, if this loop cannot be served."""
        config, step, ids = self.config, self.step, self.input_ids
        extra = [name for name in ("output_scores", "output_logits", "output_attentions",
                                   "output_hidden_states") if getattr(config, name, False)]
        if extra and config.return_dict_in_generate:
            raise NotRecognised(f"{extra[0]} is asked for")
        if synced_gpus or config.is_assistant or not self.kwargs.get("use_cache"):
            raise NotRecognised("synced_gpus" if synced_gpus else "it is an assistant"
                                if config.is_assistant else "no cache")
        more = [name for name, value in self.kwargs.items()
                if name not in SERVED_ARGUMENTS and value is not None]
        if more:
            raise NotRecognised(f"the argument {more[0]}")
        if ids.device != step.parts.weights.device or step.parts.by_axes:
            raise NotRecognised("positions of several axes" if step.parts.by_axes else
                                f"input_ids on {ids.device}")
        if step.model.forward is not step:
            raise NotRecognised("a forward of its own")
        step._check(self.kwargs.get("past_key_values"), 0, {})
        mask = self.kwargs.get("attention_mask")
        if mask is not None and not bool((mask == 1).all()):
            raise NotRecognised("padding")
        positions = self.kwargs.get("position_ids")
        if positions is not None and (positions.dim() != 2
                                      or bool((positions[:, -1] != positions[0, -1]).any())):
            raise NotRecognised("positions that differ from row to row")
        # asked before the prompt is computed: nobody waits for it then
        self.after = None if positions is None else int(positions[0, -1]) + 1

    def _read(self, criteria: Any) -> None:
        if type(criteria) is not stock.StoppingCriteriaList:
            raise NotRecognised(f"a {type(criteria).__name__} of stopping criteria")
        by_kind: dict[Any, list[Any]] = {}
        for criterion in criteria:
            by_kind.setdefault(type(criterion), []).append(criterion)
        lengths = [c.max_length for c in by_kind.pop(stock.MaxLengthCriteria, [])]
        self.most = max(1, min(lengths) - self.start) if lengths else 1 << 62
        self.eos = by_kind.pop(stock.EosTokenCriteria, [])
        self.times = by_kind.pop(stock.MaxTimeCriteria, [])
        self.padded = any(hasattr(c, "eos_token_id") for c in criteria)
        self.others = [c for c in criteria if type(c) in by_kind]
        if any(kind is stock.ConfidenceCriteria for kind in by_kind):
            raise NotRecognised("a criterion that needs the scores")

    # The loop.

    def run(self, prefill: Callable[..., Any]) -> Any:
        model = self.model
        outputs = prefill(self.input_ids, self.config, self.kwargs, is_first_iteration=True)
        self.cache = outputs.past_key_values
        self.length = self.cache.get_seq_length()
        self.shift = 0 if self.after is None else self.after - self.length
        logits = outputs.logits[:, -1]
        del outputs
        with model._optimize_model_for_decode():
            try:
                self._first(logits)
                while not self._is_finished():
                    while (self.issued < self.most and self.issued - self.accepted
                           <= (0 if self.once is None else self.ahead)):
                        self._issue()
                    self._read_oldest()
            finally:                           # also where a criterion or the streamer raised
                self._trim_cache()
        if self.streamer is not None:
            self.streamer.end()
        assert self.tail is not None
        new = torch.cat([*self.logs, self.tail.log])[:self.accepted].t()
        sequences = torch.cat([self.input_ids, new], dim=1)
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=self.cache)
        return sequences

    def _is_finished(self) -> bool:
        return self.accepted > 0 and (self.accepted >= self.most or not any(self.running))

    def _first(self, logits: Tensor) -> None:
        """Choose the token after the prompt. It waits for no graph; a streamer gets it at once."""
        seen = seen_tokens(self.input_ids, self.vocab) if self.plan.penalized else None
        try:
            self._draw_first(logits, seen)
        except faults.FAULTS as error:         # of our kernels, where they do not compile
            kind = faults.classify(error)
            if (isinstance(error, faults.PASSED_ON) or kind in ("sticky", "memory")
                    or not _kernels.pop("here", None)):
                raise
            events.emit(Fallback("draw", "layerzero", type(self.model).__name__,
                                 faults.reason_of(error, kind)))
            self._draw_first(logits, seen)
        self._copy_to_host()
        if self.streamer is not None:
            self._read_oldest()

    def _draw_first(self, logits: Tensor, seen: Tensor | None) -> None:
        self.tail = self._uncaptured_tail(1)
        self.tail.start(self.plan, 0, None, seen)
        self.tail(logits)

    def _uncaptured_tail(self, capacity: int) -> Tail:
        """Make a tail for steps that are not captured."""
        step_input = torch.zeros((self.batch, 1), dtype=torch.int64, device=self.input_ids.device)
        return Tail(self.plan, step_input, self.vocab, capacity, self.step.step(self.batch).bind,
                    device_kernels() if self.cuda else None)

    def _enter_graph(self, before: Tail) -> None:
        """Take buffers and a graph for the next steps, or none where the step cannot be captured,
        and go on in them where the tail `before` ended."""
        self.once, self.fixed, tail = None, None, None
        captured = self.step._captured
        if captured is not None:
            try:
                tail = self._capture()
            except NotRecognised as why:
                self.step.declined[f"served without a graph: {why}"] += 1
                if isinstance(why, Uncapturable):              # nor will it be the next time
                    captured.refused[self.plan.key] = str(why)
            except faults.OUT_OF_MEMORY as error:
                self.step.declined[f"served without a graph: {type(error).__name__}"] += 1
        if tail is None:
            tail = self._uncaptured_tail(min(self.most, MAX_CAPACITY))
        self.logs.append(before.log[:before.rows(self.issued)].clone())
        tail.start(self.plan, self.issued, before.unfinished, before.seen)
        tail.step_input.copy_(before.step_input)
        self.tail = tail

    def _capture(self) -> Tail:
        refused = (self.step._captured.refused.get(self.plan.key, "")
                   or self.step.grow(self.cache))
        if refused:
            raise NotRecognised(refused)
        if self.shift and self.step.parts.positions is not None:
            raise NotRecognised("learned positions that are moved")
        step, plan = self.step.step(self.batch), self.plan
        key = ("loop", plan.key)
        wanted = min(self.most - self.issued, MAX_CAPACITY) + graphs.WARM_UPS + 1

        def capture(fixed: FixedBuffers, length: int) -> None:
            tail = fixed.loops.get(key)
            if tail is None:
                tail = fixed.loops[key] = Tail(
                    plan, fixed.step_input, self.vocab, fixed.size, step.bind,
                    device_kernels() if self.cuda else None)
                tail.start(plan, 0, None, None)
            fixed.capture(key, tail, length)

        length = self.length + max(0, self.issued - 1)
        fixed = self.step._captured.hold(step, self.cache, length, self.shift,
                                         new_tokens=graphs.WARM_UPS + 2, wanted=wanted,
                                         capture=capture)
        tail: Tail = fixed.loops[key]
        fixed.go_to(length)
        self.fixed, self.once = fixed, fixed.step_then(key, tail)
        return tail

    def _issue(self) -> None:
        """Enqueue one more step, which gives the token after the last one issued."""
        assert self.tail is not None
        length = self.length + self.issued - 1             # of the cache, before the step
        if self.fixed is not None and length >= self.fixed.size:
            self._set_cache_length(length)
            self._enter_graph(self.tail)
        elif self.fixed is None and self.tail.rows(self.issued) == len(self.tail.log):
            self._enter_graph(self.tail)
        if self.once is not None:
            try:
                self.once()
                self._copy_to_host()
                return
            except faults.FAULTS as error:
                self.step.fault(error)
                self._set_cache_length(length)  # what it had written is written again
                self.once = self.fixed = None
        ids = self.tail.step_input
        position = torch.full_like(ids, length + self.shift)
        out = self.model(input_ids=ids, past_key_values=self.cache, position_ids=position,
                         use_cache=True, return_dict=True)
        self.tail(out.logits[:, -1])
        self._copy_to_host()

    def _set_cache_length(self, length: int) -> None:
        for layer in self.cache.layers:
            layer.set_end(length)

    def _copy_to_host(self) -> None:
        """Start copying the newest token to the host on a side stream, to be read later."""
        assert self.tail is not None
        row = self.tail.log[self.tail.rows(self.issued)]
        self.issued += 1
        if not self.cuda:
            self.slots.append((row.clone(), None))
            return
        chosen = torch.cuda.Event()
        chosen.record()
        self.slots.append(copy_to_host(row, chosen))

    def _read_oldest(self) -> None:
        """Read the oldest token that was not read yet: does it end a row?"""
        tokens, arrived = self.slots.popleft()
        if arrived is not None:
            arrived.synchronize()
        assert self.tail is not None
        if (self.fixed is not None and self.fixed.gave_up()
                and self.accepted >= self.tail.before):        # not a token of the prompt
            self._resume_by_kernels()
            return
        self.accepted += 1
        for row, token in enumerate(tokens.tolist()):
            if token < 0:
                raise RuntimeError(f"no token can be drawn for row {row} after "
                                   f"{self.start + self.accepted - 1} tokens: its scores are all "
                                   "-inf or NaN; look at the logits processors and the weights")
            if token in self.plan.eos:
                self.running[row] = False
        if any(time.time() - c.initial_timestamp > c.max_time for c in self.times):
            self.running = [False] * self.batch
        if self.others:
            self._check_criteria()
        if self.streamer is not None:
            self.streamer.put(tokens)

    def _resume_by_kernels(self) -> None:
        """Goes on with the graph of kernels after the last token seen: the persistent step gave
        up."""
        assert self.tail is not None and self.fixed is not None
        persistent.report_timeout(self.step.step(self.batch))
        self.slots.clear()
        self.issued, tail = self.accepted, self.tail
        new = torch.cat([*self.logs, tail.log[:tail.rows(self.issued)]])
        tail.step_input.copy_(new[-1][:, None])
        tail.unfinished.copy_(torch.tensor(self.running))
        if tail.seen is not None:
            tail.seen.copy_(seen_tokens(torch.cat([self.input_ids, new.t()], dim=1), self.vocab))
        self._set_cache_length(self.length + self.issued - 1)
        self.step._captured.drop(self.fixed)
        self._enter_graph(tail)

    def _check_criteria(self) -> None:
        """Call the user's own stopping criteria with the tokens so far, on the device."""
        assert self.tail is not None

        def done() -> list[bool]:
            new = torch.cat([*self.logs, self.tail.log])[:self.accepted].t()  # type: ignore[union-attr]
            ids = torch.cat([self.input_ids, new], dim=1)
            return stock.StoppingCriteriaList(self.others)(ids, None).tolist()  # type: ignore[no-any-return]

        if not self.cuda:
            ended = done()
        else:
            with torch.cuda.stream(_side_stream(self.input_ids.device)):
                ended = done()
        if any(ended):
            self.running = [r and not e for r, e in zip(self.running, ended)]
            if self.batch > 1:
                self.tail.unfinished.logical_and_(
                    torch.tensor(self.running, device=self.input_ids.device))

    def _trim_cache(self) -> None:
        """Cut the cache to what it holds without the steps whose tokens were not read."""
        if self.fixed is not None and self.issued and not self.step.broken:
            steps = max(0, self.accepted - 1)
            self._set_cache_length(self.length + steps)
            self.fixed.length = -1
            self.step.served["captured"] += steps
        elif self.fixed is None:
            for layer in self.cache.layers:    # an interrupted step has reached some of them
                over = layer.get_seq_length() - self.length - max(0, self.accepted - 1)
                if over > 0:
                    layer.crop(-over)


def draws_without_sort(like: Tensor) -> bool:
    """Is a sample drawn by lz.sample? On the host transformers' own draw stays, token for token:
    lz.sample would gain little there."""
    return like.is_cuda


_kernels: dict[str, Any] = {}                  # "here": those of triton_draw.py, or None


def device_kernels() -> Any:
    """Returns the kernels of triton_draw.py; None where Triton cannot compile them."""
    if not _kernels:
        try:
            from . import triton_draw
            _kernels["here"] = triton_draw
        except ImportError:
            _kernels["here"] = None
        _kernels["known"] = True
    return _kernels.get("here")


@functools.lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def copy_to_host(row: Tensor, ready: Any) -> tuple[Tensor, Any]:
    """Start copying a row on a side stream once the event `ready` has come. Returns the copy, and
    the event after which it can be read."""
    side = _side_stream(row.device)
    side.wait_event(ready)
    with torch.cuda.stream(side):
        pinned = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        pinned.copy_(row, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return pinned, arrived
