"""The ops of a decoder, served by lz: by its own selection, or by a named kernel or library.

What was named serves every call it can, and no other kernel is tried in its place if it fails. A
call it refuses goes to lz's own selection, and the reason is kept: nothing was verified of the
kernel there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...models.decoder_config import DecoderConfig
from ...models.positions import rope_tables
from ...operate.inspection import dispatcher_of
from ...selection.policy import PolicyRule
from ...spec.errors import NamedKernelRefused
from ...spec.event import Fallback
from ...spec.names import find_kernels, names_kernel
from ...world import context
from ...world import snapshot as worlds
from ...world.events import subscribe

DECODER_OPS = ("embedding", "rms_norm", "layer_norm", "add_rms_norm", "linear", "rope", "attention",
               "paged_attention", "mlp", "cross_entropy")


class LzCaller:
    """An OpCaller through lz. `named`: a kernel's id, library or pattern; "" leaves it to lz."""

    def __init__(self, named: str = "") -> None:
        self.named = named
        self.patterns = patterns_of(named)
        self.kernel = ""
        self.counts: Counter[tuple[str, str]] = Counter()      # (op, kernel) -> calls
        self.refused: dict[str, str] = {}                      # op -> why `named` could not serve

    def __call__(self, op: str, /, **arguments: Any) -> Any:
        dispatcher = dispatcher_of(op)
        pattern = self.patterns.get(op)
        before, fallbacks = dispatcher.hits(), []  # type: dict[str, int], list[str]
        stop = subscribe(lambda e: fallbacks.append(e.served_by) if isinstance(e, Fallback)
                         and e.op == op else None)
        try:
            if pattern is None:
                out = dispatcher.public(**arguments)
            else:
                try:
                    out = dispatcher.public(**arguments, backend=pattern)
                except NamedKernelRefused as e:
                    self.refused.setdefault(op, "; ".join(dict.fromkeys(map(str, e.reasons)))
                                            or str(e))
                    out = dispatcher.public(**arguments)
        finally:
            stop()
        chosen = next((k for k, n in dispatcher.hits().items() if n > before.get(k, 0)), "unknown")
        self.kernel = fallbacks[-1] if fallbacks else chosen
        self.counts[op, self.kernel] += 1
        return out

    @property
    def served(self) -> int:
        """How many calls `named` has served."""
        return sum(n for (op, kernel), n in self.counts.items()
                   if op in self.patterns and names_kernel(self.patterns[op], kernel))


def patterns_of(named: str) -> Mapping[str, str]:
    """Returns op -> name for the ops of a decoder that have a kernel with this name."""
    if not named:
        return {}
    op_of = worlds.current().catalog.op_of_kernel
    ops = {op_of[kernel] for kernel in find_kernels(named, op_of)}
    return {op: named for op in DECODER_OPS if op in ops}


def rope_tables_of(c: DecoderConfig,
                   device: str | torch.device = "cpu") -> tuple[Tensor, Tensor] | None:
    if c.positions != "rope":
        return None
    return rope_tables(c.head_dim, c.max_positions, c.rope_base, c.rope_scaling,
                       rotary_dim=c.rotated, device=device)


@contextmanager
def without_kernels(kernels: Sequence[str]) -> Iterator[None]:
    """Denies these kernels within the block."""
    if not kernels:
        yield
        return
    with context.overriding(rules=(PolicyRule.of("deny", tuple(kernels), origin="lz verify"),)):
        yield
