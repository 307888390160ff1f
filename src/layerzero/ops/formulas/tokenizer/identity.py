"""The identity of a tokenizer: its kind, the hashes of its parts, and one SHA-256 over all that
decides its results.

No tokenizer library is imported here: an object is recognised by its class, a file by its content.
A file is read again when its size or one of its times changes; an object when its state changes: a
token added, a normalizer set. Replacing the model of a `tokenizers.Tokenizer` in place by another
with the same vocabulary is not detected.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from ....files.reading import read_bytes
from ....spec.errors import DataError, InvalidCall
from ....spec.reason import Code, Reason
from .bpe import is_byte_level_bpe
from .schema import LIMITS, parse_tokenizer_json

ACCEPTED = ("a tokenizers.Tokenizer, a fast tokenizer of transformers, a tiktoken.Encoding, a "
            "sentencepiece.SentencePieceProcessor, the path of a tokenizer.json, *.model or "
            "*.tiktoken file or of a folder with one, or what lz.tokens.load_tokenizer returned")
FACTS = ("tokenizer_kind", "tokenizer_id", "vocab_hash", "merges_hash", "normalizer_id",
         "pretokenizer_id", "special_tokens_hash", "algorithm", "normalizer", "pretokenizer",
         "decoder", "plain_bpe", "sampled")
# objects and files; the objects are kept alive
MAX_REMEMBERED = 64
# transformers writes a far larger number for "no limit"
UNLIMITED = 10 ** 9

# tokenizers raises Exception itself, for a component written in Python.
SERIALIZING: tuple[type[BaseException], ...] = (Exception,)


@dataclass(frozen=True)
class Settings:
    """A tokenizer's own truncation, padding and special tokens, which a call can override."""

    truncation: bool = False
    max_length: int | None = None
    truncation_side: str = "right"
    padding: str | None = None                 # longest | max_length
    pad_length: int | None = None
    pad_id: int | None = None
    pad_to_multiple_of: int | None = None
    padding_side: str = "right"
    parse_special: bool | None = None          # None: the library decides


@dataclass(frozen=True, eq=False)
class TokenizerHandle:
    """A tokenizer as it was when loaded: later changes to object or file have no effect."""

    kind: str                                  # tokenizers | tiktoken | sentencepiece
    facts: Mapping[str, Any]
    settings: Settings
    payload: Any                               # the library builds it from this
    source: str                                # for people: a path, or the type of the object
    _built: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def id(self) -> str:
        """SHA-256 over vocabulary, merges, normalizer, pre-tokenizer, tokens and settings."""
        return str(self.facts["tokenizer_id"])

    def built(self, key: Any, build: Callable[[TokenizerHandle], Any]) -> Any:
        """Returns what `build` makes of the handle, cached by key; threads may both build."""
        value = self._built.get(key)
        return self._built.setdefault(key, build(self)) if value is None else value

    def replace(self, key: Any, value: Any) -> None:
        self._built[key] = value

    def __repr__(self) -> str:
        return f"<lz tokenizer {self.kind} {self.id[:12]} from {self.source}>"


_files: dict[str, tuple[Any, TokenizerHandle]] = {}
# holds the object: its id stays unique
_objects: dict[int, tuple[object, Any, TokenizerHandle]] = {}
# those built from their payload alone
_alive: WeakValueDictionary[str, TokenizerHandle] = WeakValueDictionary()
_handover = threading.local()


def identify(tokenizer: Any, op: str = "tokenize") -> TokenizerHandle:
    """Returns the handle of a caller's `tokenizer`; InvalidCall if it is not accepted."""
    if type(tokenizer) is TokenizerHandle:
        return tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        handle = _identify_file(os.fspath(tokenizer), op)
    else:
        cls: Any = type(tokenizer)
        kind = kind_of(cls)
        if kind is None:
            raise InvalidCall.of(op, Reason(Code.WRONG_TYPE, ACCEPTED, cls.__name__, "tokenizer"))
        handle = _identify_object(tokenizer, kind, op)
    _handover.last = (tokenizer, handle)
    return handle


