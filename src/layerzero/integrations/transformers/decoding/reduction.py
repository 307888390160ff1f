"""Copying and pickling a model that is accelerated. Nothing here needs transformers."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

# attributes of an accelerated model
ACCELERATION, REDUCE = "_layerzero_acceleration", "__reduce_ex__"
ON_DEVICE = "on the device"                    # how a generate() was looped; see generation/


class Reduce:
    """The `__reduce_ex__` of an accelerated model: what is copied or pickled is the model without
    its acceleration.

    It is an attribute of the one model; copy.deepcopy, pickle and torch.save ask the object before
    its class.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, protocol: Any) -> Any:
        model = self._model()
        kind: Any = type(model)                # not the model, which would ask this object again
        make, args, state, *rest = kind.__reduce_ex__(model, protocol)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items()
                     if name not in (ACCELERATION, REDUCE)
                     and not getattr(type(value), "is_decode_step", False)}
        return make, args, state, *rest
