"""Speculative decoding: a small draft model proposes tokens, and one pass of the target model checks them all.

    proposal x ~ q (draft)        accepted with probability min(1, p(x) / q(x)) (p: target)
    at the first rejection, and then the step ends:       a token ~ max(p - q, 0), normalised
    where all are accepted:                               one more token ~ p

Every token is distributed as the target's own (Leviathan et al., arXiv 2211.17192, theorem 1 in appendix A.1; Chen et
al., arXiv 2302.01318). With greedy choice p and q are 1 for one token, and the tokens are those of the target alone.

Every rank has the whole draft model; the target model runs on its layout.

Shapes: k proposals of a sequence, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwright.generation.continuous import Batcher, Running
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

    `n_proposed`: the most proposals of a step; `draft_limit`: the most tokens of a sequence that the draft takes.
    """

    def __init__(self, batcher: Batcher, draft: WholeEngine, n_proposed: int, draft_limit: int) -> None:
        self.batcher, self.n_proposed, self.draft_limit = batcher, n_proposed, draft_limit
        self.draft = Batcher(draft, batcher.sampling, draft_limit)
        self.n_cached: dict[int, int] = {}
        """How many tokens of each prompt's sequence the draft's cache has; those after them are stale."""
        self.proposed = self.accepted = 0
        """Proposals of all steps, and how many of them were accepted."""

    def __call__(self, running: Sequence[Running]) -> list[list[int]]:
        proposals = self._propose(running)
        checked = [
            replace(each, tokens=each.tokens + proposal.tokens)
            for each, proposal in zip(running, proposals, strict=True)
        ]
        new = [(len(each.tokens) - 1, 1 + len(p.tokens)) for each, p in zip(running, proposals, strict=True)]
        _, logits = self.batcher.run(checked, new, [length for _, length in new])
        if not running:
            return []

        def choose() -> Tensor:
            rows = torch.cat(logits).split([length for _, length in new])
            kept = [self.check(*each) for each in zip(running, proposals, rows, strict=True)]
            return torch.tensor([[len(each), *each] + [0] * (self.n_proposed + 1 - len(each)) for each in kept])

        found = self.batcher.engine.agree(choose, (len(running), self.n_proposed + 2)).tolist()
        for each, proposal, (count, *_) in zip(running, proposals, found, strict=True):
            self.proposed += len(proposal.tokens)
            self.accepted += count - 1
            if proposal.tokens:  # the last proposal has not been through the draft
                self.n_cached[each.prompt] = len(each.tokens) + min(count, len(proposal.tokens)) - 1
        return [tokens[:count] for count, *tokens in found]

    def _propose(self, running: Sequence[Running]) -> list[Proposals]:
        """Up to `n_proposed` proposals for each sequence, one pass of the draft for each."""
        proposals = [
            Proposals(
                max(0, min(self.n_proposed, each.stop - len(each.tokens) - 1, self.draft_limit - len(each.tokens)))
            )
            for each in running
        ]
        drafts = [replace(each, tokens=list(each.tokens)) for each in running]
        for number in range(self.n_proposed):
            now = [i for i, proposal in enumerate(proposals) if proposal.wanted > number]
            if not now:
                break
            sequences = [drafts[i] for i in now]
            # Tokens that the draft has not seen: at first the prompt, later what the target has added.
            starts = [self.n_cached.get(each.prompt, 0) if number == 0 else len(each.tokens) - 1 for each in sequences]
            new = [(start, len(each.tokens) - start) for each, start in zip(sequences, starts, strict=True)]
            _, (logits_NV,) = self.draft.run(sequences, new)
            q_NV = self.sampling.probabilities(logits_NV)
            u_N = self._uniform(sequences)[:, PROPOSED]
            tokens = self.batcher.engine.agree(lambda q_NV=q_NV, u_N=u_N: draw(q_NV, u_N), (len(now),))  # type: ignore[misc]
            for i, token, q_V in zip(now, tokens.tolist(), q_NV, strict=True):
                proposals[i].tokens.append(token)
                proposals[i].q.append(q_V)
                drafts[i].tokens.append(token)
        return proposals

    def check(self, sequence: Running, proposal: Proposals, logits_WV: Tensor) -> list[int]:
        """The accepted proposals and one token more; `logits_WV`: the target's, after the last token and after each
        proposal."""
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

    def _uniform(self, sequences: Sequence[Running]) -> Tensor:
        return self.sampling.uniform([each.prompt for each in sequences], [len(each.tokens) for each in sequences])

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return self.batcher.sampling
