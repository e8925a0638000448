"""Degrees to ranks, coordinates and groups, by arithmetic; the only place where ranks are numbered.

The world is a box of ranks in row-major order with these axes, outermost first:

    pp  x  dp_replicate  x  dp_shard  x  cp  x  tp

Neighbours along `tp`, which communicate most, have consecutive numbers and share a node. Pipeline stages, which
communicate least, are farthest apart. Experts use the same ranks through a second box, in which the three innermost
axes become two:

    pp  x  dp_replicate  x  expert_dp_shard  x  ep         with  expert_dp_shard * ep = dp_shard * cp * tp

| axis           | partitioned over its ranks                                                  |
| -------------- | --------------------------------------------------------------------------- |
| `pp`           | the layers, in stages                                                       |
| `dp_replicate` | the samples; each replica has everything that its shard group has           |
| `dp_shard`     | the samples, and under ZeRO optimizer states, gradients, parameters         |
| `cp`           | the tokens of a sequence: cp_ring x cp_ulysses, the latter innermost        |
| `tp`           | the rows and columns of matrices                                            |
| `ep`           | the experts                                                                 |
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from shardwright.layout.box import DENSE_AXES, NumberedRanks
from shardwright.layout.key import MOST_RANKS, written
from shardwright.layout.keys import INTEGERS, KEYS, POWERSGD, TOPK, LayoutKeys
from shardwright.schedule import build
from shardwright.schedule.actions import Ways, stages_of_rank
from shardwright.schedule.registry import Kind, find, names
from shardwright.system.errors import LayoutError, checked_constructor, nearest
from shardwright.system.units import division_problem, divisors


@checked_constructor(LayoutError)
@dataclass(frozen=True, kw_only=True)
class Layout(LayoutKeys, NumberedRanks):
    """The degrees and choices of a run: the keys of the run file's section [layout], with the same defaults. The
    metadata of each field describes the key (`KEYS`).

    Raises LayoutError, with all problems at once, for a layout that is invalid for every world size.
    """

    def __new__(cls, *_: Any, **values: Any) -> "Layout":
        _check_names(values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            if getattr(self, name) is None and key.derived and self.pp_schedule in names():
                object.__setattr__(self, name, key.derived(self))
        if self.pp_schedule in names():
            object.__setattr__(self, "virtual_stages", self.kind.stages_per_rank(self.virtual_stages))
        if problems := self.problems():
            raise LayoutError(*problems)

    def problems(self) -> list[str]:
        """Return one sentence for each rule that this layout breaks; empty for a valid layout."""
        problems = []
        for name, key in KEYS.items():
            if rule := key.problem(getattr(self, name)):
                problems.append(f"layout.{name}={getattr(self, name)!r}: {rule}")
        if not problems and self.world_size > MOST_RANKS:
            degrees = " x ".join(f"{axis} {self.degree(axis)}" for axis in DENSE_AXES if self.degree(axis) > 1)
            problems.append(f"layout: {degrees} = {self.world_size:,} ranks; at most {MOST_RANKS:,} are possible")
        if problems:
            return problems
        for name, key in KEYS.items():
            value = getattr(self, name)
            if key.needs and not key.used(self) and value != key.default_in(self):
                problems.append(f"layout.{name}={value!r} needs {key.needs}; set that, or leave it out")
        return [
            *problems,
            *self._degree_problems(),
            *self._secondary_problems(),
            *self._compression_problems(),
            *self._schedule_problems(),
        ]

    def _degree_problems(self) -> Iterator[str]:
        fold = self.dp_shard * self.cp * self.tp
        product = f"dp_shard x cp x tp = {self.dp_shard} x {self.cp} x {self.tp} = {fold}"
        if problem := division_problem("layout.ep", self.ep, fold, product, shown=False):
            yield problem
        fits = zero_fits(self.zero, self.dp_replicate, self.dp_shard, self.cp)
        if not fits and self.zero == 0:
            yield (
                f"layout.zero=0 replicates parameters, gradients and optimizer states, so nothing is sharded over "
                f"dp_shard={self.dp_shard}; set zero to 1, 2 or 3, or dp_replicate="
                f"{self.dp_replicate * self.dp_shard} and dp_shard=1"
            )
        if not fits and self.zero > 0:
            yield (
                f"layout.zero={self.zero} shards over dp_shard x cp, which is 1, while dp_replicate="
                f"{self.dp_replicate} only replicates; set dp_shard={self.dp_replicate} and dp_replicate=1, or zero=0"
            )
        if self.place_experts_every and self.offload_optimizer == "disk":
            yield (
                f"layout.place_experts_every={self.place_experts_every} with offload_optimizer='disk': experts move "
                f"with their optimizer states, and files of states are not moved between ranks; set "
                f"offload_optimizer='none' or 'cpu', or place_experts_every=0"
            )
        if self.cp_method != "usp":
            return
        key, degree = "layout.ulysses_degree", self.ulysses_degree
        if problem := division_problem(key, degree, self.cp, f"cp={self.cp}", lambda: divisors(self.cp)[1:] or [1]):
            yield problem
        if self.cp > 1 and self.ulysses_degree == 1:
            yield (
                f"layout.cp_method='usp' needs layout.ulysses_degree, the part of cp={self.cp} that partitions heads; "
                f"valid: {', '.join(map(str, divisors(self.cp)[1:]))}; with 1 it would be cp_method='zigzag'"
            )

    def _secondary_problems(self) -> Iterator[str]:
        n, shards = self.zero_secondary_ranks, self.dp_shard * self.cp
        if n > 1 and not KEYS["zero_secondary_ranks"].used(self):
            valid = ", ".join(map(str, divisors(shards)[1:-1]))
            rest = f"; valid with {shards}: {valid}" if valid else ""
            yield (
                f"layout.zero_secondary_ranks={n} needs zero=3, pp=1 and more ranks of dp_shard x cp, a multiple of "
                f"{n}, and here zero={self.zero}, pp={self.pp} and dp_shard x cp = {self.dp_shard} x {self.cp} = "
                f"{shards}{rest}; or leave it out"
            )

    def _compression_problems(self) -> Iterator[str]:
        shards, how = self.dp_shard * self.cp, self.compress_gradients
        if how in INTEGERS and not (self.zero and shards > 1):
            yield (
                f"layout.compress_gradients={how!r} needs zero=1, 2 or 3 with dp_shard x cp above 1, and here zero="
                f"{self.zero} and dp_shard x cp = {shards}; set dp_shard and zero, or compress_gradients='bf16', which "
                f"every stage can have"
            )
        replicated = self.pp_schedule in names() and len(self.ways) > 1
        if how in POWERSGD and (self.zero or self.tp * self.ep > 1 or replicated):
            yield (
                f"layout.compress_gradients={how!r} needs whole gradients of whole matrices, once a rank: zero=0, "
                f"tp=1, ep=1 and a pp_schedule without replicas of stages, and here zero={self.zero}, tp={self.tp}, "
                f"ep={self.ep} and {self.pp_schedule!r}; change those, or set compress_gradients='bf16'"
            )
        if how in TOPK and (self.zero or replicated):
            yield (
                f"layout.compress_gradients={how!r} needs the whole gradient of a rank's tokens, once a rank: zero=0 "
                f"and a pp_schedule without replicas of stages, and here zero={self.zero} and {self.pp_schedule!r}; "
                f"change those, or set compress_gradients='bf16'"
            )
        product = f"dp_shard x cp = {self.dp_shard} x {self.cp} = {shards}"
        if problem := division_problem("layout.node_ranks", self.node_ranks, shards, product, shown=False):
            yield problem

    def _schedule_problems(self) -> Iterator[str]:
        # A layout does not know the number of micro-batches; this number is valid for every schedule.
        if self.pp > 1:
            for problem in build.problems(self.pp_schedule, self.pp, 2 * self.pp, self.virtual_stages):
                yield f"layout.pp_schedule: {problem}"

    def settings(self) -> dict[str, Any]:
        """Return the keys to write for this layout: keys that differ from their default, and keys that are always
        written where they are used (`LayoutKey.always_written`)."""
        values = {name: getattr(self, name) for name in KEYS}
        return {
            name: value
            for name, value in values.items()
            if value != KEYS[name].default_in(self) or (KEYS[name].always_written and KEYS[name].used(self))
        }

    def __str__(self) -> str:
        """Return the written keys as text: `tp 2, dp_shard 2, zero 3`."""
        return ", ".join(f"{name} {written(value)}" for name, value in self.settings().items()) or "one rank"

    def changed(self, **changes: Any) -> "Layout":
        """Return this layout with changes and their consequences. None as a value means the derived default.

        A key that has no meaning any more returns to its default. Another schedule uses its own number of stages. ep is
        reduced to divide the remaining ranks. ZeRO becomes 0 if dp_shard x cp is 1, except with one replica and
        `offload_parameters`, where ZeRO selects the state on the host.

        Raises LayoutError if the changes themselves are not valid.
        """
        _check_names(changes)
        if changes.get("pp_schedule", self.pp_schedule) != self.pp_schedule:
            changes = {"virtual_stages": None, "stage_layers": None} | changes
        wanted = {name: changes.get(name, getattr(self, name)) for name in KEYS}
        wanted["ep"] = gcd(wanted["ep"], wanted["dp_shard"] * wanted["cp"] * wanted["tp"])
        alone = wanted["dp_shard"] * wanted["cp"] == 1
        if alone and (wanted["dp_replicate"] > 1 or wanted["offload_parameters"] == "none"):
            wanted["zero"] = 0
        draft = object.__new__(Layout)
        draft.__dict__.update(wanted)
        for name, key in KEYS.items():
            if name not in changes and not key.used(draft):
                wanted[name] = key.default
        return Layout(**wanted)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.degree(axis) for axis in DENSE_AXES)

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks along the data axes, over which a global batch is partitioned."""
        return self.dp_replicate * self.dp_shard

    @property
    def cp_ulysses(self) -> int:
        """Return the number of ranks of `cp` over which attention heads are partitioned, by `cp_method`: all, some or
        none."""
        return self.ulysses_of(self.cp)

    def ulysses_of(self, cp: Any) -> Any:
        """Return `cp_ulysses` with `cp` ranks instead; `cp`: a number, or an array of numbers."""
        return {"ulysses": cp, "usp": self.ulysses_degree}.get(self.cp_method, 1)

    @property
    def cp_ring(self) -> int:
        """Return the number of ranks of `cp` that pass keys and values to each other."""
        return self.cp // self.cp_ulysses

    @property
    def token_shards(self) -> bool:
        """Return whether activations are sharded by token over tp."""
        return self.sequence_parallel and self.tp > 1

    @property
    def recomputes(self) -> bool:
        """Return whether the backward pass recomputes anything."""
        return self.recompute != "none"

    @property
    def recomputes_parts(self) -> bool:
        """Return whether only parts of a block are recomputed."""
        return self.recompute == "selective"

    @property
    def kind(self) -> Kind:
        """Return the registered row of the schedule."""
        return find(self.pp_schedule)

    @property
    def ways(self) -> Ways:
        """Return the ways of micro-batches through the pipeline: for each way, the `pp` ranks of its stages."""
        return self.kind.ways(self.pp, self.virtual_stages)

    def stages_on(self, pp_rank: int) -> list[int]:
        """Return the stages on a rank of `pp`, way by way."""
        return stages_of_rank(self.ways, pp_rank)

    @property
    def n_stages(self) -> int:
        """Return the number of pipeline stages."""
        return len(self.ways[0])

    @property
    def regathers(self) -> bool:
        """Return whether ZeRO-3 frees gathered parameters after each pass of a micro-batch."""
        return self.zero == 3 and (self.pp == 1 or self.zero_pp_gather == "microbatch")

    @property
    def expert_dp_shard(self) -> int:
        """Return the number of ranks over which one expert's parameters, gradients and optimizer states are sharded."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def check_world(self, world_size: int) -> None:
        """Raise LayoutError if the product of the degrees is not the number of processes."""
        if self.world_size != world_size:
            degrees = " x ".join(f"{axis} {self.degree(axis)}" for axis in DENSE_AXES if self.degree(axis) > 1)
            raise LayoutError(
                f"the layout needs {self.world_size} ranks ({degrees or 'every degree is 1'}), but {world_size} "
                f"{'process was' if world_size == 1 else 'processes were'} started; start "
                f"{self.world_size}, or change the degrees so that they multiply to {world_size}"
            )


def zero_fits(zero: Any, dp_replicate: Any, dp_shard: Any, cp: Any) -> Any:
    """Return whether a stage of ZeRO fits the data ranks: stage 0 has none of dp_shard, and other stages have ranks of
    dp_shard x cp to shard over, or a single replica. The arguments are integers, or arrays of integers, which give an
    array of booleans."""
    return ((zero > 0) | (dp_shard == 1)) & ((zero == 0) | (dp_shard * cp > 1) | (dp_replicate == 1))


def batch_divides(global_batch: int, micro_batch: Any, data_ranks: Any) -> Any:
    """Return whether every data rank has the same number of whole micro-batches of a batch. The last two arguments are
    integers, or arrays of integers, which give an array of booleans."""
    return global_batch % (micro_batch * data_ranks) == 0


def accumulation(global_batch: int, micro_batch: int, data_ranks: int) -> int:
    """Return the micro-batches of a data rank in one step: global_batch / (micro_batch x data_ranks), in sequences.

    Raises LayoutError if the result is not an integer.
    """
    assert min(global_batch, micro_batch, data_ranks) >= 1, (global_batch, micro_batch, data_ranks)
    unit = micro_batch * data_ranks
    rounds, rest = divmod(global_batch, unit)
    if rest:
        near = f"{rounds * unit} or {(rounds + 1) * unit}" if rounds else str(unit)
        raise LayoutError(
            f"batch.global_batch={global_batch} is not a multiple of micro_batch={micro_batch} x "
            f"{data_ranks} data ranks = {unit} ({global_batch} = {unit}*{rounds} + {rest}); nearest: {near}"
        )
    return rounds


def _check_names(values: Mapping[str, Any]) -> None:
    """Raise LayoutError for names that are not layout keys, with the nearest key, and for non-numeric values."""
    if unknown := [name for name in values if name not in KEYS]:
        raise LayoutError(*(f"layout.{name}: there is no such key; {nearest(name, KEYS)}" for name in unknown))
    rules = {name: KEYS[name].number_problem(value) for name, value in values.items()}
    if broken := [f"layout.{name}={values[name]!r}: {rule}" for name, rule in rules.items() if rule is not None]:
        raise LayoutError(*broken)
