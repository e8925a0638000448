"""Proves that the page of `verify` has the verdict, what is not equal, and the errors by layer and step."""

import math
import re

import pytest

from shardwright.layout.layout import Layout
from shardwright.verification import Case, Report, ReportRow
from shardwright.verification.pictures import CLASSES, ROLES, cells_by_panel, class_of, errors_svg, in_order, short
from shardwright.verification.trace import TracedQuantity
from shardwright.verification.view import matrix_document, report_document
from shardwright.view.html import page
from shardwright.view.style import COLOURS
from tests.report.pictures import assert_page_never_scrolls, readable_pictures
from tests.training.worlds import CASE

LAYOUT = Layout(tp=2, dp_shard=2)


def row(kind: str, step: int, name: str, excess: float, training: str = "plain sgd") -> ReportRow:
    return ReportRow(TracedQuantity(kind, training, step), name, excess * 1e-10, 1e-10, "float64: rounding")


def report(*rows: ReportRow, case: Case = CASE, **more: object) -> Report:
    return Report(case, LAYOUT, "one process", list(rows), 4, **more)  # type: ignore[arg-type]


WRONG = report(
    row("loss", 1, "", 1e-6),
    row("initial", 0, "embedding.weight", 0.0),
    row("gradient", 1, "embedding.weight", 2e-5),
    row("gradient", 1, "layers.0.ffn.up.weight", 3e-6),
    row("gradient", 1, "layers.0.ffn_norm.weight", 7e9),
    row("gradient", 1, "layers.10.ffn_norm.weight", 40.0),
    row("gradient", 2, "layers.2.ffn_norm.weight", math.nan),
    row("gradient", 1, "head.weight", 0.3, "adamw"),
    row("parameter", 2, "norm.weight", 0.5),
    differing=["gradient <a>, plain sgd, step 1: not the same bits on ranks 0 | 1"],
    culprit="the smallest layout that still differs: tp 2 (2 ranks)",
)


def checked(text: str) -> str:
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"|<script', text) == [], "it needs nothing else"
    return text


def test_a_page_has_the_verdict_the_culprit_and_what_is_not_equal(monkeypatch: pytest.MonkeyPatch):
    with readable_pictures(monkeypatch):
        text = checked(page(report_document(WRONG, ["2 layers & 3 steps"])))
    assert_page_never_scrolls(text)
    assert "<h1>tp 2, dp_shard 2, zero 3: not equal</h1>" in text
    assert "culprit: the smallest layout that still differs: tp 2 (2 ranks)</p>" in text
    assert "2 layers &amp; 3 steps" in text
    assert "layers.0.ffn_norm.weight" in text
    assert "7e9" in text
    assert "float64: rounding" in text
    assert "gradient &lt;a&gt;, plain sgd, step 1: not the same bits on ranks 0 | 1" in text
    assert '<dd class="bad">3<small>of 9 losses' in text, "three rows are not equal"
    for at in range(len(CLASSES)):
        assert f"var(--error-{at})" in text, "every class of errors is in the key, in a colour of the page's roles"


def test_a_page_of_a_layout_that_is_equal_says_so():
    text = checked(page(report_document(report(row("gradient", 1, "norm.weight", 1e-5)), ["2 layers"])))
    assert "zero 3: equal</h1>" in text
    assert "the same bits on all ranks that hold them" in text
    assert "culprit" not in text


def test_a_page_of_a_matrix_has_a_line_for_each_layout():
    crash = report(crash="rank 1 failed: TypeError: <a>\nmore")
    equal = report(row("loss", 1, "", 1e-6))
    left_out = [(equal.layout, "2 heads")]
    text = checked(page(matrix_document([equal, WRONG, crash], "run.toml: layouts of 4 ranks", left_out)))
    assert f"{equal.layout}: 2 heads" in text
    rows = re.findall(r"<tr>.*?</tr>", text)
    assert len(rows) == 4, "a heading and three layouts"
    assert '<td class="left">equal</td>' in rows[1]
    assert '<td class="left long">loss</td>' in rows[1]
    assert "not equal" in rows[2]
    assert "1 differ" in rows[2]
    assert "rank 1 failed: TypeError: &lt;a&gt;</td>" in rows[3]


def test_a_cell_is_the_largest_error_of_a_layer_in_a_step():
    panels = cells_by_panel(WRONG.rows)
    assert list(panels) == ["gradient, plain sgd", "gradient, adamw", "parameter, plain sgd"]
    assert panels["gradient, plain sgd"][("layer 0", 1)] == pytest.approx(7e9)
    assert panels["gradient, plain sgd"][("layer 2", 2)] == math.inf
    assert panels["parameter, plain sgd"] == {("embedding", 0): 0.0, ("norm", 2): pytest.approx(0.5)}


def test_layers_are_in_the_order_of_the_forward_pass():
    some = ["norm", "layer 10", "head", "embedding", "layer 2", "position_embedding", "mine"]
    assert in_order(some) == ["embedding", "position_embedding", "layer 2", "layer 10", "mine", "norm", "head"]


@pytest.mark.parametrize(
    ("excess", "at"), [(0.0, 0), (1e-3, 0), (0.5, 1), (1.0, 1), (1.01, 2), (1e4, 3), (math.inf, 3)]
)
def test_the_colour_tells_what_is_equal(excess: float, at: int):
    assert class_of(excess) == at
    assert (CLASSES[at].most <= 1) == (excess <= 1)


def test_no_colour_is_that_of_another_role():
    colours = [*COLOURS.values(), *ROLES[0].values()]
    assert len(set(colours)) == len(colours)


def test_a_number_in_a_cell_is_short():
    numbers = (0.0, 2.2e-5, 0.31, 4.4, 38.0, 5.2e9, math.inf)
    assert [short(number) for number in numbers] == ["0", "2e-5", "0.3", "4", "38", "5e9", "inf"]


def test_many_layers_and_steps_are_drawn_without_numbers_in_the_cells():
    many = [row("gradient", step, f"layers.{layer}.a.weight", 0.1) for layer in range(130) for step in range(1, 40)]
    svg = errors_svg(many)
    assert "layer 0<" in svg
    assert ">0.1<" not in svg
