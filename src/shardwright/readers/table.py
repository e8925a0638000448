"""The options of a system: for each its counterpart here, or the reason why it has none; and the values of one file."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardwright.cost.job import Candidates
from shardwright.cost.stack import Stack
from shardwright.layout.layout import Layout
from shardwright.model.spec import ModelSpec
from shardwright.planner.choice import Choice
from shardwright.planner.whole_run import PlannedStage
from shardwright.system.errors import InputError

SIMILAR = 0.9
"""Similarity, as difflib measures it, from which an unknown option is a misspelled one."""
_UNKNOWN = "this version of the table does not know it; its effect is not priced"
READ, NO_EFFECT, NO_COUNTERPART = "read", "no effect on time and memory", "no counterpart"
"""What becomes of an option."""


@dataclass(frozen=True)
class Setting:
    """An option as a file states it. `where`: its file and line. `unknown`: why its value is unknown, or None."""

    option: str
    value: Any
    where: str
    unknown: str | None = None


@dataclass(frozen=True)
class ForeignOption:
    """A row of a system's table. `name`: normalised (`System.normalised`). `key`: our key, such as `layout.tp`, with
    several joined by ", "; empty: it has none. `kind`: int, float, bool, str, or list for several words. `default`: the
    system's own. `note`: the conversion, or the reason why there is no key. `fate`: READ, NO_EFFECT or NO_COUNTERPART.
    `valid`: the words that the system takes, empty for any."""

    name: str
    key: str = ""
    kind: type = str
    default: Any = None
    note: str = ""
    fate: str = READ
    valid: tuple[str, ...] = ()


def read(name: str, key: str, kind: type = str, default: Any = None, note: str = "", *valid: str) -> ForeignOption:
    """Return the row of an option that the reader uses."""
    return ForeignOption(name, key, kind, default, note, READ, valid)


def without_effect(reason: str, names: str) -> Iterable[ForeignOption]:
    """Yield the rows of options that change neither time nor memory; `names`: separated by spaces."""
    return (ForeignOption(name, note=reason, fate=NO_EFFECT) for name in names.split())


def without_counterpart(reason: str, names: str) -> Iterable[ForeignOption]:
    """Yield the rows of options that the cost model has no key for."""
    return (ForeignOption(name, note=reason, fate=NO_COUNTERPART) for name in names.split())


def table(*rows: ForeignOption | Iterable[ForeignOption]) -> dict[str, ForeignOption]:
    """Return a table of options by name; a name occurs once."""
    result: dict[str, ForeignOption] = {}
    for row in rows:
        for option in [row] if isinstance(row, ForeignOption) else row:
            assert option.name not in result, option.name
            result[option.name] = option
    return result


@dataclass(frozen=True)
class OptionRecord:
    """A line of the report: an option of the file, and what became of it."""

    option: str
    value: str
    where: str
    key: str
    note: str
    fate: str


@dataclass
class Values:
    """The values of a configuration, with the system's defaults for options that are not given.

    `settings`: by normalised name. `problems`, `assumed`: sentences that the reader adds. `changes`: name -> note of
    an option whose value could not be used as given. `world_size`: ranks of --cluster, or None.
    """

    system: str
    options: Mapping[str, ForeignOption]
    settings: Mapping[str, Setting]
    source: str
    world_size: int | None = None
    given_model: ModelSpec | None = None
    problems: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)
    spell: Callable[[str], str] = str
    """As of `System`."""
    _refused: set[str] = field(default_factory=set)

    def given(self, name: str) -> bool:
        """Return whether the configuration states an option."""
        return name in self.settings

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option, or its default. A value that cannot be read becomes a problem, once, and the
        default."""
        option, setting = self.options[name], self.settings.get(name)
        if setting is None:
            return option.default
        try:
            return _converted(setting, option)
        except ValueError as error:
            if name not in self._refused:
                self._refused.add(name)
                self.problems.append(f"{setting.where}: {setting.option}: {error}")
            return option.default

    def needed(self, name: str) -> Any:
        """Return the value of an option that has no default. If it is not given, add a problem and return 1."""
        value = self[name]
        if value is None and name not in self._refused:
            self._refused.add(name)
            about = f" ({self.options[name].key})" if self.options[name].key else ""
            self.problems.append(
                f"{self.source}: {self.spelled(name)} is missing{about}, and {self.system} has no default"
            )
        elif value is not None and value < 1:
            self.refuse(name, "1 or more is needed")
        return max(value or 1, 1)

    def spelled(self, name: str) -> str:
        """Return an option as the file spells it."""
        setting = self.settings.get(name)
        return setting.option if setting else self.spell(name)

    def refuse(self, name: str, text: str) -> None:
        """Add a problem of an option's value."""
        setting = self.settings.get(name)
        where = setting.where if setting else self.source
        stated = "" if setting is None or setting.value is True or setting.unknown else f" {shown(setting.value)}"
        self.problems.append(f"{where}: {self.spelled(name)}{stated}: {text}")


