"""Multi-token prediction (MTP): modules that predict tokens further ahead than the next one, for a second loss.

With the model's output h_0 before its last norm, module k = 1, 2, ... computes at position t

    h_k(t) = block_k(P_k [norm(embedding(token t + k)); norm(h_k-1(t))])      logits_k(t) = head(norm(h_k(t)))

and predicts token t + k + 1. The model's embedding and head are used; the norms, the projection P_k (D, 2D) and the
block are the module's own. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23; the embedding comes
first in the concatenation, as in its published weights.

Shapes: B batch, T tokens, D model, C width of one head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model.matmul import Linear
from shardwright.model.norm import last_norm, residual_norm
from shardwright.model.spec import ModelSpec


class MTPModule(nn.Module):
    """A multi-token prediction (MTP) module around `block`, a layer of the model's family."""

    def __init__(self, spec: ModelSpec, block: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = residual_norm(spec)
        self.hidden_norm = residual_norm(spec)
        self.projection = Linear(2 * spec.d_model, spec.d_model, bias=False)
        self.block = block
        self.norm = last_norm(spec)

    def forward(self, x_BTD: Tensor, embedded_BTD: Tensor, *of_block: Any) -> tuple[Tensor, Tensor]:
        """Return the input of the next module and the input of the head, both (B, T, D).

        `x_BTD`: the output of the last layer or the first output of the previous module; `embedded_BTD`: the embedding
        of the tokens ahead; `of_block`: a block's other arguments (`modules.Family.block`).
        """
        both_BTE = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD)), dim=-1)
        y_BTD = self.block(self.projection(both_BTE), *of_block)
        return y_BTD, self.norm(y_BTD)
