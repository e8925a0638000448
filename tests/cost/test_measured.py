"""A file of `shardwright measure` in the cost model: measured rates take the place of fitted ones, ranks on one host
share its cores, and a file that cannot be used says why."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwright.cost import memory, pools
from shardwright.cost.hardware import cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.machine import on_machine
from shardwright.cost.matmuls import Matmul
from shardwright.cost.reserved import reserved_bytes
from shardwright.cost.stack import MEGATRON_CORE
from shardwright.cost.step import estimate
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.system.errors import InputError
from shardwright.system.units import GiB

KERNELS = "norm_bytes = 8.0, rmsnorm_bytes = 20.0, residual_bytes = 6.0, heads_bytes = 0.0, rope_bytes = 16.0"
RATES = f"""
memory_gib = {{memory}}
process_gib = 0.25
holes = [0.3, 0.6, 0.6, 0.9]
tflops = {{{{ fp32 = {{tflops}} }}}}
memory_gb_per_s = 8.0
ramp_k = 32.0
partial_wave = 0.5
attention_share = 0.5
attention_width = 16.0
attention_length = 64.0
attention_backward = 2.0
launch_us = 400.0
launch_backward = 1.5
launch_ends = 0.5
step_us = 2000.0
bucket_us = 300.0
kernels = {{{{ {KERNELS}, gated_bytes = 12.0, gelu_bytes = 9.0, loss_bytes = 40.0, optimizer_bytes = 50.0 }}}}
"""
MINE = f"""
[measured]
version = 3
date = "2026-11-23"
shardwright = "0"
torch = "2.13.0"
python = "3.12.0"
machine = "a CPU"
clock = "wall"
took_s = 60.0
[accelerators.mine]
memory_gib = 12.0
memory_gb_per_s = 8.0
memory_share = 1.0
multiprocessors = 1
tflops = {{ fp32 = 0.08 }}
matmul_share = {{ fp32 = 1.0 }}
node_size = 2
part_of_node = true
network = "ethernet"
gbit_per_s = 10.0
inside = {{ bus_gb_per_s = 2.0, start_us = 50.0, latency_us = 80.0, half_mib = 0.1 }}
cores = 2
[accelerators.mine.rates.1]{RATES.format(memory=24.0, tflops=0.08)}
[accelerators.mine.rates.2]{RATES.format(memory=12.0, tflops=0.05)}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def job(cluster_name: str, path: Path) -> Job:
    model = replace(resolve("debug"), n_layers=4)
    found = cluster(cluster_name, path)
    return on_machine(Job(model=model, cluster=found, seq_len=128, global_batch=8, precision="fp32"))


def test_a_matmul_takes_what_was_measured(mine: Path):
    seconds = float(Matmul("product", 512, 256, 768).seconds(job("mine:2", mine)))
    waves = 2 * 6
    assert seconds == pytest.approx(2 * 512 * 256 * 768 / (50e9 * waves / (waves + 0.5) * 256 / (256 + 32)))


def test_the_software_of_another_system_has_the_measured_matmuls_and_its_own_launches(mine: Path):
    own = job("mine:2", mine)
    other = on_machine(replace(own, stack=MEGATRON_CORE))
    product = Matmul("product", 512, 256, 768)
    assert float(product.seconds(other)) == pytest.approx(float(product.seconds(own)))
    assert other.stack.speed.launch_s == MEGATRON_CORE.speed.launch_s != own.stack.speed.launch_s


def test_one_rank_has_the_rates_that_one_rank_measured(mine: Path):
    alone, two = job("mine:1", mine), job("mine:2", mine)
    assert alone.cluster.accelerator.memory_bytes == 24 * GiB
    product = Matmul("product", 512, 256, 768)
    assert product.seconds(two) / product.seconds(alone) == pytest.approx(0.08 / 0.05)


def test_more_ranks_than_cores_share_them(mine: Path):
    two, four = job("mine:2", mine), job("mine:4/4", mine)
    product = Matmul("product", 512, 256, 768)
    assert product.seconds(four) / product.seconds(two) == pytest.approx(2)
    assert four.cluster.accelerator.memory_bytes == 6 * GiB
    assert four.stack.speed.launch_s == pytest.approx(2 * 400e-6)
    assert four.cluster.inside.bytes_per_s == two.cluster.inside.bytes_per_s / 2
    # A host's ranks do nothing at once that one after another would not take as long.
    one_core_each, half_a_core = (estimate(each, Layout(dp_shard=n), 1) for each, n in ((two, 2), (four, 4)))
    assert half_a_core.step_s > 0.95 * one_core_each.step_s


def test_a_rank_that_waits_leaves_its_share_of_the_cores_to_others(mine: Path):
    """4 ranks on 2 cores. Of 2 replicas of 2 stages one computes while the other waits. Of 4 stages with one
    micro-batch one runs at a time, on a whole core: the four take twice as long as one of them with half a core."""
    four = job("mine:4/4", mine)
    shared = estimate(four, Layout(pp=2, dp_replicate=2, pp_schedule="1f1b"), 1)
    assert shared.parts_s["pipeline"] == 0
    chip = replace(four.cluster.accelerator, core_share=1.0)
    whole = replace(four, cluster=replace(four.cluster, accelerator=chip))
    own = estimate(whole, Layout(pp=2, dp_replicate=2, pp_schedule="1f1b"), 1)
    assert own.parts_s["pipeline"] > 0.1 * own.step_s
    assert own.step_s - own.parts_s["pipeline"] == pytest.approx(shared.step_s)
    one = Layout(pp=4, pp_schedule="1f1b")
    half, all_of_it = (estimate(replace(each, global_batch=1), one, 1) for each in (four, whole))
    rest = ("pipeline", "data parallel", "optimizer")
    work_s = half.step_s - sum(half.parts_s.get(kind, 0.0) for kind in rest)
    assert half.parts_s["pipeline"] + work_s == pytest.approx((all_of_it.parts_s["pipeline"] + work_s) / 2)
    assert half.parts_s["pipeline"] > 0.4 * work_s


