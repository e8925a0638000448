"""Proves that mixtures of experts and latent attention are those others trained: logits and gradients equal those of
`transformers`' Mixtral, Qwen3-MoE and DeepSeek-V3 with the same weights, and the sizes are the published ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.hugging_face import gpt_oss, llama
from shardwright.hugging_face.architecture import ARCHITECTURES
from shardwright.hugging_face.table import file_tensors
from shardwright.hugging_face.writer import tensor_of_file
from shardwright.model.modules import mixture
from shardwright.model.moe import MoE, expert_layers
from shardwright.model.presets import PRESETS, resolve
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from tests.model.test_transformer import (
    LLAMA,
    llama_name,
    losses_and_gradients,
    random_model,
    random_tokens,
    relative_error,
)

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

MIXTRAL = replace(LLAMA, moe=MoESpec(n_experts=6, top_k=2, d_ffn=24, bias_rate=0.0))
QWEN3 = replace(LLAMA, qk_norm=True, moe=MoESpec(n_experts=8, top_k=3, d_ffn=20, bias_rate=0.0))
DEEPSEEK = replace(
    LLAMA,
    n_layers=3,
    n_kv_heads=LLAMA.n_heads,
    latent_attention=LatentAttentionSpec(q_rank=24, kv_rank=20, nope_dim=12, rope_dim=8, v_dim=LLAMA.head_dim),
    moe=MoESpec(
        n_experts=16,
        top_k=3,
        d_ffn=12,
        n_shared=2,
        first_dense=1,
        score="sigmoid",
        weight_scale=2.5,
        n_groups=4,
        groups_per_token=2,
    ),
)


def moe_of(spec: ModelSpec) -> MoESpec:
    assert spec.moe is not None
    return spec.moe


def common(spec: ModelSpec) -> dict:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "num_experts_per_tok": moe_of(spec).top_k,
        "pad_token_id": None,
        "experts_implementation": "eager",
        "attn_implementation": "eager",
    }


def hf_mixtral(spec: ModelSpec) -> nn.Module:
    moe = moe_of(spec)
    config = transformers.MixtralConfig(
        intermediate_size=moe.d_ffn, num_local_experts=moe.n_experts, head_dim=spec.head_dim, **common(spec)
    )
    return transformers.MixtralForCausalLM(config)


def hf_qwen3(spec: ModelSpec) -> nn.Module:
    moe = moe_of(spec)
    config = transformers.Qwen3MoeConfig(
        intermediate_size=spec.d_ffn,
        moe_intermediate_size=moe.d_ffn,
        num_experts=moe.n_experts,
        norm_topk_prob=moe.normalise,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        head_dim=spec.head_dim,
        **common(spec),
    )
    return transformers.Qwen3MoeForCausalLM(config)


def hf_deepseek(spec: ModelSpec, interleave: bool = False) -> nn.Module:
    moe, latent = moe_of(spec), spec.latent_attention
    assert latent is not None
    config = transformers.DeepseekV3Config(
        intermediate_size=spec.d_ffn,
        moe_intermediate_size=moe.d_ffn,
        n_routed_experts=moe.n_experts,
        n_shared_experts=moe.n_shared,
        routed_scaling_factor=moe.weight_scale,
        n_group=moe.n_groups,
        topk_group=moe.groups_per_token,
        first_k_dense_replace=moe.first_dense,
        norm_topk_prob=moe.normalise,
        q_lora_rank=latent.q_rank or None,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.v_dim,
        rope_interleave=interleave,
        num_mtp_layers=0,
        **common(spec),
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):  # these two ignore the configuration
            module.variance_epsilon = spec.norm_eps
    return model


def test_the_mixture_of_gpt_oss_is_that_of_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    spec = replace(MIXTRAL, activation="swiglu_clamped", moe=replace(moe_of(MIXTRAL), bias=True))
    moe = moe_of(spec)
    config = transformers.GptOssConfig(
        hidden_size=spec.d_model, intermediate_size=moe.d_ffn, num_local_experts=moe.n_experts,
        num_experts_per_tok=moe.top_k, experts_implementation="eager",
    )  # fmt: skip
    theirs, ours = GptOssMLP(config).double(), MoE(spec).double()
    table = replace(ARCHITECTURES["mixtral"], layer=llama.ATTENTION | gpt_oss.EXPERTS)
    stored = {name: p.detach().normal_() for name, p in theirs.named_parameters()}

    def read(name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        whole: Tensor = ours.get_parameter(name.removeprefix("layers.0.ffn."))
        return whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]

    tensors = [each for each in file_tensors(table, spec) if each.name.startswith("model.layers.0.mlp.")]
    assert {each.name.removeprefix("model.layers.0.mlp."): each.shape for each in tensors} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    for row in mixture(spec):
        torch.nn.init.normal_(ours.get_parameter(row.name.removeprefix("ffn.")))
    with torch.no_grad():
        for each in tensors:
            stored[each.name.removeprefix("model.layers.0.mlp.")].copy_(tensor_of_file(each, read, torch.float64))
    x_BTD = 3 * torch.randn(2, 9, spec.d_model, dtype=torch.float64)  # some inner values are beyond the limit of 7
    assert relative_error(ours(x_BTD), theirs(x_BTD)[0]) < 1e-13


def hf_name(spec: ModelSpec, name: str) -> str:
    """The name of one of our parameters in Hugging Face's mixtures; gate and up share one there."""
    latent = {"q_down": "q_a", "q_up": "q_b", "kv_down": "kv_a", "kv_up": "kv_b"}
    norms = {"q_latent_norm": "q_a_layernorm", "kv_latent_norm": "kv_a_layernorm"}
    if spec.latent_attention is not None and not spec.latent_attention.q_rank:
        latent["q_up"] = "q"
    name = llama_name(name.replace("ffn.router.bias", "ffn.gate.e_score_correction_bias"))
    name = name.replace("gate_proj.e_score", "gate.e_score").replace("router", "gate")
    for ours, theirs in latent.items():
        name = name.replace(f".{ours}.", f".{theirs}_proj{'_with_mqa' if theirs == 'kv_a' else ''}.")
    for ours, theirs in norms.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name.replace(".shared.", ".shared_experts.")


