"""Seconds of a collective, for arrays of sizes and groups at once, over the links of a cluster.

Every function takes `n_bytes`, `size` (members of the group) and `stride` (ranks between one member and the next) as
numbers or arrays that broadcast, and prices the group when all groups of its kind run at the same time, as they do in
training. What stands below follows three steps: where the members of a group sit (`Placement`), how many bytes each
algorithm sends over which link, and how long the slower of both kinds of link takes for them (`_slower_s`).

Symbols: n members, g of them in a node, k nodes, S bytes of the whole buffer, V bytes that one accelerator sends, B
bandwidth of its link in bytes/s, a latency of a message in s, H bytes at which half of B is reached.

Sources: nccl-tests' PERFORMANCE.md (bus bandwidth of each collective); stas00/ml-engineering network/README.md (what is
measured, and the shares that leave a node); Sanders et al., "Two-tree algorithms", 2009, for the double tree; steps of
latency as in NVIDIA/nccl src/graph/tuning.cc.

Ignored throughout: contention with other kinds of group, with computation for memory and multiprocessors (the step time
adds that), the topology above the nodes (a full fat tree is assumed), stragglers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost.hardware import Cluster, Link
from shardwright.cost.job import Floats, Ints

SATURATION = 0.7
"""Exponent q of the rise of bandwidth with size, B V^q / (V^q + H^q). Fitted once to the first three measured curves of
tests/cost/test_collectives.py, which prefer 0.65 to 0.8; with 1, the rise would be one more latency, a third off. The
library changes protocol and channels little by little as buffers grow."""


@dataclass(frozen=True)
class Placement:
    """Where groups of `size` members, `stride` ranks apart, sit on nodes of consecutive ranks; arrays.

    `per_node` (g): members in the node that has fewest. A group covers size x stride ranks and starts at a multiple of
    that, so all cuts by nodes fall on multiples of gcd(size x stride, node_size), and g is that over the stride.
    `nodes` (k): over how many nodes the members are spread.
    """

    size: Ints
    per_node: Ints
    nodes: Ints

    @staticmethod
    def of(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> "Placement":
        """Of a group on a cluster."""
        n, apart = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
        if cluster.nodes == 1:
            return Placement(n, n, np.ones_like(n))
        span = n * apart
        g = np.maximum(1, np.gcd(span, cluster.node_size) // apart)
        k = np.where(g >= n, 1, np.clip(-(-span // cluster.node_size), 2, n))
        return Placement(n, g, k)


def all_reduce(cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1) -> Floats:
    """Every member gets the sum of all; seconds for a buffer of `n_bytes` (S) on each.

    Ring: V = 2 S (n-1)/n, inside and, shared by the g ports of a node, V/g across; 2 (n-1) messages, of which
    2 (k-1) cross. Double tree, for groups that leave the node: up and down a chain inside, V = 2 S and 2 (g-1)
    messages; across, each of two trees carries half of the buffer, and a node that is inner in one is a leaf in the
    other, so a port sends 2 S/g, in 2 log2(k) messages. In the switch (NVLink SHARP), for groups in a node: V = S in
    2 log2(n) messages, at the rate of the switches. The fastest is taken, as the library does.

    Inside and across work at the same time, so the slower of them bounds; latencies add. Ignores that over two nodes a
    tree could send S/g: what people measure there stays at the ring's figure (86 and 91 of 100 GB/s on A100,
    NVIDIA/nccl-tests issues 175 and 100), and that switches can add up across nodes as well.
    """
    at, s_bytes = Placement.of(cluster, size, stride), np.asarray(n_bytes, dtype=np.float64)
    n, g, k = at.size, at.per_node, at.nodes
    ring_bytes = 2 * s_bytes * (n - 1) / n
    ring = _latency_s(cluster, 2 * (n - k), 2 * (k - 1)) + _slower_s(cluster, at, ring_bytes, ring_bytes / g)
    tree = _latency_s(cluster, 2 * (g - 1), 2 * np.ceil(np.log2(k))) + _slower_s(
        cluster, at, 2 * s_bytes, 2 * s_bytes / g
    )
    in_node = ring
    if cluster.inside.switch_bytes_per_s:
        messages = 2 * np.ceil(np.log2(n))
        in_switch = _saturated(cluster.inside, s_bytes) / cluster.inside.switch_bytes_per_s
        in_node = np.minimum(ring, _latency_s(cluster, messages, 0) + in_switch)
    return np.where(n > 1, np.where(k > 1, np.minimum(ring, tree), in_node), 0.0)


def all_gather(cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1) -> Floats:
    """Every member gets the parts of all; seconds for `n_bytes` (S) gathered, of which each brings S/n.

    Ring: V = S (n-1)/n inside and V/g across, in n-1 messages, of which k-1 cross.
    """
    at = Placement.of(cluster, size, stride)
    n, g, k = at.size, at.per_node, at.nodes
    ring_bytes = np.asarray(n_bytes, dtype=np.float64) * (n - 1) / n
    ring = _latency_s(cluster, n - k, k - 1) + _slower_s(cluster, at, ring_bytes, ring_bytes / g)
    return np.where(n > 1, ring, 0.0)


def reduce_scatter(cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1) -> Floats:
    """Every member gets its share S/n of the sum of all; seconds for a buffer of `n_bytes` (S) on each.

    The ring of `all_gather`, run backwards.
    """
    return all_gather(cluster, n_bytes, size, stride)


def all_to_all(cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1) -> Floats:
    """Every member sends an equal part of its `n_bytes` (S) to each; seconds, of which S/n stays where it is.

    V = S (g-1)/n inside and S (n-g)/n across, each member through its own port. Messages: g-1 inside, k-1 across, as
    those to the members of one other node overlap. Ignores that parts are uneven where a router decides.
    """
    at, s_bytes = Placement.of(cluster, size, stride), np.asarray(n_bytes, dtype=np.float64)
    n, g = at.size, at.per_node
    time = _latency_s(cluster, g - 1, at.nodes - 1) + _slower_s(
        cluster, at, s_bytes * (g - 1) / n, s_bytes * (n - g) / n
    )
    return np.where(n > 1, time, 0.0)


def point_to_point(cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1) -> Floats:
    """A member sends `n_bytes` (S) to the next one; seconds of the slowest such pair of the group: a + S/B.

    Across nodes as soon as one pair is, each sender through its own port.
    """
    at, s_bytes = Placement.of(cluster, size, stride), np.asarray(n_bytes, dtype=np.float64)
    inside, across = cluster.inside, cluster.across
    near = inside.start_s + inside.latency_s + _saturated(inside, s_bytes) / _bandwidth(inside, np.asarray(2))
    far = across.start_s + across.latency_s + _saturated(across, s_bytes) / across.bytes_per_s
    return np.where(at.size > 1, np.where(at.nodes > 1, far, near), 0.0)


def _latency_s(cluster: Cluster, inside: ArrayLike, across: ArrayLike) -> Floats:
    """Of so many messages one after another: start + messages x latency, on both kinds of link."""
    start = np.where(np.asarray(across) > 0, cluster.across.start_s, cluster.inside.start_s)
    return start + np.asarray(inside) * cluster.inside.latency_s + np.asarray(across) * cluster.across.latency_s


def _slower_s(cluster: Cluster, at: Placement, inside_bytes: Floats, across_bytes: Floats) -> Floats:
    """Of both links at work at once: the time of the slower for what an accelerator sends over it."""
    inside = np.where(
        at.per_node > 1, _saturated(cluster.inside, inside_bytes) / _bandwidth(cluster.inside, at.per_node), 0.0
    )
    across = np.where(at.nodes > 1, _saturated(cluster.across, across_bytes) / cluster.across.bytes_per_s, 0.0)
    return np.maximum(inside, across)


def _saturated(link: Link, v_bytes: Floats) -> Floats:
    """Bytes that would take as long at full bandwidth: V (1 + (H/V)^q) = V + H^q V^(1-q), with q = SATURATION."""
    half: float = link.half_bytes**SATURATION
    return v_bytes + half * v_bytes ** (1 - SATURATION)


def _bandwidth(link: Link, members: Ints) -> Floats:
    """Bytes/s of an accelerator among so many members; where each pair has its own wire, few members use few wires."""
    if not link.peer_bytes_per_s:
        return np.full(members.shape, link.bytes_per_s)
    wires: Floats = link.peer_bytes_per_s * np.maximum(members - 1, 1)
    return np.minimum(link.bytes_per_s, wires)
