"""A rank's part of a micro-batch, as runners, losses and observers receive it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.model.balance import RealTokens
from shardwright.model.documents import Documents


class PairTargets(NamedTuple):
    """The documents of a micro-batch that are answers: document 2p is the chosen answer of pair p, document 2p + 1 the
    rejected one. D = 2 P documents."""

    documents_BT: Tensor
    """The document of each of this rank's tokens, int64; D for padding."""
    counts_D: Tensor
    """The targets of each whole document, float64."""
    reference_D: Tensor
    """The log-probability of each document under the reference, float64; zeros without a reference."""


class Microbatch(NamedTuple):
    """This rank's part of a micro-batch, on its device. Shapes: B sequences, T tokens, K multi-token prediction (MTP)
    modules."""

    tokens_BT: Tensor
    targets_BT: Tensor
    """(B, T); with MTP modules (1 + K, B, T), first the model's targets, then each module's."""
    positions_T: Tensor
    """Positions in the sequence; (B, T) if ranks of cp hold different tokens of each sequence."""
    random_keys_B: Tensor | None
    documents: Documents | None = None
    """The documents within which attention stays; None: attention covers whole sequences."""
    ahead_KBT: Tensor | None = None
    """The tokens that MTP modules read (`Transformer.forward`)."""
    real: RealTokens | None = None
    """The tokens that experts compute, if sequences have padding."""

    pairs: PairTargets | None = None
    """The pairs of answers of preference training."""
    weights_BT: Tensor | None = None
    """The factors of the targets' losses."""

    @property
    def read_by_loss(self) -> tuple[Any, ...]:
        """The arguments of a loss after the output of the model."""
        more = (tensor for tensor in (self.pairs, self.weights_BT) if tensor is not None)
        return (self.targets_BT, *more)

    @property
    def read_by_model(self) -> tuple[Any, ...]:
        """The arguments of a model, or of a pipeline stage, after its input."""
        return self.positions_T, self.random_keys_B, self.documents, self.ahead_KBT, self.real


Loss = Callable[..., Tensor]
"""(output of the model, *`read_by_loss` of a micro-batch) -> a scalar, or several losses (P,); each is summed over
micro-batches, and the gradient is of the sum of all."""
