"""Conversion and checks of the models and layouts that users pass to the Python API."""

from collections.abc import Collection, Mapping

from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, InputError, nearest
from shardwright.system.units import MOST_COUNTED


def as_spec(model: object, also: str = "") -> ModelSpec:
    """Return the sizes of a model given as a preset name or a ModelSpec. `also`: other accepted types, in words.

    Raises ConfigError for an unknown preset and for any other value, such as a user's own module.
    """
    if isinstance(model, str):
        return resolve(model)
    if isinstance(model, ModelSpec):
        return model
    kind = type(model)
    raise ConfigError(
        f"model is of type {kind.__module__}.{kind.__qualname__}; valid: the name of a preset, a ModelSpec{also}; a "
        f"module of your own is split where its family is registered, with a row for each parameter (docs/extending.md)"
    )


def check_counts(**counts: int) -> None:
    """Raise InputError for each count below 1 or above `MOST_COUNTED`."""
    problems = [f"{name}={n}: a number of 1 or more is needed" for name, n in counts.items() if n < 1]
    large = {name: n for name, n in counts.items() if n > MOST_COUNTED}
    if problems := [*problems, *(f"{name}={n:,}: at most {MOST_COUNTED:,} is possible" for name, n in large.items())]:
        raise InputError(*problems)


def check_choices(given: Mapping[str, tuple[str, Collection[str]]]) -> None:
    """Raise InputError for each argument that is none of its choices. `given`: (value, choices), by name."""
    if problems := [
        f"{name}={value!r}: not one of the choices; {nearest(value, choices)}"
        for name, (value, choices) in given.items()
        if value not in choices
    ]:
        raise InputError(*problems)


def check_layout(layout: object) -> None:
    """Raise ConfigError unless `layout` is a Layout."""
    if not isinstance(layout, Layout):
        raise ConfigError(f"layout is of type {type(layout).__qualname__}; valid: a Layout, such as Layout(tp=2)")
