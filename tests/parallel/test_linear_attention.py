"""Proves that linear attention over a context group is linear attention of one process; `tests/cost/test_traffic.py`
proves what it sends."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model.documents import Documents
from shardwright.model.linear_attention import GatedDeltaNet
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.presets import PRESETS
from shardwright.parallel.linear_attention import ContextDeltaNet
from shardwright.split.sequence import SequencePieces
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.parallel.attention import Case, groups

SIZES = LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=6, v_dim=5, conv_width=4, full_interval=2)
SPEC = replace(PRESETS["debug"], n_layers=2, linear_attention=SIZES, max_seq_len=256)
SEQ_LEN = 24
ON_FOUR = [Case("ring", 4, 1), Case("zigzag", 4, 1), Case("allgather", 4, 1), Case("ulysses", 1, 4), Case("usp", 2, 2)]
DOCUMENTS = [None, ((7, 17), (24,)), ((6, 6, 12), (1, 2, 3, 1, 17))]
"""One document; boundaries within pieces; boundaries between pieces of 6 and of 3 tokens, and short documents."""
Results = list[Tensor]


class NetCase(NamedTuple):
    """A partition of the tokens, documents, and the tokens of the convolution."""

    context: Case
    documents: tuple[tuple[int, ...], ...] | None = None
    conv_width: int = 4
    compiled: bool = False
    """Whether the code around the scan is traced by the compiler."""


CASES = [NetCase(case, documents) for case in ON_FOUR for documents in DOCUMENTS]
CASES += [NetCase(ON_FOUR[1], DOCUMENTS[1], width) for width in (1, 2, 6)]
CASES += [NetCase(ON_FOUR[1], DOCUMENTS[1], compiled=True)]
QUICK = [NetCase(ON_FOUR[1], DOCUMENTS[2]), NetCase(ON_FOUR[4], None, conv_width=6)]


def net_of(case: NetCase) -> GatedDeltaNet:
    torch.manual_seed(3)
    net = GatedDeltaNet(replace(SPEC, linear_attention=replace(SIZES, conv_width=case.conv_width))).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return net


def inputs(net: GatedDeltaNet) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    shape = 2, SEQ_LEN, net.qkvz.in_features
    x_BSD, dy_BSD = (torch.randn(shape, dtype=torch.float64, generator=draw) for _ in range(2))
    return x_BSD, dy_BSD


def forward_backward(net: GatedDeltaNet, case: NetCase, x_BTD: Tensor, dy_BTD: Tensor) -> Results:
    """Output, and gradients of the input and of all weights."""
    documents = None if case.documents is None else Documents.from_lengths(case.documents, SEQ_LEN)
    x_BTD = x_BTD.clone().requires_grad_()
    y_BTD = net(x_BTD, None, documents)
    return [y_BTD.detach(), *torch.autograd.grad(y_BTD, [x_BTD, *net.parameters()], dy_BTD)]


def context_net(case: NetCase) -> GatedDeltaNet:
    net, context = net_of(case), case.context
    degree = {"ulysses_degree": context.ulysses} if context.method == "usp" else {}
    pieces = SequencePieces.from_layout(Layout(cp=context.ranks, cp_method=context.method, **degree))
    net.mix = ContextDeltaNet(net, pieces, groups(context)[::-1])  # type: ignore[method-assign]
    if case.compiled:
        net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
    return net


def on_rank(cases: list[NetCase]) -> list[Results]:
    results = []
    for case in cases:
        net, at = context_net(case), case.context.positions(dist.get_rank(), SEQ_LEN)
        results.append(forward_backward(net, case, *(x[:, at] for x in inputs(net))))
    return results


def worst_errors(cases: list[NetCase]) -> list[float]:
    """The largest error of each case, of outputs and raw gradients of all ranks, relative to one process."""
    of_ranks = run_ranks(on_rank, cases[0].context.ranks, cases)
    errors = []
    for number, case in enumerate(cases):
        net = net_of(case)
        expected = forward_backward(net, case, *inputs(net))
        order = [p for rank in range(case.context.ranks) for p in case.context.positions(rank, SEQ_LEN)]
        found = [torch.cat(parts, 1) for parts in zip(*(rank[number][:2] for rank in of_ranks), strict=True)]
        found += [sum(parts) for parts in zip(*(rank[number][2:] for rank in of_ranks), strict=True)]
        wanted = [x[:, order] for x in expected[:2]] + expected[2:]
        pairs = zip(found, wanted, strict=True)
        errors.append(max(float((x - y).norm() / y.norm()) for x, y in pairs))
    return errors


@pytest.mark.parametrize("cases", rest_prove([QUICK, CASES], QUICK), ids=["some", "all"])
def test_outputs_and_raw_gradients_are_those_of_one_process(cases: list[NetCase]):
    for case, error in zip(cases, worst_errors(cases), strict=True):
        assert error < 1e-12, (case, error)


@pytest.mark.parametrize("ulysses", [2, 3])
def test_pieces_of_usp_are_a_partition_of_the_sequence_into_equal_parts(ulysses: int):
    pieces = SequencePieces.from_layout(Layout(cp=2 * ulysses, cp_method="usp", ulysses_degree=ulysses))
    assert sorted(piece for of_rank in pieces.of_ranks for piece in of_rank) == [*range(pieces.n_pieces)]
    assert len({len(of_rank) for of_rank in pieces.of_ranks}) == 1
