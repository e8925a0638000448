"""torchtitan: TOML files, and Python configurations of plain assignments."""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.cost.job import Candidates
from shardwright.cost.speed import FLASH_2
from shardwright.cost.stack import FSDP, FSDP_COMPILED_LOSS, Stack
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.planner.choice import Choice
from shardwright.readers.table import READ, DescribedRun, System, Values
from shardwright.readers.torchtitan_models import model_of
from shardwright.readers.torchtitan_options import EXPERT_DEGREES, FAMILIES, OPTIONS, SECTIONS, TOKENS
from shardwright.system.errors import InputError, LayoutError

_MODES = {"FullAC": "full", "SelectiveAC": "selective", "none": "none"}
"""Class of `activation_checkpoint` in Python -> mode."""
_CHUNKED = ("ChunkedLossWrapper", "ChunkedCELoss")
_LOSSES = ("CrossEntropyLoss", *_CHUNKED)
"""Classes of `loss` in Python that have a price. A chunked loss computes the logits of a part of a micro-batch at a
time; its second class is of the development versions before 0.3."""
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "afab",
    "interleaved1f1b": "interleaved-1f1b",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}


def _parallel(values: Values, name: str) -> Any:
    """Return an option of [parallelism], or from its places before 2025."""
    for section in SECTIONS:
        if values.given(f"{section}.{name}"):
            return values[f"{section}.{name}"]
    return values[f"parallelism.{name}"]


def describe(values: Values) -> DescribedRun:
    """Return the run that the options describe. Raises InputError with every problem."""
    if learning := next((name for name in values.settings if name.startswith("trainer.")), None):
        values.refuse(
            learning, "reinforcement learning, whose steps also generate, is not priced; give a training alone"
        )
        raise InputError(*values.problems)
    used = {row.name for row in OPTIONS.values() if row.fate == READ}
    for name, setting in values.settings.items():
        section = name.removesuffix("**")
        if name.endswith("**") and any(f"{option_name}.".startswith(section) for option_name in used):
            values.problems.append(f"{setting.unknown}; write the values of {section or 'the configuration'}")
    model, world = model_of(values), values.world_size
    if world is None:
        values.problems.append(f"{values.source}: torchrun sets the number of ranks; give --cluster, such as h100:64")
    settings = _degrees(values, world or 1, model)
    seq_len, micro_batch, global_batch = _batch(values, settings["dp_replicate"] * settings["dp_shard"], settings["pp"])
    settings["loss_chunk_tokens"] = _loss_chunk_tokens(values, micro_batch, seq_len, settings["cp"])
    precision = _precision(values)
    if values.problems:
        raise InputError(*values.problems)
    try:
        layout = Layout(**settings)
    except LayoutError as error:
        raise InputError(*(f"{values.source}: {problem}" for problem in error.problems)) from None
    optimizer = _optimizer(values)
    return DescribedRun(
        *(model, seq_len, global_batch, layout, micro_batch, precision, _stack(values), world or 1),
        optimizer=optimizer,
    )


def _in_tokens(values: Values) -> bool:
    """Return whether the configuration is of a version that states batches in tokens."""
    return any(values.given(f"training.{name}") for name in TOKENS)


def _batch(values: Values, data_ranks: int, pp: int) -> tuple[int, int, int]:
    """Return the length of sequences, the micro-batch and the global batch, in sequences. A version states them in
    tokens, or in sequences."""
    if not _in_tokens(values):
        seq_len = values["training.seq_len"]
        micro_batch = local = values["training.batch_size"] or values["training.local_batch_size"]
        if pp > 1:
            micro_batch = _parallel(values, "pipeline_parallel_microbatch_size")
        stated = values["training.global_batch_size"]
        return seq_len, micro_batch, local * data_ranks if stated is None or stated < 0 else stated
    for name in ("local_batch_size", "batch_size", "global_batch_size", "seq_len"):
        if values.given(f"training.{name}"):
            values.refuse(f"training.{name}", "contradicts the batch that the file states in tokens; leave one out")
    micro_tokens, step_tokens, seq_len = (values[f"training.{name}"] for name in TOKENS)
    micro_batches = values["parallelism.num_pp_microbatches"] if pp > 1 else 1
    if step_tokens is None or step_tokens < 0:
        step_tokens = micro_tokens * micro_batches * data_ranks
    for name, tokens in zip(TOKENS[:2], (micro_tokens, step_tokens), strict=True):
        if seq_len < 1 or tokens % seq_len:
            values.refuse(f"training.{name}", f"{tokens:,} tokens are not a multiple of max_context_length {seq_len:,}")
            return 1, 1, data_ranks
    return seq_len, micro_tokens // seq_len, step_tokens // seq_len


