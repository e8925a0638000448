"""Run files of the programs here, from settings by the paths of their keys."""

from typing import Any

from shardwright.config import as_toml


def toml(settings: dict[str, Any]) -> str:
    """The run file of settings, whose names are paths of keys."""
    return "".join(f"{path} = {as_toml(value)}\n" for path, value in settings.items())
