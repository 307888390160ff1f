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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

from ..decoders.families import NotRecognised
from ..decoding.accelerated import Accelerated
from .drafts import Draft, Lookup
from .pace import Pace
from .rounds import DeviceRounds
from .stops import Stops
from .verified_rows import Rows

__all__ = ["DRAFTED", "LOOKED_UP", "PROMPT_LOOKUP", "Draft", "Lookup", "Speculation",
           "SpeculationStats"]
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
    uncaptured: Counter[str] = field(default_factory=Counter)  # texts, by why rounds were not

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
        return words + "".join(f"; rounds not captured in {n} texts: {why}"
                               for why, n in self.uncaptured.items())


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
