"""Re-inject a known bug: change a line of our own code for the length of a `with`, to see that a test notices."""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

# (module, or module:class, that holds the function; its name; the line as it is; the line as the bug has it)
Mutation = tuple[str, str, str, str]


@contextmanager
def mutated(*mutations: Mutation) -> Iterator[None]:
    """Every mutation in place; the code is recompiled in its own module, so that the bug is really our code's.

    An assertion fails if the line to change is no longer there: a mutation must not quietly stop mutating.
    """
    originals: list[tuple[Any, str, Any]] = []
    for place, name, healthy, buggy in mutations:
        owner = resolve_name(place)
        original = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(healthy) == 1, f"{name} holds {source.count(healthy)} of {healthy!r}"
        module = sys.modules[original.__module__]
        space: dict[str, Any] = {}
        exec(compile(source.replace(healthy, buggy), f"<mutated {name}>", "exec"), module.__dict__, space)
        originals.append((owner, name, original))
        setattr(owner, name, space[name])
    try:
        yield
    finally:
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)
