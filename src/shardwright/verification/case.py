"""The training that layouts are compared by: a model, and random batches made from the seed.

A case also has the number formats at test size: the loss scale of float16, the blocks of fp8, and the options of an
optimizer.

Shapes: B sequences of the global batch, T tokens of a sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from shardwright.config import OptimizerSection, PrecisionSection, RunConfig, Scope
from shardwright.config.average import AverageSection
from shardwright.config.sections import NO_PREFERENCE, PreferenceSection
from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout, accumulation
from shardwright.model.number_formats import Fp8, block_of
from shardwright.model.spec import ModelSpec
from shardwright.split.compression import elements_of_block, powersgd_rank
from shardwright.split.stages import schedule_problems, stage_layers
from shardwright.system.errors import InputError, nearest
from shardwright.training.optimizer import learning_rate

DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.float32, torch.bfloat16),
    "float16": (torch.float32, torch.float16),
}
"""The type of parameters, gradients and optimizer states, and the type of matmuls."""

PLAIN_SGD = "plain sgd"
"""The training of every case next to the run's optimizer: w - rate g, which shows the scale of a gradient."""
_SGD_RATE = 0.01
RATES = (1.0, 0.5, 0.75)
"""The learning rate of each step, in turn, as a fraction of the run's: a group of parameters that does not follow it is
detected."""
CLIPPED = (0.7, 2.0, 0.1)
"""The largest norm that gradients are clipped to in each step, in turn, as a fraction of the reference's norm: just
below it, above it, and far below."""
_SCALES = (2.0**12, 1.0, 2.0**-12)
"""With SGD the gradients of each step are multiplied by this before they are clipped, in turn, and the rate is divided
by it. This detects clipping that depends on the size of the norm, not on whether it is above the limit. Powers of 2
change no digit."""


ADAPTER_STD = 0.1
"""The standard deviation of the B of adapters at first. With the zeros of a run, no result would depend on A."""


class CaseStage(NamedTuple):
    """The batch of some steps, in the order of `[[batch.stages]]`."""

    global_batch: int
    micro_batch: int
    seq_len: int


class IntegerWeights(NamedTuple):
    """The weights that matmuls use rounded: the number of tp ranks over which columns are sharded, and whether experts
    and frozen weights, which not every layout gathers, are rounded."""

    tp: int
    experts: bool
    frozen: bool


class RoundedInputs(NamedTuple):
    """The activations that are sent in 8 bits, "int8" or "fp8": rows to experts; and, with their gradients, the inputs
    of `layers`, whose stages are on another rank than the stages before."""

    experts: str = "none"
    layers: tuple[int, ...] = ()
    of_layers: str = "none"


class LargestGradients(NamedTuple):
    """The gradients that are sent as the `k` largest elements of each block, over `replicas` ranks, of matrices whose
    shards over `tp` ranks have blocks of their own."""

    k: int
    replicas: int
    tp: int


