"""Token ids to text, exactly as the tokenizer's own library does it.

- `ids` is a list of ids, a list of such lists, an integer tensor of one or two dimensions, or a
  result of `lz.tokenize`; `tokenizer` is as for `lz.tokenize`.
- `skip_special_tokens` omits special tokens. sentencepiece never shows its control symbols, so it
  can only skip.
- Bytes that are not UTF-8 become U+FFFD. tokenizers omits ids outside the vocabulary; the other
  libraries raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ..spec.grid import bucket_top
from ..spec.mistake import Mistake, Results, Values
from ..spec.op import Op, Tolerance
from ..spec.rules import present
from .formulas.common import READS_ON_HOST
from .formulas.mistakes import replace_argument
from .formulas.tokenizer.bpe import BYTE_LEVEL_DECODER, ByteLevelBPE, tiny_tokenizer
from .formulas.tokenizer.identity import (
    FACTS,
    TokenizerHandle,
    from_json,
    identify,
    identify_again,
)
from .formulas.tokenizer.tokenization import WORDS, Tokens, read_sequences


def reference(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
    """Returns the text of a sequence of ids, or of each of several."""
    handle = identify_again(tokenizer, "detokenize")
    bpe: ByteLevelBPE = handle.built("formula", lambda h: ByteLevelBPE(json.loads(h.payload)))
    sequences, single = read_sequences(ids)
    texts = [bpe.decode(sequence, skip_special_tokens) for sequence in sequences]
    return texts[0] if single else texts


def meta(ids: Any, tokenizer: Any, **options: Any) -> None:
    """Returns nothing: the length of a text is only known after decoding."""


def read(values: dict[str, Any]) -> dict[str, Any]:
    sequences, _ = read_sequences(values["ids"])
    handle = identify(values["tokenizer"], "detokenize")
    return {**handle.facts, "sequences": bucket_top(len(sequences)),
            "tokens": bucket_top(sum(map(len, sequences)))}


_IDS: tuple[list[int], ...] = (
    [], [104], [258, 32, 119, 111, 114], [270, 266, 271, 32, 272], [195, 169, 240, 159],
    [256] * 300, [9999, 104],
    # parts of characters, which the next sequence would complete
    [104, 240, 159, 152], [128, 108, 226, 130], [172, 270], [271, 195], [169], [270, 271],
    # around what is left out
    [195, 271, 169, 226, 9999, 130, 172, 272, 240],
    # the same ids in another order, and others of the same sum
    [104, 264, 111, 267, 114], [104, 111, 264, 267, 114], [114, 267, 111, 264, 104],
    [105, 263, 111, 267, 114], [103, 265, 111, 267, 114],
    # longer than any piece: a cut after 4 n ids, and most others, is within a character
    [104, *(240, 159, 152, 128) * 2_100, 271, *(226, 130, 172) * 1_500, 270],
    # around the ends of the vocabulary, of 16 bits and of 31
    [104, 272, 273, 105, 274, 271, 255, 256, 0, 65_640, 2 ** 31 - 1, 106],
    # spaces that a clean-up would take away
    list(b"h ,e .l ?l !o 's n't 've  x\n y"),
    # no UTF-8: surrogates, forms that are too long, beyond the last character, bytes of none
    [104, 237, 160, 128, 237, 191, 191, 192, 128, 224, 128, 128, 240, 128, 128, 128, 101, 244, 144,
     128, 128, 245, 128, 248, 136, 128, 128, 128, 254, 255, 237, 159, 191, 111],
    # byte order marks: at the beginning, within, at the end; those of 16 bits are no characters
    [239, 187, 191, 104, 32, 239, 187, 191, 239, 187, 191], [239, 187, 191], [255, 254, 104, 0])
# A text as it is generated: each sequence is the one before and an id more.
_GENERATED = (266, 32, 195, 169, 258, 240, 159, 152, 128, 270, 104, 271, 226, 130, 172, 9999, 272,
              32)


def _sequence(index: int) -> list[int]:
    return list(_IDS[index] if index >= 0 else _GENERATED[:-index])


@lru_cache(maxsize=2)
def _tiny_tokenizer(variant: str) -> TokenizerHandle:
    """Returns the same one for all calls, as callers have it."""
    return from_json(json.dumps(tiny_tokenizer(variant=variant)), "tiny_tokenizer")


def _in_form(sequences: Any, form: str) -> Any:
    """Returns ids as a tensor of a dtype, one whose rows lie apart, tuples, or a result of
    lz.tokenize with every other id masked."""
    if form == "tuple":
        return tuple(tuple(s) if isinstance(s, list) else s for s in sequences)
    if form == "tokens":
        masks = [[i % 2 for i in range(len(s))] if isinstance(s, list) else 1 for s in sequences]
        return Tokens(sequences, None, masks)
    ids = torch.tensor(sequences, dtype=getattr(torch, form, torch.int64))
    return ids.t().contiguous().t() if form == "transposed" else ids


def inputs(
    *, ids: int | tuple[int, ...] = 2, tensor: bool = False, form: str = "", drawn: bool = False,
    many: bool = False, variant: str = "", seed: int = 0,
    dtype: torch.dtype = torch.int64, device: str = "cpu", **options: Any,
) -> dict[str, Any]:
    """Returns the sequences with these indices (-n: the first n ids that are generated) or one of
    `drawn` ids, and a small tokenizer."""
    sequences: Any = _sequence(ids) if isinstance(ids, int) else [_sequence(i) for i in ids]
    if many and isinstance(ids, tuple) and sum(map(len, sequences)) < 64:
        sequences = sequences * 210
    if drawn:
        gen = torch.Generator().manual_seed(seed)
        sequences = torch.randint(0, 273, (80,), generator=gen).tolist()
        sequences[3:60:19] = 1, 0, 1           # special ones of the variant
        if variant == "accents":
            sequences[5:60:9] = 273, 274, 275, 275, 274, 273, 273
    sequences = _in_form(sequences, form or "int64") if tensor or form else sequences
    return {"ids": sequences, "tokenizer": _tiny_tokenizer(variant), **options}


_ALL = tuple(range(7))
_PARTS = (7, 8, 9, 10, 11, 13, 7, 0, 8, 10, 12, 11, 4, 11, 7, 7, 8)
CASES: tuple[dict[str, Any], ...] = (
    {}, {"ids": 0}, {"ids": ()}, {"ids": _ALL}, {"ids": _ALL, "skip_special_tokens": False},
    {"tensor": True}, {"ids": (2, 3), "tensor": True, "skip_special_tokens": False},
    *({"ids": ids, "skip_special_tokens": skip} for ids in (_PARTS, _PARTS[::-1])
      for skip in (True, False)),
    {"ids": (7, 8, 7, 4, 8), "tensor": True}, {"ids": 7}, {"ids": (2,)},
    {"ids": (2,), "tensor": True}, *({"ids": ids} for ids in range(14, 19)),
    *({"ids": ids, "skip_special_tokens": skip} for ids in (20, (20, 2)) for skip in (True, False)),
    *({"ids": ids, "form": form} for form in ("int32", "transposed", "tuple", "tokens")
      for ids in ((14, 15, 17), 14)), {"ids": 4, "form": "uint8"}, {"ids": 16, "form": "int16"},
    {"ids": 23}, {"ids": (24, 23, 25, 2)}, {"ids": 23, "skip_special_tokens": False},
    {"ids": (0, 0, 0), "tensor": True}, {"ids": 0, "tensor": True},
    {"ids": 21}, {"ids": 22}, {"ids": (22, 2), "skip_special_tokens": False},
    {"ids": (14, 15, 16, 17, 18)}, {"ids": (15, 14, 18, 17, 16), "tensor": True},
    *({"ids": -n, "skip_special_tokens": skip} for skip in (True, False)
      for n in (*range(1, len(_GENERATED) + 1), 9, 4)))

STRESS: tuple[dict[str, Any], ...] = (
    {"ids": (1, 14, 0, 17, 7), "many": True}, {"drawn": True},
    *({"drawn": True, "variant": "known", "skip_special_tokens": skip} for skip in (True, False)),
    *({"drawn": True, "variant": "accents", "skip_special_tokens": skip} for skip in (True, False)),
    {"ids": 19}, {"ids": (19, 7, 19), "skip_special_tokens": False}, {"ids": 19, "tensor": True})

# Mistakes that a kernel for this op could make.

def _by_sequence(
    change: Callable[[Callable[[Any], str], list[int]], str],
) -> Callable[[Any, Values], Results]:
    """Applies `change(decode, ids)` to each sequence of a call."""
    def apply(op: Any, v: Values) -> Results:
        sequences, _ = read_sequences(v["ids"])
        return Results(tuple(change(lambda ids: op.reference(**{**v, "ids": ids}), list(sequence))
                             for sequence in sequences))

    return apply


MISTAKES: tuple[Mistake, ...] = (
    replace_argument("convention", "special tokens kept", "skip_special_tokens", False),
    Mistake("convention", "each id decoded by itself", _by_sequence(
        lambda decode, ids: "".join(decode([i]) for i in ids))),
    Mistake("convention", "bytes that are no character left out at the end", _by_sequence(
        lambda decode, ids: decode(ids).rstrip("\ufffd"))),
    Mistake("convention", "bytes that are no character left out", _by_sequence(
        lambda decode, ids: decode(ids).replace("\ufffd", ""))),
    Mistake("convention", "white space stripped", _by_sequence(
        lambda decode, ids: decode(ids).strip())))

OP = Op(
    name="detokenize", family="tokenization", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, mistakes=MISTAKES,
    reference_kernel={**READS_ON_HOST, "overhead_us": 500.0, "requires": BYTE_LEVEL_DECODER},
    tolerance=Tolerance({"float32": (0.0, 0.0)}), shapes={}, read=read, words=WORDS,
    reads=(*FACTS, "sequences", "tokens"), dtypes=("int64",), requires=(present("vocab_hash"),),
)
