"""Rows that no program could have run: the rules of the training code, asked of a published layout.

Not asked is what only this system wants: other programs fold experts over data replicas, pad a vocabulary, and may
leave a stage without a layer.
"""

import re
from dataclasses import replace

from shardwright.cost.job import Candidates, Job
from shardwright.layout import Layout
from shardwright.plan.run_cells import Unusable
from shardwright.split import rules, stages

MOST_STAGES = 512
"""Of a pipeline, which is run on paper action by action."""
MOST_PARAMETERS = 1e16
MOST_TOKENS = 1e12
"""Of a step. Beyond these, products of sizes leave the whole numbers of 64 bits that the cost model counts with."""


def check(job: Job, of: Candidates) -> None:
    """Raises Unusable, with the first rule that is broken."""
    spec, tp = job.model, int(of.tp[0])
    if found := spec.problems():
        raise Unusable(_of_columns(found[0]))
    if spec.n_parameters > MOST_PARAMETERS or job.tokens > MOST_TOKENS:
        raise Unusable(f"{spec.n_parameters:.3g} parameters and {job.tokens:.3g} tokens in a step are not believed")
    precisions = job.cluster.accelerator.flops_per_s
    if job.precision not in precisions:
        raise Unusable(
            f"precision={job.precision}: no figures for it on {job.cluster.accelerator.name}; "
            f"valid: {', '.join(precisions)}"
        )
    # Dense, and without data ranks: rules of those are about how this system shares out state.
    layout = Layout(tp=tp, cp=int(of.cp[0]), sequence_parallel=bool(of.sequence_parallel[0]))
    found = rules.problems(replace(spec, moe=None), layout, job.seq_len)
    if of.pp > 1:
        piped = Layout(pp=of.pp, schedule=of.schedule, virtual_stages=of.virtual_stages)
        if piped.n_stages > MOST_STAGES:
            raise Unusable(f"{piped.n_stages} stages are more than the {MOST_STAGES} that are believed")
        found += stages.schedule_problems(piped, int(of.microbatches(job.global_batch)[0]))
        if of.stage_layers is None:
            found += stages.problems(spec, piped)
        elif (
            len(of.stage_layers) != piped.n_stages or sum(of.stage_layers) != spec.n_layers or min(of.stage_layers) < 0
        ):
            found.append(f"{spec.n_layers} layers cannot be dealt to the {piped.n_stages} stages of pp={of.pp}")
    if found:
        raise Unusable(_of_columns(found[0]))


def check_experts(experts: int, ep: int) -> None:
    """Raises Unusable where ranks would have parts of experts."""
    if experts % ep:
        valid = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise Unusable(f"ep={ep} does not divide {experts} experts; valid: {valid}")


def _of_columns(problem: str) -> str:
    """A rule in the words of a table, which has no sections."""
    return re.sub(r"\b(layout|model|batch)\.(?=[a-z])", "", problem)
