"""Checks whether a schedule can be run: complete, in order, one rank for a stage and micro-batch, and no deadlock.

Positions number a rank's actions from 0.
"""

from collections import defaultdict
from collections.abc import Iterator

from shardwright.schedule.actions import OPS, Action, Result, Schedule
from shardwright.schedule.play import play

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
                broken.append(f"{_at(rank, position)}: {action} comes a second time; first: {_at(*first[action])}")
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
                    yield f"{_at(rank, position)}: {action} is of {what} {value}; valid: 0 to {count - 1}"
            if action.op not in OPS:
                yield f"{_at(rank, position)}: {action} has op {action.op!r}; valid: {', '.join(OPS)}"


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
                f"{_at(rank, position)}: {action} is on another rank than its forward {forward} "
                f"({_at(*first[forward])}), which keeps the activations"
            )
            continue
        needed = Action(stage, "I", microbatch) if op == "W" else forward
        if needed in first and first[needed][0] == rank and first[needed][1] > position:
            what = "input gradient" if op == "W" else "forward"
            yield f"{_at(rank, position)}: {action} comes before its {what} {needed}, at position {first[needed][1]}"


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
    source = "which no rank does" if place is None else f"at {_at(*place)}"
    return f"{_at(rank, at[rank])}: {schedule.ranks[rank][at[rank]]} waits for {result}, {source}"


def _at(rank: int, position: int) -> str:
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
