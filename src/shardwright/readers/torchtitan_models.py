"""The models of torchtitan by name and flavor.

Source: `torchtitan/models/*/__init__.py` of version 0.3.0; a test compares the numbers of parameters with its models.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.presets import PRESETS
from shardwright.model.spec import ModelSpec
from shardwright.readers.table import Values

_NEXT = PRESETS["qwen3-next-80b-a3b"]
_KIMI = PRESETS["kimi-k2"]


def _debug(preset: str, n_layers: int, **sizes: Any) -> ModelSpec:
    """Return a debug model with the architecture of a preset."""
    return replace(PRESETS[preset], n_layers=n_layers, d_model=256, vocab_size=2048, **sizes)


def _qwen35(
    n_layers: int, d_model: int, heads: tuple[int, int], n_v_heads: int, d_ffn: int, experts: tuple[int, int] = (0, 0)
) -> ModelSpec:
    """Return the text decoder of a Qwen3.5. `heads`: query and key heads; `n_v_heads`: value heads of linear attention;
    `d_ffn`: width of the feed-forward layer or of an expert; `experts`: their number, and how many a token has."""
    moe = _NEXT.moe and replace(_NEXT.moe, d_ffn=d_ffn, n_experts=experts[0], top_k=experts[1])
    return replace(
        _NEXT,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=heads[0],
        n_kv_heads=heads[1],
        d_ffn=d_ffn,
        vocab_size=248320,
        moe=moe if experts[0] else None,
        linear_attention=LinearAttentionSpec(n_k_heads=16, n_v_heads=n_v_heads, k_dim=128, v_dim=128),
    )


def _qwen35_debug(n_layers: int, d_ffn: int, experts: tuple[int, int] = (0, 0)) -> ModelSpec:
    linear = LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=64, v_dim=64)
    return replace(_qwen35(n_layers, 256, (4, 2), 4, d_ffn, experts), head_dim=64, linear_attention=linear)


def _moonlight() -> ModelSpec:
    lite = PRESETS["deepseek-v2-lite"]
    return replace(lite, d_ffn=11264, vocab_size=163840, rope_scaling=None, rope_theta=50000.0)


def _deepseek_debug() -> ModelSpec:
    debug = _debug("deepseek-v2-lite", 6, d_ffn=1024)
    return replace(debug, moe=debug.moe and replace(debug.moe, n_experts=8, top_k=3, d_ffn=256))


def _gpt_oss_debug() -> ModelSpec:
    debug = _debug("gpt-oss-20b", 4)
    return replace(debug, moe=debug.moe and replace(debug.moe, n_experts=8))


def _qwen3_moe_debug() -> ModelSpec:
    debug = _debug("qwen3-30b-a3b", 8, n_heads=16, n_kv_heads=8)
    return replace(debug, moe=debug.moe and replace(debug.moe, n_experts=64))


_QWEN3_DEBUG = _debug("qwen3-0.6b", 8, n_kv_heads=8)
FLAVORS: dict[str, dict[str, ModelSpec]] = {
    "llama3": {size: PRESETS[f"llama-3.1-{size}"] for size in ("8b", "70b", "405b")}
    | {size: PRESETS[f"llama-3.2-{size}"] for size in ("1b", "3b")}
    | {"debugmodel": _debug("llama-2-7b", 6, n_heads=16, n_kv_heads=16, head_dim=16, d_ffn=768)},
    "qwen3": {
        size: PRESETS[f"qwen3-{size}"] for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")
    }
    | {"debugmodel": _QWEN3_DEBUG, "debugmodel_non_fused_qkv": _QWEN3_DEBUG, "debugmodel_moe": _qwen3_moe_debug()},
    "qwen3_5": {
        "0.8b": _qwen35(24, 1024, (8, 2), 16, 3584),
        "2b": _qwen35(24, 2048, (8, 2), 16, 6144),
        "4b": _qwen35(32, 2560, (16, 4), 32, 9216),
        "9b": _qwen35(32, 4096, (16, 4), 32, 12288),
        "27b": _qwen35(64, 5120, (24, 4), 48, 17408),
        "35b-a3b": _qwen35(40, 2048, (16, 2), 32, 512, (256, 8)),
        "122b-a10b": _qwen35(48, 3072, (32, 2), 64, 1024, (256, 8)),
        "397b-a17b": _qwen35(60, 4096, (32, 2), 64, 1024, (512, 10)),
        "debugmodel": _qwen35_debug(8, 512),
        "debugmodel_moe": _qwen35_debug(4, 256, (8, 2)),
    },
    "deepseek_v3": {
        "16b": PRESETS["deepseek-v2-lite"],
        "236b": PRESETS["deepseek-v2"],
        "671b": PRESETS["deepseek-v3"],
        "debugmodel": _deepseek_debug(),
    },
    "gpt_oss": {
        "20b": PRESETS["gpt-oss-20b"],
        "120b": PRESETS["gpt-oss-120b"],
        "debugmodel": _gpt_oss_debug(),
    },
    "kimi_k2_7": {
        "moonlight-16b-a3b": _moonlight(),
        "kimi-vl-a3b": _moonlight(),
        "kimi-k2.5": _KIMI,
        "debugmodel": _deepseek_debug(),
    },
}
"""Name and flavor of a model -> its sizes; without vision encoders."""
_WITH_IMAGES = {"qwen3_5": set(FLAVORS["qwen3_5"]), "kimi_k2_7": {"kimi-vl-a3b", "kimi-k2.5", "debugmodel"}}
"""Name of a model -> its flavors with a vision encoder."""


def model_of(values: Values) -> ModelSpec:
    """Return the model that a configuration names, or --model. If it is not known, add a problem and return a debug
    model. An assumption about the name, and a vision encoder that is left out, are added to `values.assumed`."""
    if values.given_model is not None:
        return values.given_model
    option = "model.flavor" if values.given("model.flavor") else "model_spec"
    flavor, name = values[option], _model_name(values)
    known = FLAVORS.get(name or "", {})
    model = known.get(str(flavor).lower())
    if flavor is None:
        if not values.given(option):
            values.problems.append(f"{values.source}: model.flavor is missing; give the sizes by --model config.json")
    elif values["hf_model"] is not None:
        values.refuse(
            "hf_model", f"flavor {flavor} changes the sizes of its config.json, which is not here; give --model"
        )
    elif name is None:
        values.refuse(
            option,
            "the file does not name the model of this flavor: it imports no model_registry from torchtitan.models; "
            "give --model config.json",
        )
    elif model is None:
        some = f"flavors of {name}: {', '.join(known)}" if known else f"known models: {', '.join(FLAVORS)}"
        values.refuse(option, f"the sizes of {name} {flavor} are not known here ({some}); give --model config.json")
    elif str(flavor).lower() in _WITH_IMAGES.get(name, ()):
        values.assumed.append(f"{name} {flavor}: its text decoder is priced, and its vision encoder is not")
    return replace(model or PRESETS["debug"], mtp_modules=values["model_spec.num_mtp_layers"])


def _model_name(values: Values) -> str | None:
    """Return the name of the model, or None: as stated, or of the package of the module that registers it, or the
    longest known name in the path of the file; for TOML also the system's default."""
    if values.given("model.name"):
        return str(values["model.name"])
    module = str(values["model_spec.module"] or "")
    if (name := _package(module, Path(values.source).absolute())) is not None:
        return name
    name = next((flavor for flavor in sorted(FLAVORS, key=len, reverse=True) if flavor in values.source.lower()), None)
    if name is not None:
        values.assumed.append(f"the model is {name}, the name in the path of the file: the file names none")
    elif not values.given("model_spec"):
        name = str(values["model.name"])
        values.assumed.append(f"the model is {name}, torchtitan's default: the file names none")
    return name


def _package(module: str, file: Path) -> str | None:
    """Return the name of the model's package, or None. A relative module is in the folder of the file, which is a
    package of torchtitan.models if the file is its config_registry.py."""
    packages = [package for package in module.split(".") if package not in ("", "config_registry")]
    levels = len(module) - len(module.lstrip("."))
    if known := [package for package in packages if package in FLAVORS]:
        return known[-1]
    if packages and not levels:
        return packages[-1]
    if module and file.name == "config_registry.py":
        return file.parents[min(max(levels, 1), len(file.parents)) - 1].name
    return None
