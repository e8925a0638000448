"""Llama 3, SmolLM2 and other `LlamaForCausalLM`s."""

from shardwright.hugging_face.architecture import Architecture, Config, Table, register

SIZES = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_embedding": "tie_word_embeddings",
    "init_std": "initializer_range",
}
CHOICES = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope"}
ENDS: Table = {"embedding": "embed_tokens", "norm": "norm", "head": "lm_head"}
ATTENTION: Table = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
}
NETWORK: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
IGNORED = {
    r".*\.rotary_emb\.inv_freq": "the rotary frequencies are computed from the sizes",
}


def complete(config: Config, *, tied: bool = False, norm_eps: float = 1e-6) -> Config:
    """Return config.json with LlamaConfig's defaults for missing keys."""
    heads, width = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
    return {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        **config,
    }


LLAMA = register(
    Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        sizes=SIZES | {"bias": ("attention_bias", "mlp_bias")},
        choices=CHOICES,
        fixed={"hidden_act": "silu"},
        complete=lambda config: complete({"attention_bias": False, "mlp_bias": False} | config),
        ends=ENDS,
        layer=ATTENTION | NETWORK,
        ignored=IGNORED,
    )
)