def _loss_chunk_tokens(values: Values, micro_batch: int, seq_len: int, cp: int) -> int:
    """Return how many tokens have logits at a time; 0: all of a micro-batch. A chunk has the same part of each of its
    sequences."""
    if str(values["loss"]).rpartition(".")[2][:1].islower():
        values.refuse("loss", "a function makes it, and it may have chunks; write its class, such as CrossEntropyLoss")
    for option in ("loss", "loss.loss_fn"):
        if values.given(option) and values[option] not in _LOSSES:
            values.changes[option] = "has no counterpart; priced as a cross entropy over the vocabulary"
    if values["loss"] not in _CHUNKED:
        values.changes["loss.num_chunks"] = "the file names no loss with chunks; all logits of a micro-batch are priced"
        return 0
    n_chunks, on_rank = values["loss.num_chunks"], seq_len // max(cp, 1)
    if n_chunks < 1 or on_rank % n_chunks:
        valid = "1 or more" if n_chunks < 1 else f"a divisor of the {on_rank:,} tokens of a sequence on a rank"
        stated = "loss.num_chunks" if values.given("loss.num_chunks") else "loss"
        values.refuse(stated, f"{n_chunks} chunks; valid: {valid}")
        return 0
    return micro_batch * on_rank // n_chunks if n_chunks > 1 else 0


def _optimizer(values: Values) -> str:
    """Return the optimizer, of `optimizer.name` or of the function in Python, such as `default_adamw`."""
    option = "optimizer.name" if values.given("optimizer.name") or values["optimizer"] is None else "optimizer"
    name = str(values[option]).lower()
    if option == "optimizer.name":
        known = {"adamw": "adamw", "adam": "adamw", "muon": "muon"}.get(name)
    else:
        known = "muon" if "muon" in name else "adamw" if "adam" in name or "container" in name else None
    if known is None:
        values.changes[option] = "has no counterpart; priced as adamw"
    return known or "adamw"