def pairs(ours: Transformer, theirs: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(ours, theirs) of the values or gradients of every parameter, as views where theirs are values."""
    held = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    found, seen = {}, set()
    for name, p in ours.named_parameters():
        if p.grad is None and of(p) is None:
            continue
        base, _, matrix = name.rpartition(".")
        if base.endswith("experts"):
            stacked = hf_name(ours.spec, base) + (".down_proj" if matrix == "down" else ".gate_up_proj")
            halves = of(held[stacked]).chunk(2, 1) if matrix != "down" else [of(held[stacked])] * 2
            found[name] = (of(p), halves[matrix == "up"])
            seen.add(stacked)
        else:
            found[name] = (of(p), of(held[hf_name(ours.spec, name)]))
            seen.add(hf_name(ours.spec, name))
    assert {name for name, _ in theirs.named_parameters()} <= seen
    return found


def interleaved(spec: ModelSpec, name: str, values: Tensor) -> Tensor:
    """Rows that make rotated elements in DeepSeek's order, from ours."""
    latent = spec.latent_attention
    assert latent is not None
    heads = {"q_up": spec.n_heads, "kv_down": 1}.get(name.split(".")[-2])
    if heads is None:
        return values
    rows = values.unflatten(0, (heads, -1))
    plain, rotated = rows[:, : -latent.rope_dim], rows[:, -latent.rope_dim :]
    return torch.cat((plain, rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)), 1).flatten(0, 1)


