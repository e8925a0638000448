"""Bugs of the planner's prices: communication that is hidden where it is not, and factors that miss a kernel."""

from shardwright.cost.job import FULL
from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_COST, _STEP = "shardwright.cost", "tests/cost/test_step.py:"
_SOFTWARE, _MATMULS = "tests/planner/test_software.py:", "tests/cost/test_matmuls.py:"

SCALE: dict[str, AnyBug] = {
    "the plan hides the reductions of FSDP in a pipeline in its last backward pass": UnitBug(
        Mutation(f"{_COST}.data_messages:stage_collectives", "AFTER if after else I_AND_W", "I_AND_W"),
        _STEP + "test_fsdp_in_a_pipeline_reduces_the_gradients_of_each_chunk_after_its_last_pass",
    ),
    "the plan gathers layers once in a pipeline that frees them after each forward pass": UnitBug(
        Mutation(f"{_COST}.data_messages:stage_collectives", "[*once, ('m', (GATHERED_AGAIN,), I_AND_W)]", "once"),
        _STEP
        + "test_zero_3_that_frees_layers_after_each_forward_pass_of_a_pipeline_gathers_them_for_each_backward_pass",
    ),
    "the plan frees the layers of FSDP after each backward pass of a pipeline": UnitBug(
        Mutation(f"{_COST}.gradients:gathers_all", "not job.stack.reduces_after_pipelines", "True"),
        "tests/cost/test_memory.py:test_fsdp_in_a_pipeline_holds_a_whole_stage_since_backward_passes_free_no_layers",
    ),
    "the plan keeps the input of a norm with an offset in 16 bits": UnitBug(
        Mutation(f"{_COST}.job:Job.widens_norms", "self.stack.widens_norms", "False"),
        "tests/cost/test_model_switches.py:test_norms_with_an_offset_cost_memory",
    ),
    "a zigzag ring has one chunk a rank": UnitBug(
        Mutation("shardwright.split.rules:sequence_parts", "zigzag_chunks(ring)", "ring"),
        "tests/split/test_tensor.py:test_a_layout_that_does_not_fit_is_refused_with_its_arithmetic",
        given=(Layout(cp=4), 60, "batch.seq_len=60 is not a multiple of 2 x 4 = 8 chunks"),
    ),
    "the search computes the losses of pairs in chunks": UnitBug(
        Mutation("shardwright.planner.space:_group", "job.pairs", "False"),
        "tests/planner/test_space.py:test_no_loss_of_pairs_is_searched_in_chunks",
    ),
    "an RMSNorm of PyTorch 2.9 takes the time of six kernels": UnitBug(
        Mutation("shardwright.planner.measured_run:stack_of", "speed.norm_bytes", "36.0"),
        "tests/planner/test_software.py:test_a_fused_rmsnorm_moves_the_bytes_of_a_layernorm",
    ),
    "the plan reduce-scatters the gradients of DeepSpeed's BF16_Optimizer": UnitBug(
        Mutation(f"{_COST}.data_messages:stage_collectives", "zero == 1 and job.stack.sums_whole", "False"),
        _STEP + "test_the_bf16_optimizer_of_deepspeed_all_reduces_sums_in_fp32",
    ),
    "FlashAttention-1 computes heads of 80 without padding": UnitBug(
        Mutation(f"{_COST}.speed:Speed.kernel_width", "(32.0, 64.0, 128.0)", "(32.0, 64.0, 80.0, 128.0)"),
        "tests/cost/test_matmuls.py:test_a_kernel_that_pads_heads_takes_the_time_of_the_padded_width",
        given=("fa1", {80: 128}),
    ),
    "the plan reduces the gradient of FSDP's embedding without the head's": UnitBug(
        Mutation(
            f"{_COST}.gradients:embedding_gradient",
            "ends * stack.reduced_bytes + np.maximum(before * ends, after)",
            "head * stack.reduced_bytes + np.maximum(before * ends, after)",
        ),
        "tests/cost/test_memory.py:test_fsdp_reduces_the_gradients_of_embedding_and_untied_head_as_one_group",
    ),
    "FlashAttention-2 computes heads of 80 without padding": UnitBug(
        Mutation(f"{_COST}.speed:Speed.kernel_width", "ceil(width / 32) * 32.0", "width"),
        "tests/cost/test_matmuls.py:test_a_kernel_that_pads_heads_takes_the_time_of_the_padded_width",
        given=("fa2", {80: 96}),
    ),
    "stored scores have the rate of eager kernels": UnitBug(
        Mutation(f"{_COST}.attention:_stored", "f.element_rate / f.kernel_share", "f.element_rate"),
        _SOFTWARE + "test_stored_scores_have_the_rate_of_fused_kernels_in_eager_stacks_too",
    ),
    "a host that waits for each kernel launches beside the kernels": UnitBug(
        Mutation("shardwright.planner.measured_run:stack_of", "replace(speed, adds_launches=True)", "speed"),
        _SOFTWARE + "test_a_host_that_waits_for_each_kernel_adds_all_launches_to_a_step",
    ),
    "GPT-NeoX copies no heads round fused attention": UnitBug(
        Mutation("shardwright.planner.measured_run:stack_of", "PACKED_HEADS_BYTES", "4.0"),
        _SOFTWARE + "test_eager_kernels_of_megatron_deepspeed_and_gpt_neox_move_the_bytes_of_their_source",
        given=("gpt-neox,flash=1", 20, 10, 28, 10),
    ),
    "a published run saves at the best interval, whatever it states": UnitBug(
        Mutation("shardwright.planner.evaluate:_whole_run", "run.measured.save_every", "None"),
        "tests/planner/test_whole_run.py:test_a_published_run_loses_the_work_since_its_last_checkpoint",
    ),
    "the plan copies gathered parameters in no step": UnitBug(
        Mutation(f"{_COST}.data_parallel:_exposed_s", "list(traffic.copies(int(zero)))", "[]"),
        "tests/cost/test_messages.py:test_fsdp2_copies_each_gathered_parameter_and_casts_each_gradient_into_its_message",
        given=(3, 2),
    ),
    "the plan hides the messages of experts in a pipeline with one stage on a rank": UnitBug(
        Mutation(
            f"{_COST}.layer:dispatch",
            "job.stack.speed.hides_experts and candidates.alternates",
            "job.stack.speed.hides_experts",
        ),
        _STEP + "test_messages_of_experts_overlap_where_a_rank_can_run_two_microbatches_at_once",
        given=({"pp": 4}, False),
    ),
    "the plan hides the messages of experts with full recomputation": UnitBug(
        Mutation(
            f"{_COST}.layer:dispatch", "f[what + HIDDEN] + f.again * (f[what] - f[what + HIDDEN])", "f[what + HIDDEN]"
        ),
        _STEP + "test_messages_of_experts_overlap_where_a_rank_can_run_two_microbatches_at_once",
        given=({"recompute": FULL}, False),
    ),
    "hidden messages of experts slow no computation down": UnitBug(
        Mutation(f"{_COST}.layer:dispatch", "job.stack.speed.interference", "0.0"),
        _STEP + "test_messages_of_experts_that_overlap_cost_their_exposed_part_and_the_slowdown",
    ),
    "the plan computes on multiprocessors that reduce results over tp": UnitBug(
        Mutation(f"{_COST}.layer:_multiply", "matmul.beside_reduction(job)", "matmul"),
        _STEP + "test_matmuls_beside_a_reduction_over_tp_have_fewer_multiprocessors",
        given=("h100", True, 16),
    ),
    "the plan reduces results over tp on 16 multiprocessors of every accelerator": UnitBug(
        Mutation(
            f"{_COST}.matmuls:Matmul.beside_reduction",
            "job.stack.speed.on(job.cluster.accelerator.die)",
            "job.stack.speed",
        ),
        _STEP + "test_matmuls_beside_a_reduction_over_tp_have_fewer_multiprocessors",
        given=("b200", True, 1),
    ),
    "the plan fuses the softmax of any number of heads": UnitBug(
        Mutation(f"{_COST}.attention:_stored", "np.any((apart := softmax_apart(job, candidates)))", "False"),
        _MATMULS + "test_a_softmax_of_stored_scores_is_one_kernel_for_a_multiple_of_four_heads",
        given=(1, "megatron", True),
    ),
    "the host launches the kernels of an unfused softmax in no time": UnitBug(
        Mutation(f"{_COST}.layer:_launch", "kernels + UNFUSED_LAUNCHES * softmax_apart(job, candidates)", "kernels"),
        _MATMULS + "test_a_softmax_of_stored_scores_is_one_kernel_for_a_multiple_of_four_heads",
        given=(1, "megatron", True),
    ),
    "messages on a slow network slow computation all the time that they take": UnitBug(
        Mutation(
            f"{_COST}.data_parallel:_DataParallelTraffic.exposed",
            "self._interference(name, whats)",
            "speed.interference",
        ),
        _STEP + "test_messages_on_a_slow_network_slow_a_pass_as_long_as_on_the_usual_network",
    ),
    "training logs do not change attention kernels with a published rate": UnitBug(
        Mutation(
            f"{_COST}.attention:_fused",
            "(speed.attention_share or fitted.flash(chip.die)) / fitted.attention_time",
            "speed.attention_share or fitted.flash(chip.die) / fitted.attention_time",
        ),
        _SOFTWARE + "test_a_factor_of_attention_changes_the_part_of_attention_with_every_kernel",
        given=("megatron-core,date=2024-05", "h100:8"),
    ),
    "the plan exposes the reductions of gradients of inputs without userbuffers": UnitBug(
        Mutation(
            "shardwright.planner.measured_run:stack_of",
            "replace(speed, hides_tp=row.overlap_tp)",
            "replace(speed, hides_tp=row.overlap_tp, hides_tp_backward=row.overlap_tp)",
        ),
        _SOFTWARE + "test_without_userbuffers_megatron_core_reduces_gradients_of_inputs_beside_gradients_of_weights",
    ),
    "latent attention in 8 bits has the rate of other heads": UnitBug(
        Mutation(f"{_COST}.attention:_fused", "(speed.latent_gain if job.model.latent_attention else 1.0)", "1.0"),
        _SOFTWARE + "test_attention_in_8_bits_has_its_measured_rate_relative_to_16_bits",
        given=("cudnn-mxfp8", "deepseek-v3", "b200:8", 1.34),
    ),
    "recipes that overlap the messages of experts multiply each expert in a kernel of its own": UnitBug(
        Mutation(
            "shardwright.planner.measured_run:stack_of",
            "replace(speed, hides_experts=True, groups_matmuls=True)",
            "replace(speed, hides_experts=True)",
        ),
        _SOFTWARE + "test_recipes_that_overlap_the_messages_of_experts_multiply_all_experts_in_one_kernel",
    ),
    "messages of a stated size are at least as large as those without": UnitBug(
        Mutation(f"{_COST}.data_messages:groups", "job.stack.speed.bucket_stated", "False"),
        _SOFTWARE + "test_a_message_has_the_stated_parameters_and_at_least_a_tensor",
        given=(1, 198),
    ),
    "a large message of gradients is exposed as a layer is": UnitBug(
        Mutation(
            f"{_COST}.data_parallel:_DataParallelTraffic._pieces",
            "np.minimum(f.layers, f.sent_calls)",
            "f.layers",
        ),
        _SOFTWARE + "test_one_message_of_a_step_has_no_pass_to_overlap_with",
    ),
    "an interval is as wide for software without a measured run": UnitBug(
        Mutation(
            "shardwright.planner.headline:unmeasured_software",
            "not measured and job.stack.speed.kind not in job.calibration.software",
            "False",
        ),
        "tests/planner/test_interval.py:test_the_width_is_that_of_the_formula",
    ),
}
