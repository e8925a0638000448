"""The state of each rank of a run, written to files in the run's folder, and the diagnosis of a hang.

    OUT/ranks/rank-R.json      constant data: host, process id, device, coordinates in the layout
    OUT/ranks/rank-R.state     step, phase and its start time, written by the training thread at each change through
                               shared memory, so that it can be read when the process is stopped or dead
    OUT/ranks/asked            exists while a process requests the dumps of all ranks
    OUT/ranks/rank-R.dump      the dump of rank R: its Python stack and its collectives

No torch: the launcher reads these files, too.
"""

import json
import mmap
import os
import shutil
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pydantic import TypeAdapter

from shardwright.system.files import inside, open_regular, read_bytes, write_whole
from shardwright.system.processes import ranks_in_words

RANKS = "ranks"
Phase = Literal["start", "agreement", "data", "forward_backward", "optimizer", "log", "evaluation", "checkpoint"]
"""Phases of a run. `agreement`: agree on whether a signal asked to stop; `log`: read values back from the device."""
PHASES_SEEN: tuple[Phase, ...] = get_args(Phase)
FIRST_LIMIT_S = 600.0
"""Time limit of a phase that has not been timed yet, in seconds: compilation, first batch, first checkpoint."""
TIMES_LARGEST = 5.0
"""Time limit of a phase as a multiple of its longest measured time (nvidia-resiliency-ext: the same factor)."""
NOT_TIMED = 1
"""Number of first turns of a phase that are not timed, since they build, compile and warm up."""
FEW_TURNS = 3
"""Number of turns of a phase during which `FIRST_LIMIT_S` applies."""
_PLACE = struct.Struct("<qqdd")
_BEAT = struct.Struct("<qd128s")
_HEARD_S = 5.0
"""Timeout for the dumps of ranks, in seconds."""


@dataclass(frozen=True)
class RankState:
    """The last reported state of a rank.

    `beats`: beats of its monitor. `step`: optimizer steps started. `since_s`: start of the phase on the monotonic clock
    of its machine. `limit_s`: time limit of the phase. `line`: the Python line last seen in this phase, or "".
    """

    beats: int
    step: int
    phase: str
    since_s: float
    limit_s: float
    line: str

    def over_s(self, now_s: float) -> float:
        """Return by how many seconds the phase exceeds its time limit at `now_s`."""
        return now_s - self.since_s - self.limit_s


class RankStateFile:
    """The state file of a rank, open for writing or reading."""

    def __init__(self, path: Path, writes: bool) -> None:
        size = _PLACE.size + _BEAT.size
        if writes:
            write_whole(path, bytes(size))  # by rename: a reader that has mapped an earlier process's file keeps it
        with path.open("r+b") if writes else open_regular(path) as file:
            access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
            self._memory = mmap.mmap(file.fileno(), size, access=access)

    def place(self, step: int, phase: Phase, since_s: float, limit_s: float) -> None:
        """Write the step and phase from the training thread: a few microseconds, no system call."""
        _PLACE.pack_into(self._memory, 0, step, PHASES_SEEN.index(phase), since_s, limit_s)

    def beat(self, beats: int, since_s: float, line: str) -> None:
        """Write a beat from the monitor's thread, which saw `line` in the phase that started at `since_s`."""
        _BEAT.pack_into(self._memory, _PLACE.size, beats, since_s, line.encode()[:128])

    def read(self) -> RankState:
        step, phase, since_s, limit_s = _PLACE.unpack_from(self._memory, 0)
        beats, seen_since_s, line = _BEAT.unpack_from(self._memory, _PLACE.size)
        if seen_since_s != since_s:  # an earlier phase
            line = b""
        name = PHASES_SEEN[phase] if 0 <= phase < len(PHASES_SEEN) else "start"
        return RankState(beats, step, name, since_s, limit_s, line.rstrip(b"\0").decode(errors="replace"))


@dataclass(frozen=True)
class RankIdentity:
    """The constant data of a rank: where it runs, and its coordinates along the axes of the layout."""

    rank: int
    host: str
    pid: int
    device: str
    at: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class JoinedCollective:
    """An incomplete collective that a rank has joined, or an incomplete message that a rank waits for.

    A collective has number `number` in the process group of `ranks`; `axes` names the axes in words. A message goes
    from the first to the second of two `ranks` and has number `number` among the messages of its kind between them;
    both ranks must start it.
    """

    name: str
    number: int
    group: str
    axes: str
    ranks: tuple[int, ...]
    is_message: bool = False


