"""Proves that the page of a run is sound HTML which needs nothing but itself, and shows text as text."""

import math
import re
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwright.config import parse, resolved_toml
from shardwright.report import run_view
from shardwright.report.headline import SEGMENTS_SHOWN, SourceNumbers, headline
from shardwright.report.ranks import ratios_of
from shardwright.report.run_record import RunRecord, read_run
from shardwright.report.run_view import run_document
from shardwright.runs.folder import checkpoint_name
from shardwright.runs.records import EventRecord, append_event
from shardwright.system.errors import InputError
from shardwright.view import html as html_pages
from shardwright.view.style import COLOURS, DARK_COLOURS
from tests.report.pictures import assert_page_never_scrolls, readable_pictures
from tests.report.runs import PIPELINE, evaluation, moe_record, started, train_record, usual, usual_pipeline, write_run

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order, and every id is there once."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        ids = [value for name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def write_page(run: RunRecord, path: Path) -> None:
    html_pages.write_page(run_document(run, {}), path)


def page_of(folder: Path) -> tuple[str, Page]:
    write_page(read_run(folder), folder / "report.html")
    html = (folder / "report.html").read_text(encoding="utf-8")
    return html, Page(html)


def test_a_page_is_sound_html_with_numbers_curves_layout_and_run_file(tmp_path: Path) -> None:
    _, page = page_of(usual(tmp_path))
    text = " ".join(page.text)
    assert page.tags.count("svg") == 1
    assert "from 6.2000, 82% of it" in text
    assert "1 MiB" in text
    assert "4 sequences of 16 tokens: 2 data ranks x 2 micro-batches x 1" in text
    assert "Starts" not in text
    assert (tmp_path / "run.toml").read_text() in text
    assert "step-00000020" in text
    assert f"shardwright train {tmp_path}/run.toml --resume" in text


def test_a_page_says_where_when_and_with_what_a_run_was_started_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = started(10, "1 rank", "one rank") | {"lr_schedule": "cosine over 20 steps, 6 of warm-up"}
    records = [started(0), train_record(10), resumed, train_record(20, tokens_per_s=9e3)]
    with readable_pictures(monkeypatch):
        html, page = page_of(write_run(tmp_path, records, "layout.dp_shard=1", "steps=20"))
    assert_page_never_scrolls(html)
    text = " ".join(page.text)
    newest = "2026-11-11 10:52 UTC, 1 x NVIDIA H200 on node7; torch 2.13.0, shardwright 0.1.0, git commit 0123456789ab"
    assert newest in text
    assert re.findall(r"<td[^>]*>([^<]*)</td>", html)[:11] == [
        *("1 to 10", "2 ranks with ZeRO-3", "1K", "2026-11-01 10:52 UTC", "node7", "NVIDIA H200", "0123456789ab"),
        *("11 to 20", "1 rank", "9K", "2026-11-11 10:52 UTC"),
    ]
    assert re.search(r"from step 11: cosine\s+over\s+20 steps, 6 of warm-up", text)


def test_a_page_has_the_newest_of_many_events_starts_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "MOST_ROWS", 20)
    n = 25
    records = [record for at in range(n) for record in (started(at, keys=f"zero {at % 2}"), train_record(at + 1))]
    folder = write_run(tmp_path, records)
    for step in range(n):
        append_event(folder, EventRecord("skip", step, f"skipped step {step}"))
        (folder / "checkpoints" / checkpoint_name(step)).mkdir(parents=True)
    _, page = page_of(folder)
    text = "".join(page.text)
    for place in ("metrics.jsonl", "events.jsonl", "checkpoints"):
        assert f"The newest 20 of {n}; all of them are in {place}." in text
    shown = re.findall(r"skipped step (\d+)", "\n".join(page.text))
    assert list(map(int, shown[1:])) == list(range(5, n))
    assert page.tags.count("tr") < 4 * 20
    speeds = [fact for fact in headline(read_run(folder)).facts() if fact.name == "tokens per second"]
    assert len(speeds) == SEGMENTS_SHOWN


def test_a_pipeline_is_drawn_as_planned_and_as_measured(tmp_path: Path) -> None:
    html, page = page_of(usual_pipeline(tmp_path))
    text = " ".join(page.text)
    assert page.tags.count("svg") == 2
    assert text.index("Planned: 1f1b, 2 ranks, 4 micro-batches") < text.index("Measured: step 50")
    assert "In step 50 the ranks did nothing for 29.4% of the time" in text
    assert "leaves 20.0%" in text
    assert re.findall(r"<td[^>]*>([^<]*)</td>", html)[:5] == ["0", "12,000.0", "20.0%", "29.4%", "2"]
    assert "partitioned into 2 stages; the schedule is 1f1b" in text
    assert "Each rank holds the layers of its stages" in text
    assert "clocks" not in text


