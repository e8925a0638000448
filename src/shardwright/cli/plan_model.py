"""The model of `--model`, which is a config.json, a folder, sizes, or a known name, and the cluster of `--cluster`."""

import os.path
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.model.spec import ModelSpec
from shardwright.system.errors import ConfigError, collecting, near_path
from shardwright.system.files import inside

if TYPE_CHECKING:
    from shardwright.cost.hardware import Cluster

FILES = (".json", ".toml")


def find_model(text: str, seq_len: int | None, named: Callable[[str], tuple[str, ModelSpec]]) -> tuple[str, ModelSpec]:
    """Return the name and the sizes of a model. `named` looks up a known name. Raises InputError."""
    path, exists, is_folder = Path(text), os.path.exists(text), os.path.isdir(text)  # False for a name that is too long
    if "=" in text and not exists:
        from shardwright.model.by_sizes import spec_of_sizes

        return text, spec_of_sizes(text, max(1, seq_len or 1))
    if path.suffix in FILES or text.startswith((".", "/", "~")) or is_folder:
        if not exists:
            raise ConfigError(f"--model {text}: no such file or folder{near_path(path, '*' + path.suffix)}")
        from shardwright.hugging_face.files import CONFIG, is_folder_of_transformers, read_sizes

        if is_folder and not is_folder_of_transformers(path):
            from shardwright.config.sections import spec_of_folder

            return text, spec_of_folder(path)
        if path.suffix == ".toml":
            raise ConfigError(f"--model {text}: that is a run file; give it without --model")
        config = inside(path, CONFIG) if is_folder else path
        return str(config.parent if config.name == CONFIG else config), read_sizes(config)
    return named(text)


def published_config(text: str) -> dict[str, Any] | None:
    """Return the config.json that a `--model` names, after `find_model` has read it; None if it names none."""
    from shardwright.hugging_face.files import CONFIG, is_folder_of_transformers
    from shardwright.hugging_face.schema import ConfigFile, read_object

    path = Path(text)
    if os.path.isdir(text) and is_folder_of_transformers(path):
        path = inside(path, CONFIG)
    return read_object(path, ConfigFile) if path.suffix == ".json" and os.path.exists(path) else None


def length_problems(name: str, model: ModelSpec, lengths: dict[str, int]) -> list[str]:
    """Return the problem of sequences that are longer than a model takes. `lengths`: option -> tokens."""
    if (length := sum(lengths.values())) <= model.max_seq_len:
        return []
    terms = " + ".join(f"{option} {n}" for option, n in lengths.items())
    return [f"{terms} = {length} tokens, and {name} is meant for {model.max_seq_len} at most"]


def find_machine(cluster: str | None, hardware: Path | None, problems: list[str]) -> "Cluster | None":
    """Return the cluster of `--cluster`. Adds problems to `problems`."""
    from shardwright.cost.hardware import cluster as named_cluster

    if cluster is None:
        problems.append("--cluster is missing; give accelerators and how many, such as h100:8")
        return None
    with collecting(problems):
        return named_cluster(cluster, hardware)
    return None