def _converted(setting: Setting, option: ForeignOption) -> Any:
    """Return the value of a setting in the type of its option. Raises ValueError with the reason."""
    value = setting.value
    if setting.unknown is not None:
        raise ValueError(f"its value is unknown: {setting.unknown}; write the value")
    if value is None:
        return option.default
    if option.kind is list:
        several = [str(item) for item in value] if isinstance(value, list) else str(value).split()
        if option.default and not several:
            raise ValueError("it is empty; write its value or leave it out")
        return several
    if isinstance(value, str) and value.strip().lower() == "auto" and option.kind in (int, float):
        raise ValueError("'auto' is set by the launching program, which is not executed; write the number")
    if option.kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        text = str(value).strip().lower()
        if text not in words:
            raise ValueError(f"{value!r} is neither true nor false")
        return words[text]
    if option.kind in (int, float):
        if value is True:
            raise ValueError("its value is missing; write the number")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{value!r} is not a number") from None
        if not math.isfinite(number) or (option.kind is int and (abs(number) >= 2**53 or number != int(number))):
            raise ValueError(f"{value!r} is not a {'whole ' * (option.kind is int)}number")
        if number < 0 and option.default != -1:
            raise ValueError(f"{value} is negative; valid: 0 or more")
        return int(number) if option.kind is int else number
    text = str(value)
    if option.valid and text not in option.valid:
        raise ValueError(f"{text!r} is not known; valid: {', '.join(option.valid)}")
    return text


def shown(value: Any) -> str:
    """Return a value as text for people."""
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class DescribedRun:
    """The run that a configuration describes: the job's parts and the layout. `node_size`: ranks of a node, or None.
    `dialect`: the vocabulary that the files use, of a system with several. `stated`: the options of the files with
    their values, which `System.write` keeps or removes where they set the same as others. `stages`: the batches of the
    run, if they change; `global_batch` is of the last."""

    model: ModelSpec
    seq_len: int
    global_batch: int
    layout: Layout
    micro_batch: int
    precision: str
    stack: Stack
    world_size: int
    node_size: int | None = None
    optimizer: str = "adamw"
    narrow_states: bool = False
    dialect: str = ""
    stated: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[PlannedStage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class System:
    """A system whose configurations are read.

    `name`: for people. `options`: its table. `families`: rows for all options whose name starts with theirs and that
    the table does not have. `spell(name)`: an option as its users write it.
    `describe(values)`: the described run. `able(described, candidates)`: the mask of the layouts that it can run.
    `write(described, choice)`: the options of a layout, by normalised name; None: to be left out. `replaced`: our
    global_batch and seq_len -> the option that states them.
    """

    name: str
    options: Mapping[str, ForeignOption]
    families: tuple[ForeignOption, ...] = ()
    spell: Callable[[str], str]
    describe: Callable[[Values], DescribedRun]
    able: Callable[[DescribedRun, Candidates], Any]
    write: Callable[[DescribedRun, Choice], dict[str, Any]]
    replaced: Mapping[str, str]

    def records(self, values: Values, settings: Sequence[Setting]) -> list[OptionRecord]:
        """Return a record for each setting, in the order of the file. Raises InputError for options that are nearly
        spelled like an option that is read."""
        result, problems = [], []
        for setting in settings:
            option = self.row(setting.option)
            if option is None:
                near = self._misspelled(name := normalised(setting.option))
                parts = [row.name for row in self.options.values() if row.name.startswith(f"{name}.")]
                if parts and setting.value is not None and any(self.options[part].fate == READ for part in parts):
                    problems.append(
                        f"{setting.where}: {setting.option} {shown(setting.value)}: it is a section; valid: keys such "
                        f"as {self.spell(parts[0])}"
                    )
                elif near is not None:
                    problems.append(
                        f"{setting.where}: {setting.option}: not an option of {self.name}; did you mean "
                        f"{self.spell(near)}?"
                    )
                option = ForeignOption(setting.option, note=_UNKNOWN, fate=NO_COUNTERPART)
            fate, note, key = option.fate, option.note, option.key
            if option.name in values.changes:
                fate, note, key = NO_COUNTERPART, values.changes[option.name], ""
            value = setting.unknown if setting.unknown and not setting.value else shown(setting.value)
            result.append(OptionRecord(setting.option, value or "", setting.where, key, note, fate))
        if problems:
            raise InputError(*problems)
        return result

    def row(self, option: str) -> ForeignOption | None:
        """Return the row of an option, by its name or by the start of its name."""
        name = normalised(option)
        family = (row for row in self.families if name.startswith(row.name))
        return self.options.get(name) or next(family, None)

    def _misspelled(self, name: str) -> str | None:
        """Return the option that is read and has nearly this name, or None."""
        used = [row.name for row in self.options.values() if row.fate == READ]
        return next(iter(get_close_matches(name, used, n=1, cutoff=SIMILAR)), None)


def normalised(option: str) -> str:
    """Return the name of an option in a table: without dashes in front, with underscores, in lower case."""
    return option.lstrip("-").replace("-", "_").lower()
