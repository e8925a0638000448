"""A metric of one's own: the tokens that the run has read, in every log record."""

from shardwright.runs.records import Record
from shardwright.training.hooks import Hook, HookKind, RunParts, TakenStep, register


class TokensSeen(Hook):
    """Adds `tokens_seen` to metrics.jsonl, TensorBoard, W&B and Prometheus."""

    def __init__(self, run: RunParts) -> None:
        self.seq_len = run.config.batch.seq_len

    def numbers(self, taken: TakenStep) -> Record:
        return {"tokens_seen": taken.samples[1] * self.seq_len}


register(HookKind("tokens-seen", TokensSeen))
