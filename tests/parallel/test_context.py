"""Proves that attention over a context group is attention: outputs and gradients, mutations, kernels.

The reference is dense attention in plain PyTorch, over the whole sequence on one process and in float64. Each rank
takes its tokens of the same inputs (permute), attends, and what the ranks give is put back in order (un-permute).
Runs anywhere, on gloo; the kernel for GPUs where there is one.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.model.attention import causal_attention
from shardwright.model.blocks import FLASH_CPU, FLASH_CUDA, ROWS, kernel_for, merge
from shardwright.parallel import ring
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated
from tests.parallel.attention import (
    ALL,
    GROUPED,
    IN_BF16,
    ONE_OF_EACH,
    SEQ_LEN,
    WIDTH,
    Case,
    Run,
    attention,
    dense,
    forward_backward,
    inputs,
    one_process,
)


class Job(NamedTuple):
    """A case in a type of numbers, with bugs or without."""

    case: Case
    dtype: torch.dtype = torch.float64
    bugs: tuple[Mutation, ...] = ()


def run_rank(jobs: list[Job]) -> list[Run]:
    """One rank's tokens of each job's run."""
    runs = []
    for case, dtype, bugs in jobs:
        held = case.positions(dist.get_rank(), SEQ_LEN)
        local = [x[:, held].to(dtype) for x in inputs(case)]
        with mutated(*bugs):
            runs.append(forward_backward(attention(case), *local))
    return runs


@cache
def runs_on(n_ranks: int) -> dict[Job, Run]:
    """All jobs for so many ranks in one world, put back in the order of the sequence."""
    jobs = [job for job in JOBS if job.case.ranks == n_ranks]
    found = {}
    for job, ranks in zip(jobs, zip(*run_ranks(run_rank, n_ranks, jobs), strict=True), strict=True):
        order = torch.tensor([p for rank in range(n_ranks) for p in job.case.positions(rank, SEQ_LEN)]).argsort()
        found[job] = Run(*(torch.cat(parts, dim=1)[:, order] for parts in zip(*ranks, strict=True)))
    return found


def run_all(job: Job) -> Run:
    assert job in JOBS
    return runs_on(job.case.ranks)[job]


def errors(found: Run, exact: Run) -> dict[str, float]:
    """Distance in the Frobenius norm, relative to the exact one."""
    return {
        name: float((getattr(found, name).double() - getattr(exact, name)).norm() / getattr(exact, name).norm())
        for name in Run._fields
    }


def name_of(case: Case) -> str:
    return f"{case.method} {case.ring}x{case.ulysses}, {case.heads} heads, {case.kv_heads} kv heads"


BACKWARD = "shardwright.parallel.ring:RingAttention.backward"
COMING_HOME = "sum_2BTKC = sums.wait()\n_add(sum_2BTKC, ALL, own_block)"


def bug(function: str, before: str, after: str, case: Case = Case("zigzag", 4, 1)) -> Job:  # noqa: B008  (a tuple)
    return Job(case, bugs=(Mutation(function, before, after),))


BUGS = {
    "a block's own log-sum-exp in backward": bug(
        BACKWARD,
        "gradient(do, q, k_BKTC, v_BKTC, o, lse, causal)",
        "gradient(do, q, k_BKTC, v_BKTC, *kernel_for(q).attend(q, k_BKTC, v_BKTC, causal), causal)",
    ),
    "the gradients' last hop dropped": bug(BACKWARD, COMING_HOME, "sums.wait()\n_add(sum_2BTKC, ALL, own_block)"),
    "gradients come home to the next rank": bug(BACKWARD, COMING_HOME, "sums.wait()\nsums.start()\n" + COMING_HOME),
    "the own block's gradient forgotten": bug(BACKWARD, "_add(sum_2BTKC, ALL, own_block)", "pass"),
    "gradients of the early keys added to the late": bug(
        "shardwright.parallel.ring:_add",
        "sum_BTKC[:, columns] += part_BKTC.transpose(1, 2)",
        "sum_BTKC[:, -part_BKTC.shape[2] :] += part_BKTC.transpose(1, 2)",
    ),
    "the late queries' gradient added to the early": bug(
        BACKWARD, "dq_BHTC[:, :, rows] += dq_block", "dq_BHTC[:, :, : dq_block.shape[2]] += dq_block"
    ),
    "gradients for other ranks sent in another order": bug(
        "shardwright.parallel.context:_sum_at_home",
        "chunks[2 * n - 3 - i]",
        "chunks[n - 1 + i]",
        case=Case("allgather", 4, 1),
    ),
    "gradients of copied kv heads not summed": bug(
        "shardwright.parallel.ulysses:_to_tokens",
        "x_nBTwC.unflatten(0, (-1, replicas)).sum(1)",
        "x_nBTwC.unflatten(0, (-1, replicas))[:, 0]",
        case=Case("ulysses", 1, 4),
    ),
}
JOBS = [*map(Job, ALL), *(Job(case, torch.bfloat16) for case in IN_BF16), *BUGS.values()]


@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_output_and_gradients_are_those_of_dense_attention(case: Case):
    # Sums of at most 48 x 8 products, in another order and with a few roundings of 1e-16 more.
    assert max(errors(run_all(Job(case)), one_process(case)).values()) < 1e-13


@pytest.mark.parametrize("case", IN_BF16, ids=name_of)
def test_the_error_in_bf16_is_at_most_a_little_more_than_that_of_one_process(case: Case):
    exact = one_process(case)
    single = errors(forward_backward(causal_attention, *(x.bfloat16() for x in inputs(case))), exact)
    for name, error in errors(run_all(Job(case, torch.bfloat16)), exact).items():
        # Blocks are rounded to 8 bits each, and merged and summed in fp32: no error grows with the ring.
        assert error < 1.5 * single[name], name


def uneven_gradients(cases: list[Case]) -> list[Run]:
    return [uneven_gradient(case) for case in cases]


def uneven_gradient(case: Case) -> Run:
    """As from `o.sum().backward()`: a gradient without memory of its own; and one that is not contiguous."""
    q, k, v, _ = (x[:, case.positions(dist.get_rank(), SEQ_LEN)] for x in inputs(case))
    attend = attention(case)
    expanded = forward_backward(attend, q, k, v, torch.ones((), dtype=q.dtype).expand_as(q))
    strided = forward_backward(attend, q, k, v, torch.ones_like(q.transpose(1, 3)).transpose(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(expanded, strided, strict=True))
    return expanded


def test_any_strides_of_the_incoming_gradient_will_do():
    q, k, v, do = inputs(ONE_OF_EACH[0])
    exact = forward_backward(dense, q, k, v, torch.ones_like(do))
    for rank, runs in enumerate(run_ranks(uneven_gradients, 4, ONE_OF_EACH)):
        for case, found in zip(ONE_OF_EACH, runs, strict=True):
            mine = Run(*(x[:, case.positions(rank, SEQ_LEN)] for x in exact))
            for found_x, exact_x in zip(found, mine, strict=True):
                torch.testing.assert_close(found_x, exact_x, rtol=1e-10, atol=1e-11)


# Bugs injected


@pytest.mark.parametrize("name", BUGS)
def test_a_wrong_backward_behind_a_right_forward_is_noticed(name: str):
    found = errors(run_all(BUGS[name]), one_process(BUGS[name].case))
    assert found["o"] < 1e-13
    assert max(found["dq"], found["dk"], found["dv"]) > 0.01


# The kernels, a block at a time


def blocks_like_a_rings(attend_kernel: Any, dtype: torch.dtype, device: str, seq_len: int, kv_heads: int) -> Run:
    """What the ranks of a zig-zag ring of 2 compute, one block after another on one device: all shapes of blocks."""
    case = Case("zigzag", 2, 1, kv_heads=kv_heads)
    given = [x.to(device=device, dtype=dtype) for x in inputs(case, seq_len)]
    ranks = [[x[:, case.positions(rank, seq_len)].transpose(1, 2) for x in given] for rank in range(2)]
    wide = torch.promote_types(dtype, torch.float32)
    sums = [[torch.zeros_like(x, dtype=wide) for x in rank[:3]] for rank in ranks]
    outputs = []
    for rank, (q, _, _, do) in enumerate(ranks):
        pieces = [(source, *ring._piece(source, rank, seq_len // 2, True)) for source in (rank, 1 - rank)]
        o, lse = attend_kernel.attend(q, *ranks[rank][1:3], True)
        o = o.to(wide)
        for source, rows, columns, causal in pieces[1:]:
            k, v = (x[:, :, columns] for x in ranks[source][1:3])
            merge(o[:, :, rows], lse[:, :, rows], *attend_kernel.attend(q[:, :, rows], k, v, causal))
        o = o.to(dtype)
        outputs.append(o)
        for source, rows, columns, causal in pieces:
            k, v = (x[:, :, columns] for x in ranks[source][1:3])
            mine = [x[:, :, rows] for x in (do, q, o, lse)]
            dq, dk, dv = attend_kernel.gradient(mine[0], mine[1], k, v, mine[2], mine[3], causal)
            sums[rank][0][:, :, rows] += dq
            sums[source][1][:, :, columns] += dk
            sums[source][2][:, :, columns] += dv
    order = torch.tensor([p for rank in range(2) for p in case.positions(rank, seq_len)]).argsort().to(device)
    parts = zip(outputs, *zip(*sums, strict=True), strict=True)
    return Run(*(torch.cat(part, dim=2).transpose(1, 2)[:, order].cpu() for part in zip(*parts, strict=True)))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", [FLASH_CPU, ROWS], ids=["flash on cpu", "dense"])
def test_a_kernels_blocks_put_together_are_dense_attention(kernel: Any, kv_heads: int):
    found = blocks_like_a_rings(kernel, torch.float64, "cpu", SEQ_LEN, kv_heads)
    assert max(errors(found, one_process(Case("zigzag", 2, 1, kv_heads=kv_heads))).values()) < 1e-13


def test_dense_blocks_of_16_bits_are_computed_in_32():
    exact = one_process(GROUPED[0])
    found = errors(blocks_like_a_rings(ROWS, torch.bfloat16, "cpu", SEQ_LEN, 2), exact)
    single = errors(forward_backward(causal_attention, *(x.bfloat16() for x in inputs(GROUPED[0]))), exact)
    assert all(found[name] < 1.5 * single[name] for name in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_blocks_on_a_gpu_put_together_are_dense_attention_in_float64(dtype: torch.dtype, kv_heads: int):
    case = Case("zigzag", 2, 1, kv_heads=kv_heads)
    seq_len = 1040  # more than one tile of the kernel, and halves that no tile divides
    kernel = kernel_for(torch.empty(1, 4, 8, WIDTH, dtype=dtype, device="cuda"))
    assert kernel is (FLASH_CUDA if dtype.itemsize == 2 else ROWS)
    exact = forward_backward(dense, *inputs(case, seq_len))
    found = errors(blocks_like_a_rings(kernel, dtype, "cuda", seq_len, kv_heads), exact)
    if dtype.itemsize > 2:
        bound = {torch.float64: 1e-12, torch.float32: 1e-4}[dtype]  # sums of 1040 x 8 products
        assert max(found.values()) < bound
        return
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        given = (x.to("cuda", dtype) for x in inputs(case, seq_len))
        single = errors(Run(*(x.cpu() for x in forward_backward(expanded_causal, *given))), exact)
    assert all(found[name] < 1.5 * single[name] for name in found)


def expanded_causal(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    group = q_BTHC.shape[2] // k_BTKC.shape[2]
    q, k, v = (
        x.transpose(1, 2) for x in (q_BTHC, k_BTKC.repeat_interleave(group, 2), v_BTKC.repeat_interleave(group, 2))
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
