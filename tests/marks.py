"""Which cases of a test `make test` runs; the others are left to `make prove`."""

from collections.abc import Iterable
from typing import Any

import pytest

prove = pytest.mark.prove


def rest_prove(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """`cases` for a parametrised test, all marked `prove` but those of `quick`, of which each has to be one of them."""
    cases = list(cases)
    missing = [case for case in quick if case not in cases]
    assert not missing, f"no case: {missing}"
    values = [case if isinstance(case, tuple) and not hasattr(case, "_fields") else (case,) for case in cases]
    return [
        pytest.param(*value, marks=[] if case in quick else prove) for case, value in zip(cases, values, strict=True)
    ]
