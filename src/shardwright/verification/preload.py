"""What the server that ranks are forked from imports, once; no autograd may run here."""

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim

import shardwright.verification.rank
import shardwright.verification.reference  # noqa: F401
from shardwright.model.random import normal

# The table of normal numbers is made once, here, and not by every rank: 0.1 s of CPU.
normal(0, "", (1,), (0,), (1,), 1.0, torch.float32)
