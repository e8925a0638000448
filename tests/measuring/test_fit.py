"""Fits give back the constants that points were made with, and say how far off they are where none would."""

from dataclasses import replace

import pytest

from shardwright.measuring.fit import copy_bytes_per_s, fit_attention, fit_link, fit_matmuls, kernel_bytes
from tests.measuring.machines import LINK, PARTIAL, RAMP, RATE, attention_points, machine, matmul_points, message_points


def test_rates_of_matmuls_are_found_again():
    found = fit_matmuls(matmul_points())
    assert found.flops_per_s == pytest.approx({"fp32": RATE, "bf16": RATE / 4}, rel=0.03)
    assert found.ramp_k == pytest.approx(RAMP, rel=0.2)
    assert found.partial_wave == pytest.approx(PARTIAL, rel=0.2)
    assert found.error < 0.02


def test_the_rate_of_attention_is_found_again():
    found = fit_attention(attention_points(), RATE)
    assert (found.share, found.backward) == pytest.approx((0.6, 2.5), rel=0.05)
    assert (found.width, found.length) == pytest.approx((16, 100), rel=0.2)


def test_a_link_is_found_again():
    found = fit_link(message_points())
    assert (found.bytes_per_s, found.latency_s) == pytest.approx((LINK.bytes_per_s, LINK.latency_s), rel=0.02)
    assert found.start_s == pytest.approx(LINK.start_s, rel=0.05)
    assert list(found.relative.values()) == pytest.approx([1, 1, 1], abs=1e-3)
    assert found.error < 0.01


def test_a_collective_that_takes_longer_than_the_others_is_told_apart():
    found = fit_link(message_points(slower=2.0))
    assert found.relative["all_gather"] / found.relative["all_reduce"] == pytest.approx(2, rel=0.02)
    assert found.error < 0.02


def test_a_message_that_was_interrupted_moves_the_fit_little():
    points = list(message_points())
    points[5] = replace(points[5], seconds=20 * points[5].seconds)
    found = fit_link(points)
    assert found.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.3)
    assert found.error > 0.02


def test_kernels_are_told_in_bytes_at_the_bandwidth_of_a_large_copy():
    rank = machine().ranks[0]
    bandwidth = copy_bytes_per_s(rank.copies)
    assert bandwidth == pytest.approx(8e9)
    assert kernel_bytes(rank.kernels, bandwidth) == pytest.approx({"rmsnorm_bytes": 20, "optimizer_bytes": 50})
