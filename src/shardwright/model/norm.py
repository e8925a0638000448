"""The norm of the residual stream."""

from torch import nn

from shardwright.model.spec import ModelSpec


def residual_norm(spec: ModelSpec) -> nn.Module:
    """The norm of the spec; both kinds compute in float32 for 16-bit input."""
    if spec.norm == "layernorm":
        return nn.LayerNorm(spec.d_model, eps=spec.norm_eps)
    return nn.RMSNorm(spec.d_model, eps=spec.norm_eps)
