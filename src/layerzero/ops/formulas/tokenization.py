"""What all tokenizers share: the result, and what truncation and padding do to it.

A library turns each text into a `Body`: the ids of the text, what it puts before and after, and where each id comes
from. All else is the same for every library, so it is done here: truncation takes from the text and leaves what was
put around it, padding comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason
from .tokenizer_identity import Settings, TokenizerHandle, identified

MOST_PADDED = 1 << 26                          # ids of a row; a few bytes of a tokenizer's file may ask for more
Span = tuple[int, int]


@dataclass(frozen=True)
class Tokens:
    """The ids of one text, or a list of them for a list of texts.

    `offsets` are half-open ranges of characters (code points) of the text each id comes from; (0, 0) for what was put
    around it and for padding. `attention_mask` is 0 for padding, else 1.
    """

    ids: list[Any]
    offsets: list[Any] | None = None
    attention_mask: list[Any] | None = None
    tokenizer_id: str = ""

    def to_tensor(self, device: torch.device | str | None = None, of: str = "ids") -> Tensor:
        """`ids` or `attention_mask` as an int64 tensor; several texts must have been padded to one length."""
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
class Body:
    """One text as a library encoded it."""

    ids: list[int]
    offsets: list[Span] | None = None          # of `ids`; only where they were asked for
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    truncated: bool = False                    # by the library itself


@dataclass(frozen=True)
class Shape:
    """How long a result may be, and how long it must be."""

    limit: int | None                          # truncate to this
    cut_left: bool
    pad: str | None                            # longest | max_length
    length: int | None                         # of padding="max_length"
    pad_id: int
    multiple: int
    pad_left: bool


@dataclass(frozen=True)
class Request:
    """What a call asks of a library."""

    add_special_tokens: bool
    parse_special: bool | None
    offsets: bool
    shape: Shape


Encode = Callable[[TokenizerHandle, Sequence[str], Request], list[Body]]


def runner(encode: Encode) -> Callable[..., Tokens]:
    """A kernel of lz.tokenize out of what a library does."""

    def run(
        text: str | list[str], tokenizer: Any, *, add_special_tokens: bool = True, parse_special: bool | None = None,
        truncation: bool | None = None, padding: bool | str | None = None, max_length: int | None = None,
        truncation_side: str | None = None, padding_side: str | None = None, pad_id: int | None = None,
        pad_to_multiple_of: int | None = None, return_offsets: bool = False, return_attention_mask: bool = True,
        cache_prefix: bool = False,
    ) -> Tokens:
        handle = identified(tokenizer)
        shape = shape_of(handle.settings, truncation, padding, max_length, truncation_side, padding_side, pad_id,
                         pad_to_multiple_of)
        parse = handle.settings.parse_special if parse_special is None else parse_special
        single = isinstance(text, str)
        bodies = encode(handle, [text] if isinstance(text, str) else list(text),
                        Request(add_special_tokens, parse, return_offsets, shape))
        return finish(bodies, single, shape, return_offsets, return_attention_mask, handle.id)

    return run


def texts_of(text: Any) -> Sequence[str]:
    """The texts of a call; InvalidCall for what is no text."""
    if isinstance(text, str):
        texts: Sequence[str] = (text,)
    elif isinstance(text, (list, tuple)):
        texts = text
        for i, one in enumerate(texts):
            if not isinstance(one, str):
                raise InvalidCall.of("tokenize", Reason(Code.WRONG_TYPE, "a str", type(one).__name__, f"text[{i}]"))
    else:
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "a str or a list of them", type(text).__name__, "text"))
    for i, one in enumerate(texts):
        if not one.isascii():
            try:
                one.encode("utf-8")
            except UnicodeEncodeError as e:
                name = "text" if isinstance(text, str) else f"text[{i}]"
                raise InvalidCall.of("tokenize", Reason(
                    Code.VALUE_OUT_OF_RANGE, "Unicode text; text.encode('utf-16', 'surrogatepass').decode('utf-16', "
                    "'replace') repairs it", f"a lone surrogate at character {e.start}", name)) from e
    return texts


@lru_cache(maxsize=1024, typed=True)           # True is not 1 here
def shape_of(settings: Settings, truncation: bool | None, padding: bool | str | None, max_length: int | None,
             truncation_side: str | None, padding_side: str | None, pad_id: int | None, multiple: int | None) -> Shape:
    """The call's word, or where it says nothing the tokenizer's own; InvalidCall where neither says enough."""
    cut = settings.truncation if truncation is None else truncation
    limit = settings.max_length if max_length is None else max_length
    if cut and limit is None:
        raise InvalidCall.of("tokenize", Reason(
            Code.MISSING_METADATA, "truncation needs it, and this tokenizer has none of its own", None, "max_length"))
    if padding is None:
        pad = settings.padding
    elif isinstance(padding, bool):
        pad = "longest" if padding else None
    elif padding in ("longest", "max_length"):
        pad = padding
    else:
        raise InvalidCall.of("tokenize", Reason(
            Code.VALUE_OUT_OF_RANGE, (False, True, "longest", "max_length", None), str(padding), "padding"))
    length = settings.pad_length if max_length is None and settings.pad_length is not None else limit
    if pad == "max_length" and length is None:
        raise InvalidCall.of("tokenize", Reason(
            Code.MISSING_METADATA, "padding='max_length' needs it", None, "max_length"))
    filler = settings.pad_id if pad_id is None else pad_id
    if pad and filler is None:
        raise InvalidCall.of("tokenize", Reason(
            Code.MISSING_METADATA, "padding needs it, and this tokenizer has none of its own", None, "pad_id"))
    return Shape(limit if cut else None, (truncation_side or settings.truncation_side) == "left", pad, length,
                 filler or 0, multiple or settings.pad_to_multiple_of or 1,
                 (padding_side or settings.padding_side) == "left")


def finish(bodies: Sequence[Body], single: bool, shape: Shape, offsets: bool, mask: bool, identity: str) -> Tokens:
    """Truncate, put the parts together, pad."""
    rows, spans = [], []
    for body in bodies:
        ids, where = body.ids, body.offsets or []
        if shape.limit is not None and not body.truncated:
            room = check_room(shape.limit, len(body.before) + len(body.after))
            if len(ids) > room:
                kept = slice(len(ids) - room, None) if shape.cut_left else slice(room)
                ids, where = ids[kept], where[kept]
        if body.before or body.after:
            ids = [*body.before, *ids, *body.after]
            where = [(0, 0)] * len(body.before) + where + [(0, 0)] * len(body.after)
        rows.append(ids)
        spans.append(where)
    masks = [[1] * len(ids) for ids in rows] if mask else []
    if shape.pad is not None:
        target = max(map(len, rows), default=0) if shape.pad == "longest" else shape.length or 0
        target += -target % shape.multiple
        if target > MOST_PADDED:
            raise InvalidCall.of("tokenize", Reason(
                Code.VALUE_OUT_OF_RANGE, f"a length of at most {MOST_PADDED} to pad to", target, "max_length"))
        for i, ids in enumerate(rows):
            missing = target - len(ids)
            if missing > 0:
                rows[i] = _padded(ids, shape.pad_id, missing, shape.pad_left)
                spans[i] = _padded(spans[i], (0, 0), missing, shape.pad_left)
                if mask:
                    masks[i] = _padded(masks[i], 0, missing, shape.pad_left)
    if single:
        return Tokens(rows[0], spans[0] if offsets else None, masks[0] if mask else None, identity)
    return Tokens(rows, spans if offsets else None, masks if mask else None, identity)


def check_room(limit: int, around: int) -> int:
    """How many ids of the text fit between the special tokens that are added."""
    if limit < around:
        raise InvalidCall.of("tokenize", Reason(
            Code.VALUE_OUT_OF_RANGE, f">= {around}, the special tokens that are added", limit, "max_length"))
    return limit - around


def _padded(row: list[Any], filler: Any, missing: int, left: bool) -> list[Any]:
    return [filler] * missing + row if left else row + [filler] * missing


def sequences_of(ids: Any) -> tuple[list[list[int]], bool]:
    """The sequences of ids of a call of lz.detokenize, and whether it was a single one."""
    given = ids.ids if isinstance(ids, Tokens) else ids
    if isinstance(given, Tensor) and (given.is_floating_point() or given.dtype == torch.bool or given.dim() > 2):
        raise InvalidCall.of("detokenize", Reason(
            Code.WRONG_TYPE, "integers in one or two dimensions", f"{given.dtype} {tuple(given.shape)}", "ids"))
    rows = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(rows, int) and not isinstance(rows, bool):
        rows = [rows]
    if not isinstance(rows, (list, tuple)):
        raise InvalidCall.of("detokenize", Reason(
            Code.WRONG_TYPE, "a list of ids, a list of such lists, a tensor, or what lz.tokenize returned",
            type(ids).__name__, "ids"))
    single = not any(isinstance(row, (list, tuple)) for row in rows)
    if single:
        return [_plain_ids(rows, "ids")], True
    return [_plain_ids(row, f"ids[{i}]") for i, row in enumerate(rows)], False


def _plain_ids(row: Any, name: str) -> list[int]:
    if not isinstance(row, (list, tuple)):
        raise InvalidCall.of("detokenize", Reason(Code.WRONG_TYPE, "a list like the others", type(row).__name__, name))
    try:
        ids = [i if type(i) is int else index(i) for i in row]
    except TypeError as e:
        raise InvalidCall.of("detokenize", Reason(Code.WRONG_TYPE, "integers", str(e), name)) from e
    if ids and min(ids) < 0:
        raise InvalidCall.of("detokenize", Reason(Code.VALUE_OUT_OF_RANGE, ">= 0", min(ids), name))
    return ids


def unknown_id(got: object) -> InvalidCall:
    """The error for an id that the vocabulary does not have."""
    return InvalidCall.of("detokenize", Reason(
        Code.VALUE_OUT_OF_RANGE, "in the vocabulary of the tokenizer", str(got), "ids"))
