"""Proves that evaluation's schedule runs every forward pass once, in an order that no rank waits for in vain."""

from hypothesis import given
from hypothesis import strategies as st

from shardwright.schedule.actions import Action
from shardwright.schedule.basic import forward_only
from shardwright.schedule.messages import with_messages
from shardwright.schedule.registry import find
from tests.schedule.links import rendezvous


def test_a_rank_takes_as_many_microbatches_as_there_are_ranks_through_one_stage_and_then_the_next() -> None:
    found = forward_only((0, 1, 0, 1), 2, 3)
    assert [" ".join(map(str, actions)) for actions in found.ranks] == [
        "0F0 0F1 2F0 2F1 0F2 2F2",
        "1F0 1F1 3F0 3F1 1F2 3F2",
    ]


@given(st.sampled_from(["1f1b", "interleaved-1f1b", "zb-v"]), st.integers(1, 6), st.integers(1, 3), st.integers(1, 13))
def test_every_microbatch_goes_through_every_stage_once_on_its_rank_and_sends_may_wait_for_receivers(
    name: str, n_ranks: int, virtual_stages: int, n_microbatches: int
) -> None:
    (path,) = find(name).ways(n_ranks, virtual_stages)
    schedule = forward_only(path, n_ranks, n_microbatches)
    everything = [(rank, Action(stage, "F", i)) for stage, rank in enumerate(path) for i in range(n_microbatches)]
    assert sorted(schedule.actions()) == sorted(everything)
    assert not rendezvous(with_messages(schedule))
