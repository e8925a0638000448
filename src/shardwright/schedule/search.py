"""`auto`: a search for the pipeline schedule with the smallest bubble, for measured times and a memory limit.

Every rank follows a policy of three numbers (`Policy`), which chooses its next action. A simulation of the policies
gives the lists of actions, which cannot deadlock and respect the limit. The search starts from a grid of policies that
are the same for all ranks. It then makes random changes to the policies of single ranks or ranges of ranks and keeps
changes that do not cost more. Finally it compares the result with hand-made schedules. It stops early at a schedule
whose cost is the lower bound `least_cost`: with equal stages and a limit of p or 2p it usually does, if a micro-batch
between I and W keeps all its activations.

The problem and the idea of a greedy schedule per rank: Qi et al., arXiv 2401.10241, section 3.1. Policies, bound and
search are our own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from math import inf
from random import Random
from typing import NamedTuple, TypeVar

from shardwright.schedule.actions import Action, Op, Schedule, make
from shardwright.schedule.basic import deferred
from shardwright.schedule.simulate import KEPT_FOR_WEIGHT, Times, simulate
from shardwright.system.errors import ScheduleError

_T = TypeVar("_T")

_SAME = 1e-9
"""Relative difference below which two costs, sums of floats in different order, are the same."""

_ACTIONS_TRIED = 1_000_000
_FEWEST_TRIES, _MOST_TRIES = 120, 2000
"""Limits on the number of schedules tried: within them, as many as have _ACTIONS_TRIED actions together."""


def search(
    n_ranks: int,
    n_microbatches: int,
    times: Times,
    in_flight_limit: int | None = None,
    *,
    kept_for_weight: float = KEPT_FOR_WEIGHT,
) -> Schedule:
    """Return the schedule "auto": stage s is on rank s, backward passes are split into I and W, ranks are staggered.

    `in_flight_limit`: the maximum activation memory of a rank, in micro-batches in flight; 2 * n_ranks unless given. A
    micro-batch between I and W counts `kept_for_weight` of one in flight, 0 to 1 (see `memory.KEPT_FOR_WEIGHT`; 1 is
    safe).

    The same arguments give the same schedule in every process: nothing depends on clocks or hashes. The cost is never
    above the cost of 1f1b, zb-h1 or zb-h2, if these respect the limit. The search takes about a second, several seconds
    for tens of thousands of actions; less if it reaches the lower bound.

    Raises ScheduleError for counts below 1, a fraction outside 0 to 1, and invalid times.
    """
    limit = 2 * n_ranks if in_flight_limit is None else in_flight_limit
    for name, value in (("n_ranks", n_ranks), ("n_microbatches", n_microbatches), ("in_flight_limit", limit)):
        if value < 1:
            raise ScheduleError(f"{name}={value}; valid: 1 or more")
    if not 0 <= kept_for_weight <= 1:
        raise ScheduleError(f"kept_for_weight={kept_for_weight:g} is a share of activations; valid: 0 to 1")
    problem = ScheduleProblem.from_times(n_ranks, n_microbatches, times, limit, kept_for_weight)
    enough = least_cost(problem) * (1 + _SAME)
    best = _climb(problem, _best_uniform(problem, enough), enough)
    ranks = (_in_order(rank, ops) for rank, ops in enumerate(best.ops))
    candidates = (make(n_ranks, n_microbatches, ranks, staggered=True), *_hand_made(problem))
    return min(candidates, key=lambda schedule: simulate(schedule, times).cost)


class ScheduleProblem(NamedTuple):
    """The input of the search; times by stage, in the unit of `Times`."""

    n_ranks: int
    n_microbatches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    weight: tuple[float, ...]
    comm: float
    limit: int
    kept: float
    """Fraction of a micro-batch's activations that is kept between its I and its W."""

    @classmethod
    def from_times(cls, n_ranks: int, n_microbatches: int, times: Times, limit: int, kept: float) -> "ScheduleProblem":
        """Return a problem with one stage a rank. Raises ScheduleError for invalid times."""
        durations = times.times_by_stage(n_ranks)
        return cls(n_ranks, n_microbatches, durations["F"], durations["I"], durations["W"], times.comm, limit, kept)

    def work(self, rank: int) -> float:
        """Return the busy time of a rank in a step: m(F+I+W)."""
        return self.n_microbatches * (self.forward[rank] + self.backward_input[rank] + self.weight[rank])

    @property
    def most_deferred(self) -> int:
        """The maximum number of micro-batches of a rank with a deferred W when an I ends. During that I its own
        micro-batch counts 1 and the n-1 others at least `kept` each: 1 + (n-1) * kept <= limit."""
        m = self.n_microbatches
        return m if (m - 1) * self.kept <= self.limit - 1 else 1 + int((self.limit - 1) / self.kept + _SAME)


