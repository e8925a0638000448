"""Proves in a real browser that the sliders, the search, the comparison, the downloads and the history work."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.explore import serve_model
from shardwright.config import load
from shardwright.data.prepare import prepare
from shardwright.explore.learn import TOPICS
from shardwright.explore.page import Explorer
from shardwright.explore.server import ExplorerServer
from shardwright.explore.state import JOB_DEFAULTS
from shardwright.system.units import format_seconds
from tests.cli.plans import plan
from tests.marks import prove
from tests.training.runs import train

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="no driver: pip install playwright")
pytestmark = [prove, pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")]
START = "model=debug&chip=h100&count=8&global_batch=32&seq_len=256"
WAIT_MS = 60_000


def started(port: int = 0) -> ExplorerServer:
    server = ExplorerServer(("127.0.0.1", port), Explorer(start=START), serve_model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with started() as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in which an error of a script, or of the policy, fails the test."""
    context = browser.new_context(viewport={"width": 375, "height": 800})
    context.set_default_timeout(WAIT_MS)
    found = context.new_page()
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda each: errors.append(each.text) if each.type == "error" else None)
    found.errors = errors
    yield found
    context.close()
    assert [each for each in errors if "net::ERR_CONNECTION" not in each] == []


def test_a_slider_moves_by_keyboard_and_the_history_goes_back(page: Any, address: str):
    page.goto(address)
    page.focus("#k-tp-s")
    first = page.text_content(".status")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**tp=2*")
    assert page.evaluate("document.activeElement.id") == "k-tp-s"
    assert page.get_attribute("#k-tp-s", "aria-valuetext") == "2"
    second = page.text_content(".status")
    assert second != first
    shared = page.context.new_page()
    shared.goto(page.url)
    assert shared.text_content(".status") == second
    page.go_back()
    page.locator(".status", has_text=first).wait_for()
    assert page.input_value("#k-tp-s") == "0"
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_every_control_moves_and_quick_changes_are_all_kept(page: Any, address: str):
    page.goto(address)
    lists = page.locator("select[data-move]").all()
    for key, number in [(each.get_attribute("name"), each.get_attribute("data-number")) for each in lists]:
        page.goto(f"{address}/?{START}&tp=2&pp=2&zero=1&recompute=selective")
        if not page.locator(f"#k-{key}").count():
            continue
        before = page.url
        if key not in JOB_DEFAULTS:
            page.evaluate("id => $(id).closest('details')?.setAttribute('open', '')", f"k-{key}")
        if number is not None:
            slider = page.locator(f"#k-{key}-s")
            slider.press("Home" if slider.input_value() == slider.get_attribute("max") else "End")
        else:
            options = page.locator(f"#k-{key} option:not(:checked)").all()
            page.select_option(f"#k-{key}", options[-1].get_attribute("value"))
        page.wait_for_function("before => location.href !== before", arg=before)
        assert page.locator(".problems").count() == 0 or key in JOB_DEFAULTS, key
    page.goto(address)
    page.fill("#k-global_batch", "64")
    page.fill("#k-seq_len", "512")
    page.fill("#k-count", "16")
    page.press("#k-count", "Tab")
    page.wait_for_url("**count=16*")
    assert "global_batch=64" in page.url
    assert "seq_len=512" in page.url


def test_the_answer_is_in_sight_of_a_slider_on_a_phone(page: Any, address: str):
    page.goto(address)
    page.locator("#k-micro_batch-s").scroll_into_view_if_needed()
    page.focus("#k-micro_batch-s")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**micro_batch=2*")
    for element in (".status", "#k-micro_batch-s"):
        box = page.locator(element).bounding_box()
        assert 0 <= box["y"] <= box["y"] + box["height"] <= 800


def test_two_tabs_have_a_state_each(page: Any, address: str):
    page.goto(address)
    other = page.context.new_page()
    other.goto(address)
    for tab, key in ((page, "recompute"), (other, "optimizer")):
        tab.select_option(f"#k-{key}", "full" if key == "recompute" else "muon")
    page.wait_for_url("**recompute=full*")
    other.wait_for_url("**optimizer=muon*")
    assert "muon" not in page.url
    assert "recompute" not in other.url


