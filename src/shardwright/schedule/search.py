"""`auto`: the pipeline schedule with the least bubble that a search finds for measured times and a memory limit.

Every rank follows a policy of three numbers (`Policy`) that says what to run next; running the policies against the
clock gives the lists of actions, which cannot deadlock and keep to the limit. The search starts from a grid of simple
policies, then changes those of single ranks or runs of ranks at random and keeps what does not cost more; the
hand-made schedules have the last word. It ends early at a schedule that costs `least_cost`, below which none can be:
with equal stages and a limit of p or 2p, that is the rule if a microbatch that waits for its W keeps everything.

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

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Op, Schedule, make
from shardwright.schedule.memory import KEPT_FOR_WEIGHT
from shardwright.schedule.simulate import Times, simulate
from shardwright.schedule.zero_bubble import deferred

_T = TypeVar("_T")

_SAME = 1e-9
"""Relative difference below which two costs, sums of floats in different order, are the same."""

_ACTIONS_TRIED = 1_000_000
_FEWEST_TRIES, _MOST_TRIES = 120, 2000
"""How many schedules are tried: so many that they have _ACTIONS_TRIED actions together, within limits."""


def search(
    n_ranks: int,
    n_microbatches: int,
    times: Times,
    in_flight_limit: int | None = None,
    *,
    kept_for_weight: float = KEPT_FOR_WEIGHT,
) -> Schedule:
    """The schedule "auto": stage s on rank s, backward passes in I and W, ranks staggered.

    `in_flight_limit`: the most that a rank may hold at once, in microbatches in flight; 2 * n_ranks unless given. One
    that waits for its W counts `kept_for_weight` of one in flight, 0 to 1 (see `memory.KEPT_FOR_WEIGHT`; 1 is safe).

    The same arguments give the same schedule in every process: nothing depends on clocks or hashes. The cost is never
    above that of 1f1b, zb-h1 or zb-h2 where these stay within the limit. Takes about a second, some for ten thousands
    of actions; a few schedules' time where the lower bound is met.

    Raises ScheduleError for counts below 1, a share outside 0 to 1, and times that do not fit.
    """
    limit = 2 * n_ranks if in_flight_limit is None else in_flight_limit
    for name, value in (("n_ranks", n_ranks), ("n_microbatches", n_microbatches), ("in_flight_limit", limit)):
        if value < 1:
            raise ScheduleError(f"{name}={value}; valid: 1 or more")
    if not 0 <= kept_for_weight <= 1:
        raise ScheduleError(f"kept_for_weight={kept_for_weight:g} is a share of activations; valid: 0 to 1")
    problem = Problem.of(n_ranks, n_microbatches, times, limit, kept_for_weight)
    enough = least_cost(problem) * (1 + _SAME)
    found = _climb(problem, _best_uniform(problem, enough), enough)
    ranks = (_in_order(rank, ops) for rank, ops in enumerate(found.ops))
    candidates = (make(n_ranks, n_microbatches, ranks, staggered=True), *_hand_made(problem))
    return min(candidates, key=lambda schedule: simulate(schedule, times).cost)


class Problem(NamedTuple):
    """What is asked for; times by stage, in the unit of `Times`."""

    n_ranks: int
    n_microbatches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    weight: tuple[float, ...]
    comm: float
    limit: int
    kept: float
    """Share of a microbatch's activations held between its I and its W."""

    @classmethod
    def of(cls, n_ranks: int, n_microbatches: int, times: Times, limit: int, kept: float) -> "Problem":
        """One stage a rank. Raises ScheduleError for times that do not fit."""
        of = times.of_stages(n_ranks)
        return cls(n_ranks, n_microbatches, of["F"], of["I"], of["W"], times.comm, limit, kept)

    def work(self, rank: int) -> float:
        """The time a rank is busy in a step: m(F+I+W)."""
        return self.n_microbatches * (self.forward[rank] + self.backward_input[rank] + self.weight[rank])

    @property
    def most_put_off(self) -> int:
        """The most microbatches of a rank that can wait for their W when an I ends. During that I its microbatch
        counts whole, the n-1 others at least `kept` each: 1 + (n-1) * kept <= limit."""
        m = self.n_microbatches
        return m if (m - 1) * self.kept <= self.limit - 1 else 1 + int((self.limit - 1) / self.kept + _SAME)


