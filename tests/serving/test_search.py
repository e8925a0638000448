"""The search: what it finds is the best of what it priced, keeps the limits, and is found in time."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.serving.search import (
    PERCENTILE,
    ServingLayout,
    ServingOption,
    Speculation,
    batches,
    layouts,
    pareto,
    price,
    search,
    smaller_need,
)
from shardwright.serving.setting import Degrees, Settings
from shardwright.serving.words import reasons
from tests.function_calls import calls
from tests.marks import prove
from tests.serving.cases import serving, task


def test_layouts_fill_the_cluster_and_split_evenly():
    there = serving("deepseek-v3", "h100:16")
    found = list(layouts(there.model, there.cluster))
    assert len(set(found)) == len(found) > 20
    for layout in found:
        degrees = layout.degrees
        assert degrees.size * layout.replicas == 16
        assert there.model.n_heads % degrees.tp == 0
        assert degrees.tp <= 8
        assert (degrees.tp * degrees.dp) % degrees.ep == 0


def test_batches_go_up_to_the_largest():
    assert batches(0) == []
    assert batches(5) == [1, 2, 3, 4, 5]
    assert batches(1000)[-1] == 1000
    assert batches(1000) == sorted(set(batches(1000)))


def test_no_option_beats_one_of_the_pareto_curve():
    found = search(task("llama-3.1-70b", "h100:8"))
    assert len(found.pareto) > 5
    for point in found.pareto:
        for other in found.options:
            assert not (other.tpot_s <= point.tpot_s and other.per_accelerator > point.per_accelerator)
    random = np.random.default_rng(0).permutation(len(found.options))
    assert pareto([found.options[at] for at in random]) == found.pareto


def test_the_best_keep_the_limits_and_tighter_ones_cost_tokens():
    loose = search(task("llama-3.1-70b", "h100:8", ttft_s=2.0, tpot_s=0.1))
    tight = search(task("llama-3.1-70b", "h100:8", ttft_s=1.0, tpot_s=0.02))
    for found in (loose, tight):
        assert found.best
        for each in found.best:
            assert each.ttft_s(PERCENTILE) <= found.task.ttft_s
            assert each.tpot_s(PERCENTILE) <= found.task.tpot_s
    assert tight.best[0].per_accelerator < loose.best[0].per_accelerator


def test_the_best_for_one_user_is_the_largest_tp_and_for_many_another():
    """Why the answer for training is not the one for serving: it depends on how many tokens there are at a time."""
    one = search(task("llama-3.1-70b", "h100:8", concurrency=1)).pareto[0]
    assert one.layout.degrees == Degrees(8)
    many = search(task("llama-3.1-70b", "h100:8")).best[0]
    assert many.layout.degrees.tp < 8


def test_every_layout_is_listed_or_says_why_not():
    found = search(task("llama-3.1-70b", "h100:8", precision="bf16", tpot_s=0.03))
    told = {layout: why for layout, _, why in reasons(found)}
    assert set(told) | {each.layout for each in found.best} == set(found.layouts)
    assert told[ServingLayout(Degrees(1), 8)].startswith("weights")
    assert all(told.values())


def test_the_speed_of_a_user_is_by_closed_forms_on_both_sides_of_a_comparison():
    found = search(task("llama-3.1-70b", "h100:8", precision="fp8"))
    best = f"tokens/s each, not {1 / found.best[0].option.tpot_s:.3g}"
    said = [why for _, _, why in reasons(found) if "tokens/s: " in why]
    assert said
    assert all(why.endswith(best) for why in said)


def test_a_rate_that_is_too_high_is_not_kept_and_says_what_is():
    found = search(task("llama-3.1-8b", "h100:1/1", rate_per_s=1e4))
    assert not found.best
    assert found.missed
    slow = search(task("llama-3.1-8b", "h100:1/1", rate_per_s=1.0))
    assert slow.best
    assert slow.best[0].tokens_per_s == pytest.approx(512, rel=0.25)


def test_what_would_fit_does():
    there = task("llama-3.1-405b", "h100:8", precision="bf16")
    assert not search(there).options
    assert "--precision fp8" in smaller_need(there)
    changed = replace(there, serving=replace(there.serving, precision="fp8"))
    assert search(changed).options


def test_accepted_tokens_are_a_geometric_sum():
    assert Speculation(4, 0.7).accepted == pytest.approx(sum(0.7**k for k in range(5)))
    assert Speculation(3, 1.0).accepted == 4
    assert Speculation().accepted == 1


def test_drafting_helps_a_small_batch():
    plain = task("llama-3.1-70b", "h100:8", concurrency=4)
    drafting = replace(plain, speculation=Speculation(3, 0.8, 0.02))
    assert search(drafting).best[0].tpot_s() < 0.6 * search(plain).best[0].tpot_s()


@prove
def test_a_setting_is_priced_with_few_calls():
    """20,000 settings a second, at 4 calls each."""
    there = task("deepseek-v3", "h100:64")
    every = list(layouts(there.serving.model, there.serving.cluster))
    largest = np.full(len(every), 4000.0)
    n_settings = len(price(there, every, largest))  # what is cached is now
    assert calls(lambda: price(there, every, largest)) < 5 * n_settings


@prove
@pytest.mark.parametrize(("model", "millions"), [("llama-3.1-405b", 3), ("deepseek-v3", 17)])
def test_64_accelerators_are_searched_with_few_calls(model: str, millions: int):
    """In 5 seconds or less."""
    assert calls(lambda: search(task(model, "h100:64"))) < 1e6 * millions


def test_closed_forms_are_near_the_simulation():
    found = search(task("llama-3.1-70b", "h100:8", concurrency=64))
    for each in found.best:
        option: ServingOption = each.option
        assert each.tpot_s() == pytest.approx(option.tpot_s, rel=0.15), str(each.layout)


def test_settings_of_layouts_are_arrays_of_their_degrees():
    settings = Settings.from_layouts([Degrees(2, 3, 4, 8), Degrees(1)])
    assert settings.size.tolist() == [24, 1]
    assert settings.expert_tp.tolist() == [1, 1]
