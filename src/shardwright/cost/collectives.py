"""Seconds of a collective, for arrays of sizes and groups at once, over the links of a cluster; and the messages of a
step, which the step time prices and `cost.traffic` lists.

Every function takes `n_bytes`, `size` (ranks of the process group) and `stride` (distance between consecutive ranks of
it) as numbers or arrays that broadcast. The result is the time when all groups of the kind communicate at the same
time, as they do in training; `what` names the collective in the ledger. The computation has three steps: on which nodes
the ranks of a group are (`Placement`), how many bytes each algorithm sends over which link, and the time of the slower
of the two kinds of link (`_links_s`).

Symbols: n ranks of the group, g of them in a node, k nodes, S bytes of the whole buffer, V bytes that one accelerator
sends, B bandwidth of its link in bytes/s, a latency of a message in s, H bytes at which half of B is reached.

Sources: nccl-tests' PERFORMANCE.md (bus bandwidth of each collective); stas00/ml-engineering network/README.md
(measured bandwidths, and the fractions of bytes that leave a node); Sanders et al., "Two-tree algorithms", 2009, for
the double tree; steps of latency as in NVIDIA/nccl src/graph/tuning.cc.

Ignored throughout: contention with other kinds of group, with computation for memory and multiprocessors (the step time
adds that), the topology above the nodes (a full fat tree is assumed), stragglers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce, wraps
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.cost.hardware import Cluster, NetworkLink
from shardwright.cost.job import Floats, Ints
from shardwright.cost.ledger import Formulas, greatest

SATURATION = 0.7
"""Exponent q of the rise of bandwidth with size, B V^q / (V^q + H^q). Fitted once to the first three measured curves of
tests/cost/test_collectives.py, which prefer 0.65 to 0.8; with 1, the rise would be one more latency, a third off. The
library changes protocol and channels little by little as buffers grow."""
FLATNESS = round(1 - SATURATION, 9)


class CollectiveCost(Protocol):
    """A function of this module."""

    __name__: str

    def __call__(
        self, cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = ..., /
    ) -> Floats: ...


Seconds = Callable[[Cluster, ArrayLike, ArrayLike, ArrayLike, str], Floats]
"""A `CollectiveCost`, or one whose further arguments are bound (`functools.partial`)."""
Number = Floats | NDArray[np.floating[Any]] | Ints | float


@dataclass(frozen=True)
class Placement:
    """The distribution of groups of `size` ranks, `stride` apart, over nodes of consecutive ranks; arrays.

    `per_node` (g): ranks in the node that has the fewest. A group covers size x stride ranks and starts at a multiple
    of size x stride. So all node boundaries are at multiples of d = gcd(size x stride, node_size), and g = d / stride.
    `nodes` (k): number of nodes.
    """

    size: Ints
    per_node: Ints
    nodes: Ints

    @staticmethod
    def on_cluster(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> "Placement":
        """Return the placement of groups on a cluster."""
        n, apart = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
        if cluster.nodes == 1:
            return Placement(n, n, np.ones_like(n))
        span = n * apart
        g = np.maximum(1, np.gcd(span, cluster.node_size) // apart)
        k = np.where(g >= n, 1, np.clip(-(-span // cluster.node_size), 2, n))
        return Placement(n, g, k)


def _as_measured(collective: CollectiveCost) -> CollectiveCost:
    """Multiply a collective's time by its measured time relative to the formula (`NetworkLink.relative`)."""
    kind = collective.__name__

    @wraps(collective)
    def priced(cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "") -> Floats:
        what = what or kind.replace("_", "-")
        relative = cluster.inside.relative.get(kind, 1.0)
        if relative == 1.0:
            return collective(cluster, n_bytes, size, stride, what)
        formula = f"{what}, by the fit of all kinds"
        seconds = collective(cluster, n_bytes, size, stride, formula)
        if not seconds.any():
            return seconds
        f = Formulas("s", {"relative": relative, formula: seconds})
        return f(what, f.relative * f[formula])

    return priced


