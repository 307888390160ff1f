"""Checks the types and ranges of a tokenizer.json before it is used.

The tokenizers library accepts files that later make it panic in Rust. Everything that LayerZero
itself reads from a file is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ....files.reading import FileLimits, parse_json
from ....spec.errors import DataError
from ....spec.reason import shown

LIMITS = FileLimits(size=256 << 20)                # files of large vocabularies have 40 MB
_MAX_ID = 2 ** 31                              # exclusive, for ids and lengths
_MEMBERS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers",
            "post_processor": "processors",
            "decoder": "decoders"}


def parse_tokenizer_json(text: str, source: str) -> dict[str, Any]:
    """Returns the content of a tokenizer.json; raises DataError with its first error."""
    data = parse_json(text, source, "a tokenizer.json", limits=LIMITS, unique=False)
    error = next(_errors(data), None)
    if error is not None:
        where, want, got = error
        raise DataError(
            f"{source}: wanted a tokenizer.json, in which {where} is {want}; got "
            f"{shown(got, limit=120)}")
    checked: dict[str, Any] = data
    return checked


Errors = Iterator[tuple[str, str, Any]]        # where, what is required, what was found


def _errors(data: Any) -> Errors:
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        yield "model.vocab", "given", ", ".join(sorted(data)) if isinstance(data, dict) else data
        return
    yield from _vocabulary_errors(model)
    added = data.get("added_tokens")
    if not isinstance(added, (list, type(None))):
        yield "added_tokens", "a list", added
    for i, token in enumerate(added or ()):
        if (not isinstance(token, dict) or not isinstance(token.get("content"), str)
            or not _is_id(token.get("id"))):
            yield f"added_tokens[{i}]", "an object with a content and an id", token
    for name, members in _MEMBERS.items():
        yield from _component_errors(data.get(name), name, members)
    cut, pad = data.get("truncation"), data.get("padding")
    for name, part in (("truncation", cut), ("padding", pad)):
        if (part is not None
            and (not isinstance(part, dict) or not isinstance(part.get("direction", ""), str))):
            yield name, "an object whose direction is a text", part
            return
    fixed = (pad or {}).get("strategy")
    numbers = {"truncation.max_length": (cut or {}).get("max_length"),
               "padding.pad_id": (pad or {}).get("pad_id"),
               "padding.pad_to_multiple_of": (pad or {}).get("pad_to_multiple_of"),
               "padding.strategy.Fixed": fixed.get("Fixed") if isinstance(fixed, dict) else None}
    for name, value in numbers.items():
        if value is not None and not _is_id(value):
            yield name, f"a whole number from 0 to {_MAX_ID - 1}", value


def _vocabulary_errors(model: Mapping[str, Any]) -> Errors:
    vocab, merges = model["vocab"], model.get("merges")
    if isinstance(vocab, dict):
        bad = next((item for item in vocab.items() if not _is_id(item[1])), None)
    elif isinstance(vocab, list):
        bad = next((item for item in vocab
                    if not (isinstance(item, list) and len(item) == 2 and isinstance(
            item[0], str) and type(item[1]) in (int, float))), None)
    else:
        bad = vocab
    if bad is not None:
        yield "model.vocab", "an object of token: id or a list of [token, score]", bad
    if not isinstance(merges, (list, type(None))):
        yield "model.merges", "a list", merges
        return
    for i, pair in enumerate(merges or ()):
        if not isinstance(pair, str) and not (
                isinstance(pair, list) and len(pair) == 2
                and all(isinstance(half, str) for half in pair)):
            yield f"model.merges[{i}]", "a text of two tokens or a list of two", pair
    if not isinstance(model.get("type"), (str, type(None))):
        yield "model.type", "a text", model["type"]


def _component_errors(part: Any, where: str, members: str) -> Errors:
    if part is None:
        return
    if not isinstance(part, dict) or not isinstance(part.get("type"), (str, type(None))):
        yield where, "null or an object with a type", part
        return
    inner = part.get(members, [])
    if not isinstance(inner, list) or None in inner:
        yield f"{where}.{members}", "a list of objects", inner
        return
    for i, member in enumerate(inner):
        yield from _component_errors(member, f"{where}.{members}[{i}]", members)
    if part.get("type") == "TemplateProcessing":
        yield from _template_errors(part, where)
    pattern = part.get("pattern")
    if part.get("type") == "Split" and not (isinstance(pattern, dict) and all(
            isinstance(text, str) for text in pattern.values())):
        yield f"{where}.pattern", "an object with a text", pattern


def _template_errors(part: Mapping[str, Any], where: str) -> Errors:
    known, single = part.get("special_tokens"), part.get("single")
    if not isinstance(known, dict) or not all(
            isinstance(token, dict) and isinstance(token.get("ids"), list)
            and all(map(_is_id, token["ids"]))
            for token in known.values()):
        yield f"{where}.special_tokens", "an object of tokens with their ids", known
    elif not isinstance(single, list):
        yield f"{where}.single", "a list", single
    else:
        for i, item in enumerate(single):
            special = item.get("SpecialToken") if isinstance(item, dict) else None
            named = (isinstance(special, dict) and isinstance(special.get("id"), str)
                     and special["id"] in known)
            if not (isinstance(item, dict) and ("Sequence" in item or named)):
                yield (f"{where}.single[{i}]", "a Sequence, or a SpecialToken of special_tokens",
                       item)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ID
