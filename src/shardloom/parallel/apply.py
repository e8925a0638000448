"""Everything that is done to a model to make it parallel, in the one order in which it is done."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardloom.layout import Layout
from shardloom.model.spec import ModelSpec
from shardloom.model.transformer import Block, Transformer
from shardloom.parallel.context import ContextAttention
from shardloom.parallel.copies import sum_copies
from shardloom.parallel.data import DataEngine, Replicas, Single, needs_sharding, shard
from shardloom.parallel.initialise import materialise
from shardloom.parallel.mesh import Groups, build_groups, build_mesh
from shardloom.parallel.tensor import plain_parameters, split_model
from shardloom.split.sequence import spans
from shardloom.split.table import vocabulary_rows


@dataclass(frozen=True)
class ParallelModel:
    """A model laid over the ranks. `module` has the plain names; `engine` runs it and reduces its gradients."""

    module: Transformer
    engine: DataEngine
    layout: Layout
    mesh: DeviceMesh
    groups: Groups
    named_parameters: dict[str, nn.Parameter]
    """What is optimised and saved, by its global name. Under FSDP these are the shards, and only these: while a
    block is gathered, `module.named_parameters()` gives the whole tensors in their place."""
    plain_parameters: dict[str, nn.Parameter]
    """Where the module works with plain tensors in the place of DTensors: those, over the same memory."""

    @property
    def vocabulary(self) -> range:
        """The token ids whose logits the forward pass gives on this rank."""
        spec = self.module.spec
        return vocabulary_rows(spec.vocab_size, self.layout.tp, self._coordinate("tp"))

    def positions(self, seq_len: int) -> Tensor | None:
        """The places in the sequence of the tokens that this rank holds, in its order; None if it holds all."""
        layout = self.layout
        if layout.cp == 1:
            return None
        ring, ulysses = self._coordinate("cp_ring"), self._coordinate("cp_ulysses")
        held = spans(layout.cp_method, seq_len, layout.cp_ring, layout.cp_ulysses, ring, ulysses)
        return torch.cat([torch.arange(span.start, span.stop, span.step) for span in held])

    def sum_over_tokens(self, tensor: Tensor) -> Tensor:
        """`tensor` summed, in place, over the ranks that hold different tokens."""
        if self.groups.tokens is not None:
            dist.all_reduce(tensor, group=self.groups.tokens)
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
            whole.grad = DTensor.from_local(
                plain.grad,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        sum_copies(self.named_parameters, self.layout, self.module.spec.n_kv_heads, self.groups)

    def forget_gradients(self) -> None:
        """Let the gradients go, or zero those whose memory is kept."""
        if self.engine.keeps_gradients:
            held = self.named_parameters | self.plain_parameters
            torch._foreach_zero_([parameter.grad for parameter in held.values() if parameter.grad is not None])
            return
        for parameter in (*self.named_parameters.values(), *self.plain_parameters.values()):
            parameter.grad = None

    def _coordinate(self, axis: str) -> int:
        return self.layout.coordinates(dist.get_rank())[axis]


def apply(
    spec: ModelSpec,
    layout: Layout,
    device: torch.device,
    *,
    seed: int,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    compile_blocks: bool = False,
) -> ParallelModel:
    """Build a model of `spec` on this rank of `layout`, with its initial values.

    Every rank of the world calls this, with a process group already set up (of one rank, if there is one). The layout
    has to fit the model (`split.rules.problems`).
    """
    mesh = build_mesh(layout, device.type, spec.n_kv_heads)
    groups = build_groups(layout, mesh)
    with torch.device("meta"):
        model = Transformer(spec).to(param_dtype)
    blocks = [block for block in model.layers.values() if isinstance(block, Block)]
    if groups.tp is not None:
        split_model(model, layout, mesh, groups.tp)
    if layout.cp > 1:
        for block in blocks:
            block.attention.attend = ContextAttention(layout.cp_method, groups.cp_ring, groups.cp_ulysses)
    if layout.recompute == "full":
        for block in blocks:
            _recompute(block)
    if compile_blocks:
        for block in blocks:
            block.compile()
    engine: DataEngine | None = None
    if needs_sharding(layout, compute_dtype, param_dtype):
        engine = shard(model, blocks, layout, mesh, compute_dtype, param_dtype)
    materialise(model, spec, seed, device)
    named, plain = dict(model.named_parameters()), dict[str, nn.Parameter]()
    if engine is None:
        plain = plain_parameters(model)
        # DDP makes its buckets of parameters that are there already, so it comes after their values.
        engine = Single(model) if groups.tokens is None else Replicas(model, groups.tokens)
    return ParallelModel(model, engine, layout, mesh, groups, named, plain)


def _recompute(block: nn.Module) -> None:
    """Keep only a block's inputs; the backward pass runs it again (Chen et al., arXiv 1604.06174).

    Nothing random has to be kept for that: dropout goes by keys that are among the inputs.
    """
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
