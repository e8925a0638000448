"""Proves that the decoder is the one others trained: logits and gradients equal those of `transformers`'
Llama, Qwen3 and GPT-2 with the same weights; and that it works as the parallel code needs it: built on meta,
in bf16, compiled block by block, with positions in any order."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardwright.model import random
from shardwright.model.init import initialise
from shardwright.model.presets import PRESETS
from shardwright.model.rotary import frequencies, rotary_table, rotate
from shardwright.model.sections import RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import InputError

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

# A large epsilon and a small base of the frequencies, so that an error in either shows in the logits.
LLAMA = replace(PRESETS["debug"], n_layers=2, vocab_size=96, d_ffn=80, norm_eps=0.05, rope_theta=200.0, max_seq_len=64)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=48)
GPT = replace(
    LLAMA,
    n_kv_heads=4,
    d_ffn=256,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    bias=True,
    tied_embedding=True,
)


def random_model(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Transformer:
    """Weights large enough that every part matters for the logits, norms and biases included."""
    torch.manual_seed(0)
    model = Transformer(spec).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=1.5 / p.shape[-1] ** 0.5 if p.dim() == 2 and "embedding" not in name else 0.5)
            if name.endswith("norm.weight"):
                p.add_(1.0)
    return model


def random_tokens(spec: ModelSpec, batch: int = 2, n_tokens: int = 48) -> Tensor:
    return torch.randint(spec.vocab_size, (batch, n_tokens), generator=torch.Generator().manual_seed(1))


def test_a_token_sees_itself_and_those_before_it_only() -> None:
    model, tokens_BT = random_model(LLAMA), random_tokens(LLAMA)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 20] += 1
    changed_BT %= LLAMA.vocab_size
    before_BTV, after_BTV = model(tokens_BT), model(changed_BT)
    assert before_BTV.shape == (2, 48, LLAMA.vocab_size)
    assert torch.equal(before_BTV[:, :20], after_BTV[:, :20])
    assert not torch.isclose(before_BTV[:, 20:], after_BTV[:, 20:]).all(-1).any()


def hf_llama(spec: ModelSpec, qwen: bool = False) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if (scaling := spec.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    config = (transformers.Qwen3Config if qwen else transformers.LlamaConfig)(
        vocab_size=spec.vocab_size,
        hidden_size=spec.d_model,
        intermediate_size=spec.d_ffn,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_seq_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=spec.tied_embedding,
        attention_bias=spec.bias,
        pad_token_id=None,
    )
    return (transformers.Qwen3ForCausalLM if qwen else transformers.LlamaForCausalLM)(config).double().eval()


def llama_name(name: str) -> str:
    """The name of one of our parameters in Hugging Face's Llama and Qwen3."""
    names = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention": "self_attn",
        "ffn": "mlp",
        "embedding": "embed_tokens",
    }
    names |= {each: f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")}
    if name.startswith("head."):
        return f"lm_{name}"
    return ".".join(["model"] + [names.get(word, word) for word in name.split(".")])


def losses_and_gradients(model: Transformer, hf: nn.Module) -> tuple[Tensor, Tensor]:
    """Logits of both after a backward pass of the same loss in both."""
    tokens_BT = random_tokens(model.spec)
    targets_BT = tokens_BT.roll(-1, 1)
    ours_BTV, theirs_BTV = model(tokens_BT), hf(tokens_BT).logits
    for logits_BTV in (ours_BTV, theirs_BTV):
        F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()).backward()
    return ours_BTV, theirs_BTV


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(
    ("spec", "qwen"),
    [
        (LLAMA, False),
        (replace(LLAMA, rope_scaling=SCALING), False),
        (replace(LLAMA, tied_embedding=True, n_kv_heads=1), False),
        (replace(LLAMA, n_kv_heads=4, head_dim=24), False),
        (replace(LLAMA, qk_norm=True, head_dim=32), True),
        (replace(LLAMA, qk_norm=True, tied_embedding=True), True),
    ],
    ids=["llama", "llama-3 scaling", "tied, one kv head", "wide heads", "qwen3", "qwen3 tied"],
)
def test_logits_and_gradients_are_those_of_transformers(spec: ModelSpec, qwen: bool) -> None:
    model, hf = random_model(spec), hf_llama(spec, qwen)
    with torch.no_grad():
        theirs = dict(hf.named_parameters())
        for name, p in model.named_parameters():
            theirs.pop(llama_name(name)).copy_(p)
    assert not theirs
    ours_BTV, theirs_BTV = losses_and_gradients(model, hf)
    # Theirs computes norms and angles in float32 whatever the weights are, ours does not: float32 rounding,
    # 6e-8, through some dozens of operations.
    assert relative_error(ours_BTV, theirs_BTV) < 1e-5
    for name, p in model.named_parameters():
        assert relative_error(p.grad, hf.get_parameter(llama_name(name)).grad) < 3e-5, name


