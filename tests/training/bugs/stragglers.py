"""Bugs of the search for stragglers: ranks are compared with the wrong ones, or over the wrong steps."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_TESTS = "tests/training/test_stragglers.py"
_FOUND = "shardwright.training.resilience.stragglers:Stragglers"
_WITHIN_20 = f"{_TESTS}:test_a_rank_that_becomes_slower_by_30_percent_is_named_within_20_steps_and_taken_back"
_STAGES = f"{_TESTS}:test_stages_are_compared_with_their_own_past_and_not_with_other_stages"
_SOMETIMES = f"{_TESTS}:test_a_rank_that_is_slow_in_some_steps_is_not_named"
_LOADED = f"{_TESTS}:test_equal_ranks_that_other_programs_slowed_down_are_not_named"
_OTHERS = f"{_TESTS}:test_the_median_of_the_others_leaves_out_the_rank_itself"
_PEERS = f"{_TESTS}:test_peers_have_the_same_stage_and_the_same_experts"
_WAITS = f"{_TESTS}:test_a_clock_counts_the_wait_for_data_but_not_for_other_ranks"
_CLOCK = "shardwright.training.clock:PhaseClock"
_NUMBERS = f"{_TESTS}:test_what_is_said_of_a_straggler_holds_its_numbers"

SCALE: dict[str, AnyBug] = {
    "the time in which a rank waits for others counts as its own": UnitBug(
        Mutation(f"{_CLOCK}.mark", "self._data_s + cpu_s - self._cpu_s", "seconds(self._began_s, now)"), _WAITS
    ),
    "the wait for data is left out of a rank's own time": UnitBug(
        Mutation(f"{_CLOCK}.mark", "self._data_s + cpu_s - self._cpu_s", "cpu_s - self._cpu_s"), _WAITS
    ),
}
ORDER: dict[str, AnyBug] = {
    "a rank that is slow in some steps is a straggler": UnitBug(
        Mutation(f"{_FOUND}._changes", "(ratios >= HIT).sum(0) >= HITS * len(ratios)", "(ratios >= HIT).any(0)"),
        _SOMETIMES,
    ),
    "ten steps name a rank": UnitBug(
        Mutation(
            f"{_FOUND}._changes",
            "np.stack([ratio_R for _, ratio_R in self._window])",
            "np.stack([ratio_R for _, ratio_R in self._window])[-10:]",
        ),
        _LOADED,
    ),
    "stages with unequal work count as peers": UnitBug(
        Mutation(
            "tests.training.test_stragglers:peers", "tuple((at[axis] for axis in axes))", "tuple((0 for axis in axes))"
        ),
        _PEERS,
    ),
    "a stage is not compared with its own past": UnitBug(
        Mutation(
            f"{_FOUND}._changes",
            "ratios[:, self.alone] /= np.median(np.stack(self._past), 0)[self.alone]",
            "pass",
        ),
        _STAGES,
    ),
}
STALE: dict[str, AnyBug] = {
    "a rank that was slow once stays a straggler": UnitBug(
        Mutation(f"{_FOUND}._changes", "self.named = (self.named | slow) - again", "self.named = self.named | slow"),
        _WITHIN_20,
    ),
}
OFF_BY_ONE: dict[str, AnyBug] = {
    "a rank is a peer of its own": UnitBug(
        Mutation("tests.training.test_stragglers:_median_of_others", "at < place", "at <= place"), _OTHERS
    ),
    "a straggler is told with the steps before its window": UnitBug(
        Mutation(f"{_FOUND}._in_words", "step - WINDOW + 1", "step - WINDOW"), _NUMBERS
    ),
}
