"""Proves that experts that move between ranks of ep between steps train as one process does, that a run moves them by
their load and saves them in the order of the model, and that a placement lowers the load of the busiest rank."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.config import RunConfig, parse
from shardwright.config.average import AverageSection
from shardwright.layout.layout import Layout
from shardwright.system.errors import InputError
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.expert_places import PlaceExperts
from shardwright.training.hooks import Due, RunStart, TakenStep
from shardwright.training.run_log import RunLog
from shardwright.training.weights import CheckpointWeights, open_weights
from shardwright.verification import Verifier
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.rank import build_trainer, local_batch, shift_experts
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.checkpoints import DATA
from tests.training.runs import events, train, trajectory, write_run_file
from tests.training.test_experts import CASE, check

EP = Layout(dp_shard=2, zero=2, ep=2, place_experts_every=1)
PP = Layout(pp=2, dp_shard=2, zero=1, ep=2, place_experts_every=1)
LAYOUTS = [
    EP,
    PP,
    Layout(dp_shard=4, zero=3, ep=2, place_experts_every=1),
    Layout(dp_shard=4, zero=2, ep=4, recompute="full", place_experts_every=1),
    Layout(cp=2, ep=2, place_experts_every=1),
    Layout(tp=2, sequence_parallel=True, ep=2, place_experts_every=1),
    Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3, ep=2, place_experts_every=1),
    Layout(dp_replicate=2, dp_shard=2, zero=3, ep=2, offload_optimizer="cpu", place_experts_every=1),
    Layout(pp=2, dp_shard=2, zero=2, ep=2, pp_schedule="dualpipe", place_experts_every=1),
]
THREE_STEPS = replace(CASE, steps=3, average=AverageSection(kind="ema", every=1, decay=0.7))


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, EP), ids=str)
def test_experts_that_move_between_steps_train_as_one_process_does(verifier: Verifier, layout: Layout):
    case = THREE_STEPS
    if layout.pp_schedule == "dualpipe":
        case = replace(case, spec=replace(case.spec, n_layers=4))
    check(verifier, case, layout)


def config_of(layout: Layout, folder: Path) -> RunConfig:
    run = {"out": str(folder), "steps": 9, "data": {"path": "d"}, "model": {"preset": "debug-moe"}}
    return parse(run | {"batch": {"seq_len": 8, "global_batch": 8}, "layout": layout.settings()})


STAYS = Mutation("shardwright.training.expert_places:PlaceExperts.on_rollback", "self.places.forget()", "pass")
"""A bug: the experts have the order from before the rollback."""


def losses_around_a_rollback(folder: Path, mutations: tuple[Mutation, ...]) -> tuple[float, float]:
    """On 2 ranks: the loss after a step at which a checkpoint is saved, and again after experts have moved, a further
    step and a rollback to that checkpoint."""
    trainer, store = build_trainer(CASE, EP, PLAIN_SGD), CheckpointStore(folder, keep_last=9)
    places, batch = trainer.model.places, local_batch(CASE, EP, dist.get_rank(), 0)
    assert places is not None
    hook = PlaceExperts(config_of(EP, folder), trainer, RunLog(config_of(EP, folder), 1, True, 0))
    trainer.step(batch, 0, 0.01)
    save(store, trainer, TrainingProgress(1, 12, CASE.seed), DATA, "steps = 1\n")
    before = float(trainer.model.sum_over_losses(trainer.forward_backward(batch, 1).loss_part))
    trainer.model.forget_gradients()
    shift_experts(places, trainer, 1)
    trainer.step(batch, 1, 0.01)
    load(store.path_of(1), trainer, DATA)
    with mutated(*mutations):
        hook.on_rollback(RunStart(1))
    return before, float(trainer.model.sum_over_losses(trainer.forward_backward(batch, 1).loss_part))


def test_a_run_that_rolls_back_has_the_experts_at_home(tmp_path: Path):
    before, after = run_ranks(losses_around_a_rollback, 2, tmp_path, ())[0]
    assert after == before


@prove
def test_a_rollback_shows_the_bug(tmp_path: Path):
    before, after = run_ranks(losses_around_a_rollback, 2, tmp_path, (STAYS,))[0]
    assert after != before


def placed_steps(folder: Path) -> tuple[list[bool], list[bool]]:
    """On 2 ranks that save after every step: whether experts had moved in each step, and were home at its end."""
    trainer = build_trainer(CASE, EP, PLAIN_SGD)
    places, batch = trainer.model.places, local_batch(CASE, EP, dist.get_rank(), 0)
    assert places is not None
    hook = PlaceExperts(config_of(EP, folder), trainer, RunLog(config_of(EP, folder), 1, True, 0))
    moved, home = [], []
    for step in range(3):
        hook.before_step(step)
        moved.append(places.orders != places.home)
        result = trainer.step(batch, step, 0.01)
        due = Due(log=False, evaluate=False, save=False, save_locally=True, last=False)
        taken = TakenStep(step + 1, (0, 0), 0.01, result, False, due)
        hook.after_step(taken)
        hook.on_save(taken)
        home.append(places.orders == places.home)
    return moved, home


def test_a_run_that_saves_after_every_step_takes_its_steps_with_the_experts_at_their_places(tmp_path: Path):
    assert run_ranks(placed_steps, 2, tmp_path) == [([False, True, True], [True] * 3)] * 2


MIXTURE = (
    "model.moe={n_experts=4, top_k=1, d_ffn=8, normalise=false}", "layout.ep=2", "layout.zero=2",
    "optimizer.clip_norm=0",  # the terms of the norm are added in the order of the experts
    "checkpoint.every=5", "steps=10",
)  # fmt: skip


@prove
def test_a_run_that_places_experts_by_their_load_has_the_losses_and_checkpoints_of_one_that_does_not(
    tmp_path: Path, tokens: Path
):
    run_file = write_run_file(tmp_path, tokens)
    common = [f"--set={key}" for key in MIXTURE]
    train(run_file, *common, f"--set=out={tmp_path / 'plain'}")
    run = train(run_file, *common, "--set=layout.place_experts_every=2")
    told = [event.text for event in events(run_file) if event.kind == "placement"]
    assert len(told) == 5
    assert any(" of 8 moved, " in text and "the busiest rank of ep has" in text for text in told), told
    assert all(text in run.stdout for text in told)
    for found, expected in zip(trajectory(run_file), trajectory(run_file, "plain"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for step in (5, 10):
        placed, plain = (open_weights(tmp_path / out / "checkpoints" / f"step-{step:08d}") for out in ("out", "plain"))
        assert isinstance(placed, CheckpointWeights)
        assert isinstance(plain, CheckpointWeights)
        for found, expected in ((placed, plain), (placed.optimizer, plain.optimizer)):
            assert found is not None
            assert expected is not None
            for name, shape in expected.shapes.items():
                first = (0,) * len(shape)
                # The rows of an expert begin elsewhere, and a matmul of many experts adds them in another order.
                torch.testing.assert_close(found.read(name, first, shape), expected.read(name, first, shape))


REFUSED = {
    "no ep": ({"ep": 1}, {}, "layout.place_experts_every=5 needs ep above 1"),
    "states on a disk": ({"offload_optimizer": "disk"}, {}, "set offload_optimizer='none' or 'cpu'"),
    "a group on each rank": (
        {},
        {"n_groups": 2, "groups_per_token": 1},
        "experts move within their group of 4, and a rank has 4 experts, the whole group; set ep above 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_placement_that_cannot_be_is_refused_with_the_reason(name: str):
    layout, moe, said = REFUSED[name]
    table = {"out": "x", "steps": 1, "data": {"path": "x"}, "model": {"preset": "debug-moe", "moe": moe}}
    table |= {"batch": {"seq_len": 16, "global_batch": 8}}
    with pytest.raises(InputError) as error:
        parse(table | {"layout": {"dp_shard": 2, "ep": 2, "place_experts_every": 5} | layout})
    assert said in str(error.value)
