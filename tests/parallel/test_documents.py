"""Proves that attention within documents over a context group is attention with a block-diagonal causal mask: outputs,
gradients and the messages that are sent.

The reference is dense attention in plain PyTorch with that mask, on one process and in float64. Runs anywhere, on gloo;
the variable-length kernel where there is a GPU.
"""

from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model import varlen
from shardwright.model.documents import Documents
from shardwright.parallel.context import ContextAttention
from shardwright.split.documents import AttentionPiece, Lengths, plan, spans_of_documents
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.parallel.attention import Case, Run, forward_backward, groups, inputs

SEQ_LEN = 48
SEQUENCES: tuple[Lengths, ...] = ((1, 30, 2, 3, 12), (24, 24), (48,), (1,) * 48)
APART: tuple[Lengths, ...] = ((12, 12, 12, 12), (6,) * 8)
"""Documents that end where the tokens of a contiguous rank of 4 do."""


class Job(NamedTuple):
    """A case, whether documents are dealt, and the documents."""

    case: Case
    deals: bool
    sequences: tuple[Lengths, ...] = SEQUENCES

    @property
    def layout(self) -> Layout:
        more = {"ulysses_degree": self.case.ulysses} if self.case.method == "usp" else {}
        return Layout(cp=self.case.ranks, cp_method=self.case.method, **more)

    def positions(self, rank: int) -> Tensor:
        """(B, T)"""
        held = [chain(*spans_of_documents(self.layout, each, rank, self.deals)) for each in self.sequences]
        return torch.tensor([list(each) for each in held])


RING = Case("ring", 4, 1)
JOBS = [
    Job(RING, deals=False),
    Job(RING, deals=False, sequences=APART),
    Job(Case("zigzag", 4, 1), deals=True),
    Job(Case("zigzag", 4, 1), deals=False),
    Job(Case("zigzag", 3, 1), deals=True),
    Job(Case("allgather", 4, 1), deals=True),
    Job(Case("ulysses", 1, 4), deals=False),
    Job(Case("usp", 2, 2), deals=True),
    Job(Case("zigzag", 2, 1, kv_heads=4), deals=True),
]


def masked(lengths: Lengths) -> Tensor:
    """Which key a query sees, (T, T)."""
    document_T = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])
    return (document_T[:, None] == document_T) & torch.ones(len(document_T), len(document_T)).tril().bool()


