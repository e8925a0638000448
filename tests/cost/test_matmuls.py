"""The matmuls that are priced are those of the model, whatever the layout; and a matmul is slower than its peak."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.blocks import blocks
from shardwright.cost.flops import executed_flops, model_flops
from shardwright.cost.matmuls import Matmul, head_matmul, layer_matmuls
from shardwright.cost.stack import STACKS
from shardwright.model.presets import PRESETS
from tests.cost.jobs import candidates, job


@pytest.mark.parametrize("name", ["gpt-175b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "cut", [{}, {"tp": 4}, {"tp": 4, "sequence_parallel": False}, {"tp": 2, "cp": 2, "ep": 4, "dp_shard": 2}]
)
def test_the_matmuls_of_all_ranks_are_twice_the_matrices_a_token_meets(name: str, cut: dict[str, int]):
    the_job, of = job(name), candidates(**cut)
    spec = the_job.model
    tokens = of.tokens(the_job.seq_len)
    flops = float(head_matmul(the_job, of, tokens).flops[0])
    for block, layers in blocks(spec).items():
        for each in layer_matmuls(the_job, of, block, tokens):
            flops += len(layers) * float(np.ravel(each.flops)[0])
    tp, cp = int(of.tp[0]), int(of.cp[0])
    # What latent attention makes narrow vectors with: without token shards every rank of tp does it over again.
    latent = spec.latent_attention
    again = 0
    if latent is not None and not of.sequence_parallel[0]:
        again = spec.n_layers * spec.d_model * (latent.q_rank + latent.kv_rank + latent.rope_dim) * (tp - 1)
    assert flops * tp * cp == pytest.approx(2 * (spec.n_matmul_parameters + again) * the_job.seq_len)


@given(
    st.integers(1, 100_000),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from(["h100", "a100", "b200", "mi300x"]),
    st.sampled_from(["bf16", "fp32"]),
)
def test_no_matmul_beats_the_peak_or_its_bytes(m: int, k: int, n: int, chip: str, precision: str):
    the_job = job(on=f"{chip}:8", precision=precision)
    matmul = Matmul("", float(m), float(k), float(n))
    accelerator = the_job.cluster.accelerator
    seconds = float(matmul.seconds(the_job))
    assert seconds >= float(matmul.flops) / accelerator.flops_per_s[precision]
    n_bytes = the_job.element_bytes * (m * k + k * n + m * n)
    assert seconds >= n_bytes / accelerator.memory_bytes_per_s * (1 - 1e-12)


@given(st.integers(64, 50_000), st.integers(64, 10_000), st.integers(64, 10_000))
def test_a_larger_matmul_takes_longer_and_reaches_more_of_the_peak(m: int, k: int, n: int):
    small, large = Matmul("", float(m), float(k), float(n)), Matmul("", 2.0 * m, 2.0 * k, 2.0 * n)
    small_s, large_s = float(small.seconds(job())), float(large.seconds(job()))
    assert large_s > small_s
    assert float(large.flops) / large_s >= float(small.flops) / small_s * (1 - 1e-12)


def test_the_matmuls_of_the_backward_pass_have_as_many_flops_each():
    matmul = Matmul("", 4096.0, 1024.0, 3072.0, 8.0)
    assert matmul.for_input.flops == matmul.for_weight.flops == matmul.flops


def test_recomputation_adds_a_forward_pass_of_the_layers_to_what_runs():
    the_job = job("gpt-175b", seq_len=2048, stack=STACKS["megatron"])
    h, layers, s, vocab = 12288, 96, 2048, the_job.model.vocab_size
    none, selective, full = executed_flops(the_job, candidates(recompute=[0, 1, 2])).full
    # Korthikanti et al., equation 7, and Narayanan et al., equation 3, for one token. Equation 8 of the former has
    # s / (3 h): three passes of the square more, where its forward pass alone runs again.
    assert none == pytest.approx(72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h)), rel=1e-9)
    head = vocab / (12 * layers * h)
    assert selective == pytest.approx(72 * layers * h**2 * (1 + 2 * s / (9 * h) + head), rel=1e-9)
    assert full == pytest.approx(96 * layers * h**2 * (1 + s / (6 * h) + 3 / 4 * head), rel=1e-9)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_causal_flops_are_fewer_by_half_of_the_square(name: str):
    spec, the_job = PRESETS[name], job(name)
    found = model_flops(the_job)
    square = 6 * spec.n_layers * spec.n_heads * (spec.qk_dim + spec.head_dim) * the_job.seq_len
    assert float(found.full) - float(found.causal) == pytest.approx(square / 2)
