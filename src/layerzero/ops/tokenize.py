"""Text to token ids, exactly as the tokenizer's own library does it.

- `tokenizer` is a `tokenizers.Tokenizer`, a fast tokenizer of transformers, a `tiktoken.Encoding`, a
  `sentencepiece.SentencePieceProcessor`, the path of a tokenizer.json, *.model or *.tiktoken file or of a folder with
  one, or what `lz.tokens.load_tokenizer` returned. With the last nothing has to be looked at again on every call.
- Special tokens are added as the tokenizer does it: by its post-processor, by a processor's add_bos and add_eos;
  tiktoken adds none. `parse_special` says whether special tokens written in the text become special tokens (True) or
  stay text (False); None leaves it to the library: tokenizers reads them, tiktoken refuses the text, sentencepiece
  has none.
- `truncation` and `padding` left at None are as the tokenizer is set; False is never. `padding` is True or "longest",
  or "max_length". Truncation leaves the special tokens that are added, as the libraries do.
- Offsets are half-open ranges of characters (code points) of the text; a character that several tokens share is in the
  range of each. (0, 0) stands for what was put around the text.
- `cache_prefix` allows the tokens of a long text to be kept and reused for texts that begin the same, as with a system
  prompt. The result is the same.
- A text with a lone surrogate is refused: it is no Unicode text, and the libraries disagree about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, Literal

import torch

from ..spec.alteration import Alteration, Results, Values
from ..spec.errors import InvalidCall
from ..spec.grid import bucket_top
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import at_least, present
from .formulas.bpe import BytePairs, tiny_tokenizer
from .formulas.mistakes import replaced
from .formulas.tokenization import Body, Request, Tokens, runner, shape_of, texts_of
from .formulas.tokenizer_identity import FACTS, TokenizerHandle, from_json, identify

Side = Literal["left", "right"]


def _encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
    pairs: BytePairs = handle.built("formula", lambda h: BytePairs(json.loads(h.payload)))
    before, after = pairs.around() if request.add_special_tokens else ([], [])
    return [Body(*pairs.encode(text, bool(request.parse_special)), before, after) for text in texts]


_run = runner(_encode)


def reference(
    text: str | list[str], tokenizer: Any, *, add_special_tokens: bool = True, parse_special: bool | None = None,
    truncation: bool | None = None, padding: bool | str | None = None, max_length: int | None = None,
    truncation_side: Side | None = None, padding_side: Side | None = None, pad_id: int | None = None,
    pad_to_multiple_of: int | None = None, return_offsets: bool = False, return_attention_mask: bool = True,
    cache_prefix: bool = False,
) -> Tokens:
    """The ids of a text, or of each of several, with their attention mask and, if asked for, their offsets."""
    return _run(text, tokenizer, add_special_tokens=add_special_tokens, parse_special=parse_special,
                truncation=truncation, padding=padding, max_length=max_length, truncation_side=truncation_side,
                padding_side=padding_side, pad_id=pad_id, pad_to_multiple_of=pad_to_multiple_of,
                return_offsets=return_offsets, return_attention_mask=return_attention_mask)


def meta(text: str | list[str], tokenizer: Any, **options: Any) -> None:
    """How many ids a text has, only encoding it can tell."""


def read(values: dict[str, Any]) -> dict[str, Any]:
    """Which tokenizer, how much text; the caller's mistakes are found here, before any library is asked."""
    texts = texts_of(values["text"])
    if not isinstance(values["padding"], (bool, str, NoneType)):
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "a bool, 'longest', 'max_length' or None", type(values["padding"]).__name__, "padding"))
    handle = identify(values["tokenizer"])
    shape = shape_of(handle.settings, *(values[name] for name in (
        "truncation", "padding", "max_length", "truncation_side", "padding_side", "pad_id", "pad_to_multiple_of")))
    return {**handle.facts, "texts": bucket_top(len(texts)), "characters": bucket_top(sum(map(len, texts))),
            "padded": shape.pad is not None, "truncated": shape.limit is not None}


_PIECES = ("the", " ", "hell", "o", "\n", "é", "日本", "👩\u200d👧", "e\u0301", "12", "'s", "<s>",
           "  ", "\u00a0", "Ω", "\t", "and")
