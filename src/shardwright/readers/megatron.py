"""Megatron-LM: the layout and the software that its options describe, and the options of a layout."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.cost.job import Candidates
from shardwright.cost.stack import MEGATRON, MEGATRON_CORE, MEGATRON_CORE_FUSED_LOSS, Stack
from shardwright.layout.key import MOST_LAYERS
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice
from shardwright.planner.measured_run import ELEMENT_BYTES, PERMUTED_BY_RANK
from shardwright.planner.whole_run import PlannedStage
from shardwright.readers.megatron_model import model_of
from shardwright.readers.megatron_options import FAMILIES, OPTIONS
from shardwright.readers.table import DescribedRun, System, Values
from shardwright.system.errors import InputError, LayoutError

INTERLEAVED = "interleaved-1f1b"
_MODULES = {"core_attn": None, "mla_up_proj": "mla_up", "moe_act": "activation", "layernorm": "norms"}
"""Parts that Megatron-Core recomputes -> their names in `layout.recompute_modules`; None: not kept by any stack."""
_FP8 = {"delayed": "fp8", "tensorwise": "fp8", "custom": "fp8", "blockwise": "fp8-block", "mxfp8": "mxfp8"}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon", "dist_muon": "muon", "adamw": "adamw"}
_CP = {"p2p": "zigzag", "a2a": "ulysses", "allgather": "allgather"}


def describe(values: Values) -> DescribedRun:
    """Return the run that the options describe. Raises InputError with every problem."""
    seq_len = values["seq_length"] or values["encoder_seq_length"] or values.needed("seq_length")
    model = model_of(values, seq_len)
    world_size, node_size = _world(values)
    settings = _degrees(values, world_size, has_experts=model.moe is not None) | _recompute(values)
    micro_batch = values["micro_batch_size"] or values["batch_size"] or values.needed("micro_batch_size")
    if values.problems:
        raise InputError(*values.problems)
    data_ranks = settings["dp_replicate"] * settings["dp_shard"]
    global_batch = values["global_batch_size"]
    if global_batch is None:
        global_batch = micro_batch * data_ranks
        values.assumed.append(f"{values.spell('global_batch_size')} {global_batch}: one micro-batch a data rank")
    stages = _stages(values, seq_len, global_batch, micro_batch * data_ranks)
    settings |= _pipeline(values, model.n_layers)
    if values["optimizer_cpu_offload"]:
        settings["offload_optimizer"] = "cpu"
        if values["optimizer_offload_fraction"] < 1:
            values.changes["optimizer_offload_fraction"] = "priced as 1: all states are on the host"
    if values["cpu_offloading"]:
        settings["offload_activations"] = "cpu"
    optimizer = _OPTIMIZERS.get(values["optimizer"])
    if optimizer is None:
        values.refuse("optimizer", f"has no counterpart; supported: {', '.join(_OPTIMIZERS)}")
    precision, stack = _precision(values), _stack(values)
    try:
        layout = Layout(**settings)
    except LayoutError as error:
        values.problems += [f"{values.source}: {problem}" for problem in error.problems]
    if values.problems:
        raise InputError(*values.problems)
    return DescribedRun(
        *(model, seq_len, global_batch, layout, micro_batch, precision, stack, world_size, node_size),
        optimizer=str(optimizer),
        stages=stages,
    )


_MOST_INCREMENTS = 1000


def _stages(values: Values, seq_len: int, global_batch: int, unit: int) -> tuple[PlannedStage, ...]:
    """Return the stages of --rampup-batch-size START INCREMENT SAMPLES, none without it.

    Over the first SAMPLES samples the batch grows from START by INCREMENT to the global batch, after equal numbers of
    samples (`megatron/core/num_microbatches_calculator.py`). A batch that no step has is left out. `unit`: a batch is a
    multiple of it, micro-batch x data ranks.
    """
    ramp = values["rampup_batch_size"]
    if not ramp:
        return ()
    if values.given("global_batch_size") and values.settings["global_batch_size"].where.startswith("--"):
        values.changes["rampup_batch_size"] = "--global-batch replaces the batches of all steps"
        return ()
    if len(ramp) != 3 or not all(re.fullmatch(r"[0-9]{1,15}", part) for part in ramp):
        values.refuse("rampup_batch_size", "three whole numbers are needed: start, increment and samples")
        return ()
    start, increment, samples = map(int, ramp)
    if min(start, increment, samples) < 1 or start >= global_batch or (global_batch - start) % increment:
        values.refuse(
            "rampup_batch_size",
            f"the batch grows from {start} by {increment}, and not to the global batch of {global_batch}; valid: a "
            f"start below it, and an increment that divides the difference, {max(0, global_batch - start)}",
        )
        return ()
    n = (global_batch - start) // increment
    if n > _MOST_INCREMENTS:
        values.refuse("rampup_batch_size", f"{n:,} increments; at most {_MOST_INCREMENTS:,} are read")
        return ()
    rounds = values["decrease_batch_size_if_needed"]
    stages: list[PlannedStage] = []
    consumed = 0
    for stage in range(n + 1):
        batch = start + stage * increment
        batch = batch // unit * unit if rounds else batch
        if not batch or batch % unit:
            values.refuse(
                "rampup_batch_size",
                f"a step of {start + stage * increment} sequences is no multiple of micro-batch x data ranks, {unit}; "
                f"give multiples of it, or {values.spell('decrease_batch_size_if_needed')}",
            )
            return ()
        n_steps = max(0, math.ceil(((stage + 1) * samples / n - consumed) / batch))
        if (n_steps or stage == n) and (not stages or stages[-1].global_batch != batch):
            stages.append(PlannedStage(consumed * seq_len, batch, seq_len))
        consumed += n_steps * batch
    return tuple(stages)


def _world(values: Values) -> tuple[int, int | None]:
    """Return the number of ranks, and of a node's ranks if the launch states it."""
    if values.world_size is not None:
        values.assumed.append(f"{values.world_size} ranks, as --cluster says")
        return values.world_size, None
    local, stated = values["nproc_per_node"], values["world_size"]
    if local and stated is None:
        stated = local * (values["nnodes"] or 1)
    if stated is None:
        values.problems.append(
            f"{values.source}: the number of ranks is missing (nproc_per_node x nnodes of torchrun, or WORLD_SIZE); "
            f"give it by --cluster, such as h100:64"
        )
    return stated or 1, local


