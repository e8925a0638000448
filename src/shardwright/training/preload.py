"""What the server imports that the ranks of a run are forked from; no autograd may run here, nor any call of CUDA."""

import os
import signal
from contextlib import suppress

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim

import shardwright.training.run
import shardwright.training.worker  # noqa: F401
from shardwright.model.random import normal

# The table of normal numbers is made once, here, and not by every rank: 0.1 s of CPU.
normal(0, "", (1,), (0,), (1,), 1.0, torch.float32)

# What ends a run comes to the process that started it, which tells the ranks. A terminal that is closed, or a batch
# system at the end of a job's time, sends it to all processes: the server has to outlive the ranks that finish a step.
with suppress(PermissionError):  # it leads a session already
    os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
