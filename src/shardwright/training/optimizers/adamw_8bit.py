"""AdamW with 8-bit states (Dettmers et al., arXiv 2110.02861): a one-byte code for each element of a matrix's moments,
and a scale for each block of elements, the largest absolute value in the block.

    m = table[code of m] x scale of its block                widened, in the type of the parameters; v likewise
    the step of AdamW with m and v                           it uses the new moments before they are rounded
    scale = largest |m| of the block                         v likewise
    code = index of the table's number nearest to m / scale

The table is dynamic tree quantisation (section 1.3): after the sign, the zeros before the first 1 are a negative
exponent of 10, and the bits after it select one of equal parts of 0.1 to 1. v has no sign, and one bit more.

A block consists of consecutive elements of a row of the whole parameter, in every layout: up to `block_size` elements;
the last block of a row may be shorter. If tp shards columns, a block may be spread over several ranks. Its scale is
then the maximum over all of them, and each rank stores the scales of all blocks of its rows. A step is therefore the
same on every layout. (bitsandbytes and torchao quantise blocks of the flattened shard, which depend on the layout.)

Vectors and matrices with fewer than `least_elements` elements have states in the type of the parameters. One rule
differs from bitsandbytes: a nonzero second moment is never rounded to 0, since a step divides by its root.

Shapes: R rows (of all experts) and C columns of a shard, N blocks of B elements that overlap the shard.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwright.optimizers import OPTIMIZERS, scale_of
from shardwright.parallel.boxes import shard_of
from shardwright.parallel.norm import local_part
from shardwright.parallel.reductions import groups_that_shard, reduce_together
from shardwright.system.units import in_groups
from shardwright.training.on_shards import BUCKET_BYTES

BITS = 8
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The states that are rounded, and whether they have a sign."""


