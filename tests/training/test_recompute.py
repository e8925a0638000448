"""Proves that every layout trains with selective recomputation as one process does without: loss, raw gradients and
parameters, in float64, for every part that can be recomputed. What is kept and how often what runs: tests/model."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle

import pytest

from shardwright.config import Scope
from shardwright.layout.keys import RECOMPUTE_MODULES
from shardwright.layout.layout import Layout
from shardwright.verification import Case, Verifier
from tests.marks import prove, rest_prove
from tests.training.bugs.bug import EVEN, EXPERTS, FEW_PLACES, LATENT, LONG
from tests.training.worlds import in_few_micro_batches

LAYOUTS = {
    "zero 0": Layout(dp_replicate=2),
    "zero 2": Layout(dp_shard=2, zero=2),
    "zero 3": Layout(dp_shard=2, zero=3),
    "tensor": Layout(tp=2),
    "tensor without token shards": Layout(tp=2, sequence_parallel=False),
    "zigzag": Layout(cp=2),
    "ring": Layout(cp=2, cp_method="ring"),
    "all-gather": Layout(cp=2, cp_method="allgather"),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "tensor, ring and zero 3": Layout(tp=2, cp=2, zero=3),
    "pipeline": Layout(pp=2),
    "split backward": Layout(pp=2, pp_schedule="zb-h1"),
    "split backward and tensor": Layout(pp=2, tp=2, pp_schedule="zb-h1"),
    "split backward and zero 3": Layout(pp=2, dp_shard=2, zero=3, pp_schedule="zb-h1"),
    "dualpipe": Layout(pp=2, pp_schedule="dualpipe"),
}
EXPERT_LAYOUTS = {
    "one rank": Layout(),
    "ep": Layout(dp_shard=2, zero=2, ep=2),
    "ep in tensor": Layout(tp=2, ep=2),
    "ep in a ring, zero 3": Layout(cp=2, cp_method="ring", dp_shard=2, zero=3, ep=4),
    "ep and split backward": Layout(pp=2, dp_shard=2, zero=1, ep=2, pp_schedule="zb-h1"),
}
MODELS = {
    "dense": {"dropout": 0.1, "qk_norm": True},
    "gpt": {
        "dropout": 0.1, "activation": "gelu_tanh", "norm": "layernorm", "positions": "learned", "bias": True,
    },
    "latent": {"n_kv_heads": 4, "latent_attention": LATENT},
}  # fmt: skip


def case_of(layout: Layout, documents: bool = False, **spec: object) -> Case:
    scope: Scope = "document" if documents else "sequence"
    case = replace(LONG, steps=2, spec=replace(EVEN, **spec), attention=scope, positions=scope)  # type: ignore[arg-type]
    return in_few_micro_batches(case, layout)


def proves_equal(verifier: Verifier, case: Case, layout: Layout, parts: tuple[str, ...] = RECOMPUTE_MODULES) -> None:
    layout = layout.changed(recompute="selective", recompute_modules=parts)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst


def in_turn(those: Iterable[str]) -> list[tuple[str, str]]:
    """Each with a model, the models in turn."""
    return list(zip(those, cycle(MODELS), strict=False))


QUICK = ("split backward and tensor", "dense")


@pytest.mark.parametrize(("name", "model"), rest_prove(dict.fromkeys([*in_turn(LAYOUTS), QUICK]), QUICK))
def test_a_layout_that_recomputes_every_part_trains_as_one_process_does(verifier: Verifier, name: str, model: str):
    proves_equal(verifier, case_of(LAYOUTS[name], **MODELS[model]), LAYOUTS[name])


# A model that has the part, for each but the experts.
ALONE = {"norms": "dense", "activation": "gpt", "rope": "latent", "mla_up": "latent", "attention": "gpt"}
assert {*ALONE, "experts"} == set(RECOMPUTE_MODULES)


@prove
@pytest.mark.parametrize(("part", "model"), ALONE.items())
def test_each_part_alone(verifier: Verifier, part: str, model: str):
    layout = LAYOUTS["tensor, ring and zero 3"]
    proves_equal(verifier, case_of(layout, **MODELS[model]), layout, (part,))


@prove
def test_experts_alone(verifier: Verifier):
    layout = EXPERT_LAYOUTS["ep in tensor"]
    proves_equal(verifier, case_of(layout, moe=FEW_PLACES, dropout=0.1), layout, ("experts",))


@prove
@pytest.mark.parametrize(("name", "moe"), [*zip(EXPERT_LAYOUTS, cycle([EXPERTS, FEW_PLACES]), strict=False)])
def test_experts_are_recomputed_and_routing_is_not(verifier: Verifier, name: str, moe: object):
    layout = EXPERT_LAYOUTS[name]
    proves_equal(verifier, case_of(layout, moe=moe, dropout=0.1), layout)


@prove
def test_experts_are_kept_where_other_parts_are_recomputed(verifier: Verifier):
    layout = EXPERT_LAYOUTS["ep in tensor"]
    proves_equal(verifier, case_of(layout, moe=FEW_PLACES, dropout=0.1), layout, ("norms", "activation"))


@prove
@pytest.mark.parametrize("name", ["zigzag", "ulysses", "tensor, ring and zero 3"])
def test_attention_within_documents_is_recomputed(verifier: Verifier, name: str):
    proves_equal(verifier, case_of(LAYOUTS[name], documents=True, dropout=0.1), LAYOUTS[name])


@prove
@pytest.mark.parametrize(
    ("name", "recompute"), [("zero 3", "full"), ("tensor", "selective"), ("split backward", "full")]
)
def test_some_layers_recompute_and_others_do_not(verifier: Verifier, name: str, recompute: str):
    layout = replace(LAYOUTS[name], recompute=recompute, recompute_layers=1)
    report = verifier.parity(case_of(layout, n_layers=4, dropout=0.1), layout)
    assert report.equal, report.differing or report.worst
