"""The work of `shardwright train`: check everything that needs no workers, then run or start the workers."""

import atexit
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright.config import RunConfig
from shardwright.config.metrics import MEMORY_ON_CPU
from shardwright.config.mixture import sources_of
from shardwright.config.settle import shrunk
from shardwright.data.shards import source_folders
from shardwright.model.modules import rows
from shardwright.report.headline import headline
from shardwright.report.run_record import read_run
from shardwright.runs.folder import CHECKPOINTS, LOGS, METRICS, checkpoint_name, misplaced_entries, published, resumable
from shardwright.runs.records import EvaluationRecord, TrainRecord, read_metrics
from shardwright.system.console import LossyStream, visible
from shardwright.system.errors import (
    CheckpointError,
    CopiesError,
    InputError,
    LayoutError,
    QuietExit,
    SaveError,
    ShardwrightError,
    SpikeError,
    WorkerError,
    collecting,
)
from shardwright.system.files import real_path
from shardwright.system.owner import problem_of_owner
from shardwright.system.processes import PROCESS_BYTES, formatted, in_one_sentence, is_lost_peer, machine_memory
from shardwright.system.remote import REMOTE
from shardwright.system.units import format_bytes, format_count
from shardwright.training.checkpoint.durable import durable_copy, durable_folder
from shardwright.training.checkpoint.local import claim
from shardwright.training.device import least_state_bytes
from shardwright.training.initial_weights import initial_weights_problems
from shardwright.training.launch import launch
from shardwright.training.preparing import preparing
from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment
from shardwright.training.settle import settle
from shardwright.training.sources import Sources, tokenizer_problems
from shardwright.training.worker import exit_code
from shardwright.training.writers.table import missing_extras, record_failure, writer_problems

_LOST_PEER_WAIT_S = 3.0
FOUND_BY_ALL = (SpikeError, CopiesError)
"""Training errors that every rank raises at the same time with the same text."""
RANKS_PER_CORE = 16
"""Maximum number of processes per core on a machine without GPUs."""
TOKEN_BYTES = 16
"""Bytes of a token and its target on the host, 64 bits each."""


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """The end of a run. `summary`: steps, losses, paths; None except on rank 0. `stopped`: a signal ended the run
    after a save, before its last step."""

    summary: dict[str, Any] | None
    stopped: bool


def start(config: RunConfig, quiet: bool = False, max_restarts: int = 0) -> RunEnd:
    """Train a run file. If it needs several ranks and the environment sets up none, start them on this machine, and
    restart them up to `max_restarts` times after a fault of a rank.

    Raises InputError before anything is written if an input cannot be used, and WorkerError for errors in training.
    """
    place = place_from_environment()
    in_training = False
    try:
        if place is not None and max_restarts:
            raise InputError(
                f"--max-restarts {max_restarts} goes with ranks that are started here; these were started by torchrun "
                f"or srun: give torchrun itself --max-restarts (docs/faults.md)"
            )
        if place is not None and config.faults.min_ranks is not None:
            config = _on_fewer_ranks(config, place.world_size)
        if any(source.prepare for source in sources_of(config.data)):
            check_run(config, place, max_restarts, with_data=False)

        def say(text: str) -> None:
            if not quiet and (place is None or place.rank == 0):
                print(visible(text), file=LossyStream("stdout"), flush=True)

        with preparing(config, place is None or place.rank == 0, say):
            _prepare(config, place, max_restarts)
            in_training = True
            return _train(config, place, quiet, max_restarts)
    except BaseException as error:
        if in_training and (place is None or place.rank == 0) and not isinstance(error, KeyboardInterrupt):
            record_failure(config)
        if place is not None and place.world_size > 1:
            raise _as_printed_of_ranks(error, place, in_training) from None
        if isinstance(error, ShardwrightError | KeyboardInterrupt):
            raise
        if isinstance(error, OSError) and not in_training:
            raise InputError(f"{error.filename or config.out}: {error.strerror}") from None
        if (expected := in_one_sentence(error)) is not None:
            raise type(expected)(f"{expected}\n{_way_on(config)}") from None
        raise WorkerError(f"training failed: {type(error).__name__}: {error}\n\n{formatted(error)}") from None


