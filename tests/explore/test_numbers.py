"""Proves that a page shows the numbers of `plan --explain`, and that its files and its command lead back to them."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest

from shardwright.cli.explore import _state_of_run
from shardwright.config import load
from shardwright.explore import pictures
from shardwright.explore.page import Explorer, answer, document
from shardwright.explore.state import PageState, parse, query_of
from shardwright.explore.traffic import groups, overlap_table, sent_messages
from shardwright.model.by_sizes import sizes_of_spec
from shardwright.model.presets import PRESETS
from shardwright.planner.diff import diff
from shardwright.planner.headline import headline
from shardwright.report.diff_view import memory_table, time_table
from shardwright.report.plan_pictures import with_allocator
from shardwright.system.units import format_bytes, format_seconds
from shardwright.view.document import Table
from shardwright.view.html import fragment
from tests.cli.plans import plan
from tests.explore.states import STARTS, random_state
from tests.marks import rest_prove

SEEDS = range(50)
QUICK = (3, 5, 8)


def printed(state: PageState, folder: Path) -> Any:
    """Return the JSON document of the command of a page."""
    words = shlex.split(Explorer().command(state))
    assert words[:2] == ["shardwright", "plan"]
    if words[-1] == "run.toml":
        (folder / "run.toml").write_text(Explorer().run_toml(state))
        words[-1] = str(folder / "run.toml")
    result = plan(*words[2:], "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("seed", rest_prove(SEEDS, *QUICK))
def test_the_page_the_document_and_the_command_have_the_same_numbers(seed: int, tmp_path: Path):
    state = random_state(seed, moves=3)
    found = json.loads(json.dumps(document(state).data))
    told = printed(state, tmp_path)
    for left_out in ("model", "cluster"):  # a run file names its model by its sizes
        told.pop(left_out), found.pop(left_out)
    assert told == found
    shown = answer(state)
    assert format_seconds(told["step_s"]) in shown.status
    assert format_bytes(told["peak_bytes"]) in shown.status
    assert shown.fits == told["fits"] == ("does not fit" not in shown.status)
    if seed in QUICK:
        assert fragment(shown.first) in Explorer().home(query_of(state))
    (key,) = (picture.key for picture in shown.drawn if picture.title == "Time of a step")
    assert key
    assert all(text.startswith(format_seconds(told["time_s"][name]) + ",") for _, name, text in key)


def test_the_communication_of_the_page_is_the_communication_of_the_cost_model():
    state = parse("model=llama-3.1-8b&count=16&tp=16&zero=1&global_batch=32").state
    shown = answer(state)
    assert "16 ranks, 1 apart, over 2 nodes: network between nodes (infiniband)" in shown.drawn[0].caption + " ".join(
        each.caption for each in shown.meshes
    )
    inside = answer(parse("model=llama-3.1-8b&count=16&tp=8&zero=1&global_batch=32").state)
    assert "8 ranks, 1 apart, over 1 node: links inside a node" in " ".join(each.caption for each in inside.meshes)


def tones(table: Table) -> dict[str, str]:
    """The tone of each row's difference."""
    rows = [list(table.cells(row)) for row in table.rows]
    return {row[0].text: row[-1].tone for row in rows}


def test_a_pinned_layout_is_compared_term_by_term():
    pinned = "count=8&recompute=full"
    state = parse(f"count=8&tp=2&pin={pinned.replace('=', '%3D').replace('&', '%26')}").state
    assert state.pinned.layout.recompute == "full"
    found = diff(state.pinned.priced, state.priced)
    html = fragment(answer(state).compared)
    for term in (*found.time, *found.memory):
        assert f">{term.name}</td>" in html
    assert f"{found.b.step_s - found.a.step_s:+.4g}" in html
    assert f"{(found.b.peak_bytes - found.a.peak_bytes) / 2**30:+.4g}" in html
    assert tones(time_table(found))["recomputation"] == tones(time_table(found))["all"] == "good"
    assert tones(time_table(found))["tensor parallel"] == tones(memory_table(found))["all"] == "bad"
    assert tones(memory_table(found))["master"] == "", "the difference is 3e-6 of the whole"
    twice = parse(f"count=8&tp=2&global_batch={2 * state.job.global_batch}").state
    other = diff(state.priced, twice.priced)
    assert other.per == "a token"
    assert set(tones(time_table(other)).values()) == {"", "strong"}


def test_the_interval_is_of_the_layout_of_the_page_and_not_of_the_pinned_one():
    state = parse("count=8&tp=2&pin=count%3D8%26recompute%3Dfull").state
    low, high = map(format_seconds, headline(state.priced).interval_s)
    assert f"{low} to {high}" in fragment(answer(state).first)


def test_the_memory_is_compared_with_the_limit_of_the_planner():
    state = parse("count=8&zero=1&memory_margin=0.2").state
    limit = format_bytes(0.8 * state.job.cluster.accelerator.memory_bytes)
    assert answer(state).status.endswith(f"of {limit}, does not fit.")
    assert answer(state).fits == (state.priced.peak_bytes <= state.limit_bytes)


