"""FLOPs of a token: model FLOPs (for MFU), and executed FLOPs of a layout with recomputation (for HFU)."""

from dataclasses import dataclass

import numpy as np

from shardwright.cost import ledger, pipeline, recompute
from shardwright.cost.job import RECOMPUTE, Candidates, Floats, Job
from shardwright.cost.ledger import Formulas, plus


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token, forward and backward. `full`: with the full square of attention scores; `causal`: with only
    the half that is not masked."""

    full: Floats
    causal: Floats


def model_flops(job: Job) -> TokenFlops:
    """Return the model FLOPs, the same for every layout: `ModelSpec.train_flops_per_token` by both conventions.

    full = 6 N + 6 L H (q + c) s + 3 F, causal = 6 N + 3 L H (q + c) s + 3 F, with F `ModelSpec.scan_flops` of linear
    layers, for which s is 0 in the mean over layers. N parameters in the matmuls of a token, with top_k of the experts;
    with adapters 2 N_frozen is subtracted. L layers, H heads, q and c width of a query and of a value head, s tokens of
    a sequence, or within documents the mean length of a token's document: each is a square of its own.
    Sources: PaLM (arXiv 2204.02311) appendix B; by the full square count Narayanan et al. (2104.04473), Korthikanti et
    al. (2205.05198), torchtitan and llm-foundry, by the half Megatron-LM today.
    """
    spec = job.model
    symbol, tokens = job.mean_attended
    per_token = TokenFlops(
        np.asarray(spec.train_flops_per_token(job.attended[1])),
        np.asarray(spec.train_flops_per_token(job.attended[1], causal=True)),
    )
    for what, factor, flops in (("full square", 6, per_token.full), ("causal half", 3, per_token.causal)):
        scan = " + 3 * scan_flops" if spec.scan_flops else ""
        frozen = " - 2 * N_frozen" if spec.lora is not None else ""
        ledger.note(
            f"model FLOPs, {what}",
            f"6 * N_matmul{frozen} + {factor} * n_layers * heads * (qk_dim + c) * {symbol}{scan}",
            flops, "FLOP",
            "PaLM, arXiv 2204.02311, appendix B", SECTION, N_matmul=spec.n_matmul_parameters,
            n_layers=spec.n_blocks, heads=spec.n_heads, qk_dim=spec.qk_dim, c=spec.head_dim,
            **{symbol: tokens}, **({"scan_flops": spec.scan_flops} if scan else {}),
            **({"N_frozen": spec.n_frozen_matmul_parameters} if frozen else {}),
        )  # fmt: skip
    return per_token


SECTION = "FLOPs of a token"


def _parts(job: Job, candidates: Candidates, f: Formulas) -> Floats:
    """Return the FLOPs of the parts of a layout that are matmuls; element-wise work does not count."""
    parts, moe, latent = recompute.parts_of(job, candidates), job.model.moe, job.model.latent_attention
    terms = [f.square] if "attention" in parts else []
    if "mla_up" in parts and latent is not None:
        width = latent.nope_dim + latent.v_dim
        terms.append(f.constant(2) * job.model.n_blocks * latent.kv_rank * job.model.n_heads * width)
    if "experts" in parts and moe is not None:
        first = 2 if job.model.gated else 1
        layers = sum(job.model.has_experts(layer) for layer in range(job.model.n_blocks))
        terms.append(f.constant(2) * layers * moe.top_k * first * f.h * moe.d_ffn)
    return plus(*terms) if terms else f.constant(0)


def executed_flops(job: Job, candidates: Candidates) -> TokenFlops:
    """Return the FLOPs that a layout executes, model FLOPs and recomputation, (n,).

    full: one more forward pass of the layers, 2 (N - V h) + 2 L H (q + c) s, V rows of the vocabulary, h d_model
    (2104.04473, equation 3: 96 instead of 72), without the last matmuls if it stops before them. selective: only
    attention, 2 L H (q + c) s (2205.05198, equation 8), or with torchtitan's list every other matmul, or the matmuls in
    the parts of `layout.recompute_modules`.
    Ignored: recomputation inside a fused attention's backward pass, which no convention counts.
    """
    spec, needed = job.model, model_flops(job)
    first, stage_layers = candidates.shared.recompute_layers, pipeline.stages(job, candidates).layers
    again = spec.n_blocks if first is None else sum(min(first, len(stage)) for stage in stage_layers)
    last = sum(
        len(layers) * row.numel
        for block, layers in pipeline.blocks(spec).items()
        if (group := recompute.last_matmul(job, block)) is not None
        for row in group.rows
    )
    scan = spec.scan_flops
    square = 2.0 * spec.n_blocks * spec.n_heads * (spec.qk_dim + spec.head_dim) * job.mean_attended[1]

    def executed(name: str, needed: Floats, square: float) -> Floats:
        model, of_model = f"model FLOPs, {name}", needed + np.zeros(len(candidates))
        if not np.any(candidates.recompute):
            return of_model
        f = Formulas(
            "FLOP", {model: of_model}, square=square, h=spec.d_model,
            N_matmul=spec.n_matmul_parameters, V=spec.vocab_size, N_last=last, predictions=1 + spec.mtp_modules,
        )  # fmt: skip
        matmuls = 2 * (f.N_matmul - (f.predictions * f.V if spec.mtp_modules else f.V) * f.h)
        by_stack = {"scores": lambda: f.square, "parts": lambda: _parts(job, candidates, f)}
        selective = by_stack.get(job.stack.selective, lambda: matmuls / 2)()
        full = matmuls + f.square - 2 * f.N_last if last else matmuls + f.square
        extra = {"none": f.constant(0), "selective": selective, "full": full}
        if again != spec.n_blocks:
            extra = {how: flops * again / spec.n_blocks for how, flops in extra.items()}
        by_recompute = [f[model] + extra[how] for how in RECOMPUTE]
        with ledger.section(SECTION):
            return f.choose(f"executed FLOPs, {name}", candidates.recompute, by_recompute, "square: attention")

    return TokenFlops(
        executed("full square", needed.full, square + scan), executed("causal half", needed.causal, square / 2 + scan)
    )