def least_cost(problem: ScheduleProblem) -> float:
    """Return a lower bound on the cost of all schedules that respect the limit, in the unit of the times.

    The cost of a step is the longest time from a rank's first action to its last. For every rank b, with m
    micro-batches, limit L, n = `most_deferred`:

    | symbol     |                                                                                                   |
    | ---------- | ------------------------------------------------------------------------------------------------- |
    | trip       | F_b + sum over later stages of (F + I + 2 comm): least time from b's first F to its first I       |
    | wait       | max(0, trip - min(m, L) F_b): idle time in it, as at most L forward passes come before that I     |
    | R(a)       | sum over stages a to b-1 of (F + I + 2 comm), for a rank a before b                               |
    | held       | trip + I_b + W_b: how long activations of a micro-batch are kept; without W_b if `kept` < 1       |
    | Y          | the least time of I and W that frees memory for the last F: m - L of both if `kept` is 1          |

    the cost is at least

    1.  m (F_b + I_b + W_b) + wait
    2.  bound 1 + R(a) + W_a - n W_b: b starts sum(F + comm) after a; after its last I, b has at most n W to run, while
        a starts its last I sum(I + comm) later and has a W to run after it
    3.  (q + 1) held + r F_b, for m - 1 = q L + r, 0 <= r < L: memory of a micro-batch is reused q + 1 times in sequence
    4.  trip + Y + (m - 1 - L) F_b + trip + I_b + W_b, if m > L: the actions of b between its first I and its last F,
        and the trip of the last micro-batch

    With equal stages, 4 makes zb-h1 optimal among schedules with p micro-batches in flight if F = I, and 2 makes zb-h2
    optimal among schedules with 2p-1, if F + I + 2 comm >= 2 W. None of the four counts idle time of a rank because
    another rank has no memory left, so the bound cannot be reached for L well below p.
    """
    m, limit, kept = problem.n_microbatches, problem.limit, problem.kept
    pairs = zip(problem.forward, problem.backward_input, strict=True)
    round_trips = [f + i + 2 * problem.comm for f, i in pairs]
    rounds, left = divmod(m - 1, limit)
    least = 0.0
    for b in range(problem.n_ranks):
        f, i, w = problem.forward[b], problem.backward_input[b], problem.weight[b]
        trip = f + sum(round_trips[b + 1 :])
        alone = problem.work(b) + max(0.0, trip - min(m, limit) * f)
        least = max(least, alone, (rounds + 1) * (trip + i + (w if kept == 1 else 0.0)) + left * f)
        for a in range(b):
            later = sum(round_trips[a:b]) + problem.weight[a]
            least = max(least, alone + later - problem.most_deferred * w)
        if m > limit:
            room = min(n_i * i + _weights_before_last(problem, n_i) * w for n_i in range(m - limit, m))
            least = max(least, 2 * trip + room + (m - 1 - limit) * f + i + w)
    return least


def _weights_before_last(problem: ScheduleProblem, n_i: int) -> int:
    """Return the least number of W that a rank has run before its last F, after n_i of I: before the F,
    m - 1 - n_i + kept * (n_i - n_w) <= limit - 1."""
    room = problem.limit - problem.n_microbatches + n_i
    deferred = n_i if n_i * problem.kept <= room else int(room / problem.kept + _SAME)
    return n_i - deferred


