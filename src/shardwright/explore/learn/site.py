"""Learn and plans as a static site: files that a browser opens without a server."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from shardwright.explore.learn.page import learn_page
from shardwright.explore.learn.topics import TOPICS
from shardwright.explore.page import document, style, templates
from shardwright.explore.state import PAGES, PageState
from shardwright.system.errors import InputError
from shardwright.system.files import find_inside, inside, read_text, reason, write_whole
from shardwright.view.html import page

STYLES = ("style.css", "learn.css")
MARKER = '<meta name="generator" content="shardwright explore">'
"""In the head of every page of a site. A folder is replaced only if its index has it."""


def write_static(directory: Path, states: Sequence[PageState], hardware: Path | None = None) -> list[Path]:
    """Write an index, and for each state a folder with its plan and all pages of Learn; return the files, the index
    first. Files of an earlier site are replaced. `hardware`: the file of hardware with which the states were read.

    Raises InputError if `directory` has files that are not of a site, or if a file cannot be written.
    """
    plans = [(f"plan-{at}", f"{state.model} on {state.job.cluster.name}: {state.choice}") for at, state in
             enumerate(states, 1)]  # fmt: skip
    _refuse_others(directory, [folder for folder, _ in plans])
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
        write_whole(path, text.encode("utf-8"))
    return list(files)


def _refuse_others(directory: Path, folders: Sequence[str]) -> None:
    """Raise InputError if a directory has files that are not of a site with these folders."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    way_out = "name a folder that is new or empty"
    if others := sorted(names - {"index.html", *STYLES, *folders}):
        raise InputError(f"{directory}: the folder has other files, such as {others[0]}; {way_out}")
    index = find_inside(directory, "index.html")
    try:
        is_site = index is not None and MARKER in read_text(index)
    except (OSError, ValueError) as error:
        raise InputError(f"{directory / 'index.html'} cannot be read: {reason(error)}; {way_out}") from None
    if names and not is_site:
        raise InputError(f"{directory}: {min(names)} is not of a site that shardwright explore wrote; {way_out}")
    for folder in folders:
        inside(directory, folder)
