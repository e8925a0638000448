"""The goal of a whole run, from --budget-tokens, --price, --operations and the run file."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.plan_options import PlanOptions
from shardwright.system.errors import InputError

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.cost.job import Job
    from shardwright.planner.whole_run import TrainingGoal


def training_goal(options: PlanOptions, config: "RunConfig | None" = None) -> "TrainingGoal | None":
    """Return the goal, None without --budget-tokens. Raises InputError for prices and operations that are not valid,
    and for those without --budget-tokens."""
    from shardwright.planner.operations import read_operations
    from shardwright.planner.whole_run import TrainingGoal

    if options.budget_tokens is None:
        given = " and ".join(f"--{name}" for name in ("price", "operations") if getattr(options, name) is not None)
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
    try:
        operations = read_operations(options.operations or "", **_of_run_file(config))
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(*problems)
    return TrainingGoal(options.budget_tokens, prices, operations)


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


def _of_run_file(config: "RunConfig | None") -> dict[str, Any]:
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
