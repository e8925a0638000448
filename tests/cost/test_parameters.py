"""Proves that parameters are counted exactly: as the built model has them, cut by the table that cuts it.

The model is built on the meta device, so nothing is allocated; one test counts on real ranks.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.cost import parameters, pipeline
from shardwright.cost.job import Candidates
from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of, rows
from shardwright.model.presets import PRESETS, resolve
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.norm import local_part
from shardwright.parallel.pipeline.stage import cut_stages
from shardwright.split.rules import problems
from shardwright.split.stages import stage_layers
from shardwright.split.tensor import kv_replicas, vocabulary_rows
from tests.cost.layouts import job
from tests.distributed import run_ranks
from tests.training.worlds import build

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=8, sequence_parallel=True),
    Layout(pp=2),
    Layout(pp=2, pp_schedule="zb-v", tp=4, sequence_parallel=True),
    Layout(dp_shard=8, zero=3, ep=8),
    Layout(dp_shard=8, zero=1, tp=2, sequence_parallel=True, ep=16, pp=2),
]


def short(preset: str) -> ModelSpec:
    """The preset with six layers: stages are made of whole layers, so more would show nothing more."""
    return replace(resolve(preset), n_layers=min(6, resolve(preset).n_layers))


def rank_parameters(spec: ModelSpec, layout: Layout, tp_rank: int) -> parameters.Parameters:
    candidates = Candidates.from_layout(layout, 1)
    stages = pipeline.stages(job(spec), candidates)
    return parameters.tp_rank_parameters(spec, stages, candidates.tp, candidates.ep, tp_rank)


def share(name: str, parameter: torch.Tensor, spec: ModelSpec, layout: Layout, tp_rank: int) -> int:
    """Elements of a parameter that a rank of tp and ep has, by the table of splits."""
    row, count = row_of(spec, name), parameter.numel()
    if row.split == "experts":
        return count // layout.ep
    if row.split == "vocabulary":
        return len(vocabulary_rows(spec.vocab_size, layout.tp, tp_rank)) * spec.d_model
    if row.split == "kv_column":
        return count * kv_replicas(spec.n_kv_heads, layout.tp) // layout.tp
    return count if row.split_dim is None else count // layout.tp


POSSIBLE = [
    (preset, at) for preset in PRESETS for at in range(len(LAYOUTS)) if not problems(short(preset), LAYOUTS[at], 4096)
]


@pytest.mark.parametrize(("preset", "at"), POSSIBLE)
def test_every_rank_and_stage_has_what_the_built_model_has(preset: str, at: int):
    parameters_are_those_of_the_built_model(short(preset), LAYOUTS[at])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_stage_has_modules_of_multi_token_prediction_and_the_embedding(layout: Layout):
    parameters_are_those_of_the_built_model(replace(short("deepseek-v3"), mtp_modules=2), layout)


def parameters_are_those_of_the_built_model(spec: ModelSpec, layout: Layout) -> None:
    layers = stage_layers(spec, layout, 4096)
    with torch.device("meta"):
        built = cut_stages(Transformer(spec), layers)
    for tp_rank in {0, layout.tp - 1}:
        held = rank_parameters(spec, layout, tp_rank)
        for stage, module in enumerate(built):
            counted = {True: 0, False: 0}
            for name, parameter in module.named_parameters():
                if not name.endswith("router.load"):
                    counted[row_of(spec, name).split == "experts"] += share(name, parameter, spec, layout, tp_rank)
            assert (held.expert[0, stage], held.dense[0, stage]) == (counted[True], counted[False])


@pytest.mark.parametrize("preset", PRESETS)
def test_stages_add_up_to_the_model_and_its_tied_matrix_once_more(preset: str):
    spec = resolve(preset)
    for layout in (Layout(), Layout(pp=4)):
        held = rank_parameters(spec, layout, 0)
        again = spec.vocab_size * spec.d_model if spec.tied_embedding and layout.pp > 1 else 0
        assert held.dense.sum() + held.expert.sum() == spec.n_parameters + again


def test_ranks_of_tp_and_ep_add_up_to_the_model_and_copies_of_what_is_not_cut():
    spec = resolve("qwen3-30b-a3b")
    layout = Layout(dp_shard=4, zero=1, tp=4, ep=16, sequence_parallel=True)
    cut = sum(int(rank_parameters(spec, layout, rank).dense.sum()) for rank in range(4))
    copied = sum(row.numel for row in rows(spec).values() if row.counted and row.split in ("replicated", "per_head"))
    experts = 16 * int(rank_parameters(spec, layout, 0).expert.sum())
    assert cut - 3 * copied + experts == spec.n_parameters


def test_rows_that_a_stack_adds_make_the_vocabulary_divide():
    rows = parameters.vocabulary_rows(resolve("gpt2"), np.array([1, 2, 4]), multiple=128)
    assert rows.tolist() == [50304, 50432 // 2, 50688 // 4]


def test_the_largest_layer_and_matrix_are_those_of_the_mixture_where_it_is_larger():
    held = rank_parameters(resolve("deepseek-v3"), Layout(), 0)
    assert held.layer_expert[0] == 256 * 3 * 7168 * 2048
    assert held.matrix[0] == held.layer_expert[0] * 2 // 3


def local_count(layout: Layout) -> tuple[int, int]:
    trainer = build(layout, torch.float32, short("debug"))
    numel = sum(local_part(parameter).numel() for parameter in trainer.model.named_parameters.values())
    return dist.get_rank(), numel


def test_real_ranks_hold_as_many():
    layout = Layout(pp=2, tp=2, sequence_parallel=True)
    for rank, counted in run_ranks(local_count, 4, layout):
        at = layout.coordinates(rank)
        assert rank_parameters(short("debug"), layout, at["tp"]).dense[0, at["pp"]] == counted
