"""Truncation, padding and the result of lz.tokenize, the same for all libraries.

A library turns each text into an `EncodedText`: its ids, their offsets, and the special tokens
before and after. Truncation shortens the text and keeps the special tokens; padding comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from ....spec.errors import InvalidCall
from ....spec.reason import Code, Reason
from ....spec.rules import Wording, Words
from .identity import Settings, TokenizerHandle, identify_again

MAX_PADDED_LENGTH = 1 << 26                    # ids of a row; a tokenizer's file may ask for more
Span = tuple[int, int]

# For `Op.words`: what is known of a tokenizer, as messages say it.
WORDS: Words = {
    "tokenizer_kind": Wording("the library of the tokenizer"),
    "vocab_hash": Wording("vocab_hash", demands={
        "given": "the tokenizer must have a vocabulary that can be read"}),
    "algorithm": Wording("the tokenizer's model"),
    "normalizer": Wording("the tokenizer's normalizer"),
    "pretokenizer": Wording("the tokenizer's pre-tokenizer"),
    "decoder": Wording("the tokenizer's decoder"),
    "plain_bpe": Wording("plain_bpe", demands={
        "True": "the tokenizer must be a plain byte-level BPE one"}),
    "sampled": Wording("sampled", demands={
        "False": "the tokenizer draws at random (dropout, sampling), and must not here"}),
}


@dataclass(frozen=True)
class Tokens:
    """The ids of one text, or a list of them for a list of texts.

    `offsets` are the half-open ranges of characters (code points) of each id in the text; (0, 0)
    for added special tokens and for padding. `attention_mask` is 0 for padding, else 1.
    """

    ids: list[Any]
    offsets: list[Any] | None = None
    attention_mask: list[Any] | None = None
    tokenizer_id: str = ""

    def to_tensor(self, device: torch.device | str | None = None, of: str = "ids") -> Tensor:
        """Returns `ids` or `attention_mask` as int64; several texts must be padded."""
        rows = {"ids": self.ids, "attention_mask": self.attention_mask}.get(of)
        if rows is None:
            known = "'ids' or 'attention_mask', which needs return_attention_mask=True"
            raise InvalidCall.of("tokenize", Reason(Code.VALUE_OUT_OF_RANGE, known, of, "of"))
        lengths = sorted({len(row) for row in rows if isinstance(row, list)})
        if len(lengths) > 1:
            raise InvalidCall.of("tokenize", Reason(
                Code.DIM_MISMATCH, "of one length; pass padding='longest' or padding='max_length'",
                f"lengths from {lengths[0]} to {lengths[-1]}", "ids"))
        return torch.tensor(rows, dtype=torch.int64, device=device)


@dataclass
class EncodedText:
    """One text as a library encoded it."""

    ids: list[int]
    offsets: list[Span] | None = None          # of `ids`, if requested
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    truncated: bool = False                    # by the library itself


@dataclass(frozen=True)
class Lengths:
    """The resolved truncation and padding of a call."""

    limit: int | None                          # the length to truncate to
    cut_left: bool
    pad: str | None                            # longest | max_length
    length: int | None                         # for padding="max_length"
    pad_id: int
    multiple: int
    pad_left: bool


@dataclass(frozen=True)
class Request:
    """The options of a call that a library needs."""

    add_special_tokens: bool
    parse_special: bool | None
    offsets: bool
    lengths: Lengths


Encode = Callable[[TokenizerHandle, Sequence[str], Request], list[EncodedText]]


def make_kernel(encode: Encode) -> Callable[..., Tokens]:
    """Returns a kernel of lz.tokenize that encodes by a library's `encode`."""

    def run(
        text: str | list[str], tokenizer: Any, *, add_special_tokens: bool = True,
        parse_special: bool | None = None, truncation: bool | None = None,
        padding: bool | str | None = None, max_length: int | None = None,
        truncation_side: str | None = None, padding_side: str | None = None,
        pad_id: int | None = None, pad_to_multiple_of: int | None = None,
        return_offsets: bool = False, return_attention_mask: bool = True,
        cache_prefix: bool = False,
    ) -> Tokens:
        handle = identify_again(tokenizer)
        lengths = resolve_lengths(handle.settings, truncation, padding, max_length, truncation_side,
                                  padding_side, pad_id, pad_to_multiple_of)
        parse = handle.settings.parse_special if parse_special is None else parse_special
        single = isinstance(text, str)
        encoded = encode(handle, [text] if isinstance(text, str) else list(text),
                         Request(add_special_tokens, parse, return_offsets, lengths))
        return assemble(encoded, single, lengths, return_offsets, return_attention_mask, handle.id)

    return run


