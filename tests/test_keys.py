"""Proves that a key of the layout is one field: everything that reads keys has every field, by its metadata alone."""

from dataclasses import fields, replace

import pytest

from shardwright.config import parse, resolved_toml
from shardwright.config.reference import keys as run_file_keys
from shardwright.cost.job import COLUMNS, Candidates
from shardwright.layout import key as keys
from shardwright.layout import layout
from shardwright.layout.box import DENSE_AXES
from shardwright.layout.key import JobSizes, LayoutKey
from shardwright.layout.keys import KEYS
from shardwright.layout.layout import Layout
from shardwright.model.presets import PRESETS
from shardwright.planner.choice import Choice, choice_at, read
from shardwright.planner.distinct import CHOICES
from shardwright.system.errors import LayoutError
from shardwright.verification.matrix import layouts
from shardwright.verification.verifier import _fewer

SIZES = JobSizes(n_layers=8, n_experts=4, seq_len=128, node_size=8)
LARGE = Layout(
    tp=2,
    pp=2,
    pp_schedule="interleaved-1f1b",
    virtual_stages=3,
    stage_layers=(1, 1, 1, 1, 1, 3),
    cp=4,
    cp_method="usp",
    ulysses_degree=2,
    ep=2,
    dp_replicate=2,
    dp_shard=2,
    zero=3,
    sequence_parallel=False,
    recompute="selective",
    recompute_modules=("norms", "attention"),
    recompute_layers=1,
    loss_chunk_tokens=64,
    offload_optimizer="disk",
    offload_parameters="cpu",
    offload_activations="cpu",
    offload_min_bytes=4096,
    zero_pp_gather="microbatch",
    compress_gradients="int8",
    compress_weights="int8",
    compress_dispatch="fp8",
    compress_pipeline="int8",
    node_ranks=2,
)
"""No key at its default but those of SECONDARY."""
SECONDARY = Layout(dp_shard=4, ep=2, zero=3, zero_secondary_ranks=2, place_experts_every=100)
"""Keys that a pipeline, or states on a disk, cannot have."""
EXAMPLES = dict.fromkeys(KEYS, LARGE) | dict.fromkeys(("zero_secondary_ranks", "place_experts_every"), SECONDARY)
RUN = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 128, "global_batch": 32}}


def test_every_field_says_what_it_is_and_what_its_value_means():
    assert list(KEYS) == [each.name for each in fields(Layout)]
    for name, key in KEYS.items():
        assert key.help, name
        assert key.words(EXAMPLES[name], SIZES), name
        assert key.used(EXAMPLES[name]), name
        assert getattr(EXAMPLES[name], name) != key.default, f"{name}: the example has the default"


def test_every_key_is_in_the_run_file_with_the_default_of_python():
    paths = {key.path for key in run_file_keys()}
    for name, key in KEYS.items():
        assert f"layout.{name}" in paths
        value = getattr(EXAMPLES[name], name)
        if value != key.default:
            section = {name: list(value) if isinstance(value, tuple) else value}
            try:
                alone = Layout(**{name: value})
            except LayoutError:
                continue
            assert parse(RUN | {"layout": section}).layout.layout() == alone
    for degrees in ({"tp": 2}, {"dp_shard": 2}, {"pp": 2, "pp_schedule": "zb-v"}, {"cp": 2}):
        assert parse(RUN | {"layout": degrees}).layout.layout() == Layout(**degrees)


def test_a_resolved_run_file_has_every_key_and_gives_the_layout_back():
    section = {name: value for name in KEYS if (value := getattr(LARGE, name)) != KEYS[name].default}
    del section["compress_dispatch"]  # the model has no experts
    section |= {
        "ep": 1,
        "stage_layers": list(LARGE.stage_layers or ()),
        "recompute_modules": [*LARGE.recompute_modules],
    }
    model = {"n_layers": 8, "preset": "debug", "n_heads": 8, "n_kv_heads": 4}
    import tomllib

    config = parse(RUN | {"layout": section, "model": model, "batch": {"seq_len": 128, "global_batch": 32}})
    table = tomllib.loads(resolved_toml(config))
    assert set(table["layout"]) == set(KEYS)
    assert parse(table).layout.layout() == LARGE.changed(ep=1)