def least_cost(problem: Problem) -> float:
    """A cost that no schedule within the limit is below, in the unit of the times.

    The cost of a step is the longest time from a rank's first action to its end. For every rank b, with m
    microbatches, limit L, n = `most_put_off`:

    | symbol     |                                                                                                   |
    | ---------- | ------------------------------------------------------------------------------------------------- |
    | way        | F_b + sum over later stages of (F + I + 2 comm): from b's first F to its first I, at the least    |
    | wait       | max(0, way - min(m, L) F_b): idle then, for no more than L forward passes can come before that I  |
    | R(a)       | sum over stages a to b-1 of (F + I + 2 comm), for a rank a before b                               |
    | place      | way + I_b + W_b: how long a microbatch is held; without W_b if `kept` < 1                         |
    | Y          | the least time of I and W that makes room for the last F: m - L of both if `kept` is 1            |

    the cost is at least

    1.  m (F_b + I_b + W_b) + wait
    2.  that + R(a) + W_a - n W_b: b begins sum(F + comm) after a; after its last I, b has no more than n W to run,
        while a gets its last I sum(I + comm) later and has a W to run after it
    3.  (q + 1) place + r F_b, for m - 1 = q L + r, 0 <= r < L: a place is taken q + 1 times, one after another
    4.  way + Y + (m - 1 - L) F_b + way + I_b + W_b, if m > L: what b runs between its first I and its last F, and
        the way of the last microbatch

    With equal stages, 4 makes zb-h1 optimal among schedules that hold p microbatches where F = I, and 2 makes zb-h2
    optimal among those that hold 2p-1, while F + I + 2 comm >= 2 W. None of the four counts what a rank waits for
    because another rank has no room, so the bound is below what can be reached for L well below p.
    """
    m, limit, kept = problem.n_microbatches, problem.limit, problem.kept
    pairs = zip(problem.forward, problem.backward_input, strict=True)
    there_and_back = [f + i + 2 * problem.comm for f, i in pairs]
    rounds, left = divmod(m - 1, limit)
    least = 0.0
    for b in range(problem.n_ranks):
        f, i, w = problem.forward[b], problem.backward_input[b], problem.weight[b]
        way = f + sum(there_and_back[b + 1 :])
        alone = problem.work(b) + max(0.0, way - min(m, limit) * f)
        least = max(least, alone, (rounds + 1) * (way + i + (w if kept == 1 else 0.0)) + left * f)
        for a in range(b):
            later = sum(there_and_back[a:b]) + problem.weight[a]
            least = max(least, alone + later - problem.most_put_off * w)
        if m > limit:
            room = min(n_i * i + _weights_before_last(problem, n_i) * w for n_i in range(m - limit, m))
            least = max(least, 2 * way + room + (m - 1 - limit) * f + i + w)
    return least


def _weights_before_last(problem: Problem, n_i: int) -> int:
    """How many W a rank has run at least before its last F, having run n_i of I: the F finds
    m - 1 - n_i + kept * (n_i - n_w) <= limit - 1."""
    room = problem.limit - problem.n_microbatches + n_i
    put_off = n_i if n_i * problem.kept <= room else int(room / problem.kept + _SAME)
    return n_i - put_off


class Policy(NamedTuple):
    """What one rank runs when more than one action could be next, and when it rather waits."""

    ahead: int
    """Forward passes before the first I, at most."""
    prefer: int
    """Of I and F, when both could run: 0 I, 1 F, 2 in turn. A W that makes room for the F stands in for it."""
    gap: float
    """A W is run in a gap if what comes next is known to come no sooner than this share of the W's time."""


