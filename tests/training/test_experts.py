"""Proves that mixtures of experts train on every kind of layout as one process does, in float64: losses, raw gradients,
parameters and the biases of routers, with experts that get no token and with one that gets all of them.

The reference has all experts on one device and the whole batch in one pass, so whatever ep, the dealing of samples or
a pipeline does to counts, balance losses or gradients would show. That copies, biases among them, have the same bits on
all ranks is a part of every comparison. Runs anywhere, on gloo.
"""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import parse
from shardwright.data.batches import Batch
from shardwright.data.samples import IGNORE
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.moe import learn_from_load, take_load
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.model import ExpertLoad
from shardwright.verification import Case, Verifier, case_of, cut
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.rank import build_trainer, local_batch
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.training.worlds import OPTIMIZER, SPEC, in_few_micro_batches

MOE = MoESpec(
    n_experts=4,
    top_k=2,
    d_ffn=16,
    n_shared=1,
    first_dense=1,
    bias_rate=0.01,
    aux_loss=0.05,
    aux_scope="batch",
    z_loss=0.01,
)
MODEL = replace(SPEC, n_layers=3, n_heads=4, n_kv_heads=2, moe=MOE)
CASE = Case(MODEL, seq_len=8, global_batch=8, seed=5, optimizer=OPTIMIZER, steps=2)

EP = Layout(dp_shard=2, zero=2, ep=2)
SP = Layout(tp=2, sequence_parallel=True, ep=2)
PP = Layout(pp=2, dp_shard=2, zero=1, ep=2)
ZERO_BUBBLE = replace(PP, pp_schedule="zb-h1")
LAYOUTS = [
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=1, ep=2),
    Layout(dp_shard=2, zero=3),
    Layout(dp_shard=2, zero=3, ep=2, recompute="full"),
    Layout(dp_shard=4, zero=2, ep=4),
    Layout(dp_shard=4, zero=3, ep=2),
    Layout(dp_replicate=2, dp_shard=2, zero=3, ep=2),
    Layout(cp=2),
    Layout(cp=2, ep=2),  # zero 0: experts dealt out, all else copied
    Layout(cp=2, cp_method="ulysses", dp_shard=2, zero=2, ep=4),
    Layout(tp=2, sequence_parallel=True),
    SP,
    Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3, ep=2),
    Layout(tp=2, sequence_parallel=True, dp_replicate=2, ep=2, recompute="full"),
    Layout(tp=2, sequence_parallel=True, cp=2, zero=1, ep=4),
    Layout(pp=2, dp_replicate=2),
    PP,
    Layout(pp=2, dp_shard=2, zero=3, ep=2, zero_pp_gather="microbatch", pp_schedule="zb-h1"),
    ZERO_BUBBLE,
    replace(ZERO_BUBBLE, recompute="full"),
    Layout(pp=2, dp_replicate=2, dp_shard=2, zero=2, ep=2, pp_schedule="zb-h1"),
]
DEEP = [
    Layout(pp=2, cp=2, ep=2, pp_schedule="zb-v"),
    Layout(pp=2, dp_shard=2, zero=2, ep=2, pp_schedule="dualpipe"),
    Layout(pp=2, tp=2, sequence_parallel=True, ep=2, pp_schedule="interleaved-1f1b", virtual_stages=2),
]
ON_EIGHT = [
    Layout(pp=2, dp_shard=2, tp=2, sequence_parallel=True, zero=3, ep=2),
    Layout(pp=2, dp_shard=2, tp=2, sequence_parallel=True, zero=1, ep=4, pp_schedule="zb-h1"),
]


def with_experts(**changes: Any) -> Case:
    return replace(CASE, spec=replace(MODEL, moe=replace(MOE, **changes)))


def check(verifier: Verifier, case: Case, layout: Layout) -> None:
    report = verifier.parity(in_few_micro_batches(case, layout), layout)
    assert report.equal, report.differing or report.worst
    # Sums of at most 64 tokens, or of two choices each, in another order, through 64 matmuls: 1.8e-12.
    assert report.worst_error < 1.8e-12, report.worst


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, SP, ZERO_BUBBLE), ids=str)
def test_experts_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, CASE, layout)