@dataclass(frozen=True)
class RankDump:
    """The dump of a rank.

    `line`: current file, line and function in Shardwright's own code. `waits`: whether the rank is in a collective or a
    message. `stack`: of its training thread. `pending`: a message that it waits for, then incomplete collectives that
    it has joined, oldest first. `joined`: process group -> number of the last collective or message that the rank has
    joined or started. `for_s`: time in its phase in seconds, by its machine's clock.
    """

    line: str
    waits: bool
    module: str
    action: str
    stack: str
    pending: tuple[JoinedCollective, ...]
    joined: dict[str, int]
    for_s: float | None = None


_IDENTITY, _DUMP = TypeAdapter(RankIdentity), TypeAdapter(RankDump)


class RanksFolder:
    """The folder OUT/ranks."""

    def __init__(self, out: Path) -> None:
        self.path = inside(out, RANKS)

    def state_of(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.state"

    def introduce(self, identity: RankIdentity) -> RankStateFile:
        """Write the rank's constant data and open its state file for writing."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in (self.path / f"rank-{identity.rank}.dump", self.path / "asked"):
            path.unlink(missing_ok=True)
        reported = RankStateFile(self.state_of(identity.rank), writes=True)
        write_whole(self.path / f"rank-{identity.rank}.json", json.dumps(asdict(identity)).encode())
        return reported

    def forget(self, rank: int) -> None:
        """Remove the files of a rank, and the folder after the last rank's files."""
        for name in ("json", "state", "dump"):
            (self.path / f"rank-{rank}.{name}").unlink(missing_ok=True)
        (self.path / "asked").unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError:
            return

    def identity(self, rank: int) -> RankIdentity | None:
        return _read(_IDENTITY, self.path / f"rank-{rank}.json")

    def state(self, rank: int) -> RankState | None:
        """Return the last reported state of a rank, or None before its first report."""
        try:
            return RankStateFile(inside(self.path, self.state_of(rank).name), writes=False).read()
        except (OSError, ValueError):
            return None

    def clear(self) -> None:
        """Remove the files of an earlier run, before ranks are started."""
        shutil.rmtree(self.path, ignore_errors=True)

    def ask(self) -> None:
        """Request a dump from all ranks."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "asked").touch()

    def take_back(self) -> None:
        """Withdraw the request by deleting the `asked` file."""
        (self.path / "asked").unlink(missing_ok=True)

    @property
    def dump_requested(self) -> bool:
        return (self.path / "asked").exists()

    def answer(self, rank: int, dump: RankDump) -> None:
        write_whole(self.path / f"rank-{rank}.dump", json.dumps(asdict(dump)).encode())

    def answers(self, ranks: Sequence[int], mute: Sequence[int] = ()) -> dict[int, RankDump]:
        """Return the dumps of `ranks`, waiting for the ranks that are not in `mute`."""
        until = time.monotonic() + _HEARD_S
        while True:
            dumps = {rank: dump for rank in ranks if (dump := _read(_DUMP, self.path / f"rank-{rank}.dump"))}
            if time.monotonic() > until or dumps.keys() >= set(ranks) - set(mute):
                return dumps
            time.sleep(0.05)


def _read(adapter, path: Path):  # type: ignore[no-untyped-def]
    try:
        return adapter.validate_json(read_bytes(inside(path.parent, path.name)))
    except (OSError, ValueError):
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by a signal or a debugger."""
    return _kernel_state(pid) in ("T", "t")


def is_dead(pid: int) -> bool:
    """Return whether no process of this machine has this pid any more."""
    return _kernel_state(pid) in ("", "Z", "X")


def _kernel_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def describe(
    states: Mapping[int, RankState],
    identities: Mapping[int, RankIdentity],
    dumps: Mapping[int, RankDump],
    fates: Mapping[int, str],
    now_s: float,
) -> tuple[list[int], str]:
    """Return the ranks that block the others, and a full description of the hang.

    `fates`: state of ranks that cannot answer: stopped, dead, unreachable. A rank blocks others if it answered and is
    not in a collective or message, or if it cannot answer; in the wait-for graph these ranks wait for no rank. If all
    ranks wait, then either they have joined different collectives, or a collective that all its ranks have joined does
    not complete.
    """
    ranks = sorted(states)
    gone = [rank for rank in ranks if rank in fates]
    busy = [rank for rank in ranks if rank in dumps and not dumps[rank].waits]
    blamed = gone or busy or [rank for rank in ranks if rank not in dumps]
    lines = []
    if blamed:
        lines.append(f"no progress: {ranks_in_words(blamed)} {'holds' if len(blamed) == 1 else 'hold'} up the others")
    elif stuck := _joined_by_all(dumps):
        where = _between(stuck, identities)
        lines.append(f"no progress: all ranks wait, and messages between them do not arrive{where}")
        begun = "both ranks have started" if stuck.is_message else "all of its ranks have joined"
        lines.append(f"  {begun} {in_words(stuck)}, and it does not {'arrive' if stuck.is_message else 'end'}")
    else:
        lines.append("no progress: all ranks wait, for collectives that others have not joined")
    shown = blamed[:SHOWN]
    for rank in shown:
        lines.append(f"  {_described_rank(rank, states, identities, dumps, fates, now_s)}")
        lines += [f"    never {missed}" for missed in _missed(rank, dumps)]
    lines += _waiting([rank for rank in ranks if rank not in blamed], states, dumps)
    alike: dict[str, list[int]] = {}
    for rank in (rank for rank in ranks if rank in dumps and rank not in blamed):
        alike.setdefault(dumps[rank].stack, []).append(rank)
    classes = sorted(alike.values(), key=lambda members: (len(members), members))
    for members in [*[[rank] for rank in shown if rank in dumps], *classes[:SHOWN]]:
        lines.append(f"--- Python stack of {ranks_in_words(members)} ---\n{dumps[members[0]].stack.rstrip()}")
    return blamed, "\n".join(lines)


SHOWN = 4
"""Maximum number of described ranks at fault, and of the other classes of ranks with equal stacks, smallest first."""


def _described_rank(
    rank: int,
    states: Mapping[int, RankState],
    identities: Mapping[int, RankIdentity],
    dumps: Mapping[int, RankDump],
    fates: Mapping[int, str],
    now_s: float,
) -> str:
    """Return the description of one rank: its fate, its host and its current position."""
    state, who, dump = states[rank], identities.get(rank), dumps.get(rank)
    runs = "does not answer" if dump is None else "runs, and does not come to where the others wait"
    words = [f"rank {rank} {fates.get(rank, runs)}"]
    if who is not None:
        at = " ".join(f"{axis}={n}" for axis, n in who.at.items())
        words.append(f"{who.device} of {who.host}, process {who.pid}" + (f" ({at})" if at else ""))
    # The monotonic clocks of two machines have different origins.
    is_local = who is None or who.host == os.uname().nodename
    for_s = dump.for_s if dump is not None and dump.for_s is not None else now_s - state.since_s if is_local else 0.0
    took = f" for {for_s:.1f} s" if 0 < for_s < 1e6 else ""
    words.append(f"step {state.step + 1}, {state.phase}{took}")
    if dump is not None:
        words += [word for word in (dump.action and f"action {dump.action}", dump.module) if word]
    if line := (dump.line if dump is not None else state.line):
        words.append(f"at {line}" if dump is not None else f"last seen at {line}")
    return "; ".join(words)


def _missed(rank: int, dumps: Mapping[int, RankDump]) -> list[str]:
    """Return the collectives and messages that other ranks have joined and this rank has not, with waiting ranks."""
    waiting: dict[JoinedCollective, list[int]] = {}
    joined = dumps[rank].joined if rank in dumps else {}
    for other, dump in dumps.items():
        for call in dump.pending:
            if rank in call.ranks and joined.get(call.group, 0) < call.number:
                waiting.setdefault(call, []).append(other)
    first: dict[str, JoinedCollective] = {}
    for call in sorted(waiting, key=lambda call: call.number):
        first.setdefault(call.group, call)
    return [f"{_to_begin(call, rank)} {in_words(call)}, in which {_wait(waiting[call])}" for call in first.values()]


def _to_begin(call: JoinedCollective, rank: int) -> str:
    """Return the action that a rank should have taken."""
    if not call.is_message:
        return "joined"
    return "sent" if rank == call.ranks[0] else "took"


def _joined_by_all(dumps: Mapping[int, RankDump]) -> JoinedCollective | None:
    """Return an incomplete collective that all of its ranks have joined, or None. Only the oldest collective of each
    rank counts, since later ones may be queued behind it."""
    stuck = [
        call
        for call in {dump.pending[0] for dump in dumps.values() if dump.pending}
        if all(rank in dumps and dumps[rank].joined.get(call.group, 0) >= call.number for rank in call.ranks)
    ]
    return min(stuck, key=lambda call: (call.group, call.number), default=None)


def _between(call: JoinedCollective, identities: Mapping[int, RankIdentity]) -> str:
    """Return the machines of a collective with the ranks of each; empty for one machine."""
    hosts: dict[str, list[int]] = {}
    for rank in call.ranks:
        if rank in identities:
            hosts.setdefault(identities[rank].host, []).append(rank)
    if len(hosts) < 2:
        return ""
    shown = [f"{host} ({ranks_in_words(ranks)})" for host, ranks in list(hosts.items())[:SHOWN]]
    more = f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else ""
    return f"; is the network up between {', '.join(shown)}{more}?"


def _wait(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(sorted(ranks))} {'waits' if len(ranks) == 1 else 'wait'}"


def in_words(call: JoinedCollective) -> str:
    """Return `all_reduce number 12 of the group of tp (ranks 0, 1)`, or `the input of 1F3, number 7 of the messages of
    pp from rank 0 to rank 2`."""
    if call.is_message:
        source, target = call.ranks
        return f"{call.name}, number {call.number} of the messages of {call.axes} from rank {source} to rank {target}"
    return f"{call.name} number {call.number} of the group of {call.axes} ({ranks_in_words(call.ranks)})"


def _waiting(ranks: Sequence[int], states: Mapping[int, RankState], dumps: Mapping[int, RankDump]) -> list[str]:
    """Return lines for the waiting ranks; ranks at the same place share a line."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        dump = dumps.get(rank)
        line = dump.line if dump is not None else states[rank].line
        places.setdefault(f"step {states[rank].step + 1}, {states[rank].phase}, at {line}", []).append(rank)
    groups = sorted(places.items(), key=lambda item: len(item[1]))
    return [f"  {_wait(members)}: {place}" for place, members in groups[: 2 * SHOWN]]


class RanksWatch:
    """The view that a launcher process has of its ranks on this machine."""

    def __init__(self, out: Path, world_size: int) -> None:
        self.folder, self.world_size = RanksFolder(out), world_size
        self._open: dict[int, RankStateFile] = {}
        self._looked_s = time.monotonic()
        self._lost_s = 0.0
        self._late = False

    def states(self) -> dict[int, RankState]:
        """Return the last state of each rank that has reported."""
        for rank in range(self.world_size):
            if rank not in self._open:
                try:
                    self._open[rank] = RankStateFile(self.folder.state_of(rank), writes=False)
                except (OSError, ValueError):
                    continue
        return {rank: state for rank, file in self._open.items() if (state := file.read()).since_s > 0}

    def hang(self) -> tuple[list[int], str] | None:
        """Return the ranks at fault and the description once a rank exceeds its time limit, otherwise None."""
        now_s = time.monotonic()
        gap_s = now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > SUSPENDED_S:  # this process was suspended, perhaps together with the ranks
            self._lost_s = now_s
        # Twice in a row, because a state may be read while it is written.
        late, self._late = self._late, self._is_late(now_s)
        if not (late and self._late):
            return None
        result = self.compared(self.states())
        if self._is_late(time.monotonic()):
            return result
        self.folder.take_back()  # it continues after all
        return None

    def _is_late(self, now_s: float) -> bool:
        states = self.states().values()
        return any(s.limit_s and now_s > max(s.since_s, self._lost_s) + s.limit_s for s in states)

    def compared(self, states: Mapping[int, RankState]) -> tuple[list[int], str]:
        """Request a dump from all ranks and compare the dumps."""
        self.folder.ask()
        identities = {rank: who for rank in states if (who := self.folder.identity(rank))}
        fates = {rank: fate for rank, who in identities.items() if (fate := fate_of(who))}
        dumps = self.folder.answers(list(states), mute=list(fates))
        dumps = {rank: dump for rank, dump in dumps.items() if rank not in fates}
        return describe(self.states(), identities, dumps, fates, time.monotonic())


SUSPENDED_S = 5.0
"""Seconds between two checks, normally fractions of a second apart, that mean that this process was suspended."""


def fate_of(who: RankIdentity) -> str:
    """Return why a rank of this machine cannot answer; "" if it can, or if it is on another machine."""
    if who.host != os.uname().nodename:
        return ""
    if is_dead(who.pid):
        return "is dead"
    return "is stopped (SIGSTOP, or a debugger)" if is_stopped(who.pid) else ""
