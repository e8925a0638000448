"""Proves that the pictures of a plan show its numbers: every kind, the limit, every size and every length."""

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Job
from shardwright.model.presets import resolve
from shardwright.planner.alternatives import runners_up
from shardwright.planner.search import Plan, search
from shardwright.planner.sweep import by_length, by_size
from shardwright.report.plan_pictures import KINDS, ROLES, length_svg, memory_svg, scaling_svg, time_svg
from shardwright.report.plan_view import SearchedPlan, plan_view
from shardwright.system.units import GiB
from shardwright.view.html import write_page
from shardwright.view.style import COLOURS, DARK_COLOURS
from tests.marks import prove
from tests.report.pictures import assert_page_never_scrolls, readable_pictures


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = Job(model=resolve("llama-3.1-8b"), cluster=cluster("h100:16"), global_batch=128, seq_len=8192)
    return search(asked, top=3)


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_memory_is_drawn_by_kind_for_each_rank_with_the_limit(plan: Plan):
    shown = texts(memory_svg(plan.best[0], plan.limit_bytes))
    memory = plan.best[0].memory
    large = [kind for kind, held in memory.kinds.items() if held[0].max() > 0.05 * plan.limit_bytes]
    assert len(large) >= 3
    assert set(large) <= set(shown)
    assert "allocator" in shown
    assert any(text.strip() == f"limit {plan.limit_bytes / GiB:.3g} GiB" for text in shown)
    ranks = memory.rank_bytes.shape[1]
    if ranks > 1:
        assert {str(rank) for rank in range(ranks)} <= set(shown)


def test_time_is_drawn_for_each_layout_with_its_total(plan: Plan):
    rows = [(f"layout {at}", each) for at, each in enumerate(plan.best)]
    bars = [(name, each.parts_s, each.step_s) for name, each in rows]
    shown = " ".join(texts(time_svg([*bars, ("equal", plan.best[0].parts_s, 1.0004 * plan.best[0].step_s)])))
    assert "as fast" in shown
    assert "+0.0%" not in shown
    for name, each in rows:
        assert name in shown
        assert f"{each.step_s:.4g} s" in shown
    assert "matmuls" in shown


@prove
def test_speed_is_drawn_for_each_size_and_lies_on_what_a_search_there_finds(plan: Plan):
    points = by_size(plan)
    assert [point.size for point in points] == [8, 16, 32, 64, 128]
    shown = texts(scaling_svg(points, 16))
    assert {str(point.size) for point in points} <= set(shown)
    for point in points[::2]:
        assert point.priced is not None
        assert point.priced.choice.layout.world_size == point.size
        # What is searched is a part of the space, so that it cannot be faster than all of it.
        job = replace(plan.job, cluster=replace(plan.job.cluster, size=point.size))
        assert point.priced.step_s >= search(job, top=1).best[0].step_s * (1 - 1e-9)


def test_memory_is_drawn_for_each_length_that_the_layout_can_cut(plan: Plan):
    points = by_length(plan.best[0])
    lengths = [each.job.seq_len for each in points]
    assert lengths == [1024, 2048, 4096, 8192, 16384, 32768]
    assert [each.peak_bytes for each in points] == sorted(each.peak_bytes for each in points)
    shown = texts(length_svg(points, 8192, plan.limit_bytes))
    assert {f"{length:,}" for length in lengths} <= set(shown)


def test_no_two_roles_have_one_colour():
    for house, own in ((COLOURS, ROLES[0]), (DARK_COLOURS, ROLES[1])):
        every = [*house.values(), *own.values()]
        assert len(set(every)) == len(every)
    assert len(KINDS) == 12


@prove
def test_the_page_has_all_pictures_in_the_colours_of_the_screen(
    plan: Plan, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "plan.html"
    with readable_pictures(monkeypatch):
        searched = SearchedPlan(plan, plan, "llama <8b>", None, runners_up(plan), [], [], 0.1, None, 1.0)
        write_page(plan_view(searched, {}), path)
    assert_page_never_scrolls(path.read_text())
    page = path.read_text()
    assert "llama &lt;8b&gt;" in page
    assert "llama <8b>" not in page
    body = page[page.index("<body>") :]
    assert body.count("<svg") == 4
    assert not re.search(r"#[0-9a-f]{6}\b", body)
    assert body.count("var(--kind-") > 20
