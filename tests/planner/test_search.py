"""Proves that a search finds what evaluating everything would find, that what it says of a layout is true of it, and
that it is fast enough to be used."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.cost import memory
from shardwright.cost.hardware import cluster
from shardwright.cost.host import node_host_bytes
from shardwright.cost.job import Job
from shardwright.cost.reserved import reserved_bytes
from shardwright.cost.step import estimate, step_time
from shardwright.model.presets import PRESETS, resolve
from shardwright.model.spec import ModelSpec
from shardwright.planner import alternatives
from shardwright.planner.alternatives import Alternative, reasons, runners_up, savings, well_known
from shardwright.planner.choice import Choice, PricedLayout, choice_at
from shardwright.planner.distinct import differing
from shardwright.planner.nearest import OFFLOADED, remedies
from shardwright.planner.recommendation import ties, with_headroom
from shardwright.planner.run_file import run_file
from shardwright.planner.search import Plan, fits, limit_bytes, search, survey
from shardwright.planner.space import FixedChoices, fixed_values, groups
from shardwright.planner.words import also_fast, left_out
from shardwright.system.errors import InputError, LayoutError
from shardwright.system.units import GiB
from tests.function_calls import calls
from tests.marks import prove, rest_prove

DEEP = replace(PRESETS["debug"], n_layers=6, d_model=512, n_heads=8, head_dim=64, d_ffn=1536)
MIXED = replace(PRESETS["debug-moe"], n_layers=6, d_model=512)


def job(spec: ModelSpec, hardware: str, global_batch: int, seq_len: int, memory_gib: float | None = None) -> Job:
    """On accelerators with as little memory as a test needs."""
    found = cluster(hardware)
    if memory_gib is not None:
        chip = replace(found.accelerator, memory_bytes=memory_gib * GiB)
        found = replace(found, accelerator=chip)
    return Job(model=spec, cluster=found, global_batch=global_batch, seq_len=seq_len)


def brute_force(asked: Job, limit: float) -> list[tuple[float, Choice]]:
    """Every layout that fits with its simulated time, the fastest first."""
    found = []
    for group in groups(asked):
        kept = group.take(memory.estimate_memory(asked, group).reserved_bytes <= limit)
        if len(kept):
            times = step_time(asked, kept, simulated=True).total_s
            found += [(float(times[at]), choice_at(kept, at)) for at in range(len(kept))]
    return sorted(found, key=lambda each: each[0])


def test_the_best_layout_of_one_accelerator_is_the_one_with_the_best_micro_batch():
    found = search(job(DEEP, "h100:1/1", 8, 256))
    assert [each.choice.layout.world_size for each in found.best] == [1] * 10, "of 4 micro-batches x 3 recomputations"
    assert {each.choice.micro_batch for each in found.best} == {1, 2, 4, 8}
    assert [each.step_s for each in found.best] == sorted(each.step_s for each in found.best)


def whole(choice: Choice) -> Choice:
    """The layout of the space from which one with recomputation in fewer layers follows."""
    return replace(choice, layout=choice.layout.changed(recompute_layers=None))


def check_fewest_layers(found: Plan, less: PricedLayout, whole_s: float) -> None:
    """It fits and is faster than with recomputation in all layers, and with a layer less it would not fit."""
    layers = less.layout.recompute_layers
    assert layers is not None
    assert less.step_s < 0.99 * whole_s
    assert less.peak_bytes <= found.limit_bytes
    fewer = {"recompute_layers": layers - 1} if layers > 1 else {"recompute": "none", "recompute_layers": None}
    assert estimate(found.job, less.layout.changed(**fewer), less.micro_batch).peak_bytes > found.limit_bytes


def check_listed(found: Plan, everything: list[tuple[float, Choice]], top: int) -> None:
    """None that is faster than the last one listed is missing: it is listed, or equal to a listed one that is."""
    times = {choice: time for time, choice in everything}
    listed = [whole(each.choice) for each in found.best]
    for each, choice in zip(found.best, listed, strict=True):
        if each.choice == choice:
            assert each.step_s == pytest.approx(times[choice], rel=1e-9)
        else:
            check_fewest_layers(found, each, times[choice])
    for each, others in zip(found.best, found.equals, strict=True):
        assert all(times[other] == pytest.approx(each.step_s, rel=3e-6) for other in others)
    covered = {*listed, *(other for others in found.equals for other in others)}
    assert len(covered) == len(listed) + sum(map(len, found.equals))
    last = found.best[-1].step_s if len(listed) == top else np.inf
    assert not {choice for time, choice in everything if time < last * (1 - 3e-6)} - covered
    for at, each in enumerate(found.best):
        for other in found.best[:at]:
            same = abs(each.step_s / other.step_s - 1) < 1e-9 and each.peak_bytes == other.peak_bytes
            assert not (same and len(differing(each.choice, other.choice)) == 1), (each.choice, other.choice)


def check_against_brute_force(asked: Job, top: int) -> None:
    limit = limit_bytes(asked, 0.1)
    everything = brute_force(asked, limit)
    found = search(asked, top=top)
    assert len(found.pool) == len(everything)
    check_listed(found, everything, top)
    assert all(each.peak_bytes <= limit for each in found.best)
    if not everything:
        return
    # The best of each part as well, which is what is shown beside it.
    assert found.recommended is not None
    best = found.recommended.choice.layout
    for other in runners_up(found):
        side = other.name.removeprefix("another ")
        if side in ("pp_schedule", "micro_batch"):
            continue
        times = [time for time, choice in everything if getattr(choice.layout, side) != getattr(best, side)]
        if times:
            assert other.priced is not None
            assert other.priced.step_s == pytest.approx(times[0], rel=1e-9)
        else:
            assert other.priced is None


@pytest.mark.parametrize(
    ("spec", "hardware", "global_batch", "memory_gib"),
    rest_prove(
        [
            (DEEP, "h100:4/4", 16, None),
            (MIXED, "h100:4/2", 8, None),
            (MIXED, "h100:2/2", 8, None),
            (DEEP, "h100:6/2", 12, 0.5),
            (DEEP, "h100:4/4", 16, 0.01),
        ],
        (MIXED, "h100:2/2", 8, None),
        (DEEP, "h100:4/4", 16, 0.01),
    ),
)
def test_a_search_finds_what_brute_force_finds(
    spec: ModelSpec, hardware: str, global_batch: int, memory_gib: float | None
):
    check_against_brute_force(job(spec, hardware, global_batch, 256, memory_gib), top=7)


@prove
@settings(max_examples=12, deadline=None)
@given(
    hardware=st.sampled_from(["h100:2/2", "h100:4/2", "a100:3/1", "h100:4/4", "b200:6/3"]),
    global_batch=st.sampled_from([6, 8, 12]),
    seq_len=st.sampled_from([64, 96, 256]),
    memory_gib=st.sampled_from([0.3, 0.5, 80.0]),
    n_layers=st.integers(2, 7),
    mixture=st.booleans(),
    top=st.integers(1, 12),
)
@example(  # two groups of equal layouts that a third layout joins
    hardware="b200:6/3", global_batch=12, seq_len=96, memory_gib=0.3, n_layers=6, mixture=False, top=10
)
def test_a_search_of_any_job_finds_what_brute_force_finds(
    hardware: str, global_batch: int, seq_len: int, memory_gib: float, n_layers: int, mixture: bool, top: int
):
    spec = replace(MIXED if mixture else DEEP, n_layers=n_layers)
    try:
        check_against_brute_force(job(spec, hardware, global_batch, seq_len, memory_gib), top)
    except LayoutError:
        assert global_batch % 3  # the batch that three ranks of nothing but data could not share


@pytest.mark.parametrize(
    ("spec", "hardware", "global_batch"),
    rest_prove(
        [(DEEP, "h100:8", 16), (MIXED, "h100:8", 16), (DEEP, "h100:8/2", 16), (MIXED, "h100:4/2", 16)],
        (MIXED, "h100:4/2", 16),
    ),
)
def test_no_layout_is_faster_than_its_bound_and_none_needs_other_memory_than_is_said(
    spec: ModelSpec, hardware: str, global_batch: int
):
    asked = job(spec, hardware, global_batch, 256)
    for group in groups(asked):
        few = group.take(slice(None, None, 7))
        bound, exact = (step_time(asked, few, simulated=on).total_s for on in (False, True))
        assert np.all(bound <= exact * (1 + 1e-9)), group.shared
        assert reserved_bytes(asked, few) == pytest.approx(memory.estimate_memory(asked, few).reserved_bytes, rel=1e-12)


@pytest.mark.parametrize("fixed", [{"recompute": "none", "micro_batch": 4}, {"micro_batch": 2}, {"pp": 2, "tp": 2}, {}])
def test_where_nothing_fits_the_nearest_of_fixed_choices_is_the_least_of_these(fixed: dict[str, Any]):
    asked, chosen = job(DEEP, "h100:4/4", 16, 8192), FixedChoices(fixed)
    needed = min(
        memory.estimate_memory(asked, kept).reserved_bytes.min()
        for group in groups(asked)
        if len(kept := group.take(chosen(group)))
    )
    found = survey(asked, needed / 2, chosen)
    assert found.nearest is not None
    assert found.nearest_bytes == pytest.approx(needed, rel=1e-9)


@pytest.mark.prove
def test_where_nothing_fits_the_nearest_is_the_least_of_all_and_every_remedy_works():
    roomy = job(DEEP, "h100:4/4", 8, 32768)
    needed = min(memory.estimate_memory(roomy, group).reserved_bytes.min() for group in groups(roomy))
    # Memory for the leanest layout, but for the margin.
    asked = job(DEEP, "h100:4/4", 8, 32768, memory_gib=1.01 * needed / GiB)
    found = search(asked)
    assert found.best == []
    assert found.survey.nearest_bytes == pytest.approx(needed)
    nearest = found.survey.nearest
    assert nearest is not None
    assert memory.estimate_memory(asked, nearest.candidates).reserved_bytes[0] == pytest.approx(needed)
    named = {remedy.what: remedy.job for remedy in remedies(asked, 0.1)}
    no_margin = next(what for what in named if "--memory-margin 0" in what)
    assert search(named.pop(no_margin), memory_margin=0.0).best
    assert any("accelerators" in what for what in named)
    assert any("--seq-len 16384 with --global-batch 16" in what for what in named)
    for what, changed in named.items():
        offloaded = next(
            (FixedChoices(values) for words, values in OFFLOADED.items() if what.startswith(f"{words}:")), None
        )
        assert search(changed, fixed=offloaded).best, what


@prove
def test_smaller_optimizer_states_are_offered_where_they_make_a_layout_fit():
    asked = job(resolve("llama-3.1-8b"), "h100:2/2", 64, 16384)
    assert not search(asked).best
    slow = replace(asked, optimizer_options=(("beta2", 0.999),))
    expected = {
        "optimizer states in bf16: optimizer.state_dtype='bf16'": asked,
        "optimizer states of 8 bits: optimizer.name='adamw-8bit'": slow,  # which cannot be stored in bf16
    }
    for what, with_states in expected.items():
        smaller = [each for each in remedies(with_states, 0.1) if each.what.startswith("optimizer states")]
        (found,) = (each for each in smaller if "--fix" not in each.what)
        assert found.what == what
        assert search(found.job).best


@pytest.mark.prove
def test_a_remedy_is_the_least_of_its_kind():
    asked = job(resolve("llama-3.1-70b"), "h100:8", 64, 8192)
    assert search(asked).best == []
    more = next(remedy.job.cluster.size for remedy in remedies(asked, 0.1) if "accelerators" in remedy.what)
    smaller = [size for size in (16, 24, 32, 64, 128) if size < more]
    limit = limit_bytes(asked, 0.1)
    for size in smaller:
        changed = replace(asked, cluster=replace(asked.cluster, size=size))
        with suppress(LayoutError):  # three times as many cannot share the batch
            assert not fits(changed, limit), size


def test_where_logits_are_most_of_the_memory_the_loss_is_chunked_and_the_run_file_says_so():
    asked = Job(model=PRESETS["llama-3.2-1b"], cluster=cluster("h100:1/1"), seq_len=57344, global_batch=8)
    best = search(asked).best[0]
    assert best.layout.loss_chunk_tokens == 4096
    whole = search(asked, fixed=fixed_values({"loss_chunk_tokens": 0})).best
    assert not whole or whole[0].step_s > 1.1 * best.step_s
    assert "loss_chunk_tokens = 4096" in run_file(asked, "llama-3.2-1b", best.choice, "plan")


@prove
def test_no_layout_of_a_search_needs_more_of_the_host_than_there_is():
    """Fewer layers that recompute leave more activations, which are on the host, so both limits bound them."""
    roomy = job(DEEP, "h100:4/4", 16, 4096)
    fixed = FixedChoices({"offload_activations": "cpu", "recompute": "full"})
    most = max(each.host_bytes_per_node for each in search(roomy, fixed=fixed).best)
    asked = replace(roomy, cluster=replace(roomy.cluster, host_memory_part=most / 2 / 4))
    counts = []
    for group in groups(asked, fixed.offload, fixed):
        needed = node_host_bytes(asked, group)
        assert needed[0] == node_host_bytes(asked, choice_at(group, 0).candidates)[0]
        counts.append(((needed <= most / 2).sum(), len(group)))
    within, everything = np.sum(counts, axis=0)
    found = search(asked, fixed=fixed)
    assert 0 < len(found.pool) == within < everything
    assert all(each.host_bytes_per_node <= most / 2 for each in found.best)
    free = search(asked, fixed=FixedChoices({"offload_activations": "cpu"})).best
    assert all(each.host_bytes_per_node <= most / 2 for each in free)


def test_a_margin_that_is_no_share_is_refused():
    for margin in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="--memory-margin"):
            search(job(DEEP, "h100:1/1", 1, 64), memory_margin=margin)


def test_what_another_layout_loses_is_what_it_takes_longer():
    found = search(job(DEEP, "h100:4/4", 16, 256))
    best = found.recommended
    assert best is not None
    for other in [*runners_up(found), *well_known(found)]:
        if other.priced is None:
            assert other.nearest is not None
            assert other.nearest[1] > found.limit_bytes
            continue
        more = other.priced.step_s - best.step_s
        assert other.slower(best) == pytest.approx(more / best.step_s)
        assert more >= -1e-12 or ties(best, other.priced)
        every = dict(reasons(best, other.priced, most=99))
        back = dict(savings(best, other.priced))
        assert sum(every.values()) >= 0.5 * more - 1e-9
        assert all(-seconds > 0.2 * abs(more) for seconds in back.values())
        rest = set(best.parts_s) | set(other.priced.parts_s)
        n_untold = len(rest - set(every) - set(back))
        assert abs(sum(every.values()) + sum(back.values()) - more) <= 0.2 * n_untold * abs(more) + 1e-8


@pytest.mark.prove
def test_of_layouts_that_cost_the_same_the_simplest_is_listed_and_the_others_are_named():
    found = search(job(resolve("llama-3.1-70b"), "h100:64", 1024, 8192))
    assert len(found.best) == 10
    alike = [(each.choice, others) for each, others in zip(found.best, found.equals, strict=True) if others]
    assert len(alike) > 5
    for choice, others in alike:
        assert (choice.layout.zero, {other.layout.zero for other in others}) == (1, {3}), choice
    assert "also with zero=3" in left_out([*enumerate(found.best, 1)], found.equals)
    first, others = next((each, others) for each, others in zip(found.best, found.equals, strict=True) if others)
    same = Alternative("another zero", PricedLayout.from_choice(found.job, others[0]), None)
    assert same.as_fast(first)
    assert also_fast(first, [same]) == "zero=3"


@prove
def test_how_many_layouts_are_listed_does_not_change_the_recommended_one():
    """The fastest recomputes in one layer of a stage."""
    asked = job(resolve("llama-3.1-8b"), "h100:8", 128, 10240)
    one, ten = search(asked, top=1), search(asked, top=10)
    assert len(one.best) == 1
    assert ten.best[0].choice.layout.recompute_layers == 1
    assert one.best[0].choice == ten.best[0].choice
    assert one.recommended is not None
    assert ten.recommended is not None
    assert one.recommended.choice == ten.recommended.choice


@pytest.mark.prove
def test_for_a_length_that_nothing_cuts_a_near_one_is_tried():
    asked = job(resolve("llama-3.1-8b"), "h100:64", 64, 163841)
    assert search(asked).best == []
    near = next(remedy for remedy in remedies(asked, 0.1) if remedy.what.startswith("--seq-len"))
    assert near.job.seq_len == 163840
    assert "into as many as 128 equal parts, 163841 into 1" in near.what
    assert search(near.job, top=1).best


@pytest.mark.prove
def test_well_known_layouts_are_of_their_kind():
    plan = search(job(DEEP, "h100:16", 32, 256), prefer="simplest")
    assert plan.recommended is not None
    taken = plan.recommended.choice.layout
    assert taken.zero == 1
    assert all(taken.degree(axis) == 1 for axis in ("tp", "cp", "pp", "dp_replicate"))
    found = {each.name.split(":")[0]: each.choice.layout for each in well_known(plan)}
    assert "zero 1 alone" not in found, "it is the recommended one"
    assert "tp across nodes" not in found, "8 heads are not cut into more than 8 parts"
    assert (found["zero 3 alone"].zero, found["zero 3 alone"].dp_shard) == (3, 16)
    assert all(found["zero 0 alone"].degree(axis) == 1 for axis in ("tp", "cp", "pp"))
    assert "no pipeline" not in found, "the recommended one has none"
    assert found["tp = a node, then pp with (interleaved) 1f1b, zero 1 (Megatron-LM)"].tp == 8


def test_a_kind_that_is_looked_for_with_some_pipelines_alone_has_no_layout_with_others():
    kinds = [kind for kind in alternatives._recipes(4) if kind.pp is not None]
    assert len(kinds) == 5
    for group in groups(job(DEEP, "h100:8/4", 16, 256)):
        for kind in kinds:
            assert kind.pp == group.pp or not kind.meets(group).any(), (kind.name, group.pp)


def test_no_layout_with_some_pipeline_is_no_error_but_none_at_all_is():
    asked = job(replace(DEEP, n_kv_heads=1, n_heads=1, head_dim=512), "h100:4/4", 2, 2)
    assert survey(asked, 80 * GiB, pp=2).n_layouts > 0
    assert survey(asked, 80 * GiB, pp=1).nearest is None
    with pytest.raises(LayoutError, match="--global-batch 1: no layout"):
        survey(replace(asked, global_batch=1, seq_len=1, cluster=cluster("h100:7/7")), 80 * GiB)


LARGE = """
import json, pathlib, re, resource, sys
from shardwright.cost.hardware import cluster
from shardwright.cost.host import node_host_bytes
from shardwright.cost.job import Job
from shardwright.model.presets import resolve
from shardwright.planner.search import search
asked = Job(model=resolve("llama-3.1-405b"), cluster=cluster("h100:16384"), seq_len=8192, global_batch=2048)
found = search(asked)
# A new program begins with the peak of the process that started it in ru_maxrss; VmHWM is its own.
status = pathlib.Path("/proc/self/status")
if status.exists():
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([found.survey.n_layouts, peak, len(found.best)]))
"""


@prove
def test_405b_on_16384_is_searched_in_full_in_a_gib():
    n_layouts, peak_bytes, n_best = json.loads(subprocess.check_output([sys.executable, "-c", LARGE], text=True))
    assert n_layouts > 1_000_000
    assert n_best == 10
    assert peak_bytes < GiB


@prove
def test_the_16_million_layouts_of_deepseek_v3_on_256_are_searched_with_few_calls():
    """10.4 million in 10 CPU-seconds; 22.7 million in 40 while numbers of micro-batches were sorted for each group."""
    asked = Job(model=resolve("deepseek-v3"), cluster=cluster("h100:256"), seq_len=4096, global_batch=1920)
    found: list[Plan] = []
    assert calls(lambda: found.append(search(asked))) < 13e6
    assert found[0].survey.n_layouts > 15e6


def test_a_survey_of_a_kind_sees_that_kind_alone():
    asked = job(DEEP, "h100:4/4", 16, 256)
    all_of_them, some = survey(asked, 80 * GiB), survey(asked, 80 * GiB, lambda of: of.tp == 2)
    assert 0 < some.n_layouts < all_of_them.n_layouts
    assert {some.pool.choice(at).layout.tp for at in range(len(some.pool))} == {2}
    assert survey(asked, 80 * GiB, lambda of: of.tp == 3).nearest is None


@prove
def test_sequences_and_accelerators_of_a_real_model_have_a_plan():
    found = search(job(resolve("llama-3.1-8b"), "h100:8", 128, 8192), top=3)
    assert len(found.best) == 3
    assert found.best[0].choice.layout.world_size == 8
    assert sum(found.best[0].parts_s.values()) == pytest.approx(found.best[0].step_s)


def test_where_a_part_of_the_layers_has_to_recompute_only_those_do():
    """On three fifths of the memory that the fastest layout of a node takes, its first layers alone recompute."""
    roomy = job(PRESETS["llama-3.1-8b"], "h100:8", 64, 8192)
    fixed = fixed_values({"dp_shard": 8, "zero": 3, "micro_batch": 1})
    most = search(roomy, fixed=fixed).best[0].peak_bytes
    found = search(job(PRESETS["llama-3.1-8b"], "h100:8", 64, 8192, 0.6 * most / GiB / 0.9), fixed=fixed)
    layers = found.best[0].layout.recompute_layers
    assert layers is not None
    assert 0 < layers < 32
    whole_s = estimate(found.job, whole(found.best[0].choice).layout, 1).step_s
    check_fewest_layers(found, found.best[0], whole_s)


def test_the_recommended_layout_recomputes_in_as_few_layers_as_leave_headroom():
    asked = job(PRESETS["llama-3.1-8b"], "h100:8", 128, 7168)
    found = search(asked, fixed=fixed_values({"dp_shard": 8, "zero": 2, "micro_batch": 1}))
    assert found.recommended is not None
    taken, fastest = found.recommended, found.best[0]
    assert 0 < (fastest.layout.recompute_layers or 0) < (taken.layout.recompute_layers or 0) < 32
    room = with_headroom(found.limit_bytes)
    assert taken.peak_bytes <= room < fastest.peak_bytes
    less = taken.layout.changed(recompute_layers=taken.layout.recompute_layers - 1)  # type: ignore[operator]
    assert estimate(asked, less, 1).peak_bytes > room