def test_launches_and_messages_of_a_host_add_to_its_work(mine: Path):
    found = estimate(job("mine:2", mine), Layout(dp_shard=2, zero=3), 1)
    # 4 microbatches of 4 layers, and of half a layer for the ends: 400 us forward and 1.5 times that backward.
    assert found.parts_s["launch"] == pytest.approx(4 * (4 + 0.5) * 400e-6 * 2.5)
    speed = found.job.stack.speed
    assert not speed.hides_dp
    assert not speed.hides_tp_backward
    without = replace(found.job, stack=replace(found.job.stack, speed=replace(speed, bucket_s=0.0)))
    more = found.parts_s["data parallel"] - estimate(without, Layout(dp_shard=2, zero=3), 1).parts_s["data parallel"]
    # In each of 4 microbatches 4 layers are gathered twice and reduced once; embedding and head are gathered once.
    assert more == pytest.approx(300e-6 * 4 * (3 * 4 + 2 * 1), rel=0.2)


def test_a_process_is_counted_before_any_of_a_model(mine: Path):
    assert job("mine:2", mine).stack.workspace_bytes == 0.25 * GiB


def test_holes_of_the_c_library_grow_with_tensors_of_less_than_32_mib(mine: Path):
    """A layer of 4 d^2 and 3 d f parameters: with d = 2048 and f = 6144 a matrix of attention has 16 MiB in fp32, and
    one of the network 48 MiB; tp 2 halves both. With 256 tokens in a micro-batch no activation has 32 MiB, nor have the
    logits of 4096 words, whose matrices have 32 MiB."""
    sizes = {"n_layers": 2, "d_model": 2048, "d_ffn": 6144, "n_heads": 32, "n_kv_heads": 32, "head_dim": 64}
    model = replace(resolve("debug"), **sizes, vocab_size=4096)
    of = replace(job("mine:2", mine), model=model, seq_len=256)
    d, f, t, v = 2048, 6144, 256, 4096
    always = 2 * 4 * (2 * d) + 4 * d  # norms: weights, gradients, two states
    activations = 2 * t * (4 * d + 4 * d + 4 * f) + 2 * t * v
    attention, network, ends = 2 * 4 * 4 * d * d, 2 * 4 * 3 * d * f, 4 * 2 * v * d
    small = always + activations + attention
    share = small / (small + network + ends)
    found = memory.estimate_memory(of, Candidates.from_layout(Layout(dp_replicate=2), 1))
    tensors = found.rank_bytes - 0.25 * GiB
    assert found.lost_bytes == pytest.approx(0.3 * share * tensors)
    assert reserved_bytes(of, Candidates.from_layout(Layout(dp_replicate=2), 1)) == pytest.approx(found.reserved_bytes)
    halved = memory.estimate_memory(of, Candidates.from_layout(Layout(tp=2), 1))
    assert halved.lost_bytes == pytest.approx(0.3 * (halved.rank_bytes - 0.25 * GiB))
    for zero, kept in ((1, 0.6), (2, 0.6), (3, 0.9)):
        candidates = Candidates.from_layout(Layout(dp_shard=2, zero=zero), 1)
        sharded, share = memory.estimate_memory(of, candidates), pools.small_share(of, candidates)
        assert sharded.lost_bytes == pytest.approx(kept * share * (sharded.rank_bytes - 0.25 * GiB))


def test_a_job_on_a_packaged_accelerator_stays_as_it_is():
    plain = Job(model=resolve("debug"), cluster=cluster("h100:8"), seq_len=128, global_batch=8)
    assert on_machine(plain) is plain


def test_many_layouts_are_priced_at_once_as_each_alone(mine: Path):
    from shardwright.cost.step import step_time

    here = job("mine:2", mine)
    layout = Layout(dp_shard=2, zero=3)
    each = [Candidates.from_layout(layout, micro_batch) for micro_batch in (1, 2)]
    both = replace(each[0], micro_batch=np.array([1, 2]), **{
        name: np.repeat(getattr(each[0], name), 2)
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "sequence_parallel", "recompute")
    })  # fmt: skip
    alone = [float(step_time(here, one).total_s[0]) for one in each]
    assert step_time(here, both).total_s == pytest.approx(alone)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("version = 3", "version = 1"),
            r"measured.version=1, and this shardwright reads version 3; measure the machine",
        ),
        (('clock = "wall"', 'clock = "sun"'), "measured.clock='sun'"),
        (("ramp_k = 32.0", "ramp_kk = 32.0"), r"rates.1.ramp_kk: there is no such key; .*ramp_k"),
        (("[accelerators.mine.rates.1]", "[accelerators.mine.rates.one]"), "rates.one: the ranks of a node are needed"),
        (("tflops = { fp32 = 0.05 }", "tflops = { bf16 = 0.05 }"), "only one has bf16, fp32"),
        (("rope_bytes = 16.0", "rope = 16.0"), "rates.1.kernels.rope"),
        (("bucket_us = 300.0\n", ""), "rates.1.bucket_us: missing"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, change: tuple[str, str], problem: str):
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(*change))
    with pytest.raises(InputError, match=problem):
        cluster("mine:2", path)
