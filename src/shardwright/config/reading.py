"""Read a run file strictly, with all problems reported at once, and write a run file."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ValidationError,
)

from shardwright.config.run_config import RunConfig, broken_rules
from shardwright.config.sections import PATH, RENAMED, located
from shardwright.layout.keys import KEYS as LAYOUT_KEYS
from shardwright.runs.folder import METRICS, RESOLVED, RUN_FILE
from shardwright.system import extensions
from shardwright.system.errors import ConfigError, near_path, nearest
from shardwright.system.files import inside, parse_toml, read_text, real_path
from shardwright.system.synonyms import called_here


def load(path: str | Path, overrides: Sequence[str] = (), *, started: bool = False) -> RunConfig:
    """Read a run file and apply `key=value` overrides such as `layout.dp_shard=2`. `started`: as in `parse`.

    Raises ConfigError with all problems of the file and of the overrides at once.
    """
    try:
        text = read_text(Path(path))
        table = parse_toml(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file{near_path(path, '*.toml')}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; {_run_file_of(Path(path))}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    # A saved run file has absolute paths. Earlier versions wrote paths relative to the start directory of the run.
    resolved = text.startswith(RESOLVED)
    folder = Path() if resolved else Path(path).parent
    config = parse(table, overrides, source=str(path), folder=folder, started=started)
    if started and resolved:
        _refuse_moved(Path(path), config, overrides)
    return config


def load_kept(folder: str | Path) -> RunConfig:
    """Read the run file in the folder of a run or of a checkpoint. Raises ConfigError as `load`, and for a link out of
    the folder."""
    return load(inside(Path(folder), RUN_FILE, ConfigError))


def _run_file_of(folder: Path) -> str:
    """Return, in words, which run file of a folder is probably meant."""
    if (folder / RUN_FILE).is_file():
        return f"the run file of the run in it is {folder / RUN_FILE}"
    if (folder / "config.json").is_file():
        return f"a model of transformers is named with --model {folder} in a plan, or as model.from in a run file"
    return "a run file is TOML, like the files in examples/"


def _refuse_moved(path: Path, config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for the run file of a run whose folder was moved or copied. Its `out` still names the old path,
    where the run would start from scratch."""
    folder = path.parent
    is_kept = path.name == RUN_FILE and (folder / METRICS).is_file()
    is_given = any(override.partition("=")[0].strip() == "out" for override in overrides)
    if is_kept and not is_given and real_path(folder) != real_path(config.out):
        raise ConfigError(
            f"{path}: the run in this folder was moved or copied here from out={config.out!r}; continue it by "
            f"--set out={shlex.quote(str(folder))}, or start a new run in another folder by --set out=..."
        )


def parse(
    table: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "run file",
    folder: Path = Path(),
    *,
    started: bool = False,
) -> RunConfig:
    """Validate a run file that is already a table, and import its extensions.

    Relative paths of the table are relative to `folder`, and paths of `overrides` to the working directory. `started`:
    the user starts this run file; otherwise only trusted extensions are imported (`extensions.load_named`). Raises
    ConfigError with all problems at once.
    """
    problems: list[str] = []
    if folder != Path():
        change_paths(table, lambda path: located(path, folder))
    for override in overrides:
        problems += apply_override(table, override)
    problems += _move_mup(table)
    change_paths(table, os.path.expanduser)
    problems += [f"{key}={n}: a number of at most 64 bits is needed" for key, n in _beyond_64_bits(table)]
    if problems:
        raise ConfigError(*(f"{source}: {problem}" for problem in problems))
    try:
        problems += extensions.load_named(table, Path(), started)
    except ConfigError as error:
        raise ConfigError(*(f"{source}: {problem}" for problem in error.problems)) from None
    try:
        config = RunConfig.model_validate(table)
    except ValidationError as error:
        for entry in error.errors():
            problems += entry["ctx"]["problems"] if entry["type"] == "refused" else [_sentence(entry)]
        problems += broken_rules(_valid_part(table, error))
        raise ConfigError(*(f"{source}: {problem}" for problem in problems)) from None
    problems += config.problems()
    if problems:
        raise ConfigError(*(f"{source}: {problem}" for problem in problems))
    return config


