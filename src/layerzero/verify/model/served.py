"""The operations of a decoder, served by lz: by its own choice, or by a kernel or library that is asked for.

What was asked for serves every call it can, and no other kernel is tried in its place if it breaks. A call it refuses
goes to lz's own choice, and the reason is kept: nothing was shown of the kernel there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ...models.decoder import DecoderConfig
from ...models.positions import rope_tables
from ...operate.inspection import dispatcher_of
from ...select.policy import PolicyRule, suggest
from ...spec.errors import ConfigError, NamedKernelRefused
from ...spec.event import Fallback
from ...world import context
from ...world import snapshot as worlds
from ...world.events import subscribe

DECODER_OPS = ("embedding", "rms_norm", "layer_norm", "add_rms_norm", "linear", "rope", "attention",
               "paged_attention", "mlp", "cross_entropy")


class Served:
    """As `do` of a decoder. `named`: a kernel's id, a library, or a pattern of ids; "" leaves the choice to lz."""

    def __init__(self, named: str = "") -> None:
        self.named = named
        self.patterns = patterns_of(named)
        self.kernel = ""
        self.counts: Counter[tuple[str, str]] = Counter()      # (op, kernel) -> calls
        self.refused: dict[str, str] = {}                      # op -> why what was named could not serve
        self.asked: Counter[str] = Counter()                   # op -> calls of those that have what was named

    def __call__(self, op: str, /, **given: Any) -> Any:
        found = dispatcher_of(op)
        pattern = self.patterns.get(op)
        before, fell = found.hits(), []            # type: dict[str, int], list[str]
        stop = subscribe(lambda e: fell.append(e.served_by) if isinstance(e, Fallback) and e.op == op else None)
        try:
            if pattern is None:
                out = found.public(**given)
            else:
                self.asked[op] += 1
                try:
                    out = found.public(**given, backend=pattern)
                except NamedKernelRefused as e:
                    self.refused.setdefault(op, "; ".join(dict.fromkeys(map(str, e.reasons))) or str(e))
                    out = found.public(**given)
        finally:
            stop()
        chosen = next((k for k, n in found.hits().items() if n > before.get(k, 0)), "unknown")
        self.kernel = fell[-1] if fell else chosen
        self.counts[op, self.kernel] += 1
        return out

    @property
    def served(self) -> int:
        """How many calls what was named has served."""
        return sum(n for (op, kernel), n in self.counts.items() if fnmatchcase(kernel, self.patterns.get(op, "")))


def patterns_of(named: str) -> Mapping[str, str]:
    """op -> pattern, for the ops of a decoder that have a kernel so named."""
    if not named:
        return {}
    pattern = named if "." in named or "*" in named else f"{named}.*"
    kernels = worlds.current().catalog.kernels
    found = {k.op.name: pattern for k in kernels if fnmatchcase(k.id, pattern)}
    if not found:
        ids = sorted({*(k.id for k in kernels), *(k.backend for k in kernels)})
        raise ConfigError(f"no kernel matches {named!r}{suggest(named, ids)}; lz list shows them")
    return {op: p for op, p in found.items() if op in DECODER_OPS}


def tables_of(c: DecoderConfig, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
    if c.positions != "rope":
        return None
    return rope_tables(c.head_dim, c.max_positions, c.rope_base, device=device)


@contextmanager
def without(kernels: Sequence[str]) -> Iterator[None]:
    """These serve no call of the block."""
    if not kernels:
        yield
        return
    with context.overriding(rules=(PolicyRule.of("deny", tuple(kernels), origin="lz verify"),)):
        yield
