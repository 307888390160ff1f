"""Rounds of speculation without the host: drafts, rows, what is accepted and where the next round
begins are one CUDA graph, and several rounds are enqueued ahead.

A round and a plain step are two graphs over the same state (round_state.py), so that either can
follow the other without a wait. The host reads a row of the log when its round is finished: its
tokens go to stopping criteria and streamers in order. Rounds beyond the last token are dropped.
Without a CUDA device the same steps run one by one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ....dispatch.background import compiling
from ....machine import faults
from ....operate import graphs
from ....spec.errors import NoKernelFoundError
from ..decoders.families import NotRecognised
from ..decoding.accelerated import Accelerated
from ..decoding.cuda import persistent
from ..decoding.cuda.captured import COMPILE_SECONDS, FixedBuffers, Uncapturable
from ..decoding.cuda.captured_rows import FixedRows
from . import round_state
from .loop import copy_to_host
from .round_state import SLOTS, Inputs, RoundState, make_state
from .stops import Stops

# rounds that are enqueued beyond the one that is read: one takes longer than the host needs
AHEAD, AHEAD_ON_HOST = 1, 0
MAX_WANTED = 2048              # tokens that the first buffers have room for at most
Run = Callable[[], None]


class RowsOf:
    """The buffers of one model's cache and its steps of one row and of several."""

    def __init__(self, accelerated: Accelerated, buffers: FixedBuffers, count: int,
                 branches: int) -> None:
        self.accelerated, self.buffers, self.count = accelerated, buffers, count
        self.rows = FixedRows(accelerated.step(count), accelerated.parts, buffers, branches)
        self.inputs = Inputs(*self.rows.inputs, self.rows.depths)
        self.plain = Inputs(*buffers.inputs, self.rows.depths[:1])

    @property
    def room(self) -> int:
        """Returns how many tokens it can have: learned positions end somewhere."""
        return min(self.buffers.size, most_positions(self.accelerated))

    @staticmethod
    def of(accelerated: Accelerated, buffers: FixedBuffers, count: int,
           branches: int = 1) -> RowsOf:
        """Returns those of these buffers, made once."""
        key = "rows", count, branches
        known: RowsOf | None = buffers.loops.get(key)
        step = accelerated.step(count)
        if known is None or known.rows.step is not step:
            try:
                known = buffers.loops[key] = RowsOf(accelerated, buffers, count, branches)
            except NoKernelFoundError as e:
                raise Uncapturable(f"no kernel of its attention can be captured: {e}") from e
        return known


def most_positions(accelerated: Accelerated) -> int:
    parts = accelerated.parts
    return (1 << 62 if parts.positions is None
            else parts.positions.num_embeddings - parts.first_position)


def kernels(device: torch.device) -> Any:
    """Returns the steps of round_state.py, as kernels where Triton can compile them."""
    if device.type == "cuda":
        try:
            from . import triton_round
            return triton_round
        except ImportError:
            pass
    return round_state


class Round:
    """The graphs of a round and of a plain step, over the buffers of a model and its assistant."""

    def __init__(self, model: RowsOf, assistant: RowsOf | None) -> None:
        self.model, self.assistant = model, assistant
        self.branches, room = model.rows.branches, model.buffers.size + model.count
        pair, single = ((None, None) if assistant is None
                        else (assistant.inputs, assistant.plain))
        self.state: RoundState = make_state(room, model.plain, model.inputs, pair, single,
                                            self.branches)
        self._addresses = torch.tensor(
            [b.data_ptr() for pair in model.buffers.kv_buffers for b in pair],
            device=self.state.text.device)
        self._kernels = kernels(self.state.text.device)
        self._replays: dict[bool, Run] = {True: self._verify, False: self._plain}

    def _plain(self) -> None:
        self._kernels.accept(self.state, self.model.buffers._run()[:, -1])

    def _verify(self) -> None:
        state = self.state
        if self.assistant is None:
            self._kernels.lookup(state)
        else:
            logits = self.assistant.rows.run()[1:, 0]
            for number in range(1, self.model.count):
                if number > 1:
                    logits = self.assistant.buffers._run()[:, -1]
                self._kernels.choose(state, logits, number)
        self._kernels.accept(state, self.model.rows.run()[:, 0])
        if self.branches > 1:
            self._kernels.move_branch(state, self.model.buffers.kv_buffers, self._addresses)

    def capture(self, ids: Tensor) -> None:
        """Capture both, after the text `ids`. What they write comes after it."""
        if not self.state.text.is_cuda:
            return
        compiling.wait(COMPILE_SECONDS)
        for kind, run in ((True, self._verify), (False, self._plain)):
            self.state.start(ids)
            trial = graphs.attempt(run, overlap=True)
            if trial.problems:
                raise Uncapturable(f"a round cannot be captured: {trial.problems[0]}")
            self._replays[kind] = trial.graph.replay

    def __call__(self, speculates: bool) -> None:
        self._replays[speculates]()


