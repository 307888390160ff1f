"""Speculation: what a small model, or the text so far, proposes is verified several tokens at once.

`Speculation` takes the place of `model.generate`. A round feeds the last token and the proposed
ones through the decode step of as many rows: every product reads its weights once for all of them,
and only the attention knows that the rows are one after the other (`RowsKV`), or a tree. What
the model would have chosen is kept, up to the first proposal that differs; so greedy tokens are
those without speculation. Where the step is captured, whole rounds are (rounds.py); trees, logits
processors and models without a graph go round by round here. Where rounds take longer than the
tokens they give are worth, plain steps go on (pace.py). Whatever is no greedy generation of one
text goes the way it went before, and is counted with the reason.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from ....models.speculative import tree_attention_mask, tree_positions
from ....plan.table import Span
from ..decoders.families import NotRecognised
from ..decoding.accelerated import Accelerated
from ..decoding.cuda.captured import FixedBuffers, Uncapturable
from ..decoding.cuda.captured_rows import CapturedRows
from ..decoding.decode_step import ANY, DecodeStep
from ..decoding.growing_cache import make_growing
from .pace import Pace
from .round_state import LONGEST_MATCH
from .rounds import DeviceRounds, RowsOf
from .stops import Stops

PROMPT_LOOKUP = "prompt_lookup"
DRAFTED = 4                                    # tokens that a model proposes in a round
LOOKED_UP = 7                                  # and the text so far: products take 8 rows at once
# what a call may hold: the loop makes the rest by itself
SERVED_ARGUMENTS = {"past_key_values", "attention_mask", "position_ids", "use_cache",
                    "logits_to_keep", "cache_position"}


@dataclass
class SpeculationStats:
    """Counts what speculation did so far."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0                          # of the drafted ones
    tokens: int = 0                            # in all
    steps: int = 0                             # plain ones, in the place of rounds
    pace: Pace = field(default_factory=Pace, repr=False)

    def add(self, speculated: bool, drafted: int, accepted: int, tokens: int) -> None:
        self.tokens += tokens
        if not speculated:
            self.steps += 1
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted

    def __str__(self) -> str:
        if not self.rounds:
            return "no round yet"
        share = f"{self.accepted / self.drafted:.0%}" if self.drafted else "none"
        words = (f"{self.tokens} tokens in {self.rounds} rounds and {self.steps} plain steps, "
                 f"{share} of {self.drafted} drafted tokens accepted")
        pace = self.pace
        if pace.gain is not None:
            words += (f"; a round takes {pace.round_us:.0f} us and a step {pace.plain_us:.0f}: "
                      f"rounds are {pace.gain:.2f} times as fast")
        if pace.pauses:
            words += f"; plain steps took over {pace.pauses} times"
        return words


