"""A model parallelised over the ranks, with the operations of a training step."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.model.modules import row_of
from shardwright.model.moe import expert_layers, learn_from_load, take_load
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.data import MasterWeights
from shardwright.parallel.mesh import Groups
from shardwright.parallel.microbatch_runner import Runner
from shardwright.parallel.norm import as_part
from shardwright.parallel.observer import Observers
from shardwright.parallel.pipeline.tied import TiedParameters, first_of_each
from shardwright.parallel.placement import ExpertPlaces
from shardwright.parallel.reductions import sum_replica_gradients
from shardwright.parallel.routing import LossScale
from shardwright.split.documents import Lengths, balances_documents, spans_of_documents
from shardwright.split.sequence import positions_of_rank
from shardwright.split.tensor import vocabulary_rows
from shardwright.system.torch_private import foreach_zero_


class ExpertLoad(NamedTuple):
    """The load of the experts over the global batch, equal on every rank. L counts layers, then multi-token prediction
    modules; dense layers have zeros."""

    counts_LE: Tensor
    """Tokens that picked each expert; int64."""
    dropped_L: Tensor
    """Pairs of a token and an expert that were dropped, because they exceed the expert's capacity; int64."""
    losses_L2: Tensor
    """Balance loss and z-loss, with their coefficients; float64."""


