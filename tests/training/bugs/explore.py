"""Bugs of the explorer: a page that shows a wrong limit, unit, stage or interval, and a state that a link loses."""

from tests.mutation import Mutation
from tests.training.bugs.bug import UnitBug

_EXPLORE, _NUMBERS, _STATE = "shardwright.explore.", "tests/explore/test_numbers.py:", "tests/explore/test_state.py:"

SCALE = {
    "the explorer compares memory with all memory of the device": UnitBug(
        Mutation(
            f"{_EXPLORE}page:answer",
            "priced, limit = state.priced, state.limit_bytes",
            "priced, limit = state.priced, state.job.cluster.accelerator.memory_bytes",
        ),
        f"{_NUMBERS}test_the_memory_is_compared_with_the_limit_of_the_planner",
    ),
    "the difference of two plans has memory in GB where it says GiB": UnitBug(
        Mutation("shardwright.report.diff_view:memory_table", "GiB", "1e9"),
        f"{_NUMBERS}test_a_pinned_layout_is_compared_term_by_term",
    ),
    "the explorer shows the whole step as exposed messages": UnitBug(
        Mutation(f"{_EXPLORE}traffic:overlap_table", "priced.parts_s[work]", "priced.step_s"),
        f"{_NUMBERS}test_exposed_messages_are_parts_of_the_step_and_not_longer_than_all_messages",
    ),
    "the explorer says that links inside a node are between nodes": UnitBug(
        Mutation(f"{_EXPLORE}traffic:groups", "size * stride <= cluster.node_size", "size * stride < size"),
        f"{_NUMBERS}test_exposed_messages_are_parts_of_the_step_and_not_longer_than_all_messages",
    ),
    "the dp of a layout that an address does not give has all ranks": UnitBug(
        Mutation(f"{_EXPLORE}state:_with_data", "size // others", "size"),
        f"{_STATE}test_every_key_is_restored_from_the_link",
    ),
}

SHARD = {
    "the explorer shows the memory of the first stage for every stage": UnitBug(
        Mutation(f"{_EXPLORE}pictures:stage_memory", "height * n_bytes[rank] / top", "height * n_bytes[0] / top"),
        f"{_NUMBERS}test_the_column_of_each_stage_has_the_memory_of_that_stage",
    ),
}

STALE = {
    "a slider of the explorer changes another key": UnitBug(
        Mutation(f"{_EXPLORE}sliders:moved", "{key: value}", "{('pp' if key == 'tp' else key): value}"),
        f"{_STATE}test_a_slider_changes_the_key_that_it_names_and_no_other_choice",
    ),
    "the slider of the micro-batch changes nothing": UnitBug(
        Mutation(f"{_EXPLORE}sliders:moved", "replace(choice, micro_batch=value)", "choice"),
        f"{_STATE}test_a_slider_changes_the_key_that_it_names_and_no_other_choice",
    ),
    "the explorer shows the interval of the pinned layout": UnitBug(
        Mutation(
            f"{_EXPLORE}page:answer",
            "layout_parts(priced, limit, state.goal)",
            "layout_parts((state.pinned or state).priced, limit, state.goal)",
        ),
        f"{_NUMBERS}test_the_interval_is_of_the_layout_of_the_page_and_not_of_the_pinned_one",
    ),
    "a link of the explorer has the usual precision": UnitBug(
        Mutation(f"{_EXPLORE}state:query_of", "job.precision", "'bf16'"),
        f"{_STATE}test_every_key_is_restored_from_the_link",
    ),
    "a link of the explorer has no pinned layout": UnitBug(
        Mutation(f"{_EXPLORE}state:query_of", "pinned and state.pinned is not None", "False"),
        f"{_STATE}test_every_key_is_restored_from_the_link",
    ),
}

MASK = {
    "the explorer does not escape text of an address": UnitBug(
        Mutation(
            f"{_EXPLORE}page:templates", "return environment", "environment.autoescape = False\nreturn environment"
        ),
        f"{_NUMBERS}test_text_of_an_address_is_escaped_everywhere",
    ),
}
