"""A plan as one JSON document."""

from dataclasses import asdict
from typing import Any

import numpy as np

from shardwright.cost.job import Job
from shardwright.planner.alternatives import Alternative, reasons, savings
from shardwright.planner.choice import PricedLayout, shortage
from shardwright.planner.headline import headline
from shardwright.planner.nearest import PlanRemedy
from shardwright.planner.search import Plan
from shardwright.planner.whole_run import StageError, TrainingGoal, reference_s, whole_run_on
from shardwright.planner.words import expert_load_in_words, remarks, warnings


def job_document(job: Job, name: str, limit_bytes: float) -> dict[str, Any]:
    """Return the job: model, batch, cluster and limits."""
    return {
        "model": name,
        "parameters": job.model.n_parameters,
        "trained_parameters": job.model.n_trained_parameters,
        "lora": None if job.model.lora is None else asdict(job.model.lora),
        "cluster": job.cluster.name,
        "accelerators": job.cluster.size,
        "accelerator": job.cluster.accelerator.name,
        "node_size": job.cluster.node_size,
        "memory_bytes": job.cluster.accelerator.memory_bytes,
        "limit_bytes": limit_bytes,
        "host_memory_bytes_per_node": job.cluster.host_memory_bytes or None,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "document_tokens": job.document_tokens,
        "precision": job.precision,
        "stack": job.stack.name,
        "expert_load": None if job.expert_load is None else job.expert_load.text,
    }


def layout_document(priced: PricedLayout, limit_bytes: float, goal: TrainingGoal | None = None) -> dict[str, Any]:
    """Return one layout with its numbers; `memory_by_kind_bytes` has a list by pp rank for each kind."""
    document: dict[str, Any] = {
        "layout": priced.choice.settings(),
        "text": str(priced.choice),
        **vars(headline(priced)),
        "time_s": priced.parts_s,
        "peak_bytes": priced.peak_bytes,
        "fits": priced.fits(limit_bytes),
        "memory_by_kind_bytes": {kind: np.asarray(sizes)[0].tolist() for kind, sizes in priced.memory.kinds.items()},
        "host_bytes_per_node": priced.host_bytes_per_node,
        "warnings": warnings(priced),
    }
    if load := expert_load_in_words(priced):
        document["expert_load"] = load
    if priced.job.reference_sequences:
        document["reference_s"] = reference_s(priced.job, priced.step_s)
    if goal is not None:
        try:
            run = whole_run_on(priced, document["interval_s"], goal)
        except StageError as error:
            return document | {"days": None, "accelerator_hours": None, "whole_run": None, "stage_problem": str(error)}
        document |= {"days": run.days, "accelerator_hours": run.accelerator_hours, "whole_run": asdict(run)}
    return document


def plan_document(
    plan: Plan,
    whole: Plan,
    name: str,
    own: Alternative | None,
    alternatives: list[Alternative],
    remedies: list[PlanRemedy],
    goal: TrainingGoal | None,
) -> dict[str, Any]:
    """Return the whole plan. `whole`: the plan of all requested accelerators; if `plan` is of a part of them
    (--prefer cheapest), `requested` has the cluster of `whole` and its recommended layout. `best`: the fastest layouts
    that fit, each with the layouts of equal cost (`equals`). `recommended`: a layout that ties with the first of `best`
    (it may be the first), or the layout of --prefer; `remarks` has the reason. `simplest`: the simplest layout near the
    first. `run_file`: the run file's own layout, `own`, if one was given. `alternatives`: the best layouts of other
    kinds, with `slower` as a share of the recommended layout's time. If no layout fits, `nearest` and `remedies` list
    changes that would make one fit."""
    taken = plan.recommended
    document = {
        **job_document(plan.job, name, plan.limit_bytes),
        "requested": None if whole is plan else _requested(whole),
        "fixed": None if plan.fixed is None else dict(plan.fixed.values),
        "n_layouts": plan.survey.n_layouts,
        "n_fit": len(plan.pool),
        "n_simulated": plan.pool.n_simulated,
        "best": [
            layout_document(priced, plan.limit_bytes, goal) | {"equals": [str(choice) for choice in equals]}
            for priced, equals in zip(plan.best, plan.equals, strict=True)
        ],
        "prefer": plan.prefer,
        "recommended": None if taken is None else layout_document(taken, plan.limit_bytes, goal),
        "remarks": [] if taken is None else remarks(plan),
        "simplest": None if plan.simplest is None else layout_document(plan.simplest, plan.limit_bytes, goal),
        "run_file": None if taken is None or own is None else _alternative(taken, own),
        "alternatives": [] if taken is None else [_alternative(taken, alternative) for alternative in alternatives],
    }
    if taken is None:
        nearest = plan.survey.nearest
        assert nearest is not None
        document["nearest"] = {"text": str(nearest), "peak_bytes": plan.survey.nearest_bytes}
        document["nearest"]["lacks"] = shortage(plan.job, nearest, plan.survey.nearest_bytes, plan.limit_bytes)
        document["remedies"] = [remedy.what for remedy in remedies]
    return document


def _requested(whole: Plan) -> dict[str, Any]:
    taken, cluster = whole.recommended, whole.job.cluster
    result: dict[str, Any] = {"cluster": cluster.name, "accelerators": cluster.size, "recommended": None}
    if taken is not None:
        result["recommended"] = {"text": str(taken.choice), "step_s": taken.step_s, "peak_bytes": taken.peak_bytes}
    return result


def _alternative(taken: PricedLayout, alternative: Alternative) -> dict[str, Any]:
    document: dict[str, Any] = {
        "kind": alternative.name,
        "text": str(alternative.choice),
        "fits": alternative.priced is not None,
    }
    if alternative.priced is not None:
        document |= {
            "step_s": alternative.priced.step_s,
            "slower": alternative.slower(taken),
            "peak_bytes": alternative.priced.peak_bytes,
            "slower_in_s": dict(reasons(taken, alternative.priced)),
            "faster_in_s": dict(savings(taken, alternative.priced)),
        }
    elif alternative.nearest is not None:
        document["peak_bytes"] = alternative.nearest[1]
    return document
