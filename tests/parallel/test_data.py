"""Proves when ZeRO-0 sums gradients: in the last backward pass of a step, a bucket as soon as it is complete. What all
stages hold and send: tests/training/test_memory_and_traffic.py, test_stage_data.py."""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.parallel import data
from shardwright.parallel.data import MasterWeights, Replicated
from tests.distributed import run_ranks

WIDTH, LAYERS, BATCH = 8, 4, 3


class Sends(TorchDispatchMode):
    """Writes down the sizes of all-reduces in the order in which they begin."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.events.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


def events_of_a_step(split: bool) -> tuple[list[Any], bool]:
    """Layers whose gradient was added, and elements of buckets that were sent, in order; whether gradients are sums
    over the ranks. Two micro-batches; `split`: gradients come in the second half of a backward pass."""
    with patch.object(data, "BUCKET_BYTES", 2 * 8 * WIDTH * WIDTH):  # two layers
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).double()
        for layer in model:
            nn.init.eye_(layer.weight)
        engine = Replicated(model.parameters(), torch.distributed.group.WORLD)
    events: list[Any] = []
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"layer {i}"))  # type: ignore[misc]
    x = torch.full((BATCH, WIDTH), 1.0 + torch.distributed.get_rank(), dtype=torch.float64)
    for last in (False, True):
        loss = model(x).sum()
        with Sends(events):
            engine.before_backward(split, last)
            loss.backward()
            events.append("end of pass")
            engine.after_gradients(split, last)
    engine.end_step()
    # Of y = x, dL/dW has BATCH x x in every element: x is 1 on one rank and 2 on the other, in each of 2 micro-batches.
    summed = all(bool((layer.weight.grad == 2 * BATCH * (1 + 2)).all()) for layer in model)
    return events, summed


def test_a_bucket_is_sent_in_the_last_backward_pass_as_soon_as_its_gradients_are_there():
    bucket = 2 * WIDTH * WIDTH
    silent = ["layer 3", "layer 2", "layer 1", "layer 0", "end of pass"]
    for events, summed in run_ranks(events_of_a_step, 2, False):
        assert events[:5] == silent
        # Hooks run in the order of registration: the engine's before the test's.
        assert events[5:] == ["layer 3", bucket, "layer 2", "layer 1", bucket, "layer 0", "end of pass"]
        assert summed


def test_where_gradients_come_in_a_second_half_buckets_are_sent_after_it():
    bucket = 2 * WIDTH * WIDTH
    for events, summed in run_ranks(events_of_a_step, 2, True):
        assert events[-3:] == ["end of pass", bucket, bucket]
        assert summed


def test_the_gradients_of_copies_are_added_to_their_master_weights():
    """Of three micro-batches, each with more gradients than are converted at once and with some that still wait when it
    ends."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    masters = dict(model.named_parameters())
    engine = MasterWeights(model, torch.bfloat16)
    copies = dict(model.named_parameters())
    expected = {name: torch.zeros_like(master) for name, master in masters.items()}
    with patch.object(data, "CONVERTED_BYTES", 2 * copies["0.weight"].nbytes + 1):
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
            gradients = torch.autograd.grad(model(x).square().sum(), list(copies.values()))
            for name, gradient in zip(copies, gradients, strict=True):
                expected[name] += gradient.float()
            model(x).square().sum().backward()
            engine.after_gradients(split=False, last=seed == 2)
    for name, master in masters.items():
        assert master.grad is not None
        assert torch.equal(master.grad, expected[name]), name
        assert copies[name].grad is None
