"""Proves what ranks of a pipeline hold: the numbers of the schedules' tables, from few microbatches as from many."""

import numpy as np
import pytest

from shardwright.cost import pipeline
from shardwright.cost.job import Candidates
from shardwright.layout.layout import Layout
from shardwright.schedule import build
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import Times, simulate
from shardwright.split.stages import step_schedule
from tests.cost.layouts import job, one


def most(schedule: str, pp: int, microbatches: int, virtual_stages: int = 1) -> np.ndarray:
    """Microbatches in flight on each rank, those of a stage counting as its share of a rank."""
    candidates = one(pp=pp, pp_schedule=schedule, virtual_stages=virtual_stages)
    at = pipeline.moments(job(), candidates, microbatches)
    return at.in_flight.sum(2).max(1) / at.in_flight.shape[2]


def test_1f1b_holds_a_microbatch_for_every_rank_from_here_on():
    assert most("1f1b", 4, 16).tolist() == [4, 3, 2, 1]
    assert most("1f1b", 4, 2).tolist() == [2, 2, 2, 1]


def test_afab_holds_all():
    assert most("afab", 4, 1000).tolist() == [1000] * 4


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 2), (8, 3), (4, 8)])
def test_interleaving_holds_more_on_the_first_rank_by_the_published_factor(pp: int, virtual_stages: int):
    share = 1 / virtual_stages
    # p (1 + (p - 1) / (p v)) of Korthikanti et al., section 4.2.3
    assert most("interleaved-1f1b", pp, 8 * pp, virtual_stages)[0] == pytest.approx(pp + (pp - 1) * share)


def test_zero_bubble_schedules_hold_what_their_paper_says():
    assert most("zb-h1", 4, 16).tolist() == [4, 3, 2, 1]
    assert most("zb-h2", 4, 16).tolist() == [7, 5, 3, 1]
    assert set(most("zb-v", 4, 16)) == {4}
    assert set(most("dualpipe", 4, 16) * 2) == {5}


def test_a_rank_has_the_stages_of_its_way():
    def stages_by_rank(**layout: int | str) -> list[list[int]]:
        return pipeline.stages(job("llama-3.1-70b"), one(**layout)).of_rank.tolist()

    assert stages_by_rank(pp=4, pp_schedule="zb-v") == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert stages_by_rank(pp=4, pp_schedule="dualpipe") == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert stages_by_rank(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=3) == [[0, 2, 4], [1, 3, 5]]
    assert stages_by_rank() == [[0]]


def test_layers_with_experts_are_told_from_those_without():
    stages = pipeline.stages(job("deepseek-v3"), one(pp=2, dp_shard=8, zero=1, ep=8))
    plain, mixtures = stages.layers_by_kind.values()
    assert plain.tolist() == [3, 0]
    assert mixtures.sum() == 58


def as_set(candidates: Candidates, microbatches: int) -> list[set[tuple[int, ...]]]:
    at = pipeline.moments(job(), candidates, microbatches)
    columns = [at.in_flight, at.waiting, at.accumulating, at.reduced, at.kind[..., None]]
    return [set(map(tuple, rank)) for rank in np.concatenate(columns, axis=2).tolist()]


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
@pytest.mark.parametrize("schedule", [name for name in names() if not find(name).searched])
def test_a_few_microbatches_fill_ranks_exactly_as_many_do(schedule: str, pp: int):
    for virtual_stages in (2, 3) if schedule == "interleaved-1f1b" else (1,):
        if build.problems(schedule, pp, 4 * pp, virtual_stages):
            continue
        candidates = one(pp=pp, pp_schedule=schedule, virtual_stages=virtual_stages)
        for m in [*range(4 * pp, 7 * pp), pp * pp + 1, 96, 97]:
            few = pipeline.representative(schedule, pp, m)
            assert schedule == "afab" or few <= max(8 * pp, m)
            if not build.problems(schedule, pp, m, virtual_stages):
                assert as_set(candidates, few) == as_set(candidates, m), (m, few)


