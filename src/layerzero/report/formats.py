"""Numbers as the report writes them."""

from __future__ import annotations

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_time(us: float) -> str:
    for limit, size, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / size:.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{us / 1e6:.3g}\N{NO-BREAK SPACE}s"


def format_signed_time(us: float) -> str:
    return f"\N{MINUS SIGN}{format_time(-us)}" if us < 0 else format_time(us)


def format_rate(per_second: float, unit: str) -> str:
    size, prefix = next(((s, p) for s, p in PREFIXES if per_second >= s), (1.0, ""))
    return f"{per_second / size:.3g} {prefix}{unit}/s"


def format_number(value: float) -> str:
    """Write as many digits as say something."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def format_ratio(value: float | None) -> str:
    return "-" if value is None else f"{format_number(value)}x"


def format_share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}" if value >= 0.001 else "<0.1%"


def format_percent(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}%}"


def format_sizes(sizes: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())
