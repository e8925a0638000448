"""Overheads of a pass of `shardwright generate`: prefill and decode of very small models, and matmuls of as few tokens
as a decode pass has."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.config import parse
from shardwright.generation.batch import RaggedBatch, SequenceSegment
from shardwright.generation.cache import Cache, LayerCache
from shardwright.generation.continuous import Batcher
from shardwright.generation.engine import LayoutEngine, WholeEngine
from shardwright.generation.generate import without_training
from shardwright.generation.sampling import Sampling
from shardwright.layout.layout import Layout
from shardwright.measuring.clock import Kind, MeasuringClock, worst
from shardwright.measuring.fit import fit_cached
from shardwright.measuring.overheads import FEW, MANY, SMALL_HEADS, SMALL_WIDTH, small_model
from shardwright.measuring.points import CachedPoint, GenerationPoints, MatmulPoint, MessagePoint
from shardwright.measuring.steps import run_file
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.parallel.apply import apply

PROMPT, NEW, REPEATS, ROUNDS = 4, 13, 5, 3
"""Tokens of a prompt and of its continuation; repeats in a process; number of processes (the fastest counts,
since other programs only add time)."""
SEQUENCES = 32
DRAWN = Sampling(temperature=0.8, top_k=40)
"""The default sampling of `generate`."""
TOKENS = (1, 8, 16, 32)
SHAPES = ((256, 256), (256, 768), (768, 256), (512, 512))
CACHED = ((16, 32), (64, 32), (256, 32), (64, 64))
"""Cached tokens of each sequence, and widths of a head."""
HEADS, KV_HEADS, LAYERS = 8, 4, 6
"""Sizes of the measured attention to the cache; each layer has its own cache."""
WEIGHT_BYTES = 2**24
"""Bytes of the matrices of one shape: more than the caches closest to a core, like the weights of a model."""
RunRanks = Callable[..., list[Any]]


def pass_seconds(batcher: Batcher, clock: MeasuringClock, sequences: int, prompt: int, new: int) -> tuple[float, float]:
    """Return the seconds of the prefill of `sequences` prompts of `prompt` tokens, and of a decode pass: the medians of
    `REPEATS` generations of one token and of `new`. Every rank of a layout calls it."""
    vocabulary = batcher.engine.model.spec.vocab_size  # type: ignore[attr-defined]
    prompts = {index: [(index + at) % vocabulary for at in range(prompt)] for index in range(sequences)}
    prefill, decode = [], []
    for repeat in range(REPEATS + 1):
        times = [clock.now()]
        for tokens in (1, new):
            batcher.complete(prompts, tokens)
            times.append(clock.now())
        if repeat:
            prefill.append(times[1] - times[0])
            decode.append((times[2] - 2 * times[1] + times[0]) / (new - 1))
    return statistics.median(prefill), statistics.median(decode)


def passes_of(spec: ModelSpec, kind: Kind, tp: int, sequences: int, prompt: int, new: int) -> tuple[float, float]:
    """Return `pass_seconds` of a model with random weights in fp32, on this rank of tp."""
    device, positions = torch.device("cpu"), prompt + new
    if tp == 1:
        batcher = Batcher(WholeEngine(Transformer(spec), sequences, positions), DRAWN, positions)
    else:
        layout = without_training(Layout(tp=tp), spec)
        model = apply(spec, layout, device, seed=0, param_dtype=torch.float32, compute_dtype=torch.float32)
        batcher = Batcher(LayoutEngine(model, device, sequences, positions), DRAWN, positions)
    return pass_seconds(batcher, MeasuringClock(device, kind), sequences, prompt, new)


def small_passes(kind: Kind, cases: Sequence[tuple[int, int]], tp: int) -> list[tuple[float, float]]:
    """Return `pass_seconds` of small models, by (layers, sequences), on this rank of tp."""
    batch = {"seq_len": 16, "global_batch": 1, "micro_batch": 1}
    specs = [parse(run_file(small_model(layers), batch, {}, "fp32")).spec() for layers, _ in cases]
    return [
        passes_of(spec, kind, tp, sequences, PROMPT, NEW) for spec, (_, sequences) in zip(specs, cases, strict=True)
    ]


def small_matmuls(kind: Kind, budget_s: float) -> tuple[MatmulPoint, ...]:
    """Measure (tokens, k) by (k, n) for few tokens; each matmul reads another matrix than the previous one."""
    clock, points = MeasuringClock(torch.device("cpu"), kind, budget_s), []
    for k, n in SHAPES:
        weights = [torch.randn(n, k) for _ in range(WEIGHT_BYTES // (4 * n * k))]
        for tokens in TOKENS:
            seconds = clock.seconds(partial(_one_after_another, torch.randn(tokens, k), weights))
            points.append(MatmulPoint("fp32", tokens, k, n, seconds / len(weights)))
    return tuple(points)


@torch.inference_mode()
def cached_attention(kind: Kind, budget_s: float) -> tuple[CachedPoint, ...]:
    """Measure the attention of one new token of each sequence to the caches of some layers, one layer after another."""
    clock, points = MeasuringClock(torch.device("cpu"), kind, budget_s), []
    for positions, width in CACHED:
        layers = [Cache(SEQUENCES, positions + NEW).layer() for _ in range(LAYERS)]
        segments = [SequenceSegment(slot, positions - 1, 1) for slot in range(SEQUENCES)]
        batch = RaggedBatch(segments, [0] * SEQUENCES)
        for layer in layers:
            layer.cache.begin(batch, clock.device)
            layer.write(*(torch.randn(SEQUENCES, KV_HEADS, width) for _ in range(2)))
        seconds = clock.seconds(partial(_attended, layers, torch.randn(SEQUENCES, HEADS, width)))
        points.append(CachedPoint(SEQUENCES, HEADS, positions, width, seconds / LAYERS))
    return tuple(points)


def _attended(layers: Sequence[LayerCache], q_NHC: Tensor) -> None:
    for layer in layers:
        layer.attend(q_NHC)


@torch.inference_mode()
def _one_after_another(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def generation_points(
    run_ranks: RunRanks, kind: Kind, budget_s: float, threads: int, inside: Sequence[MessagePoint]
) -> GenerationPoints:
    """Compute overheads from differences between passes: with more layers, with more sequences, and over two ranks of
    tp if messages between ranks were measured. `run_ranks`: as `verification.ranks.run_ranks`.

    Small models run on one thread, as in `overheads`. The time to start several threads is part of the matmuls and of
    attention, which run on `threads` threads.
    """
    cases = [(layers, sequences) for layers in (FEW, MANY) for sequences in (1, SEQUENCES)]
    passes = _fastest([run_ranks(small_passes, 1, kind, cases, 1, timeout_s=600, n_threads=1) for _ in range(ROUNDS)])
    (read_one, one), (read_few, few), (read_one_deep, deep), (read_deep, most) = passes
    more, others = MANY - FEW, SEQUENCES - 1
    layer_s = max(deep - one, 0.0) / more
    sequence_layer_s = max(most - deep - (few - one), 0.0) / (others * more)
    (matmuls,) = run_ranks(small_matmuls, 1, kind, budget_s, timeout_s=600, n_threads=threads)
    (cached,) = run_ranks(cached_attention, 1, kind, budget_s, timeout_s=600, n_threads=threads)
    split_layer_s, split_pass_s = _split(run_ranks, kind, inside) if inside else (0.0, 0.0)
    return GenerationPoints(
        layer_s=layer_s,
        pass_s=max(one - FEW * layer_s, 0.0),
        request_s=max((few - one) / others - FEW * sequence_layer_s, 0.0),
        sequence_s=max(sequence_layer_s - _small_heads_s(cached, threads), 0.0),
        prompt_s=max(read_deep - read_one_deep - (read_few - read_one), 0.0) / (others * more),
        split_layer_s=split_layer_s,
        split_pass_s=split_pass_s,
        matmuls=matmuls,
        cached=cached,
    )


def _small_heads_s(points: Sequence[CachedPoint], threads: int) -> float:
    """Return the seconds of a sequence's heads in one layer of a decode pass of the small model, on one thread."""
    head_s, flops_per_s, _ = fit_cached(points)
    flops = CachedPoint(1, 1, PROMPT + NEW // 2, SMALL_WIDTH, 0.0).flops
    return threads * SMALL_HEADS * (head_s + flops / flops_per_s)


def _fastest(runs: Sequence[Sequence[Sequence[tuple[float, float]]]]) -> list[tuple[float, float]]:
    """Return, for each case, the minimum prefill and decode time over the runs, of the slowest rank."""
    of_runs = [
        [
            (worst([prefill for prefill, _ in ranks]), worst([decode for _, decode in ranks]))
            for ranks in zip(*run, strict=True)
        ]
        for run in runs
    ]
    return [
        (min(prefill for prefill, _ in those), min(decode for _, decode in those))
        for those in zip(*of_runs, strict=True)
    ]


def _split(run_ranks: RunRanks, kind: Kind, inside: Sequence[MessagePoint]) -> tuple[float, float]:
    """Return the seconds of a layer and of a pass on two ranks of tp, without two all-reduces a layer, one all-reduce
    of the embedding and the all-gather of the logits."""
    cases = [(FEW, 1), (MANY, 1)]
    runs = [run_ranks(small_passes, 2, kind, cases, 2, timeout_s=600, n_threads=1) for _ in range(ROUNDS)]
    (_, few), (_, deep) = _fastest(runs)
    # Messages of a ring of n ranks take n - 1 times as long as messages of two ranks.
    reduce_s, gather_s = (
        min(message.seconds / (message.ranks - 1) for message in inside if message.collective == kind_)
        for kind_ in ("all_reduce", "all_gather")
    )
    layer_s = (deep - few) / (MANY - FEW)
    return max(layer_s - 2 * reduce_s, 0.0), max(few - FEW * layer_s - reduce_s - gather_s, 0.0)
