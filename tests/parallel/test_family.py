"""Proves that parallelism goes by the rows of a model's table: a family that no code of ours names, whose attention and
feed-forward network read one norm, computes on every axis what one device computes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import Tensor, nn

from shardwright.layout import Layout
from shardwright.model.attention import Attention
from shardwright.model.feed_forward import FeedForward
from shardwright.model.modules import FAMILIES, Family, Row, attention, feed_forward, norm, register
from shardwright.model.spec import ModelSpec
from shardwright.verify import Verifier
from tests.train.worlds import CASE, SPEC


class Block(nn.Module):
    """x + attention(norm x) + ffn(norm x)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.both_norm = nn.LayerNorm(spec.d_model, eps=spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp = FeedForward(spec, spec.d_ffn)

    def forward(
        self, x_BTD: Tensor, positions_T: Tensor, rotary_2TC: Tensor | None, site_keys_2B: Tensor | None = None
    ) -> Tensor:
        y_BTD = self.both_norm(x_BTD)
        return x_BTD + self.attention(y_BTD, rotary_2TC) + self.mlp(y_BTD)


def rows(spec: ModelSpec, layer: int) -> Iterator[Row]:
    yield from norm("both_norm", spec.d_model, "layernorm")
    yield from attention(spec, input="both_norm")
    yield from feed_forward(spec, "mlp", spec.d_ffn, input="both_norm", ordered=True)


FAMILY = Family(name="both-at-once", help="attention and feed-forward network of one norm", layer=rows, block=Block)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    register(FAMILY)
    with Verifier() as verifier:
        yield verifier
    del FAMILIES[FAMILY.name]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sequence_parallel=False),
        Layout(tp=2, sequence_parallel=True),
        Layout(pp=2, schedule="zb-h1"),
        Layout(dp_shard=2, zero=3, recompute="full"),
        Layout(cp=2),
    ],
    ids=["tp2", "tp2 sp", "pp2 zb-h1", "zero 3, recomputed", "cp2"],
)
def test_a_family_of_ones_own_is_parallel_on_every_axis(layout: Layout, verifier: Verifier):
    spec = replace(SPEC, family=FAMILY.name, n_heads=4, n_kv_heads=2, d_model=32, bias=True, norm="layernorm")
    micro_batch = CASE.global_batch // (3 * layout.data_ranks)
    case = replace(CASE, spec=spec, seq_len=12, micro_batch=micro_batch)
    report = verifier.parity(case, layout)
    assert report.equal, report.differing or report.worst
