"""Proves that the picture of a run is drawn for every kind of run, says what the records say, and leaves nothing
behind in matplotlib."""

import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwright.report.curves import curves_svg, draw_curves
from shardwright.report.panel import POINTS, TIMES, running_mean, thinned, window
from shardwright.report.run_record import RunRecord, read_run
from shardwright.report.run_view import run_document
from shardwright.system.errors import InputError
from tests.function_calls import calls
from tests.report.runs import evaluation, moe_record, started, train_record, usual, write_run


def texts(svg: str) -> list[str]:
    """Every piece of text in an SVG file, which must be well-formed."""
    tag = "{http://www.w3.org/2000/svg}text"
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(tag)]


def without_a_warning(run: RunRecord) -> str:
    """The picture of a run. Only what is warned of here counts: garbage of other tests may be collected meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return curves_svg(run)


def test_a_picture_is_drawn_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    run = read_run(usual(tmp_path))
    draw_curves(run, tmp_path / "curves.png")
    draw_curves(run, tmp_path / "new folder" / "curves.SVG")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    words = texts((tmp_path / "new folder" / "curves.SVG").read_text())
    assert "debug, 250K parameters, on 2 ranks with ZeRO-3" in words
    assert not list(tmp_path.glob("**/*.tmp"))


def test_every_panel_says_what_the_records_say(tmp_path: Path) -> None:
    words = texts(curves_svg(read_run(usual(tmp_path))))
    assert {"step", "tokens", "Gradient norm", "Tokens per second"} <= set(words)
    assert "training: 5.80 to 5.00" in words
    assert "validation: 6.20 to 5.10" in words
    assert "clipped at 1: 0 of 5 records" in words
    assert "median 1K" in words
    assert {"data 6.2%", "fwd + bwd 78%", "optimizer 16%"} <= set(words)


def test_the_load_of_experts_has_a_panel_where_there_are_some(tmp_path: Path) -> None:
    balanced = write_run(tmp_path / "balanced", [moe_record(step) for step in (10, 20, 50)])
    words = texts(curves_svg(read_run(balanced)))
    assert f"Busiest expert, {TIMES} mean" in words
    assert {"2 layers: at the end 1.1 to 1.2", "their mean: 1.75 to 1.15"} <= set(words)
    assert not [text for text in words if "Dropped" in text]
    assert not [text for text in texts(curves_svg(read_run(usual(tmp_path / "dense")))) if "xpert" in text]


def test_what_is_dropped_has_a_panel_where_capacity_is_limited(tmp_path: Path) -> None:
    records = [moe_record(10, dropped_fraction=0.25), moe_record(20, dropped_fraction=0.05)]
    words = texts(curves_svg(read_run(write_run(tmp_path, records))))
    assert {
        f"Busiest expert, {TIMES} mean",
        "Dropped pairs of token and expert",
        "2 layers",
        "mean: 1.75 to 1.38",
        "25.0 to 5.00%",
    } <= set(words)


ODD_RUNS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "one record": ([train_record(10)], "training: 5.80"),
    "one step": ([train_record(1)], "training: 5.98"),
    "evaluation before any step": ([evaluation(0, 6.0)], "no step has been logged"),
    "some losses not finite": (
        [train_record(10), train_record(20, loss=math.nan, grad_norm=math.inf), evaluation(20, -math.inf)],
        "not finite: 2 of 3 records, first at step 20",
    ),
    "no loss finite": ([train_record(10, loss=math.nan, grad_norm=math.nan)], "no finite loss was logged"),
    "a loss that explodes": ([train_record(10), train_record(20, loss=1e30)], "training: 5.80 to 1.00e+30"),
    "a gradient of zero": ([train_record(10, grad_norm=0.0, lr=0.0, loss=0.0)], "training: 0.00"),
    "a clock that saw nothing": (
        [train_record(10, step_s=0.0, data_s=0.0, forward_backward_s=0.0, optimizer_s=0.0)],
        "median 1K",
    ),
    "memory that grows": (
        [train_record(step, memory_bytes=step * 2**20) for step in range(10, 50, 10)],
        "training: 5.80 to 5.20",
    ),
    "one layer with experts": (
        [train_record(10, load_max_over_mean=1.5, load_entropy=0.9, load_by_layer=[1.5], dropped_fraction=0.0)],
        "one layer: 1.50",
    ),
    "an even load": ([moe_record(10**9)], "their mean: 1.00"),
    "no token counted": (
        [train_record(10, load_max_over_mean=math.nan, load_entropy=math.nan, load_by_layer=[math.nan] * 2)],
        "training: 5.80",
    ),
    "a known peak": ([train_record(10, mfu=0.412)], "median 1K, MFU 41.2%"),
}


@pytest.mark.parametrize("name", ODD_RUNS)
def test_an_odd_run_is_drawn_without_a_warning(name: str, tmp_path: Path) -> None:
    records, expected = ODD_RUNS[name]
    assert expected in texts(without_a_warning(read_run(write_run(tmp_path, records))))


def test_a_long_run_is_drawn_with_means_and_stays_small(tmp_path: Path) -> None:
    records = [train_record(step, loss=3 + math.sin(step), lr=1e-3 / step) for step in range(10, 50_010, 10)]
    svg = without_a_warning(read_run(write_run(tmp_path, records)))
    assert any(text.startswith("training, mean of 125 records") for text in texts(svg))
    assert len(svg) < 1_500_000


def test_a_thinned_curve_keeps_every_extreme_both_ends_and_the_gaps() -> None:
    random = Random(1)
    values = [random.gauss(3, 0.1) for _ in range(54_321)]
    values[777], values[40_000] = 90.0, -5.0
    values[1000:1400] = [math.nan] * 400
    steps, drawn = thinned(range(len(values)), values)
    assert len(steps) <= POINTS
    assert steps == sorted(steps)
    assert (steps[0] < 60, steps[-1] > 54_260) == (True, True)
    assert all(drawn[at] == values[step] or math.isnan(drawn[at]) for at, step in enumerate(steps))
    finite = [value for value in drawn if math.isfinite(value)]
    assert (max(finite), min(finite)) == (90, -5)
    assert len(finite) < len(drawn)


def test_the_running_mean_is_that_of_the_values_around_also_after_a_huge_one() -> None:
    random = Random(2)
    values = [random.gauss(3, 0.1) for _ in range(5000)]
    values[10], values[11] = 1e30, math.inf
    steps, means = running_mean(range(5000), values)
    assert (len(steps), steps[0], steps[-1]) == (POINTS, 0, 4999)
    for at, mean in zip(steps, means, strict=True):
        half = min(window(values) // 2, at)
        around = [value for value in values[at - half : at + half + 1] if math.isfinite(value)]
        assert mean == pytest.approx(sum(around) / len(around)) if math.isfinite(values[at]) else math.isnan(mean)


def test_the_work_of_a_page_grows_with_the_records_and_not_with_their_square(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / str(n), [train_record(step) for step in range(1, n + 1)])) for n in (5000, 10_000)
    ]
    curves_svg(runs[0])
    few, many = (calls(lambda run=run: curves_svg(run)) for run in runs)
    assert many < 2.1 * few


class CountedRecords(tuple[Any, ...]):
    """Train records that count the passes over them."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


