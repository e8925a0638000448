"""The model of a state served on a node of its cluster, by the cost model of `plan serve`."""

from collections.abc import Iterator
from dataclasses import replace

from shardwright.cost.ledger import LedgerEntry
from shardwright.explore.state import PageState
from shardwright.serving.engines import USUAL
from shardwright.serving.explain import explain
from shardwright.serving.formats import FORMATS
from shardwright.serving.memory import memory
from shardwright.serving.rates import fitted
from shardwright.serving.search import ServingTask, layouts
from shardwright.serving.setting import Degrees, Serving, Settings

BATCH = 32
"""Requests of the batch that a page shows."""


def served(state: PageState) -> tuple[ServingTask, Degrees] | None:
    """Return the model of a state as served on one node, with prompts of half of seq_len and answers of a quarter; and
    its degrees: the state's tp if it fits, else the smallest instance whose cache has room for a request. None if the
    model does not fit a node, or its accelerator is a CPU."""
    machine = state.job.cluster
    chip = machine.accelerator
    if chip.is_cpu:
        return None
    node = replace(machine, name=f"{chip.name}:{machine.node_size}", size=machine.node_size)
    precision = state.job.precision if state.job.precision in FORMATS else "bf16"
    rates = fitted()[0].rates(USUAL.name, chip.die)
    serving = Serving(model=state.job.model, cluster=node, rates=rates, precision=precision)
    task = ServingTask(
        serving=serving, input_len=max(1, state.job.seq_len // 2), output_len=max(1, state.job.seq_len // 4)
    )
    fitting = [degrees for degrees in _degrees(serving) if _has_room(task, degrees)]
    if not fitting:
        return None
    wanted = Degrees(state.layout.tp)
    return task, wanted if wanted in fitting else fitting[0]


def _degrees(serving: Serving) -> Iterator[Degrees]:
    """Yield the degrees of instances on a node without replicas of attention, the smallest first."""
    every = {layout.degrees for layout in layouts(serving.model, serving.cluster)}
    yield from sorted(
        (degrees for degrees in every if degrees.dp == 1 and degrees.pp == 1),
        key=lambda degrees: (degrees.tp, degrees.ep),
    )


def _has_room(task: ServingTask, degrees: Degrees) -> bool:
    usage = memory(task.serving, Settings.from_layouts([degrees]), task.engine, task.length)
    return bool(usage.cache[0] > usage.token[0] * task.length)


def served_entries(state: PageState) -> list[LedgerEntry]:
    """Return the ledger of serving the model, empty if it cannot be served on a node."""
    result = served(state)
    return [] if result is None else explain(*result, BATCH)
