"""The goal of a whole run, from --budget-tokens, --price, --operations and the run file."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.plan_options import PlanOptions
from shardwright.system.errors import InputError, collecting

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.job import Job
    from shardwright.planner.whole_run import PlannedStage, TrainingGoal


def training_goal(
    options: PlanOptions, config: "RunConfig | None" = None, stages: "tuple[PlannedStage, ...]" = ()
) -> "TrainingGoal | None":
    """Return the goal, None without --budget-tokens and stages of the run file. `stages`: of a configuration of another
    system. Raises InputError for stages, prices and operations that are not valid, and for those without
    --budget-tokens."""
    from shardwright.planner.operations import read_operations
    from shardwright.planner.whole_run import TrainingGoal

    tokens, stages = options.budget_tokens, stages or _stages_of(config, options)
    if tokens is None and config is not None and stages:
        tokens = float(config.batch.schedule.tokens(config.steps))
    if tokens is None:
        names = ("batch_stages", "price", "operations")
        given = " and ".join(f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None)
        if given:
            raise InputError(f"{given} goes with --budget-tokens N, the tokens of the whole run, such as 15e12")
        return None
    problems: list[str] = []
    prices = {}
    for text in options.price or []:
        try:
            name, price = _price(text, options.hardware)
        except InputError as error:
            problems += error.problems
            continue
        if name in prices:
            problems.append(f"--price {text}: the price of {name or 'all accelerators'} is given twice; leave one out")
        prices[name] = price
    with collecting(problems):
        stages = stages or _read_stages(options, config)
    with collecting(problems):
        operations = read_operations(options.operations or "", **_stated_operations(config))
    if problems:
        raise InputError(*problems)
    return TrainingGoal(tokens, prices, operations, stages)


def _stages_of(config: "RunConfig | None", options: PlanOptions) -> "tuple[PlannedStage, ...]":
    """Return the stages of the run file, none if options give another batch."""
    from shardwright.planner.whole_run import PlannedStage

    given = (options.batch_stages, options.global_batch, options.seq_len)
    if config is None or not config.batch.stages or any(number is not None for number in given):
        return ()
    stages = config.batch.schedule.stages
    return tuple(PlannedStage(stage.tokens_before, stage.global_batch, stage.seq_len) for stage in stages)


def _read_stages(options: PlanOptions, config: "RunConfig | None") -> "tuple[PlannedStage, ...]":
    """Return the stages of --batch-stages, whose length is, if not given, of --seq-len or else of the run file. Raises
    InputError with every wrong stage."""
    from shardwright.planner.whole_run import PlannedStage

    stages: list[PlannedStage] = []
    problems: list[str] = []
    seq_len = options.seq_len or (config.batch.schedule.longest.seq_len if config is not None else 0)
    for number, text in enumerate(options.batch_stages.split(",") if options.batch_stages is not None else ()):
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?(?:e[0-9]{1,2})?):([0-9]{1,9})(?:x([0-9]{1,9}))?", text.strip())
        where = f"--batch-stages {text.strip()!r}"
        if match is None:
            problems.append(f"{where}: write TOKENS:BATCH or TOKENS:BATCHxSEQ_LEN, such as 469e9:15360")
            continue
        stage = PlannedStage(float(match[1]), int(match[2]), int(match[3] or seq_len))
        if stage.from_tokens != 0 and not number:
            problems.append(f"{where}: the first stage starts at 0 tokens; write 0:BATCH first")
        if stages and stage.from_tokens <= stages[-1].from_tokens:
            problems.append(f"{where} is not after the stage before, {stages[-1].from_tokens:,.0f} tokens")
        if min(stage.global_batch, stage.seq_len) < 1:
            problems.append(f"{where}: a batch and a length of 1 or more are needed; --seq-len gives the length")
        stages.append(stage)
    if problems:
        raise InputError(*problems)
    return tuple(stages)


def check_goal(goal: "TrainingGoal | None", job: "Job") -> None:
    """Raise InputError before the search if the run cannot finish with these operations on this cluster."""
    from shardwright.planner.whole_run import interruptions

    if goal is not None:
        interruptions(job, goal.operations)


def _price(text: str, hardware: Path | None) -> tuple[str, float]:
    """Return the name of the accelerator, "" for all, and the price. Raises InputError."""
    from shardwright.cost.hardware import accelerator

    name, _, number = text.rpartition("=")
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", number.strip()) or float(number) <= 0:
        raise InputError(f"--price {text}: a price above 0 is needed, such as 2.5, or one of an accelerator, h100=2.5")
    try:
        return (accelerator(name.strip(), hardware).name if name else ""), float(number)
    except InputError as error:
        raise InputError(f"--price {text}: {error}") from None


def _stated_operations(config: "RunConfig | None") -> dict[str, Any]:
    """Return the values of `Operations` that the run file states."""
    if config is None:
        return {}
    from shardwright.config.mixture import sources_of

    saves, evaluation = config.checkpoint, config.evaluation
    local = saves.local is not None and saves.local_every > 0
    if local:
        save = "local"
    else:
        save = "async" if saves.async_mode == "async" else "sync"
    return {
        "save": save,
        "save_every": (saves.local_every if local else saves.every) or None,
        "evaluate_every": evaluation.every,
        "evaluate_samples": evaluation.samples * len(sources_of(config.data)),
    }
