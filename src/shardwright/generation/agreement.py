"""Compares the log-probabilities of the trainer's forward pass, of `score` and of token-by-token `generate`.

In reinforcement learning the sampler's log-probabilities are the denominator of the ratio whose numerator is the
trainer's. The three ways compute the same numbers with other shapes of matmuls and attention, so sums are rounded in
another order:

    trainer     all sequences, whole, by the forward pass of `train`
    score       one prefill pass of a cache for each sequence
    generate    the tokens before the scored ones in a prefill pass, then one scored token at a time

The bound is for rounding errors that add up like a random walk: 4 u sqrt(8 L) m for L layers with about 8 roundings in
sequence each, u the unit of rounding of the parameters' type and m the largest absolute log-probability, at least 1.
In the batch-invariant mode (`model/batch_invariant.py`) the bound is 0: all numbers are equal in each bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.data.batches import Batch
from shardwright.data.samples import IGNORE
from shardwright.generation.engine import LayoutEngine
from shardwright.generation.ranks import run_on_layout
from shardwright.generation.score import ScoreRequest, Sequences, cache_sizes, decoded, scored
from shardwright.generation.source import open_source
from shardwright.model.spec import ModelSpec
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.objects import gathered
from shardwright.split.rules import sequence_cuts
from shardwright.training.forward_backward import ForwardBackward
from shardwright.training.ranks import place_from_environment
from shardwright.view.document import COUNT, Column, Note, Part, Quantity, Table, VerbDocument

_DIFFERENCE = Quantity("{:.3g}".format)


class PathDifference(NamedTuple):
    """The differences of a path's log-probabilities from the trainer's, in nats, over all scored tokens, and the number
    of tokens whose numbers are equal in each bit."""

    path: str
    largest: float
    mean: float
    n_equal: int


@dataclass(frozen=True)
class PathAgreement:
    """`dtype`: of the parameters; `bound`: of the largest difference, in nats."""

    paths: tuple[PathDifference, ...]
    n_tokens: int
    dtype: str
    bound: float

    @property
    def holds(self) -> bool:
        """Return whether every log-probability is finite and every difference is within the bound."""
        return math.isfinite(self.bound) and all(path.largest <= self.bound for path in self.paths)


def rounding_bound(spec: ModelSpec, dtype: torch.dtype, largest: float) -> float:
    """Return the bound of the module's docstring. `largest`: the largest absolute log-probability, in nats. If it is
    not finite, the bound is not finite either."""
    if not math.isfinite(largest):
        return largest
    return 4 * torch.finfo(dtype).eps / 2 * math.sqrt(8 * spec.n_layers) * max(1.0, largest)


def largest_of(values: Sequence[float]) -> float:
    """Return the largest value; NaN if any is NaN, which `max` may drop."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def compare_paths(request: ScoreRequest) -> PathAgreement | None:
    """Score sequences in the three ways on the layout; None on every rank of torchrun or srun except the first."""
    agreement: PathAgreement = run_on_layout(request.layout, request.device, _on_rank, request)
    place = place_from_environment()
    return agreement if place is None or place.rank == 0 else None


def _on_rank(request: ScoreRequest, device: torch.device) -> PathAgreement:
    source, layout = open_source(request.model), request.layout
    model = source.on_rank(layout, device, batch_invariant=request.batch_invariant)
    trainer = trainer_log_probs(model, device, request.sequences)
    rank = layout.data_rank(dist.get_rank())
    own = {i: sequence for i, sequence in request.sequences.items() if i % layout.data_ranks == rank}
    engine = LayoutEngine(model, device, *cache_sizes(request, own))
    paths = []
    for name, score in (("score", scored), ("generate", decoded)):
        parts = gathered(
            {i: scored.log_probs for i, scored in score(engine, own).items()}, dict[int, tuple[float, ...]]
        )
        values = {i: log_probs for part in parts for i, log_probs in part.items()}
        pairs = [pair for i in trainer for pair in zip(values[i], trainer[i], strict=True)]
        differences = [abs(a - b) for a, b in pairs]
        n_equal = sum(a == b for a, b in pairs)
        mean = math.fsum(differences) / len(pairs)
        paths.append(PathDifference(name, largest_of(differences), mean, n_equal))
    engine.close()
    largest = largest_of([abs(value) for values in trainer.values() for value in values])
    n_tokens = sum(map(len, trainer.values()))
    bound = 0.0 if request.batch_invariant else rounding_bound(source.spec, source.dtype, largest)
    return PathAgreement(tuple(paths), n_tokens, str(source.dtype).removeprefix("torch."), bound)


def trainer_log_probs(model: ParallelModel, device: torch.device, sequences: Sequences) -> dict[int, list[float]]:
    """Return the log-probabilities of the scored tokens of each sequence by the forward pass of training, equal on all
    ranks. Sequences are padded at their ends to a length that the layout can partition."""
    cuts = sequence_cuts(model.layout)
    n_tokens = -(-max(len(tokens) - 1 for tokens, _ in sequences.values()) // cuts) * cuts
    tokens_NT = torch.zeros(len(sequences), n_tokens, dtype=torch.int64)
    targets_NT = torch.full_like(tokens_NT, IGNORE)
    for row, (tokens, n) in enumerate(sequences.values()):
        tokens_NT[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets_NT[row, len(tokens) - 1 - n : len(tokens) - 1] = torch.tensor(tokens[-n:])
    batch = Batch.from_sequences(tokens_NT, targets_NT, torch.arange(len(tokens_NT)), 1)
    values_NT: Tensor = ForwardBackward(model, device=device, seed=0).token_log_probs(batch).cpu()
    rows = zip(sequences, values_NT, targets_NT != IGNORE, strict=True)
    return {index: values_T[counted_T].tolist() for index, values_T, counted_T in rows}


def agreement_view(agreement: PathAgreement) -> VerbDocument:
    """Return the document of `score --check`."""
    columns = [Column("path"), Column("largest difference", _DIFFERENCE), Column("mean", _DIFFERENCE)]
    columns += [Column("equal in each bit", COUNT)]
    verdict = "within" if agreement.holds else "beyond"
    parts: list[Part] = [
        Table(columns, list(agreement.paths), "Differences from the trainer's forward pass, in nats."),
        Note(
            f"{agreement.n_tokens:,} tokens in {agreement.dtype}: {verdict} the bound of {agreement.bound:.3g} nats",
            tone="" if agreement.holds else "bad",
        ),
    ]
    data = {
        "paths": [path._asdict() for path in agreement.paths],
        "n_tokens": agreement.n_tokens,
        "dtype": agreement.dtype,
        "bound": agreement.bound,
        "holds": agreement.holds,
    }
    return VerbDocument("log-probabilities of training and generation", data, parts)
