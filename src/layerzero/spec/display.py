"""How a result shows itself: `repr` in one line, a table in a notebook, `str` in full."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

_STYLE = "text-align:left; vertical-align:top"
_LONGEST = 160                                 # characters of a repr


class Displayed:
    """Base of results whose `str` begins with a line that sums them up."""

    def table(self) -> tuple[Sequence[str], Iterable[Sequence[Any]]]:
        """The column titles and rows that a notebook shows; no titles: it shows the text."""
        return (), ()

    def __repr__(self) -> str:
        text = f"{type(self).__name__}: {_headline(self)}"
        return f"<{text if len(text) <= _LONGEST else text[:_LONGEST - 3] + '...'}>"

    def _repr_html_(self) -> str:
        titles, rows = self.table()
        if not titles:
            return f"<pre>{html.escape(str(self))}</pre>"
        head = "".join(f'<th style="{_STYLE}">{html.escape(title)}</th>' for title in titles)
        body = "".join("<tr>" + "".join(f'<td style="{_STYLE}">{html.escape(str(cell))}</td>'
                                        for cell in row) + "</tr>" for row in rows)
        return (f"<p>{html.escape(_headline(self))}</p>"
                f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _headline(value: object) -> str:
    return (str(value).splitlines() or [""])[0].strip()
