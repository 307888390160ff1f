"""SVG elements from Python: whatever is not markup already is escaped on its way in."""

from __future__ import annotations

import re
from html import escape


class Markup(str):
    """Text that is markup already; Jinja2 leaves it unescaped too."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def element(name: str, /, *content: object, **attributes: object) -> Markup:
    """Return one element; `class_` stands for class, `_` for `-` in other attributes."""
    pairs = "".join(f' {_attribute(n)}="{escape(str(v))}"' for n, v in attributes.items())
    return Markup(f"<{name}{pairs}>{join(*content)}</{name}>")


def join(*content: object) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(str(part))
                          for part in content))


def breakable(text: str) -> Markup:
    """Let a long name wrap after a dot, an underscore or an equals sign."""
    return Markup(re.sub(r"([._=])(?=\w)", r"\1<wbr>", escape(text)))


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
