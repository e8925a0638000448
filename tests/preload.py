"""What the server that ranks are forked from imports, once; no autograd may run here."""

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.optim  # noqa: F401

import shardloom.train.loop  # noqa: F401
import tests.train.worlds  # noqa: F401
