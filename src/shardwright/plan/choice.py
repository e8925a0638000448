"""One layout with its micro-batch: taken out of `Candidates`, written in a line, and read from one."""

from dataclasses import dataclass, fields
from typing import Any

from shardwright.cost.job import RECOMPUTE, Candidates
from shardwright.errors import LayoutError, nearest
from shardwright.layout import Layout

COLUMNS = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "sequence_parallel", "micro_batch", "recompute")
"""The arrays of `Candidates`."""
_SHARED = ("pp", "schedule", "virtual_stages", "stage_layers", "zero_pp_gather", "cp_method")
_IN_ORDER = ("tp", "pp", "schedule", "virtual_stages", "cp", "cp_method", "ep", "dp_replicate", "dp_shard", "zero")
"""Keys of a layout that come first where it is written."""


@dataclass(frozen=True)
class Choice:
    """A layout and how many sequences a rank runs at a time."""

    layout: Layout
    micro_batch: int = 1

    @property
    def candidates(self) -> Candidates:
        """An array of one."""
        return Candidates.of(self.layout, self.micro_batch)

    def __str__(self) -> str:
        """`tp=8,pp=4,dp_shard=2,zero=1,micro_batch=1`: what is not at its default, in the words of a run file's
        layout section; `read` gives an equal choice back."""
        return ",".join(f"{key}={_written(value)}" for key, value in self.settings().items())

    def settings(self) -> dict[str, Any]:
        """Keys of a run file's layout section that have to be written for this layout, and micro_batch; the axes
        first, then what goes with them."""
        layout, usual = self.layout, Layout()
        found = {key: getattr(layout, key) for key in _IN_ORDER if getattr(layout, key) != getattr(usual, key)}
        if layout.data_ranks * layout.cp > 1:
            found["zero"] = layout.zero
        if layout.tp > 1 and not layout.sequence_parallel:
            found["sequence_parallel"] = False
        for key in ("recompute", "zero_pp_gather", "stage_layers"):
            if getattr(layout, key) != getattr(usual, key):
                found[key] = getattr(layout, key)
        return found | {"micro_batch": self.micro_batch}


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read(text: str) -> Choice:
    """A choice from `key=value` pairs, separated by commas: keys of a run file's layout section, and micro_batch.

    What is left out is as in a run file: zero is 3 where there is dp_shard, else 0; sequence_parallel goes with tp.
    `stage_layers=20+21+20` has the layers of each stage. Raises LayoutError with every problem at once.
    """
    kinds = {each.name: type(each.default) for each in fields(Layout)} | {"micro_batch": int, "stage_layers": tuple}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, written = (part.strip() for part in pair.partition("="))
        if not equals:
            problems.append(f"--explain {pair!r}: write key=value, such as tp=8")
        elif key not in kinds:
            problems.append(f"--explain {key}={written}: there is no such key; {nearest(key, kinds)}")
        elif key in values:
            problems.append(
                f"--explain {key}={written}: given twice, and {_written(values[key])} before; leave one out"
            )
        else:
            try:
                values[key] = _value(written, kinds[key])
            except ValueError:
                problems.append(f"--explain {key}={written}: {_EXPECTED[kinds[key]]} is needed")
    micro_batch = values.pop("micro_batch", 1)
    if micro_batch < 1:
        problems.append(f"--explain micro_batch={micro_batch}: sequences at a time, 1 or more")
    usual = {"zero": 3 if values.get("dp_shard", 1) > 1 else 0, "sequence_parallel": values.get("tp", 1) > 1}
    try:
        layout = Layout(**(usual | values))
    except LayoutError as error:
        raise LayoutError(*problems, *error.problems) from None
    if problems:
        raise LayoutError(*problems)
    return Choice(layout, micro_batch)


_EXPECTED: dict[type, str] = {
    int: "a whole number",
    bool: "true or false",
    str: "a word",
    tuple: "a number of layers for each stage, such as 20+21+20,",
}


def _value(text: str, kind: type) -> Any:
    """Raises ValueError."""
    if kind is bool:
        return bool(("false", "true").index(text))
    if kind is tuple:
        return tuple(int(part) for part in text.split("+"))
    return kind(text)


def choice_at(of: Candidates, at: int) -> Choice:
    """The candidate number `at`; its recomputation has to be one that a layout knows."""
    shared = {name: getattr(of, name) for name in _SHARED}
    own: dict[str, Any] = {name: int(getattr(of, name)[at]) for name in COLUMNS}
    micro_batch, recompute = own.pop("micro_batch"), RECOMPUTE[own.pop("recompute")]
    own["sequence_parallel"] = bool(own["sequence_parallel"])
    return Choice(Layout(**shared, **own, recompute=recompute), micro_batch)
