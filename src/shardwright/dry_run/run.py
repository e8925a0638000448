"""Dry runs of a run file: of one rank, of one rank of each class, and of changes that make the run fit.

Every rank runs in its own process, since PyTorch caches results for the device meshes of a world.
"""

import json
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwright.config import RunConfig, parse, resolved_toml
from shardwright.config.batch import BatchStage
from shardwright.config.reading import apply_override
from shardwright.config.settle import MARGIN, fullest_stage_config, job_of, needs_memory, settled
from shardwright.cost.stack import SHARDWRIGHT
from shardwright.dry_run.agreement import Disagreement, disagreements
from shardwright.dry_run.length import one_of_each_class, step_length
from shardwright.dry_run.planned import PlannedRank, grouped, planned
from shardwright.dry_run.record import AxisTraffic, RankRecord, RecordedMessage
from shardwright.planner.recomputation import peak_bytes
from shardwright.system.errors import InputError, LayoutError
from shardwright.system.units import parsed_bytes
from shardwright.verification.ranks import Tell, report_progress

TIMEOUT_S = 3600.0
MOST_STEPS = 100
"""Maximum number of steps of a dry run."""
_MOST_REMEDIES = 3


@dataclass(frozen=True)
class DryRunSettings:
    """Settings of a dry run. `memory_bytes`: memory of a rank's device. `gpu`: use the kernels and the allocator of a
    GPU instead of a CPU. `steps`: number of steps, 2 or more; the last is recorded. `imbalance`: expert rows of the
    first rank of ep, divided by the mean. `history`: whether records contain all events."""

    memory_bytes: float
    gpu: bool = True
    steps: int = 2
    imbalance: float = 1.0
    history: bool = False

    @property
    def limit_bytes(self) -> float:
        """Return the memory that a rank may use, with the margin of a plan."""
        return (1 - MARGIN) * self.memory_bytes


def dry_run_settings(
    device_memory: str | float, count_as: str, steps: int, imbalance: float, history: bool = False
) -> DryRunSettings:
    """Return the settings of a dry run from user input. `device_memory`: text such as 80GiB, or bytes. Raises
    InputError with all problems at once."""
    memory_bytes = parsed_bytes(device_memory) if isinstance(device_memory, str) else device_memory
    problems = []
    if not memory_bytes:
        problems.append(f"device memory {device_memory}: a number above 0 and a unit are needed, such as 80GiB")
    if count_as not in ("gpu", "cpu"):
        problems.append(f"counting as {count_as}: not one of gpu, cpu")
    if steps < 2:
        problems.append(f"{steps} steps: 2 or more are needed; the first one prepares what all later ones use")
    if steps > MOST_STEPS:
        problems.append(f"{steps:,} steps: at most {MOST_STEPS} are taken; all after the first need and send the same")
    if not 1 <= imbalance < float("inf"):
        problems.append(f"an imbalance of {imbalance:g}: a number of 1 (balanced) or more is needed")
    if problems or not memory_bytes:
        raise InputError(*problems)
    return DryRunSettings(memory_bytes, count_as == "gpu", steps, imbalance, history)


@dataclass(frozen=True)
class DryRunRemedy:
    """A change of the run file, and the memory in bytes that the rank needs after it."""

    change: str
    needed_bytes: float


@dataclass(frozen=True)
class DryRun:
    """The dry run of a run file on some of its ranks. `plans`: by rank, the plan's prediction or the reason why there
    is none. `remedies`: the changes found that make it fit; None if none were tried. `stages`: the stages of the run's
    batch; `config` has the batch of the stage that needs most memory."""

    config: RunConfig
    how: DryRunSettings
    records: tuple[RankRecord, ...]
    plans: dict[int, PlannedRank | str]
    disagreements: tuple[Disagreement[RecordedMessage], ...] = ()
    remedies: tuple[DryRunRemedy, ...] | None = None
    stages: tuple[BatchStage, ...] = ()
    compile_left_out: bool = False

    @property
    def fullest(self) -> RankRecord:
        """The rank with the highest peak."""
        return max(self.records, key=lambda record: record.peak.n_bytes)

    @property
    def fits(self) -> bool:
        """Whether every rank needs no more than its limit."""
        return self.needed_bytes(self.fullest) <= self.how.limit_bytes

    def needed_bytes(self, record: RankRecord) -> float:
        """Return the peak of a rank including memory that a dry run does not see."""
        return _needed_bytes(record, self.plans[record.rank])

    def groups(self, record: RankRecord) -> Iterator[tuple[str, int, float | None]]:
        """Yield (group of kinds, bytes of the dry run, bytes of the plan) at the peak of a rank."""
        plan = self.plans[record.rank]
        for name, n_bytes in grouped(record).items():
            yield name, n_bytes, None if isinstance(plan, str) else plan.groups[name]

    def traffic(self, record: RankRecord) -> Iterator[tuple[str, str, AxisTraffic, AxisTraffic | None]]:
        """Yield (axis, operation, traffic of a rank, its traffic by the plan), the last None if the plan has none."""
        plan = self.plans[record.rank]
        for (axis, op), sums in record.sent.items():
            yield axis, op, sums, None if isinstance(plan, str) else plan.sent.get((axis, op))


