"""What the server that ranks are forked from imports, once; no autograd may run here."""

import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import torch.nn.parallel  # noqa: F401
import torch.optim  # noqa: F401

import shardloom.train.loop  # noqa: F401
import tests.train.worlds  # noqa: F401