class Policy(NamedTuple):
    """The rule by which one rank chooses its next action among several that could run, or stays idle."""

    ahead: int
    """Maximum number of forward passes before the first I."""
    prefer: int
    """0: prefer I to F if both could run; 1: prefer F; 2: alternate. If F needs memory first, a W runs instead."""
    gap: float
    """A W runs in an idle gap if no input is known to arrive sooner than this fraction of the W's time."""


def _next_op(
    policy: Policy, turn: bool, output_in: float, gradient_in: float, waiting: bool, room: bool, weight: float
) -> Op | None:
    """Return the next op of a free rank, or None if it stays idle. `output_in`, `gradient_in`: time until the inputs of
    F and I arrive, 0 or less if they have; `turn`: whether I is next in alternation; `waiting`: whether a W could run;
    `room`: whether the limit allows F; `weight`: the time of W."""
    if output_in <= 0 and (room or waiting):
        if gradient_in <= 0 and (policy.prefer == 0 or (policy.prefer == 2 and turn)):
            return "I"
        return "F" if room else "W"
    if gradient_in <= 0:
        return "I"
    coming_in = min(gradient_in, output_in) if room else gradient_in
    return "W" if waiting and coming_in >= policy.gap * weight else None


def _run(problem: ScheduleProblem, policies: list[Policy], at_most: float) -> tuple[float, list[list[Op]]] | None:
    """Simulate the policies; return the cost and each rank's ops in order, or None if the cost is above `at_most`.

    Each op runs the micro-batches in order. A rank chooses when it is free: it knows which inputs have arrived, and
    when the results of the current actions of its neighbours will arrive.
    """
    p, m, forward, backward_input, weight, comm, limit, kept = problem
    seconds: dict[Op, tuple[float, ...]] = {"F": forward, "I": backward_input, "W": weight}
    outputs = [[inf] * (m + 1) for _ in range(p)]
    gradients = [[inf] * (m + 1) for _ in range(p)]
    outputs[0][:m] = [0.0] * m
    n_f, n_i, n_w = [0] * p, [0] * p, [0] * p
    free, idle = [0.0] * p, [0.0] * p
    allowed = [at_most - problem.work(rank) for rank in range(p)]
    turn = [False] * p
    ops: list[list[Op]] = [[] for _ in range(p)]
    events = [(0.0, 0)]
    while events:
        now, rank = heappop(events)
        if now < free[rank]:
            continue
        f, i, w = n_f[rank], n_i[rank], n_w[rank]
        if w == m:
            continue
        policy = policies[rank]
        room = f - i + kept * (i - w) <= limit - 1 + _SAME
        output = outputs[rank][f] if i or f < policy.ahead else inf
        gradient = gradients[rank][i]
        op = _next_op(policy, turn[rank], output - now, gradient - now, i > w, room, weight[rank])
        if op is None:
            coming = min(gradient, output) if room else gradient
            if coming < inf:
                heappush(events, (coming, rank))
            continue
        if f:
            idle[rank] += now - free[rank]
            if idle[rank] > allowed[rank]:
                return None
        end = now + seconds[op][rank]
        if op == "F":
            n_f[rank] = f + 1
            turn[rank] = True
            if rank < p - 1:
                outputs[rank + 1][f] = end + comm
                heappush(events, (max(end + comm, free[rank + 1]), rank + 1))
            else:
                gradients[rank][f] = end
        elif op == "I":
            n_i[rank] = i + 1
            turn[rank] = False
            if rank:
                gradients[rank - 1][i] = end + comm
                heappush(events, (max(end + comm, free[rank - 1]), rank - 1))
        else:
            n_w[rank] = w + 1
        ops[rank].append(op)
        free[rank] = end
        heappush(events, (end, rank))
    assert min(n_w) == m, "a policy has stopped before the last W"
    return max(problem.work(rank) + idle[rank] for rank in range(p)), ops