def exact(job: Job) -> Run:
    """Of the whole sequences, by dense attention with a mask."""
    sees_B1TS = torch.stack([masked(each) for each in job.sequences]).unsqueeze(1)

    def attend(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
        group = q_BTHC.shape[2] // k_BTKC.shape[2]
        k_BTHC, v_BTHC = k_BTKC.repeat_interleave(group, 2), v_BTKC.repeat_interleave(group, 2)
        s_BHTS = torch.einsum("bthc,bshc->bhts", q_BTHC, k_BTHC) / q_BTHC.shape[-1] ** 0.5
        p_BHTS = s_BHTS.masked_fill(~sees_B1TS, float("-inf")).softmax(-1)
        return torch.einsum("bhts,bshc->bthc", p_BHTS, v_BTHC)

    return forward_backward(attend, *inputs(job.case, SEQ_LEN, len(job.sequences)))


def local(job: Job, rank: int, x_BTHC: Tensor) -> Tensor:
    return torch.stack([row[at] for row, at in zip(x_BTHC, job.positions(rank), strict=True)])


def run_rank(jobs: list[Job]) -> list[tuple[Run, list[int]]]:
    """One rank's tokens of each job's run, and the bytes of its messages."""
    found = []
    for job in jobs:
        rank, sent = dist.get_rank(), []
        attention = ContextAttention(job.case.method, *groups(job.case), balances_documents=job.deals)
        documents = Documents(job.sequences)
        with pytest.MonkeyPatch.context() as patch:
            start = dist.batch_isend_irecv

            def watched(ops: list[Any], start: Any = start, sent: list[int] = sent) -> Any:
                sent += [op.tensor.nbytes for op in ops if op.op is dist.isend]
                return start(ops)

            patch.setattr(dist, "batch_isend_irecv", watched)
            given = (local(job, rank, x) for x in inputs(job.case, SEQ_LEN, len(job.sequences)))
            run = forward_backward(lambda q, k, v: attention(q, k, v, documents), *given)  # noqa: B023
        found.append((run, sent))
    return found


def compare(jobs: list[Job]) -> list[list[list[int]]]:
    """[job][rank] -> the bytes of its messages, once every output and gradient is compared."""
    ranks = run_ranks(run_rank, jobs[0].case.ranks, jobs)
    for at, job in enumerate(jobs):
        whole = exact(job)
        for rank, of_rank in enumerate(ranks):
            for name, found in of_rank[at][0]._asdict().items():
                mine = local(job, rank, getattr(whole, name))
                torch.testing.assert_close(found, mine, rtol=1e-10, atol=1e-12, msg=lambda t, n=name: f"{job} {n}: {t}")  # noqa: B023
    return [[of_rank[at][1] for of_rank in ranks] for at in range(len(jobs))]


@pytest.mark.parametrize("n_ranks", rest_prove([2, 3, 4], 4))
def test_output_and_gradients_are_those_of_a_block_diagonal_mask(n_ranks: int) -> None:
    jobs = [job for job in JOBS if job.case.ranks == n_ranks]
    sent = dict(zip(jobs, compare(jobs), strict=True))
    token_bytes = 2 * 2 * 8 * 8  # k and v of 2 kv heads of 8 elements of float64
    for job, of_ranks in sent.items():
        if job.case.method in ("ring", "zigzag") and job.case.kv_heads == 2:
            for rank, n_bytes in enumerate(of_ranks):
                mine = plan(job.sequences, job.case.method, n_ranks, rank, job.deals)
                keys = sum(at.stop - at.start for step in mine.sends for at in step)
                # Keys forward, keys again in backward, and gradients of what was received.
                assert sum(n_bytes) == (2 * keys + sum(mine.receives)) * token_bytes
        if job.sequences is APART:
            assert of_ranks == [[]] * 4, "documents of one rank are sent to another"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_variable_length_kernel_is_attention_to_each_piece(kv_heads: int) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 64, 16, generator=draw).cuda().bfloat16() for heads in (4, kv_heads, kv_heads))
    for pieces in (
        [AttentionPiece(slice(0, 40), slice(0, 40), True), AttentionPiece(slice(40, 64), slice(40, 64), True)],
        [AttentionPiece(slice(3, 20), slice(0, 7)), AttentionPiece(slice(20, 60), slice(0, 30))],
    ):
        rows, o, lse = varlen.attend(q, k, v, pieces)
        do = torch.randn(o.shape, generator=draw).cuda().bfloat16()
        whole = [torch.zeros(1, 4, 64, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        lse_all = torch.zeros(1, 4, 64, device="cuda")
        whole[0][:, :, rows], whole[1][:, :, rows], lse_all[:, :, rows] = do, o, lse
        found = varlen.gradient(whole[0], q, k, v, whole[1], lse_all, pieces)
        q64, k64, v64 = (x.double().requires_grad_() for x in (q, k, v))
        outputs = []
        for piece in pieces:
            expanded = [x[:, :, piece.columns].repeat_interleave(4 // kv_heads, 1) for x in (k64, v64)]
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q64[:, :, piece.rows], *expanded, is_causal=piece.causal
                )
            )
        together = torch.cat(outputs, 2)
        together.backward(do.double())
        torch.testing.assert_close(o.double(), together.detach(), rtol=2e-2, atol=2e-2)
        dq = torch.zeros_like(q64)
        dq[:, :, rows] = found[2].double()
        for mine, grad in zip((dq, found[3], found[4]), (q64.grad, k64.grad, v64.grad), strict=True):
            torch.testing.assert_close(mine.double(), grad, rtol=5e-2, atol=5e-2)
