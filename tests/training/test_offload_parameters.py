"""Proves that with the shards of parameters in the memory of the host a run computes the same bits, that nothing but
trained parameters is there, how many bytes of them a step copies to the device, and that known bugs of it are seen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from shardwright.parallel.initialise import allocate
from shardwright.system.errors import ConfigError
from shardwright.system.torch_private import FSDPParam, fsdp_parameters, is_offloaded, shard_of
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import EVEN, EXPERTS
from tests.training.bugs.offload_parameters import ON_RANKS
from tests.training.checkpoints import Logical, equal
from tests.training.test_offload_host import trained
from tests.training.worlds import CASE, OPTIMIZER

ON_HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
LAYOUTS = {
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 2, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "zero 1, pp": Layout(pp=2, dp_shard=2, zero=1, pp_schedule="zb-h1"),
    "states on a disk": Layout(dp_shard=2, zero=3, offload_optimizer="disk"),
    "tp, ep, hybrid": Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3, ep=4),
    "pp, gathered for each micro-batch": Layout(pp=2, cp=2, zero=3, zero_pp_gather="microbatch"),
}


def one_rank(layout: Layout, *bugs: Mutation) -> tuple[Logical, str]:
    """The training state after three steps of one rank, and what reduces its gradients."""
    with mutated(*bugs):
        engine = verify_rank.build_trainer(CASE, layout, "adamw").model.runner.engine  # type: ignore[attr-defined]
    return trained(layout, OPTIMIZER, "float64", bugs), type(engine).__name__


def test_one_rank_has_its_parameters_and_gradients_on_the_host_and_the_same_bits(*bugs: Mutation):
    ((expected, _),) = run_ranks(one_rank, 1, Layout())
    layout = Layout(zero=2, **ON_HOST)
    assert layout.changed(recompute="full").offload_parameters == "cpu"
    ((found, engine),) = run_ranks(one_rank, 1, layout, *bugs)
    assert equal(found, expected)
    assert engine == "Sharded"


@pytest.mark.prove
@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_on_the_host_give_the_bits_of_shards_on_the_device(name: str):
    layout = LAYOUTS[name]
    on_host = layout.changed(
        **(ON_HOST | ({} if layout.offload_optimizer == "none" else {"offload_optimizer": "disk"}))
    )
    expected = run_ranks(trained, layout.world_size, layout.changed(offload_optimizer="none"), OPTIMIZER, "float64")
    found = run_ranks(trained, layout.world_size, on_host, OPTIMIZER, "float64")
    assert all(equal(*each) for each in zip(found, expected, strict=True))


def devices(*bugs: Mutation) -> dict[str, set[str]]:
    """By device the kinds of the tensors of a model, where `meta` stands for a GPU; `gathered from`: whether shards are
    copied from the host to where they are gathered."""
    with mutated(*bugs):
        return _devices()


def _devices() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"cpu": set(), "meta": set(), "gathered from": set()}

    def fill(part: nn.Module, spec: ModelSpec, seed: int, device: torch.device, shards_on: torch.device) -> None:
        allocate(part, torch.device("meta"), shards_on)

    spec, layout = replace(EVEN, moe=EXPERTS), Layout(dp_shard=2, ep=2, zero=3, **ON_HOST)
    model = apply(spec, layout, torch.device("cpu"), seed=0, fill=fill)
    for part in model.parts:
        for parameter in part.parameters():
            found[parameter.device.type].add("trained" if parameter.requires_grad else "untrained")
        for buffer in part.buffers():
            found[buffer.device.type].add("buffer")
    for group in model.runner.engine.groups:  # type: ignore[attr-defined]
        found["gathered from"] |= {"host" if is_offloaded(each) else "device" for each in fsdp_parameters(group)}
    return found


def test_trained_parameters_are_on_the_host_and_nothing_else_is(*bugs: Mutation):
    for found in run_ranks(devices, 2, *bugs):
        assert found["cpu"] == {"trained"}
        assert "trained" not in found["meta"]
        assert "untrained" in found["meta"]
        assert found["gathered from"] == {"host"}


def optimizer(*bugs: Mutation) -> str:
    """What updates the shards on the host."""
    with mutated(*bugs):
        trainer = verify_rank.build_trainer(replace(CASE, spec=EVEN), Layout(dp_shard=2, zero=3, **ON_HOST), "adamw")
        return type(trainer.optimizer).__name__


def test_the_optimizer_updates_them_where_they_are(*bugs: Mutation):
    assert run_ranks(optimizer, 2, *bugs) == ["OptimizerOnShards"] * 2


@pytest.mark.prove
@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_show_the_bug(name: str):
    what, bug = ON_RANKS[name]
    test = globals()["test_" + what.replace(" ", "_")]
    with pytest.raises(AssertionError):
        test(bug)


def copied() -> int:
    """Bytes of shards that a step of two micro-batches copies from the host to gather them."""
    n_bytes, inputs = 0, FSDPParam.all_gather_inputs

    def counted(parameter: FSDPParam) -> list[torch.Tensor]:
        nonlocal n_bytes
        if parameter.offload_to_cpu:
            n_bytes += shard_of(parameter).nbytes
        found: list[torch.Tensor] = inputs.fget(parameter)
        return found

    layout, spec = Layout(dp_shard=2, zero=3, **ON_HOST), replace(EVEN, vocab_size=32)
    case = replace(CASE, spec=spec, global_batch=4, micro_batch=1, dtype="float32")
    trainer = verify_rank.build_trainer(case, layout, OPTIMIZER.name)
    FSDPParam.all_gather_inputs = property(counted)  # type: ignore[assignment]
    trainer.forward_backward(verify_rank.local_batch(case, layout, torch.distributed.get_rank(), 0), 0)
    return n_bytes


def test_a_step_copies_the_shards_of_layers_twice_a_microbatch_and_all_others_once():
    spec = replace(EVEN, vocab_size=32)
    ends = 2 * 32 * spec.d_model + spec.d_model
    layers = spec.n_parameters - ends
    assert run_ranks(copied, 2) == [2 * (2 * layers + ends) * 4 / 2] * 2


@pytest.mark.parametrize("layout", [{"offload_optimizer": "cpu"}, {"dp_shard": 2}, {"dp_shard": 2, "zero": 2}])
def test_it_needs_zero_1_to_3_and_states_that_are_offloaded_too(layout: dict[str, object]):
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 8, "global_batch": 8}}
    needs = "needs zero=1, 2 or 3 and offload_optimizer='cpu' or 'disk'; set that"
    with pytest.raises(ConfigError, match=f"offload_parameters='cpu' {needs}"):
        parse(run | {"layout": {**layout, "offload_parameters": "cpu"}})
