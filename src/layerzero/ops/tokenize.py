"""Text to token ids, exactly as the tokenizer's own library does it.

- `tokenizer` is a `tokenizers.Tokenizer`, a fast tokenizer of transformers, a
  `tiktoken.Encoding`, a `sentencepiece.SentencePieceProcessor`, the path of a tokenizer.json,
  *.model or *.tiktoken file or of a folder with one, or the result of `lz.tokens.load_tokenizer`,
  which saves identifying the tokenizer in every call.
- Special tokens are added as the library adds them: by the post-processor, or by add_bos and
  add_eos of a SentencePieceProcessor; tiktoken adds none. `parse_special` says whether special
  tokens written in the text become special tokens (True) or stay text (False); None leaves it to
  the library: tokenizers parses them, tiktoken raises, sentencepiece has none.
- `truncation` and `padding` default to the tokenizer's own settings; False turns them off.
  `padding` is True or "longest", or "max_length". Truncation keeps the added special tokens, as the
  libraries do.
- Offsets are half-open ranges of characters (code points) of the text; a character that several
  tokens share is in the range of each. Added special tokens have (0, 0).
- `cache_prefix` keeps the tokens of a long text and reuses them for texts with the same beginning,
  such as a system prompt. The result is the same.
- A text with a lone surrogate is an InvalidCall: it is not Unicode text, and the libraries disagree
  about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from types import NoneType
from typing import Any, Literal

import torch

from ..spec.errors import InvalidCall
from ..spec.grid import bucket_top
from ..spec.mistake import Mistake, Results, Values
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import at_least, present
from .formulas.common import READS_ON_HOST
from .formulas.mistakes import replace_argument
from .formulas.tokenizer.bpe import BYTE_LEVEL_BPE, ByteLevelBPE, tiny_tokenizer
from .formulas.tokenizer.identity import FACTS, TokenizerHandle, from_json, identify
from .formulas.tokenizer.tokenization import (
    WORDS,
    EncodedText,
    Request,
    Tokens,
    check_texts,
    make_kernel,
    resolve_lengths,
)

Side = Literal["left", "right"]


def _encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[EncodedText]:
    bpe: ByteLevelBPE = handle.built("formula", lambda h: ByteLevelBPE(json.loads(h.payload)))
    before, after = bpe.added_ids() if request.add_special_tokens else ([], [])
    return [EncodedText(*bpe.encode(text, bool(request.parse_special)), before, after)
            for text in texts]


_run = make_kernel(_encode)


def reference(
    text: str | list[str], tokenizer: Any, *, add_special_tokens: bool = True,
    parse_special: bool | None = None, truncation: bool | None = None,
    padding: bool | str | None = None, max_length: int | None = None,
    truncation_side: Side | None = None, padding_side: Side | None = None,
    pad_id: int | None = None, pad_to_multiple_of: int | None = None, return_offsets: bool = False,
    return_attention_mask: bool = True, cache_prefix: bool = False,
) -> Tokens:
    """Returns the ids of one or several texts, their attention mask and, on request, offsets."""
    return _run(text, tokenizer, add_special_tokens=add_special_tokens, parse_special=parse_special,
                truncation=truncation, padding=padding, max_length=max_length,
                truncation_side=truncation_side, padding_side=padding_side, pad_id=pad_id,
                pad_to_multiple_of=pad_to_multiple_of, return_offsets=return_offsets,
                return_attention_mask=return_attention_mask)


def meta(text: str | list[str], tokenizer: Any, **options: Any) -> None:
    """Returns nothing: the number of ids is only known after encoding."""


def read(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of tokenizer and texts; InvalidCall before any library is called."""
    texts = check_texts(values["text"])
    if not isinstance(values["padding"], (bool, str, NoneType)):
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "a bool, 'longest', 'max_length' or None",
            type(values["padding"]).__name__, "padding"))
    handle = identify(values["tokenizer"])
    lengths = resolve_lengths(handle.settings, *(values[name] for name in (
        "truncation", "padding", "max_length", "truncation_side", "padding_side", "pad_id",
        "pad_to_multiple_of")))
    return {**handle.facts, "texts": bucket_top(len(texts)),
            "characters": bucket_top(sum(map(len, texts))),
            "padded": lengths.pad is not None, "truncated": lengths.limit is not None}


