"""Proves that a step whose loss or gradient is not finite, or far above those before it, is found by all ranks before
weights change; that it is skipped, left out or stops the run as `faults.spike` says; and that a resumed run goes on bit
for bit.

The second try of such a step is in `test_recheck.py`."""

import math
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.batch import BatchSection
from shardwright.config.faults import SPIKE_WINDOW, FaultsSection
from shardwright.data.batches import Batches, merged
from shardwright.layout.layout import Layout
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.resilience.finite import FiniteCheck
from shardwright.training.resilience.spikes import SpikeGuard, SpikeState, in_words
from shardwright.training.step import Trainer
from shardwright.verification import rank as verify_rank
from tests.data.test_batches import Here
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.checkpoints import DATA, equal, logical
from tests.training.runs import checkpoints, checksums, events, records, train, trajectory, write_run_file
from tests.training.test_resume import records_samples
from tests.training.worlds import CASE, EVEN, LONG, RATE, SEED

STAYING = ExitStack()
"""Bugs that stay in a rank's process until it ends."""
SKIP = FaultsSection(spike="skip")
LAYOUTS = {
    "zero 0": Layout(dp_replicate=2),
    "zero 3": Layout(dp_shard=2, zero=3),
    "tp": Layout(tp=2, sequence_parallel=True),
    "cp": Layout(cp=2, zero=2),
    "pp": Layout(pp=2),
}


