"""Byte-level BPE in plain Python: the meaning of a tokenizer.json with that model.

For tokenizers that fulfil `BYTE_LEVEL_BPE`, ids and offsets are exactly those of the tokenizers
library. Everything else needs the library: other models, normalizers, other pre-tokenizers, added
tokens that depend on their neighbours.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ....spec.errors import InvalidCall
from ....spec.reason import Code, Reason
from ....spec.rules import absent, equals, on, one_of

BYTE_LEVEL_BPE = (
    one_of("tokenizer_kind", "tokenizers"), one_of("algorithm", "BPE"), absent("normalizer"),
    one_of("pretokenizer", "ByteLevel"), on("plain_bpe"),
    equals("sampled", False, Code.NOT_DETERMINISTIC))
BYTE_LEVEL_DECODER = (one_of("tokenizer_kind", "tokenizers"), one_of("decoder", "ByteLevel"))

Span = tuple[int, int]
WHITE_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    *map(chr, range(0x2000, 0x200B))}


def _make_byte_characters() -> tuple[str, ...]:
    """Returns the character of each byte: itself if printable, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return tuple(chr(b) if b in printable else chr(next(substitutes)) for b in range(256))


BYTE_CHARACTERS = _make_byte_characters()
BYTES = {c: b for b, c in enumerate(BYTE_CHARACTERS)}