_PIECES = ("the", " ", "hell", "o", "\n", "é", "日本", "👩\u200d👧", "e\u0301", "12", "'s", "<s>",
           "  ", "\u00a0", "Ω", "\t", "and")
_TEXTS = ("", "the", "hello the world and 12 more", "it's  the\n\n end ", "<s>hello</s> <name>",
          "naïve 日本 👩\u200d👧 e\u0301", "\0 nul", "the hell " * 80,
          "the hell " * 79 + "and more ",
          # parts of words, special tokens and characters, which the next text would complete
          "hell", "o w", "or the</", "s><s", ">", "1", "2'", "s ", " e", "\u0301👩\u200d", "👧<s>",
          # longer than any window: sentences of 43 and 37 characters, a word of 600
          "hello the world, and 12 日本 👩\u200d👧 in the end.\n" * 230 + "hello" * 120
          + " the hell and the world of more words" * 280,
          # what is often changed on the way: a mark at the beginning, lines of Windows, capitals,
          # long numbers, spaces, digits and letters that have another form, signs without a place
          "\ufeffIT'S the END\r\nwe'LL see 1234567 or 3.14159e-10\r\n\r\n a\u2003b\u3000c\u2028d"
          "\x85e \u0663\u0664 \u2167 \u00bd \u00b2 \ufb01 \u00c5 \u212a \u0130 \u00df \u017f"
          " \uac00 \u1112\u1161\u11ab \U00020000 \U0001d49c \ufffd\ue000\u200b\u200e\x1b\x7f\r x\r",
          " \t\ufeff the\r\nend\t \u00a0\u3000",
          # runs of spaces and of lines wherever a part of a long text may end
          *(begin + "".join("o\n\n\n" * (n % 23 == 9) + " " * (2 + n * 7 % 17) + "hell" * (n % 2)
                            for n in range(2_000)) for begin in ("", "the end")),
          # positions beyond 2^16
          "hello the world, and 12 日本 in the end.\n" * 1_750,
          # long words that differ at their ends alone
          " ".join("hello" * n + end for n in (3, 7, 13, 26, 52, 110)
                   for end in ("", "o", "the", "end", "hell", "é", "12")))
LONG_WORDS = len(_TEXTS) - 1
# of one length: behind one beginning, what tells two texts apart
_ENDINGS = ("and more", "and the ", "<s>hello", "</s>more", "日本 é the")


# A text as it is typed, or as a dialogue grows: each is the one before and a piece more, which goes
# on with a word, a number, a special token, spaces or a character of several code points.
_TYPED = ("say hel", "l", "o w", "orld and t", "he", "  ", " 1", "2", "'", "s <", "s>hel", "lo</",
          "s", "> e", "\u0301", " 👩", "\u200d👧", "\n", "\n the ", "end")


MANY, SHORT = 210, 64                          # times the texts, where they are short
DRAWN = 80                                     # pieces


@lru_cache(maxsize=16)
def _tiny_tokenizer(template: bool, pad: bool, variant: str) -> TokenizerHandle:
    """Returns the same one for all calls, as callers have it: what is kept of it may be stale."""
    return from_json(json.dumps(tiny_tokenizer(template, pad, variant=variant)), "tiny_tokenizer")


def _text(index: int, prefix: str) -> str:
    return _TEXTS[index] if index >= 0 else prefix + "".join(_TYPED[:-index])


def _long_texts(seed: int, count: int) -> list[str]:
    """Returns texts in which any place may lie within spaces, lines, digits or a word."""
    gen = torch.Generator().manual_seed(seed)

    def piece() -> str:
        kind, n = (int(torch.randint(most, (), generator=gen)) for most in (6, 40))
        return (" " * n, " " * n, "\n" * (n % 5) + " ", "hello"[:1 + n % 5], "12" * (n % 9),
                "日本 é"[:1 + n % 4])[kind]

    return ["".join(piece() for _ in range(750)) for _ in range(count)]


