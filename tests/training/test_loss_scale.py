"""Proves that fp16 trains with a dynamic loss scale: every layout computes what one process does, a step in which the
gradient of one rank overflows is skipped by all ranks with weights and states as they were, the scale changes by the
rule of Megatron-LM's DynamicGradScaler, and a checkpoint holds it, for any layout."""

import math
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.config import PrecisionSection
from shardwright.config import load as load_run_file
from shardwright.layout.layout import Layout
from shardwright.model.sections import MoESpec
from shardwright.training.checkpoint.manifest import TrainingProgress
from shardwright.training.checkpoint.saver import save
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.loss_scale import LossScaler, LossScaleState
from shardwright.training.optimizer import learning_rate
from shardwright.training.step import Trainer
from shardwright.verification import Verifier
from shardwright.verification import rank as verify_rank
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.checkpoints import DATA, equal, logical
from tests.training.runs import checksums, records, train, trajectory, write_run_file
from tests.training.worlds import CASE, EVEN, LONG, RATE, SEED, local_batch, train_mutated

EXPERTS = MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.01, aux_loss=3.0, aux_scope="batch", z_loss=0.01)
LAYOUTS = {
    "one": Layout(),
    "zero 0": Layout(dp_replicate=2),
    "zero 2": Layout(dp_shard=2, zero=2),
    "zero 3": Layout(dp_shard=2, zero=3),
    "sp, chunked loss": Layout(tp=2, sequence_parallel=True, loss_chunk_tokens=7),
    "cp": Layout(cp=2, zero=2),
    "1f1b": Layout(pp=2),
    "zb-h1, zero 3": Layout(pp=2, dp_shard=2, zero=3, pp_schedule="zb-h1"),
    "dualpipe": Layout(pp=2, pp_schedule="dualpipe"),
    "ep": Layout(dp_shard=2, zero=2, ep=2),
}


def fp16_case(layout: Layout, experts: bool = False, **spec):
    base = CASE if layout.cp * layout.tp == 1 else LONG
    model = replace(EVEN, moe=EXPERTS) if experts else replace(base.spec, **spec)
    return replace(base, spec=model, dtype="float16", micro_batch=base.global_batch // (4 * layout.data_ranks))


def check_parity(name: str, experts: bool = False, mutations: tuple[Mutation, ...] = ()) -> None:
    layout = LAYOUTS[name]
    with Verifier(partial(train_mutated, mutations)) as verifier:
        report = verifier.parity(fp16_case(layout, experts or layout.ep > 1), layout)
    assert report.equal, report.differing or report.worst
    worst = max(row.error for row in report.rows if row.quantity.kind == "gradient" and row.quantity.step == 1)
    assert 1e-5 < worst < 0.1, "fp16 has 11 bits: its error must show, and stay small"


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "zero 3"))
def test_a_layout_in_fp16_is_no_farther_from_float64_than_one_process_is_and_skips_the_same_step(name: str):
    check_parity(name)


@pytest.mark.prove
def test_losses_of_routers_have_the_loss_scale_too():
    check_parity("one", experts=True)


def test_the_scale_changes_by_the_rule():
    """F: an overflow; the scales and what is left of the hysteresis are worked out by hand from Megatron-LM's code."""
    config = PrecisionSection(
        compute="fp16", loss_scale=8.0, loss_scale_window=3, loss_scale_hysteresis=2, min_loss_scale=2.0
    )
    scaler, seen = LossScaler(config), []
    for overflow in "F..F.F...F.FFFFF...":
        taken = scaler.takes(torch.tensor(math.inf if overflow == "F" else 1.5))
        assert taken == (overflow == ".")
        seen.append((int(scaler.state.scale), scaler.state.left))
    assert seen == [
        (8, 1), (8, 1), (8, 1),  # the first overflow uses up one of two
        (4, 0), (4, 0), (2, -1),  # steps between overflows do not give it back
        (2, -1), (2, -1), (4, 2),  # three clean steps in a row do, and double the scale
        (4, 1), (4, 1), (2, 0), (2, -1), (2, -2), (2, -3), (2, -4),  # not below the least
        (2, -4), (2, -4), (4, 2),
    ]  # fmt: skip
    assert scaler.state.skipped == 9
    assert not scaler.takes(torch.tensor(math.nan))
    with FakeTensorMode():
        assert scaler.takes(torch.zeros(()))


