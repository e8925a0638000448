"""Proves that a rank that hangs is named, with where it is and what the others wait for, and that the run then ends."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.parallel.observer import MessageWait, Observer, Running
from shardwright.runs.records import read_events
from shardwright.schedule.actions import Action
from shardwright.system.ranks_at import (
    JoinedCollective,
    RankDump,
    RankIdentity,
    RanksFolder,
    RankState,
    RankStateFile,
    RanksWatch,
    describe,
)
from shardwright.training.resilience import monitor as module
from shardwright.training.resilience.monitor import Monitor
from tests.distributed import run_ranks
from tests.marks import prove
from tests.mutation import Mutation, mutated
from tests.training.runs import is_alive, training, trajectory, write_run_file
from tests.training.worlds import RATE, SPEC, build, local_batch

SOON = ("--set", "faults.hang_after=2.0", "--set", "steps=2000", "--set", "checkpoint.every=0")
HERE = os.uname().nodename
TP = JoinedCollective("all_reduce", 12, "3", "tp", (0, 1))
ALL = JoinedCollective("all_gather", 40, "0", "all ranks", (0, 1, 2, 3))


def rank_state(phase: str = "forward_backward", step: int = 4) -> RankState:
    return RankState(beats=9, step=step, phase=phase, since_s=100.0, limit_s=5.0, line="model/moe.py:7 forward")


def dump(waits: bool, *pending: JoinedCollective, **joined: int) -> RankDump:
    line = "parallel/tensor.py:9 forward"
    return RankDump(line, waits, "layers.1.ffn", "0F3", "  the stack", pending, {k[1:]: v for k, v in joined.items()})


def described(dumps: dict[int, RankDump], fates: dict[int, str] | None = None) -> tuple[list[int], str]:
    states = {rank: rank_state() for rank in range(4)}
    who = {rank: RankIdentity(rank, HERE, 100 + rank, "cuda:1", {"tp": rank % 2}) for rank in range(4)}
    return describe(states, who, dumps, fates or {}, now_s=107.5)


def test_the_rank_that_never_joined_is_at_fault_and_not_those_that_wait_for_those_that_wait():
    """Rank 1 runs; rank 0 waits for it in tp; ranks 2 and 3 wait for rank 0 and 1 in a collective of all."""
    waiting = dump(True, ALL, g0=40)
    blamed, told = described({0: dump(True, TP, g3=12, g0=39), 1: dump(False, g3=11, g0=39), 2: waiting, 3: waiting})
    assert blamed == [1]
    assert told.splitlines()[:5] == [
        "no progress: rank 1 holds up the others",
        f"  rank 1 runs, and does not come to where the others wait; cuda:1 of {HERE}, process 101 (tp=1); step 5, "
        "forward_backward for 7.5 s; action 0F3; layers.1.ffn; at parallel/tensor.py:9 forward",
        "    never joined all_reduce number 12 of the group of tp (ranks 0, 1), in which rank 0 waits",
        "    never joined all_gather number 40 of the group of all ranks (ranks 0, 1, 2, 3), in which ranks 2, 3 wait",
        "  ranks 0, 2, 3 wait: step 5, forward_backward, at parallel/tensor.py:9 forward",
    ]


def test_the_stacks_are_those_of_the_ranks_at_fault_and_of_each_class_of_the_others_the_odd_ones_first():
    odd = replace(dump(True, ALL, g0=40), stack="  another stack")
    waiting = dump(True, ALL, g0=40)
    _, told = described({0: waiting, 1: dump(False), 2: odd, 3: waiting})
    lines = told.splitlines()
    assert lines[lines.index("--- Python stack of rank 1 ---") :] == [
        "--- Python stack of rank 1 ---",
        "  the stack",
        "--- Python stack of rank 2 ---",
        "  another stack",
        "--- Python stack of ranks 0, 3 ---",
        "  the stack",
    ]


def test_a_collective_that_a_rank_has_joined_is_not_held_against_it():
    blamed, told = described({0: dump(True, TP, g3=12), 1: dump(False, g3=12), 2: dump(False), 3: dump(False)})
    assert blamed == [1, 2, 3]
    assert "never joined" not in told


def test_a_rank_that_cannot_answer_is_at_fault_before_all_others():
    blamed, told = described({1: dump(True, TP, g3=12), 2: dump(False), 3: dump(False)}, {0: "is stopped"})
    assert blamed == [0]
    assert f"rank 0 is stopped; cuda:1 of {HERE}, process 100 (tp=0); step 5, forward_backward for 7.5 s; last" in told
    blamed, told = described({1: dump(True, TP, g3=12), 2: dump(True), 3: dump(True)})
    assert blamed == [0]
    assert "rank 0 does not answer" in told


def message(source: int, target: int) -> JoinedCollective:
    return JoinedCollective("the input of 1F3", 7, f"pp 0 {source}>{target}", "pp", (source, target), is_message=True)


def test_the_rank_that_has_not_sent_a_message_is_at_fault_and_the_message_named():
    """Rank 2 waits for a message of rank 0, which runs; ranks 1 and 3 wait for one another's messages."""
    answers = {0: dump(False), 1: dump(True, message(3, 1)), 2: dump(True, message(0, 2)), 3: dump(True)}
    blamed, told = described(answers)
    assert blamed == [0]
    assert told.splitlines()[2] == (
        "    never sent the input of 1F3, number 7 of the messages of pp from rank 0 to rank 2, in which rank 2 waits"
    )
    _, told = described(answers, {3: "is stopped"})
    assert "    never sent the input of 1F3, number 7 of the messages of pp from rank 3 to rank 1, in which" in told
    _, told = described({0: dump(False), 2: dump(True, message(2, 0))})
    assert "    never took the input of 1F3, number 7 of the messages of pp from rank 2 to rank 0, in which" in told


