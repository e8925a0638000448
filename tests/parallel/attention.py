"""What tests of attention over a context group share: cases, inputs, dense attention as in the books, groups."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.context import ContextAttention
from shardwright.split.sequence import spans


class Case(NamedTuple):
    """A method, the degrees of its two axes, and the heads."""

    method: str
    ring: int
    ulysses: int
    heads: int = 4
    kv_heads: int = 2

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    def positions(self, rank: int, seq_len: int) -> list[int]:
        held = spans(self.method, seq_len, self.ring, self.ulysses, *divmod(rank, self.ulysses))
        return [position for span in held for position in span]


BATCH, SEQ_LEN, WIDTH = 2, 48, 8
GROUPED = [
    Case("ring", 2, 1),
    Case("ring", 4, 1),
    Case("zigzag", 2, 1),
    Case("zigzag", 3, 1),
    Case("zigzag", 4, 1),
    Case("allgather", 2, 1),
    Case("allgather", 3, 1),
    Case("allgather", 4, 1),
    Case("ulysses", 1, 2),
    Case("usp", 2, 2),
]
EVERY_HEAD_ITS_OWN = [case._replace(kv_heads=4) for case in GROUPED] + [Case("ulysses", 1, 4, kv_heads=4)]
FEWER_KV_HEADS_THAN_RANKS = [
    Case("ulysses", 1, 4),
    Case("ulysses", 1, 2, kv_heads=1),
    Case("ulysses", 1, 4, kv_heads=1),
    Case("ulysses", 1, 4, heads=8),
    Case("usp", 2, 2, kv_heads=1),
]
ON_EIGHT = [Case("zigzag", 8, 1), Case("allgather", 8, 1), Case("usp", 4, 2)]
ONE_OF_EACH = [Case("ring", 4, 1), Case("zigzag", 4, 1), Case("allgather", 4, 1), Case("ulysses", 1, 4), GROUPED[-1]]
ALL = [*GROUPED, *EVERY_HEAD_ITS_OWN, *FEWER_KV_HEADS_THAN_RANKS, *ON_EIGHT]
IN_BF16 = [*ONE_OF_EACH, Case("zigzag", 8, 1)]


class Run(NamedTuple):
    """Outputs and gradients over the whole sequence."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def inputs(case: Case, seq_len: int = SEQ_LEN, batch: int = BATCH) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output in float64, the same on every rank; scores are far from uniform."""
    draw = torch.Generator().manual_seed(7)

    def normal(heads: int) -> Tensor:
        return torch.randn(batch, seq_len, heads, WIDTH, dtype=torch.float64, generator=draw)

    return 2 * normal(case.heads), 2 * normal(case.kv_heads), normal(case.kv_heads), normal(case.heads)


def dense(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(C)) v, masked, as in the books; none of the code under test."""
    group = q_BTHC.shape[2] // k_BTKC.shape[2]
    k_BTHC, v_BTHC = k_BTKC.repeat_interleave(group, 2), v_BTKC.repeat_interleave(group, 2)
    s_BHTS = torch.einsum("bthc,bshc->bhts", q_BTHC, k_BTHC) / q_BTHC.shape[-1] ** 0.5
    later_TS = torch.ones(s_BHTS.shape[-2:], dtype=torch.bool, device=s_BHTS.device).triu(1)
    return torch.einsum("bhts,bshc->bthc", s_BHTS.masked_fill(later_TS, float("-inf")).softmax(-1), v_BTHC)


def forward_backward(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Run:
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    o = attend(q, k, v)
    o.backward(do)
    return Run(o.detach(), *(x.grad for x in (q, k, v)))


@cache
def one_process(case: Case) -> Run:
    return forward_backward(dense, *inputs(case))


@cache
def groups(case: Case) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's groups; Ulysses ranks are neighbours."""
    mine: list[dist.ProcessGroup | None] = [None, None]
    world = torch.arange(case.ranks).view(case.ring, case.ulysses)
    for axis, rows in enumerate((world.T.tolist(), world.tolist())):
        for ranks in rows:
            if len(ranks) > 1:
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    mine[axis] = group
    return mine[0], mine[1]


def attention(case: Case) -> ContextAttention:
    return ContextAttention(case.method, *groups(case))
