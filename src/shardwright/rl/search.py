"""Search for the fastest step: the split of the accelerators into generation and training, and the layouts of both.

Each part of the cluster is planned for training by `planner.search`. Layouts of generation are ordered by closed forms,
and the most promising ones are simulated. A step is priced for each pair of the fastest of both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

import numpy as np

from shardwright.cost.job import Job
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.search import MARGIN
from shardwright.planner.search import search as search_training
from shardwright.rl.step import (
    GenerationPool,
    RLStep,
    RLTask,
    TrainingPool,
    generation_pool,
    part,
    training_pool,
)
from shardwright.serving import forms
from shardwright.serving.memory import largest_batch
from shardwright.serving.search import layouts
from shardwright.serving.setting import Settings
from shardwright.system.errors import LayoutError
from shardwright.system.units import counted, round_up

SIMULATED = 6
"""Layouts of generation that are simulated for each number of accelerators."""
TRAINED = 4
"""Layouts of training that are paired with them."""
SPLITS = 8
"""Most parts into which a cluster is divided, each of whole nodes if it has several; a split gives some of them to
generation."""
WORTH = 0.02
"""Least share of the step that a change has to save."""


@dataclass(frozen=True)
class RLRemedy:
    """A change with the step that it gives. `options`: options of `plan rl` that, added to the given ones, plan this
    step; empty if there are none. `what`: the change in words."""

    options: str
    what: str
    total_s: float


@dataclass(frozen=True)
class RLPlan:
    """The result of a search. `best`: the fastest step of each split, the fastest first, empty if none fits;
    `unfit`: for each split without a step, the part that does not fit. `remedies`: changes that help."""

    task: RLTask
    best: list[RLStep]
    unfit: dict[str, str]
    remedies: list[RLRemedy]


def splits(task: RLTask) -> list[int]:
    """Return the numbers of accelerators that only generate: 0 for the same accelerators, if the task is on policy."""
    size, unit = task.cluster.size, task.cluster.node_size if task.cluster.nodes > 1 else 1
    step = max(unit, round_up(-(-size // SPLITS), unit))
    return ([] if task.off_policy_steps else [0]) + [*range(step, size, step)]


def split_text(generating: int, training: int) -> str:
    """Return who generates and who trains; `generating`: accelerators that only generate."""
    if generating:
        return f"{generating:,} generate, {training:,} train"
    return f"{counted(training, 'accelerator')} generate{'s' * (training == 1)} and train{'s' * (training == 1)}"


def search(task: RLTask, generate_on: int | None = None, processes: int = 1, remedied: bool = True) -> RLPlan:
    """Return the fastest step of each split. `generate_on`: only this split. `remedied`: also try changes."""
    unfit: dict[str, str] = {}
    best: list[RLStep] = []
    for number in splits(task) if generate_on is None else [generate_on]:
        size = task.cluster.size - number
        generation = _generation(task, number or size, separate=number > 0)
        try:
            training = _training(task, size, processes)
            why = "generation does not fit" if not generation else "training does not fit"
        except LayoutError as error:
            training, why = [], f"training is not possible: {'; '.join(error.problems)}"
        if generation and training:
            steps = (RLStep(task, pool, other, number > 0) for pool in generation for other in training)
            best.append(min(steps, key=lambda step: step.total_s))
        else:
            unfit[split_text(number, size)] = why
    best.sort(key=lambda step: step.total_s)
    remedies = [*_remedies(task, best[0], generate_on, processes)] if best and remedied else []
    return RLPlan(task, best, unfit, sorted(remedies, key=lambda remedy: remedy.total_s))


def _generation(task: RLTask, size: int, separate: bool) -> list[GenerationPool]:
    """Return the simulated pools of `size` accelerators, the fastest first."""
    serving = replace(task.serving, cluster=part(task.cluster, size))
    every = [layout for layout in layouts(serving.model, serving.cluster) if layout.replicas <= task.n_answers]
    settings = Settings.from_layouts([layout.degrees for layout in every])
    share = task.engine.memory_share if separate else min(task.engine.memory_share, task.colocated_share)
    requests = np.array([ceil(task.n_answers / layout.replicas) for layout in every], dtype=float)
    engine = replace(task.engine, memory_share=share, max_batch=min(task.engine.max_batch, int(requests.max())))
    fits = np.minimum(largest_batch(serving, settings, task.prompt_len + task.answers.mean, engine), requests)
    decode = forms.decode_s(serving, settings, np.maximum(fits, 1), task.prompt_len + task.answers.mean / 2)
    cost = np.where(fits >= 1, decode * requests / np.maximum(fits, 1), inf)
    pools = [generation_pool(task, every[at], share) for at in np.argsort(cost)[:SIMULATED] if cost[at] < inf]
    return sorted((pool for pool in pools if pool is not None), key=lambda pool: pool.seconds)


def _training(task: RLTask, size: int, processes: int) -> list[TrainingPool]:
    """Return the pools of the fastest layouts on `size` accelerators, the fastest first. Raises LayoutError."""
    unit = size if task.sequences >= size else 2 ** (task.sequences.bit_length() - 1)
    pools = [_pool(task, size, choice) for choice in _choices(task.training_job(size, unit), processes)]
    return sorted(pools, key=lambda pool: pool.update_s + pool.score_s)


@lru_cache(maxsize=2 * SPLITS)
def _choices(job: Job, processes: int) -> list[Choice]:
    """Return the fastest layouts of a job of training. Most changes of a task change nothing of it."""
    plan = search_training(job, memory_margin=MARGIN, top=TRAINED, processes=processes)
    return [priced.choice for priced in plan.best]


def _pool(task: RLTask, size: int, choice: Choice) -> TrainingPool:
    """Return the pool of a layout, with as many sequences as fill its micro-batches."""
    job = task.training_job(size, choice.micro_batch * choice.layout.data_ranks)
    return training_pool(task, str(choice), PricedLayout.from_choice(job, choice))


def _remedies(task: RLTask, step: RLStep, generate_on: int | None, processes: int) -> Iterator[RLRemedy]:
    """Yield changes that save a share of the step, each with the step that is planned with its options."""
    for options, what, changed in _changes(task):
        split = generate_on
        if changed.off_policy_steps and generate_on == 0:
            split = None
        best = search(changed, split, processes, remedied=False).best
        if best and best[0].total_s < (1 - WORTH) * step.total_s:
            place = f" --generate-on {best[0].generation.size}" if split != generate_on else ""
            yield RLRemedy(options + place, what, best[0].total_s)
    saved = step.transfer.seconds - step.transfer.own_s
    if saved > WORTH * step.total_s:
        yield RLRemedy("", "send each rank its own part of the weights alone", step.total_s - saved)


def _changes(task: RLTask) -> Iterator[tuple[str, str, RLTask]]:
    """Yield options, the change in words, and the changed task."""
    if not task.off_policy_steps:
        yield "--off-policy 1", "on separate accelerators", replace(task, off_policy_steps=1)
    if task.reference:
        yield "--no-reference", "no KL penalty", replace(task, reference=False)
    if (shorter := task.answers.without_tail(task.n_answers)) is not None:
        options = f"--output-max {shorter.maximum} --output-mean {shorter.mean:.0f}"
        job = replace(task.job, seq_len=task.prompt_len + shorter.maximum)
        yield options, "5 of 100 answers are cut", replace(task, job=job, answers=shorter)
    if "fp8" in task.cluster.accelerator.flops_per_s and task.serving.precision == "bf16":
        serving = replace(task.serving, precision="fp8")
        yield "--generation-precision fp8", "weights in 8 bits", replace(task, serving=serving)
    if task.n_updates > 1:
        yield "--updates 1", "one optimizer step", replace(task, n_updates=1)
