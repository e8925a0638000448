"""Seconds of collectives: the textbook's cases, the measured curves, where groups sit, and what must always hold.

Curves are of nccl-tests' all_reduce_perf: stas00/ml-engineering network/README.md for the first three and for parts of
a node, NVIDIA/nccl issue 1411 for RoCE, Hetu-Galvatron hardware_configs for the groups that stride over nodes.
"""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.collectives import (
    Placement,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_by_node,
    point_to_point,
    reduce_scatter,
)
from shardwright.cost.hardware import Cluster, NetworkLink, accelerator, cluster
from shardwright.layout.layout import Layout
from shardwright.system.units import GiB, MiB

EVERY = (all_reduce, all_gather, reduce_scatter, all_to_all, point_to_point)
GB_PER_S = 1e9


def plain(size: int, node_size: int, inside: float = 100e9, across: float = 10e9, latency_s: float = 0.0) -> Cluster:
    """A cluster whose links have no start and no rise with size, so that the textbook's formulas can be read off."""
    return Cluster(
        name="plain",
        accelerator=accelerator("a100"),
        size=size,
        node_size=node_size,
        inside=NetworkLink(name="inside", bytes_per_s=inside, latency_s=latency_s, half_bytes=0.0),
        across=NetworkLink(name="across", bytes_per_s=across, latency_s=latency_s, half_bytes=0.0),
        node_bytes_per_s=across * node_size,
    )


def test_a_ring_all_reduce_of_10_gb_over_8_ranks_sends_seven_quarters_of_it():
    bandwidth = 100e9
    assert all_reduce(plain(8, 8, inside=bandwidth), 10e9, 8) == pytest.approx(2 * 7 / 8 * 10e9 / bandwidth)


def test_latency_is_counted_for_each_message_of_the_ring():
    node = plain(8, 8, latency_s=1e-6)
    assert all_reduce(node, 0, 8) == pytest.approx(14e-6)
    assert all_gather(node, 0, 8) == pytest.approx(7e-6)
    assert point_to_point(node, 0, 8) == pytest.approx(1e-6)


def test_gathering_scattering_and_exchanging_send_seven_eighths_each():
    node = plain(8, 8)
    for collective in (all_gather, reduce_scatter, all_to_all):
        assert collective(node, 8e9, 8) == pytest.approx(7e9 / 100e9)
    assert point_to_point(node, 8e9, 8) == pytest.approx(8e9 / 100e9)


def test_a_ring_through_whole_nodes_uses_every_port_of_a_node():
    pair = plain(16, 8, inside=1000e9, across=10e9)
    assert all_reduce(pair, 16e9, 16) == pytest.approx(2 * 15e9 / (8 * 10e9))
    assert all_gather(pair, 16e9, 16) == pytest.approx(15e9 / (8 * 10e9))


def test_a_group_of_one_member_a_node_has_one_port():
    pair = plain(16, 8)
    assert all_gather(pair, 16e9, 2, 8) == pytest.approx(8e9 / 10e9)


def test_only_what_leaves_the_node_goes_through_the_port_of_an_all_to_all():
    quartet = plain(32, 8, inside=1e15)
    assert all_to_all(quartet, 32e9, 32) == pytest.approx(24e9 / 10e9)


def test_stages_of_a_pipeline_send_across_as_soon_as_they_do_not_share_a_node():
    pair = plain(16, 8)
    assert point_to_point(pair, 1e9, 2, 4) == pytest.approx(1e9 / 100e9)
    assert point_to_point(pair, 1e9, 2, 8) == pytest.approx(1e9 / 10e9)
    assert point_to_point(pair, 1e9, 4, 4) == pytest.approx(1e9 / 10e9)


def test_many_nodes_and_few_bytes_are_a_tree_and_not_a_ring():
    many = plain(8192, 8, latency_s=1e-6)
    assert all_reduce(many, 8, 8192) == pytest.approx((2 * 7 + 2 * 10) * 1e-6, rel=1e-3)


def test_switches_add_up_faster_than_a_ring_of_many_and_not_than_a_ring_of_two():
    node = plain(8, 8)
    adding = replace(node, inside=replace(node.inside, switch_bytes_per_s=70e9))
    assert all_reduce(adding, 7e9, 8) == pytest.approx(0.1)
    assert all_reduce(adding, 7e9, 2) == all_reduce(node, 7e9, 2)
    assert all_gather(adding, 7e9, 8) == all_gather(node, 7e9, 8)


def test_where_each_pair_has_its_own_wire_few_members_are_slow():
    busbw = {n: 2 * (n - 1) / n * 4 * GiB / float(all_reduce(cluster("mi300x:8"), 4 * GiB, n)) for n in (2, 4, 8)}
    assert busbw[2] == pytest.approx(47.7 * GB_PER_S, rel=0.05)
    assert busbw[4] == pytest.approx(3 * 47.7 * GB_PER_S, rel=0.05)
    assert busbw[8] == pytest.approx(312.9 * GB_PER_S, rel=0.05)


