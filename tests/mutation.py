"""Re-inject a known bug: change our own code for the length of a `with`, to see that a test notices.

A mutation names a function and says which statements or which expression of it becomes what, as Python. Code is
compared as syntax trees: spaces, line breaks, quotes, redundant parentheses and comments do not matter, but names do.
"""

import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """`before`, which has to be in the function exactly once, becomes `after`.

    `function` is `module:qualified.name`, of a module in which it is looked up when it is called. Where both texts are
    expressions, an expression is changed, wherever it stands; otherwise a run of whole statements of one block is.
    """

    function: str
    before: str
    after: str

    def applied_to(self, tree: ast.AST) -> ast.AST:
        """A copy of a function's syntax tree with the bug in it. AssertionError if there is nothing to change, or more
        than one place."""
        expressions = [_as_expression(text) for text in (self.before, self.after)]
        if all(expressions):
            change: _Change = _ChangeExpression(*expressions)
        else:
            change = _ChangeStatements(*(ast.parse(textwrap.dedent(text)).body for text in (self.before, self.after)))
        changed = change.visit(copy.deepcopy(tree))
        assert change.n_found == 1, f"{self.function} holds {change.n_found} of {self.before!r}:\n{ast.unparse(tree)}"
        assert ast.unparse(changed) != ast.unparse(tree), f"{self.function}: {self.after!r} changes nothing"
        return ast.fix_missing_locations(changed)


@contextmanager
def mutated(*mutations: Mutation) -> Iterator[None]:
    """Every mutation in place; each function is compiled again in its own module, so that the bug is really our code's.

    An assertion fails if a mutation no longer applies: it must not quietly stop mutating.
    """
    originals: dict[tuple[Any, str], Any] = {}
    trees: dict[Any, ast.AST] = {}
    applied: set[tuple[Any, str]] = set()
    codes: dict[Any, tuple[Any, ...]] = {}
    try:
        for mutation in mutations:
            module_name, _, path = mutation.function.partition(":")
            scope, _, name = path.rpartition(".")
            owner = resolve_name(f"{module_name}:{scope}" if scope else module_name)
            original = originals.setdefault((owner, name), inspect.getattr_static(owner, name))
            function: Any = original.fget if isinstance(original, property) else original
            module = sys.modules[inspect.unwrap(function).__module__]
            if original not in trees:  # a function may have a name in several modules, and a bug name each of them
                trees[original] = ast.parse(textwrap.dedent(inspect.getsource(function)))
            if (original, mutation.before) not in applied:
                trees[original] = mutation.applied_to(trees[original])
            applied.add((original, mutation.before))
            tree = trees[original]
            replacement = _compiled(tree, owner, name, module.__dict__)
            if _is_plain(original) and _is_plain(replacement):
                codes.setdefault(original, (original.__code__, original.__defaults__, original.__kwdefaults__))
                _set_code(original, replacement.__code__, replacement.__defaults__, replacement.__kwdefaults__)
            else:
                setattr(owner, name, replacement)
        yield
    finally:
        for original, code in codes.items():
            _set_code(original, *code)
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def _is_plain(function: Any) -> bool:
    """Return whether a function's code can be exchanged in place: tables that hold the function then run the bug."""
    return inspect.isfunction(function) and not function.__code__.co_freevars


def _set_code(function: Any, code: Any, defaults: Any, keyword_defaults: Any) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keyword_defaults


def _compiled(tree: Any, owner: Any, name: str, namespace: dict[str, Any]) -> Any:
    """The function of a tree, made inside another that holds `__class__`: without it `super()` finds no class. There it
    has another name, so that a method may call a function of its module that is named as it is."""
    inner = f"mutated_{name}"
    outer = ast.parse(f"def make(__class__):\n    return {inner}")
    body = copy.deepcopy(tree.body)
    body[0].name = inner
    outer.body[0].body[:0] = body  # type: ignore[attr-defined]
    space: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(outer), f"<mutated {name}>", "exec"), namespace, space)
    found = space["make"](owner)
    (found.fget if isinstance(found, property) else found).__name__ = name
    return found


def _as_expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


class _Change(ast.NodeTransformer):
    n_found = 0


class _ChangeExpression(_Change):
    def __init__(self, before: Any, after: Any) -> None:
        self.before, self.after = ast.unparse(before), after

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and ast.unparse(node) == self.before:
            self.n_found += 1
            return copy.deepcopy(self.after)
        return self.generic_visit(node)


class _ChangeStatements(_Change):
    def __init__(self, before: list[ast.stmt], after: list[ast.stmt]) -> None:
        self.before, self.after = [ast.unparse(statement) for statement in before], after

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, self._changed(block))
        return node

    def _changed(self, block: list[Any]) -> list[Any]:
        n, texts = len(self.before), [ast.unparse(statement) for statement in block]
        for at in range(len(block) - n, -1, -1):
            if texts[at : at + n] == self.before:
                self.n_found += 1
                block[at : at + n] = copy.deepcopy(self.after)
        return block
