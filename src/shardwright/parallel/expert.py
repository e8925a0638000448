"""Expert parallelism: each of `layout.ep` ranks holds a part of a layer's experts, and all-to-alls send tokens to them.

    counts ---- all-to-all: the number of rows from each rank
    rows, sorted by expert ---- all-to-all ---- sorted by local expert ---- local experts ---- all-to-all back ---- rows
          \\__ overlapped: the shared experts

A row is one token on its way to one expert. Ranks of ep are consecutive in dp_shard x cp x tp, and each holds different
tokens. The backward pass repeats all all-to-alls except the counts. The gradient of an expert is the sum over its
tokens of all ranks, as on one device. Sources: GShard, arXiv 2006.16668, section 3; dropless: MegaBlocks,
arXiv 2211.15841.

| all-to-all       | rows a rank sends, on average       | elements of a row    |
| ---------------- | ----------------------------------- | -------------------- |
| counts           | E / ep integers to each rank        |                      |
| dispatch         | N K (ep - 1) / ep                   | D                    |
| combine          | N K (ep - 1) / ep                   | D                    |

With `layout.compress_dispatch` the forward dispatch sends D bytes of a row and a scale for each block.

Shapes: N tokens of this rank, K experts of a token, R = N K rows, S rows received by this rank, E experts, e experts of
a rank, n ranks of ep, D model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.func import functional_call

from shardwright.model.experts import Experts
from shardwright.model.moe import MoE
from shardwright.parallel.compression import Codec, decode_rows, encode_rows
from shardwright.parallel.norm import as_part, local_part

ReadCounts = Callable[[Tensor, int], list[list[int]]]
"""Reads the numbers of rows sent to each rank and received from each, (2, n), to the host; the second argument is the
number of rows to send."""


def read_counts(rows_2n: Tensor, n_rows: int) -> list[list[int]]:
    """Read the sizes of the receive buffers to the host: the only device-to-host synchronisation of a step."""
    rows: list[list[int]] = rows_2n.tolist()
    return rows


def split_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    read: ReadCounts = read_counts,
    codec: Codec | None = None,
) -> None:
    """Replace every mixture of a model, or of a pipeline stage, on the meta device by one that holds this rank's
    experts and sends tokens to other ranks' experts, encoded by `codec` if there is one."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, MoE):
            assert isinstance(layer.experts, Experts)
            part = ExpertPart(layer.experts, mesh["ep"])
            model.set_submodule(name, ExchangingMoE(layer, part, ExpertExchange(group, read, codec)))