def identify_again(tokenizer: Any, op: str = "tokenize") -> TokenizerHandle:
    """Returns the handle for a kernel, without checking it again right after `identify`."""
    if type(tokenizer) is TokenizerHandle:
        return tokenizer
    last, _handover.last = getattr(_handover, "last", None), None
    return last[1] if last is not None and last[0] is tokenizer else identify(tokenizer, op)


def forget() -> None:
    """Forgets all files and objects, so that they are read again."""
    _files.clear()
    _objects.clear()


@lru_cache(maxsize=256)
def kind_of(cls: type) -> str | None:
    """Returns tokenizers, transformers, tiktoken or sentencepiece, by the class's module."""
    for base in cls.__mro__:
        root, name = base.__module__.partition(".")[0], base.__name__
        if (root, name) in (("tokenizers", "Tokenizer"), ("tiktoken", "Encoding"),
                            ("sentencepiece", "SentencePieceProcessor")):
            return root
        if root == "transformers" and hasattr(cls, "backend_tokenizer"):
            return root
    return None


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    table.pop(key, None)
    table[key] = value
    for oldest in list(table)[:max(len(table) - MAX_REMEMBERED, 0)]:
        table.pop(oldest, None)


# Objects.

def _identify_object(tokenizer: Any, kind: str, op: str) -> TokenizerHandle:
    read, state_of = _READERS[kind]
    # before it is read: a change meanwhile is detected next time
    state = state_of(tokenizer)
    entry = _objects.get(id(tokenizer))
    if entry is not None and entry[0] is tokenizer and entry[1] == state:
        return entry[2]
    handle = read(tokenizer, op)
    _remember(_objects, id(tokenizer), (tokenizer, state, handle))
    return handle


_MODEL_STATE = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                "fuse_unk", "byte_fallback", "ignore_merges", "max_input_chars_per_word", "unk_id")


