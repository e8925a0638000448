"""GLM-4: Llama with biases of queries, keys and values, with half of each head rotated, in interleaved pairs, and with
gate and up in one tensor. GLM-4-0414 (`glm4`) also norms the outputs of the branches."""

from shardwright.hugging_face import llama
from shardwright.hugging_face.architecture import Architecture, Config, Stored, Table, register

INTERLEAVED: Table = {
    "attention.q": Stored("self_attn.q_proj", interleaved=True),
    "attention.k": Stored("self_attn.k_proj", interleaved=True),
}
LAYER: Table = (
    llama.ATTENTION | INTERLEAVED | {"ffn_norm": "post_attention_layernorm"}
    | {("ffn.gate", "ffn.up"): "mlp.gate_up_proj", "ffn.down": "mlp.down_proj"}
)  # fmt: skip
NORMS_AFTER: Table = {"attention_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}


def complete(config: Config) -> Config:
    """Return config.json with the defaults of GlmConfig and Glm4Config, which are the same."""
    heads = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
    return llama.complete(heads | config, norm_eps=1.5625e-7)


GLM = register(
    Architecture(
        model_type="glm",
        class_name="GlmForCausalLM",
        sizes=llama.SIZES | {"qkv_bias": "attention_bias"},
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu"},
        complete=complete,
        ends=llama.ENDS,
        layer=LAYER,
        rope_fraction=0.5,
        ignored=llama.IGNORED,
    )
)
GLM4 = register(
    Architecture(
        model_type="glm4",
        class_name="Glm4ForCausalLM",
        sizes=GLM.sizes,
        choices=llama.CHOICES | {"norm_position": "both"},
        fixed=GLM.fixed,
        complete=complete,
        ends=llama.ENDS,
        layer=LAYER | NORMS_AFTER,
        rope_fraction=0.5,
        ignored=llama.IGNORED,
    )
)
