"""The log-likelihood of given tokens: one prefill pass for each sequence, on any layout.

Shapes: W tokens that are scored, V vocab, N sequences of a step.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.generation.continuous import Batcher, RunningSequence
from shardwright.generation.engine import GenerationEngine, LayoutEngine, WholeEngine
from shardwright.generation.sampling import Sampling
from shardwright.generation.source import open_source
from shardwright.layout.layout import Layout
from shardwright.parallel.objects import gathered
from shardwright.training.ranks import ProcessRank, pick_device
from shardwright.verification.ranks import run_ranks


@dataclass(frozen=True)
class SequenceScore:
    """`log_likelihood`: of the scored tokens of a sequence given the tokens before, in nats; `greedy`: whether each is
    the most probable one."""

    log_likelihood: float
    greedy: bool


Sequences = Mapping[int, tuple[Sequence[int], int]]
"""By index: the token ids of a sequence, at least two, and the number of its last ones to score, fewer than all."""


@dataclass(frozen=True)
class ScoreRequest:
    """The options of scoring. `model`: a run, a checkpoint or a folder of transformers; `layout`: a result of
    `without_training`, whose ranks are started here; `batch_size`: sequences that a replica runs at once."""

    model: Path
    sequences: Sequences
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 16
    device: str = "auto"


def score(request: ScoreRequest) -> list[SequenceScore]:
    """Score each sequence, in the order of the indices. No sequence may have more than max_seq_len + 1 tokens."""
    if not request.sequences:
        return []
    if request.layout.world_size > 1:
        scores = run_ranks(_on_cpu, request.layout.world_size, request)[0]
    else:
        device = pick_device(request.device, ProcessRank())
        engine = WholeEngine(open_source(request.model).whole(device), *_cache_sizes(request, request.sequences))
        scores = scored(engine, request.sequences)
    return [scores[index] for index in sorted(scores)]


def scored(engine: GenerationEngine, sequences: Sequences) -> dict[int, SequenceScore]:
    """Score the sequences of this rank, the longest first."""
    batcher = Batcher(engine, Sampling(), engine.cache.n_positions)
    most = min(engine.cache.n_slots, engine.n_batches) if engine.one_prompt else engine.cache.n_slots
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
        targets = [tokens[-n:] for _, (tokens, n) in taken]
        rows = engine.agree(lambda logits=logits, targets=targets: _rows(logits, targets), (len(taken), 2))  # type: ignore[misc]
        values, greedy = rows[:, 0].contiguous().view(torch.float64).tolist(), rows[:, 1].tolist()
        for (index, _), value, is_greedy in zip(taken, values, greedy, strict=True):
            scores[index] = SequenceScore(value, bool(is_greedy))
    return scores


def _rows(logits: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> Tensor:
    """Return (N, 2) int64: the bits of the log-likelihood in float64, and whether all targets are most probable."""
    rows = []
    rows_1V = (row for logits_WV in logits for row in logits_WV.split(1))
    for target in targets:
        logits_WV = torch.cat([next(rows_1V) for _ in target])
        target_W = torch.tensor(target, device=logits_WV.device)
        log_p_WV = logits_WV.double().log_softmax(-1)
        value = log_p_WV.gather(1, target_W[:, None]).sum()
        greedy = (logits_WV.argmax(-1) == target_W).all()
        rows.append(torch.stack([value.view(torch.int64), greedy.to(torch.int64)]))
    return torch.stack(rows)


def _on_cpu(request: ScoreRequest) -> dict[int, SequenceScore]:
    """Score sequences on one rank that was forked here; return the scores of all ranks."""
    layout, device = request.layout, torch.device("cpu")
    rank = layout.data_rank(dist.get_rank())
    sequences = {i: sequence for i, sequence in request.sequences.items() if i % layout.data_ranks == rank}
    model = open_source(request.model).on_rank(layout, device)
    local_scores = scored(LayoutEngine(model, device, *_cache_sizes(request, sequences)), sequences)
    return {index: value for part in gathered(local_scores, dict[int, SequenceScore]) for index, value in part.items()}


def _cache_sizes(request: ScoreRequest, sequences: Sequences) -> tuple[int, int]:
    """Return the rows of the cache, and the positions of each."""
    longest = max(len(tokens) for tokens, _ in request.sequences.values()) - 1
    return max(1, min(request.batch_size, len(sequences))), longest