def _degrees(values: Values, world: int, model: ModelSpec) -> dict[str, Any]:
    tp, pp, cp = (_parallel(values, f"{name}_parallel_degree") for name in ("tensor", "pipeline", "context"))
    replicate, shard = (_parallel(values, f"data_parallel_{name}_degree") for name in ("replicate", "shard"))
    for name in ("tensor", "pipeline", "context", "expert", "data_parallel_replicate"):
        option = f"{name}_degree" if "_" in name else f"{name}_parallel_degree"
        if _parallel(values, option) < 1:
            stated = next(
                section_option for section in SECTIONS if values.given(section_option := f"{section}.{option}")
            )
            values.refuse(stated, "valid: 1 or more")
    if values.given("training.data_parallel_degree"):
        shard = values["training.data_parallel_degree"]
    inner = max(tp, 1) * max(pp, 1) * max(cp, 1) * max(replicate, 1)
    if shard < 1:
        shard = max(world // inner, 1)
    if inner * shard != world and not values.problems:
        values.problems.append(
            f"{values.source}: dp_replicate {replicate} x dp_shard {shard} x context {cp} x tensor {tp} x pipeline "
            f"{pp} = {inner * shard} ranks, and the job has {world}; give --cluster with that number"
        )
    resharding = _parallel(values, "fsdp_reshard_after_forward")
    zero = (2 if resharding == "never" else 3) if shard * cp > 1 else 0
    result = {"tp": tp, "pp": pp, "cp": cp, "dp_shard": shard, "dp_replicate": replicate, "zero": zero}
    if pp > 1 and zero == 3 and resharding == "always":
        result["zero_pp_gather"] = "microbatch"
    result["ep"] = _parallel(values, "expert_parallel_degree") * _parallel(values, "expert_tensor_parallel_degree")
    if result["ep"] > 1 and model.moe is None:
        values.changes |= dict.fromkeys(EXPERT_DEGREES, "the model has no experts")
        result["ep"] = 1
    if cp > 1:
        gathers = _parallel(values, "context_parallel_rotate_method") == "allgather"
        result["cp_method"] = "allgather" if gathers else "zigzag"
    if values["training.enable_cpu_offload"]:
        result |= {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    pipeline = _pipeline(values, pp, model)
    if tp > 1 and not values["parallelism.enable_sequence_parallel"]:
        result["sequence_parallel"] = False
    stages = Layout(pp=max(pp, 1), **pipeline).n_stages
    return result | pipeline | _recompute(values, model, stages)


def _pipeline(values: Values, pp: int, model: ModelSpec) -> dict[str, Any]:
    if pp <= 1:
        return {}
    name = str(_parallel(values, "pipeline_parallel_schedule"))
    schedule = SCHEDULES.get(name.lower())
    if schedule is None:
        values.problems.append(
            f"{values.source}: pipeline_parallel_schedule {name} has no counterpart; supported: {', '.join(SCHEDULES)}"
        )
        return {}
    layers = _parallel(values, "pipeline_parallel_layers_per_stage")
    if schedule != "interleaved-1f1b":
        return {"pp_schedule": schedule}
    stages = -(-model.n_layers // (layers * pp)) if layers else 2
    if stages < 2:
        most = (model.n_layers - 1) // pp
        few = f"the model has too few layers for pipeline_parallel_degree {pp}"
        values.problems.append(
            f"{values.source}: pipeline_parallel_layers_per_stage {layers}: {model.n_layers} layers make one stage for "
            f"each of {pp} ranks, and {name} needs 2 or more; {f'valid: {most} or fewer' if most > 0 else few}"
        )
    return {"pp_schedule": schedule, "virtual_stages": max(stages, 2)}


def _recompute(values: Values, model: ModelSpec, stages: int) -> dict[str, Any]:
    """Return the recomputation; `recompute_layers` counts the layers of each of the `stages`."""
    kind = values["activation_checkpoint"]
    mode = _MODES.get(kind, values["activation_checkpoint.mode"])
    if kind is not None and kind not in _MODES and not values.given("activation_checkpoint.mode"):
        values.changes["activation_checkpoint"] = f"has no counterpart; priced as {mode}"
    if mode != "selective":
        return {"recompute": mode}
    every = values["activation_checkpoint.selective_ac_option"]
    if values.given("model_spec") and not values.given("activation_checkpoint.selective_ac_option"):
        every = "op"
    if every.isdecimal() and int(every) > 0:
        return {"recompute": "full", "recompute_layers": max(model.n_layers // stages // int(every), 1)}
    if every != "op":
        values.refuse("activation_checkpoint.selective_ac_option", "valid: op, or a whole number of layers")
    return {"recompute": "selective"}


def _precision(values: Values) -> str:
    places = ("model.converters", "model_converters.converters", "model_spec.converters")
    stated = [(place, converter) for place in places for converter in values[place]]
    for place, converter in stated:
        if "nvfp4" in converter.lower():
            values.refuse(place, "a step in nvfp4 has no price; supported: Float8, MXFP8")
        elif not re.search("float8|mx", converter.lower()):
            where = values.settings[place].where
            values.assumed.append(f"{where}: {converter.removesuffix('.Config')} has no counterpart; it is left out")
    converters = " ".join(converter for _, converter in stated).lower()
    if "mx" in converters:
        return "mxfp8"
    if "float8" in converters or values["float8.enable_float8_linear"]:
        rows = "row" in f"{values['float8.recipe_name']} {values['quantize.linear.float8.recipe_name']}"
        return "fp8-row" if rows else "fp8"
    return "fp32" if values["training.mixed_precision_param"] == "float32" else "bf16"


def _stack(values: Values) -> Stack:
    stack = FSDP_COMPILED_LOSS if values["training.compile"] or values["compile.enable"] else FSDP
    overlaps = bool(
        _parallel(values, "enable_async_tensor_parallel")
        or values["compile.enable_async_tensor_parallel"]
        or values["model_spec.tp_gemm_backend"] == "dist_gemm"
    )
    speed = replace(stack.speed, flash_gain=FLASH_2, hides_tp=overlaps)
    if values["training.mixed_precision_reduce"] == "bfloat16":
        stack, speed = replace(stack, reduced_bytes=2.0), replace(speed, reduce_bytes=2.0)
    return replace(stack, speed=speed)


def able(described: DescribedRun, candidates: Candidates) -> Any:
    """Return the mask of the layouts that torchtitan can run: FSDP2 or replicas, its schedules, whole layers."""
    shared = candidates.shared
    possible = shared.pp == 1 or shared.pp_schedule in SCHEDULES.values()
    possible &= shared.virtual_stages == 2 or shared.pp_schedule != "interleaved-1f1b"
    possible &= shared.zero_secondary_ranks == 1 and shared.cp_method != "ulysses"
    if shared.loss_chunk_tokens:
        tokens, on_rank = candidates.tokens(described.seq_len), described.seq_len // candidates.cp
        possible &= "loss" in described.stated
        possible &= (tokens % shared.loss_chunk_tokens == 0) & (on_rank * shared.loss_chunk_tokens % tokens == 0)
    sharded = np.isin(candidates.zero, (2, 3)) | (candidates.shards == 1)
    return sharded & possible


def _rotates(layout: Layout) -> str | None:
    return None if layout.cp == 1 else "allgather" if layout.cp_method == "allgather" else "alltoall"


def _resharding(layout: Layout) -> str | None:
    """Return when FSDP frees gathered parameters; None: the default, `always` without and `never` with a pipeline."""
    gathers_again = layout.zero == 3 and layout.pp > 1 and layout.zero_pp_gather == "microbatch"
    return "never" if layout.zero == 2 else "always" if gathers_again else None


def write(described: DescribedRun, choice: Choice) -> dict[str, Any]:
    """Return the options of a layout; None: the option is left out."""
    layout, part = choice.layout, "parallelism."
    names = {schedule: name for name, schedule in SCHEDULES.items()}
    spelled = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved1f1b": "Interleaved1F1B", "zbvzerobubble": "ZBVZeroBubble"}
    spelled |= {"dualpipev": "DualPipeV"}
    local = described.global_batch // layout.data_ranks if layout.pp > 1 else choice.micro_batch
    options: dict[str, Any] = {
        f"{part}data_parallel_replicate_degree": layout.dp_replicate,
        f"{part}data_parallel_shard_degree": layout.dp_shard,
        f"{part}fsdp_reshard_after_forward": _resharding(layout),
        f"{part}tensor_parallel_degree": layout.tp,
        f"{part}pipeline_parallel_degree": layout.pp,
        f"{part}pipeline_parallel_schedule": spelled[names[layout.pp_schedule]] if layout.pp > 1 else None,
        f"{part}pipeline_parallel_microbatch_size": choice.micro_batch if layout.pp > 1 else None,
        f"{part}context_parallel_degree": layout.cp,
        f"{part}context_parallel_rotate_method": _rotates(layout),
        f"{part}expert_parallel_degree": layout.ep if described.model.moe else None,
    }
    if "loss" in described.stated:
        tokens = choice.micro_batch * described.seq_len // layout.cp
        chunked = layout.loss_chunk_tokens > 0
        options["loss"] = _CHUNKED[0] if chunked else _LOSSES[0]
        options["loss.num_chunks"] = tokens // layout.loss_chunk_tokens if chunked else None
    if any(f"training.{name}" in described.stated for name in TOKENS):
        micro_batches = described.global_batch // layout.data_ranks // choice.micro_batch
        modes = {mode: name for name, mode in _MODES.items()}
        return options | {
            f"training.{TOKENS[0]}": choice.micro_batch * described.seq_len,
            f"training.{TOKENS[1]}": described.global_batch * described.seq_len,
            f"{part}pipeline_parallel_microbatch_size": None,
            f"{part}context_parallel_rotate_method": None,
            f"{part}num_pp_microbatches": micro_batches if layout.pp > 1 else None,
            "activation_checkpoint": modes[layout.recompute],
        }
    options |= {
        "training.local_batch_size": local,
        "training.global_batch_size": described.global_batch,
        "activation_checkpoint.mode": layout.recompute,
        "activation_checkpoint.selective_ac_option": "op" if layout.recompute == "selective" else None,
    }
    if layout.recompute_layers and layout.recompute == "full":
        every = max(described.model.n_layers // layout.n_stages // layout.recompute_layers, 1)
        options["activation_checkpoint.mode"] = "selective"
        options["activation_checkpoint.selective_ac_option"] = every
    return options


TORCHTITAN = System(
    name="torchtitan",
    options=OPTIONS,
    families=FAMILIES,
    spell=str,
    describe=describe,
    able=able,
    write=write,
    replaced={"global_batch": "training.global_batch_size", "seq_len": "training.seq_len"},
)
