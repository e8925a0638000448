"""Settings of a Python configuration, such as torchtitan's config_registry.py. The file is parsed; nothing in it runs.

Assignments, calls with their arguments, dictionaries, functions of the same file, and arithmetic on numbers are
followed. A call of anything else is data: its name and its arguments.
"""

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.readers.documents import DEEPEST, MOST_SETTINGS, text_of
from shardwright.readers.table import Setting
from shardwright.system.errors import InputError

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "int": int}
"""Functions of Python that are computed, of numbers."""
_LARGEST = 1e18
"""Bound of the numbers in arithmetic."""
_DECLARATIONS = (ast.Expr, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assert, ast.Pass)
"""Statements that change no value."""
_MOST_CALLS = 500
"""Bound of the calls of the file's own functions."""
_COPIES = ("replace", "dataclasses.replace", "copy.copy")
"""Calls that return a copy of their first argument, with keywords as changes; its values are shared."""
_DEEP_COPIES = ("deepcopy", "copy.deepcopy")


@dataclass
class PythonCall:
    """A call that is not followed: its function as written, its arguments, the module that it is imported from."""

    function: str
    where: str
    arguments: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    module: str = ""


@dataclass(frozen=True)
class _Unknown:
    """A value that would have to be computed."""

    text: str


@dataclass(frozen=True)
class _Placed:
    """A value with the line that states it."""

    value: Any
    where: str


@dataclass(frozen=True)
class PythonSettings:
    """The settings of a configuration. `skipped`: statements that were not evaluated, with their lines."""

    settings: tuple[Setting, ...]
    skipped: tuple[str, ...]


def python_settings(path: Path, function: str | None, kinds: Collection[str] = ()) -> PythonSettings:
    """Return the settings of a function that returns a call with keywords, such as
    `Trainer.Config(parallelism=ParallelismConfig(...))`, or of the module's assignments. Raises InputError with the
    line.

    A keyword is a setting `section.name`; a first argument of a class or of `model_registry` is the value of its name,
    and the value of another function is unknown. `kinds`: sections whose value is the name of the class or function
    that is called, such as `FullAC` of `FullAC.Config()`. A call `model_registry(...)` also has the setting
    `NAME.module`, the module that the function is imported from. A setting `NAME.**`, of an unknown value, stands for
    the options that a call or a dictionary which is not evaluated may have.
    """
    text = text_of(path)
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}:{getattr(error, 'lineno', 0) or 1}: not Python, or truncated: {error}") from None
    try:
        return _PythonFile(path, module, kinds).settings(function)
    except RecursionError:
        raise InputError(f"{path}: expressions nested too deep to be read") from None


