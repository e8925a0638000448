"""Proves that layouts train as one process does in float64: of 2 ranks the whole matrix, of 4 a part of it in which
every two values of keys meet, of 8 chosen ones; and that the matrix holds what it says it does.

The whole matrix of 4 and of 8 ranks: `shardwright verify examples/debug.toml --matrix 8`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import pytest

from shardwright.config import OptimizerSection
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.keys import CP_METHODS, KEYS
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.schedule.registry import names
from shardwright.split.rules import problems
from shardwright.system.errors import LayoutError
from shardwright.verification import Case, Report, ReportRow, Verifier
from shardwright.verification.case import PLAIN_SGD
from shardwright.verification.matrix import layouts
from tests.marks import prove, rest_prove
from tests.mutation import Mutation
from tests.training.worlds import SPEC, in_few_micro_batches, train_mutated

EVEN = replace(SPEC, n_heads=4, n_kv_heads=2, d_model=32, max_seq_len=32)
CASE = Case(EVEN, seq_len=16, global_batch=8, seed=1, optimizer=OptimizerSection(lr=1e-3), steps=2)
DEEP = replace(EVEN, n_layers=5)
"""Enough layers for two stages on each of two ranks, and for one of these to have one more."""
ON_EIGHT = [
    Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3, sequence_parallel=True),
    Layout(dp_shard=2, cp=2, tp=2, zero=2, sequence_parallel=True),
    Layout(cp=4, tp=2, cp_method="usp", ulysses_degree=2, zero=3, sequence_parallel=False),
    Layout(dp_replicate=2, cp=2, tp=2, cp_method="ring", sequence_parallel=False),
    Layout(dp_shard=2, tp=4, zero=1, sequence_parallel=True),  # two kv heads on four ranks: copies
    Layout(pp=2, dp_shard=2, tp=2, zero=3, zero_pp_gather="microbatch", sequence_parallel=True, pp_schedule="zb-h1"),
    Layout(pp=2, dp_replicate=2, cp=2, pp_schedule="dualpipe", zero=1),
]


def check(verifier: Verifier, case: Case, layout: Layout) -> None:
    report = verifier.parity(in_few_micro_batches(case, layout), layout)
    assert report.equal, (layout, report.differing or report.worst)
    # Sums of at most 128 tokens in another order, in 14 layers of products.
    strict = [row for row in report.rows if row.tolerance <= 1e-10]
    assert max(row.error for row in strict) < 1e-12, (layout, report.worst)


IN_TURN = {name: {*key.in_turn, key.default} for name, key in KEYS.items() if key.in_turn}


def is_plain(layout: Layout) -> bool:
    """Whether the keys that go with every axis are at their default."""
    return all(getattr(layout, name) == KEYS[name].default for name in IN_TURN)


def plain(spec: ModelSpec, world_size: int, seq_len: int) -> list[Layout]:
    """The layouts without what goes with every axis."""
    return [layout for layout in layouts(spec, world_size, seq_len) if is_plain(layout)]


def degrees_of(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.degree(axis) for axis in DENSE_AXES)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_combination_of_degrees_has_a_layout_with_recomputation_or_other_savers(world_size: int):
    found = layouts(DEEP, world_size, 48)
    varied = [layout for layout in found if not is_plain(layout)]
    assert {degrees_of(layout) for layout in varied} == {degrees_of(layout) for layout in found}
    usual = {name: KEYS[name].default for name in IN_TURN}
    assert {replace(layout, **usual) for layout in varied} <= set(found)


def meetings(layout: Layout) -> set[tuple[object, object]]:
    """Every two values of the keys that go with every axis, and each value with each axis of several ranks, with token
    shards, and with a split backward pass."""
    values = [(name, getattr(layout, name)) for name in IN_TURN]
    kinds: list[object] = [axis for axis, n in zip(DENSE_AXES, degrees_of(layout), strict=True) if n > 1]
    kinds += ["ep"] * (layout.ep > 1) + ["token shards"] * layout.token_shards
    kinds += ["split"] * (layout.pp > 1 and layout.kind.splits_backward)
    return {*combinations(values, 2), *product(kinds, values)}


def with_every_value(layout: Layout) -> Iterator[Layout]:
    """The layout with every combination of values that it can have."""
    for values in product(*IN_TURN.values()):
        try:
            yield replace(layout, **dict(zip(IN_TURN, values, strict=True)))
        except LayoutError:
            continue


@pytest.mark.parametrize(("world_size", "experts"), rest_prove([(2, False), (2, True), (4, False)], (2, False)))
def test_every_two_values_that_a_layout_can_have_meet_in_one(world_size: int, experts: bool):
    moe = MoESpec(n_experts=4, top_k=2, d_ffn=16) if experts else None
    found = layouts(replace(DEEP, moe=moe), world_size, 48)
    # What a layout can have depends on its ZeRO stage and on which axes it has.
    alike = {(each.zero, each.ep > 1, *(n > 1 for n in degrees_of(each))): each for each in found if is_plain(each)}
    possible = {pair for each in alike.values() for other in with_every_value(each) for pair in meetings(other)}
    of_all = {pair for each in found for pair in meetings(each)}
    assert of_all >= possible
    n_plain = sum(map(is_plain, found))
    assert len(found) - n_plain < 30, "a few layouts are enough"


def test_the_layouts_of_two_ranks_are_these():
    found = plain(EVEN, 2, 16)
    assert found[:4] == [Layout(dp_replicate=2), *(Layout(dp_shard=2, zero=zero) for zero in (1, 2, 3))]
    context = {(layout.cp_method, layout.zero) for layout in found if layout.cp == 2}
    assert context == set(product(("zigzag", "ring", "allgather", "ulysses"), range(4)))
    assert [layout for layout in found if layout.tp == 2] == [
        Layout(tp=2, sequence_parallel=False),
        Layout(tp=2, sequence_parallel=True),
    ]
    pipelines = [layout.pp_schedule for layout in found if layout.pp == 2]
    assert pipelines == ["afab", "1f1b", "zb-h1", "zb-h2", "dualpipe", "auto"], "two layers are two stages"
    assert len(found) == 4 + 16 + 2 + 6
    assert [layout.pp_schedule for layout in plain(DEEP, 2, 16) if layout.pp == 2] == list(names())


@pytest.mark.parametrize(("world_size", "without", "with_pp"), [(2, 41, 11), (4, 110, 125), (8, 262, 412)])
def test_the_debug_model_has_as_many_layouts_as_the_documentation_says(world_size: int, without: int, with_pp: int):
    found = layouts(PRESETS["debug"], world_size, 128)
    assert (sum(layout.pp == 1 for layout in found), sum(layout.pp > 1 for layout in found)) == (without, with_pp)


@prove
def test_experts_are_dealt_out_in_every_way_that_divides_them_and_the_ranks():
    spec = replace(EVEN, moe=MoESpec(n_experts=6, top_k=2, d_ffn=16))
    found = plain(spec, 4, 32)
    for layout in found:
        fold = layout.dp_shard * layout.cp * layout.tp
        same = {other.ep for other in found if replace(other, ep=1) == replace(layout, ep=1)}
        if layout.pp == 1:
            assert same == ({1, 2} if fold % 2 == 0 else {1}), "4 does not divide 6 experts"
        else:
            assert same <= {1, 2}
    assert {layout.ep for layout in found if layout.pp > 1} == {1, 2}
    assert all(layout.sequence_parallel for layout in found if layout.tp > 1)
    assert {layout.ep for layout in layouts(EVEN, 4, 32)} == {1}


def every_pipeline(world_size: int, seq_len: int) -> Iterator[Layout]:
    """All there are, found by trying; without choices that change nothing."""
    degrees = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for pp, dp_replicate, dp_shard, cp, tp in product(degrees, repeat=5):
        if pp == 1 or pp * dp_replicate * dp_shard * cp * tp != world_size:
            continue
        values = dict(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
        for schedule, zero, gather, sequence_parallel, method, ulysses in product(
            names(), range(4), ("step", "microbatch"), (False, True), CP_METHODS if cp > 1 else ("zigzag",), degrees
        ):
            dull = (
                (zero and dp_shard * cp == 1)
                or (gather == "microbatch" and zero < 3)
                or (sequence_parallel and tp == 1)
                or (method == "usp" and ulysses == cp)
            )
            choices = dict(pp_schedule=schedule, zero=zero, zero_pp_gather=gather, sequence_parallel=sequence_parallel)
            virtual = {"virtual_stages": 2} if schedule == "interleaved-1f1b" else {}
            try:
                layout = Layout(**values, **choices, **virtual, cp_method=method, ulysses_degree=ulysses)
            except LayoutError:
                continue
            if not dull and not problems(DEEP, layout, seq_len):
                yield layout


def pairs(layout: Layout) -> set:
    """Every two choices of a layout, with its degrees."""
    choices = (
        ("pp_schedule", layout.pp_schedule, layout.virtual_stages),
        ("zero", layout.zero, layout.zero_pp_gather),
        ("tokens", layout.sequence_parallel),
        ("context", layout.cp_method, layout.ulysses_degree),
    )
    degrees = tuple(layout.degree(axis) for axis in DENSE_AXES)
    return {(degrees, two) for two in combinations(choices, 2)}


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_two_choices_of_a_pipeline_meet_in_some_layout(world_size: int):
    possible = list(every_pipeline(world_size, 48))
    found = [layout for layout in plain(DEEP, world_size, 48) if layout.pp > 1]
    assert set(found) <= set(possible)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, possible))
    if world_size == 8:
        assert len(found) < len(possible) / 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_matrix_has_each_layout_once_and_of_that_many_ranks(world_size: int):
    found = layouts(EVEN, world_size, 48)
    assert len(set(found)) == len(found)
    assert all(layout.world_size == world_size for layout in found)
    if world_size % 4 == 0:
        assert {layout.cp_method for layout in found} == set(CP_METHODS)


@prove
@pytest.mark.timeout(1800)
def test_layouts_of_experts_on_two_ranks_train_as_one_process_does(verifier: Verifier):
    experts = MoESpec(n_experts=4, top_k=2, d_ffn=16, bias_rate=0.01, aux_loss=0.1, aux_scope="batch")
    case = replace(CASE, spec=replace(EVEN, moe=experts))
    for layout in covering(layouts(case.spec, 2, case.seq_len)):
        check(verifier, case, layout)


def test_a_layout_that_the_model_cannot_have_is_not_in_the_matrix():
    assert not [layout for layout in layouts(SPEC, 2, 16) if layout.tp == 2]  # 3 heads
    assert not [layout for layout in layouts(EVEN, 2, 10) if layout.cp_method == "zigzag" and layout.cp == 2]


@prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_without_a_pipeline_train_as_one_process_does(verifier: Verifier, world_size: int):
    there = [layout for layout in layouts(EVEN, world_size, CASE.seq_len) if layout.pp == 1]
    for layout in there if world_size == 2 else covering(there):
        check(verifier, CASE, layout)


def covering(those: Sequence[Layout]) -> list[Layout]:
    """Some of these layouts, in which every two values of keys meet that meet in one of them: each time the one with
    the most that have not met."""

    def values(layout: Layout) -> set[tuple[object, ...]]:
        return set(combinations([(name, getattr(layout, name)) for name in KEYS], 2))

    left, chosen = set().union(*map(values, those)), []
    while left:
        chosen.append(max(those, key=lambda layout: len(values(layout) & left)))
        left -= values(chosen[-1])
    return chosen


@prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world_size", "one_of"), [(2, 1), (4, 6)])
def test_pipelines_train_as_one_process_does(verifier: Verifier, world_size: int, one_of: int):
    case = replace(CASE, spec=DEEP)
    pipelines = [layout for layout in layouts(DEEP, world_size, case.seq_len) if layout.pp > 1]
    chosen = pipelines[::one_of]
    assert {layout.pp_schedule for layout in chosen} == set(names())
    for layout in chosen:
        check(verifier, case, layout)


@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(pp=2, pp_schedule="zb-v"),
            Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=2, stage_layers=(2, 1, 1, 1)),
            Layout(pp=2, tp=2, pp_schedule="dualpipe", sequence_parallel=True),
        ],
        Layout(pp=2, pp_schedule="zb-v"),
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "changes",
    rest_prove(
        [{"tied_embedding": True}, {"bias": True, "positions": "learned", "norm": "layernorm"}, {"dropout": 0.2}],
        {"tied_embedding": True},
    ),
    ids=str,
)
def test_every_choice_of_the_model_is_trained_by_pipelines_too(verifier: Verifier, changes: dict, layout: Layout):
    check(verifier, replace(CASE, spec=replace(DEEP, **changes)), layout)


@prove
@pytest.mark.parametrize("layout", ON_EIGHT, ids=str)
def test_layouts_of_eight_ranks_train_as_one_process_does(verifier: Verifier, layout: Layout):
    check(verifier, CASE, layout)


@prove
def test_uneven_rows_beside_copied_kv_heads_are_shared_out_too(verifier: Verifier):
    # 61 rows on 4 ranks of tp are 16, 16, 16 and 13; of 2 ranks that share 13, one has 7 and one 6.
    uneven = replace(CASE, spec=replace(EVEN, vocab_size=61, d_ffn=28))
    for zero in (1, 3):
        check(verifier, uneven, Layout(dp_shard=2, tp=4, zero=zero, sequence_parallel=True))


def test_rows_of_tp_that_three_ranks_cut_unequally_train_as_one_process_does(verifier: Verifier):
    # 61 rows on 2 ranks of tp are 31 and 30; on 3 ranks these are 11, 11, 9 and 10, 10, 10.
    uneven = replace(CASE, spec=replace(EVEN, vocab_size=61), global_batch=6, steps=1)
    check(verifier, uneven, Layout(dp_shard=3, tp=2, zero=3, sequence_parallel=True))


@pytest.mark.parametrize(
    "changes",
    rest_prove(
        [
            {"n_kv_heads": 1},
            {"tied_embedding": True},
            {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "bias": True},
            {"qk_norm": True},
            {"dropout": 0.2},
        ],
        {"n_kv_heads": 1},
        {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned", "bias": True},
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "layout",
    rest_prove(
        [
            Layout(tp=2, sequence_parallel=False),
            Layout(dp_shard=2, tp=2, zero=2, sequence_parallel=True),
            Layout(cp=2, tp=2, recompute="full", sequence_parallel=False),
        ],
        Layout(tp=2, sequence_parallel=False),
    ),
    ids=str,
)
def test_every_choice_of_the_model_trains_as_one_process_does(verifier: Verifier, changes: dict, layout: Layout):
    check(verifier, replace(CASE, spec=replace(EVEN, **changes)), layout)


def expert_case(dtype: str) -> Case:
    moe = MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=1, bias_rate=1e-3, aux_loss=0.1, aux_scope="batch")
    return replace(CASE, spec=replace(EVEN, moe=moe), dtype=dtype)


def loads_and_biases(report: Report) -> list[ReportRow]:
    return [row for row in report.rows if row.name.endswith(("router.bias", "router.load"))]


def test_in_float64_biases_and_loads_of_routers_are_held_to_rounding(verifier: Verifier):
    report = verifier.parity(expert_case("float64"), Layout(dp_shard=2, zero=2, ep=2))
    found = loads_and_biases(report)
    assert {row.quantity.training for row in found if row.quantity.kind == "parameter"} == {PLAIN_SGD, "adamw"}
    assert max(row.tolerance for row in found) == 1e-10


@prove
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        ("float32", Layout(dp_shard=2, zero=2, ep=2)),
        ("bfloat16", Layout(dp_shard=2, zero=2, ep=2)),
        ("bfloat16", Layout(tp=2, sequence_parallel=True, ep=2)),
        ("bfloat16", Layout(pp=2, dp_shard=2, zero=3, ep=2, zero_pp_gather="microbatch")),
    ],
    ids=str,
)
def test_in_fewer_bits_experts_are_drawn_and_biases_and_loads_are_exact(verifier: Verifier, dtype: str, layout: Layout):
    report = verifier.parity(expert_case(dtype), layout)
    assert report.equal, report.worst
    found = [row for row in loads_and_biases(report) if row.quantity.kind == "parameter"]
    assert len(found) == 2 * 2 * EVEN.n_layers, "a bias and a load in each layer and training"
    assert {row.tolerance for row in found} == {2.0**-20}
    assert max(row.tolerance for row in report.rows if row.quantity.kind == "gradient") < 0.5
    assert "experts are drawn and not picked" in report.rows[0].reason
    dealt = {row.name for row in report.rows if row.quantity.kind == "gradient vs one data rank"}
    assert bool(dealt) == (dtype == "bfloat16" and layout.data_ranks > 1 and layout.ep == 1)
    assert not any(".experts." in name for name in dealt), "their products are over tokens of both ranks at once"


@prove
def test_a_bias_that_moves_faster_than_its_rate_is_seen_in_16_bits_too():
    faster = Mutation(
        "shardwright.model.moe:update_bias",
        "bias_E.add_(below_E.to(bias_E.dtype), alpha=rate)",
        "bias_E.add_(below_E.to(bias_E.dtype), alpha=100 * rate)",
    )
    with Verifier(partial(train_mutated, (faster,))) as verifier:
        report = verifier.parity(expert_case("bfloat16"), Layout(dp_replicate=2))
    assert any(not row.equal for row in loads_and_biases(report) if row.name.endswith("bias"))


def test_adam_may_step_anywhere_where_the_gradient_is_rounding_alone_and_nowhere_else(verifier: Verifier):
    biased = replace(CASE, spec=replace(EVEN, bias=True, positions="learned"), optimizer=OptimizerSection(lr=0.1))
    report = verifier.parity(biased, Layout(tp=2, sequence_parallel=False))
    assert report.equal, report.worst
    loose = {(row.quantity.kind, row.quantity.training, row.name) for row in report.rows if row.tolerance > 1e-10}
    assert loose == {("parameter", "adamw", f"layers.{layer}.attention.k.bias") for layer in range(EVEN.n_layers)}
    assert "AdamW's steps of it" in report.rows[0].reason
