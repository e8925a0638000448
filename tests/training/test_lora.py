"""Proves that adapters train on every layout as in one process, in float64, and that the base weights stay as they are.

`verify` begins with a B that is not zero: with the zeros of a run, no gradient would depend on A or on B's sharding.
"""

from dataclasses import replace

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.verification import Case, Verifier
from shardwright.verification.case import ADAPTER_STD
from tests.marks import rest_prove
from tests.training.worlds import CASE, EVEN, LONG

LORA = LoraSpec(rank=3, alpha=6.0)
LAYOUTS = {
    "tp": Layout(tp=2, sequence_parallel=False),
    "sp": Layout(tp=2, sequence_parallel=True),
    "zero 3": Layout(dp_shard=2, zero=3),
    "pp": Layout(pp=2, pp_schedule="zb-h1"),
    "one rank": Layout(),
    "zero 0": Layout(dp_replicate=2),
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 2, hybrid": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "cp": Layout(cp=2),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "kv heads on two ranks": Layout(tp=4, sequence_parallel=True),
    "zero 3 of sp": Layout(tp=2, sequence_parallel=True, dp_shard=2, zero=3),
    "pp of sp": Layout(tp=2, sequence_parallel=True, pp=2, pp_schedule="1f1b"),
    "dualpipe": Layout(pp=2, pp_schedule="dualpipe"),
    "recompute": Layout(recompute="full"),
    "recompute of sp": Layout(tp=2, sequence_parallel=True, recompute="full"),
    "selective recompute": Layout(recompute="selective"),
    "parameters on the host": Layout(dp_shard=2, zero=3, offload_parameters="cpu", offload_optimizer="cpu"),
    "optimizer on the host": Layout(offload_optimizer="cpu"),
    "activations on the host": Layout(offload_activations="cpu"),
    "compressed": Layout(dp_replicate=2, compress_gradients="powersgd-2"),
}
QUICK = ("sp", "zero 3", "pp")


def case_of(layout: Layout, spec: ModelSpec | None = None, lora: LoraSpec = LORA) -> Case:
    base = CASE if layout.cp * layout.tp == 1 else LONG
    accumulation = 4 if layout.pp > 1 else 3
    micro_batch = base.global_batch // (accumulation * layout.data_ranks)
    return replace(base, spec=replace(spec or base.spec, lora=lora), micro_batch=micro_batch)


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, *QUICK))
def test_adapters_train_as_in_one_process(verifier: Verifier, name: str):
    report = verifier.parity(case_of(LAYOUTS[name]), LAYOUTS[name])
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-12, report.worst


def test_an_adapter_computes_as_the_sum_of_base_and_product():
    spec = replace(EVEN, lora=replace(LORA, rslora=True))
    adapted, merged = Transformer(spec).double(), Transformer(EVEN).double()
    initialise(adapted, spec, 0, b_std=ADAPTER_STD)
    values = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            module = name.rpartition(".")[0]
            parameter.copy_(values[name])
            if f"{module}.lora_a" in values:
                parameter.add_(6.0 / 3**0.5 * values[f"{module}.lora_b"] @ values[f"{module}.lora_a"])
    tokens_BT = torch.randint(0, spec.vocab_size, (2, 12))
    torch.testing.assert_close(adapted(tokens_BT), merged(tokens_BT), rtol=1e-12, atol=1e-12)
