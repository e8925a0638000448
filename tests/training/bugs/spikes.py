"""Bugs of what is done about loss spikes: found by some ranks alone, found too late, forgotten on a resume."""

from tests.mutation import Mutation
from tests.training import test_recheck, test_spikes
from tests.training.bugs.bug import AnyBug, UnitBug

_SPIKES, _RECHECK = "tests/training/test_spikes.py", "tests/training/test_recheck.py"
_ROLLBACK = f"{_SPIKES}:test_a_bug_of_rollback_is_seen"
_JUDGE = "shardwright.training.resilience.spikes:SpikeGuard.judge"


def _there(name: str) -> UnitBug:
    at, bugs = (_SPIKES, test_spikes.BUGS) if name in test_spikes.BUGS else (_RECHECK, test_recheck.BUGS)
    return UnitBug(bugs[name][1], f"{at}:test_a_bug_is_seen", put_in_there=True)


def _rule_bug(before: str, after: str, test: str) -> UnitBug:
    return UnitBug(Mutation(_JUDGE, before, after), f"{_SPIKES}:{test}")


_WINDOW = "test_a_step_is_judged_by_the_window_of_the_steps_before_it"
_FINITE = "test_values_that_are_not_finite_are_spikes_from_the_first_step_on_and_never_enter_the_window"

REDUCTION: dict[str, AnyBug] = {name: _there(name) for name in ("a loss spike is seen by the rank alone that has it",)}
STALE: dict[str, AnyBug] = {
    name: _there(name)
    for name in (
        "weights are updated in a step that is a spike",
        "gradients of the first try are in those of the second",
        "spikes in a row are counted on over steps that are taken",
    )
}
RECOMPUTATION: dict[str, AnyBug] = {
    name: _there(name)
    for name in (
        "a step is run again with other samples",
        "a step is run again with other dropout",
        "a step that is run again counts as a spike",
    )
} | {
    "every second try of a step is said to give the same": UnitBug(
        Mutation("shardwright.training.resilience.spikes:_not_finite", "(*numbers, spike.where)", "()"),
        f"{_RECHECK}:test_what_two_tries_of_a_step_tell",
    )
}
SCALE: dict[str, AnyBug] = {
    "a loss is a spike at the mean plus six times itself": _rule_bug(
        "self.config.spike_sigma * deviation", "self.config.spike_sigma * mean", _WINDOW
    ),
    "values that are not finite enter the window of losses": _rule_bug(
        "math.isfinite(loss) and math.isfinite(norm)", "not math.isinf(loss)", _FINITE
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "63 steps are enough to judge a loss by": _rule_bug(
        "len(window) >= LEAST_WINDOW", "len(window) > LEAST_WINDOW - 2", _WINDOW
    ),
    "the window of losses holds 129 steps": _rule_bug(
        "del window[:-SPIKE_WINDOW]", "del window[: -SPIKE_WINDOW - 1]", _FINITE
    ),
}
RESUME: dict[str, AnyBug] = {
    name: _there(name) for name in ("the window of losses begins anew on a resume", "the window of losses is not saved")
} | {name: UnitBug(bug, _ROLLBACK, put_in_there=True) for name, bug in test_spikes.RUN_BUGS.items()}
