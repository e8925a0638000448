"""Schedules go out to PyTorch's compute-only CSV and come back; what PyTorch writes is read."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.build import build
from shardwright.schedule.registry import find, names
from shardwright.schedule.simulate import Times, simulate
from shardwright.schedule.table import read_table, write_table
from shardwright.schedule.validate import problems
from shardwright.system.errors import InputError, ScheduleError
from tests.schedule.test_build import schedules

FIXED = tuple(name for name in names() if not find(name).searched)


def test_a_row_for_each_rank_and_a_cell_for_each_action(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_table(build("zb-h1", 2, 2), path)
    assert path.read_text() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    back = read_table(path)
    assert (back.name, back.n_stages, back.n_microbatches) == ("mine", 2, 2)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    schedule = data.draw(schedules(data.draw(st.sampled_from(FIXED))))
    path = tmp_path_factory.mktemp("tables") / "schedule.csv"
    write_table(schedule, path)
    back = read_table(path)
    assert (back.ranks, back.n_stages, back.n_microbatches) == (
        schedule.ranks,
        schedule.n_stages,
        schedule.n_microbatches,
    )


def test_empty_cells_are_skipped_and_overlapped_ones_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,, 0F1 ,(0F2;1B0)OVERLAP_F_B\r\n,,1F0,1B0\r\n")
    assert [" ".join(map(str, actions)) for actions in read_table(path).ranks] == ["0F0 0F1 0F2 1B0", "1F0 1B0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["is empty; valid: a row for each rank, with cells like 0F3"]),
        ("0F0,0B0\n,,\n", [", row 2 (rank 1) has no action; valid: cells like 0F3, at least one a rank"]),
        (
            "0F0,0SEND_F0\n1F0,UNSHARD,(1F0;)OVERLAP_F_B\n",
            [
                ", row 1 (rank 0), column 2: '0SEND_F0' is not an action; valid: stage, one of F, B, I, W, "
                "microbatch, like 0F3; (0F8;7B0)OVERLAP_F_B; empty",
                ", row 2 (rank 1), column 2: 'UNSHARD' is not",
                ", row 2 (rank 1), column 3: '(1F0;)OVERLAP_F_B' is not",
            ],
        ),
    ],
)
def test_every_bad_cell_is_named(text: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        read_table(path)
    assert len(caught.value.problems) == len(expected)
    for problem, words in zip(caught.value.problems, expected, strict=True):
        assert str(path) in problem
        assert words in problem


def test_a_file_that_is_not_there_or_not_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none.csv: cannot be read as a schedule \(No such file or directory\)"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ScheduleError, match="not UTF-8 text"):
        read_table(tmp_path / "binary.csv")
    with pytest.raises(InputError, match="cannot be written"):
        write_table(build("1f1b", 2, 2), tmp_path / "binary.csv" / "mine.csv")


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_what_pytorch_writes_of_its_own_schedules_is_read_and_runs_as_ours_does(name: str, tmp_path: Path) -> None:
    """The same idle time and activations as our builder, for 4 ranks and 8 microbatches; the orders may differ where
    weight gradients can."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    ours = {"ScheduleInterleaved1F1B": "interleaved-1f1b", "ScheduleZBVZeroBubble": "zb-v"}.get(name, "dualpipe-v")
    stages = [
        SimpleNamespace(
            is_first=False, is_last=False, has_backward=True, group=None, group_rank=0, group_size=4, num_stages=8,
            stage_index=index, submod=None, stage_index_to_group_rank={},
        )
        for index in (0, 7)
    ]  # fmt: skip
    path = tmp_path / "theirs.csv"
    schedule = getattr(pipelining, name)(stages, 8)
    schedule._dump_csv(str(path), format="compute_only")
    read = read_table(path)
    assert problems(read) == []
    built = build(ours, 4, 8, 2)
    theirs, mine = simulate(read, Times()), simulate(built, Times())
    assert [sorted(actions) for actions in read.ranks] == [sorted(actions) for actions in built.ranks]
    assert mine.makespan == theirs.makespan
    assert max(mine.peak_in_flight) == max(theirs.peak_in_flight)
