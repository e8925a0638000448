"""Check names and words of src and docs; `make lint` runs it.

python benchmarks/names.py

- A class name is defined once in src; a leading underscore does not make it another name.
- No variable, parameter, attribute or function of src has a name of `NAMES`.
- No function of src, benchmarks, docs, examples or tests has a name of `PARTICLES` or one that starts with `of_`.
- No docstring of src starts with a word of `FRAGMENTS`, which starts no sentence with a subject and a verb.
- No phrase of `PHRASES` stands in a docstring, a help, an error or another text of src or, outside of code blocks, on
  a page of docs.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = (
    "that of",
    "those (?:of|that|which|in|with|whose)",
    "of (?:which|whom|those)",
    "the ones? (?:of|that|which|in|with)",
    "(?:as|like) (?:it|they|that|those) (?:is|are) with",
    "what (?:is|are|was|were|there is)",
    "(?:of|by|from|in|with|for|than|at|on|to) what",
    "but for",
    "so (?:many|much)",
    "beside",
    "in (?:the )?place of",
    "(?:tells?|told)",
    "(?:say|says|said) (?:so|what|which|how|why|where|by|that|of)",
    "(?:go|goes|going|went) on",
    "(?:deals?|dealt) (?:to|out|over)",
    "(?:begins?|began|begun)",
    "anew",
    "nobody",
    r"(?<=#\s)what",
)
"""Regular expressions of phrases that the documentation does not use; case does not matter. The last one is
of headings."""
NAMES = ("asked", "each", "found", "held", "here", "mine", "of", "said", "there", "told", "wrong")
"""Names that do not name the thing; a leading underscore does not make them other names."""
PARTICLES = ("at", "by", "from", "of", "on", "with")
"""Names that no function has alone; a variable may be called `at`."""
FRAGMENTS = (
    "Also",
    "As",
    "Called",
    "For",
    "How",
    "If",
    "Not",
    "Of",
    "That",
    "What",
    "Where",
    "Whether",
    "Which",
    "Why",
)
"""First words of docstrings that name neither an action nor a thing."""
FOLDERS = ("src", "benchmarks", "docs", "examples", "tests")
NOT_YET = ("src/shardwright/cost", "src/shardwright/dry_run", "src/shardwright/planner/operations.py")
"""Folders and files whose functions still have such names, or their docstrings such words."""
MADE = ("docs/checkers.md", "docs/mutations.md", "docs/run-file.md", "docs/measured-runs.md")
"""Pages whose words come from tests and from descriptions of keys; CHANGELOG.md keeps its entries as they were."""


TEXTS_NOT_YET = (*NOT_YET, "src/shardwright/planner")
"""Folders and files in whose texts, other than docstrings and helps, such phrases still stand."""


def main() -> None:
    """Print every problem, and exit with 1 if there is one."""
    problems = [*repeated_classes(ROOT), *used_names(ROOT, NAMES), *nameless_functions(ROOT), *fragments(ROOT)]
    problems += used_phrases(ROOT, PHRASES)
    print("\n".join(problems) or "each class name is defined once, and no name or phrase of the lists is used")
    sys.exit(bool(problems))


def repeated_classes(root: Path) -> Iterator[str]:
    """Class names that are defined more than once in `root`/src, each with its places."""
    places = defaultdict(list)
    for path in _sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(root)}:{node.lineno}")
    for name, where in places.items():
        if len(where) > 1:
            yield f"class {name} is defined {len(where)} times: {', '.join(where)}"


def used_names(root: Path, names: Collection[str]) -> Iterator[str]:
    """Definitions in `root`/src with one of `names`, each with its place."""
    for path in _sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(attr=name, ctx=ast.Store())
                    | ast.arg(arg=name)
                    | ast.alias(asname=str(name))
                    | ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                ) if name.lstrip("_") in names:
                    yield f"{path.relative_to(root)}:{node.lineno}: {name!r} does not name the thing"


def nameless_functions(root: Path) -> Iterator[str]:
    """Functions, methods and assigned lambdas whose name neither is a verb nor names the result, with their places."""
    for path in _sources(root, *FOLDERS):
        if _is_in(root, path, NOT_YET):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda())
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Lambda())
                ) if (bare := name.lstrip("_")) in PARTICLES or bare.startswith("of_"):
                    place = f"{path.relative_to(root)}:{node.lineno}"
                    yield f"{place}: {name!r} is neither a verb nor the name of what the function returns"


def fragments(root: Path) -> Iterator[str]:
    """Docstrings of modules, classes and functions of `root`/src that start with a word of `FRAGMENTS`."""
    for path in _sources(root):
        for node in [] if _is_in(root, path, NOT_YET) else ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                word = re.match(r"\w*", ast.get_docstring(node) or "")
                if word and word[0] in FRAGMENTS:
                    place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}"
                    yield f"{place}: a docstring starts with {word[0]!r}; start with a verb or with the thing"


def used_phrases(root: Path, phrases: Sequence[str]) -> Iterator[str]:
    """Phrases in the texts of `root`/src and on the pages of `root`, each with its place."""
    texts = [
        (path, line, text)
        for path in _sources(root)
        for line, text in (_described if _is_in(root, path, TEXTS_NOT_YET) else _texts)(path)
    ]
    pages = [page for page in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]) if page.name != "CHANGELOG.md"]
    pages = [page for page in pages if str(page.relative_to(root)) not in MADE]
    texts += [(path, 1, _without_code(path.read_text(encoding="utf-8"))) for path in pages]
    for path, line, text in texts:
        for phrase in phrases:
            # A phrase may go over the end of a line.
            for match in re.finditer(rf"\b{phrase}\b".replace(" ", r"\s+"), text, re.IGNORECASE):
                place = f"{path.relative_to(root)}:{line + text.count(chr(10), 0, match.start())}"
                yield f"{place}: {' '.join(match[0].split())!r} is a phrase that texts and pages do not use"


def _sources(root: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders or ("src",) for path in (root / folder).rglob("*.py"))


def _is_in(root: Path, path: Path, names: Sequence[str]) -> bool:
    return any(path.is_relative_to(root / name) for name in names)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of several words: docstrings, helps, errors, log lines and pages."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in sorted(texts, key=lambda node: node.lineno):
        if " " in node.value:
            yield node.lineno, _without_code(node.value)


def _described(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, also below attributes and constants, and of the help of each option and
    key: the words among the arguments of a call of `option`, `flag` or `argument`, or given as `help` or
    `description`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, _without_code(text)
            case ast.Call(func=ast.Name(id="option" | "flag" | "argument"), args=words):
                yield from map(_joined, words)
            case ast.keyword(arg="help" | "description", value=words):
                yield _joined(words)


def _joined(words: ast.expr) -> tuple[int, str]:
    """Return line and text of the words of an expression, without the values that an f-string inserts."""
    texts = [part.value for part in ast.walk(words) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return words.lineno, _without_code("".join(texts))


def _without_code(page: str) -> str:
    """Return a page or docstring without code blocks, code in backticks and targets of links, with as many lines."""
    page = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", "_", page)


if __name__ == "__main__":
    main()
