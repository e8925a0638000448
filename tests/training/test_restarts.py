"""Proves that `shardwright train --max-restarts` goes on after a fault of a rank as if nothing had happened.

Runs of the command (runs.py) in which ranks are killed, fail or are stopped are compared with one that nothing
disturbs: bit for bit on the same layout, to rounding on a smaller one.
"""

import functools
import os
import signal
from pathlib import Path

import pytest

from shardwright.config import RunConfig, parse
from shardwright.config.settle import shrunk
from shardwright.runs.records import EventRecord
from shardwright.system.errors import WorkerError
from shardwright.training.resilience.restarts import Restarts
from tests.marks import prove
from tests.training.runs import (
    checkpoints,
    checksums,
    events,
    is_alive,
    kill_itself,
    train,
    training,
    trajectory,
)

SAVED = [Path("checkpoints/step-00000005"), Path("checkpoints/step-00000010")]


def config_of(
    layout: dict[str, object], min_ranks: int | None = None, global_batch: int = 8, model: str = "debug"
) -> RunConfig:
    """A run file with this layout."""
    table = {
        "out": "run",
        "steps": 20,
        "model": {"preset": model},
        "data": {"path": "tokens"},
        "batch": {"seq_len": 16, "global_batch": global_batch},
        "layout": layout,
        "faults": {} if min_ranks is None else {"min_ranks": min_ranks},
    }
    return parse(table)


def dead(rank: int | None) -> WorkerError:
    return WorkerError(f"rank {rank} was killed by signal 9 (SIGKILL)").with_rank(rank)


def end_of(restarts: Restarts, error: WorkerError) -> str:
    """What a run that ends with this fault says."""
    try:
        restarts.after(error, SAVED)
    except WorkerError as raised:
        return str(raised)
    return "it goes on"


def test_ranks_start_again_from_the_newest_checkpoint_until_the_restarts_are_used_up():
    restarts = Restarts(config_of({"dp_shard": 2}), 2)
    first = restarts.after(dead(1), [])
    assert (first.kind, first.step, first.rank) == ("restart", 0, 1)
    assert first.text == (
        "restart 1 of 2, from the start, as nothing was saved yet, on 2 ranks: rank 1 was killed by signal 9 (SIGKILL)"
    )
    assert restarts.attempt.config.checkpoint.resume == "no"
    second = restarts.after(dead(1), SAVED)
    assert (second.step, restarts.attempt.config.checkpoint.resume) == (10, "auto")
    assert second.text.startswith("restart 2 of 2, from step-00000010, on 2 ranks: ")
    assert end_of(restarts, dead(0)) == (
        "rank 0 was killed by signal 9 (SIGKILL)\nall 2 restarts of --max-restarts 2 are used up"
    )


def test_a_place_with_two_faults_in_a_row_is_used_no_more():
    restarts = Restarts(config_of({"dp_shard": 2, "dp_replicate": 2}, min_ranks=2), 20)
    for rank in (1, 2, 1, None, 1):
        restarts.after(dead(rank), SAVED)
        assert restarts.attempt.places == (0, 1, 2, 3)
    told = restarts.after(dead(1), SAVED).text
    assert "on 2 ranks (without place 1, where 2 faults in a row happened)" in told
    assert restarts.attempt.places == (0, 2)
    assert restarts.attempt.config.layout.layout().dp_shard == 2
    restarts.after(dead(1), SAVED)  # now that of place 2
    restarts.after(dead(1), SAVED)
    assert restarts.attempt.places == (0, 3)
    restarts.after(dead(0), SAVED)
    assert "no layout of faults.min_ranks=2 to 1 ranks" in end_of(restarts, dead(0))


def test_a_place_that_was_lost_is_tried_again_later_and_then_after_twice_that_time():
    lost_places_are_tried_again()


def lost_places_are_tried_again() -> None:
    with pytest.MonkeyPatch.context() as patch:
        now_s = [0.0]
        patch.setattr("shardwright.training.resilience.restarts.time.monotonic", lambda: now_s[0])
        tried_again(now_s)


def tried_again(now_s: list[float]) -> None:
    restarts = Restarts(config_of({"dp_shard": 2}, min_ranks=1), 20)
    for expected_s in (3600, 7200, 14400):
        assert not restarts.should_grow()
        for _ in range(2):
            restarts.after(dead(1), SAVED)
        assert restarts.attempt.places == (0,)
        now_s[0] += expected_s - 1
        assert not restarts.should_grow()
        now_s[0] += 1
        assert restarts.should_grow()
        told = restarts.grow(SAVED)
        assert (told.kind, told.step, told.rank) == ("restart", 10, None)
        assert told.text == "start with all ranks again, from step-00000010, on 2 ranks"
        assert restarts.attempt.places == (0, 1)
        assert restarts.attempt.config.layout.layout().world_size == 2
    assert restarts.used == 6


