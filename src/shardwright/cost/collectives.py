"""Seconds of a collective, for arrays of sizes and groups at once, over the links of a cluster.

Every function takes `n_bytes`, `size` (members of the group) and `stride` (ranks between one member and the next) as
numbers or arrays that broadcast, and prices the group when all groups of its kind run at the same time, as they do in
training; `what` names the message in the ledger. What stands below follows three steps: where the members of a group
sit (`Placement`), how many bytes each algorithm sends over which link, and how long the slower of both kinds of link
takes for them (`_links_s`).

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

from shardwright.cost import ledger
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


def all_reduce(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-reduce"
) -> Floats:
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
    sent = 2 * s_bytes * (n - 1) / n
    steps = "messages_in = 2 * (n - k); messages_across = 2 * (k - 1); V = 2 * S * (n - 1) / n"
    ring = _links_s(f"{what}, ring", cluster, at, s_bytes, 2 * (n - k), 2 * (k - 1), sent, sent / g, steps)
    found = ring
    if np.any(k > 1):
        hops = 2 * np.ceil(np.log2(k))
        steps = "messages_in = 2 * (g - 1); messages_across = 2 * ceil(log2(k)); V = 2 * S"
        tree = _links_s(
            f"{what}, double tree", cluster, at, s_bytes, 2 * (g - 1), hops, 2 * s_bytes, 2 * s_bytes / g, steps
        )
        found = np.where(k > 1, np.minimum(ring, tree), ring)
    link, switch = cluster.inside, cluster.inside.switch_bytes_per_s
    if switch and np.any(k == 1):
        switched = _latency_s(cluster, 2 * np.ceil(np.log2(n)), 0) + _saturated(link, s_bytes) / switch
        if ledger.recording() and np.all(n > 1):
            ledger.note(
                f"{what}, in the switch",
                f"start_s + 2 * ceil(log2(n)) * latency_in_s + {_bytes_text('S', 'in')[:-len('bandwidth_in')]}switch",
                switched, start_s=link.start_s, n=n, latency_in_s=link.latency_s, S=s_bytes, half_in=link.half_bytes,
                switch=switch,
            )  # fmt: skip
        found = np.where(k > 1, found, np.minimum(ring, switched))
    if ledger.recording() and np.all(n > 1):
        ways = {"ring": ring} | ({"double tree": tree} if k > 1 else {"in the switch": switched} if switch else {})
        names = {ledger.identifier(f"{what}, {way}"): seconds for way, seconds in ways.items()}
        fastest = f"min({', '.join(names)})" if len(names) > 1 else next(iter(names))
        ledger.note(what, fastest, found, **names)
    return np.where(n > 1, found, 0.0)


def all_gather(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-gather"
) -> Floats:
    """Every member gets the parts of all; seconds for `n_bytes` (S) gathered, of which each brings S/n.

    Ring: V = S (n-1)/n inside and V/g across, in n-1 messages, of which k-1 cross.
    """
    at, s_bytes = Placement.of(cluster, size, stride), np.asarray(n_bytes, dtype=np.float64)
    n, g, k = at.size, at.per_node, at.nodes
    sent = s_bytes * (n - 1) / n
    steps = "messages_in = n - k; messages_across = k - 1; V = S * (n - 1) / n"
    return np.where(n > 1, _links_s(what, cluster, at, s_bytes, n - k, k - 1, sent, sent / g, steps), 0.0)


def reduce_scatter(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "reduce-scatter"
) -> Floats:
    """Every member gets its share S/n of the sum of all; seconds for a buffer of `n_bytes` (S) on each.

    The ring of `all_gather`, run backwards.
    """
    return all_gather(cluster, n_bytes, size, stride, what)


def all_to_all(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "all-to-all"
) -> Floats:
    """Every member sends an equal part of its `n_bytes` (S) to each; seconds, of which S/n stays where it is.

    V = S (g-1)/n inside and S (n-g)/n across, each member through its own port. Messages: g-1 inside, k-1 across, as
    those to the members of one other node overlap. Ignores that parts are uneven where a router decides.
    """
    at, s_bytes = Placement.of(cluster, size, stride), np.asarray(n_bytes, dtype=np.float64)
    n, g, k = at.size, at.per_node, at.nodes
    inside, across = s_bytes * (g - 1) / n, s_bytes * (n - g) / n
    steps = "messages_in = g - 1; messages_across = k - 1; V = S * (g - 1) / n; V_across = S * (n - g) / n"
    return np.where(n > 1, _links_s(what, cluster, at, s_bytes, g - 1, k - 1, inside, across, steps), 0.0)


def point_to_point(
    cluster: Cluster, n_bytes: ArrayLike, size: ArrayLike, stride: ArrayLike = 1, what: str = "send"
) -> Floats:
    """A member sends `n_bytes` (S) to the next one; seconds of the slowest such pair of the group: a + S/B.

    Across nodes as soon as one pair is, each sender through its own port.
    """
    at, s_bytes = Placement.of(cluster, size, stride), np.asarray(n_bytes, dtype=np.float64)
    inside, across = cluster.inside, cluster.across
    near = inside.start_s + inside.latency_s + _saturated(inside, s_bytes) / _bandwidth(inside, np.asarray(2))
    far = across.start_s + across.latency_s + _saturated(across, s_bytes) / across.bytes_per_s
    found = np.where(at.size > 1, np.where(at.nodes > 1, far, near), 0.0)
    if ledger.recording() and np.all(at.size > 1):
        side, link = ("across", across) if np.all(at.nodes > 1) else ("in", inside)
        bandwidth = link.bytes_per_s if side == "across" else _bandwidth(inside, np.asarray(2))
        ledger.note(
            what,
            f"start_s + latency_{side}_s + {_bytes_text('S', side)}",
            found,
            start_s=link.start_s,
            S=s_bytes,
            **_link_inputs(side, link, bandwidth),
        )
    return found


def _links_s(
    what: str,
    cluster: Cluster,
    at: Placement,
    s_bytes: Floats,
    messages_in: ArrayLike,
    messages_across: ArrayLike,
    bytes_in: Floats,
    bytes_across: Floats,
    steps: str,
) -> Floats:
    """Messages one after another, and what an accelerator sends over both kinds of link at once, of which the slower
    bounds; `steps`: how the ledger gets messages and bytes (V, and V_across if not V / g) from n, g, k and S."""
    inside, across = cluster.inside, cluster.across
    near, far = _bandwidth(inside, at.per_node), across.bytes_per_s
    inside_s = np.where(at.per_node > 1, _saturated(inside, bytes_in) / near, 0.0)
    across_s = np.where(at.nodes > 1, _saturated(across, bytes_across) / far, 0.0)
    found = _latency_s(cluster, messages_in, messages_across) + np.maximum(inside_s, across_s)
    if ledger.recording() and np.all(at.size > 1):
        leaves, shares = bool(np.all(at.nodes > 1)), bool(np.all(at.per_node > 1))
        terms = ["start_s"] + ["messages_in * latency_in_s"] * shares + ["messages_across * latency_across_s"] * leaves
        sent = [_bytes_text("V", "in")] * shares + [_bytes_text("V_across", "across")] * leaves
        terms.append(f"max({', '.join(sent)})" if len(sent) > 1 else sent[0])
        if leaves and "V_across" not in steps:
            steps += "; V_across = V / g"
        used = [step for step in steps.split("; ") if shares or "messages_in" not in step]
        used = [step for step in used if leaves or "across" not in step]
        ledger.note(
            what,
            "; ".join([*used, " + ".join(terms)]),
            found,
            "s",
            "cost/collectives.py",
            start_s=across.start_s if np.all(np.asarray(messages_across) > 0) else inside.start_s,
            S=s_bytes,
            n=at.size,
            g=at.per_node,
            k=at.nodes,
            **_link_inputs("in", inside, near),
            **_link_inputs("across", across, far),
        )
    return found


def _bytes_text(sent: str, side: str) -> str:
    """Seconds of so many bytes over a link (`_saturated`), for the ledger."""
    return f"({sent} + half_{side} ** {SATURATION} * {sent} ** {1 - SATURATION:.9g}) / bandwidth_{side}"


def _link_inputs(side: str, link: Link, bandwidth: ArrayLike) -> dict[str, ArrayLike]:
    return {f"latency_{side}_s": link.latency_s, f"half_{side}": link.half_bytes, f"bandwidth_{side}": bandwidth}


def _latency_s(cluster: Cluster, inside: ArrayLike, across: ArrayLike) -> Floats:
    """Of so many messages one after another: start + messages x latency, on both kinds of link."""
    start = np.where(np.asarray(across) > 0, cluster.across.start_s, cluster.inside.start_s)
    return start + np.asarray(inside) * cluster.inside.latency_s + np.asarray(across) * cluster.across.latency_s


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