def _degrees(values: Values, world_size: int, has_experts: bool) -> dict[str, Any]:
    """Return the degrees and the ZeRO stage."""
    tp = values["model_parallel_size"] or values["tensor_model_parallel_size"]
    pp, cp = values["pipeline_model_parallel_size"], values["context_parallel_size"]
    for name, degree in (("tensor", tp), ("pipeline", pp), ("context", cp)):
        if degree < 1:
            values.refuse(f"{name}_{'model_' * (name != 'context')}parallel_size", "1 or more is needed")
    inner = max(tp, 1) * max(pp, 1) * max(cp, 1)
    dp, rest = divmod(world_size, inner)
    if rest or not dp:
        values.problems.append(
            f"{values.source}: tensor {tp} x pipeline {pp} x context {cp} = {inner} ranks does not divide the "
            f"{world_size} ranks of the job; give a multiple by --cluster, such as h100:{inner * max(dp, 1)}"
        )
        dp = max(dp, 1)
    experts = 1
    if has_experts:
        cut = values["expert_tensor_parallel_size"]
        experts = values["expert_model_parallel_size"] * (tp if cut is None else cut)
    elif values["expert_model_parallel_size"] > 1:
        values.refuse("expert_model_parallel_size", f"needs {values.spell('num_experts')}, which is missing")
    zero, replicas = _zero(values), values["num_distributed_optimizer_instances"] or 1
    if zero == 0 and experts > cp * tp and dp > 1:
        zero = 1
        values.assumed.append("zero 1 instead of 0: here experts are partitioned over ranks that shard states")
    if dp % replicas:
        values.refuse("num_distributed_optimizer_instances", f"does not divide the {dp} data-parallel ranks")
        replicas = 1
    if dp * cp == 1:
        zero = 0
    shard = 1 if zero == 0 else dp // replicas
    sequence_parallel = bool(values["sequence_parallel"]) and tp > 1
    method = values["cp_comm_type"][0]
    if method not in _CP or len(set(values["cp_comm_type"])) > 1:
        values.refuse("cp_comm_type", f"has no price; supported: one of {', '.join(_CP)} for all layers")
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": experts,
        "zero": zero,
        "sequence_parallel": sequence_parallel,
        "dp_shard": shard,
        "dp_replicate": dp // shard,
        **({"cp_method": _CP.get(method, "zigzag")} if cp > 1 else {}),
    }


def _zero(values: Values) -> int:
    if values["use_torch_fsdp2"]:
        return 2 if values["torch_fsdp2_no_reshard_after_forward"] else 3
    if values["use_megatron_fsdp"] or values["use_custom_fsdp"]:
        strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        return strategies.index(values["data_parallel_sharding_strategy"])
    values.changes["data_parallel_sharding_strategy"] = "without use_megatron_fsdp Megatron-LM ignores it"
    return int(bool(values["use_distributed_optimizer"]))


