"""The options of Megatron-LM, which Megatron-Bridge and NeMo share: counterparts, and reasons where there are none.

Source: megatron/training/arguments.py and the configuration classes that it makes options from, of 2020 to 2026.
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

_DATA = "which tokens are read does not change time or memory"
_RATES = "the learning rate and its schedule do not change time or memory"
_LOGGING = "logging and profiling are not counted"
_CHECKPOINTS = "checkpoints are not part of a step"
_NUMERICS = "it changes values, not time or memory"
_KERNELS = "the stack's prices include fused kernels as Megatron-LM chooses them"
_LAUNCH = "how processes start and find each other does not change a step"
_INFERENCE = "it concerns inference"
_UNPRICED = "its effect on time and memory is not priced"
_OTHER_MODEL = "it belongs to models or training methods that are not planned"

OPTIONS = table(
    # Model
    read("num_layers", "model.n_layers", int),
    read("encoder_num_layers", "model.n_layers", int, note="the old name of num_layers"),
    read("hidden_size", "model.d_model", int),
    read("num_attention_heads", "model.n_heads", int),
    read("group_query_attention", "model.n_kv_heads", bool, False, "makes num_query_groups count"),
    read("num_query_groups", "model.n_kv_heads", int, 1, "with group_query_attention; otherwise all heads"),
    read("kv_channels", "model.head_dim", int, note="hidden_size / num_attention_heads if not given"),
    read("ffn_hidden_size", "model.d_ffn", int, note="4 hidden_size if not given; with swiglu 8/3"),
    read("vocab_size", "model.vocab_size", int, note="from the tokenizer if not given"),
    read("padded_vocab_size", "model.vocab_size", int),
    read("tokenizer_type", "model.vocab_size", str, "GPT2BPETokenizer", "if vocab_size is not given"),
    read("tokenizer_model", "model.vocab_size", str, note="its name gives the number of tokens of known tokenizers"),
    read("max_position_embeddings", "model.max_seq_len", int),
    read("normalization", "model.norm", str, "LayerNorm", "", "LayerNorm", "RMSNorm"),
    read("norm_epsilon", "model.norm_eps", float, 1e-5),
    read("layernorm_epsilon", "model.norm_eps", float, 1e-5),
    read("layernorm_zero_centered_gamma", "model.norm_offset", bool, False, "the name of apply_layernorm_1p in YAML"),
    read("apply_layernorm_1p", "model.norm_offset", bool, False, "for RMSNorm; a LayerNorm costs the same"),
    read("swiglu", "model.activation", bool, False, "swiglu"),
    read("gated_linear_unit", "model.activation", bool, False, "swiglu"),
    read("squared_relu", "model.activation", bool, False, "relu2"),
    read("openai_gelu", "model.activation", bool, False, "gelu_tanh"),
    read("quick_geglu", "model.activation", bool, False, "geglu_tanh, which costs the same"),
    read(
        *("position_embedding_type", "model.positions", str, "learned_absolute", "yarn is priced as rope"),
        *("learned_absolute", "rope", "yarn", "none", "mrope", "relative"),
    ),
    read("use_rotary_position_embeddings", "model.positions", bool, False, "the old spelling of rope"),
    read("no_position_embedding", "model.positions", bool, False, "no learned positions; rope is chosen elsewhere"),
    read("rotary_base", "model.rope_theta", float, 10000.0),
    read("use_rope_scaling", "model.rope_scaling", bool, False, "the scaling of Llama 3.1"),
    read("rope_scaling_factor", "model.rope_scaling", float, 8.0, "with use_rope_scaling"),
    read("qk_layernorm", "model.qk_norm", bool, False),
    read("disable_bias_linear", "model.bias", bool, False, "false"),
    read("add_bias_linear", "model.bias", bool),
    read("add_qkv_bias", "model.qkv_bias", bool, False),
    read("untie_embeddings_and_output_weights", "model.tied_embedding", bool, False, "false"),
    read("share_embeddings_and_output_weights", "model.tied_embedding", bool),
    read("hidden_dropout", "model.dropout", float, 0.1),
    read("attention_dropout", "model.dropout", float, 0.1, "fused attention drops for free"),
    read("init_method_std", "model.init_std", float, 0.02),
    read("mtp_num_layers", "model.mtp_modules", int, 0),
    read("mtp_loss_scaling_factor", "model.mtp_weight", float, 0.1),
    read("num_experts", "model.moe.n_experts", int),
    read("num_moe_experts", "model.moe.n_experts", int, note="the name of num_experts in YAML"),
    read("moe_router_topk", "model.moe.top_k", int, 2),
    read("moe_ffn_hidden_size", "model.moe.d_ffn", int, note="ffn_hidden_size if not given"),
    read("moe_shared_expert_intermediate_size", "model.moe.n_shared", int, note="as a number of experts"),
    read("moe_layer_freq", "model.moe.first_dense", str, "1", "first layers without experts"),
    read("moe_router_score_function", "model.moe.score", str, "softmax", "", "softmax", "sigmoid", "sqrtsoftplus"),
    read("moe_router_topk_scaling_factor", "model.moe.weight_scale", float, 1.0),
    read("moe_router_num_groups", "model.moe.n_groups", int, 1),
    read("moe_router_group_topk", "model.moe.groups_per_token", int, 1),
    read("moe_router_bias_update_rate", "model.moe.bias_rate", float, 1e-3, "with moe_router_enable_expert_bias"),
    read("moe_router_enable_expert_bias", "model.moe.bias_rate", bool, False),
    read("moe_aux_loss_coeff", "model.moe.aux_loss", list, ["0"], "the first of several"),
    read("moe_router_load_balancing_type", "model.moe.aux_scope", list, ["aux_loss"], "seq_aux_loss: sequence"),
    read("moe_z_loss_coeff", "model.moe.z_loss", float, 0.0),
    read("moe_expert_capacity_factor", "model.moe.capacity_factor", float, 0.0),
    read("moe_router_force_load_balancing", "model.moe.force_balance", bool, False),
    read("multi_latent_attention", "model.latent_attention", bool, False),
    read("q_lora_rank", "model.latent_attention.q_rank", int, 0),
    read("kv_lora_rank", "model.latent_attention.kv_rank", int, 32),
    read("qk_head_dim", "model.latent_attention.nope_dim", int, 128),
    read("qk_pos_emb_head_dim", "model.latent_attention.rope_dim", int, 64),
    read("v_head_dim", "model.latent_attention.v_dim", int, 128),
    read("rotary_percent", "model.rope_fraction", float, 1.0),
    read("window_size", "model.window", list, [], "left, right: left + 1 tokens"),
    read("window_attn_skip_freq", "model.global_interval", str, None, "n: every n-th layer; in a list 0"),
    read("softmax_type", "model.attention_sinks", str, "vanilla", "learnable: sinks"),
    read("no_rope_freq", "model.nope_interval", str, None, "n: every n-th layer; in a list 1"),
    read("attention_output_gate", "model.attention_gate", bool, False),
    read("experimental_attention_variant", "model.linear_attention", str, None, "gated_delta_net"),
    read("linear_attention_freq", "model.linear_attention.full_interval", str, None, "n: every n-th layer is full"),
    read("linear_num_key_heads", "model.linear_attention.n_k_heads", int, 16),
    read("linear_num_value_heads", "model.linear_attention.n_v_heads", int, 32),
    read("linear_key_head_dim", "model.linear_attention.k_dim", int, 128),
    read("linear_value_head_dim", "model.linear_attention.v_dim", int, 128),
    read("linear_conv_kernel_dim", "model.linear_attention.conv_width", int, 4),
    read("activation_func_clamp_value", "model.activation", float, note="with quick_geglu: swiglu_clamped"),
    read("glu_linear_offset", "model.activation", float, 0.0, "with quick_geglu: swiglu_clamped"),
    read("moe_shared_expert_gate", "moe.shared_gate", bool, False),
    read("enable_gpt_oss", "model.positions", bool, False, "rope, whatever position_embedding_type says"),
    read("hybrid_layer_pattern", "", str, None, "Mamba layers are refused"),
    read("hybrid_override_pattern", "", str, None, "Mamba layers are refused"),
    read("is_hybrid_model", "", bool, False, "Mamba layers are refused"),
    # Batch, precision, optimizer
    read("seq_length", "batch.seq_len", int),
    read("encoder_seq_length", "batch.seq_len", int, note="the old name of seq_length"),
    read("micro_batch_size", "batch.micro_batch", int),
    read("batch_size", "batch.micro_batch", int, note="the old name of micro_batch_size"),
    read("global_batch_size", "batch.global_batch", int, note="micro_batch_size x data ranks if not given"),
    read("rampup_batch_size", "batch.stages", list, note="start, increment, samples; the last stage is planned"),
    read("decrease_batch_size_if_needed", "batch.stages", bool, False),
    read("bf16", "precision.compute", bool, False),
    read("fp16", "precision.compute", bool, False),
    read("fp8_format", "precision.fp8", str),
    read("fp8", "precision.fp8", str, note="the name of fp8_format in YAML"),
    read("fp8_hybrid", "precision.fp8", bool, False),
    read("fp8_e4m3", "precision.fp8", bool, False),
    read("fp8_recipe", "precision.fp8", str, "delayed", "", "delayed", "tensorwise", "blockwise", "mxfp8", "custom"),
    read("fp8_param_gather", "memory of parameters", bool, False, "weights are kept in fp8 alone"),
    read("fp8_param", "memory of parameters", bool, False, "weights are kept in fp8 alone"),
    read("optimizer", "optimizer.name", str, "adam"),
    read("use_precision_aware_optimizer", "optimizer.narrow_states", bool, False, "makes the types of states count"),
    read("exp_avg_dtype", "optimizer.narrow_states", str, "fp32", "", "fp32", "bf16", "fp16", "fp8"),
    read("exp_avg_sq_dtype", "optimizer.narrow_states", str, "fp32", "", "fp32", "bf16", "fp16", "fp8"),
    read("main_grads_dtype", "memory of gradients", str, "fp32", "", "fp32", "bf16"),
    read("grad_reduce_in_fp32", "memory of gradients", bool),
    read("accumulate_allreduce_grads_in_fp32", "memory of gradients", bool, False, "true with bf16 in any case"),
    read("grad_reduce_in_bf16", "memory of gradients", bool, False, "reduced and accumulated in bf16"),
    read("optimizer_cpu_offload", "layout.offload_optimizer", bool, False),
    read("optimizer_offload_fraction", "layout.offload_optimizer", float, 1.0),
    # Layout
    read("tensor_model_parallel_size", "layout.tp", int, 1),
    read("model_parallel_size", "layout.tp", int, note="the old name of tensor_model_parallel_size"),
    read("pipeline_model_parallel_size", "layout.pp", int, 1),
    read("context_parallel_size", "layout.cp", int, 1),
    read("expert_model_parallel_size", "layout.ep", int, 1, "x expert_tensor_parallel_size: experts are not cut here"),
    read("expert_tensor_parallel_size", "layout.ep", int, note="tensor_model_parallel_size if not given"),
    read("sequence_parallel", "layout.sequence_parallel", bool, False),
    read("cp_comm_type", "layout.cp_method", list, ["p2p"], "p2p: zigzag, a2a: ulysses, allgather"),
    read("num_layers_per_virtual_pipeline_stage", "layout.virtual_stages", int, note="interleaved 1F1B"),
    read("num_virtual_stages_per_pipeline_rank", "layout.virtual_stages", int, note="interleaved 1F1B"),
    read("virtual_pipeline_model_parallel_size", "layout.virtual_stages", int, note="interleaved 1F1B"),
    read("decoder_first_pipeline_num_layers", "layout.stage_layers", int),
    read("decoder_last_pipeline_num_layers", "layout.stage_layers", int),
    read("num_layers_in_first_pipeline_stage", "layout.stage_layers", int),
    read("num_layers_in_last_pipeline_stage", "layout.stage_layers", int),
    read("account_for_embedding_in_pipeline_split", "layout.stage_layers", bool, False),
    read("account_for_loss_in_pipeline_split", "layout.stage_layers", bool, False),
    read("use_distributed_optimizer", "layout.zero", bool, False, "1"),
    read("use_megatron_fsdp", "layout.zero", bool, False),
    read("use_custom_fsdp", "layout.zero", bool, False, "the old name of use_megatron_fsdp"),
    read("use_torch_fsdp2", "layout.zero", bool, False, "3"),
    read("torch_fsdp2_no_reshard_after_forward", "layout.zero", bool, False, "2"),
    read(
        *("data_parallel_sharding_strategy", "layout.zero", str, "no_shard", "with megatron_fsdp: 0 to 3"),
        *("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    read("num_distributed_optimizer_instances", "layout.dp_replicate", int, 1),
    read("recompute_activations", "layout.recompute", bool, False, "selective"),
    read("recompute_granularity", "layout.recompute", str, None, "", "full", "selective"),
    read("recompute_method", "layout.recompute_layers", str, None, "", "uniform", "block"),
    read("recompute_num_layers", "layout.recompute_layers", int, note="with block; uniform recomputes all"),
    read("recompute_modules", "layout.recompute_modules", list, ["core_attn"]),
    read("checkpoint_activations", "layout.recompute", bool, False, "full, before 2022"),
    read("activations_checkpoint_method", "layout.recompute", str, None, "full, before 2022", "uniform", "block"),
    read("activations_checkpoint_granularity", "layout.recompute", str, None, "", "full", "selective"),
    read("activations_checkpoint_num_layers", "layout.recompute_layers", int),
    read("cpu_offloading", "layout.offload_activations", bool, False),
    # Stack
    read("use_flash_attn", "stack", bool, False, "fused attention"),
    read("attention_backend", "stack", str, "auto", "", "auto", "flash", "fused", "unfused", "local"),
    read("use_legacy_models", "stack", bool, False, "the stack before Megatron-Core"),
    read("ddp_impl", "stack", str, None, "the stack before Megatron-Core"),
    read("cross_entropy_loss_fusion", "stack", bool, False),
    read("overlap_grad_reduce", "stack", bool, False, "data-parallel messages overlap"),
    read("tp_comm_overlap", "stack", bool, False, "tensor-parallel messages overlap"),
    read("moe_token_dispatcher_type", "stack", str, "allgather", "flex: a token crosses to a node once"),
    read("moe_enable_deepep", "stack", bool, False, "a token crosses to a node once"),
    # Launch
    read("nproc_per_node", "cluster", int, note="torchrun"),
    read("nnodes", "cluster", int, note="torchrun"),
    read("world_size", "cluster", int),
    without_effect(
        _LAUNCH,
        "node_rank master_addr master_port rdzv_id rdzv_backend rdzv_endpoint local_rank distributed_backend "
        "distributed_timeout_minutes max_restarts monitor_interval standalone tee log_dir redirects nodes ntasks "
        "ntasks_per_node gpus_per_node gres container_image container_mounts container_workdir no_container_mount_home "
        "output error job_name account partition time export mpi exclusive use_cpu_initialization lazy_mpu_init "
        "use_gloo_process_groups disable_gloo_process_groups nccl_communicator_config_path seed te_rng_tracker "
        "inference_rng_tracker data_parallel_random_init use_tp_pp_dp_mapping init_model_with_meta_device local_addr "
        "high_priority_stream_groups role module m",
    ),
    without_effect(
        _DATA,
        "data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path "
        "data_cache_path no_mmap_bin_files mock_data num_workers reset_position_ids reset_attention_mask eod_mask_loss "
        "no_create_attention_mask_in_dataloader num_dataset_builder_threads object_storage_cache_path "
        "mid_level_dataset_surplus vocab_file merge_file vocab_extra_ids special_tokens tiktoken_pattern "
        "tiktoken_num_special_tokens tokenizer_hf_no_use_fast trust_remote_code null_tokenizer_eod_id chat_template "
        "dataloader_type data_impl mmap_warmup sample_rate mask_prob short_seq_prob decoder_seq_length "
        "tokenizer_hf_no_include_special_tokens s3_cache_path mock dataset_name",
    ),
    without_effect(
        _RATES,
        "lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples "
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init "
        "warmup override_opt_param_scheduler use_checkpoint_opt_param_scheduler override_lr_scheduler train_iters "
        "train_samples exit_interval exit_duration_in_mins exit_signal_handler eval_iters eval_interval "
        "eval_global_batch_size eval_micro_batch_size step_batch_size_schedule skip_train test_mode full_validation "
        "iterations_to_skip exit_signal",
    ),
    without_effect(
        _NUMERICS,
        "weight_decay start_weight_decay end_weight_decay weight_decay_incr_style clip_grad adam_beta1 adam_beta2 "
        "adam_eps sgd_momentum loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis "
        "init_method_xavier_uniform rotary_interleaved rotary_seq_len_interpolation_factor "
        "calculate_per_token_loss moe_input_jitter_eps moe_router_dtype moe_router_pre_softmax softmax_scale "
        "embedding_init_method_std apply_query_key_layer_scaling attention_softmax_in_fp32 fp32_residual_connection "
        "deterministic_mode fp8_amax_history_len fp8_amax_compute_algo fp8_margin fp8_interval rope_type "
        "rotary_scaling_factor mscale mscale_all_dim beta_fast beta_slow original_max_position_embeddings "
        "apply_wd_to_qk_layernorm check_for_nan_in_loss_and_grad no_check_for_nan_in_loss_and_grad "
        "check_for_spiky_loss check_for_large_grads error_injection_rate rerun_mode moe_token_drop_policy "
        "decoupled_weight_decay no_weight_decay_cond_type scale_embeddings moe_router_fusion norm_epsilon_qk",
    ),
    without_effect(
        _LOGGING,
        "log_interval log_params_norm log_throughput log_progress timing_log_level timing_log_option tensorboard_dir "
        "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_num_zeros_in_grad "
        "log_batch_size_to_tensorboard log_learning_rate_to_tensorboard log_world_size_to_tensorboard "
        "log_max_attention_logit log_straggler "
        "wandb_project wandb_exp_name wandb_save_dir wandb_entity wandb_group logging_level log_energy profile "
        "profile_step_start profile_step_end profile_ranks use_pytorch_profiler record_memory_history "
        "memory_snapshot_path nvtx_ranges no_barrier_with_level_1_timing barrier_with_l1_time moe_per_layer_logging "
        "one_logger_project one_logger_run_name no_one_logger one_logger_async app_tag_run_name app_tag_run_version "
        "config_logger_dir enable_one_logger log_device_memory_used",
    ),
    without_effect(
        _CHECKPOINTS,
        "save save_interval load no_save_optim no_save_rng no_load_optim no_load_rng finetune pretrained_checkpoint "
        "ckpt_step use_checkpoint_args use_mp_args_from_checkpoint_args exit_on_missing_checkpoint ckpt_format "
        "auto_detect_ckpt_format dist_ckpt_format use_dist_ckpt ckpt_fully_parallel_save ckpt_fully_parallel_load "
        "async_save ckpt_assume_constant_structure dist_ckpt_strictness non_persistent_save_interval "
        "non_persistent_ckpt_type save_retain_interval ckpt_convert_format ckpt_convert_save perform_initialization "
        "no_initialization use_persistent_ckpt_worker dist_ckpt_save_pre_mcore_014 "
        "use_tokenizer_model_from_checkpoint_args fully_parallel_save fully_parallel_load "
        "distrib_optim_fully_reshardable_mem_efficient dist_ckpt_optim_fully_reshardable",
    ),
    without_effect(
        _KERNELS,
        "no_masked_softmax_fusion masked_softmax_fusion no_bias_gelu_fusion bias_gelu_fusion no_bias_swiglu_fusion "
        "bias_activation_fusion bias_swiglu_fusion no_bias_dropout_fusion bias_dropout_fusion no_rope_fusion "
        "apply_rope_fusion no_persist_layer_norm persist_layer_norm no_gradient_accumulation_fusion "
        "gradient_accumulation_fusion moe_grouped_gemm moe_permute_fusion use_mcore_models transformer_impl "
        "disable_jit_fuser cross_entropy_fusion_impl memory_efficient_layer_norm tp_comm_overlap_cfg "
        "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad "
        "tp_comm_bootstrap_backend overlap_param_gather align_param_gather no_align_param_gather ddp_bucket_size "
        "ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective manual_gc manual_gc_interval "
        "manual_gc_eval empty_unused_memory_level use_cpp_dataset_builder overlap_p2p_comm batch_p2p_comm "
        "no_overlap_p2p_communication train_sync_interval no_async_tensor_model_parallel_allreduce "
        "async_tensor_model_parallel_allreduce make_vocab_size_divisible_by pad_vocab_size "
        "use_te_activation_func microbatch_group_size_per_virtual_pipeline_stage bias onnx_safe "
        "contiguous_buffers_in_local_ddp no_contiguous_buffers_in_local_ddp distribute_saved_activations "
        "no_query_key_layer_scaling spec moe_router_padding_for_fp8 moe_router_padding_for_quantization "
        "deallocate_pipeline_outputs use_ring_exchange_p2p variable_seq_lengths fused_single_qkv_rope "
        "moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms no_scatter_gather_tensors_in_pipeline",
    ),
    without_counterpart(
        _UNPRICED,
        "cuda_graph_impl cuda_graph_scope cuda_graph_modules enable_cuda_graph external_cuda_graph "
        "cuda_graph_warmup_steps overlap_moe_expert_parallel_comm delay_wgrad_compute moe_shared_expert_overlap "
        "overlap_param_gather_with_optimizer_step defer_embedding_wgrad_compute wgrad_deferral_limit use_sharp "
        "use_nccl_ub nccl_ub fsdp_double_buffer suggested_communication_unit_size keep_fp8_transpose_cache "
        "overlap_p2p_communication_warmup_flush tp_only_amax_red overlap_cpu_optimizer_d2h_h2d "
        "use_torch_optimizer_for_cpu_offload no_pin_cpu_grads no_pin_cpu_params optimizer_cuda_graph "
        "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel "
        "moe_pad_expert_input_to_capacity moe_layer_recompute first_last_layers_bf16 num_layers_at_start_in_bf16 "
        "num_layers_at_end_in_bf16 fp4_format fp4 fp4_recipe fp4_param_gather main_params_dtype fp8_wgrad "
        "fp8_dot_product_attention fp8_multi_head_attention reuse_grad_buf_for_mxfp8_param_ag "
        "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "fine_grained_activation_offloading offload_modules outer_dp_sharding_strategy fsdp_manual_registration "
        "enable_full_sharding_in_hsdp mla_down_proj_fusion fp16_lm_cross_entropy moe_use_upcycling "
        "num_microbatches_with_partial_activation_checkpoints inprocess_restart enable_ft_package "
        "pipeline_model_parallel_layout moe_router_topk_limited_devices moe_device_level_aux_loss_coeff",
    ),
    without_counterpart(
        _OTHER_MODEL,
        "hybrid_attention_ratio hybrid_mlp_ratio "
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads heterogeneous_layers_config_path "
        "decoder_num_layers apply_residual_connection_post_layernorm num_attention_heads_decoder "
        "qk_clip use_mup enable_mhc_connections sft perform_rl_step "
        "yaml_cfg enable_experimental moe_latent_size encoder_tensor_model_parallel_size "
        "encoder_pipeline_model_parallel_size pipeline_model_parallel_split_rank",
    ),
    without_effect(_INFERENCE, "max_tokens_to_oom flash_decode enable_chunked_prefill output_bert_embeddings"),
)  # fmt: skip
FAMILIES = tuple(
    ForeignOption(prefix, note=reason, fate=fate)
    for reason, fate, prefixes in (
        (_INFERENCE, NO_EFFECT, "inference_ mlp_chunks_ retriever_ indexer_"),
        (_LAUNCH, NO_EFFECT, "inprocess_ ft_ calc_ft_ rdzv_ sharp_ slurm_"),
        (
            _LOGGING,
            NO_EFFECT,
            "log_ logits_save_ otel_ wandb_ tensorboard_ one_logger_ flight_recorder_ profile_ save_",
        ),
        (_CHECKPOINTS, NO_EFFECT, "ckpt_ dist_ckpt_ non_persistent_ async_ckpt_ replication"),
        (_RATES, NO_EFFECT, "lr_ train_ eval_ exit_ wsd_ wd_"),
        (_DATA, NO_EFFECT, "data_ dataset_ dataloader_ fim_ tokenizer_ tiktoken_"),
        (
            _NUMERICS,
            NO_EFFECT,
            "muon_ lion_ adaptive_muon_ soap_ mup_ yarn_ mtp_ init_ loss_scale rope_ no_weight_decay",
        ),
        (
            _OTHER_MODEL,
            NO_COUNTERPART,
            "rl_ grpo_ dsa_ mamba_ gdp_ linear_ mhc_ dino_ swin_ vision_ img_ biencoder_ ict_",
        ),
        (
            _UNPRICED,
            NO_COUNTERPART,
            "moe_ fp8_ fp4_ tp_comm_ megatron_fsdp_ fsdp_ cpu_offloading_ gtp_ ddp_ cuda_graph_",
        ),
    )
    for prefix in prefixes.split()
)
"""Starts of the names of further options."""