class _PythonFile:
    """The functions and imports of a Python file."""

    def __init__(self, path: Path, module: ast.Module, kinds: Collection[str]) -> None:
        self.path, self.module, self.kinds = path, module, kinds
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.imported = {
            name.asname or name.name: (source, name.name)
            for node in ast.walk(module)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for source in [f"{'.' * node.level}{node.module or ''}" if isinstance(node, ast.ImportFrom) else ""]
            for name in node.names
        }
        self.constants: dict[str, Any] = {}
        self.skipped: list[str] = []
        self.calls = 0

    def settings(self, function: str | None) -> PythonSettings:
        """Return the settings of a function, or of the module if it has none."""
        public = {name for name in self.functions if not name.startswith("_")} or set(self.functions)
        if function is None and len(public) > 1:
            names = ", ".join(name for name in self.functions if name in public)
            raise InputError(f"{self.path}: it has several configurations; name one: {self.path}:NAME, of {names}")
        if function is not None and function not in self.functions:
            raise InputError(f"{self.path}: no function {function}; it has {', '.join(self.functions) or 'none'}")
        name = function or next(iter(public), None)
        roots: dict[str, Any] = {}
        if name is None:
            self._body(self.module.body, roots, DEEPEST)
        else:
            self.constants = self._constants()
            roots[""] = self._run(self.functions[name], {}, DEEPEST)
            if not isinstance(roots[""], PythonCall):
                raise InputError(f"{self.path}:{self.functions[name].lineno}: {name} returns no configuration")
            self._refuse_other_file(name, roots[""])
        settings: dict[str, Setting] = {}
        for number, at_number in enumerate(
            setting for key, value in roots.items() for setting in self._root_settings(key, value)
        ):
            if number >= MOST_SETTINGS:
                raise InputError(f"{self.path}: more than {MOST_SETTINGS:,} values; a configuration has fewer")
            settings[at_number.option] = at_number
        return PythonSettings(tuple(settings.values()), tuple(self.skipped))

    def _refuse_other_file(self, name: str, root: PythonCall) -> None:
        """Raise InputError if a configuration is made by a function of another file, whose values are not known."""
        if _is_function(root.function):
            at = f" of {module}" if (module := self._module(root.function)) else ""
            raise InputError(
                f"{root.where}: {name} takes its values from {root.function}(...){at}, which is no function at the top "
                f"level of this file; name a configuration of the file that has its values"
            )

    def _module(self, function: str) -> str:
        """Return the module of a function that is imported, or that is an attribute of an imported module."""
        if function in self.imported:
            return self.imported[function][0]
        source, name = self.imported.get(function.rpartition(".")[0], ("", ""))
        return f"{source}{'.' if source.strip('.') else ''}{name}"

    def _constants(self) -> dict[str, Any]:
        """Return the names that the module assigns. A name that another statement of the module may assign, such as a
        condition, has an unknown value, and the statement is named."""
        scope: dict[str, Any] = {}
        for statement in self.module.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                self._body([statement], scope, DEEPEST)
            elif not isinstance(statement, _DECLARATIONS):
                names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
                where = f"{self.path}:{statement.lineno}"
                self.skipped.append(f"{where}: {ast.unparse(statement).splitlines()[0][:60]} is not evaluated")
                scope |= {name: _Unknown(f"{name}, which line {statement.lineno} may set") for name in stored}
        return scope

    def _run(self, function: ast.FunctionDef, scope: dict[str, Any], depth: int) -> Any:
        """Return the result of a function of the file; `scope`: its arguments."""
        self.calls += 1
        if depth <= 0 or self.calls > _MOST_CALLS:
            raise InputError(f"{self.path}:{function.lineno}: functions that call each other without end")
        return self._body(function.body, scope, depth - 1)

    def _body(self, body: list[Any], scope: dict[str, Any], depth: int) -> Any:
        for statement in body:
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self._value(statement.value, scope, depth)
            if isinstance(statement, ast.Assign):
                value = self._value(statement.value, scope, depth)
                for target in statement.targets:
                    self._assign(target, value, scope, statement.lineno)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self._value(statement.value, scope, depth), scope, statement.lineno)
            elif isinstance(statement, ast.AugAssign):
                result = self._value(ast.BinOp(statement.target, statement.op, statement.value), scope, depth)
                self._assign(statement.target, result, scope, statement.lineno)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._statement_call(statement.value, scope, depth)
            elif not isinstance(statement, _DECLARATIONS):
                what = type(statement).__name__.lower()
                raise InputError(
                    f"{self.path}:{statement.lineno}: a statement `{what}` would have to be executed; supported: "
                    f"assignments, calls of functions of the file, and one returned call"
                )
        return None

    def _statement_call(self, node: ast.Call, scope: dict[str, Any], depth: int) -> None:
        """Follow a call whose value is not used; what cannot be followed is named."""
        why = ""
        if isinstance(node.func, ast.Name) and (function := self.functions.get(node.func.id)):
            try:
                self._run(function, self._bound(function, node, scope, depth), depth)
                return
            except InputError as error:
                why = f" ({'; '.join(error.problems)})"
        self.skipped.append(f"{self._where(node)}: {ast.unparse(node)[:60]} is not evaluated{why}")

    def _where(self, node: ast.expr) -> str:
        return f"{self.path}:{node.lineno}"

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any], line: int) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = _plain(value)
            if not isinstance(parts, list) or len(parts) != len(target.elts):
                parts = [_Unknown(ast.unparse(target))] * len(target.elts)
            for part_target, part in zip(target.elts, parts, strict=True):
                self._assign(part_target, part, scope, line)
            return
        if not all(isinstance(node, ast.Name | ast.Attribute | ast.expr_context) for node in ast.walk(target)):
            raise InputError(f"{self.path}:{line}: {ast.unparse(target)[:60]} = ... would have to be executed")
        *sections, name = ast.unparse(target).split(".")
        placed = _placed(value, f"{self.path}:{line}")
        if not sections:
            scope[name] = placed.value if isinstance(placed.value, PythonCall) else placed
            return
        holder = _plain(scope.setdefault(sections[0], PythonCall("", placed.where)))
        if not isinstance(holder, PythonCall):
            return
        for section in sections[1:]:
            inner = _plain(holder.keywords.get(section))
            if not isinstance(inner, PythonCall):
                inner = holder.keywords[section] = PythonCall("", placed.where)
            holder = inner
        holder.keywords[name] = placed

    def _value(self, node: ast.expr, scope: dict[str, Any], depth: int) -> Any:
        """Return the value of an expression: a constant, a list, a call as data, or an unknown value."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            elements, unknown = self._elements(node.elts, scope, depth)
            return [_plain(element) for element in elements] if unknown is None else _Unknown(ast.unparse(node))
        if isinstance(node, ast.Dict):
            keys = [key_node.value for key_node in node.keys if isinstance(key_node, ast.Constant)]
            if len(keys) < len(node.keys):
                return _Unknown(ast.unparse(node))
            named = [self._placed_value(value_node, scope, depth) for value_node in node.values]
            return PythonCall("", self._where(node), keywords=dict(zip(map(str, keys), named, strict=True)))
        if isinstance(node, ast.Name):
            return scope.get(node.id, self.constants.get(node.id, _Unknown(node.id)))
        if isinstance(node, ast.Attribute):
            base = _plain(self._value(node.value, scope, depth))
            keyword = base.keywords.get(node.attr) if isinstance(base, PythonCall) else None
            return _Unknown(ast.unparse(node)) if keyword is None else keyword
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = _plain(self._value(node.operand, scope, depth))
            return -operand if _is_number(operand) else _Unknown(ast.unparse(node))
        if isinstance(node, ast.BinOp):
            left, right = (_plain(self._value(operand, scope, depth)) for operand in (node.left, node.right))
            apply = _OPERATORS.get(type(node.op))
            if apply and _is_number(left) and _is_number(right) and (right or not isinstance(node.op, ast.Div)):
                try:
                    return apply(left, right)
                except (ArithmeticError, ValueError):
                    pass
            return _Unknown(ast.unparse(node))
        return self._call(node, scope, depth) if isinstance(node, ast.Call) else _Unknown(ast.unparse(node))

    def _call(self, node: ast.Call, scope: dict[str, Any], depth: int) -> Any:
        name = ast.unparse(node.func)
        if function := self.functions.get(name):
            return self._run(function, self._bound(function, node, scope, depth), depth)
        arguments, unknown = self._elements(node.args, scope, depth)
        keywords = self._keywords(node, scope, depth)
        if name == "dict":
            name, pairs = "", _plain(arguments[0]) if arguments else unknown
            if isinstance(pairs, PythonCall) and not pairs.function:
                keywords = pairs.keywords | keywords
            elif pairs is not None:
                keywords = {"**": _Placed(_Unknown(ast.unparse(node)), self._where(node))} | keywords
            arguments = []
        elif unknown is not None:
            keywords["**"] = unknown
        numbers = [value for argument in arguments if _is_number(value := _plain(argument))]
        own = name in _FUNCTIONS and name not in self.imported
        if own and not keywords and len(numbers) == len(arguments) >= 1 + (name != "int"):
            try:
                return _FUNCTIONS[name](*numbers)
            except TypeError:
                pass
        if name in (*_COPIES, *_DEEP_COPIES) and arguments and isinstance(base := _plain(arguments[0]), PythonCall):
            result = deepcopy(base) if name in _DEEP_COPIES else replace(base, keywords=dict(base.keywords))
            result.keywords |= keywords
            return result
        return PythonCall(name, self._where(node), arguments, keywords, self._module(name))

    def _elements(self, nodes: list[ast.expr], scope: dict[str, Any], depth: int) -> tuple[list[Any], _Placed | None]:
        """Return the values of arguments or of a list's elements, with the elements of `*name` where the file has them;
        and the first `*name` that is unknown, or None. The values end at it."""
        result: list[Any] = []
        for node in nodes:
            value = self._value(node.value if isinstance(node, ast.Starred) else node, scope, depth)
            if not isinstance(node, ast.Starred):
                result.append(value)
            elif isinstance(parts := _plain(value), list):
                if len(result) + len(parts) > MOST_SETTINGS:
                    raise InputError(f"{self._where(node)}: more than {MOST_SETTINGS:,} values in a list")
                result += parts
            else:
                return result, _Placed(_Unknown(ast.unparse(node)), self._where(node))
        return result, None

    def _placed_value(self, node: ast.expr, scope: dict[str, Any], depth: int) -> _Placed:
        return _placed(self._value(node, scope, depth), self._where(node))

    def _keywords(self, node: ast.Call, scope: dict[str, Any], depth: int) -> dict[str, Any]:
        """Return the keywords of a call. The keys of `**name` are included where the file has them; other `**name` is
        the keyword `**` with an unknown value."""
        result: dict[str, Any] = {}
        for keyword in node.keywords:
            placed = self._placed_value(keyword.value, scope, depth)
            if keyword.arg:
                result[keyword.arg] = placed
            elif isinstance(placed.value, PythonCall) and not placed.value.function:
                result |= placed.value.keywords
            else:
                result["**"] = _Placed(_Unknown(f"**{ast.unparse(keyword.value)}"), placed.where)
        return result

    def _bound(self, function: ast.FunctionDef, node: ast.Call, scope: dict[str, Any], depth: int) -> dict[str, Any]:
        """Return the arguments of a call by the names of the function's parameters. A parameter that an unknown `*name`
        or `**name` may give is unknown, unless it is also given by position or by name."""
        arguments = function.args
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        names = [*positional, *(argument.arg for argument in arguments.kwonlyargs)]
        given, unknown = self._elements(node.args, scope, depth)
        keywords = self._keywords(node, scope, depth)
        bound: dict[str, Any] = dict.fromkeys(names, _Unknown("an argument"))
        for name, default in zip(positional[::-1], arguments.defaults[::-1], strict=False):
            bound[name] = self._value(default, {}, depth)
        for argument, stated in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if stated is not None:
                bound[argument.arg] = self._value(stated, {}, depth)
        if unknown is not None:
            bound |= dict.fromkeys(positional, unknown)
        if "**" in keywords:
            bound |= dict.fromkeys(names, keywords["**"])
        bound |= dict(zip(positional, given, strict=False))
        bound |= {name: value for name, value in keywords.items() if name in names}
        if arguments.vararg is not None:
            bound[arguments.vararg.arg] = [*map(_plain, given[len(positional) :])] if unknown is None else unknown
        if arguments.kwarg is not None:
            rest = {name: value for name, value in keywords.items() if name not in names}
            bound[arguments.kwarg.arg] = PythonCall("", self._where(node), keywords=rest)
        return bound

    def _root_settings(self, name: str, value: Any) -> Iterator[Setting]:
        """Yield the settings of the configuration itself, whose keywords are the sections."""
        plain = _plain(value)
        if isinstance(plain, PythonCall) and plain.keywords:
            for key, inner in plain.keywords.items():
                yield from self._flat(key, inner, plain.where, DEEPEST)
        elif name:
            yield from self._flat(name, value, str(self.path), DEEPEST)

    def _flat(self, name: str, value: Any, where: str, depth: int) -> Iterator[Setting]:
        if isinstance(value, _Placed):
            value, where = value.value, value.where
        if depth <= 0:
            raise InputError(f"{where}: nested more than {DEEPEST} deep")
        if isinstance(value, _Unknown):
            yield Setting(name, "", where, f"{where}: {value.text[:60]} would have to be executed")
        elif isinstance(value, PythonCall):
            registers, computed = value.function.endswith("model_registry"), _is_function(value.function)
            first = next((_plain(argument) for argument in value.arguments), None)
            if registers and first is None:
                first = _plain(value.keywords.get("flavor"))
            if registers and isinstance(first, _Unknown):
                yield Setting(name, "", value.where, f"{value.where}: {first.text[:60]} would have to be executed")
            elif computed and not registers and "." in name:
                yield Setting(name, "", where, f"{where}: {value.function[:60]}(...) would have to be executed")
                return
            elif isinstance(first, str | int | float) and (registers or not computed):
                yield Setting(name, first, value.where)
            elif name in self.kinds:
                yield Setting(name, value.function.removesuffix(".Config"), value.where)
            elif computed and not registers:
                text = f"{value.where}: {name} = {value.function}(...) of another file is not evaluated"
                self.skipped.append(text)
                yield Setting(f"{name}.**", "", value.where, text)
            elif any(isinstance(_plain(argument), _Unknown | PythonCall) for argument in value.arguments):
                text = f"{value.where}: the arguments by position of {value.function[:60]} would have to be executed"
                yield Setting(f"{name}.**", "", value.where, text)
            if registers:
                yield Setting(f"{name}.module", value.module, value.where)
            for key, inner in value.keywords.items():
                yield from self._flat(f"{name}.{key}", inner, value.where, depth - 1)
        elif isinstance(value, list):
            yield Setting(
                name, [item.function if isinstance(item, PythonCall) else _text(item) for item in value], where
            )
        else:
            yield Setting(name, "none" if value is None and name in self.kinds else value, where)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Placed) else value


def _placed(value: Any, where: str) -> _Placed:
    return value if isinstance(value, _Placed) else _Placed(value, where)


def _is_function(name: str) -> bool:
    """Return whether a name is a function's, in lower case, and not a class's such as `Trainer.Config`."""
    return name.rpartition(".")[2][:1].islower()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _text(value: Any) -> str:
    return value.text if isinstance(value, _Unknown) else str(value)
