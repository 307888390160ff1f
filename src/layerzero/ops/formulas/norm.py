"""Cases and stress cases that the norms share."""

from __future__ import annotations

from typing import Any

NORM_CASES: tuple[dict[str, Any], ...] = (
    {}, {"rows": (1,)}, {"rows": (2, 7)}, {"rows": ()}, {"rows": (0,)},
    {"rows": (3, 2, 5), "hidden": 96}, {"hidden": 1}, {"hidden": 17},
    {"hidden": 4096, "rows": (3,)}, {"affine": False}, {"stride": "padded"},
    {"stride": "sparse"}, {"stride": "transposed", "rows": (6, 4)}, {"weight_dtype": "float32"},
    {"eps": 1e-3}, {"extreme": True}, {"padding": True, "eps": 1e-12},
)

NORM_STRESS: tuple[dict[str, Any], ...] = (
    {"hidden": 16384, "rows": (2,), "extreme": True}, {"hidden": 12_299, "rows": (2,)},
    {"rows": (3000,), "hidden": 8}, {"eps": 1.0},
    {"hidden": 4096, "rows": (3,), "outlier": True}, {"eps": 0.0},
    {"hidden": 65, "rows": (3, 3)}, {"rows": (131_077,), "hidden": 2})

# of widths at which a row is summed in parts
ROWS_ALONE: tuple[dict[str, Any], ...] = (
    {"rows": (24,), "hidden": 1024}, {"rows": (24,), "hidden": 4096})
