"""Known problems of a layout or a job, as sentences."""

from collections.abc import Iterator

from shardwright.cost.job import Job
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.simplicity import leaves_nodes

LONG = 4096
"""Sequence length, in tokens, from which the square of scores dominates a layer."""
IDLE = 0.15
"""Share of a step from which the pipeline bubble is reported."""
GROUPED_ROW_BYTES = 16
"""A row of a grouped matmul has to be a multiple of this number of bytes (`model.experts.has_grouped_mm`)."""


def warnings(priced: PricedLayout) -> list[str]:
    """Return every known problem of a layout; empty for a good layout."""
    return [*job_warnings(priced.job), *_tensor(priced), *_pipeline(priced), *_experts(priced.job, priced.choice)]


def job_warnings(job: Job) -> Iterator[str]:
    """Yield the problems of the job that do not depend on the layout."""
    model = job.model
    if job.seq_len > model.max_seq_len and model.positions == "learned":
        yield (
            f"seq_len={job.seq_len} is beyond the model's {model.max_seq_len} learned positions (model.max_seq_len): "
            f"later tokens have no vector, and train refuses it; a larger max_seq_len makes a longer table, whose new "
            f"rows have to be learned"
        )
    elif job.seq_len > model.max_seq_len:
        yield (
            f"seq_len={job.seq_len} is beyond the model's rotary range of {model.max_seq_len} tokens "
            f"(model.max_seq_len); train refuses it until that is raised, and rope_theta or rope_scaling should be "
            f"chosen for the new length"
        )
    node = job.cluster.node_size
    if job.cluster.size > 1 and job.seq_len % 2 and (node == 1 or job.seq_len % node):
        yield (
            f"seq_len={job.seq_len} is no multiple of 2: neither tp with sequence_parallel nor cp can partition it "
            f"into 2, 4, ... parts, so layouts with them are not searched; take {job.seq_len - 1} or "
            f"{job.seq_len + 1}"
        )
    if job.precision == "fp16":
        yield (
            "precision fp16: large activations overflow, and steps whose gradients do are skipped, by the loss scale; "
            "bf16 costs the same and needs none"
        )
    if job.seq_len >= LONG and not job.stack.flash_attention:
        yield (
            f"seq_len={job.seq_len} without flash attention: the {job.stack.name} stack stores {job.seq_len} scores "
            f"for each token and head, more than all else a layer keeps"
        )
    elif job.seq_len >= LONG and job.element_bytes == 4:
        yield (
            f"seq_len={job.seq_len} in fp32: flash attention is made for 16 bits; what runs in its place is slower, "
            f"and over cp stores blocks of scores, which is not counted here; use bf16"
        )


def _tensor(priced: PricedLayout) -> Iterator[str]:
    layout, cluster = priced.choice.layout, priced.job.cluster
    if leaves_nodes(layout.tp, cluster.node_size):
        share = priced.parts_s.get("tensor parallel", 0.0) / priced.step_s
        yield (
            f"tp={layout.tp} does not stay within nodes of {cluster.node_size}: each layer has four collectives over "
            f"the network, exposed for {share:.0%} of the step; keep tp to a divisor of {cluster.node_size}"
        )


def _pipeline(priced: PricedLayout) -> Iterator[str]:
    layout = priced.choice.layout
    if layout.pp == 1:
        return
    m = priced.job.global_batch // (priced.choice.micro_batch * layout.data_ranks)
    share = priced.parts_s.get("pipeline", 0.0) / priced.step_s
    if m < layout.pp or share > IDLE:
        has = "1 micro-batch" if m == 1 else f"{m} micro-batches"
        yield (
            f"pp={layout.pp} has {has} a step to fill its stages, and ranks are idle for {share:.0%} of it; a larger "
            f"global batch, a smaller micro_batch or fewer data ranks give more micro-batches"
        )


def _experts(job: Job, choice: Choice) -> Iterator[str]:
    moe = job.model.moe
    if moe is None:
        return
    widths = {"model.moe.d_ffn": moe.d_ffn, "model.d_model": job.model.d_model}
    odd = {name: width for name, width in widths.items() if width * job.element_bytes % GROUPED_ROW_BYTES}
    for name, width in odd.items():
        yield (
            f"ep={choice.layout.ep} without grouped matmuls: {name}={width} makes rows of "
            f"{width * job.element_bytes} bytes, no multiple of {GROUPED_ROW_BYTES}, so "
            f"{moe.n_experts // choice.layout.ep} experts run one by one, each with a synchronisation with the "
            f"device; make it a multiple of {GROUPED_ROW_BYTES // job.element_bytes}"
        )