def test_a_message_that_both_ranks_have_begun_does_not_arrive():
    line = {"pp 0 0>2": 7}
    waiting = {
        0: replace(dump(True), joined=line),
        1: dump(True),
        2: replace(dump(True, message(0, 2)), joined=line),
        3: dump(True),
    }
    blamed, told = described(waiting)
    assert blamed == []
    assert told.splitlines()[1] == (
        "  both ranks have started the input of 1F3, number 7 of the messages of pp from rank 0 to rank 2, and it does "
        "not arrive"
    )


def test_ranks_that_all_wait_have_joined_different_collectives():
    blamed, told = described({rank: dump(True, TP if rank < 2 else ALL) for rank in range(4)})
    assert blamed == []
    assert told.startswith("no progress: all ranks wait, for collectives that others have not joined")


def test_a_collective_that_all_have_joined_and_that_does_not_end_means_that_messages_do_not_arrive():
    """Ranks 0 and 1, on two machines, wait in it; rank 2 waits for rank 0 in another one, rank 3 for nothing known."""
    states = {rank: rank_state() for rank in range(4)}
    who = {rank: RankIdentity(rank, f"node{rank % 2}", 100 + rank, "cpu") for rank in range(4)}
    both = JoinedCollective("all_reduce", 12, "3", "dp_shard", (0, 1))
    answers = {0: dump(True, both, g3=12), 1: dump(True, both, g3=12), 2: dump(True, ALL, g0=40), 3: dump(True)}
    blamed, told = describe(states, who, answers, {}, now_s=107.5)
    assert blamed == []
    assert told.splitlines()[:2] == [
        "no progress: all ranks wait, and messages between them do not arrive; is the network up between "
        "node0 (rank 0), node1 (rank 1)?",
        "  all of its ranks have joined all_reduce number 12 of the group of dp_shard (ranks 0, 1), and it does "
        "not end",
    ]
    for rank in (0, 1):  # it may be queued behind one that not all have joined
        answers[rank] = dump(True, ALL, both, g3=12, g0=40)
    blamed, told = describe(states, who, answers, {}, now_s=107.5)
    assert told.startswith("no progress: all ranks wait, for collectives that others have not joined")


def test_of_a_rank_on_another_machine_the_time_is_told_that_it_has_measured_itself():
    states = {0: rank_state(), 1: rank_state()}  # since 100 s, by the clock of node7
    who = {rank: RankIdentity(rank, "node7", 100 + rank, "cpu") for rank in range(2)}
    _, told = describe(states, who, {0: dump(True, TP), 1: replace(dump(False), for_s=6.5)}, {}, now_s=107.5)
    assert "rank 1 runs" in told
    assert "step 5, forward_backward for 6.5 s" in told
    _, told = describe(states, who, {0: dump(True, TP)}, {}, now_s=107.5)
    assert "rank 1 does not answer; cpu of node7, process 101; step 5, forward_backward; last seen at" in told


