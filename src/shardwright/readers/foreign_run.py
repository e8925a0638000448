"""A run that a configuration of another system describes: read, priced with that system's software, and compared with
the other layouts that the system can run."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.cost.hardware import Cluster
from shardwright.cost.job import Candidates, Job
from shardwright.cost.machine import on_machine
from shardwright.layout.layout import accumulation
from shardwright.model.spec import ModelSpec
from shardwright.planner.choice import Choice, PricedLayout
from shardwright.planner.run_layout import rule_problems
from shardwright.planner.search import search
from shardwright.planner.space import OFFLOADS, FixedChoices, Mask
from shardwright.readers.systems import SUPPORTED, ConfigurationSource, sources_of
from shardwright.readers.table import DescribedRun, OptionRecord, Setting, System, Values, normalised, shown
from shardwright.system.errors import InputError, LayoutError

DEFAULT_ACCELERATOR = "h100"
_KNOWN = ("gb200", "gb300", "b200", "b300", "h200", "h100", "a100", "mi300x", "h800")


@dataclass(frozen=True)
class Request:
    """Additions of the command line to a configuration: the ranks of --cluster, and values that replace the file's."""

    world_size: int | None = None
    model: ModelSpec | None = None
    global_batch: int | None = None
    seq_len: int | None = None


@dataclass(frozen=True)
class ForeignRun:
    """A configuration that has been read. `records`: every option of the files; `assumed`: sentences; `skipped`: parts
    of a script that were not evaluated; `accelerator`: named by the files, or None."""

    system: System
    files: tuple[str, ...]
    records: tuple[OptionRecord, ...]
    assumed: tuple[str, ...]
    skipped: tuple[str, ...]
    described: DescribedRun
    accelerator: str | None

    @property
    def choice(self) -> Choice:
        """Return the layout with its micro-batch."""
        return Choice(self.described.layout, self.described.micro_batch)

    def job(self, cluster: Cluster) -> Job:
        """Return the job on a cluster, with its measured rates. Raises InputError with every rule that it breaks."""
        given = self.described
        sizes = {"micro-batch": given.micro_batch, "global batch": given.global_batch, "sequence": given.seq_len}
        if small := [f"{self.files[0]}: {name} {n}; valid: 1 or more" for name, n in sizes.items() if n < 1]:
            raise InputError(*small)
        job = Job(
            model=given.model,
            cluster=cluster,
            seq_len=given.seq_len,
            global_batch=given.global_batch,
            precision=given.precision,
            stack=given.stack,
            optimizer=given.optimizer,
            narrow_states=given.narrow_states,
        )
        problems = list(rule_problems(job, self.choice.candidates, given.layout))
        try:
            accumulation(given.global_batch, given.micro_batch, given.layout.data_ranks)
        except LayoutError as error:
            problems += error.problems
        if problems:
            raise InputError(*(f"{self.files[0]}: {problem}" for problem in problems))
        return on_machine(job)


def read_configuration(paths: Sequence[Path], request: Request) -> ForeignRun:
    """Read the files of one configuration. Raises InputError with file and line of every problem."""
    system, sources, model = sources_of(paths)
    model = request.model or model
    settings = [setting for source in sources for setting in source.settings]
    if not any(system.row(setting.option) for setting in settings):
        raise InputError(f"{sources[0].path}: it has no option of {system.name}; supported: {SUPPORTED}")
    stated: dict[str, Setting] = {}
    contradictions = []
    for setting in settings:
        before = stated.get(name := normalised(setting.option))
        if before is None or before.value == "auto":
            stated[name] = setting
        elif setting.value not in ("auto", before.value):
            contradictions.append(
                f"{setting.where}: {setting.option} {shown(setting.value)}: {before.where} says {shown(before.value)}; "
                f"leave one out"
            )
    if contradictions:
        raise InputError(*contradictions)
    values = Values(
        system=system.name,
        options=system.options,
        settings=stated | _replaced(system, request),
        source=sources[0].path,
        world_size=request.world_size,
        given_model=model,
        spell=system.spell,
    )
    unknown: list[str] = []
    try:
        records = system.records(values, settings)
    except InputError as error:
        unknown, records = error.problems, []
    try:
        described = system.describe(values)
    except InputError as error:
        raise InputError(*unknown, *error.problems) from None
    if unknown:
        raise InputError(*unknown)
    described = replace(described, stated={name: setting.value for name, setting in stated.items()})
    if described.model is not model and (problems := described.model.problems()):
        raise InputError(*(f"{sources[0].path}: {problem}" for problem in problems))
    records = system.records(values, settings)  # with what describe found to have no counterpart
    skipped = tuple(note for source in sources for note in source.skipped)
    files = tuple(source.path for source in sources)
    return ForeignRun(system, files, tuple(records), tuple(values.assumed), skipped, described, _accelerator(sources))


