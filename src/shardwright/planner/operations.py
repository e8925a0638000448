"""How a run is operated, as text such as `save=local,detect_min=5`: failures, restarts, checkpoints, evaluation."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardwright.system.errors import InputError, nearest

SAVES = {
    "sync": "training waits until the checkpoint is in the storage of all nodes",
    "async": "training waits for a copy to host memory, which is written to the storage of all nodes in the background",
    "local": "the same, written to the disks of the node and of the next node",
}


def _number(help: str, low: float, high: float, default: float | None, *, whole: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high, "whole": whole})


@dataclass(frozen=True)
class Operations:
    """The keys of `--operations`. `failures`: None: the published rate of the accelerator; `save_every`: None: the
    best interval. The defaults of `detect_min` and `restart_min` add up to 10 minutes, the stall of a full restart at
    100,000 accelerators (arXiv 2602.00277)."""

    failures: float | None = _number("interruptions per 1,000 accelerator-days", 1e-6, 1000, None)
    detect_min: float = _number("minutes from a failure until the run is stopped", 0, 10_000, 3.0)
    restart_min: float = _number("minutes from there to the next step, without reading the checkpoint", 0, 10_000, 7.0)
    save: str = field(default="async", metadata={"help": f"how checkpoints are saved: {', '.join(SAVES)}"})
    save_every: int | None = _number("steps between checkpoints", 1, 10**9, None, whole=True)
    storage_gb_per_s: float = _number("GB/s of the storage of all nodes, for each node", 1e-4, 10_000, 1.0)
    repair_hours: float = _number("hours until a failed node is back", 0, 10_000, 24.0)
    evaluate_every: int = _number("steps between evaluations; 0: none", 0, 10**9, 0, whole=True)
    evaluate_samples: int = _number("sequences of an evaluation", 0, 10**9, 0, whole=True)

    @property
    def down_s(self) -> float:
        """Return the seconds from a failure to the next step, without reading the checkpoint."""
        return 60 * (self.detect_min + self.restart_min)

    def assumed(self) -> Iterator[str]:
        """Yield the values that the days and the spare nodes rest on, as sentences."""
        yield (
            f"an interruption takes {self.detect_min:g} min to detect and {self.restart_min:g} min to restart, a node "
            f"{self.repair_hours:g} h to repair; each node writes {self.storage_gb_per_s:g} GB/s to the storage of all "
            "nodes"
        )


def read_operations(text: str, **given: Any) -> Operations:
    """Return the operations that the text describes; `given`: the values of keys that the text does not name.

    Raises InputError with every key and value that is not valid.
    """
    known = {setting.name: setting.metadata for setting in fields(Operations)}
    problems = []
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in known:
            problems.append(f"{key!r} is not a key; {nearest(key, known)}")
        elif key == "save":
            given[key] = value
            problems += [] if value in SAVES else [f"save={value!r}: {nearest(value, SAVES)}"]
        elif (number := _read_number(value, known[key])) is None:
            low, high, whole = (known[key][name] for name in ("low", "high", "whole"))
            problems.append(f"{key}={value!r}: valid: a {'whole ' * whole}number from {low:g} to {high:,}")
        else:
            given[key] = number
    if problems:
        raise InputError(*(f"--operations {text}: {problem}" for problem in problems))
    return Operations(**given)


def _read_number(text: str, key: Mapping[str, Any]) -> float | int | None:
    """Return the number, or None if the text is not a number that the key allows."""
    if not re.fullmatch(r"[0-9]{1,15}" if key["whole"] else r"[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,2})?", text):
        return None
    number = int(text) if key["whole"] else float(text)
    return number if key["low"] <= number <= key["high"] else None
