"""Select the fastest layouts that deserve a row of their own: one for each set of layouts with equal cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.layout.keys import KEYS
from shardwright.planner.choice import Choice
from shardwright.planner.pool import LayoutPool

SAME_TIME = 1e-6
"""Relative difference of step times up to which two layouts count as equally fast."""
SAME_BYTES = 1e-9
"""Relative difference of peak memory up to which two layouts count as needing equal memory."""
CHOICES = {key.group: tuple(name for name in KEYS if KEYS[name].group == key.group) for key in KEYS.values()}
CHOICES["micro_batch"] = ("micro_batch",)
"""The choices that a person makes at once, with the layout keys of each."""


@dataclass
class EqualLayouts:
    """Layouts of a pool, by index, that differ from one another by one choice at a time and have the same cost."""

    step_s: float
    peak_bytes: float
    members: dict[int, Choice] = field(default_factory=dict)

    @property
    def simplest(self) -> int:
        """Return the member that comes first in the space."""
        return min(self.members)

    @property
    def others(self) -> list[Choice]:
        """Return all members except the simplest."""
        return [choice for number, choice in sorted(self.members.items()) if number != self.simplest]

    def takes(self, choice: Choice, step_s: float, peak_bytes: float) -> bool:
        """Return whether a layout has the same cost as these, and differs in one choice from one of them."""
        return (
            abs(step_s - self.step_s) <= SAME_TIME * self.step_s
            and abs(peak_bytes - self.peak_bytes) <= SAME_BYTES * self.peak_bytes
            and any(len(differing(member, choice)) == 1 for member in self.members.values())
        )


def distinct(pool: LayoutPool, k: int) -> list[EqualLayouts]:
    """Return the k fastest layouts that are pairwise unequal, the fastest first, each with its equals; fewer than k if
    the pool has fewer. More layouts of the pool are evaluated until one layout after the k-th is known, so that the
    equals of each are complete."""
    count = k + 1
    while True:
        numbers = pool.fastest(count)
        groups = _grouped(pool, numbers)
        if len(groups) > k or len(numbers) < count:
            return sorted(groups[:k], key=lambda group: pool.times_s([group.simplest]))
        count += 2 * k


def differing(one: Choice, other: Choice) -> list[str]:
    """Return the choices (`CHOICES`) in which two layouts differ."""
    return [name for name, keys in CHOICES.items() if any(value(one, key) != value(other, key) for key in keys)]


def value(choice: Choice, key: str) -> object:
    """Return the value of a layout key, or of the micro-batch."""
    return choice.micro_batch if key == "micro_batch" else getattr(choice.layout, key)


def _grouped(pool: LayoutPool, numbers: Sequence[int]) -> list[EqualLayouts]:
    groups: list[EqualLayouts] = []
    for number, step_s in zip(numbers, pool.times_s(numbers), strict=True):
        choice, peak = pool.choice(number), float(pool.peak_bytes[number])
        taking = [group for group in groups if group.takes(choice, step_s, peak)]
        equals = taking[0] if taking else EqualLayouts(step_s, peak)
        if not taking:
            groups.append(equals)
        for other in taking[1:]:  # this layout is one choice away from layouts of both
            equals.members |= other.members
            groups.remove(other)
        equals.members[number] = choice
    return groups