PADDED = replace(with_experts(aux_scope="sequence", capacity_factor=1.0), padded=True)
PADDED_CASES = [
    *((PADDED, layout) for layout in (EP, SP, ZERO_BUBBLE, Layout(cp=2), Layout(cp=2, cp_method="ulysses", ep=2))),
    (PADDED, Layout(tp=2, sequence_parallel=True, cp=2, zero=1, ep=4)),
    (PADDED, Layout(dp_shard=2, zero=3, ep=2, recompute="full")),
    (replace(CASE, padded=True), SP),
    (replace(PADDED, spec=replace(PADDED.spec, mtp_modules=2)), Layout(cp=2)),
    (replace(PADDED, spec=replace(PADDED.spec, mtp_modules=2)), Layout(pp=2, dp_shard=2, zero=1, ep=2)),
    (replace(PADDED, compiled=True), SP),
]


@pytest.mark.parametrize(("case", "layout"), rest_prove(PADDED_CASES, (PADDED, SP)), ids=str)
def test_experts_train_with_padding_as_one_process_does_with_sequences_without_it(
    verifier: Verifier, case: Case, layout: Layout
):
    check(verifier, case, layout)


def first_step(seq_len: int, spec: ModelSpec = PADDED.spec) -> tuple[float, ExpertLoad]:
    """Gradient norm and load of a step on sequences of 8, 1, 5 and 8 tokens, padded with token 0 to `seq_len`."""
    spec = replace(spec, max_seq_len=64)
    case = replace(PADDED, spec=spec, seq_len=seq_len, global_batch=4, micro_batch=2)
    n_real_B = torch.tensor([8, 1, 5, 8])
    tokens_BT = torch.randint(1, spec.vocab_size, (4, 9), generator=torch.Generator().manual_seed(3))
    padding_BT = torch.arange(8) >= n_real_B.unsqueeze(1)
    inputs_BT, targets_BT = (
        tokens_BT[:, :8].masked_fill(padding_BT, 0),
        tokens_BT[:, 1:].masked_fill(padding_BT, IGNORE),
    )
    longer = (0, seq_len - 8)
    batch = Batch.from_sequences(
        F.pad(inputs_BT, longer), F.pad(targets_BT, longer, value=IGNORE), torch.arange(4), 2, n_real_B=n_real_B
    )
    trainer = build_trainer(case, Layout(), PLAIN_SGD)
    trainer.forward_backward(batch, 0)
    norm = trainer.update(0.01)
    assert trainer.model.load is not None
    return float(norm), trainer.model.load


def norms_and_loads(spec: ModelSpec) -> list[tuple[float, ExpertLoad]]:
    """On 1 rank: the first step for three lengths of sequences, 8 of which has the least padding."""
    return [first_step(seq_len, spec) for seq_len in (8, 12, 40)]


@pytest.mark.parametrize(
    "spec",
    [PADDED.spec, replace(MODEL, mtp_modules=2)],
    ids=["capacity and balance of sequences", "balance of batches and prediction of three tokens"],
)
def test_gradient_norm_and_load_of_the_first_step_do_not_depend_on_the_padding(spec: ModelSpec):
    ((norm, load), *others) = run_ranks(norms_and_loads, 1, spec)[0]
    assert int(load.counts_LE[1].sum()) == 2 * (8 + 1 + 5 + 8)
    for other_norm, other in others:
        assert other_norm == pytest.approx(norm, rel=1e-13)
        assert torch.equal(other.counts_LE, load.counts_LE)
        assert torch.equal(other.dropped_L, load.dropped_L)
        torch.testing.assert_close(other.losses_L2, load.losses_L2, rtol=1e-13, atol=0)


@prove
@pytest.mark.parametrize("layout", DEEP, ids=str)
def test_experts_in_pipelines_of_many_stages_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, replace(CASE, spec=replace(MODEL, n_layers=4)), layout)


@prove
@pytest.mark.parametrize("layout", ON_EIGHT, ids=str)
def test_experts_on_eight_ranks_of_three_axes_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, CASE, layout)


@prove
def test_in_32_bits_where_pytorch_multiplies_groups_gradients_that_come_in_w_are_those_of_one_process(
    verifier: Verifier,
):
    report = verifier.parity(replace(CASE, dtype="float32"), ZERO_BUBBLE)
    assert report.equal, report.differing or report.worst


