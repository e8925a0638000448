"""The monitor thread of a rank: reports the position of the training thread, and ends the run if a rank hangs.

The training thread reports each phase and step that it enters through shared memory (`Monitor.begin`). Twice a second,
the monitor thread records the line of Python that the training thread is at. It writes a dump if another process asks
for the positions of all ranks (`ranks_at`), or if a phase exceeds its time limit. For local workers, the process that
started them compares the dumps and ends the run; under torchrun and srun, each rank's monitor thread does.

The time limit of a phase is 5 times its longest duration so far, and at least `faults.hang_after` seconds.

Collectives come from PyTorch's Flight Recorders. The recorders of gloo and of NCCL keep the last 1,000 of each rank
(TORCH_FR_BUFFER_SIZE). `parallel.point_to_point` counts the messages of pp and cp, which gloo's does not record.
"""

import json
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from shardwright.data.batches import READER
from shardwright.layout.layout import Layout
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.observer import MessageWait, Observer, Running, StepPhase
from shardwright.parallel.point_to_point import MessageChannel, begun, waited_for
from shardwright.runs.records import EventRecord, append_event
from shardwright.schedule.actions import Action
from shardwright.system.console import LossyStream, visible
from shardwright.system.errors import cleaning_up
from shardwright.system.ranks_at import (
    FEW_TURNS,
    FIRST_LIMIT_S,
    NOT_TIMED,
    SUSPENDED_S,
    TIMES_LARGEST,
    JoinedCollective,
    Phase,
    RankDump,
    RankIdentity,
    RanksFolder,
    RankState,
    RanksWatch,
)
from shardwright.system.torch_private import flight_record, group_names
from shardwright.training.ranks import SUPERVISED

TICK_S = 0.5
STACK_SHOWN = 12
"""Number of innermost stack frames in a dump."""
RECORDED = "1000"
"""Number of collectives per rank that PyTorch's Flight Recorder keeps."""
_OURS = str(Path(__file__).parents[2])
_WAITS = re.compile(
    r"\.wait\(|\bdist\.|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|synchronize|\.tolist\(|float\("
)
"""Matches a line of Python that waits for other ranks or for the device."""
_LAST_S = 4.0
"""Seconds that a rank waits before it exits, so that the rank that reports the hang exits first."""
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
"""Axes whose coordinates are reported for a rank."""
_GROUPED = (
    ("tp",), ("cp",), ("pp",), ("ep",), ("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard"),
    ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"),
    ("expert_dp_shard",), ("dp_replicate", "expert_dp_shard"),
)  # fmt: skip


