"""The case of a run file, reduced to test size.

Everything that decides how a model and a batch can be partitioned is kept: the numbers of ranks that divide the heads,
the inner width, the experts and the sequence, whether kv heads are grouped, and which sizes are uneven; the numbers of
stages that the layers can be partitioned into, and which stage has more layers. Every choice of the model is kept.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count

from shardwright.layout.layout import Layout
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.mup import MupSpec
from shardwright.model.sections import LatentAttentionSpec, MoESpec, RopeScaling
from shardwright.model.spec import ModelSpec
from shardwright.split.rules import expert_sizes
from shardwright.split.stages import most_layers, problems, schedule_problems
from shardwright.system.units import divisors
from shardwright.verification.case import Case, CaseStage, cut_fp8, cut_optimizer

_HEAD_DIM = 8
_LAYERS = 2  # minimum; one more than the stages of a pipeline, so that they are uneven
_LAYERS_OF_PIPELINES = 11  # minimum; so that the order of layer numbers differs from the order of names (10 before 2)
_FFN = 24  # minimum
_TOKENS = 12  # minimum
_EXPERT_FFN = 16  # minimum; a multiple of the alignment of grouped matmuls, if the true width is
_TOP_K = 2
_RANK = 3  # of adapters; prime, as the vocabulary
_GROUPS = 4
_LATENT = 12  # of keys and values; the latent vector of queries is narrower, so that the two differ
_NOPE_DIM, _ROPE_DIM = 8, 4
_WINDOW = 5  # less than the tokens of a rank, more than a chunk of a ring
_VOCABULARY = 73  # prime, so that no degree divides it; dp_shard 3 or 4 cuts rows of tp 2 into unequal numbers
_CHUNKS = 3  # maximum chunks of a micro-batch's tokens, if the loss is chunked
_ACCUMULATION = 2  # minimum; in a pipeline more than it has stages, so that it is filled
_ACCUMULATION_IN_16_BITS = 4  # so that sums of gradients have enough terms to show whether they were rounded
_INIT_GAIN = 1.13
"""Standard deviation of initial weights x the root of d_model. With a tenth of it and so few tokens, gradients of the
first layers are a thousandth of the last layers'. With twice as much rounding grows from layer to layer: one process in
bfloat16 is wrong by 47 % of a gradient of 11 layers of 128 features; with this value by 4 %, of 32 layers by 7 %."""


def cut(case: Case, layouts: Iterable[Layout]) -> Case:
    """Return a case at test size.

    Each of `layouts` is possible for its model if and only if it is possible for the true one (a layout with
    `stage_layers` after `cut_layout`). All of them can share its batch.
    """
    layouts = list(layouts)
    world_size = max(layout.world_size for layout in layouts)
    data_ranks = math.lcm(*(layout.data_ranks for layout in layouts))
    seq_len = size_like(case.seq_len, _TOKENS, 2 * world_size)
    per_rank = max(1, case.global_batch // data_ranks)  # sequences of a data rank
    fewest = _ACCUMULATION_IN_16_BITS if case.dtype == "bfloat16" else _ACCUMULATION
    micro_batch = 2 if case.micro_batch > 1 and per_rank >= 2 * _ACCUMULATION else 1
    spec = replace(cut_spec(case.spec, world_size, _layers(case.spec, layouts)), max_seq_len=seq_len)
    accumulation = _accumulation(layouts, data_ranks, case.global_batch, fewest)
    least = _accumulation(layouts, data_ranks, 1, 1)

    def cut_stage(stage: CaseStage) -> CaseStage:
        """Shorter sequences, fewer micro-batches and smaller ones stay so, as far as the layouts can run them."""
        shorter = stage.seq_len < case.seq_len
        micro = micro_batch if stage.micro_batch >= case.micro_batch else 1
        fewer = stage.global_batch * case.micro_batch < case.global_batch * stage.micro_batch
        length = size_like(stage.seq_len, _TOKENS // 2, 2 * world_size) if shorter else seq_len
        return CaseStage(data_ranks * micro * (least if fewer else accumulation), micro, length)

    return replace(
        case,
        spec=spec,
        fp8=cut_fp8(case.fp8, spec, layouts),
        optimizer=cut_optimizer(case.optimizer),
        seq_len=seq_len,
        global_batch=data_ranks * micro_batch * accumulation,
        micro_batch=micro_batch,
        stages=tuple(map(cut_stage, case.stages)),
    )


def cut_each(case: Case, layouts: Sequence[Layout]) -> list[tuple[Case, Layout]]:
    """Return a case at test size for each layout: one for all layouts with equal numbers of stages and data ranks, so
    that each has the layers and the batch that it needs, and few references are needed."""
    alike: dict[tuple[int, int], list[Layout]] = defaultdict(list)
    for layout in layouts:
        alike[layout.n_stages, layout.data_ranks].append(layout)
    small = {degrees: cut(case, some) for degrees, some in alike.items()}
    pairs = [(small[layout.n_stages, layout.data_ranks], layout) for layout in layouts]
    return [(small_case, cut_layout(layout, case, small_case)) for small_case, layout in pairs]


def cut_layout(layout: Layout, true: Case, case: Case) -> Layout:
    """Return a layout of `true` for its reduced case: `stage_layers` reduced as the layers are, in the same order;
    `recompute_layers` with these, to fewer than all layers of a stage if it was fewer; and `loss_chunk_tokens` as the
    tokens of a micro-batch are, for several chunks if there were several.

    Values that do not fit the true model are kept, to be refused.
    """
    most = _most_layers(layout, true)
    if counts := _cut_stages(layout, true.spec.n_layers, case.spec.n_layers):
        layout = replace(layout, stage_layers=counts)
    if layout.recompute_layers is not None and layout.recompute_layers <= most:
        some = layout.recompute_layers < most
        layout = replace(
            layout, recompute_layers=max(1, min(layout.recompute_layers, _most_layers(layout, case) - some))
        )
    chunk, whole, tokens = (
        layout.loss_chunk_tokens,
        *(one.micro_batch * one.seq_len // layout.cp for one in (true, case)),
    )
    if 0 < chunk < whole and tokens > 1:
        few = -(-tokens // min(_CHUNKS, -(-whole // chunk)))
        # The last chunk stays shorter if it was shorter.
        alike = [n for n in range(1, tokens) if bool(tokens % n) == bool(whole % chunk)]
        layout = replace(layout, loss_chunk_tokens=min(alike or [few], key=lambda n: abs(n - few)))
    return layout


def cut_spec(spec: ModelSpec, world_size: int, n_layers: int = _LAYERS) -> ModelSpec:
    """Return the smallest model that splits over any number of ranks up to `world_size` as this one does, with
    `n_layers` layers if it has as many."""
    n_heads, n_kv_heads = next(_heads(spec.n_heads, spec.n_kv_heads, world_size))
    latent = _cut_latent(spec.latent_attention) if spec.latent_attention else None
    head_dim = min(_HEAD_DIM, spec.head_dim) if latent is None else latent.v_dim
    square = spec.d_model == spec.n_heads * spec.head_dim
    d_model = n_heads * head_dim if square else size_like(spec.d_model, (n_heads + 1) * head_dim, world_size)
    small = replace(spec, head_dim=head_dim, rope_fraction=_cut_fraction(spec, head_dim), latent_attention=latent)
    mup = None if spec.mup is None else _cut_mup(spec, spec.mup, d_model, min(n_layers, spec.n_layers), head_dim)
    return replace(
        small,
        rope_scaling=_cut_scaling(spec.rope_scaling, small.rope_dim // 2),
        n_layers=min(n_layers, spec.n_layers),
        nope_interval=min(n_layers, spec.nope_interval),
        nope_layers=(0,) if spec.nope_layers else (),
        temperature_interval=min(_WINDOW, spec.temperature_interval),
        window=min(_WINDOW, spec.window),
        global_interval=0 if spec.first_window or spec.global_layers else min(n_layers, spec.global_interval),
        first_window=0
        if spec.global_layers
        else min(n_layers - (spec.first_window < spec.n_layers), spec.first_window),
        global_layers=(0,) if spec.global_layers else (),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_ffn=size_like(spec.d_ffn, _FFN, world_size),
        vocab_size=min(_VOCABULARY, spec.vocab_size),
        linear_attention=_cut_linear(spec.linear_attention, world_size, min(n_layers, spec.n_layers)),
        moe=_cut_experts(spec.moe, world_size, min(n_layers, spec.n_layers)) if spec.moe else None,
        init_std=_INIT_GAIN / math.sqrt(d_model if mup is None or not mup.base_width else mup.base_width),
        mup=mup,
        lora=None if spec.lora is None else _cut_lora(spec, spec.lora, world_size),
    )


def _cut_lora(spec: ModelSpec, lora: LoraSpec, world_size: int) -> LoraSpec:
    """Return adapters of a lower rank with the same scale, so that the rank stays below the sides of matrices. Ranks
    that can shard the experts' adapters along the true rank can shard them along the lower one."""
    rank = size_like(lora.rank, _RANK, world_size if "lora.rank" in expert_sizes(spec) else 1)
    return replace(lora, rank=rank, alpha=lora.scale / replace(lora, rank=rank, alpha=1.0).scale)