def test_a_spare_takes_the_place_of_the_one_at_fault_which_is_then_the_last_spare():
    config = config_of({"dp_shard": 2})
    config = config.model_copy(update={"faults": config.faults.model_copy(update={"spares": 2})})
    restarts = Restarts(config, 9)
    seen = []
    for rank in (1, 1, None, 0, 0):
        told = restarts.after(dead(rank), SAVED).text
        seen.append(restarts.attempt.places)
    assert seen == [(0, 2), (0, 3), (0, 3), (1, 3), (2, 3)]
    assert "on 2 ranks (at place 2 instead of 1): rank 0 was killed" in told


def test_without_min_ranks_every_place_is_used_again():
    restarts = Restarts(config_of({"dp_shard": 2}), 9)
    for _ in range(5):
        restarts.after(dead(1), SAVED)
    assert restarts.attempt.places == (0, 1)


def degrees(config: RunConfig | None) -> dict[str, int] | None:
    if config is None:
        return None
    layout = config.layout.layout()
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    return {name: getattr(layout, name) for name in names if getattr(layout, name) > 1}


def test_a_layout_shrinks_along_dp_alone():
    assert degrees(shrunk(config_of({"dp_shard": 4}), 3, 1)) == {"dp_shard": 2}, "3 do not divide 8 samples"
    assert degrees(shrunk(config_of({"dp_shard": 4}, global_batch=12), 3, 1)) == {"dp_shard": 3}
    assert degrees(shrunk(config_of({"dp_shard": 2, "dp_replicate": 2}), 3, 1)) == {"dp_shard": 2}
    assert degrees(shrunk(config_of({"dp_shard": 2, "tp": 2}), 3, 1)) == {"tp": 2}
    assert degrees(shrunk(config_of({"dp_shard": 2, "tp": 2}), 3, 3)) is None
    assert degrees(shrunk(config_of({"tp": 2, "pp": 2}), 3, 1)) is None
    experts = config_of({"dp_shard": 4, "ep": 4, "zero": 1}, model="debug-moe")
    assert degrees(shrunk(experts, 3, 1)) is None, "ep stays 4"
    whole = shrunk(config_of({"dp_shard": 2, "zero": 3}), 1, 1)
    assert whole is not None
    assert (whole.layout.layout().world_size, whole.layout.layout().zero) == (1, 0)


def is_killed_in_step_13(marker: Path, rank: int) -> None:
    """Rank 1 of the first start dies between the backward pass and the update."""
    from shardwright.training.step import Trainer

    update, calls = Trainer.update, []

    def update_or_die(self, rate):
        calls.append(rate)
        if rank == 1 and len(calls) == 13 and not marker.exists():
            marker.touch()
            kill_itself()
        return update(self, rate)

    Trainer.update = update_or_die


def events_of(run_file: Path) -> list[EventRecord]:
    return [each for each in events(run_file) if each.kind not in ("start", "save")]


def test_after_a_kill_the_run_goes_on_by_itself_to_the_same_last_bit(run_file, uninterrupted):
    fault = functools.partial(is_killed_in_step_13, run_file.parent / "marker")
    run = train(run_file, "--max-restarts", "2", fault=fault)
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)
    assert checkpoints(run_file) == ["step-00000015", "step-00000020"]
    assert [(each.kind, each.rank) for each in events_of(run_file)] == [("fault", 1), ("restart", 1)]
    assert events_of(run_file)[1].step == 10
    assert run.stderr.startswith("restart 1 of 2, from step-00000010, on 2 ranks: rank 1 was killed by signal 9")
    assert "changed since then" not in run.stdout
    logs = run_file.parent / "out" / "logs"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == [
        "rank-0.log",
        "rank-1.log",
        "restart-1/rank-0.log",
        "restart-1/rank-1.log",
    ]
    assert not any(is_alive(pid) for pid in run.workers())


def place_1_is_broken(rank: int) -> None:
    """The rank at place 1 dies in its fourth step, each time."""
    from shardwright.training.step import Trainer

    update, calls = Trainer.update, []

    def update_or_die(self, rate):
        calls.append(rate)
        if os.environ["LOCAL_RANK"] == "1" and len(calls) == 4:
            kill_itself()
        return update(self, rate)

    Trainer.update = update_or_die