@_as_measured
def all_reduce(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-reduce"
) -> Floats:
    """Return the seconds of an all-reduce: every rank gets the sum over all. `n_bytes` (S): buffer on each rank.

    Ring: V = 2 S (n-1)/n inside a node, and V/g across nodes through each of the g ports of a node; 2 (n-1) messages,
    2 (k-1) of them across nodes. Double tree, for groups over several nodes: up and down a chain inside, V = 2 S
    and 2 (g-1) messages; across nodes, each of two trees transfers half of the buffer, and an inner node of one is a
    leaf of the other, so a port sends 2 S/g, in 2 log2(k) messages. In the switch (NVLink SHARP), for groups in a node:
    V = S in 2 log2(n) messages, at the rate of the switches. NCCL chooses the fastest, and so does this function.

    Transfers inside and across nodes overlap, so the slower of them bounds the time; latencies add. Ignores that over
    two nodes a tree could send S/g, since measurements there are at the ring's figure (86 and 91 of 100 GB/s on A100,
    NVIDIA/nccl-tests issues 175 and 100), and that switches can reduce across nodes as well.
    """
    at = Placement.on_cluster(cluster, size, stride)
    if at.size.max() == 1:
        return np.zeros(np.broadcast_shapes(np.shape(n_bytes), at.size.shape))
    f, k, switch = _symbols(cluster, at, n_bytes), at.nodes, cluster.inside.switch_bytes_per_s
    ring = _links_s(f, f"{what}, ring", at, 2 * (f.n - f.k), 2 * (f.k - 1), 2 * f.S * (f.n - 1) / f.n)
    algorithms = {"ring": ring}
    if k.max() > 1:
        tree = _links_s(f, f"{what}, double tree", at, 2 * (f.g - 1), 2 * np.ceil(np.log2(f.k)), 2 * f.S)
        algorithms["double tree"] = np.where(k > 1, tree, np.inf)
    if switch and k.min() == 1:
        f.add(switch=switch)
        messages_s = f.start_s + 2 * np.ceil(np.log2(f.n)) * f.latency_in_s
        switched = f(f"{what}, in the switch", messages_s + _full_rate_bytes(f.S, f.half_in) / f.switch)
        algorithms["in the switch"] = np.where(k == 1, switched, np.inf)
    of_all = Formulas("s", {f"{what}, {name}": seconds for name, seconds in algorithms.items()})
    fastest = reduce(np.minimum, [of_all[f"{what}, {name}"] for name in algorithms])
    return np.where(at.size > 1, of_all(what, fastest), 0.0)


@_as_measured
def all_gather(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-gather"
) -> Floats:
    """Return the seconds of an all-gather: every rank gets all shards. `n_bytes` (S): output; each shard has S/n.

    Ring: V = S (n-1)/n inside and V/g across nodes, in n-1 messages, k-1 of them across nodes.
    """
    return _one_algorithm(what, cluster, n_bytes, size, stride, _ring)


@_as_measured
def reduce_scatter(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "reduce-scatter"
) -> Floats:
    """Return the seconds of a reduce-scatter: every rank gets its shard S/n of the sum. `n_bytes` (S): a rank's buffer.

    The same ring as in `all_gather`, in the other direction.
    """
    return _one_algorithm(what, cluster, n_bytes, size, stride, _ring)


@_as_measured
def all_to_all(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-to-all"
) -> Floats:
    """Return the seconds of an all-to-all: every rank sends S/n of its `n_bytes` (S) to each other rank.

    V = S (g-1)/n inside and S (n-g)/n across nodes, each rank through its own port. Messages: g-1 inside, k-1 across,
    because messages to the ranks of one other node overlap. Ignores the uneven parts of a router's load.
    """

    def sent(f: Formulas) -> _Sent:
        return _Sent(f.g - 1, f.k - 1, f.S * (f.g - 1) / f.n, f.S * (f.n - f.g) / f.n)

    return _one_algorithm(what, cluster, n_bytes, size, stride, sent)