def inputs(
    *, text: int | tuple[int, ...] = 2, random: int = 0, template: bool = False, pad: bool = False,
    variant: str = "", ending: str = "", beginning: str = "long", drawn: bool = False,
    many: bool = False, long: int = 0, seed: int = 0, dtype: torch.dtype = torch.int64,
    device: str = "cpu", **options: Any,
) -> dict[str, Any]:
    """Returns the texts with these indices (-n: the first n pieces of what is typed), or `random`
    random ones, or one of `drawn` pieces, or one with this beginning and ending (or with the
    ending amid what is "around"), and a small tokenizer. `many`: more texts than workers take at
    once."""
    tokenizer = _tiny_tokenizer(template, pad, variant)
    prefix = "the hell " * 79 if beginning == "long" else ""
    texts = (_text(text, prefix) if isinstance(text, int)
             else [_text(i, prefix) for i in text])
    if many and isinstance(texts, list) and sum(map(len, texts)) < SHORT:
        texts = texts * MANY
    if long:
        texts = _long_texts(seed, long)
    if random or drawn:
        gen = torch.Generator().manual_seed(seed)
        texts = ["".join(_PIECES[int(i)] for i in torch.randint(len(_PIECES), (n,), generator=gen))
                 for n in (range(random) if random else (DRAWN,))]
        texts = texts[0] if drawn else texts
    if ending:
        texts = "the hell " * (3 if beginning == "short" else 79) + ending
        texts += " the hell" * 79 if beginning == "around" else ""
    return {"text": texts, "tokenizer": tokenizer, **options}


VARIANTS = ("prefixed", "trimmed", "whole words", "nested", "spaces", "accents")
_ALL = tuple(range(9))
_PARTS = (9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 9, 0, 10, 9, 9)
CASES: tuple[dict[str, Any], ...] = (
    {}, {"text": 0}, {"text": 6}, {"text": (2,)}, {"text": ()},
    {"text": _ALL, "return_offsets": True},
    {"text": _ALL, "template": True, "return_offsets": True},
    {"text": _ALL, "template": True, "add_special_tokens": False},
    {"text": _ALL, "parse_special": False, "return_offsets": True},
    {"text": _ALL, "return_attention_mask": False},
    {"text": _ALL, "template": True, "truncation": True, "max_length": 7, "return_offsets": True},
    {"text": _ALL, "template": True, "truncation": True, "max_length": 5, "truncation_side": "left",
     "return_offsets": True},
    {"text": (1, 2), "padding": "longest", "pad_id": 3},
    # a space, which the text has too; a multiple that the longest text is already
    {"text": (1, 2), "padding": "longest", "pad_id": 32},
    {"text": (1, 2), "padding": "longest", "pad_id": 32, "pad_to_multiple_of": 13},
    {"text": (1, 2, 5), "pad": True, "pad_to_multiple_of": 8},
    {"text": (1, 2, 5), "pad": True, "padding": False},
    {"text": (1, 2), "padding": "max_length", "max_length": 64,
                                                        "pad_id": 0, "padding_side": "left",
     "return_offsets": True},
    *({"text": text, "return_offsets": True, **options} for text in (_PARTS, _PARTS[::-1])
      for options in ({}, {"template": True, "parse_special": False})),
    {"text": (7, 7), "cache_prefix": True, "return_offsets": True},
    {"text": (8, 7, 0, 8, 7), "cache_prefix": True},
    {"text": 7, "cache_prefix": True}, {"text": 8, "cache_prefix": True},
    *({"ending": ending, "beginning": beginning, "cache_prefix": True} for ending in _ENDINGS
      for beginning in ("long", "short", "around")),
    *({"ending": ending, "beginning": "around"} for ending in _ENDINGS),
    # what a kept text must not be found without
    *({"ending": ending, "cache_prefix": True, **options} for ending in _ENDINGS[2:4]
      for options in (
        {"parse_special": False}, {"parse_special": True}, {"template": True},
        {"template": True, "add_special_tokens": False}, {"return_offsets": True},
        {"truncation": True, "max_length": 9})),
    # each text goes on where the one before ended, and then loses its end again
    *({"text": -n, "beginning": beginning, "cache_prefix": True} for beginning in ("short", "long")
      for n in (*range(1, len(_TYPED) + 1), *range(len(_TYPED) - 3, 0, -4))),
    *({"text": -n, "beginning": "short", "return_offsets": True} for n in (1, 3, 2, 9, 8, 16)),
    *({"text": text, "return_offsets": True} for text in (21, 22, (22, 21), LONG_WORDS)),
    # tokenizers that treat spaces, words and added tokens otherwise
    *({"text": text, "variant": variant, "return_offsets": True} for variant in VARIANTS
      for text in (_ALL, _PARTS)),
    *({"text": _ALL, "variant": variant, "template": True, "parse_special": False,
       "truncation": True, "max_length": 6, "return_offsets": True} for variant in VARIANTS),
    *({"ending": ending, "variant": variant, "cache_prefix": True} for variant in VARIANTS
      for ending in _ENDINGS[1:4]),
)

