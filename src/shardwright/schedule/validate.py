"""Checks whether a schedule can be run: complete, in order, one rank for a stage and micro-batch, and no deadlock.

`play` starts every action as early as possible; in a deadlock it stops.

Positions number a rank's actions from 0.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from shardwright.schedule.actions import OPS, Action, Op, Result, Schedule

Place = tuple[int, int]
"""A rank and a position in its list."""


def problems(schedule: Schedule) -> list[str]:
    """Return every reason why a schedule cannot be run, one line each; empty for a valid one.

    Deadlock is checked only if the actions themselves are valid. Messages cannot cause one, even if a send waits for
    its receiver: see `messages.with_messages`.
    """
    if outside := list(_outside(schedule)):
        return outside
    n_actions, pairs = sum(map(len, schedule.ranks)), schedule.n_stages * schedule.n_microbatches
    if n_actions < pairs:
        return [
            f"the ranks have {n_actions} actions, but {schedule.n_stages} stages x {schedule.n_microbatches} "
            f"microbatches need {2 * pairs} or more, an F and a B for each; is the highest stage "
            f"({schedule.n_stages - 1}) or microbatch ({schedule.n_microbatches - 1}) a mistake?"
        ]
    first: dict[Action, Place] = {}
    broken = []
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action in first:
                broken.append(
                    f"{_place(rank, position)}: {action} comes a second time; first: {_place(*first[action])}"
                )
            first.setdefault(action, (rank, position))
    broken += [*_missing(schedule, first), *_out_of_place(first)]
    if not broken:
        stuck = deadlock(schedule)
        broken += [stuck] if stuck else []
    return broken


def _outside(schedule: Schedule) -> Iterator[str]:
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            for what, value, count in (
                ("stage", action.stage, schedule.n_stages),
                ("microbatch", action.microbatch, schedule.n_microbatches),
            ):
                if not 0 <= value < count:
                    yield f"{_place(rank, position)}: {action} is of {what} {value}; valid: 0 to {count - 1}"
            if action.op not in OPS:
                yield f"{_place(rank, position)}: {action} has op {action.op!r}; valid: {', '.join(OPS)}"


def _missing(schedule: Schedule, first: dict[Action, Place]) -> Iterator[str]:
    """Yield actions that are missing, and backward passes that are both whole and split."""
    lacking: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.n_microbatches):
            f, b, i, w = (Action(stage, op, microbatch) in first for op in OPS)
            complaints = {
                "no F": not f,
                "no backward pass, neither B nor I and W": not (b or i or w),
                "I without W": i and not w,
                "W without I": w and not i,
                "B as well as I or W, which are its two parts": b and (i or w),
            }
            for words, true in complaints.items():
                if true:
                    lacking[stage, words].append(microbatch)
    for (stage, words), microbatches in lacking.items():
        plural = "microbatches" if len(microbatches) > 1 else "microbatch"
        yield f"stage {stage}: {words}, for {plural} {_ranges(microbatches)}"


def _out_of_place(first: dict[Action, Place]) -> Iterator[str]:
    """Yield actions on another rank than the forward action, or before the action of their stage that they need."""
    for action, (rank, position) in first.items():
        stage, op, microbatch = action
        forward = Action(stage, "F", microbatch)
        if op == "F" or forward not in first:
            continue
        if first[forward][0] != rank:
            yield (
                f"{_place(rank, position)}: {action} is on another rank than its forward {forward} "
                f"({_place(*first[forward])}), which keeps the activations"
            )
            continue
        needed = Action(stage, "I", microbatch) if op == "W" else forward
        if needed in first and first[needed][0] == rank and first[needed][1] > position:
            what = "input gradient" if op == "W" else "forward"
            yield f"{_place(rank, position)}: {action} comes before its {what} {needed}, at position {first[needed][1]}"


def deadlock(schedule: Schedule) -> str | None:
    """Return why the ranks deadlock: a cycle of waiting ranks, or a missing action; None if they do not."""
    where = {
        action.makes: (rank, position)
        for rank, actions in enumerate(schedule.ranks)
        for position, action in enumerate(actions)
    }
    _, ends = play(schedule, dict.fromkeys(OPS, [0.0] * schedule.n_stages))
    at = list(map(len, ends))
    stuck: dict[int, Result] = {
        rank: needed
        for rank, actions in enumerate(schedule.ranks)
        if at[rank] < len(actions) and (needed := schedule.waits_for(actions[at[rank]])) is not None
    }
    if not stuck:
        return None
    chain: list[int] = []
    rank = min(stuck)
    while rank not in chain:
        chain.append(rank)
        if stuck[rank] not in where:
            return f"ranks wait for ever: {_step(schedule, rank, at, stuck[rank], None)}"
        rank = where[stuck[rank]][0]
    circle = chain[chain.index(rank) :]
    return "ranks wait for one another: " + "; ".join(
        _step(schedule, rank, at, stuck[rank], where[stuck[rank]]) for rank in circle
    )


def _step(schedule: Schedule, rank: int, at: list[int], needed: Result, place: Place | None) -> str:
    stage, op, microbatch = needed
    result = f"{stage}{op}{microbatch}" if place is None else str(schedule.ranks[place[0]][place[1]])
    source = "which no rank does" if place is None else f"at {_place(*place)}"
    return f"{_place(rank, at[rank])}: {schedule.ranks[rank][at[rank]]} waits for {result}, {source}"


def _place(rank: int, position: int) -> str:
    return f"rank {rank}, position {position}"


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text like `0 to 3, 7`: consecutive ones are written as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def play(
    schedule: Schedule, durations: Mapping[Op, Sequence[float]], comm: float = 0.0
) -> tuple[list[list[float]], list[list[float]]]:
    """Return starts and ends of the actions of every rank, from 0; after a deadlock there are fewer than actions.

    An action starts when the previous one on its rank has ended and its input is available: `comm` after the end of the
    action that computed it, if that ran on another rank. `durations`: of each op in every stage. The run time is linear
    in the number of actions. Raises ScheduleError for an action with a stage or micro-batch out of range.
    """
    needs, makes, n_results = schedule.numbered
    ended: list[float] = [-1.0] * n_results
    maker: list[int] = [0] * n_results
    waiting: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    runnable = deque(range(schedule.n_ranks))
    while runnable:
        rank = runnable.popleft()
        my_starts, my_ends = starts[rank], ends[rank]
        clock = my_ends[-1] if my_ends else 0.0
        actions, my_needs, my_makes = schedule.ranks[rank], needs[rank], makes[rank]
        for position in range(len(my_ends), len(actions)):
            need = my_needs[position]
            if need >= 0:
                ready = ended[need]
                if ready < 0.0:
                    waiting.setdefault(need, []).append(rank)
                    break
                if maker[need] != rank:
                    ready += comm
                if ready > clock:
                    clock = ready
            my_starts.append(clock)
            stage, op, _ = actions[position]
            clock += durations[op][stage]
            my_ends.append(clock)
            made = my_makes[position]
            ended[made] = clock
            maker[made] = rank
            if made in waiting:
                runnable.extend(waiting.pop(made))
    return starts, ends