def all_to_all_by_node(
    cluster: Cluster,
    n_bytes: ArrayLike,
    size: ArrayLike,
    stride: ArrayLike = 1,
    what: str = "all-to-all",
    *,
    top_k: int,
) -> Floats:
    """Return the seconds to send tokens of `top_k` copies each, `n_bytes` (S) together, to random ranks, if a token
    crosses to a node once, and is sent to a rank once, for any number of its copies there (DeepEP, DeepSeek-V3 report,
    arXiv 2412.19437, section 3.2.2; HybridEP).

    A token is sent to a given one of N nodes or ranks with probability p(N) = 1 - (1 - 1/N)^top_k. So (k-1) p(k) S /
    top_k are sent across nodes, and inside V = n p(n) S / top_k (g-1)/g, for the copies sent to other ranks of a node.
    These kernels reach the full bandwidth with messages of a micro-batch (153 to 158 of 160 GB/s, DeepEP's README).
    Ignored: routers that choose nodes before experts.
    """
    cluster = replace(
        cluster, inside=replace(cluster.inside, half_bytes=0.0), across=replace(cluster.across, half_bytes=0.0)
    )

    def sent(f: Formulas) -> _Sent:
        inside = f.n * (1 - (1 - 1 / f.n) ** f.top_k) * f.S / f.top_k * (f.g - 1) / f.g
        across = (f.k - 1) * (1 - (1 - 1 / f.k) ** f.top_k) * f.S / f.top_k
        return _Sent(f.g - 1, f.k - 1, inside, across)

    return _one_algorithm(what, cluster, n_bytes, size, stride, sent, top_k=top_k)


@_as_measured
def point_to_point(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "send"
) -> Floats:
    """Return the seconds a + S/B of the slowest pair, if each rank sends `n_bytes` (S) to the next rank of the group.

    The link across nodes counts if any pair is on two nodes; each sender has its own port.
    """
    at = Placement.on_cluster(cluster, size, stride)
    total_s = np.zeros(np.broadcast_shapes(np.shape(n_bytes), at.size.shape))
    if at.size.max() == 1:
        return total_s
    f = _symbols(cluster, at, n_bytes)
    if (in_node := (at.size > 1) & (at.nodes == 1)).any():
        f.add(bandwidth_in=_bandwidth(cluster.inside, np.asarray(2)))
        sent_s = f.start_s + f.latency_in_s + _full_rate_bytes(f.S, f.half_in) / f.bandwidth_in
        total_s = np.where(in_node, f(what, sent_s), total_s)
    if (leaves := at.nodes > 1).any():
        sent_s = f.start_s + f.latency_across_s + _full_rate_bytes(f.S, f.half_across) / f.bandwidth_across
        total_s = np.where(leaves, f(what, sent_s), total_s)
    return total_s


def _symbols(cluster: Cluster, at: Placement, n_bytes: ArrayLike, **more: float) -> Formulas:
    """Return the inputs of the formulas of collectives. A link that a group does not use has infinite bandwidth."""
    inside, across, leaves = cluster.inside, cluster.across, at.nodes > 1
    return Formulas(
        "s", start_s=np.where(leaves, across.start_s, inside.start_s), S=np.asarray(n_bytes, dtype=np.float64),
        n=at.size, g=at.per_node, k=at.nodes, latency_in_s=inside.latency_s, half_in=inside.half_bytes,
        bandwidth_in=np.where(at.per_node > 1, _bandwidth(inside, at.per_node), np.inf),
        latency_across_s=across.latency_s, half_across=across.half_bytes,
        bandwidth_across=np.where(leaves, across.bytes_per_s, np.inf), **more,
    )  # fmt: skip


class _Sent(NamedTuple):
    """Consecutive messages and bytes that a rank sends, inside a node (V) and across nodes, by default V / g."""

    messages_in: Floats
    messages_across: Floats
    inside: Floats
    across: Floats | None = None


def _ring(f: Formulas) -> _Sent:
    return _Sent(f.n - f.k, f.k - 1, f.S * (f.n - 1) / f.n)


