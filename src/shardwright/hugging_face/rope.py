"""The rotary embedding in a config.json: `rope_theta` and `rope_scaling`, or both in `rope_parameters`; no torch."""

from typing import Any, get_args

from shardwright.model.sections import RopeScaling, Scaling
from shardwright.model.spec import ModelSpec

_THETA = 10000.0
_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
"""Field of RopeScaling -> its key in config.json."""
_NOT_FLOAT = ("truncate", "original_max_seq_len")


def read_rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None, list[str]]:
    """Return the base of the frequencies, their scaling, and the unsupported values."""
    given: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.pop("rope_theta", None) or config.get("rope_theta", _THETA))
    kinds = {given.pop("type", None), given.pop("rope_type", None)} - {None}
    kind = next(iter(kinds), "default")
    if len(kinds) > 1 or kind not in ("default", *get_args(Scaling)):
        valid = ", ".join(("default", *get_args(Scaling)))
        return theta, None, [f"rope_scaling of type {' and '.join(map(repr, kinds))} is not supported; valid: {valid}"]
    given.pop("partial_rotary_factor", None)  # `rope_fraction` reads it
    if kind == "default":
        of_layers = [key for key, value in given.items() if isinstance(value, dict)]
        return (
            theta,
            None,
            [f"rope_parameters of kinds of layers are not supported: {', '.join(of_layers)}"] * bool(of_layers),
        )
    unknown = sorted(given.keys() - set(_NAMES.values()))
    if unknown:
        return theta, None, [f"rope_scaling has keys that are not supported: {', '.join(unknown)}"]
    if kind in ("yarn", "longrope"):
        # A key outside of rope_scaling goes first, as in transformers.
        if config.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        length = given.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
        if given.get("factor") is None and length and "max_position_embeddings" in config:
            given["factor"] = config["max_position_embeddings"] / length
    ours = {field: given[key] for field, key in _NAMES.items() if given.get(key) is not None}
    whole: dict[str, Any] = {
        field: float(value) if isinstance(value, int) and field not in _NOT_FLOAT else value
        for field, value in ours.items()
    }
    whole["kind"] = kind
    if "factor" not in whole:
        return theta, None, ["rope_scaling.factor is missing"]
    return theta, RopeScaling(**whole), []


def rope_fraction(config: dict[str, Any], default: float | None) -> tuple[float, list[str]]:
    """Return the fraction of each head that is rotated, and the unsupported value. `default`: the architecture's
    (`Architecture.rope_fraction`)."""
    of_rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = of_rope.get("partial_rotary_factor")
    given = config.get("partial_rotary_factor") if given is None else given
    if default is None and given not in (None, 1.0):
        refused = f"partial_rotary_factor={given!r}: transformers rotates whole heads of this architecture; valid: 1"
        return 1.0, [refused]
    return (default or 1.0) if given is None else float(given), []


def write_rope(spec: ModelSpec, *, partial: bool = False) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`, which every version of `transformers` and vLLM reads, and with `partial`
    the fraction of heads that is rotated."""
    fraction = {"partial_rotary_factor": spec.rope_fraction} if partial else {}
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_theta": spec.rope_theta, "rope_scaling": None} | fraction
    if scaling.kind == "longrope":
        return _written_longrope(spec, scaling) | fraction
    default = RopeScaling(kind=scaling.kind, factor=scaling.factor)
    keys = {
        key: getattr(scaling, ours) for ours, key in _NAMES.items() if getattr(scaling, ours) != getattr(default, ours)
    }
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, "factor": scaling.factor} | keys,
    } | fraction


def _written_longrope(spec: ModelSpec, scaling: RopeScaling) -> dict[str, Any]:
    """Return the keys of longrope as published files have them: older versions of `transformers` refuse further keys in
    `rope_scaling`, and take the factor from the two lengths."""
    written: dict[str, Any] = {"type": "longrope"}
    written |= {"short_factor": [*scaling.short_factor], "long_factor": [*scaling.long_factor]}
    if scaling.factor != spec.max_seq_len / scaling.original_max_seq_len:
        written["factor"] = scaling.factor
    if scaling.attention_factor:
        written["attention_factor"] = scaling.attention_factor
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": written,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
