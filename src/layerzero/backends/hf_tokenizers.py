"""Hugging Face tokenizers: the library behind tokenizer.json and the fast tokenizers of
transformers.

Every handle has its own copy of the tokenizer, built from the hashed payload, without truncation
and padding. So the tokenizer that encodes is the one that was identified, and changes to the
original do not affect it: transformers sets its truncation in every call, from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ..files.reading import no_panic
from ..ops.detokenize import OP as detokenize
from ..ops.formulas.tokenizer.identity import SERIALIZING, TokenizerHandle, identify_again
from ..ops.formulas.tokenizer.prefix import (
    MIN_CHARACTERS,
    SplitPoints,
    prefix_memory,
    split_points_from_json,
)
from ..ops.formulas.tokenizer.tokenization import (
    EncodedText,
    Request,
    Span,
    Tokens,
    make_kernel,
    read_sequences,
    room_for_text,
    unknown_id_error,
)
from ..ops.tokenize import OP as tokenize
from ..spec import rules as r
from ..spec.errors import InvalidCall
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason

HF_TOKENIZER = r.one_of("tokenizer_kind", "tokenizers")


def _native(handle: TokenizerHandle, parse_special: bool) -> Any:
    return handle.built(("native", parse_special), lambda h: _build(h, parse_special))


def _build(handle: TokenizerHandle, parse_special: bool) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = no_panic(Tokenizer.from_str)(handle.payload)
    except SERIALIZING as e:
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "a tokenizer.json that the installed tokenizers library can read",
            f"{handle.source}: {e}", "tokenizer")) from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer


def _encode() -> Callable[..., Tokens]:
    return make_kernel(no_panic(_one_by_one))


def _one_by_one(handle: TokenizerHandle, texts: Sequence[str],
                request: Request) -> list[EncodedText]:
    native = _native(handle, bool(request.parse_special))
    return [_encoded_text(native.encode(text, add_special_tokens=request.add_special_tokens),
                          handle, text, request)
            for text in texts]


def _encode_batch() -> Callable[..., Tokens]:
    from tokenizers import Tokenizer

    # from 0.20
    without_offsets = getattr(Tokenizer, "encode_batch_fast", Tokenizer.encode_batch)

    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        native = _native(handle, bool(request.parse_special))
        run = Tokenizer.encode_batch if request.offsets else without_offsets
        encodings = run(native, texts, add_special_tokens=request.add_special_tokens)
        return [_encoded_text(encoding, handle, text, request)
                for encoding, text in zip(encodings, texts)]

    return make_kernel(no_panic(encode))


def _encode_cached() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        parse = bool(request.parse_special)
        native = _native(handle, parse)
        around = _special_around(handle, native) if request.add_special_tokens else ((), ())
        if around is None or _truncation_changes_offsets(handle, request):
            return _one_by_one(handle, texts, request)

        def full(text: str) -> tuple[list[int], Callable[[], Sequence[Span]]]:
            encoding = native.encode(text, add_special_tokens=False)
            return encoding.ids, lambda: encoding.offsets

        memory = prefix_memory(handle.id, lambda: _split_points(handle), eager=True)
        encoded = [memory.encode(text, parse, request.offsets, full) for text in texts]
        for text_encoding in encoded:
            text_encoding.before, text_encoding.after = around
        return encoded

    return make_kernel(no_panic(encode))


def _special_around(handle: TokenizerHandle, native: Any) -> tuple[Sequence[int],
                                                                   Sequence[int]] | None:
    """Returns the special tokens around every text; None if probes do not show them."""
    def probe(_: TokenizerHandle) -> tuple[Any, ...]:
        around = native.num_special_tokens_to_add(False)
        probes = (_split_encoding(native.encode(text), around) for text in ("a", "the 1.", "日本"))
        return next(((encoded.before, encoded.after) for encoded in probes
                     if encoded is not None and encoded.ids), (None,))

    around_text = handle.built("around", probe)
    return None if around_text[0] is None else around_text


def _split_encoding(encoding: Any, around: int) -> EncodedText | None:
    """Splits an encoding into the text's tokens and the special ones; None if text recurs."""
    text_positions = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    first, end = ((text_positions[0], text_positions[-1] + 1) if text_positions
                  else (len(encoding), len(encoding)))
    ids = encoding.ids
    return None if len(ids) - (end - first) != around else EncodedText(
        ids[first:end], encoding.offsets[first:end], ids[:first], ids[end:])


