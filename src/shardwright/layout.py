"""Degrees to ranks, coordinates and groups, by arithmetic; the only place where ranks are numbered.

The world is a box of ranks, numbered row by row with the axes in this order, outermost first:

    pp  x  dp_replicate  x  dp_shard  x  cp  x  tp

so that neighbours in `tp`, which talk most, have neighbouring numbers and share a node, and pipeline stages,
which talk least, lie farthest apart. Experts see the same ranks through a second box in which the three
innermost axes are folded into two:

    pp  x  dp_replicate  x  expert_dp_shard  x  ep         with  expert_dp_shard * ep = dp_shard * cp * tp

| axis           | what is partitioned over its ranks                                          |
| -------------- | --------------------------------------------------------------------------- |
| `pp`           | the layers, in stages                                                         |
| `dp_replicate` | the samples; each replica holds everything its shard group holds             |
| `dp_shard`     | the samples, and under ZeRO optimizer states, gradients, parameters          |
| `cp`           | the tokens of a sequence: cp_ring x cp_ulysses, the latter innermost         |
| `tp`           | the rows and columns of matrices                                             |
| `ep`           | the experts                                                                  |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import gcd, prod
from typing import Any, get_type_hints

from shardwright import compression
from shardwright.box import DENSE_AXES, NumberedRanks
from shardwright.errors import LayoutError
from shardwright.keys import Key, Sizes, written
from shardwright.schedule import build
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.schedule.placement import Ways, stages_of_rank
from shardwright.schedule.registry import Kind, find, names

CP_METHODS = ("zigzag", "ring", "allgather", "ulysses", "usp")
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "cpu", "disk")
AUTO = "auto"
"""In a run file: the least of `RECOMPUTE` that fits, decided when the memory of the devices is known."""
RECOMPUTE_MODULES = ("norms", "activation", "rope", "mla_up", "attention", "experts")

_ZERO_WORDS = (
    "every rank holds all parameters, gradients and optimizer states of its stage",
    "optimizer states are sharded",
    "optimizer states and gradients are sharded",
    "optimizer states, gradients and parameters are sharded",
)

_OFFLOADED_WORDS = {"none": "in memory", "cpu": "in the memory of the host", "disk": "on a disk"}


def _key(default: Any, **known: Any) -> Any:
    return field(default=default, metadata={"key": Key(**known)})


def _degree(axis: str, help: str, words: Callable[[Any, Sizes], str], **more: Any) -> Any:
    return _key(1, help=help, words=words, used=lambda layout: getattr(layout, axis) > 1, **more)


def _in_pipeline(layout: Any) -> Any:
    return layout.pp > 1


def _over_data(layout: Any) -> Any:
    return layout.dp_replicate * layout.dp_shard * layout.cp > 1


def _nodes(tp: int, node_size: int) -> str:
    return "within a node" if node_size % tp == 0 else f"over {-(-tp // node_size)} nodes or more"


@dataclass(frozen=True, kw_only=True)
class Layout(NumberedRanks):
    """The degrees of a run and the choices that go with them: the keys of a run file's section [layout], with the same
    defaults. What each key means, and all else that is known of it, is in its metadata (`KEYS`).

    Raises LayoutError, with every problem at once, for a layout that cannot exist on any world.
    """

    tp: int = _degree(
        "tp",
        "ranks that shard heads, ffn features and vocabulary; keep them in a node",
        lambda layout, sizes: f"ranks shard the heads and matrices of a layer, {_nodes(layout.tp, sizes.node_size)}",
        runner_up=True,
    )
    pp: int = _degree(
        "pp",
        "ranks that hold different layers, in stages; each micro-batch goes through all",
        lambda layout, sizes: f"ranks hold {sizes.n_layers} layers in {layout.n_stages} stages",
        runner_up=True,
    )
    pp_schedule: str = _key(
        ONE_F_ONE_B.name,
        help="pp only: the order of forward and backward passes; `shardwright schedule` draws it",
        words=lambda layout, sizes: layout.kind.help,
        choices=names,
        used=_in_pipeline,
        needs="pp above 1",
        planned=lambda layout: [name for name in names() if find(name).priced],
        not_priced=lambda: [name for name in names() if not find(name).priced],
        runner_up=True,
    )
    virtual_stages: int = _key(
        None,
        help="pp only: stages of each rank, where the schedule leaves that open; if not given, the schedule's own "
        "number",
        words=lambda layout, sizes: "stages of each rank",
        derived=lambda layout: layout.kind.virtual_stages,
        used=lambda layout: layout.pp > 1 and bool(layout.kind.virtual_stages_tried),
        needs="pp above 1 and a schedule that leaves it open",
        said=True,
        group="pp_schedule",
        off=lambda layout: {"virtual_stages": None, "stage_layers": None},
        planned=lambda layout: layout.kind.virtual_stages_tried,
        unverified="a rank runs three stages by the same code as two; --set layout.virtual_stages verifies it",
    )
    cp: int = _degree(
        "cp",
        "ranks that partition the tokens of each sequence",
        lambda layout, sizes: f"ranks partition each sequence, {sizes.seq_len // layout.cp} tokens each",
        runner_up=True,
    )
    cp_method: str = _key(
        "zigzag",
        help="how attention reaches all tokens: keys and values go round a ring (zigzag: balanced, ring: contiguous) "
        "or are gathered; ulysses partitions heads instead; usp: ulysses inside, zig-zag ring outside",
        words=lambda layout, sizes: "how attention reaches the tokens of other ranks",
        choices=lambda: CP_METHODS,
        used=lambda layout: layout.cp > 1,
        group="cp",
        planned=lambda layout: ("zigzag", "ulysses"),  # the others move more bytes or leave ranks idle
        not_priced=lambda: ("usp",),
    )
    ulysses_degree: int = _key(
        1,
        help="usp only: the part of cp that partitions heads",
        words=lambda layout, sizes: "ranks of cp partition heads, the others go round a ring",
        used=lambda layout: layout.cp_method == "usp",
        needs="cp_method='usp'",
        group="cp",
    )
    ep: int = _degree(
        "ep",
        "ranks of dp_shard x cp x tp that hold different experts of a mixture; tokens travel to them",
        lambda layout, sizes: f"ranks hold {sizes.n_experts // layout.ep} of {sizes.n_experts} experts each",
        runner_up=True,
    )
    dp_replicate: int = _degree(
        "dp_replicate",
        "replicas of the model; each reads its own samples",
        lambda layout, sizes: "replicas, each with its own sequences",
        group="dp",
    )
    dp_shard: int = _degree(
        "dp_shard",
        "ranks that read their own samples and, under ZeRO, shard parameters, gradients and optimizer states",
        lambda layout, sizes: "ranks, each with its own sequences; zero shards over them",
        group="dp",
    )
    zero: int = _key(
        None,
        help="sharded over dp_shard x cp (ZeRO, arXiv 1910.02054): 0 nothing, 1 optimizer states, 2 and gradients, "
        "3 and parameters; if not given, 3 when dp_shard > 1, else 0",
        words=lambda layout, sizes: (
            _ZERO_WORDS[layout.zero] + (f" over {layout.dp_shard * layout.cp} ranks" if layout.zero else "")
        ),
        choices=lambda: (0, 1, 2, 3),
        derived=lambda layout: 3 if layout.dp_shard > 1 else 0,
        used=_over_data,
        said=True,
        off=lambda layout: {"zero": 0, "dp_replicate": layout.data_ranks, "dp_shard": 1},
        milder=1,
        runner_up=True,
    )
    sequence_parallel: bool = _key(
        None,
        help="between a block's matmuls, shard activations by token over tp (arXiv 2205.05198); if not given, true "
        "when tp > 1",
        words=lambda layout, sizes: (
            "activations between a block's matmuls are "
            + ("sharded by token over tp" if layout.sequence_parallel else "replicated over tp")
        ),
        choices=lambda: (False, True),
        derived=lambda layout: layout.tp > 1,
        used=lambda layout: layout.tp > 1,
        off=lambda layout: {"sequence_parallel": False},
        planned=lambda layout: (True,),
    )
    recompute: str = _key(
        "none",
        help="activation checkpointing: what the backward pass computes again instead of keeping it; selective: the "
        "parts of recompute_modules; full: every block, of which only the input is kept; in a run file also auto: the "
        "least of them, in as few layers, that fits the memory of a rank",
        words=lambda layout, sizes: {
            "none": "nothing is recomputed",
            "selective": f"the backward pass recomputes {', '.join(layout.recompute_modules)}",
            "full": "the backward pass recomputes every layer",
        }[layout.recompute],
        choices=lambda: RECOMPUTE,
        in_turn=("selective", "full"),
        in_run_file=(AUTO,),
        runner_up=True,
    )
    recompute_modules: tuple[str, ...] = _key(
        ("norms", "activation"),
        help="recompute='selective' only: the parts of a block that are recomputed: norms; activation, of networks and "
        "experts; rope, the norm and rotation of heads; mla_up, keys and values from latent vectors; attention; "
        "experts, their first matmuls",
        words=lambda layout, sizes: "parts of a block are recomputed",
        members=lambda: RECOMPUTE_MODULES,
        used=lambda layout: layout.recomputes_parts,
        needs="recompute='selective'",
        group="recompute",
        unverified="every part is recomputed by the same code; --set layout.recompute_modules verifies one",
    )
    recompute_layers: int | None = _key(
        None,
        help="how many layers of each stage recompute, the first ones; if not given, all",
        words=lambda layout, sizes: "first layers of each stage recompute",
        used=lambda layout: layout.recomputes,
        needs="recompute='selective' or 'full'",
        group="recompute",
        unverified="a layer recomputes by the same code whether others do; --set layout.recompute_layers verifies it",
    )
    loss_chunk_tokens: int = _key(
        0,
        help="tokens whose logits exist at a time: head, loss and their gradients are computed for so many tokens of a "
        "micro-batch after another; 0: for all at once",
        words=lambda layout, sizes: (
            "tokens at a time have logits" if layout.loss_chunk_tokens else "the logits of a micro-batch are whole"
        ),
        least=0,
        in_turn=(5,),
        planned=lambda layout: (0, 4096),  # with fewer the sum of the head's gradients is moved more often
        runner_up=True,
    )
    offload_optimizer: str = _key(
        "none",
        help="where the states of the optimizer are: none: in the memory of the device; cpu: in that of the host, "
        "which is sent the gradients, computes the update, and sends the weights back (ZeRO-Offload, arXiv "
        "2101.06840); disk: in files of offload_path, of which some chunks at a time are read, updated and written",
        words=lambda layout, sizes: f"optimizer states are {_OFFLOADED_WORDS[layout.offload_optimizer]}",
        choices=lambda: OFFLOAD,
        in_turn=("disk", "cpu"),
        planned=lambda layout: (layout.offload_optimizer,),  # searched where it is fixed, and where nothing fits
    )
    offload_parameters: str = _key(
        "none",
        help="where the shards of parameters and of their gradients are: none: in the memory of the device; cpu: in "
        "that of the host, from which each gather copies them, and where the optimizer updates them",
        words=lambda layout, sizes: f"shards of parameters are {_OFFLOADED_WORDS[layout.offload_parameters]}",
        choices=lambda: ("none", "cpu"),
        used=lambda layout: (layout.zero == 3) & (layout.offload_optimizer != "none"),
        needs="zero=3 and offload_optimizer='cpu' or 'disk'",
        in_turn=("cpu",),
        planned=lambda layout: (layout.offload_parameters,),
    )
    zero_pp_gather: str = _key(
        "step",
        help="zero 3 with pp: a stage's parameters are gathered once a step and held until its last backward pass, or "
        "for each pass of a micro-batch, which needs less memory and sends more",
        words=lambda layout, sizes: f"parameters are gathered once a {layout.zero_pp_gather}",
        choices=lambda: ("step", "microbatch"),
        used=lambda layout: (layout.pp > 1) & (layout.zero == 3),
        needs="pp above 1 and zero=3",
        group="zero",
    )
    compress_gradients: str = _key(
        "none",
        help="how gradients travel between the ranks that sum them: none: in the type in which they accumulate; bf16: "
        "rounded to bf16, and summed in the former type where they arrive; int8, int4: as integers with a scale for "
        "each block of 128, from zero 1 on (ZeRO++, arXiv 2306.10209); powersgd-R: those of matrices as products of "
        "rank R, with zero 0 (arXiv 1905.13727)",
        words=lambda layout, sizes: compression.WORDS[layout.compress_gradients],
        choices=lambda: compression.GRADIENTS,
        used=_over_data,
        needs="more than one rank of dp_replicate x dp_shard x cp",
        in_turn=("bf16", "int8"),
        planned=lambda layout: ("none",),  # the others change the numbers of the training
    )
    compress_weights: str = _key(
        "none",
        help="how parameters travel where zero gathers them: none: in the type of the matmuls; int8: as integers of 8 "
        "bits with a scale for each block of 128; from zero 1 on",
        words=lambda layout, sizes: (
            "parameters are gathered "
            + ("as they are" if layout.compress_weights == "none" else "as integers of 8 bits")
        ),
        choices=lambda: ("none", "int8"),
        used=lambda layout: (layout.dp_shard * layout.cp > 1) & (layout.zero != 0),
        needs="dp_shard x cp above 1 and zero=1, 2 or 3, where parameters are gathered",
        in_turn=("none", "int8"),
        planned=lambda layout: ("none",),  # the other changes the numbers of the training
    )
    node_ranks: int = _key(
        1,
        help="compress_gradients='int8' or 'int4' only: consecutive ranks of dp_shard x cp that share a node and sum "
        "gradients before their sums go to other nodes; 1: all ranks sum at once",
        words=lambda layout, sizes: "ranks sum their gradients before they are sent to other nodes",
        used=lambda layout: layout.compress_gradients in compression.INTEGERS,
        needs="compress_gradients='int8' or 'int4'",
        group="compress_gradients",
        in_turn=(1, 2),
    )
    stage_layers: tuple[int, ...] | None = _key(
        None,
        help="pp only: layers of each stage in order; if not given, stages of equal cost",
        words=lambda layout, sizes: "layers of each stage",
        used=_in_pipeline,
        needs="pp above 1",
        unverified="there are as many as ways to partition the layers; --set layout.stage_layers verifies one",
    )

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            if getattr(self, name) is None and key.derived and self.pp_schedule in names():
                object.__setattr__(self, name, key.derived(self))
        if self.pp_schedule in names():
            object.__setattr__(self, "virtual_stages", self.kind.stages_per_rank(self.virtual_stages))
        if problems := self.problems():
            raise LayoutError(*problems)

    def problems(self) -> list[str]:
        """Every rule this layout breaks, one sentence each; empty for a good one."""
        found = []
        for name, key in KEYS.items():
            if rule := key.problem(getattr(self, name)):
                found.append(f"layout.{name}={getattr(self, name)!r}: {rule}")
        if found:
            return found
        for name, key in KEYS.items():
            value = getattr(self, name)
            if key.needs and not key.used(self) and value != key.default_in(self):
                found.append(f"layout.{name}={value!r} needs {key.needs}; set that, or leave it out")
        return [*found, *self._degree_problems(), *compression.problems(self), *self._schedule_problems()]

    def _degree_problems(self) -> Iterator[str]:
        fold = self.dp_shard * self.cp * self.tp
        if fold % self.ep:
            yield (
                f"layout.ep={self.ep} does not divide dp_shard x cp x tp = {self.dp_shard} x {self.cp} x "
                f"{self.tp} = {fold}; valid: {_divisors(fold)}"
            )
        if self.zero == 0 and self.dp_shard > 1:
            yield (
                f"layout.zero=0 replicates parameters, gradients and optimizer states, so nothing is sharded over "
                f"dp_shard={self.dp_shard}; set zero to 1, 2 or 3, or dp_replicate="
                f"{self.dp_replicate * self.dp_shard} and dp_shard=1"
            )
        if self.zero > 0 and self.dp_shard * self.cp == 1 and self.dp_replicate > 1:
            yield (
                f"layout.zero={self.zero} shards over dp_shard x cp, which is 1, while dp_replicate="
                f"{self.dp_replicate} only replicates; set dp_shard={self.dp_replicate} and dp_replicate=1, or zero=0"
            )
        if self.cp_method != "usp":
            return
        if self.cp % self.ulysses_degree:
            yield (
                f"layout.ulysses_degree={self.ulysses_degree} does not divide cp={self.cp} "
                f"({self.cp} = {self.ulysses_degree}*{self.cp // self.ulysses_degree} + "
                f"{self.cp % self.ulysses_degree}); valid: {_divisors(self.cp).removeprefix('1, ')}"
            )
        if self.cp > 1 and self.ulysses_degree == 1:
            yield (
                f"layout.cp_method='usp' needs layout.ulysses_degree, the part of cp={self.cp} that partitions heads; "
                f"valid: {_divisors(self.cp).removeprefix('1, ')}; with 1 it would be cp_method='zigzag'"
            )

    def _schedule_problems(self) -> Iterator[str]:
        # The number of micro-batches, which a layout does not know, is one that every schedule takes.
        if self.pp > 1:
            for problem in build.problems(self.pp_schedule, self.pp, 2 * self.pp, self.virtual_stages):
                yield f"layout.pp_schedule: {problem}"

    def settings(self) -> dict[str, Any]:
        """The keys that have to be written down for this layout: those that are not at their default, and those that
        are always said where they are used (`Key.said`)."""
        values = {name: getattr(self, name) for name in KEYS}
        return {
            name: value
            for name, value in values.items()
            if value != KEYS[name].default_in(self) or (KEYS[name].said and KEYS[name].used(self))
        }

    def __str__(self) -> str:
        """`tp 2, dp_shard 2, zero 3`: the keys that have to be written down."""
        return ", ".join(f"{name} {written(value)}" for name, value in self.settings().items()) or "one rank"

    def changed(self, **changes: Any) -> "Layout":
        """This layout with changes, and what they entail: a key that has no meaning any more goes back to its default,
        another schedule has its own number of stages, ep divides the ranks that are left, and ZeRO is 0 where nothing
        is left to shard over. None as a value means the derived default.

        Raises LayoutError where the changes themselves do not fit.
        """
        if changes.get("pp_schedule", self.pp_schedule) != self.pp_schedule:
            changes = {"virtual_stages": None, "stage_layers": None} | changes
        wanted = {name: changes.get(name, getattr(self, name)) for name in KEYS}
        wanted["ep"] = gcd(wanted["ep"], wanted["dp_shard"] * wanted["cp"] * wanted["tp"])
        if wanted["dp_shard"] * wanted["cp"] == 1:
            wanted["zero"] = 0
        draft = object.__new__(Layout)
        draft.__dict__.update(wanted)
        for name, key in KEYS.items():
            if name not in changes and not key.used(draft):
                wanted[name] = key.default
        return Layout(**wanted)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degree(axis) for axis in DENSE_AXES)

    @property
    def data_ranks(self) -> int:
        """Number of ranks along the data axes, over which a global batch is partitioned."""
        return self.dp_replicate * self.dp_shard

    @property
    def cp_ulysses(self) -> int:
        """Ranks of `cp` over which attention heads are partitioned: all, some or none, as `cp_method` says."""
        return {"ulysses": self.cp, "usp": self.ulysses_degree}.get(self.cp_method, 1)

    @property
    def cp_ring(self) -> int:
        """Ranks of `cp` that pass keys and values to one another."""
        return self.cp // self.cp_ulysses

    @property
    def token_shards(self) -> bool:
        """Whether activations are sharded by token over tp."""
        return self.sequence_parallel and self.tp > 1

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes anything again."""
        return self.recompute != "none"

    @property
    def recomputes_parts(self) -> bool:
        """Whether that is some parts of a block."""
        return self.recompute == "selective"

    @property
    def kind(self) -> Kind:
        """What is registered under the name of the schedule."""
        return find(self.pp_schedule)

    @property
    def ways(self) -> Ways:
        """The ways that micro-batches take through the pipeline: for each, the rank of `pp` of every stage in order."""
        return self.kind.ways(self.pp, self.virtual_stages)

    def held_by(self, pp_rank: int) -> list[int]:
        """The stages that a rank of `pp` holds, those of one way after another."""
        return stages_of_rank(self.ways, pp_rank)

    @property
    def n_stages(self) -> int:
        """Into how many stages the layers are partitioned."""
        return len(self.ways[0])

    @property
    def regathers(self) -> bool:
        """Whether ZeRO-3 frees gathered parameters after each pass of a micro-batch."""
        return self.zero == 3 and (self.pp == 1 or self.zero_pp_gather == "microbatch")

    @property
    def expert_dp_shard(self) -> int:
        """Ranks over which the parameters, gradients and optimizer states of one expert are sharded."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def check_world(self, world_size: int) -> None:
        """Raises LayoutError when the degrees do not multiply to the number of processes there are."""
        if self.world_size != world_size:
            degrees = " x ".join(f"{axis} {self.degree(axis)}" for axis in DENSE_AXES if self.degree(axis) > 1)
            raise LayoutError(
                f"the layout needs {self.world_size} ranks ({degrees or 'every degree is 1'}), but {world_size} "
                f"{'process was' if world_size == 1 else 'processes were'} started; start "
                f"{self.world_size}, or change the degrees so that they multiply to {world_size}"
            )


def accumulation(global_batch: int, micro_batch: int, data_ranks: int) -> int:
    """Micro-batches that a data rank runs in one step: global_batch / (micro_batch x data_ranks), in sequences.

    Raises LayoutError where that is not a whole number.
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


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


_TYPES = get_type_hints(Layout)
KEYS: dict[str, Key] = {
    each.name: replace(
        each.metadata["key"],
        name=each.name,
        type=_TYPES[each.name],
        default=each.default,
        group=each.metadata["key"].group or each.name,
    )
    for each in fields(Layout)
}
"""Every key of the layout, in the order in which they are written."""
