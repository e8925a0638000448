"""Watches this rank from a thread of its own: reports where the training thread is, and ends what does not go on.

The training thread says which phase of which step it enters (`Monitor.enter`), through shared memory. The thread here
looks twice a second: it notes the line of Python that the training thread is at, answers when somebody asks where all
ranks stand (`ranks_at`), and asks itself once a phase takes longer than it may. The process that started local workers
compares the answers and ends the run; under torchrun and srun each rank's thread does.

What a phase may take is learned: 5 times the longest that it has taken, and at least faults.hang_after seconds.

Collectives are those of PyTorch's Flight Recorder, which keeps the last 1,000 of each rank (TORCH_FR_BUFFER_SIZE), on
gloo and NCCL. It does not keep messages between two ranks on gloo: those of pp and cp `parallel.point_to_point` knows.
"""

import json
import linecache
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from shardwright.data.batches import READER
from shardwright.layout.layout import Layout
from shardwright.parallel.point_to_point import MessageChannel, begun, waited_for
from shardwright.run_folder import EventRecord, append_event
from shardwright.system.console import visible
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
"""Frames of a stack, the innermost."""
RECORDED = "1000"
"""Collectives of a rank that PyTorch's Flight Recorder keeps."""
_OURS = str(Path(__file__).parents[2])
_WAITS = re.compile(
    r"\.wait\(|\bdist\.|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|synchronize|\.tolist\(|float\("
)
"""What a line of Python says that waits for other ranks or for the device."""
_LAST_S = 4.0
"""How long a rank that is not the first to find a hang leaves the word to that one."""
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
"""Those whose coordinates of a rank are told."""
_GROUPED = (
    ("tp",), ("cp",), ("pp",), ("ep",), ("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard"),
    ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"),
    ("expert_dp_shard",), ("dp_replicate", "expert_dp_shard"),
)  # fmt: skip