class AppendedRows:
    """Rows that were written to a cache, of which some stay."""

    def __init__(self, layers: list[Any], positions: list[int]) -> None:
        self._layers, self._positions = layers, positions

    def undo(self, keep: int = 0) -> None:
        """Take back all rows but the first `keep`."""
        for layer, position in zip(self._layers, self._positions):
            layer.set_end(position + keep)

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep these rows, in this order, and take back the others."""
        if list(nodes) != list(range(len(nodes))):
            for layer, position in zip(self._layers, self._positions):
                kept = torch.tensor(nodes, device=layer.keys.device) + position
                for buffer in (layer.key_buffer, layer.value_buffer):
                    buffer[:, position:position + len(nodes)] = buffer.index_select(1, kept)
        self.undo(len(nodes))


class RowsKV(AppendedRows):
    """Rows of a step that are tokens one after the other, or nodes of a tree, in one cache."""

    def __init__(self, step: DecodeStep, layers: list[Any], length: int, angles: Any,
                 parents: Tensor | None, runs: dict[Any, tuple[Any, Span]]) -> None:
        super().__init__(layers, [layer.reserve(step.batch) for layer in layers])
        self._step, self._rows, self._bound, self.angles = step, step.batch, runs, angles
        self._mask = () if parents is None else (tree_attention_mask(parents, length)[None, None],)

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        cache, position, rows = self._layers[layer], self._positions[layer], self._rows
        queries = qk.shape[2] - value.shape[2]
        cache.write(position, qk[:, :, queries:].transpose(0, 1), value.transpose(0, 1))
        keys, values = cache.view(0, position + rows)
        query = qk[:, :, :queries].permute(1, 2, 0, 3)           # (1, heads, rows, dim)
        out = self._run(layer, query, keys, values)(query, keys, values, *self._mask)
        return out.permute(2, 0, 1, 3).reshape(rows, 1, -1)  # type: ignore[no-any-return]

    def _run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Any:
        bound, length = self._step.layers[layer], keys.shape[2]
        key = (self._step, bound.heads, bound.kv_heads, bound.head_dim, bound.scale, bound.softcap,
               len(self._mask))
        run, span = self._bound.get(key, (None, ANY))
        if run is None or not span.covers(length):
            causal = {} if self._mask else {"is_causal": True, "causal_align": "bottom_right"}
            run = self._step.bind("attention, verified", "attention", query, keys, values,
                                  *(self._mask or (None,)), scale=bound.scale,
                                  softcap=bound.softcap, **causal)
            span = dict(run.row.sizes).get("seq_k", ANY)  # type: ignore[attr-defined]
            self._bound[key] = run, span
        return run


class Rows:
    """Several tokens of one text through the decode step of an accelerated model."""

    def __init__(self, accelerated: Accelerated) -> None:
        self.accelerated, parts = accelerated, accelerated.parts
        if parts.head is None:
            raise NotRecognised("the decoder with the step has no head: another model feeds it")
        if any(layer.window for layer in parts.layers):
            raise NotRecognised("its layers have a window, out of which nothing comes back")
        if parts.uncapturable_feature:
            raise NotRecognised(f"it has {parts.uncapturable_feature}")
        self._runs: dict[Any, tuple[Any, Span]] = {}
        self.captured = (None if accelerated._captured is None
                         else CapturedRows(accelerated._captured, parts))
        self.declined: Counter[str] = Counter()

    def __call__(self, tokens: Tensor, cache: DynamicCache,
                 parents: Tensor | None = None) -> tuple[Tensor, AppendedRows]:
        """Returns logits (rows, vocab) of tokens (rows,) after those in the cache, which keeps them
        all until the KV state says otherwise."""
        of, parts, rows = self.accelerated, self.accelerated.parts, len(tokens)
        of._check(cache, 0, {})
        refused = make_growing(cache, of._windows)
        if refused:
            raise NotRecognised(refused)
        length = cache.get_seq_length()
        order = (torch.arange(length, length + rows, device=tokens.device) if parents is None
                 else tree_positions(parents, length).to(tokens.device))
        step, positions = of.step(rows), order[:, None]
        if self.captured is not None and of._captured is not None and parents is None:
            try:
                out = self.captured(of.step(1), step, tokens, cache, length)
                return out, AppendedRows(cache.layers, [length] * len(cache.layers))
            except NotRecognised as why:
                self.declined[f"verified without a graph: {why}"] += 1
                self.captured = None if isinstance(why, Uncapturable) else self.captured
        x = parts.first_input(parts.embedded(tokens[:, None]), positions)
        kv = RowsKV(step, cache.layers, length, parts.angles_at(positions), parents, self._runs)
        try:
            return step(x, kv.angles, kv)[:, 0], kv
        # passed on, an interrupt too: half a round must not stay in the cache
        except BaseException:
            kv.undo()
            raise


class Draft:
    """A small model that proposes what comes next, greedily."""

    def __init__(self, model: Any, accelerated: Accelerated | None, count: int) -> None:
        self.model, self.count = model, count
        self._rows = None if accelerated is None else Rows(accelerated)
        self._cache = DynamicCache(config=model.config)

    def begin(self) -> None:
        self._cache = DynamicCache(config=self.model.config)

    @property
    def on_device(self) -> bool:
        """Can its steps be a part of a captured round?"""
        return self._rows is not None and self._rows.accelerated._captured is not None

    @property
    def steps(self) -> tuple[Accelerated, ...]:
        """Returns the models that take part in a round."""
        return () if self._rows is None else (self._rows.accelerated,)

    def hold(self, text: Tensor, more: int, wanted: int) -> RowsOf:
        """Returns its steps in buffers that hold all of the text but the last two tokens, with room
        for `more`; NotRecognised where there are none."""
        assert self._rows is not None
        cache, of = self._cache, self._rows.accelerated
        end, known = max(1, len(text) - 2), cache.get_seq_length()
        if known > end:
            cache.crop(end - known)
        if known < end:
            self.model(text[None, known:end], past_key_values=cache, use_cache=True,
                       logits_to_keep=1)
        refused = of.grow(cache)
        if refused or of._captured is None:
            raise NotRecognised(refused or "no graph of the assistant's step")

        def make(fixed: FixedBuffers, _: int) -> None:
            RowsOf.of(of, fixed, 2)

        fixed = of._captured.hold(of.step(1), cache, end, new_tokens=more + 2, wanted=wanted + 2,
                                  capture=make)
        return RowsOf.of(of, fixed, 2)

    def leave(self, end: int) -> None:
        """After rounds in the buffers of `hold`: that many tokens are in its cache."""
        for layer in self._cache.layers:
            layer.set_end(max(1, end))

    def __call__(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Up to `most` tokens after `ids`, (tokens,)."""
        cache, proposed = self._cache, []
        cached_tokens = cache.get_seq_length()
        more = ids[cached_tokens:]
        for _ in range(min(self.count, most)):
            if self._rows is not None and 1 < len(more) <= self.count + 1 and cached_tokens:
                logits = self._rows(more, cache)[0][-1]
            else:
                logits = self.model(more[None], past_key_values=cache, use_cache=True,
                                    logits_to_keep=1).logits[0, -1]
            more = logits.argmax(-1, keepdim=True)
            proposed.append(more)
        return (torch.cat(proposed) if proposed else ids[:0]), None

    def accept(self, length: int) -> None:
        """Crops the draft's cache to a text of `length` tokens, the last of which may be new to
        it."""
        over = self._cache.get_seq_length() - (length - 1)
        if over > 0:
            self._cache.crop(-over)