class _ScheduleResult(NamedTuple):
    cost: float
    policies: list[Policy]
    ops: list[list[Op]]


def _best_uniform(problem: ScheduleProblem, enough: float) -> _ScheduleResult:
    """Return the best policy that is the same for all ranks, except that `ahead` is linear in the rank; ties go to the
    policy with fewer forward passes ahead. Stops as soon as the cost is `enough`."""
    p, m = problem.n_ranks, problem.n_microbatches
    best: _ScheduleResult | None = None
    for step, prefer, gap in product((1, 2, 3, m), (0, 2, 1), (0.0, 0.5, 1.0)):
        policies = [Policy(min(m, 1 + step * (p - 1 - rank)), prefer, gap) for rank in range(p)]
        ran = _run(problem, policies, best.cost if best else inf)
        if ran and (best is None or ran[0] < best.cost * (1 - _SAME)):
            best = _ScheduleResult(ran[0], policies, ran[1])
            if best.cost <= enough:
                break
    assert best is not None, "the first policies have no cost to stay below"
    return best


def _climb(problem: ScheduleProblem, best: _ScheduleResult, enough: float) -> _ScheduleResult:
    """Improve policies by hill climbing: change one to three numbers at random, each for one rank or for a rank and all
    before or after it, and keep the change unless it costs more. Stops when the cost is `enough`, or after a number of
    tries that depends only on the size."""
    p, m = problem.n_ranks, problem.n_microbatches
    random = Random(0)
    for _ in range(min(_MOST_TRIES, max(_FEWEST_TRIES, _ACTIONS_TRIED // (3 * m * p)))):
        if best.cost <= enough:
            break
        policies = list(best.policies)
        for _ in range(_pick(random, (1, 1, 2, 3))):
            rank = _pick(random, range(p))
            ranks = _pick(random, (range(rank, rank + 1), range(rank, rank + 1), range(rank, p), range(rank + 1)))
            match _pick(random, Policy._fields):
                case "ahead":
                    more = _pick(random, (-1, 1))
                    for r in ranks:
                        policies[r] = policies[r]._replace(ahead=min(m, max(1, policies[r].ahead + more)))
                case "prefer":
                    prefer = _pick(random, (0, 1, 2))
                    for r in ranks:
                        policies[r] = policies[r]._replace(prefer=prefer)
                case "gap":
                    gap = _pick(random, range(21)) / 20
                    for r in ranks:
                        policies[r] = policies[r]._replace(gap=gap)
        ran = _run(problem, policies, best.cost)
        if ran:
            best = _ScheduleResult(ran[0], policies, ran[1])
    return best


def _hand_made(problem: ScheduleProblem) -> Iterator[Schedule]:
    """Yield 1f1b, zb-h1, zb-h2 and the next schedule of that series, truncated to the limit: rank r runs F up to
    k(p-1-r) micro-batches ahead of I, and W up to kr behind it."""
    p, m = problem.n_ranks, problem.n_microbatches
    room = problem.limit - 1 if problem.limit < m else 2 * m
    for ahead_step, behind_step in ((1, 0), (1, 1), (2, 2), (3, 3)):
        ranks = []
        for rank in range(p):
            ahead = min(room, m, ahead_step * (p - 1 - rank))
            ranks.append(deferred(rank, m, ahead=ahead, behind=min(room - ahead, m, behind_step * rank)))
        yield make(p, m, ranks, staggered=True)


def _pick(random: Random, choices: Sequence[_T]) -> _T:
    """Return one of the choices; like `Random.choice`, but the same in all versions of Python."""
    return choices[int(random.random() * len(choices))]


def _in_order(stage: int, ops: list[Op]) -> list[Action]:
    """Return the actions of a stage whose ops run the micro-batches in order."""
    done: Counter[Op] = Counter()
    actions = []
    for op in ops:
        actions.append(Action(stage, op, done[op]))
        done[op] += 1
    return actions
