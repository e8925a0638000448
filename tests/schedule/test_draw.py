"""Proves that pictures and traces of timelines hold every action once, where and when it is."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwright.schedule.actions import OPS, Action
from shardwright.schedule.build import build
from shardwright.schedule.draw import CURVE_HEIGHT, LEFT, RIGHT, SHADES, ScheduleTimeline, draw, ink_on, planned, svg
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import Simulation, Times, simulate
from shardwright.schedule.trace import write_trace
from shardwright.system.errors import InputError

SVG = "{http://www.w3.org/2000/svg}"
BUILT = [name for name in names() if not find(name).searched]
TIMES = Times(1.0, 1.25, 0.5, comm=0.125)


def simulated(name: str, n_ranks: int = 4, n_microbatches: int = 8, times: Times = TIMES) -> Simulation:
    return simulate(build(name, n_ranks, n_microbatches, 2 if name == "interleaved-1f1b" else 1), times)


def boxes(text: str) -> Counter[str]:
    """How many boxes of each op an SVG text has."""
    found: Counter[str] = Counter()
    for path in ElementTree.fromstring(text).iter(f"{SVG}path"):
        if path.get("class") in OPS:
            found[path.get("class", "")] += path.get("d", "").count("M")
    return found


def numbers(text: str) -> list[str]:
    """The numbers in the boxes."""
    return [each.text or "" for group in ElementTree.fromstring(text).iter(f"{SVG}g") for each in group]


def test_a_picture_of_one_rank_and_one_microbatch():
    timeline = ScheduleTimeline("one", [[(Action(0, "F", 0), 0.0, 1.0), (Action(0, "B", 0), 1.0, 3.0)]], n_stages=1)
    text = svg([timeline])
    assert boxes(text) == {"F": 1, "B": 1}
    assert numbers(text) == ["0", "0"]
    assert timeline.curve(0) == [(0.0, 1.0, 0.0), (3.0, 0.0, 0.0)]
    assert timeline.bubble(0) == 0


@pytest.mark.parametrize("name", BUILT)
def test_every_action_is_a_box_with_its_microbatch(name: str):
    simulation = simulated(name)
    text = svg([planned(simulation)])
    actions = [action for _, action in simulation.schedule.actions()]
    assert boxes(text) == Counter(action.op for action in actions)
    assert Counter(numbers(text)) <= Counter(str(action.microbatch) for action in actions)
    assert f"bubble {simulation.bubble_rate:.1%}" in text


@pytest.mark.parametrize("name", BUILT)
def test_what_is_held_and_the_bubbles_are_those_of_the_simulation(name: str):
    simulation = simulated(name)
    timeline = planned(simulation, kept_for_weight=0.5)
    curves = [timeline.curve(rank) for rank in range(simulation.schedule.n_ranks)]
    assert [max(number for _, number, _ in curve) for curve in curves] == pytest.approx(
        simulation.peak_in_flight_shares
    )
    peaks = [max(number + waiting for _, number, waiting in curve) for curve in curves]
    assert peaks == pytest.approx(simulation.peak_memory_shares(0.5))
    assert [timeline.bubble(rank) for rank in range(len(curves))] == pytest.approx(simulation.bubble_rates)
    assert all(curve[-1][1:] == (0, 0) for curve in curves)


def heights(text: str, name: str) -> list[float]:
    """How high the curve of a class rises below each row, from its floor, in pixels."""
    [d] = [path.get("d", "") for path in ElementTree.fromstring(text).iter(f"{SVG}path") if path.get("class") == name]
    rows = [row for row in d.split("M") if row]
    return [float(row.split("H")[0].split()[1]) - min(map(float, re.findall(r"V([\d.]+)", row))) for row in rows]


def test_a_curve_is_as_high_as_what_is_in_flight_with_what_waits_on_top():
    simulation = simulated("zb-h1")
    text = svg([planned(simulation, kept_for_weight=0.25)])
    unit = CURVE_HEIGHT / max(simulation.peak_memory_shares(0.25))
    assert heights(text, "in-flight") == pytest.approx([unit * peak for peak in (4, 3, 2, 1)], abs=0.02)
    whole = [unit * peak for peak in simulation.peak_memory_shares(0.25)]
    assert heights(text, "waiting") == pytest.approx(whole, abs=0.02)
    assert "waiting for W, each 0.25 of one in flight" in text
    assert "waiting" not in svg([planned(simulated("1f1b"))])


def test_boxes_lie_where_the_times_say():
    """1F1B on two ranks: the widths of boxes are in the ratio of times, and none lies over another."""
    text = svg([planned(simulated("1f1b", 2, 2, Times(1.0, 1.0, 1.0)))])
    found = {
        path.get("class"): [tuple(map(float, box)) for box in re.findall(r"M(\S+) (\S+)h(\S+?)v", path.get("d", ""))]
        for path in ElementTree.fromstring(text).iter(f"{SVG}path")
        if path.get("class") in OPS
    }
    assert {round(width / found["F"][0][2]) for _, _, width in found["B"]} == {2}
    for row in {y for _, y, _ in found["F"]}:
        on_row = sorted((x, width) for of_op in found.values() for x, y, width in of_op if y == row)
        assert len(on_row) == 4
        assert all(x + width <= following for (x, width), (following, _) in pairwise(on_row))


@pytest.mark.parametrize("name", BUILT)
def test_the_grey_that_is_seen_is_the_bubble(name: str):
    simulation = simulated(name)
    picture = ElementTree.fromstring(svg([planned(simulation)]))
    [grey] = [path.get("d", "") for path in picture.iter(f"{SVG}path") if path.get("class") == "idle"]
    scale = (int(picture.get("width", "")) - LEFT - RIGHT) / planned(simulation).reach
    whole = sum(simulation.work) / (1 - simulation.bubble_rate)
    assert sum(map(float, re.findall(r"M\S+ \S+h(\S+?)v", grey))) == pytest.approx(whole * scale, rel=1e-4)


def test_numbers_are_left_out_where_they_do_not_fit():
    text = svg([planned(simulated("1f1b", 4, 200))])
    assert sum(boxes(text).values()) == 4 * 200 * 2
    assert len(numbers(text)) < 4 * 200 * 2


def test_later_stages_and_microbatches_from_the_other_end_are_darker():
    assert SHADES["F"][1] not in svg([planned(simulated("1f1b"))])
    for name, words in (("zb-v", "later stage"), ("dualpipe", "other end")):
        text = svg([planned(simulated(name))])
        assert all(shade in text for shade in SHADES["F"])
        assert words in text


def test_digits_stand_out_from_every_shade():
    """Contrast of at least 4.5, the rule of WCAG 2.2 for text."""

    def luminance(colour: str) -> float:
        parts = [byte / 255 for byte in bytes.fromhex(colour[1:])]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for shade in (shade for shades in SHADES.values() for shade in shades):
        dark, light = sorted((luminance(shade), luminance(ink_on(shade))))
        assert (light + 0.05) / (dark + 0.05) > 4.5, shade


def test_a_measured_timeline_stands_below_the_planned_one():
    plan = planned(simulated("1f1b"))
    seconds = [[(action, 0.01 * start, 0.011 * end) for action, start, end in spans] for spans in plan.spans]
    text = svg([plan, ScheduleTimeline("measured", seconds, plan.n_stages, unit="s", note="a <run> & more")])
    assert boxes(text) == {"F": 64, "B": 64}
    assert "a &lt;run&gt; &amp; more" in text
    assert " s</text>" in text


def test_32_ranks_of_256_microbatches_are_drawn_in_less_than_2_mb(tmp_path: Path):
    timeline = planned(simulated("zb-h1", 32, 256))
    draw([timeline], tmp_path / "large.svg")
    assert boxes((tmp_path / "large.svg").read_text()) == {op: 32 * 256 for op in "FIW"}
    assert (tmp_path / "large.svg").stat().st_size < 2e6


def test_nothing_that_takes_no_time_breaks_a_picture(tmp_path: Path):
    simulation = simulated("zb-h1", times=Times(1.0, 1.0, 0.0))
    assert boxes(svg([planned(simulation)]))["W"] == 32
    write_trace([planned(simulation)], tmp_path / "trace.json")
    assert svg([ScheduleTimeline("no action", [[], []], n_stages=2)])


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for write in (draw, write_trace):
        with pytest.raises(InputError, match="cannot be written"):
            write([planned(simulated("1f1b"))], tmp_path / "file" / "picture")


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


@pytest.mark.parametrize("name", BUILT)
def test_a_trace_has_every_action_and_its_durations_add_up(name: str, tmp_path: Path):
    simulation, path = simulated(name), tmp_path / "trace.json"
    write_trace([planned(simulation)], path)
    for rank, actions in enumerate(simulation.schedule.ranks):
        mine = sorted((each for each in events(path, "X") if each["tid"] == rank), key=lambda each: each["ts"])
        assert [(each["args"]["stage"], each["args"]["microbatch"]) for each in mine] == [
            (action.stage, action.microbatch) for action in actions
        ]
        assert sum(each["dur"] for each in mine) == pytest.approx(1e3 * simulation.work[rank])
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-6 for one, other in pairwise(mine))
    assert max(each["ts"] + each["dur"] for each in events(path, "X")) == pytest.approx(1e3 * simulation.makespan)


def test_a_trace_counts_what_is_in_flight_and_what_waits(tmp_path: Path):
    simulation, path = simulated("zb-h1"), tmp_path / "trace.json"
    write_trace([planned(simulation, kept_for_weight=0.25)], path)
    for rank in range(4):
        found = [each["args"] for each in events(path, "C") if each["name"] == f"memory, rank {rank}"]
        assert max(each["in flight"] for each in found) == simulation.peak_in_flight[rank]
        assert max(each["waiting for W"] for each in found) == simulation.peak_waiting[rank] / 4
        assert max(sum(each.values()) for each in found) == simulation.peak_memory(0.25)[rank]


@pytest.mark.parametrize("name", BUILT)
def test_a_message_is_an_arrow_between_ranks_that_does_not_go_back_in_time(name: str, tmp_path: Path):
    simulation, path = simulated(name), tmp_path / "trace.json"
    write_trace([planned(simulation)], path)
    sent, received = ({each["id"]: each for each in events(path, kind)} for kind in "sf")
    schedule = simulation.schedule
    crossings = sum(
        schedule.place[stage, microbatch] != schedule.place[stage + 1, microbatch]
        for stage in range(schedule.n_stages - 1)
        for microbatch in range(schedule.n_microbatches)
    )
    assert len(sent) == len(received) == 2 * crossings
    for each in sent.values():
        assert each["ts"] < received[each["id"]]["ts"]
        assert each["tid"] != received[each["id"]]["tid"]


def test_seconds_become_microseconds_and_pipelines_processes(tmp_path: Path):
    spans = [[(Action(0, "F", 0), 0.5, 0.75), (Action(0, "B", 0), 0.75, 1.25)]]
    write_trace(
        [ScheduleTimeline("one", spans, 1, "s"), ScheduleTimeline("two", spans, 1, "s")], tmp_path / "trace.json"
    )
    found = [(each["pid"], each["name"], each["ts"], each["dur"]) for each in events(tmp_path / "trace.json", "X")]
    assert found == [(p, name, ts, dur) for p in (0, 1) for name, ts, dur in (("0F0", 5e5, 2.5e5), ("0B0", 7.5e5, 5e5))]
    names = [each["args"]["name"] for each in events(tmp_path / "trace.json", "M") if each["name"] == "process_name"]
    assert names == ["one", "two"]