def _pipeline(values: Values, n_layers: int) -> dict[str, Any]:
    """Return the schedule and the layers of each stage, which Megatron-LM makes equal."""
    pp = values["pipeline_model_parallel_size"]
    if pp == 1:
        return {}
    first = values["decoder_first_pipeline_num_layers"] or values["num_layers_in_first_pipeline_stage"]
    last = values["decoder_last_pipeline_num_layers"] or values["num_layers_in_last_pipeline_stage"]
    ends = [bool(values[f"account_for_{end}_in_pipeline_split"]) for end in ("embedding", "loss")]
    virtual = values["virtual_pipeline_model_parallel_size"] or values["num_virtual_stages_per_pipeline_rank"] or 1
    if layers := values["num_layers_per_virtual_pipeline_stage"]:
        virtual, rest = divmod(n_layers, pp * layers)
        if rest or not virtual:
            values.refuse(
                "num_layers_per_virtual_pipeline_stage",
                f"{n_layers} layers are not a multiple of pp={pp} x {layers} layers = {pp * layers}",
            )
            return {}
    n_stages = pp * virtual
    if n_stages > MOST_LAYERS:
        values.problems.append(f"{values.source}: {n_stages} pipeline stages; valid: at most {MOST_LAYERS}")
        return {}
    middle = n_stages - (first is not None) * virtual - (last is not None) * virtual
    per_stage, rest = divmod(n_layers + sum(ends) - (first or 0) - (last or 0), max(middle, 1))
    if rest or per_stage < 1 or middle < 0:
        values.problems.append(
            f"{values.source}: {values.spelled('num_layers')} {n_layers} cannot be partitioned equally into {n_stages} "
            f"stages, as Megatron-LM does; state the layers of the first or last stage "
            f"({values.spell('decoder_first_pipeline_num_layers')})"
        )
        return {}
    stages = [per_stage] * n_stages
    stages[0], stages[-1] = per_stage - ends[0], per_stage - ends[1]
    for count, place in ((first, 0), (last, -1)):
        if count is not None and virtual == 1:
            stages[place] = count
        elif count is not None:
            values.refuse("decoder_first_pipeline_num_layers", "with virtual stages it has no counterpart")
    result: dict[str, Any] = {"stage_layers": tuple(stages)}
    return result | ({"pp_schedule": INTERLEAVED, "virtual_stages": virtual} if virtual > 1 else {})


def _recompute(values: Values) -> dict[str, Any]:
    kind = values["recompute_granularity"] or values["activations_checkpoint_granularity"]
    if kind == "full" and values["recompute_activations"]:
        values.refuse("recompute_activations", "contradicts recompute_granularity full; leave one out")
    if kind is None:
        whole = values["checkpoint_activations"] or values["activations_checkpoint_method"]
        kind = "full" if whole else "selective" if values["recompute_activations"] else None
    if kind is None:
        return {}
    method = values["recompute_method"] or values["activations_checkpoint_method"]
    layers = values["recompute_num_layers"] or values["activations_checkpoint_num_layers"]
    if kind == "full":
        if method == "uniform" and (layers or 1) > 1:
            values.changes["recompute_num_layers"] = "every layer keeps its input here, and not one of several"
        return {"recompute": "full", **({"recompute_layers": layers} if method == "block" and layers else {})}
    modules = [_MODULES.get(name, "") for name in values["recompute_modules"]]
    if "" in modules:
        values.changes["recompute_modules"] = f"priced: {', '.join(_MODULES)}; the others are left out"
    named = tuple(dict.fromkeys(filter(None, modules)))
    return {"recompute": "selective", **({"recompute_modules": named} if named else {})}


def _precision(values: Values) -> str:
    if values["bf16"] and values["fp16"]:
        values.refuse("fp16", "contradicts bf16; leave one out")
    if values["fp8_format"] or values["fp8"] or values["fp8_hybrid"] or values["fp8_e4m3"]:
        return _FP8[values["fp8_recipe"]]
    if not values["bf16"] and not values["fp16"]:
        values.assumed.append("fp32: neither bf16 nor fp16 is given")
    return "bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32"


