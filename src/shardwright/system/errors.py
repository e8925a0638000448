"""One exception tree for everything Shardwright raises on purpose.

    ShardwrightError                 exit code 3: the run failed
    ├── InputError (ValueError)    exit code 2: something the user gave cannot be used
    │   ├── ConfigError            the run file, or a --set
    │   ├── LayoutError            degrees that cannot be laid over the ranks or the model
    │   ├── ScheduleError          a pipeline schedule that cannot be built or cannot run
    │   ├── DataError              text, token shards, tokenizer
    │   └── CheckpointError        missing, damaged, or of another run
    │       ├── DamagedError       what is on the disk is not what was written
    │       └── SaveError          a run could not write a checkpoint and ends: exit code 3
    ├── SpikeError                 a loss or gradient that [faults] stops a run for
    ├── CopiesError                ranks that have to hold the same weights do not
    └── WorkerError                a worker process died or hung
        └── FullError              a disk is full, or there are too few file descriptors

An InputError states the value, the rule it breaks and the nearest valid choices, and is printed without
a traceback. What only a bug can cause is an `assert`.
"""

import errno
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, ParamSpec, Self, TypeVar, get_args, get_origin

from shardwright.system.synonyms import called_here

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CUTOFF = 0.6
"""How alike two spellings have to be for one to be offered for the other, as difflib counts."""