def _tokenizers_state(tokenizer: Any) -> tuple[Any, ...]:
    model, size = tokenizer.model, tokenizer.get_vocab_size(False)
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor,
             tokenizer.decoder)
    samples = [tokenizer.id_to_token(i) for i in range(0, size, size // 8 + 1)]
    return (type(model), size, tokenizer.get_added_tokens_decoder(), samples,
            [_component_state(part) for part in parts],
            [getattr(model, name, None) for name in _MODEL_STATE], tokenizer.encode_special_tokens,
            tokenizer.truncation, tokenizer.padding)


def _component_state(component: Any) -> Any:
    try:
        return None if component is None else component.__getstate__()
    except SERIALIZING:                        # written in Python; reading it raises
        return type(component)


def _read_tokenizers(tokenizer: Any, op: str) -> TokenizerHandle:
    return from_json(_serialize(tokenizer, op), "tokenizers.Tokenizer",
                     tokenizer.encode_special_tokens)


def _serialize(tokenizer: Any, op: str) -> str:
    try:
        return str(tokenizer.to_str())
    except SERIALIZING as e:
        raise InvalidCall.of(op, Reason(
            Code.MISSING_METADATA,
            "a tokenizer that can be serialized, since without a hash of its vocabulary and "
            f"components no result of it can be told from another's ({e})", None,
            "vocab_hash of tokenizer")) from e


def _transformers_state(tokenizer: Any) -> tuple[Any, ...]:
    # The backend's truncation and padding are those of the last call, not settings.
    return (*_tokenizers_state(tokenizer.backend_tokenizer)[:-3], tokenizer.pad_token_id,
            tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length,
            tokenizer.split_special_tokens)


def _read_transformers(tokenizer: Any, op: str) -> TokenizerHandle:
    longest = tokenizer.model_max_length
    settings = Settings(max_length=int(longest) if longest < UNLIMITED else None,
                        pad_id=tokenizer.pad_token_id, truncation_side=tokenizer.truncation_side,
                        padding_side=tokenizer.padding_side,
                        parse_special=not tokenizer.split_special_tokens)
    return from_json(_serialize(tokenizer.backend_tokenizer, op),
                     f"transformers.{type(tokenizer).__name__}",
                     settings=settings)


def _tiktoken_state(tokenizer: Any) -> tuple[Any, ...]:
    special = tuple(tokenizer._special_tokens.items())
    return tokenizer.name, tokenizer._pat_str, len(tokenizer._mergeable_ranks), special, id(
        tokenizer._core_bpe)


def _read_tiktoken(tokenizer: Any, op: str) -> TokenizerHandle:
    handle = from_ranks(tokenizer.name, tokenizer._mergeable_ranks, tokenizer._pat_str,
                        tokenizer._special_tokens, f"tiktoken.Encoding {tokenizer.name!r}")
    handle.built("native", lambda _: tokenizer)
    return handle


_SENTENCEPIECE_FLAGS = ("_add_bos", "_add_eos", "_reverse", "_enable_sampling", "_nbest_size",
                        "_alpha")


def _sentencepiece_state(tokenizer: Any) -> tuple[Any, ...]:
    size = tokenizer.GetPieceSize()
    samples = [tokenizer.IdToPiece(i) for i in range(0, size, size // 16 + 1)]
    return size, samples, [getattr(tokenizer, name, None) for name in _SENTENCEPIECE_FLAGS]


def _read_sentencepiece(tokenizer: Any, op: str) -> TokenizerHandle:
    flags = {name: getattr(tokenizer, name, None) for name in _SENTENCEPIECE_FLAGS}
    handle = from_model(tokenizer.serialized_model_proto(), "sentencepiece.SentencePieceProcessor",
                        flags)
    handle.built("native", lambda _: tokenizer)
    return handle


_READERS: dict[str, tuple[Callable[[Any, str], TokenizerHandle], Callable[[Any], Any]]] = {
    "tokenizers": (_read_tokenizers, _tokenizers_state),
    "transformers": (_read_transformers, _transformers_state),
    "tiktoken": (_read_tiktoken, _tiktoken_state),
    "sentencepiece": (_read_sentencepiece, _sentencepiece_state)}


# Files.

def _identify_file(path: str, op: str) -> TokenizerHandle:
    path = _tokenizer_file(path)
    try:
        stat = os.stat(path)
        stamp = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
        entry = _files.get(path)
        if entry is not None and entry[0] == stamp:
            return entry[1]
    except (OSError, ValueError) as e:         # ValueError: a zero byte in the path
        raise InvalidCall.of(op, Reason(
            Code.WRONG_TYPE, ACCEPTED,
            f"{path!r}, which cannot be read ({getattr(e, 'strerror', None) or e})",
            "tokenizer")) from e
    content = read_bytes(path, "a tokenizer's file", size=LIMITS.size)
    handle = from_content(content, path)
    _remember(_files, path, (stamp, handle))
    return handle


def _tokenizer_file(path: str) -> str:
    """Returns the tokenizer file in a model's folder; any other path unchanged."""
    if os.path.isdir(path):
        for name in ("tokenizer.json", "tokenizer.model", "spiece.model"):
            if os.path.isfile(os.path.join(path, name)):
                return os.path.join(path, name)
    return path


def from_content(content: bytes, path: str, pattern: str | None = None,
                 special_tokens: Mapping[str, int] | None = None) -> TokenizerHandle:
    """Identifies a file by its content: some `tokenizer.model` files are tiktoken's."""
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        try:
            return from_json(content.decode("utf-8-sig"), path)
        except UnicodeDecodeError as e:
            raise DataError(f"{path}: wanted a tokenizer.json in UTF-8, found {e}") from e
    # a protocol buffer, usually its first piece
    if content[:1] in (b"\n", b"\x12", b"\x1a"):
        return from_model(content, path)
    name = os.path.splitext(os.path.basename(path))[0]
    return from_ranks(name, _parse_ranks(content, path), pattern, special_tokens, path)


def _parse_ranks(content: bytes, path: str) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = _parse_rank(rank)
        except (ValueError, binascii.Error) as e:
            raise DataError(
                f"{path}, line {number}: wanted a base64 token and its rank as in a *.tiktoken "
                f"file, found {line[:40]!r}; a tokenizer.json and a sentencepiece *.model are read "
                "too") from e
    if not ranks:
        raise DataError(
            f"{path}: wanted a tokenizer.json, a sentencepiece *.model or a *.tiktoken file, found "
            "nothing")
    return ranks


def _parse_rank(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 9:            # ranks are packed in 32 bits
        raise ValueError(f"{digits[:20]!r} is no rank")
    return int(digits)


# The three kinds.

def from_json(text: str, source: str, encode_special_tokens: bool = False,
              settings: Settings | None = None
              ) -> TokenizerHandle:
    """Returns the handle of a tokenizers.Tokenizer, from its tokenizer.json."""
    data = parse_tokenizer_json(text, source)
    model = data["model"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or ()]
    own = settings or _settings_from_json(data, encode_special_tokens)
    rest = {name: data.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor",
                                              "decoder")}
    facts = {
        "vocab_hash": _digest(model["vocab"]), "merges_hash": _digest(merges) if merges else None,
        "normalizer_id": _hash(rest["normalizer"]), "pretokenizer_id": _hash(rest["pre_tokenizer"]),
        "special_tokens_hash": _hash(data.get("added_tokens") or []),
        "algorithm": model.get("type") or ("BPE" if "merges" in model else "unknown"),
        **{name: (rest[part] or {}).get("type") for name, part in
           (("normalizer", "normalizer"), ("pretokenizer", "pre_tokenizer"),
            ("decoder", "decoder"))},
        "plain_bpe": is_byte_level_bpe(data), "sampled": bool(model.get("dropout"))}
    # older files omit it
    others = {k: v for k, v in model.items() if k not in ("vocab", "merges") and v is not False}
    return _make_handle("tokenizers", facts, own, text, source,
                        [rest["post_processor"], rest["decoder"], others])


def _settings_from_json(data: Mapping[str, Any], encode_special_tokens: bool) -> Settings:
    cut, pad = data.get("truncation") or {}, data.get("padding") or {}
    fixed = pad.get("strategy", {}).get("Fixed") if isinstance(pad.get("strategy"), dict) else None
    return Settings(
        bool(cut), cut.get("max_length"), cut.get("direction", "Right").lower(),
        None if not pad else "longest" if fixed is None else "max_length", fixed, pad.get("pad_id"),
        pad.get("pad_to_multiple_of") or None, pad.get("direction", "Right").lower(),
        not encode_special_tokens)


def from_ranks(name: str, ranks: Mapping[bytes, int], pattern: str | None,
               special_tokens: Mapping[str, int] | None, source: str) -> TokenizerHandle:
    """Returns the handle of a tiktoken.Encoding, without a pattern the published one's."""
    missing = next((byte for byte in range(256) if bytes((byte,)) not in ranks), None)
    if missing is not None:
        raise DataError(
            f"{source}: wanted a rank for each of the 256 single bytes, found none for "
            f"0x{missing:02x}; tiktoken panics over text with such a byte")
    table = hashlib.sha256()
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        table.update(struct.pack("<II", len(token), rank) + token)
    vocab_hash = table.hexdigest()             # the ranks are the vocabulary and the merges in one
    named = None if pattern is not None else name
    facts = {"vocab_hash": vocab_hash, "merges_hash": vocab_hash, "normalizer_id": _hash(None),
             "pretokenizer_id": _hash([pattern, named]),
             "special_tokens_hash": _hash([sorted((special_tokens or {}).items()), named]),
             "algorithm": "BPE", "normalizer": None, "pretokenizer": None, "decoder": None,
             "plain_bpe": False,
             "sampled": False}
    payload = (name, dict(ranks), pattern, None if special_tokens is None else dict(special_tokens))
    return _make_handle("tiktoken", facts, Settings(), payload, source, [])


def from_model(proto: bytes, source: str,
               flags: Mapping[str, Any] = MappingProxyType({})) -> TokenizerHandle:
    """Returns the handle of a sentencepiece.SentencePieceProcessor, from its serialized model."""
    sections: dict[int, list[bytes]] = {}
    try:
        for number, value in _fields(proto):
            if isinstance(value, bytes):
                sections.setdefault(number, []).append(value)
        pieces = [dict(_fields(piece)) for piece in sections.get(1, ())]
        trainer = dict(_fields(b"".join(sections.get(2, ()))))
        if any(not isinstance(p.get(1, b""), bytes) or not isinstance(p.get(3, 1), int)
               for p in pieces):
            raise ValueError("a piece that is no text with a type")
    except (IndexError, ValueError) as e:
        raise DataError(
            f"{source}: wanted a sentencepiece *.model, found what is no protocol buffer "
            f"({e})") from e
    if not pieces:
        raise DataError(f"{source}: wanted a sentencepiece *.model, found one without pieces")
    special = [(p.get(1, b"").hex(), p[3]) for p in pieces if p.get(3, 1) != 1]
    kind = trainer.get(3, 1)
    algorithm = {1: "Unigram", 2: "BPE", 3: "Word", 4: "Char"}.get(kind if isinstance(kind, int)
                                                                   else 0, "unknown")
    facts = {"vocab_hash": _hash(sections[1]), "merges_hash": None,
             "normalizer_id": _hash(sections.get(3, [])), "pretokenizer_id": _hash(None),
             "special_tokens_hash": _hash(special), "algorithm": algorithm,
             "normalizer": "sentencepiece", "pretokenizer": None, "decoder": "sentencepiece",
             "plain_bpe": False, "sampled": bool(flags.get("_enable_sampling"))}
    settings = Settings(pad_id=next((i for i, p in enumerate(pieces)
                                     if p.get(1) == trainer.get(48, b"<pad>")
                                     and p.get(3) == 3), None))
    return _make_handle("sentencepiece", facts, settings, proto, source,
                        [sections.get(2, []), dict(flags)])


def _make_handle(kind: str, facts: dict[str, Any], settings: Settings, payload: Any, source: str,
                 rest: list[Any]
                 ) -> TokenizerHandle:
    identity = _hash([kind, [facts[name] for name in FACTS if name.endswith(("_hash", "_id"))
                             and name in facts], rest,
                      settings.__dict__])
    all_facts = {"tokenizer_kind": kind, "tokenizer_id": identity, **facts}
    ordered = MappingProxyType({name: all_facts[name] for name in FACTS})
    handle = TokenizerHandle(kind, ordered, settings, payload, source)
    return _alive.setdefault(identity, handle) if kind == "tokenizers" else handle


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a protocol buffer in order: varints as ints, all else as bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        value: Any
        if wire == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), at)
            if size < 0 or at + size > len(message):
                raise ValueError(f"field {number} of wire type {wire} at byte {at}")
            value, at = message[at:at + size], at + size
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:                          # at most 64 bits
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"a number of more than 64 bits at byte {at}")


def _hash(value: Any) -> str:
    """Hashes a JSON value; null and absent are the same, as files differ in what they write."""
    return _digest(_without_nulls(value))


def _digest(value: Any) -> str:
    """Hashes the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=bytes.hex)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(v) for v in value]
    return value