def check_texts(text: Any) -> Sequence[str]:
    """Returns the texts of a call; raises InvalidCall for anything but valid text."""
    if isinstance(text, str):
        texts: Sequence[str] = (text,)
    elif isinstance(text, (list, tuple)):
        texts = text
        for i, item in enumerate(texts):
            if not isinstance(item, str):
                raise InvalidCall.of("tokenize",
                                     Reason(Code.WRONG_TYPE, "a str", type(item).__name__,
                                            f"text[{i}]"))
    else:
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "a str or a list of them", type(text).__name__, "text"))
    for i, item in enumerate(texts):
        if not item.isascii():
            try:
                item.encode("utf-8")
            except UnicodeEncodeError as e:
                name = "text" if isinstance(text, str) else f"text[{i}]"
                raise InvalidCall.of("tokenize", Reason(
                    Code.VALUE_OUT_OF_RANGE,
                    "Unicode text; text.encode('utf-16', 'surrogatepass').decode('utf-16', "
                    "'replace') repairs it", f"a lone surrogate at character {e.start}",
                    name)) from e
    return texts


@lru_cache(maxsize=1024, typed=True)           # True and 1 differ
def resolve_lengths(settings: Settings, truncation: bool | None, padding: bool | str | None,
                    max_length: int | None, truncation_side: str | None, padding_side: str | None,
                    pad_id: int | None, multiple: int | None) -> Lengths:
    """Returns the call's truncation and padding, else the tokenizer's; InvalidCall if partial."""
    cut = settings.truncation if truncation is None else truncation
    limit = settings.max_length if max_length is None else max_length
    if cut and limit is None:
        raise InvalidCall.of("tokenize", Reason(
            Code.MISSING_METADATA, "truncation needs it, and this tokenizer has none of its own",
            None, "max_length"))
    if padding is None:
        pad = settings.padding
    elif isinstance(padding, bool):
        pad = "longest" if padding else None
    elif padding in ("longest", "max_length"):
        pad = padding
    else:
        raise InvalidCall.of("tokenize", Reason(
            Code.VALUE_OUT_OF_RANGE, (False, True, "longest", "max_length", None), str(padding),
            "padding"))
    length = (settings.pad_length if max_length is None and settings.pad_length is not None
              else limit)
    if pad == "max_length" and length is None:
        raise InvalidCall.of("tokenize", Reason(
            Code.MISSING_METADATA, "padding='max_length' needs it", None, "max_length"))
    filler = settings.pad_id if pad_id is None else pad_id
    if pad and filler is None:
        raise InvalidCall.of("tokenize", Reason(
            Code.MISSING_METADATA, "padding needs it, and this tokenizer has none of its own", None,
            "pad_id"))
    return Lengths(limit if cut else None, (truncation_side or settings.truncation_side) == "left",
                   pad, length, filler or 0, multiple or settings.pad_to_multiple_of or 1,
                   (padding_side or settings.padding_side) == "left")