def check(spec: ModelSpec, hf: nn.Module, order: Callable[[str, Tensor], Tensor] = lambda _, x: x) -> float:
    model, hf = random_model(spec), hf.double().eval()
    with torch.no_grad():
        for layer in expert_layers(model).values():
            layer.router.weight.mul_(2)  # scores well apart
            if layer.router.bias is not None:
                layer.router.bias.mul_(0.2)
        for name, (ours, theirs) in pairs(model, hf, lambda p: p.data).items():
            theirs.copy_(order(name, ours))
    logits = losses_and_gradients(model, hf)
    # Theirs scores, norms and turns in float32 whatever the weights are, ours does not.
    error = relative_error(*logits)
    assert error < 1e-5
    compared = pairs(model, hf, lambda p: p.grad)  # type: ignore[arg-type,return-value]
    assert len(compared) == sum(p.requires_grad for p in model.parameters())
    for name, (ours, theirs) in compared.items():
        assert relative_error(order(name, ours), theirs) < 3e-5, name
    return error


@pytest.mark.parametrize(
    "spec", [MIXTRAL, replace(MIXTRAL, moe=replace(moe_of(MIXTRAL), n_experts=2))], ids=["mixtral", "all experts"]
)
def test_logits_and_gradients_are_those_of_mixtral(spec: ModelSpec) -> None:
    check(spec, hf_mixtral(spec))


@pytest.mark.parametrize("normalise", [True, False])
def test_logits_and_gradients_are_those_of_qwen3_moe(normalise: bool) -> None:
    spec = replace(QWEN3, moe=replace(moe_of(QWEN3), normalise=normalise))
    check(spec, hf_qwen3(spec))


@pytest.mark.parametrize("interleave", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("q_rank", [24, 0])
def test_logits_and_gradients_are_those_of_deepseek_v3(q_rank: int, interleave: bool) -> None:
    assert DEEPSEEK.latent_attention is not None
    spec = replace(DEEPSEEK, latent_attention=replace(DEEPSEEK.latent_attention, q_rank=q_rank))
    hf = hf_deepseek(spec, interleave)
    check(spec, hf, (lambda name, x: interleaved(spec, name, x)) if interleave else (lambda _, x: x))


PUBLISHED = {
    "mixtral-8x7b": (46_702_792_704, 12.9e9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "qwen3-235b-a22b": (235_093_634_560, 22e9),
    "deepseek-v3": (671_026_419_200, 37e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones_and_active_parameters_round_to_them(name: str) -> None:
    total, active = PUBLISHED[name]
    spec = resolve(name)
    assert spec.n_parameters == total
    assert spec.n_active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", [name for name, spec in PRESETS.items() if spec.moe is not None])
def test_active_parameters_are_those_of_a_model_with_top_k_experts(name: str) -> None:
    spec = resolve(name)
    moe = moe_of(spec)
    few = replace(spec, moe=replace(moe, n_experts=moe.top_k, n_groups=1, groups_per_token=1))
    router_rows = spec.n_expert_layers * (moe.n_experts - moe.top_k) * (spec.d_model + (moe.bias_rate > 0) + moe.bias)
    assert spec.n_active_parameters == few.n_parameters + router_rows
    if name == "mixtral-8x7b":  # its report: 13B active of 47B
        assert spec.n_active_parameters == 12_879_925_248


@pytest.mark.parametrize("spec", [MIXTRAL, QWEN3, DEEPSEEK], ids=["mixtral", "qwen3", "deepseek"])
def test_bf16_parameters_give_the_logits_to_bf16_rounding(spec: ModelSpec) -> None:
    spec = replace(spec, moe=replace(moe_of(spec), d_ffn=24))
    low = random_model(spec, torch.bfloat16)
    exact = Transformer(spec).double()
    exact.load_state_dict(low.state_dict())
    tokens_BT = random_tokens(spec)
    logits_BTV, exact_BTV = low(tokens_BT).double(), exact(tokens_BT)
    assert logits_BTV.dtype == torch.float64
    # Where rounding makes a token go to another expert, its logits are others: most are not such.
    errors = (logits_BTV - exact_BTV).norm(dim=-1) / exact_BTV.norm(dim=-1)
    assert errors.median() < 20 * 2**-8