class AdamW8bit(Optimizer):
    """8-bit AdamW for parameters described by their `rows`; they may be DTensors."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: Mapping[str, float]) -> None:
        super().__init__(groups, {"lr": lr, **options})
        kind, self._members = OPTIMIZERS["adamw-8bit"], []
        for group in self.param_groups:
            coded = [kind.has_codes(row, options) for row in group["rows"]]
            pairs = zip(group["params"], coded, strict=True)
            self._members.append(
                [_AdamW8bitParameter(p, int(options["block_size"]) if has else None) for p, has in pairs]
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, members in self._buckets():
            moments = [member.moments(self.state[member.parameter]) for member in members]
            _update(group, members, moments, [self.state[member.parameter]["step"] for member in members])
            coded = [pair for pair in zip(members, moments, strict=True) if pair[0].blocks is not None]
            for name in SIGNED:
                scales = [local_part(self.state[member.parameter][scale_of(name)]) for member, _ in coded]
                parts = [member.largest(wide[name], scale) for (member, wide), scale in zip(coded, scales, strict=True)]
                over = [groups_that_shard(member.parameter, -1) for member, _ in coded]
                reduce_together(zip(parts, over, strict=True), dist.ReduceOp.MAX)
                for (member, wide), scale, part in zip(coded, scales, parts, strict=True):
                    scale.copy_(part)
                    member.round(name, wide[name], scale, local_part(self.state[member.parameter][name]))

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list["_AdamW8bitParameter"]]]:
        """Yield a group with a few of its parameters at a time, the same on all ranks with shards of them."""
        for group, members in zip(self.param_groups, self._members, strict=True):
            for bucket in in_groups(members, lambda member: member.n_bytes, BUCKET_BYTES):
                yield group, bucket


def _update(
    group: dict[str, Any], members: list["_AdamW8bitParameter"], moments: list[dict[str, Tensor]], steps: list[Any]
) -> None:
    """Apply AdamW to shards of parameters and their moments in place. Adds 1 to each of `steps`."""
    weights = [local_part(member.parameter.detach()) for member in members]
    gradients = [
        torch.zeros_like(weight) if member.parameter.grad is None else local_part(member.parameter.grad)
        for member, weight in zip(members, weights, strict=True)
    ]
    adamw(
        weights,
        gradients,
        [moment["exp_avg"] for moment in moments],
        [moment["exp_avg_sq"] for moment in moments],
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["beta1"],
        beta2=group["beta2"],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _AdamW8bitParameter:
    """One parameter; `blocks` is set if its states are codes."""

    def __init__(self, parameter: nn.Parameter, block_size: int | None) -> None:
        self.parameter = parameter
        mesh = getattr(parameter, "device_mesh", None)
        self.n_bytes = parameter.numel() * parameter.element_size() // (1 if mesh is None else mesh.size())
        self.blocks = None if block_size is None else _Blocks(parameter, block_size)
        if self.blocks is not None:
            like = local_part(parameter.detach())
            self.tables = {name: table(signed).to(like) for name, signed in SIGNED.items()}
            self.borders = {name: borders(signed).to(like) for name, signed in SIGNED.items()}

    def moments(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shards of the moments in the type of the parameter; without codes the states themselves."""
        if self.blocks is None:
            return {name: local_part(state[name]) for name in SIGNED}
        result = {}
        for name in SIGNED:
            codes, scale = local_part(state[name]), local_part(state[scale_of(name)])
            numbers = self.tables[name].index_select(0, codes.flatten().int()).view(codes.shape)
            result[name] = self.blocks.by_block(torch.mul, numbers, scale)
        return result

    def largest(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return the largest absolute value of each block of this shard's rows, over the shard's part."""
        assert self.blocks is not None
        result = torch.zeros_like(scale)
        self.blocks.local_scales(result).copy_(self.blocks.cut(x.abs()).amax(-1))
        return result

    def round(self, name: str, x: Tensor, scale: Tensor, codes: Tensor) -> None:
        """Write the codes of a moment."""
        assert self.blocks is not None
        divided = self.blocks.by_block(torch.div, x, torch.where(scale == 0, 1.0, scale))
        codes.copy_(torch.bucketize(divided, self.borders[name], out_int32=True))


class _Blocks:
    """The blocks of a parameter's rows; this rank has all columns or a shard of them."""

    def __init__(self, parameter: Tensor, size: int) -> None:
        offsets, shape, _ = shard_of(parameter)
        self.size, self.columns = min(size, parameter.shape[-1]), shape[-1]
        self.first, self.before = divmod(offsets[-1], self.size)
        self.n = -(-(self.before + self.columns) // self.size)
        self.after = self.n * self.size - self.before - self.columns

    def local_scales(self, scale: Tensor) -> Tensor:
        """Return the scales of the blocks that overlap this rank's shard, (..., N), from the scales of whole rows."""
        return scale.narrow(-1, self.first, self.n)

    def cut(self, x: Tensor) -> Tensor:
        """Return (..., C) as (..., N, B), with zeros for other ranks' elements."""
        return F.pad(x, (self.before, self.after)).unflatten(-1, (self.n, self.size))

    def by_block(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor, scale: Tensor) -> Tensor:
        """Return `compute` of each element, (..., C), and the scale of its block, contiguous for fused updates."""
        result = compute(self.cut(x), self.local_scales(scale).unsqueeze(-1))
        return result.flatten(-2).narrow(-1, self.before, self.columns).contiguous()


def table(signed: bool) -> Tensor:
    """Return the 256 numbers of dynamic tree quantisation in ascending order, in float64.

    They are 0, 1, and for each exponent e of 0 to 6 the middles of 2^e (unsigned: 2^(e+1)) equal parts of 0.1 to 1,
    times 10^(e - 6); signed: also their negatives.
    """
    places = BITS - 1
    numbers = [0.0, 1.0]
    for exponent in range(places):
        n_parts = 2 ** (exponent + (not signed))
        for part in range(n_parts):
            middle = (0.1 + 0.9 * (part + 0.5) / n_parts) * 10.0 ** (exponent - places + 1)
            numbers += [middle, -middle] if signed else [middle]
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def borders(signed: bool) -> Tensor:
    """Return the 255 boundaries between the numbers of the table. Unsigned, the first is 0: no positive value becomes
    0."""
    numbers = table(signed)
    result = (numbers[:-1] + numbers[1:]) / 2
    if not signed:
        result[0] = 0.0
    return result
