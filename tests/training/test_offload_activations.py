"""Proves that with activations of layers in the memory of the host a run computes the same bits, what is copied and
what stays on the device, and that each tensor comes back as it was saved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.parallel.offload import ActivationsOnHost
from shardwright.system.errors import InputError
from shardwright.system.processes import UsableMemory
from shardwright.training import settle
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.traffic import ReportedCopies
from tests.training.checkpoints import equal
from tests.training.test_offload_host import trained
from tests.training.worlds import OPTIMIZER

ON_HOST = {"offload_activations": "cpu"}
LAYOUTS = {
    "one rank": Layout(),
    "parts recomputed": Layout(recompute="selective", recompute_modules=("norms", "activation", "rope", "attention")),
    "layers recomputed, chunked loss": Layout(dp_shard=2, zero=3, recompute="full", loss_chunk_tokens=5),
    "tp, ep, zero 3": Layout(dp_shard=2, tp=2, zero=3, ep=4),
    "pp, split backward": Layout(pp=2, pp_schedule="zb-v", recompute="selective"),
    "pp, cp, everything on the host": Layout(
        pp=2, cp=2, zero=3, zero_pp_gather="microbatch", offload_optimizer="cpu", offload_parameters="cpu"
    ),
}


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "layers recomputed, chunked loss"))
def test_activations_on_the_host_give_the_bits_of_activations_on_the_device(name: str):
    layout = LAYOUTS[name]
    expected = run_ranks(trained, layout.world_size, layout, OPTIMIZER, "float64")
    found = run_ranks(trained, layout.world_size, layout.changed(**ON_HOST), OPTIMIZER, "float64")
    assert all(equal(*each) for each in zip(found, expected, strict=True))


class Copies(ActivationsOnHost):
    """Counts bytes that are copied to the host and back."""

    def __init__(self, min_bytes: int = 1) -> None:
        reported = ReportedCopies()
        super().__init__(torch.device("cpu"), min_bytes, reported)
        self.out, self.back = reported.out, reported.back


class Layers(nn.Module):
    """Layers that compute a function of their input and a weight."""

    def __init__(self, function: Callable[..., Tensor], n_layers: int, store: ActivationsOnHost | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(function, 1 + number) for number in range(n_layers))
        for number, layer in enumerate(self.layers if store else ()):
            assert store is not None
            store.wrap(layer, first=number == 0, keeps=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, function: Callable[..., Tensor], number: int) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.arange(64.0, dtype=torch.float64).cos() / number)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w)


def gradients(function: Callable[..., Tensor], store: ActivationsOnHost | None, n_layers: int = 3) -> list[Tensor]:
    """Of the input and the weights, of the sum of the squares."""
    model, x = Layers(function, n_layers, store), torch.arange(64.0, dtype=torch.float64).sin().requires_grad_()
    model(x * 1).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(layer.w.grad for layer in model.layers)]


def same(function: Callable[..., Tensor], plain: Callable[..., Tensor] | None = None) -> Copies:
    store = Copies()
    expected = gradients(plain or function, None)
    assert all(map(torch.equal, gradients(function, store), expected))
    return store


def test_a_tensor_that_several_operations_save_is_copied_once_and_weights_are_not():
    store = same(lambda x, w: x * w + x.sin() * x.cos())
    # The input, its sine and its cosine, of three layers; the first layer's input is no parameter.
    assert store.out == [512] * 9
    assert store.back == [512] * 6, "those of the last layer were still on the device"


def test_a_view_comes_back_as_the_view_that_was_saved():
    same(lambda x, w: torch.cat([x[32:] * w[:32], x.view(8, 8).T[:4].flatten() * x[:32]]))


def test_a_tensor_that_is_changed_in_place_comes_back_as_it_was_when_it_was_saved():
    def changed(x: Tensor, w: Tensor) -> Tensor:
        y = x + 1
        first = y * w
        y.mul_(2)
        return first + y * w

    def plain(x: Tensor, w: Tensor) -> Tensor:
        y = x + 1
        first = y * w
        return first + (y * 2) * w

    same(changed, plain)


def test_small_tensors_and_the_input_of_a_stage_stay():
    store = Copies(min_bytes=513)
    gradients(lambda x, w: x * w, store)
    assert store.out == []
    store = Copies()
    model = Layers(lambda x, w: x * w, 2, store)
    model(torch.ones(64, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert store.out == [512], "the input of the second layer"


def test_the_device_has_the_activations_of_two_layers_at_a_time():
    store, held, n_back = Copies(), [], []

    def noted(x: Tensor, w: Tensor) -> Tensor:
        held.append(on_device())
        y = x * w
        y.register_hook(lambda gradient: n_back.append(on_device()))
        return y.sin()

    def on_device() -> int:
        layer, n_found = store._layer, 0
        while layer is not None:
            n_found += any(copy.on_device is not None for copy in layer.alive())
            layer = layer.before
        return n_found

    model = Layers(noted, 6, store)
    found = model(torch.ones(64, dtype=torch.float64) * 2)
    assert held == [0, 1, 1, 1, 1, 1], "of the layers before"
    found.sum().backward()
    assert n_back == [2, 2, 2, 2, 2, 1], "a layer and the one before it"
    assert store.out == store.back + [512] * 2


def test_of_the_layer_ahead_the_largest_activations_come_first_and_of_the_layer_itself_the_last_saved():
    def saved(x: Tensor, w: Tensor) -> Tensor:
        small, large = x[:8] + 0, torch.cat([x, x])
        return x * w + (small * small).sum() + (large * large)[:64]

    store = same(saved)
    assert store.out == [512, 64, 1024] * 3
    assert store.back == [1024, 512, 64] * 2, "ahead"
    store = Copies()
    model = Layers(saved, 3, store)
    x = torch.arange(64.0, dtype=torch.float64).sin().requires_grad_()
    first, second = model(x * 1).sum(), model(x * 1).sum()
    first.backward()  # its last layer was not ahead of anything
    assert store.back == [1024, 64, 512, *[1024, 512, 64] * 2]
    second.backward()


def refused_on_each(machines: list[tuple[int, bool]]) -> list[list[str]]:
    """What a rank says of machines that have so much memory, or on which its control group allows so much."""
    return [refused(*machine) for machine in machines]


def refused(machine_bytes: int, limited: bool) -> list[str]:
    settle.machine_memory = lambda: UsableMemory(machine_bytes, "/sys/fs/cgroup/memory.max" if limited else "")
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 8, "global_batch": 8}}
    try:
        settle.require_host_memory(parse(run | {"layout": {"dp_shard": 2, "offload_optimizer": "cpu", **ON_HOST}}))
    except InputError as error:
        return error.problems
    return []


def test_a_machine_without_room_for_what_its_ranks_keep_there_is_refused_with_the_sums_and_the_way_out():
    for large, small, allowed in run_ranks(refused_on_each, 2, [(2**40, False), (2**10, False), (2**10, True)]):
        assert large == []
        machines = (small, "the machine has 1"), (allowed, "the machine allows 1 KiB (/sys/fs/cgroup/memory")
        for (problem,), what in machines:
            assert "2 ranks on" in problem
            for part in ("of copies of weights", "of optimizer states", "of activations", what):
                assert part in problem
            assert "layout.offload_optimizer='none' or 'disk'" in problem