# fmt: off
CURVES = {  # cluster: ranks, MiB of the buffer, GB/s of bus
    "h200:8": (8, 2.0 ** np.arange(15), [
        39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15, 450.29, 463.58, 469.17, 473.1, 477.45,
        482.26]),
    "b200:8": (8, 2.0 ** np.arange(15), [
        36.06, 63.09, 76.48, 126.49, 254.96, 325.97, 400.6, 568.38, 646.11, 688.99, 723.34, 734.97, 740.64, 839.07,
        845.67]),
    "p6-b200:32": (32, 2.0 ** np.arange(15), [
        5.37, 10.38, 18.9, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09, 326.9, 361.99, 372.42, 377.34, 380.39, 381.8]),
    # 4 H100 in each of 2 nodes, one port of 400 Gbit/s each, RoCE. The first size of a run is its warm-up.
    "h100:8/4@1600Gb": (8, 2.0 ** np.arange(2, 9), [71.22, 93.45, 119.97, 135.8, 142.28, 157.31, 159.43]),
}
# fmt: on


@pytest.mark.parametrize(
    ("name", "median", "worst"),
    [("h200:8", 0.02, 0.05), ("b200:8", 0.06, 0.21), ("p6-b200:32", 0.03, 0.11), ("h100:8/4@1600Gb", 0.02, 0.06)],
)
def test_measured_curves_are_met_from_1_mib_on(name: str, median: float, worst: float):
    ranks, payload_mib, busbw = CURVES[name]
    measured_s = 2 * (ranks - 1) / ranks * payload_mib * MiB / (np.array(busbw) * GB_PER_S)
    where = cluster(name).on("roce") if "@" in name else cluster(name)
    error = np.abs(all_reduce(where, payload_mib * MiB, ranks) / measured_s - 1)
    assert np.median(error) <= median
    assert error.max() <= worst


def test_parts_of_a_node_reach_what_was_measured_of_them():
    """8 GiB on an H200 node: 4 and 5 ranks do no better than the ring, 8 gain from the switches."""
    ranks = np.array([4, 5, 6, 7, 8])
    measured = np.array([363.3, 414.2, 435.6, 460.0, 473.1]) * GB_PER_S
    busbw = 2 * (ranks - 1) / ranks * 8 * GiB / all_reduce(cluster("h200:8"), 8 * GiB, ranks)
    assert np.abs(busbw / measured - 1).max() < 0.13


def test_a_ring_in_a_node_reaches_what_was_measured_of_it():
    assert 7 / 8 * 8 * GiB / all_gather(cluster("h200:8"), 8 * GiB, 8) == pytest.approx(365.6 * GB_PER_S, rel=0.03)
    assert 2 * 7 / 8 * 16 * GiB / all_reduce(cluster("a100:8"), 16 * GiB, 8) == pytest.approx(234.89e9, rel=0.03)


@pytest.mark.parametrize(
    ("name", "ranks", "payload", "measured"),
    [
        ("dgx-a100:32", 32, 8 * GiB, 192),  # NVIDIA/nccl issue 812
        ("a100-80gb:16@800Gb", 16, 8 * GiB, 91),  # NVIDIA/nccl-tests issue 100
        ("a100-40gb:24@800Gb", 24, 128 * MiB, 84.8),  # NVIDIA/nccl-tests issue 119
    ],
)
def test_infiniband_clusters_of_others_are_met(name: str, ranks: int, payload: float, measured: float):
    busbw = 2 * (ranks - 1) / ranks * payload / float(all_reduce(cluster(name), payload, ranks))
    assert busbw == pytest.approx(measured * GB_PER_S, rel=0.05)


def test_groups_that_stride_over_two_nodes_share_its_network_as_measured():
    """Bus GB/s of 2 x 8 A100-class accelerators for groups of (size, stride), all groups of a kind at once. Network and
    buffer are not stated, so one bandwidth is fitted; shown is that the share of a group follows its members."""
    measured = {(16, 1): 44.682, (8, 2): 20.7724, (4, 4): 16.22, (2, 8): 8.13007}
    where = cluster("a100-40gb:16@430Gb")
    for (size, stride), busbw in measured.items():
        seconds = float(all_reduce(where, GiB, size, stride))
        assert 2 * (size - 1) / size * GiB / seconds == pytest.approx(busbw * GB_PER_S, rel=0.25), (size, stride)


boxes = st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])] * 4).filter(lambda degrees: prod(degrees) <= 1024)


