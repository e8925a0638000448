"""Proves that `shardwright schedule` tells what a schedule costs, writes what is asked for, and refuses bad input."""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from shardwright.cli import common  # noqa: F401  (its console takes the width it finds when it is imported)
from shardwright.cli.main import app
from shardwright.schedule.registry import find, names

BUILT = [name for name in names() if not find(name).searched]
SIZES = ("--pp", "4", "--microbatches", "8")
HALVES = {"interleaved-1f1b", "zb-v", "dualpipe-v"}


def schedule(*arguments: object, columns: int = 120) -> Result:
    return CliRunner().invoke(app, ["schedule", *map(str, arguments)], env={"COLUMNS": str(columns)})


def document(*arguments: object) -> Any:
    result = schedule(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def parse(action: str) -> tuple[int, str, int]:
    op = next(letter for letter in "FBIW" if letter in action)
    stage, microbatch = action.split(op)
    return int(stage), op, int(microbatch)


def test_a_schedule_is_shown_as_text():
    result = schedule("--schedule", "1f1b", "--pp", 2, "--microbatches", 2)
    assert result.exit_code == 0, result.output
    assert "1f1b: 2 ranks, 2 micro-batches" in result.output
    assert "rank 0 F0F1····B0  ··B1  \n" in result.output
    assert "rank 1 ··F0B0  F1B1  ····\n" in result.output
    assert "bubble 33.3%" in result.output
    assert "4 messages" in result.output


def test_every_problem_of_the_options_is_told_at_once():
    result = schedule("--schedule", "1f1b", "--times", "1,2", "--comm", -1, "--pp", 0, columns=400)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 4, result.output
    for part in ("--times 1,2", "--comm -1", "--pp 0", "--microbatches is missing"):
        assert part in result.output


def test_a_timeline_that_does_not_fit_the_screen_is_left_out():
    result = schedule("--schedule", "1f1b", *SIZES, columns=60)
    assert result.exit_code == 0, result.output
    assert "F0F1" not in result.output
    assert "--draw" in result.output
    assert "bubble 27.3%" in result.output


@pytest.mark.parametrize("name", BUILT)
def test_json_has_every_action_once(name: str):
    told = document("--schedule", name, *SIZES)
    actions = [parse(action) for actions in told["actions"] for action in actions]
    found = Counter(actions)
    assert set(found.values()) == {1}
    assert told["n_stages"] == (8 if name in HALVES else 4)
    for stage in range(told["n_stages"]):
        for microbatch in range(8):
            ops = {op for at, op, number in actions if (at, number) == (stage, microbatch)}
            assert ops in ({"F", "B"}, {"F", "I", "W"})
    assert told["problems"] == []


@pytest.mark.parametrize("name", BUILT)
def test_json_agrees_with_a_count_of_its_own_actions(name: str):
    """Times by relaxation, and peaks by walking the list: no line in common with the simulator."""
    forward, backward_input, weight, comm = 1.0, 1.5, 0.5, 0.25
    told = document("--schedule", name, *SIZES, "--times", "1,1.5,0.5", "--comm", comm)
    lasts = {"F": forward, "I": backward_input, "W": weight, "B": backward_input + weight}
    ranks = [[parse(action) for action in actions] for actions in told["actions"]]
    at = {action: rank for rank, actions in enumerate(ranks) for action in actions}
    ends = dict.fromkeys(at, 0.0)

    def start(rank: int, position: int) -> float:
        stage, op, microbatch = ranks[rank][position]
        neighbours = [(stage - 1, "F")] if op == "F" else [(stage + 1, "I"), (stage + 1, "B")] if op != "W" else []
        needed = [(*neighbour, microbatch) for neighbour in neighbours]
        ready = [ends[each] + comm * (at[each] != rank) for each in needed if each in ends]
        return max(ends[ranks[rank][position - 1]] if position else 0.0, *ready, 0.0)

    for _ in range(len(at)):
        fresh = {
            action: start(rank, position) + lasts[action[1]]
            for rank, actions in enumerate(ranks)
            for position, action in enumerate(actions)
        }
        if fresh == ends:
            break
        ends = fresh
    begins = {action: end - lasts[action[1]] for action, end in ends.items()}
    assert told["makespan"] == pytest.approx(max(ends.values()))
    work = 8 * told["n_stages"] / 4 * (forward + backward_input + weight)
    cost = max(ends.values())
    if name in ("zb-h2", "zb-v"):
        cost = max(ends[actions[-1]] - begins[actions[0]] for actions in ranks)
    assert told["bubble_rate"] == pytest.approx(1 - work / cost)
    assert told["peak_in_flight"] == [most_held(actions, 1, 0) for actions in ranks]
    assert told["peak_waiting"] == [most_held(actions, 0, 1) for actions in ranks]
    assert told["kept_for_weight"] == 0.375
    assert told["peak_memory"] == [most_held(actions, 1, 0.375) for actions in ranks]
    assert told["peak_memory_shares"] == [4 / told["n_stages"] * peak for peak in told["peak_memory"]]
    crossings = [
        at[stage, "F", microbatch] != at[stage + 1, "F", microbatch]
        for stage in range(told["n_stages"] - 1)
        for microbatch in range(8)
    ]
    assert told["messages"] == 2 * sum(crossings)
    assert told["resident_parameters"] == (2 if name == "dualpipe" else 1)


def most_held(actions: list[tuple[int, str, int]], in_flight: float, waiting: float) -> float:
    of = {"F": in_flight, "I": waiting - in_flight, "W": -waiting, "B": -in_flight}
    changes = [of[op] for _, op, _ in actions]
    return max(sum(changes[: end + 1]) for end in range(len(changes)))


def test_all_schedules_are_compared_on_one_model(tmp_path: Path):
    told = document("--compare", *SIZES, "--draw", tmp_path / "all.svg")
    assert [each["schedule"] for each in told["schedules"]] == list(names())
    assert told["refused"] == {}
    for each in told["schedules"]:
        assert each["work"] == pytest.approx([8 * 3.0] * 4), "the same work in each"
        assert each["n_stages"] * each["times"]["forward"] == pytest.approx(4)
    text = (tmp_path / "all.svg").read_text()
    assert all(f">{name}: 4 ranks" in text for name in names())


@pytest.mark.parametrize("column", ["bubble", "makespan", "memory", "name"])
def test_a_comparison_is_sorted_by_a_column(column: str):
    told = document("--compare", *SIZES, "--sort", column)["schedules"]
    of_column = {"bubble": "bubble_rate", "makespan": "makespan", "memory": "peak_memory_shares", "name": "schedule"}
    values = [each[of_column[column]] for each in told]
    values = [max(value) for value in values] if column == "memory" else values
    assert values == sorted(values)
    assert {each["schedule"] for each in told} == set(names())


def test_a_bubble_between_a_ranks_own_first_and_last_action_is_marked():
    lines = schedule("--compare", *SIZES).output.splitlines()
    rows = {line.split()[0]: line.split()[2:4] for line in lines if line.startswith(tuple(names()))}
    assert rows["zb-h2"] == ["0.0%*", "27"]
    assert rows["zb-h1"] == ["11.1%", "27"]
    assert "* between a rank's own first and last action; of the makespan: zb-h2 11.1%, auto 11.1%" in lines
    assert "11.1% of the makespan" in schedule("--schedule", "zb-h2", *SIZES).output


def test_a_comparison_says_what_cannot_be_built_and_why():
    result = schedule("--compare", "--pp", 3, "--microbatches", 6)
    assert result.exit_code == 0, result.output
    assert "not at these sizes" in result.output
    assert "dualpipe: pp=3 is odd" in result.output
    for name in names():
        assert name in result.output


def test_auto_keeps_its_limit():
    asked = ("--schedule", "auto", *SIZES, "--limit", 5)
    told = document(*asked)
    assert max(told["peak_memory"]) <= 5
    assert told["bubble_rate"] <= document("--schedule", "zb-h1", *SIZES)["bubble_rate"] + 1e-9
    assert max(document(*asked, "--kept-for-weight", 1)["peak_memory"]) <= 5


def test_the_share_that_waits_for_w_is_in_the_memory_of_every_schedule():
    whole = document("--schedule", "zb-h1", *SIZES, "--kept-for-weight", 1)
    assert (whole["peak_in_flight"], whole["peak_memory"]) == ([4, 3, 2, 1], [4.0] * 4)
    told = schedule("--schedule", "zb-h1", *SIZES, "--kept-for-weight", 0.5).output
    assert "memory: micro-batches in flight, and 0.5 for each between its I and its W" in told
    assert re.search(r"3 +3 +3F0 +3W7 .* 1 +2\.5\n", told)
    compared = document("--compare", *SIZES, "--kept-for-weight", 1)["schedules"]
    assert {each["kept_for_weight"] for each in compared} == {1}
    assert max(compared[-1]["peak_memory"]) <= 8


def test_auto_has_the_published_bubble_of_zb_2p():
    """Qi et al., arXiv 2401.10241, table 5, first row, by the command of the docs."""
    asked = ("--schedule", "auto", "--pp", 8, "--microbatches", 24, "--times", "18522,18086,9337", "--comm", 601)
    told = document(*asked, "--limit", 16)
    assert round(told["bubble_rate"], 4) == 0.0433
    assert round(document(*asked, "--kept-for-weight", 1)["bubble_rate"], 4) == 0.1015


def test_a_schedule_goes_through_csv(tmp_path: Path):
    path = tmp_path / "mine.csv"
    told = document("--schedule", "dualpipe-v", *SIZES, "--csv", path)
    assert path.read_text().splitlines() == [",".join(actions) for actions in told["actions"]]
    again = document("--read", path)
    assert again["schedule"] == "mine"
    assert {**again, "schedule": "dualpipe-v"} == told


def test_pictures_and_traces_are_written(tmp_path: Path):
    result = schedule("--schedule", "zb-h1", *SIZES, "--draw", tmp_path / "a.svg")
    assert f"written to {tmp_path / 'a.svg'}" in result.output
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    schedule("--schedule", "zb-h1", *SIZES, "--draw", tmp_path / "a.JSON")
    assert sum(each["ph"] == "X" for each in json.loads((tmp_path / "a.JSON").read_text())["traceEvents"]) == 96


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", *SIZES, "--sort", "makspan"], ["--sort makspan", "did you mean 'makespan'?"]),
        (["--schedule", "1f1b", *SIZES, "--sort", "name"], ["--sort goes with --compare"]),
        (["--schedule", "zb-h3", *SIZES], ["zb-h3", "did you mean 'zb-h2'?"]),
        (["--schedule", "xyz", *SIZES], ["'xyz'", "valid: 1f1b, afab, auto"]),
        (["--schedule", "1f1b", "--pp", 0, "--microbatches", 8], ["--pp 0", "1 or more"]),
        (["--schedule", "1f1b", "--pp", 4, "--microbatches", 0], ["--microbatches 0", "1 or more"]),
        (["--schedule", "1f1b", "--pp", 4], ["--microbatches is missing"]),
        (["--schedule", "dualpipe", "--pp", 3, "--microbatches", 8], ["pp=3 is odd", "nearest: 2 or 4", "dualpipe-v"]),
        (["--schedule", "1f1b", *SIZES, "--virtual-stages", 2], ["virtual_stages=2", "interleaved-1f1b"]),
        (["--schedule", "1f1b", *SIZES, "--times", "1,1"], ["--times 1,1", "three numbers", "F,I,W"]),
        (["--schedule", "1f1b", *SIZES, "--times", "1,one,1"], ["--times 1,one,1", "three numbers"]),
        (["--schedule", "1f1b", *SIZES, "--times", "1,-1,1"], ["--times 1,-1,1", "0 or more"]),
        (["--schedule", "1f1b", *SIZES, "--times", "1,nan,1"], ["--times 1,nan,1", "finite"]),
        (["--schedule", "1f1b", *SIZES, "--times", "0,0,0"], ["--times 0,0,0", "more than 0"]),
        (["--schedule", "1f1b", *SIZES, "--comm", "-1"], ["--comm -1", "0 or more"]),
        (["--schedule", "1f1b", *SIZES, "--limit", 3], ["--limit 3", "--schedule auto"]),
        (["--schedule", "auto", *SIZES, "--limit", 0], ["--limit 0", "1 or more"]),
        (["--schedule", "auto", *SIZES, "--kept-for-weight", 1.5], ["--kept-for-weight 1.5", "0 to 1"]),
        (["--schedule", "1f1b", *SIZES, "--kept-for-weight", "nan"], ["--kept-for-weight nan", "0 to 1"]),
        (["--schedule", "1f1b", *SIZES, "--draw", "a.png"], ["--draw a.png", "*.svg", "*.json"]),
        (["--schedule", "1f1b", *SIZES, "--draw", "no/such/a.svg"], ["no folder no/such", "make it first"]),
        (["--schedule", "1f1b", *SIZES, "--csv", "no/such/a.csv"], ["no folder no/such", "make it first"]),
        (["--schedule", "1f1b", "--compare", *SIZES], ["--schedule and --compare", "give one of"]),
        ([*SIZES], ["no schedule", "--compare", "--read"]),
        (["--compare", *SIZES, "--csv", "a.csv"], ["--csv", "--schedule"]),
        (["--read", "a.csv", "--pp", 4], ["--pp", "finds it in the file"]),
        (["--read", "absent.csv"], ["absent.csv"]),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments: list[object], said: list[str], tmp_path: Path):
    result = schedule(*arguments, columns=400)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.output.startswith("error: ")
    for part in said:
        assert part in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0F0,0B0\n1F0,1Q0\n", ["row 2 (rank 1), column 2", "'1Q0'", "F, B, I, W"]),
        ("0F0,0B0\n1B0,1F0\n", ["rank 1, position 0", "1B0 comes before its forward 1F0"]),
        ("0F0,0B0\n1F0\n", ["stage 1", "no backward pass"]),
        ("0F0,0I0\n1F0,1B0\n", ["stage 0", "I without W"]),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", ["rank 0", "wait for one another"]),
        ("0F0,0B9999999\n", ["2 actions", "10000000 microbatches", "(9999999) a mistake?"]),
        ("", ["is empty"]),
    ],
)
def test_a_csv_that_cannot_be_run_is_refused_with_the_place(rows: str, said: list[str], tmp_path: Path):
    path = tmp_path / "impossible.csv"
    path.write_text(rows)
    result = schedule("--read", path, columns=400)
    assert result.exit_code == 2, result.output
    assert all(line.startswith(f"error: {path}") for line in result.output.splitlines())
    for part in said:
        assert part in result.output


