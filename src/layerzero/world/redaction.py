"""Redaction: hides what policy says from everything that leaves the process as text.

The setting `redact` names what is hidden: `paths` of this machine, `shapes` of tensors, `texts`
that others wrote (messages of a library, prompts quoted in an error). Events are redacted before
the log, the counters and subscribers see them, so spans and metrics are too; log lines, span
attributes, the bundle and `/ready` go through `text` and `data`. Passwords and access tokens are
hidden whatever policy says.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ..spec import event as kinds
from ..spec.errors import LayerZeroError
from ..spec.event import Event
from ..spec.plan import Rejected
from ..spec.reason import Category, Reason
from . import config

PATH, SHAPE, TEXT, SECRET = "<path>", "<shape>", "<text>", "***"

# our own identifiers: nothing to hide
_NAMES = ("op", "kernel", "served_by", "state", "source")
_MESSAGES = ("problem", "error", "action")     # messages, mostly of a library or a file
# Numbers in reasons of these categories are sizes of the call.
_ABOUT_SIZES = (Category.SHAPE, Category.LAYOUT, Category.FEATURE, Category.MEMORY, Category.CALLER,
                Category.DATA)
_QUOTES_OTHERS = (Category.HEALTH, Category.CALLER, Category.DATA, Category.SOFTWARE)

# Patterns begin where a word begins and are linear: a message may be as long as a prompt.
_KEYS = re.compile(
    r"(?i)(?<![\w/\\])(password|passwd|secret|token|api[_-]?key|access[_-]?key|authorization)\b"
    r"(['\"]?\s*[=:]\s*['\"]?)(?:(?:bearer|basic)\s+)?[^\s'\",;]+")
_BEARER = re.compile(r"(?i)\b(bearer)(\s+)[\w.~+/=-]{8,}")
_TOKENS = re.compile(
    r"(?<![\w-])(?:(?:hf|ghp|gho|ghs|github_pat|glpat|sk|pk|xox[abpr])[_-][\w-]{16,}"
    r"|AKIA[0-9A-Z]{16})(?![\w-])")
_QUOTED_PATH = re.compile(r"(['\"`])(?:~|[A-Za-z]:)?[\\/][^'\"`\n]*\1")
_ABSOLUTE_PATH = re.compile(
    r"(?<![\w/.<~-])(?:~?/(?![\s/])|~(?=/)|[A-Za-z]:[\\/]|\\\\(?=\w))[^\s'\"`,;:()\[\]{}<>|]*")
_RELATIVE_PATH = re.compile(r"(?<![\w/.-])[\w.-]+(?:/[\w.-]+)+")
_AFTER_PATH = re.compile(rf"{PATH}(?:[\\/][^\s'\"`,;:()\[\]{{}}<>|]*)+")
_PRODUCT = re.compile(r"(?<![\w.])\d+(?:x\d+)+(?![\w.])")
_TUPLE = re.compile(r"(?:torch\.Size)?\(?[(\[]\d+,[\d, ]*[)\]]\)?")
_SIZE = re.compile(r"(?<![\w.])([a-z_]\w*)(\s?=\s?|\s)(\d+)(?![\w.])")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")

_active: frozenset[str] = frozenset()


def use(setting: str) -> None:
    """Hides what the setting `redact` names from now on."""
    global _active
    _active = frozenset(word for word in setting.split(",") if word)


def active() -> frozenset[str]:
    return _active


def hides(kind: str) -> bool:
    return kind in _active


def text(value: str) -> str:
    """Returns a message without secrets and without what policy hides."""
    hidden = _active
    value = without_secrets(value)
    if "paths" in hidden:
        value = _without_paths(value)
    if "texts" in hidden:
        value = _QUOTED.sub(lambda m: m[0] if m[0][1:-1] in (PATH, TEXT)
                            else f"{m[0][0]}{TEXT}{m[0][-1]}", value)
    if "shapes" in hidden:
        value = _SIZE.sub(_hide_size, _TUPLE.sub(SHAPE, _PRODUCT.sub(SHAPE, value)))
    return value


def data(value: Any) -> Any:
    """Returns redacted JSON data; numbers stay, except in a list of sizes."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(k) if isinstance(k, str) else k: data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if "shapes" in _active and value and all(type(v) is int for v in value):
            return SHAPE
        return [data(v) for v in value]
    return value


def event(original: Event) -> Event:
    """Returns the event as the log, the counters and subscribers see it."""
    if not _active:
        return original
    changes = {f.name: new for f in fields(original)
               if (new := _redact_field(f.name, old := getattr(original, f.name))) is not old}
    return replace(original, **changes) if changes else original


