"""Row-major numbering of ranks over named axes, and the three such numberings of a layout's ranks."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from math import prod

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
CONTEXT_AXES = ("pp", "dp_replicate", "dp_shard", "cp_ring", "cp_ulysses", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "expert_dp_shard", "ep")


class Box:
    """Ranks over named axes, outermost first: axis -> degree."""

    def __init__(self, degrees: dict[str, int]) -> None:
        self.degrees = degrees

    def coordinates(self, rank: int) -> dict[str, int]:
        result: dict[str, int] = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, result[axis] = divmod(rank, degree)
        return result

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        rank = 0
        for axis, degree in self.degrees.items():
            rank = rank * degree + coordinates.get(axis, 0)
        return rank

    def span(self, axes: Iterable[str]) -> Iterator[dict[str, int]]:
        """Yield every combination of coordinates along some axes, the innermost axis fastest."""
        wanted = set(axes)
        ordered = [axis for axis in self.degrees if axis in wanted]
        for position in product(*(range(self.degrees[axis]) for axis in ordered)):
            yield dict(zip(ordered, position, strict=True))

    def groups(self, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
        along = set(axes)
        for rest in self.span(set(self.degrees) - along):
            yield tuple(self.rank_at({**rest, **place}) for place in self.span(along))


class NumberedRanks:
    """The ranks of a layout: their coordinates, and the groups of ranks that differ along some axes only. Each axis
    name is an attribute with the axis's degree."""

    def degree(self, axis: str) -> int:
        """Return the degree of an axis of any box."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank along every axis of both boxes."""
        world_size = prod(self._boxes[0].degrees.values())
        assert 0 <= rank < world_size, f"rank {rank} of a world of {world_size}"
        return {axis: at for box in self._boxes for axis, at in box.coordinates(rank).items()}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at coordinates of the dense box; a missing axis counts as 0."""
        return self._boxes[0].rank_at(coordinates)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ only along `axes` (of one box), each in the order of its coordinates.

        The groups partition the world: `groups("tp")` are the tensor-parallel groups, `groups("dp_shard", "cp")` the
        groups that a sharded parameter is spread over.
        """
        return list(self._box(axes).groups(axes))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group in `groups(*axes)` that contains `rank`."""
        box = self._box(axes)
        coordinates = box.coordinates(rank)
        return tuple(box.rank_at({**coordinates, **place}) for place in box.span(axes))

    def data_rank(self, rank: int) -> int:
        """Return the index of the part, out of `data_ranks`, of a global batch that a rank reads."""
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.degree("dp_shard") + coordinates["dp_shard"]

    @cached_property
    def _boxes(self) -> list[Box]:
        """Return the three numberings of the ranks, the dense box first."""
        return [Box({axis: self.degree(axis) for axis in axes}) for axes in (DENSE_AXES, CONTEXT_AXES, EXPERT_AXES)]

    def _box(self, axes: Iterable[str]) -> Box:
        wanted = set(axes)
        for box in self._boxes:
            if wanted <= set(box.degrees):
                return box
        raise AssertionError(f"axes {sorted(wanted)} are not of one box: {DENSE_AXES}, {CONTEXT_AXES} or {EXPERT_AXES}")
