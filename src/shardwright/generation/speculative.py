"""Speculative decoding: a small draft model proposes tokens, and one pass of the target model checks them all.

    proposal x ~ q (draft)        accepted with probability min(1, p(x) / q(x)) (p: target)
    at the first rejection, and then the step ends:       a token ~ max(p - q, 0), normalised
    if all are accepted:                                  one more token ~ p

Every token is distributed as the target's own (Leviathan et al., arXiv 2211.17192, theorem 1 in appendix A.1; Chen et
al., arXiv 2302.01318). With greedy choice p and q are 1 for one token, and the tokens are the target's own.

Every rank has the whole draft model; the target model runs on its layout.

Shapes: k proposals of a sequence, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from shardwright.generation.continuous import Batcher, RunningSequence
from shardwright.generation.engine import WholeEngine
from shardwright.generation.sampling import ACCEPTED, DRAWN, PROPOSED, REPLACED, Sampling, draw


@dataclass
class Proposals:
    """The proposals for one sequence, and the distribution (V,) that each was drawn from."""

    wanted: int
    tokens: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)


class Speculative:
    """Decodes the sequences of `batcher` with proposals of a draft model; a `continuous.Decode`.

    `n_proposed`: maximum proposals of a step; `draft_limit`: maximum tokens of a sequence in the draft.
    """

    def __init__(self, batcher: Batcher, draft: WholeEngine, n_proposed: int, draft_limit: int) -> None:
        for cache in (batcher.engine.cache, draft.cache):
            assert cache.n_ahead >= n_proposed, f"a cache for {cache.n_ahead} replaced tokens, {n_proposed} proposals"
        self.batcher, self.n_proposed, self.draft_limit = batcher, n_proposed, draft_limit
        self.draft = Batcher(draft, batcher.sampling, draft_limit)
        self.n_cached: dict[int, int] = {}
        """The number of tokens of each prompt's sequence in the draft's cache; later tokens there are stale."""
        self.proposed = self.accepted = 0
        """Numbers of proposals and of accepted proposals, over all steps."""

    def __call__(self, running: Sequence[RunningSequence]) -> list[list[int]]:
        proposals = self._propose(running)
        checked = [
            replace(sequence, tokens=sequence.tokens + proposal.tokens)
            for sequence, proposal in zip(running, proposals, strict=True)
        ]
        new = [(len(sequence.tokens) - 1, 1 + len(p.tokens)) for sequence, p in zip(running, proposals, strict=True)]
        _, logits = self.batcher.run(checked, new, [length for _, length in new])
        if not running:
            return []

        def choose() -> Tensor:
            rows = torch.cat(logits).split([length for _, length in new])
            accepted = [self.check(*arguments) for arguments in zip(running, proposals, rows, strict=True)]
            width = self.n_proposed + 1
            return torch.tensor([[len(tokens), *tokens] + [0] * (width - len(tokens)) for tokens in accepted])

        chosen = self.batcher.engine.agree(choose, (len(running), self.n_proposed + 2)).tolist()
        for sequence, proposal, (count, *_) in zip(running, proposals, chosen, strict=True):
            self.proposed += len(proposal.tokens)
            self.accepted += count - 1
            if proposal.tokens:  # the last proposal has not been through the draft
                self.n_cached[sequence.prompt] = len(sequence.tokens) + min(count, len(proposal.tokens)) - 1
        return [tokens[:count] for count, *tokens in chosen]

    def _propose(self, running: Sequence[RunningSequence]) -> list[Proposals]:
        """Return up to `n_proposed` proposals for each sequence, by one pass of the draft for each number."""
        proposals = [
            Proposals(max(0, min(self.n_proposed, s.stop - len(s.tokens) - 1, self.draft_limit - len(s.tokens))))
            for s in running
        ]
        drafts = [replace(sequence, tokens=list(sequence.tokens)) for sequence in running]
        for number in range(self.n_proposed):
            now = [i for i, proposal in enumerate(proposals) if proposal.wanted > number]
            if not now:
                break
            sequences = [drafts[i] for i in now]
            # Tokens that the draft has not seen: at first the prompt, later the target's additions.
            starts = [self.n_cached.get(s.prompt, 0) if number == 0 else len(s.tokens) - 1 for s in sequences]
            new = [(start, len(sequence.tokens) - start) for sequence, start in zip(sequences, starts, strict=True)]
            _, (logits_NV,) = self.draft.run(sequences, new)
            q_NV = self.sampling.probabilities(logits_NV)
            u_N = self._uniform(sequences)[:, PROPOSED]
            tokens = self.batcher.engine.agree(partial(draw, q_NV, u_N), (len(now),))
            for i, token, q_V in zip(now, tokens.tolist(), q_NV, strict=True):
                proposals[i].tokens.append(token)
                proposals[i].q.append(q_V)
                drafts[i].tokens.append(token)
        return proposals

    def check(self, sequence: RunningSequence, proposal: Proposals, logits_WV: Tensor) -> list[int]:
        """Return the accepted proposals and one more token; `logits_WV`: the target's, after the last token and after
        each proposal."""
        p_WV = self.sampling.probabilities(logits_WV)
        first = len(sequence.tokens)
        positions = range(first, first + len(p_WV))
        u_W4 = self.sampling.uniform([sequence.prompt] * len(p_WV), positions).to(p_WV.device)
        kept: list[int] = []
        for token, q_V, p_V, u_4 in zip(proposal.tokens, proposal.q, p_WV, u_W4, strict=False):
            if u_4[ACCEPTED] * q_V[token] >= p_V[token]:
                rest_V = (p_V - q_V).clamp(min=0)
                return [*kept, int(draw(rest_V[None], u_4[REPLACED][None]))]
            kept.append(token)
        return [*kept, int(draw(p_WV[-1:], u_W4[-1:, DRAWN]))]

    def _uniform(self, sequences: Sequence[RunningSequence]) -> Tensor:
        return self.sampling.uniform([s.prompt for s in sequences], [len(s.tokens) for s in sequences])

    @property
    def sampling(self) -> Sampling:
        return self.batcher.sampling
