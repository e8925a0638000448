"""Proves what attention over a context group sends, and that what it holds does not grow with the ring.

Messages are counted where PyTorch is called, bytes where tensors live. Runs anywhere, on gloo.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.parallel import context
from tests.distributed import run_ranks
from tests.parallel.attention import (
    BATCH,
    ONE_OF_EACH,
    SEQ_LEN,
    WIDTH,
    Case,
    attention,
    inputs,
)


class Sent(NamedTuple):
    """A message or a call: what it is, and the bytes that leave this rank."""

    what: str
    n_bytes: int


def sent_in_cases(cases: list[Case], dtype: torch.dtype) -> list[tuple[list[Sent], list[Sent]]]:
    return [sent_by_rank(case, dtype) for case in cases]


def sent_by_rank(case: Case, dtype: torch.dtype) -> tuple[list[Sent], list[Sent]]:
    """What forward and backward send, seen at the functions of torch.distributed that they call."""
    log: list[Sent] = []
    attend = attention(case)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if name == "batch_isend_irecv":
                sends = [op for op in args[0] if op.op is dist.isend]
                log.extend(Sent("message", op.tensor.nbytes) for op in sends)
                assert len(args[0]) == 2 * len(sends)
            else:
                n = named["group"].size()
                into, given, *splits = args
                if name == "all_gather":
                    assert into.nbytes == n * given.nbytes
                    log.append(Sent(name, (n - 1) * given.nbytes))
                else:
                    kept = given.nbytes // n
                    if splits:
                        counts = splits[1]
                        assert counts[named["group"].rank()] == 0
                        kept = 0
                    log.append(Sent(name, given.nbytes - kept))
            return function(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched("batch_isend_irecv", dist.batch_isend_irecv))
        patch.setattr(dist, "all_to_all_single", watched("all_to_all", dist.all_to_all_single))
        patch.setattr(context, "all_gather_single", watched("all_gather", context.all_gather_single))
        q, k, v, do = (x[:, case.positions(dist.get_rank(), SEQ_LEN)].to(dtype) for x in inputs(case))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o = attend(q, k, v)
        forward = list(log)
        log.clear()
        o.backward(do)
    return forward, log


def table(case: Case, dtype: torch.dtype) -> tuple[list[Sent], list[Sent]]:
    """The table in context.py."""
    bytes_each, bytes_of_sums = dtype.itemsize, max(dtype.itemsize, 4)
    n, heads, kv_heads = case.ranks, case.heads, case.kv_heads
    rows = BATCH * SEQ_LEN // n * WIDTH  # B T C
    if case.method == "allgather":
        part = (n - 1) * 2 * rows * kv_heads * bytes_each
        return [Sent("all_gather", part)], [Sent("all_gather", part), Sent("all_to_all", part)]
    whole_heads = max(kv_heads, case.ulysses)
    keys = Sent("message", 2 * rows * whole_heads * bytes_each)
    sums = Sent("message", 2 * rows * whole_heads * bytes_of_sums)
    hops = case.ring - 1
    there = back = []
    if case.ulysses > 1:
        rest = (case.ulysses - 1) * rows * bytes_each // case.ulysses
        there = [Sent("all_to_all", rest * (heads + 2 * whole_heads))]
        back = [Sent("all_to_all", rest * heads)]
    return there + [keys] * hops + back, back + [keys] * hops + [sums] * hops + there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_and_bytes_are_those_of_the_table(dtype: torch.dtype):
    cases = [*ONE_OF_EACH, Case("zigzag", 4, 1, kv_heads=1), Case("usp", 2, 2, kv_heads=1)]
    for rank in run_ranks(sent_in_cases, 4, cases, dtype):
        for case, (sent_forward, sent_backward) in zip(cases, rank, strict=True):
            forward, backward = table(case, dtype)
            assert sent_forward == forward, case
            assert sorted(sent_backward) == sorted(backward), case


def test_grouped_keys_and_values_travel_unexpanded():
    grouped, expanded = Case("zigzag", 4, 1, heads=8, kv_heads=2), Case("zigzag", 4, 1, heads=8, kv_heads=8)
    (few, _), (many, _) = run_ranks(sent_in_cases, 4, [grouped, expanded], torch.float32)[0]
    assert 4 * sum(sent.n_bytes for sent in few) == sum(sent.n_bytes for sent in many)


# What is held


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made within that were alive at once; storages counted once, by when they end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._known:
                    self.now += storage.nbytes()
                    self._known[key] = weakref.finalize(storage, self._end, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _end(self, key: int, n_bytes: int) -> None:
        self.now -= n_bytes
        self._known.pop(key, None)


def live_bytes_in_cases(cases: list[Case], local: int) -> list[tuple[int, int, int]]:
    return [live_bytes(case, local) for case in cases]


def live_bytes(case: Case, local: int) -> tuple[int, int, int]:
    """Peak of a forward pass, what is held after it, and the peak of the backward pass, beyond the inputs."""
    attend = attention(case)
    q, k, v, do = (x[:, :local].float().contiguous() for x in inputs(case, local))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with LiveBytes() as forward:
        o = attend(q, k, v)
        held = forward.now
    with LiveBytes() as backward:
        o.backward(do)
    return forward.peak, held, held + backward.peak


def test_memory_does_not_grow_with_the_ring_at_a_fixed_local_length():
    local = 64
    block = BATCH * local * 2 * 2 * WIDTH * 4  # 2BTKC, in fp32
    own = 2 * BATCH * local * 4 * WIDTH * 4 // 2 + block + BATCH * local * 4 * 4  # o and lse, k and v; q is an input
    for i, method in enumerate(("ring", "zigzag")):
        most = {}
        for n in (2, 3, 8):
            ranks = [cases[i] for cases in on_rings_of(n, local)]
            assert {held for _, held, _ in ranks} == {own}
            most[n] = [max(rank[pass_] for rank in ranks) for pass_ in (0, 2)]
        assert most[3] == most[8], method
        # From three ranks on, a second buffer for what comes: of keys and values, and in backward of sums too.
        assert most[8][0] <= most[2][0] + block, method
        assert most[8][1] <= most[2][1] + 2 * block, method


@cache
def on_rings_of(n: int, local: int) -> list[list[tuple[int, int, int]]]:
    return run_ranks(live_bytes_in_cases, n, [Case("ring", n, 1), Case("zigzag", n, 1)], local)