def test_a_pipeline_that_was_not_recorded_yet_is_no_error(tmp_path: Path) -> None:
    _, page = page_of(write_run(tmp_path, [train_record(10)], *PIPELINE))
    assert "No step has been recorded by all 2 ranks of the pipeline yet" in " ".join(page.text)
    assert page.tags.count("svg") == 1


def test_a_page_says_how_even_the_load_of_experts_is(tmp_path: Path) -> None:
    record = moe_record(50, dropped_fraction=0.012, expert_sent_bytes=3 * 2**20)
    text = " ".join(" ".join(page_of(write_run(tmp_path / "moe", [record]))[1].text).split())
    assert "load of experts 1.15 times the mean for the busiest expert; worst layer 1.20; dropped 1.2%" in text
    assert "3 MiB a step, by rank 0" in text
    assert "entropy of the load 0.900" in text
    assert "load of experts" not in " ".join(page_of(usual(tmp_path / "dense"))[1].text)


EXPERTS = (
    "model.n_layers=2",
    "model.n_heads=4",
    "model.d_model=32",
    "model.vocab_size=64",
    "model.moe.n_experts=4",
    "model.moe.top_k=2",
    "model.moe.d_ffn=16",
    "model.moe.first_dense=0",
)


def test_a_page_names_experts_that_have_collapsed(tmp_path: Path) -> None:
    even, idle, other = [30, 30, 30, 38], [60, 1, 2, 65], [60, 40, 2, 26]
    alike = {"router_similarity_by_layer": [0.3, 0.97]}
    records = [moe_record(step, tokens_by_expert=[even, idle], **alike) for step in (10, 20, 30, 40)]
    last = {name: moe_record(50, tokens_by_expert=[even, load]) for name, load in (("idle", idle), ("other", other))}
    found = {
        name: " ".join(" ".join(page_of(write_run(tmp_path / name, each, *EXPERTS))[1].text).split())
        for name, each in {
            "idle": [*records, last["idle"]],
            "other": [*records, last["other"]],
            "few": records,
        }.items()
    }
    rest = "with less than 10% of the mean load in the last 5 records: layer 1:"
    assert f"collapsed experts 2 {rest} 1, 2" in found["idle"]
    assert f"collapsed experts 1 {rest} 2" in found["other"]
    assert "collapsed experts" not in found["few"]
    said = "similarity of routing 0.970 the largest cosine of two experts' rows of a router; their logits are nearly"
    assert said in found["few"].replace("&#39;", "'")
    assert "similarity of" not in found["idle"]


def test_a_page_names_experts_whose_weights_are_alike(tmp_path: Path) -> None:
    similar = {"expert_similarity_by_layer": [0.21, 0.991], "most_similar_experts": [[0, 2], [1, 3]]}
    records = [moe_record(50), evaluation(50, 2.0) | similar]
    found = " ".join(" ".join(page_of(write_run(tmp_path / "alike", records, *EXPERTS))[1].text).split())
    said = (
        "similarity of experts 0.991 the largest cosine of two experts' weights, at the last evaluation; above 0.95: "
    )
    assert f"{said}layer 1: 1 and 3" in found.replace("&#39;", "'")


def test_a_page_without_a_pipeline_does_not_speak_of_one(tmp_path: Path) -> None:
    folder = usual(tmp_path / "run")
    html = page_of(folder)[0].replace(str(folder), "")
    assert "ipeline" not in re.sub("<style>.*?</style>|<pre.*?</pre>", "", html, flags=re.DOTALL)