class Lookup:
    """Drafts what followed the last tokens where they stood before: the longest match, the latest
    first. Two places that go on differently are a tree."""

    def __init__(self, count: int, branches: int = 1) -> None:
        self.count, self.branches = count, branches

    @property
    def on_device(self) -> bool:
        """Can the search be a part of a captured round?"""
        return self.branches == 1

    @property
    def steps(self) -> tuple[Accelerated, ...]:
        return ()

    def hold(self, text: Tensor, more: int, wanted: int) -> None:
        """Do nothing: the text is all it needs."""

    def leave(self, end: int) -> None:
        """Do nothing, likewise."""

    def begin(self) -> None:
        """Do nothing: no state is kept between texts."""

    def accept(self, length: int) -> None:
        """Do nothing: no state is kept between rounds."""

    def __call__(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        text, most = ids.tolist(), min(self.count, most)
        chains: list[list[int]] = []
        for size in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
            last = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start:start + size] == last:
                    after = text[start + size:]
                    # where the text ends it goes on as after the match
                    chain = [after[i % len(after)] for i in range(most)]
                    if chain and all(chain[0] != other[0] for other in chains):
                        chains.append(chain)
                    if len(chains) == self.branches:
                        break
            if chains:
                break
        tokens = torch.tensor([t for chain in chains for t in chain], dtype=ids.dtype,
                              device=ids.device)
        if len(chains) < 2:
            return tokens, None
        parents = [-1 if not i else at + i - 1 for at, chain in zip(
            _starts(chains), chains) for i in range(len(chain))]
        return tokens, torch.tensor(parents)


