"""Published steps of reinforcement learning, and their predictions.

`published/steps.csv` has the steps of NeMo-RL 0.4 to 0.6 as its performance page gives them, with the layouts of the
page. Columns that the page does not have are from the recipes of the same release (column `recipe`). The page does not
give the length of prompts: it follows from its tokens per second, which count prompts, and its mean length of answers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.cost.hardware import cluster
from shardwright.cost.job import RECOMPUTE, Candidates, Job
from shardwright.cost.step import Estimate
from shardwright.layout.layout import Layout
from shardwright.planner.error_summary import ComparedRow, ErrorSummary, summary
from shardwright.planner.run_columns import (
    accelerator_column,
    choice_column,
    decimal_column,
    flag_column,
    text_column,
    whole_column,
)
from shardwright.planner.runs import TableKind, read_table
from shardwright.planner.software import read_stack
from shardwright.rl.answers import AnswerLengths
from shardwright.rl.step import RATES, RLRates, RLStep, RLTask, generation_pool, training_pool
from shardwright.serving.engines import engine_of
from shardwright.serving.formats import weights_on
from shardwright.serving.models import named
from shardwright.serving.rates import fitted
from shardwright.serving.search import ServingLayout
from shardwright.serving.setting import Degrees, Serving
from shardwright.split.rules import experts_problem, tp_divides
from shardwright.system.errors import InputError
from shardwright.system.units import division_problem

PUBLISHED = Path(__file__).with_name("published") / "steps.csv"
FITTED = "0.4"
"""The version whose rows the constants are fitted to; rows of other versions are compared only."""
STACK = "megatron-core,date=2025-06,cuda_graphs=none,grad_dtype=bf16"


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A row of the table; the fields are its columns."""

    id: str = text_column("stable name of the row, which no other row has", "always")
    version: str = text_column("of the software", "always")
    date: str = choice_column(
        "of the page", needed="always", form=("YYYY-MM-DD", "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")
    )
    ref: str = text_column("file and commit of the page", "always")
    recipe: str = text_column("name of the recipe with the columns that the page does not have", "usable")
    algorithm: str = choice_column("as published", "grpo", "dapo", "swe", needed="always")
    model: str = text_column("a name of plan serve", "always")
    accelerator: str = accelerator_column("kind of accelerator", others="")
    precision: str = choice_column("of training and generation", "bf16", "fp8", needed="always")
    accelerators: int = whole_column("of the whole run", 100_000, "always")
    off_policy_steps: int = whole_column("0: on policy", 1000, "always", low=0)
    max_seq_len: int = whole_column("most tokens of prompt and answer", 10_000_000, "always")
    mean_output_len: float = decimal_column("mean tokens of an answer", 1, 10**7, "usable")
    answers: int = whole_column("of a step", 10**6, "always")
    answers_per_update: int = whole_column("of an optimizer step", 10**6, "always")
    generation_tp: int = whole_column("tp of an instance", 1000, "always")
    generation_pp: int = whole_column("pp of an instance", 1000, "always")
    tp: int = whole_column("tp of training", 1000, "always")
    cp: int = whole_column("cp of training", 1000, "always")
    ep: int = whole_column("ep of training", 1000, "always")
    pp: int = whole_column("pp of training", 1000, "always")
    tokens_per_s_per_accelerator: float = decimal_column("tokens of prompts and answers", 1e-3, 10**6, "usable")
    step_time_s: float = decimal_column("seconds of the step", 1e-3, 10**6, "usable")
    generation_accelerators: int | None = whole_column("that only generate. Empty: all train too", 100_000)
    generation_memory_share: float = decimal_column("share of the memory for the engine", 0.01, 1, "usable")
    ep_of_recipe: int | None = whole_column("ep of the recipe, if the page has another", 1000)
    first_layers: int | None = whole_column("layers of the first stage. Empty: as many as others", 1000)
    last_layers: int | None = whole_column("layers of the last stage", 1000)
    recompute: str = choice_column("activations", "none", "full", needed="usable")
    packing: bool = flag_column("1: answers share sequences", "usable")
    why_not: str = text_column("why the row has no prediction. Empty: it has one")

    @property
    def prompt_len(self) -> int:
        """Return the mean tokens of a prompt."""
        tokens = self.tokens_per_s_per_accelerator * self.accelerators * self.step_time_s / self.answers
        return max(1, round(tokens - self.mean_output_len))

    @property
    def training_accelerators(self) -> int:
        """Return the number of accelerators that train."""
        return self.accelerators - (self.generation_accelerators or 0)


def _needed(row: PublishedStep, _: Mapping[str, str]) -> dict[str, bool]:
    return {"always": True, "usable": not row.why_not}


