import random
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from math import ceil, log2
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwright.cli.main import OF_TWO_WORDS, VERBS
from shardwright.explore.learn import TOPICS, charts, learn_page, write_static
from shardwright.explore.learn.page import drawings
from shardwright.explore.learn.topics import ALL_TOPICS, ledger_of, matching, tried
from shardwright.explore.page import style
from shardwright.explore.state import PAGES, PageState, parse, query_of
from shardwright.planner.explain import explain, number
from shardwright.split.sequence import spans
from shardwright.system.errors import InputError
from shardwright.system.units import format_bytes
from tests.marks import prove, rest_prove

DENSE = "model=llama-3.1-8b&chip=h100&count=64&tp=4&pp=2&cp=2&zero=3&global_batch=512&recompute=selective"
MIXTURE = "model=qwen3-30b-a3b&chip=h100&count=32&ep=8&zero=2&global_batch=64&seq_len=4096&recompute=selective"
LARGE = (
    "model=llama-3.1-405b&chip=h100&count=16384&tp=8&pp=16&zero=1&global_batch=2048&recompute=selective"
    "&pp_schedule=interleaved-1f1b"
)
SYSTEMS = {
    "data-parallel": ("DDP", "ZeRO", "FSDP", "HSDP", "Gradient accumulation", "bucket"),
    "tensor-parallel": ("column-parallel", "row-parallel", "sequence parallelism", "vocabulary"),
    "context-parallel": ("ring attention", "Zigzag", "Ulysses", "USP", "allgather", "online softmax"),
    "pipeline-parallel": ("afab", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "DualPipe"),
    "expert-parallel": ("router", "dispatch", "capacity factor", "balance loss", "z-loss", "Node-limited", "grouped"),
    "recomputation": ("selective", "full", "HFU"),
    "mixed-precision": ("master weights", "loss scale", "fp8", "bf16"),
    "compression": ("int8", "powersgd", "error feedback", "top-k", "in transit"),
    "optimizers": ("adamw-8bit", "Adafactor", "Muon"),
    "offload": ("ZeRO-Offload", "ZeRO-Infinity", "disk"),
    "collectives": ("reduce-scatter", "all-gather", "all-reduce", "all-to-all", "ring"),
    "topology": ("NVLink", "InfiniBand", "RoCE", "PCIe", "All axes"),
    "memory": ("gradients", "optimizer states", "activations", "peak"),
    "throughput": ("FLOPs", "MFU", "days", "tokens/s"),
    "strategy": ("sequences", "fits", "plan"),
    "monitoring": ("loss of each rank", "gradient norm", "learning rate", "TensorBoard", "W&B", "data"),
    "faults": ("checkpoints", "restart", "hang", "straggler", "spike", "rolled back"),
    "inference": ("Prefill", "Decode", "cache", "Speculative decoding", "vLLM"),
    "ways-in": ("Hugging Face", "tokenizer", "torchrun", "Slurm", "DCP"),
}
STYLE = style() + (PAGES / "learn.css").read_text(encoding="utf-8")


def state_of(query: str) -> PageState:
    found = parse(query)
    assert found.state is not None, found.problems
    return found.state


def greatest(*values: float | tuple[float, ...]) -> float:
    """Return the largest number; of the stages of a rank, of one too."""
    return max(number for value in values for number in (value if isinstance(value, tuple) else (value,)))


def whole(values: float | tuple[float, ...]) -> float:
    """Return the sum over the stages of a rank, or its one stage."""
    return sum(values) if isinstance(values, tuple) else values


FUNCTIONS = {"max": greatest, "sum": whole, "min": min, "ceil": ceil, "log2": log2}


@cache
def page_of(topic: str) -> str:
    return learn_page(topic, state_of(DENSE))


EVERY = rest_prove(TOPICS, "data-parallel", "expert-parallel", "inference")


