"""Settings from TOML, JSON and YAML files, each with its line."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwright.readers.table import Setting
from shardwright.system.errors import InputError
from shardwright.system.files import parse_json, parse_toml, read_text, reason

DEEPEST = 20
MOST_SETTINGS = 20_000


def text_of(path: Path) -> str:
    """Return the text of a file. Raises InputError with the reason if it cannot be read."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {reason(error)}") from None


def toml_settings(path: Path) -> list[Setting]:
    """Return the keys of a TOML file as `section.key`. Raises InputError with the line for an invalid file."""
    text = text_of(path)
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if form := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            section = f"{form[1]}."
        elif form := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
            lines.setdefault(f"{section}{form[1]}", number)
    return [
        Setting(name, value, f"{path}:{lines[name]}" if name in lines else str(path))
        for name, value in _flat(document, "")
    ]


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def tree_settings(path: Path) -> list[Setting]:
    """Return the keys of a JSON or YAML file as `section.key`. Raises InputError with the line for an invalid file."""
    text = text_of(path)
    try:
        if path.suffix.lower() == ".json":
            parse_json(text)
            text = text.replace("\t", " ")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{path}{line}: {error.problem}; the file is damaged or truncated") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = f":{form[1]}" if (form := re.search(r"line (\d+)", str(error))) else ""
        raise InputError(f"{path}{line}: {' '.join(str(error).split())}; the file is damaged or truncated") from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path}: no table of options; supported: keys with values")
    result: list[Setting] = []
    for setting in _node_settings(root, "", path, 0):
        result.append(setting)
        if len(result) > MOST_SETTINGS:
            raise InputError(f"{path}: more than {MOST_SETTINGS:,} values; a configuration has fewer")
    return result


def _node_settings(node: yaml.MappingNode, prefix: str, path: Path, depth: int) -> Iterator[Setting]:
    if depth > DEEPEST:
        raise InputError(f"{path}: nested more than {DEEPEST} deep")
    for key, value in _merged(node, path, DEEPEST).values():
        name, where = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _node_settings(value, f"{name}.", path, depth + 1)
        elif isinstance(value, yaml.SequenceNode):
            yield Setting(name, [str(_scalar(item)) for item in value.value], where)
        else:
            yield Setting(name, _scalar(value), where)


def _merged(node: yaml.MappingNode, path: Path, depth: int) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of a mapping by key, with the keys of the mappings that `<<` names: a mapping's own
    keys replace those, and of several mappings the first that has a key counts (yaml.org/type/merge.html)."""
    if depth <= 0:
        raise InputError(f"{path}: mappings that name each other by `<<` more than {DEEPEST} deep")
    result: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
            raise InputError(f"{path}:{key.start_mark.line + 1}: a key is a {kind}; valid: a word or a number")
        if key.value in own:
            first, again = (key.start_mark.line + 1 for key in (own[key.value][0], key))
            raise InputError(f"{path}:{again}: {key.value} is stated twice; line {first} has it too: leave one out")
        if key.value != "<<":
            own[key.value] = (key, value)
        if key.value == "<<":
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(mapping, yaml.MappingNode):
                    result = _merged(mapping, path, depth - 1) | result
    return result | own


def _scalar(node: yaml.Node) -> Any:
    """Return the value of a scalar; numbers stay text."""
    kind = node.tag.rpartition(":")[2]
    if kind == "bool":
        return node.value.lower() in ("true", "yes", "on")
    if kind == "null" or not isinstance(node, yaml.ScalarNode):
        return None
    return node.value
