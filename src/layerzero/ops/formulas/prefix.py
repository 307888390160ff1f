"""How much of an encoded text still holds for another text that begins the same, and a memory of such texts.

A text may be cut where the part before and the part after are encoded as if the other were not there. Two kinds of
places are known to be so, and no other is used:

- in front of an added token that is looked for in the text as it came. Libraries cut the text there first and treat
  what lies between such tokens one by one. Which token matches depends on as many characters as the longest has, so
  these must be the same in both texts. Holds for every normalizer, pre-tokenizer and model.
- in front of a space that follows a visible ASCII character. Holds if the normalizer works character by character or
  never across a space, and the first pre-tokenizer always splits there: patterns none of whose alternatives can step
  from something visible to a space, and none of which looks back. Then no match crosses the place, no attempt looks
  beyond the space itself, and the matches after it are those of the rest alone. Added tokens must not reach over it.

So a text is encoded as: the tokens of the remembered text up to the last such place in what both share, and the
library's own encoding of the rest.
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

from .tokenization import Body, Span

SHORTEST = 512                                 # characters; less is not worth remembering
KEY = 64                                       # texts are found by so many of their first characters
PER_KEY = 4
TEXTS = 64                                     # for one tokenizer
CHARACTERS = 1 << 20                           # for one tokenizer
TOKENIZERS = 16
ATTEMPTS = 64                                  # spaces looked at from the end of what is shared

# Alternatives of the patterns in use (GPT-2, cl100k, Llama 3, Qwen 2, o200k), without possessive marks. Read each as:
# nothing visible is followed by a space, and nothing looks back.
_ALTERNATIVES = frozenset((
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'(?:[sdmt]|ll|ve|re)",
    r"'(?i:[sdmt]|ll|ve|re)", r" ?\p{L}+", r" ?[\p{L}]+", r" ?\p{N}+", r" ?[\p{N}]+", r" ?[^\s\p{L}\p{N}]+",
    r"\s+(?!\S)", r"\s+", r"\s", r"\s+$", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r"\p{N}", r"\p{N}+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s*[\r\n]",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"))
_LOCAL_NORMALIZERS = frozenset((
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt", "Precompiled"))
_SPLITS_AT_SPACES = frozenset(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"))
_POSSESSIVE = re.compile(r"([+?*]|\{\d+(?:,\d*)?\})\+")
_VISIBLE = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Seams:
    """Where the texts of one tokenizer may be cut."""

    spaces: bool = False
    special: Mapping[str, int] = field(default_factory=dict)     # added tokens to cut in front of: content -> id
    ordinary: Mapping[str, int] = field(default_factory=dict)    # likewise, also where special ones are read as text
    longest: int = 0                           # of all added tokens
    offsets: bool = True                       # a part encoded alone has the offsets it has inside, moved


def seams_of_json(data: Mapping[str, Any]) -> Seams:
    """Of a tokenizer.json."""
    added = data.get("added_tokens") or ()
    firm = [t for t in added if not (t.get("normalized") or t.get("lstrip") or t.get("single_word"))
            and t["content"] and t["content"] == t["content"].strip()]
    reaching = any(t.get("rstrip") or any(c.isspace() for c in t["content"])
                   or (t.get("normalized") and not _VISIBLE.fullmatch(t["content"])) for t in added)
    spaces = not reaching and _is_local(data.get("normalizer")) and _splits_at_spaces(data.get("pre_tokenizer"))
    post = data.get("post_processor") or {}
    trimming = any(p.get("trim_offsets") and p.get("add_prefix_space") for p in (post, *post.get("processors", ())))
    return Seams(spaces, {t["content"]: t["id"] for t in firm},
                 {t["content"]: t["id"] for t in firm if not t.get("special")},
                 max((len(t["content"]) for t in added), default=0), not trimming)


def seams_of_pattern(pattern: str, special_tokens: Mapping[str, int]) -> Seams:
    """Of a tiktoken encoding."""
    spaces = is_known(pattern) and not any(c.isspace() for token in special_tokens for c in token)
    return Seams(spaces, dict(special_tokens), {}, max(map(len, special_tokens), default=0))


def _is_local(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(map(_is_local, normalizer.get("normalizers", ())))
    if normalizer.get("type") == "Replace":    # what sentencepiece's converters write: several spaces become one
        return normalizer.get("pattern") == {"Regex": " {2,}"} and normalizer.get("content") == " "
    return normalizer.get("type") in _LOCAL_NORMALIZERS


def _splits_at_spaces(pre: Mapping[str, Any] | None) -> bool:
    kind = pre.get("type") if pre else None
    if pre is None or kind in _SPLITS_AT_SPACES:
        return pre is not None
    if kind == "Sequence":                     # those after the first see its pieces one by one
        # Digits cuts between a digit and what is none, wherever they stand: the place is kept, or made a cut already.
        members = [m for m in pre.get("pretokenizers", ()) if m.get("type") != "Digits"]
        return bool(members) and _splits_at_spaces(members[0])
    if kind == "ByteLevel":
        return bool(pre.get("use_regex", True))
    if kind == "Metaspace":
        return bool(pre.get("split", True)) and pre.get("replacement") == "▁"
    if kind == "Split":
        whole = (pre.get("behavior"), bool(pre.get("invert"))) in (("Isolated", False), ("Removed", True))
        return whole and is_known((pre.get("pattern") or {}).get("Regex", ""))
    return False


def is_known(pattern: str) -> bool:
    """Is every alternative of the pattern one that keeps the promise above?"""
    return bool(pattern) and all(_POSSESSIVE.sub(r"\1", one) in _ALTERNATIVES for one in _alternatives(pattern))


def _alternatives(pattern: str) -> list[str]:
    found, depth, in_class, skip = [""], 0, False, False
    for c in pattern:
        if c == "|" and not (depth or in_class or skip):
            found.append("")
            continue
        found[-1] += c
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
    return found


# the memory

Offsets = Callable[[], Sequence[Span]]


@dataclass(frozen=True)
class _Places:
    """Where the ids of a text start and end, and which of them are added tokens to cut in front of."""

    starts: array[int]
    ends: array[int]
    tokens: tuple[int, ...]                    # indexes of ids

    @classmethod
    def of(cls, text: str, ids: Sequence[int], spans: Sequence[Span], contents: Mapping[int, str]) -> _Places:
        tokens = tuple(i for i, (one, (s, e)) in enumerate(zip(ids, spans)) if contents.get(one) == text[s:e])
        return cls(array("I", [s for s, _ in spans]), array("I", [e for _, e in spans]), tokens)

    def spans(self, kept: int) -> list[Span]:
        return list(zip(self.starts[:kept], self.ends[:kept]))


class _Text:
    """A remembered text. Its places are found out when first asked for."""

    def __init__(self, text: str, ids: list[int], offsets: Offsets, contents: Mapping[int, str]) -> None:
        self.text, self.ids, self.used = text, ids, 0
        self._places: _Places | Callable[[], _Places] = lambda: _Places.of(text, ids, offsets(), contents)

    def places(self) -> _Places:
        places = self._places
        if not isinstance(places, _Places):
            places = self._places = places()
        return places


@dataclass(frozen=True)
class Counts:
    """What a memory did so far, and what it holds."""

    hits: int                                  # calls served in part or in whole
    misses: int
    reused: int                                # characters that were not encoded again
    texts: int
    characters: int


class PrefixMemory:
    """Texts of one tokenizer with their tokens. Reading takes no lock; a text that cannot be stored at once is not.

    `eager`: whoever encodes keeps the offsets in memory until they are asked for, so ask at once.
    """

    def __init__(self, seams: Seams, eager: bool) -> None:
        self.seams, self.eager = seams, eager
        self._texts: dict[tuple[Any, str], tuple[_Text, ...]] = {}
        self._contents = {parse: {i: content for content, i in tokens.items()}
                          for parse, tokens in ((True, seams.special), (False, seams.ordinary))}
        self._clock = count(1)
        self._hits = self._misses = self._reused = 0

    def encode(self, text: str, parse_special: bool | None, want_offsets: bool,
               full: Callable[[str], tuple[list[int], Offsets]]) -> Body:
        """As `full(text)`, which gives the ids of a text and how to find out their offsets."""
        key = (parse_special, text[:KEY])
        entry, shared = self._nearest(key, text)
        if entry is not None and shared == len(text) == len(entry.text):
            return self._reuse(entry, len(entry.ids), len(text), [], want_offsets, list)
        exact = self.seams.offsets
        at = kept = 0
        if entry is not None and (exact or not want_offsets):
            at, kept = self._cut(entry, shared)
        if entry is None or at < max(SHORTEST // 2, 0 if exact else len(text) // 2):
            self._misses += 1
            ids, offsets = full(text)
            self._store(key, text, ids, offsets)
            return Body(list(ids), list(offsets()) if want_offsets else None)
        rest, rest_offsets = full(text[at:])
        if exact and len(text) - at > max(SHORTEST, len(text) // 8):
            self._store(key, text, entry.ids[:kept] + rest,
                        lambda: entry.places().spans(kept) + _moved(rest_offsets(), at))
        return self._reuse(entry, kept, at, rest, want_offsets, rest_offsets)

    def _reuse(self, entry: _Text, kept: int, at: int, rest: list[int], want_offsets: bool, offsets: Offsets) -> Body:
        entry.used = next(self._clock)
        self._hits += 1
        self._reused += at
        spans = entry.places().spans(kept) + _moved(offsets(), at) if want_offsets else None
        ids = entry.ids[:kept]                 # a list of the caller's own
        ids += rest
        return Body(ids, spans)

    def _nearest(self, key: tuple[Any, str], text: str) -> tuple[_Text | None, int]:
        """The remembered text that shares most of its beginning with this one, and how much."""
        best, shared = None, 0
        if len(text) >= SHORTEST:
            for entry in self._texts.get(key, ()):
                if entry.text == text:
                    return entry, len(text)
                if shared < len(entry.text) and text[:shared + 1] == entry.text[:shared + 1]:
                    best, shared = entry, common_length(text, entry.text, shared)
        return best, shared

    def _cut(self, entry: _Text, shared: int) -> tuple[int, int]:
        """The last place in what is shared where a text may be cut, and how many ids lie before it; (0, 0) if none."""
        if not (self.seams.spaces or self.seams.special or self.seams.ordinary):
            return 0, 0
        places = entry.places()
        last = bisect_right(places.tokens, shared - self.seams.longest, key=places.starts.__getitem__) - 1
        kept = places.tokens[last] if last >= 0 else 0
        found = (places.starts[kept], kept) if last >= 0 else (0, 0)
        at = shared
        for _ in range(ATTEMPTS if self.seams.spaces else 0):
            at = entry.text.rfind(" ", 1, at)
            if at <= found[0]:
                break
            if "!" <= entry.text[at - 1] <= "~":
                kept = bisect_left(places.starts, at)
                if kept and places.starts[kept - 1] < at == places.ends[kept - 1]:
                    return at, kept
        return found

    def _store(self, key: tuple[Any, str], text: str, ids: list[int], offsets: Offsets) -> None:
        if not SHORTEST <= len(text) <= CHARACTERS // 4:
            return
        entry = _Text(text, ids, offsets, self._contents[bool(key[0])])
        if self.eager:
            entry.places()
        if not _storing.acquire(blocking=False):
            return
        try:
            entry.used = next(self._clock)
            others = sorted(self._texts.get(key, ()), key=lambda e: e.used)[1 - PER_KEY:]
            self._texts[key] = (entry, *others)
            while len(everything := self._all()) > TEXTS or sum(len(e.text) for _, e in everything) > CHARACTERS:
                oldest_key, oldest = min(everything, key=lambda pair: pair[1].used)
                left = tuple(e for e in self._texts[oldest_key] if e is not oldest)
                if left:
                    self._texts[oldest_key] = left
                else:
                    del self._texts[oldest_key]
        finally:
            _storing.release()

    def _all(self) -> list[tuple[tuple[Any, str], _Text]]:
        return [(key, entry) for key, entries in list(self._texts.items()) for entry in entries]

    def counts(self) -> Counts:
        everything = self._all()
        return Counts(self._hits, self._misses, self._reused, len(everything), sum(len(e.text) for _, e in everything))


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [(s + by, e + by) for s, e in spans]


def common_length(a: str, b: str, known: int = 0) -> int:
    """How many first characters two texts share, if they share `known` for sure."""
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


def memory_of(identity: str, seams: Callable[[], Seams], eager: bool) -> PrefixMemory:
    """The memory of the tokenizer with this identity, which is all that decides what it makes of a text."""
    found = _memories.get(identity)
    if found is None:
        for oldest in list(_memories)[:max(len(_memories) - TOKENIZERS + 1, 0)]:
            _memories.pop(oldest, None)
        found = _memories.setdefault(identity, PrefixMemory(seams(), eager))
    return found


def memories() -> dict[str, Counts]:
    return {identity: memory.counts() for identity, memory in list(_memories.items())}


def forget() -> None:
    _memories.clear()


def _after_fork() -> None:
    global _storing
    _storing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
