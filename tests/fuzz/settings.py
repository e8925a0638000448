"""Draw random settings to verify: a model, a batch and an optimizer at test size, and a layout that fits them.

`draw(seed, number)` depends on nothing but its arguments and is the same on every machine.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from random import Random
from typing import Any, NamedTuple, get_args

from shardwright.config import MODEL_TABLES, OptimizerSection, Scope, as_toml
from shardwright.config.optimizer import LrScaleSection, WeightDecaySection
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.linear_sizes import LinearAttentionSpec
from shardwright.model.modules import FAMILIES
from shardwright.model.presets import PRESETS
from shardwright.model.sections import AuxScope, LatentAttentionSpec, MoESpec, RopeScaling, Scaling, Score
from shardwright.model.sizes import NormPosition
from shardwright.model.spec import Activation, ModelSpec, Norm, Positions
from shardwright.optimizers import OPTIMIZERS
from shardwright.split import rules
from shardwright.split.stages import schedule_problems
from shardwright.system import extensions
from shardwright.system.errors import LayoutError
from shardwright.system.units import divisors
from shardwright.verification.case import Case

WORLDS = {2: 1, 3: 1, 4: 4, 5: 1, 6: 4, 7: 1, 8: 6}
"""World sizes with their weights: sizes that several axes can share are drawn more often."""
INIT_STD = 0.2  # as of the models that `case.cut` reduces
NOT_DRAWN = (
    "compress_gradients",
    "compress_weights",
    "compress_dispatch",
    "compress_pipeline",
    "node_ranks",
    "offload_min_bytes",
)
"""Keys of the layout that stay at their defaults. The tolerances of compression were measured on models as they are
trained, and random models exceed them; verify offloads tensors of any size."""
_MOST_STAGES = 12
_TRIES = 30
"""Models that are tried with one draw of axes, before other axes are drawn."""


class DrawnSetting(NamedTuple):
    """A setting, and the number of draws before it that broke a rule of the model, the layout or the batch."""

    case: Case
    layout: Layout
    refused: int


def draw(seed: int, number: int) -> DrawnSetting:
    """Return setting `number` (0 or more) of a seed: any choice of `[model]`, `[batch]` and `[optimizer]`, and a layout
    of 2 to 8 ranks with any key of `[layout]`. All registered families, schedules and optimizers take part."""
    rng, refused = Random(f"{seed}/{number}"), 0
    while True:
        degrees, experts, family = _degrees(rng), rng.random() < 0.4, rng.choice(list(FAMILIES))
        for _ in range(_TRIES):
            layout = _layout(rng, degrees, experts)
            if layout.n_stages <= _MOST_STAGES:
                case, layout = _setting(rng, layout, experts, family)
                if not problems(case, layout):
                    return DrawnSetting(_with_chunks(rng, _with_documents(rng, case), layout), layout, refused)
            refused += 1


def problems(case: Case, layout: Layout) -> list[str]:
    """Return a sentence for each rule that a setting breaks; none for a valid setting."""
    broken = case.spec.problems() or rules.problems(case.spec, layout, case.seq_len)
    if case.seq_len > case.spec.max_seq_len:
        broken.append(f"seq_len={case.seq_len} is longer than max_seq_len={case.spec.max_seq_len}")
    broken += case.optimizer.kind.offload_problems(layout.offload_optimizer)
    if not broken and not case.shares(layout):
        broken.append(f"{layout} cannot take global_batch={case.global_batch} with micro_batch={case.micro_batch}")
    return broken


def _degrees(rng: Random) -> dict[str, int]:
    """Draw a world size and assign each of its prime factors to an axis."""
    degrees, rest = dict.fromkeys(DENSE_AXES, 1), rng.choices(list(WORLDS), list(WORLDS.values()))[0]
    for factor in (2, 3, 5, 7):
        while rest % factor == 0:
            degrees[rng.choice(DENSE_AXES)] *= factor
            rest //= factor
    return degrees


def _layout(rng: Random, degrees: dict[str, int], experts: bool) -> Layout:
    """Draw every other key that has a meaning with these degrees, except `stage_layers`."""
    layout = Layout().changed(**degrees, zero=None)
    for name, key in KEYS.items():
        if name in degrees or not (key.used(layout) or name == "ep"):
            continue
        possible = []
        for changes in _choices(rng, layout, name, experts):
            try:
                possible.append(layout.changed(**changes))
            except LayoutError:
                continue
        layout = rng.choice(possible) if possible else layout
    return layout


def _choices(rng: Random, layout: Layout, name: str, experts: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of a key that are drawn in a layout, each with the other keys that it needs."""
    if name == "ep":
        yield from ({"ep": ep} for ep in divisors(layout.dp_shard * layout.cp * layout.tp) if experts or ep == 1)
    elif name == "virtual_stages":
        yield from ({name: stages} for stages in layout.kind.virtual_stages_tried)
    elif members := KEYS[name].members:
        words = tuple(members())
        yield {name: tuple(rng.sample(words, rng.randint(1, len(words))))}
    elif name == "recompute_layers":
        yield from ({name: layers} for layers in (None, 1, 2))
    elif name == "place_experts_every":
        yield from ({name: steps} for steps in ((0, 1) if layout.ep > 1 else (0,)))
    elif name == "loss_chunk_tokens":
        yield from ({name: tokens} for tokens in (0, 1, 4, 7))
    elif name == "zero_secondary_ranks":
        yield from ({name: ranks} for ranks in divisors(layout.dp_shard * layout.cp)[:-1])
    elif name in NOT_DRAWN:
        return
    elif choices := KEYS[name].choices:
        for value in choices():
            if value == "usp":
                yield {name: value, "ulysses_degree": rng.choice(divisors(layout.cp)[1:])}
            elif name != "sequence_parallel" or value or not experts:  # experts need it
                yield {name: value}


