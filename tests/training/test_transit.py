"""Proves that activations which travel in 8 bits train as one process that rounds the same activations: rows to
experts, and the messages of a pipeline with their gradients; their bytes are in tests/cost/test_traffic.py."""

from dataclasses import replace

import pytest
import torch

from shardwright.config import parse
from shardwright.layout.layout import Layout
from shardwright.parallel.compressed import codec_of
from shardwright.parallel.compression import decode_rows, encode_rows
from shardwright.split.compression import transit_row_bytes
from shardwright.system.errors import ConfigError, LayoutError
from shardwright.verification import Verifier
from tests.marks import rest_prove
from tests.training.bugs.bug import EXPERTS
from tests.training.test_compression import WIDE
from tests.training.worlds import case

FP8, INT8_STAGES, FP8_STAGES = (
    {"compress_dispatch": "fp8"},
    {"compress_pipeline": "int8"},
    {"compress_pipeline": "fp8"},
)
MIXTURE = {"moe": EXPERTS}
LAYOUTS = {
    "dispatch": (Layout(dp_shard=2, ep=2, **FP8), MIXTURE),
    "dispatch over tp": (Layout(tp=2, dp_shard=2, ep=4, **FP8), MIXTURE),
    "dispatch, recomputed": (Layout(dp_shard=2, ep=2, recompute="full", **FP8), MIXTURE),
    "dispatch with capacity": (Layout(dp_shard=2, ep=2, **FP8), {"moe": replace(EXPERTS, capacity_factor=1.0)}),
    "dispatch and stages": (Layout(pp=2, dp_shard=2, ep=2, **FP8, **INT8_STAGES), MIXTURE),
    "stages": (Layout(pp=2, **INT8_STAGES), {}),
    "stages, split backward pass": (Layout(pp=2, pp_schedule="zb-v", **FP8_STAGES), {}),
    "stages, two ways": (Layout(pp=2, pp_schedule="dualpipe", **FP8_STAGES), {}),
    "stages, three blocks of a row": (Layout(pp=2, tp=2, **FP8_STAGES), {"d_model": 272}),
    "stages, cp": (Layout(pp=2, cp=2, **INT8_STAGES), {}),
}


@pytest.mark.parametrize("name", rest_prove(LAYOUTS, "dispatch"))
def test_activations_in_8_bits_train_as_one_process_that_rounds_them(name: str, verifier: Verifier):
    layout, spec = LAYOUTS[name]
    accumulation = 4 if layout.pp_schedule == "dualpipe" else 3
    given = replace(case(layout, accumulation, spec=replace(WIDE, **spec)), seq_len=12)
    report = verifier.parity(given, layout)
    assert report.equal, report.differing or report.worst
    assert report.worst_error < 1e-10


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("columns", [32, 128, 272])
def test_a_row_arrives_within_its_bound(kind: str, columns: int):
    codec = codec_of(kind)
    assert codec is not None
    generator = torch.Generator().manual_seed(3)
    x_RD = torch.randn(7, columns, generator=generator) * torch.logspace(-6, 6, 7)[:, None]
    x_RD[0], x_RD[1, 0] = 0.0, torch.inf
    sent = encode_rows(x_RD, codec)
    assert sent.shape == (7, transit_row_bytes(columns))
    found_RD = decode_rows(sent, codec, columns, x_RD.dtype)
    length = -(-columns // -(-columns // 128))
    assert found_RD[1, :length].isnan().all()
    for x_RE, found_RE in zip(x_RD[2:].split(length, 1), found_RD[2:].split(length, 1), strict=True):
        largest = x_RE.abs().amax(1, keepdim=True)
        bound = largest / 254 if kind == "int8" else torch.maximum(x_RE.abs() / 16, largest / 448 / 1024)
        assert ((found_RE - x_RE).abs() <= 1.0001 * bound).all()
    assert not found_RD[0].any()


def test_no_rows_are_no_message():
    codec = codec_of("fp8")
    assert codec is not None
    assert decode_rows(encode_rows(torch.empty(0, 32), codec), codec, 32, torch.float32).shape == (0, 32)


REFUSED = {
    "no experts elsewhere": ({"dp_shard": 2, **FP8}, "fp32", "needs ep above 1"),
    "no stages": ({"dp_shard": 2, **INT8_STAGES}, "fp32", "needs pp above 1"),
    "fp64": ({"pp": 2, **INT8_STAGES}, "fp64", "set precision.compute to 'fp32' or 'bf16'"),
    "a misspelt kind": ({"pp": 2, "compress_pipeline": "int9"}, "fp32", "int8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_travel_is_refused_with_the_way_out(name: str):
    layout, compute, way_out = REFUSED[name]
    run = {"out": "o", "steps": 1, "data": {"path": "d"}, "batch": {"seq_len": 128, "global_batch": 32}}
    with pytest.raises((ConfigError, LayoutError), match=way_out):
        parse(run | {"layout": layout, "precision": {"compute": compute}})


def test_what_would_hide_a_bug_is_verified_apart(verifier: Verifier):
    layout = Layout(pp=2, dp_shard=2, zero=1, compress_gradients="bf16", **INT8_STAGES)
    with pytest.raises(LayoutError, match=r"verify one, and then the other, with --set layout\.compress_pipeline=none"):
        verifier.parity(case(layout, 3, spec=WIDE), layout)
    layout = Layout(pp=2, **INT8_STAGES)
    with pytest.raises(LayoutError, match=r"valid: dtype='float64', or layout\.compress_pipeline='none'"):
        verifier.parity(case(layout, 3, "float32", WIDE), layout)