def guard() -> SpikeGuard:
    return SpikeGuard(SKIP, None, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_step_is_judged_by_the_window_of_the_steps_before_it():
    """64 values of mean 2 and standard deviation s = sqrt(64 / 63): 2 + 6 s is the limit, from the 65th on."""
    judged = guard()
    for i in range(64):
        assert judged.judge(1.0 + 2 * (i % 2), 0.5) is None
    limit = 2 + 6 * math.sqrt(64 / 63)
    assert judged.judge(limit - 1e-9, 0.5) is None
    fresh = guard()
    fresh.state.losses, fresh.state.norms = [1.0, 3.0] * 32, [0.5] * 64
    why = fresh.judge(limit + 1e-9, 0.5)
    assert why is not None
    assert why.startswith("the loss 8.04")
    assert fresh.state.losses[-1] > 8, "a finite value enters the window, so that a new level is learned"
    few = guard()
    few.state.losses, few.state.norms = [1.0] * 63, [1.0] * 63
    assert few.judge(1e9, 1e9) is None, "63 steps are too few to judge by"


def test_values_that_are_not_finite_are_spikes_from_the_first_step_on_and_never_enter_the_window():
    judged = guard()
    for bad in (math.nan, math.inf, -math.inf):
        assert judged.judge(1.0, bad) == f"the gradient norm is {bad}"
        assert judged.judge(bad, 1.0) == f"the loss is {bad}"
    assert judged.state == SpikeState()
    for i in range(3 * SPIKE_WINDOW):
        judged.judge(float(i % 7), float(i % 5))
    assert judged.state.losses == [float(i % 7) for i in range(2 * SPIKE_WINDOW, 3 * SPIKE_WINDOW)]


def spiked_step(layout: Layout, kind: str, mutations: tuple[Mutation, ...]) -> tuple[bool, bool, str, SpikeState]:
    """Whether weights and states are the same after a step in which the first rank has a NaN or a large loss, whether
    gradients were let go, what was found, and the state."""
    with mutated(*mutations):
        return _spiked_step(layout, kind)


def _spiked_step(layout: Layout, kind: str) -> tuple[bool, bool, str, SpikeState]:
    base = LONG if layout.cp * layout.tp > 1 else CASE
    case = replace(base, spec=EVEN, micro_batch=base.global_batch // (2 * layout.data_ranks), dtype="float32")
    trainer = verify_rank.build_trainer(case, layout, "adamw")
    trainer.spikes = SpikeGuard(SKIP, trainer.model, trainer.device)
    rank = dist.get_rank()
    for step in range(2):
        before = logical(trainer)
        if step == 1 and kind == "nan" and rank == 0:
            verify_rank.overflow_once(trainer.model.parts)
        if step == 1 and kind == "large":
            trainer.spikes.state.losses, trainer.spikes.state.norms = [1.0, 2.0] * 32, [100.0, 1e6] * 32
            trainer.loss_sum = partial(_scaled, trainer.loss_sum, 1e3 if rank == layout.world_size - 1 else 1.0)
        trainer.step(verify_rank.local_batch(case, layout, rank, step), step, RATE)
    gone = all(p.grad is None or not p.grad.count_nonzero() for p in trainer.model.named_parameters.values())
    return equal(logical(trainer), before), gone, str(trainer.spike), trainer.spikes.state


def _scaled(loss_sum, scale: float, logits: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
    """The loss, larger by a factor that its gradient does not have."""
    loss = loss_sum(logits, targets, factor)
    return loss + (scale - 1) * loss.detach()


def check_spiked_step(name: str, kind: str = "nan", mutations: tuple[Mutation, ...] = ()) -> None:
    layout = LAYOUTS[name]
    found = run_ranks(spiked_step, layout.world_size, layout, kind, mutations)
    for same, gone, _, state in found:
        assert same
        assert gone
        assert (state.in_a_row, state.skipped) == (1, 1)
    (said,) = {each for _, _, each, _ in found}
    (windows,) = {(tuple(state.losses), tuple(state.norms)) for *_, state in found}
    if kind == "nan":
        assert said.startswith("the gradient norm is ")
        assert "in the order of the backward pass, belongs to embedding.weight on rank" in said
        assert len(windows[0]) == 1
    else:
        assert said.startswith("the loss ")
        assert "is above 1.5 + 6 x 0.504 = 4.52" in said


@pytest.mark.parametrize(
    ("name", "kind"), rest_prove([(name, kind) for name in LAYOUTS for kind in ("nan", "large")], ("pp", "nan"))
)
def test_a_spike_on_one_rank_changes_nothing_on_any(name: str, kind: str):
    check_spiked_step(name, kind)


def test_the_ranks_and_the_parameter_that_numbers_come_from_are_named():
    assert in_words([(False, 1), (True, 2), (False, 2), (False, -1)], ["a", "b", "c"]) == (
        "the loss is not finite on rank 1; the first gradient that is not finite, in the order of the backward pass, "
        "belongs to c on ranks 1, 2"
    )


LEFT_OUT = ((3, 5), (8, 9))


def saved_or_loaded(folder: Path, loads: bool, mutations: tuple[Mutation, ...] = ()) -> SpikeState:
    with mutated(*mutations):
        trainer = verify_rank.build_trainer(CASE, Layout(), "adamw")
        trainer.spikes = SpikeGuard(SKIP, trainer.model, trainer.device)
        store = CheckpointStore(folder)
        if loads:
            assert load(store.path_of(1), trainer, DATA).progress.left_out == LEFT_OUT
            return trainer.spikes.state
        trainer.spikes.state = SpikeState([1.0, 1 / 3], [2.0, 1e-30], in_a_row=1, skipped=7)
        save(store, trainer, TrainingProgress(1, 24, SEED, LEFT_OUT), DATA, "")
        return trainer.spikes.state


def check_checkpoint(mutations: tuple[Mutation, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as name:
        (saved,) = run_ranks(saved_or_loaded, 1, Path(name), False, mutations)
        (loaded,) = run_ranks(saved_or_loaded, 1, Path(name), True, mutations)
    assert loaded == saved


def test_a_checkpoint_holds_the_window():
    check_checkpoint()


def test_samples_that_are_left_out_are_in_no_batch_wherever_a_run_begins():
    class Plain:
        seq_len, padded, mirrored = 1, False, False

        def __len__(self) -> int:
            return 1000

        def origin(self, i: int):
            return Here(), i

        def read(self, i: int):
            return np.array([i, i]), np.ones(1, bool)

    left_out = [(8, 12), (4, 6), (20, 24), (12, 13)]
    assert merged(left_out) == [(4, 6), (8, 13), (20, 24)]
    kept = [i for i in range(60) if not any(first <= i < end for first, end in left_out)]
    for start in (0, 4, 5, 9, 13, 30):
        seen, marks = [], []
        expected = [i for i in kept if i >= start]
        for data_rank in range(2):
            batches = Batches(
                {1: Plain()},  # type: ignore[dict-item]
                lambda g: g,
                schedule=BatchSection(seq_len=1, global_batch=4, micro_batch=2).schedule,
                data_rank=data_rank,
                data_ranks=2,
                vocab_size=1000,
                start_sample=start,
                left_out=left_out,
                prefetch=0,
            )
            for _ in range(3):
                marks.append(batches.next_sample)
                seen += next(batches).sample_ids_AB.flatten().tolist()
        assert sorted(seen) == expected[:12]
        assert marks[:3] == expected[:12:4]


def nan_in_step(number: int, times: int, rank: int) -> None:
    """The gradient of rank 1 is not finite in some steps from `number` on, the first `times` of them that it takes."""

    step, calls = Trainer.step, []

    def spoil(self, batch, at, rate):
        if rank == 1 and at + 1 >= number and len(calls) < times:
            calls.append(at)
            verify_rank.overflow_once(self.model.parts)
        return step(self, batch, at, rate)

    Trainer.step = spoil


def test_a_run_that_stops_at_a_gradient_that_is_not_finite_names_it_and_saves_nothing_of_it(run_file):
    run = train(run_file, "--set", "faults.spike=stop", fault=partial(nan_in_step, 7, 1), expect=3)
    assert run.stderr.startswith("error: step 7: the gradient norm is inf (loss 5."), run.stderr
    assert "belongs to embedding.weight on rank" in run.stderr
    assert "weights and checkpoints are those from before it" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.rstrip().endswith("step-00000005; continue from it with --resume")
    assert checkpoints(run_file) == ["step-00000005"]
    assert [(each.kind, each.step) for each in events(run_file)] == [("start", 0), ("save", 5), ("spike", 7)]
    train(run_file, "--set", "faults.spike=stop", "--resume")
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 21))


def test_by_default_a_number_that_is_not_finite_stops_a_run_before_it_is_saved_and_the_first_step_is_named(run_file):
    """Steps 7 and 8 are not logged: the numbers of step 7 are read before the checkpoint that is due after step 9."""
    settings = ("--set", "metrics.every=20", "--set", "checkpoint.every=3", "--set", "checkpoint.async_mode=async")
    run = train(run_file, *settings, fault=partial(nan_in_step, 7, 1), expect=3)
    assert run.stderr.startswith("error: step 7: the gradient norm is inf (loss 5."), run.stderr
    assert "belongs to embedding.weight on rank" in run.stderr
    assert "(found after step 9): checkpoints are those from before step 7" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.rstrip().endswith("step-00000006; continue from it with --resume")
    assert checkpoints(run_file) == ["step-00000003", "step-00000006"]
    assert [(each.kind, each.step) for each in events(run_file)][-1] == ("spike", 7)


def unread_numbers(layout: Layout, kind: str) -> tuple[int, str]:
    """The step that `FiniteCheck` finds among four, of which the third has such a number on the last rank, and why."""
    base = LONG if layout.cp * layout.tp > 1 else CASE
    case = replace(base, spec=EVEN, micro_batch=base.global_batch // (2 * layout.data_ranks), dtype="float32")
    trainer = verify_rank.build_trainer(case, layout, "adamw")
    check = FiniteCheck(trainer)
    for step in range(4):
        if step == 2 and kind == "gradient" and dist.get_rank() == 0:
            verify_rank.overflow_once(trainer.model.parts)
        if step == 2 and kind == "loss" and dist.get_rank() == layout.world_size - 1:
            trainer.loss_sum = partial(_scaled, trainer.loss_sum, math.inf)
        result = trainer.step(verify_rank.local_batch(case, layout, dist.get_rank(), step), step, RATE)
        check.note(step + 1, (0, 1), result, overflowed=False)
    found = check.first()
    assert found is not None
    assert check.first() is None
    return found.step, str(found.spike)


@pytest.mark.parametrize(
    ("name", "kind"), rest_prove([(n, kind) for n in LAYOUTS for kind in ("gradient", "loss")], ("pp", "loss"))
)
def test_every_rank_finds_the_same_first_step_with_a_number_that_is_not_finite(name: str, kind: str):
    found = run_ranks(unread_numbers, LAYOUTS[name].world_size, LAYOUTS[name], kind)
    ((step, told),) = set(found)
    assert step == 3
    # Under tp two infinite sums of other signs meet in one gradient, and are NaN.
    assert told.startswith(
        "the loss is inf" if kind == "loss" else ("the gradient norm is inf", "the gradient norm is nan")
    ), told
    assert ("the loss is not finite on rank" if kind == "loss" else "belongs to embedding.weight on rank") in told


@prove
def test_a_run_that_skips_a_spike_goes_on_after_a_resume_as_if_it_had_not_stopped(tokens, tmp_path):
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, halves = (write_run_file(tmp_path / name, tokens) for name in ("whole", "halves"))
    policy = ("--set", "faults.spike=skip", "--set", "lr_schedule.shape=cosine")
    run = train(whole, *policy, fault=partial(nan_in_step, 7, 2))
    assert run.stdout.count("skipped, weights and optimizer states stay") == 2
    train(halves, *policy, "--set", "steps=20", fault=partial(skipped_then_killed, 12), expect=3)
    train(halves, *policy, "--resume")
    assert str(trajectory(halves)) == str(trajectory(whole))  # nan is nan
    assert checksums(halves, 20) == checksums(whole, 20)
    assert next(r["step"] for r in records(whole) if r.get("skipped_steps")) == 7
    assert records(whole)[-1]["skipped_steps"] == 2


def skipped_then_killed(at: int, rank: int) -> None:
    from tests.training.runs import kill_itself

    nan_in_step(7, 2, rank)
    step = Trainer.step

    def die(self, batch, number, rate):
        if rank == 1 and number == at:
            kill_itself()
        return step(self, batch, number, rate)

    Trainer.step = die


@prove
def test_three_spikes_in_a_row_stop_a_run(run_file):
    run = train(run_file, "--set", "faults.spike=skip", fault=partial(nan_in_step, 7, 9), expect=3)
    assert "error: step 9: the gradient norm is inf" in run.stderr
    assert "these are 3 spikes in a row, and 3 stop a run" in run.stderr
    assert run.stdout.count("skipped, weights and optimizer states stay") == 2


def nan_in_sample(sample: int, folder: Path, rank: int) -> None:
    """The gradient is not finite in each step with that sample."""

    records_samples(folder, rank)
    step = Trainer.step

    def spoil(self, batch, at, rate):
        if sample in batch.sample_ids_AB:
            verify_rank.overflow_once(self.model.parts)
        return step(self, batch, at, rate)

    Trainer.step = spoil


def check_rollback(folder: Path, tokens: Path, mutations: tuple[Mutation, ...] = ()) -> None:
    """Samples 24 to 27 are those of step 7: the run goes back to step 5, and its 20 steps are without them."""
    run_file = write_run_file(folder, tokens)
    fault = partial(rolled_back, mutations, folder)
    run = train(run_file, "--set", "faults.spike=rollback", fault=fault)
    assert "step 7: the gradient norm is inf" in run.stdout
    assert "(step 5), from now on without samples 24 to 27" in run.stdout
    (back,) = [each for each in events(run_file) if each.kind == "rollback"]
    assert [place.sample for place in back.samples] == [24, 25, 26, 27]
    assert f"; its samples are 24: {back.samples[0]}; 25: " in back.text
    seen = [int(i) for path in folder.glob("samples-*") for i in path.read_text().split()]
    again = list(range(20, 24))  # step 6, taken a second time
    assert sorted(seen) == sorted([*range(84), *again])
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 21))
    assert all(math.isfinite(norm) for _, _, norm in trajectory(run_file))
    kinds = [(each.kind, each.step) for each in events(run_file)]
    assert kinds == [("start", 0), ("save", 5), ("rollback", 7), ("save", 10), ("save", 15), ("save", 20)]
    # What the last checkpoint says is left out stays so in a run that goes on from it.
    train(run_file, "--set", "faults.spike=rollback", "--set", "steps=21", "--resume", fault=fault)
    seen = [int(i) for path in folder.glob("samples-*") for i in path.read_text().split()]
    assert sorted(seen) == sorted([*range(88), *again])


def rolled_back(mutations: tuple[Mutation, ...], folder: Path, rank: int) -> None:
    STAYING.enter_context(mutated(*mutations))
    nan_in_sample(25, folder, rank)


@prove
def test_a_run_goes_back_from_a_spike_and_leaves_its_samples_out(tokens, tmp_path):
    check_rollback(tmp_path, tokens)


POWERSGD = [f"layout.{key}" for key in ("dp_shard=1", "dp_replicate=2", "zero=0", "compress_gradients=powersgd-1")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["faults.spike=rollback", "checkpoint.every=0"], "needs checkpoints to go back to, and checkpoint.every=0"),
        (["faults.spike_sigma=3.0"], "faults.spike_sigma=3 with faults.spike='off' is not used"),
        (["faults.spike=jump"], "faults.spike"),
        (["faults.spike=skip", *POWERSGD], "is added to the next one, also after a spike"),
        (["faults.recheck=true"], "no step is judged, so none is run again"),
        (
            ["faults.spike=stop", "faults.recheck=true", *POWERSGD],
            "gradients that the first try has not sent",
        ),
        (["faults.spike=stop", "faults.recheck=true", "precision.compute=fp16"], "are left to the loss scale there"),
    ],
)
def test_policies_that_make_no_sense_are_refused(run_file, settings, said):
    from shardwright.config import load as load_run_file
    from shardwright.system.errors import ConfigError

    with pytest.raises(ConfigError, match=said):
        load_run_file(run_file, settings)


