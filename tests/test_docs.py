"""Proves that the documentation tells what is there: run files, commands, links, names of files, functions and keys.

Nothing that is shown is run here; a command is read by the parser of the command line itself.
"""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwright import DistributedModel, Layout
from shardwright.cli.main import OF_TWO_WORDS, app
from shardwright.config import parse
from shardwright.config.reference import keys

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("README.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
REPO_PATH = re.compile(r"(?:src|tests|docs|examples|benchmarks)/[\w./*-]*\w")
BEFORE_VERB = re.compile(r"(?:^|\s)(?:\S*/)?(?:-m )?shardwright(?=\s|$)")
# What a fragment of a run file is laid over, so that its keys are checked too.
REST = {
    "out": "runs/x",
    "steps": 1_000_000,
    "data": {"path": "data/x"},
    "batch": {"seq_len": 128, "global_batch": 3 * 2**12},
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pages() -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=name_of)


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in BLOCK.findall(text) if language in languages]


def inline(text: str) -> list[str]:
    return [" ".join(code.split()) for code in INLINE.findall(BLOCK.sub("", text))]


def command_lines(text: str) -> Iterator[list[str]]:
    """Arguments of every `shardwright` in shell text, also behind torchrun, srun or python -m."""
    for line in text.replace("\\\n", " ").splitlines():
        found = BEFORE_VERB.search(line)
        if found and not line.startswith("#"):
            arguments = shlex.split(line[found.end() :], comments=True)
            yield [argument for argument in arguments if argument != "&"]


def walk(arguments: list[str]) -> tuple[Any, list[str]]:
    """The command that arguments name, and what is left for it; raises for a verb that is not there."""
    command: Any = typer.main.get_command(app)
    if " ".join(arguments[:2]) in OF_TWO_WORDS:
        _, found, rest = command.resolve_command(None, arguments)
        return found, rest
    while arguments and hasattr(command, "commands") and not arguments[0].startswith("-"):
        assert arguments[0] in command.commands, (
            f"{arguments[0]!r} is no verb; there are: {', '.join(command.commands)}"
        )
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command, arguments


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}


def check_command(arguments: list[str]) -> None:
    """Raises what the command line itself would complain of, and for a --set of a key that is not there."""
    command, rest = walk(arguments)
    if "--help" in rest or "--version" in rest:
        return
    context = command.context_class(command, info_name="shardwright")
    command.parse_args(context, list(rest))
    axes = "".join(path.read_text() for path in ROOT.glob("examples/trainers/*.py")) if "--trainer" in rest else ""
    for override in context.params.get("overrides") or ():
        key = override.partition("=")[0]
        key = f"model.{key}" if key.startswith("mup.") else key  # [mup] is another name of [model.mup]
        assert key in known_keys() or f'"{key}"' in axes, f"--set {override}: there is no such key"


@cache
def known_keys() -> frozenset[str]:
    return frozenset(key.path for key in keys())


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, their methods and assigned names of a Python file, as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            body = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{inner.name}" for inner in body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = laid_over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


@pages()
def test_every_run_file_shown_is_a_valid_one(page: Path):
    for block in blocks(page.read_text(encoding="utf-8"), "toml"):
        table = tomllib.loads(block)
        if (
            "extensions" in table
        ):  # what they register would stay in this process; tests/extend has that file, and runs it
            continue
        parse(table if "steps" in table else laid_over(REST, table), source=name_of(page))


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_every_example_is_a_valid_run_file_and_the_commands_in_it_exist(example: Path):
    text = example.read_text(encoding="utf-8")
    parse(tomllib.loads(text), source=name_of(example))
    for line in text.splitlines():
        if line.startswith("#   "):
            for arguments in command_lines(line.removeprefix("#   ")):
                check_command(arguments)


@pages()
def test_every_command_shown_is_one_that_the_command_line_takes(page: Path):
    text = page.read_text(encoding="utf-8")
    for block in blocks(text, "sh", "console"):
        for arguments in command_lines(block):
            check_command(arguments)
    for code in inline(text):
        if re.match(r"shardwright [a-z]", code):
            command, rest = walk(shlex.split(code)[1:])
            unknown = {part.partition("=")[0] for part in rest if part.startswith("--")} - options_of(command)
            assert not unknown, f"`{code}`: no option {', '.join(unknown)}"


@pages()
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path):
    for target in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target}: there is no {name_of(linked)}"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading; there are: {', '.join(anchors(linked))}"


@pages()
def test_every_file_and_function_named_is_there(page: Path):
    for code in inline(page.read_text(encoding="utf-8")):
        for found in REPO_PATH.finditer(code):
            before, after = code[: found.start()], code[found.end() :]
            if before.endswith(("/", "-", ".")) or before[-1:].isalnum():
                continue  # the middle of another path
            path = ROOT / found[0]
            assert path.exists() or any(ROOT.glob(found[0])), f"`{code}`: there is no {found[0]}"
            if symbol := re.match(r":([A-Za-z_][\w.]*)", after):
                assert symbol[1] in names_in(path), f"`{code}`: {found[0]} has no {symbol[1]}"


@pages()
def test_no_output_shown_has_a_line_number_of_our_code_which_the_next_change_moves(page: Path):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'(?<!site-packages/)\b(?:src/shardwright|parallel|training)/[\w/]+\.py(?::|", line )\d', text)


@pages()
def test_every_key_named_is_one_of_the_run_file(page: Path):
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    # Names of keys alone, as `layout.zero` or `layout.zero = 2`; config.py and the like are files.
    for code in inline(page.read_text(encoding="utf-8")):
        named = re.match(rf"(({'|'.join(sections)})\.[a-z_0-9]+)(?:\s*=|$)", code)
        if named and not named[1].endswith((".py", ".jsonl", ".safetensors")):
            section, _, name = named[1].partition(".")
            of_python = hasattr({"layout": Layout, "model": DistributedModel}.get(section), name)
            assert of_python or named[1] in known_keys(), f"`{code}`: there is no such key"


@pages()
def test_every_import_shown_works(page: Path):
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("name", ["make_run_file", "make_api", "make_mutations"])
def test_a_reference_that_is_made_from_the_code_is_up_to_date(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    maker = import_module(name)
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), f"run: python docs/{name}.py"


def test_the_columns_of_tables_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    maker = import_module("make_measured_runs")
    for name in maker.PAGES:
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert text == maker.page(name), "run: python docs/make_measured_runs.py"


def test_the_picture_of_the_packages_is_up_to_date(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    maker = import_module("draw_packages")
    assert maker.PICTURE.read_bytes() == maker.picture(), "run: python docs/draw_packages.py"


def test_the_options_of_other_systems_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    maker = import_module("make_coming_from")
    for name in maker.PAGES:
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert text == maker.page(name, maker.shown_outputs(name)), "run: python docs/make_coming_from.py"


def test_the_index_names_every_page():
    linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize(
    "arguments",
    [["trian", "run.toml"], ["train", "run.toml", "--sett", "steps=1"], ["train", "run.toml", "--set", "stepz=1"]],
    ids=" ".join,
)
def test_a_command_that_would_be_refused_is_found(arguments: list[str]):
    with pytest.raises(Exception, match=r"trian|sett|stepz"):
        check_command(arguments)
