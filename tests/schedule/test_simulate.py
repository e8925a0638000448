"""The simulator agrees with the formulas of the papers, with published bubble rates, and with a slower simulator."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.actions import Action, Schedule, make
from shardwright.schedule.build import build
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import Times, simulate
from shardwright.system.errors import ScheduleError
from tests.schedule.test_build import anytimes, schedules

FIXED = tuple(name for name in names() if not find(name).searched)

# Qi et al., arXiv 2401.10241, tables 5 and 8: ranks, microbatches, times of a whole stage in microseconds (F, I, W,
# message), layers; bubble rates of 1F1B, interleaved 1F1B with one layer a stage, ZB-H1, ZB-H2.
PUBLISHED = [
    (8, 24, 18522, 18086, 9337, 601, 24, 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 64, 18546, 18097, 9321, 762, 24, 0.1240, 0.0443, 0.0674, 0.0444),
    (8, 32, 29802, 29428, 19530, 577, 32, 0.1898, 0.0628, 0.1045, 0.0559),
    (16, 48, 11347, 11248, 8132, 377, 48, 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 128, 11325, 11308, 8109, 378, 48, 0.1251, 0.0445, 0.0576, 0.0266),
    (32, 128, 10408, 10204, 7703, 408, 64, 0.2168, 0.1164, 0.1106, 0.0490),
    (16, 48, 28814, 28760, 19352, 1610, 32, 0.2668, 0.1499, 0.1536, 0.0823),
    (16, 128, 28632, 28612, 19278, 1619, 32, 0.1390, 0.0621, 0.0637, 0.0325),
    (24, 96, 13566, 13968, 10518, 758, 48, 0.2229, 0.1184, 0.1121, 0.0480),
    (32, 96, 18916, 19496, 14576, 879, 64, 0.2676, 0.1509, 0.1429, 0.0629),
    (32, 256, 18894, 19288, 14386, 887, 64, 0.1362, 0.0626, 0.0593, 0.0251),
]


def slowly(
    schedule: Schedule,
    times: Times,
    groups: Sequence[Sequence[Sequence[Action]]] | None = None,
    waits: Callable[[Action], bool] = lambda action: True,
) -> list[list[float]]:
    """The ends of every rank's actions, found by looking at one rank after another until nothing moves.

    `groups`: actions of a rank that begin together, when all of them can, and whose results come at their common end.
    `waits`: whether an action waits for another rank at all.
    """
    of = times.times_by_stage(schedule.n_stages)
    lists = groups or [[[action] for action in actions] for actions in schedule.ranks]
    done: dict[tuple[int, bool, int], tuple[float, int]] = {}
    ends: list[list[float]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(lists):
            while len(ends[rank]) < len(mine):
                group = mine[len(ends[rank])]
                needed = [
                    (other[0], action.op == "F", other[1])
                    for action in group
                    if waits(action) and (other := schedule.needs(action)) is not None
                ]
                if any(each not in done for each in needed):
                    break
                there = [end + (times.comm if maker != rank else 0.0) for end, maker in map(done.__getitem__, needed)]
                start = max([*there, *ends[rank][-1:], 0.0])
                ends[rank].append(start + sum(of[action.op][action.stage] for action in group))
                for action in group:
                    if action.op != "W":
                        done[action.stage, action.op == "F", action.microbatch] = ends[rank][-1], rank
                moved = True
    assert [len(each) for each in ends] == [len(each) for each in lists]
    return ends


def test_two_ranks_and_one_microbatch_run_in_turn() -> None:
    simulation = simulate(build("zb-h1", 2, 1), Times(forward=2, backward_input=3, weight=1, comm=0.5))
    f0, i0, w0 = (Action(0, op, 0) for op in "FIW")
    f1, i1, w1 = (Action(1, op, 0) for op in "FIW")
    assert simulation.spans == (
        [(f0, 0, 2), (i0, 8, 11), (w0, 11, 12)],
        [(f1, 2.5, 4.5), (i1, 4.5, 7.5), (w1, 7.5, 8.5)],
    )
    assert simulation.makespan == 12
    assert simulation.bubble_rates == (0.5, 0.5)
    assert simulation.resident == ([(0, 1, 0), (11, 0, 1), (12, 0, 0)], [(2.5, 1, 0), (7.5, 0, 1), (8.5, 0, 0)])


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]} ranks, {row[1]} microbatches, {row[2]} us")
def test_bubble_rates_are_those_published_by_the_zero_bubble_paper(row: tuple) -> None:
    """To the four digits that are printed.

    The interleaved numbers come from a script (sail-sg/zero-bubble-pipeline-parallelism) in which only the first
    microbatch of a round waits for its message from the last rank to the first, or back, when it enters the next
    virtual stage. With that left out here too the numbers are the published ones; with it the bubble is larger by the
    n_ranks messages that are left out.
    """
    p, m, f, i, w, comm, layers, *published = row
    v = layers // p
    whole, layer = Times(f, i, w, comm), Times(f / v, i / v, w / v, comm)
    order = build("interleaved-1f1b", p, m, v)

    def waits(action: Action) -> bool:
        wraps = action.stage % p == (0 if action.op == "F" else p - 1)
        return not wraps or action.microbatch % p == 0

    work = m * (f + i + w)
    without = max(ends[-1] for ends in slowly(order, layer, waits=waits))
    found = [
        simulate(build("1f1b", p, m), whole).bubble_rate,
        (without - work) / without,
        simulate(build("zb-h1", p, m), whole).bubble_rate,
        simulate(build("zb-h2", p, m), whole).bubble_rate,
    ]
    assert found == pytest.approx(published, abs=0.51e-4)
    assert simulate(order, layer).makespan == pytest.approx(without + p * comm)


# In microbatches of a rank's share of the layers, with v stages a rank: the most in flight on rank r, the most waiting.
PEAKS: dict[str, Callable[..., tuple[float, float]]] = {
    "afab": lambda p, m, v, r: (m, 0),
    "1f1b": lambda p, m, v, r: (p - r, 0),
    "interleaved-1f1b": lambda p, m, v, r: (p + (p - 1 - 2 * r) / v, 0),
    "zb-h1": lambda p, m, v, r: (p - r, r + 1),
    "zb-h2": lambda p, m, v, r: (2 * (p - r) - 1, 2 * r + 1),
    "zb-v": lambda p, m, v, r: (p, r + 0.5),
    "dualpipe": lambda p, m, v, r: (p + 1, min(r, p - 1 - r) + 1),
    "dualpipe-v": lambda p, m, v, r: (p + 0.5, (r + 1) / 2),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 16), (8, 24)])
@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(5, 5, 4), Times(3, 4, 2, comm=0.5)], ids=str)
def test_what_is_in_flight_and_what_waits_are_those_of_the_docs(name: str, p: int, m: int, times: Times) -> None:
    for v in (2, 3) if name == "interleaved-1f1b" else (1,):
        simulation = simulate(build(name, p, m, v), times)
        stage = p / simulation.schedule.n_stages
        waiting = [stage * peak for peak in simulation.peak_waiting]
        expected = [PEAKS[name](p, m, v, rank) for rank in range(p)]
        assert list(zip(simulation.peak_in_flight_shares, waiting, strict=True)) == [pytest.approx(e) for e in expected]
        for share in (0.0, 0.375, 1.0):
            assert max(simulation.peak_memory_shares(share)) == pytest.approx(expected[0][0])


SIZES = [(2, 4), (3, 7), (4, 8), (6, 15), (8, 32)]
UNEVEN = [(1.0, 1.0, 1.0), (3.0, 4.0, 2.0), (5.0, 4.0, 1.0), (7.0, 7.0, 0.0)]  # W takes no longer than F, nor than I


def idle(name: str, p: int, m: int, times: Times, v: int = 1) -> float:
    """Cost less work, of the rank that has least."""
    simulation = simulate(build(name, p, m, v), times)
    return simulation.cost - max(simulation.work)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), UNEVEN)
def test_idle_times_are_those_of_the_formulas(p: int, m: int, f: float, i: float, w: float) -> None:
    times = Times(f, i, w)
    assert idle("afab", p, m, times) == idle("1f1b", p, m, times) == (p - 1) * (f + i + w)
    assert idle("zb-h1", p, m, times) == (p - 1) * (f + i - w)
    assert idle("zb-h2", p, m, times) == (p - 1) * (f + i - 2 * w)
    for v in (2, 3):
        assert idle("interleaved-1f1b", p, p * (m // p), times, v) == (p - 1) * (f + i + w)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_textbook_bubbles_are_p_minus_1_over_m_of_the_work(p: int, m: int) -> None:
    for name, v, rounds in (("1f1b", 1, m), ("afab", 1, m), ("interleaved-1f1b", 3, p * (m // p))):
        rate = simulate(build(name, p, rounds, v), Times(1, 1, 1)).bubble_rate
        assert rate / (1 - rate) == pytest.approx((p - 1) / (v * rounds))


def test_interleaved_waits_no_longer_for_a_ragged_number_of_microbatches() -> None:
    for p, v in ((4, 2), (8, 3)):
        for m in range(p, 4 * p):
            assert idle("interleaved-1f1b", p, m, Times(1, 1, 1), v) == (p - 1) * 3


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_zb_v_waits_only_to_begin_and_to_end_where_all_three_take_the_same_time(p: int) -> None:
    simulation = simulate(build("zb-v", p, 2 * p), Times(1, 1, 1))
    work = 2 * 2 * p * 3  # stages of a rank, microbatches, actions of each
    assert simulation.makespan == work + p - 1
    assert all(end - start == work for (start, *_), (*_, end) in zip(simulation.starts, simulation.ends, strict=True))
    assert simulation.peak_in_flight_shares == (p,) * p


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (5, 5, 4)])
def test_dualpipe_waits_as_long_as_deepseek_says_when_forward_and_backward_are_one(
    p: int, f: int, i: int, w: int
) -> None:
    """(p/2-1)(F&B + B - 3W), arXiv 2412.19437, table 2, where an F and the B after it run as one; but the first such
    pair of the two middle ranks, whose B could not begin yet. And less where they run one after the other."""
    m = 2 * p
    schedule = build("dualpipe", p, m)
    groups = []
    for rank, actions in enumerate(schedule.ranks):
        groups.append(paired(actions, alone=rank in (p // 2 - 1, p // 2)))
    as_one = max(ends[-1] for ends in slowly(schedule, Times(f, i, w), groups))
    f_and_b, b = f + i + w, i + w
    assert as_one - m * (f + i + w) == (p // 2 - 1) * (f_and_b + b - 3 * w)
    assert idle("dualpipe", p, m, Times(f, i, w)) == (p // 2 - 1) * (f + i - w)
    assert idle("dualpipe-v", p, m, Times(f / 2, i / 2, w / 2)) == (p - 1) * (f + i - w) / 2


def paired(actions: Sequence[Action], alone: bool) -> list[Sequence[Action]]:
    """Every F together with a B that follows it; with `alone`, but for the first such pair."""
    groups: list[Sequence[Action]] = []
    for action in actions:
        if action.op == "B" and groups[-1][-1].op == "F":
            if not alone:
                groups[-1] = [*groups[-1], action]
                continue
            alone = False
        groups.append([action])
    return groups


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_simulation_agrees_with_a_slower_one_and_keeps_to_what_is_possible(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    times = data.draw(anytimes(schedule.n_stages))
    simulation = simulate(schedule, times)
    assert [list(ends) for ends in simulation.ends] == slowly(schedule, times)
    of = times.times_by_stage(schedule.n_stages)
    there_and_back = sum(of["F"]) + sum(of["I"])
    hops = {
        microbatch: sum(
            schedule.place[stage, microbatch] != schedule.place[stage + 1, microbatch]
            for stage in range(schedule.n_stages - 1)
        )
        for microbatch in range(schedule.n_microbatches)
    }
    assert simulation.makespan >= max(simulation.work)
    assert simulation.makespan >= there_and_back + 2 * times.comm * max(hops.values())
    assert all(0 <= rate <= 1 for rate in simulation.bubble_rates)
    assert all(curve[-1][1:] == (0, 0) for curve in simulation.resident)


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_a_rank_holds_is_the_count_of_microbatches_between_their_actions(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    simulation = simulate(schedule, Times(1.0, 1.5, 0.75, comm=0.25))
    for rank, spans in enumerate(simulation.spans):
        at = {action: (start, end) for action, start, end in spans}
        counted = []
        for instant in {instant for span in at.values() for instant in span}:
            in_flight = waiting = 0
            for stage, op, microbatch in at:
                if op != "F":
                    continue
                begin, _ = at[Action(stage, "F", microbatch)]
                _, gone = at.get(Action(stage, "B", microbatch)) or at[Action(stage, "I", microbatch)]
                _, done = at.get(Action(stage, "W", microbatch), (gone, gone))
                in_flight += begin <= instant < gone
                waiting += gone <= instant < done
            counted.append((in_flight, waiting))
        assert simulation.peak_in_flight[rank] == max(f for f, _ in counted)
        assert simulation.peak_waiting[rank] == max(w for _, w in counted)
        for share in (0.0, 0.4, 1.0):
            assert simulation.peak_memory(share)[rank] == pytest.approx(max(f + share * w for f, w in counted))


def test_bubble_rates_of_uneven_ranks_differ_and_their_mean_is_the_schedules() -> None:
    simulation = simulate(build("1f1b", 2, 2), Times((1, 2), (1, 2), (1, 2)))
    assert simulation.work == (6, 12)
    assert simulation.bubble_rates == ((15 - 6) / 15, (15 - 12) / 15)
    assert simulation.bubble_rate == pytest.approx((30 - 18) / 30)


def test_ranks_that_wait_for_each_other_are_an_error_that_shows_the_circle() -> None:
    crossed = make(2, 1, [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], name="mine")
    with pytest.raises(ScheduleError) as caught:
        simulate(crossed, Times())
    assert str(caught.value) == (
        "mine: ranks wait for one another: rank 0, position 0: 0B0 waits for 1B0, at rank 1, position 1; "
        "rank 1, position 0: 1F0 waits for 0F0, at rank 0, position 1"
    )


@pytest.mark.parametrize("outside", [Action(2, "F", 0), Action(0, "F", 1), Action(-1, "F", 0), Action(0, "F", -1)])
def test_an_action_of_a_stage_or_microbatch_that_is_not_there_is_an_error(outside: Action) -> None:
    with pytest.raises(ScheduleError, match=f"mine: {outside} is outside the 2 stages and 1 microbatches"):
        simulate(make(2, 1, [[outside], []], name="mine"), Times())


def test_times_have_to_fit_the_stages_and_be_0_or_more() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"times.weight has 3 numbers for 2 stages; give one .* or 2"):
        simulate(schedule, Times(weight=(1, 2, 3)))
    with pytest.raises(ScheduleError, match="a time is 0 or more"):
        simulate(schedule, Times(comm=-1))
