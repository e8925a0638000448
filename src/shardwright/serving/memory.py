"""Bytes of an accelerator that serves: weights, cache, working memory; and the number of requests that fit.

The cache is allocated in blocks of tokens (PagedAttention, Kwon et al., arXiv 2309.06180), so a request takes half a
block more than its tokens on average.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import ledger
from shardwright.cost.blocks import blocks
from shardwright.cost.job import Floats
from shardwright.cost.ledger import Formulas
from shardwright.model.modules import end_rows
from shardwright.serving.engines import ServingEngine
from shardwright.serving.setting import Serving, Settings
from shardwright.serving.work import cache_token_bytes, state_bytes
from shardwright.system.units import GiB

BLOCK_TOKENS = 32
"""Tokens of a block of the cache: 16 to 64 in the engines."""
CONTEXT_BYTES = 1.0 * GiB
"""CUDA's context and libraries on an accelerator; about the value of vLLM and TensorRT-LLM."""
COMMUNICATION_BYTES = 1.0 * GiB
"""Buffers of the communication libraries on an accelerator of an instance with several. Qwen3-235B in fp8 on 4 H100
(vllm-project/vllm#21348) has 8.11 GiB of cache under vLLM and 16.46 GiB under SGLang with a static share of 0.93, which
leave 0.9 and 1.2 GiB for them. Llama-3-8B (vllm-project/vllm#10511) needs 1.8 GiB more on 2 GPUs than on one."""
_SECTION = "memory of a rank"


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on the fullest rank of a layout, (n,). `weights`. `working`: activations, logits, buffers. `token`: one
    token of a request, over the layers of a stage; with windows or linear layers on average over the tokens of a
    request. `cache`: the remaining bytes, for the cache."""

    weights: Floats
    working: Floats
    token: Floats
    cache: Floats

    def cache_tokens(self, dp: ArrayLike) -> Floats:
        """Return the tokens for which the caches of an instance have room."""
        return self.cache / self.token * np.asarray(dp)

    def batch(self, length: ArrayLike, dp: ArrayLike) -> Floats:
        """Return the requests of an instance that fit next to the weights, each of `length` cached tokens; may be 0."""
        f = Formulas(
            "", floor_cache=self.cache, token_bytes=self.token, length=np.asarray(length), half_block=BLOCK_TOKENS / 2,
            dp=dp,
        )  # fmt: skip
        requests = f.floor_cache / (f.token_bytes * (f.length + f.half_block)) * f.dp
        return f("largest batch", requests, "arXiv 2309.06180") // 1

    def layout_bytes(self, at: int) -> tuple[float, float, float, float]:
        """Return the four numbers of layout number `at`."""
        parts = self.weights, self.working, self.token, self.cache
        weights, working, token, cache = (float(np.ravel(a)[at if np.size(a) > 1 else 0]) for a in parts)
        return weights, working, token, cache


def memory(serving: Serving, settings: Settings, engine: ServingEngine, length: float) -> ServingMemory:
    """Return the memory of a rank, as an engine divides it; `length`: the cached tokens of a request."""
    with ledger.section(_SECTION):
        weights = _weights(serving, settings)
        working = _working(serving, settings, engine)
        layers = np.ceil(serving.model.n_layers / settings.pp)
        chip = serving.cluster.accelerator
        f = Formulas(
            "B", layers=layers, cache_bytes=cache_token_bytes(serving, settings.tp), accelerator=chip.memory_bytes,
            memory_share=engine.memory_share, weights=weights, working=working, cache_share=engine.cache_share,
        )  # fmt: skip
        of_token = f.layers * f.cache_bytes
        if serving.model.window or serving.model.linear_attention:
            f.add(kept_share=serving.model.kept_share(length))
            of_token = of_token * f.kept_share
        if serving.model.linear_attention:
            linear_layers = np.ceil(serving.model.n_linear_layers / settings.pp)
            f.add(linear_layers=linear_layers, state_bytes=state_bytes(serving, settings.tp), length=length)
            of_token = of_token + f.linear_layers * f.state_bytes / f.length
        token = f("cache of a token", of_token, "serving/work.py")
        left = f.accelerator * f.memory_share - f.weights - f.working
        cache = f("memory for the cache", np.maximum(0, left * f.cache_share), "serving/engines.py")
    return ServingMemory(weights, working, token, cache)


def _weights(serving: Serving, settings: Settings) -> Floats:
    """Return the bytes of a stage's parameters: matrices in the matmuls' precision, the rest in 16 bits or more."""
    model, e, wide = serving.model, serving.weight_bytes, serving.wide_bytes
    layers = np.asarray(0.0)
    for block, numbers in blocks(model).items():
        count = sum(number < model.n_layers for number in numbers)
        dense = sum(
            numel / {"column": settings.tp, "row": settings.tp, "kv_column": np.minimum(settings.tp, model.n_kv_heads)}
            .get(split, np.asarray(1))
            for split, numel in block.dense_numel.items()
        )  # fmt: skip
        layers = layers + count * e * (dense + block.expert_numel / settings.stage_ranks)
    ends = sum(row.numel for row in end_rows(model)) * wide
    first_or_last = np.where(settings.pp > 1, ends / 2, ends)
    f = Formulas("B", layers_bytes=layers, pp=settings.pp, ends_bytes=first_or_last, tp=settings.tp)
    return f("weights", f.layers_bytes / f.pp + f.ends_bytes / f.tp, "rows of the model")


def _working(serving: Serving, settings: Settings, engine: ServingEngine) -> Floats:
    """Return the bytes of the residual stream and of the widest matmul's inputs and outputs, for a pass. An engine that
    reserves memory for its sampler adds the logits of its maximum requests, whole on each tp rank."""
    model = serving.model
    inner = max(
        block.inner + (model.moe.top_k * block.expert_inner if model.moe and block.experts else 0)
        for block in blocks(model)
    )
    rates = serving.cluster.accelerator.rates
    context_bytes = rates.process_gib * GiB if serving.on_host and rates is not None else CONTEXT_BYTES
    several = settings.size > 1
    communication_bytes = several * (0.0 if serving.on_host else COMMUNICATION_BYTES)
    f = Formulas(
        "B", context_bytes=context_bytes, communication_bytes=communication_bytes, max_tokens=engine.max_tokens,
        dp=settings.dp, e=serving.wide_bytes, h=model.d_model, inner=inner, tp=settings.tp,
        vocabulary=model.vocab_size, logit_bytes=engine.logit_bytes,
        sampled=engine.sampled_requests(serving.cluster.accelerator),
    )  # fmt: skip
    of_a_pass = f.max_tokens / f.dp * f.e * (4 * f.h + 3 * f.inner / f.tp)
    working = f.context_bytes + f.communication_bytes + np.maximum(of_a_pass, f.sampled * f.vocabulary * f.logit_bytes)
    return f("working memory", working, "a pass, or its sampler; serving/engines.py")


def largest_batch(serving: Serving, settings: Settings, length: ArrayLike, engine: ServingEngine) -> Floats:
    """Return the requests of an instance that fit (`ServingMemory.batch`)."""
    return memory(serving, settings, engine, float(np.max(length))).batch(length, settings.dp)
