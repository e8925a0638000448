"""What the server that ranks are forked from imports, once; no autograd may run here."""

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim  # noqa: F401

import shardwright.verify.rank
import shardwright.verify.reference  # noqa: F401
