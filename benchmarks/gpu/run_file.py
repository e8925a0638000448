"""Run files of the programs here, from settings by the paths of their keys, and the path of their modules."""

import os
from pathlib import Path
from typing import Any

from shardwright.config import as_toml


def toml(settings: dict[str, Any]) -> str:
    """The run file of settings, whose names are paths of keys."""
    return "".join(f"{path} = {as_toml(value)}\n" for path, value in settings.items())


def python_path() -> str:
    """PYTHONPATH of a program that imports this checkout, and the packages that were carried to this machine."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH")]))