def _one_algorithm(
    what: str, cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike,
    sent: Callable[[Formulas], _Sent], **more: float,
) -> Floats:  # fmt: skip
    at = Placement.on_cluster(cluster, size, stride)
    if at.size.max() == 1:
        return np.zeros(np.broadcast_shapes(np.shape(n_bytes), at.size.shape))
    f = _symbols(cluster, at, n_bytes, **more)
    seconds = _links_s(f, what, at, *sent(f))
    return seconds if at.size.min() > 1 else np.where(at.size > 1, seconds, 0.0)


def _links_s(
    f: Formulas, what: str, at: Placement, messages_in: Floats, messages_across: Floats, inside: Floats,
    across: Floats | None = None,
) -> Floats:  # fmt: skip
    """Return the latencies of messages, and the time of the slower kind of link, because transfers on both overlap.
    Terms are included if some group needs them. The last arguments: fields of `_Sent`."""
    shares, leaves = bool(at.per_node.max() > 1), bool(at.nodes.max() > 1)
    V, seconds, sent_s = f.let("V", inside), f.start_s, []
    if shares or (at.size > at.nodes).any():
        seconds = seconds + f.let("messages_in", messages_in) * f.latency_in_s
    if shares:
        sent_s.append(_full_rate_bytes(V, f.half_in) / f.bandwidth_in)
    if leaves:
        seconds = seconds + f.let("messages_across", messages_across) * f.latency_across_s
        V_across = f.let("V_across", V / f.g if across is None else across)
        sent_s.append(_full_rate_bytes(V_across, f.half_across) / f.bandwidth_across)
    return f(what, seconds + greatest(*sent_s), "cost/collectives.py")


def _full_rate_bytes(sent: Floats, half_bytes: Floats) -> Floats:
    """Return the bytes with the same time at full bandwidth: V (1 + (H/V)^q) = V + H^q V^(1-q), with q = SATURATION."""
    return sent + half_bytes**SATURATION * sent**FLATNESS


def _bandwidth(link: NetworkLink, members: Ints) -> Floats:
    """Return bytes/s of an accelerator in a group of `members` in its node. If each pair of accelerators has its own
    wire, a small group uses few wires."""
    if not link.peer_bytes_per_s:
        return np.asarray(link.bytes_per_s)
    wires: Floats = link.peer_bytes_per_s * np.maximum(members - 1, 1)
    return np.minimum(link.bytes_per_s, wires)


@dataclass(frozen=True)
class PricedMessage:
    """A collective, or a send, with which a group of ranks communicates `calls` times a step. Numbers or arrays (n,).

    `n_bytes`: of the whole buffer of one call, as the functions of `cost.collectives` count them; `size`, `stride`:
    ranks of the group and their distance. `work`: the part of the step time that the message belongs to, such as
    "tensor parallel". A group of one rank sends nothing.
    """

    what: str
    collective: Seconds
    n_bytes: Number
    size: Number
    stride: Number
    calls: Number = 1
    work: str = ""

    def seconds(self, cluster: Cluster, in_step: float = 1.0) -> Floats:
        """Return the seconds of all calls, one after another; (n,). `in_step`: time in a step relative to alone."""
        if in_step != 1:
            alone = f"{self.what}, alone"
            seconds = replace(self, what=alone).seconds(cluster)
            if not seconds.any():
                return seconds
            f = Formulas("s", {"in_step": in_step, alone: seconds})
            return f(self.what, f.in_step * f[alone])
        if np.all(self.calls == 1):
            return self.collective(cluster, self.n_bytes, self.size, self.stride, self.what)
        once = f"{self.what}, one call"
        one = self.collective(cluster, self.n_bytes, self.size, self.stride, once)
        if not one.any():
            return one
        f = Formulas("s", {"calls": self.calls, once: one})
        return f(self.what, f.calls * f[once])


def named(collective: Seconds) -> str:
    """Return the name of a collective, such as `all-gather`."""
    return collective.__name__.replace("_", "-")