def _needed_bytes(record: RankRecord, plan: PlannedRank | str) -> float:
    """Return the peak of a rank, plus the plan's values for memory that a dry run does not see: workspace of libraries,
    and the allocator's reserve beyond the tensors."""
    share = SHARDWRIGHT.fragmentation if isinstance(plan, str) else plan.lost_share
    return (record.peak.n_bytes + SHARDWRIGHT.workspace_bytes) * (1 + share)


def fullest_by_plan(config: RunConfig) -> int:
    """Return the rank that needs most memory by the plan, the first with its `pp` coordinate; 0 if there is no plan."""
    layout = config.layout.layout()
    peaks = {}
    for pp_rank in range(layout.pp):
        rank = layout.rank_at({"pp": pp_rank})
        plan = planned(config, rank)
        peaks[rank] = 0.0 if isinstance(plan, str) else plan.peak_bytes
    return max(peaks, key=lambda rank: peaks[rank])


def dry_run(
    config: RunConfig, how: DryRunSettings, rank: int | None = 0, remedies: bool = True, tell: Tell = lambda line: None
) -> DryRun:
    """Dry-run `rank`, or with None one rank of each class that can differ, and then check that their messages agree.

    `remedies`: try changes if the run does not fit. `tell`: called each second with the progress. Raises LayoutError
    for a rank outside of the world, or if recompute='auto' finds nothing that fits; InputError for a run file that
    cannot be run.
    """
    if needs_memory(config):
        config, _ = settled(config, how.memory_bytes)
    given = config
    config = fullest_stage_config(config)
    layout = config.layout.layout()
    if rank is not None and not 0 <= rank < layout.world_size:
        raise LayoutError(f"rank {rank} is not in the world of the layout; valid: 0 to {layout.world_size - 1}")
    compiles = config.precision.compile
    if compiles:
        config, given = map(_not_compiled, (config, given))
    ranks = one_of_each_class(layout, how.imbalance) if rank is None else [rank]
    records = _run(config, how, ranks, tell)
    result = DryRun(
        config,
        how,
        tuple(records),
        {number: planned(config, number) for number in ranks},
        tuple(disagreements(records)) if rank is None else (),
        stages=given.batch.schedule.stages,
        compile_left_out=compiles,
    )
    if result.fits or not remedies:
        return result
    tried = tuple(_remedies(given, how, result.fullest.rank, tell))
    return replace(result, remedies=tried)


def _run(
    config: RunConfig, how: DryRunSettings, ranks: Sequence[int], tell: Tell, what: str = "dry run"
) -> list[RankRecord]:
    """Dry-run ranks. Each appends a byte to its own file when an action starts, from which progress is counted."""
    from shardwright.verification.ranks import end_all, run_ranks

    text = resolved_toml(config)

    def run_rank(rank: int) -> RankRecord:
        (record,) = run_ranks(_in_process, 1, text, rank, how, str(Path(folder, str(rank))), timeout_s=TIMEOUT_S)
        assert isinstance(record, RankRecord)
        return record

    def n_started() -> int:
        return sum(file.stat().st_size for file in Path(folder).iterdir())

    layout, length = config.layout.layout(), step_length(config)
    total = sum(length.n_actions[layout.coordinates(rank)["pp"]] for rank in ranks)
    what = f"{what} of {f'{len(ranks)} ranks' if len(ranks) > 1 else f'rank {ranks[0]}'}"
    with (
        TemporaryDirectory(prefix="shardwright-dryrun-") as folder,
        report_progress(tell, what, n_started, total, "actions"),
        ThreadPoolExecutor(min(len(ranks), cpu_count() or 1)) as pool,
    ):
        try:
            return list(pool.map(run_rank, ranks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _in_process(text: str, rank: int, how: DryRunSettings, progress: str) -> RankRecord:
    from shardwright.dry_run.program import dry_rank

    config = parse(tomllib.loads(text))
    with open(progress, "ab", buffering=0) as file:

        def count_action() -> None:
            file.write(b".")

        return dry_rank(
            config,
            rank,
            gpu=how.gpu,
            steps=how.steps,
            imbalance=how.imbalance,
            history=how.history,
            on_action=count_action,
        )


def _not_compiled(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"compile": False})})


