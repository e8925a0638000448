"""Proves that numbers are shown with three digits and the unit people expect, and that divisors are all there."""

import pytest

from shardwright.system.units import counted, divisors, format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(3), "3 B"),
        (format_bytes(80 * 2**30), "80 GiB"),
        (format_bytes(1010 * 2**30), "1010 GiB"),
        (format_count(1_234_567), "1.23M"),
        (format_count(999), "999"),
        (format_count(728.413), "728"),
        (format_count(405e9), "405B"),
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(2e-5), "20 us"),
        (format_seconds(75), "1 min 15 s"),
        (format_seconds(7500), "2 h 05 min"),
    ],
)
def test_a_number_is_shown_as_people_read_it(shown: str, text: str):
    assert shown == text


def test_divisors_are_the_numbers_that_divide_in_ascending_order():
    for n in range(-2, 400):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_number_has_its_noun_in_the_singular_only_if_it_is_one():
    assert [counted(n, "document") for n in (0, 1, 2000)] == ["0 documents", "1 document", "2,000 documents"]
    assert [counted(2, noun) for noun in ("micro-batch", "entry", "key", "pass")] == [
        "2 micro-batches",
        "2 entries",
        "2 keys",
        "2 passes",
    ]
