"""DeepSpeed, Accelerate and the Hugging Face Trainer, whose files complete each other: DeepSpeed's JSON, Accelerate's
YAML, the JSON of TrainingArguments, and the model's config.json.

Source: the documentation of DeepSpeed's config-json, `accelerate.utils.dataclasses`, `transformers.TrainingArguments`.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.cost.job import Candidates
from shardwright.cost.speed import FLASH_2
from shardwright.cost.stack import FSDP, FSDP_COMPILED, FSDP_FUSED_LOSS, Stack
from shardwright.layout.layout import Layout
from shardwright.planner.choice import Choice
from shardwright.readers.table import (
    NO_COUNTERPART,
    NO_EFFECT,
    DescribedRun,
    ForeignOption,
    System,
    Values,
    read,
    table,
    without_effect,
)
from shardwright.system.errors import InputError, LayoutError

_ZERO = "zero_optimization."
_FSDP = "fsdp_config."
_PARALLEL = "parallelism_config.parallelism_config_"
STRATEGIES = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
    "5": 2,
}
"""`fsdp_sharding_strategy` -> ZeRO stage."""
_HYBRID = ("hybrid_shard", "hybrid_shard_zero2", "4", "5")
_OPTIMIZERS = dict.fromkeys(("adamw", "adam", "fusedadam", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw")
_OPTIMIZERS |= {
    "cpuadam": "adamw",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "adafactor": "adafactor",
}
_OPTIMIZERS |= {"sgd": "sgd", "lion": "lion", "muon": "muon", "lion_32bit": "lion"}
OPTIONS = table(
    # DeepSpeed
    read("train_batch_size", "batch.global_batch", int, note="micro batch x accumulation x ranks"),
    read("train_micro_batch_size_per_gpu", "batch.micro_batch", int),
    read("gradient_accumulation_steps", "batch.global_batch", int, note="1 if not given"),
    read(f"{_ZERO}stage", "layout.zero", int, 0),
    read(f"{_ZERO}offload_optimizer.device", "layout.offload_optimizer", str, "none", "", "none", "cpu", "nvme"),
    read(f"{_ZERO}offload_param.device", "layout.offload_parameters", str, "none", "", "none", "cpu", "nvme"),
    read(f"{_ZERO}cpu_offload", "layout.offload_optimizer", bool, False),
    read(f"{_ZERO}overlap_comm", "stack", bool, None, "data-parallel messages overlap"),
    read(f"{_ZERO}zero_hpz_partition_size", "layout.zero_secondary_ranks", int, 1),
    read(f"{_ZERO}zero_quantized_weights", "layout.compress_weights", bool, False, "int8"),
    read(f"{_ZERO}zero_quantized_gradients", "layout.compress_gradients", bool, False, "int4"),
    read("bf16.enabled", "precision.compute", bool, False),
    read("bfloat16.enabled", "precision.compute", bool, False),
    read("fp16.enabled", "precision.compute", bool, False),
    read("optimizer.type", "optimizer.name", str, "AdamW"),
    read("sequence_parallel_size", "layout.cp", int, 1, "ulysses"),
    read("tensor_parallel.autotp_size", "layout.tp", int, 1),
    # Accelerate
    read("distributed_type", "layout.zero", str, "MULTI_GPU", "which of the sections counts"),
    read("num_processes", "cluster", int),
    read("num_machines", "cluster", int, 1),
    read("mixed_precision", "precision.compute", str, "no", "", "no", "bf16", "fp16", "fp8"),
    read("deepspeed_config.zero_stage", "layout.zero", int),
    read("deepspeed_config.deepspeed_config_file", "layout.zero", str, None, "the file has to be given too"),
    read("deepspeed_config.gradient_accumulation_steps", "batch.global_batch", int),
    read("deepspeed_config.offload_optimizer_device", "layout.offload_optimizer", str, "none"),
    read("deepspeed_config.offload_param_device", "layout.offload_parameters", str, "none"),
    read(f"{_FSDP}fsdp_sharding_strategy", "layout.zero", str, "FULL_SHARD"),
    read(f"{_FSDP}fsdp_version", "layout.zero", int, 1, "2: reshard_after_forward is true or false"),
    read(f"{_FSDP}fsdp_reshard_after_forward", "layout.zero", str, "true", "true: 3, false: 2"),
    read(f"{_FSDP}fsdp_offload_params", "layout.offload_parameters", bool, False, "and offload_optimizer"),
    read(f"{_FSDP}fsdp_activation_checkpointing", "layout.recompute", bool, False, "full"),
    read(f"{_FSDP}activation_checkpointing", "layout.recompute", bool, False, "full"),
    read(f"{_PARALLEL}tp_size", "layout.tp", int, 1),
    read(f"{_PARALLEL}cp_size", "layout.cp", int, 1),
    read(f"{_PARALLEL}dp_replicate_size", "layout.dp_replicate", int),
    read(f"{_PARALLEL}dp_shard_size", "layout.dp_shard", int),
    # TrainingArguments
    read("per_device_train_batch_size", "batch.micro_batch", int),
    read("bf16", "precision.compute", bool, False),
    read("fp16", "precision.compute", bool, False),
    read("gradient_checkpointing", "layout.recompute", bool, False, "full"),
    read("optim", "optimizer.name", str),
    read("fsdp", "layout.zero", list, [], "full_shard: 3, shard_grad_op: 2, offload"),
    read(f"{_FSDP}version", "layout.zero", int, 1, "as fsdp_version"),
    read(f"{_FSDP}reshard_after_forward", "layout.zero", str, "true", "as fsdp_reshard_after_forward"),
    read("deepspeed", "layout.zero", str, None, "the file has to be given too"),
    read("torch_compile", "stack", bool, False),
    read("use_liger_kernel", "stack", bool, False, "priced as a fused loss"),
    *(read(name, "batch.seq_len", int) for name in ("max_seq_length", "max_length", "model_max_length", "block_size")),
    without_effect(
        "it does not change time or memory of a step",
        "steps_per_print gradient_clipping wall_clock_breakdown prescale_gradients zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer compute_environment debug machine_rank main_process_ip main_process_port "
        "main_training_function rdzv_backend same_network use_cpu downcast_bf16 enable_cpu_affinity seed data_seed "
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps "
        "lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps output_dir overwrite_output_dir do_train "
        "do_eval do_predict eval_strategy evaluation_strategy per_device_eval_batch_size eval_steps eval_delay "
        "ddp_find_unused_parameters remove_unused_columns report_to run_name disable_tqdm push_to_hub hub_model_id "
        "label_names load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip group_by_length "
        "full_determinism dataset_text_field packing tpu_use_cluster tpu_use_sudo tpu_env _n_gpu local_rank",
    ),
)  # fmt: skip
FAMILIES = tuple(
    ForeignOption(prefix, note=note, fate=fate)
    for note, fate, prefixes in (
        ("logging and profiling are not counted", NO_EFFECT, "logging_ log_ tensorboard. wandb. csv_monitor. "
         "flops_profiler."),
        ("checkpoints are not part of a step", NO_EFFECT, "save_ checkpoint. resume_ fsdp_config.fsdp_state_dict_type"),
        ("the learning rate does not change time or memory", NO_EFFECT, "scheduler. optimizer.params. lr_ warmup_"),
        ("data are not part of a step", NO_EFFECT, "dataloader_ dataset_ eval_ hub_ push_to_hub data_"),
        ("loss scales change values, not time", NO_EFFECT, "fp16. bf16. fp16_ half_precision_"),
        ("sizes of buffers and prefetching are priced as the stack chooses them", NO_EFFECT, "zero_optimization. "
         "fsdp_config. deepspeed_config. communication_data_type accelerator_config. gradient_checkpointing_kwargs."),
        ("its effect on time and memory is not priced", NO_COUNTERPART, "activation_checkpointing. aio. pipeline. "
         "compression_training. curriculum_learning. sparse_attention. elasticity. autotuning. data_efficiency. "
         "megatron_lm_ dynamo_ fp8_ torch_compile_ neftune_ parallelism_config. amp. tensor_parallel. zenflow"),
    )
    for prefix in prefixes.split()
)  # fmt: skip


def _dialect(values: Values) -> str:
    """Return deepspeed, fsdp or ddp, which the files choose."""
    kind = values["distributed_type"].upper()
    if kind == "MEGATRON_LM":
        values.refuse("distributed_type", "give Megatron-LM's own arguments; supported: DEEPSPEED, FSDP, MULTI_GPU")
    starts = (_ZERO, "deepspeed_config.", "train_batch_size", "train_micro_batch_size_per_gpu")
    deepspeed = any(name.startswith(starts) for name in values.settings)
    if kind == "DEEPSPEED" or (deepspeed and kind != "FSDP"):
        if values["fsdp"]:
            values.refuse("fsdp", "contradicts DeepSpeed; leave one out")
        return "deepspeed"
    if kind == "FSDP" and any(name.startswith(_ZERO) for name in values.settings):
        values.refuse("distributed_type", "contradicts DeepSpeed's zero_optimization; leave one out")
    return "fsdp" if kind == "FSDP" or values["fsdp"] else "ddp"


def _number(values: Values, *names: str) -> int | None:
    """Return the first of some options that the files state as a number; 'auto' leaves it to the next one. Two that
    differ are a problem."""
    stated = [name for name in names if values.given(name) and str(values.settings[name].value).lower() != "auto"]
    given = [(name, values[name]) for name in stated if values[name] is not None]
    if len({value for _, value in given}) > 1:
        (one, first), (other, second) = given[0], next(option for option in given if option[1] != given[0][1])
        values.refuse(other, f"contradicts {one} {first} ({values.settings[one].where}); {second} is not {first}")
    return given[0][1] if given else None


def describe(values: Values) -> DescribedRun:
    """Return the run that the files describe. Raises InputError with every problem."""
    model, world = values.given_model, values.world_size or _number(values, "num_processes")
    if model is None:
        values.problems.append(f"{values.source}: the model is missing; add --model config.json, or a preset")
    if world is None:
        values.problems.append(f"{values.source}: the number of ranks is missing; give --cluster, such as h100:64")
        world = 1
    seq_len = _number(values, "seq_len", "max_seq_length", "max_length", "model_max_length", "block_size")
    if seq_len is None:
        values.problems.append(f"{values.source}: the length of sequences is missing; give --seq-len, such as 4096")
    for name in ("deepspeed", "deepspeed_config.deepspeed_config_file"):
        if values[name] and not any(name.startswith((_ZERO, "train_")) for name in values.settings):
            values.refuse(name, "is DeepSpeed's configuration, which is not read from here; give it by another --from")
    dialect = _dialect(values)
    settings = _degrees(values, world, dialect)
    data_ranks = settings["dp_shard"] * settings["dp_replicate"]
    micro_batch, global_batch = _batch(values, data_ranks)
    if values.problems or model is None or seq_len is None:
        raise InputError(*values.problems)
    if (
        any(values[name] for name in ("gradient_checkpointing", f"{_FSDP}fsdp_activation_checkpointing"))
        or (values[f"{_FSDP}activation_checkpointing"])
    ):
        settings["recompute"] = "full"
    try:
        layout = Layout(**settings)
    except LayoutError as error:
        raise InputError(*(f"{values.source}: {problem}" for problem in error.problems)) from None
    named = str(values["optim"] or values["optimizer.type"]).lower().replace("paged_", "")
    if named not in _OPTIMIZERS:
        values.assumed.append(f"adamw instead of the optimizer {named}, which has no counterpart")
    machines = values["num_machines"] or 1
    return DescribedRun(
        *(model, seq_len, global_batch, layout, micro_batch, _precision(values), _stack(values), world),
        node_size=world // machines if values.given("num_processes") and world % machines == 0 else None,
        optimizer=_OPTIMIZERS.get(named, "adamw"),
        dialect="fsdp2" if dialect == "fsdp" and _is_fsdp2(values) else dialect,
    )


def _batch(values: Values, data_ranks: int) -> tuple[int, int]:
    """Return the micro-batch and the global batch; one may follow from the other."""
    micro = _number(values, "train_micro_batch_size_per_gpu", "per_device_train_batch_size")
    steps = _number(values, "gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
    whole = _number(values, "global_batch", "train_batch_size")
    if micro is None and whole is not None:
        micro = whole // (data_ranks * (steps or 1))
        values.assumed.append(f"micro-batch {micro}: train_batch_size / ({data_ranks} data ranks x {steps or 1})")
    if not micro:
        batches = {name: setting for name, setting in values.settings.items() if "batch" in name}
        autos = [f"{setting.where}: {name} 'auto'" for name, setting in batches.items() if setting.value == "auto"]
        why = f"{autos[0]} is taken from TrainingArguments" if autos else f"{values.source}: the micro-batch is missing"
        values.problems.append(
            f"{why}; give per_device_train_batch_size in another --from FILE.json, or --global-batch"
        )
        return 1, data_ranks
    stated = micro * data_ranks * (steps or 1)
    if whole is not None and steps is not None and whole != stated:
        values.refuse(
            "train_batch_size",
            f"is not micro-batch {micro} x accumulation {steps} x {data_ranks} data ranks = {stated}",
        )
    if whole is None and steps is None:
        values.assumed.append("gradient_accumulation_steps 1, as none is given")
    return micro, whole or stated


def _degrees(values: Values, world: int, dialect: str) -> dict[str, Any]:
    tp = max(values["tensor_parallel.autotp_size"], values[f"{_PARALLEL}tp_size"])
    ulysses = values["sequence_parallel_size"]
    cp = max(ulysses, values[f"{_PARALLEL}cp_size"])
    dp, rest = divmod(world, max(tp * cp, 1))
    if rest or not dp:
        values.problems.append(f"{values.source}: tp {tp} x cp {cp} does not divide the {world} ranks of the job")
        dp = max(dp, 1)
    zero, replicas = _zero(values, dialect), values[f"{_PARALLEL}dp_replicate_size"] or 1
    strategy = values[f"{_FSDP}fsdp_sharding_strategy"].lower()
    if dialect == "fsdp" and strategy in _HYBRID and replicas == 1:
        replicas = values["num_machines"] or 1
        values.assumed.append(f"{replicas} replicas: one a machine, as {strategy} makes them")
    if dp % replicas:
        values.problems.append(f"{values.source}: {replicas} replicas do not divide the {dp} data-parallel ranks")
        replicas = 1
    if dp * cp == 1 or zero == 0:
        zero, replicas = 0, dp
    result: dict[str, Any] = {"tp": tp, "cp": cp, "zero": zero, "dp_shard": dp // replicas, "dp_replicate": replicas}
    if cp > 1 and ulysses > 1:
        result["cp_method"] = "ulysses"
    if values[f"{_ZERO}zero_hpz_partition_size"] > 1:
        result["zero_secondary_ranks"] = values[f"{_ZERO}zero_hpz_partition_size"]
    if values[f"{_ZERO}zero_quantized_weights"] and zero:
        result["compress_weights"] = "int8"
    if values[f"{_ZERO}zero_quantized_gradients"] and zero:
        result["compress_gradients"] = "int4"
    return result | _offload(values, dialect, zero)


def _zero(values: Values, dialect: str) -> int:
    if dialect == "deepspeed":
        stage = _number(values, f"{_ZERO}stage", "deepspeed_config.zero_stage")
        if stage not in (None, 0, 1, 2, 3):
            values.refuse(f"{_ZERO}stage", "valid: 0, 1, 2, 3")
            return 0
        return stage or 0
    if dialect == "ddp":
        return 0
    words = [word.lower() for word in values["fsdp"]]
    if _is_fsdp2(values):
        keeps = (values[f"{_FSDP}{name}reshard_after_forward"].lower() == "false" for name in ("fsdp_", ""))
        return 2 if any(keeps) else 3
    name = next((word for word in words if word in STRATEGIES), values[f"{_FSDP}fsdp_sharding_strategy"].lower())
    if name not in STRATEGIES:
        values.refuse(f"{_FSDP}fsdp_sharding_strategy", f"valid: {', '.join(STRATEGIES)}")
    return STRATEGIES.get(name, 3)


def _is_fsdp2(values: Values) -> bool:
    """Return whether FSDP2 is asked for, by Accelerate's or by the Trainer's name of the option."""
    return 2 in (values[f"{_FSDP}fsdp_version"], values[f"{_FSDP}version"])


def _offload(values: Values, dialect: str, zero: int) -> dict[str, str]:
    places = {"none": "none", "cpu": "cpu", "nvme": "disk"}
    for name in ("offload_optimizer_device", "offload_param_device"):
        if values[f"deepspeed_config.{name}"] not in places:
            values.refuse(f"deepspeed_config.{name}", f"valid: {', '.join(places)}")
            return {}
    if dialect == "fsdp" and (values[f"{_FSDP}fsdp_offload_params"] or "offload" in values["fsdp"]):
        return {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    states, parameters = (
        next((place for place in (values[one], values[other]) if place != "none"), "none")
        for one, other in (
            (f"{_ZERO}offload_optimizer.device", "deepspeed_config.offload_optimizer_device"),
            (f"{_ZERO}offload_param.device", "deepspeed_config.offload_param_device"),
        )
    )
    if values[f"{_ZERO}cpu_offload"]:
        states = "cpu"
    result = {} if states == "none" else {"offload_optimizer": places[states]}
    if parameters != "none":
        if parameters == "nvme":
            values.assumed.append("parameters are offloaded to the host: here they cannot be on a disk")
        result |= {"offload_parameters": "cpu", "offload_optimizer": places[states] if states != "none" else "cpu"}
    return result if zero else {name: place for name, place in result.items() if name != "offload_parameters"}


def _precision(values: Values) -> str:
    half = values["bf16"] or values["bf16.enabled"] or values["bfloat16.enabled"] or values["mixed_precision"] == "bf16"
    if values["fp16"] or values["fp16.enabled"] or values["mixed_precision"] == "fp16":
        if half:
            values.assumed.append("bf16, although fp16 is stated too")
        return "bf16" if half else "fp16"
    if values["mixed_precision"] == "fp8":
        return "fp8"
    stated = [name for name in ("bf16.enabled", "fp16.enabled") if values.given(name)]
    if not half and any(str(values.settings[name].value).lower() == "auto" for name in stated):
        values.assumed.append("bf16: its 'auto' is taken from TrainingArguments, and none is given")
        return "bf16"
    return "bf16" if half else "fp32"


def _stack(values: Values) -> Stack:
    values.assumed.append("software priced as PyTorch FSDP with fused attention and eager kernels")
    stack = FSDP_COMPILED if values["torch_compile"] else FSDP_FUSED_LOSS if values["use_liger_kernel"] else FSDP
    speed = replace(stack.speed, flash_gain=FLASH_2)
    if values[f"{_ZERO}overlap_comm"] is False:
        speed = replace(speed, hides_dp=False)
    return replace(stack, speed=speed)


def able(described: DescribedRun, candidates: Candidates) -> Any:
    """Return the mask of the layouts of data parallelism alone: DDP, ZeRO or FSDP, with or without recomputation."""
    shared = candidates.shared
    mask = (candidates.tp == 1) & (candidates.cp == 1) & (candidates.ep == 1) & (candidates.recompute != 1)
    if described.dialect == "deepspeed":
        mask &= (candidates.zero == 0) | (candidates.dp_replicate == 1)
    else:
        mask &= np.isin(candidates.zero, (2, 3) if described.dialect == "fsdp2" else (0, 2, 3))
    return mask & (shared.pp == 1 and shared.loss_chunk_tokens == 0 and shared.zero_secondary_ranks == 1)


def write(described: DescribedRun, choice: Choice) -> dict[str, Any]:
    """Return the options of a layout in the files' own terms; None: the option is left out."""
    layout, deepspeed = choice.layout, described.dialect == "deepspeed"
    steps = described.global_batch // (choice.micro_batch * layout.data_ranks)
    stated = described.stated.keys() & {"gradient_checkpointing", f"{_FSDP}fsdp_activation_checkpointing"}
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu" if deepspeed else "per_device_train_batch_size": choice.micro_batch,
        "gradient_accumulation_steps": steps,
        **dict.fromkeys(sorted(stated or {"gradient_checkpointing"}), layout.recompute == "full"),
    }
    if deepspeed:
        return result | {f"{_ZERO}stage": layout.zero}
    if described.dialect == "fsdp2":
        replicas = {f"{_PARALLEL}dp_replicate_size": layout.dp_replicate} if layout.dp_replicate > 1 else {}
        return result | replicas | {f"{_FSDP}fsdp_reshard_after_forward": layout.zero == 3}
    strategies = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 0: None if described.dialect == "ddp" else "NO_SHARD"}
    if layout.dp_replicate > 1 and layout.zero:
        strategies = {3: "HYBRID_SHARD", 2: "HYBRID_SHARD_ZERO2"}
        result[f"{_PARALLEL}dp_replicate_size"] = layout.dp_replicate
    return result | {f"{_FSDP}fsdp_sharding_strategy": strategies[layout.zero]}


HUGGING_FACE = System(
    name="DeepSpeed, Accelerate and Hugging Face Trainer",
    options=OPTIONS | table(read("global_batch", "batch.global_batch", int), read("seq_len", "batch.seq_len", int)),
    families=FAMILIES,
    spell=str,
    describe=describe,
    able=able,
    write=write,
    replaced={"global_batch": "global_batch", "seq_len": "seq_len"},
)
