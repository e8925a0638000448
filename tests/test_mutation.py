"""Proves that a mutation changes the code that runs, however it is laid out, and says so when it changes nothing."""

import ast

import pytest

from tests.mutation import Mutation, mutated


class Base:
    def scaled(self, x: int) -> int:
        return x


class Scaling(Base):
    @staticmethod
    def triple(x: int) -> int:
        return x * 3

    def scaled(self, x: int) -> int:
        total = 0
        for part in (  # laid out by hand
            x,
            1,
        ):
            total += part
        return self.triple(super().scaled(total))


def doubled(x: int) -> int:
    return 2 * x


class Calling:
    def doubled(self, x: int) -> int:
        return doubled(x) + 1


def test_a_method_still_calls_the_function_of_its_module_that_is_named_as_it_is():
    with mutated(Mutation(f"{__name__}:Calling.doubled", "doubled(x) + 1", "doubled(x) + 2")):
        assert Calling().doubled(3) == 8
        assert Calling.doubled.__name__ == "doubled"


def test_a_changed_expression_statement_or_static_method_is_what_runs_and_only_in_the_with():
    with mutated(
        Mutation(f"{__name__}:Scaling.triple", "x*3", "x * 5"),
        Mutation(f"{__name__}:Scaling.scaled", "(x, 1)", "(x,)"),
        Mutation(f"{__name__}:Scaling.scaled", "total += part", "total += part; total += 100"),
    ):
        assert Scaling().scaled(1) == 5 * (1 + 100)
    assert Scaling().scaled(1) == 3 * 2


def test_one_that_no_longer_applies_or_applies_twice_or_changes_nothing_says_so():
    for before, after, words in (
        ("x * 4", "x", r"Scaling\.triple holds 0 of 'x \* 4':\n@staticmethod"),
        ("return x * 4", "return x", "holds 0 of"),
        ("int", "str", "holds 2 of"),
        ("x*3", "(x * 3)", "changes nothing"),
    ):
        with (
            pytest.raises(AssertionError, match=words),
            mutated(
                Mutation(f"{__name__}:Scaling.scaled", "total = 0", "total = 7"),
                Mutation(f"{__name__}:Scaling.triple", before, after),
            ),
        ):
            pass
        assert Scaling().scaled(1) == 6, "and what was changed before it is as it was"


def test_quotes_and_parentheses_make_no_difference():
    healthy = ast.parse("def f(a):\n    return {'k': (a + 1) * 2}")
    changed = Mutation("m:f", '{"k": (a + 1)*2}', "None").applied_to(healthy)
    assert ast.unparse(changed) == "def f(a):\n    return None"
