"""The one grid on which sizes are bucketed where only speed depends on them.

1 to 16 exactly, then two buckets per octave: 17-24, 25-32, 33-48, 49-64, 65-96, ...
Keys, measurements and dispatch tables all use these buckets.
"""

from __future__ import annotations


def bucket(n: int) -> int:
    """Returns the bucket's number: `n` itself up to 16, then 64 + two per octave."""
    if n <= 16:
        return n if n >= 0 else -1
    octave = (n - 1).bit_length() - 1
    return 64 + 2 * octave + ((n - 1) >> (octave - 1) & 1)


def bucket_top(n: int) -> int:
    """Returns the largest size that shares a bucket with `n`."""
    if n <= 16:
        return n
    octave = (n - 1).bit_length() - 1
    half = (n - 1) >> (octave - 1) & 1
    return (1 << octave) + (half + 1) * (1 << (octave - 1))


def bucket_bottom(n: int) -> int:
    """Returns the smallest size that shares a bucket with `n`."""
    if n <= 16:
        return n
    octave = (n - 1).bit_length() - 1
    half = (n - 1) >> (octave - 1) & 1
    return (1 << octave) + half * (1 << (octave - 1)) + 1


def bucket_label(n: int) -> str:
    low, high = bucket_bottom(n), bucket_top(n)
    return str(low) if low == high else f"{low}-{high}"
