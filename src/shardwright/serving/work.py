"""Seconds of one pass over the model: prompts that are read, requests that decode a token each, or both together.

Sources: the roofline of decoding in Pope et al., "Efficiently Scaling Transformer Inference" (arXiv 2211.05102);
absorbed matrices of latent attention in DeepSeek-V2 (arXiv 2405.04434), section 2.1.2. Ignored: that attention and
feed-forward network of GPT-J and Falcon run in parallel, and that a power limit lowers the clock.

`cache_bytes_per_token` and `state_bytes` are also the bytes of the cache of `generate` (`generation/cache.py`).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import collectives, ledger
from shardwright.cost.blocks import BlockShape, FusedRows, blocks
from shardwright.cost.job import Floats, Ints
from shardwright.cost.ledger import Formulas
from shardwright.cost.matmuls import TILE_COLUMNS, TILE_ROWS
from shardwright.model.spec import ModelSpec
from shardwright.serving import host
from shardwright.serving.formats import CACHE_BYTES
from shardwright.serving.setting import PassBatch, Serving, Settings
from shardwright.split.tensor import kv_replicas

PARTIAL_WAVE, RAMP_K = 0.41, 110.0
"""See `Matmul.seconds`: waves beyond the tiles; input features at which half of the rate is reached."""
SMOOTH = 4.0
"""Exponent with which the times of computing and of reading memory combine: if they are nearly equal, both are slower
than alone. An infinite exponent gives the larger of the two, 1 their sum."""
LEAST_TILE_ROWS = 64
"""Fewest rows that a matmul computes, if it has fewer tokens."""
SPLIT_K = 512.0
"""Input features of a part, if a matmul with fewer tiles than multiprocessors is split along its input features
(split-K, stream-K: Osama et al., arXiv 2301.03598), such as a matmul of few tokens."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass, (n,). `layers_s`: all layers. `head_s`: logits and sampling. `host_s`: once in each pass.
    `send_s`: sending to the next stage."""

    layers_s: Floats
    head_s: Floats
    host_s: Floats
    send_s: Floats

    def latency_s(self, pp: Ints) -> Floats:
        """Return the seconds of the pass alone, through all stages."""
        return self.layers_s + self.head_s + self.host_s + (np.asarray(pp) - 1) * self.send_s

    def period_s(self, pp: Ints) -> Floats:
        """Return the seconds from one token of a request to its next, with pp such micro-batches in the pipeline."""
        return self.layers_s + np.asarray(pp) * (self.head_s + self.send_s) + self.host_s


def period_s(serving: Serving, settings: Settings, batch: PassBatch) -> Floats:
    """Return the seconds from one token to the next with a batch of the whole instance, in pp micro-batches. (n,)."""
    return pass_time(serving, settings, batch.shared(settings.pp)).period_s(settings.pp)


def latency_s(serving: Serving, settings: Settings, batch: PassBatch) -> Floats:
    """Return the seconds of one pass that is not cut into micro-batches. (n,)."""
    return pass_time(serving, settings, batch).latency_s(settings.pp)


def pass_time(serving: Serving, settings: Settings, batch: PassBatch) -> PassTime:
    """Return the seconds of one pass, by its parts."""
    model, rates = serving.model, serving.rates
    layers = np.asarray(0.0)
    for block, numbers in blocks(model).items():
        count = sum(number < model.n_layers for number in numbers)
        if count:
            with ledger.section(block.name):
                layers = layers + count * _layer_s(serving, settings, batch, block)
    with ledger.section("once in each pass"):
        rows = np.asarray(batch.logits) / settings.dp
        head = _matmul_s(serving, "logits", rows, model.d_model, model.vocab_size / settings.tp, serving.wide)
        if model.logit_softcap:
            head = head + _cap_s(serving, settings, rows)
        send = np.asarray(0.0)
        if np.max(settings.pp) > 1:
            n_bytes = batch.tokens / settings.dp * model.d_model * serving.wide_bytes
            stride = settings.stage_ranks
            send = collectives.point_to_point(serving.cluster, n_bytes, settings.pp, stride, "to the next stage")
        if serving.on_host:
            return PassTime(layers, head, host.pass_s(serving, settings, batch), send)
        f = Formulas(
            "s", pass_s=rates.pass_s, prefill_s=rates.prefill_s, reads_prompts=np.asarray(batch.prompt) > 0,
            request_s=rates.request_s, requests=batch.requests,
        )  # fmt: skip
        seconds = f.pass_s + f.prefill_s * f.reads_prompts + f.request_s * f.requests
        once = f("scheduling and sampling", seconds, "rates.toml")
        layers = _at_least_started(serving, batch, layers)
    return PassTime(layers, head, once, send)


def _cap_s(serving: Serving, settings: Settings, rows: Floats) -> Floats:
    """Return the seconds of the soft cap of logits: a quotient, a tanh and a product, each read and written. The soft
    cap of attention's scores costs nothing, because the kernels of the engines compute it."""
    f = Formulas(
        "s", rows=rows, e=serving.wide_bytes, V=serving.model.vocab_size, tp=settings.tp, bandwidth=serving.bytes_per_s
    )
    return f("soft cap of logits", 6 * f.e * f.rows * f.V / f.tp / f.bandwidth)