def skipped_step(layout: Layout, mutations: tuple[Mutation, ...]) -> tuple[bool, bool, LossScaleState]:
    """Whether weights and states are the same after a step in which this world's first rank overflows, whether the
    gradients were let go, and the loss scale."""
    with mutated(*mutations):
        return _skipped_step(layout)


def _skipped_step(layout: Layout) -> tuple[bool, bool, LossScaleState]:
    case = fp16_case(layout, moe=replace(EXPERTS, capacity_factor=1.0), d_model=32, n_heads=4, n_kv_heads=2)
    trainer = verify_rank.build_trainer(case, layout, "adamw")
    rank = dist.get_rank()
    for step in range(2):
        before = logical(trainer)
        if step == 1 and rank == 0:
            verify_rank.overflow_once(trainer.model.parts)
        trainer.forward_backward(verify_rank.local_batch(case, layout, rank, step), step)
        trainer.update(RATE)
    gone = all(p.grad is None or not p.grad.count_nonzero() for p in trainer.model.named_parameters.values())
    assert trainer.scaler is not None
    return equal(logical(trainer), before), gone, trainer.scaler.state


def check_skipped_step(name: str, mutations: tuple[Mutation, ...] = ()) -> None:
    layout = LAYOUTS[name]
    case_scale = fp16_case(layout).loss_scaling
    assert case_scale is not None
    for same, gone, state in run_ranks(skipped_step, layout.world_size, layout, mutations):
        assert same
        assert gone
        assert state == LossScaleState(case_scale.loss_scale, left=0, clean=0, skipped=1)


@pytest.mark.parametrize("name", rest_prove(["1f1b", "zero 2", "zero 0", "cp"], "1f1b"))
def test_a_step_with_an_overflow_on_one_rank_changes_nothing_on_any(name: str):
    check_skipped_step(name)


def saved_or_loaded(folder: Path, layout: Layout, loads: bool, mutations: tuple[Mutation, ...] = ()) -> LossScaleState:
    with mutated(*mutations):
        return _saved_or_loaded(folder, layout, loads)


def _saved_or_loaded(folder: Path, layout: Layout, loads: bool) -> LossScaleState:
    case = fp16_case(layout)
    trainer = verify_rank.build_trainer(case, layout, "adamw")
    assert trainer.scaler is not None
    store = CheckpointStore(folder, keep_last=9)
    if loads:
        load(store.path_of(1), trainer, DATA)
        return trainer.scaler.state
    trainer.forward_backward(local_batch(0, layout.data_rank(dist.get_rank()), layout.data_ranks, 2), 0)
    trainer.scaler.state = LossScaleState(2.0**7, left=1, clean=5, skipped=3)
    save(store, trainer, TrainingProgress(1, 24, SEED), DATA, "")
    return trainer.scaler.state


def check_checkpoint(mutations: tuple[Mutation, ...] = ()) -> None:
    with tempfile.TemporaryDirectory() as name:
        (expected,) = set(map(str, run_ranks(saved_or_loaded, 2, Path(name), LAYOUTS["1f1b"], False, mutations)))
        for layout in ("zero 3", "one"):
            found = run_ranks(saved_or_loaded, LAYOUTS[layout].world_size, Path(name), LAYOUTS[layout], True, mutations)
            assert {str(state) for state in found} == {expected}
    assert asdict(found[0]) == {"scale": 2.0**7, "left": 1, "clean": 5, "skipped": 3}


def test_a_checkpoint_holds_the_loss_scale_for_any_layout():
    check_checkpoint()


_STATE = "None if trainer.scaler is None else copy.deepcopy(trainer.scaler.state)"
BUGS = {
    "losses of routers are not multiplied by the loss scale": (
        partial(check_parity, "one", True),
        Mutation(
            "shardwright.parallel.model:ParallelModel.set_batch",
            "loss_scale / (n_microbatches * ranks)",
            "1 / (n_microbatches * ranks)",
        ),
    ),
    "gradients of a step that overflowed are added to those of the next": (
        partial(check_skipped_step, "zero 0"),
        Mutation(
            "shardwright.training.step:Trainer.update",
            "self.model.forget_gradients()",
            "self.model.forget_gradients() if taken else None",
        ),
    ),
    "the loss scale begins anew on a resume": (
        check_checkpoint,
        Mutation("tests.training.test_loss_scale:load", "trainer.scaler.resume(manifest.loss_scale)", "pass"),
    ),
    "the loss scale is not saved": (
        check_checkpoint,
        Mutation("shardwright.training.checkpoint.saver:Saver._head", _STATE, "None"),
    ),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str):
    check, mutation = BUGS[name]
    with pytest.raises(AssertionError):
        check(mutations=(mutation,))