def test_help_and_a_picture_need_neither_torch_nor_matplotlib(tmp_path: Path):
    code = (
        "import sys; from typer.testing import CliRunner; from shardwright.cli.main import app\n"
        "assert CliRunner().invoke(app, ['schedule', '--help']).exit_code == 0\n"
        "arguments = ['schedule', '--schedule', '1f1b', '--pp', '2', '--microbatches', '2', '--draw', sys.argv[1]]\n"
        "made = CliRunner().invoke(app, arguments)\n"
        "assert made.exit_code == 0, made.output\n"
        "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.svg")], timeout=60).returncode == 0


DOCS = Path(__file__).parents[2] / "docs"
DRAWN = {name: ["--schedule", name] for name in names()}
DRAWN |= {name: ["--schedule", name, "--times", "0.5,0.5,0.5"] for name in HALVES}
DRAWN["auto"] += ["--times", "1,1.4,0.6", "--comm", "0.2", "--limit", "6"]
DRAWN["all"] = ["--compare", "--times", "1,1.2,0.8", "--comm", "0.1"]


@pytest.mark.parametrize("name", DRAWN)
def test_the_pictures_of_the_docs_are_what_the_commands_there_draw(name: str, tmp_path: Path):
    assert schedule(*SIZES, *DRAWN[name], "--draw", tmp_path / "a.svg").exit_code == 0
    drawn = (DOCS / f"schedule-{name}.svg").read_text()
    assert drawn == (tmp_path / "a.svg").read_text(), "run the commands of docs/schedules.md"


