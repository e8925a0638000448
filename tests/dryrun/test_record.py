"""Proves how a record is summed: peaks, kinds, repeated micro-batches, and rows of experts that are assumed."""

from shardwright.dry_run.length import one_of_each_class
from shardwright.dry_run.program import balanced, shares
from shardwright.dry_run.record import KINDS, Allocation, RecordedMessage, summed, traffic
from shardwright.layout.layout import Layout
from shardwright.system.units import GiB, parsed_bytes


def storage(kind: str, *sizes: tuple[int, int]) -> Allocation:
    return Allocation("empty", "layers.0", "0F0", (4,), "float32", list(sizes), kind)


def test_the_peak_is_the_largest_sum_at_one_moment():
    found = [
        storage("parameters", (0, 10)),
        storage("activations", (2, 50), (6, 0)),
        storage("temporaries", (3, 5), (4, 0)),
        storage("gradients", (7, 45), (8, 7)),
    ]
    curve, peak, tops, largest = summed(found, [(1, "0F0"), (5, "0B0"), (9, "optimizer")])
    assert [(moment.action, moment.n_bytes) for moment in curve] == [("0F0", 65), ("0B0", 60), ("optimizer", 17)]
    assert peak.kinds == dict.fromkeys(KINDS, 0) | {"parameters": 10, "activations": 50, "temporaries": 5}
    assert tops["gradients"] == 45
    assert [(block.kind, block.n_bytes) for block in largest] == [
        ("activations", 50),
        ("parameters", 10),
        ("temporaries", 5),
    ]


def test_a_storage_that_grows_and_shrinks_counts_what_it_has():
    _, peak, tops, _ = summed([storage("gathered", (0, 0), (2, 30), (3, 0), (4, 20))], [(1, "0F0")])
    assert (peak.n_bytes, tops["gathered"]) == (30, 30)


def test_messages_of_repeated_micro_batches_count_as_often():
    def message(action: str) -> RecordedMessage:
        return RecordedMessage("all-gather", "tp", (0, 1), 8, "float32", ((2,),), action, "")

    (sums,) = traffic([message("0F0"), message("0F1"), message("0F2")], {"0F1": 5}).values()
    assert sums == (7, 56)


def test_assumed_rows_are_those_that_are_there():
    for n_rows, n_ranks, imbalance in ((100, 4, 1.0), (101, 4, 1.5), (7, 8, 1.0), (10, 2, 3.0)):
        to = shares(n_rows, n_ranks, imbalance)
        assert sum(to) == n_rows
        assert len(to) == n_ranks
        for mine in range(n_ranks):
            sent, received = balanced(n_ranks, mine, imbalance)(None, n_rows)
            assert sent == to
            assert received == [to[mine]] * n_ranks
    assert shares(100, 4, 1.5)[0] == 38


def test_every_stage_and_the_ends_of_every_axis_have_a_rank():
    layout = Layout(pp=4, dp_shard=8, tp=4, zero=1)
    found = [layout.coordinates(rank) for rank in one_of_each_class(layout)]
    assert {each["pp"] for each in found} == {0, 1, 2, 3}
    for axis in ("dp_shard", "tp"):
        for pp in (0, 3):
            assert {each[axis] for each in found if each["pp"] == pp} >= {0, layout.degree(axis) - 1}
    assert one_of_each_class(Layout(dp_shard=2, tp=4)) == list(range(8))


def test_sizes_are_read_in_words():
    assert parsed_bytes("80GiB") == 80 * GiB
    assert parsed_bytes("1.5 GB") == 1.5e9
    assert [parsed_bytes(each) for each in ("80", "GiB", "-3GiB", "0GiB", "80GiBs")] == [None] * 5
