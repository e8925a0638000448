"""Proves that losses and gradients of pairs are those of TRL's trainers, with the same weights, reference and batch in
fp32. `benchmarks/trl_preference.py` has written TRL's numbers, and says with which versions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.sections import PreferenceSection
from shardwright.data.batches import Batch
from shardwright.data.samples import IGNORE
from shardwright.generation.source import open_source
from shardwright.layout.layout import Layout
from shardwright.parallel.boxes import gather_whole
from shardwright.training.forward_backward import ForwardBackward
from shardwright.verification.rank import with_references
from tests.distributed import run_ranks
from tests.marks import rest_prove
from tests.mutation import Mutation, mutated

TRL = Path(__file__).parent / "trl"
RECORD = json.loads((TRL / "batch.json").read_text())
SEQ_LEN = 20


def batch() -> Batch:
    """TRL's pairs, each in one sequence with padding."""
    tokens_BT = torch.zeros(len(RECORD["pairs"]), SEQ_LEN, dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, IGNORE)
    documents = []
    for row, pair in enumerate(RECORD["pairs"]):
        lengths, begin = [], 0
        for answer in pair:
            ids, n_prompt = torch.tensor(answer["ids"]), answer["prompt"]
            end = begin + len(ids)
            tokens_BT[row, begin:end] = ids
            targets_BT[row, begin + n_prompt - 1 : end - 1] = ids[n_prompt:]
            lengths.append(len(ids))
            begin = end
        documents.append([*lengths, SEQ_LEN - begin])
    references = [[0.0, 0.0]] * len(documents)
    return Batch.from_sequences(
        tokens_BT, targets_BT, torch.arange(len(documents)), 1, documents, references_B=references
    )


def loss_and_gradients_mutated(
    mutations: tuple[Mutation, ...], kind: str, layout: Layout
) -> tuple[float, dict[str, Tensor]]:
    """By this rank of a layout, with bugs put into our code."""
    with mutated(*mutations):
        return loss_and_gradients(kind, layout)


def loss_and_gradients(kind: str, layout: Layout) -> tuple[float, dict[str, Tensor]]:
    """By this rank of a layout, with the model and the reference that TRL had."""
    preference = PreferenceSection.model_validate({"kind": kind, "beta": RECORD["beta"], "gamma": RECORD["gamma"]})
    device = torch.device("cpu")

    def work_of(folder: str) -> ForwardBackward:
        model = open_source(TRL / folder).on_rank(layout, device, SEQ_LEN)
        return ForwardBackward(model, device=device, seed=0, restart_positions=True, preference=preference)

    pairs, work = batch(), work_of("policy")
    if preference.has_reference:
        pairs = with_references(pairs, work_of("reference").document_log_probs([pairs]))
    parts = work.forward_backward(pairs, 0)
    loss = float(work.model.sum_over_losses(parts.loss_part))
    gradients = {name: p.grad for name, p in work.model.named_parameters.items() if p.grad is not None}
    return loss, {name: gather_whole(gradient) for name, gradient in gradients.items()}


def error(kind: str, layout: Layout, *mutations: Mutation) -> float:
    """The largest error of the loss and of the gradient of a parameter, by its norm, relative to TRL's."""
    found: tuple[float, Any] = run_ranks(loss_and_gradients_mutated, layout.world_size, mutations, kind, layout)[0]
    theirs = {name: p.detach() for name, p in open_source(TRL / kind).whole(torch.device("cpu")).named_parameters()}
    assert theirs.keys() == found[1].keys()
    errors = [float((found[1][name] - each).norm() / each.norm()) for name, each in theirs.items()]
    return max(*errors, abs(found[0] / RECORD["losses"][kind] - 1))


@pytest.mark.parametrize("layout", rest_prove([Layout(), Layout(tp=2, sequence_parallel=True)], Layout()), ids=str)
@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo"])
def test_losses_and_gradients_are_those_of_trl(kind: str, layout: Layout):
    assert error(kind, layout) < 1e-6


def test_another_loss_than_trls_would_be_seen():
    bug = Mutation("shardwright.parallel.preference:pair_losses", "section.kind != 'dpo'", "True")
    assert error("dpo", Layout(), bug) > 0.01
