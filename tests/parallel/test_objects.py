"""Proves that objects between ranks are JSON, of a bounded size and of the type that is expected."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shardwright.parallel import objects
from shardwright.parallel.objects import gathered
from shardwright.system.errors import WorkerError
from tests.distributed import run_ranks


@dataclass(frozen=True)
class Found:
    name: str
    values: tuple[float, ...]


def exchanged() -> list[object]:
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = {7 * rank: Found(f"rank {rank} \N{SNOWMAN}" * (rank + 1), (1 / 3, -math.inf, 10.0**rank))}
    told: list[object] = [gathered(mine, dict[int, Found]), gathered(Path("a") if rank else None, Path | None)]
    try:
        gathered("text" if rank else 3, int)
    except WorkerError as error:
        told.append(str(error).partition("\n")[0])
    objects.MOST_BYTES = 100
    try:
        gathered("x" * (50 + 100 * rank), str)
    except WorkerError as error:
        told.append(str(error))
    return told


def test_every_rank_has_the_objects_of_all_and_what_is_too_long_or_of_another_type_is_refused():
    expected = [{7 * r: Found(f"rank {r} \N{SNOWMAN}" * (r + 1), (1 / 3, -math.inf, 10.0**r))} for r in range(2)]
    for objects_of_all, paths, of_another_type, too_long in run_ranks(exchanged, 2):
        assert objects_of_all == expected
        assert paths == [None, Path("a")]
        assert of_another_type.startswith("rank 1 of 2 sent an object of the wrong type: 1 validation error")
        assert too_long == "rank 1 of 2 sends an object of 152 B to the others; the maximum is 100 B"


def test_what_another_rank_has_nested_too_deeply_is_refused():
    text = torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)
    with pytest.raises(WorkerError, match="rank 0 of 1 sent an object of the wrong type: nested too deeply"):
        objects._decoded([text], [len(text)], list)


def test_nothing_unpickles_what_comes_from_another_rank():
    source = Path(objects.__file__).parents[1]
    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object", "send_object")
    users = [path for path in source.rglob("*.py") for name in names if f"{name}" in path.read_text()]
    assert users == []


@pytest.mark.parametrize("rank", [1])
def test_an_object_that_is_not_json_is_a_bug_of_ours(rank):
    with pytest.raises(TypeError):
        objects._plain(object())