STRESS: tuple[dict[str, Any], ...] = (
    {"random": 40, "return_offsets": True},
    {"random": 40, "parse_special": False, "return_offsets": True},
    {"text": (9, 10, 13, 14, 0), "many": True, "return_offsets": True},
    {"drawn": True, "cache_prefix": True},
    {"long": 3, "variant": "spaces"}, {"long": 1, "return_offsets": True},
    {"text": 20, "return_offsets": True}, {"text": 25, "return_offsets": True},
    {"text": (23, 24), "variant": "spaces", "return_offsets": True},
    {"text": (20, 9), "template": True, "cache_prefix": True})


# Mistakes that a kernel for this op could make.

def _change_offsets(
    change: Callable[[str, tuple[int, int]], tuple[int, int]],
) -> Callable[[Any, Values], Results | None]:
    def apply(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        spans = getattr(out, "offsets", None)
        if spans is None:
            return None
        single = isinstance(v["text"], str)
        texts, rows = ([v["text"]], [spans]) if single else (v["text"], spans)
        moved = [[change(t, tuple(s)) for s in row] for t, row in zip(texts, rows)]
        return Results((replace(out, offsets=moved[0] if single else moved),))

    return apply


def _change_masks(change: Callable[[list[int]], list[int]]) -> Callable[[Any, Values],
                                                                        Results | None]:
    def apply(op: Any, v: Values) -> Results | None:
        out = op.reference(**v)
        masks = out.attention_mask
        if masks is None:
            return None
        changed = change(masks) if isinstance(v["text"], str) else [change(m) for m in masks]
        return Results((replace(out, attention_mask=changed),))

    return apply


def _uncounted_special_tokens(op: Any, v: Values) -> Values | None:
    added = len(op.reference(**{**v, "text": "", "padding": False}).ids)
    return {**v, "max_length": v["max_length"] + added} if v["max_length"] and added else None


MISTAKES: tuple[Mistake, ...] = (
    Mistake("convention", "the attention mask of padding on the other side",
            _change_masks(lambda mask: mask[::-1])),
    Mistake("convention", "padding marked as text", _change_masks(lambda mask: [1] * len(mask))),
    Mistake("convention", "a length that added special tokens do not count for",
            _uncounted_special_tokens),
    replace_argument("convention", "special tokens of the text taken otherwise", "parse_special",
                     lambda v: not v["parse_special"]),
    Mistake("convention", "offsets in units of UTF-16", _change_offsets(
        lambda t, s: (len(t[:s[0]].encode("utf-16-le")) // 2,
                      len(t[:s[1]].encode("utf-16-le")) // 2))),
    Mistake("convention", "offsets one too far",
               _change_offsets(lambda t, s: (s[0] + 1, s[1] + 1))),
    Mistake("convention", "offsets in bytes, not characters", _change_offsets(
        lambda t, s: (len(t[:s[0]].encode()), len(t[:s[1]].encode())))),
    replace_argument("convention", "special tokens not added", "add_special_tokens", False),
    replace_argument("convention", "truncated on the other side", "truncation_side",
                     lambda v: "left" if v["truncation_side"] != "left" else "right"),
    replace_argument("convention", "padded on the other side", "padding_side",
                     lambda v: "left" if v["padding_side"] != "left" else "right"))

OP = Op(
    name="tokenize", family="tokenization", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, mistakes=MISTAKES,
    reference_kernel={**READS_ON_HOST, "overhead_us": 5000.0, "requires": BYTE_LEVEL_BPE},
    tolerance=Tolerance({"float32": (0.0, 0.0)}), shapes={}, read=read, words=WORDS,
    reads=(*FACTS, "texts", "characters", "padded", "truncated"), dtypes=("int64",),
    ranges={"max_length": INT32, "pad_id": INT32, "pad_to_multiple_of": INT32},
    requires=(present("vocab_hash"), at_least("max_length", 1, Code.VALUE_OUT_OF_RANGE),
              at_least("pad_id", 0, Code.VALUE_OUT_OF_RANGE),
              at_least("pad_to_multiple_of", 1, Code.VALUE_OUT_OF_RANGE)),
)
