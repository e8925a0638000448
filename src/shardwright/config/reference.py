"""Every key of the run file with its type, default and meaning: for `train --keys` and docs/run-file.md."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from shardwright.config import MODEL_TABLES, RunConfig, as_toml, model_of
from shardwright.layout.keys import KEYS
from shardwright.optimizers import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class RunFileKey:
    """One key of the run file for the reference: `layout.zero`, its type, default and description."""

    path: str
    type: str
    default: str
    description: str


def keys() -> Iterable[RunFileKey]:
    """Return every key of the run file in order."""
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _section_keys(name, field.annotation)
            if name == "optimizer":
                for kind in OPTIMIZERS.values():
                    for option, about in kind.options.items():
                        help = f"{kind.name}: {about.help}"
                        type_name = _type_name(type(about.default))
                        yield RunFileKey(f"{name}.{option}", type_name, as_toml(about.default), help)
        else:
            yield _key(name, field)


def _section_keys(path: str, section: type[BaseModel]) -> Iterable[RunFileKey]:
    for name, field in section.model_fields.items():
        key = _key(f"{path}.{name}", field)
        if path == "layout" and (choices := KEYS[name].choices):
            key = dataclasses.replace(key, type=" | ".join(map(as_toml, choices())))
        yield key
        if name in MODEL_TABLES:
            defaults = {field.name: field.default for field in dataclasses.fields(MODEL_TABLES[name])}
            for key in _section_keys(f"{path}.{name}", model_of(field.annotation)):
                default = defaults[key.path.rpartition(".")[2]]
                yield key if default is dataclasses.MISSING else dataclasses.replace(key, default=as_toml(default))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _section_keys(f"{path}.{name}", field.annotation)
        elif get_origin(field.annotation) is list and issubclass(row := get_args(field.annotation)[0], BaseModel):
            yield from _section_keys(f"{path}.{name}", row)


def _key(path: str, field: Any) -> RunFileKey:
    given = None if field.default_factory else field.default
    default = "required" if field.is_required() else ("-" if given is None else as_toml(given))
    return RunFileKey(path, _type_name(field.annotation), default, field.description or "")


def _type_name(annotation: Any) -> str:
    if getattr(annotation, "__origin__", None) is Literal:
        return " | ".join(as_toml(choice) for choice in annotation.__args__)
    options = [option for option in getattr(annotation, "__args__", ()) if option is not type(None)]
    if get_origin(annotation) is dict:
        return "table"
    if get_origin(annotation) in (list, tuple):
        return f"list of {_type_name(options[0])}"
    if options:
        return " | ".join(_type_name(option) for option in options)
    names = {int: "integer", float: "number", str: "text", bool: "true | false"}
    return names.get(annotation, "table")
