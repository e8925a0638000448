"""Proves that training with compressed gradients is that of one process within the error of the roundings, that it
sends what the formulas and the planner say, and that what cannot be compressed is refused with the way out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.config import parse
from shardwright.cost.collectives import all_to_all
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.traffic import step_messages
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.modules import end_rows, rows
from shardwright.split.compression import gradient_roundings
from shardwright.system.errors import ConfigError, LayoutError
from shardwright.verification import Verifier
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.traffic import Link, Traffic, TrafficByGroup
from tests.training.bugs.bug import EXPERTS
from tests.training.test_fp8 import RECIPES, fp8_case
from tests.training.test_memory_and_traffic import ACCUMULATION, EVEN
from tests.training.worlds import RATE, SPEC, build, case, local_batch

N_PARAMETERS = EVEN.n_parameters
BF16 = {"compress_gradients": "bf16"}
ROUNDED = {
    "zero 0": Layout(dp_replicate=4, **BF16),
    "zero 1": Layout(dp_shard=4, zero=1, **BF16),
    "zero 2": Layout(dp_shard=4, zero=2, **BF16),
    "zero 3": Layout(dp_shard=2, zero=3, **BF16),
    "zero 1, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=1, **BF16),
    "zero 3, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=3, **BF16),
    "cp": Layout(cp=2, dp_shard=2, zero=2, **BF16),
    "cp, zero 0": Layout(cp=2, zero=0, **BF16),
    "tp": Layout(tp=2, dp_shard=2, zero=3, **BF16),
    "pipeline": Layout(pp=2, dp_shard=2, zero=2, pp_schedule="zb-h1", **BF16),
    "two ways": Layout(pp=2, dp_replicate=2, pp_schedule="dualpipe", **BF16),
}
WIDE = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32, n_layers=4)


def verified(verifier: Verifier, layout: Layout, dtype: str = "float64") -> None:
    accumulation = 4 if layout.pp_schedule == "dualpipe" or dtype in ("bfloat16", "float16") else 3
    given = replace(case(layout, accumulation, dtype, WIDE), seq_len=12)
    report = verifier.parity(given, layout)
    assert report.equal, report.differing or report.worst
    if gradient_roundings(layout):
        rounded = [row.error for row in report.rows if row.quantity.kind == "gradient" and row.quantity.step == 1]
        assert max(rounded) > 1e-4, "gradients have to have been rounded"


@pytest.mark.parametrize("name", rest_prove(ROUNDED, "zero 3"))
def test_gradients_in_bf16_are_those_of_one_process_within_their_roundings(name: str, verifier: Verifier):
    verified(verifier, ROUNDED[name])


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "dtype"), [("zero 2", "float32"), ("zero 0", "bfloat16"), ("zero 1, hybrid", "bfloat16")]
)
def test_so_they_are_with_fewer_digits(name: str, dtype: str, verifier: Verifier):
    verified(verifier, ROUNDED[name], dtype)


WEIGHTS, INT8 = {"compress_weights": "int8"}, {"compress_gradients": "int8"}
THIN = {"compress_gradients": "powersgd-2"}
AS_INTEGERS = {
    "gradients, zero 1": Layout(dp_shard=4, zero=1, **INT8),
    "gradients and weights, two hops": Layout(dp_shard=4, zero=3, node_ranks=2, **INT8, **WEIGHTS),
    "gradients, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=3, **INT8),
    "4 bits": Layout(dp_shard=2, zero=3, compress_gradients="int4"),
    "weights, zero 3": Layout(dp_shard=2, zero=3, **WEIGHTS),
    "weights, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2, **WEIGHTS),
    "weights, tp": Layout(tp=2, dp_shard=2, zero=3, **WEIGHTS),
    "weights, cp": Layout(cp=2, zero=3, **WEIGHTS),
    "weights, pipeline": Layout(pp=2, dp_shard=2, zero=3, zero_pp_gather="microbatch", **WEIGHTS),
}


@pytest.mark.parametrize("name", rest_prove(AS_INTEGERS, "weights, zero 3"))
def test_integers_train_as_one_process_that_uses_the_weights_that_arrive(name: str, verifier: Verifier):
    verified(verifier, AS_INTEGERS[name])


IN_FP16 = {
    "bf16": Layout(dp_shard=2, zero=2, **BF16),
    "bf16, zero 0": Layout(dp_replicate=2, **BF16),
    "int8, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=1, **INT8),
    "int4": Layout(dp_shard=2, zero=3, compress_gradients="int4", **WEIGHTS),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", IN_FP16)
def test_gradients_with_a_loss_scale_are_rounded_as_others_are_and_an_overflow_reaches_every_rank(
    name: str, verifier: Verifier
):
    """One step has an infinite gradient on the first rank: all ranks have to skip it, as one process does."""
    verified(verifier, IN_FP16[name], "float16")


@pytest.mark.prove
def test_optimizer_states_on_a_disk_take_compressed_gradients(verifier: Verifier):
    verified(verifier, replace(AS_INTEGERS["gradients and weights, two hops"], offload_optimizer="disk"))


def test_fp8_and_rounded_gradients_are_verified_apart(verifier: Verifier):
    """Of this model the gradient of a step after an update is off by 0.16, more than int8 and far more than fp8."""
    layout = Layout(dp_shard=2, zero=2, **INT8)
    with pytest.raises(LayoutError, match=r"verify one, and then the other, with --set precision\.fp8=none"):
        verifier.parity(fp8_case(RECIPES["rowwise"], layout), layout)


@pytest.mark.prove
def test_weights_of_experts_travel_too(verifier: Verifier):
    for layout in (Layout(dp_shard=4, zero=3, ep=2, **WEIGHTS), Layout(dp_shard=2, zero=3, ep=2, **WEIGHTS, **INT8)):
        given = replace(case(layout, 3, spec=replace(WIDE, moe=EXPERTS)), seq_len=12)
        report = verifier.parity(given, layout)
        assert report.equal, (layout, report.differing or report.worst)


@pytest.mark.prove
def test_weights_as_integers_are_exact_to_rounding(verifier: Verifier):
    layout = AS_INTEGERS["weights, zero 3"]
    report = verifier.parity(replace(case(layout, 3, spec=WIDE), seq_len=12), layout)
    assert report.worst_error < 1e-12
    plain = verifier.parity(replace(case(layout, 3, spec=WIDE), seq_len=12), replace(layout, compress_weights="none"))
    assert plain.equal


def sent_in_a_step(layout: Layout) -> dict[str, int]:
    """Bytes of the larger side of each kind of collective of a step, in fp32."""
    trainer = build(layout, torch.float32, EVEN)
    data_rank = layout.data_rank(dist.get_rank())
    with Traffic() as traffic:
        trainer.step(local_batch(0, data_rank, layout.data_ranks, ACCUMULATION), 0, RATE)
    return {kind: n for kind, n in traffic.bytes.items() if kind != "small"}


def sent_by_plan(layout: Layout) -> int:
    """The bytes of a step's compressed sums by the formulas of `plan --explain`."""
    job = Job(model=EVEN, cluster=cluster("h100:4/4"), seq_len=16, global_batch=96, precision="fp32")
    messages = step_messages(job, Candidates.from_layout(layout, 96 // (ACCUMULATION * layout.data_ranks)), 0)
    return round(sum(float(np.sum(each.n_bytes * each.calls)) for each in messages if each.collective is all_to_all))


SENT = {"zero 0": (0, 1), "zero 1": (1, 0), "zero 2": (ACCUMULATION, 0), "zero 3, hybrid": (ACCUMULATION, 1)}
"""How often a step reduce-scatters all gradients, and how often it sums this rank's shards over replicas."""


def bytes_of_a_shard(n_ranks: int, bits: int) -> int:
    """Bytes in which a rank's shard of all parameters of EVEN travels: its vectors in fp32, and of its matrices an
    integer for each element and a scale for each row, as no row has more than one block."""
    vectors = sum(row.numel for _, row in rows(EVEN).items() if len(row.shape) == 1)
    n_rows = sum(row.numel // row.shape[-1] for _, row in rows(EVEN).items() if len(row.shape) > 1)
    return (4 * vectors + (N_PARAMETERS - vectors) * bits // 8 + 4 * n_rows) // n_ranks


@pytest.mark.prove
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_send_a_byte_or_half_and_a_scale_for_each_block(bits: int):
    layout = Layout(dp_shard=4, zero=3, node_ranks=2, compress_gradients=f"int{bits}", **WEIGHTS)
    ends = sum(row.numel // row.shape[-1] * (4 + row.shape[-1]) if len(row.shape) > 1 else 4 * row.numel
               for row in end_rows(EVEN))  # fmt: skip
    for sent in run_ranks(sent_in_a_step, 4, layout):
        # Inside a node a rank sends the parts of all 4 ranks, between two nodes those of 2.
        assert sent["alltoall_base"] == ACCUMULATION * (4 + 2) * bytes_of_a_shard(4, bits)
        assert sent["allgather_base"] == ACCUMULATION * (2 * 4 * bytes_of_a_shard(4, 8) - ends)


def sent_to_groups(layout: Layout) -> dict[Link, int]:
    """Bytes of a step of one micro-batch, in fp32, by kind of collective and group of ranks."""
    trainer = build(layout, torch.float32, EVEN)
    with TrafficByGroup(torch.uint8, torch.float32) as traffic:
        trainer.step(local_batch(0, layout.data_rank(dist.get_rank()), layout.data_ranks, 1), 0, RATE)
    return dict(traffic.bytes)


@pytest.mark.prove
def test_integers_and_secondary_shards_send_a_quarter_between_nodes():
    """Of 3 M, the parameters twice and the gradients in 16 bits, 0.75 M are left (ZeRO++), beside scales and vectors:
    parameters in 8 bits once, and the sums of the ranks of a node in 4 bits."""
    layout = Layout(
        dp_shard=4, zero=3, zero_secondary_ranks=2, node_ranks=2, compress_gradients="int4", **WEIGHTS
    )  # fmt: skip
    in_node, between = 1, 2
    for sent in run_ranks(sent_to_groups, 4, layout):
        assert set(sent) == {("all-gather", 4, 1), ("all-gather", 2, in_node), ("all-to-all", 2, in_node),
                             ("all-to-all", 2, between)}  # fmt: skip
        parameters = sent["all-gather", 4, 1]
        gradients = 2 * sent["all-to-all", 2, between]  # of both ranks of a node
        assert parameters == 4 * bytes_of_a_shard(4, 8)
        assert gradients == 4 * bytes_of_a_shard(4, 4)
    matrices = sum(row.numel for _, row in rows(EVEN).items() if len(row.shape) > 1)
    scales = 4 * sum(row.numel // row.shape[-1] for _, row in rows(EVEN).items() if len(row.shape) > 1)
    integers = parameters + gradients - 2 * (scales + 4 * (N_PARAMETERS - matrices))
    assert integers == 0.25 * (3 * 2 * matrices)


@pytest.mark.parametrize("name", rest_prove(SENT, "zero 1"))
def test_gradients_in_bf16_send_two_bytes_an_element(name: str):
    layout = ROUNDED[name]
    scattered, over_replicas = SENT[name]
    shard = N_PARAMETERS // layout.dp_shard
    for sent in run_ranks(sent_in_a_step, 4, layout):
        assert "allreduce" not in sent
        assert "reduce_scatter_base" not in sent
        assert sent["alltoall_base"] == 2 * (scattered * N_PARAMETERS + over_replicas * shard)
    assert sent_by_plan(layout) == sent["alltoall_base"]


REFUSED = {
    "one data rank": ({"tp": 2}, {}, "needs more than one rank of dp_replicate x dp_shard x cp"),
    "float64": ({"dp_shard": 2}, {"compute": "fp64"}, "set precision.compute to 'fp32' or 'bf16'"),
    "integers without ZeRO": ({"dp_replicate": 2, **INT8}, {}, "compress_gradients='bf16', which every stage can have"),
    "weights that are not gathered": ({"dp_replicate": 2, **WEIGHTS}, {}, "zero=1, 2 or 3, where parameters are gath"),
    "uneven nodes": ({"dp_shard": 4, "node_ranks": 3, **INT8}, {}, "valid: 1, 2, 4"),
    "nodes of nothing": ({"dp_shard": 4, "node_ranks": 2}, {}, "needs compress_gradients='int8' or 'int4'"),
    "PowerSGD in bf16": ({"dp_replicate": 2, **THIN}, {"compute": "bf16"}, "set precision.compute='fp32'"),
    "PowerSGD in fp16": ({"dp_replicate": 2, **THIN}, {"compute": "fp16"}, "or compress_gradients='bf16'"),
    "integers of fp8": ({"dp_shard": 2, **WEIGHTS}, {"fp8": "rowwise"}, "set one of them to 'none'"),
    "a misspelt kind": ({"dp_shard": 2, "compress_gradients": "bf61"}, {}, "bf16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compressed_is_refused_with_the_way_out(name: str):
    layout, precision, way_out = REFUSED[name]
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 128, "global_batch": 32}}
    with pytest.raises((ConfigError, LayoutError), match=way_out):
        parse(run | {"layout": BF16 | layout, "precision": precision})


def test_plan_compresses_only_when_asked():
    assert KEYS["compress_gradients"].searched(Layout(dp_shard=2)) == ("none",)
