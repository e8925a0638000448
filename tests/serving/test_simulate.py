"""The simulated scheduler against one that goes pass by pass, and against what no scheduler can change."""

from collections import deque
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from shardwright.serving.setting import Degrees
from shardwright.serving.simulate import (
    PassTable,
    Scheduler,
    ServingRequest,
    closed_loop,
    lengths,
    poisson,
    run,
    steady_loop,
)
from tests.serving.cases import scheduler, serving


@cache
def a_table() -> PassTable:
    there = serving("llama-3.1-8b", "h100:1/1")
    return PassTable(replace(there, rates=replace(there.rates, launch_s=1e-5)), Degrees(1), 2048)


def pass_by_pass(table: PassTable, limit: Scheduler, requests: list[ServingRequest], users: int | None) -> np.ndarray:
    """Times of first and last tokens, (n, 2): every pass on its own, in the plainest way."""
    engine, sent = limit.engine, [each.arrival_s for each in requests]
    times = np.zeros((len(requests), 2))
    later = deque(range(len(requests)))
    coming = [later.popleft() for _ in range(min(users or len(requests), len(requests)))]
    waiting: list[int] = []
    read: dict[int, int] = {}
    left: dict[int, int] = {}
    cached: dict[int, int] = {}
    now, held_passes = requests[0].arrival_s, 0
    while coming or waiting or read or left:
        arrived = sorted((i for i in coming if sent[i] + table.arrive_s <= now), key=lambda i: (sent[i], i))
        coming = [i for i in coming if i not in arrived]
        waiting += arrived
        while waiting and len(left) + len(read) < limit.max_batch:
            taken = [requests[i] for i in (*left, *read, waiting[0])]
            held = sum(each.input_len + engine.reserved * each.output_len for each in taken)
            if held > limit.cache_tokens and len(taken) > 1:
                break
            read[waiting.pop(0)] = 0
        if not read and not left:
            now = min(sent[i] for i in coming) + table.arrive_s
            continue
        decoding = list(left) if engine.mixed or not read else []
        room, chunks = max(1, engine.max_tokens - len(decoding)), {}
        for i, done in read.items():
            unread = requests[i].input_len - done
            fits = unread <= room - sum(chunks.values()) or (not chunks and not engine.chunked)
            if not fits and (not engine.chunked or sum(chunks.values()) == room):
                break
            chunks[i] = unread if fits else room - sum(chunks.values())
        enough = (
            sum(chunks.values()) + len(left) >= engine.hold_share * engine.max_tokens
            or len(read) >= engine.hold_prompts
        )
        begun = any(done > 0 for done in read.values())
        if chunks and left and not enough and not begun and held_passes < engine.hold_passes:
            held_passes += 1
            chunks, decoding = {}, list(left)
        elif chunks:
            held_passes = 0
        tokens, pairs, ready = 0, 0.0, []
        for i, chunk in chunks.items():
            pairs += chunk * (read[i] + chunk / 2)
            tokens, read[i] = tokens + chunk, read[i] + chunk
            if read[i] == requests[i].input_len:
                ready.append(i)
        if tokens:
            over = sum(cached[i] for i in decoding)
            now += table.read_s(tokens + len(decoding), pairs, len(decoding), over)
        else:
            now += table.decode_s(len(decoding)) + table.cached_s * sum(cached[i] for i in decoding)
        ended = []
        for i in decoding:
            left[i], cached[i] = left[i] - 1, cached[i] + 1
            ended += [i] if left[i] == 0 else []
        for i in ready:
            del read[i]
            times[i, 0] = now
            left[i], cached[i] = requests[i].output_len - 1, requests[i].input_len
            ended += [i] if left[i] == 0 else []
        for i in ended:
            del left[i], cached[i]
            times[i, 1] = now
            if later:
                coming.append(later[0])
                sent[later.popleft()] = now
    return times - np.array(sent)[:, None]


SCHEDULERS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "prefill first": {"mixed": False},
    "whole prompts": {"chunked": False, "max_tokens": 1000},
    "no eviction": {"reserved": 1.0},
    "held for tokens": {"hold_passes": 9, "hold_share": 298 / 300, "max_batch": 7, "cache_tokens": 1e6},
    "held for prompts": {"hold_passes": 9, "hold_prompts": 3, "max_batch": 7, "cache_tokens": 1e6},
}