def _cut_mup(spec: ModelSpec, mup: MupSpec, d_model: int, n_layers: int, head_dim: int) -> MupSpec:
    """Return a base model at test size, about as much narrower and shallower than the model as the true one is."""

    def base(true: int, size: int, small: int) -> int:
        return max(1, round(true * small / size)) if true else 0

    return MupSpec(
        base_width=base(mup.base_width, spec.d_model, d_model),
        base_depth=base(mup.base_depth, spec.n_layers, n_layers),
        base_head_dim=base(mup.base_head_dim, spec.head_dim, head_dim),
    )


def _cut_fraction(spec: ModelSpec, head_dim: int) -> float:
    """Return the fraction of heads of `head_dim` elements that are rotated: this model's, with whole pairs."""
    if spec.rope_fraction == 1 or int(head_dim * spec.rope_fraction) % 2 == 0 < int(head_dim * spec.rope_fraction):
        return spec.rope_fraction
    return max(2, 2 * round(head_dim * spec.rope_fraction / 2)) / head_dim


def _cut_scaling(scaling: RopeScaling | None, n_pairs: int) -> RopeScaling | None:
    """Return the scaling of the rotary frequencies with as many divisors as there are pairs, spread over the given."""

    def spread(factors: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factors[pair * len(factors) // n_pairs] for pair in range(n_pairs)) if factors else ()

    if scaling is None:
        return None
    return replace(scaling, short_factor=spread(scaling.short_factor), long_factor=spread(scaling.long_factor))


def _cut_experts(moe: MoESpec, world_size: int, n_layers: int) -> MoESpec:
    """Return the fewest experts that any degree partitions like the true ones; a token still has to choose among
    experts, and among groups, if it had to."""
    top_k, n_groups = min(moe.top_k, _TOP_K), min(moe.n_groups, _GROUPS)
    choosy = moe.groups_per_token < moe.n_groups
    groups_per_token = min(moe.groups_per_token, 2, n_groups - 1) if choosy else n_groups
    wanted = _divided_by(moe.n_experts, world_size)

    def alike(n_experts: int) -> bool:
        size, rest = divmod(n_experts, n_groups)
        enough = groups_per_token * size >= top_k and size >= min(2, moe.n_experts // moe.n_groups)
        return not rest and enough and (n_experts > top_k) and _divided_by(n_experts, world_size) == wanted

    n_experts = next((n for n in range(1, moe.n_experts) if alike(n)), None)
    if n_experts is None:
        n_experts, n_groups = moe.n_experts, moe.n_groups
        top_k, groups_per_token = moe.top_k, moe.groups_per_token
    return replace(
        moe,
        n_experts=n_experts,
        top_k=top_k,
        d_ffn=size_like(moe.d_ffn, _EXPERT_FFN, world_size),
        n_shared=size_like(moe.n_shared, 1, world_size),
        d_shared=size_like(moe.d_shared, _EXPERT_FFN, world_size) if moe.d_shared else 0,
        first_dense=min(moe.first_dense, 1),
        interval=min(moe.interval, n_layers),
        dense_layers=(0,) if moe.dense_layers else (),
        n_groups=n_groups,
        groups_per_token=groups_per_token,
    )


def _cut_latent(latent: LatentAttentionSpec) -> LatentAttentionSpec:
    nope_dim, rope_dim = min(latent.nope_dim, _NOPE_DIM), min(latent.rope_dim, _ROPE_DIM)
    return LatentAttentionSpec(
        kv_rank=min(latent.kv_rank, _LATENT),
        q_rank=min(latent.q_rank, _LATENT - 2),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=min(latent.v_dim, _HEAD_DIM, nope_dim + rope_dim),
    )


def _cut_linear(linear: LinearAttentionSpec | None, world_size: int, n_layers: int) -> LinearAttentionSpec | None:
    """Return the fewest heads that any degree partitions like the true ones, with as many value heads for each."""
    if linear is None:
        return None
    n_k_heads, group = size_like(linear.n_k_heads, 1, world_size), min(linear.n_v_heads // linear.n_k_heads, 2)
    return replace(
        linear,
        n_k_heads=n_k_heads,
        n_v_heads=n_k_heads * group,
        k_dim=min(linear.k_dim, _HEAD_DIM),
        v_dim=min(linear.v_dim, _HEAD_DIM - 2),
        full_interval=min(n_layers, linear.full_interval),
    )


def _layers(spec: ModelSpec, layouts: Sequence[Layout]) -> int:
    """Return the fewest layers with which every pipeline has uneven stages, or the stages in its declared order."""
    ordered = [layout for layout in layouts if layout.stage_layers]
    uneven = [layout for layout in layouts if layout.pp > 1 and not layout.stage_layers]
    some = _LAYERS_OF_PIPELINES if uneven or ordered else _LAYERS
    least = max([some, *(layout.n_stages for layout in ordered), *(layout.n_stages + 1 for layout in uneven)])
    whole = spec.n_layers
    enough = (n for n in range(least, whole) if all(_cut_stages(layout, whole, n) for layout in ordered))
    return next(enough, spec.n_layers)


def _cut_stages(layout: Layout, whole: int, n_layers: int) -> tuple[int, ...] | None:
    """Return `stage_layers` for `n_layers` instead of `whole`: the order of the stages by their layers is kept.

    Returns None if no such counts add up to `n_layers`, or the layout's do not add up to `whole`.
    """
    counts = layout.stage_layers
    if counts is None or sum(counts) != whole:
        return None
    levels = sorted(set(counts))
    # From one level to the next every later stage has at least one layer more.
    rises = next(_multiples([sum(count >= level for count in counts) for level in levels], n_layers), None)
    if rises is None:
        return None
    heights = dict(zip(levels, accumulate(rises), strict=True))
    return tuple(heights[count] for count in counts)


def _most_layers(layout: Layout, case: Case) -> int:
    """Return the layers of the largest stage; 0 if the layers cannot be partitioned."""
    return 0 if any(problems(case.spec, layout)) else most_layers(case.spec, layout, case.seq_len)


def _multiples(numbers: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield counts of `numbers`, at least 1, with the weighted sum `total`; small counts of the first come first."""
    first, *rest = numbers
    if not rest:
        if total > 0 and total % first == 0:
            yield (total // first,)
        return
    for times in range(1, total // first + 1):
        for others in _multiples(rest, total - times * first):
            yield (times, *others)


def _accumulation(layouts: Sequence[Layout], data_ranks: int, global_batch: int, fewest: int) -> int:
    """Return micro-batches for each of `data_ranks`, at least `fewest`, a multiple of every layout's number: enough for
    each layout, up to one sequence a micro-batch, and even if a schedule has to halve them."""

    def enough(n: int, layout: Layout) -> bool:
        microbatches = n * data_ranks // layout.data_ranks
        wanted = max(fewest, layout.n_stages + 1 if layout.pp > 1 else 1)
        possible = not schedule_problems(layout, microbatches)
        return possible and microbatches >= min(wanted, max(1, global_batch // layout.data_ranks))

    return next(n for n in count(1) if all(enough(n, layout) for layout in layouts))


def size_like(size: int, least: int, up_to: int) -> int:
    """Return the smallest number from `least` on with the same divisors in 1 to `up_to` as `size`."""
    wanted = _divided_by(size, up_to)
    return next((n for n in range(min(least, size), size) if _divided_by(n, up_to) == wanted), size)


def _divided_by(size: int, up_to: int) -> list[bool]:
    return [size % degree == 0 for degree in range(1, up_to + 1)]


def _heads(n_heads: int, n_kv_heads: int, up_to: int) -> Iterator[tuple[int, int]]:
    """Yield query and kv heads that any degree partitions like the true ones, the fewest first.

    A degree partitions kv heads, or replicates them if it is a multiple of their number, or is impossible.
    """

    def way(kv_heads: int, degree: int) -> str:
        return "partitioned" if kv_heads % degree == 0 else "replicated" if degree % kv_heads == 0 else "impossible"

    degrees = range(1, up_to + 1)
    for heads in range(1, n_heads + 1):
        if _divided_by(heads, up_to) == _divided_by(n_heads, up_to):
            for kv_heads in divisors(heads):
                alike = all(way(kv_heads, degree) == way(n_kv_heads, degree) for degree in degrees)
                if alike and (heads > kv_heads) == (n_heads > n_kv_heads):
                    yield heads, kv_heads