def _at_least_started(serving: Serving, batch: PassBatch, layers_s: Floats) -> Floats:
    """Return the seconds of the layers of a pass; with prompts, at least the host's launch time."""
    model, rates = serving.model, serving.rates
    f = Formulas(
        "s", computing=layers_s, reads_prompts=np.asarray(batch.prompt) > 0, n_layers=model.n_layers,
        launch_s=rates.launch_s, expert_layers=model.n_expert_layers, expert_launch_s=rates.expert_launch_s,
    )  # fmt: skip
    starting = f.reads_prompts * (f.n_layers * f.launch_s + f.expert_layers * f.expert_launch_s)
    return f("all layers", np.maximum(f.computing, starting))


def _layer_s(serving: Serving, settings: Settings, batch: PassBatch, block: BlockShape) -> Floats:
    tokens = batch.tokens / settings.dp
    parts: dict[str, Floats] = {}
    for group in block.matmuls:
        if group.rows[0].matmul == "routed":
            parts[group.name] = _experts_s(serving, settings, batch, group)
        else:
            k, n = _shape(serving, settings, group)
            precision = serving.wide if group.rows[0].kind == "router" else serving.precision
            parts[group.name] = _matmul_s(serving, group.name, tokens, k, n, precision)
    if block.linear:
        parts["linear attention"] = _linear_attention_s(serving, settings, batch)
    else:
        parts["attention over the cache"] = _decode_attention_s(serving, settings, batch, block)
        parts["attention over prompts"] = _prompt_attention_s(serving, settings, batch, block)
    parts["element-wise kernels"] = _elementwise_s(serving, settings, block, tokens)
    parts |= _communication_s(serving, settings, batch, block)
    if serving.on_host:
        parts["waiting between kernels"] = host.layer_s(serving, settings, batch)
        return ledger.total(block.name, parts)
    parts["waiting between kernels"] = np.asarray(serving.rates.layer_s)
    if block.experts:
        parts["routing"] = np.asarray(serving.rates.exchange_s)
    for what in ("waiting between kernels", "routing"):
        if what in parts:
            ledger.note(what, "", parts[what], "s", "rates.toml")
    return ledger.total(block.name, parts)


def _shape(serving: Serving, settings: Settings, group: FusedRows) -> tuple[Floats, Floats]:
    """Return the input and output features of a matmul on one rank."""
    first = group.rows[0]
    k = first.shape[-1] / settings.tp if first.split == "row" else np.asarray(float(first.shape[-1]))
    shards = {"column": settings.tp, "kv_column": np.minimum(settings.tp, serving.model.n_kv_heads)}
    n = np.asarray(sum(row.shape[-2] / shards.get(row.split, 1) for row in group.rows), dtype=np.float64)
    return np.asarray(k), n


def _smoothly(f: Formulas, computing: Floats, reading: Floats) -> Floats:
    """Return the time of computing and reading memory together, combined with exponent `SMOOTH`."""
    computing, reading = f.let("computing", computing), f.let("reading", reading)
    return (computing**SMOOTH + reading**SMOOTH) ** (1 / SMOOTH)


