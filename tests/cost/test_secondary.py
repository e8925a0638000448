"""Proves what a plan says of secondary shards in a node: their memory, what is gathered from them, and where they are
searched."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.rank_parameters import again_ranks
from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.planner.space import groups

MODEL = PRESETS["llama-3.1-8b"]
JOB = Job(model=MODEL, cluster=cluster("h100:32"), seq_len=8192, global_batch=256)
WHOLE = Layout(dp_shard=32, zero=3, recompute="full")
IN_NODE = WHOLE.changed(zero_secondary_ranks=8)
OF_LAYERS = MODEL.n_parameters - 2 * MODEL.vocab_size * MODEL.d_model - MODEL.d_model
"""Parameters."""


def test_each_rank_keeps_its_part_of_every_layer_in_the_type_of_matmuls():
    whole, in_node = (estimate(JOB, layout).memory.kinds for layout in (WHOLE, IN_NODE))
    assert in_node["gathered"].max() - whole["gathered"].max() == pytest.approx(2 * OF_LAYERS / 8)
    assert {kind for kind in whole if np.any(whole[kind] != in_node[kind])} == {"gathered"}


def test_layers_are_gathered_for_the_backward_pass_at_the_speed_of_a_node():
    slow = replace(JOB.cluster, across=replace(JOB.cluster.across, bytes_per_s=1e8))
    job = replace(JOB, cluster=slow)
    whole_s, in_node_s = (estimate(job, layout).parts_s["data parallel"] for layout in (WHOLE, IN_NODE))
    # Nothing hides so slow a network: 8 micro-batches gather the layers once over it instead of twice.
    less = 8 * 2 * OF_LAYERS * (31 / 32) / 8 / 1e8
    assert whole_s - in_node_s == pytest.approx(less, rel=0.05)


def test_parts_are_on_the_device_so_that_shards_come_from_the_host_once_a_microbatch():
    slow = replace(JOB.cluster.accelerator, host_bytes_per_s=1e7)
    job = replace(JOB, cluster=replace(JOB.cluster, accelerator=slow))
    on_host = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    whole_s, in_node_s = (
        estimate(job, layout.changed(**on_host)).parts_s["data parallel"] for layout in (WHOLE, IN_NODE)
    )
    assert whole_s - in_node_s == pytest.approx(8 * 4 * OF_LAYERS / 32 / 1e7, rel=0.05)


def test_only_layouts_whose_layers_would_come_from_other_nodes_are_searched_with_secondary_ranks():
    found = [group for group in groups(replace(JOB, global_batch=32)) if group.shared.zero_secondary_ranks > 1]
    assert {group.shared.zero_secondary_ranks for group in found} == {2, 4, 8}
    for group in found:
        assert np.all(group.zero == 3)
        assert group.pp == 1
        assert np.all(group.shared.zero_secondary_ranks * group.tp == 8)
        assert np.all(group.shards * group.tp > 8)
    in_one = replace(JOB, cluster=cluster("h100:8"))
    assert {group.shared.zero_secondary_ranks for group in groups(in_one)} == {1}


@pytest.mark.parametrize(
    ("model", "ep", "ranks"),
    [
        ("qwen3-30b-a3b", 2, 4),
        ("qwen3-30b-a3b", 4, 2),
        ("qwen3-30b-a3b", 8, 4),  # no two ranks of a node have the same experts
        ("mixtral-8x7b", 2, 16),  # fewer experts than ranks: FSDP2 shards another dim
    ],
)
def test_experts_are_gathered_again_from_the_ranks_of_a_node_that_share_them_or_from_all(
    model: str, ep: int, ranks: int
):
    candidates = Candidates.from_layout(Layout(dp_shard=32, zero=3, ep=ep, zero_secondary_ranks=8), 1)
    job = replace(JOB, model=PRESETS[model])
    assert again_ranks(job, candidates).tolist() == [8]
    assert again_ranks(job, candidates, experts=True).tolist() == [ranks]
