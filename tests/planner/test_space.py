"""Proves that the planner looks at every layout that the rules let pass, once, and at no other."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.layout.keys import RECOMPUTE
from shardwright.layout.layout import Layout, accumulation
from shardwright.model.presets import PRESETS
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.planner.choice import Choice, choice_at
from shardwright.planner.space import groups
from shardwright.schedule.registry import find, names
from shardwright.split.rules import problems
from shardwright.split.stages import schedule_problems
from shardwright.system.errors import LayoutError
from shardwright.system.units import divisors
from tests.marks import rest_prove

SMALL = replace(PRESETS["debug"], n_layers=5)


def job(spec: ModelSpec, size: int, global_batch: int, seq_len: int) -> Job:
    return Job(model=spec, cluster=cluster(f"h100:{size}/{size}"), global_batch=global_batch, seq_len=seq_len)


def found(job: Job) -> list[Choice]:
    try:
        return [choice_at(group, at) for group in groups(job) for at in range(len(group))]
    except LayoutError:
        return []


def one_by_one(job: Job) -> Iterator[Choice]:
    """The same by asking the rules about every combination of everything."""
    size, moe = job.cluster.size, job.model.moe
    for pp, tp, cp, dp_shard in product(divisors(size), repeat=4):
        if size % (pp * tp * cp * dp_shard):
            continue
        degrees = dict(pp=pp, tp=tp, cp=cp, dp_shard=dp_shard, dp_replicate=size // (pp * tp * cp * dp_shard))
        for pipeline, zero, method, ep, recompute in product(
            pipelines(pp),
            range(4) if dp_shard * cp > 1 else [0],
            ("zigzag", "ulysses") if cp > 1 else ["zigzag"],
            divisors(moe.n_experts) if moe else [1],
            RECOMPUTE,
        ):
            for gather in ("step", "microbatch") if pp > 1 and zero == 3 else ("step",):
                choices = dict(zero=zero, cp_method=method, ep=ep, recompute=recompute, zero_pp_gather=gather)
                yield from with_batch(job, degrees | pipeline | choices)


def pipelines(pp: int) -> Iterator[dict[str, Any]]:
    if pp == 1:
        yield {}
        return
    for name in names():
        if find(name).searched:
            continue
        for virtual_stages in (2, 3, 4, 6, 8) if name == "interleaved-1f1b" else (1,):
            yield {"pp_schedule": name, "virtual_stages": virtual_stages}


def with_batch(job: Job, values: dict[str, Any]) -> Iterator[Choice]:
    try:
        layout = Layout(sequence_parallel=values["tp"] > 1, **values)
    except LayoutError:
        return
    if problems(job.model, layout, job.seq_len):
        return
    for micro_batch in divisors(job.global_batch):
        try:
            microbatches = accumulation(job.global_batch, micro_batch, layout.data_ranks)
        except LayoutError:
            continue
        if not schedule_problems(layout, microbatches):
            yield Choice(layout, micro_batch)
            if micro_batch * job.seq_len / layout.cp > 4096:
                yield Choice(replace(layout, loss_chunk_tokens=4096), micro_batch)


def test_two_ranks_with_one_sequence_share_a_model_in_these_ways():
    words = {str(choice) for choice in found(job(replace(SMALL, n_layers=2), 2, 1, 128))}
    cut = [f"cp=2,{method}zero={zero}" for method in ("", "cp_method=ulysses,") for zero in range(4)]
    pipes = [f"pp=2{schedule}" for schedule in ("", *(f",pp_schedule={name}" for name in ("afab", "zb-h1", "zb-h2")))]
    plain = {f"{each},micro_batch=1" for each in ("tp=2", *cut, *pipes)}
    again = {each.replace(",micro_batch", f",recompute={how},micro_batch") for each in plain for how in RECOMPUTE[1:]}
    assert words == plain | again


@pytest.mark.parametrize(
    ("name", "size", "global_batch", "seq_len"),
    [
        ("debug", 8, 12, 128),
        ("debug-moe", 8, 8, 96),
        ("debug", 6, 12, 96),
        ("debug-moe", 4, 6, 20),
        ("debug", 4, 3, 50),
        ("debug", 4, 4, 4096),
    ],
)
def test_the_space_is_what_the_rules_let_pass_one_by_one(name: str, size: int, global_batch: int, seq_len: int):
    asked = job(replace(PRESETS[name], n_layers=6), size, global_batch, seq_len)
    those = found(asked)
    assert len(set(those)) == len(those), "a layout stands there twice"
    assert set(those) == set(one_by_one(asked))


LATENT = LatentAttentionSpec(kv_rank=8, nope_dim=8, rope_dim=8, v_dim=16)
EXPERTS = MoESpec(n_experts=6, top_k=2, d_ffn=20)


@pytest.mark.prove
@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 6, 8]),
    global_batch=st.integers(1, 24),
    seq_len=st.sampled_from([1, 24, 32, 60, 96]),
    heads=st.sampled_from([(4, 2), (6, 3), (8, 1), (3, 3)]),
    d_ffn=st.sampled_from([24, 30, 64]),
    n_layers=st.integers(1, 9),
    moe=st.sampled_from([None, EXPERTS, replace(EXPERTS, capacity_factor=1.5), replace(EXPERTS, n_experts=8)]),
    latent=st.booleans(),
)
def test_the_space_of_any_model_is_what_the_rules_let_pass(
    size: int,
    global_batch: int,
    seq_len: int,
    heads: tuple[int, int],
    d_ffn: int,
    n_layers: int,
    moe: MoESpec | None,
    latent: bool,
):
    spec = replace(
        SMALL, n_heads=heads[0], n_kv_heads=heads[0] if latent else heads[1], d_ffn=d_ffn, n_layers=n_layers, moe=moe
    )
    asked = job(replace(spec, latent_attention=LATENT) if latent else spec, size, global_batch, seq_len)
    those = found(asked)
    assert len(set(those)) == len(those)
    assert set(those) == set(one_by_one(asked))


@pytest.mark.parametrize(
    ("spec", "size", "global_batch", "near"),
    rest_prove(
        [
            # 7 ranks cut neither heads nor a sequence of 8192 nor 5 layers: all are data ranks.
            (SMALL, 7, 10, "7 or 14"),
            (SMALL, 7, 3, "7"),
            # 13 x 4: 4 may go to tp, cp and pp, the 13 have to be data ranks.
            (SMALL, 52, 30, "26 or 39"),
        ],
        (SMALL, 7, 10, "7 or 14"),
    ),
)
def test_a_batch_that_no_layout_divides_is_refused_with_the_nearest(spec, size: int, global_batch: int, near: str):
    # Nodes of one, so that any number of them is whole.
    asked = replace(job(spec, 1, global_batch, 128), cluster=cluster(f"h100:{size}/1"))
    with pytest.raises(LayoutError, match=f"nearest: {near}$"):
        list(groups(asked))
    for batch in map(int, near.split(" or ")):
        assert list(groups(replace(asked, global_batch=batch))), batch
    low, high = (int(near.split(" or ")[0]), int(near.split(" or ")[-1]))
    between = range(low + 1, high) if low < global_batch else range(1, high)
    for batch in between:
        with pytest.raises(LayoutError):
            list(groups(replace(asked, global_batch=batch)))


def test_no_loss_of_pairs_is_searched_in_chunks():
    whole = job(SMALL, 2, 4, 16384)
    chunked = {choice for choice in found(whole) if choice.layout.loss_chunk_tokens}
    assert chunked
    assert set(found(replace(whole, pairs=True))) == set(found(whole)) - chunked