def _stack(values: Values) -> Stack:
    """Return Megatron-LM's stack with the types and overlaps that the options state."""
    old = values["use_legacy_models"] or values["ddp_impl"] or values["checkpoint_activations"]
    stack = MEGATRON_CORE_FUSED_LOSS if values["cross_entropy_loss_fusion"] else MEGATRON if old else MEGATRON_CORE
    speed = stack.speed
    if values["attention_backend"] in ("unfused", "local"):
        stack = replace(stack, flash_attention=False)
    elif old and values["use_flash_attn"]:
        stack = replace(stack, flash_attention=True)
    if values["fp8_param_gather"] or values["fp8_param"]:
        stack = replace(stack, fp8_weight_bytes=0.0)  # the 2 bytes of a working weight are its two copies in fp8
    narrow = values["fp16"] and not (values["accumulate_allreduce_grads_in_fp32"] or values["grad_reduce_in_fp32"])
    narrow = narrow or values["grad_reduce_in_bf16"] or values["grad_reduce_in_fp32"] is False
    if narrow or values["main_grads_dtype"] == "bf16":
        stack = replace(stack, gradient_bytes=2.0, reduced_bytes=2.0)
        speed = replace(speed, reduce_bytes=2.0)
    if values["use_precision_aware_optimizer"]:
        widths = [ELEMENT_BYTES.get(values[name], 1.0) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
        stack = replace(stack, state_bytes=sum(widths) / 2)
    speed = replace(speed, hides_dp=bool(values["overlap_grad_reduce"]), hides_tp=bool(values["tp_comm_overlap"]))
    if values["moe_enable_deepep"] or values["moe_token_dispatcher_type"] == "flex":
        speed = replace(speed, copies_by_node=True, permute_bytes=PERMUTED_BY_RANK)
    if any(_MODULES.get(name) for name in values["recompute_modules"]):
        stack = replace(stack, selective="parts")
    return replace(stack, speed=speed)


def able(described: DescribedRun, candidates: Candidates) -> Any:
    """Return the mask of the layouts that Megatron-LM can run: replicas or its distributed optimizer, 1F1B or
    interleaved 1F1B over equal stages, ring or all-to-all context parallelism."""
    shared, layers = candidates.shared, described.model.n_layers
    mask = np.isin(candidates.zero, (0, 1)) & ((candidates.dp_replicate == 1) | (candidates.zero == 0))
    possible = shared.pp_schedule in ("1f1b", INTERLEAVED) and layers % shared.n_stages == 0
    possible &= shared.loss_chunk_tokens == 0 and shared.zero_secondary_ranks == 1
    possible &= shared.recompute_modules == Layout().recompute_modules
    return mask & possible


def _fsdp_options(described: DescribedRun) -> dict[str, Any]:
    """Return the options of the files that mean something only with an FSDP of Megatron-LM, if the files use one."""
    if not any(described.stated.get(name) for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")):
        return {}
    return {
        name: value
        for name, value in described.stated.items()
        if "fsdp" in name or name in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy")
    }


def write(described: DescribedRun, choice: Choice) -> dict[str, Any]:
    """Return the options of a layout; None: the option is left out."""
    layout, model = choice.layout, described.model
    sharded = _fsdp_options(described)
    kept = bool(sharded) and layout.zero == described.layout.zero
    distributed = layout.zero == 1 or (kept and described.stated.get("use_distributed_optimizer"))
    virtual = layout.virtual_stages if layout.pp_schedule == INTERLEAVED and layout.pp > 1 else 1
    options: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "micro_batch_size": choice.micro_batch,
        "use_distributed_optimizer": True if distributed else None,
        **(sharded if kept else dict.fromkeys(sharded)),
        "sequence_parallel": (layout.tp > 1 and layout.sequence_parallel) or None,
        "num_layers_per_virtual_pipeline_stage": model.n_layers // (layout.pp * virtual) if virtual > 1 else None,
        "recompute_granularity": layout.recompute if layout.recomputes else None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "cp_comm_type": "a2a" if layout.cp > 1 and layout.cp_method == "ulysses" else None,
    }
    if layout.recompute == "full":
        part = layout.recompute_layers
        options |= {"recompute_method": "block" if part else "uniform", "recompute_num_layers": part or 1}
    if model.moe is not None:
        cut = layout.tp if layout.ep % layout.tp == 0 else 1
        options |= {"expert_model_parallel_size": layout.ep // cut, "expert_tensor_parallel_size": cut}
    return options


MEGATRON_LM = System(
    name="Megatron-LM",
    options=OPTIONS,
    families=FAMILIES,
    spell=lambda name: "--" + name.replace("_", "-"),
    describe=describe,
    able=able,
    write=write,
    replaced={"global_batch": "global_batch_size", "seq_len": "seq_length"},
)
