"""GPT-2: learned positions, LayerNorm, biases, query, key and value in one matmul, and linears stored transposed."""

from shardwright.hugging_face.architecture import Architecture, Config, Stored, register


def complete(config: Config) -> Config:
    """Return config.json with GPT2Config's defaults for missing keys."""
    width, heads = config.get("n_embd", 768), config.get("n_head", 12)
    return {
        "n_inner": 4 * width,
        "_head_dim": width // heads,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        **config,
    }


GPT2 = register(
    Architecture(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        sizes={
            "n_layers": "n_layer",
            "d_model": "n_embd",
            "n_heads": "n_head",
            "n_kv_heads": "n_head",
            "head_dim": "_head_dim",
            "d_ffn": "n_inner",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "tied_embedding": "tie_word_embeddings",
            "init_std": "initializer_range",
        },
        choices={"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "bias": True},
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        complete=complete,
        default_token_id=50256,
        ends={"embedding": "wte", "position_embedding": "wpe", "norm": "ln_f", "head": "lm_head"},
        layer={
            "attention_norm": "ln_1",
            ("attention.q", "attention.k", "attention.v"): Stored("attn.c_attn", transposed=True),
            "attention.o": Stored("attn.c_proj", transposed=True),
            "ffn_norm": "ln_2",
            "ffn.up": Stored("mlp.c_fc", transposed=True),
            "ffn.down": Stored("mlp.c_proj", transposed=True),
        },
        layers="h.{layer}.",
        prefix="transformer.",
        ignored={r".*\.attn\.(masked_)?bias": "the causal mask is not a weight"},
    )
)
