"""What the tests of the store have in common."""

from __future__ import annotations

from layerzero.perf.record import Measurement


def measurement(i: int = 0, kernel: str = "torch.k", **changes) -> Measurement:
    """One measurement; each `i` is of another kind of call."""
    row = Measurement(
        kernel, "rms_norm", f"float32 rows={i} hidden=64", "0123456789abcdef-4t", 10.0 + i / 3,
        0.02, 50, "float32", f"rows={i} hidden=64", 1e6 / 7, 1e4, 12.5, 13.0, 0.0, "v1", 1.7e9 + i,
        "")
    return row._replace(**changes)