def test_the_records_are_passed_over_as_often_with_many_starts_as_with_few(tmp_path: Path) -> None:
    passes = []
    for n in (3, 60):
        records = [record for at in range(n) for record in (started(at, keys=f"zero {at % 2}"), train_record(at + 1))]
        run = read_run(write_run(tmp_path / str(n), records))
        counted = CountedRecords(run.train)
        run_document(replace(run, train=counted), {})
        passes.append(counted.passes)
    assert passes[0] == passes[1]


def test_the_load_of_a_long_run_is_drawn_with_means(tmp_path: Path) -> None:
    svg = without_a_warning(read_run(write_run(tmp_path, [moe_record(step) for step in range(10, 10_010, 10)])))
    assert any(text.startswith("their mean, mean of 25 records: 1.75 to") for text in texts(svg))


def test_memory_that_grows_is_told(tmp_path: Path) -> None:
    records, _ = ODD_RUNS["memory that grows"]
    draw_curves(read_run(write_run(tmp_path, records)), tmp_path / "curves.svg")
    assert "memory 20 MiB rising to 40 MiB" in (tmp_path / "curves.svg").read_text()


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    run = read_run(usual(tmp_path))
    assert curves_svg(run) == curves_svg(run)


def test_another_suffix_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"curves\.pdf: valid: a file named \*\.png or \*\.svg"):
        draw_curves(read_run(usual(tmp_path)), tmp_path / "curves.pdf")
    assert not (tmp_path / "curves.pdf").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = read_run(usual(tmp_path))
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(InputError, match=r"taken\.png: that is a folder; name a file in it"):
        draw_curves(run, tmp_path / "taken.png")
    with pytest.raises(InputError, match="cannot be written"):
        draw_curves(run, tmp_path / "run.toml" / "curves.png")


def test_drawing_leaves_pyplot_and_the_users_settings_alone(tmp_path: Path) -> None:
    usual(tmp_path)
    code = f"""
import sys, matplotlib
matplotlib.rcParams["font.size"] = 31
from shardwright.report.curves import draw_curves
from shardwright.report.panel import TIMES
from shardwright.report.run_record import RunRecord, read_run
draw_curves(read_run({str(tmp_path)!r}), {str(tmp_path / "a.png")!r})
print(matplotlib.rcParams["font.size"], "matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["31.0", "False"]
