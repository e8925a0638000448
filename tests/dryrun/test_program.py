"""Proves what of a dry run no real run on a CPU can be compared with: the paths of a GPU, large worlds, bad input."""

import inspect
import re
from typing import Any

import pytest

from shardwright.config import parse
from shardwright.dry_run.length import step_length
from shardwright.dry_run.planned import PlannedRank, planned
from shardwright.dry_run.program import CPU, dry_rank, empty_batch, record_steps
from shardwright.dry_run.record import DISK, LINK, READ, TO_DEVICE, TO_HOST, WAIT, WRITE, RankRecord
from shardwright.dry_run.run import DryRun, DryRunSettings, dry_run, dry_run_settings
from shardwright.model.modules import rows
from shardwright.parallel.compression import Integers
from shardwright.system.errors import InputError, LayoutError
from shardwright.system.units import GiB
from shardwright.training.build import build_model, build_trainer
from tests.distributed import run_ranks
from tests.dryrun.worlds import Table, run_file

# Attention on a GPU is by flash kernels with other operations; a reduce-scatter of token shards is one call there.
ON_GPUS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zigzag": {"cp": 2},
    "ring": {"cp": 2, "cp_method": "ring"},
    "all-gather": {"cp": 2, "cp_method": "allgather"},
    "usp": {"cp": 4, "cp_method": "usp", "ulysses_degree": 2},
}


def dry(table: Table, rank: int, gpu: bool) -> RankRecord:
    return dry_rank(parse(table), rank, gpu=gpu)


@pytest.mark.prove
@pytest.mark.parametrize("name", ON_GPUS)
def test_the_paths_of_a_gpu_send_and_keep_the_same(name: str):
    table = run_file("dense", ON_GPUS[name], "bf16")
    on_cpu, on_gpu = (run_ranks(dry, 1, table, 0, gpu)[0] for gpu in (False, True))
    assert [message.content for message in on_gpu.messages] == [message.content for message in on_cpu.messages]
    # A fused norm keeps its input and a number a row; on a CPU a norm keeps more.
    assert 0.5 < on_gpu.peak_of_kinds["activations"] / on_cpu.peak_of_kinds["activations"] < 1
    for kind in ("parameters", "gradients", "states"):
        # Blocks of 512 bytes, of which these tensors have few.
        assert on_gpu.peak_of_kinds[kind] == pytest.approx(on_cpu.peak_of_kinds[kind], rel=0.1), kind


@pytest.mark.prove
def test_a_reduce_scatter_of_token_shards_is_one_call_on_a_gpu():
    table = run_file("dense", {"tp": 2}, "bf16")
    on_cpu, on_gpu = (run_ranks(dry, 1, table, 0, gpu)[0].sent for gpu in (False, True))
    assert on_gpu["tp", "reduce-scatter"] == on_cpu["tp", "all-to-all"]
    assert on_gpu["tp", "all-gather"] == on_cpu["tp", "all-gather"]


def large(tmp: str = "none", **layout: Any) -> Table:
    return {
        "out": tmp,
        "steps": 1,
        "model": {"preset": "llama-3.1-8b", "n_layers": 2},
        "data": {"path": "none"},
        "batch": {"seq_len": 2048, "global_batch": 1024},
        "layout": layout,
        "precision": {"compute": "bf16"},
    }


@pytest.mark.prove
def test_a_rank_of_a_thousand_has_its_shards():
    table = large(dp_shard=128, tp=8)
    found = dry_run(parse(table), DryRunSettings(80 * GiB), rank=777, remedies=False)
    (record,) = found.records
    n_parameters = parse(table).model.spec().n_parameters
    assert record.peak_of_kinds["parameters"] == pytest.approx(4 * n_parameters / 1024, rel=0.01)
    assert record.peak_of_kinds["states"] == pytest.approx(8 * n_parameters / 1024, rel=0.01)
    assert record.repeats == {"0F1": 6, "0B1": 6}
    assert found.fits


@pytest.mark.prove
def test_what_does_not_fit_has_a_remedy_that_does():
    table = large(dp_shard=8)
    without = dry_run(parse(table), DryRunSettings(80 * GiB), remedies=False)
    memory_bytes = 0.95 * without.fullest.peak.n_bytes
    found: DryRun = dry_run(parse(table), DryRunSettings(memory_bytes))
    assert not found.fits
    assert found.remedies
    assert all(each.needed_bytes <= found.how.limit_bytes for each in found.remedies)


