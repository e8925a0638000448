"""Expert parallelism: the experts of a layer are dealt out over `layout.ep` ranks, and tokens travel to them.

    counts ---- all-to-all: how many rows come from whom
    rows, sorted by expert ---- all-to-all ---- sorted by own expert ---- own experts ---- all-to-all back ---- rows
          \\__ meanwhile: the shared experts

Ranks of ep are neighbours in dp_shard x cp x tp: each has tokens of its own, which it sends once. The backward pass
makes the same all-to-alls but the first. Gradients are sums over all tokens that an expert saw, from whatever rank, as
on one device. Sources: GShard, arXiv 2006.16668, section 3; dropless: MegaBlocks, arXiv 2211.15841.

| all-to-all       | rows a rank sends, on average       | of                   |
| ---------------- | ----------------------------------- | -------------------- |
| counts           | E / ep integers to each             |                      |
| dispatch         | N K (ep - 1) / ep                   | D elements           |
| combine          | as many back                        | D elements           |

Shapes: N tokens of this rank, K experts of a token, R = N K rows, S rows that arrive here, E experts, e those of a
rank, n ranks of ep, D model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.func import functional_call

from shardwright.model.experts import Experts
from shardwright.model.moe import MoE
from shardwright.parallel.norm import as_part, local_part

ReadCounts = Callable[[Tensor], list[list[int]]]
"""Numbers of rows, (2, n), that are sent to each rank and come from each, as integers of the host."""


def read_counts(rows_2n: Tensor) -> list[list[int]]:
    """The one place of a step that waits for the device: buffers cannot be made without their sizes."""
    rows: list[list[int]] = rows_2n.tolist()
    return rows


def split_experts(model: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, read: ReadCounts = read_counts) -> None:
    """Keep this rank's experts of a model, or of a stage of one, on the meta device; tokens travel to the others."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, MoE):
            assert isinstance(layer.experts, Experts)
            part = ExpertPart(layer.experts, mesh["ep"])
            model.set_submodule(name, ExchangingMoE(layer, part, Exchange(group, read)))


class ExchangingMoE(MoE):
    """A mixture of which this rank has some of the experts; rows travel to them while the shared experts compute."""

    def __init__(self, whole: MoE, experts: nn.Module, exchange: "Exchange") -> None:
        nn.Module.__init__(self)
        self.router, self.experts, self.shared = whole.router, experts, whole.shared
        self.tally, self.last_load = whole.tally, whole.last_load
        self.exchange = exchange

    def run(self, rows_RD: Tensor, counts_E: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        finish = self.exchange(self.experts, rows_RD, counts_E)
        shared_BTD = None if self.shared is None else self.shared(x_BTD)
        return finish(), shared_BTD


class ExpertPart(nn.Module):
    """Those of a layer's experts that this rank has; names are those of all, and parameters DTensors over ep."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self._all = [experts]  # in a list: it lends its forward pass, and its parameters stay on the meta device
        for name, whole in experts.named_parameters():
            part = torch.empty(whole.shape[0] // mesh.size(), *whole.shape[1:], dtype=whole.dtype, device=whole.device)
            self.register_parameter(name, nn.Parameter(as_part(part, whole, mesh, [Shard(0)])))

    def forward(self, rows_SD: Tensor, counts_e: Tensor) -> Tensor:
        """As `Experts.forward`, with rows for each of this rank's experts."""
        here: dict[str, Any] = {name: local_part(parameter) for name, parameter in self.named_parameters()}
        out_SD: Tensor = functional_call(self._all[0], here, (rows_SD, counts_e))
        return out_SD


class Exchange:
    """Rows to where their experts are, and back: (experts, rows_RD sorted by expert, counts_E) -> a function that
    waits, and gives their outputs in the same order, (R, D)."""

    def __init__(self, group: dist.ProcessGroup, read: ReadCounts = read_counts) -> None:
        self.group, self.read = group, read
        self.sent_bytes = 0
        """Of rows to other ranks, there and back, in training; both ways of a backward pass are counted in it."""

    @torch.compiler.disable  # sizes change with every call
    def __call__(self, experts: nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Callable[[], Tensor]:
        counts_ne = counts_E.view(self.group.size(), -1)
        arriving_ne = torch.empty_like(counts_ne)
        dist.all_to_all_single(arriving_ne, counts_ne.contiguous(), group=self.group)
        to, from_ = self.read(torch.stack([counts_ne.sum(1), arriving_ne.sum(1)]))
        leaving_RD = rows_RD[: sum(to)]  # pairs that were dropped are at the end, and stay
        if experts.training:
            self.count(rows_RD, to)
            self.count(rows_RD, from_)
        under_way = _start(leaving_RD.detach(), to, from_, self.group)

        def finish() -> Tensor:
            rows_SD = _Arrived.apply(leaving_RD, under_way, to, from_, self)
            # Rows come by sender, and of each by expert.
            expert_S = _expert_of_each(arriving_ne, sum(from_))
            order_S = expert_S.argsort(stable=True)
            out_SD = experts(rows_SD.index_select(0, order_S), arriving_ne.sum(0))
            back_SD = out_SD.index_select(0, order_S.argsort())
            back_RD = _Arrived.apply(back_SD, _start(back_SD.detach(), from_, to, self.group), from_, to, self)
            return nn.functional.pad(back_RD, (0, 0, 0, rows_RD.shape[0] - back_RD.shape[0]))

        return torch.compiler.disable(finish)

    def count(self, like_RD: Tensor, to: list[int]) -> None:
        """Add the bytes of `to[r]` rows for each other rank r; the numbers are on the host already."""
        self.sent_bytes += (sum(to) - to[self.group.rank()]) * like_RD.shape[1] * like_RD.element_size()


def take_sent_bytes(model: nn.Module) -> int:
    """What this rank has sent to experts elsewhere, and back from its own, since the last call; evaluation is not
    counted."""
    sent = 0
    for layer in model.modules():
        if isinstance(layer, ExchangingMoE):
            sent, layer.exchange.sent_bytes = sent + layer.exchange.sent_bytes, 0
    return sent


def _expert_of_each(arriving_ne: Tensor, n_rows: int) -> Tensor:
    """For every row that has arrived, the number among this rank's experts of the one it is for; (S,)."""
    n, e = arriving_ne.shape
    numbers = torch.arange(e, device=arriving_ne.device).repeat(n)
    return numbers.repeat_interleave(arriving_ne.flatten(), output_size=n_rows)


def _start(rows: Tensor, to: list[int], from_: list[int], group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """The line that sends the bytes: `to[r]` rows to rank r, one after another, and `from_[r]` from it."""
    arriving = rows.new_empty(sum(from_), rows.shape[1])
    work = dist.all_to_all_single(arriving, rows.contiguous(), from_, to, group=group, async_op=True)
    return work, arriving


class _Arrived(torch.autograd.Function):
    """Rows that `_start` has sent on their way, once they are here; their gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        under_way: tuple[Any, Tensor],
        to: list[int],
        from_: list[int],
        exchange: Exchange,
    ) -> Tensor:
        ctx.to, ctx.from_, ctx.exchange = to, from_, exchange
        work, arrived = under_way
        work.wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.count(grads[0], ctx.from_)
        work, gradient = _start(grads[0], ctx.from_, ctx.to, ctx.exchange.group)
        work.wait()
        return gradient, None, None, None, None