class ExchangingMoE(MoE):
    """A mixture of experts sharded over ranks; the all-to-all of the rows overlaps with the shared experts."""

    def __init__(self, whole: MoE, experts: nn.Module, exchange: "ExpertExchange") -> None:
        nn.Module.__init__(self)
        self.router, self.experts = whole.router, experts
        self.shared, self.shared_gate = whole.shared, whole.shared_gate
        self.tally, self.last_load = whole.tally, whole.last_load
        self.exchange = exchange
        self._order: tuple[Tensor, Tensor] | None = None
        """The expert at each position, and the position of each expert; None: position e has expert e."""

    # The compiler of PyTorch 2.11 fails if the exchange interrupts a function that has made autograd functions. So the
    # parts of a mixture are compiled, and their caller is not.
    forward = torch.compiler.disable(MoE.forward, recursive=False)

    def use_order(self, order: Sequence[int] | None, device: torch.device) -> None:
        """Set the expert at each position of the matrices of all ranks; None: position e has expert e."""
        expert_E = None if order is None else torch.tensor(order, device=device)
        self._order = None if expert_E is None else (expert_E, expert_E.argsort())

    def positions(self, experts_NK: Tensor, given_E: Tensor) -> tuple[Tensor, Tensor]:
        if self._order is None:
            return experts_NK, given_E
        expert_E, position_E = self._order
        return position_E[experts_NK], given_E.index_select(0, expert_E)

    def run(self, rows_RD: Tensor, counts_E: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        finish = self.exchange(self.experts, rows_RD, counts_E)
        shared_BTD = self.run_shared(x_BTD)
        return finish(), shared_BTD


class ExpertPart(nn.Module):
    """This rank's part of a layer's experts; parameters are DTensors over ep, with the names they have in `Experts`."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self._all = [experts]  # in a list, so that its parameters, which stay on the meta device, are not registered
        for name, whole in experts.named_parameters():
            part = torch.empty(whole.shape[0] // mesh.size(), *whole.shape[1:], dtype=whole.dtype, device=whole.device)
            self.register_parameter(name, nn.Parameter(as_part(part, whole, mesh, [Shard(0)]), whole.requires_grad))

    def forward(self, rows_SD: Tensor, counts_e: Tensor) -> Tensor:
        """Compute `Experts.forward` with rows for each of this rank's experts."""
        local: dict[str, Any] = {name: local_part(parameter) for name, parameter in self.named_parameters()}
        out_SD: Tensor = functional_call(self._all[0], local, (rows_SD, counts_e))
        return out_SD


class ExpertExchange:
    """Sends rows to the ranks of their experts and back: (experts, rows_RD sorted by expert, counts_E) -> a function
    that waits for the outputs and returns them in the order of the rows, (R, D). With a codec all rows arrive rounded,
    also rows for this rank's experts; outputs and gradients are sent unchanged, and the gradient of a row is the
    gradient of the rounded row."""

    def __init__(self, group: dist.ProcessGroup, read: ReadCounts = read_counts, codec: Codec | None = None) -> None:
        self.group, self.read, self.codec = group, read, codec
        self.sent_bytes = 0
        """Bytes of rows sent to other ranks in training: dispatch and combine, forward and backward."""

    @torch.compiler.disable  # sizes change with every call
    def __call__(self, experts: nn.Module, rows_RD: Tensor, counts_E: Tensor) -> Callable[[], Tensor]:
        counts_ne = counts_E.view(self.group.size(), -1)
        arriving_ne = torch.empty_like(counts_ne)
        dist.all_to_all_single(arriving_ne, counts_ne.contiguous(), group=self.group)
        to, from_ = self.read(torch.stack([counts_ne.sum(1), arriving_ne.sum(1)]), len(rows_RD))
        leaving_RD = rows_RD[: sum(to)]  # rows of dropped pairs are at the end and are not sent
        sent = leaving_RD.detach() if self.codec is None else encode_rows(leaving_RD.detach(), self.codec)
        if experts.training:
            self.count(sent, to)
            self.count(rows_RD, from_)
        under_way = _start(sent, to, from_, self.group)

        def finish() -> Tensor:
            rows_SD = _AwaitAllToAll.apply(leaving_RD, under_way, to, from_, self, self.codec)
            # Received rows are sorted by sender, then by expert.
            expert_S = _expert_of_each(arriving_ne, sum(from_))
            order_S = expert_S.argsort(stable=True)
            out_SD = experts(rows_SD.index_select(0, order_S), arriving_ne.sum(0))
            back_SD = out_SD.index_select(0, order_S.argsort())
            back_RD = _AwaitAllToAll.apply(back_SD, _start(back_SD.detach(), from_, to, self.group), from_, to, self)
            return nn.functional.pad(back_RD, (0, 0, 0, rows_RD.shape[0] - back_RD.shape[0]))

        return torch.compiler.disable(finish)

    def count(self, like_RD: Tensor, to: list[int]) -> None:
        """Count the bytes of `to[r]` rows for each other rank r; these numbers are on the host already."""
        self.sent_bytes += (sum(to) - to[self.group.rank()]) * like_RD.shape[1] * like_RD.element_size()


def take_sent_bytes(model: nn.Module) -> int:
    """Return the bytes that this rank has sent since the last call: rows to experts of other ranks, and outputs of its
    own experts back. Evaluation is not counted."""
    sent = 0
    for layer in model.modules():
        if isinstance(layer, ExchangingMoE):
            sent, layer.exchange.sent_bytes = sent + layer.exchange.sent_bytes, 0
    return sent


def _expert_of_each(arriving_ne: Tensor, n_rows: int) -> Tensor:
    """Return for every received row the index of its expert among this rank's experts; (S,)."""
    n, e = arriving_ne.shape
    numbers = torch.arange(e, device=arriving_ne.device).repeat(n)
    return numbers.repeat_interleave(arriving_ne.flatten(), output_size=n_rows)


def _start(rows: Tensor, to: list[int], from_: list[int], group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """Start the all-to-all: send `to[r]` rows to rank r and receive `from_[r]` rows from it."""
    arriving = rows.new_empty(sum(from_), rows.shape[1])
    work = dist.all_to_all_single(arriving, rows.contiguous(), from_, to, group=group, async_op=True)
    return work, arriving


class _AwaitAllToAll(torch.autograd.Function):
    """Waits for the all-to-all that `_start` has started; the backward pass sends the gradients of the rows back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        under_way: tuple[Any, Tensor],
        to: list[int],
        from_: list[int],
        exchange: ExpertExchange,
        codec: Codec | None = None,
    ) -> Tensor:
        ctx.to, ctx.from_, ctx.exchange = to, from_, exchange
        work, arrived = under_way
        work.wait()
        return arrived if codec is None else decode_rows(arrived, codec, rows.shape[1], rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.count(grads[0], ctx.from_)
        work, gradient = _start(grads[0], ctx.from_, ctx.to, ctx.exchange.group)
        work.wait()
        return gradient, None, None, None, None, None