@pytest.mark.prove
def test_states_on_the_host_are_no_bytes_of_a_gpu_and_are_told_apart():
    on_device, on_host = (
        run_ranks(dry, 1, run_file("dense", {"offload_optimizer": where}, "bf16"), 0, True)[0]
        for where in ("none", "cpu")
    )
    assert on_device.host_bytes == 0
    n_bytes = parse(run_file("dense", {})).model.spec().n_parameters * 4
    assert on_host.peak_of_kinds["states"] == 0
    # Both states and the weights; then counters, and the gradients of the largest of two buckets, those of matrices.
    assert 3 * n_bytes < on_host.host_bytes < 5.01 * n_bytes
    assert on_host.peak.n_bytes + 2 * n_bytes == pytest.approx(on_device.peak.n_bytes, rel=0.01)
    temporaries = [record.curve[-2].kinds["temporaries"] for record in (on_host, on_device)]
    assert temporaries[0] <= temporaries[1], "the host's update allocates nothing on the device"


@pytest.mark.prove
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_reduced_gradients_go_to_the_host_and_a_gpu_has_none_at_the_update(ranks: int, zero: int):
    on_host = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    table = run_file("dense", {"dp_shard": ranks, "zero": zero} | on_host, "bf16")
    (found,) = run_ranks(dry, 1, table, 0, True)
    shard_bytes = parse(table).model.spec().n_parameters * 4 // ranks
    assert found.sent[LINK, TO_DEVICE].n_bytes == shard_bytes, "once a step"
    assert found.sent[LINK, TO_HOST].n_bytes == {1: 1, 2: 3}[zero] * shard_bytes, "once, or each micro-batch"
    by_plan = planned(parse(table), 0)
    assert isinstance(by_plan, PlannedRank)
    assert {key: sums for key, sums in by_plan.sent.items() if key[0] == LINK} == {
        key: sums for key, sums in found.sent.items() if key[0] == LINK
    }
    assert found.curve[-2].action == "optimizer"
    assert found.curve[-2].kinds["gradients"] == found.curve[-2].kinds["gathered"] == 0
    assert found.host_bytes >= 4 * shard_bytes, "weights, gradients and two states"


@pytest.mark.prove
def test_shards_on_the_host_are_no_bytes_of_a_gpu_and_each_gather_and_reduction_copies_them():
    shared = {"dp_shard": 2, "zero": 3}
    on_host = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    on_device, shards, disk = (
        run_ranks(dry, 1, run_file("dense", shared | more, "bf16"), 0, True)[0]
        for more in ({}, on_host, on_host | {"offload_optimizer": "disk"})
    )
    spec = parse(run_file("dense", {})).model.spec()
    layers = spec.n_parameters - 2 * spec.vocab_size * spec.d_model - spec.d_model
    shard_bytes, layers_bytes = spec.n_parameters * 4 // 2, layers * 4 // 2
    for found in (shards, disk):
        assert [found.peak_of_kinds[kind] for kind in ("parameters", "states")] == [0, 0]
        assert found.peak_of_kinds["gathered"] == on_device.peak_of_kinds["gathered"]
        assert found.sent[LINK, TO_DEVICE].n_bytes == 3 * (shard_bytes + layers_bytes)
        assert found.sent[LINK, TO_HOST].n_bytes == 3 * shard_bytes
        by_plan = planned(parse(run_file("dense", shared | on_host, "bf16")), 0)
        assert isinstance(by_plan, PlannedRank)
        assert {key: by_plan.sent[key] for key in ((LINK, TO_HOST), (LINK, TO_DEVICE))} == {
            key: sums for key, sums in found.sent.items() if key[0] == LINK
        }
        assert found.curve[-2].action == "optimizer"
        assert found.curve[-2].n_bytes < 0.1 * on_device.curve[-2].n_bytes, "nothing is left on the device"
    counters = 4 * len(list(rows(spec)))
    assert 4 * shard_bytes <= shards.host_bytes <= 4.02 * shard_bytes + counters
    assert disk.sent[DISK, READ] == disk.sent[DISK, WRITE]
    assert 2 * shard_bytes <= disk.sent[DISK, READ].n_bytes <= 2.02 * shard_bytes + 8192


