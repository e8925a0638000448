"""DeepSpeed-Ulysses (arXiv 2309.14509): all-to-alls reshard attention's inputs from tokens to heads, and back.

Outside attention a rank holds all heads of T tokens. Between the two all-to-alls it holds H / n heads of all n T
tokens, and computes attention as on one device. The K kv heads are partitioned like the query heads where n divides K.
Where K divides n, each rank receives the one kv head that its queries need; a head then has n / K replicas, over which
its gradients are summed.

Shapes: B batch, T tokens (local), S = n T tokens, H heads, K kv heads, C width of one head, n ranks, W heads in a
message.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TokensToHeads(torch.autograd.Function):
    """(q_BTHC, k_BTKC, v_BTKC, group) -> q_BShC, k_BSkC, v_BSkC in one all-to-all; h = H / n, k = max(K / n, 1)."""

    @staticmethod
    def forward(
        ctx: Any, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.heads = group, (q_BTHC.shape[2], k_BTKC.shape[2], v_BTKC.shape[2])
        return _to_heads((q_BTHC, k_BTKC, v_BTKC), group)

    @staticmethod
    def backward(ctx: Any, dq_BShC: Tensor, dk_BSkC: Tensor, dv_BSkC: Tensor) -> tuple[Tensor | None, ...]:
        return *_to_tokens((dq_BShC, dk_BSkC, dv_BSkC), ctx.heads, ctx.group), None


class HeadsToTokens(torch.autograd.Function):
    """(o_BShC, group) -> o_BTHC"""

    @staticmethod
    def forward(ctx: Any, o_BShC: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens((o_BShC,), (o_BShC.shape[2] * group.size(),), group)[0]

    @staticmethod
    def backward(ctx: Any, do_BTHC: Tensor) -> tuple[Tensor, None]:
        return _to_heads((do_BTHC,), ctx.group)[0], None


def _to_heads(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """(B, T, heads, C) -> (B, S, heads / n or 1, C), for each tensor."""
    n = group.size()
    b, t, _, c = parts[0].shape
    widths = [max(x.shape[2] // n, 1) for x in parts]
    sent_nBTWC = parts[0].new_empty(n, b, t, sum(widths), c)
    for x_BTHC, slot_nBTwC, width in zip(parts, sent_nBTWC.split(widths, dim=3), widths, strict=True):
        heads = x_BTHC.shape[2]
        different = heads // width  # shards of heads; each is sent to several ranks where there are fewer than ranks
        assert heads % width == 0, f"{heads} heads in shards of {width}"
        assert n % different == 0, f"{different} shards of heads for {n} ranks"
        slot_nBTwC.unflatten(0, (different, -1)).copy_(
            x_BTHC.unflatten(2, (different, width)).permute(2, 0, 1, 3, 4).unsqueeze(1)
        )
    received_nBTWC = torch.empty_like(sent_nBTWC)
    dist.all_to_all_single(received_nBTWC, sent_nBTWC, group=group)
    return received_nBTWC.transpose(0, 1).flatten(1, 2).split(widths, dim=2)


def _to_tokens(parts: tuple[Tensor, ...], heads: tuple[int, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """(B, S, heads / n or 1, C) -> (B, T, heads, C), for each tensor, summed over the replicas of a head."""
    n = group.size()
    widths = [x.shape[2] for x in parts]
    b, s, _, c = parts[0].shape
    sent_nBTWC = parts[0].new_empty(n, b, s // n, sum(widths), c)
    for x_BSwC, slot_nBTwC in zip(parts, sent_nBTWC.split(widths, dim=3), strict=True):
        slot_nBTwC.copy_(x_BSwC.unflatten(1, (n, -1)).transpose(0, 1))
    received_nBTWC = torch.empty_like(sent_nBTWC)
    dist.all_to_all_single(received_nBTWC, sent_nBTWC, group=group)
    whole = []
    for x_nBTwC, width, count in zip(received_nBTWC.split(widths, dim=3), widths, heads, strict=True):
        replicas = n * width // count
        # torch accumulates 16-bit sums in fp32 and rounds once.
        summed = x_nBTwC if replicas == 1 else x_nBTwC.unflatten(0, (-1, replicas)).sum(1)
        whole.append(summed.permute(1, 2, 0, 3, 4).flatten(2, 3))
    return tuple(whole)