def _move_mup(table: dict[str, Any]) -> Iterator[str]:
    """Move the section [mup] to where the model is described, [model.mup]; yield a problem if both are given."""
    model = table.setdefault("model", {}) if "mup" in table else {}
    if isinstance(model, dict) and "mup" in table:
        if "mup" in model:
            yield "[mup] and [model.mup] are two names of one section; give one"
        model["mup"] = table.pop("mup")


def change_paths(table: dict[str, Any], change: Callable[[str], str], section: Any = RunConfig) -> None:
    """Replace every path of a run file (the fields marked `PATH`), given as a table that may be invalid."""
    for name, field in section.model_fields.items():
        value, inner = table.get(name), _section_of(field.annotation)
        if field.json_schema_extra == PATH:
            if isinstance(value, str) and (name, value) not in (("resume", "auto"), ("resume", "no")):
                table[name] = change(value)
            elif isinstance(value, list):  # a list of extensions, whose other entries are module names
                table[name] = [change(item) if str(item).endswith(".py") else item for item in value]
        elif inner is not None:
            for below in value if isinstance(value, list) else [value]:
                if isinstance(below, dict):
                    change_paths(below, change, inner)


def _beyond_64_bits(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, first digits) of every integer in a table that does not fit in 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield key, f"{value:.3e}" if abs(value) < 10**300 else f"{str(value)[:6]}..."
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _beyond_64_bits(inner, f"{key}.{name}" if key else str(name))


