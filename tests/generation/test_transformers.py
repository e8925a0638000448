"""Proves that greedy generation gives the tokens of `transformers.generate`, and `score` its log-probabilities, for a
randomly initialised model of every family, read from the folder that transformers saved."""

from pathlib import Path

import pytest
import torch

from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import WholeEngine
from shardwright.generation.sampling import Sampling
from shardwright.generation.score import scored
from shardwright.generation.source import open_source
from tests.marks import rest_prove

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
EAGER = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # the other ones have no float64
EXPERTS = {**EAGER, "moe_intermediate_size": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 200.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3
    ),
    "cohere2": lambda: transformers.Cohere2Config(
        **SIZES, sliding_window=9, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES,
        **EAGER | {"num_experts_per_tok": 1},
        head_dim=16,
        attention_chunk_size=9,
        no_rope_layers=[1, 0, 1],
        moe_layers=[1, 2],
        num_local_experts=4,
        intermediate_size_mlp=56,
        attn_scale=0.4,
        floor_scale=7,
        pad_token_id=None,
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **SIZES, head_dim=16, sliding_window=9, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EAGER, num_local_experts=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, head_dim=16, norm_topk_prob=True, mlp_only_layers=[]
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **SIZES,
        **EXPERTS,
        num_experts=4,
        head_dim=16,
        full_attention_interval=3,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
}
PROMPTS = {index: [(5 * index + 11 * i + i * i) % 96 for i in range(n)] for index, n in enumerate((1, 7, 18))}
N_TOKENS = 24


@pytest.mark.parametrize("family", rest_prove(FAMILIES, "llama"))
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).double().eval()
    theirs.save_pretrained(tmp_path)
    expected = {}
    for index, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=None
        )
        expected[index] = out[0, len(prompt) :].tolist()
    source = open_source(tmp_path)
    assert source.dtype == torch.float64
    engine = WholeEngine(source.whole(torch.device("cpu")), 2, source.spec.max_seq_len)
    assert Batcher(engine, Sampling(), source.spec.max_seq_len).complete(PROMPTS, N_TOKENS) == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 10
    longest = max(len(PROMPTS[index]) + len(new) for index, new in expected.items())
    engine = WholeEngine(source.whole(torch.device("cpu")), 2, longest)
    scores = scored(engine, {index: (PROMPTS[index] + new, len(new)) for index, new in expected.items()})
    for index, new in expected.items():
        with torch.no_grad():
            logits_TV = theirs(torch.tensor([PROMPTS[index] + new[:-1]])).logits[0, -len(new) :]
        theirs_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]
        own_T = torch.tensor(scores[index].log_probs, dtype=torch.float64)
        # In transformers norms and angles are float32, and the delta rule, whose rounding adds up over the tokens.
        atol = 3e-5 if source.spec.linear_attention is None else 3e-4
        torch.testing.assert_close(own_T, theirs_T, rtol=0, atol=atol)