def test_when_the_restarts_are_used_up_the_run_ends_with_the_reason(run_file):
    run = train(run_file, "--max-restarts", "1", fault=place_1_is_broken, expect=3)
    said = run.stderr
    assert said.startswith("restart 1 of 1, from the start, as nothing was saved yet, on 2 ranks: rank 1 was")
    assert "\nerror: rank 1 was killed by signal 9 (SIGKILL)" in said
    assert "the one restart of --max-restarts 1 is used up" in said
    assert "Traceback" not in said


LAYOUTS = {
    ("layout.dp_shard=2",): 1,
    ("layout.dp_shard=2", "layout.dp_replicate=2", "layout.zero=3"): 2,
}


@prove
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_broken_place_the_run_goes_on_with_fewer_ranks_and_learns_the_same(layout, run_file, uninterrupted):
    settings = [word for each in (*layout, "faults.min_ranks=1") for word in ("--set", each)]
    run = train(run_file, *settings, "--max-restarts", "5", fault=place_1_is_broken)
    n = LAYOUTS[layout]
    assert f"on {n} rank{'s' * (n > 1)} (without place 1, where 2 faults in a row happened)" in run.stderr
    assert run.stderr.count("restart ") == 2
    assert len(trajectory(run_file)) == 20
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(
        trajectory(run_file), trajectory(uninterrupted), strict=True
    ):
        assert step == same_step
        # The same sums in another order: float32 rounds at 6e-8, a few hundred times over 20 steps.
        assert loss == pytest.approx(same_loss, rel=1e-5)
        assert norm == pytest.approx(same_norm, rel=1e-4)


def place_1_is_mended_later(marker: Path, rank: int) -> None:
    """The rank at place 1 dies in its fourth step, twice; steps of a run of one rank take a while."""
    import time

    from shardwright.training.step import Trainer

    update, calls = Trainer.update, []

    def update_or_die(self, rate):
        calls.append(rate)
        if os.environ["LOCAL_RANK"] == "1" and len(calls) == 4:
            times = len(marker.read_text()) if marker.exists() else 0
            if times < 2:
                marker.write_text("x" * (times + 1))
                kill_itself()
        if os.environ["WORLD_SIZE"] == "1":
            time.sleep(0.2)
        return update(self, rate)

    Trainer.update = update_or_die


@prove
def test_a_run_with_fewer_ranks_grows_again_when_the_place_is_mended(run_file, uninterrupted, tmp_path):
    settings = [word for each in ("faults.min_ranks=1", "faults.grow_after=1.5") for word in ("--set", each)]
    fault = functools.partial(place_1_is_mended_later, tmp_path / "marker")
    run = train(run_file, *settings, "--max-restarts", "2", fault=fault)
    assert "start with all ranks again, from step-" in run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    restarts = [each.text for each in events_of(run_file) if each.kind == "restart"]
    assert [" on 2 ranks" in text for text in restarts] == [True, False, True]
    assert [step for step, _, _ in trajectory(run_file)] == list(range(1, 21))
    for (_, loss, norm), (_, same_loss, same_norm) in zip(trajectory(run_file), trajectory(uninterrupted), strict=True):
        assert loss == pytest.approx(same_loss, rel=1e-5)
        assert norm == pytest.approx(same_norm, rel=1e-4)


@prove
def test_a_run_goes_on_at_a_spare_place_to_the_same_last_bit(run_file, uninterrupted):
    run = train(run_file, "--set", "faults.spares=1", "--max-restarts", "1", fault=place_1_is_broken)
    assert "on 2 ranks (at place 2 instead of 1): rank 1 was killed" in run.stderr
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert checksums(run_file, 20) == checksums(uninterrupted, 20)


@prove
def test_after_a_hang_the_run_goes_on_without_the_stopped_rank(run_file, uninterrupted):
    with training(run_file, "--max-restarts", "1", "--set", "faults.hang_after=2.0") as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 6)
        stopped = run.workers()[1]
        os.kill(stopped, signal.SIGSTOP)
        assert run.wait() == 0, run.stderr
    assert trajectory(run_file) == trajectory(uninterrupted)
    assert [(each.kind, each.rank) for each in events_of(run_file)] == [("hang", 1), ("restart", 1)]
    assert not is_alive(stopped)


def test_what_cannot_be_asked_for_is_refused(run_file):
    refused = train(run_file, "--set", "faults.min_ranks=3", expect=2)
    assert "faults.min_ranks=3 is more than the 2 ranks of the layout; valid: 1 to 2" in refused.stderr
    alone = train(run_file, "--set", "faults.spares=1", expect=2)
    assert "faults.spares=1 are places for ranks that are started again here; give --max-restarts N" in alone.stderr
