"""Changes that make a model fit if no layout does. Each change is tried, and reported only if it works."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import Any, TypeVar

from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Job
from shardwright.cost.stack import SHARDWRIGHT, SHARDWRIGHT_COMPILED
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.spec import ModelSpec
from shardwright.planner.run_file import fp8_problems
from shardwright.planner.search import fits, least_host_bytes, limit_bytes
from shardwright.planner.space import OFFLOADS, OPTION, FixedChoices
from shardwright.system.errors import LayoutError
from shardwright.system.units import GiB, format_count, format_host_bytes

MOST_TIMES = 256
"""Largest factor by which the number of accelerators is multiplied."""
OFFLOADED: dict[str, dict[str, Any]] = {
    "activations of layers in the memory of the host": {"offload_activations": "cpu"},
    "optimizer states in the memory of the host": {"offload_optimizer": "cpu"},
    "optimizer states on a disk": {"offload_optimizer": "disk"},
    "optimizer states and shards of parameters and gradients in the memory of the host": {
        "zero": 3,
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu",
    },
}
"""State that can be stored outside the device, and the layout keys for it."""
SHORTEST = 512
"""Shortest sequence that is tried, in tokens."""


@dataclass(frozen=True)
class PlanRemedy:
    """One change after which a layout fits. `what`: its description."""

    what: str
    job: Job


Change = TypeVar("Change")


def smallest_changes(kinds: Iterable[Iterable[Change]], works: Callable[[Change], bool]) -> list[Change]:
    """Return the first change of each kind that works; of a kind without one, none."""
    changes = [next(filter(works, kind), None) for kind in kinds]
    return [change for change in changes if change is not None]


def more_accelerators(cluster: Cluster, times: int) -> str:
    """Return the change to a multiple of a cluster's accelerators, in words."""
    more = "twice" if times == 2 else f"{times} times"
    return f"{cluster.size * times} accelerators of the same kind, {more} as many"


def remedies(job: Job, memory_margin: float, fixed: FixedChoices | None = None) -> list[PlanRemedy]:
    """Return single changes of the job after which some layout with the fixed values fits, the smallest change of each
    kind. The first remedy is to drop the fixed values, if some layout then fits.

    Layout, micro-batch and recomputation are no remedies, because every choice of them has been searched. Activations,
    optimizer states and shards of parameters in the memory of the host or on a disk are remedies: they are not searched
    because they make every step longer.
    """

    def works(changed: Job, margin: float = memory_margin, condition: FixedChoices | None = fixed) -> bool:
        try:
            return fits(changed, limit_bytes(changed, margin), condition)
        except LayoutError:
            return False

    kinds = (_larger(job), _even(job), _shorter(job), _narrower(job), _lighter(job), _adapters(job))
    remedies = smallest_changes(kinds, lambda remedy: works(remedy.job))
    if fixed is not None and works(job, condition=None):
        remedies.insert(0, PlanRemedy(f"another layout: leave out {OPTION} {fixed}", job))
    chosen = fixed.values if fixed else {}
    if fixed is not None and fixed.offload and (larger := _host_memory(job, memory_margin, fixed)):
        remedies.append(replace(larger, what=f"more memory of the host: {larger.what.strip()}"))
    for words, values in OFFLOADED.items():
        offloaded = FixedChoices({**chosen, **values})
        priced = not [*job.offload_problems(*(str(values.get(name, "none")) for name in OFFLOADS))]
        if offloaded.values != chosen and priced and (needed := _host_memory(job, memory_margin, offloaded)):
            remedies.append(replace(needed, what=f"{words}: {OPTION} {offloaded}{needed.what}"))
    if memory_margin and works(job, 0.0):
        remedies.append(
            PlanRemedy("no margin: --memory-margin 0 (fragments and what is not counted may overflow)", job)
        )
    return remedies


def _host_memory(job: Job, margin: float, offloaded: FixedChoices) -> PlanRemedy | None:
    """Return the memory of each node's host with which a layout fits; None if no layout fits."""
    try:
        needed = least_host_bytes(job, limit_bytes(job, margin), offloaded)
    except LayoutError:
        return None
    if needed is None:
        return None
    cluster = job.cluster
    if cluster.host_memory_bytes and needed > cluster.host_memory_bytes:
        has, least = format_host_bytes(cluster.host_memory_bytes), f"{ceil(needed / GiB)}GiB"
        larger = replace(job, cluster=cluster.with_host_memory(least))
        return PlanRemedy(
            f" --host-memory {least}, in nodes whose host has {format_host_bytes(needed)} instead of {has}", larger
        )
    known = "" if cluster.host_memory_bytes else "; how much a node has is not known"
    what = (
        f", with {format_host_bytes(needed)} of host memory in each node of {cluster.node_size}{known}"
        if needed
        else ""
    )
    return PlanRemedy(what, job)


