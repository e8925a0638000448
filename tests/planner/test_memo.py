"""Proves that what a search keeps in tables and leaves out changes no answer: times and memory of all layouts that fit
are those that each group of layouts has when it is computed alone, and none that fits is missing."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwright.cost import memo, memory, pipeline, reserved, step
from shardwright.cost.job import Candidates, Floats, Ints, Job
from shardwright.cost.reserved import PairedBytes, reserved_bytes
from shardwright.cost.stack import STACKS
from shardwright.cost.step import least_time, step_time
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.model.sections import LatentAttentionSpec
from shardwright.planner import pool as layout_pool
from shardwright.planner.batches import near_batches, tried
from shardwright.planner.pool import memo_of, rounded
from shardwright.planner.search import limit_bytes, search, survey
from shardwright.planner.space import groups
from shardwright.system.units import GiB
from tests.marks import rest_prove
from tests.planner.test_search import DEEP, MIXED, job

LATENT = replace(
    PRESETS["debug-moe"],
    n_kv_heads=4,
    head_dim=16,
    latent_attention=LatentAttentionSpec(kv_rank=16, q_rank=24, nope_dim=16, rope_dim=8, v_dim=16),
)
JOBS = {
    "mixture": job(MIXED, "h100:4/2", 8, 256, 0.12),
    "dense": job(DEEP, "h100:8/2", 16, 256, 0.19),
    "latent": job(LATENT, "h100:4/2", 8, 16384, 0.25),
    "fp32": replace(job(MIXED, "h100:4/2", 8, 256, 0.2), precision="fp32"),
    "casts once a step": replace(job(DEEP, "h100:4/2", 8, 256, 0.5), precision="fp8", stack=STACKS["megatron-core"]),
}


WIDE = job(replace(PRESETS["mixtral-8x7b"], n_layers=2, max_seq_len=4096), "h100:4/2", 4, 4096, 40)
"""With matmuls that take longer than their launches."""


def differences(asked: Job) -> float:
    """The largest relative error of a bound or of memory in a survey's pool, infinite if not all that fit are there."""
    limit = limit_bytes(asked, 0.1)
    pool = survey(asked, limit).pool
    fits = sum(int((memory.estimate_memory(asked, group).reserved_bytes <= limit).sum()) for group in groups(asked))
    assert 0 < fits < sum(map(len, groups(asked)))
    if len(pool) != fits:
        return np.inf
    alone = [
        np.stack(
            [step_time(asked, group, simulated=False).total_s, memory.estimate_memory(asked, group).reserved_bytes]
        )
        for group in pool.groups
    ]
    return float(np.abs(np.stack([pool.bound_s, pool.peak_bytes]) / np.concatenate(alone, axis=1) - 1).max())


def test_what_is_kept_of_a_layout_is_not_used_for_other_compression():
    layout = Layout(pp=2, dp_shard=2, ep=2, zero=1)
    others = {"compress_dispatch": "fp8", "compress_pipeline": "int8", "compress_gradients": "bf16"}
    candidates = [
        Candidates.from_layout(each, 1) for each in (layout, *(layout.changed(**{k: v}) for k, v in others.items()))
    ]
    kept = memo.Memo.from_candidates(candidates[0])
    times = [step_time(WIDE, each, memo=kept).total_s.item() for each in candidates]
    assert times == [step_time(WIDE, each).total_s.item() for each in candidates]
    assert all(time < times[0] for time in times[1:])


@pytest.mark.parametrize("name", rest_prove(list(JOBS), "mixture"))
def test_a_survey_finds_what_each_group_alone_costs(name: str):
    assert differences(JOBS[name]) < 1e-12


def test_a_memo_that_forgets_its_tables_finds_the_same(monkeypatch: pytest.MonkeyPatch):
    forgotten: list[Hashable] = []

    class Tables(dict):
        def __delitem__(self, of: Hashable) -> None:
            forgotten.append(of)
            super().__delitem__(of)

    begin = memo.Memo.__init__

    def begin_counted(self: memo.Memo, values: Mapping[str, Sequence[int]]) -> None:
        begin(self, values)
        self._tables = Tables()

    monkeypatch.setattr(memo.Memo, "__init__", begin_counted)
    monkeypatch.setattr(memo, "MOST_BYTES", 10_000)
    assert differences(JOBS["mixture"]) < 1e-12
    assert len(forgotten) > 10


# What is left out follows from the others: all ranks of the cluster are used, and sequence_parallel goes with tp.
NEEDED = {
    "OF_A_PASS": (memo, ("tp", "cp", "ep", "micro_batch", "recompute")),
    "OF_STATES": (reserved, ("ep", "zero")),
    "OF_A_MICROBATCH": (reserved, ("ep", "zero", "micro_batch", "recompute")),
}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("columns", "left_out"), [(name, each) for name, (_, those) in NEEDED.items() for each in those]
)
def test_a_table_without_one_of_its_columns_has_other_answers(
    columns: str, left_out: str, monkeypatch: pytest.MonkeyPatch
):
    names = tuple(name for name in getattr(memo, columns) if name != left_out)
    monkeypatch.setattr(NEEDED[columns][0], columns, names)
    assert differences(WIDE) > 1e-6


