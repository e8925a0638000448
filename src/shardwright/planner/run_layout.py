"""The cluster and the layout of a measured run, and the rules of any training code that they break."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from shardwright.cost.formats import FORMATS
from shardwright.cost.hardware import Cluster, cluster, evenly
from shardwright.cost.job import Candidates, Job
from shardwright.layout.layout import Layout
from shardwright.planner.run_columns import MeasuredRun
from shardwright.split import rules, stages
from shardwright.system.errors import InputError

MOST_STAGES = 512
"""Most stages of a pipeline; its schedule is simulated action by action."""
MOST_PARAMETERS = 1e16
MOST_TOKENS = 1e12
"""Most tokens of a step. Above these limits, products of sizes overflow the 64-bit integers of the cost model."""
MEGATRON_SCHEDULE = {"zb-h2": "auto"}
"""Schedule of the runs of Megatron-LM marked "zb-h2". They ran ZB-2p, a schedule that is searched for the times of the
stages, with at most 2p micro-batches in flight (Qi et al., arXiv 2401.10241, section 4)."""
RECOMPUTE = {"none": 0, "selective": 1, "full": 2, "partial": 2}
"""Indices in `cost.job.RECOMPUTE`."""


def priced_schedule(row: MeasuredRun) -> str:
    """Return the schedule with which a row is priced."""
    of_megatron = row.stack in ("megatron", "megatron-core")
    return MEGATRON_SCHEDULE.get(row.schedule, row.schedule) if of_megatron else row.schedule


def _few_layers(row: MeasuredRun, chunks: int) -> int | None:
    """Return the layers of each chunk that recompute, for `partial:N` of a model's layers; else None."""
    kind, _, number = row.recompute.partition(":")
    return ceil(int(number) / chunks) if kind == "partial" else None


def cluster_of(row: MeasuredRun) -> Cluster:
    """Return a cluster whose ranks are divided evenly over as few NVLink domains as have room for the run."""
    result = cluster(f"{row.accelerator}:{row.accelerators}/{evenly(row.accelerators, row.per_domain)}")
    # A run on a part of a domain has the links of the domain.
    result = replace(result, inside=cluster(f"{row.accelerator}:{row.per_domain}/{row.per_domain}").inside)
    if row.network_gbs is not None:
        result = result.with_network(row.network_gbs * 1e9 * result.node_size)
    return result if row.network is None else result.on(row.network)


def candidates_of(row: MeasuredRun, piped: Layout) -> Candidates:
    """Return the row's layout as the only candidate. `piped`: its pipeline."""
    values = {
        "dp_replicate": row.dp_replicate,
        "dp_shard": row.dp_shard,
        "cp": row.cp,
        "tp": row.tp,
        # Experts with tp of their own need as much memory, and get as many tokens, as with more ranks of ep.
        "ep": row.ep * (row.etp or row.tp) if row.experts else 1,
        "zero": row.zero,
        "micro_batch": row.micro_batch,
        "recompute": RECOMPUTE[row.recompute.partition(":")[0]],
    }
    parts: dict[str, Any] = {}
    if (few := _few_layers(row, piped.n_stages)) is not None:
        parts |= {"recompute": "full", "recompute_layers": few}
    if row.offload != "none":
        parts["offload_optimizer" if row.offload == "optimizer" else "offload_activations"] = "cpu"
    if row.zero_pp_gather == "microbatch":  # a key of layouts with pp and zero 3 alone
        parts |= {"zero_pp_gather": row.zero_pp_gather, **{key: values[key] for key in ("zero", "dp_shard", "cp")}}
    if row.loss_chunk_tokens:
        parts["loss_chunk_tokens"] = row.loss_chunk_tokens
    arrays: dict[str, Any] = {key: np.array([value], dtype=np.int64) for key, value in values.items()}
    return Candidates(
        shared=replace(
            piped,
            stage_layers=_stage_layers(row, piped.n_stages),
            **parts,
            cp_method="zigzag" if row.cp_method in (None, "ring") else row.cp_method,
        ),
        sequence_parallel=np.array([row.sp]),
        **arrays,
    )


def _stage_layers(row: MeasuredRun, n_stages: int) -> tuple[int, ...] | None:
    """Return the number of layers of each stage; None if they are balanced by cost."""
    if row.pp == 1:
        return None
    if row.stack == "nanotron":
        return _by_weights(row, n_stages)
    if row.layer_split == "uneven":
        return None
    ends = 1 if row.layer_split == "ends" else 0
    per_stage, rest = divmod(row.layers + 2 * ends, n_stages)
    if rest:
        raise InputError(
            f"layer_split={row.layer_split}: {row.layers} layers do not fill {n_stages} stages; valid: uneven"
        )
    return per_stage - ends, *(per_stage,) * (n_stages - 2), per_stage - ends


def _by_weights(row: MeasuredRun, n_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage as nanotron assigns them, for any number: a stage ends with the layer at which
    the weights of all layers so far exceed its share of the weights of layers and head
    (`nanotron.models.base.build_model`)."""
    layer = (4 * row.heads * row.head_dim + 3 * row.d_ffn) * row.d_model
    whole = row.layers * layer + row.vocab * row.d_model
    counts = [0] * n_stages
    stage = 0
    for number in range(1, row.layers + 1):
        counts[stage] += 1
        if number * layer > whole * (stage + 1) / n_stages:
            stage = min(stage + 1, n_stages - 1)
    return tuple(counts)


def rule_problems(job: Job, candidates: Candidates, piped: Layout) -> Iterator[str]:
    """Yield the rules of any training code that the run breaks. Rules of this system alone are not checked: other
    programs shard experts over data replicas, pad a vocabulary, and may have a stage without a layer."""
    spec = job.model
    yield from spec.problems()
    if spec.n_parameters > MOST_PARAMETERS or job.tokens > MOST_TOKENS:
        yield f"{spec.n_parameters:.3g} parameters and {job.tokens:.3g} tokens in a step are out of range"
    priced = job.cluster.accelerator.flops_per_s
    if FORMATS[job.precision].peak not in priced:
        yield f"no figures for {job.precision} on {job.cluster.accelerator.name}; valid: {', '.join(priced)}"
    # Checked as dense and without data ranks: the rules for experts and data ranks are about this system's sharding.
    inside = Layout(
        tp=int(candidates.tp[0]),
        cp=int(candidates.cp[0]),
        cp_method=candidates.shared.cp_method,
        sequence_parallel=bool(candidates.sequence_parallel[0]),
    )
    yield from rules.problems(replace(spec, moe=None), inside, job.seq_len)
    if piped.n_stages > MOST_STAGES:
        yield f"{piped.n_stages} stages are more than the {MOST_STAGES} that are simulated"
        return
    yield from stages.schedule_problems(piped, int(candidates.microbatches(job.global_batch)[0]))
    if candidates.pp > 1 and candidates.shared.stage_layers is None:
        yield from stages.problems(spec, piped)
    elif candidates.shared.stage_layers is not None and min(candidates.shared.stage_layers) < 0:
        yield f"{spec.n_layers} layers cannot be partitioned into the {piped.n_stages} stages of pp={candidates.pp}"


def with_columns(problem: str) -> str:
    """Return a rule with the names of table columns, without sections of a run file."""
    return re.sub(r"\b(layout|model|batch)\.(?=[a-z])", "", problem)
