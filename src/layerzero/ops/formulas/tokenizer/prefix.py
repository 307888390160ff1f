"""Prefix reuse for tokenizers: which tokens of an encoded text hold for another text with the same
beginning.

A text can be split at a point if the parts before and after it are encoded independently. Two kinds
of split points are used:

- in front of an added token that is matched in the raw text. Libraries split the text there first
  and encode the parts between such tokens separately. Which token matches depends on as many
  characters as the longest has, so these must be the same in both texts. Holds for every
  normalizer, pre-tokenizer and model.
- in front of a space that follows a visible ASCII character. Holds if the normalizer works
  character by character or never across a space, and the first pre-tokenizer always splits there:
  no alternative of its pattern matches something visible followed by a space, and none looks
  behind. Then no match crosses the point, no match attempt looks beyond the space, and the matches
  after it are those of the rest alone. Added tokens must not contain the point.

A text is then encoded as the tokens of the stored text up to the last split point in the common
prefix, and the library's own encoding of the rest.
"""

from __future__ import annotations

import os
import re
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from .tokenization import EncodedText, Span

MIN_CHARACTERS = 512                           # shorter texts are not stored
KEY_CHARACTERS = 64                            # texts are looked up by their first characters
MAX_TEXTS_PER_KEY = 4
MAX_TEXTS = 64                                 # of a tokenizer
MAX_CHARACTERS = 1 << 20                       # of a tokenizer's texts
MAX_TOKENIZERS = 16
MAX_ATTEMPTS = 64                              # spaces tried from the end of the common prefix