def _matmul_s(
    serving: Serving, what: str, m: Floats, k: Floats | float, n: Floats | float, precision: str,
    batch: Floats | float = 1.0, bandwidth: Floats | None = None,
) -> Floats:  # fmt: skip
    """Return the seconds of (m, k) by (k, n), `batch` times: smooth maximum of computing and reading weights."""
    m, e, compute = np.maximum(m, 1e-9), float(serving.wide_bytes), precision
    if precision == serving.precision:
        e, compute = serving.weight_bytes, serving.compute
    if serving.on_host:
        return host.matmul_s(serving, what, m, k, n, precision, e, batch)
    f = Formulas(
        "s", M=m, K=k, N=n, batch=batch, multiprocessors=serving.cluster.accelerator.multiprocessors,
        rate=serving.flops_per_s(compute), e=e, e_input=serving.wide_bytes,
        bandwidth=serving.bytes_per_s if bandwidth is None else bandwidth,
    )  # fmt: skip
    rows, columns = np.maximum(f.M, LEAST_TILE_ROWS) / TILE_ROWS, np.maximum(f.N / TILE_COLUMNS, 0.25)
    q = f.let("q", rows * columns * f.batch / f.multiprocessors)
    q = f.let("q", np.maximum(q, np.minimum(1, q * f.K / SPLIT_K)))
    q = f.let("q", q / (q + PARTIAL_WAVE) * (f.K / (f.K + RAMP_K)))
    computing = 2 * f.M * f.K * f.N * f.batch / (f.rate * q)
    reading = (f.e * f.K * f.N + f.e_input * f.M * (f.K + f.N)) * f.batch / f.bandwidth
    return f(what, _smoothly(f, computing, reading), "roofline; tiles as in training (cost/matmuls.py)")


def _experts_s(serving: Serving, settings: Settings, batch: PassBatch, group: FusedRows) -> Floats:
    """Return the seconds of the experts of one rank that any token goes to, with the rows that go to each.

    Of E / ep experts, E / ep (1 - (1 - k/E)^tokens) are used by a batch whose tokens choose k of E evenly. The
    busiest rank of ep has more rows than the mean: by sqrt(2 ln(ep) / rows), the largest of ep Poisson counts.
    """
    moe, tokens = serving.model.moe, batch.tokens
    assert moe is not None
    first = group.rows[0]
    f = Formulas(
        "", tokens=tokens, n_experts=moe.n_experts, top_k=moe.top_k, ep=settings.ep, ln_ep=np.log(settings.ep)
    )  # fmt: skip
    touched = f.n_experts / f.ep * (1 - (1 - f.top_k / f.n_experts) ** f.tokens)
    touched = f(f"{group.name}: experts touched", touched, "top_k of n_experts, evenly")
    mean = f.let("mean", f.tokens * f.top_k / f.ep)
    rows = mean * (1 + (2 * f.ln_ep / np.maximum(mean, 1)) ** 0.5)
    rows = f(f"{group.name}: rows of the busiest rank", rows, "largest of Poisson counts")
    split_output = first.shape[-1] == serving.model.d_model
    k = first.shape[-1] / (1 if split_output else settings.expert_tp)
    n = sum(row.shape[-2] for row in group.rows) / (settings.expert_tp if split_output else 1)
    touched = np.maximum(touched, 1e-9)
    bandwidth = np.asarray(serving.cluster.accelerator.memory_bytes_per_s * serving.rates.expert_share)
    return _matmul_s(
        serving, group.name, rows / touched, np.asarray(k, float), n, serving.precision, touched, bandwidth
    )


def cache_token_bytes(serving: Serving, tp: Ints) -> Floats:
    """Return the bytes of one token in one layer on a rank of tp, as `serving.work`, for an array of degrees."""
    e, degrees = CACHE_BYTES[serving.kv_precision], np.asarray(tp)
    by_degree = {int(degree): cache_bytes_per_token(serving.model, int(degree), e) for degree in np.unique(degrees)}
    return np.vectorize(by_degree.__getitem__, otypes=[float])(degrees)


def _decode_attention_s(serving: Serving, settings: Settings, batch: PassBatch, block: BlockShape) -> Floats:
    """Return the seconds of attention over the cache. A pass reads each cached token once, with a window only the last
    ones, with chunks the keys of its chunk; with latent attention every head multiplies it."""
    model, chip = serving.model, serving.cluster.accelerator
    latent = model.latent_attention
    width = 2 * latent.kv_rank + latent.rope_dim if latent else model.qk_dim + model.head_dim
    f = Formulas(
        "s", requests=batch.requests, dp=settings.dp, context=_in_window(batch.context, block), drafted=batch.drafted,
        heads=model.n_heads, tp=settings.tp, width=width, cache_bytes=cache_token_bytes(serving, settings.tp),
        bandwidth=chip.memory_bytes_per_s * np.asarray(serving.rates.cache_share),
        rate=serving.flops_per_s(serving.wide) * np.asarray(serving.rates.cached_share),
    )  # fmt: skip
    cached = f.let("cached", f.requests / f.dp * f.context)
    computing = 2 * cached * (1 + f.drafted) * f.heads / f.tp * f.width / f.rate
    seconds = _smoothly(f, computing, cached * f.cache_bytes / f.bandwidth)
    return f("attention over the cache", seconds, "each cached token read once; arXiv 2405.04434 for latent attention")


