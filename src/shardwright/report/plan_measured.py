"""A finished run next to its plan, term by term."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.config import RunConfig
from shardwright.config.batch import BatchStage
from shardwright.config.settle import needs_memory
from shardwright.cost.hardware import Cluster
from shardwright.layout.key import written
from shardwright.layout.keys import KEYS
from shardwright.planner.choice import PricedLayout
from shardwright.planner.headline import headline
from shardwright.report.plan_view import job_note
from shardwright.report.run_record import RunRecord, RunSegment, read_run
from shardwright.runs.folder import RUN_FILE
from shardwright.system.errors import InputError
from shardwright.system.units import format_bytes, format_count, format_seconds
from shardwright.view.document import NUMBER, WORDS, Column, Note, Table, VerbDocument

CPU = "cpu"
"""The device of a run on a CPU, and the accelerator's name in a cluster of CPUs."""
_TIMES = ("step_s", "data_s", "forward_backward_s", "optimizer_s")
UPDATE = "optimizer"
"""The part of a planned step that is compared with the measured time of the optimizer."""


@dataclass(frozen=True)
class ComparedTerm:
    """One quantity as planned and as measured, in seconds, bytes, tokens/s or a share of the peak; None: not measured.
    `unit`: "s", "B", "tokens/s" or ""."""

    name: str
    unit: str
    planned: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Return measured / planned, or None if one of them is 0 or not known."""
        return self.measured / self.planned if self.measured and self.planned else None

    def in_words(self, value: float | None) -> str:
        """Return a value of this term as text with its unit."""
        if value is None:
            return "n/a"
        formats = {"s": format_seconds, "B": format_bytes, "tokens/s": lambda n: f"{format_count(n)} tokens/s"}
        return formats[self.unit](value) if self.unit in formats else f"{value:.1%}"


@dataclass(frozen=True)
class PlanComparison:
    """A run next to its plan. `terms`: quantities of the whole step; `parts`: parts of the step time, which add up to
    the planned step; `steps`: the steps whose records were read. Each measured number except the peak memory is the
    median over these records. `device`: the run's device, None if an older version did not record it."""

    terms: tuple[ComparedTerm, ...]
    parts: tuple[ComparedTerm, ...]
    steps: str
    n_records: int
    device: str | None

    @property
    def largest(self) -> str:
        """Return a sentence that names the part of the step whose seconds differ most."""
        gaps = {part: (part.measured or 0.0) - part.planned for part in self.parts}
        part = max(gaps, key=lambda name: abs(gaps[name]))
        more = "more" if gaps[part] > 0 else "less"
        times = "" if part.ratio is None else f", {part.ratio:.2f} times"
        return (
            f"{part.name} differs most: {part.in_words(part.measured)} measured and {part.in_words(part.planned)} "
            f"planned, {format_seconds(abs(gaps[part]))} {more}{times}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        rows = [asdict(term) | {"ratio": term.ratio} for term in (*self.terms, *self.parts)]
        return {
            "steps": self.steps,
            "n_records": self.n_records,
            "device": self.device,
            "terms": rows,
            "largest": self.largest,
        }


def run_of(folder: Path, config: RunConfig, run_file: str, cluster: Cluster) -> RunRecord:
    """Return the run in a folder. It must have logged steps of the model, batch and layout of the run file `config`, on
    a device of the kind of `cluster`.

    Raises InputError for a folder that is not one of a run, for a run without steps, for records whose times are not
    valid, for a run on a CPU with a plan for accelerators or the reverse, and with every key that differs.
    """
    run = read_run(folder)
    if not run.train:
        raise InputError(f"--measured {folder}: the run has evaluations and no logged step; wait for one")
    if not run.segments[-1].train:
        raise InputError(
            f"--measured {folder}: no step is logged yet since the layout or the device changed; wait for one"
        )
    for record in run.segments[-1].train:
        if missing := [
            f"{name}={value}" for name in _TIMES if (value := getattr(record, name)) < (name == "step_s") * 1e-9
        ]:
            raise InputError(f"--measured {folder}: the record of step {record.step} has {', '.join(missing)}: no time")
    device, accelerator = run.starts[-1].device if run.starts else None, cluster.accelerator
    if (device == CPU and accelerator.host_bytes_per_s) or (device not in (CPU, None) and accelerator.name == CPU):
        right = CPU if device == CPU else "h100"
        raise InputError(
            f"--measured {folder}: this is a run on {device}, and --cluster {cluster.name} has {accelerator.name}; "
            f"name what it ran on, such as --cluster {right}:{cluster.size}"
        )
    theirs, ours = _settings(run.config), _settings(config)
    names = [name for name in ours if ours[name] != theirs[name]]
    if needs_memory(config):
        names = [name for name in names if name not in ("layout.recompute", "layout.recompute_layers")]
    if names:
        its, file = (", ".join(f"{name}={written(side[name])}" for name in names) for side in (theirs, ours))
        raise InputError(
            f"--measured {folder}: this is a run with {its}, and {run_file} has {file}; "
            f"compare the run with its own file, {folder / RUN_FILE}"
        )
    return run


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the keys of a run file that its plan depends on."""
    layout = config.layout.layout()
    spec = config.spec()
    return {
        **{f"model.{field.name}": getattr(spec, field.name) for field in fields(spec)},
        **{f"batch.{name}": getattr(config.batch, name) for name in type(config.batch).model_fields},
        "optimizer.name": config.optimizer.name,
        "optimizer.state_dtype": config.optimizer.state_dtype,
        "precision.compute": config.precision.planned,
        "precision.compile": config.precision.compile,
        **{f"layout.{name}": getattr(layout, name) for name in KEYS},
    }


def compare_run(run: RunRecord, priced: PricedLayout) -> PlanComparison:
    """Return the medians of the logged steps on the run's last layout, next to the plan of this layout.

    The plan has no time for reading data. Memory is rank 0's: the bytes from the allocator on a GPU, the resident set
    size of the process on a CPU.
    """
    segment, schedule = run.segments[-1], run.config.batch.schedule
    size = priced.job.global_batch, priced.job.seq_len
    segment = replace(
        segment,
        train=tuple(record for record in segment.train if _size(schedule.stage_at(max(0, record.step - 1))) == size),
    )
    if not segment.train:
        raise InputError(
            f"--measured: no step of {size[0]:,} sequences of {size[1]:,} tokens is logged yet; wait for one"
        )
    planned, memory = headline(priced), priced.memory
    on_device = bool(priced.job.cluster.accelerator.host_bytes_per_s)
    bytes_of_rank = memory.rank_bytes if on_device else memory.rank_bytes + memory.lost_bytes
    update_s = priced.parts_s[UPDATE]
    terms = (
        ComparedTerm("step", "s", priced.step_s, _median(segment, "step_s")),
        ComparedTerm("tokens per second", "tokens/s", planned.tokens_per_s, _median(segment, "tokens_per_s")),
        ComparedTerm("MFU", "", planned.mfu_full, _median(segment, "mfu")),
        ComparedTerm(
            "peak memory, rank 0", "B", float(bytes_of_rank[0, 0]), max(record.memory_bytes for record in segment.train)
        ),
    )
    parts = (
        ComparedTerm("data", "s", 0.0, _median(segment, "data_s")),
        ComparedTerm("forward + backward", "s", priced.step_s - update_s, _median(segment, "forward_backward_s")),
        ComparedTerm("optimizer", "s", update_s, _median(segment, "optimizer_s")),
    )
    return PlanComparison(
        terms, parts, segment.steps, len(segment.train), run.starts[-1].device if run.starts else None
    )


def _size(stage: BatchStage) -> tuple[int, int]:
    return stage.global_batch, stage.seq_len


def _median(segment: RunSegment, name: str) -> float | None:
    values = [value for record in segment.train if (value := getattr(record, name)) is not None]
    return median(values) if values else None


def measured_view(comparison: PlanComparison, priced: PricedLayout, name: str, folder: Path, data: Any) -> VerbDocument:
    """Return the document of a run next to its plan. `name`: the model's; `data`: the JSON document."""
    n = comparison.n_records
    on = "" if comparison.device is None else f" on {comparison.device}"
    rows = [
        (term.name, term.in_words(term.planned), term.in_words(term.measured), term.ratio and f"{term.ratio:.2f}")
        for term in (*comparison.terms, *comparison.parts)
    ]
    columns = [Column("", WORDS), *(Column(head, NUMBER) for head in ("planned", "measured", "measured / planned"))]
    parts = (
        job_note(priced.job, name),
        Note(str(priced.choice), tone="strong"),
        Note(f"{folder}, {comparison.steps}: medians of {n} {'record' if n == 1 else 'records'}{on}"),
        Table(columns, rows),
        Note(comparison.largest),
    )
    return VerbDocument(f"{folder}: measured and planned", data, parts)
