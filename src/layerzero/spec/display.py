"""How a result shows itself: `repr` in one line, a table in a notebook, `str` in full."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

Cells = tuple[Sequence[str], Iterable[Sequence[Any]]]   # titles of columns, rows
_STYLE = "text-align:left; vertical-align:top"
_LONGEST = 160                                 # characters of a repr


def plural(n: int, noun: str) -> str:
    """Returns "1 call" or "2 calls"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


class Displayed:
    """Base of results that have more to tell than fits in a line."""

    def _headline(self) -> str:
        """Returns the result in one line."""
        return (str(self).splitlines() or [""])[0].strip()

    def _cells(self) -> Cells:
        """Returns the column titles and rows that a notebook shows; no titles: `str`."""
        return (), ()

    def __repr__(self) -> str:
        text = f"{type(self).__name__}: {self._headline()}"
        return f"<{text if len(text) <= _LONGEST else text[:_LONGEST - 3] + '...'}>"

    def _repr_html_(self) -> str:
        titles, rows = self._cells()
        if not titles:
            return f"<pre>{html.escape(str(self))}</pre>"
        body = "".join(_row("td", row) for row in rows)
        return (f"<p>{html.escape(self._headline())}</p><table><thead>{_row('th', titles)}</thead>"
                f"<tbody>{body}</tbody></table>")


def _row(tag: str, cells: Iterable[Any]) -> str:
    inner = "".join(f'<{tag} style="{_STYLE}">{html.escape(str(cell))}</{tag}>' for cell in cells)
    return f"<tr>{inner}</tr>"
