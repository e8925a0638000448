"""Charts of Learn: memory and time of changed states as bars, memory over a step, a whole run, serving."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shardwright.explore.learn.drawing import MOST_RANKS, WIDTH, Figure, colour, some
from shardwright.explore.learn.served import BATCH, served, served_entries
from shardwright.explore.learn.topics import BarsChoice, tried
from shardwright.explore.pictures import PagePicture, stacked_bars, step_memory
from shardwright.explore.state import PageState, query_of
from shardwright.planner.headline import headline
from shardwright.planner.whole_run import DAY_S, TrainingGoal, WholeRun
from shardwright.planner.whole_run import whole_run as whole_run_of
from shardwright.system.errors import InputError
from shardwright.system.units import format_bytes, format_count, format_seconds, percent

TOKENS_OF_A_PARAMETER = 20
"""Tokens of a whole run for each parameter, if the state has no budget. Hoffmann et al., arXiv 2203.15556."""


def tried_bars(state: PageState, choice: BarsChoice, hardware: Path | None = None) -> PagePicture:
    """Draw a bar for each change of the state, of the memory of the fullest rank or of the time of a step."""
    memory = choice.kind == "memory"
    rows: list[tuple[str, Mapping[str, float], str]] = []
    for trial in tried(query_of(state, pinned=False), choice.tries, hardware):
        if trial.state is None:
            rows.append((trial.words, {}, "not possible"))
        elif memory:
            rows.append((trial.words, trial.state.priced.fullest_kinds, format_bytes(trial.state.priced.peak_bytes)))
        else:
            fits = trial.state.priced.fits(trial.state.limit_bytes)
            words = format_seconds(trial.state.priced.step_s) + ", does not fit" * (not fits)
            rows.append((trial.words, trial.state.priced.parts_s, words))
    text = "; ".join(f"{name}: {total}" for name, _, total in rows)
    form = format_bytes if memory else format_seconds
    limit = state.limit_bytes if memory else 0.0
    caption = f"The line is the limit, {format_bytes(limit)}." if memory else ""
    return stacked_bars(choice.title, text, rows, form, limit, caption)


def curve(state: PageState) -> PagePicture:
    """Draw the live tensors of the fullest rank over a step, by kind."""
    return step_memory(state.priced, state.limit_bytes, moves=True)


def _whole(state: PageState) -> WholeRun:
    goal = state.goal or TrainingGoal(float(TOKENS_OF_A_PARAMETER * state.job.model.n_parameters))
    return whole_run_of(state.job, state.priced.step_s, headline(state.priced).interval_s, goal)


def whole_run(state: PageState) -> PagePicture:
    """Draw the days of a whole run by kind."""
    run = _whole(state)
    text = (
        f"{format_count(run.tokens)} tokens take {_days(run.days)}: goodput {percent(run.goodput)}, "
        f"{run.interruptions:.3g} interruptions, {format_count(run.accelerator_hours)} accelerator-hours."
    )
    return stacked_bars("The whole run", text, [("", run.parts_days, "")], _days, caption=text)


def _days(days: float) -> str:
    return f"{days:.3g} days" if days >= 1 else format_seconds(days * DAY_S)


def interruptions(state: PageState) -> Figure:
    """Draw work, checkpoints, an interruption, the lost work and the restart."""
    run = _whole(state)
    way = next(saving for saving in run.saving if saving.save == run.save)
    text = (
        f"A checkpoint of {format_bytes(run.checkpoint_bytes)} every {run.every_steps:,} steps, which is every "
        f"{format_seconds(run.every_s)} of work; training waits {format_seconds(way.pause_s)} for it. An interruption "
        f"every {run.hours_between:,.1f} hours on average loses the work since the last checkpoint; {run.spare_nodes} "
        f"spare nodes."
    )
    figure = Figure("interruptions", "Checkpoints and an interruption", text, text)
    parts = (("work", 78, "k0"), ("save", 10, "k5"), ("work", 78, "k0"), ("save", 10, "k5"), ("lost", 44, "k7"),
             ("restart", 40, "k9"), ("work again", 84, "k0"))  # fmt: skip
    x = 6.0
    for words, width, kind in parts:
        figure.box(x, 30, width, 30, kind)
        figure.words(x + width / 2, 22 if words == "save" else 76, words, "middle")
        x += width
    figure.arrow(226, 8, 226, 28)
    figure.words(232, 14, "interruption")
    figure.cursor(6, x, 26, 64)
    return figure


def serving(state: PageState) -> PagePicture:
    """Draw the memory of a rank that serves the model, and the time of its passes."""
    result = served(state)
    if result is None:
        raise InputError(f"a node of {state.job.cluster.name} cannot serve this model; more memory in a node is needed")
    task, degrees = result
    values = {entry.what: float(np.max(entry.value)) for entry in served_entries(state)}
    cached = values["cache of a token"] * task.length * BATCH / degrees.dp
    usable = task.usable_bytes
    parts = {"weights": values["weights"], "working": values["working memory"], "cache": cached}
    decode, prompt = values["a token of each request"], values["longer for a prompt"]
    text = (
        f"With {degrees} a pass that decodes a token of {BATCH} requests takes {format_seconds(decode)}; a pass that "
        f"also reads a prompt of {task.input_len:,} tokens takes {format_seconds(decode + prompt)}. Weights, working "
        f"memory and the cache of {BATCH} requests of {task.length:,} tokens have {format_bytes(sum(parts.values()))}; "
        f"the engine uses {format_bytes(usable)}."
    )
    return stacked_bars("A rank that serves the model", text, [("", parts, "")], format_bytes, usable, text)


def loading(state: PageState) -> Figure:
    """Draw a checkpoint whose parts are read by the ranks that have them."""
    layout, model = state.layout, state.job.model
    parts = layout.tp * layout.pp
    shown = min(parts, MOST_RANKS)
    figure = Figure(
        "loading",
        "A checkpoint read by ranks",
        f"A checkpoint of {format_count(float(model.n_parameters))} parameters is read by "
        f"{some(shown, parts)} of tp x pp.",
        "Top: the files. Bottom: ranks of tp x pp; each reads its own parts only.",
    )
    pitch = (WIDTH - 8) / shown
    figure.words(4, 12, f"safetensors, {format_count(float(model.n_parameters))} parameters")
    figure.words(4, 122, "ranks of tp x pp")
    for rank in range(shown):
        x = 4 + rank * pitch
        figure.box(x, 18, pitch, 26, colour(rank))
        figure.box(x + 2, 80, pitch - 4, 26, colour(rank), str(rank))
        figure.arrow(x + pitch / 2, 48, x + pitch / 2, 76)
        figure.dot([(x + pitch / 2, 31), (x + pitch / 2, 93)], 0.1, 0.6, colour(rank), 5)
    return figure
