"""tiktoken: OpenAI's byte-pair encodings. It adds no special tokens and loses no character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import FunctionType
from typing import Any

from ..ops.detokenize import OP as detokenize
from ..ops.formulas.prefix import SHORTEST, memory_of, seams_of_pattern
from ..ops.formulas.tokenization import Body, Request, Span, Tokens, runner, sequences_of, unknown_id
from ..ops.formulas.tokenizer_identity import TokenizerHandle, identified
from ..ops.tokenize import OP as tokenize
from ..spec.errors import InvalidCall
from ..spec.kernel import Kernel
from ..spec.reading import no_panic
from ..spec.reason import FOREIGN_ERRORS, Code, Reason
from ..spec.rules import at_least, on, one_of

OURS = one_of("tokenizer_kind", "tiktoken")


def _native(handle: TokenizerHandle) -> Any:
    return handle.built("native", _build)


def _build(handle: TokenizerHandle) -> Any:
    from tiktoken import Encoding

    name, ranks, pattern, special = handle.payload
    try:
        if pattern is not None:
            return no_panic(Encoding)(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {})
        return no_panic(Encoding)(**_as_published(name, ranks))
    except FOREIGN_ERRORS as e:
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "ranks that tiktoken can make an encoding of; for a file that is not named like one of "
            "tiktoken's own pass its split pattern: lz.tokens.load_tokenizer(path, pattern=..., special_tokens=...)",
            f"{handle.source} ({type(e).__name__}: {e})", "tokenizer")) from e


def _as_published(name: str, ranks: dict[bytes, int]) -> dict[str, Any]:
    """What tiktoken says of the encoding it publishes as <name>.tiktoken, with these ranks instead of a download."""
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]

    make = openai_public.ENCODING_CONSTRUCTORS[name]
    if "load_tiktoken_bpe" not in make.__code__.co_names:
        raise KeyError(name)
    parts: dict[str, Any] = FunctionType(make.__code__, {
        **vars(openai_public), "load_tiktoken_bpe": lambda *args, **kwargs: ranks})()
    return parts


def _ids(native: Any, text: str, parse_special: bool | None) -> list[int]:
    if parse_special:
        return native.encode(text, allowed_special="all")  # type: ignore[no-any-return]
    if parse_special is False:
        return native.encode_ordinary(text)  # type: ignore[no-any-return]
    try:
        return native.encode(text)  # type: ignore[no-any-return]
    except ValueError as e:
        raise InvalidCall.of("tokenize", Reason(
            Code.VALUE_OUT_OF_RANGE, "text without special tokens, or parse_special=True to read them as such, or "
            "parse_special=False to read them as text", str(e).splitlines()[0], "text")) from e


class _Lengths(dict[int, tuple[int, bool]]):
    """Of each id: how many characters begin in it, and whether it begins inside one. Found out as they come up."""

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.bytes_of = native.decode_single_token_bytes

    def __missing__(self, token: int) -> tuple[int, bool]:
        raw = self.bytes_of(token)
        found = self[token] = (sum(byte & 0xC0 != 0x80 for byte in raw), raw[0] & 0xC0 == 0x80)
        return found


def _offsets(handle: TokenizerHandle, ids: Sequence[int], length: int) -> list[Span]:
    """As decode_with_offsets: a token that begins inside a character starts where that does.

    Empty if the encoding's pattern leaves characters of the text out: then nobody knows.
    """
    lengths = handle.built("lengths", lambda h: _Lengths(_native(h)))
    pairs = [lengths[i] for i in ids]
    ends = list(accumulate(n for n, _ in pairs))
    if (ends[-1] if ends else 0) != length:
        return []
    return [(end - n - inside, end) for end, (n, inside) in zip(ends, pairs)]


def _body(handle: TokenizerHandle, text: str, ids: list[int], request: Request) -> Body:
    if not request.offsets:
        return Body(ids)
    offsets = _offsets(handle, ids, len(text))
    if text and not offsets:
        raise InvalidCall.of("tokenize", Reason(
            Code.FEATURE_UNSUPPORTED, "False where the pattern leaves characters out", True, "return_offsets"))
    return Body(ids, offsets)


def _encode() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
        native = _native(handle)
        return [_body(handle, text, _ids(native, text, request.parse_special), request) for text in texts]

    return runner(no_panic(encode))


def _encode_batch() -> Callable[..., Tokens]:
    import os
    from concurrent.futures import ThreadPoolExecutor

    def encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
        native = _native(handle)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(texts))) as pool:         # as tiktoken's encode_batch does
            found = list(pool.map(lambda text: _ids(native, text, request.parse_special), texts))
        return [_body(handle, text, ids, request) for text, ids in zip(texts, found)]

    return runner(no_panic(encode))


def _encode_cached() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
        native, parse = _native(handle), request.parse_special
        memory = memory_of(handle.id, lambda: seams_of_pattern(native._pat_str, native._special_tokens), eager=False)

        def full(text: str) -> tuple[list[int], Callable[[], Sequence[Span]]]:
            ids = _ids(native, text, parse)
            return ids, lambda: _offsets(handle, ids, len(text))

        return [_body(handle, text, memory.encode(text, parse, False, full).ids, request) for text in texts]

    return runner(no_panic(encode))


def _decode() -> Callable[..., str | list[str]]:
    def run(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
        native = _native(identified(tokenizer, "detokenize"))
        sequences, single = sequences_of(ids)
        if skip_special_tokens:
            special = set(native._special_tokens.values())
            sequences = [[i for i in sequence if i not in special] for sequence in sequences]
        try:
            texts = [str(native.decode(sequence)) for sequence in sequences]
        except (KeyError, OverflowError) as e:
            raise unknown_id(e) from e
        return texts[0] if single else texts

    return no_panic(run)


KERNELS = (
    Kernel("tiktoken.encode", tokenize, _encode, package="tiktoken", requires=(OURS,), overhead_us=20.0,
           graph_safe=False, traceable=False, differentiable=False, baseline=True, note="one text after another"),
    Kernel("tiktoken.encode_batch", tokenize, _encode_batch, package="tiktoken", overhead_us=400.0, requires=(
        OURS, at_least("texts", 2)), graph_safe=False, traceable=False, differentiable=False,
        less_work="one call for all texts", note="one thread for each processor"),
    Kernel("tiktoken.encode_cached", tokenize, _encode_cached, package="tiktoken", overhead_us=10.0, requires=(
        OURS, on("cache_prefix"), at_least("characters", SHORTEST)), graph_safe=False, traceable=False,
        differentiable=False, less_work="reuses the tokens of a long common prefix"),
    Kernel("tiktoken.decode", detokenize, _decode, package="tiktoken", requires=(OURS,), overhead_us=20.0,
           graph_safe=False, traceable=False, differentiable=False, baseline=True),
)
