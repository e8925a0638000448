"""Bytes, seconds and counts as people read them, divisors and multiples, and items in groups of so many bytes.

GiB is 2**30 bytes, GB 1e9.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from math import isqrt
from typing import TypeVar

T = TypeVar("T")

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40


def format_bytes(n_bytes: float) -> str:
    """`1536` -> `1.5 KiB`; three significant digits, binary prefixes."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.3g} {unit}" if n_bytes < 1000 * size else f"{n_bytes / size:.0f} {unit}"
    return f"{n_bytes:.0f} B"


def format_host_bytes(n_bytes: float) -> str:
    """`1.13e12` -> `1.03 TiB (1.13 TB)`: memory of a host, which is sold by decimal prefixes."""
    unit, size = ("TB", 1e12) if n_bytes >= 1e12 else ("GB", 1e9)
    return f"{format_bytes(n_bytes)} ({n_bytes / size:.3g} {unit})"


def parsed_bytes(text: str) -> float | None:
    """`80GiB`, `80 GB` -> bytes; None for what is no number above 0 with a unit."""
    form = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT])(i?)B\s*", text, re.IGNORECASE)
    if form is None:
        return None
    base = 1024.0 if form[3] else 1000.0
    return float(form[1]) * base ** ("KMGT".index(form[2].upper()) + 1) or None


def format_count(n: float) -> str:
    """`1_234_567` -> `1.23M`; decimal prefixes, for parameters and tokens."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}" if abs(n) < 1000 * size else f"{n / size:.0f}{unit}"
    return f"{n:.3g}" if isinstance(n, float) else str(n)


def format_seconds(seconds: float) -> str:
    """`0.0123` -> `12.3 ms`, `75` -> `1 min 15 s`, `7500` -> `2 h 05 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def percent(fraction: float) -> str:
    """`0.956` -> `96%`, `0.041` -> `4.1%`, `0.01` -> `1%`."""
    return f"{fraction:.0%}" if fraction >= 0.0995 else f"{100 * fraction:.2g}%"


def round_up(n: int, unit: int) -> int:
    """The next multiple of `unit`, or `n` itself if it is one."""
    return -(-n // unit) * unit


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` in ascending order, none for 0 and below."""
    small = [d for d in range(1, isqrt(max(n, 0)) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def in_groups(items: Iterable[T], n_bytes: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Items in order, as many together as have at most `max_bytes`, or a larger one alone; no group is empty."""
    group: list[T] = []
    held = 0
    for item in items:
        size = n_bytes(item)
        if group and held + size > max_bytes:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group