class ParallelModel:
    """The part of a model on one rank: `parts` is the whole model, or this rank's pipeline stages, and `runner` runs
    micro-batches through them. Parameters have their names in the whole model."""

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
        masters: Sequence[MasterWeights] = (),
        expert_mesh: DeviceMesh | None = None,
        compression_state: Mapping[str, Tensor] | None = None,
        observers: Observers | None = None,
    ) -> None:
        """`named`: the parameters of each part that are optimised and saved; `plain`: the plain tensors that a part
        computes with where the former are DTensors; `holders`: the ranks of `pp` that hold each parameter of the whole
        model; `stage_groups`: the process groups of these sets of ranks; `masters`: of each part, where it
        computes with copies of the parameters; `expert_mesh`: the mesh of the experts, where it is another than the
        mesh of the other parameters; `compression_state`: the state that compressed gradients keep between steps, by
        `KIND/NAME`; `observers`: receive the events of the parts and the runner."""
        self.spec, self.parts, self.runner = spec, parts, runner
        self.layout, self.mesh, self.groups = layout, mesh, groups
        self.tied = TiedParameters(named, plain, holders, stage_groups)
        self.named_parameters = first_of_each(named)
        """The parameters that are optimised and saved, by their names in the whole model. With FSDP these are the
        shards; `named_parameters()` of a part returns gathered tensors while a block is gathered."""
        self.saved_parameters = {
            name: parameter for name, parameter in self.named_parameters.items() if not row_of(spec, name).frozen
        }
        """The entries of `named_parameters` that a checkpoint contains: all except frozen ones."""
        self.plain_parameters = first_of_each(plain)
        """The plain tensors that the parts use instead of DTensors, by name; they share memory with the DTensors."""
        self.held_on = holders
        """For each parameter of the whole model, the ranks of `pp` that hold it."""
        self.holders = [len(holders[name]) for name in self.named_parameters]
        """For each of `named_parameters`, how many ranks of `pp` hold it."""
        self.expert_mesh, self.masters, self.observers = expert_mesh, masters, observers or Observers()
        self.compression_state = dict(compression_state or {})
        """A checkpoint contains it."""
        self.losses = LossScale(parts)
        self.loss_scale = 1.0
        """The factor of the step's losses."""
        self.places = ExpertPlaces(parts, spec, mesh.device_type) if layout.place_experts_every else None
        """The positions of the experts, if they change between steps."""
        self.load: ExpertLoad | None = None
        """The load of the experts in the last step; None before the first step and without experts."""

    @property
    def module(self) -> Transformer:
        """The whole model; only without pipeline parallelism."""
        (whole,) = self.parts
        return whole

    @property
    def vocabulary(self) -> range:
        """The token ids whose logits the forward pass returns on this rank."""
        return vocabulary_rows(self.spec.vocab_size, self.layout.tp, self.layout.coordinates(dist.get_rank())["tp"])

    @property
    def counts_targets(self) -> bool:
        """Return whether this rank counts the target tokens: one rank per pipeline, whose ranks share tokens."""
        return self.groups.pp is None or self.groups.pp.rank() == 0

    def train(self, training: bool = True) -> None:
        """Switch the parts to training mode, or to evaluation mode, which has no dropout."""
        for part in self.parts:
            part.train(training)

    def positions(self, seq_len: int) -> Tensor:
        """Return the positions in the sequence of this rank's tokens, in this rank's order; (T,)."""
        spans = positions_of_rank(self.layout, seq_len, dist.get_rank()) if self.layout.cp > 1 else [range(seq_len)]
        return _joined(spans)

    def positions_of_documents(self, sequences: Sequence[Lengths]) -> Tensor:
        """Return the positions of this rank's tokens for sequences with documents of these lengths; (B, T)."""
        rank, deals = dist.get_rank(), balances_documents(self.spec, self.layout)
        return torch.stack([_joined(spans_of_documents(self.layout, lengths, rank, deals)) for lengths in sequences])

    def sum_over_losses(self, tensor: Tensor) -> Tensor:
        """All-reduce (sum), in place, over the ranks with different tokens or different stages, whose losses add up."""
        for group in (self.groups.tokens, self.groups.pp):
            if group is not None:
                dist.all_reduce(tensor, group=group)
        return tensor

    def sum_over_samples(self, tensor: Tensor) -> Tensor:
        """All-reduce (sum), in place, over the ranks that read different samples."""
        if self.groups.data is not None:
            dist.all_reduce(tensor, group=self.groups.data)
        return tensor

    def complete_gradients(self) -> None:
        """Make `.grad` of `named_parameters` the gradient of the global batch; once, after the last backward pass."""
        for name, plain in self.plain_parameters.items():
            whole = self.named_parameters[name]
            assert isinstance(whole, DTensor)
            if not plain.requires_grad:
                continue
            assert plain.grad is not None
            whole.grad = as_part(plain.grad, whole, whole.device_mesh, whole.placements)
        self.tied.sum_on_rank()
        sum_replica_gradients(self.named_parameters, self.spec, self.layout, self.groups)
        self.tied.sum_over_ranks()

    def forget_gradients(self) -> None:
        """Set gradients to None, or to zero if they are views of buckets."""
        if self.runner.keeps_gradients:
            parameters = [*(self.named_parameters | self.plain_parameters).values(), *self.tied.duplicates]
            if gradients := [parameter.grad for parameter in parameters if parameter.grad is not None]:
                foreach_zero_(gradients)
            return
        for parameter in (*self.named_parameters.values(), *self.plain_parameters.values(), *self.tied.duplicates):
            parameter.grad = None

    def set_batch(self, n_microbatches: int, loss_scale: float = 1.0) -> None:
        """Set the scale of the routers' losses before a step: a forward pass's fraction of the global batch's tokens,
        times `loss_scale`, the caller's factor of the other losses."""
        layout = self.layout
        ranks = layout.data_ranks * layout.cp * (layout.tp if layout.token_shards else 1)
        self.loss_scale = loss_scale
        self.losses.share = loss_scale / (n_microbatches * ranks)

    @torch.no_grad()
    def learn_from_load(self, update: bool = True) -> None:
        """Sum the load of the experts over the global batch into `load` after a step, and update the routers' selection
        biases from it, unless the step was skipped (`update=False`)."""
        moe = self.spec.moe
        if moe is None:
            return
        loads = [(int(layer), load) for part in self.parts for layer, load in take_load(part).items()]
        device = self.mesh.device_type  # parameters may be in host memory
        counts_LE = torch.zeros(self.spec.n_blocks, moe.n_experts + 1, dtype=torch.int64, device=device)
        losses_L2 = torch.zeros(self.spec.n_blocks, 2, dtype=torch.float64, device=device)
        for layer, load in loads:
            counts_LE[layer, :-1] += load.counts_E
            counts_LE[layer, -1] += load.dropped
            losses_L2[layer] += torch.stack([load.aux_loss, load.z_loss]) / self.loss_scale
        shards = self.groups.tp if self.layout.token_shards else None
        for group in (self.groups.tokens, shards, self.groups.pp):
            if group is not None:
                dist.all_reduce(counts_LE, group=group)
                dist.all_reduce(losses_L2, group=group)
        self.load = ExpertLoad(counts_LE[:, :-1], counts_LE[:, -1], losses_L2)
        for part in self.parts if update else ():
            learn_from_load(part, {layer: counts_LE[int(layer), :-1] for layer in expert_layers(part)})

    def after_change(self) -> None:
        """Update the copies and duplicates on this rank after a change of `named_parameters`."""
        self.tied.update_duplicates()
        for master in self.masters:
            master.update_copies()


def _joined(spans: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, span.step) for span in spans])
