"""Tensor and sequence parallelism: modules are replaced, in place, by shards, as `model.modules` declares.

Parameters become DTensors over tp, so that checkpoints, clipping and FSDP know the rank's part of each tensor.
Activations are plain tensors. Without sequence parallelism:

    x ---- column-parallel matmuls ---- (this rank's features) ---- row-parallel matmul ---- all-reduce ---- y
      \\__ backward: all-reduce of dx, overlapped with the weight gradients

With sequence parallelism x and y are token shards, and only the tensors between the two collectives have all tokens:

    x_t -- all-gather -- column-parallel matmuls -- row-parallel matmul -- reduce-scatter -- y_t
       \\__ backward: reduce-scatter of dx and all-gather of dy; x is gathered again, overlapped with dx

| a block                      | forward                          | backward                              |
| ---------------------------- | -------------------------------- | ------------------------------------- |
| without sequence parallelism | 2 all-reduces                    | 2 all-reduces                         |
| with sequence parallelism    | 2 all-gathers, 2 reduce-scatters | 2 + 2 all-gathers, 2 reduce-scatters  |

The second pair of all-gathers in the backward pass is needed because the gathered inputs are not saved. Sources:
Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.

In latent attention the column-parallel matmuls read the results of narrow matmuls (`q_down`, `kv_down`), which every
rank computes for its own tokens. So three collectives instead of one gather the latent vectors and the key that all
heads share, or sum their gradients: fewer elements a token than D.

Shapes: B batch, T tokens, t tokens of a shard, D model, F a rank's features, v a rank's rows of the vocabulary, P
elements of the key that all heads share, n ranks of tp. In the feed-forward network, which computes each token on its
own, (B, T, F) may be (n B, t, F): see `TensorAxis.by_rank`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.layout.layout import Layout
from shardwright.model import matmul
from shardwright.model.dropout import Draw, KeyedDropout
from shardwright.model.matmul import Adaptable, Linear, Recipe, with_magnitude
from shardwright.model.modules import layer_rows, row_of
from shardwright.model.norm import OffsetRMSNorm, RMSNorm
from shardwright.model.row import Row
from shardwright.model.transformer import Transformer
from shardwright.parallel.boxes import box_of
from shardwright.parallel.collectives import StartedCollective, start_gather_tokens, start_sum, start_sum_tokens
from shardwright.parallel.norm import as_part, local_part
from shardwright.split.tensor import kv_replicas, vocabulary_rows
from shardwright.system.torch_private import flatten_mesh


@dataclass(frozen=True)
class TensorAxis:
    """The tensor-parallel process group, and the sharding of the residual stream over it."""

    group: dist.ProcessGroup
    token_shards: bool
    """Sequence parallelism: the residual stream is a shard of the tokens, (B, t, D)."""
    by_rank: bool = False
    """Gathered tokens have the shape (n B, t, D), in the order of the ranks, instead of (B, T, D)."""

    def start_gather(self, x_BtD: Tensor) -> StartedCollective:
        """All-gather the tokens of the residual stream; only with token shards."""
        return start_gather_tokens(x_BtD, self.group, self.by_rank)

    def start_sum(self, x_BTD: Tensor) -> StartedCollective:
        """Reduce-scatter into token shards; without token shards all-reduce, in place."""
        if self.token_shards:
            return start_sum_tokens(x_BTD, self.group, self.by_rank)
        return start_sum(x_BTD, self.group)

    def summed_shape(self, x_BTF: Tensor, width: int) -> tuple[int, int, int]:
        """Return the shape of the result of `start_sum` for the tokens of `x_BTF` and this width."""
        n_rows, n_tokens = x_BTF.shape[:2]
        n = self.group.size() if self.token_shards else 1
        return (n_rows // n, n_tokens, width) if self.by_rank else (n_rows, n_tokens // n, width)

    def own_tokens(self, positions_T: Tensor) -> Tensor:
        """Return the slice of a tensor over all tokens, its last dim, that belongs to this rank's token shard."""
        return positions_T.unflatten(-1, (self.group.size(), -1))[..., self.group.rank(), :]

    def drawn(self, draw: Draw) -> Draw:
        """Return a draw of all tokens for tokens in the order of this axis, if they are gathered by rank."""
        if not self.by_rank:
            return draw
        n, keys_B = self.group.size(), draw.keys_B
        positions_BT = draw.positions_T.expand(len(keys_B), -1)
        return Draw(keys_B.repeat(n), positions_BT.unflatten(-1, (n, -1)).transpose(0, 1).flatten(0, 1))

    def drawn_of_shard(self, draw: Draw) -> Draw:
        """Return a draw of all tokens for this rank's token shard."""
        return Draw(draw.keys_B, self.own_tokens(draw.positions_T))


