"""Proves that a formula is recorded as the text that gives its value, and is plain arithmetic where nothing records."""

import math
import operator
import random

import numpy as np
import pytest

from shardwright.cost import ledger
from shardwright.cost.ledger import Formulas, Traced, greatest

SYMBOLS = {"a": 3.0, "b": np.array([0.75]), "c": 2, "d": np.array([5])}
OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv)


def formula(f: Formulas, draw: random.Random, depth: int) -> np.ndarray:
    """Any formula of so many levels over the symbols and constants."""
    if depth == 0:
        symbol = f[draw.choice(list(SYMBOLS))]
        return symbol if draw.random() < 0.7 else draw.choice([2, 0.25]) * symbol
    left, right = (formula(f, draw, draw.randrange(depth)) for _ in range(2))
    kind = draw.randrange(8)
    if kind < len(OPERATORS):
        return OPERATORS[kind](left, right + 10 if kind > 2 else right)
    if kind == 5:
        return (np.maximum(left, 1) ** draw.choice([2, 0.7])) ** 0.5
    return np.maximum(left, right) if kind == 6 else np.minimum(np.ceil(left), right)


def test_the_text_of_any_formula_evaluates_to_its_value():
    names = {"max": max, "min": min, "ceil": math.ceil} | {name: float(np.ravel(n)[0]) for name, n in SYMBOLS.items()}
    for seed in range(300):
        plain = Formulas("s", SYMBOLS)
        value = plain("what", formula(plain, random.Random(seed), 5))
        with ledger.record() as entries:
            traced = Formulas("s", SYMBOLS)
            same = traced("what", formula(traced, random.Random(seed), 5))
        (entry,) = entries
        assert type(same) is np.ndarray
        assert np.ravel(same).tolist() == np.ravel(value).tolist() == [entry.value]
        assert eval(entry.formula, {"__builtins__": {}}, names) == pytest.approx(entry.value, rel=1e-9), entry.formula


def test_a_text_has_only_the_parentheses_that_it_needs_and_steps_in_the_order_of_their_use():
    with ledger.record() as entries, ledger.section("here"):
        f = Formulas("B", SYMBOLS)
        w = f.let("w", greatest(f.a / 256, f.b, f.c - (f.d - 1)))
        f("kept, in all", w * f.a * (f.b * f.c) / (w + f.a) ** 0.5 - f.d, "a source")
        f("twice", 2 * f["kept, in all"])
        f.choose("chosen", np.array([1]), [f.a, f.kept_in_all + f.twice])
    kept, twice, chosen = entries
    assert kept.formula == "w = max(a / 256, b, c - (d - 1)); w * a * (b * c) / (w + a) ** 0.5 - d"
    assert (kept.section, kept.unit, kept.source, list(kept.inputs)) == ("here", "B", "a source", ["a", "b", "c", "d"])
    assert (twice.formula, twice.inputs) == ("2 * kept_in_all", {"kept_in_all": kept.value})
    assert (chosen.formula, chosen.value) == ("kept_in_all + twice", kept.value + twice.value)


def test_where_nothing_records_symbols_are_what_was_given():
    f = Formulas("B", SYMBOLS)
    assert f.b is SYMBOLS["b"]
    assert f.let("w", f.b) is f.b
    assert f.choose("chosen", np.array([0, 1]), [f.a, 2 * f.a]).tolist() == [3.0, 6.0]
    with pytest.raises(AttributeError, match=r"no symbol 'kept'; there are a, b, c, d, chosen$"):
        _ = f.kept


def test_a_formula_with_a_number_from_nowhere_or_a_branch_on_a_symbol_is_refused():
    with ledger.record():
        f = Formulas("B", SYMBOLS)
        with pytest.raises(TypeError, match="an array in a formula needs a name"):
            f("what", f.a * np.array([1.0]))
        with pytest.raises(TypeError, match="must not depend on the values"):
            _ = 1.0 if f.c else 2.0
        assert isinstance(f.c, Traced)