# Alternatives of the patterns in use (GPT-2, cl100k, Llama 3, Qwen 2, o200k), without possessive
# quantifiers. None matches something visible followed by a space, and none looks behind.
_ALTERNATIVES = frozenset((
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?:[sdmt]|ll|ve|re)", r"'(?i:[sdmt]|ll|ve|re)", r" ?\p{L}+", r" ?[\p{L}]+", r" ?\p{N}+",
    r" ?[\p{N}]+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+", r"\s", r"\s+$",
    r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r"\p{N}", r"\p{N}+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s*[\r\n]",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"))
_LOCAL_NORMALIZERS = frozenset((
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt",
    "Precompiled"))
_SPLITS_AT_SPACES = frozenset(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"))
_POSSESSIVE = re.compile(r"([+?*]|\{\d+(?:,\d*)?\})\+")
_VISIBLE = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class SplitPoints:
    """Where the texts of one tokenizer can be split."""

    spaces: bool = False
    # added tokens to split in front of: content -> id
    special: Mapping[str, int] = field(default_factory=dict)
    # likewise, if special tokens are encoded as text
    ordinary: Mapping[str, int] = field(default_factory=dict)
    longest: int = 0                           # length of the longest added token
    # the offsets of a part encoded alone are those in the whole, shifted
    offsets: bool = True


def split_points_from_json(data: Mapping[str, Any]) -> SplitPoints:
    """Returns the split points of a tokenizer.json."""
    added = data.get("added_tokens") or ()
    splittable = [t for t in added if not (t.get("normalized") or t.get("lstrip")
                                           or t.get("single_word"))
                  and t["content"] and t["content"] == t["content"].strip()]
    reaches_over_spaces = any(t.get("rstrip") or any(c.isspace() for c in t["content"])
                              or (t.get("normalized") and not _VISIBLE.fullmatch(t["content"]))
                              for t in added)
    spaces = (not reaches_over_spaces and _is_local(data.get("normalizer"))
              and _splits_at_spaces(data.get("pre_tokenizer")))
    post = data.get("post_processor") or {}
    trimming = any(p.get("trim_offsets") and p.get("add_prefix_space")
                   for p in (post, *post.get("processors", ())))
    return SplitPoints(spaces, {t["content"]: t["id"] for t in splittable},
                       {t["content"]: t["id"] for t in splittable if not t.get("special")},
                       max((len(t["content"]) for t in added), default=0), not trimming)


def split_points_from_pattern(pattern: str, special_tokens: Mapping[str, int]) -> SplitPoints:
    """Returns the split points of a tiktoken encoding."""
    spaces = (is_known_pattern(pattern)
              and not any(c.isspace() for token in special_tokens for c in token))
    return SplitPoints(spaces, dict(special_tokens), {}, max(map(len, special_tokens), default=0))


def _is_local(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(map(_is_local, normalizer.get("normalizers", ())))
    # as sentencepiece's converters write: several spaces become one
    if normalizer.get("type") == "Replace":
        return normalizer.get("pattern") == {"Regex": " {2,}"} and normalizer.get("content") == " "
    return normalizer.get("type") in _LOCAL_NORMALIZERS


def _splits_at_spaces(pre: Mapping[str, Any] | None) -> bool:
    kind = pre.get("type") if pre else None
    if pre is None or kind in _SPLITS_AT_SPACES:
        return pre is not None
    # later members get the pieces of the first one by one
    if kind == "Sequence":
        # Digits splits between digits and others only: a split point stays one.
        members = [m for m in pre.get("pretokenizers", ()) if m.get("type") != "Digits"]
        return bool(members) and _splits_at_spaces(members[0])
    if kind == "ByteLevel":
        return bool(pre.get("use_regex", True))
    if kind == "Metaspace":
        return bool(pre.get("split", True)) and pre.get("replacement") == "▁"
    if kind == "Split":
        whole = (pre.get("behavior"), bool(pre.get("invert"))) in (("Isolated", False),
                                                                   ("Removed", True))
        return whole and is_known_pattern((pre.get("pattern") or {}).get("Regex", ""))
    return False


def is_known_pattern(pattern: str) -> bool:
    """Returns whether every alternative of the pattern is known to split in front of spaces."""
    return bool(pattern) and all(_POSSESSIVE.sub(r"\1", alternative) in _ALTERNATIVES
                                 for alternative in _alternatives(pattern))


def _alternatives(pattern: str) -> list[str]:
    alternatives, depth, in_class, skip = [""], 0, False, False
    for c in pattern:
        if c == "|" and not (depth or in_class or skip):
            alternatives.append("")
            continue
        alternatives[-1] += c
        if skip:
            skip = False
        elif c == "\\":
            skip = True
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        else:
            depth += (c == "(") - (c == ")")
    return alternatives


# The memory.

Offsets = Callable[[], Sequence[Span]]


@dataclass(frozen=True)
class _TokenSpans:
    """Where the ids of a text start and end, and which are added tokens to split at."""

    starts: array[int]
    ends: array[int]
    tokens: tuple[int, ...]                    # indexes of ids

    @classmethod
    def of(cls, text: str, ids: Sequence[int], spans: Sequence[Span],
           contents: Mapping[int, str]) -> _TokenSpans:
        tokens = tuple(i for i, (token_id, (s, e)) in enumerate(zip(ids, spans))
                       if contents.get(token_id) == text[s:e])
        return cls(array("I", [s for s, _ in spans]), array("I", [e for _, e in spans]), tokens)

    def first(self, count: int) -> list[Span]:
        return list(zip(self.starts[:count], self.ends[:count]))


class _StoredText:
    """A stored text and its ids. The spans of the ids are computed on first use."""

    def __init__(self, text: str, ids: list[int], offsets: Offsets,
                 contents: Mapping[int, str]) -> None:
        self.text, self.ids, self.used = text, ids, 0
        self._spans: _TokenSpans | Callable[[], _TokenSpans] = lambda: _TokenSpans.of(
            text, ids, offsets(), contents)

    def spans(self) -> _TokenSpans:
        spans = self._spans
        if not isinstance(spans, _TokenSpans):
            spans = self._spans = spans()
        return spans


@dataclass(frozen=True)
class PrefixCounts:
    """The statistics of a PrefixMemory."""

    hits: int                                  # calls that reused tokens
    misses: int
    reused: int                                # characters whose tokens were reused
    texts: int
    characters: int


class PrefixMemory:
    """The stored texts of one tokenizer and their tokens.

    Reading takes no lock; a text is not stored if another thread is storing one. `eager` computes
    the offsets at once, for libraries whose encodings hold a lot of memory until then.
    """

    def __init__(self, split_points: SplitPoints, eager: bool) -> None:
        self.split_points, self.eager = split_points, eager
        self._texts: dict[tuple[Any, str], tuple[_StoredText, ...]] = {}
        self._contents = {parse: {i: content for content, i in tokens.items()}
                          for parse, tokens in ((True, split_points.special),
                                                (False, split_points.ordinary))}
        self._clock = count(1)
        self._hits = self._misses = self._reused = 0

    def encode(self, text: str, parse_special: bool | None, want_offsets: bool,
               full: Callable[[str], tuple[list[int], Offsets]]) -> EncodedText:
        """Returns the encoding of a text; `full(text)` gives ids and a function for offsets."""
        key = (parse_special, text[:KEY_CHARACTERS])
        entry, shared = self._nearest(key, text)
        if entry is not None and shared == len(text) == len(entry.text):
            return self._reuse(entry, len(entry.ids), len(text), [], want_offsets, list)
        exact = self.split_points.offsets
        at = reused = 0
        if entry is not None and (exact or not want_offsets):
            at, reused = self._split(entry, shared)
        if entry is None or at < max(MIN_CHARACTERS // 2, 0 if exact else len(text) // 2):
            self._misses += 1
            ids, offsets = full(text)
            self._store(key, text, ids, offsets)
            return EncodedText(list(ids), list(offsets()) if want_offsets else None)
        rest, rest_offsets = full(text[at:])
        if exact and len(text) - at > max(MIN_CHARACTERS, len(text) // 8):
            self._store(key, text, entry.ids[:reused] + rest,
                        lambda: entry.spans().first(reused) + _shift(rest_offsets(), at))
        return self._reuse(entry, reused, at, rest, want_offsets, rest_offsets)

    def _reuse(self, entry: _StoredText, reused: int, at: int, rest: list[int], want_offsets: bool,
               offsets: Offsets) -> EncodedText:
        entry.used = next(self._clock)
        self._hits += 1
        self._reused += at
        spans = entry.spans().first(reused) + _shift(offsets(), at) if want_offsets else None
        ids = entry.ids[:reused]               # a copy for the caller
        ids += rest
        return EncodedText(ids, spans)

    def _nearest(self, key: tuple[Any, str], text: str) -> tuple[_StoredText | None, int]:
        """Returns the stored text with the longest common prefix, and its length."""
        best, shared = None, 0
        if len(text) >= MIN_CHARACTERS:
            for entry in self._texts.get(key, ()):
                if entry.text == text:
                    return entry, len(text)
                if shared < len(entry.text) and text[:shared + 1] == entry.text[:shared + 1]:
                    best, shared = entry, common_length(text, entry.text, shared)
        return best, shared

    def _split(self, entry: _StoredText, shared: int) -> tuple[int, int]:
        """Returns the last split point in the common prefix and the ids before it, or (0, 0)."""
        if not (self.split_points.spaces or self.split_points.special
                or self.split_points.ordinary):
            return 0, 0
        spans = entry.spans()
        last = bisect_right(spans.tokens, shared - self.split_points.longest,
                            key=spans.starts.__getitem__) - 1
        reused = spans.tokens[last] if last >= 0 else 0
        best = (spans.starts[reused], reused) if last >= 0 else (0, 0)
        at = shared
        for _ in range(MAX_ATTEMPTS if self.split_points.spaces else 0):
            at = entry.text.rfind(" ", 1, at)
            if at <= best[0]:
                break
            if "!" <= entry.text[at - 1] <= "~":
                reused = bisect_left(spans.starts, at)
                if reused and spans.starts[reused - 1] < at == spans.ends[reused - 1]:
                    return at, reused
        return best

    def _store(self, key: tuple[Any, str], text: str, ids: list[int], offsets: Offsets) -> None:
        if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS // 4:
            return
        entry = _StoredText(text, ids, offsets, self._contents[bool(key[0])])
        if self.eager:
            entry.spans()
        if not _storing.acquire(blocking=False):
            return
        try:
            entry.used = next(self._clock)
            others = sorted(self._texts.get(key, ()), key=lambda e: e.used)[1 - MAX_TEXTS_PER_KEY:]
            self._texts[key] = (entry, *others)
            while (len(stored := self._all()) > MAX_TEXTS
                   or sum(len(e.text) for _, e in stored) > MAX_CHARACTERS):
                oldest_key, oldest = min(stored, key=lambda pair: pair[1].used)
                remaining = tuple(e for e in self._texts[oldest_key] if e is not oldest)
                if remaining:
                    self._texts[oldest_key] = remaining
                else:
                    del self._texts[oldest_key]
        finally:
            _storing.release()

    def _all(self) -> list[tuple[tuple[Any, str], _StoredText]]:
        return [(key, entry) for key, entries in self._texts.copy().items() for entry in entries]

    def counts(self) -> PrefixCounts:
        stored = self._all()
        return PrefixCounts(self._hits, self._misses, self._reused, len(stored),
                            sum(len(e.text) for _, e in stored))


def _shift(spans: Sequence[Span], by: int) -> list[Span]:
    return [(s + by, e + by) for s, e in spans]


def common_length(a: str, b: str, known: int = 0) -> int:
    """Returns the length of the common prefix of two texts, `known` characters checked before."""
    low, high = known, min(len(a), len(b))
    if a[low:high] == b[low:high]:
        return high
    while high - low > 1:                      # a[:low] is shared, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


_memories: dict[str, PrefixMemory] = {}
_storing = threading.Lock()


def prefix_memory(identity: str, split_points: Callable[[], SplitPoints],
                  eager: bool) -> PrefixMemory:
    """Returns the memory of the tokenizer with this identity, which decides the encoding."""
    memory = _memories.get(identity)
    if memory is None:
        for oldest in list(_memories)[:max(len(_memories) - MAX_TOKENIZERS + 1, 0)]:
            _memories.pop(oldest, None)
        memory = _memories.setdefault(identity, PrefixMemory(split_points(), eager))
    return memory


def memories() -> dict[str, PrefixCounts]:
    return {identity: memory.counts() for identity, memory in _memories.copy().items()}


def forget() -> None:
    _memories.clear()


def _after_fork() -> None:
    global _storing
    _storing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