def test_every_key_is_in_the_candidates_in_the_line_of_a_plan_and_read_back():
    choices = [Choice(layout, 2) for layout in (LARGE, SECONDARY)]
    assert {key for choice in choices for key in choice.settings()} == {*KEYS, "micro_batch"}
    for choice in choices:
        assert read(str(choice)) == choice
        assert choice_at(choice.candidates, 0) == choice
        for name in KEYS:
            assert name in COLUMNS or getattr(choice.candidates.shared, name) == getattr(choice.layout, name)
    assert {name for names in CHOICES.values() for name in names} == {*KEYS, "micro_batch"}


def test_the_matrix_of_verify_varies_every_key_or_says_why_not():
    found = layouts(PRESETS["debug-moe"], 8, 128)
    for name, key in KEYS.items():
        varied = {getattr(each, name) for each in found} - {None}
        if key.unverified:
            assert {getattr(each, name) for each in found} == {key.default_in(each) for each in found}, name
        elif key.in_turn:
            assert varied == {*key.in_turn, key.default}, name
        elif key.choices is not None:
            assert varied == set(key.choices()), name
        else:
            assert len(varied) > 1, name
        assert set(key.in_turn) <= varied, name


def test_every_key_can_be_switched_off_in_the_search_for_a_culprit():
    switched = {name.partition("=")[0] for layout in (LARGE, SECONDARY) for name, _ in _fewer(layout)}
    # Without cp nothing is left of it; sequence_parallel is off.
    assert switched == set(KEYS) - {"sequence_parallel"}
    assert "sequence_parallel" in {name.partition("=")[0] for name, _ in _fewer(replace(LARGE, sequence_parallel=True))}


def test_the_defaults_of_keys_that_go_with_others_are_derived():
    assert Layout(tp=2).sequence_parallel
    assert not Layout().sequence_parallel
    assert (Layout(dp_shard=2).zero, Layout(dp_replicate=2).zero, Layout(cp=2).zero) == (3, 0, 0)
    assert [Layout(pp=2, pp_schedule=name).virtual_stages for name in ("1f1b", "interleaved-1f1b", "zb-v")] == [1, 2, 2]


def test_a_changed_layout_drops_what_lost_its_meaning_and_keeps_the_rest():
    assert LARGE.changed(pp=1) == Layout(
        tp=2, cp=4, cp_method="usp", ulysses_degree=2, ep=2, dp_replicate=2, dp_shard=2, zero=3,
        sequence_parallel=False, recompute="selective", recompute_modules=("norms", "attention"), recompute_layers=1,
        loss_chunk_tokens=64, offload_optimizer="disk", offload_parameters="cpu", offload_activations="cpu",
        offload_min_bytes=4096, compress_gradients="int8", compress_weights="int8", compress_dispatch="fp8",
        node_ranks=2,
    )  # fmt: skip
    assert Layout(dp_shard=2, cp=2, tp=2, ep=8).changed(tp=1) == Layout(dp_shard=2, cp=2, ep=4)
    assert Layout(dp_shard=2, zero=2).changed(dp_shard=1) == Layout()
    assert (
        Layout(pp=2, pp_schedule="interleaved-1f1b", virtual_stages=4).changed(pp_schedule="zb-v").virtual_stages == 2
    )


def test_a_new_key_needs_its_field_alone(monkeypatch: pytest.MonkeyPatch):
    """A key that no other code names: in the run file's errors, a plan's line, candidates, words and trials."""
    offload = LayoutKey(
        name="offload",
        type=str,
        default="none",
        group="offload",
        help="what is kept in the memory of the host",
        words=lambda of, sizes: f"{of.offload} kept in the memory of the host",
        choices=lambda: ("none", "optimizer"),
    )
    monkeypatch.setitem(KEYS, "offload", offload)
    monkeypatch.setattr(Layout, "offload", "none", raising=False)
    plain, kept = Layout(dp_shard=2), Layout(dp_shard=2)
    object.__setattr__(kept, "offload", "optimizer")
    assert str(kept) == "dp_shard 2, zero 3, offload optimizer"
    assert str(plain) == "dp_shard 2, zero 3"
    assert Candidates.from_layout(kept, 1).shared.offload == "optimizer"  # type: ignore[attr-defined]
    assert ("offload=optimizer", {"offload": "none"}) in list(_fewer(kept))
    assert offload.searched(plain) == ("none", "optimizer")


def test_axes_are_keys():
    assert set(DENSE_AXES) <= set(KEYS)
    assert keys.written((1, 2)) == "1+2"
    assert keys.written(False) == "false"
    assert layout.KEYS is KEYS
