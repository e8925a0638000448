"""Proves that the search for the culprit ends at the smallest layout that is not equal, and names what is left."""

from collections.abc import Callable
from functools import partial

import pytest

from shardwright.layout.layout import Layout
from shardwright.verification import Case, Report, Verifier
from shardwright.verification.verifier import find_culprit
from tests.mutation import Mutation
from tests.training.worlds import SPEC, train_mutated

CASE = Case(SPEC, seq_len=16, global_batch=16, micro_batch=2)

LARGE = Layout(
    pp=2,
    dp_shard=2,
    dp_replicate=2,
    tp=2,
    zero=3,
    sequence_parallel=True,
    pp_schedule="interleaved-1f1b",
    virtual_stages=3,
    zero_pp_gather="microbatch",
    recompute="full",
)


class Pretending(Verifier):
    """Runs nothing: a layout is not equal where `wrong` says so."""

    def __init__(self, wrong: Callable[[Layout], bool]) -> None:
        super().__init__()
        self.wrong = wrong

    def parity(self, case: Case, layout: Layout, against: tuple[Case, Layout] | None = None) -> Report:
        return Report(case, layout, "one process", [], 1, ["a copy"] if self.wrong(layout) else [])


def smallest(wrong: Callable[[Layout], bool], layout: Layout) -> str:
    with Pretending(wrong) as verifier:
        return find_culprit(verifier, verifier.parity(CASE, layout)).removeprefix("the smallest layout that still ")


def test_what_fails_in_every_pipeline_is_found_in_the_plainest_one():
    assert smallest(lambda layout: layout.pp > 1, LARGE) == "differs: pp 2 (2 ranks); it is equal without pp=2"


@pytest.mark.parametrize(
    ("wrong", "changes", "left", "needed"),
    [
        (
            lambda layout: layout.kind.splits_backward,
            {"pp_schedule": "zb-h1", "virtual_stages": 1},
            "pp 2, pp_schedule zb-h1 (2 ranks)",
            ["pp=2", "pp_schedule=zb-h1"],
        ),
        (
            lambda layout: layout.virtual_stages > 1,
            {},
            "pp 2, pp_schedule interleaved-1f1b, virtual_stages 2 (2 ranks)",
            ["pp=2", "pp_schedule=interleaved-1f1b"],
        ),
        (
            lambda layout: layout.virtual_stages > 2,
            {},
            "pp 2, pp_schedule interleaved-1f1b, virtual_stages 3 (2 ranks)",
            ["pp=2", "pp_schedule=interleaved-1f1b", "virtual_stages=3"],
        ),
        (
            lambda layout: layout.pp > 1 and layout.regathers,
            {},
            "pp 2, dp_shard 2, zero 3, zero_pp_gather microbatch (4 ranks)",
            ["pp=2", "dp_shard=2", "zero=3", "zero=3, not zero=1", "zero_pp_gather=microbatch"],
        ),
        (
            lambda layout: layout.stage_layers is not None,
            {"pp_schedule": "zb-v", "virtual_stages": 1, "stage_layers": (1, 1, 1, 2)},
            "pp 2, pp_schedule zb-v, stage_layers 1+1+1+2 (2 ranks)",
            ["pp=2", "pp_schedule=zb-v", "stage_layers=1+1+1+2"],
        ),
        (
            lambda layout: layout.ep > 1 and layout.zero > 1,
            {"ep": 4},
            "ep 2, dp_shard 2, zero 3 (2 ranks)",
            ["ep=2", "dp_shard=2", "zero=3", "zero=3, not zero=1"],
        ),
        (lambda layout: layout.token_shards, {}, "tp 2 (2 ranks)", ["tp=2", "sequence_parallel=true"]),
    ],
)
def test_what_is_left_is_what_the_fault_needs(
    wrong: Callable[[Layout], bool], changes: dict, left: str, needed: list[str]
):
    assert (
        smallest(wrong, LARGE.changed(**changes))
        == f"differs: {left}; it is equal without {' and without '.join(needed)}"
    )


def test_what_fails_with_ep_on_any_axis_is_not_taken_for_a_fault_of_that_axis():
    layout = Layout(dp_shard=2, cp=2, tp=2, zero=1, sequence_parallel=True, ep=4)
    found = smallest(lambda layout: layout.ep > 1, layout)
    assert found.startswith(
        "differs: ep 2, dp_shard 2, zero 1 (2 ranks); it is equal without ep=2 and without dp_shard=2"
    )


@pytest.mark.prove
def test_weight_gradients_that_are_overwritten_are_found_to_need_a_split_backward_pass():
    wiped = Mutation(
        "shardwright.model.matmul:weight_gradient", "add_to.addmm_(dy_FN, x_ND)", "add_to.copy_(dy_FN @ x_ND)"
    )
    with Verifier(partial(train_mutated, (wiped,)), timeout_s=60) as verifier:
        report = verifier.parity(CASE, Layout(pp=2, dp_replicate=2, pp_schedule="zb-h2"))
        assert not report.equal
        found = find_culprit(verifier, report)
    assert "differs: pp 2, pp_schedule zb-h2, accumulation 4 (2 ranks)" in found
    assert found.endswith("equal without pp=2 and without pp_schedule=zb-h2 and without accumulation")
