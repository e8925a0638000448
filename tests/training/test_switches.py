"""Proves that layouts train models with other norms, factors and activations as one process does."""

from dataclasses import replace

import pytest

from shardwright.layout.layout import Layout
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.sections import RopeScaling
from shardwright.verification import Verifier
from tests.marks import rest_prove
from tests.training.bugs.bug import EXPERTS, LATENT
from tests.training.worlds import LONG

SCALES = {"embedding_scale": 3.0, "residual_scale": 0.6, "attention_scale": 0.2, "logit_divisor": 1.7}
SWITCHES = SCALES | {"norm_position": "after", "qk_norm": True, "qk_norm_whole": True, "activation": "geglu"}
OFFSET = SWITCHES | {"norm_position": "both", "norm_offset": True, "activation": "relu2", "tied_embedding": True}
WITHOUT_BIAS = {"norm": "layernorm", "norm_bias": False, "activation": "gelu", "norm_position": "both"}
STARCODER = {"norm": "layernorm", "bias": True, "activation": "gelu_tanh", "rope_fraction": 0.5}
FACTORS = {"short_factor": (1.0,) * 4, "long_factor": (1.0, 1.5, 3.0, 9.0), "original_max_seq_len": LONG.seq_len - 1}
LONGROPE = {"rope_scaling": RopeScaling(kind="longrope", factor=2.0, **FACTORS)}
PLACES = {"qkv_bias": True, "nope_interval": 2, "qk_norm": True, "rope_fraction": 0.5}
GATED_EXPERTS = replace(EXPERTS, n_shared=1, d_shared=12, shared_gate=True)
DENSE = {"n_layers": 3, "moe": replace(GATED_EXPERTS, dense_layers=(1,))}
GROUPS = replace(EXPERTS, n_groups=2, groups_per_token=1, normalise=False, weight_scale=2.5, n_shared=2, first_dense=1)
DEEPSEEK_V2 = {"moe": replace(GROUPS, bias_rate=0.0), "latent_attention": LATENT, "n_kv_heads": 4}
BIASED = {"activation": "swiglu_clamped", "moe": replace(EXPERTS, bias=True)}
BIASED_BOTH = BIASED | {"n_layers": 3, "moe": replace(EXPERTS, bias=True, capacity_factor=1.0, first_dense=1)}
EVERY_SECOND = {"n_layers": 4, "moe": replace(GATED_EXPERTS, interval=2), "mtp_modules": 1}
MIXTURE = SWITCHES | {"moe": EXPERTS, "mtp_modules": 1}
WINDOWS = {"window": 5, "global_interval": 2, "window_rope_theta": 300.0, "attention_sinks": True, "o_bias": True}
CAPS = {"window": 7, "attention_softcap": 0.3, "logit_softcap": 0.2, "norm_position": "both", "qkv_bias": True}
NET = LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=6, v_dim=5, conv_width=3, full_interval=2)
LINEAR = {"linear_attention": NET, "attention_gate": True, "norm_offset": True, "qk_norm": True, "n_layers": 3}
WIDE_NET = {"linear_attention": replace(NET, n_k_heads=4, n_v_heads=4, full_interval=3), "n_layers": 3}
LINEAR_EXPERTS = LINEAR | {"moe": GATED_EXPERTS, "rope_fraction": 0.5}
LLAMA4 = {"window": 5, "window_chunked": True, "global_layers": (0,), "nope_layers": (0,), "temperature_scale": 0.7}
LLAMA4 |= {"temperature_interval": 3, "qk_norm": True, "qk_norm_weight": False, "n_layers": 3, "qkv_bias": True}
SCALED = replace(EXPERTS, top_k=1, score="sigmoid", normalise=False, scale_input=True, n_shared=1, dense_layers=(1,))
LLAMA4 |= {"moe": SCALED}
TWO_SCALED = LLAMA4 | {"moe": replace(SCALED, top_k=2, capacity_factor=1.0)}
COHERE = {"norm": "layernorm", "norm_bias": False, "parallel_branches": True, "nope_interval": 2, "dropout": 0.1}
COHERE |= {"window": 5, "global_interval": 2, "logit_divisor": 4.0, "tied_embedding": True, "qkv_bias": True}
HEAD_NORMS = COHERE | {"qk_norm": True, "qk_norm_heads": True, "n_kv_heads": 2, "dropout": 0.0}
CASES = {
    "norms of heads, tp with replicated kv heads": (HEAD_NORMS, Layout(tp=4, sequence_parallel=True)),
    "norms of heads, tp, ZeRO 3, selective": (
        HEAD_NORMS,
        Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3, recompute="selective"),
    ),
    "norms of heads, pp, zigzag": (HEAD_NORMS, Layout(cp=2, cp_method="zigzag", pp=2, pp_schedule="zb-h1")),
    "chunks, scaled experts, tp, ep": (LLAMA4, Layout(tp=2, sequence_parallel=True, ep=2)),
    "chunks, scaled experts, tp 4, selective": (LLAMA4, Layout(tp=4, sequence_parallel=True, recompute="selective")),
    "chunks, scaled experts, ring, tp": (LLAMA4, Layout(tp=2, sequence_parallel=True, cp=2, cp_method="ring")),
    "chunks, scaled experts, zigzag, ep, full": (LLAMA4, Layout(cp=2, cp_method="zigzag", ep=2, recompute="full")),
    "chunks, scaled experts, allgather, pp": (LLAMA4, Layout(cp=2, cp_method="allgather", pp=2)),
    "chunks, scaled experts, ulysses, ZeRO 3": (LLAMA4, Layout(cp=2, cp_method="ulysses", dp_shard=2, zero=3)),
    "chunks, scaled experts, usp": (LLAMA4, Layout(cp=4, cp_method="usp", ulysses_degree=2)),
    "chunks, two scaled experts, pp, split": (TWO_SCALED, Layout(pp=2, pp_schedule="zb-h1")),
    "chunks, two scaled experts, ZeRO 2, ep": (TWO_SCALED, Layout(dp_shard=4, zero=2, ep=2)),
    "linear attention, tp": (LINEAR, Layout(tp=2, sequence_parallel=False)),
    "linear attention, tp with token shards, selective": (
        WIDE_NET | {"attention_gate": True},
        Layout(tp=4, sequence_parallel=True, recompute="selective", recompute_modules=("attention", "norms", "rope")),
    ),
    "linear attention, pp, ZeRO 1, full": (LINEAR, Layout(pp=2, dp_shard=2, zero=1, recompute="full")),
    "linear attention, pp with a split backward pass": (LINEAR, Layout(pp=2, pp_schedule="zb-h1")),
    "linear attention, ZeRO 2": (LINEAR, Layout(dp_shard=2, zero=2)),
    "linear attention, tp, ZeRO 3": (WIDE_NET, Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3)),
    "linear attention, ring, tp": (LINEAR, Layout(cp=2, cp_method="ring", tp=2, sequence_parallel=False)),
    "linear attention, zigzag, tp with token shards, ZeRO 1, full, documents": (
        LINEAR,
        Layout(cp=2, tp=2, sequence_parallel=True, zero=1, recompute="full"),
    ),
    "linear attention, allgather, pp, selective": (
        LINEAR,
        Layout(cp=2, cp_method="allgather", pp=2, recompute="selective", recompute_modules=("attention", "norms")),
    ),
    "linear attention, ulysses, ZeRO 3, split backward pass": (
        LINEAR,
        Layout(cp=2, cp_method="ulysses", zero=3, pp=2, pp_schedule="zb-h1"),
    ),
    "linear attention and experts, usp, ep": (
        LINEAR_EXPERTS,
        Layout(cp=4, cp_method="usp", ulysses_degree=2, ep=2, zero=1),
    ),
    "linear attention and experts, tp, ep": (LINEAR_EXPERTS, Layout(tp=2, sequence_parallel=True, ep=2)),
    "parallel branches, tp": (COHERE, Layout(tp=2, sequence_parallel=False)),
    "parallel branches, tp with token shards, selective": (
        COHERE,
        Layout(tp=4, sequence_parallel=True, recompute="selective"),
    ),
    "parallel branches, tp with token shards, ring, full": (
        COHERE,
        Layout(tp=2, sequence_parallel=True, cp=2, cp_method="ring", recompute="full"),
    ),
    "parallel branches, ulysses": (COHERE, Layout(cp=2, cp_method="ulysses")),
    "parallel branches, allgather, ZeRO 2": (COHERE, Layout(cp=2, cp_method="allgather", dp_shard=2, zero=2)),
    "parallel branches, tp with token shards, ZeRO 3": (
        COHERE,
        Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3),
    ),
    "parallel branches, pp, split backward pass": (COHERE, Layout(pp=2, pp_schedule="zb-h1")),
    "tp": (SWITCHES, Layout(tp=2, sequence_parallel=False)),
    "tp with token shards, selective": (OFFSET, Layout(tp=2, sequence_parallel=True, recompute="selective")),
    "tp with replicas of kv heads, full": (OFFSET, Layout(tp=4, sequence_parallel=True, recompute="full")),
    "cp": (OFFSET, Layout(cp=2)),
    "pp, ZeRO 1": (OFFSET, Layout(pp=2, dp_shard=2, zero=1)),
    "ZeRO 2": (SWITCHES, Layout(dp_shard=2, zero=2)),
    "tp, ZeRO 3": (SWITCHES, Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3)),
    "pp with a split backward pass": (SWITCHES, Layout(pp=2, pp_schedule="zb-h1")),
    "ep": (MIXTURE, Layout(dp_shard=2, zero=2, ep=2)),
    "tp, ep": (MIXTURE, Layout(tp=2, sequence_parallel=True, ep=2)),
    "windows, sinks, tp": (WINDOWS, Layout(tp=2, sequence_parallel=False)),
    "windows, sinks, tp with token shards, selective": (
        WINDOWS,
        Layout(tp=4, sequence_parallel=True, recompute="selective"),
    ),
    "windows, sinks, ring": (WINDOWS, Layout(cp=2, cp_method="ring")),
    "windows, sinks, zigzag, full": (WINDOWS, Layout(cp=2, cp_method="zigzag", recompute="full")),
    "windows, sinks, allgather, tp": (WINDOWS, Layout(cp=2, cp_method="allgather", tp=2)),
    "windows, sinks, ulysses, ZeRO 3": (WINDOWS, Layout(cp=2, cp_method="ulysses", dp_shard=2, zero=3)),
    "windows, sinks, usp": (WINDOWS, Layout(cp=4, cp_method="usp", ulysses_degree=2)),
    "windows, sinks, pp, split": (WINDOWS, Layout(pp=2, pp_schedule="zb-h1")),
    "soft caps, tp, chunked loss": (CAPS, Layout(tp=2, sequence_parallel=True, loss_chunk_tokens=8)),
    "soft caps, cp, pp": (CAPS, Layout(cp=2, pp=2)),
    "soft caps, zero 2": (CAPS, Layout(dp_shard=2, zero=2, recompute="selective")),
    "qkv biases, layers without rotation and partial rotation, tp, kv replicas": (
        PLACES,
        Layout(tp=4, sequence_parallel=True),
    ),
    "qkv biases, layers without rotation and partial rotation, pp, cp": (
        PLACES,
        Layout(pp=2, cp=2, recompute="selective"),
    ),
    "longrope beyond the first length, cp": (LONGROPE, Layout(cp=2)),
    "LayerNorm and biases, tp with replicas of kv heads": (STARCODER, Layout(tp=4, sequence_parallel=True)),
    "gated shared experts, dense layers, tp, ep": (DENSE, Layout(tp=2, sequence_parallel=True, ep=2)),
    "gated shared experts, dense layers, tp, selective": (
        DENSE,
        Layout(tp=4, sequence_parallel=True, recompute="selective"),
    ),
    "gated shared experts, dense layers, pp, ZeRO 1, full": (DENSE, Layout(pp=2, dp_shard=2, zero=1, recompute="full")),
    "gated shared experts in every second layer, cp, ep": (EVERY_SECOND, Layout(cp=2, ep=2)),
    "gated shared experts in every second layer, ZeRO 3, ep": (EVERY_SECOND, Layout(dp_shard=4, zero=3, ep=2)),
    "gated shared experts in every second layer, split backward pass": (
        EVERY_SECOND,
        Layout(pp=2, pp_schedule="zb-h1"),
    ),
    "groups of softmax scores and latent attention, tp, ep": (DEEPSEEK_V2, Layout(tp=2, sequence_parallel=True, ep=2)),
    "biases of experts, clamped, tp, ep": (BIASED, Layout(tp=2, sequence_parallel=True, ep=2, recompute="none")),
    "biases of experts with a capacity, clamped, ZeRO 3, ep, selective": (
        BIASED_BOTH,
        Layout(dp_shard=4, zero=3, ep=2, recompute="selective"),
    ),
    "biases of experts, clamped, pp, cp, ep, full": (BIASED_BOTH, Layout(pp=2, cp=2, ep=2, recompute="full")),
    "biases of experts, clamped, split backward pass": (BIASED, Layout(pp=2, pp_schedule="zb-h1")),
    "LayerNorm without bias, tp": (WITHOUT_BIAS, Layout(tp=2, sequence_parallel=True)),
}


@pytest.mark.parametrize("name", rest_prove(CASES, "tp with token shards, selective"))
def test_a_layout_trains_a_model_with_every_switch_as_one_process(name: str, verifier: Verifier):
    switches, layout = CASES[name]
    case = replace(LONG, spec=replace(LONG.spec, **switches), micro_batch=LONG.global_batch // (2 * layout.data_ranks))
    if name.endswith("documents"):
        case = replace(case, attention="document", positions="document")
    assert not case.spec.problems()
    (report,) = verifier.parities([(case, layout)])
    assert not report.crash, report.crash
    assert report.equal, report.worst
