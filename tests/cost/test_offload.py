"""Proves what a plan says of optimizer states on a disk: the memory and time of the formulas, and that they are offered
where nothing else fits."""

from dataclasses import replace

import pytest

from shardwright.cost import memory
from shardwright.cost.activations import layer
from shardwright.cost.blocks import blocks
from shardwright.cost.hardware import cluster
from shardwright.cost.host import host_bytes
from shardwright.cost.job import Candidates, Job
from shardwright.cost.step import estimate
from shardwright.cost.traffic import shards_over_link
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.optimizers import OFFLOAD_CHUNK_BYTES
from shardwright.planner.nearest import remedies
from shardwright.planner.search import search
from shardwright.planner.space import fixed_values
from shardwright.system.errors import LayoutError

MODEL = PRESETS["llama-3.1-8b"]
JOB = Job(model=MODEL, cluster=cluster("h100:2/2"), seq_len=8192, global_batch=64)
SHARDED = Layout(dp_shard=2, zero=3, recompute="full")


@pytest.mark.parametrize("narrow", [False, True])
def test_memory_falls_by_the_states_and_the_step_is_longer_by_their_way_to_the_disk_and_back(narrow: bool):
    job = replace(JOB, narrow_states=narrow)
    in_memory, on_disk = (estimate(job, SHARDED.changed(offload_optimizer=where)) for where in ("none", "disk"))
    states_bytes = 2 * (2 if narrow else 4) * MODEL.n_parameters / 2
    fallen = in_memory.memory.kinds["optimizer"] - on_disk.memory.kinds["optimizer"]
    assert fallen.max() == pytest.approx(states_bytes - OFFLOAD_CHUNK_BYTES)
    longer_s = on_disk.parts_s["optimizer"] - in_memory.parts_s["optimizer"]
    assert longer_s == pytest.approx(2 * states_bytes * (1 / 4e9 + 1 / 63e9))
    assert {k: v for k, v in on_disk.parts_s.items() if k not in ("optimizer", "stragglers")} == {
        k: v for k, v in in_memory.parts_s.items() if k not in ("optimizer", "stragglers")
    }


@pytest.mark.parametrize("narrow", [False, True])
def test_on_the_host_the_device_has_no_states_and_the_slower_of_link_and_update_takes_the_time(narrow: bool):
    job = replace(JOB, narrow_states=narrow)
    on_device, on_host = (estimate(job, SHARDED.changed(offload_optimizer=where)) for where in ("none", "cpu"))
    assert on_host.memory.kinds["optimizer"].max() == 0
    fallen = on_device.memory.rank_bytes - on_host.memory.rank_bytes
    assert fallen.max() == pytest.approx(2 * (2 if narrow else 4) * MODEL.n_parameters / 2)
    update_s = (12 + (8 if narrow else 16)) * MODEL.n_parameters / 2 / 18e9
    assert on_host.parts_s["optimizer"] == pytest.approx(update_s, rel=0.02)  # and 16 bytes on the device
    fast = replace(JOB.cluster.accelerator, host_memory_bytes_per_s=1e15)
    job = replace(job, cluster=replace(JOB.cluster, accelerator=fast))
    link_s = 4 * MODEL.n_parameters / 2 / 63e9
    found = estimate(job, SHARDED.changed(offload_optimizer="cpu")).parts_s["optimizer"]
    assert found == pytest.approx(link_s + 16 * MODEL.n_parameters / 2 / 3350e9, rel=0.1)


