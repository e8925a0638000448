"""Degrees to ranks, coordinates and groups, by arithmetic; the only place where ranks are numbered.

The world is a box of ranks, numbered row by row with the axes in this order, outermost first:

    pp  x  dp_replicate  x  dp_shard  x  cp  x  tp

so that neighbours in `tp`, which talk most, have neighbouring numbers and share a node, and pipeline stages,
which talk least, lie farthest apart. Experts see the same ranks through a second box in which the three
innermost axes are folded into two:

    pp  x  dp_replicate  x  expert_dp_shard  x  ep         with  expert_dp_shard * ep = dp_shard * cp * tp

| axis           | what its ranks share out                                                    |
| -------------- | --------------------------------------------------------------------------- |
| `pp`           | the layers, in stages                                                         |
| `dp_replicate` | the samples; each replica holds everything its shard group holds             |
| `dp_shard`     | the samples, and under ZeRO optimizer state, gradients, parameters           |
| `cp`           | the tokens of a sequence: cp_ring x cp_ulysses, the latter innermost         |
| `tp`           | the rows and columns of matrices                                             |
| `ep`           | the experts                                                                  |
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from shardwright.errors import LayoutError
from shardwright.schedule import build
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.schedule.placement import Ways, held_by
from shardwright.schedule.registry import Kind, find, names

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
CONTEXT_AXES = ("pp", "dp_replicate", "dp_shard", "cp_ring", "cp_ulysses", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "expert_dp_shard", "ep")
DATA_AXES = ("dp_replicate", "dp_shard")
ZERO_STAGES = (0, 1, 2, 3)
CP_METHODS = ("zigzag", "ring", "allgather", "ulysses", "usp")
RECOMPUTE = ("none", "full")
ZERO_PP_GATHER = ("step", "microbatch")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of a run and the choices that go with them. Every degree is a number of ranks, 1 or more.

    `zero`: what the ranks of `dp_shard` and `cp` hold a share of instead of a copy (ZeRO, arXiv 1910.02054):
    0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
    `sequence_parallel`: what is not inside a block's matrix products is held as token shards over `tp` (Korthikanti
    et al., arXiv 2205.05198). Without tp it changes nothing.
    `cp_method`: how tokens are dealt over `cp` and how attention reaches all of them; `ulysses_degree` is the part of
    `cp` that "usp" gives to Ulysses.
    `recompute`: what the backward pass computes again instead of keeping it: nothing, or every block.
    `schedule`, `virtual_stages`: the order of a pipeline's work (`shardwright.schedule`), and the stages of a rank
    where the schedule leaves that open. `stage_layers`: layers of each stage in order; None: by cost (`split.stages`).
    `zero_pp_gather`: under ZeRO-3 with pp, whether a stage is gathered once a "step" or for each "microbatch".

    Raises LayoutError, with every problem at once, for a layout that cannot exist on any world.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    cp_method: str = "zigzag"
    ulysses_degree: int = 1
    recompute: str = "none"
    schedule: str = ONE_F_ONE_B.name
    virtual_stages: int = None  # type: ignore[assignment]  # the schedule's own number
    stage_layers: tuple[int, ...] | None = None
    zero_pp_gather: str = "step"

    def __post_init__(self) -> None:
        if self.schedule in names():
            object.__setattr__(self, "virtual_stages", find(self.schedule).stages_per_rank(self.virtual_stages))
        if problems := self.problems():
            raise LayoutError(*problems)

    def problems(self) -> list[str]:
        """Every rule this layout breaks, one sentence each; empty for a good one."""
        found = [
            f"layout.{axis}={self.degree(axis)}: a degree is a number of ranks, 1 or more"
            for axis in (*DENSE_AXES, "ep", "ulysses_degree", "virtual_stages")
            if self.degree(axis) < 1
        ]
        if self.zero not in ZERO_STAGES:
            found.append(f"layout.zero={self.zero}: the stages of ZeRO are 0, 1, 2 and 3")
        choices = {
            "cp_method": CP_METHODS,
            "recompute": RECOMPUTE,
            "schedule": names(),
            "zero_pp_gather": ZERO_PP_GATHER,
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                found.append(f"layout.{name}={getattr(self, name)!r} is not known; valid: {', '.join(valid)}")
        if found:
            return found
        fold = self.dp_shard * self.cp * self.tp
        if fold % self.ep:
            found.append(
                f"layout.ep={self.ep} does not divide dp_shard x cp x tp = {self.dp_shard} x {self.cp} x "
                f"{self.tp} = {fold}; valid: {_divisors(fold)}"
            )
        if self.zero == 0 and self.dp_shard > 1:
            found.append(
                f"layout.zero=0 keeps a full copy on every rank, so nothing is sharded over "
                f"dp_shard={self.dp_shard}; set zero to 1, 2 or 3, or dp_replicate="
                f"{self.dp_replicate * self.dp_shard} and dp_shard=1"
            )
        if self.zero > 0 and self.dp_shard * self.cp == 1 and self.dp_replicate > 1:
            found.append(
                f"layout.zero={self.zero} shards over dp_shard x cp, which is 1, while dp_replicate="
                f"{self.dp_replicate} only makes copies; set dp_shard={self.dp_replicate} and dp_replicate=1, "
                f"or zero=0"
            )
        if self.cp_method == "usp" and self.cp % self.ulysses_degree:
            found.append(
                f"layout.ulysses_degree={self.ulysses_degree} does not divide cp={self.cp} "
                f"({self.cp} = {self.ulysses_degree}*{self.cp // self.ulysses_degree} + "
                f"{self.cp % self.ulysses_degree}); valid: {_divisors(self.cp).removeprefix('1, ')}"
            )
        if self.cp_method == "usp" and self.cp > 1 and self.ulysses_degree == 1:
            found.append(
                f"layout.cp_method='usp' needs layout.ulysses_degree, the part of cp={self.cp} that deals out heads; "
                f"valid: {_divisors(self.cp).removeprefix('1, ')}; with 1 it would be cp_method='zigzag'"
            )
        if self.cp_method != "usp" and self.ulysses_degree != 1:
            found.append(
                f"layout.ulysses_degree={self.ulysses_degree} is for cp_method='usp', and cp_method is "
                f"{self.cp_method!r}; leave it out, or set cp_method='usp'"
            )
        return found + list(self._pipeline_problems())

    def _pipeline_problems(self) -> Iterator[str]:
        if self.zero_pp_gather != "step" and (self.pp == 1 or self.zero != 3):
            yield (
                f"layout.zero_pp_gather={self.zero_pp_gather!r} is for ZeRO-3 under a pipeline, and zero={self.zero}, "
                f"pp={self.pp}; leave it out, or set zero=3 and pp above 1"
            )
        if self.pp == 1:
            usual = {"schedule": ONE_F_ONE_B.name, "virtual_stages": self.kind.virtual_stages, "stage_layers": None}
            for name, default in usual.items():
                if getattr(self, name) != default:
                    yield f"layout.{name}={getattr(self, name)!r} is for a pipeline, and layout.pp is 1; leave it out"
            return
        # Of the microbatches, which a layout does not know, so many that no schedule minds.
        for problem in build.problems(self.schedule, self.pp, 2 * self.pp, self.virtual_stages):
            yield f"layout.schedule: {problem}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degree(axis) for axis in DENSE_AXES)

    @property
    def data_ranks(self) -> int:
        """Number of ranks along the data axes: into how many parts a global batch is dealt."""
        return self.dp_replicate * self.dp_shard

    @property
    def cp_ulysses(self) -> int:
        """Ranks of `cp` among which attention heads are dealt: all, some or none, as `cp_method` says."""
        return {"ulysses": self.cp, "usp": self.ulysses_degree}.get(self.cp_method, 1)

    @property
    def cp_ring(self) -> int:
        """Ranks of `cp` among which keys and values travel."""
        return self.cp // self.cp_ulysses

    @property
    def token_shards(self) -> bool:
        """Whether sequence parallelism has anything to cut."""
        return self.sequence_parallel and self.tp > 1

    @property
    def kind(self) -> Kind:
        """What is registered under the name of the schedule."""
        return find(self.schedule)

    @property
    def ways(self) -> Ways:
        """The ways microbatches take through the pipeline: for each, the rank of `pp` of every stage in order."""
        return self.kind.ways(self.pp, self.virtual_stages)

    def held_by(self, pp_rank: int) -> list[tuple[int, int]]:
        """What a rank of `pp` holds, as (way, stage), in the order of ways and stages."""
        return held_by(self.ways, pp_rank)

    @property
    def n_stages(self) -> int:
        """Into how many stages the layers are cut."""
        return len(self.ways[0])

    @property
    def regathers(self) -> bool:
        """Whether ZeRO-3 frees what it has gathered after each pass of a microbatch."""
        return self.zero == 3 and (self.pp == 1 or self.zero_pp_gather == "microbatch")

    @property
    def expert_dp_shard(self) -> int:
        """What is left of dp_shard x cp x tp for sharding one expert's own state."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def degree(self, axis: str) -> int:
        """Number of ranks along an axis of either box."""
        return int(getattr(self, axis))

    def check_world(self, world_size: int) -> None:
        """Raises LayoutError when the degrees do not multiply to the number of processes there are."""
        if self.world_size != world_size:
            degrees = " x ".join(f"{axis} {self.degree(axis)}" for axis in DENSE_AXES if self.degree(axis) > 1)
            raise LayoutError(
                f"the layout needs {self.world_size} ranks ({degrees or 'every degree is 1'}), but {world_size} "
                f"{'process was' if world_size == 1 else 'processes were'} started; start "
                f"{self.world_size}, or change the degrees so that they multiply to {world_size}"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis, of both boxes."""
        assert 0 <= rank < self.world_size, f"rank {rank} of a world of {self.world_size}"
        return {axis: at for box in self._boxes for axis, at in box.coordinates(rank).items()}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at coordinates of the dense box; an axis left out counts as 0."""
        return self._boxes[0].rank_at(coordinates)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along `axes` (of one box), each in the order of its coordinates.

        The groups partition the world: `groups("tp")` are the tensor-parallel groups,
        `groups("dp_shard", "cp")` those over which a sharded parameter is spread.
        """
        return list(self._box(axes).groups(axes))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one group of `groups(*axes)` that a rank belongs to."""
        box = self._box(axes)
        here = box.coordinates(rank)
        return tuple(box.rank_at({**here, **there}) for there in box.span(axes))

    def data_rank(self, rank: int) -> int:
        """Which of the `data_ranks` parts of a global batch a rank reads."""
        here = self.coordinates(rank)
        return here["dp_replicate"] * self.dp_shard + here["dp_shard"]

    @cached_property
    def _boxes(self) -> "list[_Box]":
        """The same ranks, numbered three ways; the dense box first."""
        return [_Box({axis: self.degree(axis) for axis in axes}) for axes in (DENSE_AXES, CONTEXT_AXES, EXPERT_AXES)]

    def _box(self, axes: Iterable[str]) -> "_Box":
        wanted = set(axes)
        for box in self._boxes:
            if wanted <= set(box.degrees):
                return box
        raise AssertionError(f"axes {sorted(wanted)} are not of one box: {DENSE_AXES}, {CONTEXT_AXES} or {EXPERT_AXES}")


def accumulation(global_batch: int, micro_batch: int, data_ranks: int) -> int:
    """Microbatches that a data rank runs in one step: global_batch / (micro_batch x data_ranks), in sequences.

    Raises LayoutError where that is not a whole number.
    """
    assert min(global_batch, micro_batch, data_ranks) >= 1, (global_batch, micro_batch, data_ranks)
    unit = micro_batch * data_ranks
    rounds, rest = divmod(global_batch, unit)
    if rest:
        near = f"{rounds * unit} or {(rounds + 1) * unit}" if rounds else str(unit)
        raise LayoutError(
            f"batch.global_batch={global_batch} is not a whole number of rounds of micro_batch={micro_batch} x "
            f"{data_ranks} data ranks = {unit} ({global_batch} = {unit}*{rounds} + {rest}); nearest: {near}"
        )
    return rounds


class _Box:
    """Ranks numbered row by row over named axes, outermost first."""

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


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
