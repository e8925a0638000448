"""SmolLM3: Llama in which every n-th layer rotates nothing."""

from collections.abc import Iterator
from typing import Any

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, register
from shardwright.layout.key import MOST_LAYERS
from shardwright.model.spec import ModelSpec

NOPE: dict[str, str | tuple[str, ...]] = {"nope_interval": "_nope_interval", "nope_layers": "_nope_layers"}


def problems(config: Config) -> Iterator[str]:
    """Yield the unsupported kinds of layers: layers that attend to a window, and layers without rotation that are not
    every n-th layer."""
    yield from windows.refused(config)
    layers, interval = config.get("num_hidden_layers"), config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        yield f"no_rope_layer_interval={interval!r} is not a whole number above 0"
    elif rotated is not None and isinstance(layers, int):
        yield from unrotated_problems(rotated, layers)


def unrotated_problems(rotated: Any, layers: int) -> Iterator[str]:
    """Yield the fault of `no_rope_layers`, which has 1 for each layer that rotates and 0 for each that does not."""
    is_list = isinstance(rotated, list) and all(type(flag) is int and flag in (0, 1) for flag in rotated)
    if not is_list or (rotated and len(rotated) != layers):
        yield f"no_rope_layers={rotated!r} is not a list of 0 and 1, one for each of {layers} layers, or an empty list"


def unrotated(rotated: Any, layers: int, interval: Any) -> Config:
    """Return `nope_interval` and `nope_layers` of `no_rope_layers`, or of every `interval`-th layer without it."""
    interval = interval if type(interval) is int and interval > 0 else 0
    if not isinstance(rotated, list) or not rotated:
        return {"_nope_interval": interval, "_nope_layers": []}
    for n in (interval, 0, *range(1, layers + 1)):
        if rotated == [int(n == 0 or (layer + 1) % n != 0) for layer in range(layers)]:
            return {"_nope_interval": n, "_nope_layers": []}
    return {"_nope_interval": 0, "_nope_layers": [layer for layer, flag in enumerate(rotated) if not flag]}


def complete(config: Config) -> Config:
    """Return config.json with SmolLM3Config's defaults."""
    missing = {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False}
    config = missing | config
    layers = min(config.get("num_hidden_layers", 0), MOST_LAYERS)  # more are refused with the sizes
    config |= unrotated(config.get("no_rope_layers"), layers, config["no_rope_layer_interval"])
    return llama.complete({"rope_theta": 2000000.0} | config, tied=True)


def written(spec: ModelSpec) -> Config:
    """Return the layers that rotate: 1, and others: 0."""
    return {"no_rope_layers": [int(spec.rotates(layer)) for layer in range(spec.n_layers)]}


SMOLLM3 = register(
    Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        sizes={**llama.SIZES, "bias": ("attention_bias", "mlp_bias"), **NOPE},
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        complete=complete,
        written=written,
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        ignored=llama.IGNORED,
        problems=problems,
    )
)
