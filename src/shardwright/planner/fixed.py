"""Layout keys that are not searched because the user has fixed their values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.cost.job import COLUMNS, RECOMPUTE, Candidates, Job
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.planner.choice import pairs
from shardwright.planner.space import Mask, groups
from shardwright.system.errors import LayoutError, nearest

OPTION = "--fix"
OFFLOADS = ("offload_optimizer", "offload_parameters", "offload_activations")


@dataclass(frozen=True)
class FixedChoices:
    """Select the candidates in which each key of `values` (of [layout], or micro_batch) has the given value and is
    used. The degree 1 of an axis is a value like any other."""

    values: Mapping[str, Any]

    def __call__(self, candidates: Candidates) -> Mask:
        found = np.ones(len(candidates), dtype=bool)
        for name, value in self.values.items():
            if name in COLUMNS:
                found &= getattr(candidates, name) == (RECOMPUTE.index(value) if name == "recompute" else value)
            else:
                found &= getattr(candidates.shared, name) == value
                found &= name in DENSE_AXES or KEYS[name].used(candidates)
        return found

    @property
    def offload(self) -> dict[str, Any]:
        """Return the offload keys. Only the fixed offloads are searched."""
        return {name: value for name, value in self.values.items() if name in OFFLOADS}

    def __str__(self) -> str:
        return ",".join(f"{name}={written(value)}" for name, value in self.values.items())


def read_fixed(text: str) -> FixedChoices:
    """Parse the values to fix, `key=value` pairs separated by commas. Raises LayoutError with all problems at once."""
    return _checked(*pairs(text, OPTION))


def fixed_values(values: Mapping[str, Any]) -> FixedChoices:
    """Check the values to fix. Raises LayoutError with every problem at once."""
    known = [*KEYS, "micro_batch"]
    wrong = [
        f"{OPTION} {name}={value}: no such key; {nearest(name, known)}"
        for name, value in values.items()
        if name not in known
    ]
    return _checked({name: value for name, value in values.items() if name in known}, wrong)


def _checked(values: Mapping[str, Any], problems: list[str]) -> FixedChoices:
    for name, value in values.items():
        rule = None if name == "micro_batch" else KEYS[name].problem(value)
        if rule is not None:
            problems.append(f"{OPTION} {name}={written(value)}: {rule}")
        elif name == "micro_batch" and value < 1:
            problems.append(f"{OPTION} micro_batch={value}: sequences at a time, 1 or more")
        elif name != "micro_batch" and value in KEYS[name].not_priced():
            problems.append(f"{OPTION} {name}={written(value)}: plan has no formulas for it")
    if not values and not problems:
        problems.append(f"{OPTION}: write key=value, such as tp=8,pp=1")
    if problems:
        raise LayoutError(*problems)
    return FixedChoices(values)


def none_searched(job: Job, fixed: FixedChoices) -> LayoutError:
    """Return the error that no layout of the space has these values, with the values that layouts have for each key."""
    found: dict[str, set[Any]] = {name: set() for name in fixed.values}
    for group in groups(job, fixed.offload):
        for name in found:
            column = getattr(group, name) if name in COLUMNS else [getattr(group.shared, name)]
            found[name] |= set(np.unique(column).tolist())
    named = {name: [RECOMPUTE[each] for each in some] if name == "recompute" else some for name, some in found.items()}
    values = "; ".join(f"{name}: {', '.join(map(written, sorted(some)))}" for name, some in named.items())
    return LayoutError(
        f"{OPTION} {fixed}: no layout that is searched on {job.cluster.size} accelerators has these values; those that "
        f"some layouts have, {values}; --explain takes a layout that is not searched"
    )
