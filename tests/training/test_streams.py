"""Proves that copies on streams of their own on a GPU wait for what they read, and that who reads them waits for them:
without a GPU, by the order of operations alone (tests/streams.py). On a GPU `benchmarks/gpu` runs the same code."""

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.hugging_face.writer import TensorToWrite
from shardwright.layout.layout import Layout
from shardwright.parallel.offload import ActivationsOnHost
from shardwright.training.checkpoint.plan import CheckpointPlan, TensorPiece
from shardwright.training.checkpoint.saver import Snapshot
from shardwright.training.offload.states import Host
from shardwright.training.optimizer import build_optimizer
from shardwright.training.resilience.spikes import SpikeGuard
from tests.streams import DEVICE, Streams, watched
from tests.training.bugs.bug import EVEN
from tests.training.test_offload_activations import Layers
from tests.training.test_optimizers import whole_parameters
from tests.training.test_spikes import SKIP
from tests.training.worlds import OPTIMIZER

CUDA = torch.device("cuda")


def host_waits_for(streams: Streams, number: int) -> bool:
    """Whether the host has waited for an operation of the stream that training computes on."""
    return streams.clocks[0].get(streams.default.number, 0) >= number


def in_another_thread(streams: Streams, act: Callable[[], None]) -> None:
    def run() -> None:
        with watched(streams):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("names", [("model/w",), ("model/w", "compression/error/w")], ids=["weights", "compressed"])
def test_the_copy_for_a_checkpoint_waits_for_the_step_before_it_and_for_nothing_else(names):
    check_snapshot(*names)


def check_snapshot(*names: str) -> None:
    streams = Streams()
    pieces = [TensorPiece(name, (0,), TensorToWrite(name, "float32", (4,))) for name in names]
    host: Mapping[TensorPiece, Tensor] = {}

    def make() -> None:
        nonlocal host
        host = snapshot.make()
        for tensor in host.values():
            streams.host_reads(tensor)

    with watched(streams):
        tensors = {name: torch.arange(4.0) for name in names}
        streams.on_device(*tensors.values())
        snapshot = Snapshot(CheckpointPlan(pieces), CUDA)
        for tensor in tensors.values():
            tensor.add_(1)  # the step before
        snapshot.begin(tensors)
        product = tensors["model/w"] * 2  # the next forward pass
        after = streams.default.clock[streams.default.number]
        in_another_thread(streams, make)
        assert not host_waits_for(streams, after)
        snapshot.wait()
        tensors["model/w"].add_(product)  # the next update
    assert streams.races == []
    assert [tensor.tolist() for tensor in host.values()] == [[1.0, 2.0, 3.0, 4.0]] * len(names)


def test_a_step_is_judged_by_its_own_loss_and_norm_while_the_device_clips():
    streams = Streams()
    model: Any = SimpleNamespace(layout=Layout())
    with watched(streams):
        loss, norm, gradient = torch.tensor(2.0), torch.tensor(3.0), torch.ones(4)
        streams.on_device(loss, norm, gradient)
        guard = SpikeGuard(SKIP, model, CUDA)
        for _ in range(2):
            guard.start(loss.mul_(1.5), norm.mul_(0.5))
            gradient.mul_(0.5)  # clipped meanwhile
            after = streams.default.clock[streams.default.number]
            assert guard.takes()
            assert not host_waits_for(streams, after)
        streams.look_for_freed()
    assert streams.races == []
    assert (guard.state.losses, guard.state.norms) == ([3.0, 4.5], [1.5, 0.75])


def test_an_update_on_the_host_waits_for_gradients_and_the_next_pass_for_the_weights():
    streams, parameters = Streams(), whole_parameters(EVEN)
    with watched(streams):
        streams.on_device(*parameters.values())
        optimizer = build_optimizer(parameters, EVEN, OPTIMIZER, Host(2**11))
        assert len(optimizer.buckets) > 3  # type: ignore[attr-defined]
        with torch.no_grad():
            for _ in range(2):
                for parameter in parameters.values():
                    parameter.grad = parameter * 2  # forward and backward pass
                optimizer.step()
            total = sum(parameter.sum() for parameter in parameters.values())
            assert isinstance(total, Tensor)
            assert total.isfinite()
        streams.look_for_freed()
    assert streams.races == []


def test_activations_go_to_the_host_and_come_back_before_they_are_read():
    streams = Streams()
    x = torch.arange(64.0, dtype=torch.float64)

    def gradients(store: ActivationsOnHost | None) -> list[Tensor]:
        model = Layers(lambda x, w: (x * w).sin().exp() * w, 4, store)
        weights = [layer.w for layer in model.layers]
        streams.on_device(x, *(weight.detach() for weight in weights))
        model(x).sum().backward()
        return [weight.grad for weight in weights if weight.grad is not None]

    with watched(streams):
        expected, found = gradients(None), gradients(ActivationsOnHost(DEVICE, 1))
        streams.look_for_freed()
    assert streams.races == []
    assert len(found) == 4
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