def watcher(folder: Path, least_s: float = 2.0) -> Monitor:
    return Monitor(folder, 0, Layout(dp_shard=2), torch.device("cpu"), least_s)


def test_the_line_of_a_rank_is_one_of_its_phase_or_none(tmp_path):
    """The phase is told at once and the line twice a second: a rank that is killed is in another phase by then."""
    reported = RankStateFile(tmp_path / "state", writes=True)
    reported.place(3, "data", 10.0, 60.0)
    reported.beat(1, 10.0, "data/batches.py:7 next")
    assert reported.read().line == "data/batches.py:7 next"
    reported.place(3, "forward_backward", 10.2, 60.0)
    assert (reported.read().phase, reported.read().line) == ("forward_backward", "")
    reported.place(4, "data", 11.0, 60.0)  # the same phase of another step
    assert reported.read().line == ""
    reported.beat(2, 10.2, "training/step.py:105 forward_backward")  # seen before, written after the phase began
    assert reported.read().line == ""


def test_what_a_phase_may_take_is_learned(tmp_path, monkeypatch):
    """The first turn (100 s, say compilation) is not timed; then 5 times the longest, at least 2 s."""
    now_s = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(Monitor, "_look", lambda self: None)
    monitor, limits = watcher(tmp_path), []
    for took_s in (100.0, 0.1, 0.3, 0.2, 3.0, 0.1):
        monitor.enter("forward_backward", 1)
        limits.append(monitor._limit_s)
        now_s[0] += took_s
        monitor.enter("optimizer", 1)
        now_s[0] += 0.01
    monitor.enter("forward_backward", 1)
    limits.append(monitor._limit_s)
    assert limits == pytest.approx([600.0, 600.0, 600.0, 2.0, 2.0, 15.0, 15.0])
    monitor.enter("checkpoint", 1)
    assert monitor._limit_s == 600.0
    state = RanksFolder(tmp_path).state(0)
    assert state is not None
    assert (state.phase, state.step, state.limit_s) == ("checkpoint", 1, 600.0)
    monitor.close()
    assert not (tmp_path / "ranks").exists()


def test_collectives_of_gloo_and_of_nccl_are_counted_apart(tmp_path, monkeypatch):
    """As torch 2.11 records them with CUDA: NCCL's recorder has the messages of a group of two, too."""

    def entry(what: str, state: str, number: int, at_ns: int, is_p2p: bool = False) -> dict[str, object]:
        return {
            "profiling_name": what,
            "state": state,
            "retired": what.startswith("gloo"),
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "is_p2p": is_p2p,
            "time_created_ns": at_ns,
        }

    of_nccl = [
        entry("nccl:all_reduce", "completed", 7, 1),
        entry("nccl:send 0->1", "scheduled", 7, 3, is_p2p=True),
        entry("nccl:coalesced", "started", 7, 4),
        entry("nccl:_all_gather_base", "started", 8, 5),
    ]
    of_gloo = [entry("gloo:all_reduce", "scheduled", 2, 2), entry("gloo:barrier", "scheduled", 3, 6)]
    of_gloo[-1]["retired"] = False
    for name, entries in (("_dump_fr_trace_json", of_gloo), ("_dump_nccl_trace_json", of_nccl)):
        written = json.dumps({"entries": entries})
        monkeypatch.setattr(
            torch._C._distributed_c10d, name, lambda written=written, **_: written, raising=name.startswith("_dump_fr")
        )
    monkeypatch.setattr(Monitor, "_look", lambda self: None)
    monitor = watcher(tmp_path)
    pending, joined = monitor._collectives()
    monitor.close()
    assert [(each.name, each.number, each.group) for each in pending] == [
        ("_all_gather_base", 8, "nccl 0"),
        ("barrier", 3, "gloo 0"),
    ]
    assert joined == {"nccl 0": 8, "gloo 0": 3}


def test_a_phase_that_is_late_is_seen_once_it_was_late_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(Monitor, "_look", lambda self: None)
    monkeypatch.setattr("shardwright.system.ranks_at._HEARD_S", 0.0)
    monitor, watch = watcher(tmp_path), RanksWatch(tmp_path, 2)
    for _ in range(4):
        monitor.enter("data", 3)
    assert watch.hang() is None
    monitor._reported.place(3, "data", time.monotonic() - 2.5, 2.0)
    assert watch.hang() is None
    found = watch.hang()
    assert found is not None
    assert found[0] == [0]
    monitor._reported.place(3, "data", time.monotonic(), 2.0)
    assert watch.hang() is None
    monitor.close()