def test_the_tables_of_the_docs_are_what_the_commands_there_print():
    page = [line.rstrip() for line in (DOCS / "schedules.md").read_text().splitlines()]
    compared = ("--compare", "--pp", "8", "--microbatches", "32")
    for arguments in (
        ("--schedule", "zb-h1", *SIZES),
        compared,
        (*compared, "--times", "1,1.2,0.8", "--comm", "0.1"),
    ):
        told = [line.rstrip() for line in schedule(*arguments).output.splitlines()]
        rows = told[told.index(next(line for line in told if line.startswith(("rank ", "schedule ")))) :]
        rows = list(takewhile(lambda line: line and not line.startswith("*"), rows))
        assert len(rows) > 3
        starts = [at for at, line in enumerate(page) if line == rows[0] and page[at : at + len(rows)] == rows]
        assert starts, "\n".join(["docs/schedules.md does not show:", *rows])


def test_the_page_of_a_schedule_has_its_picture_and_its_table(tmp_path: Path):
    page = tmp_path / "schedule.html"
    result = schedule("--schedule", "zb-h1", *SIZES, "--html", page)
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"written to {page}\n")
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "2.125" in text  # the memory of the last rank
    wrong = schedule("--compare", *SIZES, "--html", tmp_path / "all.txt")
    assert (wrong.exit_code, "--html" in wrong.output) == (2, True)
