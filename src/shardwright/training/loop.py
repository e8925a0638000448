"""A run from its resolved run file to its last checkpoint, as one rank."""

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from shardwright.config import RunConfig
from shardwright.data.batches import Batches, evaluation_batches
from shardwright.data.mixture import MixtureOrder
from shardwright.errors import CheckpointError, CopiesError, DamagedError, WorkerError, cleaning_up
from shardwright.files import sole_owner, write_whole
from shardwright.remote import REMOTE
from shardwright.run_folder import (
    CHECKPOINTS,
    RUN_FILE,
    Evaluated,
    Event,
    EventKind,
    SamplePlace,
    append_event,
    as_record,
    now,
)
from shardwright.training.after_spike import AfterSpike, Start
from shardwright.training.build import build_model, build_trainer
from shardwright.training.checkpoint.durable import durable_copy
from shardwright.training.checkpoint.manifest import Progress
from shardwright.training.checkpoint.state import checkpoint_bytes, load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.clock import Clock, RunPhases
from shardwright.training.copies import differing_copies
from shardwright.training.device import configure_malloc
from shardwright.training.finite import FiniteCheck
from shardwright.training.gpu import check_gpu
from shardwright.training.header import changes_since, header, kept_run_file, rate_change, started
from shardwright.training.initial_weights import begin_with
from shardwright.training.loss_scale import skipped_in_words
from shardwright.training.metrics import Writer, open_writers
from shardwright.training.monitor import AnyMonitor, monitored, record_collectives
from shardwright.training.numbers import Numbers
from shardwright.training.offload.room import require_host_memory
from shardwright.training.ranks import Place, pick_device, process_group, restarts_of_torchrun
from shardwright.training.resuming import fetched, newest_first
from shardwright.training.saving import Saving, due
from shardwright.training.schedule import learning_rate
from shardwright.training.screen import Screen
from shardwright.training.settle import settle
from shardwright.training.sources import Sources, past_stages
from shardwright.training.spikes import spike_guard
from shardwright.training.step import StepResult
from shardwright.training.stop import StopRequest
from shardwright.training.timeline import timeline_file


