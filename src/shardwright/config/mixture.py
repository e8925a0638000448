"""The mixture of a run: the share of the samples from each data source, and the step from which on it applies.

Weights are ratios. As integers without a common divisor, their sum is the number of samples after which the order of
sources repeats, with every source having exactly its share.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

from shardwright.config.sections import DataSection, SourceSection, TokenCache
from shardwright.system.errors import nearest
from shardwright.system.remote import REMOTE

LARGEST_PERIOD = 2**20


@dataclass(frozen=True)
class Mixture:
    """The weights of the sources after `from_step` steps: source k has weights[k] >= 0 of every sum(weights)
    samples."""

    from_step: int
    weights: tuple[int, ...]


def sources_of(data: DataSection) -> list[SourceSection]:
    """Return the named sources of a run: `data.sources`, or one source for the folder `data.path`."""
    if data.path is not None:
        return [SourceSection(name=Path(data.path).name, path=data.path, weight=1.0, prepare=data.prepare)]
    return [source.model_copy(update={"name": name_of(source)}) for source in data.sources]


def name_of(source: SourceSection) -> str:
    """Return the name of a source, by default the name of its folder."""
    return source.name or Path(source.path).name


def mixtures_of(data: DataSection) -> list[Mixture]:
    """Return the mixture at the start of a run and of each later stage, in order. The section must be valid."""
    sources = sources_of(data)
    first = {name_of(source): source.weight for source in sources if source.weight is not None}
    stages = [(0, first), *((stage.from_step, stage.weights) for stage in data.stages)]
    names = [name_of(source) for source in sources]
    return [Mixture(step, whole_weights([weights.get(name, 0) for name in names])) for step, weights in stages]


def whole_weights(weights: list[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of `weights` as written in decimal: 0.7, 0.3 -> 7, 3."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


def mixture_problems(data: DataSection, steps: int | None) -> Iterator[str]:
    """Yield each broken rule on sources and stages. `steps`: steps of the run; None if that value is not valid."""
    used = data.token_cache != TokenCache()
    if used and not any(REMOTE in source.path for source in (sources_of(data) if data.path else data.sources)):
        yield "data.cache and data.cache_gib are for tokens at a URL, and no source is at one; leave them out"
    for source in sources_of(data) if data.path else data.sources:
        yield from _prepare_problems(source, data.order)
    if data.keep_gib is not None and not (data.prepare or any(source.prepare for source in data.sources)):
        yield f"data.keep_gib={data.keep_gib:g} is for sources with prepare, and no source has it; leave it out"
    if data.prepare and data.path is None:
        yield "data.prepare needs data.path, which is missing; move prepare to an entry of data.sources"
    if data.path is not None and data.sources:
        yield "data.path and data.sources are both given; name the folder of data.path as one of data.sources"
    elif data.path is None and not data.sources:
        yield "data.path: missing; it is a folder of `shardwright data prepare`; or give several as [[data.sources]]"
    elif data.path is not None and data.stages:
        yield "data.stages needs data.sources, whose weights it changes; write data.path as one of [[data.sources]]"
    elif data.sources:
        yield from _source_problems(data)
        yield from _stage_problems(data, steps)


def _prepare_problems(source: SourceSection, order: str) -> Iterator[str]:
    """Yield each reason why a run cannot publish the shards of a source."""
    if not source.prepare:
        return
    if order != "shards":
        yield f"data.order={order!r} permutes all samples, and prepare publishes shard after shard; set it to 'shards'"
    if REMOTE in source.path:
        yield f"{source.path!r} is a URL, and prepare writes to a folder of this machine; give a local path"
    if source.prepare[0].startswith("-"):
        yield f"prepare={source.prepare!r} starts with an option; its first element is SRC, such as 'hf:NAME' or a file"
    for option in ("--out", "--publish", "--overwrite", "--keep-gib"):
        if any(argument.split("=")[0] == option for argument in source.prepare):
            yield f"prepare: remove {option}; the run passes `--out PATH --publish` and data.keep_gib"


def _source_problems(data: DataSection) -> Iterator[str]:
    names = [name_of(source) for source in data.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.sources: {names.count(name)} are called {name!r}; give each a name of its own, name = ..."
    weights = {name_of(source): source.weight for source in data.sources if source.weight is not None}
    yield from _weight_problems("data.sources", weights)
    if not weights:
        yield "data.sources: none has a weight, so the first step has no data; give weight to one or more of them"
    named = set(weights).union(*(stage.weights for stage in data.stages))
    for name in names:
        if name not in named:
            yield f"data.sources: {name!r} has no weight and no stage names it; give it a weight, or leave it out"


def _stage_problems(data: DataSection, steps: int | None) -> Iterator[str]:
    names, before = [name_of(source) for source in data.sources], 0
    for number, stage in enumerate(data.stages):
        where = f"data.stages.{number}"
        if stage.from_step <= before:
            rule = (
                f"later than from_step of the stage before, {before}"
                if number
                else "1 or more; the weights of sources are from 0"
            )
            yield f"{where}.from_step={stage.from_step} must be {rule}"
        if steps is not None and stage.from_step >= steps:
            yield (
                f"{where}.from_step={stage.from_step} is not reached: the run has steps={steps}; raise steps, or leave "
                f"the stage out"
            )
        before = max(before, stage.from_step)
        if not stage.weights:
            yield f"{where}.weights is empty; give the weight of one source or more, such as {{ {names[0]} = 1.0 }}"
        for name in stage.weights:
            if name not in names:
                yield f"{where}.weights.{name}: there is no such source; {nearest(name, names)}"
        yield from _weight_problems(f"{where}.weights", stage.weights)


def _weight_problems(where: str, weights: Mapping[str, float]) -> Iterator[str]:
    bad = {name: weight for name, weight in weights.items() if weight <= 0}
    for name, weight in bad.items():
        yield f"{where}: the weight of {name!r} is {weight:g}, and must be above 0; leave it out for no samples of it"
    if weights and not bad and (period := sum(whole_weights(list(weights.values())))) > LARGEST_PERIOD:
        given = ", ".join(f"{weight:g}" for weight in weights.values())
        yield (
            f"{where}: the weights {given} are whole numbers only in {period:,} samples, more than {LARGEST_PERIOD:,}; "
            f"round them"
        )
