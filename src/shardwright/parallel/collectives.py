"""The asynchronous collectives of tensor and sequence parallelism: a function here starts one, its caller waits for it.

    sent = start_gather_tokens(x_BtD, group)      # t = T / ranks of the group
    ...                                           # computation that overlaps with the all-gather
    x_BTD = sent.wait()

| function              | in, per rank | out, per rank          | bytes a rank sends, of X = B T D elements  |
| --------------------- | ------------ | ---------------------- | ------------------------------------------ |
| `start_sum`           | (B, T, D)    | (B, T, D), the sum     | 2 (n-1)/n X                                |
| `start_gather_tokens` | (B, t, D)    | (B, T, D)              | (n-1)/n X                                  |
| `start_sum_tokens`    | (B, T, D)    | (B, t, D), of the sum  | (n-1)/n X                                  |

With `by_rank` the gathered tokens stay in the order of the receive buffer, one rank's shard after another, (n B, t, D).
That saves a copy where the order of tokens does not matter.

Shapes: B batch, T tokens, t tokens of a shard, D features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.model.device_type import device_type
from shardwright.system.torch_private import all_gather_single, reduce_scatter_single


class StartedCollective:
    """A collective that has been started. `wait` returns its result and may be called once."""

    def __init__(self, work: Any, finish: Callable[[], Tensor]) -> None:
        self._work = work
        self._finish = finish

    def wait(self) -> Tensor:
        self._work.wait()
        return self._finish()

    def then(self, change: Callable[[Tensor], Tensor]) -> "StartedCollective":
        """Return the same collective with the result `change(result)`."""
        return StartedCollective(self._work, lambda: change(self._finish()))


def start_sum(x: Tensor, group: dist.ProcessGroup) -> StartedCollective:
    """All-reduce (sum), in place."""
    assert x.is_contiguous()
    return StartedCollective(dist.all_reduce(x, group=group, async_op=True), lambda: x)


def start_gather_tokens(x_BtD: Tensor, group: dist.ProcessGroup, by_rank: bool = False) -> StartedCollective:
    """All-gather the token shards of all ranks along the sequence dim or, with `by_rank`, along the batch dim."""
    n = group.size()
    gathered_nBtD = x_BtD.new_empty(n, *x_BtD.shape)
    work = all_gather_single(gathered_nBtD.flatten(0, 1), x_BtD.contiguous(), group=group, async_op=True)
    if by_rank:
        return StartedCollective(work, lambda: gathered_nBtD.flatten(0, 1))
    return StartedCollective(work, lambda: gathered_nBtD.transpose(0, 1).flatten(1, 2))


def start_sum_tokens(x_BTD: Tensor, group: dist.ProcessGroup, by_rank: bool = False) -> StartedCollective:
    """Reduce-scatter: sum over the ranks; each rank gets its token shard. `by_rank` as in the all-gather."""
    n = group.size()
    if by_rank:
        parts_nBtD = x_BTD.unflatten(0, (n, -1)).contiguous()
    else:
        parts_nBtD = x_BTD.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    if device_type(x_BTD) == "cuda":
        kept_BtD = torch.empty_like(parts_nBtD[0])
        work = reduce_scatter_single(kept_BtD, parts_nBtD.flatten(0, 1), group=group, async_op=True)
        return StartedCollective(work, lambda: kept_BtD)
    # gloo's reduce-scatter is an all-reduce whose result is mostly discarded. An all-to-all followed by a local sum
    # took 0.6 of its CPU time on 2 ranks and 0.3 on 4 (1 MiB, torch 2.13).
    received_nBtD = torch.empty_like(parts_nBtD)
    work = dist.all_to_all_single(received_nBtD, parts_nBtD, group=group, async_op=True)
    # For two ranks an addition, which takes 0.4 of the time of a sum over the first dim.
    return StartedCollective(work, lambda: torch.add(*received_nBtD) if n == 2 else received_nBtD.sum(0))
