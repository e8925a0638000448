"""Seconds of a collective, for arrays of sizes and groups at once, over the links of a cluster.

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

from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost import ledger
from shardwright.cost.hardware import Cluster, Link
from shardwright.cost.job import Floats, Ints

SATURATION = 0.7
"""Exponent q of the rise of bandwidth with size, B V^q / (V^q + H^q). Fitted once to the first three measured curves of
tests/cost/test_collectives.py, which prefer 0.65 to 0.8; with 1, the rise would be one more latency, a third off. The
library changes protocol and channels little by little as buffers grow."""


class Collective(Protocol):
    """A function of this module."""

    __name__: str

    def __call__(
        self, cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = ..., /
    ) -> Floats: ...


@dataclass(frozen=True)
class Placement:
    """How groups of `size` ranks, `stride` apart, are distributed over nodes of consecutive ranks; arrays.

    `per_node` (g): ranks in the node that has the fewest. A group covers size x stride ranks and starts at a multiple
    of that, so all node boundaries are at multiples of gcd(size x stride, node_size), and g is that over the stride.
    `nodes` (k): number of nodes.
    """

    size: Ints
    per_node: Ints
    nodes: Ints

    @staticmethod
    def of(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> "Placement":
        """The placement of groups on a cluster."""
        n, apart = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
        if cluster.nodes == 1:
            return Placement(n, n, np.ones_like(n))
        span = n * apart
        g = np.maximum(1, np.gcd(span, cluster.node_size) // apart)
        k = np.where(g >= n, 1, np.clip(-(-span // cluster.node_size), 2, n))
        return Placement(n, g, k)


def _as_measured(collective: Collective) -> Collective:
    """The collective, times what this kind takes on a measured machine relative to the formula of all kinds
    (`Link.relative`)."""
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
        name = ledger.identifier(formula)
        inputs: ledger.Inputs = {"relative": relative, name: seconds}
        return ledger.compute(what, f"relative * {name}", **inputs)

    return priced


@_as_measured
def all_reduce(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-reduce"
) -> Floats:
    """Every rank gets the sum over all; seconds for a buffer of `n_bytes` (S) on each.

    Ring: V = 2 S (n-1)/n inside a node, and V/g across nodes through each of the g ports of a node; 2 (n-1) messages,
    of which 2 (k-1) are across nodes. Double tree, for groups over several nodes: up and down a chain inside, V = 2 S
    and 2 (g-1) messages; across nodes, each of two trees transfers half of the buffer, and an inner node of one is a
    leaf of the other, so a port sends 2 S/g, in 2 log2(k) messages. In the switch (NVLink SHARP), for groups in a node:
    V = S in 2 log2(n) messages, at the rate of the switches. NCCL chooses the fastest, and so does this function.

    Transfers inside and across nodes overlap, so the slower of them bounds the time; latencies add. Ignores that over
    two nodes a tree could send S/g, since measurements there are at the ring's figure (86 and 91 of 100 GB/s on A100,
    NVIDIA/nccl-tests issues 175 and 100), and that switches can reduce across nodes as well.
    """
    at = Placement.of(cluster, size, stride)
    symbols = _symbols(cluster, at, n_bytes)
    if at.size.max() == 1:
        return np.zeros(np.broadcast_shapes(np.shape(n_bytes), at.size.shape))
    k, switch = at.nodes, cluster.inside.switch_bytes_per_s
    steps = "messages_in = 2 * (n - k); messages_across = 2 * (k - 1); V = 2 * S * (n - 1) / n"
    algorithms = {"ring": _links_s(f"{what}, ring", at, steps, symbols)}
    if k.max() > 1:
        steps = "messages_in = 2 * (g - 1); messages_across = 2 * ceil(log2(k)); V = 2 * S"
        algorithms["double tree"] = np.where(k > 1, _links_s(f"{what}, double tree", at, steps, symbols), np.inf)
    if switch and k.min() == 1:
        formula = f"start_s + 2 * ceil(log2(n)) * latency_in_s + {_full_rate_bytes('S', 'in')} / switch"
        switched = ledger.compute(f"{what}, in the switch", formula, **symbols, switch=switch)
        algorithms["in the switch"] = np.where(k == 1, switched, np.inf)
    names = {ledger.identifier(f"{what}, {algorithm}"): seconds for algorithm, seconds in algorithms.items()}
    fastest = f"min({', '.join(names)})" if len(names) > 1 else next(iter(names))
    return np.where(at.size > 1, ledger.compute(what, fastest, **names), 0.0)


@_as_measured
def all_gather(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-gather"
) -> Floats:
    """Every rank gets the shards of all; seconds for `n_bytes` (S) of output, of which each rank contributes S/n.

    Ring: V = S (n-1)/n inside and V/g across nodes, in n-1 messages, of which k-1 are across nodes.
    """
    steps = "messages_in = n - k; messages_across = k - 1; V = S * (n - 1) / n"
    return _one_algorithm(what, cluster, n_bytes, size, stride, steps)


@_as_measured
def reduce_scatter(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "reduce-scatter"
) -> Floats:
    """Every rank gets its shard S/n of the sum over all; seconds for a buffer of `n_bytes` (S) on each.

    The same ring as in `all_gather`, in the other direction.
    """
    steps = "messages_in = n - k; messages_across = k - 1; V = S * (n - 1) / n"
    return _one_algorithm(what, cluster, n_bytes, size, stride, steps)


@_as_measured
def all_to_all(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-to-all"
) -> Floats:
    """Every rank sends an equal part of its `n_bytes` (S) to each other rank and keeps S/n; seconds.

    V = S (g-1)/n inside and S (n-g)/n across nodes, each rank through its own port. Messages: g-1 inside, k-1 across,
    as those to the ranks of one other node overlap. Ignores the uneven parts of a router's load.
    """
    steps = "messages_in = g - 1; messages_across = k - 1; V = S * (g - 1) / n; V_across = S * (n - g) / n"
    return _one_algorithm(what, cluster, n_bytes, size, stride, steps)


def all_to_all_by_node(
    cluster: Cluster,
    n_bytes: ArrayLike,
    size: ArrayLike,
    stride: ArrayLike = 1,
    what: str = "all-to-all",
    *,
    top_k: int,
) -> Floats:
    """Tokens of `top_k` copies each, `n_bytes` (S) together, to random ranks; seconds where a token crosses to a node
    once, and goes to a rank once, however many of its copies go there (DeepEP, DeepSeek-V3 report, arXiv 2412.19437,
    section 3.2.2; HybridEP).

    A token goes to a given one of N nodes or ranks with probability p(N) = 1 - (1 - 1/N)^top_k. So (k-1) p(k) S / top_k
    are sent across nodes, and inside V = n p(n) S / top_k (g-1)/g, of the copies that go to other ranks of a node.
    These kernels reach the full bandwidth with messages of a micro-batch (153 to 158 of 160 GB/s, DeepEP's README).
    Ignored: routers that choose nodes before experts.
    """
    cluster = replace(
        cluster, inside=replace(cluster.inside, half_bytes=0.0), across=replace(cluster.across, half_bytes=0.0)
    )
    steps = (
        "messages_in = g - 1; messages_across = k - 1; V = n * (1 - (1 - 1 / n) ** top_k) * S / top_k * (g - 1) / g; "
        "V_across = (k - 1) * (1 - (1 - 1 / k) ** top_k) * S / top_k"
    )
    return _one_algorithm(what, cluster, n_bytes, size, stride, steps, top_k=top_k)


@_as_measured
def point_to_point(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "send"
) -> Floats:
    """A rank sends `n_bytes` (S) to the next rank of the group; seconds of the slowest pair: a + S/B.

    The link across nodes counts if any pair is on two nodes; each sender has its own port.
    """
    at = Placement.of(cluster, size, stride)
    found = np.zeros(np.broadcast_shapes(np.shape(n_bytes), at.size.shape))
    if at.size.max() == 1:
        return found
    symbols = _symbols(cluster, at, n_bytes) | {"bandwidth_in": _bandwidth(cluster.inside, np.asarray(2))}
    for side, there in (("in", (at.size > 1) & (at.nodes == 1)), ("across", at.nodes > 1)):
        if there.any():
            formula = f"start_s + latency_{side}_s + {_full_rate_bytes('S', side)} / bandwidth_{side}"
            found = np.where(there, ledger.compute(what, formula, **symbols), found)
    return found


def _symbols(cluster: Cluster, at: Placement, n_bytes: ArrayLike) -> dict[str, Any]:
    """The inputs of the formulas of collectives. A link that a group does not use has infinite bandwidth."""
    inside, across, leaves = cluster.inside, cluster.across, at.nodes > 1
    return {
        "start_s": np.where(leaves, across.start_s, inside.start_s),
        "S": np.asarray(n_bytes, dtype=np.float64),
        "n": at.size,
        "g": at.per_node,
        "k": at.nodes,
        "latency_in_s": inside.latency_s,
        "half_in": inside.half_bytes,
        "bandwidth_in": np.where(at.per_node > 1, _bandwidth(inside, at.per_node), np.inf),
        "latency_across_s": across.latency_s,
        "half_across": across.half_bytes,
        "bandwidth_across": np.where(leaves, across.bytes_per_s, np.inf),
    }


def _one_algorithm(
    what: str, cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike, steps: str, **more: float
) -> Floats:
    at = Placement.of(cluster, size, stride)
    symbols = _symbols(cluster, at, n_bytes) | more
    if at.size.max() == 1:
        return np.zeros(np.broadcast_shapes(np.shape(n_bytes), at.size.shape))
    found = _links_s(what, at, steps, symbols)
    return found if at.size.min() > 1 else np.where(at.size > 1, found, 0.0)


def _links_s(what: str, at: Placement, steps: str, symbols: dict[str, Any]) -> Floats:
    """The sum of the latencies of messages, and the time of the slower kind of link, as transfers on both overlap.
    `steps`: numbers of messages and bytes (V, and V_across if not V / g) from n, g, k and S."""
    shares, leaves = bool(at.per_node.max() > 1), bool(at.nodes.max() > 1)
    formula = _formula(steps, shares or bool((at.size > at.nodes).any()), shares, leaves)
    return ledger.compute(what, formula, "s", "cost/collectives.py", **symbols)


@cache
def _formula(steps: str, messages_in: bool, shares: bool, leaves: bool) -> str:
    """A formula with only those terms that some group needs; for the other groups they are 0."""
    terms = ["start_s"] + ["messages_in * latency_in_s"] * messages_in + ["messages_across * latency_across_s"] * leaves
    sent = [f"{_full_rate_bytes('V', 'in')} / bandwidth_in"] * shares
    sent += [f"{_full_rate_bytes('V_across', 'across')} / bandwidth_across"] * leaves
    formula = " + ".join([*terms, f"max({', '.join(sent)})" if len(sent) > 1 else sent[0]])
    if "V_across" not in steps:
        steps += "; V_across = V / g"
    used = [step for step in steps.split("; ") if step.partition(" = ")[0] in formula]
    return "; ".join([*used, formula])


def _full_rate_bytes(sent: str, side: str) -> str:
    """Bytes that would take the same time at full bandwidth: V (1 + (H/V)^q) = V + H^q V^(1-q), with q = SATURATION."""
    return f"({sent} + half_{side} ** {SATURATION} * {sent} ** {1 - SATURATION:.9g})"


def _bandwidth(link: Link, members: Ints) -> Floats:
    """Bytes/s of an accelerator in a group of `members` in its node; if each pair of accelerators has its own wire, a
    small group uses few of them."""
    if not link.peer_bytes_per_s:
        return np.asarray(link.bytes_per_s)
    wires: Floats = link.peer_bytes_per_s * np.maximum(members - 1, 1)
    return np.minimum(link.bytes_per_s, wires)
