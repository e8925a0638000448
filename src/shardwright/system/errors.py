"""The exception tree of all errors that Shardwright raises on purpose.

    ShardwrightError                 exit code 3: the run failed
    ├── InputError (ValueError)    exit code 2: an input of the user cannot be used
    │   ├── ConfigError            the run file, or a --set
    │   ├── LayoutError            degrees that do not fit the ranks or the model
    │   ├── ScheduleError          a pipeline schedule that cannot be built or cannot run
    │   ├── DataError              text, token shards, tokenizer
    │   └── CheckpointError        missing, damaged, or from another run
    │       ├── DamagedError       the bytes on disk are not the bytes that were written
    │       └── SaveError          a run could not write a checkpoint and ends: exit code 3
    ├── SpikeError                 a loss or gradient for which [faults] stops the run
    ├── CopiesError                replicas of the weights differ between ranks
    └── WorkerError                a worker process died or hung
        └── FullError              a disk is full, or there are too few file descriptors

An InputError states the value, the rule it breaks and the nearest valid choices, and is printed without a traceback. An
error that only a bug can cause is an `assert`.
"""

import errno
import functools
import inspect
import os
import re
import resource
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
TOO_MANY_FILES = (errno.ENFILE, errno.EMFILE)  # the text of the second is a part of the first's
CUTOFF = 0.6
"""Smallest similarity, as difflib measures it, at which a spelling is suggested for another one."""


MASK = "***"
_USER = re.compile(r"""(?<=\w)(://?)(?:[^\s"'/@:]*|[^\s"'/@:]*:[^\s"']*)@""")
"""The user and the password of a URL, also after the URL became a path with one slash: `s3:/KEY:SECRET@bucket`."""
_LONG_ENOUGH = 6
"""Characters from which on a repeated secret is masked. A shorter one, such as `git`, may be a part of another word."""
_AS_A_TOKEN = 16
"""Characters from which on a user without a password is masked where it is repeated: names of users are shorter."""
_SECRET_NAMES = "token|secret|password|passwd|signature|credential|key|sig|auth"
_TOKEN = re.compile(rf"""([?&][\w.-]*(?:{_SECRET_NAMES})[\w.-]*=)[^\s"'&#]+""", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return a text with the user, password and tokens of URLs masked as `***`: `s3://***@bucket/run`. A user and
    password are also masked where the text repeats them without their URL, as errors of libraries do: both together
    and the password alone, or a user without a password that is as long as a token."""
    if ":/" not in text:
        return text
    users = {match[0].removeprefix(match[1]) for match in _USER.finditer(text)} - {"@"}
    text = _USER.sub(rf"\1{MASK}@", text)
    for user in sorted(users, key=len, reverse=True):
        text = text.replace(user, f"{MASK}@")
        both, password = user[:-1], user[:-1].partition(":")[2]
        for part, least in ((both, _LONG_ENOUGH if password else _AS_A_TOKEN), (password, _LONG_ENOUGH)):
            if len(part) >= least:
                text = text.replace(part, MASK)
    return _TOKEN.sub(rf"\1{MASK}", text)


class ShardwrightError(Exception):
    """Base class of errors. The command line prints the text and exits with `exit_code`. `rank`: the rank at fault, if
    known."""

    exit_code = 3
    rank: int | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))

    def with_rank(self, rank: int | None) -> Self:
        """Set the rank at fault and return this error."""
        self.rank = rank
        return self


class InputError(ShardwrightError, ValueError):
    """An input of the user cannot be used. `problems` contains all problems, one a line of the text."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = [without_secrets(problem) for problem in problems]
        super().__init__("\n".join(problems))


@contextmanager
def collecting(problems: list[str], kind: type[InputError] = InputError) -> Iterator[None]:
    """Append the problems of an error of type `kind` in the `with` block to `problems` instead of raising it, so that
    the problems of several inputs are reported at once."""
    try:
        yield
    except kind as error:
        problems += error.problems


class ConfigError(InputError):
    """The run file or an override of it is not valid."""


class LayoutError(InputError):
    """Degrees that do not fit the number of ranks, the batch or the model."""


class ScheduleError(InputError):
    """A pipeline schedule that cannot be built, read or run."""


class DataError(InputError):
    """Text, tokens or a tokenizer that cannot be used."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, or from another run."""


class DamagedError(CheckpointError):
    """A checkpoint with missing or changed bytes. An earlier checkpoint may be intact."""


class SaveError(CheckpointError):
    """A checkpoint could not be written, so the run ends. Earlier checkpoints are intact."""

    exit_code = ShardwrightError.exit_code


class ProofError(ShardwrightError):
    """A converted checkpoint that computes other values than its source. It is not kept."""


class SpikeError(ShardwrightError):
    """A step's loss or gradient norm, the same on every rank, for which the run file stops the run."""


class CopiesError(ShardwrightError):
    """Ranks whose weights must be bitwise equal have different weights."""


class WorkerError(ShardwrightError):
    """A worker process died, hung or reported an error."""


class FullError(WorkerError):
    """A disk is full, or a system limit is reached. Restarting the ranks would fail the same way."""


def checked_call(function: Callable[P, R], name: str = "", error: type[InputError] = InputError) -> Callable[P, R]:
    """Wrap a function or method of the Python API so that invalid arguments raise `error`.

    The error has one sentence for each argument that is missing, unknown, given twice, of a wrong type, or given by
    position although it is keyword-only. `name`: the name that the caller uses, by default the function's own. Of the
    types, bool is checked before the call, since any value can be used as one.
    """
    switches = [param.name for param in inspect.signature(function).parameters.values() if param.annotation is bool]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not all(isinstance(kwargs.get(switch), bool | None) for switch in switches):
            raise error(*_argument_problems(function, name or function.__qualname__, args, kwargs))
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError, LookupError):  # the arguments may be the cause
            if problems := list(_argument_problems(function, name or function.__qualname__, args, kwargs)):
                raise error(*problems) from None
            raise

    return checked


