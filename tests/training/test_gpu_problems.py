"""Proves that a GPU on which no step could be taken is refused, from facts about GPUs of any kind."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardwright.config import parse
from shardwright.system.errors import InputError
from shardwright.system.units import GiB
from shardwright.training.device import least_state_bytes
from shardwright.training.gpu import GpuFacts, check_gpu, claim_gpu, gpu_problems, interface_problems
from shardwright.training.ranks import ProcessRank, pick_device

H100 = GpuFacts("NVIDIA H100", (9, 0), 79 * GiB, 80 * GiB, (7, 5))
BATCH = {"steps": 1, "batch": {"global_batch": 1, "micro_batch": 1, "seq_len": 16}, "optimizer": {"lr": 1e-3}}
A100, V100 = replace(H100, name="A100", capability=(8, 0)), replace(H100, name="V100", capability=(7, 0))


def problems(gpu: GpuFacts, **precision: str) -> list[str]:
    config = parse(
        {"model": {"preset": "debug"}, "precision": precision, "data": {"path": "tokens"}, "out": "run"} | BATCH
    )
    return gpu_problems(gpu, config)


def test_a_gpu_is_refused_for_formats_that_are_newer_than_it():
    assert problems(H100, compute="bf16", fp8="tensorwise") == problems(A100, compute="bf16") == []
    (fp8,) = problems(A100, compute="bf16", fp8="rowwise")
    assert "8.9" in fp8
    assert "A100 has compute capability 8.0" in fp8
    (bf16,) = problems(replace(V100, built_for=(7, 0)), compute="bf16")
    assert "8.0" in bf16
    assert "precision.compute='fp16'" in bf16
    assert problems(replace(V100, built_for=(7, 0)), compute="fp16") == []


def test_cuda_graphs_are_refused_where_a_replay_would_read_or_write_elsewhere():
    run = {"model": {"preset": "debug"}, "data": {"path": "tokens"}, "out": "run"} | BATCH
    graphs = {"precision": {"cuda_graphs": True, "compile": True, "compute": "bf16"}}
    config = parse(run | graphs)
    with pytest.raises(InputError, match="needs a GPU, and device is 'cpu'"):
        check_gpu(config, torch.device("cpu"))
    for section, keys, needed in (
        ("precision", {"compile": False}, "precision.compile=true"),
        ("precision", {"compute": "fp32"}, "precision.compute='bf16' or 'fp16'"),
        ("layout", {"dp_replicate": 2}, "a layout of one rank"),
        ("layout", {"zero": 3}, "layout.zero below 3"),
        ("layout", {"offload_activations": "cpu"}, "layout.offload_activations='none'"),
        ("data", {"attention": "document"}, "data.attention='sequence'"),
    ):
        changed = run | {"batch": BATCH["batch"] | {"global_batch": 2}} | graphs
        with pytest.raises(InputError, match=f"precision.cuda_graphs=true needs {needed}"):
            parse(changed | {section: changed.get(section, {}) | keys})


def test_a_gpu_is_refused_that_pytorch_was_not_built_for():
    (problem,) = problems(V100, compute="fp32")
    assert "starts at 7.5" in problem


def test_a_gpu_that_is_nearly_full_is_refused_with_what_is_free():
    (problem,) = problems(replace(H100, free_bytes=GiB // 2))
    assert "512 MiB are free" in problem
    assert "nvidia-smi" in problem


def test_the_frozen_base_of_adapters_is_counted_in_its_type_and_without_gradients():
    card = replace(H100, name="RTX 4090", capability=(8, 9), free_bytes=23 * GiB, total_bytes=24 * GiB)
    run = {"model": {"preset": "llama-3.1-8b"}, "precision": {"compute": "bf16"}, "data": {"path": "tokens"}}
    run |= BATCH | {"out": "run", "init": {"weights": "base"}}
    batch = BATCH["batch"] | {"global_batch": 8}
    adapted = run | {"lora": {"rank": 16}, "batch": batch}
    assert gpu_problems(card, parse(adapted)) == []
    (problem,) = gpu_problems(card, parse(run))
    assert "a rank needs 60.8 GiB or more" in problem
    trained = 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    base_bytes = 2 * 8_030_261_248
    for layout, frozen in (
        ({"dp_shard": 8, "zero": 2}, base_bytes),
        ({"dp_shard": 8, "zero": 3}, base_bytes / 8),
        ({"dp_shard": 4, "zero": 3, "dp_replicate": 2}, base_bytes / 4),
        ({"tp": 2, "dp_replicate": 4}, base_bytes / 2),
    ):
        assert least_state_bytes(parse(adapted | {"layout": layout}), 8) == trained + frozen


@pytest.mark.parametrize(
    ("value", "good"),
    [("eth", 1), ("=eth0", 1), ("^docker", 1), ("", 1), ("ib0,eth", 1), ("ib", 0), ("=eth", 0), ("^eth,lo", 0)],
)
def test_nccl_needs_an_interface_that_is_there(value: str, good: int):
    assert len(interface_problems(value, ["eth0", "lo"])) == 1 - good


def test_two_ranks_on_one_gpu_are_refused():
    store = dist.HashStore()
    claim_gpu(store, 0, "node/GPU-1")
    claim_gpu(store, 1, "node/GPU-2")
    with pytest.raises(InputError, match="ranks 0 and 2 use the same GPU"):
        claim_gpu(store, 2, "node/GPU-1")


def test_a_driver_that_is_too_old_is_the_reason_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for wanted in ("cuda", "auto"):
        with pytest.raises(InputError, match=r"too old \(found version 11040\); "):
            pick_device(wanted, ProcessRank())
