"""Every formula behind a prediction, with the numbers in it."""

from collections.abc import Iterator

from shardwright.cost.flops import executed_flops, model_flops
from shardwright.plan.explain_memory import memory_lines, parameter_lines
from shardwright.plan.explain_time import time_lines
from shardwright.plan.headline import headline
from shardwright.plan.line import Line, num
from shardwright.plan.search import Priced

_PALM = "PaLM, arXiv 2204.02311, appendix B"


def explain(priced: Priced) -> list[Line]:
    """From the batch to the step time, in the order in which one follows from another."""
    return [
        *_batch(priced),
        *parameter_lines(priced),
        *memory_lines(priced),
        *_flops(priced),
        *time_lines(priced),
        *_speed(priced),
    ]


def _batch(priced: Priced) -> Iterator[Line]:
    job, layout, micro_batch = priced.job, priced.choice.layout, priced.choice.micro_batch
    section, batch, data = "Batch", job.global_batch, layout.data_ranks
    yield Line(
        section, "tokens of a step", "global_batch x seq_len", f"{batch} * {job.seq_len}", float(job.tokens), "tokens"
    )
    yield Line(
        section,
        "data ranks",
        "dp_replicate x dp_shard",
        f"{layout.dp_replicate} * {layout.dp_shard}",
        float(data),
        "ranks",
    )
    yield Line(
        section,
        "microbatches m",
        "global_batch / (micro_batch x data ranks)",
        f"{batch} / ({micro_batch} * {data})",
        batch / (micro_batch * data),
        "a step",
    )
    tokens = micro_batch * job.seq_len / layout.cp
    yield Line(
        section,
        "tokens of a microbatch on a rank T",
        "micro_batch x seq_len / cp",
        f"{micro_batch} * {job.seq_len} / {layout.cp}",
        tokens,
        "tokens",
    )
    if layout.token_shards:
        yield Line(
            section, "T', between products", "T / tp", f"{num(tokens)} / {layout.tp}", tokens / layout.tp, "tokens"
        )


def _flops(priced: Priced) -> Iterator[Line]:
    spec, seq_len = priced.job.model, priced.job.seq_len
    square = f"{spec.n_layers} * {spec.n_heads} * ({spec.qk_dim} + {spec.head_dim}) * {seq_len}"
    for name, factor, causal in (("full square", 6, False), ("causal half", 3, True)):
        yield Line(
            "FLOPs of a token",
            f"model FLOPs, {name} of attention",
            f"6 N + {factor} L H (q + c) s",
            f"6 * {spec.n_matmul_parameters} + {factor} * {square}",
            spec.train_flops_per_token(seq_len, causal=causal),
            "FLOP",
            _PALM,
        )
    if priced.choice.layout.recompute != "none":
        again = 2 * (spec.n_matmul_parameters - spec.vocab_size * spec.d_model)
        yield Line(
            "FLOPs of a token",
            "executed FLOPs, full square",
            "model FLOPs + 2 (N - V h) + 2 L H (q + c) s",
            f"{num(spec.train_flops_per_token(seq_len))} + {again} + 2 * {square}",
            float(executed_flops(priced.job, priced.choice.candidates).full[0]),
            "FLOP",
            "the layers' forward pass once more; cost/flops.py",
        )


def _speed(priced: Priced) -> Iterator[Line]:
    job, told = priced.job, headline(priced)
    peak = job.cluster.accelerator.flops_per_s[job.precision]
    section = "Speed"
    yield Line(section, "tokens/s", "tokens / step", f"{job.tokens} / {num(priced.step_s)}", told.tokens_per_s, "1/s")
    needed, executed = model_flops(job), executed_flops(job, priced.choice.candidates)
    shares = [
        ("MFU, full square", told.mfu_full, float(needed.full)),
        ("MFU, causal half", told.mfu_causal, float(needed.causal)),
    ]
    if priced.choice.layout.recompute != "none":
        shares.append(("HFU, full square", told.hfu_full, float(executed.full[0])))
    for name, share, flops in shares:
        yield Line(
            section,
            name,
            "tokens/s x FLOPs of a token / (accelerators x peak)",
            f"{num(told.tokens_per_s)} * {num(flops)} / ({job.cluster.size} * {num(peak)})",
            share,
            "",
            "PaLM, arXiv 2204.02311, section 4.1",
        )