@pytest.mark.parametrize("width", [375, 1600])
def test_every_page_has_landmarks_labels_and_no_sideways_scroll(page: Any, address: str, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    paths = ["/", f"/?{START}&tp=3", "/serve", f"/formulas?{START}", *(f"/learn/{topic}?{START}" for topic in TOPICS)]
    for path in paths:
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        for landmark in ("header", "nav", "main", "h1"):
            assert page.locator(landmark).count() >= 1, (path, landmark)
        fields = "input:not([type=hidden]), select, textarea"
        unnamed = "all => all.filter(e => e.checkVisibility() && !e.labels.length && !e.ariaLabel).map(e => e.id)"
        assert page.locator(fields).evaluate_all(unnamed) == [], path
    page.goto(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "find"


def test_an_impossible_combination_shows_the_rule_and_the_way_out(page: Any, address: str):
    page.goto(f"{address}/?{START}&tp=3")
    assert "tp=3 does not divide" in page.text_content(".problems")
    page.click("text=Leave out the layout")
    page.locator(".status").wait_for()


def test_a_search_loads_into_the_sliders_and_can_be_cancelled(page: Any, address: str):
    page.goto(address)
    page.click("#find")
    page.locator(".cards li").first.wait_for()
    page.locator(".cards a").nth(1).click()
    page.wait_for_url("**/?model=debug*")
    page.goto(f"{address}/?model=deepseek-v3&count=2048&global_batch=15360&seq_len=4096&ep=8")
    page.click("#find")
    page.locator("#found", has_text=re.compile(r"\d+ of \d+ parts")).wait_for()
    assert page.locator("#progress").is_visible()
    page.click("#cancel")
    page.locator("#found", has_text="cancelled").wait_for()
    assert page.is_enabled("#find")


def test_a_pinned_layout_is_compared_and_files_are_downloaded(page: Any, address: str, tmp_path: Path):
    page.goto(address)
    page.click("text=Pin this layout")
    page.wait_for_url("**pin=*")
    page.select_option("#k-recompute", "full")
    page.locator(".compared td", has_text="recompute").first.wait_for()
    with page.expect_download() as download:
        page.click("text=run.toml")
    download.value.save_as(tmp_path / "run.toml")
    assert load(tmp_path / "run.toml").layout.layout().recompute == "full"
    told = plan("--explain", tmp_path / "run.toml", "--cluster", "h100:8", "--json")
    assert format_seconds(json.loads(told.stdout)["step_s"]) in page.text_content(".status")
    with page.expect_download() as download:
        page.click("text=plan.html")
    assert "recompute=full" in Path(download.value.path()).read_text()


def test_a_run_file_of_the_page_is_trained(page: Any, address: str, tmp_path: Path):
    page.goto(f"{address}/?model=debug&chip=h100&count=1&global_batch=4&seq_len=64&precision=fp32")
    with page.expect_download() as download:
        page.click("text=run.toml")
    download.value.save_as(tmp_path / "run.toml")
    lines = (json.dumps({"text": f"Document {at} of a tokenizer's text. " * 20}) for at in range(100))
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    prepare(tmp_path / "lines.jsonl", tmp_path / "tokens", vocab_size=300, validation=0.2)
    own = {"steps": 2, "device": "cpu", "out": tmp_path / "out", "data.path": tmp_path / "tokens"}
    train(tmp_path / "run.toml", *(each for key, value in own.items() for each in ("--set", f"{key}={value}")))
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") >= 2


def test_a_page_continues_when_the_server_is_back(page: Any):
    with started() as first:
        port = first.server_address[1]
        page.goto(f"http://127.0.0.1:{port}")
        first.shutdown()
    page.select_option("#k-recompute", "full")
    page.locator("#gone").wait_for()
    with started(port) as second:
        page.wait_for_url("**recompute=full*")
        assert page.locator("#gone").is_hidden()
        second.shutdown()
