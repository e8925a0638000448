"""All tables of the modules of this package together: the bugs of each family, and of all families by name."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from tests.training import bugs
from tests.training.bugs.bug import AnyBug, Bug, ResumeBug, UnitBug

MODULES: tuple[ModuleType, ...] = tuple(
    import_module(f"{bugs.__name__}.{each.name}")
    for each in iter_modules(bugs.__path__)
    if each.name != __name__.rpartition(".")[2]
)
_NAMES = {
    "SCALE": "wrong scale",
    "REDUCTION": "missing or double reduction",
    "SHARD": "wrong shard",
    "ORDER": "wrong order",
    "STALE": "stale value",
    "DTYPE": "wrong dtype",
    "MASK": "wrong mask",
    "OFF_BY_ONE": "off by one",
    "RECOMPUTATION": "wrong recomputation",
    "BUCKETS": "later buckets forgotten",
    "CHUNKS": "wrong chunks of the loss",
    "FILES": "wrong weights from files",
    "SERVING": "wrong price of serving",
    "RESUME": "lost on resume",
}
"""Name of the table of a family in each module -> the family."""


def _bugs_of_table(table: str) -> dict[str, AnyBug]:
    return {name: bug for module in MODULES for name, bug in getattr(module, table, {}).items()}


FAMILIES: dict[str, Mapping[str, AnyBug]] = {family: _bugs_of_table(table) for table, family in _NAMES.items()}
ALL: dict[str, AnyBug] = {name: bug for bugs in FAMILIES.values() for name, bug in bugs.items()}
assert len(ALL) == sum(map(len, FAMILIES.values())), "two bugs have the same name"
assert len(ALL) == sum(
    isinstance(bug, Bug | ResumeBug | UnitBug)
    for module in MODULES
    for table in vars(module).values()
    if isinstance(table, dict)
    for bug in table.values()
), "a table of bugs has the name of no family"
