"""Proves that bugs which shipped elsewhere in silence do not pass here: put into our code, each is seen by `verify`, by
a resume or by a unit test; and on healthy code, in the same layouts, `verify` reports nothing.

A bug is put into the reference of `verify` too, which runs the same model: what both sides compute wrongly is not seen.
The bugs are in tests/training/bugs.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.verification import Case, Report, Verifier
from shardwright.verification.reference import train_alone
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.mutation import Mutation, mutated
from tests.training.bugs.bug import Bug, ResumeBug, UnitBug
from tests.training.bugs.tables import ALL
from tests.training.checkpoints import hop
from tests.training.worlds import LONG, train_alone_mutated, train_mutated

SEEN_BY_VERIFY = {name: bug for name, bug in ALL.items() if isinstance(bug, Bug)}
SEEN_BY_A_RESUME = {name: bug for name, bug in ALL.items() if isinstance(bug, ResumeBug)}
SEEN_BY_A_TEST = {name: bug for name, bug in ALL.items() if isinstance(bug, UnitBug) and not bug.put_in_there}
SETTINGS = {(bug.case(layout), layout): None for bug in SEEN_BY_VERIFY.values() for layout in bug.layouts}


QUICK = (
    "11: gradients of norms on token shards are not summed",
    "only the first group of parameters follows the learning rate",
)


OF_LAYOUTS = (
    "shardwright.parallel.",
    "shardwright.training.step",
    "shardwright.training.forward_backward",
    "shardwright.training.offload.",
)
OF_THE_REFERENCE_TOO = {
    f"shardwright.parallel.{each}"
    for each in ("boxes", "initialise", "norm", "objects", "reductions", "whole_matrices")
}
"""Modules of `OF_LAYOUTS` that the reference of verify runs, too. With a bug in another it is that of healthy code."""


def is_of_layouts_alone(module: str) -> bool:
    return module.startswith(OF_LAYOUTS) and module not in OF_THE_REFERENCE_TOO


@pytest.mark.parametrize("name", rest_prove(SEEN_BY_VERIFY, *QUICK))
def test_verify_sees_the_bug(name: str, monkeypatch: pytest.MonkeyPatch, verifier: Verifier):
    bug = SEEN_BY_VERIFY[name]
    with Verifier(partial(train_mutated, bug.mutations), timeout_s=60) as mutant:
        if all(is_of_layouts_alone(mutation.function.partition(":")[0]) for mutation in bug.mutations):
            mutant.references = verifier
        else:
            reference = partial(train_alone_mutated, bug.mutations)
            monkeypatch.setattr("shardwright.verification.verifier.train_alone", reference)
        for layout in bug.layouts:
            (report,) = mutant.parities([(bug.case(layout), layout)])
            assert not report.equal, layout
            assert bool(report.crash) == bug.crashes, (layout, report.crash)
            if not bug.crashes:
                assert is_plain(report), (layout, report.worst)


def is_plain(report: Report) -> bool:
    """Whether it is not by a hair that something is wrong: copies differ, or a number is off by a hundred tolerances;
    of those that are themselves a share of what there is, by more than the tolerance."""
    shares = ("bfloat16 share", "bfloat16 share, one micro-batch")
    seen = [row.excess > (1 if row.quantity.kind in shares else 100) for row in report.rows]
    return bool(report.differing) or any(seen)


def modules_run_alone(cases: list[Case], folder: Path) -> set[str]:
    """To be run on 1 rank: the modules of which the reference of verify calls a function."""
    called: set[str] = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_globals.get("__name__", "")))
    try:
        for at, case in enumerate(cases):
            train_alone(case, folder / str(at))
    finally:
        sys.setprofile(None)
    return called


MODELS = {(case.spec, case.fp8, case.optimizer): replace(case, dtype="float64") for case, _ in SETTINGS}


@prove
@pytest.mark.parametrize("cases", [[LONG], [*MODELS.values()]], ids=["one model", "all"])
def test_the_reference_runs_nothing_where_bugs_are_not_put_into_it(tmp_path: Path, cases: list[Case]):
    for at in range(len(cases)):
        (tmp_path / str(at)).mkdir()
    (called,) = run_ranks(modules_run_alone, 1, [replace(case, micro_batch=1, steps=1) for case in cases], tmp_path)
    assert "shardwright.model.transformer" in called
    assert not [name for name in called if is_of_layouts_alone(name)]


@prove
@pytest.mark.parametrize(("case", "layout"), SETTINGS)
def test_verify_reports_nothing_on_healthy_code(case: Case, layout: Layout, verifier: Verifier):
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst


@pytest.mark.parametrize("name", rest_prove(SEEN_BY_A_RESUME, "the moments of the optimizer are not taken up"))
def test_a_run_that_is_taken_up_shows_the_bug(tmp_path: Path, name: str):
    bug = SEEN_BY_A_RESUME[name]
    found = taken_up(tmp_path / "tensors", bug.layouts, bug.spec, bug.mutations)
    expected = taken_up(tmp_path / "expected", bug.layouts, bug.spec)
    assert any(not torch.equal(a[key], b[key]) for a, b in zip(found, expected, strict=True) for key in b)


def taken_up(
    folder: Path, layouts: tuple[Layout, Layout], spec: ModelSpec, mutations: tuple[Mutation, ...] = ()
) -> list[dict[str, torch.Tensor]]:
    """The parameters on every rank after a step, a checkpoint, a resume and another step."""
    for step, layout in enumerate(layouts):
        outcomes = run_ranks(hop, layout.world_size, folder, layout, step, spec, mutations)
    return [{key: each for key, each in after.items() if key.startswith("model/")} for _, after in outcomes]


QUICK_BY_A_TEST = (
    "fp8: rows have one scale",
    "Lion steps where its direction is zero",
    "the selection bias rises above the mean load",
    "the cache of a request that ended is not free",
)
PASSED_WITHOUT_A_BUG: set[tuple[str, str]] = set()
"""The unit tests, with their arguments, that passed on healthy code in this process: several bugs share one."""


@pytest.mark.parametrize("name", rest_prove(SEEN_BY_A_TEST, *QUICK_BY_A_TEST))
def test_a_unit_test_sees_the_bug(name: str):
    bug = SEEN_BY_A_TEST[name]
    path, _, function = bug.test.partition(":")
    test = getattr(import_module(path.removesuffix(".py").replace("/", ".")), function)
    if (bug.test, repr(bug.given)) not in PASSED_WITHOUT_A_BUG:
        test(*bug.given)
        PASSED_WITHOUT_A_BUG.add((bug.test, repr(bug.given)))
    with mutated(*bug.mutations), pytest.raises(AssertionError):
        test(*bug.given)


def test_every_bug_can_still_be_put_in():
    for bug in ALL.values():
        with mutated(*bug.mutations):
            pass


def test_no_bug_is_listed_twice():
    """Twice the same change of code is two bugs only where it shows in another type or model."""
    changes = [
        (bug.mutations, bug.dtype, repr(bug.spec), repr(bug.layouts)) if isinstance(bug, Bug) else (bug.mutations,)
        for bug in ALL.values()
    ]
    assert [change for change, times in Counter(changes).items() if times > 1] == []
