"""SmolLM3: Llama in which every n-th layer rotates nothing."""

from collections.abc import Iterator

from shardwright.hugging_face import llama, windows
from shardwright.hugging_face.architecture import Architecture, Config, register


def problems(config: Config) -> Iterator[str]:
    """Yield the unsupported kinds of layers: layers that attend to a window, and layers without rotation that are not
    every n-th layer."""
    yield from windows.refused(config)
    layers, interval = config.get("num_hidden_layers"), config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        yield f"no_rope_layer_interval={interval!r} is not a whole number above 0"
    elif rotated is not None and isinstance(layers, int):
        expected = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if rotated != expected:
            yield (
                f"no_rope_layers={rotated!r} is not the pattern of no_rope_layer_interval={interval} over {layers} "
                f"layers, the only one supported: 0 in every {interval}th layer"
            )


SMOLLM3 = register(
    Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        sizes=llama.SIZES | {"bias": ("attention_bias", "mlp_bias"), "nope_interval": "no_rope_layer_interval"},
        choices=llama.CHOICES,
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        complete=lambda config: llama.complete(
            {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False}
            | {"rope_theta": 2000000.0}
            | config,
            tied=True,
        ),
        ends=llama.ENDS,
        layer=llama.ATTENTION | llama.NETWORK,
        ignored=llama.IGNORED,
        problems=problems,
    )
)
