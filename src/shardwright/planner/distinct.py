"""Which of the fastest layouts are worth a row of their own: of layouts that cost the same, one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.layout.keys import KEYS
from shardwright.planner.choice import Choice
from shardwright.planner.pool import LayoutPool

SAME_TIME = 1e-6
"""Share of a step by which two layouts count as equally fast."""
SAME_BYTES = 1e-9
"""Share of the peak by which they count as needing equal memory."""
CHOICES = {key.group: tuple(name for name in KEYS if KEYS[name].group == key.group) for key in KEYS.values()}
CHOICES["micro_batch"] = ("micro_batch",)
"""What a person decides at once, with the keys of a layout that say it."""


@dataclass
class EqualLayouts:
    """Layouts of a pool, by their numbers, that follow from one another by one choice at no cost."""

    step_s: float
    peak_bytes: float
    members: dict[int, Choice] = field(default_factory=dict)

    @property
    def simplest(self) -> int:
        """The member that comes first in the space."""
        return min(self.members)

    @property
    def others(self) -> list[Choice]:
        """All but the simplest."""
        return [choice for number, choice in sorted(self.members.items()) if number != self.simplest]

    def takes(self, choice: Choice, step_s: float, peak_bytes: float) -> bool:
        """Whether a layout costs what these do, and is one choice away from one of them."""
        return (
            abs(step_s - self.step_s) <= SAME_TIME * self.step_s
            and abs(peak_bytes - self.peak_bytes) <= SAME_BYTES * self.peak_bytes
            and any(len(differing(each, choice)) == 1 for each in self.members.values())
        )


def distinct(pool: LayoutPool, k: int) -> list[EqualLayouts]:
    """The k fastest layouts of which no two are equal, the fastest first, each with its equals; fewer than k where
    there are not so many. The pool is asked for more until one layout beyond the k-th is known, so that the
    equals of each are complete."""
    asked = k + 1
    while True:
        numbers = pool.fastest(asked)
        found = _grouped(pool, numbers)
        if len(found) > k or len(numbers) < asked:
            return sorted(found[:k], key=lambda each: pool.times_s([each.simplest]))
        asked += 2 * k


def differing(one: Choice, other: Choice) -> list[str]:
    """The choices (`CHOICES`) in which two layouts differ."""
    return [name for name, keys in CHOICES.items() if any(value(one, key) != value(other, key) for key in keys)]


def value(choice: Choice, key: str) -> object:
    """Of one key of a layout, or the micro-batch."""
    return choice.micro_batch if key == "micro_batch" else getattr(choice.layout, key)


def _grouped(pool: LayoutPool, numbers: Sequence[int]) -> list[EqualLayouts]:
    found: list[EqualLayouts] = []
    for number, step_s in zip(numbers, pool.times_s(numbers), strict=True):
        choice, peak = pool.choice(number), float(pool.peak_bytes[number])
        taking = [each for each in found if each.takes(choice, step_s, peak)]
        equals = taking[0] if taking else EqualLayouts(step_s, peak)
        if not taking:
            found.append(equals)
        for other in taking[1:]:  # this layout is one choice away from layouts of both
            equals.members |= other.members
            found.remove(other)
        equals.members[number] = choice
    return found
