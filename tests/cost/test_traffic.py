"""Proves that the messages which a step is priced by are those that real steps send: calls and bytes, by collective
and by the ranks of its group, in fp32 on gloo.

The model has sizes that every layout here divides, so nothing is padded.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.cost.collectives import named, point_to_point
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.traffic import step_messages
from shardwright.layout.layout import Layout
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.verification.case import Case
from shardwright.verification.rank import build_trainer, local_batch
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.mutation import Mutation, mutated
from tests.traffic import Link, TrafficByGroup
from tests.training.worlds import OPTIMIZER, RATE, SPEC

SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 16, 16, 2
DENSE = replace(
    SPEC, n_heads=8, n_kv_heads=4, head_dim=8, d_model=64, d_ffn=96, vocab_size=128, n_layers=4, max_seq_len=SEQ_LEN
)
NET = LinearAttentionSpec(n_k_heads=4, n_v_heads=8, k_dim=8, v_dim=12, conv_width=3, full_interval=2)
MODELS: dict[str, ModelSpec] = {
    "linear": replace(DENSE, linear_attention=NET),
    "dense": DENSE,
    "one kv head": replace(DENSE, n_kv_heads=1),
    "normed heads": replace(DENSE, qk_norm=True),
    "gpt": replace(DENSE, norm="layernorm", activation="gelu_tanh", positions="learned", bias=True),
    "tied": replace(DENSE, tied_embedding=True),
    "dropout": replace(DENSE, dropout=0.1),
    "experts": replace(DENSE, moe=MoESpec(n_experts=8, top_k=2, d_ffn=32, n_shared=1, first_dense=1)),
    "latent": replace(
        DENSE,
        n_kv_heads=8,
        latent_attention=LatentAttentionSpec(kv_rank=16, q_rank=24, nope_dim=8, rope_dim=4, v_dim=8),
    ),
}
LAYOUTS = [
    ("dense", Layout(dp_replicate=2)),
    ("dense", Layout(dp_shard=2, zero=1)),
    ("dense", Layout(dp_shard=2, zero=3)),
    ("dense", Layout(dp_replicate=2, dp_shard=2, zero=3)),
    ("dense", Layout(tp=2, sequence_parallel=False)),
    ("dense", Layout(tp=2)),
    ("normed heads", Layout(tp=2)),
    ("gpt", Layout(tp=2, dp_shard=2, zero=1)),
    ("one kv head", Layout(tp=2)),
    ("dense", Layout(tp=2, loss_chunk_tokens=8)),
    ("dense", Layout(tp=2, dp_shard=2, zero=2)),
    ("dense", Layout(cp=2)),
    ("dense", Layout(cp=4, cp_method="ring", zero=1)),
    ("dense", Layout(cp=2, cp_method="allgather")),
    ("dense", Layout(cp=4, cp_method="ulysses")),
    ("one kv head", Layout(cp=4, cp_method="ulysses")),
    ("dense", Layout(cp=2, tp=2)),
    ("linear", Layout(cp=2, cp_method="ring", zero=1)),
    ("linear", Layout(cp=4, cp_method="ulysses")),
    ("dense", Layout(cp=2, dp_shard=2, zero=3)),
    ("dense", Layout(pp=4)),
    ("tied", Layout(pp=2, dp_shard=2, zero=1)),
    ("dense", Layout(pp=2, dp_shard=2, zero=2)),
    ("dense", Layout(pp=2, dp_shard=2, zero=3)),
    ("dense", Layout(pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch")),
    ("dense", Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2, tp=2)),
    ("dense", Layout(pp=2, pp_schedule="zb-h1", tp=2)),
    ("dense", Layout(pp=2, pp_schedule="dualpipe")),
    ("dense", Layout(pp=2, cp=2)),
    ("experts", Layout(dp_shard=2, ep=2, zero=1)),
    ("experts", Layout(dp_replicate=2)),
    ("experts", Layout(tp=2, ep=2)),
    ("experts", Layout(tp=2, dp_shard=2, ep=4, zero=2)),
    ("experts", Layout(pp=2, dp_shard=2, ep=2, zero=1)),
    ("dense", Layout(dp_replicate=2, compress_gradients="bf16")),
    ("dense", Layout(dp_replicate=2, dp_shard=2, zero=3, compress_gradients="bf16")),
    ("experts", Layout(dp_replicate=2, dp_shard=2, ep=2, zero=1, compress_gradients="bf16")),
    ("experts", Layout(dp_shard=2, tp=2, ep=2, zero=2, compress_gradients="bf16")),
    ("dense", Layout(dp_replicate=2, compress_gradients="powersgd-2")),
    ("experts", Layout(dp_replicate=2, compress_gradients="powersgd-4")),
    ("latent", Layout(pp=2, cp=2, zero=0, compress_gradients="powersgd-1")),
    ("experts", Layout(dp_replicate=2, compress_gradients="topk-2")),
    ("latent", Layout(pp=2, dp_replicate=2, tp=2, compress_gradients="topk-4")),
    ("experts", Layout(dp_shard=2, ep=2, zero=1, compress_dispatch="fp8")),
    ("experts", Layout(pp=2, tp=2, ep=2, compress_dispatch="fp8", compress_pipeline="int8")),
    ("dense", Layout(pp=2, pp_schedule="dualpipe", compress_pipeline="fp8")),
    ("latent", Layout(tp=2, sequence_parallel=False)),
    ("latent", Layout(cp=2, cp_method="ulysses")),
    ("latent", Layout(tp=2, cp=2, dp_shard=1, zero=1)),
    ("dense", Layout(dp_shard=4, tp=2, zero=3, zero_secondary_ranks=2)),
    ("experts", Layout(dp_shard=4, ep=2, zero=3, zero_secondary_ranks=2)),
]
RECOMPUTED = [
    ("dense", Layout(tp=2, recompute="full")),
    ("dense", Layout(tp=2, sequence_parallel=False, recompute="full", recompute_layers=1)),
    ("dropout", Layout(tp=2, recompute="full")),
    ("dense", Layout(cp=2, cp_method="allgather", recompute="full")),
    ("linear", Layout(cp=2, tp=2, recompute="full")),
    ("dense", Layout(cp=4, cp_method="ulysses", recompute="selective", recompute_modules=("norms", "attention"))),
    ("experts", Layout(dp_shard=4, tp=2, ep=2, zero=3, recompute="full")),
]
QUICK = [("dense", Layout(pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch"))]
Counts = tuple[Counter[Link], Counter[Link]]


def sent_in_a_step(spec: ModelSpec, layout: Layout) -> Counts:
    case = Case(
        spec, SEQ_LEN, GLOBAL_BATCH, seed=5, optimizer=OPTIMIZER, steps=1, micro_batch=MICRO_BATCH, dtype="float32"
    )
    trainer = build_trainer(case, layout, "adamw")
    batch = local_batch(case, layout, dist.get_rank(), 0)
    with TrafficByGroup(torch.float32, torch.bfloat16, torch.uint8) as traffic:
        trainer.step(batch, 0, RATE)
    del trainer
    return traffic.calls, traffic.bytes


def priced(spec: ModelSpec, layout: Layout, pp_rank: int) -> Counts:
    job = Job(
        model=spec,
        cluster=cluster(f"h100:{layout.world_size}/{layout.world_size}"),
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
    )
    calls: Counter[Link] = Counter()
    n_bytes: Counter[Link] = Counter()
    for message in step_messages(job, Candidates.from_layout(layout, MICRO_BATCH), pp_rank):
        what = "send" if message.collective is point_to_point else named(message.collective)
        size, stride, count, each = (
            np.asarray(number).item() for number in (message.size, message.stride, message.calls, message.n_bytes)
        )
        assert count == int(count), message
        if what == "reduce-scatter" and (size, stride) == (layout.tp, 1):
            what = "all-to-all"  # on gloo, whose own reduce-scatter is an all-reduce; parallel/collectives.py
        link = (what, size, stride)
        calls[link] += int(count)
        n_bytes[link] += round(count * each)
    return calls, n_bytes


@pytest.mark.parametrize(("model", "layout"), rest_prove([*LAYOUTS, *RECOMPUTED], *QUICK), ids=str)
def test_priced_messages_are_those_of_a_real_step(model: str, layout: Layout):
    spec = MODELS[model]
    ranks = run_ranks(sent_in_a_step, layout.world_size, spec, layout)
    for pp_rank in range(layout.pp):
        expected = priced(spec, layout, pp_rank)
        members = [ranks[rank] for rank in range(layout.world_size) if layout.coordinates(rank)["pp"] == pp_rank]
        for calls, _ in members:
            assert calls == expected[0]
        # What experts receive differs from rank to rank; over all ranks it is what all send.
        mean = {link: sum(n_bytes[link] for _, n_bytes in members) / len(members) for link in members[0][1]}
        assert mean == expected[1]


MESSAGES, DATA = "shardwright.cost.messages", "shardwright.cost.data_messages"
BUGS = {
    "one gather a pass instead of one a block": (
        ("dense", Layout(dp_shard=2, zero=3)),
        Mutation(f"{DATA}:groups", "np.where(whole, in_buckets, blocks)", "np.ones_like(blocks)"),
    ),
    "embedding and head gathered in the backward pass too": (
        ("dense", Layout(pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch")),
        Mutation(f"{DATA}:stage_collectives", "(GATHERED_AGAIN, SCATTERED)", "(GATHERED, SCATTERED)"),
    ),
    "the head does not gather its input again": (
        ("dense", Layout(tp=2)),
        Mutation(
            "shardwright.cost.layer:head_over_tp",
            "over.input(tokens * job.model.d_model * job.element_bytes, 'input', narrow=False)",
            "over.input(tokens * job.model.d_model * job.element_bytes, 'input', again=False, narrow=False)",
        ),
    ),
    "the loss sums nothing over tp": (
        ("dense", Layout(tp=2, sequence_parallel=False)),
        Mutation(
            "shardwright.cost.layer:head_over_tp",
            "over.terms[MESSAGES_OF_F] |= loss_sums(passes, job, candidates, tokens, np.ones(len(candidates)))",
            "pass",
        ),
    ),
    "a ring sends the gradients of keys once too often": (
        ("dense", Layout(cp=4)),
        Mutation(
            f"{MESSAGES}:_ring",
            "sums = hop('gradients of keys and values', kv * max(job.element_bytes, 4.0))",
            "hops = candidates.cp\nsums = hop('gradients of keys and values', kv * max(job.element_bytes, 4.0))",
        ),
    ),
    "maps of states are sent of one chunk of two": (
        ("linear", Layout(cp=2)),
        Mutation("shardwright.cost.layer:states", "chunks_of_ring_rank(candidates.shared.cp_method)", "1"),
    ),
    "gradients of states are sent without the maps": (
        ("linear", Layout(cp=2)),
        Mutation("shardwright.cost.layer:states", "sizes.items()", "list(sizes.items())[: 1 + (not back)]"),
    ),
    "full recomputation sends nothing": (
        RECOMPUTED[-1],
        Mutation(
            "shardwright.cost.recompute:record_messages",
            "full = (candidates.recompute == FULL).astype(int)",
            "full = 0 * candidates.recompute",
        ),
    ),
    "full recomputation sums the last matmul of a layer again": (
        RECOMPUTED[0],
        Mutation("shardwright.cost.recompute:record_messages", "message.what not in but", "True"),
    ),
    "ulysses sends each kv head once": (
        ("one kv head", Layout(cp=4, cp_method="ulysses")),
        Mutation(
            "shardwright.cost.layer:context",
            "np.maximum(kv_heads, candidates.cp) * key_and_value",
            "kv_heads * key_and_value",
        ),
    ),
    "the tied matrix is summed whole though ZeRO shards it": (
        ("tied", Layout(pp=2, dp_shard=2, zero=1)),
        Mutation(
            f"{DATA}:replica_messages",
            "spec.vocab_size * spec.d_model / candidates.tp * n_bytes / shares",
            "spec.vocab_size * spec.d_model / candidates.tp * n_bytes",
        ),
    ),
    "matrices that travel as products are summed whole, too": (
        ("dense", Layout(dp_replicate=2, compress_gradients="powersgd-2")),
        Mutation(
            f"{DATA}:groups", "params.dense - params.untrained - params.compressed", "params.dense - params.untrained"
        ),
    ),
    "parts of a stacked matrix have one right factor": (
        ("latent", Layout(pp=2, cp=2, zero=0, compress_gradients="powersgd-1")),
        Mutation(
            "shardwright.cost.compression:_row_counts",
            "experts * len(row.parts) * row.shape[-1]",
            "experts * row.shape[-1]",
        ),
    ),
    "untrained biases of routers are gathered": (
        ("experts", Layout(dp_shard=2, ep=2, zero=1)),
        Mutation(f"{DATA}:groups", "params.dense - params.untrained", "params.dense"),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_wrong_price_is_not_what_is_sent(name: str):
    """The healthy price is what a real step sends, by the test above."""
    (model, layout), bug = BUGS[name]
    pp_rank = layout.pp - 1
    healthy = priced(MODELS[model], layout, pp_rank)
    with mutated(bug):
        assert priced(MODELS[model], layout, pp_rank) != healthy
