"""A pipeline stage: some layers of a decoder, with the embedding before the first and norm and head after the last.

Parameters have the names they have in the whole model, such as `layers.7.attention.q.weight`, so checkpoints, initial
values and verification are independent of stages.

Zero-bubble schedules compute weight gradients in a later action (op W) than the rest of the backward pass (op I).
The backward pass of a linear has two matmuls, dx = dy W and dW = dy^T x. The previous stage needs only dx, so a
schedule may run dW where the rank would otherwise be idle (Qi et al., arXiv 2401.10241, section 2). While `hold` is
active, backward passes hand the inputs of dW to a `WeightGradients` instead of computing dW (`model/matmul.py`); `take`
returns a function that computes them. The gradients of norms, biases, embeddings and routers are cheap and are computed
in I; so are all gradients of a compiled block, whose backward pass cannot be split.

Shapes: B batch, T tokens, D model, V vocab.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from shardwright.model import matmul
from shardwright.model.balance import RealTokens
from shardwright.model.documents import Documents
from shardwright.model.matmul import Recipe
from shardwright.model.transformer import Transformer


class StageModel(Transformer):
    """One pipeline stage of a decoder, made of the modules of the whole model.

    `number`: the index of the stage. The last stage has the modules of multi-token prediction. With these or with a
    tied embedding it has a replica of the embedding's matrix, under the same name.
    """

    def __init__(self, whole: Transformer, number: int, layers: range, n_stages: int) -> None:
        nn.Module.__init__(self)
        self.spec = whole.spec
        self.number = number
        self.first, self.last = number == 0, number == n_stages - 1
        self.gradients = WeightGradients()
        tied_replica = self.last and (whole.spec.tied_embedding or whole.spec.mtp_modules > 0)
        embedding = whole.embedding if self.first else deepcopy(whole.embedding) if tied_replica else None
        self.embedding = embedding  # type: ignore[assignment]
        self.position_embedding = whole.position_embedding if self.first else None
        self.dropout = whole.dropout if self.first else None  # type: ignore[assignment]
        self.layers = nn.ModuleDict({str(i): whole.layers[str(i)] for i in layers})
        self.norm = whole.norm if self.last else None  # type: ignore[assignment]
        self.head = whole.head if self.last else None

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        positions_T: Tensor,
        random_keys_B: Tensor | None = None,
        documents: Documents | None = None,
        ahead_KBT: Tensor | None = None,
        real: RealTokens | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the stage. `x`: token ids (B, T) in the first stage, otherwise the output of the previous stage,
        (B, T, D) or a token shard of it. Returns (B, T, D), in the last stage logits (B, T, V), with `ahead_KBT` also
        the logits of each multi-token prediction module; other arguments as in `Transformer.forward`."""
        x_BTD = self.embed(x, positions_T, random_keys_B, documents) if self.first else x
        x_BTD = self.run_layers(x_BTD, positions_T, random_keys_B, documents, real)
        return self.finish(x_BTD, positions_T, random_keys_B, documents, ahead_KBT, real) if self.last else x_BTD


def cut_stages(whole: Transformer, layers: tuple[range, ...]) -> list[StageModel]:
    """Return all stages of a model; stage i has the layers `layers[i]`."""
    return [StageModel(whole, number, own, len(layers)) for number, own in enumerate(layers)]


def holders(stages: Iterable[StageModel], routes: Iterable[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return for each parameter of the whole model its ranks of `pp`; `routes` as in `schedule.actions`."""
    ranks_of: defaultdict[str, set[int]] = defaultdict(set)
    for stage in stages:
        for name, _ in stage.named_parameters():
            ranks_of[name] |= {route[stage.number] for route in routes}
    return {name: tuple(sorted(ranks)) for name, ranks in ranks_of.items()}


class WeightGradients:
    """The deferred weight gradients (dW) of one pipeline stage."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Recipe | None]] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which backward passes defer their weight gradients; for one stage at a time."""
        assert matmul.defer is None
        matmul.defer = self._leave
        try:
            yield
        finally:
            matmul.defer = None

    def _leave(self, weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None, recipe: Recipe | None) -> None:
        # Detached: otherwise dy and x would keep the autograd graph alive, with the stage's input and its gradient.
        self._left.append((weight, dy.detach(), x.detach(), counts_E, recipe))

    def take(self) -> Callable[[], None]:
        """Return a function that computes the gradients deferred since the last call and adds them to `.grad`."""
        left, self._left = self._left, []

        def compute() -> None:
            while left:
                _add_gradient(*left.pop())

        return compute


@torch.no_grad()
def _add_gradient(weight: Tensor, dy: Tensor, x: Tensor, counts_E: Tensor | None, recipe: Recipe | None) -> None:
    if not weight.is_leaf:  # the local tensor of a DTensor: autograd passes the gradient on to the parameter
        torch.autograd.backward(weight, matmul.weight_gradient(dy, x, counts_E, recipe=recipe))
    elif weight.grad is None:
        weight.grad = matmul.weight_gradient(dy, x, counts_E, recipe=recipe)
    else:
        matmul.weight_gradient(dy, x, counts_E, add_to=weight.grad, recipe=recipe)