def run(config: RunConfig, place: Place, quiet: bool = False) -> bool:
    """Train as rank `place.rank` until the steps are done or a signal asks to stop. Returns whether a signal did.

    Every rank of the layout's world calls this, each in a process of its own. Raises InputError for what the
    user can mend; whatever it raises, published checkpoints stay good.
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
        config, said = settle(config, device)
        layout = config.layout.layout()
        try:
            after_s = config.faults.hang_after
            with monitored(Path(config.out), place.rank, layout, device, after_s) as monitor:
                return _Run(config, place, device, quiet, monitor, [said] if said else []).go()
        except torch.OutOfMemoryError as error:
            raise WorkerError(
                f"rank {place.rank}: {str(error).splitlines()[0]}; to need less: batch.micro_batch below "
                f"{config.batch.micro_batch}, layout.zero above {layout.zero}, a larger layout.dp_shard, "
                f"tp or cp, layout.recompute='selective' or 'full', layout.loss_chunk_tokens, "
                f"layout.offload_optimizer='cpu' or 'disk', with zero above 0 layout.offload_parameters='cpu', "
                f"layout.offload_activations='cpu', or precision.compute='bf16'"
            ) from None


class _Run:
    """The objects of one rank's run; they are deleted before the process group is destroyed."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        device: torch.device,
        quiet: bool,
        monitor: AnyMonitor,
        remarks: Sequence[str] = (),
    ) -> None:
        self.config, self.place, self.device, self.quiet = config, place, device, quiet
        self.layout = config.layout.layout()
        self.spec = config.model.spec()
        self.sources = Sources(config)
        self.within_documents = config.data.attention == "document"
        self.padded = config.data.sequences == "documents"
        torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
        require_host_memory(config)
        model = build_model(config, device, compiled=config.precision.compile)
        self.monitor, self.clock = monitor, Clock(device)
        self.phases = RunPhases(self.clock, monitor.enter)
        self.trainer = build_trainer(
            config,
            model,
            device,
            compiled=config.precision.compile,
            spikes=spike_guard(config.faults, model, device),
            phases=self.phases,
        )
        self.timeline = timeline_file(config, model.runner, place.rank)
        self.store = CheckpointStore(Path(config.out) / CHECKPOINTS, config.checkpoint.keep_last)
        self.saving = Saving(config, self.store, self.trainer, self._happened)
        monitor.name_modules(model.parts)
        self.checked_at = 0
        """Steps after which copies were equal."""
        self.remarks = [*remarks]
        if (local := self.saving.local) is not None and local.remark:
            self.remarks.append(local.remark)
        self.after_spike = AfterSpike(config.faults, self.trainer, self.sources, self._happened)
        self.finite = FiniteCheck(self.trainer)
        self.numbers = Numbers(config, self.trainer, self.sources, device, self.clock)

    def go(self) -> bool:
        """Returns whether a signal stopped the run before its last step."""
        config, steps = self.config, self.config.steps
        start = self._start()
        # A collective of the disk's state would be one more thing to fail: rank 0 looks, and its error ends
        # all.
        if self.place.rank == 0:
            self.store.require_space(checkpoint_bytes(self.trainer))
            # Only now: a run that is refused must not write over the run file of the one that is there.
            write_whole(Path(config.out) / RUN_FILE, kept_run_file(config).encode())
        if start.checkpoint is None and config.init.weights is not None:
            self.remarks += begin_with(self.trainer, config.init)
        screen = Screen(steps, start.step, self.place.rank, self.quiet)
        writers = [screen, *open_writers(config, start.step)] if self.place.rank == 0 else []
        stop = StopRequest()
        self.order = self._order(start)
        with screen, stop.listening():
            self._say_where_it_begins(start, screen)
            if writers and start.step < steps:
                for line in header(config, self.sources, self.order, self.device, start.step, start.samples):
                    screen.say(line)
                record = as_record(started(config, self.device, start.step, start.checkpoint))
                for writer in writers:
                    writer.write(record)
            with cleaning_up(*(writer.close for writer in writers)), self.saving.told_to(screen, writers):
                self.saving.catch_up(start.step)
                done = self._train(start, stop, writers, screen)
            stop.settle()
        if start.step < done < steps:
            screen.say(
                f"stopped at step {done} of {steps}, as asked; the last checkpoint is of this step. Go on with\n"
                f"  shardwright train {shlex.quote(str(Path(config.out) / RUN_FILE))} --resume"
            )
        elif done < steps:
            screen.say(f"stopped at step {done} of {steps}, as asked, before another step. Give the same command again")
        else:
            out = shlex.quote(config.out)
            screen.say(f"saved to {self.store.path_of(done)}")
            screen.say(f'  shardwright report {out}\n  shardwright generate {out} --prompt "..."')
        return done < steps

    def _say_where_it_begins(self, start: Start, screen: Screen) -> None:
        config, begins = self.config, "begins"
        for remark in self.remarks:
            screen.say(remark)
        if start.checkpoint is not None:
            begins = f"resumed from {start.checkpoint}: step {start.step}, {start.samples} samples seen"
            screen.say(begins)
            if changed := changes_since(start.checkpoint / RUN_FILE, kept_run_file(config)):
                screen.say(f"changed since then: {', '.join(changed)}")
            if rate := rate_change(start.checkpoint / RUN_FILE, config, start.step):
                screen.say(rate)
        elif config.checkpoint.resume == "auto":
            screen.say(f"no checkpoint in {self.store.folder} to resume from: starting from step 0")
        again, n = restarts_of_torchrun(), self.layout.world_size
        told = f"{f'restart {again} by torchrun: ' if again else ''}{begins}, on {n} rank{'s' * (n > 1)}"
        self._happened("restart" if again else "start", start.step, told)

    def _happened(
        self, kind: EventKind, step: int, text: str, rank: int | None = None, samples: Sequence[SamplePlace] = ()
    ) -> None:
        """An event that every rank knows of, which one writes down."""
        if self.place.rank == 0:
            append_event(Path(self.config.out), Event(kind, step, text, rank, samples=tuple(samples)))

    def _train(self, start: Start, stop: StopRequest, writers: list[Writer], screen: Screen) -> int:
        """Take the steps, those after a spike that the run goes back from again; returns how many are done."""
        while True:
            with self._batches(start) as batches:
                done = self._steps(start, batches, stop, writers, screen)
            if isinstance(done, int):
                return done
            start = done
            self.order = self._order(start)
            for writer in writers:
                writer.rewind(start.step)

    def _order(self, start: Start) -> MixtureOrder:
        return self.sources.order(Progress(start.step, start.samples, self.config.seed), start.past)

    def _batches(self, start: Start) -> Batches:
        config = self.config
        return Batches(
            self.sources.train,
            self.order,
            global_batch=config.batch.global_batch,
            micro_batch=config.batch.micro_batch,
            data_rank=self.layout.data_rank(self.place.rank),
            data_ranks=self.layout.data_ranks,
            vocab_size=self.spec.vocab_size,
            within_documents=self.within_documents,
            padded=self.padded,
            start_sample=start.samples,
            left_out=self.after_spike.left_out,
            prefetch=config.data.prefetch,
            pin_memory=self.device.type == "cuda",
        )

    def _steps(
        self, start: Start, batches: Batches, stop: StopRequest, writers: list[Writer], screen: Screen
    ) -> int | Start:
        """Take the steps; returns how many of the run are done, or where it begins again after a spike."""
        config, trainer = self.config, self.trainer
        step = logged = self.checked_at = start.step
        if step == 0:
            self._evaluate(0, writers, screen)
        self.clock.restart()
        while step < config.steps and not stop.everyone():
            self.phases.begin("data", step)
            first_sample, batch = batches.next_sample, next(batches)
            samples = first_sample, batches.next_sample
            self.phases.end("data")
            skipped = trainer.skipped_steps
            # As in Megatron-LM, the learning rate stays where it is in a step that is skipped.
            rate = learning_rate(step - skipped, config.steps, config.optimizer.lr, config.lr_schedule)
            result = trainer.step(batch, step, rate)
            step += 1
            self.after_spike.rechecked(step, screen)
            if trainer.spike is not None:
                back = self.after_spike.next(trainer.spike, step, samples, self.order, self._newest_checkpoint, screen)
                if back is not None:
                    return back
            overflowed = trainer.spike is None and trainer.skipped_steps > skipped
            if overflowed:
                self._skipped(step, skipped_in_words(step, trainer.loss_scale), screen)
            if trainer.lacks_targets:
                n = config.batch.global_batch
                self._skipped(step, f"step {step} skipped: none of its {n} sequences has a token that counts", screen)
            self.finite.note(step, samples, result, overflowed)
            self.phases.begin("log", step - 1)
            screen.at(step)
            last = step == config.steps
            logs, evaluates = step % config.metrics.every == 0 or last, due(step, config.evaluation.every) or last
            saves = last or self.saving.due(step) or self.saving.due_locally(step)
            if logs or evaluates or saves or self.finite.due:
                self._require_finite(step)
            if logs:
                self._log(step, step - logged, batches.next_sample, rate, result, writers, screen)
                self.clock.restart()
                logged = step
            if evaluates:
                self._evaluate(step, writers, screen)
            self._check_copies(step, saves)
            self.saving.tell()
            if saves:
                self._save(step, batches.next_sample, last)
            self.phases.begin("agreement", step)
        if start.step < step < config.steps:
            self._require_finite(step)
            if logged < step:
                self._log(step, step - logged, batches.next_sample, rate, result, writers, screen)
            if not self.saving.due(step):
                self._check_copies(step, saves=True)
                self._save(step, batches.next_sample, last=True)
            self.saving.settle(required=True)
        return step

    def _skipped(self, step: int, text: str, screen: Screen) -> None:
        screen.say(text)
        self._happened("skip", step, text)

    def _require_finite(self, step: int) -> None:
        """Raise SpikeError, on every rank, if a number of the steps since the last check is not finite."""
        if (found := self.finite.first()) is not None:
            self.after_spike.stop(found.spike, found.step, found.samples, self.order, done=step)

    def _log(
        self,
        step: int,
        n_steps: int,
        n_samples: int,
        rate: float,
        result: StepResult,
        writers: list[Writer],
        screen: Screen,
    ) -> None:
        """The one place of the step path where values are read back from the device."""
        found = self.numbers.gather(result, n_steps)
        if self.timeline is not None:
            self.timeline.write(step)
        if not writers or not found.n_targets:  # a step without targets has no loss
            return
        told, changes = self.numbers.record(step, found, n_samples, rate, result, self.order)
        for writer in writers:
            writer.write(as_record(told))
        for change in changes:
            screen.say(f"step {change.step}: {change.text}")
            self._happened("straggler", change.step, change.text, change.rank)

    def _evaluate(self, step: int, writers: list[Writer], screen: Screen) -> None:
        config = self.config
        if not self.sources.validation:
            return
        self.phases.begin("evaluation", step)
        losses, ahead = {}, {}
        for name, samples in self.sources.validation.items():
            batches = evaluation_batches(
                samples,
                micro_batch=config.batch.micro_batch,
                data_rank=self.layout.data_rank(self.place.rank),
                data_ranks=self.layout.data_ranks,
                vocab_size=self.spec.vocab_size,
                within_documents=self.within_documents,
                padded=self.padded,
                max_samples=config.evaluation.samples,
            )
            sums, counts = self.trainer.evaluation_sums(batches).tolist()
            if not counts[0]:
                screen.say(f"no validation loss of {name}: none of the sequences has a token that counts")
                continue
            losses[name], *of_modules = (total / max(n, 1) for total, n in zip(sums, counts, strict=True))
            if of_modules:
                ahead[name] = sum(of_modules) / len(of_modules)
        self.phases.end("evaluation")
        if not losses:
            return
        told = Evaluated(
            step,
            self.sources.mean(step, losses),
            now(),
            losses if self.sources.mixed else None,
            self.sources.mean(step, ahead) if ahead else None,
        )
        for writer in writers:
            writer.write(as_record(told))

    def _check_copies(self, step: int, saves: bool) -> None:
        """Compare copies of weights and states, if that is due or they are saved next: no checkpoint is to hold a wrong
        one. Raises CopiesError, on every rank, where they differ."""
        every = self.config.faults.check_copies_every
        if step == self.checked_at or not (due(step, every) or (every and saves)):
            return
        if found := differing_copies(self.trainer):
            self._happened("fault", step, f"after step {step} {found.text}", found.rank)
            raise CopiesError(
                f"after step {step} {found.text}; the check before, after step {self.checked_at}, found no difference: "
                f"checkpoints up to that step hold equal copies"
            ).of_rank(found.rank)
        self.checked_at = step

    def _save(self, step: int, samples: int, last: bool) -> None:
        self.phases.begin("checkpoint", step)
        progress = Progress(step, samples, self.config.seed, tuple(self.after_spike.left_out))
        begun = [stage for stage in self.order.stages if stage.from_step < step]
        self.saving.save(progress, self.sources.described(begun), last)
        self.phases.end("checkpoint")

    def _start(self) -> Start:
        """Load the checkpoint the run is to go on from, if any; a damaged one is passed over under `auto`."""
        resume = self.config.checkpoint.resume
        if self.place.rank == 0:
            self.store.sweep()
        if resume == "no":
            return Start()
        if resume == "auto":
            return self._newest_checkpoint() or Start()
        if REMOTE in resume:
            durable, step = durable_copy(resume)
            return self._load(fetched(durable, step, self.store))
        return self._load(Path(resume))

    def _newest_checkpoint(self) -> Start | None:
        """Load the newest checkpoint that is whole, if there is any; every rank calls this.

        Raises CheckpointError where all are damaged."""
        self.saving.settle()
        damage: list[str] = []
        for path in newest_first(self.store, self.saving.durable, self.remarks, self.saving.local):
            try:
                return self._load(path)
            except DamagedError as error:
                damage += error.problems
                self.remarks += [*error.problems, f"passing over {path.name}"]
        if damage:
            raise CheckpointError(
                *damage,
                f"no checkpoint in {self.store.folder} is whole, and --resume does not start anew over "
                f"them; to start anew, name another folder with --set out=..., or move this one away",
            )
        return None

    def _load(self, path: Path) -> Start:
        manifest = load(path, self.trainer, self.sources.described(self.sources.mixtures))
        progress = manifest.progress
        if progress.step > self.config.steps:
            raise CheckpointError(
                f"{path} is at step {progress.step}, beyond the steps={self.config.steps} of this run; raise steps"
            )
        self.after_spike.leave_out(progress.left_out)
        past = past_stages(manifest)
        return Start(progress.step, progress.samples, path, past)