def test_bytes_above_what_is_asked_for_are_a_lower_bound_above_it():
    asked = JOBS["mixture"]
    most = 0.11 * GiB
    for group in groups(asked):
        whole, found = reserved_bytes(asked, group), reserved_bytes(asked, group, most)
        below = whole <= most
        assert found[below] == pytest.approx(whole[below], rel=1e-12)
        assert (found[~below] > most).all()
        assert (found <= whole * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", ["mixture", "dense"])
def test_a_search_computes_the_passes_of_a_layer_once_to_bound_layouts_and_once_to_simulate_them(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    rows: list[Hashable] = []
    compute = step.layer

    def counted(asked: Job, candidates: Candidates, **of: Any) -> Any:
        columns = [getattr(candidates, each) for each in memo.OF_A_PASS]
        key = of["name"], candidates.kind.splits_backward, memo.others(candidates, memo.NOT_OF_A_PASS)
        rows.extend((*key, *values) for values in zip(*(each.tolist() for each in columns), strict=True))
        return compute(asked, candidates, **of)

    monkeypatch.setattr(step, "layer", counted)
    found = survey(JOBS[name], limit_bytes(JOBS[name], 0.1))
    for size in (1, 10, 100):
        found.pool.fastest(size)
    assert found.pool.n_simulated > 20
    assert max(Counter(rows).values()) <= 2


def test_most_layouts_that_do_not_fit_cost_no_more_than_a_bound(monkeypatch: pytest.MonkeyPatch):
    """With many sequences most micro-batches are too large for the memory; ranks with equal layers need no price."""
    asked = replace(JOBS["dense"], global_batch=1536)
    priced = 0
    compute = PairedBytes._peaks

    def counted(self: PairedBytes, ranks: Ints, states: Ints, passes: Ints) -> Floats:
        nonlocal priced
        priced += len(states) * len(ranks)
        return compute(self, ranks, states, passes)

    monkeypatch.setattr(PairedBytes, "_peaks", counted)
    found = survey(asked, limit_bytes(asked, 0.1))
    assert len(found.pool) < found.n_layouts / 5
    assert priced < 0.4 * found.n_layouts, "layouts x ranks"


def test_of_the_ranks_of_1f1b_with_equal_layers_only_the_first_can_need_the_most_memory():
    asked = job(replace(PRESETS["debug"], n_layers=32), "h100:16", 64, 256)
    group = next(each for each in groups(asked) if (each.pp, each.shared.pp_schedule) == (16, "1f1b"))
    n_layers = [len(each) for each in pipeline.stages(asked, group).layers]
    leading = pipeline.leading_ranks(asked, group, 64).tolist()
    assert leading == [0, *(at for at in range(1, 16) if at == 15 or n_layers[at] not in n_layers[1:at])]


def test_times_that_differ_in_the_last_bits_are_equal_times():
    seconds = np.array([0.1 + 0.2, 0.3, 1e-9, 7.0, 0.0])
    assert rounded(seconds)[0] == rounded(seconds)[1]
    assert rounded(seconds) == pytest.approx(seconds, rel=1e-12)
    more = seconds[:, None] * (1 + np.linspace(0, 1e-9, 1000))
    assert (np.diff(rounded(more), axis=1) >= 0).all()


@pytest.mark.parametrize("name", rest_prove(list(JOBS), "mixture"))
def test_the_time_that_orders_layouts_is_a_lower_bound(name: str):
    asked = JOBS[name]
    for group in groups(asked):
        low, bound = least_time(asked, group, memo_of(asked)), step_time(asked, group, simulated=False).total_s
        assert (low <= bound).all()


def test_a_search_for_the_fastest_computes_no_bounds_of_layouts_known_to_be_slower(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout_pool, "BLOCK", 16)
    asked = JOBS["mixture"]
    group = next(each for each in groups(asked) if each.pp == 1)
    bound_s = step_time(asked, group, simulated=False).total_s
    found = layout_pool.LayoutPool(asked, [group], 0.999 * bound_s, np.zeros(len(group)))
    assert len(group) > 4 * layout_pool.BOUNDED
    assert found.fastest(1) == [int(rounded(bound_s).argmin())]
    assert found.n_bounded < len(group) / 2
    assert found.bound_s == pytest.approx(bound_s, rel=1e-9)


def test_the_search_for_another_batch_prices_few_layouts_and_finds_the_same(monkeypatch: pytest.MonkeyPatch):
    asked = replace(JOBS["mixture"], global_batch=7)
    plan, priced = search(asked), 0
    compute = PairedBytes.reserved

    def counted(self: PairedBytes, most: float, states: Ints, passes: Ints) -> Floats:
        nonlocal priced
        priced += len(states)
        return compute(self, most, states, passes)

    monkeypatch.setattr(PairedBytes, "reserved", counted)
    near = near_batches(plan, 0.1)
    bounded, priced = priced, 0
    whole = {batch: search(replace(asked, global_batch=batch), prefer="fastest") for batch in tried(asked)}
    assert near
    for each in near:
        other = whole[each.global_batch].recommended
        assert other is not None
        assert each.plan.best[0].step_s == pytest.approx(other.step_s, rel=1e-9)
    assert 0 < bounded < priced