def record_collectives() -> None:
    """Have PyTorch keep the last collectives of this process; before it joins a process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)


class Monitor:
    """The monitor of one rank."""

    def __init__(self, out: Path, rank: int, layout: Layout, device: torch.device, hang_after_s: float) -> None:
        """`hang_after_s`: seconds that each phase may take at least; 0: as long as it likes."""
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
        self._since_s = time.monotonic()
        self._limit_s = FIRST_LIMIT_S if hang_after_s else 0.0
        self._place()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look, name="shardwright-monitor", daemon=True)
        self._thread.start()

    def name_modules(self, parts: Iterable[nn.Module]) -> None:
        """Learn the names of modules, to say which of them the training thread is in."""
        self._names = {id(module): name for part in parts for name, module in part.named_modules()}

    def enter(self, phase: Phase, step: int) -> None:
        """The training thread enters a phase of step number `step` (0-based)."""
        now_s = time.monotonic()
        before, turns = self._phase, self._turns.get(self._phase, 0)
        if turns >= NOT_TIMED:
            self._longest_s[before] = max(self._longest_s.get(before, 0.0), now_s - self._since_s)
        self._turns[before] = turns + 1
        self._phase, self._step, self._since_s = phase, step, now_s
        self._limit_s = self._limit_of(phase)
        self._place()

    def _limit_of(self, phase: Phase) -> float:
        """What a phase may take; 0: as long as it likes."""
        if not self.least_s:
            return 0.0
        if self._turns.get(phase, 0) < FEW_TURNS:
            return max(FIRST_LIMIT_S, self.least_s)
        return max(self.least_s, TIMES_LARGEST * self._longest_s[phase])

    def _place(self) -> None:
        self._reported.place(self._step, self._phase, self._since_s, self._limit_s)

    def close(self) -> None:
        """Stop the thread, and remove the files."""
        self._reported.place(self._step, self._phase, self._since_s, 0.0)  # no limit any more
        self._ending.set()
        self._thread.join()
        self.folder.forget(self.rank)

    def _look(self) -> None:
        answered, ends_run, beats = False, SUPERVISED not in os.environ, 0
        looked_s, allowed_from_s = time.monotonic(), 0.0
        while not self._ending.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - looked_s > SUSPENDED_S:  # this process was stopped, and goes on
                allowed_from_s = now_s
            looked_s = now_s
            beats += 1
            since_s = self._since_s  # before the line, which may only be one of a later phase then, and is left out
            self._reported.beat(beats, since_s, self._ours(sys._current_frames().get(self._training)))
            late = bool(self._limit_s) and now_s > max(self._since_s, allowed_from_s) + self._limit_s
            if not answered and (late or self.folder.asked):
                self.folder.answer(self.rank, self.dump())
                answered = True
            elif answered and not late and not self.folder.asked:
                answered = False
            if late and ends_run:
                self._end_run()

    def _end_run(self) -> None:
        """Compare all ranks, and leave with code 3, as no one else would end the run. One rank of each machine says
        which hold up the others, to its torchrun too, and the first of all writes the event."""
        watch = RanksWatch(self.out, self.layout.world_size)
        blamed, told = watch.compared(watch.states())
        states = watch.states()
        if not self._late(states):
            return
        able = [rank for rank in sorted(states) if rank not in blamed and states[rank].beats]
        hosts = {rank: who.host for rank in able if (who := self.folder.identity(rank))}
        here = [rank for rank in able if hosts.get(rank) == os.uname().nodename]
        if not here or self.rank == here[0]:
            text = f"error: {told}"
            if not able or self.rank == able[0]:
                append_event(self.out, EventRecord("hang", self._step, told, blamed[0] if len(blamed) == 1 else None))
            if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
                message = {"message": told, "extraInfo": {"py_callstack": told, "timestamp": str(int(time.time()))}}
                Path(path).write_text(json.dumps({"message": message}))
            print(visible(text), file=sys.stderr, flush=True)
        else:
            time.sleep(_LAST_S)
        os._exit(3)

    def _late(self, states: dict[int, RankState]) -> bool:
        """Whether this rank still does not go on, after the time that the answers took."""
        now_s = time.monotonic()
        return self.rank not in states or states[self.rank].over_s(now_s) > 0

    def dump(self) -> RankDump:
        """Where the training thread stands, and the collectives that it has joined."""
        frames = sys._current_frames()
        frame = frames.get(self._training)
        pending, joined = self._collectives()
        stack = "".join(traceback.format_stack(frame)[-STACK_SHOWN:]) if frame is not None else ""
        for thread in threading.enumerate():
            if thread.name == READER and thread.ident in frames and self._phase == "data":
                stack += "the thread that reads data:\n"
                stack += "".join(traceback.format_stack(frames[thread.ident])[-STACK_SHOWN:])
        here = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""
        waits = bool(_WAITS.search(here)) or (bool(pending) and ".backward(" in here)
        module, action = self._inside(frame)
        for_s = time.monotonic() - self._since_s
        return RankDump(self._ours(frame), waits, module, action, stack, tuple(pending), joined, for_s)

    def _collectives(self) -> tuple[list[JoinedCollective], dict[str, int]]:
        groups = dict(group_names())
        pending: list[JoinedCollective] = []
        joined: dict[str, int] = {}
        for entry in flight_record():
            name, number = entry["process_group"][0], entry["collective_seq_id"]
            joined[name] = max(joined.get(name, 0), number)
            if not entry["retired"] and entry["state"] != "completed":
                ranks = groups.get(name, ())
                what = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
                pending.append(JoinedCollective(what, number, name, self._axes(ranks), ranks))
        joined |= {_name_of(line): number for line, number in begun().items()}
        return [*_messages_waited_for(), *pending], joined

    def _axes(self, ranks: tuple[int, ...]) -> str:
        """The axes of the layout along which a group lies."""
        if len(ranks) == self.layout.world_size:
            return "all ranks"
        found = (axes for axes in _GROUPED if ranks == self.layout.group_of(self.rank, *axes))
        return " x ".join(next(found, ("some",)))

    def _ours(self, frame: FrameType | None) -> str:
        """File, line and function of the innermost code of Shardwright."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_OURS):
                return f"{name[len(_OURS) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        return ""

    def _inside(self, frame: FrameType | None) -> tuple[str, str]:
        """The innermost module with a name, and the action of the pipeline, if any, that a frame is in."""
        module = action = ""
        while frame is not None and not (module and action):
            local = frame.f_locals
            module = module or self._names.get(id(local.get("self")), "")
            if type(local.get("action")).__name__ == "Action":
                action = action or str(local["action"])
            frame = frame.f_back
        return module, action


def _name_of(line: MessageChannel) -> str:
    """A name that its two ranks agree on."""
    return f"{line.axis} {line.tag} {line.source}>{line.target}"


def _messages_waited_for() -> Iterator[JoinedCollective]:
    for each in waited_for():
        line = each.line
        yield JoinedCollective(each.what, each.number, _name_of(line), line.axis, (line.source, line.target), True)


class NoMonitor:
    """Where nothing is watched."""

    def enter(self, phase: Phase, step: int) -> None:
        """Nothing."""

    def name_modules(self, parts: Iterable[nn.Module]) -> None:
        """Nothing."""


AnyMonitor = Monitor | NoMonitor


@contextmanager
def monitored(out: Path, rank: int, layout: Layout, device: torch.device, hang_after_s: float) -> Iterator[AnyMonitor]:
    """The monitor of a run while it goes on. One rank waits for no other, and a process that runs nothing else than
    this one cannot be ended for it: it is not watched."""
    if layout.world_size == 1:
        yield NoMonitor()
        return
    monitor = Monitor(out, rank, layout, device, hang_after_s)
    with cleaning_up(monitor.close):
        yield monitor
