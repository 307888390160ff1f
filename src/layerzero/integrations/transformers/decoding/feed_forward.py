"""The feed-forward part of one token: two products, or those of the experts it is routed to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....ops.formulas.moe import GATED, activate, activate_gated
from ..decoders.parts import OWN, Experts, FeedForward, OwnPart
from ..quantized import codes_of
from .joined import Joined, Weight
from .planning import Binder, Run, with_weights

Product = Callable[[str, Tensor, Sequence[Weight], Tensor | None], Run]
OURS = "native."           # kernels whose products cost no more to call alone than as one mlp


class JoinedFeedForward:
    """The weights of one layer's feed-forward part."""

    def __init__(self, parts: FeedForward | Experts | OwnPart) -> None:
        self.parts = parts
        plain = plain_part(parts)
        self.gate_up = None if plain is None else Joined(plain.gate_up)
        self.down = None if plain is None else Joined((plain.down,))

    def undo(self) -> None:
        if self.gate_up is not None:
            self.gate_up.undo()


def plain_part(parts: FeedForward | Experts | OwnPart) -> FeedForward | None:
    """Returns the feed-forward layer that serves all tokens, if there is one."""
    if isinstance(parts, OwnPart):
        return None
    return parts.shared if isinstance(parts, Experts) else parts


def bound(layers: Sequence[JoinedFeedForward], x: Tensor, bind: Binder, product: Product,
          fast: Any) -> Run:
    """Bind the feed-forward part of layers[0], for one token in each row of the batch; the layers
    after it are timed beside it. `fast` are the kernels of cuda/triton_step.py, or None."""
    parts = layers[0].parts
    if isinstance(parts, OwnPart):
        bind.kernels["mlp"] = f"{OWN} ({type(parts.module).__name__})"
        return (lambda x: parts.module(x)[0]) if parts.first else parts.module  # type: ignore[no-any-return]
    if isinstance(parts, Experts):
        return _experts(layers[0], parts, x, bind, product, fast)
    alike = [layer for layer in layers if isinstance(layer.parts, FeedForward)]
    return _plain(alike, parts, x, bind, product, fast)


def _plain(layers: Sequence[JoinedFeedForward], parts: FeedForward, x: Tensor, bind: Binder,
           product: Product, fast: Any) -> Run:
    gate_up, down, kind = layers[0].gate_up, layers[0].down, parts.activation
    assert gate_up is not None and down is not None
    named_biases = (("bias_in", gate_up.bias), ("bias_down", down.bias))
    biases = {name: bias for name, bias in named_biases if bias is not None}
    if (fast is None and not parts.gate_last and isinstance(gate_up.weight, Tensor)
            and isinstance(down.weight, Tensor)):
        run = bind("mlp", "mlp", x, gate_up.weight, down.weight, activation=kind, **biases)
        if bind.kernels["mlp"].startswith(OURS) or not _ours(bind, x, gate_up, down):
            return with_weights(run, gate_up.weight, down.weight, *biases.values())
        bind.kernels.pop("mlp")
    gate = kind in GATED
    first = product("gate and up" if gate else "up", x,
                    [layer.gate_up.weight for layer in layers if layer.gate_up], gate_up.bias)
    between = x.new_zeros((*x.shape[:-1], parts.down.shape[1]))
    second = product("down", between, [j.down.weight for j in layers if j.down], down.bias)
    if fast is not None and gate and not parts.gate_last:
        gated: Run | None = fast.gated(bind.kernels["gate and up"], gate_up.weight,
                                        gate_up.bias, kind)
        if gated is not None:
            bind.kernels["gate and up"] += ", with the activation"
            return lambda x: second(gated(x))
        # two products and one launch between them
        return lambda x: second(fast.gate(*first(x).squeeze(1).chunk(2, -1), kind).unsqueeze(1))
    if gate:
        return lambda x: second(activate_gated(first(x), kind, not parts.gate_last))
    return lambda x: second(activate(first(x), kind))


def _ours(bind: Binder, x: Tensor, *products: Joined) -> bool:
    """Are both products done by kernels that lz compiled itself?"""
    sizes = [x, x.new_zeros((*x.shape[:-1], products[1].weight.shape[1]))]
    return all(isinstance(p.weight, Tensor) and bind.kernel(
        "linear", data, p.weight,
        *(() if p.bias is None else (p.bias,))).startswith(OURS) for data, p in
        zip(sizes, products))


def _experts(layer: JoinedFeedForward, parts: Experts, x: Tensor, bind: Binder, product: Product,
             fast: Any) -> Run:
    batch, hidden = x.shape[0], x.shape[-1]
    own, top_k, normalize = parts.route, parts.top_k, parts.normalize
    route = None if own is not None else product("router", x, [parts.router], None)
    shared: Run | None = None
    if parts.shared is not None and parts.shared_gate is None:
        shared = _plain([layer], parts.shared, x, bind, product, fast)
    if parts.shared is not None and parts.shared_gate is not None:
        plain = _plain([layer], parts.shared, x, bind, product, fast)
        module = parts.shared_gate.module
        gate = product("gate of the shared expert", x, [codes_of(module) or module.weight],
                       module.bias)

        def shared(x: Tensor) -> Tensor:
            return torch.sigmoid(gate(x)) * plain(x)  # type: ignore[no-any-return]

    bind_experts = _one_token if batch == 1 and not x.is_cuda else _many_tokens
    chosen = bind_experts(parts, x, bind)

    def run(x: Tensor) -> Tensor:
        if own is not None:
            weights, ids = own(x.view(batch, hidden))
        else:
            scores = torch.softmax(route(x).view(batch, -1), -1, dtype=torch.float32)  # type: ignore[misc]
            weights, ids = scores.topk(top_k)
            if normalize:
                weights = weights / weights.sum(-1, keepdim=True)
        out = chosen(x.view(batch, hidden), ids, weights).view(batch, 1, hidden)
        return out if shared is None else out + shared(x)  # type: ignore[no-any-return]

    return run


def _one_token(parts: Experts, x: Tensor, bind: Binder) -> Run:
    """Binds the experts for one token on the host: only the weights of the chosen ones are read."""
    gate_up, down = parts.gate_up.unbind(0), parts.down.unbind(0)
    row = x.view(1, -1)
    expert = bind("experts", "mlp", row, gate_up[0], down[0], activation=parts.activation)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        results = torch.cat([expert(x, gate_up[i], down[i]) for i in ids[0].tolist()])
        return (results * weights.t()).sum(0, keepdim=True).to(x.dtype)

    return run


def _many_tokens(parts: Experts, x: Tensor, bind: Binder) -> Run:
    rows = x.view(-1, x.shape[-1])
    ids = torch.zeros((len(rows), parts.top_k), dtype=torch.int64, device=x.device)
    weights = torch.zeros(ids.shape, dtype=torch.float32, device=x.device)
    run = bind("experts", "moe", rows, parts.gate_up, parts.down, ids, weights,
               activation=parts.activation)
    return lambda x, ids, weights: run(x, parts.gate_up, parts.down, ids, weights)
