"""Proves that with optimizer states in the memory of the host a run computes the same bits on every layout, which
tensors are on which device, and what a step copies between them, in bytes; the latter without a GPU, on fake tensors.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config import OptimizerSection
from shardwright.layout.layout import Layout
from shardwright.model.modules import rows
from shardwright.training.offload.on_host import OptimizerOnHost
from shardwright.training.offload.states import Host
from shardwright.training.optimizer import build_optimizer
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.traffic import ReportedCopies
from tests.training.bugs.bug import EVEN, EXPERTS
from tests.training.checkpoints import Logical, equal, hop, logical
from tests.training.test_offload import LAYOUTS, RUNS
from tests.training.worlds import CASE, OPTIMIZER

ON_HOST = {"offload_optimizer": "cpu"}


class Copies(TorchDispatchMode):
    """What an optimizer copies between device and host, by the device that it goes to, and where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = {"cpu": 0, "cuda": 0}
        self.n_calls = {"cpu": 0, "cuda": 0}
        self.computed_on: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "_foreach_copy_":
            ends = {(into.device.type, of.device.type) for into, of in zip(*args[:2], strict=True)}
            (end,) = ends
            assert set(end) == {"cpu", "cuda"}
            self.n_bytes[end[0]] += sum(each.nbytes for each in args[1])
            self.n_calls[end[0]] += 1
        elif name.startswith(("_fused", "_foreach")) and args and args[0]:
            self.computed_on |= {each.device.type for each in args[0]}
        elif name in ("copy_", "_to_copy"):
            assert {each.device.type for each in args[:2] if isinstance(each, torch.Tensor)} == {"cpu"}
            assert torch.device((kwargs or {}).get("device") or "cpu").type == "cpu"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("run", "bucket_bytes"),
    [(RUNS["adamw"], 2**30), (RUNS["bf16 states"], 1)],
    ids=["a bucket for each group", "a bucket for each parameter, bf16 states"],
)
def test_states_and_the_update_are_on_the_host_and_a_step_copies_gradients_there_and_weights_back(
    run: OptimizerSection, bucket_bytes: int
):
    with FakeTensorMode():
        parameters = {
            name: nn.Parameter(torch.empty(row.shape, device="cuda")) for name, row in rows(EVEN).items() if row.trained
        }
        reported = ReportedCopies()
        optimizer = build_optimizer(parameters, EVEN, run, Host(bucket_bytes), reported)
        assert isinstance(optimizer, OptimizerOnHost)
        for parameter in parameters.values():
            assert parameter.device.type == "cuda"
            assert {value.device.type for value in optimizer.state[parameter].values()} == {"cpu"}
            parameter.grad = torch.empty(parameter.shape, device="cuda")
        n_bytes = sum(parameter.nbytes for parameter in parameters.values())
        groups = [[each] for each in parameters.values()]
        if bucket_bytes > 1:  # norms have no weight decay
            groups = [[each for each in parameters.values() if (each.dim() > 1) == matrices] for matrices in (0, 1)]
        n_buckets, largest = len(groups), max(sum(each.nbytes for each in group) for group in groups)
        assert len(optimizer.buckets) == n_buckets
        # The first step also takes the initial weights, and so does one after something has written them.
        written = parameters["embedding.weight"]
        for weights_bytes in (n_bytes, 0, written.nbytes):
            if weights_bytes == written.nbytes:
                written.detach().mul_(2.0)
            with Copies() as copies:
                optimizer.step()
            assert copies.n_bytes == {"cpu": n_bytes + weights_bytes, "cuda": n_bytes}
            assert copies.n_calls == {"cpu": n_buckets, "cuda": n_buckets}
            assert copies.computed_on == {"cpu"}
            assert (sum(reported.out), sum(reported.back)) == tuple(copies.n_bytes.values())
            reported.out.clear()
            reported.back.clear()
        n_states = len(run.kind.state)
        per_state = 2 if run.state_dtype == "bf16" else 4
        n_parameters = n_bytes // 4
        states = n_states * per_state * n_parameters + 4 * len(run.kind.counters) * len(parameters)
        assert optimizer.bytes_on_host == states + n_bytes + 2 * largest


def trained(layout: Layout, run: OptimizerSection, dtype: str, mutations: Sequence[Mutation] = ()) -> Logical:
    """The training state of a rank after three steps."""
    spec = replace(EVEN, moe=EXPERTS if layout.ep > 1 else None, n_layers=2 * layout.pp)
    with ExitStack() as stack:
        stack.enter_context(mutated(*mutations))
        case = replace(CASE, spec=spec, seq_len=12, dtype=dtype, optimizer=run)
        trainer = verify_rank.build_trainer(case, layout, run.name)
        if layout.offload_optimizer == "cpu" and layout.offload_parameters == "none":
            assert isinstance(trainer.optimizer, OptimizerOnHost)
            assert len(trainer.optimizer.buckets) > 2
        for step in range(3):
            trainer.forward_backward(verify_rank.local_batch(case, layout, dist.get_rank(), step), step)
            trainer.update(run.lr)
        return logical(trainer)


def check(layout: Layout, run: OptimizerSection = OPTIMIZER, dtype: str = "float64") -> None:
    expected = run_ranks(trained, layout.world_size, layout, run, dtype)
    found = run_ranks(trained, layout.world_size, layout.changed(**ON_HOST), run, dtype)
    assert all(equal(*each) for each in zip(found, expected, strict=True))


SOME = ("zero 0", "pp", "tp, ep, zero 3")  # the matrix of verify has every axis


@pytest.mark.parametrize("name", rest_prove(SOME))
def test_states_on_the_host_give_the_bits_of_states_on_the_device_on_every_layout(name: str):
    check(LAYOUTS[name])


@pytest.mark.parametrize("name", rest_prove(("bf16 states", "sgd")))
def test_states_on_the_host_give_the_bits_of_states_on_the_device_for_every_optimizer(name: str):
    check(LAYOUTS["one rank"], RUNS[name], "bfloat16")


HOPS = [
    Layout(**ON_HOST),
    Layout(dp_shard=2, zero=3, **ON_HOST),
    Layout(),
    Layout(dp_shard=2, offload_optimizer="disk"),
]


@prove
def test_states_on_the_host_are_saved_and_taken_up_bit_for_bit_by_any_layout_with_or_without(tmp_path: Path):
    expected: Logical = {}
    for step, layout in enumerate([*HOPS, HOPS[1]]):
        outcomes = run_ranks(hop, layout.world_size, tmp_path, layout, step)
        for loaded, saved in outcomes:
            assert not step or (loaded is not None and equal(loaded, expected)), layout
            assert not equal(saved, expected)
        expected = outcomes[0][1]
