"""Functions shared by all verbs: printing of errors, tables and JSON, and checks of options."""

import dataclasses
import functools
import inspect
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar, cast

import typer
from rich.table import Table

from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.system import extensions
from shardwright.system.console import LossyStream, PlainConsole, discard_output
from shardwright.system.errors import (
    FullError,
    InputError,
    LayoutError,
    QuietExit,
    ShardwrightError,
    nearest,
    system_limit,
    too_many_files,
)
from shardwright.system.files import (
    is_text,
    parse_json,
    parse_toml,
    problem_of_place,
    read_text,
    reason,
    suffix_problem,
    url_problem,
)
from shardwright.system.processes import in_one_sentence
from shardwright.system.signals import interrupts, leaving_is_failure
from shardwright.system.units import MOST_COUNTED
from shardwright.view import terminal
from shardwright.view.document import VerbDocument

T = TypeVar("T")
MOST_PROBLEMS = 50
"""Most errors that are printed; a damaged table may have an error in every cell."""


PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit code of a verb whose stdout has no reader any more, as shells report it of any command."""
console = PlainConsole(highlight=False, emoji=False)
error_console = PlainConsole(file=cast(IO[str], LossyStream("stderr")), highlight=False, soft_wrap=True, emoji=False)

_EVERY_S = 30.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show the progress of a long verb on stderr: one updated line on a terminal, otherwise a line each half minute."""
    if error_console.is_terminal:
        with error_console.status(what) as status:
            yield status.update
        return
    last_s = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _EVERY_S:
            last_s = time.monotonic()
            error_console.print(line, markup=False)

    yield tell


AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document, and nothing else")]
ModelArgument = Annotated[
    Path, typer.Argument(help="the folder of a run (`out` of its run file), a checkpoint, or a folder of transformers")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Extensions = Annotated[
    list[str] | None,
    typer.Option(
        "--extension",
        metavar="FILE.py",
        help="a Python file or module that registers schedules, optimizers or models of your own, to be imported; run "
        "files may name the file from then on, until it changes; may be repeated",
    ),
]
ConfigurationFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="instead of a run file, the configuration of another system, such as a shell script of Megatron-LM; it is "
        "parsed and not executed; may be repeated for systems that use several files",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key of the run file; may be repeated")
]


def option(default: Any, help: str, metavar: str | None = None, *, name: str = "", **rules: Any) -> Any:
    """Return the default of a parameter, or of a field of a dataclass of options, that is `--PARAMETER`, or `name`.
    `default`: `...` if the option is required; `rules`: other arguments of typer.Option, such as `min`."""
    return _described(default, lambda _: typer.Option(*filter(None, [name]), help=help, metavar=metavar, **rules))


def flag(help: str) -> Any:
    """Return the default, as `option`, of a parameter that is True with `--PARAMETER` and otherwise False."""
    return _described(False, lambda parameter: typer.Option(f"--{parameter.replace('_', '-')}", help=help))


def argument(default: Any, help: str, metavar: str | None = None) -> Any:
    """Return the default, as `option`, of a parameter that is a word of the command line without an option."""
    return _described(default, lambda _: typer.Argument(help=help, metavar=metavar))


def _described(default: Any, describe: Callable[[str], Any]) -> Any:
    given = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=given, metadata={"describe": describe})


def _parameters(function: Callable[..., None], options: Any) -> inspect.Signature:
    """Return the parameters of a verb with the descriptions that typer needs: the parameters of its function, or the
    fields of the dataclass `options`."""
    takes = inspect.signature(options or function, eval_str=True)
    fields = dataclasses.fields(options) if options else ()
    described = {name: parameter.default for name, parameter in takes.parameters.items()} | {
        field.name: field for field in fields
    }
    parameters = []
    for name, parameter in takes.parameters.items():
        annotation, default, field = parameter.annotation, parameter.default, described[name]
        if isinstance(field, dataclasses.Field) and field.metadata:
            annotation = Annotated[annotation, field.metadata["describe"](name)]
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
        parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=annotation, default=default))
    return takes.replace(parameters=parameters)


def fail(error: ShardwrightError) -> None:
    """Print an error to stderr in the format of all verbs: one `error:` line for each problem, without traceback."""
    problems = error.problems if isinstance(error, InputError) else [str(error)]
    if len(problems) > MOST_PROBLEMS:
        problems = [*problems[:MOST_PROBLEMS], f"and {len(problems) - MOST_PROBLEMS:,} more"]
    for problem in problems:
        error_console.print("[bold red]error:[/] ", end="")
        error_console.print(_LONG_WORD.sub(_shortened, problem), markup=False)


def _shortened(word: re.Match[str]) -> str:
    return f"{word[0][:500]}...{word[0][-100:]}"