def _valid_part(table: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return the top-level sections and keys of a run file in which pydantic found no error, by name. A section whose
    only errors are unknown keys is returned without these keys, so that its rules are checked as well."""
    problems = error.errors()
    unknown = {
        problem["loc"] for problem in problems if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 2
    }
    invalid = {problem["loc"][0] for problem in problems if problem["loc"] not in unknown}
    result: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        if name in invalid:
            continue
        section = _section_of(field.annotation)
        if name not in table:
            result[name] = field.get_default(call_default_factory=True)
        elif section is None:
            result[name] = table[name]
        else:
            known = {key: value for key, value in table[name].items() if (name, key) not in unknown}
            result[name] = section.model_validate(known)
    return result


def apply_override(table: Any, override: str) -> list[str]:
    """Set a key of a table as `--set key=value` does, and return the problems. A section of a list is named by its
    number: `batch.stages.0.micro_batch`."""
    path, equals, text = override.partition("=")
    if not equals:
        return [f"--set {override}: write key=value, such as --set layout.dp_shard=2"]
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text
        if re.search(r",\s*\w[\w.]*=", text):
            return [f"--set {override}: one key is set at a time; give each a --set of its own"]
    *sections, key = path.strip().split(".")
    if not all([*sections, key]):
        return [f"--set {override}: the key is {path.strip()!r}; write key=value, such as --set layout.dp_shard=2"]
    for section in sections:
        below = table.setdefault(section, {}) if isinstance(table, dict) else _item(table, section)
        if below is None:
            return [f"--set {override}: there is no {section}; numbers of the list: 0 to {len(table) - 1}"]
        if not isinstance(below, dict | list):
            return [f"--set {override}: {section} is a value, not a section"]
        table = below
    if isinstance(table, list):
        return [f"--set {override}: {sections[-1]} is a list; name an entry and its key, {'.'.join(sections)}.0.KEY"]
    table[key] = value
    table.pop(INSTEAD.get(path.strip(), ""), None)
    return []


def _item(items: list[Any], number: str) -> Any:
    """Return an item of a list of sections by its number, such as 0 of batch.stages.0.micro_batch, or None."""
    return items[int(number)] if number.isdecimal() and int(number) < len(items) else None


INSTEAD = {"model.from": "preset", "model.preset": "from"}
"""Mutually exclusive keys: `--set` of one key replaces both keys of the file."""


LONGEST_SHOWN = 200
"""Maximum number of characters of a value in an error."""


def _sentence(entry: Any) -> str:
    """Return a pydantic error as a sentence in the style of our errors."""
    path = [str(part) for part in entry["loc"]]
    key = ".".join(path)
    if entry["type"] == "extra_forbidden" and key in RENAMED:
        return f"{key} is called {RENAMED[key]} now; rename it"
    if entry["type"] == "extra_forbidden":
        inner = entry["input"] if isinstance(entry["input"], dict) and len(path) == 1 else {}
        known = {name: called_here(name) for name in inner}
        names = [f"{name} is {' or '.join(terms)} here" for name, terms in known.items() if terms]
        return "; ".join([f"{key}: there is no such key", _meant(path), *names])
    if entry["type"] == "missing":
        field = _owner(path).model_fields[path[-1]]
        it = field.description or f"the section [{path[-1]}]: {model_of(field.annotation).__doc__.splitlines()[0]}"
        return f"{key}: missing, and there is no default; it is {it}"
    if entry["type"] in ("model_type", "model_attributes_type"):
        return f"{key}={entry['input']!r}: this is a section, written [{key}]"
    given = repr(entry["input"])
    given = given if len(given) <= LONGEST_SHOWN else f"{given[:LONGEST_SHOWN]}..."
    if entry["type"] in ("tuple_type", "list_type"):
        as_list = f"; write {path[-1]} = [{given}]" if isinstance(entry["input"], str | int | float) else ""
        return f"{key}={given}: a list is needed{as_list}"
    text = f"{key}={given}: {entry['msg'][0].lower() + entry['msg'][1:]}"
    if entry["type"] == "literal_error":
        hint = nearest(str(entry["input"]), re.findall(r"'([^']*)'", entry["ctx"]["expected"]))
        return f"{text}; {hint}" if not hint.startswith("valid") else text
    return text


def _meant(path: Sequence[str]) -> str:
    """Return the key that was probably meant by an unknown key: in its section, or with its name in another."""
    *_, name = path
    if called_here(name) is None and (elsewhere := keys_named(name)):
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return nearest(name, _owner(path).model_fields)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of a run file by their paths: {"layout": {"tp": 2}} -> {"layout.tp": 2}."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return result


def keys_named(name: str) -> list[str]:
    """Return the keys of a run file whose last part is `name`, with their sections: `tp` -> [`layout.tp`]; keys of the
    items of a list only if no other key has the name."""
    keys = [key for key in _paths(RunConfig) if key.split(".")[-1] == name]
    depth = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == depth]


def _paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key of a section and of its subsections."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if inner := _section_of(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


def model_of(annotation: Any) -> Any:
    """Return the section model of a run-file field."""
    section = _section_of(annotation)
    assert section is not None, annotation
    return section


def _section_of(annotation: Any) -> Any:
    """Return the section model of a run-file field, or None if the field is not a section."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _owner(path: Sequence[str]) -> Any:
    """Return the section that contains the last key of a path."""
    owner: Any = RunConfig
    for part in path[:-1]:
        if not part.isdecimal():  # an index in a list, whose annotation names the section of each entry
            owner = model_of(owner.model_fields[part].annotation)
    return owner


def resolved_toml(config: RunConfig, absolute: bool = False) -> str:
    """Return a configuration as a run file with every default filled in; reading it gives an equal configuration.
    `absolute`: write absolute paths, so that the file does not depend on its folder."""
    lines = [f"{RESOLVED}; `shardwright train` accepts this file"]
    values = config.model_dump(exclude_none=True)
    if absolute:
        change_paths(values, lambda path: located(path, Path.cwd()))
    layout = config.layout.layout()
    values["model"] = config.model.resolved()
    values["layout"] = {name: value for name in LAYOUT_KEYS if (value := getattr(layout, name)) is not None}
    lines += [f"{key} = {as_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for name, section in values.items():
        if isinstance(section, dict):
            tables = {key: value for key, value in section.items() if value and _is_tables(value)}
            plain = {key: value for key, value in section.items() if key not in tables and value != {}}
            lines += ["", f"[{name}]", *(f"{key} = {as_toml(value)}" for key, value in plain.items())]
            for key, rows in tables.items():
                for row in rows:
                    lines += ["", f"[[{name}.{key}]]", *(f"{k} = {as_toml(v)}" for k, v in row.items())]
    return "\n".join(lines) + "\n"


def as_toml(value: Any) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {as_toml(below)}" for key, below in value.items()) + " }"
    if _is_tables(value):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(row, dict) for row in value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
