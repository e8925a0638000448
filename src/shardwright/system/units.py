"""Formatting and parsing of bytes, seconds and counts; divisors, multiples, and grouping of items by size.

GiB is 2**30 bytes, GB 1e9.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from math import isqrt
from typing import TypeVar

T = TypeVar("T")

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
MOST_COUNTED = 2**31
"""Largest number of sequences, tokens or steps that a person may ask for."""


def format_bytes(n_bytes: float) -> str:
    """Return `1.5 KiB` for 1536: three significant digits, binary prefixes."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.3g} {unit}" if n_bytes < 1000 * size else f"{n_bytes / size:.0f} {unit}"
    return f"{n_bytes:.0f} B"


def format_host_bytes(n_bytes: float) -> str:
    """Return `1.03 TiB (1.13 TB)` for 1.13e12. Host memory is sold by decimal prefixes."""
    unit, size = ("TB", 1e12) if n_bytes >= 1e12 else ("GB", 1e9)
    return f"{format_bytes(n_bytes)} ({n_bytes / size:.3g} {unit})"


def parsed_bytes(text: str) -> float | None:
    """Return the bytes of `80GiB` or `80 GB`; None unless the text is a positive number with a unit."""
    form = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT])(i?)B\s*", text, re.IGNORECASE)
    if form is None:
        return None
    base = 1024.0 if form[3] else 1000.0
    return float(form[1]) * base ** ("KMGT".index(form[2].upper()) + 1) or None


def format_count(n: float) -> str:
    """Return `1.23M` for 1_234_567: decimal prefixes, for parameters and tokens."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}" if abs(n) < 1000 * size else f"{n / size:.0f}{unit}"
    return f"{n:.3g}" if isinstance(n, float) else str(n)


def counted(n: int, noun: str) -> str:
    """Return `1 document`, `2,000 documents`, `3 batches`, `2 entries`. `noun`: in the singular."""
    if n == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{n:,} {noun[:-1]}ies"
    return f"{n:,} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def format_seconds(seconds: float) -> str:
    """Return `12.3 ms` for 0.0123, `1 min 15 s` for 75, `2 h 05 min` for 7500."""
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
    """Return `96%` for 0.956, `4.1%` for 0.041, `1%` for 0.01."""
    return f"{fraction:.0%}" if fraction >= 0.0995 else f"{100 * fraction:.2g}%"


def round_up(n: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `n`."""
    return -(-n // unit) * unit


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` in ascending order, none for 0 and below."""
    small = [d for d in range(1, isqrt(max(n, 0)) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def division(size: int, by: int) -> str:
    """Return a division with its remainder, such as `(8 = 3*2 + 2)`."""
    return f"({size} = {by}*{size // by} + {size % by})"


def division_problem(
    key: str, by: int, size: int, what: str, valid: Callable[[], Iterable[int]] | None = None, *, shown: bool = True
) -> str | None:
    """Return the sentence that `by`, the value of `key`, does not divide `size`, or None if it does. `what`: the words
    for the size; `valid`: returns the valid values, by default all divisors; `shown`: the division is printed."""
    if size % by == 0:
        return None
    values = ", ".join(map(str, divisors(size) if valid is None else valid()))
    return f"{key}={by} does not divide {what}{f' {division(size, by)}' if shown else ''}; valid: {values}"


def in_groups(items: Iterable[T], n_bytes: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield items in order in nonempty groups of at most `max_bytes`; a larger item forms its own group."""
    group: list[T] = []
    group_bytes = 0
    for item in items:
        size = n_bytes(item)
        if group and group_bytes + size > max_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += size
    if group:
        yield group
