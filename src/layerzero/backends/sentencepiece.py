"""sentencepiece: *.model files, as of Llama 2 and T5.

It normalizes and segments the whole text at once, and a unigram model sums float32 scores over all
of it, so a prefix may be tokenized differently on its own: there is no kernel that reuses a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ops.detokenize import OP as detokenize
from ..ops.formulas.tokenizer.identity import TokenizerHandle, identify_again
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
from ..spec.reason import Code, Reason

SENTENCEPIECE = r.one_of("tokenizer_kind", "sentencepiece")
SPECIAL_AS_TEXT = r.one_of("parse_special", None, False)      # control symbols in a text stay text


def _native(handle: TokenizerHandle) -> Any:
    return handle.built("native", _build)


def _build(handle: TokenizerHandle) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=handle.payload)
    except (RuntimeError, ValueError) as e:
        raise InvalidCall.of("tokenize", Reason(
            Code.WRONG_TYPE, "a model that the installed sentencepiece can read",
            f"{handle.source}: {e}", "tokenizer")) from e


def _special_around(native: Any, request: Request) -> tuple[list[int], list[int]]:
    if not request.add_special_tokens:
        return [], []
    return ([native.bos_id()] if native._add_bos else [], [native.eos_id()] if native._add_eos
            else [])


def _encode_ids(native: Any, text: str | Sequence[str]) -> list[Any]:
    return native.Encode(text, out_type=int, add_bos=False, add_eos=False)  # type: ignore[no-any-return]


def _encode_with_offsets(native: Any, text: str) -> tuple[list[int], list[Span]]:
    """Returns ids and character offsets of the text, without special tokens."""
    options: dict[str, Any] = {"add_bos": False, "add_eos": False, "reverse": False}
    if hasattr(native, "EncodeAsOffsetMapping"):           # from 0.2.2
        encoding = native.Encode(text, return_type="offset_mapping", **options)
        ids, spans = list(encoding["ids"]), [(int(s), int(e)) for s, e in encoding["offsets"]]
    else:
        pieces = native.Encode(text, out_type="immutable_proto", **options).pieces
        ids, spans = [p.id for p in pieces], [(p.begin, p.end) for p in pieces]
    return (ids[::-1], spans[::-1]) if native._reverse else (ids, spans)


def _encode() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        native = _native(handle)
        before, after = _special_around(native, request)
        if request.offsets:
            return [EncodedText(*_encode_with_offsets(native, text), before, after)
                    for text in texts]
        return [EncodedText(_encode_ids(native, text), None, before, after) for text in texts]

    return make_kernel(encode)


def _encode_batch() -> Callable[..., Tokens]:
    def encode(handle: TokenizerHandle, texts: Sequence[str],
               request: Request) -> list[EncodedText]:
        native = _native(handle)
        before, after = _special_around(native, request)
        return [EncodedText(list(ids), None, before, after) for ids in _encode_ids(native, texts)]

    return make_kernel(encode)


def _decode() -> Callable[..., str | list[str]]:
    def run(ids: Any, tokenizer: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
        native = _native(identify_again(tokenizer, "detokenize"))
        sequences, single = read_sequences(ids)
        size, largest = native.GetPieceSize(), max(map(max, filter(None, sequences)), default=0)
        if largest >= size:                    # some releases truncate large ids
            raise unknown_id_error(f"{largest} of {size}")
        texts = [str(native.Decode(sequence)) if sequence else "" for sequence in sequences]
        return texts[0] if single else texts

    return run


KERNELS = (
    Kernel("sentencepiece.encode", tokenize, _encode, (SENTENCEPIECE, SPECIAL_AS_TEXT),
           "sentencepiece", overhead_us=40.0,
           graph_safe=False, traceable=False, differentiable=False, baseline=True,
           note="one text after another"),
    Kernel("sentencepiece.encode_batch", tokenize, _encode_batch,
           (SENTENCEPIECE, SPECIAL_AS_TEXT, r.at_least("texts", 2),
            r.one_of("return_offsets", False)),
           "sentencepiece", overhead_us=35.0,
           graph_safe=False, traceable=False, differentiable=False,
           note="several texts on several threads"),
    Kernel("sentencepiece.decode", detokenize, _decode,
           (SENTENCEPIECE, r.on("skip_special_tokens")), "sentencepiece", overhead_us=30.0,
           graph_safe=False, traceable=False, differentiable=False, baseline=True),
)
