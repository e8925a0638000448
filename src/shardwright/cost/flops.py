"""FLOPs of a token: those the model needs (MFU counts them) and those a layout runs (HFU)."""

from dataclasses import dataclass

import numpy as np

from shardwright.cost.job import RECOMPUTE, Candidates, Floats, Job


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token forward and backward. `causal`: of attention's square only the half below the diagonal."""

    full: Floats
    causal: Floats


def model_flops(job: Job) -> TokenFlops:
    """What the model needs, whatever the layout: `ModelSpec.train_flops_per_token` by both conventions.

    full = 6 N + 6 L H (q + c) s, causal = 6 N + 3 L H (q + c) s. N elements of the matrices a token meets, of experts
    top_k, of the rest all; L layers, H heads, q and c width of a query and of a value head, s tokens of a sequence.
    Sources: PaLM (arXiv 2204.02311) appendix B; by the full square count Narayanan et al. (2104.04473), Korthikanti et
    al. (2205.05198), torchtitan and llm-foundry, by the half Megatron-LM today.
    """
    spec = job.model
    return TokenFlops(
        np.asarray(spec.train_flops_per_token(job.seq_len)),
        np.asarray(spec.train_flops_per_token(job.seq_len, causal=True)),
    )


def executed_flops(job: Job, of: Candidates) -> TokenFlops:
    """What a layout runs: the model's, and what it computes again, (n,).

    full: the layers' forward pass once more, 2 (N - V h) + 2 L H (q + c) s, V rows of the vocabulary, h d_model
    (2104.04473, equation 3: 96 in the place of 72). selective: attention alone, 2 L H (q + c) s (2205.05198, equation
    8), or in torchtitan's list every other product. Ignored: what fused attention computes again in its backward pass,
    which no convention counts.
    """
    spec = job.model
    needed = model_flops(job)
    square = 2.0 * spec.n_layers * spec.n_heads * (spec.qk_dim + spec.head_dim) * job.seq_len
    layers = 2.0 * (spec.n_matmul_parameters - spec.vocab_size * spec.d_model)
    again = [of.recompute == RECOMPUTE.index(what) for what in ("full", "selective")]
    products = job.stack.selective != "scores"

    def with_recomputation(needed: Floats, square: float) -> Floats:
        return needed + np.select(again, [layers + square, layers / 2 if products else square], 0.0)

    return TokenFlops(with_recomputation(needed.full, square), with_recomputation(needed.causal, square / 2))
