"""Evaluation of a run on the validation split of each of its sources."""

from shardwright.run_folder import Evaluated, now
from shardwright.training.clock import Phases
from shardwright.training.hooks import Hook, Start
from shardwright.training.run_log import RunLog
from shardwright.training.run_samples import RunSamples
from shardwright.training.step import Trainer


class Evaluate(Hook):
    """Writes an `evaluation` record before the first step of a run and whenever one is due."""

    def __init__(self, trainer: Trainer, samples: RunSamples, log: RunLog, phases: Phases) -> None:
        self.trainer, self.samples, self.log, self.phases = trainer, samples, log, phases

    def on_start(self, start: Start) -> None:
        if start.step == 0:
            self.on_evaluation(0)

    def on_evaluation(self, step: int) -> None:
        sources = self.samples.sources
        if not sources.validation:
            return
        self.phases.begin("evaluation", step)
        losses, ahead = {}, {}
        for name, samples in sources.validation.items():
            sums, counts = self.trainer.evaluation_sums(self.samples.evaluation_batches(samples)).tolist()
            if not counts[0]:
                self.log.say(f"no validation loss of {name}: none of the sequences has a token that counts")
                continue
            losses[name], *of_modules = (total / max(n, 1) for total, n in zip(sums, counts, strict=True))
            if of_modules:
                ahead[name] = sum(of_modules) / len(of_modules)
        self.phases.end("evaluation")
        if losses:
            by_source = losses if sources.mixed else None
            mtp_loss = sources.mean(step, ahead) if ahead else None
            self.log.write(Evaluated(step, sources.mean(step, losses), now(), by_source, mtp_loss))
