"""Proves that adapters train on a quantised base on every layout as in one process, in float64.

The reference has no bytes: its frozen matrices are the values that the bytes stand for.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import LoraSpec
from shardwright.model.transformer import Transformer
from shardwright.runs.folder import CHECKPOINTS
from shardwright.system.errors import CheckpointError, ConfigError
from shardwright.system.torch_private import shards_bytes
from shardwright.training.adapters import BaseWithAdapters
from shardwright.training.checkpoint.state import load
from shardwright.training.checkpoint.store import CheckpointStore
from shardwright.training.weights import AdaptedWeights, fill, open_weights
from shardwright.verification import Verifier
from tests.distributed import run_ranks
from tests.hugging_face.models import FAMILIES, saved
from tests.marks import prove, rest_prove
from tests.training.adapted_models import (
    LAYOUTS,
    LORA,
    MODELS,
    adapting,
    case_of,
    error_before_adams_steps,
    run_file,
    save_adapted,
)
from tests.training.worlds import CASE, EVEN

WIDE = replace(EVEN, d_ffn=160)
"""Each rank of tp=2 has 80 columns of `ffn.down`, from the middle of a block of 64 on."""
NF4, INT8 = (replace(LORA, base=base) for base in ("nf4", "int8"))


def needs_bytes(layout: Layout) -> None:
    """Skip a layout in which FSDP2 shards bytes, if it cannot."""
    if (layout.zero == 3 or layout.offload_parameters != "none") and not shards_bytes():
        pytest.skip("FSDP2 shards parameters of bytes from PyTorch 2.13 on")


@pytest.mark.parametrize("lora", [NF4, INT8], ids=["nf4", "int8"])
@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "sp"))
def test_adapters_of_a_quantised_base_train_as_in_one_process(verifier: Verifier, name: str, lora: LoraSpec):
    needs_bytes(LAYOUTS[name])
    report = verifier.parity(case_of(LAYOUTS[name], WIDE if name != "compressed" else None, lora), LAYOUTS[name])
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-12, report.worst


@pytest.mark.parametrize("name", rest_prove(MODELS))
def test_a_quantised_base_of_every_kind_of_model(verifier: Verifier, name: str):
    changes, layout, lora = MODELS[name]
    needs_bytes(layout)
    case = replace(case_of(layout, replace(EVEN, **changes), replace(lora, base="nf4")), steps=2)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
    assert error_before_adams_steps(report) < 1e-12


@prove
@pytest.mark.parametrize(
    ("layout", "dtype", "compiled"),
    [
        (Layout(), "bfloat16", False),
        (Layout(dp_shard=2, zero=3), "bfloat16", False),
        (Layout(dp_shard=2, zero=3), "float16", False),
        (Layout(dp_shard=4, zero=3, zero_secondary_ranks=2), "float64", False),
        (Layout(dp_shard=2, zero=3, compress_gradients="int8"), "float64", False),
        (Layout(), "float64", True),
        (Layout(tp=2, sequence_parallel=True, recompute="full"), "float64", True),
    ],
    ids=str,
)
def test_a_quantised_base_in_16_bits_compiled_or_gathered_in_two_ways(
    verifier: Verifier, layout: Layout, dtype: str, compiled: bool
):
    needs_bytes(layout)
    case = case_of(layout, None, NF4)
    micro_batch = max(1, CASE.global_batch // (4 * layout.data_ranks))
    overflow = 1 if dtype == "float16" else None
    case = replace(case, micro_batch=micro_batch, dtype=dtype, overflow_step=overflow, compiled=compiled)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst


def test_merged_weights_compute_as_the_run():
    check_that_merged_weights_compute_as_the_run()


def check_that_merged_weights_compute_as_the_run() -> None:
    """Raise AssertionError unless a whole model with adapters and a merged one have the same logits."""
    with tempfile.TemporaryDirectory() as name:
        base, out = saved(Path(name) / "base", FAMILIES["llama"]), Path(name) / "out"
        run_ranks(partial(save_adapted, lora={"rank": 3, "base": "nf4"}), 2, base, out)
        weights = open_weights(CheckpointStore(out / CHECKPOINTS).path_of(1))
        assert isinstance(weights, AdaptedWeights)
        merged = BaseWithAdapters(weights)
        logits = []
        for source in (weights, merged, weights.base):
            model = Transformer(source.spec).double()
            fill(model.named_parameters(), source.spec, source)
            logits.append(model(torch.arange(12)[None]))
        assert bool(torch.allclose(logits[0], logits[1], rtol=1e-6, atol=1e-6)), "merged weights are others"
        assert not bool(torch.allclose(logits[0], logits[2], rtol=1e-3, atol=1e-3)), "nothing was quantised"


@prove
def test_a_run_does_not_continue_with_another_type_of_its_base():
    check_that_another_type_of_the_base_is_refused()


def check_that_another_type_of_the_base_is_refused() -> None:
    """Raise AssertionError unless a run refuses to continue with a base in another type."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, out = saved(folder / "base", FAMILIES["llama"]), folder / "out"
        run_ranks(partial(save_adapted, lora={"rank": 3, "base": "nf4"}), 2, base, out)
        (refusal,) = run_ranks(_continued, 1, base, folder / "new", CheckpointStore(out / CHECKPOINTS).path_of(1))
        assert "its adapters were trained with lora.base='nf4', and this run has 'int8'; set lora.base='nf4'" in refusal


def _continued(base: Path, out: Path, checkpoint: Path) -> str:
    """To be run on a rank: return the refusal to continue with int8."""
    config = parse(run_file(base, out, lora={"rank": 3, "base": "int8"}))
    try:
        load(checkpoint, adapting(config), None)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora": {"rank": 3, "base": "int4"}}, "lora.base"),
        ({"lora": {"base": "nf4"}}, "lora.base='nf4' is not used with lora.rank=0; set lora.rank, or leave it out"),
        (
            {"lora": {"rank": 3, "base": "nf4"}, "precision": {"fp8": "tensorwise"}},
            "frozen matrices would be rounded to nf4 and then to fp8; set precision.fp8='none', or lora.base='compute'",
        ),
        (
            {"lora": {"rank": 3, "base": "int8"}, "layout": {"dp_shard": 2, "zero": 3, "compress_weights": "int8"}},
            "the frozen matrices are sent in int8 already; set compress_weights='none'",
        ),
    ],
)
def test_what_does_not_go_with_a_quantised_base_is_refused(tmp_path: Path, changed: dict[str, object], said: str):
    base = saved(tmp_path / "base", FAMILIES["llama"])
    with pytest.raises(ConfigError) as refused:
        parse(run_file(base, tmp_path, **changed))
    assert any(said in problem for problem in refused.value.problems), refused.value.problems
