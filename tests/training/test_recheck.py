"""Proves that a step with a spike is run again with the same samples and dropout if `faults.recheck` is set: the step
is taken as if the second try had been the only one if that has another result, and left if it has the same."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

from shardwright.config.faults import FaultsSection
from shardwright.data.batches import Batch
from shardwright.layout.layout import Layout
from shardwright.training.forward_backward import LossParts
from shardwright.training.resilience.spikes import Recheck, Spike, SpikeGuard, SpikeState, suspects
from shardwright.training.step import Trainer
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.checkpoints import equal, logical
from tests.training.runs import checksums, events, train, trajectory
from tests.training.test_spikes import LAYOUTS
from tests.training.worlds import CASE, EVEN, LONG, RATE

RECHECK = FaultsSection(spike="skip", recheck=True)


def rechecked_steps(
    layout: Layout, times: int, mutations: tuple[Mutation, ...]
) -> tuple[bool, bool, Recheck | None, SpikeState]:
    """Three steps with dropout and two micro-batches a data rank; in the second the gradient is not finite in the first
    `times` tries, on the first rank. Whether the weights and states after it are those before it, and those after all
    are those of steps without a fault; what the recheck said, and the state."""
    with mutated(*mutations):
        return _rechecked_steps(layout, times)


def _rechecked_steps(layout: Layout, times: int) -> tuple[bool, bool, Recheck | None, SpikeState]:
    base = LONG if layout.cp * layout.tp > 1 else CASE
    micro_batch = base.global_batch // (2 * layout.pp * layout.data_ranks)
    case = replace(base, spec=replace(EVEN, dropout=0.2), micro_batch=micro_batch, dtype="float32")
    quiet, trainer = (verify_rank.build_trainer(case, layout, "adamw") for _ in range(2))
    trainer.spikes = SpikeGuard(RECHECK, trainer.model, trainer.device)
    rank, stayed, recheck = dist.get_rank(), False, None
    for step in range(3):
        batch = verify_rank.local_batch(case, layout, rank, step)
        before = logical(trainer)
        if step == 1:
            trainer.forward_backward = partial(_spoiled, trainer, [rank == 0] * times)  # type: ignore[method-assign]
        trainer.step(batch, step, RATE)
        if step == 1:
            stayed, recheck = equal(logical(trainer), before), trainer.recheck
        quiet.step(batch, step, RATE)
    return stayed, equal(logical(trainer), logical(quiet)), recheck, trainer.spikes.state


def _spoiled(trainer: Trainer, left: list[bool], batch: Batch, step: int) -> LossParts:
    if left and left.pop():
        verify_rank.overflow_once(trainer.model.parts)
    return type(trainer).forward_backward(trainer, batch, step)


def check_recheck(name: str, times: int = 1, mutations: tuple[Mutation, ...] = ()) -> None:
    for stayed, as_quiet, recheck, state in run_ranks(
        rechecked_steps, LAYOUTS[name].world_size, LAYOUTS[name], times, mutations
    ):
        assert recheck is not None
        assert recheck.same == (times > 1)
        assert stayed == (times > 1)
        assert as_quiet == (times == 1)
        assert (state.in_a_row, state.skipped, len(state.losses)) == ((0, 0, 3) if times == 1 else (0, 1, 2))


@pytest.mark.parametrize(
    ("name", "times"), rest_prove([(name, n) for name in LAYOUTS for n in (1, 2)], ("pp", 1), ("zero 3", 2))
)
def test_a_step_that_is_run_again_is_taken_as_if_it_had_been_the_only_try_or_left(name: str, times: int):
    check_recheck(name, times)


def test_what_two_tries_of_a_step_tell():
    first = Spike(math.nan, math.nan, "the loss is nan", "the loss is not finite on rank 2", (2,))
    alike = replace(first, why="the loss is nan again")
    assert Recheck(first, alike, math.nan, math.nan).same
    assert Recheck(replace(first, loss=1.0), replace(first, loss=1.1), 1.1, math.nan).same, "of kernels that round"
    assert str(Recheck(first, alike, math.nan, math.nan)).endswith("gave the same: the data or the model, not a device")
    for other in (replace(first, where="the loss is not finite on rank 1"), replace(first, loss=math.inf), None):
        assert not Recheck(first, other, 5.0, 1.0).same
    assert suspects(Layout(dp_shard=2, tp=2), (2,)) == (2, 3)
    assert suspects(Layout(dp_shard=2, pp=2), (3,)) == (1, 3)
    assert suspects(Layout(dp_replicate=2), (1,)) == (1,)
    assert suspects(Layout(dp_shard=2, zero=1, ep=2), (1,)) == suspects(Layout(dp_shard=2), ()) == ()
    assert str(Recheck(first, None, 5.0, 1.0, (2, 3))).endswith(
        "gave another result (loss 5, gradient norm 1): a faulty device, on one of ranks 2, 3"
    )


def nan_in_tries(number: int, times: int, rank: int) -> None:
    """The loss of rank 1 is not a number in the first `times` tries of step `number`."""
    from shardwright.training.forward_backward import ForwardBackward

    forward_backward, calls = ForwardBackward.forward_backward, []

    def spoil(self, batch, at):
        parts = forward_backward(self, batch, at)
        if rank == 1 and at + 1 == number and len(calls) < times:
            calls.append(at)
            return parts._replace(loss_part=parts.loss_part * math.nan)
        return parts

    ForwardBackward.forward_backward = spoil


RECHECKED = ("--set", "faults.spike=stop", "--set", "faults.recheck=true")


def test_a_run_goes_on_past_a_fault_of_a_device_to_the_same_last_bit_and_names_it(run_file, uninterrupted):
    run = train(run_file, *RECHECKED, fault=partial(nan_in_tries, 7, 1))
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)
    (event,) = [each for each in events(run_file) if each.kind not in ("start", "save")]
    assert (event.kind, event.step, event.rank) == ("fault", 7, 1)
    assert event.text.startswith("step 7: the loss is nan (loss nan, gradient norm ")
    assert "gave another result (loss 5." in event.text
    assert "): a faulty device, on rank 1; the step is taken with the second result" in event.text
    assert "a faulty device, on rank 1" in " ".join(run.stdout.split())


@prove
def test_a_run_whose_data_or_model_gives_no_number_says_so(run_file):
    run = train(run_file, *RECHECKED, fault=partial(nan_in_tries, 7, 9), expect=3)
    assert run.stderr.startswith("error: step 7: the loss is nan"), run.stderr
    assert "it gave the same: the data or the model, not a device" in run.stderr
    told = events(run_file)
    assert [(each.kind, each.step) for each in told] == [("start", 0), ("save", 5), ("spike", 7)]
    assert [place.sample for place in told[-1].samples] == [24, 25, 26, 27]
    of_rank_1 = f"; its samples of rank 1 are 26: {told[-1].samples[2]}; 27: {told[-1].samples[3]}\n"
    assert of_rank_1 in run.stderr


_STEP, _TAKES = "shardwright.training.step:Trainer.step", "shardwright.training.resilience.spikes:SpikeGuard.takes"
_AGAIN = """if self.spikes is not None and self.spikes.doubts:
    result = self._try(batch, step, rate)"""
BUGS = {
    "a step is run again with other samples": (
        partial(check_recheck, "zero 0"),
        Mutation(
            _STEP,
            _AGAIN,
            _AGAIN.replace(
                "(batch", "(Batch(batch.tokens_ABT.flip(1), batch.targets_ABT, batch.sample_ids_AB, batch.n_targets)"
            ),
        ),
    ),
    "a step is run again with other dropout": (
        partial(check_recheck, "tp"),
        Mutation(_STEP, _AGAIN, _AGAIN.replace("step, rate", "step + 1, rate")),
    ),
    "gradients of the first try are in those of the second": (
        partial(check_recheck, "zero 3"),
        Mutation(
            "shardwright.training.step:Trainer.update",
            "self.model.forget_gradients()",
            "taken and self.model.forget_gradients()",
        ),
    ),
    "a step that is run again counts as a spike": (
        partial(check_recheck, "pp"),
        Mutation(_TAKES, "self._first = self.seen\nreturn False", "self._first = self.seen"),
    ),
    "spikes in a row are counted on over steps that are taken": (
        partial(check_recheck, "zero 3", 2),
        Mutation(_TAKES, "self.state.in_a_row = 0", "pass"),
    ),
}


@prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str):
    check, mutation = BUGS[name]
    with pytest.raises(AssertionError):
        check(mutations=(mutation,))