CHOICES: dict[str, dict[str, Any]] = {
    "groups": {"n_experts": 8, "n_groups": 4, "groups_per_token": 2},
    "sigmoid, no shared expert, all layers": {"score": "sigmoid", "n_shared": 0, "first_dense": 0},
    "one choice": {"top_k": 1, "normalise": False},
    "balanced by the bias alone": {"aux_loss": 0.0, "z_loss": 0.0, "weight_scale": 2.5},
    "no balance": {"aux_loss": 0.0, "z_loss": 0.0, "bias_rate": 0.0},
}


@pytest.mark.parametrize(
    ("name", "layout"), rest_prove([*zip(CHOICES, cycle([EP, SP]), strict=False)], ("groups", EP)), ids=str
)
def test_every_way_to_route_trains_as_one_process_does(verifier: Verifier, name: str, layout: Layout):
    check(verifier, with_experts(**CHOICES[name]), layout)


WHOLE_SEQUENCES = {"capacity_factor": 0.5, "aux_scope": "sequence"}
WHOLE_SEQUENCES_ALONE = ({"capacity_factor": 1.0}, {"aux_scope": "sequence"}, {"force_balance": True})
OF_SEQUENCES = [
    *(
        (WHOLE_SEQUENCES, layout)
        for layout in (
            EP,
            PP,
            Layout(cp=2),  # a rank holds two pieces of a sequence that lie apart
            Layout(cp=2, cp_method="ring", zero=3, ep=2),
            Layout(cp=4, cp_method="usp", ulysses_degree=2, zero=2, ep=4),
            SP,
            Layout(cp=2, tp=2, sequence_parallel=True, zero=3, ep=4),
            Layout(pp=2, cp=2, ep=2, pp_schedule="zb-h1"),
        )
    ),
    *zip(WHOLE_SEQUENCES_ALONE, (SP, PP, Layout(cp=2)), strict=True),
]


@pytest.mark.parametrize(
    ("changes", "layout"),
    rest_prove(OF_SEQUENCES, (WHOLE_SEQUENCES, Layout(cp=2))),
    ids=str,
)
def test_what_looks_at_whole_sequences_trains_as_one_process_does(verifier: Verifier, changes: dict, layout: Layout):
    check(verifier, with_experts(**changes), layout)


LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)
WITH_LATENT = replace(CASE, spec=replace(MODEL, n_kv_heads=4, latent_attention=LATENT))


@pytest.mark.prove
@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            EP,
            PP,
            SP,
            Layout(tp=2, sequence_parallel=True, recompute="full"),
            Layout(pp=2, tp=2, sequence_parallel=True, ep=2, pp_schedule="zb-h1"),
            Layout(cp=2, cp_method="ulysses", tp=2, sequence_parallel=True, zero=3, ep=2),
        ],
        SP,
    ),
    ids=str,
)
def test_latent_attention_beside_experts_trains_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, WITH_LATENT, layout)


@prove
@pytest.mark.parametrize(
    ("layout", "q_rank"),
    [
        (Layout(tp=2, sequence_parallel=False), 0),
        (Layout(tp=2, sequence_parallel=True), LATENT.q_rank),
        (Layout(tp=2, dp_shard=2, zero=3, sequence_parallel=False), LATENT.q_rank),
        (Layout(pp=2, tp=2, pp_schedule="zb-h1", sequence_parallel=False), 0),
    ],
    ids=str,
)
def test_latent_attention_in_a_dense_model_trains_as_one_process_does(verifier: Verifier, layout: Layout, q_rank: int):
    latent = replace(LATENT, q_rank=q_rank)
    check(verifier, replace(CASE, spec=replace(WITH_LATENT.spec, moe=None, latent_attention=latent)), layout)


@prove
@pytest.mark.parametrize(("preset", "layout"), [("debug-moe", EP), ("mixtral-8x7b", SP), ("deepseek-v3", SP)], ids=str)
def test_presets_cut_to_test_size_train_as_one_process_does(verifier: Verifier, preset: str, layout: Layout):
    table = {"out": "x", "steps": 1, "data": {"path": "x"}, "model": {"preset": preset}}
    config = parse(table | {"batch": {"seq_len": 256, "global_batch": 8}})
    check(verifier, cut(case_of(config, steps=2), [layout]), layout)


