"""The run file: TOML read into frozen, documented models. Reading is strict and reports all problems at once.

    config = load("examples/debug.toml", ["layout.dp_shard=2", "steps=100"])

An unknown key is an error that names the nearest valid key. `resolved_toml` writes a configuration as a run file with
every default filled in; it is saved with each run.
"""

from shardwright.config.optimizer import OptimizerSection
from shardwright.config.precision import PrecisionSection
from shardwright.config.reading import as_toml, flat, keys_named, load, load_kept, model_of, parse, resolved_toml
from shardwright.config.run_config import RunConfig
from shardwright.config.sections import (
    MODEL_TABLES,
    ScheduleSection,
    Scope,
    contradictions,
    spec_of_folder,
    table_of,
)

__all__ = [
    "MODEL_TABLES",
    "OptimizerSection",
    "PrecisionSection",
    "RunConfig",
    "ScheduleSection",
    "Scope",
    "as_toml",
    "contradictions",
    "flat",
    "keys_named",
    "load",
    "load_kept",
    "model_of",
    "parse",
    "resolved_toml",
    "spec_of_folder",
    "table_of",
]