def _split_points(handle: TokenizerHandle) -> SplitPoints:
    points: SplitPoints = handle.built("split_points",
                                       lambda h: split_points_from_json(json.loads(h.payload)))
    return points


def _encoded_text(encoding: Any, handle: TokenizerHandle, text: str,
                  request: Request) -> EncodedText:
    limit = request.lengths.limit
    if limit is None or len(encoding) <= limit:
        return EncodedText(encoding.ids, encoding.offsets if request.offsets else None)
    if not _truncation_changes_offsets(handle, request):
        around = _native(handle, bool(request.parse_special)).num_special_tokens_to_add(False)
        encoded = (_split_encoding(encoding, around) if request.add_special_tokens
                   else EncodedText(encoding.ids, encoding.offsets))
        if encoded is not None:
            return encoded
    return _truncate_in_library(handle, text, request)


def _truncation_changes_offsets(handle: TokenizerHandle, request: Request) -> bool:
    """Returns whether truncation changes offsets, as a trimming post-processor may."""
    lengths = request.lengths
    return (request.offsets and lengths.limit is not None and lengths.cut_left
            and not _split_points(handle).offsets)


def _truncate_in_library(handle: TokenizerHandle, text: str, request: Request) -> EncodedText:
    """Encodes with truncation inside the library, in the rare cases where its offsets need it."""
    limit, side = request.lengths.limit, "left" if request.lengths.cut_left else "right"
    assert limit is not None
    key, truncation = ("cut", bool(request.parse_special)), (limit, side)
    cached_truncation, native = handle.built(key, lambda _: (None, None))
    if cached_truncation != truncation:
        native = _build(handle, bool(request.parse_special))
        native.enable_truncation(limit, direction=side)
        handle.replace(key, (truncation, native))
    room_for_text(limit, native.num_special_tokens_to_add(False) if request.add_special_tokens
                  else 0)
    encoding = native.encode(text, add_special_tokens=request.add_special_tokens)
    return EncodedText(encoding.ids, encoding.offsets if request.offsets else None, truncated=True)


def _decode() -> Callable[..., str | list[str]]:
    def run(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
        native = _native(identify_again(tokenizer, "detokenize"), True)
        sequences, single = read_sequences(ids)
        try:
            if single:
                return str(native.decode(sequences[0], skip_special_tokens=skip_special_tokens))
            return list(native.decode_batch(sequences, skip_special_tokens=skip_special_tokens))
        except OverflowError as e:
            raise unknown_id_error(e) from e

    return no_panic(run)


KERNELS = (
    Kernel("tokenizers.encode", tokenize, _encode, package="tokenizers", requires=(HF_TOKENIZER,),
           overhead_us=60.0, graph_safe=False, traceable=False, differentiable=False, baseline=True,
           note="one text after another"),
    Kernel("tokenizers.encode_batch", tokenize, _encode_batch, package="tokenizers",
           requires=(HF_TOKENIZER,), overhead_us=50.0,
           graph_safe=False, traceable=False, differentiable=False,
           less_work="one call for all texts, and no offsets where none are asked for",
           less_work_when=(r.at_least("texts", 16),),         # starting threads takes longer
           note="several texts on several threads"),
    Kernel("tokenizers.encode_cached", tokenize, _encode_cached, package="tokenizers",
           overhead_us=20.0, requires=(
        HF_TOKENIZER, r.on("cache_prefix"), r.equals("sampled", False, Code.NOT_DETERMINISTIC),
        r.at_least("characters", MIN_CHARACTERS)),
        graph_safe=False, traceable=False, differentiable=False,
           less_work="reuses the tokens of a long common prefix"),
    Kernel("tokenizers.decode", detokenize, _decode, package="tokenizers", requires=(HF_TOKENIZER,),
           overhead_us=50.0, graph_safe=False, traceable=False, differentiable=False,
           baseline=True),
)
