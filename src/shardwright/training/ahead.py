"""Input tokens and targets of the modules of multi-token prediction (`model.transformer`).

At position t, module k reads token t + k and predicts token t + k + 1. This target counts if the model's loss counts it
and every token in between, t + 1 to t + k. So no target is counted beyond the end of a sequence, after padding or, if
the first token of a document does not count in the loss, in another document than position t. The first k tokens of an
answer are not counted.

Shapes: A micro-batches, B sequences, T tokens, K modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.data.samples import IGNORE

BEYOND = 0
"""The token that is read beyond the end of a sequence. No target depends on it."""


def look_ahead(tokens_ABT: Tensor, targets_ABT: Tensor, n_modules: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that the modules read, (A, K, B, T), and the targets of the model and of each module, (A, 1
    + K, B, T). T is the length of whole sequences, because a module reads the first tokens of the next cp rank."""
    ahead, targets = [], [targets_ABT]
    for k in range(1, n_modules + 1):
        ahead.append(F.pad(tokens_ABT[..., k:], (0, k), value=BEYOND))
        there_ABT = F.pad(targets_ABT[..., k:], (0, k), value=IGNORE)
        targets.append(there_ABT.where(targets[-1] != IGNORE, IGNORE))
    return torch.stack(ahead, 1), torch.stack(targets, 1)
