"""Proves that every public call answers arguments that it does not take in a sentence that says which there are."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import shardwright
from shardwright import DistributedModel, InputError, Layout, Run, ShardwrightError
from shardwright.system.errors import ConfigError, LayoutError, checked_call

CALLS: dict[str, Callable[..., Any]] = {
    name: each
    for name in shardwright.__all__
    if (each := getattr(shardwright, name)) not in (DistributedModel, Run, InputError, ShardwrightError)
}
"""The two first of the others are made by `parallelize`, `train` and `load_run`, and users call their methods; the two
errors are raised."""
METHODS = {
    f"{kind.__name__}.{name}": method
    for kind in (DistributedModel, Run)
    for name, method in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") and name not in ("named_parameters", "parameters")
}


@pytest.mark.parametrize("name", CALLS | METHODS)
def test_every_public_call_says_which_arguments_it_takes(name: str):
    call, me = (CALLS | METHODS)[name], (object(),) * (name in METHODS)
    function = call.__init__ if isinstance(call, type) else call  # type: ignore[misc]
    taken = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    needed = [each.name for each in taken if each.default is each.empty]
    if needed:
        with pytest.raises(
            InputError, match=f"^{name}: {' and '.join(needed)} (is|are) missing; it takes {taken[0].name}"
        ):
            call(*me)
    with pytest.raises(InputError) as unknown:
        call(*me, **{f"{taken[0].name}s" if taken else "x": 1})
    assert (f"did you mean {taken[0].name!r}?" if taken else "it takes none") in str(unknown.value)
    with pytest.raises(InputError, match=rf"{name}: \d+ arguments are given by place, and (only .* may|none may) be; "):
        call(*me, *range(99))


def test_values_of_a_wrong_type_are_named_with_the_type_that_is_needed():
    sizes = {"global_batch": 8, "seq_len": 16}
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
        (
            shardwright.plan,
            ("debug", "h100:2"),
            sizes | {"global_batch": "8"},
            "global_batch='8' is of type str; int is",
        ),
        (
            shardwright.plan,
            ("debug", "h100:2"),
            sizes | {"precision": None},
            "precision=None is of type NoneType; str is",
        ),
        (
            shardwright.plan,
            ("debug", "h100:2"),
            sizes | {"fix": 3},
            r"fix=3 is of type int; Mapping\[str, Any\] \| None",
        ),
        (shardwright.plan, ("debug", "h100:2"), sizes | {"seq_len": 0}, "seq_len=0: a number of 1 or more is needed"),
        *(
            (shardwright.plan, ("debug", f"{name}:2"), sizes | given, said)
            for name, given, said in (
                ("h100", {"precision": "bf17"}, "precision='bf17': not one of the choices; did you mean 'bf16'"),
                ("a100-40", {"precision": "fp8"}, "precision='fp8': the peak of a100-40gb in it is not known"),
                ("h100", {"optimizer": "adamm"}, "optimizer='adamm': not one of the choices; did you mean 'adamw'"),
                ("h100", {"narrow_states": "no"}, "narrow_states='no' is of type str; bool is needed"),
                ("h100", {"global_batch": 10**30}, "at most 2,147,483,648 is possible"),
                ("h100", {"fix": {"tp": "two"}}, "tp=two: a whole number is needed"),
                ("h100", {"fix": {"micro_batch": "a"}}, "micro_batch=a: sequences at a time, 1 or more"),
            )
        ),
        (shardwright.preset, (5,), {}, "name=5 is of type int; str is needed"),
        (shardwright.load_run, (5,), {}, r"folder=5 is of type int; str \| Path is needed"),
        (shardwright.train, (5,), {}, r"run=5 is of type int; str \| Path \| Mapping"),
        (shardwright.verify, (Layout(),), {"steps": 0}, "steps=0: a number of 1 or more is needed"),
        (Layout, (), {"sequence_parallel": "yes"}, "sequence_parallel='yes' is of type str; bool is needed"),
        (shardwright.Transformer, ("debug",), {}, "spec='debug' is of type str; ModelSpec is needed"),
    ]
    for call, args, given, said in cases:
        with pytest.raises(InputError, match=said):
            call(*args, **given)


def test_constructors_raise_the_errors_that_they_document():
    with pytest.raises(LayoutError, match="Layout: 2 arguments are given by place, and none may be; by name: tp=, pp="):
        Layout(2, 2)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="ModelSpec: there is no argument 'n_layer'; did you mean 'n_layers'"):
        shardwright.ModelSpec(n_layer=4)  # type: ignore[call-arg]


def test_an_error_inside_a_call_with_good_arguments_stays_what_it_is():
    def add(one: int, two: float = 1.0) -> float:
        return one + two + None  # type: ignore[operator, no-any-return]

    with pytest.raises(TypeError, match="unsupported operand"):
        checked_call(add)(1, 2)
