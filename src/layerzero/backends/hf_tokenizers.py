"""Hugging Face tokenizers: the library behind tokenizer.json and the fast tokenizers of transformers.

Every handle gets its own copy of the tokenizer, made from what was hashed, without truncation and padding of its own:
so what encodes is what was identified, and a caller who changes the original, or sets its truncation from another
thread as transformers does on every call, cannot reach it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ..ops.detokenize import OP as detokenize
from ..ops.formulas.prefix import SHORTEST, Seams, memory_of, seams_of_json
from ..ops.formulas.tokenization import Body, Request, Span, Tokens, check_room, runner, sequences_of, unknown_id
from ..ops.formulas.tokenizer_identity import SERIALIZING, TokenizerHandle, identified
from ..ops.tokenize import OP as tokenize
from ..spec.errors import InvalidCall
from ..spec.kernel import Kernel
from ..spec.reading import no_panic
from ..spec.reason import Code, Reason
from ..spec.rules import at_least, equals, on, one_of

OURS = one_of("tokenizer_kind", "tokenizers")


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
    return runner(no_panic(_one_by_one))


def _one_by_one(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
    native = _native(handle, bool(request.parse_special))
    return [_body(native.encode(text, add_special_tokens=request.add_special_tokens), handle, text, request)
            for text in texts]


def _encode_batch() -> Callable[..., Tokens]:
    from tokenizers import Tokenizer

    without_offsets = getattr(Tokenizer, "encode_batch_fast", Tokenizer.encode_batch)      # from 0.20

    def encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
        native = _native(handle, bool(request.parse_special))
        run = Tokenizer.encode_batch if request.offsets else without_offsets
        found = run(native, texts, add_special_tokens=request.add_special_tokens)
        return [_body(one, handle, text, request) for one, text in zip(found, texts)]

    return runner(no_panic(encode))


def _encode_cached() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str], request: Request) -> list[Body]:
        parse = bool(request.parse_special)
        native = _native(handle, parse)
        frame = _frame(handle, native) if request.add_special_tokens else ((), ())
        if frame is None or _cut_changes_offsets(handle, request):
            return _one_by_one(handle, texts, request)

        def full(text: str) -> tuple[list[int], Callable[[], Sequence[Span]]]:
            found = native.encode(text, add_special_tokens=False)
            return found.ids, lambda: found.offsets

        memory = memory_of(handle.id, lambda: _seams(handle), eager=True)
        bodies = [memory.encode(text, parse, request.offsets, full) for text in texts]
        for body in bodies:
            body.before, body.after = frame
        return bodies

    return runner(no_panic(encode))


def _frame(handle: TokenizerHandle, native: Any) -> tuple[Sequence[int], Sequence[int]] | None:
    """What is put around every text; None if that cannot be told from some easy ones."""
    def find(_: TokenizerHandle) -> tuple[Any, ...]:
        around = native.num_special_tokens_to_add(False)
        probes = (_split(native.encode(text), around) for text in ("a", "the 1.", "日本"))
        return next(((body.before, body.after) for body in probes if body is not None and body.ids), (None,))

    found = handle.built("frame", find)
    return None if found[0] is None else found


def _split(found: Any, around: int) -> Body | None:
    """The text's tokens and those around them; None if there are more than `around`: the text comes more than once."""
    own = [i for i, sequence in enumerate(found.sequence_ids) if sequence is not None]
    first, end = (own[0], own[-1] + 1) if own else (len(found), len(found))
    ids = found.ids
    return None if len(ids) - (end - first) != around else Body(
        ids[first:end], found.offsets[first:end], ids[:first], ids[end:])


def _seams(handle: TokenizerHandle) -> Seams:
    seams: Seams = handle.built("seams", lambda h: seams_of_json(json.loads(h.payload)))
    return seams


def _body(found: Any, handle: TokenizerHandle, text: str, request: Request) -> Body:
    limit = request.shape.limit
    if limit is None or len(found) <= limit:
        return Body(found.ids, found.offsets if request.offsets else None)
    if not _cut_changes_offsets(handle, request):
        around = _native(handle, bool(request.parse_special)).num_special_tokens_to_add(False)
        body = _split(found, around) if request.add_special_tokens else Body(found.ids, found.offsets)
        if body is not None:
            return body
    return _cut_by_library(handle, text, request)


def _cut_changes_offsets(handle: TokenizerHandle, request: Request) -> bool:
    """A post-processor that trims offsets treats the first token unlike the others, whichever that is after a cut."""
    shape = request.shape
    return request.offsets and shape.limit is not None and shape.cut_left and not _seams(handle).offsets


def _cut_by_library(handle: TokenizerHandle, text: str, request: Request) -> Body:
    """The rare cases where only truncating inside the library gives what the library gives."""
    limit, side = request.shape.limit, "left" if request.shape.cut_left else "right"
    assert limit is not None
    key, wanted = ("cut", bool(request.parse_special)), (limit, side)
    set_to, native = handle.built(key, lambda _: (None, None))
    if set_to != wanted:
        native = _build(handle, bool(request.parse_special))
        native.enable_truncation(limit, direction=side)
        handle.replace(key, (wanted, native))
    check_room(limit, native.num_special_tokens_to_add(False) if request.add_special_tokens else 0)
    found = native.encode(text, add_special_tokens=request.add_special_tokens)
    return Body(found.ids, found.offsets if request.offsets else None, truncated=True)


def _decode() -> Callable[..., str | list[str]]:
    def run(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
        native = _native(identified(tokenizer, "detokenize"), True)
        sequences, single = sequences_of(ids)
        try:
            if single:
                return str(native.decode(sequences[0], skip_special_tokens=skip_special_tokens))
            return list(native.decode_batch(sequences, skip_special_tokens=skip_special_tokens))
        except OverflowError as e:
            raise unknown_id(e) from e

    return no_panic(run)


KERNELS = (
    Kernel("tokenizers.encode", tokenize, _encode, package="tokenizers", requires=(OURS,), overhead_us=60.0,
           graph_safe=False, traceable=False, differentiable=False, baseline=True, note="one text after another"),
    Kernel("tokenizers.encode_batch", tokenize, _encode_batch, package="tokenizers", requires=(OURS,), overhead_us=50.0,
           graph_safe=False, traceable=False, differentiable=False,
           less_work="one call for all texts, and no offsets where none are asked for",
           note="several texts on several threads"),
    Kernel("tokenizers.encode_cached", tokenize, _encode_cached, package="tokenizers", overhead_us=20.0, requires=(
        OURS, on("cache_prefix"), equals("sampled", False, Code.NOT_DETERMINISTIC), at_least("characters", SHORTEST)),
        graph_safe=False, traceable=False, differentiable=False, less_work="reuses the tokens of a long common prefix"),
    Kernel("tokenizers.decode", detokenize, _decode, package="tokenizers", requires=(OURS,), overhead_us=50.0,
           graph_safe=False, traceable=False, differentiable=False, baseline=True),
)