def checked_constructor(error: type[InputError]) -> Callable[[type[C]], type[C]]:
    """Return a class decorator that applies `checked_call` to the constructor."""

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
    names = [param.name for param in taken]
    by_place = [param.name for param in taken if param.kind is param.POSITIONAL_OR_KEYWORD]
    for key in kwargs:
        if key not in names:
            yield f"{name}: there is no argument {key!r}; {nearest(key, names) if names else 'it takes none'}"
        elif key in by_place[:placed]:
            yield f"{name}: {key} is given twice, by place and as {key}=; leave one out"
    if placed > len(by_place):
        most = f"only {', '.join(by_place)} may be" if by_place else "none may be"
        rest = ", ".join(f"{other}=" for other in names if other not in by_place)
        way_out = f"by name: {rest}" if rest else "leave the rest out"
        given_by_place = "1 argument is" if placed == 1 else f"{placed} arguments are"
        yield f"{name}: {given_by_place} given by place, and {most}; {way_out}"
    given = {*by_place[: max(placed, 0)], *kwargs}
    if missing := [param.name for param in taken if param.default is param.empty and param.name not in given]:
        are = "is" if len(missing) == 1 else "are"
        yield f"{name}: {' and '.join(missing)} {are} missing; it takes {', '.join(names)}"
    kinds = {param.name: param.annotation for param in taken}
    for key, value in {**dict(zip(by_place, args[n_self:], strict=False)), **kwargs}.items():
        if key in kinds and kinds[key] is not inspect.Parameter.empty and not _is_of_type(value, kinds[key]):
            needed = re.sub(r"\b\w+\.", "", inspect.formatannotation(kinds[key]))
            yield f"{name}: {key}={value!r} is of type {type(value).__name__}; {needed} is needed"


def _is_of_type(value: object, annotation: Any) -> bool:
    """Return whether a value has the annotated type, as far as `isinstance` can check."""
    kinds = tuple(get_origin(kind) or kind for kind in get_args(annotation) or (annotation,))
    if not isinstance(annotation, UnionType):
        kinds = (get_origin(annotation) or annotation,)
    if not all(isinstance(kind, type) for kind in kinds):
        return True
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole if kinds == (int,) else isinstance(value, kinds) or (whole and float in kinds)


class QuietExit(SystemExit):
    """Exit of a rank that prints no error, because another rank of its machine prints the same error."""


@contextmanager
def cleaning_up(*clean_ups: Callable[[], object]) -> Iterator[None]:
    """Call each of `clean_ups` when the block ends, even if the block or an earlier clean-up raised.

    The first error is raised. An error of the block comes first, so a clean-up that fails for the same reason, such as
    a full disk, does not hide it.
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


def system_limit(error: BaseException) -> str | None:
    """Return one sentence for a full disk, a quota, a file size limit or too many open files; None for other errors.
    Libraries in C++ and Rust raise errors of their own that only quote the system's words."""
    number, where, reason = None, "", ""
    if isinstance(error, OSError):
        number, where, reason = error.errno, f"{error.filename}: " if error.filename else "", error.strerror or ""
    elif isinstance(error, Exception):
        quoted = [code for code in (*NO_ROOM, *TOO_MANY_FILES) if os.strerror(code) in str(error)]
        number, reason = (quoted[0], os.strerror(quoted[0])) if quoted else (None, "")
    if number in NO_ROOM:
        return f"{where}no room to write ({reason}); free some, or write to another disk"
    if number in TOO_MANY_FILES:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{where}too many open files ({reason}; the limit is {limit:,}); raise the limit with `ulimit -n 65536`"
    return None


def too_many_files(error: BaseException | None) -> str | None:
    """Return the sentence of `system_limit`, then the error's own text, for an error that too few file descriptors have
    caused: the error quotes the system's words, or its cause does, as a traceback shows causes. None for other
    errors."""
    cause = error
    while cause is not None:
        if any(os.strerror(code) in str(cause) for code in TOO_MANY_FILES):
            limit = system_limit(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            return str(error) if str(limit) in str(error) else f"{limit}; it led to: {error}"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def near_path(path: str | Path, pattern: str) -> str:
    """Return `; did you mean x?` for a misspelt path, where x is an existing path that matches `pattern`, or ""."""
    path = Path(path)
    existing = {str(entry) for entry in path.parent.glob(pattern)} if path.parent.is_dir() else set()
    close = get_close_matches(str(path), existing, n=1, cutoff=CUTOFF)
    return f"; did you mean {close[0]}?" if close else ""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for a misspelt name or another library's name (`synonyms`); otherwise the valid
    names."""
    valid = sorted(choices)
    known = called_here(name)
    if known is not None:
        chosen = [last for key in known if (last := key.rpartition(".")[2] if "=" not in key else key) in valid]
        if meant := chosen or known:
            return f"did you mean {' or '.join(map(repr, meant))}?"
        return f"{name} is not supported (README.md lists unsupported names); valid: {', '.join(valid)}"
    close = get_close_matches(name, valid, n=1, cutoff=CUTOFF)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"
