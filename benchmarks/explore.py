"""Measure the time from a move of a slider to its answer, for Llama 3.1 405B on 16,384 H100.

    python benchmarks/explore.py

Batches differ, so that no cache holds the answer. The wall time includes waiting for other programs of the machine; the
CPU time does not. With Playwright and Chromium it also measures the time from opening the page to its first paint.
"""

import shutil
import statistics
import threading
import time
from importlib.util import find_spec

from shardwright.cli.explore import serve_model
from shardwright.explore.page import Explorer
from shardwright.explore.server import ExplorerServer

START = "model=llama-3.1-405b&chip=h100&count=16384&tp=8&pp=16&recompute=selective"
MOVES = (
    *("tp&to=4", "tp&to=16", "pp&to=8", "micro_batch&to=2", "zero&to=1", "recompute&to=full", "dp_replicate&to=2"),
    *("pp_schedule&to=zb-h1", "recompute&to=none", "cp&to=2"),
)
TIMES = 100
PAINTS = 20
PAINT_ENTRIES = "performance.getEntriesByType('paint')"


def main() -> None:
    explorer = Explorer()
    explorer.home("")  # imports and templates
    wall, cpu, size = [], [], 0
    for number in range(TIMES):
        batch = 2048 * (1 + number // len(MOVES))
        began, worked = time.perf_counter(), time.process_time()
        html = explorer.answers(f"{START}&global_batch={batch}&move={MOVES[number % len(MOVES)]}")
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
        size = max(size, len(html.encode()))
    for name, times in (("wall", wall), ("CPU", cpu)):
        print(f"{name}: median {statistics.median(times) * 1e3:.0f} ms, largest {max(times) * 1e3:.0f} ms of {TIMES}")
    print(f"largest answer: {size / 1024:.0f} KiB")
    if find_spec("playwright") and (chromium := shutil.which("chromium")):
        paints = sorted(first_paints(explorer, chromium))
        print(f"first paint: median {statistics.median(paints):.0f} ms, largest {paints[-1]:.0f} ms of {PAINTS}")


def first_paints(explorer: Explorer, chromium: str) -> list[float]:
    """The milliseconds from opening the page to its first paint, each in a new context of a browser."""
    from playwright.sync_api import sync_playwright

    paints = []
    with ExplorerServer(("127.0.0.1", 0), explorer, serve_model) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(PAINTS):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/?{START}")
            page.wait_for_function(f"{PAINT_ENTRIES}.length > 0")
            paints.append(page.evaluate(f"{PAINT_ENTRIES}[0].startTime"))
            context.close()
        browser.close()
        server.shutdown()
    return paints


if __name__ == "__main__":
    main()
