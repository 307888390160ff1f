"""tiktoken: OpenAI's byte-pair encodings. It adds no special tokens and drops no character."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from types import FunctionType
from typing import Any

from ..files.reading import no_panic
from ..ops.detokenize import OP as detokenize
from ..ops.formulas.tokenizer.identity import TokenizerHandle, identify_again
from ..ops.formulas.tokenizer.prefix import MIN_CHARACTERS, prefix_memory, split_points_from_pattern
from ..ops.formulas.tokenizer.tokenization import (
    EncodedText,
    Request,
    Span,
    Tokens,
    make_kernel,
    read_sequences,
    unknown_id_error,
)
from ..ops.tokenize import OP as tokenize
from ..spec import rules as r
from ..spec.errors import InvalidCall
from ..spec.kernel import Kernel
from ..spec.reason import FOREIGN_ERRORS, Code, Reason

TIKTOKEN = r.one_of("tokenizer_kind", "tiktoken")


def _native(handle: TokenizerHandle) -> Any:
    return handle.built("native", _build)


def _build(handle: TokenizerHandle) -> Any:
    from tiktoken import Encoding

    name, ranks, pattern, special = handle.payload
    try:
        if pattern is not None:
            return no_panic(Encoding)(name, pat_str=pattern, mergeable_ranks=ranks,
                                      special_tokens=special or {})
        return no_panic(Encoding)(**_published_arguments(name, ranks))
    except FOREIGN_ERRORS as e:
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE,
            "ranks that tiktoken can make an encoding of; for a file that is not named like one of "
            "tiktoken's own pass its split pattern: lz.tokens.load_tokenizer(path, pattern=..., "
            "special_tokens=...)",
            f"{handle.source} ({type(e).__name__}: {e})", "tokenizer")) from e


def _published_arguments(name: str, ranks: dict[bytes, int]) -> dict[str, Any]:
    """Returns the arguments of the encoding published as <name>.tiktoken, with these ranks."""
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]

    make = openai_public.ENCODING_CONSTRUCTORS[name]
    if "load_tiktoken_bpe" not in make.__code__.co_names:
        raise KeyError(name)
    parts: dict[str, Any] = FunctionType(make.__code__, {
        **vars(openai_public), "load_tiktoken_bpe": lambda *args, **kwargs: ranks})()
    return parts


def _encode_ids(native: Any, text: str, parse_special: bool | None) -> list[int]:
    if parse_special:
        return native.encode(text, allowed_special="all")  # type: ignore[no-any-return]
    if parse_special is False:
        return native.encode_ordinary(text)  # type: ignore[no-any-return]
    try:
        return native.encode(text)  # type: ignore[no-any-return]
    except ValueError as e:
        raise InvalidCall.of("tokenize", Reason(
            Code.VALUE_OUT_OF_RANGE,
            "text without special tokens, or parse_special=True to read them as such, or "
            "parse_special=False to read them as text", str(e).splitlines()[0], "text")) from e


class _CharacterCounts(dict[int, tuple[int, bool]]):
    """Per id: how many characters begin in it, and whether it begins inside one. Made lazily."""

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.bytes_of = native.decode_single_token_bytes

    def __missing__(self, token: int) -> tuple[int, bool]:
        raw = self.bytes_of(token)
        counts = self[token] = (sum(byte & 0xC0 != 0x80 for byte in raw), raw[0] & 0xC0 == 0x80)
        return counts


def _offsets(handle: TokenizerHandle, ids: Sequence[int], length: int) -> list[Span]:
    """Returns offsets as decode_with_offsets does: a token that begins inside a character starts
    where that does.

    Empty if the encoding's pattern drops characters of the text: then the offsets are unknown.
    """
    counts = handle.built("character_counts", lambda h: _CharacterCounts(_native(h)))
    pairs = [counts[i] for i in ids]
    ends = list(accumulate(n for n, _ in pairs))
    if (ends[-1] if ends else 0) != length:
        return []
    return [(end - n - inside, end) for end, (n, inside) in zip(ends, pairs)]


def _encoded_text(handle: TokenizerHandle, text: str, ids: list[int],
                  request: Request) -> EncodedText:
    if not request.offsets:
        return EncodedText(ids)
    offsets = _offsets(handle, ids, len(text))
    if text and not offsets:
        raise InvalidCall.of("tokenize", Reason(
            Code.FEATURE_UNSUPPORTED, "False where the pattern leaves characters out", True,
            "return_offsets"))
    return EncodedText(ids, offsets)


def _encode() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        native = _native(handle)
        return [_encoded_text(handle, text, _encode_ids(native, text, request.parse_special),
                              request) for text in texts]

    return make_kernel(no_panic(encode))


def _encode_batch() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        native = _native(handle)
        # as tiktoken's encode_batch
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(texts))) as pool:
            encoded = list(pool.map(lambda text: _encode_ids(native, text, request.parse_special),
                                    texts))
        return [_encoded_text(handle, text, ids, request) for text, ids in zip(texts, encoded)]

    return make_kernel(no_panic(encode))


def _encode_cached() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        native, parse = _native(handle), request.parse_special
        memory = prefix_memory(handle.id, lambda: split_points_from_pattern(native._pat_str,
                                                                            native._special_tokens),
                                                                            eager=False)

        def full(text: str) -> tuple[list[int], Callable[[], Sequence[Span]]]:
            ids = _encode_ids(native, text, parse)
            return ids, lambda: _offsets(handle, ids, len(text))

        return [_encoded_text(handle, text, memory.encode(text, parse, False, full).ids, request)
                for text in texts]

    return make_kernel(no_panic(encode))


def _decode() -> Callable[..., str | list[str]]:
    def run(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
        native = _native(identify_again(tokenizer, "detokenize"))
        sequences, single = read_sequences(ids)
        if skip_special_tokens:
            special = set(native._special_tokens.values())
            sequences = [[i for i in sequence if i not in special] for sequence in sequences]
        try:
            texts = [str(native.decode(sequence)) for sequence in sequences]
        except (KeyError, OverflowError) as e:
            raise unknown_id_error(e) from e
        return texts[0] if single else texts

    return no_panic(run)


KERNELS = (
    Kernel("tiktoken.encode", tokenize, _encode, package="tiktoken", requires=(TIKTOKEN,),
           overhead_us=20.0, graph_safe=False, traceable=False, differentiable=False, baseline=True,
           note="one text after another"),
    Kernel("tiktoken.encode_batch", tokenize, _encode_batch, package="tiktoken", overhead_us=400.0,
           requires=(
        TIKTOKEN, r.at_least("texts", 2)), graph_safe=False, traceable=False, differentiable=False,
        less_work="one call for all texts", note="one thread for each processor"),
    Kernel("tiktoken.encode_cached", tokenize, _encode_cached, package="tiktoken", overhead_us=10.0,
           requires=(
        TIKTOKEN, r.on("cache_prefix"), r.at_least("characters", MIN_CHARACTERS)), graph_safe=False,
           traceable=False,
        differentiable=False, less_work="reuses the tokens of a long common prefix"),
    Kernel("tiktoken.decode", detokenize, _decode, package="tiktoken", requires=(TIKTOKEN,),
           overhead_us=20.0, graph_safe=False, traceable=False, differentiable=False,
           baseline=True),
)