@given(boxes, st.sampled_from([1, 2, 4, 6, 8, 72]), st.integers(2, 40))
def test_members_of_a_node_are_never_overcounted(box: tuple[int, int, int, int], node_size: int, nodes: int):
    """Against the groups of a layout, dealt over nodes rank by rank; exact where nodes and groups nest."""
    pp, dp, cp, tp = box
    layout = Layout(pp=pp, dp_replicate=dp, cp=cp, tp=tp, virtual_stages=1, sequence_parallel=False)
    where = plain(node_size * nodes, node_size)
    for axis, stride in (("tp", 1), ("cp", tp), ("dp_replicate", tp * cp), ("pp", tp * cp * dp)):
        size = layout.degree(axis)
        at = Placement.on_cluster(where, size, stride)
        counts = [np.unique(np.array(group) // node_size, return_counts=True)[1] for group in layout.groups(axis)]
        fewest, most = min(count.min() for count in counts), max(len(count) for count in counts)
        assert at.per_node <= fewest
        assert at.nodes <= size
        span = size * stride
        if node_size % stride == 0 and (node_size % span == 0 or span % node_size == 0):
            assert (at.per_node, at.nodes) == (fewest, most)


NAMES = ["a100:64", "h100:64", "mi300x:64", "gb200:144", "p4d:64", "rtx4090:64", "h800:64/4@800Gb", "cpu:64"]
sizes = st.sampled_from([2, 3, 4, 8, 12, 16, 32])
strides = st.sampled_from([1, 2, 4, 8, 16])
payloads = st.floats(1.0, 1e12)


@given(st.sampled_from(EVERY), st.sampled_from(NAMES), sizes, strides, payloads, st.floats(1.0, 100.0))
def test_more_bytes_are_never_faster(collective, name: str, size: int, stride: int, n_bytes: float, more: float):
    where = cluster(name)
    assert collective(where, n_bytes, size, stride) <= collective(where, n_bytes * more, size, stride)


@given(st.sampled_from(EVERY), st.sampled_from(NAMES), sizes, strides, payloads)
def test_doubling_a_bandwidth_never_slows(collective, name: str, size: int, stride: int, n_bytes: float):
    where = cluster(name)
    before = collective(where, n_bytes, size, stride)
    double = replace(where.inside, bytes_per_s=2 * where.inside.bytes_per_s)
    assert collective(where.with_network(2 * where.node_bytes_per_s), n_bytes, size, stride) <= before
    assert collective(replace(where, inside=double), n_bytes, size, stride) <= before


@given(st.sampled_from(EVERY), st.sampled_from(NAMES), strides, payloads)
def test_a_group_of_one_costs_nothing(collective, name: str, stride: int, n_bytes: float):
    assert collective(cluster(name), n_bytes, 1, stride) == 0


# Not of the MI300X, whose one wire between two is no faster than its port to the network.
@given(st.sampled_from([name for name in NAMES if "mi300x" not in name]), sizes, strides, payloads)
def test_leaving_the_node_is_never_faster_than_a_node_that_holds_all(name: str, size: int, stride: int, n_bytes: float):
    where = cluster(name)
    together = replace(where, node_size=where.size)
    for collective in (all_gather, reduce_scatter, point_to_point):
        assert collective(together, n_bytes, size, stride) <= collective(where, n_bytes, size, stride) * (1 + 1e-12)


@pytest.mark.parametrize("collective", EVERY)
def test_arrays_are_priced_as_their_elements_are(collective):
    where = cluster("h100:64")
    n_bytes, size, stride = np.array([1e6, 1e8, 1e9, 1e7]), np.array([1, 8, 16, 4]), np.array([1, 1, 2, 16])
    each = [float(collective(where, *one)) for one in zip(n_bytes, size, stride, strict=True)]
    assert collective(where, n_bytes, size, stride) == pytest.approx(each)
    assert collective(where, n_bytes[:, None], 8, stride).shape == (4, 4)


def test_a_token_with_several_experts_on_a_node_crosses_to_it_once():
    # 4 nodes of 8, 8 copies of each token: a node gets a token with probability 1 - (3/4)^8 = 0.8999, so 3 nodes get
    # 2.6997 copies, where an ordinary all-to-all sends 8 x 24/32 = 6 across.
    slow = plain(32, 8, across=1e9)
    ordinary, by_node = all_to_all(slow, 8e9, 32), all_to_all_by_node(slow, 8e9, 32, top_k=8)
    assert float(ordinary) == pytest.approx(6.0)
    assert float(by_node) == pytest.approx(2.6997, rel=1e-4)
    assert float(all_to_all_by_node(slow, 8e9, 32, top_k=1)) == pytest.approx(float(ordinary))
    # In one node of 8: the copies of a token are on 8 (1 - (7/8)^8) = 5.251 ranks, of which 7/8 are others.
    inside = all_to_all_by_node(plain(8, 8, inside=1e9), 8e9, 8, top_k=8)
    assert float(inside) == pytest.approx(5.251 * 7 / 8, rel=1e-4)