_TEXTS = ("", "the", "hello the world and 12 more", "it's  the\n\n end ", "<s>hello</s> <name>",
          "naïve 日本 👩\u200d👧 e\u0301", "\0 nul", "the hell " * 80)


def inputs(
    *, text: int | tuple[int, ...] = 2, random: int = 0, template: bool = False, pad: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.int64, device: str = "cpu", **options: Any,
) -> dict[str, Any]:
    """Texts by their number, or so many random ones, and a small tokenizer."""
    tokenizer = from_json(json.dumps(tiny_tokenizer(template, pad)), "tiny_tokenizer")
    given = _TEXTS[text] if isinstance(text, int) else [_TEXTS[i] for i in text]
    if random:
        gen = torch.Generator().manual_seed(seed)
        given = ["".join(_PIECES[int(i)] for i in torch.randint(len(_PIECES), (n,), generator=gen))
                 for n in range(random)]
    return {"text": given, "tokenizer": tokenizer, **options}


_ALL = tuple(range(len(_TEXTS)))
CASES: tuple[dict[str, Any], ...] = (
    {}, {"text": 0}, {"text": 6}, {"text": _ALL, "return_offsets": True}, {"text": ()},
    {"text": _ALL, "template": True, "return_offsets": True},
    {"text": _ALL, "template": True, "add_special_tokens": False},
    {"text": _ALL, "parse_special": False, "return_offsets": True}, {"text": _ALL, "return_attention_mask": False},
    {"text": _ALL, "template": True, "truncation": True, "max_length": 7, "return_offsets": True},
    {"text": _ALL, "template": True, "truncation": True, "max_length": 5, "truncation_side": "left",
     "return_offsets": True},
    {"text": (1, 2), "padding": "longest", "pad_id": 3}, {"text": (1, 2, 5), "pad": True, "pad_to_multiple_of": 8},
    {"text": (1, 2, 5), "pad": True, "padding": False}, {"text": (1, 2), "padding": "max_length", "max_length": 64,
                                                        "pad_id": 0, "padding_side": "left", "return_offsets": True},
    {"text": (7, 7), "cache_prefix": True, "return_offsets": True},
)

STRESS: tuple[dict[str, Any], ...] = (
    {"random": 40, "return_offsets": True}, {"random": 40, "parse_special": False, "return_offsets": True})


# mistakes that a kernel of it could make

def _offsets(change: Callable[[str, tuple[int, int]], tuple[int, int]]) -> Callable[[Any, Values], Results | None]:
    def alter(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        spans = getattr(out, "offsets", None)
        if spans is None:
            return None
        single = isinstance(v["text"], str)
        texts, rows = ([v["text"]], [spans]) if single else (v["text"], spans)
        moved = [[change(t, tuple(s)) for s in row] for t, row in zip(texts, rows)]
        return Results((replace(out, offsets=moved[0] if single else moved),))

    return alter


ALTERATIONS: tuple[Alteration, ...] = (
    Alteration("convention", "offsets one too far", _offsets(lambda t, s: (s[0] + 1, s[1] + 1))),
    Alteration("convention", "offsets in bytes, not characters", _offsets(
    lambda t, s: (len(t[:s[0]].encode()), len(t[:s[1]].encode())))),
    replaced("convention", "special tokens not added", "add_special_tokens", False),
    replaced("convention", "truncated on the other side", "truncation_side", lambda v: "left"
    if v["truncation_side"] != "left" else "right"),
    replaced("convention", "padded on the other side", "padding_side", lambda v: "left"
    if v["padding_side"] != "left" else "right"))

OP = Op(
    name="tokenize", family="tokenization", reference=reference, meta=meta, inputs=inputs, cases=CASES,
    stress=STRESS, alterations=ALTERATIONS,
    tolerance=Tolerance({"float32": (0.0, 0.0)}), shapes={}, read=read,
    reads=(*FACTS, "texts", "characters", "padded", "truncated"), dtypes=("int64",),
    ranges={"max_length": INT32, "pad_id": INT32, "pad_to_multiple_of": INT32},
    requires=(present("vocab_hash"), at_least("max_length", 1, Code.VALUE_OUT_OF_RANGE),
              at_least("pad_id", 0, Code.VALUE_OUT_OF_RANGE),
              at_least("pad_to_multiple_of", 1, Code.VALUE_OUT_OF_RANGE)),
)
