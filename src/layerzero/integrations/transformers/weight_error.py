"""What weight-only quantization did to a model: its bytes, and how far its predictions are from
those of the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import Tensor

from ...models.weights.codes import WeightOnly
from ...spec.codec import Record
from ...spec.errors import ConfigError
from .quantized import QuantizedLayers

Text = Union[str, Tensor, Sequence[int]]
ORIGINALS = {"cpu": "kept in the memory of the CPU: undoing it gives their bits back",
             "device": "kept where they were: undoing it gives their bits back",
             "drop": "dropped: undoing it leaves the weights that the codes stand for"}
DEFAULT_TEXT = (
    "The lighthouse had stood on the headland for a hundred and forty years before anyone thought "
    "to measure how far its light could be seen. In 1969 a schoolteacher, Ada Marsh, took her "
    "class of eleven children out to sea in two fishing boats, with a stopwatch, a compass and a "
    "chart, and asked them to write down the moment when the beam disappeared below the horizon. "
    "They computed the distance from the height of the lamp, d = sqrt(2 * R * h), found 29.4 "
    "kilometres, and were wrong by less than one part in a hundred.")


@dataclass(frozen=True)
class PredictionError(Record):
    """Next-token distributions of the quantized model against those of the model as it was, over
    the positions of one text; nats."""

    tokens: int
    text: str                                  # which one it was
    kl: float                                  # mean of KL(as it was || quantized)
    worst_kl: float
    top1: float                                # how often both think the same token likeliest
    stock_loss: float                          # mean negative log-likelihood of the text
    loss: float

    def __str__(self) -> str:
        return (f"KL {self.kl:.2g} nats (worst {self.worst_kl:.2g}), same likeliest token "
                f"{self.top1:.1%}, loss {self.stock_loss:.3f} -> {self.loss:.3f}, over "
                f"{self.tokens} tokens of {self.text}")


@dataclass(frozen=True)
class QuantizedWeights(Record):
    """Reports what became of the weights of a model's linear layers."""

    format: str                                # as asked for
    layers: dict[str, int]                     # format that they are held in -> layers
    stock_bytes: int
    bytes: int
    originals: str
    left: dict[str, int] = field(default_factory=dict)         # reason -> layers that stay
    error: PredictionError | None = None

    @classmethod
    def of(cls, wanted: WeightOnly, layers: QuantizedLayers,
           error: PredictionError | None) -> QuantizedWeights:
        return cls(wanted.format, layers.formats, layers.stock_bytes, layers.nbytes,
                   wanted.originals, dict(layers.left), error)

    def __str__(self) -> str:
        held = ", ".join(f"{n} in {name}" for name, n in self.layers.items())
        lines = [f"weights in {self.format}: {held}; {self.stock_bytes / 1e6:.1f} MB -> "
                 f"{self.bytes / 1e6:.1f} MB; originals {ORIGINALS[self.originals]}"]
        if self.error is not None:
            lines.append(f"error of the weights: {self.error}")
        lines += [f"{n} linear layer{'s' * (n > 1)} as before: {why}"
                  for why, n in self.left.items()]
        return "\n  ".join(lines)


def text_ids(text: Text, model: Any) -> Tensor:
    """Returns the tokens, (1, n), of a text that was given; a string is tokenized by the tokenizer
    that lies beside the model's files."""
    if not isinstance(text, str):
        ids = torch.as_tensor(text)
        if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.numel() < 2:
            raise ConfigError("text wants a string or at least two token ids, (n,) or (1, n), got "
                              f"{tuple(ids.shape)} of {str(ids.dtype)[6:]}")
        return ids.long().reshape(1, -1)
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        raise ConfigError("text was given as a string, and no tokenizer lies beside the model "
                          f"({getattr(model, 'name_or_path', '') or 'it was not loaded from files'}"
                          "): give token ids, tokenizer(text).input_ids")
    return torch.as_tensor(tokenizer(text).input_ids)[None]


def default_ids(model: Any, count: int, seeded: Callable[[int], Tensor]) -> tuple[Tensor, str]:
    """Returns the first `count` tokens of a text of ours, and what it is called; seeded tokens
    where no tokenizer lies beside the model's files."""
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return seeded(count), "seeded numbers (give text= for real ones)"
    return torch.as_tensor(tokenizer(DEFAULT_TEXT).input_ids)[None, :count], "the default text"


def _tokenizer(model: Any) -> Any:
    """Returns the tokenizer in the folder the model was loaded from, without the network."""
    name = getattr(model, "name_or_path", "")
    if not name:
        return None
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    # whatever the files lack, there is no tokenizer
    except (OSError, ValueError, ImportError, KeyError):
        return None


@torch.no_grad()
def prediction_error(stock: Callable[[Tensor], Tensor], quantized: Callable[[Tensor], Tensor],
                     ids: Tensor, text: str) -> PredictionError:
    """`stock` and `quantized` give the logits, (1, n, vocab), of tokens (1, n)."""
    want = torch.log_softmax(stock(ids)[0].float(), -1)
    got = torch.log_softmax(quantized(ids)[0].float(), -1)
    kl = (want.exp() * (want - got)).sum(-1)
    agree = (want.argmax(-1) == got.argmax(-1)).float().mean()
    following = ids[0, 1:, None]
    stock_loss, loss = (-float(logs[:-1].gather(1, following).mean()) for logs in (want, got))
    return PredictionError(ids.shape[1], text, float(kl.mean()), float(kl.max()), float(agree),
                           stock_loss, loss)
