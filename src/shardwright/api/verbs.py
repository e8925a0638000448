"""The commands as functions: `plan`, `verify`, `dryrun`, `train` and `load_run`."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.api.arguments import as_spec, check_choices, check_counts, check_layout
from shardwright.layout.layout import Layout
from shardwright.model.presets import resolve
from shardwright.model.spec import ModelSpec
from shardwright.runs.folder import CHECKPOINTS, published
from shardwright.system import extensions
from shardwright.system.errors import InputError, checked_call

if TYPE_CHECKING:
    from shardwright.config import RunConfig
    from shardwright.dry_run.run import DryRun
    from shardwright.model.transformer import Transformer
    from shardwright.planner.search import Plan
    from shardwright.report.run_record import RunRecord
    from shardwright.verification import Report


@checked_call
def extend(name: str | Path) -> None:
    """Import a Python file, or a module by its name, that registers schedules, optimizers or model families. Processes
    started from this process import it, too. Raises ConfigError, with the line, if the import fails."""
    extensions.load_trusted([str(name)])


@checked_call
def preset(name: str) -> ModelSpec:
    """Return the sizes of a named model, such as "debug" or "llama-3.1-8b" (docs/run-file.md lists them). Change sizes
    with `dataclasses.replace`. Raises ConfigError, with the nearest name, for an unknown name."""
    return resolve(name)


@checked_call
def plan(
    model: ModelSpec | str,
    cluster: str,
    *,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    narrow_states: bool = False,
    memory_margin: float = 0.1,
    top: int = 10,
    hardware: str | Path | None = None,
    host_memory: str | None = None,
    fix: Mapping[str, Any] | None = None,
    prefer: str | None = None,
) -> "Plan":
    """Find the fastest layouts of a cluster that fit, without a GPU and without PyTorch.

    `model`: a ModelSpec or the name of a preset. `cluster`: accelerators and their number, such as "h100:64".
    `global_batch` in sequences, `seq_len` in tokens. `precision` of matmuls: fp32, tf32, bf16, fp16, fp8, fp8-row,
    fp8-block, mxfp8 or nvfp4. `narrow_states`: store the states of the optimizer in bf16. `memory_margin`: fraction of
    an accelerator's memory that is kept free. `hardware`: a TOML file with your own accelerators. `host_memory`: memory
    of each node, such as "2TB", which limits the state that layouts keep there. `fix`: search only layouts with these
    values of [layout] and micro_batch, such as {"tp": 8, "pp": 1}. `prefer`: the recommended layout is the "fastest",
    "simplest" or "cheapest" (on a part of the cluster, if that takes fewer accelerator-hours), instead of one that ties
    with the fastest.

    Returns a Plan, which prints as a table. `recommended` is a layout with memory headroom and the fewest axes and
    settings among the layouts that tie with the fastest; None if no layout fits. It has `layout`, `micro_batch`,
    `step_s` in seconds, `peak_bytes`, and `parts_s`, the parts of the step time. `best` has up to `top` such layouts,
    the fastest first. Raises InputError for an unknown cluster, model or precision, LayoutError if no layout can share
    the batch.
    """
    from shardwright.cost.formats import FORMATS
    from shardwright.cost.hardware import cluster as find_cluster
    from shardwright.cost.job import Job
    from shardwright.cost.machine import on_machine
    from shardwright.optimizers import OPTIMIZERS
    from shardwright.planner.batches import cheapest
    from shardwright.planner.search import search
    from shardwright.planner.simplicity import PREFERENCES
    from shardwright.planner.space import fixed_values
    from shardwright.report.plan_table import PlanTable

    check_counts(global_batch=global_batch, seq_len=seq_len, top=top)
    check_choices({
        "precision": (precision, FORMATS), "optimizer": (optimizer, OPTIMIZERS),
        **({} if prefer is None else {"prefer": (prefer, PREFERENCES)}),
    })  # fmt: skip
    machine = find_cluster(cluster, None if hardware is None else Path(hardware))
    if (problem := machine.accelerator.peak_problem(FORMATS[precision].peak)) is not None:
        raise InputError(f"precision={precision!r}: {problem}")
    job = Job(
        model=as_spec(model),
        cluster=machine if host_memory is None else machine.with_host_memory(host_memory),
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        narrow_states=narrow_states,
    )
    fixed = None if fix is None else fixed_values(fix)
    result = search(on_machine(job), memory_margin=memory_margin, top=top, fixed=fixed, prefer=prefer)
    result = cheapest(result, memory_margin=memory_margin, top=top) if prefer == "cheapest" else result
    return PlanTable(**vars(result))


@checked_call
def verify(
    layout: Layout,
    model: ModelSpec | str = "debug",
    *,
    seq_len: int = 64,
    global_batch: int = 8,
    micro_batch: int = 1,
    against: Layout | None = None,
    steps: int = 3,
    dtype: str = "float64",
    seed: int = 0,
    full: bool = False,
    timeout_s: float = 300.0,
) -> "Report":
    """Compare a layout's computation with one process in plain PyTorch: losses, gradient norms, every gradient and
    every parameter of a few steps. Replicas on several ranks are compared bit for bit.

    `model`: a ModelSpec or the name of a preset, reduced to test size unless `full`. `against`: another layout, instead
    of one process. `dtype`: "float64", "float32", "bfloat16" or "float16". Ranks are processes on this machine's CPU; a
    layout with too many ranks for this machine is reduced to fewer ranks along each axis.

    Returns a Report: `equal`, `worst_error`, `rows` (one comparison each) and, if the layout is not equal, `culprit`:
    the smallest layout that still differs. Raises LayoutError if the layout does not fit the model or the batch,
    WorkerError if a rank fails or takes more than `timeout_s` seconds.
    """
    spec = as_spec(model)
    check_counts(seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch, steps=steps)
    for side in (layout,) if against is None else (layout, against):
        check_layout(side)
    from shardwright.verification.ranks import start_server

    start_server()  # it imports PyTorch while this process does
    from shardwright.verification import Case, Verifier
    from shardwright.verification.cut_case import cut, cut_layout
    from shardwright.verification.reduce import most_ranks, reduced
    from shardwright.verification.verifier import find_culprit

    true = Case(spec, seq_len, global_batch, micro_batch, seed, steps=steps, dtype=dtype)
    sides = [layout] if against is None else [layout, against]
    with Verifier(timeout_s=timeout_s) as verifier:
        if full or against is not None or layout.world_size <= most_ranks():
            case = true if full else cut(true, sides)
            first, *second = sides if full else [cut_layout(side, true, case) for side in sides]
            report = verifier.parity(case, first, (case, second[0]) if second else None)
        else:
            pairs, _ = reduced(true, layout, most_ranks())
            reports = [verifier.parity(*pair) for pair in pairs]
            report = next((item for item in reports if not item.equal), reports[0])
        return report if report.equal else replace(report, culprit=find_culprit(verifier, report))


@checked_call
def dryrun(
    run: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    device_memory: str,
    rank: int | None = 0,
    steps: int = 2,
    imbalance: float = 1.0,
    count_as: str = "gpu",
    remedies: bool = False,
) -> "DryRun":
    """Run the training program of a run file as `rank` of its world, on fake tensors, without a GPU, data or memory for
    the weights.

    `run`, `changes`: as in `train`. `device_memory`: memory of a rank's device, such as "80GiB". `rank`: None runs one
    rank of each class that can differ, and checks that their messages agree. `steps`: number of steps; the last is
    reported. `imbalance`: expert rows of the first rank of ep, divided by the mean. `count_as`: "gpu", with the kernels
    and the allocator of a GPU, or "cpu". `remedies`: try changes if the run does not fit.

    Returns a DryRun: `fits`, `fullest`, `records` (one a rank, with its `peak`, `curve`, `largest` tensors, `messages`
    and `flops`) and `disagreements`. Raises ConfigError with all problems of the run file, LayoutError for a rank
    outside of the world, InputError for an invalid size or choice.
    """
    from shardwright.config import as_toml, load, parse
    from shardwright.dry_run.run import dry_run_settings
    from shardwright.verification.ranks import start_server

    how = dry_run_settings(device_memory, count_as, steps, imbalance)
    start_server()
    from shardwright.dry_run.run import dry_run

    overrides = [f"{key}={as_toml(value)}" for key, value in (changes or {}).items()]
    config = parse(deepcopy(dict(run)), overrides, "run") if isinstance(run, Mapping) else load(run, overrides)
    return dry_run(config, how, rank, remedies)


@checked_call
def train(
    run: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    quiet: bool = False,
    max_restarts: int = 0,
) -> "Run | None":
    """Train the model of a run file. If its layout has several ranks and no launcher has started them, start them here.

    `run`: the path of a run file, or its keys as a nested mapping. `changes`: keys to change, such as
    {"layout.dp_shard": 2, "steps": 50}. `quiet`: print nothing. `max_restarts`: how often ranks that are started here
    are restarted from the newest complete checkpoint after a rank was killed, failed or hung.

    Returns the run, as `load_run` does, or None on a rank other than the first. Raises ConfigError with all problems of
    the run file, DataError or CheckpointError for data and checkpoints that cannot be used, WorkerError if training
    fails.
    """
    from shardwright.config import as_toml, load, parse
    from shardwright.training.start import start

    overrides = [f"{key}={as_toml(value)}" for key, value in (changes or {}).items()]
    if isinstance(run, Mapping):
        config = parse(deepcopy(dict(run)), overrides, "run", started=True)
    else:
        config = load(run, overrides, started=True)
    return None if start(config, quiet=quiet, max_restarts=max_restarts).summary is None else load_run(config.out)


@checked_call
def load_run(folder: str | Path) -> "Run":
    """Read the folder of a run, also while the run continues.

    Raises InputError if the folder is not a run's folder, or if a record is damaged.
    """
    from shardwright.report.run_record import read_run

    return Run(read_run(folder))


@dataclass(frozen=True)
class Run:
    """A run as recorded in its folder. `record` has all data that the report shows."""

    record: "RunRecord"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.record.folder

    @property
    def config(self) -> "RunConfig":
        """The run file with every default filled in."""
        return self.record.config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the logged training steps, a dict each: `step`, `loss`, `grad_norm`, `lr`, `tokens_per_s`, `step_s`
        and the other keys of metrics.jsonl."""
        return [asdict(record) for record in self.record.train]

    @property
    def validation(self) -> list[tuple[int, float]]:
        """Return (step, validation loss) of each evaluation."""
        return [(record.step, record.loss) for record in self.record.validation]

    @property
    def checkpoints(self) -> list[Path]:
        """Return the folders of the existing checkpoints, the oldest first."""
        return published(self.folder / CHECKPOINTS)

    @checked_call
    def model(self, checkpoint: str | Path | None = None) -> "Transformer":
        """Return the whole model of a checkpoint, by default the newest, on one process: on the CPU, in evaluation
        mode, in the type it was trained in. Raises CheckpointError if there is no checkpoint, or if it is damaged."""
        from shardwright.training.weights import newest_checkpoint, restore

        return restore(newest_checkpoint(self.folder) if checkpoint is None else Path(checkpoint))
