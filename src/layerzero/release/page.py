"""The gate's report as one HTML page: no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.templating import render_template

TEMPLATE = Path(__file__).parent / "templates" / "gate.html"


def render(report: Mapping[str, Any]) -> str:
    """Return the page of a report as `lz gate --json` prints it."""
    return render_template(TEMPLATE, {"report": report})
