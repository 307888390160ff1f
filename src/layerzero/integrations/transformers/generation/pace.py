"""Whether speculation is worth its time: rounds and plain steps are timed as they run.

A round gives more tokens than a step, and takes longer; which is faster depends on how many drafts
are accepted, so on the text. Rounds come first, then a few plain steps, and then the faster of the
two. Where that is plain steps, rounds are tried again after a pause, which is longer each time.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TRIAL = 6                  # rounds of a trial
STEPS = 6                  # plain steps whose time is measured
WINDOW = 24                # rounds that are looked at
PAUSE, MAX_PAUSE = 48, 384     # plain steps before the next trial


class Pace:
    """Chooses between rounds and plain steps. Times and tokens arrive later than they are asked."""

    def __init__(self) -> None:
        self._rounds: deque[int] = deque(maxlen=WINDOW)        # tokens of each
        self._times: dict[bool, deque[float]] = {kind: deque(maxlen=WINDOW)
                                                 for kind in (True, False)}
        self._chosen, self._left, self._pause = True, TRIAL, PAUSE
        self._measures = False                 # plain steps, to know their time
        self.pauses = 0                        # how often plain steps took over

    @property
    def round_us(self) -> float | None:
        return _median_us(self._times[True])

    @property
    def plain_us(self) -> float | None:
        return _median_us(self._times[False])

    @property
    def gain(self) -> float | None:
        """How many plain steps of the same time the tokens of a round are worth; above 1 is good.
        """
        plain, one = self.plain_us, self.round_us
        if plain is None or one is None or not self._rounds:
            return None
        return self.tokens * plain / one

    @property
    def tokens(self) -> float:
        """Returns how many tokens a round gives."""
        return sum(self._rounds) / len(self._rounds) if self._rounds else 1.0

    def begin(self) -> None:
        """Another text, of which drafts may be better: the next trial is near."""
        self._pause = PAUSE
        if not self._chosen:
            self._left = min(self._left, PAUSE)

    def speculates(self) -> bool:
        """Is the next step to be a round?"""
        return self._chosen

    def add(self, speculated: bool, tokens: int, seconds: float | None) -> None:
        """Learn what a round or a step gave, and how long it took where that is known."""
        if speculated:
            self._rounds.append(tokens)
        if seconds is not None:
            self._times[speculated].append(seconds)
        if speculated is self._chosen:         # others were on their way when it changed
            self._left -= 1
        if self._left <= 0:
            self._choose()

    def _choose(self) -> None:
        if self._chosen and not self._times[False]:
            self._chosen, self._left, self._measures = False, STEPS, True
            return
        paused = not self._chosen and not self._measures
        self._measures, gain = False, self.gain
        if paused:                             # it is over: try again
            self._chosen, self._left = True, TRIAL
            self._rounds.clear()
            self._times[True].clear()
        elif gain is None or gain >= 1.0:
            self._chosen, self._left, self._pause = True, WINDOW, PAUSE
        else:
            self._chosen, self._left = False, self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self.pauses += 1


def _median_us(seconds: deque[float]) -> float | None:
    return median(seconds) * 1e6 if seconds else None
