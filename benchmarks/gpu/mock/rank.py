"""What a rank of a run does differently on the mock; a run file names this file under `extensions`.

- Ranks of ep exchange equally many rows: the counts that kernels would have computed are not there.
- The logged loss, gradient norm, metrics of pairs and load of experts are 1: memory that kernels would have written may
  hold any number, and a record of a run refuses some. Experts are placed by loads that are equal on all ranks.
- Sampled tokens are the first of the vocabulary, and sums of evaluation are 1, for the same reason.
- The machine may have less memory than a run keeps on the host: nothing touches most of it.
- Once a step of the same kind has warmed up, steps may neither wait for the device nor copy from or to memory of the
  host that is not pinned. `MOCK_MAY_WAIT=1` is for runs that are documented to read a value back in each step.
"""

import ctypes
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.generation.sampling import Sampling
from shardwright.parallel import expert
from shardwright.parallel.model import ExpertLoad
from shardwright.parallel.preference import METRICS
from shardwright.system.processes import UsableMemory
from shardwright.system.torch_private import flight_record
from shardwright.training import numbers, settle, weights
from shardwright.training.expert_places import PlaceExperts
from shardwright.training.forward_backward import ForwardBackward
from shardwright.training.resilience.finite import FiniteCheck
from shardwright.training.step import StepResult, Trainer

WARM_UP = 2
"""Steps that may wait: the allocators, the compiler and the optimizer prepare what later steps use."""


def equal_counts(rows_2n: Tensor, n_rows: int) -> list[list[int]]:
    """In the place of `expert.read_counts`: as many rows to and from each rank, and the rest dropped."""
    n = rows_2n.shape[1]
    return [[n_rows // n] * n, [n_rows // n] * n]


# The ranks' functions hold on to `read_counts` itself, so what it does is replaced and not the name.
expert.read_counts.__code__ = equal_counts.__code__

_choose, _evaluation_sums = Sampling.choose, ForwardBackward.evaluation_sums
_numbers, _expert_numbers = numbers.LogNumbers.numbers, numbers.expert_numbers
_tokens_by_expert, _note = numbers.tokens_by_expert, FiniteCheck.note
_place = PlaceExperts._place


def choose_first(self: Sampling, *args: Any) -> Tensor:
    """The first token of the vocabulary for each row."""
    return torch.zeros_like(_choose(self, *args))


def loss_of_one(self: ForwardBackward, *args: Any) -> Tensor:
    """A loss of 1 for one target token."""
    return torch.ones_like(_evaluation_sums(self, *args), device="cpu")


def numbers_of_ones(self: numbers.LogNumbers, *args: Any) -> dict[str, Any]:
    """The numbers of a logged step, whose loss, norm and metrics of pairs are 1."""
    logged = _numbers(self, *args)
    computed = {"loss", "grad_norm", *METRICS}
    return {name: 1.0 if name in computed else value for name, value in logged.items()}


def ones(load: ExpertLoad) -> ExpertLoad:
    """The load of experts that are all picked by one token."""
    return ExpertLoad(*(torch.ones_like(each) for each in load))


def equal_load(load: ExpertLoad, *args: Any) -> dict[str, Any]:
    """The numbers of experts with equal loads."""
    return _expert_numbers(ones(load), *args)


def equal_tokens(load: ExpertLoad, *args: Any) -> list[list[int]]:
    """The tokens of experts with equal loads."""
    return _tokens_by_expert(ones(load), *args)


def note_ones(self: FiniteCheck, step: int, samples: Any, result: StepResult, overflowed: bool) -> None:
    """Note a step whose loss and norm are 1."""
    ones = {name: torch.ones_like(getattr(result, name), device="cpu") for name in ("loss_part", "gradient_norm")}
    _note(self, step, samples, replace(result, **ones), overflowed)


def place_by_step(self: PlaceExperts, step: int, loads: list[list[int]]) -> None:
    """Place experts by loads that are equal on all ranks and change with the step. Only experts of the first layer
    move, so that a pipeline has a stage without messages."""
    moving = [1 + (7 * step + 3 * expert) % 11 for expert in range(len(loads[0]))]
    _place(self, step, [moving, *([1] * len(moving) for _ in loads[1:])])


Sampling.choose = choose_first  # type: ignore[assignment,method-assign]
ForwardBackward.evaluation_sums = loss_of_one  # type: ignore[assignment,method-assign]
PlaceExperts._place = place_by_step  # type: ignore[method-assign]
FiniteCheck.note = note_ones  # type: ignore[method-assign]
numbers.LogNumbers.numbers = numbers_of_ones  # type: ignore[assignment,method-assign]
numbers.expert_numbers = equal_load  # type: ignore[assignment]
numbers.tokens_by_expert = equal_tokens  # type: ignore[assignment]
weights.count_not_finite = lambda tensor: 0
settle.machine_memory = lambda: UsableMemory(2**60)

_step = Trainer.step


def step_without_waiting(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """A step that raises where it waits for the device."""
    mock = ctypes.CDLL(None)
    done = self.__dict__["mock_steps"] = self.__dict__.get("mock_steps", 0) + 1
    if done <= WARM_UP or os.environ.get("MOCK_MAY_WAIT"):
        return _step(self, *args, **kwargs)
    before = mock.mock_pageable_copies()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = _step(self, *args, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if done == WARM_UP + 1 and dist.get_world_size() > 1:
        recorded = {entry["profiling_name"].partition(":")[0] for entry in flight_record()}
        if "nccl" not in recorded:
            raise RuntimeError(f"the monitor of hanging ranks sees collectives of {recorded} alone")
    copies = mock.mock_pageable_copies() - before
    if copies:
        raise RuntimeError(f"step {done} copied {copies} times from or to memory of the host that is not pinned")
    return result


Trainer.step = step_without_waiting  # type: ignore[method-assign]
