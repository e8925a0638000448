"""A model laid over the ranks, as the training step sees it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.layout import Layout
from shardwright.model.moe import expert_layers, learn_from_load, take_load
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.copies import sum_copies
from shardwright.parallel.mesh import Groups
from shardwright.parallel.norm import as_part
from shardwright.parallel.pipeline.tied import TiedParameters, first_of_each
from shardwright.parallel.routing import LossScale
from shardwright.parallel.run import Runner
from shardwright.split.sequence import held_by
from shardwright.split.tensor import vocabulary_rows


class ExpertLoad(NamedTuple):
    """What the experts of every layer (L; dense ones have zeros) were given in the global batch, on every rank."""

    counts_LE: Tensor
    """Tokens that picked each expert; int64."""
    dropped_L: Tensor
    """Pairs of a token and an expert beyond its capacity; int64."""
    losses_L2: Tensor
    """Balance loss and z-loss, with their coefficients; float64."""


class ParallelModel:
    """What one rank has of a model: `parts` of it (all of it, or its pipeline stages), which have the plain names, and
    the `runner` that takes microbatches through them."""

    def __init__(
        self,
        spec: ModelSpec,
        parts: Sequence[Transformer],
        runner: Runner,
        layout: Layout,
        mesh: DeviceMesh,
        groups: Groups,
        named: Sequence[dict[str, nn.Parameter]],
        plain: Sequence[dict[str, nn.Parameter]],
        holders: Mapping[str, tuple[int, ...]],
        stage_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        """`named` are the parameters of each part as they are optimised and saved; `plain`, where a part works with
        plain tensors in the place of DTensors, those; `holders` the ranks of `pp` that hold each parameter of the whole
        model, and `stage_groups` the groups of those sets of ranks."""
        self.spec, self.parts, self.runner = spec, parts, runner
        self.layout, self.mesh, self.groups = layout, mesh, groups
        self.tied = TiedParameters(named, plain, holders, stage_groups)
        self.named_parameters = first_of_each(named)
        """What is optimised and saved, by its global name. Under FSDP these are the shards, and only these: while a
        block is gathered, `named_parameters()` of a part gives the whole tensors in their place."""
        self.plain_parameters = first_of_each(plain)
        """Where the parts work with plain tensors in the place of DTensors: those, over the same memory."""
        self.held_on = holders
        """For each parameter of the whole model, the ranks of `pp` that hold it."""
        self.holders = [len(holders[name]) for name in self.named_parameters]
        """For each of `named_parameters`, how many ranks of `pp` hold it."""
        self.losses = LossScale(parts)
        self.load: ExpertLoad | None = None
        """Of the experts in the last step; None before the first, and without experts."""

    @property
    def module(self) -> Transformer:
        """The whole model, where it is not cut into stages."""
        (whole,) = self.parts
        return whole

    @property
    def vocabulary(self) -> range:
        """The token ids whose logits the forward pass gives on this rank."""
        return vocabulary_rows(self.spec.vocab_size, self.layout.tp, self.layout.coordinates(dist.get_rank())["tp"])

    @property
    def counts_targets(self) -> bool:
        """Whether targets are counted here: every rank of `pp` has the same."""
        return self.groups.pp is None or self.groups.pp.rank() == 0

    def train(self, training: bool = True) -> None:
        """Turn dropout on, or off."""
        for part in self.parts:
            part.train(training)

    def positions(self, seq_len: int) -> Tensor:
        """The places in the sequence of the tokens that this rank holds, in its order."""
        held = held_by(self.layout, seq_len, dist.get_rank()) if self.layout.cp > 1 else [range(seq_len)]
        return torch.cat([torch.arange(span.start, span.stop, span.step) for span in held])

    def sum_over_losses(self, tensor: Tensor) -> Tensor:
        """`tensor` summed, in place, over the ranks whose losses add up: those with other tokens, or other stages."""
        for group in (self.groups.tokens, self.groups.pp):
            if group is not None:
                dist.all_reduce(tensor, group=group)
        return tensor

    def sum_over_samples(self, tensor: Tensor) -> Tensor:
        """`tensor` summed, in place, over the ranks that read different samples."""
        if self.groups.data is not None:
            dist.all_reduce(tensor, group=self.groups.data)
        return tensor

    def complete_gradients(self) -> None:
        """Make `.grad` of `named_parameters` the gradient of the global batch; once, after the last backward pass."""
        for name, plain in self.plain_parameters.items():
            whole = self.named_parameters[name]
            assert isinstance(whole, DTensor)
            assert plain.grad is not None
            whole.grad = as_part(plain.grad, whole, whole.device_mesh, whole.placements)
        self.tied.sum_on_rank()
        sum_copies(self.named_parameters, self.spec, self.layout, self.groups)
        self.tied.sum_over_ranks()

    def forget_gradients(self) -> None:
        """Let the gradients go, or zero those whose memory is kept."""
        if self.runner.keeps_gradients:
            held = [*(self.named_parameters | self.plain_parameters).values(), *self.tied.seconds]
            if gradients := [parameter.grad for parameter in held if parameter.grad is not None]:
                torch._foreach_zero_(gradients)
            return
        for parameter in (*self.named_parameters.values(), *self.plain_parameters.values(), *self.tied.seconds):
            parameter.grad = None

    def set_batch(self, n_microbatches: int) -> None:
        """Before a step: scale the losses of routers to the tokens of the global batch that a forward pass has."""
        layout = self.layout
        ranks = layout.data_ranks * layout.cp * (layout.tp if layout.token_shards else 1)
        self.losses.share = 1 / (n_microbatches * ranks)

    @torch.no_grad()
    def learn_from_load(self) -> None:
        """After a step: let routers follow the load of their experts in the whole global batch, which is left in
        `load`."""
        moe = self.spec.moe
        if moe is None:
            return
        found = [(int(layer), load) for part in self.parts for layer, load in take_load(part).items()]
        device = next(self.parts[0].parameters()).device
        counts_LE = torch.zeros(self.spec.n_layers, moe.n_experts + 1, dtype=torch.int64, device=device)
        losses_L2 = torch.zeros(self.spec.n_layers, 2, dtype=torch.float64, device=device)
        for layer, load in found:
            counts_LE[layer, :-1] += load.counts_E
            counts_LE[layer, -1] += load.dropped
            losses_L2[layer] += torch.stack([load.aux_loss, load.z_loss])
        shards = self.groups.tp if self.layout.token_shards else None
        for group in (self.groups.tokens, shards, self.groups.pp):
            if group is not None:
                dist.all_reduce(counts_LE, group=group)
                dist.all_reduce(losses_L2, group=group)
        self.load = ExpertLoad(counts_LE[:, :-1], counts_LE[:, -1], losses_L2)
        for part in self.parts:
            learn_from_load(part, {layer: counts_LE[int(layer), :-1] for layer in expert_layers(part)})

    def after_change(self) -> None:
        """To be called when `named_parameters` have been written to."""
        self.tied.follow()
