"""A family of models from outside is counted and priced by its rows."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from shardwright.cost import activations, ledger, parameters, pipeline
from shardwright.cost.blocks import blocks
from shardwright.cost.job import Candidates
from shardwright.cost.layer import layer
from shardwright.cost.matmuls import layer_matmuls
from shardwright.cost.stack import MEGATRON
from shardwright.layout.layout import Layout
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.modules import FAMILIES, Family, attention, feed_forward, norm, register
from shardwright.model.presets import resolve
from tests.cost.jobs import candidates, job

SEQUENTIAL = replace(resolve("gpt2"), n_layers=2)


@pytest.fixture
def parallel():
    """Attention and feed-forward network side by side: both read one norm, and both are added to the stream."""

    def rows(spec, number):
        yield from norm("norm", spec.d_model, spec.norm)
        yield from attention(spec, "norm")
        yield from feed_forward(spec, "ffn", spec.d_ffn, "norm", ordered=True)

    register(Family(name="side by side", help="", layer=rows, block="nowhere:Block"))
    yield replace(SEQUENTIAL, family="side by side")
    del FAMILIES["side by side"]


def test_a_parallel_block_has_one_norm_less_and_one_matmul_for_all_that_read_it(parallel):
    h, f = parallel.d_model, parallel.d_ffn
    assert parallel.n_parameters == SEQUENTIAL.n_parameters - 2 * 2 * h
    assert parallel.n_matmul_parameters == SEQUENTIAL.n_matmul_parameters
    the_job, of = job(model=parallel, on="h100:2/2"), candidates(tp=2)
    (block,) = blocks(parallel)
    shapes = {each.name: (each.k, float(np.ravel(each.n)[0])) for each in layer_matmuls(the_job, of, block, 4096.0)}
    assert shapes == {
        "attention q k v, ffn up": (h, (3 * h + f) / 2),
        "attention o": (h / 2, h),
        "ffn down": (f / 2, h),
    }
    held = parameters.tp_rank_parameters(parallel, pipeline.stages(the_job, of), of.tp, of.ep)
    whole = parameters.tp_rank_parameters(SEQUENTIAL, pipeline.stages(job(model=SEQUENTIAL), of), of.tp, of.ep)
    assert whole.layer_dense[0] - held.layer_dense[0] == 2 * h


def test_a_parallel_block_gathers_its_input_once_and_keeps_it_once(parallel):
    of = candidates(tp=2)
    (side_by_side,), (sequential,) = blocks(parallel), blocks(SEQUENTIAL)
    one, two = (
        float(layer(job(model=spec, on="h100:2/2"), of, block).forward["tensor parallel"][0])
        for spec, block in ((parallel, side_by_side), (SEQUENTIAL, sequential))
    )
    # One gather and two scatters, instead of two and two.
    assert one == pytest.approx(two * 3 / 4)
    tokens, h = 4096, parallel.d_model
    kept = [
        float(activations.layer(job(model=spec, stack=MEGATRON), of, block).kept[0])
        for spec, block in ((parallel, side_by_side), (SEQUENTIAL, sequential))
    ]
    # The norm's input and its result, as token shards.
    assert kept[1] - kept[0] == 2 * tokens / 2 * h * 2


@pytest.mark.parametrize("name", ["gemma2-2b", "mixtral-8x7b"])
def test_matmuls_in_fp32_have_the_rate_of_16_bits_where_a_tpu_has_no_other(name: str):
    """Scores with a soft cap, and the router."""
    the_job = job(name, on="tpu-v5e:4")
    assert "fp32" not in the_job.cluster.accelerator.flops_per_s
    for block in blocks(the_job.model):
        assert np.isfinite(layer(the_job, candidates(tp=2), block).totals).all()


def test_only_layers_with_heads_have_norms_of_heads():
    linear = LinearAttentionSpec(n_k_heads=2, n_v_heads=4, k_dim=12, v_dim=16, full_interval=2)
    spec = replace(resolve("debug"), n_layers=2, qk_norm=True, linear_attention=linear)
    shapes = {block.name: block for block in blocks(spec)}
    assert {name: block.norms_heads for name, block in shapes.items()} == {
        "a layer with linear attention": False,
        "a layer": True,
    }
    the_job, of = (
        job(spec, on="h100:2/2"),
        Candidates.from_layout(Layout(recompute="selective", recompute_modules=("rope",)), 1),
    )
    again = {
        name: entry.formula
        for name, block in shapes.items()
        for entry in recorded(lambda block=block: layer(the_job, of, block))
        if entry.what == "bytes of heads again"
    }
    assert [*again] == ["a layer"]


def recorded(price: Callable[[], object]) -> list[ledger.LedgerEntry]:
    with ledger.record() as entries:
        price()
    return entries
