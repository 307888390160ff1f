"""Which functions of torch a call runs: two kernels that run the same ones are one implementation.

`F.scaled_dot_product_attention` and the aten entry that it ends in take the same time, up to noise
and a few checks on the host; a measurement that tells them apart would only choose by noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKENDS = ("torch", "reference")              # all their work is seen by torch's dispatcher
Functions = tuple[tuple[Any, ...], ...]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.calls.append((func, *((t.dtype, tuple(t.shape), t.stride()) for t in tensors)))
        return func(*args, **(kwargs or {}))


def torch_functions(run: Callable[..., Any], inputs: tuple[Any, ...]) -> Functions:
    """Return the torch functions of one call, with dtypes, shapes and strides of tensors."""
    with _Recorder() as recorder:
        run(*inputs)
    return tuple(recorder.calls)
