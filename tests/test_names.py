"""Proves that the check of names and words sees what it is for."""

import ast
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from tests.test_docs import ROOT

CHECK = runpy.run_path(str(ROOT / "benchmarks" / "names.py"))


def written(root: Path, **files: str) -> None:
    (root / "src").mkdir()
    (root / "docs").mkdir()
    for name, text in files.items():
        path = root / ("docs" if name == "page" else "src") / f"{name}.{'md' if name == 'page' else 'py'}"
        path.write_text(text, encoding="utf-8")


def test_a_class_name_that_is_defined_twice_is_named_with_both_places(tmp_path: Path):
    written(tmp_path, a="class Options: ...\n", b="\nclass _Options:\n    class Inner: ...\n", c="class Other: ...\n")
    assert list(CHECK["repeated_classes"](tmp_path)) == ["class Options is defined 2 times: src/a.py:1, src/b.py:2"]


def test_a_name_of_the_list_is_seen_where_it_is_defined(tmp_path: Path):
    code = """
        for found in rows:
            print(found.held, held=1)
        rows = [each for each in found]
        def _told(self, wrong):
            self._mine = lambda asked: asked
        class Box:
            of: int
        import json as said
        async def here(): ...
    """
    written(tmp_path, a=dedent(code))
    result = [line.partition(": ")[2].partition(" does")[0] for line in CHECK["used_names"](tmp_path, CHECK["NAMES"])]
    assert sorted(result) == [
        "'_mine'",
        "'_told'",
        "'asked'",
        "'each'",
        "'found'",
        "'here'",
        "'of'",
        "'said'",
        "'wrong'",
    ]


@pytest.mark.parametrize("folder", CHECK["FOLDERS"])
def test_a_function_that_is_neither_a_verb_nor_a_result_is_seen_however_it_is_defined(tmp_path: Path, folder: str):
    code = """
        def _at(at, of_rank=1): ...
        async def on(): ...
        of_line = lambda row: row
        of_row: Callable = lambda row: row
        class Box:
            of_box: int
            def of_rank(self): ...
            @classmethod
            def of(cls):
                def _of_part(): ...
            @property
            def of_pairs(self): ...
        def on_step(): ...
        def often(): ...
    """
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.py").write_text(dedent(code), encoding="utf-8")
    result = [line.partition(": ")[2].split("'")[1] for line in CHECK["nameless_functions"](tmp_path)]
    assert sorted(result) == ["_at", "_of_part", "of", "of_line", "of_pairs", "of_rank", "of_row", "on"]


def test_a_docstring_that_is_a_fragment_is_seen_in_modules_classes_functions_and_properties(tmp_path: Path):
    code = """
        class Box:
            "How it is packed."
            "Of nothing."
            @property
            def full(self):
                "Whether there is room."
            async def close(self):
                'Called at the end.'
        def whether():
            "Return whether."
    """
    written(tmp_path, a='"Which rank has which tokens."' + dedent(code))
    result = [line.partition(": ")[0] for line in CHECK["fragments"](tmp_path)]
    assert sorted(result) == ["src/a.py:1", "src/a.py:2", "src/a.py:6", "src/a.py:8"]


def test_a_phrase_is_found_in_docstrings_texts_and_pages_but_not_in_code(tmp_path: Path):
    function = 'def f():\n    """One line.\n\n    Sums those\n    of n."""\n    those_of = 1\n'
    code = function + 'N = 1\n"""Those of m."""\n'
    written(tmp_path, a=code, page="Here.\n```\nthose of\n```\nThose of k, those offered.\n")
    found = [line.partition(": ")[0] for line in CHECK["used_phrases"](tmp_path, ["those of"])]
    assert found == ["src/a.py:4", "src/a.py:8", "docs/page.md:5"]


def test_a_phrase_is_found_in_the_help_of_options_and_keys_and_in_errors_also_over_several_lines(tmp_path: Path):
    code = """
        width: int = option(1, "the width; "
            f"those of {n} rows", "N")
        depth: bool = flag("those of the depth")
        key: int = Field(1, description="those of the key", alias="those")
        raise InputError(f"{n} of those "
            "of n")
    """
    written(tmp_path, a=dedent(code), page="Here.\n")
    found = [line.partition(": ")[0] for line in CHECK["used_phrases"](tmp_path, ["those of"])]
    assert sorted(found) == ["src/a.py:2", "src/a.py:4", "src/a.py:5", "src/a.py:6"]


PROGRAMS = [path for folder in ("benchmarks", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_program_beside_the_package_imports_only_names_that_the_package_has(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardwright":
            module = import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), (node.lineno, name.name)
