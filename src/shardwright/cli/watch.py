"""shardwright watch: a running run's loss, speed, memory, ranks, checkpoints and events."""

import sys
import time
from pathlib import Path

from rich.console import Group
from rich.live import Live

from shardwright.cli.common import (
    AsJson,
    argument,
    console,
    error_console,
    flag,
    option,
    print_text,
    reading_verb,
    show,
)
from shardwright.cli.followed import SHOWN_LINES, FollowedRun, NewRecords
from shardwright.cli.watch_view import state_in_words, watch_document
from shardwright.runs.folder import RUN_NAMES
from shardwright.runs.records import as_record
from shardwright.system.errors import InputError
from shardwright.system.owner import LOCK
from shardwright.system.signals import interrupt_is_handled
from shardwright.training.run_log import line
from shardwright.view.terminal import renderables

LEAST_EVERY_S, MOST_EVERY_S = 0.1, 3600.0
START_S = 60.0
"""How long to wait for a starting run's first process to write the run file and metrics.jsonl."""


@reading_verb
def watch(
    run_dir: Path = argument(..., "the folder of a run, finished or still training", "RUN_DIR"),
    once: bool = flag("print the page as it is now, and leave"),
    every: float = option(2.0, "seconds between two looks at the folder", "SECONDS"),
    json: AsJson = False,
) -> None:
    """Show a run while it trains: loss, speed, memory, ranks, checkpoints and events.

    On a terminal the page changes with the run. In a file or a pipe, the lines of the run are printed as they come.
    Watch waits up to a minute for a run that is starting. It ends with the run, or at Ctrl-C, which does not stop the
    run.

    shardwright watch runs/debug

    The folder may be of a run on another machine: on a file system that both see, or copied again and again.

    Exit codes: 0 the run has ended, or Ctrl-C; 2 the folder is not one of a run.
    """
    if not LEAST_EVERY_S <= every <= MOST_EVERY_S:
        raise InputError(f"--every {every:g}: from {LEAST_EVERY_S:g} to {MOST_EVERY_S:g} seconds are possible")
    if once or json:
        run = FollowedRun(run_dir)
        run.look()
        show(watch_document(run), json, None)
        return
    try:
        run = _started(run_dir)
        news = run.look()
        if sys.stdout.isatty():
            _live(run, every)
        else:
            _lines(run, news, every)
    except KeyboardInterrupt:
        interrupt_is_handled()


def _started(folder: Path) -> FollowedRun:
    """Return the run in a folder; wait up to `START_S` seconds if a run may be starting there. Raises InputError for a
    folder that is not one of a run, at once if it contains other files and no run has locked it."""
    end_s = time.monotonic() + START_S
    waits = False
    while True:
        try:
            return FollowedRun(folder)
        except InputError as error:
            names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
            others = LOCK not in names and names - RUN_NAMES
            if others or folder.is_file() or not folder.absolute().parent.is_dir() or time.monotonic() >= end_s:
                raise
            if not waits:
                error_console.print(f"{error}\nwaiting for a run to start there, up to {START_S:g} s; Ctrl-C ends")
            waits = True
            time.sleep(LEAST_EVERY_S)


def _live(run: FollowedRun, every: float) -> None:
    """Show the page instead of the terminal's content until the run ends; the last page stays."""
    try:
        with Live(_screen(run), console=console, screen=True, auto_refresh=False) as live:
            while not run.has_ended:
                time.sleep(every)
                run.look()
                live.update(_screen(run), refresh=True)
    except KeyboardInterrupt:
        interrupt_is_handled()
    finally:
        show(watch_document(run), as_json=False, html=None)


def _screen(run: FollowedRun) -> Group:
    return Group(*renderables(watch_document(run).parts, console.width))


def _lines(run: FollowedRun, news: NewRecords, every: float) -> None:
    """Print records as they are written, line by line; of the earlier records only the last lines."""
    _say(news, run.config.steps, len(news.events) - SHOWN_LINES)
    while not run.has_ended:
        time.sleep(every)
        _say(run.look(), run.config.steps)
    print_text(state_in_words(run))


def _say(news: NewRecords, steps: int, skip_events: int = 0) -> None:
    if skipped := news.n_losses - len(news.losses):
        print_text(f"({skipped:,} lines before)")
    for record in news.losses:
        print_text(line(as_record(record), steps))
    for event in news.events[max(0, skip_events) :]:
        print_text(f"{event.kind} after step {event.step}: {event.text.partition(chr(10))[0]}")
    sys.stdout.flush()