def test_the_column_of_each_stage_has_the_memory_of_that_stage():
    state = parse("model=llama-3.1-8b&count=8&pp=4&zero=1").state
    limit = state.limit_bytes
    root = ElementTree.fromstring(pictures.stage_memory(state.priced, limit).svg)
    tall = dict.fromkeys(range(4), 0.0)
    for box in root.iter("rect"):
        tall[int(float((box.get("x") or "").rstrip("%")) // 25)] += float(box.get("height") or 0)
    kinds = with_allocator(state.priced)
    whole = [sum(held[rank] for held in kinds.values()) for rank in range(4)]
    assert whole[0] != pytest.approx(whole[3], rel=0.1)
    top = 1.04 * max(limit, state.priced.peak_bytes)
    assert [tall[rank] for rank in range(4)] == pytest.approx([150 * n_bytes / top for n_bytes in whole], abs=1.5)


def test_exposed_messages_are_parts_of_the_step_and_not_longer_than_all_messages():
    state = parse("model=mixtral-8x7b&count=64&ep=8&pp=2&tp=2&cp=2&global_batch=256&seq_len=4096").state
    messages = sent_messages(state.priced)
    rows = {work: (alone, exposed) for work, alone, exposed, _ in overlap_table(state.priced, messages).rows}
    assert set(rows) == {*(f"{axis} parallel" for axis in ("tensor", "context", "expert", "data")), "pipeline"}
    for work, (alone, exposed) in rows.items():
        assert work == "pipeline" or exposed == state.priced.parts_s[work]
        assert work == "pipeline" or 0 < exposed <= 1.001 * alone
    assert sum(alone for alone, _ in rows.values()) == pytest.approx(sum(each.seconds for each in messages))
    found = {group.name: group for group in groups(state.priced, messages)}
    assert "network between nodes" in found["pipeline, pp"].link
    assert found["tensor parallel, tp"].link == found["expert parallel, ep"].link == "links inside a node"
    assert (found["tensor parallel, tp"].size, found["expert parallel, ep"].size) == (2, 8)


def test_groups_of_one_size_have_names_and_messages_alone_take_as_long_as_in_a_step():
    state = parse("model=llama-3.1-8b&count=64&dp_shard=8&dp_replicate=8&zero=2&global_batch=64").state
    assert {group.name for group in groups(state.priced, sent_messages(state.priced))} == {
        "data parallel, dp_shard",
        "data parallel, dp_replicate",
    }
    before = {row[0]: row[1] for row in overlap_table(state.priced, sent_messages(state.priced)).rows}
    job = state.priced.job
    slower = replace(job.stack, speed=replace(job.stack.speed, in_step={"data parallel": 3.0}))
    priced = replace(state.priced, job=replace(job, stack=slower))
    ((work, alone, _, _),) = overlap_table(priced, sent_messages(priced)).rows
    assert alone == pytest.approx(3 * before[work] / job.stack.speed.slowdown(work))


def test_the_pinned_layout_itself_takes_as_long():
    state = parse("count=8&pin=count%3D8").state
    assert "this layout takes as long as the pinned one for a step; pinned: " in fragment(answer(state).compared)


def test_the_command_has_every_digit():
    state = parse(
        "count=8&document_tokens=700.12345678&memory_margin=0.12345678&budget_tokens=1234567890123&price=2.1234567"
    ).state
    words = shlex.split(Explorer().command(state))
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert float(options["--document-tokens"]) == 700.12345678
    assert float(options["--memory-margin"]) == 0.12345678
    assert float(options["--budget-tokens"]) == 1234567890123
    assert options["--price"] == "2.1234567"
    assert parse("count=8&budget_tokens=1e12&price=0.00001").state is not None
    assert "--price 0.00001 " in Explorer().command(parse("count=8&budget_tokens=1e12&price=0.00001").state)


def test_a_model_by_many_sizes_has_a_run_file():
    sizes = sizes_of_spec(PRESETS["deepseek-v3"])
    assert len(sizes) > 255, "longer than the name of a file can be"
    state = parse(urlencode({"model": sizes, "count": 256, "ep": 32, "global_batch": 2048})).state
    assert 'preset = "debug"' in Explorer().run_toml(state)


@pytest.mark.parametrize("query", [*STARTS[1:5], "optimizer=lion&state_dtype=bf16&compile=true&count=8"])
def test_the_run_file_is_the_layout_of_the_page(query: str, tmp_path: Path):
    state = parse(query).state
    path = tmp_path / "run.toml"
    path.write_text(Explorer().run_toml(state))
    config = load(path)
    assert config.layout.layout() == state.layout
    assert (config.batch.micro_batch, config.batch.global_batch) == (state.choice.micro_batch, state.job.global_batch)
    assert config.optimizer.name == state.job.optimizer
    assert (config.optimizer.state_dtype == "bf16") == state.job.narrow_states
    again = _state_of_run(path, state.job.cluster.name.split(", ")[0], None)
    assert again.choice == state.choice
    assert again.job.model == state.job.model


def test_a_precision_that_train_does_not_compute_in_has_no_run_file():
    html = Explorer().home("precision=mxfp8&chip=b200")
    assert "no run.toml: --write with --precision mxfp8" in html
    assert "/run.toml?" not in html


def test_an_impossible_move_shows_the_rule_and_keeps_what_was_chosen():
    html = Explorer().answers("count=8&tp=2&move=tp&to=3")
    assert "This combination is not possible" in html
    assert "tp=3 does not divide 32 query heads" in html.replace("layout.tp", "tp")
    assert 'name="tp" value="3"' in html


def test_text_of_an_address_is_escaped_everywhere():
    html = Explorer().home("model=%3Cscript%3Ealert(1)%3C/script%3E&%22onload=%22x&pin=%22%3E%3Cb%3E")
    assert "<script>alert" not in html
    assert "<b>" not in html
    assert '"onload' not in html.replace("&#34;", "")