def _remedies(config: RunConfig, how: DryRunSettings, rank: int, tell: Tell) -> Iterator[DryRunRemedy]:
    """Yield changes of the run file after which the rank fits with the stage of the batch that needs most memory:
    changes that fit by the plan, each confirmed by a dry run."""
    n_remedies = 0
    seen = [fullest_stage_config(config)]
    for changes in _changes(config):
        try:
            changed = fullest_stage_config(_changed(config, changes))
        except InputError:
            continue
        if changed in seen:
            continue
        seen.append(changed)
        if not _planned_to_fit(changed, how):
            continue
        change = " ".join(f"--set {path}={_written(value)}" for path, value in changes.items())
        (record,) = _run(changed, replace(how, history=False), [rank], tell, f"dry run with {change}")
        needed = _needed_bytes(record, planned(changed, record.rank))
        if needed <= how.limit_bytes:
            yield DryRunRemedy(change, needed)
            n_remedies += 1
        if n_remedies == _MOST_REMEDIES:
            return


def _changes(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield changes that need less memory, cheapest in time first: on the same number of ranks, then on more."""
    layout, micro_batch = config.layout.layout(), fullest_stage_config(config).batch.micro_batch
    single: list[dict[str, Any]] = []
    chunks = {} if layout.loss_chunk_tokens or config.preference.kind != "none" else {"layout.loss_chunk_tokens": 4096}
    if chunks:
        single.append(chunks)
    if layout.tp > 1 and not layout.sequence_parallel:
        single.append({"layout.sequence_parallel": True})
    single += [{"layout.zero": zero} for zero in range(max(1, layout.zero + 1), 4)]
    if layout.dp_replicate > 1:
        every = layout.dp_replicate * layout.dp_shard
        single.append({"layout.dp_shard": every, "layout.dp_replicate": 1, "layout.zero": max(1, layout.zero)})
    if micro_batch > 1:
        single.append(config.batch.lowered("micro_batch", micro_batch // 2))
    if layout.recompute == "none":
        single.append({"layout.recompute": "selective"})
    if layout.recompute != "full":
        single.append({"layout.recompute": "full"})
    yield from single
    together: dict[str, Any] = {**config.batch.lowered("micro_batch", 1), "layout.recompute": "full", **chunks}
    yield together
    data_ranks = layout.dp_shard * layout.dp_replicate
    most = {"layout.dp_shard": data_ranks, "layout.dp_replicate": 1, "layout.zero": 3}
    yield together | most
    for times in (2, 4, 8):
        yield together | most | {"layout.dp_shard": times * data_ranks}
    for times in (2, 4, 8):
        yield together | {"layout.tp": times * layout.tp}


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Return the run file with other values. Raises InputError if they are not valid."""
    table = tomllib.loads(resolved_toml(config))
    for path, value in changes.items():
        apply_override(table, f"{path}={json.dumps(value)}")
    if "layout.recompute" in changes:
        table["layout"].pop("recompute_modules", None)
        table["layout"].pop("recompute_layers", None)
    return parse(table)


def _planned_to_fit(config: RunConfig, how: DryRunSettings) -> bool:
    """Return whether, by the plan's formulas if any, the fullest rank exceeds its limit by at most 10 %."""
    layout = config.layout.layout()
    if config.precision.compute == "fp64":
        return True
    return peak_bytes(job_of(config), layout, config.batch.micro_batch) <= 1.1 * how.limit_bytes


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
