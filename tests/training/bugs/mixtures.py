"""Mixtures whose shared experts, dense layers, biases or tensors in files are wrong."""

from dataclasses import replace

from tests.mutation import Mutation
from tests.training.bugs.bug import EP, EXPERTS, SP_EP, Bug, UnitBug

FAMILIES = "tests/hugging_face/test_families.py"
LOGITS = f"{FAMILIES}:test_logits_are_those_of_transformers"
GATED = {"moe": replace(EXPERTS, n_shared=1, shared_gate=True)}
IN_LAYER = "shardwright.model.sections:MoESpec.in_layer"

SCALE = {
    "shared experts have no gate": UnitBug(
        Mutation("shardwright.model.moe:MoE.run_shared", "y_BTD * self.shared_gate(x_BTD)", "y_BTD"),
        LOGITS,
        ("qwen2-moe",),
    ),
    "the gate of shared experts is not a sigmoid": UnitBug(
        Mutation(
            "shardwright.model.moe:SharedGate.forward",
            "F.linear(x_BTD, self.weight.to(x_BTD.dtype)).sigmoid()",
            "F.linear(x_BTD, self.weight.to(x_BTD.dtype))",
        ),
        LOGITS,
        ("qwen2-moe",),
    ),
    "with ep shared experts have no gate": Bug(
        Mutation("shardwright.parallel.expert:ExchangingMoE.run", "self.run_shared(x_BTD)", "self.shared(x_BTD)"),
        [EP, SP_EP],
        spec=GATED,
    ),
    "the experts of DeepSeek-V2 have no routed scaling factor": UnitBug(
        Mutation("shardwright.model.moe:Router.forward", "weights_BTK * moe.weight_scale", "weights_BTK"),
        LOGITS,
        ("deepseek-v2",),
    ),
    "a group of DeepSeek-V2 is as good as its two best experts": UnitBug(
        Mutation(
            "shardwright.model.moe:Router.pick",
            "1 if moe.score == 'softmax' else min(2, ranked_BTGe.shape[-1])",
            "min(2, ranked_BTGe.shape[-1])",
        ),
        LOGITS,
        ("deepseek-v2",),
    ),
    "the greedy choice of DeepSeek-V2-Lite is among groups": UnitBug(
        Mutation(
            "shardwright.hugging_face.deepseek:_complete_v2",
            "_V2_DEFAULTS | config | ungrouped",
            "_V2_DEFAULTS | config",
        ),
        LOGITS,
        ("deepseek-v2-lite, yarn",),
    ),
    "the shared experts of Qwen2-MoE are as wide as one expert": UnitBug(
        Mutation("shardwright.hugging_face.qwen_moe:written", "spec.moe.shared_width", "spec.moe.d_ffn"),
        f"{FAMILIES}:test_one_wide_shared_expert_is_several_narrow_ones",
    ),
}
GPT_OSS = "tests/model/test_moe_models.py:test_the_mixture_of_gpt_oss_is_that_of_transformers"
BIASED = {"activation": "swiglu_clamped", "moe": replace(EXPERTS, bias=True)}
ACTIVATION = "shardwright.model.feed_forward:_ClampedSwiglu"

REDUCTION = {
    "on token shards the router has no bias": Bug(
        Mutation("shardwright.parallel.routing:ShardedRouter.__init__", "router.logit_bias", "None"),
        [SP_EP],
        spec=BIASED,
    ),
    "rows of dropped tokens have a bias, and the gradient of the last expert's": UnitBug(
        Mutation(
            "shardwright.model.matmul:rows_of_experts",
            "F.pad(bias_EF, (0, 0, 0, 1)).index_select(0, expert_R)",
            "bias_EF.index_select(0, expert_R.clamp(max=len(bias_EF) - 1))",
        ),
        "tests/model/test_moe.py:test_rows_of_dropped_tokens_have_no_bias",
    ),
}
SHARD = {
    "rows of gate and up do not alternate": UnitBug(
        Mutation("shardwright.hugging_face.table:_tensor", "len(parts) * row + part", "part * n_out + row"), GPT_OSS
    ),
    "the matrices of all experts are not transposed": UnitBug(
        Mutation(
            "shardwright.hugging_face.writer:tensor_of_file",
            "whole.mT if tensor.transposed else whole",
            "whole.reshape(tensor.shape)",
        ),
        GPT_OSS,
    ),
    "gate and up of all experts in one tensor are swapped": UnitBug(
        Mutation(
            "shardwright.hugging_face.table:_tensors",
            "[rows[name] for name in group]",
            "[rows[name] for name in group[::-1]]",
        ),
        LOGITS,
        ("granite-moe",),
    ),
}
OFF_BY_ONE = {
    "the first row of an expert has the bias of the expert before": UnitBug(
        Mutation(
            "shardwright.model.matmul:rows_of_experts",
            "torch.searchsorted(counts_E.cumsum(0), places_R, right=True)",
            "torch.searchsorted(counts_E.cumsum(0), places_R, right=False)",
        ),
        GPT_OSS,
    ),
    "the clamped activation multiplies by up, not by up + 1": UnitBug(
        Mutation(f"{ACTIVATION}.forward", "up.clamp(-LIMIT, LIMIT) + 1", "up.clamp(-LIMIT, LIMIT)"), GPT_OSS
    ),
    "gate is clamped on both sides": UnitBug(
        Mutation(f"{ACTIVATION}.forward", "gate.clamp(max=LIMIT)", "gate.clamp(-1.0, LIMIT)"), GPT_OSS
    ),
    "the gradient of the clamped activation has the slope of silu": UnitBug(
        Mutation(f"{ACTIVATION}.backward", "1 + SLOPE * g * (1 - gain)", "1 + g * (1 - gain)"),
        "tests/model/test_switches.py:test_the_gradient_of_the_clamped_activation_is_that_of_autograd",
    ),
    "layers with experts are counted from 0": UnitBug(
        Mutation(IN_LAYER, "(layer + 1)", "layer"),
        f"{FAMILIES}:test_the_layers_with_experts_are_those_of_transformers",
        ("qwen3-moe, dense layers",),
    ),
    "dense layers are counted from 1": UnitBug(
        Mutation(IN_LAYER, "layer not in self.dense_layers", "layer + 1 not in self.dense_layers"),
        f"{FAMILIES}:test_the_layers_with_experts_are_those_of_transformers",
        ("qwen2-moe",),
    ),
}