@pytest.mark.parametrize("engine", SCHEDULERS)
@pytest.mark.parametrize("users", [None, 7], ids=["poisson", "closed loop"])
def test_passes_computed_at_once_are_those_computed_one_by_one(engine: str, users: int | None):
    table = a_table()
    usual: dict[str, Any] = {"max_batch": 5, "max_tokens": 300, "cache_tokens": 1500}
    limit = scheduler(**(usual | SCHEDULERS[engine]))
    ins, outs = lengths(900, 0.1, 40, seed=5), lengths(60, 0.1, 40, seed=6)
    requests = poisson(20.0, ins, outs) if users is None else closed_loop(ins, outs)
    found = run(table, limit, requests, users)
    expected = pass_by_pass(table, limit, requests, users)
    assert found.ttft_s == pytest.approx(expected[:, 0], rel=1e-9)
    assert found.e2e_s == pytest.approx(expected[:, 1], rel=1e-9)


def test_one_request_takes_its_prompt_and_its_tokens():
    table = a_table()
    limit = scheduler(max_batch=8, max_tokens=2048, cache_tokens=1e6)
    found = run(table, limit, [ServingRequest(0.0, 1000, 11)])
    first = table.arrive_s + table.read_s(1000, 1000 * 500, 0, 0)
    further = sum(table.decode_s(1) + table.cached_s * (1000 + k) for k in range(10))
    assert found.ttft_s[0] == pytest.approx(first)
    assert found.e2e_s[0] == pytest.approx(first + further)
    assert found.tpot_s[0] == pytest.approx(further / 10)


def test_users_of_a_steady_loop_are_always_there():
    table = a_table()
    limit = scheduler(max_batch=64, max_tokens=2048, cache_tokens=1e6)
    found = steady_loop(table, limit, 512, 128, users=16, rounds=12)
    rate = 16 * 128 / found.e2e_s.mean()  # Little's law
    assert rate == pytest.approx(found.tokens_per_s, rel=0.1)


def test_a_faster_arrival_waits_longer_and_more_than_capacity_ever_longer():
    table = a_table()
    limit = scheduler(max_batch=16, max_tokens=2048, cache_tokens=1e6)
    ins, outs = [512] * 300, [64] * 300
    waits = [run(table, limit, poisson(rate, ins, outs)).ttft_s for rate in (1.0, 10.0, 1000.0)]
    assert waits[0].mean() < waits[1].mean() < waits[2].mean()
    assert waits[2][200:].mean() > 2 * waits[2][:100].mean()


def test_a_longer_prompt_of_as_many_tokens_has_more_attention():
    table = a_table()
    assert table.pair_s > 0
    assert table.read_s(8192, 8192 * 4096, 0, 0) > table.read_s(8192, 8192 * 512, 0, 0) > table.least_s


def test_a_request_larger_than_the_cache_is_served_alone():
    table = a_table()
    limit = scheduler(max_batch=16, max_tokens=512, cache_tokens=100)
    found = run(table, limit, closed_loop([400, 400], [4, 4]), 2)
    assert found.ttft_s[1] > found.e2e_s[0]


def test_more_accepted_tokens_end_sooner():
    table = a_table()
    plain, drafted = (
        run(table, scheduler(8, 2048, 1e6, accepted=accepted), closed_loop([256] * 8, [101] * 8), 8).e2e_s.mean()
        for accepted in (1.0, 2.5)
    )
    assert drafted < 0.6 * plain


def test_without_eviction_a_request_waits_until_its_whole_answer_has_room():
    """Two requests of 100 tokens of prompt and answer need 400 at their ends, and 300 on average."""
    table, requests = a_table(), closed_loop([100, 100], [100, 100])
    together, apart = (run(table, scheduler(8, 2048, 350, reserved=part), requests, 2) for part in (0.5, 1.0))
    assert together.ttft_s[1] == together.ttft_s[0]
    assert apart.ttft_s[1] > apart.e2e_s[0]


def test_prompts_wait_for_others_while_others_decode_and_not_longer_than_they_may():
    """The first prompt finds nobody; the second waits 20 passes, as no third one comes; with a third it does not."""
    table = a_table()
    limit = scheduler(8, 2048, 1e6, hold_passes=20, hold_prompts=2)
    first = ServingRequest(0.0, 256, 101)
    begins = table.arrive_s + table.read_s(256, 256 * 128, 0, 0)
    waits = run(table, limit, [first, ServingRequest(begins, 256, 11)])
    held = sum(table.decode_s(1) + table.cached_s * (256 + k) for k in range(20))
    assert waits.ttft_s[0] == pytest.approx(begins)
    assert waits.ttft_s[1] > table.arrive_s + held
    plain = run(table, scheduler(8, 2048, 1e6), [first, ServingRequest(begins, 256, 11)])
    assert waits.ttft_s[1] - plain.ttft_s[1] == pytest.approx(held, rel=0.05)
    together = run(table, limit, [first, ServingRequest(begins, 256, 11), ServingRequest(begins, 256, 11)])
    assert together.ttft_s[1] < plain.ttft_s[1] + 2 * table.decode_s(1)
