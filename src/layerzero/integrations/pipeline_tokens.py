"""The tokenizer of a model, and the tokenizers inside pipelines.

    handle = tokenizer_for(model)  # a model, its config, its pipeline, its folder, a GGUF file
    patch_tokenizer(pipe)  # pipe encodes a system prompt once, and its ids stay the same

`tokenizer_for` never uses the network. A tokenizer with more ids than the model has embeddings is
refused.

`patch_tokenizer` lets a fast tokenizer of transformers encode through lz.tokenize and its prefix
cache. The cache key is a hash of everything that decides the result, so two models never share
tokens and a changed tokenizer starts empty. What lz.tokenize does not do (pairs, pre-split words,
overflow) the tokenizer does itself, and short texts too.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files.reading import no_panic
from ..models.tokenizers import load_tokenizer
from ..operate.inspection import dispatcher_of
from ..ops.formulas.tokenizer.identity import TokenizerHandle, kind_of
from ..ops.formulas.tokenizer.prefix import MIN_CHARACTERS
from ..spec.errors import ConfigError, DataError, LayerZeroError
from ..spec.reason import FOREIGN_ERRORS, Code, Reason
from .gguf.model import GGUFModel
from .gguf.tokenizer import gguf_tokenizer as gguf_tokenizer

_STOCK = "_layerzero_stock"                    # of a patched class: the original class


# from a model

def tokenizer_for(source: Any) -> TokenizerHandle:
    """Return the tokenizer of a model, config, pipeline or tokenizer object, of a folder, or of a
    GGUF file."""
    if isinstance(source, TokenizerHandle):
        return source
    if isinstance(source, GGUFModel):
        return source.tokenizer  # type: ignore[no-any-return]
    if isinstance(source, (str, os.PathLike)):
        return _from_path(os.fspath(source))
    if _kind(source) is not None:
        return load_tokenizer(source)
    inner = getattr(source, "tokenizer", None)             # a pipeline, a processor
    if inner is not None and inner is not source:
        return tokenizer_for(inner)
    config = getattr(source, "config", source)
    name = getattr(config, "_name_or_path", None) or getattr(source, "name_or_path", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "tokenizer_for: wanted a model that knows the folder it was loaded from, a pipeline, "
            f"a tokenizer, a folder or a GGUF file, got {type(source).__name__}; pass its "
            "tokenizer")
    handle = _from_path(name)
    rows = getattr(getattr(config, "get_text_config", lambda: config)(), "vocab_size", None)
    largest = _largest_id(handle)
    if isinstance(rows, int) and largest >= rows:
        reason = Reason(Code.TOKENIZER_MISMATCH, f"one with ids below {rows}",
                        f"one with the id {largest}")
        raise DataError(
            f"tokenizer_for: {name}: {reason.message}; the model has no embedding for it", [reason])
    return handle


def _from_path(path: str) -> TokenizerHandle:
    if path.endswith(".gguf"):
        return gguf_tokenizer(path)
    if os.path.isfile(path):
        return load_tokenizer(path)
    files = sorted(Path(path).glob("*.gguf")) if os.path.isdir(path) else []
    if (files and not any(Path(path, name).exists()
                          for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))):
        return gguf_tokenizer(files[0])        # every shard of a model holds its tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return load_tokenizer(path)            # a tokenizer.json needs no transformers
    try:
        read = no_panic(AutoTokenizer.from_pretrained)
        return load_tokenizer(read(path, local_files_only=True, trust_remote_code=False))
    except LayerZeroError:
        raise
    # transformers checks nothing before it uses it
    except FOREIGN_ERRORS as e:
        raise DataError(
            f"tokenizer_for: {path!r}: wanted a folder with a tokenizer, or a model that was "
            f"downloaded before (nothing is downloaded here): {e}") from e


def _largest_id(handle: TokenizerHandle) -> int:
    if handle.kind == "tokenizers":
        data = json.loads(handle.payload)
        vocab = data["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
        return max([*ids, *(token["id"] for token in data.get("added_tokens") or ())], default=-1)
    if handle.kind == "tiktoken":
        _, ranks, _, special = handle.payload
        return max([*ranks.values(), *(special or {}).values()])
    return -1


# in pipelines

def patch_tokenizer(target: Any) -> tuple[str, ...]:
    """Let the tokenizers of a pipeline, or a single one, encode through lz.tokenize; returns their
    names."""
    tokenizers = dict(_tokenizers(target, "patch_tokenizer"))
    for tokenizer in tokenizers.values():
        if not hasattr(type(tokenizer), _STOCK):
            stock: Any = type(tokenizer)
            tokenizer.__class__ = _served_class(stock)
    return tuple(tokenizers)


def unpatch_tokenizer(target: Any) -> None:
    """Undo patch_tokenizer."""
    for _, tokenizer in _tokenizers(target, "unpatch_tokenizer"):
        tokenizer.__class__ = getattr(type(tokenizer), _STOCK, type(tokenizer))


def _tokenizers(target: Any, caller: str) -> Iterator[tuple[str, Any]]:
    parts = getattr(target, "components", None)
    if not isinstance(parts, Mapping):
        parts = {"": target} if _kind(target) else {"tokenizer": getattr(target, "tokenizer", None)}
    fast = {name: part for name, part in parts.items() if _kind(part) == "transformers"
            and _has_stock_encode(part)}
    if not fast:
        raise ConfigError(
            f"{caller}: wanted a fast tokenizer of transformers 5 that encodes as they all do, or "
            f"a pipeline with one, got {type(target).__name__}; call lz.tokenize with any other")
    yield from fast.items()


def _kind(tokenizer: Any) -> str | None:
    cls: Any = type(tokenizer)
    return kind_of(cls)


def _has_stock_encode(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerFast
    stock = getattr(type(tokenizer), _STOCK, type(tokenizer))
    encode = getattr(PreTrainedTokenizerFast, "_encode_plus", None)
    return (encode is not None and stock._encode_plus is encode
            and not hasattr(stock, "_batch_encode_plus"))


@functools.cache
def _served_class(stock: Any) -> Any:
    """Return a subclass that tries lz.tokenize first, under the name that is saved."""
    from transformers import BatchEncoding
    from transformers.tokenization_utils_base import TruncationStrategy
    from transformers.utils.generic import PaddingStrategy

    tokenize = dispatcher_of("tokenize").public
    pads = {PaddingStrategy.LONGEST: "longest", PaddingStrategy.MAX_LENGTH: "max_length"}

    def try_tokenize(self: Any, text: Any, options: Mapping[str, Any]) -> Any:
        """Return None where only the tokenizer itself supports the options."""
        batched = isinstance(text, (list, tuple))
        unsupported = ("text_pair", "is_split_into_words", "stride", "return_overflowing_tokens",
                       "return_special_tokens_mask", "return_length")
        types = options.get("return_token_type_ids")
        texts = text if batched else [text]
        if (any(options.get(name) for name in unsupported)
            or not all(isinstance(t, str) for t in texts) \
                 or (types or (types is None and "token_type_ids" in self.model_input_names))):
            return None
        if max(map(len, texts), default=0) < MIN_CHARACTERS:     # too short for the prefix cache
            return None
        padding = pads.get(options.get("padding_strategy", PaddingStrategy.DO_NOT_PAD), False)
        untruncated = TruncationStrategy.DO_NOT_TRUNCATE
        truncation = options.get("truncation_strategy", untruncated) != untruncated
        longest = options.get("max_length")
        if (((padding == "max_length" or truncation) and longest is None)
            or (padding and self.pad_token_id is None)):
            return None
        mask = options.get("return_attention_mask")
        split = options.get("split_special_tokens")
        tokens = tokenize(
            list(text) if batched else text, self,
            add_special_tokens=options.get("add_special_tokens", True),
            parse_special=not (self.split_special_tokens if split is None else split),
            truncation=truncation, padding=padding, max_length=longest,
            padding_side=options.get("padding_side"), pad_id=self.pad_token_id,
            pad_to_multiple_of=options.get("pad_to_multiple_of"),
            return_offsets=bool(options.get("return_offsets_mapping")),
            return_attention_mask="attention_mask" in self.model_input_names if mask is None
            else mask, cache_prefix=True)
        data = {"input_ids": tokens.ids, "attention_mask": tokens.attention_mask,
                "offset_mapping": tokens.offsets}
        data = {name: rows for name, rows in data.items() if rows is not None}
        for ids in tokens.ids if batched else [tokens.ids]:
            self._eventual_warn_about_too_long_sequence(ids, longest, options.get("verbose", True))
        tensors = options.get("return_tensors")
        encodings = _Encodings(lambda: stock._encode_plus(self, text,
                                                          **{**options,
                                                             "return_tensors": None}).encodings)
        return BatchEncoding(data, encodings, tensors, tensors is not None and not batched,
                             n_sequences=1)

    def encode_plus(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        encoding = None if args else try_tokenize(self, text, kwargs)
        return stock._encode_plus(self, text, *args, **kwargs) if encoding is None else encoding

    return type(stock.__name__, (stock,), {
        "_encode_plus": encode_plus, _STOCK: stock, "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__reduce_ex__": lambda self, protocol: (_blank, (stock,), vars(self))})


class _Encodings(Sequence[Any]):
    """The encodings behind .tokens(), .char_to_token() and the like, made on first use."""

    def __init__(self, encode: Callable[[], Sequence[Any]]) -> None:
        self._encode, self._encodings = encode, None

    def _all(self) -> Any:
        if self._encodings is None:
            self._encodings = self._encode()  # type: ignore[assignment]
        return self._encodings

    def __getitem__(self, i: Any) -> Any:
        return self._all()[i]

    def __len__(self) -> int:
        return len(self._all())

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _blank(stock: Any) -> Any:
    cls = _served_class(stock)
    return cls.__new__(cls)
