"""Continuous batching: a sequence that ends frees its row of the cache (Orca, Yu et al., OSDI 2022).

A pass either starts sequences (prefill) or has one new token of each running sequence (decode).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.generation.batch import RaggedBatch, SequenceSegment
from shardwright.generation.engine import GenerationEngine
from shardwright.generation.sampling import Sampling, as_bits, from_bits
from shardwright.parallel.loss import log_probabilities


@dataclass
class RunningSequence:
    """A sequence with a row of the cache. `tokens`: the prompt and its continuation; all except the last are in the
    cache after a pass. `stop`: the number of tokens at which it ends."""

    prompt: int
    tokens: list[int]
    n_prompt: int
    stop: int
    slot: int

    @property
    def continuation(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.n_prompt :]


Decode = Callable[[Sequence[RunningSequence]], list[list[int]]]
"""Runs one step of all running sequences; returns the new tokens of each, one or more."""


@dataclass
class Batcher:
    """Continues prompts in the rows of an engine's cache.

    `limit`: maximum tokens of a sequence, prompt included; `ends`: tokens that end a sequence, as its last.
    """

    engine: GenerationEngine
    sampling: Sampling
    limit: int
    ends: frozenset[int] = frozenset()
    decode: Decode | None = None
    """Speculative decoding, instead of a pass with one token of each sequence."""
    stops: Callable[[Sequence[int]], bool] = lambda continuation: False
    """Whether a sequence ends with this continuation."""
    log_probs: dict[int, list[float]] | None = None
    """If given: receives, for each prompt, the log-probability of each new token by the model itself, before
    temperature, top-k and top-p; not with `decode`."""

    replay: Mapping[int, Tensor] | None = None
    """The experts of the tokens of each prompt's sequence, (tokens, L, K), instead of the routers' choices."""
    experts: dict[int, list[Tensor]] | None = None
    """If given: receives, for each prompt, the experts (tokens, L, K) of each pass; for an engine that records them."""

    def complete(self, prompts: Mapping[int, Sequence[int]], max_tokens: int) -> dict[int, list[int]]:
        """Return up to `max_tokens` tokens after each of this rank's prompts, by the index of the prompt."""
        waiting = deque(sorted(prompts.items()))
        free = list(range(self.engine.cache.n_slots))
        running: list[RunningSequence] = []
        done: dict[int, list[int]] = {}
        while self.engine.anywhere(bool(waiting or running)):
            fresh: list[RunningSequence] = []
            most = self.engine.n_batches if self.engine.one_prompt else len(free)
            while waiting and free and len(fresh) < most:
                index, ids = waiting.popleft()
                stop = min(len(ids) + max_tokens, self.limit)
                fresh.append(RunningSequence(index, list(ids), len(ids), stop, free.pop(0)))
            for sequence, new in zip(fresh or running, self._step(fresh, running), strict=True):
                self._extend(sequence, new)
            running = sorted([*running, *fresh], key=lambda sequence: sequence.slot)
            for sequence in [s for s in running if self._is_complete(s)]:
                done[sequence.prompt] = sequence.continuation
                running.remove(sequence)
                free.append(sequence.slot)
            free.sort()
        return done

    def _step(self, fresh: list[RunningSequence], running: list[RunningSequence]) -> list[list[int]]:
        if fresh:
            return self.next_tokens(fresh, [(0, len(sequence.tokens)) for sequence in fresh])
        if self.decode is not None:
            return self.decode(running)
        return self.next_tokens(running, [(len(sequence.tokens) - 1, 1) for sequence in running])

    def next_tokens(self, sequences: Sequence[RunningSequence], new: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return the token after each sequence, from a pass with `new` (first position, length) of its tokens."""

        def choose(logits: list[Tensor]) -> Tensor:
            chosen = [
                self.sampling.choose(logits_WV, [s.prompt for s in group], [len(s.tokens) for s in group])
                for logits_WV, group in zip(logits, groups, strict=False)
                if group
            ]
            tokens_N = chosen[0].new_tensor([token for part in chosen for token in part.tolist()])
            if self.log_probs is None:
                return tokens_N[:, None]
            return torch.stack([tokens_N, as_bits(log_probabilities(logits, tokens_N))], dim=1)

        groups, logits = self.run(sequences, new)
        if not sequences:
            return []
        n_columns = 1 if self.log_probs is None else 2
        chosen = self.engine.agree(lambda: choose(logits), (len(sequences), n_columns))
        if self.log_probs is not None:
            for sequence, value in zip(sequences, from_bits(chosen[:, 1]), strict=True):
                self.log_probs.setdefault(sequence.prompt, []).append(value)
        return [[token] for token in chosen[:, 0].tolist()]

    def run(
        self,
        sequences: Sequence[RunningSequence],
        new: Sequence[tuple[int, int]],
        n_wanted: Sequence[int] | None = None,
    ) -> tuple[list[list[RunningSequence]], list[Tensor]]:
        """Run `new` tokens of each sequence; return the sequences of each pass and, on a rank with the head, the logits
        of the last `n_wanted` of these tokens of each sequence, by default one."""
        batches, groups = [], []
        wanted = [1] * len(sequences) if n_wanted is None else n_wanted
        for part in _groups(list(zip(sequences, new, wanted, strict=True)), self.engine):
            segments = [SequenceSegment(sequence.slot, start, length) for sequence, (start, length), _ in part]
            tokens = [token for s, (start, length), _ in part for token in s.tokens[start : start + length]]
            batches.append(RaggedBatch(segments, tokens, [n for _, _, n in part]))
            groups.append([sequence for sequence, _, _ in part])
            if self.replay is not None and part:
                rows = [self.replay[s.prompt][start : start + length] for s, (start, length), _ in part]
                batches[-1].replayed_NLK = torch.cat(rows)
        logits = self.engine.run(batches)
        for batch, group in zip(batches, groups, strict=True) if self.experts is not None else ():
            assert self.experts is not None
            assert batch.chosen_NLK is not None
            lengths = [segment.length for segment in batch.segments]
            for sequence, chosen_TLK in zip(group, batch.chosen_NLK.split(lengths), strict=True) if group else ():
                self.experts.setdefault(sequence.prompt, []).append(chosen_TLK)
        return groups, logits

    def _extend(self, sequence: RunningSequence, new: Sequence[int]) -> None:
        """Add tokens up to the end of the sequence."""
        for token in new:
            if not self._is_complete(sequence):
                sequence.tokens.append(token)

    def _is_complete(self, sequence: RunningSequence) -> bool:
        new = sequence.continuation
        ended = bool(new) and (new[-1] in self.ends or self.stops(new))
        return ended or len(sequence.tokens) >= sequence.stop


Part = list[tuple[RunningSequence, tuple[int, int], int]]


def _groups(sequences: Part, engine: GenerationEngine) -> Iterator[Part]:
    """Yield the sequences of each pass: equal parts of neighbours, as many as the engine runs at once."""
    n = engine.n_batches if engine.in_step else min(engine.n_batches, len(sequences))
    begin = 0
    for number in range(n):
        end = begin + -(-(len(sequences) - begin) // (n - number))
        yield sequences[begin:end]
        begin = end
