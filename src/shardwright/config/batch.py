"""The batch of each step: the section `[batch]` and its stages, as a function of the step alone."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Annotated

from pydantic import Field

from shardwright.config.sections import Counted, DataSection, Positive, RunFileSection
from shardwright.system.units import divisors

_SIZES = ("global_batch", "micro_batch", "seq_len")


class BatchStageSection(RunFileSection):
    """Another batch from a step on. A size that is not given is as in the stage before."""

    from_step: Positive | None = Field(None, description="steps that are done when this stage starts")
    from_tokens: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="instead of from_step, the tokens that are done: the stage starts at the first step with as many",
    )
    global_batch: Counted | None = Field(None, description="sequences of a step, over all ranks")
    micro_batch: Counted | None = Field(None, description="sequences a rank runs at a time")
    seq_len: Counted | None = Field(None, description="tokens of a sequence; it divides the longest of the run")


@dataclass(frozen=True)
class BatchStage:
    """The batch of the steps from `from_step` on, after `tokens_before` tokens. Sizes as in `[batch]`."""

    from_step: int
    tokens_before: int
    global_batch: int
    micro_batch: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.global_batch * self.seq_len

    def __str__(self) -> str:
        return f"{self.global_batch:,} sequences of {self.seq_len:,} tokens"


@dataclass(frozen=True)
class BatchSchedule:
    """The stages of a run, in order; the first starts at step 0.

    A sample of the data has the tokens of the longest sequence of the run. A stage with shorter sequences cuts each
    sample into sequences, and a step takes whole samples, so that the order of samples does not depend on the stages.
    """

    stages: tuple[BatchStage, ...]

    @cached_property
    def _begins(self) -> list[int]:
        return [stage.from_step for stage in self.stages]

    @cached_property
    def longest(self) -> BatchStage:
        """The first stage with the longest sequences. Every validation loss is of its sequences."""
        return max(self.stages, key=lambda stage: stage.seq_len)

    @property
    def global_batches(self) -> str:
        """Return the sizes of the steps in order, for errors: `batch.global_batch=16`, `... then 32`."""
        sizes = dict.fromkeys(stage.global_batch for stage in self.stages)
        return f"batch.global_batch={', then '.join(map(str, sizes))}"

    def stage_at(self, step: int) -> BatchStage:
        """Return the stage of step number `step` (0-based)."""
        return self.stages[bisect_right(self._begins, step) - 1]

    def tokens(self, steps: int) -> int:
        """Return the tokens of the first `steps` steps of the run."""
        stage = self.stage_at(steps)
        return stage.tokens_before + (steps - stage.from_step) * stage.tokens

    def steps(self, tokens: float) -> int:
        """Return the steps, at least one, whose tokens are nearest to `tokens`; it is after the last stage starts."""
        last = self.stages[-1]
        return last.from_step + max(1, round((tokens - last.tokens_before) / last.tokens))

    def parts(self, first: int, end: int) -> Iterator[tuple[BatchStage, int]]:
        """Yield each stage of the steps `first` to `end` - 1 with its number of these steps, which is above 0."""
        for stage, after in zip(self.stages, [*self._begins[1:], end], strict=True):
            if (n := min(end, max(after, stage.from_step)) - max(first, stage.from_step)) > 0:
                yield stage, n

    def cuts(self, stage: BatchStage) -> int:
        """Return into how many sequences a stage cuts each sample."""
        return self.longest.seq_len // stage.seq_len

    def samples(self, first: int, end: int) -> int:
        """Return the samples of the steps `first` to `end` - 1; negative if `end` is before `first`."""
        return (self.tokens(end) - self.tokens(first)) // self.longest.seq_len


class BatchSection(RunFileSection):
    """The batch of one step. Gradient accumulation: global_batch / (micro_batch x data ranks) micro-batches a rank."""

    seq_len: Counted = Field(description="tokens of a sequence")
    global_batch: Counted = Field(description="sequences of a step, over all ranks")
    micro_batch: Counted = Field(1, description="sequences a rank runs at a time; sets the activation memory")
    stages: list[BatchStageSection] = Field([], description="[[batch.stages]]: another batch, from a step on")

    @property
    def schedule(self) -> BatchSchedule:
        """The batch of every step. The stages must be valid (`stage_problems`)."""
        return _schedule(self.global_batch, self.micro_batch, self.seq_len, tuple(self.stages))

    def lowered(self, size: str, most: int) -> dict[str, int]:
        """Return the keys to set, as --set names them, with their values, so that in no stage global_batch or
        micro_batch, whichever `size` is, is above `most`."""
        keys = {f"batch.{size}": getattr(self, size)}
        keys |= {f"batch.stages.{n}.{size}": getattr(stage, size) or 1 for n, stage in enumerate(self.stages)}
        return {key: most for key, value in keys.items() if value > most}

    def stage_section(self, stage: BatchStage) -> "BatchSection":
        """Return the section of a run that has the batch of one stage in every step."""
        return BatchSection(seq_len=stage.seq_len, global_batch=stage.global_batch, micro_batch=stage.micro_batch)


@lru_cache(maxsize=64)
def _schedule(global_batch: int, micro_batch: int, seq_len: int, later: tuple[BatchStageSection, ...]) -> BatchSchedule:
    stages = [BatchStage(0, 0, global_batch, micro_batch, seq_len)]
    for given in later:
        before, begins = stages[-1], given.from_step
        if begins is None:
            begins = before.from_step + ceil(((given.from_tokens or 0) - before.tokens_before) / before.tokens)
        sizes = {name: getattr(given, name) or getattr(before, name) for name in _SIZES}
        tokens_before = before.tokens_before + (begins - before.from_step) * before.tokens
        stages.append(BatchStage(begins, tokens_before, **sizes))
    return BatchSchedule(tuple(stages))


def stage_problems(batch: BatchSection, steps: int | None) -> list[str]:
    """Return each broken rule on the stages. `steps`: steps of the run; None if that value is not valid."""
    problems = []
    for number, given in enumerate(batch.stages):
        where = f"batch.stages.{number}"
        if (given.from_step is None) == (given.from_tokens is None):
            both = "both given" if given.from_step is not None else "missing"
            problems.append(f"{where}: from_step and from_tokens are {both}; give one of them")
        if not any(getattr(given, name) for name in _SIZES):
            problems.append(f"{where} changes nothing; give one or more of {', '.join(_SIZES)}")
    return problems or [*_order_problems(batch, steps), *_length_problems(batch)]


def _order_problems(batch: BatchSection, steps: int | None) -> Iterator[str]:
    stages = batch.schedule.stages
    for number, (given, before, stage) in enumerate(zip(batch.stages, stages, stages[1:], strict=False)):
        key = "from_step" if given.from_step is not None else "from_tokens"
        where = f"batch.stages.{number}.{key}={getattr(given, key):,.15g}"
        if stage.from_step <= before.from_step:
            yield (
                f"{where} is not after the stage before, which starts at step {before.from_step:,} "
                f"({before.tokens_before:,} tokens); give the stages in order"
            )
        elif steps is not None and stage.from_step >= steps:
            yield (
                f"{where} is not reached: the run has steps={steps} ({batch.schedule.tokens(steps):,} tokens); raise "
                f"steps, or leave the stage out"
            )


def _length_problems(batch: BatchSection) -> Iterator[str]:
    longest = batch.schedule.longest.seq_len
    for number, stage in enumerate(batch.schedule.stages):
        where = f"batch.stages.{number - 1}." if number else "batch."
        if longest % stage.seq_len:
            yield (
                f"{where}seq_len={stage.seq_len} does not divide the longest of the run, {longest}, whose sequences it "
                f"cuts; nearest: {', '.join(map(str, _nearest_divisors(longest, stage.seq_len)))}"
            )
        elif stage.tokens % longest:
            cuts = longest // stage.seq_len
            low = stage.global_batch // cuts * cuts
            valid = [str(n) for n in (low, low + cuts) if n]
            yield (
                f"{where}global_batch={stage.global_batch} sequences of {stage.seq_len} tokens are no multiple of the "
                f"longest sequences, of {longest} tokens; nearest: {', '.join(valid)}"
            )


def _nearest_divisors(n: int, near: int) -> list[int]:
    """Return the largest divisor of `n` below `near` and the smallest above it."""
    every = divisors(n)
    after = bisect_right(every, near)
    return every[after - 1 : after + 1]


def data_problems(batch: BatchSection, data: DataSection) -> Iterator[str]:
    """Yield the rules between the lengths of the stages and the data."""
    lengths = sorted({stage.seq_len for stage in batch.schedule.stages})
    if len(lengths) > 1 and data.sequences == "documents":
        yield (
            f"data.sequences='documents' with batch.stages of seq_len {' and '.join(map(str, lengths))}: a document's "
            f"sequence is not cut again; set data.sequences='packed', or give every stage the same seq_len"
        )
