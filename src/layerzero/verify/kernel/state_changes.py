"""Who changed the state of the process: the kernel, torch as well, or another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...spec.op import Op
from .process_state import process_state, put_back
from .shared import with_own_generators

HALF = {torch.float16, torch.bfloat16}
CALLS_TO_CONFIRM = 4


def changed_by_each(run: Callable[[], Any], names: Iterable[str], device: str) -> set[str]:
    """Returns which of the settings each of more calls changes: a server beside it opens and closes
    files as well, but not at each."""
    suspects = set(names)
    for _ in range(CALLS_TO_CONFIRM):
        state = process_state(device, slow=False)
        run()
        suspects &= set(put_back({name: state[name] for name in suspects}, device))
    return suspects


def changed_by_formula(op: Op, values: Mapping[str, Any], device: str) -> list[str]:
    """Returns what the formula changes of the process by itself, or a linear layer of torch at the
    same dtype, and leaves that as they do."""
    before = process_state(device)
    op.reference(**with_own_generators(values))
    for dtype in {v.dtype for v in values.values() if isinstance(v, Tensor)} & HALF:
        torch.nn.functional.linear(*torch.ones((2, 32, 32), dtype=dtype, device=device))
    after = process_state(device)
    return [name for name in before if before[name] != after[name]]
