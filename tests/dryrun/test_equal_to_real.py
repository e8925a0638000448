"""Proves that a dry run is the real run: on every axis, the messages of a step are those of ranks on gloo, one by one,
and the bytes that are alive are the same, by kind.

Both are recorded by the same code, which sees what PyTorch dispatches. Numbers of rows of experts, which a dry run
cannot read, are those of the real run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import parse
from shardwright.dry_run.record import KINDS, RankRecord
from tests.dryrun.worlds import DENSE, both, real_ranks, run_file
from tests.marks import rest_prove

ON_HOST = {"offload_activations": "cpu", "offload_min_bytes": 1}
# Each way to send or to keep is in one of them: hybrid sharding beside shards on the host, ZeRO-1 beside states on a
# disk, zig-zag rings in a pipeline, Ulysses in usp.
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one rank": ("dense", "bf16", {}),
    "zero 0": ("dense", "fp32", {"dp_replicate": 2}),
    "zero 3": ("dense", "fp32", {"dp_shard": 2}),
    "tp": ("dense", "fp32", {"tp": 2, "sequence_parallel": False}),
    "replicated kv heads": ("dense", "bf16", {"tp": 4}),
    "ring": ("dense", "fp32", {"cp": 2, "cp_method": "ring"}),
    "linear attention, zig-zag, parts of it recomputed on the host": (
        "linear",
        "bf16",
        {"cp": 2, "tp": 2, "recompute": "selective", **ON_HOST},
    ),
    "all-gather": ("dense", "bf16", {"cp": 2, "cp_method": "allgather"}),
    "usp": ("dense", "bf16", {"cp": 4, "cp_method": "usp", "ulysses_degree": 2}),
    "recompute some": ("dense", "bf16", {"dp_shard": 2, "recompute": "selective"}),
    "recompute all": ("dense", "bf16", {"tp": 2, "recompute": "full"}),
    "chunked loss": ("dense", "bf16", {"tp": 2, "loss_chunk_tokens": 24}),
    "ep and tp": ("mixture", "bf16", {"dp_shard": 2, "tp": 2, "ep": 4, "zero": 2}),
    "latent attention": ("latent", "bf16", {"tp": 2, "ep": 2}),
    "norms with an offset": ("offset", "bf16", {"dp_shard": 2, "recompute": "selective"}),
    "gathered once a step": ("dense", "bf16", {"pp": 2, "dp_shard": 2}),
    "gathered each micro-batch": ("dense", "fp32", {"pp": 2, "dp_shard": 2, "zero_pp_gather": "microbatch"}),
    "pipeline of experts": ("mixture", "bf16", {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1}),
    "pipeline on token shards": ("dense", "bf16", {"pp": 2, "tp": 2}),
    "pipeline and ring": ("dense", "bf16", {"pp": 2, "cp": 2}),
    "states on the host": ("dense", "bf16", {"tp": 2, "offload_optimizer": "cpu"}),
    "states on a disk, shards on the host": (
        "dense",
        "fp32",
        {"dp_replicate": 2, "dp_shard": 2, "offload_optimizer": "disk", "offload_parameters": "cpu"},
    ),
    "gradients on the host as they are reduced": (
        "dense",
        "bf16",
        {"dp_shard": 2, "zero": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ),
    "states on a disk": ("dense", "bf16", {"dp_shard": 2, "zero": 1, "offload_optimizer": "disk"}),
    "activations on the host": ("dense", "bf16", {"dp_shard": 2, "recompute": "selective", **ON_HOST}),
    "activations of a pipeline on the host": ("mixture", "fp32", {"pp": 2, "pp_schedule": "zb-h1", **ON_HOST}),
    "secondary shards": ("dense", "bf16", {"dp_shard": 4, "zero_secondary_ranks": 2}),
    "gradients and weights as integers": (
        "dense",
        "bf16",
        {"dp_shard": 2, "compress_gradients": "int8", "compress_weights": "int8"},
    ),
    "gradients as products": ("dense", "fp32", {"dp_replicate": 2, "compress_gradients": "powersgd-2"}),
    "gradients as their largest elements": ("dense", "fp32", {"dp_replicate": 2, "compress_gradients": "topk-4"}),
    "tokens and activations in 8 bits": (
        "mixture",
        "bf16",
        {"pp": 2, "dp_shard": 2, "ep": 2, "compress_dispatch": "fp8", "compress_pipeline": "int8"},
    ),
    "four stages": ("dense", "fp32", {"pp": 4, "pp_schedule": "zb-h1"}),
} | {
    f"schedule {name}": ("dense", "fp32", {"pp": 2, "pp_schedule": name})
    for name in ("interleaved-1f1b", "zb-v", "dualpipe")
}
QUICK = ("ring",)
RUNS = 6
"""gloo lets go of the buffer of a message when its thread comes to that, which on loaded cores may be later: bytes that
are alive for longer, of one message in what is held to be the same, and of several now and then. Lateness only adds
bytes, so the least of several runs is compared, for each rank and kind."""
OF_MESSAGES = ("communication", "activations", "temporaries")
"""The kinds of buffers of messages: a chunked loss reduces a gradient in the forward pass, which is kept."""


def lines(record: RankRecord) -> list[tuple[object, ...]]:
    """What the dry run has to say of each message as the real one does: everything."""
    return [tuple(message) for message in record.messages]


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, *QUICK))
def test_messages_and_live_bytes_are_those_of_the_real_run(name: str, tmp_path: Path):
    model, compute, layout = LAYOUTS[name]
    table = run_file(model, layout, compute)
    if layout.get("offload_optimizer") == "disk":
        table["offload_path"] = str(tmp_path)
    reals, dries = both(table)
    least: dict[int, dict[str, int]] = {rank: {} for rank in dries}
    for run in range(RUNS):
        if run:
            reals = real_ranks(table)
        for rank, dry in dries.items():
            real = reals[rank]
            assert lines(dry) == lines(real)
            assert [moment.action for moment in dry.curve] == [moment.action for moment in real.curve]
            assert dry.flops == real.flops
            for kind, n_bytes in peaks(real).items():
                least[rank][kind] = min(n_bytes, least[rank].get(kind, n_bytes))
        late = max((message.n_bytes for real in reals for message in real.messages), default=0)
        off = [(rank, *each) for rank, dry in dries.items() for each in differences(peaks(dry), least[rank], late)]
        if not off:
            break
    assert not off
    if "powersgd" in layout.get("compress_gradients", ""):
        return  # it multiplies matrices of its own
    if model == "dense" and "recompute" not in layout and layout.get("tp", 1) <= DENSE["n_kv_heads"]:
        config = parse(table)
        matmul_flops = sum(count for real in reals for op, count in real.flops.items() if "attention" not in op)
        tokens = config.batch.global_batch * config.batch.seq_len
        assert matmul_flops == 6 * config.spec().n_matmul_parameters * tokens


def peaks(record: RankRecord) -> dict[str, int]:
    """The peak bytes of each kind and of all: two moments of a step may have nearly the same sum."""
    return {**{kind: record.peak_of_kinds[kind] for kind in KINDS}, "all": record.peak.n_bytes}


def differences(dry: dict[str, int], real: dict[str, int], late: int) -> Iterator[tuple[str, int, int]]:
    """(kind, dry bytes, real bytes) of peaks that are not the same. `late`: bytes of the largest message."""
    for kind, held in real.items():
        within = max(0.01 * held, 0.002 * real["all"])
        later = late * (kind == "all" or kind in OF_MESSAGES)
        if not held - within - later <= dry[kind] <= held + within:
            yield kind, dry[kind], held


@pytest.mark.prove
def test_micro_batches_that_are_not_run_are_counted():
    table = run_file("dense", {"dp_shard": 2, "zero": 2}, "bf16")
    table["batch"]["global_batch"] = 7 * 4  # of which three are run dry
    reals, dries = both(table)
    for rank, dry in dries.items():
        real = reals[rank]
        assert dry.repeats == {"0F1": 5, "0B1": 5}
        assert dry.sent == real.sent
        assert dry.flops == real.flops
        assert dry.peak.n_bytes == pytest.approx(real.peak.n_bytes, rel=0.01)
