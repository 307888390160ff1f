"""Text from a GGUF model, token by token, greedy or sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...models.decoder import OpCaller
from ...models.sequence_kv import SequenceKV
from ...spec.errors import ConfigError
from ...verify.model.served import LzCaller
from .calls import PublicCalls
from .token_step import TokenStep

if TYPE_CHECKING:
    from .model import GGUFModel


@dataclass
class TextGeneration:
    """Generates one text: `steps()` yields ids, `pieces()` text; `watch` fills `kernels`."""

    model: GGUFModel
    prompt: Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    kv: str = ""                               # how keys and values are kept; default: as computed
    watch: bool = False                        # record which kernels serve
    clock: Callable[[], float] = time.perf_counter
    # phase -> (op, kernel) -> calls
    kernels: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    generated: int = 0                         # tokens so far, without the stop token
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0                # of the tokens after the first
    _decoded: int = 0

    def steps(self) -> Iterator[int]:
        model, c = self.model, self.model.config
        max_new_tokens = c.max_positions - len(self.prompt)
        if not self.prompt or max_new_tokens < 1:
            raise ConfigError(
                f"the prompt must have 1 to {c.max_positions - 1} tokens, got {len(self.prompt)}")
        wrong = next((t for t in self.prompt if not 0 <= t < c.vocab), None)
        if wrong is not None:
            raise ConfigError(f"the prompt's ids must be 0 to {c.vocab - 1}, got {wrong}; the "
                              "tokenizer is that of another model")
        length = min(self.max_tokens, max_new_tokens)
        capacity = len(self.prompt) + length
        phases = {"prefill": self._calls(), "decode": self._calls()}
        kv = SequenceKV(c, capacity, self.kv or str(model.dtype).removeprefix("torch."),
                        device=model.device)
        run = model.decoder(phases["prefill"], capacity)
        token_step: TokenStep | None = None
        tokens = torch.tensor([list(self.prompt)], device=model.device)
        start, token = self.clock(), 0
        for step in range(length):
            with torch.no_grad():
                if step and not self.watch:
                    if token_step is None or token_step.stale():
                        token_step = TokenStep(run, kv)
                    logits = token_step(token)
                else:
                    logits = run(tokens, kv, last=True)[:, -1]
                if (token_step is not None and token_step.greedy_token is not None
                        and not self.temperature):
                    token = token_step.greedy_token
                else:
                    tokens = run.call_op("sample", logits=logits, temperature=self.temperature,
                                    top_k=self.top_k, top_p=self.top_p, seed=self.seed,
                                    offset=step)[:, None]
                    token = int(tokens)
            now = self.clock()
            if step:
                self.decode_seconds, self._decoded = self.decode_seconds + now - start, step
            else:
                self.prompt_seconds = now - start
            run.call_op = phases["decode"]
            self.kernels = {name: dict(caller.counts) for name, caller in phases.items()
                            if isinstance(caller, LzCaller)}
            if token in model.stops:
                return
            self.generated += 1
            yield token
            start = self.clock()

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second."""
        return len(self.prompt) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return self._decoded / self.decode_seconds if self.decode_seconds else 0.0

    def _calls(self) -> OpCaller:
        return LzCaller() if self.watch else PublicCalls()

    def pieces(self) -> Iterator[str]:
        """Yield the text as it comes; a character waits until all of its bytes are generated."""
        ids: list[int] = []
        yielded = ""
        for token in self.steps():
            ids.append(token)
            text = self.model.detokenize(ids)
            if not text.endswith("\ufffd"):
                yield text[len(yielded):]
                yielded = text
        rest = self.model.detokenize(ids)[len(yielded):] if ids else ""
        if rest:
            yield rest
