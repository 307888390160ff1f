"""Loads tokenizers, and inspects and clears the cache of texts they encoded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..files.reading import read_bytes
from ..ops.formulas.tokenizer import identity as tokenizer_identity
from ..ops.formulas.tokenizer import prefix
from ..ops.formulas.tokenizer.identity import TokenizerHandle
from ..ops.formulas.tokenizer.prefix import PrefixCounts
from ..ops.formulas.tokenizer.schema import LIMITS
from ..spec.errors import ConfigError, DataError
from ..spec.reason import Code, Reason, shown


def load_tokenizer(
    source: Any, *, pattern: str | None = None, special_tokens: Mapping[str, int] | None = None,
    identity: str | None = None,
) -> TokenizerHandle:
    """Returns a handle on a tokenizer as it is now: calls with it do not check whether its file
    changed.

    `source` is anything that lz.tokenize takes as its tokenizer. `pattern` and `special_tokens`
    belong to a *.tiktoken file, which holds neither; without them its name must be that of an
    encoding tiktoken knows. `identity` is the id it must have: DataError if it is another
    tokenizer.
    """
    if pattern is None and special_tokens is None:
        handle = tokenizer_identity.identify(source, "load_tokenizer")
    else:
        handle = _from_ranks(source, pattern, special_tokens)
    if identity is not None and identity != handle.id:
        reason = Reason(Code.TOKENIZER_MISMATCH, identity, handle.id)
        raise DataError(
            f"lz.tokens.load_tokenizer: {handle.source}: {reason.message}; vocabulary, merges, "
            "normalizer, pre-tokenizer, special tokens or settings are not those", [reason])
    return handle


def _from_ranks(source: Any, pattern: str | None, special_tokens: Mapping[str, int]
                | None) -> TokenizerHandle:
    if not isinstance(source, (str, os.PathLike)) or pattern is None:
        raise ConfigError(
            "lz.tokens.load_tokenizer: pattern= and special_tokens= go with the path of a "
            f"*.tiktoken file, and special tokens need a pattern; got {type(source).__name__} and "
            f"pattern={pattern!r}")
    special = {} if special_tokens is None else special_tokens
    if not isinstance(pattern, str) or not isinstance(special, Mapping) or not all(
            isinstance(token, str) and type(i) is int and 0 <= i < 2 ** 31
            for token, i in special.items()):
        raise ConfigError(
            "lz.tokens.load_tokenizer: pattern= must be a text and special_tokens= a mapping of "
            f"texts to ids, got {shown(pattern, limit=80)} and {shown(special_tokens, limit=80)}")
    path = os.fspath(source)
    content = read_bytes(path, "a *.tiktoken file", size=LIMITS.size)
    handle = tokenizer_identity.from_content(content, path, pattern, special_tokens)
    if handle.kind != "tiktoken":
        raise ConfigError(
            "lz.tokens.load_tokenizer: pattern= and special_tokens= go with a *.tiktoken file; "
            f"{path!r} is for {handle.kind}, which has its own")
    return handle


def prefix_memories() -> dict[str, PrefixCounts]:
    """Returns by tokenizer id how often a cached prefix was used, and how much is cached."""
    return prefix.memories()


def forget_prefixes() -> None:
    """Drops every cached text."""
    prefix.forget()