def test_logits_and_gradients_are_those_of_gpt2() -> None:
    model = random_model(GPT)
    config = transformers.GPT2Config(
        vocab_size=GPT.vocab_size,
        n_positions=GPT.max_seq_len,
        n_embd=GPT.d_model,
        n_layer=GPT.n_layers,
        n_head=GPT.n_heads,
        layer_norm_epsilon=GPT.norm_eps,
    )
    hf = transformers.GPT2LMHeadModel(config).double().eval()
    body = hf.transformer

    def pairs(of: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(ours, theirs) for the values or gradients of every parameter; their linears are transposed."""
        found = [(of(model.embedding.weight), of(body.wte.weight))]
        found += [(of(model.get_parameter("position_embedding.weight")), of(body.wpe.weight))]
        norms = [(model.norm, body.ln_f)]
        for ours, theirs in zip(model.layers.values(), body.h, strict=True):
            attention, ffn = ours.attention, ours.ffn
            norms += [(ours.attention_norm, theirs.ln_1), (ours.ffn_norm, theirs.ln_2)]
            thirds = of(theirs.attn.c_attn.weight).chunk(3, 1), of(theirs.attn.c_attn.bias).chunk(3)
            for linear, weight, bias in zip((attention.q, attention.k, attention.v), *thirds, strict=True):
                found += [(of(linear.weight), weight.T), (of(linear.bias), bias)]
            for linear, conv in (
                (attention.o, theirs.attn.c_proj),
                (ffn.up, theirs.mlp.c_fc),
                (ffn.down, theirs.mlp.c_proj),
            ):
                found += [(of(linear.weight), of(conv.weight).T), (of(linear.bias), of(conv.bias))]
        for norm, theirs in norms:
            found += [(of(norm.weight), of(theirs.weight)), (of(norm.bias), of(theirs.bias))]
        return found

    for ours, theirs in pairs(lambda p: p.data):
        theirs.copy_(ours)
    ours_BTV, theirs_BTV = losses_and_gradients(model, hf)
    # The same operations in float64 up to their order, over sums of a few hundred terms.
    assert relative_error(ours_BTV, theirs_BTV) < 1e-12
    gradients = pairs(lambda p: p.grad)  # type: ignore[arg-type,return-value]
    assert len(gradients) == len(list(model.parameters()))
    largest = max(theirs.abs().max() for _, theirs in gradients)
    for ours, theirs in gradients:  # the gradient of a key's bias is zero but for rounding
        assert (ours - theirs).abs().max() / largest < 1e-12


def test_parameter_names_are_global() -> None:
    names = [name for name, _ in Transformer(replace(LLAMA, n_layers=1, qk_norm=True)).named_parameters()]
    layer = [
        "attention_norm",
        *(f"attention.{x}" for x in ("q", "k", "v", "o", "q_norm", "k_norm")),
        "ffn_norm",
    ]
    layer += ["ffn.gate", "ffn.up", "ffn.down"]
    modules = ["embedding", *(f"layers.0.{each}" for each in layer), "norm", "head"]
    assert names == [f"{each}.weight" for each in modules]
    tied = [name for name, _ in Transformer(GPT).named_parameters()]
    assert not [name for name in tied if name.startswith("head") or ".gate." in name]
    assert "position_embedding.weight" in tied
    assert "layers.1.attention.k.bias" in tied


def test_scaled_frequencies_slow_the_slow_pairs_and_keep_the_fast_ones() -> None:
    plain, scaled = frequencies(LLAMA), frequencies(replace(LLAMA, rope_scaling=SCALING))
    turns = plain * SCALING.original_max_seq_len / (2 * torch.pi)
    ratio = scaled / plain
    assert torch.equal(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    assert torch.allclose(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between)
    assert ((between > 1 / 8) & (between < 1)).all()


def test_rotated_products_depend_on_the_distance_only() -> None:
    q_BTHC, k_BTHC = torch.randn(2, 1, 1, 1, LLAMA.head_dim, dtype=torch.float64)

    def product(q_position: int, k_position: int) -> Tensor:
        tables = [rotary_table(LLAMA, torch.tensor([at]), torch.float64) for at in (q_position, k_position)]
        return (rotate(q_BTHC, tables[0]) * rotate(k_BTHC, tables[1])).sum()

    assert product(5, 2).item() == pytest.approx(product(100_003, 100_000).item(), rel=1e-9)
    assert product(5, 2).item() != pytest.approx(product(6, 2).item(), rel=1e-3)


def test_angles_are_exact_far_from_the_start_in_every_dtype() -> None:
    spec, positions_T = PRESETS["llama-3.1-8b"], torch.tensor([0, 131_071])
    exact = rotary_table(spec, positions_T, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(rotary_table(spec, positions_T, dtype), exact.to(dtype))


@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=["rope", "learned"])
def test_given_positions_stand_for_the_places_in_the_sequence(spec: ModelSpec) -> None:
    model, tokens_BT = random_model(spec), random_tokens(spec, n_tokens=16)
    assert torch.equal(model(tokens_BT), model(tokens_BT, torch.arange(16)))
    block, places_T = model.layers["0"], torch.randperm(16)
    x_BTD = torch.randn(2, 16, spec.d_model, dtype=torch.float64)
    rotary = rotary_table(spec, places_T, torch.float64)
    assert torch.equal(rotary, rotary_table(spec, torch.arange(16), torch.float64)[:, places_T])
    assert block(x_BTD, places_T, rotary).shape == x_BTD.shape
    spread = model(tokens_BT, torch.arange(0, 32, 2))
    assert relative_error(spread, model(tokens_BT)) > 1e-2


@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_model_built_on_meta_is_whole_after_to_empty(spec: ModelSpec) -> None:
    with torch.device("meta"):
        late = Transformer(spec)
    late.to_empty(device="cpu")
    early = Transformer(spec)
    for model in (late, early):
        initialise(model, spec, seed=3)
    tokens_BT = random_tokens(spec)
    assert torch.equal(late(tokens_BT), early(tokens_BT))
    assert not list(late.buffers())


@pytest.mark.parametrize("spec", [replace(LLAMA, qk_norm=True), GPT], ids=["llama", "gpt"])
def test_bf16_parameters_give_the_logits_to_bf16_rounding(spec: ModelSpec) -> None:
    low = random_model(spec, torch.bfloat16)
    exact = Transformer(spec).double()
    exact.load_state_dict(low.state_dict())
    tokens_BT = random_tokens(spec)
    logits_BTV = low(tokens_BT)
    assert logits_BTV.dtype == torch.bfloat16
    # 8 bits of mantissa, some 20 roundings one after the other in two layers of a random network.
    error = (logits_BTV.double() - exact(tokens_BT)).norm() / exact(tokens_BT).norm()
    assert error < 20 * 2**-8


@pytest.mark.prove
def test_every_block_compiles_once_without_graph_breaks() -> None:
    torch._dynamo.reset()
    spec = replace(LLAMA, n_layers=10, dropout=0.1)  # more layers than the compiler allows recompilations
    model, tokens_BT = random_model(spec, torch.float64), random_tokens(spec)
    keys_B = random.sample_keys(0, 0, torch.arange(2))
    expected_BTV = model(tokens_BT, None, keys_B)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    assert torch.allclose(model(tokens_BT, None, keys_B), expected_BTV, rtol=1e-10, atol=1e-10)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_sequence_beyond_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="65 tokens is longer than max_seq_len=64"):
        Transformer(GPT)(torch.zeros(1, 65, dtype=torch.long))