def state_bytes(serving: Serving, tp: Ints) -> Floats:
    """Return the bytes of a sequence in one linear layer on a rank of tp: its states and the inputs of its convolution,
    in 32 bits, whatever its length (`generation.cache.CachedDeltaNet`)."""
    linear = serving.model.linear_attention
    assert linear is not None
    return np.asarray(4 * (linear.state_numel + linear.window_numel) / np.asarray(tp))


def _linear_attention_s(serving: Serving, settings: Settings, batch: PassBatch) -> Floats:
    """Return the seconds of linear attention: a request reads and writes its states once, and prompts are scanned."""
    linear = serving.model.linear_attention
    assert linear is not None
    f = Formulas(
        "s", requests=batch.requests, prompt=batch.prompt, dp=settings.dp, tp=settings.tp,
        state_bytes=state_bytes(serving, settings.tp), scan_flops=linear.scan_flops, scan_numel=linear.scan_numel,
        rate=serving.flops_per_s(serving.wide), bandwidth=serving.bytes_per_s,
    )  # fmt: skip
    states = 2 * f.requests / f.dp * f.state_bytes / f.bandwidth
    scans = f.prompt / f.dp / f.tp * (f.scan_flops / f.rate + 8 * f.scan_numel / f.bandwidth)
    return f("linear attention", states + scans, "states read and written once; arXiv 2412.06464, section 3.3")


def _in_window(context: ArrayLike, block: BlockShape) -> ArrayLike:
    """Return the number of cached tokens that a token reads: of the request, of the window, or of its chunk. The
    requests of a pass are at any place of their chunks, in the middle on average."""
    if block.chunked:
        return np.where(np.asarray(context) < block.window, context, block.window / 2)
    return np.minimum(context, block.window) if block.window else context