class DumpedActions(Observer):
    """At the start of each action, and of each wait for a message, that action and the one in a dump of the monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.during: list[tuple[Action, str]] = []

    def begin(self, running: Running) -> None:
        if isinstance(running, Action | MessageWait):
            action = running.action if isinstance(running, MessageWait) else running
            self.during.append((action, self.monitor.dump().action))


BUGS = {
    "a dump names no action of an evaluation": Mutation(
        "shardwright.parallel.pipeline.runner:_RankStep.__init__",
        "self.observer = pipeline.observer",
        "self.observer = pipeline.observer if training else type(pipeline.observer)()",
    ),
    "a dump names no action of an evaluation without a pipeline": Mutation(
        "shardwright.parallel.microbatch_runner:SequentialRunner.evaluate",
        'self.observer.during(Action(0, "F", number))',
        "torch.no_grad()",
    ),
    "a dump of a rank that waits for a message names no action": Mutation(
        "shardwright.training.resilience.monitor:Monitor.begin", "self._action = action", "pass"
    ),
    "a dump names an action that has ended": Mutation(
        "shardwright.training.resilience.monitor:Monitor.end", "self._action = None", "pass"
    ),
}


def dumped_actions(layout: Layout, out: Path, bugs: tuple[Mutation, ...] = ()) -> list[list[tuple[Action, str]]]:
    """What dumps name during a step and during an evaluation; after each of the two, no action."""
    with mutated(*bugs):
        trainer = build(layout, torch.float64, replace(SPEC, n_layers=4))
        monitor = Monitor(out, torch.distributed.get_rank(), layout, torch.device("cpu"), 0.0)
        monitor.observe(trainer.model)
        observer, found = DumpedActions(monitor), []
        trainer.model.observers.add(observer)
        batch = local_batch(0, layout.data_rank(monitor.rank), layout.data_ranks, 2)
        for run in (lambda: trainer.step(batch, 0, RATE), lambda: trainer.evaluate([batch])):
            run()
            ended = monitor.dump().action
            found.append([*observer.during, *([(Action(0, "F", 0), ended)] if ended else [])])
            observer.during.clear()
        monitor.close()
        return found


PIPELINE = Layout(pp=2, pp_schedule="zb-h1")
DUMPED = {
    PIPELINE: [
        ["0F0", "0F1", "0I0", "0I0", "0W0", "0I1", "0I1", "0W1", "0F0", "0F1"],
        ["1F0", "1F0", "1I0", "1F1", "1F1", "1I1", "1W0", "1W1", "1F0", "1F0", "1F1", "1F1"],
    ],
    Layout(dp_replicate=2): [["0F0", "0B0", "0F1", "0B1", "0F0", "0F1"]] * 2,
}


@pytest.mark.parametrize("layout", DUMPED, ids=str)
def test_a_dump_names_the_action_that_runs_or_waits_in_training_and_evaluation(layout: Layout, tmp_path: Path):
    for (trained, evaluated), expected in zip(
        run_ranks(dumped_actions, 2, layout, tmp_path), DUMPED[layout], strict=True
    ):
        named = [(str(Action(*action)), dumped) for action, dumped in [*trained, *evaluated]]
        assert sorted(named) == sorted(zip(expected, expected, strict=True))


@prove
@pytest.mark.parametrize("name", BUGS)
def test_an_action_that_is_not_named_is_seen(name: str, tmp_path: Path):
    layout = Layout(dp_replicate=2) if "without a pipeline" in name else PIPELINE
    ranks = run_ranks(dumped_actions, 2, layout, tmp_path, (BUGS[name],))
    named = [sorted((str(Action(*action)), dumped) for part in rank for action, dumped in part) for rank in ranks]
    assert named != [sorted(zip(expected, expected, strict=True)) for expected in DUMPED[layout]]


def test_a_stopped_rank_is_named_with_its_step_and_what_the_others_wait_for(run_file):
    with training(run_file, *SOON) as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 6)
        os.kill(run.workers()[1], signal.SIGSTOP)
        assert run.wait() == 3
    lines = run.stderr.splitlines()
    assert lines[0] == "error: no progress: rank 1 holds up the others"
    assert lines[1].startswith("  rank 1 is stopped (SIGSTOP, or a debugger); cpu of ")
    assert "    never joined " in run.stderr
    assert "(ranks 0, 1), in which rank 0 waits" in run.stderr
    assert "--- Python stack of rank 0 ---" in run.stderr
    (hang,) = [each for each in read_events(run_file.parent / "out") if each.kind == "hang"]
    assert hang.rank == 1
    assert not any(is_alive(pid) for pid in run.workers())
    assert not (run_file.parent / "out" / "ranks").exists()


def hangs(how: str, rank: int) -> None:
    """Rank 1, in its 9th step, evaluation or batch: never ends a loop, or waits for ever for data."""
    from shardwright.data import batches
    from shardwright.parallel.microbatch_runner import SequentialRunner
    from shardwright.training.step import Trainer

    forward_backward, evaluate, read, calls = Trainer.forward_backward, SequentialRunner.evaluate, batches._read, []

    def loops(self, batch, step):
        while rank == 1 and step == 8:
            pass
        return forward_backward(self, batch, step)

    def sleeps(*given):
        calls.append(0)
        if rank == 1 and len(calls) == 9:
            time.sleep(10_000)
        return read(*given)

    def evaluates(self, microbatches, loss):
        def loops(*given):
            while rank == 1 and len(calls) == 9:
                pass
            return loss(*given)

        calls.append(0)
        return evaluate(self, microbatches, loops)

    if how == "loop":
        Trainer.forward_backward = loops
    elif how == "evaluation":
        SequentialRunner.evaluate = evaluates
    else:
        batches._read = sleeps


@prove
@pytest.mark.parametrize(
    ("how", "torchrun", "where"),
    [
        ("loop", False, "step 9, forward_backward"),
        ("data", False, "step 9, data"),
        ("evaluation", False, "step 9, evaluation"),
        ("loop", True, "step 9, forward_backward"),
    ],
)
def test_a_rank_that_runs_on_is_named_with_the_line_it_is_at(how, torchrun, where, ragged_tokens, tmp_path):
    run_file = write_run_file(tmp_path, ragged_tokens)
    evaluated = ("--set", "evaluation.every=1", "--set", "evaluation.samples=8") if how == "evaluation" else ()
    with training(run_file, *SOON, *evaluated, fault=partial(hangs, how), torchrun=torchrun) as run:
        run.wait_for(lambda: "--- Python stack of rank 1 ---" in run.stderr)
        if not torchrun:  # torchrun waits 30 s for a rank that does not end
            assert run.wait() == 3
    assert "error: no progress: rank 1 holds up the others" in run.stderr
    assert "rank 1 runs, and does not come to where the others wait; cpu of " in run.stderr
    assert where in run.stderr
    assert ("in sleeps" if how == "data" else "in loops") in run.stderr
    assert ("; action 0F0; " in run.stderr) == (how == "evaluation")


AXES = {
    "pp": (
        "layout.pp=2",
        r"never sent the input of 0B0, number \d+ of the messages of pp from rank 1 to rank 0, in which rank 0 waits",
    ),
    "cp": (
        "layout.cp=2",
        r"never took keys and values, number \d+ of the messages of cp from rank 0 to rank 1, in which rank 0 waits",
    ),
}


@prove
@pytest.mark.parametrize("axis", AXES)
def test_the_message_is_named_that_others_wait_for(axis: str, run_file: Path):
    layout, told = AXES[axis]
    settings = (layout, "layout.dp_shard=1", "layout.zero=0", *(["layout.cp_method=ring"] * (axis == "cp")))
    given = [word for setting in settings for word in ("--set", setting)]
    with training(run_file, *SOON, *given, fault=partial(hangs, "loop")) as run:
        assert run.wait() == 3
    assert "error: no progress: rank 1 holds up the others" in run.stderr
    assert re.search(told, run.stderr), run.stderr


@prove
def test_a_run_that_is_slow_for_a_while_is_not_ended(run_file):
    """A rank is stopped for less than a phase may take."""
    with training(run_file, "--set", "faults.hang_after=4.0", "--set", "steps=14") as run:
        run.wait_for(lambda: len(trajectory(run_file)) >= 6)
        os.kill(run.workers()[1], signal.SIGSTOP)
        time.sleep(2)
        os.kill(run.workers()[1], signal.SIGCONT)
        assert run.wait() == 0
