"""The keys of a layout, each with its description (`LayoutKey`).

The section [layout] of a run file, the planner's candidates, the matrix of `verify` and the pages are made from these
rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from shardwright.layout.key import MOST_LAYERS, JobSizes, LayoutKey
from shardwright.schedule.named import ONE_F_ONE_B
from shardwright.schedule.registry import find, names

CP_METHODS = ("zigzag", "ring", "allgather", "ulysses", "usp")
RECOMPUTE = ("none", "selective", "full")
ZERO = (0, 1, 2, 3)
OFFLOAD = ("none", "cpu", "disk")
AUTO = "auto"
"""In a run file: the least recomputation in `RECOMPUTE` that fits, decided when the memory of the devices is known."""
RECOMPUTE_MODULES = ("norms", "activation", "rope", "mla_up", "attention", "experts")
_GRADIENT_WORDS = {
    "none": "gradients travel in the type in which they accumulate",
    "bf16": "gradients travel in bf16",
    "int8": "gradients travel as integers of 8 bits",
    "int4": "gradients travel as integers of 4 bits",
    **{f"powersgd-{rank}": f"gradients of matrices travel as products of rank {rank}" for rank in (1, 2, 4, 8, 16, 32)},
    **{f"topk-{k}": f"of each 128 elements of a matrix's gradient the {k} largest travel" for k in (1, 2, 4, 8, 16)},
}
"""Description of each value of `compress_gradients`."""
INTEGERS = ("int8", "int4")
"""Values of `compress_gradients` that have a scale for each block."""
POWERSGD = tuple(name for name in _GRADIENT_WORDS if name.startswith("powersgd-"))
"""Values of `compress_gradients` that send products of low-rank matrices, each with its rank."""
TOPK = tuple(name for name in _GRADIENT_WORDS if name.startswith("topk-"))
"""Values of `compress_gradients` that send the largest elements of each block, each with their number."""
ERROR_FEEDBACK = (*POWERSGD, *TOPK)
"""Values of `compress_gradients` with which a rank adds the part of a gradient that it has not sent to the next one."""
_TRANSIT_WORDS = {
    "none": "in the type of the matmuls",
    "int8": "as integers of 8 bits",
    "fp8": "in fp8",
}
_ROUNDED_APART = (
    "with compressed gradients no bound would distinguish a bug from rounding; --set layout.{} verifies it without "
    "these"
)

_ZERO_WORDS = (
    "every rank holds all parameters, gradients and optimizer states of its stage",
    "optimizer states are sharded",
    "optimizer states and gradients are sharded",
    "optimizer states, gradients and parameters are sharded",
)

_OFFLOADED_WORDS = {"none": "in memory", "cpu": "in the memory of the host", "disk": "on a disk"}


def _key(default: Any, **known: Any) -> Any:
    return field(default=default, metadata={"key": LayoutKey(**known)})


def _degree(axis: str, help: str, words: Callable[[Any, JobSizes], str], **more: Any) -> Any:
    return _key(1, help=help, words=words, used=lambda layout: getattr(layout, axis) > 1, **more)


def _in_pipeline(layout: Any) -> Any:
    return layout.pp > 1


def _over_data(layout: Any) -> Any:
    return layout.dp_replicate * layout.dp_shard * layout.cp > 1


def _shards(zero: Any) -> Any:
    """Return whether a ZeRO stage shards anything; None is a stage that is still to be derived."""
    return (zero == 1) | (zero == 2) | (zero == 3)


def _nodes(tp: int, node_size: int) -> str:
    return "within a node" if node_size % tp == 0 else f"over {-(-tp // node_size)} nodes or more"


@dataclass(frozen=True, kw_only=True)
class LayoutKeys:
    """The fields of a `Layout` with their defaults. The metadata of a field is its row of `KEYS`."""

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
        most=MOST_LAYERS,  # each rank has a layer
        runner_up=True,
    )
    pp_schedule: str = _key(
        ONE_F_ONE_B.name,
        help="pp only: the order of forward and backward passes; `shardwright schedule` draws it",
        words=lambda layout, sizes: layout.kind.help,
        choices=names,
        used=_in_pipeline,
        needs="pp above 1",
        planned=lambda layout: [name for name in names() if not find(name).searched],
        runner_up=True,
    )
    virtual_stages: int = _key(
        None,
        help="pp only: stages of each rank, where the schedule leaves that open; if not given, the schedule's own "
        "number",
        words=lambda layout, sizes: "stages of each rank",
        most=MOST_LAYERS,
        derived=lambda layout: layout.kind.virtual_stages,
        used=lambda layout: layout.pp > 1 and bool(layout.kind.virtual_stages_tried),
        needs="pp above 1 and a schedule that leaves it open",
        always_written=True,
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
    place_experts_every: int = _key(
        0,
        help="ep only: steps after which experts are exchanged between the ranks of ep, where that lowers the measured "
        "load of the busiest rank; 0: never",
        words=lambda layout, sizes: (
            "steps after which experts are exchanged between ranks by their load"
            if layout.place_experts_every
            else "experts stay on their ranks"
        ),
        least=0,
        most=2**31,
        used=lambda layout: layout.ep > 1,
        needs="ep above 1",
        group="ep",
        in_turn=(1,),
        planned=lambda layout: (layout.place_experts_every,),
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
            _ZERO_WORDS[layout.zero]
            + (f" over {n} rank{'s' * (n > 1)}" if layout.zero and (n := layout.dp_shard * layout.cp) else "")
        ),
        choices=lambda: ZERO,
        derived=lambda layout: 3 if layout.dp_shard > 1 else 0,
        used=lambda layout: _over_data(layout) | (layout.offload_parameters != "none"),
        always_written=True,
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
        help="activation checkpointing: none: the backward pass recomputes nothing; selective: it recomputes "
        "the parts of recompute_modules; full: it recomputes every block from the block's input; in a run file "
        "also auto: the smallest of these recomputations, in as few layers, that fits the memory of a rank",
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
        help="tokens whose logits exist at a time: the head, the loss and their gradients are computed for "
        "this many tokens of a micro-batch after another; 0: for all tokens at once",
        words=lambda layout, sizes: (
            "tokens at a time have logits" if layout.loss_chunk_tokens else "the logits of a micro-batch are whole"
        ),
        least=0,
        most=2**31,
        in_turn=(5,),
        planned=lambda layout: (0, 4096),  # smaller values move the sum of the head's gradients more often
        runner_up=True,
    )
    offload_optimizer: str = _key(
        "none",
        help="the place of the optimizer states: none: device memory; cpu: host memory, where the host "
        "receives the gradients, computes the update and sends the weights back (ZeRO-Offload, arXiv "
        "2101.06840); disk: files in offload_path, read, updated and written a few chunks at a time",
        words=lambda layout, sizes: f"optimizer states are {_OFFLOADED_WORDS[layout.offload_optimizer]}",
        choices=lambda: OFFLOAD,
        in_turn=("disk", "cpu"),
        planned=lambda layout: (layout.offload_optimizer,),  # searched where it is fixed, and where nothing fits
    )
    offload_parameters: str = _key(
        "none",
        help="the place of the shards of parameters and of their gradients: none: device memory; cpu: host "
        "memory, where each gather copies parameters from, each reduction copies gradients to, and the "
        "optimizer updates parameters",
        words=lambda layout, sizes: f"shards of parameters are {_OFFLOADED_WORDS[layout.offload_parameters]}",
        choices=lambda: ("none", "cpu"),
        used=lambda layout: _shards(layout.zero) & (layout.offload_optimizer != "none"),
        needs="zero=1, 2 or 3 and offload_optimizer='cpu' or 'disk'",
        in_turn=("cpu",),
        planned=lambda layout: (layout.offload_parameters,),
    )
    offload_activations: str = _key(
        "none",
        help="the place of the activations of layers between forward and backward pass: none: device memory; "
        "cpu: host memory; they are copied there while the next layer runs, and come back while the backward "
        "pass of the layer after runs",
        words=lambda layout, sizes: f"activations of layers are {_OFFLOADED_WORDS[layout.offload_activations]}",
        choices=lambda: ("none", "cpu"),
        in_turn=("cpu", "none"),
        planned=lambda layout: (layout.offload_activations,),
    )
    offload_min_bytes: int = _key(
        2**20,
        help="offload_activations='cpu' only: tensors of fewer bytes stay on the device",
        words=lambda layout, sizes: "bytes or more a tensor has that is copied to the host",
        used=lambda layout: layout.offload_activations == "cpu",
        needs="offload_activations='cpu'",
        group="offload_activations",
        unverified="verify copies tensors of any size",
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
    zero_secondary_ranks: int = _key(
        1,
        help="zero 3 without pp: consecutive ranks of dp_shard x cp (the ranks of a node) that each keep a "
        "part of a layer's parameters from the forward pass on, and gather the parts from one another for the "
        "backward pass (hpZ of ZeRO++, arXiv 2306.10209); 1: all ranks of dp_shard x cp gather their shards "
        "again",
        words=lambda layout, sizes: (
            "all ranks gather the layers again for the backward pass"
            if layout.zero_secondary_ranks == 1
            else "ranks of a node keep gathered parameters for the backward pass, each a part"
        ),
        used=lambda layout: (
            (layout.zero == 3)
            & (layout.pp == 1)
            & (layout.dp_shard * layout.cp > layout.zero_secondary_ranks)
            & (layout.dp_shard * layout.cp % layout.zero_secondary_ranks == 0)
        ),
        in_turn=(2, 1),
        planned=lambda layout: (layout.zero_secondary_ranks,),  # planner/space.py tries the values of a node
    )
    compress_gradients: str = _key(
        "none",
        help="how gradients travel between the ranks that sum them: none: in the type in which they "
        "accumulate; bf16: rounded to bf16, and summed in the former type on arrival; int8, int4: as integers "
        "with a scale for each block of 128, from zero 1 on (ZeRO++, arXiv 2306.10209); powersgd-R: gradients "
        "of matrices as products of rank R, with zero 0 (arXiv 1905.13727); topk-K: of each block of 128 elements of a "
        "row the K largest with their places, and the rest with later gradients, with zero 0 (arXiv 1809.07599)",
        words=lambda layout, sizes: _GRADIENT_WORDS[layout.compress_gradients],
        choices=lambda: tuple(_GRADIENT_WORDS),
        used=_over_data,
        needs="more than one rank of dp_replicate x dp_shard x cp",
        in_turn=("bf16", "int8"),
        planned=lambda layout: ("none",),  # the others change the numerics of training
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
        planned=lambda layout: ("none",),  # the other changes the numerics of training
    )
    compress_dispatch: str = _key(
        "none",
        help="how tokens travel to the experts of other ranks: none: in the type of the matmuls; fp8: in e4m3 with a "
        "scale for each block of 128 (DeepSeek-V3, arXiv 2412.19437); the experts' outputs and all gradients travel "
        "in the type of the matmuls",
        words=lambda layout, sizes: "tokens travel to their experts " + _TRANSIT_WORDS[layout.compress_dispatch],
        choices=lambda: ("none", "fp8"),
        used=lambda layout: layout.ep > 1,
        needs="ep above 1",
        planned=lambda layout: ("none",),  # the other changes the numerics of training
        unverified=_ROUNDED_APART.format("compress_dispatch=fp8"),
    )
    compress_pipeline: str = _key(
        "none",
        help="how activations and their gradients travel between the stages of a pipeline: none: in the type of the "
        "matmuls; int8, fp8 (e4m3): in 8 bits with a scale for each block of 128 elements of a token",
        words=lambda layout, sizes: (
            "activations and their gradients travel between stages " + _TRANSIT_WORDS[layout.compress_pipeline]
        ),
        choices=lambda: tuple(_TRANSIT_WORDS),
        used=_in_pipeline,
        needs="pp above 1",
        planned=lambda layout: ("none",),  # the others change the numerics of training
        unverified=_ROUNDED_APART.format("compress_pipeline=int8"),
    )
    node_ranks: int = _key(
        1,
        help="compress_gradients='int8' or 'int4' only: consecutive ranks of dp_shard x cp that share a node and sum "
        "gradients before their sums go to other nodes; 1: all ranks sum at once",
        words=lambda layout, sizes: "ranks sum their gradients before they are sent to other nodes",
        used=lambda layout: layout.compress_gradients in INTEGERS,
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


_TYPES = get_type_hints(LayoutKeys)
KEYS: dict[str, LayoutKey] = {
    entry.name: replace(
        entry.metadata["key"],
        name=entry.name,
        type=_TYPES[entry.name],
        default=entry.default,
        group=entry.metadata["key"].group or entry.name,
    )
    for entry in fields(LayoutKeys)
}
"""Every key of the layout, in output order."""
