"""Prefill and decode in pools of their own: closed forms of lines and links, a plain simulation of decoding, and what
no scheduler can change."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shardwright.serving.pools import InstancePool, PoolTimes, run
from shardwright.serving.search import layouts
from shardwright.serving.separate import separate, simulated, transfer_s, waiting_s
from shardwright.serving.setting import Degrees, Settings
from shardwright.serving.simulate import PassTable, ServingRequest, closed_loop, poisson
from tests.marks import prove
from tests.serving.cases import IDEAL, scheduler, serving, task

INPUT, OUTPUT = 1024, 60
TOKEN_S = 2e-6
"""Of the cache of a token over the link, alone: some 2 ms a prompt."""


@cache
def table() -> PassTable:
    return PassTable(serving("llama-3.1-8b", "h100:1/1", rates=IDEAL), Degrees(1), 8192)


def pools(readers: int = 1, writers: int = 1, prompts: int = 8, batch: int = 16, sends: float = TOKEN_S,
          receives: float = 0.0, cache_tokens: float = 1e9) -> tuple[InstancePool, InstancePool]:  # fmt: skip
    return (
        InstancePool(table(), readers, scheduler(prompts, 8192, cache_tokens), sends),
        InstancePool(table(), writers, scheduler(batch, 8192, 1e9), receives),
    )


def prefill_s(tokens: int = INPUT) -> float:
    return table().read_s(tokens, tokens * tokens / 2, 0, 0.0)


def arriving(per_s: float, n: int, output_len: int = OUTPUT) -> list[ServingRequest]:
    return poisson(per_s, [INPUT] * n, [output_len] * n)


def check_the_line_before_prefill():
    """One prompt a pass, and no decoding: the line M/D/1, whose mean wait is rho S / (2 (1 - rho))."""
    each_s = prefill_s()
    for load in (0.3, 0.7):
        found = run(*pools(prompts=1), arriving(load / each_s, 8_000, output_len=1))
        assert float(found.queued_s.mean()) == pytest.approx(load * each_s / (2 * (1 - load)), rel=0.1)
        assert found.served.ttft_s == pytest.approx(found.queued_s + each_s)
        assert np.isnan(found.served.tpot_s).all()


def test_the_line_before_prefill_is_that_of_the_closed_form():
    check_the_line_before_prefill()


@prove
def test_the_estimate_of_the_line_is_that_of_the_simulation():
    each_s = prefill_s()
    assert float(waiting_s(0.7 / each_s, each_s, 1)) == pytest.approx(0.7 * each_s / 0.6)
    found = run(*pools(readers=3, prompts=1), arriving(0.8 * 3 / each_s, 8_000, output_len=1))
    assert float(found.queued_s.mean()) == pytest.approx(float(waiting_s(2.4 / each_s, each_s, 3)), rel=0.15)
    assert waiting_s(4 / each_s, each_s, [3, 4, 5])[:2].tolist() == [np.inf, np.inf]


def test_nobody_waits_at_a_low_rate():
    requests = [ServingRequest(10.0 * at, INPUT, OUTPUT) for at in range(20)]
    found = run(*pools(), requests, latency_s=5e-6)
    assert found.queued_s == pytest.approx(0, abs=1e-9)
    alone = INPUT * TOKEN_S + 5e-6
    assert found.transfer_s == pytest.approx(alone)
    assert found.served.ttft_s == pytest.approx(prefill_s() + alone)
    mean = table().decode_s(1) + table().cached_s * (INPUT + (OUTPUT - 2) / 2)
    assert found.served.tpot_s == pytest.approx(mean)


def check_the_link_is_shared(sends: float = TOKEN_S, receives: float = 0.0):
    """Four prompts that are read in one pass cross at once, and each takes as long as all of them together."""
    found = run(*pools(sends=sends, receives=receives), closed_loop([INPUT] * 4, [OUTPUT] * 4))
    assert found.transfer_s == pytest.approx(4 * INPUT * max(sends, receives))


@pytest.mark.parametrize("links", [(TOKEN_S, 0.0), (TOKEN_S, 3 * TOKEN_S)])
def test_transfers_under_way_share_the_slower_link(links: tuple[float, float]):
    check_the_link_is_shared(*links)


def test_a_transfer_that_comes_later_takes_half_of_the_link():
    far = 50 * prefill_s() / INPUT  # seconds a token: the second prompt is read while the first crosses
    found = run(*pools(prompts=1, sends=far), closed_loop([INPUT] * 2, [OUTPUT] * 2))
    whole, between = far * INPUT, prefill_s()
    assert found.transfer_s == pytest.approx([2 * whole - between, 2 * whole - between])


def decoded(first: Sequence[float]) -> np.ndarray:
    """Times of the last tokens where requests decode from these times on, pass by pass."""
    last, left, now = np.zeros(len(first)), dict.fromkeys(range(len(first)), OUTPUT - 1), 0.0
    while left:
        there = [at for at in left if first[at] <= now + 1e-12]
        if not there:
            now = min(first[at] for at in left)
            continue
        cached = sum(INPUT + OUTPUT - 1 - left[at] for at in there)
        now += table().decode_s(len(there)) + table().cached_s * cached
        for at in there:
            left[at] -= 1
            if not left[at]:
                last[at] = now
                del left[at]
    return last


def check_passes_of_decoding():
    """Passes that are computed at once end when those do that are computed one by one."""
    requests = arriving(0.5 / prefill_s(), 150)
    found = run(*pools(batch=1000), requests)
    first = found.served.ttft_s + [each.arrival_s for each in requests]
    last = found.served.e2e_s + [each.arrival_s for each in requests]
    assert last == pytest.approx(decoded(first), abs=1e-9)


def test_passes_computed_at_once_are_those_computed_one_by_one():
    check_passes_of_decoding()


def check_places_are_free_when_they_are_taken():
    """Places for decoding are taken from the start of a transfer to the last token; never more than there are."""
    requests = arriving(1 / prefill_s(), 400)
    found = run(*pools(readers=2, batch=6), requests)
    arrived = np.array([each.arrival_s for each in requests])
    last = arrived + found.served.e2e_s
    begun = arrived + found.served.ttft_s - found.transfer_s
    there = [int(((begun <= at) & (last > at)).sum()) for at in begun + 1e-9]
    assert max(there) == 6
    assert_each_once(found, requests)


def assert_each_once(found: PoolTimes, requests: Sequence[ServingRequest]) -> None:
    assert found.served.output_tokens == sum(each.output_len for each in requests)
    assert (found.queued_s >= -1e-12).all()
    assert (found.served.ttft_s >= found.queued_s + found.transfer_s + prefill_s() - 1e-9).all()
    assert (found.served.e2e_s > found.served.ttft_s).all()
    assert (found.served.tpot_s >= table().decode_s(1)).all()


def test_places_are_free_when_they_are_taken():
    check_places_are_free_when_they_are_taken()


def test_prompts_wait_for_room_in_the_cache_of_their_instance():
    far = 10 * prefill_s() / INPUT
    roomy, tight = (
        run(*pools(prompts=1, sends=far, cache_tokens=tokens), closed_loop([INPUT] * 9, [OUTPUT] * 9))
        for tokens in (1e9, 1.5 * INPUT)
    )
    assert tight.transfer_s == pytest.approx(far * INPUT)  # one at a time, so each has the link alone
    assert roomy.transfer_s.max() > 5 * far * INPUT
    assert tight.queued_s.max() > roomy.queued_s.max()


def test_waits_grow_with_the_rate_and_end_in_a_closed_loop():
    means = [
        float(run(*pools(writers=2), arriving(load / prefill_s(), 600)).served.ttft_s.mean())
        for load in (0.2, 0.5, 0.8, 0.95)
    ]
    assert means == sorted(means)
    requests = closed_loop([INPUT] * 200, [OUTPUT] * 200)
    found = run(*pools(readers=2, writers=2, batch=4), requests, concurrency=12)
    assert_each_once(found, requests)
    assert float(found.served.e2e_s.mean()) * 200 / found.served.span_s == pytest.approx(12, rel=0.1)  # Little's law


def test_a_split_of_a_cluster_keeps_the_limits_for_95_of_100():
    there = task("llama-3.1-70b", "h100:16", tpot_s=0.03, ttft_s=1.5)
    every = list(layouts(there.serving.model, there.serving.cluster))
    found = separate(there, every)
    assert found is not None
    split = found.split
    assert split.readers * split.prefill.size + split.writers * split.decode.size <= 16 == found.accelerators
    assert found.tpot_s(95) <= 0.03
    assert found.ttft_s(95) <= 1.5
    assert 0.5 * split.per_s < found.tokens_per_s / 512 < 1.1 * split.per_s
    assert found.crossed.transfer_s.min() >= float(transfer_s(there, Settings.from_layouts([split.prefill]))[0]) * (
        1 - 1e-9
    )
    one = simulated(there, split, 1)
    assert one.ttft_s(95) < found.ttft_s(95)


@prove
def test_a_split_at_a_rate_serves_what_arrives():
    there = task("llama-3.1-70b", "h100:16", tpot_s=0.03, ttft_s=1.5, rate_per_s=6.0)
    found = separate(there, list(layouts(there.serving.model, there.serving.cluster)))
    assert found is not None
    assert found.requests is None
    assert found.tokens_per_s == pytest.approx(6.0 * 512, rel=0.15)
    fast = replace(there, rate_per_s=1000.0)
    assert separate(fast, list(layouts(there.serving.model, there.serving.cluster))) is None