def _contradictions(row: PublishedStep) -> Iterator[str]:
    if row.why_not:
        return
    ranks, only = row.tp * row.cp * row.pp, row.generation_accelerators
    trains, ep = row.training_accelerators, row.ep_of_recipe or row.ep
    if trains < 1 or trains % ranks:
        yield f"tp x cp x pp = {ranks} does not divide {trains} accelerators that train"
    else:
        stage = trains // row.pp
        if problem := division_problem("ep", ep, stage, f"the {stage} accelerators of a stage", shown=False):
            yield problem
    instance = row.generation_tp * row.generation_pp
    if (only or row.accelerators) % instance:
        yield (
            f"generation_tp x generation_pp = {instance} does not divide {only or row.accelerators} accelerators that "
            f"generate"
        )
    if row.off_policy_steps and only is None:
        yield (
            f"off_policy_steps={row.off_policy_steps} without generation_accelerators; valid: off_policy_steps=0, or "
            f"accelerators that only generate"
        )
    if row.answers % row.answers_per_update:
        yield f"answers_per_update={row.answers_per_update} does not divide answers={row.answers}"
    if row.mean_output_len + row.prompt_len >= row.max_seq_len:
        yield f"mean_output_len={row.mean_output_len:g} and prompts do not fit in max_seq_len={row.max_seq_len}"
    try:
        model = named(row.model)[1]
        yield from _division_problems(row, model.n_layers)
        for name in ("tp", "generation_tp"):
            if not tp_divides(model, tp := getattr(row, name)):
                yield f"{name}={tp}: the matrices of {row.model} cannot be partitioned into {tp} equal parts"
        if row.generation_pp > model.n_layers:
            yield f"generation_pp={row.generation_pp} is more than the {model.n_layers} layers of {row.model}"
        if problem := experts_problem("ep", ep, model.n_experts, f"experts of {row.model}"):
            yield problem
        chip = cluster(f"{row.accelerator}:{row.accelerators}").accelerator
        known = [form for form in weights_on(chip) if form in ("bf16", "fp8") and form in chip.flops_per_s]
        if row.precision not in known:
            yield f"precision={row.precision} on {row.accelerator}; valid there: {', '.join(known)}"
    except InputError as error:
        yield from error.problems


def _division_problems(row: PublishedStep, n_layers: int) -> Iterator[str]:
    """Yield why the layers of a model cannot be divided into the stages of a row."""
    first, last, between = row.first_layers, row.last_layers, row.pp - 2
    if first is None and last is None:
        if row.pp > n_layers:
            yield f"pp={row.pp} is more than the {n_layers} layers of {row.model}"
        return
    if first is None or last is None:
        yield f"first_layers={first or ''} with last_layers={last or ''}; valid: both, or none"
    elif between < 1:
        yield f"first_layers and last_layers with pp={row.pp}; valid: pp of 3 or more, or both empty"
    elif (rest := n_layers - first - last) < between or rest % between:
        yield (
            f"first_layers={first} and last_layers={last} leave {rest} of {n_layers} layers, and pp={row.pp} has "
            f"{between} stages between; valid: a positive multiple of {between}"
        )


STEPS = TableKind(PublishedStep, _needed, _contradictions, "docs/plan-rl.md#columns-of-a-table")


@dataclass(frozen=True)
class PredictedStep:
    """A published step with its prediction."""

    row: PublishedStep
    step: RLStep

    @property
    def compared(self) -> ComparedRow:
        """Return the seconds of the step, predicted and measured."""
        return ComparedRow(self.row.id, self.step.total_s, self.row.step_time_s)

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.compared.error


