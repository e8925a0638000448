"""Proves that tokens reach their experts on other ranks and come back, with any counts; what is sent for it; what a
rank holds; and that a step waits for numbers of the device in one place only, which can be told them instead.

Whole trainings are compared in tests/training/test_experts.py. Runs anywhere, on gloo.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.layout.layout import Layout
from shardwright.model.experts import Experts
from shardwright.model.moe import MoE, expert_layers
from shardwright.model.sections import MoESpec
from shardwright.parallel.expert import ExchangingMoE, ExpertExchange, ExpertPart, read_counts
from shardwright.parallel.norm import local_part
from shardwright.verification import Case
from shardwright.verification.rank import build_trainer, local_batch
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.training.worlds import OPTIMIZER, SPEC

D, F = 8, 12
MOE = MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=1, aux_loss=0.1, aux_scope="batch")
MODEL = replace(SPEC, n_heads=4, n_kv_heads=2, moe=MOE)
CASE = Case(MODEL, seq_len=8, global_batch=8, optimizer=OPTIMIZER, dtype="float32")
EP = Layout(dp_shard=2, zero=2, ep=2)
SP = Layout(tp=2, sequence_parallel=True, ep=2)

# Rows that each rank has for each expert; 4 experts on 2 ranks, 8 on 4.
COUNTS = {
    "even": [[3, 3, 3, 3], [3, 3, 3, 3]],
    "uneven": [[5, 0, 1, 7], [2, 4, 9, 3]],
    "an expert without rows": [[4, 0, 2, 1], [3, 0, 1, 6]],
    "a rank without rows for the other": [[4, 2, 0, 0], [3, 1, 2, 5]],
    "a rank whose experts get none": [[4, 2, 0, 0], [3, 1, 0, 0]],
    "one expert for all": [[0, 0, 9, 0], [0, 0, 9, 0]],
    "a rank that has no row": [[0, 0, 0, 0], [1, 2, 3, 4]],
    "four ranks": [
        [1, 0, 4, 2, 0, 0, 3, 1], [0, 0, 0, 0, 5, 2, 0, 0], [2, 2, 2, 2, 2, 2, 2, 2], [0, 9, 0, 0, 0, 0, 0, 1],
    ],
}  # fmt: skip
DROPPED = 2
"""Rows behind those of all experts, which nobody takes."""


class Result(NamedTuple):
    outputs_RD: Tensor
    input_gradient_RD: Tensor
    gradients: list[Tensor]
    """Of the experts' matrices, in the order of `parameters()`."""


def whole_experts(n_experts: int) -> Experts:
    experts = Experts(n_experts, D, F, "swiglu").double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    return experts


def rows_of(rank: int, counts_E: list[int]) -> tuple[Tensor, Tensor]:
    """A rank's rows, and the gradient of what comes of them."""
    generator = torch.Generator().manual_seed(10 + rank)
    rows_RD, gradient_RD = torch.randn(2, sum(counts_E) + DROPPED, D, dtype=torch.float64, generator=generator)
    gradient_RD[sum(counts_E) :] = 0
    return rows_RD.requires_grad_(), gradient_RD


def through(experts: torch.nn.Module, run: Any, rank: int, counts: list[list[int]]) -> Result:
    rows_RD, gradient_RD = rows_of(rank, counts[rank])
    n = sum(counts[rank])
    outputs_RD = run(experts, rows_RD, torch.tensor(counts[rank]))()
    outputs_RD.backward(gradient_RD)
    assert rows_RD.grad is not None
    gradients = [p.grad for p in experts.parameters() if p.grad is not None]
    return Result(outputs_RD[:n].detach(), rows_RD.grad[:n], gradients)


