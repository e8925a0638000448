"""The log-likelihood of given tokens: one prefill pass for each sequence, on any layout.

Shapes: W tokens that are scored, V vocab.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.generation.continuous import Batcher, RunningSequence
from shardwright.generation.engine import GenerationEngine, LayoutEngine, WholeEngine
from shardwright.generation.expert_file import as_text
from shardwright.generation.ranks import run_on_layout
from shardwright.generation.sampling import Sampling, as_bits, from_bits
from shardwright.generation.source import open_source
from shardwright.layout.layout import Layout
from shardwright.parallel.loss import log_probabilities
from shardwright.parallel.objects import gathered
from shardwright.training.ranks import ProcessRank, pick_device, place_from_environment


@dataclass(frozen=True)
class SequenceScore:
    """`log_probs`: of each scored token of a sequence given the tokens before, in nats; `greedy`: whether each is the
    most probable one."""

    log_probs: tuple[float, ...]
    greedy: bool
    experts: str | None = None
    """The recorded experts of all tokens except the last, as `expert_file.as_text` writes them."""

    @property
    def log_likelihood(self) -> float:
        """The log-probability of all scored tokens together."""
        return math.fsum(self.log_probs)


Sequences = Mapping[int, tuple[Sequence[int], int]]
"""By index: the token ids of a sequence, at least two, and the number of its last ones to score, fewer than all."""


@dataclass(frozen=True)
class ScoreRequest:
    """The options of scoring. `model`: a run, a checkpoint or a folder of transformers; `layout`: a result of
    `without_training`, whose ranks are started here unless torchrun or srun has started them; `batch_size`: sequences
    that a replica runs at once."""

    model: Path
    sequences: Sequences
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 16
    device: str = "auto"
    batch_invariant: bool = False
    """Whether a score is equal in each bit whatever the other sequences are (`model/batch_invariant.py`)."""
    record_experts: bool = False
    replay: Mapping[int, Tensor] | None = None
    """The experts of the tokens of each sequence, (tokens - 1, L, K)."""


def score(request: ScoreRequest) -> list[SequenceScore]:
    """Score each sequence, in the order of the indices. No sequence may have more than max_seq_len + 1 tokens."""
    if not request.sequences:
        return []
    if place_from_environment() is not None or request.layout.world_size > 1:
        scores = run_on_layout(request.layout, request.device, _on_rank, request)
    else:
        device = pick_device(request.device, ProcessRank())
        engine = WholeEngine(
            open_source(request.model).whole(device),
            *cache_sizes(request, request.sequences),
            batch_invariant=request.batch_invariant,
            record_experts=request.record_experts,
        )
        scores = scored(engine, request.sequences, request.replay)
    return [scores[index] for index in sorted(scores)]


def scored(
    engine: GenerationEngine,
    sequences: Sequences,
    replay: Mapping[int, Tensor] | None = None,
) -> dict[int, SequenceScore]:
    """Score the sequences of this rank, the longest first. `replay`: as in `Batcher`."""
    experts: dict[int, list[Tensor]] = {}
    recorded = experts if engine.record_experts else None
    batcher = Batcher(engine, Sampling(), engine.cache.n_positions, replay=replay, experts=recorded)
    most = _most_at_once(engine)
    waiting = deque(sorted(sequences.items(), key=lambda item: -len(item[1][0])))
    scores: dict[int, SequenceScore] = {}
    while engine.anywhere(bool(waiting)):
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        running = [
            RunningSequence(index, list(tokens), len(tokens), len(tokens), slot)
            for slot, (index, (tokens, _)) in enumerate(taken)
        ]
        n_scored = [n for _, (_, n) in taken]
        _, logits = batcher.run(running, [(0, len(sequence.tokens) - 1) for sequence in running], n_scored)
        if not running:
            continue
        targets = torch.tensor([token for _, (tokens, n) in taken for token in tokens[-n:]])
        rows = engine.agree(partial(_rows, logits, targets), (len(targets), 2))
        for (index, _), part in zip(taken, rows.split(n_scored), strict=True):
            chosen = as_text(torch.cat(experts[index])) if engine.record_experts else None
            scores[index] = SequenceScore(tuple(from_bits(part[:, 0])), bool(part[:, 1].all()), chosen)
    return scores


def decoded(engine: GenerationEngine, sequences: Sequences) -> dict[int, SequenceScore]:
    """Score the sequences of this rank as `generate` computes new tokens: the tokens before the scored ones in a
    prefill pass, then a pass for each scored token, with the cache."""
    batcher = Batcher(engine, Sampling(), engine.cache.n_positions)
    most = _most_at_once(engine)
    waiting = deque(sorted(sequences.items()))
    values: dict[int, list[float]] = {index: [] for index in sequences}
    greedy = dict.fromkeys(sequences, True)
    running: list[tuple[RunningSequence, int]] = []
    while engine.anywhere(bool(waiting or running)):
        new: list[tuple[int, int]]
        if not running:
            for slot in range(min(most, len(waiting))):
                index, (tokens, n) = waiting.popleft()
                running.append((RunningSequence(index, list(tokens), len(tokens) - n, len(tokens), slot), n))
            new = [(0, sequence.n_prompt) for sequence, _ in running]
        else:
            new = [(len(sequence.tokens) - n - 1, 1) for sequence, n in running]
        _, logits = batcher.run([sequence for sequence, _ in running], new)
        if not running:
            continue
        targets = torch.tensor([sequence.tokens[-n] for sequence, n in running])
        rows = engine.agree(partial(_rows, logits, targets), (len(targets), 2))
        for (sequence, _), value, best in zip(running, from_bits(rows[:, 0]), rows[:, 1].tolist(), strict=True):
            values[sequence.prompt].append(value)
            greedy[sequence.prompt] &= bool(best)
        running = [(sequence, n - 1) for sequence, n in running if n > 1]
    return {index: SequenceScore(tuple(values[index]), greedy[index]) for index in sequences}


def _most_at_once(engine: GenerationEngine) -> int:
    """Return the number of sequences that can start together."""
    return min(engine.cache.n_slots, engine.n_batches) if engine.one_prompt else engine.cache.n_slots


def _rows(logits: Sequence[Tensor], targets_W: Tensor) -> Tensor:
    """Return (W, 2) int64: the bits of each target's log-probability, and whether it is the most probable token."""
    greedy_W = torch.cat([logits_WV.argmax(-1) for logits_WV in logits]) == targets_W.to(logits[0].device)
    return torch.stack([as_bits(log_probabilities(logits, targets_W)), greedy_W.to(torch.int64)], dim=1)


def _on_rank(request: ScoreRequest, device: torch.device) -> dict[int, SequenceScore]:
    """Score the sequences of one rank of the layout; return the scores of all ranks."""
    layout = request.layout
    rank = layout.data_rank(dist.get_rank())
    sequences = {i: sequence for i, sequence in request.sequences.items() if i % layout.data_ranks == rank}
    model = open_source(request.model).on_rank(layout, device, batch_invariant=request.batch_invariant)
    sizes = cache_sizes(request, sequences)
    engine = LayoutEngine(model, device, *sizes, record_experts=request.record_experts)
    local_scores = scored(engine, sequences, request.replay)
    return {index: value for part in gathered(local_scores, dict[int, SequenceScore]) for index, value in part.items()}


def cache_sizes(request: ScoreRequest, sequences: Sequences) -> tuple[int, int]:
    """Return the rows of the cache, and the positions of each."""
    longest = max(len(tokens) for tokens, _ in request.sequences.values()) - 1
    return max(1, min(request.batch_size, len(sequences))), longest