# Letters (but contractions) become `a`, digits `1`, white space a tab, all else `!`.
_PIECE = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[a-z]+| ?1+| ?['!]+|[ \t]+(?![^ \t])|[ \t]+")


@lru_cache(maxsize=4096)
def _character_class(c: str) -> str:
    if c == " " or c == "'" or c in "stremvld":
        return c
    if c in WHITE_SPACE:
        return "\t"
    category = unicodedata.category(c)
    if category == "Cn":
        raise InvalidCall.of("tokenize", Reason(
            Code.FEATURE_UNSUPPORTED,
            f"characters of Unicode {unicodedata.unidata_version} where the tokenizers "
            "library does not serve the call", f"U+{ord(c):04X}", "text"))
    return {"L": "a", "N": "1"}.get(category[0], "!")


def split_pieces(text: str) -> Iterator[Span]:
    """Yields the pieces into which GPT-2's pattern splits a text."""
    for match in _PIECE.finditer("".join(map(_character_class, text))):
        yield match.span()


def is_byte_level_bpe(data: Mapping[str, Any]) -> bool:
    """Returns whether this formula has all of a tokenizer.json that rules do not check."""
    model, pre = data["model"], data.get("pre_tokenizer") or {}
    vocab = model.get("vocab")
    if (pre.get("type") != "ByteLevel" or not isinstance(vocab, Mapping)
        or not vocab.keys() >= set(BYTE_CHARACTERS)):
        return False
    unsupported = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if any(model.get(name) for name in unsupported):
        return False
    neighbour_flags = ("single_word", "lstrip", "rstrip")
    if any(token.get(flag) for token in data.get("added_tokens") or () for flag in neighbour_flags):
        return False
    return all(p.get("type") in ("ByteLevel", "TemplateProcessing") and _template_ids(p) is not None
               for p in post_processors(data))


def post_processors(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    post = data.get("post_processor")
    if not post:
        return ()
    return tuple(post.get("processors", ())) if post.get("type") == "Sequence" else (post,)


def _template_ids(post: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Returns the ids before and after the text; None if the text does not occur exactly once."""
    if post.get("type") != "TemplateProcessing":
        return [], []
    around: tuple[list[int], list[int]] = ([], [])
    seen = 0
    for item in post["single"]:
        if "Sequence" in item:
            seen += 1
        else:
            around[min(seen, 1)].extend(post["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return around if seen == 1 else None


class ByteLevelBPE:
    """A byte-level BPE tokenizer, from its tokenizer.json."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        model = data["model"]
        self.vocab: Mapping[str, int] = model.get("vocab") or {}
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m)
                  for m in model.get("merges") or ()]
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.whole_words = bool(model.get("ignore_merges"))
        self.add_prefix_space = bool((data.get("pre_tokenizer") or {}).get("add_prefix_space"))
        self.use_regex = (data.get("pre_tokenizer") or {}).get("use_regex", True)
        self.post = post_processors(data)
        self.added = _number_added_tokens(data.get("added_tokens") or (), self.vocab)
        added = list(self.added.values())
        self.passes = tuple(_compile_matcher([t["content"] for t in added
                                              if bool(t.get("normalized")) is late])
                            for late in (False, True))
        self.tokens = {i: t for t, i in self.vocab.items()} | {t["id"]: t["content"] for t in added}
        self.special = {t["id"] for t in added if t.get("special")}

    def encode(self, text: str, parse_special: bool) -> tuple[list[int], list[Span]]:
        """Returns ids and character offsets of the text, without added special tokens."""
        ids: list[int] = []
        spans: list[Span] = []
        names: list[str] = []
        for start, end, token in self._segments(text, parse_special):
            if token is not None:
                tokens = [(token["id"], token["content"], (start, end))]
            else:
                tokens = list(self._words(text[start:end], start))
            for token_id, name, span in tokens:
                ids.append(token_id)
                names.append(name)
                spans.append(span)
        for post in self.post:
            if post["type"] == "ByteLevel" and post.get("trim_offsets", True):
                prefixed = post.get("add_prefix_space", True)
                spans = [_trim_span(i, name, span, prefixed)
                         for i, (name, span) in enumerate(zip(names, spans))]
        return ids, spans

    def added_ids(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens that are added before and after a text."""
        before: list[int] = []
        after: list[int] = []
        for post in self.post:
            template = _template_ids(post)
            assert template is not None         # is_byte_level_bpe checked it
            before, after = template[0] + before, after + template[1]
        return before, after

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokens = [self.tokens[i] for i in ids if i in self.tokens
                  and not (skip_special_tokens and i in self.special)]
        raw = b"".join(bytes(BYTES[c] for c in t) if all(c in BYTES for c in t) else t.encode()
                       for t in tokens)
        return raw.decode("utf-8", "replace")

    def _segments(self, text: str, parse_special: bool) -> Iterator[tuple[int, int, Any]]:
        """Splits the text at added tokens: those of the raw text first, then normalized ones."""
        segments: list[tuple[int, int, Any]] = [(0, len(text), None)]
        for matcher in self.passes:
            if matcher is not None:
                segments = [part for start, end, token in segments
                            for part in (self._split_at(text, start, end, matcher, parse_special)
                                         if token is None
                                         else ((start, end, token),))]
        return (part for part in segments if part[1] > part[0])

    def _split_at(self, text: str, start: int, end: int, matcher: re.Pattern[str],
                  parse_special: bool
             ) -> Iterator[tuple[int, int, Any]]:
        for match in matcher.finditer(text, start, end):
            token = self.added[match.group()]
            if token.get("special") and not parse_special:
                continue
            yield start, match.start(), None
            yield match.start(), match.end(), token
            start = match.end()
        yield start, end, None

    def _words(self, text: str, offset: int) -> Iterator[tuple[int, str, Span]]:
        prefixed = self.add_prefix_space and not text.startswith(" ")
        shown = " " + text if prefixed else text
        for start, end in split_pieces(shown) if self.use_regex else ((0, len(shown)),):
            owners = [offset + max(i - prefixed, 0) for i in range(start, end)
                      for _ in shown[i].encode()]
            word = "".join(BYTE_CHARACTERS[b] for b in shown[start:end].encode())
            at = 0
            for token in self._merge(word):
                yield self.vocab[token], token, (owners[at], owners[at + len(token) - 1] + 1)
                at += len(token)

    def _merge(self, word: str) -> list[str]:
        """Merges the best-ranked adjacent pair, leftmost of equals, until none is left."""
        if self.whole_words and word in self.vocab:
            return [word]
        parts = list(word)
        while len(parts) > 1:
            ranked = [(self.ranks[pair], i) for i, pair in enumerate(pairwise(parts))
                      if pair in self.ranks]
            if not ranked:
                break
            _, i = min(ranked)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return parts


def _number_added_tokens(added: Sequence[Mapping[str, Any]], vocab: Mapping[str, int]
                         ) -> dict[str, Mapping[str, Any]]:
    """Returns the added tokens by content, with the ids that the library gives them: that of the
    vocabulary if it has the content, else the next one beyond vocabulary and added tokens. Ids in
    the file do not count. Of tokens with the same content the last counts, special if one is."""
    numbered: dict[str, Mapping[str, Any]] = {}
    free = len(vocab)
    for token in added:
        content = token["content"]
        if content in numbered:
            earlier = numbered[content]
            special = bool(earlier.get("special") or token.get("special"))
            numbered[content] = {**token, "id": earlier["id"], "special": special}
        elif content:
            numbered[content] = {**token, "id": vocab.get(content, free)}
            free = max(free, numbered[content]["id"] + 1)
    return numbered


def _compile_matcher(contents: Sequence[str]) -> re.Pattern[str] | None:
    """Compiles a pattern that matches the leftmost, longest of the contents."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if contents else None


def _trim_span(index: int, token: str, span: Span, add_prefix_space: bool) -> Span:
    """Returns the span without the token's white space; an added prefix space does not count."""
    space = BYTE_CHARACTERS[0x20]
    white = [c == space or c in WHITE_SPACE for c in token]
    leading = white.index(False) if False in white else len(white)
    trailing = white[::-1].index(False) if False in white else len(white)
    start, end = span
    if leading:
        if add_prefix_space and (index == 0 or start == 0):
            leading -= 1
        start = min(start + leading, end)
    if trailing and end >= trailing:
        end = max(end - trailing, start)
    return start, end


_MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "n d", "Ġa nd", "h e", "l l", "he ll", "hell o",
           "Ġ w", "o r", "Ġw or")


# the model of a byte-level tokenizer.json, but for its vocabulary and merges
BPE_MODEL: Mapping[str, Any] = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
    "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}


def tiny_tokenizer(template: bool = False, pad: bool = False, merges: Sequence[str] = _MERGES,
                   variant: str = "") -> dict[str, Any]:
    """Returns a small tokenizer.json: 256 bytes, some merges, special tokens, an added one.

    `variant`: "prefixed" puts a space before every part between added tokens, "trimmed" leaves
    white space out of offsets, "whole words" takes a word of the vocabulary without merging it,
    "nested" has added tokens that begin or hold others, "known" has special ones that are of the
    vocabulary too, "spaces" joins white space, as vocabularies of code do, "accents" has added
    tokens with letters that stand for bytes in the others.
    """
    merges = (*merges, "Ġ Ġ", "ĠĠ ĠĠ", "ĠĠĠĠ ĠĠĠĠ", "Ċ Ċ") if variant == "spaces" else merges
    words = [*BYTE_CHARACTERS, *(m.replace(" ", "") for m in merges)]
    words += ["more", "Ġend", "12"] if variant == "whole words" else []
    words = ["<s>", "</s>", *words] if variant == "known" else words
    vocab = {word: i for i, word in enumerate(words)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    names = [("<s>", True), ("</s>", True), ("<name>", False)]
    names += [("<s>hell", False), ("</s><s>", True), ("e m", False)] if variant == "nested" else []
    names += [("café", False), ("Ġnaïve", True), ("日本", False)] if variant == "accents" else []
    new = itertools.count(len(vocab))
    added = [{"id": vocab[name] if name in vocab else next(new), "content": name, **plain,
              "normalized": not special, "special": special} for name, special in names]
    ids = {token["content"]: token["id"] for token in added}
    trimmed = variant == "trimmed"
    post: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": not trimmed,
                            "trim_offsets": trimmed, "use_regex": True}
    if template:
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                  {"Sequence": {"id": "A", "type_id": 0}},
                  {"SpecialToken": {"id": "</s>", "type_id": 0}}]
        special = {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in ("<s>", "</s>")}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        post = {"type": "TemplateProcessing", "single": single, "pair": pair,
                "special_tokens": special}
    padding = ({"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": ids["</s>"], "pad_type_id": 0, "pad_token": "</s>"} if pad else None)
    byte_level = {"type": "ByteLevel", "add_prefix_space": variant == "prefixed",
                  "trim_offsets": True, "use_regex": True}
    model = {**BPE_MODEL, "ignore_merges": variant == "whole words", "vocab": vocab,
             "merges": list(merges)}
    return {
        "version": "1.0", "truncation": None, "padding": padding, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": post,
        "decoder": byte_level, "model": model}
