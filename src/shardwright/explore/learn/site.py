"""Learn and plans as a static site: files that a browser opens without a server."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from shardwright.explore.learn.page import learn_page
from shardwright.explore.learn.topics import TOPICS
from shardwright.explore.page import document, style, templates
from shardwright.explore.state import PAGES, PageState
from shardwright.system.errors import InputError
from shardwright.system.files import write_whole
from shardwright.view.html import page

STYLES = ("style.css", "learn.css")


def write_static(directory: Path, states: Sequence[PageState], hardware: Path | None = None) -> list[Path]:
    """Write an index, and for each state a folder with its plan and all pages of Learn; return the files, the index
    first. Files of an earlier site are replaced. `hardware`: the file of hardware with which the states were read.

    Raises InputError if `directory` has other files, or if a file cannot be written.
    """
    plans = [(f"plan-{at}", f"{each.model} on {each.job.cluster.name}: {each.choice}") for at, each in
             enumerate(states, 1)]  # fmt: skip
    own = {"index.html", *STYLES, *(folder for folder, _ in plans)}
    if others := sorted({each.name for each in directory.iterdir()} - own if directory.is_dir() else ()):
        raise InputError(f"{directory}: the folder has other files, such as {others[0]}; name one that is new or empty")
    shared = {"static": True, "styles": STYLES, "topics": TOPICS}
    index = templates().get_template("site.html").render(shared, title="Shardwright", plans=plans, folder="")
    files = {
        directory / "index.html": index,
        directory / "style.css": style(),
        directory / "learn.css": (PAGES / "learn.css").read_text(encoding="utf-8"),
    }
    shell = templates().get_template("page.html")
    for (folder, _), state in zip(plans, states, strict=True):
        files[directory / folder / "plan.html"] = page(document(state))
        for topic, title in TOPICS.items():
            body = Markup(learn_page(topic, state, static=True, hardware=hardware))
            files[directory / folder / f"{topic}.html"] = shell.render(shared, title=title, body=body, folder="../")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode("utf-8"))
    return list(files)
