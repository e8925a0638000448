"""Proves that with fp8 every layout computes what one process does with the same recipe, far more closely than fp8
rounds: in float64, where the products of rounded operands are exact, to 1e-10. With the scale of a shard gradients are
off by a third.
"""

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from shardwright.layout.layout import Layout
from shardwright.model.number_formats import Fp8
from shardwright.model.sections import LatentAttentionSpec, MoESpec
from shardwright.model.spec import ModelSpec
from shardwright.system.errors import InputError
from shardwright.verification import Case, Verifier
from tests.marks import prove, rest_prove
from tests.training.runs import checksums, train, trajectory, write_run_file
from tests.training.worlds import EVEN, LONG, in_few_micro_batches

RECIPES = {
    "tensorwise": Fp8("tensorwise"),
    "tensorwise, weight gradient wide": Fp8("tensorwise", weight_gradient=False),
    "rowwise": Fp8("rowwise"),
    "blockwise": Fp8("blockwise", weight_gradient=False, block=4),
}
LAYOUTS = {
    "one": Layout(),
    "zero 0": Layout(dp_replicate=2),
    "zero 1": Layout(dp_shard=2, zero=1),
    "zero 3": Layout(dp_shard=2, zero=3),
    "tp": Layout(tp=2, sequence_parallel=False),
    "sp": Layout(tp=2, sequence_parallel=True),
    "sp, recompute": Layout(tp=2, sequence_parallel=True, recompute="full"),
    "sp x cp": Layout(tp=2, sequence_parallel=True, cp=2, zero=2, recompute="selective"),
    "ring": Layout(cp=2, cp_method="ring"),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
    "1f1b": Layout(pp=2),
    "zb-h1 x zero 2": Layout(pp=2, dp_shard=2, zero=2, pp_schedule="zb-h1"),
}
LATENT = LatentAttentionSpec(q_rank=10, kv_rank=12, nope_dim=8, rope_dim=4, v_dim=8)
EXPERTS = MoESpec(n_experts=4, top_k=2, d_ffn=16, n_shared=2, aux_loss=0.1, aux_scope="batch", z_loss=0.01)
TWO_OF = (("tensorwise, weight gradient wide", "rowwise"), ("tensorwise", "blockwise"))
"""Recipes that layouts compute with in turn."""
MODELS = {
    "latent attention": replace(EVEN, n_kv_heads=4, latent_attention=LATENT),
    "experts": replace(EVEN, moe=EXPERTS),
    "multi-token prediction": replace(EVEN, mtp_modules=1),
    "biases, tied": replace(EVEN, activation="gelu", bias=True, tied_embedding=True),
}


def fp8_case(fp8: Fp8, layout: Layout, spec: ModelSpec = EVEN, dtype: str = "float64") -> Case:
    return in_few_micro_batches(replace(LONG, steps=2, spec=spec, fp8=fp8, dtype=dtype), layout)


def check(verifier: Verifier, case: Case, layout: Layout) -> None:
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
    assert all(row.tolerance <= 1e-10 for row in report.rows), "the bound has to be far below what fp8 rounds"


@pytest.mark.parametrize(
    ("recipe", "name"), rest_prove([(r, n) for i, n in enumerate(LAYOUTS) for r in TWO_OF[i % 2]], ("tensorwise", "sp"))
)
def test_a_layout_in_fp8_computes_what_one_process_does(recipe: str, name: str, verifier: Verifier):
    check(verifier, fp8_case(RECIPES[recipe], LAYOUTS[name]), LAYOUTS[name])


@prove
@pytest.mark.parametrize(("recipe", "model"), [*zip(cycle(["tensorwise", "rowwise"]), MODELS, strict=False)])
def test_so_does_every_kind_of_layer(recipe: str, model: str, verifier: Verifier):
    for name in ("sp", "zero 1"):
        check(verifier, fp8_case(RECIPES[recipe], LAYOUTS[name], MODELS[model]), LAYOUTS[name])


WITH_EXPERTS = [
    ("tensorwise", Layout(dp_shard=2, ep=2, zero=2)),
    ("rowwise", Layout(tp=2, sequence_parallel=True, ep=2)),
    ("blockwise", Layout(dp_shard=4, ep=2, zero=3, recompute="selective")),
    ("tensorwise", Layout(pp=2, pp_schedule="zb-h1")),
]


@pytest.mark.parametrize(("recipe", "layout"), rest_prove(WITH_EXPERTS), ids=str)
def test_so_do_routed_experts_wherever_they_are(recipe: str, layout: Layout, verifier: Verifier):
    spec = replace(MODELS["experts"], n_layers=2 * layout.pp)
    check(verifier, fp8_case(replace(RECIPES[recipe], experts=True), layout, spec), layout)


def test_fp8_is_compared_in_float64_alone():
    """In bf16 a gradient of a layout of this model is off by 0.57 in the third step, more than a gradient may be."""
    for dtype in ("bfloat16", "float16", "float32"):
        with pytest.raises(InputError, match=f"dtype='{dtype}' with precision.fp8='rowwise'.*valid: dtype='float64'"):
            fp8_case(RECIPES["rowwise"], LAYOUTS["one"], dtype=dtype)


FP8 = ("--set", "precision.fp8=rowwise", "--set", "model.d_ffn=32", "--set", "model.n_kv_heads=2")


@prove
def test_a_run_in_fp8_learns_and_goes_on_bit_for_bit(tokens: Path, tmp_path: Path):
    for name in ("whole", "halves", "wide"):
        (tmp_path / name).mkdir()
    whole, halves, wide = (write_run_file(tmp_path / name, tokens) for name in ("whole", "halves", "wide"))
    said = train(whole, *FP8).stdout
    assert "fp32, fp8 rowwise" in said
    train(halves, *FP8, "--set", "steps=10", "--set", "lr_schedule.shape=constant")
    train(halves, *FP8, "--resume")
    assert trajectory(halves) == trajectory(whole)
    assert checksums(halves, 20) == checksums(whole, 20)
    train(wide, *FP8[2:])
    pairs = [(ours[1], theirs[1]) for ours, theirs in zip(trajectory(whole), trajectory(wide), strict=True)]
    assert all(ours != theirs for ours, theirs in pairs), "fp8 rounds"
    assert all(ours == pytest.approx(theirs, rel=0.01) for ours, theirs in pairs)


@prove
def test_sizes_that_fp8_cannot_have_are_refused_before_anything_starts(tokens: Path, tmp_path: Path):
    run = train(write_run_file(tmp_path, tokens), "--set", "precision.fp8=tensorwise", expect=2)
    assert "ffn.gate.weight: 24 output features" in run.stderr
    assert "Traceback" not in run.stderr
