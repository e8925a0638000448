"""Proves the planner's bytes and seconds of Muon: the bytes by the states of a real model, the seconds by hand."""

from dataclasses import replace

import pytest

from shardwright.config import OptimizerSection
from shardwright.cost import memory
from shardwright.cost.matmuls import reached_flops_per_s
from shardwright.cost.optimizer_step import matrix_updates
from shardwright.cost.rank_parameters import rank_parameters
from shardwright.cost.step import step_time
from shardwright.model.presets import resolve
from shardwright.model.transformer import Transformer
from shardwright.optimizers import newton_schulz_flops
from shardwright.training.optimizer import build_optimizer
from tests.cost.jobs import candidates, job

DEBUG = resolve("debug")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bytes_are_those_of_the_states_that_a_model_is_given(tp: int) -> None:
    parameters = dict(Transformer(DEBUG).named_parameters())
    optimizer = build_optimizer(parameters, DEBUG, OptimizerSection(name="muon"))
    held = sum(t.numel() * 4 for each in optimizer.state.values() for t in each.values() if t.dim())
    the_job = job(DEBUG, on=f"h100:{tp}/{tp}", global_batch=8, seq_len=64, optimizer="muon")
    found = memory.estimate_memory(the_job, candidates(tp=tp)).kinds["optimizer"].ravel()[0]
    if tp == 1:
        assert found == held
    else:  # norms are on both ranks
        assert held / 2 < found < held * 0.52


def test_seconds_of_one_accelerator_are_its_flops() -> None:
    the_job = job(on="h100:1/1", global_batch=8, optimizer="muon")
    llama = the_job.model
    sizes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    flops = llama.n_layers * sum(10 * (2 * min(s) ** 2 * max(s) + min(s) ** 3) for s in sizes)
    assert newton_schulz_flops(14336, 4096) == 10 * (2 * 4096**2 * 14336 + 4096**3)
    of = candidates()
    held = rank_parameters(the_job, of)
    found = matrix_updates(the_job, of, held.hidden, held.experts)[0]
    assert found == pytest.approx(flops / reached_flops_per_s(the_job, "bf16"))
    adam = replace(the_job, optimizer="adamw")
    more = step_time(the_job, of).parts["optimizer"] - step_time(adam, of).parts["optimizer"]
    assert more[0] == pytest.approx(found)


def test_owners_share_the_work_and_shards_are_sent() -> None:
    the_job = job(optimizer="muon")

    def seconds(**values: int) -> float:
        of = candidates(**values)
        held = rank_parameters(the_job, of)
        return float(matrix_updates(the_job, of, held.hidden, held.experts)[0])

    alone = seconds(dp_replicate=64)
    assert seconds(dp_shard=64, zero=1) < alone / 10
    assert seconds(dp_shard=8, dp_replicate=8, zero=2) < alone / 10
    assert alone / 8 < seconds(tp=8, dp_replicate=8) < alone / 4