# After the first step a bias of 100 rules: those below the mean load get everything.
STARVED = with_experts(top_k=1, normalise=False, bias_rate=100.0)
ALL_TO_ONE = with_experts(top_k=1, normalise=False, bias_rate=100.0, n_experts=2)


@pytest.mark.parametrize("layout", rest_prove([EP, SP, PP], EP), ids=str)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(STARVED, id="experts without a token"),
        pytest.param(ALL_TO_ONE, id="one expert for all", marks=prove),
    ],
)
def test_experts_without_a_token_and_one_that_gets_all_train_as_one_process_does(
    verifier: Verifier, case: Case, layout: Layout
):
    check(verifier, case, layout)


def test_there_were_experts_without_a_token_and_one_that_got_all():
    starved, all_to_one = loads_alone(STARVED), loads_alone(ALL_TO_ONE)
    assert any((counts_LE[1:] == 0).any() for counts_LE, _, _ in starved)
    tokens = CASE.global_batch * CASE.seq_len
    assert any((counts_LE[1:] == tokens).any() for counts_LE, _, _ in all_to_one)


SGD_RATE = 0.01
Loads = list[tuple[Tensor, Tensor, Tensor]]
"""Of each step, what `ExpertLoad` holds."""


def loads_alone(case: Case) -> Loads:
    """By plain PyTorch and SGD on the whole batch at once."""
    model = Transformer(case.spec).double()
    initialise(model, case.spec, case.seed)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=SGD_RATE)
    loads: Loads = []
    for step in range(case.steps):
        tokens_BT, targets_BT, _ = case.batch(step)
        logits_NV = model(tokens_BT).flatten(0, 1)
        F.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        by_layer = take_load(model)
        assert case.spec.moe is not None
        none = (torch.zeros(case.spec.moe.n_experts, dtype=torch.int64), torch.tensor(0), *torch.zeros(2).double())
        rows = [by_layer.get(str(layer), none) for layer in range(case.spec.n_layers)]
        counts_LE = torch.stack([row[0] for row in rows])
        losses_L2 = torch.stack([torch.stack([row[2], row[3]]) for row in rows])
        loads.append((counts_LE, torch.stack([row[1] for row in rows]), losses_L2.detach()))
        learn_from_load(model, {layer: load.counts_E for layer, load in by_layer.items()})
    return loads


def loads_of_rank(case: Case, layout: Layout) -> Loads:
    """What the model says after each step, on one rank."""
    trainer = build_trainer(case, layout, PLAIN_SGD)
    loads: Loads = []
    for step in range(case.steps):
        trainer.step(local_batch(case, layout, dist.get_rank(), step), step, SGD_RATE)
        assert trainer.model.load is not None
        loads.append(tuple(trainer.model.load))
    return loads


@pytest.mark.parametrize(
    ("layout", "changes"),
    rest_prove(
        [
            (EP, {"capacity_factor": 1.0}),
            (SP, {}),
            (PP, {"capacity_factor": 0.5, "aux_scope": "sequence"}),
            (Layout(cp=2, ep=2, recompute="full"), {}),
            (Layout(cp=2, tp=2, sequence_parallel=True), {"capacity_factor": 0.5, "aux_scope": "sequence"}),
            (Layout(cp=4), {"capacity_factor": 1.0, "aux_scope": "sequence"}),
            (Layout(dp_shard=2, zero=3, recompute="full"), {"top_k": 3}),
        ],
        (EP, {"capacity_factor": 1.0}),
    ),
    ids=str,
)
def test_every_rank_knows_the_load_of_the_whole_batch(layout: Layout, changes: dict):
    case = with_experts(**changes)
    expected = loads_alone(case)
    for found in run_ranks(loads_of_rank, layout.world_size, case, layout):
        for (counts_LE, dropped_L, losses_L2), (true_LE, true_L, true_L2) in zip(found, expected, strict=True):
            assert torch.equal(counts_LE, true_LE)
            assert torch.equal(dropped_L, true_L)
            assert (dropped_L.sum() > 0) == ("capacity_factor" in changes)
            torch.testing.assert_close(losses_L2, true_L2, rtol=1e-12, atol=0)
    assert expected[-1][2][1:].min() > 0, "both losses are there, in both layers with experts"