def assemble(encoded: Sequence[EncodedText], single: bool, lengths: Lengths, offsets: bool,
             mask: bool, identity: str) -> Tokens:
    """Truncates, adds special tokens and pads."""
    rows, spans = [], []
    for text in encoded:
        ids, text_spans = text.ids, text.offsets or []
        if lengths.limit is not None and not text.truncated:
            max_tokens = room_for_text(lengths.limit, len(text.before) + len(text.after))
            if len(ids) > max_tokens:
                part = slice(len(ids) - max_tokens, None) if lengths.cut_left else slice(max_tokens)
                ids, text_spans = ids[part], text_spans[part]
        if text.before or text.after:
            ids = [*text.before, *ids, *text.after]
            text_spans = [(0, 0)] * len(text.before) + text_spans + [(0, 0)] * len(text.after)
        rows.append(ids)
        spans.append(text_spans)
    masks = [[1] * len(ids) for ids in rows] if mask else []
    if lengths.pad is not None:
        target = max(map(len, rows), default=0) if lengths.pad == "longest" else lengths.length or 0
        target += -target % lengths.multiple
        if target > MAX_PADDED_LENGTH:
            raise InvalidCall.of("tokenize", Reason(
                Code.VALUE_OUT_OF_RANGE, f"a length of at most {MAX_PADDED_LENGTH} to pad to",
                target, "max_length"))
        for i, ids in enumerate(rows):
            missing = target - len(ids)
            if missing > 0:
                rows[i] = _pad(ids, lengths.pad_id, missing, lengths.pad_left)
                spans[i] = _pad(spans[i], (0, 0), missing, lengths.pad_left)
                if mask:
                    masks[i] = _pad(masks[i], 0, missing, lengths.pad_left)
    if single:
        return Tokens(rows[0], spans[0] if offsets else None, masks[0] if mask else None, identity)
    return Tokens(rows, spans if offsets else None, masks if mask else None, identity)


def room_for_text(limit: int, around: int) -> int:
    """Returns how many ids of the text fit beside the added special tokens."""
    if limit < around:
        raise InvalidCall.of("tokenize", Reason(
            Code.VALUE_OUT_OF_RANGE, f">= {around}, the special tokens that are added", limit,
            "max_length"))
    return limit - around


def _pad(row: list[Any], filler: Any, missing: int, left: bool) -> list[Any]:
    return [filler] * missing + row if left else row + [filler] * missing


def read_sequences(ids: Any) -> tuple[list[list[int]], bool]:
    """Returns the sequences of a call of lz.detokenize, and whether it was a single one."""
    values = ids.ids if isinstance(ids, Tokens) else ids
    if (isinstance(values, Tensor) and (values.is_floating_point() or values.dtype == torch.bool
                                        or values.dim() > 2)):
        raise InvalidCall.of("detokenize", Reason(
            Code.WRONG_TYPE, "integers in one or two dimensions",
            f"{values.dtype} {tuple(values.shape)}", "ids"))
    rows = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(rows, int) and not isinstance(rows, bool):
        rows = [rows]
    if not isinstance(rows, (list, tuple)):
        raise InvalidCall.of("detokenize", Reason(
            Code.WRONG_TYPE,
            "a list of ids, a list of such lists, a tensor, or what lz.tokenize returned",
            type(ids).__name__, "ids"))
    single = not any(isinstance(row, (list, tuple)) for row in rows)
    if single:
        return [_read_ids(rows, "ids")], True
    return [_read_ids(row, f"ids[{i}]") for i, row in enumerate(rows)], False


def _read_ids(row: Any, name: str) -> list[int]:
    if not isinstance(row, (list, tuple)):
        raise InvalidCall.of("detokenize", Reason(Code.WRONG_TYPE, "a list like the others",
                                                  type(row).__name__, name))
    try:
        ids = [i if type(i) is int else index(i) for i in row]
    except TypeError as e:
        raise InvalidCall.of("detokenize", Reason(Code.WRONG_TYPE, "integers", str(e), name)) from e
    if ids and min(ids) < 0:
        raise InvalidCall.of("detokenize", Reason(Code.VALUE_OUT_OF_RANGE, ">= 0", min(ids), name))
    return ids


def unknown_id_error(got: object) -> InvalidCall:
    """Returns the error for an id outside the vocabulary."""
    return InvalidCall.of("detokenize", Reason(
        Code.VALUE_OUT_OF_RANGE, "in the vocabulary of the tokenizer", str(got), "ids"))
