"""Stress cases that the norms share."""

from __future__ import annotations

from typing import Any

NORM_STRESS: tuple[dict[str, Any], ...] = (
    {"hidden": 16384, "rows": (2,), "extreme": True}, {"rows": (3000,), "hidden": 8}, {"eps": 1.0},
    {"eps": 0.0}, {"hidden": 65, "rows": (3, 3)}, {"rows": (131_077,), "hidden": 2})