def reading_verb(function: Callable[..., None]) -> Callable[..., None]:
    """Return the verb of a function that reads a run file or a folder with a model: it also has `--extension`."""
    return verb(function, extends=True)


def verb(function: Callable[..., None], extends: bool = False, hears_signals: bool = False) -> Callable[..., None]:
    """Return the verb of a function: a ShardwrightError becomes a message and its exit code, never a traceback. A
    signal that asks the verb to end interrupts it as Ctrl-C does, so that it removes incomplete files, unless the
    function handles signals itself (`hears_signals`).

    The parameters of the function become the arguments and options of the verb. If its only parameter is a dataclass,
    the fields of the dataclass do. `extends`: add the option `--extension`.
    """
    takes = inspect.signature(function, eval_str=True)
    kinds = [parameter.annotation for parameter in takes.parameters.values()]
    options = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)

    @functools.wraps(function)
    def run(**given: Any) -> None:
        given = {name: _with_home(value) for name, value in (defaults | given).items()}
        try:
            with nullcontext() if hears_signals else interrupts(), leaving_is_failure():
                _check_values(given)
                if extends:
                    extensions.load_trusted(given.pop("extension") or ())
                if options is None:
                    function(**given)
                else:
                    function(options(**given))
        except ShardwrightError as error:
            if (limit := too_many_files(error)) is not None:
                error = FullError(limit)
            fail(error)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:  # the reader of stdout has ended, as in `| head`
            discard_output(sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            if error.filename is None or system_limit(error):
                raise
            fail(InputError(f"{error.filename}: {error.strerror}"))
            raise typer.Exit(InputError.exit_code) from None
        except KeyboardInterrupt:
            error_console.print("interrupted")
            raise typer.Exit(130) from None
        except SystemExit as error:
            if isinstance(error, QuietExit):
                raise
            sentence = in_one_sentence(error)
            assert sentence is not None
            fail(sentence)
            raise typer.Exit(sentence.exit_code) from None

    takes = _parameters(function, options)
    defaults = {
        name: parameter.default
        for name, parameter in takes.parameters.items()
        if parameter.default is not parameter.empty
    }
    if extends:
        extension = inspect.Parameter("extension", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Extensions)
        takes = takes.replace(parameters=[*takes.parameters.values(), extension])
    run.__annotations__ = {name: parameter.annotation for name, parameter in takes.parameters.items()}
    vars(run)["__signature__"] = takes  # typer makes the options from it
    return run


def _with_home(value: Any) -> Any:
    """Return a path with a leading `~` expanded, because the shell does not expand it in `--out=~/data`."""
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


_LONG_WORD = re.compile(r"\S{4097,}")
"""A word of a message that is longer than any path, such as a list of numbers that was given."""
LONGEST_NUMBER = 18
"""Most digits of a whole number that always fits into 64 bits."""


def _check_values(given: Mapping[str, Any]) -> None:
    """Raise InputError for options whose numbers have more digits than 64 bits can store, and for words, except
    paths, whose bytes are not UTF-8 text."""
    problems = [
        f"--{name.replace('_', '-')}: a number of at most {LONGEST_NUMBER} digits is needed"
        for name, value in given.items()
        if isinstance(value, int | float) and abs(value) >= 10**LONGEST_NUMBER
    ]
    problems += [
        f"--{name.replace('_', '-')} {word!r}: the bytes given are not UTF-8 text"
        for name, value in given.items()
        for word in (value if isinstance(value, list | tuple) else [value])
        if isinstance(word, str) and not is_text(word)
    ]
    if problems:
        raise InputError(*problems)


def print_text(text: str) -> None:
    """Print a line of text without wrapping it."""
    console.print(text, markup=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table as wide as its content."""
    terminal.print_table(table, console)


def show(document: VerbDocument, as_json: bool, html: Path | None, *others: Path) -> None:
    """Write the page of a document to `html`, if given, and print the document as JSON or as text. `others`: other
    files that the verb has written, which the text names too."""
    if html is not None:
        from shardwright.view.html import write_page

        write_page(document, html)
    if as_json:
        print_json(document.data)
        return
    terminal.print_parts(document.parts, console)
    for path in filter(None, (html, *others)):
        print_text(f"written to {path}")


_MOST = {"--top": 2000, "--micro-batch": 2**16, "--batch-size": 2**16, "--concurrency": 10**6}
"""The largest valid number of options whose work or memory grows with the number."""


def size_problems(sizes: Mapping[str, int | None], needed: Iterable[str] = ()) -> list[str]:
    """Return the problems of options that are counts, given by name; the options in `needed` are required."""
    missing = [f"{option} is missing; give a number, 1 or more" for option in needed if sizes[option] is None]
    small = {option: n for option, n in sizes.items() if n is not None and n < 1}
    missing += [f"{option} {n}: a number of 1 or more is needed" for option, n in small.items()]
    most = {option: _MOST.get(option, MOST_COUNTED) for option in sizes}
    large = {option: n for option, n in sizes.items() if n is not None and n > most[option]}
    return missing + [f"{option} {n:,}: at most {most[option]:,} is possible" for option, n in large.items()]


def output_problems(option: str, path: Path | None, *suffixes: str) -> list[str]:
    """Return the problems of an option that names a file to write, if it is given. `suffixes`: of its name; without
    them, any is valid."""
    if path is None:
        return []
    if suffixes and (problem := suffix_problem(path, *suffixes)) is not None:
        return [f"{option} {problem}"]
    if url_problem(path) is None and not path.absolute().parent.is_dir():
        return [f"{option} {path}: there is no folder {path.parent}; make it first"]
    problem = problem_of_place(path)
    return [] if problem is None else [f"{option} {problem}"]


def device_problems(device: str) -> list[str]:
    """Return the problem of the option --device, if it has one."""
    return [] if device in ("auto", "cpu", "cuda") else [f"--device {device}: not one of auto, cpu, cuda"]


def layout_of(text: str, valid: Sequence[str] | None = None) -> Layout:
    """Return the layout of an option such as `tp=2,pp=2`; `valid`: the keys that it may have, all by default.

    Raises LayoutError with every problem.
    """
    keys = KEYS if valid is None else {name: KEYS[name] for name in valid}
    values: dict[str, Any] = {}
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.removeprefix("layout.")
        if not equals:
            problems.append(f"--layout {item}: write key=value, such as tp=2")
        elif name not in keys:
            what = "means nothing here" if name in KEYS else "there is no such key of the layout"
            problems.append(f"--layout {item}: {what}; {nearest(name, keys)}")
        elif keys[name].type is int and not (value.isdecimal() and len(value) <= LONGEST_NUMBER):
            problems.append(f"--layout {item}: a whole number of at most {LONGEST_NUMBER} digits is needed")
        elif keys[name].type is bool and value not in ("true", "false"):
            problems.append(f"--layout {item}: true or false is needed")
        else:
            values[name] = parse_toml(f"value = {value}")["value"] if keys[name].type in (int, bool) else value
    if problems:
        raise LayoutError(*problems)
    return Layout(**values)


def numbered_lines(path: Path, name: str) -> dict[int, str]:
    """Return the lines of a text file that are not blank, by their number from 1. `name`: of the file in errors.

    Raises InputError for a file that is missing, empty or no text.
    """
    try:
        lines = read_text(path).replace("\r\n", "\n").split("\n")
    except FileNotFoundError:
        raise InputError(f"{name}: there is no such file") from None
    except IsADirectoryError:
        raise InputError(f"{name}: that is a folder; name a file, with one text a line") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be read as text: {reason(error)}") from None
    numbered = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not numbered:
        raise InputError(f"{name}: the file is empty; write one text a line")
    return numbered


def json_records(path: Path, name: str) -> tuple[dict[int, Any], list[str]]:
    """Return the JSON of each line of a file, by its number, and the problems of the file and of its lines."""
    records, problems = {}, []
    try:
        lines = numbered_lines(path, name)
    except InputError as error:
        return {}, list(error.problems)
    for number, line in lines.items():
        try:
            records[number] = parse_json(line)
        except ValueError as error:
            problems.append(f"{name}, line {number}: not JSON ({error}): {line[:60]!r}")
    return records, problems


def print_answer(as_json: bool, data: Any, *lines: str) -> None:
    """Print the answer of a verb as JSON, or its lines of text."""
    if as_json:
        print_json(data)
        return
    for line in lines:
        print_text(line)


def filled(kind: Callable[..., T], options: object, at_default: Collection[str] = (), **more: Any) -> T:
    """Return an instance of the dataclass `kind` whose fields are the options of the same names and `more`.
    `at_default`: the other fields, which keep their defaults. A field in none of these is a bug: its option may have
    been renamed."""
    names = {field.name for field in dataclasses.fields(cast(Any, kind))} - more.keys()
    without = {name for name in names if not hasattr(options, name)}
    assert without == set(at_default), f"fields without an option {sorted(without)}, not {sorted(at_default)}"
    return kind(**{name: getattr(options, name) for name in names - without}, **more)


def print_json(answer: Any) -> None:
    """Print the answer of a verb under `--json`: one JSON document on stdout. JSON has no numbers that are not finite;
    they are the texts `nan`, `inf` and `-inf`."""
    sys.stdout.write(json.dumps(_finite(answer), indent=2, allow_nan=False) + "\n")


def _finite(answer: Any) -> Any:
    match answer:
        case dict():
            return {key: _finite(value) for key, value in answer.items()}
        case list() | tuple():
            return [_finite(value) for value in answer]
        case float() if not math.isfinite(answer):
            return str(answer)
    return answer