def _larger(job: Job) -> Iterator[PlanRemedy]:
    """Yield more accelerators: two, three, four, ... times the number."""
    times = 2
    while times <= MOST_TIMES:
        cluster = replace(job.cluster, size=job.cluster.size * times)
        yield PlanRemedy(more_accelerators(job.cluster, times), replace(job, cluster=cluster))
        times = times + 1 if times < 4 else times * 2


def _shorter(job: Job) -> Iterator[PlanRemedy]:
    """Yield shorter sequences with the same number of tokens a step."""
    seq_len, global_batch = job.seq_len, job.global_batch
    while seq_len % 2 == 0 and seq_len // 2 >= SHORTEST:
        seq_len, global_batch = seq_len // 2, global_batch * 2
        changed = replace(job, seq_len=seq_len, global_batch=global_batch)
        yield PlanRemedy(f"--seq-len {seq_len} with --global-batch {global_batch}, as many tokens a step", changed)


def _even(job: Job) -> Iterator[PlanRemedy]:
    """Yield the nearest sequence lengths that tp and cp can partition into more parts, with the same number of
    sequences a step: an even length, one for the ranks of a node, one for all ranks. cp makes two parts per rank."""
    size, node = job.cluster.size, job.cluster.node_size
    tried = {job.seq_len}
    for parts in (2, 2 * node, 2 * size) if size > 1 else ():
        near = max(1, round(job.seq_len / parts)) * parts
        if near not in tried:
            tried.add(near)
            can, could = (gcd(seq_len, 2 * size) for seq_len in (near, job.seq_len))
            into = f"as many as {can} equal parts, {job.seq_len} into {could}"
            what = f"--seq-len {near}, which tp and cp can partition into {into}"
            yield PlanRemedy(what, replace(job, seq_len=near))


def _narrower(job: Job) -> Iterator[PlanRemedy]:
    """Yield matmuls in 16 bits."""
    if job.element_bytes == 4:
        yield PlanRemedy("--precision bf16", replace(job, precision="bf16"))


RANK = 16
"""Rank of adapters that are tried instead of training all weights."""


def _adapters(job: Job) -> Iterator[PlanRemedy]:
    """Yield adapters of all matrices of attention and of networks, with all other parameters frozen; for a job with
    adapters a quantised base."""
    own = job.stack.name in (SHARDWRIGHT.name, SHARDWRIGHT_COMPILED.name)
    if own and job.model.lora is not None and job.model.lora.base == "compute":
        model = replace(job.model, lora=replace(job.model.lora, base="nf4"))
        narrow = replace(job, model=model)
        if not fp8_problems(narrow):
            yield PlanRemedy("the frozen matrices in 4 bits (QLoRA): lora.base='nf4'", narrow)
    for targets in (LoraSpec(rank=RANK).targets, ("attention",)):  # a mixture of experts has no matrices of networks
        model = replace(job.model, lora=LoraSpec(rank=RANK, targets=targets))
        if own and job.model.lora is None and not model.lora_problems():
            option = f"--lora rank={RANK}" + (f",targets={'+'.join(targets)}" if len(targets) == 1 else "")
            what = f"adapters instead of all weights (LoRA): {option}, {adapters_in_words(model)}"
            yield PlanRemedy(what, replace(job, model=model))


def adapters_in_words(model: ModelSpec) -> str:
    """Return the number of trained parameters of a model with adapters, and its share, as text."""
    n = model.n_trained_parameters
    return f"{format_count(n)} trained parameters ({n / model.n_parameters:.2%} of all)"


def _lighter(job: Job) -> Iterator[PlanRemedy]:
    """Yield optimizer states of 16 bits and of 8."""
    kind = job.optimizer_kind
    if kind.state and not job.narrow_states and not [*kind.narrow_problems(job.options_of_optimizer)]:
        yield PlanRemedy("optimizer states in bf16: optimizer.state_dtype='bf16'", replace(job, narrow_states=True))
    if job.optimizer == "adamw":
        small = replace(job, optimizer="adamw-8bit", optimizer_options=(), narrow_states=False)
        yield PlanRemedy("optimizer states of 8 bits: optimizer.name='adamw-8bit'", small)
