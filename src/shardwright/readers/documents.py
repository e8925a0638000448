"""Settings from TOML, JSON, YAML and Python files, each with its line. Nothing is executed."""

import ast
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
    for setting in _of_node(root, "", path, 0):
        result.append(setting)
        if len(result) > MOST_SETTINGS:
            raise InputError(f"{path}: more than {MOST_SETTINGS:,} values; a configuration has fewer")
    return result


def _of_node(node: yaml.MappingNode, prefix: str, path: Path, depth: int) -> Iterator[Setting]:
    if depth > DEEPEST:
        raise InputError(f"{path}: nested more than {DEEPEST} deep")
    for key, value in node.value:
        name, where = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _of_node(value, f"{name}.", path, depth + 1)
        elif isinstance(value, yaml.SequenceNode):
            yield Setting(name, [str(_scalar(each)) for each in value.value], where)
        else:
            yield Setting(name, _scalar(value), where)


def _scalar(node: yaml.Node) -> Any:
    """Return the value of a scalar; numbers stay text."""
    kind = node.tag.rpartition(":")[2]
    if kind == "bool":
        return node.value.lower() in ("true", "yes", "on")
    if kind == "null" or not isinstance(node, yaml.ScalarNode):
        return None
    return node.value


def python_settings(path: Path, function: str | None) -> list[Setting]:
    """Return the plain assignments of a Python configuration: of a function that returns a call with keywords, such as
    `Trainer.Config(parallelism=ParallelismConfig(...))`, or of the module. Raises InputError with the line."""
    text = text_of(path)
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}:{getattr(error, 'lineno', 1)}: not Python, or truncated: {error}") from None
    return list(_PythonFile(path, module).settings(function).values())


class _PythonFile:
    """The functions of a Python file."""

    def __init__(self, path: Path, module: ast.Module) -> None:
        self.path, self.module = path, module
        self.functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}

    def settings(self, function: str | None) -> dict[str, Setting]:
        """Return the settings of a function, or of the module if it has none."""
        if function is None and len(self.functions) > 1:
            names = ", ".join(self.functions)
            raise InputError(f"{self.path}: it has several configurations; name one: {self.path}:NAME, of {names}")
        if function is not None and function not in self.functions:
            raise InputError(f"{self.path}: no function {function}; it has {', '.join(self.functions) or 'none'}")
        name = function or next(iter(self.functions), None)
        body = self.module.body if name is None else self.functions[name].body
        return self._evaluated(body, DEEPEST)

    def _evaluated(self, body: list[ast.stmt], depth: int) -> dict[str, Setting]:
        """Return the settings that assignments and the returned value make."""
        variables: dict[str, dict[str, Setting]] = {}
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._value(statement.value, variables, depth)
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value, variables, depth)
            elif not isinstance(statement, ast.Expr | ast.Import | ast.ImportFrom | ast.FunctionDef):
                what = type(statement).__name__.lower()
                raise InputError(
                    f"{self.path}:{statement.lineno}: a {what} statement would have to be executed; supported: plain "
                    f"assignments and one returned call"
                )
        return {name: setting for found in variables.values() for name, setting in found.items()}

    def _assign(self, target: ast.expr, value: ast.expr, variables: dict[str, dict[str, Setting]], depth: int) -> None:
        names = ast.unparse(target).split(".")
        if len(names) == 1 and isinstance(value, ast.Call):
            variables[names[0]] = self._value(value, variables, depth)
            return
        held = variables.setdefault(names[0], {})
        held.update(self._keyword(".".join(names[1:]) or names[0], value))

    def _value(self, node: ast.expr, variables: Mapping[str, dict[str, Setting]], depth: int) -> dict[str, Setting]:
        if isinstance(node, ast.Name):
            return dict(variables.get(node.id, {}))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            if depth <= 0:
                raise InputError(f"{self.path}:{node.lineno}: functions that call each other without end")
            return self._evaluated(self.functions[node.func.id].body, depth - 1)
        if isinstance(node, ast.Call):
            return {
                name: each
                for keyword in node.keywords
                if keyword.arg
                for name, each in self._keyword(keyword.arg, keyword.value).items()
            }
        raise InputError(f"{self.path}:{node.lineno}: {ast.unparse(node)[:60]} would have to be executed")

    def _keyword(self, name: str, node: ast.expr) -> dict[str, Setting]:
        """Return the settings of one argument; a call with keywords is a section."""
        where = f"{self.path}:{node.lineno}"
        if isinstance(node, ast.Call) and node.keywords and not node.args:
            found: dict[str, Setting] = {}
            for keyword in node.keywords:
                found |= self._keyword(f"{name}.{keyword.arg}", keyword.value)
            return found
        if isinstance(node, ast.Call):
            arguments = [each for each in node.args if isinstance(each, ast.Constant)]
            return {name: Setting(name, arguments[0].value if arguments else ast.unparse(node)[:60], where)}
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            names = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            if isinstance(node, ast.List) and names:
                return {name: Setting(name, [ast.unparse(each) for each in names], where)}
            return {name: Setting(name, "", where, f"{where}: {ast.unparse(node)[:60]} would have to be executed")}
        return {name: Setting(name, list(map(str, value)) if isinstance(value, list | tuple) else value, where)}
