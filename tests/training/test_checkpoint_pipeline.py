"""Proves that a checkpoint knows nothing of pipeline stages: any number of them takes up what any other has saved.

Worlds of 1, 2 and 4 gloo ranks. Each rank of `pp` has a part of the state under its names in the whole model; what
several have has to be the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import CheckpointError
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation
from tests.training.checkpoints import DATA, ONE, ZERO_3, Logical, equal, hop, load_ranks, logical, take_step
from tests.training.worlds import SEED, SPEC, build

DEEP = replace(SPEC, n_layers=4, n_heads=4, n_kv_heads=2)
TIED = replace(DEEP, tied_embedding=True)
STAGED = [
    Layout(pp=2),
    Layout(pp=4, pp_schedule="zb-h1"),
    ONE,
    Layout(pp=2, pp_schedule="zb-v", dp_shard=2, zero=3),
    Layout(pp=2, stage_layers=(3, 1), tp=2, sequence_parallel=True),
    Layout(pp=2, pp_schedule="dualpipe"),
    ZERO_3,
    Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2),
    Layout(pp=2, cp=2, cp_method="ring", zero=3, zero_pp_gather="microbatch"),
    Layout(pp=2),
]
STAGED_AND_TIED = [
    Layout(pp=2),
    Layout(pp=2, pp_schedule="zb-v", dp_shard=2, zero=3),
    ONE,
    Layout(pp=2, pp_schedule="dualpipe", dp_replicate=2),
    Layout(pp=2, tp=2, sequence_parallel=False),
    Layout(pp=2, pp_schedule="zb-v"),
    ONE,
]


def together(parts: Sequence[Logical]) -> Logical:
    """The whole state, of which ranks have parts; those of several are the same bits."""
    whole: Logical = {}
    for part in parts:
        assert equal(part, {name: whole.get(name, tensor) for name, tensor in part.items()})
        whole |= part
    return whole


@pytest.mark.parametrize(
    ("spec", "layouts"),
    [
        pytest.param(DEEP, STAGED[:2], id="two layouts"),
        pytest.param(DEEP, STAGED, id="every layout", marks=prove),
        pytest.param(TIED, STAGED_AND_TIED, id="tied", marks=prove),
    ],
)
def test_any_pipeline_takes_up_bit_for_bit_what_any_other_has_saved(tmp_path, spec: ModelSpec, layouts: list[Layout]):
    expected: Logical = {}
    for step, layout in enumerate(layouts):
        outcomes = run_ranks(hop, layout.world_size, tmp_path, layout, step, spec)
        if step:
            assert equal(together([loaded for loaded, _ in outcomes]), expected), layout
        expected = together([saved for _, saved in outcomes])
        assert len(expected) == 4 * (9 * spec.n_layers + (2 if spec.tied_embedding else 3))


def resumed_and_not(folder: Path, layout: Layout) -> tuple[Logical, Logical]:
    """The state after two steps, with and without a stop between them."""
    trainer, store = build(layout, torch.float32, TIED), CheckpointStore(folder)
    take_step(trainer, layout, 0)
    path = save(store, trainer, TrainingProgress(1, 12, SEED), DATA, "")
    take_step(trainer, layout, 1)
    resumed = build(layout, torch.float32, TIED)
    load(path, resumed, DATA)
    take_step(resumed, layout, 1)
    return logical(resumed), logical(trainer)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(pp=2), marks=prove),
        Layout(pp=2, pp_schedule="zb-v"),
        pytest.param(Layout(pp=2, pp_schedule="zb-v", dp_shard=2, zero=3), marks=prove),
    ],
    ids=str,
)
def test_the_step_after_a_resume_is_that_of_a_run_that_never_stopped_with_a_tied_embedding_too(tmp_path, layout):
    for resumed, expected in run_ranks(resumed_and_not, layout.world_size, tmp_path, layout):
        assert equal(resumed, expected)


LOCAL_NAMES = Mutation(
    "shardwright.parallel.pipeline.stage:StageModel.__init__",
    "{str(i): whole.layers[str(i)] for i in layers}",
    "{str(i - layers[0]): whole.layers[str(i)] for i in layers}",
)


def test_bug_22_layers_numbered_from_the_start_of_their_stage_are_neither_taken_up_nor_passed_on(tmp_path):
    run_ranks(hop, 2, tmp_path / "wrong", Layout(pp=2), 0, DEEP, (LOCAL_NAMES,))
    run_ranks(hop, 1, tmp_path / "right", ONE, 0, DEEP)
    for folder, layout, mutations in (("wrong", ONE, ()), ("right", Layout(pp=2), (LOCAL_NAMES,))):
        path = tmp_path / folder / "step-00000001"
        for error in run_ranks(load_ranks, layout.world_size, path, layout, mutations, torch.float32, DEEP):
            assert isinstance(error, CheckpointError)
            assert "more tensors differ" in str(error)
            assert "layers.2." in str(error)
    # And what is healthy goes through.
    assert not isinstance(
        run_ranks(load_ranks, 2, tmp_path / "right" / "step-00000001", Layout(pp=2), (), torch.float32, DEEP)[1],
        CheckpointError,
    )