def _setting(rng: Random, layout: Layout, experts: bool, family: str) -> tuple[Case, Layout]:
    """Draw a model and a batch for a layout, and its `stage_layers`; the result may break a rule."""
    n_stages = layout.n_stages
    n_layers = n_stages + rng.choice((0, 1, 2, 3)) if layout.pp > 1 else rng.choice((1, 2, 3, 4))
    if layout.pp > 1 and rng.random() < 0.4:
        ends = [0, *sorted(rng.sample(range(1, n_layers), n_stages - 1)), n_layers]
        stages = tuple(ends[at + 1] - ends[at] for at in range(n_stages))
        layout = replace(layout, stage_layers=stages)
    cuts = rules.sequence_cuts(layout)
    seq_len = cuts * rng.randint(-(-6 // cuts), max(1, 24 // cuts))
    micro_batch = rng.choice((1, 1, 2, 3))
    most = 2 * layout.pp + 1 if layout.pp > 1 else 3
    rounds = rng.choice([n for n in range(1, most + 1) if not schedule_problems(layout, n)] or [1])
    spec = _spec(rng, layout, n_layers=n_layers, seq_len=seq_len, experts=experts, family=family)
    case = Case(
        spec,
        seq_len=seq_len,
        global_batch=micro_batch * rounds * layout.data_ranks,
        micro_batch=micro_batch,
        seed=rng.randrange(1000),
        optimizer=_optimizer(rng),
    )
    return case, layout


def _with_documents(rng: Random, case: Case) -> Case:
    """Give half of the settings attention within documents and positions of either kind, if the family can."""
    if not FAMILIES[case.spec.family].documents or rng.random() < 0.5:
        return case
    return replace(case, attention="document", positions=rng.choice(get_args(Scope)))


def _with_chunks(rng: Random, case: Case, layout: Layout) -> Case:
    """Give a third of the settings some switches of Llama 4, each if the model remains valid with it."""
    if rng.random() < 0.67:
        return case
    spec, layer = case.spec, rng.randrange(case.spec.n_layers)
    changes: list[dict[str, Any]] = [
        {"qk_norm_weight": False},
        {"qk_norm_heads": True},
        {"window_chunked": True},
        {"global_layers": (layer,)},
        {"nope_layers": (layer,)},
        {"temperature_scale": 0.3, "temperature_interval": rng.choice((1, 4))},
        {"moe": spec.moe and replace(spec.moe, scale_input=True)},
    ]
    for each in changes:
        changed = replace(case, spec=replace(case.spec, **each))
        if rng.random() < 0.7 and not problems(changed, layout):
            case = changed
    return case


def _spec(rng: Random, layout: Layout, *, n_layers: int, seq_len: int, experts: bool, family: str) -> ModelSpec:
    latent = _latent(rng) if rng.random() < 0.25 else None
    n_heads = layout.tp * layout.cp_ulysses * rng.choice((1, 1, 2, 3))
    n_kv_heads = n_heads if latent else rng.choice(divisors(n_heads))
    positions: Positions = "rope" if latent else rng.choice(get_args(Positions))
    head_dim = latent.v_dim if latent else rng.choice((4, 6, 8) if positions == "rope" else (4, 5, 7, 8))
    max_seq_len = seq_len * rng.choice((1, 1, 2))
    norm, qk_norm = rng.choice(get_args(Norm)), not latent and rng.random() < 0.4
    bias = not latent and not experts and rng.random() < 0.4
    parallel = family == "decoder" and not latent and not experts and rng.random() < 0.3
    parted = positions == "rope" and not latent and head_dim % 4 == 0
    fraction = rng.choice((1.0, 1.0, 0.5)) if parted else 1.0
    pairs = (latent.rope_dim if latent else int(head_dim * fraction)) // 2
    windows = _windows(rng, n_layers, seq_len, positions, latent is None and family == "decoder")
    can_be_linear = family == "decoder" and not (latent or bias or windows.get("window"))
    nets = can_be_linear and not parallel and rng.random() < 0.4
    return ModelSpec(
        family=family,
        n_layers=n_layers,
        d_model=n_heads * head_dim if rng.random() < 0.5 else rng.randint(8, 40),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ffn=layout.tp * rng.randint(3, 12),
        vocab_size=rng.randint(17, 97),
        max_seq_len=max_seq_len,
        norm=norm,
        parallel_branches=parallel,
        norm_position=rng.choice(get_args(NormPosition)) if family == "decoder" and not parallel else "before",
        norm_offset=norm == "rmsnorm" and rng.random() < 0.3,
        norm_bias=norm == "rmsnorm" or rng.random() < 0.7,
        norm_eps=rng.choice((1e-5, 1e-6)),
        activation=rng.choice(get_args(Activation)),
        positions=positions,
        rope_theta=rng.choice((1e4, 5e5)),
        rope_scaling=_scaling(rng, seq_len, pairs) if positions == "rope" and rng.random() < 0.4 else None,
        rope_fraction=fraction,
        qk_norm=qk_norm,
        qk_norm_whole=qk_norm and rng.random() < 0.5,
        embedding_scale=rng.choice((1.0, 1.0, 3.0)),
        residual_scale=rng.choice((1.0, 1.0, 0.6)),
        attention_scale=0.0 if latent else rng.choice((0.0, 0.0, 0.2)),
        logit_divisor=rng.choice((1.0, 1.0, 1.7)),
        bias=bias,
        qkv_bias=not latent and not bias and rng.random() < 0.3,
        nope_interval=rng.choice((0, 0, 1, n_layers)) if positions == "rope" and not latent else 0,
        **windows,
        attention_gate=not latent and rng.random() < 0.2,
        linear_attention=_linear(rng, layout, n_layers) if nets else None,
        logit_softcap=rng.choice((0.0, 0.0, 0.5)),
        o_bias=not latent and not bias and rng.random() < 0.2,
        tied_embedding=rng.random() < 0.4,
        dropout=rng.choice((0.0, 0.0, 0.1, 0.3)),
        moe=_experts(rng, layout, n_layers) if experts else None,
        latent_attention=latent,
        mtp_modules=rng.choice((0, 0, 0, 1, 2)),
        mtp_weight=rng.choice((0.3, 1.0)),
        init_std=INIT_STD,
    )


def _windows(rng: Random, n_layers: int, seq_len: int, positions: Positions, can: bool) -> dict[str, Any]:
    """Windows, sinks and soft caps of attention, which latent attention does not have."""
    if not can or rng.random() < 0.6:
        return {}
    window = rng.choice((0, 1, 3, seq_len // 2, seq_len))
    return {
        "window": window,
        "global_interval": rng.choice((0, 2 if n_layers > 1 else 1)) if window else 0,
        "first_window": rng.choice((0, 0, 1)) if window else 0,
        "window_rope_theta": rng.choice((0.0, 300.0)) if window and positions == "rope" else 0.0,
        "attention_sinks": rng.random() < 0.5,
        "attention_softcap": rng.choice((0.0, 0.0, 0.5)),
    }


def _scaling(rng: Random, seq_len: int, pairs: int) -> RopeScaling:
    kind, factor = rng.choice(get_args(Scaling)), rng.choice((2.0, 8.0))
    length = max(1, seq_len // rng.choice((1, 2)))
    if kind == "llama3":
        return RopeScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=rng.choice((2.0, 4.0)), original_max_seq_len=length
        )
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind=kind, factor=factor)
    if kind == "longrope":
        short, long = (tuple(rng.uniform(1, 4) for _ in range(pairs)) for _ in range(2))
        length, attention_factor = max(2, length), rng.choice((0.0, 1.3))
        return RopeScaling(
            kind="longrope", factor=factor, original_max_seq_len=length, attention_factor=attention_factor,
            short_factor=short, long_factor=long,
        )  # fmt: skip
    mscale, all_dim = rng.choice(((0.0, 0.0), (1.0, 0.8)))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=length,
        beta_fast=rng.choice((8.0, 32.0)),
        beta_slow=rng.choice((1.0, 0.5)),
        attention_factor=rng.choice((0.0, 1.3)),
        mscale=mscale,
        mscale_all_dim=all_dim,
        truncate=rng.random() < 0.5,
    )


def _latent(rng: Random) -> LatentAttentionSpec:
    nope_dim, rope_dim = rng.randint(2, 8), rng.choice((2, 4))
    return LatentAttentionSpec(
        kv_rank=rng.randint(4, 12),
        q_rank=rng.choice((0, rng.randint(4, 12))),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=rng.randint(4, nope_dim + rope_dim),
    )


def _linear(rng: Random, layout: Layout, n_layers: int) -> LinearAttentionSpec:
    n_k_heads = layout.tp * rng.choice((1, 1, 2))
    return LinearAttentionSpec(
        n_k_heads=n_k_heads,
        n_v_heads=n_k_heads * rng.choice((1, 2, 3)),
        k_dim=rng.randint(2, 7),
        v_dim=rng.randint(2, 7),
        conv_width=rng.randint(1, 4),
        full_interval=rng.choice((0, *range(2, n_layers + 1))),
    )


def _experts(rng: Random, layout: Layout, n_layers: int) -> MoESpec:
    n_experts = max(2, layout.ep * rng.choice((1, 1, 2, 3)))
    n_groups = rng.choice(divisors(n_experts))
    groups_per_token = rng.randint(1, n_groups)
    top_k = rng.randint(1, min(3, groups_per_token * n_experts // n_groups))
    n_shared = layout.tp * rng.choice((0, 0, 1))  # the inner width is partitioned over tp
    return MoESpec(
        n_experts=n_experts,
        top_k=top_k,
        d_ffn=rng.randint(4, 24),
        n_shared=n_shared,
        d_shared=layout.tp * rng.randint(1, 9) if n_shared and rng.random() < 0.4 else 0,
        shared_gate=n_shared > 0 and rng.random() < 0.5,
        first_dense=rng.choice((0, min(1, n_layers - 1))),
        interval=rng.choice((1, 1, min(2, n_layers))),
        dense_layers=rng.choice(((), (), (n_layers // 2,))),
        bias=rng.random() < 0.3,
        score=rng.choice(get_args(Score)),
        normalise=top_k > 1 and rng.random() < 0.6,
        weight_scale=rng.choice((1.0, 2.5)),
        n_groups=n_groups,
        groups_per_token=groups_per_token,
        capacity_factor=rng.choice((0.0, 0.0, 1.0, 1.5)),
        bias_rate=rng.choice((0.0, 0.01)),
        aux_loss=rng.choice((0.0, 0.01)),
        aux_scope=rng.choice(get_args(AuxScope)),
        z_loss=rng.choice((0.0, 0.001)),
        force_balance=rng.random() < 0.1,
    )


def _optimizer(rng: Random) -> OptimizerSection:
    name = rng.choice(list(OPTIMIZERS))
    options: dict[str, Any] = {}
    for key, option in OPTIMIZERS[name].options.items():
        if isinstance(option.default, bool):
            options[key] = rng.choice((False, True))
            continue
        most = option.below if option.below <= 1 else 10 * option.default
        middle = round(max(option.least, 0.0) + 0.5 * (most - max(option.least, 0.0)), 12)
        options[key] = rng.choice((option.default, int(middle) if option.whole else middle))
    return OptimizerSection(
        name=name,
        lr=rng.choice((1e-4, 3e-4, 1e-3)),
        weight_decay=rng.choice((0.0, 0.1)),
        clip_norm=rng.choice((0.0, 1.0)),
        state_dtype="parameters"
        if OPTIMIZERS[name].means or OPTIMIZERS[name].in_blocks
        else rng.choice(("parameters", "parameters", "bf16")),
        lr_scale=LrScaleSection(**_by_kind(rng, (0.5, 2.0))),
        weight_decay_by_kind=WeightDecaySection(**_by_kind(rng, (0.0, 0.2))),
        **options,
    )


def _by_kind(rng: Random, values: tuple[float, ...]) -> dict[str, float]:
    """Draw values for up to two kinds of parameters; often for none."""
    n = rng.choice((0, 0, 1, 2))
    return {kind: rng.choice(values) for kind in rng.sample(sorted(LrScaleSection.model_fields), n)}


def in_words(case: Case) -> str:
    """Describe the model of a setting in a line: sizes, and each choice that is not at its default."""
    spec = case.spec
    words = [f"{spec.n_layers} layers", f"{spec.n_heads}/{spec.n_kv_heads} heads"]
    for name, value in _given(spec).items():
        if name in MODEL_TABLES or value is True:
            words.append(name)
        elif isinstance(value, str):
            words.append(value)
        elif name == "dropout":
            words.append(f"dropout {value:g}")
    if case.attention == "document":
        words.append("documents" + " with own positions" * (case.positions == "document"))
    return ", ".join(words)


def run_file(case: Case, layout: Layout, remark: str) -> str:
    """Return a run file that `shardwright verify --full` reads back as the same setting. `remark` is its first line,
    without the #."""
    optimizer = case.optimizer.model_dump(exclude_none=True)
    usual = OptimizerSection(name=case.optimizer.name).model_dump(exclude_none=True) | {"name": OptimizerSection().name}
    sections: dict[str, dict[str, Any]] = {
        "model": {"preset": "debug"} | _changes(case.spec),
        "data": {"path": "not needed"} | _scopes(case),
        "batch": {"seq_len": case.seq_len, "global_batch": case.global_batch, "micro_batch": case.micro_batch},
        "layout": {
            name: list(value) if isinstance(value, tuple) else value for name, value in layout.settings().items()
        },
        "optimizer": {key: value for key, value in optimizer.items() if value != usual[key]},
    }
    top: dict[str, Any] = {"out": "not needed", "steps": case.steps, "seed": case.seed}
    if loaded := extensions.loaded():
        top["extensions"] = loaded
    lines = [f"# {remark}", *(f"{key} = {as_toml(value)}" for key, value in top.items())]
    for section, values in sections.items():
        if values:
            lines += ["", f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _scopes(case: Case) -> dict[str, Any]:
    return {name: value for name in ("attention", "positions") if (value := getattr(case, name)) != "sequence"}


def _changes(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields in which a model differs from the preset "debug", which has none of the tables."""
    preset = PRESETS["debug"]
    changed = {each.name: getattr(spec, each.name) for each in fields(spec)}
    changed = {name: value for name, value in changed.items() if value != getattr(preset, name)}
    return {name: _given(value) if name in MODEL_TABLES else value for name, value in changed.items()}


def _given(section: Any) -> dict[str, Any]:
    """Return the fields of a model or of one of its tables that are not at their defaults."""
    values = {each.name: (getattr(section, each.name), each.default) for each in fields(section)}
    return {name: value for name, (value, default) in values.items() if default is MISSING or value != default}