def test_gradients_of_a_stage_accumulate_from_its_first_backward_pass_to_its_last():
    """1f1b on two ranks with three micro-batches, rank 0: F F B F B B. When its first B begins there are none; when it
    ends they are in the place of what the micro-batch held."""
    actions, begin, end, _ = pipeline.every_moment(job(), one(pp=2), 3, 0)
    assert list(map(str, actions)) == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert begin.accumulating[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert begin.in_flight[0, :, 0].tolist() == [1, 2, 2, 2, 2, 1]
    assert (end.accumulating[0, 2, 0], end.in_flight[0, 2, 0]) == (1, 1)
    assert not begin.reduced.any()
    interleaved = one(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2)
    assert pipeline.moments(job(), interleaved, 2).accumulating.sum(2).max() == 1
    assert pipeline.moments(job(), interleaved, 8).accumulating.sum(2).max() == 2


def test_moments_are_those_no_other_moment_covers():
    candidates = one(pp=4, pp_schedule="interleaved-1f1b", virtual_stages=2)
    at = pipeline.moments(job(), candidates, 16)
    for rank in range(4):
        actions, every, *_ = pipeline.every_moment(job(), candidates, 16, rank)
        assert len(actions) == 2 * 16 * 2
        counts, those = (
            np.concatenate([each.in_flight, each.waiting, each.accumulating, each.accumulating + each.reduced], axis=2)
            for each in (at.of_rank(rank), every)
        )
        for moment, kind in zip(those[0], every.kind[0], strict=True):
            assert (counts[0][at.kind[rank] == kind] >= moment).all(1).any()


def test_every_moment_of_one_rank_alone_is_forward_then_backward():
    actions, at, *_ = pipeline.every_moment(job(), Candidates.from_layout(Layout(), 1), 2, 0)
    assert list(map(str, actions)) == ["0F0", "0B0", "0F1", "0B1"]
    assert at.in_flight[0, :, 0].tolist() == [1, 1, 1, 1]
    assert at.kind[0].tolist() == [pipeline.LOSS, pipeline.BACKWARD_LAST] * 2


def test_a_searched_schedule_is_priced_as_it_is_trained():
    of, candidates = job("llama-3.1-8b"), one(pp=4, pp_schedule="auto")
    trained = step_schedule(of.model, Layout(pp=4, pp_schedule="auto"), 16, of.seq_len)
    assert trained.ranks != build.build("auto", 4, 16).ranks, "the last stage has the head: it takes longer"
    for rank in range(4):
        assert pipeline.every_moment(of, candidates, 16, rank)[0] == list(trained.ranks[rank])
    simulation = simulate(trained, Times())
    held = pipeline.moments(of, candidates, 16)
    assert held.in_flight.sum(2).max(1).tolist() == list(simulation.peak_in_flight)
    assert held.waiting.sum(2).max(1).tolist() == list(simulation.peak_waiting)


@pytest.mark.parametrize(("pp", "v"), [(2, 2), (4, 2), (4, 3), (8, 5)])
def test_gradients_of_a_chunk_overlap_with_the_passes_of_the_chunks_that_end_later(pp: int, v: int):
    of = one(pp=pp, dp_shard=64 // pp, pp_schedule="interleaved-1f1b", virtual_stages=v)
    found = pipeline.windows(job(), of)
    assert found.weights == pytest.approx(((v - 1) * pp + 1) / v)
    assert found.gradients == pytest.approx(((v - 1) * pp + 1) / v)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "afab"])
def test_gradients_of_one_stage_overlap_with_its_last_pass_alone(schedule: str):
    found = pipeline.windows(job(), one(pp=4, dp_shard=16, pp_schedule=schedule))
    assert set(found.weights) == set(found.gradients) == {1.0}


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe", "dualpipe-v"])
def test_no_window_of_a_v_shape_is_shorter_than_a_stage_or_longer_than_the_step(schedule: str):
    layout = one(pp=4, dp_shard=16, pp_schedule=schedule)
    found = pipeline.windows(job(), layout)
    least = len(layout.shared.ways) / found.stages
    assert min(*found.weights, *found.gradients) >= least
    assert max(*found.weights, *found.gradients) <= 2 * layout.pp
