"""Layers that attend to a window, in a config.json: `sliding_window` and `layer_types`, and their rotary frequencies.

`transformers` has a kind of attention for each layer. Here a pattern says the same: layers before number `first_window`
and every `global_interval`-th layer attend to all tokens, the others to a window. Layers of all tokens that follow no
such pattern are listed by their numbers, `global_layers`.
"""

from collections.abc import Iterator
from typing import Any

from shardwright.hugging_face.architecture import Config
from shardwright.layout.key import MOST_LAYERS
from shardwright.model.spec import ModelSpec

PATTERN = {
    "global_interval": "_global_interval",
    "first_window": "_first_window",
    "global_layers": "_global_layers",
}
SIZES = {"window": "sliding_window"} | PATTERN
NO_PATTERN: Config = {"_global_interval": 0, "_first_window": 0, "_global_layers": []}
NULL_IF_ZERO = ("sliding_window",)
WINDOWED, GLOBAL = "sliding_attention", "full_attention"


def complete(
    config: Config,
    *,
    interval: int = 0,
    first: int = 0,
    window: int = 4096,
    by_layer: bool = True,
    keeps_whole: bool = False,
) -> Config:
    """Return config.json with the pattern of `layer_types`, or with the default pattern if the key is missing.

    `interval`, `first`: the default `global_interval` and `first_window`; `window`: the default window, in tokens;
    `by_layer`: whether transformers reads `layer_types` for this architecture, otherwise every layer has the window. A
    window as long as the longest sequence is none, unless windowed layers rotate by other frequencies or, with
    `keeps_whole`, differ in other ways.
    """
    layers = min(config.get("num_hidden_layers", 0), MOST_LAYERS)  # more are refused with the sizes
    longest = config.get("max_position_embeddings", 0)
    window = config.get("sliding_window", window)
    given = config.get("layer_types") if by_layer else None
    kinds = given or [_kind(layer, interval, first) for layer in range(layers)]
    if isinstance(window, int) and window >= longest > 0:
        window = longest if keeps_whole or config.get("_window_rope_theta") else 0
    if not window or WINDOWED not in kinds:
        return config | NO_PATTERN | {"sliding_window": 0, "_window_rope_theta": 0.0}
    return config | pattern(kinds) | {"sliding_window": window}


def problems(config: Config, windowed: str = WINDOWED) -> Iterator[str]:
    """Yield the faults of `layer_types`, its length and kinds that are neither `windowed` nor of all tokens; and of the
    rotary parameters of windowed layers."""
    rope = config.get("_window_rope_kind") or "default"
    if rope != "default":
        yield f"rope_parameters.{WINDOWED}.rope_type={rope!r} is not supported; valid: 'default'"
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else repr(kinds)
        yield f"layer_types has {count} entries for num_hidden_layers={layers}; valid: one for each layer"
    elif unknown := sorted({str(kind) for kind in kinds} - {windowed, GLOBAL}):
        yield f"layer_types has {', '.join(unknown)}; valid: {GLOBAL}, {windowed}"


def every_layer(config: Config) -> Iterator[str]:
    """Yield the faults of `layer_types` of an architecture in which transformers does not read the key: every layer has
    the window."""
    yield from problems(config)
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {WINDOWED})
    if config.get("sliding_window") and others:
        yield (
            f"layer_types has {', '.join(others)}, and transformers gives every layer of this architecture "
            f"sliding_window={config['sliding_window']}; valid: {WINDOWED} in every layer, or sliding_window=null"
        )


def refused(config: Config) -> Iterator[str]:
    """Yield why the layers of an architecture without windows are not supported."""
    if kinds := sorted({str(kind) for kind in config.get("layer_types") or ()} - {GLOBAL}):
        yield f"layer_types has {', '.join(kinds)}; valid: {GLOBAL} in every layer"


def layer_types(spec: ModelSpec, windowed: str = WINDOWED) -> Config:
    """Return the `layer_types` of a model; `windowed`: the kind of its layers with a window."""
    kinds = [windowed if spec.layer_window(layer) else GLOBAL for layer in range(spec.n_layers)]
    return {"layer_types": kinds}


def _kind(layer: int, interval: int, first: int) -> str:
    is_global = layer < first or (interval and (layer + 1) % interval == 0)
    return GLOBAL if is_global else WINDOWED


def pattern(kinds: list[Any]) -> Config:
    """Return the keys of `PATTERN` for the kinds of all layers, with the fewest layers before the first window; without
    a pattern with the numbers of all layers of all tokens."""
    n = len(kinds)
    start = next((layer for layer, kind in enumerate(kinds) if kind != GLOBAL), 0)
    is_global = [kind == GLOBAL for kind in kinds]
    for first in (0, start):
        for interval in (0, *range(2, n + 1)):
            if is_global == [_kind(layer, interval, first) == GLOBAL for layer in range(n)]:
                return NO_PATTERN | {"_global_interval": interval, "_first_window": first}
    return NO_PATTERN | {"_global_layers": [layer for layer in range(n) if is_global[layer]]}


def split_rope(config: Config, theta: float, local_theta: float | None = None) -> Config:
    """Return config.json with the rotary parameters of layers that attend to all tokens as its only ones, and the base
    of windowed layers as `_window_rope_theta`; 0: their frequencies are the same.

    `theta`: the default base; `local_theta`: of windowed layers, or None for the base of the others.
    """
    given = config.get("rope_parameters") or {}
    by_kind = GLOBAL in given or WINDOWED in given
    whole = dict(given.get(GLOBAL) or {}) if by_kind else dict(given or config.get("rope_scaling") or {})
    whole.setdefault("rope_theta", config.get("rope_theta", theta))
    local = dict(given.get(WINDOWED) or {}) if by_kind else {}
    base = local.get("rope_theta") or config.get("rope_local_base_freq", local_theta) or whole["rope_theta"]
    scaled = (whole.get("rope_type") or whole.get("type") or "default") != "default"
    differs = scaled or base != whole["rope_theta"]
    made = {"_window_rope_theta": float(base) if differs else 0.0, "_window_rope_kind": local.get("rope_type")}
    return config | {"rope_parameters": whole} | made