def reason(original: Reason) -> Reason:
    """Returns the reason with its code; `got` is hidden if a size or a foreign text."""
    category = original.code.category
    if original.sentence and _active:          # a sentence of our own: its numbers are sizes
        sentence = "" if "shapes" in _active else text(original.sentence)
        original = replace(original, sentence=sentence)
    if "shapes" in _active and category in _ABOUT_SIZES and _is_size(original.got):
        limit = SHAPE if category is Category.MEMORY else original.want
        original = replace(original, got=SHAPE, want=limit)
    if "texts" in _active and category in _QUOTES_OTHERS and isinstance(original.got, str):
        # the class of an error may be shown, its message not
        error, colon, _ = original.got.partition(": ")
        original = replace(original, got=f"{error}: {TEXT}" if colon and error.isidentifier()
                           else TEXT)
    want, got = _redact_value(original.want), _redact_value(original.got)
    return (original if (want, got) == (original.want, original.got)
            else replace(original, want=want, got=got))


def without_secrets(value: str) -> str:
    """Hides passwords in addresses and what looks like an access token, whatever policy says."""
    if "://" in value:
        value = "".join(_without_password(word) for word in re.split(r"(\s+)", value))
    value = _KEYS.sub(rf"\1\2{SECRET}", value)
    return _TOKENS.sub(SECRET, _BEARER.sub(rf"\1\2{SECRET}", value))


class LogFilter(logging.Filter):
    """Redacts every line on our logger, whoever writes it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            line = record.getMessage()
        # arguments that do not fit: logging itself reports that
        except (TypeError, ValueError):
            return True
        record.msg, record.args = text(line), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = text("".join(traceback.format_exception(*record.exc_info)).rstrip())
        return True


def _redact_field(name: str, value: Any) -> Any:
    if name in _NAMES:
        return value
    if isinstance(value, Reason):
        return reason(value)
    if isinstance(value, str) and value:
        if name == "kind" and "shapes" in _active:
            return SHAPE
        if name in _MESSAGES and "texts" in _active:
            return TEXT
        shown = text(value)
        return value if shown == value else shown
    if isinstance(value, tuple) and value and isinstance(value[0], Rejected):
        return tuple(replace(r, reasons=tuple(map(reason, r.reasons))) for r in value)
    return value


def _redact_value(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    return tuple(map(_redact_value, value)) if isinstance(value, tuple) else value


def _is_size(value: Any) -> bool:
    return (type(value) is int or (isinstance(value, tuple) and bool(value)
                                   and all(type(v) is int for v in value)))


def _without_password(word: str) -> str:
    start, end = word.find("://"), word.rfind("@")
    return f"{word[:start + 3]}{SECRET}{word[end:]}" if 0 <= start < end else word


def _without_paths(value: str) -> str:
    for folder in _known_folders():            # first, as they may have spaces in them
        value = value.replace(folder, PATH)
    value = _AFTER_PATH.sub(PATH, value)
    if "://" in value:
        value = "".join(map(_without_address, re.split(r"([\s'\"]+)", value)))
    value = _QUOTED_PATH.sub(rf"\1{PATH}\1", value)
    value = _ABSOLUTE_PATH.sub(PATH, value)
    return _RELATIVE_PATH.sub(lambda m: PATH if os.path.splitext(m[0])[1][1:].isalpha() else m[0],
                              value)


def _without_address(word: str) -> str:
    scheme, sign, rest = word.partition("://")
    return f"{scheme}{sign}{PATH}{rest[len(rest.rstrip(':;,.)')):]}" if sign else word


def _known_folders() -> list[str]:
    """Returns the folders that messages most likely name, the longest first."""
    folders: set[str] = {tempfile.gettempdir(), os.path.expanduser("~")}
    sources: tuple[Callable[[], Any], ...] = (os.getcwd, config.cache_dir)
    for source in sources:
        try:
            folders.add(str(source()))
        # a folder that was removed; a cache folder that cannot be expanded
        except (OSError, LayerZeroError):
            continue
    return sorted((f for f in folders if len(f) > 1 and os.path.isabs(f)), key=len, reverse=True)


def _hide_size(match: re.Match[str]) -> str:
    """Hides the number in `hidden=128` and `got 128`, but not in fields of events."""
    name, sign, _ = match.groups()
    if sign == " ":
        return f"{name} {SHAPE}" if name in ("got", "is", "of", "for") else match[0]
    return match[0] if name in _EVENT_FIELDS else f"{name}{sign}{SHAPE}"


_EVENT_FIELDS = {f.name for kind in vars(kinds).values() if isinstance(kind, type)
                 and issubclass(kind, Event)
                 for f in fields(kind)}
