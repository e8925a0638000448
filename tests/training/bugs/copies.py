"""Bugs of the comparison of copies: what is the same is compared with itself, or is not compared, or too late."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_TESTS = "tests/training/test_copies.py"
COPIES = "shardwright.training.resilience.copies"
BUGS = {
    "copies of weights are compared with themselves": (
        "hybrid",
        Mutation(
            "tests.training.test_copies:differing_copies",
            "dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)",
            "pass",
        ),
    ),
    "copies over the ranks of a pipeline are not compared": (
        "dualpipe",
        Mutation(f"{COPIES}:_groups", "model.tied.group_of(model.held_on[parameter])", "None"),
    ),
    "copies of optimizer states are not compared": (
        "hybrid, a state",
        Mutation(
            f"{COPIES}:groups_of_copies",
            "sorted(tensors.items())",
            "sorted((name, each) for name, each in tensors.items() if name.startswith('model/'))",
        ),
    ),
    "copies of experts are looked for on the mesh of the other parameters": (
        "experts of zero 0 over cp",
        Mutation(f"{COPIES}:_groups", "row_of(model.spec, parameter).split == 'experts'", "False"),
    ),
    "different shards are compared as copies": (
        "hybrid",
        Mutation(f"{COPIES}:_groups", "others.isdisjoint(ranks(group))", "True"),
    ),
}
"""Each with the name of the flipped bit that shows it."""
NOT_BEFORE_A_CHECKPOINT = Mutation(
    "shardwright.training.resilience.copies:CompareCopies.on_save", "self.every", "False"
)

REDUCTION: dict[str, AnyBug] = {
    name: UnitBug(mutation, f"{_TESTS}:test_a_bug_is_seen", put_in_there=True) for name, (_, mutation) in BUGS.items()
}
STALE: dict[str, AnyBug] = {
    "copies are not compared before a checkpoint": UnitBug(
        NOT_BEFORE_A_CHECKPOINT,
        f"{_TESTS}:test_that_copies_are_not_compared_before_a_checkpoint_would_be_seen",
        put_in_there=True,
    ),
}
