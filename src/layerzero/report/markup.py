"""HTML and SVG from Python: whatever is not markup already is escaped on its way in."""

from __future__ import annotations

import re
from html import escape

VOID = frozenset(("meta", "link", "br", "wbr"))


class Html(str):
    """Text that is markup."""

    __slots__ = ()


Content = object                               # Html stays as it is, None is nothing, all else becomes escaped text


def el(name: str, /, *content: Content, **attributes: object) -> Html:
    """One element. `class_` is class, `_` is `-` elsewhere; an attribute that is None is left out."""
    given = "".join(f' {_attribute(n)}="{escape(str(v))}"' for n, v in attributes.items() if v is not None)
    return Html(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: Content, between: str = "") -> Html:
    return Html(escape(between).join(
        part if isinstance(part, Html) else escape(str(part)) for part in content if part is not None))


def breakable(text: str) -> Html:
    """Text whose long names may go on in the next line after a dot, an underscore or an equals sign."""
    return Html(re.sub(r"([._=])(?=\w)", r"\1<wbr>", escape(text)))


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name != "viewBox" else name
