"""Modules imported by the server from which ranks are forked. No autograd and no CUDA call may run here."""

import signal

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim

import shardwright.training.run
import shardwright.training.worker  # noqa: F401
from shardwright.model.random import normal

# The table of normal numbers is computed once here instead of on every rank: saves 0.1 s of CPU.
normal(0, "", (1,), (0,), (1,), 1.0, torch.float32)

# Signals that end a run go to the process that started it, which forwards them to the ranks. A batch system at the end
# of a job's time sends them to all processes: the server must outlive ranks that finish a step.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
