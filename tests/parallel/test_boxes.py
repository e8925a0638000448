"""Proves where shards lie in whole tensors: they cover a tensor once for every size and mesh, the box of each rank is
what FSDP2 over tp gives it, and a layout with unequal shards trains, is saved, taken up by others and exported."""

from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.model.presets import PRESETS
from shardwright.parallel.boxes import box_of, gather_whole, local_box, overlap, shard_of
from shardwright.parallel.norm import as_part
from shardwright.training.checkpoint.manifest import ShardRecord, TensorRecord
from tests.distributed import run_ranks
from tests.marks import rest_prove


def strided(tp: int) -> list[Placement]:
    """How FSDP2 places rows of which tp holds shards."""
    return [_StridedShard(0, split_factor=tp), Shard(0)]


def rows_of(size: int, shards: int, tp: int, at: int, tp_rank: int) -> range:
    """The rows of a rank, by cutting a list as FSDP2 does: over tp first, then each shard over its ranks."""
    rows = range(size)
    for n, place in ((tp, tp_rank), (shards, at)):
        most = -(-len(rows) // n)
        rows = rows[place * most : (place + 1) * most]
    return rows


VOCABULARIES = sorted({preset.vocab_size for preset in PRESETS.values()} | {61, 73})


@given(st.sampled_from(VOCABULARIES), st.integers(1, 64), st.integers(1, 64), st.data())
def test_the_vocabulary_of_every_preset_is_cut_without_gap_by_any_two_degrees_up_to_64(size, shards, tp, data):
    def rows_at(number: int) -> range:
        tp_rank, at = divmod(number, shards)
        (begin, _), (length, _), _ = box_of((size, 8), (shards, tp), (at, tp_rank), strided(tp))
        assert len(rows_of(size, shards, tp, at, tp_rank)) == length
        assert not length or range(begin, begin + length) == rows_of(size, shards, tp, at, tp_rank)
        return range(begin, begin + length)

    number = data.draw(st.integers(0, shards * tp - 1))
    here = rows_at(number)
    assert here.start == (rows_at(number - 1).stop if number else 0)
    assert here.stop == (rows_at(number + 1).start if number + 1 < shards * tp else size)


@pytest.mark.parametrize(("shards", "tp"), [(3, 2), (4, 2), (8, 2), (6, 4), (12, 8)])
def test_the_rows_of_gpt_2_are_covered_where_pytorchs_offsets_are_wrong(shards: int, tp: int):
    size, ours, theirs = 50257, [], []
    for tp_rank, at in product(range(tp), range(shards)):
        ours.append(box_of((size,), (shards, tp), (at, tp_rank), strided(tp))[:2])
        theirs.append(_compute_local_shape_and_global_offset((size,), (shards, tp), [at, tp_rank], strided(tp))[::-1])
    covered = [list(chain.from_iterable(range(a, a + n) for (a,), (n,) in boxes)) for boxes in (ours, theirs)]
    assert covered[0] == list(range(size))
    assert sorted(covered[1]) != list(range(size)), "PyTorch's are right now: this module can read them"


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    """A tensor, a mesh of at most 3 axes, and what is placed along them; a strided axis stands before what it is in."""
    shape = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3)))
    degrees = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    placements: list[Placement] = [
        Replicate() if dim < 0 else Shard(dim) for dim in (draw(st.integers(-1, len(shape) - 1)) for _ in degrees)
    ]
    if len(degrees) > 1 and placements[-2] == placements[-1] != Replicate():
        placements[-2] = _StridedShard(placements[-1].dim, split_factor=degrees[-1])  # type: ignore[attr-defined]
    return shape, degrees, placements


@given(sharded())
def test_shards_of_any_size_on_any_mesh_cover_a_tensor_once_and_share_nothing(case):
    shape, degrees, placements = case
    replicated = [place.is_replicate() for place in placements]
    boxes = []
    for at in product(*(range(n) for n in degrees)):
        offsets, local, _ = box_of(shape, degrees, at, placements)
        assert all(a >= 0 and a + n <= size for a, n, size in zip(offsets, local, shape, strict=True))
        first = [0 if same else i for i, same in zip(at, replicated, strict=True)]
        assert box_of(shape, degrees, first, placements)[:2] == (offsets, local), "replicas hold the same"
        if list(at) == first and 0 not in local:
            boxes.append((offsets, local))
    assert TensorRecord(shape, "float32", tuple(ShardRecord(*box, "x", "0" * 32) for box in boxes)).is_whole
    for i, one in enumerate(boxes):
        assert all(overlap(*one, *other) is None for other in boxes[:i])


class Table(nn.Module):
    """One matrix, of which this rank of tp holds its rows."""

    def __init__(self, whole: Tensor, tp_mesh) -> None:
        super().__init__()
        rows = rows_of(len(whole), 1, tp_mesh.size(), 0, tp_mesh.get_local_rank())
        local = whole[rows.start : rows.stop].clone()
        self.weight = nn.Parameter(as_part(local, whole, tp_mesh, [Shard(0)]))


def boxes_of_fsdp(sizes: list[int], shards: int, tp: int) -> None:
    mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("dp", "tp"))
    for size in sizes:
        whole = torch.arange(size * 3.0).view(size, 3)
        table = Table(whole, mesh["tp"])
        fully_shard(table, mesh=mesh["dp"])
        assert isinstance(table.weight, DTensor)
        local, offsets = local_box(table.weight)
        assert torch.equal(local, whole[offsets[0] : offsets[0] + len(local)]), (size, shards, tp)
        assert torch.equal(table.weight.to_local(), local)
        assert tuple(local.shape) == shard_of(table.weight)[1]
        assert torch.equal(gather_whole(table.weight), whole)


@pytest.mark.parametrize(("shards", "tp"), rest_prove([(3, 2), (2, 3), (4, 2)], (3, 2)))
def test_the_box_of_a_rank_has_the_rows_that_fsdp_over_tp_gives_it(shards: int, tp: int):
    run_ranks(boxes_of_fsdp, shards * tp, [1, 5, 31, 61, 73], shards, tp)