class DeviceRounds:
    """One text, from its first new token on, as far as rounds on the device can go."""

    def __init__(self, speculation: Any, ids: Tensor, cache: DynamicCache, stops: Stops,
                 streamer: Any) -> None:
        self.of, self.stops, self.streamer, self.cache = speculation, stops, streamer, cache
        self.accelerated: Accelerated = speculation.rows.accelerated
        self.draft, self.pace = speculation.draft, speculation.pace
        self.ids = ids[0]                      # on the device, as far as `count`
        self.prompt, self.count = ids, ids.shape[1]
        self.new: list[int] = []               # tokens that were read since
        self.done = False
        self.cuda = ids.is_cuda
        self.ahead = AHEAD if self.cuda else AHEAD_ON_HOST
        self._flight: deque[tuple[bool, Tensor, Any]] = deque()
        self._issued = 0
        self._before: Any = None               # the event after the last round that was read
        self._round: Round | None = None
        # the tokens whose keys and values the assistant has; are there more than two others?
        self._known, self._behind = 0, False

    def run(self) -> tuple[Tensor, bool]:
        """Returns the text and whether it is finished; if not, something stands in the way."""
        try:
            self._enter()
            while not self.done:
                while not self.done and self._may_issue():
                    self._issue()
                if not self._flight:
                    self._enter()              # its buffers are full, or the assistant is behind
                    continue
                self._read()
        except NotRecognised as why:
            self.of.stats.uncaptured[str(why)] += 1
            if isinstance(why, Uncapturable):
                self.of.uncapturable = str(why)
        except _GaveUp:
            self._drop()
        except faults.FAULTS as error:
            self.accelerated.fault(error)
        finally:
            self._leave()
        return self._text()[None], self.done

    # Before the first round, and when the buffers are full.

    def _enter(self) -> None:
        """Take buffers and graphs for the rounds that follow the tokens read so far."""
        text = self._text()
        length, branches = len(text), self.draft.branches
        rows = branches * self.draft.count + 1
        self._leave()
        more = rows * (self.ahead + 2 + graphs.WARM_UPS)
        wanted = min(self.stops.most - length, MAX_WANTED) + more
        step = self.accelerated
        if length + more > min(map(most_positions, (step, *self.draft.steps))):
            raise NotRecognised("its learned positions end soon")
        assistant = self.draft.hold(text, more, wanted)
        refused = step.grow(self.cache)
        if refused or step._captured is None:
            raise NotRecognised(refused or "no graph of its step")
        key = "speculation", rows, branches, assistant is not None

        def capture(fixed: FixedBuffers, _: int) -> None:
            model, known = RowsOf.of(step, fixed, rows, branches), fixed.loops.get(key)
            if known is None or known.model is not model or known.assistant is not assistant:
                known = Round(model, assistant)
                known.capture(text)
                fixed.loops[key] = known

        fixed = step._captured.hold(step.step(1), self.cache, length - 1, new_tokens=more,
                                    wanted=wanted, capture=capture)
        self._round = fixed.loops[key]
        self._round.state.start(text)
        self._issued, self._before = 0, None
        self._known, self._behind = length - 2, False

    def _text(self) -> Tensor:
        """Returns the tokens that were read, on the device."""
        if self.new:
            new = torch.tensor(self.new, dtype=self.ids.dtype, device=self.ids.device)
            self.ids, self.new = torch.cat((self.ids, new)), []
        return self.ids

    def _leave(self) -> None:
        """Cut the caches to what they hold without the rounds that were not read."""
        self._flight.clear()
        if self._round is None:
            return
        for layer in self.cache.layers:
            layer.set_end(self.count - 1)
        for m in self._models():
            m.buffers.length = -1              # what the device counts is not known
        self.draft.leave(self._known)
        self._round = None

    def _drop(self) -> None:
        """Give up buffers whose step did: the host goes on after the last token that was read."""
        for m in self._models():
            if m.buffers.gave_up():
                persistent.report_timeout(m.accelerated.step(1))
                if m.accelerated._captured is not None:
                    m.accelerated._captured.drop(m.buffers)

    def _models(self) -> list[RowsOf]:
        assert self._round is not None
        return [m for m in (self._round.model, self._round.assistant) if m is not None]

    # The loop.

    def _may_issue(self) -> bool:
        if self._round is None or len(self._flight) > self.ahead:
            return False
        rows, speculates = self._round.model.count, self.pace.speculates()
        most = self.count + sum(rows if kind else 1 for kind, _, _ in self._flight)
        if most + rows > min(m.room for m in self._models()):
            return False                       # it might have no room
        if speculates and self._behind:
            return False                       # the assistant has to see the text first
        # those on their way will probably do
        expected = sum(self.pace.tokens if kind else 1 for kind, _, _ in self._flight)
        return self.count + expected < self.stops.most or not self._flight

    def _issue(self) -> None:
        assert self._round is not None
        kind = self.pace.speculates()
        row = self._round.state.log[self._issued % SLOTS]
        start = time.perf_counter()
        self._round(kind)
        self._issued += 1
        self._behind = self._behind or (not kind and self._round.assistant is not None)
        if not self.cuda:
            self._flight.append((kind, row.clone(), time.perf_counter() - start))
            return
        finished = torch.cuda.Event(enable_timing=True)
        finished.record()
        pinned, arrived = copy_to_host(row, finished)
        self._flight.append((kind, pinned, (finished, arrived)))

    def _read(self) -> None:
        """Read the oldest round: which of its tokens are wanted?"""
        kind, row, stamp = self._flight.popleft()
        if self.cuda:
            stamp[1].synchronize()
        if any(m.buffers.gave_up() for m in self._models()):
            raise _GaveUp
        drafted, new, *tokens = row.tolist()
        kept = 0
        for token in tokens[:new]:
            self.new.append(token)
            self.count += 1
            kept += 1
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.stops.ends(token, self.count, self._text):
                self.done = True
                break
        if kind:
            self._known = self.count - 2
        self.accelerated.served["captured"] += kept
        self.of.stats.add(kind, drafted, new - 1, kept)
        self.pace.add(kind, new, self._seconds(stamp))

    def _seconds(self, stamp: Any) -> float | None:
        """Returns the time of a round: on the device that since the round before has ended."""
        if not self.cuda:
            return float(stamp)
        before, self._before = self._before, stamp[0]
        return None if before is None else float(before.elapsed_time(stamp[0])) / 1e3


class _GaveUp(Exception):
    """A launch of a persistent step ended without a result."""