def _replaced(system: System, request: Request) -> dict[str, Setting]:
    """Return the settings that options of the command line replace."""
    given = {"global_batch": request.global_batch, "seq_len": request.seq_len}
    return {
        system.replaced[name]: Setting(system.spell(system.replaced[name]), value, f"--{name.replace('_', '-')}")
        for name, value in given.items()
        if value is not None
    }


def _accelerator(sources: Sequence[ConfigurationSource]) -> str | None:
    """Return the accelerator that the name of a file contains."""
    for source in sources:
        words = re.split(r"[^a-z0-9]+", Path(source.path).name.lower())
        for name in _KNOWN:
            if any(name in word for word in words):
                return "a100-80gb" if name == "a100" else name
    return None


@dataclass(frozen=True)
class Abilities(FixedChoices):
    """Select the candidates that a system can run. `able`: the mask of a system's layouts."""

    able: Callable[[Candidates], Any]
    name: str = ""

    def __call__(self, candidates: Candidates) -> Mask:
        mask: Mask = self.able(candidates)
        return mask

    def __str__(self) -> str:
        return f"what {self.name} can run"


@dataclass(frozen=True)
class Instead:
    """A layout that the system can run, with its differences: (option, value in the file or None, value instead or
    None)."""

    priced: PricedLayout
    changes: tuple[tuple[str, str | None, str | None], ...]


def alternatives(run: ForeignRun, job: Job, memory_margin: float, top: int, processes: int = 1) -> list[Instead]:
    """Return the fastest layouts within the system's abilities that fit, the fastest first; may be empty. A layout
    that only adds changes to a faster one is left out. Offload stays as the configuration has it."""
    kept = {name: getattr(run.described.layout, name) for name in OFFLOADS}
    able = Abilities({"recompute_layers": None} | kept, partial(run.system.able, run.described), run.system.name)
    try:
        plan = search(job, memory_margin=memory_margin, top=4 * top, fixed=able, processes=processes)
    except LayoutError:
        return []
    candidates = [_equal_stages(candidate) for candidate in plan.best]
    fitting = [candidate for candidate in candidates if candidate.fits(plan.limit_bytes)]
    fitting.sort(key=lambda candidate: candidate.step_s)
    result: list[Instead] = []
    for candidate in fitting:
        changes = _changes(run, candidate.choice)
        if changes and not any(set(before.changes) <= set(changes) for before in result):
            result.append(Instead(candidate, changes))
    return result[:top]


def _equal_stages(priced: PricedLayout) -> PricedLayout:
    """Return a layout with as many layers in each stage, as the other systems partition them."""
    layout, layers = priced.layout, priced.job.model.n_layers
    if layout.pp == 1 or layers % layout.n_stages:
        return priced
    equal = replace(layout, stage_layers=(layers // layout.n_stages,) * layout.n_stages)
    return PricedLayout.from_choice(priced.job, Choice(equal, priced.micro_batch))


def _changes(run: ForeignRun, choice: Choice) -> tuple[tuple[str, str | None, str | None], ...]:
    before, after = (run.system.write(run.described, taken) for taken in (run.choice, choice))
    return tuple(
        (run.system.spell(name), _text(run.system, before.get(name)), _text(run.system, after.get(name)))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    )


def _text(system: System, value: Any) -> str | None:
    """Return a value as it is written in a file; None: the option is left out."""
    in_file = isinstance(value, str) and not system.spell("x").startswith("--")
    return None if value is None else json.dumps(value) if in_file else shown(value)


def as_document(run: ForeignRun) -> dict[str, Any]:
    """Return the reading as JSON: system, files, options, assumptions."""
    return {
        "system": run.system.name,
        "files": list(run.files),
        "options": [vars(record) for record in run.records],
        "assumed": list(run.assumed),
        "not_evaluated": list(run.skipped),
        "layout": run.choice.settings(),
    }


def options_by_fate(records: Sequence[OptionRecord]) -> Mapping[str, list[OptionRecord]]:
    """Return the records, grouped by their fate."""
    result: dict[str, list[OptionRecord]] = {}
    for record in records:
        result.setdefault(record.fate, []).append(record)
    return result
