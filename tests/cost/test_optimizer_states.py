"""Proves that the bytes which a plan counts for optimizer states are those of the states of a real model."""

from dataclasses import replace

import pytest
import torch

from shardwright.config import OptimizerSection
from shardwright.cost import memory
from shardwright.cost.step import step_time
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.optimizers import OPTIMIZERS
from shardwright.parallel.norm import local_part
from shardwright.training.optimizer import build_optimizer
from tests.cost.jobs import candidates, job
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.bugs.bug import EVEN, EXPERTS, LATENT
from tests.training.worlds import build

DEBUG = resolve("debug")
SPECS = {
    "debug": DEBUG,
    "biases, tied": replace(DEBUG, bias=True, norm="layernorm", tied_embedding=True),
    "latent attention": replace(DEBUG, n_kv_heads=DEBUG.n_heads, latent_attention=LATENT),
    "experts": replace(DEBUG, moe=EXPERTS),
}
SHARDED = replace(EVEN, d_ffn=40, vocab_size=32)
"""Every dim that ZeRO shards is a multiple of 4."""
IN_BLOCKS = OptimizerSection(name="adamw-8bit", block_size=12, least_elements=1025)
"""Of the matrices of SHARDED those of the network are large enough."""
LAYOUTS = {
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 3": Layout(dp_shard=4, zero=3),
    "tp": Layout(tp=2),
    "tp, zero 2": Layout(tp=2, dp_shard=2, zero=2),
}


def counted(spec: ModelSpec, run: OptimizerSection, **layout: int) -> float:
    """Bytes of optimizer states on a rank, by the plan."""
    narrow = run.state_dtype == "bf16"
    the_job = job(
        spec,
        on="h100:8",
        global_batch=8,
        seq_len=8,
        optimizer=run.name,
        narrow_states=narrow,
        optimizer_options=tuple(run.options.items()),
    )
    return float(memory.estimate_memory(the_job, candidates(**layout)).kinds["optimizer"].ravel()[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_one_rank_are_those_of_a_model(name: str, spec: str) -> None:
    parameters = {n: p for n, p in Transformer(SPECS[spec]).named_parameters() if p.requires_grad}
    for dtype in ["parameters"] if OPTIMIZERS[name].means or OPTIMIZERS[name].in_blocks else ["parameters", "bf16"]:
        run = OptimizerSection(name=name, state_dtype=dtype)  # type: ignore[arg-type]
        optimizer = build_optimizer(parameters, SPECS[spec], run)
        states = [state for each in optimizer.state.values() for state in each.values() if state.dim()]
        # A plan counts the bias of a router with the parameters that have states.
        balanced = sum(p.numel() for n, p in Transformer(SPECS[spec]).named_parameters() if not p.requires_grad)
        found = counted(SPECS[spec], run)
        held = sum(state.numel() * state.element_size() for state in states)
        assert held <= found <= held + 8 * balanced


def held(layout: Layout, run: OptimizerSection) -> int:
    """Bytes of optimizer states of this rank, in fp32."""
    parameters = build(layout, torch.float32, SHARDED).model.named_parameters
    optimizer = build_optimizer(parameters, SHARDED, run)
    states = [local_part(state) for each in optimizer.state.values() for state in each.values() if state.dim()]
    return sum(state.numel() * state.element_size() for state in states)


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "tp, zero 2"))
@pytest.mark.parametrize("run", [OptimizerSection(name="adafactor"), IN_BLOCKS], ids=lambda run: run.name)
def test_the_means_and_the_blocks_of_a_shard_are_counted(name: str, run: OptimizerSection) -> None:
    layout = LAYOUTS[name]
    found = run_ranks(held, layout.world_size, layout, run)
    assert set(found) == {counted(SHARDED, run, dp_shard=layout.dp_shard, tp=layout.tp, zero=layout.zero)}


def test_states_in_bf16_take_less_of_a_step() -> None:
    """Of 38 bytes an element AdamW saves 8, as much as Lion's one state instead of two."""
    adam = job("llama-3.1-8b", on="h100:64")
    jobs = (adam, replace(adam, narrow_states=True), replace(adam, optimizer="lion"), replace(adam, optimizer="sgd"))
    seconds = [step_time(each, candidates(dp_shard=64, zero=3)).parts["optimizer"][0] for each in jobs]
    assert seconds[1] < seconds[0]
    assert seconds[1:] == pytest.approx([seconds[1]] * 3)
