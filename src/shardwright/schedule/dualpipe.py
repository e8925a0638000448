"""Schedules in which a rank holds an early and a late stage of the model: ZB-V, DualPipe, DualPipeV.

Each rank has forward and backward passes of both stages to run where it would otherwise be idle. It runs two queues of
micro-batches, 0 and 1, each on its own stage:

| schedule   | stages | queue 0                               | queue 1                                    |
| ---------- | ------ | ------------------------------------- | ------------------------------------------ |
| zb-v       | 2p     | stage r, in the first half of a route | stage 2p-1-r, in the second half of it     |
| dualpipe-v | 2p     | the same                              | the same                                   |
| dualpipe   | p      | the half of the micro-batches that    | the half that enters at the other end, on  |
|            |        | enters at the nearer end of the ranks | the other of the rank's two stages         |

With p ranks, F = I >= W the times of all stages of a rank for one micro-batch, no time for messages, no overlap of
actions, and 2p micro-batches or more:

| schedule   | idle time of a rank | in flight | waiting for W on rank r | source                                    |
| ---------- | ------------------- | --------- | ----------------------- | ----------------------------------------- |
| zb-v       | 0, for F = I = W    | p         | r + 1/2                 | Qi et al., arXiv 2401.10241 v2, section 6 |
| dualpipe-v | (p-1)(F+I-W)/2      | p + 1/2   | (r + 1)/2               | DeepSeek's DualPipe repository            |
| dualpipe   | (p/2-1)(F+I-W)      | p + 1     | min(r, p-1-r) + 1       | DeepSeek-V3, arXiv 2412.19437, s. 3.2.1   |

In flight and waiting are maxima over the step, in micro-batches of 1/p of the layers (see `memory`).

DeepSeek-V3 gives (p/2-1)(F&B + B - 3W) for DualPipe, with F&B the time of a forward and a backward pass run as one and
B = I + W. Run one after the other, F&B takes F + I + W, but F need not wait for the input of B, nor the result of F for
the end of B: that leaves the idle time in the table. The pairs to overlap are an F and the B right after it.
"""

from collections import Counter
from collections.abc import Iterator

from shardwright.schedule.actions import Action, Op, Schedule, make

Steps = Iterator[tuple[str, int]]


def zb_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """Put two stages on each rank along a V: the second half of the stages is on the ranks in reverse order. So rank 0
    holds the first and the last stage, and all ranks have the same number of activations."""
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
    """Run DualPipe with one replica of the model: two stages a rank along a V."""
    laid_out = max(n_microbatches, 2 * n_ranks - 1)
    ranks = [_along_v(n_ranks, r, n_microbatches, _both_ends(n_ranks, r, laid_out)) for r in range(n_ranks)]
    return make(2 * n_ranks, n_microbatches, ranks)


def dualpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """Run two replicas of the model, with stages on the ranks in opposite orders; each runs half of the micro-batches.

    n_ranks and n_microbatches are even. Micro-batches below n_microbatches / 2 run stage s on rank s, the others on
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
    """Yield DualPipe's steps for rank r of the n ranks from one end to the middle, with `laid_out` micro-batches in
    each queue."""
    yield "F0", 2 * (n - 1 - r)
    yield "F0 F1", r + 1
    yield "I1 W F1", n - 1 - r
    yield "F0 B1 F1 B0", laid_out - 2 * n + r + 1
    yield "B1 F1 B0", n - 1 - r
    # In the second half of these steps, I instead of B gives other ranks their gradients early, and W fills idle time.
    yield "B1 B0", (r + 1) // 2
    yield "B1 I0", (r + 1) % 2
    yield "I1 I0", (r + 1) // 2
    yield "W I0", n - 1 - r
    yield "W", r + 1


def _along_v(n_ranks: int, rank: int, n_microbatches: int, steps: Steps) -> list[Action]:
    """Return the actions of a rank that holds stages `rank` and 2 n_ranks - 1 - `rank`."""
    stages = rank, 2 * n_ranks - 1 - rank
    return [Action(stages[line], op, i) for op, line, i in _expand(steps) if i < n_microbatches]


def _expand(steps: Steps) -> Iterator[tuple[Op, int, int]]:
    """Yield (op, queue, micro-batch) of steps. A step is ops with their queues, like `F0 B1`, and a repeat count.

    A queue runs its micro-batches in order; `W` without a queue is the oldest deferred weight gradient of either queue.

    The steps need a minimum number of micro-batches. A builder lays out at least that many and leaves out the actions
    of micro-batches beyond the requested number: micro-batches are independent, so the schedule remains valid.
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
