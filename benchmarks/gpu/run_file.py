"""Run files of the programs here, from settings by the paths of their keys."""

from typing import Any


def toml(settings: dict[str, Any]) -> str:
    """The run file of settings, whose names are paths of keys."""
    sections: dict[str, list[str]] = {"": []}
    for path, value in settings.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {written(value)}")
    return "\n".join(line for name, lines in sections.items() for line in ([f"[{name}]"] if name else []) + lines)


def written(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {written(each)}" for key, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else repr(value)