def test_with_shards_on_the_host_only_what_is_gathered_is_on_the_device_and_the_link_is_part_of_each_gather():
    slow = replace(JOB.cluster.accelerator, host_bytes_per_s=1e8)
    for chip in (JOB.cluster.accelerator, slow):
        job = replace(JOB, cluster=replace(JOB.cluster, accelerator=chip))
        states, shards = (
            estimate(job, SHARDED.changed(offload_optimizer="cpu", offload_parameters=where))
            for where in ("none", "cpu")
        )
        for kind in ("weights", "master", "gradients", "optimizer"):
            moving = shards.memory.kinds[kind]
            assert moving.max() == 0 or kind == "gradients"
        assert shards.memory.kinds["gathered"].max() == states.memory.kinds["gathered"].max()
        less = states.memory.rank_bytes - shards.memory.rank_bytes
        assert less.max() == pytest.approx(8 * MODEL.n_parameters / 2, rel=0.02), "master weights and gradients"
    # Nothing hides the slow link: 32 micro-batches gather all, gather layers again, and reduce all, in fp32.
    m, shard_bytes = 32, 4 * MODEL.n_parameters / 2
    layers = 1 - 2 * MODEL.vocab_size * MODEL.d_model / MODEL.n_parameters
    longer_s = shards.parts_s["data parallel"] - states.parts_s["data parallel"]
    assert longer_s == pytest.approx(m * (2 + layers) * shard_bytes / 1e8, rel=0.05)
    assert shards.parts_s["optimizer"] == pytest.approx(32 * MODEL.n_parameters / 2 / 18e9, rel=0.02)