def _starts(chains: Sequence[Sequence[int]]) -> list[int]:
    starts = [0]
    for chain in chains[:-1]:
        starts.append(starts[-1] + len(chain))
    return starts


class Speculation:
    """Takes the place of `model.generate`."""

    is_decode_step = True                      # for Reduce: a copy of the model does not have it

    def __init__(self, model: Any, accelerated: Accelerated, draft: Draft | Lookup) -> None:
        self.model, self.rows, self.draft = model, Rows(accelerated), draft
        self.stats, self.declined = SpeculationStats(), Counter[str]()
        self.uncapturable = ""                 # why no round can be captured
        self._plain = vars(model).get("generate") or type(model).generate.__get__(model)
        functools.update_wrapper(self, type(model).generate.__get__(model))

    def undo(self) -> None:
        own = vars(self.model)
        if own.get("generate") is self:
            del own["generate"]
            if getattr(self._plain, "is_decode_step", False):  # what took its place before
                own["generate"] = self._plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = {name for name in ("custom_generate", "assistant_model", "synced_gpus", "tokenizer",
                                   "prompt_lookup_num_tokens", "assistant_early_exit")
                 if kwargs.get(name)}
        try:
            if known or len(args) > 1:
                raise NotRecognised(f"{', '.join(sorted(known)) or 'more than one argument'} "
                                    "is given")
            own = {n: v for n, v in kwargs.items() if n != "streamer"}
            # transformers prepares everything, and hands a loop of one's own no streamer
            loop = functools.partial(self._loop, kwargs.get("streamer"))
            return type(self.model).generate(self.model, *args, custom_generate=loop, **own)
        except NotRecognised as why:           # before the first token
            self.declined[str(why)] += 1
        return self._plain(*args, **kwargs)

    @torch.no_grad()
    def _loop(self, streamer: Any, model: Any, input_ids: Tensor, logits_processor: Any = None,
              stopping_criteria: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        config = generation_config
        refused = self._why_refused(input_ids, config, kwargs)
        if refused:
            raise NotRecognised(refused)
        cache, stops = kwargs["past_key_values"], Stops(stopping_criteria)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        logits = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        self.draft.begin()
        self.pace.begin()
        ids = self._chosen(input_ids, logits[0, -1:], logits_processor)
        done = self._stop_at(ids, ids.shape[1] - 1, stops, streamer) is not None
        self.stats.tokens += 1
        if not done and not logits_processor and self._on_device():
            ids, done = DeviceRounds(self, ids, cache, stops, streamer).run()
        while not done:
            ids, done = self._host_round(ids, cache, stops, streamer, logits_processor)
        if streamer is not None:
            streamer.end()
        if config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=ids, past_key_values=cache)
        return ids

    @property
    def pace(self) -> Pace:
        return self.stats.pace

    def _on_device(self) -> bool:
        """Can whole rounds be captured?"""
        return (type(self.draft) in (Draft, Lookup) and self.draft.on_device
                and self.rows.accelerated._captured is not None and not self.uncapturable)

    def _host_round(self, ids: Tensor, cache: DynamicCache, stops: Stops, streamer: Any,
                    processors: Any) -> tuple[Tensor, bool]:
        """One round or plain step. Returns the text with its tokens, and whether it ends."""
        start, before, parents = time.perf_counter(), ids.shape[1], None
        most, drafted = stops.most - before - 1, ids[0, :0]
        speculates = most > 0 and self.pace.speculates()
        if speculates:
            drafted, parents = self.draft(ids[0], most)
        new = self._verify(ids, drafted, parents, cache, processors)
        ids, given = torch.cat((ids, new[None]), 1), len(new)
        stop = self._stop_at(ids, before, stops, streamer)
        if stop is not None:                   # what came after it is dropped, in the cache too
            cache.crop(-(ids.shape[1] - stop))
            ids = ids[:, :stop]
        self.stats.add(speculates, len(drafted), given - 1, ids.shape[1] - before)
        self.pace.add(speculates, given, time.perf_counter() - start)
        self.draft.accept(ids.shape[1])
        return ids, stop is not None

    def _verify(self, ids: Tensor, drafted: Tensor, parents: Tensor | None, cache: DynamicCache,
                processors: Any) -> Tensor:
        try:
            return self._round(ids, drafted, parents, cache, processors)
        except NotRecognised as why:           # a hook came, weights were moved: one by the model
            self.declined[str(why)] += 1
            return self._round(ids, drafted[:0], None, cache, processors)

    def _round(self, ids: Tensor, drafted: Tensor, parents: Tensor | None, cache: DynamicCache,
               processors: Any) -> Tensor:
        """Returns the tokens that follow: one, and those of the draft that the model chose too."""
        tokens = torch.cat((ids[0, -1:], drafted))
        tree = None if parents is None else torch.cat((torch.tensor([-1]), parents + 1))
        if len(tokens) == 1:
            logits = self.model(tokens[None], past_key_values=cache, use_cache=True,
                                logits_to_keep=1).logits[0]
            return self._chosen(ids, logits, processors)[0, -1:]
        logits, kv = self.rows(tokens, cache, tree)
        if processors:
            logits = self._process_logits(ids, drafted, tree, logits, processors)
        best, proposed = logits.argmax(-1).tolist(), tokens.tolist()
        above = [i - 1 for i in range(len(proposed))] if tree is None else tree.tolist()
        at, path = 0, [0]
        while True:
            node = next((i for i in range(at + 1, len(proposed)) if above[i] == at
                         and proposed[i] == best[at]), None)
            if node is None:
                break
            at = node
            path.append(at)
        kv.keep(path)
        return torch.tensor([best[i] for i in path], dtype=ids.dtype, device=ids.device)

    @staticmethod
    def _process_logits(ids: Tensor, drafted: Tensor, tree: Tensor | None, logits: Tensor,
                        processors: Any) -> Tensor:
        """Processes the logits of each row after the tokens that come before it."""
        above = list(range(-1, len(logits) - 1)) if tree is None else tree.tolist()
        scores, texts = [], [ids]
        for i, row in enumerate(logits.float()):
            if i:
                texts.append(torch.cat((texts[above[i]], drafted[None, i - 1:i]), 1))
            scores.append(processors(texts[i], row[None]))
        return torch.cat(scores)

    @staticmethod
    def _chosen(ids: Tensor, logits: Tensor, processors: Any) -> Tensor:
        logits = processors(ids, logits.float()) if processors else logits
        return torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)

    @staticmethod
    def _stop_at(ids: Tensor, before: int, stops: Stops, streamer: Any) -> int | None:
        """Returns the length at which generation ends; every token is shown in its turn."""
        for end, token in enumerate(ids[0, before:].tolist(), before + 1):
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if stops.ends(token, end, lambda end=end: ids[0, :end]):  # type: ignore[misc]
                return end
        return None

    def _why_refused(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> str:
        """Returns why this call is left to transformers, or nothing."""
        mode = config.get_generation_mode(None)
        if mode != "greedy_search":
            return f"its mode is {getattr(mode, 'value', mode)}"
        if len(ids) != 1:
            return "more than one text"
        if any(getattr(config, f"output_{n}", False) for n in ("scores", "logits", "attentions",
                                                               "hidden_states")):
            return "more than tokens is asked for"
        unknown = sorted(name for name, value in kwargs.items()
                         if value is not None and name not in SERVED_ARGUMENTS)
        if unknown:
            return f"the argument {', '.join(unknown)}"
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if cache is None or type(cache) is not DynamicCache or cache.get_seq_length():
            return "a cache of another kind, or that holds tokens already"
        if mask is not None and not (isinstance(mask, Tensor) and bool(mask.all())):
            return "a mask that hides tokens"
        try:
            self.rows.accelerated._check(cache, 0, {})
        except NotRecognised as why:
            return str(why)
        return ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model has the generate of its class."""
        return type(self.model).generate