@pytest.mark.prove
def test_states_on_a_disk_are_on_a_gpu_a_chunk_at_a_time_which_is_copied_there_and_back():
    (found,) = run_ranks(dry, 1, run_file("dense", {"offload_optimizer": "disk"}, "bf16"), 0, True)
    n_bytes = 2 * 4 * parse(run_file("dense", {})).model.spec().n_parameters
    for op in (TO_DEVICE, TO_HOST):
        assert n_bytes <= found.sent[LINK, op].n_bytes <= 1.01 * n_bytes
    assert n_bytes <= found.peak_of_kinds["states"] <= 1.05 * n_bytes, "this model has one chunk"
    assert found.host_bytes == 3 * found.sent[DISK, READ].n_bytes


@pytest.mark.prove
def test_a_gpu_has_the_activations_of_two_layers_and_the_host_all_others_which_are_copied_there_and_back():
    on_device, on_host = (
        run_ranks(dry, 1, run_file("dense", more), 0, True)[0]
        for more in ({}, {"offload_activations": "cpu", "offload_min_bytes": 1024})
    )
    # Three micro-batches of four layers, of which the last keeps its own.
    assert on_host.sent[LINK, TO_HOST] == on_host.sent[LINK, TO_DEVICE]
    assert on_host.sent[LINK, TO_HOST].n_bytes == 3 * on_host.host_bytes, "those of one micro-batch at a time"
    less = on_device.peak_of_kinds["activations"] - on_host.peak_of_kinds["activations"]
    assert 0.6 * on_host.host_bytes < less


def with_history(table: Table, rank: int) -> RankRecord:
    return dry_rank(parse(table), rank, gpu=True, history=True)


@pytest.mark.prove
def test_a_rank_waits_for_a_compressed_message_before_it_decodes_it():
    (found,) = run_ranks(with_history, 1, run_file("dense", {"pp": 2, "compress_pipeline": "int8"}, "bf16"), 1)
    assert found.history is not None
    lines, first = inspect.getsourcelines(Integers.decode)
    decoder = {f"parallel/compression.py:{first + at}" for at in range(len(lines))}
    decoded_at = [made.sizes[0][0] for made in found.history.allocations if made.line in decoder]
    waits = [at for message, at in zip(found.messages, found.history.message_times, strict=True) if message.op == WAIT]
    assert len(waits) == 4
    assert len(decoded_at) >= len(waits)
    for number, waited_at in enumerate(waits):
        n_before = sum(at <= waited_at for at in decoded_at)
        assert n_before * len(waits) == number * len(decoded_at), "each message is decoded after the wait for it"


def hooks_after(table: Table) -> int:
    """The hooks of gradients that a recorded step leaves."""
    config = parse(table)
    trainer = build_trainer(config, build_model(config, CPU, compiled=False), CPU, compiled=False)
    record_steps(trainer, config, 0, lambda _, n: empty_batch(config, n), 2, gpu=False)
    parameters = trainer.model.named_parameters.values()
    return sum(len(parameter._backward_hooks or ()) for parameter in parameters)


@pytest.mark.prove
def test_a_recorded_step_leaves_no_hooks_on_gradients():
    assert run_ranks(hooks_after, 1, run_file("dense", {})) == [0]


def test_a_rank_outside_of_the_world_is_refused():
    with pytest.raises(LayoutError, match="rank 2 is not in the world of the layout; valid: 0 to 1"):
        dry_run(parse(run_file("dense", {"tp": 2})), DryRunSettings(GiB), rank=2)


def test_every_wrong_choice_is_told_at_once():
    with pytest.raises(InputError) as told:
        dry_run_settings("80", "tpu", 1, 0.5)
    assert len(told.value.problems) == 4


def test_progress_counts_the_actions_of_the_schedule_and_says_how_long_the_others_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwright.verification.ranks._EVERY_S", 0.001)
    lines: list[str] = []
    config = parse(run_file("dense", {"pp": 2}, "bf16"))
    (record,) = dry_run(config, DryRunSettings(80 * GiB), rank=1, tell=lines.append).records
    actions = [moment.action for moment in record.curve if re.fullmatch(r"\d+[FBIW]\d+", moment.action)]
    assert step_length(config).n_actions[1] == len(actions) == 8
    assert lines[0] == "dry run of rank 1: 0 of 8 actions"
    assert any(re.fullmatch(r"dry run of rank 1: [1-8] of 8 actions, about .+ left", line) for line in lines)
