"""The mixture of gpt-oss: biases of experts and router, and matrices of all experts transposed in two tensors, in which
rows of gate and up alternate."""

from shardwright.hugging_face.architecture import Stored, Table

EXPERTS: Table = {
    "ffn_norm": "post_attention_layernorm",
    "ffn.router.weight": "mlp.router.weight",
    "ffn.router.logit_bias": "mlp.router.bias",
    ("ffn.experts.gate", "ffn.experts.up"): Stored("mlp.experts.gate_up_proj", transposed=True, alternating=True),
    ("ffn.experts.gate_bias", "ffn.experts.up_bias"): Stored("mlp.experts.gate_up_proj_bias", alternating=True),
    "ffn.experts.down": Stored("mlp.experts.down_proj", transposed=True),
    "ffn.experts.down_bias": Stored("mlp.experts.down_proj_bias"),
}
CHOICES = {
    "activation": "swiglu_clamped",
    "moe.bias": True,
    "moe.score": "softmax",
    "moe.normalise": True,
    "moe.bias_rate": 0.0,
}
