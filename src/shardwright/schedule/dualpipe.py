"""Schedules in which a microbatch reaches one stage of a rank early and the other late: ZB-V, DualPipe, DualPipeV.

Work from both ends of the model meets on every rank, so that there is some of each kind to fill a wait with. A rank
serves two lines of work, 0 and 1, each with a stage and an order of microbatches of its own:

| schedule   | stages | line 0                                | line 1                                     |
| ---------- | ------ | ------------------------------------- | ------------------------------------------ |
| zb-v       | 2p     | stage r, on the way down the ranks    | stage 2p-1-r, on the way back up           |
| dualpipe-v | 2p     | the same                              | the same                                   |
| dualpipe   | p      | the half of the microbatches that     | the half that enters at the other end, in  |
|            |        | enters at the nearer end of the ranks | the other of the two stages the rank holds |

With p ranks, F = I >= W the times of a rank's share of a microbatch, no time for messages, nothing overlapped, and 2p
microbatches or more:

| schedule   | idle time of a rank | in flight | waiting for W on rank r | source                                    |
| ---------- | ------------------- | --------- | ----------------------- | ----------------------------------------- |
| zb-v       | 0, for F = I = W    | p         | r + 1/2                 | Qi et al., arXiv 2401.10241 v2, section 6 |
| dualpipe-v | (p-1)(F+I-W)/2      | p + 1/2   | (r + 1)/2               | DeepSeek's DualPipe repository            |
| dualpipe   | (p/2-1)(F+I-W)      | p + 1     | min(r, p-1-r) + 1       | DeepSeek-V3, arXiv 2412.19437, s. 3.2.1   |

Both are the most at once, in microbatches of a rank's share of the layers (as `memory` counts them).

DeepSeek-V3 gives (p/2-1)(F&B + B - 3W) for DualPipe, with F&B the time of a forward and a backward pass run as one and
B = I + W. Run one after the other, F&B takes F + I + W, but F need not wait for what B needs, nor its result for the
end of B: that leaves the idle time in the table. The pairs to overlap are an F and the B right after it.
"""

from collections import Counter
from collections.abc import Iterator

from shardwright.schedule.actions import Action, Op, Schedule, make

Steps = Iterator[tuple[str, int]]


def zb_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """Two stages a rank along a V: the second half of the model comes back up the ranks, so that the rank that makes
    the first gradient is the one with the first stages too, and all ranks hold the same number of activations."""
    p, laid_out = n_ranks, max(n_microbatches, 2 * n_ranks - 1)

    def steps(r: int) -> Steps:
        yield "F0", 2 * (p - r) - 1
        yield "F1 F0", r
        yield "F1 I1 W", p - r
        yield "F0 I0 W F1 I1 W", laid_out - 2 * p + r + 1
        yield "I0 W F1 I1 W", p - r - 1
        yield "I0 I1", r
        yield "I0 W", p - r
        yield "W", 2 * r

    ranks = [_along_v(p, r, n_microbatches, steps(r)) for r in range(p)]
    return make(2 * p, n_microbatches, ranks)


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """DualPipe with one copy of the model: its ranks folded at the middle, two stages a rank along a V."""
    laid_out = max(n_microbatches, 2 * n_ranks - 1)
    ranks = [_along_v(n_ranks, r, n_microbatches, _both_ends(n_ranks, r, laid_out)) for r in range(n_ranks)]
    return make(2 * n_ranks, n_microbatches, ranks)


def dualpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """Two copies of the model, laid over the ranks in opposite directions, each fed half of the microbatches.

    n_ranks and n_microbatches are even. Microbatches below n_microbatches / 2 find stage s on rank s, the others on
    rank n_ranks - 1 - s.
    """
    half = n_microbatches // 2
    laid_out = max(half, n_ranks - 1)
    ranks = []
    for rank in range(n_ranks):
        opposite = n_ranks - 1 - rank
        from_end = min(rank, opposite)
        actions = []
        for op, line, microbatch in _expand(_both_ends(n_ranks // 2, from_end, laid_out)):
            down = (line == 0) == (rank < opposite)
            if microbatch < half:
                actions.append(Action(rank, op, microbatch) if down else Action(opposite, op, half + microbatch))
        ranks.append(actions)
    return make(n_ranks, n_microbatches, ranks)


def _both_ends(n: int, r: int, laid_out: int) -> Steps:
    """DualPipe for the rank r steps from the end of n ranks up to the middle, `laid_out` microbatches a line."""
    yield "F0", 2 * (n - 1 - r)
    yield "F0 F1", r + 1
    yield "I1 W F1", n - 1 - r
    yield "F0 B1 F1 B0", laid_out - 2 * n + r + 1
    yield "B1 F1 B0", n - 1 - r
    # From the middle of these on only what others wait for is computed, and W fills the waits.
    yield "B1 B0", (r + 1) // 2
    yield "B1 I0", (r + 1) % 2
    yield "I1 I0", (r + 1) // 2
    yield "W I0", n - 1 - r
    yield "W", r + 1


def _along_v(n_ranks: int, rank: int, n_microbatches: int, steps: Steps) -> list[Action]:
    """The actions of a rank that holds stage `rank` and the stage that faces it across the V."""
    stages = rank, 2 * n_ranks - 1 - rank
    return [Action(stages[line], op, i) for op, line, i in _expand(steps) if i < n_microbatches]


def _expand(steps: Steps) -> Iterator[tuple[Op, int, int]]:
    """(op, line, microbatch) of steps, each words like `F0 B1`, op and line, and how often they are repeated.

    A line takes its microbatches in order; `W` alone is the weight gradient that has waited longest, of either line.

    The steps need a certain number of microbatches. A builder lays out at least so many, and leaves out those beyond
    the number asked for: different microbatches need nothing of one another, so the rest still runs.
    """
    forward: Counter[int] = Counter()
    backward: Counter[int] = Counter()
    put_off: list[tuple[int, int]] = []
    for words, times in steps:
        for word in words.split() * times:
            if word == "W":
                yield "W", *put_off.pop(0)
                continue
            line = int(word[1])
            counter = forward if word[0] == "F" else backward
            microbatch = counter[line]
            counter[line] += 1
            if word[0] == "F":
                yield "F", line, microbatch
            elif word[0] == "B":
                yield "B", line, microbatch
            else:
                yield "I", line, microbatch
                put_off.append((line, microbatch))
    assert not put_off, put_off
    assert forward == backward, (forward, backward)
