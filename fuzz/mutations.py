"""A file, changed a little: as JSON where it is JSON (a value, a key, a branch), else as text or
bytes.

The same function serves the fuzzer, which asks which changes reach new code, and the tests, which
make the same changes every time.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, -2**63, 10**400,
    float("nan"), float("inf"), "", "0", "none", "\0", "\ud800", "a\nb", "\u2028", "é", "float32",
    "*", "..", "a" * 300, '"""', "{x}", "%s", [], {},
    [None], [[]], {"": None}, {"a": {}}, ["a", "a"], "\x1b[31m", "\x1b]0;x\a", "\u202e", "\r",
    "[red]", 10**40, -1e-320, "1" * 5000, "*a" * 200, "../../x", "/etc/passwd", "a\0b",
    {"a": [{"b": [{}]}]}, list(range(50)))
TEXT = ("\0", "\n", "\r", "\t", ":", "- ", "&a ", "*a", "!x ", "{", "}", "[", "]", "'", '"', ">",
        "==", "..", "1e999", "0x", "\ufeff", "\u2028", "(" * 60, "9" * 40, "[" * 200, '{"a":' * 100,
        "\\ud800", "NaN", "-Infinity", "9" * 5000, '"a":1,"a":2,', "<<: *a", "\x1b[2J", "\x9b",
        "\x85", "1e-999", "!!python/object:x ", "\\u0000")

NUMBERS = (0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four changes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = _structured(content, rng) if rng.random() < 0.7 else _plain(content, rng)
    return content


def _structured(content: bytes, rng: random.Random) -> bytes:
    """JSON, or lines of JSON of which one is changed."""
    lines = content.split(b"\n")
    which = rng.randrange(len(lines))
    for part, whole in ((content, True), (lines[which], False)):
        try:
            data = json.loads(part)
        except (ValueError, RecursionError):
            continue
        try:
            changed = json.dumps(_changed(data, rng)).encode()
        except (ValueError, RecursionError):       # a number of more digits than Python writes
            continue
        return changed if whole else b"\n".join([*lines[:which], changed, *lines[which + 1:]])
    return _text(content, rng)


def _changed(data: Any, rng: random.Random) -> Any:
    data = copy.deepcopy(data)
    places = list(_places(data))
    if not places:
        return rng.choice(ODD)
    owner, key = rng.choice(places)
    how = rng.random()
    if how < 0.45:
        owner[key] = copy.deepcopy(rng.choice(ODD))
    elif how < 0.6:
        del owner[key]
    elif how < 0.75:                               # what stands elsewhere
        other, there = rng.choice(places)
        owner[key] = copy.deepcopy(other.get(there) if isinstance(other, dict) else other[there])
    elif how < 0.85 and isinstance(owner[key], (int, float)) and not isinstance(owner[key], bool):
        owner[key] += rng.choice((-1, 1, 2**31))
    elif isinstance(owner, dict):
        owner[rng.choice([str(k) for k in ODD[16:30]] + [f"{key}_", "hash", "value"])] = owner[key]
    else:
        owner.append(copy.deepcopy(owner[key]))
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(data, (dict, list)):
        for key in (data if isinstance(data, dict) else range(len(data))):
            yield data, key
            yield from _places(data[key])


def _text(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode(errors="replace").split("\n")
    at = rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        lines.insert(at, rng.choice(lines))
    elif how == 1:
        del lines[at]
    elif how == 2:
        lines[at] = " " * rng.randrange(6) + lines[at].lstrip()
    else:
        cut = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:cut] + rng.choice(TEXT) + lines[at][cut + rng.randrange(3):]
    return "\n".join(lines).encode(errors="replace")


def _plain(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return rng.randbytes(4)
    at, how = rng.randrange(len(content)), rng.randrange(6)
    if how == 0:
        return content[:at] + rng.randbytes(1) + content[at + 1:]
    if how == 1:
        return content[:at]
    if how == 2:
        return content[:at] + content[at + rng.randrange(1, 9):]
    if how == 4:                               # a length or a count of a binary file
        return content[:at] + rng.choice(NUMBERS).to_bytes(8, "little") + content[at + 8:]
    if how == 5:                               # a part of it again
        return content[:at] + content[at:at + rng.randrange(1, 300)] * rng.choice(
            (2, 3, 50)) + content[at:]
    return content[:at] + rng.choice(TEXT).encode() + content[at:]
