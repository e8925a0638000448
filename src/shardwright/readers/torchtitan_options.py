"""The options of torchtitan: counterparts, and reasons where there are none.

Source: torchtitan/config/job_config.py, configs.py and config_registry.py of the models, of 2024 to August 2026. Since
2026 a micro-batch is stated in tokens.
"""

from shardwright.readers.table import (
    NO_COUNTERPART,
    NO_EFFECT,
    ForeignOption,
    read,
    table,
    without_counterpart,
    without_effect,
)

TOKENS = ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length")
"""Options of [training] that state batch and length in tokens, since 2026."""
KINDS = ("activation_checkpoint", "optimizer", "loss")
"""Sections of Python configurations whose value is the class or function that is called."""
_OLD = "the place before 2025"
_PARALLELISM = (
    ("data_parallel_replicate_degree", "layout.dp_replicate", int, 1, ""),
    ("data_parallel_shard_degree", "layout.dp_shard", int, -1, "-1: all remaining ranks"),
    ("data_parallel_degree", "layout.dp_shard", int, -1, "-1: all remaining ranks"),
    (
        "fsdp_reshard_after_forward",
        "layout.zero",
        str,
        "default",
        "never: 2, otherwise 3; with pp default gathers once a step",
    ),
    ("tensor_parallel_degree", "layout.tp", int, 1, ""),
    ("enable_async_tensor_parallel", "stack", bool, False, "tensor-parallel messages overlap"),
    ("pipeline_parallel_degree", "layout.pp", int, 1, ""),
    ("pipeline_parallel_schedule", "layout.pp_schedule", str, "1F1B", ""),
    ("pipeline_parallel_layers_per_stage", "layout.virtual_stages", int, None, "2 stages a rank if not given"),
    ("pipeline_parallel_microbatch_size", "batch.micro_batch", int, 1, "with a pipeline"),
    ("context_parallel_degree", "layout.cp", int, 1, ""),
    ("context_parallel_rotate_method", "layout.cp_method", str, "allgather", "alltoall: zigzag"),
    ("expert_parallel_degree", "layout.ep", int, 1, ""),
    ("expert_tensor_parallel_degree", "layout.ep", int, 1, "times expert_parallel_degree"),
)
SECTIONS = ("parallelism", "training", "experimental")
EXPERT_DEGREES = [f"{section}.expert_{kind}parallel_degree" for section in SECTIONS for kind in ("", "tensor_")]
OPTIONS = table(
    read("model.name", "model", str, "llama3"),
    read("model.flavor", "model", str),
    read("model_spec", "model", str, note="the flavor; its module, or the file, gives the name"),
    read("hf_model", "model", str, note="of transformers_modeling_backend; give --model"),
    read("model_spec.module", "model", str, note="the module of model_registry"),
    read("model_spec.converters", "precision.fp8", list, []),
    read("model_spec.num_mtp_layers", "model.mtp_modules", int, 0),
    read("model_spec.tp_gemm_backend", "stack", str, note="dist_gemm: tensor-parallel messages overlap"),
    read("compile.enable_async_tensor_parallel", "stack", bool, False, "tensor-parallel messages overlap"),
    read("activation_checkpoint", "layout.recompute", str, note="the class in Python"),
    read("optimizer", "optimizer.name", str, note="the function in Python"),
    read("loss", "layout.loss_chunk_tokens", str, note="the class in Python: one with chunks, or of all logits"),
    read("loss.num_chunks", "layout.loss_chunk_tokens", int, 8, "the tokens of a micro-batch on a rank divided by it"),
    read("loss.loss_fn", "layout.loss_chunk_tokens", str, note="the loss of a chunk"),
    read(
        "training.num_tokens_per_microbatch_per_dp_rank",
        "batch.micro_batch",
        int,
        16384,
        "divided by max_context_length",
    ),
    read("training.num_tokens_per_train_step", "batch.global_batch", int, -1, "divided by max_context_length"),
    read("training.max_context_length", "batch.seq_len", int, 2048),
    read("parallelism.num_pp_microbatches", "batch.global_batch", int, 1, "with a pipeline"),
    read("parallelism.enable_sequence_parallel", "layout.sequence_parallel", bool, True),
    read("model.converters", "precision.fp8", list, []),
    read("model_converters.converters", "precision.fp8", list, []),
    read("float8.enable_float8_linear", "precision.fp8", bool, False),
    read("float8.recipe_name", "precision.fp8", str, "tensorwise"),
    read("quantize.linear.float8.recipe_name", "precision.fp8", str, "tensorwise"),
    read("optimizer.name", "optimizer.name", str, "AdamW"),
    read("training.local_batch_size", "batch.micro_batch", int, 8, "with a pipeline several micro-batches"),
    read("training.batch_size", "batch.micro_batch", int, note="the old name of local_batch_size"),
    read("training.global_batch_size", "batch.global_batch", int, -1, "local_batch_size x data ranks if not given"),
    read("training.seq_len", "batch.seq_len", int, 2048),
    read("training.compile", "stack", bool, False),
    read("compile.enable", "stack", bool, False),
    read("training.enable_cpu_offload", "layout.offload_parameters", bool, False, "and offload_optimizer"),
    read("training.mixed_precision_param", "precision.compute", str, "bfloat16", "", "bfloat16", "float32"),
    read("training.mixed_precision_reduce", "memory of gradients", str, "float32", "", "float32", "bfloat16"),
    read("activation_checkpoint.mode", "layout.recompute", str, "selective", "", "none", "selective", "full"),
    read("activation_checkpoint.selective_ac_option", "layout.recompute", str, "2", "n: every n-th layer is full"),
    (
        read(f"{section}.{name}", key, kind, default, note or _OLD * (section != SECTIONS[0]))
        for section in SECTIONS
        for name, key, kind, default, note in _PARALLELISM
    ),
    without_effect(
        "it does not change time or memory of a step",
        "training.steps training.max_norm training.dataset training.dataset_path training.seed training.deterministic "
        "training.gc_freq training.gc_debug training.warmup_steps training.data_parallel_type optimizer.lr "
        "optimizer.eps optimizer.beta1 optimizer.beta2 optimizer.weight_decay model.tokenizer_path "
        "model.hf_assets_path hf_assets_path model.print_after_conversion model.norm_type optimizer.fused "
        "optimizer.implementation float8.filter_fqns parallelism.disable_loss_parallel debug.seed "
        "activation_checkpoint.early_stop activation_checkpoint.preserve_rng_state "
        "parallelism.spmd_backend parallelism.context_parallel_ptrr_mask_key compile.backend dump_folder",
    ),
    without_counterpart(
        "its effect on time and memory is not priced",
        "optimizer.early_step_in_backward float8.enable_fsdp_float8_all_gather compile.components "
        "float8.precompute_float8_dynamic_scale_for_fsdp parallelism.pipeline_parallel_split_points "
        "experimental.pipeline_parallel_split_points parallelism.module_fqns_per_model_part "
        "parallelism.pipeline_parallel_schedule_csv parallelism.enable_compiled_autograd training.dtype "
        "parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers "
        "parallelism.enable_fsdp_symm_mem parallelism.context_parallel_load_balancer model_spec.moe_comm_backend "
        "model_spec.non_blocking_capacity_factor model_spec.attn_backend training.disable_cuda_graphs",
    ),
)
FAMILIES = tuple(
    ForeignOption(prefix, note=note, fate=fate)
    for note, fate, prefixes in (
        (
            "logging and profiling are not counted",
            NO_EFFECT,
            "metrics. profiling. profiler. job. debug. comm. memory_estimation.",
        ),
        ("checkpoints are not part of a step", NO_EFFECT, "checkpoint. fault_tolerance."),
        ("the learning rate does not change time or memory", NO_EFFECT, "lr_scheduler. optimizer."),
        ("the loss is a cross entropy over the vocabulary", NO_EFFECT, "loss."),
        ("evaluation and data are not part of a step", NO_EFFECT, "validation. validator. dataloader. tokenizer."),
        ("its effect on time and memory is not priced", NO_COUNTERPART, "float8. mx. experimental. quantize."),
        ("reinforcement learning is refused", NO_COUNTERPART, "trainer. generator."),
    )
    for prefix in prefixes.split()
)
