"""HTML pages from Jinja2 templates: everything is escaped, and an unknown name is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..spec.errors import ConfigError
from .formats import (
    format_number,
    format_percent,
    format_plural,
    format_rate,
    format_ratio,
    format_share,
    format_signed_time,
    format_sizes,
    format_time,
)
from .markup import Markup, breakable
from .style import style_sheet

FOLDER = Path(__file__).with_name("templates")
FILTERS: Mapping[str, Callable[..., object]] = {
    "breakable": breakable, "number": format_number, "percent": format_percent,
    "plural": format_plural, "rate": format_rate, "ratio": format_ratio, "share": format_share,
    "signed_time": format_signed_time, "sizes": format_sizes, "time": format_time}


def render_template(path: Path, context: Mapping[str, Any],
                    filters: Mapping[str, Callable[..., object]] | None = None) -> str:
    """Render one template, which may use layout.html and macros.html of this package."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as e:
        raise ConfigError(f"an HTML page needs Jinja2, which is not installed ({e}): "
                          "pip install 'layerzero[cli]'") from e
    environment = Environment(loader=FileSystemLoader([path.parent, FOLDER]), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update({**FILTERS, **(filters or {})})
    return environment.get_template(path.name).render(style=Markup(style_sheet()), **context)