SAVED = "shardwright.training.checkpoint.saver:Saver._head"
_STEP, _GUARD = "shardwright.training.step:Trainer.update", "shardwright.training.resilience.spikes:SpikeGuard"
_TAKES = "self.spikes.takes(overflowed=not taken) and taken"
BUGS = {
    "a loss spike is seen by the rank alone that has it": (
        partial(check_spiked_step, "zero 0", "large"),
        Mutation(
            f"{_GUARD}.start", "dist.all_reduce(sums, async_op=True)", "dist.all_reduce(sums.clone(), async_op=True)"
        ),
    ),
    "weights are updated in a step that is a spike": (
        partial(check_spiked_step, "zero 3"),
        Mutation(_STEP, _TAKES, f"{_TAKES} or True"),
    ),
    "the window of losses begins anew on a resume": (
        check_checkpoint,
        Mutation("tests.training.test_spikes:load", "trainer.spikes.resume(manifest.spikes)", "pass"),
    ),
    "the window of losses is not saved": (
        check_checkpoint,
        Mutation(SAVED, "None if trainer.spikes is None else copy.deepcopy(trainer.spikes.state)", "None"),
    ),
}


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str):
    check, mutation = BUGS[name]
    with pytest.raises(AssertionError):
        check(mutations=(mutation,))


RUN_BUGS = {
    "samples of a spike come again after the run has gone back": Mutation(
        "shardwright.training.sources:RunSamples.batches", "self.left_out", "[]"
    ),
}


@prove
@pytest.mark.parametrize("name", RUN_BUGS)
def test_a_bug_of_rollback_is_seen(name: str, tokens, tmp_path):
    with pytest.raises(AssertionError):
        check_rollback(tmp_path, tokens, (RUN_BUGS[name],))