@pytest.mark.parametrize("folder_of", [usual, usual_pipeline])
def test_a_page_asks_for_nothing_outside_itself(folder_of: Callable[[Path], Path], tmp_path: Path) -> None:
    html, page = page_of(folder_of(tmp_path))
    assert not {"script", "link", "img", "iframe", "image", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert all(link.startswith("#") for link in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", html))
    assert "@import" not in html
    assert "http" not in html.lower()


def test_what_the_user_named_is_shown_as_text(tmp_path: Path) -> None:
    name = "<b>&\"'</b><script>alert(1)</script>$x$"
    folder = usual(tmp_path / name.replace("/", "-"))
    write_run(folder, [evaluation(0, 6.0)], f"data.path={name}")
    _, page = page_of(folder)
    assert not {"script", "b"} & set(page.tags)
    assert name in "".join(page.text).replace('\\"', '"')


def test_every_colour_of_the_curves_follows_the_screen(tmp_path: Path) -> None:
    html, _ = page_of(usual(tmp_path))
    assert COLOURS.keys() == DARK_COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert "@media screen and (prefers-color-scheme: dark)" in html
    picture = html[html.index("<svg") : html.index("</svg>")]
    assert not re.findall(r"#[0-9a-f]{6}\b(?!\w)", picture.replace('href="#', "").replace("url(#", ""))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([train_record(10)], "None has been saved."),
        ([evaluation(0, 6.0)], "None has been saved."),
        ([train_record(10, loss=float("nan"))], "The loss is not finite at step 10."),
        ([evaluation(100, 5.0)], "Logged every 10 steps"),
    ],
)
def test_an_odd_run_has_a_page_too(tmp_path: Path, records: list[dict[str, object]], expected: str) -> None:
    _, page = page_of(write_run(tmp_path, records))
    assert expected in " ".join(page.text)


def test_a_page_that_cannot_be_written_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = read_run(usual(tmp_path / "run"))
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(InputError, match=r"taken\.html: that is a folder; name a file in it"):
        write_page(run, tmp_path / "taken.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken.html"]


def test_a_page_has_a_row_for_each_source_of_a_mixture(tmp_path: Path) -> None:
    mixed = [
        'data={"sources" = [{path = "d/web", weight = 3}, {path = "d/code", weight = 1}], "stages" = [{from_step = 20, '
        "weights = {code = 1}}]}"
    ]
    losses = [{"web": 6.0, "code": 7.0}, {"web": 5.0, "code": 4.5}]
    records = [
        evaluation(0, 6.25) | {"sources": losses[0]},
        train_record(10, epochs={"web": 0.5, "code": 0.125}),
        evaluation(50, 4.5) | {"sources": losses[1]},
    ]
    folder = write_run(tmp_path / "run", records)
    run_file = (folder / "run.toml").read_text()
    config = parse({**tomllib.loads(run_file), "data": {}}, mixed)
    (folder / "run.toml").write_text(resolved_toml(config))
    web, code = headline(read_run(folder)).sources
    assert web == SourceNumbers("web", (0.75, 0.0), 0.5, 6.0, 5.0)
    assert code == SourceNumbers("code", (0.25, 1.0), 0.125, 7.0, 4.5)
    write_page(read_run(folder), tmp_path / "page.html")
    text = " ".join(Page((tmp_path / "page.html").read_text()).text)
    for said in ("source code", "0.125", "epochs; share 25%, then 100%; validation loss 4.5000 from 7.0000"):
        assert said in text


def test_a_run_over_one_folder_has_no_rows_of_sources(tmp_path: Path) -> None:
    told = headline(read_run(usual(tmp_path / "run")))
    assert told.sources == ()
    assert not [fact.name for fact in told.facts() if fact.name.startswith("source")]


def test_the_time_of_each_rank_is_drawn_with_the_stragglers(tmp_path: Path) -> None:
    """Two ranks, then three; rank 1 takes 1.3 times as long as rank 0 from step 20 on."""
    ranks = [(0.04, 0.04), (0.04, 0.052), (0.04, 0.052, 0.04)]
    records = [
        train_record(
            10 * at, own_s_by_rank=own_s, slowest_rank=1, slowest_costs_s=own_s[1] - 0.04, stragglers=[1][: at // 3]
        )
        for at, own_s in enumerate(ranks, 1)
    ]
    run = read_run(write_run(tmp_path, records))
    edges, ratios = ratios_of(run)
    assert edges == [0, 10, 20, 30]
    assert ratios[0][:2] == [1.0, 1.0]
    assert math.isnan(ratios[0][2])
    assert [ratios[2][rank] for rank in range(3)] == pytest.approx([1.0, 1.3, 1.0])
    write_page(run, tmp_path / "page.html")
    Page((tmp_path / "page.html").read_text())
    page = " ".join((tmp_path / "page.html").read_text().split())
    assert "Stragglers: 1; the events say when." in page
    assert "most often rank 1 (3 of 3), takes longer than the median of its peers by 12% of the time in steps" in page
    assert 'aria-labelledby="ranks"' in page
    alone = read_run(write_run(tmp_path / "alone", [train_record(10)]))
    write_page(alone, tmp_path / "alone.html")
    assert "<h2>Ranks" not in (tmp_path / "alone.html").read_text()
