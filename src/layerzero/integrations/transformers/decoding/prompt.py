"""The prompt of a recognised decoder: the layers of the decode step for many tokens at once.

Between two products a model of transformers runs a hundred lines of Python for each layer, and on a
fast device a short prompt waits for them. Here a layer is what the declaration says: joined
products, one pass for residual and norm, lz's choice of a kernel at every call, and keys and values
into the model's own cache. Prompts of which something is not known stay with the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache

from ....models.weights.codes import WeightCodes
from ....plan.bake import bind
from ....spec.errors import LayerZeroError
from ....world import context
from ...rewiring import public
from ..decoders.families import NotRecognised
from ..decoders.parts import DecoderParts, Experts, FeedForward
from .decode_step import DecodeStep, JoinedLayer
from .joined import Weight
from .planning import Binder, Run

CHOSEN = "as lz chooses at each call"
DECODED, FEW_ROWS = "triton.quantized_linear_decoded", 64  # more rows take longer than reading
_attention, _quantized = public("attention"), public("quantized_linear")


class Dispatched(Binder):
    """Functions of the tensors alone, like kernels that are bound, for calls of any size."""

    def __init__(self) -> None:
        super().__init__(False)

    def __call__(self, what: str, op: str, *tensors: Tensor | None, **fixed: Any) -> Run:
        self.kernels[what] = CHOSEN
        return _of_tensors(public(op), tensors, fixed)

    def kernel(self, op: str, *tensors: Tensor) -> str:
        return CHOSEN

    def fastest(self, what: str, op: str, *calls: tuple[Tensor | None, ...], **fixed: Any) -> Run:
        return self(what, op, *calls[0], **fixed)


def _of_tensors(function: Callable[..., Any], tensors: Sequence[Tensor | None],
                fixed: dict[str, Any]) -> Run:
    """Called with all tensors in turn, those with a name last, and without those that are None."""
    named = [name for name, value in fixed.items() if isinstance(value, Tensor)]
    if None not in tensors and not named:
        return lambda *values: function(*values, **fixed)
    places = [i for i, t in enumerate(tensors) if t is not None]
    numbers = {name: value for name, value in fixed.items() if name not in named}

    def run(*values: Tensor) -> Any:
        every: list[Tensor | None] = [None] * len(tensors)
        for place, tensor in zip(places, values):
            every[place] = tensor
        return function(*every, **numbers, **dict(zip(named, values[len(places):])))

    return run


class PromptStep(DecodeStep):
    """Computes all tokens of a prompt through the layers; NotRecognised says what is not known."""

    def __init__(self, parts: DecoderParts, layers: tuple[JoinedLayer, ...]) -> None:
        mlps = [layer.mlp for layer in parts.layers]
        why = parts.uncapturable_feature or (
            "positions of several axes" if parts.by_axes else
            "tokens of several codebooks" if parts.codebooks else
            "a mixture of experts" if any(isinstance(mlp, Experts) for mlp in mlps) else
            "" if all(isinstance(mlp, FeedForward) for mlp in mlps) else
            "a feed-forward part of the model's own")
        if why:
            raise NotRecognised(why)
        super().__init__(parts, layers, 1)

    def _binder(self, captured: bool) -> Binder:
        return Dispatched()

    def _compiled_token(self) -> Run | None:
        return None

    def _quantized_linear(self, what: str, x: Tensor, weights: Sequence[Weight],
                          first: WeightCodes, bias: Tensor | None) -> Run:
        fixed_bias = None if bias is None else bias.detach()
        decoded = self._decoded(x, first, fixed_bias)
        tensors = [t for t in (first.codes, first.scales, fixed_bias, first.global_scale)
                if t is not None]

        def run(x: Tensor) -> Any:
            rows = x.numel() // first.inputs
            if decoded is not None and rows > FEW_ROWS:
                return decoded(x, *tensors)
            return _quantized(x, first.codes, first.scales, None, fixed_bias, **first.options(rows))

        return run

    def _decoded(self, x: Tensor, codes: WeightCodes, bias: Tensor | None) -> Run | None:
        """Returns the kernel that writes the weight for torch's product, compiled now: a prompt
        that comes before it would be done by a formula of many passes. None where there is none."""
        if not x.is_cuda or codes.prompts != "none":
            return None
        rows = x.new_zeros((1, 2 * FEW_ROWS, codes.inputs))
        try:
            with context.overriding({"jit": "in_request"}):
                return bind("quantized_linear", rows, codes.codes, codes.scales, None, bias,
                            backend=DECODED, **codes.options(2 * FEW_ROWS))
        except LayerZeroError:                 # another format, not here, or not allowed
            return None

    def prompt(self, x: Tensor, positions: Tensor, cache: DynamicCache, keep: int) -> Tensor:
        """Returns the logits of the last `keep` embedded tokens (batch, tokens, hidden), 0: of all;
        or their last states where there is no head. The cache, which is empty, keeps them, or stays
        as it was where something breaks."""
        layers = list(cache.layers)
        before = [dict(vars(layer)) for layer in layers]
        try:
            state = self._last_state(self.parts.first_input(x, positions),
                                     self.parts.angles_at(positions), PromptKV(self, cache))
            return state if self._head is None else self._logits(state[:, -keep:])
        except BaseException:
            cache.layers[:] = layers
            for layer, held in zip(layers, before):
                vars(layer).clear()
                vars(layer).update(held)
            raise


class PromptKV:
    """Keys and values of a prompt, in the cache of the model; a `StepKV` for the step."""

    def __init__(self, step: PromptStep, cache: DynamicCache) -> None:
        self._layers, self._cache = step.layers, cache

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        bound = self._layers[layer]
        query, key = qk.transpose(1, 2).split([bound.heads, bound.kv_heads], 1)
        keys, values = self._cache.update(key, value.transpose(1, 2), layer)
        limited = bound.window is not None and bound.window < qk.shape[1]
        out = _attention(query, keys, values, None, is_causal=True, scale=bound.scale,
                         causal_align="top_left", softcap=bound.softcap,
                         window_left=bound.window - 1 if limited and bound.window else -1)
        return out.transpose(1, 2).flatten(2)  # type: ignore[no-any-return]