def on_this_rank(experts: torch.nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Callable[[], Tensor]:
    """As an exchange, with all experts here."""
    return lambda: experts(rows_RD, counts_E)


def part_of(experts: Experts) -> ExpertPart:
    """This rank's of all ranks."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("ep",))
    part = ExpertPart(experts, mesh)
    with torch.no_grad():
        for mine, whole in zip(part.parameters(), experts.parameters(), strict=True):
            local_part(mine).copy_(whole.chunk(mesh.size())[mesh.get_local_rank()])
    return part


def exchanged(counts: list[list[int]]) -> Result:
    """On one rank, with the other experts elsewhere."""
    part = part_of(whole_experts(len(counts[0])))
    result = through(part, ExpertExchange(dist.group.WORLD), dist.get_rank(), counts)
    return result._replace(gradients=[local_part(gradient) for gradient in result.gradients])


@pytest.mark.parametrize("name", COUNTS)
def test_experts_on_other_ranks_give_what_they_give_here(name: str):
    counts = COUNTS[name]
    n_ranks = len(counts)
    found = run_ranks(exchanged, n_ranks, counts)
    totals = [torch.zeros(p.shape, dtype=torch.float64) for p in whole_experts(len(counts[0])).parameters()]
    for rank in range(n_ranks):
        here = through(whole_experts(len(counts[0])), on_this_rank, rank, counts)
        torch.testing.assert_close(found[rank].outputs_RD, here.outputs_RD, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found[rank].input_gradient_RD, here.input_gradient_RD, rtol=1e-13, atol=1e-13)
        totals = [total + gradient for total, gradient in zip(totals, here.gradients, strict=True)]
    for number, total in enumerate(totals):
        gathered = torch.cat([result.gradients[number] for result in found])
        torch.testing.assert_close(gathered, total, rtol=1e-12, atol=1e-12)


def sent(counts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Bytes that leave this rank for others in each all-to-all, of the forward pass and of the backward pass."""
    log: list[int] = []
    plain, rank = dist.all_to_all_single, dist.get_rank()

    def watched(into: Tensor, given: Tensor, *splits: list[int], **named: Any) -> Any:
        to = splits[1] if splits else [len(given) // dist.get_world_size()] * dist.get_world_size()
        log.append((sum(to) - to[rank]) * given[:1].numel() * given.element_size())
        return plain(into, given, *splits, **named)

    part = part_of(whole_experts(len(counts[0])))
    rows_RD, gradient_RD = rows_of(rank, counts[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", watched)
        outputs_RD = ExpertExchange(dist.group.WORLD)(part, rows_RD, torch.tensor(counts[rank]))()
        forward = list(log)
        log.clear()
        outputs_RD.backward(gradient_RD)
    return forward, log


def test_bytes_sent_are_those_of_the_table():
    counts = COUNTS["even"]
    n_ep, n_experts, rows = len(counts), len(counts[0]), sum(counts[0])
    integers = (n_ep - 1) * n_experts // n_ep * 8
    there = back = rows * (n_ep - 1) // n_ep * D * 8
    for forward, backward in run_ranks(sent, n_ep, counts):
        assert forward == [integers, there, back]
        assert backward == [there, back], "the same all-to-alls but the first"


def test_no_more_is_sent_than_rows_for_experts_elsewhere():
    (to_other, returned), (other_to, other_returned) = (
        (forward[1:], backward) for forward, backward in run_ranks(sent, 2, COUNTS["uneven"])
    )
    first, second = COUNTS["uneven"]
    row = D * 8
    assert to_other == [sum(first[2:]) * row, sum(second[:2]) * row]
    assert other_to == [sum(second[:2]) * row, sum(first[2:]) * row]
    assert returned == to_other
    assert other_returned == other_to


class Watched(NamedTuple):
    rows: list[int]
    """That left this rank, or stayed for its own experts, each time that a layer ran."""
    waits: list[str]
    """Ways in which a number was read off a tensor elsewhere."""


@contextmanager
def watching() -> Iterator[Watched]:
    """Every way in which Python reads the value of a tensor."""
    seen = Watched([], [])
    inside = False

    def read(rows_2n: Tensor, n_rows: int) -> list[list[int]]:
        nonlocal inside
        inside = True
        rows = read_counts(rows_2n, n_rows)
        inside = False
        seen.rows.append(sum(rows[0]))
        return rows

    def watched(name: str) -> Any:
        plain = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any) -> Any:
            if not inside:
                seen.waits.append(name)
            return plain(tensor, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "numpy"):
            patch.setattr(Tensor, name, watched(name))
        patch.setattr(ExpertExchange, "read", property(lambda self: read, lambda self, given: None), raising=False)
        yield seen


def watched_step(layout: Layout) -> Watched:
    trainer = build_trainer(CASE, layout, "adamw")
    batch = local_batch(CASE, layout, dist.get_rank(), 0)
    trainer.step(batch, 0, 1e-3)  # what FSDP and the optimizer set up once
    with watching() as seen:
        trainer.step(batch, 1, 1e-3)
    return seen


@pytest.mark.parametrize("layout", rest_prove([EP, SP, replace(SP, dp_shard=2, zero=3, ep=4)], EP), ids=str)
def test_every_token_leaves_once_for_each_of_its_experts_and_only_counts_are_waited_for(layout: Layout):
    found = run_ranks(watched_step, layout.world_size, layout)
    tokens = CASE.global_batch * CASE.seq_len
    assert sum(sum(seen.rows) for seen in found) == tokens * MOE.top_k * MODEL.n_layers, "with tp too: not tp times"
    assert [seen.waits for seen in found] == [[]] * layout.world_size


def test_a_number_read_elsewhere_would_be_seen():
    with watching() as seen:
        torch.ones(2)[torch.ones(1, dtype=torch.int64)].sum().item()
        bool(torch.ones(1).tolist()[0] > torch.ones(()))
    assert sorted(seen.waits) == ["__bool__", "item", "tolist"]


class Elsewhere(ExpertExchange):
    """Notes when rows leave and when they are waited for; the experts are here all the same."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, experts: torch.nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Callable[[], Tensor]:
        self.calls.append("sent")

        def finish() -> Tensor:
            self.calls.append("waited for")
            return on_this_rank(experts, rows_RD, counts_E)()

        return finish


def test_rows_travel_while_the_shared_experts_compute():
    whole, calls = MoE(MODEL).double(), list[str]()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.3)
    x_BTD = torch.randn(2, 5, MODEL.d_model, dtype=torch.float64)
    expected_BTD = whole(x_BTD)
    assert whole.shared is not None
    whole.shared.register_forward_hook(lambda *_: calls.append("shared"))
    assert torch.equal(ExchangingMoE(whole, whole.experts, Elsewhere(calls))(x_BTD), expected_BTD)
    assert calls == ["sent", "shared", "waited for"]


def test_with_counts_that_are_told_a_layer_runs_on_fake_tensors():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        told: list[Tensor] = []

        def tell(rows_2n: Tensor, n_rows: int) -> list[list[int]]:
            assert n_rows == 2 * 8 * MOE.top_k
            told.append(rows_2n)
            return [[20, 12], [9, 17]]

        with FakeTensorMode():
            part = Experts(MOE.n_experts // 2, MODEL.d_model, MOE.d_ffn, "swiglu")
            layer = ExchangingMoE(MoE(MODEL), part, ExpertExchange(dist.group.WORLD, tell))
            x_BTD = torch.randn(2, 8, MODEL.d_model, requires_grad=True)
            y_BTD = layer(x_BTD)
            y_BTD.sum().backward()
        assert y_BTD.shape == x_BTD.shape
        assert x_BTD.grad is not None
        assert part.up.grad is not None
        assert [rows_2n.shape for rows_2n in told] == [(2, 2)]
    finally:
        dist.destroy_process_group()


def held(layout: Layout) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
    """For each tensor of the last layer's network, the whole shape, this rank's, and how it is cut."""
    model = build_trainer(CASE, layout, "adamw").model
    assert set(expert_layers(model.parts[0])) == {"0", "1"}
    return {
        name.removeprefix("layers.1.ffn."): (
            tuple(p.shape),
            tuple(p.to_local().shape) if isinstance(p, DTensor) else tuple(p.shape),
            " ".join(p.device_mesh.mesh_dim_names or ()) if isinstance(p, DTensor) else "",
        )
        for name, p in model.named_parameters.items()
        if name.startswith("layers.1.ffn.")
    }


@pytest.mark.parametrize(
    ("layout", "local", "axes"),
    [
        (EP, (2, 16, 24), "expert_shards ep"),
        (Layout(cp=2, ep=2), (2, 16, 24), "expert_shards ep"),
        (Layout(dp_shard=4, zero=3, ep=2), (1, 16, 24), "expert_shards ep"),
        (Layout(dp_shard=4, zero=3, ep=4), (1, 16, 24), "expert_shards ep"),
        (Layout(dp_replicate=2, dp_shard=2, zero=1, ep=2), (2, 16, 24), "expert_replicas expert_shards ep"),
        (SP, (2, 16, 24), "expert_shards ep"),
        (Layout(tp=2, sequence_parallel=True, ep=1), (4, 16, 24), "expert_replicas expert_shards"),
    ],
    ids=str,
)
def test_a_rank_holds_its_experts_and_of_them_its_share(layout: Layout, local: tuple[int, ...], axes: str):
    for tensors in run_ranks(held, layout.world_size, layout):
        assert tensors["experts.up"] == ((4, 16, 24), local, axes)
        assert tensors["experts.down"] == ((4, 24, 16), (local[0], 24, 16), axes)
        assert tensors["router.bias"] == ((4,), (4,), ""), "every rank has to pick as the others do"


def test_few_experts_on_many_ranks_are_cut_by_width():
    # 4 experts over ep 2 leave 2, which 4 ranks cannot share out: 16 features can be.
    layout = Layout(dp_shard=4, tp=2, sequence_parallel=True, zero=2, ep=2)
    for tensors in run_ranks(held, 8, layout):
        assert tensors["experts.up"][1] == (2, 4, 24)
        assert tensors["experts.down"][1] == (2, 6, 16)