@dataclass(frozen=True)
class Case:
    """A training of a few steps that every layout has to agree on.

    `global_batch` and `micro_batch` are in sequences, `seq_len` in tokens; `micro_batch` is for the layout's ranks, the
    reference takes the whole batch at once. `dtype` is a key of DTYPES.
    """

    spec: ModelSpec
    seq_len: int
    global_batch: int
    micro_batch: int = 1
    seed: int = 0
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    steps: int = 3
    dtype: str = "float64"
    rates: tuple[float, ...] = ()
    """Learning rates of the run's optimizer, one a step; by default its `lr` times `RATES`."""
    clip_norms: tuple[tuple[float, ...], ...] = ()
    """For each training the norms that its steps are clipped to; by default from `CLIPPED`."""
    evaluate: bool = True
    """Whether the loss of another batch is evaluated after the first step."""
    compiled: bool = False
    """Whether the layout's blocks and loss are compiled; the reference is not."""
    attention: Scope = "sequence"
    """`document`: a sequence has several documents, within which attention stays."""
    positions: Scope = "sequence"
    """`document`: positions restart with each document."""
    padded: bool = False
    """Whether sequences have padding, which nothing may depend on."""
    overflow_step: int | None = None
    """The step, 0-based, in which a gradient on the first rank is infinite; all ranks have to skip it."""
    fp8: Fp8 | None = None
    """The fp8 recipe of matmuls, or None; the reference uses it too, on the same micro-batches."""

    integer_weights: IntegerWeights | None = None
    """The rounding of weights by `layout.compress_weights`; None: weights are not rounded."""

    preference: PreferenceSection = NO_PREFERENCE
    """The loss of pairs of answers; each sequence has some pairs, as documents."""

    powersgd_rank: int = 0
    """The rank of the products that replace gradients of matrices; 0: none."""

    rounded_inputs: RoundedInputs = field(default_factory=RoundedInputs)
    """The activations that a layout sends in 8 bits; none: they are not rounded."""

    largest_gradients: LargestGradients | None = None
    """The largest elements that replace gradients of matrices; None: gradients are whole."""

    average: AverageSection = field(default_factory=AverageSection)
    """The average of the weights that the run's optimizer makes."""

    stages: tuple[CaseStage, ...] = ()
    """The batches that the steps take in turn, so that steps cross their boundaries; none: each step has the case's own
    sizes, which are the longest stage's, and the evaluation's."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r} is not one that can be compared; {nearest(self.dtype, DTYPES)}")
        if self.fp8 is not None and self.dtype != "float64":
            raise InputError(only_in_float64(self.dtype, "precision.fp8", self.fp8.recipe))
        if self.steps < 1:
            raise InputError(f"steps={self.steps}: there is nothing to compare; valid: 1 or more")

    @property
    def trainings(self) -> tuple[str, ...]:
        """The optimizers that the case is trained with: plain SGD shows the scale of a gradient in the parameters,
        which AdamW divides out; then the run's optimizer."""
        return PLAIN_SGD, self.optimizer.name

    @property
    def loss_scaling(self) -> PrecisionSection | None:
        """The loss scaling of a layout; None in a type with the range of float32."""
        return LOSS_SCALING if self.dtype == "float16" else None

    @property
    def n_records(self) -> int:
        """The number of times that a run records every tensor: the initial parameters, and in each training the
        gradients of each step and the final parameters."""
        return 1 + len(self.trainings) * (self.steps + 1)

    def rate(self, training: str, step: int) -> float:
        """Return the learning rate of a step (0-based)."""
        if training != PLAIN_SGD and self.rates:
            return self.rates[step]
        return (_SGD_RATE if training == PLAIN_SGD else self.optimizer.lr) * RATES[step % len(RATES)]

    def scale(self, training: str, step: int) -> float:
        """Return the factor of a step's gradients before they are clipped."""
        return _SCALES[step % len(_SCALES)] if training == PLAIN_SGD else 1.0

    def clip_norm(self, training: str, step: int, norm: float = math.nan) -> float:
        """Return the norm that a step's gradients are clipped to; infinite if the run does not clip. `norm`: the
        reference's, needed if `clip_norms` are not given."""
        if not self.optimizer.clip_norm:
            return math.inf
        if self.clip_norms:
            return self.clip_norms[self.trainings.index(training)][step]
        return CLIPPED[step % len(CLIPPED)] * norm

    def step_case(self, step: int) -> Self:
        """Return the case with the sizes of one step. With fewer steps than stages, some in between are left out."""
        if not self.stages or step >= self.steps:
            return self
        last = len(self.stages) - 1
        stage = self.stages[min(step, last) if self.steps > last else step * last // max(1, self.steps - 1)]
        return replace(self, stages=(), **stage._asdict())

    def accumulation(self, layout: Layout) -> int:
        """Return the micro-batches of a step on each rank. Raises LayoutError if that is not a whole number."""
        return accumulation(self.global_batch, self.micro_batch, layout.data_ranks)

    def shares(self, layout: Layout) -> bool:
        """Return whether a layout's data ranks can share the batch, in micro-batches that its schedule can run."""
        sizes = [
            (self.global_batch, self.micro_batch),
            *((stage.global_batch, stage.micro_batch) for stage in self.stages),
        ]
        for global_batch, micro_batch in sizes:
            rounds, rest = divmod(global_batch, micro_batch * layout.data_ranks)
            if rest or schedule_problems(layout, rounds):
                return False
        return True

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and targets (B, T) and sample ids (B,) of a step, from the seed.

        Masks are ragged: of every five samples, in an order made from the seed, a random half of the targets counts in
        one, a single target in another, then none, all, and the first few. Padding has no target.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        shape = (self.global_batch, self.seq_len)
        tokens_BT = torch.randint(self.spec.vocab_size, shape, generator=generator)
        targets_BT = torch.randint(self.spec.vocab_size, shape, generator=generator)
        n_real_B = self.n_real(step)
        if self.preference.kind != "none":
            targets_BT.masked_fill_(~self._answers(step), IGNORE)
            return tokens_BT, targets_BT, step * self.global_batch + torch.arange(self.global_batch)
        for row, kind in enumerate(torch.randperm(self.global_batch, generator=generator).tolist()):
            n_real = self.seq_len if n_real_B is None else int(n_real_B[row])
            counts_T = torch.ones(self.seq_len, dtype=torch.bool)
            if kind % 5 == 0:
                counts_T = torch.rand(self.seq_len, generator=generator, dtype=torch.float32) < 0.5
                counts_T[n_real - 1] = True
            elif kind % 5 == 1:
                counts_T = torch.arange(self.seq_len) == torch.randint(self.seq_len, (), generator=generator)
            elif kind % 5 == 2:
                counts_T[:] = False
            elif kind % 5 == 4:
                counts_T = torch.arange(self.seq_len) <= torch.randint(self.seq_len, (), generator=generator)
            counts_T[n_real:] = False
            targets_BT[row, ~counts_T] = IGNORE
        return tokens_BT, targets_BT, step * self.global_batch + torch.arange(self.global_batch)

    def n_real(self, step: int) -> Tensor | None:
        """Return the tokens of each sequence of a step before its padding, (B,), from the seed; None without padding.

        Of every four sequences, in an order made from the seed, one has no padding, one has a single token, and two
        have any number of tokens. With pairs the tokens of their documents.
        """
        if not self.padded:
            return None
        if self.preference.kind != "none":
            lengths = self.documents(step)
            assert lengths is not None
            return torch.tensor([sum(of_row[: len(of_row) // 2 * 2]) for of_row in lengths])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 250_007)
        lengths_B = torch.randint(1, self.seq_len + 1, (self.global_batch,), generator=generator)
        kinds_B = torch.randperm(self.global_batch, generator=generator) % 4
        lengths_B[kinds_B == 0] = self.seq_len
        lengths_B[kinds_B == 1] = 1
        return lengths_B

    def documents(self, step: int) -> list[list[int]] | None:
        """Return the lengths of the documents of each sequence of a step, from the seed; None without documents.

        Of every four sequences, in an order made from the seed, one is a single document, one has documents of one or
        two tokens, and two have a few documents of any length.
        """
        if self.attention == "sequence":
            return None
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 500_009)
        if self.preference.kind != "none":
            return [self._pairs(row, generator) for row in range(self.global_batch)]
        result = []
        for kind in torch.randperm(self.global_batch, generator=generator).tolist():
            likely = {0: 0.0, 1: 0.7}.get(kind % 4, min(0.5, 3 / self.seq_len))
            ends = (
                torch.rand(self.seq_len - 1, generator=generator, dtype=torch.float32) < likely
            ).nonzero().flatten() + 1
            result.append(torch.diff(torch.tensor([0, *ends.tolist(), self.seq_len])).tolist())
        return result

    def _pairs(self, row: int, generator: torch.Generator) -> list[int]:
        """Return the lengths of the documents of a sequence: one pair or, in the first third of the sequences, two, if
        they fit; and in every second sequence padding, if `padded`. A document has two tokens or more."""
        n_parts = (4 if 3 * row < self.global_batch and self.seq_len >= 10 else 2) + row % 2 * self.padded
        places = torch.randperm(self.seq_len - n_parts - 1, generator=generator)
        cuts = places[: n_parts - 1].sort().values
        ends = [int(cut) + 1 + number for number, cut in enumerate(cuts.tolist(), start=1)]
        lengths: list[int] = torch.diff(torch.tensor([0, *ends, self.seq_len])).tolist()
        return lengths

    def _answers(self, step: int) -> Tensor:
        """Return the targets that count, (B, T): the last ones of each answer. The successor of its last token does not
        count."""
        documents = self.documents(step)
        assert documents is not None
        counted_BT = torch.zeros(self.global_batch, self.seq_len, dtype=torch.bool)
        for row, lengths in enumerate(documents):
            begin = 0
            for length in lengths[: len(lengths) // 2 * 2]:
                counted_BT[row, begin + (length - 1) // 2 : begin + length - 1] = True
                begin += length
        return counted_BT


def with_choices_of(layout: Layout, case: Case) -> Case:
    """Return the case with a layout's choices that also change the result of one process."""
    k = elements_of_block(layout)
    largest = LargestGradients(k, layout.dp_replicate, layout.tp) if k else None
    rounded = RoundedInputs(layout.compress_dispatch)
    if layout.compress_pipeline != "none":
        # The ways of a schedule cross from rank to rank at the same stages.
        stages = zip(stage_layers(case.spec, layout, case.seq_len)[1:], pairwise(layout.ways[0]), strict=True)
        first = tuple(layers[0] for layers, (rank, next_rank) in stages if rank != next_rank)
        rounded = rounded._replace(layers=first, of_layers=layout.compress_pipeline)
    case = replace(case, powersgd_rank=powersgd_rank(layout), largest_gradients=largest, rounded_inputs=rounded)
    if layout.compress_weights == "none":
        return case
    experts = layout.expert_dp_shard > 1 or layout.ep * layout.tp == 1
    frozen = layout.zero == 3 or layout.offload_parameters != "none"
    return replace(case, integer_weights=IntegerWeights(layout.tp, experts, frozen))


def case_of(
    config: RunConfig,
    *,
    steps: int = 3,
    dtype: str = "float64",
    evaluate: bool = True,
    compiled: bool = False,
    lr_schedule: bool = False,
) -> Case:
    """Return the case of a run file with its true sizes. `lr_schedule`: with the learning rates of its schedule,
    shortened to `steps`."""
    spec, fp8 = config.spec(), config.precision.fp8_settings
    stages = [CaseStage(stage.global_batch, stage.micro_batch, stage.seq_len) for stage in config.batch.schedule.stages]
    return Case(
        spec=spec,
        **max(stages, key=lambda stage: (stage.seq_len, stage.global_batch))._asdict(),
        stages=tuple(stages) if len(stages) > 1 else (),
        average=_every_step(config.average),
        seed=config.seed,
        optimizer=config.optimizer,
        steps=steps,
        dtype=dtype,
        rates=_rates(config, steps) if lr_schedule else (),
        evaluate=evaluate,
        compiled=compiled,
        attention=config.data.attention,
        positions=config.data.positions,
        # With fp8 a scale depends on all values of a tensor, and the reference has no padding.
        padded=(config.preference.kind != "none" or (config.data.sequences == "documents" and spec.moe is not None))
        and fp8 is None,
        fp8=fp8,
        preference=config.preference,
    )


def _every_step(average: AverageSection) -> AverageSection:
    """Return the section of a run of a few steps: an update after each, with several weights in the average."""
    if average.kind == "none":
        return average
    return average.model_copy(update={"every": 1, "last": 2, "decay": min(average.decay, 0.7)})


def _rates(config: RunConfig, steps: int) -> tuple[float, ...]:
    """Return the learning rates of a run that is shortened to `steps`, with its warm-up and decay."""
    schedule = config.lr_schedule
    shortened = schedule.model_copy(
        update={
            name: math.ceil(getattr(schedule, name) * steps / config.steps) for name in ("warmup_steps", "decay_steps")
        }
    )

    def progress(step: int) -> float:
        return step if schedule.by == "steps" else config.clock(step * config.steps // steps)

    return tuple(learning_rate(step, steps, config.optimizer.lr, shortened, progress) for step in range(steps))


def with_drawn_experts(case: Case, rounded: bool = False) -> Case:
    """Return the case with drawn experts in 32 and 16 bits, and with gradients that are `rounded`: if two scores are
    nearly equal, rounding would decide which expert computes a token, and change whole rows of gradients."""
    moe = case.spec.moe
    if moe is None or (case.dtype == "float64" and not rounded):
        return case
    return replace(case, spec=replace(case.spec, moe=replace(moe, force_balance=True)))


LOSS_SCALING = PrecisionSection(compute="fp16", loss_scale=2.0**9, loss_scale_window=1, loss_scale_hysteresis=1)
"""For float16: the scale changes in every step. Gradients of models at test size overflow above 2^15 and more."""
OVERFLOW_STEP = 1
"""The step, 0-based, in which a gradient overflows in float16."""


def cut_fp8(fp8: Fp8 | None, spec: ModelSpec, layouts: Sequence[Layout]) -> Fp8 | None:
    """Return fp8 for a reduced model: some layers in it if there were some, and blocks that divide every shard."""
    if fp8 is None:
        return None
    fp8 = replace(fp8, skip_layers=min(fp8.skip_layers, (spec.n_layers - 1) // 2))
    return replace(fp8, block=min(block_of(spec, fp8, layout.tp) for layout in layouts))


def cut_optimizer(optimizer: OptimizerSection) -> OptimizerSection:
    """Return the optimizer for a reduced model: options that are sizes are limited to test size."""
    few = {
        key: type(option.default)(option.at_test_size)
        for key, option in optimizer.kind.options.items()
        if option.at_test_size < optimizer.options[key]
    }
    return optimizer.model_copy(update=few)


def only_in_float64(dtype: str, key: str, value: str) -> str:
    """Return why a choice that rounds, or picks elements, is compared only in float64, and the valid alternatives."""
    return (
        f"dtype={dtype!r} with {key}={value!r}: a sum in another order is another number in {dtype}, which may round "
        f"to the next number or make another element the largest, so that no bound would distinguish a bug from "
        f"rounding; valid: dtype='float64', or {key}='none'"
    )


def not_with(compress_gradients: str, key: str, value: str) -> str:
    """Return why a choice that rounds and compressed gradients are compared separately, and the valid alternatives."""
    return (
        f"layout.compress_gradients={compress_gradients!r} with {key}={value!r}: training can have both, but weights "
        f"after an update with rounded gradients are other numbers, which may round to the next number, so that no "
        f"bound would distinguish a bug from rounding; verify one, and then the other, with --set {key}=none and --set "
        f"layout.compress_gradients=none"
    )
