"""Proves that attention over a context group is attention: outputs and gradients, traffic, memory, mutations.

The reference is dense attention in plain PyTorch, over the whole sequence on one process and in float64. Each rank
takes its tokens of the same inputs (permute), attends, and what the ranks give is put back in order (un-permute).
Runs anywhere, on gloo; the kernel for GPUs where there is one.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardloom.model.attention import causal_attention
from shardloom.parallel import context, ring
from shardloom.parallel.blocks import DENSE, FLASH_CPU, FLASH_CUDA, kernel_for, merge
from shardloom.parallel.context import ContextAttention
from shardloom.split.sequence import spans
from tests.distributed import run_ranks
from tests.mutation import Mutation, mutated


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


RING = "shardloom.parallel.ring"
BACKWARD = (f"{RING}:RingAttention", "backward")
COMING_HOME = "    sum_2BTKC = sums.arrive()\n    _add(sum_2BTKC, ALL, own_block)"


def bug(*mutation: str, case: Case = Case("zigzag", 4, 1)) -> Job:  # noqa: B008  (a tuple)
    return Job(case, bugs=(mutation,))  # type: ignore[arg-type]


BUGS = {
    "a block's own log-sum-exp in backward": bug(
        *BACKWARD,
        "gradient(do, q, k_BKTC, v_BKTC, o, lse, causal)",
        "gradient(do, q, k_BKTC, v_BKTC, *kernel_for(q).attend(q, k_BKTC, v_BKTC, causal), causal)",
    ),
    "the gradients' last hop dropped": bug(
        *BACKWARD, COMING_HOME, COMING_HOME.replace("sum_2BTKC = sums.arrive()", "sums.arrive()")
    ),
    "gradients come home to the next rank": bug(
        *BACKWARD, COMING_HOME, "    sums.arrive()\n    sums.pass_on()\n" + COMING_HOME
    ),
    "the own block's gradient forgotten": bug(*BACKWARD, "_add(sum_2BTKC, ALL, own_block)", "pass"),
    "gradients of the early keys added to the late": bug(
        RING, "_add", "sum_BTKC[:, columns] +=", "sum_BTKC[:, -part_BKTC.shape[2] :] +="
    ),
    "the late queries' gradient added to the early": bug(
        *BACKWARD, "dq_BHTC[:, :, rows] += dq_block", "dq_BHTC[:, :, : dq_block.shape[2]] += dq_block"
    ),
    "gradients for other ranks sent in another order": bug(
        "shardloom.parallel.context",
        "_sum_at_home",
        "chunks[2 * n - 3 - i]",
        "chunks[n - 1 + i]",
        case=Case("allgather", 4, 1),
    ),
    "gradients of copied kv heads not summed": bug(
        "shardloom.parallel.ulysses", "_to_tokens", ".sum(1)", "[:, 0]", case=Case("ulysses", 1, 4)
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


# What is sent


class Sent(NamedTuple):
    """A message or a call: what it is, and the bytes that leave this rank."""

    what: str
    n_bytes: int


def sent_in_cases(cases: list[Case], dtype: torch.dtype) -> list[tuple[list[Sent], list[Sent]]]:
    return [sent_by_rank(case, dtype) for case in cases]


def sent_by_rank(case: Case, dtype: torch.dtype) -> tuple[list[Sent], list[Sent]]:
    """What forward and backward send, seen at the functions of torch.distributed that they call."""
    log: list[Sent] = []
    attend = attention(case)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if name == "batch_isend_irecv":
                sends = [op for op in args[0] if op.op is dist.isend]
                log.extend(Sent("message", op.tensor.nbytes) for op in sends)
                assert len(args[0]) == 2 * len(sends)
            else:
                n = named["group"].size()
                into, given, *splits = args
                if name == "all_gather":
                    assert into.nbytes == n * given.nbytes
                    log.append(Sent(name, (n - 1) * given.nbytes))
                else:
                    kept = given.nbytes // n
                    if splits:
                        counts = splits[1]
                        assert counts[named["group"].rank()] == 0
                        kept = 0
                    log.append(Sent(name, given.nbytes - kept))
            return function(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched("batch_isend_irecv", dist.batch_isend_irecv))
        patch.setattr(dist, "all_to_all_single", watched("all_to_all", dist.all_to_all_single))
        patch.setattr(context, "all_gather_single", watched("all_gather", context.all_gather_single))
        q, k, v, do = (x[:, case.positions(dist.get_rank(), SEQ_LEN)].to(dtype) for x in inputs(case))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o = attend(q, k, v)
        forward = list(log)
        log.clear()
        o.backward(do)
    return forward, log


def table(case: Case, dtype: torch.dtype) -> tuple[list[Sent], list[Sent]]:
    """The table in context.py."""
    bytes_each, bytes_of_sums = dtype.itemsize, max(dtype.itemsize, 4)
    n, heads, kv_heads = case.ranks, case.heads, case.kv_heads
    rows = BATCH * SEQ_LEN // n * WIDTH  # B T C
    if case.method == "allgather":
        part = (n - 1) * 2 * rows * kv_heads * bytes_each
        return [Sent("all_gather", part)], [Sent("all_gather", part), Sent("all_to_all", part)]
    whole_heads = max(kv_heads, case.ulysses)
    keys = Sent("message", 2 * rows * whole_heads * bytes_each)
    sums = Sent("message", 2 * rows * whole_heads * bytes_of_sums)
    hops = case.ring - 1
    there = back = []
    if case.ulysses > 1:
        rest = (case.ulysses - 1) * rows * bytes_each // case.ulysses
        there = [Sent("all_to_all", rest * (heads + 2 * whole_heads))]
        back = [Sent("all_to_all", rest * heads)]
    return there + [keys] * hops + back, back + [keys] * hops + [sums] * hops + there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_and_bytes_are_those_of_the_table(dtype: torch.dtype):
    cases = [*ONE_OF_EACH, Case("zigzag", 4, 1, kv_heads=1), Case("usp", 2, 2, kv_heads=1)]
    for rank in run_ranks(sent_in_cases, 4, cases, dtype):
        for case, (sent_forward, sent_backward) in zip(cases, rank, strict=True):
            forward, backward = table(case, dtype)
            assert sent_forward == forward, case
            assert sorted(sent_backward) == sorted(backward), case


def test_grouped_keys_and_values_travel_unexpanded():
    grouped, expanded = Case("zigzag", 4, 1, heads=8, kv_heads=2), Case("zigzag", 4, 1, heads=8, kv_heads=8)
    (few, _), (many, _) = run_ranks(sent_in_cases, 4, [grouped, expanded], torch.float32)[0]
    assert 4 * sum(sent.n_bytes for sent in few) == sum(sent.n_bytes for sent in many)


# What is held


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made within that were alive at once; storages counted once, by when they end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._known:
                    self.now += storage.nbytes()
                    self._known[key] = weakref.finalize(storage, self._end, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _end(self, key: int, n_bytes: int) -> None:
        self.now -= n_bytes
        self._known.pop(key, None)


def live_bytes_in_cases(cases: list[Case], local: int) -> list[tuple[int, int, int]]:
    return [live_bytes(case, local) for case in cases]


def live_bytes(case: Case, local: int) -> tuple[int, int, int]:
    """Peak of a forward pass, what is held after it, and the peak of the backward pass, beyond the inputs."""
    attend = attention(case)
    q, k, v, do = (x[:, :local].float().contiguous() for x in inputs(case, local))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with LiveBytes() as forward:
        o = attend(q, k, v)
        held = forward.now
    with LiveBytes() as backward:
        o.backward(do)
    return forward.peak, held, held + backward.peak


def test_memory_does_not_grow_with_the_ring_at_a_fixed_local_length():
    local = 64
    block = BATCH * local * 2 * 2 * WIDTH * 4  # 2BTKC, in fp32
    own = 2 * BATCH * local * 4 * WIDTH * 4 // 2 + block + BATCH * local * 4 * 4  # o and lse, k and v; q is an input
    for i, method in enumerate(("ring", "zigzag")):
        most = {}
        for n in (2, 3, 8):
            ranks = [cases[i] for cases in on_rings_of(n, local)]
            assert {held for _, held, _ in ranks} == {own}
            most[n] = [max(rank[pass_] for rank in ranks) for pass_ in (0, 2)]
        assert most[3] == most[8], method
        # From three ranks on, a second buffer for what comes: of keys and values, and in backward of sums too.
        assert most[8][0] <= most[2][0] + block, method
        assert most[8][1] <= most[2][1] + 2 * block, method


@cache
def on_rings_of(n: int, local: int) -> list[list[tuple[int, int, int]]]:
    return run_ranks(live_bytes_in_cases, n, [Case("ring", n, 1), Case("zigzag", n, 1)], local)


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
@pytest.mark.parametrize("kernel", [FLASH_CPU, DENSE], ids=["flash on cpu", "dense"])
def test_a_kernels_blocks_put_together_are_dense_attention(kernel: Any, kv_heads: int):
    found = blocks_like_a_rings(kernel, torch.float64, "cpu", SEQ_LEN, kv_heads)
    assert max(errors(found, one_process(Case("zigzag", 2, 1, kv_heads=kv_heads))).values()) < 1e-13


def test_dense_blocks_of_16_bits_are_computed_in_32():
    exact = one_process(GROUPED[0])
    found = errors(blocks_like_a_rings(DENSE, torch.bfloat16, "cpu", SEQ_LEN, 2), exact)
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
    assert kernel is (FLASH_CUDA if dtype.itemsize == 2 else DENSE)
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
