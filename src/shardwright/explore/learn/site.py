"""Learn and plans as a static site: files that a browser opens without a server."""

from collections.abc import Sequence
from pathlib import Path

from shardwright.explore.learn.page import learn_page, templates
from shardwright.explore.learn.topics import TOPICS
from shardwright.explore.state import PageState
from shardwright.report.plan_view import explained_document
from shardwright.system.files import write_whole
from shardwright.view.html import page

STYLE = Path(__file__).with_name("learn.css")


def write_static(directory: Path, states: Sequence[PageState], hardware: Path | None = None) -> list[Path]:
    """Write an index, and for each state a folder with its plan and all pages of Learn; return the files, the index
    first. Existing files are replaced. `hardware`: the file of hardware with which the states were read.

    Raises InputError if a file cannot be written.
    """
    folders = [f"plan-{at}" for at in range(1, len(states) + 1)]
    plans = [(folder, f"{each.model} on {each.job.cluster.name}: {each.choice}") for folder, each in
             zip(folders, states, strict=True)]  # fmt: skip
    index = (
        templates().get_template("site.html").render(title="Shardwright", plans=plans, topics=TOPICS, body="", up="")
    )
    files = {directory / "index.html": index, directory / "learn.css": STYLE.read_text(encoding="utf-8")}
    for folder, state in zip(folders, states, strict=True):
        plan = explained_document(state.priced, state.model, state.limit_bytes, state.goal)
        files[directory / folder / "plan.html"] = page(plan)
        for topic, title in TOPICS.items():
            shell = templates().get_template("site.html")
            body = learn_page(topic, state, static=True, hardware=hardware)
            files[directory / folder / f"{topic}.html"] = shell.render(
                title=title, plans=[], topics={}, body=body, up="../"
            )
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode("utf-8"))
    return list(files)
