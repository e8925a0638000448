"""Proves muP by numbers: values, rates and multipliers of a model follow width and depth as its table says, one process
and layouts agree, a resume is exact, and activations change as much in wide models as in narrow ones."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.config import OptimizerSection, parse, resolved_toml
from shardwright.config.optimizer import LrScaleSection
from shardwright.hugging_face.architecture import architecture_of
from shardwright.layout.layout import Layout
from shardwright.model.init import initialise
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.modules import end_rows, layer_rows
from shardwright.model.mup import MupSpec
from shardwright.model.saved import spec_as_json
from shardwright.model.sections import MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.model.transformer import Transformer
from shardwright.system.errors import ConfigError, InputError
from shardwright.system.files import parse_toml
from shardwright.training.exporting import export
from shardwright.training.optimizer import build_optimizer
from shardwright.verification import Verifier
from shardwright.verification.coordinates import at_width, check_coordinates
from tests.distributed import run_ranks
from tests.marks import prove, rest_prove
from tests.training.checkpoints import hop
from tests.training.worlds import EVEN, LONG

MUP = MupSpec(base_width=8, base_depth=1, base_head_dim=2)
WIDE = replace(EVEN, mup=MUP)
"""Four times as wide and as wide in each head as its base, and twice as deep."""
EXPERTS = replace(WIDE, moe=MoESpec(n_experts=4, top_k=2, d_ffn=24, d_shared=16, shared_gate=True, bias=True))
RUN = OptimizerSection(lr=1e-3, weight_decay=0.1, eps=1e-5, lr_scale=LrScaleSection(embedding=3.0))


def check_factors_of_rows():
    """By kind of parameter: initial standard deviation, learning rate, weight decay and eps."""
    m, d, std = 4.0, 2.0, EVEN.init_std
    residual = std / math.sqrt(2 * 1)  # one layer in the base model
    expected = {
        "layers.0.attention.q.weight": (std / 2, 1 / m, 0.1 * m, 1e-5 / (m * d)),
        "layers.0.attention.o.weight": (residual / 2, 1 / m, 0.1 * m, 1e-5 / (m * d)),
        "layers.1.ffn.experts.up": (std / 2, 1 / m, 0.1 * m, 1e-5 / (m * d)),
        "layers.1.ffn.experts.down": (residual / 2, 1 / m, 0.1 * m, 1e-5 / (m * d)),
        "layers.1.ffn.experts.up_bias": (0.0, 1.0, 0.0, 1e-5 / (m * d)),
        "layers.1.ffn.router.weight": (std / 4, 1 / m, 0.1 * m, 1e-5 / (m * d)),
        "layers.0.attention_norm.weight": (0.0, 1.0, 0.0, 1e-5 / (m * d)),
        "embedding.weight": (std, 3.0, 0.1, 1e-5 / m),
        "head.weight": (std, 1.0, 0.1, 1e-5 / m),
        "norm.weight": (0.0, 1.0, 0.0, 1e-5 / m),
    }
    layers = range(EXPERTS.n_layers)  # computed again, and not taken from the cache of an earlier test
    of_model = {f"layers.{n}.{row.name}": row for n in layers for row in layer_rows.__wrapped__(EXPERTS, n)}
    of_model |= {row.name: row for row in end_rows.__wrapped__(EXPERTS)}
    for name, (std, rate, decay, eps) in expected.items():
        row = of_model[name]
        found = row.std, RUN.lr_scale_of(row), RUN.weight_decay_of(row), RUN.eps_of(row)
        assert found == pytest.approx((std, rate, decay, eps), rel=1e-12), name


def test_values_and_rates_of_parameters_follow_width_and_depth():
    check_factors_of_rows()


def check_multipliers():
    """The multipliers by hand, given as the fields that a model without muP has."""
    by_hand = replace(EVEN, residual_scale=1 / 2, logit_divisor=4.0, attention_scale=math.sqrt(2) / 8)
    model, expected = Transformer(WIDE).double(), Transformer(by_hand).double()
    initialise(model, WIDE, 3)
    expected.load_state_dict(model.state_dict())
    tokens_BT = torch.arange(20).view(2, 10)
    found, wanted = model(tokens_BT), expected(tokens_BT)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_multipliers_are_those_of_the_table():
    check_multipliers()


def check_the_base_model_is_unchanged():
    """At the sizes of the base model muP changes nothing: neither values, nor multipliers, nor groups."""
    base = replace(EVEN, mup=MupSpec(base_width=EVEN.d_model, base_depth=EVEN.n_layers, base_head_dim=EVEN.head_dim))
    one, other = Transformer(EVEN), Transformer(base)
    initialise(one, EVEN, 0)
    initialise(other, base, 0)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    tokens_BT = torch.arange(20).view(2, 10)
    torch.testing.assert_close(one(tokens_BT), other(tokens_BT), rtol=1e-5, atol=1e-6)
    groups = [
        [(group["lr_scale"], group["eps"], group["weight_decay"], len(group["params"])) for group in of.param_groups]
        for of in (build_optimizer(dict(m.named_parameters()), s, RUN) for m, s in ((one, EVEN), (other, base)))
    ]
    assert groups[0] == groups[1]


def test_the_base_model_is_unchanged():
    check_the_base_model_is_unchanged()


def check_folded_multipliers():
    """config.json of a model with muP has its multipliers, which `transformers` reads."""
    transformers = pytest.importorskip("transformers")
    spec = replace(WIDE, head_dim=8, max_seq_len=16)
    architecture = architecture_of(spec)
    assert architecture.model_type == "granite"
    config = architecture.config(spec)
    scales = config["residual_multiplier"], config["logits_scaling"], config["attention_multiplier"]
    assert scales == pytest.approx((1 / 2, 4.0, math.sqrt(2) / 8), rel=1e-12)
    theirs = transformers.AutoConfig.for_model(**config)
    assert theirs.residual_multiplier == 1 / 2


def test_an_export_has_the_multipliers_as_fields_that_transformers_knows():
    check_folded_multipliers()


def test_a_model_without_an_architecture_for_its_multipliers_is_refused():
    with pytest.raises(ConfigError, match=r"residual_scale=0\.5 is 1\.0 there"):
        architecture_of(replace(WIDE, bias=True, norm="layernorm", positions="learned", activation="gelu_tanh"), "gpt2")


BATCH = {"seq_len": 8, "global_batch": 4, "micro_batch": 1}


def run_file(**more: object) -> dict[str, object]:
    return {"out": "o", "steps": 2, "data": {"path": "d"}, "batch": BATCH, **more}


def test_a_run_file_has_the_base_model_in_a_section_of_its_own():
    config = parse(run_file(mup={"base_width": 32}), ["mup.base_depth=2"])
    assert config.model.spec().mup == MupSpec(base_width=32, base_depth=2)
    text = resolved_toml(config)
    assert parse(parse_toml(text)).model.spec() == config.model.spec()
    assert resolved_toml(parse(parse_toml(text))) == text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mup": {"base_widht": 32}}, "model.mup.base_widht: there is no such key; did you mean 'base_width'?"),
        ({"mup": {"base_width": -1}}, "model.mup.base_width=-1 is negative; valid: 1 or more, or 0 for no scaling"),
        ({"mup": {}}, "model.mup has no base model; give base_width or base_depth, or leave mup out"),
        ({"mup": {"base_width": 32}, "model": {"mup": {}}}, "[mup] and [model.mup] are two names of one section"),
        (
            {"mup": {"base_width": 32}, "optimizer": {"name": "muon"}},
            "model.mup with optimizer.name='muon': the rule for learning rates holds for updates whose elements have "
            "about the size of lr (Tensor Programs V, Table 8, Adam); valid: adamw, adamw-8bit, lion",
        ),
        (
            {"mup": {"base_head_dim": 8}, "model": {"preset": "deepseek-v2-lite"}},
            "model.mup.base_head_dim goes with plain attention in every layer; leave it out, or latent_attention",
        ),
    ],
    ids=["unknown key", "negative", "empty", "twice", "optimizer", "latent attention"],
)
def test_a_section_that_cannot_be_used_is_refused(more: dict[str, object], said: str):
    with pytest.raises(ConfigError) as refused:
        parse(run_file(**more))
    assert any(said in problem for problem in refused.value.problems), refused.value.problems


LAYOUTS = {
    "tp, zero 3": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True),
    "pp, zero 1": Layout(pp=2, dp_shard=2, zero=1),
    "zero 2": Layout(dp_shard=2, zero=2),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "offload": Layout(dp_shard=2, zero=2, offload_optimizer="cpu"),
}
CASES = [(name, run) for run in ("adamw", "adamw-8bit", "lion") for name in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "run"), rest_prove([case for case in CASES if case != ("offload", "adamw-8bit")], ("zero 2", "adamw"))
)
def test_a_layout_takes_the_steps_of_one_process(verifier: Verifier, name: str, run: str):
    layout = LAYOUTS[name]
    spec = replace(WIDE, n_layers=2 * layout.pp)
    options = {"block_size": 16, "least_elements": 48} if run == "adamw-8bit" else {}
    optimizer = OptimizerSection(name=run, lr=2e-3, **options)
    case = replace(LONG, spec=spec, micro_batch=LONG.global_batch // (2 * layout.data_ranks), optimizer=optimizer)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst


@prove
def test_experts_on_layouts_take_the_steps_of_one_process(verifier: Verifier):
    for layout in (Layout(dp_shard=2, zero=2, ep=2), Layout(tp=2, sequence_parallel=True, ep=2)):
        report = verifier.parity(replace(LONG, spec=EXPERTS, micro_batch=LONG.global_batch // 4), layout)
        assert report.equal, report.differing or report.worst


@prove
def test_a_resume_is_exact(tmp_path: Path):
    """A step, a checkpoint and another step are the same bits, whether the run stopped in between or not."""
    layout = Layout(dp_shard=2, zero=2)
    for step in (0, 1):
        stopped = run_ranks(hop, layout.world_size, tmp_path / "a", layout, step, WIDE, ())
    again = run_ranks(hop, layout.world_size, tmp_path / "a", layout, 1, WIDE, ())
    for (_, one), (_, other) in zip(stopped, again, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_coordinate_check_is_flat_with_mup_and_not_without():
    check_flatness((32, 128), seeds=1)


@prove
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adamw-8bit"])
def test_a_coordinate_check_is_flat_with_mup_over_widths_64_to_512(optimizer: str):
    check_flatness((64, 128, 256, 512), optimizer)


def check_flatness(widths: tuple[int, ...], optimizer: str = "adamw", seeds: int = 2):
    run = OptimizerSection(name=optimizer, lr=1e-3 if optimizer == "lion" else 4e-3)
    small = replace(EVEN, init_std=0.02, max_seq_len=64)
    base = replace(small, mup=MupSpec(base_width=widths[0], base_depth=2))
    flat = check_coordinates(base, run, widths, 4, seeds)
    assert flat.flat, flat.slopes
    assert max(map(abs, flat.slopes.values())) < 0.33
    grows = check_coordinates(small, run, widths, 4, seeds)
    assert not grows.flat
    assert min(slope for place, slope in grows.slopes.items() if place != "embedding") > 0.5, grows.slopes


def test_widths_to_which_a_model_does_not_scale_are_refused():
    with pytest.raises(InputError, match=r"n_kv_heads=2 x 40 / 32 = 2.5 is not a whole number; valid: multiples of 16"):
        at_width(EVEN, 40)


def test_adapters_take_no_part_in_a_coordinate_check():
    adapted = replace(EVEN, lora=LoraSpec(rank=2))
    assert at_width(adapted, 64) == at_width(EVEN, 64)
    found = check_coordinates(adapted, RUN, (32, 64), 1, 1)
    assert found.changes["embedding"][0] > 0


def test_an_activation_that_does_not_change_is_refused_with_its_cause():
    with pytest.raises(InputError, match=r"the change of embedding at d_model 32 is 0 .* fp32 rounds the updates away"):
        check_coordinates(EVEN, OptimizerSection(lr=1e-30), (32, 64), 1, 1)


@prove
@pytest.mark.parametrize(
    "moe", [None, MoESpec(n_experts=4, top_k=2, d_ffn=24, bias_rate=0.0)], ids=["dense", "experts"]
)
def test_transformers_computes_the_logits_of_an_exported_run(tmp_path: Path, moe: MoESpec | None):
    pytest.importorskip("transformers")
    from tests.hugging_face.models import logits_error
    from tests.hugging_face.test_families import TOLERANCES

    spec = replace(WIDE, head_dim=8, vocab_size=96, max_seq_len=64, init_std=0.3, moe=moe)
    given = {key: value for key, value in spec_as_json(spec).items() if value is not None}
    run_ranks(hop, 1, tmp_path, Layout(), 0, spec, (), resolved_toml(parse(run_file(model=given))))
    trained = tmp_path / "step-00000001"
    export(trained, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["model_type"] == ("granite" if moe is None else "granitemoe")
    for dtype, tolerance in TOLERANCES.items():
        assert logits_error(tmp_path / "hf", trained, dtype) < tolerance
    changed = config | {"attention_multiplier": config["attention_multiplier"] * 2}
    (tmp_path / "hf/config.json").write_text(json.dumps(changed))
    assert logits_error(tmp_path / "hf", trained, torch.float64) > 1e-3


def head_sizes(spec: ModelSpec, width: int) -> tuple[int, ...]:
    changed = at_width(spec, width)
    return changed.n_heads, changed.n_kv_heads, changed.head_dim, changed.d_ffn


def test_heads_grow_in_number_or_with_a_base_in_width():
    assert head_sizes(EVEN, 64) == (8, 4, 8, 80)
    assert head_sizes(WIDE, 64) == (4, 2, 16, 80)
