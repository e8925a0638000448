"""A run on one rank, from its resolved run file to its last checkpoint: builds the parts and starts the train loop."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from shardwright.config import RunConfig
from shardwright.runs.folder import RUN_FILE
from shardwright.system.errors import DataError, cleaning_up
from shardwright.system.files import write_whole
from shardwright.system.owner import sole_owner
from shardwright.system.units import counted
from shardwright.training.base_weights import base_record, fill_base
from shardwright.training.build import build_model, build_trainer
from shardwright.training.checkpoint.state import checkpoint_bytes
from shardwright.training.clock import PhaseClock, timeline_file
from shardwright.training.device import configure_malloc
from shardwright.training.expert_places import PlaceExperts
from shardwright.training.gpu import check_gpu
from shardwright.training.header import header, started
from shardwright.training.hooks import HOOKS, Hook, RunParts, RunStart
from shardwright.training.initial_weights import begin_with
from shardwright.training.kept import changes_since, kept_run_file, rate_change
from shardwright.training.loop import StopRequest, TrainLoop
from shardwright.training.numbers import Evaluate, LogNumbers
from shardwright.training.profiling import ProfileSteps, memory_errors_explained
from shardwright.training.published import PublishedSamples
from shardwright.training.ranks import ProcessRank, pick_device, process_group, restarts_of_torchrun
from shardwright.training.references import run_references
from shardwright.training.resilience.after_spike import AfterSpike, ReportSkipped
from shardwright.training.resilience.copies import CompareCopies
from shardwright.training.resilience.finite import StopAtNotFinite
from shardwright.training.resilience.monitor import Monitor, monitored, record_collectives
from shardwright.training.resilience.spikes import spike_guard
from shardwright.training.resilience.stragglers import WatchStragglers
from shardwright.training.resuming import RunCheckpoints
from shardwright.training.run_log import RunLog
from shardwright.training.saving import SaveCheckpoints
from shardwright.training.settle import require_host_memory, settle
from shardwright.training.sources import RunSamples, Sources
from shardwright.training.step import Trainer
from shardwright.training.trained_shards import TrainedShards, require_shards


def run(config: RunConfig, place: ProcessRank, quiet: bool = False) -> bool:
    """Train as rank `place.rank` until all steps are done or a signal asks to stop. Return whether a signal did.

    Every rank of the layout's world calls this in its own process. Raises InputError for errors that the user can fix.
    After any error, published checkpoints remain valid.
    """
    layout = config.layout.layout()
    layout.check_world(place.world_size)
    device = pick_device(config.device, place)
    check_gpu(config, device)
    if device.type == "cpu":
        configure_malloc()
    record_collectives()
    owned = sole_owner(Path(config.out)) if place.rank == 0 else nullcontext()
    with owned, process_group(place, device):
        config, remark = settle(config, device)
        layout = config.layout.layout()
        after_s = config.faults.hang_after
        with (
            memory_errors_explained(config, place.rank, for_less_memory(config)),
            monitored(Path(config.out), place.rank, layout, device, after_s) as monitor,
        ):
            return _run(config, place, device, quiet, monitor, [remark] if remark else [])


def _run(
    config: RunConfig,
    place: ProcessRank,
    device: torch.device,
    quiet: bool,
    monitor: Monitor | None,
    remarks: list[str],
) -> bool:
    """Return whether a signal stopped the run before its last step. The parts of the run are deleted on return,
    before the process group is destroyed."""
    sources = Sources(config)
    torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
    require_host_memory(config)
    compiled = config.precision.compile
    model = build_model(config, device, compiled=compiled)
    if monitor is not None:
        monitor.observe(model)
    clock = PhaseClock(device)
    model.observers.add(clock)
    guard = spike_guard(config.faults, model, device)
    base = base_record(config)
    if base is not None:
        fill_base(model, base)
    trainer = build_trainer(config, model, device, compiled=compiled, spikes=guard, base=base)
    checkpoints = RunCheckpoints(config, trainer, sources, remarks)
    start = checkpoints.start()
    require_shards(config, sources, start)
    # A collective on the disk's state would be another possible failure: only rank 0 checks, and its error ends the
    # run.
    if place.rank == 0:
        checkpoints.store.require_space(checkpoint_bytes(trainer))
        # Only now: a refused run must not overwrite the run file of the existing run.
        write_whole(Path(config.out) / RUN_FILE, kept_run_file(config).encode())
    if start.checkpoint is None and config.init.weights is not None:
        remarks += begin_with(trainer, config.init)
    log = RunLog(config, place.rank, quiet, start.step)
    references = run_references(config, trainer, sources, start, log)
    samples = RunSamples(config, sources, place.rank, device, start, references)
    saving = SaveCheckpoints(config, checkpoints, trainer, samples, log)
    stop = StopRequest()
    trained = TrainedShards(config, samples, checkpoints.store, place.rank)
    hooks = build_hooks(config, place, device, trainer, samples, log, clock, saving, stop.everyone)
    hooks = [*hooks, *([trained] if trained.places else [])]
    published = PublishedSamples(samples, lambda: stop.requested, log.say, trained.tell)
    loop = TrainLoop(config, trainer, hooks, samples.batches, stop.everyone, published.wait)
    with log.screen, stop.listening():
        _report_start(config, start, checkpoints, log)
        if log.writes and start.step < config.steps:
            for line in header(config, sources, samples.order, device, start.step, start.samples):
                log.say(line)
            log.write(started(config, device, start.step, start.checkpoint))
        with cleaning_up(*(hook.close for hook in hooks)):
            with saving.during_steps(start.step):
                done = loop.run(start)
            log.end(done)
        stop.settle()
    _require_samples(config, published, checkpoints, done)
    _report_end(config, start, done, checkpoints, log)
    return done < config.steps


def _require_samples(config: RunConfig, published: PublishedSamples, checkpoints: RunCheckpoints, done: int) -> None:
    """Raise DataError if the run ended after `done` steps because no more samples are published."""
    if published.shortage is not None:
        saved = (
            f"the run is saved up to step {done} of {config.steps}; {published.way_out}, then the run with --resume"
            if checkpoints.store.path_of(done).exists()
            else f"no step of {config.steps} is saved; {published.way_out}, then give the same command again"
        )
        raise DataError(f"{published.shortage}; {saved}")


def for_less_memory(config: RunConfig) -> str:
    """Return the changes of the run file with which a rank needs less memory."""
    layout, most = config.layout.layout(), max(stage.micro_batch for stage in config.batch.schedule.stages)
    chunked = layout.loss_chunk_tokens or config.preference.kind != "none"
    smaller = " and ".join(config.batch.lowered("micro_batch", most - 1))
    return ", ".join(
        [
            *([f"{smaller} below {most}"] if most > 1 else []),
            *([f"layout.zero above {layout.zero}"] if layout.zero < 3 else []),
            "a larger layout.dp_shard, tp or cp",
            *(["layout.recompute='selective' or 'full'"] if layout.recompute == "none" else []),
            *([] if chunked else ["layout.loss_chunk_tokens"]),
            "layout.offload_optimizer='cpu' or 'disk', with zero above 0 layout.offload_parameters='cpu'",
            "layout.offload_activations='cpu', or precision.compute='bf16'",
        ]
    )


def build_hooks(
    config: RunConfig,
    place: ProcessRank,
    device: torch.device,
    trainer: Trainer,
    samples: RunSamples,
    log: RunLog,
    clock: PhaseClock,
    saving: SaveCheckpoints,
    asked_to_stop: Callable[[], bool],
) -> Sequence[Hook]:
    """Return the hooks of the run, in the order in which they are called."""
    layout = config.layout.layout()
    after_spike = AfterSpike(config.faults, trainer, samples, log, saving.newest_checkpoint)
    timeline = timeline_file(config, trainer.model, device, place.rank)
    # A rank's own time is not measured on a GPU.
    compared = device.type == "cpu" and layout.world_size > 1
    return [
        after_spike,
        ReportSkipped(config.batch.schedule, trainer, log),
        *([] if timeline is None else [timeline]),
        LogNumbers(config, trainer, samples, device, clock, log),
        StopAtNotFinite(trainer, after_spike),
        *([WatchStragglers(layout, trainer, clock, log)] if compared else []),
        Evaluate(trainer, samples, log, config, asked_to_stop),
        *([] if trainer.model.places is None else [PlaceExperts(config, trainer, log)]),
        CompareCopies(config.faults.check_copies_every, trainer, log),
        *(kind.make(RunParts(config, trainer, log)) for kind in HOOKS.values()),
        saving,
        *([ProfileSteps(config, place.rank, device, log)] if config.profile.requested else []),
    ]


def _report_start(config: RunConfig, start: RunStart, checkpoints: RunCheckpoints, log: RunLog) -> None:
    begins = "begins"
    for remark in checkpoints.take_remarks():
        log.say(remark)
    if start.checkpoint is not None:
        begins = f"resumed from {start.checkpoint}: step {start.step}, {counted(start.samples, 'sample')} seen"
        log.say(begins)
        if changed := changes_since(start.checkpoint, kept_run_file(config)):
            log.say(f"changed since then: {', '.join(changed)}")
        if rate := rate_change(start.checkpoint, config, start.step):
            log.say(rate)
    elif config.checkpoint.resume == "auto":
        log.say(f"no checkpoint in {checkpoints.store.folder} to resume from: starting from step 0")
    again, n = restarts_of_torchrun(), config.layout.layout().world_size
    text = f"{f'restart {again} by torchrun: ' if again else ''}{begins}, on {counted(n, 'rank')}"
    log.event("restart" if again else "start", start.step, text)


def _report_end(config: RunConfig, start: RunStart, done: int, checkpoints: RunCheckpoints, log: RunLog) -> None:
    steps = config.steps
    if start.step < done < steps:
        log.say(
            f"stopped at step {done} of {steps}, as asked; the last checkpoint is of this step. Continue with\n"
            f"  shardwright train {shlex.quote(str(Path(config.out) / RUN_FILE))} --resume"
        )
    elif done < steps:
        log.say(f"stopped at step {done} of {steps}, as asked, before another step. Give the same command again")
    else:
        out = shlex.quote(config.out)
        log.say(f"saved to {checkpoints.store.path_of(done)}")
        log.say(f'  shardwright report {out}\n  shardwright generate {out} --prompt "..."')