def split_model(model: Transformer, layout: Layout, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Shard a model, or a pipeline stage, on the meta device over tp, in place; names of modules and parameters stay
    the same."""
    axis = TensorAxis(group, layout.token_shards)
    copied = "tp_replicas" in (mesh.mesh_dim_names or ())
    flat = flatten_mesh(mesh["tp_kv", "tp_replicas"], "tp") if copied else mesh["tp"]
    for name, parameter in list(model.named_parameters()):
        row = row_of(model.spec, name)
        if row.split_dim is not None:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, _shard(parameter, row, mesh, flat))
    for number, block in model.layers.items():
        _split_block(block, layer_rows(model.spec, int(number)), axis, kv_replicas(model.spec.n_kv_heads, layout.tp))
    rows = vocabulary_rows(model.spec.vocab_size, layout.tp, group.rank())
    if model.embedding is not None:  # not every pipeline stage has embedding, norm and head
        model.embedding = VocabularyEmbedding(model.embedding, rows, axis)  # type: ignore[assignment]
    if model.norm is not None:
        source: Any = model.embedding if model.head is None else model.head
        model.head = VocabularyHead(source, axis)  # type: ignore[assignment]
    if axis.token_shards:
        _narrow_positions(model, axis)


def _split_block(block: nn.Module, rows: Sequence[Row], axis: TensorAxis, copies: int) -> None:
    """Replace the sharded linears and norms of a block; add a hook to linears whose output the heads of all ranks read.
    `copies`: the number of ranks that have the same key and value heads."""
    splits = ("column", "kv_column", "row")
    linears = [row for row in rows if row.matmul is not None and row.split in splits and not row.adapter]
    unordered = replace(axis, by_rank=axis.token_shards)
    inputs: dict[str, SharedInput] = {}
    for row in linears:
        of_row = axis if row.ordered else unordered
        linear: Any = block.get_submodule(row.module)
        if row.split == "row":
            block.set_submodule(row.module, RowLinear(linear, of_row))
        else:
            shared = inputs.setdefault(row.input or row.name, SharedInput(of_row))
            block.set_submodule(row.module, ColumnLinear(linear, shared))
    for row in rows:
        if row.every_head:
            block.get_submodule(row.module).register_forward_hook(ForEveryHead(axis))
        norm = block.get_submodule(row.module)
        if row.kind == "norm" and row.split_dim is not None and isinstance(norm, RMSNorm):
            copied = copies if row.split == "kv_column" else 1
            block.set_submodule(row.module, ShardedRMSNorm(norm, row.shape[0], axis.group, copied))


def _shard(parameter: nn.Parameter, row: Row, mesh: DeviceMesh, flat: DeviceMesh) -> nn.Parameter:
    """Return a DTensor over tp of the size of `parameter`, with this rank's shard on the meta device."""
    assert row.split_dim is not None
    line: DeviceMesh
    placements: list[Placement]
    if "tp" in (mesh.mesh_dim_names or ()):
        line, placements = mesh["tp"], [Shard(row.split_dim)]
    elif row.split == "kv_column":
        line, placements = mesh["tp_kv", "tp_replicas"], [Shard(row.split_dim), Replicate()]
    else:
        # One cut over all ranks, as in `vocabulary_rows`: 9 rows on 2 x 2 ranks would be 3, 2, 2, 2; on 4, 3, 3, 3, 0.
        line, placements = flat, [Shard(row.split_dim)]
    coordinates = line.get_coordinate()
    assert coordinates is not None
    _, shape, _ = box_of(parameter.shape, line.shape, coordinates, placements)
    part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(as_part(part, parameter, line, placements), parameter.requires_grad)


def _narrow_positions(model: Transformer, axis: TensorAxis) -> None:
    """Give dropout, replicated linears and learned position embeddings, which act on token shards, the positions of
    this rank's tokens."""
    for module in model.modules():
        if isinstance(module, Adaptable) and module.dropout is not None and module.dropout.place is None:
            module.dropout = replace(module.dropout, place=axis.drawn_of_shard)
        if isinstance(module, KeyedDropout):
            module.register_forward_pre_hook(lambda _, inputs: (*inputs[:2], axis.own_tokens(inputs[2])))
    if model.position_embedding is not None:
        model.position_embedding.register_forward_pre_hook(lambda _, inputs: (axis.own_tokens(inputs[0]),))


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Replace a model's DTensors by plain tensors that share their memory; return these by name.

    Without FSDP the forward and backward passes do not need DTensors, which would cost a dispatch for each use and each
    gradient.
    """
    plain = {}
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, DTensor):
            owner, _, attribute = name.rpartition(".")
            plain[name] = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            setattr(model.get_submodule(owner), attribute, plain[name])
    return plain


class SharedInput:
    """Column-parallel linears that read the same input: all are computed when the first of them is called.

    Together they need one reduction of the input's gradient, and one all-gather of the input, instead of one each.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.linears: list[ColumnLinear] = []
        self.recipe: Recipe | None = None
        """The recipe of the matmuls, or None."""
        self._input: Tensor | None = None
        self._outputs: dict[int, tuple[Tensor, Tensor | None]] = {}

    def output(self, index: int, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output of linear number `index`, and of its adapter's A, (B, T, r), if it has one."""
        if self._input is not x_BTD or index not in self._outputs:
            self._input, self._outputs = x_BTD, self._computed(x_BTD)
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def _computed(self, x_BTD: Tensor) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Return the outputs of all linears. Each rank has the gradient of z = x A^T from its own output features, so A
        is one more weight that reads the input."""
        adapted = [number for number, linear in enumerate(self.linears) if linear.lora_scale]
        weights = [local_part(linear.weight) for linear in self.linears]
        weights += [local_part(self.linears[number].lora_a) for number in adapted]
        biases = [linear.added_bias for linear in self.linears]
        masks = [self.linears[number].input_mask() for number in adapted]
        recipes = [*(matmul.for_pass(self.recipe) for _ in self.linears), *masks]
        outputs = _ColumnProducts.apply(x_BTD, self.axis, recipes, *weights, *biases, *[None] * len(adapted))
        narrow = dict(zip(adapted, outputs[len(self.linears) :], strict=True))
        return {number: (outputs[number], narrow.get(number)) for number in range(len(self.linears))}


class ColumnLinear(Adaptable):
    """A column-parallel linear, whose output features are sharded; (B, T, D) or, on token shards, (B, t, D) ->
    (B, T, F)."""

    def __init__(self, linear: Linear, shared: SharedInput) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.take_adapter(linear, place=shared.axis.drawn)
        self.shared = shared
        self.index = len(shared.linears)
        shared.linears.append(self)

    @property
    def added_bias(self) -> Tensor | None:
        """The bias that the matmul adds; with DoRA none, because the bias is added to the scaled output."""
        return None if self.bias is None or hasattr(self, "lora_magnitude") else local_part(self.bias)

    @torch.compiler.disable
    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTF, z_BTr = self.shared.output(self.index, x_BTD)
        y_BTF = y_BTF if z_BTr is None else y_BTF + self.widen(z_BTr)
        change_F = self.magnitude_change(self.shared.recipe)
        if change_F is None:
            return y_BTF
        return with_magnitude(y_BTF, change_F, None if self.bias is None else local_part(self.bias))


class RowLinear(Adaptable):
    """A row-parallel linear, whose input features are sharded; (B, T, F) -> (B, T, D) or, on token shards,
    (B, t, D)."""

    def __init__(self, linear: Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.take_adapter(linear, place=axis.drawn, first=axis.group.rank() * (linear.in_features // axis.group.size()))
        self.axis = axis
        self.saves_first = False
        """See `matmul.Linear`: recomputation skips the last matmul of a block, and its reduction."""
        self.recipe: Recipe | None = None

    @torch.compiler.disable
    def forward(self, x_BTF: Tensor) -> Tensor:
        weight = local_part(self.weight)
        change_D = self.magnitude_change(self.recipe, lambda squares_2D: start_sum(squares_2D, self.axis.group).wait())
        saves_first = self.saves_first and torch.is_grad_enabled() and change_D is None
        also_BTD = self.low_rank(x_BTF)  # of this rank's features, so the reduction sums it too
        recipe = matmul.for_pass(self.recipe)
        y_BTD: Tensor = _RowProduct.apply(x_BTF, weight, also_BTD, self.axis, saves_first, recipe)
        if saves_first:
            with torch.no_grad():
                y_BTD.copy_(_row_product(x_BTF, weight, also_BTD, self.axis, recipe))
        if change_D is not None:
            return with_magnitude(y_BTD, change_D, self.bias)
        return y_BTD if self.bias is None else y_BTD + self.bias


class ForEveryHead:
    """A forward hook of a replicated linear whose last output the heads of all ranks read: (B, T, P) or, on token
    shards, (B, t, P) -> (B, T, P).

    It adds the collectives of a column-parallel linear: the tokens are gathered in the forward pass, and the gradients
    from the heads of all ranks are summed in the backward pass.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        *own, shared_BTP = outputs
        return (*own, _SharedByHeads.apply(shared_BTP, self.axis))


class ShardedRMSNorm(nn.Module):
    """An RMSNorm over features that are sharded over tp; (B, T, F) -> (B, T, F). The sum of squares of a token is
    all-reduced in 32 bits or wider, and in the backward pass its gradient.

    `width`: features of all ranks; `copies`: the number of ranks that hold each feature, which count it once together.
    """

    def __init__(self, norm: RMSNorm, width: int, group: dist.ProcessGroup, copies: int) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps or 0.0
        self.offset = 1.0 if isinstance(norm, OffsetRMSNorm) else 0.0
        self.width, self.group, self.copies = width, group, copies

    @torch.compiler.disable
    def forward(self, x_BTF: Tensor) -> Tensor:
        wide = torch.promote_types(x_BTF.dtype, torch.float32)
        x_wide_BTF, weight_F = x_BTF.to(wide), local_part(self.weight).to(wide) + self.offset
        squares_BT1 = _SumOverRanks.apply(x_wide_BTF.square().sum(-1, keepdim=True) / self.copies, self.group)
        y_BTF: Tensor = x_wide_BTF * (squares_BT1 / self.width + self.eps).rsqrt() * weight_F
        return y_BTF.to(x_BTF.dtype)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce a tensor in the forward pass, and the ranks' parts of its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return start_sum(x.clone(), group).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return start_sum(dy.clone(memory_format=torch.contiguous_format), ctx.group).wait(), None


class VocabularyEmbedding(nn.Module):
    """A vocabulary-parallel embedding with the rows `rows`; tokens (B, T) -> (B, T, D), on token shards (B, t, D)."""

    def __init__(self, embedding: nn.Embedding, rows: range, axis: TensorAxis) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.rows = rows
        self.axis = axis

    @torch.compiler.disable
    def forward(self, tokens_BT: Tensor) -> Tensor:
        own_BT = (tokens_BT >= self.rows.start) & (tokens_BT < self.rows.stop)
        rows_BT = (tokens_BT - self.rows.start).where(own_BT, 0)
        return _SumOfRows.apply(F.embedding(rows_BT, local_part(self.weight)), own_BT[..., None], self.axis)


class VocabularyHead(nn.Module):
    """A vocabulary-parallel head, which uses the embedding's matrix if it is tied; (B, T, D) -> logits (B, T, v)."""

    def __init__(self, source: nn.Linear | VocabularyEmbedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        if isinstance(source, VocabularyEmbedding):
            self._tied = [source]  # in a list, so that the parameter is registered once, under the embedding's name
        else:
            self.weight = source.weight

    @property
    def matrix(self) -> Tensor:
        """The rows of the head's matrix for this rank's part of the vocabulary, (v, D)."""
        return self._tied[0].weight if hasattr(self, "_tied") else self.weight

    @torch.compiler.disable
    def forward(self, x_BTD: Tensor) -> Tensor:
        (logits_BTv,) = _ColumnProducts.apply(x_BTD, self.axis, [None], local_part(self.matrix), None)
        return logits_BTv


class _ColumnProducts(torch.autograd.Function):
    """The matmuls of several column-parallel linears that read the same input, with the collectives of both passes."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, axis: TensorAxis, recipes: Sequence[Recipe | None], *weights_then_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        n = len(weights_then_biases) // 2
        weights, biases = weights_then_biases[:n], weights_then_biases[n:]
        ctx.axis, ctx.recipes, ctx.weights = axis, recipes, weights
        trained = any(ctx.needs_input_grad[3 : 3 + n])
        ctx.save_for_backward(x_BTD if trained else None, *weights)
        if axis.token_shards:
            x_BTD = axis.start_gather(x_BTD).wait()
        linears: Any = zip(weights, biases, recipes, strict=True)
        return tuple(matmul.forward(x_BTD, w, b, recipe=recipe) for w, b, recipe in linears)

    @staticmethod
    def backward(ctx: Any, *dys_BTF: Tensor) -> tuple[Tensor | None, ...]:
        axis: TensorAxis = ctx.axis
        x_BTD, *weights = ctx.saved_tensors
        gathering = axis.start_gather(x_BTD) if axis.token_shards and x_BTD is not None else None
        # Nothing before the first adapter is trained, so there the input needs no gradient.
        wanted, *_ = ctx.needs_input_grad
        recipes = [matmul.for_backward(recipe) for recipe in ctx.recipes]
        summing = axis.start_sum(_input_gradient(dys_BTF, weights, recipes)) if wanted else None
        if gathering is not None:
            x_BTD = gathering.wait()
        # The weight gradients overlap with the reduction of the input's gradient.
        trained, has_bias = ctx.needs_input_grad[3 : 3 + len(weights)], ctx.needs_input_grad[3 + len(weights) :]
        dweights = [
            matmul.weight_gradient_or_defer(weight, dy_BTF, x_BTD, recipe=recipe) if needed else None
            for weight, dy_BTF, recipe, needed in zip(ctx.weights, dys_BTF, recipes, trained, strict=True)
        ]
        dbiases = [dy.sum((0, 1)) if has else None for dy, has in zip(dys_BTF, has_bias, strict=True)]
        return None if summing is None else summing.wait(), None, None, *dweights, *dbiases


def _input_gradient(dys_BTF: Sequence[Tensor], weights: Sequence[Tensor], recipes: Sequence[Recipe | None]) -> Tensor:
    """Return the sum of dy W over the linears that read the input; (B, T, D)."""
    (dy_BTF, weight, recipe), *rest = zip(dys_BTF, weights, recipes, strict=True)
    dx_BTD = matmul.input_gradient(dy_BTF, weight, recipe=recipe)
    for dy_BTF, weight, recipe in rest:
        matmul.input_gradient(dy_BTF, weight, add_to=dx_BTD, recipe=recipe)
    return dx_BTD


class _RowProduct(torch.autograd.Function):
    """The matmul of a row-parallel linear: x W^T of this rank's features, plus `also_BTD` if given, summed over the
    ranks; for all tokens or a token shard."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTF: Tensor,
        weight_DF: Tensor,
        also_BTD: Tensor | None,
        axis: TensorAxis,
        saves_first: bool,
        recipe: Recipe | None,
    ) -> Tensor:
        ctx.axis, ctx.weight, ctx.recipe = axis, weight_DF, recipe
        ctx.save_for_backward(x_BTF if ctx.needs_input_grad[1] else None, weight_DF)
        if saves_first:
            return x_BTF.new_empty(axis.summed_shape(x_BTF, weight_DF.shape[0]))
        return _row_product(x_BTF, weight_DF, also_BTD, axis, recipe)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        x_BTF, weight_DF = ctx.saved_tensors
        if ctx.axis.token_shards:
            dy_BTD = ctx.axis.start_gather(dy_BTD).wait()
        wanted, trained, has_also, *_ = ctx.needs_input_grad
        recipe = matmul.for_backward(ctx.recipe)
        dweight = matmul.weight_gradient_or_defer(ctx.weight, dy_BTD, x_BTF, recipe=recipe) if trained else None
        dx_BTF = matmul.input_gradient(dy_BTD, weight_DF, recipe=recipe) if wanted else None
        return dx_BTF, dweight, dy_BTD if has_also else None, None, None, None


def _row_product(
    x_BTF: Tensor, weight_DF: Tensor, also_BTD: Tensor | None, axis: TensorAxis, recipe: Recipe | None
) -> Tensor:
    """Return x W^T of this rank's features, plus `also_BTD`, summed over the ranks."""
    y_BTD = matmul.forward(x_BTF, weight_DF, recipe=recipe)
    return axis.start_sum(y_BTD if also_BTD is None else y_BTD.add_(also_BTD)).wait()


class _SharedByHeads(torch.autograd.Function):
    """Forward: all-gather of the tokens; backward: sum over the ranks of the gradients from each rank's heads."""

    @staticmethod
    def forward(ctx: Any, x_BTP: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.start_gather(x_BTP).wait() if axis.token_shards else x_BTP.view_as(x_BTP)

    @staticmethod
    def backward(ctx: Any, dy_BTP: Tensor) -> tuple[Tensor, None]:
        # A copy: the sum is in place, and autograd may use this gradient elsewhere.
        own_BTP = dy_BTP.clone(memory_format=torch.contiguous_format)
        return ctx.axis.start_sum(own_BTP).wait(), None


class _SumOfRows(torch.autograd.Function):
    """Sum over the ranks of their embedding rows; for all tokens or a token shard."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, own_BT1: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(own_BT1)
        return axis.start_sum(x_BTD * own_BT1).wait()

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor, None, None]:
        (own_BT1,) = ctx.saved_tensors
        if ctx.axis.token_shards:
            dy_BTD = ctx.axis.start_gather(dy_BTD).wait()
        return dy_BTD * own_BT1, None, None
