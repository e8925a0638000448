"""Proves that recomputed parts change nothing but what is kept: the same loss and gradients, each part computed once in
the backward pass, routing decided once, and the benchmark's model with half of its activations."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from shardwright.layout.keys import KEYS, RECOMPUTE_MODULES
from shardwright.layout.layout import Layout
from shardwright.model import matmul
from shardwright.model.fp8 import use_fp8
from shardwright.model.moe import Router
from shardwright.model.norm import RMSNorm
from shardwright.model.number_formats import Fp8
from shardwright.model.presets import resolve
from shardwright.model.recompute import _recomputing, checkpointed, part, recompute_parts
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.apply import _run_blocks
from tests.marks import prove
from tests.model.kept import bytes_kept, saved_bytes

DEFAULT = KEYS["recompute_modules"].default
PLAIN = replace(resolve("debug"), n_layers=2, vocab_size=61)
LATENT = LatentAttentionSpec(kv_rank=32, q_rank=48, nope_dim=16, rope_dim=8, v_dim=12)
SPECS = {
    "llama": PLAIN,
    "layernorm": replace(PLAIN, norm="layernorm"),
    "qwen": replace(PLAIN, qk_norm=True),
    "gpt": replace(PLAIN, norm="layernorm", activation="gelu_tanh", positions="learned", bias=True, dropout=0.1),
    "latent": replace(PLAIN, n_kv_heads=4, latent_attention=LATENT),
    "mixture": replace(
        PLAIN, moe=MoESpec(n_experts=4, top_k=2, d_ffn=32, n_shared=1, capacity_factor=1.0, aux_loss=0.1)
    ),
}


def model_of(spec: ModelSpec, parts: tuple[str, ...] = (), dtype: torch.dtype = torch.float64) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(spec).to(dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    for block in model.layers.values():
        if parts:
            recompute_parts(block, parts)
    return model


def step(model: Transformer) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by the names of the parameters."""
    tokens_BT = torch.arange(2 * 16).view(2, 16) * 7 % model.spec.vocab_size
    keys_B = torch.arange(2, dtype=torch.int64)
    loss = model(tokens_BT, torch.arange(16), keys_B if model.spec.dropout else None).square().mean()
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("parts", [DEFAULT, RECOMPUTE_MODULES], ids=["default", "all"])
@pytest.mark.parametrize("name", SPECS)
def test_the_loss_is_equal_bit_for_bit_and_gradients_are_up_to_the_order_of_a_sum(name: str, parts: tuple[str, ...]):
    loss, gradients = step(model_of(SPECS[name]))
    again, found = step(model_of(SPECS[name], parts))
    assert torch.equal(again, loss)
    assert found.keys() == gradients.keys()
    exact = name in ("layernorm", "gpt")  # On a CPU, RMSNorm adds two gradients, in another order.
    for each, gradient in gradients.items():
        assert torch.equal(found[each], gradient) if exact else torch.allclose(found[each], gradient, 1e-12, 1e-14)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the matmuls, choices of experts, activations and norms that run."""
    ran: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            ran[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "forward", counted("matmul", matmul.forward))
        patch.setattr(Router, "pick", counted("routing", Router.pick))
        patch.setattr(torch.nn.functional, "silu", counted("silu", torch.nn.functional.silu))
        patch.setattr(RMSNorm, "forward", counted("norm", RMSNorm.forward))
        yield ran


def test_matmuls_and_routing_run_once_and_each_part_once_more():
    with counting() as ran:
        _runs_once(ran)


def _runs_once(ran: Counter[str]) -> None:
    step(model_of(SPECS["mixture"]))
    once = ran.copy()
    ran.clear()
    step(model_of(SPECS["mixture"], DEFAULT))
    last = 1  # the norm after the last layer
    expected = {"matmul": once["matmul"], "routing": once["routing"]}
    assert ran == expected | {"silu": 2 * once["silu"], "norm": 2 * once["norm"] - last}
    ran.clear()
    step(model_of(SPECS["mixture"], RECOMPUTE_MODULES))
    first_of_experts = 2 * PLAIN.n_layers  # gate and up
    assert ran["matmul"] == once["matmul"] + first_of_experts
    assert ran["routing"] == once["routing"] == PLAIN.n_layers


def test_a_block_that_runs_again_as_a_whole_picks_experts_once():
    with counting() as ran:
        _picks_once(ran)


def _picks_once(ran: Counter[str]) -> None:
    loss, gradients = step(model_of(SPECS["mixture"]))
    assert ran["routing"] == PLAIN.n_layers
    n_matmuls = ran["matmul"]
    ran.clear()
    model = model_of(SPECS["mixture"])
    for block in model.layers.values():
        block.forward = checkpointed(block.forward, decides=True)
    again, found = step(model)
    assert ran["routing"] == PLAIN.n_layers
    assert ran["matmul"] > n_matmuls, "all else runs again"
    assert torch.equal(again, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


ALL_PARTS = Layout(recompute="selective", recompute_modules=RECOMPUTE_MODULES)


@prove
@pytest.mark.parametrize("layout", [Layout(recompute="selective"), ALL_PARTS, Layout(recompute="full")], ids=str)
@pytest.mark.parametrize("name", ["qwen", "gpt", "latent", "mixture", "fp8"])
def test_compiled_blocks_that_recompute_are_one_region_for_all_layers_and_keep_as_much(name: str, layout: Layout):
    compiled, plain = (_running(name, layout, compiles) for compiles in (True, False))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    expected, found = step(plain), step(compiled)
    assert counters["stats"]["unique_graphs"] == 1, "two layers, one graph"
    assert not counters["graph_break"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    tokens_BT, keys_B = torch.zeros(2, 16, dtype=torch.int64), torch.arange(2) if name == "gpt" else None
    kept, most = (bytes_kept(each, partial(each, tokens_BT, torch.arange(16), keys_B)) for each in (compiled, plain))
    torch._dynamo.reset()
    # The partitioner keeps what stands between two parts, as rotation and attention, and with attention that runs again
    # the state of the random generator, which dropout would use.
    if layout != ALL_PARTS:
        assert kept <= 1.02 * most + torch.get_rng_state().nbytes * PLAIN.n_layers


def _running(name: str, layout: Layout, compiled: bool) -> Transformer:
    """The model with its blocks as `apply` has them."""
    model = model_of(PLAIN if name == "fp8" else SPECS[name])
    if name == "fp8":
        use_fp8(model, PLAIN, Fp8("tensorwise"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
        _run_blocks(list(model.layers.values()), layout, None, compiled, graphs=False)
    return model


@prove
@pytest.mark.parametrize("name", ["llama", "mixture"])
def test_a_block_that_runs_again_as_a_whole_is_compiled_whole_and_picks_experts_once(name: str):
    torch._dynamo.reset()
    expected = step(model_of(SPECS[name]))
    ran: dict[str, set[Any]] = {"forward": set(), "backward": set()}

    def noting(which: str) -> Callable[..., Any]:
        def compiled(graph: torch.fx.GraphModule, _: Any) -> Any:
            ran[which] |= {node.target for node in graph.graph.nodes}
            return make_boxed_func(graph.forward)

        return compiled

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward"), partition_fn=partition)
    model = model_of(SPECS[name])
    for block in model.layers.values():
        block.forward = checkpointed(block.forward, decides=name == "mixture", compiled=True)
        block.compile(backend=backend, fullgraph=True)
    loss, gradients = step(model)
    torch._dynamo.reset()
    assert torch.ops.aten.silu.default in ran["backward"], "it is computed again"
    picking = {which: torch.ops.aten.topk.default in targets for which, targets in ran.items()}
    assert picking == {"forward": name == "mixture", "backward": False}
    torch.testing.assert_close((loss, gradients), expected, rtol=1e-12, atol=1e-14)


def test_the_model_of_the_benchmark_keeps_at_most_55_percent():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import plain

    spec = replace(
        resolve("debug"), n_layers=1, d_model=plain.WIDTH, d_ffn=plain.FFN, n_heads=plain.HEADS,
        n_kv_heads=plain.KV_HEADS, head_dim=plain.HEAD_DIM, vocab_size=61, tied_embedding=False,
    )  # fmt: skip
    sys.modules.pop("plain")

    def layer_bytes(parts: tuple[str, ...]) -> int:
        few, many = (saved_bytes(replace(spec, n_layers=n), torch.float32, parts) for n in (1, 2))
        return many - few

    assert layer_bytes(DEFAULT) <= 0.55 * layer_bytes(())


def test_a_view_of_an_output_is_computed_again_and_an_output_changed_in_place_is_kept():
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with _recomputing(frozenset({"norms"})):
        y = part("norms", lambda x: x.exp(), x)
        z = (y.T[1:] * torch.ones(2, 2, requires_grad=True)).sum()
    z.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.detach().exp() * torch.tensor([0.0, 1.0, 1.0]))
    with _recomputing(frozenset({"norms"})):
        w = torch.ones(2, 3, requires_grad=True)
        y = part("norms", lambda x: x.exp(), x.detach().requires_grad_())
        with torch.no_grad():
            y.mul_(2)
        (y * w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, 2 * x.detach().exp())


def test_a_second_backward_pass_through_the_same_graph_says_so():
    x = torch.ones(3, requires_grad=True)
    with _recomputing(frozenset({"norms"})):
        loss = (part("norms", lambda x: x.exp(), x) * torch.ones(3, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once a graph"):
        loss.backward()