FP16 = (
    *("--set", "precision.compute=fp16", "--set", "precision.loss_scale=4194304.0"),
    *("--set", "precision.loss_scale_window=2", "--set", "precision.loss_scale_hysteresis=1"),
)


def scales(run_file: Path) -> list[tuple[float, int]]:
    return [(r["loss_scale"], r.get("skipped_steps", 0)) for r in records(run_file) if r["kind"] == "train"]


@pytest.mark.prove
def test_a_run_says_which_steps_it_skips_and_goes_on_bit_for_bit(tokens: Path, tmp_path: Path):
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, halves = (write_run_file(tmp_path / name, tokens) for name in ("whole", "halves"))
    schedule = ("--set", "lr_schedule.shape=cosine")
    run = train(whole, *FP16, *schedule)
    train(halves, *FP16, *schedule, "--set", "checkpoint.every=3", fault=stops_soon, expect=75)
    train(halves, *FP16, *schedule, "--resume")
    assert trajectory(halves) == trajectory(whole)
    assert scales(halves) == scales(whole)
    assert checksums(halves, 20) == checksums(whole, 20)
    total = scales(whole)[-1][1]
    assert 3 <= total < 20
    assert run.stdout.count("skipped: a gradient overflowed in fp16") == total
    first, *_ = (r for r in records(whole) if r["kind"] == "train")
    assert not math.isfinite(first["grad_norm"])
    assert "step 1 skipped: a gradient overflowed in fp16" in run.stdout
    assert "loss scale 2.09715e+06" in run.stdout
    rates = {r["step"]: (r["lr"], r.get("skipped_steps", 0)) for r in records(whole) if r["kind"] == "train"}
    config = load_run_file(whole, ["lr_schedule.shape=cosine"])
    for step, (rate, _) in rates.items():
        before = rates[step - 1][1] if step > 1 else 0
        assert rate == learning_rate(step - 1 - before, 20, config.optimizer.lr, config.lr_schedule), step


def stops_soon(rank: int) -> None:
    """The run is asked to stop in its 7th step."""
    from shardwright.training.loop import StopRequest

    everyone, calls = StopRequest.everyone, []

    def stop(self):
        calls.append(0)
        self.requested = self.requested or len(calls) == 7
        return everyone(self)

    StopRequest.everyone = stop


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_scale": 1024.0}, "precision.loss_scale=1024 with precision.compute='fp32': only fp16 has a loss scale"),
        ({"compute": "fp16", "loss_scale": 1000.0}, "no power of 2, .* nearest: 512 or 1024"),
        ({"compute": "fp16", "loss_scale": 4.0, "min_loss_scale": 8.0}, "is above precision.loss_scale=4"),
    ],
)
def test_loss_scales_that_make_no_sense_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        PrecisionSection(**given)


def always_overflowing(rank: int) -> None:
    """The gradient of rank 1 overflows in each step from the third on."""
    step = Trainer.step

    def spoil(self, batch, at, rate):
        if rank == 1 and at >= 2:
            verify_rank.overflow_once(self.model.parts)
        return step(self, batch, at, rate)

    Trainer.step = spoil


@prove
def test_overflows_that_no_smaller_scale_ends_stop_a_run(run_file):
    """The scale 2^16 is also the least: steps 3 to 12 are the 10 overflows in a row that stop the run."""
    settings = ("precision.compute=fp16", "precision.min_loss_scale=65536.0", "checkpoint.every=2")
    run = train(run_file, *(f"--set={each}" for each in settings), fault=always_overflowing, expect=3)
    assert run.stderr.startswith("error: step 12: the gradient norm is inf in 10 steps in a row"), run.stderr
    assert "belongs to embedding.weight on rank" in run.stderr
    assert run.stderr.rstrip().endswith("step-00000010; continue from it with --resume"), (
        "weights of skipped steps are good"
    )
    assert run.stdout.count("skipped: a gradient overflowed") == 10
