"""Proves what tensor and sequence parallelism send and keep in one layer, against the formulas in parallel/tensor.py.

What they compute is proven by tests/verification. On gloo, worlds of 2 and 4, float64.

B, T, D, F as in the model; n ranks; H C and K C the widths of queries and of keys or values.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.model.sections import LatentAttentionSpec
from shardwright.model.spec import ModelSpec
from shardwright.parallel.apply import apply
from shardwright.parallel.loss import bound, loss_sum
from shardwright.parallel.model import ParallelModel
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.traffic import Traffic
from tests.training.worlds import SPEC

WIDE = replace(SPEC, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, d_ffn=48, vocab_size=33)
B, T, ELEMENT = 2, 8, 8
X = B * T * WIDE.d_model * ELEMENT


LATENT = LatentAttentionSpec(q_rank=20, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8)
WITH_LATENT = replace(WIDE, n_kv_heads=4, latent_attention=LATENT)
LATENT_X = B * T * ELEMENT * (LATENT.q_rank + LATENT.kv_rank)
KEY_X = B * T * ELEMENT * LATENT.rope_dim


def built(layout: Layout, n_layers: int, wide: ModelSpec = WIDE) -> tuple[ParallelModel, Tensor]:
    spec = replace(wide, n_layers=n_layers)
    model = apply(spec, layout, torch.device("cpu"), seed=1, param_dtype=torch.float64, compute_dtype=torch.float64)
    tokens = torch.randint(spec.vocab_size, (B, T), generator=torch.Generator().manual_seed(0))
    return model, tokens


def traffic_of_the_passes(layout: Layout, n_layers: int, wide: ModelSpec = WIDE) -> list[dict[str, tuple[int, int]]]:
    """Calls and bytes of a forward and of a backward pass, without the loss."""
    model, tokens = built(layout, n_layers, wide)
    with Traffic() as forward:
        logits = model.module(tokens)
    assert model.groups.tp is not None
    loss = loss_sum(bound(model.vocabulary, -100, model.groups.tp, compiled=False), logits, tokens)
    with Traffic() as backward:
        loss.backward()
    return [{name: (t.calls[name], t.bytes[name]) for name in t.calls} for t in (forward, backward)]


def layer_traffic(few: dict[str, tuple[int, int]], many: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {name: (many[name][0] - few.get(name, (0, 0))[0], many[name][1] - few.get(name, (0, 0))[1]) for name in many}


# gloo's reduce-scatter is an all-to-all and a sum; see parallel/collectives.py.
REDUCE_SCATTER = "alltoall_base"


@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        (Layout(tp=2, sequence_parallel=False), {"allreduce": (2, 2 * X)}, {"allreduce": (2, 2 * X)}),
        pytest.param(
            Layout(tp=4, sequence_parallel=False), {"allreduce": (2, 2 * X)}, {"allreduce": (2, 2 * X)}, marks=prove
        ),
        (
            Layout(tp=2, sequence_parallel=True),
            {"allgather_base": (2, 2 * X), REDUCE_SCATTER: (2, 2 * X)},
            {"allgather_base": (4, 4 * X), REDUCE_SCATTER: (2, 2 * X)},
        ),
        pytest.param(
            Layout(tp=4, sequence_parallel=True),
            {"allgather_base": (2, 2 * X), REDUCE_SCATTER: (2, 2 * X)},
            {"allgather_base": (4, 4 * X), REDUCE_SCATTER: (2, 2 * X)},
            marks=prove,
        ),
    ],
    ids=["tp2", "tp4", "tp2 sp", "tp4 sp"],
)
def test_a_layer_sends_what_the_table_says(layout, forward, backward):
    two, three = (run_ranks(traffic_of_the_passes, layout.world_size, layout, n)[0] for n in (2, 3))
    assert layer_traffic(two[0], three[0]) == forward
    assert layer_traffic(two[1], three[1]) == backward


@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        (Layout(tp=2, sequence_parallel=False), {"allreduce": (2, 2 * X)}, {"allreduce": (4, X + LATENT_X + KEY_X)}),
        (
            Layout(tp=2, sequence_parallel=True),
            {"allgather_base": (4, X + LATENT_X + KEY_X), REDUCE_SCATTER: (2, 2 * X)},
            {"allgather_base": (5, 3 * X + LATENT_X), REDUCE_SCATTER: (4, X + LATENT_X + KEY_X)},
        ),
    ],
    ids=["tp2", "tp2 sp"],
)
def test_latent_attention_sends_latent_vectors_and_one_key_in_the_place_of_what_it_reads(layout, forward, backward):
    two, three = (run_ranks(traffic_of_the_passes, 2, layout, n, WITH_LATENT)[0] for n in (2, 3))
    assert layer_traffic(two[0], three[0]) == forward
    assert layer_traffic(two[1], three[1]) == backward


def test_embedding_and_head_send_one_sum_each():
    forward, backward = run_ranks(traffic_of_the_passes, 2, Layout(tp=2, sequence_parallel=False), 2)[0]
    assert forward == {"allreduce": (1 + 2 * 2, (1 + 2 * 2) * X)}
    assert backward == {"allreduce": (1 + 2 * 2, (1 + 2 * 2) * X)}


def saved_bytes(layout: Layout, n_layers: int) -> int:
    """Bytes of activations that the forward pass keeps for the backward pass, each storage once."""
    model, tokens = built(layout, n_layers)
    parameters = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, keep):
        logits = model.module(tokens)
    del logits
    return sum(storages.values())


def kept_bytes_of_one_layer(layout: Layout) -> float:
    """What parallel/tensor.py's split of a layer keeps for the backward pass, in bytes.

    Of the residual stream and its two norms, 6 D + 2 a token: each norm's input, that over its root mean square, the
    mean square's root, and what the products read. Of the heads, 2 H C + 2 K C + H: queries, keys, values, the output
    and its log-sum-exp. Of the network, 4 F: gate, up, the gate's activation and the product. Korthikanti et al., arXiv
    2205.05198, equations 2 and 4, count the same for GPT: heads and network are cut by tp, the rest only with sequence
    parallelism.
    """
    t, s = layout.tp, WIDE
    residual = 6 * s.d_model + 2
    heads = (2 * s.n_heads * s.head_dim + s.n_heads + 4 * s.d_ffn) / t
    kv_heads = 2 * max(s.n_kv_heads / t, 1) * s.head_dim
    return B * T * ELEMENT * (residual / (t if layout.token_shards else 1) + heads + kv_heads)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tp", rest_prove([1, 2, 4], 2))
def test_a_layer_keeps_what_the_formula_says(tp: int, sequence_parallel: bool):
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    two, three = (run_ranks(saved_bytes, tp, layout, n)[0] for n in (2, 3))
    assert three - two == kept_bytes_of_one_layer(layout)


def logits_and_loss(layout: Layout) -> tuple[Tensor, float, Tensor]:
    """This rank's logits, the loss summed over targets of which some do not count, and the gradient of the logits."""
    model, tokens = built(layout, 2)
    targets = tokens.roll(1, 1).masked_fill(tokens % 3 == 0, -100)
    logits = model.module(tokens)
    logits.retain_grad()
    assert model.groups.tp is not None
    before = logits.detach().clone()
    loss = loss_sum(bound(model.vocabulary, -100, model.groups.tp, compiled=False), logits, targets)
    loss.backward()
    assert logits.grad is not None
    return before, float(loss), logits.grad


@pytest.mark.parametrize("tp", [2, 4])
def test_logits_loss_and_their_gradient_are_those_of_one_device_though_never_gathered(tp: int):
    parts, losses, gradients = zip(*run_ranks(logits_and_loss, tp, Layout(tp=tp, sequence_parallel=False)), strict=True)
    logits, loss, gradient = run_ranks(one_device, 1)[0]
    assert sum(part.shape[-1] for part in parts) == WIDE.vocab_size, "33 columns, and none that only fills up"
    torch.testing.assert_close(torch.cat(parts, -1), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(gradients, -1), gradient, rtol=1e-12, atol=1e-12)
    assert losses == pytest.approx([loss] * tp, rel=1e-13)


def one_device() -> tuple[Tensor, float, Tensor]:
    model, tokens = built(Layout(), 2)
    targets = tokens.roll(1, 1).masked_fill(tokens % 3 == 0, -100)
    logits = model.module(tokens)
    logits.retain_grad()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    assert logits.grad is not None
    return logits.detach(), float(loss), logits.grad
