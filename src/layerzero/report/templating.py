"""HTML pages from Jinja2 templates: everything is escaped, and an unknown name is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec.display import plural
from ..spec.errors import ConfigError
from .formats import (
    format_number,
    format_percent,
    format_rate,
    format_ratio,
    format_share,
    format_signed_time,
    format_sizes,
    format_time,
)
from .markup import Markup, breakable
from .style import style_sheet

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).with_name("templates")
FILTERS: Mapping[str, Callable[..., object]] = {
    "breakable": breakable, "number": format_number, "percent": format_percent,
    "plural": plural, "rate": format_rate, "ratio": format_ratio, "share": format_share,
    "signed_time": format_signed_time, "sizes": format_sizes, "time": format_time}


def render_template(path: Path, context: Mapping[str, Any],
                    filters: Mapping[str, Callable[..., object]] | None = None) -> str:
    """Render one template, which may use layout.html and macros.html of this package."""
    try:
        import jinja2  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"an HTML page needs Jinja2, which is not installed ({e}): "
                          "pip install 'layerzero[cli]'") from e
    environment = _environment(path.parent)
    environment.filters.update(filters or {})
    return str(environment.get_template(path.name).render(style=Markup(style_sheet()), **context))


@lru_cache(maxsize=None)
def _environment(folder: Path) -> Environment:
    """Return the environment of a folder; its templates are compiled once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    environment = Environment(loader=FileSystemLoader([folder, FOLDER]), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(FILTERS)
    return environment