def _on_fewer_ranks(config: RunConfig, world_size: int) -> RunConfig:
    """Return the run on the ranks that were started, if these are fewer than in its layout and at least
    `faults.min_ranks`. Raises LayoutError if no layout with fewer ranks along dp alone uses all of them."""
    wanted, least = config.layout.layout().world_size, config.faults.min_ranks
    assert least is not None
    if not least <= world_size < wanted:
        return config  # correct, or refused later as without min_ranks
    smaller = shrunk(config, world_size, world_size)
    if smaller is None:
        raise LayoutError(
            f"{world_size} processes were started for a layout of {wanted} ranks, and with fewer ranks along dp alone "
            f"none uses all {world_size} of them and trains {config.batch.schedule.global_batches}; start "
            f"another number of them, {least} (faults.min_ranks) to {wanted}"
        )
    return smaller


def check_run(
    config: RunConfig, place: ProcessRank | None = None, max_restarts: int = 0, with_data: bool = True
) -> None:
    """Raise InputError for every problem of a run that can be found without training. `place`: of this process among
    the ranks that torchrun or srun started; None: all ranks start here. `with_data`: whether the data is there."""
    if config.faults.spares and not max_restarts:
        way_out = "give --max-restarts N, too" if place is None else "torchrun and srun have none: leave it out"
        raise InputError(
            f"faults.spares={config.faults.spares} are places for ranks that are started again here; {way_out}"
        )
    layout = config.layout.layout()
    layout.check_world(layout.world_size if place is None else place.world_size)
    _check(config, alone=place is None, serves=place is None or place.rank == 0, with_data=with_data)


def _prepare(config: RunConfig, place: ProcessRank | None, max_restarts: int) -> None:
    """Check the run and create its folder. Raises InputError."""
    check_run(config, place, max_restarts)
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"out={config.out!r} cannot be made: {error.filename}: {error.strerror}; name another folder with "
            f"--set out=..."
        ) from None


def _train(config: RunConfig, place: ProcessRank | None, quiet: bool, max_restarts: int) -> RunEnd:
    out, world_size = Path(config.out), config.layout.layout().world_size
    if place is None and (world_size > 1 or max_restarts):
        config, remark = settle(config, pick_device(config.device, ProcessRank()), ranks_here=world_size)
        if remark and not quiet:
            print(visible(remark), file=LossyStream("stdout"), flush=True)
        try:
            stopped = launch(config, out / LOGS, quiet, max_restarts)
        except (WorkerError, SaveError, *FOUND_BY_ALL) as error:
            raise type(error)(f"{error}\n{_way_on(config)}") from None
    else:
        from shardwright.training.run import run

        try:
            stopped = run(config, place or ProcessRank(), quiet=quiet)
        except (SaveError, *FOUND_BY_ALL) as error:
            raise type(error)(f"{error}\n{_way_on(config)}") from None
    return RunEnd(summary(out) if place is None or place.rank == 0 else None, stopped)


def _way_on(config: RunConfig) -> str:
    saved = resumable(Path(config.out), config.checkpoint.local)
    return f"saved up to {saved[-1]}; continue from it with --resume" if saved else "nothing was saved yet"