def _prompt_attention_s(serving: Serving, settings: Settings, batch: PassBatch, block: BlockShape) -> Floats:
    """Return the seconds of scores and weighted sums of prompt tokens; on average over half the prompt, or less with a
    window or chunks."""
    if block.window:
        # n tokens attend to n / 2 on average; to w (1 - w / 2n) within a window w below n; in m whole chunks of w and
        # one of r to (m w^2 + r^2) / 2n.
        n = 2 * np.asarray(batch.attended)
        w = np.minimum(block.window, n)
        attended = w * (1 - w / np.maximum(2 * n, 1))
        if block.chunked:
            whole = w * (n // np.maximum(w, 1))
            attended = (whole * w + (n - whole) ** 2) / np.maximum(2 * n, 1)
        batch = replace(batch, attended=attended)
    if serving.on_host:
        return host.prompt_attention_s(serving, settings, batch)
    model = serving.model
    f = Formulas(
        "s", prompt=batch.prompt, dp=settings.dp, attended=batch.attended, heads=model.n_heads, tp=settings.tp,
        qk_dim=model.qk_dim, c=model.head_dim,
        rate=serving.flops_per_s(serving.wide) * np.asarray(serving.rates.flash_share),
    )  # fmt: skip
    flops = 2 * f.prompt / f.dp * f.attended * f.heads / f.tp * (f.qk_dim + f.c)
    return f("attention over prompts", flops / f.rate, "FlashAttention-2, arXiv 2307.08691")


def _elementwise_s(serving: Serving, settings: Settings, block: BlockShape, tokens: Floats) -> Floats:
    """Return the seconds of norms, residual sums, rotation, activation and quantisation, by bytes moved."""
    if serving.on_host:
        return host.elementwise_s(serving, settings, block, tokens)
    inner = block.inner / settings.tp
    if block.experts and serving.model.moe is not None:
        inner = inner + serving.model.moe.top_k * block.expert_inner / settings.stage_ranks
    f = Formulas(
        "s", tokens=tokens, e=serving.wide_bytes, h=serving.model.d_model,
        heads_width=serving.model.n_heads * serving.model.head_dim, tp=settings.tp, inner=inner,
        bandwidth=serving.bytes_per_s,
    )  # fmt: skip
    moved = f.tokens * f.e * (10 * f.h + 4 * f.heads_width / f.tp + 3 * f.inner)
    return f("element-wise kernels", moved / f.bandwidth, "two norms and sums (5 h each), rotation, activation")


def _communication_s(serving: Serving, settings: Settings, batch: PassBatch, block: BlockShape) -> dict[str, Floats]:
    """Return the seconds of two all-reduces over tp; with dp attention the experts' is a token exchange over the
    stage."""
    if np.max(settings.stage_ranks) == 1:
        return {}
    n_bytes = batch.tokens / settings.dp * serving.model.d_model * serving.wide_bytes
    reduction_s = _all_reduce_s(serving, n_bytes, settings.tp)
    across = (settings.dp > 1) & bool(block.experts)
    f = Formulas("s", reductions=np.where(across, 1, block.branches), small_or_large_all_reduce=reduction_s)
    seconds = {"all-reduces": f("all-reduces", f.reductions * f.small_or_large_all_reduce)}
    if np.any(across):
        seconds["tokens to experts and back"] = np.where(across, _exchange_s(serving, settings, batch), 0.0)
    return seconds


def _all_reduce_s(serving: Serving, n_bytes: Floats, size: Ints) -> Floats:
    """Return the seconds of the faster of the library's all-reduce and the engine's own kernel. Inside a node, the
    kernel reads its part of every other rank's buffer and writes the sum back: a start and 2 S (n-1)/n bytes.
    `generate` has no kernel of its own."""
    if serving.on_host:
        return collectives.all_reduce(serving.cluster, n_bytes, size)
    link, rates = serving.cluster.inside, serving.rates
    own = np.asarray(rates.reduce_s) + 2 * n_bytes * (size - 1) / size / (
        link.bytes_per_s * np.asarray(rates.link_share)
    )
    library = collectives.all_reduce(serving.cluster, n_bytes, size)
    fastest = np.where(size <= serving.cluster.node_size, np.minimum(own, library), library)
    return np.where(size > 1, fastest, 0.0)


def _exchange_s(serving: Serving, settings: Settings, batch: PassBatch) -> Floats:
    """Return the seconds to send tokens to the ranks of their experts and results back: all-to-alls of each token's
    copies, or an all-gather and a reduce-scatter of all tokens, whichever is faster."""
    model, ranks = serving.model, settings.stage_ranks
    assert model.moe is not None
    own = batch.tokens / ranks * model.d_model
    copies = np.minimum(model.moe.top_k, settings.ep)
    to_experts = collectives.all_to_all(serving.cluster, own * copies * serving.sent_bytes, ranks, 1, "to experts")
    back = collectives.all_to_all(serving.cluster, own * copies * serving.wide_bytes, ranks, 1, "from experts")
    whole = batch.tokens * model.d_model
    gather = collectives.all_gather(serving.cluster, whole * serving.wide_bytes, ranks, 1, "all tokens gathered")
    scatter = collectives.reduce_scatter(serving.cluster, whole * serving.wide_bytes, ranks, 1, "results summed")
    return np.minimum(to_experts + back, gather + scatter)


def cache_bytes_per_token(spec: ModelSpec, tp: int, element_bytes: float) -> float:
    """Return the bytes of one token in one layer on a rank of tp.

        grouped heads       2 max(K / tp, 1) C e      with fewer kv heads than ranks each rank has a whole one
        latent attention    (L + P) e                 on every rank of tp, since all heads read it

    K kv heads, C elements of a head, L of the latent vector, P of the rotated key, e bytes of an element. A rank has
    this for the layers of its pipeline stage, and for `batch size x positions` tokens; every rank of cp has all of
    them. Sources: grouped heads, Ainslie et al., arXiv 2305.13245; latent, DeepSeek-V2, arXiv 2405.04434, table 1.
    """
    if spec.latent_attention is not None:
        return (spec.latent_attention.kv_rank + spec.latent_attention.rope_dim) * element_bytes
    return 2 * (spec.n_kv_heads * kv_replicas(spec.n_kv_heads, tp) // tp) * spec.head_dim * element_bytes
