"""Ranks numbered row by row over named axes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product


class Box:
    """The ranks of some axes, outermost first: axis -> how many ranks it has."""

    def __init__(self, degrees: dict[str, int]) -> None:
        self.degrees = degrees

    def coordinates(self, rank: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, found[axis] = divmod(rank, degree)
        return found

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        rank = 0
        for axis, degree in self.degrees.items():
            rank = rank * degree + coordinates.get(axis, 0)
        return rank

    def span(self, axes: Iterable[str]) -> Iterator[dict[str, int]]:
        """Every combination of coordinates along some axes, the innermost axis fastest."""
        wanted = set(axes)
        ordered = [axis for axis in self.degrees if axis in wanted]
        for position in product(*(range(self.degrees[axis]) for axis in ordered)):
            yield dict(zip(ordered, position, strict=True))

    def groups(self, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
        along = set(axes)
        for rest in self.span(set(self.degrees) - along):
            yield tuple(self.rank_at({**rest, **there}) for there in self.span(along))