def words_of(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def check(page: str) -> ElementTree.Element:
    """Parse a page; every figure has a title and a text, ids are unique, and the policy of the server is kept."""
    root = ElementTree.fromstring(page)
    ids = [each.get("id") for each in root.iter() if each.get("id")]
    assert len(ids) == len(set(ids))
    for svg in root.iter("svg"):
        if svg.get("aria-hidden"):
            continue
        assert svg.get("role") == "img"
        titles = [(each.text or "").strip() for each in svg if each.tag in ("title", "desc")]
        assert svg.get("aria-label") or (titles and all(titles))
        for moving in ("animateMotion", "animate"):
            for parent in svg.iter():
                if parent.find(moving) is not None:
                    assert "moves" in (parent.get("class") or "").split()
    for element in root.iter():
        assert element.tag not in ("script", "style", "link", "iframe", "object", "img")
        assert not [name for name in element.attrib if name == "style" or name.startswith("on")]
        assert not (element.get("href") or "").startswith(("http:", "https:", "//", "javascript:", "data:"))
        assert "NaN" not in "".join(element.attrib.values())
    assert len(page) < 120_000
    return root


def test_every_topic_names_systems() -> None:
    assert set(SYSTEMS) == set(TOPICS)


@pytest.mark.parametrize("topic", EVERY)
def test_a_page_names_its_systems_and_is_well_formed_without_script(topic: str) -> None:
    root = check(page_of(topic))
    text = words_of(root).lower()
    assert [name for name in SYSTEMS[topic] if name.lower() not in text] == []
    assert root.find(".//svg") is not None
    assert len(root.findall(".//section[@class='question']")) >= (1 if topic == "ways-in" else 2)


@pytest.mark.parametrize("topic", EVERY)
def test_numbers_of_formulas_equal_the_ledger(topic: str) -> None:
    shown = ALL_TOPICS[topic].shown(state_of(DENSE))
    entries = explain(shown.priced) if topic != "inference" else ledger_of(shown, ALL_TOPICS[topic])
    values = {(each.what, number(each.value)) for each in entries}
    terms = ElementTree.fromstring(page_of(topic)).findall("./dl/*")
    found = {(words_of(dt), words_of(dd.find("strong"))) for dt, dd in zip(terms[::2], terms[1::2], strict=True)}
    assert found
    for dd in terms[1::2]:
        numbers = [words_of(each).removeprefix("= ") for each in dd.findall("code[@class='numbers']")]
        if len(numbers) == 1:  # a formula without steps
            assert not re.search(r"[a-z]\w*\b(?!\()", re.sub(r"\de[-+]?\d", "", numbers[0])), numbers
            value = eval(numbers[0], FUNCTIONS)
            shown_value = float(words_of(dd.find("strong")).removeprefix("= ").split(" ")[0])
            assert value == pytest.approx(shown_value, rel=2e-4, abs=1e-6)
    assert any(dd.find("code[@class='numbers']") is not None for dd in terms[1::2])
    for what, text in found:
        assert (what, re.sub(r"( \S+)?(, .*)?$", "", text.removeprefix("= "))) in values, (what, text)


def test_a_page_about_a_key_that_is_off_shows_an_example_and_says_it() -> None:
    one = state_of("model=llama-3.1-8b&chip=h100&count=1&global_batch=8")
    assert "figures and numbers are of an example" in learn_page("tensor-parallel", one)
    assert "figures and numbers are of an example" not in learn_page("tensor-parallel", state_of(DENSE))


@prove
def test_patterns_of_entries_and_of_answers_name_something() -> None:
    states = [state_of(query) for query in (DENSE, MIXTURE, DENSE.replace("selective", "full"))]
    for topic in ALL_TOPICS.values():
        every = [ledger_of(topic.shown(state), topic) for state in states]
        tries = [
            (question, each)
            for question in topic.questions
            for each in tried(question.base or query_of(topic.shown(states[0])), question.tries)
        ]
        asked = [(question, ledger_of(each.state, topic)) for question, each in tries if each.state is not None]
        every += [entries for _, entries in asked]
        for pattern in topic.entries:
            assert any(list(matching(entries, [pattern])) for entries in every), (topic.slug, pattern)
        for question, each in tries:
            assert each.state is not None or not question.base, (question.ask, each.problem)
            for name in question.show:
                mine = [entries for of, entries in asked if of is question]
                assert all(any(list(matching(e, [part])) for e in mine) for part in name.split(" / ")), (
                    topic.slug,
                    name,
                )
        assert set(topic.verbs) <= {*VERBS, *OF_TWO_WORDS}


def answer(topic: str, ask: str, show: str) -> list[float]:
    """Return the values of an entry in the rows of the first question that contains some words."""
    question = next(each for each in ALL_TOPICS[topic].questions if ask in each.ask)
    assert show in question.show
    states = [each.state for each in tried(question.base, question.tries)]
    found = [next(matching(explain(each.priced), [show])).value for each in states if each is not None]
    assert len(found) == len(question.tries)
    return [each for each in found if isinstance(each, float)]


def test_the_answers_of_a_newcomer_follow_from_the_cost_model() -> None:
    zero = tried(ALL_TOPICS["data-parallel"].questions[0].base, ALL_TOPICS["data-parallel"].questions[0].tries)
    assert [each.state and each.state.priced.fits(each.state.limit_bytes) for each in zero] == [
        False,
        False,
        False,
        True,
    ]
    inside, across = answer("tensor-parallel", "tp 16", "tensor parallel")[1:]
    assert across > 2 * inside
    waiting, whole = (answer("pipeline-parallel", "halve the bubble", show) for show in ("pipeline", "makespan"))
    assert waiting[2] / whole[2] == pytest.approx(waiting[0] / whole[0] / 2, rel=0.05)
    for ask in ("at 8k", "at 64k"):
        none, selective, full = answer("recomputation", ask, "activations")
        assert none > 1.5 * selective > full
    plain, balanced = reversed(answer("context-parallel", "balance of zigzag", "attention"))
    assert plain > 1.5 * balanced


def test_answers_show_the_priced_peak_and_whether_it_fits() -> None:
    table = ElementTree.fromstring(page_of("data-parallel")).find(".//section[@class='question']//table/tbody")
    assert table is not None
    last = [words_of(row)[-12:].strip() for row in table]
    assert [text.endswith("does not fit") for text in last] == [True, True, True, False]
    assert "68.7 GiB" in words_of(table[3])


def drawing(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(each for each in root.iter("svg") for title in each.iter("title") if title.get("id") == name)


def test_a_ring_shows_the_tokens_of_split_sequence_and_the_keys_of_each_step() -> None:
    query = "model=llama-3.1-8b&chip=h100&count=8&cp=4&zero=3&global_batch=8&seq_len=32768&cp_method="
    for method in ("zigzag", "ring"):
        root = ElementTree.fromstring(learn_page("context-parallel", state_of(query + method)))
        svg = drawing(root, "figure-ring")
        strips = {
            (each.get("class"), round(float(each.get("x")) - 4), round(float(each.get("width"))))
            for each in svg.findall("rect")
            if each.get("y") == "4"
        }
        scale = 352 / 32768
        expected = {
            (f"k{rank}", round(span[0] * scale), round(len(span) * scale))
            for rank in range(4)
            for span in spans(method, 32768, 4, 1, rank, 0)
        }
        assert strips == expected
        steps = [
            [each.text for each in svg.findall("text") if each.get("y") == str(76 + 30 * step)] for step in range(4)
        ]
        assert steps == [[str((rank - step) % 4) for rank in range(4)] for step in range(4)]


@pytest.mark.parametrize("query", [DENSE, MIXTURE])
def test_the_peak_of_the_memory_curve_equals_the_ledger(query: str) -> None:
    state = state_of(query)
    whole = next(matching(explain(state.priced), ["all kinds"])).value
    assert isinstance(whole, float)
    picture = charts.curve(state)
    assert f", {format_bytes(whole)}; the line is {format_bytes(state.limit_bytes)}" in picture.caption
    root = ElementTree.fromstring(picture.svg)
    paths = [each.get("d") or "" for each in root.iter("path") if each.get("fill")]
    highest = min(float(y) for d in paths for y in re.findall(r"V([\d.]+)", d))
    assert highest == pytest.approx(1000 - 1000 * whole / (1.04 * max(whole, state.limit_bytes)), abs=0.6)


def test_bars_are_as_long_as_the_memory_of_the_priced_layouts() -> None:
    choice = ALL_TOPICS["data-parallel"].bars
    assert choice is not None
    root = ElementTree.fromstring(charts.tried_bars(state_of(DENSE), choice).svg)
    ends: dict[str, float] = {}
    for box in root.iter("rect"):
        end = float((box.get("x") or "").rstrip("%")) + float((box.get("width") or "").rstrip("%"))
        ends[box.get("y") or ""] = max(end, ends.get(box.get("y") or "", 0.0))
    states = [each.state for each in tried(query_of(state_of(DENSE)), choice.tries)]
    peaks = [each.priced.peak_bytes for each in states if each is not None]
    widest = max(*peaks, state_of(DENSE).limit_bytes)
    assert [*ends.values()] == pytest.approx([100 * peak / widest / 1.02 for peak in peaks], abs=0.01)


def test_a_drawn_all_reduce_ends_with_every_chunk_summed_over_all_ranks() -> None:
    root = ElementTree.fromstring(learn_page("collectives", state_of(DENSE)))
    svg = drawing(root, "figure-all-reduce")
    filled = [each for each in svg.findall("rect") if (each.get("class") or "").startswith("k")]
    rows = [filled[at : at + 16] for at in range(0, len(filled), 16)]
    full = [sum(each.get("height") == "26" for each in row) for row in rows]
    assert full == [0, 0, 0, 4, 8, 12, 16]  # reduce-scatter finishes a chunk a rank; each step then copies one


def test_colours_of_text_have_enough_contrast_in_both_modes() -> None:
    rules = r"@media \(prefers-color-scheme: dark\)\s*\{\s*:root\s*\{([^}]*)\}\s*\}"
    texts = re.sub(rules, "", STYLE), "".join(re.findall(rules, STYLE))
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text)) for text in texts)
    for colours in (light, light | dark):
        pairs = [("ink", name) for name in colours if re.fullmatch(r"k\d+|paper|raised", name)]
        pairs += [(one, other) for one in ("soft", "link", "limit", "quiet") for other in ("paper", "raised")]
        for one, other in pairs:
            assert contrast(colours[one], colours[other]) >= 4.5, (one, other)
    assert re.search(r"prefers-reduced-motion: reduce\) \{ \.learn \.moves[^}]*display: none", STYLE)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2.2 defines it."""
    levels = []
    for colour in (one, other):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        levels.append(0.2126 * r + 0.7152 * g + 0.0722 * b)
    return (max(levels) + 0.05) / (min(levels) + 0.05)


def test_a_topic_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"tensor-paralel: there is no such page; .*tensor-parallel"):
        learn_page("tensor-paralel", state_of(DENSE))


def test_a_name_of_a_model_is_escaped_and_a_cluster_of_a_hardware_file_is_priced(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    rows = ["accelerator = 'h100'", "node_size = 8", "network = 'infiniband'", "gbit_per_s_per_node = 3200"]
    file.write_text("\n".join(["[clusters.mine]", *rows]), encoding="utf-8")
    state = parse("model=llama-3.2-1b&chip=mine&count=8&global_batch=8&seq_len=1024", file).state
    assert state is not None
    assert "not possible" not in learn_page("optimizers", state, hardware=file)
    page = learn_page("optimizers", replace(state, model="<b>&"))
    assert "not possible" in page
    assert "&lt;b&gt;&amp; on mine:8" in page
    assert "<b>" not in page


def test_dispatch_is_drawn_where_the_busiest_rank_has_dense_blocks_and_a_missing_figure_has_the_pages_title() -> None:
    state = state_of(
        "model=n_layers=2,d_model=64,n_heads=2,d_ffn=999936,vocab_size=128,moe.n_experts=8,moe.top_k=2,moe.d_ffn=64,"
        "moe.first_dense=1&count=8&pp=2&ep=4&global_batch=512&seq_len=4096"
    )
    topic = ALL_TOPICS["expert-parallel"]
    assert state.priced.time.busiest[0] == 0
    assert "the busiest rank of pp has only dense blocks" in next(drawings(topic, state)).svg
    topic = replace(topic, figures=["serving"])
    assert {each.title for each in drawings(topic, state_of(LARGE))} >= {topic.title}


@prove
@pytest.mark.parametrize("query", [MIXTURE, LARGE])
def test_mixtures_and_thousands_of_ranks_have_pages_of_bounded_size(query: str) -> None:
    for topic in TOPICS:
        root = check(learn_page(topic, state_of(query)))
        assert len(list(root.iter("rect"))) < 700
    assert "8 of 16 ranks of pp" in learn_page("pipeline-parallel", state_of(LARGE))


RANDOM: dict[str, list[str | int]] = {
    "model": ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt2", "gemma-3-4b"],
    "chip": ["h100", "l40s"],
    "count": [1, 2, 8, 32, 256],
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
    "cp": [1, 2],
    "ep": [1, 2, 4],
    "zero": [0, 1, 2, 3],
    "pp_schedule": ["1f1b", "afab", "zb-v", "interleaved-1f1b", "dualpipe"],
    "cp_method": ["zigzag", "ring", "ulysses", "allgather"],
    "recompute": ["none", "selective", "full"],
    "sequence_parallel": ["", "true", "false"],
    "global_batch": [256],
    "seq_len": [1024],
}


@prove
def test_figures_of_random_states_are_drawn() -> None:
    generator, drawn = random.Random(45), 0
    while drawn < 10:
        pick = generator.choice
        keys = {key: pick(choices) for key, choices in RANDOM.items()}
        off = [("pp", "pp_schedule"), ("cp", "cp_method"), ("tp", "sequence_parallel")]
        dropped = {name for axis, name in off if keys[axis] == 1}
        state = parse("&".join(f"{key}={value}" for key, value in keys.items() if key not in dropped)).state
        if state is None:
            continue
        drawn += 1
        for topic in ALL_TOPICS.values():
            for picture in drawings(topic, topic.shown(state)):
                assert picture.title
                if picture.svg:
                    check(f"<div>{picture.svg}</div>")


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


@prove
def test_a_static_site_has_plans_and_pages_whose_links_lead_to_files(tmp_path: Path) -> None:
    write_static(tmp_path / "site", [state_of(DENSE)])
    files = write_static(tmp_path / "site", [state_of(DENSE), state_of(MIXTURE)])
    assert files[0] == tmp_path / "site" / "index.html"
    assert len(files) == 3 + 2 * (1 + len(TOPICS))
    for path in files:
        if path.suffix == ".html":
            parser = Links()
            parser.feed(path.read_text(encoding="utf-8"))
            assert parser.links or path.name == "plan.html"
            assert [link for link in parser.links if not (link.startswith("#") or (path.parent / link).is_file())] == []
