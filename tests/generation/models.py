"""Models, prompts and layouts that the tests of generation share, and the reference: the full forward pass without a
cache, computed again for every token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import LayoutEngine
from shardwright.generation.sampling import Sampling
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.apply import apply
from tests.mutation import Mutation, mutated
from tests.training.worlds import SPEC

SEED = 7
GROUPED = replace(SPEC, n_layers=4, n_heads=4, n_kv_heads=2, d_model=32, max_seq_len=48)
LEARNED = replace(
    GROUPED, n_kv_heads=4, positions="learned", norm="layernorm", activation="gelu_tanh", bias=True, tied_embedding=True
)
LATENT = replace(
    GROUPED, n_kv_heads=4, latent_attention=LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=6)
)
EXPERTS = replace(GROUPED, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.0))
LATENT_EXPERTS = replace(
    LATENT, moe=MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=1, first_dense=1, score="sigmoid", bias_rate=0.01)
)
WINDOWS = replace(
    GROUPED, window=5, global_interval=3, attention_sinks=True, window_rope_theta=200.0, logit_softcap=0.5
)
CAPS = replace(GROUPED, window=4, attention_softcap=0.2)
CHUNKS = replace(
    GROUPED, window=5, window_chunked=True, global_layers=(1,), nope_layers=(1,), temperature_scale=0.7,
    temperature_interval=3, qk_norm=True, qk_norm_weight=False, attention_sinks=True,
    moe=MoESpec(n_experts=4, top_k=1, d_ffn=16, score="sigmoid", normalise=False, scale_input=True, bias_rate=0.0),
)  # fmt: skip
LINEAR = replace(
    GROUPED, attention_gate=True,
    linear_attention=LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=6, v_dim=5, conv_width=3, full_interval=3),
)  # fmt: skip
SPECS: dict[str, ModelSpec] = {
    "linear": LINEAR,
    "windows": WINDOWS,
    "caps": CAPS,
    "chunks": CHUNKS,
    "grouped": GROUPED,
    "learned": LEARNED,
    "latent": LATENT,
    "experts": EXPERTS,
    "latent experts": LATENT_EXPERTS,
}
PROMPTS = {index: [(7 * index + 3 * i + i * i) % 31 for i in range(n)] for index, n in enumerate((5, 1, 9, 12, 3))}
N_TOKENS = 11
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def whole_model(spec: ModelSpec, dtype: torch.dtype = torch.float64, seed: int = SEED) -> Transformer:
    model = Transformer(spec).to(dtype).eval()
    initialise(model, spec, seed)
    return model


@torch.no_grad()
def without_cache(
    model: Transformer, prompts: Mapping[int, Sequence[int]], sampling: Sampling, n_tokens: int = N_TOKENS
) -> dict[int, list[int]]:
    """Each prompt alone; the whole sequence through the model for every token."""
    found = {}
    for index, prompt in prompts.items():
        tokens = list(prompt)
        for _ in range(n_tokens):
            logits_V = model(torch.tensor([tokens]))[0, -1]
            tokens.append(int(sampling.choose(logits_V[None], [index], [len(tokens)])))
        found[index] = tokens[len(prompt) :]
    return found


def on_layout(
    layout: Layout,
    spec: ModelSpec,
    samplings: Sequence[Sampling] = (GREEDY,),
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    n_slots: int = 3,
    mutations: tuple[Mutation, ...] = (),
) -> list[dict[int, list[int]]]:
    """What one rank of a layout gives for its part of the prompts, for each type and sampling."""
    device = torch.device("cpu")
    found = []
    with mutated(*mutations):
        for dtype in dtypes:
            model = apply(spec, layout, device, seed=SEED, param_dtype=dtype, compute_dtype=dtype)
            engine = LayoutEngine(model, device, n_slots, spec.max_seq_len)
            mine = layout.data_rank(dist.get_rank())
            prompts = {index: ids for index, ids in PROMPTS.items() if index % layout.data_ranks == mine}
            found += [Batcher(engine, each, spec.max_seq_len).complete(prompts, N_TOKENS) for each in samplings]
    return found


def merged(of_ranks: Sequence[dict[int, list[int]]]) -> dict[int, list[int]]:
    """The continuations of all ranks; those of ranks that run the same prompts are equal."""
    found: dict[int, list[int]] = {}
    for of_rank in of_ranks:
        for index, tokens in of_rank.items():
            assert found.setdefault(index, tokens) == tokens, index
    return dict(sorted(found.items()))
