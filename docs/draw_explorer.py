"""Draw the pictures of docs/explore.md in Debian's Chromium: `pip install playwright; python docs/draw_explorer.py`."""

import io
import shutil
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from shardwright.cli.explore import serve_model
from shardwright.explore.page import Explorer
from shardwright.explore.server import ExplorerServer

DOCS = Path(__file__).parent
LARGE = "model=llama-3.1-405b&chip=h100&count=16384&tp=8&pp=16&recompute=selective&global_batch=4096"
SMALL = "model=llama-3.1-8b&chip=h100&count=32&zero=3"
PINNED = "model%3Dllama-3.1-8b%26chip%3Dh100%26count%3D32%26zero%3D3%26recompute%3Dfull"
SERVED = "model=llama-3.1-70b&cluster=h100%3A8&input_len=2048&output_len=512&precision=fp8&tpot=40ms"
PICTURES = {
    "plan": (f"/?{LARGE}&pp_schedule=interleaved-1f1b", "", "", (1280, 1000), "light"),
    "compare": (f"/?{SMALL}&tp=2&recompute=selective&pin={PINNED}", "", "", (1280, 900), "light"),
    "search": (f"/?{SMALL}", "#find", ".cards li", (1280, 900), "light"),
    "serve": (f"/serve?{SERVED}", "", "#result figure", (1280, 900), "light"),
    "learn": (f"/learn/data-parallel?{SMALL}", ".question summary", ".question table", (1280, 1000), "light"),
    "phone": (f"/?{SMALL}", "", "", (375, 760), "dark"),
}
"""Name -> address, element to click, element to wait for, size of the window, colour scheme."""


def draw(page: Page, address: str, click: str, shown: str) -> Image.Image:
    """Return the picture of a page after a click."""
    page.goto(address)
    if click:
        page.locator(click).first.click()
    if shown:
        page.locator(shown).first.wait_for(timeout=300_000)
    return Image.open(io.BytesIO(page.screenshot()))


def main() -> None:
    with (
        ExplorerServer(("127.0.0.1", 0), Explorer(), serve_model) as server,
        sync_playwright() as driver,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (path, click, shown, (width, height), scheme) in PICTURES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            drawn = draw(context.new_page(), f"http://127.0.0.1:{server.server_address[1]}{path}", click, shown)
            drawn.convert("RGB").quantize(64).save(DOCS / f"explore-{name}.png", optimize=True)
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