def _as_printed_of_ranks(error: BaseException, place: ProcessRank, in_training: bool) -> BaseException:
    """Convert an error of a rank of torchrun or srun to the form that is printed among other ranks' errors."""
    # Every rank raises these errors identically, so one rank of each machine prints them.
    shared = not in_training or isinstance(error, (CheckpointError, *FOUND_BY_ALL))
    code = 130 if isinstance(error, KeyboardInterrupt) else exit_code(error)
    kind = type(error).__name__
    if in_training:
        # PyTorch's pending operations with other ranks would abort this process as it ends and hide its exit code.
        atexit.register(os._exit, code)
    if isinstance(error, KeyboardInterrupt):
        return error
    if is_lost_peer(error):
        # The rank at fault should be the first to fail from the launcher's view. The launcher then ends this one.
        time.sleep(_LOST_PEER_WAIT_S)
        return WorkerError(
            f"rank {place.rank} could not reach another rank; if one failed, its own error has the reason. This error: "
            f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
    error = in_one_sentence(error) or error
    problems = error.problems if isinstance(error, InputError) else [f"{kind}: {error}"]
    if isinstance(error, FOUND_BY_ALL):
        problems = [str(error)]
    if not shared:
        problems = [f"rank {place.rank}: {problem}" for problem in problems]
    if not isinstance(error, ShardwrightError):
        problems[-1] += "\n\n" + formatted(error)
    _report_to_torchrun("\n".join(problems))
    if shared and place.local_rank != 0:
        time.sleep(_LOST_PEER_WAIT_S)  # the launcher ends the other ranks when one exits: let rank 0 print first
        return QuietExit(code)
    return InputError(*problems) if isinstance(error, InputError) else WorkerError(*problems)


def _report_to_torchrun(text: str) -> None:
    """Write an error to the file that torchrun's final summary reads."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _machine_problems(config: RunConfig) -> list[str]:
    """Return the reasons why this machine alone cannot run all ranks: too few GPUs or, without GPUs, too little
    memory."""
    world_size = config.layout.layout().world_size
    cores = os.cpu_count() or 1
    n_gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    spares = config.faults.spares
    if n_gpus:
        few = f"the layout has {world_size} ranks{f' and {spares} spare places' if spares else ''} and this machine "
        few += f"{n_gpus} GPUs; start it with torchrun or srun on several machines, or lower the degrees of layout.*"
        return [few + " or faults.spares" * (spares > 0)] if world_size + spares > n_gpus else []
    if world_size > RANKS_PER_CORE * cores:
        return [
            f"{world_size} ranks on the {cores} cores of this machine are {world_size / cores:.0f} processes a core, "
            f"and at most {RANKS_PER_CORE} are started; start them on several machines with torchrun or srun, or look "
            f"at the layout here with shardwright plan"
        ]
    spec, element = config.spec(), 8 if config.precision.compute == "fp64" else 4
    where = config.layout.layout().offload_optimizer
    offloads = where == "disk"
    n_trained = spec.n_trained_parameters
    optimizer, state_element = config.optimizer, 2 if config.optimizer.state_dtype == "bf16" else element
    states = 0 if offloads else optimizer.kind.n_bytes(rows(spec).values(), state_element, optimizer.options)
    size = 2 * element + states / n_trained  # weights, gradients and the optimizer's states
    size += element * (where == "cpu")  # a second copy of the weights
    if config.checkpoint.async_mode != "disabled" or config.checkpoint.local is not None:
        size += element + states / n_trained  # the copies for background writes
    needed = round((least_state_bytes(config, size) + PROCESS_BYTES) * world_size)
    room = machine_memory()
    if needed <= room.n_bytes:
        return []
    less = "" if offloads or not config.optimizer.kind.can_offload else ", with layout.offload_optimizer='disk'"
    per = "a parameter" if spec.lora is None else "a trained parameter, and the frozen base"
    return [
        f"{world_size} ranks of a model of {format_count(spec.n_parameters)} parameters need {format_bytes(needed)} or "
        f"more ({size:.3g} bytes {per}, {format_bytes(PROCESS_BYTES)} a process), and this machine {room} and no GPU "
        f"that is used; train it on a cluster with torchrun or srun{less}, or a smaller model here"
    ]


def _batch_problems(config: RunConfig) -> list[str]:
    """Return the reasons why the batches that one rank prefetches do not fit into this machine's memory."""
    layout, batch = config.layout.layout(), max(config.batch.schedule.stages, key=lambda stage: stage.tokens)
    sequences, batches = batch.global_batch // layout.data_ranks, config.data.prefetch + 2
    needed = sequences * batch.seq_len * batches * TOKEN_BYTES
    if needed <= (memory := machine_memory()).n_bytes:
        return []
    large = config.batch.lowered("global_batch", batch.global_batch - 1)
    return [
        f"a rank reads {sequences:,} sequences of seq_len={batch.seq_len:,} tokens for a step and holds "
        f"{batches} such batches (data.prefetch={config.data.prefetch}), with {TOKEN_BYTES} bytes a token "
        f"{format_bytes(needed)}; this machine {memory}; lower {' and '.join(large)}, or raise "
        f"layout.dp_shard or dp_replicate"
    ]


def _check(config: RunConfig, alone: bool, serves: bool, with_data: bool) -> None:
    """Raise InputError for data that does not fit the model, for a folder that already contains a run and, if
    `alone` (all ranks start here), for a machine that is too small. `serves`: rank 0 is a process of this machine."""
    problems = missing_extras(config) + (writer_problems(config) if serves else [])
    if config.profile.memory and config.device != "cpu" and not torch.cuda.is_available():
        problems.append(MEMORY_ON_CPU.format(device="no GPU here"))
    problems += _batch_problems(config) + (_machine_problems(config) if alone else [])
    with collecting(problems):
        if with_data:
            Sources(config)
    if with_data and not config.data.other_tokenizer:
        problems += _tokenizer_problems(config)
    out = Path(config.out)
    problems += (kind_problems := misplaced_entries(out))
    saved = [] if kind_problems else published(out / CHECKPOINTS)
    problems += _durable_problems(config, saved) if serves else []
    problems += _local_problems(config, saved)
    if config.init.weights is not None and not saved:
        problems += initial_weights_problems(config)
    if alone and (in_use := problem_of_owner(out)):  # otherwise rank 0 of this run may own it already
        problems.append(in_use)
    elif not kind_problems and config.checkpoint.resume == "no" and (saved or (out / METRICS).exists()):
        problems.append(
            f"{out} already holds a run"
            + (f", saved up to {saved[-1].name}" if saved else "")
            + "; add --resume to continue it, or name another folder with --set out=..."
        )
    elif config.checkpoint.resume not in ("no", "auto"):
        given = Path(config.checkpoint.resume)
        if REMOTE in config.checkpoint.resume:
            problems += _copy_problems(config.checkpoint.resume)
        elif not given.is_dir():
            example = saved[-1] if saved else out / CHECKPOINTS / checkpoint_name(100)
            problems.append(
                f"checkpoint.resume={config.checkpoint.resume!r} is not a folder; give 'auto', 'no' or the "
                f"path of a checkpoint such as {example}"
            )
        elif saved and real_path(given) != real_path(saved[-1]):
            problems.append(
                f"{out} holds a run, saved up to {saved[-1].name}, which a run from {given} would "
                f"overwrite; name another folder with --set out=..., or add --resume to continue the run "
                f"in it"
            )
    if problems:
        raise InputError(*problems)


def _tokenizer_problems(config: RunConfig) -> list[str]:
    """Return the reasons why the run's data was tokenized for another model than its initial weights."""
    given = {"init.weights": config.init.weights, "model.from": config.model.folder}
    models = {f"{key}={path!r}": Path(path) for key, path in given.items() if path is not None}
    try:
        data = {f"data {path!r}": folder for path, folder in source_folders(config.data).items()}
        return tokenizer_problems(data, models, ", or set data.other_tokenizer=true")
    except InputError as error:
        return error.problems


def _durable_problems(config: RunConfig, saved: Sequence[Path]) -> list[str]:
    """Return the reasons why checkpoints cannot be copied to `checkpoint.durable`, including another run's copies."""
    section = config.checkpoint
    try:
        durable = durable_folder(config)
        if durable is None:
            return []
        if REMOTE not in durable.url and real_path(durable.url) == real_path(Path(config.out) / CHECKPOINTS):
            return [
                f"checkpoint.durable={section.durable!r} is the folder that checkpoints are copied from; name another"
            ]
        durable.require_writable()
        steps = durable.steps()
    except CheckpointError as error:
        return [f"checkpoint.durable={section.durable!r} cannot be written: {error}"]
    if section.resume == "no" and steps and not saved:
        return [
            f"checkpoint.durable={section.durable!r} already holds checkpoints of a run, up to "
            f"{checkpoint_name(steps[-1])}; add --resume to continue it, or name another place"
        ]
    return []


def _local_problems(config: RunConfig, saved: Sequence[Path]) -> list[str]:
    """Return the reasons why `checkpoint.local` cannot be used on this machine, such as checkpoints of another run,
    or of this run if it is not resumed."""
    section = config.checkpoint
    if section.local is None:
        return []
    folder, out = Path(section.local), Path(config.out)
    if real_path(folder) in (real_path(out), real_path(out / CHECKPOINTS)):
        return [f"checkpoint.local={section.local!r} is a folder of the run itself; name another one on each host"]
    try:
        claim(folder, out)
        kept = published(folder)
    except CheckpointError as error:
        return [f"checkpoint.local={section.local!r}: {error}"]
    except OSError as error:
        return [f"checkpoint.local={section.local!r} cannot be written: {error.filename}: {error.strerror}"]
    if section.resume != "auto" and kept and not saved:
        return [
            f"checkpoint.local={section.local!r} holds checkpoints of a run, up to {kept[-1].name}; add --resume to "
            f"continue it, or delete that folder on each host"
        ]
    return []


def _copy_problems(url: str) -> list[str]:
    """Return the reasons why a run cannot start with the checkpoint at a URL."""
    try:
        durable, step = durable_copy(url)
        complete = durable.is_complete(step)
    except CheckpointError as error:
        return [f"checkpoint.resume={url!r}: {error}"]
    return [] if complete else [f"checkpoint.resume={url!r}: there is no complete checkpoint"]


def summary(out: Path) -> dict[str, Any]:
    """Return the results of a run from its folder: the headline numbers of its report, and its newest checkpoint."""
    saved = published(out / CHECKPOINTS)
    # A run has logged nothing if it was complete when resumed, or stopped before its first logged step.
    logged = any(isinstance(record, TrainRecord | EvaluationRecord) for record in read_metrics(out / METRICS))
    numbers = dataclasses.asdict(headline(read_run(out))) if logged else {}
    return {"out": str(out), **numbers, "checkpoint": str(saved[-1]) if saved else None}