def record_collectives() -> None:
    """Let PyTorch record the last collectives of this process. Call before the process joins a process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)


class Monitor(Observer):
    """The monitor of one rank."""

    def __init__(self, out: Path, rank: int, layout: Layout, device: torch.device, hang_after_s: float) -> None:
        """Start the monitor thread. `hang_after_s`: minimum time limit of each phase, in seconds; 0 means no limit."""
        self.out, self.rank, self.layout, self.least_s = out, rank, layout, hang_after_s
        self.folder = RanksFolder(out)
        at = {axis: n for axis, n in layout.coordinates(rank).items() if axis in AXES and getattr(layout, axis) > 1}
        self._reported = self.folder.introduce(RankIdentity(rank, os.uname().nodename, os.getpid(), str(device), at))
        self._training = threading.get_ident()
        self._names: dict[int, str] = {}
        self._turns: dict[str, int] = {}
        self._longest_s: dict[str, float] = {}
        self._phase: Phase = "start"
        self._step = 0
        self._action: Action | None = None
        self._since_s = time.monotonic()
        self._limit_s = FIRST_LIMIT_S if hang_after_s else 0.0
        self._place()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look, name="shardwright-monitor", daemon=True)
        self._thread.start()

    def observe(self, model: ParallelModel) -> None:
        """Follow a model's events. A dump names the running action, and the module that the training thread is in."""
        self._names = {id(module): name for part in model.parts for name, module in part.named_modules()}
        model.observers.add(self)

    def begin(self, running: Running) -> None:
        match running:
            case StepPhase(phase, step):
                self.enter(phase, step)
            case Action():
                self._action = running
            case MessageWait(action):
                self._action = action

    def end(self, running: Running) -> None:
        if isinstance(running, Action):
            self._action = None

    def enter(self, phase: Phase, step: int) -> None:
        """Record that the training thread enters a phase of step number `step` (0-based)."""
        now_s = time.monotonic()
        before, turns = self._phase, self._turns.get(self._phase, 0)
        if turns >= NOT_TIMED:
            self._longest_s[before] = max(self._longest_s.get(before, 0.0), now_s - self._since_s)
        self._turns[before] = turns + 1
        self._phase, self._step, self._since_s, self._action = phase, step, now_s, None
        self._limit_s = self._limit_of(phase)
        self._place()

    def _limit_of(self, phase: Phase) -> float:
        """Return the time limit of a phase in seconds; 0 means no limit."""
        if not self.least_s:
            return 0.0
        if self._turns.get(phase, 0) < FEW_TURNS:
            return max(FIRST_LIMIT_S, self.least_s)
        return max(self.least_s, TIMES_LARGEST * self._longest_s[phase])

    def _place(self) -> None:
        self._reported.place(self._step, self._phase, self._since_s, self._limit_s)

    def close(self) -> None:
        """Stop the thread and remove its files."""
        self._reported.place(self._step, self._phase, self._since_s, 0.0)  # no limit from here on
        self._ending.set()
        self._thread.join()
        self.folder.forget(self.rank)

    def _look(self) -> None:
        answered, ends_run, beats = False, SUPERVISED not in os.environ, 0
        looked_s, allowed_from_s = time.monotonic(), 0.0
        while not self._ending.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - looked_s > SUSPENDED_S:  # this process was suspended and continues
                allowed_from_s = now_s
            looked_s = now_s
            beats += 1
            since_s = self._since_s  # before the frame: a line of a later phase is then dropped
            self._reported.beat(beats, since_s, self._ours(sys._current_frames().get(self._training)))
            late = bool(self._limit_s) and now_s > max(self._since_s, allowed_from_s) + self._limit_s
            if not answered and (late or self.folder.dump_requested):
                self.folder.answer(self.rank, self.dump())
                answered = True
            elif answered and not late and not self.folder.dump_requested:
                answered = False
            if late and ends_run:
                self._end_run()

    def _end_run(self) -> None:
        """Compare all ranks and exit with code 3, since no other process would end the run. One rank per machine
        reports the ranks that hold up the others on stderr and to its torchrun. The first of these ranks writes the
        event."""
        watch = RanksWatch(self.out, self.layout.world_size)
        blamed, reason = watch.compared(watch.states())
        states = watch.states()
        if not self._late(states):
            return
        able = [rank for rank in sorted(states) if rank not in blamed and states[rank].beats]
        hosts = {rank: who.host for rank in able if (who := self.folder.identity(rank))}
        local = [rank for rank in able if hosts.get(rank) == os.uname().nodename]
        if not local or self.rank == local[0]:
            text = f"error: {reason}"
            if not able or self.rank == able[0]:
                append_event(self.out, EventRecord("hang", self._step, reason, blamed[0] if len(blamed) == 1 else None))
            if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
                message = {"message": reason, "extraInfo": {"py_callstack": reason, "timestamp": str(int(time.time()))}}
                Path(path).write_text(json.dumps({"message": message}))
            print(visible(text), file=LossyStream("stderr"), flush=True)
        else:
            time.sleep(_LAST_S)
        os._exit(3)

    def _late(self, states: dict[int, RankState]) -> bool:
        """Return whether this rank is still over its time limit after the wait for the dumps."""
        now_s = time.monotonic()
        return self.rank not in states or states[self.rank].over_s(now_s) > 0

    def dump(self) -> RankDump:
        """Return the position of the training thread and the collectives that it has joined."""
        frames = sys._current_frames()
        frame = frames.get(self._training)
        pending, joined = self._collectives()
        stack = "".join(traceback.format_stack(frame)[-STACK_SHOWN:]) if frame is not None else ""
        for thread in threading.enumerate():
            if thread.name == READER and thread.ident in frames and self._phase == "data":
                stack += "the thread that reads data:\n"
                stack += "".join(traceback.format_stack(frames[thread.ident])[-STACK_SHOWN:])
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""
        waits = bool(_WAITS.search(line)) or (bool(pending) and ".backward(" in line)
        module, action = self._module(frame), str(self._action or "")
        for_s = time.monotonic() - self._since_s
        return RankDump(self._ours(frame), waits, module, action, stack, tuple(pending), joined, for_s)

    def _collectives(self) -> tuple[list[JoinedCollective], dict[str, int]]:
        groups = dict(group_names())
        pending: list[JoinedCollective] = []
        joined: dict[str, int] = {}
        for entry in flight_record():
            name, number = entry["process_group"][0], entry["collective_seq_id"]
            backend, _, what = entry["profiling_name"].rpartition(":")
            counted = f"{backend} {name}"  # gloo and NCCL each number the collectives of a group
            joined[counted] = max(joined.get(counted, 0), number)
            if not entry["retired"] and entry["state"] != "completed":
                ranks = groups.get(name, ())
                pending.append(JoinedCollective(what, number, counted, self._axes(ranks), ranks))
        joined |= {_name_of(line): number for line, number in begun().items()}
        return [*_messages_waited_for(), *pending], joined

    def _axes(self, ranks: tuple[int, ...]) -> str:
        """Return the layout axes along which a process group lies."""
        if len(ranks) == self.layout.world_size:
            return "all ranks"
        matching = (axes for axes in _GROUPED if ranks == self.layout.group_of(self.rank, *axes))
        return " x ".join(next(matching, ("some",)))

    def _ours(self, frame: FrameType | None) -> str:
        """Return file, line and function of the innermost frame of Shardwright code."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_OURS):
                return f"{name[len(_OURS) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        return ""

    def _module(self, frame: FrameType | None) -> str:
        """Return the name of the innermost module of the model that a frame is in, or ""."""
        while frame is not None:
            if name := self._names.get(id(frame.f_locals.get("self"))):
                return name
            frame = frame.f_back
        return ""


def _name_of(line: MessageChannel) -> str:
    """Return the name of a channel, equal on its two ranks."""
    return f"{line.axis} {line.tag} {line.source}>{line.target}"


def _messages_waited_for() -> Iterator[JoinedCollective]:
    for wait in waited_for():
        line = wait.line
        yield JoinedCollective(wait.what, wait.number, _name_of(line), line.axis, (line.source, line.target), True)


@contextmanager
def monitored(
    out: Path, rank: int, layout: Layout, device: torch.device, hang_after_s: float
) -> Iterator[Monitor | None]:
    """Monitor this rank inside the `with` block. A run with one rank has no monitor: the rank waits for no other, and
    its process may be the caller's, which cannot be ended."""
    if layout.world_size == 1:
        yield None
        return
    monitor = Monitor(out, rank, layout, device, hang_after_s)
    with cleaning_up(monitor.close):
        yield monitor