@dataclass(frozen=True)
class RLEvaluation:
    """Predictions of a table. `skipped`: the rows that have none."""

    path: Path
    rows: tuple[PredictedStep, ...]
    skipped: tuple[PublishedStep, ...]

    def groups(self) -> dict[str, list[PredictedStep]]:
        """Return the rows fitted to, the others, and the others by model, accelerator, policy and precision."""
        unseen = [prediction for prediction in self.rows if prediction.row.version != FITTED]
        by_group = {
            f"version {FITTED}, fitted to": [
                prediction for prediction in self.rows if prediction.row.version == FITTED
            ],
            "other versions, not fitted to": unseen,
        }
        for name in ("model", "accelerator", "off_policy_steps", "precision"):
            for value in dict.fromkeys(getattr(prediction.row, name) for prediction in unseen):
                of_value = [prediction for prediction in unseen if getattr(prediction.row, name) == value]
                by_group[f"{name.replace('_', ' ')} {value}"] = of_value
        return {name: rows for name, rows in by_group.items() if rows}

    def summaries(self) -> dict[str, ErrorSummary]:
        """Return the errors of each group."""
        return {name: summary(ErrorSummary, [row.compared for row in rows]) for name, rows in self.groups().items()}

    def as_json(self) -> dict[str, Any]:
        """Return every row and the errors of each group."""
        rows = [
            {"id": prediction.row.id, "measured_s": prediction.row.step_time_s, "predicted_s": prediction.step.total_s,
             "error": prediction.error, "parts_s": prediction.step.parts_s, "hidden": list(prediction.step.hidden())}
            for prediction in self.rows
        ]  # fmt: skip
        errors = [
            {"group": name, "n": summary.n, "mean_absolute": summary.mean_absolute, "bias": summary.bias}
            for name, summary in self.summaries().items()
        ]
        skipped = [{"id": row.id, "why_not": row.why_not} for row in self.skipped]
        return {"file": str(self.path), "rows": rows, "groups": errors, "skipped": skipped}


def evaluate(path: Path = PUBLISHED, rates: RLRates = RATES) -> RLEvaluation:
    """Predict every row of a table. Raises InputError with every cell that is not valid, as `planner.runs`, or with
    every row that no prediction can be made for."""
    rows = [row for _, row in read_table(path, STEPS)]
    predicted: list[PredictedStep] = []
    problems: list[str] = []
    for row in rows:
        try:
            predicted += [] if row.why_not else [PredictedStep(row, predict(row, rates))]
        except InputError as error:
            problems += [f"{path}, {problem}" for problem in error.problems]
    if problems:
        raise InputError(*problems)
    return RLEvaluation(path, tuple(predicted), tuple(row for row in rows if row.why_not))


def predict(row: PublishedStep, rates: RLRates = RATES) -> RLStep:
    """Return the price of a row. Raises InputError for a model or an accelerator that is not known."""
    model = replace(named(row.model)[1], mtp_modules=0)  # the recipes train without them
    machine = cluster(f"{row.accelerator}:{row.accelerators}")
    job = Job(
        model=model, cluster=machine, seq_len=row.max_seq_len, global_batch=1,
        precision="fp8-block" if row.precision == "fp8" else row.precision,
    )  # fmt: skip
    job = replace(job, stack=read_stack(STACK + ",moe_dispatch=alltoall" * (model.moe is not None), job))
    engine = engine_of("vllm")
    assert engine is not None
    engine_rates = fitted()[0].rates(engine.name, machine.accelerator.die)
    serving = Serving(model=model, cluster=machine, rates=engine_rates, precision=row.precision)
    answers = AnswerLengths(row.mean_output_len, row.max_seq_len - row.prompt_len)
    task = RLTask(
        job=job, serving=serving, engine=engine, prompt_len=row.prompt_len, answers=answers, n_answers=row.answers,
        n_updates=row.answers // row.answers_per_update, off_policy_steps=row.off_policy_steps, packing=row.packing,
        colocated_share=row.generation_memory_share, rates=rates,
    )  # fmt: skip
    size = row.generation_accelerators or row.accelerators
    degrees = Degrees(row.generation_tp, row.generation_pp)
    generation = generation_pool(task, ServingLayout(degrees, size // degrees.size), row.generation_memory_share)
    if generation is None:
        raise InputError(f"{row.id}: the cache has no room for the longest answer")
    training = training_pool(task, "", Estimate(*_layout(row, task)))
    return RLStep(task, generation, training, row.generation_accelerators is not None)


def _layout(row: PublishedStep, task: RLTask) -> tuple[Job, Candidates]:
    """Return the job and layout of training."""
    size, pp = row.training_accelerators, row.pp
    data = size // (row.tp * row.cp * pp)
    stages = None
    if row.first_layers is not None and row.last_layers is not None:
        between = (task.job.model.n_layers - row.first_layers - row.last_layers) // (pp - 2)
        stages = (row.first_layers, *(between,) * (pp - 2), row.last_layers)
    values = {
        "dp_replicate": 1, "dp_shard": data, "cp": row.cp, "tp": row.tp, "ep": row.ep_of_recipe or row.ep,
        "zero": int(data > 1), "micro_batch": 1, "recompute": RECOMPUTE.index(row.recompute),
    }  # fmt: skip
    arrays: dict[str, Any] = {name: np.array([value]) for name, value in values.items()}
    shared = Layout(pp=pp, stage_layers=stages) if pp > 1 else Layout()
    return task.training_job(size, data), Candidates(shared=shared, sequence_parallel=np.array([row.tp > 1]), **arrays)