@pytest.mark.parametrize("dp_replicate", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_reduced_gradients_leave_the_device_with_every_zero_stage_and_what_is_not_reduced_stays(
    zero: int, dp_replicate: int
):
    shards, m = 8 // dp_replicate, 4
    job = replace(JOB, cluster=cluster("h100:8"), global_batch=8 * m)
    layout = Layout(dp_shard=shards, dp_replicate=dp_replicate, zero=zero, offload_optimizer="cpu")
    candidates = Candidates.from_layout(layout.changed(offload_parameters="cpu"), 1)
    step, n = memory.StepMemory(job, candidates), MODEL.n_parameters
    gathered = step.states["weights"] + step.states["gathered"]
    assert gathered[0, 0] == pytest.approx(2 * n, rel=1e-3) if zero < 3 else gathered[0, 0] < 0.3 * n
    assert step.states["master"][0, 0] == step.states["gradients"][0, 0] == step.states["optimizer"][0, 0] == 0
    held = {1: n, 2: n / shards, 3: n / shards}[zero] if zero == 1 or dp_replicate > 1 else 0
    assert step.of_stage.accumulating[0, 0] == pytest.approx(4 * held)
    assert step.of_stage.reduced[0, 0] == 0
    assert sum(kind[0, 0] for kind in step.at_update().values()) < gathered[0, 0] + 2**28
    # To the host once a step what is reduced once a step, over replicas or at all.
    sent = shards_over_link(job, candidates, 0)
    times = 1 if zero == 1 or dp_replicate > 1 else m
    untrained = n - sent["to the host"][1] * shards / 4 / times
    assert untrained == pytest.approx(0, abs=1)
    if zero < 3:
        assert sent["to the device"][1] == pytest.approx(4 * n / shards)


def test_host_and_disk_are_offered_where_nothing_fits_and_found_where_they_are_asked_for():
    job = replace(JOB, cluster=cluster("h100:3/3"), seq_len=65536, global_batch=96)
    assert not search(job).best
    offered = [each.what for each in remedies(job, 0.1) if "offload" in each.what]
    host_bytes_said = [what.endswith("of host memory in each node of 3") for what in offered]
    assert host_bytes_said == [True, True, False, True]
    assert [what.split(", with ")[0] for what in offered] == [
        "activations of layers in the memory of the host: --fix offload_activations=cpu",
        "optimizer states in the memory of the host: --fix offload_optimizer=cpu",
        "optimizer states on a disk: --fix offload_optimizer=disk",
        "optimizer states and shards of parameters and gradients in the memory of the host: "
        "--fix zero=3,offload_optimizer=cpu,offload_parameters=cpu",
    ]
    steps_s = []
    for where in ("cpu", "disk"):
        found = search(job, fixed=fixed_values({"offload_optimizer": where})).best
        assert found
        assert {each.layout.offload_optimizer for each in found} == {where}
        steps_s.append(found[0].time.total_s[0])
    assert steps_s[0] < steps_s[1]
    assert not [each for each in remedies(replace(job, optimizer="muon"), 0.1) if "offload_optimizer" in each.what]


def test_a_disk_or_host_of_which_nothing_is_known_has_no_price():
    chip = replace(JOB.cluster.accelerator, disk_bytes_per_s=0.0, host_bytes_per_s=0.0)
    job = replace(JOB, cluster=replace(JOB.cluster, accelerator=chip))
    with pytest.raises(LayoutError, match=r"no price for it, accelerators\.h100 has no disk_gb_per_s"):
        estimate(job, SHARDED.changed(offload_optimizer="disk"))
    with pytest.raises(LayoutError, match=r"no price for it, accelerators\.h100 has no host_gb_per_s, the link"):
        estimate(job, SHARDED.changed(offload_optimizer="cpu"))
    with pytest.raises(LayoutError, match=r"optimizer\.name='muon': it updates whole matrices"):
        estimate(replace(JOB, optimizer="muon"), SHARDED.changed(offload_optimizer="disk"))


def test_activations_on_the_host_leave_two_layers_on_the_device_and_take_what_their_copies_are_longer_than_a_pass():
    job = replace(JOB, cluster=cluster("h100:8"))
    layout = Layout(dp_shard=8, zero=3)
    here, there = (estimate(job, layout.changed(offload_activations=where)) for where in ("none", "cpu"))
    kept = layer(job, here.candidates, next(iter(blocks(MODEL)))).kept[0]
    assert here.memory.kinds["activations"][0, 0] >= MODEL.n_layers * kept
    assert memory.MOMENTS[there.memory.moment[0, 0]] == "backward", "of the layers, after that of the last norm"
    assert there.memory.kinds["activations"][0, 0] == 0
    at_loss = here.memory.rank_bytes[0, 0] - there.memory.rank_bytes[0, 0]
    assert at_loss == pytest.approx((MODEL.n_layers - 1) * kept, rel=0.1)
    assert host_bytes(job, there.candidates, 0) == {"activations": here.memory.kinds["activations"][0, 0]}
    # With a link that is slow enough nothing is hidden, and each pass of a layer takes as long as its copies.
    slow = replace(job.cluster.accelerator, host_bytes_per_s=1e7)
    slowed = replace(job, cluster=replace(job.cluster, accelerator=slow))
    parts = estimate(slowed, layout.changed(offload_activations="cpu")).parts_s
    copies_s = 8 * MODEL.n_layers * 2 * kept / 1e7
    passes_s = sum(here.parts_s[kind] for kind in ("matmuls", "attention", "element-wise"))
    assert copies_s - passes_s <= parts["copies to and from the host"] <= copies_s
    fast = replace(job.cluster.accelerator, host_bytes_per_s=1e15)
    hidden = replace(job, cluster=replace(job.cluster, accelerator=fast))
    assert estimate(hidden, layout.changed(offload_activations="cpu")).step_s == pytest.approx(here.step_s)


def test_activations_on_the_host_are_offered_where_they_make_a_layout_fit():
    job = replace(JOB, cluster=cluster("h100:8"), seq_len=16384)
    chosen = {"recompute": "none", "dp_shard": 8, "zero": 3}
    assert not search(job, fixed=fixed_values(chosen)).best
    what = "activations of layers in the memory of the host: "
    offered = [each.what for each in remedies(job, 0.1, fixed_values(chosen)) if each.what.startswith(what)]
    keys = "recompute=none,dp_shard=8,zero=3,offload_activations=cpu"
    assert offered == [f"{what}--fix {keys}, with 658 GiB (707 GB) of host memory in each node of 8"]
    assert search(job, fixed=fixed_values({**chosen, "offload_activations": "cpu"})).best
    unknown = replace(job.cluster.accelerator, host_bytes_per_s=0.0)
    job = replace(job, cluster=replace(job.cluster, accelerator=unknown))
    with pytest.raises(LayoutError, match=r"layout\.offload_activations='cpu': there is no price for it"):
        estimate(job, Layout(dp_shard=8, offload_activations="cpu"))
