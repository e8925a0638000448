"""A model as a checkpoint's manifest and an exported file have it, and what makes the weights of one model unusable in
another; no torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.mup import MupSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec


def spec_as_json(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a model as a JSON file gives them back, with lists for tuples."""
    return asdict(spec, dict_factory=lambda pairs: {k: [*v] if isinstance(v, tuple) else v for k, v in pairs})


def with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model in JSON with the defaults of fields that the version which saved them did not have;
    a new field's default changes nothing."""
    tables = {"rope_scaling": RopeScaling, "lora": LoraSpec, **TABLES}
    filled = _defaults(ModelSpec) | dict(saved)
    for name, table in tables.items():
        if filled[name] is not None:
            filled[name] = _defaults(table) | filled[name]
    return filled


TABLES: dict[str, Any] = {
    "moe": MoESpec,
    "latent_attention": LatentAttentionSpec,
    "linear_attention": LinearAttentionSpec,
    "mup": MupSpec,
}
"""The optional parts of a model with a table of their own."""


def _defaults(table: Any) -> dict[str, Any]:
    known = {field.name: field.default for field in fields(table) if field.default is not MISSING}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in known.items()}


FREE = (
    "dropout",
    "init_std",
    "mtp_weight",
    "moe.capacity_factor",
    "moe.aux_loss",
    "moe.aux_scope",
    "moe.z_loss",
    "moe.force_balance",
)
"""Fields that change neither the parameters nor, if nothing is dropped, the model's outputs."""


def differences(saved: ModelSpec, wanted: ModelSpec, also_free: Iterable[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value in `saved`, value in `wanted`) for each difference that makes weights of one model unusable
    in the other.

    Besides `FREE` and `also_free`, the size of `moe.bias_rate` is free, but not whether there is a bias; d_ffn is free
    if every layer has experts.
    """
    for key, ours in _flat(saved).items():
        theirs = _flat(wanted).get(key)
        if key == "moe.bias_rate":
            ours, theirs = bool(ours), bool(theirs)
        unused = key == "d_ffn" and saved.n_expert_layers == wanted.n_expert_layers == saved.n_layers == wanted.n_layers
        if ours != theirs and key not in FREE and key not in also_free and not unused:
            yield key, ours, theirs
    for key, theirs in _flat(wanted).items():
        if key not in _flat(saved):
            yield key, None, theirs


def _flat(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a spec, fields of its tables as `moe.top_k`; tables that the spec does not have are
    absent."""
    values: dict[str, Any] = {}
    for key in fields(spec):
        value: Any = getattr(spec, key.name)
        if isinstance(value, LoraSpec) or (key.name in TABLES and value is not None):
            values |= {f"{key.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)}
            if isinstance(value, MoESpec):  # several fields can say the same
                for name in ("n_shared", "first_dense", "interval"):
                    del values[f"moe.{name}"]
                dense = tuple(layer for layer in range(spec.n_layers) if not spec.has_experts(layer))
                values |= {"moe.d_shared": value.shared_width, "moe.dense_layers": dense}
        elif key.name not in TABLES:
            values[key.name] = value
    layers = range(spec.n_layers)  # an interval may say the same as a list of layers
    values |= {"nope_interval": 0, "global_interval": 0, "first_window": 0}
    values["nope_layers"] = tuple(n for n in layers if spec.positions == "rope" and not spec.rotates(n))
    values["global_layers"] = tuple(n for n in layers if spec.window and not spec.layer_window(n))
    return values
