"""Proves that an address holds a whole state, and that every problem of an address is named."""

import random
from dataclasses import replace
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.explore.fastest import find_fastest
from shardwright.explore.page import Explorer
from shardwright.explore.sliders import position, sliders
from shardwright.explore.state import JOB_DEFAULTS, LAYOUT_KEYS, parse, query_of
from shardwright.layout.keys import KEYS
from shardwright.model.by_sizes import sizes_of_spec, spec_of_sizes
from shardwright.model.presets import PRESETS
from shardwright.system.errors import InputError
from tests.explore.states import STARTS, random_query, random_state


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_address_holds_the_whole_state(seed: int):
    state = random_state(seed, moves=2)
    assert parse(query_of(state)).state == state
    assert query_of(parse(query_of(state)).state) == query_of(state)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_query_string_is_a_state_or_a_list_of_problems(seed: int):
    parsed = Explorer().read(random_query(random.Random(seed)))
    assert (parsed.state is None) == bool(parsed.problems)
    assert all(parsed.problems)


def test_no_slider_offers_a_position_that_breaks_a_rule():
    for start in STARTS:
        state = parse(start).state
        for slider in (each for group in sliders(state).values() for each in group):
            for to in slider.positions:
                moved = Explorer().read(f"{start}&move={slider.key}&to={to.replace('+', '%2B')}")
                assert moved.state is not None, (start, slider.key, to, moved.problems)
            assert slider.value in slider.positions


EVERY_KEY = (
    "model=llama-3.2-1b&chip=h200&count=32&node_size=4&node_gbit=800&network=roce&host_memory=1TB&global_batch=64"
    "&seq_len=4096&document_tokens=700.5&precision=fp8&optimizer=lion&state_dtype=bf16&compile=true&memory_margin=0.2"
    "&budget_tokens=1000000000000.0&price=2.5&tp=2&dp_replicate=2&zero=1&recompute=full&micro_batch=2"
)


def test_every_key_is_restored_from_the_link():
    state = parse(f"{EVERY_KEY}&pin=count%3D8").state
    assert state is not None
    assert all(f"&{key}=" in f"&{EVERY_KEY}" for key in JOB_DEFAULTS)
    link = dict(parse_qsl(query_of(state)))
    assert link.pop("pin", "") == "model=llama-3.1-8b&chip=h100&count=8"
    assert link == dict(parse_qsl(EVERY_KEY))


def test_a_slider_changes_the_key_that_it_names_and_no_other_choice():
    state = parse(STARTS[1]).state
    offered = [each for group in sliders(state).values() for each in group]
    assert {each.key for each in offered} >= {"tp", "pp", "zero", "dp_replicate", "micro_batch", "recompute"}
    for slider in offered:
        for to in (slider.positions[0], slider.positions[-1]):
            layout = Explorer().read(f"{STARTS[1]}&move={slider.key}&to={to.replace('+', '%2B')}").state
            assert layout is not None, (slider.key, to)
            now = layout.choice.settings() | {key: getattr(layout.layout, key) for key in KEYS}
            assert position(now[slider.key]) == to
            others = {"tp", "pp", "cp", "micro_batch"} - {slider.key}
            assert {key: now[key] for key in others} == {
                key: getattr(state.choice if key == "micro_batch" else state.layout, key) for key in others
            }


def test_dp_takes_the_rest_of_the_cluster_unless_it_is_given():
    layout = parse("count=64&tp=4&pp=2&dp_replicate=2").state.layout
    assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (2, 4, 3)
    whole = parse("count=64&tp=4&zero=0").state.layout
    assert (whole.dp_replicate, whole.dp_shard) == (16, 1)
    given = parse("count=64&tp=4&dp_shard=2")
    assert given.state is None
    assert "has 64 accelerators" in given.problems[0]


def test_a_move_has_its_consequences():
    start = "model=mixtral-8x7b&count=16&global_batch=64&seq_len=4096&pp=4&pp_schedule=zb-h1&ep=4"
    one = Explorer().read(f"{start}&move=pp&to=1").state
    assert (one.layout.pp, one.layout.pp_schedule, one.layout.dp_shard, one.layout.ep) == (1, "1f1b", 16, 4)
    sharded = Explorer().read(f"{start}&move=tp&to=2").state
    assert sharded.layout.sequence_parallel
    replicated = Explorer().read("count=8&move=zero&to=0").state
    assert (replicated.layout.dp_replicate, replicated.layout.zero) == (8, 0)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("recomput=full", "recomput: there is no such key; did you mean 'recompute'?"),
        ("tp=2&tp=4", "tp=4: given twice, and 2 before; leave one out"),
        ("tp=3&count=24", "tp=3 does not divide 32 query heads"),
        ("tp=two", "tp=two: a whole number is needed"),
        ("count=9", "nearest: 8 and 16"),
        ("global_batch=0", "global_batch=0: a whole number from 1 to 2,147,483,648 is needed"),
        ("seq_len=" + "9" * 400, "a whole number from 1"),
        ("model=/etc/passwd", "model preset '/etc/passwd' does not exist"),
        ("model=llama-3.1-8c", "did you mean 'llama-3.1-8b'?"),
        ("memory_margin=nan", "memory_margin=nan: a number from 0 to below 1 is needed"),
        ("document_tokens=9000", "document_tokens=9000: a number from 1 to the seq_len=8192"),
        ("document_tokens=few", "document_tokens=few: a number from 1"),
        ("network=" + "x" * 401, "network: at most 400 characters are possible"),
        ("model=" + "x" * 8001, "model: at most 8,000 characters are possible"),
        ("price=2", "price goes with budget_tokens"),
        ("precision=fp8&chip=a100-80gb", "precision=fp8: the peak of a100-80gb in it is not known"),
        ("state_dtype=bf16&optimizer=adamw-8bit", "8 bits already"),
        ("pp_schedule=auto&pp=2&count=8", "its search takes seconds"),
        ("pp=2&count=8&dp_shard=4&global_batch=1048576", "passes in a step"),
        ("model=n_layers=2000,d_model=64,n_heads=4,d_ffn=64,vocab_size=64", "at most 1024 layers"),
        ("pin=tp%3D3", "pin: the pinned layout cannot be read"),
        ("&".join(f"k{n}=1" for n in range(200)), "more than 100 keys"),
    ],
)
def test_a_problem_has_the_value_the_rule_and_the_way_out(query: str, problem: str):
    parsed = parse(query)
    assert parsed.state is None
    assert problem in "\n".join(parsed.problems)


@pytest.mark.parametrize(
    "query",
    ["seq_len=abc", "global_batch=0", "memory_margin=abc", "memory_margin=2", "memory_margin=nan", "count=8&count=16"],
)
def test_no_other_job_than_the_asked_one_is_searched(query: str):
    with pytest.raises(InputError, match=query.partition("=")[0]):
        find_fastest(lambda done, of: None, f"model=debug&{query}", None)


@pytest.mark.parametrize("key", ["tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "micro_batch"])
@pytest.mark.parametrize("to", ["0", "-1"])
def test_a_move_below_one_is_refused(key: str, to: str):
    parsed = Explorer().read(f"count=8&move={key}&to={to}")
    assert parsed.problems == [f"{key}={to}: a whole number of 1 or more is needed"]


def test_every_key_of_the_layout_is_read_from_an_address():
    assert not [key for key in LAYOUT_KEYS if "no such key" in " ".join(parse(f"{key}=1").problems)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written_as_sizes(name: str):
    spec = PRESETS[name]
    assert spec_of_sizes(sizes_of_spec(spec), spec.max_seq_len) == replace(spec, rope_scaling=None)
