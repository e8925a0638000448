"""Proves that matrices are stored in nf4 and int8 as published, and that a shard has the numbers of the whole row."""

import pytest
import torch
from torch import Tensor

from shardwright.model.lora_sizes import BLOCK, StoredRow
from shardwright.model.quantised import CODES_8, NF4, _tables, decode, encode


def matrix(n_columns: int, n_rows: int = 6) -> Tensor:
    """Normal weights with an outlier, a row of zeros and a row of one value."""
    rows = torch.randn(n_rows, n_columns, generator=torch.Generator().manual_seed(1))
    rows[0, 3], rows[1], rows[2] = 9.0, 0.0, -0.25
    return rows


def nearest(value: float, values: tuple[float, ...]) -> float:
    return min(values, key=lambda each: abs(each - value))


def test_every_weight_is_the_nearest_value():
    check_that_every_weight_is_the_nearest_value()


def check_that_every_weight_is_the_nearest_value() -> None:
    """By plain arithmetic in 64 bits, one weight at a time; the last block of a row has 22 of 64 elements."""
    _tables.cache_clear()
    rows, stored = matrix(2 * BLOCK + 22), StoredRow("nf4", 2 * BLOCK + 22)
    found = decode(encode(rows, stored), stored, torch.float64)
    for row, of_row in zip(rows.tolist(), found.tolist(), strict=True):
        blocks = [row[at : at + BLOCK] for at in range(0, len(row), BLOCK)]
        largest = [max(map(abs, block)) for block in blocks]
        offset = sum(largest) / len(largest)
        factor = max(abs(each - offset) for each in largest)
        for number, block in enumerate(blocks):
            scale = offset + factor * nearest((largest[number] - offset) / (factor or 1.0), CODES_8)
            wanted = [scale * nearest(weight / (largest[number] or 1.0), NF4) for weight in block]
            assert of_row[number * BLOCK :][: len(block)] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    _tables.cache_clear()


def test_int8_is_within_half_a_step_of_every_weight():
    rows, stored = matrix(150), StoredRow("int8", 150)
    error = (decode(encode(rows, stored), stored, torch.float64) - rows).abs()
    assert bool((error <= rows.abs().amax(1, keepdim=True) / 127 / 2 * (1 + 1e-6)).all())
    assert error[0].max() > 0.01


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize(("n_columns", "shards"), [(320, 4), (192, 3), (40, 2), (6, 6)])
def test_a_shard_of_a_row_has_the_values_of_the_row(kind: str, n_columns: int, shards: int):
    rows, whole = matrix(n_columns), StoredRow(kind, n_columns)  # type: ignore[arg-type]
    wanted = decode(encode(rows, whole), whole, torch.float32)
    parts = [StoredRow(kind, n_columns, shards, shard) for shard in range(shards)]  # type: ignore[arg-type]
    stored = [encode(rows, part) for part in parts]
    assert {each.shape[-1] for each in stored} == {part.n_bytes for part in parts}
    assert len({part.n_bytes for part in parts}) == 1
    assert torch.equal(torch.cat([decode(*pair, torch.float32) for pair in zip(stored, parts, strict=True)], 1), wanted)


def test_experts_are_stored_one_by_one_and_decoded_in_chunks(monkeypatch: pytest.MonkeyPatch):
    rows, stored = matrix(70, 24), StoredRow("nf4", 70)
    wanted = decode(encode(rows, stored), stored, torch.bfloat16)
    monkeypatch.setattr("shardwright.model.quantised._CHUNK", 5 * 70)
    assert torch.equal(decode(encode(rows.view(4, 6, 70), stored), stored, torch.bfloat16).view(24, 70), wanted)


def test_codes_and_scales_are_those_of_bitsandbytes():
    """A row of up to 256 blocks is one group of scales there too. A scale in the middle of two codes may be either."""
    functional = pytest.importorskip("bitsandbytes.functional")
    n_columns = 8192
    rows, stored = matrix(n_columns)[3:], StoredRow("nf4", n_columns)
    ours = encode(rows, stored)
    n_codes, n_blocks = n_columns // 2, n_columns // BLOCK
    for number, row in enumerate(rows):
        codes, state = functional.quantize_4bit(row, quant_type="nf4", compress_statistics=True)
        assert torch.equal(codes.flatten(), ours[number, :n_codes])
        scales = ours[number, n_codes : n_codes + n_blocks]
        assert (scales.int() - state.absmax.int()).abs().max() <= 1
        assert (scales == state.absmax).double().mean() > 0.98
    codes, largest, _ = functional.int8_vectorwise_quant(rows.half())
    ours = encode(rows.half(), StoredRow("int8", n_columns))
    assert torch.equal(codes, ours[:, :n_columns].view(torch.int8))
    assert torch.equal(largest / 127, ours[:, n_columns:].contiguous().view(torch.float32).flatten())