def _next_op(
    policy: Policy, turn: bool, output_in: float, gradient_in: float, waiting: bool, room: bool, weight: float
) -> Op | None:
    """What a free rank runs, or None where it waits. `output_in`, `gradient_in`: how long until F and I could run, 0 or
    less where they can; `turn`: whether I is next in turn; `waiting`: whether a W could run; `room`: whether the limit
    lets F run; `weight`: the time of W."""
    if output_in <= 0 and (room or waiting):
        if gradient_in <= 0 and (policy.prefer == 0 or (policy.prefer == 2 and turn)):
            return "I"
        return "F" if room else "W"
    if gradient_in <= 0:
        return "I"
    coming_in = min(gradient_in, output_in) if room else gradient_in
    return "W" if waiting and coming_in >= policy.gap * weight else None


def _run(problem: Problem, policies: list[Policy], at_most: float) -> tuple[float, list[list[Op]]] | None:
    """The cost of following the policies, and the ops of every rank in order; None if the cost is above `at_most`.

    Each op goes through the microbatches in order. A rank decides when it is free: it knows what has arrived, and
    when that will arrive which the rank beside it has begun.
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
    assert min(n_w) == m, "a policy has stopped before the end"
    return max(problem.work(rank) + idle[rank] for rank in range(p)), ops


class _Found(NamedTuple):
    cost: float
    policies: list[Policy]
    ops: list[list[Op]]


def _best_uniform(problem: Problem, enough: float) -> _Found:
    """The best of policies that are the same for all ranks, but for forward passes ahead in even steps; at a tie the
    one with fewer ahead. Done as soon as the cost is `enough`."""
    p, m = problem.n_ranks, problem.n_microbatches
    best: _Found | None = None
    for step, prefer, gap in product((1, 2, 3, m), (0, 2, 1), (0.0, 0.5, 1.0)):
        policies = [Policy(min(m, 1 + step * (p - 1 - rank)), prefer, gap) for rank in range(p)]
        ran = _run(problem, policies, best.cost if best else inf)
        if ran and (best is None or ran[0] < best.cost * (1 - _SAME)):
            best = _Found(ran[0], policies, ran[1])
            if best.cost <= enough:
                break
    assert best is not None, "the first policies have no cost to stay below"
    return best


def _climb(problem: Problem, best: _Found, enough: float) -> _Found:
    """Change one to three numbers of the policies at random, each for one rank, or for a rank and all before or after
    it, and go on from there unless it costs more; stop when the cost is `enough`, or after a number of tries that
    depends on the size alone."""
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
            best = _Found(ran[0], policies, ran[1])
    return best


def _hand_made(problem: Problem) -> Iterator[Schedule]:
    """1f1b, zb-h1, zb-h2 and a third step of the same stairs, cut to the limit: rank r runs F up to k(p-1-r)
    microbatches ahead of I, and W up to kr behind it."""
    p, m = problem.n_ranks, problem.n_microbatches
    room = problem.limit - 1 if problem.limit < m else 2 * m
    for ahead_step, behind_step in ((1, 0), (1, 1), (2, 2), (3, 3)):
        ranks = []
        for rank in range(p):
            ahead = min(room, m, ahead_step * (p - 1 - rank))
            ranks.append(deferred(rank, m, ahead=ahead, behind=min(room - ahead, m, behind_step * rank)))
        yield make(p, m, ranks, staggered=True)


def _pick(random: Random, choices: Sequence[_T]) -> _T:
    """One of the choices; as `Random.choice`, whose picks may differ between versions of Python."""
    return choices[int(random.random() * len(choices))]


def _in_order(stage: int, ops: list[Op]) -> list[Action]:
    """Each op on one microbatch after the other."""
    done: Counter[Op] = Counter()
    actions = []
    for op in ops:
        actions.append(Action(stage, op, done[op]))
        done[op] += 1
    return actions
