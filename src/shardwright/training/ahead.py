"""The tokens that modules of multi-token prediction read and those that they predict (`model.mtp`).

At position t module k reads token t + k and predicts token t + k + 1. That target counts where the loss of the model
counts it and every token between, t + 1 to t + k. So no target is counted beyond the end of a sequence, behind padding,
or, where the first token of a document is left out of the loss, in another document than position t; and of an answer
the first k tokens are not.

Shapes: A micro-batches, B sequences, T tokens, K modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.data.samples import IGNORE

BEYOND = 0
"""The token that is read beyond the end of a sequence. No target depends on it."""


def look_ahead(tokens_ABT: Tensor, targets_ABT: Tensor, n_modules: int) -> tuple[Tensor, Tensor]:
    """The tokens that the modules read, (A, K, B, T), and the targets of the model and of each module,
    (A, 1 + K, B, T). T is that of whole sequences, since a module reads the first tokens of the next rank of cp."""
    ahead, targets = [], [targets_ABT]
    for k in range(1, n_modules + 1):
        ahead.append(F.pad(tokens_ABT[..., k:], (0, k), value=BEYOND))
        there_ABT = F.pad(targets_ABT[..., k:], (0, k), value=IGNORE)
        targets.append(there_ABT.where(targets[-1] != IGNORE, IGNORE))
    return torch.stack(ahead, 1), torch.stack(targets, 1)
