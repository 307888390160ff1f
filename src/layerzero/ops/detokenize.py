"""Token ids to text, exactly as the tokenizer's own library does it.

- `ids` is a list of ids, a list of such lists, an integer tensor of one or two dimensions, or what `lz.tokenize`
  returned; `tokenizer` is as for `lz.tokenize`.
- `skip_special_tokens` leaves special tokens out. sentencepiece never shows its control symbols, so it can only skip.
- Bytes that are no UTF-8 become U+FFFD. An id that the vocabulary does not have is left out by tokenizers, as it always
  does, and refused by the other libraries.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ..spec.alteration import Alteration
from ..spec.grid import bucket_top
from ..spec.op import Op, Tolerance
from ..spec.rules import present
from .formulas.bpe import BytePairs, tiny_tokenizer
from .formulas.mistakes import replaced
from .formulas.tokenization import sequences_of
from .formulas.tokenizer_identity import FACTS, from_json, identified, identify


def reference(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
    """The text of a sequence of ids, or of each of several."""
    handle = identified(tokenizer, "detokenize")
    pairs: BytePairs = handle.built("formula", lambda h: BytePairs(json.loads(h.payload)))
    sequences, single = sequences_of(ids)
    texts = [pairs.decode(sequence, skip_special_tokens) for sequence in sequences]
    return texts[0] if single else texts


def meta(ids: Any, tokenizer: Any, **options: Any) -> None:
    """How long a text is, only decoding it can tell."""


def read(values: dict[str, Any]) -> dict[str, Any]:
    sequences, _ = sequences_of(values["ids"])
    handle = identify(values["tokenizer"], "detokenize")
    return {**handle.facts, "sequences": bucket_top(len(sequences)), "tokens": bucket_top(sum(map(len, sequences)))}


_IDS: tuple[list[int], ...] = (
    [], [104], [258, 32, 119, 111, 114], [270, 266, 271, 32, 272], [195, 169, 240, 159], [256] * 300, [9999, 104])


def inputs(
    *, ids: int | tuple[int, ...] = 2, tensor: bool = False, seed: int = 0, dtype: torch.dtype = torch.int64,
    device: str = "cpu", **options: Any,
) -> dict[str, Any]:
    """Sequences by their number, and a small tokenizer."""
    given: Any = _IDS[ids] if isinstance(ids, int) else [_IDS[i] for i in ids]
    given = torch.tensor(given) if tensor else given
    return {"ids": given, "tokenizer": from_json(json.dumps(tiny_tokenizer()), "tiny_tokenizer"), **options}


_ALL = tuple(range(len(_IDS)))
CASES: tuple[dict[str, Any], ...] = (
    {}, {"ids": 0}, {"ids": ()}, {"ids": _ALL}, {"ids": _ALL, "skip_special_tokens": False}, {"tensor": True},
    {"ids": (2, 3), "tensor": True, "skip_special_tokens": False})

ALTERATIONS: tuple[Alteration, ...] = (replaced("convention", "special tokens kept", "skip_special_tokens", False),)

OP = Op(
    name="detokenize", family="tokenization", reference=reference, meta=meta, inputs=inputs, cases=CASES,
    alterations=ALTERATIONS,
    tolerance=Tolerance({"float32": (0.0, 0.0)}), shapes={}, read=read, reads=(*FACTS, "sequences", "tokens"),
    dtypes=("int64",), requires=(present("vocab_hash"),),
)