MASK = "***"
_USER = re.compile(r"""(?<=\w)(://?)(?:[^\s"'/@:]*|[^\s"'/@:]*:[^\s"']*)@""")
"""The user and the password of a URL, also where it became a path, which has one slash: `s3:/KEY:SECRET@bucket`."""
_SECRET_NAMES = "token|secret|password|passwd|signature|credential|key|sig|auth"
_TOKEN = re.compile(rf"""([?&][\w.-]*(?:{_SECRET_NAMES})[\w.-]*=)[^\s"'&#]+""", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return a text in which the user, the password and the tokens of URLs are `***`: `s3://***@bucket/run`; a user
    and password also where the text repeats them without their URL, as errors of libraries do."""
    if ":/" not in text:
        return text
    users = {each[0].removeprefix(each[1]) for each in _USER.finditer(text)} - {"@"}
    text = _USER.sub(rf"\1{MASK}@", text)
    for user in users:
        text = text.replace(user, f"{MASK}@")
    return _TOKEN.sub(rf"\1{MASK}", text)


class ShardwrightError(Exception):
    """Base of the tree; the command line prints the text and leaves with `exit_code`. `rank`: the one at fault, where
    one is known."""

    exit_code = 3
    rank: int | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(each) if isinstance(each, str) else each for each in args))

    def of_rank(self, rank: int | None) -> Self:
        """This error, with the rank at fault."""
        self.rank = rank
        return self


class InputError(ShardwrightError, ValueError):
    """Something the user gave cannot be used. `problems` holds every complaint, one a line of the text."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = [without_secrets(problem) for problem in problems]
        super().__init__("\n".join(problems))


class ConfigError(InputError):
    """The run file or an override of it is not valid."""


class LayoutError(InputError):
    """Degrees that do not fit the number of ranks, the batch or the model."""


class ScheduleError(InputError):
    """A pipeline schedule that cannot be built, read or run."""


class DataError(InputError):
    """Text, tokens or a tokenizer that cannot be used."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class DamagedError(CheckpointError):
    """A checkpoint whose bytes are not, or not all, those that were written; an earlier one may be whole."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written, for which the run ends; earlier ones are whole."""

    exit_code = ShardwrightError.exit_code


class SpikeError(ShardwrightError):
    """A loss or gradient norm of a step, the same on every rank, for which the run file stops a run."""


class CopiesError(ShardwrightError):
    """Ranks that have to hold the same weights, to the last bit, do not."""


class WorkerError(ShardwrightError):
    """A worker process died, hung, or reported an error of its own."""


class FullError(WorkerError):
    """A disk is full, or a limit of the system is reached: to start the ranks again would end the same way."""


def checked_call(function: Callable[P, R], name: str = "", error: type[InputError] = InputError) -> Callable[P, R]:
    """Return a function of the Python API, or a method, that raises `error` with a sentence for each argument that is
    missing, unknown, given twice, of a wrong type, or given by place where it is taken by name. `name`: what the caller
    knows it by, its own if not given."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError, LookupError):  # the arguments may be why
            if problems := list(_argument_problems(function, name or function.__qualname__, args, kwargs)):
                raise error(*problems) from None
            raise

    return checked


def checked_constructor(error: type[InputError]) -> Callable[[type[C]], type[C]]:
    """Return a decorator of classes whose constructors are a `checked_call`."""

    def decorate(kind: type[C]) -> type[C]:
        kind.__init__ = checked_call(kind.__init__, kind.__name__, error)  # type: ignore[method-assign]
        return kind

    return decorate


def _argument_problems(
    function: Callable[..., object], name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[str]:
    taken = list(inspect.signature(function).parameters.values())
    n_self = len(taken) > 0 and taken[0].name == "self"
    taken, placed = taken[n_self:], len(args) - n_self
    names = [each.name for each in taken]
    by_place = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    for key in kwargs:
        if key not in names:
            yield f"{name}: there is no argument {key!r}; {nearest(key, names) if names else 'it takes none'}"
        elif key in by_place[:placed]:
            yield f"{name}: {key} is given twice, by place and as {key}=; leave one out"
    if placed > len(by_place):
        most = f"only {', '.join(by_place)} may be" if by_place else "none may be"
        rest = ", ".join(f"{each}=" for each in names if each not in by_place)
        way_out = f"by name: {rest}" if rest else "leave the rest out"
        yield f"{name}: {placed} arguments are given by place, and {most}; {way_out}"
    given = {*by_place[: max(placed, 0)], *kwargs}
    if missing := [each.name for each in taken if each.default is each.empty and each.name not in given]:
        are = "is" if len(missing) == 1 else "are"
        yield f"{name}: {' and '.join(missing)} {are} missing; it takes {', '.join(names)}"
    kinds = {each.name: each.annotation for each in taken}
    for key, value in {**dict(zip(by_place, args[n_self:], strict=False)), **kwargs}.items():
        if key in kinds and not _is_of_type(value, kinds[key]):
            needed = re.sub(r"\b\w+\.", "", inspect.formatannotation(kinds[key]))
            yield f"{name}: {key}={value!r} is of type {type(value).__name__}; {needed} is needed"


def _is_of_type(value: object, annotation: Any) -> bool:
    """Whether a value has an annotated type, as far as `isinstance` can say."""
    kinds = tuple(get_origin(each) or each for each in get_args(annotation) or (annotation,))
    if not isinstance(annotation, UnionType):
        kinds = (get_origin(annotation) or annotation,)
    if not all(isinstance(each, type) for each in kinds):
        return True
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole if kinds == (int,) else isinstance(value, kinds) or (whole and float in kinds)


class QuietExit(SystemExit):
    """The end of a rank that prints no error, since another rank of its machine prints the same one."""


@contextmanager
def cleaning_up(*clean_ups: Callable[[], object]) -> Iterator[None]:
    """Call each of `clean_ups` when the block ends, however it ends and whatever the ones before raise.

    The first error is raised: the error of the block where it has one, so that a clean-up that fails for the same
    reason, such as a full disk, does not hide it.
    """
    errors: list[BaseException] = []
    try:
        yield
    except BaseException as error:
        errors.append(error)
    for clean_up in clean_ups:
        try:
            clean_up()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def system_limit(error: OSError) -> str | None:
    """A full disk, a quota, the size of a file or the number of open files as one sentence; None for other errors."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in NO_ROOM:
        return f"{where}no room to write ({error.strerror}); free some, or choose another `out`"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}too many open files ({error.strerror}); raise the limit with `ulimit -n 65536`"
    return None


def near_path(path: str | Path, pattern: str) -> str:
    """`; did you mean x?` for a misspelt path, x one that is there and matches `pattern`; empty if there is none."""
    path = Path(path)
    there = {str(each) for each in path.parent.glob(pattern)} if path.parent.is_dir() else set()
    close = get_close_matches(str(path), there, n=1, cutoff=CUTOFF)
    return f"; did you mean {close[0]}?" if close else ""


def nearest(name: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for another name of the field for a choice or a key (`synonyms`) and for a misspelt one, or
    the list of valid names if there is none."""
    valid = sorted(choices)
    known = called_here(name)
    if known is not None:
        chosen = [last for each in known if (last := each.rpartition(".")[2] if "=" not in each else each) in valid]
        if meant := chosen or known:
            return f"did you mean {' or '.join(map(repr, meant))}?"
        return f"{name} is not supported (README.md lists what is not); valid: {', '.join(valid)}"
    close = get_close_matches(name, valid, n=1, cutoff=CUTOFF)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"
