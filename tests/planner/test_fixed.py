"""Proves that a search with fixed values finds what evaluating every layout with those values would find."""

from functools import cache

import pytest

from shardwright.cost.job import Candidates
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.planner.alternatives import runners_up, well_known
from shardwright.planner.choice import Choice
from shardwright.planner.nearest import remedies
from shardwright.planner.search import MARGIN, limit_bytes, search
from shardwright.planner.space import FixedChoices, fixed_values, read_fixed
from shardwright.system.errors import LayoutError
from tests.marks import prove, rest_prove
from tests.planner.test_search import DEEP, MIXED, brute_force, job

FIXED = {
    "tp=2,pp=1": lambda layout, micro_batch: layout.tp == 2 and layout.pp == 1,
    "zero=3": lambda layout, micro_batch: layout.zero == 3,
    "recompute=full,micro_batch=2": lambda layout, micro_batch: layout.recompute == "full" and micro_batch == 2,
    "pp_schedule=1f1b": lambda layout, micro_batch: layout.pp > 1 and layout.pp_schedule == "1f1b",
    "cp_method=zigzag": lambda layout, micro_batch: layout.cp > 1 and layout.cp_method == "zigzag",
}


@cache
def every_layout() -> list[tuple[float, Choice]]:
    asked = job(DEEP, "h100:8/4", 16, 256)
    return brute_force(asked, limit_bytes(asked, MARGIN))


@pytest.mark.parametrize("text", rest_prove(FIXED, "tp=2,pp=1"))
def test_with_fixed_values_the_fastest_of_such_layouts_is_found(text):
    asked = job(DEEP, "h100:8/4", 16, 256)
    found = search(asked, top=1, fixed=read_fixed(text))
    all_ = every_layout()
    such = [(seconds, each) for seconds, each in all_ if FIXED[text](each.layout, each.micro_batch)]
    assert 0 < len(such) < len(all_)
    assert len(found.pool) == len(such)
    assert found.best[0].step_s == pytest.approx(such[0][0])
    for other in [*runners_up(found), *well_known(found)]:
        assert FIXED[text](other.choice.layout, other.choice.micro_batch), other.name


@prove
def test_where_nothing_with_the_fixed_values_fits_leaving_them_out_is_the_first_remedy():
    asked = job(DEEP, "h100:8/4", 16, 256, memory_gib=0.35)
    assert search(asked).best
    fixed = read_fixed("dp_replicate=8")
    assert not search(asked, fixed=fixed).best
    assert remedies(asked, MARGIN, fixed)[0].what == "another layout: leave out --fix dp_replicate=8"


def test_values_that_no_layout_has_are_refused_with_those_that_some_have():
    with pytest.raises(LayoutError, match=r"tp=3: no layout .* 8 accelerators .* tp: 1, 2, 4, 8"):
        search(job(DEEP, "h100:8/4", 16, 256), fixed=read_fixed("tp=3"))
    with pytest.raises(LayoutError, match="pp: 1, 2, 4; ep: 1, 2, 4, 8"):
        search(job(MIXED, "h100:8/4", 16, 256), fixed=read_fixed("pp=4,ep=8"))


def test_every_mistake_in_fixed_values_is_told_at_once():
    with pytest.raises(LayoutError) as told:
        read_fixed("tp=x,pq=1,zero=4,micro_batch=0,cp_method=usp")
    text = str(told.value)
    for part in (
        "tp=x: a whole number",
        "pq=1: there is no such key",
        "zero=4: not one of the choices; valid: 0, 1, 2, 3",
    ):
        assert f"--fix {part}" in text
    assert "--fix micro_batch=0: sequences at a time" in text
    assert "--fix cp_method=usp: plan has no formulas" in text
    with pytest.raises(LayoutError, match="write key=value"):
        read_fixed(" ")
    with pytest.raises(LayoutError, match="no such key"):
        fixed_values({"tq": 2})
    assert fixed_values({"tp": 2}) == read_fixed("tp=2")


def test_every_key_of_the_layout_can_be_fixed():
    candidates = Candidates.from_layout(Layout(), 1)
    for name, key in KEYS.items():
        assert len(FixedChoices({name: key.default})(candidates)) == 1
